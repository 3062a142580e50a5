"""Each of the six views as a whole: no text missing, nothing wider than the window, no finding of axe's."""

import json
from pathlib import Path

import pytest

AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()
READY = {
    "residual": "[data-testid=lens-tokens-row]",
    "next": "[data-testid=stage-draw]",
    "cache": "[data-testid=cache-progress][data-state=done]",
    "teaching": "[data-testid=savings]",
    "ledger": "[data-testid=tensors-row]",
    "compare": "[data-testid=steps-table-row]",
}
PARAMS = {"cache": {"tokens": 3}, "teaching": {"text": "the 时代 sea"}, "next": {"top_k": 7, "top_p": 0.8}}


TAKEN_HOME = {
    "residual": "lens",
    "next": "stages",
    "cache": "cache-slots",
    "teaching": "train-rows",
    "ledger": "tensors",
    "compare": "next-bars",
}


@pytest.mark.parametrize("view", READY)
def test_a_view_is_accessible_in_both_themes_fits_a_phone_and_can_be_taken_home(tiny_url, open_page, view):
    page = open_page(tiny_url(view, **PARAMS.get(view, {})))
    page.wait_for_selector(READY[view], state="attached")
    page.click("[data-testid=about] summary")
    page.evaluate(AXE)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert not serious_findings(page), theme
    files = {kind: downloaded(page, TAKEN_HOME[view], kind) for kind in ("png", "csv", "json")}
    assert files["png"].startswith(b"\x89PNG")
    assert files["csv"].count(b"\r\n") > 1
    assert json.loads(files["json"])
    page.set_viewport_size({"width": 360, "height": 740})
    page.select_option("[data-testid=language]", "zh-CN")
    page.wait_for_selector("html[lang=zh-CN]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    text = page.inner_text("main")
    keys = page.evaluate(f"fetch('./i18n/zh-CN/{view}.json').then((answer) => answer.json())")
    assert keys["title"] in text
    assert not [key for key in keys if f"{view}.{key}" in text]
    assert "{" not in text


def serious_findings(page) -> list[tuple[str, str, list[str]]]:
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
    return [
        (one["id"], one["help"], [node["html"][:200] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def downloaded(page, testid: str, kind: str) -> bytes:
    with page.expect_download() as told:
        page.click(f"[data-testid={testid}-{kind}]")
    assert told.value.suggested_filename.endswith(f".{kind}")
    return Path(told.value.path()).read_bytes()
