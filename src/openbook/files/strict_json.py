"""JSON from outside: one object, each key once, and no number that JSON lacks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from openbook.files.errors import FileError, printable


def parse_object(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    """The object that `raw` spells; `what` names it in errors ("the header").

    Raises `FileError`, naming `path`, for what strict JSON forbids, or does not settle: a key twice, NaN
    or an infinity (also as 1e999), integers of thousands of digits, nesting deeper than Python's own
    limit, anything but UTF-8, anything but an object outside.
    """
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except UnicodeDecodeError as error:
        raise FileError(path, "", what, f"not UTF-8 ({error.reason})", "JSON in UTF-8") from None
    except RecursionError:
        raise FileError(path, "", what, "JSON nested too deeply", "a flat object") from None
    except ValueError as error:
        raise FileError(path, "", what, f"not valid JSON ({error})", "a JSON object, each key once") from None
    if not isinstance(value, dict):
        raise FileError(path, "", what, kind_of(value), "a JSON object")
    return value


def kind_of(value: Any) -> str:
    """What a value from JSON is, in words for a message."""
    match value:
        case None:
            return "missing"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object of other things"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {printable(twice)!r} occurs twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is out of range")
    return value
