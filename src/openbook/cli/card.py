"""A model's card: what the spec says, layer kinds folded, in the order of a forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from openbook.spec.model import (
    Attention,
    Block,
    Chunk,
    Experts,
    Head,
    HeadNorm,
    LatentAttention,
    Learned,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    RopeScaling,
    Router,
    Sinusoidal,
)

Lines = Iterator[tuple[str, str]]

_RESIDUALS = {
    "serial": "",
    "parallel": ", attention and feed-forward side by side",
    "parallel_shared": ", attention and feed-forward side by side behind one norm",
}


def card(spec: ModelSpec) -> Lines:
    """(name, description) line by line; names of a layer's parts are indented."""
    scale = f", times {spec.embed_scale:.6g}" if spec.embed_scale != 1 else ""
    yield "embed", f"{spec.vocab_size:,} tokens × {spec.d_model:,}{scale}"
    match spec.positions:
        case Learned() as learned:
            offset = f", position p in row p + {learned.offset}" if learned.offset else ""
            yield "positions", f"learned, {learned.n_rows:,} × {spec.d_model:,}{offset}"
        case Sinusoidal(base):
            yield "positions", f"sinusoidal, base {base:,.0f}"
    if spec.embed_norm is not None:
        yield "embed_norm", _norm(spec.embed_norm)
    for block, layers in _kinds(spec):
        scale = f", what is added times {block.residual_scale:.6g}" if block.residual_scale != 1 else ""
        yield f"layers.{_ranges(layers)}", f"{len(layers)} ×{_RESIDUALS[block.residual]}{scale}"
        yield from ((f"  {name}", text) for name, text in _block(block, spec))
    if spec.final_norm is not None:
        yield "final_norm", _norm(spec.final_norm)
    yield "head", _head(spec.head, spec)


def _kinds(spec: ModelSpec) -> list[tuple[Block, list[int]]]:
    kinds: dict[Block, list[int]] = {}
    for i, block in enumerate(spec.layers):
        kinds.setdefault(block, []).append(i)
    return list(kinds.items())


def _ranges(layers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0–2,5'; a long list is cut, since the count stands beside it."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    words = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ",".join(words if len(words) <= 4 else [*words[:3], "…"])


_PARTS = (
    "attn_norm", "attn", "attn_out_norm", "attn_add_norm",
    "mlp_norm", "mlp", "mlp_out_norm", "mlp_add_norm", "end_norm",
)  # fmt: skip


def _block(block: Block, spec: ModelSpec) -> Lines:
    width = spec.d_model
    for name in _PARTS:
        match getattr(block, name):
            case Attention() as attn:
                yield from _attention(attn)
                if spec.positions is None and attn.rope is None and attn.alibi is None:
                    yield "attn.rope", "none: this layer knows no positions"
            case LatentAttention() as attn:
                yield from _latent_attention(attn, width)
            case Mlp() as mlp:
                yield "mlp", _mlp(mlp, width)
            case Experts() as experts:
                yield from _experts(experts, width)
            case Norm() as norm:
                yield name, _norm(norm)


# --- attention ----------------------------------------------------------------------------------


def _attention(attn: Attention) -> Lines:
    heads = f"{attn.n_heads} heads of {attn.head_dim}"
    if attn.n_kv_heads != attn.n_heads:
        heads = f"{attn.n_heads} query heads on {attn.n_kv_heads} key/value heads of {attn.head_dim}"
    biases = [name for name in "qkvo" if getattr(attn, f"{name}_bias")]
    clip = [f"q, k, v cut at ±{attn.clip_qkv:g}"] if attn.clip_qkv is not None else []
    yield "attn", ", ".join([heads, *_biases(biases), *clip, *_scores(attn)])
    if attn.q_norm is not None:
        both = attn.k_norm == attn.q_norm
        yield "attn.q_norm" + (", k_norm" if both else ""), _head_norm(attn.q_norm)
    if attn.k_norm is not None and attn.k_norm != attn.q_norm:
        yield "attn.k_norm", _head_norm(attn.k_norm)
    if attn.rope is not None:
        yield "attn.rope", _rope(attn.rope, attn.head_dim)
    if attn.alibi is not None:
        slopes = attn.alibi.slopes
        yield "attn.alibi", f"scores fall by {slopes[0]:g} to {slopes[-1]:g} a position, by head"
    if attn.temperature is not None:
        scale, interval = attn.temperature.scale, attn.temperature.interval
        yield "attn.temperature", f"queries times 1 + {scale:g} ln(1 + ⌊(p + 1) / {interval:,}⌋)"
    if attn.sinks:
        yield "attn.sinks", "one learned score a query head that takes its share and gives nothing"


def _latent_attention(attn: LatentAttention, width: int) -> Lines:
    heads = f"{attn.n_heads} heads of {attn.nope_dim} + {attn.rope_dim} rotated, values of {attn.v_dim}"
    biases = [name for name in ("down", "o") if getattr(attn, f"{name}_bias")]
    yield "attn", ", ".join([f"latent, {heads}", *_biases(biases), *_scores(attn)])
    if attn.q_rank is not None and attn.q_norm is not None:
        yield "attn.q", f"{width:,} → {attn.q_rank:,} → {attn.q_width:,}, between them {_norm(attn.q_norm)}"
    up = attn.n_heads * (attn.nope_dim + attn.v_dim)
    latent = f"{width:,} → {attn.kv_rank:,} + {attn.rope_dim}; {attn.kv_rank:,} → {up:,}"
    yield "attn.kv", f"{latent}, between them {_norm(attn.kv_norm)}"
    if attn.rope is not None:
        yield "attn.rope", _rope(attn.rope, attn.rope_dim)


def _scores(attn: Attention | LatentAttention) -> Iterator[str]:
    yield f"scale {attn.scale:.6g}"
    if isinstance(attn.window, Chunk):
        yield f"chunks of {attn.window.size:,}"
    elif attn.window is not None:
        yield f"window {attn.window:,}"
    if attn.softcap is not None:
        yield f"soft-capped at {attn.softcap:g}"


def _biases(names: list[str]) -> list[str]:
    return [f"bias on {', '.join(names)}"] if names else []


def _rope(rope: Rope, head_dim: int) -> str:
    parts = [f"base {rope.base:,.0f}" if rope.base == int(rope.base) else f"base {rope.base}"]
    parts.append("halves paired" if rope.layout == "half" else "neighbours paired")
    if rope.dim != head_dim:
        parts.append(f"first {rope.dim} of {head_dim} elements")
    if rope.scaling is not None:
        parts.append(_scaling(rope.scaling))
    return ", ".join(parts)


def _scaling(scaling: RopeScaling) -> str:
    """'YarnScaling(factor 4, original_positions 4,096, ...)'; of a list its ends."""
    values = ((f.name, getattr(scaling, f.name)) for f in dataclasses.fields(scaling))
    return f"{type(scaling).__name__} ({', '.join(f'{name} {_value(value)}' for name, value in values)})"


def _value(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case tuple():
            return f"{value[0]:g} to {value[-1]:g}"
        case int():
            return f"{value:,}"
        case _:
            return f"{value:g}"


# --- feed-forward -------------------------------------------------------------------------------


def _mlp(mlp: Mlp, width: int) -> str:
    biases = [name for name, there in (("up", mlp.up_bias), ("down", mlp.down_bias)) if there]
    gated = "gated " if mlp.gated else ""
    parts = [f"{width:,} → {mlp.d_ff:,} → {width:,}, {gated}{mlp.activation}", *_biases(biases)]
    if mlp.clamp is not None:
        parts.append(f"gate cut at {mlp.clamp:g} and up at ±{mlp.clamp:g}")
    if mlp.up_offset:
        parts.append(f"up + {mlp.up_offset:g}")
    return ", ".join(parts)


def _experts(experts: Experts, width: int) -> Lines:
    yield "mlp", f"a mixture: {experts.n_active} of {experts.n_experts:,} experts for each token"
    yield "mlp.router", ", ".join(_router(experts.router))
    yield "mlp.experts", f"each {_mlp(experts.expert, width)}"
    if experts.shared is not None:
        gate = ", times the sigmoid of its own gate" if experts.shared.gated else ""
        yield "mlp.shared", f"{_mlp(experts.shared.mlp, width)}, for every token{gate}"


_ROUTER_SCORES = {
    "softmax": "softmax over all, the best taken",
    "sigmoid": "sigmoid of each, the best taken",
    "chosen_softmax": "the largest taken, softmax over those",
}


def _router(router: Router) -> Iterator[str]:
    yield _ROUTER_SCORES[router.score]
    if router.bias:
        yield "bias"
    if router.correction:
        yield "a learned correction while choosing"
    if router.groups is not None:
        groups = router.groups
        best = "best score" if groups.score == "max" else "two best scores"
        yield f"from {groups.n_active} of {groups.n_groups} groups by their {best}"
    if router.renormalise:
        yield "weights divided by their sum" + (f" + {router.sum_eps:g}" if router.sum_eps else "")
    if router.scale != 1:
        yield f"times {router.scale:g}"
    if router.on_input:
        yield "weighing the expert's input"


# --- norms and head -----------------------------------------------------------------------------


def _norm(norm: Norm) -> str:
    parts = ["RMSNorm" if norm.kind == "rms" else "LayerNorm", f"eps {norm.eps:g}"]
    if not norm.weight:
        parts.append("no weight")
    if norm.bias:
        parts.append("bias")
    if norm.offset:
        parts.append(f"weight + {norm.offset:g}")
    return ", ".join(parts)


_OVER = {
    "head": "on each head",
    "own": "on each head with its own weight",
    "width": "over all heads together",
}


def _head_norm(norm: HeadNorm) -> str:
    return f"{_norm(norm)}, {_OVER[norm.over]}" + (", after the rotation" if norm.after_rope else "")


def _head(head: Head, spec: ModelSpec) -> str:
    parts = ["the embedding's matrix (tied)" if head.tied else f"{spec.d_model:,} → {spec.vocab_size:,}"]
    if head.bias:
        parts.append("bias")
    if head.scale != 1:
        parts.append(f"logits times {head.scale:g}")
    if head.softcap is not None:
        parts.append(f"logits soft-capped at {head.softcap:g}")
    return ", ".join(parts)
