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
    from openbook.train.recipe import read_recipe

    found = read_recipe(recipe, changes or ())
    if dry_run:
        _predict(found, force, json)
        return
    import torch

    from openbook.train.run import MODEL, carry_out, open_run

    if threads is not None:
        torch.set_num_threads(threads)
    folder = Path(output) if output is not None else Path("runs") / found.name
    with terminal.Progress() as progress:
        opened = open_run(found, folder, resume is not None, force, progress)
    for damaged in opened.damaged:
        terminal.note(f"warning: passed over {damaged}")
    _introduce(opened)
    with Report(found.train.steps, opened.trainer.step) as report:
        stopped_by = carry_out(opened, report)
    if stopped_by:
        step = opened.trainer.step
        terminal.note(
            f"saved at step {step:,}; go on with: openbook train {recipe} -o {folder} --resume auto"
        )
        raise typer.Exit(INTERRUPTED_BY + stopped_by)
    _conclude(opened, folder / MODEL, report.heldout, json)


# --- before -------------------------------------------------------------------------------------


def _predict(recipe: Recipe, force: bool, json: bool) -> None:
    """Prints the books of the run, then refuses what cannot fit."""
    from dataclasses import asdict

    from openbook.train.run import prediction
    from openbook.weights.fit import check_fit

    predicted = prediction(recipe)
    if json:
        terminal.write_json(
            "train", {**asdict(predicted), "bytes": predicted.bytes, "recipe": recipe.plain()}
        )
    else:
        print(_books(recipe, predicted), end="")
    if not force:
        check_fit(f"training {recipe.name}", predicted.bytes)


def _books(recipe: Recipe, predicted: Prediction) -> str:
    from openbook.ledger.table import Column, Table

    train = recipe.train
    title = (
        f"{recipe.name}: {predicted.params:,} parameters; {train.steps:,} steps of {train.rows} × "
        f"{recipe.data.length} tokens, {predicted.tokens:,} in all; {predicted.flops:.4g} FLOPs"
    )
    rows = [(row.name, row.bytes, row.meaning) for row in predicted.memory]
    rows.append(("in all", predicted.bytes, "beside the program itself"))
    notes = (f"FLOPs: {'; '.join(predicted.conventions)}; each row as one document.",)
    columns = (Column("memory"), Column("bytes", "bytes"), Column("what"))
    return Table(title, columns, tuple(rows), notes).text()


def _introduce(opened: Run) -> None:
    spec, trainer, steps = opened.trainer.decoder.spec, opened.trainer, opened.recipe.train.steps
    n_params = sum(parameter.numel() for parameter in trainer.decoder.parameters())
    start = f"from step {trainer.step:,} of {steps:,}" if trainer.step else f"{steps:,} steps"
    terminal.note(f"{opened.folder}: {n_params:,} parameters, {spec.vocab_size:,} tokens, {start}")


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
        left = (now - self._start) / (record["step"] - self._from) * (self._steps - record["step"])
        loss = math.nan if record["loss"] is None else record["loss"]
        return (
            f"step {record['step']:,} of {self._steps:,}  loss {loss:.4f}  lr {record['lr']:.2e}  "
            f"{record['tokens_per_s']:,.0f} tokens/s  {record['flops_per_s'] / 1e9:,.1f} GFLOP/s  "
            f"{int(left) // 60}:{int(left) % 60:02} left"
        )

    def _clear(self) -> None:
        if self._bar:
            terminal.note("\r\x1b[K", end="")


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
