"""Rotary positions in a config.json, in every spelling ⇄ `Rope`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from openbook.spec.hf.family import LAYER_TYPES
from openbook.spec.hf.irrelevant import ONLY
from openbook.spec.model import (
    DynamicScaling,
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    SpecError,
    YarnScaling,
)
from openbook.spec.reader import Reader, UnsupportedError, show


@dataclass(frozen=True)
class _RopeContext:
    """What a rotation's reader needs from outside its own object."""

    dim: int
    max_positions: int
    base: float | None
    original_positions: int | None

    def original(self, r: Reader) -> int:
        """The length before scaling: the config's own key wins over the object's, as in transformers."""
        inner = r.maybe_integer("original_max_position_embeddings")
        return self.original_positions or inner or self.max_positions


def read_ropes(c: Reader, head_dim: int, max_positions: int) -> dict[str, Rope | None]:
    """The rotation of each layer type, from any of its spellings.

    `rope_theta` beside `rope_scaling` (until transformers 4), or both within `rope_parameters` (from
    5 on); either object may hold one object per layer type instead.
    """
    context = _RopeContext(
        dim=head_dim,
        max_positions=max_positions,
        base=c.maybe_number("rope_theta", positive=True),
        original_positions=c.maybe_integer("original_max_position_embeddings"),
    )
    objects = [c.object(key) for key in ("rope_scaling", "rope_parameters")]
    readings = [_read_rope_object(r, context) for r in objects if r is not None]
    if not readings:
        return dict.fromkeys(LAYER_TYPES, Rope(head_dim, base=context.base or _DEFAULT_BASE))
    if readings[0] != readings[-1]:
        raise SpecError("config.rope_scaling and config.rope_parameters contradict each other: remove one")
    return readings[0]


_DEFAULT_BASE = 10_000.0


def _read_rope_object(r: Reader, context: _RopeContext) -> dict[str, Rope | None]:
    if not any(kind in r for kind in LAYER_TYPES):
        return dict.fromkeys(LAYER_TYPES, _read_rope(r, context))
    ropes: dict[str, Rope | None] = {}
    for kind in LAYER_TYPES:
        inner = r.object(kind)  # null: these layers have no positions
        ropes[kind] = _read_rope(inner, context) if inner is not None else None
    r.finish(f"it may hold {' and '.join(LAYER_TYPES)}")
    return ropes


def _read_rope(r: Reader, context: _RopeContext) -> Rope:
    kind = r.maybe_text("rope_type")
    old_kind = r.maybe_text("type")
    if kind and old_kind and kind != old_kind:
        r.fail("rope_type", f"is {show(kind)} but type is {show(old_kind)}: remove one")
    kind = kind or old_kind or "default"
    if kind not in _ROPE_TYPES:
        r.fail(
            "rope_type",
            f"{show(kind)} is not supported; supported are {', '.join(_ROPE_TYPES)}",
            UnsupportedError,
        )
    r.only("partial_rotary_factor", *ONLY["partial_rotary_factor"])
    base = r.maybe_number("rope_theta", positive=True) or context.base or _DEFAULT_BASE
    rope = Rope(context.dim, base=base, scaling=_ROPE_TYPES[kind](r, replace(context, base=base)))
    r.finish(f"rope type {kind!r} has no such key: remove it, or name the type that uses it")
    return rope


def _read_linear(r: Reader, context: _RopeContext) -> RopeScaling:
    return LinearScaling(r.number("factor", positive=True))


def _read_dynamic(r: Reader, context: _RopeContext) -> RopeScaling:
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
    return DynamicScaling(r.number("factor", positive=True), context.max_positions)


def _read_llama3(r: Reader, context: _RopeContext) -> RopeScaling:
    low, high = r.number("low_freq_factor", positive=True), r.number("high_freq_factor", positive=True)
    if high <= low:
        r.fail("high_freq_factor", f"must be above low_freq_factor = {low}, found {high}")
    return Llama3Scaling(
        factor=r.number("factor", positive=True),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=context.original(r),
    )


def _read_yarn(r: Reader, context: _RopeContext) -> RopeScaling:
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
    return YarnScaling(
        factor=factor,
        original_positions=original,
        attention_factor=attention_factor,
        beta_fast=r.maybe_number("beta_fast") or 32.0,
        beta_slow=r.maybe_number("beta_slow") or 1.0,
        truncate=True if truncate is None else truncate,
    )


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_longrope(r: Reader, context: _RopeContext) -> RopeScaling:
    """One list of divisors. Two lists, one for short runs and one for long, are not supported."""
    half = context.dim // 2
    short, long = (
        r.maybe_items(f"{which}_factor", half, _is_divisor, "numbers above 0") for which in ("short", "long")
    )
    original = context.original(r)
    factor = r.maybe_number("factor", positive=True) or context.max_positions / original
    attention_factor = r.maybe_number("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.nan
    if short is None or short != long or attention_factor != 1:
        r.fail(
            "rope_type",
            "longrope is supported with short_factor = long_factor and attention_factor 1",
            UnsupportedError,
        )
    return FrequencyDivisors(tuple(map(float, short)))


def _is_divisor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_ROPE_TYPES: Mapping[str, Callable[[Reader, _RopeContext], RopeScaling | None]] = {
    "default": lambda r, context: None,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "llama3": _read_llama3,
    "longrope": _read_longrope,
}


def write_rope(rope: Rope, max_positions: int) -> dict[str, Any]:
    """In the spelling of transformers 4, which every version and most other programs read."""
    return {"rope_theta": float(rope.base), "rope_scaling": _write_scaling(rope.scaling, max_positions)}


def _write_scaling(scaling: RopeScaling | None, max_positions: int) -> dict[str, Any] | None:
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
