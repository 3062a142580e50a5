"""Cross-entropy over the head, a chunk of the logits at a time.

With a vocabulary of 49,152, the logits of 16 rows of 1,024 tokens take 3.2 GB in fp32, and their gradient as
much again. Here a chunk is made, its loss taken, its gradient carried back through the head, and it is
forgotten before the next. What backward needs later is only the gradients themselves, already summed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openbook.train.pack import IGNORED

MAX_LOGITS = 1 << 24
"""Of a chunk: 64 MiB in fp32. A chunk has at least one token, whatever its logits take."""


class Loss(NamedTuple):
    """Sums over tokens, never means: divide by the labels of a whole step.

    `total` is nats + z_weight · z, and is what to call backward on. `nats` (the cross-entropy) and `z` (the
    squared logarithms of the softmax's denominators; 0 unless weighed) are for the record.
    """

    total: Tensor
    nats: Tensor
    z: Tensor
    n_labels: int


def head_loss(
    head: nn.Module, hidden: Tensor, labels: Tensor, z_weight: float = 0.0, max_logits: int = MAX_LOGITS
) -> Loss:
    """The loss of predicting `labels` [B, T] from what the head reads, `hidden` [B, T, D].

    Tokens with the label -100 do not reach the head. With no other, the loss is 0 and so are all gradients.
    `z_weight` keeps logits from drifting away (PaLM, Chowdhery et al. 2022, section 5). Gradients are
    made with the loss, so that backward can be called once; without grad mode none are made.
    """
    wanted = labels != IGNORED
    hidden, labels = hidden[wanted], labels[wanted]
    rows = max(1, max_logits // _vocab_size(head))
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if torch.is_grad_enabled():
        total, nats, z = _Chunked.apply(head, labels, z_weight, rows, hidden, *parameters)  # type: ignore[misc]
    else:
        total, nats, z = _summed(head, hidden, labels, z_weight, rows)
    return Loss(total, nats, z, len(labels))


def _vocab_size(head: nn.Module) -> int:
    """How many logits a token has: the rows of the head's matrix."""
    return next(head.parameters()).shape[0]


def _sums(head: nn.Module, hidden: Tensor, labels: Tensor, z_weight: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy and z of one chunk, in fp32: hidden [N, D], labels [N]."""
    logits = head(hidden[None])[0].float()  # the head takes a batch: here of one long row
    nats = F.cross_entropy(logits, labels, reduction="sum")
    z = logits.logsumexp(-1).square().sum() if z_weight else torch.zeros_like(nats)
    return nats, z


def _summed(
    head: nn.Module, hidden: Tensor, labels: Tensor, z_weight: float, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of all chunks: (total, nats, z)."""
    nats, z = torch.zeros(2, device=hidden.device)
    for start in range(0, len(labels), rows):
        more = _sums(head, hidden[start : start + rows], labels[start : start + rows], z_weight)
        nats, z = nats + more[0], z + more[1]
    return nats + z_weight * z, nats, z


class _Chunked(torch.autograd.Function):
    """`_summed`, and the gradients of its total by `hidden` and the head's parameters, made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        labels: Tensor,
        z_weight: float,
        rows: int,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        nats, z = torch.zeros(2, device=hidden.device)
        hidden_grad = torch.zeros_like(hidden)
        parameter_grads = [torch.zeros_like(parameter) for parameter in parameters]
        for start in range(0, len(labels), rows):
            chunk = slice(start, start + rows)
            with torch.enable_grad(), _uncached_autocast(hidden.device.type):
                x = hidden[chunk].detach().requires_grad_()
                more_nats, more_z = _sums(head, x, labels[chunk], z_weight)
                total = more_nats + z_weight * more_z if z_weight else more_nats
            hidden_grad[chunk], *grads = torch.autograd.grad(total, [x, *parameters])
            for summed, grad in zip(parameter_grads, grads, strict=True):
                summed += grad
            nats, z = nats + more_nats.detach(), z + more_z.detach()
        ctx.grads = [hidden_grad, *parameter_grads]
        ctx.mark_non_differentiable(nats, z)
        return nats + z_weight * z, nats.clone(), z.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the gradients of a chunked loss are made once: backward was called twice")
        grads, ctx.grads = ctx.grads, None
        return None, None, None, None, *(grad.mul_(outer[0]) for grad in grads)


def _uncached_autocast(device: str) -> torch.autocast:
    """Autocast as it is outside, but casting the head's matrix anew for every chunk: a cast that is kept
    belongs to the graph of the first, which is gone by the second."""
    return torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )
