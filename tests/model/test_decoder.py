"""The forward pass: its parts against formulas written out, its two cores against each other."""

import math

import pytest
import torch

from openbook.model import Decoder, ExplicitCore, init_weights
from openbook.model.attention import FusedCore, Mask, visible
from openbook.model.norm import Norm
from openbook.model.positions import Rotate, SinusoidalPositions, frequencies, rotation
from openbook.spec.model import DynamicScaling, Llama3Scaling, Rope, Sinusoidal, YarnScaling
from openbook.spec.model import Norm as NormSpec
from variants import RMS, VARIANTS, K, attention, block, model, noisy_decoder, random_ids

every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_variant
@torch.no_grad()
def test_the_fused_core_equals_the_explicit_one(name):
    decoder = noisy_decoder(VARIANTS[name])
    ids = random_ids(decoder.spec, 3, 23)
    fused = decoder(ids)
    for layer in decoder.layers:
        layer.attn.core = ExplicitCore()
    torch.testing.assert_close(decoder(ids), fused, atol=1e-5, rtol=0)


@every_variant
@torch.no_grad()
def test_a_token_never_sees_a_later_one(name):
    decoder = noisy_decoder(VARIANTS[name])
    ids = random_ids(decoder.spec, 1, 14)
    changed = ids.clone()
    changed[0, 9] = (ids[0, 9] + 1) % decoder.spec.vocab_size
    before, after = decoder(ids), decoder(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], atol=1e-6, rtol=0)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-5


@every_variant
@torch.no_grad()
def test_a_left_padded_row_equals_the_row_alone(name):
    decoder = noisy_decoder(VARIANTS[name])
    rows = [random_ids(decoder.spec, 1, n, seed=n) for n in (3, 11, 7)]
    ids, positions = torch.zeros(3, 11, dtype=torch.int64), torch.full((3, 11), -1)
    for i, row in enumerate(rows):
        ids[i, 11 - row.shape[1] :] = row
        positions[i, 11 - row.shape[1] :] = torch.arange(row.shape[1])
    together = decoder(ids, positions)
    assert together.isfinite().all()
    for i, row in enumerate(rows):
        torch.testing.assert_close(together[i : i + 1, 11 - row.shape[1] :], decoder(row), atol=1e-5, rtol=0)


def test_padding_gives_finite_gradients():
    decoder = noisy_decoder(VARIANTS["windows"]).train()
    positions = torch.tensor([[-1, -1, -1, 0, 1], [0, 1, 2, 3, 4]])
    logits = decoder(random_ids(decoder.spec, 2, 5), positions)
    logits[positions >= 0].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())


@torch.no_grad()
def test_a_window_of_4_sees_itself_and_three_before():
    decoder = noisy_decoder(model(block(attn=attention(window=4))))
    ids = random_ids(decoder.spec, 1, 10)
    for distance, moves in ((4, False), (3, True)):
        changed = ids.clone()
        changed[0, 9 - distance] = (ids[0, 9 - distance] + 1) % decoder.spec.vocab_size
        difference = (decoder(ids) - decoder(changed))[0, 9].abs().max()
        assert (difference > 1e-4) == moves
        assert moves or difference <= 1e-6


def test_what_queries_see_is_aligned_to_the_last_key():
    keys = torch.arange(5)[None]
    table = visible(torch.tensor([[3, 4]]), keys, None)[0, 0].int().tolist()
    assert table == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    counts = visible(torch.arange(10)[None], torch.arange(10)[None], 4)[0, 0].sum(-1).tolist()
    assert counts == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


def test_query_heads_of_a_group_read_one_key_head():
    """4 query heads, 2 key/value heads holding 0 and 1: heads 0 and 1 read 0, heads 2 and 3 read 1."""
    v = torch.stack((torch.zeros(3, K), torch.ones(3, K)))[None]
    q, k = torch.randn(1, 4, 3, K), torch.randn(1, 2, 3, K)
    for core in (ExplicitCore(), FusedCore()):
        read = core(q, k, v, Mask(causal=True), 1.0)[0].amax((1, 2))
        assert read.tolist() == pytest.approx([0, 0, 1, 1])


def test_a_query_that_sees_nothing_gets_zeros():
    mask = Mask(visible=torch.zeros(1, 1, 2, 3, dtype=torch.bool))
    y = ExplicitCore()(torch.randn(1, 4, 2, K), torch.randn(1, 2, 3, K), torch.randn(1, 2, 3, K), mask, 1.0)
    assert y.abs().max() == 0


@torch.no_grad()
def test_last_only_is_the_last_row():
    decoder = noisy_decoder(VARIANTS["llama"])
    ids = random_ids(decoder.spec, 2, 9)
    torch.testing.assert_close(decoder(ids, last_only=True), decoder(ids)[:, -1:], atol=1e-6, rtol=0)


# --- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@torch.no_grad()
def test_a_norm_is_its_formula(kind, offset):
    norm = Norm(NormSpec(kind, eps=1e-2, bias=True, offset=offset), 7)
    norm.weight.normal_()
    norm.bias.normal_()
    x = torch.randn(3, 7)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    expected = (
        centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt() * (offset + norm.weight) + norm.bias
    )
    torch.testing.assert_close(norm(x), expected)
    half = norm(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.05, rtol=0.02)


# --- positions ----------------------------------------------------------------------------------


def test_llama_3_keeps_29_frequencies_blends_6_and_divides_29():
    base = frequencies(Rope(128, 5e5))
    scaled = frequencies(Rope(128, 5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)))
    ratio = base / scaled
    assert (ratio == 1).sum() == 29
    assert (ratio == 8).sum() == 29
    for i, value in {28: 3.2114460e-3, 29: 2.1665708e-3, 34: 1.7850781e-4, 63: 3.0689260e-7}.items():
        assert scaled[i].item() == pytest.approx(value, rel=1e-6)
    assert ratio[29].item() == pytest.approx(1.20748387, rel=1e-6)
    assert ratio[34].item() == pytest.approx(5.25732659, rel=1e-6)


def test_llama_3_2_keeps_15_frequencies_blends_3_and_divides_14():
    scaled = frequencies(Rope(64, 5e5, scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)))
    ratio = frequencies(Rope(64, 5e5)) / scaled
    assert (ratio == 1).sum() == 15
    assert (ratio == 32).sum() == 14
    assert scaled[15].item() == pytest.approx(1.2905479e-3, rel=1e-6)
    assert scaled[31].item() == pytest.approx(9.4183067e-8, rel=1e-6)


def test_yarn_scales_cosine_and_sine():
    cos, sin = rotation(Rope(8, scaling=YarnScaling(4.0, 32, 0.1 * math.log(4) + 1)), torch.tensor([[0]]))
    assert cos.unique().item() == pytest.approx(1.138629, abs=1e-6)
    assert sin.abs().max() == 0


def test_dynamic_frequencies_belong_to_each_rows_own_length():
    rope = Rope(8, scaling=DynamicScaling(2.0, 16))
    positions = torch.stack((torch.arange(20), torch.arange(20) - 10))
    both = rotation(rope, positions)
    torch.testing.assert_close(both.cos[:1], rotation(rope, positions[:1]).cos, atol=0, rtol=0)
    short = rotation(rope, torch.arange(10)[None])
    torch.testing.assert_close(both.cos[1:, :, 10:], short.cos, atol=0, rtol=0)
    within, beyond = (rotation(rope, torch.arange(n)[None]) for n in (16, 17))
    assert torch.equal(within.cos, rotation(Rope(8), torch.arange(16)[None]).cos)
    assert not torch.equal(beyond.cos, rotation(Rope(8), torch.arange(17)[None]).cos)


def test_a_rotation_is_a_complex_multiplication_in_either_layout():
    x, positions = (
        torch.randn(1, 2, 5, 10, dtype=torch.float64).float(),
        torch.tensor([[0, 1, 257, 4095, 9000]]),
    )
    for layout, pairs in (
        ("half", lambda x: (x[..., :4], x[..., 4:8])),
        ("interleaved", lambda x: (x[..., 0:8:2], x[..., 1:8:2])),
    ):
        rope = Rope(8, layout=layout)
        turned = Rotate(rope)(x, rotation(rope, positions))
        angles = positions[0, :, None].double() * frequencies(rope).double()
        a, b = pairs(x.double())
        expected = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
        got = torch.complex(*pairs(turned.double()))
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)  # fp32 angles: 9000 · 2⁻²³ radians
        torch.testing.assert_close(got[:, :, :3], expected[:, :, :3], atol=1e-4, rtol=0)
        assert torch.equal(turned[..., 8:], x[..., 8:])


@torch.no_grad()
def test_angles_stay_fp32_when_the_model_is_bf16():
    """bf16 cannot hold 257. The error of a bf16 run must not grow with the position."""
    decoder = noisy_decoder(model(block()))
    ids = random_ids(decoder.spec, 1, 2)
    far = [torch.tensor([[p, p + 1]]) for p in (256, 257, 258, 4094)]
    exact = [decoder(ids, p) for p in far]
    decoder.to(torch.bfloat16)
    decoder.tie()
    errors = [(decoder(ids, p).float() - e).abs().max().item() for p, e in zip(far, exact, strict=True)]
    assert max(errors) < 0.05
    assert rotation(Rope(2, base=1.0), torch.tensor([[257]])).cos.item() == pytest.approx(0.8193055, abs=1e-6)


def test_sinusoidal_positions_are_the_papers():
    table = SinusoidalPositions(Sinusoidal(), 6)(torch.tensor([[0, 3]]))[0]
    assert table[0].tolist() == [0, 1, 0, 1, 0, 1]
    expected = [f(3 / 10000 ** (2 * i / 6)) for i in range(3) for f in (math.sin, math.cos)]
    assert table[1].tolist() == pytest.approx(expected, abs=1e-6)


# --- building -----------------------------------------------------------------------------------


@every_variant
def test_a_model_on_the_meta_device_allocates_nothing(name):
    with torch.device("meta"):
        decoder = Decoder(VARIANTS[name])
        logits = decoder(torch.zeros(2, 5, dtype=torch.int64))
    assert {p.device.type for p in decoder.parameters()} == {"meta"}
    assert logits.shape == (2, 5, 131)


def test_a_tied_head_is_the_embedding():
    decoder = Decoder(VARIANTS["qwen3"])
    assert decoder.head.weight is decoder.embed.weight
    assert decoder.to(torch.bfloat16).head.weight.dtype == torch.bfloat16


def test_starting_values_depend_on_the_seed_and_the_name_alone():
    one, two = (init_weights(Decoder(VARIANTS["llama"]), seed=3) for _ in range(2))
    other = init_weights(Decoder(VARIANTS["llama"]), seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.embed.weight, other.embed.weight)
    assert not torch.equal(one.layers[0].mlp.up.weight, one.layers[1].mlp.up.weight)
    assert all(p.isfinite().all() for p in one.parameters())
    assert Norm(RMS, 4).weight.shape == (4,)


@pytest.mark.parametrize(
    ("T", "S"), [(64, 64), (65, 65), (200, 200), (100, 140), (1, 9), (1100, 1100), (1030, 1100)]
)
def test_blocks_of_queries_equal_the_triangle(T, S):
    """Whichever way `causal_attention` cuts the work."""
    q, k, v = torch.randn(2, 4, T, K), torch.randn(2, 2, S, K), torch.randn(2, 2, S, K)
    mask = Mask(causal=True)
    torch.testing.assert_close(FusedCore()(q, k, v, mask, 0.4), ExplicitCore()(q, k, v, mask, 0.4))
