"""A part of a tensor, named as in `at=0,:,:64,3`, small enough to send.

Integers drop their axis, `start:stop` cut it, what is not named is whole. Of what is left, an axis that is
longer than asked for is reduced in equal blocks. -∞ stands for what a query may not see: it takes no part in
a block's number unless all of the block is -∞.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openbook.infer.sample import RequestError

MAX_AXIS = 1024
"""Numbers along an axis that are sent at most."""

MAX_EXACT = 4096
"""Numbers that are sent as JSON at most."""

_PART = re.compile(r"([0-9]{1,12})|([0-9]{1,12})?:([0-9]{1,12})?")

Index = int | slice


def parse_at(text: str, shape: Sequence[int], axes: Sequence[str]) -> tuple[Index, ...]:
    """An index for each axis. Raises `RequestError` for what is no index or lies outside the tensor."""
    parts = text.split(",") if text else []
    if len(parts) > len(shape):
        raise RequestError("at", f"has {len(parts)} indices, and the tensor {len(shape)} axes")
    parts += [":"] * (len(shape) - len(parts))
    return tuple(_index(*each) for each in zip(parts, shape, axes, strict=True))


def _index(part: str, size: int, axis: str) -> Index:
    found = _PART.fullmatch(part.strip())
    if found is None:
        raise RequestError("at", f"{part[:40]!r} is neither a number nor start:stop")
    if found[1]:
        if int(found[1]) >= size:
            raise RequestError("at", f"{axis} has {size} entries, so there is no number {found[1]}")
        return int(found[1])
    start, stop = int(found[2] or 0), size if found[3] is None else int(found[3])
    if not start < stop <= size:
        raise RequestError("at", f"{axis} has {size} entries, so {part} is no part of it")
    return slice(start, stop)


class Reduced(NamedTuple):
    """Numbers, and along each axis how many of the tensor's one of them stands for."""

    values: Tensor
    block: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """A part of a tensor with at most two axes: its letters, where it begins, and its values."""

    axes: tuple[str, ...]
    start: tuple[int, ...]
    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


def take(tensor: Tensor, axes: Sequence[str], at: str) -> Slice:
    """The part `at` of the tensor, as a view. Raises `RequestError` if more than two axes are left."""
    indices = parse_at(at, tensor.shape, axes)
    left = [(axis, index) for axis, index in zip(axes, indices, strict=True) if isinstance(index, slice)]
    if len(left) > 2:
        names = ", ".join(axis for axis, _ in left)
        raise RequestError("at", f"leaves the axes {names}: name an index on all but two")
    return Slice(tuple(axis for axis, _ in left), tuple(i.start for _, i in left), tensor[indices])


def reduced(values: Tensor, longest: int, how: str) -> Reduced:
    """Every axis of at most two brought to at most `longest` numbers, each of a block of neighbours; the
    last block may have fewer. fp32."""
    block = tuple(math.ceil(size / longest) for size in values.shape)
    if all(size == 1 for size in block):
        return Reduced(values.float(), block)
    if how not in REDUCTIONS:
        sizes = " × ".join(map(str, values.shape))
        raise RequestError("reduce", f"{sizes} numbers are more than {longest} an axis: use mean or absmax")
    rows, height, width = values if values.ndim == 2 else values[None], *([1, *block][-2:])
    # Some rows at a time: copies of a whole tensor of logits would take as much as the tensor.
    together = height * max(1, _TOGETHER // (height * rows.shape[1]))
    found = [_reduce(part.float(), height, width, REDUCTIONS[how]) for part in rows.split(together)]
    shape = [math.ceil(size / n) for size, n in zip(values.shape, block, strict=True)]
    return Reduced(torch.cat(found).view(shape), block)


_TOGETHER = 2**20
"""Numbers that are reduced together, unless a single row of blocks has more."""


def _reduce(rows: Tensor, height: int, width: int, how: Reduction) -> Tensor:
    """[rows, columns] → [blocks of rows, blocks of columns]."""
    if rows.min() > -torch.inf:
        return how.whole(rows[None], (height, width))[0]
    # What pads the last blocks is -∞, like what is masked, and is left out as that is.
    rows = F.pad(rows, (0, -rows.shape[1] % width, 0, -rows.shape[0] % height), value=-torch.inf)
    blocks = rows.view(rows.shape[0] // height, height, -1, width).transpose(1, 2).flatten(2)
    return how.masked(blocks, blocks != -torch.inf)


class Reduction(NamedTuple):
    """A block becomes one number: of [1, rows, columns] without -∞, and of [..., numbers of a block] beside
    which of them are present."""

    whole: Callable[[Tensor, tuple[int, int]], Tensor]
    masked: Callable[[Tensor, Tensor], Tensor]


def _whole_mean(rows: Tensor, block: tuple[int, int]) -> Tensor:
    return F.avg_pool2d(rows, block, ceil_mode=True, count_include_pad=False)


def _masked_mean(blocks: Tensor, present: Tensor) -> Tensor:
    count = present.sum(-1)
    return (blocks.where(present, 0.0).sum(-1) / count).where(count > 0, -torch.inf)


def _whole_absmax(rows: Tensor, block: tuple[int, int]) -> Tensor:
    high, low = (F.max_pool2d(side, block, ceil_mode=True) for side in (rows, -rows))
    return high.where(high >= low, -low)


def _masked_absmax(blocks: Tensor, present: Tensor) -> Tensor:
    there = blocks.where(present, 0.0)
    found = there.gather(-1, there.abs().argmax(-1, keepdim=True)).squeeze(-1)
    return found.where(present.any(-1), -torch.inf)


REDUCTIONS = {
    "mean": Reduction(_whole_mean, _masked_mean),
    "absmax": Reduction(_whole_absmax, _masked_absmax),
}
"""`absmax` is the number that is furthest from 0, with its sign. NaN in a block shows in either."""


def limits(values: Tensor) -> tuple[float | None, float | None]:
    """The least and the greatest finite number; None if there is none."""
    finite = values[values.isfinite()]
    return (float(finite.min()), float(finite.max())) if finite.numel() else (None, None)
