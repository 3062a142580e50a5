import itertools
import time

import pytest
import torch

from openbook.infer.cache import Cache
from openbook.infer.generate import Stats, Token, generate, reuse
from openbook.infer.sample import NonFiniteLogitsError, RequestError, SamplingParams

A, B = [5, 17, 3, 60, 22, 8, 41], [5, 17, 90, 2, 33, 71, 12, 9, 54, 76, 11]


def ids(tokens) -> list[int]:
    return [token.id for token in tokens]


def recomputed(decoder, prompt: list[int], n: int) -> tuple[list[int], list[float]]:
    """Greedy ids and their log-probabilities, the whole sequence computed anew for each token."""
    sequence, chances = list(prompt), []
    for _ in range(n):
        logits = decoder(torch.tensor([sequence]))[0, -1]
        sequence.append(int(logits.argmax()))
        chances.append(float(logits.log_softmax(-1)[sequence[-1]]))
    return sequence[len(prompt) :], chances


# --- the cache changes nothing ---


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 512])
def test_cached_and_chunked_generation_equals_recomputing_everything(decoder, chunk):
    expected, chances = recomputed(decoder, B, 24)
    tokens = list(generate(decoder, B, max_tokens=24, chunk=chunk, logprobs=0))
    assert ids(tokens) == expected
    assert [token.logprob for token in tokens] == pytest.approx(chances, abs=1e-5)
    assert len(set(expected)) > 5  # the model does not just repeat itself, so equality says something


def test_nothing_is_read_that_was_not_written(decoder):
    cache = Cache(decoder.spec, 1, 40)
    cache.fill_(float("nan"))
    assert ids(generate(decoder, A, max_tokens=20, cache=cache)) == recomputed(decoder, A, 20)[0]


def fresh(decoder, prompt: list[int]) -> list[int]:
    return ids(generate(decoder, prompt, max_tokens=12))


@pytest.mark.parametrize(
    "trouble", ["none", "abandoned", "abandoned prefill", "failed step", "failed progress"]
)
def test_a_kept_cache_gives_what_a_fresh_one_gives(decoder, trouble):
    cache = Cache(decoder.spec, 1, 60)
    fed = []

    def ask(prompt: list[int]) -> list[int]:
        nonlocal fed
        reuse(cache, fed, prompt)
        fed = list(prompt)
        answer = []
        for token in generate(decoder, prompt, max_tokens=12, cache=cache, chunk=4):
            fed.append(token.id)
            answer.append(token.id)
        return answer

    assert ask(A) == fresh(decoder, A)
    reuse(cache, fed, B)
    fed = list(B)
    if trouble == "abandoned":
        fed += ids(itertools.islice(generate(decoder, B, max_tokens=12, cache=cache, chunk=4), 5))
    elif trouble == "abandoned prefill":
        generate(decoder, B, max_tokens=12, cache=cache, chunk=4)
    elif trouble == "failed step":
        fail_in_last_layer(decoder, at_call=2)
        with pytest.raises(ZeroDivisionError):
            list(generate(decoder, B, max_tokens=12, cache=cache, chunk=4))
    elif trouble == "failed progress":
        with pytest.raises(ZeroDivisionError):
            list(generate(decoder, B, max_tokens=12, cache=cache, chunk=4, on_progress=lambda *_: 1 // 0))
    assert ask(B) == fresh(decoder, B)
    assert ask(A) == fresh(decoder, A)
    assert ask(A) == fresh(decoder, A)


def fail_in_last_layer(decoder, at_call: int) -> None:
    """Makes the last layer fail once, when the layers before have already put their keys into the cache."""
    calls = itertools.count(1)

    def hook(*_):
        if next(calls) == at_call:
            handle.remove()
            raise ZeroDivisionError

    handle = decoder.layers[-1].register_forward_pre_hook(hook)


def test_a_second_turn_on_a_live_cache_equals_a_fresh_run_of_both(llama):
    cache = Cache(llama.spec, 1, 60)
    first = ids(generate(llama, A, max_tokens=8, cache=cache))
    dialogue = [*A, *first, 30, 31, 32]
    assert reuse(cache, [*A, *first], dialogue) == len(A) + 7  # the last token was never fed
    stats = Stats()
    second = ids(generate(llama, dialogue, max_tokens=8, cache=cache, stats=stats))
    assert second == ids(generate(llama, dialogue, max_tokens=8))
    assert (stats.prompt_tokens, stats.cached_tokens) == (len(A) + 11, len(A) + 7)


def test_reuse_keeps_the_common_beginning_and_leaves_a_token_to_compute(llama):
    def kept(new: list[int]) -> int:
        cache = Cache(llama.spec, 1, 60)
        list(generate(llama, A, max_tokens=1, cache=cache))
        return reuse(cache, A, new)

    assert kept([*A[:3], 99, 98]) == 3
    assert kept(A) == len(A) - 1
    assert kept(A[:2]) == 1
    assert kept([1, *A]) == 0


def test_a_cache_of_another_dtype_is_refused(llama):
    cache = Cache(llama.spec, 1, 60, dtype=torch.bfloat16)
    with pytest.raises(RequestError, match=r"bfloat16.*float32.*cache_for\(\)"):
        generate(llama, A, max_tokens=3, cache=cache)


def test_a_cache_that_holds_the_whole_prompt_is_refused(llama):
    cache = Cache(llama.spec, 1, 60)
    list(generate(llama, A, max_tokens=3, cache=cache))
    with pytest.raises(RequestError, match=r"reuse\(\)"):
        generate(llama, A, max_tokens=3, cache=cache)


# --- how an answer ends ---


def test_a_stop_id_ends_the_answer_and_is_its_last_token(rigged):
    tokens = list(generate(rigged([7, 8, 2, 9]), [1], max_tokens=10, stop_ids=[2, 30]))
    assert tokens == [Token(7, 0), Token(8, 1), Token(2, 2, "stop")]


def test_max_tokens_end_the_answer(rigged):
    tokens = list(generate(rigged([7, 8, 2, 9]), [1], max_tokens=2, stop_ids=[2]))
    assert tokens == [Token(7, 0), Token(8, 1, "length")]


def test_a_stop_id_on_the_last_allowed_token_counts_as_stop(rigged):
    assert list(generate(rigged([7, 2]), [1], max_tokens=2, stop_ids=[2]))[-1].finish == "stop"


@pytest.mark.parametrize("prompt", [1, 9])
def test_prompt_and_answer_together_fill_the_context_and_no_more(rigged, prompt):
    decoder = rigged([7], prompt=prompt)
    tokens = list(generate(decoder, [1] * prompt, max_tokens=100, cache=Cache(decoder.spec, 1, 10)))
    assert len(tokens) == 10 - prompt
    assert tokens[-1].finish == "context"
    assert len(list(generate(decoder, [1] * prompt, max_tokens=100))) == decoder.spec.max_positions - prompt


@pytest.mark.parametrize("length", [10, 11])
def test_a_prompt_that_fills_the_context_is_refused(rigged, length):
    decoder = rigged([7])
    with pytest.raises(RequestError, match=f"has {length} tokens, and a context of 10") as error:
        generate(decoder, [1] * length, max_tokens=5, cache=Cache(decoder.spec, 1, 10))
    assert error.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "is empty"), ([-1], "token -1"), ([1, 50], "token 50"), ([2**63], "token 9223372036854775808"),
        ([10**400], "bits"), ([1.5], "integer"), (["1"], "integer"),
    ],
)  # fmt: skip
def test_a_prompt_of_no_tokens_or_no_known_ones_is_refused_at_once(rigged, prompt, message):
    with pytest.raises(RequestError, match=message) as error:
        generate(rigged([7]), prompt, max_tokens=5)
    assert error.value.param == "prompt"


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, "5", True, None])
def test_max_tokens_must_be_a_positive_integer(rigged, max_tokens):
    with pytest.raises(RequestError, match="max_tokens"):
        generate(rigged([7]), [1], max_tokens=max_tokens)


# --- rows of the matrix that are no tokens ---


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3)])
def test_a_padded_row_of_the_vocabulary_is_never_chosen(rigged, params):
    decoder = rigged([45], vocab_size=50, strength=100.0)
    tokens = list(generate(decoder, [1], params, max_tokens=25, vocab_limit=40, logprobs=40))
    assert all(token.id < 40 for token in tokens)
    assert all(i < 40 for token in tokens for i, _ in token.top)
    with pytest.raises(RequestError, match="token 40 is not in the vocabulary of 40"):
        generate(decoder, [40], params, max_tokens=1, vocab_limit=40)


# --- what a token carries ---


def test_log_probabilities_come_before_the_sampling_parameters(llama):
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias={4: 100})
    token = next(generate(llama, A, params, max_tokens=1, logprobs=5))
    expected = llama(torch.tensor([A]))[0, -1].log_softmax(-1)
    assert token.id == 4
    assert token.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    assert [i for i, _ in token.top] == expected.topk(5).indices.tolist()
    assert [x for _, x in token.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)
    plain = next(generate(llama, A, params, max_tokens=1))
    assert plain.logprob is None
    assert plain.top == ()


def test_more_log_probabilities_than_tokens_are_refused(rigged):
    for number in (-1, 51):
        with pytest.raises(RequestError, match="logprobs"):
            generate(rigged([7]), [1], max_tokens=1, logprobs=number)


def test_statistics_count_tokens_and_leave_out_the_callers_time(llama):
    stats, progress = Stats(), []
    for _ in generate(
        llama, B, max_tokens=4, chunk=4, stats=stats, on_progress=lambda *step: progress.append(step)
    ):
        time.sleep(0.2)
    assert (stats.prompt_tokens, stats.new_tokens, stats.finish) == (len(B), 4, "length")
    assert progress == [(4, 11), (8, 11), (11, 11)]
    assert 0 < stats.decode_seconds < 0.3
    assert stats.decode_rate == pytest.approx(3 / stats.decode_seconds)
    assert stats.prefill_rate == pytest.approx(11 / stats.prefill_seconds)


# --- seeds ---


def test_a_seed_repeats_and_no_seed_does_not(llama):
    def answer(params: SamplingParams) -> list[int]:
        return ids(generate(llama, A, params, max_tokens=16))

    assert answer(SamplingParams(seed=42, temperature=2)) == answer(SamplingParams(seed=42, temperature=2))
    assert answer(SamplingParams(temperature=2)) != answer(SamplingParams(temperature=2))
    copies = [tuple(answer(params)) for params in SamplingParams(seed=42, temperature=2).copies(3)]
    assert len(set(copies)) == 3


def test_penalties_see_the_whole_prompt_even_if_it_is_cached(llama):
    params = SamplingParams(temperature=0, repetition_penalty=1.8)
    cache = Cache(llama.spec, 1, 60)
    list(generate(llama, A, max_tokens=1, cache=cache))
    reuse(cache, A, B)
    assert cache.length == 2
    assert ids(generate(llama, B, params, max_tokens=12, cache=cache)) == ids(
        generate(llama, B, params, max_tokens=12)
    )


# --- what is left to the caller ---


def test_the_callers_code_between_tokens_may_train(llama):
    for _ in generate(llama, A, max_tokens=2):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_logits_that_are_not_finite_end_in_an_error(llama):
    with torch.no_grad():
        llama.head.weight[3, 0] = float("nan")
    with pytest.raises(NonFiniteLogitsError):
        list(generate(llama, A, max_tokens=2))


def test_a_bf16_decoder_generates_with_a_bf16_cache(llama):
    tokens = list(generate(llama.bfloat16(), A, SamplingParams(seed=1), max_tokens=5, logprobs=2))
    assert len(tokens) == 5
