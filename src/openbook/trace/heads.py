"""Where the heads of attention look."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from openbook.spec.model import LatentAttention, ModelSpec
from openbook.trace.schema import Trace


def head_groups(spec: ModelSpec, layer: int) -> tuple[tuple[int, ...], ...]:
    """The query heads of a layer, those that share a key/value head together: ((0, 1, 2), (3, 4, 5)).

    In latent attention every head has keys and values of its own, though all are made of one latent.
    """
    attn = spec.layers[layer].attn
    groups = attn.n_heads if isinstance(attn, LatentAttention) else attn.n_kv_heads
    size = attn.n_heads // groups
    return tuple(tuple(range(start, start + size)) for start in range(0, attn.n_heads, size))


def attention_entropy(trace: Trace) -> Float[Tensor, "L B H T"]:
    """-Σ p ln p over the keys, in nats: 0 where a query looks at one key, ln n where at n keys alike.

    What a layer's sinks take is one more outcome. Heads that a layer does not have are NaN. Raises
    `UnknownStepError` for a trace without the probabilities.
    """

    def entropy(layer: int, probs: Tensor) -> Tensor:
        found = torch.special.entr(probs).sum(-1)
        if getattr(trace.spec.layers[layer].attn, "sinks", False):
            found += torch.special.entr((1 - probs.sum(-1)).clamp(min=0))
        return found

    return _by_layer(trace, entropy)


def sink_share(trace: Trace) -> Float[Tensor, "L B H T"]:
    """The share of its attention that each query gives to the first token, the one at position 0.

    0 where no such key is there any more, behind a window. Heads that a layer does not have are NaN.
    Raises `UnknownStepError` for a trace without the probabilities.
    """

    def share(layer: int, probs: Tensor) -> Tensor:
        first = trace.keys[layer] == 0
        return (probs * first[:, None, None]).sum(-1)

    return _by_layer(trace, share)


def _by_layer(trace: Trace, measure: Callable[[int, Tensor], Tensor]) -> Float[Tensor, "L B H T"]:
    heads = max(block.attn.n_heads for block in trace.spec.layers)
    found = torch.full((trace.spec.n_layers, len(trace.ids), heads, trace.ids.shape[1]), torch.nan)
    for layer in range(trace.spec.n_layers):
        probs = trace.tensor(f"layers.{layer}.attn.probs")
        found[layer, :, : probs.shape[1]] = measure(layer, probs)
    return found
