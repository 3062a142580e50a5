"""Strings that remember which of their characters came from a message.

A chat template mixes its own text, whose control tokens count, with content, whose do not. A `Marked`
string carries that difference through everything a template does to strings: it behaves as its plain
text in every test and comparison, and its operations keep the marks character by character. Where
the origin of a character cannot be known the whole result counts as content, which is the safe side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, SupportsIndex

Parts = tuple[tuple[str, bool], ...]
"""(text, special) in order, as `Tokenizer.encode_parts` takes them: special is the template's text."""


class Marked(str):
    """Text in parts, each the template's own or content."""

    __slots__ = ("parts",)
    parts: Parts

    def __new__(cls, parts: Iterable[tuple[str, bool]]) -> Marked:
        parts = _merged(parts)
        self = super().__new__(cls, "".join(text for text, _ in parts))
        self.parts = parts
        return self

    # --- joining ---------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Marked:
        return Marked((*self.parts, *parts_of(other))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Marked:
        return Marked((*parts_of(other), *self.parts)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> Marked:
        return Marked(self.parts * count.__index__())

    def __rmul__(self, count: SupportsIndex) -> Marked:
        return self * count

    def join(self, iterable: Iterable[str], /) -> Marked:
        parts: list[tuple[str, bool]] = []
        for i, text in enumerate(iterable):
            parts += (*self.parts, *parts_of(text)) if i else parts_of(text)
        return Marked(parts)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Marked:
        count = count.__index__()
        marks = {special for _, special in (*self.parts, *parts_of(new))}
        if not old or len(marks) == 1:
            return Marked([(super().replace(old, new, count), marks == {True})])
        return template_text(new).join(self.split(old, count)) if count else self

    # --- taking apart ----------------------------------------------------------------------------

    def __getitem__(self, key: Any, /) -> Marked:
        positions = range(len(self))[key]
        if isinstance(positions, int):
            return self._cut(positions, positions + 1)
        if positions.step == 1:
            return self._cut(positions.start, max(positions.start, positions.stop))
        return content(super().__getitem__(key))

    def __iter__(self) -> Iterator[Marked]:
        return (Marked([(char, special)]) for text, special in self.parts for char in text)

    def _cut(self, start: int, stop: int) -> Marked:
        parts, position = [], 0
        for text, special in self.parts:
            parts.append((text[max(start - position, 0) : max(stop - position, 0)], special))
            position += len(text)
        return Marked(parts)

    def strip(self, chars: str | None = None, /) -> Marked:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Marked:
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> Marked:
        return self._cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> Marked:
        return self._cut(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> Marked:
        return self._cut(0, len(self) - len(suffix) if self.endswith(suffix) else len(self))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces: list[str] = []
        start = 0
        for piece in super().split(sep, maxsplit):
            start = self.find(piece, start) if sep is None else start
            pieces.append(self._cut(start, start + len(piece)))
            start += len(piece) + len(sep or "")
        return pieces

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces: list[str] = []
        stop = len(self)
        for piece in reversed(super().rsplit(sep, maxsplit)):
            start = self.rfind(piece, 0, stop) if sep is None else stop - len(piece)
            pieces.append(self._cut(start, start + len(piece)))
            stop = start - len(sep or "")
        return pieces[::-1]

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines: list[str] = []
        start = 0
        for line in super().splitlines(keepends=True):
            shown = line if keepends else line.splitlines()[0]
            lines.append(self._cut(start, start + len(shown)))
            start += len(line)
        return lines

    def partition(self, sep: str, /) -> tuple[Marked, Marked, Marked]:
        return self._around(sep, self.find(sep), missing=len(self))

    def rpartition(self, sep: str, /) -> tuple[Marked, Marked, Marked]:
        return self._around(sep, self.rfind(sep), missing=0)

    def _around(self, sep: str, start: int, missing: int) -> tuple[Marked, Marked, Marked]:
        stop = start + len(sep)
        if start < 0:
            start = stop = missing
        return self._cut(0, start), self._cut(start, stop), self._cut(stop, len(self))

    # --- changing case ---------------------------------------------------------------------------

    def upper(self) -> Marked:
        return self._reshaped(super().upper())

    def lower(self) -> Marked:
        return self._reshaped(super().lower())

    def title(self) -> Marked:
        return self._reshaped(super().title())

    def capitalize(self) -> Marked:
        return self._reshaped(super().capitalize())

    def swapcase(self) -> Marked:
        return self._reshaped(super().swapcase())

    def _reshaped(self, text: str) -> Marked:
        """`text` with this string's marks, if each character still stands where it stood."""
        if len(text) != len(self):
            return content(text)
        parts, position = [], 0
        for part, special in self.parts:
            parts.append((text[position : position + len(part)], special))
            position += len(part)
        return Marked(parts)


def content(text: str) -> Marked:
    """Text whose control tokens are only characters."""
    return Marked([(text, False)])


def template_text(text: str) -> Marked:
    """`text` as the template's own, unless it is marked already."""
    return text if isinstance(text, Marked) else Marked([(text, True)])


def parts_of(text: str) -> Parts:
    return text.parts if isinstance(text, Marked) else ((text, True),)


def _merged(parts: Iterable[tuple[str, bool]]) -> Parts:
    filled = [part for part in parts if part[0]]
    return tuple(
        ("".join([text for text, _ in run]), special)
        for special, run in groupby(filled, key=lambda part: part[1])
    )
