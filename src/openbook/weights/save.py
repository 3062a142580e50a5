"""A model into files that other programs read: a Hugging Face folder, or a GGUF file.

Each appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from openbook.files.gguf import FORMATS, write_gguf
from openbook.ledger import ledger
from openbook.model import Decoder
from openbook.spec.gguf import ROPE_FREQS, rope_freqs, to_metadata
from openbook.spec.hf import to_config
from openbook.spec.model import ModelSpec
from openbook.weights.dialects import GGUF, HF, Dialect, Place, places
from openbook.weights.quant import quantize
from openbook.weights.tensors import PLAIN, is_finite, torch_dtype


def save_hf(
    decoder: Decoder,
    folder: str | Path,
    dtype: torch.dtype | str | None = None,
    shard_bytes: int = 5_000_000_000,
    config: Mapping[str, Any] | None = None,
    extra_files: Iterable[str | Path] = (),
) -> None:
    """Writes config.json and model.safetensors (or shards and an index), as transformers loads them.

    `dtype` None keeps the model's own. `config` adds keys to those that the spec gives, such as token
    ids; `extra_files`, such as a tokenizer's, are copied beside them.

    Raises `UnsupportedError` for a model that no Hugging Face family describes, `FileExistsError` for a
    folder that already holds something, `OverflowError` for a number beyond the range of `dtype`.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose another folder, or remove it first")
    about = to_config(decoder.spec)
    dtype = torch_dtype(dtype) if dtype is not None else decoder.embed.weight.dtype
    about["torch_dtype"] = str(dtype).removeprefix("torch.")

    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        _write_shards(decoder, HF[about["model_type"]], dtype, shard_bytes, part)
        for file in extra_files:
            shutil.copy(file, part)
        _write_json(part / "config.json", {**about, **(config or {})})
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_shards(
    decoder: Decoder, dialect: Dialect, dtype: torch.dtype, shard_bytes: int, folder: Path
) -> None:
    shards = _split(_places(decoder.spec, dialect), dtype.itemsize, shard_bytes)
    shard_of: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        tensors = {place.stored: _stored(place, decoder, dtype) for place in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        size = sum(math.prod(place.shape) for shard in shards for place in shard) * dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": shard_of}
        _write_json(folder / "model.safetensors.index.json", index)


def _split(places: Iterable[Place], itemsize: int, most: int) -> list[list[Place]]:
    """Runs of tensors of at most `most` bytes together; a larger tensor has a shard of its own."""
    shards: list[list[Place]] = [[]]
    room = most
    for place in places:
        nbytes = math.prod(place.shape) * itemsize
        if nbytes > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(place)
        room -= nbytes
    return shards


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def save_gguf(
    decoder: Decoder, path: str | Path, dtype: str = "F16", metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes a GGUF file whose matrices have the `dtype` F32, F16, BF16, Q8_0, Q4_0 or Q4_1.

    Norms and biases stay F32, as in llama.cpp's own files, and so does a matrix whose rows are no
    whole number of blocks. `metadata` adds keys to those that the spec gives, such as a tokenizer's.
    Raises `UnsupportedError` for a model that the format cannot describe, `ValueError` for an unknown type
    and `OverflowError` for numbers beyond the range of `dtype`.
    """
    if dtype not in WRITABLE:
        raise ValueError(f"cannot write weights as {dtype}: use one of {', '.join(WRITABLE)}")
    about = to_metadata(decoder.spec)
    dialect = GGUF[about["general.architecture"]]
    write_gguf(path, {**about, **(metadata or {})}, _gguf_tensors(decoder, dialect, dtype))


WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")

GgufTensor = tuple[str, tuple[int, ...], str, Callable[[], Any]]
"""Name, shape, type, and what makes the bytes when their turn comes."""


def _gguf_tensors(decoder: Decoder, dialect: Dialect, dtype: str) -> Iterator[GgufTensor]:
    if divisors := rope_freqs(decoder.spec):
        yield ROPE_FREQS, (len(divisors),), "F32", partial(np.array, divisors, "<f4")
    for place in _places(decoder.spec, dialect):
        fits = len(place.shape) > 1 and place.shape[-1] % FORMATS[dtype].block == 0
        kept = dtype if fits else "F32"
        yield place.stored, place.shape, kept, partial(_encoded, place, decoder, kept)


def _encoded(place: Place, decoder: Decoder, dtype: str) -> np.ndarray:
    """The bytes of one tensor in a GGUF type."""
    return quantize(_stored(place, decoder, torch_dtype(PLAIN.get(dtype, "float32"))), dtype)


# --- one tensor ---------------------------------------------------------------------------------


def _places(spec: ModelSpec, dialect: Dialect) -> list[Place]:
    """Where everything goes; a tied head is not written a second time."""
    return places(spec, {row.name: row.shape for row in ledger(spec).tensors if row.tie is None}, dialect)


@torch.no_grad()
def _stored(place: Place, decoder: Decoder, dtype: torch.dtype) -> Tensor:
    """The container's tensor, in its arrangement and on the CPU."""
    parts = [decoder.get_parameter(name).detach() for name in place.parameters]
    parts = parts if place.index is None else [part[place.index] for part in parts]
    joined = torch.cat(parts, dim=place.axis) if len(parts) > 1 else parts[0]
    tensor = place.transform.store(joined).to("cpu", dtype).contiguous()
    if not is_finite(tensor) and is_finite(joined):
        raise OverflowError(f"{place.stored} holds numbers beyond the range of {dtype}: take bf16 or fp32")
    return tensor
