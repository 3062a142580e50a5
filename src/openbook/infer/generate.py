"""One sequence, token by token: prefill the prompt in chunks, then choose, yield, feed, and again."""

import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openbook.infer.cache import Cache
from openbook.infer.sample import RequestError, Sampler, SamplingParams, logprobs
from openbook.model import Decoder
from openbook.native import NativeDecoder

Finish = Literal["stop", "length", "context"]
"""Why an answer ended: a stop id came, `max_tokens` are there, or the context is full."""


@dataclass(frozen=True, slots=True)
class Token:
    """One new token, number `index` of the answer. `finish` is set on the last one; a stop id that ended
    the answer is yielded too.

    `logprob` and `top` [(id, logprob), ...] are the model's own, before any sampling parameter.
    """

    id: int
    index: int
    finish: Finish | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Stats:
    """What a generation did and how long it took, not counting what the caller did between tokens.

    `prompt_tokens` are all of the prompt's, of which `cached_tokens` were not computed again. Choosing
    the first token belongs to prefill; `decode_seconds` are those of the other `new_tokens`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish: Finish | None = None

    @property
    def prefill_rate(self) -> float:
        """Computed prompt tokens per second."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float:
        """New tokens per second, after the first."""
        return _rate(self.new_tokens - 1, self.decode_seconds)

    def count(self, token: Token, seconds: float) -> None:
        """Takes one more token, which came after `seconds` of work, into account."""
        if token.index == 0:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
        self.new_tokens += 1
        self.finish = token.finish


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0


def generate(
    decoder: Decoder | NativeDecoder,
    prompt_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    cache: Cache | None = None,
    chunk: int = 512,
    vocab_limit: int | None = None,
    logprobs: int | None = None,
    stats: Stats | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[Token]:
    """Continues the prompt until a stop id, `max_tokens` or the end of the context; greedy without `params`.

    A `cache` that holds tokens must hold the first ones of the prompt (`reuse` sees to that): only the
    rest is computed. Its capacity is the context; without one, a cache is made that fits, within the
    spec's `max_positions`. It stays usable however the generation ends: by an error, or abandoned.

    The prompt is computed `chunk` tokens at a time, and `on_progress(done, total)` is called after each.
    Ids from `vocab_limit` on are rows of the matrix that are no tokens: they are never chosen.
    `logprobs` asks for each token's log-probability and that many alternatives. `stats` is filled in.

    Raises `RequestError` at once if the request makes no sense.
    """
    vocab_size = tokens_of(decoder, vocab_limit)
    prompt = checked_prompt(prompt_ids, vocab_size)
    context = cache.capacity if cache is not None else decoder.spec.max_positions
    device = weight_of(decoder).device
    answer = Answer(prompt, params, vocab_size, max_tokens, context, stop_ids, logprobs, device)
    if cache is None:
        cache = cache_for(decoder, 1, min(len(prompt) + max_tokens, context))
    _check_cache(cache, decoder, len(prompt))
    if chunk < 1:
        raise RequestError("chunk", f"must be at least 1, found {chunk}")
    stats = Stats() if stats is None else stats
    stats.prompt_tokens, stats.cached_tokens = len(prompt), cache.length
    return _tokens(decoder, prompt, answer, cache, chunk, stats, on_progress)


def _tokens(
    decoder: Decoder | NativeDecoder,
    prompt: list[int],
    answer: "Answer",
    cache: Cache,
    chunk: int,
    stats: Stats,
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[Token]:
    begun = time.perf_counter()
    rest = torch.tensor([prompt[cache.length :]], device=weight_of(decoder).device)
    logits = prefill(decoder, rest, cache, chunk, on_progress=on_progress)
    while True:
        token = answer.choose(logits[0])
        stats.count(token, time.perf_counter() - begun)
        yield token
        if token.finish:
            return
        begun = time.perf_counter()
        logits = forward(decoder, torch.tensor([[token.id]], device=rest.device), cache)


def prefill(
    decoder: Decoder | NativeDecoder,
    ids: Int[Tensor, "B T"],
    cache: Cache,
    chunk: int,
    positions: Int[Tensor, "B T"] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Float[Tensor, "B V"]:
    """Feeds `chunk` tokens at a time, which bounds the memory. Returns the logits after the last one."""
    done, total = 0, ids.shape[1]
    while True:
        part = slice(done, done + chunk)
        logits = forward(decoder, ids[:, part], cache, None if positions is None else positions[:, part])
        done = min(done + chunk, total)
        if on_progress is not None:
            on_progress(done, total)
        if done == total:
            return logits


@torch.inference_mode()
def forward(
    decoder: Decoder | NativeDecoder,
    ids: Int[Tensor, "B T"],
    cache: Cache,
    positions: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B V"]:
    """The logits after the last of `ids`. If it fails half-way, the cache is as before, or empty."""
    before = cache.length
    try:
        return decoder(ids, positions, cache=cache, last_only=True)[:, -1]
    except BaseException:
        cache.truncate(before)
        raise


class Answer:
    """One answer in the making: chooses its tokens and knows when it ends."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None,
        vocab_size: int,
        max_tokens: int,
        context: int,
        stop_ids: Iterable[int] = (),
        logprobs: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise RequestError("max_tokens", f"must be an integer of at least 1, found {max_tokens!r}")
        if len(prompt) >= context:
            raise RequestError(
                "prompt", f"has {len(prompt)} tokens, and a context of {context} leaves no room for an answer"
            )
        if logprobs is not None and not 0 <= logprobs <= vocab_size:
            raise RequestError(
                "logprobs", f"must be from 0 to the vocabulary's {vocab_size}, found {logprobs}"
            )
        self.sampler = Sampler(params or SamplingParams(temperature=0), vocab_size, prompt, device)
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.room = context - len(prompt)
        self.stop_ids = frozenset(stop_ids)
        self.logprobs = logprobs
        self.length = 0
        self.finish: Finish | None = None

    def choose(self, logits: Float[Tensor, "V"]) -> Token:
        """The next token, from the logits after the last one."""
        logits = logits[: self.vocab_size]
        chosen = self.sampler(logits)
        self.length += 1
        if chosen in self.stop_ids:
            self.finish = "stop"
        elif self.length == self.max_tokens:
            self.finish = "length"
        elif self.length == self.room:
            self.finish = "context"
        index = self.length - 1
        if self.logprobs is None:
            return Token(chosen, index, self.finish)
        found = logprobs(logits, torch.tensor(chosen, device=logits.device), self.logprobs)
        top = tuple(zip(found.top_ids.tolist(), found.top.tolist(), strict=True))
        return Token(chosen, index, self.finish, float(found.chosen), top)


def checked_prompt(ids: Iterable[int], vocab_size: int, param: str = "prompt") -> list[int]:
    """The ids as a list. Raises `RequestError` if there are none, or one is no token."""
    try:
        prompt = [operator.index(i) for i in ids]
    except TypeError as error:
        raise RequestError(param, f"must be integer token ids ({error})") from None
    if not prompt:
        raise RequestError(param, "is empty: give at least one token, such as the beginning-of-text token")
    for i in prompt:
        if not 0 <= i < vocab_size:
            found = i if i.bit_length() <= 64 else f"of {i.bit_length()} bits"
            raise RequestError(param, f"token {found} is not in the vocabulary of {vocab_size}")
    return prompt


def tokens_of(decoder: Decoder | NativeDecoder, limit: int | None) -> int:
    """How many ids are tokens: the rows of the matrix, or fewer if the tokenizer has fewer."""
    rows = decoder.spec.vocab_size
    return rows if limit is None else min(limit, rows)


def weight_of(decoder: Decoder | NativeDecoder) -> Tensor:
    """A weight, to know the decoder's dtype and device."""
    module = decoder.decoder if isinstance(decoder, NativeDecoder) else decoder
    return module.embed.weight


def cache_for(decoder: Decoder | NativeDecoder, batch: int, capacity: int) -> Cache:
    """A cache in the decoder's dtype, on its device."""
    weight = weight_of(decoder)
    return Cache(decoder.spec, batch, capacity, weight.dtype, weight.device)


def _check_cache(cache: Cache, decoder: Decoder | NativeDecoder, prompt_length: int) -> None:
    found, wanted = cache.layers[0].k.dtype, weight_of(decoder).dtype
    if found != wanted:
        raise RequestError("cache", f"holds {found}, the model works in {wanted}: make it with cache_for()")
    if cache.batch != 1 or cache.length >= prompt_length:
        raise RequestError(
            "cache", f"must hold one sequence and fewer than the prompt's {prompt_length} tokens: see reuse()"
        )


def reuse(cache: Cache, old_ids: Sequence[int], new_ids: Sequence[int]) -> int:
    """Leaves in the cache what the next prompt begins with, and returns how many tokens that is.

    `old_ids` are the tokens fed so far, in order; more of them (an answer's last token, or a whole
    prompt that was abandoned) do no harm. The last of `new_ids` is always left to compute, since
    its logits are needed.
    """
    common = 0
    for old, new in zip(old_ids, new_ids[:-1], strict=False):
        if old != new:
            break
        common += 1
    return cache.truncate(common)
