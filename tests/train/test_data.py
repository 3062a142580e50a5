import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from openbook.files import FileError, read_gguf
from openbook.files.gguf import write_gguf
from openbook.sources import NotFoundError, Source
from openbook.spec.presets import preset
from openbook.text import ChatError, Tokenizer
from openbook.train.corpus import Chat, Corpus, Document, is_held_out
from openbook.train.data import build, open_dataset

SPEC = preset("gpt2")


def corpus(*documents: Document | Chat) -> Corpus:
    return Corpus("made up", lambda: iter(documents), 1000)


MANY = corpus(*(Document(f"{i}.txt", f"text number {i}\n" * (i % 5 + 1)) for i in range(60)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(tmp_path / "data", MANY, 280, held_out=0.2)
    return tmp_path / "data"


def test_what_was_written_decodes_to_the_texts(folder: Path):
    data = open_dataset(folder)
    (shard,) = data.shards("train")
    texts = [data.tokenizer.decode(shard.tokens(*shard.starts[d : d + 2])) for d in range(shard.n_documents)]
    all_texts = [document.text for document in MANY.read() if isinstance(document, Document)]
    held_out = [text for text in all_texts if text not in texts]
    assert len(texts) + len(held_out) == 60
    assert 3 < len(held_out) < 25
    assert texts == [text for text in all_texts if text in texts]


def test_the_counts_are_those_of_the_shards(folder: Path):
    data = open_dataset(folder)
    assert data.source == "made up"
    for name, split in data.splits.items():
        packed = data.pack(name, 16)
        assert packed.rows(0, packed.n_rows).n_labels == split.labels == split.tokens - split.documents
    assert sum(split.bytes for split in data.splits.values()) == sum(
        len(document.text) for document in MANY.read() if isinstance(document, Document)
    )


def test_the_vocabulary_is_learned_from_what_is_not_held_out(tmp_path: Path):
    names = [str(i) for i in range(100)]
    held_out = next(name for name in names if is_held_out(Document(name, ""), 0.2))
    kept = next(name for name in names if not is_held_out(Document(name, ""), 0.2))
    texts = corpus(Document(held_out, "zqxj " * 50), Document(kept, "word " * 50))
    tokenizer = build(tmp_path / "data", texts, 400, held_out=0.2).tokenizer
    assert tokenizer.id_of("word") is not None
    assert tokenizer.id_of("zqxj") is None


def test_the_same_corpus_gives_the_same_files(tmp_path: Path):
    for name in ("a", "b"):
        build(tmp_path / name, MANY, 280)
    assert sorted(f.name for f in (tmp_path / "a").iterdir()) == sorted(
        f.name for f in (tmp_path / "b").iterdir()
    )
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_bits_per_byte_counts_the_bytes_of_text_and_none_for_control_tokens(folder: Path):
    data = open_dataset(folder)
    packed = data.pack("train", 16)
    labels = packed.rows(0, packed.n_rows).labels
    assert data.byte_lengths[labels[labels >= 0]].sum() == data.splits["train"].bytes
    assert data.byte_lengths[0] == 0


# --- tokenizers of others -----------------------------------------------------------------------


def test_a_chat_models_tokenizer_and_template_are_taken(tmp_path: Path, chat_folder: Path):
    chat = Chat("c", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
    data = build(tmp_path / "data", corpus(chat), Source(SPEC, "spec", chat_folder), held_out=0)
    rows = data.pack("train", 64, whole=True).rows(0, 1)
    assert data.tokenizer.decode(rows.labels[rows.labels >= 0], skip_special=False) == "Ho<|im_end|>"
    assert data.splits["train"].bytes == 4
    assert data.splits["train"].labels == 3


def test_the_ends_that_a_model_names_elsewhere_are_kept(tmp_path: Path, chat_folder: Path):
    model = tmp_path / "model"
    model.mkdir()
    for file in chat_folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text('{"eos_token_id": [0, 300]}')
    data = build(tmp_path / "data", MANY, Source(SPEC, "spec", model))
    assert data.tokenizer.eos_ids == {0, 300, 301}


def test_a_gguf_files_tokenizer_is_taken(tmp_path: Path, tokenizer: Tokenizer, vocabulary: Path):
    about = json.loads((vocabulary / "tokenizer.json").read_text("utf-8"))
    metadata = {
        "general.name": "left behind",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokenizer.token(i) for i in range(300)],
        "tokenizer.ggml.token_type": [3] + [1] * 299,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in about["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    write_gguf(tmp_path / "model.gguf", metadata, ())
    source = Source(SPEC, "gguf", tmp_path / "model.gguf", read_gguf(tmp_path / "model.gguf").metadata)
    data = build(tmp_path / "data", MANY, source)
    same = open_dataset(tmp_path / "data").pack("train", 16).rows(0, 3)
    plain = build(tmp_path / "plain", MANY, Source(SPEC, "spec", vocabulary)).pack("train", 16).rows(0, 3)
    assert np.array_equal(same.ids, plain.ids)
    assert data.tokenizer.add_bos
    assert "general.name" not in read_gguf(tmp_path / "data" / "tokenizer.gguf").metadata


# --- what cannot be built -----------------------------------------------------------------------


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        build(tmp_path, MANY, 280)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("documents", "error", "words"),
    [
        (corpus(), NotFoundError, "nothing to train on"),
        (corpus(Document("a", "")), NotFoundError, "nothing to train on"),
        (corpus(Chat("c", [])), ChatError, "--tokenizer"),
    ],
)
def test_a_failure_leaves_nothing_behind(tmp_path: Path, documents: Corpus, error: type, words: str):
    with pytest.raises(error, match=words):
        build(tmp_path / "data", documents, 280, held_out=0)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(NotFoundError, match="gpt2 has no tokenizer"):
        build(tmp_path / "data", MANY, Source(SPEC))


# --- hostile datasets ---------------------------------------------------------------------------


def test_no_dataset_names_the_command(tmp_path: Path):
    with pytest.raises(NotFoundError, match="openbook data build"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda about: about.update(schema="openbook.dataset/2"), "schema"),
        (lambda about: about.update(vocab_size="280"), "vocab_size"),
        (lambda about: about.update(vocab_size=True), "vocab_size"),
        (lambda about: about.update(vocab_size=10**12), "vocab_size"),
        (lambda about: about.update(splits=[]), "splits"),
        (lambda about: about["splits"].update(test={}), "splits"),
        (lambda about: about["splits"]["train"].pop("bytes"), "split"),
        (lambda about: about["splits"]["train"].update(tokens=-1), "tokens"),
        (lambda about: about["splits"]["train"].update(tokens=7), "as in the shards"),
        (lambda about: about["splits"]["train"].update(shards=["../x.safetensors"]), "shards"),
        (lambda about: about["splits"]["train"].update(shards="x"), "shards"),
    ],
)
def test_a_damaged_description_is_one_error(folder: Path, change: Callable, word: str):
    about = json.loads((folder / "dataset.json").read_text())
    change(about)
    (folder / "dataset.json").write_text(json.dumps(about))
    with pytest.raises(FileError, match=word) as caught:
        open_dataset(folder).pack("train", 16)
    assert "\n" not in str(caught.value)


def test_another_tokenizer_in_the_folder_is_noticed(folder: Path, vocabulary: Path):
    (folder / "tokenizer.json").write_bytes((vocabulary / "tokenizer.json").read_bytes())
    with pytest.raises(FileError, match="300"):
        _ = open_dataset(folder).tokenizer


def test_an_empty_split_says_which_ones_are_not(tmp_path: Path):
    data = build(tmp_path / "data", MANY, 280, held_out=0)
    with pytest.raises(NotFoundError, match="only in train"):
        data.pack("heldout", 16)
