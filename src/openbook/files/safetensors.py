"""safetensors: one file, or shards joined by an index.

The safetensors library reads the tensors; this module reads the headers first, since the library lets
duplicate keys pass and says little about what is wrong (https://github.com/huggingface/safetensors).
A header is a length, JSON naming each tensor's dtype, shape and bytes, and then those bytes, packed
without holes up to the end of the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from openbook.files.errors import FileError, TruncatedError, printable
from openbook.files.regular import open_regular
from openbook.files.strict_json import kind_of, parse_object

if TYPE_CHECKING:
    import torch

DTYPES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes of one value of each dtype that is read."""

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_COMMAS = 1_000_000
"""Bounds the number of JSON values before they are built; a header of 160,000 matrices has fewer."""
MAX_DIMS = 8
MAX_NAME_LENGTH = 1000
_INT64_MAX = (1 << 63) - 1

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = (
    "safetensors (a pickle can run code): where you trust it, convert with transformers, "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its `shape` outermost first, its `dtype` as the file has it ("BF16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFiles:
    """The tensors of one file or of all shards, their headers checked."""

    path: Path
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    _open: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    def get(self, name: str) -> torch.Tensor:
        """Tensor `name`, lazily paged in from its file. Copy it before writing to it.

        Needs torch. Raises `KeyError` for a name that is not there.
        """
        tensor = self.tensors[name]
        if tensor.file not in self._open:
            self._open[tensor.file] = _library_open(tensor.file)
        try:
            return self._open[tensor.file].get_tensor(name)
        except Exception as error:  # the library's own, or that of a torch without the dtype
            raise FileError(tensor.file, f"tensor {name!r}", "the data", error, tensor.dtype) from error


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFiles:
    """Open a .safetensors file, an index of shards, or a folder that holds either.

    Every header is checked before the safetensors library sees a file. Raises `FileError`, or `OSError`
    where a file cannot be opened.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix in _PICKLES:
        raise FileError(path, "", "the file", "a pickle", _CONVERT)
    if path.suffix == ".json":
        return _open_index(path)
    tensors, metadata = read_header(path)
    return SafetensorsFiles(path, tensors, metadata)


def _in_folder(folder: Path) -> Path:
    for name in (_SINGLE, _INDEX):
        if os.path.lexists(folder / name):
            return folder / name
    refuse_pickles(folder)
    names = sorted(entry.name for entry in folder.iterdir())
    found = f"one with {', '.join(names[:5])}{' and more' * (len(names) > 5)}" if names else "empty"
    raise FileError(folder, "", "the folder", found, f"one with {_SINGLE} or {_INDEX}")


def refuse_pickles(folder: Path) -> None:
    """Raises `FileError`, saying how to convert them, if there are pickled weights in the folder."""
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(_PICKLES))
    if pickles:
        raise FileError(folder, "", "the folder", f"one with {', '.join(pickles[:3])}", _CONVERT)


def _library_open(path: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise FileError(path, "", "the file", error, "one that the safetensors library reads") from error


# --- one file -------------------------------------------------------------------------------------


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of one file, in its order, and its `__metadata__`; every number checked."""
    file, size = open_regular(path)
    with file:
        if size < 8:
            raise TruncatedError(path, "", "the file", f"{size} bytes long", "at least 8: is it complete?")
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise FileError(path, "byte 0", "the header's length", length, f"at most {MAX_HEADER_BYTES}")
        if 8 + length > size:
            expected = f"at least {8 + length}: is it complete?"
            raise TruncatedError(path, "", "the file", f"{size} bytes long", expected)
        raw = file.read(length)

    if not raw.startswith(b"{"):
        raise FileError(path, "byte 8", "the header", repr(raw[:20]), "a JSON object from its first byte on")
    header = _read_json(path, raw, "the header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise FileError(path, "__metadata__", "the value", kind_of(metadata), "an object of strings")
    spans = {name: _read_tensor(path, name, info) for name, info in header.items()}
    _check_packed(path, spans.values(), 8 + length, size)
    return {name: tensor for name, (tensor, _, _) in spans.items()}, metadata


Span = tuple[StoredTensor, int, int]
"""A tensor with where it begins and ends in the data that follow the header."""


def _read_tensor(path: Path, name: str, info: Any) -> Span:
    def fail(what: str, found: object, expected: object) -> NoReturn:
        raise FileError(path, f"tensor {name!r}", what, found, expected)

    if not 0 < len(name) <= MAX_NAME_LENGTH:
        fail("the name's length", len(name), f"1 to {MAX_NAME_LENGTH}")
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(info) if isinstance(info, dict) else kind_of(info)
        fail("the entry", found, "an object of dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        fail("the dtype", repr(dtype), f"one of {', '.join(DTYPES)}")
    if not _naturals(shape) or len(shape) > MAX_DIMS or math.prod(n or 1 for n in shape) > _INT64_MAX:
        fail("the shape", _list_head(shape), f"at most {MAX_DIMS} sizes, in all fewer than 2^63 values")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail("the data_offsets", _list_head(offsets), "where it begins and where it ends")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype]
    if end - begin != nbytes:
        fail("the data_offsets", offsets, f"{nbytes} bytes for {dtype} {shape}")
    return StoredTensor(name, tuple(shape), dtype, path, nbytes), begin, end


def _check_packed(path: Path, spans: Iterable[Span], start: int, size: int) -> None:
    """The tensors follow each other without a hole, from the header's end to the end of the file."""
    position = 0
    for tensor, begin, end in sorted(spans, key=lambda span: span[1:]):
        if begin != position:
            fault = "overlaps its neighbour" if begin < position else "leaves a hole before it"
            where = f"tensor {tensor.name!r}"
            raise FileError(path, where, "the start", f"{begin}, which {fault}", position)
        position = end
    found, expected = f"{size} bytes long", f"{start + position}"
    if start + position > size:
        raise TruncatedError(path, "", "the file", found, f"{expected}: is it complete?")
    if start + position < size:
        raise FileError(path, "", "the file", found, f"{expected}: something follows the last tensor")


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _INT64_MAX for n in value)


def _list_head(value: Any) -> object:
    if isinstance(value, list):
        return f"[{', '.join(printable(item, 40) for item in value[:10])}{', ...' * (len(value) > 10)}]"
    return kind_of(value)


# --- shards ---------------------------------------------------------------------------------------


def _open_index(path: Path) -> SafetensorsFiles:
    shard_of, total_size = _read_index(path)
    shards = {name: path.parent / name for name in sorted(set(shard_of.values()))}
    if missing := [name for name, shard in shards.items() if not shard.exists()]:
        found = f"without {len(missing)} of {len(shards)}: {', '.join(missing)}"
        raise FileError(path, "", "the set of shards", found, "all beside the index")

    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for shard in shards.values():
        in_shard, shard_metadata = read_header(shard)
        if twice := in_shard.keys() & tensors.keys():
            name = min(twice)
            found = f"also in {tensors[name].file.name}"
            raise FileError(shard, f"tensor {name!r}", "the tensor", found, "in one shard only")
        tensors |= in_shard
        metadata |= shard_metadata
    _check_index(path, shard_of, total_size, tensors)
    return SafetensorsFiles(path, tensors, metadata)


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """The shard that the index names for each tensor, and the bytes of all if it tells."""
    file, size = open_regular(path)
    with file:
        if size > MAX_HEADER_BYTES:
            raise FileError(path, "", "the index", f"{size} bytes long", f"at most {MAX_HEADER_BYTES}")
        index = _read_json(path, file.read(MAX_HEADER_BYTES), "the index")
    shard_of = index.get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise FileError(path, "weight_map", "the value", kind_of(shard_of), "an object of file names")
    for name in shard_of.values():
        if not _is_plain_name(name):
            found = repr(name) if isinstance(name, str) else kind_of(name)
            raise FileError(path, "weight_map", "a shard", found, "a plain file name ending in .safetensors")
    metadata = index.get("metadata")
    return shard_of, metadata.get("total_size") if isinstance(metadata, dict) else None


def _is_plain_name(name: Any) -> bool:
    """A file name that leads nowhere else, on any system."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and len(name) <= 255
        and name.isprintable()
        and not name.startswith(".")
        and not set(name) & set("/\\:")
    )


def _check_index(
    path: Path, shard_of: Mapping[str, str], total_size: Any, tensors: Mapping[str, StoredTensor]
) -> None:
    """The index and the shards tell the same of every tensor."""
    stored = {name: tensor.file.name for name, tensor in tensors.items()}
    if absent := [name for name in shard_of if stored.get(name) != shard_of[name]]:
        found = f"naming {_some(absent)}, not in the shard it says"
        raise FileError(path, "weight_map", "the index", found, "what the shards hold")
    if unnamed := [name for name in stored if name not in shard_of]:
        raise FileError(path, "weight_map", "the index", f"without {_some(unnamed)}", "what the shards hold")
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    if total_size is not None and total_size != nbytes:
        raise FileError(path, "metadata", "total_size", total_size, f"{nbytes}, the bytes in the shards")


def _some(names: list[str]) -> str:
    head = ", ".join(printable(name, 60) for name in names[:3])
    return head if len(names) <= 3 else f"{head} and {len(names) - 3} more"


# --- JSON -----------------------------------------------------------------------------------------


def _read_json(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    """An object; nothing large is built of a lie."""
    if (commas := raw.count(b",")) > MAX_COMMAS:
        raise FileError(path, "", what, f"JSON with {commas} commas", f"at most {MAX_COMMAS}")
    return parse_object(path, raw, what)
