"""How evenly a router loads its experts, as a loss (Shazeer et al. 2017; Fedus et al. 2021, section 2.2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from openbook.model.decoder import Decoder
from openbook.model.experts import Choice, Chosen


class Routed(NamedTuple):
    """One layer's router: what it says of each expert [B, T, E], and the chosen ones [B, T, A]."""

    router: Chosen
    logits: Tensor
    experts: Tensor

    @property
    def probs(self) -> Tensor:
        """The probability of each expert, [B, T, E]."""
        if self.router.router.score == "sigmoid":
            scores = self.logits.sigmoid()
            return scores / scores.sum(-1, keepdim=True)
        return self.logits.softmax(-1)


class RoutersSeen:
    """While it is entered, `routed` gathers what the routers of `decoder` say; nothing if not `wanted`."""

    def __init__(self, decoder: Decoder, wanted: bool = True) -> None:
        self.routed: list[Routed] = []
        self._routers = [m for m in decoder.modules() if isinstance(m, Chosen)] if wanted else []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> RoutersSeen:
        self._handles = [router.register_forward_hook(self._note) for router in self._routers]
        return self

    def _note(self, router: Chosen, inputs: tuple[Any, ...], choice: Choice) -> None:
        # Nothing is computed here: a layer that is computed a second time for backward would miss it then.
        self.routed.append(Routed(router, inputs[0], choice.experts))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


def load_balance(routed: Iterable[Routed], counted: Tensor) -> Tensor:
    """E · Σ f_e · P_e over the experts, where f_e is the number of times that a token chooses expert e, and
    P_e its probability, both as means over the tokens of all layers together: A if all are equally loaded.

    `counted` [B, T] is False for padding. This is transformers' `load_balancing_loss_func`, which takes an
    expert of one layer for the same as that of another; layers with other numbers of experts add a term of
    their own. 0 without experts.
    """
    by_size: dict[int, list[Routed]] = {}
    for layer in routed:
        by_size.setdefault(layer.logits.shape[-1], []).append(layer)
    total = torch.zeros((), device=counted.device)
    for size, layers in by_size.items():
        probs = torch.cat([layer.probs[counted] for layer in layers])
        experts = torch.cat([layer.experts[counted] for layer in layers])
        chosen = torch.bincount(experts.flatten(), minlength=size) / len(experts)
        total = total + size * (chosen * probs.mean(0)).sum()
    return total
