"""Why the output of a norm differs: its kind, its eps, its weight and bias, and where it rounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from openbook.spec.model import Norm
from openbook.trace.reasons.evidence import (
    Candidate,
    Evidence,
    Pair,
    Reason,
    distinct,
    number,
    weights_apart,
)

USUAL_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3)


def explain_norm(pair: Pair) -> Reason | None:
    """Both sides are computed again in all the ways there are; else the weights are compared."""
    return pair.told_apart(_norms) or _weights(pair)


def _norms(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    x, own = side.read(), norm_of(side)
    if x is None or own is None:
        return
    theirs = norm_of(other) or own
    x = _as_output(x, side)
    weight, bias = (_beside(side.vector(name), side) for name in ("weight", "bias"))
    kinds = dict.fromkeys((own.kind, theirs.kind, "rms", "layer"))
    offsets = list(distinct((own.offset, 0.0, 1.0))) if weight is not None else [0.0]
    shifts = {"added" if own.bias else "none", "added", "none"} if bias is not None else {"none"}
    for kind, offset, shifted in product(
        kinds, offsets, sorted(shifts, key=lambda way: (way == "added") != own.bias)
    ):
        gain = weight + offset if weight is not None else torch.ones_like(x[..., :1])
        shift = bias if bias is not None and shifted == "added" else torch.zeros_like(gain)
        centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        size = centred.square().mean(-1, keepdim=True)
        fit = _fitted_eps(centred * gain, size, side.y - shift)
        for eps in distinct((own.eps, theirs.eps, *USUAL_EPS, fit)):
            options = {
                "norm": "LayerNorm" if kind == "layer" else "RMSNorm",
                "eps": number(eps),
                "weight": "none" if weight is None else f"{offset:g} + w" if offset else "w",
                "bias": shifted,
            }
            for rounding, made in _rounded(centred * (size + eps).rsqrt(), gain, shift, side):
                yield options | {"rounding": rounding}, made


def _rounded(normed: Tensor, gain: Tensor, shift: Tensor, side: Evidence) -> Iterator[tuple[str, Tensor]]:
    """The result as it is and, where the step's output has 16 bits, rounded in the two places in use."""
    yield "none", normed * gain + shift
    dtype = side.trace.tensor(side.name).dtype
    if dtype.itemsize == 2:
        yield "after the weight", (normed * gain + shift).to(dtype).double()
        yield "before the weight", (normed.to(dtype).double() * gain + shift).to(dtype).double()


def _fitted_eps(plain: Tensor, size: Tensor, found: Tensor) -> float:
    """The eps with which the token that shows it best, the smallest one, gives what was found."""
    if plain.shape != found.shape:
        return 0.0
    root = (plain * found).sum(-1, keepdim=True) / found.square().sum(-1, keepdim=True).clamp(min=1e-300)
    eps = (root.square() - size).flatten()[size.flatten().argmin()]
    return max(float(f"{float(eps):.2g}"), 0.0)


def norm_of(side: Evidence) -> Norm | None:
    """What the side's spec says of this step's norm; None if the step is none."""
    inside = side.name.startswith("layers.")
    found: object = side.block if inside else side.trace.spec
    for part in side.local.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, Norm) else None


def _as_output(x: Tensor, side: Evidence) -> Tensor:
    """What the step reads in the arrangement of what it gives: [B, T, H·K] → [B, H, T, K], and of a latent
    and the rotated part behind it the latent alone."""
    y = side.y
    if x.ndim == 3 and y.ndim == 4:
        return x.unflatten(-1, (y.shape[1], -1)).transpose(1, 2)
    if x.ndim == 4 and y.ndim == 3:
        return x.transpose(1, 2).flatten(2)
    return x[..., : y.shape[-1]]


def _beside(weight: Tensor | None, side: Evidence) -> Tensor | None:
    """A weight of each head's own [H, K] as it meets [B, H, T, K]."""
    own = weight is not None and weight.ndim == 2 and side.y.ndim == 4
    return weight[:, None] if weight is not None and own else weight


def _weights(pair: Pair) -> Reason | None:
    a, b = pair.a.vector("weight"), pair.b.vector("weight")
    if a is None or b is None or a.shape != b.shape or (gap := weights_apart(a, b)) <= pair.rounding / 100:
        return None
    for who, more, less in (("A", a, b), ("B", b, a)):
        if pair.explains(less + 1, more):
            return Reason(f"the weights differ: {who} has 1 added to them", "compare the norm's offset")
    return Reason(f"the weights differ: {pair.name}.weight by {gap:.1e} of its norm", "compare the weights")
