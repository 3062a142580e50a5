"""Rotary positions in a config.json ⇄ the `Rope` of each layer.

A rotation is spelled in several ways: `rope_theta` beside `rope_scaling` (until transformers 4), or
both within `rope_parameters` (from 5 on), where either object may hold one object per layer type.
All are read, and the older one is written, which every version and most other programs read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from openbook.spec.hf.term import Keys, Known, Term, constant
from openbook.spec.model import (
    Chunk,
    DynamicScaling,
    FrequencyDivisors,
    LatentAttention,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    ModelSpec,
    Rope,
    RopeScaling,
    SpecError,
    YarnScaling,
)
from openbook.spec.reader import Reader, UnsupportedError, show

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")

Layout = Literal["half", "interleaved"]
Ropes = list[Rope | None]
"""One for each layer."""

HALF: Term[Layout] = constant("half")
INTERLEAVED: Term[Layout] = constant("interleaved")


def layer_type(window: int | Chunk | None) -> str:
    return FULL if window is None else SLIDING


# --- the rotation of a family -------------------------------------------------------------------


def rotary(
    theta: float = 10_000.0,
    partial: float | None = None,
    layout: Term[Layout] = HALF,
    types: Mapping[str, ReadRope] | None = None,
    absent: Mapping[str, Any] | None = None,
    original_outside: bool = False,
    dim_word: str | None = None,
) -> Term[Ropes]:
    """Rotations as most families have them.

    `theta` is the base of a config that has none, `partial` the part of a head that is turned in one that
    does not say (None: such families turn the whole head), `types` what `rope_type` may be, `absent` the
    rotation that a config without any has. `original_outside`: the original length is a key of the config.
    `dim_word` is an older key, of how many elements are turned.
    """

    def read(c: Reader, known: Known) -> Ropes:
        kinds = read_kinds(c, known)
        return [kinds[layer_type(window)] for window in known.windows]

    def read_kinds(c: Reader, known: Known) -> dict[str, Rope | None]:
        context = _Context(
            width=known.rope_width,
            partial=_read_partial(c, partial, known.rope_width, dim_word),
            layout=layout.read(c, known),
            max_positions=known.max_positions,
            base=c.maybe_number("rope_theta", positive=True) or theta,
            original_positions=c.maybe_integer("original_max_position_embeddings"),
            types=types or SCALINGS,
        )
        objects = [c.object(key) for key in ("rope_scaling", "rope_parameters")]
        found = [r for r in objects if r is not None] or [Reader(absent or {}, c.where)]
        readings = [_read_object(r, context) for r in found]
        if readings[0] != readings[-1]:
            raise SpecError(
                f"{c.where}.rope_scaling and {c.where}.rope_parameters contradict each other: remove one"
            )
        return readings[0]

    def write(ropes: Ropes, spec: ModelSpec) -> Keys:
        rope = next((rope for rope in ropes if rope is not None), None)
        if rope is None:
            return {}
        scaling = _write_scaling(rope.scaling, spec.max_positions)
        keys = {
            "rope_theta": float(rope.base),
            "rope_scaling": scaling or (absent and {"rope_type": "default"}),
        }
        if partial is not None:
            keys["partial_rotary_factor"] = _fraction(rope.dim, _rope_width(spec))
        if original_outside and isinstance(rope.scaling, LongRope):
            keys["original_max_position_embeddings"] = rope.scaling.original_positions
        return keys | layout.write(rope.layout, spec)

    return Term(read, write)


def rotary_by_type(theta: float, local_theta: float, local_word: str | None = None) -> Term[Ropes]:
    """Full and sliding layers each with a rotation of their own; `rope_scaling` is of the full ones.

    `local_word` is the older key of the sliding layers' base, where there is one.
    """

    def read(c: Reader, known: Known) -> Ropes:
        context = _Context(
            width=known.rope_width,
            max_positions=known.max_positions,
            base=c.maybe_number("rope_theta", positive=True) or theta,
        )
        local = replace(
            context, base=(c.maybe_number(local_word, positive=True) if local_word else None) or local_theta
        )
        scaling, both = c.object("rope_scaling"), c.object("rope_parameters")
        if scaling is not None and both is not None:
            raise SpecError(f"{c.where}.rope_scaling is given beside {c.where}.rope_parameters: remove one")
        nothing = Reader({}, c.where)
        kinds = {
            FULL: _read_rope(scaling or (both and both.object(FULL)) or nothing, context),
            SLIDING: _read_rope((both and both.object(SLIDING)) or nothing, local),
        }
        if both is not None:
            both.finish(f"here it may hold {' and '.join(LAYER_TYPES)}")
        return [kinds[layer_type(window)] for window in known.windows]

    def write(ropes: Ropes, spec: ModelSpec) -> Keys:
        kinds: dict[str, Rope] = {}
        for rope, block in zip(ropes, spec.layers, strict=True):
            if rope is not None:
                kinds.setdefault(layer_type(block.attn.window), rope)
        full = kinds.get(FULL, Rope(2, base=theta))
        local = kinds.get(SLIDING, Rope(2, base=local_theta))
        if local.scaling is None and (local_word or local.base == local_theta):
            keys: Keys = {
                "rope_theta": float(full.base),
                "rope_scaling": _write_scaling(full.scaling, spec.max_positions),
            }
            return keys | ({local_word: float(local.base)} if local_word else {})
        return {
            "rope_parameters": {
                kind: {
                    "rope_theta": float(rope.base),
                    **(_write_scaling(rope.scaling, spec.max_positions) or _UNSCALED),
                }
                for kind, rope in ((FULL, full), (SLIDING, local))
            }
        }

    return Term(read, write)


def rotary_of(word: str, layout: Layout) -> Term[Ropes]:
    """A rotation of which a config says nothing but how many elements it turns."""

    def read(c: Reader, known: Known) -> Ropes:
        dim = c.integer(word, most=known.rope_width)
        if dim % 2:
            c.fail(word, f"must be even, since elements are rotated in pairs, found {dim}")
        return [Rope(dim, layout=layout)] * known.n_layers

    return Term(read, lambda ropes, spec: {word: ropes[0].dim} if ropes[0] else {})


def only_where(rotated: Term[list[bool]], ropes: Term[Ropes]) -> Term[Ropes]:
    """Rotations in some layers, and none in the others (NoPE, Kazemnejad et al. 2023)."""

    def read(c: Reader, known: Known) -> Ropes:
        pairs = zip(ropes.read(c, known), rotated.read(c, known), strict=True)
        return [rope if turned else None for rope, turned in pairs]

    def write(found: Ropes, spec: ModelSpec) -> Keys:
        return ropes.write(found, spec) | rotated.write([rope is not None for rope in found], spec)

    return Term(read, write)


def scaling_scores_too(ropes: Term[Ropes]) -> Term[Ropes]:
    """YaRN as DeepSeek has it, where `mscale_all_dim` also says what multiplies the scores.

    `read_score_factor` reads it for those; it is written with the rotation, being part of its object.
    """

    def write(found: Ropes, spec: ModelSpec) -> Keys:
        keys = ropes.write(found, spec)
        attn, rope = spec.layers[0].attn, found[0]
        if rope is None or not isinstance(rope.scaling, YarnScaling) or not isinstance(attn, LatentAttention):
            return keys
        growth = math.sqrt(max(0.0, attn.scale) * math.sqrt(attn.head_dim)) - 1
        mscale = round(growth / (0.1 * math.log(rope.scaling.factor)), 12) if rope.scaling.factor > 1 else 0.0
        return {**keys, "rope_scaling": {**keys["rope_scaling"], "mscale_all_dim": mscale}}

    return Term(ropes.read, write)


def read_score_factor(c: Reader) -> float:
    """What `scaling_scores_too` multiplies the scores by, twice."""
    for r in (c.object("rope_scaling"), c.object("rope_parameters")):
        if r is None or (r.maybe_text("rope_type") or r.maybe_text("type") or "default") == "default":
            continue
        mscale = r.maybe_number("mscale_all_dim")
        if mscale:
            return _yarn_mscale(r.number("factor", positive=True), mscale)
    return 1.0


NO_ROPES: Term[Ropes] = Term(lambda c, known: [None] * known.n_layers, lambda ropes, spec: {})

# --- reading one rotation -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Context:
    """What a rotation's reader needs from outside its own object."""

    width: int
    max_positions: int
    base: float
    partial: float | None = None
    layout: Layout = "half"
    original_positions: int | None = None
    types: Mapping[str, ReadRope] | None = None
    dim: int = 0

    def original(self, r: Reader) -> int:
        """The length before scaling: the config's own key wins over the object's, as in transformers."""
        inner = r.maybe_integer("original_max_position_embeddings")
        return self.original_positions or inner or self.max_positions

    def rope(self, scaling: RopeScaling | None = None) -> Rope:
        return Rope(self.dim, base=self.base, layout=self.layout, scaling=scaling)


ReadRope = Callable[[Reader, _Context], Rope]

_WHOLE = (1, 1.0), "this family rotates the whole head"
_UNSCALED = {"rope_type": "default"}


def _read_partial(c: Reader, default: float | None, width: int, dim_word: str | None) -> float | None:
    """The part of a head that is turned, None where a family has no word for it."""
    if default is None:
        c.only("partial_rotary_factor", *_WHOLE)
        return None
    part = c.maybe_number("partial_rotary_factor", positive=True)
    dim = c.maybe_integer(dim_word, most=width) if dim_word else None
    return part or (dim / width if dim else default)


def _read_object(r: Reader, context: _Context) -> dict[str, Rope | None]:
    if not any(kind in r for kind in LAYER_TYPES):
        return dict.fromkeys(LAYER_TYPES, _read_rope(r, context))
    ropes: dict[str, Rope | None] = {}
    for kind in LAYER_TYPES:
        inner = r.object(kind)  # null: these layers have no positions
        ropes[kind] = _read_rope(inner, context) if inner is not None else None
    r.finish(f"it may hold {' and '.join(LAYER_TYPES)}")
    return ropes


def _read_rope(r: Reader, context: _Context) -> Rope:
    types = context.types or SCALINGS
    kind = r.maybe_text("rope_type")
    old_kind = r.maybe_text("type")
    if kind and old_kind and kind != old_kind:
        r.fail("rope_type", f"is {show(kind)} but type is {show(old_kind)}: remove one")
    kind = kind or old_kind or "default"
    if kind not in types:
        r.fail(
            "rope_type", f"{show(kind)} is not supported; supported are {', '.join(types)}", UnsupportedError
        )
    dim = _read_dim(r, context)
    context = replace(context, dim=dim, base=r.maybe_number("rope_theta", positive=True) or context.base)
    rope = types[kind](r, context)
    r.finish(f"rope type {kind!r} has no such key: remove it, or name the type that uses it")
    return rope


def _read_dim(r: Reader, context: _Context) -> int:
    """How many elements of a head are turned."""
    dim = context.width
    if context.partial is None:
        r.only("partial_rotary_factor", *_WHOLE)
    else:
        part = r.maybe_number("partial_rotary_factor", positive=True) or context.partial
        dim = int(min(part, 2.0) * dim)
    if dim % 2 or not 0 < dim <= context.width:
        raise SpecError(
            f"{r.where}: {dim} of the {context.width} elements of a head would be rotated; they are rotated "
            "in pairs, so it must be an even number: change head_dim or partial_rotary_factor"
        )
    return dim


def _read_linear(r: Reader, context: _Context) -> Rope:
    return context.rope(LinearScaling(r.number("factor", positive=True)))


def _read_dynamic(r: Reader, context: _Context) -> Rope:
    """transformers grows the base from `max_position_embeddings` on and reads no other length."""
    inner = r.maybe_integer("original_max_position_embeddings")
    if inner not in (None, context.max_positions):
        r.fail(
            "original_max_position_embeddings",
            f"is {inner}, but dynamic scaling starts at max_position_embeddings = {context.max_positions}: "
            "set that to the original length and remove this key",
        )
    if context.dim == 2:
        r.fail("rope_type", "dynamic needs a head_dim above 2")
    return context.rope(DynamicScaling(r.number("factor", positive=True), context.max_positions))


def _read_llama3(r: Reader, context: _Context) -> Rope:
    low, high = r.number("low_freq_factor", positive=True), r.number("high_freq_factor", positive=True)
    if high < low:
        r.fail("high_freq_factor", f"must be at least low_freq_factor = {low}, found {high}")
    scaling = Llama3Scaling(
        factor=r.number("factor", positive=True),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=context.original(r),
    )
    return context.rope(scaling)


def _read_yarn(r: Reader, context: _Context) -> Rope:
    """`attention_factor`, if absent, follows from the factor and from mscale / mscale_all_dim."""
    original = context.original(r)
    factor = r.maybe_number("factor", positive=True) or context.max_positions / original
    mscale, mscale_all_dim = r.maybe_number("mscale"), r.maybe_number("mscale_all_dim")
    attention_factor = r.maybe_number("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_mscale(factor)
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    truncate = r.maybe_flag("truncate")
    if context.base == 1:
        r.fail("rope_theta", "must not be 1 for yarn, which divides by its logarithm")
    scaling = YarnScaling(
        factor=factor,
        original_positions=original,
        attention_factor=attention_factor,
        beta_fast=r.maybe_number("beta_fast") or 32.0,
        beta_slow=r.maybe_number("beta_slow") or 1.0,
        truncate=True if truncate is None else truncate,
    )
    return context.rope(scaling)


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_longrope(r: Reader, context: _Context) -> Rope:
    """Two lists of divisors, for short runs and for long; equal ones without a factor are one."""
    short, long = (
        tuple(map(float, r.items(f"{which}_factor", context.dim // 2, _is_divisor, "numbers above 0")))
        for which in ("short", "long")
    )
    original = context.original(r)
    factor = r.maybe_number("factor", positive=True) or context.max_positions / original
    attention_factor = r.maybe_number("attention_factor")
    if attention_factor is None:
        if factor > 1 and original < 2:
            r.fail(
                "original_max_position_embeddings",
                "must be above 1 for longrope, which divides by its logarithm",
            )
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if short == long and attention_factor == 1:
        return context.rope(FrequencyDivisors(short))
    return context.rope(LongRope(short, long, original, attention_factor))


def _is_divisor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _read_ntk_alpha(r: Reader, context: _Context) -> Rope:
    """HunYuan's "dynamic" with an `alpha`, which raises the base once and for all."""
    alpha = r.maybe_number("alpha")
    if not alpha:
        return _read_dynamic(r, context)
    if context.dim == 2:
        r.fail("alpha", "needs a head_dim above 2")
    r.ignore(["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"])
    return replace(context, base=context.base * alpha ** (context.dim / (context.dim - 2))).rope()


SCALINGS: Mapping[str, ReadRope] = {
    "default": lambda r, context: context.rope(),
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "llama3": _read_llama3,
    "longrope": _read_longrope,
}
"""What `rope_type` may be."""

NTK_ALPHA = {**SCALINGS, "dynamic": _read_ntk_alpha}
LONGROPE_ONLY = {"default": SCALINGS["default"], **dict.fromkeys(("longrope", "su", "yarn"), _read_longrope)}
"""Phi-3's, whose older files call it "su" or "yarn"."""

# --- writing one rotation -----------------------------------------------------------------------


def _rope_width(spec: ModelSpec) -> int:
    attn = spec.layers[0].attn
    return attn.rope_dim if isinstance(attn, LatentAttention) else attn.head_dim


def _fraction(dim: int, width: int) -> float:
    """The part that gives `dim` again when it is multiplied with `width` and cut to an integer."""
    return dim / width if int(width * (dim / width)) == dim else (dim + 0.5) / width


def _write_scaling(scaling: RopeScaling | None, max_positions: int) -> Keys | None:
    """`rope_scaling`; None for none."""
    match scaling:
        case None:
            return None
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case DynamicScaling():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_positions,
            }
        case YarnScaling():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_positions,
                "attention_factor": float(scaling.attention_factor),
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
            }
        case FrequencyDivisors():
            return {
                "rope_type": "longrope",
                "factor": 1.0,
                "attention_factor": 1.0,
                "short_factor": list(scaling.divisors),
                "long_factor": list(scaling.divisors),
                "original_max_position_embeddings": max_positions,
            }
        case LongRope():
            return {
                "rope_type": "longrope",
                "factor": max(1.0, max_positions / max(1, scaling.original_positions)),
                "attention_factor": float(scaling.attention_factor),
                "short_factor": list(scaling.short),
                "long_factor": list(scaling.long),
                "original_max_position_embeddings": scaling.original_positions,
            }
