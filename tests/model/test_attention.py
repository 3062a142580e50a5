"""What attention can do beside the plain: each against its formula written out, or numbers by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from openbook.model import ExplicitCore, FusedCore
from openbook.model.attention import Mask, linear_biases, visible
from openbook.model.mlp import Activation
from openbook.model.norm import HeadNorm
from openbook.model.positions import frequencies_for, rotation, temperature
from openbook.spec.model import (
    Alibi,
    Chunk,
    Head,
    Learned,
    LongRope,
    QueryTemperature,
    Rope,
)
from openbook.spec.model import HeadNorm as HeadNormSpec
from variants import K, attention, block, model, noisy_decoder, random_ids

# --- what a query sees --------------------------------------------------------------------------


def test_a_chunk_of_3_starts_at_every_third_position():
    positions = torch.arange(8)[None]
    seen = visible(positions, positions, Chunk(3))[0, 0]
    assert seen.sum(-1).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert seen[4].tolist() == [False, False, False, True, True, False, False, False]


def test_padding_before_a_chunk_is_not_of_it():
    positions = torch.tensor([[-1, -1, 0, 1, 2]])
    seen = visible(positions, positions, Chunk(4))[0, 0]
    assert seen[2].tolist() == [False, False, True, False, False]
    assert seen[0].any()


@torch.no_grad()
def test_the_second_chunk_does_not_hear_the_first():
    decoder = noisy_decoder(model(block(attn=attention(window=Chunk(5)))))
    ids = random_ids(decoder.spec, 1, 10)
    changed = ids.clone()
    changed[0, 4] = (ids[0, 4] + 1) % decoder.spec.vocab_size
    difference = (decoder(ids) - decoder(changed))[0].abs().amax(-1)
    assert difference[4] > 1e-4
    assert difference[5:].max() == 0


# --- linear biases ------------------------------------------------------------------------------

SLOPES = tuple(2.0**-n for n in range(1, 9))


def test_a_linear_bias_is_the_slope_times_how_far_back():
    bias = linear_biases(Alibi(SLOPES), torch.tensor([[3, 4]]), torch.arange(5)[None])
    assert bias.shape == (1, 8, 2, 5)
    assert bias[0, 1, 0].tolist() == [-0.75, -0.5, -0.25, 0.0, 0.25]
    assert bias[0, 0, 1].tolist() == [-2.0, -1.5, -1.0, -0.5, 0.0]


@pytest.mark.parametrize(
    ("batch", "T", "heads", "kv_heads"), [(3, 1, 8, 2), (2, 5, 8, 2), (2, 1, 8, 8), (1, 6, 8, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_core_adds_biases_as_the_explicit_one(batch, T, heads, kv_heads, dtype):
    q = torch.randn(batch, heads, T, K).to(dtype)
    k, v = (torch.randn(batch, kv_heads, 9, K).to(dtype) for _ in "kv")
    queries, keys = torch.arange(9 - T, 9)[None], torch.arange(9)[None]
    bias = linear_biases(Alibi(SLOPES), queries, keys)
    each_row = torch.ones(batch, 1, 1, 9, dtype=torch.bool)
    each_row[0, ..., :3] = False
    for seen in (
        visible(queries, keys, None),
        visible(queries, keys, 4),
        visible(queries, keys, None) & each_row,
    ):
        mask = Mask(seen, bias=bias)
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(
            FusedCore()(q, k, v, mask, 0.4),
            ExplicitCore()(q, k, v, mask, 0.4),
            atol=tolerance,
            rtol=tolerance,
        )


# --- sinks --------------------------------------------------------------------------------------


def test_a_sink_is_a_key_with_a_score_of_its_own_and_no_value():
    q, k, v = torch.randn(2, 4, 3, K), torch.randn(2, 2, 5, K), torch.randn(2, 2, 5, K)
    sinks = torch.tensor([0.5, -2.0, 3.0, 40.0])
    y = FusedCore()(q, k, v, Mask(causal=True), 0.7, None, sinks)
    for b, h, t in ((b, h, t) for b in range(2) for h in range(4) for t in range(3)):
        scores = [0.7 * q[b, h, t] @ k[b, h // 2, s] for s in range(3 + t)]
        probs = torch.stack([*scores, sinks[h]]).softmax(0)[:-1]
        torch.testing.assert_close(y[b, h, t], probs @ v[b, h // 2, : 3 + t])
    assert y[:, 3].abs().max() < 1e-6  # nearly all of the softmax goes to a score of 40


def test_values_may_be_of_another_width():
    q, k, v = torch.randn(2, 8, 4, 6), torch.randn(2, 2, 7, 6), torch.randn(2, 2, 7, 5)
    one = torch.stack([
        F.scaled_dot_product_attention(q[:, h], k[:, h // 4], v[:, h // 4], scale=0.3) for h in range(8)
    ], dim=1)  # fmt: skip
    torch.testing.assert_close(FusedCore()(q, k, v, Mask(), 0.3), one)


# --- norms, clips and temperatures --------------------------------------------------------------


@pytest.mark.parametrize("over", ["head", "own", "width"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@torch.no_grad()
def test_a_head_norm_is_over_one_head_or_all(over, kind):
    norm = HeadNorm(HeadNormSpec(kind, eps=1e-2, bias=True, offset=1.0, over=over), 4, K)
    assert norm.weight.shape == {"head": (K,), "own": (4, K), "width": (4 * K,)}[over]
    norm.weight.normal_()
    norm.bias.normal_()
    x = torch.randn(2, 4, 3, K)
    together = (1, 3) if over == "width" else (3,)
    centred = x - x.mean(together, keepdim=True) if kind == "layer" else x
    y = centred / (centred.square().mean(together, keepdim=True) + 1e-2).sqrt()
    weight, bias = (p.view(-1, 1, K) for p in (norm.weight, norm.bias))
    torch.testing.assert_close(norm(x), y * (1 + weight) + bias)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
def test_a_norm_comes_on_its_side_of_the_rotation():
    """Weights that differ within a pair do not commute with turning it."""
    before, after = (
        noisy_decoder(model(block(attn=attention(q_norm=HeadNormSpec("rms", after_rope=late)))))
        for late in (False, True)
    )
    ids = random_ids(before.spec, 1, 9)
    difference = (before(ids) - after(ids)).abs().amax(-1)[0]
    assert difference[0] < 1e-6  # position 0 is not turned
    assert difference[1:].min() > 1e-5


@torch.no_grad()
def test_queries_keys_and_values_are_clipped():
    attn = noisy_decoder(model(block(attn=attention(clip_qkv=0.25, q_bias=True)))).layers[0].attn
    x = 20 * torch.randn(2, 5, 52)
    for project in (attn.q, attn.k, attn.v):
        assert project(x).abs().max() == 0.25
        torch.testing.assert_close(project(x), F.linear(x, project.weight, project.bias).clamp(-0.25, 0.25))


def test_the_temperature_grows_with_every_interval():
    warm = temperature(QueryTemperature(0.1, 8192), torch.tensor([[-1, 0, 8190, 8191, 16383]]))
    expected = [1, 1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)]
    assert warm.shape == (1, 1, 5, 1)
    assert warm.flatten().tolist() == pytest.approx(expected, abs=1e-6)


@torch.no_grad()
def test_a_warmed_query_is_the_query_at_a_larger_scale():
    """All positions of a run in which ⌊(p + 1) / interval⌋ is 1."""
    warm = noisy_decoder(model(block(attn=attention(temperature=QueryTemperature(0.5, 16)))))
    scaled = noisy_decoder(model(block(attn=attention(scale=K**-0.5 * (1 + 0.5 * math.log(2))))))
    ids, positions = random_ids(warm.spec, 1, 9), torch.arange(15, 24)[None]
    torch.testing.assert_close(warm(ids, positions), scaled(ids, positions), atol=1e-5, rtol=0)


# --- long ropes ---------------------------------------------------------------------------------

LONG = Rope(8, scaling=LongRope((1.0, 1.5, 2.0, 4.0), (2.0, 3.0, 8.0, 64.0), 16, attention_factor=1.25))


def test_a_run_beyond_the_original_length_has_the_long_divisors():
    plain = 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8)
    lengths = torch.tensor([[16], [17]])
    short, long = frequencies_for(LONG, LONG.scaling, lengths)[:, 0]
    torch.testing.assert_close(plain / short, torch.tensor([1.0, 1.5, 2.0, 4.0]))
    torch.testing.assert_close(plain / long, torch.tensor([2.0, 3.0, 8.0, 64.0]))


def test_a_rows_own_length_or_the_capacity_chooses_the_divisors():
    within, beyond = (rotation(LONG, torch.arange(n)[None]) for n in (16, 17))
    assert not torch.equal(within.cos, beyond.cos[:, :, :16])
    sized = rotation(LONG, torch.arange(16)[None], capacity=40)
    assert torch.equal(sized.cos, beyond.cos[:, :, :16])
    both = rotation(LONG, torch.stack((torch.arange(17), torch.arange(17) - 1)))
    assert torch.equal(both.cos[:1], beyond.cos)
    assert torch.equal(both.cos[1:, :, 1:], within.cos)


def test_the_attention_factor_scales_cosine_and_sine_of_short_runs_too():
    cos, sin = rotation(LONG, torch.arange(3)[None])
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, 1.25**2))


# --- what multiplies the stream and the logits --------------------------------------------------


@torch.no_grad()
def test_multipliers_multiply_what_they_say():
    scaled = noisy_decoder(
        model(block(residual_scale=0.5), embed_scale=3.0, head=Head(False, scale=0.25, softcap=2.0))
    )
    plain = noisy_decoder(model(block()))
    plain.embed.weight *= 3
    plain.layers[0].attn.o.weight *= 0.5
    plain.layers[0].mlp.down.weight *= 0.5
    ids = random_ids(plain.spec, 1, 7)
    expected = 2 * torch.tanh(plain(ids) * 0.25 / 2)
    torch.testing.assert_close(scaled(ids), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_position_p_reads_row_p_plus_offset():
    shifted = noisy_decoder(model(block(), positions=Learned(64, offset=2)))
    plain = noisy_decoder(model(block(), positions=Learned(64)))
    assert shifted.positions.weight.shape[0] == 66
    plain.positions.weight.copy_(shifted.positions.weight[2:])
    ids = random_ids(plain.spec, 1, 64)
    torch.testing.assert_close(shifted(ids), plain(ids), atol=1e-6, rtol=0)


def test_a_clamped_gate_cuts_one_side_of_it_and_both_of_up():
    """gpt-oss: (clamp(up, ±7) + 1) · g · sigmoid(1.702 g), g = min(gate, 7)."""
    gate, up = torch.tensor([-9.0, 2.0, 9.0]), torch.tensor([9.0, -9.0, 3.0])
    g, u = torch.tensor([-9.0, 2.0, 7.0]), torch.tensor([7.0, -7.0, 3.0])
    expected = (u + 1) * g * torch.sigmoid(1.702 * g)
    torch.testing.assert_close(Activation("gelu_quick", 7.0, 1.0)(up, gate), expected)
