"""The names of Hugging Face's checkpoints."""

from __future__ import annotations

from openbook.weights.dialects.table import Dialect, Row
from openbook.weights.dialects.transforms import Transposed

_TRANSPOSED = Transposed()

_HF_GPT2 = Dialect(
    name="gpt2",
    base="transformer.",
    ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask, not c_attn.bias
    rows=(
        Row("embed", "transformer.wte"),
        Row("positions", "transformer.wpe"),
        Row("layers.{n}.attn_norm", "transformer.h.{n}.ln_1"),
        Row(
            ("layers.{n}.attn.q", "layers.{n}.attn.k", "layers.{n}.attn.v"),
            "transformer.h.{n}.attn.c_attn",
            _TRANSPOSED,
        ),
        Row("layers.{n}.attn.o", "transformer.h.{n}.attn.c_proj", _TRANSPOSED),
        Row("layers.{n}.mlp_norm", "transformer.h.{n}.ln_2"),
        Row("layers.{n}.mlp.up", "transformer.h.{n}.mlp.c_fc", _TRANSPOSED),
        Row("layers.{n}.mlp.down", "transformer.h.{n}.mlp.c_proj", _TRANSPOSED),
        Row("final_norm", "transformer.ln_f"),
        Row("head", "lm_head"),
    ),
)

_HF_LLAMA = Dialect(
    name="llama",
    base="model.",
    ignored=r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    rows=(
        Row("embed", "model.embed_tokens"),
        Row("layers.{n}.attn_norm", "model.layers.{n}.input_layernorm"),
        Row("layers.{n}.attn.q", "model.layers.{n}.self_attn.q_proj"),
        Row("layers.{n}.attn.k", "model.layers.{n}.self_attn.k_proj"),
        Row("layers.{n}.attn.v", "model.layers.{n}.self_attn.v_proj"),
        Row("layers.{n}.attn.o", "model.layers.{n}.self_attn.o_proj"),
        Row("layers.{n}.attn.q_norm", "model.layers.{n}.self_attn.q_norm"),
        Row("layers.{n}.attn.k_norm", "model.layers.{n}.self_attn.k_norm"),
        Row("layers.{n}.mlp_norm", "model.layers.{n}.post_attention_layernorm"),
        Row("layers.{n}.mlp.gate", "model.layers.{n}.mlp.gate_proj"),
        Row("layers.{n}.mlp.up", "model.layers.{n}.mlp.up_proj"),
        Row("layers.{n}.mlp.down", "model.layers.{n}.mlp.down_proj"),
        Row("final_norm", "model.norm"),
        Row("head", "lm_head"),
    ),
)

HF: dict[str, Dialect] = {
    "gpt2": _HF_GPT2,
    "llama": _HF_LLAMA,
    "mistral": _HF_LLAMA,
    "qwen2": _HF_LLAMA,
    "qwen3": _HF_LLAMA,
}
"""By `model_type` of config.json."""
