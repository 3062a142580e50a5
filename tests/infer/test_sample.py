import dataclasses
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openbook.infer import sample
from openbook.infer.sample import (
    NonFiniteLogitsError,
    RequestError,
    Sampler,
    SamplingParams,
    candidates,
    distribution,
    draw,
    logprobs,
)

INF = math.inf


def of(probabilities: list[float]) -> torch.Tensor:
    """Logits with these probabilities."""
    return torch.tensor(probabilities).log()


def kept(logits: torch.Tensor) -> list[int]:
    return (logits > -INF).nonzero().flatten().tolist()


def draws(logits: list[float], n: int = 200, **params) -> set[int]:
    sampler = Sampler(SamplingParams(**params), len(logits))
    return {sampler(torch.tensor(logits)) for _ in range(n)}


# --- what a request may ask for ---


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *[("temperature", v) for v in (-0.1, INF, math.nan, "1", True, None, 10**400)],
        *[("top_p", v) for v in (-1, 1.0001, math.nan, "0.5")],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan)],
        *[("top_k", v) for v in (-2, 1.5, True, None, math.nan)],
        *[("repetition_penalty", v) for v in (0, 1e-300, -1, math.nan, INF)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, math.nan)],
        *[("seed", v) for v in (-1, 2**63, 1.0, True)],
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: 1e9}),
        ("logit_bias", [(3, 1.0)]),
    ],
)
def test_a_bad_value_is_refused_with_its_name(param, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{param: value})
    assert error.value.param == param
    assert str(error.value).startswith(f"{param}: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0}, {"temperature": -0.0}, {"temperature": 1e-8}, {"top_p": 0}, {"top_p": 1},
        {"top_k": -1}, {"top_k": 0}, {"top_k": 10**9}, {"seed": 0}, {"seed": 2**63 - 1},
        {"logit_bias": {0: -100, 7: 100}},
    ],
)  # fmt: skip
def test_zero_is_a_value_and_limits_are_inside(values):
    assert isinstance(Sampler(SamplingParams(**values), 8)(torch.zeros(8)), int)


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(RequestError, match="token 191222"):
        Sampler(SamplingParams(logit_bias={191222: -100}), 128)
    Sampler(SamplingParams(logit_bias={127: -100}), 128)


# --- temperature ---


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-8, 1e-300])
def test_temperature_zero_takes_the_likeliest(temperature):
    assert draws([1.0, 3.0, 2.0], temperature=temperature) == {1}


@pytest.mark.parametrize("temperature", [0, 1e-8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_zero_takes_the_lowest_id_on_ties(temperature, dtype):
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(SamplingParams(temperature=temperature), 50_000)
    for _ in range(50):
        logits = torch.zeros(50_000, dtype=dtype)
        ids = torch.randint(0, 50_000, (4,), generator=generator)
        logits[ids] = 1
        assert sampler(logits) == int(ids.min())


def test_the_seed_does_not_matter_to_greedy():
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    tokens = {Sampler(SamplingParams(temperature=0, seed=seed), 100)(logits) for seed in range(20)}
    assert tokens == {int(logits.argmax())}


def test_a_small_temperature_does_not_overflow():
    assert draws([1e30, 3e38, -3e38], temperature=1e-5) == {1}
    probabilities = distribution(torch.tensor([300.0, 300.0, -300.0]), SamplingParams(temperature=1e-4))
    assert probabilities.tolist() == [0.5, 0.5, 0.0]


def test_temperature_comes_before_top_p():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    assert len(kept(sample.top_p(sample.temperature(logits, 2.0), 0.85))) == 3
    assert len(kept(sample.temperature(sample.top_p(logits, 0.85), 2.0))) == 2  # the other order
    probabilities = distribution(logits, SamplingParams(temperature=2.0, top_p=0.85))
    assert int((probabilities > 0).sum()) == 3


# --- top-k ---


@pytest.mark.parametrize("k", [0, -1, 3, 100, 10**9])
def test_top_k_of_zero_or_the_vocabulary_is_no_filter(k):
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert sample.top_k(logits, k) is logits
    assert draws([1.0, 1.5, 1.2], top_k=k) == {0, 1, 2}


def test_top_k_of_one_is_greedy():
    assert draws([1.0, 3.0, 2.0], top_k=1) == {1}
    assert draws([1.0, 3.0, 3.0], top_k=1) == {1}


def test_top_k_keeps_exactly_k_and_the_lower_id_on_ties():
    assert kept(sample.top_k(torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0]), 3)) == [0, 1, 3]
    assert draws([1.0, 2.0, 0.0, 1.0, 1.0], top_k=3) == {0, 1, 3}


# --- top-p ---


@pytest.mark.parametrize(
    ("probabilities", "p", "count"),
    [
        ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
        ([0.5, 0.3, 0.15, 0.05], 0.6, 2),
        ([0.5, 0.35, 0.1, 0.05], 0.9, 3),
        ([0.4, 0.3, 0.2, 0.1], 1e-9, 1),
        ([0.5, 0.25, 0.25], 0.75, 2),
        ([0.5, 0.25, 0.25], 0.5, 1),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(probabilities, p, count):
    expected = list(range(count))
    assert kept(sample.top_p(of(probabilities), p)) == expected
    assert draws(of(probabilities).tolist(), n=300, top_p=p) == set(expected)


def test_top_p_takes_the_likeliest_wherever_they_are():
    logits = of([0.05, 0.15, 0.5, 0.3])
    assert kept(sample.top_p(logits, 0.6)) == [2, 3]
    assert draws(logits.tolist(), n=300, top_p=0.6) == {2, 3}


def test_top_p_of_one_changes_no_bit():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert sample.top_p(logits, 1.0) is logits
    plain = candidates(logits, SamplingParams())
    filtered = candidates(logits, SamplingParams(top_p=1.0))
    assert torch.equal(plain.weights, filtered.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0, 5e-324, 1e-9, 1e-7, 1e-3])
def test_a_tiny_top_p_never_leaves_nothing(p, dtype):
    logits = torch.zeros(5000, dtype=dtype)
    assert Sampler(SamplingParams(top_p=p), 5000)(logits) < 10
    logits[17] = 10
    assert Sampler(SamplingParams(top_p=p), 5000)(logits) == 17


def test_top_p_is_taken_of_what_top_k_left():
    # Of 0.5, 0.3 alone the first is 0.625 of the mass: enough for 0.6, though not of the whole.
    logits = of([0.5, 0.3, 0.15, 0.05])
    params = SamplingParams(top_k=2, top_p=0.6)
    assert distribution(logits, params).tolist() == [1, 0, 0, 0]
    assert candidates(logits, params).weights.count_nonzero() == 1


# --- min-p ---


def test_min_p_is_relative_to_the_likeliest():
    logits = of([0.5, 0.3, 0.15, 0.05])
    assert kept(sample.min_p(logits, 0.2)) == [0, 1, 2]
    assert sample.min_p(logits, 0.0) is logits
    assert draws(logits.tolist(), n=300, min_p=0.2) == {0, 1, 2}
    assert draws([1.0, 3.0, 2.0], min_p=1.0) == {1}


# --- penalties ---

LOGITS = torch.tensor([2.0, 1.0, -1.0, -2.0])


def test_repetition_divides_the_positive_and_multiplies_the_negative():
    seen = torch.tensor([True, False, False, True])
    out = sample.repetition_penalty(LOGITS, seen, 1.5)
    torch.testing.assert_close(out, torch.tensor([4 / 3, 1, -1, -3]))
    expected = torch.tensor([0.5475, 0.3923, 0.0531, 0.0072])
    torch.testing.assert_close(out.softmax(-1), expected, atol=5e-5, rtol=0)


def test_repetition_counts_the_prompt_once_however_often_it_repeats():
    sampler = Sampler(SamplingParams(repetition_penalty=1.5), 4, prompt=[0, 3, 0, 0])
    torch.testing.assert_close(sampler.adjusted(LOGITS), torch.tensor([4 / 3, 1, -1, -3]))


def test_presence_and_frequency_count_new_tokens_alone():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, temperature=0)
    sampler = Sampler(params, 4, prompt=[1])
    for _ in range(3):
        assert sampler(torch.tensor([9.0, 0, 0, 0])) == 0
    assert sampler.adjusted(LOGITS).tolist() == [0.75, 1.0, -1.0, -2.0]


def test_penalties_change_what_greedy_takes():
    assert Sampler(SamplingParams(temperature=0, repetition_penalty=3), 4, prompt=[0])(LOGITS) == 1
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=2), 4)
    assert [sampler(LOGITS) for _ in range(2)] == [0, 1]


def test_penalties_at_their_defaults_change_no_bit():
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1))
    seen, counts = torch.ones(64, dtype=torch.bool), torch.ones(64)
    assert torch.equal(sample.repetition_penalty(logits, seen, 1.0), logits)
    assert torch.equal(sample.presence_frequency_penalty(logits, counts, 0.0, 0.0), logits)
    assert torch.equal(Sampler(SamplingParams(), 64, prompt=range(64)).adjusted(logits), logits)


def test_a_bias_forces_or_forbids():
    assert draws([1.0, 3.0, 2.0], logit_bias={0: 100}) == {0}
    assert draws([1.0, 3.0, 2.0], logit_bias={1: -100}, temperature=0) == {2}
    assert sample.logit_bias(torch.zeros(2, 3), {2: 1.5, 0: -1}).tolist() == [[-1, 0, 1.5]] * 2


def test_a_filter_treats_every_row_of_a_batch_alike():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02)
    rows = torch.stack([distribution(row, params) for row in logits])
    assert torch.equal(distribution(logits, params), rows)


# --- the fast twin ---


def probabilities_of(found: sample.Candidates, vocab_size: int) -> torch.Tensor:
    out = torch.zeros(vocab_size, dtype=torch.float64)
    out[found.ids] = found.weights.double()
    return out / out.sum()


@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([2, 7, 300, 5000]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 3.0, 30.0]),
    grid=st.sampled_from([0, 1, 8]),  # logits rounded to 1/grid, so that many are equal
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 4999]),
    top_p=st.sampled_from([1e-6, 0.1 + 1e-5, 0.5132718, 0.9371321, 0.9991371, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.3]),
)
def test_the_fast_way_draws_from_the_same_distribution(
    seed, size, spread, grid, temperature, top_k, top_p, min_p
):
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    if grid:
        logits = (logits * grid).round() / grid
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = distribution(logits, params).double()
    found = probabilities_of(candidates(logits, params), size)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    # No p is a multiple of 1/size, but the rounding of a sum may still move one token over the edge.
    assert abs(int((found > 1e-30).sum()) - int((expected > 1e-30).sum())) <= 1


def test_what_is_impossible_stays_impossible():
    logits = torch.full((2000,), -INF)
    logits[[5, 1500]] = 0.0
    for params in ({}, {"top_k": 50}, {"top_p": 0.99999}, {"min_p": 0.1}):
        sampler = Sampler(SamplingParams(**params), 2000)
        assert {sampler(logits) for _ in range(50)} == {5, 1500}


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_an_error_and_not_a_token(bad, temperature):
    logits = torch.zeros(100)
    logits[40] = bad
    with pytest.raises(NonFiniteLogitsError):
        Sampler(SamplingParams(temperature=temperature), 100)(logits)
    with pytest.raises(NonFiniteLogitsError):
        Sampler(SamplingParams(temperature=temperature), 100)(torch.full((100,), -INF))


# --- the draw ---


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The chance of counts at least this far from the expected ones: the upper gamma function."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def test_draws_follow_the_distribution_for_every_seed():
    logits = torch.tensor([2.0, 1.5, 0.0, -1.0, 0.7, -3.0, 1.0, 0.1])
    found = candidates(logits, SamplingParams())
    for seed in range(20):
        uniform = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        counts = draw(found.weights, uniform).bincount(minlength=8).double()
        assert chi_square_p(counts, logits.double().softmax(-1)) > 1e-4


def test_a_sampler_follows_its_filtered_distribution():
    logits = torch.tensor([2.0, 1.5, 0.0, -1.0, 0.7, -3.0, 1.0, 0.1])
    params = SamplingParams(temperature=0.8, top_k=6, top_p=0.95, min_p=0.05, seed=7)
    expected = distribution(logits, params).double()
    sampler = Sampler(params, 8)
    counts = torch.tensor([sampler(logits) for _ in range(4000)]).bincount(minlength=8).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert chi_square_p(counts[possible], expected[possible]) > 1e-4


def test_the_chi_square_test_sees_a_biased_draw():
    logits = torch.tensor([2.0, 1.5, 0.0, -1.0])
    uniform = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = draw((logits / 0.95).exp(), uniform).bincount(minlength=4).double()
    assert chi_square_p(counts, logits.double().softmax(-1)) < 1e-4


def test_the_ends_of_the_unit_interval_draw_possible_tokens():
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    uniform = torch.tensor([0.0, 0.2999, 0.3001, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, uniform).tolist() == [1, 1, 3, 3]


# --- seeds ---


def run(params: SamplingParams, n: int = 20, neighbours: int = 0) -> list[int]:
    logits = torch.randn(n, 500, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(params, 500)
    others = [Sampler(SamplingParams(seed=i), 500) for i in range(neighbours)]
    tokens = []
    for row in logits:
        for other in others:
            other(row)
        tokens.append(sampler(row))
    return tokens


@pytest.mark.parametrize("seed", [0, 42, 2**63 - 1])
def test_a_seed_gives_the_same_tokens_whoever_else_is_there(seed):
    alone = run(SamplingParams(seed=seed))
    torch.manual_seed(1)
    assert run(SamplingParams(seed=seed), neighbours=3) == alone


def test_sampling_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    run(SamplingParams(seed=1))
    run(SamplingParams())
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_runs_differ():
    assert run(SamplingParams()) != run(SamplingParams())


def test_copies_differ_and_repeat():
    copies = SamplingParams(seed=42).copies(4)
    answers = [run(params) for params in copies]
    assert len({tuple(answer) for answer in answers}) == 4
    assert answers[0] == run(SamplingParams(seed=42))
    assert copies == SamplingParams(seed=42).copies(4)
    assert copies[1].seed != SamplingParams(seed=43).copies(1)[0].seed
    assert all(0 <= c.seed < 2**63 for c in SamplingParams(seed=2**63 - 1).copies(50))
    unseeded = [run(params) for params in SamplingParams().copies(3)]
    assert len({tuple(answer) for answer in unseeded}) == 3


# --- log-probabilities ---


def test_log_probabilities_are_the_models_own():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 5.0, 0.0]])
    found = logprobs(logits, torch.tensor([3, 2]), top=2)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(found.chosen, expected[[0, 1], [3, 2]])
    torch.testing.assert_close(found.top, expected.topk(2).values)
    assert found.top_ids[0].tolist() == [0, 1]
    assert logprobs(logits, torch.tensor([0, 0])).top.shape == (2, 0)


def test_log_probabilities_of_bf16_logits_are_computed_in_fp32():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = logprobs(logits, torch.tensor(5))
    assert found.chosen.dtype == torch.float32
    torch.testing.assert_close(found.chosen, logits.float().log_softmax(-1)[5])


@pytest.mark.parametrize("top", [-1, 1001])
def test_more_alternatives_than_tokens_are_refused(top):
    with pytest.raises(RequestError, match="logprobs"):
        logprobs(torch.zeros(1000), torch.tensor(5), top)


def test_params_are_plain_immutable_data():
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.0})
    assert dataclasses.replace(params) == params
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert Counter([params])[params] == 1
