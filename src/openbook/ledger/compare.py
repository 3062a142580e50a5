"""Two models side by side: their sizes, their weights row by row, and what each figure comes to in both.

Rows are joined by name. Layers are folded: a row inside them holds every layer that has such a weight, with
each shape that it takes there, so that the rows of one side always add up to that model's parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

from openbook.ledger import Ledger
from openbook.ledger.ops import Workload
from openbook.ledger.table import SCHEMA, Column, Table, describe, to_json
from openbook.ledger.tensors import LETTERS, TensorRow, block_numbers, model_numbers

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """What one model has of a weight: each shape and in how many layers, and the parameters of all.

    `tied` says that its storage is another row's, and that it adds nothing.
    """

    shapes: tuple[tuple[Shape, int], ...] = ()
    count: int = 0
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One weight in both models. Inside the layers its name starts below the layer."""

    name: str
    in_layers: bool
    a: Side
    b: Side

    @property
    def difference(self) -> int:
        """The parameters that the second model has more."""
        return self.b.count - self.a.count


@dataclass(frozen=True, slots=True)
class Size:
    """A letter of the legend, or a size without one: the values it takes, and in how many layers.

    () where it has no meaning; a window of 0 is none.
    """

    letter: str
    meaning: str
    a: tuple[tuple[int, int], ...]
    b: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both models, and in words what is counted."""

    name: str
    a: int
    b: int
    unit: Literal["parameters", "bytes", "FLOPs"]
    meaning: str


# --- weights ------------------------------------------------------------------------------------


def rows(a: Ledger, b: Ledger) -> list[Row]:
    """All weights of both models, in the order of a forward pass."""
    (first_a, layers_a, last_a), (first_b, layers_b, last_b) = _sides(a), _sides(b)
    return [
        *_joined(first_a, first_b, in_layers=False),
        *_joined(layers_a, layers_b, in_layers=True),
        *_joined(last_a, last_b, in_layers=False),
    ]


def _sides(book: Ledger) -> tuple[dict[str, Side], dict[str, Side], dict[str, Side]]:
    """The weights before, in and after the layers."""
    first, *kinds, last = book.tensor_sections
    shapes: dict[str, Counter[Shape]] = {}
    for kind in kinds:
        for row in kind.rows:
            shapes.setdefault(row.name, Counter())[row.shape] += kind.times
    names = reduce(_merged, ([row.name for row in kind.rows] for kind in kinds))
    return _outside(first.rows), {name: _side(shapes[name]) for name in names}, _outside(last.rows)


def _outside(members: Iterable[TensorRow]) -> dict[str, Side]:
    return {
        row.name: Side(((row.shape, 1),), 0 if row.tie else row.count, tied=row.tie is not None)
        for row in members
    }


def _side(shapes: Counter[Shape]) -> Side:
    return Side(tuple(shapes.items()), sum(times * _count(shape) for shape, times in shapes.items()))


def _count(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _joined(a: dict[str, Side], b: dict[str, Side], in_layers: bool) -> Iterator[Row]:
    for name in _merged(list(a), list(b)):
        yield Row(name, in_layers, a.get(name, Side()), b.get(name, Side()))


def _merged(a: list[str], b: list[str]) -> list[str]:
    """All names, each module of `b` that `a` lacks behind the one it follows in `b`."""
    modules = list(dict.fromkeys(map(_module, a)))
    before = None
    for module in dict.fromkeys(map(_module, b)):
        if module not in modules:
            modules.insert(0 if before is None else modules.index(before) + 1, module)
        before = module
    return sorted(dict.fromkeys([*a, *b]), key=lambda name: modules.index(_module(name)))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


# --- sizes and figures --------------------------------------------------------------------------


def sizes(a: Ledger, b: Ledger) -> list[Size]:
    """The letters that either model has."""
    of_a, of_b = _values(a), _values(b)
    return [
        Size(
            name if meaning else "",
            meaning or name,
            tuple(of_a.get(name, {}).items()),
            tuple(of_b.get(name, {}).items()),
        )
        for name, meaning in {**LETTERS, _WINDOW: "", _CACHED: ""}.items()
        if name in of_a or name in of_b
    ]


_WINDOW, _CACHED = "window of attention", "values cached of a token"


def _values(book: Ledger) -> dict[str, Counter[int]]:
    values = {letter: Counter([number]) for letter, number in model_numbers(book.spec).items()}
    for block, layers in book.kinds:
        for letter, number in block_numbers(block).items():
            values.setdefault(letter, Counter())[number] += len(layers)
    for row in book.cache(dtype="int8"):  # one byte a value
        values.setdefault(_WINDOW, Counter())[row.window or 0] += len(row.layers)
        values.setdefault(_CACHED, Counter())[row.token_bytes] += len(row.layers)
    return values


def figures(a: Ledger, b: Ledger, workload: Workload) -> list[Figure]:
    """Parameters under every definition that tells something, bytes, FLOPs and memory, in both models."""
    return [
        *_parameters(a, b),
        Figure("weights", a.weight_bytes, b.weight_bytes, "bytes", _dtypes(a, b) + ", each storage once"),
        *_cache(a, b, workload),
        *_work(a, b, workload),
        *_memory(a, b, workload),
    ]


def _parameters(a: Ledger, b: Ledger) -> Iterator[Figure]:
    for name, meaning in a.params.definitions.items():
        values = getattr(a.params, name), getattr(b.params, name)
        # A count that is the total in both says nothing: without experts all parameters are active.
        if name == "total" or values != (a.params.total, b.params.total):
            yield Figure(name, *values, "parameters", meaning)


def _dtypes(a: Ledger, b: Ledger) -> str:
    return a.dtype if a.dtype == b.dtype else f"{a.dtype} and {b.dtype}"


def _cache(a: Ledger, b: Ledger, w: Workload) -> Iterator[Figure]:
    dtype = w.activation_dtype(a.dtype)
    context = min(a.spec.max_positions, b.spec.max_positions)
    token = a.kv_bytes_per_token(dtype), b.kv_bytes_per_token(dtype)
    expanded = a.kv_bytes_per_token_expanded(dtype), b.kv_bytes_per_token_expanded(dtype)
    yield Figure("KV a token", *token, "bytes", f"all layers, {dtype}, latents as they are, windows ignored")
    if expanded != token:
        yield Figure("KV a token, expanded", *expanded, "bytes", "were latents kept as every head's K and V")
    whole = a.kv_bytes(1, context, dtype), b.kv_bytes(1, context, dtype)
    yield Figure(f"KV of {context:,}", *whole, "bytes", "one sequence of so many tokens, windows capped")


def _work(a: Ledger, b: Ledger, w: Workload) -> Iterator[Figure]:
    token = a.flops_per_token(), b.flops_per_token()
    yield Figure("FLOPs a token", *token, "FLOPs", "forward, the first token, logits and routers in")
    of_a, of_b = a.totals(w), b.totals(w)
    said = "; ".join(dict.fromkeys([*w.conventions(), "routers in"]))
    yield Figure("FLOPs of the run", of_a.flops, of_b.flops, "FLOPs", f"{describe(w)}: {said}")
    if of_a.router_flops or of_b.router_flops:
        yield Figure(
            "FLOPs of routers", of_a.router_flops, of_b.router_flops, "FLOPs", "among those of the run"
        )
    read = a.bytes_per_token(w.past, w.batch), b.bytes_per_token(w.past, w.batch)
    meaning = (
        f"weights once, of experts at most min(E, B·A), and the caches of {w.batch:,} × {w.past:,} tokens"
    )
    yield Figure("read for a token", *read, "bytes", meaning)


def _memory(a: Ledger, b: Ledger, w: Workload) -> Iterator[Figure]:
    of_a, of_b = a.memory(w), b.memory(w)
    meanings = {row.name: row.meaning for row in (*of_a.rows, *of_b.rows)}
    for name, meaning in meanings.items():
        if name != "weights" or w.mode == "train":
            yield Figure(f"memory: {name}", of_a[name], of_b[name], "bytes", meaning)
    yield Figure("memory of the run", of_a.total, of_b.total, "bytes", f"{describe(w)}: weights and these")


# --- Markdown, CSV and JSON ---------------------------------------------------------------------


def tables(a: Ledger, b: Ledger, workload: Workload) -> list[Table]:
    """The rows and the figures with exact numbers, for Markdown and CSV."""
    names = titles(a, b)
    weights = Table(
        f"Weights of {names[0]} and {names[1]}",
        (
            Column("weight"),
            *(Column(f"{kind}{name}", unit) for name in names for kind, unit in _WEIGHT_COLUMNS),
            Column("difference", "count"),
        ),
        tuple(
            (
                f"layers.*.{row.name}" if row.in_layers else row.name,
                shapes(row.a), row.a.count, shapes(row.b), row.b.count, row.difference,
            )
            for row in rows(a, b)
        ),
        ("Shapes are PyTorch's (out, in), times the layers that have them.",),
    )  # fmt: skip
    counted = Table(
        f"Figures of {names[0]} and {names[1]}",
        (
            Column("figure"),
            *(Column(name, "count") for name in names),
            Column("unit"),
            Column("what is counted"),
        ),
        tuple((f.name, f.a, f.b, f.unit, f.meaning) for f in figures(a, b, workload)),
    )
    return [weights, counted]


_WEIGHT_COLUMNS: tuple[tuple[str, Literal["text", "count"]], ...] = (("shape in ", "text"), ("", "count"))


def titles(a: Ledger, b: Ledger) -> tuple[str, str]:
    """What to call the two models, even where both have one name or none."""
    first, second = a.spec.name or "the first", b.spec.name or "the second"
    return (first, second) if first != second else (f"{first} (1)", f"{second} (2)")


def shapes(side: Side) -> str:
    """ "18432×7168 ×3, 2048×7168 ×58"."""
    return ", ".join(
        "×".join(map(str, shape)) + (f" ×{times}" if times > 1 else "") for shape, times in side.shapes
    )


def to_json_of_both(a: Ledger, b: Ledger, workload: Workload) -> dict[str, Any]:
    """Both ledgers as `to_json` writes them, and their rows and figures joined."""

    def side(side: Side) -> dict[str, Any]:
        shapes = [{"shape": shape, "times": times} for shape, times in side.shapes]
        return {"shapes": shapes, "count": side.count, "tied": side.tied}

    return {
        "schema": SCHEMA,
        "models": [to_json(a, workload), to_json(b, workload)],
        "rows": [
            {
                "name": row.name, "in_layers": row.in_layers, "a": side(row.a), "b": side(row.b),
                "difference": row.difference,
            }
            for row in rows(a, b)
        ],
        "figures": [
            {"name": f.name, "a": f.a, "b": f.b, "unit": f.unit, "meaning": f.meaning}
            for f in figures(a, b, workload)
        ],
    }  # fmt: skip
