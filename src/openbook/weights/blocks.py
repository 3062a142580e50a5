"""Quantised matrices left as they are, for kernels that decode a row's blocks while multiplying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from openbook.sources import Source
from openbook.weights.dialects import Identity, Place, RowsPermuted
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
        place, stored = row.place, row.stored
        if place is None or stored is None or stored.dtype not in QUANTISED:
            continue
        if _keeps_rows(place):
            for name, data in place.load(tensors.read_blocks(stored.name)):
                found[name] = Blocks(stored.dtype, data)
    return found


def _keeps_rows(place: Place) -> bool:
    """Whether the parameters are whole matrices whose rows lie in the file as rows."""
    whole = len(place.shape) == 2 and place.axis == 0 and place.index is None
    return whole and isinstance(place.transform, Identity | RowsPermuted)
