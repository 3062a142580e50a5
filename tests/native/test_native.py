"""One token in C against the same token in PyTorch."""

import pytest
import torch

from openbook.infer.cache import Cache
from openbook.model import ExplicitCore
from openbook.native import NativeDecoder, NativeUnavailableError, accelerate
from openbook.native import build as native_build
from variants import VARIANTS, noisy_decoder, random_ids

LENGTH = 40
every_variant = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="session", autouse=True)
def compiler():
    try:
        native_build.library()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def token_by_token(run, ids, prefill=7, dtype=torch.float32, capacity=LENGTH):
    cache = Cache(run.spec, 1, capacity, dtype)
    cache.fill_(float("nan"))
    steps = [run(ids[:, :prefill], cache=cache)]
    steps += [run(ids[:, i : i + 1], cache=cache) for i in range(prefill, ids.shape[1])]
    return torch.cat([logits.float() for logits in steps], 1)


@every_variant
@torch.inference_mode()
def test_native_steps_equal_pytorch(name):
    decoder = noisy_decoder(VARIANTS[name])
    ids = random_ids(decoder.spec, 1, LENGTH)
    torch.testing.assert_close(token_by_token(NativeDecoder(decoder), ids), decoder(ids), atol=1e-5, rtol=0)


@every_variant
@torch.inference_mode()
def test_native_bf16_is_closer_to_fp32_than_pytorch_bf16(name):
    """Its activations are fp32, so only the weights and the cache are rounded."""
    decoder = noisy_decoder(VARIANTS[name], torch.bfloat16)
    ids = random_ids(decoder.spec, 1, LENGTH)
    native = token_by_token(NativeDecoder(decoder), ids, prefill=1, dtype=torch.bfloat16)
    torch_bf16 = token_by_token(decoder, ids, prefill=1, dtype=torch.bfloat16)
    exact = decoder.float()
    exact.tie()
    exact = exact(ids)
    assert (native - exact).square().mean() < (torch_bf16 - exact).square().mean()
    torch.testing.assert_close(native, exact, atol=0.05, rtol=0)


@torch.inference_mode()
def test_threads_do_not_change_a_bit():
    decoder = noisy_decoder(VARIANTS["llama"])
    ids = random_ids(decoder.spec, 1, LENGTH)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(token_by_token(NativeDecoder(decoder), ids, prefill=1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@torch.inference_mode()
def test_a_cache_goes_back_and_forth_between_native_and_pytorch():
    decoder = noisy_decoder(VARIANTS["windows"])
    native, ids = NativeDecoder(decoder), random_ids(decoder.spec, 1, LENGTH)
    cache = Cache(decoder.spec, 1, LENGTH)
    cache.fill_(float("nan"))
    steps = [(native if i % 3 else decoder)(ids[:, i : i + 1], cache=cache) for i in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, 1), decoder(ids), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_what_native_does_not_do_is_the_decoders():
    decoder = noisy_decoder(VARIANTS["llama"])
    native, ids = NativeDecoder(decoder), random_ids(decoder.spec, 2, 9)
    assert torch.equal(native(ids), decoder(ids))
    assert torch.equal(native(ids, last_only=True), decoder(ids, last_only=True))
    positions = torch.tensor([[-1, 0, 1], [0, 1, 2]])
    cache = Cache(decoder.spec, 2, 9)
    native(ids[:, :3], positions, cache)
    assert cache.padded
    assert native(ids[:, 3:4], torch.tensor([[2], [3]]), cache).shape == (2, 1, 131)


@torch.inference_mode()
def test_a_token_outside_the_vocabulary_is_refused_before_memory_is_read():
    decoder = noisy_decoder(VARIANTS["llama"])
    native, cache = NativeDecoder(decoder), Cache(decoder.spec, 1, 9)
    for bad in (-1, 131, 2**62):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            native(torch.tensor([[bad]]), cache=cache)
    assert cache.length == 0


def test_unsupported_weights_fall_back_to_pytorch(monkeypatch):
    decoder = noisy_decoder(VARIANTS["llama"], torch.float16)
    assert accelerate(decoder) is decoder
    decoder = noisy_decoder(VARIANTS["llama"])
    decoder.layers[0].attn.core = ExplicitCore()
    with pytest.raises(NativeUnavailableError, match="core"):
        NativeDecoder(decoder)


def test_without_a_compiler_everything_runs_in_pytorch(monkeypatch, tmp_path):
    native_build.library.cache_clear()
    monkeypatch.setenv("OPENBOOK_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/bin/false")
    decoder = noisy_decoder(VARIANTS["llama"])
    try:
        assert accelerate(decoder) is decoder
        monkeypatch.setenv("OPENBOOK_NATIVE", "0")
        with pytest.raises(NativeUnavailableError, match="OPENBOOK_NATIVE"):
            native_build.library()
    finally:
        native_build.library.cache_clear()
