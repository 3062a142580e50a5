"""Several sequences at once, of unequal lengths: padded on the left, so that all end in one column."""

from collections.abc import Collection, Iterator, Sequence

import torch

from openbook.infer.generate import (
    Answer,
    Token,
    cache_for,
    checked_prompt,
    forward,
    prefill,
    tokens_of,
    weight_of,
)
from openbook.infer.sample import RequestError, SamplingParams
from openbook.model import Decoder
from openbook.native import NativeDecoder

PAD = -1
"""The position that says: padding, not to be attended to. The id beside it does not matter."""


def generate_batch(
    decoder: Decoder | NativeDecoder,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    max_tokens: int | Sequence[int],
    stop_ids: Collection[int] = (),
    chunk: int = 512,
    vocab_limit: int | None = None,
    logprobs: int | None = None,
) -> Iterator[tuple[int, Token]]:
    """Continues every prompt as `generate` would alone; yields (row, token), a token for each unfinished row
    and step. One `params` (default: greedy) or `max_tokens` is for all rows, or there is one for each.

    A row that has ended is fed padding until the last one ends: it costs time and disturbs nobody.
    Raises `RequestError` at once if a request makes no sense; `param` names the row.
    """
    if not prompts:
        raise RequestError("prompts", "is empty")
    vocab_size = tokens_of(decoder, vocab_limit)
    each_params = _for_each("params", params, SamplingParams | None, len(prompts))
    each_limit = _for_each("max_tokens", max_tokens, int, len(prompts))
    context, device = decoder.spec.max_positions, weight_of(decoder).device
    rows, answers = [], []
    for i, (ids, row_params, limit) in enumerate(zip(prompts, each_params, each_limit, strict=True)):
        rows.append(checked_prompt(ids, vocab_size, f"prompts[{i}]"))
        answers.append(Answer(rows[-1], row_params, vocab_size, limit, context, stop_ids, logprobs, device))
    if chunk < 1:
        raise RequestError("chunk", f"must be at least 1, found {chunk}")
    return _tokens(decoder, rows, answers, chunk)


def _for_each(name, value, kind, n: int) -> list:
    values = [value] * n if isinstance(value, kind) else list(value)
    if len(values) != n:
        raise RequestError(name, f"must be one for all or one for each of {n} prompts, found {len(values)}")
    return values


def _tokens(
    decoder: Decoder | NativeDecoder, rows: list[list[int]], answers: list[Answer], chunk: int
) -> Iterator[tuple[int, Token]]:
    device = weight_of(decoder).device
    width = max(len(row) for row in rows)
    longest = max(min(answer.max_tokens, answer.room) for answer in answers)
    cache = cache_for(decoder, len(rows), width + longest)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    positions = torch.tensor(
        [[PAD] * (width - len(row)) + list(range(len(row))) for row in rows], device=device
    )
    logits = prefill(decoder, ids, cache, chunk, positions)
    while True:
        new: list[tuple[int, int]] = []
        for i, answer in enumerate(answers):
            if answer.finish:
                new.append((0, PAD))
                continue
            token = answer.choose(logits[i])
            yield i, token
            new.append((token.id, len(rows[i]) + token.index))
        if all(answer.finish for answer in answers):
            return
        ids, positions = torch.tensor(new, device=device).T[:, :, None]
        logits = forward(decoder, ids, cache, positions)
