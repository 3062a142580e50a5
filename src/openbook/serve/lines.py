"""JSON as it is written here, and answers of many lines (application/x-ndjson) that come one by one."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openbook.serve.errors import api_error
from openbook.serve.worker import Worker


def to_json(data: Any) -> str:
    """ASCII, whatever a file has spelled; numbers that are not finite are null."""
    try:
        return json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(data), separators=(",", ":"))


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


class Lines(Response):
    """What the worker makes, a line for each object, sent as soon as it is made.

    A client that goes away ends the work after the line that it is at. An error is the last line.
    """

    def __init__(self, worker: Worker, make: Callable[[], Iterable[Any]]) -> None:
        super().__init__(media_type="application/x-ndjson", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._worker, self._make = worker, make
        self._stop = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def work() -> None:
            def put(line: str | None) -> None:
                loop.call_soon_threadsafe(queue.put_nowait, line)

            try:
                for data in self._make():
                    put(to_json(data) + "\n")
                    if self._stop.is_set():
                        return
            except Exception as error:
                put(to_json(api_error(error).plain()) + "\n")
            finally:
                put(None)

        job = self._worker.submit(work)
        gone = asyncio.create_task(_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while (line := await _first(queue, gone)) is not None:
                await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except OSError:
            pass  # nobody listens any more
        finally:
            self._stop.set()
            job.cancel()
            gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(queue: asyncio.Queue[str | None], gone: asyncio.Task[None]) -> str | None:
    """The next line; None at the end, or when the client is gone."""
    line = asyncio.create_task(queue.get())
    await asyncio.wait({line, gone}, return_when=asyncio.FIRST_COMPLETED)
    if line.done():
        return line.result()
    line.cancel()
    return None
