"""Published models by name, and the worked examples of the documentation.

A published model is the keys of its config.json that shape it, so a preset is by construction what
the model's own file would give. `preset("qwen3-0.6b")` reads one when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from openbook.spec.hf import from_config
from openbook.spec.model import Attention, Block, Head, Learned, Mlp, ModelSpec, Norm, Sinusoidal
from openbook.spec.reader import show


class NotFoundError(LookupError):
    """Nothing has this name, or lies at this path; the message says where was looked and what is near."""


def preset(name: str) -> ModelSpec:
    """The spec of this name, capitals or not. Raises `NotFoundError`, listing names that are close."""
    key = name.lower()
    if key not in PRESETS:
        raise NotFoundError(f"no preset is called {show(name)}{near(key, PRESETS)}{LISTED}")
    return _build(key)


@cache
def _build(key: str) -> ModelSpec:
    return PRESETS[key]().replace(name=key)


LISTED = " (openbook models presets lists them)"


def near(name: str, names: Iterable[str]) -> str:
    """'; close to it: a, b' for an error message, or the first names when none is close."""
    import difflib

    names = list(names)
    close = difflib.get_close_matches(name[:80].lower(), names, n=5, cutoff=0.5)
    if close:
        return f"; close to it: {', '.join(close)}"
    few = 25
    more = f" and {len(names) - few} more" if len(names) > few else ""
    return f"; there are: {', '.join(names[:few])}{more}"


# --- published models ---------------------------------------------------------------------------


def _rows(common: dict[str, Any], keys: str, rows: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    """{name: config}: what all rows share, and each row's own values of `keys`."""
    return {name: {**common, **dict(zip(keys.split(), row, strict=True))} for name, row in rows.items()}


_SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "

_LLAMA_2 = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}


def _longer(factor: float) -> dict[str, Any]:
    """Llama 3.1 and 3.2: the context stretched from 8192 to 131,072 tokens."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {**_LLAMA_3, "max_position_embeddings": 131_072, "rope_scaling": scaling}


_QWEN_25 = {"model_type": "qwen2", "rope_theta": 1_000_000.0}
_QWEN_3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
}
_SMOLLM_2 = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

# Mixtures of experts in a llama or Qwen.
_MIXTURES = {
    **_rows(
        {
            "model_type": "mixtral",
            "vocab_size": 32_000,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        _SIZES + "max_position_embeddings",
        {
            "mixtral-8x7b": (4096, 14336, 32, 32, 8, 32_768),
            "mixtral-8x22b": (6144, 16384, 56, 48, 8, 65_536),
        },
    ),
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe",
        "max_position_embeddings": 8192,
        "rope_theta": 1_000_000.0,
    },
    **_rows(
        {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rope_theta": 1_000_000.0,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        _SIZES + "moe_intermediate_size",
        {
            "qwen3-30b-a3b": (2048, 6144, 48, 32, 4, 768),
            "qwen3-235b-a22b": (4096, 12288, 94, 64, 4, 1536),
        },
    ),
    "olmoe-1b-7b": {"model_type": "olmoe", "intermediate_size": 1024},
    # 4.5's and its Air's main models, without the layer that predicts a second token.
    **_rows(
        {
            "model_type": "glm4_moe",
            "head_dim": 128,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "rope_theta": 1_000_000.0,
        },
        "hidden_size intermediate_size num_hidden_layers moe_intermediate_size n_routed_experts "
        "first_k_dense_replace routed_scaling_factor use_qk_norm",
        {
            "glm-4.5": (5120, 12288, 92, 1536, 160, 3, 2.5, True),
            "glm-4.5-air": (4096, 10944, 46, 1408, 128, 1, 1.0, False),
        },
    ),
    "minimax-m2": {"model_type": "minimax_m2", "rotary_dim": 64},
    **_rows(
        {"model_type": "gpt_oss"},
        "num_hidden_layers num_local_experts",
        {"gpt-oss-20b": (24, 32), "gpt-oss-120b": (36, 128)},
    ),
    # The language models, without the part that sees.
    "llama-4-scout": {
        "model_type": "llama4_text",
        "max_position_embeddings": 10_485_760,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama-4-maverick": {
        "model_type": "llama4_text",
        "max_position_embeddings": 1_048_576,
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
    },
}

_GEMMA_3 = {"model_type": "gemma3_text", "head_dim": 256, "query_pre_attn_scalar": 256}
_GEMMAS = {
    **_rows(
        {"model_type": "gemma"},
        _SIZES,
        {"gemma-2b": (2048, 16384, 18, 8, 1), "gemma-7b": (3072, 24576, 28, 16, 16)},
    ),
    **_rows(
        {"model_type": "gemma2"},
        _SIZES + "head_dim query_pre_attn_scalar",
        {
            "gemma-2-2b": (2304, 9216, 26, 8, 4, 256, 256),
            "gemma-2-9b": (3584, 14336, 42, 16, 8, 256, 256),
            "gemma-2-27b": (4608, 36864, 46, 32, 16, 128, 144),
        },
    ),
    **_rows(
        {**_GEMMA_3, "vocab_size": 262_144, "max_position_embeddings": 32_768, "sliding_window": 512},
        _SIZES,
        {"gemma-3-270m": (640, 2048, 18, 4, 1), "gemma-3-1b": (1152, 6912, 26, 4, 1)},
    ),
    # The language models, without the part that sees.
    **_rows(
        {**_GEMMA_3, "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        _SIZES + "head_dim query_pre_attn_scalar",
        {
            "gemma-3-4b": (2560, 10240, 34, 8, 4, 256, 256),
            "gemma-3-12b": (3840, 15360, 48, 16, 8, 256, 256),
            "gemma-3-27b": (5376, 21504, 62, 32, 16, 128, 168),
        },
    ),
}

_OLMOS = {
    **_rows(
        {"model_type": "olmo"},
        _SIZES + "tie_word_embeddings",
        {"olmo-1b": (2048, 8192, 16, 16, 16, True), "olmo-7b": (4096, 11008, 32, 32, 32, False)},
    ),
    **_rows(
        {
            "model_type": "olmo2",
            "vocab_size": 100_352,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500_000.0,
        },
        _SIZES,
        {
            "olmo-2-1b": (2048, 8192, 16, 16, 16),
            "olmo-2-7b": (4096, 11008, 32, 32, 32),
            "olmo-2-13b": (5120, 13824, 40, 40, 40),
            "olmo-2-32b": (5120, 27648, 64, 40, 8),
        },
    ),
}

_LAYER_NORMS = {
    **_rows(
        {"model_type": "gpt_neox"},
        "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size",
        {
            "pythia-70m": (512, 2048, 6, 8, 50_304),
            "pythia-160m": (768, 3072, 12, 12, 50_304),
            "pythia-410m": (1024, 4096, 24, 16, 50_304),
            "pythia-1b": (2048, 8192, 16, 8, 50_304),
            "pythia-1.4b": (2048, 8192, 24, 16, 50_304),
            "pythia-2.8b": (2560, 10240, 32, 32, 50_304),
            "pythia-6.9b": (4096, 16384, 32, 32, 50_432),
            "pythia-12b": (5120, 20480, 36, 40, 50_688),
        },
    ),
    "gpt-neox-20b": {"model_type": "gpt_neox", "hidden_act": "gelu_fast"},
    "gpt-j-6b": {"model_type": "gptj"},
    **_rows(
        {"model_type": "opt"},
        "hidden_size ffn_dim num_hidden_layers num_attention_heads",
        {
            "opt-125m": (768, 3072, 12, 12),
            "opt-1.3b": (2048, 8192, 24, 32),
            "opt-2.7b": (2560, 10240, 32, 32),
            "opt-6.7b": (4096, 16384, 32, 32),
            "opt-13b": (5120, 20480, 40, 40),
            "opt-30b": (7168, 28672, 48, 56),
        },
    ),
    "phi-1.5": {"model_type": "phi"},
    "phi-2": {
        "model_type": "phi",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 32,
        "partial_rotary_factor": 0.4,
    },
    "stablelm-3b-4e1t": {"model_type": "stablelm"},
    "stablelm-2-1.6b": {
        "model_type": "stablelm",
        "vocab_size": 100_352,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "use_qkv_bias": True,
    },
    **_rows(
        {"model_type": "starcoder2", "max_position_embeddings": 16_384, "sliding_window": 4096},
        _SIZES + "rope_theta",
        {
            "starcoder2-3b": (3072, 12288, 30, 24, 2, 999_999.4420358813),
            "starcoder2-7b": (4608, 18432, 32, 36, 4, 1_000_000.0),
        },
    ),
    "starcoder-15b": {
        "model_type": "gpt_bigcode",
        "vocab_size": 49_152,
        "n_positions": 8192,
        "n_embd": 6144,
        "n_layer": 40,
        "n_head": 48,
        "n_inner": 24_576,
        "activation_function": "gelu",
    },
    "minitron-4b": {
        "model_type": "nemotron",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "command-r": {"model_type": "cohere", "rope_theta": 8_000_000.0},
    "falcon-7b": {"model_type": "falcon"},
    "falcon-40b": {
        "model_type": "falcon",
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "falcon-rw-1b": {
        "model_type": "falcon",
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "alibi": True,
        "bias": True,
        "multi_query": False,
        "parallel_attn": False,
    },
    **_rows(
        {"model_type": "bloom"},
        "hidden_size n_layer n_head",
        {
            "bloom-560m": (1024, 24, 16),
            "bloom-1b1": (1536, 24, 16),
            "bloom-1b7": (2048, 24, 16),
            "bloom-3b": (2560, 30, 32),
            "bloom-7b1": (4096, 30, 32),
            "bloom-176b": (14336, 70, 112),
        },
    ),
    **_rows(
        {"model_type": "mpt", "vocab_size": 50_432},
        "d_model n_layers n_heads max_seq_len",
        {"mpt-7b": (4096, 32, 32, 2048), "mpt-30b": (7168, 48, 64, 8192)},
    ),
}


def _yarn(factor: float, mscale: float, beta_fast: float = 32.0) -> dict[str, Any]:
    """DeepSeek's: `mscale` both on the rotation and, as `mscale_all_dim`, on the scores."""
    return {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": beta_fast,
            "beta_slow": 1.0,
            "mscale": mscale,
            "mscale_all_dim": mscale,
            "original_max_position_embeddings": 4096,
        }
    }


# The main models, without the layer that predicts a second token.
_DEEPSEEKS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 163_840,
        **_yarn(40.0, 0.707),
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        "hidden_size": 5120,
        "intermediate_size": 12_288,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
        "max_position_embeddings": 163_840,
        **_yarn(40.0, 0.707),
    },
    "deepseek-v3": {"model_type": "deepseek_v3", "max_position_embeddings": 163_840, **_yarn(40.0, 1.0)},
    "kimi-k2": {
        "model_type": "kimi_k2",
        "vocab_size": 163_840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50_000.0,
        "max_position_embeddings": 131_072,
        **_yarn(32.0, 1.0, beta_fast=1.0),
    },
}

_OTHERS: dict[str, dict[str, Any]] = {
    # The versions for 4096 tokens; those for 131,072 bring two lists of divisors along.
    **_rows(
        {"model_type": "phi3", "sliding_window": 2047},
        _SIZES,
        {"phi-3-mini": (3072, 8192, 32, 32, 32), "phi-3-medium": (5120, 17920, 40, 40, 10)},
    ),
    "phi-4": {
        "model_type": "phi3",
        "vocab_size": 100_352,
        "hidden_size": 5120,
        "intermediate_size": 17_920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "max_position_embeddings": 16_384,
        "rope_theta": 250_000.0,
    },
    "smollm3-3b": {"model_type": "smollm3", "rope_theta": 5_000_000.0, "max_position_embeddings": 65_536},
    "glm-4-9b": {"model_type": "glm"},
    "glm-4-9b-0414": {"model_type": "glm4", "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768},
    **_rows(
        {
            "model_type": "granite",
            "vocab_size": 49_155,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
        },
        _SIZES + "attention_multiplier logits_scaling",
        {
            "granite-3.0-2b": (2048, 8192, 40, 32, 8, 0.015625, 8.0),
            "granite-3.0-8b": (4096, 12800, 40, 32, 8, 0.0078125, 16.0),
        },
    ),
    "ernie-4.5-0.3b": {"model_type": "ernie4_5"},
    "seed-oss-36b": {"model_type": "seed_oss", "hidden_size": 5120, "rope_theta": 10_000_000.0},
    "exaone-4.0-32b": {
        "model_type": "exaone4",
        "hidden_size": 5120,
        "intermediate_size": 27_392,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}

_CONFIGS: dict[str, dict[str, Any]] = {
    **_rows(
        {"model_type": "gpt2"},
        "n_embd n_layer n_head n_positions",
        {
            "gpt2": (768, 12, 12, 1024),
            "gpt2-medium": (1024, 24, 16, 1024),
            "gpt2-large": (1280, 36, 20, 1024),
            "gpt2-xl": (1600, 48, 25, 1024),
            # Every second layer of the paper's model is sparse; this is the dense one of the same sizes.
            "gpt3-175b": (12288, 96, 96, 2048),
        },
    ),
    **_rows(
        _LLAMA_2,
        _SIZES,
        {
            "llama-2-7b": (4096, 11008, 32, 32, 32),
            "llama-2-13b": (5120, 13824, 40, 40, 40),
            "llama-2-70b": (8192, 28672, 80, 64, 8),
        },
    ),
    **_rows(
        {**_LLAMA_2, "max_position_embeddings": 2048},
        _SIZES,
        {"tinyllama-1.1b": (2048, 5632, 22, 32, 4)},
    ),
    **_rows(
        _LLAMA_3,
        _SIZES,
        {
            "llama-3-8b": (4096, 14336, 32, 32, 8),
            "llama-3-70b": (8192, 28672, 80, 64, 8),
        },
    ),
    **_rows(
        _longer(8.0),
        _SIZES,
        {
            "llama-3.1-8b": (4096, 14336, 32, 32, 8),
            "llama-3.1-70b": (8192, 28672, 80, 64, 8),
            "llama-3.1-405b": (16384, 53248, 126, 128, 8),
        },
    ),
    **_rows(
        {**_longer(32.0), "tie_word_embeddings": True},
        _SIZES,
        {
            "llama-3.2-1b": (2048, 8192, 16, 32, 8),
            "llama-3.2-3b": (3072, 8192, 28, 24, 8),
        },
    ),
    # Version 0.1, the one with a window.
    "mistral-7b": {
        "model_type": "mistral",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    # The base models; their instruct versions differ in the context's length or the epsilon.
    **_rows(
        _QWEN_25,
        _SIZES + "vocab_size tie_word_embeddings max_position_embeddings rms_norm_eps",
        {
            "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151_936, True, 32_768, 1e-6),
            "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151_936, True, 131_072, 1e-6),
            "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151_936, True, 32_768, 1e-6),
            "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152_064, False, 131_072, 1e-6),
            "qwen2.5-14b": (5120, 13824, 48, 40, 8, 152_064, False, 131_072, 1e-5),
            "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152_064, False, 131_072, 1e-5),
            "qwen2.5-72b": (8192, 29568, 80, 64, 8, 152_064, False, 131_072, 1e-5),
        },
    ),
    **_rows(
        _QWEN_3,
        _SIZES + "tie_word_embeddings",
        {
            "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
            "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
            "qwen3-4b": (2560, 9728, 36, 32, 8, True),
            "qwen3-8b": (4096, 12288, 36, 32, 8, False),
            "qwen3-14b": (5120, 17408, 40, 40, 8, False),
            "qwen3-32b": (5120, 25600, 64, 64, 8, False),
        },
    ),
    **_rows(
        _SMOLLM_2,
        _SIZES + "rope_theta",
        {
            "smollm2-135m": (576, 1536, 30, 9, 3, 100_000.0),
            "smollm2-360m": (960, 2560, 32, 15, 5, 100_000.0),
            "smollm2-1.7b": (2048, 8192, 24, 32, 32, 130_000.0),
        },
    ),
    **_MIXTURES,
    **_GEMMAS,
    **_OLMOS,
    **_LAYER_NORMS,
    **_DEEPSEEKS,
    **_OTHERS,
    # The first of GPT-2's blocks, within GPT-2's own embeddings, final norm and tied head.
    "gpt2-block": {"model_type": "gpt2", "n_layer": 1},
}

# --- worked examples ----------------------------------------------------------------------------


def _postln(positions: Learned | Sinusoidal) -> ModelSpec:
    """GPT-3's shape with a vocabulary of 1300, normalised after each addition as the first one was."""
    norm = Norm("layer", bias=True)
    block = Block(
        attn=Attention(n_heads=96, n_kv_heads=96, head_dim=128, scale=128**-0.5),
        mlp=Mlp(d_ff=49_152, activation="relu", gated=False),
        attn_add_norm=norm,
        mlp_add_norm=norm,
    )
    return ModelSpec(
        vocab_size=1300,
        d_model=12_288,
        max_positions=2048,
        layers=(block,) * 96,
        head=Head(tied=False, bias=True),
        positions=positions,
    )


def _triple_norm() -> ModelSpec:
    """Pre-LN with a third norm at the end of each block; no positions, no final norm, biases everywhere."""
    norm = Norm("layer", bias=True)
    biases = dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), True)
    block = Block(
        attn=Attention(n_heads=8, n_kv_heads=8, head_dim=64, scale=64**-0.5, **biases),
        mlp=Mlp(d_ff=2048, activation="gelu", gated=False, up_bias=True, down_bias=True),
        attn_norm=norm,
        mlp_norm=norm,
        end_norm=norm,
    )
    return ModelSpec(
        vocab_size=10_000,
        d_model=512,
        max_positions=512,
        layers=(block,) * 6,
        head=Head(tied=False, bias=True),
    )


PRESETS: Mapping[str, Callable[[], ModelSpec]] = MappingProxyType(
    {
        **{name: partial(from_config, config) for name, config in _CONFIGS.items()},
        "postln-1300": partial(_postln, Sinusoidal()),
        "postln-1300-learned": partial(_postln, Learned(2048)),
        "triple-norm-512": _triple_norm,
    }
)
"""By name, each a function that builds the spec. `preset` is the way in."""
