"""Where a token stands: vectors added to the embedding, or rotations of queries and keys.

Angles are made in fp32 on the spot, whatever the model's dtype: bf16 cannot even hold the integer 257,
and a table kept as a buffer would be cast along with the weights.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from openbook.spec.model import (
    DynamicScaling,
    FrequencyDivisors,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    QueryTemperature,
    Rope,
    Sinusoidal,
    YarnScaling,
)


class LearnedPositions(nn.Module):
    """One trained vector a position. Padding (negative) reads position 0; nothing attends to it."""

    def __init__(self, spec: Learned, d_model: int) -> None:
        super().__init__()
        self.offset = spec.offset
        self.weight = nn.Parameter(torch.empty(spec.n_rows, d_model))

    def forward(self, positions: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return F.embedding(positions.clamp(min=0) + self.offset, self.weight)


class SinusoidalPositions(nn.Module):
    """sin(p / base^(2i/D)) at element 2i, the cosine at 2i + 1 (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, spec: Sinusoidal, d_model: int) -> None:
        super().__init__()
        self.spec, self.d_model = spec, d_model

    def forward(self, positions: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        exponent = torch.arange(0, self.d_model, 2, device=positions.device).float() / self.d_model
        angles = positions[..., None].float() / self.spec.base**exponent
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def temperature(spec: QueryTemperature, positions: Int[Tensor, "B T"]) -> Float[Tensor, "B 1 T 1"]:
    """What the query at each position is multiplied by, fp32, ready to broadcast over heads. Padding, whose
    positions are negative and could have no logarithm, counts as position 0."""
    intervals = ((positions.clamp(min=0).float() + 1.0) / spec.interval).floor()
    return (torch.log1p(intervals) * spec.scale + 1.0)[:, None, :, None]


class Temperature(nn.Module):
    """Multiplies queries by what `temperature` says, in fp32."""

    def forward(self, q: Float[Tensor, "B H T K"], by: Float[Tensor, "#B 1 T 1"]) -> Float[Tensor, "B H T K"]:
        return (q * by).to(q.dtype)


# --- rotary -------------------------------------------------------------------------------------


class Rotation(NamedTuple):
    """Cosine and sine of every (position, pair), fp32, ready to broadcast over the heads."""

    cos: Float[Tensor, "B 1 T half"]
    sin: Float[Tensor, "B 1 T half"]


def rotation(rope: Rope, positions: Int[Tensor, "B T"], capacity: int | None = None) -> Rotation:
    """The rotation of each position.

    `capacity` is the length the sequence is sized for: only dynamic scaling and LongRoPE ask for it, since
    their frequencies depend on the length. Without one a row's own last position is taken, so that a
    row's result does not depend on its neighbours in the batch.
    """
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling | LongRope):
        length = positions.amax(-1)[:, None] + 1 if capacity is None else torch.tensor([[capacity]])
        inv_freq = frequencies_for(rope, scaling, length.to(positions.device))
    else:
        inv_freq = frequencies(rope).to(positions.device)
    angles = positions[..., None].float() * inv_freq
    factor = scaling.attention_factor if isinstance(scaling, YarnScaling | LongRope) else 1.0
    return Rotation((angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None])


class Rotate(nn.Module):
    """Turns each pair (a, b) of the first `rope.dim` elements by its angle, in fp32."""

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, x: Float[Tensor, "B H T K"], by: Rotation) -> Float[Tensor, "B H T K"]:
        cos, sin = by
        pairs, rest = x[..., : self.rope.dim], x[..., self.rope.dim :]
        if self.rope.layout == "half":
            a, b = pairs.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = pairs[..., 0::2], pairs[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        turned = turned.to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@lru_cache(maxsize=256)
def frequencies(rope: Rope) -> Float[Tensor, "half"]:
    """Radians per position of each pair, fp32: base^(-2i/dim), then the scaling's rule.

    The order of operations is that of transformers' modeling_rope_utils, so that the numbers are
    equal bit for bit and stay so at positions far out.
    """
    base, exponent = rope.base, _exponent(rope)
    match rope.scaling:
        case LinearScaling(factor):
            return 1.0 / base**exponent / factor
        case FrequencyDivisors(divisors):
            return 1.0 / base**exponent / torch.tensor(divisors, device="cpu")
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / base**exponent, scaling)
        case YarnScaling() as scaling:
            return _yarn(base**exponent, rope, scaling)
        case LongRope() as scaling:
            return 1.0 / (torch.tensor(scaling.short, device="cpu") * base**exponent)
    return 1.0 / base**exponent  # no scaling; or dynamic, within the original length


def frequencies_for(
    rope: Rope, scaling: DynamicScaling | LongRope, length: Int[Tensor, "B 1"]
) -> Float[Tensor, "B 1 half"]:
    """Those of runs of `length` tokens. LongRoPE has two sets; dynamic scaling's base grows with what
    exceeds the original positions."""
    if isinstance(scaling, LongRope):
        short, long = (torch.tensor(n, device=length.device) for n in (scaling.short, scaling.long))
        divisors = torch.where(length[..., None] > scaling.original_positions, long, short)
        return 1.0 / (divisors * rope.base ** _exponent(rope).to(length.device))
    excess = length.clamp(min=scaling.original_positions) / scaling.original_positions
    growth = scaling.factor * excess - (scaling.factor - 1)
    base = rope.base * growth ** (rope.dim / (rope.dim - 2))
    return 1.0 / base[..., None] ** _exponent(rope).to(length.device)


def _exponent(rope: Rope) -> Float[Tensor, "half"]:
    """2i/dim. Named to the CPU: under `torch.device("meta")` the cached result would have no data."""
    return torch.arange(0, rope.dim, 2, device="cpu").float() / rope.dim


def _llama3(plain: Tensor, s: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > s.original_positions / s.low_freq_factor, plain / s.factor, plain)
    ramp = (s.original_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend = (1 - ramp) * scaled / s.factor + ramp * scaled
    between = (wavelength >= s.original_positions / s.high_freq_factor) & (
        wavelength <= s.original_positions / s.low_freq_factor
    )
    return torch.where(between, blend, scaled)


def _yarn(periods: Tensor, rope: Rope, s: YarnScaling) -> Tensor:
    def dimension(rotations: float) -> float:
        """The pair (as a real number) that turns `rotations` times over the original context."""
        return (
            rope.dim * math.log(s.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))
        )

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # the paper's code: a ramp of no width would divide by zero
    kept = 1 - ((torch.arange(rope.dim // 2, device="cpu").float() - low) / (high - low)).clamp(0, 1)
    return 1.0 / (s.factor * periods) * (1 - kept) + 1.0 / periods * kept
