"""The table of families: a row for each `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from openbook.spec.hf.family import WINDOW_EVERYWHERE, WINDOWS_BY_LAYER, Family

_RMS = {"norm_eps": "rms_norm_eps"}

_GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
    spelling={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_act": "activation_function",
        "max_position_embeddings": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    },
    norm="layer",
    rotary=False,
    gated=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)

_LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    spelling=_RMS,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    needs_whole_heads=True,
)

_MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    spelling=_RMS,
    windows=WINDOW_EVERYWHERE,
)

_QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    spelling=_RMS,
    qkv_bias=True,
    windows=WINDOWS_BY_LAYER,
)

_QWEN3 = replace(
    _QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**_QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (_GPT2, _LLAMA, _MISTRAL, _QWEN2, _QWEN3)
}
"""By `model_type`. `to_config` tries them in this order."""
