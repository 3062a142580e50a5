"""A GGUF file's metadata ⇄ spec.

Keys are those of llama.cpp ("llama.block_count"). What the metadata does not say, the tensors do: a
tied head is one without `output.weight`, biases are there or not, and Llama 3.1's scaling is kept as
the numbers of `rope_freqs.weight`. An architecture is a row of `ARCHITECTURES`.

A model has the same spec in both formats, so a spec says what the weights are in Hugging Face's
arrangement, and `weights` undoes what a GGUF file does to them: llama-architecture files pair
neighbours in the rotation, and have the rows of q and k reordered for it (`half` in the spec); Gemma's
files hold 1 + w for the weights w of its norms (an offset of 1 in the spec).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from openbook.spec.gguf.architecture import BIASES, Architecture
from openbook.spec.gguf.architectures import ARCHITECTURES, OF_MODEL_TYPE
from openbook.spec.gguf.reading import read_spec
from openbook.spec.gguf.rope import ROPE_TENSORS, rope_tensors
from openbook.spec.gguf.shown import Shapes, Shown
from openbook.spec.gguf.writing import ACTIVATION, GELUS, write_metadata
from openbook.spec.model import Activation, ModelSpec, SpecError
from openbook.spec.reader import Reader, UnsupportedError, show
from openbook.spec.writer import Written, express

__all__ = [
    "ARCHITECTURES", "BIASES", "OF_MODEL_TYPE", "ROPE_TENSORS",
    "from_metadata", "rope_tensors", "to_metadata",
]  # fmt: skip


def from_metadata(
    metadata: Mapping[str, Any],
    tensors: Shapes | None = None,
    numbers: Mapping[str, Sequence[float]] | None = None,
) -> ModelSpec:
    """The model that a GGUF file describes.

    `tensors` are the file's names and shapes (outermost first), `numbers` the values of those of
    `ROPE_TENSORS` that it has. Without `tensors` an untied head is assumed, and nothing of what the
    architecture can do without.

    Raises `UnsupportedError` for an architecture or feature that is not supported, and `SpecError` for a
    value that cannot be or a key that nobody knows.
    """
    arch = _architecture_of(metadata)
    if tensors is None:
        tensors = {"output.weight": ()}
    numbers = numbers or {}
    for name in ROPE_TENSORS:
        if name in tensors and name not in numbers:
            raise SpecError(f"the file has {name}, whose numbers are needed: pass them as numbers")
    return _from_metadata(arch, metadata, Shown.in_file(tensors, numbers))


def to_metadata(spec: ModelSpec, model_type: str = "") -> dict[str, Any]:
    """Metadata with which llama.cpp reads the model.

    The architecture is that of Hugging Face's `model_type`, if it is given and can hold the model, or
    else the first that can. Some parts of a spec are not in it: the head and whatever else the tensors
    show, and `rope_tensors(spec)`, which are to be written as tensors. llama.cpp runs some
    architectures without the windows that a file states (llama, qwen2, phi3, starcoder2). Raises
    `UnsupportedError`, naming the feature, for a model that no supported architecture can hold.
    """
    shown = Shown.in_spec(spec)

    def way(arch: Architecture) -> Callable[[], Written[dict[str, Any]]]:
        def write() -> Written[dict[str, Any]]:
            metadata = write_metadata(arch, spec)
            return metadata, _from_metadata(arch, metadata, shown)

        return write

    def first_of(names: Iterable[str]) -> dict[str, Any]:
        return express(spec, {name: way(ARCHITECTURES[name]) for name in names}, "GGUF architecture", _SINGLE)

    own = OF_MODEL_TYPE.get(model_type, model_type)
    try:
        return first_of(sorted(ARCHITECTURES, key=lambda name: name != own))
    except UnsupportedError as error:
        if own in ARCHITECTURES:
            return first_of([own])  # which says what the model's own architecture lacks
        if own:
            lacking = f"GGUF has no architecture for {show(model_type)} models: {error}"
            raise UnsupportedError(lacking) from None
        raise


_SINGLE = 1e-6
"""A number in a GGUF file has 32 bits: this much of it is kept."""


def _architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    name = Reader(metadata, "metadata").text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"general.architecture {show(name)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _read_activation(arch: Architecture, c: Reader) -> Activation:
    """A key of our own tells GELU from its approximation, which llama.cpp computes in either case."""
    stated = c.maybe_text(ACTIVATION)
    if stated is None:
        return arch.activation
    if stated not in GELUS or arch.activation not in GELUS:
        kinds = ", ".join(GELUS)
        c.fail(ACTIVATION, f"must be one of {kinds}, for a model that has a GELU, found {show(stated)}")
    return GELUS[stated]


_IRRELEVANT = ("general.", "tokenizer.", "split.", "quantize.")
"""Prefixes of keys about the file, the text and the types of its tensors."""

_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "attention.causal": ((True,), "Openbook holds causal models"),
    "use_parallel_residual": ((False,), "this architecture adds one part after the other"),
    "rope.scaling.yarn_ext_factor": ((-1.0, 1.0), "only the whole ramp is supported"),
    "rope.dimension_sections": ((), "positions in several dimensions are not supported"),
}
"""Keys that do shape a model: the values under which they change nothing, and why no others."""

_NOTES = ("tensor_data_layout", "rope.scaling.finetuned", "pooling_type")
"""Keys within an architecture that do not shape the model."""

_NORM_KEYS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
"""A converter may write both for a norm's eps; the architecture has one kind of norm."""


def _from_metadata(arch: Architecture, metadata: Mapping[str, Any], shown: Shown) -> ModelSpec:
    whole = Reader(metadata, "metadata")
    whole.ignore([ACTIVATION], prefixes=(*_IRRELEVANT, f"{arch.name}."))
    whole.finish(f"a {arch.name} file has none such: remove it if the model does not depend on it")

    prefix = f"{arch.name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    reader = Reader(own, arch.name)
    arch = replace(arch, activation=_read_activation(arch, whole))
    spec = read_spec(arch, reader, metadata, shown)
    used_elsewhere = {"use_parallel_residual"} if arch.choose_residual == "by_key" else set()
    for key, (allowed, why) in _ONLY.items():
        if key not in used_elsewhere:
            reader.only(key, allowed, why)
    reader.ignore((*_NOTES, *_NORM_KEYS))
    reader.finish("this architecture has no such key: remove it if the model does not depend on it")
    return spec
