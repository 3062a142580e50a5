"""Tiny specs, each with its own choice of variants, and decoders with noise in every parameter.

Sizes are pairwise different wherever they may be, so that a swapped dimension cannot hide."""

import torch

from openbook.model import Decoder, init_weights
from openbook.spec.model import (
    Alibi,
    Attention,
    Block,
    Chunk,
    DynamicScaling,
    Experts,
    Groups,
    Head,
    HeadNorm,
    LatentAttention,
    Learned,
    Llama3Scaling,
    LongRope,
    Mlp,
    ModelSpec,
    Norm,
    QueryTemperature,
    Rope,
    Router,
    Shared,
    Sinusoidal,
    YarnScaling,
)

RMS, LAYER = Norm("rms", eps=1e-5), Norm("layer", eps=1e-5, bias=True)
PER_HEAD = HeadNorm("rms")
EXPERT = Mlp(36, "silu", gated=True)
SOFTMAX = Router("softmax", renormalise=True)
GEMMA = Norm("rms", offset=1.0)
K = 6


def attention(**changes) -> Attention:
    return Attention(
        **{"n_heads": 8, "n_kv_heads": 2, "head_dim": K, "scale": K**-0.5, "rope": Rope(K)} | changes
    )


def latent(**changes) -> LatentAttention:
    """Queries and keys of 10 (6 of them rotated), values of 5, all from a latent of 14."""
    return LatentAttention(
        **{
            "n_heads": 7,
            "nope_dim": 4,
            "rope_dim": K,
            "v_dim": 5,
            "kv_rank": 14,
            "kv_norm": RMS,
            "scale": 10**-0.5,
            "rope": Rope(K, layout="interleaved"),
        }
        | changes
    )


def experts(router: Router, **changes) -> Experts:
    return Experts(**{"n_experts": 12, "n_active": 3, "expert": EXPERT, "router": router} | changes)


def block(**changes) -> Block:
    parts = {"attn": attention(), "mlp": Mlp(80, "silu", gated=True), "attn_norm": RMS, "mlp_norm": RMS}
    return Block(**parts | changes)


def model(*layers: Block, **changes) -> ModelSpec:
    rest = {
        "vocab_size": 131,
        "d_model": 52,
        "max_positions": 64,
        "head": Head(tied=False),
        "final_norm": RMS,
    }
    return ModelSpec(layers=layers, **rest | changes)


VARIANTS: dict[str, ModelSpec] = {
    "llama": model(block(), block(), block()),
    "gpt2": model(
        *[block(attn=attention(n_kv_heads=8, rope=None, q_bias=True, k_bias=True, v_bias=True, o_bias=True),
                mlp=Mlp(70, "gelu_tanh", gated=False, up_bias=True, down_bias=True),
                attn_norm=LAYER, mlp_norm=LAYER)] * 2,
        positions=Learned(64), head=Head(tied=True), final_norm=LAYER,
    ),
    "qwen3": model(*[block(attn=attention(q_norm=PER_HEAD, k_norm=PER_HEAD))] * 2, head=Head(tied=True)),
    "windows": model(block(attn=attention(window=5)), block(), block(attn=attention(window=9, n_kv_heads=4))),
    "ropes": model(
        block(attn=attention(rope=Rope(4, layout="interleaved"))),
        block(attn=attention(rope=Rope(K, 5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 16)))),
        block(attn=attention(rope=Rope(K, scaling=YarnScaling(4.0, 16, 1.138629)))),
        block(attn=attention(rope=None)),
    ),
    "dynamic": model(*[block(attn=attention(rope=Rope(K, scaling=DynamicScaling(2.0, 16))))] * 2),
    "post-norm": model(
        *[block(attn_norm=None, mlp_norm=None, attn_add_norm=LAYER, mlp_add_norm=LAYER)] * 2,
        positions=Sinusoidal(), final_norm=None, head=Head(tied=False, bias=True),
    ),
    "sandwich": model(
        *[block(attn_out_norm=GEMMA, mlp_out_norm=GEMMA, end_norm=LAYER)] * 2
    ),
    "parallel": model(
        block(attn_norm=LAYER, mlp_norm=LAYER, residual="parallel", mlp=Mlp(70, "gelu", gated=False)),
        block(attn_norm=None, mlp_norm=None, residual="parallel"),
        block(mlp_norm=None, residual="parallel_shared", mlp_out_norm=RMS),
    ),
    "odds": model(
        block(attn=attention(softcap=3.0, scale=0.5), mlp=Mlp(70, "relu2", gated=False)),
        block(attn_norm=Norm("rms", weight=False), mlp_norm=Norm("layer", weight=False)),
        *[block(mlp=Mlp(66, kind, gated=True, up_bias=True, down_bias=True)) for kind in
          ("relu", "gelu_quick", "sigmoid", "tanh", "gelu")],
    ),
    "head-norms": model(
        block(attn=attention(q_norm=HeadNorm("layer", over="own"), k_norm=HeadNorm("rms", over="width"))),
        block(attn=attention(q_norm=HeadNorm("rms", bias=True, over="own", after_rope=True),
                             k_norm=HeadNorm("rms", weight=False, after_rope=True))),
        block(attn=attention(q_norm=HeadNorm("layer", bias=True, over="width", after_rope=True),
                             clip_qkv=0.5)),
    ),
    "alibi": model(
        *[block(attn=attention(rope=None, alibi=Alibi(tuple(2.0**-n for n in range(1, 9))), window=window))
          for window in (None, 6)],
        embed_norm=LAYER, embed_scale=3.5,
    ),
    "sinks": model(*[block(attn=attention(sinks=True, window=window)) for window in (7, None, 7)]),
    "chunks": model(
        block(attn=attention(window=Chunk(5))),
        block(attn=attention(rope=None, temperature=QueryTemperature(0.7, 4))),
        block(attn=attention(window=Chunk(16), n_kv_heads=4)),
    ),
    "longrope": model(*[block(attn=attention(rope=Rope(
        K, scaling=LongRope((1.0, 1.1, 1.3), (1.5, 4.0, 8.0), 12, attention_factor=1.2))))] * 2),
    "multipliers": model(
        *[block(residual_scale=0.3, mlp=Mlp(66, "gelu_quick", gated=True, clamp=0.4, up_offset=1.0))] * 2,
        positions=Learned(64, offset=2), head=Head(tied=True, scale=4.0, softcap=2.0), embed_scale=7.2,
    ),
    "experts": model(
        block(mlp=Mlp(80, "silu", gated=True)),
        block(mlp=experts(SOFTMAX)),
        block(mlp=experts(Router("softmax", renormalise=False), shared=Shared(Mlp(44, "silu", True), True))),
        block(mlp=experts(Router("chosen_softmax", renormalise=False, bias=True),
                          expert=Mlp(36, "gelu_quick", True, True, True, clamp=0.3, up_offset=1.0))),
    ),
    "routers": model(
        block(mlp=experts(Router("sigmoid", True, correction=True, groups=Groups(4, 2, "top2"), scale=2.5,
                                 sum_eps=1e-20), shared=Shared(Mlp(44, "silu", True)))),
        block(mlp=experts(Router("softmax", False, groups=Groups(3, 1, "max"), scale=1.7))),
        block(mlp=experts(Router("sigmoid", False, on_input=True), n_active=1,
                          expert=Mlp(38, "relu2", gated=False, up_bias=True, down_bias=True))),
    ),
    "latent": model(
        block(attn=latent(q_rank=22, q_norm=RMS, down_bias=True, o_bias=True)),
        block(attn=latent(scale=0.6, window=6)),
        block(attn=latent(rope=None, softcap=2.0)),
        block(attn=attention()),
    ),
}  # fmt: skip


def noisy_decoder(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder with noise in every parameter, norms and biases included: a dropped one shows."""
    decoder = init_weights(Decoder(spec), std=0.1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
    decoder = decoder.to(dtype).eval()
    decoder.tie()
    return decoder


def random_ids(spec: ModelSpec, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(spec.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
