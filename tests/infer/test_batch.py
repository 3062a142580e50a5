import pytest
import torch

from openbook.infer.batch import generate_batch
from openbook.infer.generate import Token, generate
from openbook.infer.sample import RequestError, SamplingParams

PROMPTS = [[5, 17, 3, 60, 22, 8, 41], [90], [2, 33, 71, 12, 9, 54, 76, 11, 20, 6, 44, 13], [7, 7, 7]]


def by_row(stream, n: int) -> list[list[Token]]:
    rows: list[list[Token]] = [[] for _ in range(n)]
    for i, token in stream:
        rows[i].append(token)
    return rows


def ids(tokens) -> list[int]:
    return [token.id for token in tokens]


@pytest.mark.parametrize("chunk", [2, 5, 512])  # a chunk of 2 is all padding for the short prompts
def test_every_row_is_what_it_would_be_alone(decoder, chunk):
    rows = by_row(generate_batch(decoder, PROMPTS, max_tokens=20, chunk=chunk, logprobs=3), len(PROMPTS))
    for prompt, row in zip(PROMPTS, rows, strict=True):
        alone = list(generate(decoder, prompt, max_tokens=20, logprobs=3))
        assert ids(row) == ids(alone)
        assert [t.finish for t in row] == [t.finish for t in alone]
        assert [t.logprob for t in row] == pytest.approx([t.logprob for t in alone], abs=1e-5)
        assert [t.top[2][1] for t in row] == pytest.approx([t.top[2][1] for t in alone], abs=1e-5)


def test_every_row_has_its_own_parameters_and_random_numbers(decoder):
    params = [
        SamplingParams(seed=1, temperature=2),
        SamplingParams(temperature=0),
        SamplingParams(seed=3, top_k=5, temperature=3, repetition_penalty=1.5),
        SamplingParams(seed=1, top_p=0.9),
    ]
    rows = by_row(generate_batch(decoder, PROMPTS, params, max_tokens=15), 4)
    for prompt, row_params, row in zip(PROMPTS, params, rows, strict=True):
        assert ids(row) == ids(generate(decoder, prompt, row_params, max_tokens=15))


def test_rows_end_one_by_one(llama):
    alone = [ids(generate(llama, prompt, max_tokens=20)) for prompt in PROMPTS]
    stop = alone[0][2]
    rows = by_row(generate_batch(llama, PROMPTS, max_tokens=[20, 1, 9, 3], stop_ids=[stop]), 4)
    for row, whole, limit in zip(rows, alone, [20, 1, 9, 3], strict=True):
        until = whole.index(stop) + 1 if stop in whole[:limit] else limit
        assert ids(row) == whole[:until]
        assert row[-1].finish == ("stop" if row[-1].id == stop else "length")
        assert all(token.finish is None for token in row[:-1])
    assert rows[0][-1].finish == "stop"
    assert len({len(row) for row in rows}) > 2


def test_each_row_ends_at_its_own_context(decoder):
    rows = by_row(generate_batch(decoder, PROMPTS, max_tokens=1000), 4)
    assert [len(prompt) + len(row) for prompt, row in zip(PROMPTS, rows, strict=True)] == [64] * 4
    assert [row[-1].finish for row in rows] == ["context"] * 4
    assert ids(rows[1]) == ids(generate(decoder, PROMPTS[1], max_tokens=1000))


def test_a_neighbour_does_not_matter(llama):
    first = by_row(generate_batch(llama, [PROMPTS[0], [1, 2]], max_tokens=10), 2)[0]
    second = by_row(generate_batch(llama, [PROMPTS[0], [3] * 30], max_tokens=[10, 3]), 2)[0]
    assert ids(first) == ids(second)


def test_copies_of_one_prompt_differ_and_the_first_is_as_alone(llama):
    params = SamplingParams(seed=42, temperature=2)
    rows = by_row(generate_batch(llama, [PROMPTS[0]] * 4, params.copies(4), max_tokens=12), 4)
    assert len({tuple(ids(row)) for row in rows}) == 4
    assert ids(rows[0]) == ids(generate(llama, PROMPTS[0], params, max_tokens=12))


def test_a_bad_row_is_named(llama):
    with pytest.raises(RequestError, match=r"prompts\[1\]: is empty"):
        generate_batch(llama, [[1], []], max_tokens=1)
    with pytest.raises(RequestError, match=r"prompts\[2\]: token 97"):
        generate_batch(llama, [[1], [2], [97]], max_tokens=1)
    with pytest.raises(RequestError, match="one for each of 2 prompts, found 3"):
        generate_batch(llama, [[1], [2]], max_tokens=[1, 2, 3])
    with pytest.raises(RequestError, match="prompts: is empty"):
        generate_batch(llama, [], max_tokens=1)


def test_bf16_rows_are_close_to_those_alone(llama):
    llama = llama.bfloat16()
    rows = by_row(generate_batch(llama, PROMPTS, max_tokens=1, logprobs=0), 4)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        expected = llama(torch.tensor([prompt]))[0, -1].float().log_softmax(-1)
        assert row[0].logprob == pytest.approx(expected.max().item(), abs=0.1)
