"""Quantised matrices left as they are, for kernels that decode a row's blocks while multiplying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from openbook.sources import Source
from openbook.weights.dialects import Identity, RowsPermuted
from openbook.weights.tensors import QUANTISED, GgufTensors
from openbook.weights.verify import check

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """A matrix of GGML blocks: `data` is uint8 [rows, bytes of a row], our rows in our order."""

    type: str
    data: Tensor


def quantised_matrices(source: Source) -> dict[str, Blocks]:
    """Parameter name → its blocks, for every matrix of a GGUF file that is quantised row by row.

    They are views of the mapped file, save where rows change places. Other containers have none.
    """
    if source.kind != "gguf":
        return {}
    tensors = GgufTensors(source.weights)
    found: dict[str, Blocks] = {}
    for row in check(source, tensors):
        if row.place is None or row.stored is None or row.stored.dtype not in QUANTISED:
            continue
        if len(row.place.shape) == 2 and isinstance(row.place.transform, Identity | RowsPermuted):
            for name, data in row.place.load(tensors.read_blocks(row.stored.name)):
                found[name] = Blocks(row.stored.dtype, data)
    return found
