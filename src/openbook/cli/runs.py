"""`openbook runs`: the runs that are there, and how some of them differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openbook.cli import terminal
from openbook.cli.options import Json, Quiet, Verbose

if TYPE_CHECKING:
    from openbook.ledger.table import Cell
    from openbook.train.runs import Summary


def run(
    folders: Annotated[
        list[str] | None,
        typer.Argument(help="Runs, or folders with runs in them.", show_default="runs"),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Lists training runs; given several runs themselves, sets them beside each other."""
    from openbook.train.runs import find_runs, is_run, summarise

    paths = [Path(folder) for folder in folders or ["runs"]]
    found = [summarise(folder) for folder in find_runs(paths)]
    if len(paths) > 1 and all(map(is_run, paths)):
        _compare(found, json)
    elif json:
        terminal.write_json("runs", {"runs": [_plain(one) for one in found]})
    elif found:
        print(_listed(found), end="")
    else:
        terminal.note(f"no runs in {', '.join(map(str, paths))}: openbook train makes one")


def _plain(one: Summary) -> dict[str, Any]:
    about = {
        "folder": str(one.folder),
        "recipe": one.name,
        "state": one.state,
        "step": one.step,
        "steps": one.steps,
        "loss": one.loss,
        "bits_per_byte": one.bits_per_byte,
    }
    best = {"best_bits_per_byte": one.best_bits_per_byte, "best_step": one.best_step}
    return {**about, **best, "tokens_per_s": one.tokens_per_s}


# --- a list -------------------------------------------------------------------------------------


def _listed(found: list[Summary]) -> str:
    from openbook.ledger.table import Column, Table

    columns = [Column(title) for title in ("run", "recipe", "state")]
    columns += [Column(title, "count") for title in ("step", "loss", "bits per byte", "tokens/s")]
    rows = tuple(
        (
            _shown(one.folder),
            _shown(one.name),
            one.state,
            f"{one.step:,} of {one.steps:,}",
            _number(one.loss, 4),
            _number(one.bits_per_byte, 4),
            _number(one.tokens_per_s, 0),
        )
        for one in found
    )
    loss = "loss: of training, the mean of the last 20 steps, nats per token"
    bits = "bits per byte: of what was held out, at the last evaluation"
    notes = (f"{loss}; {bits}; tokens/s: the median of the last 100 steps.",)
    title = f"{len(found)} run{'s' * (len(found) != 1)}"
    return Table(title, tuple(columns), rows, notes).text()


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _shown(value: object) -> str:
    """A name or a value from a file, which must not command a terminal."""
    from openbook.files.errors import printable

    return printable(value if isinstance(value, str | Path) else str(value), 60)


# --- side by side -------------------------------------------------------------------------------


def _compare(found: list[Summary], json: bool) -> None:
    from openbook.train.runs import differing_keys, equal_steps

    keys, losses = differing_keys(found), equal_steps(found)
    if json:
        at = [{"step": step, "losses": values} for step, values in losses]
        about = {"runs": [_plain(one) for one in found], "differing": keys, "equal_steps": at}
        terminal.write_json("runs", about)
        return
    print(_beside(found, keys, losses), end="")


def _beside(found: list[Summary], keys: dict[str, list[Any]], losses: list[tuple[int, list[float]]]) -> str:
    from openbook.ledger.table import Column, Table

    def row(title: str, values: list[str]) -> tuple[Cell, ...]:
        return (title, *values)

    rows = [
        row(_shown(key), [_shown("-" if v is None else v) for v in values]) for key, values in keys.items()
    ]
    rows += [row(f"loss at step {step:,}", [_number(v, 4) for v in values]) for step, values in losses]
    rows.append(row("state", [f"{one.state}, step {one.step:,} of {one.steps:,}" for one in found]))
    rows.append(row("best bits per byte", [_best(one) for one in found]))
    rows.append(row("tokens/s", [_number(one.tokens_per_s, 0) for one in found]))
    columns = (Column(""), *(Column(_shown(one.folder)) for one in found))
    notes = ("Recipes' keys that differ; losses are means over the steps around, for steps that all have.",)
    return Table(f"{len(found)} runs beside each other", columns, tuple(rows), notes).text()


def _best(one: Summary) -> str:
    if one.best_bits_per_byte is None:
        return "-"
    return f"{one.best_bits_per_byte:.4f} at step {one.best_step:,}"
