"""The ledger in the page: its rows, folded and open, and its totals are the Python ledger's."""

import pytest

import openbook as ob
from openbook.ledger import Ledger, Workload
from page import cells, number


@pytest.fixture(scope="module")
def book(tiny_trace) -> Ledger:
    return Ledger(tiny_trace.spec, "fp32")


def test_each_total_stands_under_its_own_label(tiny_server, show, book):
    page = show(tiny_server.url("ledger", tokens=23))
    shown = {row[0]: row for row in cells(page, "totals")}
    labels = page.evaluate("fetch('./i18n/en/ledger.json').then((answer) => answer.json())")
    for name, words in book.params.definitions.items():
        assert number(shown[labels[f"total.{name}"]][1]) == getattr(book.params, name), words
    totals = book.totals(Workload("prefill", new=23))
    for name in ("flops", "kv_written", "activation_bytes"):
        value = shown[labels[f"total.{name}"]][1].split(" (")[0]
        assert number(value) == getattr(totals, name)
    said = page.inner_text("[data-testid=conventions]").split("\n")
    assert said[:3] == book.conventions(Workload("prefill", new=23))[:3]


def test_folded_rows_are_sums_and_open_by_keyboard(tiny_server, show, book):
    page = show(tiny_server.url("ledger"))
    folded = {row[0].lstrip("▸▾"): number(row[3]) for row in cells(page, "tensors")}
    in_layers = sum(row.count for row in book.tensors if row.layer is not None)
    assert folded["layers.0–2 ×3"] == in_layers
    page.focus("[data-testid=tensors-row][aria-expanded=false]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("[data-testid=tensors-row][aria-level='2']")
    one = "attn.k.weight"
    row = next(row for row in cells(page, "tensors") if row[0].endswith(f"{one} ×3"))
    assert number(row[3]) == sum(t.count for t in book.tensors if t.name.endswith(one))
    page.locator(f"[data-testid=tensors-row]:has-text('{one} ×3')").click()
    opened = {row[0]: number(row[3]) for row in cells(page, "tensors") if row[0].startswith("layers.1.")}
    assert opened == {"layers.1.attn.k.weight": 24 * 48}


def test_the_tree_holds_every_row_once_and_in_total_what_the_ledger_says(tiny_server, show, book):
    page = show(tiny_server.url("ledger", show="steps", mode="train", tokens=7))
    page.wait_for_selector("[data-testid=steps-table]")
    found = page.evaluate(
        """(async () => {
             const { folded, total } = await import("./views/ledger.js");
             const { model } = await import("./state.js");
             const query = "mode=train&tokens=7";
             const book = await (await fetch(`/api/models/${model.value.id}/ledger?${query}`)).json();
             const leaves = (rows) => rows.flatMap((row) => (row.children ? leaves(row.children) : row.name));
             const steps = folded(book.steps, ["flops"], (row) => `${row.shape} ${row.flops}`);
             const tensors = folded(book.tensors, ["params"], (row) => String(row.shape));
             return [leaves(steps), total(steps, "flops"), leaves(tensors), total(tensors, "params")];
           })()"""
    )
    steps, flops, tensors, params = found
    workload = Workload("train", new=7)
    assert sorted(steps) == sorted(row.name for row in book.ops(workload))
    assert flops == sum(row.flops for row in book.ops(workload))
    assert sorted(tensors) == sorted(row.name for row in book.tensors)
    assert params == book.params.total


@pytest.mark.parametrize(("key", "descending"), [("params", True), ("label", False)])
def test_rows_are_sorted_by_a_column(tiny_server, show, key, descending):
    page = show(tiny_server.url("ledger"))
    page.click(f"[data-testid=tensors-sort-{key}]")
    rows = [row for row in cells(page, "tensors") if "tied" not in row[3]]
    values = [number(row[3]) if key == "params" else row[0].lstrip("▸▾") for row in rows]
    assert values == sorted(values, reverse=descending)


def test_another_model_stands_beside_it(tiny_server, show, book):
    page = show(tiny_server.url("ledger", other="gpt2"))
    page.wait_for_selector("[data-testid=ledger-two]")
    row = cells(page, "totals")[0]
    gpt2 = Ledger(ob.spec("gpt2"), "fp32")
    assert [number(cell) for cell in row[1:3]] == [book.params.total, gpt2.params.total]
    layers = next(row for row in cells(page, "tensors") if "layers" in row[0])
    mine, theirs = (sum(row.count for row in each.tensors if row.layer is not None) for each in (book, gpt2))
    assert [number(layers[2]), number(layers[3])] == [mine, theirs]


def test_memory_is_the_ledgers(tiny_server, show, book):
    page = show(tiny_server.url("ledger", show="memory", mode="train", tokens=31))
    expected = book.memory(Workload("train", new=31))
    shown = [number(row[1]) for row in cells(page, "memory")]
    assert shown == pytest.approx([row.bytes for row in expected.rows], rel=6e-3)


def test_the_address_keeps_the_order_and_the_open_rows(tiny_server, show):
    page = show(tiny_server.url("ledger", show="steps"))
    page.click("[data-testid=steps-table-sort-bytes]")
    page.locator("[data-testid=steps-table-row]:has-text('layers.') .fold").first.click()
    page.wait_for_selector("[data-testid=steps-table-row][aria-level='2']")
    seen = cells(page, "steps-table")
    assert "sort=-bytes" in page.url
    again = show(page.url)
    again.wait_for_selector("[data-testid=steps-table-row][aria-level='2']")
    assert cells(again, "steps-table") == seen
    again.check("[data-testid=ledger-show-memory]", force=True)
    again.wait_for_selector("[data-testid=memory-row]")
    assert "sort" not in again.url
