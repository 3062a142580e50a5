"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable


def _trimmer() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None where the C library has none."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_trim = _trimmer()


def release() -> None:
    """Gives every freed page back.

    glibc keeps freed pieces below 32 MB, which most tensors of a trace are, for later ones that fit into the
    gaps. Runs of changing lengths fit badly: such gaps grew to more than what was in use.
    """
    if _trim is not None:
        _trim(0)
