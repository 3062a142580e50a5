"""Every weight of a model: its name, shape, formula and count, derived from the spec alone.

The rows read like the appendix of a paper: `layers.0.attn.q.weight  (H·K, D)  H·K·D = 589,824`.
Shapes are PyTorch's, (out, in); a paper that multiplies from the right writes (in, out).

Equal layers are booked once. A `Section` is a list of rows and the layers it stands for, so that a
total costs as many additions as the spec has kinds of layers, not as many as it has layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from openbook.spec.model import (
    Attention,
    Block,
    Experts,
    HeadNorm,
    LatentAttention,
    Learned,
    Mlp,
    ModelSpec,
    Norm,
)

Kind = Literal["embedding", "positions", "matrix", "bias", "norm", "correction", "sinks"]


class LedgerError(ValueError):
    """A question the ledger cannot answer: an unknown dtype, an impossible workload."""


# --- sizes --------------------------------------------------------------------------------------

DTYPES: dict[str, tuple[int, int]] = {
    "fp64": (1, 8), "fp32": (1, 4), "fp16": (1, 2), "bf16": (1, 2), "fp8": (1, 1), "int8": (1, 1),
    "q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22), "q4_1": (32, 20), "q4_0": (32, 18),
    "q6_k": (256, 210), "q5_k": (256, 176), "q4_k": (256, 144),
}  # fmt: skip
"""Values per block, bytes per block. The quantised ones are GGUF's, their scales included."""

_ALIASES = {
    "float64": "fp64", "f64": "fp64", "double": "fp64",
    "float32": "fp32", "f32": "fp32", "float": "fp32",
    "float16": "fp16", "f16": "fp16", "half": "fp16",
    "bfloat16": "bf16", "float8": "fp8", "i8": "int8",
}  # fmt: skip


def dtype_name(name: str) -> str:
    """The ledger's name of a dtype: `float32`, `F32` and `torch.float32` are all `fp32`."""
    plain = name.lower().removeprefix("torch.")
    plain = _ALIASES.get(plain, plain)
    if plain not in DTYPES:
        raise LedgerError(f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}")
    return plain


def nbytes(count: int, dtype: str) -> int:
    """Bytes of `count` values. A quantised dtype takes whole blocks."""
    values, size = DTYPES[dtype_name(dtype)]
    return -(-count // values) * size


def evaluate(formula: str, numbers: Mapping[str, int]) -> int:
    """The value of a product such as "4·H·K·D" or "H·(N+R)·D".

    A factor is a number, a letter of the legend, or a sum of such in parentheses.
    """
    return math.prod(_value(factor, numbers) for factor in formula.split("·")) if formula else 1


def spell(formula: str, numbers: Mapping[str, int]) -> str:
    """The same product in numbers: "4·12·64·768"."""
    return "·".join(str(_value(factor, numbers)) for factor in formula.split("·"))


def _value(factor: str, numbers: Mapping[str, int]) -> int:
    if factor.startswith("("):
        return sum(_value(term, numbers) for term in factor[1:-1].split("+"))
    return int(factor) if factor.isdigit() else numbers[factor]


LETTERS = {
    "B": "sequences", "T": "new tokens", "S": "visible tokens", "V": "vocabulary", "D": "width",
    "P": "rows of learned positions", "L": "layers", "H": "query heads", "G": "key/value heads",
    "K": "head size", "Q": "rank of queries", "C": "rank of keys and values", "N": "head size without rope",
    "R": "head size with rope", "U": "value head size", "F": "feed-forward width", "E": "experts",
    "A": "active experts", "J": "shared expert's width",
}  # fmt: skip
"""The legend. In a layer with experts F is the width of one of them."""


def model_numbers(spec: ModelSpec) -> dict[str, int]:
    """The letters that hold for the whole model: D, V, L, and P if positions are learned."""
    numbers = {"D": spec.d_model, "V": spec.vocab_size, "L": spec.n_layers}
    if isinstance(spec.positions, Learned):
        numbers["P"] = spec.positions.n_rows
    return numbers


def block_numbers(block: Block) -> dict[str, int]:
    """The letters of one layer: H, G, K, F; of latent attention H, Q, C, N, R, U; of experts E, A, F, J."""
    return _attention_numbers(block.attn) | _mlp_numbers(block.mlp)


def _attention_numbers(attn: Attention | LatentAttention) -> dict[str, int]:
    if isinstance(attn, Attention):
        return {"H": attn.n_heads, "G": attn.n_kv_heads, "K": attn.head_dim}
    ranks = {"C": attn.kv_rank} if attn.q_rank is None else {"Q": attn.q_rank, "C": attn.kv_rank}
    return {"H": attn.n_heads, **ranks, "N": attn.nope_dim, "R": attn.rope_dim, "U": attn.v_dim}


def _mlp_numbers(mlp: Mlp | Experts) -> dict[str, int]:
    if isinstance(mlp, Mlp):
        return {"F": mlp.d_ff}
    shared = {} if mlp.shared is None else {"J": mlp.shared.mlp.d_ff}
    return {"E": mlp.n_experts, "A": mlp.n_active, "F": mlp.expert.d_ff, **shared}


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One weight. `count` values of `dtype` take `bytes`; `formula` is the count in letters.

    The dtype is the ledger's, or fp32 for a router's corrections, which every model keeps so.
    `active` is how many of them one token uses: of E experts' weights those of A experts, else all.
    `part` is the module of the layer (or of the model) that owns it: attn, mlp, attn_norm, embed, head.
    `tie` names the row whose storage this one shares; such a row adds nothing to a total of storages.
    """

    name: str
    letters: tuple[str, ...]
    shape: tuple[int, ...]
    count: int
    active: int
    kind: Kind
    layer: int | None
    part: str
    formula: str
    dtype: str
    bytes: int
    tie: str | None = None


Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Section(Generic[Row]):
    """Rows that occur once for each of `layers`, or once in the model where `layers` is None.

    Inside a layer the rows' names start below it (`attn.q.weight`), and their `layer` is None.
    """

    layers: tuple[int, ...] | None
    rows: tuple[Row, ...]

    @property
    def times(self) -> int:
        """How often every row of this section occurs."""
        return 1 if self.layers is None else len(self.layers)


def sum_sections(sections: Iterable[Section[Row]], value: Callable[[Row], int]) -> int:
    """The sum of `value` over all rows of all layers."""
    return sum(section.times * sum(map(value, section.rows)) for section in sections)


LayerKinds = list[tuple[Block, tuple[int, ...]]]
"""Each distinct block with all the layers that use it. The scale of scores, on which no count depends and
which may be every layer's own (GPT-2's option), makes no difference."""


def layer_kinds(spec: ModelSpec) -> LayerKinds:
    """The distinct blocks of a spec in the order of their first layers."""
    # Most specs repeat one object: asking for identity first spares hashing it 10,000 times.
    by_identity: dict[int, list[int]] = {}
    for layer, block in enumerate(spec.layers):
        by_identity.setdefault(id(block), []).append(layer)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for layers in by_identity.values():
        kinds.setdefault(_without_scale(spec.layers[layers[0]]), []).extend(layers)
    return [(spec.layers[layers[0]], tuple(sorted(layers))) for layers in kinds.values()]


def _without_scale(block: Block) -> tuple[object, ...]:
    parts = vars(block) | {"attn": type(block.attn)}
    return (*parts.values(), *(value for name, value in vars(block.attn).items() if name != "scale"))


def layer_sections(kinds: LayerKinds, rows_of: Callable[[Block], tuple[Row, ...]]) -> Iterator[Section[Row]]:
    """One section for each kind of layer; kinds with the same rows (other eps, other RoPE) are joined."""
    merged: dict[tuple[Row, ...], list[int]] = {}
    for block, layers in kinds:
        merged.setdefault(rows_of(block), []).extend(layers)
    return (Section(tuple(sorted(layers)), rows) for rows, layers in merged.items())


# --- the weights --------------------------------------------------------------------------------

Plan = Iterator[tuple[str, tuple[str, ...], Kind]]
"""Name, letters of the shape, kind."""


def _linear(name: str, out: str, into: str, bias: bool) -> Plan:
    yield f"{name}.weight", (out, into), "matrix"
    if bias:
        yield f"{name}.bias", (out,), "bias"


def _norm(name: str, norm: Norm | None, *shape: str) -> Plan:
    if norm is not None and norm.weight:
        yield f"{name}.weight", shape, "norm"
    if norm is not None and norm.bias:
        yield f"{name}.bias", shape, "norm"


def _head_norm(name: str, norm: HeadNorm | None, heads: str) -> Plan:
    if norm is not None:
        shapes = {"head": ("K",), "own": (heads, "K"), "width": (f"{heads}·K",)}
        yield from _norm(name, norm, *shapes[norm.over])


def _block_plan(block: Block) -> Plan:
    yield from _norm("attn_norm", block.attn_norm, "D")
    if isinstance(block.attn, Attention):
        yield from _attention_plan(block.attn)
    else:
        yield from _latent_plan(block.attn)
    yield from _norm("attn_out_norm", block.attn_out_norm, "D")
    yield from _norm("attn_add_norm", block.attn_add_norm, "D")
    yield from _norm("mlp_norm", block.mlp_norm, "D")
    if isinstance(block.mlp, Mlp):
        yield from _mlp_plan("mlp", block.mlp, "F")
    else:
        yield from _experts_plan(block.mlp)
    yield from _norm("mlp_out_norm", block.mlp_out_norm, "D")
    yield from _norm("mlp_add_norm", block.mlp_add_norm, "D")
    yield from _norm("end_norm", block.end_norm, "D")


def _attention_plan(attn: Attention) -> Plan:
    yield from _linear("attn.q", "H·K", "D", attn.q_bias)
    yield from _linear("attn.k", "G·K", "D", attn.k_bias)
    yield from _linear("attn.v", "G·K", "D", attn.v_bias)
    yield from _head_norm("attn.q_norm", attn.q_norm, "H")
    yield from _head_norm("attn.k_norm", attn.k_norm, "G")
    if attn.sinks:
        yield "attn.sinks", ("H",), "sinks"
    yield from _linear("attn.o", "D", "H·K", attn.o_bias)


def _latent_plan(attn: LatentAttention) -> Plan:
    if attn.q_rank is None:
        yield from _linear("attn.q", "H·(N+R)", "D", False)
    else:
        yield from _linear("attn.q_down", "Q", "D", attn.down_bias)
        yield from _norm("attn.q_norm", attn.q_norm, "Q")
        yield from _linear("attn.q_up", "H·(N+R)", "Q", False)
    yield from _linear("attn.kv_down", "(C+R)", "D", attn.down_bias)
    yield from _norm("attn.kv_norm", attn.kv_norm, "C")
    yield from _linear("attn.kv_up", "H·(N+U)", "C", False)
    yield from _linear("attn.o", "D", "H·U", attn.o_bias)


def _mlp_plan(name: str, mlp: Mlp, width: str) -> Plan:
    if mlp.gated:
        yield from _linear(f"{name}.gate", width, "D", mlp.up_bias)
    yield from _linear(f"{name}.up", width, "D", mlp.up_bias)
    yield from _linear(f"{name}.down", "D", width, mlp.down_bias)


def _experts_plan(experts: Experts) -> Plan:
    yield from _linear("mlp.router", "E", "D", experts.router.bias)
    if experts.router.correction:
        yield "mlp.router.correction", ("E",), "correction"
    for name, letters, kind in _mlp_plan("mlp.experts", experts.expert, "F"):
        yield name, ("E", *letters), kind
    if experts.shared is not None:
        yield from _mlp_plan("mlp.shared", experts.shared.mlp, "J")
        if experts.shared.gated:
            yield from _linear("mlp.shared_gate", "1", "D", False)


def _input_plan(spec: ModelSpec) -> Plan:
    yield "embed.weight", ("V", "D"), "embedding"
    if isinstance(spec.positions, Learned):
        yield "positions.weight", ("P", "D"), "positions"
    yield from _norm("embed_norm", spec.embed_norm, "D")


def _output_plan(spec: ModelSpec) -> Plan:
    yield from _norm("final_norm", spec.final_norm, "D")
    yield from _linear("head", "V", "D", spec.head.bias)


def is_routed(name: str) -> bool:
    """Whether a weight (or step) of a layer is that of the experts a router chooses among."""
    return name.startswith("mlp.experts.")


def _rows(plan: Plan, numbers: Mapping[str, int], dtype: str, tied: bool = False) -> tuple[TensorRow, ...]:
    rows = []
    for name, letters, kind in plan:
        shape = tuple(evaluate(axis, numbers) for axis in letters)
        count = math.prod(shape)
        # Corrections decide by differences that fewer bits round away.
        own = "fp32" if kind == "correction" and dtype != "fp64" else dtype
        rows.append(
            TensorRow(
                name=name,
                letters=letters,
                shape=shape,
                count=count,
                active=count // numbers["E"] * numbers["A"] if is_routed(name) else count,
                kind=kind,
                layer=None,
                part=name.split(".")[0],
                formula="·".join(letter for letter in letters if letter != "1"),
                dtype=own,
                bytes=nbytes(count, own),
                tie="embed.weight" if tied and name == "head.weight" else None,
            )
        )
    return tuple(rows)


def block_rows(spec: ModelSpec, block: Block, dtype: str) -> tuple[TensorRow, ...]:
    """The weights of one layer, named below it, in the order in which a forward pass meets them."""
    return _rows(_block_plan(block), model_numbers(spec) | block_numbers(block), dtype)


def input_rows(spec: ModelSpec, dtype: str) -> tuple[TensorRow, ...]:
    """The token table, the learned positions and the norm of both, if there are any."""
    return _rows(_input_plan(spec), model_numbers(spec), dtype)


def output_rows(spec: ModelSpec, dtype: str) -> tuple[TensorRow, ...]:
    """The final norm and the head; a tied head is listed, and says whose storage it shares."""
    return _rows(_output_plan(spec), model_numbers(spec), dtype, tied=spec.head.tied)


def tensor_sections(spec: ModelSpec, kinds: LayerKinds, dtype: str) -> list[Section[TensorRow]]:
    """All weights, each kind of layer once."""
    return [
        Section(None, input_rows(spec, dtype)),
        *layer_sections(kinds, lambda block: block_rows(spec, block, dtype)),
        Section(None, output_rows(spec, dtype)),
    ]


def tensor_rows(sections: Iterable[Section[TensorRow]], n_layers: int) -> Iterator[TensorRow]:
    """All weights one by one under their full names, layer after layer."""
    return (
        row if layer is None else replace(row, name=f"layers.{layer}.{row.name}", layer=layer)
        for layer, row in unfold(sections, n_layers)
    )


def unfold(sections: Iterable[Section[Row]], n_layers: int) -> Iterator[tuple[int | None, Row]]:
    """Every row with its layer, in the model's order: what precedes the layers, the layers, what follows."""
    first, *kinds, last = sections
    of_layer: list[tuple[Row, ...]] = [()] * n_layers
    for kind in kinds:
        for layer in kind.layers or ():
            of_layer[layer] = kind.rows
    yield from ((None, row) for row in first.rows)
    for layer, rows in enumerate(of_layer):
        yield from ((layer, row) for row in rows)
    yield from ((None, row) for row in last.rows)


# --- what the words mean ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Params:
    """Counts of parameters. The same word means different things to different authors, so each field
    has its definition in `DEFINITIONS`, to be printed beside the number.
    """

    total: int
    embedding: int
    non_embedding: int
    without_positions: int
    without_corrections: int
    block_matrices: int
    weights_only: int
    active: int
    active_excl_input_embedding: int
    active_non_embedding: int
    state_dict: int

    @property
    def definitions(self) -> dict[str, str]:
        """Field → what it counts, in words."""
        return DEFINITIONS


DEFINITIONS = {
    "total": "every parameter; a storage with two names counts once",
    "embedding": "token table, positions, head (its weight unless tied)",
    "non_embedding": "total less embedding: the layers and the norms outside",
    "without_positions": "total less the learned positions",
    "without_corrections": "total less the routers' corrections (Hugging Face: buffers)",
    "block_matrices": "the layers' matrices: no tables, head, biases, norms",
    "weights_only": "matrices and tables: no biases, norms, sinks, corrections",
    "active": "of E experts only the A that a token uses; both embeddings in",
    "active_excl_input_embedding": "active less the token table, unless the head shares it",
    "active_non_embedding": "active less embedding",
    "state_dict": "values in a file that stores a tied head a second time",
}


def count_params(sections: list[Section[TensorRow]]) -> Params:
    """Adds the rows up under every definition."""

    def count(wanted: Callable[[TensorRow], bool]) -> int:
        return sum_sections(sections, lambda row: row.count if wanted(row) else 0)

    total = count(lambda row: row.tie is None)
    active = sum_sections(sections, lambda row: 0 if row.tie else row.active)
    embedding = count(lambda row: row.part in ("embed", "positions", "head") and row.tie is None)
    tied = count(lambda row: row.tie is not None)
    return Params(
        total=total,
        embedding=embedding,
        non_embedding=total - embedding,
        without_positions=total - count(lambda row: row.kind == "positions"),
        without_corrections=total - count(lambda row: row.kind == "correction"),
        block_matrices=count(lambda row: row.kind == "matrix" and row.part != "head"),
        weights_only=count(lambda r: r.kind in ("embedding", "positions", "matrix") and r.tie is None),
        active=active,
        active_excl_input_embedding=active - (0 if tied else count(lambda row: row.kind == "embedding")),
        active_non_embedding=active - embedding,
        state_dict=total + tied,
    )
