"""A bound on work, against inputs that would make a bad algorithm run for minutes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bounded_work(seconds: float = 20) -> Iterator[None]:
    """Fails if the block takes more CPU time than a machine many times slower would need.

    It tells linear from quadratic, and an answer from an allocation of what a stranger's number asks
    for. It measures no speed: that is `openbook bench`'s.
    """
    start = time.process_time()
    yield
    spent = time.process_time() - start
    assert spent < seconds, f"{spent:.1f} s of CPU time"
