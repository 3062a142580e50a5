"""The loop: exact accumulation, what it learns, what it skips, and that a stop leaves no trace."""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from openbook.ledger import ledger
from openbook.model import Decoder, init_weights
from openbook.spec.model import ModelSpec
from openbook.train.checkpoint import CheckpointError, load_latest, save
from openbook.train.loop import DivergedError, StopRequest, Trainer, accumulate
from openbook.train.optim import Optimizer, cosine, parameter_groups
from openbook.train.pack import IGNORED, Batch
from variants import VARIANTS, block, model, noisy_decoder

T = 19


def rows_of(documents: list[list[list[int]]], length: int = T) -> Batch:
    """Rows of documents, each given as its tokens; a document's last token is a label only."""
    rows = []
    for row in documents:
        ids, positions, labels, numbers = [], [], [], []
        for number, tokens in enumerate(row):
            ids += tokens[:-1]
            labels += tokens[1:]
            positions += range(len(tokens) - 1)
            numbers += [number] * (len(tokens) - 1)
        pad = length - len(ids)
        rows.append((ids + [0] * pad, positions + [-1] * pad, labels + [IGNORED] * pad, numbers + [-1] * pad))
    return Batch(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


class Ragged:
    """Rows of random documents of random lengths; sample i is a function of i. Without labels where `empty`
    says so."""

    def __init__(self, vocab_size: int, empty: Callable[[int], bool] = lambda i: False) -> None:
        self.vocab_size, self.empty = vocab_size, empty

    def batch(self, first: int, count: int) -> Batch:
        rows = []
        for i in range(first, first + count):
            numbers = np.random.default_rng(i)
            lengths = numbers.integers(2, 8, numbers.integers(1, 3))
            rows.append([numbers.integers(0, self.vocab_size, n).tolist() for n in lengths])
        batch = rows_of(rows)
        for i in range(count):
            if self.empty(first + i):
                batch.labels[i] = IGNORED
        return batch


class Counting:
    """Each token is the one before plus 1, modulo the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def batch(self, first: int, count: int) -> Batch:
        starts = range(first, first + count)
        return rows_of([[[(7 * start + t) % self.vocab_size for t in range(T + 1)]] for start in starts])


class Uniform:
    """Tokens that nothing predicts."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def batch(self, first: int, count: int) -> Batch:
        draw = np.random.default_rng(first).integers(0, self.vocab_size, (count, T + 1))
        return rows_of([[row] for row in draw.tolist()])


SMALL = model(block(), block(), vocab_size=23)


def trainer(spec: ModelSpec, samples: object, rows: int = 4, lr: float = 3e-3, **changes) -> Trainer:
    decoder = init_weights(Decoder(spec), seed=3)
    optimizer = Optimizer(
        parameter_groups(decoder, ledger(spec).tensors), lr, muon=changes.pop("muon", False)
    )
    schedule = changes.pop("schedule", lambda step: cosine(step, total=100, warmup=4))
    return Trainer(decoder, optimizer, samples, schedule, rows, **changes)  # type: ignore[arg-type]


def state(run: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in run.tensors().items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# --- accumulation -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "windows", "experts", "latent"])
def test_parts_of_any_size_give_the_loss_and_gradients_of_the_whole(name: str):
    """32 ragged rows at once, 2 at a time and one at a time, to 1e-6 of each gradient's norm."""
    decoder = noisy_decoder(VARIANTS[name]).train()
    batch = Ragged(decoder.spec.vocab_size, empty=lambda i: i % 9 == 4).batch(0, 32)
    losses, gradients = [], []
    for micro_rows in (32, 2, 1):
        decoder.zero_grad()
        losses.append(accumulate(decoder, batch, micro_rows))
        gradients.append({n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None})
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-6)
        assert gradient.keys() == gradients[0].keys()
        for parameter, whole in gradients[0].items():
            assert (gradient[parameter] - whole).norm() <= 1e-6 * whole.norm(), parameter


def test_the_loss_is_the_mean_over_labels_and_not_over_parts():
    """Rows of 1 and 3 labels: (1 · a + 3 · b) / 4, where the mean of means would be (a + b) / 2."""
    decoder = noisy_decoder(SMALL)
    short, long = rows_of([[[1, 5]]]), rows_of([[[2, 9, 4, 7]]])
    both = Batch(*(np.concatenate(pair) for pair in zip(short, long, strict=True)))
    a, b = accumulate(decoder, short, 1), accumulate(decoder, long, 1)
    assert abs(a - b) > 0.1
    assert accumulate(decoder, both, 1) == pytest.approx((a + 3 * b) / 4, rel=1e-6)


def test_packed_documents_have_the_gradients_of_separate_rows():
    decoder = noisy_decoder(VARIANTS["windows"])
    documents = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]
    found = []
    for batch in (rows_of([documents]), rows_of([[document] for document in documents])):
        decoder.zero_grad()
        loss = accumulate(decoder, batch, 8)
        found.append((loss, {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}))
    (packed, packed_gradients), (separate, separate_gradients) = found
    assert packed == pytest.approx(separate, rel=1e-6)
    for name, gradient in packed_gradients.items():
        torch.testing.assert_close(gradient, separate_gradients[name], atol=1e-5, rtol=0)


# --- what is learned ----------------------------------------------------------------------------


def test_counting_is_learned_and_5_comes_after_4():
    """A label that is shifted twice would teach 6."""
    run = trainer(SMALL, Counting(23), rows=8, lr=1e-2)
    losses = [run.update().loss for _ in range(60)]
    assert losses[0] == pytest.approx(math.log(23), abs=0.2)
    assert losses[-1] < 0.05
    with torch.no_grad():
        assert run.decoder(torch.tensor([[1, 2, 3, 4]]))[0, -1].argmax() == 5


def test_what_cannot_be_predicted_ends_at_the_logarithm_of_the_vocabulary():
    run = trainer(SMALL, Uniform(23), rows=32, lr=1e-3)
    losses = [run.update().loss for _ in range(60)]
    assert np.mean(losses[-10:]) == pytest.approx(math.log(23), abs=0.03)


def test_bf16_products_learn_too_and_weights_stay_fp32():
    run = trainer(SMALL, Counting(23), rows=8, lr=1e-2, bf16=True)
    losses = [run.update().loss for _ in range(60)]
    assert losses[-1] < 0.1
    assert {tensor.dtype for tensor in run.tensors().values()} == {torch.float32}


def test_the_first_update_is_not_lost_and_rates_follow_the_schedule():
    run = trainer(
        SMALL, Ragged(23), lr=6e-4, schedule=lambda step: cosine(step, total=8, warmup=3, minimum=0.1)
    )
    before = state(run)
    rates = [run.update().lr for _ in range(12)]
    assert rates[:4] == pytest.approx([1.5e-4, 3e-4, 4.5e-4, 6e-4])
    assert rates[8:] == pytest.approx([6e-5] * 4)
    assert not torch.equal(before["head.weight"], run.tensors()["head.weight"])


def test_the_rate_counts_steps_whatever_their_parts():
    rates = [[run.update().lr for _ in range(5)] for run in (
        trainer(SMALL, Ragged(23), rows=4, micro_rows=micro) for micro in (4, 1))]  # fmt: skip
    assert rates[0] == rates[1]


def test_gradients_are_clipped_to_their_common_norm():
    run = trainer(SMALL, Ragged(23), clip=0.01)
    assert run.update().grad_norm > 0.01
    norm = torch.stack([p.grad.norm() for p in run.decoder.parameters() if p.grad is not None]).norm()
    assert norm == pytest.approx(0.01, rel=1e-3)


# --- what is skipped ----------------------------------------------------------------------------


@pytest.mark.parametrize("muon", [False, True])
def test_a_batch_without_labels_changes_nothing(muon: bool):
    """Not even weight decay or momentum moves a bit; the step is counted."""
    run = trainer(SMALL, Ragged(23, empty=lambda i: i // 4 == 2), muon=muon)
    run.update()
    run.update()
    before = state(run)
    step = run.update()
    assert (step.number, step.skipped, step.loss, step.labels) == (3, "no label", 0, 0)
    assert_same_bits(before, state(run))
    assert run.update().skipped is None
    assert run.counts() == {"without_labels": 1, "nonfinite": 0}


class Spoiling:
    """An output of the last norm that is NaN while steps `bad` are taken."""

    def __init__(self, run_of: Callable[[], Trainer], bad: set[int]) -> None:
        self.run_of, self.bad = run_of, bad

    def __call__(self, module: object, inputs: object, output: Tensor) -> Tensor:
        return output * math.nan if self.run_of().step in self.bad else output


def test_steps_that_are_not_finite_are_skipped_and_counted():
    run = trainer(SMALL, Ragged(23))
    run.decoder.final_norm.register_forward_hook(Spoiling(lambda: run, {1, 2}))
    run.update()
    before = state(run)
    assert [run.update().skipped for _ in range(2)] == ["not finite"] * 2
    assert_same_bits(before, state(run))
    assert run.update().skipped is None
    assert run.nonfinite == 2


def test_too_many_of_them_end_the_run():
    run = trainer(SMALL, Ragged(23), max_nonfinite=2)
    run.decoder.final_norm.register_forward_hook(Spoiling(lambda: run, set(range(10))))
    run.update()
    run.update()
    with pytest.raises(DivergedError, match="3 of 3 steps"):
        run.update()


# --- going on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("muon", [False, True])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(muon: bool, tmp_path: Path):
    """Stopped after 1, 4 and 9 of 12 steps, each time with a new model from the checkpoint; one of the
    steps is empty."""

    def new() -> Trainer:
        return trainer(SMALL, Ragged(23, empty=lambda i: i // 4 == 5), muon=muon)

    unbroken = new()
    expected = [unbroken.update() for _ in range(12)]
    found = []
    for stop in (1, 4, 9, 12):
        run = new()
        checkpoint = load_latest(tmp_path / "run")
        if checkpoint is not None:
            run.restore(checkpoint)
        while run.step < stop:
            found.append(run.update())
        save(tmp_path / "run", run.step, run.tensors(), run.counts())
    assert found == expected
    assert_same_bits(state(unbroken), state(run))
    assert run.counts() == unbroken.counts() == {"without_labels": 1, "nonfinite": 0}


def test_the_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path):
    save(tmp_path / "run", 0, trainer(SMALL, Ragged(23)).tensors(), trainer(SMALL, Ragged(23)).counts())
    checkpoint = load_latest(tmp_path / "run")
    assert checkpoint is not None
    other = trainer(model(block(), vocab_size=29), Ragged(29))
    before = state(other)
    with pytest.raises(CheckpointError, match=r"embed.weight is \[23, 52\]"):
        other.restore(checkpoint)
    assert_same_bits(before, state(other))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_a_second_one_stops(number: signal.Signals):
    heard = []
    before = signal.signal(number, lambda *_: heard.append("usual"))
    try:
        with StopRequest() as stop:
            assert not stop.asked
            os.kill(os.getpid(), number)
            assert stop.asked == number
            assert not heard
            os.kill(os.getpid(), number)
            assert heard == ["usual"]
        os.kill(os.getpid(), number)
        assert heard == ["usual", "usual"]
    finally:
        signal.signal(number, before)
