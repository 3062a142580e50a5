"""Writing a spec in someone else's terms: what is written must mean the spec when it is read back.

So a writer needs no list of what its format cannot say. It writes what it can, and the first
difference between the spec and what comes back is what the format has no word for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

from openbook.spec.model import ModelSpec, SpecError
from openbook.spec.reader import UnsupportedError, show

T = TypeVar("T")
Written = tuple[T, ModelSpec]
"""A description, and the spec that reading it gives."""

_MANY = 100


def express(
    spec: ModelSpec, ways: Mapping[str, Callable[[], Written[T]]], what: str, tolerance: float = 0.0
) -> T:
    """The first of the `ways` to write the spec whose reading gives the spec back.

    `tolerance` is relative, for numbers that are no integers. Raises `UnsupportedError` when none does;
    it names the first thing that the nearest way gets wrong.
    """
    nearest: tuple[int, str] | None = None
    for name, write in ways.items():
        try:
            written, reading = write()
        except SpecError as error:
            faults, first = _MANY + 1, f"{name}: {error}"
        else:
            differences = list(islice(_differences(spec, reading, "", tolerance), _MANY))
            if not differences:
                return written
            path, want, got = differences[0]
            faults, first = len(differences), f"{path} = {show(want)}, where {name} has {show(got)}"
        if nearest is None or faults < nearest[0]:
            nearest = faults, first
    reason = nearest[1] if nearest else "there is no way to write one"
    raise UnsupportedError(f"no {what} ({', '.join(ways)}) can express this model: {reason}")


def _differences(
    want: object, got: object, path: str, tolerance: float
) -> Iterator[tuple[str, object, object]]:
    """Where two specs differ: ("layers.3.attn.window", 128, None)."""
    if dataclasses.is_dataclass(want) and type(want) is type(got):
        for field in dataclasses.fields(want):
            if field.compare:
                inner = f"{path}.{field.name}" if path else field.name
                yield from _differences(getattr(want, field.name), getattr(got, field.name), inner, tolerance)
    elif isinstance(want, tuple) and isinstance(got, tuple) and len(want) == len(got):
        seen = set()  # equal layers are one object on either side, and are compared once
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            if (id(a), id(b)) in seen:
                continue
            seen.add((id(a), id(b)))
            yield from _differences(a, b, f"{path}.{i}", tolerance)
    elif want != got and not _close(want, got, tolerance):
        yield path, want, got


def _close(want: object, got: object, tolerance: float) -> bool:
    return isinstance(want, float) and isinstance(got, float) and math.isclose(want, got, rel_tol=tolerance)
