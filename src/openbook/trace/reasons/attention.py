"""Why scores, masks, probabilities or the mix of values differ."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from openbook.spec.model import Attention
from openbook.trace.reasons.evidence import (
    Candidate,
    Evidence,
    Pair,
    Reason,
    distinct,
    fitted,
    number,
    told_apart,
)


def _for_query_heads(x: Tensor, n_heads: int, sharing: str) -> Tensor:
    """[B, G, S, K] → [B, H, S, K]: query head h reads h // (H/G), or by turns h mod G."""
    times = n_heads // x.shape[1]
    return x.repeat_interleave(times, 1) if sharing == "in groups" else x.repeat(1, times, 1, 1)


def _heads_apart(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, G·K] → [B, G, T, K]; what is apart already stays so."""
    return x if x.ndim == 4 else x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def explain_temperature(pair: Pair) -> Reason | None:
    """What the last token's query is multiplied by."""
    factors = []
    for side in (pair.a, pair.b):
        x = side.read()
        if x is None:
            return None
        last = _heads_apart(x, side.block.attn.head_dim)[:, :, -1]
        factors.append({"temperature of the last query": number(fitted(last, side.y[:, :, -1]))})
    return told_apart(*factors)


# --- scores -------------------------------------------------------------------------------------


def explain_scores(pair: Pair) -> Reason | None:
    """Scale, soft-cap, the sharing of keys by query heads, a bias by distance."""
    return pair.told_apart(_scores)


def _scores(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    q, k, attn = side.read(0), side.read(1), side.block.attn
    specs = [e.block.attn for e in (side, other)]
    if q is None or k is None or not isinstance(attn, Attention):
        return
    q, k = _heads_apart(q, attn.head_dim), _heads_apart(k, attn.head_dim)
    seen = _visible(side)
    for sharing, (distance, bias) in product(("in groups", "by turns"), list(_biases(side, other))):
        plain = q @ _for_query_heads(k, q.shape[1], sharing).mT
        scales = [x.scale for x in specs] + [fitted(plain[seen], (side.y - bias)[seen])]
        caps = [x.softcap or 0.0 for x in specs] + [0.0, 50.0, 30.0]
        for scale, cap in product(distinct(scales), distinct(caps)):
            made = cap * torch.tanh(plain * scale / cap) if cap else plain * scale
            yield (
                {
                    "keys shared": sharing,
                    "scale": number(scale),
                    "soft-cap": number(cap) if cap else "none",
                    "bias by distance": distance,
                },
                torch.where(seen, made + bias, side.y),
            )


def _biases(side: Evidence, other: Evidence) -> Iterator[tuple[str, Tensor]]:
    """What either spec adds to the scores for the distance of query and key, and nothing."""
    keys, queries = side.trace.keys[side.layer], side.trace.positions
    distance = (keys[:, None, :] - queries[:, :, None])[:, None].double()
    alibis = (x.alibi if isinstance(x := e.block.attn, Attention) else None for e in (side, other))
    for alibi in dict.fromkeys((*alibis, None)):
        slopes = torch.tensor(alibi.slopes if alibi else [0.0], device=distance.device)
        yield "ALiBi" if alibi else "none", slopes.double()[:, None, None] * distance


def _visible(side: Evidence) -> Tensor:
    masked = side.step("attn.masked")
    return torch.ones_like(side.y, dtype=torch.bool) if masked is None else masked.isfinite()


# --- masks --------------------------------------------------------------------------------------


def explain_mask(pair: Pair) -> Reason | None:
    """How many keys each query sees; or, if the same, whether a mask also moves the scores."""
    a, b = (side.y[0, 0].isfinite() for side in (pair.a, pair.b))
    if torch.equal(a, b):
        return _moved(pair)
    told = told_apart({"visible keys": _window(a)}, {"visible keys": _window(b)})
    query = int((a != b).any(-1).nonzero()[0])
    seen = " and ".join(f"{_span(side[query])} in {who}" for who, side in (("A", a), ("B", b)))
    where = f"query {query} sees {seen}"
    return Reason(f"{told.text} ({where})" if told else where, "compare window, and which layers have one")


def _moved(pair: Pair) -> Reason | None:
    """One side's mask adds to what it lets through a number that grows with the distance."""
    for who, side in (("A", pair.a), ("B", pair.b)):
        scores = side.read()
        if scores is None or pair.a.y.shape != pair.b.y.shape:
            return None
        seen = side.y.isfinite()
        added = torch.where(seen, side.y - scores, 0.0)
        steps = (added[..., 1:] - added[..., :-1])[seen[..., 1:] & seen[..., :-1]]
        if float(added.abs().max()) > pair.rounding and bool((steps > pair.rounding).all()):
            slopes = f"{number(float(steps.min()))} to {number(float(steps.max()))} a token"
            return Reason(
                f"bias by distance: the mask adds one to the scores in {who} alone ({slopes})",
                "compare alibi: it belongs to the scores, once",
            )
    return None


def _window(seen: Tensor) -> str:
    """In words, what the visible keys [T, S] of queries at consecutive positions are."""
    T, S = seen.shape
    at = torch.arange(S - T, S)
    first = seen.int().argmax(-1)
    if bool((seen & (torch.arange(S) > at[:, None])).any()):
        return "later ones too"
    if not bool(first.any()):
        return f"all {S}"
    reach = at - first + 1
    widths = set(reach[first > 0].tolist())
    if len(widths) == 1 and int(reach.max()) == (width := widths.pop()):
        return f"the last {width}"
    size = int(first[first > 0].min())
    if torch.equal(first, at // size * size):
        return f"those of a chunk of {size}"
    return f"between {int(seen.sum(-1).min())} and {int(seen.sum(-1).max())}"


def _span(row: Tensor) -> str:
    keys = row.nonzero().flatten().tolist()
    if len(keys) < 2:
        return f"key {keys[0]}" if keys else "none"
    return f"keys {keys[0]} to {keys[-1]}"


# --- probabilities and values -------------------------------------------------------------------


def explain_probs(pair: Pair) -> Reason | None:
    """Sinks in the softmax or not; rounded to 16 bits or not."""
    return pair.told_apart(_probs)


def _probs(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    masked = side.read()
    if masked is None:
        return
    owner = side.name.rpartition(".")[0]
    sinks = next(
        (
            p.detach().double()
            for e in (side, other)
            if (p := e.trace.parameters.get(f"{owner}.sinks")) is not None
        ),
        None,
    )
    made = {"none": masked.softmax(-1).nan_to_num(0.0)}
    if sinks is not None:
        column = sinks[:, None, None].expand(*masked.shape[:-1], 1)
        made["one for each head"] = torch.cat((masked, column), -1).softmax(-1)[..., :-1]
    for words, probs in made.items():
        yield {"sinks": words, "rounding": "none"}, probs
        yield {"sinks": words, "rounding": "bf16"}, probs.bfloat16().double()


def explain_mix(pair: Pair) -> Reason | None:
    """Which query heads share which values."""
    return pair.told_apart(_mixes)


def _mixes(side: Evidence, other: Evidence) -> Iterator[Candidate]:
    probs, v, attn = side.read(0), side.read(1), side.block.attn
    if probs is None or v is None or not isinstance(attn, Attention):
        return
    v = _heads_apart(v, attn.head_dim)
    for sharing in ("in groups", "by turns"):
        yield {"values shared": sharing}, probs @ _for_query_heads(v, probs.shape[1], sharing)
