"""A model's card: what the spec says, layer kinds folded, in the order of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from openbook.spec.model import Attention, Block, Learned, Mlp, ModelSpec, Norm, Rope, Sinusoidal

_RESIDUALS = {
    "serial": "",
    "parallel": ", attention and feed-forward side by side",
    "parallel_shared": ", attention and feed-forward side by side behind one norm",
}


def card(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """(name, description) line by line; names of a layer's parts are indented."""
    yield "embed", f"{spec.vocab_size:,} tokens × {spec.d_model:,}"
    match spec.positions:
        case Learned(n_positions):
            yield "positions", f"learned, {n_positions:,} × {spec.d_model:,}"
        case Sinusoidal(base):
            yield "positions", f"sinusoidal, base {base:,.0f}"
    for block, layers in _kinds(spec):
        yield f"layers.{_ranges(layers)}", f"{len(layers)} ×{_RESIDUALS[block.residual]}"
        yield from ((f"  {name}", text) for name, text in _block(block, spec.d_model))
    if spec.final_norm is not None:
        yield "final_norm", _norm(spec.final_norm)
    tied = "the embedding's matrix (tied)" if spec.head.tied else f"{spec.d_model:,} → {spec.vocab_size:,}"
    yield "head", tied + (", bias" if spec.head.bias else "")


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


def _block(block: Block, width: int) -> Iterator[tuple[str, str]]:
    for name in _PARTS:
        match getattr(block, name):
            case Attention() as attn:
                yield from _attention(attn)
            case Mlp() as mlp:
                yield "mlp", _mlp(mlp, width)
            case Norm() as norm:
                yield name, _norm(norm)


def _attention(attn: Attention) -> Iterator[tuple[str, str]]:
    heads = f"{attn.n_heads} heads of {attn.head_dim}"
    if attn.n_kv_heads != attn.n_heads:
        heads = f"{attn.n_heads} query heads on {attn.n_kv_heads} key/value heads of {attn.head_dim}"
    parts = [heads, f"scale {attn.scale:.6g}", *_biases(attn)]
    if attn.window is not None:
        parts.append(f"window {attn.window:,}")
    if attn.softcap is not None:
        parts.append(f"soft-capped at {attn.softcap:g}")
    yield "attn", ", ".join(parts)
    if attn.q_norm is not None:
        both = attn.k_norm == attn.q_norm
        yield "attn.q_norm" + (", k_norm" if both else ""), _norm(attn.q_norm) + ", on each head"
    if attn.k_norm is not None and attn.k_norm != attn.q_norm:
        yield "attn.k_norm", _norm(attn.k_norm) + ", on each head"
    if attn.rope is not None:
        yield "attn.rope", _rope(attn.rope, attn.head_dim)


def _biases(attn: Attention) -> list[str]:
    names = [name for name in "qkvo" if getattr(attn, f"{name}_bias")]
    return [f"bias on {', '.join(names)}"] if names else []


def _rope(rope: Rope, head_dim: int) -> str:
    parts = [f"base {rope.base:,.0f}" if rope.base == int(rope.base) else f"base {rope.base}"]
    parts.append("halves paired" if rope.layout == "half" else "neighbours paired")
    if rope.dim != head_dim:
        parts.append(f"first {rope.dim} of {head_dim} elements")
    if rope.scaling is not None:
        parts.append(type(rope.scaling).__name__)
        if factor := getattr(rope.scaling, "factor", None):
            parts.append(f"factor {factor:g}")
    return ", ".join(parts)


def _mlp(mlp: Mlp, width: int) -> str:
    biases = [name for name, there in (("up", mlp.up_bias), ("down", mlp.down_bias)) if there]
    gated = "gated " if mlp.gated else ""
    bias = f", bias on {', '.join(biases)}" if biases else ""
    return f"{width:,} → {mlp.d_ff:,} → {width:,}, {gated}{mlp.activation}{bias}"


def _norm(norm: Norm) -> str:
    parts = ["RMSNorm" if norm.kind == "rms" else "LayerNorm", f"eps {norm.eps:g}"]
    if not norm.weight:
        parts.append("no weight")
    if norm.bias:
        parts.append("bias")
    if norm.offset:
        parts.append(f"weight + {norm.offset:g}")
    return ", ".join(parts)
