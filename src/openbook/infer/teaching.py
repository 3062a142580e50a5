"""Training and generation, side by side, on a real model.

Training (teacher forcing): one pass over the text, and every row is asked for the token that really comes
next. Generation: the prompt goes in once, then every drawn token goes in by itself, and the cache holds the
keys and values of those before.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from openbook.infer.generate import Stats, cache_for, checked_prompt, generate, prefill, tokens_of, weight_of
from openbook.infer.sample import RequestError
from openbook.ledger import Ledger
from openbook.ledger.teaching import Measured, PassCost, Saving, StepCost, step_costs, training_cost
from openbook.ledger.teaching import cache_savings as predicted_savings
from openbook.model import Decoder
from openbook.native import NativeDecoder

Engine = Decoder | NativeDecoder

BUDGET = 64 * 2**20
"""Bytes of logits that are held at once, in fp32."""


def book_of(engine: Engine) -> Ledger:
    """The ledger of a running model, in the dtype of its weights."""
    return Ledger(engine.spec, str(weight_of(engine).dtype))


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One input and what it is to be followed by. `position` is the input's; it sees those up to itself.

    `rank` is the label's place among all tokens, 1 for the likeliest, which is `likeliest`. `loss` is
    -ln(probability), in nats.
    """

    position: int
    input: int
    label: int
    probability: float
    loss: float
    rank: int
    likeliest: int


@dataclass(frozen=True)
class Lesson:
    """A text as training sees it: its rows, and what the pass costs with its way back."""

    rows: tuple[Row, ...]
    cost: PassCost

    @property
    def loss(self) -> float:
        """The mean over the labels, in nats."""
        return math.fsum(row.loss for row in self.rows) / len(self.rows)


@torch.inference_mode()
def teacher_forced(engine: Engine, ids: Sequence[int], budget: int = BUDGET) -> Lesson:
    """Every label of the text from one forward pass: row n has input n and label n + 1.

    The head is applied to so many rows at a time that their logits take at most `budget` bytes. Raises
    `RequestError` for a text of fewer than two tokens, or longer than the model's context.
    """
    decoder = engine.decoder if isinstance(engine, NativeDecoder) else engine
    ids = checked_prompt(ids, decoder.spec.vocab_size, "text")
    if not 2 <= len(ids) <= decoder.spec.max_positions + 1:
        context = decoder.spec.max_positions
        raise RequestError("text", f"must have from 2 to {context + 1:,} tokens, found {len(ids):,}")
    hidden = decoder.hidden(torch.tensor([ids[:-1]], device=decoder.embed.weight.device))[0]
    labels = torch.tensor(ids[1:], device=hidden.device)
    each = max(1, budget // (4 * decoder.spec.vocab_size))
    rows: list[Row] = []
    for part, wanted in zip(hidden.split(each), labels.split(each), strict=True):
        rows += _rows(decoder.head(part[None])[0], wanted, len(rows), ids)
    return Lesson(tuple(rows), training_cost(book_of(engine), len(rows)))


def _rows(logits: Float[Tensor, "rows V"], labels: Tensor, first: int, ids: Sequence[int]) -> Iterable[Row]:
    logprobs = logits.float().log_softmax(dim=-1)
    found = logprobs.gather(1, labels[:, None])
    ranks = (logprobs > found).sum(dim=-1) + 1
    columns = (found[:, 0].tolist(), ranks.tolist(), logprobs.argmax(dim=-1).tolist())
    for n, (logprob, rank, likeliest) in enumerate(zip(*columns, strict=True), start=first):
        yield Row(n, ids[n], ids[n + 1], math.exp(logprob), -logprob, rank, likeliest)


# --- generation -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """One step: `given` went in (the prompt, then one token at a time), `id` was the likeliest after it.

    `seconds` is what the step took here, with the cache.
    """

    given: tuple[int, ...]
    id: int
    probability: float
    cost: StepCost
    seconds: float


def generated(
    engine: Engine,
    prompt: Sequence[int],
    n: int,
    stop_ids: Collection[int] = (),
    vocab_limit: int | None = None,
) -> list[Drawn]:
    """Continues the prompt greedily by `n` tokens, or up to one of `stop_ids`, or the end of the context.

    Raises `RequestError` for a prompt that is empty or leaves no room.
    """
    stats = Stats()
    tokens = generate(
        engine, prompt, max_tokens=n, stop_ids=stop_ids, vocab_limit=vocab_limit, logprobs=0, stats=stats
    )
    given, drawn, before = tuple(prompt), [], 0.0
    for token in tokens:
        seconds = stats.prefill_seconds + stats.decode_seconds
        drawn.append((given, token.id, math.exp(token.logprob or 0.0), seconds - before))
        given, before = (token.id,), seconds
    costs = step_costs(book_of(engine), len(prompt), len(drawn))
    return [
        Drawn(given, chosen, probability, cost, seconds)
        for (given, chosen, probability, seconds), cost in zip(drawn, costs, strict=True)
    ]


# --- the cache ------------------------------------------------------------------------------------


def cache_savings(
    engine: Engine,
    lengths: Iterable[int],
    longest: int = 512,
    repeats: int = 3,
    progress: Callable[[str], None] | None = None,
) -> list[Saving]:
    """What the cache saves at each length: predicted by the ledger and, up to `longest` tokens, measured.

    Measured is the token after a text of that length, in turns with and without a cache; its time
    is the median of `repeats`. Raises `RequestError` for a length beyond the context.
    """
    lengths = list(lengths)
    for length in lengths:
        if not 1 <= length <= engine.spec.max_positions:
            raise RequestError(
                "lengths", f"must be from 1 to {engine.spec.max_positions:,}, found {length:,}"
            )
    return [
        replace(saving, measured=_measured(engine, saving.length, repeats, progress))
        if saving.length <= longest
        else saving
        for saving in predicted_savings(book_of(engine), lengths)
    ]


@torch.inference_mode()
def _measured(engine: Engine, length: int, repeats: int, progress: Callable[[str], None] | None) -> Measured:
    if progress is not None:
        progress(f"measuring the token after {length:,}")
    device = weight_of(engine).device
    ids = torch.arange(length, device=device)[None] % tokens_of(engine, None)
    cache = cache_for(engine, 1, length)
    with_cache, without = [], []
    for _ in range(repeats + 1):  # the first one warms up
        cache.truncate(length - 1)
        if cache.length < length - 1:  # at first; and where a window's ring cannot go back
            prefill(engine, ids[:, cache.length : length - 1], cache, 512)
        with_cache.append(_seconds(lambda: engine(ids[:, -1:], cache=cache, last_only=True), device))
        without.append(_seconds(lambda: engine(ids, last_only=True), device))
    return Measured(statistics.median(with_cache[1:]), statistics.median(without[1:]))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
