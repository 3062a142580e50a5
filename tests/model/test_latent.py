"""Latent attention: its formula written out, and its two orders of one product against each other."""

import pytest
import torch

from openbook.infer.cache import Cache
from openbook.model.attention import Mask, Place
from openbook.model.positions import rotation
from openbook.spec.model import Norm, Rope
from variants import RMS, K, block, latent, model, noisy_decoder, random_ids

KINDS = {
    "without q_rank": latent(),
    "with q_rank": latent(q_rank=22, q_norm=RMS, down_bias=True, o_bias=True),
    "no rope": latent(rope=None, scale=0.6),
    "half": latent(rope=Rope(K, 500.0), kv_norm=Norm("layer", bias=True)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def rms(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, position, base):
    """Adjacent pairs as complex numbers, multiplied by e^(i·angle)."""
    angles = position / base ** (torch.arange(0, len(x), 2).double() / len(x))
    return torch.view_as_real(
        torch.view_as_complex(x.view(-1, 2)) * torch.polar(torch.ones_like(angles), angles)
    ).flatten()


@torch.no_grad()
def test_it_is_the_papers_formula():
    """One query head and one pair of tokens after the other, in double precision."""
    spec = KINDS["with q_rank"]
    module = noisy_decoder(model(block(attn=spec))).layers[0].attn
    p = {name: parameter.double() for name, parameter in module.named_parameters()}
    H, N, R, U, C = spec.n_heads, spec.nope_dim, spec.rope_dim, spec.v_dim, spec.kv_rank
    T = 5
    x = torch.randn(1, T, 52, generator=torch.Generator().manual_seed(0))
    heads = torch.zeros(T, H, U, dtype=torch.float64)
    q_up = p["q_up.weight"].view(H, N + R, -1)
    kv_up = p["kv_up.weight"].view(H, N + U, C)
    for t in range(T):
        c_q = rms(p["q_down.weight"] @ x[0, t].double() + p["q_down.bias"], p["q_norm.weight"])
        for h in range(H):
            q, scores, values = q_up[h] @ c_q, [], []
            for s in range(t + 1):
                down = p["kv_down.weight"] @ x[0, s].double() + p["kv_down.bias"]
                k_v = kv_up[h] @ rms(down[:C], p["kv_norm.weight"])
                own = q[:N] @ k_v[:N]
                shared = turned(q[N:], t, 10_000.0) @ turned(down[C:], s, 10_000.0)
                scores.append(spec.scale * (own + shared))
                values.append(k_v[N:])
            heads[t, h] = torch.stack(scores).softmax(0) @ torch.stack(values)
    expected = heads.flatten(1) @ p["o.weight"].T + p["o.bias"]
    place = Place(Mask(causal=True), rotation(spec.rope, torch.arange(T)[None]))
    torch.testing.assert_close(module(x, place)[0].double(), expected, atol=1e-5, rtol=1e-5)


@every_kind
@torch.no_grad()
def test_absorbed_equals_expanded(kind):
    spec = KINDS[kind]
    module = noisy_decoder(model(block(attn=spec))).layers[0].attn
    H, N, R, C = spec.n_heads, spec.nope_dim, spec.rope_dim, spec.kv_rank
    q, q_rotated = torch.randn(2, H, 3, N), torch.randn(2, H, 3, R)
    latents = torch.randn(2, 1, 8, C + R)
    place = Place(Mask(causal=True))
    expanded = module._expanded(q, q_rotated, latents, place)
    torch.testing.assert_close(module._absorbed(q, q_rotated, latents, place), expanded, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_is_cached_is_expanded_only_where_that_is_cheaper():
    """A latent of 14 and heads of 4 + 5: 14 · 9 / (28 - 9) is between 6 and 7 new tokens."""
    spec = latent()
    assert [spec.absorbs(new, 1) for new in (1, 6, 7)] == [True, True, False]
    assert not spec.absorbs(1, 0)
    decoder = noisy_decoder(model(block(attn=spec)))
    taken = []
    attn = decoder.layers[0].attn
    for name in ("q_absorb", "v_absorb", "kv_up"):
        attn.get_submodule(name).register_forward_hook(lambda *_, name=name: taken.append(name))
    cache, ids = Cache(decoder.spec, 1, 30), random_ids(decoder.spec, 1, 30)
    for first, last, expected in (
        (0, 1, ["kv_up"]),
        (1, 2, ["q_absorb", "v_absorb"]),
        (2, 8, ["q_absorb", "v_absorb"]),
        (8, 15, ["kv_up"]),
    ):
        taken.clear()
        decoder(ids[:, first:last], cache=cache)
        assert taken == expected


def test_a_cached_token_is_its_latent_and_its_rotated_part():
    cache = Cache(model(block(attn=latent()), block(attn=latent(window=3))), 2, 10)
    assert cache.nbytes == 2 * 4 * (14 + K) * (10 + 3)
    # DeepSeek-V3: 61 layers of 512 + 64 numbers, 70,272 bytes a token in bf16.
    layer = block(attn=latent(n_heads=128, nope_dim=128, v_dim=128, rope_dim=64, kv_rank=512, rope=Rope(64)))
    cache = Cache(model(*[layer] * 61), 1, 7, torch.bfloat16, "meta")
    assert cache.nbytes == 7 * 70_272


@every_kind
def test_gradients_reach_every_parameter(kind):
    decoder = noisy_decoder(model(block(attn=KINDS[kind])))
    decoder(random_ids(decoder.spec, 2, 9)).square().sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
