"""Does a file hold exactly the tensors that the ledger names? Answered from its header alone.

`check` compares; `verify` does so for a source by name and, if asked, reads every value too.
No torch is imported here: reading a header must not cost a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from openbook.files.errors import FileError, printable
from openbook.ledger import ledger
from openbook.sources import Source, resolve
from openbook.spec.model import ModelSpec
from openbook.spec.reader import UnsupportedError
from openbook.weights.dialects import GGUF, HF, OWN, Dialect, Place, places
from openbook.weights.tensors import READABLE, Stored, Tensors, Values, open_tensors, summarise

Status = Literal["ok", "tied", "ignored", "missing", "unexpected", "shape", "dtype"]
"""`tied`: absent, and need not be there. `ignored`: no weights (a mask, a rotary table)."""

_PROBLEMS = {
    "missing": "missing",
    "unexpected": "unexpected",
    "shape": "of the wrong shape",
    "dtype": "of a type that cannot be read",
}


@dataclass(frozen=True)
class Checked:
    """One tensor: where the ledger wants it (`place`), and what the file has (`stored`)."""

    name: str
    status: Status
    place: Place | None = None
    stored: Stored | None = None
    values: Values | None = None

    @property
    def ok(self) -> bool:
        return self.status not in _PROBLEMS

    def __str__(self) -> str:
        """'blk.0.attn_q.weight [64, 48] instead of [48, 64]'"""
        name = printable(self.name)
        if self.status == "shape" and self.place and self.stored:
            return f"{name} {list(self.stored.shape)} instead of {list(self.place.shape)}"
        if self.status == "dtype" and self.stored:
            return f"{name} {self.stored.dtype}"
        return name


class MisfitError(FileError):
    """A file whose tensors are not the model's. `.misfits` lists every one of them."""

    def __init__(self, path: Path, misfits: Sequence[Checked]) -> None:
        self.misfits = list(misfits)
        super().__init__(path, "", "the set of tensors", "; ".join(_summary(misfits)), "the model's")

    def __str__(self) -> str:
        return (
            f"{printable(self.file)}: the tensors are not those of the model: {self.found}; "
            "do configuration and weights belong together?"
        )


def _summary(misfits: Sequence[Checked], named: int = 6) -> Iterator[str]:
    """'2 missing (a, b)' for each kind of problem; only the first few names of each."""
    for status, words in _PROBLEMS.items():
        some = [str(m) for m in misfits if m.status == status]
        if some:
            more = f", and {len(some) - named} more" if len(some) > named else ""
            yield f"{len(some)} {words} ({', '.join(some[:named])}{more})"


def check(source: Source, tensors: Tensors) -> list[Checked]:
    """Every tensor that the ledger or the file names, compared: the ledger's first, in its order.

    Raises `UnsupportedError` if the file's format has no name for a parameter.
    """
    stored = tensors.stored
    shapes = {row.name: row.shape for row in ledger(source.spec).tensors}
    dialect, wanted = _layout_of(source, shapes, stored)
    found = _spelled(dialect, stored)
    rows = [_compare(place, found.get(place.stored)) for place in wanted]
    if source.spec.head.tied:
        rows = _share_head(rows)
    matched = {row.stored.name for row in rows if row.stored}
    ignored = dialect.ignored_of(stored)
    for name, tensor in stored.items():
        if name not in matched:
            rows.append(Checked(name, "ignored" if name in ignored else "unexpected", stored=tensor))
    return rows


def _layout_of(
    source: Source, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored]
) -> tuple[Dialect, list[Place]]:
    """The dialect of the file, and where it wants the parameters: of several layouts, the one that
    names most of the file's tensors."""
    dialect = _dialect_of(source)
    layouts = [(layout, places(source.spec, shapes, layout)) for layout in (dialect, *dialect.also)]

    def named(layout: tuple[Dialect, list[Place]]) -> int:
        found = _spelled(layout[0], stored)
        return sum(place.stored in found for place in layout[1])

    return max(layouts, key=named) if dialect.also else layouts[0]


def _spelled(dialect: Dialect, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The file's tensors under the names that the table has for them."""
    plain = {dialect.plain(name): tensor for name, tensor in stored.items()}
    if not any(name.startswith(dialect.base) for name in plain):
        plain |= {dialect.base + name: tensor for name, tensor in plain.items()}
    return plain


def _dialect_of(source: Source) -> Dialect:
    if source.is_own:
        return OWN
    tables = GGUF if source.kind == "gguf" else HF
    if source.family not in tables:
        raise UnsupportedError(
            f"no table names the weights of {printable(source.family)!r}; there are {', '.join(tables)}"
        )
    return tables[source.family]


def _compare(place: Place, stored: Stored | None) -> Checked:
    status: Status = "ok"
    if stored is None:
        status = "missing"
    elif stored.shape != place.shape:
        status = "shape"
    elif stored.dtype not in READABLE:
        status = "dtype"
    return Checked(stored.name if stored else place.stored, status, place, stored)


def _share_head(rows: list[Checked]) -> list[Checked]:
    """Of a tied pair one is enough. A file without the embedding has its matrix under the head's name:
    so writes a program that drops all but the first, by alphabet, of several names of one storage."""
    at = {row.place.parameters: i for i, row in enumerate(rows) if row.place}
    embed, head = at[("embed.weight",)], at[("head.weight",)]
    if rows[embed].status == "missing" and rows[head].status != "missing":
        rows[embed] = replace(rows[embed], status=rows[head].status, stored=rows[head].stored)
        rows[head] = replace(rows[head], status="tied", stored=None)
    elif rows[head].status == "missing":
        rows[head] = replace(rows[head], status="tied")
    return rows


# --- a whole source -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What `verify` found. `parameters` counts the elements of unique storages, as the ledger does."""

    path: Path
    spec: ModelSpec
    rows: list[Checked]
    parameters: int
    bytes: int

    @property
    def misfits(self) -> list[Checked]:
        return [row for row in self.rows if not row.ok]

    @property
    def nonfinite(self) -> list[Checked]:
        """Tensors with a NaN or an infinity; known only if the values were read."""
        return [row for row in self.rows if row.values and (row.values.nan or row.values.inf)]

    @property
    def ok(self) -> bool:
        return not self.misfits and not self.nonfinite


def verify(source: str | Path | Source, values: bool = False) -> Report:
    """Compares every tensor of a file or folder with the ledger of its configuration.

    With `values` each tensor is also read: NaN, infinities and zeros are counted, the smallest and the
    largest number noted. Raises what `sources.resolve` and the readers raise for a file that is none.
    """
    source = source if isinstance(source, Source) else resolve(source)
    tensors = open_tensors(source)
    rows = check(source, tensors)
    if values:
        rows = [replace(row, values=_summary_of(row, tensors)) for row in rows]
    size = sum(stored.nbytes for stored in tensors.stored.values())
    return Report(tensors.path, source.spec, rows, ledger(source.spec).params.total, size)


def _summary_of(row: Checked, tensors: Tensors) -> Values | None:
    if row.stored is None or row.stored.dtype not in READABLE:
        return None
    return summarise(tensors.read(row.stored.name))
