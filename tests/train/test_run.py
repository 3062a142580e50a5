"""A run's folder: what it holds, that it can be killed, and what comes of it."""

import errno
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import openbook
from killable import Killable
from openbook.ledger import Workload
from openbook.train.checkpoint import CheckpointError, Disk, load_latest
from openbook.train.data import open_dataset
from openbook.train.lock import BusyError
from openbook.train.recipe import Recipe, recipe_of
from openbook.train.records import Record, Records
from openbook.train.run import DiskError, carry_out, open_run

STEPS = 24

MODEL = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def document(data: dict[str, Any], **train: Any) -> dict[str, Any]:
    settings = {"steps": STEPS, "rows": 4, "lr": 1e-2, "optimizer": "muon", "warmup": 3, "seed": 5} | train
    run = {"save_every": 5, "evaluate_every": 8, "samples": ["the text", ""], "sample_every": 10}
    run["sample_tokens"] = 7
    return {"model": MODEL, "data": {"length": 16, **data}, "train": settings, "run": run}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"the text of file number {i}, which is {i} times {i}\n" * 3)
    return folder


@pytest.fixture(scope="module")
def about(texts: Path) -> dict[str, Any]:
    return {"sources": [str(texts)], "vocab": 300, "held_out": 0.3}


@pytest.fixture(scope="module")
def unbroken(about: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    assert carry_out(open_run(recipe(about), folder)) == 0
    return folder


def recipe(data: dict[str, Any], **train: Any) -> Recipe:
    return recipe_of("test", document(data, **train))


def trace(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = {"seconds", "tokens_per_s", "flops_per_s", "mfu", "resident_bytes"}
    return [{key: value for key, value in line.items() if key not in clock} for line in lines]


def saved(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    checkpoint = load_latest(folder)
    assert checkpoint is not None
    return checkpoint.step, checkpoint.tensors


def assert_same_run(folder: Path, other: Path) -> None:
    """Losses, rates, norms and evaluations of every step, and all bits of weights and moments at the end."""
    assert trace(folder) == trace(other)
    assert (folder / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    (step, tensors), (other_step, others) = saved(folder), saved(other)
    assert step == other_step == STEPS
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (folder / "model" / file).read_bytes() == (other / "model" / file).read_bytes()


def test_a_run_leaves_its_metrics_checkpoints_and_a_model(unbroken: Path):
    steps = [line for line in trace(unbroken) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    evaluated = [line for line in trace(unbroken) if "heldout_nats" in line]
    assert [line["step"] for line in evaluated] == [8, 16, 24]
    assert evaluated[-1]["heldout_bits_per_byte"] < evaluated[0]["heldout_bits_per_byte"]
    assert sorted(path.name for path in unbroken.glob("step-*")) == ["step-000020", "step-000024"]


def test_a_run_shows_what_the_model_writes_and_draws_how_it_learned(unbroken: Path):
    samples = [json.loads(line) for line in (unbroken / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [
        (step, prompt) for step in (10, 20, 24) for prompt in ("the text", "")
    ]
    assert all(sample["text"] for sample in samples)
    assert "step 24: 'the text'" in (unbroken / "samples.txt").read_text()
    assert (unbroken / "loss.png").stat().st_size > 10_000
    assert list((unbroken / "tensorboard").iterdir())


def test_the_metrics_tell_how_much_of_the_machine_is_used(unbroken: Path):
    steps = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    for step in (step for step in steps if "loss" in step):
        assert 0 < step["mfu"] < 1.5
        assert 10**7 < step["resident_bytes"] < 10**11
        assert step["tokens_per_s"] * step["seconds"] == pytest.approx(64)


def test_the_flops_of_a_step_are_those_of_its_documents(unbroken: Path, about: dict[str, Any]):
    spec = openbook.spec(unbroken)
    rows = open_dataset(unbroken / "data").pack("train", 16, seed=5)
    for line in (unbroken / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        if "loss" not in step:
            continue
        documents = rows.batch(4 * (step["step"] - 1), 4).documents
        lengths = [n for row in documents for number, n in Counter(row.tolist()).items() if number >= 0]
        flops = sum(openbook.ledger(spec).totals(Workload("train", new=n)).flops for n in lengths)
        assert step["flops_per_s"] * step["seconds"] == pytest.approx(flops, rel=1e-12)
        assert step["mfu"] > 0


def test_the_model_that_comes_out_is_the_one_that_was_trained(unbroken: Path, about: dict[str, Any]):
    run = open_run(recipe(about), unbroken, resume=True)
    lm = openbook.load(unbroken, dtype="fp32")  # the run's folder stands for the model in it
    assert lm.tokenizer is not None
    ids = torch.tensor([lm.tokenizer.prompt("the text of file")])
    assert ids[0, 0] == lm.tokenizer.eos_id
    weights = dict(run.trainer.decoder.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in lm.decoder.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(lm.decoder(ids), run.trainer.decoder(ids), atol=1e-5, rtol=0)
    assert "".join(lm.generate("the text of", max_tokens=4, temperature=0))


def test_transformers_loads_the_model_with_the_same_logits_and_ids(unbroken: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(unbroken / "model", dtype=torch.float32)
    ours = openbook.load(unbroken, dtype="fp32")
    text = "the text of file number 4"
    ids = AutoTokenizer.from_pretrained(unbroken / "model")(text, return_tensors="pt").input_ids
    assert ours.tokenizer is not None
    assert ids[0].tolist() == ours.tokenizer.prompt(text)
    with torch.no_grad():
        torch.testing.assert_close(ours.decoder(ids), theirs(ids).logits, atol=1e-5, rtol=0)


# --- stopping and going on ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_at_the_next_step_and_the_run_goes_on_as_if_unbroken(
    number: signal.Signals, about: dict[str, Any], unbroken: Path, tmp_path: Path
):
    def interrupt(record: Any) -> None:
        if record["step"] == 7:
            os.kill(os.getpid(), number)

    run = open_run(recipe(about), tmp_path / "run")
    assert carry_out(run, interrupt) == number
    assert run.trainer.step == saved(tmp_path / "run")[0] == 7
    assert not (tmp_path / "run" / "model").exists()
    assert carry_out(open_run(recipe(about), tmp_path / "run", resume=True)) == 0
    assert_same_run(tmp_path / "run", unbroken)


KILLS, IN_A_SAVE = (100, 30) if os.environ.get("OPENBOOK_FULL") else (6, 3)


def test_a_run_that_is_killed_at_any_instant_goes_on_as_if_unbroken(about: dict[str, Any], tmp_path: Path):
    """kill -9 again and again: while it starts, computes, saves or writes the model, and some in the middle
    of an operation of a save. After every step weights and moments are what they are in a run unbroken."""
    draw = random.Random(0)
    kinds = [True] * IN_A_SAVE + [False] * (KILLS - IN_A_SAVE)
    draw.shuffle(kinds)
    folder, hashes, wanted = tmp_path / "run", tmp_path / "hashes", tmp_path / "wanted"
    with Killable() as killable:
        assert killable.start(document(about), tmp_path / "unbroken", wanted).wait() == 0
        expected = steps_and_hashes(wanted)
        assert [step for step, _ in expected] == list(range(1, STEPS + 1))
        while kinds:
            in_a_save = kinds[-1]
            job = killable.start(document(about), folder, hashes, draw.randint(1, 60) if in_a_save else 0)
            if not in_a_save:
                steps = job.steps()
                for _ in range(draw.randint(0, 9)):
                    next(steps, None)
                time.sleep(draw.random() * 0.05)
                job.kill()
            ended = job.wait()
            assert ended in (0, -signal.SIGKILL)
            if ended:
                kinds.pop()
            else:  # it was done before
                assert_same_run(folder, tmp_path / "unbroken")
                shutil.rmtree(folder)
        assert killable.start(document(about), folder, hashes).wait() == 0
    assert_same_run(folder, tmp_path / "unbroken")
    assert set(steps_and_hashes(hashes)) == set(expected)


def steps_and_hashes(path: Path) -> list[tuple[int, str]]:
    """Of every step that any process took, also those that were taken again. A kill may cut the last line."""
    lines = path.read_text().splitlines(keepends=True)
    whole = [parts for line in lines if line.endswith("\n") and len(parts := line.split()) == 2]
    return [(int(step), digest) for step, digest in whole if len(digest) == 64]


def test_what_a_killed_run_left_half_made_goes(about: dict[str, Any], unbroken: Path, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder)
    (folder / "model.0123abcd.part").mkdir()
    (folder / "model.0123abcd.part" / "model.safetensors").write_bytes(b"half")
    (folder / "metrics.jsonl.0123abcd.part").write_text("{")
    open_run(recipe(about), folder, resume=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in unbroken.iterdir())


def test_a_line_of_metrics_that_was_cut_is_written_again(
    about: dict[str, Any], unbroken: Path, tmp_path: Path
):
    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder)
    shutil.rmtree(folder / "step-000024")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:-30])
    carry_out(open_run(recipe(about), folder, resume=True))
    assert_same_run(folder, unbroken)


def test_nothing_is_done_twice(about: dict[str, Any], unbroken: Path):
    before = {path: path.stat().st_mtime_ns for path in unbroken.rglob("*") if path.is_file()}
    assert carry_out(open_run(recipe(about), unbroken, resume=True)) == 0
    after = {path: path.stat().st_mtime_ns for path in unbroken.rglob("*") if path.is_file()}
    changed = {path.name for path in after if before.get(path) != after[path]}
    assert changed <= {"metrics.jsonl", "samples.jsonl"}
    assert before.keys() == after.keys()


def test_a_run_is_not_overwritten(about: dict[str, Any], unbroken: Path, tmp_path: Path):
    with pytest.raises(FileExistsError, match="--resume auto"):
        open_run(recipe(about), unbroken)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds no run"):
        open_run(recipe(about), tmp_path / "mine", resume=True)


def test_two_processes_are_not_in_one_folder(about: dict[str, Any], tmp_path: Path):
    run = open_run(recipe(about), tmp_path / "run")
    with pytest.raises(BusyError, match="another process is training"):
        open_run(recipe(about), tmp_path / "run", resume=True)
    run.lock.release()
    open_run(recipe(about), tmp_path / "run", resume=True)


def test_a_full_disk_ends_a_run_in_one_clear_error_and_it_goes_on_when_there_is_room(
    about: dict[str, Any], unbroken: Path, tmp_path: Path, monkeypatch
):
    write = Records.write

    def full(kept: Records, record: Record) -> None:
        if record["step"] == 17:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(kept, record)

    with monkeypatch.context() as patch:
        patch.setattr(Records, "write", full)
        with pytest.raises(DiskError) as error:
            carry_out(open_run(recipe(about), tmp_path / "run"))
    for words in (
        "No space left on device",
        "a checkpoint takes",
        "are free",
        "step-000015 stands",
        "--resume",
    ):
        assert words in str(error.value)
    assert carry_out(open_run(recipe(about), tmp_path / "run", resume=True)) == 0
    assert_same_run(tmp_path / "run", unbroken)


def test_a_save_that_finds_no_room_keeps_the_last_checkpoint_and_the_run_goes_on_afterwards(
    about: dict[str, Any], unbroken: Path, tmp_path: Path, monkeypatch
):
    room = [10**9, 10**9, 1000]  # for the checkpoints of steps 5 and 10, not for that of step 15
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "free_bytes", lambda disk, path: room.pop(0) if room else 1000)
        with pytest.raises(CheckpointError, match=r"step 15 could not be saved .*last one is step-000010"):
            carry_out(open_run(recipe(about), tmp_path / "run"))
    assert saved(tmp_path / "run")[0] == 10
    assert carry_out(open_run(recipe(about), tmp_path / "run", resume=True)) == 0
    assert_same_run(tmp_path / "run", unbroken)


def test_a_model_that_finds_no_room_is_written_afterwards(
    about: dict[str, Any], unbroken: Path, tmp_path: Path, monkeypatch
):
    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("openbook.weights.save.save_file", full)
        with pytest.raises(DiskError, match=r"No space left on device .*step-000024 stands"):
            carry_out(open_run(recipe(about), tmp_path / "run"))
    assert not (tmp_path / "run" / "model").exists()
    assert carry_out(open_run(recipe(about), tmp_path / "run", resume=True)) == 0
    assert_same_run(tmp_path / "run", unbroken)


def test_another_recipe_does_not_go_on_with_a_run(about: dict[str, Any], unbroken: Path):
    with pytest.raises(CheckpointError, match=r"another recipe, train.lr differs"):
        open_run(recipe(about, lr=2e-2), unbroken, resume=True)
    open_run(recipe(about, micro_rows=2), unbroken, resume=True)  # the same sums in other parts


def test_a_run_goes_on_wherever_its_paths_are_written_from(
    about: dict[str, Any], texts: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(texts.parent)
    open_run(recipe({**about, "sources": [texts.name]}), unbroken, resume=True).lock.release()
    for others in (["elsewhere"], [f"elsewhere/{texts.name}"], [texts.name, texts.name], [".."], ["."]):
        with pytest.raises(CheckpointError, match=r"another recipe, data.sources differs"):
            open_run(recipe({**about, "sources": others}), unbroken, resume=True)
