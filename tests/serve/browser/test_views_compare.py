"""Two runs side by side: the page's probabilities, divergence and differences are Python's."""

from pathlib import Path

import pytest
import torch

import gguf_models
import openbook as ob
from openbook.trace import record
from openbook.weights.save_gguf import save_gguf
from page import cells, data, number

HEADS = [(1, 3), (2, 0)]


@pytest.fixture(scope="module")
def lm(tiny_model: Path):
    return ob.load(tiny_model, native=False)


@pytest.fixture(scope="module")
def vocabulary(lm) -> int:
    return lm.tokenizer.vocab_size


def log_probs(trace, vocabulary: int) -> torch.Tensor:
    return trace.tensor("head")[0, -1, :vocabulary].double().log_softmax(-1)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p.exp() * (p - q)).sum())


def shown_kl(page) -> float:
    return float(page.get_attribute("[data-testid=compare-kl]", "data-kl"))


def same_distributions(page, p: torch.Tensor, q: torch.Tensor) -> None:
    for side, expected in (("a", p), ("b", q)):
        shown = {int(i): value for i, value in data(page, "next-bars-", side) if i.isdigit()}
        assert len(shown) > 5
        for token, value in shown.items():
            assert value == pytest.approx(float(expected[token].exp()), rel=1e-5, abs=1e-9)


def test_ablated_heads_change_the_next_token_as_in_python(tiny_url, show, lm, tiny_trace, vocabulary):
    page = show(tiny_url("compare", heads="1.3"))
    page.select_option("[data-testid=compare-layer]", label="2")
    page.select_option("[data-testid=compare-head]", label="0")
    page.click("[data-testid=compare-add]")
    page.wait_for_selector("[data-testid=next-bars] .legend:has-text('1.3, 2.0')")
    page.wait_for_selector("[data-testid=compare-loaded][aria-busy=false]")
    assert "heads=1.3%2C2.0" in page.url
    other = record(lm.decoder, tiny_trace.ids, ablate=HEADS)
    p, q = log_probs(tiny_trace, vocabulary), log_probs(other, vocabulary)
    same_distributions(page, p, q)
    assert shown_kl(page) == pytest.approx(kl(p, q), rel=1e-4)
    assert "layers.1.attn.mix" in page.inner_text("[data-testid=compare-chart-sentence]")
    rows = {row[0]: row for row in cells(page, "steps-table")}
    for name in ("layers.1.attn.o", "layers.2.mlp_add"):
        x, y = tiny_trace.tensor(name).double(), other.tensor(name).double()
        assert number(rows[name][1]) == pytest.approx(float((y - x).abs().max()), rel=6e-4)
        assert number(rows[name][2]) == pytest.approx(float((y - x).norm() / x.norm()), rel=6e-4)
    assert number(rows["layers.1.attn.q"][1]) == 0


def test_two_prompts_may_have_different_lengths(tiny_url, show, lm, tiny_trace, vocabulary):
    page = show(tiny_url("compare", what="prompt"))
    page.wait_for_selector("[data-testid=compare-empty]")
    page.fill("[data-testid=compare-prompt]", "the red sea and the shore")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-testid=pieces-b]")
    other = record(lm.decoder, torch.tensor([lm.tokenizer.encode("the red sea and the shore")]))
    same_distributions(page, log_probs(tiny_trace, vocabulary), log_probs(other, vocabulary))
    assert page.is_visible("[data-testid=compare-shapes]")


def test_two_checkpoints_are_compared(tiny_url, show, tiny_trace, vocabulary, tmp_path: Path):
    spec = gguf_models.tiny("llama")
    second = tmp_path / "second.gguf"
    decoder = gguf_models.noisy(spec)
    with torch.no_grad():
        decoder.layers[1].mlp_norm.weight.mul_(1.5)
    save_gguf(decoder, second, "F32", gguf_models.vocabulary())
    page = show(tiny_url("compare", what="model"))
    page.fill("[data-testid=compare-path]", str(second))
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-testid=next-bars]")
    other = record(ob.load(second).decoder, tiny_trace.ids)
    p, q = log_probs(tiny_trace, vocabulary), log_probs(other, vocabulary)
    same_distributions(page, p, q)
    assert shown_kl(page) == pytest.approx(kl(p, q), rel=1e-4)
    assert "layers.1.mlp_norm" in page.inner_text("[data-testid=compare-chart-sentence]")


def test_a_run_beside_itself_differs_nowhere(tiny_url, show):
    page = show(tiny_url("compare", what="prompt", prompt="the 龘 sh"))
    page.wait_for_selector("[data-testid=next-bars]")
    assert shown_kl(page) == 0
    assert page.inner_text("[data-testid=compare-chart-sentence]") == "No step differs."


def test_what_is_typed_stays_when_the_page_is_drawn_again_meanwhile(tiny_url, show):
    """The names of the models arrive while a path is being typed."""
    page, held = show(tiny_url("compare", what="prompt", prompt="")), []
    page.wait_for_selector("[data-testid=compare-prompt]")

    def hold(route) -> None:  # playwright sets attributes of its handlers: a list's method has none
        held.append(route)

    page.route("**/api/state", hold)
    page.check("[data-testid=compare-what-model]")
    page.fill("[data-testid=compare-path]", "/half/a/pa")
    page.wait_for_timeout(50)
    names = page.locator("[data-testid=compare-model] option")
    before = names.count()
    for route in held:
        route.continue_()
    page.unroute("**/api/state")
    names.nth(before).wait_for(state="attached")
    assert page.input_value("[data-testid=compare-path]") == "/half/a/pa"
    assert page.is_visible("[data-testid=compare-empty]")


def test_a_checkpoint_that_is_not_there_is_told_in_place(tiny_url, show):
    page = show(tiny_url("compare", what="model"), expects="404|400|422")
    page.wait_for_selector("[data-testid=compare-empty]")
    page.fill("[data-testid=compare-path]", "/no/such/<img src=x>.gguf")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-testid=compare-error]")
    assert "<img src=x>" in page.inner_text("[data-testid=compare-error]") or page.is_visible(
        "[data-testid=compare-error-retry]"
    )
    assert page.query_selector("[data-testid=compare-error] img") is None


def test_the_address_keeps_the_head_about_to_be_added(tiny_url, show):
    page = show(tiny_url("compare"))
    page.select_option("[data-testid=compare-layer]", label="2")
    page.select_option("[data-testid=compare-head]", label="5")
    again = show(page.url)
    again.click("[data-testid=compare-add]")
    again.wait_for_selector("[data-testid=compare-remove-2-5]")
