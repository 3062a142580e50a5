"""A bound on work, against inputs that would make a bad algorithm run for minutes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bounded_work(seconds: float) -> Iterator[None]:
    """Fails if the block takes more of this thread's CPU time, which other programs do not stretch.

    It tells linear from quadratic, and an answer from an allocation of what a stranger's number asks
    for. It measures no speed: that is `openbook bench`'s.
    """
    start = time.thread_time()
    yield
    spent = time.thread_time() - start
    assert spent < seconds, f"{spent:.1f} s of CPU time"
