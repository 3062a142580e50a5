"""Why the residual stream differs: how it begins, and what is added to it."""

from __future__ import annotations

from collections.abc import Iterator

from openbook.spec.model import Learned
from openbook.trace.reasons.evidence import (
    Candidate,
    Evidence,
    Pair,
    Reason,
    distinct,
    fitted,
    number,
    weights_apart,
)
from openbook.trace.reasons.linear import factor_in_words


def explain_embedding(pair: Pair) -> Reason | None:
    """A constant factor, such as √D; or other weights."""
    c = fitted(pair.b.y, pair.a.y)
    if pair.explains(pair.b.y * c, pair.a.y):
        return Reason(
            f"embedding scale: A is {factor_in_words(c, pair)} times B",
            "compare embed_scale in the two descriptions",
        )
    a, b = (side.parameter("weight") for side in (pair.a, pair.b))
    if a is not None and b is not None and a.shape == b.shape and (gap := weights_apart(a, b)):
        return Reason(
            f"the weights differ: embed.weight by {gap:.1e} of its norm",
            "other weights, or the same ones rounded: a larger --tolerance looks past it",
        )
    return None


def explain_positions(pair: Pair) -> Reason | None:
    """Which row of the table position 0 reads."""
    return pair.told_apart(_positions)


def _positions(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    x, table = side.read(), side.parameter("weight")
    positions = side.trace.spec.positions
    if x is None or table is None or not isinstance(positions, Learned):
        return
    for offset in distinct((positions.offset, 0, 1, 2)):
        rows = side.trace.positions.clamp(min=0) + int(offset)
        if int(rows.max()) < len(table):
            yield {"row of position 0": str(int(offset))}, x + table[rows].double()


def explain_sum(pair: Pair) -> Reason | None:
    """What is added to the stream is multiplied by a number, or is not added at all."""
    return pair.told_apart(_sums)


def _sums(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    x, more = side.read(0), side.read(1)
    if x is None or more is None:
        return
    for scale in distinct(
        (side.block.residual_scale, other.block.residual_scale, 1.0, fitted(more, side.y - x))
    ):
        yield {"stream": "kept", "residual scale": number(scale)}, x + more * scale
    yield {"stream": "dropped", "residual scale": "1"}, more
