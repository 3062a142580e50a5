"""Why rotated queries or keys differ. The rotation of each side is measured: what turned its input into its
output, pair by pair and position by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openbook.spec.model import LatentAttention
from openbook.trace.reasons.evidence import (
    Evidence,
    Options,
    Pair,
    Reason,
    distinct,
    number,
    relative,
    told_apart,
)

USUAL_BASES = (10_000.0, 500_000.0, 1_000_000.0, 100_000.0, 8_000_000.0)

READABLE = 1e-3
"""Radians a position: a slower pair turns too little in a short run to be measured."""


@dataclass(frozen=True)
class Turn:
    """A measured rotation. `frequencies` are radians a position, one for each pair; `factor` is what the
    length is multiplied by, `start` the position that the first token was turned to."""

    layout: str
    dim: int
    frequencies: Tensor
    factor: float
    start: float


def explain_rotation(pair: Pair) -> Reason | None:
    """Both sides' rotations are measured, and compared in every respect."""
    a, b = measure(pair.a, pair.rounding), measure(pair.b, pair.rounding)
    if a is None or b is None:
        return None
    return told_apart(_in_words(a, pair), _in_words(b, pair))


def measure(side: Evidence, rounding: float) -> Turn | None:
    """The rotation that the side applied; None if none explains what was recorded, or one token alone."""
    x = _unrotated(side)
    rope = side.block.attn.rope
    if x is None or rope is None or x.shape != side.y.shape or x.shape[-2] < 2:
        return None
    size = x.shape[-1]
    sizes = [d for d in distinct((rope.dim, size, size // 2, size // 4)) if d >= 2 and d % 2 == 0]
    found: list[tuple[float, Turn]] = []
    for dim in sizes:
        for layout in dict.fromkeys((rope.layout, "half", "interleaved")):
            before, after = (_pairs(z, int(dim), layout) for z in (x, side.y))
            turn = (before.conj() * after).sum(1) / before.abs().square().sum(1).clamp(
                min=1e-300
            )  # [B, T, pairs]
            made = torch.view_as_real(before * turn[:, None]).flatten(-2)
            error = relative(made, torch.view_as_real(after).flatten(-2))
            rest = relative(x[..., int(dim) :], side.y[..., int(dim) :]) if dim < size else 0.0
            if max(error, rest) <= rounding:
                found.append((max(error, rest), _turn(turn[0], layout, int(dim), side)))
    # The spec's own way comes first and is kept unless another fits ten times better.
    best: tuple[float, Turn] | None = None
    for error, turn in found:
        if best is None or error < best[0] / 10:
            best = (error, turn)
    return best[1] if best else None


def _turn(turn: Tensor, layout: str, dim: int, side: Evidence) -> Turn:
    """[T, pairs] complex factors, of tokens that stand at positions one apart, as one rotation."""
    steps = (turn[1:] * turn[:-1].conj()).sum(0)
    frequencies = steps.angle()
    start = float(turn[0, 0].angle() / frequencies[0]) if abs(float(frequencies[0])) > READABLE else 0.0
    return Turn(layout, dim, frequencies, float(turn.abs().mean()), start)


def _pairs(x: Tensor, dim: int, layout: str) -> Tensor:
    """[B, heads, T, dim/2] complex numbers, of the elements that turn together."""
    x = x[..., :dim]
    first, second = x.chunk(2, -1) if layout == "half" else (x[..., 0::2], x[..., 1::2])
    return torch.complex(first.contiguous(), second.contiguous())


def _unrotated(side: Evidence) -> Tensor | None:
    """What the rotation reads, with heads apart as in what it gives."""
    x, attn = side.read(), side.block.attn
    if x is None:
        return None
    if isinstance(attn, LatentAttention):
        if side.local == "attn.k_rope":
            return x[..., -attn.rope_dim :]
        return x.unflatten(-1, (attn.n_heads, -1)).transpose(1, 2)[..., -attn.rope_dim :]
    return x if x.ndim == 4 else x.unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)


# --- in words -----------------------------------------------------------------------------------


def _in_words(turn: Turn, pair: Pair) -> Options:
    backwards = bool((turn.frequencies[turn.frequencies.abs() > READABLE] < 0).all())
    base, scaling = _base(turn.frequencies.abs(), pair)
    return {
        "RoPE layout": turn.layout,
        "rotated elements": str(turn.dim),
        "RoPE base": base,
        "RoPE scaling": scaling,
        "direction": "backwards" if backwards else "forwards",
        "length": f"× {number(turn.factor)}" if abs(turn.factor - 1) > 1e-3 else "kept",
        "first position": number(round(turn.start, 2) + 0.0),
    }


def _base(frequencies: Tensor, pair: Pair) -> tuple[str, str]:
    """The base whose frequencies these are; or that of either spec, and what divides its frequencies."""
    pairs = len(frequencies)
    readable = frequencies > READABLE
    own = [rope.base for e in (pair.a, pair.b) if (rope := e.block.attn.rope)]
    exponent = torch.arange(pairs).double() / pairs
    last = int(readable.nonzero().max()) if bool(readable.any()) else 0
    fit = [float(frequencies[last] ** (-1 / exponent[last]))] if last else []
    for base in distinct([*own, *USUAL_BASES, *fit]):
        plain = base**-exponent
        if bool(((frequencies / plain - 1).abs()[readable] < 3e-3).all()) and last:
            return number(base), "none"
    divisors = [float(x) for x in (own[0] ** -exponent / frequencies)[readable]]
    low, high = min(divisors, default=1.0), max(divisors, default=1.0)
    if max(high - 1, 1 - low) < 3e-3:  # one pair, or none that can be measured, says nothing of the base
        return number(own[0]), "none"
    return number(own[0]), f"frequencies ÷ {number(low)}" + (
        f" to {number(high)}" if high > low * 1.01 else ""
    )
