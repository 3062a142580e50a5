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
    """Matrices stored (in, out), as GPT-2's Conv1D does. A square matrix hides a forgotten transpose."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def load(self, stored: Any) -> Any:
        return stored.swapaxes(0, 1) if stored.ndim == 2 else stored

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
