"""What stands in the page is what Python computes: the same model, the same prompt, two ways."""

import re
from pathlib import Path

import pytest
import torch

import openbook

STEPS = [
    "embed",
    "layers.0.attn.q",
    "layers.1.attn.k_rope",
    "layers.1.attn.masked",
    "layers.2.attn.probs",
    "layers.1.mlp.chosen",
    "layers.2.mlp.experts.gate",
    "layers.2.mlp_add",
    "head",
]


def number(text: str) -> float:
    """A number as the page spells it: 1,234.5, −0.25, 1.2e−7, −∞."""
    return float(
        text.replace("−", "-").replace(",", "").replace("∞", "inf").replace("\u2013", "nan").split()[0]
    )


def table(page, testid: str) -> list[list[float]]:
    """The numbers of a heatmap's table, without the rows' labels."""
    page.click(f"[data-testid={testid}-as-table]")
    rows = page.query_selector_all(f"[data-testid={testid}-table-row]")
    return [[number(cell) for cell in row.inner_text().split("\t")[1:]] for row in rows]


def wait_for_step(page, name: str) -> None:
    page.wait_for_selector(f"[data-testid=step][data-step='{name}'][data-fresh=true]")


def test_steps_have_the_traces_statistics_shapes_and_formulas(tiny_url, tiny_trace, show):
    page = show(tiny_url("steps"))
    for name in STEPS:
        page.goto(tiny_url("steps", step=name))
        wait_for_step(page, name)
        (step,) = [step for step in tiny_trace.steps if step.name == name]
        text = page.inner_text("[data-testid=step-shape]")
        assert text == f"[{', '.join(step.axes)}] = [{', '.join(map(str, step.shape))}]"
        for key in ("low", "high", "mean", "std", "l2"):
            shown = number(page.inner_text(f"[data-testid=stat-{key}]"))
            assert shown == pytest.approx(getattr(step.statistics, key), rel=6e-4, abs=1e-12), (name, key)
        assert page.is_visible("[data-testid=stat-inf]") == (step.statistics.inf > 0)
        assert page.inner_text("[data-testid=step-formula]")


def test_the_code_of_a_step_is_the_files_own_lines(tiny_url, show):
    page = show(tiny_url("steps", step="layers.1.mlp_norm"))
    wait_for_step(page, "layers.1.mlp_norm")
    assert not page.query_selector("[data-testid=source]")
    page.focus("[data-testid=source-open]")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-testid=source]")
    assert "source=1" in page.url
    said = page.inner_text("[data-testid=source-at]")
    found = re.fullmatch(r"Norm, lines (\d+) to (\d+) of (openbook/\S+\.py)", said)
    assert found is not None
    first, last, file = int(found[1]), int(found[2]), Path(openbook.__file__).parents[1] / found[3]
    lines = file.read_text("utf-8").splitlines()[first - 1 : last]
    assert page.text_content("[data-testid=source]").splitlines() == lines


def test_the_numbers_of_a_heatmap_are_the_tensors(tiny_url, tiny_trace, show):
    page = show(tiny_url("steps", step="layers.1.attn.scores", cut="H~4"))
    wait_for_step(page, "layers.1.attn.scores")
    expected = tiny_trace.tensor("layers.1.attn.scores")[0, 4].tolist()
    assert table(page, "step-heatmap") == [pytest.approx(row, rel=6e-4) for row in expected]


def test_of_heads_side_by_side_one_can_be_looked_at(tiny_url, tiny_trace, show):
    page = show(tiny_url("steps", step="layers.1.attn.k"))
    page.select_option("[data-testid='cut-G·K']", label="1")
    wait_for_step(page, "layers.1.attn.k")
    expected = tiny_trace.tensor("layers.1.attn.k")[0, :, 12:24].tolist()
    assert table(page, "step-heatmap") == [pytest.approx(row, rel=6e-4) for row in expected]


def test_the_axes_of_experts_can_be_chosen(tiny_url, tiny_trace, show):
    page = show(tiny_url("steps", step="layers.1.mlp.experts.up"))
    page.click("[data-testid='cut-axes-A × F']")
    page.select_option("[data-testid=cut-T]", "3")
    page.wait_for_selector("[data-testid=step][data-at='0,3,:,:'][data-fresh=true]")
    page.click("[data-testid=step-heatmap-as-table]")
    page.focus("[data-testid=step-heatmap-table-row]")
    page.keyboard.press("End")  # a long table draws what is seen
    page.wait_for_selector("[data-testid=step-heatmap-table-row][data-at='159']:focus")
    expert, unit, shown = page.inner_text("[data-testid=step-heatmap-table-row]:focus").split("\t")
    assert (expert, unit) == ("1", "79")
    expected = float(tiny_trace.tensor("layers.1.mlp.experts.up")[0, 3, 1, 79])
    assert number(shown) == pytest.approx(expected, rel=6e-4)


def test_attention_shows_the_traces_head(tiny_url, tiny_trace, show):
    page = show(tiny_url("attention", layer=2, head=5))
    for kind in ("probs", "masked", "scores"):
        page.check(f"[data-testid=attention-kind-{kind}]", force=True)
        page.wait_for_selector(f"[data-testid=one-head][data-head='2.5.{kind}'][data-fresh=true]")
        expected = tiny_trace.tensor(f"layers.2.attn.{kind}")[0, 5].tolist()
        assert table(page, "head") == [pytest.approx(row, rel=6e-3) for row in expected], kind
        page.click("[data-testid=head-as-table]")
    entropy = torch.special.entr(tiny_trace.tensor("layers.2.attn.probs")[0, 5]).sum(-1).mean()
    assert number(page.inner_text("[data-testid=head-entropy]")) == pytest.approx(float(entropy), rel=6e-3)
    assert page.inner_text("[data-testid=head-group]").startswith("1")  # of two, for six heads


def test_a_head_that_is_switched_off_gives_nothing(tiny_url, show):
    page = show(tiny_url("attention", layer=1, head=3))
    page.click("[data-testid=ablate]")
    page.wait_for_selector("[data-testid=ablate][aria-pressed=true]")
    assert "ablate=1.3" in page.url
    page.goto(page.url.replace("/attention?", "/steps?") + "&step=layers.1.attn.mix&cut=H~3")
    wait_for_step(page, "layers.1.attn.mix")
    assert {number for row in table(page, "step-heatmap") for number in row} == {0.0}


def test_the_overview_has_the_ledgers_totals(tiny_server, tiny_trace, show):
    from openbook.ledger import Ledger, Workload

    book = Ledger(tiny_trace.spec, "fp32")
    page = show(tiny_server.url("overview", tokens=23))
    assert number(page.inner_text("[data-testid=overview-params]")) == book.params.total
    flops = book.totals(Workload("prefill", new=23, last_only=False)).flops
    shown, unit = page.inner_text("[data-testid=overview-flops]").split()
    assert unit == "MFLOP"
    assert float(shown) * 1e6 == pytest.approx(flops, rel=6e-3)


def test_a_character_over_three_tokens_is_shown_whole(tiny_url, show):
    page = show(tiny_url("tokens"))
    page.wait_for_selector("[data-testid=char-group]")
    (group,) = page.query_selector_all("[data-testid=char-group]")
    lines = group.inner_text().split("\n")
    assert lines[0] == "龘"
    assert re.findall(r"⟨(.*?)⟩", group.inner_text()) == [f"{byte:02x}" for byte in "龘".encode()]
    assert page.inner_text("[data-testid=tokens-count]") == str(len("the 龘 sh".encode()) - 1)  # "sh" is one


def test_the_chat_template_marks_what_it_wrote(tiny_url, show):
    page = show(tiny_url("tokens", chat=1))
    page.wait_for_selector("[data-testid=token-0].special")
    own = page.query_selector_all("[data-token].from-content")
    assert "".join(one.query_selector(".token-text").inner_text() for one in own).startswith("the␣")
    assert page.query_selector_all("[data-token].special.from-template")
