"""The tensors of a run, and what their numbers are like."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Numbers that are looked at together: in fp64 they still lie in a core's cache."""


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
        """The two sums are in fp64, and taken over one piece after the other: no copy of all is made."""
        x = values.detach().reshape(-1)
        low, high, total, squares, finite, nan = math.inf, -math.inf, 0.0, 0.0, 0, 0
        for part in x.split(CHUNK):
            least, most = (float(end) for end in part.aminmax())
            if not (math.isfinite(least) and math.isfinite(most)):
                nan += int(part.isnan().sum())
                part = part[part.isfinite()]
                if not part.numel():
                    continue
                least, most = (float(end) for end in part.aminmax())
            part = part.double()
            low, high = min(low, least), max(high, most)
            total, squares = total + float(part.sum()), squares + float(part.dot(part))
            finite += part.numel()
        if not finite:
            return Statistics(0.0, 0.0, 0.0, 0.0, 0.0, nan, x.numel() - nan)
        mean = total / finite
        variance = max(squares / finite - mean**2, 0.0)
        return Statistics(low, high, mean, variance**0.5, squares**0.5, nan, x.numel() - finite - nan)

    @staticmethod
    def together(parts: Iterable[tuple[Statistics, int]]) -> Statistics:
        """Those of several tensors as one, each given with how many numbers it has."""
        counted = [(part, size - part.nan - part.inf) for part, size in parts]
        nan, inf = sum(part.nan for part, _ in counted), sum(part.inf for part, _ in counted)
        counted = [(part, finite) for part, finite in counted if finite]
        if not counted:
            return Statistics(0.0, 0.0, 0.0, 0.0, 0.0, nan, inf)
        total = sum(finite for _, finite in counted)
        mean = sum(part.mean * finite for part, finite in counted) / total
        squares = sum(part.l2**2 for part, _ in counted)
        return Statistics(
            low=min(part.low for part, _ in counted),
            high=max(part.high for part, _ in counted),
            mean=mean,
            std=max(squares / total - mean**2, 0.0) ** 0.5,
            l2=squares**0.5,
            nan=nan,
            inf=inf,
        )


@dataclass(frozen=True, eq=False)
class Masked:
    """Masked scores, made of the scores when they are asked for: -∞ where `visible` is False.

    `scores` [B, H, T, S] fp32; `visible` [B or 1, 1, T, S] bool, which the layers of one mask share. What
    this saves is a third of what attention takes.
    """

    scores: Tensor
    visible: Tensor

    def tensor(self) -> Tensor:
        return self.scores.masked_fill(~self.visible, -torch.inf)


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, some of them made when they are asked for. `held` is what is really there."""

    def __init__(self, held: Mapping[str, Tensor | Masked]) -> None:
        self.held = held

    def __getitem__(self, name: str) -> Tensor:
        found = self.held[name]
        return found.tensor() if isinstance(found, Masked) else found

    def __contains__(self, name: object) -> bool:
        return name in self.held

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def held_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The bytes of memory behind the tensors, each piece counted once, whole even if only a part is seen."""
    parts: list[Tensor] = []
    for x in tensors.held.values() if isinstance(tensors, Tensors) else tensors.values():
        parts += [x.scores, x.visible] if isinstance(x, Masked) else [x]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parts}.values())


DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def dtype_of(values: Tensor) -> str:
    """'fp32', 'bf16', ...: the ledger's word for a tensor's type."""
    known = {dtype: name for name, dtype in DTYPES.items()}
    return known.get(values.dtype, str(values.dtype).removeprefix("torch."))
