"""The HTTP interface: each endpoint reads a request, asks the explorer, and answers. See docs/explore.md."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openbook.infer.sample import RequestError, SamplingParams
from openbook.ledger import Ledger
from openbook.serve import books, decoding, inside, slices, static, teaching, training
from openbook.serve.comparing import compare
from openbook.serve.errors import ApiError, api_error
from openbook.serve.explorer import CHARS_PER_TOKEN, Explorer, Model, Run
from openbook.serve.lines import Lines, to_json
from openbook.serve.listings import listing
from openbook.serve.next_token import next_token
from openbook.serve.pieces import pieces
from openbook.serve.requests import (
    Choice,
    Integer,
    Key,
    Keys,
    ListOf,
    Number,
    Required,
    Text,
    body,
    flag,
    mapping,
    query,
)
from openbook.serve.security import MAX_BODY, Guard
from openbook.serve.worker import use_threads
from openbook.weights.fit import check_fit

READERS = 4
"""Threads that look into finished runs: each may have copies of a tensor's parts. None has PyTorch's threads
beside it: once more of those have worked than there are cores, OpenMP lets all sleep between any two
operations, and the worker's statistics of a run take twice as long."""

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
        get("source", api.source),
        post("models/{model}/tokens", api.tokens),
        post("models/{model}/runs", api.make_run),
        get("runs/{run}", api.run),
        Route("/api/runs/{run}", answered(api.remove_run), methods=["DELETE"]),
        get("runs/{run}/tensors/{step}.json", api.exact),
        get("runs/{run}/tensors/{step}", api.tensor),
        get("runs/{run}/attention", api.attention),
        get("runs/{run}/lens", api.lens),
        post("runs/{run}/next", api.next_token),
        post("models/{model}/cache", api.cache),
        get("models/{model}/cache_whatif", api.cache_what_if),
        post("models/{model}/teaching", api.teaching),
        post("models/{model}/optimizer_step", api.optimizer_step),
        get("training", api.training),
        get("training/{name:path}", api.training_run),
        post("compare", api.compare),
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
    return written_json(to_json(data), status)


def written_json(text: str, status: int = 200) -> Response:
    """JSON that is written already."""
    return Response(text, status, media_type="application/json", headers={"cache-control": "no-store"})


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
    if not isinstance(value, list) or len(value) != 2:
        raise RequestError(name, "must be [layer, head]")
    layer, head = ListOf(Integer(0, 2**31 - 1), 2)(name, value)
    return layer, head


# --- endpoints ----------------------------------------------------------------------------------


class Api:
    """One method an endpoint."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self._readers = ThreadPoolExecutor(READERS, "reader", partial(use_threads, 1))

    async def _read(self, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """The result of work that needs no model's weights, done beside the worker's."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(work, *args, **named))

    async def nothing(self, request: Request) -> Response:
        raise ApiError(404, "no such address", "the interface has nothing there", "see docs/explore.md")

    async def state(self, request: Request) -> Response:
        query(request, {})
        return json_response(await self._read(self.explorer.state))

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
        return json_response(await self._read(books.overview, model.spec, model.dtype, given["tokens"]))

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
        return json_response(await self._read(books.ledger, model.spec, **given))

    async def source(self, request: Request) -> Response:
        given = query(request, {"step": Required(Text(200)), "model": Required(Text(100))})
        model = self.explorer.model(given["model"])
        return json_response(await self._read(listing, model.spec, given["step"]))

    async def tokens(self, request: Request) -> Response:
        model = self.explorer.model(request.path_params["model"])
        given = await body(request, PROMPT)
        prompt = await self._read(self.explorer.prompt, model, **given)
        found = await self._read(pieces, model.tokenizer, prompt.ids, prompt.origins)
        n_bytes = len(prompt.text.encode("utf-8", "replace"))
        return json_response({"ids": prompt.ids, "pieces": found, "text": prompt.text, "n_bytes": n_bytes})

    # --- runs ---

    async def make_run(self, request: Request) -> Response:
        model = self.explorer.model(request.path_params["model"])
        model.require_weights()
        given = await body(request, {**PROMPT, "ablate": Key(ListOf(_head, 10_000), [])})
        ablate = given.pop("ablate")
        prompt = await self._read(self.explorer.prompt, model, **given)
        run = await finished(self.explorer.start_run(model, prompt, ablate))
        return await self._about(run)

    async def run(self, request: Request) -> Response:
        query(request, {})
        return await self._about(self._run(request))

    async def _about(self, run: Run) -> Response:
        return json_response(await self._read(lambda: run.plain))

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
        content, meta = await self._read(_binary, run, step, given["at"], given["max"], given["reduce"])
        return binary_response(content, meta)

    async def exact(self, request: Request) -> Response:
        run, step = self._run(request), request.path_params["step"]
        given = query(request, {"at": Key(Text(200), "")})
        return json_response(await self._read(_exact, run, step, given["at"]))

    # --- what joins many tensors ---

    async def attention(self, request: Request) -> Response:
        run = self._run(request)
        given = query(request, {"size": Key(Integer(4, 64), 24)})
        content, meta = await self._read(
            run.remembered, f"attention {given['size']}", lambda: inside.thumbnails(run, given["size"])
        )
        return binary_response(content, meta)

    async def lens(self, request: Request) -> Response:
        run = self._run(request)
        layers, tokens = run.trace.spec.n_layers, len(run.prompt.ids)
        keys: Keys = {
            "start": Key(Integer(0, tokens - 1), 0),
            "stop": Key(Integer(1, tokens), tokens),
            "row": Key(Integer(0, layers - 1)),
            "position": Key(Integer(0, tokens - 1)),
            "n": Key(Integer(1, 100), 12),
        }
        given = query(request, keys)
        row, position, start, stop = (given[name] for name in ("row", "position", "start", "stop"))
        if (row is None) != (position is None):
            raise RequestError("row", "and position are given together, or neither")
        if not start < stop:
            raise RequestError("stop", f"must be beyond start, {start}")

        def read() -> str:
            decoder = self.explorer.weights(run.model).decoder
            if row is not None:
                return to_json(inside.lens_cell(run, decoder, row, position, given["n"]))
            return run.remembered(
                f"lens {start} {stop}", lambda: to_json(inside.lens(run, decoder, slice(start, stop)))
            )

        return written_json(await finished(self.explorer.worker.submit(read)))

    async def next_token(self, request: Request) -> Response:
        run = self._run(request)
        given = await body(
            request,
            {
                "position": Key(Integer(0, len(run.prompt.ids) - 1), len(run.prompt.ids) - 1),
                "temperature": Key(Number(0, 1e6), 1.0),
                "top_k": Key(Integer(-1, 2**31 - 1), 0),
                "top_p": Key(Number(0, 1), 1.0),
                "min_p": Key(Number(0, 1), 0.0),
                "seed": Key(Integer(0, 2**63 - 1), 0),
                "n": Key(Integer(1, 1000), 40),
            },
        )
        position, n = given.pop("position"), given.pop("n")
        return json_response(await self._read(next_token, run, position, SamplingParams(**given), n))

    async def compare(self, request: Request) -> Response:
        given = await body(request, {"a": Required(Text(100)), "b": Required(Text(100))})
        a, b = self.explorer.run(given["a"]), self.explorer.run(given["b"])
        return json_response(await self._read(compare, a, b))

    # --- generation and training ---

    async def cache(self, request: Request) -> Response:
        model = self.explorer.model(request.path_params["model"])
        model.require_weights()
        given = await body(request, {**PROMPT, "tokens": Key(Integer(1, MOST_GENERATED), 16)})
        n = given.pop("tokens")
        prompt = await self._read(self.explorer.prompt, model, **given)
        decoding.check_room(model.spec, len(prompt.ids), n)

        def lines() -> Iterator[dict[str, Any]]:
            length = len(prompt.ids) + n
            needed = Ledger(model.spec).kv_bytes(1, length, model.dtype)
            with self.explorer.store.room(needed, f"a KV cache for {length:,} tokens"):
                yield from decoding.generation(model, self.explorer.weights(model).decoder, prompt.ids, n)

        return Lines(self.explorer.worker, lines)

    async def cache_what_if(self, request: Request) -> Response:
        model = self.explorer.model(request.path_params["model"])
        given = query(request, {"tokens": Key(Integer(1, books.MAX_TOKENS), 4096)})
        return json_response(await self._read(decoding.what_if, model.spec, model.dtype, given["tokens"]))

    async def teaching(self, request: Request) -> Response:
        model = self.explorer.model(request.path_params["model"])
        given = await body(request, {"text": Required(Text(_TAUGHT_CHARS))})
        self._taught(model, given["text"])

        def teach() -> dict[str, Any]:
            return teaching.teach(model, self.explorer.weights(model).decoder, given["text"])

        return json_response(await finished(self.explorer.worker.submit(teach)))

    async def optimizer_step(self, request: Request) -> Response:
        model = self.explorer.model(request.path_params["model"])
        keys: Keys = {
            "text": Required(Text(_TAUGHT_CHARS)),
            "lr": Key(Number(0, 1), 1e-3),
            "optimizer": Key(Choice(tuple(teaching.OPTIMIZERS))),
        }
        given = await body(request, keys)
        ids = self._taught(model, given["text"])
        limit = self.explorer.store.limit
        optimizer = teaching.choose_optimizer(model, len(ids) - 1, limit, given["optimizer"])
        needed = sum(teaching.step_memory(model, len(ids) - 1, optimizer).values())

        def step() -> dict[str, Any]:
            with self.explorer.store.room(needed, "a step of training"):
                check_fit("a step of training", needed)
                decoder = self.explorer.weights(model).decoder
                return teaching.one_step(model, decoder, ids, given["lr"], optimizer)

        return json_response(await finished(self.explorer.worker.submit(step)))

    def _taught(self, model: Model, text: str) -> list[int]:
        """The tokens of a text to be taught."""
        model.require_weights()
        ids, _ = teaching.both_ways(model, text)
        most = min(teaching.LONGEST, model.spec.max_positions)
        if not 2 <= len(ids) <= most:
            raise RequestError("text", f"must be 2 to {most} tokens, found {len(ids):,}")
        return ids

    async def training(self, request: Request) -> Response:
        query(request, {})
        return json_response({"runs": await self._read(training.listing, self.explorer.folders)})

    async def training_run(self, request: Request) -> Response:
        given = query(request, {"after": Key(Integer(-1, 2**53), -1)})
        name = request.path_params["name"]
        return json_response(await self._read(training.progress, self.explorer.folders, name, given["after"]))


MOST_GENERATED = 256
"""Tokens of one stream: each is computed twice, with and without the cache."""

_TAUGHT_CHARS = CHARS_PER_TOKEN * teaching.LONGEST


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
