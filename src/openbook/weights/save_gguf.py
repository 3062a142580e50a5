"""A model into a GGUF file, as llama.cpp reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from openbook.files.gguf import FORMATS, tensor_nbytes, write_gguf
from openbook.spec.gguf import rope_tensors, to_metadata
from openbook.weights.dialects import GGUF, Dialect, Place
from openbook.weights.quant import quantize
from openbook.weights.save import Parameters, Progress, stored_places, stored_tensor
from openbook.weights.tensors import PLAIN, torch_dtype

FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}
"""The types that matrices can be written as → llama.cpp's number for a file of mostly these."""

WRITABLE = tuple(FILE_TYPES)


def save_gguf(
    decoder: Parameters,
    path: str | Path,
    dtype: str = "F16",
    metadata: Mapping[str, Any] | None = None,
    model_type: str = "",
    progress: Progress | None = None,
) -> None:
    """Writes a GGUF file whose matrices have the `dtype` F32, F16, BF16, Q8_0, Q4_0 or Q4_1.

    Norms and biases stay F32, as in llama.cpp's own files, and so do a router and a matrix whose rows
    are no whole number of blocks. `metadata` adds keys to those that the spec gives, such as a
    tokenizer's. `model_type`, Hugging Face's, chooses among architectures that can hold the model.
    Calls `progress("writing", bytes_done, bytes_in_all)`.
    Raises `UnsupportedError` for a model that the format cannot describe, `ValueError` for an unknown type
    and `OverflowError` for numbers beyond the range of `dtype`.
    """
    if dtype not in FILE_TYPES:
        raise ValueError(f"cannot write weights as {dtype}: use one of {', '.join(WRITABLE)}")
    about = to_metadata(decoder.spec, model_type)
    dialect = GGUF[about["general.architecture"]]
    file = {"general.file_type": FILE_TYPES[dtype], "general.quantization_version": 2}
    tensors = _tensors(decoder, dialect, dtype)
    write_gguf(path, {**about, **file, **(metadata or {})}, _told(list(tensors), progress))


GgufTensor = tuple[str, tuple[int, ...], str, Callable[[], Any]]
"""Name, shape, type, and what makes the bytes when their turn comes."""


def kept_type(place: Place, dtype: str) -> str:
    """The type that a tensor gets in a file of mostly `dtype`."""
    fits = len(place.shape) > 1 and place.shape[-1] % FORMATS[dtype].block == 0
    return dtype if fits and not place.parameters[0].endswith(_PRECISE) else "F32"


_PRECISE = (".router.weight", ".router.bias", ".experts.gate.bias", ".experts.up.bias", ".experts.down.bias")
"""Matrices that llama.cpp wants in F32: what routes, and a bias for each expert."""


def _tensors(decoder: Parameters, dialect: Dialect, dtype: str) -> Iterator[GgufTensor]:
    for name, numbers in rope_tensors(decoder.spec).items():
        yield name, (len(numbers),), "F32", partial(np.array, numbers, "<f4")
    for place in stored_places(decoder.spec, dialect):
        kept = kept_type(place, dtype)
        yield place.stored, place.shape, kept, partial(_encoded, place, decoder, kept)


def _encoded(place: Place, decoder: Parameters, dtype: str) -> np.ndarray:
    """The bytes of one tensor in a GGUF type."""
    return quantize(stored_tensor(place, decoder, torch_dtype(PLAIN.get(dtype, "float32"))), dtype)


def _told(tensors: list[GgufTensor], progress: Progress | None) -> Iterator[GgufTensor]:
    """The same tensors, telling of each when its bytes have been made."""
    total, done = sum(tensor_nbytes(shape, kept) for _, shape, kept, _ in tensors), 0

    def telling(make: Callable[[], Any], nbytes: int) -> Any:
        nonlocal done
        made = make()
        done += nbytes
        if progress:
            progress("writing", done, total)
        return made

    for name, shape, kept, make in tensors:
        yield name, shape, kept, partial(telling, make, tensor_nbytes(shape, kept))
