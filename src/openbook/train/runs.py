"""Runs that are there: what each has come to, and how some of them differ. No torch is imported."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from openbook.files.errors import FileError
from openbook.sources import NotFoundError, read_json
from openbook.train.lock import is_busy
from openbook.train.records import METRICS, read

RECIPE = "recipe.json"
State = Literal["running", "done", "stopped"]


@dataclass(frozen=True)
class Summary:
    """What a run has come to. `loss` is the mean of its last steps' (at most 20), in nats per token; of the
    evaluations the last is told, and the best; None where there is none yet. `losses` are all of training's,
    by step."""

    folder: Path
    name: str
    state: State
    step: int
    steps: int
    loss: float | None
    bits_per_byte: float | None
    best_bits_per_byte: float | None
    best_step: int | None
    tokens_per_s: float | None
    recipe: Mapping[str, Any]
    losses: Mapping[int, float]


def is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file()


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The runs among the folders and below them, in the order of their names; a run holds no others.

    Raises `NotFoundError` for a folder that is not there.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise NotFoundError(f"there is no folder {folder}: openbook train makes runs in runs/")
        found |= dict.fromkeys(_below(folder))
    return list(found)


def _below(folder: Path) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
            yield from _below(inner)


def summarise(folder: Path) -> Summary:
    """Raises `FileError` for a recipe that is no recipe, `NotFoundError` for a folder that is no run."""
    if not is_run(folder):
        raise NotFoundError(f"{folder} is no run: it has no {RECIPE}")
    recipe = read_json(folder / RECIPE)
    steps = _steps(folder / RECIPE, recipe)
    records = list(read(folder / METRICS))
    taken = [record for record in records if "loss" in record]
    losses = {record["step"]: record["loss"] for record in taken if _is_number(record["loss"])}
    heldout = {
        record["step"]: record["heldout_bits_per_byte"]
        for record in records
        if _is_number(record.get("heldout_bits_per_byte"))
    }
    last = list(losses.values())[-20:]
    best = min(heldout, key=lambda step: heldout[step], default=None)
    speeds = [record.get("tokens_per_s") for record in taken[-100:]]
    step = taken[-1]["step"] if taken else 0
    done = step >= steps and (folder / "model").is_dir()
    return Summary(
        folder=folder,
        name=str(recipe.get("name", "")),
        state="running" if is_busy(folder) else "done" if done else "stopped",
        step=step,
        steps=steps,
        loss=sum(last) / len(last) if last else None,
        bits_per_byte=heldout[max(heldout)] if heldout else None,
        best_bits_per_byte=None if best is None else heldout[best],
        best_step=best,
        tokens_per_s=_median(speeds),
        recipe=recipe,
        losses=losses,
    )


def _steps(path: Path, recipe: Mapping[str, Any]) -> int:
    train = recipe.get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    if type(steps) is not int or steps < 1:
        raise FileError(path, "train.steps", "the value", steps, "a whole number of at least 1")
    return steps


def _median(values: Sequence[Any]) -> float | None:
    numbers = [float(value) for value in values if _is_number(value)]
    return median(numbers) if numbers else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# --- beside each other --------------------------------------------------------------------------


def differing_keys(runs: Sequence[Summary]) -> dict[str, list[Any]]:
    """The recipes' keys that are not the same everywhere, each with its value in every run (None: absent)."""
    flat = [_flat(run.recipe) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    values = {key: [one.get(key) for one in flat] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for part, table in recipe.items():
        if isinstance(table, dict):
            flat |= {f"{part}.{key}": value for key, value in table.items()}
        elif part != "name":
            flat[part] = table
    return flat


def equal_steps(runs: Sequence[Summary], count: int = 8) -> list[tuple[int, list[float]]]:
    """The losses of all runs at about `count` steps that every one of them has taken, the last of these among
    them: each the mean over the steps around it (a twentieth of the way, as many as there are)."""
    common = sorted(set.intersection(*({*run.losses} for run in runs)))
    if not common:
        return []
    count = min(count, len(common))
    chosen = [common[(i + 1) * len(common) // count - 1] for i in range(count)]
    half = max(1, len(common) // 40)
    return [(step, [_around(run.losses, step, half) for run in runs]) for step in chosen]


def _around(losses: Mapping[int, float], step: int, half: int) -> float:
    near = [losses[i] for i in range(step - half, step + half + 1) if i in losses]
    return sum(near) / len(near)
