"""Reading a key-value description from outside, with every key accounted for.

A `Reader` hands out values by key and checks each: its type, its range, no NaN, no `true` for 1.
`finish` then refuses the keys that nobody asked for. So a config's key is used, or listed as
irrelevant, or an error, and never silently without effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from openbook.spec.model import SpecError

MAX_INTEGER = 2**63 - 1
"""No file format can say more, and no model is wider."""

T = TypeVar("T")


class UnsupportedError(SpecError):
    """A model that is well described, but of a kind that Openbook cannot express."""


def show(value: object) -> str:
    """A value from outside as text for one line: escaped, short, and never the whole of a container."""
    if isinstance(value, Mapping | list | tuple | set):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value if not isinstance(value, str) else value[:80])
    return text if len(text) <= 80 else text[:77] + "..."


class Reader:
    """The keys of one object, `where` being its name in messages ("config.rope_scaling").

    `spelling` translates a common word into the key that this object uses for it (`hidden_size` →
    `n_embd`): code asks by word, messages name the key. Every method marks its key as used. The
    `maybe_` ones give None for a key that is absent or null; the others refuse that.
    """

    def __init__(self, data: object, where: str, spelling: Mapping[str, str] | None = None) -> None:
        self.where = where
        if not isinstance(data, Mapping):
            raise SpecError(f"{where} must be an object with keys, found {show(data)}")
        self._data = data
        self._spelling = spelling or {}
        self._unused = dict.fromkeys(data)

    def key(self, word: str) -> str:
        return self._spelling.get(word, word)

    def fail(self, word: str, problem: str, error: type[SpecError] = SpecError) -> NoReturn:
        raise error(f"{self.where}.{self.key(word)} {problem}")

    # --- values -------------------------------------------------------------------------------

    def raw(self, word: str) -> Any:
        """The value as it stands, None when absent."""
        key = self.key(word)
        self._unused.pop(key, None)
        return self._data.get(key)

    def maybe_integer(self, word: str, least: int = 1, most: int = MAX_INTEGER) -> int | None:
        value = self.raw(word)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(word, f"must be an integer, found {show(value)}")
        if not least <= value <= most:
            self.fail(word, f"must be an integer from {least} to {most:,}, found {show(value)}")
        return value

    def maybe_number(self, word: str, *, positive: bool = False) -> float | None:
        """A finite number of at least 0, or above 0 where `positive`."""
        value = self.raw(word)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(word, f"must be a number, found {show(value)}")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            bound = "above 0" if positive else "of at least 0"
            self.fail(word, f"must be a finite number {bound}, found {show(self.raw(word))}")
        return value

    def maybe_flag(self, word: str) -> bool | None:
        value = self.raw(word)
        if value is not None and not isinstance(value, bool):
            self.fail(word, f"must be true or false, found {show(value)}")
        return value

    def maybe_text(self, word: str) -> str | None:
        value = self.raw(word)
        if value is not None and not isinstance(value, str):
            self.fail(word, f"must be a string, found {show(value)}")
        return value

    def maybe_items(self, word: str, length: int, item: Callable[[Any], bool], kind: str) -> list[Any] | None:
        value = self.raw(word)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != length or not all(map(item, value)):
            self.fail(word, f"must be a list of {length:,} {kind}, found {show(value)}")
        return list(value)

    def integer(self, word: str, least: int = 1, most: int = MAX_INTEGER) -> int:
        return self._required(word, self.maybe_integer(word, least, most))

    def number(self, word: str, *, positive: bool = False) -> float:
        return self._required(word, self.maybe_number(word, positive=positive))

    def flag(self, word: str) -> bool:
        return self._required(word, self.maybe_flag(word))

    def text(self, word: str) -> str:
        return self._required(word, self.maybe_text(word))

    def items(self, word: str, length: int, item: Callable[[Any], bool], kind: str) -> list[Any]:
        return self._required(word, self.maybe_items(word, length, item, kind))

    def choice(self, word: str, table: Mapping[str, T]) -> T:
        """What the table has for the key's string."""
        value = self.text(word)
        if value not in table:
            self.fail(
                word,
                f"is {show(value)}, which is not supported; one of: {', '.join(table)}",
                UnsupportedError,
            )
        return table[value]

    def object(self, word: str) -> Reader | None:
        """A reader of the object under this key; None when absent, null or empty."""
        value = self.raw(word)
        if value is None or value == {}:
            return None
        return Reader(value, f"{self.where}.{self.key(word)}")

    def _required(self, word: str, value: T | None) -> T:
        if value is None:
            self.fail(word, "is missing" if self.key(word) not in self._data else "must not be null")
        return value

    # --- the rest -----------------------------------------------------------------------------

    def __contains__(self, word: str) -> bool:
        return self.key(word) in self._data

    def only(self, word: str, allowed: tuple[Any, ...], why: str) -> None:
        """Accepts the key when it is absent, null or one of the values without effect."""
        value = self.raw(word)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            self.fail(word, f"is {show(value)}, which is not supported: {why}", UnsupportedError)

    def ignore(self, keys: Iterable[str] = (), prefixes: tuple[str, ...] = ()) -> None:
        """Marks keys that have no influence on the model."""
        for key in keys:
            self._unused.pop(key, None)
        for key in [k for k in self._unused if isinstance(k, str) and k.startswith(prefixes)]:
            del self._unused[key]

    def finish(self, advice: str) -> None:
        """Raises `SpecError` if keys are left that nobody asked for; `advice` says what to do.

        A key that is null says nothing, whoever it was meant for.
        """
        left = [self._name_unknown(key) for key in self._unused if self._data[key] is not None]
        if not left:
            return
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        raise SpecError(f"{self.where} has unknown keys: {', '.join(left[:5])}{more}; {advice}")

    def _name_unknown(self, key: object) -> str:
        own = self._spelling.get(key) if isinstance(key, str) else None
        return f"{show(key)} (spelled {own!r} here)" if own else show(key)
