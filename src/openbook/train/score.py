"""How well any model predicts a text, whatever made it: the same figures that a run reports of itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openbook.model import Decoder
from openbook.sources import Source
from openbook.spec.model import ModelSpec
from openbook.train import data
from openbook.train.corpus import corpus_of
from openbook.train.evaluate import Evaluation, evaluate
from openbook.train.start import DEFAULT_HELD_OUT, check_same_tokens


def default_context(spec: ModelSpec) -> int:
    """The tokens of a row, where none is asked for: 1024 of models that could take more."""
    return min(spec.max_positions, 1024)


@dataclass(frozen=True)
class Score:
    """`found` over `rows` rows of `context` tokens, which begin `stride` tokens apart. `documents` and
    `tokens` are those of the text."""

    found: Evaluation
    text: str
    split: str
    documents: int
    tokens: int
    context: int
    stride: int
    rows: int


def score(
    decoder: Decoder,
    source: Source,
    text: str,
    context: int | None = None,
    stride: int | None = None,
    split: str = "heldout",
    bf16: bool = False,
    progress: data.Progress | None = None,
) -> Score:
    """The loss of a text file, of a folder or other source of texts, of a dataset, or of "stdlib".

    Of a dataset its `split` is taken, of the embedded corpus the part that a run holds out, of anything else
    all. Rows of `context` tokens begin without what came before them. With a `stride` of fewer they overlap:
    each token is still predicted once, from at least `context` - `stride` tokens, or all of its document.

    Raises `NotFoundError` for a model without a tokenizer, `RecipeError` for a dataset with other tokens than
    the model's, `ValueError` for a stride beyond the context, and what reading the text raises.
    """
    context = context or default_context(decoder.spec)
    with _dataset(source, text, progress) as (dataset, whole):
        chosen = "train" if whole else split
        packed = dataset.pack(chosen, context, stride=stride)
        found = evaluate(decoder, packed, dataset.byte_lengths, rows=max(1, 4096 // context), bf16=bf16)
        about = dataset.splits[chosen]
        return Score(
            found,
            dataset.source,
            "all" if whole else chosen,
            about.documents,
            about.tokens,
            context,
            packed.stride,
            packed.n_rows,
        )


@contextmanager
def _dataset(
    source: Source, text: str, progress: data.Progress | None
) -> Iterator[tuple[data.Dataset, bool]]:
    """The dataset, and whether all of it is to be taken: one that is there, or one made for the moment."""
    if (Path(text) / data.DESCRIPTION).is_file():
        dataset = data.open_dataset(text)
        check_same_tokens(dataset, source)
        yield dataset, False
        return
    held_out = DEFAULT_HELD_OUT if text == "stdlib" else 0.0
    with tempfile.TemporaryDirectory() as scratch:
        yield data.build(Path(scratch) / "data", corpus_of([text]), source, held_out, progress), not held_out
