"""The page's files: those of the package's `web` folder, by their exact names and of known types only."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from openbook.serve.errors import ApiError

WEB = Path(__file__).parent / "web"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
"""No part begins with a dot, so none is `..`."""


async def page(request: Request) -> Response:
    """GET of a file; without a name, of index.html."""
    name = request.path_params["name"] or "index.html"
    path = WEB / name
    if not _NAME.fullmatch(name) or path.suffix not in TYPES or not path.is_file():
        raise ApiError(404, "no such page", "the server has no file of this name", "open /")
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"etag": etag, "cache-control": "no-cache"}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[path.suffix], headers=headers)
