"""The timeline of the cache is the generation's own, with the ledger's bytes and FLOPs."""

import math
from pathlib import Path

import pytest

import gguf_models
import openbook as ob
from openbook.ledger import Ledger, Workload
from openbook.serve.explorer import Explorer
from openbook.weights.save_gguf import save_gguf
from page import cells, in_thread, number, spelled

NEW = 5
PROMPT = "the 龘 sh"


def finished(page) -> None:
    page.wait_for_selector("[data-testid=cache-progress][data-state=done]", state="attached")


def test_every_step_has_the_ledgers_bytes_and_flops_and_the_greedy_token(tiny_url, show, tiny_model):
    page = show(tiny_url("cache", tokens=NEW))
    finished(page)
    lm = ob.load(tiny_model, native=False)
    prompt = lm.tokenizer.encode(PROMPT)
    tokens = [token.id for token in lm.tokens(prompt, max_tokens=NEW, temperature=0)]
    book = Ledger(lm.spec, "fp32")
    rows = cells(page, "cache-steps")
    assert len(rows) == len(tokens)
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        length = len(prompt) + i
        workload = Workload("decode", past=length - 1) if i else Workload("prefill", new=length)
        without = Workload("prefill", new=length)
        assert row[2] == spelled(lm.tokenizer.token_bytes(token))
        assert int(row[3]) == length
        assert number(row[4]) == pytest.approx(book.kv_bytes(1, length, "fp32"), rel=6e-3)
        assert number(row[5]) == pytest.approx(book.totals(workload).flops, rel=6e-3)
        assert number(row[6]) == pytest.approx(book.totals(without).flops, rel=6e-3)
        assert all(number(ms) > 0 for ms in row[7:])


def test_a_step_chosen_by_keyboard_shows_the_cache_as_it_was(tiny_url, show, tiny_trace):
    page = show(tiny_url("cache", tokens=NEW))
    finished(page)
    page.focus("[data-testid=cache-step]")
    page.keyboard.press("Home")
    page.wait_for_selector(f"[data-testid=cache-now][data-length='{tiny_trace.ids.shape[1]}']")
    assert page.inner_text("[data-testid=cache-now]").startswith("Prefill")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(f"[data-testid=cache-now][data-length='{tiny_trace.ids.shape[1] + 1}']")
    assert "step=1" in page.url


def test_slots_of_a_window_are_used_in_turn(tiny_url, show):
    """Token n lies in slot n mod slots, the later one on top: written out token by token."""
    page = show(tiny_url("ledger"))
    cases = [(7, length, fresh, 5) for length in (3, 5, 7, 8, 13, 21) for fresh in (1, 3)]
    found = page.evaluate(
        'cases => import("./components/slots.js").then((slots) => cases.map((c) => slots.slotsAfter(...c)))',
        cases,
    )
    for (slots, length, fresh, prompt), shown in zip(cases, found, strict=True):
        slow = [{"token": -1, "kind": "empty", "fresh": False} for _ in range(slots)]
        for token in range(length):
            kind = "prompt" if token < prompt else "generated"
            slow[token % slots] = {"token": token, "kind": kind, "fresh": token >= length - fresh}
        assert shown == slow


def test_layers_with_a_window_keep_no_more_than_it(show, tmp_path: Path):
    path = tmp_path / "windows.gguf"
    save_gguf(gguf_models.noisy(gguf_models.tiny("gemma2")), path, "F32", gguf_models.vocabulary())
    with in_thread(Explorer(200_000_000)) as address:
        page = show(f"{address}/?lang=en#/cache?model={path}&run=the+shed+the+shed&tokens=4")
        finished(page)
        length = int(page.get_attribute("[data-testid=cache-now]", "data-length"))
        assert length > 7
        filled = {row[0]: [int(cell) for cell in row[1:4]] for row in cells(page, "cache-layers")}
        assert filled == {"0,2": [2, 7, 7], "1,3": [2, length, length + 1]}
        assert "at most 7 tokens" in page.inner_text("[data-testid=cache-slots-sentence]")


def test_other_ways_to_share_heads_have_the_ledgers_bytes(tiny_url, show, tiny_trace):
    page = show(tiny_url("cache", tokens=1, whatif=1000))
    rows = {row[0].split(" ")[0]: row for row in cells(page, "whatif-table")}
    own = Ledger(tiny_trace.spec, "fp32").kv_bytes(1, 1000, "fp32")
    assert number(rows["GQA"][2]) == pytest.approx(own, rel=6e-3)
    heads = tiny_trace.spec.layers[0].attn.n_heads
    groups = tiny_trace.spec.layers[0].attn.n_kv_heads
    assert number(rows["MHA"][2]) == pytest.approx(own * heads / groups, rel=6e-3)
    assert number(rows["MQA"][2]) == pytest.approx(own / groups, rel=6e-3)
    assert math.isclose(number(rows["MQA"][3]), 1 / heads, abs_tol=6e-4)


def test_generation_can_be_stopped_and_begun_again(tiny_url, show):
    page = show(tiny_url("cache", tokens=200))
    page.click("[data-testid=cache-stop]")
    page.wait_for_selector("[data-testid=cache-progress][data-state=stopped]")
    page.fill("[data-testid=cache-tokens]", "3")
    page.keyboard.press("Enter")
    finished(page)
    assert len(cells(page, "cache-steps")) <= 3
