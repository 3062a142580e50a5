"""What the tests of the page's views share: its numbers, the rows of its tables, a server in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
