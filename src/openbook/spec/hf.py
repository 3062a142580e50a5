"""Hugging Face's config.json ⇄ spec.

A model type is a row of `FAMILIES`: the keys its config has with the defaults that transformers gives
them, and what the type itself fixes (norms, biases, windows). One reader and one writer serve all
rows. Meanings and defaults are those of transformers 5.24, against which the tests hold them.

Nothing of a config is ever executed: `auto_map` names code, and is ignored like any other note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from openbook.spec.model import (
    MAX_LAYERS,
    Activation,
    Attention,
    Block,
    DynamicScaling,
    FrequencyDivisors,
    Head,
    HeadNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    RopeScaling,
    SpecError,
    YarnScaling,
)
from openbook.spec.reader import Reader, UnsupportedError, show
from openbook.spec.writer import Written, express

__all__ = ["FAMILIES", "UnsupportedError", "from_config", "to_config"]


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json, read as a dict, describes.

    Absent keys take transformers' own defaults. Raises `UnsupportedError` for a model type or feature
    that is not supported, and `SpecError` for a value that cannot be or a key that nobody knows.
    """
    family = _family_of(config)
    reader = Reader({**family.defaults, **config}, "config", family.spelling)
    reader.ignore(_IRRELEVANT)
    for key, (allowed, why) in _ONLY.items():
        reader.only(key, allowed, why)
    spec = _read(family, reader)
    reader.finish(
        f"model type {family.model_type!r} has no such key: remove it if the model does not depend on it"
    )
    return spec


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """A config.json from which transformers builds the same model, under the first family that can.

    It holds what shapes the model; dtype and token ids are the caller's to add. Raises
    `UnsupportedError`, naming the feature, for a model that no supported family can express.
    """

    def way(family: Family) -> Callable[[], Written[dict[str, Any]]]:
        def write() -> Written[dict[str, Any]]:
            config = _write(family, spec)
            return config, from_config(config)

        return write

    return express(spec, {name: way(family) for name, family in FAMILIES.items()}, "Hugging Face model type")


def _family_of(config: Mapping[str, Any]) -> Family:
    name = Reader(config, "config").text("model_type")
    if name not in FAMILIES:
        raise UnsupportedError(
            f"config.model_type {show(name)} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


# --- keys that do not shape the model -----------------------------------------------------------

_IRRELEVANT = frozenset({
    # The file and the program that wrote it.
    "model_type", "architectures", "auto_map", "transformers_version", "transformers.js_config",
    "_name_or_path", "name_or_path", "_commit_hash", "_from_model_config", "is_llama_config",
    "finetuning_task", "unsloth_version", "unsloth_fixed", "model_name", "language", "license",
    # How to run it, not what it is. Weights carry their own dtype; the loader decides what to use.
    "torch_dtype", "dtype", "use_cache", "return_dict", "output_attentions", "output_hidden_states",
    "use_return_dict", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "_flash_attn_2_enabled", "experts_implementation", "torchscript", "use_bfloat16", "pretraining_tp",
    "tp_degree", "gradient_checkpointing", "use_flash_attn", "use_cache_quantization",
    "chunk_size_feed_forward", "reorder_and_upcast_attn", "is_decoder", "tie_encoder_decoder",
    "tf_legacy_loss", "return_dict_in_generate", "output_scores",
    # Training: dropout is off when a model is read or run, and initialisation is over.
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "initializer_range",
    # The tokenizer's ids and texts.
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "mask_token_id",
    "cls_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "prefix",
    "tokenizer_class",
    # Other heads than the language model's.
    "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    # How to sample, once kept in this file.
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "temperature", "top_k", "top_p", "min_p", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty",
    "length_penalty", "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "exponential_decay_length_penalty",
    "remove_invalid_values", "suppress_tokens", "begin_suppress_tokens",
    # GPT-2's second word for n_positions, which transformers does not read.
    "n_ctx",
})  # fmt: skip

_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "quantization_config": ((), "use the unquantised checkpoint, or a GGUF file"),
    "is_encoder_decoder": ((False,), "Openbook holds decoder-only models"),
    "add_cross_attention": ((False,), "Openbook holds decoder-only models"),
    "partial_rotary_factor": ((1, 1.0), "these families rotate the whole head"),
    "rope_interleaved": ((False,), "these families rotate halves"),
    "use_mrope": ((False,), "these families have one position per token"),
    "per_layer_config": (({},), "write the layers out as a spec"),
    "pruned_heads": (({},), "every layer keeps all its heads"),
}
"""Keys that do shape the model: the values under which they change nothing, and why no others."""

# --- the table of families ----------------------------------------------------------------------

Switch = bool | str
"""What a family fixes, or the key of the config that decides it."""


@dataclass(frozen=True)
class Windows:
    """How a family says which layers slide: read(config, n_layers) → a window or None for each."""

    read: Callable[[Reader, int], list[int | None]]
    write: Callable[[Sequence[int | None]], dict[str, Any]]


def _read_window_everywhere(c: Reader, n_layers: int) -> list[int | None]:
    return [c.maybe_integer("sliding_window")] * n_layers


def _read_windows_by_layer(c: Reader, n_layers: int) -> list[int | None]:
    """Layers from `max_window_layers` on slide, unless `layer_types` says otherwise."""
    window = None
    if c.flag("use_sliding_window"):
        window = c.maybe_integer("sliding_window")
    c.ignore(["sliding_window"])
    first = c.integer("max_window_layers", least=0)
    types = c.maybe_items(
        "layer_types", n_layers, _LAYER_TYPES.__contains__, "of " + " | ".join(_LAYER_TYPES)
    )
    if types is None:
        return [window if i >= first else None for i in range(n_layers)]
    if window is None and _SLIDING in types:
        c.fail(
            "layer_types", "has sliding layers: set use_sliding_window to true and sliding_window to a width"
        )
    return [window if kind == _SLIDING else None for kind in types]


def _write_windows_by_layer(windows: Sequence[int | None]) -> dict[str, Any]:
    sliding = [i for i, window in enumerate(windows) if window is not None]
    if not sliding:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": len(windows)}
    return {
        "use_sliding_window": True,
        "sliding_window": windows[sliding[0]],
        "max_window_layers": sliding[0],
        "layer_types": [_FULL if window is None else _SLIDING for window in windows],
    }


_FULL, _SLIDING = _LAYER_TYPES = ("full_attention", "sliding_attention")

_NO_WINDOWS = Windows(lambda c, n_layers: [None] * n_layers, lambda windows: {})
_WINDOW_EVERYWHERE = Windows(_read_window_everywhere, lambda windows: {"sliding_window": windows[0]})
_WINDOWS_BY_LAYER = Windows(_read_windows_by_layer, _write_windows_by_layer)


@dataclass(frozen=True)
class Family:
    """One model type.

    `defaults` are its config's keys with transformers' defaults; a key not among them does not exist
    for this type. `spelling` translates the words that `_read` uses. `rotary` families turn q and k;
    the others add learned positions to the embedding. `needs_whole_heads`: transformers refuses a
    width that is not a multiple of the number of heads, even where `head_dim` is given.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    spelling: Mapping[str, str] = field(default_factory=dict)
    norm: Literal["layer", "rms"] = "rms"
    rotary: bool = True
    gated: bool = True
    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: bool = False
    windows: Windows = _NO_WINDOWS
    needs_whole_heads: bool = False

    def has(self, word: str) -> bool:
        return self.spelling.get(word, word) in self.defaults


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
    windows=_WINDOW_EVERYWHERE,
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
    windows=_WINDOWS_BY_LAYER,
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

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
"""transformers' names; of several for one function, the first is written."""

# --- reading ------------------------------------------------------------------------------------


def _read(family: Family, c: Reader) -> ModelSpec:
    """The spec of any family. Every key of `family.defaults` is asked for here or further down."""
    d_model = c.integer("hidden_size")
    n_layers = c.integer("num_hidden_layers", most=MAX_LAYERS)
    max_positions = c.integer("max_position_embeddings")
    norm = Norm(family.norm, eps=c.number("norm_eps"), bias=family.norm == "layer")

    attn = _read_attention(family, c, d_model, norm)
    mlp_bias = _read_switch(c, family.mlp_bias)
    mlp = Mlp(
        d_ff=_read_size(family, c, "intermediate_size") or 4 * d_model,
        activation=c.choice("hidden_act", _ACTIVATIONS),
        gated=family.gated,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
    )
    ropes = _read_ropes(c, attn.head_dim, max_positions) if family.rotary else dict.fromkeys(_LAYER_TYPES)
    windows = family.windows.read(c, n_layers)
    scales = _read_scales(family, c, attn.head_dim, n_layers)

    blocks: dict[tuple[int | None, float], Block] = {}
    for window, scale in dict.fromkeys(zip(windows, scales, strict=True)):
        rope = ropes[_FULL if window is None else _SLIDING]
        own = replace(attn, window=window, scale=scale, rope=rope)
        blocks[window, scale] = Block(attn=own, mlp=mlp, attn_norm=norm, mlp_norm=norm)

    return ModelSpec(
        vocab_size=c.integer("vocab_size"),
        d_model=d_model,
        max_positions=max_positions,
        layers=tuple(blocks[kind] for kind in zip(windows, scales, strict=True)),
        head=Head(tied=c.flag("tie_word_embeddings")),
        final_norm=norm,
        positions=None if family.rotary else Learned(max_positions),
    )


def _read_attention(family: Family, c: Reader, d_model: int, norm: Norm) -> Attention:
    """The attention that all layers share, before windows, scales and rotations differ."""
    n_heads = c.integer("num_attention_heads")
    n_kv_heads = (
        c.maybe_integer("num_key_value_heads") if family.has("num_key_value_heads") else None
    ) or n_heads
    if n_heads % n_kv_heads:
        c.fail(
            "num_key_value_heads",
            f"must divide {c.key('num_attention_heads')} = {n_heads}, found {n_kv_heads}",
        )

    head_dim = _read_size(family, c, "head_dim") if family.has("head_dim") else None
    if head_dim is None:
        if d_model % n_heads:
            advice = ", or head_dim given" if family.has("head_dim") else ""
            c.fail(
                "hidden_size",
                f"must be a multiple of {c.key('num_attention_heads')} = {n_heads}{advice}, found {d_model}",
            )
        head_dim = d_model // n_heads
    if family.rotary and head_dim % 2:
        c.fail("head_dim", f"must be even, since it is rotated in pairs, found {head_dim}")

    qkv_bias = _read_switch(c, family.qkv_bias)
    head_norm = HeadNorm(norm.kind, norm.eps)
    return Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        q_bias=qkv_bias,
        k_bias=qkv_bias,
        v_bias=qkv_bias,
        o_bias=_read_switch(c, family.o_bias),
        q_norm=head_norm if family.qk_norm else None,
        k_norm=head_norm if family.qk_norm else None,
    )


def _read_size(family: Family, c: Reader, word: str) -> int | None:
    """A size that may be null, which leaves it to be worked out, only if that is the family's default."""
    return c.maybe_integer(word) if family.defaults[c.key(word)] is None else c.integer(word)


def _read_switch(c: Reader, switch: Switch) -> bool:
    return switch if isinstance(switch, bool) else c.flag(switch)


def _read_scales(family: Family, c: Reader, head_dim: int, n_layers: int) -> list[float]:
    """What multiplies each layer's scores; GPT-2 may leave it out, or divide it by the layer's number."""
    scale = head_dim**-0.5
    if not family.has("scale_attn_weights"):
        return [scale] * n_layers
    if not c.flag("scale_attn_weights"):
        scale = 1.0
    if not c.flag("scale_attn_by_inverse_layer_idx"):
        return [scale] * n_layers
    return [scale / float(i + 1) for i in range(n_layers)]


# --- reading rotary positions -------------------------------------------------------------------


@dataclass(frozen=True)
class _RopeContext:
    """What a rotation's reader needs from outside its own object."""

    dim: int
    max_positions: int
    base: float | None
    original_positions: int | None

    def original(self, r: Reader) -> int:
        """The length before scaling: the config's own key wins over the object's, as in transformers."""
        inner = r.maybe_integer("original_max_position_embeddings")
        return self.original_positions or inner or self.max_positions


def _read_ropes(c: Reader, head_dim: int, max_positions: int) -> dict[str, Rope | None]:
    """The rotation of each layer type, from any of its spellings.

    `rope_theta` beside `rope_scaling` (until transformers 4), or both within `rope_parameters` (from
    5 on); either object may hold one object per layer type instead.
    """
    context = _RopeContext(
        dim=head_dim,
        max_positions=max_positions,
        base=c.maybe_number("rope_theta", positive=True),
        original_positions=c.maybe_integer("original_max_position_embeddings"),
    )
    objects = [c.object(key) for key in ("rope_scaling", "rope_parameters")]
    readings = [_read_rope_object(r, context) for r in objects if r is not None]
    if not readings:
        return dict.fromkeys(_LAYER_TYPES, Rope(head_dim, base=context.base or _DEFAULT_BASE))
    if readings[0] != readings[-1]:
        raise SpecError("config.rope_scaling and config.rope_parameters contradict each other: remove one")
    return readings[0]


_DEFAULT_BASE = 10_000.0


def _read_rope_object(r: Reader, context: _RopeContext) -> dict[str, Rope | None]:
    if not any(kind in r for kind in _LAYER_TYPES):
        return dict.fromkeys(_LAYER_TYPES, _read_rope(r, context))
    ropes: dict[str, Rope | None] = {}
    for kind in _LAYER_TYPES:
        inner = r.object(kind)  # null: these layers have no positions
        ropes[kind] = _read_rope(inner, context) if inner is not None else None
    r.finish(f"it may hold {' and '.join(_LAYER_TYPES)}")
    return ropes


def _read_rope(r: Reader, context: _RopeContext) -> Rope:
    kind = r.maybe_text("rope_type")
    old_kind = r.maybe_text("type")
    if kind and old_kind and kind != old_kind:
        r.fail("rope_type", f"is {show(kind)} but type is {show(old_kind)}: remove one")
    kind = kind or old_kind or "default"
    if kind not in _ROPE_TYPES:
        r.fail(
            "rope_type",
            f"{show(kind)} is not supported; supported are {', '.join(_ROPE_TYPES)}",
            UnsupportedError,
        )
    r.only("partial_rotary_factor", *_ONLY["partial_rotary_factor"])
    base = r.maybe_number("rope_theta", positive=True) or context.base or _DEFAULT_BASE
    rope = Rope(context.dim, base=base, scaling=_ROPE_TYPES[kind](r, replace(context, base=base)))
    r.finish(f"rope type {kind!r} has no such key: remove it, or name the type that uses it")
    return rope


def _read_linear(r: Reader, context: _RopeContext) -> RopeScaling:
    return LinearScaling(r.number("factor", positive=True))


def _read_dynamic(r: Reader, context: _RopeContext) -> RopeScaling:
    """transformers grows the base from `max_position_embeddings` on and reads no other length."""
    inner = r.maybe_integer("original_max_position_embeddings")
    if inner not in (None, context.max_positions):
        r.fail(
            "original_max_position_embeddings",
            f"is {inner}, but dynamic scaling starts at max_position_embeddings = {context.max_positions}: "
            "set that to the original length and remove this key",
        )
    if context.dim == 2:
        r.fail("rope_type", "dynamic needs a head_dim above 2")
    return DynamicScaling(r.number("factor", positive=True), context.max_positions)


def _read_llama3(r: Reader, context: _RopeContext) -> RopeScaling:
    low, high = r.number("low_freq_factor", positive=True), r.number("high_freq_factor", positive=True)
    if high <= low:
        r.fail("high_freq_factor", f"must be above low_freq_factor = {low}, found {high}")
    return Llama3Scaling(
        factor=r.number("factor", positive=True),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=context.original(r),
    )


def _read_yarn(r: Reader, context: _RopeContext) -> RopeScaling:
    """`attention_factor`, if absent, follows from the factor and from mscale / mscale_all_dim."""
    original = context.original(r)
    factor = r.maybe_number("factor", positive=True) or context.max_positions / original
    mscale, mscale_all_dim = r.maybe_number("mscale"), r.maybe_number("mscale_all_dim")
    attention_factor = r.maybe_number("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_mscale(factor)
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    truncate = r.maybe_flag("truncate")
    if context.base == 1:
        r.fail("rope_theta", "must not be 1 for yarn, which divides by its logarithm")
    return YarnScaling(
        factor=factor,
        original_positions=original,
        attention_factor=attention_factor,
        beta_fast=r.maybe_number("beta_fast") or 32.0,
        beta_slow=r.maybe_number("beta_slow") or 1.0,
        truncate=True if truncate is None else truncate,
    )


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_longrope(r: Reader, context: _RopeContext) -> RopeScaling:
    """One list of divisors. Two lists, one for short runs and one for long, are not supported."""
    half = context.dim // 2
    short, long = (
        r.maybe_items(f"{which}_factor", half, _is_divisor, "numbers above 0") for which in ("short", "long")
    )
    original = context.original(r)
    factor = r.maybe_number("factor", positive=True) or context.max_positions / original
    attention_factor = r.maybe_number("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.nan
    if short is None or short != long or attention_factor != 1:
        r.fail(
            "rope_type",
            "longrope is supported with short_factor = long_factor and attention_factor 1",
            UnsupportedError,
        )
    return FrequencyDivisors(tuple(map(float, short)))


def _is_divisor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_ROPE_TYPES: Mapping[str, Callable[[Reader, _RopeContext], RopeScaling | None]] = {
    "default": lambda r, context: None,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "llama3": _read_llama3,
    "longrope": _read_longrope,
}

# --- writing ------------------------------------------------------------------------------------


def _write(family: Family, spec: ModelSpec) -> dict[str, Any]:
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
        config |= _write_rope(attn.rope or Rope(attn.head_dim + attn.head_dim % 2), spec.max_positions)
    return config


def _activation_name(family: Family, activation: Activation) -> str:
    if activation == "gelu_tanh" and family.gated:
        return "gelu_pytorch_tanh"  # the same function, computed by torch itself
    return next(name for name, meaning in _ACTIVATIONS.items() if meaning == activation)


def _write_rope(rope: Rope, max_positions: int) -> dict[str, Any]:
    """In the spelling of transformers 4, which every version and most other programs read."""
    return {"rope_theta": float(rope.base), "rope_scaling": _write_scaling(rope.scaling, max_positions)}


def _write_scaling(scaling: RopeScaling | None, max_positions: int) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case DynamicScaling():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_positions,
            }
        case YarnScaling():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_positions,
                "attention_factor": float(scaling.attention_factor),
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
            }
        case FrequencyDivisors():
            return {
                "rope_type": "longrope",
                "factor": 1.0,
                "attention_factor": 1.0,
                "short_factor": list(scaling.divisors),
                "long_factor": list(scaling.divisors),
                "original_max_position_embeddings": max_positions,
            }
