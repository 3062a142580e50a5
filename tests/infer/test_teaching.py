"""Training and generation of real models, against transformers' and against the model asked otherwise."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints import Checkpoint, random_model
from openbook.infer.sample import RequestError
from openbook.infer.teaching import book_of, cache_savings, generated, teacher_forced
from openbook.ledger import Workload
from openbook.model import Decoder
from openbook.native import NativeDecoder, NativeUnavailableError
from openbook.trace.hf import load_transformers
from openbook.weights.load import load_decoder
from variants import VARIANTS, noisy_decoder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """One tiny random model in both programs."""

    @cache
    def make(family: str) -> Checkpoint:
        folder = tmp_path_factory.mktemp(family)
        random_model(family).save_pretrained(folder)
        return Checkpoint(load_decoder(folder), load_transformers(folder), folder)

    return make


def ids_of(checkpoint: Checkpoint) -> list[int]:
    return checkpoint.ids[0].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_every_loss_is_the_one_that_transformers_finds(family: str, checkpoint: Callable[[str], Checkpoint]):
    both = checkpoint(family)
    ids = ids_of(both)
    lesson = teacher_forced(both.ours, ids)
    with torch.no_grad():
        logits = both.theirs(torch.tensor([ids])).logits[0, :-1].float()
        mean = both.theirs(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    assert [row.loss for row in lesson.rows] == pytest.approx(losses.tolist(), abs=1e-5)
    assert lesson.loss == pytest.approx(mean.item(), abs=1e-5)
    probabilities = logits.softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert [row.probability for row in lesson.rows] == pytest.approx(probabilities.tolist(), abs=1e-6)
    order = logits.argsort(-1, descending=True)
    for n, row in enumerate(lesson.rows):
        assert (row.position, row.input, row.label) == (n, ids[n], ids[n + 1])
        assert order[n, row.rank - 1] == row.label
        assert order[n, 0] == row.likeliest


def test_the_rows_do_not_depend_on_how_many_the_head_sees_at_once(checkpoint: Callable[[str], Checkpoint]):
    both = checkpoint("llama")
    whole = teacher_forced(both.ours, ids_of(both))
    parts = teacher_forced(both.ours, ids_of(both), budget=3 * 4 * both.ours.spec.vocab_size)
    assert [row.loss for row in parts.rows] == pytest.approx([row.loss for row in whole.rows], abs=1e-5)
    assert [row.rank for row in parts.rows] == [row.rank for row in whole.rows]


def test_a_row_sees_nothing_after_itself(checkpoint: Callable[[str], Checkpoint]):
    both = checkpoint("llama")
    ids = ids_of(both)
    whole, short = teacher_forced(both.ours, ids), teacher_forced(both.ours, ids[:7])
    assert [row.loss for row in short.rows] == pytest.approx([row.loss for row in whole.rows[:6]], abs=1e-5)


@pytest.mark.parametrize("variant", ["llama", "windows", "latent", "experts"])
def test_generation_takes_what_the_whole_text_would_give(variant: str):
    """Each step against a pass over everything before it, without a cache."""
    decoder = noisy_decoder(VARIANTS[variant])
    prompt = [3, 1, 4, 15, 9]
    steps = generated(decoder, prompt, 6)
    text = list(prompt)
    for n, step in enumerate(steps):
        with torch.no_grad():
            probabilities = decoder(torch.tensor([text]))[0, -1].float().softmax(-1)
        assert step.id == probabilities.argmax()
        assert step.probability == pytest.approx(probabilities.max().item(), abs=1e-5)
        assert step.given == (tuple(prompt) if n == 0 else (text[-1],))
        text.append(step.id)
    book = book_of(decoder)
    assert sum(step.cost.flops for step in steps) == book.generation_flops(len(prompt), 6)
    assert steps[-1].cost.kv_bytes == book.kv_bytes(1, len(text) - 1)


def test_generation_ends_at_a_stop_token():
    decoder = noisy_decoder(VARIANTS["llama"])
    free = generated(decoder, [3, 1, 4], 6)
    stop = free[2].id
    stopped = generated(decoder, [3, 1, 4], 6, stop_ids=[stop])
    first = [step.id for step in free].index(stop)
    assert [step.id for step in stopped] == [step.id for step in free[: first + 1]]


def test_native_steps_give_the_same_rows_and_tokens():
    decoder = noisy_decoder(VARIANTS["llama"])
    plain = teacher_forced(decoder, range(12)), generated(decoder, [3, 1, 4], 6)
    try:
        engine = NativeDecoder(decoder)
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    native = teacher_forced(engine, range(12)), generated(engine, [3, 1, 4], 6)
    assert [row.loss for row in native[0].rows] == pytest.approx([r.loss for r in plain[0].rows], abs=1e-5)
    assert [step.id for step in native[1]] == [step.id for step in plain[1]]


class Watched:
    """An engine that notes what it is asked for: tokens that go in, and how many the cache held before."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.spec, self.embed = decoder, decoder.spec, decoder.embed
        self.calls: list[tuple[int, int | None]] = []

    def __call__(
        self, ids: Tensor, positions: Any = None, cache: Any = None, last_only: bool = False
    ) -> Tensor:
        self.calls.append((ids.shape[1], None if cache is None else cache.length))
        return self.decoder(ids, positions, cache, last_only)


@pytest.mark.parametrize("variant", ["llama", "windows"])
def test_what_is_measured_is_the_token_after_just_that_length(variant: str):
    """The windows' rings cannot be taken back, so there the text is computed again before each step."""
    engine: Any = Watched(noisy_decoder(VARIANTS[variant]))
    (saving,) = cache_savings(engine, [23], repeats=2)
    assert [call for call in engine.calls if call[1] is None] == [(23, None)] * 3
    with_cache = [call for call in engine.calls if call[0] == 1]
    assert with_cache == [(1, 22)] * 3
    fills = [call for call in engine.calls if call not in [(23, None), (1, 22)]]
    assert fills == [(22, 0)] * (3 if variant == "windows" else 1)
    assert saving.measured is not None
    assert saving.measured.seconds > 0


def test_what_is_predicted_needs_no_clock():
    decoder = noisy_decoder(VARIANTS["llama"])
    one, short, long = cache_savings(decoder, [1, 8, 40], longest=0)
    assert one.measured is short.measured is long.measured is None
    assert (one.ratio, one.flops) == (1, book_of(decoder).totals(Workload("prefill", new=1)).flops)
    assert 1 < short.ratio < long.ratio < 40


@pytest.mark.parametrize("ids", [[], [3], [3, 10**9], list(range(100)) * 3])
def test_texts_that_make_no_lesson_are_refused(ids: list[int]):
    decoder = noisy_decoder(VARIANTS["llama"])
    with pytest.raises(RequestError, match="text"):
        teacher_forced(decoder, ids)


def test_lengths_beyond_the_context_are_refused():
    decoder = noisy_decoder(VARIANTS["llama"])
    with pytest.raises(RequestError, match=r"lengths: must be from 1 to"):
        cache_savings(decoder, [decoder.spec.max_positions + 1])
