"""The ledger for the page: the model as a strip of stages, and every row with its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from math import isqrt
from typing import Any

from openbook.ledger import CONVENTIONS, Ledger, OpRow, TensorRow, Workload
from openbook.ledger.table import grouped, layer_label
from openbook.ledger.tensors import LETTERS, block_numbers, model_numbers
from openbook.serve.formulas import describe
from openbook.spec.model import Experts, ModelSpec, to_dict
from openbook.spec.model import describe as in_words
from openbook.trace.rows import axes_of, trace_bytes
from openbook.trace.schema import local_name

MAX_TOKENS = 10_000_000
"""Of a question to the ledger, which answers any number, in integers of any size."""

UNFOLDED_LAYERS = 256
"""Models of more layers have each kind of layer listed once."""


def spec_numbers(spec: ModelSpec) -> dict[str, Any]:
    """The sizes that people name, of the first layer where layers differ, and the spec in words and whole."""
    first = block_numbers(spec.layers[0])
    return {
        "layers": spec.n_layers,
        "d_model": spec.d_model,
        "n_heads": first["H"],
        "n_kv_heads": first.get("G", first["H"]),
        "head_dim": first.get("K", first.get("N", 0) + first.get("R", 0)),
        "d_ff": first["F"],
        "experts": first.get("E"),
        "active_experts": first.get("A"),
        "vocab_size": spec.vocab_size,
        "max_positions": spec.max_positions,
        "tied": spec.head.tied,
        "kinds_of_layers": len(spec.folded()) if spec.n_layers <= UNFOLDED_LAYERS else None,
        "words": in_words(spec),
        "folded": to_dict(spec),
    }


def overview(spec: ModelSpec, dtype: str, tokens: int) -> dict[str, Any]:
    """The stages of a forward pass over `tokens` tokens, equal layers once, and each one's steps."""
    book = Ledger(spec, dtype)
    workload = Workload("prefill", new=tokens, last_only=False)
    params = _params_by_step(book.tensors)
    tied = {row.name.rpartition(".")[0]: row.tie for row in book.tensors if row.tie}
    rows = book.ops(workload)

    def stage(name: str, kind: str, members: Iterable[OpRow], layers: tuple[int, ...]) -> dict[str, Any]:
        steps = [
            {
                "name": row.name,
                "local": local_name(row.name),
                "kind": describe(spec, row.name).kind,
                "axes": axes_of(row),
                "shape": row.out_shape,
                "params": params.get(row.name, 0),
                "tied_to": tied.get(row.name),
                "flops": row.flops,
                "flops_formula": row.formula,
                "bytes": row.activation_bytes,
                "formula": describe(spec, row.name).formula,
            }
            for row in members
        ]
        return {
            "id": name,
            "kind": kind,
            "title": name,
            "count": len(layers) or 1,
            "layers": layers,
            "first_layer": layers[0] if layers else None,
            "params": sum(step["params"] for step in steps if not step["tied_to"]),
            "flops": sum(step["flops"] for step in steps),
            "steps": steps,
        }

    of_layer: dict[int | None, list[OpRow]] = {}
    for row in rows:
        of_layer.setdefault(row.layer, []).append(row)
    outside = {row.name: row for row in of_layer[None]}
    order = list(outside)
    before = [name for name in order if name not in ("final_norm", "head")]
    stages = [stage(before[0], "embedding", [outside[name] for name in before], ())]
    stages += [
        stage(f"layers.{layer_label(layers)}", "layers", of_layer[layers[0]], layers)
        for _, layers in book.kinds
    ]
    stages += [
        stage(name, "norm" if name == "final_norm" else "head", [outside[name]], ())
        for name in order
        if name in ("final_norm", "head")
    ]
    totals = book.totals(workload)
    return {
        "letters": {"B": 1, "T": tokens, "S": tokens, **model_numbers(spec), **block_numbers(spec.layers[0])},
        "meanings": LETTERS,
        "stages": stages,
        "totals": {"params": book.params.total, "flops": totals.flops, "bytes": book.weight_bytes},
        "conventions": book.conventions(workload),
        "dtype": dtype,
    }


def _params_by_step(tensors: Iterable[TensorRow]) -> Counter[str]:
    """Step → parameters that it reads, those that another step's weight shares included."""
    counts: Counter[str] = Counter()
    for row in tensors:
        owner = row.name.rpartition(".")[0]
        counts[f"{owner}.probs" if row.kind == "sinks" else owner] += row.count
    return counts


def ledger(
    spec: ModelSpec, dtype: str, mode: str, tokens: int, past: int, batch: int, attention: str
) -> dict[str, Any]:
    """The ledger's rows and totals for a workload, under its own words."""
    book = Ledger(spec, dtype)
    workload = Workload(
        mode if mode in ("train", "decode") else "prefill",  # type: ignore[arg-type]
        batch=batch,
        new=tokens,
        past=past,
        attention=attention,  # type: ignore[arg-type]
    )
    by = "tensor" if spec.n_layers <= UNFOLDED_LAYERS else "kind"
    memory = book.memory(workload)
    totals = book.totals(workload)
    return {
        "dtype": dtype,
        "activation_dtype": workload.activation_dtype(dtype),
        "workload": asdict(workload),
        "folded": by == "kind",
        "totals": {
            "params": asdict(book.params),
            "definitions": book.params.definitions,
            "weight_bytes": book.weight_bytes,
            "kv_bytes_per_token": book.kv_bytes_per_token(),
            "memory_bytes": memory.total,
            **{name: getattr(totals, name) for name in _TOTALS},
        },
        "conventions": book.conventions(workload),
        "attention_conventions": CONVENTIONS,
        "memory": [asdict(row) for row in memory.rows],
        "recipe": asdict(memory.recipe) if memory.recipe else None,
        "cache": [asdict(row) for row in book.cache(batch, workload.seen)],
        "tensors": [
            {
                "name": group.name,
                "local": group.row.name,
                "layer": _layer_of(group.name) if by == "tensor" else None,
                "group": group.row.part,
                "times": group.times,
                "shape": group.row.shape,
                "letters": group.row.letters,
                "formula": group.row.formula,
                "params": group.row.count,
                "active": group.row.active,
                "bytes": group.row.bytes,
                "dtype": group.row.dtype,
                "kind": group.row.kind,
                "tied": group.row.tie,
            }
            for group in grouped(book.tensor_sections, spec.n_layers, by)
        ],
        "steps": [
            {
                "name": group.name,
                "local": group.row.name,
                "layer": _layer_of(group.name) if by == "tensor" else None,
                "group": group.row.part,
                "times": group.times,
                "axes": axes_of(group.row),
                "shape": group.row.out_shape,
                "formula": group.row.formula,
                "numbers": group.row.numbers,
                "flops": group.row.flops,
                "bytes": group.row.activation_bytes,
                "weight_bytes": group.row.weight_bytes,
                "kv_read": group.row.kv_read,
                "kv_written": group.row.kv_written,
                "kept_bytes": group.row.kept_bytes,
            }
            for group in grouped(book.op_sections(workload), spec.n_layers, by)
        ],
    }


_TOTALS = ("flops", "router_flops", "activation_bytes", "kept_bytes", "kv_read", "kv_written")


def _layer_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def trace_growth(spec: ModelSpec, dtype: str) -> tuple[int, int]:
    """b and c: a run of T tokens takes at most b·T + c·T² bytes.

    The tensors of its trace, exactly; a mask of a byte for each query and key, which all layers of one window
    share; of each token the chosen experts' numbers, 8 bytes each; each sink's column of the probabilities.
    """
    one, two = (trace_bytes(spec, dtype, 1, tokens) for tokens in (1, 2))
    squared = (two - 2 * one) // 2
    masks = len({block.attn.window for block in spec.layers})
    chosen = sum(8 * block.mlp.n_active for block in spec.layers if isinstance(block.mlp, Experts))
    sinks = sum(4 * block.attn.n_heads for block in spec.layers if getattr(block.attn, "sinks", False))
    return one - squared + chosen + sinks, squared + masks


def longest_trace(growth: tuple[int, int], limit: int) -> int:
    """The most tokens whose trace takes at most `limit` bytes."""
    linear, squared = growth
    if squared == 0:
        return limit // linear
    return (isqrt(linear**2 + 4 * squared * limit) - linear) // (2 * squared)
