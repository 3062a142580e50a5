"""Whether another process holds a file: a lock of the kernel's, which is free when its holder ends."""

from __future__ import annotations

from pathlib import Path

from openbook.files.regular import open_regular


def take(descriptor: int, shared: bool = False) -> bool:
    """Whether nobody has the lock otherwise; it is ours then, until the file is closed. `shared` locks do not
    exclude each other. Where the system has none (Windows) it is always ours."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_held(path: Path) -> bool:
    """Whether some process holds the file now. Who asks holds it for a moment, shared with others who ask."""
    try:
        file, _ = open_regular(path)
    except (OSError, ValueError):
        return False
    with file:
        return not take(file.fileno(), shared=True)
