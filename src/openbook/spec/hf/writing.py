"""spec → config.json: one writer for all families."""

from __future__ import annotations

from openbook.spec.hf.family import Family, arrangement_of
from openbook.spec.hf.term import Keys, nested
from openbook.spec.model import Learned, ModelSpec, Norm
from openbook.spec.reader import UnsupportedError


def write_config(family: Family, spec: ModelSpec) -> Keys:
    """A config in the family's terms; whether it says all of the spec is seen by reading it back."""
    first = spec.layers[0]
    if family.needs_whole_heads and spec.d_model % first.attn.n_heads:
        raise UnsupportedError(f"a width of {spec.d_model} is not a multiple of {first.attn.n_heads} heads")
    arrangement = arrangement_of(first)
    positions = spec.positions if isinstance(spec.positions, Learned) else None
    norm = next((getattr(first, place) for place in sorted(arrangement.norms)), spec.final_norm)
    words = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "tie_word_embeddings": spec.head.tied,
        **family.max_positions.write(spec.max_positions, spec),
        **family.norm.write(norm or Norm("rms"), spec),
        **family.final_norm.write(spec.final_norm is not None, spec),
        **family.arrangement.write(arrangement, spec),
        **family.attention.write([block.attn for block in spec.layers], spec),
        **family.mlp.write([block.mlp for block in spec.layers], spec),
        **family.residual_scale.write(first.residual_scale, spec),
        **family.positions.write(positions, spec),
        **family.embed_scale.write(spec.embed_scale, spec),
        **family.head_scale.write(spec.head.scale, spec),
        **family.head_softcap.write(spec.head.softcap, spec),
    }
    keys = {family.spelling.get(word, word): value for word, value in words.items()}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "pad_token_id": None,  # transformers' own default may lie beyond the vocabulary, which it refuses
        **nested(keys, family.objects),
    }
