"""Random specs for hypothesis: everything a spec can say, in sizes that are small and never coincide.

Width, heads, head sizes, ranks, feed-forward widths, experts, vocabulary and positions come from disjoint
pools, so a transposition or a wrong size cannot hide behind two equal numbers. (Query and key/value heads
may be equal, as in multi-head attention.)
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from openbook.spec.hf import FAMILIES
from openbook.spec.model import (
    Alibi,
    Attention,
    Block,
    Chunk,
    DynamicScaling,
    Experts,
    FrequencyDivisors,
    Groups,
    Head,
    HeadNorm,
    LatentAttention,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Mlp,
    ModelSpec,
    Norm,
    QueryTemperature,
    Rope,
    RopeScaling,
    Router,
    Shared,
    Sinusoidal,
    YarnScaling,
)

KV_HEADS = (1, 2, 3)
QUERIES_PER_KV = (1, 2, 3, 4)
HEAD_DIMS = (14, 16, 18, 20)
LATENT_HEADS = (5, 7)
NOPE_DIMS, ROPE_DIMS, VALUE_DIMS = (11, 13), (10,), (15, 17)
KV_RANKS, Q_RANKS = (19, 21), (23, 25)
WIDTHS = (22, 26, 28, 34)
FF_WIDTHS = (38, 40, 43, 46)
EXPERTS = (30, 32)
EXPERT_WIDTHS, SHARED_WIDTHS = (48, 49), (51, 52)
VOCABULARIES = (53, 59, 61, 67)
POSITIONS = (70, 80, 96)
ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh")

_FACTORS = st.sampled_from([1.5, 2.0, 4.0, 8.0])


def norms(kind: str | None = None) -> st.SearchStrategy[Norm]:
    kinds = st.sampled_from(["layer", "rms"]) if kind is None else st.just(kind)
    return st.builds(
        Norm,
        kind=kinds,
        eps=st.sampled_from([1e-6, 1e-5, 1e-2]),
        weight=st.booleans(),
        bias=st.booleans(),
        offset=st.sampled_from([0.0, 1.0]),
    )


@st.composite
def head_norms(draw: st.DrawFn) -> HeadNorm:
    over = draw(st.sampled_from(["head", "own", "width"]))
    return HeadNorm(**vars(draw(norms())), over=over, after_rope=draw(st.booleans()))


@st.composite
def scalings(draw: st.DrawFn, dim: int, max_positions: int) -> RopeScaling | None:
    original = draw(st.sampled_from([max_positions // 4, max_positions // 2]))
    return draw(
        st.one_of(
            st.none(),
            st.builds(LinearScaling, factor=_FACTORS),
            st.builds(DynamicScaling, factor=_FACTORS, original_positions=st.just(original)),
            st.builds(
                Llama3Scaling,
                factor=_FACTORS,
                low_freq_factor=st.just(1.0),
                high_freq_factor=st.sampled_from([2.0, 4.0]),
                original_positions=st.just(original),
            ),
            st.builds(
                YarnScaling,
                factor=_FACTORS,
                original_positions=st.just(original),
                attention_factor=st.sampled_from([0.75, 1.0, 1.138629436111989]),
                beta_fast=st.sampled_from([16.0, 32.0]),
                beta_slow=st.sampled_from([0.5, 1.0]),
                truncate=st.booleans(),
            ),
            st.builds(FrequencyDivisors, _divisors(dim)),
            st.builds(
                LongRope,
                short=_divisors(dim),
                long=_divisors(dim),
                original_positions=st.just(original),
                attention_factor=st.sampled_from([1.0, 1.19]),
            ),
        )
    )


def _divisors(dim: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.lists(st.sampled_from([1.0, 1.5, 8.0]), min_size=dim // 2, max_size=dim // 2).map(tuple)


@st.composite
def ropes(draw: st.DrawFn, head_dim: int, max_positions: int) -> Rope:
    dim = draw(st.sampled_from([head_dim, head_dim // 4 * 2]))
    return Rope(
        dim,
        base=draw(st.sampled_from([1000.0, 10_000.0, 500_000.0])),
        layout=draw(st.sampled_from(["half", "interleaved"])),
        scaling=draw(scalings(dim, max_positions)),
    )


def windows(max_positions: int) -> st.SearchStrategy[int | Chunk | None]:
    size = st.integers(1, max_positions)
    return st.none() | size | st.builds(Chunk, size)


_SOFTCAPS = st.sampled_from([None, 5.0, 30.0])


@st.composite
def attentions(draw: st.DrawFn, max_positions: int, n_kv_heads: int, head_dim: int) -> Attention:
    biases: dict[str, Any] = {f"{part}_bias": draw(st.booleans()) for part in "qkvo"}
    n_heads = n_kv_heads * draw(st.sampled_from(QUERIES_PER_KV))
    turned = draw(st.sampled_from(["rope", "alibi", "neither"]))
    return Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from([head_dim**-0.5, 0.125, 1.0])),
        rope=draw(ropes(head_dim, max_positions)) if turned == "rope" else None,
        alibi=Alibi(tuple(2.0**-i for i in range(n_heads))) if turned == "alibi" else None,
        q_norm=draw(st.none() | head_norms()),
        k_norm=draw(st.none() | head_norms()),
        window=draw(windows(max_positions)),
        softcap=draw(_SOFTCAPS),
        sinks=draw(st.booleans()),
        clip_qkv=draw(st.sampled_from([None, 0.5])),
        temperature=draw(st.none() | st.builds(QueryTemperature, st.just(0.1), st.integers(1, 9))),
        **biases,
    )


@st.composite
def latent_attentions(draw: st.DrawFn, max_positions: int) -> LatentAttention:
    nope_dim, rope_dim = draw(st.sampled_from(NOPE_DIMS)), draw(st.sampled_from(ROPE_DIMS))
    ropes_of_all = ropes(rope_dim, max_positions).filter(lambda rope: rope.dim == rope_dim)
    q_rank = draw(st.sampled_from([None, *Q_RANKS]))
    return LatentAttention(
        n_heads=draw(st.sampled_from(LATENT_HEADS)),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=draw(st.sampled_from(VALUE_DIMS)),
        kv_rank=draw(st.sampled_from(KV_RANKS)),
        kv_norm=draw(norms()),
        scale=draw(st.sampled_from([(nope_dim + rope_dim) ** -0.5, 0.125])),
        q_rank=q_rank,
        q_norm=draw(norms()) if q_rank else None,
        rope=draw(st.none() | ropes_of_all),
        down_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        window=draw(windows(max_positions)),
        softcap=draw(_SOFTCAPS),
    )


@st.composite
def mlps(draw: st.DrawFn, widths: tuple[int, ...] = FF_WIDTHS) -> Mlp:
    gated = draw(st.booleans())
    return Mlp(
        d_ff=draw(st.sampled_from(widths)),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        gated=gated,
        up_bias=draw(st.booleans()),
        down_bias=draw(st.booleans()),
        clamp=draw(st.sampled_from([None, 0.5])) if gated else None,
        up_offset=draw(st.sampled_from([0.0, 1.0])) if gated else 0.0,
    )


@st.composite
def routers(draw: st.DrawFn, n_experts: int) -> Router:
    n_groups = {30: 3, 32: 4}[n_experts]
    return Router(
        score=draw(st.sampled_from(["softmax", "sigmoid", "chosen_softmax"])),
        renormalise=draw(st.booleans()),
        bias=draw(st.booleans()),
        correction=draw(st.booleans()),
        groups=draw(
            st.none()
            | st.builds(Groups, st.just(n_groups), st.integers(1, n_groups), st.sampled_from(["max", "top2"]))
        ),
        scale=draw(st.sampled_from([1.0, 2.5])),
        sum_eps=draw(st.sampled_from([0.0, 1e-20])),
        on_input=draw(st.booleans()),
    )


@st.composite
def experts(draw: st.DrawFn) -> Experts:
    n_experts = draw(st.sampled_from(EXPERTS))
    return Experts(
        n_experts=n_experts,
        n_active=draw(st.sampled_from([1, 2, 6])),
        expert=draw(mlps(EXPERT_WIDTHS)),
        router=draw(routers(n_experts)),
        shared=draw(st.none() | st.builds(Shared, mlp=mlps(SHARED_WIDTHS), gated=st.booleans())),
    )


@st.composite
def blocks(draw: st.DrawFn, max_positions: int, n_kv_heads: int, head_dim: int) -> Block:
    residual = draw(st.sampled_from(["serial", "parallel", "parallel_shared"]))
    places = ["attn_norm", "attn_out_norm", "mlp_out_norm", "end_norm"]
    if residual == "serial":
        places += ["attn_add_norm", "mlp_add_norm"]
    if residual != "parallel_shared":
        places += ["mlp_norm"]
    return Block(
        attn=draw(attentions(max_positions, n_kv_heads, head_dim) | latent_attentions(max_positions)),
        mlp=draw(mlps() | experts()),
        residual=residual,
        residual_scale=draw(st.sampled_from([1.0, 0.22])),
        **{place: draw(st.none() | norms()) for place in places},
    )


@st.composite
def specs(draw: st.DrawFn, max_layers: int = 3) -> ModelSpec:
    """Any model that a spec can express, up to `max_layers` layers, each of its own kind or repeated."""
    max_positions = draw(st.sampled_from(POSITIONS))
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    kinds = draw(
        st.lists(
            st.sampled_from(KV_HEADS).flatmap(lambda n: blocks(max_positions, n, head_dim)),
            min_size=1,
            max_size=max_layers,
        )
    )
    repeats = draw(st.integers(1, max(1, max_layers // len(kinds))))
    return ModelSpec(
        vocab_size=draw(st.sampled_from(VOCABULARIES)),
        d_model=draw(st.sampled_from(WIDTHS)),
        max_positions=max_positions,
        layers=tuple(kind for kind in kinds for _ in range(repeats)),
        head=draw(
            st.builds(
                Head,
                tied=st.booleans(),
                bias=st.booleans(),
                scale=st.sampled_from([1.0, 0.0625]),
                softcap=st.sampled_from([None, 30.0]),
            )
        ),
        final_norm=draw(st.none() | norms()),
        positions=draw(
            st.none()
            | st.builds(Sinusoidal)
            | st.builds(Learned, st.just(max_positions), offset=st.sampled_from([0, 2]))
        ),
        embed_scale=draw(st.sampled_from([1.0, 5.5])),
        embed_norm=draw(st.none() | norms()),
    )


# --- Hugging Face configs -----------------------------------------------------------------------


@st.composite
def rope_scalings(draw: st.DrawFn, max_positions: int, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json, with only the keys that its type must have, or with all."""
    full = draw(st.booleans())
    original = {"original_max_position_embeddings": max_positions // 2}
    factor = {"factor": draw(_FACTORS)}
    kind = draw(st.sampled_from([None, "default", "linear", "dynamic", "yarn", "llama3", "longrope"]))
    match kind:
        case None:
            return None
        case "default":
            return {"rope_type": "default"}
        case "linear" | "dynamic":
            return {"rope_type": kind, **factor}
        case "yarn":
            more = {
                "beta_fast": 16,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
                "truncate": False,
            }
            return {"rope_type": kind, **factor, **(original | more if full else {})}
        case "llama3":
            bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": kind, **factor, **bounds, **original}
    numbers = draw(st.lists(st.sampled_from([1.0, 2.5]), min_size=head_dim // 2, max_size=head_dim // 2))
    return {
        "rope_type": "longrope",
        "short_factor": numbers,
        "long_factor": numbers,
        "attention_factor": 1.0,
        **factor,
        **original,
    }


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json of any supported model type, in small sizes that never coincide."""
    model_type = draw(st.sampled_from(["gpt2", "llama", "mistral", "qwen2", "qwen3"]))
    n_kv_heads = draw(st.sampled_from(KV_HEADS))
    n_heads = n_kv_heads * draw(st.sampled_from(QUERIES_PER_KV))
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    n_layers = draw(st.integers(1, 4))
    max_positions = draw(st.sampled_from(POSITIONS))
    tied = {"tie_word_embeddings": draw(st.booleans())}
    if model_type == "gpt2":
        return {
            "model_type": model_type,
            "vocab_size": draw(st.sampled_from(VOCABULARIES)),
            "n_embd": n_heads * head_dim,
            "n_head": n_heads,
            "n_layer": n_layers,
            "n_positions": max_positions,
            "n_inner": draw(st.sampled_from([None, *FF_WIDTHS])),
            "activation_function": draw(st.sampled_from(["gelu_new", "relu", "gelu"])),
            "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-2])),
            "scale_attn_weights": draw(st.booleans()),
            "scale_attn_by_inverse_layer_idx": draw(st.booleans()),
            **tied,
        }
    config = {
        "model_type": model_type,
        "vocab_size": draw(st.sampled_from(VOCABULARIES)),
        "hidden_size": n_heads * draw(st.sampled_from([5, 7])),
        "intermediate_size": draw(st.sampled_from(FF_WIDTHS)),
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "relu2"])),
        "max_position_embeddings": max_positions,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "rope_theta": draw(st.sampled_from([1000.0, 500_000.0])),
        "rope_scaling": draw(rope_scalings(max_positions, head_dim)),
        **tied,
    }
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = draw(st.booleans())
    if model_type == "llama":
        config["mlp_bias"] = draw(st.booleans())
    if model_type != "llama":
        config["sliding_window"] = draw(st.sampled_from([None, 6, 9]))
    if model_type in ("qwen2", "qwen3"):
        config["use_sliding_window"] = draw(st.booleans())
        config["max_window_layers"] = draw(st.integers(0, n_layers))
    return config


_SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "sliding_window": 7,
    "attention_chunk_size": 9,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "expert_width": 20,
    "shared_expert_intermediate_size": 28,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 11,
    "rotary_dim": 4,
}


SHAPE_OF = {"kimi_k2": "deepseek_v3"}
"""A type that transformers does not have, and the one whose code its published code is."""


def small_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json of any supported type, whose sizes are small and differ, with `changes` to its keys."""
    family = FAMILIES[model_type]
    sizes = {family.spelling.get(word, word): size for word, size in _SMALL.items()}
    config = {key: size for key, size in sizes.items() if key in family.defaults}
    if "qk_rope_head_dim" in family.defaults:
        config["num_key_value_heads"] = config["num_attention_heads"]  # keys are latent: one for each head
    return {"model_type": model_type, **config, **changes}


_LAYER_TYPES = ("full_attention", "sliding_attention")
_UNCHANGED = {"new_decoder_architecture", "parallel_attn", "use_sliding_window"}
"""Switches that exclude each other, or that need a key beside them."""


@st.composite
def family_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A small config of any family, with its switches and what it says layer by layer at random."""
    model_type = draw(st.sampled_from(sorted(FAMILIES)))
    config = small_config(model_type)
    defaults = FAMILIES[model_type].defaults
    for key in sorted(key for key, value in defaults.items() if isinstance(value, bool)):
        if key not in _UNCHANGED:
            config[key] = draw(st.booleans())
    if model_type == "falcon":
        config["num_kv_heads"] = None  # one, or one for each query head
    per_layer = {
        "no_rope_layers": st.lists(st.sampled_from([0, 1]), min_size=4, max_size=4),
        "mlp_only_layers": st.lists(st.integers(0, 3), max_size=3, unique=True),
        "moe_layers": st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
        "first_k_dense_replace": st.integers(0, 3),
    }
    for key in sorted(set(per_layer) & set(defaults)):
        config[key] = draw(per_layer[key])
    if "layer_types" in defaults and "sliding_window" in config and "use_sliding_window" not in defaults:
        config["layer_types"] = draw(st.lists(st.sampled_from(_LAYER_TYPES), min_size=4, max_size=4))
    return config
