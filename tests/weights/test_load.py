"""Loading tiny checkpoints, good and bad. What the numbers then mean is for tests/model to see."""

import json
import logging
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openbook.files import FileError
from openbook.files.gguf import read_gguf, write_gguf
from openbook.ledger import ledger
from openbook.model import Decoder, init_weights
from openbook.sources import NotFoundError, resolve
from openbook.spec.hf import from_config
from openbook.spec.model import SpecError
from openbook.weights import fit
from openbook.weights.dialects import HF, places
from openbook.weights.fit import WontFitError
from openbook.weights.load import NonFiniteError, load_decoder
from openbook.weights.save import save_hf
from openbook.weights.save_gguf import save_gguf
from openbook.weights.verify import MisfitError

LLAMA = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 131, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 6}
TIED = {**LLAMA, "tie_word_embeddings": True}
IDS = torch.tensor([[5, 1, 77, 130, 12]])


def noisy(config: dict[str, Any]) -> Decoder:
    decoder = init_weights(Decoder(from_config(config)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return decoder


def folder_of(config: dict[str, Any], path: Path, **saving: Any) -> Path:
    save_hf(noisy(config), path, **saving)
    return path


def edit(folder: Path, change: Any, config: dict[str, Any] | None = None) -> Path:
    """Rewrites a folder's tensors as `change` leaves them, and some keys of its config."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(config or {})}))
    return folder


@torch.no_grad()
def logits(decoder: Decoder) -> Tensor:
    return decoder(IDS)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return folder_of(LLAMA, tmp_path / "llama")


# --- every parameter once -----------------------------------------------------------------------


def test_every_parameter_is_loaded_bit_for_bit(llama: Path):
    ours, loaded = noisy(LLAMA).state_dict(), load_decoder(llama).state_dict()
    assert ours.keys() == loaded.keys()
    assert all(torch.equal(ours[name], loaded[name]) for name in ours)


@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, {**LLAMA, "tie_word_embeddings": True}], ids=["llama", "gpt2", "tied"]
)
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_a_loaded_model_has_the_ledgers_parameters_and_none_on_meta(config, kind, tmp_path):
    save = save_hf if kind == "hf" else save_gguf
    path = tmp_path / "model.gguf"
    save(noisy(config), path)
    decoder = load_decoder(path)
    storages = {p.untyped_storage().data_ptr(): p.numel() for p in decoder.state_dict().values()}
    assert sum(storages.values()) == ledger(from_config(config)).params.total
    assert not any(p.is_meta for p in [*decoder.parameters(), *decoder.buffers()])


def test_nothing_uninitialised_is_left(llama: Path, tmp_path: Path):
    """Memory that torch hands out is filled with NaN here; loading refuses whatever keeps one."""
    save_gguf(noisy(LLAMA), tmp_path / "q.gguf", dtype="Q8_0")
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        for path in (llama, tmp_path / "q.gguf"):
            decoder = load_decoder(path, "bf16")
            assert all(p.isfinite().all() for p in decoder.parameters())
    finally:
        torch.use_deterministic_algorithms(False)


def test_parameters_of_the_files_dtype_are_the_mapped_file(llama: Path):
    decoder = load_decoder(llama)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    spans = [
        line.split()[0].split("-") for line in maps.read_text().splitlines() if "model.safetensors" in line
    ]
    pointer = decoder.layers[1].mlp.up.weight.data_ptr()
    assert any(int(low, 16) <= pointer < int(high, 16) for low, high in spans)


def test_writing_to_a_loaded_model_does_not_change_the_file(llama: Path, tmp_path: Path):
    save_gguf(noisy(LLAMA), tmp_path / "f32.gguf", dtype="F32")
    for path, file in ((llama, llama / "model.safetensors"), (tmp_path / "f32.gguf",) * 2):
        before = file.read_bytes()
        decoder = load_decoder(path)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.zero_()
        assert file.read_bytes() == before


def test_all_misfits_are_listed_in_one_error(llama: Path):
    def change(tensors):
        del tensors["model.layers.0.self_attn.k_proj.weight"]
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors[
            "model.layers.1.mlp.up_proj.weight"
        ].T.contiguous()
        tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int32)
        tensors["model.layers.2.extra"] = torch.ones(1)

    with pytest.raises(MisfitError) as caught:
        load_decoder(edit(llama, change))
    assert {misfit.name: misfit.status for misfit in caught.value.misfits} == {
        "model.layers.0.self_attn.k_proj.weight": "missing",
        "model.layers.1.mlp.up_proj.weight": "shape",
        "model.norm.weight": "dtype",
        "model.layers.2.extra": "unexpected",
    }
    text = str(caught.value)
    assert "\n" not in text
    assert "model.layers.1.mlp.up_proj.weight [48, 80] instead of [80, 48]" in text
    assert isinstance(caught.value, FileError)


def test_a_name_out_of_a_file_cannot_write_to_the_terminal(llama: Path):
    bad = edit(llama, lambda tensors: {**tensors, "\x1b[2Jevil\n": torch.ones(1)})
    with pytest.raises(MisfitError) as caught:
        load_decoder(bad)
    assert str(caught.value).isprintable()


def test_a_model_of_a_hundred_layers_too_few_is_still_one_short_line(llama: Path):
    bad = edit(llama, lambda tensors: None, {"num_hidden_layers": 1000})
    with pytest.raises(MisfitError) as caught:
        load_decoder(bad)
    assert len(caught.value.misfits) == 998 * 9
    assert len(str(caught.value)) < 1000


# --- the head -----------------------------------------------------------------------------------


def test_a_tied_head_that_is_absent_shares_the_embedding(tmp_path: Path):
    decoder = load_decoder(folder_of(TIED, tmp_path / "m"))
    assert decoder.head.weight is decoder.embed.weight
    assert decoder.spec.head.tied


def test_a_tied_head_stored_a_second_time_shares_the_embedding(tmp_path: Path):
    folder = folder_of(TIED, tmp_path / "m")
    edit(folder, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    decoder = load_decoder(folder)
    assert decoder.head.weight is decoder.embed.weight


def test_a_tied_head_stored_with_other_values_is_kept_with_a_warning(tmp_path: Path, caplog):
    folder = folder_of(TIED, tmp_path / "m")
    edit(folder, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1})
    with caplog.at_level(logging.WARNING):
        decoder = load_decoder(folder)
    assert "lm_head.weight" in caplog.text
    assert not decoder.spec.head.tied
    assert torch.equal(decoder.head.weight, decoder.embed.weight + 1)


def test_a_tied_pair_may_be_stored_under_the_heads_name_alone(tmp_path: Path):
    """safetensors.torch.save_model keeps the first name by alphabet: lm_head."""
    folder = folder_of(TIED, tmp_path / "m")
    before = logits(load_decoder(folder))

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    edit(folder, rename)
    assert torch.equal(logits(load_decoder(folder)), before)


def test_an_untied_head_that_is_absent_is_refused(llama: Path):
    bad = edit(llama, lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    with pytest.raises(MisfitError, match=r"1 missing \(lm_head\.weight\)"):
        load_decoder(bad)


def test_a_gguf_without_output_is_tied(tmp_path: Path):
    save_gguf(noisy(TIED), tmp_path / "m.gguf", dtype="F32")
    assert "output.weight" not in read_gguf(tmp_path / "m.gguf").tensors
    decoder = load_decoder(tmp_path / "m.gguf")
    assert decoder.head.weight is decoder.embed.weight


# --- GPT-2 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["bare", "prefixed", "with masks"])
def test_gpt2_loads_with_or_without_prefix_and_mask_buffers(spelling: str, tmp_path: Path):
    folder = folder_of(GPT2, tmp_path / "gpt2")

    def change(tensors):
        if spelling == "bare":
            return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        if spelling == "with masks":
            for n in range(2):
                tensors[f"transformer.h.{n}.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
                tensors[f"transformer.h.{n}.attn.masked_bias"] = torch.tensor(-1e4)
        return tensors

    assert "transformer.wte.weight" in load_file(folder / "model.safetensors")
    before = noisy(GPT2)
    decoder = load_decoder(edit(folder, change))
    assert torch.equal(logits(decoder), logits(before))
    assert sum(p.numel() for p in decoder.parameters()) == ledger(before.spec).params.total


# --- experts ------------------------------------------------------------------------------------

MIXTURE = {
    "model_type": "deepseek_v3", "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 12,
    "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 11, "n_routed_experts": 5,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 20,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
THIRD = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return folder_of(MIXTURE, tmp_path / "mixture")


def test_each_experts_matrix_lands_at_its_own_place(mixture: Path):
    third = load_file(mixture / "model.safetensors")[THIRD]
    loaded = load_decoder(mixture)
    assert torch.equal(loaded.layers[1].mlp.experts.up.weight[3], third)
    for (name, found), expected in zip(
        loaded.state_dict().items(), noisy(MIXTURE).state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), name


def test_an_expert_without_a_matrix_is_named(mixture: Path):
    with pytest.raises(MisfitError) as caught:
        load_decoder(edit(mixture, lambda tensors: {k: v for k, v in tensors.items() if k != THIRD}))
    assert [(row.name, row.status) for row in caught.value.misfits] == [(THIRD, "missing")]


def test_an_expert_with_nan_is_named(mixture: Path):
    def change(tensors):
        tensors[THIRD][2, 1] = torch.nan

    edit(mixture, change)
    with pytest.raises(NonFiniteError) as caught:
        load_decoder(mixture)
    assert caught.value.names == [THIRD]
    assert load_decoder(mixture, allow_nonfinite=True).layers[1].mlp.experts.up.weight[3, 2, 1].isnan()


def test_a_parameter_gathered_from_many_tensors_takes_memory(mixture: Path, monkeypatch):
    monkeypatch.setattr(fit, "available_bytes", lambda device: 0)
    with pytest.raises(WontFitError) as caught:
        load_decoder(mixture)
    assert caught.value.needed == 4 * 3 * 5 * 20 * 48


def test_corrections_keep_fp32_in_a_narrower_model_and_in_its_files(mixture: Path, tmp_path: Path):
    name = "layers.1.mlp.router.correction"
    exact = load_decoder(mixture).get_parameter(name)
    narrow = load_decoder(mixture, "bf16")
    assert narrow.embed.weight.dtype == torch.bfloat16
    assert torch.equal(narrow.get_parameter(name), exact)
    save_hf(narrow, tmp_path / "again")
    stored = load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(stored["model.layers.1.mlp.gate.e_score_correction_bias"], exact)
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


def test_a_layer_that_guesses_further_tokens_is_left_in_the_file(mixture: Path):
    def change(tensors):
        extra = {"eh_proj.weight": torch.ones(48, 96), "self_attn.o_proj.weight": torch.ones(48, 44)}
        return tensors | {f"model.layers.2.{name}": values for name, values in extra.items()}

    expected = load_decoder(mixture).state_dict()
    loaded = load_decoder(edit(mixture, change, {"num_nextn_predict_layers": 1})).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


# --- dtype --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "wanted", "found"),
    [
        ({"torch_dtype": "bfloat16"}, None, torch.bfloat16),
        ({"torch_dtype": None, "dtype": "bfloat16"}, None, torch.bfloat16),
        ({"torch_dtype": None}, None, torch.bfloat16),
        ({"torch_dtype": "float16"}, None, torch.float16),
        ({"torch_dtype": "float16"}, "fp32", torch.float32),
        ({"torch_dtype": "float16"}, torch.float32, torch.float32),
    ],
    ids=[
        "torch_dtype",
        "dtype",
        "the header",
        "at odds with the file",
        "asked for",
        "asked for in torch's word",
    ],
)
def test_the_dtype_is_the_callers_else_the_configs_else_the_files(config, wanted, found, tmp_path):
    folder = edit(folder_of(LLAMA, tmp_path / "m", dtype="bf16"), lambda tensors: None, config)
    decoder = load_decoder(folder, wanted)
    assert {p.dtype for p in decoder.parameters()} == {found}
    assert sum(p.nbytes for p in decoder.parameters()) == ledger(decoder.spec).params.total * found.itemsize


def test_an_unknown_dtype_in_the_config_is_an_error_not_a_default(llama: Path):
    with pytest.raises(SpecError, match="float9"):
        load_decoder(edit(llama, lambda tensors: None, {"torch_dtype": "float9"}))


@pytest.mark.parametrize(("dtype", "expected"), [("F16", torch.float16), ("Q8_0", torch.float32)])
def test_a_gguf_computes_in_its_matrices_dtype_and_in_fp32_if_quantised(dtype, expected, tmp_path):
    config = {**LLAMA, "hidden_size": 64, "head_dim": 8, "intermediate_size": 96}
    save_gguf(noisy(config), tmp_path / "m.gguf", dtype=dtype)
    assert load_decoder(tmp_path / "m.gguf").embed.weight.dtype == expected


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gguf_decoded_to_a_dtype_is_its_fp32_rounded_once(dtype, tmp_path):
    config = {**LLAMA, "hidden_size": 64, "intermediate_size": 96}
    save_gguf(noisy(config), tmp_path / "m.gguf", dtype="Q4_1")
    exact, rounded = load_decoder(tmp_path / "m.gguf", "fp32"), load_decoder(tmp_path / "m.gguf", dtype)
    for name, parameter in rounded.state_dict().items():
        assert torch.equal(parameter, exact.state_dict()[name].to(parameter.dtype)), name


def test_numbers_beyond_fp16_are_an_error_and_not_infinity(tmp_path: Path):
    folder = folder_of(LLAMA, tmp_path / "m", dtype="bf16")

    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = 1e5

    edit(folder, change)
    for allow in (False, True):
        with pytest.raises(NonFiniteError, match=r"65504.*model\.layers\.0\.mlp\.up_proj"):
            load_decoder(folder, "fp16", allow_nonfinite=allow)
    assert load_decoder(folder, "bf16").layers[0].mlp.up.weight[3, 4] > 9e4


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_in_a_file_are_refused_unless_allowed(value: float, llama: Path):
    def change(tensors):
        tensors["model.layers.1.self_attn.o_proj.weight"][0, 7] = value
        tensors["model.norm.weight"][2] = value

    edit(llama, change)
    with pytest.raises(NonFiniteError) as caught:
        load_decoder(llama)
    assert caught.value.names == ["model.layers.1.self_attn.o_proj.weight", "model.norm.weight"]
    loaded = load_decoder(llama, allow_nonfinite=True).layers[1].attn.o.weight[0, 7]
    assert torch.equal(loaded, torch.tensor(value)) or loaded.isnan()


# --- memory -------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_both_numbers(llama: Path, monkeypatch):
    monkeypatch.setattr(fit, "available_bytes", lambda device: 1000)
    with pytest.raises(WontFitError) as caught:
        load_decoder(llama, "fp64")
    assert caught.value.needed == 8 * ledger(from_config(LLAMA)).params.total
    assert caught.value.available == 1000
    assert load_decoder(llama, "fp64", force=True).embed.weight.dtype == torch.float64


def test_parameters_that_are_the_mapped_file_need_no_memory(llama: Path, monkeypatch):
    monkeypatch.setattr(fit, "available_bytes", lambda device: 0)
    load_decoder(llama)


def test_too_large_a_model_is_refused_before_anything_is_allocated(tmp_path: Path):
    """A sparse file of 2 TB: the header is sound, so only the memory check stands in the way."""
    config = {**LLAMA, "vocab_size": 2**27, "hidden_size": 4096, "num_hidden_layers": 1}
    spec = from_config(config)
    shapes = {row.name: row.shape for row in ledger(spec).tensors}
    header, offset = {}, 0
    for place in places(spec, shapes, HF["llama"]):
        nbytes = 4 * torch.Size(place.shape).numel()
        header[place.stored] = {
            "dtype": "F32",
            "shape": place.shape,
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    raw = json.dumps(header).encode()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    with pytest.raises(WontFitError, match=r"needs \d+\.\d+ GB of memory, but only"):
        load_decoder(tmp_path, "bf16")


# --- files that are no weights ------------------------------------------------------------------


class Canary:
    """Unpickling this creates the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (os.fspath(self.path),)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors", "model-00001-of-00001.safetensors"]
)
def test_a_pickle_is_never_opened(name: str, tmp_path: Path):
    canary = tmp_path / "canary"
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    if name.startswith("model-"):
        index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError):
        load_decoder(folder)
    assert not canary.exists()
    pickle.loads((folder / name).read_bytes())
    assert canary.exists()  # the canary does sing


def test_pickles_beside_the_weights_are_left_alone(llama: Path, tmp_path: Path):
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng_state.pth"):
        (llama / name).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    load_decoder(llama)
    assert not (tmp_path / "canary").exists()


def test_code_in_a_model_folder_is_not_run(llama: Path, tmp_path: Path):
    (llama / "modeling_evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'canary')!r})")
    edit(llama, lambda tensors: None, {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})
    load_decoder(llama)
    assert not (tmp_path / "canary").exists()
    assert "modeling_evil" not in sys.modules


def test_a_preset_has_no_weights_to_load():
    with pytest.raises(NotFoundError, match="no weights"):
        load_decoder(resolve("gpt2"))


def test_a_missing_shard_is_named(tmp_path: Path):
    folder = folder_of(LLAMA, tmp_path / "m", shard_bytes=60_000)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(FileError, match=shards[1].name):
        load_decoder(folder)


def test_a_truncated_file_is_refused(llama: Path, tmp_path: Path):
    save_gguf(noisy(LLAMA), tmp_path / "m.gguf")
    for path, file in ((llama, llama / "model.safetensors"), (tmp_path / "m.gguf",) * 2):
        file.write_bytes(file.read_bytes()[:-2000])
        with pytest.raises(FileError, match="complete"):
            load_decoder(path)


def test_a_gguf_with_a_tensor_type_that_cannot_be_decoded_says_so(tmp_path: Path):
    config = {**LLAMA, "hidden_size": 256, "head_dim": 32, "intermediate_size": 256}
    save_gguf(noisy(config), tmp_path / "m.gguf", dtype="F32")
    good = read_gguf(tmp_path / "m.gguf")
    tensors = [(t.name, t.shape, t.type, good.data(t.name)) for t in good.tensors.values()]
    at = next(i for i, row in enumerate(tensors) if row[0] == "blk.0.ffn_up.weight")
    tensors[at] = ("blk.0.ffn_up.weight", (256, 256), "IQ4_XS", bytes(256 * 136))
    write_gguf(tmp_path / "bad.gguf", good.metadata, tensors)
    with pytest.raises(MisfitError, match=r"cannot be read \(blk\.0\.ffn_up\.weight IQ4_XS\)"):
        load_decoder(tmp_path / "bad.gguf")


def test_progress_ends_with_all_bytes_done(llama: Path):
    calls: list[tuple[str, int, int]] = []
    load_decoder(llama, progress=lambda *call: calls.append(call))
    size = 4 * ledger(from_config(LLAMA)).params.total
    assert calls[-1] == ("loading", size, size)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
