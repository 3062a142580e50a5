"""How long the server takes to answer: `python tests/serve/measure.py [MODEL] [TOKENS]`.

Medians of several, by requests without a socket. It prints and holds nothing: a test that measures time would
fail on a busy machine. What the browser adds, `browser/first_paint.py` measures.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import served
from openbook.ledger.table import human_bytes
from openbook.model import Decoder
from openbook.serve.explorer import Explorer
from openbook.trace import record

RUNS, TIMES = 3, 7


def main(name: str = "smollm2-135m", tokens: str = "512") -> None:
    explorer = Explorer(2 * 2**30)
    with served.client_of(explorer) as client:
        model = served.good(client.post("/api/models", json={"name": name}))
        draw = random.Random(1)
        new = f"/api/models/{model['id']}/runs"

        def ids(count: int) -> list[int]:
            return [draw.randrange(model["spec"]["vocab_size"]) for _ in range(count)]

        def run(given: list[int]) -> dict[str, Any]:
            return served.good(client.post(new, json={"ids": given}))

        run(ids(8))  # loads the weights
        given = ids(int(tokens))
        decoder = explorer.weights(explorer.model(model["id"])).decoder
        # On the worker, as the server does it: another thread with PyTorch's threads would slow it down.
        explorer.worker.submit(lambda: parts(decoder, given)).result()
        show("a new run, with its statistics and JSON", RUNS, lambda: run(ids(int(tokens))))
        found = run(given)
        show("the same run again", TIMES, lambda: run(given))
        print(f"{'':40} {human_bytes(found['bytes'])}, {len(found['steps'])} steps")
        steps = {"attn_norm": "0", "attn.q": "0", "attn.scores": "0,0", "attn.masked": "0,0", "mlp.act": "0"}
        for step, at in steps.items():
            path = f"/api/runs/{found['id']}/tensors/layers.3.{step}?at={at}"
            show(f"a slice of {step}", TIMES, lambda path=path: fetched(client.get(path)))
        for how in ("mean", "absmax"):
            path = f"/api/runs/{found['id']}/tensors/head?at=0&reduce={how}"
            show(f"a slice of the logits, {how}", TIMES, lambda path=path: fetched(client.get(path)))
        at = f"/api/runs/{found['id']}"
        count = iter(range(24, 64))  # another question each time, since answers are remembered
        show(
            "thumbnails of all heads", RUNS, lambda: fetched(client.get(f"{at}/attention?size={next(count)}"))
        )
        show("the lens at 16 positions", RUNS, lambda: fetched(lens(client, at, next(count))))


def parts(decoder: Decoder, given: list[int]) -> None:
    """What a new run is made of."""
    ids = torch.tensor([given])
    with torch.inference_mode():
        show("a pass, nothing kept", RUNS, lambda: decoder(ids))
    show("its trace", RUNS, lambda: record(decoder, ids))
    traces = [record(decoder, ids)]
    show("statistics of the trace", 1, lambda: traces.pop().steps)


def thumbnails(client: Any, at: str, size: int) -> Any:
    return client.get(f"{at}/attention?size={size}")


def lens(client: Any, at: str, start: int) -> Any:
    return client.get(f"{at}/lens?start={start}&stop={start + 16}")


def fetched(response: Any) -> None:
    assert response.status_code == 200, response.text


def show(what: str, times: int, work: Callable[[], object]) -> None:
    """Wall time, and the time of all cores, which tells a busy machine from slow work."""
    walls, cores = [], []
    for _ in range(times):
        wall, core = time.perf_counter(), time.process_time()
        work()
        walls.append(1000 * (time.perf_counter() - wall))
        cores.append(1000 * (time.process_time() - core))
    print(f"{what:40} {statistics.median(walls):8.1f} ms   ({statistics.median(cores):.1f} ms of CPU time)")


if __name__ == "__main__":
    main(*sys.argv[1:])
