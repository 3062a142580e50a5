"""Tokens on disk: safetensors files of whole documents, read through a memory map.

A shard holds `tokens` (U16, or U32 for a vocabulary beyond 65,536; shape [N]), `starts` (I64 [documents
+ 1]: where each document begins, and N), and, if not every token is to be learned, `learned` (U8 [N],
1 where the token is the model's own to predict). Its metadata name the format and its version.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from openbook.files.errors import FileError
from openbook.files.safetensors import StoredTensor, read_header

Ints = npt.NDArray[np.int64]

FORMAT = "openbook.shard/1"
MAX_DOCUMENTS = 1 << 24
"""Of one shard: their starts are read into memory, so a file may not ask for any number."""
MAX_TOKENS = 1 << 26
"""Of a shard that we write, unless one document alone has more: 128 MiB as U16."""


class ShardWriter:
    """Collects documents and writes them as `NAME-00000.safetensors`, `NAME-00001.safetensors`, ..."""

    def __init__(self, folder: Path, name: str, vocab_size: int, max_tokens: int = MAX_TOKENS) -> None:
        self.files: list[str] = []
        self.documents = self.tokens = self.labels = 0
        self._folder, self._name, self._max_tokens = folder, name, max_tokens
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._clear()

    def _clear(self) -> None:
        self._pieces: list[npt.NDArray[Any]] = []
        self._marks: list[npt.NDArray[np.uint8]] = []
        self._lengths: list[int] = []
        self._size = 0

    def add(self, ids: Iterable[int], learned: npt.NDArray[np.bool_] | None = None) -> None:
        """One document; `learned` marks the tokens that are the model's own to predict (None: all)."""
        piece = np.fromiter(ids, self._dtype)
        if not len(piece):
            return
        if self._size + len(piece) > self._max_tokens or len(self._lengths) == MAX_DOCUMENTS:
            self.flush()
        marks = np.ones(len(piece), np.uint8) if learned is None else learned.astype(np.uint8)
        self.labels += int(marks[1:].sum())
        self._pieces.append(piece)
        self._marks.append(marks)
        self._lengths.append(len(piece))
        self._size += len(piece)

    def flush(self) -> None:
        """Writes what has been collected."""
        if not self._lengths:
            return
        arrays: dict[str, npt.NDArray[Any]] = {
            "tokens": np.concatenate(self._pieces),
            "starts": np.cumsum([0, *self._lengths], dtype=np.int64),
        }
        learned = np.concatenate(self._marks)
        if not learned.all():
            arrays["learned"] = learned
        name = f"{self._name}-{len(self.files):05}.safetensors"
        save_file(arrays, self._folder / name, metadata={"format": FORMAT})
        self.files.append(name)
        self.documents += len(self._lengths)
        self.tokens += self._size
        self._clear()


class Shard:
    """One file, opened. `starts` [documents + 1] is in memory, the rest stays on disk.

    Whoever shortens the file meanwhile ends the process (SIGBUS): replace files, do not rewrite them.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        """Raises `FileError` unless the file is a shard whose numbers agree with each other."""
        self.path, self._vocab_size = path, vocab_size
        tensors, metadata = read_header(path)
        if metadata.get("format") != FORMAT:
            raise FileError(path, "__metadata__", "the format", metadata.get("format"), FORMAT)
        self.n_tokens = _length(path, tensors, "tokens", ("U16", "U32"))
        n_starts = _length(path, tensors, "starts", ("I64",))
        if not 2 <= n_starts <= MAX_DOCUMENTS + 1:
            raise FileError(path, "starts", "the number of documents", n_starts - 1, f"1 to {MAX_DOCUMENTS}")
        self.has_marks = "learned" in tensors
        if self.has_marks and _length(path, tensors, "learned", ("U8",)) != self.n_tokens:
            raise FileError(path, "learned", "the length", tensors["learned"].shape, [self.n_tokens])
        self._file = safe_open(path, framework="np")
        self.starts: Ints = self._file.get_tensor("starts")
        if self.starts[0] != 0 or self.starts[-1] != self.n_tokens or (np.diff(self.starts) <= 0).any():
            expected = f"rising from 0 to {self.n_tokens}, the number of tokens"
            raise FileError(path, "starts", "the documents' places", "not in order", expected)

    @property
    def n_documents(self) -> int:
        return len(self.starts) - 1

    def tokens(self, start: int, stop: int) -> Ints:
        """The ids from `start` up to `stop`. Raises `FileError` for one that the vocabulary lacks."""
        ids = self._file.get_slice("tokens")[start:stop].astype(np.int64)
        if len(ids) and ids.max() >= self._vocab_size:
            where = f"token {start + int(ids.argmax())}"
            raise FileError(self.path, where, "the id", int(ids.max()), f"below {self._vocab_size}")
        return ids

    def learned(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of the same tokens are the model's own to predict."""
        if not self.has_marks:
            return np.ones(stop - start, bool)
        return self._file.get_slice("learned")[start:stop] != 0


def _length(path: Path, tensors: dict[str, StoredTensor], name: str, dtypes: tuple[str, ...]) -> int:
    """The length of a row of numbers that must be there."""
    tensor = tensors.get(name)
    if tensor is None:
        raise FileError(path, "", "the tensors", ", ".join(tensors) or "none", f"one named {name}")
    if tensor.dtype not in dtypes or len(tensor.shape) != 1:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise FileError(path, name, "the type", found, f"one row of {' or '.join(dtypes)}")
    return tensor.shape[0]


def is_shard_name(name: object) -> bool:
    """A plain file name that leads nowhere else."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and os.path.basename(name) == name
        and not name.startswith(".")
        and not set(name) & set("/\\:")
    )
