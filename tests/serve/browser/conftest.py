"""A real browser before a real server: `openbook explore` on a free port, Chromium without a window."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_models import noisy, tiny, vocabulary
from openbook.sources import resolve
from openbook.text import Tokenizer
from openbook.trace import Trace, record
from openbook.weights.load import load_decoder
from openbook.weights.save_gguf import save_gguf
from page import FLAGS, Server, chromium, serving

PROMPT = "the 龘 sh"
"""Of the tiny model: some letters, and a Chinese character that lies over three tokens."""

TEMPLATE = (
    "{% for m in messages %}<|endoftext|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
    "<|endoftext|>assistant\n"
)


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    path = chromium()
    if path is None:
        pytest.skip("no chromium here: apt-get install chromium, or name one in OPENBOOK_CHROMIUM")
    sync = pytest.importorskip(
        "playwright.sync_api", reason="the page's tests drive a browser with playwright"
    )
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts whose 6 query heads share 2 key/value heads, with a tokenizer and a
    chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    save_gguf(noisy(tiny("llama")), path, "F32", vocabulary() | {"tokenizer.chat_template": TEMPLATE})
    return path


@pytest.fixture(scope="session")
def tiny_trace(tiny_model: Path) -> Trace:
    """Every step of the tiny model reading `PROMPT`, computed here: in fp32, by PyTorch."""
    tokenizer = Tokenizer.from_source(resolve(str(tiny_model)))
    assert tokenizer is not None
    return record(load_decoder(tiny_model, "fp32"), torch.tensor([tokenizer.encode(PROMPT)]))


@pytest.fixture(scope="session")
def tiny_server(browser: object, tiny_model: Path) -> Iterator[Server]:
    with serving(str(tiny_model)) as server:
        yield server


@pytest.fixture
def tiny_url(tiny_server: Server) -> Callable[..., str]:
    """The address of a view of the tiny model's run of `PROMPT`."""
    return partial(tiny_server.url, run=PROMPT)


@pytest.fixture(scope="session")
def smollm2_server(browser: object, smollm2: Path) -> Iterator[Server]:
    with serving("smollm2-135m") as server:
        yield server


class Windows:
    """Windows of the browser, and what went wrong in them: errors that pages logged, strangers they asked."""

    def __init__(self, browser) -> None:
        self.browser = browser
        self.contexts: list[Any] = []
        self.page = None
        """The one that tests share, if they do."""
        self.troubles: list[str] = []
        self.expects = "$^"

    def open(self, url: str, theme: str = "light", size: tuple[int, int] = (1280, 900), locale: str = "en"):
        """A page at an address, in a context of its own."""
        context = self.browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=theme,
            locale=locale,
            reduced_motion="reduce",
            accept_downloads=True,
        )
        self.contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        home = url[: url.index("/", len("http://")) + 1]
        page.on("console", lambda said: said.type in ("error", "warning") and self.trouble(said.text))
        page.on("pageerror", lambda error: self.trouble(str(error)))
        page.on(
            "request",
            lambda asked: asked.url.startswith((home, "blob:", "data:")) or self.trouble(asked.url),
        )
        page.goto(url)
        return page

    def trouble(self, what: str) -> None:
        if not re.search(self.expects, what):
            self.troubles.append(what)

    def raise_troubles(self) -> None:
        troubles, self.troubles, self.expects = self.troubles, [], "$^"
        assert not troubles, troubles

    def close(self) -> None:
        for context in self.contexts:
            context.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., object]]:
    """Opens an address in a fresh window, and at the end holds that no page logged an error or asked a
    stranger for anything. `expects` are patterns of messages that the test means to cause."""
    windows = Windows(browser)

    def open_at(url: str, expects: str = "$^", **how):
        windows.expects = expects
        return windows.open(url, **how)

    yield open_at
    windows.close()
    windows.raise_troubles()


@pytest.fixture(scope="module")
def shared_windows(browser) -> Iterator[Windows]:
    windows = Windows(browser)
    yield windows
    windows.close()


@pytest.fixture
def show(shared_windows: Windows) -> Iterator[Callable[..., object]]:
    """Goes to an address in the one window of a file's tests, and holds what `open_page` does. The page
    is not loaded again: it lets go of model and view first, so that nothing seen there is of the test
    before."""

    def show_at(url: str, expects: str = "$^"):
        shared_windows.expects = expects
        home = url.split("#")[0]
        page = shared_windows.page
        if page is None or page.url.split("#")[0] != home:
            shared_windows.page = shared_windows.open(url)
            return shared_windows.page
        page.goto(f"{home}#/overview")
        page.wait_for_selector("[data-testid=welcome]")
        page.goto(url)
        return page

    yield show_at
    shared_windows.raise_troubles()
