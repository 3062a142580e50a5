"""Training runs on disk: their folders, and what they have written of their loss so far.

The files are another program's, which may be writing them just now: a line that is no JSON object is passed
over, and of each only numbers are taken.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from openbook.files.lock import is_held
from openbook.files.regular import open_regular
from openbook.serve.errors import ApiError
from openbook.sources import read_json

RECIPE, METRICS, MODEL, LOCK = "recipe.json", "metrics.jsonl", "model", "lock"

MOST_FOLDERS = 2000
"""Folders that are looked into."""

MOST_BYTES = 64_000_000
"""Of a file of metrics; of a longer one the end is read."""

MOST_POINTS = 4000
"""Steps that are sent at once; of more, evenly chosen ones."""


def folders(given: Iterable[str]) -> dict[str, Path]:
    """The run folders by name: in, or up to two levels below, the working folder and those that are given."""
    here = Path.cwd()
    found: dict[str, Path] = {}
    for base in (here, *(Path(folder).expanduser().absolute() for folder in given)):
        for folder in _below(base):
            name = str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)
            found.setdefault(name, folder)
    return found


def _below(base: Path) -> Iterator[Path]:
    candidates = (
        folder for depth in ("", "*", "*/*") for folder in ([base] if not depth else base.glob(depth))
    )
    for folder in islice(candidates, MOST_FOLDERS):
        try:
            if (folder / RECIPE).is_file():
                yield folder
        except OSError:
            continue


def listing(given: Sequence[str]) -> list[dict[str, Any]]:
    """Every run, in short."""
    return [
        {"name": name, **about(folder, read_metrics(folder / METRICS))}
        for name, folder in folders(given).items()
    ]


def progress(given: Sequence[str], name: str, after: int) -> dict[str, Any]:
    """One run: its recipe, and its metrics of the steps after `after`. Raises `ApiError`, `FileError`."""
    folder = folders(given).get(name)
    if folder is None:
        raise ApiError(
            404, "no such run", "there is no run folder of this name", "name its folder with --runs"
        )
    rows = read_metrics(folder / METRICS)
    metrics = thinned([row for row in rows if row["step"] > after])
    return {"name": name, **about(folder, rows), "recipe": read_json(folder / RECIPE), "metrics": metrics}


def about(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far a run has come that has written these metrics."""
    losses = [row for row in rows if row.get("loss") is not None]
    return {
        "state": _state(folder),
        "step": max((row["step"] for row in rows), default=0),
        "steps": _steps(folder),
        "loss": losses[-1]["loss"] if losses else None,
    }


def _state(folder: Path) -> str:
    if is_held(folder / LOCK):
        return "running"
    if (folder / MODEL).is_dir():
        return "done"
    return "stopped" if (folder / METRICS).exists() else "new"


def _steps(folder: Path) -> int | None:
    try:
        train = read_json(folder / RECIPE).get("train")
    except (OSError, ValueError):
        return None
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if type(steps) is int else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The numbers of each line that has a step. What was held out is `valid_loss` too."""
    try:
        file, size = open_regular(path)
    except (OSError, ValueError):
        return []
    with file:
        if size > MOST_BYTES:
            file.seek(size - MOST_BYTES, os.SEEK_SET)
        lines = file.read(MOST_BYTES).split(b"\n")
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        return None
    row = {key: value for key, value in found.items() if _is_number(value)}
    if "heldout_nats" in row:
        row["valid_loss"] = row["heldout_nats"]
    return row


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `MOST_POINTS` rows, the last one and every evaluation among them."""
    every = math.ceil(len(rows) / MOST_POINTS)
    return [row for i, row in enumerate(reversed(rows)) if i % every == 0 or "valid_loss" in row][::-1]
