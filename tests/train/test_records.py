"""What a run writes down: metrics, samples, TensorBoard's events and the picture."""

import json
import time
from pathlib import Path

import pytest

from openbook.train import records
from openbook.train.plot import draw, smoothed
from openbook.train.records import Records, keep, read


def step(number: int, **more: object) -> dict[str, object]:
    return {"step": number, "loss": 5.0 - number, "lr": 1e-3, "tokens": 64, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Records(tmp_path) as kept:
        for i in (1, 2, 3):
            kept.write(step(i))
        kept.write({"step": 3, "heldout_nats": 2.5, "heldout_bits_per_byte": 1.25})
        kept.write({"step": 3, "prompt": "def ", "text": "f(x):\n    \x1b[2J"})
    return tmp_path


def test_what_was_written_is_read_again(folder: Path):
    found = list(read(folder / "metrics.jsonl"))
    assert [record["step"] for record in found] == [1, 2, 3, 3]
    assert found[1] == step(2)
    assert list(read(folder / "samples.jsonl")) == [
        {"step": 3, "prompt": "def ", "text": "f(x):\n    \x1b[2J"}
    ]
    assert (folder / "samples.txt").read_text().startswith("step 3: 'def '\n--------------\ndef f(x):\n")


def test_lines_beyond_a_step_and_lines_that_were_cut_are_dropped(folder: Path):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": true}\n{"step": 2, "loss": 1}\n{"step": 3, "lo')
    keep(folder, 2)
    assert [record["step"] for record in read(folder / "metrics.jsonl")] == [1, 2, 2]
    assert list(read(folder / "samples.jsonl")) == []
    keep(folder, 0)
    assert (folder / "metrics.jsonl").read_text() == ""


def test_tensorboard_shows_the_metrics(folder: Path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert [e.value for e in events.Scalars("heldout/heldout_bits_per_byte")] == [1.25]


def test_tensorboard_forgets_what_is_written_again(folder: Path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    time.sleep(1)  # TensorBoard orders its files by the second of their beginning
    with Records(folder) as kept:
        kept.write(step(2, loss=7.0))
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4.0), (2, 7.0)]


def test_without_tensorboard_and_matplotlib_the_rest_is_written(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(records.importlib.util, "find_spec", lambda name: None)
    assert records.missing_extras() == ["matplotlib", "tensorboard"]
    with Records(tmp_path) as kept:
        kept.write(step(1))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert not draw(tmp_path, "test")


def test_a_run_is_drawn_whatever_it_has_done(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("matplotlib")
    assert draw(folder, "test")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    (folder / "metrics.jsonl").write_text(json.dumps(step(1)) + "\n")
    assert draw(folder, "one step, and $a name^$ that is no formula")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": None, "skipped": "no label"}) + "\n")
    assert not draw(folder, "nothing to show")
    assert not list(folder.glob("*.part"))


def test_a_curve_is_smoothed_by_its_neighbours():
    assert smoothed([1.0, 2.0, 6.0]) == [1.5, 3.0, 4.0]
    ramp = [float(i) for i in range(1000)]
    assert smoothed(ramp)[10:-10] == ramp[10:-10]
