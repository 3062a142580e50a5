"""Experts: the three ways through them against each other, and against a twin that takes token by token."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openbook.model import init_weights
from openbook.model.decoder import Decoder
from openbook.model.experts import Chosen, Experts, can_group, gathered, grouped, looped, way_through
from openbook.model.mlp import ACTIVATIONS
from openbook.spec.model import Experts as ExpertsSpec
from openbook.spec.model import Groups, Mlp, Router, Shared
from strategies import experts as any_experts
from variants import SOFTMAX, block, model

WAYS = {"looped": looped, "gathered": gathered, "grouped": grouped}
D = 24

KINDS: dict[str, ExpertsSpec] = {
    "plain": ExpertsSpec(12, 3, Mlp(36, "silu", gated=True), SOFTMAX),
    "biased": ExpertsSpec(
        10, 4, Mlp(40, "gelu_quick", True, True, True, clamp=0.3, up_offset=1.0),
        Router("chosen_softmax", renormalise=False, bias=True),
    ),
    "grouped": ExpertsSpec(
        12, 3, Mlp(36, "silu", gated=True),
        Router("sigmoid", True, correction=True, groups=Groups(4, 2, "top2"), scale=2.5, sum_eps=1e-20),
        Shared(Mlp(44, "silu", gated=True), gated=True),
    ),
    "on input": ExpertsSpec(
        9, 1, Mlp(32, "relu2", gated=False, up_bias=True), Router("sigmoid", False, on_input=True)
    ),
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)
every_way = pytest.mark.parametrize("way", WAYS)


def made(spec: ExpertsSpec, dtype: torch.dtype = torch.float32) -> Experts:
    """The module of one layer, with noise in every parameter."""
    decoder = init_weights(Decoder(model(block(mlp=spec), d_model=D)), std=0.3)
    experts = decoder.layers[0].mlp
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
    return experts.to(dtype)


def tokens(batch: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(2)).to(dtype)


# --- token by token, in double precision --------------------------------------------------------


def slow_choice(spec: ExpertsSpec, logits: list[float], correction: list[float]) -> dict[int, float]:
    """Expert -> weight, for one token: lists and sorting, as one would say it."""
    router, x = spec.router, torch.tensor(logits, dtype=torch.float64)
    scores = {"softmax": x.softmax(-1), "sigmoid": x.sigmoid(), "chosen_softmax": x}[router.score].tolist()
    ranks = {i: score + extra for i, (score, extra) in enumerate(zip(scores, correction, strict=True))}
    if router.groups is not None:
        size = spec.n_experts // router.groups.n_groups
        best = {"max": 1, "top2": 2}[router.groups.score]
        groups = [range(g * size, (g + 1) * size) for g in range(router.groups.n_groups)]
        groups.sort(key=lambda group: -sum(sorted((ranks[i] for i in group), reverse=True)[:best]))
        ranks = {i: ranks[i] for group in groups[: router.groups.n_active] for i in group}
    chosen = sorted(ranks, key=lambda i: -ranks[i])[: spec.n_active]
    weights = torch.tensor([scores[i] for i in chosen], dtype=torch.float64)
    if router.score == "chosen_softmax":
        weights = weights.softmax(-1)
    if router.renormalise:
        weights = weights / (weights.sum() + router.sum_eps)
    return dict(zip(chosen, (weights * router.scale).tolist(), strict=True))


def slow_mlp(spec: Mlp, x, gate, up, down):
    """Each of `gate`, `up` and `down` is (matrix, bias or None)."""

    def linear(pair, x):
        return pair[0] @ x + (0 if pair[1] is None else pair[1])

    act, up_x = ACTIVATIONS[spec.activation], linear(up, x)
    if gate is None:
        return linear(down, act(up_x))
    gate_x = linear(gate, x)
    if spec.clamp is not None:
        gate_x, up_x = gate_x.clamp(max=spec.clamp), up_x.clamp(-spec.clamp, spec.clamp)
    return linear(down, act(gate_x) * (up_x + spec.up_offset))


def slow_experts(module: Experts, x: torch.Tensor) -> torch.Tensor:
    """[T, D] → [T, D]."""
    p = {name: parameter.detach().double() for name, parameter in module.named_parameters()}
    spec, rows = module.spec, []

    def matrices(where, *expert):
        pairs = ((f"{where}.{part}.weight", f"{where}.{part}.bias") for part in ("gate", "up", "down"))
        return [
            (p[weight][expert], p[bias][expert] if bias in p else None) if weight in p else None
            for weight, bias in pairs
        ]

    for token in x.double():
        logits = p["router.weight"] @ token + p.get("router.bias", torch.tensor(0.0))
        correction = p.get("router.correction", torch.zeros(spec.n_experts))
        y = torch.zeros(D, dtype=torch.float64)
        for i, weight in slow_choice(spec, logits.tolist(), correction.tolist()).items():
            if spec.router.on_input:
                y += slow_mlp(spec.expert, token * weight, *matrices("experts", i))
            else:
                y += weight * slow_mlp(spec.expert, token, *matrices("experts", i))
        if spec.shared is not None:
            shared = slow_mlp(spec.shared.mlp, token, *matrices("shared"))
            y += shared * (p["shared_gate.weight"] @ token).sigmoid() if spec.shared.gated else shared
        rows.append(y)
    return torch.stack(rows)


@every_kind
@every_way
@torch.no_grad()
def test_every_way_equals_token_by_token(kind, way):
    module = made(KINDS[kind])
    module.experts.way = WAYS[way]
    x = tokens(2, 13)
    expected = slow_experts(module, x.flatten(0, 1)).view(2, 13, D)
    torch.testing.assert_close(module(x).double(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(spec=any_experts(), way=st.sampled_from([looped, gathered]), length=st.integers(1, 5))
@torch.no_grad()
def test_any_experts_equal_token_by_token(spec, way, length):
    module = made(spec)
    module.experts.way = way
    x = tokens(1, length)
    torch.testing.assert_close(module(x)[0].double(), slow_experts(module, x[0]), atol=1e-4, rtol=1e-4)


@every_way
@torch.no_grad()
def test_in_bf16_all_ways_are_as_near_to_the_exact_result(way):
    module = made(ExpertsSpec(12, 3, Mlp(40, "silu", gated=True), SOFTMAX), torch.bfloat16)
    module.experts.way = WAYS[way]
    x = tokens(1, 17, torch.bfloat16)
    y, exact = module(x)[0], slow_experts(module, x[0])
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).abs().max() < 0.02 * exact.abs().max()


# --- what nobody chose, nobody reads ------------------------------------------------------------


@every_kind
@every_way
@torch.no_grad()
def test_experts_that_no_token_chose_are_not_read(kind, way):
    module = made(KINDS[kind])
    module.experts.way = WAYS[way]
    x = tokens(1, 2)
    expected = module(x)
    hit = module.chosen(module.router(x), module.router.correction).experts.unique()
    others = [i for i in range(module.spec.n_experts) if i not in hit]
    assert others
    for parameter in module.experts.parameters():
        parameter[others] = float("nan")
    assert torch.equal(module(x), expected)


# --- training -----------------------------------------------------------------------------------


@every_kind
@every_way
def test_every_way_has_the_same_gradients(kind, way):
    def gradients(way):
        module = made(KINDS[kind])
        module.experts.way = way
        x = tokens(1, 11).requires_grad_()
        module(x).square().sum().backward()
        return [x.grad, *(p.grad for p in module.parameters())], [n for n, _ in module.named_parameters()]

    (expected, names), (found, _) = gradients(looped), gradients(WAYS[way])
    for name, a, b in zip(["x", *names], expected, found, strict=True):
        if name == "router.correction":  # it takes part in a choice, and a choice has no gradient
            assert a is None or a.abs().max() == 0
            continue
        assert a.isfinite().all(), name
        assert a.abs().max() > 0, name
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


# --- the router ---------------------------------------------------------------------------------


def choose(router: Router, logits: list[float], n_active: int = 2, correction=None):
    """The weights of all experts, 0 for those not chosen."""
    spec = ExpertsSpec(len(logits), n_active, Mlp(4, "silu", gated=True), router)
    extra = None if correction is None else torch.tensor(correction)
    weights, experts = Chosen(spec)(torch.tensor([[logits]]), extra)
    return torch.zeros(len(logits)).scatter(0, experts[0, 0], weights[0, 0]).tolist()


def test_the_two_best_of_four_with_and_without_renormalising():
    logits = [2.0, 1.0, 0.0, -1.0]
    exact = {False: [0.643914, 0.236883, 0, 0], True: [0.731059, 0.268941, 0, 0]}
    for renormalise, weights in exact.items():
        assert choose(Router("softmax", renormalise), logits) == pytest.approx(weights, abs=1e-6)
    # The softmax of the chosen logits alone is that of all, renormalised.
    assert choose(Router("chosen_softmax", False), logits) == pytest.approx(exact[True], abs=1e-6)


def test_a_correction_chooses_and_does_not_weigh():
    router = Router("sigmoid", renormalise=False, correction=True)
    weights = choose(router, [0.0, 0.0, 2.0, -2.0], correction=[0.0, -0.1, 0.0, 0.9])
    assert weights == pytest.approx([0, 0, 0.880797, 0.119203], abs=1e-6)


@pytest.mark.parametrize(("score", "chosen"), [("max", [2, 3]), ("top2", [0, 1])])
def test_a_groups_score_is_its_best_or_its_two_best(score, chosen):
    router = Router("chosen_softmax", False, groups=Groups(2, 1, score))
    weights = choose(router, [1.0, 0.9, 1.1, 0.1])
    assert [i for i, weight in enumerate(weights) if weight] == chosen


def test_a_sum_of_nothing_is_not_divided_by():
    weights = choose(Router("sigmoid", True, sum_eps=1e-20), [-200.0, -200.0, -200.0])
    assert weights == [0.0, 0.0, 0.0]


@torch.no_grad()
def test_the_router_is_fp32_in_a_bf16_model():
    """Two logits that bf16 cannot tell apart."""
    module = made(ExpertsSpec(2, 1, Mlp(8, "silu", gated=True), SOFTMAX), torch.bfloat16)
    module.router.weight.zero_()
    module.router.weight[0, :2], module.router.weight[1, :2] = (
        torch.tensor([1.0, 1e-3]),
        torch.tensor([1.0, 0]),
    )
    logits = module.router(torch.ones(1, 1, D))
    assert logits.dtype == torch.float32
    assert logits[0, 0, 0] > logits[0, 0, 1]


# --- the choice of a way ------------------------------------------------------------------------


def test_a_cpu_loops_and_a_model_without_memory_gathers():
    experts = torch.zeros(5, 2, dtype=torch.int64)
    assert way_through(experts, torch.zeros(4, 8, 16)) is looped
    with torch.device("meta"):
        assert way_through(experts, torch.zeros(4, 8, 16)) is gathered


def test_grouped_products_want_rows_of_whole_16_bytes():
    assert can_group(torch.zeros(3, 8, 12))
    assert not can_group(torch.zeros(3, 8, 10))
    assert not can_group(torch.zeros(3, 12, 16, dtype=torch.bfloat16))
    with torch.device("meta"):
        assert can_group(torch.zeros(3, 8, 16, dtype=torch.bfloat16))
        assert not can_group(torch.zeros(3, 8, 16))
