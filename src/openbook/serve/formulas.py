"""What each step computes, as a line of mathematics, read off the spec.

One table by the step's name within its layer. What a formula mentions are the steps that this one reads, by
the last part of their names; `x` is the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from openbook.spec.model import (
    Attention,
    Block,
    Chunk,
    Experts,
    HeadNorm,
    Learned,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
)
from openbook.trace.flow import inputs
from openbook.trace.schema import local_name


class Step(NamedTuple):
    """A step's kind, its formula, and the full names of the steps that it reads."""

    kind: str
    formula: str
    inputs: tuple[str, ...]


def describe(spec: ModelSpec, name: str) -> Step:
    """The step `name`. Raises `KeyError` for a step that no such model has."""
    local, reads = local_name(name), tuple(_there(spec, name))
    block = spec.layers[int(name.split(".")[1])] if name != local else None
    row = ROWS.get(local) or next(row for ending, row in ENDINGS.items() if local.endswith(ending))
    return Step(row.kind, row.formula(_Here(spec, block, local, reads)), reads)


def _there(spec: ModelSpec, name: str) -> Iterator[str]:
    """What the step reads in a pass without a cache, which is all that is shown: latents are expanded, and in
    place of an absorbed step stands what that reads."""
    for read in inputs(spec, name):
        if local_name(read) in ("attn.q_absorb", "attn.v_absorb"):
            yield from inputs(spec, read)
        else:
            yield read


class _Here(NamedTuple):
    """What a formula may ask about: the model, the layer, the step and what it reads."""

    spec: ModelSpec
    block: Block | None
    local: str
    reads: tuple[str, ...]

    @property
    def layer(self) -> Block:
        if self.block is None:
            raise KeyError(self.local)
        return self.block

    @property
    def of_attention(self) -> Attention:
        if not isinstance(self.layer.attn, Attention):
            raise KeyError(self.local)
        return self.layer.attn

    @property
    def of_experts(self) -> Experts:
        if not isinstance(self.layer.mlp, Experts):
            raise KeyError(self.local)
        return self.layer.mlp

    def read(self, number: int = 0) -> str:
        """The step read, in short; the residual stream is x."""
        local = local_name(self.reads[number])
        return "x" if local in _STREAM else local.rpartition(".")[2]

    @property
    def own(self) -> str:
        """The step's own name, in short."""
        return self.local.rpartition(".")[2]


_STREAM = {
    "embed", "positions", "embed_norm", "attn_add", "attn_add_norm", "mlp_add", "mlp_add_norm", "end_norm",
}  # fmt: skip


class _Row(NamedTuple):
    kind: str
    formula: Callable[[_Here], str]


def number(value: float) -> str:
    """As a person writes it: 10000, 0.125, 1e-05."""
    return f"{value:g}" if abs(value) < 1e6 or value != int(value) else f"{int(value)}"


# --- the formulas -------------------------------------------------------------------------------


def _embed(here: _Here) -> str:
    scale = here.spec.embed_scale
    return "W[id]" + (f" · {number(scale)}" if scale != 1 else "")


def _positions(here: _Here) -> str:
    if isinstance(here.spec.positions, Learned):
        offset = here.spec.positions.offset
        return f"x + P[position{f' + {offset}' if offset else ''}]"
    return "x + (sin, cos)(position / base^(2i / D))"


def _normed(norm: Norm | None, x: str, over: str = "") -> str:
    if norm is None:
        return x
    eps = number(norm.eps)
    mean = f" − mean({x})" if norm.kind == "layer" else ""
    top = f"({x}{mean})" if mean else x
    below = f"√(var({x}) + {eps})" if mean else f"√(mean({x}²) + {eps})"
    weight = f" · ({number(norm.offset)} + w)" if norm.offset else " · w"
    return f"{top} / {below}{weight if norm.weight else ''}{' + b' if norm.bias else ''}{over}"


def _norm(here: _Here) -> str:
    holder = here.spec if here.block is None else here.block
    return _normed(getattr(holder, here.local), here.read())


def _head_norm(here: _Here) -> str:
    norm: Norm | None = getattr(here.layer.attn, here.own)
    words = {"head": ", in each head", "own": ", in each head, with weights of its own", "width": ""}
    over = words[norm.over] if isinstance(norm, HeadNorm) else ""
    return _normed(norm, here.read(), over)


def _kv_norm(here: _Here) -> str:
    return _normed(getattr(here.layer.attn, "kv_norm", None), "c")


def _linear(here: _Here) -> str:
    owner: object = here.layer.attn if here.local.startswith("attn.") else here.layer.mlp
    bias = getattr(owner, _BIASES.get(here.own, f"{here.own}_bias"), False)
    clip = getattr(owner, "clip_qkv", None) if here.own in ("q", "k", "v") else None
    product = f"{here.read()} · Wᵀ{' + b' if bias is True else ''}"
    return product if clip is None else f"clip({product}, ±{number(clip)})"


_BIASES = {"q_down": "down_bias", "kv_down": "down_bias"}


def _rope(here: _Here) -> str:
    rope = here.layer.attn.rope
    return f"rotate({here.read()}, position · θ), {_angles(rope)}" if rope else here.read()


def _angles(rope: Rope) -> str:
    pairs = f"i and i + {rope.dim // 2}" if rope.layout == "half" else "2i and 2i + 1"
    scaled = f", {type(rope.scaling).__name__}" if rope.scaling else ""
    return f"θᵢ = {number(rope.base)}^(−2i/{rope.dim}), pairs {pairs}{scaled}"


def _temperature(here: _Here) -> str:
    found = here.of_attention.temperature
    if found is None:
        return here.read()
    return f"{here.read()} · (1 + {number(found.scale)} · ln(1 + ⌊(position + 1) / {found.interval}⌋))"


def _scores(here: _Here) -> str:
    attn, read = here.layer.attn, here.read()
    if isinstance(attn, Attention):
        query, key, parts = read, here.read(1), ""
    else:  # of every head the rotated part stands beside its own
        query, key, parts = "q", "k", f", k the keys of {here.read(1)}"
        if attn.rope is not None:
            query, key = f"(q, {here.read(2)})", f"(k, {here.read(3)})"
        parts = f", q the own part of {read}{parts}"
    score = f"{query} · {key}ᵀ · {attn.scale:.6g}"
    if attn.softcap is not None:
        score = f"{number(attn.softcap)} · tanh({score} / {number(attn.softcap)})"
    if isinstance(attn, Attention) and attn.alibi is not None:
        score += " + slope · (key − query)"
    return score + parts + _groups(attn)


def _groups(attn: object) -> str:
    if not isinstance(attn, Attention) or attn.n_heads == attn.n_kv_heads:
        return ""
    return f", query head h with key/value head ⌊h / {attn.n_heads // attn.n_kv_heads}⌋"


def _masked(here: _Here) -> str:
    window = here.layer.attn.window
    seen = "key ≤ query"
    if isinstance(window, Chunk):
        seen += f" and both in one chunk of {window.size}"
    elif window is not None:
        seen += f" and query − key < {window}"
    return f"scores where {seen}, else −∞"


def _probs(here: _Here) -> str:
    sinks = isinstance(here.layer.attn, Attention) and here.layer.attn.sinks
    return "softmax(masked, sink), without the sink's share" if sinks else "softmax(masked)"


def _mix(here: _Here) -> str:
    if isinstance(here.layer.attn, Attention):
        return f"probs · {here.read(1)}{_groups(here.layer.attn)}"
    return f"probs · v, v the values of {here.read(1)}"


def _add(here: _Here) -> str:
    scale = here.layer.residual_scale
    return f"{here.read()} + {here.read(1)}" + (f" · {number(scale)}" if scale != 1 else "")


def _mlp_of(here: _Here) -> Mlp:
    mlp = here.layer.mlp
    if isinstance(mlp, Mlp):
        return mlp
    return mlp.shared.mlp if mlp.shared and here.local.startswith("mlp.shared.") else mlp.expert


def _mlp_linear(here: _Here) -> str:
    mlp = _mlp_of(here)
    bias = mlp.down_bias if here.own == "down" else mlp.up_bias
    return f"{here.read()} · Wᵀ{' + b' if bias else ''}" + _of_expert(here)


def _of_expert(here: _Here) -> str:
    return ", of each chosen expert" if here.local.startswith("mlp.experts.") else ""


ACTIVATIONS: Mapping[str, str] = {
    "relu": "max(0, {})",
    "relu2": "max(0, {})²",
    "gelu": "gelu({})",
    "gelu_tanh": "gelu_tanh({})",
    "gelu_quick": "{0} · σ(1.702 · {0})",
    "silu": "silu({})",
    "sigmoid": "σ({})",
    "tanh": "tanh({})",
}


def _act(here: _Here) -> str:
    mlp = _mlp_of(here)
    if not mlp.gated:
        return ACTIVATIONS[mlp.activation].format("up")
    gate, up = "gate", "up"
    if mlp.clamp is not None:
        gate, up = f"min(gate, {number(mlp.clamp)})", f"clip(up, ±{number(mlp.clamp)})"
    if mlp.up_offset:
        up = f"({up} + {number(mlp.up_offset)})"
    return f"{ACTIVATIONS[mlp.activation].format(gate)} · {up}"


def _router(here: _Here) -> str:
    return f"{here.read()} · Wᵀ{' + b' if here.of_experts.router.bias else ''}"


def _chosen(here: _Here) -> str:
    experts, router = here.of_experts, here.of_experts.router
    scores = {"softmax": "softmax(router)", "sigmoid": "σ(router)", "chosen_softmax": "router"}[router.score]
    words = f"the {experts.n_active} best of {scores}{' + correction' if router.correction else ''}"
    if router.groups is not None:
        words += f" in the {router.groups.n_active} best of {router.groups.n_groups} groups"
    if router.score == "chosen_softmax":
        words += ", softmax of these"
    if router.renormalise:
        words += ", divided by their sum"
    return words + (f", times {number(router.scale)}" if router.scale != 1 else "")


def _sum(here: _Here) -> str:
    weight = "" if here.of_experts.router.on_input else "chosen · "  # then it has multiplied what they read
    return f"Σ over the chosen experts of {weight}down"


def _head(here: _Here) -> str:
    head = here.spec.head
    logits = f"{here.read()} · Wᵀ{' + b' if head.bias else ''}"
    if head.scale != 1:
        logits = f"({logits}) · {number(head.scale)}"
    if head.softcap is not None:
        logits = f"{number(head.softcap)} · tanh({logits} / {number(head.softcap)})"
    return logits + (", W the embedding's" if head.tied else "")


ROWS: Mapping[str, _Row] = {
    "embed": _Row("embedding", _embed),
    "positions": _Row("add", _positions),
    "attn.q_norm": _Row("norm", _head_norm),
    "attn.k_norm": _Row("norm", _head_norm),
    "attn.kv_norm": _Row("norm", _kv_norm),
    "attn.q_rope": _Row("rope", _rope),
    "attn.k_rope": _Row("rope", _rope),
    "attn.temperature": _Row("scale", _temperature),
    "attn.scores": _Row("scores", _scores),
    "attn.masked": _Row("mask", _masked),
    "attn.probs": _Row("softmax", _probs),
    "attn.mix": _Row("mix", _mix),
    "attn.q_absorb": _Row("linear", lambda here: f"{here.read()} · W_k, the queries' part of kv_up"),
    "attn.v_absorb": _Row("linear", lambda here: "mix · W_v, the values' part of kv_up"),
    "attn_add": _Row("add", _add),
    "mlp_add": _Row("add", _add),
    "mlp.router": _Row("linear", _router),
    "mlp.chosen": _Row("choice", _chosen),
    "mlp.experts.sum": _Row("mix", _sum),
    "mlp.shared_gate": _Row("linear", lambda here: f"{here.read()} · wᵀ"),
    "mlp.shared_add": _Row(
        "add", lambda here: "sum + down" + (" · σ(shared_gate)" if len(here.reads) > 2 else "")
    ),
    "head": _Row("linear", _head),
}
"""By the whole name within the layer."""

ENDINGS: Mapping[str, _Row] = {
    "_norm": _Row("norm", _norm),
    ".act": _Row("act", _act),
    ".gate": _Row("linear", _mlp_linear),
    ".down": _Row("linear", _mlp_linear),
    ".up": _Row("linear", _mlp_linear),
    "": _Row("linear", _linear),
}
"""By the end of the name, for what is not in `ROWS`: the matrices of attention come last."""
