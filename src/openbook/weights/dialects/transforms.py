"""How a container arranges a tensor's elements, and how to undo it.

Nothing here computes: arrays are only sliced, reshaped and have their axes swapped, so numpy arrays and
torch tensors both pass through, and no framework is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Shape = tuple[int, ...]


class Transform(Protocol):
    """A rearrangement of elements and its inverse. A vector (a bias) is a matrix without columns."""

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape in the container of a parameter of this shape."""
        ...

    def load(self, stored: Any, /) -> Any:
        """Container's arrangement → ours."""
        ...

    def store(self, ours: Any, /) -> Any:
        """Our arrangement → the container's."""
        ...


@dataclass(frozen=True)
class Identity:
    """Stored as we hold it, matrices (out, in)."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape

    def load(self, stored: Any) -> Any:
        return stored

    def store(self, ours: Any) -> Any:
        return ours


@dataclass(frozen=True)
class Transposed:
    """Matrices stored (in, out), as GPT-2's Conv1D does, be it one or one for each expert. A square matrix
    hides a forgotten transpose."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape if len(shape) < 2 else (*shape[:-2], shape[-1], shape[-2])

    def load(self, stored: Any) -> Any:
        return stored.swapaxes(-2, -1) if stored.ndim > 1 else stored

    store = load


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


@dataclass(frozen=True)
class Interleaved:
    """Two parts in turn along `axis`: the rows [g0, g1, g2, u0, u1, u2] are stored as
    [g0, u0, g1, u1, g2, u2] (the gate and up of gpt-oss)."""

    axis: int = 0

    def stored_shape(self, shape: Shape) -> Shape:
        return shape

    def load(self, stored: Any) -> Any:
        return self._swap(stored, (-1, 2))

    def store(self, ours: Any) -> Any:
        return self._swap(ours, (2, -1))

    def _swap(self, x: Any, parts: tuple[int, int]) -> Any:
        split = x.reshape(*x.shape[: self.axis], *parts, *x.shape[self.axis + 1 :])
        return split.swapaxes(self.axis, self.axis + 1).reshape(x.shape)


@dataclass(frozen=True)
class Grouped:
    """Queries, keys and values by key/value head: its query heads, then its key, then its value.

    With two query heads to each of two key/value heads, [q0, q1, q2, q3, k0, k1, v0, v1] is stored as
    [q0, q1, k0, v0, q2, q3, k1, v1], head by head (GPT-NeoX, BLOOM, Falcon).
    """

    n_heads: int
    n_kv_heads: int

    def stored_shape(self, shape: Shape) -> Shape:
        return shape

    def load(self, stored: Any) -> Any:
        order = self._order()
        return self._take(stored, sorted(range(len(order)), key=order.__getitem__))

    def store(self, ours: Any) -> Any:
        return self._take(ours, self._order())

    def _order(self) -> list[int]:
        """Which of our heads comes next, q, k and v counted through."""
        n, k, each = self.n_heads, self.n_kv_heads, self.n_heads // self.n_kv_heads
        groups = ([*range(g * each, (g + 1) * each), n + g, n + k + g] for g in range(k))
        return [head for group in groups for head in group]

    def _take(self, rows: Any, order: list[int]) -> Any:
        return rows.reshape(len(order), -1, *rows.shape[1:])[order].reshape(rows.shape)


@dataclass(frozen=True)
class Chain:
    """Several transforms, named in the order in which storing applies them."""

    steps: tuple[Transform, ...]

    def stored_shape(self, shape: Shape) -> Shape:
        for step in self.steps:
            shape = step.stored_shape(shape)
        return shape

    def load(self, stored: Any) -> Any:
        for step in reversed(self.steps):
            stored = step.load(stored)
        return stored

    def store(self, ours: Any) -> Any:
        for step in self.steps:
            ours = step.store(ours)
        return ours
