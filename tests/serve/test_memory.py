"""What is gone is given back: nothing keeps a run alive, and freed memory returns to the system."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import served
from openbook.serve.explorer import Explorer
from openbook.serve.worker import Worker
from served import good

MakeRun = Callable[..., dict[str, Any]]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only counting references frees, as it does at once; what waits for the collector may wait long."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def look_at_everything(client: TestClient, model: str, run: str, other: str) -> None:
    """Every question that has to do with a run."""
    at = f"/api/runs/{run}"
    tensors = ("/tensors/layers.0.attn.masked?at=0,1", "/tensors/head.json?at=0,0")
    for path in ("", *tensors, "/attention", "/lens", "/lens?row=1&position=0"):
        assert client.get(at + path).status_code == 200
    assert client.get(f"{at}/tensors/layers.0.attn.masked?at=9").status_code == 400
    good(client.post(f"{at}/next", json={}))
    good(client.post("/api/compare", json={"a": run, "b": other}))
    lines = client.post(f"/api/models/{model}/cache", json={"ids": [5, 3], "tokens": 2}).text
    assert len(lines.splitlines()) == 3


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["deleted", "evicted"])
def test_nothing_keeps_a_run_that_is_gone(
    client: TestClient, explorer: Explorer, model: dict[str, Any], run: MakeRun, how: str
):
    name, other = run(text=f"{how}, and soon gone")["id"], run(text="another")["id"]
    look_at_everything(client, model["id"], name, other)
    kept = explorer.run(name)
    tensors = [x for name, x in kept.trace.tensors.items() if not name.endswith(".masked")]  # made when asked
    watched = [weakref.ref(thing) for thing in (kept, kept.trace, *tensors)]
    del kept, tensors
    assert all(ref() is not None for ref in watched)
    if how == "deleted":
        assert client.delete(f"/api/runs/{name}").status_code == 204
    else:
        with explorer.store.room(explorer.store.limit, "everything"):
            pass
    assert not any(ref() is not None for ref in watched)


@pytest.mark.usefixtures("no_collector")
def test_an_error_does_not_keep_what_its_job_was_working_on():
    class Tensor: ...

    watched: list[weakref.ref[Tensor]] = []

    def job() -> None:
        held = Tensor()
        watched.append(weakref.ref(held))
        raise ArithmeticError(id(held))

    job_done = Worker().submit(job)
    assert isinstance(job_done.exception(30), ArithmeticError)
    assert watched[0]() is None


GROWTH = """
import json, random, sys
import torch
from openbook.serve.explorer import Explorer

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.set_num_threads(1)
explorer = Explorer(int(sys.argv[2]))
model = explorer.open(sys.argv[1])
choose, found = random.Random(7), []
for count in range(40):
    tokens = choose.choice([30, 70, 150, 220, 310, model.max_tokens])
    ids = [choose.randrange(256) for _ in range(tokens)]
    explorer.start_run(model, explorer.prompt(model, ids=ids)).result(60)
    explorer.worker.submit(lambda: None).result(60)
    explorer.worker.submit(lambda: None).result(60)  # by now what was left of the run is given back
    found.append(resident() - explorer.store.nbytes)
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_server_takes_no_more_for_runs_than_the_runs_take(tmp_path: Path):
    """Runs of many lengths, in a process of its own: what is resident beside those kept does not grow."""
    spec = served.SPEC.replace(max_positions=4096)
    folder, store = served.write_model(tmp_path / "m", spec), 200_000_000
    command = [sys.executable, "-c", GROWTH, str(folder), str(store)]
    beside = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    assert max(beside[5:]) - min(beside[:5]) < 0.3 * store
