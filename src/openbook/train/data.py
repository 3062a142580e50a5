"""Datasets: a folder of token shards with the tokenizer that made them.

>>> data = open_dataset("DIR")  # doctest: +SKIP
>>> train = data.pack("train", length=512, seed=0)  # doctest: +SKIP
>>> batch = train.batch(first=1_000_000, count=8)  # doctest: +SKIP
"""

from __future__ import annotations

import errno
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from openbook.files.errors import FileError
from openbook.files.gguf import read_gguf, write_gguf
from openbook.files.strict_json import kind_of
from openbook.sources import NotFoundError, Source, read_json
from openbook.text import ChatError, ChatTemplate, Tokenizer
from openbook.train.bpe import train_bpe
from openbook.train.corpus import Chat, Corpus, Document, is_held_out
from openbook.train.encode import encode
from openbook.train.pack import Packed
from openbook.train.shards import Ints, Shard, ShardWriter, is_shard_name

SCHEMA = "openbook.dataset/1"
SPLITS: tuple[str, ...] = ("train", "heldout")
MAX_VOCAB = 1 << 32

Progress = Callable[[str, int, int], None]
"""Called with the stage, and with the bytes of text gone through and in all."""


# --- a dataset ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """What a split holds. `bytes`: of its text in UTF-8; `labels`: the tokens to be predicted in it."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    labels: int = 0
    shards: Sequence[str] = ()


@dataclass(frozen=True)
class Dataset:
    """A folder made by `build`: dataset.json, the tokenizer, and the shards of its splits."""

    folder: Path
    source: str
    vocab_size: int
    splits: Mapping[str, Split] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. Raises `FileError` if another lies there now."""
        tokenizer = load_tokenizer(self.folder)
        if tokenizer.vocab_size != self.vocab_size:
            raise FileError(self.folder, "", "the tokenizer's size", tokenizer.vocab_size, self.vocab_size)
        return tokenizer

    @cached_property
    def byte_lengths(self) -> Ints:
        """The bytes of text that each id stands for [V], control tokens 0: from nats per label to bits per
        byte."""
        spell = self.tokenizer.token_bytes
        return np.array([len(spell(i, skip_special=True)) for i in range(self.vocab_size)], np.int64)

    def pack(
        self, split: str, length: int, seed: int = 0, whole: bool = False, stride: int | None = None
    ) -> Packed:
        """The rows of a split; see `Packed`. Raises `FileError` for a shard that is damaged or missing."""
        return Packed(self.shards(split), length, seed, whole, stride)

    def shards(self, split: str) -> list[Shard]:
        """The shards of a split, opened and compared with what dataset.json says of them."""
        about = self.splits.get(split)
        if about is None or not about.shards:
            there = ", ".join(name for name, s in self.splits.items() if s.shards)
            raise NotFoundError(f"{self.folder} has no documents in {split!r}, only in {there or 'nothing'}")
        shards = [Shard(self.folder / name, self.vocab_size) for name in about.shards]
        for what in ("tokens", "documents"):
            found = sum(getattr(shard, f"n_{what}") for shard in shards)
            if found != getattr(about, what):
                where = f"splits.{split}"
                raise FileError(
                    self.folder / DESCRIPTION, where, what, getattr(about, what), f"{found}, as in the shards"
                )
        return shards


DESCRIPTION = "dataset.json"
"""The file by which a folder is known as a dataset."""


def open_dataset(folder: str | Path) -> Dataset:
    """Reads a dataset's description; shards are opened by `pack`.

    Raises `NotFoundError` for a folder that is none, `FileError` for a damaged one.
    """
    folder = Path(folder)
    path = folder / DESCRIPTION
    if not path.exists():
        raise NotFoundError(
            f"{folder} is no dataset: {DESCRIPTION} is not there; make one with openbook data build"
        )
    about = read_json(path)
    if about.get("schema") != SCHEMA:
        raise FileError(path, "", "the schema", about.get("schema"), SCHEMA)
    size = _natural(path, "vocab_size", about.get("vocab_size"))
    if not 0 < size <= MAX_VOCAB:
        raise FileError(path, "", "vocab_size", size, f"1 to {MAX_VOCAB}")
    splits = about.get("splits")
    if not isinstance(splits, dict) or not set(splits) <= set(SPLITS):
        raise FileError(path, "", "splits", kind_of(splits), f"an object of {' and '.join(SPLITS)}")
    read = {name: _read_split(path, f"splits.{name}", split) for name, split in splits.items()}
    return Dataset(folder, str(about.get("source", "")), size, read)


def _read_split(path: Path, where: str, split: Any) -> Split:
    if not isinstance(split, dict) or set(split) != set(Split.__dataclass_fields__):
        expected = f"an object of {', '.join(Split.__dataclass_fields__)}"
        raise FileError(path, where, "the split", kind_of(split), expected)
    shards = split["shards"]
    if not isinstance(shards, list) or not all(map(is_shard_name, shards)):
        raise FileError(path, where, "shards", kind_of(shards), "a list of plain names in .safetensors")
    counts = ("documents", "bytes", "tokens", "labels")
    read = {name: _natural(path, f"{where}.{name}", split[name]) for name in counts}
    return Split(**read, shards=tuple(shards))


def _natural(path: Path, where: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise FileError(path, where, "the value", value, "a whole number")
    return value


# --- building one -------------------------------------------------------------------------------


def build(
    folder: str | Path,
    corpus: Corpus,
    tokenizer: int | Source,
    held_out: float = 0.07,
    progress: Progress | None = None,
) -> Dataset:
    """Makes a dataset of `corpus` in a new folder, which appears when it is complete.

    `tokenizer` is the source of a model whose tokenizer is taken, or a number of tokens: then a vocabulary
    is trained on what is not held out. About the fraction `held_out` of the documents, chosen by their
    names, goes to the split `heldout`.

    Raises `FileExistsError` for a folder that already holds something, `NotFoundError` for a corpus
    without text, and whatever reading and tokenizing it raise.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            errno.EEXIST, "is there already: choose another folder, or remove it", str(folder)
        )
    report = progress or (lambda stage, done, total: None)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        if isinstance(tokenizer, Source):
            take_tokenizer(tokenizer, part)
        else:
            train_bpe(_texts(corpus, held_out, report), tokenizer, part)
        vocab_size, splits = _write_splits(part, corpus, held_out, report)
        about = {
            "schema": SCHEMA,
            "source": corpus.name,
            "vocab_size": vocab_size,
            "splits": {name: asdict(split) for name, split in splits.items()},
        }
        (part / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return open_dataset(folder)


def _texts(corpus: Corpus, held_out: float, report: Progress) -> Iterator[str]:
    """The texts to train a vocabulary on: the model's own part only."""
    done = 0
    for document in corpus.read():
        if is_held_out(document, held_out):
            continue
        if isinstance(document, Chat):
            raise ChatError(
                f"{document.name} is a chat, and a new vocabulary has no chat template: take the tokenizer "
                "of a chat model (--tokenizer MODEL)"
            )
        done += len(document.text)
        report("learning the vocabulary", min(done, corpus.nbytes), corpus.nbytes)
        yield document.text


def _write_splits(
    folder: Path, corpus: Corpus, held_out: float, report: Progress
) -> tuple[int, dict[str, Split]]:
    tokenizer = load_tokenizer(folder)
    template = ChatTemplate(tokenizer.chat_template) if tokenizer.chat_template else None
    writers = {name: ShardWriter(folder, name, tokenizer.vocab_size) for name in SPLITS}
    nbytes: dict[str, int] = dict.fromkeys(SPLITS, 0)
    for document in corpus.read():
        name = "heldout" if is_held_out(document, held_out) else "train"
        for encoded in encode(document, tokenizer, template):
            writers[name].add(encoded.ids, encoded.learned)
        nbytes[name] += _nbytes(document)
        report("tokenizing", min(sum(nbytes.values()), corpus.nbytes), corpus.nbytes)
    for writer in writers.values():
        writer.flush()
    if not writers["train"].labels:
        raise NotFoundError(
            f"{corpus.name} holds nothing to train on: {writers['train'].documents} documents"
        )
    return tokenizer.vocab_size, {
        name: Split(writer.documents, nbytes[name], writer.tokens, writer.labels, writer.files)
        for name, writer in writers.items()
    }


def _nbytes(document: Document | Chat) -> int:
    if isinstance(document, Document):
        return len(document.text.encode("utf-8", "replace"))
    contents = (message.get("content") for message in document.messages)
    return sum(len(content.encode("utf-8", "replace")) for content in contents if isinstance(content, str))


# --- its tokenizer ------------------------------------------------------------------------------

GGUF_TOKENIZER = "tokenizer.gguf"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def take_tokenizer(source: Source, folder: Path) -> None:
    """Copies the tokenizer of a model into `folder`, as files that `load_tokenizer` reads."""
    tokenizer = Tokenizer.from_source(source)
    if tokenizer is None:
        name = source.path or source.spec.name
        raise NotFoundError(f"{name} has no tokenizer: name a folder with tokenizer.json or a .gguf file")
    if source.kind == "gguf":
        about = {key: value for key, value in source.config.items() if key.startswith("tokenizer.")}
        write_gguf(folder / GGUF_TOKENIZER, about, ())
        return
    for name in TOKENIZER_FILES:
        if source.path and (source.path / name).is_file():
            shutil.copy(source.path / name, folder)
    ends = {"eos_token_id": sorted(tokenizer.eos_ids)}  # wherever the model kept them
    (folder / "generation_config.json").write_text(json.dumps(ends) + "\n", "utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a dataset's folder."""
    if (folder / GGUF_TOKENIZER).exists():
        return Tokenizer.from_gguf(read_gguf(folder / GGUF_TOKENIZER).metadata)
    return Tokenizer.from_file(folder)
