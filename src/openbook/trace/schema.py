"""What is kept of one forward pass: every named step with its tensor.

A step is named as the ledger's row and the model's module are, `layers.3.attn.q`, and its axes are spelled in
the same letters: ("B", "T", "H·K").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from openbook.spec.model import ModelSpec


@dataclass(frozen=True)
class Statistics:
    """What the numbers of a tensor are like. All but the two counts are of the finite ones, 0 if none is."""

    low: float
    high: float
    mean: float
    std: float
    l2: float
    nan: int
    inf: int

    @staticmethod
    def of(values: Tensor) -> Statistics:
        """The two sums are in fp64, a block at a time, which a processor's cache holds."""
        x = values.detach().flatten()
        nan = inf = count = 0
        low, high, total, squares = torch.inf, -torch.inf, 0.0, 0.0
        for block in x.split(_BLOCK):
            wide = block.double()
            if not wide.sum().isfinite():  # fp64 holds any sum of finite fp32 numbers
                finite = wide.isfinite()
                nan += int(wide.isnan().sum())
                inf += int(wide.isinf().sum())
                wide = wide[finite]
            if wide.numel():
                least, most = wide.aminmax()
                low, high = min(low, float(least)), max(high, float(most))
                count += wide.numel()
                total += float(wide.sum())
                squares += float(wide.dot(wide))
        if not count:
            return Statistics(0.0, 0.0, 0.0, 0.0, 0.0, nan, inf)
        mean = total / count
        return Statistics(low, high, mean, max(squares / count - mean**2, 0.0) ** 0.5, squares**0.5, nan, inf)


_BLOCK = 2**15
"""Numbers that are looked at together: so few that PyTorch starts no threads for them."""


@dataclass(frozen=True)
class Step:
    """One step as it ran. `axes` are the ledger's letters, one for each number of `shape`."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    statistics: Statistics

    @property
    def layer(self) -> int | None:
        """The layer it belongs to; None before the first and after the last."""
        return int(self.name.split(".")[1]) if self.name.startswith("layers.") else None

    @property
    def local(self) -> str:
        """The name without its layer: 'attn.q'."""
        return local_name(self.name)


def local_name(name: str) -> str:
    """'layers.3.attn.q' → 'attn.q'; a name outside the layers is kept."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


@dataclass(frozen=True, eq=False)
class Trace:
    """The steps of one run, in the order of the ledger's rows.

    `dtype` is that of its matrices. `positions` [B, T] are where its tokens stand (negative: padding), and
    `keys` the positions [B, S] of the keys that each layer's queries met: the columns of its scores. `axes`
    has every step of such a run, those that were not kept as well. `choices` names the experts [B, T, A]
    behind each `mlp.chosen`, in the order of their weights there. `parameters` are the weights of the run,
    under our names and in our arrangement; what is not known is not in it.
    """

    spec: ModelSpec
    dtype: str
    ids: Tensor
    positions: Tensor
    tensors: Mapping[str, Tensor]
    axes: Mapping[str, tuple[str, ...]]
    keys: Mapping[int, Tensor] = field(default_factory=dict)
    choices: Mapping[str, Tensor] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        """The step's output, of the shape that the ledger's row has. Raises `KeyError` for no such step."""
        return self.tensors[name]

    @cached_property
    def steps(self) -> list[Step]:
        """Every step with the statistics of its tensor."""
        return [
            Step(name, self.axes[name], tuple(x.shape), dtype_of(x), Statistics.of(x))
            for name, x in self.tensors.items()
        ]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.tensors)


def dtype_of(values: Tensor) -> str:
    """'fp32', 'bf16', ...: the ledger's word for a tensor's type."""
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    return short.get(values.dtype, str(values.dtype).removeprefix("torch."))
