"""The two sides of a comparison, and comparing them without keeping all of both in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from openbook.model import Decoder
from openbook.spec.model import ModelSpec
from openbook.trace.diff import Report, diff, tolerance_for
from openbook.trace.flow import last_of_layer
from openbook.trace.hf import parameters_of, record_transformers
from openbook.trace.names import Only
from openbook.trace.reasons.evidence import weights_apart as parameters_apart
from openbook.trace.record import record
from openbook.trace.rows import op_rows
from openbook.trace.runs import record_cached, record_padded
from openbook.trace.schema import Trace
from openbook.trace.tensors import dtype_of

Way = Literal["plain", "cached", "padded"]

BUDGET = 2**30
"""Bytes of steps that the two sides together hold at once, unless a single layer's are more."""


@dataclass(frozen=True, eq=False)
class Side:
    """One way to run ids [1, T]: `record(ids, only)`.

    `dtype` is that of the matrices while they compute, `stored` the one they have in their file, and
    `parameters` what they are, under our names.
    """

    spec: ModelSpec
    dtype: str
    stored: str
    parameters: Mapping[str, Tensor]
    record: Callable[[Tensor, Only | None], Trace]


def ours(decoder: Decoder, way: Way = "plain", stored: str | None = None) -> Side:
    """Our own model: at once, in pieces through a cache, or in a batch beside padding."""

    def run(ids: Tensor, only: Only | None) -> Trace:
        match way:
            case "plain":
                return record(decoder, ids, only=only)
            case "cached":
                return record_cached(decoder, ids, only)
            case "padded":
                return record_padded(decoder, ids, only)

    dtype = dtype_of(decoder.embed.weight)
    return Side(decoder.spec, dtype, stored or dtype, dict(decoder.named_parameters()), run)


def theirs(model: Any, spec: ModelSpec, stored: str | None = None) -> Side:
    """transformers' model, at once. `spec` is our reading of the same configuration."""

    def run(ids: Tensor, only: Only | None) -> Trace:
        return record_transformers(model, spec, ids, only)

    dtype = dtype_of(model.get_input_embeddings().weight)
    return Side(spec, dtype, stored or dtype, parameters_of(model, spec), run)


def compare(a: Side, b: Side, ids: Tensor, tolerance: float | None = None, budget: int = BUDGET) -> Report:
    """`diff` of the two sides, some layers at a time if all of them would take more than `budget` bytes.

    Each group of layers is one run of both sides. A group with a difference is the last one; the logits
    are compared in any case. `tolerance` defaults to `tolerance_of` the sides.
    """
    if tolerance is None:
        tolerance = tolerance_of(a, b)

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


def tolerance_of(a: Side, b: Side) -> float:
    """What rounding may do in the first layer: that of the two dtypes, or of weights that are stored in two
    types, as far as they really differ.

    Eight times their relative difference is allowed. Measured on SmolLM2-135M: weights in bf16, Q8_0 and
    Q4_0 are 1.3e-3, 5.6e-3 and 8.7e-2 from their own, and move the steps, each over the root of its depth, by
    at most 3.8, 5.0 and 4.7 times that.
    """
    computing = tolerance_for(a.dtype, b.dtype)
    if a.stored == b.stored:
        return computing
    return max(computing, min(8 * weights_apart(a, b), tolerance_for(a.stored, b.stored)))


def weights_apart(a: Side, b: Side, sample: int = 32) -> float:
    """The median relative difference of the two sides' matrices, of `sample` of them: a wrong one, or a
    family of wrong ones, does not move it."""
    matrices = [name for name, x in a.parameters.items() if x.ndim == 2 and name in b.parameters]
    matrices = [name for name in matrices if a.parameters[name].shape == b.parameters[name].shape]
    gaps = sorted(
        parameters_apart(a.parameters[name], b.parameters[name])
        for name in matrices[:: len(matrices) // sample + 1]
    )
    return gaps[len(gaps) // 2] if gaps else 0.0


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
