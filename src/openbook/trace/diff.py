"""Two runs of the same tokens, step by step: the first step that differs, by how much, where, and why.

The measure is the relative error of a token's vector, ‖a - b‖ / ‖b‖ over everything but batch and tokens,
and of those the largest. Rounding adds up from layer to layer like a random walk, so what is allowed
grows with the root of the number of layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from openbook.spec.model import Experts, ModelSpec
from openbook.trace.flow import nearest
from openbook.trace.reasons import Reason, explain
from openbook.trace.schema import Trace, local_name

TOLERANCES = {"fp64": 2e-5, "fp32": 2e-5, "fp16": 5e-3, "bf16": 1e-1, "q8_0": 5e-2}
"""What rounding may do to a token's vector in the first layer, by the coarser type of the two sides.

Measured on SmolLM2-135M against fp32, where the last of 30 layers allows 5.5 times as much: transformers in
fp32 3e-6, ours in fp16 8e-3 and in bf16 9e-2, transformers in bf16 (its residual stream too) 2e-1.
"""

COARSE = 6e-1
"""The same for weights of fewer than eight bits."""


@dataclass(frozen=True)
class Difference:
    """One step in both traces.

    `relative` is the largest relative error of a token's vector, `allowed` what rounding may do. `at` says
    where the two are furthest apart, one index for each of `axes`; `a` and `b` stand there, `max_abs` apart.
    Tensors of two shapes, or infinite in two patterns, are infinitely far apart.
    """

    name: str
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    allowed: float
    relative: float = math.inf
    max_abs: float = math.inf
    at: tuple[int, ...] = ()
    a: float = math.nan
    b: float = math.nan

    @property
    def ok(self) -> bool:
        return self.relative <= self.allowed


@dataclass(frozen=True)
class Report:
    """All steps that both sides have, in order.

    `reasons` has each step that differs although nothing that it reads does: these are the faults, and all
    other differences follow from them. The value says why; None, if no known reason holds. `missing` are
    steps that one of the two models does not have, `unseen` those that one side could not record.
    """

    rows: list[Difference]
    reasons: dict[str, Reason | None]
    missing: list[str]
    unseen: list[str]

    @property
    def first(self) -> Difference | None:
        """The first step that differs beyond rounding; None if there is none."""
        return next((row for row in self.rows if not row.ok), None)

    @property
    def ok(self) -> bool:
        """Whether both sides have the same steps and none differs."""
        return self.first is None and not self.missing


def diff(a: Trace, b: Trace, tolerance: float | None = None) -> Report:
    """Compares two traces of the same ids. `tolerance` is what may differ in the first layer; by default it
    follows from the dtypes of the two (`TOLERANCES`). b is the reference: errors are relative to it.

    Raises `ValueError` for traces of different ids.
    """
    if not torch.equal(a.ids, b.ids):
        raise ValueError("the two traces are of different ids, so no step can be compared")
    if tolerance is None:
        tolerance = tolerance_for(a.dtype, b.dtype)
    both = [name for name in a.tensors if name in b]
    rows = [difference(a, b, name, tolerance * depth(a.spec, name) ** 0.5) for name in both]
    wrong = {row.name for row in rows if not row.ok}
    faults = [row.name for row in rows if not row.ok and wrong.isdisjoint(nearest(a.spec, row.name, both))]
    missing = [name for name in (*a.axes, *b.axes) if (name in a.axes) != (name in b.axes)]
    seen_once = [name for name in a.axes if name in b.axes and (name in a) != (name in b)]
    return Report(rows, {name: explain(a, b, name) for name in faults}, missing, seen_once)


def tolerance_for(*dtypes: str) -> float:
    """What rounding may do where numbers of these types meet: the coarsest one's."""
    return max(TOLERANCES.get(dtype, COARSE) for dtype in dtypes)


def depth(spec: ModelSpec, name: str) -> int:
    """1 up to the first layer, and one more for each further layer up to the step."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) + 1
    return spec.n_layers if name in ("final_norm", "head") else 1


# --- one step -----------------------------------------------------------------------------------


def difference(a: Trace, b: Trace, name: str, allowed: float = 0.0) -> Difference:
    """How far apart the two sides of a step are."""
    (x, axes), (y, _) = _comparable(a, b, name), _comparable(b, a, name)
    shapes = tuple(x.shape), tuple(y.shape)
    if x.shape != y.shape:
        return Difference(name, axes, shapes, allowed)
    alike = (x == y) | (x.isnan() & y.isnan())
    apart = torch.where(alike, 0.0, (x - y).abs().nan_to_num(torch.inf, torch.inf))
    at = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    values = float(apart[at]), at, float(x[at]), float(y[at])
    return Difference(name, axes, shapes, allowed, _relative(apart, y, axes), *values)


def _relative(apart: Tensor, y: Tensor, axes: tuple[str, ...]) -> float:
    """The largest relative error of a token's vector. One that is small beside most is measured by them."""
    inner = [i for i, axis in enumerate(axes) if axis not in ("B", "T")]
    size = torch.where(y.isfinite(), y, 0.0).square().sum(inner).sqrt()
    error = apart.square().sum(inner).sqrt() / size.clamp(min=max(0.1 * float(size.median()), 1e-300))
    return float(error.max())


def _comparable(side: Trace, other: Trace, name: str) -> tuple[Tensor, tuple[str, ...]]:
    """The step's tensor in fp64 and its axes, without what has no meaning in both sides: scores that nobody
    looks at, and the order in which a token's experts were chosen."""
    x, axes, local = side.tensor(name).double(), side.axes[name], local_name(name)
    if local == "attn.scores":
        masked = name.removesuffix("scores") + "masked"
        for trace in (side, other):
            if masked in trace and trace.tensor(masked).shape == x.shape:
                x = torch.where(trace.tensor(masked).isfinite(), x, 0.0)
    if local == "mlp.chosen" and name in side.choices and name in other.choices:
        mlp = side.spec.layers[int(name.split(".")[1])].mlp
        if isinstance(mlp, Experts):
            x = x.new_zeros(*x.shape[:-1], mlp.n_experts).scatter(-1, side.choices[name], x)
            axes = (*axes[:-1], "E")
    return x, axes
