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

from openbook.spec.model import Block, Learned, ModelSpec, Norm

Kind = Literal["embedding", "positions", "matrix", "bias", "norm"]


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
    """The value of a product such as "4·H·K·D"; a factor is a number or a letter of the legend."""
    return math.prod(int(f) if f.isdigit() else numbers[f] for f in formula.split("·")) if formula else 1


def spell(formula: str, numbers: Mapping[str, int]) -> str:
    """The same product in numbers: "4·12·64·768"."""
    return "·".join(f if f.isdigit() else str(numbers[f]) for f in formula.split("·"))


def model_numbers(spec: ModelSpec) -> dict[str, int]:
    """The letters that hold for the whole model: D, V, L, and P if positions are learned."""
    numbers = {"D": spec.d_model, "V": spec.vocab_size, "L": spec.n_layers}
    if isinstance(spec.positions, Learned):
        numbers["P"] = spec.positions.n_positions
    return numbers


def block_numbers(block: Block) -> dict[str, int]:
    """The letters of one layer: H, G, K, F."""
    attn = block.attn
    return {"H": attn.n_heads, "G": attn.n_kv_heads, "K": attn.head_dim, "F": block.mlp.d_ff}


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One weight. `count` values of `dtype` take `bytes`; `formula` is the count in letters.

    `part` is the module of the layer (or of the model) that owns it: attn, mlp, attn_norm, embed, head.
    `tie` names the row whose storage this one shares; such a row adds nothing to a total of storages.
    """

    name: str
    letters: tuple[str, ...]
    shape: tuple[int, ...]
    count: int
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
"""Each distinct block with all the layers that use it."""


def layer_kinds(spec: ModelSpec) -> LayerKinds:
    """The distinct blocks of a spec in the order of their first layers."""
    # Most specs repeat one object: asking for identity first spares hashing it 100,000 times.
    by_identity: dict[int, list[int]] = {}
    for layer, block in enumerate(spec.layers):
        by_identity.setdefault(id(block), []).append(layer)
    kinds: dict[Block, list[int]] = {}
    for layers in by_identity.values():
        kinds.setdefault(spec.layers[layers[0]], []).extend(layers)
    return [(block, tuple(sorted(layers))) for block, layers in kinds.items()]


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


def _norm(name: str, norm: Norm | None, width: str) -> Plan:
    if norm is not None and norm.weight:
        yield f"{name}.weight", (width,), "norm"
    if norm is not None and norm.bias:
        yield f"{name}.bias", (width,), "norm"


def _block_plan(block: Block) -> Plan:
    attn, mlp = block.attn, block.mlp
    yield from _norm("attn_norm", block.attn_norm, "D")
    yield from _linear("attn.q", "H·K", "D", attn.q_bias)
    yield from _linear("attn.k", "G·K", "D", attn.k_bias)
    yield from _linear("attn.v", "G·K", "D", attn.v_bias)
    yield from _norm("attn.q_norm", attn.q_norm, "K")
    yield from _norm("attn.k_norm", attn.k_norm, "K")
    yield from _linear("attn.o", "D", "H·K", attn.o_bias)
    yield from _norm("attn_out_norm", block.attn_out_norm, "D")
    yield from _norm("attn_add_norm", block.attn_add_norm, "D")
    yield from _norm("mlp_norm", block.mlp_norm, "D")
    if mlp.gated:
        yield from _linear("mlp.gate", "F", "D", mlp.up_bias)
    yield from _linear("mlp.up", "F", "D", mlp.up_bias)
    yield from _linear("mlp.down", "D", "F", mlp.down_bias)
    yield from _norm("mlp_out_norm", block.mlp_out_norm, "D")
    yield from _norm("mlp_add_norm", block.mlp_add_norm, "D")
    yield from _norm("end_norm", block.end_norm, "D")


def _input_plan(spec: ModelSpec) -> Plan:
    yield "embed.weight", ("V", "D"), "embedding"
    if isinstance(spec.positions, Learned):
        yield "positions.weight", ("P", "D"), "positions"


def _output_plan(spec: ModelSpec) -> Plan:
    yield from _norm("final_norm", spec.final_norm, "D")
    yield from _linear("head", "V", "D", spec.head.bias)


def _rows(plan: Plan, numbers: Mapping[str, int], dtype: str, tied: bool = False) -> tuple[TensorRow, ...]:
    rows = []
    for name, letters, kind in plan:
        shape = tuple(evaluate(axis, numbers) for axis in letters)
        count = math.prod(shape)
        tie = "embed.weight" if tied and name == "head.weight" else None
        part, formula = name.split(".")[0], "·".join(letters)
        rows.append(
            TensorRow(
                name, letters, shape, count, kind, None, part, formula, dtype, nbytes(count, dtype), tie
            )
        )
    return tuple(rows)


def block_rows(spec: ModelSpec, block: Block, dtype: str) -> tuple[TensorRow, ...]:
    """The weights of one layer, named below it, in the order in which a forward pass meets them."""
    return _rows(_block_plan(block), model_numbers(spec) | block_numbers(block), dtype)


def input_rows(spec: ModelSpec, dtype: str) -> tuple[TensorRow, ...]:
    """The token table, and the learned positions if there are any."""
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
    block_matrices: int
    weights_only: int
    active: int
    active_excl_input_embedding: int
    state_dict: int

    @property
    def definitions(self) -> dict[str, str]:
        """Field → what it counts, in words."""
        return DEFINITIONS


DEFINITIONS = {
    "total": "every parameter; a storage with two names counts once",
    "embedding": "token table, positions, head (its weight unless tied)",
    "non_embedding": "total less embedding: the layers and the final norm",
    "without_positions": "total less the learned positions",
    "block_matrices": "the layers' matrices: no tables, head, biases, norms",
    "weights_only": "total less biases and norms",
    "active": "what one token's pass may use, both embeddings in",
    "active_excl_input_embedding": "active less the token table, unless the head shares it",
    "state_dict": "values in a file that stores a tied head a second time",
}


def count_params(sections: list[Section[TensorRow]]) -> Params:
    """Adds the rows up under every definition."""

    def count(wanted: Callable[[TensorRow], bool]) -> int:
        return sum_sections(sections, lambda row: row.count if wanted(row) else 0)

    total = count(lambda row: row.tie is None)
    positions = count(lambda row: row.kind == "positions")
    embedding = count(lambda row: row.part in ("embed", "positions", "head") and row.tie is None)
    tied = count(lambda row: row.tie is not None)
    return Params(
        total=total,
        embedding=embedding,
        non_embedding=total - embedding,
        without_positions=total - positions,
        block_matrices=count(lambda row: row.kind == "matrix" and row.part != "head"),
        weights_only=count(lambda row: row.kind not in ("bias", "norm") and row.tie is None),
        active=total,
        active_excl_input_embedding=total - (0 if tied else count(lambda row: row.kind == "embedding")),
        state_dict=total + tied,
    )
