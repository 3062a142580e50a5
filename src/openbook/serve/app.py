"""The HTTP interface: each endpoint reads a request, asks the explorer, and answers. See docs/explore.md."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openbook.infer.sample import RequestError
from openbook.serve import books, slices, static
from openbook.serve.errors import ApiError, api_error
from openbook.serve.explorer import Explorer, Run
from openbook.serve.pieces import pieces
from openbook.serve.requests import (
    Choice,
    Integer,
    Key,
    Keys,
    ListOf,
    Required,
    Text,
    body,
    flag,
    mapping,
    query,
)
from openbook.serve.security import MAX_BODY, Guard

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(explorer: Explorer, port: int) -> Starlette:
    """The application that answers at 127.0.0.1:`port`."""
    api = Api(explorer)

    def get(path: str, endpoint: Endpoint) -> Route:
        return Route(f"/api/{path}", answered(endpoint), methods=["GET"])

    def post(path: str, endpoint: Endpoint) -> Route:
        return Route(f"/api/{path}", answered(endpoint), methods=["POST"])

    routes = [
        get("state", api.state),
        post("models", api.open_model),
        get("models/{model}", api.model),
        get("models/{model}/overview", api.overview),
        get("models/{model}/ledger", api.ledger),
        post("models/{model}/tokens", api.tokens),
        post("models/{model}/runs", api.make_run),
        get("runs/{run}", api.run),
        Route("/api/runs/{run}", answered(api.remove_run), methods=["DELETE"]),
        get("runs/{run}/tensors/{step}.json", api.exact),
        get("runs/{run}/tensors/{step}", api.tensor),
        Route("/api/{rest:path}", answered(api.nothing)),
        Route("/{name:path}", answered(static.page), methods=["GET"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, port=port)],
        exception_handlers={HTTPException: _refused},
    )


# --- answers ------------------------------------------------------------------------------------


def json_response(data: Any, status: int = 200) -> Response:
    """JSON, in which numbers that are not finite are null. What a file spelled is escaped to ASCII."""
    return Response(
        to_json(data), status, media_type="application/json", headers={"cache-control": "no-store"}
    )


def to_json(data: Any) -> str:
    """The text of it."""
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


def answered(endpoint: Endpoint) -> Endpoint:
    """The endpoint, whose errors are answers too."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            told = api_error(error)
            return json_response(told.plain(), told.status)

    return answer


def _refused(request: Request, error: Exception) -> Response:
    """What the router itself refuses: a method that the address does not have."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    return json_response(
        ApiError(status, "no such request", f"{request.method} is not answered here").plain(), status
    )


async def finished(job: Future[T]) -> T:
    """The job's result. A client that goes away takes nothing from others who wait for the same job."""
    return await asyncio.shield(asyncio.wrap_future(job))


# --- keys that several requests have --------------------------------------------------------------

_TEXT = Text(MAX_BODY)
_TOKEN = Integer(0, 2**31 - 1)
PROMPT: Keys = {
    "text": Key(_TEXT),
    "ids": Key(ListOf(_TOKEN, MAX_BODY)),
    "messages": Key(ListOf(mapping, 1000)),
    "chat": Key(flag, False),
    "system": Key(_TEXT),
}


def _head(name: str, value: Any) -> tuple[int, int]:
    layer, head = ListOf(Integer(0, 100_000), 2)(name, value) if isinstance(value, list) else (None, None)
    if layer is None or head is None:
        raise RequestError(name, "must be [layer, head]")
    return layer, head


# --- endpoints ----------------------------------------------------------------------------------


class Api:
    """One method an endpoint."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer

    async def nothing(self, request: Request) -> Response:
        raise ApiError(404, "no such address", "the interface has nothing there", "see docs/explore.md")

    async def state(self, request: Request) -> Response:
        query(request, {})
        return json_response(await run_in_threadpool(self.explorer.state))

    # --- models ---

    async def open_model(self, request: Request) -> Response:
        given = await body(request, {"name": Required(Text(4096))})
        job = self.explorer.worker.submit(lambda: self.explorer.open(given["name"]).plain)
        return json_response(await finished(job))

    async def model(self, request: Request) -> Response:
        query(request, {})
        return json_response(self.explorer.model(request.path_params["model"]).plain)

    async def overview(self, request: Request) -> Response:
        model = self.explorer.model(request.path_params["model"])
        given = query(request, {"tokens": Key(Integer(1, books.MAX_TOKENS), 12)})
        return json_response(
            await run_in_threadpool(books.overview, model.spec, model.dtype, given["tokens"])
        )

    async def ledger(self, request: Request) -> Response:
        model = self.explorer.model(request.path_params["model"])
        given = query(
            request,
            {
                "tokens": Key(Integer(1, books.MAX_TOKENS), 512),
                "past": Key(Integer(0, books.MAX_TOKENS), 0),
                "batch": Key(Integer(1, 1_000_000), 1),
                "dtype": Key(Text(20), model.dtype),
                "mode": Key(Choice(("prefill", "decode", "train")), "prefill"),
                "attention": Key(Choice(("causal", "half", "full")), "causal"),
            },
        )
        return json_response(await run_in_threadpool(books.ledger, model.spec, **given))

    async def tokens(self, request: Request) -> Response:
        model = self.explorer.model(request.path_params["model"])
        given = await body(request, PROMPT)
        prompt = await run_in_threadpool(self.explorer.prompt, model, **given)
        found = await run_in_threadpool(pieces, model.tokenizer, prompt.ids, prompt.origins)
        n_bytes = len(prompt.text.encode("utf-8", "replace"))
        return json_response({"ids": prompt.ids, "pieces": found, "text": prompt.text, "n_bytes": n_bytes})

    # --- runs ---

    async def make_run(self, request: Request) -> Response:
        model = self.explorer.model(request.path_params["model"])
        given = await body(request, {**PROMPT, "ablate": Key(ListOf(_head, 10_000), [])})
        ablate = given.pop("ablate")
        prompt = await run_in_threadpool(self.explorer.prompt, model, **given)
        run = await finished(self.explorer.start_run(model, prompt, ablate))
        return await self._about(run)

    async def run(self, request: Request) -> Response:
        query(request, {})
        return await self._about(self._run(request))

    async def _about(self, run: Run) -> Response:
        return json_response(await run_in_threadpool(lambda: run.plain))

    async def remove_run(self, request: Request) -> Response:
        if not self.explorer.store.remove(request.path_params["run"]):
            raise ApiError(404, "no such run", "it is not kept any more")
        return Response(status_code=204)

    def _run(self, request: Request) -> Run:
        return self.explorer.run(request.path_params["run"])

    # --- tensors ---

    async def tensor(self, request: Request) -> Response:
        run, step = self._run(request), request.path_params["step"]
        given = query(
            request,
            {
                "at": Key(Text(200), ""),
                "max": Key(Integer(1, slices.MAX_AXIS), 256),
                "reduce": Key(Choice(("mean", "absmax", "none")), "mean"),
            },
        )
        content, meta = await run_in_threadpool(
            _binary, run, step, given["at"], given["max"], given["reduce"]
        )
        return binary_response(content, meta)

    async def exact(self, request: Request) -> Response:
        run, step = self._run(request), request.path_params["step"]
        given = query(request, {"at": Key(Text(200), "")})
        return json_response(await run_in_threadpool(_exact, run, step, given["at"]))


def binary_response(content: bytes, meta: Mapping[str, Any]) -> Response:
    """Numbers as they lie in memory, and in a header what they are."""
    headers = {"x-openbook-meta": to_json(meta), "cache-control": "no-store"}
    return Response(content, media_type="application/octet-stream", headers=headers)


def _cut(run: Run, step: str, at: str) -> tuple[slices.Slice, tuple[int, ...]]:
    """A part of a step's tensor, and the whole one's shape."""
    if step not in run.trace.tensors:
        raise ApiError(404, "no such step", "the run has no tensor of this name")
    tensor = run.trace.tensors[step]
    return slices.take(tensor, run.trace.axes[step], at), tuple(tensor.shape)


def _binary(run: Run, step: str, at: str, longest: int, how: str) -> tuple[bytes, dict[str, Any]]:
    cut, full_shape = _cut(run, step, at)
    reduced = slices.reduced(cut.values, longest, how)
    low, high = slices.limits(reduced.values)
    meta = {
        "axes": cut.axes,
        "start": cut.start,
        "shape": tuple(reduced.values.shape),
        "slice_shape": cut.shape,
        "full_shape": full_shape,
        "full_axes": run.trace.axes[step],
        "block": reduced.block,
        "low": low,
        "high": high,
    }
    return little_endian(reduced.values), meta


def little_endian(values: Any) -> bytes:
    """A tensor's numbers, row by row."""
    return values.contiguous().numpy().astype("<f4", copy=False).tobytes()


def _exact(run: Run, step: str, at: str) -> dict[str, Any]:
    cut, full_shape = _cut(run, step, at)
    if cut.values.numel() > slices.MAX_EXACT:
        raise RequestError(
            "at", f"leaves {cut.values.numel():,} numbers, at most {slices.MAX_EXACT:,} are written out"
        )
    return {
        "axes": cut.axes,
        "start": cut.start,
        "shape": cut.shape,
        "full_shape": full_shape,
        "values": cut.values.float().tolist(),
    }
