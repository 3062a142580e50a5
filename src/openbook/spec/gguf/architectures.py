"""The table of architectures: a row for each `general.architecture`, after llama.cpp's `src/models/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from openbook.spec.gguf.architecture import ALL_BIASES, POST, SANDWICH, Architecture, Mixture, Windows
from openbook.spec.model import HeadNorm, Norm, QueryTemperature, Router
from openbook.spec.reader import Reader

_QKV = ("q", "k", "v")
_LAYER = Norm("layer", bias=True)
_LAYER_WITHOUT_BIAS = Norm("layer")
_RAISED = Norm("rms", offset=1.0)
_STATED = frozenset({"score", "renormalise", "scale", "groups", "correction"})


def _scale_of_largest(layers: int):
    """K ** -0.5; of the family's largest, which llama.cpp knows by its layers, (D / H) ** -0.5."""

    def scale(c: Reader, n_heads: int, head_dim: int) -> float:
        if c.integer("block_count") == layers:
            return (c.integer("embedding_length") // n_heads) ** -0.5
        return head_dim**-0.5

    return scale


_GPT2 = Architecture(
    "gpt2",
    "gelu_tanh",
    gated=False,
    norm=_LAYER,
    biases=ALL_BIASES,
    positions="learned",
    fills_width=True,
)

_LLAMA = Architecture(
    "llama",
    may_bias=ALL_BIASES,
    turns_whole_heads=True,
    mixture=Mixture(Router("softmax", renormalise=True), width="feed_forward_length"),
)

_QWEN2 = Architecture("qwen2", biases=_QKV, turns_whole_heads=True, fills_width=True)
_QWEN3 = Architecture("qwen3", qk_norm=HeadNorm("rms"), turns_whole_heads=True)

_GEMMA = Architecture("gemma", "gelu_tanh", norm=_RAISED, embed_scaled=True, tied=True)

_PHI2 = Architecture(
    "phi2",
    "gelu_tanh",
    gated=False,
    norm=_LAYER,
    places=("attn_norm",),
    residual="parallel_shared",
    biases=ALL_BIASES,
    fills_width=True,
    head_bias=True,
    untied=True,
)

_OLMO2 = Architecture(
    "olmo2",
    places=POST,
    qk_norm=HeadNorm("rms", over="width"),
    windows=Windows(full_every=4, rope="unscaled"),
    turns_whole_heads=True,
    fills_width=True,
    untied=True,
)

_COMMAND_R = Architecture(
    "command-r",
    norm=_LAYER_WITHOUT_BIAS,
    places=("attn_norm",),
    residual="parallel_shared",
    may_bias=_QKV,
    layout="interleaved",
    qk_norm=HeadNorm("layer", over="own"),
    qk_norm_shown=True,
    fills_width=True,
    keys=frozenset({"logit_scale"}),
    tied=True,
)

_GRANITE = Architecture(
    "granite",
    may_bias=ALL_BIASES,
    turns_whole_heads=True,
    keys=frozenset({"embedding_scale", "residual_scale", "attention.scale", "logit_scale"}),
    logit_scale_divides=True,
)

_DEEPSEEK2 = Architecture(
    "deepseek2",
    latent=True,
    layout="interleaved",
    mixture=Mixture(
        Router("softmax", renormalise=False, sum_eps=1e-20), stated=_STATED, shared="count", dense="leading"
    ),
)

_BLOOM = Architecture(
    "bloom",
    "gelu_tanh",
    gated=False,
    norm=_LAYER,
    biases=ALL_BIASES,
    positions="alibi",
    fills_width=True,
    embed_normed=True,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    arch.name: arch
    for arch in (
        _GPT2,
        _QWEN3,
        _QWEN2,
        _LLAMA,
        replace(_GEMMA, name="gemma"),
        replace(
            _GEMMA,
            name="gemma2",
            places=SANDWICH,
            scale=_scale_of_largest(46),
            windows=Windows(full_every=2, width=4096),
            attn_softcap=50.0,
            final_softcap=30.0,
            keys=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
        ),
        replace(
            _GEMMA,
            name="gemma3",
            places=SANDWICH,
            qk_norm=HeadNorm("rms", offset=1.0),
            scale=_scale_of_largest(62),
            windows=Windows(full_every=6, rope="own"),
            keys=frozenset({"final_logit_softcapping"}),
            tied=False,
        ),
        replace(
            _QWEN3,
            name="qwen3moe",
            mixture=Mixture(Router("softmax", renormalise=True)),
        ),
        Architecture(
            "qwen2moe",
            may_bias=_QKV,
            turns_whole_heads=True,
            fills_width=True,
            mixture=Mixture(Router("softmax", renormalise=False), shared="length", shared_gated=True),
            untied=True,
        ),
        Architecture(
            "gpt-oss",
            biases=("q", "k", "v", "o"),
            sinks=True,
            windows=Windows(full_every=2),
            truncated_yarn=False,
            mixture=Mixture(
                Router("chosen_softmax", renormalise=False, bias=True),
                biases=True,
                activation="gelu_quick",
                clamp=7.0,
                up_offset=1.0,
            ),
            untied=True,
        ),
        _DEEPSEEK2,
        Architecture(
            "glm4moe",
            may_bias=_QKV,
            qk_norm=HeadNorm("rms"),
            qk_norm_shown=True,
            mixture=Mixture(
                Router("sigmoid", renormalise=False, correction=True, sum_eps=1e-20),
                stated=_STATED - {"correction"},
                shared="count",
                dense="leading",
            ),
        ),
        Architecture(
            "minimax-m2",
            qk_norm=HeadNorm("rms", over="width"),
            mixture=Mixture(
                Router("sigmoid", renormalise=True, correction=True), stated=frozenset({"score"})
            ),
            untied=True,
        ),
        Architecture(
            "llama4",
            may_bias=("q", "k", "v", "o"),
            layout="interleaved",
            turns_whole_heads=True,
            qk_norm=HeadNorm("rms", weight=False, after_rope=True),
            windows=Windows(full_every=4, chunk=8192),
            still_every=4,
            temperature=QueryTemperature(scale=0.1, interval=8192),
            mixture=Mixture(
                Router("sigmoid", renormalise=False, on_input=True), shared="one", dense="interleaved"
            ),
        ),
        Architecture(
            "phi3",
            windows=Windows(),
            fills_width=True,
        ),
        _PHI2,
        _OLMO2,
        Architecture(
            "olmo",
            norm=Norm("layer", weight=False),
            turns_whole_heads=True,
            fills_width=True,
            keys=frozenset({"attention.clamp_kqv"}),
        ),
        Architecture(
            "olmoe",
            qk_norm=HeadNorm("rms", over="width"),
            turns_whole_heads=True,
            fills_width=True,
            equal_heads=True,
            mixture=Mixture(Router("softmax", renormalise=False), width="feed_forward_length"),
            untied=True,
        ),
        _GRANITE,
        replace(
            _GRANITE,
            name="granitemoe",
            may_bias=("q", "k", "v", "o"),
            mixture=Mixture(
                Router("chosen_softmax", renormalise=False), width="feed_forward_length", shared="length"
            ),
        ),
        Architecture("smollm3", may_bias=ALL_BIASES, turns_whole_heads=True, still_every=4),
        Architecture("glm4", may_bias=_QKV, layout="interleaved", places=SANDWICH),
        Architecture("chatglm", may_bias=_QKV, layout="interleaved", fills_width=True),
        Architecture("seed_oss", may_bias=_QKV, turns_whole_heads=True),
        Architecture("ernie4_5", may_bias=_QKV, layout="interleaved", turns_whole_heads=True),
        Architecture(
            "exaone4",
            places=POST,
            qk_norm=HeadNorm("rms"),
            windows=Windows(full_every=4, full_rope=False),
            turns_whole_heads=True,
            fills_width=True,
        ),
        Architecture("hunyuan-dense", qk_norm=HeadNorm("rms", after_rope=True), turns_whole_heads=True),
        _COMMAND_R,
        replace(
            _COMMAND_R,
            name="cohere2",
            may_bias=(),
            qk_norm=None,
            windows=Windows(full_every=4, full_rope=False),
        ),
        Architecture(
            "stablelm",
            norm=_LAYER,
            choose_residual="by_mlp_norm",
            may_bias=_QKV,
            qk_norm=HeadNorm("layer", over="own"),
            qk_norm_shown=True,
            fills_width=True,
            untied=True,
        ),
        Architecture(
            "nemotron",
            "relu2",
            gated=False,
            norm=replace(_LAYER, offset=1.0),
            may_bias=ALL_BIASES,
            fills_width=True,
            untied=True,
        ),
        Architecture(
            "starcoder2",
            "gelu_tanh",
            gated=False,
            norm=_LAYER,
            biases=ALL_BIASES,
            turns_whole_heads=True,
            fills_width=True,
        ),
        replace(_GPT2, name="starcoder"),
        Architecture(
            "gptneox",
            "gelu",
            gated=False,
            norm=_LAYER,
            choose_residual="by_key",
            biases=ALL_BIASES,
            fills_width=True,
            untied=True,
        ),
        Architecture(
            "falcon",
            "gelu",
            gated=False,
            norm=_LAYER,
            choose_residual="by_second_norm",
            turns_whole_heads=True,
            fills_width=True,
        ),
        _BLOOM,
        replace(
            _BLOOM,
            name="mpt",
            activation="gelu",
            norm=_LAYER_WITHOUT_BIAS,
            biases=(),
            embed_normed=False,
            keys=frozenset({"attention.clamp_kqv", "attention.max_alibi_bias"}),
        ),
    )
}
"""By `general.architecture`. `to_metadata` tries them in this order; mistral and smollm are llama.

Activations are the models' own: for `gelu`, llama.cpp computes its approximation by tanh.
"""

OF_MODEL_TYPE: Mapping[str, str] = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "phi": "phi2",
    "olmo3": "olmo2",
    "gpt_neox": "gptneox",
    "gpt_bigcode": "starcoder",
    "gpt_oss": "gpt-oss",
    "glm": "chatglm",
    "glm4_moe": "glm4moe",
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "kimi_k2": "deepseek2",
    "minimax_m2": "minimax-m2",
    "llama4_text": "llama4",
    "hunyuan_v1_dense": "hunyuan-dense",
}
"""Hugging Face's `model_type` → architecture, where they are not the same word."""
