"""One process in a run's folder at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path

from openbook.files.lock import is_held, take

LOCK = "lock"


class BusyError(RuntimeError):
    """Another process is working in the run's folder."""


class Lock:
    """Holds RUN/lock until `release`, or until the process ends, however it ends.

    Raises `BusyError` if another holds it. Where the system has no such locks (Windows), nothing is held.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        for wait in (0.0, 0.05, 0.2):  # who only asks, `is_busy`, holds it for a moment
            time.sleep(wait)
            if take(self._descriptor):
                return
        self.release()
        raise BusyError(
            f"another process is training in {folder}: wait for its end or stop it, or choose another folder"
        )

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # not if the folder could not be written to
            self.release()


def is_busy(folder: Path) -> bool:
    """Whether some process holds the folder now."""
    return is_held(folder / LOCK)
