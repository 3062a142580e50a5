"""A person opens SmolLM2 and looks at the attention of layer 3, head 2: by mouse, and by keyboard alone."""

from functools import cache

import pytest
import torch

from openbook.sources import resolve
from openbook.text import Tokenizer
from openbook.trace import record
from openbook.weights.load import load_decoder

PROMPT = "The capital of France is"
WORDS = {
    "en": ("Attention", "Head 2 of layer 3 gives {} of its attention to token {} (“The”)."),
    "zh-CN": ("注意力", "第 3 层的头 2 把 {} 的注意力给了词元 {}（“The”）。"),
}

pytestmark = pytest.mark.model


@cache
def probabilities() -> torch.Tensor:
    """[T, T] of layer 3, head 2, computed here, in fp32 as the server does."""
    tokenizer = Tokenizer.from_source(resolve("smollm2-135m"))
    assert tokenizer is not None
    trace = record(load_decoder("smollm2-135m", "fp32"), torch.tensor([tokenizer.encode(PROMPT)]))
    return trace.tensor("layers.3.attn.probs")[0, 2]


def sentence(lang: str) -> str:
    share = probabilities().mean(0)
    return WORDS[lang][1].format(f"{100 * float(share.max()):.1f} %", int(share.argmax()))


def holds_the_right_head(page, lang: str) -> None:
    page.wait_for_selector("[data-testid=one-head][data-head='3.2.probs'][data-fresh=true]")
    assert page.inner_text("h1") == WORDS[lang][0]
    assert page.inner_text("[data-testid=head-sentence]") == sentence(lang)
    page.click("[data-testid=head-as-table]")
    cells = [
        row.inner_text().split("\t")[1:] for row in page.query_selector_all("[data-testid=head-table-row]")
    ]
    for shown, row in zip(cells, probabilities().tolist(), strict=True):
        assert [float(cell.replace("−", "-")) for cell in shown] == pytest.approx(row, rel=6e-3, abs=1e-9)


@pytest.mark.parametrize("lang", WORDS)
def test_by_mouse(smollm2_server, open_page, lang):
    page = open_page(f"{smollm2_server.address}/?lang={lang}")
    page.click("[data-testid=model-button]")
    page.click("[data-testid=dialog-model] [data-testid='model-smollm2-135m']")
    page.fill("[data-testid=prompt]", PROMPT)
    page.click("[data-testid=run]")
    page.click("[data-testid=rail-attention]")
    page.select_option("[data-testid=attention-layer]", "3")
    page.select_option("[data-testid=attention-head]", "2")
    holds_the_right_head(page, lang)


@pytest.mark.parametrize("lang", WORDS)
def test_by_keyboard_alone(smollm2_server, open_page, lang):
    page = open_page(f"{smollm2_server.address}/?lang={lang}")
    page.wait_for_selector("[data-testid=rail-attention]")
    press = page.keyboard.press

    def tab_to(testid: str) -> None:
        for _ in range(80):
            press("Tab")
            if page.evaluate("document.activeElement.dataset.testid") == testid:
                return
        raise AssertionError(f"Tab never comes to {testid}")

    press("m")
    page.wait_for_selector("[data-testid=dialog-model] [data-testid='model-smollm2-135m']")
    tab_to("model-smollm2-135m")
    press("Enter")
    page.wait_for_selector("[data-testid=overview-facts]")
    press("/")
    press("Control+a")
    page.keyboard.type(PROMPT)
    press("Enter")
    tab_to("rail-attention")
    press("Enter")
    page.wait_for_selector("[data-testid=heads-canvas]")
    tab_to("heads-canvas")
    for key in ["ArrowDown"] * 3 + ["ArrowRight"] * 2:
        press(key)
    holds_the_right_head(page, lang)
