"""GGUF, the container of llama.cpp: a bounded reader and a streaming writer.

A file is `GGUF`, a version, two counts, typed metadata, a table of tensors, and after padding the
tensors' bytes (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Versions 2 and 3 are read
and 3 is written, both little-endian.

The reader takes no number on trust. Counts are compared with the bytes that remain and with fixed
limits before anything is allocated (a sparse file makes "the bytes that remain" free), sizes are
Python integers that cannot wrap, and no tensor's bytes are touched before the whole header has passed.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from openbook.files.errors import FileError, TruncatedError
from openbook.files.regular import open_regular

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# --- tensor types ---------------------------------------------------------------------------------


class Format(NamedTuple):
    """How GGML stores one type: its number in a file, and the bytes that a block of values takes."""

    number: int
    block: int
    block_bytes: int


FORMATS: dict[str, Format] = {
    "F32": Format(0, 1, 4),
    "F16": Format(1, 1, 2),
    "Q4_0": Format(2, 32, 18),
    "Q4_1": Format(3, 32, 20),
    "Q5_0": Format(6, 32, 22),
    "Q5_1": Format(7, 32, 24),
    "Q8_0": Format(8, 32, 34),
    "Q8_1": Format(9, 32, 40),
    "Q2_K": Format(10, 256, 84),
    "Q3_K": Format(11, 256, 110),
    "Q4_K": Format(12, 256, 144),
    "Q5_K": Format(13, 256, 176),
    "Q6_K": Format(14, 256, 210),
    "Q8_K": Format(15, 256, 292),
    "IQ2_XXS": Format(16, 256, 66),
    "IQ2_XS": Format(17, 256, 74),
    "IQ3_XXS": Format(18, 256, 98),
    "IQ1_S": Format(19, 256, 50),
    "IQ4_NL": Format(20, 32, 18),
    "IQ3_S": Format(21, 256, 110),
    "IQ2_S": Format(22, 256, 82),
    "IQ4_XS": Format(23, 256, 136),
    "I8": Format(24, 1, 1),
    "I16": Format(25, 1, 2),
    "I32": Format(26, 1, 4),
    "I64": Format(27, 1, 8),
    "F64": Format(28, 1, 8),
    "IQ1_M": Format(29, 256, 56),
    "BF16": Format(30, 1, 2),
    "TQ1_0": Format(34, 256, 54),
    "TQ2_0": Format(35, 256, 66),
    "MXFP4": Format(39, 32, 17),
    "NVFP4": Format(40, 64, 36),
    "Q1_0": Format(41, 128, 18),
}
"""Every tensor type that GGML defines. Which of them can be decoded is `weights.quant`'s to say."""

_TYPE_OF_NUMBER = {form.number: name for name, form in FORMATS.items()}
_REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


def tensor_nbytes(shape: Sequence[int], type_name: str) -> int:
    """Bytes of a tensor of `shape` (outermost first) stored as `type_name`.

    Raises `ValueError` for an unknown type, a negative size, and a row that is no whole number of blocks.
    """
    if type_name not in FORMATS:
        raise ValueError(f"no tensor type {type_name!r}; there are {', '.join(FORMATS)}")
    form = FORMATS[type_name]
    if min(shape, default=0) < 0:
        raise ValueError(f"a shape of {list(shape)} has a negative size")
    row = shape[-1] if shape else 1
    if row % form.block:
        raise ValueError(f"a row of {row} values is not a multiple of {type_name}'s block of {form.block}")
    return math.prod(shape) // form.block * form.block_bytes


# --- what a file holds ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file. `shape` is outermost first, as in PyTorch; `offset` counts from byte 0."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose header has been read and checked.

    `metadata` holds plain Python values, `metadata_types` the type each has in the file (such as
    "uint32" or "array[string]"), `tensors` the table in the file's order.

    The bytes stay on disk, memory-mapped, for as long as this object or any view from `data` lives.
    Whoever shortens the file meanwhile ends the process (SIGBUS): replace files, do not rewrite them.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    metadata_types: dict[str, str]
    tensors: dict[str, GgufTensor]
    _map: mmap.mmap = field(repr=False, compare=False)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of tensor `name`: a read-only view of the memory map, shape [nbytes]."""
        import numpy as np

        tensor = self.tensors[name]
        if tensor.nbytes == 0:
            return np.frombuffer(b"", np.uint8)
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read and check the header of `path`; its tensors' bytes are mapped, not read.

    Raises `FileError` for anything that is not a sound GGUF file, and `OSError` where it cannot be
    opened. Time and memory are bounded whatever the file says.
    """
    path = Path(path)
    file, size = open_regular(path)
    with file:
        if size < _FIXED_HEADER:
            raise TruncatedError(path, "", "the file", f"{size} bytes long", "a GGUF file: is it complete?")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    version, metadata, types, tensors = _Parser(path, mapped, size).parse()
    if metadata.get("split.count", 0) not in (0, 1):
        found = f"one of {metadata['split.count']} parts"
        raise FileError(path, "", "the file", found, "a whole model: join it with `llama-gguf-split --merge`")
    return GgufFile(path, version, metadata, types, tensors, mapped)


# --- reading --------------------------------------------------------------------------------------

_FIXED_HEADER = 24
_DEFAULT_ALIGNMENT = 32
_ALIGNMENT_KEY = "general.alignment"

# Far beyond any real file (a vocabulary of 260,000 with merges takes some 15 MB of header), and small
# enough that a hostile one costs seconds and no more than a few hundred megabytes.
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 100_000
MAX_TENSORS = 1_000_000
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 63
MAX_STRING_BYTES = 10_000_000
MAX_ITEMS = 4_000_000
"""Items of all arrays together."""
MAX_DEPTH = 4
MAX_DIMS = 4
ALIGNMENTS = tuple(1 << n for n in range(3, 25))
_INT64_MAX = (1 << 63) - 1

# The least that one of each can take in a file: an empty key's length, its type and one byte; an
# empty name's length, n_dims, no dimensions, type and offset; a string's length; an array's head.
_LEAST_KEY = 8 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 4 + 8
_LEAST_STRING = 8
_LEAST_ARRAY = 4 + 8

VALUE_TYPES = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "float32",
    "bool",
    "string",
    "array",
    "uint64",
    "int64",
    "float64",
)
"""The types of metadata values; the number of each in a file is its place here."""

_SCALARS = {
    "uint8": "B",
    "int8": "b",
    "uint16": "H",
    "int16": "h",
    "uint32": "I",
    "int32": "i",
    "float32": "f",
    "bool": "?",
    "uint64": "Q",
    "int64": "q",
    "float64": "d",
}


class _Parser:
    """One pass over a header. `size` is the length of the whole file, `buffer` at least its header."""

    def __init__(self, path: Path, buffer: mmap.mmap | bytes, size: int) -> None:
        self.path = path
        self.buffer = buffer
        self.size = size
        self.limit = min(size, MAX_HEADER_BYTES)
        self.position = 0
        self.context = ""
        self.items_left = MAX_ITEMS

    def parse(self) -> tuple[int, dict[str, Any], dict[str, str], dict[str, GgufTensor]]:
        """Version, metadata, the metadata's types and the tensors."""
        version, n_tensors, n_keys = self.fixed_header()
        metadata: dict[str, Any] = {}
        types: dict[str, str] = {}
        for i in range(n_keys):
            key = self.key(i, metadata)
            types[key], metadata[key] = self.value()
        alignment = self.alignment(metadata, types)
        tensors: dict[str, GgufTensor] = {}
        for i in range(n_tensors):
            tensor = self.tensor(i, tensors, alignment)
            tensors[tensor.name] = tensor
        return version, metadata, types, self.place(tensors, alignment)

    # The parts of a header, in their order.

    def fixed_header(self) -> tuple[int, int, int]:
        magic = self.take(4, "the magic")
        if magic != b"GGUF":
            self.fail("the magic", repr(magic), "b'GGUF': this is no GGUF file, or a damaged one")
        version = self.u32("the version")
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
                self.fail("the byte order", "big-endian", "a little-endian file: convert the model again")
            self.fail("the version", version, "2 or 3")
        n_tensors = self.count("the number of tensors", MAX_TENSORS, _LEAST_TENSOR)
        n_keys = self.count("the number of metadata keys", MAX_KEYS, _LEAST_KEY)
        return version, n_tensors, n_keys

    def key(self, index: int, seen: Mapping[str, Any]) -> str:
        self.context = f"metadata {index}"
        key = self.string("the key", MAX_KEY_BYTES)
        if not key or key in seen:
            self.fail("the key", f"{key!r}, seen before" if key else "empty", "a name of its own")
        self.context = f"metadata {key!r}"
        return key

    def value(self) -> tuple[str, Any]:
        """The type and the value of one metadata key."""
        value_type = self.value_type("the value type")
        if value_type == "string":
            return value_type, self.string("the string", MAX_STRING_BYTES)
        if value_type == "array":
            item_type, items = self.array(MAX_DEPTH)
            return f"array[{item_type}]", items
        return value_type, self.scalars(value_type, 1)[0]

    def array(self, depth: int) -> tuple[str, list[Any]]:
        item_type = self.value_type("the array's item type")
        least = _LEAST_STRING if item_type == "string" else _LEAST_ARRAY
        if item_type in _SCALARS:
            least = struct.calcsize("<" + _SCALARS[item_type])
        count = self.count("the array's length", self.items_left, least)
        self.items_left -= count
        if item_type == "string":
            return item_type, self.strings(count)
        if item_type != "array":
            return item_type, self.scalars(item_type, count)
        if depth == 1:
            self.fail("the nesting of arrays", f"deeper than {MAX_DEPTH}", f"at most {MAX_DEPTH}")
        return item_type, [self.array(depth - 1)[1] for _ in range(count)]

    def alignment(self, metadata: Mapping[str, Any], types: Mapping[str, str]) -> int:
        if _ALIGNMENT_KEY not in metadata:
            return _DEFAULT_ALIGNMENT
        self.context = f"metadata {_ALIGNMENT_KEY!r}"
        if types[_ALIGNMENT_KEY] != "uint32":
            self.fail("the value type", types[_ALIGNMENT_KEY], "uint32")
        alignment = metadata[_ALIGNMENT_KEY]
        if alignment not in ALIGNMENTS:
            self.fail("the alignment", alignment, f"a power of two from 8 to {ALIGNMENTS[-1]}")
        return alignment

    def tensor(self, index: int, seen: Mapping[str, GgufTensor], alignment: int) -> GgufTensor:
        """One row of the table; its offset still counts from the start of the data."""
        self.context = f"tensor {index}"
        name = self.string("the name", MAX_NAME_BYTES)
        if not name or name in seen:
            self.fail("the name", f"{name!r}, seen before" if name else "empty", "a name of its own")
        self.context = f"tensor {name!r}"
        shape = self.shape()
        type_number = self.u32("the type")
        if type_number not in _TYPE_OF_NUMBER:
            if removed := _REMOVED.get(type_number):
                found = f"{type_number} ({removed}, removed from GGML)"
                self.fail("the type", found, "a type still in use: convert the model again")
            self.fail("the type", type_number, "a GGML tensor type")
        type_name = _TYPE_OF_NUMBER[type_number]
        try:
            nbytes = tensor_nbytes(shape, type_name)
        except ValueError:
            block = FORMATS[type_name].block
            self.fail("the row length", shape[-1:], f"a multiple of {block}, the block of {type_name}")
        offset = self.u64("the offset")
        if offset % alignment:
            self.fail("the offset", offset, f"a multiple of the alignment {alignment}")
        return GgufTensor(name, shape, type_name, offset, nbytes)

    def shape(self) -> tuple[int, ...]:
        """Outermost first; a file has it innermost first."""
        n_dims = self.u32("the number of dimensions")
        if n_dims > MAX_DIMS:
            self.fail("the number of dimensions", n_dims, f"at most {MAX_DIMS}")
        raw = self.take(8 * n_dims, "the shape")
        shape = struct.unpack(f"<{n_dims}Q", raw)[::-1]
        if max(shape, default=0) > _INT64_MAX or math.prod(n or 1 for n in shape) > _INT64_MAX:
            self.fail("the shape", list(shape), "fewer than 2^63 values")
        return shape

    def place(self, tensors: Mapping[str, GgufTensor], alignment: int) -> dict[str, GgufTensor]:
        """The tensors at their places in the file, each inside it and none upon another."""
        start = self.position + -self.position % alignment
        placed = {
            t.name: GgufTensor(t.name, t.shape, t.type, start + t.offset, t.nbytes) for t in tensors.values()
        }
        end, before = start, ""
        for tensor in sorted((t for t in placed.values() if t.nbytes), key=lambda t: t.offset):
            self.context = f"tensor {tensor.name!r}"
            if tensor.offset < end:
                self.fail("the start", f"byte {tensor.offset}", f"byte {end} or later, where {before!r} ends")
            end, before = tensor.offset + tensor.nbytes, tensor.name
            if end > self.size:
                self.truncated(f"at least {end}: is it complete?")
        return placed

    # The primitives: each looks before it takes.

    def fail(self, what: str, found: object, expected: object) -> NoReturn:
        raise FileError(self.path, self.where(), what, found, expected)

    def truncated(self, expected: str) -> NoReturn:
        raise TruncatedError(self.path, self.where(), "the file", f"{self.size} bytes long", expected)

    def where(self) -> str:
        return f"{self.context} near byte {self.position}" if self.context else f"byte {self.position}"

    def take(self, n: int, what: str) -> bytes:
        end = self.position + n
        if end > self.size:
            self.truncated(f"at least {end}, to hold {what}")
        if end > self.limit:
            self.fail("the header", f"longer than {self.limit} bytes", f"at most {self.limit}")
        raw = self.buffer[self.position : end]
        self.position = end
        return raw

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, most: int, least_bytes: int) -> int:
        """A number of things to come, each of which takes at least `least_bytes`."""
        count = self.u64(what)
        room = (self.limit - self.position) // least_bytes
        if count > most:
            self.fail(what, count, f"at most {most}")
        if count > room:
            self.fail(what, count, f"at most {room}, for which there are bytes")
        return count

    def value_type(self, what: str) -> str:
        number = self.u32(what)
        if number >= len(VALUE_TYPES):
            self.fail(what, number, f"0 to {len(VALUE_TYPES) - 1}")
        return VALUE_TYPES[number]

    def scalars(self, value_type: str, count: int) -> list[Any]:
        layout = f"<{count}{_SCALARS[value_type]}"
        raw = self.take(struct.calcsize(layout), f"a {value_type}")
        if value_type == "bool" and (wrong := raw.translate(None, b"\0\1")):
            self.fail("a bool", wrong[0], "0 or 1")
        return list(struct.unpack(layout, raw))

    def string(self, what: str, longest: int) -> str:
        length = self.u64(f"the length of {what}")
        if length > longest:
            self.fail(f"the length of {what}", length, f"at most {longest}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            self.fail(what, f"not UTF-8 ({error.reason})", "UTF-8 text")

    def strings(self, count: int) -> list[str]:
        """`count` strings. A vocabulary has hundreds of thousands, so the loop calls nothing of ours."""
        buffer, limit, end = self.buffer, self.limit, self.position
        strings = []
        from_bytes = int.from_bytes
        try:
            for _ in range(count):
                start = end + 8
                length = from_bytes(buffer[end:start], "little")
                if length > MAX_STRING_BYTES or start + length > limit:
                    self.position = end
                    self.string(f"item {len(strings)} of the array", MAX_STRING_BYTES)  # raises, saying why
                end = start + length
                strings.append(buffer[start:end].decode())
        except UnicodeDecodeError as error:
            self.position = end
            self.fail(f"item {len(strings)} of the array", f"not UTF-8 ({error.reason})", "UTF-8 text")
        self.position = end
        return strings


# --- writing --------------------------------------------------------------------------------------


class Typed(NamedTuple):
    """A metadata value with the type it shall have in the file: `Typed(7, "uint64")`.

    Types are those of `VALUE_TYPES`; an array's is "array[uint8]" and so on.
    """

    value: Any
    type: str


TensorToWrite = tuple[str, Sequence[int], str, Any]
"""Name, shape (outermost first), type, and the bytes: bytes-like, or a function that returns such."""


def write_gguf(
    path: str | os.PathLike[str], metadata: Mapping[str, Any], tensors: Iterable[TensorToWrite]
) -> None:
    """Write a GGUF file (version 3).

    `metadata` maps keys to bools, ints, floats, strings and lists of these. Without `Typed` an int is
    written as uint32 (int32 where negative, 64 bits where needed), a float as float32, and a list of
    ints as int32, as llama.cpp's own files have them. "general.alignment" sets the alignment, else 32.

    `tensors` gives name, shape (outermost first), type and bytes of each. Instead of the bytes (C
    order) it may give a function that makes them, called when their turn comes, so that one tensor at
    a time is in memory.

    The header is read back by the reader's own rules before anything is written, and the file appears
    under its name only when complete. Raises `FileError` for what no reader would accept and
    `ValueError` for values that do not fit their type or bytes that do not fit their shape.
    """
    path = Path(path)
    rows = list(tensors)
    alignment = _untyped(metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT))
    if alignment not in ALIGNMENTS:
        raise ValueError(f"an alignment of {alignment} is not a power of two from 8 to {ALIGNMENTS[-1]}")
    header = _encode_header(path, metadata, rows, alignment)

    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(header)
            for row in rows:
                file.write(_tensor_bytes(row))
                file.write(b"\0" * (-file.tell() % alignment))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _tensor_bytes(row: TensorToWrite) -> memoryview:
    name, shape, type_name, data = row
    made: Any = data() if callable(data) else data
    raw = memoryview(made)
    nbytes = tensor_nbytes(shape, type_name)
    if raw.nbytes != nbytes:
        raise ValueError(f"{name} has {raw.nbytes} bytes, but {type_name} {list(shape)} takes {nbytes}")
    return raw


def _encode_header(
    path: Path, metadata: Mapping[str, Any], rows: Sequence[TensorToWrite], alignment: int
) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(rows), len(metadata))]
    for key, value in metadata.items():
        value, value_type = value if isinstance(value, Typed) else (value, _default_type(key, value))
        parts += [_encode_string(key), *_encode_value(key, value, value_type)]
    offset = 0
    for name, shape, type_name, _ in rows:
        nbytes = tensor_nbytes(shape, type_name)
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [_encode_string(name), dims, struct.pack("<IQ", FORMATS[type_name].number, offset)]
        offset += nbytes + -nbytes % alignment
    header = b"".join(parts)
    padded = header + b"\0" * (-len(header) % alignment)
    _Parser(path, padded, len(padded) + offset).parse()
    return padded


def _encode_value(key: str, value: Any, value_type: str) -> Iterator[bytes]:
    outer, _, item_type = value_type.removesuffix("]").partition("[")
    single = item_type or outer
    if (outer == "array") != bool(item_type) or single not in (*_SCALARS, "string"):
        raise ValueError(f"metadata {key!r} cannot be written as {value_type}")
    yield struct.pack("<I", VALUE_TYPES.index(outer))
    if outer == "array":
        yield struct.pack("<IQ", VALUE_TYPES.index(item_type), len(value))
    items = value if outer == "array" else [value]
    if single == "string":
        yield from map(_encode_string, items)
    else:
        yield _encode_scalars(key, items, single)


def _encode_scalars(key: str, values: Sequence[Any], value_type: str) -> bytes:
    try:
        return struct.pack(f"<{len(values)}{_SCALARS[value_type]}", *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"metadata {key!r} does not fit {value_type}: {error}") from None


def _encode_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _untyped(value: Any) -> Any:
    return value.value if isinstance(value, Typed) else value


def _default_type(key: str, value: Any) -> str:
    """The type that llama.cpp's converter would write for a Python value."""
    match value:
        case bool():
            return "bool"
        case str():
            return "string"
        case float():
            return "float32"
        case int():
            return _smallest(key, [value], ("uint32", "int32", "uint64", "int64"))
        case [first, *_]:
            if isinstance(first, int) and not isinstance(first, bool):
                return f"array[{_smallest(key, value, ('int32', 'uint32', 'int64', 'uint64'))}]"
            return f"array[{_default_type(key, first)}]"
        case []:
            raise ValueError(f"metadata {key!r} is an empty list, which has no type: wrap it in Typed")
    raise ValueError(f"metadata {key!r} is a {type(value).__name__}, which GGUF has no type for")


def _smallest(key: str, values: Sequence[int], candidates: Sequence[str]) -> str:
    low, high = min(values), max(values)
    for name in candidates:
        bits = 8 * struct.calcsize("<" + _SCALARS[name])
        least, most = (0, 1 << bits) if name.startswith("u") else (-1 << bits - 1, 1 << bits - 1)
        if least <= low and high < most:
            return name
    raise ValueError(f"metadata {key!r} holds an integer beyond 64 bits")
