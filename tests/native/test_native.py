"""One token in C against the same token in PyTorch."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from openbook.files.gguf import FORMATS
from openbook.infer.cache import Cache
from openbook.model import ExplicitCore, FusedCore
from openbook.model import norm as model_norm
from openbook.model.attention import Mask, visible
from openbook.model.mlp import Activation
from openbook.model.positions import Rotate, rotation
from openbook.native import (
    NativeActivation,
    NativeCore,
    NativeDecoder,
    NativeNorm,
    NativeRotate,
    NativeUnavailableError,
    accelerate,
)
from openbook.native import build as native_build
from openbook.native.lower import ACTIVATIONS, BLOCKS, Lowering, check_lowers
from openbook.sources import resolve
from openbook.spec.model import (
    Alibi,
    Chunk,
    Head,
    HeadNorm,
    Learned,
    LinearScaling,
    LongRope,
    Mlp,
    Norm,
    QueryTemperature,
    Rope,
    Sinusoidal,
)
from openbook.weights.blocks import Blocks, quantised_matrices
from openbook.weights.load import load_decoder
from openbook.weights.quant import dequantize
from openbook.weights.save_gguf import save_gguf
from variants import GEMMA, LAYER, RMS, VARIANTS, attention, block, model, noisy_decoder, random_ids

LENGTH = 40
REFUSED = {
    "head-norms": "each head's own",
    "alibi": "ALiBi",
    "sinks": "sinks",
    "chunks": "chunks",
    "multipliers": "clamped gate",
    "experts": "experts",
    "routers": "experts",
    "latent": "latent attention",
}
"""Variants with a feature that the runner has no operation for, and how it is called."""

Q = HeadNorm("rms", eps=1e-6, offset=1.0)
WIDE, TURNED = HeadNorm("rms", over="width"), HeadNorm("rms", after_rope=True)
GEGLU = Mlp(70, "gelu_tanh", gated=True)
LONG = LongRope((1.0, 1.1, 1.3), (1.5, 4.0, 8.0), original_positions=12, attention_factor=1.2)
SANDWICH = {"attn_norm": GEMMA, "attn_out_norm": GEMMA, "mlp_norm": GEMMA, "mlp_out_norm": GEMMA}
FAMILIES = {
    "gemma2": model(
        *[block(attn=attention(scale=0.3, softcap=5.0, window=window), mlp=GEGLU, **SANDWICH)
          for window in (7, None, 7)],
        embed_scale=52**0.5, head=Head(tied=True, softcap=3.0), final_norm=GEMMA,
    ),
    "gemma3": model(
        *[block(attn=attention(q_norm=Q, k_norm=Q, n_kv_heads=1, window=w, rope=rope), mlp=GEGLU, **SANDWICH)
          for w, rope in ((9, Rope(6)), (9, Rope(6)), (None, Rope(6, 1e6, scaling=LinearScaling(8.0))))],
        embed_scale=52**0.5, head=Head(tied=True), final_norm=GEMMA,
    ),
    "granite": model(
        *[block(attn=attention(scale=0.1), residual_scale=0.22)] * 2, embed_scale=12.0,
        head=Head(tied=True, scale=0.125),
    ),
    "cohere": model(
        *[block(attn_norm=Norm("layer"), mlp_norm=None, residual="parallel_shared", residual_scale=0.7,
                attn=attention(rope=rope, window=window))
          for rope, window in ((Rope(6, layout="interleaved"), 8), (None, None))],
        head=Head(tied=False, bias=True, scale=0.0625, softcap=0.05),
    ),
    "olmo2": model(
        *[block(attn_norm=None, mlp_norm=None, attn_out_norm=RMS, mlp_out_norm=RMS,
                attn=attention(q_norm=WIDE, k_norm=HeadNorm("layer", over="width")))] * 2,
    ),
    "hunyuan": model(
        block(attn=attention(q_norm=TURNED, k_norm=TURNED)),
        block(attn=attention(q_norm=TURNED, k_norm=Q)),
        block(attn=attention(q_norm=WIDE, k_norm=HeadNorm("rms", weight=False, after_rope=True))),
    ),
    "opt": model(
        *[block(attn=attention(rope=None), mlp=Mlp(70, "relu", False))] * 2, positions=Learned(64, offset=2),
    ),
    "embedding": model(block(), positions=Sinusoidal(), embed_norm=LAYER, embed_scale=3.5),
    "phi": model(
        *[block(attn=attention(rope=Rope(6, scaling=LONG)))] * 2,
    ),
}  # fmt: skip
LOWERED = {name: spec for name, spec in VARIANTS.items() if name not in REFUSED} | FAMILIES
every_variant = pytest.mark.parametrize("name", LOWERED)


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
    decoder = noisy_decoder(LOWERED[name])
    ids = random_ids(decoder.spec, 1, LENGTH)
    torch.testing.assert_close(token_by_token(NativeDecoder(decoder), ids), decoder(ids), atol=1e-5, rtol=0)


@every_variant
@torch.inference_mode()
def test_native_bf16_is_closer_to_fp32_than_pytorch_bf16(name):
    """Its activations are fp32, so only the weights and the cache are rounded."""
    decoder = noisy_decoder(LOWERED[name], torch.bfloat16)
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
    last = native(ids[:1], last_only=True)  # the head alone
    torch.testing.assert_close(last, decoder(ids[:1], last_only=True), atol=1e-6, rtol=0)
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


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & VARIANTS.keys()))
def test_a_spec_that_cannot_be_lowered_is_refused_by_name_and_runs_in_pytorch(name):
    decoder = noisy_decoder(VARIANTS[name])
    with pytest.raises(NativeUnavailableError, match=REFUSED[name]):
        NativeDecoder(decoder)
    assert accelerate(decoder) is decoder


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"alibi": Alibi((0.5,) * 8)}, "ALiBi"),
        ({"sinks": True}, "sinks"),
        ({"window": Chunk(8)}, "chunks"),
        ({"clip_qkv": 0.5}, "clipped"),
        ({"temperature": QueryTemperature(0.1, 8)}, "temperature"),
        ({"k_norm": HeadNorm("rms", over="own")}, "own"),
    ],
)
def test_each_feature_is_refused_wherever_it_stands(changes, feature):
    plain, special = block(), block(attn=attention(**changes))
    check_lowers(model(plain))
    with pytest.raises(NativeUnavailableError, match=feature):
        check_lowers(model(plain, plain, special))


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


@pytest.mark.parametrize("type_name", sorted(BLOCKS))
@torch.inference_mode()
def test_quantised_blocks_give_what_their_decoded_matrix_gives(type_name):
    """Random blocks of every type, scales and all, in the place of every matrix that has whole blocks."""
    ff = 256 if type_name.endswith("_K") else 64
    wide = attention(n_heads=8, n_kv_heads=2, head_dim=32, rope=Rope(32))
    spec = model(*[block(attn=wide, mlp=Mlp(ff, "silu", gated=True))] * 2, d_model=256)
    decoder = noisy_decoder(spec)
    blocks = {}
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 2 and name != "embed.weight":
            blocks[name] = Blocks(type_name, random_blocks(type_name, *parameter.shape))
            parameter.copy_(dequantize(blocks[name].data.numpy(), type_name).view(parameter.shape))
    ids = random_ids(spec, 1, 12)
    quantised, plain = NativeDecoder(decoder, blocks), NativeDecoder(decoder)
    assert quantised.bytes_per_step < plain.bytes_per_step / 3
    expected = token_by_token(plain, ids, prefill=1)
    torch.testing.assert_close(token_by_token(quantised, ids, prefill=1), expected, atol=1e-5, rtol=1e-5)


SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(type_name: str, rows: int, columns: int) -> torch.Tensor:
    """Blocks of random bits; but the scales are small half floats, since random ones would be infinite."""
    size, width = FORMATS[type_name].block_bytes, FORMATS[type_name].block
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(256, (rows, columns // width, size), dtype=torch.uint8, generator=generator)
    largest = {"Q8_0": 1e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 5e-5}.get(type_name, 5e-3)
    for at in SCALES_AT.get(type_name, (0,)):
        small = torch.rand(rows, columns // width, 1, generator=generator) * largest
        data[:, :, at : at + 2] = small.half().view(torch.uint8)
    return data.flatten(1)


def test_matrices_of_a_file_are_views_of_its_blocks(tmp_path):
    decoder = noisy_decoder(
        model(block(attn=attention(head_dim=32, scale=32**-0.5, rope=Rope(32))), d_model=64)
    )
    save_gguf(decoder, tmp_path / "m.gguf", "Q4_1")
    source = resolve(tmp_path / "m.gguf")
    loaded, blocks = load_decoder(source), quantised_matrices(source)
    parameters = dict(loaded.named_parameters())
    assert {"layers.0.attn.q.weight", "layers.0.attn.k.weight", "layers.0.mlp.up.weight"} <= blocks.keys()
    for name, matrix in blocks.items():
        decoded = dequantize(matrix.data.contiguous().numpy(), matrix.type).view(parameters[name].shape)
        assert torch.equal(decoded, parameters[name].detach())


def test_two_models_run_side_by_side_from_two_python_threads():
    """ctypes lets other Python threads run: they share the workers, never a run."""
    decoders = [noisy_decoder(VARIANTS[name]) for name in ("llama", "qwen3")]
    ids = random_ids(decoders[0].spec, 1, LENGTH)

    @torch.inference_mode()
    def generate(decoder):
        native = NativeDecoder(decoder)
        return [token_by_token(native, ids, prefill=1) for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        for decoder, results in zip(decoders, pool.map(generate, decoders), strict=True):
            expected = decoder(ids)
            for result in results:
                torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_runs_on_without_its_parents_threads():
    decoder = noisy_decoder(VARIANTS["llama"])
    native, ids = NativeDecoder(decoder), random_ids(decoder.spec, 1, 9)
    with torch.inference_mode():
        expected = token_by_token(native, ids, prefill=1)
    child = os.fork()
    if child == 0:
        with torch.inference_mode():
            os._exit(0 if torch.equal(token_by_token(native, ids, prefill=1), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


@every_variant
def test_operations_between_two_barriers_do_not_touch_each_others_results(name):
    """They run at once on different threads. A race would show once in a thousand runs; this always."""
    lowered = Lowering(noisy_decoder(LOWERED[name]), {})
    written: set[int] = set()
    read: set[int] = set()
    for op in lowered.ops:
        inputs = {op.a, op.b} - {None}
        results = {op.dst} - {None}
        assert not results & (written | read), op.code
        assert not inputs & written, op.code
        written |= results
        read |= inputs
        if op.barrier:
            written, read = set(), set()
    assert lowered.ops[-1].barrier


SHAPES = [(1, 9, 3, 130, 130, 64), (2, 8, 2, 40, 77, 48), (1, 4, 4, 16, 16, 16), (1, 6, 2, 33, 333, 80)]


@pytest.mark.parametrize(("B", "H", "G", "T", "S", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_native_core_equals_the_explicit_one(B, H, G, T, S, width, dtype):
    """Keys and values lie in a cache whose unwritten cells are NaN; q has its heads beside each other."""
    q = torch.randn(B, T, H, width).to(dtype).transpose(1, 2)
    k, v = (torch.full((B, G, S + 9, width), torch.nan).to(dtype)[:, :, :S] for _ in range(2))
    k.copy_(torch.randn(k.shape))
    v.copy_(torch.randn(v.shape))
    mask, scale = Mask(causal=True), width**-0.5
    native = NativeCore()(q, k, v, mask, scale)
    exact = ExplicitCore()(q.float(), k.float(), v.float(), mask, scale)
    fused = FusedCore()(q, k, v, mask, scale)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1.5 * (fused.float() - exact).abs().max() + 1e-3}[dtype]
    assert native.dtype == dtype
    torch.testing.assert_close(native.float(), exact, atol=float(tolerance), rtol=0)


@torch.inference_mode()
def test_scores_far_apart_do_not_overflow_the_native_core():
    q, k, v = torch.randn(1, 2, 20, 16) * 60, torch.randn(1, 2, 20, 16) * 60, torch.randn(1, 2, 20, 16)
    mask = Mask(causal=True)
    torch.testing.assert_close(NativeCore()(q, k, v, mask, 1.0), ExplicitCore()(q, k, v, mask, 1.0))


def test_what_the_native_core_does_not_do_is_the_fused_ones():
    q, k, v = (
        torch.randn(1, 4, 20, 16, requires_grad=True),
        torch.randn(1, 2, 20, 16),
        torch.randn(1, 2, 20, 16),
    )
    causal, core = Mask(causal=True), NativeCore()
    core(q, k, v, causal, 1.0).sum().backward()
    assert q.grad is not None
    with torch.inference_mode():
        windowed = Mask(visible(torch.arange(20)[None], torch.arange(20)[None], 4))
        biased, sinks = Mask(causal=True, bias=torch.randn(1, 4, 20, 20)), torch.randn(4)
        for mask, *more in ((windowed,), (causal, 3.0), (causal, None, sinks), (biased,)):
            expected = ExplicitCore()(q, k, v, mask, 0.3, *more)
            torch.testing.assert_close(core(q, k, v, mask, 0.3, *more), expected)
        narrow = v[..., :12].clone()
        torch.testing.assert_close(core(q, k, narrow, causal, 0.3), ExplicitCore()(q, k, narrow, causal, 0.3))
        double = [x.double() for x in (q, k, v)]
        assert core(*double, causal, 1.0).dtype == torch.float64


@torch.inference_mode()
def test_an_accelerated_decoder_gives_the_same_logits_for_a_prompt():
    wide = attention(head_dim=16, scale=0.25, rope=Rope(16), q_norm=Q, k_norm=Q)
    local = attention(head_dim=16, scale=0.25, rope=Rope(16), window=11)
    decoder = noisy_decoder(model(block(attn=wide, **SANDWICH), block(attn=local, residual_scale=0.5)))
    ids = random_ids(decoder.spec, 1, LENGTH)
    expected = decoder(ids)
    native = accelerate(decoder)
    assert isinstance(decoder.layers[0].attn.core, NativeCore)
    torch.testing.assert_close(native(ids), expected, atol=1e-5, rtol=0)
    cache = Cache(decoder.spec, 1, LENGTH)
    cache.fill_(float("nan"))
    chunked = [
        native(ids[:, :17], cache=cache),
        native(ids[:, 17:39], cache=cache),
        native(ids[:, 39:], cache=cache),
    ]
    torch.testing.assert_close(torch.cat(chunked, 1), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [Rope(64), Rope(32), Rope(36)])
@torch.inference_mode()
def test_native_rotations_equal_pytorch(rope, dtype):
    x = torch.randn(1, 21, 3, 64).to(dtype).transpose(1, 2)
    by = rotation(rope, torch.arange(1000, 1021)[None])
    turned = NativeRotate(rope)(x, by)
    assert turned.transpose(1, 2).is_contiguous()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]  # one rounding, perhaps the other way
    torch.testing.assert_close(turned, Rotate(rope)(x, by), atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_native_gates_equal_pytorch(kind, dtype):
    """bf16 is rounded once here, and twice in PyTorch: it is compared with fp32."""
    x, gate = torch.randn(2, 19, 83).to(dtype), (torch.randn(2, 19, 83) * 30).to(dtype)
    gate[0, 0, :4] = torch.tensor([0.0, -200.0, 200.0, -0.0])
    exact = Activation(kind)(x.float(), gate.float())
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(NativeActivation(kind)(x, gate).float(), exact, atol=1e-5, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [RMS, LAYER, GEMMA, Norm("rms", weight=False), Norm("layer", weight=False)])
@pytest.mark.parametrize("width", [64, 83])
@torch.inference_mode()
def test_native_norms_equal_pytorch(spec, width, dtype):
    norm = model_norm.Norm(spec, width)
    for parameter in norm.parameters():
        parameter.normal_()
    norm.to(dtype)
    x = torch.randn(2, 11, width) * 7 + 3
    torch.testing.assert_close(NativeNorm(norm)(x), norm(x), atol=2e-6, rtol=2e-6)


@torch.inference_mode()
def test_memory_that_is_not_the_models_is_never_touched():
    """C checks nothing: a position beyond the learned ones, or another model's cache, must not reach it."""
    decoder = noisy_decoder(VARIANTS["gpt2"])  # 64 learned positions
    native, ids = NativeDecoder(decoder), random_ids(decoder.spec, 1, 65)
    cache = Cache(decoder.spec, 1, 70)
    native(ids[:, :63], cache=cache)
    native(ids[:, 63:64], cache=cache)
    with pytest.raises(IndexError):
        native(ids[:, 64:], cache=cache)
    foreign = [Cache(VARIANTS["llama"], 1, 9), Cache(decoder.spec, 2, 9)]
    for other in foreign:
        with pytest.raises(ValueError, match="another model or batch"):
            native(ids[:, :1], cache=other)
        assert other.length == 0
