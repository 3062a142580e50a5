"""Evaluation: every token counts the same, and bytes are those of the text."""

import math
from pathlib import Path

import pytest
import torch

from openbook.model import Decoder, init_weights
from openbook.train.corpus import corpus_of
from openbook.train.data import Dataset, build
from openbook.train.evaluate import Evaluation, evaluate
from variants import block, model, noisy_decoder

TEXTS = {"a.txt": "naïve café, 世界!\n", "b.txt": "a b c d\n" * 20, "c.txt": "x"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, "utf-8")
    made: Path = tmp_path_factory.mktemp("data") / "data"
    return build(made, corpus_of([folder]), tokenizer=290, held_out=0.0)


def test_the_loss_does_not_depend_on_rows_side_by_side(dataset: Dataset):
    decoder = noisy_decoder(model(block(), vocab_size=dataset.vocab_size))
    packed = dataset.pack("train", length=7)
    found = [evaluate(decoder, packed, dataset.byte_lengths, rows) for rows in (1, 5, 100)]
    assert len({(one.labels, one.bytes) for one in found}) == 1
    assert [one.nats for one in found] == pytest.approx([found[0].nats] * 3, rel=1e-6)


def test_every_byte_of_the_text_is_predicted_once(dataset: Dataset):
    decoder = init_weights(Decoder(model(block(), vocab_size=dataset.vocab_size)))
    with torch.no_grad():
        decoder.head.weight.zero_()  # all tokens equally likely: ln V each
    found = evaluate(decoder, dataset.pack("train", length=11), dataset.byte_lengths)
    assert found.bytes == sum(len(text.encode()) for text in TEXTS.values())
    assert found.labels == dataset.splits["train"].labels
    assert found.nats_per_token == pytest.approx(math.log(dataset.vocab_size), rel=1e-6)
    bits = found.labels * math.log2(dataset.vocab_size)
    assert found.bits_per_byte == pytest.approx(bits / found.bytes, rel=1e-6)


def test_a_mean_weighs_tokens_and_nothing_has_no_mean():
    assert Evaluation(100 * 2.0 + 10 * 4.0, 110, 200).nats_per_token == pytest.approx(2.181818, rel=1e-6)
    assert math.isnan(Evaluation(0.0, 0, 0).nats_per_token)
    assert math.isnan(Evaluation(0.0, 0, 0).bits_per_byte)
