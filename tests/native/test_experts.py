"""The experts of a few tokens in C against the same in PyTorch."""

import pytest
import torch

from openbook.model.experts import Choice, FeedForwards, looped
from openbook.native import NativeDecoder, NativeUnavailableError, accelerate, native_experts
from openbook.native import build as native_build
from openbook.native.modules import MOST_ROWS, NativeRuns
from openbook.spec.model import Experts, Mlp, Router
from variants import VARIANTS, noisy_decoder, random_ids

KINDS = {
    "plain": Experts(12, 3, Mlp(36, "silu", gated=True), Router("softmax", True)),
    "odd sizes": Experts(7, 2, Mlp(35, "gelu", gated=False, up_bias=True), Router("softmax", False)),
    "biased and clamped": Experts(
        10, 4, Mlp(64, "gelu_quick", True, True, True, clamp=0.3, up_offset=1.0), Router("sigmoid", False)
    ),
    "on input": Experts(9, 1, Mlp(32, "relu2", gated=False), Router("sigmoid", False, on_input=True)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        native_build.library()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def made(spec: Experts, width: int, dtype=torch.float32) -> FeedForwards:
    experts = FeedForwards(spec, width)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return experts.to(dtype)


def chosen(spec: Experts, tokens: int) -> Choice:
    generator = torch.Generator().manual_seed(1)
    ranks = torch.rand(1, tokens, spec.n_experts, generator=generator)
    return Choice(
        torch.rand(1, tokens, spec.n_active, generator=generator), ranks.topk(spec.n_active).indices
    )


def run(experts: FeedForwards, way, x, choice):
    experts.way = way
    with torch.inference_mode():
        return experts(x, choice)


@every_kind
@pytest.mark.parametrize("width", [52, 61, 128])
@pytest.mark.parametrize("tokens", [1, 2, 3, 13])
def test_few_tokens_in_c_equal_pytorch(kind, width, tokens):
    experts, choice = made(KINDS[kind], width), chosen(KINDS[kind], tokens)
    x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(2))
    expected = run(experts, looped, x, choice)
    difference = (run(experts, native_experts, x, choice) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()


@every_kind
def test_bf16_in_c_is_nearer_to_fp32_than_pytorch_bf16(kind):
    spec = KINDS[kind]
    experts, choice = made(spec, 64, torch.bfloat16), chosen(spec, 9)
    x = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    native, plain = (run(experts, way, x, choice) for way in (native_experts, looped))
    exact = run(experts.float(), looped, x.float(), choice)
    assert native.dtype == torch.bfloat16
    assert (native - exact).square().mean() <= (plain - exact).square().mean()
    assert (native - exact).abs().max() < 0.01 * exact.abs().max()


def test_c_reads_no_expert_that_was_not_chosen():
    spec = KINDS["biased and clamped"]
    experts, choice = made(spec, 52), chosen(spec, 1)
    x = torch.randn(1, 1, 52)
    expected = run(experts, native_experts, x, choice)
    others = [i for i in range(spec.n_experts) if i not in choice.experts]
    for parameter in experts.parameters():
        parameter.data[others] = float("nan")
    assert torch.equal(run(experts, native_experts, x, choice), expected)


def test_threads_do_not_change_a_bit():
    spec = KINDS["plain"]
    experts, choice, x = made(spec, 61), chosen(spec, 5), torch.randn(1, 5, 61)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(run(experts, native_experts, x, choice))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("why", ["a gradient", "many tokens", "fp16", "a transposed matrix"])
def test_what_c_does_not_do_pytorch_does(why, monkeypatch):
    def never(*_):
        raise AssertionError("C was called")

    monkeypatch.setattr(NativeRuns, "linear", never)
    spec = KINDS["plain"]
    tokens = MOST_ROWS[torch.float32] * spec.n_experts // spec.n_active + (why == "many tokens")
    dtype = torch.float16 if why == "fp16" else torch.float32
    experts, choice = made(spec, 52, dtype), chosen(spec, tokens)
    x = torch.randn(1, tokens, 52).to(dtype)
    if why == "a transposed matrix":
        experts.down.weight.data = experts.down.weight.data.mT.contiguous().mT
    experts.way = native_experts
    with torch.set_grad_enabled(why == "a gradient"):
        result = experts(x, choice)
    assert torch.equal(result, run(experts, looped, x, choice))


@pytest.mark.parametrize("name", ["experts", "routers", "latent", "sinks"])
@torch.inference_mode()
def test_a_model_without_native_steps_still_has_native_modules(name):
    decoder = noisy_decoder(VARIANTS[name])
    ids = random_ids(decoder.spec, 2, 33)
    expected = decoder(ids)
    engine = accelerate(decoder)
    assert not isinstance(engine, NativeDecoder)
    torch.testing.assert_close(engine(ids), expected, atol=1e-5, rtol=0)
    found = [module.way for module in decoder.modules() if isinstance(module, FeedForwards)]
    assert all(way is native_experts for way in found)
    assert bool(found) == (name in ("experts", "routers"))
