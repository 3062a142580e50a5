"""`openbook data build|show`: texts and chats become a dataset, and a dataset is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from openbook.cli import terminal
from openbook.cli.errors import UsageError
from openbook.cli.options import Json, Quiet, Verbose

if TYPE_CHECKING:
    from openbook.train.data import Dataset
    from openbook.train.pack import Batch

app = typer.Typer(help="Make datasets to train on, and look into them.", no_args_is_help=True)

DEFAULT_VOCAB = 4096


@app.command()
def build(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Text, .jsonl and .parquet files or folders; or stdlib, the corpus every Python carries.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="The new folder of the dataset.", show_default=False)
    ],
    vocab: Annotated[
        int | None,
        typer.Option(
            min=257, help="Train a byte-level BPE of this many tokens.", show_default=f"{DEFAULT_VOCAB}"
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Take this model's tokenizer instead.", show_default=False),
    ] = None,
    held_out: Annotated[
        float, typer.Option(min=0, max=0.9, help="About this part of the documents is kept for evaluation.")
    ] = 0.07,
    field: Annotated[str, typer.Option(help="The field of a line or column with the text.")] = "text",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Turns texts and chats into a dataset. Lines with "messages" are chats: only answers are learned."""
    if vocab is not None and tokenizer is not None:
        raise UsageError("--vocab trains a tokenizer and --tokenizer takes one: give one of them")
    from openbook.cli.loading import source_of
    from openbook.train import data
    from openbook.train.corpus import corpus_of

    taken = source_of(tokenizer) if tokenizer is not None else vocab or DEFAULT_VOCAB
    with terminal.Progress() as progress:
        made = data.build(output, corpus_of(sources, field), taken, held_out, progress)
    if json:
        terminal.write_json("data", _plain(made))
    else:
        print(_counts(made), end="")
        terminal.note(f"Look into it: openbook data show {output}")


@app.command()
def show(
    folder: Annotated[str, typer.Argument(help="A dataset's folder.", show_default=False)],
    split: Annotated[
        Literal["train", "heldout"], typer.Option(help="Of which part to show a row.")
    ] = "train",
    sample: Annotated[
        int, typer.Option("--sample", "-s", min=0, help="Which sample of the training order.")
    ] = 0,
    length: Annotated[int, typer.Option("--length", "-l", min=1, help="Tokens in a row.")] = 128,
    whole: Annotated[
        bool, typer.Option("--whole", help="End a row before a document that does not fit, as for chats.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """What a dataset holds, and one row of it as training sees it: documents, and what is learned."""
    from openbook.train.data import open_dataset

    data = open_dataset(folder)
    packed = data.pack(split, length, seed, whole)
    i = packed.row_of(sample)
    row = packed.row(i)
    segments = list(_segments(data, row))
    if json:
        about = {"split": split, "sample": sample, "row": i, "rows": packed.n_rows, "length": length}
        about |= {"labels": row.n_labels, "segments": segments}
        terminal.write_json("data", {**_plain(data), "row": about})
        return
    print(_counts(data))
    size = sum(len(segment["ids"]) for segment in segments)
    print(
        f"sample {sample:,} of {split}: row {i:,} of {packed.n_rows:,}, {size} tokens, {row.n_labels} labels"
    )
    for line in _lines(segments):
        print(line)


# --- what it holds ------------------------------------------------------------------------------


def _counts(data: Dataset) -> str:
    from openbook.files.errors import printable
    from openbook.ledger.table import Column, Table

    columns = [Column("split")]
    columns += [Column(title, "count") for title in ("documents", "bytes", "tokens", "labels", "bytes/token")]
    rows = [
        (name, s.documents, s.bytes, s.tokens, s.labels, f"{s.bytes / max(s.tokens, 1):.2f}")
        for name, s in data.splits.items()
    ]
    notes = (
        "labels: the tokens to be predicted; not the first of a document, nor what the user of a chat says.",
    )
    title = f"{data.folder}: {printable(data.source)}, a vocabulary of {data.vocab_size:,} tokens"
    return Table(title, tuple(columns), tuple(rows), notes).text()


def _plain(data: Dataset) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "folder": str(data.folder),
        "source": data.source,
        "vocab_size": data.vocab_size,
        "splits": {name: asdict(split) for name, split in data.splits.items()},
    }


# --- one row ------------------------------------------------------------------------------------


def _segments(data: Dataset, row: Batch) -> Iterator[dict[str, Any]]:
    """The runs of tokens of one document that are learned, or are not."""
    ids, positions, labels, documents = (array[0].tolist() for array in row)
    learned = [False, *(label >= 0 for label in labels[:-1])]
    start = 0
    for t in range(1, len(ids) + 1):
        here = (documents[t], learned[t]) if t < len(ids) else None
        if here != (documents[start], learned[start]):
            if documents[start] >= 0:
                yield {
                    "document": documents[start],
                    "position": positions[start],
                    "learned": learned[start],
                    "ids": ids[start:t],
                    "text": data.tokenizer.decode(ids[start:t], skip_special=False, start=False),
                }
            start = t


def _lines(segments: list[dict[str, Any]]) -> Iterator[str]:
    """The text behind a margin that says whether it is learned or only given; a title for each document."""
    document = None
    for segment in segments:
        if segment["document"] != document:
            document = segment["document"]
            yield terminal.paint(f"document {document:,}", "bold")
        word = "learned" if segment["learned"] else "given"
        for line in segment["text"].split("\n"):
            text = _visible(line)
            yield f"  {word:>7} │ {text if segment['learned'] else terminal.paint(text, 'dim')}"
            word = ""


def _visible(line: str) -> str:
    """A line of unknown text that is safe on a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line.expandtabs(4))
