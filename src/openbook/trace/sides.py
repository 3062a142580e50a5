"""The two sides of a comparison, and comparing them without keeping all of both in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from openbook.model import Decoder
from openbook.spec.model import ModelSpec
from openbook.trace.diff import Report, diff, tolerance_for
from openbook.trace.flow import last_of_layer
from openbook.trace.hf import record_transformers
from openbook.trace.record import Only, op_rows, record
from openbook.trace.runs import record_cached, record_padded
from openbook.trace.schema import Trace, dtype_of

Way = Literal["plain", "cached", "padded"]

BUDGET = 2**30
"""Bytes of steps that the two sides together hold at once, unless a single layer's are more."""


@dataclass(frozen=True)
class Side:
    """One way to run ids [1, T]: `record(ids, only)`. `dtype` is that of the matrices."""

    spec: ModelSpec
    dtype: str
    record: Callable[[Tensor, Only | None], Trace]


def ours(decoder: Decoder, way: Way = "plain") -> Side:
    """Our own model: at once, in pieces through a cache, or in a batch beside padding."""

    def run(ids: Tensor, only: Only | None) -> Trace:
        match way:
            case "plain":
                return record(decoder, ids, only=only)
            case "cached":
                return record_cached(decoder, ids, only)
            case "padded":
                return record_padded(decoder, ids, only)

    return Side(decoder.spec, dtype_of(decoder.embed.weight), run)


def theirs(model: Any, spec: ModelSpec) -> Side:
    """transformers' model, at once. `spec` is our reading of the same configuration."""
    dtype = dtype_of(model.get_input_embeddings().weight)
    return Side(spec, dtype, lambda ids, only: record_transformers(model, spec, ids, only))


def compare(a: Side, b: Side, ids: Tensor, tolerance: float | None = None, budget: int = BUDGET) -> Report:
    """`diff` of the two sides, some layers at a time if all of them would take more than `budget` bytes.

    Each group of layers is one run of both sides. A group with a difference is the last one; the logits
    are compared in any case.
    """
    if tolerance is None:
        tolerance = tolerance_for(a.dtype, b.dtype)

    def compared(only: Only) -> Report:
        return diff(a.record(ids, only), b.record(ids, only), tolerance)

    groups = list(layer_groups(a.spec, ids.shape[1], budget))
    report = Report([], {}, [], [])
    for group in groups:
        report = _together(report, compared(_steps_of(a.spec, group)))
        if report.first is None:
            continue
        if group is not groups[-1]:
            logits = compared(lambda name: name == "head")
            report = Report([*report.rows, *logits.rows], report.reasons, report.missing, report.unseen)
        break
    return report


def layer_groups(spec: ModelSpec, tokens: int, budget: int) -> Iterator[range]:
    """The layers in runs whose steps, twice and in fp32, take at most `budget` bytes; at least one each."""
    sizes = [0] * spec.n_layers
    for row in op_rows(spec, "fp32", 1, tokens):
        if row.layer is not None:
            sizes[row.layer] += 2 * 4 * math.prod(row.out_shape)
    start, held = 0, 0
    for layer, size in enumerate(sizes):
        if layer > start and held + size > budget:
            yield range(start, layer)
            start, held = layer, 0
        held += size
    yield range(start, spec.n_layers)


def _steps_of(spec: ModelSpec, group: range) -> Only:
    """The steps of these layers, what the first of them reads, and the steps outside that border on them."""
    before = last_of_layer(spec, group.start - 1) if group.start else ""

    def wanted(name: str) -> bool:
        if name.startswith("layers."):
            return int(name.split(".")[1]) in group or name == before
        return group.stop == spec.n_layers if name in ("final_norm", "head") else group.start == 0

    return wanted


def _together(one: Report, more: Report) -> Report:
    """The second report after the first; the step between them, which both have, once."""
    known = {row.name for row in one.rows}
    return Report(
        rows=[*one.rows, *(row for row in more.rows if row.name not in known)],
        reasons=one.reasons | more.reasons,
        missing=more.missing,
        unseen=[*one.unseen, *(name for name in more.unseen if name not in one.unseen)],
    )
