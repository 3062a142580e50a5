"""A table of names, and what it means for one model: where each of its parameters lies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from openbook.spec.model import Block, ModelSpec
from openbook.spec.reader import UnsupportedError
from openbook.weights.dialects.transforms import Identity, Shape, Transform

_IDENTITY = Identity()


@dataclass(frozen=True)
class RowsPermuted:
    """Rotary pairs made neighbours: llama.cpp's llama rotates rows 2i, 2i+1 where we rotate i, i+K/2.

    Within each head the rows [0..7] are stored as [0, 4, 1, 5, 2, 6, 3, 7]. `heads` is the number of
    heads of this very tensor: the key/value heads for a key.
    """

    heads: int

    def stored_shape(self, shape: Shape) -> Shape:
        return shape

    def load(self, stored: Any) -> Any:
        return self._swap(stored, (-1, 2))

    def store(self, ours: Any) -> Any:
        return self._swap(ours, (2, -1))

    def _swap(self, rows: Any, pairs: tuple[int, int]) -> Any:
        split = rows.reshape(self.heads, *pairs, *rows.shape[1:])
        return split.swapaxes(1, 2).reshape(rows.shape)


# --- tables -------------------------------------------------------------------------------------


_IDENTITY = Identity()


@dataclass(frozen=True)
class Row:
    """One line of a table: our modules, the container's tensor, the arrangement (fixed, or by block)."""

    ours: str | tuple[str, ...]
    theirs: str
    transform: Transform | Callable[[Block], Transform] = _IDENTITY

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class Dialect:
    """A table and what surrounds it.

    `base` is the prefix that a file may lack throughout (a checkpoint of the model without its head).
    `ignored` matches tensors that hold no weights: masks and tables that a program can compute.
    """

    name: str
    rows: tuple[Row, ...]
    base: str = ""
    ignored: str = r"(?!)"

    def ignores(self, stored: str) -> bool:
        """Whether a file may hold this tensor although the model has no parameter for it."""
        return re.fullmatch(self.ignored, stored) is not None


@dataclass(frozen=True)
class Place:
    """One stored tensor and the parameters it holds, whose rows follow each other."""

    stored: str
    shape: Shape
    parameters: tuple[str, ...]
    rows: tuple[int, ...]
    transform: Transform

    def load(self, stored: Any) -> Iterator[tuple[str, Any]]:
        """Each parameter's name and its elements in our arrangement, as views where strides allow it."""
        joined = self.transform.load(stored)
        start = 0
        for name, rows in zip(self.parameters, self.rows, strict=True):
            yield name, joined[start : start + rows]
            start += rows


def places(spec: ModelSpec, shapes: Mapping[str, Shape], dialect: Dialect) -> list[Place]:
    """Where every parameter of the model lies in a file of this dialect, in the order of `shapes`.

    `shapes` are the ledger's rows, name → shape. Raises `UnsupportedError` for a parameter that the dialect
    has no name for: such a model cannot be kept in such a file.
    """
    row_of = {module: row for row in dialect.rows for module in row.modules}
    found: list[Place] = []
    done: set[str] = set()
    for name in shapes:
        if name in done:
            continue
        module, _, suffix = name.rpartition(".")
        pattern, layer = _generic(module)
        row = row_of.get(pattern)
        if row is None:
            raise UnsupportedError(
                f"the {dialect.name} format has no tensor for {name}, so it cannot hold this model"
            )
        names = tuple(f"{m.replace('{n}', str(layer))}.{suffix}" for m in row.modules)
        absent = [n for n in names if n not in shapes]
        if absent:
            raise UnsupportedError(
                f"the {dialect.name} format keeps {', '.join(names)} in one tensor, but this model has no "
                f"{', '.join(absent)}"
            )
        transform = row.transform
        if callable(transform):
            transform = transform(spec.layers[layer])
        found.append(
            Place(
                stored=f"{row.theirs.replace('{n}', str(layer))}.{suffix}",
                shape=transform.stored_shape(_joined(*(shapes[n] for n in names))),
                parameters=names,
                rows=tuple(shapes[n][0] for n in names),
                transform=transform,
            )
        )
        done.update(names)
    return found


def _generic(module: str) -> tuple[str, int]:
    """'layers.3.attn.q' → ('layers.{n}.attn.q', 3); a module outside the layers keeps its name."""
    match = re.match(r"layers\.(\d+)\.", module)
    return (f"layers.{{n}}.{module[match.end() :]}", int(match[1])) if match else (module, -1)


def _joined(*shapes: Shape) -> Shape:
    """The shape of these parameters laid one after another along their rows."""
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
