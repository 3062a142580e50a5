"""Where training text comes from: files, chats, and the corpus that every CPython carries.

A document is the unit that is never joined with another: attention and labels stay inside it.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from openbook.files.errors import FileError
from openbook.files.regular import open_regular
from openbook.files.strict_json import kind_of, parse_object
from openbook.spec.presets import NotFoundError

MAX_DOCUMENT_BYTES = 256 * 2**20
"""Of one text file or one line of JSONL: each is read whole."""


class MissingExtraError(ImportError):
    """An optional package is needed; the message names the command that installs it."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text that is learned whole. What has the same `group` (by default each its own) is held out
    together: parts that repeat each other, so that none is a test of the others."""

    name: str
    text: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation of which the assistant's turns are learned; `messages` as a chat template takes them."""

    name: str
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    group: str = ""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents that can be read more than once. `nbytes` is about what reading them goes through."""

    name: str
    read: Callable[[], Iterator[Document | Chat]]
    nbytes: int


def is_held_out(document: Document | Chat, fraction: float) -> bool:
    """Whether the document is kept for evaluation.

    Decided by a hash of its group's name alone, so the answer never changes: not with the other
    documents, nor with the order, nor with the machine.
    """
    group = document.group or document.name
    digest = hashlib.sha256(group.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def corpus_of(paths: Sequence[str | os.PathLike[str]], field: str = "text") -> Corpus:
    """The corpus of files and folders, or the embedded one where `paths` is just "stdlib"."""
    if list(paths) == ["stdlib"]:
        documents = list(stdlib())
        version = ".".join(map(str, sys.version_info[:3]))
        name = f"stdlib of {sys.implementation.name} {version}"
        return Corpus(name, lambda: iter(documents), sum(len(document.text) for document in documents))
    files = [file for path in map(Path, paths) for file, _ in _files(path)]
    name = ", ".join(Path(path).name for path in paths[:3]) + ", ..." * (len(paths) > 3)
    return Corpus(name, lambda: read_files(paths, field), sum(file.stat().st_size for file in files))


# --- files --------------------------------------------------------------------------------------


def read_files(paths: Iterable[str | os.PathLike[str]], field: str = "text") -> Iterator[Document | Chat]:
    """The documents of text files, JSONL, Parquet and folders of them, in the order given.

    A text file is one document. A line of .jsonl (a row of .parquet) is a chat if it has `messages`, else
    the document in its `field`. A folder stands for all files below it whose ending is in `READERS`, in
    the order of their names; hidden ones are left out.

    Raises `FileError` for content that cannot be used, `NotFoundError` for an empty folder and
    `MissingExtraError` for Parquet without pyarrow.
    """
    for path in map(Path, paths):
        for file, name in _files(path):
            yield from READERS.get(file.suffix.lower(), _read_text)(file, name, field)


def _files(path: Path) -> list[tuple[Path, str]]:
    """The files that `path` stands for, with names below it. One named by itself may end in anything."""
    if not path.is_dir():
        return [(path, path.name)]
    files = [(file, file.relative_to(path).as_posix()) for file in sorted(path.rglob("*"))]
    wanted = [
        (file, name)
        for file, name in files
        if file.suffix.lower() in READERS and file.is_file() and "/." not in f"/{name}"
    ]
    if not wanted:
        raise NotFoundError(f"{path} holds no file that ends in {', '.join(READERS)}")
    return wanted


def _read_text(path: Path, name: str, field: str) -> Iterator[Document]:
    file, size = open_regular(path)
    with file:
        if size > MAX_DOCUMENT_BYTES:
            raise FileError(
                path, "", "the text's size", f"{size:,} bytes",
                f"at most {MAX_DOCUMENT_BYTES:,} for one document: split it, or make it JSONL",
            )  # fmt: skip
        raw = file.read(MAX_DOCUMENT_BYTES)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"not UTF-8 ({error.reason})"
        raise FileError(path, f"byte {error.start}", "the text", found, "UTF-8") from None
    yield Document(name, text.replace("\r\n", "\n"))


def _read_jsonl(path: Path, name: str, field: str) -> Iterator[Document | Chat]:
    file, _ = open_regular(path)
    with file:
        for number, line in enumerate(_lines(path, file), start=1):
            if line.strip():
                where = f"line {number}"
                yield _record(path, where, f"{name}:{number}", parse_object(path, line, where), field)


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_DOCUMENT_BYTES + 1):
        if len(line) > MAX_DOCUMENT_BYTES:
            raise FileError(path, "", "a line", "longer than that", f"at most {MAX_DOCUMENT_BYTES:,} bytes")
        yield line


def _read_parquet(path: Path, name: str, field: str) -> Iterator[Document | Chat]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found]
    except ImportError:
        raise MissingExtraError(f"{path}: to read Parquet, pip install pyarrow") from None

    open_regular(path)[0].close()
    try:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        wanted = [column for column in (field, "messages", "tools") if column in names]
        if not set(wanted) & {field, "messages"}:
            raise FileError(
                path, "", "the columns", ", ".join(names), f"one named messages or {field} (see --field)"
            )
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=wanted):
            for record in batch.to_pylist():
                number += 1
                yield _record(path, f"row {number}", f"{name}:{number}", record, field)
    except FileError:
        raise
    except (ArrowException, ValueError, OSError) as error:
        raise FileError(path, "", "the file", error, "Parquet that pyarrow reads") from error


def _record(path: Path, where: str, name: str, record: dict[str, Any], field: str) -> Document | Chat:
    """A line or row as a document: a chat if it has messages."""
    messages = record.get("messages")
    if messages is not None:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise FileError(
                path, where, "messages", kind_of(messages), "a list of objects with role and content"
            )
        return Chat(name, messages, record.get("tools"))
    text = record.get(field)
    if not isinstance(text, str):
        keys = ", ".join(record) or "nothing"
        found = kind_of(text) if field in record else f"missing among {keys}"
        raise FileError(path, where, field, found, "a text (--field names another one), or messages")
    return Document(name, text)


READERS: dict[str, Callable[[Path, str, str], Iterator[Document | Chat]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
    **dict.fromkeys((".txt", ".md", ".rst", ".py", ".c", ".h", ".html", ".csv", ".tex"), _read_text),
}
"""Endings of the files that are taken from a folder, and how each is read."""


# --- the corpus that needs no download -----------------------------------------------------------

_TOPICS = "pydoc_data/topics.py"
_LEFT_OUT = {
    "site-packages", "dist-packages", "lib-dynload",  # not the standard library's
    "test", "tests", "idle_test",
    "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip",  # often packaged apart
    "encodings",  # tables that nearly repeat each other: held out from each other they would prove nothing
}  # fmt: skip


def stdlib() -> Iterator[Document]:
    """The documentation topics (`help("for")`) and the sources of the running CPython, sorted by name.

    About 8 MB. The same for every installation of one version, as far as its distributor left the sources
    alone: tests, and what is often packaged apart or differs between machines, are left out.
    """
    from pydoc_data.topics import topics

    for name in sorted(topics):  # some contain others whole
        yield Document(f"topics/{name}", topics[name], group="topics")
    folder = Path(sysconfig.get_path("stdlib"))
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.py"))
    wanted = [name for name in names if _is_wanted(name)]
    if len(wanted) < 100:
        raise NotFoundError(f"this Python has no sources in {folder}: name files of your own instead")
    for name in wanted:
        raw = (folder / name).read_bytes()
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            text = raw.decode(encoding)
        except (SyntaxError, UnicodeDecodeError):
            continue  # a module whose very point is to be undecodable
        if text.strip():
            yield Document(name, text.replace("\r\n", "\n"))


def _is_wanted(name: str) -> bool:
    first, *_ = parts = name.split("/")
    machine = first.startswith(("config-", "_sysconfigdata"))
    return not machine and name != _TOPICS and not _LEFT_OUT & set(parts[:-1])
