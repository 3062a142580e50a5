"""spec → config.json: one writer for all families."""

from __future__ import annotations

from typing import Any

from openbook.spec.hf.family import ACTIVATIONS, Family
from openbook.spec.hf.rope import write_rope
from openbook.spec.model import Activation, ModelSpec, Norm, Rope
from openbook.spec.reader import UnsupportedError


def write_config(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """A config in the family's terms, taken from the first layer; whether it fits is seen by reading it."""
    attn, mlp = spec.layers[0].attn, spec.layers[0].mlp
    if family.needs_whole_heads and spec.d_model % attn.n_heads:
        raise UnsupportedError(f"a width of {spec.d_model} is not a multiple of {attn.n_heads} heads")
    norm = spec.final_norm or Norm(family.norm)
    words = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": mlp.d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attn.n_heads,
        "num_key_value_heads": attn.n_kv_heads,
        "head_dim": attn.head_dim,
        "hidden_act": _activation_name(family, mlp.activation),
        "max_position_embeddings": spec.max_positions,
        "norm_eps": float(norm.eps),
        "tie_word_embeddings": spec.head.tied,
    }
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{family.spelling.get(word, word): value for word, value in words.items() if family.has(word)},
        **family.windows.write([block.attn.window for block in spec.layers]),
    }
    switches = ((family.qkv_bias, attn.q_bias), (family.mlp_bias, mlp.up_bias))
    config |= {switch: value for switch, value in switches if isinstance(switch, str)}
    if family.has("scale_attn_weights"):
        second = spec.layers[1].attn if spec.n_layers > 1 else attn
        config["scale_attn_weights"] = attn.scale == attn.head_dim**-0.5
        config["scale_attn_by_inverse_layer_idx"] = second.scale != attn.scale
    if family.rotary:
        config |= write_rope(attn.rope or Rope(attn.head_dim + attn.head_dim % 2), spec.max_positions)
    return config


def _activation_name(family: Family, activation: Activation) -> str:
    if activation == "gelu_tanh" and family.gated:
        return "gelu_pytorch_tanh"  # the same function, computed by torch itself
    return next(name for name, meaning in ACTIVATIONS.items() if meaning == activation)
