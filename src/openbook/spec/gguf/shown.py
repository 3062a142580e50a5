"""What a file's tensors show of the model, where its metadata does not say it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openbook.spec.gguf.architecture import BIASES
from openbook.spec.model import (
    Attention,
    Block,
    Experts,
    FrequencyDivisors,
    Llama3Scaling,
    LongRope,
    Mlp,
    ModelSpec,
    RopeScaling,
)
from openbook.spec.reader import Reader

Shapes = Mapping[str, Sequence[int]]

_NOTHING: frozenset[str] = frozenset()
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")


@dataclass(frozen=True)
class Shown:
    """The tensors that a model has or has not, by name: those outside the layers, and each layer's own
    ("attn_q.bias"). `numbers` are the values of the small ones that shape the rotation."""

    outside: frozenset[str]
    layers: Mapping[int, frozenset[str]]
    vocab_size: int | None = None
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    scaling: RopeScaling | None = None

    @classmethod
    def in_file(cls, tensors: Shapes, numbers: Mapping[str, Sequence[float]]) -> Shown:
        layers: defaultdict[int, set[str]] = defaultdict(set)
        outside = set()
        for name in tensors:
            match = _BLOCK.fullmatch(name)
            if match:
                layers[int(match[1])].add(match[2])
            else:
                outside.add(name)
        embedding = tensors.get("token_embd.weight")
        return cls(
            outside=frozenset(outside),
            layers={layer: frozenset(names) for layer, names in layers.items()},
            vocab_size=embedding[0] if embedding else None,
            numbers=numbers,
        )

    @classmethod
    def in_spec(cls, spec: ModelSpec) -> Shown:
        """What a file of this model would show; the rotation's numbers stand for the rule behind them."""
        of_block = {id(block): _shown_by(block) for block in spec.layers}
        outside = set()
        if not spec.head.tied:
            outside.add("output.weight")
        if spec.head.bias:
            outside.add("output.bias")
        return cls(
            outside=frozenset(outside),
            layers={i: of_block[id(block)] for i, block in enumerate(spec.layers)},
            vocab_size=spec.vocab_size,
            scaling=kept_as_numbers(spec),
        )

    def of_layer(self, layer: int) -> frozenset[str]:
        return self.layers.get(layer, _NOTHING)


def has_bias(shown: frozenset[str], part: str) -> bool:
    """Whether a layer's tensors have the bias of a part of `BIASES`, be it alone or with its neighbours."""
    return f"{BIASES[part]}.bias" in shown or (part in "qkv" and "attn_qkv.bias" in shown)


def kept_as_numbers(spec: ModelSpec) -> RopeScaling | None:
    """The scaling that a file keeps as the numbers of a tensor, and not by its rule."""
    for block in spec.layers:
        rope = block.attn.rope
        if rope and isinstance(rope.scaling, Llama3Scaling | FrequencyDivisors | LongRope):
            return rope.scaling
    return None


def _shown_by(block: Block) -> frozenset[str]:
    attn, mlp = block.attn, block.mlp
    shown = {
        "ffn_norm.weight": block.mlp_norm is not None,
        "attn_norm_2.weight": block.residual == "parallel",
    }
    if isinstance(attn, Attention):
        shown |= {f"{BIASES[part]}.bias": getattr(attn, f"{part}_bias") for part in "qkvo"}
        shown["attn_q_norm.weight"] = attn.q_norm is not None
    if isinstance(mlp, Mlp):
        shown |= {"ffn_up.bias": mlp.up_bias, "ffn_down.bias": mlp.down_bias}
    if isinstance(mlp, Experts):
        shown["exp_probs_b.bias"] = mlp.router.correction
    return frozenset(name for name, present in shown.items() if present)


def vocabulary_size(c: Reader, metadata: Mapping[str, object], shown: Shown) -> int:
    """The embedding's rows; without tensors the key, or the number of tokens."""
    stated = c.maybe_integer("vocab_size")
    if stated and shown.vocab_size and stated != shown.vocab_size:
        c.fail("vocab_size", f"is {stated}, but token_embd.weight has {shown.vocab_size} rows")
    tokens = metadata.get("tokenizer.ggml.tokens")
    size = shown.vocab_size or stated or (len(tokens) if isinstance(tokens, list) else 0)
    if not size:
        c.fail("vocab_size", "is missing, and there are no tokens to count")
    return size
