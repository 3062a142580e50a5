"""Views into a run that join many of its steps: every head at once, and what the residual stream says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from openbook.model import Decoder
from openbook.serve.explorer import Run
from openbook.trace import attention_entropy, head_groups, logit_lens, sink_share, update_norms
from openbook.trace.flow import last_of_layer


def thumbnails(run: Run, size: int) -> tuple[bytes, dict[str, Any]]:
    """The probabilities of every head, [L, H, n, n] with n = min(size, T): the largest of each block, 255
    for 1. Heads that a layer does not have are 0, and their numbers null."""
    trace = run.trace
    spec, n = trace.spec, min(size, trace.ids.shape[1])
    heads = max(block.attn.n_heads for block in spec.layers)
    small = torch.zeros(spec.n_layers, heads, n, n)
    for layer in range(spec.n_layers):
        probs = trace.tensor(f"layers.{layer}.attn.probs")[0]
        small[layer, : len(probs)] = F.adaptive_max_pool2d(probs, n)
    meta = {
        "L": spec.n_layers,
        "H": heads,
        "size": n,
        "entropy": attention_entropy(trace)[:, 0].mean(-1).tolist(),
        "sink": sink_share(trace)[:, 0].mean(-1).tolist(),
        "groups": [_groups(spec, layer) for layer in range(spec.n_layers)],
    }
    return (small * 255).round().to(torch.uint8).numpy().tobytes(), meta


def _groups(spec: Any, layer: int) -> list[int]:
    """For each head of a layer the number of the key/value head that it reads."""
    return [group for group, members in enumerate(head_groups(spec, layer)) for _ in members]


def lens(run: Run, decoder: Decoder, positions: slice = slice(None)) -> dict[str, Any]:
    """The likeliest next token after every layer at these positions, each of which takes a head for every
    layer; and how far each half of a layer moves the stream, at every position."""
    trace, spec = run.trace, run.trace.spec
    found = logit_lens(trace, decoder, top=1, tokens=positions)
    ids, probs = found.ids[:, 0, :, 0].tolist(), found.probs[:, 0, :, 0].tolist()
    norms = update_norms(trace)
    return {
        "layers": [last_of_layer(spec, layer) for layer in found.layers],
        "start": positions.start or 0,
        "positions": trace.ids.shape[1],
        "top": [
            [{"id": i, "text": run.model.text(i), "p": p} for i, p in zip(*row, strict=True)]
            for row in zip(ids, probs, strict=True)
        ],
        "entropy": found.entropy[:, 0].tolist(),
        "kl": found.kl[:, 0].tolist(),
        "update": {name: getattr(norms, name)[:, 0].tolist() for name in ("attn", "mlp", "block", "stream")},
    }


@torch.no_grad()
def lens_cell(run: Run, decoder: Decoder, layer: int, position: int, n: int) -> dict[str, Any]:
    """The `n` likeliest next tokens after one layer at one position."""
    stream = run.trace.tensor(last_of_layer(run.trace.spec, layer))[:, position : position + 1]
    logits = decoder.head(decoder.final_norm(stream))[0, 0].float()
    best, probs = logits.topk(min(n, len(logits))), logits.softmax(-1)
    return {
        "tokens": [
            {"id": i, "text": run.model.text(i), "logit": logit, "p": float(probs[i])}
            for logit, i in zip(*(part.tolist() for part in best), strict=True)
        ]
    }
