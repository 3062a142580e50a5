import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openbook.model import Decoder, init_weights
from openbook.spec.hf import from_config
from openbook.weights.save import save_hf
from openbook.weights.save_gguf import save_gguf
from openbook.weights.verify import verify

CONFIG = {
    "model_type": "qwen2", "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def decoder() -> Decoder:
    return init_weights(Decoder(from_config(CONFIG)))


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_a_sound_file_agrees_with_the_ledger_in_every_row(kind: str, decoder: Decoder, tmp_path: Path):
    path = tmp_path / "m.gguf"
    (save_hf if kind == "hf" else save_gguf)(decoder, path)
    report = verify(path)
    assert report.ok
    assert [row.status for row in report.rows].count("tied") == 1
    assert sum(row.status == "ok" for row in report.rows) == 2 + 2 * (7 + 3 + 2)
    assert report.parameters == sum(p.numel() for p in decoder.parameters())


def test_values_are_counted_only_when_asked_for(decoder: Decoder, tmp_path: Path):
    with torch.no_grad():
        decoder.layers[1].mlp.gate.weight[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        decoder.layers[0].attn.v.bias.copy_(torch.tensor([2.0, -3.0] + [0.0] * 14))
        decoder.final_norm.weight.zero_()
    save_hf(decoder, tmp_path / "m")
    assert all(row.values is None for row in verify(tmp_path / "m").rows)
    report = verify(tmp_path / "m", values=True)
    values = {row.name: row.values for row in report.rows}
    gate = values["model.layers.1.mlp.gate_proj.weight"]
    assert (gate.nan, gate.inf) == (1, 2)
    assert -1 < gate.low < gate.high < 1
    bias = values["model.layers.0.self_attn.v_proj.bias"]
    assert (bias.count, bias.zero, bias.low, bias.high) == (16, 14, -3.0, 2.0)
    assert values["model.norm.weight"].zero == values["model.norm.weight"].count == 64
    assert [row.name for row in report.nonfinite] == ["model.layers.1.mlp.gate_proj.weight"]
    assert not report.ok


def test_a_tensor_of_nothing_but_nan_has_no_range(decoder: Decoder, tmp_path: Path):
    with torch.no_grad():
        decoder.final_norm.weight.fill_(torch.nan)
    save_hf(decoder, tmp_path / "m")
    (row,) = verify(tmp_path / "m", values=True).nonfinite
    assert row.values.nan == 64
    assert row.values.low != row.values.low


@pytest.mark.parametrize("optimised", [[], ["-O"]], ids=["", "-O"])
def test_comparing_a_file_with_the_ledger_imports_no_torch(optimised, decoder: Decoder, tmp_path: Path):
    save_gguf(decoder, tmp_path / "m.gguf")
    code = (
        "import sys; from openbook.weights.verify import verify; "
        f"report = verify({str(tmp_path / 'm.gguf')!r}); print(report.ok, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, *optimised, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]


def test_a_tensor_without_elements_is_looked_at_too(decoder: Decoder, tmp_path: Path):
    save_hf(decoder, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    save_file({**load_file(file), "empty": torch.ones(0, 3)}, file)
    report = verify(tmp_path / "m", values=True)
    assert [(row.name, row.status, row.values.count) for row in report.misfits] == [
        ("empty", "unexpected", 0)
    ]
