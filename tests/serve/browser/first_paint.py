"""How soon the page shows something, and a step: `python tests/serve/browser/first_paint.py [MODEL]`.

First paint as the browser tells it, nothing cached; a step change from the key to the new heatmap. Medians
of eleven. It prints and holds nothing: a test that measures time would fail on a busy machine.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests/, as pytest has it

from page import real_page

TIMES = 11
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
STEP = """async () => {
  const at = () => document.querySelector('[data-testid=step]').dataset;
  const before = at().step, start = performance.now();
  const key = new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true});
  document.querySelector('#content').dispatchEvent(key);
  while (at().step === before || at().fresh !== 'true') await new Promise(requestAnimationFrame);
  return performance.now() - start;
}"""


def main(model: str) -> None:
    with real_page(model) as (browser, address):
        paints = []
        for _ in range(TIMES):
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"{address}#/overview?model={model}")
            page.wait_for_selector("[data-testid=flow]")
            paints.append(page.evaluate(PAINT))
            context.close()
        page = browser.new_page()
        page.goto(f"{address}#/steps?model={model}&run=The+capital+of+France+is&step=layers.3.attn_norm")
        page.wait_for_selector("[data-testid=step][data-fresh=true]")
        steps = []
        for _ in range(TIMES):
            page.wait_for_timeout(300)
            steps.append(page.evaluate(STEP))
    for what, times in (("first contentful paint", paints), ("step change", steps)):
        print(f"{what}: {statistics.median(times):.0f} ms (from {min(times):.0f} to {max(times):.0f})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
