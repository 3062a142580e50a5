"""Why the output of a matrix differs: bias, rows, scale, clip, transpose, the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openbook.spec.model import LatentAttention
from openbook.trace.reasons.evidence import (
    Candidate,
    Evidence,
    Pair,
    Reason,
    distinct,
    fitted,
    number,
    relative,
    weights_apart,
)

SIBLINGS = {
    "attn.q": ("attn.k", "attn.v"), "attn.k": ("attn.v", "attn.q"), "attn.v": ("attn.k", "attn.q"),
    "mlp.gate": ("mlp.up",), "mlp.up": ("mlp.gate",),
    "mlp.shared.gate": ("mlp.shared.up",), "mlp.shared.up": ("mlp.shared.gate",),
}  # fmt: skip
"""Matrices that read the same vector, and that a loader can mistake for each other."""


def explain_linear(pair: Pair) -> Reason | None:
    """The first of the known reasons that holds."""
    if pair.a.y.shape != pair.b.y.shape:
        return None
    tests = (_bias, _rows, _exchanged, _clip, _scale, _transposed, _weights)
    return next((reason for test in tests if (reason := test(pair))), None)


def _bias(pair: Pair) -> Reason | None:
    """The difference is one vector for all tokens; where the weights are known, one side's bias."""
    gap = (pair.a.y - pair.b.y).flatten(0, -2)
    vector = gap.mean(0)
    if len(gap) < 2 or not pair.explains(pair.b.y + vector, pair.a.y):
        return None
    for who, whom, side, seen in (("A", "B", pair.a, vector), ("B", "A", pair.b, -vector)):
        bias = side.vector("bias")
        if bias is not None and bias.shape == seen.shape and relative(seen, bias) < 100 * pair.rounding:
            return Reason(
                f"bias: {who} adds {pair.name}.bias, {whom} does not",
                "load the bias, or say in the spec that there is one",
            )
    return Reason("the two differ by the same vector for every token: a bias", "compare the biases")


def _rows(pair: Pair) -> Reason | None:
    """The same numbers in another order, for every token alike."""
    heads = _heads(pair.a)
    a, b = (side.y.flatten(0, -2).unflatten(-1, (heads, -1)) for side in (pair.a, pair.b))
    if pair.explains(a.sort(-1).values, b.sort(-1).values):
        if heads == 1:
            return Reason("rows in another order", "compare how the stored rows are arranged")
        return _rows_of_a_head(pair, a[:, 0].T, b[:, 0].T)
    if pair.explains(a.flatten(1).sort(-1).values, b.flatten(1).sort(-1).values):
        return Reason(
            "rows in another order, across the heads",
            "compare how the stored rows of the heads follow each other",
        )
    return None


def _rows_of_a_head(pair: Pair, a: Tensor, b: Tensor) -> Reason:
    """a, b: [K, tokens], of one head, the same rows in two orders."""
    rope = pair.a.block.attn.rope
    order = torch.cdist(a, b).argmin(1)  # row i of a is row order[i] of b
    for size in distinct((len(a), rope.dim if rope else len(a))):
        pairs = torch.arange(len(a))
        pairs[: int(size)] = pairs[: int(size)].reshape(2, -1).T.flatten()  # 0, K/2, 1, K/2 + 1, ...
        for who, found in (("A", order), ("B", order.argsort())):
            if torch.equal(found, pairs):
                return Reason(
                    f"rows permuted within heads (adjacent rotary pairs in {who}): q/k were not unpermuted",
                    "undo the permutation while loading: q by its number of heads, k by its own",
                )
    return Reason("rows permuted within heads", "compare how the rows of a head are stored")


def _heads(side: Evidence) -> int:
    """How many heads the outputs of the step are divided into; 1 if they are not."""
    if not side.local.startswith("attn."):
        return 1
    attn = side.block.attn
    if isinstance(attn, LatentAttention):
        return attn.n_heads if side.local in ("attn.q", "attn.q_up", "attn.kv_up") else 1
    return {"attn.q": attn.n_heads, "attn.k": attn.n_kv_heads, "attn.v": attn.n_kv_heads}.get(side.local, 1)


def _exchanged(pair: Pair) -> Reason | None:
    """What one side calls gate is what the other calls up."""
    for sibling in SIBLINGS.get(pair.local, ()):
        theirs = pair.b.step(sibling)
        if theirs is not None and pair.explains(theirs, pair.a.y):
            return Reason(
                f"exchanged: A's {pair.local} is B's {sibling}",
                "compare in which order the stored parts follow each other",
            )
    return None


def _clip(pair: Pair) -> Reason | None:
    """One side cuts its outputs at ±limit."""
    for who, side, other in (("A", pair.a, pair.b), ("B", pair.b, pair.a)):
        limit = float(side.y.abs().max())
        at_limit = (side.y.abs() > limit * (1 - 1e-6)).sum()
        if at_limit > 1 and pair.explains(other.y.clamp(-limit, limit), side.y):
            return Reason(
                f"clipped at ±{number(limit)} in {who} alone", "compare clip_qkv in the two descriptions"
            )
    return None


def _scale(pair: Pair) -> Reason | None:
    c = fitted(pair.b.y, pair.a.y)
    if not pair.explains(pair.b.y * c, pair.a.y):
        return None
    return Reason(
        f"scaled: A is {factor_in_words(c, pair)} times B", "look for a multiplier that one side lacks"
    )


def factor_in_words(c: float, pair: Pair) -> str:
    """'7.211 (√D)': a factor, and what it is if it is one of the usual."""
    usual = {"√D": pair.a.trace.spec.d_model**0.5, "1/√D": pair.a.trace.spec.d_model**-0.5}
    if pair.name.startswith("layers."):
        head_dim = pair.a.block.attn.head_dim
        usual |= {"√K": head_dim**0.5, "1/√K": head_dim**-0.5}
    name = next((words for words, value in usual.items() if abs(c / value - 1) < 1e-2), "")
    return f"{number(c)} ({name})" if name else number(c)


def _transposed(pair: Pair) -> Reason | None:
    a, b = pair.a.parameter("weight"), pair.b.parameter("weight")
    if a is None or b is None or a.ndim != 2 or a.shape != b.mT.shape:
        return None
    if weights_apart(a, b.mT) > pair.rounding or weights_apart(a, b) <= pair.rounding:
        return None
    return Reason("A's matrix is B's transposed", "transpose it while loading: a square matrix hides it")


def _weights(pair: Pair) -> Reason | None:
    """The matrices themselves, if both are known."""
    a, b = pair.a.parameter("weight"), pair.b.parameter("weight")
    if a is None or b is None or a.shape != b.shape or (gap := weights_apart(a, b)) <= pair.rounding / 100:
        return None
    rows = sum(not torch.equal(row, other) for row, other in zip(a, b, strict=True))
    some = "" if rows == len(a) else f", in {rows} of its {len(a)} rows"
    return Reason(
        f"the weights differ: {pair.name}.weight by {gap:.1e} of its norm{some}",
        "other weights, or the same ones rounded: a larger --tolerance looks past it",
    )


# --- the head -----------------------------------------------------------------------------------


def explain_head(pair: Pair) -> Reason | None:
    """Scale and soft-cap of the logits, tied or not; else what holds of any matrix."""
    if told := pair.told_apart(_heads_of_the_model):
        return told
    tied = [_is_tied(side) for side in (pair.a, pair.b)]
    if None not in tied and tied[0] != tied[1]:
        who, whom = ("A", "B") if tied[0] else ("B", "A")
        return Reason(
            f"{who}'s head is its embedding's matrix, {whom}'s is not",
            "compare tie_word_embeddings, and whether the file has a matrix for the head",
        )
    return explain_linear(pair)


def _heads_of_the_model(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    x, weight, bias = side.read(), side.parameter("weight"), side.vector("bias")
    if x is None or weight is None:
        return
    plain = (x.to(weight.dtype) @ weight.mT).double() + (0 if bias is None else bias)
    heads = (side.trace.spec.head, other.trace.spec.head)
    for scale in distinct([head.scale for head in heads] + [1.0, fitted(plain, side.y)]):
        scaled = plain * scale
        for cap in distinct([head.softcap or 0.0 for head in heads] + [0.0, 30.0, 15.0, 50.0]):
            capped = cap * torch.tanh(scaled / cap) if cap else scaled
            yield {"scale": number(scale), "soft-cap": number(cap) if cap else "none"}, capped


def _is_tied(side: Evidence) -> bool | None:
    head, embed = side.parameter("weight"), side.parameter("weight", "embed")
    return None if head is None or embed is None else torch.equal(head, embed)
