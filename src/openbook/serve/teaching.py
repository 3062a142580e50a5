"""One text in training beside generation, and one real step of an optimizer on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from openbook.infer.teaching import Lesson, cache_savings, generated, teacher_forced
from openbook.ledger import Ledger, Workload
from openbook.ledger.table import human_bytes
from openbook.model import Decoder
from openbook.serve.errors import ApiError
from openbook.serve.explorer import Model
from openbook.serve.pieces import pieces
from openbook.text.framing import begun, first_half, framed

LONGEST = 512
"""Tokens of a text that is taught."""

LENGTHS = (16, 64, 256, 1024, 4096)
"""Texts after which the cache's saving is told; measured up to `MEASURED` tokens."""

MEASURED = 256


def both_ways(model: Model, text: str) -> tuple[list[int], list[int]]:
    """The ids of the whole text, between the tokens that begin and end one; and of its first half, with which
    generation begins."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ApiError(422, "no tokenizer", "the model came without one", "open a model with a tokenizer")
    return framed(tokenizer, text), begun(tokenizer, first_half(text))


def teach(model: Model, decoder: Decoder, text: str) -> dict[str, Any]:
    """Both flows: every label's loss from one pass, and the first half continued token by token."""
    ids, given = both_ways(model, text)
    lesson = teacher_forced(decoder, ids)
    limit = model.tokenizer.vocab_size if model.tokenizer else None
    ends = model.tokenizer.eos_ids if model.tokenizer else ()
    drawn = generated(decoder, given, max(1, len(ids) - len(given)), ends, limit)
    steps = [
        {
            "token": {"id": step.id, "text": model.text(step.id), "p": step.probability},
            "tokens": len(step.given),
            "flops_with": step.cost.flops,
            "flops_without": step.cost.flops_without,
            "kv_bytes": step.cost.kv_bytes,
            "ms": 1000 * step.seconds,
        }
        for step in drawn
    ]
    lengths = [length for length in LENGTHS if length <= decoder.spec.max_positions]
    return {
        "rows": rows_of(model, ids, lesson),
        "total": {"loss": lesson.loss, "flops": lesson.cost.flops, "forward_flops": lesson.cost.forward},
        "prompt": first_half(text),
        "prefill": steps[0],
        "steps": steps[1:],
        "savings": [
            {
                "length": saving.length,
                "predicted": saving.ratio,
                "measured": saving.measured.ratio if saving.measured else None,
                "flops_with": saving.flops,
                "flops_without": saving.flops_without,
                "ms": 1000 * saving.measured.seconds if saving.measured else None,
                "ms_without": 1000 * saving.measured.seconds_without if saving.measured else None,
            }
            for saving in cache_savings(decoder, lengths, longest=MEASURED, repeats=1)
        ],
    }


def rows_of(model: Model, ids: Sequence[int], lesson: Lesson) -> list[dict[str, Any]]:
    """The lesson's rows for the page."""
    shown = pieces(model.tokenizer, ids, ["content"] * len(ids))
    return [
        {
            "position": row.position,
            "input": shown[row.position],
            "label": shown[row.position + 1],
            "p": row.probability,
            "loss": row.loss,
            "rank": row.rank,
            "likeliest": {"id": row.likeliest, "text": model.text(row.likeliest)},
        }
        for row in lesson.rows
    ]


# --- one step -----------------------------------------------------------------------------------

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], float], Optimizer]] = {
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=0.0),
    "sgd": torch.optim.SGD,
}
"""Those with which a step is taken, the one that needs most memory first. No weight decay: what changes is
what the text has taught."""


def step_memory(model: Model, tokens: int, optimizer: str) -> dict[str, int]:
    """Bytes that a step takes, in fp32, by the ledger."""
    memory = Ledger(model.spec, "fp32").memory(Workload("train", new=tokens), "adamw-fp32")
    return {
        "weights": memory["weights"],
        "grads": memory["gradients"],
        "moments": memory["optimizer"] if optimizer == "adamw" else 0,
        "activations": memory["activations"] + memory["logits"] + memory["logits_fp32"],
    }


def choose_optimizer(model: Model, tokens: int, limit: int, wanted: str | None) -> str:
    """The optimizer asked for, or the first one whose step fits. Raises `ApiError` if none does."""
    names = list(OPTIMIZERS) if wanted is None else [wanted]
    for name in names:
        if sum(step_memory(model, tokens, name).values()) <= limit:
            return name
    least = sum(step_memory(model, tokens, names[-1]).values())
    raise ApiError(
        422,
        "the model is too large to be trained here",
        f"a step takes {human_bytes(least)}, and the store holds {human_bytes(limit)}",
        "take a smaller model or a shorter text, or start with a larger --store",
    )


def one_step(model: Model, decoder: Decoder, ids: Sequence[int], lr: float, optimizer: str) -> dict[str, Any]:
    """One step on a copy of the model, in fp32: the losses before and after it, and for each tensor the size
    of its gradient and of its change."""
    learner = copy.deepcopy(decoder).float().requires_grad_(True)
    before = teacher_forced(learner, ids)
    logits = learner(torch.tensor([ids[:-1]]))[0]
    loss = F.cross_entropy(logits.float(), torch.tensor(ids[1:]))
    loss.backward()
    stepper = OPTIMIZERS[optimizer](list(learner.parameters()), lr)
    stepper.step()
    after = teacher_forced(learner, ids)
    old = dict(decoder.named_parameters())
    grads = [
        {
            "name": name,
            "l2": float(parameter.grad.norm()) if parameter.grad is not None else 0.0,
            "update_l2": float((parameter.detach() - old[name].detach().float()).norm()),
        }
        for name, parameter in learner.named_parameters()
    ]
    return {
        "optimizer": optimizer,
        "lr": lr,
        "loss": float(loss.detach()),
        "before": rows_of(model, ids, before),
        "after": rows_of(model, ids, after),
        "grads": grads,
        "memory": step_memory(model, len(ids) - 1, optimizer),
    }
