"""A vocabulary whose tokens spell markup and control characters: text in every view, and never run."""

from pathlib import Path
from urllib.parse import quote_plus

import pytest
import torch

from gguf_models import noisy, tiny, vocabulary
from openbook.serve.explorer import Explorer
from openbook.weights.save_gguf import save_gguf
from page import in_thread

MARKUP = "<script>hit()</script><img/src=x/onerror=hit()>"
HIDDEN = "\u202e\u200b\x07\x1b[31m"
TOLD = "\\u202e\\u200b\\u0007\\u001b[31m"
READY = "main[aria-busy=false]:not(:has([data-testid=loading], .stale))"


@pytest.fixture(scope="module")
def hostile_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last two words but the end are hostile, and one of them is always what it expects next."""
    words = vocabulary()
    markup, hidden = len(words["tokenizer.ggml.tokens"]) - 3, len(words["tokenizer.ggml.tokens"]) - 2
    words["tokenizer.ggml.tokens"][markup : hidden + 1] = [MARKUP, HIDDEN]
    words["tokenizer.ggml.token_type"][markup : hidden + 1] = [4, 4]  # found in a text as they stand
    words["tokenizer.ggml.merges"] = words["tokenizer.ggml.merges"][:-2]
    decoder = noisy(tiny("llama"))
    with torch.no_grad():
        rows = decoder.head.weight
        rows[hidden] = -20 * rows[markup]
        rows[markup] *= 20
    path = tmp_path_factory.mktemp("hostile") / "hostile.gguf"
    save_gguf(decoder, path, "F32", words)
    return path


@pytest.fixture(scope="module")
def address(hostile_model: Path):
    with in_thread(Explorer(200_000_000)) as address:
        yield address


@pytest.mark.parametrize(
    "view", ["overview", "tokens", "steps", "attention", "residual", "next", "cache", "teaching", "compare"]
)
def test_a_token_is_text_whatever_it_spells(address, hostile_model, show, view):
    prompt = quote_plus(MARKUP + "a" + HIDDEN)
    page = show(f"{address}/?lang=en#/{view}?model={hostile_model}&run={prompt}&text={prompt}&at=0")
    page.wait_for_selector(f"[data-testid=view-{view}]")
    page.wait_for_selector(READY)
    page.wait_for_load_state("networkidle")
    if view == "cache":
        page.wait_for_selector("[data-testid=cache-progress][data-state=done]", state="attached")
    text = page.evaluate("document.querySelector('main').textContent")
    if view not in ("overview", "steps"):  # a step's tokens stand on its canvas
        assert MARKUP in text
        assert TOLD in text
    assert not set("\u202e\u200b\x07\x1b") & set(text)
    assert page.query_selector_all("#app script, #app img") == []
    assert page.evaluate("typeof hit") == "undefined"
