"""Runs in memory, within a bound: what was not looked at for longest goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from openbook.ledger.table import human_bytes
from openbook.serve.errors import ApiError
from openbook.serve.memory import release


class Sized(Protocol):
    """What is kept: its name, and its size in bytes."""

    @property
    def id(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


Kept = TypeVar("Kept", bound=Sized)


class Store(Generic[Kept]):
    """At most `limit` bytes, those counted that are only promised to a job that runs. For many threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._promised = 0

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept."""
        with self._lock:
            return self._kept_bytes()

    def __iter__(self) -> Iterator[Kept]:
        """What is kept, that looked at last in the end."""
        with self._lock:
            return iter(list(self._kept.values()))

    def get(self, name: str) -> Kept | None:
        """What has this name, from now on the youngest; None if it is gone."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    @contextmanager
    def room(self, nbytes: int, what: str) -> Iterator[None]:
        """Promises `nbytes` to the block, and lets go of what is in their way.

        Raises `ApiError` if they are more than there will ever be. `what` names them in the message.
        """
        with self._lock:
            if nbytes > self.limit - self._promised:
                raise ApiError(
                    507,
                    "it would not fit",
                    f"{what} takes {human_bytes(nbytes)}, and the store holds {human_bytes(self.limit)}",
                    "take a shorter text, or start with a larger --store",
                )
            self._promised += nbytes
            dropped = self._shrink()
        if dropped:
            release()  # before the block takes its part
        try:
            yield
        finally:
            with self._lock:
                self._promised -= nbytes

    def put(self, thing: Kept) -> None:
        """Keeps it, whatever has to go for it."""
        with self._lock:
            self._kept[thing.id] = thing
            self._kept.move_to_end(thing.id)
            self._shrink()

    def remove(self, name: str) -> bool:
        """Lets go of it; whether it was there."""
        with self._lock:
            found = self._kept.pop(name, None) is not None
        if found:
            release()
        return found

    def _shrink(self) -> bool:
        """Whether something had to go."""
        before = len(self._kept)
        while self._kept and self._kept_bytes() + self._promised > self.limit:
            self._kept.popitem(last=False)
        return len(self._kept) < before

    def _kept_bytes(self) -> int:
        return sum(thing.nbytes for thing in self._kept.values())
