"""GGML's block formats to and from floating point.

A quantised row is a run of blocks, each holding a few scales and the integer codes of its values; the
layouts are those of ggml-quants.c and ggml-common.h. Decoding gives the same bits as the `gguf`
package, several times faster: every step is one torch operation over a thousand blocks, few enough to
stay in the processor's cache.

Exactness is no accident of rounding order. A scale is a half (11 significant bits) times at most 8
bits, a code has at most 8 bits, and 24 fit in a float32: every product here is exact, and only the
addition of a minimum rounds, once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from openbook.files.gguf import FORMATS

_BLOCKS = 1023
"""Blocks decoded at a time. No operation below touches more than 32 values of a block, so none has the
32,768 elements from which torch shares an operation among threads. These are far too short for that:
waiting for each other costs more than the work, and twenty times more where other programs hold the
cores. Whoever wants more than one core decodes several tensors at once."""

PLAIN: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
"""Types that are floating point as they stand."""


def dequantize(data: np.ndarray | Tensor, type_name: str, out: Tensor | None = None) -> Tensor:
    """The values of a tensor stored as `type_name`.

    `data` holds its bytes (uint8, contiguous); it is only read. The values go into `out`, a contiguous
    tensor of as many values and of any floating dtype, rounded to nearest even from float32; without
    `out` into a new float32 tensor of one dimension. Returns it.

    Raises `ValueError` for a type that has no decoder, and for sizes that do not fit.
    """
    if type_name not in PLAIN and type_name not in DECODERS:
        raise ValueError(f"no decoder for {type_name}; there are {', '.join([*PLAIN, *DECODERS])}")
    form = FORMATS[type_name]
    raw = _as_bytes(data)
    n_blocks, rest = divmod(raw.numel(), form.block_bytes)
    if rest:
        raise ValueError(f"{raw.numel()} bytes are no whole number of {type_name}'s {form.block_bytes}")
    if out is None:
        out = torch.empty(n_blocks * form.block)
    if out.numel() != n_blocks * form.block:
        raise ValueError(f"{n_blocks * form.block} values do not fill a tensor of {out.numel()}")

    values = out.detach().view(-1)
    if type_name in PLAIN:
        values.copy_(raw.view(PLAIN[type_name]))
    else:
        _decode(raw.view(n_blocks, form.block_bytes), DECODERS[type_name], values.view(n_blocks, form.block))
    return out


def _decode(blocks: UInt8[Tensor, "n bytes"], decoder: Decoder, out: Float[Tensor, "n block"]) -> None:
    scratch = None if out.dtype == torch.float32 else torch.empty(min(_BLOCKS, len(out)), out.shape[1])
    for source, target in zip(blocks.split(_BLOCKS), out.split(_BLOCKS), strict=True):
        if scratch is None:
            decoder(source, target)
            continue
        values = scratch[: len(source)]
        decoder(source, values)
        for begin in range(0, out.shape[1], 32):
            target[:, begin : begin + 32].copy_(values[:, begin : begin + 32])


def _as_bytes(data: np.ndarray | Tensor) -> UInt8[Tensor, " bytes"]:
    """`data` as a flat tensor that shares its memory, from a byte where a wider type may begin."""
    raw = data if isinstance(data, Tensor) else torch.from_numpy(np.asarray(_Lent(data)))
    raw = raw.reshape(-1).view(torch.uint8)
    return raw if raw.storage_offset() % 8 == 0 else raw.clone()


class _Lent:
    """A numpy array lent to torch as if writable, which spares a warning: nothing here writes to it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        interface = dict(array.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


# --- decoders -------------------------------------------------------------------------------------
#
# Each takes blocks as bytes [n, block_bytes] and fills `out` [n, block] with float32. Small blocks have
# the nibbles of all their bytes split at once, scales too: one pass over contiguous bytes costs less
# than one over the codes alone. Large blocks have their codes unpacked eight bytes at a time.

Decoder = Callable[[Tensor, Tensor], None]


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """d, 32 signed codes: d·q."""
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_halves(blocks)[:, 0:1])


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """d, 16 bytes of two codes: d·(q − 8). Low nibbles are the first half of the block."""
    low, high = (blocks & 15) - 8, (blocks >> 4) - 8
    first, second = out.chunk(2, dim=1)
    first.copy_(low[:, 2:].view(torch.int8))
    second.copy_(high[:, 2:].view(torch.int8))
    out.mul_(_halves(blocks)[:, 0:1])


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """d, m, 16 bytes of two codes: d·q + m."""
    low, high = blocks & 15, blocks >> 4
    first, second = out.chunk(2, dim=1)
    first.copy_(low[:, 4:])
    second.copy_(high[:, 4:])
    scale = _halves(blocks)
    out.mul_(scale[:, 0:1]).add_(scale[:, 1:2])


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """d, 32 high bits, 16 bytes of two low nibbles: d·(q − 16)."""
    low, high, fifth = blocks & 15, blocks >> 4, _fifth_bits(blocks[:, 2:6])
    first, second = out.chunk(2, dim=1)
    first.copy_(((low[:, 6:] | fifth[:, :16]) - 16).view(torch.int8))
    second.copy_(((high[:, 6:] | fifth[:, 16:]) - 16).view(torch.int8))
    out.mul_(_halves(blocks)[:, 0:1])


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    """d, m, 32 high bits, 16 bytes of two low nibbles: d·q + m."""
    low, high, fifth = blocks & 15, blocks >> 4, _fifth_bits(blocks[:, 4:8])
    first, second = out.chunk(2, dim=1)
    first.copy_(low[:, 8:] | fifth[:, :16])
    second.copy_(high[:, 8:] | fifth[:, 16:])
    scale = _halves(blocks)
    out.mul_(scale[:, 0:1]).add_(scale[:, 1:2])


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """d, dmin, 8 six-bit scales and minima, 128 bytes of two codes: (d·sc)·q − dmin·m.

    Of each 32 bytes the low nibbles are one group of 32 values and the high nibbles the next.
    """
    words = blocks.view(torch.int64)[:, 2:]
    nibbles = [(words >> shift & _NIBBLE).view(torch.uint8) for shift in (0, 4)]
    scale, minimum = _scales_and_minima(blocks)
    for g, group in enumerate(out.split(32, dim=1)):
        codes = nibbles[g % 2][:, g // 2 * 32 :][:, :32]
        group.copy_(codes).mul_(scale[:, g : g + 1]).sub_(minimum[:, g : g + 1])


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte j is value j of group g."""
    fifth, words = blocks.view(torch.int64)[:, 2:].split((4, 16), dim=1)
    nibbles = [words >> shift & _NIBBLE for shift in (0, 4)]
    scale, minimum = _scales_and_minima(blocks)
    for g, group in enumerate(out.split(32, dim=1)):
        codes = nibbles[g % 2][:, g // 2 * 4 :][:, :4] | (fifth >> g & _BIT) << 4
        group.copy_(codes.view(torch.uint8)).mul_(scale[:, g : g + 1]).sub_(minimum[:, g : g + 1])


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """128 bytes of low nibbles, 64 of high pairs of bits, 16 signed scales, d: (d·sc)·(q − 32).

    Half a block is four groups of 32 values: those of its 64 low nibbles, then of its 64 high ones. Bits
    2i and 2i + 1 of the half's byte j of pairs belong to value j of group i. Each 16 values have a scale.
    """
    d = blocks[:, 208:210].view(torch.float16).float()
    scale = d * blocks[:, 192:208].view(torch.int8)
    for g, group in enumerate(out.split(32, dim=1)):
        half, i = divmod(g, 4)
        nibbles = _words(blocks, 64 * half + 32 * (i % 2)) >> i // 2 * 4 & _NIBBLE
        pairs = _words(blocks, 128 + 32 * half) >> 2 * i & _TWO_BITS
        codes = (nibbles | pairs << 4).view(torch.uint8) - 32
        group.copy_(codes.view(torch.int8))
        group[:, :16].mul_(scale[:, 2 * g : 2 * g + 1])
        group[:, 16:].mul_(scale[:, 2 * g + 1 : 2 * g + 2])


DECODERS: dict[str, Decoder] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _halves(blocks: UInt8[Tensor, "n bytes"]) -> Float[Tensor, "n halves"]:
    """Each pair of bytes as a half: a block's scales are among them."""
    return blocks.view(torch.float16).float()


_FIFTH_BITS = (torch.arange(256, dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1) << 4
_FIFTH_BITS_OF_BYTE = _FIFTH_BITS.contiguous().view(torch.int64).view(-1)
"""For each byte, its eight bits, lowest first, as the bit 16 of eight bytes."""


def _fifth_bits(bits: UInt8[Tensor, "n 4"]) -> UInt8[Tensor, "n 32"]:
    """32 bits a row, each as a byte that is 16 or 0."""
    spread = _FIFTH_BITS_OF_BYTE.index_select(0, bits.int().view(-1))
    return spread.view(torch.uint8).view(-1, 32)


_BIT, _TWO_BITS, _NIBBLE = 0x0101010101010101, 0x0303030303030303, 0x0F0F0F0F0F0F0F0F
"""The lowest bits of each of the eight bytes of a word."""


def _words(blocks: UInt8[Tensor, "n bytes"], begin: int) -> Int64[Tensor, "n 4"]:
    """32 bytes of each block as words of eight, where the block itself is no whole number of words."""
    part = blocks[:, begin : begin + 32]
    return part.clone(memory_format=torch.contiguous_format).view(torch.int64)


def _scales_and_minima(blocks: UInt8[Tensor, "n bytes"]) -> tuple[Tensor, Tensor]:
    """d·sc and dmin·m of a Q4_K or Q5_K block's groups, each [n, 8].

    Twelve bytes hold both: four with the scales 0-3 in their low six bits, four with the minima 0-3,
    four with the low nibbles of scales and minima 4-7, whose high bits are the two bits left over above.
    """
    scales, minima, both = blocks.view(torch.int32)[:, 1:4].unbind(1)  # four bytes at a time
    scale = torch.stack([scales & 0x3F3F3F3F, both & 0x0F0F0F0F | scales >> 2 & 0x30303030], dim=1)
    minimum = torch.stack([minima & 0x3F3F3F3F, both >> 4 & 0x0F0F0F0F | minima >> 2 & 0x30303030], dim=1)
    d, d_min = blocks[:, :4].view(torch.float16).float().split(1, dim=1)
    return d * scale.view(torch.uint8), d_min * minimum.view(torch.uint8)


# --- encoders -------------------------------------------------------------------------------------


def quantize(tensor: Tensor, type_name: str) -> np.ndarray:
    """The bytes (uint8, one dimension) of `tensor` stored as `type_name`; for a plain type perhaps its own.

    The blocks are those of the `gguf` package, bit for bit. Raises `ValueError` for a type without an
    encoder, a row that is no whole number of blocks, and values that are not finite.
    """
    values = tensor.detach().contiguous()
    if type_name in PLAIN:
        return values.to(PLAIN[type_name]).view(-1).view(torch.uint8).numpy()
    if type_name not in ENCODERS:
        raise ValueError(f"no encoder for {type_name}; there are {', '.join([*PLAIN, *ENCODERS])}")
    form = FORMATS[type_name]
    if not values.ndim or values.shape[-1] % form.block:
        raise ValueError(f"rows of {list(values.shape)} are not whole blocks of {form.block}")
    if not values.isfinite().all():
        raise ValueError(f"values that are not finite cannot be stored as {type_name}")
    blocks = values.float().view(-1, form.block)
    parts = [ENCODERS[type_name](chunk) for chunk in blocks.split(_BLOCKS)]
    return torch.cat(parts).view(-1).numpy()


Encoder = Callable[[Tensor], Tensor]


def _to_q8_0(blocks: Tensor) -> Tensor:
    d = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * _inverse(d)
    floor = scaled.abs().floor()
    rounded = (floor + (scaled.abs() - floor >= 0.5)) * scaled.sign()  # halves away from zero
    return torch.cat([_half_bytes(d), rounded.to(torch.int8).view(torch.uint8)], dim=1)


def _to_q4_0(blocks: Tensor) -> Tensor:
    """The value furthest from zero becomes code 0, that is −8."""
    furthest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    d = furthest / -8
    codes = (blocks * _inverse(d) + 8.5).clamp(0, 15).to(torch.uint8)
    return torch.cat([_half_bytes(d), _pack_nibbles(codes)], dim=1)


def _to_q4_1(blocks: Tensor) -> Tensor:
    least = blocks.amin(1, keepdim=True)
    d = (blocks.amax(1, keepdim=True) - least) / 15
    codes = ((blocks - least) * _inverse(d) + 0.5).clamp(0, 15).to(torch.uint8)
    return torch.cat([_half_bytes(d), _half_bytes(least), _pack_nibbles(codes)], dim=1)


ENCODERS: dict[str, Encoder] = {"Q8_0": _to_q8_0, "Q4_0": _to_q4_0, "Q4_1": _to_q4_1}


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where that is infinite: the codes of a block without extent are 0."""
    inverse = 1 / scale
    return inverse.where(inverse.isfinite(), 0.0)


def _half_bytes(column: Float[Tensor, "n 1"]) -> UInt8[Tensor, "n 2"]:
    return column.half().view(torch.uint8)


def _pack_nibbles(codes: UInt8[Tensor, "n 32"]) -> UInt8[Tensor, "n 16"]:
    first, second = codes.chunk(2, dim=1)
    return first | second << 4
