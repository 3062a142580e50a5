"""`openbook show`: the card of a model."""

from __future__ import annotations

import sys
import textwrap

from openbook.cli import terminal
from openbook.cli.options import Json, Model, Quiet, Verbose


def run(model: Model, json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """The card of a model: what its layers are, equal ones folded."""
    from openbook.cli.card import card
    from openbook.ledger import ledger
    from openbook.sources import resolve
    from openbook.spec.model import to_dict

    source = resolve(model)
    spec = source.spec
    params = ledger(spec).params
    if json:
        terminal.write_json("show", {"parameters": params.total, "spec": to_dict(spec)})
        return
    title = terminal.paint(spec.name or model, "bold")
    print(f"{title}: {params.total:,} parameters, {spec.n_layers} layers, context {spec.max_positions:,}")
    lines = list(card(spec))
    column = max(len(name) for name, _ in lines) + 2
    on_terminal = sys.stdout.isatty()  # a pipe's reader wants one line for one part
    for name, text in lines:
        first, *more = textwrap.wrap(text, terminal.width() - column - 4 if on_terminal else len(text))
        print(f"  {name:<{column}}{first}")
        for line in more:
            print(" " * (column + 4) + line)
