"""Which steps a step reads, from the spec alone."""

from __future__ import annotations

from collections.abc import Container, Iterator

from openbook.spec.model import Attention, Block, Experts, LatentAttention, Mlp, ModelSpec


def inputs(spec: ModelSpec, name: str) -> tuple[str, ...]:
    """The full names of the steps that the step `name` reads, the first one first; () for the embedding.

    Weights, positions and masks are no steps. Of latent attention both orders are named: a run has either
    kv_up, or q_absorb and v_absorb. Raises `KeyError` for a step that no such model has.
    """
    return _all_inputs(spec, name)[name]


def nearest(spec: ModelSpec, name: str, recorded: Container[str]) -> Iterator[str]:
    """What the step reads of the steps in `recorded`: in place of one that is not, what that reads."""
    waiting, seen = list(inputs(spec, name)), set()
    while waiting:
        before = waiting.pop()
        if before in seen:  # many ways lead back through the residual stream
            continue
        seen.add(before)
        if before in recorded:
            yield before
        else:
            waiting += inputs(spec, before)


def _all_inputs(spec: ModelSpec, name: str) -> dict[str, tuple[str, ...]]:
    """The inputs of all steps of the part that `name` belongs to."""
    if not name.startswith("layers."):
        return dict(_outer(spec))
    layer = int(name.split(".")[1])
    where = f"layers.{layer}."
    stream = last_of_layer(spec, layer - 1) if layer else first_stream(spec)
    found = _block(spec.layers[layer], stream)
    return {where + step: tuple(_full(where, read, stream) for read in reads) for step, reads in found}


def _full(where: str, read: str, stream: str) -> str:
    return read if read == stream else where + read


def last_of_layer(spec: ModelSpec, layer: int) -> str:
    """The step whose output is the residual stream after this layer."""
    block = spec.layers[layer]
    places = (("end_norm", block.end_norm), ("mlp_add_norm", block.mlp_add_norm))
    return f"layers.{layer}." + next((name for name, norm in places if norm), "mlp_add")


def first_stream(spec: ModelSpec) -> str:
    """The step whose output is the residual stream before the first layer."""
    return "embed_norm" if spec.embed_norm else "positions" if spec.positions else "embed"


def _outer(spec: ModelSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "embed", ()
    if spec.positions:
        yield "positions", ("embed",)
    if spec.embed_norm:
        yield "embed_norm", ("positions" if spec.positions else "embed",)
    last = last_of_layer(spec, spec.n_layers - 1)
    if spec.final_norm:
        yield "final_norm", (last,)
    yield "head", ("final_norm" if spec.final_norm else last,)


Flow = Iterator[tuple[str, tuple[str, ...]]]


def _block(block: Block, stream: str) -> Flow:
    if block.attn_norm:
        yield "attn_norm", (stream,)
    normed = "attn_norm" if block.attn_norm else stream
    yield from (
        _attention(block.attn, normed) if isinstance(block.attn, Attention) else _latent(block.attn, normed)
    )
    if block.attn_out_norm:
        yield "attn_out_norm", ("attn.o",)
    yield "attn_add", (stream, "attn_out_norm" if block.attn_out_norm else "attn.o")
    if block.attn_add_norm:
        yield "attn_add_norm", ("attn_add",)
    middle = "attn_add_norm" if block.attn_add_norm else "attn_add"
    read = {"serial": middle, "parallel": stream, "parallel_shared": normed}[block.residual]
    if block.mlp_norm:
        yield "mlp_norm", (read,)
        read = "mlp_norm"
    if isinstance(block.mlp, Mlp):
        yield from _mlp("mlp", block.mlp, read)
        result = "mlp.down"
    else:
        yield from _experts(block.mlp, read)
        result = "mlp.shared_add" if block.mlp.shared else "mlp.experts.sum"
    if block.mlp_out_norm:
        yield "mlp_out_norm", (result,)
        result = "mlp_out_norm"
    yield "mlp_add", (middle, result)
    if block.mlp_add_norm:
        yield "mlp_add_norm", ("mlp_add",)
    if block.end_norm:
        yield "end_norm", ("mlp_add_norm" if block.mlp_add_norm else "mlp_add",)


def _attention(attn: Attention, read: str) -> Flow:
    last = {}
    for part in ("q", "k", "v"):
        yield f"attn.{part}", (read,)
        last[part] = f"attn.{part}"
    for part, norm in (("q", attn.q_norm), ("k", attn.k_norm)):
        turns = [f"attn.{part}_rope"] if attn.rope else []
        norms = [f"attn.{part}_norm"] if norm else []
        for step in turns + norms if norm and norm.after_rope else norms + turns:
            yield step, (last[part],)
            last[part] = step
    if attn.temperature:
        yield "attn.temperature", (last["q"],)
        last["q"] = "attn.temperature"
    yield from _core(last["q"], last["k"], last["v"])
    yield "attn.o", ("attn.mix",)


def _latent(attn: LatentAttention, read: str) -> Flow:
    query = "attn.q"
    if attn.q_rank is None:
        yield query, (read,)
    else:
        yield "attn.q_down", (read,)
        yield "attn.q_norm", ("attn.q_down",)
        yield "attn.q_up", ("attn.q_norm",)
        query = "attn.q_up"
    yield "attn.kv_down", (read,)
    yield "attn.kv_norm", ("attn.kv_down",)
    yield "attn.kv_up", ("attn.kv_norm",)
    if attn.rope:
        yield "attn.q_rope", (query,)
        yield "attn.k_rope", ("attn.kv_down",)
    yield "attn.q_absorb", (query,)
    turned = ("attn.q_rope", "attn.k_rope") if attn.rope else ()
    yield "attn.scores", ("attn.q_absorb", "attn.kv_up", *turned)
    yield "attn.masked", ("attn.scores",)
    yield "attn.probs", ("attn.masked",)
    yield "attn.mix", ("attn.probs", "attn.kv_up")
    yield "attn.v_absorb", ("attn.mix",)
    yield "attn.o", ("attn.v_absorb",)


def _core(query: str, key: str, value: str) -> Flow:
    yield "attn.scores", (query, key)
    yield "attn.masked", ("attn.scores",)
    yield "attn.probs", ("attn.masked",)
    yield "attn.mix", ("attn.probs", value)


def _mlp(name: str, mlp: Mlp, read: str) -> Flow:
    if mlp.gated:
        yield f"{name}.gate", (read,)
    yield f"{name}.up", (read,)
    yield f"{name}.act", (f"{name}.up", f"{name}.gate") if mlp.gated else (f"{name}.up",)
    yield f"{name}.down", (f"{name}.act",)


def _experts(experts: Experts, read: str) -> Flow:
    yield "mlp.router", (read,)
    yield "mlp.chosen", ("mlp.router",)
    yield from _mlp("mlp.experts", experts.expert, read)
    yield "mlp.experts.sum", ("mlp.experts.down", "mlp.chosen")
    if experts.shared is None:
        return
    yield from _mlp("mlp.shared", experts.shared.mlp, read)
    parts = ("mlp.experts.sum", "mlp.shared.down")
    if experts.shared.gated:
        yield "mlp.shared_gate", (read,)
        parts = (*parts, "mlp.shared_gate")
    yield "mlp.shared_add", parts
