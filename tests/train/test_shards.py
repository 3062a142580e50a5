import json
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from openbook.files import FileError, TruncatedError
from openbook.train.shards import FORMAT, Shard, ShardWriter, is_shard_name


def write(folder: Path, documents: list[list[int]], vocab_size: int = 300, **options) -> list[Path]:
    writer = ShardWriter(folder, "train", vocab_size, **options)
    for ids in documents:
        writer.add(ids)
    writer.flush()
    return [folder / name for name in writer.files]


def test_documents_come_back_with_their_starts(tmp_path: Path):
    (path,) = write(tmp_path, [[5, 6, 7], [8], [9, 10]])
    shard = Shard(path, 300)
    assert shard.starts.tolist() == [0, 3, 4, 6]
    assert shard.tokens(0, 6).tolist() == [5, 6, 7, 8, 9, 10]
    assert shard.tokens(2, 4).tolist() == [7, 8]
    assert shard.learned(2, 4).all()
    assert (shard.n_documents, shard.n_tokens) == (3, 6)


def test_other_programs_read_a_shard_as_plain_safetensors(tmp_path: Path):
    (path,) = write(tmp_path, [[5, 6, 7], [8]])
    arrays = load_file(path)
    assert {name: (array.dtype, array.tolist()) for name, array in arrays.items()} == {
        "tokens": (np.uint16, [5, 6, 7, 8]),
        "starts": (np.int64, [0, 3, 4]),
    }


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_ids_take_two_bytes_as_long_as_they_fit(tmp_path: Path, vocab_size: int, dtype: type):
    (path,) = write(tmp_path, [[vocab_size - 1, 0]], vocab_size)
    assert load_file(path)["tokens"].dtype == dtype
    assert Shard(path, vocab_size).tokens(0, 2).tolist() == [vocab_size - 1, 0]


def test_marks_are_stored_only_where_something_is_not_learned(tmp_path: Path):
    writer = ShardWriter(tmp_path, "train", 300)
    writer.add([1, 2, 3], np.array([False, True, True]))
    writer.add([4, 5])
    writer.flush()
    writer.add([6, 7], np.array([True, True]))
    writer.flush()
    first, second = (Shard(tmp_path / name, 300) for name in writer.files)
    assert first.learned(0, 5).tolist() == [False, True, True, True, True]
    assert (first.has_marks, second.has_marks) == (True, False)
    assert (writer.documents, writer.tokens, writer.labels) == (3, 7, 4)


def test_a_document_is_never_cut_over_two_files(tmp_path: Path):
    paths = write(tmp_path, [[1] * 4, [2] * 4, [3] * 9, [4]], max_tokens=8)
    assert [Shard(path, 300).starts.tolist() for path in paths] == [[0, 4, 8], [0, 9], [0, 1]]


def test_an_empty_document_and_an_empty_dataset_write_nothing(tmp_path: Path):
    assert write(tmp_path, [[]]) == []


# --- hostile files ------------------------------------------------------------------------------

GOOD = {"tokens": np.array([1, 2, 3, 4], np.uint16), "starts": np.array([0, 3, 4], np.int64)}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tokens": None}, "tokens"),
        ({"starts": None}, "starts"),
        ({"tokens": np.array([1, 2, 3, 4], np.int16)}, "I16"),
        ({"tokens": np.array([[1, 2], [3, 4]], np.uint16)}, "2, 2"),
        ({"starts": np.array([0, 3, 4], np.uint64)}, "U64"),
        ({"starts": np.array([0], np.int64)}, "number of documents"),
        ({"starts": np.array([], np.int64)}, "number of documents"),
        ({"starts": np.array([1, 3, 4], np.int64)}, "rising"),
        ({"starts": np.array([0, 3, 5], np.int64)}, "rising"),
        ({"starts": np.array([0, 3, 3, 4], np.int64)}, "rising"),
        ({"starts": np.array([0, -(2**63), 4], np.int64)}, "rising"),
        ({"learned": np.array([1, 1, 1], np.uint8)}, "learned"),
        ({"learned": np.array([1.0, 1, 1, 1])}, "F64"),
    ],
)
def test_numbers_that_disagree_are_one_error(tmp_path: Path, changes: dict, word: str):
    arrays = {name: array for name, array in {**GOOD, **changes}.items() if array is not None}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": FORMAT})
    with pytest.raises(FileError, match=word) as caught:
        Shard(tmp_path / "x.safetensors", 300)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "openbook.shard/2"}])
def test_another_format_or_version_is_refused(tmp_path: Path, metadata: dict | None):
    save_file(GOOD, tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(FileError, match=r"openbook\.shard/1"):
        Shard(tmp_path / "x.safetensors", 300)


def test_an_id_beyond_the_vocabulary_is_an_error_where_it_is_read(tmp_path: Path):
    save_file(GOOD, tmp_path / "x.safetensors", metadata={"format": FORMAT})
    shard = Shard(tmp_path / "x.safetensors", 4)
    assert shard.tokens(0, 3).tolist() == [1, 2, 3]
    with pytest.raises(FileError, match="token 3"):
        shard.tokens(2, 4)


def test_a_file_that_claims_a_hundred_million_documents_is_refused_unread(tmp_path: Path):
    n = 100_000_001
    header = {
        "__metadata__": {"format": FORMAT},
        "starts": {"dtype": "I64", "shape": [n], "data_offsets": [0, 8 * n]},
        "tokens": {"dtype": "U16", "shape": [n], "data_offsets": [8 * n, 10 * n]},
    }
    raw = json.dumps(header).encode()
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + 10 * n)  # sparse
    with pytest.raises(FileError, match="number of documents"):
        Shard(tmp_path / "x.safetensors", 300)


def test_damage_anywhere_is_a_file_error_or_a_readable_shard(tmp_path: Path):
    (path,) = write(tmp_path, [list(range(20)), list(range(7))])
    whole, chance = path.read_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            shard = Shard(path, 300)
            shard.tokens(0, shard.n_tokens)
        except FileError:
            pass
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises((TruncatedError, FileError)):
            Shard(path, 300)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/x.safetensors",
        ".x.safetensors",
        "a\\b.safetensors",
        "x.bin",
        "",
        5,
        "x\n.safetensors",
    ],
)
def test_a_name_that_leads_elsewhere_is_no_shards(name: object):
    assert not is_shard_name(name)
    assert is_shard_name("train-00000.safetensors")
