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
    """A measured rotation. `frequencies` are radians a position, one for each pair, and `first` the angles
    of the first token; `factor` is what the length is multiplied by."""

    layout: str
    dim: int
    frequencies: Tensor
    first: Tensor
    factor: float

    @property
    def start(self) -> float:
        """The position that the first token was turned to, by the pair that turns fastest."""
        fastest = int(self.frequencies.abs().argmax())
        speed = float(self.frequencies[fastest])
        return float(self.first[fastest]) / speed if abs(speed) > READABLE else 0.0


def explain_rotation(pair: Pair) -> Reason | None:
    """Both sides' rotations are measured, and compared in every respect."""
    a, b = measure(pair.a, pair.rounding), measure(pair.b, pair.rounding)
    if a is None or b is None:
        return None
    return told_apart(_in_words(a, pair), _in_words(b, pair))


def measure(side: Evidence, rounding: float) -> Turn | None:
    """The rotation that the side applied; None if none explains what was recorded, or one token alone."""
    x, y, rope = _unrotated(side), _heads_apart(side.y), side.block.attn.rope
    if x is None or rope is None or x.shape != y.shape or x.shape[-2] < 2:
        return None
    size = x.shape[-1]
    best, least = None, rounding
    for dim in distinct((rope.dim, size, size // 4 * 2, size // 8 * 2)):
        for layout in dict.fromkeys((rope.layout, "half", "interleaved")):
            turn = _turn(x, y, int(dim), layout)
            error = max(relative(_turned(x, turn), y[..., : turn.dim]), _moved(x, y, turn.dim))
            if (
                error <= least
            ):  # the spec's own way comes first, and stays unless another fits ten times better
                best, least = turn, error / 10
    return best


def _turn(x: Tensor, y: Tensor, dim: int, layout: str) -> Turn:
    """The steady rotation nearest to what turned x into y: of all heads, tokens being one position apart."""
    before, after = _pairs(x, dim, layout), _pairs(y, dim, layout)
    turn = (before.conj() * after).sum((0, 1)) / before.abs().square().sum((0, 1)).clamp(min=1e-300)
    frequencies = (turn[1:] * turn[:-1].conj()).sum(0).angle()  # [T, pairs] complex factors
    at = torch.arange(len(turn), device=turn.device)[:, None]
    first = (turn * torch.polar(torch.ones_like(at * frequencies), -at * frequencies)).sum(0).angle()
    return Turn(layout, dim, frequencies, first, float(turn.abs().mean()))


def _turned(x: Tensor, turn: Turn) -> Tensor:
    """The first `turn.dim` elements of every head of x, turned."""
    angles = turn.first + torch.arange(x.shape[-2], device=x.device)[:, None] * turn.frequencies
    turned = _pairs(x, turn.dim, turn.layout) * torch.polar(torch.full_like(angles, turn.factor), angles)
    parts = (turned.real, turned.imag)
    return torch.cat(parts, -1) if turn.layout == "half" else torch.stack(parts, -1).flatten(-2)


def _moved(x: Tensor, y: Tensor, dim: int) -> float:
    """How much the elements changed that are not rotated."""
    return relative(x[..., dim:], y[..., dim:]) if dim < x.shape[-1] else 0.0


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
        heads = x.unflatten(-1, (1 if side.local == "attn.k_rope" else attn.n_heads, -1))
        return heads.transpose(1, 2)[..., -attn.rope_dim :]
    return x if x.ndim == 4 else x.unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)


def _heads_apart(y: Tensor) -> Tensor:
    """[B, T, R], which all heads share, as [B, 1, T, R]."""
    return y if y.ndim == 4 else y[:, None]


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
