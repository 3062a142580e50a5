"""Checkpoints: safetensors and JSON, written so that a crash at any instant leaves one that loads.

    RUN/step-000300/tensors.safetensors   weights and moments under flat names
                    state.json            everything else
                    manifest.json         the size and SHA-256 of both

A save goes to a temporary folder; every file is synced, then the folder; a rename gives it its name, and
the run's folder is synced; everything is read again and compared; only then do older ones go. So a
folder with a checkpoint's name is complete, unless the disk lost what it had promised: then its SHA-256
tells, and the one before is taken.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from openbook.files.errors import FileError
from openbook.files.regular import open_regular
from openbook.files.safetensors import open_safetensors
from openbook.files.strict_json import kind_of, parse_object

SCHEMA = "openbook.checkpoint/1"
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
MAX_JSON_BYTES = 16 * 2**20

_NAME = re.compile(r"step-(\d{6,15})(?:\.(\d{1,9}))?")
_TEMPORARY = re.compile(r"step-[\d.]+\.tmp-[0-9a-f]+")
_CHUNK = 16 * 2**20


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, or of those that are there none can be loaded."""


class Disk:
    """All that a save does to the file system, so that a test can record it, lose it or let it fail."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        return path.open("xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        while data:
            data = data[file.write(data) :]

    def sync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


# --- saving -------------------------------------------------------------------------------------


def save(
    run: str | Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int = 2,
    disk: Disk | None = None,
) -> Path:
    """Writes the checkpoint of `step` into the folder `run`, and returns its own folder.

    When it has been read back and is right, the older ones but for the `keep` - 1 newest are removed. A
    step that is there already is written a second time, as step-000300.2, and counts as newer.

    Raises `CheckpointError` if the disk is full or fails: what was there before is then still there, and
    the message says how many bytes are needed. Raises `ValueError` or `TypeError` before anything is
    written for a tensor type that safetensors lacks and for a state that is not JSON.
    """
    if not 0 <= step < 10**15 or keep < 1:
        raise ValueError(f"step {step}, keep {keep}: a step is 0 or more, and one checkpoint must be kept")
    disk, run = disk or Disk(), Path(run)
    about = json.dumps(dict(state), allow_nan=False, indent=1).encode() + b"\n"
    header, order = _header(tensors)
    needed = len(header) + sum(tensor.nbytes for tensor in tensors.values()) + len(about)
    contents = {TENSORS: _chunks(header, order), STATE: [memoryview(about)]}
    there = [path.name for _, path in _found(run)]
    try:
        folder = _write(disk, run, step, needed, contents)
        verify(folder)
    except (OSError, FileError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        last = f"the last one is {there[0]}" if there else "there is no earlier one"
        raise CheckpointError(
            f"the checkpoint of step {step} could not be saved in {run}: {reason}; it takes {needed:,} bytes"
            f"{_free(disk, run)}; {last}"
        ) from error
    with contextlib.suppress(OSError):  # the save is done; the next one tries again
        _prune(disk, run, folder, keep)
    return folder


def _write(
    disk: Disk, run: Path, step: int, needed: int, contents: Mapping[str, Iterable[memoryview]]
) -> Path:
    """The protocol, up to the rename that makes it a checkpoint, and the sync that makes the rename last."""
    if not run.exists():
        run.parent.mkdir(parents=True, exist_ok=True)
        disk.make_folder(run)
        disk.sync_folder(run.parent)
    if disk.free_bytes(run) < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    name = _free_name(run, step)
    part = run / f"{name}.tmp-{secrets.token_hex(4)}"
    try:
        disk.make_folder(part)
        files = {file: _write_file(disk, part / file, chunks) for file, chunks in contents.items()}
        _write_file(disk, part / MANIFEST, [memoryview(_manifest(step, files))])
        disk.sync_folder(part)
        disk.rename(part, run / name)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    disk.sync_folder(run)
    return run / name


def _write_file(disk: Disk, path: Path, chunks: Iterable[memoryview]) -> dict[str, Any]:
    """Writes and syncs one file; what the manifest says of it."""
    digest, size = hashlib.sha256(), 0
    with disk.create(path) as file:
        for chunk in chunks:
            disk.write(file, chunk)
            digest.update(chunk)
            size += len(chunk)
        disk.sync(file)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _free_name(run: Path, step: int) -> str:
    """step-000300, or if that is taken step-000300.2: nothing that is there is ever replaced."""
    attempts = [attempt for (there, attempt), _ in _found(run) if there == step]
    return f"step-{step:06}" + (f".{max(attempts) + 1}" if attempts else "")


def _free(disk: Disk, run: Path) -> str:
    try:
        return f" and {disk.free_bytes(run):,} are free"
    except OSError:
        return ""


def _prune(disk: Disk, run: Path, newest: Path, keep: int) -> None:
    """Removes what is older than `newest` and beyond `keep`, and what saves that were killed left behind."""
    for path in run.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            _remove(disk, path)
    found = [path for _, path in _found(run)]
    older = found[found.index(newest) + 1 :]
    for path in older[keep - 1 :]:
        going = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
        disk.rename(path, going)
        disk.sync_folder(run)  # before its files go: half a checkpoint must not have a checkpoint's name
        _remove(disk, going)


def _remove(disk: Disk, folder: Path) -> None:
    for file in folder.iterdir():
        disk.unlink(file)
    disk.remove_folder(folder)


# --- loading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Skipped:
    """A newer checkpoint that was passed over."""

    path: Path
    why: str


@dataclass(frozen=True)
class Checkpoint:
    """What was saved. `tensors` are paged in from the file: copy them before writing to them."""

    step: int
    path: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()


def load_latest(run: str | Path) -> Checkpoint | None:
    """The newest checkpoint in `run` of which every byte is as it was saved; None if there is none.

    `skipped` tells of the newer ones that are damaged. Nothing is ever deleted. Raises `CheckpointError`
    if there are checkpoints, but none that can be loaded.
    """
    skipped: list[Skipped] = []
    for _, path in _found(Path(run)):
        try:
            return replace(load(path), skipped=tuple(skipped))
        except (FileError, OSError) as error:
            skipped.append(Skipped(path, str(error)))
    if skipped:
        reasons = "; ".join(f"{one.path.name}: {one.why}" for one in skipped[:3])
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {run} can be loaded: {reasons}; remove them to begin "
            "anew"
        )
    return None


def load(folder: str | Path) -> Checkpoint:
    """One checkpoint, verified. Raises `FileError` for a damaged one, `OSError` for one that is not there."""
    folder = Path(folder)
    step = verify(folder)
    files = open_safetensors(folder / TENSORS)
    state = parse_object(folder / STATE, (folder / STATE).read_bytes(), "the content")
    return Checkpoint(step, folder, {name: files.get(name) for name in files.tensors}, state)


def verify(folder: Path) -> int:
    """Reads every byte of a checkpoint and compares it with the manifest; returns its step.

    Raises `FileError` for the first difference, `OSError` for a file that cannot be read.
    """
    step, files = _read_manifest(folder / MANIFEST)
    named = _NAME.fullmatch(folder.name)
    if named and int(named[1]) != step:
        raise FileError(folder / MANIFEST, "", "the step", step, f"{int(named[1])}, as in the folder's name")
    for name, about in files.items():
        found = _sizes(folder / name)
        if found != about:
            raise FileError(folder / name, "", "the content", found, f"{about}, as in the manifest")
    return step


def _sizes(path: Path) -> dict[str, Any]:
    """What a manifest says of a file, found by reading it."""
    digest, size = hashlib.sha256(), 0
    file, _ = open_regular(path)
    with file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _found(run: Path) -> list[tuple[tuple[int, int], Path]]:
    """The folders with a checkpoint's name as ((step, attempt), path), the newest first."""
    if not run.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in run.iterdir() if path.is_dir())
    found = [((int(name[1]), int(name[2] or 1)), path) for name, path in named if name]
    return sorted(found, reverse=True)


# --- the manifest -------------------------------------------------------------------------------


def _manifest(step: int, files: Mapping[str, Any]) -> bytes:
    """The manifest in the one spelling that is accepted, its own SHA-256 in it: no bit of it can change."""
    about = {"schema": SCHEMA, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return json.dumps({**about, "sha256": digest}, indent=1, sort_keys=True).encode() + b"\n"


def _read_manifest(path: Path) -> tuple[int, dict[str, Any]]:
    file, size = open_regular(path)
    with file:
        if size > MAX_JSON_BYTES:
            raise FileError(path, "", "the size", f"{size:,} bytes", f"at most {MAX_JSON_BYTES:,}")
        raw = file.read(MAX_JSON_BYTES)
    about = parse_object(path, raw, "the manifest")
    step, files = about.get("step"), about.get("files")
    if about.get("schema") != SCHEMA:
        raise FileError(path, "", "the schema", about.get("schema"), SCHEMA)
    if type(step) is not int or not isinstance(files, dict) or set(files) != {TENSORS, STATE}:
        raise FileError(path, "", "the manifest", kind_of(files), f"a step, and files {TENSORS} and {STATE}")
    if raw != _manifest(step, files):
        raise FileError(path, "", "the content", "damaged", "one that agrees with its own SHA-256")
    return step, files


# --- safetensors, as a stream -------------------------------------------------------------------

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """The header of a safetensors file, and the tensors in the order that their bytes follow it.

    Wide types first, so that all are aligned. The library's own writer takes all bytes at once and goes
    past `Disk`.
    """
    entries: dict[str, Any] = {}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors cannot hold")
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in ordered]


def _chunks(header: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of the file, at most one tensor copied at a time."""
    yield memoryview(header)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), _CHUNK):
            yield flat[start : start + _CHUNK].data
