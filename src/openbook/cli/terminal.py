"""Writing to a person: notes and progress on stderr, colour only where it is wanted.

`--quiet` and `--verbose` belong to every verb; they are kept here, once, for the whole run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from types import TracebackType
from typing import Any, TextIO

quiet = False
verbose = False

_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}


def set_quiet(value: bool) -> bool:
    global quiet
    quiet = quiet or value
    return value


def set_verbose(value: bool) -> bool:
    global verbose
    verbose = verbose or value
    return value


def note(text: str = "", end: str = "\n") -> None:
    """One line for the person, on stderr; `--quiet` drops it."""
    if not quiet:
        print(text, end=end, file=sys.stderr, flush=True)


def write_json(verb: str, data: dict[str, Any]) -> None:
    """The result as one JSON object that names its own schema, on stdout."""
    print(json.dumps({"schema": f"openbook.{verb}/1", **data}, indent=2, ensure_ascii=False))


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """The text in a colour or weight, where `stream` (stdout by default) shows one."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if _colours(stream or sys.stdout) else text


def _colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """The columns to write in: the terminal's, at most 100; 80 where there is no terminal."""
    return min(shutil.get_terminal_size((80, 24)).columns, 100)


class Progress:
    """How far a long step is: a bar on a terminal, elsewhere one plain line every few seconds."""

    _EVERY_S = 5.0

    def __init__(self) -> None:
        self._bar = sys.stderr.isatty() and not quiet
        self._next = time.monotonic() + (0 if self._bar else self._EVERY_S)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """The signature that `openbook.models.Progress` asks for; done and total in bytes."""
        now = time.monotonic()
        if now < self._next:
            return
        line = f"{stage} {done / 1e6:.0f} of {total / 1e6:.0f} MB"
        if self._bar:
            filled = 30 * done // max(total, 1)
            print(f"\r\x1b[K{line}  {'━' * filled}{'╌' * (30 - filled)}", end="", file=sys.stderr, flush=True)
            self._next = now + 0.1
        else:
            note(line)
            self._next = now + self._EVERY_S


class Status:
    """What a long step is at, in words: one line that is overwritten on a terminal, nothing elsewhere."""

    def __enter__(self) -> Status:
        return self

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty() and not quiet:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self("")


class Wrapped:
    """Text that comes in pieces, broken between words at the terminal's width and indented."""

    def __init__(self, stream: TextIO, indent: int) -> None:
        self._stream = stream
        self._indent = indent
        self._column = indent
        self._gap = ""
        self._word = ""

    def write(self, text: str) -> None:
        for char in text:
            if not char.isspace():
                self._word += char
                continue
            self._end_word()
            if char == "\n":
                self._new_line()
            elif self._column > self._indent:
                self._gap = " "
        self._stream.flush()

    def close(self) -> None:
        """Writes the last word."""
        self._end_word()
        self._stream.flush()

    def _end_word(self) -> None:
        if not self._word:
            return
        if self._column + len(self._gap + self._word) > width() and self._column > self._indent:
            self._new_line()
        self._stream.write(self._gap + self._word)
        self._column += len(self._gap + self._word)
        self._gap = self._word = ""

    def _new_line(self) -> None:
        self._stream.write("\n" + " " * self._indent)
        self._column, self._gap = self._indent, ""
