"""The safetensors checks: the library's own hostile cases, and shards that lie about each other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bounded import bounded_work
from openbook.files import FileError, TruncatedError, open_safetensors
from openbook.files.safetensors import DTYPES, MAX_COMMAS


def entry(dtype: Any = "F32", shape: Any = (2, 2), data_offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def raw_file(header: bytes | dict, data: bytes = b"", length: int | None = None) -> bytes:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


GOOD = raw_file({"t": entry()}, bytes(16))


def one(data: bytes = bytes(16), **changes: Any) -> bytes:
    return raw_file({"t": entry(**changes)}, data)


HOSTILE: dict[str, tuple[bytes, str]] = {
    # name: bytes, and what the error must say. S1 to S18 are the cases of the library's own tests.
    "S1 empty": (b"", "0 bytes long"),
    "S1 seven bytes": (bytes(7), "7 bytes long"),
    "S2 length of 2^63": (bytes.fromhex("3c00000000ffffff") + b"{}", "the header's length is"),
    "S3 length beyond the file": (raw_file(b"", length=60), "expected at least 68"),
    "S4 not UTF-8": (raw_file(b"\xff"), "the header is b'\\xff'"),
    "S4 not UTF-8 inside": (raw_file(b'{"\xff":1}'), "not UTF-8"),
    "S5 not JSON": (raw_file(b"{"), "not valid JSON"),
    "S6 overlap": (
        raw_file({f"t{i}": entry() for i in range(10)}, bytes(16)),
        "overlaps its neighbour",
    ),
    "S7 something after": (GOOD + b"extra_bogus_data_for_polyglot_file", "something follows the last tensor"),
    "S8 two bytes short": (GOOD[:-2], f"the file is {len(GOOD) - 2} bytes long, expected {len(GOOD)}"),
    "S9 offsets against shape": (one(bytes(4), dtype="I32", data_offsets=(0, 4)), "16 bytes for I32 [2, 2]"),
    "S10 shape beyond 64 bits": (one(shape=(2, 18446744073709551614)), "the shape is [2, 184"),
    "S11 bytes beyond 64 bits": (one(shape=(2, 9223372036854775807), dtype="I32"), "the shape is [2, 922"),
    "S11 a zero that hides": (one(b"", shape=(0, 1 << 62, 4), data_offsets=(0, 0)), "the shape is [0"),
    "S14 name twice": (
        raw_file(
            b'{"t":' + json.dumps(entry()).encode() + b',"t":' + json.dumps(entry()).encode() + b"}",
            bytes(16),
        ),
        "the key 't' occurs twice",
    ),
    "S14 key of an entry twice": (
        raw_file(b'{"t":{"dtype":"F32","dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}', bytes(16)),
        "the key 'dtype' occurs twice",
    ),
    "S15 offsets as floats": (one(data_offsets=(0.0, 16.0)), "the data_offsets is [0.0, 16.0]"),
    "S15 offsets as text": (one(data_offsets=("0", "16")), "the data_offsets is [0, 16]"),
    "S15 offsets as booleans": (
        one(bytes(1), shape=(), dtype="U8", data_offsets=(False, True)),
        "[False, True]",
    ),
    "S15 offsets negative": (one(data_offsets=(-16, 0)), "[-16, 0]"),
    "S15 offsets reversed": (one(data_offsets=(16, 0)), "[16, 0]"),
    "S15 three offsets": (one(data_offsets=(0, 16, 16)), "[0, 16, 16]"),
    "S15 offsets missing": (raw_file({"t": {"dtype": "F32", "shape": []}}), "an object of dtype, shape and"),
    "S15 an entry with more": (
        raw_file({"t": entry() | {"scale": 2}}, bytes(16)),
        "an object of dtype, shape",
    ),
    "S15 exponent": (
        raw_file(b'{"t":{"dtype":"F32","shape":[2,2],"data_offsets":[0,1.6e1]}}', bytes(16)),
        "[0, 16.0]",
    ),
    "S15 an integer of 5000 digits": (
        raw_file(b'{"t":{"dtype":"F32","shape":[2,2],"data_offsets":[0,' + b"9" * 5000 + b"]}}", bytes(16)),
        "not valid JSON",
    ),
    "S15 an integer of 4000 digits": (
        raw_file(b'{"t":{"dtype":"F32","shape":[2,2],"data_offsets":[0,' + b"9" * 4000 + b"]}}", bytes(16)),
        "[0, an integer of 13288 bits]",
    ),
    "S15 nesting of 200,000": (raw_file(b'{"t":' + b"[" * 200_000), "nested too deeply"),
    "S15 NaN": (raw_file(b'{"t":NaN}'), "NaN is no JSON number"),
    "S16 a million ones": (one(bytes(4), shape=(1,) * 900_000, data_offsets=(0, 4)), "at most 8 sizes"),
    "S16 a name of 5 MB": (raw_file({"n" * 5_000_000: entry()}, bytes(16)), "the name's length is 5000000"),
    "S16 a name of nothing": (raw_file({"": entry()}, bytes(16)), "the name's length is 0"),
    "S16 metadata of numbers": (raw_file({"__metadata__": {"a": 1}}), "__metadata__"),
    "S16 metadata as a list": (raw_file({"__metadata__": []}), "is a list, expected an object of strings"),
    "S17 F4": (one(bytes(2), dtype="F4", data_offsets=(0, 2)), "the dtype is 'F4', expected one of BOOL"),
    "S17 dtype as a number": (one(dtype=32), "the dtype is 32"),
    "S18 millions of values": (
        raw_file(b'{"t":[' + b"{}," * MAX_COMMAS + b"1,{}]}"),
        f"expected at most {MAX_COMMAS}",
    ),
    "a hole before": (one(bytes(20), data_offsets=(4, 20)), "leaves a hole before it"),
    "a header that is a list": (raw_file(b"[]"), "a JSON object from its first byte on"),
    "an entry that is a number": (raw_file({"t": 1}), "the entry is a number"),
    "a pickle by another name": (b"\x80\x02}q\x00." + bytes(64), "the header's length is"),
    "a zip by another name": (b"PK\x03\x04" + bytes(range(1, 100)), "the header's length is"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_for_the_right_reason(name: str, tmp_path: Path):
    raw, says = HOSTILE[name]
    (tmp_path / "model.safetensors").write_bytes(raw)
    with bounded_work(5):
        with pytest.raises(FileError) as caught:
            open_safetensors(tmp_path / "model.safetensors")
        assert says in str(caught.value)
        assert str(caught.value).isprintable()


def test_a_truncated_file_is_told_apart(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(TruncatedError):
            open_safetensors(path)


@pytest.mark.parametrize(
    ("raw", "shapes"),
    [
        (raw_file(b"{}\r \t\n"), {}),  # S12
        (one(b"", shape=(2, 0), data_offsets=(0, 0)), {"t": (2, 0)}),  # S13
        (one(bytes(4), shape=(), data_offsets=(0, 4)), {"t": ()}),  # S13
        (raw_file({"__metadata__": {"format": "pt"}, "t": entry()}, bytes(16)), {"t": (2, 2)}),
        (
            raw_file(
                {"b": entry(data_offsets=(16, 32)), "e": entry("U8", (0,), (16, 16)), "a": entry()}, bytes(32)
            ),
            {"b": (2, 2), "e": (0,), "a": (2, 2)},
        ),
    ],
)
def test_an_unusual_but_sound_file_is_accepted(raw: bytes, shapes: dict, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(raw)
    found = open_safetensors(tmp_path)
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == shapes
    for name, shape in shapes.items():
        assert found.get(name).shape == shape


def test_every_dtype_that_torch_writes_is_read_back(tmp_path: Path):
    kinds = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.int32]
    kinds += [torch.float32, torch.int64, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
    kinds += [torch.uint16, torch.uint32, torch.uint64]
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = open_safetensors(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in found.tensors.values()} == DTYPES.keys()
    assert found.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        assert found.tensors[name].nbytes == tensor.nbytes
        assert found.get(name).dtype == tensor.dtype
        assert found.get(name).view(torch.uint8).equal(tensor.view(torch.uint8))


def test_a_name_that_is_not_there_is_a_key_error(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    with pytest.raises(KeyError):
        open_safetensors(tmp_path).get("u")


quick = settings(deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@quick
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes, tmp_path: Path):
    for content in (raw, raw_file(raw), raw_file(b"{" + raw)):
        (tmp_path / "model.safetensors").write_bytes(content)
        try:
            open_safetensors(tmp_path)
        except FileError:
            continue


@quick
@given(
    header=st.dictionaries(
        st.sampled_from(["t", "u", "__metadata__"]),
        json_values
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "U8", "X"]) | json_values,
                "shape": st.lists(st.integers(0, 4), max_size=3) | json_values,
                "data_offsets": st.lists(st.integers(0, 64), max_size=3) | json_values,
            }
        ),
    ),
    data=st.binary(max_size=64),
)
def test_any_json_header_is_read_or_refused(header: dict, data: bytes, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, data))
    try:
        found = open_safetensors(tmp_path)
    except FileError:
        return
    assert sum(tensor.nbytes for tensor in found.tensors.values()) == len(data)
    for name, tensor in found.tensors.items():  # what we accept, the library accepts
        assert found.get(name).shape == tensor.shape


@quick
@given(
    edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_any_edit_of_a_valid_file_is_read_or_refused(edits: list[tuple[int, int]], tmp_path: Path):
    raw = bytearray(GOOD)
    for place, value in edits:
        raw[place] = value
    (tmp_path / "model.safetensors").write_bytes(raw)
    try:
        found = open_safetensors(tmp_path)
    except FileError:
        return
    assert sum(found.get(name).nbytes for name in found.tensors) == 16


# --- folders and shards ---------------------------------------------------------------------------

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TENSORS = [{"a": torch.ones(2, 3), "b": torch.zeros(4)}, {"c": torch.full((2,), 7.0, dtype=torch.bfloat16)}]
INDEX = "model.safetensors.index.json"


def write_shards(folder: Path, weight_map: Any = None, **metadata: Any) -> Path:
    for name, tensors in zip(SHARDS, TENSORS, strict=True):
        save_file(tensors, folder / name)
    if weight_map is None:
        weight_map = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
    index = {"metadata": {"total_size": 44, **metadata}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("entry_point", [".", INDEX])
def test_shards_are_read_as_one(entry_point: str, tmp_path: Path):
    found = open_safetensors(write_shards(tmp_path) / entry_point)
    assert set(found.tensors) == {"a", "b", "c"}
    assert found.tensors["c"].file == tmp_path / SHARDS[1]
    for name, tensor in (TENSORS[0] | TENSORS[1]).items():
        assert found.get(name).equal(tensor)


def test_the_links_of_a_hugging_face_cache_are_followed(tmp_path: Path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_shards(snapshot)
    for i, name in enumerate((*SHARDS, INDEX)):
        (snapshot / name).rename(blobs / str(i))
        (snapshot / name).symlink_to(Path("..", "..", "blobs", str(i)))
    assert set(open_safetensors(snapshot).tensors) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "/etc/x.safetensors",
        "../../x.safetensors",
        "a/../../b.safetensors",
        "a/b.safetensors",
        "",
        ".",
        "..",
        ".safetensors",
        "x\0y.safetensors",
        "x\ny.safetensors",
        "C:\\x.safetensors",
        "C:x.safetensors",
        "\\\\host\\x.safetensors",
        "x" * 300 + ".safetensors",
        "pytorch_model-00001-of-00002.bin",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_a_shard_that_is_no_plain_name_is_refused_unopened(name: Any, tmp_path: Path):
    write_shards(tmp_path, {"a": SHARDS[0], "b": SHARDS[0], "c": name})
    with pytest.raises(FileError, match="expected a plain file name"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("weight_map", [[], {}, "x", 7, True])
def test_a_weight_map_that_is_none_is_refused(weight_map: Any, tmp_path: Path):
    write_shards(tmp_path, weight_map)
    with pytest.raises(FileError, match="expected an object of file names"):
        open_safetensors(tmp_path)


def test_all_missing_shards_are_listed_at_once(tmp_path: Path):
    write_shards(tmp_path)
    for name in SHARDS:
        (tmp_path / name).unlink()
    (tmp_path / SHARDS[1]).symlink_to(tmp_path / "nowhere")  # a dangling link is missing too
    with pytest.raises(FileError) as caught:
        open_safetensors(tmp_path)
    assert f"without 2 of 2: {SHARDS[0]}, {SHARDS[1]}" in str(caught.value)


def test_a_shard_that_is_a_pipe_or_a_directory_is_refused(tmp_path: Path):
    write_shards(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    os.mkfifo(tmp_path / SHARDS[1])
    with pytest.raises(FileError, match="is a pipe"):
        open_safetensors(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    (tmp_path / SHARDS[1]).mkdir()
    with pytest.raises(FileError, match="is a directory"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        (
            {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1], "d": SHARDS[1]},
            "naming d, not in the shard it says",
        ),
        ({"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}, "naming b, not in the shard it says"),
        ({"a": SHARDS[0], "c": SHARDS[1]}, "without b"),
    ],
)
def test_index_and_shards_must_tell_the_same(weight_map: dict, says: str, tmp_path: Path):
    write_shards(tmp_path, weight_map)
    with pytest.raises(FileError, match=says):
        open_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path):
    write_shards(tmp_path)
    save_file({"c": torch.ones(2), "a": torch.ones(2, 3)}, tmp_path / SHARDS[1])
    with pytest.raises(FileError, match=f"tensor 'a': the tensor is also in {SHARDS[0]}"):
        open_safetensors(tmp_path)


def test_an_index_with_a_name_twice_is_refused(tmp_path: Path):
    write_shards(tmp_path)
    (tmp_path / INDEX).write_text(f'{{"weight_map":{{"a":"{SHARDS[0]}","a":"{SHARDS[1]}"}}}}')
    with pytest.raises(FileError, match="the key 'a' occurs twice"):
        open_safetensors(tmp_path)


def test_a_total_size_that_is_wrong_is_refused(tmp_path: Path):
    with pytest.raises(FileError, match="total_size is 45, expected 44"):
        open_safetensors(write_shards(tmp_path, total_size=45))
    open_safetensors(write_shards(tmp_path, total_size=44.0))


def test_an_index_may_do_without_metadata(tmp_path: Path):
    write_shards(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}))
    assert set(open_safetensors(tmp_path).tensors) == {"a", "b", "c"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_with_the_way_to_convert_it(name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(FileError, match=r"a pickle can run code.*save_pretrained"):
            open_safetensors(path)


def test_a_folder_without_weights_tells_what_it_has(tmp_path: Path):
    with pytest.raises(FileError, match=r"is empty, expected one with model.safetensors"):
        open_safetensors(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(FileError, match=r"one with config.json, expected"):
        open_safetensors(tmp_path)


def test_a_missing_file_is_an_os_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        open_safetensors(tmp_path / "model.safetensors")
