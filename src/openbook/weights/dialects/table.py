"""A table of names, and what it means for one model: where each of its parameters lies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from openbook.spec.model import Block, ModelSpec
from openbook.spec.reader import UnsupportedError
from openbook.weights.dialects.transforms import Identity, Shape, Transform

MAX_TENSORS = 1_000_000
"""Ten times what the largest checkpoints hold; a model that would need more is refused unlisted."""

_IDENTITY = Identity()


@dataclass(frozen=True)
class Row:
    """One line of a table: what we have, the container's tensor, the arrangement.

    Both names are of modules, and whatever suffix a parameter has (`.weight`, `.bias`) is the same on
    both sides; or both are of parameters, in full. `{n}` is the layer. An `{i}` in the container's name
    stands for one stored tensor for each index of our first axis, such as each expert's own matrix.

    Of several modules the parts lie one after another in one stored tensor, along `axis` of it, which is
    the axis before the transform. The container's name and the transform may depend on the block.
    """

    ours: str | tuple[str, ...]
    theirs: str | Callable[[Block], str]
    transform: Transform | Callable[[Block], Transform] = _IDENTITY
    axis: int = 0

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class HeadRows:
    """Of each head's rows in a matrix of all `heads`, those from `start` to `stop`."""

    heads: int
    start: int
    stop: int

    def of(self, whole: Any) -> Any:
        """[heads · rows, columns] → [heads, stop - start, columns], as a view."""
        return whole.reshape(self.heads, -1, *whole.shape[1:])[:, self.start : self.stop]

    def shape_of(self, shape: Shape) -> Shape:
        return (self.heads, self.stop - self.start, *shape[1:])


@dataclass(frozen=True)
class Split:
    """A line for a module whose rows lie in several stored tensors, each with its own transform."""

    ours: str
    parts: Callable[[Block], tuple[tuple[str, HeadRows, Transform], ...]]

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.ours,)


@dataclass(frozen=True)
class Dialect:
    """A table and what surrounds it.

    `base` is the prefix that a file may lack throughout (a checkpoint of the model without its head).
    `ignored` matches tensors that the model does without: masks and tables that a program can compute,
    and other models in the same file, such as the one that sees. `drafts` matches, in a layer that guesses
    further tokens and is no part of the model, a tensor that only such layers have; its group is the
    prefix of the whole layer. `prefixes` are (a file's prefix, the table's instead): the text model of a
    model that also sees has its names below another. `also` are other layouts of the same model that
    files are found in; they are read but never written.
    """

    name: str
    rows: tuple[Row | Split, ...]
    base: str = ""
    ignored: str = r"(?!)"
    drafts: str = r"(?!)"
    prefixes: tuple[tuple[str, str], ...] = ()
    also: tuple[Dialect, ...] = ()

    def plain(self, stored: str) -> str:
        """A file's name as the table spells it."""
        for found, meant in self.prefixes:
            if stored.startswith(found):
                return meant + stored.removeprefix(found)
        return stored

    def ignored_of(self, stored: Iterable[str]) -> set[str]:
        """Those of a file's tensors that it may hold although the model has no parameter for them."""
        plain = {name: self.plain(name) for name in stored}
        layers = tuple(m[1] for name in plain.values() if (m := re.fullmatch(self.drafts, name)))
        return {
            name
            for name, meant in plain.items()
            if re.fullmatch(self.ignored, meant) or meant.startswith(layers)
        }


OWN = Dialect("openbook", rows=())
"""Our own names and arrangement, whatever the model: for one that no other format describes."""


@dataclass(frozen=True)
class Place:
    """One stored tensor and the parameters it holds, or of each only its elements at `index` of the
    first axis, or some of each head's rows.

    They follow each other along `axis`, each as long there as `sizes` says.
    """

    stored: str
    shape: Shape
    parameters: tuple[str, ...]
    sizes: tuple[int, ...]
    transform: Transform
    axis: int = 0
    index: int | HeadRows | None = None

    def part_of(self, parameter: Any) -> Any:
        """The elements of a parameter that lie in this tensor, as a view."""
        if isinstance(self.index, HeadRows):
            return self.index.of(parameter)
        return parameter if self.index is None else parameter[self.index]

    def load(self, stored: Any) -> Iterator[tuple[str, Any]]:
        """Each parameter's name and its elements in our arrangement, as views where strides allow it."""
        joined = self.transform.load(stored)
        start = 0
        for name, size in zip(self.parameters, self.sizes, strict=True):
            yield name, joined[(slice(None),) * self.axis + (slice(start, start + size),)]
            start += size


def places(spec: ModelSpec, shapes: Mapping[str, Shape], dialect: Dialect) -> list[Place]:
    """Where every parameter of the model lies in a file of this dialect, in the order of `shapes`.

    `shapes` are the ledger's rows, name → shape. Raises `UnsupportedError` for a parameter that the dialect
    has no name for, or for more than `MAX_TENSORS`: such a model cannot be kept in such a file.
    """
    if dialect is OWN:
        _check_number(dialect, len(shapes))
        return [Place(name, shape, (name,), shape[:1], _IDENTITY) for name, shape in shapes.items()]
    row_of = {module: row for row in dialect.rows for module in row.modules}
    found: list[Place] = []
    done: set[str] = set()
    for name in shapes:
        if name in done:
            continue
        pattern, layer = _generic(name)
        row, suffix = row_of.get(pattern), ""
        if row is None:
            module, _, suffix = pattern.rpartition(".")
            row, suffix = row_of.get(module), f".{suffix}"
        if row is None:
            raise UnsupportedError(
                f"the {dialect.name} format has no tensor for {name}, so it cannot hold this model"
            )
        names = tuple(f"{m.replace('{n}', str(layer))}{suffix}" for m in row.modules)
        absent = [n for n in names if n not in shapes]
        if absent:
            raise UnsupportedError(
                f"the {dialect.name} format keeps {', '.join(names)} in one tensor, but this model has no "
                f"{', '.join(absent)}"
            )
        block = spec.layers[layer]
        done.update(names)
        if isinstance(row, Split):
            found += _split_places(row.parts(block), name, shapes[name], layer, suffix)
            continue
        theirs = row.theirs if isinstance(row.theirs, str) else row.theirs(block)
        stored = f"{theirs.replace('{n}', str(layer))}{suffix}"
        transform = row.transform(block) if callable(row.transform) else row.transform
        _check_number(dialect, len(found) + (shapes[name][0] if "{i}" in stored else 1))
        found += _places_of(stored, {n: shapes[n] for n in names}, transform, row.axis)
    return found


def _split_places(
    parts: Iterable[tuple[str, HeadRows, Transform]], name: str, shape: Shape, layer: int, suffix: str
) -> Iterator[Place]:
    """The tensors that together hold one parameter."""
    for theirs, rows, transform in parts:
        part = rows.shape_of(shape)
        stored = f"{theirs.replace('{n}', str(layer))}{suffix}"
        yield Place(stored, transform.stored_shape(part), (name,), part[:1], transform, index=rows)


def _places_of(stored: str, shapes: Mapping[str, Shape], transform: Transform, axis: int) -> Iterator[Place]:
    """The one tensor of these parameters, or one for each index of their first axis."""
    names = tuple(shapes)
    if "{i}" not in stored:
        sizes = tuple(shape[axis] for shape in shapes.values())
        shape = transform.stored_shape(_joined(shapes[names[0]], axis, sum(sizes)))
        yield Place(stored, shape, names, sizes, transform, axis)
        return
    parts = {name: shape[1:] for name, shape in shapes.items()}
    sizes = tuple(shape[axis] for shape in parts.values())
    shape = transform.stored_shape(_joined(parts[names[0]], axis, sum(sizes)))
    for index in range(shapes[names[0]][0]):
        yield Place(stored.replace("{i}", str(index)), shape, names, sizes, transform, axis, index)


def _joined(shape: Shape, axis: int, size: int) -> Shape:
    """The shape of parameters laid one after another along `axis`, where together they have `size`."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def _generic(name: str) -> tuple[str, int]:
    """'layers.3.attn.q.weight' → ('layers.{n}.attn.q.weight', 3); a name outside the layers is kept, and
    its layer is the last one, whose block nobody asks for."""
    match = re.match(r"layers\.(\d+)\.", name)
    return (f"layers.{{n}}.{name[match.end() :]}", int(match[1])) if match else (name, -1)


def _check_number(dialect: Dialect, number: int) -> None:
    if number > MAX_TENSORS:
        raise UnsupportedError(
            f"the {dialect.name} format would need {number:,} tensors for this model, more than the "
            f"{MAX_TENSORS:,} that are read: are the numbers of layers and experts right?"
        )
