"""A model into a Hugging Face folder, which appears under its name only when it is complete."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from openbook.ledger import ledger
from openbook.spec.hf import to_config
from openbook.spec.model import ModelSpec, to_dict
from openbook.weights.dialects import HF, OWN, Dialect, Place, places
from openbook.weights.tensors import is_finite, kept_dtype, torch_dtype

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total), in bytes of the new files."""


class Parameters(Protocol):
    """A decoder, or what has the parameters of one."""

    @property
    def spec(self) -> ModelSpec: ...

    def get_parameter(self, name: str, /) -> Tensor: ...


def save_hf(
    decoder: Parameters,
    folder: str | Path,
    dtype: torch.dtype | str | None = None,
    shard_bytes: int = 5_000_000_000,
    config: Mapping[str, Any] | None = None,
    extra_files: Iterable[str | Path] = (),
    model_type: str = "",
    progress: Progress | None = None,
) -> None:
    """Writes config.json and model.safetensors (or shards and an index), as transformers loads them.

    `dtype` None keeps the model's own. `config` adds keys to those that the spec gives, such as token
    ids; `extra_files`, such as a tokenizer's, are copied beside them. `model_type` chooses among families
    that can express the model. Calls `progress("writing", bytes_done, bytes_in_all)`.

    Raises `UnsupportedError` for a model that no Hugging Face family describes, `FileExistsError` for a
    folder that already holds something, `OverflowError` for a number beyond the range of `dtype`.
    """
    about = to_config(decoder.spec, model_type)
    dtype = torch_dtype(dtype) if dtype is not None else decoder.get_parameter("embed.weight").dtype
    dialect = HF[about["model_type"]]
    about |= {"torch_dtype": str(dtype).removeprefix("torch."), **(config or {})}
    _write_folder(decoder, folder, dialect, about, dtype, shard_bytes, extra_files, progress)


def save_own(
    decoder: Parameters,
    folder: str | Path,
    shard_bytes: int = 5_000_000_000,
    extra_files: Iterable[str | Path] = (),
) -> None:
    """The same folder in our own form, for a model that no Hugging Face family describes: config.json is the
    spec, the tensors have the ledger's names. `openbook.load` reads it; transformers cannot.

    Raises `FileExistsError` for a folder that already holds something.
    """
    dtype = decoder.get_parameter("embed.weight").dtype
    _write_folder(decoder, folder, OWN, to_dict(decoder.spec), dtype, shard_bytes, extra_files, None)


def _write_folder(
    decoder: Parameters,
    folder: str | Path,
    dialect: Dialect,
    about: Mapping[str, Any],
    dtype: torch.dtype,
    shard_bytes: int,
    extra_files: Iterable[str | Path],
    progress: Progress | None,
) -> None:
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose another folder, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        _write_shards(decoder, dialect, dtype, shard_bytes, part, progress)
        for file in extra_files:
            shutil.copy(file, part)
        _write_json(part / "config.json", about)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_shards(
    decoder: Parameters,
    dialect: Dialect,
    dtype: torch.dtype,
    shard_bytes: int,
    folder: Path,
    progress: Progress | None,
) -> None:
    shards = _split(stored_places(decoder.spec, dialect), dtype, shard_bytes)
    total, done = sum(_nbytes(place, dtype) for shard in shards for place in shard), 0
    shard_of: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        tensors = {place.stored: stored_tensor(place, decoder, _dtype_of(place, dtype)) for place in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(tensors, name)
        done += sum(_nbytes(place, dtype) for place in shard)
        if progress:
            progress("writing", done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": shard_of}
        _write_json(folder / "model.safetensors.index.json", index)


def _split(places: Iterable[Place], dtype: torch.dtype, most: int) -> list[list[Place]]:
    """Runs of tensors of at most `most` bytes together; a larger tensor has a shard of its own."""
    shards: list[list[Place]] = [[]]
    room = most
    for place in places:
        nbytes = _nbytes(place, dtype)
        if nbytes > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(place)
        room -= nbytes
    return shards


def _dtype_of(place: Place, dtype: torch.dtype) -> torch.dtype:
    return kept_dtype(place.parameters[0], dtype)


def _nbytes(place: Place, dtype: torch.dtype) -> int:
    return math.prod(place.shape) * _dtype_of(place, dtype).itemsize


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# --- one tensor, of any container ---------------------------------------------------------------


def stored_places(spec: ModelSpec, dialect: Dialect) -> list[Place]:
    """Where everything goes; a tied head is not written a second time."""
    return places(spec, {row.name: row.shape for row in ledger(spec).tensors if row.tie is None}, dialect)


@torch.no_grad()
def stored_tensor(place: Place, decoder: Parameters, dtype: torch.dtype) -> Tensor:
    """The container's tensor, in its arrangement and on the CPU."""
    parts = [place.part_of(decoder.get_parameter(name).detach()) for name in place.parameters]
    joined = torch.cat(parts, dim=place.axis) if len(parts) > 1 else parts[0]
    # Converted first: a transform that computes has to do so in the container's type.
    tensor = place.transform.store(joined.to("cpu", dtype)).contiguous()
    if not is_finite(tensor) and is_finite(joined):
        raise OverflowError(f"{place.stored} holds numbers beyond the range of {dtype}: take bf16 or fp32")
    return tensor
