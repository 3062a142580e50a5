"""Cross-entropy over the head, a chunk of the logits at a time.

With a vocabulary of 49,152, the logits of 16 rows of 1,024 tokens take 3.2 GB in fp32, and their gradient as
much again. Here a chunk is made, its loss taken, its gradient carried back through the head, and it is
forgotten before the next. What backward needs later is only the gradients themselves, already summed.

The gradient of a plain head is written where its logits were: softmax minus one at the label. A head that
caps or scales its logits, or is more than a matrix, is left to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openbook.model.decoder import Head
from openbook.train.layers import add_product, multiply
from openbook.train.pack import IGNORED

MAX_LOGITS = 1 << 24
"""Of a chunk: 64 MiB in fp32. A chunk has at least one token, whatever its logits take."""

CACHED_LOGITS, FEWEST_ROWS = 1 << 21, 256
"""A chunk has no more logits than a processor's cache holds, but at least so many tokens, within the bound
above: the head's gradient is read and written once for each chunk."""


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
    rows = rows_at_once(_vocab_size(head), max_logits)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if torch.is_grad_enabled():
        total, nats, z = _Chunked.apply(head, labels, z_weight, rows, hidden, *parameters)  # type: ignore[misc]
    else:
        total, nats, z = _summed(head, hidden, labels, z_weight, rows)
    return Loss(total, nats, z, len(labels))


def rows_at_once(vocab_size: int, max_logits: int = MAX_LOGITS) -> int:
    """The tokens of a chunk."""
    return max(1, min(max_logits // vocab_size, max(FEWEST_ROWS, CACHED_LOGITS // vocab_size)))


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
        grads = Gradients(torch.empty_like(hidden), [torch.zeros_like(parameter) for parameter in parameters])
        add = _Plain(head, parameters, grads) if is_plain(head) else _ByAutograd(head, parameters, grads)
        for start in range(0, len(labels), rows):
            more = add(hidden, labels, slice(start, start + rows), z_weight)
            nats, z = nats + more[0], z + more[1]
        ctx.grads = [grads.hidden, *grads.parameters]
        ctx.mark_non_differentiable(nats, z)
        return nats + z_weight * z, nats.clone(), z.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the gradients of a chunked loss are made once: backward was called twice")
        grads, ctx.grads = ctx.grads, None
        return None, None, None, None, *(grad.mul_(outer[0]) for grad in grads)


class Gradients(NamedTuple):
    """By the hidden states, written a chunk at a time, and by the head's parameters, summed over chunks."""

    hidden: Tensor
    parameters: list[Tensor]


def is_plain(head: nn.Module) -> bool:
    """Whether the head is W x + b and nothing more."""
    return type(head) is Head and head.softcap is None and head.scale == 1


class _Plain:
    """Adds the gradients of a chunk of W x + b. Only one table of logits is there at a time."""

    def __init__(self, head: nn.Module, parameters: Sequence[Tensor], grads: Gradients) -> None:
        self.bias: Tensor | None = head.bias  # type: ignore[assignment]
        weight: Tensor = head.weight  # type: ignore[assignment]
        device = weight.device.type
        autocast = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        self.weight = weight.detach().to(self.dtype)
        self.hidden_grad = grads.hidden
        by = {id(parameter): grad for parameter, grad in zip(parameters, grads.parameters, strict=True)}
        self.weight_grad, self.bias_grad = by.get(id(weight)), by.get(id(self.bias))

    def __call__(
        self, hidden: Tensor, labels: Tensor, chunk: slice, z_weight: float
    ) -> tuple[Tensor, Tensor]:
        x, labels = hidden[chunk].to(self.dtype), labels[chunk, None]
        bias = None if self.bias is None else self.bias.to(self.dtype)
        with torch.autocast(x.device.type, enabled=False):
            logits = multiply(x, self.weight, bias).float()
            top = logits.amax(-1, keepdim=True)
            right = logits.gather(1, labels)
            exponentials = logits.sub_(top).exp_()
            sums = exponentials.sum(-1, keepdim=True)
            log_sums = top + sums.log()
            nats = (log_sums - right).sum()
            z = log_sums.square().sum() if z_weight else torch.zeros_like(nats)
            # The gradient of nats + z_weight · z by the logits.
            slopes = exponentials.mul_((1 + 2 * z_weight * log_sums) / sums)
            slopes.scatter_add_(1, labels, slopes.new_full((1, 1), -1.0).expand_as(labels))
            if self.bias_grad is not None:
                self.bias_grad += slopes.sum(0)
            slopes = slopes.to(self.dtype)
            del logits, exponentials  # the same table; in bf16 there is another one now
            self.hidden_grad[chunk] = multiply(slopes, self.weight.mT)
            if self.weight_grad is not None:
                add_product(self.weight_grad, slopes.mT, x)
        return nats, z


class _ByAutograd:
    """The same for a head of any kind."""

    def __init__(self, head: nn.Module, parameters: Sequence[Tensor], grads: Gradients) -> None:
        self.head, self.parameters, self.grads = head, parameters, grads

    def __call__(
        self, hidden: Tensor, labels: Tensor, chunk: slice, z_weight: float
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), _uncached_autocast(hidden.device.type):
            x = hidden[chunk].detach().requires_grad_()
            nats, z = _sums(self.head, x, labels[chunk], z_weight)
            total = nats + z_weight * z if z_weight else nats
        self.grads.hidden[chunk], *grads = torch.autograd.grad(total, [x, *self.parameters])
        for summed, grad in zip(self.grads.parameters, grads, strict=True):
            summed += grad
        return nats.detach(), z.detach()


def _uncached_autocast(device: str) -> torch.autocast:
    """Autocast as it is outside, but casting the head's matrix anew for every chunk: a cast that is kept
    belongs to the graph of the first, which is gone by the second."""
    return torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )
