"""One thread does the work on models, one job at a time; few may wait."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from openbook.serve.errors import ApiError
from openbook.serve.memory import release

T = TypeVar("T")

WAITING = 16
"""Jobs that may wait. More are refused: a client that asks for them has lost its patience or its mind."""


def use_threads(number: int) -> None:
    """PyTorch's threads beside the one that calls this; others keep theirs.

    A thread takes the number that was set last, by any, at its first operation: which is to be before ours.
    """
    torch.get_num_threads()
    torch.set_num_threads(number)


class Worker:
    """A thread that does not keep the process alive, and whether it is `busy`. It has as many of PyTorch's
    threads as who makes it."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue(WAITING)
        self.busy = False
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="models", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """The job's result to come; its errors come with it. Raises `ApiError` if too many wait."""
        future: Future[T] = Future()
        try:
            self._jobs.put_nowait((future, job))
        except queue.Full:
            raise ApiError(
                503, "the server is busy", f"{WAITING} jobs wait already", "try again when they are done"
            ) from None
        return future

    def _work(self) -> None:
        use_threads(self._threads)
        while True:
            future, job = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            self.busy = True
            try:
                result = job()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # or it would keep the tensors of what failed
                future.set_exception(error)
            else:
                future.set_result(result)
            self.busy = False
            result = None
            del future, job, result  # or they would be kept alive until the next job comes
            release()
