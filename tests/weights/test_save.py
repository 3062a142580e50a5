"""Folders that we write, read by others: transformers and safetensors."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from openbook.ledger import ledger
from openbook.model import Decoder, init_weights
from openbook.sources import resolve
from openbook.spec.hf import from_config
from openbook.spec.model import Norm, SpecError
from openbook.spec.presets import preset
from openbook.weights.load import load_decoder
from openbook.weights.save import save_hf, save_own
from openbook.weights.verify import MisfitError
from variants import VARIANTS, noisy_decoder

CONFIG = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 96, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = init_weights(Decoder(from_config(CONFIG)))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.2)
    return decoder


def equal(a: Decoder, b: Decoder) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


# --- Hugging Face -------------------------------------------------------------------------------


def test_a_folder_loads_back_bit_for_bit(decoder: Decoder, tmp_path: Path):
    save_hf(decoder, tmp_path / "m")
    again = load_decoder(tmp_path / "m")
    assert again.spec == decoder.spec
    assert equal(again, decoder)


def test_shards_hold_what_the_index_says_and_no_more_than_asked(decoder: Decoder, tmp_path: Path):
    save_hf(decoder, tmp_path / "m", shard_bytes=100_000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    total = 0
    for shard in shards:
        with safe_open(shard, framework="np") as file:
            names = list(file.keys())
            size = sum(file.get_tensor(name).nbytes for name in names)
        assert all(index["weight_map"][name] == shard.name for name in names)
        assert size <= 100_000 or len(names) == 1
        total += size
    assert index["metadata"]["total_size"] == total == 4 * sum(p.numel() for p in decoder.parameters())
    assert equal(load_decoder(tmp_path / "m"), decoder)


def test_transformers_reads_shards_in_the_dtype_they_were_written_in(decoder: Decoder, tmp_path: Path):
    save_hf(decoder, tmp_path / "m", dtype="bf16", shard_bytes=50_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    ours = load_decoder(tmp_path / "m")
    assert torch.equal(theirs.lm_head.weight, ours.head.weight)
    assert torch.equal(ours.head.weight, decoder.head.weight.bfloat16())


def test_a_folder_appears_complete_or_not_at_all(decoder: Decoder, tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        save_hf(decoder, tmp_path / "m", extra_files=[tmp_path / "no-tokenizer.json"])
    assert list(tmp_path.iterdir()) == []


def test_extra_files_are_copied(decoder: Decoder, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    save_hf(decoder, tmp_path / "m", extra_files=[tmp_path / "tokenizer.json"])
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"


def test_keys_of_the_caller_are_added_to_the_config(decoder: Decoder, tmp_path: Path):
    save_hf(decoder, tmp_path / "m", config={"eos_token_id": 2})
    assert transformers.AutoConfig.from_pretrained(tmp_path / "m").eos_token_id == 2


def test_a_folder_with_something_in_it_is_left_alone(decoder: Decoder, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        save_hf(decoder, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_model_that_no_family_describes_is_refused(tmp_path: Path):
    spec = from_config(CONFIG)
    odd = [block.__class__(**{**vars(block), "end_norm": Norm("rms")}) for block in spec.layers]
    decoder = init_weights(Decoder(spec.replace(layers=tuple(odd))))
    with pytest.raises(SpecError, match="end_norm"):
        save_hf(decoder, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_numbers_beyond_fp16_are_not_written_as_infinity(tmp_path: Path):
    decoder = init_weights(Decoder(from_config(CONFIG)))
    with torch.no_grad():
        decoder.layers[0].mlp.down.weight[1, 2] = 7e4
    with pytest.raises(OverflowError, match=r"down_proj\.weight"):
        save_hf(decoder, tmp_path / "m", dtype="fp16")
    assert list(tmp_path.iterdir()) == []


# --- our own form -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_model_that_no_family_describes_loads_back_bit_for_bit(name: str, tmp_path: Path):
    decoder = noisy_decoder(VARIANTS[name])
    save_own(decoder, tmp_path / "m")
    again = load_decoder(tmp_path / "m")
    assert again.spec == decoder.spec.replace(name=again.spec.name)
    assert equal(again, decoder)


def test_the_tensors_of_our_own_form_are_the_ledgers(tmp_path: Path):
    spec = preset("triple-norm-512").replace(vocab_size=131)
    save_own(init_weights(Decoder(spec)), tmp_path / "m")
    with safe_open(tmp_path / "m" / "model.safetensors", framework="np") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert found == {row.name: row.shape for row in ledger(spec).tensors}
    resolved = resolve(tmp_path / "m")
    assert resolved.is_own
    assert resolved.spec == spec


def test_a_tensor_too_many_in_our_own_form_is_named(tmp_path: Path):
    save_own(noisy_decoder(VARIANTS["llama"]), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    save_file({**tensors, "layers.0.attn.extra": torch.ones(3)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(MisfitError, match="1 unexpected"):
        load_decoder(tmp_path / "m")
