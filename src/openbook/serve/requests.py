"""What a request says, checked: every key is known, every value of its kind and within its bounds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request

from openbook.infer.sample import RequestError
from openbook.serve.errors import ApiError

Check = Callable[[str, Any], Any]
"""Takes a key and what it was given, and gives the value. Raises `RequestError`."""


class Key(NamedTuple):
    """A key that may be left out, and its value then."""

    check: Check
    default: Any = None


class Required(NamedTuple):
    """A key that may not."""

    check: Check


Keys = Mapping[str, Key | Required]


def query(request: Request, keys: Keys) -> dict[str, Any]:
    """The values of a request's query. Raises `RequestError`."""
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            raise RequestError(name[:40], "is given more than once")
        of = keys.get(name)
        is_number = of is not None and isinstance(of.check, Integer) and _DIGITS.fullmatch(value)
        given[name] = int(value) if is_number else value
    return _checked(given, keys)


_DIGITS = re.compile(r"-?[0-9]{1,19}")


async def body(request: Request, keys: Keys) -> dict[str, Any]:
    """The values of a request's body, one JSON object. Raises `ApiError`, `RequestError`."""
    try:
        given = json.loads(await request.body(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "not JSON", str(error) or type(error).__name__) from None
    if not isinstance(given, dict):
        raise ApiError(400, "not an object", f"the body is {type(given).__name__}", "send a JSON object")
    return _checked(given, keys)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _checked(given: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    for name in given:
        if name not in keys:
            raise RequestError(name[:40], f"is unknown; known are {', '.join(keys) or 'no keys'}")
    for name, key in keys.items():
        if isinstance(key, Required) and name not in given:
            raise RequestError(name, "is missing")
    return {
        name: key.check(name, given[name]) if name in given else key.default  # type: ignore[union-attr]
        for name, key in keys.items()
    }


# --- kinds of values ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Integer:
    """From `low` to `high`."""

    low: int
    high: int

    def __call__(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise RequestError(name, f"must be an integer from {self.low} to {self.high}")
        return value


@dataclass(frozen=True)
class Number:
    """A finite number from `low` to `high`."""

    low: float
    high: float

    def __call__(self, name: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not (good and math.isfinite(value) and self.low <= value <= self.high):
            raise RequestError(name, f"must be a number from {self.low:g} to {self.high:g}")
        return float(value)


@dataclass(frozen=True)
class Text:
    """At most `longest` characters."""

    longest: int

    def __call__(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise RequestError(name, f"must be a text, found {type(value).__name__}")
        if len(value) > self.longest:
            raise RequestError(name, f"has {len(value):,} characters, at most {self.longest:,} are taken")
        return value


@dataclass(frozen=True)
class Choice:
    """One of these words."""

    words: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> str:
        if value not in self.words:
            raise RequestError(name, f"must be one of {', '.join(self.words)}")
        return value


@dataclass(frozen=True)
class ListOf:
    """A list of at most `longest` such values."""

    item: Check
    longest: int

    def __call__(self, name: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > self.longest:
            raise RequestError(name, f"must be a list of at most {self.longest:,}")
        return [self.item(f"{name}[{i}]", each) for i, each in enumerate(value)]


def flag(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise RequestError(name, "must be true or false")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    """An object, whatever is in it."""
    if not isinstance(value, dict):
        raise RequestError(name, "must be an object")
    return value
