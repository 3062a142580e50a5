"""The benchmark of training: both sides take the same step, and what is derived from the figures."""

import pytest

from openbook.bench_train import LR, Shape, TrainResult, bench_train
from openbook.ledger import Workload, ledger
from openbook.spec.hf import from_config
from openbook.train.pack import IGNORED

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "max_position_embeddings": 160,
}  # fmt: skip
SPEC, SHAPE = from_config(CONFIG), Shape(3, 150)


def test_both_sides_have_the_same_loss_and_their_steps_are_timed_in_turns():
    ours, theirs = bench_train(SPEC, SHAPE, repetitions=2, against_hf=True, memory=False)
    assert (ours.way, theirs.way) == ("openbook", "hf")
    assert ours.first_loss == pytest.approx(theirs.first_loss, rel=1e-6)
    assert len(ours.samples) == len(theirs.samples) == 2
    assert (ours.ratio, ours.peak) == (1.0, None)
    assert theirs.ratio is not None
    assert min(b / a for a, b in zip(ours.samples, theirs.samples, strict=True)) <= theirs.ratio
    assert ours.flops == ledger(SPEC).totals(Workload("train", batch=3, new=150)).flops


def test_a_rows_last_token_has_nothing_to_predict():
    batch = SHAPE.batch(300)
    assert (batch.labels[:, -1] == IGNORED).all()
    assert (batch.labels[:, :-1] == batch.ids[:, 1:]).all()


def test_figures_by_hand():
    """1,024 tokens in 2 s; 6e9 FLOPs in 2 s, where a product does 1e10 a second."""
    result = TrainResult("openbook", Shape(2, 512), [3.0, 2.0, 1.0], 5.0, 6 * 10**9, 1e10)
    assert (result.seconds, result.tokens_per_s, result.mfu) == (2.0, 512.0, 0.3)
    assert 0 < LR < 1
