"""Spec → metadata, in the terms of one architecture; whether it fits is seen by reading it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from openbook.spec.gguf.architecture import Architecture
from openbook.spec.gguf.experts import write_experts
from openbook.spec.gguf.reading import usual_pattern
from openbook.spec.gguf.rope import write_rope, write_sliding_rope
from openbook.spec.model import (
    Activation,
    Attention,
    Block,
    Chunk,
    LatentAttention,
    Mlp,
    ModelSpec,
    Norm,
    YarnScaling,
)
from openbook.spec.reader import UnsupportedError

ACTIVATION = "openbook.activation"
"""Which GELU a model has, where it is not the one that others of the architecture have."""

GELUS: Mapping[str, Activation] = {"gelu": "gelu", "gelu_tanh": "gelu_tanh"}


def write_metadata(arch: Architecture, spec: ModelSpec) -> dict[str, Any]:
    if arch.untied and spec.head.tied:
        raise UnsupportedError("llama.cpp wants a head that is not the embedding")
    norm = spec.final_norm or Norm(arch.norm.kind)
    own: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "context_length": spec.max_positions,
        "embedding_length": spec.d_model,
        "block_count": spec.n_layers,
        "feed_forward_length": _one_or_list([_feed_forward_length(block) for block in spec.layers]),
        arch.norm_key: float(norm.eps),
        **_write_attention(arch, spec),
        **_write_windows(arch, [block.attn.window for block in spec.layers]),
        **_write_ropes(arch, spec),
        **write_experts(arch, spec),
        **_write_multipliers(arch, spec),
    }
    if arch.choose_residual == "by_key":
        own["use_parallel_residual"] = spec.layers[0].residual == "parallel"
    name = {"general.name": spec.name} if spec.name else {}
    return {
        "general.architecture": arch.name,
        **name,
        **_write_activation(arch, spec.layers[0]),
        **{f"{arch.name}.{key}": value for key, value in own.items()},
    }


def _write_activation(arch: Architecture, block: Block) -> dict[str, Any]:
    own = block.mlp.activation if isinstance(block.mlp, Mlp) else arch.activation
    return {ACTIVATION: own} if own != arch.activation and {own, arch.activation} <= set(GELUS) else {}


def _feed_forward_length(block: Block) -> int:
    return block.mlp.d_ff if isinstance(block.mlp, Mlp) else block.mlp.expert.d_ff


def _one_or_list(values: list[int]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else values


def _write_attention(arch: Architecture, spec: ModelSpec) -> dict[str, Any]:
    first = spec.layers[0].attn
    heads = {"attention.head_count": _one_or_list([block.attn.n_heads for block in spec.layers])}
    if isinstance(first, LatentAttention):
        return heads | _write_latent(first)
    if arch.fills_width and any(block.attn.q_width != spec.d_model for block in spec.layers):
        raise UnsupportedError(
            f"llama.cpp wants heads × head size = {first.q_width} to be the width {spec.d_model}"
        )
    if arch.equal_heads and any(block.attn.q_width != _kv_width(block) for block in spec.layers):
        raise UnsupportedError("llama.cpp wants as many key and value heads as query heads")
    kv_heads = [block.attn.n_kv_heads for block in spec.layers if isinstance(block.attn, Attention)]
    return heads | {
        "attention.head_count_kv": _one_or_list(kv_heads),
        "attention.key_length": first.head_dim,
        "attention.value_length": first.head_dim,
    }


def _kv_width(block: Block) -> int:
    return block.attn.kv_width if isinstance(block.attn, Attention) else 0


def _write_latent(attn: LatentAttention) -> dict[str, Any]:
    """llama.cpp attends in the latent space: there, one key of C + R and one value of C serve all heads."""
    q_rank = {"attention.q_lora_rank": attn.q_rank} if attn.q_rank else {}
    return q_rank | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": attn.kv_rank,
        "attention.key_length": attn.kv_rank + attn.rope_dim,
        "attention.value_length": attn.kv_rank,
        "attention.key_length_mla": attn.head_dim,
        "attention.value_length_mla": attn.v_dim,
    }


def _write_windows(arch: Architecture, windows: list[int | Chunk | None]) -> dict[str, Any]:
    width = next((window for window in windows if window is not None), None)
    if width is None:
        # A file that says nothing would have the architecture's own window.
        return {"attention.sliding_window": 0} if arch.windows.width or arch.windows.chunk else {}
    pattern = [window is not None for window in windows]
    usual = usual_pattern(arch.windows.full_every, len(windows))
    marked = {} if pattern == usual else {"attention.sliding_window_pattern": pattern}
    return {"attention.sliding_window": width.size if isinstance(width, Chunk) else width, **marked}


def _write_ropes(arch: Architecture, spec: ModelSpec) -> dict[str, Any]:
    turning = [block.attn for block in spec.layers if block.attn.rope is not None]
    full = next((attn for attn in turning if attn.window is None), turning[0] if turning else None)
    if arch.positions != "rotary" or full is None or full.rope is None:
        return {}
    keys = write_rope(full.rope, _log_multiplier(full))
    sliding = next((attn.rope for attn in turning if attn.window is not None), None)
    return keys | (write_sliding_rope(arch, full.rope, sliding) if sliding else {})


def _log_multiplier(attn: Attention | LatentAttention) -> float:
    """What llama.cpp has under this name, a tenth of DeepSeek's `mscale_all_dim`: by how much YaRN also
    multiplies the scores."""
    if not isinstance(attn, LatentAttention) or not attn.rope:
        return 0.0
    scaling = attn.rope.scaling
    if not isinstance(scaling, YarnScaling) or scaling.factor <= 1:
        return 0.0
    mscale = math.sqrt(attn.scale * attn.head_dim**0.5)
    return (mscale - 1) / math.log(scaling.factor)


def _write_multipliers(arch: Architecture, spec: ModelSpec) -> dict[str, Any]:
    """The numbers that an architecture has a key for."""
    attn, head = spec.layers[0].attn, spec.head
    values: Mapping[str, float | None] = {
        "embedding_scale": spec.embed_scale,
        "residual_scale": spec.layers[0].residual_scale,
        "logit_scale": 1.0 / head.scale if arch.logit_scale_divides else head.scale,
        "attention.scale": attn.scale,
        "attn_logit_softcapping": attn.softcap or 0.0,
        "final_logit_softcapping": head.softcap or 0.0,
    }
    if isinstance(attn, Attention):
        values = {
            **values,
            "attention.clamp_kqv": attn.clip_qkv or 0.0,
            "attention.max_alibi_bias": _max_bias(attn),
        }
    return {key: float(value) for key, value in values.items() if key in arch.keys and value is not None}


def _max_bias(attn: Attention) -> float | None:
    """The exponent of the smallest slope of the first power of two of heads, as `alibi` has it."""
    if attn.alibi is None:
        return None
    whole = 1 << (attn.n_heads.bit_length() - 1)
    return -math.log2(attn.alibi.slopes[whole - 1])
