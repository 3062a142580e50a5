"""What a family has, in one line of words, read off the specs of its models."""

from collections.abc import Iterable, Iterator

from openbook.spec.model import (
    Attention,
    Block,
    Chunk,
    Experts,
    HeadNorm,
    LatentAttention,
    Learned,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    Router,
)


def features(specs: Iterable[ModelSpec]) -> str:
    """Those of all of them, each once, in the order in which a forward pass meets them."""
    found: dict[str, None] = {}
    for spec in specs:
        found |= dict.fromkeys(_of_model(spec))
        for block in dict.fromkeys(spec.layers):
            found |= dict.fromkeys(_of_block(block))
        if spec.head.scale != 1:
            found["logits scaled"] = None
        if spec.head.softcap:
            found["logits soft-capped"] = None
        if spec.head.bias:
            found["head bias"] = None
    order = list(found)
    return "; ".join(sorted(order, key=_rank))


def _rank(words: str) -> int:
    """Attention first, then positions, norms, feed-forward and the rest."""
    return next((i for i, start in enumerate(_ORDER) if words.startswith(start)), len(_ORDER))


_ORDER = (
    "GQA", "MQA", "MLA", "sliding", "chunked", "sinks", "scores", "q, k", "attention", "RoPE", "NoPE",
    "ALiBi", "learned", "LayerNorm", "norms", "post", "sandwich", "parallel", "experts",
)  # fmt: skip


def _of_model(spec: ModelSpec) -> Iterator[str]:
    if isinstance(spec.positions, Learned):
        yield "learned positions" + (f" from {spec.positions.offset} on" if spec.positions.offset else "")
    if spec.embed_scale != 1:
        yield "embedding scaled"
    if spec.embed_norm:
        yield "embedding norm"
    kinds = list(dict.fromkeys(spec.layers))
    if any(_is_nope(b) for b in kinds) and any(not _is_nope(b) for b in kinds):
        yield "NoPE layers"
    if any(isinstance(b.mlp, Mlp) for b in kinds) and any(isinstance(b.mlp, Experts) for b in kinds):
        yield "dense layers among those of experts"
    bases = {b.attn.rope.base for b in kinds if b.attn.rope}
    if len(bases) > 1:
        yield "RoPE bases by layer"


def _is_nope(block: Block) -> bool:
    return block.attn.rope is None and getattr(block.attn, "alibi", None) is None


def _of_block(block: Block) -> Iterator[str]:
    attn = block.attn
    yield from _of_latent(attn) if isinstance(attn, LatentAttention) else _of_attention(attn)
    if isinstance(attn.window, Chunk):
        yield "chunked attention"
    elif attn.window:
        yield "sliding windows"
    if attn.softcap:
        yield "scores soft-capped"
    if attn.rope:
        yield from _of_rope(attn.rope, attn.rope.dim if isinstance(attn, LatentAttention) else attn.head_dim)
    yield from _of_norms(block)
    yield from _of_feed_forward(block.mlp)
    if block.residual_scale != 1:
        yield "residual scaled"


def _of_attention(attn: Attention) -> Iterator[str]:
    if attn.n_kv_heads == 1:
        yield "MQA"
    elif attn.n_kv_heads < attn.n_heads:
        yield "GQA"
    if attn.q_bias:
        yield "q, k, v biases" if not attn.o_bias else "attention biases"
    if attn.clip_qkv:
        yield "q, k, v clipped"
    if attn.q_norm:
        yield _of_head_norm(attn.q_norm)
    if attn.alibi:
        yield "ALiBi"
    if attn.sinks:
        yield "sinks"
    if attn.temperature:
        yield "q scaled by position"
    if abs(attn.scale - attn.head_dim**-0.5) > 1e-9:
        yield "scores scaled by a number of its own"


def _of_latent(attn: LatentAttention) -> Iterator[str]:
    yield "MLA" if attn.q_rank else "MLA without a latent query"


def _of_head_norm(norm: HeadNorm) -> str:
    over = {"head": "per head", "own": "per head, each its own weights", "width": "over the whole width"}
    when = " after RoPE" if norm.after_rope else ""
    bare = "" if norm.weight else " without weights"
    return f"q, k norms {over[norm.over]}{when}{bare}"


def _of_rope(rope: Rope, width: int) -> Iterator[str]:
    if rope.layout == "interleaved":
        yield "RoPE interleaved"
    if rope.dim < width:
        yield "RoPE on a part of the head"
    if rope.scaling:
        yield f"RoPE {type(rope.scaling).__name__.removesuffix('Scaling').lower()}"


def _of_norms(block: Block) -> Iterator[str]:
    norms = [n for n in (block.attn_norm, block.attn_out_norm, block.attn_add_norm) if n]
    yield from _of_norm(norms[0])
    if block.attn_add_norm:
        yield "post-norm, after the addition"
    elif block.attn_norm and block.attn_out_norm:
        yield "sandwich norms"
    elif block.attn_out_norm:
        yield "post-norm, before the addition"
    if block.residual != "serial":
        norms_of = "one norm" if block.residual == "parallel_shared" else "two norms"
        yield f"parallel residual, {norms_of}"


def _of_norm(norm: Norm) -> Iterator[str]:
    if norm.kind == "layer":
        parts = {(True, True): "", (True, False): " without bias", (False, False): " without weights"}
        yield f"LayerNorm{parts[norm.weight, norm.bias]}"
    if norm.offset:
        yield "norms of 1 + w"


def _of_feed_forward(mlp: Mlp | Experts) -> Iterator[str]:
    if isinstance(mlp, Mlp):
        yield from _of_mlp(mlp)
        return
    yield from _of_router(mlp.router)
    yield from _of_mlp(mlp.expert)
    if mlp.shared:
        yield "shared experts, gated" if mlp.shared.gated else "shared experts"


def _of_mlp(mlp: Mlp) -> Iterator[str]:
    name = {
        "gelu_tanh": "GELU (tanh)",
        "gelu": "GELU",
        "relu": "ReLU",
        "relu2": "ReLU²",
        "silu": "SiLU",
        "gelu_quick": "quick GELU",
    }
    if mlp.gated and mlp.activation != "silu":
        yield f"{name.get(mlp.activation, mlp.activation)} gate"
    elif not mlp.gated:
        yield f"no gate, {name.get(mlp.activation, mlp.activation)}"
    if mlp.clamp:
        yield "clamped gate"
    if mlp.up_bias or mlp.down_bias:
        yield "feed-forward biases"


def _of_router(router: Router) -> Iterator[str]:
    score = {
        "softmax": "softmax, then the best",
        "sigmoid": "sigmoid",
        "chosen_softmax": "the best, then softmax",
    }
    extras = [
        ("renormalised", router.renormalise),
        ("in groups", router.groups is not None),
        ("with correction", router.correction),
        ("scaled", router.scale != 1),
        ("weights on the input", router.on_input),
    ]
    yield ", ".join([f"experts ({score[router.score]}", *(word for word, has in extras if has)]) + ")"
