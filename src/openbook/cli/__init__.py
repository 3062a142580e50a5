"""The command line. One thin file per verb; what a verb needs is imported inside it, not here.

Results go to stdout, everything else to stderr. Exit codes are in `openbook.cli.errors`.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import openbook
from openbook.cli import (
    bench,
    chat,
    convert,
    data,
    demo,
    diff,
    errors,
    explore,
    flow,
    generate,
    ledger,
    models,
    runs,
    show,
    tokenize,
    trace,
    train,
    verify,
)
from openbook.cli import eval as evaluate

_LOOK, _RUN = "Open the books", "Run the model"

app = typer.Typer(
    name="openbook",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"openbook {openbook.__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Decoder-only Transformers whose books are open: the exact ledger, and the model that agrees with it.

    MODEL is a preset (gpt3-175b), a fetched model (smollm2-135m), a folder, a config.json or a .gguf file.
    """


app.command("demo", rich_help_panel=_RUN)(demo.run)
app.command("generate", rich_help_panel=_RUN)(generate.run)
app.command("chat", rich_help_panel=_RUN)(chat.run)
app.command("bench", rich_help_panel=_RUN)(bench.run)
app.command("show", rich_help_panel=_LOOK)(show.run)
app.command("ledger", rich_help_panel=_LOOK)(ledger.run)
app.command("verify", rich_help_panel=_LOOK)(verify.run)
app.command("tokenize", rich_help_panel=_LOOK)(tokenize.run)
app.command("flow", rich_help_panel=_LOOK)(flow.run)
app.command("trace", rich_help_panel=_LOOK)(trace.run)
app.command("diff", rich_help_panel=_RUN)(diff.run)
app.command("explore", rich_help_panel=_LOOK)(explore.run)
app.add_typer(models.app, name="models", rich_help_panel="Models")
app.command("convert", rich_help_panel="Models")(convert.run)
app.add_typer(data.app, name="data", rich_help_panel="Train")
app.command("train", rich_help_panel="Train")(train.run)
app.command("runs", rich_help_panel="Train")(runs.run)
app.command("eval", rich_help_panel="Train")(evaluate.run)


def main() -> None:
    """The entry point: runs the verb, and turns any error into one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except BaseException as error:
        code = errors.report(error)
    sys.exit(code if isinstance(code, int) else 0)
