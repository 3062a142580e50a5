"""The ledger's rows of a run: the names, axes, shapes and bytes that its trace has."""

from __future__ import annotations

import math

from torch import Tensor

from openbook.ledger import Ledger, OpRow, Workload
from openbook.spec.model import ModelSpec
from openbook.trace.names import Selection, selected


def op_rows(spec: ModelSpec, dtype: str, batch: int, new: int, past: int = 0) -> list[OpRow]:
    """The ledger's steps of such a run: their names, order, axes and shapes are the trace's."""
    return Ledger(spec, dtype).ops(Workload("prefill", batch, new, past, last_only=False))


def trace_bytes(
    spec: ModelSpec, dtype: str, batch: int, new: int, past: int = 0, only: Selection = None
) -> int:
    """Bytes of the trace of such a run, told before it is made.

    Masked scores are not counted where the scores are kept, which they are made of when asked for.
    """
    sizes = {row.name: row.activation_bytes for row in op_rows(spec, dtype, batch, new, past)}
    wanted = selected(spec, only, sizes)
    kept = {name: size for name, size in sizes.items() if wanted is None or wanted(name)}
    made = {name for name in kept if name.endswith(".masked") and name[: -len("masked")] + "scores" in kept}
    return sum(size for name, size in kept.items() if name not in made)


def axes_of(row: OpRow) -> tuple[str, ...]:
    """The letters of a step's output: 'B T D → B T H·K' gives ("B", "T", "H·K"). Keys that are `read` are
    keys: S."""
    letters = row.letters.rpartition(" → ")[2].split()
    return tuple("S" if letter == "read" else letter for letter in letters)


def shaped(x: Tensor, row: OpRow) -> Tensor:
    """A step's output with the row's axes, where a module holds heads apart and the ledger side by side, or
    the other way round.

    [B, H, T, K] becomes [B, T, H·K] and back; tokens in one row, [B·T, E], become [B, T, E]. What a window's
    cache hands out is shorter than the row says, and has its axes already.
    """
    wanted = row.out_shape
    if x.shape == wanted or x.numel() != math.prod(wanted):
        return x
    if len(wanted) == 4 and axes_of(row)[2] == "T":  # heads apart, found with the tokens first
        B, heads, T, size = wanted
        return x.reshape(B, T, heads, size).transpose(1, 2)
    return (x.transpose(1, 2) if x.ndim == 4 else x).reshape(wanted)


def unshaped(y: Tensor, like: Tensor, row: OpRow) -> Tensor:
    """The inverse of `shaped`: y, of the row's axes, arranged as the module's output `like` is."""
    if y.shape == like.shape:
        return y
    if len(row.out_shape) == 4 and axes_of(row)[2] == "T":
        return y.transpose(1, 2).reshape(like.shape)
    if like.ndim == 4:
        B, heads, T, size = like.shape
        return y.reshape(B, T, heads, size).transpose(1, 2)
    return y.reshape(like.shape)
