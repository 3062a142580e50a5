"""Quantised matrices of published safetensors, which hold each as two tensors: values and scales.

Two formats: MXFP4 (gpt-oss; OCP Microscaling Formats, 1.0), and FP8 in squares of 128 rows by 128 columns
(DeepSeek-V3). MXFP4 decodes exactly, to bf16 as well as to fp32; an FP8 product is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openbook.files.safetensors import StoredTensor

if TYPE_CHECKING:
    import torch

PACKED = frozenset({"MXFP4", "FP8"})
"""The types of matrices that are decoded here."""

_SQUARE = 128
"""Rows, and columns, of an FP8 matrix that share a scale."""

_BLOCK = 32
"""Neighbours in a row of an MXFP4 matrix that share a scale."""


@dataclass(frozen=True)
class Packed:
    """A matrix that the file has as two tensors, `values` and `scales`, under their names there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    values: str
    scales: str


def packed(tensors: Mapping[str, StoredTensor]) -> dict[str, Packed]:
    """The matrices that a file's tensors hold in pairs, by name. What does not fit together is no pair."""
    found: dict[str, Packed] = {}
    for name in tensors:
        for ending, (dtype, values_ending, shape_of) in _PAIRS.items():
            stem = name.removesuffix(ending)
            values = tensors.get(f"{stem}{values_ending}")
            if stem == name or values is None:
                continue
            shape = shape_of(values, tensors[name])
            if shape is not None:
                nbytes = values.nbytes + tensors[name].nbytes
                found[stem] = Packed(stem, shape, dtype, nbytes, values.name, name)
    return found


def _shape_of_mxfp4(values: StoredTensor, scales: StoredTensor) -> tuple[int, ...] | None:
    """Of [experts, out, blocks, 16 bytes] and [experts, out, blocks]: [experts, in, out], as the same
    model has it unquantised."""
    *lead, rows, blocks = scales.shape if len(scales.shape) > 1 else (0, 0)
    fits = values.shape == (*scales.shape, _BLOCK // 2) and values.dtype == scales.dtype == "U8"
    return (*lead, blocks * _BLOCK, rows) if fits and rows else None


def _shape_of_fp8(values: StoredTensor, scales: StoredTensor) -> tuple[int, ...] | None:
    """The values' own, if there is a scale for each square of them, those at the edges cut off."""
    squares = tuple(math.ceil(size / _SQUARE) for size in values.shape)
    fits = len(squares) == 2 and squares == scales.shape
    return values.shape if fits and values.dtype == "F8_E4M3" and scales.dtype in ("F32", "BF16") else None


_PAIRS: dict[str, tuple[str, str, Callable[[StoredTensor, StoredTensor], tuple[int, ...] | None]]] = {
    "_scales": ("MXFP4", "_blocks", _shape_of_mxfp4),
    "_scale_inv": ("FP8", "", _shape_of_fp8),
}
"""How the name of the scales ends → the type, how that of the values ends, the shape of what they hold."""


def decode(dtype: str, values: torch.Tensor, scales: torch.Tensor, into: torch.dtype) -> torch.Tensor:
    """The matrix of a pair of tensors of type `dtype`, computed in fp32 and rounded to `into`."""
    return (_decode_mxfp4 if dtype == "MXFP4" else _decode_fp8)(values, scales, into)


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1: the magnitudes of the codes 0 to 7; 8 to 15 are their negatives."""


def _decode_mxfp4(values: torch.Tensor, scales: torch.Tensor, into: torch.dtype) -> torch.Tensor:
    """A byte holds two neighbours, the first in its low half; a scale byte e is 2 ** (e - 127).

    Expert by expert: the whole in fp32 would take twice the memory of what it decodes to.
    """
    import torch

    table = torch.tensor([*_FP4, *(-x for x in _FP4)])
    *lead, rows, blocks, _ = values.shape
    out = torch.empty(*lead, rows, blocks * _BLOCK, dtype=into)
    for codes, exponents, target in zip(
        values.reshape(-1, rows, blocks, _BLOCK // 2),
        scales.reshape(-1, rows, blocks, 1),
        out.view(-1, rows, blocks, _BLOCK),
        strict=True,
    ):
        magnitudes = torch.stack((table[(codes & 15).int()], table[(codes >> 4).int()]), dim=-1)
        target.copy_(torch.ldexp(magnitudes.flatten(-2), exponents.int() - 127))
    return out.transpose(-2, -1)


def _decode_fp8(values: torch.Tensor, scales: torch.Tensor, into: torch.dtype) -> torch.Tensor:
    """Every value times the scale of its square."""
    import torch

    out = torch.empty(values.shape, dtype=into)
    for i, row in enumerate(scales.float()):
        band = slice(i * _SQUARE, (i + 1) * _SQUARE)
        by_column = row.repeat_interleave(_SQUARE)[: values.shape[1]]
        out[band] = values[band].float() * by_column
    return out
