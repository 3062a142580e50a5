"""A generation step by step, with the KV cache filling; and what the cache would be under other attention."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openbook.infer.cache import cells
from openbook.infer.generate import cache_for, forward, tokens_of
from openbook.infer.sample import RequestError
from openbook.ledger import Ledger, Workload
from openbook.ledger.table import layer_label
from openbook.model import Decoder
from openbook.serve.explorer import Model
from openbook.spec.model import Attention, LatentAttention, ModelSpec

WARM_UP = 16
"""Tokens of a pass that is not measured: a model's first pass takes longer than all others."""


def generation(model: Model, decoder: Decoder, ids: Sequence[int], n: int) -> Iterator[dict[str, Any]]:
    """The prompt's pass and `n` - 1 further ones, greedy, or up to a token that ends a text; then the totals.

    Each pass is done twice, with the cache and over all tokens without one, and measured.
    """
    capacity = len(ids) + n
    book = Ledger(decoder.spec, model.dtype)
    cache = cache_for(decoder, 1, capacity)
    tokens, limit = list(ids), tokens_of(decoder, model.tokenizer.vocab_size if model.tokenizer else None)
    ends = model.tokenizer.eos_ids if model.tokenizer else frozenset()
    totals: Counter[str] = Counter()
    _pass(decoder, tokens[:WARM_UP])
    for step in range(n):
        past = cache.length
        given = torch.tensor([tokens[past:]])
        logits, ms = _timed(lambda given=given: forward(decoder, given, cache))
        _, ms_without = _timed(lambda: _pass(decoder, tokens))
        workload = Workload("decode", past=past) if step else Workload("prefill", new=len(tokens))
        chosen = int(logits[0, :limit].argmax())
        line = {
            "kind": "decode" if step else "prefill",
            "step": step,
            "token": {"id": chosen, "text": model.text(chosen)},
            "length": cache.length,
            "bytes": book.kv_bytes(1, cache.length, model.dtype),
            "capacity_bytes": cache.nbytes,
            "layers": layers(book, cache.length, capacity, model.dtype),
            "ms": ms,
            "ms_without_cache": ms_without,
            "flops": book.totals(workload).flops,
            "flops_without": book.totals(Workload("prefill", new=len(tokens))).flops,
        }
        yield line
        totals.update({name: line[name] for name in _SUMMED}, steps=1)
        tokens.append(chosen)
        if chosen in ends:
            break
    yield {"kind": "end", "totals": {**totals, "capacity_bytes": cache.nbytes}}


_SUMMED = ("ms", "ms_without_cache", "flops", "flops_without")


@torch.inference_mode()
def _pass(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    """The logits after these tokens, without a cache."""
    return decoder(torch.tensor([list(ids)]), last_only=True)[:, -1]


def _timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    begun = time.perf_counter()
    result = work()
    return result, 1000 * (time.perf_counter() - begun)


def layers(book: Ledger, length: int, capacity: int, dtype: str) -> list[dict[str, Any]]:
    """What the layers hold that keep the same of a token, one row for each such kind."""
    rows = []
    for row in book.cache(1, length, dtype):
        attn = book.spec.layers[row.layers[0]].attn
        rows.append(
            {
                "layer": layer_label(row.layers),
                "layers": row.layers,
                "times": len(row.layers),
                "filled": row.cells,
                "slots": cells(attn.window, capacity),
                "kv_heads": attn.n_kv_heads if isinstance(attn, Attention) else 1,
                "form": row.form,
                "token_bytes": row.token_bytes,
                "bytes": row.bytes,
            }
        )
    return rows


# --- other attention ----------------------------------------------------------------------------

WINDOW = 1024
"""Of the variant that gives a window to every layer that has none."""


def what_if(spec: ModelSpec, dtype: str, tokens: int) -> dict[str, Any]:
    """Bytes of a cache of `tokens` tokens: of this model, and if its heads or windows were otherwise."""
    rows = list(_variants(spec, dtype, tokens))
    return {"tokens": tokens, "dtype": dtype, "rows": rows}


def _variants(spec: ModelSpec, dtype: str, tokens: int) -> Iterator[dict[str, Any]]:
    first = spec.layers[0].attn

    def row(name: str, other: ModelSpec, kv_heads: int | None, windows: bool = True, **more: Any) -> Any:
        size = Ledger(other, dtype).kv_bytes(1, tokens, dtype, windows)
        return {"name": name, "kv_heads": kv_heads, "bytes": size, "this": False, **more}

    if isinstance(first, LatentAttention):
        expanded = sum(each.expanded_bytes for each in Ledger(spec, dtype).cache(1, tokens, dtype))
        yield {"name": "mha", "kv_heads": first.n_heads, "bytes": expanded, "this": False}
        yield row("latent", spec, 1, this=True)
        return
    yield row(
        "mha", _shared(spec, lambda attn: attn.n_heads), first.n_heads, this=first.n_kv_heads == first.n_heads
    )
    if 1 < first.n_kv_heads < first.n_heads:
        yield row("gqa", spec, first.n_kv_heads, this=True)
    yield row("mqa", _shared(spec, lambda attn: 1), 1, this=first.n_kv_heads == 1)
    if any(block.attn.window for block in spec.layers):
        yield row("no_window", spec, first.n_kv_heads, windows=False)
    if any(block.attn.window is None for block in spec.layers):
        yield row("window", _windowed(spec), first.n_kv_heads, window=WINDOW)


def _shared(spec: ModelSpec, kv_heads: Callable[[Attention], int]) -> ModelSpec:
    """The same model with so many key/value heads in every layer."""
    return spec.replace(
        layers=tuple(
            replace(block, attn=replace(block.attn, n_kv_heads=kv_heads(block.attn)))
            if isinstance(block.attn, Attention)
            else block
            for block in spec.layers
        )
    )


def _windowed(spec: ModelSpec) -> ModelSpec:
    return spec.replace(
        layers=tuple(
            block if block.attn.window else replace(block, attn=replace(block.attn, window=WINDOW))
            for block in spec.layers
        )
    )


def check_room(spec: ModelSpec, prompt: int, n: int) -> None:
    """Raises `RequestError` if the text would become longer than the model's context."""
    if prompt + n > spec.max_positions:
        raise RequestError(
            "tokens",
            f"{prompt} of the prompt and {n} more are beyond the model's {spec.max_positions:,} positions",
        )
