"""Who may talk to the server, and what a browser may do with its answers.

The server is for the person at this machine. A page from elsewhere, opened in the same browser, must
neither read nor start anything: not by a request of its own (`Origin`, `Sec-Fetch-Site`), and not under a
name of its own that it lets point here (`Host`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openbook.serve.errors import ApiError

MAX_BODY = 4_000_000
"""Bytes of a request's body."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

HEADERS: tuple[tuple[bytes, bytes], ...] = tuple(
    (name.encode(), value.encode())
    for name, value in {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
    }.items()
)
"""Of every answer."""


class Guard:
    """An application around another: refuses strangers and too much, and adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app
        names = ("127.0.0.1", "localhost")
        self.hosts = {f"{name}:{port}" for name in names} | ({*names} if port == 80 else set())
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        try:
            self.check(scope)
        except ApiError as error:
            await _answer(error, guarded)
        else:
            await self.app(scope, _bounded(receive), guarded)

    def check(self, scope: Scope) -> None:
        """Raises `ApiError` for a request that no page of ours makes."""
        headers = _Headers(scope["headers"])
        host = headers.only("host")
        if host is None or host not in self.hosts:
            raise ApiError(
                403,
                "not this host",
                f"the request is for {host!r}",
                "open the address that the server printed",
            )
        origin = headers.only("origin")
        if "origin" in headers and (origin is None or origin not in self.origins):
            raise ApiError(403, "not from this page", f"the request comes from {origin!r}")
        if scope["path"].startswith("/api/") and headers.only("sec-fetch-site") in (
            "cross-site",
            "same-site",
        ):
            raise ApiError(403, "not from this page", "the request comes from another site")
        if scope["method"] not in ("GET", "HEAD"):
            kind = (headers.only("content-type") or "").partition(";")[0].strip().lower()
            if scope["method"] == "POST" and kind != "application/json":
                raise ApiError(400, "not JSON", f"the body's type is {kind!r}", "send application/json")
            length = headers.only("content-length")
            if length is not None and (not length.isdecimal() or len(length) > 15 or int(length) > MAX_BODY):
                raise _too_large()


class _Headers:
    """A request's headers, whose names may occur more than once."""

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self._raw = [(name.lower().decode("latin-1"), value.decode("latin-1")) for name, value in raw]

    def __contains__(self, name: str) -> bool:
        return any(found == name for found, _ in self._raw)

    def only(self, name: str) -> str | None:
        """The value, lower-case; None if there is none, or more than one."""
        values = [value.strip().lower() for found, value in self._raw if found == name]
        return values[0] if len(values) == 1 else None


def _bounded(receive: Receive) -> Receive:
    """The body's parts, as long as they are not too many."""
    taken = 0

    async def part() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MAX_BODY:
            raise _too_large()
        return message

    return part


def _too_large() -> ApiError:
    return ApiError(413, "too large", f"a request has at most {MAX_BODY:,} bytes", "send a shorter text")


async def _answer(error: ApiError, send: Send) -> None:
    body = json.dumps(error.plain()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
