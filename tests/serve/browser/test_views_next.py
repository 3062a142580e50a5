"""The stages of sampling in the page are those that the sampler itself takes."""

import re
from pathlib import Path

import pytest
import torch

import openbook as ob
from openbook.infer import sample
from openbook.infer.sample import Sampler, SamplingParams, distribution
from page import data, number

SETTINGS = {"temperature": 1.35, "top_k": 9, "top_p": 0.9, "min_p": 0.05}
POSITION = 3


@pytest.fixture(scope="module")
def logits(tiny_model: Path, tiny_trace) -> torch.Tensor:
    tokenizer = ob.load(tiny_model).tokenizer
    assert tokenizer is not None
    return tiny_trace.tensor("head")[0, :, : tokenizer.vocab_size].float()


def kept(page, stage: str) -> int:
    return int(number(page.inner_text(f"[data-testid=kept-{stage}]")))


def test_each_stage_keeps_and_weighs_what_the_sampler_does(tiny_url, show, logits):
    page = show(tiny_url("next", position=POSITION, seed=11, rows=40, **SETTINGS))
    page.wait_for_selector("[data-testid=stage-draw]")
    left = logits[POSITION]
    for stage in ("temperature", "top_k", "top_p", "min_p"):
        left = getattr(sample, stage)(left, SETTINGS[stage])
        assert kept(page, stage) == int(left.isfinite().sum())
        shown = {int(token): p for token, p in data(page, f"{stage}-", "p") if token.isdigit()}
        assert len(shown) == 40
        probs = left.softmax(-1)
        for token, p in shown.items():
            assert p == pytest.approx(float(probs[token]), rel=1e-5, abs=1e-9)
            row = page.locator(f"[data-testid={stage}-{token}]")
            assert ("cut" in row.get_attribute("class").split()) == (not bool(left[token].isfinite()))
    final = distribution(logits[POSITION], SamplingParams(**SETTINGS))
    assert torch.allclose(left.softmax(-1), final)


@pytest.mark.parametrize("seed", [0, 11])
def test_the_drawn_token_is_the_one_the_sampler_draws(tiny_url, show, logits, seed):
    page = show(tiny_url("next", position=POSITION, seed=seed, **SETTINGS))
    drawn = page.get_attribute("[data-testid=drawn-sentence]", "data-drawn")
    assert int(drawn) == Sampler(SamplingParams(seed=seed, **SETTINGS), logits.shape[-1])(logits[POSITION])
    left, width = page.eval_on_selector(
        "[data-testid=next-draw] .part.on", "e => [parseFloat(e.offsetLeft), e.offsetWidth]"
    )
    mark = page.eval_on_selector("[data-testid=next-draw] .mark", "e => e.offsetLeft + 1.5")
    assert left - 2 <= mark <= left + width + 2


def test_what_really_follows_has_its_rank_and_log_probability(tiny_url, show, logits, tiny_trace):
    page = show(tiny_url("next", position=1))
    token = int(tiny_trace.ids[0, 2])
    text = page.inner_text("[data-testid=actual-sentence]")
    rank = int((logits[1] > logits[1, token]).sum()) + 1
    assert f"ranked it {rank} of" in text
    shown = number(text.rsplit("log-probability of ", 1)[1].rstrip("."))
    assert shown == pytest.approx(float(logits[1].log_softmax(-1)[token]), rel=6e-4)


def test_a_slider_moved_by_keyboard_changes_the_stages_and_the_address(tiny_url, show):
    page = show(tiny_url("next"))
    page.wait_for_selector("[data-testid=stage-top_k]")
    before = kept(page, "top_k")
    page.focus("[data-testid=next-top_k]")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector("[data-testid=kept-top_k]:text-matches('^4 ')")
    assert before > 4
    assert "top_k=4" in page.url
    page.click("[data-testid=next-reset]")
    page.wait_for_selector(f"[data-testid=kept-top_k]:text-matches('^{before} ')")
    assert "top_k" not in page.url


def test_greedy_needs_no_number(tiny_url, show, logits):
    page = show(tiny_url("next", position=2, temperature=0))
    assert int(page.get_attribute("[data-testid=drawn-sentence]", "data-drawn")) == int(logits[2].argmax())
    assert not page.is_visible("[data-testid=next-draw] .interval")
    assert kept(page, "temperature") == 1


@pytest.mark.parametrize(("width", "columns"), [(1440, 6), (1280, 3), (800, 3), (360, 1)])
def test_the_six_stages_fill_their_rows(tiny_url, open_page, width, columns):
    page = open_page(tiny_url("next"), size=(width, 800))
    page.wait_for_selector("[data-testid=stage-draw]")
    tops = page.eval_on_selector_all(".stage", "all => all.map(one => one.getBoundingClientRect().top)")
    assert len(tops) == 6
    assert tops.count(tops[0]) == columns


def test_the_last_stage_says_what_was_drawn_with_which_number(tiny_url, show, logits):
    page = show(tiny_url("next", position=POSITION, seed=11))
    generator = torch.Generator().manual_seed(11)
    uniform = float(torch.rand((), dtype=torch.float64, generator=generator))
    text = page.inner_text("[data-testid=stage-draw] .note")
    said = re.match(r"seed 11 gives ([\d.]+)", text)
    assert said is not None
    assert float(said[1]) == pytest.approx(uniform, abs=6e-5)
    assert page.inner_text("[data-testid=outcome]") in page.inner_text("[data-testid=drawn-sentence]")
