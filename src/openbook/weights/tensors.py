"""The tensors of any container, one face: names, shapes and types at once, values when asked for.

Values that lie in the file as the machine computes with them (F32, F16, BF16, F64) are handed out as
views of a memory map: nothing is copied, and writing to one changes memory, never the file. Quantised
ones are decoded. Replace files instead of rewriting them: shortening one that is mapped ends
the process (SIGBUS).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from openbook.files.gguf import GgufFile, read_gguf
from openbook.files.safetensors import SafetensorsFiles, open_safetensors, refuse_pickles
from openbook.ledger.tensors import dtype_name
from openbook.sources import Source
from openbook.weights.packed import PACKED, decode, packed

if TYPE_CHECKING:
    import torch

PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types a model can compute with as they are → torch's name."""

QUANTISED = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})
"""Types that `quant` decodes; named here because that module needs torch and a header does not."""

READABLE = QUANTISED | PACKED | PLAIN.keys()
"""Every type of tensor that can become a parameter."""


@dataclass(frozen=True)
class Stored:
    """What a file's header says of one tensor. `shape` is outermost first, `dtype` the file's word."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Values:
    """What the numbers of one tensor are like. `low` and `high` are of the finite ones, NaN if none is."""

    count: int
    nan: int
    inf: int
    zero: int
    low: float
    high: float


class Tensors(Protocol):
    """An open container."""

    @property
    def path(self) -> Path: ...

    @property
    def stored(self) -> Mapping[str, Stored]: ...

    def read(self, name: str, decoded: torch.dtype | None = None) -> torch.Tensor:
        """The tensor as it is stored, perhaps a view of the file: see above. A quantised one is decoded,
        to fp32 or to the dtype that `decoded` says."""
        ...


class SafetensorsTensors:
    """One .safetensors file, or a folder's shards. A matrix that is two tensors there is one here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: SafetensorsFiles = open_safetensors(path)
        self._packed = packed(self._files.tensors)
        parts = {name for pair in self._packed.values() for name in (pair.values, pair.scales)}
        single = [t for t in self._files.tensors.values() if t.name not in parts]
        self.stored = {
            t.name: Stored(t.name, t.shape, t.dtype, t.nbytes) for t in (*single, *self._packed.values())
        }

    def read(self, name: str, decoded: torch.dtype | None = None) -> torch.Tensor:
        pair = self._packed.get(name)
        if pair is None:
            return self._files.get(name)
        import torch

        values, scales = self._files.get(pair.values), self._files.get(pair.scales)
        return decode(pair.dtype, values, scales, decoded or torch.float32)


class GgufTensors:
    """A GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: GgufFile = read_gguf(path)
        self.stored = {t.name: Stored(t.name, t.shape, t.type, t.nbytes) for t in self._file.tensors.values()}

    @cached_property
    def _bytes(self) -> np.ndarray:
        """The whole file, copy on write: torch has no read-only tensors."""
        return np.memmap(self.path, np.uint8, mode="c")

    def read(self, name: str, decoded: torch.dtype | None = None) -> torch.Tensor:
        import torch

        from openbook.weights.quant import dequantize

        tensor = self._file.tensors[name]
        if tensor.type in PLAIN:
            raw = torch.from_numpy(self._bytes[tensor.offset : tensor.offset + tensor.nbytes])
            return raw.view(getattr(torch, PLAIN[tensor.type])).view(tensor.shape)
        out = torch.empty(tensor.shape, dtype=decoded or torch.float32)
        return dequantize(self._file.data(name), tensor.type, out)

    def read_blocks(self, name: str) -> torch.Tensor:
        """A matrix's blocks as they lie in the file, uint8 [rows, bytes of a row]."""
        import torch

        tensor = self._file.tensors[name]
        raw = torch.from_numpy(self._bytes[tensor.offset : tensor.offset + tensor.nbytes])
        return raw.view(tensor.shape[0], -1)


def open_tensors(source: Source) -> Tensors:
    """Opens the GGUF file, the .safetensors file or the shards of a source. No value is read yet.

    Raises `NotFoundError` for a source without weights, and `FileError` for a file that is broken or,
    being a pickle, could run code.
    """
    if source.kind == "gguf":
        return GgufTensors(source.weights)
    if source.kind == "spec" and source.path is not None and source.path.is_dir():
        refuse_pickles(source.path)
    return SafetensorsTensors(source.weights)


def summarise(values: torch.Tensor) -> Values:
    """Counts what is NaN, infinite and zero, and finds the range of the rest."""
    import torch

    finite = values if is_finite(values) else values[values.isfinite()]
    low, high = torch.aminmax(finite) if finite.numel() else (torch.tensor(torch.nan),) * 2
    return Values(
        count=values.numel(),
        nan=int(values.isnan().sum()),
        inf=int(values.isinf().sum()),
        zero=values.numel() - int(values.count_nonzero()),
        low=float(low),
        high=float(high),
    )


def is_finite(values: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity, at the speed of memory: `isfinite` is 15 times slower."""
    if not values.numel():
        return True
    low, high = values.aminmax()
    return bool(low.isfinite() & high.isfinite())


def torch_dtype(name: torch.dtype | str) -> torch.dtype:
    """torch's dtype by any of its names: bf16, bfloat16, torch.bfloat16. Raises `ValueError` for others."""
    import torch

    known = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    ours = dtype_name(str(name))
    if ours not in known:
        raise ValueError(f"a model cannot compute in {name}: use one of {', '.join(known)}")
    return known[ours]


def kept_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter in a model of `dtype`. A router's corrections never have less than fp32: they
    decide who is chosen by differences that bf16 rounds away."""
    import torch

    return torch.promote_types(dtype, torch.float32) if name.endswith(".router.correction") else dtype
