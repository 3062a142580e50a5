"""Matrices stored as values and scales, against the programs that published them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from openbook.weights.packed import decode
from openbook.weights.tensors import SafetensorsTensors


def bytes_of(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


BLOCKS, SCALES = bytes_of(3, 10, 2, 16), bytes_of(3, 10, 2, low=100, high=150)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_decoded_as_transformers_does(dtype: torch.dtype):
    ours = decode("MXFP4", BLOCKS, SCALES, dtype)
    assert ours.shape == (3, 64, 10)
    assert torch.equal(ours, convert_moe_packed_tensors(BLOCKS, SCALES, dtype=dtype))


def test_mxfp4_is_decoded_as_the_gguf_package_does():
    """GGUF keeps the codes of a block in another order: byte i has those of the places i and i + 16."""
    codes = torch.stack((BLOCKS & 15, BLOCKS >> 4), dim=-1).flatten(-2)
    halves = codes[..., :16] | codes[..., 16:] << 4
    raw = torch.cat((SCALES[..., None], halves), dim=-1).flatten(-2).numpy()
    theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(decode("MXFP4", BLOCKS, SCALES, torch.float32).mT, theirs)


def test_the_first_of_two_neighbours_is_the_low_half_of_a_byte():
    blocks, scales = (
        torch.zeros(1, 1, 1, 16, dtype=torch.uint8),
        torch.full((1, 1, 1), 129, dtype=torch.uint8),
    )
    blocks[..., 0], blocks[..., 15] = 0x72, 0x9F
    row = decode("MXFP4", blocks, scales, torch.float32)[0, :, 0]
    assert row[[0, 1, 30, 31]].tolist() == [4.0, 24.0, -24.0, -2.0]  # 2 ** 2 times 1, 6, -6, -0.5


def fp8(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    squares = [-(-n // 128) for n in shape]
    values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    return values, torch.rand(squares, generator=generator) + 0.5


def test_fp8_is_decoded_as_transformers_does():
    values, scales = fp8(256, 384)
    theirs = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    assert torch.equal(decode("FP8", values, scales, torch.float32), theirs)


def test_the_squares_at_the_edges_of_an_fp8_matrix_are_cut_off():
    values, scales = fp8(130, 200)
    ours = decode("FP8", values, scales, torch.float32)
    for row, column in ((0, 0), (127, 127), (127, 128), (128, 0), (129, 199)):
        expected = values[row, column].float() * scales[row // 128, column // 128]
        assert ours[row, column] == expected


# --- in a file ----------------------------------------------------------------------------------


def test_a_pair_is_one_tensor_under_the_name_of_the_unquantised(tmp_path: Path):
    values, scales = fp8(130, 200)
    save_file(
        {
            "experts.up_blocks": BLOCKS,
            "experts.up_scales": SCALES,
            "down.weight": values,
            "down.weight_scale_inv": scales,
            "norm.weight": torch.ones(7),
        },
        tmp_path / "model.safetensors",
    )
    file = SafetensorsTensors(tmp_path / "model.safetensors")
    assert {s.name: (s.dtype, s.shape, s.nbytes) for s in file.stored.values()} == {
        "experts.up": ("MXFP4", (3, 64, 10), 3 * 10 * 2 * 17),
        "down.weight": ("FP8", (130, 200), 130 * 200 + 4 * 4),
        "norm.weight": ("F32", (7,), 28),
    }
    assert torch.equal(file.read("experts.up"), decode("MXFP4", BLOCKS, SCALES, torch.float32))
    assert file.read("down.weight", decoded=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "tensors",
    [
        {"a_blocks": BLOCKS, "a_scales": SCALES[:, :, :1].contiguous()},
        {"a_blocks": BLOCKS.float(), "a_scales": SCALES},
        {"a_blocks": BLOCKS},
        {"a_scales": torch.zeros((), dtype=torch.uint8), "a_blocks": BLOCKS},
        {"a": fp8(130, 200)[0], "a_scale_inv": torch.ones(1, 2)},
        {"a": torch.ones(130, 200), "a_scale_inv": torch.ones(2, 2)},
        {"a": fp8(130, 200)[0], "a_scale_inv": torch.ones(2, 2, dtype=torch.int32)},
    ],
    ids=["scales", "dtype", "alone", "scalar", "squares", "not fp8", "integers"],
)
def test_tensors_that_do_not_fit_together_are_left_as_they_are(tensors: dict[str, Tensor], tmp_path: Path):
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(SafetensorsTensors(tmp_path / "model.safetensors").stored) == set(tensors)
