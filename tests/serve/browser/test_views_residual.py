"""The logit lens and the updates in the page are those of the Python trace."""

from pathlib import Path

import pytest
import torch

import openbook as ob
from openbook.trace import logit_lens, record, update_norms
from openbook.trace.flow import last_of_layer
from page import cells, data, number, spelled


@pytest.fixture(scope="module")
def lm(tiny_model: Path):
    return ob.load(tiny_model)


@pytest.fixture(scope="module")
def lens(lm, tiny_trace):
    return logit_lens(tiny_trace, lm.decoder, top=1)


def by_place(page, name: str = "value") -> dict[tuple[int, int], float]:
    """(layer, position) → what a cell's colour stands for."""
    found = {}
    for place, value in data(page, "lens-", name):
        parts = place.split("-")
        if len(parts) == 2 and all(part.isdigit() for part in parts):
            found[int(parts[0]), int(parts[1])] = value
    return found


@pytest.mark.parametrize("measure", ["p", "entropy", "kl"])
def test_every_cell_of_the_lens_is_the_traces(tiny_url, show, lens, tiny_trace, lm, measure):
    page = show(tiny_url("residual", measure=measure))
    page.wait_for_selector("[data-testid=lens-0-0]")
    expected = {"p": lens.probs[:, 0, :, 0], "entropy": lens.entropy[:, 0], "kl": lens.kl[:, 0]}[measure]
    shown = by_place(page)
    layers, tokens = expected.shape
    assert len(shown) == layers * tokens
    for (layer, position), value in shown.items():
        assert value == pytest.approx(float(expected[layer, position]), rel=1e-5, abs=1e-6)
    likeliest = lm.tokenizer.token_bytes(int(lens.ids[1, 0, 3, 0]))
    assert page.inner_text("[data-testid=lens-1-3]") == spelled(likeliest)


def test_a_cell_chosen_by_keyboard_shows_its_top_tokens(tiny_url, show, tiny_trace, lm):
    page = show(tiny_url("residual", layer=2, at=4))
    page.focus("[data-testid=lens-2-4]")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("[data-testid=lens-1-3]:focus[aria-selected=true]")
    assert "layer=1" in page.url
    assert "at=3" in page.url
    page.wait_for_selector("[data-testid=lens-top] h2:has-text('position 3')")
    page.wait_for_selector("[data-testid=lens-tokens-loaded][aria-busy=false]")
    stream = tiny_trace.tensor(last_of_layer(tiny_trace.spec, 1))[:, 3:4]
    with torch.no_grad():
        logits = lm.decoder.head(lm.decoder.final_norm(stream))[0, 0].float()
    best, ids = logits.topk(12)
    shown = cells(page, "lens-tokens")
    assert [int(row[2]) for row in shown] == ids.tolist()
    assert [number(row[4]) for row in shown] == pytest.approx(best.tolist(), rel=6e-4)
    assert [number(row[3]) for row in shown] == pytest.approx(logits.softmax(-1)[ids].tolist(), abs=6e-4)


def test_the_lengths_of_updates_are_the_traces(tiny_url, show, tiny_trace):
    page = show(tiny_url("residual", at=2))
    page.click("[data-testid=updates-chart-as-table]")
    norms = update_norms(tiny_trace)
    for row in cells(page, "updates-chart-table"):
        layer = int(row[0])
        expected = [float(norms.attn[layer, 0, 2]), float(norms.mlp[layer, 0, 2])]
        assert [number(cell) for cell in row[1:]] == pytest.approx(expected, rel=6e-4)


def test_of_a_long_prompt_some_positions_are_shown_at_a_time(tiny_server, show, lm):
    text = "the red sea and the shore, the old sea and the land"
    ids = torch.tensor([lm.tokenizer.encode(text)])
    expected = logit_lens(record(lm.decoder, ids), lm.decoder, top=1).probs[:, 0, :, 0]
    page = show(tiny_server.url("residual", run=text))
    last = ids.shape[1] - 1
    page.wait_for_selector(f"[data-testid=lens-0-{last}][aria-selected=false]")
    assert not page.query_selector("[data-testid=lens-0-0]")
    page.click("[data-testid=lens-earlier]")
    page.wait_for_selector(f"[data-testid=lens-0-{last - 40}]")
    for (layer, position), value in by_place(page).items():
        assert value == pytest.approx(float(expected[layer, position]), rel=1e-5, abs=1e-6)
    page.click("[data-testid=lens-positions-0]")
    page.wait_for_selector("[data-testid=lens-2-0][aria-selected=true]")


def test_the_row_from_which_a_token_stays_on_top_is_told(tiny_url, show):
    page = show(tiny_url("residual"))
    page.wait_for_selector("[data-testid=lens-sentence]")
    rows = page.evaluate(
        """import("./views/residual.js").then(({ settledAt }) => {
             const top = (ids) => ids.map((id) => [{ id }]);
             const rows = [[1, 2, 3, 3], [3, 1, 3, 3], [1, 2, 3, 4], [5, 5, 5, 5]];
             return rows.map((ids) => settledAt(top(ids), 0));
           })"""
    )
    assert rows == [2, 2, 3, 0]
