"""The GGUF reader against the `gguf` package's writer, its writer against that package's reader, and
the reader against files that lie.

The hostile cases follow llama.cpp's tests/test-gguf.cpp and public reports; each is a few bytes built by
hand, so that nothing here depends on the writer under test.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bounded import bounded_work
from openbook.files import FileError, TruncatedError, Typed, read_gguf, write_gguf
from openbook.files.gguf import FORMATS, MAX_HEADER_BYTES, MAX_ITEMS, VALUE_TYPES, tensor_nbytes

# --- files made by hand ---------------------------------------------------------------------------


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n & (1 << 64) - 1)


def text(s: str | bytes) -> bytes:
    raw = s if isinstance(s, bytes) else s.encode()
    return u64(len(raw)) + raw


def number(value_type: str) -> bytes:
    return u32(VALUE_TYPES.index(value_type))


def uint32_key(key: str | bytes, value: int) -> bytes:
    return text(key) + number("uint32") + u32(value)


def array_key(key: str, item_type: str, count: int, items: bytes = b"") -> bytes:
    return text(key) + number("array") + number(item_type) + u64(count) + items


def tensor(name: str | bytes = "t", dims=(32,), type_number: int = 0, offset: int = 0, n_dims=None) -> bytes:
    """A row of the table; `dims` as in the file, innermost first."""
    n_dims = len(dims) if n_dims is None else n_dims
    return text(name) + u32(n_dims) + b"".join(map(u64, dims)) + u32(type_number) + u64(offset)


def file(
    *parts: bytes,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int = 0,
    n_keys: int = 0,
    data: bytes | None = None,
    alignment: int = 32,
) -> bytes:
    header = magic + u32(version) + u64(n_tensors) + u64(n_keys) + b"".join(parts)
    return header if data is None else header + b"\0" * (-len(header) % alignment) + data


def nested_arrays(depth: int) -> bytes:
    inner = number("uint8") + u64(1) + b"\7"
    for _ in range(depth - 1):
        inner = number("array") + u64(1) + inner
    return text("k") + number("array") + inner


F32, Q4_K = FORMATS["F32"].number, FORMATS["Q4_K"].number
ONE = tensor("t", (32,), F32)  # 128 bytes of data

HOSTILE: dict[str, tuple[bytes, str]] = {
    # name: bytes, and what the error must say
    "empty": (b"", "0 bytes long"),
    "only magic": (b"GGUF", "4 bytes long"),
    "magic": (file(magic=b"GGML"), "the magic is b'GGML'"),
    "version 0": (file(version=0), "the version is 0, expected 2 or 3"),
    "version 1": (file(version=1), "the version is 1"),
    "version of the future": (file(version=4), "the version is 4"),
    "version swapped": (file(version=0x03000000), "the byte order is big-endian"),
    "n_tensors -1": (file(n_tensors=-1), "the number of tensors is 18446744073709551615"),
    "n_keys -1": (file(n_keys=-1), "the number of metadata keys is 18446744073709551615"),
    "more tensors than bytes": (file(n_tensors=1000), "the number of tensors is 1000, expected at most 0"),
    "more keys than bytes": (file(n_keys=3, data=b"\0" * 20), "the number of metadata keys is 3"),
    "key size -1": (file(u64(-1), n_keys=1, data=bytes(64)), "the length of the key"),
    "key beyond the file": (file(u64(90), n_keys=1, data=bytes(64)), "to hold the key"),
    "key empty": (file(uint32_key("", 1), n_keys=1), "the key is empty"),
    "key too long": (file(uint32_key("k" * 65536, 1), n_keys=1), "the length of the key is 65536"),
    "key not UTF-8": (file(uint32_key(b"\xff", 1), n_keys=1), "not UTF-8"),
    "key twice": (file(uint32_key("k", 1), uint32_key("k", 1), n_keys=2), "'k', seen before"),
    "value type": (file(text("k") + u32(13) + bytes(8), n_keys=1), "the value type is 13"),
    "bool of 2": (file(text("k") + number("bool") + b"\2", n_keys=1), "a bool is 2"),
    "value cut off": (file(text("k") + number("float64") + bytes(4), n_keys=1), "to hold a float64"),
    "string beyond the file": (
        file(text("k") + number("string") + u64(9) + b"x", n_keys=1),
        "to hold the str",
    ),
    "string of 2^63": (file(text("k") + number("string") + u64(1 << 63), n_keys=1), "length of the string"),
    "string not UTF-8": (file(text("k") + number("string") + text(b"\xc3("), n_keys=1), "not UTF-8"),
    "array of 2^63, 43 bytes": (file(array_key("k", "uint8", 1 << 63)[:-2], n_keys=1), "the file is"),
    "array of 2^63": (file(array_key("k", "uint8", 1 << 63), n_keys=1), "the array's length is 9223372"),
    "array beyond the file": (file(array_key("k", "int32", 3, bytes(8)), n_keys=1), "at most 2"),
    "array beyond the limit": (
        file(array_key("k", "uint8", MAX_ITEMS + 1, bytes(MAX_ITEMS + 1)), n_keys=1),
        f"at most {MAX_ITEMS}",
    ),
    "two arrays beyond the limit": (
        file(
            array_key("a", "uint8", MAX_ITEMS - 10, bytes(MAX_ITEMS - 10)),
            array_key("b", "uint8", 11, bytes(11)),
            n_keys=2,
        ),
        "at most 10",
    ),
    "array's item type": (file(text("k") + number("array") + u32(99) + u64(0), n_keys=1), "item type is 99"),
    "array's string beyond the file": (
        file(array_key("k", "string", 2, text("a") + u64(7) + b"abc"), n_keys=1),
        "to hold item 1",
    ),
    "array's string of 2^64": (file(array_key("k", "string", 1, u64(-1)), n_keys=1), "length of item 0"),
    "array's string not UTF-8": (
        file(array_key("k", "string", 2, text("a") + text(b"\xff")), n_keys=1),
        "item 1 of the array is not UTF-8",
    ),
    "arrays nested 5 deep": (file(nested_arrays(5), n_keys=1), "nesting of arrays"),
    "arrays nested 10^4 deep": (file(nested_arrays(10**4), n_keys=1), "nesting of arrays"),
    **{
        f"alignment {n}": (
            file(uint32_key("general.alignment", n), ONE, n_keys=1, n_tensors=1, data=bytes(256)),
            f"the alignment is {n}",
        )
        for n in (0, 1, 3, 13, 1 << 31)
    },
    "alignment as int32": (
        file(text("general.alignment") + number("int32") + u32(32), n_keys=1),
        "the value type is int32, expected uint32",
    ),
    "name empty": (file(tensor(""), n_tensors=1, data=bytes(128)), "the name is empty"),
    "name of 64 bytes": (file(tensor("n" * 64), n_tensors=1, data=bytes(128)), "length of the name is 64"),
    "name twice": (
        file(ONE, tensor("t", (32,), F32, 128), n_tensors=2, data=bytes(256)),
        "'t', seen before",
    ),
    "5 dimensions": (file(tensor(dims=(1,) * 5), n_tensors=1, data=bytes(128)), "dimensions is 5"),
    "10^6 dimensions": (file(tensor(n_dims=10**6), n_tensors=1, data=bytes(128)), "dimensions is 1000000"),
    "2^32-1 dimensions": (file(tensor(n_dims=0xFFFFFFFF), n_tensors=1, data=bytes(128)), "dimensions is 429"),
    "negative dimension": (file(tensor(dims=(-32,)), n_tensors=1, data=bytes(128)), "the shape is ["),
    "shape that wraps to 4": (
        file(tensor(dims=(4194305, 4194305, 211106198978564)), n_tensors=1, data=bytes(128)),
        "the shape is [211106198978564, 4194305, 4194305]",
    ),
    "shape with a zero that hides": (
        file(tensor(dims=(0, 1 << 62, 1 << 62)), n_tensors=1, data=bytes(128)),
        "the shape is [",
    ),
    "stride that wraps to 0": (
        file(tensor(dims=(1, (1 << 42) + 1, 1 << 20)), n_tensors=1, data=bytes(128)),
        "the file is",
    ),
    "bytes beyond 64 bits": (file(tensor(dims=(1 << 62,)), n_tensors=1, data=bytes(128)), "the file is"),
    "two tensors of nearly 2^63": (
        file(
            tensor("a", (0x7FFFFFFFFFFFFFC0,), FORMATS["I8"].number, 0),
            tensor("b", (0x7FFFFFFFFFFFFFC0,), FORMATS["I8"].number, 0x7FFFFFFFFFFFFFC0),
            n_tensors=2,
            data=bytes(128),
        ),
        "the file is",
    ),
    "unknown type": (file(tensor(type_number=99), n_tensors=1, data=bytes(128)), "the type is 99"),
    **{
        f"removed type {n}": (
            file(tensor(type_number=n), n_tensors=1, data=bytes(128)),
            f"the type is {n} (",
        )
        for n in (4, 5, 31, 32, 33, 36, 37, 38)
    },
    "row of 255 in Q4_K": (
        file(tensor(dims=(255, 256), type_number=Q4_K), n_tensors=1, data=bytes(1 << 16)),
        "a multiple of 256, the block of Q4_K",
    ),
    "scalar in Q4_K": (file(tensor(dims=(), type_number=Q4_K), n_tensors=1, data=bytes(256)), "row length"),
    "offset not aligned": (file(tensor(offset=8), n_tensors=1, data=bytes(256)), "the offset is 8"),
    "offset of 2^64-32": (file(tensor(offset=-32), n_tensors=1, data=bytes(256)), "the file is"),
    "one byte too few": (file(ONE, n_tensors=1, data=bytes(127)), "the file is 191 bytes long"),
    "no data at all": (file(ONE, n_tensors=1), "the file is"),
    "overlap": (
        file(ONE, tensor("u", (32,), F32, 96), n_tensors=2, data=bytes(256)),
        "byte 224 or later, where 't' ends",
    ),
    "overlap in reverse order": (
        file(tensor("u", (32,), F32, 96), ONE, n_tensors=2, data=bytes(256)),
        "byte 224 or later, where 't' ends",
    ),
    "alignment that offsets do not keep": (
        file(
            uint32_key("general.alignment", 64),
            ONE,
            tensor("u", (8,), F32, 160),
            n_keys=1,
            n_tensors=2,
            data=bytes(512),
            alignment=64,
        ),
        "a multiple of the alignment 64",
    ),
    "one of three parts": (
        file(text("split.count") + number("uint16") + b"\3\0", n_keys=1),
        "one of 3 parts",
    ),
    "a pointer of Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "git lfs pull",
    ),
}

SOUND: dict[str, bytes] = {
    "nothing in it": file(),
    "version 2": file(version=2),
    "one tensor": file(ONE, n_tensors=1, data=bytes(128)),
    "zero dimension": file(tensor(dims=(0, 4)), n_tensors=1),
    "scalar": file(tensor(dims=()), n_tensors=1, data=bytes(4)),
    "alignment 64": file(
        uint32_key("general.alignment", 64), ONE, n_keys=1, n_tensors=1, data=bytes(128), alignment=64
    ),
    "arrays nested 4 deep": file(nested_arrays(4), n_keys=1),
    "empty arrays": file(array_key("a", "string", 0), array_key("b", "float32", 0), n_keys=2),
    "a hole between tensors": file(ONE, tensor("u", (8,), F32, 256), n_tensors=2, data=bytes(288)),
    "tensors out of order": file(tensor("u", (32,), F32, 128), ONE, n_tensors=2, data=bytes(256)),
    "an empty tensor at another's start": file(ONE, tensor("u", (0,), F32, 0), n_tensors=2, data=bytes(128)),
    "a key of any script": file(uint32_key("键", 1), n_keys=1),
}


def refusals(folder: Path) -> dict[str, str]:
    """What the reader says of each hostile file."""
    said = {}
    for i, (name, (raw, _)) in enumerate(HOSTILE.items()):
        path = folder / f"{i}.gguf"
        path.write_bytes(raw)
        try:
            read_gguf(path)
            said[name] = "accepted"
        except FileError as error:
            said[name] = str(error)
    return said


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return refusals(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_for_the_right_reason(name: str, refused: dict[str, str]):
    assert HOSTILE[name][1] in refused[name]
    assert refused[name].isprintable()


@pytest.mark.parametrize("name", SOUND)
def test_an_unusual_but_sound_file_is_accepted(name: str, tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(SOUND[name])
    found = read_gguf(path)
    for tensor_ in found.tensors.values():
        assert found.data(tensor_.name).nbytes == tensor_.nbytes


def test_hostile_files_are_refused_without_assertions_too(tmp_path: Path, refused: dict[str, str]):
    """`python -O` drops every `assert`; nothing in the reader may lean on one."""
    script = (
        "import importlib.util, json, pathlib, sys\n"
        "spec = importlib.util.spec_from_file_location('cases', sys.argv[1])\n"
        "cases = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(cases)\n"
        "print(json.dumps(cases.refusals(pathlib.Path(sys.argv[2]))))\n"
    )
    command = [sys.executable, "-O", "-c", script, __file__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    without = {name: said.partition(".gguf")[2] for name, said in json.loads(run.stdout).items()}
    assert without == {name: said.partition(".gguf")[2] for name, said in refused.items()}


def test_a_truncated_file_is_told_apart(tmp_path: Path):
    path = tmp_path / "m.gguf"
    for length in range(len(SOUND["one tensor"])):
        path.write_bytes(SOUND["one tensor"][:length])
        with pytest.raises(FileError) as caught:
            read_gguf(path)
        # cut inside a header a count may stand out before the end of the file does
        assert isinstance(caught.value, TruncatedError) or "for which there are bytes" in str(caught.value)


def test_a_sparse_terabyte_is_refused_at_once(tmp_path: Path):
    """There "the bytes that remain" are free, and zeros read as empty strings for as long as one likes."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(file(array_key("k", "string", MAX_ITEMS), n_keys=100_000))
    os.truncate(path, 1 << 40)
    with bounded_work(10), pytest.raises(FileError, match="the key is empty"):
        read_gguf(path)


def test_a_header_has_an_end_even_in_a_sparse_file(tmp_path: Path):
    path = tmp_path / "sparse.gguf"
    keys = 40
    with path.open("wb") as out:
        out.write(file(n_keys=keys))
        for i in range(keys):  # strings of zeros, ten million each: 400 MB of header, nearly none on disk
            out.write(text(f"k{i}") + number("string") + u64(10_000_000))
            out.seek(10_000_000, os.SEEK_CUR)
        out.truncate()
    with pytest.raises(FileError, match=f"longer than {MAX_HEADER_BYTES} bytes"):
        read_gguf(path)


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(FileError, match="is a pipe"):
        read_gguf(tmp_path / "m.gguf")


def test_a_directory_is_refused_and_a_missing_file_is_an_os_error(tmp_path: Path):
    with pytest.raises(FileError, match="is a directory"):
        read_gguf(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_gguf(tmp_path / "m.gguf")


# --- random bytes ---------------------------------------------------------------------------------

VALID = file(
    uint32_key("general.alignment", 32),
    text("s") + number("string") + text("hello"),
    array_key("a", "string", 2, text("x") + text("yz")),
    array_key("n", "float32", 2, bytes(8)),
    ONE,
    tensor("u", (256, 2), Q4_K, 128),
    n_keys=4,
    n_tensors=2,
    data=bytes(128 + 288),
)


def read_or_refuse(raw: bytes, folder: Path) -> None:
    path = folder / "m.gguf"
    path.write_bytes(raw)
    try:
        found = read_gguf(path)
    except FileError:
        return
    end = max((t.offset + t.nbytes for t in found.tensors.values()), default=0)
    assert end <= len(raw)
    assert sum(found.data(name).nbytes for name in found.tensors) <= len(raw)


quick = settings(deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)


@quick
@given(raw=st.binary(max_size=300))
@example(raw=b"GGUF\3\0\0\0" + bytes(16))
def test_any_bytes_are_read_or_refused(raw: bytes, tmp_path: Path):
    read_or_refuse(raw, tmp_path)


@quick
@given(raw=st.binary(max_size=300))
def test_any_bytes_after_a_good_start_are_read_or_refused(raw: bytes, tmp_path: Path):
    read_or_refuse(file(raw, n_keys=1, n_tensors=1), tmp_path)


@quick
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(VALID) - 1), st.sampled_from([1, 4, 8]), st.integers(0, 2**64 - 1)),
        min_size=1,
        max_size=4,
    ),
    cut=st.integers(0, len(VALID)),
)
def test_any_edit_of_a_valid_file_is_read_or_refused(edits, cut: int, tmp_path: Path):
    raw = bytearray(VALID)
    for place, width, value in edits:
        raw[place : place + width] = (value % 256**width).to_bytes(width, "little")
    read_or_refuse(bytes(raw[: len(VALID)]), tmp_path)
    read_or_refuse(bytes(raw[:cut]), tmp_path)


def test_the_file_that_the_edits_start_from_is_valid(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(VALID)
    found = read_gguf(path)
    assert found.metadata == {"general.alignment": 32, "s": "hello", "a": ["x", "yz"], "n": [0.0, 0.0]}
    assert found.tensors["u"].shape == (2, 256)


# --- against the gguf package ---------------------------------------------------------------------


def test_block_sizes_are_those_of_the_gguf_package():
    theirs = {kind.name: (kind.value, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {name: tuple(form) for name, form in FORMATS.items()} == theirs


def write_with_the_package(path: Path, alignment: int | None = None, tensors=()) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_metadata_type_of_the_packages_writer_is_read(tmp_path: Path):
    writer = write_with_the_package(tmp_path / "m.gguf")
    expected = {
        "uint8": 255,
        "int8": -128,
        "uint16": 65535,
        "int16": -32768,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "float32": 1e-5,
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float64": 1e-300,
        "bool": True,
        "string": "Ġthe 中文\n",
    }
    for kind, value in expected.items():
        getattr(writer, f"add_{kind}")(f"k.{kind}", value)
    arrays = {"ints": [1, -2], "floats": [0.5, -0.25], "strings": ["a", " ", "é"], "bools": [True, False]}
    for key, value in arrays.items():
        writer.add_array(f"a.{key}", value)
    finish(writer)

    found = read_gguf(tmp_path / "m.gguf")
    assert found.version == 3
    for kind, value in expected.items():
        assert found.metadata_types[f"k.{kind}"] == kind
        if kind == "float32":
            value = float(np.float32(value))
        assert found.metadata[f"k.{kind}"] == value
        assert type(found.metadata[f"k.{kind}"]) is type(value)
    assert {key: found.metadata[f"a.{key}"] for key in arrays} == arrays
    assert found.metadata_types["a.ints"] == "array[int32]"
    assert found.metadata_types["a.bools"] == "array[bool]"


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_tensors_of_the_packages_writer_are_read_at_any_alignment(alignment: int | None, tmp_path: Path):
    random = np.random.default_rng(0)
    arrays = {
        "f32": random.standard_normal((3, 5, 7)).astype(np.float32),
        "f16": random.standard_normal((2, 32)).astype(np.float16),
        "i32": random.integers(-9, 9, 11, dtype=np.int32),
        "q8": gguf.quants.quantize(
            random.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
        ),
    }
    kinds = {"q8": gguf.GGMLQuantizationType.Q8_0}
    rows = [(name, array, kinds.get(name)) for name, array in arrays.items()]
    finish(write_with_the_package(tmp_path / "m.gguf", alignment, rows))

    found = read_gguf(tmp_path / "m.gguf")
    assert list(found.tensors) == list(arrays)
    assert found.tensors["f32"].shape == (3, 5, 7)
    assert found.tensors["q8"].shape == (4, 64)
    assert [t.type for t in found.tensors.values()] == ["F32", "F16", "I32", "Q8_0"]
    for name, array in arrays.items():
        assert found.tensors[name].offset % (alignment or 32) == 0
        assert found.data(name).tobytes() == array.tobytes()
        assert not found.data(name).flags.writeable


def test_the_package_reads_what_we_write(tmp_path: Path):
    random = np.random.default_rng(1)
    weights = random.standard_normal((6, 32)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    metadata = {
        "general.architecture": "llama",
        "int": 7,
        "negative": -7,
        "big": 1 << 40,
        "float": 0.1,
        "flag": False,
        "text": "Ġ中",
        "ints": [1, -1],
        "floats": [1.5, 2.0],
        "strings": ["a", "", "é"],
        "typed": Typed(3, "uint8"),
        "typed.array": Typed([1, 2], "array[uint16]"),
        "typed.empty": Typed([], "array[string]"),
    }
    rows = [
        ("plain", weights.shape, "F32", weights),
        ("lazy", (6, 32), "Q4_1", lambda: packed),
        ("odd", (3,), "F32", b"\1" * 12),
        ("none", (0,), "F32", b""),
    ]
    write_gguf(tmp_path / "m.gguf", metadata, rows)

    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert {key: values[key] for key in metadata if not key.startswith(("typed", "float"))} == {
        key: value for key, value in metadata.items() if not key.startswith(("typed", "float"))
    }
    assert values["float"] == float(np.float32(0.1))
    assert values["typed.array"] == [1, 2]
    kinds = {key: [kind.name.lower() for kind in field.types] for key, field in reader.fields.items()}
    assert kinds["int"] == ["uint32"]
    assert kinds["negative"] == ["int32"]
    assert kinds["big"] == ["uint64"]
    assert kinds["float"] == ["float32"]
    assert kinds["flag"] == ["bool"]
    assert kinds["ints"] == ["array", "int32"]
    assert kinds["typed"] == ["uint8"]
    assert kinds["typed.array"] == ["array", "uint16"]
    theirs = {t.name: t for t in reader.tensors}
    np.testing.assert_array_equal(theirs["plain"].data, weights)
    np.testing.assert_array_equal(theirs["lazy"].data, packed)
    assert theirs["odd"].data.tobytes() == b"\1" * 12


# --- writing --------------------------------------------------------------------------------------


def test_what_is_written_reads_back_with_the_same_types(tmp_path: Path):
    metadata = {kind: Typed(1, kind) for kind in VALUE_TYPES if kind not in ("string", "array", "bool")}
    metadata |= {f"array.{kind}": Typed([1, 0], f"array[{kind}]") for kind in metadata}
    metadata |= {"bool": Typed(True, "bool"), "s": "é", "ss": Typed(["é", "", "z"], "array[string]")}
    write_gguf(tmp_path / "m.gguf", metadata, [("t", (2, 3), "F16", bytes(12))])
    first = read_gguf(tmp_path / "m.gguf")
    assert first.metadata == {
        key: value.value if isinstance(value, Typed) else value for key, value in metadata.items()
    }
    again = {key: Typed(value, first.metadata_types[key]) for key, value in first.metadata.items()}
    write_gguf(tmp_path / "n.gguf", again, [("t", (2, 3), "F16", first.data("t"))])
    assert (tmp_path / "n.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
scalars = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(width=32, allow_nan=False), names
)
lists = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5),
    st.lists(names, min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
)


@settings(quick, max_examples=50)
@given(
    metadata=st.dictionaries(names.map("k.{}".format), st.one_of(scalars, lists), max_size=6),
    shapes=st.dictionaries(names, st.lists(st.integers(0, 4), max_size=4), max_size=5),
    alignment=st.sampled_from([None, 8, 32, 256]),
)
def test_whatever_is_written_is_read_back(metadata, shapes, alignment, tmp_path: Path):
    if alignment:
        metadata = {**metadata, "general.alignment": alignment}
    data = {name: os.urandom(2 * math.prod(shape)) for name, shape in shapes.items()}
    write_gguf(tmp_path / "m.gguf", metadata, [(n, shapes[n], "BF16", data[n]) for n in shapes])
    found = read_gguf(tmp_path / "m.gguf")
    assert found.metadata == metadata
    assert {name: list(t.shape) for name, t in found.tensors.items()} == shapes
    assert {name: found.data(name).tobytes() for name in found.tensors} == data


@pytest.mark.parametrize(
    ("metadata", "tensors", "says"),
    [
        ({"": 1}, [], "the key is empty"),
        ({"k": None}, [], "NoneType"),
        ({"k": []}, [], "an empty list"),
        ({"k": [[1]]}, [], "cannot be written"),
        ({"k": {}}, [], "a dict"),
        ({"k": 1 << 64}, [], "beyond 64 bits"),
        ({"k": Typed(256, "uint8")}, [], "does not fit uint8"),
        ({"k": Typed("x", "int32")}, [], "does not fit int32"),
        ({"k": Typed(1, "uint7")}, [], "cannot be written as uint7"),
        ({"k": 1e39}, [], "does not fit float32"),
        ({"general.alignment": 24}, [], "power of two"),
        ({"general.alignment": Typed(32, "int32")}, [], "expected uint32"),
        ({}, [("n" * 64, (1,), "F32", bytes(4))], "length of the name is 64"),
        ({}, [("t", (1,), "F32", bytes(4))] * 2, "seen before"),
        ({}, [("t", (1,) * 5, "F32", bytes(4))], "dimensions is 5"),
        ({}, [("t", (2,), "F32", bytes(4))], "t has 4 bytes, but F32 [2] takes 8"),
        ({}, [("t", (31,), "Q8_0", bytes(34))], "not a multiple of Q8_0's block"),
        ({}, [("t", (1,), "Q9", bytes(4))], "no tensor type 'Q9'"),
        ({}, [("t", (-1,), "F32", bytes(4))], "negative size"),
    ],
)
def test_what_no_reader_would_accept_is_not_written(metadata, tensors, says: str, tmp_path: Path):
    with pytest.raises(ValueError, match=re.escape(says)):
        write_gguf(tmp_path / "m.gguf", metadata, tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {"k": 1}, [])

    def broken() -> bytes:
        raise RuntimeError("no bytes today")

    with pytest.raises(RuntimeError, match="no bytes today"):
        write_gguf(path, {"k": 2}, [("t", (1,), "F32", bytes(4)), ("u", (1,), "F32", broken)])
    assert read_gguf(path).metadata == {"k": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_are_made_one_at_a_time(tmp_path: Path):
    alive, most = [], []

    def make(i: int) -> bytes:
        most.append(i)
        alive.append(i)
        assert alive == most == list(range(i + 1))  # in order, each when its turn comes
        return bytes(4)

    write_gguf(tmp_path / "m.gguf", {}, [(f"t{i}", (1,), "F32", lambda i=i: make(i)) for i in range(5)])
    assert most == [0, 1, 2, 3, 4]


# --- speed ----------------------------------------------------------------------------------------


def test_a_vocabulary_of_150_000_is_no_hostile_file(tmp_path: Path):
    """A guard once made loading so slow that it had to be redone (llama.cpp #19856, #19919)."""
    n = 150_000
    tokens = [f"▁token{i}" for i in range(n)]
    metadata = {
        "tokens": tokens,
        "merges": [f"{t} x" for t in tokens],
        "scores": [float(-i) for i in range(n)],
        "types": [1] * n,
    }
    write_gguf(tmp_path / "m.gguf", metadata, [])
    with bounded_work(0.6):
        assert read_gguf(tmp_path / "m.gguf").metadata == metadata


def test_the_tensors_bytes_are_not_read_while_parsing(tmp_path: Path):
    """A sparse tensor of a terabyte costs nothing to open."""
    path = tmp_path / "m.gguf"
    shape = (1 << 18, 1 << 20)
    header = file(tensor("t", shape[::-1], F32), n_tensors=1, data=b"")
    path.write_bytes(header)
    os.truncate(path, len(header) + tensor_nbytes(shape, "F32"))
    found = read_gguf(path)
    assert found.tensors["t"].nbytes == 1 << 40
    assert found.data("t")[-4:].tolist() == [0, 0, 0, 0]


def test_files_import_neither_torch_nor_numpy():
    script = "import sys, openbook.files; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
