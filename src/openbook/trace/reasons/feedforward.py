"""Why an activation or a router's choice differs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from openbook.model.mlp import ACTIVATIONS
from openbook.spec.model import Activation, Experts, Mlp
from openbook.trace.reasons.evidence import Candidate, Evidence, Pair, Reason, distinct, fitted, number


def explain_activation(pair: Pair) -> Reason | None:
    """Which function, of which factor, cut or moved."""
    return pair.told_apart(_activations)


def _activations(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    up, gate = side.read(0), side.read(1)
    own, theirs = (_mlp(e) for e in (side, other))
    if up is None or (own.gated and gate is None):
        return
    kinds = dict.fromkeys((own.activation, theirs.activation, *get_args(Activation)))
    if gate is None:
        yield from (({"activation": kind}, ACTIVATIONS[kind](up)) for kind in kinds)
        return
    clamps = list(dict.fromkeys((own.clamp, theirs.clamp, None)))
    offsets = list(distinct((own.up_offset, theirs.up_offset, 0.0)))
    for kind, of, clamp, offset in product(kinds, ("gate", "up"), clamps, offsets):
        first, second = (gate, up) if of == "gate" else (up, gate)
        if clamp is not None:
            first, second = first.clamp(max=clamp), second.clamp(-clamp, clamp)
        yield (
            {
                "activation": kind,
                "activated": of,
                "clamp": "none" if clamp is None else f"±{number(clamp)}",
                "added to up": number(offset),
            },
            ACTIVATIONS[kind](first) * (second + offset),
        )


def _mlp(side: Evidence) -> Mlp:
    mlp = side.block.mlp
    if isinstance(mlp, Mlp):
        return mlp
    return mlp.shared.mlp if mlp.shared and side.local.startswith("mlp.shared") else mlp.expert


def explain_shared(pair: Pair) -> Reason | None:
    """Whether the shared feed-forward's result is multiplied by the sigmoid of its gate."""
    return pair.told_apart(_shared)


def _shared(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    routed, shared, gate = side.read(0), side.read(1), side.step("mlp.shared_gate")
    if routed is None or shared is None:
        return
    ways = {"its sigmoid": torch.sigmoid(gate), "itself": gate} if gate is not None else {}
    for words, factor in {**ways, "none": torch.ones_like(shared[..., :1])}.items():
        yield {"gate of the shared expert": words}, routed + shared * factor


# --- routing ------------------------------------------------------------------------------------


def explain_choice(pair: Pair) -> Reason | None:
    """How logits become weights: score, renormalisation, scale; and whether other experts were chosen."""
    told = pair.told_apart(_choices)
    a, b = (side.trace.choices.get(side.name) for side in (pair.a, pair.b))
    if a is None or b is None:
        return told
    others = (a.sort(-1).values != b.sort(-1).values).any(-1)
    if not bool(others.any()):
        return told
    where = f"{int(others.sum())} of {others.numel()} tokens choose other experts"
    if told is not None:
        return Reason(f"{told.text}; {where}", told.advice)
    if _are_ties(pair, a, b, others):
        return Reason(
            f"{where}: near ties, which the logits' rounding decides",
            "nothing is wrong with the router; a larger --tolerance looks past it",
        )
    return Reason(where, "compare groups and corrections in the two descriptions")


def _are_ties(pair: Pair, a: Tensor, b: Tensor, others: Tensor) -> bool:
    """Whether at every such token the two choices' logits differ by no more than those of the two sides."""
    one, other = pair.a.read(), pair.b.read()
    if one is None or other is None:
        return False
    best = other.gather(-1, b).sum(-1) - other.gather(-1, a).sum(-1)  # what b prefers its own choice by
    return bool((best.abs() <= 2 * a.shape[-1] * (one - other).abs().amax(-1))[others].all())


def _choices(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    """Weights [B, T, A] of the experts that the side itself chose, from its own logits."""
    logits, ids, own = side.read(), side.trace.choices.get(side.name), side.block.mlp
    if logits is None or ids is None or not isinstance(own, Experts):
        return
    router = own.router
    theirs = other.block.mlp.router if isinstance(other.block.mlp, Experts) else router
    scores = dict.fromkeys((router.score, theirs.score, "softmax", "sigmoid", "chosen_softmax"))
    for score, renormalised in product(scores, dict.fromkeys((router.renormalise, True, False))):
        weights = _weights(logits, ids, score)
        if renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + router.sum_eps)
        for scale in distinct((router.scale, theirs.scale, 1.0, fitted(weights, side.y))):
            yield (
                {
                    "score": score,
                    "chosen weights": "renormalised to sum to 1"
                    if renormalised or score == "chosen_softmax"
                    else "as scored",
                    "scale": number(scale),
                },
                weights * scale,
            )


def _weights(logits: Tensor, ids: Tensor, score: str) -> Tensor:
    if score == "chosen_softmax":
        return logits.gather(-1, ids).softmax(-1)
    scored = logits.softmax(-1) if score == "softmax" else torch.sigmoid(logits)
    return scored.gather(-1, ids)
