"""Decoders to generate with: random tiny ones of several kinds, and one that says what it is told to."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from openbook.infer.cache import Cache
from openbook.model import Decoder, init_weights
from openbook.spec.model import (
    Attention,
    Block,
    Chunk,
    Experts,
    Head,
    LatentAttention,
    Learned,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    Router,
    Shared,
)

RMS, LAYER = Norm("rms"), Norm("layer", bias=True)


def _llama(window: int | None = None) -> ModelSpec:
    def block(window: int | None) -> Block:
        attn = Attention(8, 2, 6, scale=6**-0.5, rope=Rope(6), window=window)
        return Block(attn, Mlp(56, "silu", gated=True), attn_norm=RMS, mlp_norm=RMS)

    layers = (block(window), block(None), block(window))
    return ModelSpec(97, 40, 64, layers, Head(tied=False), final_norm=RMS)


def _gpt2() -> ModelSpec:
    attn = Attention(4, 4, 10, scale=10**-0.5, q_bias=True, k_bias=True, v_bias=True, o_bias=True)
    mlp = Mlp(72, "gelu_tanh", gated=False, up_bias=True, down_bias=True)
    block = Block(attn, mlp, attn_norm=LAYER, mlp_norm=LAYER)
    return ModelSpec(97, 40, 64, (block,) * 2, Head(tied=True), final_norm=LAYER, positions=Learned(64))


def _mixture() -> ModelSpec:
    """Latent attention, chunks and sinks, and experts."""
    latent = LatentAttention(
        5, nope_dim=8, rope_dim=6, v_dim=7, kv_rank=20, kv_norm=RMS, scale=14**-0.5, rope=Rope(6)
    )
    chunked = Attention(8, 2, 6, scale=6**-0.5, rope=Rope(6), window=Chunk(7), sinks=True)
    router = Router("sigmoid", renormalise=True, correction=True)
    experts = Experts(11, 3, Mlp(24, "silu", gated=True), router, Shared(Mlp(30, "silu", gated=True)))
    layers = [Block(attn, experts, attn_norm=RMS, mlp_norm=RMS) for attn in (latent, chunked)]
    return ModelSpec(97, 40, 64, tuple(layers), Head(tied=False), final_norm=RMS)


# The spread of the weights: the largest logit is far above the next (so that greedy ids are no accident of
# rounding) and the answer is no mere repetition, yet rounding errors do not grow beyond 1e-5.
DECODERS = {
    "gpt2": (_gpt2(), 0.3),
    "llama": (_llama(), 0.2),
    "llama-window": (_llama(window=5), 0.2),
    "mixture": (_mixture(), 0.3),
}


def _decoder(name: str) -> Decoder:
    spec, std = DECODERS[name]
    return init_weights(Decoder(spec), seed=0, std=std).requires_grad_(False)


@pytest.fixture(params=list(DECODERS))
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return _decoder(request.param)


@pytest.fixture
def llama() -> Decoder:
    return _decoder("llama")


class Rigged(nn.Module):
    """A decoder whose n-th answer token is `script[n]`, after any prompt of `prompt_length` tokens."""

    def __init__(self, script: Sequence[int], prompt_length: int, vocab_size: int, strength: float) -> None:
        super().__init__()
        attn = Attention(1, 1, 2, scale=1.0)
        self.spec = ModelSpec(vocab_size, 2, 32, (Block(attn, Mlp(2, "relu", gated=False)),), Head(tied=True))
        self.embed = nn.Embedding(vocab_size, 2)
        self.script, self.prompt_length, self.strength = list(script), prompt_length, strength

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        assert cache is not None
        B, T = ids.shape
        if positions is None:
            positions = torch.arange(cache.length, cache.length + T)[None].expand(B, T)
        cache.extend(positions, padded=False)
        cache.layers[0].append(torch.zeros(B, 1, T, 2), torch.zeros(B, 1, T, 2))
        steps = (positions + 1 - self.prompt_length).clamp(0, len(self.script) - 1)
        wanted = torch.tensor(self.script)[steps]
        logits = torch.zeros(B, T, self.spec.vocab_size).scatter(-1, wanted[..., None], self.strength)
        return logits[:, -1:] if last_only else logits


@pytest.fixture
def rigged() -> Callable[..., Rigged]:
    def make(script: Sequence[int], prompt: int = 1, vocab_size: int = 50, strength: float = 100.0) -> Rigged:
        return Rigged(script, prompt, vocab_size, strength)

    return make
