"""Pictures of every view: `python tests/serve/browser/screenshots.py FOLDER [MODEL] [--all]`.

One PNG of 1280 × 900 px for each view, light and English, a few dark and Chinese; with `--all`,
every view in both languages and both themes, 1440, 800 and 360 px wide and at 200 %, whole pages, to be
looked at. It says where something hangs over the window.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests/, as pytest has it

from page import real_page

PROMPT = "The capital of France is"
VIEWS = {
    "overview": "",
    "tokens": "&chat=1&text=" + quote_plus("The capital of France is Paris. 法国龘 😀"),
    "steps": "&step=layers.3.attn.masked&cut=H~2&source=1",
    "attention": "&layer=3&head=2",
    "residual": "",
    "next": "&top_k=20&top_p=0.9&seed=1",
    "cache": "",
    "teaching": "",
    "ledger": "",
    "compare": "",
}
DARK_AND_CHINESE = {"attention", "cache", "compare"}
READY = "main[aria-busy=false]:not(:has([data-testid=loading], .stale))"


def cases(everything: bool) -> Iterator[tuple[str, str, str, int, int]]:
    """View, language, theme, width in px, zoom."""
    languages, themes = ("en", "zh-CN"), ("light", "dark")
    if everything:
        sizes = ((1440, 1), (800, 1), (360, 1), (1440, 2))
        for view, lang, theme, (width, zoom) in itertools.product(VIEWS, languages, themes, sizes):
            yield view, lang, theme, width, zoom
    else:
        for view in VIEWS:
            lang, theme = ("zh-CN", "dark") if view in DARK_AND_CHINESE else ("en", "light")
            yield view, lang, theme, 1280, 1


def shoot(browser: Any, address: str, model: str, folder: Path, everything: bool) -> None:
    for view, lang, theme, width, zoom in cases(everything):
        size = {"width": width // zoom, "height": 900 // zoom}
        page = browser.new_page(viewport=size, device_scale_factor=zoom, color_scheme=theme)
        asked = f"model={quote_plus(model)}&run={quote_plus(PROMPT)}{VIEWS[view]}"
        page.goto(f"{address}?lang={lang}#/{view}?{asked}")
        page.wait_for_selector(f"[data-testid=view-{view}]", timeout=120_000)
        page.wait_for_selector(READY, timeout=120_000)
        page.wait_for_load_state("networkidle")
        if view == "cache":
            page.wait_for_selector("[data-testid=cache-progress][data-state=done]", state="attached")
        over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        if over > 0:
            print(f"{view} {lang} {width} px: {over} px hang over")
        name = f"{view}-{lang}-{theme}-{width}x{zoom}.png" if everything else f"{view}.png"
        page.screenshot(path=folder / name, full_page=everything)
        page.close()


def main(folder: Path, model: str, everything: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with real_page(model) as (browser, address):
        shoot(browser, address, model, folder, everything)


if __name__ == "__main__":
    named = [argument for argument in sys.argv[1:] if argument != "--all"]
    main(Path(named[0]), named[1] if len(named) > 1 else "smollm2-135m", "--all" in sys.argv)
