"""Matrices stored as values and scales, against the programs that published them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from openbook.model import Decoder, init_weights
from openbook.spec.hf import from_config
from openbook.weights.load import load_decoder
from openbook.weights.packed import decode
from openbook.weights.save import save_hf
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


# --- a model ------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 131, "hidden_size": 160, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {**SIZES, "model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2}


def folder_of(
    config: dict[str, Any], tensors: dict[str, Tensor], quantised: dict[str, Any], at: Path
) -> Path:
    """A folder whose tensors are `tensors`, the rest being those of a new model."""
    save_hf(init_weights(Decoder(from_config(config))), at)
    stored = load_file(at / "model.safetensors")
    parts = {name.removesuffix("_blocks") for name in tensors}
    save_file({k: v for k, v in stored.items() if k not in parts} | tensors, at / "model.safetensors")
    text = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps({**text, "quantization_config": quantised}))
    return at


def test_a_gpt_oss_in_mxfp4_is_the_model_of_its_decoded_experts(tmp_path: Path):
    packed: dict[str, Tensor] = {}
    for layer in range(2):
        for name, rows, blocks in (("gate_up_proj", 192, 5), ("down_proj", 160, 3)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            packed[f"{stem}_blocks"] = bytes_of(3, rows, blocks, 16)
            packed[f"{stem}_scales"] = bytes_of(3, rows, blocks, low=110, high=125)
    decoder = load_decoder(folder_of(GPT_OSS, packed, {"quant_method": "mxfp4"}, tmp_path / "m"), "bf16")

    stem = "model.layers.1.mlp.experts.gate_up_proj"
    theirs = convert_moe_packed_tensors(packed[f"{stem}_blocks"], packed[f"{stem}_scales"])
    experts = decoder.layers[1].mlp.experts
    assert torch.equal(experts.gate.weight, theirs[..., 0::2].mT)
    assert torch.equal(experts.up.weight, theirs[..., 1::2].mT)
    assert experts.down.weight.shape == (3, 160, 96)


def test_an_fp8_matrix_is_loaded_as_its_products(tmp_path: Path):
    values, scales = fp8(96, 160)
    name = "model.layers.0.mlp.up_proj.weight"
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = folder_of(
        {**SIZES, "model_type": "llama"},
        {name: values, f"{name}_scale_inv": scales},
        quantised,
        tmp_path / "m",
    )
    expected = values.float() * scales.repeat_interleave(128, 1)[:, :160]
    assert torch.equal(load_decoder(folder, "fp32").layers[0].mlp.up.weight, expected)
    assert torch.equal(load_decoder(folder, "bf16").layers[0].mlp.up.weight, expected.bfloat16())
