"""config.json → spec: one reader for all families."""

from __future__ import annotations

from dataclasses import replace

from openbook.spec.hf.family import Family
from openbook.spec.hf.term import Known
from openbook.spec.model import MAX_LAYERS, Block, Head, ModelSpec
from openbook.spec.reader import Reader


def read_spec(family: Family, c: Reader) -> ModelSpec:
    """The spec of a family's config. Every key of `family.defaults` is asked for by one of its terms."""
    known = Known(d_model=c.integer("hidden_size"), n_layers=c.integer("num_hidden_layers", most=MAX_LAYERS))
    known = replace(known, max_positions=family.max_positions.read(c, known), norm=family.norm.read(c, known))
    final_norm = family.final_norm.read(c, known)
    return ModelSpec(
        vocab_size=c.integer("vocab_size"),
        d_model=known.d_model,
        max_positions=known.max_positions,
        layers=_read_layers(family, c, known),
        head=Head(
            tied=c.flag("tie_word_embeddings"),
            bias=family.head_bias,
            scale=family.head_scale.read(c, known),
            softcap=family.head_softcap.read(c, known),
        ),
        final_norm=known.norm if final_norm else None,
        positions=family.positions.read(c, known),
        embed_scale=family.embed_scale.read(c, known),
        embed_norm=known.norm if family.embed_norm else None,
    )


def _read_layers(family: Family, c: Reader, known: Known) -> tuple[Block, ...]:
    """One block for each layer; layers that are alike are one object."""
    arrangement = family.arrangement.read(c, known)
    norms = dict.fromkeys(arrangement.norms, known.norm)
    residual_scale = family.residual_scale.read(c, known)

    kinds: dict[tuple[int, int], Block] = {}
    layers: list[Block] = []
    for attn, mlp in zip(family.attention.read(c, known), family.mlp.read(c, known), strict=True):
        kind = id(attn), id(mlp)
        if kind not in kinds:
            kinds[kind] = Block(
                attn, mlp, residual=arrangement.residual, residual_scale=residual_scale, **norms
            )
        layers.append(kinds[kind])
    return tuple(layers)
