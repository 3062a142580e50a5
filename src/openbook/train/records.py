"""What a run writes down as it goes, for people and for programs.

RUN/metrics.jsonl     a line for every step and every evaluation
    samples.jsonl     what the model made of the recipe's beginnings; samples.txt shows the same to read
    tensorboard/      the metrics for TensorBoard, where it is installed
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

METRICS, SAMPLES, SAMPLES_TEXT, TENSORBOARD = "metrics.jsonl", "samples.jsonl", "samples.txt", "tensorboard"

Record = Mapping[str, Any]
"""A line of metrics.jsonl, {"step", "loss", "lr", "grad_norm", ...} or {"step", "heldout_nats", ...}; or of
samples.jsonl, {"step", "prompt", "text"}."""


def missing_extras() -> list[str]:
    """The packages without which a run leaves less."""
    return [name for name in ("matplotlib", "tensorboard") if importlib.util.find_spec(name) is None]


class Records:
    """The files of a run, open for the steps to come. Nothing is opened before it is written to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[str]] = {}
        self._board: Any = None

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._files.values(), *([self._board] if self._board else [])):
            file.close()

    def write(self, record: Record) -> None:
        """Appends a record to the file that it belongs in. Raises `OSError`."""
        is_sample = "prompt" in record
        self._append(SAMPLES if is_sample else METRICS, record)
        if is_sample:
            write_whole(self._folder / SAMPLES_TEXT, "".join(map(_as_text, read(self._folder / SAMPLES))))
        self._tell_board(record)

    def _append(self, name: str, record: Record) -> None:
        if name not in self._files:
            self._files[name] = (self._folder / name).open("a", encoding="utf-8")
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()

    def _tell_board(self, record: Record) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            return
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            # What a killed run had told of steps that are taken again is hidden.
            self._board = SummaryWriter(str(self._folder / TENSORBOARD), purge_step=record["step"])
        if "prompt" in record:
            self._board.add_text(
                f"sample/{record['prompt'][:40]}", f"```\n{record['text']}\n```", record["step"]
            )
        for key, value in record.items():
            if key in SHOWN and value is not None:
                self._board.add_scalar(
                    f"{'heldout' if key.startswith('heldout') else 'train'}/{key}", value, record["step"]
                )


SHOWN = ("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "heldout_nats", "heldout_bits_per_byte")
"""What of the metrics TensorBoard draws."""


def _as_text(sample: Record) -> str:
    title = f"step {sample['step']:,}: {sample['prompt']!r}"
    return f"{title}\n{'-' * min(len(title), 80)}\n{sample['prompt']}{sample['text']}\n\n"


# --- reading them -------------------------------------------------------------------------------


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, the last of which a kill may have cut: what is no record is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int and line.endswith("\n"):
                yield record


def keep(folder: Path, step: int) -> None:
    """Drops what was written of steps beyond `step`, and lines that were cut: these will be taken again."""
    for name in (METRICS, SAMPLES):
        path = folder / name
        if path.exists():
            kept = [record for record in read(path) if record["step"] <= step and step > 0]
            write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))


def write_whole(path: Path, text: str) -> None:
    """A file that is there whole or as it was, even if the process is killed meanwhile."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    part.write_text(text, "utf-8")
    os.replace(part, path)
