"""The one error that a bad file raises."""

from __future__ import annotations

import os

_LONGEST_PART = 200
_LONGEST_PATH = 400


class FileError(ValueError):
    """A file that cannot be trusted or understood.

    `file` is its path, `where` the place in it, `field` what was being read there, `found` what the
    file says and `expected` what would have been right, or what to do instead. `str()` is one line
    that is safe to print: text from a file may hold anything, so control characters are escaped and
    long values cut.
    """

    def __init__(
        self, file: str | os.PathLike[str], where: str, field: str, found: object, expected: object
    ) -> None:
        super().__init__(file, where, field, found, expected)
        self.file = os.fspath(file)
        self.where = where
        self.field = field
        self.found = found
        self.expected = expected

    def __str__(self) -> str:
        place = f", {printable(self.where)}" if self.where else ""
        fault = f"{printable(self.field)} is {printable(self.found)}, expected {printable(self.expected)}"
        return f"{printable(self.file, _LONGEST_PATH)}{place}: {fault}"


class TruncatedError(FileError):
    """A file that ends before what it announces, as a download that broke off does."""


def printable(value: object, longest: int = _LONGEST_PART) -> str:
    """`value` as text for one line of a terminal: escaped where not printable, cut where long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = value if isinstance(value, str) else str(value)
    shown = text[: longest + 1]
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in shown
    )
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."
