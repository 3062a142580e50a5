"""How the page behaves: its address, keys, files to keep, languages and what goes wrong."""

import csv
import io
import json
import re

import pytest


def open_steps(open_page, url):
    page = open_page(url)
    page.wait_for_selector("[data-testid=step][data-fresh=true]")
    return page


def test_the_address_brings_back_what_was_seen(tiny_url, open_page):
    page = open_page(tiny_url("attention"))
    page.select_option("[data-testid=attention-layer]", "2")
    page.select_option("[data-testid=attention-head]", "4")
    page.check("[data-testid=attention-kind-masked]", force=True)
    page.wait_for_selector("[data-head='2.4.masked'][data-fresh=true]")
    again = open_page(page.url)
    again.wait_for_selector("[data-head='2.4.masked'][data-fresh=true]")
    assert again.input_value("[data-testid=prompt]") == page.input_value("[data-testid=prompt]")


def test_back_returns_to_the_view_before(tiny_url, open_page):
    page = open_steps(open_page, tiny_url("steps"))
    page.click("[data-testid=rail-tokens]")
    page.wait_for_selector("[data-testid=view-tokens]")
    page.go_back()
    page.wait_for_selector("[data-testid=view-steps]")


def test_digits_choose_views_and_a_question_mark_shows_the_keys(tiny_url, open_page):
    page = open_steps(open_page, tiny_url("steps"))
    for key, view in (("4", "attention"), ("0", "compare"), ("1", "overview")):
        page.keyboard.press(key)
        page.wait_for_selector(f"[data-testid=view-{view}]")
    page.keyboard.press("?")
    page.wait_for_selector("[data-testid=dialog-keys][open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("[data-testid=dialog-keys]:not([open])", state="attached")
    page.focus("[data-testid=prompt]")
    page.keyboard.press("4")  # now it is a digit of the prompt
    page.wait_for_selector("[data-testid=view-overview]")
    assert "4" in page.input_value("[data-testid=prompt]")


def test_arrows_walk_through_steps_and_brackets_through_layers(tiny_url, open_page):
    page = open_steps(open_page, tiny_url("steps", step="layers.1.attn.q"))
    page.focus("#content")
    for key, name in (
        ("ArrowRight", "layers.1.attn.k"),
        ("]", "layers.2.attn.k"),
        ("[", "layers.1.attn.k"),
        ("ArrowLeft", "layers.1.attn.q"),
        ("End", "head"),
        ("[", "layers.2.attn_norm"),
        ("Home", "embed"),
    ):
        page.keyboard.press(key)
        page.wait_for_selector(f"[data-step='{name}'][data-fresh=true]")


def test_steps_can_be_played(tiny_url, open_page):
    page = open_steps(open_page, tiny_url("steps", step="final_norm"))
    page.click("[data-testid=step-play]")
    page.wait_for_selector("[data-step=head][data-fresh=true]")


def test_a_heatmap_is_read_with_the_arrow_keys(tiny_url, tiny_trace, open_page):
    page = open_steps(open_page, tiny_url("steps", step="layers.1.attn.probs", cut="H~1"))
    page.focus("[data-testid=step-heatmap-canvas]")
    for key in ("Control+Home", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    told, value = page.inner_text("[data-testid=step-heatmap-readout]").rsplit(": ", 1)
    assert re.findall(r"\((\d+)\)", told) == ["2", "1"]
    assert float(value) == pytest.approx(
        float(tiny_trace.tensor("layers.1.attn.probs")[0, 1, 2, 1]), rel=6e-4
    )


def test_what_is_hidden_is_said_to_be_masked(tiny_url, open_page):
    page = open_steps(open_page, tiny_url("steps", step="layers.0.attn.masked"))
    page.focus("[data-testid=step-heatmap-canvas]")
    for key in ("Control+Home", "End"):
        page.keyboard.press(key)
    assert page.inner_text("[data-testid=step-heatmap-readout]").endswith("masked (−∞)")


def test_csv_json_and_png_hold_the_same_numbers(tiny_url, tiny_trace, open_page):
    page = open_steps(open_page, tiny_url("steps", step="layers.2.attn.scores", cut="H~3"))
    files = {}
    for kind in ("csv", "json", "png"):
        with page.expect_download() as waiting:
            page.click(f"[data-testid=step-heatmap-{kind}]")
        assert waiting.value.suggested_filename.endswith(f"layers.2.attn.scores.{kind}")
        files[kind] = waiting.value.path().read_bytes()
    expected = tiny_trace.tensor("layers.2.attn.scores")[0, 3]
    head, *rows = csv.reader(io.StringIO(files["csv"].decode()))
    assert len(head) == expected.shape[1] + 1
    assert [[float(x) for x in row[1:]] for row in rows] == [
        pytest.approx(row, rel=1e-6) for row in expected.tolist()
    ]
    assert json.loads(files["json"])["values"] == [pytest.approx(row, rel=1e-6) for row in expected.tolist()]
    assert files["png"].startswith(b"\x89PNG")


def test_the_language_and_the_colours_change_at_once_and_stay(tiny_url, open_page):
    page = open_steps(open_page, tiny_url("steps"))
    page.select_option("[data-testid=language]", "zh-CN")
    page.wait_for_selector("html[lang=zh-CN]")
    assert page.inner_text("h1") == "逐步"
    page.select_option("[data-testid=theme]", "dark")
    assert page.evaluate("getComputedStyle(document.body).color") != page.evaluate(
        "getComputedStyle(document.documentElement).backgroundColor"
    )
    page.goto(page.url.replace("?lang=en", ""))
    page.wait_for_selector("html[lang=zh-CN][data-theme=dark]")


def test_a_model_that_is_not_there_is_said_in_words(tiny_server, open_page):
    page = open_page(
        f"{tiny_server.address}/#/overview?model=%3Cimg+src%3Dx+onerror%3Dalert(1)%3E", expects="404|400"
    )
    page.wait_for_selector("[data-testid=alert]")
    assert page.query_selector("img") is None
    page.click("[data-testid=alert] button")
    page.wait_for_selector("[data-testid=alert]", state="detached")


def test_a_run_that_the_server_let_go_is_made_anew(tiny_url, open_page):
    page = open_page(tiny_url("steps"), expects="404")
    page.wait_for_selector("[data-testid=step][data-fresh=true]")
    run = page.evaluate("fetch('/api/state').then((r) => r.json()).then((s) => s.store.runs.at(-1).id)")
    page.evaluate(f"fetch('/api/runs/{run}', {{method: 'DELETE'}}).then(() => 1)")
    page.click("[data-testid=step-last]")
    page.wait_for_selector("[data-step=head][data-fresh=true]")


def test_a_model_without_weights_shows_its_overview_and_says_what_is_missing(tiny_server, open_page):
    page = open_page(f"{tiny_server.address}/?lang=en#/overview?model=deepseek-v3")
    page.wait_for_selector("[data-testid=flow]")
    assert page.inner_text("[data-testid=overview-params]") == "671,026,419,200"
    page.click("[data-testid='stage-layers.0-2']")
    assert page.query_selector_all("text=mlp.router") == []
    page.click("[data-testid='stage-layers.3-60']")
    page.wait_for_selector("text=mlp.router")
    page.click("[data-testid=rail-attention]")
    page.wait_for_selector("[data-testid=needs-weights]")
