"""What one side recorded of one step, and how an explanation is put to the test.

A candidate is a way in which the step could have been computed, as options in words, together with what
it would have given. The one that gives what was recorded is how that side did it; where the options of the
two sides differ is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from openbook.spec.model import Block
from openbook.trace.flow import inputs
from openbook.trace.schema import Trace, local_name

Options = dict[str, str]
"""What a step can do in several ways → the way it does it: {"eps": "1e-05", "weight": "1 + w"}."""

Candidate = tuple[Options, Tensor]

Candidates = Callable[["Evidence", "Evidence"], Iterable[Candidate]]


@dataclass(frozen=True)
class Reason:
    """Why a step differs, as a sentence about A and B, and what to do about it."""

    text: str
    advice: str = ""


@dataclass(frozen=True, eq=False)
class Evidence:
    """One side of a step. Tensors are fp64, so that recomputing them adds no rounding."""

    trace: Trace
    name: str

    @cached_property
    def y(self) -> Tensor:
        """The step's output."""
        return self.trace.tensor(self.name).double()

    @property
    def local(self) -> str:
        return local_name(self.name)

    @property
    def layer(self) -> int:
        return int(self.name.split(".")[1])

    @property
    def block(self) -> Block:
        return self.trace.spec.layers[self.layer]

    def read(self, which: int = 0) -> Tensor | None:
        """What the step reads; None if that was not recorded."""
        names = inputs(self.trace.spec, self.name)
        found = names[which] if which < len(names) else ""
        return self.trace.tensor(found).double() if found in self.trace else None

    def step(self, local: str) -> Tensor | None:
        """Another step of the same layer, if it was recorded."""
        name = f"layers.{self.layer}.{local}"
        return self.trace.tensor(name).double() if name in self.trace else None

    def parameter(self, suffix: str, module: str = "") -> Tensor | None:
        """A weight of this step, or of another module, if it is known; as it is, since it may be large."""
        found = self.trace.parameters.get(f"{module or self.name}.{suffix}")
        return found.detach() if found is not None else None

    def vector(self, suffix: str) -> Tensor | None:
        """A weight of this step that is small, in fp64."""
        found = self.parameter(suffix)
        return found.double() if found is not None else None


@dataclass(frozen=True, eq=False)
class Pair:
    """Both sides of a step whose outputs differ."""

    a: Evidence
    b: Evidence

    @cached_property
    def gap(self) -> float:
        """The relative error between the two."""
        return relative(self.a.y, self.b.y)

    @property
    def name(self) -> str:
        return self.a.name

    @property
    def local(self) -> str:
        return self.a.local

    def explains(self, made: Tensor, found: Tensor) -> bool:
        """Whether `made` is `found`, but for rounding and by far less than the two sides differ."""
        return made.shape == found.shape and relative(made, found) <= min(self.gap / 5, self.rounding)

    @cached_property
    def rounding(self) -> float:
        """What the types of the two runs may do to one step."""
        return 1e-4 if {self.a.trace.dtype, self.b.trace.dtype} <= {"fp32", "fp64"} else 3e-2

    def told_apart(self, candidates: Candidates) -> Reason | None:
        """'eps: 1e-05 in A, 1e-06 in B': the options in which the best candidates of the two sides
        differ; None if a side has none that explains it, or both have the same.

        `candidates(side, other)` makes one side's, its own spec's first; the other's spec may suggest more.
        """
        a = self._best(self.a, candidates(self.a, self.b))
        b = self._best(self.b, candidates(self.b, self.a))
        return told_apart(a, b) if a is not None and b is not None else None

    def _best(self, side: Evidence, candidates: Iterable[Candidate]) -> Options | None:
        """The earliest candidate unless a later one fits twice as well."""
        best, least = None, torch.inf
        for options, made in candidates:
            if made.shape != side.y.shape:
                continue
            error = relative(made, side.y)
            if error < least / 2 and self.explains(made, side.y):
                best, least = options, max(error, 1e-15)
        return best


def told_apart(a: Options, b: Options) -> Reason | None:
    """The options in which the two differ, as a sentence; None if they do not."""
    other = [key for key in a if key in b and a[key] != b[key]]
    if not other:
        return None
    text = "; ".join(f"{key}: {a[key]} in A, {b[key]} in B" for key in other)
    return Reason(text, f"compare {' and '.join(other)} in the two descriptions of the model")


def relative(x: Tensor, y: Tensor) -> float:
    """‖x - y‖ / ‖y‖ over what is finite in both; infinite where only one of them is zero."""
    seen = x.isfinite() & y.isfinite()
    gap, size = float((x - y)[seen].norm()), float(y[seen].norm())
    return gap / size if size else torch.inf if gap else 0.0


def weights_apart(x: Tensor, y: Tensor) -> float:
    """‖x - y‖ / ‖y‖ of two parameters, some rows at a time: an embedding may be a large part of the model."""
    gap = size = 0.0
    for a, b in zip(x.detach().split(1024), y.detach().split(1024), strict=True):
        gap += float((a.float() - b.float()).square().sum())
        size += float(b.float().square().sum())
    return (gap / size) ** 0.5 if size else float(gap > 0)


def fitted(x: Tensor, y: Tensor) -> float:
    """The number c with which c · x comes nearest to y."""
    return float((x * y).sum() / x.square().sum().clamp(min=1e-300))


def number(value: float) -> str:
    """'1e-06', '0.3536', '500,000': four digits are what a fit can promise."""
    rounded = float(f"{value:.4g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:g}"


def distinct(values: Iterable[float]) -> Iterator[float]:
    """Each of them once, in their order."""
    yield from dict.fromkeys(values)
