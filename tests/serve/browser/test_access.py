"""Every view for people with a screen reader, a keyboard, weak eyes or a narrow window."""

import json
from pathlib import Path

import pytest

AXE = Path(__file__).parent / "axe" / "axe.min.js"
VIEWS = [
    "overview", "tokens", "steps", "attention", "residual", "next", "cache", "teaching", "ledger", "compare",
]  # fmt: skip
FOUND = """async () => (await axe.run(document, {resultTypes: ['violations']})).violations
  .filter(({impact}) => ['serious', 'critical'].includes(impact))
  .map(({id, nodes}) => [id, ...nodes.map(({html, any}) => [html.slice(0, 99), any[0]?.message])])"""


def open_view(page, url: str, view: str) -> None:
    """Goes there without loading the page again, and waits until all that the view asks for is there."""
    page.goto(url)
    page.wait_for_selector(f"[data-testid=view-{view}]")
    page.wait_for_selector("main[aria-busy=false]:not(:has([data-testid=loading], .stale))")
    page.wait_for_load_state("networkidle")


@pytest.mark.parametrize(("theme", "lang"), [("light", "en"), ("dark", "zh-CN")])
def test_axe_finds_nothing_serious_in_any_view(tiny_url, open_page, theme, lang):
    page = open_page(tiny_url(VIEWS[0], lang=lang), theme=theme)
    page.evaluate(AXE.read_text("utf-8"))
    found = {}
    for view in VIEWS:
        open_view(page, tiny_url(view, lang=lang), view)
        found |= {view: trouble} if (trouble := page.evaluate(FOUND)) else {}
    assert not found, json.dumps(found, indent=1, ensure_ascii=False)


def test_nothing_hangs_over_a_narrow_window(tiny_url, open_page):
    page = open_page(tiny_url(VIEWS[0]), size=(360, 740))
    for view in VIEWS:
        open_view(page, tiny_url(view), view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
