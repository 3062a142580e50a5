"""A tiny model of every GGUF architecture, with everything in it that the architecture can have.

Each is written down as the metadata and the telling tensors of a file. Sizes differ pairwise, save where
llama.cpp wants them equal: 6 query and 2 key/value heads of 12 (8 where they must fill the width of 48).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tokenizers import pre_tokenizers

from openbook.model import Decoder
from openbook.model.init import init_weights
from openbook.spec import ModelSpec
from openbook.spec.gguf import ARCHITECTURES, OF_MODEL_TYPE, from_metadata
from openbook.spec.model import RopeScaling

VOCABULARY = 300

PLAIN_TOKEN = 64
"""The letter a: a token whose text is whole."""


def vocabulary() -> dict[str, Any]:
    """A byte-level vocabulary of `VOCABULARY` tokens: all bytes, some pairs of letters, and an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [f"{first} {second}" for first in "etaoin" for second in "shrdlucg"][: VOCABULARY - 257]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (VOCABULARY - 1) + [3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": VOCABULARY - 1,
        "tokenizer.ggml.bos_token_id": VOCABULARY - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


_COMMON: Mapping[str, Any] = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 48,
    "feed_forward_length": 80,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "vocab_size": VOCABULARY,
}

_EXPERTS = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 40}

_MULTIPLIERS = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.125, "logit_scale": 8.0}

_OWN: Mapping[str, Mapping[str, Any]] = {
    "llama": {"expert_count": 5, "expert_used_count": 2, "rope.freq_base": 5e5},
    "gemma2": {"block_count": 4, "attention.sliding_window": 7},
    "gemma3": {"block_count": 7, "attention.sliding_window": 7, "rope.freq_base": 1e6},
    "qwen3moe": _EXPERTS,
    "qwen2moe": {**_EXPERTS, "expert_shared_feed_forward_length": 56},
    "gpt-oss": {
        **_EXPERTS,
        "block_count": 4,
        "attention.sliding_window": 7,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 32,
    },
    "deepseek2": {
        **_EXPERTS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_shared_count": 2,
        "leading_dense_block_count": 1,
        "attention.q_lora_rank": 20,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 40,
        "attention.value_length": 32,
        "attention.key_length_mla": 24,
        "attention.value_length_mla": 14,
        "attention.head_count_kv": 1,
        "rope.dimension_count": 8,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_log_multiplier": 0.1,
    },
    "glm4moe": {
        **_EXPERTS,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "leading_dense_block_count": 1,
        "rope.dimension_count": 6,
    },
    "minimax-m2": {**_EXPERTS, "feed_forward_length": 40, "expert_gating_func": 2, "rope.dimension_count": 8},
    "llama4": {
        **_EXPERTS,
        "block_count": 4,
        "expert_used_count": 1,
        "interleave_moe_layer_step": 2,
        "context_length": 9000,
    },
    "phi3": {"rope.dimension_count": 6},
    "phi2": {"rope.dimension_count": 4, "attention.head_count_kv": 6},
    "olmo2": {"block_count": 5, "attention.sliding_window": 7},
    "olmo": {"attention.clamp_kqv": 0.5},
    "olmoe": {"expert_count": 5, "expert_used_count": 2, "attention.head_count_kv": 6},
    "granite": _MULTIPLIERS,
    "granitemoe": {**_MULTIPLIERS, "expert_count": 5, "expert_used_count": 2},
    "smollm3": {"block_count": 5},
    "glm4": {"rope.dimension_count": 6},
    "chatglm": {"rope.dimension_count": 6},
    "command-r": {"logit_scale": 0.0625},
    "cohere2": {"block_count": 5, "logit_scale": 0.25, "attention.sliding_window": 7},
    "stablelm": {"rope.dimension_count": 4},
    "nemotron": {"rope.dimension_count": 6},
    "gptneox": {"rope.dimension_count": 4, "attention.head_count_kv": 6, "use_parallel_residual": True},
    "gpt2": {"attention.head_count_kv": 6},
    "starcoder": {"attention.head_count_kv": 1},
    "bloom": {"attention.head_count_kv": 6, "feed_forward_length": 192},
    "mpt": {
        "attention.head_count_kv": 6,
        "feed_forward_length": 192,
        "attention.max_alibi_bias": 8.0,
        "attention.clamp_kqv": 0.5,
    },
}

_OF_EACH_LAYER = {
    "qwen2moe": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "seed_oss": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "glm4": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "chatglm": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "glm4moe": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_q_norm.weight"),
    "granite": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"),
    "stablelm": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_q_norm.weight"),
    "falcon": ("attn_norm_2.weight",),
    "deepseek2": ("exp_probs_b.bias",),
}
"""Tensors that show a part which the architecture can do without."""


def metadata(name: str, **changes: Any) -> dict[str, Any]:
    arch = ARCHITECTURES[name]
    keys = {**_COMMON, arch.norm_key: 1e-5, **_OWN.get(name, {})}
    if not arch.fills_width and not arch.latent:
        keys = {"attention.key_length": 12, "attention.value_length": 12, **keys}
    own = {f"{name}.{key}": value for key, value in {**keys, **changes}.items()}
    return {"general.architecture": name, **own}


def tiny(name: str, *, without: Sequence[str] = (), **changes: Any) -> ModelSpec:
    """The model of this architecture, with some of its keys changed, and `without` some tensors."""
    keys = metadata(name, **changes)
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, 48)}
    if not ARCHITECTURES[name].tied and "output.weight" not in without:
        tensors["output.weight"] = (VOCABULARY, 48)
    for layer in range(keys[f"{name}.block_count"]):
        shown = set(_OF_EACH_LAYER.get(name, ())) - set(without)
        tensors |= {f"blk.{layer}.{tensor}": () for tensor in shown}
    return from_metadata(keys, tensors)


def scaled(name: str, scaling: RopeScaling, **changes: Any) -> ModelSpec:
    """The model with its rotations scaled by a rule that a file keeps as numbers."""
    spec = tiny(name, **changes)
    block = spec.layers[0]
    assert block.attn.rope is not None
    attn = replace(block.attn, rope=replace(block.attn.rope, scaling=scaling))
    return spec.replace(layers=(replace(block, attn=attn),) * spec.n_layers)


def model_type_of(architecture: str) -> str:
    """A `model_type` of Hugging Face that becomes this architecture."""
    return {arch: model_type for model_type, arch in OF_MODEL_TYPE.items()}.get(architecture, architecture)


@torch.no_grad()
def noisy(spec: ModelSpec, seed: int = 0) -> Decoder:
    """Every parameter random, norms and biases included; these survive adding 1 and taking it off."""
    decoder = init_weights(Decoder(spec))
    generator = torch.Generator().manual_seed(seed)
    for parameter in {id(p): p for p in decoder.parameters()}.values():
        noise = torch.empty(parameter.shape).normal_(0.0, 0.25, generator=generator)
        parameter.copy_(noise if parameter.ndim > 1 else (parameter + noise).bfloat16().float())
    return decoder
