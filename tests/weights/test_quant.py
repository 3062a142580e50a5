"""Decoding and encoding of GGML's blocks against the `gguf` package and against a slow twin."""

from __future__ import annotations

import struct
import warnings

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from openbook.files.gguf import FORMATS
from openbook.weights.quant import DECODERS, ENCODERS, PLAIN, dequantize, quantize

QUANTISED = list(DECODERS)
ORACLE = ["F32", "F16", "BF16", *QUANTISED]


def package_dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    rows = raw.reshape(-1, FORMATS[type_name].block_bytes)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_name]).reshape(-1)


def package_quantize(values: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name]).view(np.uint8).reshape(-1)


def assert_same_bits(found: torch.Tensor, expected: np.ndarray) -> None:
    """The same bits, signs of zeros included. A NaN must be a NaN: its payload is the processor's."""
    mine = found.numpy()
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(mine), nan)
    np.testing.assert_array_equal(mine.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def random_bytes(type_name: str, n_blocks: int, seed: int = 0) -> np.ndarray:
    """Every bit random: of the halves 1 in 32 is infinite or NaN, and as many are subnormal."""
    return np.random.default_rng(seed).integers(
        0, 256, n_blocks * FORMATS[type_name].block_bytes, dtype=np.uint8
    )


# --- the slow twin: one block at a time, spelled from the format ------------------------------------


def half(raw: bytes) -> float:
    return struct.unpack("<e", raw)[0]


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibbles(raw: bytes) -> list[int]:
    """Low halves of all bytes, then high halves."""
    return [b & 15 for b in raw] + [b >> 4 for b in raw]


def scales_and_minima(raw: bytes) -> list[tuple[int, int]]:
    """Twelve bytes of a K block: eight pairs of six-bit numbers."""
    first = [(raw[i] & 63, raw[4 + i] & 63) for i in range(4)]
    return first + [
        (raw[8 + i] & 15 | raw[i] >> 6 << 4, raw[8 + i] >> 4 | raw[4 + i] >> 6 << 4) for i in range(4)
    ]


def twin_block(b: bytes, type_name: str) -> list[float]:
    """The values of one block, in exact arithmetic but for the last sum (Python's floats have 53 bits)."""
    match type_name:
        case "Q8_0":
            return [half(b[:2]) * signed(q) for q in b[2:]]
        case "Q4_0":
            return [half(b[:2]) * (q - 8) for q in nibbles(b[2:])]
        case "Q4_1":
            return [half(b[:2]) * q + half(b[2:4]) for q in nibbles(b[4:])]
        case "Q5_0":
            high = int.from_bytes(b[2:6], "little")
            return [half(b[:2]) * ((q | (high >> j & 1) << 4) - 16) for j, q in enumerate(nibbles(b[6:]))]
        case "Q5_1":
            high = int.from_bytes(b[4:8], "little")
            d, m = half(b[:2]), half(b[2:4])
            return [d * (q | (high >> j & 1) << 4) + m for j, q in enumerate(nibbles(b[8:]))]
        case "Q4_K" | "Q5_K":
            d, d_min = half(b[:2]), half(b[2:4])
            fifth, codes = (b[16:48], b[48:]) if type_name == "Q5_K" else (bytes(32), b[16:])
            values = []
            for g, (scale, minimum) in enumerate(scales_and_minima(b[4:16])):
                for j in range(32):
                    byte = codes[g // 2 * 32 + j]
                    q = (byte >> 4 if g % 2 else byte & 15) | (fifth[j] >> g & 1) << 4
                    values.append(d * scale * q - d_min * minimum)
            return values
        case "Q6_K":
            low, high, scales, d = b[:128], b[128:192], b[192:208], half(b[208:])
            values = []
            for at in range(256):
                side, rest = divmod(at, 128)
                group, j = divmod(rest, 32)
                byte = low[side * 64 + group % 2 * 32 + j]
                q = (byte >> 4 if group > 1 else byte & 15) | (high[side * 32 + j] >> 2 * group & 3) << 4
                values.append(d * signed(scales[at // 16]) * (q - 32))
            return values
    raise ValueError(type_name)


@pytest.mark.parametrize("type_name", QUANTISED)
def test_decoding_agrees_with_the_format_spelled_out_block_by_block(type_name: str):
    size = FORMATS[type_name].block_bytes
    raw = random_bytes(type_name, 64, seed=1)
    blocks = [raw[at : at + size].tobytes() for at in range(0, len(raw), size)]
    with np.errstate(all="ignore"):
        expected = np.array([twin_block(block, type_name) for block in blocks], np.float64).astype(np.float32)
    assert_same_bits(dequantize(raw, type_name), expected.reshape(-1))


# --- against the gguf package -----------------------------------------------------------------------


@pytest.mark.parametrize("type_name", ORACLE)
def test_decoding_gives_the_packages_bits_with_infinite_and_subnormal_scales(type_name: str):
    raw = random_bytes(type_name, 70_000 // FORMATS[type_name].block + 3)
    assert_same_bits(dequantize(raw, type_name), package_dequantize(raw, type_name))


def scale_fields(type_name: str) -> list[int]:
    """Where the halves of a block lie."""
    return {"Q6_K": [208], "Q8_0": [0], "Q4_0": [0], "Q5_0": [0]}.get(type_name, [0, 2])


ODD_SCALES = {
    "+inf": 0x7C00,
    "-inf": 0xFC00,
    "NaN": 0x7E00,
    "+65504": 0x7BFF,
    "-65504": 0xFBFF,
    "least subnormal": 0x0001,
    "greatest negative subnormal": 0x8001,
    "greatest subnormal": 0x03FF,
    "+0": 0x0000,
    "-0": 0x8000,
}


@pytest.mark.parametrize("type_name", QUANTISED)
@pytest.mark.parametrize("scale", ODD_SCALES)
def test_each_odd_scale_gives_the_packages_bits(type_name: str, scale: str):
    blocks = random_bytes(type_name, 40, seed=6).reshape(40, -1)
    for i, at in enumerate(scale_fields(type_name)):
        blocks[i * 10 :, at : at + 2] = np.frombuffer(struct.pack("<H", ODD_SCALES[scale]), np.uint8)
    raw = blocks.reshape(-1)
    assert_same_bits(dequantize(raw, type_name), package_dequantize(raw, type_name))


@settings(deadline=None, max_examples=60)
@given(
    type_name=st.sampled_from(QUANTISED),
    n_blocks=st.sampled_from([0, 1, 2, 1022, 1023, 1024, 2047]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_number_of_blocks_is_decoded(type_name: str, n_blocks: int, seed: int):
    """The number of blocks worked on at a time is 1023."""
    raw = random_bytes(type_name, n_blocks, seed)
    found = dequantize(raw, type_name)
    assert found.shape == (n_blocks * FORMATS[type_name].block,)
    if n_blocks:
        assert_same_bits(found, package_dequantize(raw, type_name))


@pytest.mark.parametrize("type_name", [*QUANTISED, "F16", "BF16", "F32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_rounded_once_from_float32(type_name: str, dtype: torch.dtype):
    raw = random_bytes(type_name, 1500 * 32 // FORMATS[type_name].block, seed=2)
    expected = torch.from_numpy(package_dequantize(raw, type_name)).to(dtype)
    found = dequantize(raw, type_name, torch.empty(len(expected), dtype=dtype))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class LargestStep(TorchDispatchMode):
    """The most elements that any operation computes; views compute none."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(result, torch.Tensor) and "empty" not in func.name():
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("type_name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_step_is_large_enough_for_torch_to_share_it_among_threads(type_name: str, dtype: torch.dtype):
    """From 32,768 elements on it would; see `_BLOCKS`."""
    raw = random_bytes(type_name, 3000)
    out = torch.empty(3000 * FORMATS[type_name].block, dtype=dtype)
    with LargestStep() as steps:
        dequantize(raw, type_name, out)
    assert 1023 * 16 <= steps.largest < 32768


# --- what goes in and out ---------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", ["F32", "Q4_1", "Q6_K"])
def test_values_are_written_straight_into_the_given_tensor(type_name: str):
    raw = random_bytes(type_name, 4 * 256 // FORMATS[type_name].block, seed=3)
    out = torch.full((4, 256), torch.nan)
    assert dequantize(raw, type_name, out) is out
    assert_same_bits(out.view(-1), package_dequantize(raw, type_name))


def test_a_parameter_can_be_filled():
    raw = quantize(torch.full((2, 32), 127.0), "Q8_0")
    weight = torch.nn.Parameter(torch.zeros(2, 32))
    assert dequantize(raw, "Q8_0", weight) is weight
    assert weight.detach().eq(127).all()


def test_read_only_bytes_are_decoded_without_a_warning_and_stay_as_they_are():
    raw = random_bytes("Q4_0", 5)
    before = raw.tobytes()
    raw.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dequantize(raw, "Q4_0")
    assert raw.tobytes() == before
    assert_same_bits(found, package_dequantize(raw, "Q4_0"))


@pytest.mark.parametrize("type_name", ORACLE)
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_bytes_at_any_address_are_decoded(type_name: str, shift: int):
    raw = random_bytes(type_name, 20, seed=4)
    moved = np.concatenate([np.zeros(shift, np.uint8), raw])
    expected = package_dequantize(raw, type_name)
    assert_same_bits(dequantize(torch.from_numpy(moved)[shift:], type_name), expected)
    assert_same_bits(dequantize(moved[shift:], type_name), expected)


def test_a_type_without_a_decoder_is_refused_by_name():
    with pytest.raises(ValueError, match="no decoder for Q2_K; there are F32, "):
        dequantize(np.zeros(84, np.uint8), "Q2_K")


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="35 bytes are no whole number"):
        dequantize(np.zeros(35, np.uint8), "Q8_0")
    with pytest.raises(ValueError, match="32 values do not fill a tensor of 31"):
        dequantize(np.zeros(34, np.uint8), "Q8_0", torch.empty(31))


def test_every_decoder_has_a_block_size_and_every_encoder_a_decoder():
    assert {*DECODERS, *PLAIN} <= FORMATS.keys()
    assert ENCODERS.keys() <= DECODERS.keys()


# --- encoding ---------------------------------------------------------------------------------------


def awkward_values(scale: float) -> np.ndarray:
    """[64, 64]: noise, with blocks of zeros, of one value, of ties between ±max, and of half steps."""
    values = (np.random.default_rng(5).standard_normal((64, 64)) * scale).astype(np.float32)
    values[0] = 0
    values[1] = -0.0
    values[2] = scale
    values[3] = np.array([1, -1] * 32) * scale
    values[4] = np.array([-1, 1] * 32) * scale
    values[5] = np.arange(-32, 32) / 2 * scale
    values[6, 0] = 127 * scale
    values[6, 1:] = (np.arange(63) - 31.5) * scale
    values[7] = np.abs(values[7])
    values[8] = -np.abs(values[8])
    return values


@pytest.mark.parametrize("type_name", [*ENCODERS, "F16", "BF16", "F32"])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0, 1e-7, 1e-12])
def test_encoding_gives_the_packages_bits(type_name: str, scale: float):
    values = awkward_values(scale)
    found = quantize(torch.from_numpy(values), type_name)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, package_quantize(values, type_name))


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_plain_types_round_trip_and_keep_infinity_and_nan(type_name: str):
    values = torch.tensor([0.0, -0.0, 1.5, -2.0, torch.inf, -torch.inf, torch.nan])
    found = dequantize(quantize(values, type_name), type_name)
    torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)
    assert found[1].signbit()


def test_scales_too_small_to_invert_give_zeros():
    tiny = torch.full((1, 32), 1e-39)
    for type_name in ENCODERS:
        assert dequantize(quantize(tiny, type_name), type_name).eq(0).all()


@pytest.mark.parametrize("type_name", ENCODERS)
def test_what_cannot_be_encoded_is_refused(type_name: str):
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.full((1, 32), torch.nan), type_name)
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.full((1, 32), torch.inf), type_name)
    with pytest.raises(ValueError, match="whole blocks of 32"):
        quantize(torch.zeros(2, 33), type_name)
    with pytest.raises(ValueError, match="whole blocks of 32"):
        quantize(torch.tensor(1.0), type_name)


def test_a_type_without_an_encoder_is_refused_by_name():
    with pytest.raises(ValueError, match="no encoder for Q6_K; there are F32, "):
        quantize(torch.zeros(1, 256), "Q6_K")


def test_a_transposed_matrix_is_encoded_in_its_own_order():
    weights = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(quantize(weights.T, "Q8_0"), quantize(weights.T.clone(), "Q8_0"))
    np.testing.assert_array_equal(quantize(weights.T, "F16"), quantize(weights.T.clone(), "F16"))
