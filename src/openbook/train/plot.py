"""loss.png: how a run learned, as a picture."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openbook.train.records import METRICS, read

PLOT = "loss.png"

_TRAIN, _HELD_OUT, _GREY = "#1f5fa8", "#c2410c", "#6b7280"


def draw(folder: Path, title: str) -> bool:
    """Draws RUN/loss.png of RUN/metrics.jsonl; false if matplotlib or anything to draw is missing."""
    records = list(read(folder / METRICS))
    steps = [record for record in records if record.get("loss") is not None]
    if not steps or importlib.util.find_spec("matplotlib") is None:
        return False
    evaluated = [record for record in records if "heldout_bits_per_byte" in record]
    figure = _figure(title, steps, evaluated)
    part = folder / f"{PLOT}.{secrets.token_hex(4)}.part"
    figure.savefig(part, format="png", dpi=150)
    os.replace(part, folder / PLOT)
    return True


def _figure(title: str, steps: Sequence[dict[str, Any]], evaluated: Sequence[dict[str, Any]]) -> Any:
    # Not pyplot, which keeps figures and asks for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    x, losses = [record["step"] for record in steps], [record["loss"] for record in steps]
    axes.plot(x, losses, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(x, smoothed(losses), color=_TRAIN, linewidth=1.8)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per token", color=_TRAIN)
    axes.tick_params(axis="y", colors=_TRAIN)
    axes.set_xlim(0, x[-1])
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if evaluated:
        _add_held_out(axes, evaluated)
    tokens = sum(record["tokens"] for record in steps)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10, parse_math=False)
    axes.set_title(f"{x[-1]:,} steps, {tokens:,} tokens", loc="right", fontsize=9, color=_GREY, pad=10)
    return figure


def _add_held_out(axes: Any, evaluated: Sequence[dict[str, Any]]) -> None:
    right = axes.twinx()
    x = [record["step"] for record in evaluated]
    y = [record["heldout_bits_per_byte"] for record in evaluated]
    right.plot(x, y, color=_HELD_OUT, marker="o", markersize=5, linewidth=1.4, clip_on=False)
    falls = len(y) > 1 and y[-1] < y[-2]  # then the line comes from above
    right.annotate(
        f"{y[-1]:.3f}",
        (x[-1], y[-1]),
        (-6, 26 if falls else 8),
        textcoords="offset points",
        ha="right",
        color=_HELD_OUT,
    )
    right.set_ylabel("held out, bits per byte", color=_HELD_OUT)
    right.tick_params(axis="y", colors=_HELD_OUT)
    right.spines[["top", "left"]].set_visible(False)
    low, high = min(y), max(y)
    room = 0.25 * (high - low) or 0.1 * high or 1.0
    right.set_ylim(low - room, high + room)


def smoothed(values: Sequence[float]) -> list[float]:
    """Each value averaged with those around it: as many as a fiftieth of them all, fewer at the ends."""
    half = max(1, len(values) // 100)
    return [
        sum(values[max(0, i - half) : i + half + 1]) / len(values[max(0, i - half) : i + half + 1])
        for i in range(len(values))
    ]
