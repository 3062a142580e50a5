"""Training beside generation, one optimizer step and a run's loss: in the page as PyTorch has them."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import openbook as ob
from openbook.ledger import Ledger, Workload
from openbook.serve.explorer import Explorer
from openbook.train.lock import Lock
from page import cells, in_thread, number, spelled

TEXT = "the red sea 龘 the old sea"
LR = 0.02


@pytest.fixture(scope="module")
def lm(tiny_model: Path):
    return ob.load(tiny_model, native=False)


@pytest.fixture(scope="module")
def ids(lm) -> list[int]:
    tokenizer = lm.tokenizer
    return [tokenizer.bos_id, *tokenizer.encode(TEXT), tokenizer.eos_id]


def losses(decoder, ids: list[int]) -> torch.Tensor:
    """Of each label, from one pass over the sequence: [T - 1]."""
    logits = decoder(torch.tensor([ids[:-1]]))[0]
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")


def test_every_label_has_its_loss_from_one_pass(tiny_server, show, lm, ids):
    page = show(tiny_server.url("teaching", text=TEXT))
    rows = cells(page, "train-rows")
    assert sum("of 龘" in row[1] for row in rows) == 3
    with torch.no_grad():
        expected = losses(lm.decoder, ids)
    assert len(rows) == len(ids) - 1
    for i, row in enumerate(rows):
        if i and i < len(ids) - 2:
            alone = spelled(lm.tokenizer.token_bytes(ids[i])).replace("\xa0", " ")
            assert row[1] == (f"{alone} of 龘" if alone.startswith("⟨") else alone)
        assert number(row[4]) == pytest.approx(float(expected[i]), rel=6e-4)
        assert row[3].startswith("<") or number(row[3]) == pytest.approx(
            float((-expected[i]).exp()), abs=6e-4
        )
    mean = float(page.get_attribute("[data-testid=train-sentence]", "data-loss"))
    assert mean == pytest.approx(float(expected.mean()), rel=1e-5)


def test_generation_stands_beside_it_with_the_ledgers_flops(tiny_server, show, lm):
    page = show(tiny_server.url("teaching", text=TEXT))
    rows = cells(page, "gen-rows")
    prompt = int(rows[0][1].split()[0])
    book = Ledger(lm.spec, "fp32")
    for i, row in enumerate(rows):
        workload = Workload("decode", past=prompt + i - 1) if i else Workload("prefill", new=prompt)
        assert number(row[3]) == pytest.approx(book.totals(workload).flops, rel=6e-3)
        without = book.totals(Workload("prefill", new=prompt + i))
        assert number(row[4]) == pytest.approx(without.flops, rel=6e-3)
    assert [row[1] for row in rows[1:]] == [row[2] for row in rows[:-1]]  # what comes out goes in


def test_a_row_shows_what_the_mask_lets_it_see(tiny_server, show, ids):
    page = show(tiny_server.url("teaching", text=TEXT))
    page.focus("[data-testid=train-rows-row]")
    for row in (1, 2, 3):
        page.keyboard.press("ArrowDown")
        page.wait_for_selector(f"[data-testid=train-rows-row][data-at='{row}']:focus")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-testid=mask] li:nth-child(4).on")
    hidden = page.eval_on_selector_all("[data-testid=mask] .hidden-token", "all => all.length")
    assert hidden == len(ids) - 1 - 4
    assert "row=3" in page.url


def test_one_step_of_adamw_is_pytorchs(tiny_server, show, lm, ids):
    page = show(tiny_server.url("teaching", text=TEXT, lr=LR))
    page.click("[data-testid=optimizer-step]")
    rows = cells(page, "optimizer-rows")
    learner = copy.deepcopy(lm.decoder).requires_grad_(True)
    before = losses(learner, ids)
    before.mean().backward()
    before = before.detach()
    gradient = {name: float(p.grad.norm()) for name, p in learner.named_parameters() if p.grad is not None}
    torch.optim.AdamW(learner.parameters(), LR, weight_decay=0.0).step()
    with torch.no_grad():
        after = losses(learner, ids)
    for i, row in enumerate(rows):
        assert number(row[4]) == pytest.approx(float(before[i]), rel=2e-3)
        assert number(row[5]) == pytest.approx(float(after[i]), rel=2e-3)
    shown = {row[0]: number(row[1]) for row in cells(page, "optimizer-grads")}
    assert shown
    for name, l2 in shown.items():
        assert l2 == pytest.approx(gradient.get(name, 0.0), rel=2e-3, abs=1e-6)


def test_the_loss_of_a_run_folder_is_drawn_and_followed(show, tmp_path: Path):
    folder = tmp_path / "runs" / "<b>bold"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps({"train": {"steps": 40}}))
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": s, "loss": 5 - s / 10}) + "\n" for s in range(0, 11, 5)))
    lock = Lock(folder)  # as long as it is held the run is going on, and the page follows it
    with in_thread(Explorer(10_000_000, [str(tmp_path / "runs")])) as address:
        page = show(f"{address}/?lang=en#/teaching")
        page.wait_for_selector("[data-testid=live-run] option:nth-child(2)", state="attached")
        names = page.eval_on_selector_all("[data-testid=live-run] option", "o => o.map(x => x.text)")
        (name,) = [name for name in names if name.endswith("<b>bold")]
        page.select_option("[data-testid=live-run]", label=name)
        page.wait_for_selector("[data-testid=live-state]:has-text('step 10 of 40')")
        with metrics.open("a") as file:
            file.write(json.dumps({"step": 15, "loss": 3.25, "heldout_nats": 3.5}) + "\n")
        page.wait_for_selector("[data-testid=live-state]:has-text('step 15 of 40')")
        page.click("[data-testid=live-chart-as-table]")
        shown = [[number(cell) for cell in row if cell != "–"] for row in cells(page, "live-chart-table")]
        assert shown == [[0, 5], [5, 4.5], [10, 4], [15, 3.25, 3.5]]
    lock.release()
