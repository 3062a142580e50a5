"""The rotation in a GGUF file: keys under `rope.`, and tensors with a number for each frequency."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openbook.spec.gguf.architecture import Architecture
from openbook.spec.gguf.shown import Shown, kept_as_numbers
from openbook.spec.model import (
    FrequencyDivisors,
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

ROPE_FREQS = "rope_freqs.weight"
"""The tensor with one divisor for each frequency, dim/2 of them."""

SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""The two tensors of LongRoPE, likewise."""

ROPE_TENSORS = (ROPE_FREQS, SHORT_FACTORS, LONG_FACTORS)


def shortest(value: float) -> float:
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


def unless_rounded(value: float, exact: float) -> float:
    """A number of 64 bits instead of its copy of 32."""
    return exact if _close(value, exact, 1e-6) else value


def read_number(c: Reader, key: str, default: float, *, positive: bool = True) -> float:
    value = c.maybe_number(key, positive=positive)
    return default if value is None else shortest(value)


# --- reading ------------------------------------------------------------------------------------


def read_rope(arch: Architecture, c: Reader, head_dim: int, max_positions: int, shown: Shown) -> Rope:
    """The rotation of a layer that does not slide."""
    dim = c.maybe_integer("rope.dimension_count") or head_dim
    if dim % 2 or dim > head_dim or (dim != head_dim and arch.turns_whole_heads):
        bound = f"the head size {head_dim}, and even"
        bound = bound if arch.turns_whole_heads else f"an even number up to {head_dim}"
        c.fail("rope.dimension_count", f"must be {bound}, found {dim}")
    base = read_number(c, "rope.freq_base", 10_000.0)
    attn_factor = read_number(c, "rope.scaling.attn_factor", 1.0)
    attn_factor *= read_number(c, "rope.scaling.yarn_attn_factor", 1.0)
    original = c.maybe_integer("rope.scaling.original_context_length") or max_positions

    rope = Rope(dim, base, arch.layout)
    by_numbers = _read_numbers(rope, original, max_positions, attn_factor, shown)
    stated = _read_stated(arch, c, base, original, 1.0 if by_numbers else attn_factor)
    if c.raw("rope.scaling.type") == "longrope" and not by_numbers:
        c.fail("rope.scaling.type", f"is longrope, which needs {SHORT_FACTORS} and {LONG_FACTORS}")
    if by_numbers and stated:
        c.fail("rope.scaling.type", "is given, and numbers for each frequency as well", UnsupportedError)
    return replace(rope, scaling=by_numbers or stated)


def sliding_rope(arch: Architecture, c: Reader, rope: Rope) -> Rope:
    """The rotation of a layer that slides."""
    stated = c.maybe_number("rope.freq_base_swa", positive=True)
    match arch.windows.rope:
        case "own":
            return replace(rope, base=shortest(stated or arch.windows.sliding_base), scaling=None)
        case "unscaled":
            return replace(rope, base=shortest(stated or rope.base), scaling=None)
        case "same":
            return rope if stated is None else replace(rope, base=shortest(stated))


_SCALING_TYPES = {"none": "none", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}


def _read_stated(
    arch: Architecture, c: Reader, base: float, original: int, attn_factor: float
) -> RopeScaling | None:
    """llama.cpp's rule: a factor without a type is linear, and a factor of 0 is none."""
    factor = c.maybe_number("rope.scaling.factor")
    old_factor = c.maybe_number("rope.scale_linear")
    factor = shortest(factor if factor is not None else old_factor or 0.0)
    beta_fast = read_number(c, "rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = read_number(c, "rope.scaling.yarn_beta_slow", 1.0)
    log_multiplier = read_number(c, "rope.scaling.yarn_log_multiplier", 0.0, positive=False)

    kind = c.choice("rope.scaling.type", _SCALING_TYPES) if "rope.scaling.type" in c else "linear"
    if kind == "yarn":
        if factor == 0:
            c.fail("rope.scaling.factor", "is missing, and yarn needs it")
        if base == 1:
            c.fail("rope.freq_base", "must not be 1 for yarn, which divides by its logarithm")
        if log_multiplier and not arch.latent:
            c.fail("rope.scaling.yarn_log_multiplier", "is not used by this architecture", UnsupportedError)
        attn_factor *= 1.0 if log_multiplier else yarn_mscale(factor)
        return YarnScaling(factor, original, attn_factor, beta_fast, beta_slow, arch.truncated_yarn)
    if log_multiplier:
        c.fail("rope.scaling.yarn_log_multiplier", "is given without yarn", UnsupportedError)
    if attn_factor != 1:
        c.fail("rope.scaling.attn_factor", f"is {attn_factor}, supported with yarn only", UnsupportedError)
    return LinearScaling(factor) if kind == "linear" and factor not in (0.0, 1.0) else None


def yarn_mscale(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's own factor, which llama.cpp multiplies in by itself; metadata holds the rest."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_numbers(
    rope: Rope, original: int, max_positions: int, attn_factor: float, shown: Shown
) -> RopeScaling | None:
    """The scaling that a file keeps as numbers. In metadata alone, it is what the caller says it is."""
    if shown.scaling is not None:
        if isinstance(shown.scaling, LongRope):
            exact = shown.scaling.attention_factor
            return replace(
                shown.scaling,
                original_positions=original,
                attention_factor=unless_rounded(attn_factor, exact),
            )
        return shown.scaling
    if SHORT_FACTORS in shown.numbers and LONG_FACTORS in shown.numbers:
        exact = long_rope_factor(original, max_positions)
        return LongRope(
            _checked(shown.numbers[SHORT_FACTORS], rope, SHORT_FACTORS),
            _checked(shown.numbers[LONG_FACTORS], rope, LONG_FACTORS),
            original,
            unless_rounded(attn_factor, exact),
        )
    if ROPE_FREQS in shown.numbers:
        return _named(_checked(shown.numbers[ROPE_FREQS], rope, ROPE_FREQS), rope)
    return None


def long_rope_factor(original: int, max_positions: int) -> float:
    """LongRoPE's usual factor of cosine and sine, √(1 + ln(scale) / ln(original))."""
    scale = max_positions / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 and original > 1 else 1.0


def _checked(numbers: Sequence[float], rope: Rope, name: str) -> tuple[float, ...]:
    if len(numbers) != rope.dim // 2 or not all(math.isfinite(n) and n > 0 for n in numbers):
        raise SpecError(
            f"{name} must hold {rope.dim // 2} finite numbers above 0, found {len(numbers)}: "
            f"{show(min(numbers, default=None))} to {show(max(numbers, default=None))}"
        )
    return tuple(map(shortest, numbers))


# --- Llama 3's rule -----------------------------------------------------------------------------


def _named(numbers: tuple[float, ...], rope: Rope) -> RopeScaling | None:
    """The rule behind the numbers if it is Llama 3.1's or Llama 4's as published, or else the numbers."""
    if max(numbers) == min(numbers) == 1:
        return None
    for high in (4.0, 1.0):
        published = Llama3Scaling(max(numbers), 1.0, high, original_positions=8192)
        if all(map(_close, numbers, llama3_divisors(published, rope))):
            return published
    return FrequencyDivisors(numbers)


def _close(a: float, b: float, tolerance: float = 1e-5) -> bool:
    return math.isclose(a, b, rel_tol=tolerance)


def llama3_divisors(scaling: Llama3Scaling, rope: Rope) -> tuple[float, ...]:
    """What Llama 3.1's rule divides each frequency by: 1 for short waves, `factor` for long ones."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor

    def divisor(i: int) -> float:
        wavelength = 2 * math.pi * rope.base ** (2 * i / rope.dim)
        turns = scaling.original_positions / wavelength
        kept = float(turns > high) if high == low else (turns - low) / (high - low)
        kept = min(max(kept, 0.0), 1.0)
        return 1 / ((1 - kept) / scaling.factor + kept)

    return tuple(divisor(i) for i in range(rope.dim // 2))


# --- writing ------------------------------------------------------------------------------------


def rope_tensors(spec: ModelSpec) -> dict[str, tuple[float, ...]]:
    """The numbers of the tensors that say how the model's rotation is scaled: none for most models."""
    match kept_as_numbers(spec):
        case FrequencyDivisors(divisors):
            return {ROPE_FREQS: divisors}
        case LongRope(short, long):
            return {SHORT_FACTORS: short, LONG_FACTORS: long}
        case Llama3Scaling() as scaling:
            rope = next(b.attn.rope for b in spec.layers if b.attn.rope and b.attn.rope.scaling == scaling)
            return {ROPE_FREQS: llama3_divisors(scaling, rope)}
    return {}


def write_rope(rope: Rope, log_multiplier: float = 0.0) -> dict[str, Any]:
    """`log_multiplier` is YaRN's, of an architecture that has the scores multiplied by it too."""
    keys: dict[str, Any] = {"rope.dimension_count": rope.dim, "rope.freq_base": float(rope.base)}
    match rope.scaling:
        case LinearScaling(factor):
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
        case LongRope() as scaling:
            keys |= {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": scaling.original_positions,
                "rope.scaling.attn_factor": float(scaling.attention_factor),
            }
        case YarnScaling() as yarn:
            own = 1.0 if log_multiplier else yarn_mscale(yarn.factor)
            keys |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(yarn.factor),
                "rope.scaling.original_context_length": yarn.original_positions,
                "rope.scaling.attn_factor": yarn.attention_factor / own,
                "rope.scaling.yarn_beta_fast": float(yarn.beta_fast),
                "rope.scaling.yarn_beta_slow": float(yarn.beta_slow),
            }
            if log_multiplier:
                keys["rope.scaling.yarn_log_multiplier"] = log_multiplier
    return keys


def write_sliding_rope(arch: Architecture, full: Rope, sliding: Rope) -> dict[str, Any]:
    """The base of the layers that slide, where the architecture does not have it anyway."""
    usual = arch.windows.sliding_base if arch.windows.rope == "own" else full.base
    return {} if sliding.base == usual else {"rope.freq_base_swa": float(sliding.base)}
