"""Why the output of a norm differs: its kind, its eps, its weight and bias, and where it rounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from openbook.spec.model import Norm
from openbook.trace.reasons.evidence import Candidate, Evidence, Pair, Reason, distinct, number, relative

USUAL_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3)


def explain_norm(pair: Pair) -> Reason | None:
    """Both sides are computed again in all the ways there are; else the weights are compared."""
    return pair.told_apart(_norms) or _weights(pair)


def _norms(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    x, own = side.read(), norm_of(side)
    if x is None or own is None:
        return
    theirs = norm_of(other) or own
    x, weight, bias = (
        _as_output(x, side),
        _beside(side.parameter("weight"), side),
        _beside(side.parameter("bias"), side),
    )
    offsets = list(distinct((own.offset, 0.0, 1.0))) if weight is not None else [0.0]
    biases = distinct((bias is not None and own.bias, bias is not None, False))
    for kind, offset, biased in product(
        dict.fromkeys((own.kind, theirs.kind, "rms", "layer")), offsets, list(biases)
    ):
        gain = torch.ones(()).double() if weight is None else weight + offset
        shift = bias if biased and bias is not None else torch.zeros(()).double()
        centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        size = centred.square().mean(-1, keepdim=True)
        for eps in distinct(
            (own.eps, theirs.eps, *USUAL_EPS, _fitted_eps(centred * gain, size, side.y - shift))
        ):
            normed = centred * (size + eps).rsqrt()
            options = {
                "norm": {"rms": "RMSNorm", "layer": "LayerNorm"}[kind],
                "eps": number(eps),
                "weight": "none" if weight is None else "w" if not offset else f"{offset:g} + w",
                "bias": "added" if biased else "none",
            }
            for rounding, made in _rounded(normed, gain, shift, side):
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
    """What the side's spec says of this step's norm."""
    owner = side.trace.spec
    for part in side.name.split(".")[2:] if side.name.startswith("layers.") else [side.name]:
        owner = side.block if owner is side.trace.spec and side.name.startswith("layers.") else owner
        owner = getattr(owner, part, None)
    return owner if isinstance(owner, Norm) else None


def _as_output(x: Tensor, side: Evidence) -> Tensor:
    """What the step reads in the arrangement of what it gives: [B, T, H·K] → [B, H, T, K]."""
    y = side.y
    if x.ndim == 3 and y.ndim == 4:
        return x.unflatten(-1, (y.shape[1], -1)).transpose(1, 2)
    if x.ndim == 4 and y.ndim == 3:
        return x.transpose(1, 2).flatten(2)
    return x


def _beside(parameter: Tensor | None, side: Evidence) -> Tensor | None:
    """A weight of each head's own [H, K] as it meets [B, H, T, K]."""
    return (
        parameter[:, None]
        if parameter is not None and parameter.ndim == 2 and side.y.ndim == 4
        else parameter
    )


def _weights(pair: Pair) -> Reason | None:
    a, b = pair.a.parameter("weight"), pair.b.parameter("weight")
    if a is None or b is None or a.shape != b.shape or relative(a, b) <= pair.rounding / 100:
        return None
    if pair.explains(a + 1, b) or pair.explains(a, b + 1):
        who = "A" if pair.explains(a, b + 1) else "B"
        return Reason(f"the weights differ by 1: {who} has 1 added to them", "compare the norm's offset")
    return Reason(
        f"the weights differ: {pair.name}.weight by {relative(a, b):.1e} of its norm", "compare the weights"
    )
