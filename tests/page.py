"""What the tests of the page share: its numbers, the rows of its tables, a browser, two kinds of server."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus

SUFFIXES = {
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "KFLOP": 1e3,
    "MFLOP": 1e6,
    "GFLOP": 1e9,
    "KiB": 2**10,
    "MiB": 2**20,
    "%": 0.01,
}


def number(text: str) -> float:
    """1,234.5, −0.25, 1.2e−7, 62.1 %, 4.5 MiB, 1.33 G, ∞."""
    first, *unit = text.replace("−", "-").replace(",", "").replace("∞", "inf").split()
    return float(first) * (SUFFIXES.get(unit[0], 1.0) if unit else 1.0)


def cells(page: Any, testid: str) -> list[list[str]]:
    """The cells of a table's rows that are drawn, as text."""
    page.wait_for_selector(f"[data-testid={testid}-row]")
    return page.eval_on_selector_all(
        f"[data-testid={testid}-row]",
        "rows => rows.map(row => [...row.querySelectorAll('td')].map(cell => cell.textContent.trim()))",
    )


def data(page: Any, testid: str, name: str) -> list[Any]:
    """The `data-NAME` of every element whose test id begins so, as numbers by the rest of the id."""
    return page.eval_on_selector_all(
        f"[data-testid^='{testid}']",
        f"all => all.map(one => [one.dataset.testid.slice({len(testid)}), Number(one.dataset.{name})])",
    )


def spelled(token: bytes) -> str:
    """A token as the page shows it: blanks made visible, control characters and halves of others told."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return f"⟨{token.hex(' ')}⟩".replace(" ", "\xa0")
    shown = {" ": "␣", "\n": "⏎", "\t": "⇥"}
    return "".join(shown.get(c, c if c.isprintable() else f"\\u{ord(c):04x}") for c in text)


FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
)


def chromium() -> str | None:
    return os.environ.get("OPENBOOK_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def real_page(model: str) -> Iterator[tuple[Any, str]]:
    """A browser, and the address of `openbook explore MODEL`: for scripts that measure and take pictures."""
    from playwright.sync_api import sync_playwright

    with serving(model, threads=None) as server, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        yield browser, f"{server.address}/"
        browser.close()


@dataclass(frozen=True)
class Server:
    """Where it answers, and the model that it was started with."""

    address: str
    model: str

    def url(self, view: str, run: str | None = None, lang: str = "en", **params: object) -> str:
        """The address of a view, as the page itself writes it."""
        asked = {"model": self.model} | ({"run": run} if run is not None else {}) | params
        query = "&".join(f"{key}={quote_plus(str(value))}" for key, value in asked.items())
        return f"{self.address}/?lang={lang}#/{view}?{query}"


@contextmanager
def serving(model: str, threads: int | None = 1) -> Iterator[Server]:
    """`openbook explore MODEL` in a process of its own; None: with all threads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "openbook", "explore", model, "--no-browser", "--port", str(port)]
    env = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        found = re.match(r"(http://127\.0\.0\.1:\d+)/", process.stdout.readline())
        if found is None:
            process.kill()
            raise AssertionError(f"no address from {command}: {process.communicate()[1]}")
        yield Server(found[1], model)
    finally:
        process.terminate()
        process.communicate(timeout=20)


@contextmanager
def in_thread(explorer: Any) -> Iterator[str]:
    """The address of a server of this explorer, which ends with the block."""
    import uvicorn

    from openbook.serve.app import make_app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(make_app(explorer, port), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
