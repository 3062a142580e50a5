"""`openbook train`: a recipe becomes a model."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from openbook.cli import terminal
from openbook.cli.options import Force, Json, Quiet, Threads, Verbose

if TYPE_CHECKING:
    from openbook.train.measure import Speed
    from openbook.train.predict import Prediction
    from openbook.train.recipe import Recipe
    from openbook.train.run import Run

INTERRUPTED_BY = 128
"""A program that a signal ended has 128 and the signal's number as its exit code: 130 for Ctrl-C."""


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's .toml file.", show_default=False)],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="RUN", help="The run's folder.", show_default="runs/RECIPE"),
    ] = None,
    resume: Annotated[
        Literal["auto"] | None,
        typer.Option(help="auto: go on with the run that is there, if there is one.", show_default=False),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a key, as in train.lr=1e-3; may be repeated.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what it would take, from the ledger, and do nothing.")
    ] = False,
    force: Force = False,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Trains a model. Ctrl-C saves at the next step, and --resume auto goes on from there."""
    from openbook.cli.loading import source_with_weights
    from openbook.train.recipe import read_recipe

    found = read_recipe(recipe, changes or ())
    if found.base is not None and not dry_run:
        source_with_weights(found.base)  # said before torch is loaded
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if dry_run:
        _predict(found, force, json)
        return
    from openbook.train.export import ADAPTER, MODEL
    from openbook.train.run import carry_out, open_run

    folder = Path(output) if output is not None else Path("runs") / found.name
    with terminal.Progress() as progress:
        opened = open_run(found, folder, resume is not None, force, progress)
    for note in opened.notes:
        terminal.note(f"note: {note}")
    _introduce(opened)
    with Report(found.train.steps, opened.trainer.step) as report:
        stopped_by = carry_out(opened, report)
    if stopped_by:
        step = opened.trainer.step
        terminal.note(
            f"saved at step {step:,}; go on with: openbook train {recipe} -o {folder} --resume auto"
        )
        raise typer.Exit(INTERRUPTED_BY + stopped_by)
    if found.lora is not None:
        terminal.note(f"{folder / ADAPTER}: the additions alone, as peft loads them")
    _conclude(opened, folder / MODEL, report.heldout, json)


# --- before -------------------------------------------------------------------------------------


def _predict(recipe: Recipe, force: bool, json: bool) -> None:
    """Prints the books of the run, then refuses what cannot fit."""
    from dataclasses import asdict

    from openbook.train.measure import measure
    from openbook.train.start import expected_vocab_size, prediction, spec_of
    from openbook.weights.fit import available_bytes, check_fit

    predicted = prediction(recipe)
    fits = predicted.bytes <= (available_bytes() or predicted.bytes)
    speed = measure(recipe, spec_of(recipe, expected_vocab_size(recipe))) if fits or force else None
    if json:
        about = {**asdict(predicted), "bytes": predicted.bytes, "recipe": recipe.plain()}
        seconds = recipe.train.steps * speed.seconds_per_step if speed else None
        measured = asdict(speed) if speed else None
        terminal.write_json("train", {**about, "seconds": seconds, "measured": measured})
    else:
        print(_books(recipe, predicted, speed), end="")
    if not force:
        check_fit(f"training {recipe.name}", predicted.bytes)


def _books(recipe: Recipe, predicted: Prediction, speed: Speed | None) -> str:
    from openbook.ledger.table import Column, Table

    train = recipe.train
    title = (
        f"{recipe.name}: {predicted.params:,} parameters; {train.steps:,} steps of {train.rows} × "
        f"{recipe.data.length} tokens, {predicted.tokens:,} in all; at most {predicted.flops:.4g} FLOPs"
    )
    rows = [(row.name, row.bytes, row.meaning) for row in predicted.memory]
    rows.append(("in all", predicted.bytes, "beside the program itself"))
    notes = [f"FLOPs: {'; '.join(predicted.conventions)}."]
    if speed is not None:
        notes.append(
            f"Time: about {_duration(train.steps * speed.seconds_per_step)} for the steps, without what is "
            f"before and between them, at {speed.flops_per_s / 1e9:,.0f} GFLOP/s. Measured here just now on "
            f"random tokens: {speed.layers} of {speed.of_layers} layers, {speed.rows} × {speed.length} "
            "at once."
        )
    columns = (Column("memory"), Column("bytes", "bytes"), Column("what"))
    return Table(title, columns, tuple(rows), tuple(notes)).text()


def _duration(seconds: float) -> str:
    """'2 min 5 s', '3.4 h', '12 days'"""
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s" if seconds >= 60 else f"{seconds:.0f} s"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:,.0f} days"


def _introduce(opened: Run) -> None:
    spec, trainer, steps = opened.trainer.decoder.spec, opened.trainer, opened.recipe.train.steps
    parameters = list(trainer.decoder.parameters())
    n_params = sum(parameter.numel() for parameter in parameters)
    learned = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    of_them = f", {learned:,} of them learned" if learned < n_params else ""
    start = f"from step {trainer.step:,} of {steps:,}" if trainer.step else f"{steps:,} steps"
    terminal.note(f"{opened.folder}: {n_params:,} parameters{of_them}, {spec.vocab_size:,} tokens, {start}")


# --- meanwhile ----------------------------------------------------------------------------------


class Report:
    """Tells of the steps on stderr: one line that is overwritten on a terminal, elsewhere one every few
    seconds. Keeps the last evaluation in `heldout`."""

    _EVERY_S = 5.0

    def __init__(self, steps: int, step: int) -> None:
        self.heldout: Mapping[str, Any] = {}
        self._steps, self._from = steps, step
        self._bar = sys.stderr.isatty() and not terminal.quiet
        self._start = time.monotonic()
        self._next = self._start

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def __call__(self, record: Mapping[str, Any]) -> None:
        if "heldout_nats" in record:
            self.heldout = record
            self._clear()
            terminal.note(
                f"step {record['step']:,}: held out {record['heldout_bits_per_byte']:.4f} bits per byte, "
                f"{record['heldout_nats']:.4f} nats per token"
            )
            return
        if "prompt" in record:
            self._clear()
            terminal.note(f"step {record['step']:,}: {_shown(record['prompt'])}{_shown(record['text'])}")
            return
        if record.get("skipped"):
            self._clear()
            terminal.note(f"step {record['step']:,} skipped: {record['skipped']}")
        now = time.monotonic()
        if now < self._next and record["step"] < self._steps:
            return
        self._next = now + (0.1 if self._bar else self._EVERY_S)
        line = self._line(record, now)
        terminal.note(f"\r\x1b[K{line}" if self._bar else line, end="" if self._bar else "\n")

    def _line(self, record: Mapping[str, Any], now: float) -> str:
        resident = record["resident_bytes"]
        memory = f"  {resident / 1e9:.2f} GB" if resident is not None else ""
        left = (now - self._start) / (record["step"] - self._from) * (self._steps - record["step"])
        loss = math.nan if record["loss"] is None else record["loss"]
        return (
            f"step {record['step']:,} of {self._steps:,}  loss {loss:.4f}  lr {record['lr']:.2e}  "
            f"{record['tokens_per_s']:,.0f} tokens/s  MFU {record['mfu']:.0%}{memory}  "
            f"{int(left) // 60}:{int(left) % 60:02} left"
        )

    def _clear(self) -> None:
        if self._bar:
            terminal.note("\r\x1b[K", end="")


def _shown(text: str) -> str:
    """Text of a model on one line of a terminal, which it must not command."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# --- after --------------------------------------------------------------------------------------


def _conclude(opened: Run, model: Path, heldout: Mapping[str, Any], json: bool) -> None:
    trainer = opened.trainer
    if json:
        about = {"run": str(opened.folder), "model": str(model), "steps": trainer.step, **trainer.counts()}
        terminal.write_json("train", {**about, **{k: v for k, v in heldout.items() if k != "step"}})
        return
    print(f"{model}: the model after {trainer.step:,} steps")
    if skipped := sum(trainer.counts().values()):
        print(f"{skipped:,} steps were skipped: see {opened.folder}/metrics.jsonl")
    terminal.note(f"Try it: openbook generate {opened.folder} -p ...")
