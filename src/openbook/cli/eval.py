"""`openbook eval`: how well a model predicts a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from openbook.cli import terminal
from openbook.cli.errors import UsageError
from openbook.cli.options import Dtype, Force, Json, Quiet, Threads, Verbose, Weights

if TYPE_CHECKING:
    from openbook.train.score import Score


def run(
    model: Weights,
    text: Annotated[
        str,
        typer.Argument(
            help="A text, .jsonl or .parquet file, a folder of them, a dataset's folder, or stdlib.",
            show_default=False,
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(
            "--ctx-size", "-c", min=1, help="Tokens in a row.", show_default="1024, or what the model has"
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens from the start of a row to that of the next: fewer than in a row let each token see "
            "more of what came before it, and take longer.",
            show_default="the tokens in a row",
        ),
    ] = None,
    split: Annotated[Literal["train", "heldout"], typer.Option(help="Of a dataset.")] = "heldout",
    dtype: Dtype = None,
    threads: Threads = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Nats per token, bits per byte and perplexity of a text under a model."""
    from openbook.cli.loading import source_with_weights

    source = source_with_weights(model)
    if context is not None and context > source.spec.max_positions:
        raise UsageError(f"--ctx-size {context}: the model has {source.spec.max_positions:,} positions")
    import torch

    from openbook.train.score import default_context, score
    from openbook.weights.load import load_decoder

    context = context or default_context(source.spec)
    if stride is not None and stride > context:
        raise UsageError(f"--stride {stride}: rows have {context:,} tokens, and some would be left out")
    if threads is not None:
        torch.set_num_threads(threads)
    with terminal.Progress() as progress:
        decoder = load_decoder(source, dtype, force=force, progress=progress)
        found = score(decoder, source, text, context, stride, split, progress=progress)
    computed = str(decoder.embed.weight.dtype).removeprefix("torch.")
    if json:
        terminal.write_json("eval", {"model": model, "text": text, "dtype": computed, **_plain(found)})
    else:
        print(_told(Path(model).name, found, computed), end="")


def _plain(score: Score) -> dict[str, object]:
    found = score.found
    return {
        "nats_per_token": found.nats_per_token,
        "bits_per_byte": found.bits_per_byte,
        "perplexity": math.exp(found.nats_per_token) if found.nats_per_token < _LARGEST else None,
        "labels": found.labels,
        "bytes": found.bytes,
        "split": score.split,
        "documents": score.documents,
        "tokens": score.tokens,
        "context": score.context,
        "stride": score.stride,
        "rows": score.rows,
    }


_LARGEST = 700
"""Of an exponent, whose power of e is a number of fp64 and of JSON."""


def _told(model: str, score: Score, dtype: str) -> str:
    from openbook.files.errors import printable

    about, found = _plain(score), score.found
    perplexity = about["perplexity"]
    shown = f"{perplexity:,.2f}" if perplexity is not None else f"e^{found.nats_per_token:,.0f}"
    seen = "each begins without what came before it"
    if score.stride < score.context:
        seen = f"a token is predicted from at least {score.context - score.stride:,}, or all of its document"
    part = "" if score.split == "all" else f" ({score.split})"
    return (
        f"{model} on {printable(score.text)}{part}, in {dtype}\n"
        f"  {found.nats_per_token:.4f} nats per token   perplexity {shown}\n"
        f"  {found.bits_per_byte:.4f} bits per byte\n"
        f"{score.documents:,} document{'s' * (score.documents != 1)}, {found.labels:,} of {score.tokens:,} "
        f"tokens predicted, which stand for {found.bytes:,} bytes;\n"
        f"{score.rows:,} rows of {score.context:,} tokens, stride {score.stride:,}: {seen}.\n"
    )
