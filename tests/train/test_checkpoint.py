"""Saving and loading, and what a full disk, a crash and a flipped bit leave of them."""

import errno
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from openbook.files import FileError
from openbook.train.checkpoint import CheckpointError, Disk, load, load_latest, save, verify
from train.crash import Recorder, states, write_tree

FULL = os.environ.get("OPENBOOK_FULL") == "1"
"""Take the full counts of docs/train.md instead of a slice."""


def tensors(step: int) -> dict[str, Tensor]:
    """Every type that occurs, an empty one and a number among them; all depend on the step."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "layers.0.attn.q.weight": weight,
        "layers.0.attn.q.weight.exp_avg": weight.t() * 2,  # not contiguous
        "half": weight.bfloat16(),
        "step": torch.tensor(step),
        "mask": weight > 0,
        "none": torch.empty(0, 4),
        "ids": torch.arange(step, step + 7, dtype=torch.int16),
    }


def state(step: int) -> dict:
    return {"samples": step * 32, "losses": [1 / 3, step / 7], "name": "Größe"}


def assert_is(step: int, run: Path) -> None:
    found = load_latest(run)
    assert found is not None
    assert (found.step, found.state) == (step, state(step))
    for name, tensor in tensors(step).items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor), name


# --- when all is well ---------------------------------------------------------------------------


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path):
    folder = save(tmp_path / "run", 300, tensors(300), state(300))
    assert folder.name == "step-000300"
    assert_is(300, tmp_path / "run")
    assert {file.name for file in folder.iterdir()} == {"tensors.safetensors", "state.json", "manifest.json"}


def test_the_library_reads_the_tensors_aligned(tmp_path: Path):
    folder = save(tmp_path / "run", 1, tensors(1), {})
    theirs = load_file(folder / "tensors.safetensors")
    assert theirs.keys() == tensors(1).keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors(1).items())
    raw = (folder / "tensors.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert size % 8 == 0
    widths = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1, "I16": 2}
    assert all(entry["data_offsets"][0] % widths[entry["dtype"]] == 0 for entry in header.values())


def test_a_large_tensor_is_written_in_pieces(tmp_path: Path):
    large = {"large": torch.arange(5_000_000, dtype=torch.float32)}  # 20 MB
    save(tmp_path, 1, large, {})
    found = load_latest(tmp_path)
    assert found is not None
    assert torch.equal(found.tensors["large"], large["large"])


def test_no_checkpoint_is_none(tmp_path: Path):
    assert load_latest(tmp_path / "run") is None
    assert load_latest(tmp_path) is None


def test_older_ones_go_and_the_newest_stay(tmp_path: Path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, tensors(step), state(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]
    save(tmp_path, 5, tensors(5), state(5), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_steps_are_compared_as_numbers(tmp_path: Path):
    for step in (999_999, 1_000_000):
        save(tmp_path, step, tensors(step), state(step))
    assert_is(1_000_000, tmp_path)


def test_a_step_that_is_there_is_written_beside_it(tmp_path: Path):
    save(tmp_path, 7, tensors(1), state(1))
    assert save(tmp_path, 7, tensors(7), state(7)).name == "step-000007.2"
    assert_is(7, tmp_path)
    assert save(tmp_path, 7, tensors(7), state(7), keep=1).name == "step-000007.3"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000007.3"]


def test_what_is_newer_than_a_save_is_never_removed(tmp_path: Path):
    save(tmp_path, 9, tensors(9), state(9))
    save(tmp_path, 5, tensors(5), state(5), keep=1)
    assert_is(9, tmp_path)
    assert verify(tmp_path / "step-000005") == 5


def test_other_files_in_the_run_are_left_alone(tmp_path: Path):
    for name in ("step-1", "steps", "step-000001.txt", "metrics.jsonl"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000002").write_text("a file with a checkpoint's name")
    for step in (3, 4, 5):
        save(tmp_path, step, tensors(step), state(step), keep=1)
    assert len(list(tmp_path.iterdir())) == 6
    assert_is(5, tmp_path)


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path):
    (tmp_path / "step-000003.tmp-0123abcd").mkdir()
    (tmp_path / "step-000003.tmp-0123abcd" / "tensors.safetensors").write_bytes(b"half")
    assert load_latest(tmp_path) is None
    save(tmp_path, 4, tensors(4), state(4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


@pytest.mark.parametrize(
    ("bad_tensors", "bad_state"),
    [
        ({"x": torch.zeros(2, dtype=torch.complex64)}, {}),
        ({}, {"loss": float("nan")}),
        ({}, {"rng": b"bytes"}),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path, bad_tensors, bad_state):
    with pytest.raises((ValueError, TypeError)):
        save(tmp_path, 1, bad_tensors, bad_state)
    assert list(tmp_path.iterdir()) == []


# --- damage -------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (100, 200):
        save(tmp_path / "run", step, tensors(step), state(step))
    return tmp_path / "run"


def test_every_flipped_bit_is_detected(run: Path):
    files = sorted((run / "step-000200").iterdir())
    sizes = [file.stat().st_size for file in files]
    chance = random.Random(0)
    for i in range(1000 if FULL else 150):
        # In turns, so that the small files get as many as the large one.
        file = files[i % 3] if i % 2 else chance.choices(files, sizes)[0]
        raw = file.read_bytes()
        place, bit = chance.randrange(len(raw)), 1 << chance.randrange(8)
        file.write_bytes(raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1 :])
        with pytest.raises(FileError):
            verify(run / "step-000200")
        file.write_bytes(raw)
    assert_is(200, run)


def test_every_truncation_is_detected(run: Path):
    files = sorted((run / "step-000200").iterdir())
    chance = random.Random(1)
    for i in range(1000 if FULL else 150):
        file = files[i % 3]
        raw = file.read_bytes()
        file.write_bytes(raw[: chance.randrange(len(raw))])
        with pytest.raises(FileError):
            verify(run / "step-000200")
        file.write_bytes(raw)
    assert_is(200, run)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_and_named_but_not_deleted(run: Path, name: str):
    (run / "step-000200" / name).write_bytes(b"{}")
    found = load_latest(run)
    assert found is not None
    assert (found.step, [one.path.name for one in found.skipped]) == (100, ["step-000200"])
    assert name in found.skipped[0].why
    assert len(list((run / "step-000200").iterdir())) == 3
    (run / "step-000200" / name).unlink()
    assert load_latest(run) is not None


def test_if_none_is_whole_that_is_an_error_and_no_fresh_start(run: Path):
    for folder in run.iterdir():
        (folder / "state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as caught:
        load_latest(run)
    assert "\n" not in str(caught.value)
    assert len(list(run.iterdir())) == 2


def test_a_renamed_checkpoint_is_not_of_another_step(run: Path):
    (run / "step-000200").rename(run / "step-000300")
    with pytest.raises(FileError, match="300"):
        load(run / "step-000300")


@pytest.mark.parametrize(
    "files",
    [
        5,
        {},
        {"tensors.safetensors": 5, "state.json": 5},
        {"../../x": {}, "state.json": {}},
        {"tensors.safetensors": {"bytes": "x"}, "state.json": {"bytes": True, "sha256": None}},
    ],
)
def test_a_manifest_of_someone_elses_making_is_a_file_error(run: Path, files: object):
    from openbook.train import checkpoint

    (run / "step-000200" / "manifest.json").write_bytes(checkpoint._manifest(200, files))  # type: ignore[arg-type]
    with pytest.raises(FileError):
        load(run / "step-000200")


# --- a disk that fails --------------------------------------------------------------------------


class Quick(Disk):
    """A disk that takes its time over nothing: where no crash is at stake."""

    def sync(self, file: BinaryIO) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class Failing(Quick):
    """A disk on which one operation fails, a write after half of its bytes."""

    def __init__(self, after: int, code: int) -> None:
        self.left, self.code = after, code
        self.failed_at = ""

    def _count(self, what: str) -> bool:
        self.left -= 1
        if self.left < 0 and not self.failed_at:
            self.failed_at = what
            return True
        return False

    def _maybe_fail(self, what: str) -> None:
        if self._count(what):
            raise OSError(self.code, os.strerror(self.code))

    def make_folder(self, path: Path) -> None:
        self._maybe_fail("make_folder")
        super().make_folder(path)

    def create(self, path: Path) -> BinaryIO:
        self._maybe_fail("create")
        return super().create(path)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        if self._count("write"):
            super().write(file, data[: len(data) // 2])
            raise OSError(self.code, os.strerror(self.code))
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self._maybe_fail("sync")

    def sync_folder(self, path: Path) -> None:
        self._maybe_fail("sync_folder")

    def rename(self, old: Path, new: Path) -> None:
        self._maybe_fail("rename")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._maybe_fail("unlink")
        super().unlink(path)

    def remove_folder(self, path: Path) -> None:
        self._maybe_fail("remove_folder")
        super().remove_folder(path)


def attempt(run: Path, step: int, disk: Disk) -> str:
    """What a save that fails has to say; '' if it does not."""
    try:
        save(run, step, tensors(step), state(step), keep=1, disk=disk)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_whatever_operation_fails_the_last_good_one_stays_and_the_next_save_works(tmp_path: Path, code: int):
    failed: Counter[str] = Counter()
    for after in range(100):
        run, disk = tmp_path / str(after), Failing(after, code)
        assert not attempt(run, 1, Quick())
        message = attempt(run, 2, disk)
        if message:
            assert os.strerror(code) in message
            assert re.search(
                r"it takes [\d,]{3,} bytes and [\d,]+ are free; the last one is step-000001$", message
            )
            assert verify(run / "step-000001") == 1
            assert not [path for path in run.iterdir() if ".tmp-" in path.name]
        else:
            assert_is(2, run)
        assert not attempt(run, 3, Quick())
        assert_is(3, run)
        assert [path.name for path in run.iterdir()] == ["step-000003"]
        if not disk.failed_at:
            break
        failed[disk.failed_at] += 1
    assert failed["write"] > 5
    assert failed.keys() == {
        "make_folder", "create", "write", "sync", "sync_folder", "rename", "unlink", "remove_folder",
    }  # fmt: skip


def test_a_full_disk_is_told_before_anything_is_written(run: Path):
    class Full(Disk):
        def free_bytes(self, path: Path) -> int:
            return 100

        def make_folder(self, path: Path) -> None:
            raise AssertionError("written to a full disk")

    with pytest.raises(CheckpointError, match=r"No space left.* it takes [\d,]{3,} bytes and 100 are free"):
        save(run, 300, tensors(300), state(300), disk=Full())
    assert_is(200, run)


def test_the_systems_own_limit_on_files_is_met_the_same_way(run: Path):
    """A real error in a real write, at a place of the system's choosing."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, old[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save(run, 300, tensors(300), state(300))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert sorted(path.name for path in run.iterdir()) == ["step-000100", "step-000200"]


# --- a crash ------------------------------------------------------------------------------------


def test_every_prefix_of_the_operations_leaves_what_was_saved_before(tmp_path: Path):
    """After any operation, whatever the disk lost of what was not synced: the last save that had returned
    loads, or the one that was being made; and before the first, none."""
    disk = Recorder(tmp_path / "real")
    done: list[tuple[int, int]] = [(0, 0)]  # operations, last step saved
    disk.root.mkdir()
    for step in (1, 2, 3):
        save(disk.root / "run", step, tensors(step), state(step), keep=1, disk=disk)
        done.append((len(disk.operations), step))
    seen: set[str] = set()
    for n in range(len(disk.operations) + 1):
        saved = max(step for operations, step in done if operations <= n)
        for tree in states(disk.operations[:n]):
            key = f"{saved} {tree!r}"
            if key in seen:
                continue
            seen.add(key)
            write_tree(tree, tmp_path / "crashed")
            found = load_latest(tmp_path / "crashed" / "run")
            assert saved <= (found.step if found else 0) <= saved + 1, (n, disk.operations[n - 1][:2])
            if found:
                assert_is(found.step, tmp_path / "crashed" / "run")
            shutil.rmtree(tmp_path / "crashed")
    assert len(seen) > 120


@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_the_model_of_a_crash_sees_a_sync_that_is_forgotten(tmp_path: Path, forgotten: str):
    """The test above would notice: without its syncs the protocol does lose a checkpoint."""
    disk = Recorder(tmp_path / "real")
    disk.root.mkdir()
    save(disk.root / "run", 1, tensors(1), state(1), disk=disk)
    operations = [operation for operation in disk.operations if operation[0] != forgotten]
    lost = 0
    for i, tree in enumerate(states(operations)):
        write_tree(tree, tmp_path / str(i))
        try:
            lost += load_latest(tmp_path / str(i) / "run") is None
        except CheckpointError:
            lost += 1
    assert lost


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from openbook.train.checkpoint import load_latest, save

def tensors(step):
    return {"w": torch.full((50_000,), float(step)), "step": torch.tensor(step)}

run, chance = Path(sys.argv[1]), random.Random(0)
for _ in range(int(sys.argv[2])):
    begun, told = os.pipe()
    child = os.fork()
    if child == 0:
        found = load_latest(run)
        step = found.step if found else 0
        while True:
            step += 1
            save(run, step, tensors(step), {"step": step})
            os.write(told, step.to_bytes(8, "little"))
    time.sleep(chance.uniform(0.001, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(told)
    with os.fdopen(begun, "rb") as file:
        steps = file.read()
    saved = int.from_bytes(steps[-8:], "little")
    found = load_latest(run)
    step = found.step if found else 0
    assert step >= saved, (step, saved)
    if found:
        assert found.state == {"step": step} and torch.equal(found.tensors["w"], tensors(step)["w"])
        assert not found.skipped, found.skipped
print(step)
"""


def test_a_process_killed_at_any_instant_leaves_its_last_checkpoint(tmp_path: Path):
    rounds = "100" if FULL else "8"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "run"), rounds],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 2
