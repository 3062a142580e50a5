"""What the residual stream would say after each layer, and what each block adds to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openbook.infer.sample import RequestError
from openbook.model import Decoder
from openbook.trace.flow import first_stream, inputs, last_of_layer
from openbook.trace.schema import Trace

BUDGET = 64 * 2**20
"""Bytes of logits that are held at once, in fp32."""


@dataclass(frozen=True, eq=False)
class LogitLens:
    """The distribution of the next token that the final norm and the head read off the residual stream after
    each of `layers`: the k likeliest tokens of it, their probabilities, its entropy, and KL(final ‖ it).

    Entropy and KL are in nats, over the whole vocabulary. N is the number of layers; after the last layer
    the distribution is the model's own, and KL is 0.
    """

    layers: tuple[int, ...]
    ids: Int[Tensor, "N B T k"]
    probs: Float[Tensor, "N B T k"]
    entropy: Float[Tensor, "N B T"]
    kl: Float[Tensor, "N B T"]


@torch.no_grad()
def logit_lens(
    trace: Trace,
    decoder: Decoder,
    *,
    top: int = 5,
    layers: Iterable[int] | None = None,
    tokens: slice = slice(None),
    budget: int = BUDGET,
) -> LogitLens:
    """Reads every position of `tokens` after each of `layers` (None: all).

    Takes as many FLOPs as the head of that many passes: 2·N·B·T·D·V. Positions are taken so many at a time
    that their logits, of one layer and of the last, take at most `budget` bytes.

    Raises `UnknownStepError` for a trace without the residual stream after these layers and the last one.
    """
    spec = trace.spec
    chosen = tuple(range(spec.n_layers)) if layers is None else tuple(layers)
    if bad := [layer for layer in chosen if not 0 <= layer < spec.n_layers]:
        raise RequestError("layers", f"layer {bad[0]} is none of 0 to {spec.n_layers - 1}")
    top = max(1, min(top, spec.vocab_size))
    streams = [_stream(trace, layer)[:, tokens].flatten(0, 1) for layer in chosen]
    last = _stream(trace, spec.n_layers - 1)[:, tokens]
    shape, last = last.shape[:2], last.flatten(0, 1)
    rows = max(1, budget // (4 * 4 * spec.vocab_size))  # four such tensors are held at the most
    pieces = []
    for at in range(0, len(last), rows):
        final = _log_probs(decoder, last[at : at + rows])
        final, final_entropy = final.exp(), -torch.linalg.vecdot(final.exp(), final)
        pieces.append([_read(decoder, x[at : at + rows], final, final_entropy, top) for x in streams])

    def joined(part: int) -> Tensor:
        whole = torch.cat([torch.stack([found[part] for found in piece]) for piece in pieces], dim=1)
        return whole.unflatten(1, shape)

    return LogitLens(chosen, joined(0), joined(1), joined(2), joined(3))


def _read(
    decoder: Decoder, x: Tensor, final: Tensor, final_entropy: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Likeliest ids, their probabilities, entropy, KL: of rows [n, D] of a stream.

    KL(final ‖ it) = Σ final · ln final - Σ final · ln it: products of rows, which need no table of their own.
    """
    log_probs = _log_probs(decoder, x)
    likeliest = log_probs.topk(top, dim=-1)
    kl = (-final_entropy - torch.linalg.vecdot(final, log_probs)).clamp(min=0)
    entropy = -torch.linalg.vecdot(log_probs.exp(), log_probs)
    return likeliest.indices, likeliest.values.exp(), entropy, kl


def _log_probs(decoder: Decoder, x: Tensor) -> Tensor:
    return decoder.head(decoder.final_norm(x[None]))[0].float().log_softmax(-1)


def _stream(trace: Trace, layer: int) -> Tensor:
    """The residual stream after the layer; before the first one, for -1."""
    return trace.tensor(last_of_layer(trace.spec, layer) if layer >= 0 else first_stream(trace.spec))


@dataclass(frozen=True, eq=False)
class UpdateNorms:
    """L2 norms, token by token, after fp32: of the residual stream before each layer, of what its attention
    and its feed-forward add to it (after their own norms, times the residual scale), and of what the whole
    block has changed of it."""

    stream: Float[Tensor, "L B T"]
    attn: Float[Tensor, "L B T"]
    mlp: Float[Tensor, "L B T"]
    block: Float[Tensor, "L B T"]

    @property
    def relative(self) -> Float[Tensor, "L B T"]:
        """What the block has changed, as a part of the stream before it."""
        return self.block / self.stream


@torch.no_grad()
def update_norms(trace: Trace) -> UpdateNorms:
    """How much each block adds to the residual stream. Raises `UnknownStepError` for a trace without it."""
    found: dict[str, list[Tensor]] = {"stream": [], "attn": [], "mlp": [], "block": []}
    for layer, block in enumerate(trace.spec.layers):
        before, after = _stream(trace, layer - 1), _stream(trace, layer)
        for part in ("attn", "mlp"):
            added = inputs(trace.spec, f"layers.{layer}.{part}_add")[1]
            found[part].append(trace.tensor(added).float().norm(dim=-1) * abs(block.residual_scale))
        found["stream"].append(before.norm(dim=-1))
        found["block"].append((after - before).norm(dim=-1))
    return UpdateNorms(**{name: torch.stack(norms) for name, norms in found.items()})
