"""A model from files: every parameter assigned exactly once, or one error that lists every misfit.

The model is built on the meta device, where nothing is allocated. What the loader does not assign stays
there and cannot compute, so no stale or random number can pass for a weight.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from openbook.files.errors import printable
from openbook.model import Decoder
from openbook.sources import Source, resolve
from openbook.spec.model import Head, ModelSpec, SpecError
from openbook.weights.dialects import Identity, Place
from openbook.weights.fit import check_fit
from openbook.weights.tensors import PLAIN, Stored, Tensors, is_finite, kept_dtype, open_tensors, torch_dtype
from openbook.weights.verify import MisfitError, check

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total), in bytes of the file."""


class NonFiniteError(ValueError):
    """Weights with NaN or infinity, be it in the file or after conversion. `.names` lists them all."""

    def __init__(self, path: Path, names: Sequence[str], fault: str, remedy: str) -> None:
        self.path, self.names = path, list(names)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        super().__init__(f"{path}: {fault} in {', '.join(map(printable, names[:3]))}{more}: {remedy}")


def load_decoder(
    source: str | Path | Source,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    *,
    quantised: torch.dtype = torch.float32,
    allow_nonfinite: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Decoder:
    """The model of a folder, a .safetensors or a .gguf file, or a fetched model's name.

    `dtype`: as given; else the configuration's; else the file's own, `quantised` if it is. Where
    the file already has it, parameters are views of the mapped file and take no memory of their own.
    The decoder's `spec` is the source's, except that a head which is declared tied, but stored with
    other values than the embedding, is kept as stored, with a warning.

    Raises `MisfitError` naming all tensors that are missing, unexpected, or of a wrong shape or type;
    `NonFiniteError` for NaN and infinity unless `allow_nonfinite`, and always for numbers beyond the
    range of `dtype`; `WontFitError` before allocating, unless `force`; and whatever `sources.resolve`
    and the containers' readers raise.
    """
    source = source if isinstance(source, Source) else resolve(source)
    tensors = open_tensors(source)
    rows = check(source, tensors)
    if misfits := [row for row in rows if not row.ok]:
        raise MisfitError(tensors.path, misfits)
    found = [(row.place, row.stored) for row in rows if row.place and row.stored]
    spec, found = settle_head(source.spec, found, tensors)
    device, dtype = torch.device(device), choose_dtype(dtype, source, found, quantised)
    if not force:
        check_fit(f"this model in {_short(dtype)}", _bytes_to_allocate(found, dtype, device), str(device))

    with torch.device("meta"), _NoInit():
        decoder = Decoder(spec)
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    parameters = _read_all(found, shapes, tensors, dtype, device, allow_nonfinite, progress)
    if spec.head.tied:
        parameters["head.weight"] = parameters["embed.weight"]
    decoder.load_state_dict(parameters, strict=True, assign=True)
    decoder.tie()
    return decoder


class _NoInit(TorchFunctionMode):
    """Leaves new modules' parameters as they are: nothing is there to fill, and on the meta device the
    first `normal_` imports the compiler, which takes longer than loading a small model."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        filling = getattr(func, "__module__", None) == "torch.nn.init"
        return kwargs["tensor"] if filling else func(*args, **kwargs)


Found = tuple[Place, Stored]
"""A tensor of the file and the parameters it holds."""


def settle_head(spec: ModelSpec, found: list[Found], tensors: Tensors) -> tuple[ModelSpec, list[Found]]:
    """A tied head that the file stores all the same is the embedding again, or a matrix of its own."""
    name_of = {name: stored.name for place, stored in found for name in place.parameters}
    if not spec.head.tied or "head.weight" not in name_of:
        return spec, found
    head, embed = name_of["head.weight"], name_of["embed.weight"]
    if torch.equal(tensors.read(head), tensors.read(embed)):
        return spec, [(place, stored) for place, stored in found if stored.name != head]
    log.warning(
        "%s: the head is declared tied, but %s is not %s; keeping it as stored", tensors.path, head, embed
    )
    return spec.replace(head=Head(tied=False, bias=spec.head.bias)), found


# --- dtype --------------------------------------------------------------------------------------


def choose_dtype(
    wanted: torch.dtype | str | None, source: Source, found: Sequence[Found], quantised: torch.dtype
) -> torch.dtype:
    """What was asked for, else what config.json names, else what most numbers of the file have."""
    if wanted:
        return torch_dtype(wanted)
    if configured := source.config.get("dtype") or source.config.get("torch_dtype"):
        try:
            return torch_dtype(str(configured))
        except ValueError as error:
            raise SpecError(f"{source.path}: dtype of the configuration: {error}") from None
    counts: Counter[torch.dtype] = Counter()
    for _, stored in found:
        own = torch_dtype(PLAIN[stored.dtype]) if stored.dtype in PLAIN else quantised
        counts[own] += math.prod(stored.shape)
    return counts.most_common(1)[0][0]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- values -------------------------------------------------------------------------------------

Fault = Literal["nonfinite", "overflow"]


def _read_all(
    found: Sequence[Found],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Tensors,
    dtype: torch.dtype,
    device: torch.device,
    allow_nonfinite: bool,
    progress: Progress | None,
) -> dict[str, Tensor]:
    """Every parameter by name. Tensors are read side by side, since decoding one keeps one core busy."""
    total, done = sum(stored.nbytes for _, stored in found), 0
    in_parts = {name for place, _ in found if place.index is not None for name in place.parameters}
    with torch.inference_mode(False):  # which threads do not inherit
        parameters = {name: torch.empty(shapes[name], dtype=dtype, device=device) for name in in_parts}

    def read(item: Found) -> tuple[dict[str, Tensor], Fault | None]:
        kept = kept_dtype(item[0].parameters[0], dtype)
        parts = _load(item, tensors, kept, device, parameters)
        fault = _fault_of(item, parts, tensors, kept, allow_nonfinite)
        return ({} if item[0].index is not None else parts), fault

    faults: dict[Fault, list[str]] = {"nonfinite": [], "overflow": []}
    with _one_thread_a_tensor() as n_tensors, ThreadPoolExecutor(n_tensors) as pool:
        results = pool.map(read, found)
        for (_, stored), (parts, fault) in zip(found, results, strict=True):
            parameters |= parts
            if fault:
                faults[fault].append(stored.name)
            if progress:
                done += stored.nbytes
                progress("loading", done, total)
    if names := faults["nonfinite"]:
        raise NonFiniteError(tensors.path, names, "NaN or infinity", "get the file again, or allow it")
    if names := faults["overflow"]:
        beyond = f"numbers beyond {torch.finfo(dtype).max:g}, the largest {_short(dtype)}"
        raise NonFiniteError(tensors.path, names, beyond, "take bf16 or fp32")
    return parameters


@contextmanager
def _one_thread_a_tensor() -> Iterator[int]:
    """Gives the number of torch's threads, having told torch to use one: threads that split one small
    operation spend more time waiting for each other than those that work on tensors of their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _load(
    found: Found, tensors: Tensors, dtype: torch.dtype, device: torch.device, whole: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The parameters that one stored tensor holds; or its index of each, written into the `whole` ones."""
    place, stored = found
    values = place.load(tensors.read(stored.name, decoded=dtype))
    if place.index is not None:
        return {name: place.part_of(whole[name]).copy_(part) for name, part in values}
    parts = {name: part.to(device, dtype) for name, part in values}
    if len(parts) > 1:  # slices of one storage look like tied weights to whoever saves them
        parts = {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts.items()}
    return {name: part.contiguous() for name, part in parts.items()}


def _fault_of(
    found: Found, parts: Mapping[str, Tensor], tensors: Tensors, dtype: torch.dtype, allow_nonfinite: bool
) -> Fault | None:
    """What is wrong with the values that were read."""
    if (allow_nonfinite and dtype != torch.float16) or all(map(is_finite, parts.values())):
        return None
    if is_finite(tensors.read(found[1].name)):
        return "overflow"
    return None if allow_nonfinite else "nonfinite"


def _bytes_to_allocate(found: Sequence[Found], dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of all parameters but those that can be the mapped file itself."""
    return sum(
        math.prod(place.shape) * dtype.itemsize
        for place, stored in found
        if not (
            device.type == "cpu"
            and PLAIN.get(stored.dtype) == _short(dtype)
            and isinstance(place.transform, Identity)
            and len(place.parameters) == 1
            and place.index is None
        )
    )
