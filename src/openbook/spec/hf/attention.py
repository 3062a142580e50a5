"""Attention in a config.json: heads, biases, norms, scales, windows, ALiBi, and the latent kind."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from openbook.spec.hf.rope import FULL, LAYER_TYPES, SLIDING, Ropes, layer_type, read_score_factor, rotary
from openbook.spec.hf.term import (
    ALWAYS,
    NEVER,
    NONE,
    Keys,
    Known,
    Term,
    alike,
    flag,
)
from openbook.spec.model import (
    Alibi,
    Attention,
    Chunk,
    HeadNorm,
    LatentAttention,
    ModelSpec,
    Norm,
    QueryTemperature,
)
from openbook.spec.reader import Reader, UnsupportedError

# --- heads --------------------------------------------------------------------------------------


def _read_quotient(c: Reader, known: Known, advice: str = "") -> int:
    if known.d_model % known.n_heads:
        c.fail(
            "hidden_size",
            f"must be a multiple of {c.key('num_attention_heads')} = {known.n_heads}{advice}, "
            f"found {known.d_model}",
        )
    return known.d_model // known.n_heads


def _read_head_dim(c: Reader, known: Known) -> int:
    return c.maybe_integer("head_dim") or _read_quotient(c, known, ", or head_dim given")


QUOTIENT = Term[int](_read_quotient, lambda value, spec: {})
"""The size of a head is the width by the number of heads, and there is no key for another."""
HEAD_DIM = Term[int](_read_head_dim, lambda value, spec: {"head_dim": value})
OWN_HEAD_DIM = Term[int](lambda c, known: c.integer("head_dim"), lambda value, spec: {"head_dim": value})
"""A size that has nothing to do with the width, and may not be null."""


def _read_kv_heads(c: Reader, known: Known) -> int:
    n_kv_heads = c.maybe_integer("num_key_value_heads") or known.n_heads
    if known.n_heads % n_kv_heads:
        c.fail(
            "num_key_value_heads",
            f"must divide {c.key('num_attention_heads')} = {known.n_heads}, found {n_kv_heads}",
        )
    return n_kv_heads


GROUPED = Term[int](_read_kv_heads, lambda value, spec: {"num_key_value_heads": value})
ONE_FOR_EACH = Term[int](lambda c, known: known.n_heads, lambda value, spec: {})
ONE_OR_EACH = Term[int](
    lambda c, known: 1 if c.flag("multi_query") else known.n_heads,
    lambda value, spec: {"multi_query": value == 1},
)


def _read_falcon_kv_heads(c: Reader, known: Known) -> int:
    """`num_kv_heads` counts in the newer architecture alone; the older one has one head, or all."""
    if c.flag("new_decoder_architecture"):
        c.ignore(["multi_query"])
        return _read_kv_heads(c, known)
    if c.flag("multi_query"):
        c.ignore([c.key("num_key_value_heads")])
        return 1
    if _read_kv_heads(c, known) != known.n_heads:
        c.fail(
            "num_key_value_heads",
            f"must be num_attention_heads = {known.n_heads} without multi_query and new_decoder_architecture",
        )
    return known.n_heads


def _write_falcon_kv_heads(value: int, spec: ModelSpec) -> Keys:
    block = spec.layers[0]
    newer = block.residual == "parallel" or value not in (1, block.attn.n_heads)
    keys: Keys = {"new_decoder_architecture": newer, "multi_query": value == 1}
    return keys | ({"num_key_value_heads": value} if newer else {})


FALCON_KV_HEADS = Term[int](_read_falcon_kv_heads, _write_falcon_kv_heads)


def head_norm(norm: HeadNorm, present: Term[bool] = ALWAYS) -> Term[HeadNorm | None]:
    """A norm of queries and keys, with the model's own epsilon."""

    def read(c: Reader, known: Known) -> HeadNorm | None:
        return replace(norm, eps=known.norm.eps) if present.read(c, known) else None

    return Term(read, lambda value, spec: present.write(value is not None, spec))


# --- scales -------------------------------------------------------------------------------------

ROOT = Term[float](lambda c, known: known.head_dim**-0.5, lambda value, spec: {})
"""1 / √head_dim."""
ROOTS = alike(ROOT)

ROOT_OR_ONE = Term[float](
    lambda c, known: known.head_dim**-0.5 if c.flag("scale_attn_weights") else 1.0,
    lambda value, spec: {"scale_attn_weights": value == spec.layers[0].attn.head_dim ** -0.5},
)

QUERY_SCALAR = Term[float](
    lambda c, known: c.integer("query_pre_attn_scalar") ** -0.5,
    lambda value, spec: {"query_pre_attn_scalar": round(value**-2) if value > 1e-10 else 0},
)


def root_unless(word: str) -> Term[float]:
    """A number, or 1 / √head_dim where it is null."""
    return Term(
        lambda c, known: c.maybe_number(word, positive=True) or known.head_dim**-0.5,
        lambda value, spec: {word: None if value == spec.layers[0].attn.head_dim ** -0.5 else value},
    )


def _read_gpt2_scales(c: Reader, known: Known) -> list[float]:
    """GPT-2 may leave the scale out, or divide it by the layer's number."""
    scale = ROOT_OR_ONE.read(c, known)
    by_layer = c.flag("scale_attn_by_inverse_layer_idx")
    return [scale / float(i + 1) if by_layer else scale for i in range(known.n_layers)]


def _write_gpt2_scales(scales: list[float], spec: ModelSpec) -> Keys:
    by_layer = len(scales) > 1 and scales[1] != scales[0]
    return {**ROOT_OR_ONE.write(scales[0], spec), "scale_attn_by_inverse_layer_idx": by_layer}


GPT2_SCALES = Term(_read_gpt2_scales, _write_gpt2_scales)

# --- windows ------------------------------------------------------------------------------------

Windows = Term[list[int | Chunk | None]]

NO_WINDOWS: Windows = Term(lambda c, known: [None] * known.n_layers, lambda windows, spec: {})
WINDOW_EVERYWHERE: Windows = Term(
    lambda c, known: [c.maybe_integer("sliding_window")] * known.n_layers,
    lambda windows, spec: {"sliding_window": windows[0]},
)


def _read_types(c: Reader, known: Known, allowed: tuple[str, ...] = LAYER_TYPES) -> list[str] | None:
    return c.maybe_items("layer_types", known.n_layers, allowed.__contains__, "of " + " | ".join(allowed))


def _width(windows: list[int | Chunk | None]) -> int | None:
    """The window of those layers that have one; a second width is found out when it is read back."""
    return next((window for window in windows if isinstance(window, int)), None)


def window_if_used(
    slides: Callable[[Reader, Known], list[bool]], rule: Callable[[list[bool]], Keys] = lambda sliding: {}
) -> Windows:
    """A window that `use_sliding_window` switches on, in the layers that `layer_types` lists.

    `slides` says which layers have it if there is no such list; `rule` writes the keys that it reads.
    """

    def read(c: Reader, known: Known) -> list[int | Chunk | None]:
        window = c.maybe_integer("sliding_window") if c.flag("use_sliding_window") else None
        c.ignore(["sliding_window"])
        sliding, types = slides(c, known), _read_types(c, known)
        if types is not None:
            sliding = [kind == SLIDING for kind in types]
            if window is None and any(sliding):
                c.fail(
                    "layer_types",
                    "has sliding layers: set use_sliding_window to true and sliding_window to a width",
                )
        return [window if own else None for own in sliding]

    def write(windows: list[int | Chunk | None], spec: ModelSpec) -> Keys:
        width, sliding = _width(windows), [window is not None for window in windows]
        keys: Keys = {"use_sliding_window": width is not None, "sliding_window": width, **rule(sliding)}
        return keys if width is None else keys | {"layer_types": list(map(layer_type, windows))}

    return Term(read, write)


def _from_a_layer_on(c: Reader, known: Known) -> list[bool]:
    first = c.integer("max_window_layers", least=0)
    return [i >= first for i in range(known.n_layers)]


def _every_second_below_a_layer(c: Reader, known: Known) -> list[bool]:
    end = c.integer("max_window_layers", least=0)
    return [i % 2 == 0 and i < end for i in range(known.n_layers)]


def _without_rotation(c: Reader, known: Known) -> list[bool]:
    return [not rotated for rotated in ROPE_LAYERS.read(c, known)]


WINDOW_FROM_A_LAYER_ON = window_if_used(
    _from_a_layer_on,
    lambda sliding: {"max_window_layers": sliding.index(True) if True in sliding else len(sliding)},
)
WINDOW_EVERY_SECOND_LAYER = window_if_used(_every_second_below_a_layer)
WINDOW_WITHOUT_ROTATION = window_if_used(_without_rotation)


def _read_one_window_if_used(c: Reader, known: Known) -> list[int | Chunk | None]:
    window = c.maybe_integer("sliding_window") if c.flag("use_sliding_window") else None
    c.ignore(["sliding_window"])
    return [window] * known.n_layers


WINDOW_EVERYWHERE_IF_USED: Windows = Term(
    _read_one_window_if_used,
    lambda windows, spec: {"use_sliding_window": windows[0] is not None, "sliding_window": windows[0]},
)


def alternating(every: int, word: str | None = None, null_is_full: bool = False) -> Windows:
    """All layers slide but each `every`th (or as `word` says), unless `layer_types` lists them.

    `null_is_full`: the family takes a window of null, and then no layer slides.
    """

    def read(c: Reader, known: Known) -> list[int | Chunk | None]:
        types = _read_types(c, known)
        if word is not None and types is not None:
            c.ignore([word])
        if types is None:
            period = (c.maybe_integer(word) if word else None) or every
            types = [SLIDING if (i + 1) % period else FULL for i in range(known.n_layers)]
            if null_is_full and c.maybe_integer("sliding_window") is None:
                types = [FULL] * known.n_layers
        window = c.maybe_integer("sliding_window")
        if window is None and SLIDING in types:
            c.fail("sliding_window", "must be a width, since layers slide: give one, or layer_types without")
        return [window if kind == SLIDING else None for kind in types]

    def write(windows: list[int | Chunk | None], spec: ModelSpec) -> Keys:
        width = _width(windows)
        keys: Keys = {"layer_types": list(map(layer_type, windows))}
        return keys if width is None else keys | {"sliding_window": width}

    return Term(read, write)


def _read_sliding(c: Reader, known: Known) -> list[bool]:
    return [window is not None for window in known.windows]


def _read_sliding_or_all(c: Reader, known: Known) -> list[bool]:
    if c.maybe_integer("sliding_window") is None:
        return [True] * known.n_layers
    return _read_sliding(c, known)


def _write_sliding_or_all(flags: list[bool], spec: ModelSpec) -> Keys:
    plain = all(flags) and all(block.attn.window is None for block in spec.layers)
    return {"sliding_window": None} if plain else {}


SLIDING_LAYERS = Term[list[bool]](_read_sliding, lambda flags, spec: {})
SLIDING_LAYERS_OR_ALL = Term[list[bool]](_read_sliding_or_all, _write_sliding_or_all)
"""Those that slide; all, if the model has no window."""

# --- layers without rotation --------------------------------------------------------------------


def _read_rope_layers(c: Reader, known: Known) -> list[bool]:
    """`no_rope_layers` has, in spite of its name, a 1 for each layer with a rotation."""
    interval = c.integer("no_rope_layer_interval")
    listed = c.raw("no_rope_layers")
    if listed is None or listed == []:
        return [(i + 1) % interval != 0 for i in range(known.n_layers)]
    return list(map(bool, c.items("no_rope_layers", known.n_layers, (0, 1).__contains__, "zeros and ones")))


ROPE_LAYERS = Term[list[bool]](
    _read_rope_layers, lambda flags, spec: {"no_rope_layers": [int(rotated) for rotated in flags]}
)


_CHUNKED = "chunked_attention"


def _read_chunks(c: Reader, known: Known) -> list[int | Chunk | None]:
    size = c.maybe_integer("attention_chunk_size")
    types = _read_types(c, known, (FULL, _CHUNKED))
    chunked = [kind == _CHUNKED for kind in types] if types else ROPE_LAYERS.read(c, known)
    if types and size is None and any(chunked):
        c.fail("attention_chunk_size", "must be a size, since layer_types has chunked layers")
    chunk = Chunk(size) if size else None
    return [chunk if own else None for own in chunked]


def _write_chunks(windows: list[int | Chunk | None], spec: ModelSpec) -> Keys:
    chunk = next((window for window in windows if isinstance(window, Chunk)), None)
    types = [FULL if window is None else _CHUNKED for window in windows]
    return {"attention_chunk_size": chunk and chunk.size, "layer_types": types}


CHUNKS: Windows = Term(_read_chunks, _write_chunks)

# --- what else may be done to scores ------------------------------------------------------------

MAX_ALIBI_HEADS = 65_536
"""Each has a slope in the spec; no model has a hundredth of it."""


def _alibi(slopes: Callable[[int], list[float]]) -> Callable[[Reader, Known], Alibi]:
    def read(c: Reader, known: Known) -> Alibi:
        if known.n_heads > MAX_ALIBI_HEADS:
            c.fail(
                "num_attention_heads", f"must be at most {MAX_ALIBI_HEADS:,}, each having a slope of ALiBi"
            )
        return Alibi(tuple(slopes(known.n_heads)))

    return read


def _single(value: float) -> float:
    """Rounded to 32 bits, as slopes are computed."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def _bfloat16(value: float) -> float:
    """Rounded to the nearest of 16 bits, an even one if two are as near."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _bloom_slopes(n_heads: int) -> list[float]:
    """Powers of 2^(-8/n) for the n heads below a power of two, and every second of 2n's for the rest."""
    n = 2 ** math.floor(math.log2(n_heads))
    base, finer = (_single(2.0 ** -(2.0 ** -(math.log2(m) - 3))) for m in (n, 2 * n))
    rest = [_single(finer ** (2 * i + 1)) for i in range(n_heads - n)]
    return [_single(base ** (i + 1)) for i in range(n)] + rest


def _mpt_slopes(n_heads: int) -> list[float]:
    """Those of the next power of two; if there are more than heads, every second comes first."""
    n = 2 ** math.ceil(math.log2(n_heads))
    slopes = [_single(2.0 ** -((i + 1) * 8 / n)) for i in range(n)]
    return slopes if n == n_heads else (slopes[1::2] + slopes[::2])[:n_heads]


BLOOM_ALIBI = Term[Alibi | None](_alibi(_bloom_slopes), lambda value, spec: {})
MPT_ALIBI = Term[Alibi | None](_alibi(_mpt_slopes), lambda value, spec: {})


def _read_falcon_alibi(c: Reader, known: Known) -> Alibi | None:
    """Falcon adds bfloat16 slopes before it scales the scores, and so scales them as well."""
    if not c.flag("alibi"):
        return None
    scale = known.head_dim**-0.5
    return _alibi(lambda n: [_bfloat16(slope) * scale for slope in _bloom_slopes(n)])(c, known)


FALCON_ALIBI = Term[Alibi | None](_read_falcon_alibi, lambda value, spec: {"alibi": value is not None})


def _read_temperature(c: Reader, known: Known) -> QueryTemperature | None:
    scale, interval = c.number("attn_scale"), c.integer("floor_scale")
    return QueryTemperature(scale, interval) if c.flag("attn_temperature_tuning") else None


def _write_temperature(value: QueryTemperature | None, spec: ModelSpec) -> Keys:
    keys: Keys = {"attn_temperature_tuning": value is not None}
    return keys if value is None else keys | {"attn_scale": value.scale, "floor_scale": value.interval}


TEMPERATURE = Term(_read_temperature, _write_temperature)

ATTENTION_BIAS = flag("attention_bias")
PLAIN_ROTARY = rotary()

# --- the whole ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Attention with query, key and value heads. A norm that comes after the rotation is there where a
    rotation is, and `temperature` where none is (Llama 4)."""

    kv_heads: Term[int] = GROUPED
    head_dim: Term[int] = HEAD_DIM
    qkv_bias: Term[bool] = NEVER
    o_bias: Term[bool] = NEVER
    norm: Term[HeadNorm | None] = NONE
    clip: Term[float | None] = NONE
    scales: Term[list[float]] = ROOTS
    softcap: Term[float | None] = NONE
    windows: Windows = NO_WINDOWS
    ropes: Term[Ropes] = PLAIN_ROTARY
    alibi: Term[Alibi | None] = NONE
    temperature: Term[QueryTemperature | None] = NONE
    sinks: bool = False

    def read(self, c: Reader, known: Known) -> list[Attention | LatentAttention]:
        known = replace(known, n_heads=c.integer("num_attention_heads"))
        known = replace(known, head_dim=self.head_dim.read(c, known))
        windows = self.windows.read(c, known)
        known = replace(known, rope_width=known.head_dim, windows=tuple(windows))
        ropes, scales = self.ropes.read(c, known), self.scales.read(c, known)
        alibi, norm = self.alibi.read(c, known), self.norm.read(c, known)
        temperature = self.temperature.read(c, known)
        qkv_bias = self.qkv_bias.read(c, known)
        common = Attention(
            n_heads=known.n_heads,
            n_kv_heads=self.kv_heads.read(c, known),
            head_dim=known.head_dim,
            scale=1.0,
            q_bias=qkv_bias,
            k_bias=qkv_bias,
            v_bias=qkv_bias,
            o_bias=self.o_bias.read(c, known),
            softcap=self.softcap.read(c, known),
            alibi=alibi,
            sinks=self.sinks,
            clip_qkv=self.clip.read(c, known),
        )
        kinds: dict[object, Attention] = {}
        layers: list[Attention | LatentAttention] = []
        for window, rope, scale in zip(windows, ropes, scales, strict=True):
            kind = window, id(rope), scale
            if kind not in kinds:
                rope = None if alibi else rope
                own = None if norm and norm.after_rope and rope is None else norm
                kinds[kind] = replace(
                    common,
                    window=window,
                    rope=rope,
                    scale=scale,
                    q_norm=own,
                    k_norm=own,
                    temperature=temperature if rope is None else None,
                )
            layers.append(kinds[kind])
        return layers

    def write(self, attns: list[Attention | LatentAttention], spec: ModelSpec) -> Keys:
        layers = [attn for attn in attns if isinstance(attn, Attention)]
        if len(layers) < len(attns):
            raise UnsupportedError("its attention has no latent kind")
        first = layers[0]
        return {
            "num_attention_heads": first.n_heads,
            **self.kv_heads.write(first.n_kv_heads, spec),
            **self.head_dim.write(first.head_dim, spec),
            **self.qkv_bias.write(first.q_bias, spec),
            **self.o_bias.write(first.o_bias, spec),
            **self.norm.write(next((a.q_norm for a in layers if a.q_norm), None), spec),
            **self.clip.write(first.clip_qkv, spec),
            **self.scales.write([attn.scale for attn in layers], spec),
            **self.softcap.write(first.softcap, spec),
            **self.windows.write([attn.window for attn in layers], spec),
            **self.ropes.write([attn.rope for attn in layers], spec),
            **self.alibi.write(first.alibi, spec),
            **self.temperature.write(next((a.temperature for a in layers if a.temperature), None), spec),
        }


@dataclass(frozen=True)
class LatentHeads:
    """Multi-head latent attention. Its two inner norms have an epsilon of their own."""

    ropes: Term[Ropes]
    bias: Term[bool] = ATTENTION_BIAS

    def read(self, c: Reader, known: Known) -> list[Attention | LatentAttention]:
        known = replace(known, n_heads=c.integer("num_attention_heads"))
        if (c.maybe_integer("num_key_value_heads") or known.n_heads) != known.n_heads:
            c.fail(
                "num_key_value_heads", f"must be num_attention_heads = {known.n_heads} in latent attention"
            )
        nope, turned = c.integer("qk_nope_head_dim"), c.integer("qk_rope_head_dim")
        c.only("head_dim", (turned,), "what is called so here is qk_rope_head_dim")
        known = replace(known, head_dim=nope + turned, rope_width=turned, windows=(None,) * known.n_layers)
        norm, bias = Norm("rms", eps=1e-6), self.bias.read(c, known)
        q_rank, factor = c.maybe_integer("q_lora_rank"), read_score_factor(c)
        attn = LatentAttention(
            n_heads=known.n_heads,
            nope_dim=nope,
            rope_dim=turned,
            v_dim=c.integer("v_head_dim"),
            kv_rank=c.integer("kv_lora_rank"),
            kv_norm=norm,
            scale=known.head_dim**-0.5 * factor * factor,
            q_rank=q_rank,
            q_norm=norm if q_rank else None,
            rope=self.ropes.read(c, known)[0],
            down_bias=bias,
            o_bias=bias,
        )
        return [attn] * known.n_layers

    def write(self, attns: list[Attention | LatentAttention], spec: ModelSpec) -> Keys:
        first = attns[0]
        if not isinstance(first, LatentAttention):
            raise UnsupportedError("its attention is latent")
        return {
            "num_attention_heads": first.n_heads,
            "num_key_value_heads": first.n_heads,
            "qk_nope_head_dim": first.nope_dim,
            "qk_rope_head_dim": first.rope_dim,
            "v_head_dim": first.v_dim,
            "kv_lora_rank": first.kv_rank,
            "q_lora_rank": first.q_rank,
            **self.bias.write(first.o_bias, spec),
            **self.ropes.write([attn.rope for attn in attns], spec),
        }
