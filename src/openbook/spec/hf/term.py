"""What a family says about one thing, as a value: a `Term` is read from a config and written into one.

A family's row is made of terms. The ones here are the small ones that any part may use; `attention`,
`rope` and `feedforward` hold those of their part. Terms ask for keys by the words of llama's config
("hidden_size"); a family's `spelling` says what a word is called there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from openbook.spec.model import Chunk, ModelSpec, Norm
from openbook.spec.reader import Reader

T = TypeVar("T")
Keys = dict[str, Any]
"""Words of a config and their values, as a term writes them."""


_UNREAD_NORM = Norm("rms")


@dataclass(frozen=True)
class Known:
    """What has been read of a config by the time that a term is, in the order of the fields."""

    d_model: int
    n_layers: int
    max_positions: int = 0
    norm: Norm = _UNREAD_NORM
    n_heads: int = 0
    head_dim: int = 0
    rope_width: int = 0
    """How many elements of a head a rotation may turn."""
    windows: tuple[int | Chunk | None, ...] = ()
    """One for each layer."""


@dataclass(frozen=True)
class Term(Generic[T]):
    """`read` takes a value from a config; `write` gives the keys that say the value of a spec."""

    read: Callable[[Reader, Known], T]
    write: Callable[[T, ModelSpec], Keys]


def constant(value: T) -> Term[T]:
    """What a family fixes. A spec that has another value is found out when the config is read back."""
    return Term(lambda c, known: value, lambda value, spec: {})


def flag(word: str) -> Term[bool]:
    return Term(lambda c, known: c.flag(word), lambda value, spec: {word: value})


def number(word: str) -> Term[float]:
    return Term(lambda c, known: c.number(word), lambda value, spec: {word: float(value)})


def maybe_number(word: str) -> Term[float | None]:
    """A number above 0; null and absent are None."""
    return Term(lambda c, known: c.maybe_number(word, positive=True), lambda value, spec: {word: value})


def maybe_integer(word: str) -> Term[int | None]:
    return Term(lambda c, known: c.maybe_integer(word), lambda value, spec: {word: value})


def either(word: str, yes: T, no: T) -> Term[T]:
    """One of two values, as a flag says."""
    return Term(lambda c, known: yes if c.flag(word) else no, lambda value, spec: {word: value == yes})


def alike(term: Term[T]) -> Term[list[T]]:
    """The same for each layer."""
    return Term(
        lambda c, known: [term.read(c, known)] * known.n_layers,
        lambda values, spec: term.write(values[0], spec),
    )


ALWAYS, NEVER = constant(True), constant(False)
NONE: Term[Any] = constant(None)
ONE = constant(1.0)


def reciprocal(value: float) -> float:
    """1 / value, with as few digits as give `value` again: what a config that divides by it said."""
    exact = 1 / value if value else 0.0
    short = float(f"{exact:.12g}")
    return short if short and 1 / short == value else exact


def flat(config: Mapping[str, Any], objects: tuple[str, ...]) -> Keys:
    """The config with the keys of some of its objects lifted up: {"a": {"b": 1}} → {"a.b": 1}."""
    lifted: Keys = {}
    for key, value in config.items():
        if key in objects and isinstance(value, Mapping):
            lifted |= {f"{key}.{inner}": held for inner, held in value.items()}
        else:
            lifted[key] = value
    return lifted


def nested(keys: Keys, objects: tuple[str, ...]) -> Keys:
    """Back from `flat`."""
    config: Keys = {}
    for key, value in keys.items():
        owner, _, inner = key.partition(".")
        if inner and owner in objects:
            config.setdefault(owner, {})[inner] = value
        else:
            config[key] = value
    return config
