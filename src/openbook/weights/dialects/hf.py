"""The names of Hugging Face's checkpoints, as published: they are older than the modules that transformers
builds today, which it translates them to (its conversion_mapping.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from openbook.spec.model import Attention, Block
from openbook.weights.dialects.table import Dialect, Row
from openbook.weights.dialects.transforms import Chain, Grouped, Interleaved, Transform, Transposed

_TRANSPOSED = Transposed()

Names = Mapping[str, str]
"""Our modules → theirs, both below one layer."""


def _in_layer(theirs: str, *names: Names) -> tuple[Row, ...]:
    """Rows of one layer. `theirs` is the container's prefix of it: 'model.layers.{n}.'."""
    joined = {ours: name for some in names for ours, name in some.items()}
    return tuple(Row(f"layers.{{n}}.{ours}", f"{theirs}{name}") for ours, name in joined.items())


def _fused(*ours: str) -> tuple[str, ...]:
    return tuple(f"layers.{{n}}.{module}" for module in ours)


_QKV = _fused("attn.q", "attn.k", "attn.v")
_GATE_UP = _fused("mlp.gate", "mlp.up")
_EXPERTS_GATE_UP = _fused("mlp.experts.gate", "mlp.experts.up")
_EXPERTS_GATE_UP_WEIGHTS = _fused("mlp.experts.gate.weight", "mlp.experts.up.weight")
_EXPERTS_GATE_UP_BIASES = _fused("mlp.experts.gate.bias", "mlp.experts.up.bias")


def _grouped(block: Block) -> Transform:
    """One matrix for q, k and v in which each key/value head's rows lie together."""
    if not isinstance(block.attn, Attention):
        raise TypeError("only plain attention has queries, keys and values in one matrix")
    return Grouped(block.attn.n_heads, block.attn.n_kv_heads)


# --- the parts of llama's kin -------------------------------------------------------------------

_EDGES = (
    Row("embed", "model.embed_tokens"),
    Row("final_norm", "model.norm"),
    Row("head", "lm_head"),
)

_O = {"attn.o": "self_attn.o_proj"}
_Q_K_V_O = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    **_O,
}
_QK_NORM = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}

_PRE_NORM = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_POST_NORM = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
_SANDWICH = {"attn_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_POST_NORM}

_DOWN = {"mlp.down": "mlp.down_proj"}
_GATED = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", **_DOWN}
_FC = {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}

_LAYER = "model.layers.{n}."

_INV_FREQ = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"

_DRAFTS = r"(model\.layers\.\d+\.)eh_proj\.weight"
"""Layers after the last that guess the token after next (DeepSeek's multi-token prediction): this matrix,
from the embedding and the hidden state side by side, marks them."""


def _llama_like(name: str, *names: Names, rows: tuple[Row, ...] = ()) -> Dialect:
    """llama's names outside the layers and, in each of them, `names`; `rows` in addition."""
    return Dialect(
        name,
        rows=(*_EDGES, *_in_layer(_LAYER, *names), *rows),
        base="model.",
        ignored=_INV_FREQ,
        drafts=_DRAFTS,
    )


_LLAMA = _llama_like("llama", _PRE_NORM, _Q_K_V_O, _QK_NORM, _GATED)
_SANDWICHED = _llama_like("gemma3", _SANDWICH, _Q_K_V_O, _QK_NORM, _GATED)
_OLMO2 = _llama_like("olmo2", _POST_NORM, _Q_K_V_O, _QK_NORM, _GATED)
_HUNYUAN = _llama_like(
    "hunyuan_v1_dense",
    _PRE_NORM,
    _Q_K_V_O,
    {"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"},
    _GATED,
)

# Of phi3 both fused matrices; of glm only the feed-forward's.
_GATE_UP_PROJ = Row(_GATE_UP, f"{_LAYER}mlp.gate_up_proj")
_PHI3 = _llama_like(
    "phi3", _PRE_NORM, _O, _DOWN, rows=(Row(_QKV, f"{_LAYER}self_attn.qkv_proj"), _GATE_UP_PROJ)
)
_GLM = _llama_like("glm", _PRE_NORM, _Q_K_V_O, _DOWN, rows=(_GATE_UP_PROJ,))
_GLM4 = _llama_like(
    "glm4",
    {
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    },
    _Q_K_V_O,
    _DOWN,
    rows=(_GATE_UP_PROJ,),
)

_STABLELM = _llama_like(
    "stablelm",
    _PRE_NORM,
    _Q_K_V_O,
    {
        "attn.q_norm": "self_attn.q_layernorm.norms.{i}",
        "attn.k_norm": "self_attn.k_layernorm.norms.{i}",
    },
    _GATED,
)
_STARCODER2 = _llama_like("starcoder2", _PRE_NORM, _Q_K_V_O, {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})
_PHI = Dialect(
    "phi",
    rows=(
        Row("embed", "model.embed_tokens"),
        *_in_layer(
            _LAYER,
            {"attn_norm": "input_layernorm"},
            {**_Q_K_V_O, "attn.o": "self_attn.dense"},
            {"attn.q_norm": "self_attn.q_layernorm", "attn.k_norm": "self_attn.k_layernorm"},
            _FC,
        ),
        Row("final_norm", "model.final_layernorm"),
        Row("head", "lm_head"),
    ),
    base="model.",
    ignored=_INV_FREQ,
)

# --- llama's kin with experts -------------------------------------------------------------------


def _mixture(name: str, *names: Names, experts: Names, stacked: Names) -> Dialect:
    """A matrix for each expert, as published; or, `also`, all experts in two tensors, as the modules of
    transformers hold them, and write them when told to."""
    both = (
        Row(_EXPERTS_GATE_UP_WEIGHTS, f"{_LAYER}mlp.experts.gate_up_proj", axis=1),
        Row("layers.{n}.mlp.experts.down.weight", f"{_LAYER}mlp.experts.down_proj"),
    )
    also = _llama_like(name, _PRE_NORM, *names, stacked, rows=both)
    return replace(_llama_like(name, _PRE_NORM, *names, experts), also=(also,))


_ROUTER = {"mlp.router": "mlp.gate"}
_CORRECTED = {**_ROUTER, "mlp.router.correction": "mlp.gate.e_score_correction_bias"}
_EACH_EXPERT = {f"mlp.experts.{m}": f"mlp.experts.{{i}}.{m}_proj" for m in ("gate", "up", "down")}
_SHARED_EXPERT = {f"mlp.shared.{m}": f"mlp.shared_expert.{m}_proj" for m in ("gate", "up", "down")}
_SHARED_EXPERTS = {f"mlp.shared.{m}": f"mlp.shared_experts.{m}_proj" for m in ("gate", "up", "down")}

_LATENT = {
    "attn.q": "self_attn.q_proj",
    "attn.q_down": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_layernorm",
    "attn.q_up": "self_attn.q_b_proj",
    "attn.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
    "attn.kv_up": "self_attn.kv_b_proj",
    **_O,
}

_QWEN_MOE = _mixture(
    "qwen2_moe",
    {**_Q_K_V_O, **_QK_NORM, **_GATED, **_SHARED_EXPERT, "mlp.shared_gate": "mlp.shared_expert_gate"},
    experts={**_ROUTER, **_EACH_EXPERT},
    stacked=_ROUTER,
)
_DEEPSEEK = _mixture(
    "deepseek_v3",
    {**_LATENT, **_GATED, **_SHARED_EXPERTS},
    experts={**_CORRECTED, **_EACH_EXPERT},
    stacked=_CORRECTED,
)
_GLM4_MOE = _mixture(
    "glm4_moe",
    {**_Q_K_V_O, **_QK_NORM, **_GATED, **_SHARED_EXPERTS},
    experts={**_CORRECTED, **_EACH_EXPERT},
    stacked=_CORRECTED,
)
_MIXTRAL = _mixture(
    "mixtral",
    {**_Q_K_V_O, **_QK_NORM},
    experts={
        "mlp.router": "block_sparse_moe.gate",
        "mlp.router.correction": "block_sparse_moe.e_score_correction_bias",
        "mlp.experts.gate": "block_sparse_moe.experts.{i}.w1",
        "mlp.experts.down": "block_sparse_moe.experts.{i}.w2",
        "mlp.experts.up": "block_sparse_moe.experts.{i}.w3",
    },
    stacked={**_ROUTER, "mlp.router.correction": "mlp.e_score_correction_bias"},
)

_GRANITEMOE = _llama_like(
    "granitemoe",
    _PRE_NORM,
    _Q_K_V_O,
    {"mlp.router": "block_sparse_moe.router.layer", "mlp.experts.down": "block_sparse_moe.output_linear"},
    rows=(Row(_EXPERTS_GATE_UP, f"{_LAYER}block_sparse_moe.input_linear", axis=1),),
)

_GPT_OSS = _llama_like(
    "gpt_oss",
    _PRE_NORM,
    _Q_K_V_O,
    {
        "attn.sinks": "self_attn.sinks",
        "mlp.router": "mlp.router",
        "mlp.experts.down.bias": "mlp.experts.down_proj_bias",
    },
    rows=(
        Row(
            _EXPERTS_GATE_UP_WEIGHTS,
            f"{_LAYER}mlp.experts.gate_up_proj",
            Chain((Interleaved(axis=1), _TRANSPOSED)),
            axis=1,
        ),
        Row(
            _EXPERTS_GATE_UP_BIASES,
            f"{_LAYER}mlp.experts.gate_up_proj_bias",
            Interleaved(axis=1),
            axis=1,
        ),
        Row("layers.{n}.mlp.experts.down.weight", f"{_LAYER}mlp.experts.down_proj", _TRANSPOSED),
    ),
)

_LLAMA4 = _llama_like(
    "llama4_text",
    _PRE_NORM,
    _Q_K_V_O,
    {"mlp.router": "feed_forward.router"},
    {f"mlp.{m}": f"feed_forward.{m}_proj" for m in ("gate", "up", "down")},
    {f"mlp.shared.{m}": f"feed_forward.shared_expert.{m}_proj" for m in ("gate", "up", "down")},
    rows=(
        Row(_EXPERTS_GATE_UP_WEIGHTS, f"{_LAYER}feed_forward.experts.gate_up_proj", _TRANSPOSED, axis=1),
        Row("layers.{n}.mlp.experts.down.weight", f"{_LAYER}feed_forward.experts.down_proj", _TRANSPOSED),
    ),
)

# --- the text model of one that also sees -------------------------------------------------------


def _that_sees(dialect: Dialect) -> Dialect:
    """The same below other prefixes: first as published, then as today's modules are named."""
    return replace(
        dialect,
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
        ignored=rf"{dialect.ignored}|(model\.)?(vision_tower|vision_model|multi_modal_projector)\..*",
    )


# --- GPT-2's kin --------------------------------------------------------------------------------

_GPT_EDGES = (
    Row("embed", "transformer.wte"),
    Row("positions", "transformer.wpe"),
    Row("final_norm", "transformer.ln_f"),
    Row("head", "lm_head"),
)
_H = "transformer.h.{n}."
_GPT_NORMS = {"attn_norm": "ln_1", "mlp_norm": "ln_2"}
_MASKS = r"(transformer\.)?(h\.\d+\.attn\.)?(bias|masked_bias)"  # the causal mask, not c_attn.bias

_GPT2 = Dialect(
    "gpt2",
    base="transformer.",
    ignored=_MASKS,
    rows=(
        *_GPT_EDGES,
        *_in_layer(_H, _GPT_NORMS),
        Row(_QKV, f"{_H}attn.c_attn", _TRANSPOSED),
        Row("layers.{n}.attn.o", f"{_H}attn.c_proj", _TRANSPOSED),
        Row("layers.{n}.mlp.up", f"{_H}mlp.c_fc", _TRANSPOSED),
        Row("layers.{n}.mlp.down", f"{_H}mlp.c_proj", _TRANSPOSED),
    ),
)

_GPT_BIGCODE = Dialect(
    "gpt_bigcode",
    base="transformer.",
    ignored=_MASKS,
    rows=(
        *_GPT_EDGES,
        *_in_layer(_H, _GPT_NORMS, {"attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}),
        Row(_QKV, f"{_H}attn.c_attn", _grouped),
    ),
)

_GPTJ = Dialect(
    "gptj",
    base="transformer.",
    ignored=_MASKS,
    rows=(
        *_GPT_EDGES,
        *_in_layer(
            _H,
            {"attn_norm": "ln_1", "attn.q": "attn.q_proj", "attn.k": "attn.k_proj", "attn.v": "attn.v_proj"},
            {"attn.o": "attn.out_proj", "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out"},
        ),
    ),
)

_DENSE_4H = {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}

_NEOX_LAYER = "gpt_neox.layers.{n}."
_GPT_NEOX = Dialect(
    "gpt_neox",
    base="gpt_neox.",
    ignored=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    rows=(
        Row("embed", "gpt_neox.embed_in"),
        *_in_layer(_NEOX_LAYER, _PRE_NORM, {"attn.o": "attention.dense"}, _DENSE_4H),
        Row(_QKV, f"{_NEOX_LAYER}attention.query_key_value", _grouped),
        Row("final_norm", "gpt_neox.final_layer_norm"),
        Row("head", "embed_out"),
    ),
)

_BLOOM = Dialect(
    "bloom",
    base="transformer.",
    rows=(
        Row("embed", "transformer.word_embeddings"),
        Row("embed_norm", "transformer.word_embeddings_layernorm"),
        *_in_layer(_H, _PRE_NORM, {"attn.o": "self_attention.dense"}, _DENSE_4H),
        Row(_QKV, f"{_H}self_attention.query_key_value", _grouped),
        Row("final_norm", "transformer.ln_f"),
        Row("head", "lm_head"),
    ),
)


def _falcon_norm(parallel: str, serial: str) -> Row:
    """Two norms side by side have names of their own (Falcon-40B); otherwise they are llama's."""
    ours = "attn_norm" if parallel == "ln_attn" else "mlp_norm"
    return Row(
        f"layers.{{n}}.{ours}",
        lambda block: f"{_H}{parallel if block.residual == 'parallel' else serial}",
    )


_FALCON = Dialect(
    "falcon",
    base="transformer.",
    ignored=r"(transformer\.)?h\.\d+\.self_attention\.rotary_emb\.inv_freq",
    rows=(
        Row("embed", "transformer.word_embeddings"),
        _falcon_norm("ln_attn", "input_layernorm"),
        _falcon_norm("ln_mlp", "post_attention_layernorm"),
        *_in_layer(_H, {"attn.o": "self_attention.dense"}, _DENSE_4H),
        Row(_QKV, f"{_H}self_attention.query_key_value", _grouped),
        Row("final_norm", "transformer.ln_f"),
        Row("head", "lm_head"),
    ),
)

_BLOCKS = "transformer.blocks.{n}."
_MPT = Dialect(
    "mpt",
    base="transformer.",
    rows=(
        Row("embed", "transformer.wte"),
        *_in_layer(
            _BLOCKS,
            {"attn_norm": "norm_1", "attn.o": "attn.out_proj"},
            {"mlp_norm": "norm_2", "mlp.up": "ffn.up_proj", "mlp.down": "ffn.down_proj"},
        ),
        Row(_QKV, f"{_BLOCKS}attn.Wqkv"),
        Row("final_norm", "transformer.norm_f"),
        Row("head", "lm_head"),
    ),
)

_OPT_LAYER = "model.decoder.layers.{n}."
_OPT = Dialect(
    "opt",
    base="model.",
    rows=(
        Row("embed", "model.decoder.embed_tokens"),
        Row("positions", "model.decoder.embed_positions"),
        *_in_layer(
            _OPT_LAYER,
            # Before what they are named after or, in a Post-LN model, after it was added.
            {"attn_norm": "self_attn_layer_norm", "attn_add_norm": "self_attn_layer_norm"},
            {**_Q_K_V_O, "attn.o": "self_attn.out_proj"},
            {"mlp_norm": "final_layer_norm", "mlp_add_norm": "final_layer_norm"},
            {"mlp.up": "fc1", "mlp.down": "fc2"},
        ),
        Row("final_norm", "model.decoder.final_layer_norm"),
        Row("head", "lm_head"),
    ),
)

HF: dict[str, Dialect] = {
    "bloom": _BLOOM,
    "cohere": _LLAMA,
    "cohere2": _LLAMA,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "ernie4_5": _LLAMA,
    "exaone4": _OLMO2,
    "falcon": _FALCON,
    "gemma": _LLAMA,
    "gemma2": _SANDWICHED,
    "gemma3": _that_sees(_SANDWICHED),
    "gemma3_text": _SANDWICHED,
    "glm": _GLM,
    "glm4": _GLM4,
    "glm4_moe": _GLM4_MOE,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT_BIGCODE,
    "gpt_neox": _GPT_NEOX,
    "gpt_oss": _GPT_OSS,
    "gptj": _GPTJ,
    "granite": _LLAMA,
    "granitemoe": _GRANITEMOE,
    "hunyuan_v1_dense": _HUNYUAN,
    "kimi_k2": _DEEPSEEK,
    "llama": _LLAMA,
    "llama4": _that_sees(_LLAMA4),
    "llama4_text": _LLAMA4,
    "minimax_m2": _MIXTRAL,
    "mistral": _LLAMA,
    "mixtral": _MIXTRAL,
    "mpt": _MPT,
    "nemotron": _LLAMA,
    "olmo": _LLAMA,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _QWEN_MOE,
    "opt": _OPT,
    "phi": _PHI,
    "phi3": _PHI3,
    "qwen2": _LLAMA,
    "qwen2_moe": _QWEN_MOE,
    "qwen3": _LLAMA,
    "qwen3_moe": _QWEN_MOE,
    "seed_oss": _LLAMA,
    "smollm3": _LLAMA,
    "stablelm": _STABLELM,
    "starcoder2": _STARCODER2,
}
"""By `model_type` of config.json."""
