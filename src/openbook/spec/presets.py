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
        raise NotFoundError(f"no preset is called {show(name)}{near(key, PRESETS)}")
    return _build(key)


@cache
def _build(key: str) -> ModelSpec:
    return PRESETS[key]().replace(name=key)


def near(name: str, names: Iterable[str]) -> str:
    """'; close to it: a, b' for an error message, or all the names when none is close."""
    import difflib

    names = list(names)
    close = difflib.get_close_matches(name[:80].lower(), names, n=5, cutoff=0.5)
    return f"; close to it: {', '.join(close)}" if close else f"; there are: {', '.join(names)}"


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
