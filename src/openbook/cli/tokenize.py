"""`openbook tokenize`: a text as the model sees it."""

from __future__ import annotations

from typing import Annotated

import typer

from openbook.cli import terminal
from openbook.cli.generate import read_prompt
from openbook.cli.options import Json, Prompt, Quiet, Verbose, Weights


def run(
    model: Weights,
    prompt: Prompt = None,
    ids: Annotated[bool, typer.Option("--ids", help="Only the ids, on one line.")] = False,
    special: Annotated[
        bool, typer.Option("--special", help="Control tokens written out in the text become tokens.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """The tokens of a text: each id, and the piece of text that it stands for."""
    from openbook.cli.loading import source_of
    from openbook.sources import NotFoundError
    from openbook.text import Tokenizer

    text = read_prompt(prompt)
    tokenizer = Tokenizer.from_source(source_of(model))
    if tokenizer is None:
        raise NotFoundError(f"{model} has no tokenizer: name a folder with tokenizer.json or a .gguf file")
    found = tokenizer.encode(text, special)
    pieces = tokenizer.pieces(found)
    if json:
        terminal.write_json("tokenize", {"text": text, "ids": found, "pieces": pieces})
    elif ids:
        print(*found)
    else:
        for token, piece in zip(found, pieces, strict=True):
            shown = piece if piece.isprintable() else repr(piece)[1:-1]
            print(f"{token:>8}  '{shown}'")
    terminal.note(f"{len(found):,} tokens, {len(text):,} characters")
