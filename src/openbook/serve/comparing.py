"""Two runs beside each other: every step's difference, and what they say comes next."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from openbook.serve.explorer import Model, Run
from openbook.serve.pieces import pieces

LISTED = 20
"""The likeliest tokens of either run that are listed."""


def compare(a: Run, b: Run) -> dict[str, Any]:
    """The steps that both have, and the distributions after their last tokens."""
    p, q = _next(a), _next(b)
    return {
        "pieces_a": pieces(a.model.tokenizer, a.prompt.ids, a.prompt.origins),
        "pieces_b": pieces(b.model.tokenizer, b.prompt.ids, b.prompt.origins),
        "steps": [_step(name, a, b) for name in a.trace.tensors if name in b.trace.tensors],
        "next": _both(a.model, b.model, p.exp(), q.exp()),
        "kl": _kl(a.model, b.model, p, q),
    }


def _step(name: str, a: Run, b: Run) -> dict[str, Any]:
    x, y = a.trace.tensors[name], b.trace.tensors[name]
    same_shape = x.shape == y.shape
    if not same_shape:  # the last token of each, where nothing else differs
        x, y = (_last_token(tensor, run.trace.axes[name]) for tensor, run in ((x, a), (y, b)))
    if x.shape != y.shape:
        return {"name": name, "same_shape": False, "max_abs": None, "rel": None, "cos": None}
    return {"name": name, "same_shape": same_shape, **difference(x, y)}


def _last_token(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    return x.select(axes.index("T"), -1) if "T" in axes else x


def difference(x: Tensor, y: Tensor) -> dict[str, float]:
    """The largest difference, the relative one ‖y − x‖ / ‖x‖, and the cosine, of what is finite in both. The
    sums are in fp64, a piece at a time."""
    largest, apart, of_x, of_y, product = 0.0, 0.0, 0.0, 0.0, 0.0
    for one, other in zip(x.reshape(-1).split(_PIECE), y.reshape(-1).split(_PIECE), strict=True):
        both = one.isfinite() & other.isfinite()
        one, other = (side.double().where(both, 0.0) for side in (one, other))
        delta = other - one
        largest = max(largest, float(delta.abs().max()))
        apart += float(delta.dot(delta))
        of_x, of_y = of_x + float(one.dot(one)), of_y + float(other.dot(other))
        product += float(one.dot(other))
    return {
        "max_abs": largest,
        "rel": (apart / of_x) ** 0.5 if of_x else 0.0 if apart == 0 else math.inf,
        "cos": product / (of_x * of_y) ** 0.5 if of_x and of_y else math.nan,
    }


_PIECE = 2**18


def _next(run: Run) -> Tensor:
    """The logarithms of the probabilities after the last token; of rows that are no tokens none."""
    logits = run.trace.tensor("head")[0, -1].double()
    if run.model.tokenizer is not None:
        logits = logits[: run.model.tokenizer.vocab_size]
    return logits.log_softmax(-1)


def _both(a: Model, b: Model, p: Tensor, q: Tensor) -> list[dict[str, Any]]:
    """The likeliest tokens of either. In another vocabulary a token is the one spelled alike; what has none
    there has no probability."""
    ids = dict.fromkeys(p.topk(min(LISTED, len(p))).indices.tolist())
    rows = [{"id": i, "text": a.text(i), "p_a": float(p[i]), "p_b": _of(q, _twin(a, b, i))} for i in ids]
    for i in q.topk(min(LISTED, len(q))).indices.tolist():
        there = _twin(b, a, i)
        if there is None or there not in ids:
            rows.append({"id": i, "text": b.text(i), "p_a": _of(p, there), "p_b": float(q[i])})
    return sorted(rows, key=lambda row: -max(row["p_a"], row["p_b"]))


def _of(probs: Tensor, token: int | None) -> float:
    return 0.0 if token is None or token >= len(probs) else float(probs[token])


def _twin(a: Model, b: Model, token: int) -> int | None:
    """The id in b's vocabulary of a's token."""
    if a.id == b.id or a.tokenizer is None or b.tokenizer is None:
        return token
    return b.tokenizer.id_of(a.tokenizer.token(token))


def _kl(a: Model, b: Model, p: Tensor, q: Tensor) -> float | None:
    """KL(a ‖ b) in nats, of logarithms; None for two vocabularies."""
    if len(p) != len(q) or any(_twin(a, b, i) != i for i in p.topk(min(LISTED, len(p))).indices.tolist()):
        return None
    return max(float((p.exp() * (p - q)).sum()), 0.0)
