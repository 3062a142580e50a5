"""`openbook explore`: the page that shows every step of a model."""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import Annotated

import typer

import openbook
from openbook.cli import terminal
from openbook.cli.errors import INTERRUPTED, MissingExtraError, UsageError
from openbook.cli.options import Quiet, Threads, Verbose

HOST = "127.0.0.1"
DEFAULT_PORT = 8009
PORTS_TRIED = 20
"""From the default port on, where none was asked for."""


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A preset, a fetched model's name, a folder, a config.json or a .gguf file to begin with.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Listen on this port.", show_default=f"{DEFAULT_PORT} or next"),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
    store: Annotated[str, typer.Option(metavar="SIZE", help="Memory for runs, as in 500MB, 2GiB.")] = "2GiB",
    runs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR", help="Show the training runs in this folder too; repeatable.", show_default=False
        ),
    ] = None,
    threads: Threads = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Opens a page that shows every tensor of a model as it runs. Ctrl-C ends it, with exit code 130.

    Only this machine can reach it: it listens on 127.0.0.1.
    """
    limit = size_in_bytes(store)
    if model is not None:
        from openbook.sources import resolve

        resolve(model)  # that it is not there is told before torch is loaded
    try:
        import uvicorn

        from openbook.serve.app import make_app
        from openbook.serve.explorer import Explorer
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("starlette", "uvicorn"):
            raise
        raise MissingExtraError(
            f"the page needs {missing}, which is not installed: pip install 'openbook[serve]'"
        ) from None
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    explorer = Explorer(limit, runs or (), openbook.__version__)
    opened = explorer.open(model) if model is not None else None
    listening = listen(port)
    address = address_of(listening, opened.name if opened else None)
    config = uvicorn.Config(
        make_app(explorer, listening.getsockname()[1]),
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        lifespan="off",
    )
    print(address, flush=True)
    terminal.note("Ctrl-C ends it.")
    if browser:
        import threading
        import webbrowser

        # A browser of the terminal would not let go before the server has answered it.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        if explorer.worker.busy:
            # Nobody waits for its result, there is nothing to save, and Python would not survive to
            # end beside a thread that is deep in PyTorch.
            sys.stdout.flush()
            os._exit(INTERRUPTED)


def listen(port: int | None) -> socket.socket:
    """A socket that listens; on the next free port if the default one is taken. Raises `UsageError`."""
    ports = range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED) if port is None else (port,)
    for each in ports:
        # asyncio sends small answers at once (TCP_NODELAY) only where the protocol is named.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, each))
            listening.listen(128)
        except OSError:
            listening.close()
        else:
            return listening
    if port is None:
        raise UsageError(f"ports {ports[0]} to {ports[-1]} are all taken: choose one with --port")
    raise UsageError(f"port {port} is taken or not allowed: choose another with --port")


def address_of(listening: socket.socket, model: str | None) -> str:
    """What to open in a browser."""
    from urllib.parse import quote

    place = f"#/overview?model={quote(model, safe='')}" if model else ""
    return f"http://{HOST}:{listening.getsockname()[1]}/{place}"


_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(?:([kmgt])(i?))?b?", re.IGNORECASE)


def size_in_bytes(text: str) -> int:
    """Of "2GiB", 2 · 1024³; of "500MB", 500 · 1000². Raises `UsageError`."""
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        power = "kmgt".index(found[2].lower()) + 1 if found[2] else 0
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
        if size > 0:
            return size
    raise UsageError(f"--store {text!r} is no size: write it as 500MB or 2GiB")
