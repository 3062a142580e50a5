"""GGUF files that we write, read by the gguf package and by us; a model in both formats, bit for bit."""

import dataclasses
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gguf_models import model_type_of, noisy, tiny
from openbook.files.gguf import read_gguf, write_gguf
from openbook.model import Decoder, init_weights
from openbook.sources import resolve
from openbook.spec.gguf import ARCHITECTURES
from openbook.spec.hf import from_config
from openbook.spec.model import Norm
from openbook.spec.reader import UnsupportedError
from openbook.weights.dialects.gguf import Raised
from openbook.weights.load import NonFiniteError, load_decoder
from openbook.weights.save import save_hf
from openbook.weights.save_gguf import WRITABLE, save_gguf
from openbook.weights.stream import Streamed
from openbook.weights.verify import MisfitError, verify

CONFIG = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 96, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return noisy(from_config(CONFIG))


# --- types and names ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WRITABLE)
def test_the_gguf_package_reads_the_same_numbers_as_we_do(dtype: str, decoder: Decoder, tmp_path: Path):
    save_gguf(decoder, tmp_path / "m.gguf", dtype=dtype)
    ours = load_decoder(tmp_path / "m.gguf", "fp32").state_dict()
    theirs = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    report = verify(tmp_path / "m.gguf")
    assert report.ok
    assert set(theirs) == {row.name for row in report.rows}
    for row in report.rows:
        tensor = theirs[row.name]
        assert row.place is not None
        assert tensor.tensor_type.name == (dtype if len(row.place.shape) > 1 else "F32")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(row.place.shape)
        for name, part in row.place.load(values):
            np.testing.assert_array_equal(part, ours[name].numpy(), err_msg=name)


def test_rows_of_q_and_k_are_reordered_as_llama_cpp_does_it(decoder: Decoder, tmp_path: Path):
    """The rule of llama.cpp's converter, LlamaModel.permute, on its own words."""

    def permute(weights: np.ndarray, n_head: int) -> np.ndarray:
        return (
            weights.reshape(n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
            .swapaxes(1, 2)
            .reshape(weights.shape)
        )

    save_gguf(decoder, tmp_path / "m.gguf", dtype="F32")
    stored = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for letter, heads in (("q", 8), ("k", 2)):
        for suffix in ("weight", "bias"):
            ours = decoder.get_parameter(f"layers.1.attn.{letter}.{suffix}").detach().numpy()
            np.testing.assert_array_equal(stored[f"blk.1.attn_{letter}.{suffix}"], permute(ours, heads))


def test_a_row_that_is_no_whole_number_of_blocks_stays_fp32(tmp_path: Path):
    decoder = init_weights(Decoder(from_config({**CONFIG, "intermediate_size": 80})))
    save_gguf(decoder, tmp_path / "m.gguf", dtype="Q4_0")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "F32"
    assert types["blk.0.ffn_up.weight"] == "Q4_0"
    assert verify(tmp_path / "m.gguf").ok


def test_metadata_of_the_caller_is_kept(decoder: Decoder, tmp_path: Path):
    tokens = [f"<{i}>" for i in range(131)]
    save_gguf(decoder, tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    field = gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.ggml.tokens"]
    assert field.contents() == tokens


def test_an_unknown_type_is_refused_before_a_file_is_made(decoder: Decoder, tmp_path: Path):
    with pytest.raises(ValueError, match="Q8_0"):
        save_gguf(decoder, tmp_path / "m.gguf", dtype="Q3_K")
    assert list(tmp_path.iterdir()) == []


def test_llama3_scaling_travels_as_rope_freqs(tmp_path: Path):
    rope = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = {**CONFIG, "head_dim": 128, "max_position_embeddings": 131_072, "rope_parameters": rope}
    decoder = init_weights(Decoder(from_config(config)))
    save_gguf(decoder, tmp_path / "m.gguf")
    stored = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}["rope_freqs.weight"]
    assert stored.shape == (64,)
    assert stored[:29].tolist() == [1.0] * 29
    assert stored[35:].tolist() == [8.0] * 29
    np.testing.assert_allclose(stored[[29, 34]], [1.207484, 5.257327], rtol=1e-6)
    again = load_decoder(tmp_path / "m.gguf")
    assert again.spec.layers == decoder.spec.layers


def test_a_model_that_no_architecture_describes_is_refused(decoder: Decoder, tmp_path: Path):
    odd = tuple(dataclasses.replace(block, end_norm=Norm("rms")) for block in decoder.spec.layers)
    with pytest.raises(UnsupportedError, match="end_norm"):
        save_gguf(init_weights(Decoder(decoder.spec.replace(layers=odd))), tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_numbers_beyond_fp16_are_not_written_as_infinity(tmp_path: Path):
    decoder = init_weights(Decoder(from_config(CONFIG)))
    with torch.no_grad():
        decoder.get_parameter("layers.0.mlp.down.weight")[1, 2] = 7e4
    with pytest.raises(OverflowError, match=r"ffn_down\.weight"):
        save_gguf(decoder, tmp_path / "m.gguf", dtype="F16")
    assert list(tmp_path.iterdir()) == []


def test_a_file_says_what_most_of_it_is(decoder: Decoder, tmp_path: Path):
    for dtype in WRITABLE:
        save_gguf(decoder, tmp_path / "m.gguf", dtype=dtype)
        number = gguf.GGUFReader(tmp_path / "m.gguf").fields["general.file_type"].contents()
        assert gguf.LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_") == dtype


def test_what_routes_and_the_biases_of_experts_stay_fp32(tmp_path: Path):
    save_gguf(noisy(tiny("gpt-oss")), tmp_path / "m.gguf", dtype="F16")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    kept = {name.removeprefix("blk.0.") for name, kind in types.items() if kind == "F32" and "blk.0" in name}
    assert {"ffn_gate_inp.weight", "ffn_gate_inp.bias", "ffn_gate_exps.bias", "attn_sinks.weight"} < kept
    assert types["blk.0.ffn_gate_exps.weight"] == types["blk.0.attn_q.weight"] == "F16"


def test_progress_ends_with_all_bytes_of_the_tensors_done(decoder: Decoder, tmp_path: Path):
    calls: list[tuple[str, int, int]] = []
    save_gguf(decoder, tmp_path / "m.gguf", "Q8_0", progress=lambda *call: calls.append(call))
    size = sum(tensor.nbytes for tensor in read_gguf(tmp_path / "m.gguf").tensors.values())
    assert calls[-1] == ("writing", size, size)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


# --- the same model in both formats -------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_from_a_folder_to_fp32_gguf_and_back_not_a_bit_is_lost(name: str, tmp_path: Path):
    decoder = noisy(tiny(name))
    save_hf(decoder, tmp_path / "a", "fp32")
    folder = resolve(tmp_path / "a")
    save_gguf(Streamed(folder), tmp_path / "m.gguf", "F32", model_type=model_type_of(name))
    file = resolve(tmp_path / "m.gguf")
    assert (file.family, file.spec) == (name, decoder.spec)
    save_hf(Streamed(file), tmp_path / "b", "fp32")

    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in "ab")
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek2", "gpt-oss", "falcon"])
def test_a_model_streamed_from_its_file_is_the_loaded_one(name: str, tmp_path: Path):
    save_gguf(noisy(tiny(name)), tmp_path / "m.gguf", "Q8_0", model_type=model_type_of(name))
    streamed, loaded = Streamed(resolve(tmp_path / "m.gguf")), load_decoder(tmp_path / "m.gguf", "fp32")
    for parameter, values in loaded.named_parameters():
        assert torch.equal(streamed.get_parameter(parameter).float(), values), parameter


def test_a_streamed_parameter_has_the_type_it_is_stored_in(decoder: Decoder, tmp_path: Path):
    save_hf(decoder, tmp_path / "m", "bf16")
    save_gguf(decoder, tmp_path / "m.gguf", "Q4_0")
    folder, quantised = Streamed(resolve(tmp_path / "m")), Streamed(resolve(tmp_path / "m.gguf"))
    assert (folder.plain_type, folder.get_parameter("embed.weight").dtype) == ("BF16", torch.bfloat16)
    assert (quantised.plain_type, quantised.get_parameter("embed.weight").dtype) == (None, torch.float32)
    with pytest.raises(KeyError):
        folder.get_parameter("layers.9.attn.q.weight")


def test_nan_is_named_when_its_tensor_is_streamed(decoder: Decoder, tmp_path: Path):
    bad = noisy(decoder.spec)
    with torch.no_grad():
        bad.get_parameter("layers.1.mlp.up.weight")[3, 4] = torch.nan
    save_hf(bad, tmp_path / "m")
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        Streamed(resolve(tmp_path / "m")).get_parameter("layers.1.mlp.up.weight")


def test_files_that_are_not_the_models_are_refused_before_a_value_is_read(decoder: Decoder, tmp_path: Path):
    save_hf(decoder, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "intermediate_size": 161}))
    with pytest.raises(MisfitError, match="161"):
        Streamed(resolve(tmp_path / "m"))


# --- what llama.cpp's files do to weights -------------------------------------------------------


def test_norms_of_gemma_are_stored_with_1_added_and_read_exactly(tmp_path: Path):
    decoder = noisy(tiny("gemma3"))
    save_gguf(decoder, tmp_path / "m.gguf", "F16")
    stored = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    norm = "layers.2.attn.q_norm.weight"
    ours = decoder.get_parameter(norm).detach()
    np.testing.assert_array_equal(stored["blk.2.attn_q_norm.weight"], ours.numpy() + 1)
    assert torch.equal(load_decoder(tmp_path / "m.gguf", "fp32").get_parameter(norm), ours)
    assert decoder.spec.final_norm is not None
    assert decoder.spec.final_norm.offset == 1


def test_taking_1_off_is_exact_for_all_stored_values_from_a_half_on():
    values = np.random.default_rng(0).uniform(0.5, 90, 100_000).astype(np.float32)
    assert np.array_equal(Raised().load(values).astype(np.float64), values.astype(np.float64) - 1)
    assert np.array_equal(Raised().store(Raised().load(values)), values)


def test_taking_1_off_gives_back_every_bf16_and_fp16_weight_that_is_not_tiny():
    weights = torch.arange(-(2**15), 2**15).to(torch.int16)
    for halves in (weights.view(torch.bfloat16), weights.view(torch.float16)):
        kept = halves.float()[halves.isfinite() & (halves.abs() >= 2.0**-13) & (halves.abs() < 2.0**12)]
        assert len(kept) > 6_000
        assert torch.equal(Raised().load(Raised().store(kept)), kept)


def rewrite(file: Path, change) -> Path:
    """The F32 file with its tensors as `change` leaves them."""
    tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(file).tensors}
    rows = [(name, data.shape, "F32", data) for name, data in change(tensors).items()]
    write_gguf(file, read_gguf(file).metadata, rows)
    return file


def test_experts_one_by_one_as_in_files_of_early_2024_are_the_same_model(tmp_path: Path):
    decoder = noisy(tiny("llama", expert_count=5, expert_used_count=2))
    save_gguf(decoder, tmp_path / "m.gguf", "F32")

    def apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        merged = {name: data for name, data in tensors.items() if "_exps" in name}
        single = {
            name.replace("_exps.", f".{i}."): data[i] for name, data in merged.items() for i in range(5)
        }
        return {name: data for name, data in tensors.items() if name not in merged} | single

    file = rewrite(tmp_path / "m.gguf", apart)
    assert "blk.1.ffn_down.4.weight" in read_gguf(file).tensors
    assert verify(file).ok
    assert_equal(load_decoder(file, "fp32"), decoder)


def test_keys_and_values_in_one_matrix_as_in_older_files_of_deepseek_are_the_same_model(tmp_path: Path):
    """The rule of llama.cpp's converter: kv_b is split by heads into k_b, transposed, and v_b."""
    decoder = noisy(tiny("deepseek2"))
    save_gguf(decoder, tmp_path / "m.gguf", "F32")

    def together(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        joined = {}
        for name in list(tensors):
            if name.endswith("attn_k_b.weight"):
                keys, values = tensors.pop(name), tensors.pop(name.replace("attn_k_b", "attn_v_b"))
                whole = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
                joined[name.replace("attn_k_b", "attn_kv_b")] = whole.reshape(-1, whole.shape[-1])
        return tensors | joined

    file = rewrite(tmp_path / "m.gguf", together)
    assert "blk.1.attn_kv_b.weight" in read_gguf(file).tensors
    assert_equal(load_decoder(file, "fp32"), decoder)


def assert_equal(a: Decoder, b: Decoder) -> None:
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(x, y), name
