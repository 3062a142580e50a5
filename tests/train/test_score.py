"""The score of a text under any model, against the model asked for one token after the other."""

import math

import pytest
import torch

from openbook import sources
from openbook.model import Decoder
from openbook.train.corpus import corpus_of
from openbook.train.data import Dataset, build
from openbook.train.score import default_context, score
from variants import VARIANTS, block, model, noisy_decoder

TEXTS = {"a.txt": "naïve café, 世界!\n" * 3, "b.txt": "a b c d\n" * 9, "c.txt": "x"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, "utf-8")
    return build(tmp_path_factory.mktemp("data") / "data", corpus_of([folder]), tokenizer=290, held_out=0.0)


@pytest.fixture(scope="module")
def decoder(dataset: Dataset) -> Decoder:
    return noisy_decoder(model(block(), block(), vocab_size=dataset.vocab_size))


@torch.no_grad()
def nats_one_by_one(decoder: Decoder, dataset: Dataset, context: int, stride: int) -> tuple[float, int]:
    """The loss of every token after the tokens of its own document in the first row that reaches it, and how
    many there are."""
    (shard,) = dataset.shards("train")
    nats, count = 0.0, 0
    for begin, end in zip(shard.starts[:-1].tolist(), shard.starts[1:].tolist(), strict=True):
        for place in range(begin + 1, end):
            row = 0
            while row + context < place:
                row += stride
            ids = torch.from_numpy(shard.tokens(max(begin, row), place + 1))
            nats -= decoder(ids[None, :-1])[0, -1].log_softmax(-1)[ids[-1]].item()
            count += 1
    return nats, count


@pytest.mark.parametrize(("context", "stride"), [(13, None), (13, 13), (13, 5), (13, 1), (8, 7), (64, 3)])
def test_each_token_is_predicted_once_from_the_row_that_reaches_it_first(
    dataset: Dataset, decoder: Decoder, context: int, stride: int | None
):
    found = score(decoder, sources.resolve(decoder.spec), str(dataset.folder), context, stride, split="train")
    nats, count = nats_one_by_one(decoder, dataset, context, stride or context)
    assert found.found.labels == count == dataset.splits["train"].labels
    assert found.found.bytes == sum(len(text.encode()) for text in TEXTS.values())
    assert found.found.nats == pytest.approx(nats, rel=1e-6)
    assert (found.context, found.stride) == (context, stride or context)
    after_the_first = found.tokens - 1 - context  # of one shard
    assert found.rows == 1 + max(0, math.ceil(after_the_first / found.stride))


def test_a_stride_beyond_the_row_would_leave_tokens_out(dataset: Dataset, decoder: Decoder):
    with pytest.raises(ValueError, match="a stride of 14 must be 1 to 13"):
        score(decoder, sources.resolve(decoder.spec), str(dataset.folder), 13, 14, split="train")


def test_a_row_has_what_the_model_has_but_at_most_1024():
    assert default_context(VARIANTS["llama"]) == 64
    assert default_context(VARIANTS["llama"].replace(max_positions=5000)) == 1024
