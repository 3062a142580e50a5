"""From the logits at one position to a drawn token, stage by stage, with `openbook.infer.sample`'s own
functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openbook.infer import sample
from openbook.infer.sample import RequestError, Sampler, SamplingParams
from openbook.serve.explorer import Model, Run

STAGES: tuple[tuple[str, Callable[[Tensor, SamplingParams], Tensor]], ...] = (
    ("logits", lambda logits, params: logits),
    ("temperature", lambda logits, params: sample.temperature(logits, params.temperature)),
    ("top_k", lambda logits, params: sample.top_k(logits, params.top_k)),
    ("top_p", lambda logits, params: sample.top_p(logits, params.top_p)),
    ("min_p", lambda logits, params: sample.min_p(logits, params.min_p)),
    ("draw", lambda logits, params: logits),
)
"""Each stage works on what the one before it left, in the order in which a token is chosen."""


def next_token(run: Run, position: int, params: SamplingParams, n: int) -> dict[str, Any]:
    """The stages for the token after `position`, each with its `n` likeliest; what was drawn with the seed;
    and the token that the prompt goes on with, if it does."""
    model, trace = run.model, run.trace
    if position >= trace.ids.shape[1]:
        raise RequestError("position", f"is none of 0 to {trace.ids.shape[1] - 1}")
    logits = trace.tensor("head")[0, position].float()
    if model.tokenizer is not None:  # a matrix may have more rows than there are tokens
        logits = logits[: model.tokenizer.vocab_size]
    drawn = Sampler(params, len(logits))(logits)  # raises if the logits are not finite
    shown = sample.largest(logits, min(n, len(logits)))
    stages, left = [], logits
    for name, apply in STAGES:
        left = apply(left, params)
        stages.append(_stage(name, left, shown, model))
    stages[-1]["ordered"] = 0 < params.top_k < len(logits)  # else tokens are laid end to end by their ids
    probs = left.softmax(-1)
    return {
        "stages": stages,
        "drawn": {"id": drawn, "text": model.text(drawn), "p": 1.0 if params.greedy else float(probs[drawn])},
        "uniform": None if params.greedy else _uniform(params),
        "actual": _actual(run, position, logits),
    }


def _stage(name: str, logits: Tensor, shown: Tensor, model: Model) -> dict[str, Any]:
    probs = logits.softmax(-1)
    columns = (part[shown].tolist() for part in (logits, probs))
    return {
        "name": name,
        "kept": int((logits > -torch.inf).sum()),
        "rows": [
            {"id": i, "text": model.text(i), "logit": logit, "p": p, "kept": logit != -torch.inf}
            for i, logit, p in zip(shown.tolist(), *columns, strict=True)
        ],
    }


def _uniform(params: SamplingParams) -> float:
    """The number in [0, 1) that `Sampler` draws first with this seed."""
    generator = torch.Generator().manual_seed(params.seed or 0)
    return float(torch.rand((), dtype=torch.float64, generator=generator))


def _actual(run: Run, position: int, logits: Tensor) -> dict[str, Any] | None:
    following = run.prompt.ids[position + 1 : position + 2]
    if not following or following[0] >= len(logits):
        return None
    token = following[0]
    logprob = float(logits.log_softmax(-1)[token])
    return {
        "id": token,
        "text": run.model.text(token),
        "p": float(logits.softmax(-1)[token]),
        "rank": int((logits > logits[token]).sum()) + 1,
        "logprob": logprob,
    }
