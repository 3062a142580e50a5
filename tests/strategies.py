"""Random specs for hypothesis: everything a spec can say, in sizes that are small and never coincide.

Width, heads, head size, feed-forward width, vocabulary and positions come from disjoint pools, so a
transposition or a wrong size cannot hide behind two equal numbers. (Query and key/value heads may be
equal, as in multi-head attention.)
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from openbook.spec.model import (
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
    Sinusoidal,
    YarnScaling,
)

KV_HEADS = (1, 2, 3)
QUERIES_PER_KV = (1, 2, 3, 4)
HEAD_DIMS = (14, 16, 18, 20)
WIDTHS = (22, 26, 28, 34)
FF_WIDTHS = (38, 40, 43, 46)
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


head_norms: st.SearchStrategy[HeadNorm] = norms().map(lambda norm: HeadNorm(**vars(norm)))


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
            st.lists(st.sampled_from([1.0, 1.5, 8.0]), min_size=dim // 2, max_size=dim // 2).map(
                lambda numbers: FrequencyDivisors(tuple(numbers))
            ),
        )
    )


@st.composite
def ropes(draw: st.DrawFn, head_dim: int, max_positions: int) -> Rope:
    dim = draw(st.sampled_from([head_dim, head_dim // 4 * 2]))
    return Rope(
        dim,
        base=draw(st.sampled_from([1000.0, 10_000.0, 500_000.0])),
        layout=draw(st.sampled_from(["half", "interleaved"])),
        scaling=draw(scalings(dim, max_positions)),
    )


@st.composite
def attentions(draw: st.DrawFn, max_positions: int, n_kv_heads: int, head_dim: int) -> Attention:
    biases: dict[str, Any] = {f"{part}_bias": draw(st.booleans()) for part in "qkvo"}
    return Attention(
        n_heads=n_kv_heads * draw(st.sampled_from(QUERIES_PER_KV)),
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from([head_dim**-0.5, 0.125, 1.0])),
        rope=draw(st.none() | ropes(head_dim, max_positions)),
        q_norm=draw(st.none() | head_norms),
        k_norm=draw(st.none() | head_norms),
        window=draw(st.none() | st.integers(1, max_positions)),
        softcap=draw(st.sampled_from([None, 5.0, 30.0])),
        **biases,
    )


mlps: st.SearchStrategy[Mlp] = st.builds(
    Mlp,
    d_ff=st.sampled_from(FF_WIDTHS),
    activation=st.sampled_from(ACTIVATIONS),
    gated=st.booleans(),
    up_bias=st.booleans(),
    down_bias=st.booleans(),
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
        attn=draw(attentions(max_positions, n_kv_heads, head_dim)),
        mlp=draw(mlps),
        residual=residual,
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
        head=draw(st.builds(Head, tied=st.booleans(), bias=st.booleans())),
        final_norm=draw(st.none() | norms()),
        positions=draw(st.none() | st.builds(Sinusoidal) | st.just(Learned(max_positions))),
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
