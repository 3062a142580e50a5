"""A GGUF file's metadata ⇄ spec.

Keys are those of llama.cpp ("llama.block_count"). What the metadata does not say, the tensors do: a
tied head is one without `output.weight`, biases are there or not, and Llama 3.1's scaling is kept as
the numbers of `rope_freqs.weight`. An architecture is a row of `ARCHITECTURES`.

Every rotation is given as `half`: llama-architecture files do pair neighbours, but also have the rows
of q and k reordered for it, and `weights` undoes that. So a model has the same spec in both formats.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from openbook.spec.model import (
    MAX_LAYERS,
    Activation,
    Attention,
    Block,
    FrequencyDivisors,
    Head,
    HeadNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    RopeScaling,
    SpecError,
    YarnScaling,
)
from openbook.spec.reader import Reader, UnsupportedError, show
from openbook.spec.writer import Written, express

ROPE_FREQS = "rope_freqs.weight"
"""The tensor with one divisor for each frequency, dim/2 of them."""

Shapes = Mapping[str, Sequence[int]]


def from_metadata(
    metadata: Mapping[str, Any], tensors: Shapes | None = None, rope_freqs: Sequence[float] | None = None
) -> ModelSpec:
    """The model that a GGUF file describes.

    `tensors` are the file's names and shapes (outermost first), `rope_freqs` the numbers of the tensor
    of that name, if the file has it. Without `tensors` an untied head is assumed, and no bias that the
    architecture can do without.

    Raises `UnsupportedError` for an architecture or feature that is not supported, and `SpecError` for a
    value that cannot be or a key that nobody knows.
    """
    arch = _architecture_of(metadata)
    if tensors is None:
        tensors = {"output.weight": ()}
    if ROPE_FREQS in tensors and rope_freqs is None:
        raise SpecError(f"the file has {ROPE_FREQS}, whose numbers are needed: pass them as rope_freqs")
    return _from_metadata(arch, metadata, _Seen.in_file(tensors, rope_freqs))


def to_metadata(spec: ModelSpec) -> dict[str, Any]:
    """Metadata with which llama.cpp reads the model, under the first architecture that can hold it.

    Two parts of a spec are not in it: the head and biases, which the tensors show, and
    `rope_freqs(spec)`, which is to be written as the tensor `rope_freqs.weight`. llama.cpp itself runs
    these architectures without windows and ignores those keys. Raises `UnsupportedError`, naming the
    feature, for a model that no supported architecture can hold.
    """
    seen = _Seen.in_spec(spec)

    def way(arch: Architecture) -> Callable[[], Written[dict[str, Any]]]:
        def write() -> Written[dict[str, Any]]:
            metadata = _write(arch, spec)
            return metadata, _from_metadata(arch, metadata, seen)

        return write

    return express(
        spec, {name: way(arch) for name, arch in ARCHITECTURES.items()}, "GGUF architecture", _SINGLE
    )


_SINGLE = 1e-6
"""A number in a GGUF file has 32 bits: this much of it is kept."""


def rope_freqs(spec: ModelSpec) -> tuple[float, ...] | None:
    """The numbers of the tensor `rope_freqs.weight`, or None for a model that needs none."""
    rope = spec.layers[0].attn.rope
    match rope and rope.scaling:
        case FrequencyDivisors(divisors):
            return divisors
        case Llama3Scaling() as scaling if rope:
            return _llama3_divisors(scaling, rope)
    return None


# --- the table of architectures -----------------------------------------------------------------

BIASES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "up": "ffn_up",
    "down": "ffn_down",
}
"""The biases a block may have → the tensor that shows each ("blk.0.attn_q.bias")."""


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`: what llama.cpp hard-wires for it.

    `biases` are the parts of `BIASES` that have one; None leaves it to the file. `norm_offset`: the
    spec's norms multiply by offset + weight, where the file stores the sum. `sandwich`: attention and
    feed-forward have a norm after them too. `partial_rope`: fewer than all elements of a head may turn.
    `embed_scaled`: embeddings are multiplied by √D. `full_every`: where there is a window and no
    pattern is stated, all layers but every n-th slide; `sliding_base`: the rotary base of those that
    slide, unless the file states it (else the same as everywhere, without a key of its own).
    """

    name: str
    activation: Activation
    biases: frozenset[str] | None
    norm: Literal["layer", "rms"] = "rms"
    norm_offset: float = 0.0
    sandwich: bool = False
    rotary: bool = True
    gated: bool = True
    qk_norm: bool = False
    partial_rope: bool = False
    embed_scaled: bool = False
    full_every: int | None = None
    sliding_base: float | None = None

    @property
    def norm_key(self) -> str:
        return "attention.layer_norm_epsilon" if self.norm == "layer" else "attention.layer_norm_rms_epsilon"

    def bias(self, part: str, present: bool) -> bool:
        return present if self.biases is None else part in self.biases


ARCHITECTURES: Mapping[str, Architecture] = {
    arch.name: arch
    for arch in (
        Architecture("gpt2", "gelu_tanh", biases=frozenset(BIASES), norm="layer", rotary=False, gated=False),
        Architecture(
            "gemma3",
            "gelu_tanh",
            biases=frozenset(),
            norm_offset=1.0,
            sandwich=True,
            qk_norm=True,
            embed_scaled=True,
            full_every=6,
            sliding_base=10_000.0,
        ),
        Architecture("qwen3", "silu", biases=frozenset(), qk_norm=True, partial_rope=True),
        Architecture("qwen2", "silu", biases=frozenset("qkv"), partial_rope=True),
        Architecture("llama", "silu", biases=None),
    )
}
"""By `general.architecture`. `to_metadata` tries them in this order; mistral and smollm are llama."""

_IRRELEVANT = ("general.", "tokenizer.", "split.", "quantize.")
"""Prefixes of keys about the file, the text and the types of its tensors."""

_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "attention.causal": ((True,), "Openbook holds causal models"),
    "use_parallel_residual": ((False,), "this architecture adds one part after the other"),
    "expert_count": ((0,), "mixtures of experts cannot be expressed yet"),
    "expert_used_count": ((0,), "mixtures of experts cannot be expressed yet"),
    "rope.scaling.yarn_ext_factor": ((-1.0, 1.0), "only the whole ramp is supported"),
    "rope.scaling.yarn_log_multiplier": ((0.0,), "this architecture does not use it"),
}
"""Keys that do shape a model: the values under which they change nothing, and why no others."""

_NOTES = ("tensor_data_layout", "rope.scaling.finetuned", "pooling_type")
"""Keys within an architecture that do not shape the model."""


def _architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    name = Reader(metadata, "metadata").text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"general.architecture {show(name)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


# --- what the tensors show ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """What the metadata does not say.

    `has_bias(layer, part)` for the parts of `BIASES`; `divisors(rope)` is the scaling that the numbers
    of `rope_freqs.weight` mean for this rotation, if there are any.
    """

    vocab_size: int | None
    tied: bool
    has_bias: Callable[[int, str], bool]
    divisors: Callable[[Rope], RopeScaling | None]

    @classmethod
    def in_file(cls, tensors: Shapes, rope_freqs: Sequence[float] | None) -> _Seen:
        embedding = tensors.get("token_embd.weight")
        return cls(
            vocab_size=embedding[0] if embedding else None,
            tied="output.weight" not in tensors,
            has_bias=lambda layer, part: f"blk.{layer}.{BIASES[part]}.bias" in tensors,
            divisors=lambda rope: None if rope_freqs is None else _read_divisors(rope_freqs, rope),
        )

    @classmethod
    def in_spec(cls, spec: ModelSpec) -> _Seen:
        biases = [_biases(block) for block in spec.layers]
        rope = spec.layers[0].attn.rope
        kept = rope.scaling if rope and isinstance(rope.scaling, Llama3Scaling | FrequencyDivisors) else None
        return cls(
            vocab_size=spec.vocab_size,
            tied=spec.head.tied,
            has_bias=lambda layer, part: biases[layer][part],
            divisors=lambda rope: kept,
        )


def _biases(block: Block) -> dict[str, bool]:
    attn, mlp = block.attn, block.mlp
    attention = {"q": attn.q_bias, "k": attn.k_bias, "v": attn.v_bias, "o": attn.o_bias}
    return {**attention, "up": mlp.up_bias, "down": mlp.down_bias}


# --- reading ------------------------------------------------------------------------------------


def _from_metadata(arch: Architecture, metadata: Mapping[str, Any], seen: _Seen) -> ModelSpec:
    whole = Reader(metadata, "metadata")
    whole.ignore(prefixes=(*_IRRELEVANT, f"{arch.name}."))
    whole.finish(f"a {arch.name} file has none such: remove it if the model does not depend on it")

    prefix = f"{arch.name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    reader = Reader(own, arch.name)
    for key, (allowed, why) in _ONLY.items():
        reader.only(key, allowed, why)
    reader.ignore(_NOTES)
    spec = _read(arch, reader, metadata, seen)
    reader.finish("this architecture has no such key: remove it if the model does not depend on it")
    return spec


def _read(arch: Architecture, c: Reader, metadata: Mapping[str, Any], seen: _Seen) -> ModelSpec:
    n_layers = c.integer("block_count", most=MAX_LAYERS)
    d_model = c.integer("embedding_length")
    max_positions = c.integer("context_length")
    eps = _shortest(c.number(arch.norm_key))
    norm = Norm(arch.norm, eps, bias=arch.norm == "layer", offset=arch.norm_offset)
    out_norm = norm if arch.sandwich else None

    heads = _per_layer(c, "attention.head_count", n_layers)
    kv_heads = _per_layer(c, "attention.head_count_kv", n_layers, heads)
    d_ffs = _per_layer(c, "feed_forward_length", n_layers)
    head_dim = _read_head_dim(c, d_model, heads)
    rope = _read_rope(arch, c, head_dim, max_positions, seen) if arch.rotary else None
    sliding_rope = _read_sliding_rope(arch, c, rope)
    windows = _read_windows(arch, c, n_layers)

    blocks: dict[tuple[Any, ...], Block] = {}
    layers: list[Block] = []
    for i, (n_heads, n_kv_heads, d_ff, window) in enumerate(
        zip(heads, kv_heads, d_ffs, windows, strict=True)
    ):
        biases = {part: arch.bias(part, seen.has_bias(i, part)) for part in BIASES}
        kind = (n_heads, n_kv_heads, d_ff, window, *biases.values())
        if kind not in blocks:
            attn = _attention(arch, c, n_heads, n_kv_heads, head_dim, norm, biases)
            attn = replace(attn, rope=rope if window is None else sliding_rope, window=window)
            mlp = Mlp(d_ff, arch.activation, arch.gated, up_bias=biases["up"], down_bias=biases["down"])
            blocks[kind] = Block(
                attn=attn,
                mlp=mlp,
                attn_norm=norm,
                attn_out_norm=out_norm,
                mlp_norm=norm,
                mlp_out_norm=out_norm,
            )
        layers.append(blocks[kind])

    return ModelSpec(
        vocab_size=_read_vocab_size(c, metadata, seen),
        d_model=d_model,
        max_positions=max_positions,
        layers=tuple(layers),
        head=Head(tied=seen.tied, softcap=_read_softcap(arch, c)),
        final_norm=norm,
        positions=None if arch.rotary else Learned(max_positions),
        embed_scale=d_model**0.5 if arch.embed_scaled else 1.0,
        name=_read_name(metadata),
    )


def _per_layer(c: Reader, key: str, n_layers: int, default: list[int] | None = None) -> list[int]:
    """A number for all layers, or a list with one for each."""
    value = c.raw(key)
    if value is None and default is not None:
        return default
    if isinstance(value, list):
        return c.items(key, n_layers, _is_size, "integers above 0")
    return [c.integer(key)] * n_layers


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _attention(
    arch: Architecture,
    c: Reader,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    norm: Norm,
    biases: dict[str, bool],
) -> Attention:
    if n_heads % n_kv_heads:
        c.fail("attention.head_count_kv", f"must divide attention.head_count = {n_heads}, found {n_kv_heads}")
    head_norm = HeadNorm(norm.kind, norm.eps, offset=norm.offset)
    return Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        scale=_score_scale(arch, c, n_heads, head_dim),
        q_bias=biases["q"],
        k_bias=biases["k"],
        v_bias=biases["v"],
        o_bias=biases["o"],
        q_norm=head_norm if arch.qk_norm else None,
        k_norm=head_norm if arch.qk_norm else None,
    )


def _read_head_dim(c: Reader, d_model: int, heads: list[int]) -> int:
    head_dim, value_dim = c.maybe_integer("attention.key_length"), c.maybe_integer("attention.value_length")
    if head_dim is None:
        if len(set(heads)) > 1 or d_model % heads[0]:
            c.fail(
                "attention.key_length",
                f"is needed where embedding_length = {d_model} is not heads × head size",
            )
        head_dim = d_model // heads[0]
    if value_dim not in (None, head_dim):
        c.fail(
            "attention.value_length",
            f"must equal key_length = {head_dim}, found {value_dim}",
            UnsupportedError,
        )
    return head_dim


def _score_scale(arch: Architecture, c: Reader, n_heads: int, head_dim: int) -> float:
    """K ** -0.5. Of Gemma 3 the largest, which llama.cpp knows by its 62 layers, has (D/H) ** -0.5."""
    if arch.name == "gemma3" and c.integer("block_count") == 62:
        return (c.integer("embedding_length") // n_heads) ** -0.5
    return head_dim**-0.5


def _read_softcap(arch: Architecture, c: Reader) -> float | None:
    if arch.name != "gemma3":
        return None
    cap = c.maybe_number("final_logit_softcapping")
    return _shortest(cap) if cap else None


def _read_windows(arch: Architecture, c: Reader, n_layers: int) -> list[int | None]:
    """The layers that slide: those that the pattern marks, or the architecture's; a window of 0 is none."""
    window = c.maybe_integer("attention.sliding_window", least=0) or None
    slides = _read_pattern(arch, c, n_layers)
    return [window if slides[i] else None for i in range(n_layers)]


def _read_pattern(arch: Architecture, c: Reader, n_layers: int) -> list[bool]:
    """True for each layer that slides, from a list, or from n where every n-th layer does not."""
    key = "attention.sliding_window_pattern"
    if isinstance(c.raw(key), list):
        return c.items(key, n_layers, _is_flag, "true or false")
    every = c.maybe_integer(key, least=0) if key in c else arch.full_every
    return [not every or i % every < every - 1 for i in range(n_layers)]


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _read_vocab_size(c: Reader, metadata: Mapping[str, Any], seen: _Seen) -> int:
    """The embedding's rows; without tensors the key, or the number of tokens."""
    stated = c.maybe_integer("vocab_size")
    if stated and seen.vocab_size and stated != seen.vocab_size:
        c.fail("vocab_size", f"is {stated}, but token_embd.weight has {seen.vocab_size} rows")
    tokens = metadata.get("tokenizer.ggml.tokens")
    size = seen.vocab_size or stated or (len(tokens) if isinstance(tokens, list) else 0)
    if not size:
        c.fail("vocab_size", "is missing, and there are no tokens to count")
    return size


def _read_name(metadata: Mapping[str, Any]) -> str:
    """`general.name`, fit to be printed: it is text from outside."""
    name = metadata.get("general.name")
    return "".join(filter(str.isprintable, name))[:120] if isinstance(name, str) else ""


# --- reading rotary positions -------------------------------------------------------------------


def _read_rope(arch: Architecture, c: Reader, head_dim: int, max_positions: int, seen: _Seen) -> Rope:
    dim = c.maybe_integer("rope.dimension_count") or head_dim
    if dim % 2 or dim > head_dim or (dim != head_dim and not arch.partial_rope):
        bound = (
            f"an even number up to {head_dim}" if arch.partial_rope else f"the head size {head_dim}, and even"
        )
        c.fail("rope.dimension_count", f"must be {bound}, found {dim}")
    base = _shortest(c.maybe_number("rope.freq_base", positive=True) or 10_000.0)
    rope = Rope(dim, base=base, scaling=_read_scaling(c, base, max_positions))
    divided = seen.divisors(rope)
    if divided and rope.scaling:
        c.fail(
            "rope.scaling.type",
            f"is given, and {ROPE_FREQS} as well: only one is supported",
            UnsupportedError,
        )
    return replace(rope, scaling=divided or rope.scaling)


def _read_sliding_rope(arch: Architecture, c: Reader, rope: Rope | None) -> Rope | None:
    """The rotation of the layers that slide: with a base of its own, and then unscaled, or as everywhere."""
    if arch.sliding_base is None or rope is None:
        return rope
    base = c.maybe_number("rope.freq_base_swa", positive=True) or arch.sliding_base
    return Rope(rope.dim, base=_shortest(base))


def _read_scaling(c: Reader, base: float, max_positions: int) -> RopeScaling | None:
    """llama.cpp's rule: a factor without a type is linear, and a factor of 0 is none."""
    factor = c.maybe_number("rope.scaling.factor")
    old_factor = c.maybe_number("rope.scale_linear")
    factor = _shortest(factor if factor is not None else old_factor or 0.0)
    original = c.maybe_integer("rope.scaling.original_context_length") or max_positions
    attn_factor = _read_positive(c, "rope.scaling.attn_factor", 1.0)
    attn_factor *= _read_positive(c, "rope.scaling.yarn_attn_factor", 1.0)
    beta_fast = _read_positive(c, "rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = _read_positive(c, "rope.scaling.yarn_beta_slow", 1.0)

    kind = c.choice("rope.scaling.type", _SCALING_TYPES) if "rope.scaling.type" in c else "linear"
    if kind == "yarn":
        if factor == 0:
            c.fail("rope.scaling.factor", "is missing, and yarn needs it")
        if base == 1:
            c.fail("rope.freq_base", "must not be 1 for yarn, which divides by its logarithm")
        return YarnScaling(factor, original, attn_factor * _yarn_mscale(factor), beta_fast, beta_slow)
    if attn_factor != 1:
        c.fail("rope.scaling.attn_factor", f"is {attn_factor}, supported with yarn only", UnsupportedError)
    return LinearScaling(factor) if kind == "linear" and factor != 0 else None


def _read_positive(c: Reader, key: str, default: float) -> float:
    value = c.maybe_number(key, positive=True)
    return default if value is None else _shortest(value)


_SCALING_TYPES = {"none": "none", "linear": "linear", "yarn": "yarn"}


def _yarn_mscale(factor: float) -> float:
    """llama.cpp multiplies this into cosine and sine on its own; metadata holds the rest."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_divisors(numbers: Sequence[float], rope: Rope) -> RopeScaling | None:
    """The rule behind the numbers if it is Llama 3.1's as published, or else the numbers."""
    if len(numbers) != rope.dim // 2 or not all(math.isfinite(n) and n > 0 for n in numbers):
        raise SpecError(
            f"{ROPE_FREQS} must hold {rope.dim // 2} finite numbers above 0, found {len(numbers)}: "
            f"{show(min(numbers, default=None))} to {show(max(numbers, default=None))}"
        )
    published = Llama3Scaling(
        max(numbers), low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192
    )
    if all(map(_close, numbers, _llama3_divisors(published, rope))):
        return published if max(numbers) > 1 else None
    return FrequencyDivisors(tuple(numbers))


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-5)


def _llama3_divisors(scaling: Llama3Scaling, rope: Rope) -> tuple[float, ...]:
    """What Llama 3.1's rule divides each frequency by: 1 for short waves, `factor` for long ones."""

    def divisor(i: int) -> float:
        wavelength = 2 * math.pi * rope.base ** (2 * i / rope.dim)
        turns = scaling.original_positions / wavelength
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return 1 / ((1 - kept) / scaling.factor + kept)

    return tuple(divisor(i) for i in range(rope.dim // 2))


def _shortest(value: float) -> float:
    """The shortest decimal with the same 32 bits: 9.999999747378752e-06 in a file was once 1e-05.

    GGUF keeps numbers in 32 bits. A number that is not one of those is returned as it is.
    """
    try:
        bits = struct.pack("<f", value)
    except OverflowError:
        return value
    if struct.unpack("<f", bits)[0] != value:
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((c for c in candidates if struct.pack("<f", c) == bits), value)


# --- writing ------------------------------------------------------------------------------------


def _write(arch: Architecture, spec: ModelSpec) -> dict[str, Any]:
    """Metadata in the architecture's terms; whether it fits is seen by reading it."""
    first = spec.layers[0]
    full = next((block for block in spec.layers if block.attn.window is None), first)
    norm = spec.final_norm or Norm(arch.norm)
    own: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "context_length": spec.max_positions,
        "embedding_length": spec.d_model,
        "block_count": spec.n_layers,
        "feed_forward_length": _one_or_list([block.mlp.d_ff for block in spec.layers]),
        "attention.head_count": _one_or_list([block.attn.n_heads for block in spec.layers]),
        "attention.head_count_kv": _one_or_list([block.attn.n_kv_heads for block in spec.layers]),
        "attention.key_length": first.attn.head_dim,
        "attention.value_length": first.attn.head_dim,
        arch.norm_key: float(norm.eps),
        **_write_windows(arch, [block.attn.window for block in spec.layers]),
        **(_write_rope(full.attn.rope) if arch.rotary and full.attn.rope else {}),
        **_write_sliding_base(arch, spec),
        **({"final_logit_softcapping": spec.head.softcap} if spec.head.softcap else {}),
    }
    name = {"general.name": spec.name} if spec.name else {}
    return {
        "general.architecture": arch.name,
        **name,
        **{f"{arch.name}.{key}": value for key, value in own.items()},
    }


def _one_or_list(values: list[int]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else values


def _write_windows(arch: Architecture, windows: list[int | None]) -> dict[str, Any]:
    width = next((window for window in windows if window is not None), None)
    if width is None:
        return {}
    pattern = [window is not None for window in windows]
    every = arch.full_every
    usual = [not every or i % every < every - 1 for i in range(len(windows))]
    marked = {} if pattern == usual else {"attention.sliding_window_pattern": pattern}
    return {"attention.sliding_window": width, **marked}


def _write_sliding_base(arch: Architecture, spec: ModelSpec) -> dict[str, Any]:
    sliding = next((block.attn for block in spec.layers if block.attn.window is not None), None)
    if arch.sliding_base is None or sliding is None or sliding.rope is None:
        return {}
    return {} if sliding.rope.base == arch.sliding_base else {"rope.freq_base_swa": float(sliding.rope.base)}


def _write_rope(rope: Rope) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope.dimension_count": rope.dim, "rope.freq_base": float(rope.base)}
    match rope.scaling:
        case LinearScaling(factor):
            return {**keys, "rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
        case YarnScaling() as yarn:
            extra = yarn.attention_factor / _yarn_mscale(yarn.factor)
            return {
                **keys,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(yarn.factor),
                "rope.scaling.original_context_length": yarn.original_positions,
                "rope.scaling.attn_factor": extra,
                "rope.scaling.yarn_beta_fast": float(yarn.beta_fast),
                "rope.scaling.yarn_beta_slow": float(yarn.beta_slow),
            }
    return keys
