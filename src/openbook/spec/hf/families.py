"""The table of families: a row for each `model_type`, told apart from llama.

A new family is a new row: its keys with their defaults from transformers' configuration, and the terms
by which its modeling code departs from llama's. Only what no term says yet needs code, in the module of
its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from openbook.spec.hf.attention import (
    ATTENTION_BIAS,
    BLOOM_ALIBI,
    CHUNKS,
    FALCON_ALIBI,
    FALCON_KV_HEADS,
    GPT2_SCALES,
    MPT_ALIBI,
    ONE_FOR_EACH,
    ONE_OR_EACH,
    OWN_HEAD_DIM,
    QUERY_SCALAR,
    QUOTIENT,
    ROOT_OR_ONE,
    ROPE_LAYERS,
    SLIDING_LAYERS,
    SLIDING_LAYERS_OR_ALL,
    TEMPERATURE,
    WINDOW_EVERY_SECOND_LAYER,
    WINDOW_EVERYWHERE,
    WINDOW_EVERYWHERE_IF_USED,
    WINDOW_FROM_A_LAYER_ON,
    WINDOW_WITHOUT_ROTATION,
    Heads,
    LatentHeads,
    alternating,
    head_norm,
    root_unless,
)
from openbook.spec.hf.family import (
    FALCON_ARRANGEMENT,
    LAYER,
    LAYER_WITHOUT_BIAS,
    LAYER_WITHOUT_WEIGHTS,
    OPT_ARRANGEMENT,
    OPT_FINAL_NORM,
    OPT_NORM,
    OUT,
    PARALLEL,
    PARALLEL_SHARED,
    PRE,
    ROOT_OF_WIDTH,
    SANDWICH,
    Family,
    learned,
    norm,
)
from openbook.spec.hf.feedforward import (
    AFTER_FIRST_DENSE,
    FOUR_TIMES,
    GEMMA_ACTIVATION,
    LIMITED_GROUPS,
    MOE_LAYERS,
    SPARSE_STEP,
    TOP2_GROUPS,
    WIDTH_OR_FOUR_TIMES,
    Dense,
    Mixture,
    shared_count,
    shared_width,
)
from openbook.spec.hf.rope import (
    INTERLEAVED,
    LONGROPE_ONLY,
    NO_ROPES,
    NTK_ALPHA,
    only_where,
    rotary,
    rotary_by_type,
    rotary_of,
    scaling_scores_too,
)
from openbook.spec.hf.term import (
    ALWAYS,
    Term,
    alike,
    constant,
    either,
    flag,
    maybe_number,
    number,
    reciprocal,
)
from openbook.spec.model import HeadNorm, Norm, Router

_RMS_EPS = {"norm_eps": "rms_norm_eps"}
_LAYER_EPS = {"norm_eps": "layer_norm_eps"}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_act": "activation_function",
    "max_position_embeddings": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

_MLP_BIAS = flag("mlp_bias")
_USE_BIAS = flag("use_bias")
_RENORMALISE = flag("norm_topk_prob")
_HEAD_NORM = head_norm(HeadNorm("rms"))
_WIDE_NORM = head_norm(HeadNorm("rms", over="width"))
_LOGITS_DIVIDED = Term[float](
    lambda c, known: 1 / c.number("logits_scaling", positive=True),
    lambda value, spec: {"logits_scaling": reciprocal(value)},
)

# --- GPT-2 and its kin --------------------------------------------------------------------------

_GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    defaults={
        "vocab_size": 50257, "n_embd": 768, "n_inner": None, "n_layer": 12, "n_head": 12,
        "n_positions": 1024, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True,
    },
    spelling=_GPT2_NAMES,
    aliases=_GPT2_ALIASES,
    norm=LAYER,
    attention=Heads(
        kv_heads=ONE_FOR_EACH, head_dim=QUOTIENT, qkv_bias=ALWAYS, o_bias=ALWAYS, scales=GPT2_SCALES,
        ropes=NO_ROPES,
    ),
    mlp=Dense(gated=False, d_ff=WIDTH_OR_FOUR_TIMES, bias=ALWAYS),
    positions=learned(),
)  # fmt: skip

# --- llama and its kin --------------------------------------------------------------------------

_LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False,
    },
    spelling=_RMS_EPS,
    attention=Heads(qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS),
    mlp=Dense(bias=_MLP_BIAS),
    needs_whole_heads=True,
)  # fmt: skip

_MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    spelling=_RMS_EPS,
    attention=Heads(windows=WINDOW_EVERYWHERE),
)  # fmt: skip

_QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    defaults={
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
    },
    spelling=_RMS_EPS,
    attention=Heads(qkv_bias=ALWAYS, windows=WINDOW_FROM_A_LAYER_ON),
)  # fmt: skip

_QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    defaults={**_QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    spelling=_RMS_EPS,
    attention=Heads(
        head_dim=OWN_HEAD_DIM, qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, norm=_HEAD_NORM,
        windows=WINDOW_FROM_A_LAYER_ON,
    ),
)  # fmt: skip

_SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    defaults={
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "use_sliding_window": False, "sliding_window": None, "layer_types": None, "no_rope_layers": None,
        "no_rope_layer_interval": 4, "attention_bias": False, "mlp_bias": False,
    },
    spelling=_RMS_EPS,
    unread={"max_window_layers": None},
    attention=Heads(
        qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, windows=WINDOW_WITHOUT_ROTATION,
        ropes=only_where(ROPE_LAYERS, rotary(theta=2_000_000.0)),
    ),
    mlp=Dense(bias=_MLP_BIAS),
)  # fmt: skip

_SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    defaults={
        "vocab_size": 155136, "hidden_size": 4096, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 524288, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
    },
    spelling=_RMS_EPS,
    attention=Heads(qkv_bias=ATTENTION_BIAS, o_bias=flag("attention_out_bias")),
    mlp=Dense(bias=_MLP_BIAS),
)  # fmt: skip

# --- mixtures of experts in a llama -------------------------------------------------------------

_MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    spelling=_RMS_EPS,
    aliases={"num_experts": "num_local_experts"},
    attention=Heads(windows=WINDOW_EVERYWHERE, ropes=rotary(theta=1_000_000.0)),
    mlp=Mixture(
        Router("softmax", renormalise=True), experts="num_local_experts", width="intermediate_size"
    ),
)  # fmt: skip

_QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    defaults={
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
        "qkv_bias": True, "decoder_sparse_step": 1, "mlp_only_layers": None, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    spelling=_RMS_EPS,
    attention=Heads(qkv_bias=flag("qkv_bias"), windows=WINDOW_EVERY_SECOND_LAYER),
    mlp=Mixture(
        Router("softmax", renormalise=False), layers=SPARSE_STEP, renormalise=_RENORMALISE,
        shared=shared_width("shared_expert_intermediate_size"), shared_is_gated=True,
    ),
)  # fmt: skip

_QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    defaults={
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
        "decoder_sparse_step": 1, "mlp_only_layers": None, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False,
    },
    spelling=_RMS_EPS,
    aliases={"num_local_experts": "num_experts"},
    unread={"max_window_layers": None},
    attention=Heads(
        qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, norm=_HEAD_NORM, windows=WINDOW_EVERYWHERE_IF_USED
    ),
    mlp=Mixture(Router("softmax", renormalise=False), layers=SPARSE_STEP, renormalise=_RENORMALISE),
)  # fmt: skip

_OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    defaults={
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": None, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "attention_bias": False, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
    },
    spelling=_RMS_EPS,
    aliases={"num_local_experts": "num_experts"},
    only={"clip_qkv": ((), "a cut of queries and keys after their norms")},
    attention=Heads(
        head_dim=QUOTIENT, qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, norm=_WIDE_NORM
    ),
    mlp=Mixture(
        Router("softmax", renormalise=False), width="intermediate_size", renormalise=_RENORMALISE
    ),
)  # fmt: skip

# --- Gemma --------------------------------------------------------------------------------------

_GEMMA_NORM = norm(Norm("rms", offset=1.0))
_CAUSAL = {"use_bidirectional_attention": ((False,), "attention to what follows")}

_GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    defaults={
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "attention_bias": False,
    },
    spelling=_RMS_EPS,
    unread={"hidden_activation": ("gelu_pytorch_tanh", "gelu")},
    only=_CAUSAL,
    norm=_GEMMA_NORM,
    attention=Heads(head_dim=OWN_HEAD_DIM, qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS),
    mlp=Dense(activation=GEMMA_ACTIVATION),
    embed_scale=ROOT_OF_WIDTH,
)  # fmt: skip

_GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    defaults={
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "attention_bias": False, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    spelling={**_RMS_EPS, "hidden_act": "hidden_activation"},
    unread={"hidden_act": None, "sliding_window_size": None},
    only=_CAUSAL,
    needs_whole_heads=True,
    norm=_GEMMA_NORM,
    arrangement=constant(SANDWICH),
    attention=Heads(
        head_dim=OWN_HEAD_DIM, qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, scales=alike(QUERY_SCALAR),
        softcap=maybe_number("attn_logit_softcapping"), windows=alternating(every=2),
    ),
    embed_scale=ROOT_OF_WIDTH,
    head_softcap=maybe_number("final_logit_softcapping"),
)  # fmt: skip

_GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    defaults={
        **_GEMMA2.defaults, "vocab_size": 262208, "max_position_embeddings": 131072,
        "final_logit_softcapping": None, "attn_logit_softcapping": None,
    },
    spelling=_GEMMA2.spelling,
    unread={"hidden_act": None, "attn_logit_softcapping": (), "_sliding_window_pattern": None},
    only=_CAUSAL,
    needs_whole_heads=True,
    norm=_GEMMA_NORM,
    arrangement=constant(SANDWICH),
    attention=Heads(
        head_dim=OWN_HEAD_DIM, qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, scales=alike(QUERY_SCALAR),
        norm=head_norm(HeadNorm("rms", offset=1.0)), windows=alternating(6, "sliding_window_pattern"),
        ropes=rotary_by_type(1_000_000.0, 10_000.0, "rope_local_base_freq"),
    ),
    embed_scale=ROOT_OF_WIDTH,
    head_softcap=maybe_number("final_logit_softcapping"),
)  # fmt: skip

# --- norms after attention and feed-forward -----------------------------------------------------

_OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    defaults={
        "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "attention_bias": False,
    },
    spelling=_RMS_EPS,
    arrangement=constant(OUT),
    attention=Heads(qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, norm=_WIDE_NORM),
)  # fmt: skip

_OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    defaults={**_OLMO2.defaults, "sliding_window": 4096, "layer_types": None},
    spelling=_RMS_EPS,
    arrangement=constant(OUT),
    attention=Heads(
        qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, norm=_WIDE_NORM, windows=alternating(every=4),
        ropes=rotary_by_type(500_000.0, 500_000.0),
    ),
)  # fmt: skip

_EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    defaults={
        "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None,
    },
    spelling=_RMS_EPS,
    arrangement=constant(OUT),
    attention=Heads(
        norm=_HEAD_NORM, windows=alternating(4, "sliding_window_pattern", null_is_full=True),
        ropes=only_where(SLIDING_LAYERS_OR_ALL, rotary()),
    ),
)  # fmt: skip

# --- LayerNorm, parallel residuals, partial rotations -------------------------------------------

_GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    defaults={
        "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
        "num_attention_heads": 64, "hidden_act": "gelu", "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "use_parallel_residual": True,
        "attention_bias": True,
    },
    spelling={**_LAYER_EPS, "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    norm=LAYER,
    arrangement=either("use_parallel_residual", PARALLEL, PRE),
    attention=Heads(
        kv_heads=ONE_FOR_EACH, head_dim=QUOTIENT, qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS,
        ropes=rotary(partial=0.25),
    ),
    mlp=Dense(gated=False, bias=ALWAYS),
)  # fmt: skip

_PHI = Family(
    "phi",
    "PhiForCausalLM",
    defaults={
        "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "gelu_new",
        "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        "qk_layernorm": False,
    },
    spelling=_LAYER_EPS,
    norm=LAYER,
    arrangement=constant(PARALLEL_SHARED),
    attention=Heads(
        head_dim=QUOTIENT, qkv_bias=ALWAYS, o_bias=ALWAYS,
        norm=head_norm(HeadNorm("layer", bias=True), flag("qk_layernorm")), ropes=rotary(partial=0.5),
    ),
    mlp=Dense(gated=False, bias=ALWAYS),
    head_bias=True,
)  # fmt: skip

_PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    defaults={
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu",
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "sliding_window": None,
    },
    spelling=_RMS_EPS,
    unread={
        "attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,), "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    },
    attention=Heads(
        head_dim=QUOTIENT, windows=WINDOW_EVERYWHERE,
        ropes=rotary(partial=1.0, types=LONGROPE_ONLY, original_outside=True),
    ),
)  # fmt: skip

_STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    defaults={
        "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
        "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
    },
    spelling=_LAYER_EPS,
    norm=LAYER,
    arrangement=either("use_parallel_residual", PARALLEL_SHARED, PRE),
    attention=Heads(
        head_dim=QUOTIENT, qkv_bias=flag("use_qkv_bias"),
        norm=head_norm(HeadNorm("layer", over="own"), flag("qk_layernorm")), ropes=rotary(partial=0.25),
    ),
)  # fmt: skip

_STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    defaults={
        "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "tie_word_embeddings": True,
        "sliding_window": None, "use_bias": True,
    },
    spelling={"norm_eps": "norm_epsilon"},
    unread={
        "activation_function": None, "attention_softmax_in_fp32": None, "layer_norm_epsilon": None,
        "mlp_type": ("default",), "norm_type": ("layer_norm",), "scale_attn_weights": (True,),
        "scale_attention_softmax_in_fp32": None,
    },
    norm=LAYER,
    attention=Heads(qkv_bias=_USE_BIAS, o_bias=_USE_BIAS, windows=WINDOW_EVERYWHERE),
    mlp=Dense(gated=False, bias=_USE_BIAS),
)  # fmt: skip

_OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    defaults={
        "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu",
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "attention_bias": False,
        "clip_qkv": None,
    },
    norm=LAYER_WITHOUT_WEIGHTS,
    attention=Heads(qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, clip=maybe_number("clip_qkv")),
)  # fmt: skip

_NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    defaults={
        "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 32,
        "num_attention_heads": 48, "num_key_value_heads": None, "head_dim": None, "hidden_act": "relu2",
        "max_position_embeddings": 4096, "norm_eps": 1e-5, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False,
    },
    norm=norm(Norm("layer", bias=True, offset=1.0)),
    attention=Heads(qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, ropes=rotary(partial=0.5)),
    mlp=Dense(gated=False, bias=_MLP_BIAS),
)  # fmt: skip

_COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    defaults={
        "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
        "num_attention_heads": 64, "num_key_value_heads": None, "hidden_act": "silu",
        "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True,
        "logit_scale": 0.0625, "attention_bias": False, "use_qk_norm": False,
    },
    spelling=_LAYER_EPS,
    unread={"model_max_length": None},
    norm=LAYER_WITHOUT_BIAS,
    arrangement=constant(PARALLEL_SHARED),
    attention=Heads(
        qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS,
        norm=head_norm(HeadNorm("layer", over="own"), flag("use_qk_norm")),
        ropes=rotary(theta=500_000.0, layout=INTERLEAVED),
    ),
    head_scale=number("logit_scale"),
)  # fmt: skip

_COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    defaults={
        "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
        "num_attention_heads": 64, "num_key_value_heads": None, "hidden_act": "silu",
        "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True,
        "logit_scale": 0.0625, "attention_bias": False, "sliding_window": 4096, "layer_types": None,
    },
    spelling=_LAYER_EPS,
    unread={
        "_sliding_window_pattern": None, "layer_switch": None,
        "order_of_interleaved_layers": ("local_attn_first",), "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1, 1.0), "use_embedding_sharing": None,
        "use_gated_activation": (True,), "use_parallel_block": (True,), "use_parallel_embedding": None,
        "use_qk_norm": (False,),
    },
    norm=LAYER_WITHOUT_BIAS,
    arrangement=constant(PARALLEL_SHARED),
    attention=Heads(
        qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, windows=alternating(4, "sliding_window_pattern"),
        ropes=only_where(SLIDING_LAYERS, rotary(layout=INTERLEAVED)),
    ),
    head_scale=number("logit_scale"),
)  # fmt: skip

_GLM = Family(
    "glm",
    "GlmForCausalLM",
    defaults={
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "tie_word_embeddings": False,
        "attention_bias": True,
    },
    spelling=_RMS_EPS,
    attention=Heads(
        head_dim=OWN_HEAD_DIM, qkv_bias=ATTENTION_BIAS, ropes=rotary(partial=0.5, layout=INTERLEAVED)
    ),
)  # fmt: skip

_GLM4 = replace(
    _GLM, model_type="glm4", architecture="Glm4ForCausalLM", arrangement=constant(SANDWICH)
)  # fmt: skip

_GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    },
    spelling=_RMS_EPS,
    attention=Heads(
        qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, scales=alike(number("attention_multiplier"))
    ),
    mlp=Dense(bias=_MLP_BIAS),
    residual_scale=number("residual_multiplier"),
    embed_scale=number("embedding_multiplier"),
    head_scale=_LOGITS_DIVIDED,
)  # fmt: skip

_GRANITEMOE = replace(
    _GRANITE,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    defaults={
        **{key: value for key, value in _GRANITE.defaults.items() if key != "mlp_bias"},
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    mlp=Mixture(
        Router("chosen_softmax", renormalise=False), experts="num_local_experts", width="intermediate_size",

    ),
)  # fmt: skip

_ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    defaults={
        "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "use_bias": False,
    },
    spelling=_RMS_EPS,
    attention=Heads(
        qkv_bias=_USE_BIAS, o_bias=_USE_BIAS, ropes=rotary(theta=500_000.0, layout=INTERLEAVED)
    ),
    mlp=Dense(bias=_USE_BIAS),
)  # fmt: skip

_HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    defaults={
        "vocab_size": 290943, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "attention_bias": False,
    },
    spelling=_RMS_EPS,
    unread={
        "add_classification_head": (False,), "attention_head_dim": None, "cla_share_factor": None,
        "class_num": None, "dense_list": None, "enable_lm_head_fp32": None, "eod_token_id": None,
        "im_end_id": None, "im_newline_id": None, "im_start_id": None, "image_token_id": None,
        "mask_init_id": None, "mlp_bias": (False,), "norm_type": ("rms",), "num_media_embeds": None,
        "org_vocab_size": None, "pad_id": None, "pool_type": None, "position_embedding_xdrope": (False,),
        "skip_cls_token": None, "text_end_id": None, "text_start_id": None, "use_cla": (False,),
        "use_qk_norm": (True,), "use_rotary_pos_emb": (True,), "vit_path": None,
    },
    attention=Heads(
        qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS,
        norm=head_norm(HeadNorm("rms", after_rope=True)), ropes=rotary(types=NTK_ALPHA),
    ),
)  # fmt: skip

# --- DeepSeek and its kin -----------------------------------------------------------------------

_DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    defaults={
        "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": False, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": None, "moe_intermediate_size": 1407, "n_group": None,
        "topk_group": None, "topk_method": "greedy", "routed_scaling_factor": 1.0,
    },
    spelling=_RMS_EPS,
    aliases={"num_experts": "n_routed_experts"},
    unread={
        "qk_head_dim": None, "norm_topk_prob": (False,), "moe_layer_freq": (1,),
        "scoring_func": ("softmax",),
    },
    only={"mlp_bias": ((False,), "biases of the shared experts that the others do not have")},
    needs_whole_heads=True,
    attention=LatentHeads(ropes=scaling_scores_too(rotary(layout=INTERLEAVED))),
    mlp=Mixture(
        Router("softmax", renormalise=False), experts="n_routed_experts", layers=AFTER_FIRST_DENSE,
        scale=number("routed_scaling_factor"), groups=LIMITED_GROUPS,
        shared=shared_count("n_shared_experts", "moe_intermediate_size"),
    ),
)  # fmt: skip

_SIGMOID_ROUTING = Mixture(
    Router("sigmoid", renormalise=True, correction=True, sum_eps=1e-20), experts="n_routed_experts",
    layers=AFTER_FIRST_DENSE, renormalise=_RENORMALISE, scale=number("routed_scaling_factor"),
    groups=TOP2_GROUPS, shared=shared_count("n_shared_experts", "moe_intermediate_size"),
)  # fmt: skip

_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    defaults={
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": False, "rope_interleave": True, "first_k_dense_replace": 3, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    spelling=_RMS_EPS,
    aliases={"num_local_experts": "n_routed_experts"},
    unread={
        "qk_head_dim": None, "moe_layer_freq": (1,), "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    attention=LatentHeads(
        ropes=scaling_scores_too(rotary(layout=either("rope_interleave", "interleaved", "half")))
    ),
    mlp=_SIGMOID_ROUTING,
)  # fmt: skip

_KIMI_K2 = replace(
    _DEEPSEEK_V3, model_type="kimi_k2", defaults={**_DEEPSEEK_V3.defaults, "num_key_value_heads": None}
)
"""Not in transformers, where its published code is DeepSeek-V3's own."""

_GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    defaults={
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
    spelling=_RMS_EPS,
    aliases={"num_local_experts": "n_routed_experts"},
    unread={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    attention=Heads(
        qkv_bias=ATTENTION_BIAS, norm=head_norm(HeadNorm("rms"), flag("use_qk_norm")),
        ropes=rotary(partial=0.5),
    ),
    mlp=_SIGMOID_ROUTING,
)  # fmt: skip

_MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    defaults={
        "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "num_local_experts": 256, "num_experts_per_tok": 8,
    },
    spelling=_RMS_EPS,
    aliases={"num_experts": "num_local_experts"},
    unread={
        "attn_type_list": None, "attn_window_size": (), "layernorm_full_attention_beta": (1, 1.0),
        "layernorm_linear_attention_beta": None, "layernorm_mlp_beta": (1, 1.0),
        "mlp_intermediate_size": None, "mtp_transformer_layers": None, "num_mtp_modules": None,
        "qk_norm_type": ("per_layer",), "scoring_func": ("sigmoid",), "shared_intermediate_size": (0,),
        "shared_moe_mode": None, "use_mtp": None, "use_qk_norm": (True,), "use_routing_bias": (True,),
        "swa_rope_theta": None, "max_model_len": None,
    },
    attention=Heads(
        head_dim=OWN_HEAD_DIM, norm=_WIDE_NORM,
        ropes=rotary(theta=5_000_000.0, partial=1.0, dim_word="rotary_dim"),
    ),
    mlp=Mixture(
        Router("sigmoid", renormalise=True, correction=True), experts="num_local_experts",
        width="intermediate_size",
    ),
)  # fmt: skip

# --- gpt-oss and Llama 4 ------------------------------------------------------------------------

_GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    defaults={
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "sliding_window": 128, "layer_types": None, "attention_bias": True, "num_local_experts": 128,
        "num_experts_per_tok": 4, "swiglu_limit": 7.0,
    },
    spelling=_RMS_EPS,
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    unread={"hidden_act": ("silu",), "initial_context_length": None},
    only={"swiglu_alpha": ((1.702,), "another gate")},
    attention=Heads(
        qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, sinks=True, windows=alternating(every=2),
        ropes=rotary(
            theta=150_000.0,
            absent={
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
    ),
    mlp=Mixture(
        Router("chosen_softmax", renormalise=False, bias=True), experts="num_local_experts",
        width="intermediate_size", expert_bias=True,
        dense=Dense(activation=constant("gelu_quick")), clamp=maybe_number("swiglu_limit"), up_offset=1.0,
    ),
)  # fmt: skip

_LLAMA4 = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    defaults={
        "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_experts_per_tok": 1,
        "num_local_experts": 16, "moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
        "layer_types": None, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
        "attention_bias": False,
    },
    # What the words call the width of a plain layer is that of an expert here.
    spelling={**_RMS_EPS, "intermediate_size": "intermediate_size_mlp", "expert_width": "intermediate_size"},
    unread={"for_llm_compressor": None},
    attention=Heads(
        qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, windows=CHUNKS, temperature=TEMPERATURE,
        norm=head_norm(HeadNorm("rms", weight=False, after_rope=True), flag("use_qk_norm")),
        ropes=only_where(ROPE_LAYERS, rotary(theta=500_000.0, layout=INTERLEAVED)),
    ),
    mlp=Mixture(
        Router("sigmoid", renormalise=False, on_input=True), experts="num_local_experts",
        width="expert_width", layers=MOE_LAYERS,
        shared=shared_width("expert_width"),
    ),
)  # fmt: skip

# --- older models, and ALiBi --------------------------------------------------------------------

_GPT_BIGCODE = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    defaults={
        "vocab_size": 50257, "n_embd": 768, "n_inner": None, "n_layer": 12, "n_head": 12,
        "n_positions": 1024, "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True, "multi_query": True, "tie_word_embeddings": True,
    },
    spelling=_GPT2_NAMES,
    aliases=_GPT2_ALIASES,
    unread={
        "attention_softmax_in_fp32": None, "scale_attention_softmax_in_fp32": None,
        "num_key_value_heads": None, "inference_runner": None, "max_batch_size": None,
        "max_sequence_length": None, "pad_key_length": None, "pre_allocate_kv_cache": None,
        "validate_runner_input": None,
    },
    norm=LAYER,
    attention=Heads(
        kv_heads=ONE_OR_EACH, head_dim=QUOTIENT, qkv_bias=ALWAYS, o_bias=ALWAYS, scales=alike(ROOT_OR_ONE),
        ropes=NO_ROPES,
    ),
    mlp=Dense(gated=False, d_ff=WIDTH_OR_FOUR_TIMES, bias=ALWAYS),
    positions=learned(),
)  # fmt: skip

_GPTJ = Family(
    "gptj",
    "GPTJForCausalLM",
    defaults={
        "vocab_size": 50400, "n_embd": 4096, "n_inner": None, "n_layer": 28, "n_head": 16,
        "n_positions": 2048, "rotary_dim": 64, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    },
    spelling=_GPT2_NAMES,
    aliases=_GPT2_ALIASES,
    unread={"rotary": (True,), "scale_attn_weights": (True,)},
    norm=LAYER,
    arrangement=constant(PARALLEL_SHARED),
    attention=Heads(
        kv_heads=ONE_FOR_EACH, head_dim=QUOTIENT, ropes=rotary_of("rotary_dim", "interleaved")
    ),
    mlp=Dense(gated=False, d_ff=WIDTH_OR_FOUR_TIMES, bias=ALWAYS),
    head_bias=True,
)  # fmt: skip

_OPT = Family(
    "opt",
    "OPTForCausalLM",
    defaults={
        "vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "activation_function": "relu", "max_position_embeddings": 2048,
        "do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True,
        "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
    },
    spelling={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    same=("word_embed_proj_dim",),
    norm=OPT_NORM,
    arrangement=OPT_ARRANGEMENT,
    attention=Heads(
        kv_heads=ONE_FOR_EACH, head_dim=QUOTIENT, qkv_bias=flag("enable_bias"), o_bias=flag("enable_bias"),
        ropes=NO_ROPES,
    ),
    mlp=Dense(gated=False, bias=flag("enable_bias")),
    positions=learned(offset=2),
    final_norm=OPT_FINAL_NORM,
)  # fmt: skip

_FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    defaults={
        "vocab_size": 65024, "hidden_size": 4544, "ffn_hidden_size": None, "num_hidden_layers": 32,
        "num_attention_heads": 71, "num_kv_heads": None, "num_ln_in_parallel_attn": None,
        "layer_norm_epsilon": 1e-5, "activation": "gelu", "max_position_embeddings": 2048, "alibi": False,
        "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False,
        "tie_word_embeddings": True,
    },
    spelling={
        "intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads",
        "norm_eps": "layer_norm_epsilon", "hidden_act": "activation",
    },
    aliases={"n_embed": "hidden_size"},
    unread={"apply_residual_connection_post_layernorm": (False,)},
    norm=LAYER,
    arrangement=FALCON_ARRANGEMENT,
    attention=Heads(
        kv_heads=FALCON_KV_HEADS, head_dim=QUOTIENT, qkv_bias=flag("bias"), o_bias=flag("bias"),
        alibi=FALCON_ALIBI,
    ),
    mlp=Dense(gated=False, d_ff=WIDTH_OR_FOUR_TIMES, bias=flag("bias")),
)  # fmt: skip

_BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    defaults={
        "vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    spelling={
        "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "norm_eps": "layer_norm_epsilon"
    },
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    unread={
        "slow_but_exact": None, "n_inner": (),
        "attention_softmax_in_fp32": None, "bias_dropout_fusion": None, "masked_softmax_fusion": None,
        "offset_alibi": None, "skip_bias_add": None, "skip_bias_add_qkv": None,
        "embedding_layernorm": (True,), "position": ("alibi",),
    },
    only={
        "apply_residual_connection_post_layernorm": ((False,), "residuals that are taken after the norm")
    },
    norm=LAYER,
    attention=Heads(
        kv_heads=ONE_FOR_EACH, head_dim=QUOTIENT, qkv_bias=ALWAYS, o_bias=ALWAYS, ropes=NO_ROPES,
        alibi=BLOOM_ALIBI,
    ),
    mlp=Dense(gated=False, d_ff=FOUR_TIMES, activation=constant("gelu_tanh"), bias=ALWAYS),
    embed_norm=True,
    max_positions=Term(
        lambda c, known: c.maybe_integer("seq_length") or 2048, lambda value, spec: {"seq_length": value}
    ),
)  # fmt: skip

_MPT = Family(
    "mpt",
    "MptForCausalLM",
    defaults={
        "vocab_size": 50368, "d_model": 2048, "n_layers": 24, "n_heads": 16, "max_seq_len": 2048,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "attn_config.clip_qkv": None,
        "attn_config.softmax_scale": None,
    },
    spelling={
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len", "norm_eps": "layer_norm_epsilon",
    },
    aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    objects=("attn_config",),
    unread={
        "expansion_ratio": (4,), "learned_pos_emb": None, "no_bias": (True,), "logit_scale": (),
        "embedding_fraction": (1, 1.0), "norm_type": ("low_precision_layernorm", "layernorm"),
        "emb_pdrop": None, "init_device": None, "init_config": None, "verbose": None,
        "attn_config.alibi": (True,), "attn_config.alibi_bias_max": (8,), "attn_config.attn_impl": None,
        "attn_config.attn_pdrop": None, "attn_config.attn_type": ("multihead_attention",),
        "attn_config.attn_uses_sequence_id": (False,), "attn_config.prefix_lm": (False,),
        "attn_config.qk_ln": (False,), "attn_config.model_type": None,
    },
    norm=LAYER_WITHOUT_BIAS,
    attention=Heads(
        kv_heads=ONE_FOR_EACH, head_dim=QUOTIENT, clip=maybe_number("attn_config.clip_qkv"),
        scales=alike(root_unless("attn_config.softmax_scale")), ropes=NO_ROPES, alibi=MPT_ALIBI,
    ),
    mlp=Dense(gated=False, d_ff=FOUR_TIMES, activation=constant("gelu")),
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        _GPT2, _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _SMOLLM3, _SEED_OSS, _MIXTRAL, _QWEN2_MOE, _QWEN3_MOE,
        _OLMOE, _GEMMA, _GEMMA2, _GEMMA3, _OLMO2, _OLMO3, _EXAONE4, _GPT_NEOX, _PHI, _PHI3, _STABLELM,
        _STARCODER2, _OLMO, _NEMOTRON, _COHERE, _COHERE2, _GLM, _GLM4, _GRANITE, _GRANITEMOE, _ERNIE4_5,
        _HUNYUAN, _DEEPSEEK_V2, _DEEPSEEK_V3, _KIMI_K2, _GLM4_MOE, _MINIMAX_M2, _GPT_OSS, _LLAMA4,
        _GPT_BIGCODE, _GPTJ, _OPT, _FALCON, _BLOOM, _MPT,
    )
}  # fmt: skip
"""By `model_type`. `to_config` tries them in this order."""
