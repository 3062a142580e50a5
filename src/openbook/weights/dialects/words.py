"""What a dialect does to a parameter, in words, on the way into a container and on the way out of it."""

from __future__ import annotations

from collections.abc import Sequence

from openbook.weights.dialects.gguf import AsVector, Raised
from openbook.weights.dialects.table import HeadRows, Place
from openbook.weights.dialects.transforms import (
    Chain,
    Grouped,
    Identity,
    Interleaved,
    RowsPermuted,
    Transform,
    Transposed,
)


def loading(places: Sequence[Place]) -> str:
    """What makes one parameter of the stored tensors that hold it; empty if it lies there as it is."""
    first = places[0]
    stacked = f"stacked from {len(places)} experts" if isinstance(first.index, int) else ""
    rows = _rows(first)
    return _sentence(_of_transform(first.transform)[1], _split(first), rows and f"put in as {rows}", stacked)


def storing(places: Sequence[Place]) -> str:
    """What makes of one parameter the stored tensors that hold it."""
    first = places[0]
    unstacked = f"{len(places)} experts taken apart" if isinstance(first.index, int) else ""
    rows = _rows(first)
    return _sentence(rows and f"{rows} taken", unstacked, _joined(first), _of_transform(first.transform)[0])


def _sentence(*words: str) -> str:
    return ", then ".join(filter(None, words))


def _rows(place: Place) -> str:
    if not isinstance(place.index, HeadRows):
        return ""
    return f"rows {place.index.start} to {place.index.stop - 1} of each of {place.index.heads} heads"


def _joined(place: Place) -> str:
    return f"{_names(place)} joined" if len(place.parameters) > 1 else ""


def _split(place: Place) -> str:
    return f"split into {_names(place)}" if len(place.parameters) > 1 else ""


def _names(place: Place) -> str:
    *others, last = (name.split(".")[-2] for name in place.parameters)
    return f"{', '.join(others)} and {last}"


def _of_transform(transform: Transform) -> tuple[str, str]:
    """What is done to ours to make the container's tensor, and the other way."""
    match transform:
        case Identity():
            return "", ""
        case Transposed():
            return "transposed", "transposed"
        case RowsPermuted(heads):
            return (
                f"rows permuted for adjacent rotary pairs, {heads} heads",
                f"rows permuted back from adjacent rotary pairs, {heads} heads",
            )
        case Raised(by):
            return f"{by:g} added", f"{by:g} taken off"
        case AsVector():
            return "its one row as a vector", "the vector as a row"
        case Interleaved():
            return "interleaved", "interleaving undone"
        case Grouped(_, n_kv_heads):
            groups = f"{n_kv_heads} groups of queries, key and value"
            return f"rows ordered as {groups}", f"rows ordered anew from {groups}"
        case Chain(steps):
            words = [_of_transform(step) for step in steps]
            return _sentence(*(w[0] for w in words)), _sentence(*(w[1] for w in reversed(words)))
    return type(transform).__name__.lower(), f"{type(transform).__name__.lower()} undone"
