"""How the page behaves: its address, keys, files to keep, languages and what goes wrong."""

import csv
import io
import json
import re
from urllib.parse import unquote_plus

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


def test_back_returns_to_the_view_before(tiny_url, show):
    page = open_steps(show, tiny_url("steps"))
    page.click("[data-testid=rail-tokens]")
    page.wait_for_selector("[data-testid=view-tokens]")
    page.go_back()
    page.wait_for_selector("[data-testid=view-steps]")


def test_digits_choose_views_and_a_question_mark_shows_the_keys(tiny_url, show):
    page = open_steps(show, tiny_url("steps"))
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


def test_arrows_walk_through_steps_and_brackets_through_layers(tiny_url, show):
    page = open_steps(show, tiny_url("steps", step="layers.1.attn.q"))
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


def test_steps_can_be_played(tiny_url, show):
    page = open_steps(show, tiny_url("steps", step="final_norm"))
    page.click("[data-testid=step-play]")
    page.wait_for_selector("[data-step=head][data-fresh=true]")


def test_a_heatmap_is_read_with_the_arrow_keys(tiny_url, tiny_trace, show):
    page = open_steps(show, tiny_url("steps", step="layers.1.attn.probs", cut="H~1"))
    page.focus("[data-testid=step-heatmap-canvas]")
    for key in ("Control+Home", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    told, value = page.inner_text("[data-testid=step-heatmap-readout]").rsplit(": ", 1)
    assert re.findall(r"\((\d+)\)", told) == ["2", "1"]
    assert float(value) == pytest.approx(
        float(tiny_trace.tensor("layers.1.attn.probs")[0, 1, 2, 1]), rel=6e-4
    )


def test_what_is_hidden_is_said_to_be_masked(tiny_url, show):
    page = open_steps(show, tiny_url("steps", step="layers.0.attn.masked"))
    page.focus("[data-testid=step-heatmap-canvas]")
    for key in ("Control+Home", "End"):
        page.keyboard.press(key)
    assert page.inner_text("[data-testid=step-heatmap-readout]").endswith("masked (−∞)")


def test_csv_json_and_png_hold_the_same_numbers(tiny_url, tiny_trace, show):
    page = open_steps(show, tiny_url("steps", step="layers.2.attn.scores", cut="H~3"))
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


@pytest.mark.parametrize(
    ("asked", "told"), [("zh-TW", "zh-CN"), ("zh-CN", "zh-CN"), ("en-GB", "en"), ("fr-FR", "en")]
)
def test_the_language_is_the_browsers(tiny_server, open_page, asked, told):
    page = open_page(f"{tiny_server.address}/#/overview?model=gpt2", locale=asked)
    page.wait_for_selector("[data-testid=flow]")
    assert page.get_attribute("html", "lang") == told


def test_a_model_that_is_not_there_is_said_in_words(tiny_server, show):
    page = show(
        f"{tiny_server.address}/#/overview?model=%3Cimg+src%3Dx+onerror%3Dalert(1)%3E", expects="404|400"
    )
    page.wait_for_selector("[data-testid=alert]")
    assert page.query_selector("img") is None
    page.click("[data-testid=alert] button")
    page.wait_for_selector("[data-testid=alert]", state="detached")


def test_a_run_that_the_server_let_go_is_made_anew(tiny_url, show):
    page = show(tiny_url("steps"), expects="404")
    page.wait_for_selector("[data-testid=step][data-fresh=true]")
    run = page.evaluate("fetch('/api/state').then((r) => r.json()).then((s) => s.store.runs.at(-1).id)")
    page.evaluate(f"fetch('/api/runs/{run}', {{method: 'DELETE'}}).then(() => 1)")
    page.click("[data-testid=step-last]")
    page.wait_for_selector("[data-step=head][data-fresh=true]")


def test_a_model_without_weights_shows_its_overview_and_says_what_is_missing(tiny_server, show):
    page = show(f"{tiny_server.address}/?lang=en#/overview?model=deepseek-v3")
    page.wait_for_selector("[data-testid=flow]")
    assert page.inner_text("[data-testid=overview-params]") == "671,026,419,200"
    page.click("[data-testid='stage-layers.0-2']")
    assert page.query_selector_all("text=mlp.router") == []
    page.click("[data-testid='stage-layers.3-60']")
    page.wait_for_selector("text=mlp.router")
    page.click("[data-testid=rail-attention]")
    page.wait_for_selector("[data-testid=needs-weights]")
    page.click("[data-testid=choose-weights]")
    page.click(f"[data-testid='model-{tiny_server.model}']")
    page.wait_for_selector("[data-testid=needs-run]")


def test_what_a_prompt_or_a_file_spells_is_never_markup(tiny_server, show):
    prompt = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    page = show(tiny_server.url("tokens", run=prompt))
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    for view in ("tokens", "steps", "attention", "residual", "next"):
        page.goto(tiny_server.url(view, run=prompt))
        page.wait_for_selector(f"[data-testid=view-{view}]")
        page.wait_for_load_state("networkidle")
        assert page.query_selector_all("#app img, #app script") == []


def test_a_million_words_are_refused_and_the_page_lives_on(tiny_url, show):
    page = open_steps(show, tiny_url("steps"))
    page.evaluate("document.querySelector('[data-testid=prompt]').value = 'a '.repeat(1e6)")
    page.click("[data-testid=run]")
    page.wait_for_selector("[data-testid=alert]")
    assert "2,000,000 characters" in page.inner_text("[data-testid=alert]")
    page.click("[data-testid=step-last]")
    page.wait_for_selector("[data-step=head][data-fresh=true]")


def test_two_windows_do_not_disturb_each_other(tiny_url, open_page):
    first = open_steps(open_page, tiny_url("steps", step="layers.0.attn.q"))
    second = open_page(tiny_url("attention", layer=1, head=1))
    second.click("[data-testid=ablate]")
    second.wait_for_selector("[data-testid=ablate][aria-pressed=true]")
    first.click("[data-testid=step-on]")
    first.wait_for_selector("[data-step='layers.0.attn.k'][data-fresh=true]")
    assert "ablate" not in first.url


def test_numbers_are_spelled_for_people(tiny_server, open_page):
    page = open_page(f"{tiny_server.address}/?lang=en")
    told = page.evaluate("""() => import("./format.js").then((f) => ({
      float: [0, 1, 0.6214, -0.25, 123456, 1.2346e-7, -3e9, 1e-4].map((x) => f.float(x)),
      exact: [0.1, Math.fround(1 / 3), 16777216].map(f.exact),
      bytes: [0, 1023, 1024, 4718592, 1048575].map(f.bytes),
      count: [999, 134515008, 999885952, 671026419200].map(f.count),
      percent: [0, 1, 0.6214, 0.0001].map((x) => f.percent(x)),
      seconds: [0, 1.5e-6, 0.00123, 61].map(f.seconds),
      none: [null, undefined, NaN, Infinity, -Infinity].map((x) => f.float(x)),
      visible: f.visible("a b\\n\\t\\u200b\\u202e"),
    }))""")
    assert told == {
        "float": ["0", "1.000", "0.6214", "−0.2500", "123,456", "1.235e−7", "−3.000e9", "0.0001000"],
        "exact": ["0.1", "0.33333334", "16777216"],
        "bytes": ["0 B", "1,023 B", "1 KiB", "4.5 MiB", "1 MiB"],
        "count": ["999", "135 M", "1 B", "671 B"],
        "percent": ["0 %", "100 %", "62.1 %", "< 0.1 %"],
        "seconds": ["0 s", "1.5 µs", "1.23 ms", "61 s"],
        "none": ["–", "–", "–", "∞", "−∞"],
        "visible": "a␣b⏎⇥\\u200b\\u202e",
    }


def test_an_address_says_the_same_when_read_and_written_again(tiny_server, open_page):
    page = open_page(f"{tiny_server.address}/?lang=en")
    hashes = [
        "#/steps?model=a%2Fb+c&run=%E6%B3%95+%3C%26%3D%23%3E%25&chat=1&system=be+kind&ablate=3.2,4.0&step=head",
        "#/overview",
        "#/tokens?model=m&run=",
    ]
    again = page.evaluate(
        'hashes => import("./state.js").then((s) => hashes.map((h) => s.routeHash(s.parseRoute(h))))', hashes
    )
    assert [unquote_plus(each) for each in again] == [unquote_plus(each) for each in hashes]
