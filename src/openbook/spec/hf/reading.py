"""config.json → spec: one reader for all families."""

from __future__ import annotations

from dataclasses import replace

from openbook.spec.hf.family import ACTIVATIONS, FULL, LAYER_TYPES, SLIDING, Family, Switch
from openbook.spec.hf.rope import read_ropes
from openbook.spec.model import MAX_LAYERS, Attention, Block, Head, HeadNorm, Learned, Mlp, ModelSpec, Norm
from openbook.spec.reader import Reader


def read_spec(family: Family, c: Reader) -> ModelSpec:
    """The spec of any family. Every key of `family.defaults` is asked for here or further down."""
    d_model = c.integer("hidden_size")
    n_layers = c.integer("num_hidden_layers", most=MAX_LAYERS)
    max_positions = c.integer("max_position_embeddings")
    norm = Norm(family.norm, eps=c.number("norm_eps"), bias=family.norm == "layer")

    attn = _read_attention(family, c, d_model, norm)
    mlp_bias = _read_switch(c, family.mlp_bias)
    mlp = Mlp(
        d_ff=_read_size(family, c, "intermediate_size") or 4 * d_model,
        activation=c.choice("hidden_act", ACTIVATIONS),
        gated=family.gated,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
    )
    ropes = read_ropes(c, attn.head_dim, max_positions) if family.rotary else dict.fromkeys(LAYER_TYPES)
    windows = family.windows.read(c, n_layers)
    scales = _read_scales(family, c, attn.head_dim, n_layers)

    blocks: dict[tuple[int | None, float], Block] = {}
    for window, scale in dict.fromkeys(zip(windows, scales, strict=True)):
        rope = ropes[FULL if window is None else SLIDING]
        own = replace(attn, window=window, scale=scale, rope=rope)
        blocks[window, scale] = Block(attn=own, mlp=mlp, attn_norm=norm, mlp_norm=norm)

    return ModelSpec(
        vocab_size=c.integer("vocab_size"),
        d_model=d_model,
        max_positions=max_positions,
        layers=tuple(blocks[kind] for kind in zip(windows, scales, strict=True)),
        head=Head(tied=c.flag("tie_word_embeddings")),
        final_norm=norm,
        positions=None if family.rotary else Learned(max_positions),
    )


def _read_attention(family: Family, c: Reader, d_model: int, norm: Norm) -> Attention:
    """The attention that all layers share, before windows, scales and rotations differ."""
    n_heads = c.integer("num_attention_heads")
    n_kv_heads = (
        c.maybe_integer("num_key_value_heads") if family.has("num_key_value_heads") else None
    ) or n_heads
    if n_heads % n_kv_heads:
        c.fail(
            "num_key_value_heads",
            f"must divide {c.key('num_attention_heads')} = {n_heads}, found {n_kv_heads}",
        )

    head_dim = _read_size(family, c, "head_dim") if family.has("head_dim") else None
    if head_dim is None:
        if d_model % n_heads:
            advice = ", or head_dim given" if family.has("head_dim") else ""
            c.fail(
                "hidden_size",
                f"must be a multiple of {c.key('num_attention_heads')} = {n_heads}{advice}, found {d_model}",
            )
        head_dim = d_model // n_heads
    if family.rotary and head_dim % 2:
        c.fail("head_dim", f"must be even, since it is rotated in pairs, found {head_dim}")

    qkv_bias = _read_switch(c, family.qkv_bias)
    head_norm = HeadNorm(norm.kind, norm.eps)
    return Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        q_bias=qkv_bias,
        k_bias=qkv_bias,
        v_bias=qkv_bias,
        o_bias=_read_switch(c, family.o_bias),
        q_norm=head_norm if family.qk_norm else None,
        k_norm=head_norm if family.qk_norm else None,
    )


def _read_size(family: Family, c: Reader, word: str) -> int | None:
    """A size that may be null, which leaves it to be worked out, only if that is the family's default."""
    return c.maybe_integer(word) if family.defaults[c.key(word)] is None else c.integer(word)


def _read_switch(c: Reader, switch: Switch) -> bool:
    return switch if isinstance(switch, bool) else c.flag(switch)


def _read_scales(family: Family, c: Reader, head_dim: int, n_layers: int) -> list[float]:
    """What multiplies each layer's scores; GPT-2 may leave it out, or divide it by the layer's number."""
    scale = head_dim**-0.5
    if not family.has("scale_attn_weights"):
        return [scale] * n_layers
    if not c.flag("scale_attn_weights"):
        scale = 1.0
    if not c.flag("scale_attn_by_inverse_layer_idx"):
        return [scale] * n_layers
    return [scale / float(i + 1) for i in range(n_layers)]
