"""Folders to files and back from the command line: nothing lost, overwritten or half-written."""

import json
import re
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

import llama_server
from gguf_models import PLAIN_TOKEN, VOCABULARY, noisy, tiny, vocabulary
from openbook.sources import resolve
from openbook.spec.hf import from_config
from openbook.text import Tokenizer
from openbook.text.gguf import from_metadata
from openbook.text.to_hf import special_ids, to_files
from openbook.weights.load import load_decoder
from openbook.weights.save import save_hf
from openbook.weights.save_gguf import save_gguf

TEXT = "the tale of a rat, 1234 times retold\n\n  and <|endoftext|>é"
OPT = {
    "model_type": "opt", "vocab_size": 300, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "max_position_embeddings": 64, "word_embed_proj_dim": 48,
}  # fmt: skip


def write_text(folder: Path) -> None:
    for name, content in to_files(from_metadata(vocabulary())).items():
        (folder / name).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Mixtral of five experts, with a tokenizer."""
    save_hf(noisy(tiny("llama")), tmp_path / "mixtral", config=special_ids(from_metadata(vocabulary())))
    write_text(tmp_path / "mixtral")
    return tmp_path / "mixtral"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_gguf(noisy(tiny("gemma3")), tmp_path / "gemma.gguf", "BF16", vocabulary())
    return tmp_path / "gemma.gguf"


def types(file: Path) -> set[str]:
    return {t.tensor_type.name for t in gguf.GGUFReader(file).tensors if len(t.shape) > 1}


# --- both ways ----------------------------------------------------------------------------------


def test_a_folder_comes_back_from_a_file_bit_for_bit_with_its_tokenizer(openbook, folder, tmp_path):
    there = openbook("convert", str(folder), str(tmp_path / "m.gguf"))
    back = openbook("convert", str(tmp_path / "m.gguf"), str(tmp_path / "again"))
    assert (there.code, back.code) == (0, 0), there.err + back.err
    assert re.fullmatch(r".*m\.gguf: 33 tensors, [\d,]+ bytes, F32\n", there.out)
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "again")]
    assert configs[0] == configs[1]
    assert configs[0]["eos_token_id"] == VOCABULARY - 1
    tokenizers = [Tokenizer.from_file(place) for place in (folder, tmp_path / "again")]
    assert tokenizers[0].encode(TEXT, special=True) == tokenizers[1].encode(TEXT, special=True)


@pytest.mark.skipif(llama_server.MISSING, reason="llama.cpp is not here: pip install xllamacpp")
def test_llama_cpp_reads_the_text_and_the_model_of_a_converted_folder(openbook, folder, tmp_path):
    assert openbook("convert", str(folder), str(tmp_path / "m.gguf")).code == 0
    ids = Tokenizer.from_file(folder).encode(TEXT, special=True)
    assert llama_server.tokenize(tmp_path / "m.gguf", [TEXT]) == [ids]
    theirs = llama_server.next_logprobs(tmp_path / "m.gguf", [ids], PLAIN_TOKEN)[0]
    with torch.inference_mode():
        ours = load_decoder(folder)(torch.tensor([ids]))[0, -1].log_softmax(-1)
    assert max(abs(ours[i].item() - p) for i, p in theirs.items()) < 1e-4


def test_a_file_becomes_a_file_of_another_type_with_the_same_text(openbook, file, tmp_path):
    done = openbook("convert", str(file), str(tmp_path / "q.gguf"), "--dtype", "F16", "--json")
    assert done.code == 0
    assert json.loads(done.out)["dtype"] == "F16"
    assert types(tmp_path / "q.gguf") == {"F16"}
    before, after = (gguf.GGUFReader(path).fields for path in (file, tmp_path / "q.gguf"))
    kept = [key for key in before if key.startswith("tokenizer.")]
    assert len(kept) == 8
    assert all((before[k].types, before[k].contents()) == (after[k].types, after[k].contents()) for k in kept)


def test_a_folder_becomes_a_folder_of_another_type_with_the_same_files(openbook, folder, tmp_path):
    assert openbook("convert", str(folder), str(tmp_path / "half"), "--dtype", "BF16").code == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "half" / name).read_bytes() == (folder / name).read_bytes()
    assert from_config(json.loads((tmp_path / "half" / "config.json").read_text())) == resolve(folder).spec


@pytest.mark.parametrize(
    ("stored", "target", "written"),
    [("BF16", "m", "BF16"), ("Q8_0", "m", "F32"), ("Q8_0", "m.gguf", "F16"), ("F16", "m.gguf", "F16")],
)
def test_without_dtype_a_plain_type_stays_and_a_quantised_one_is_decoded(
    openbook, stored, target, written, tmp_path
):
    save_gguf(noisy(tiny("qwen3", embedding_length=96)), tmp_path / "source.gguf", stored)
    done = openbook("convert", str(tmp_path / "source.gguf"), str(tmp_path / target), "--json")
    assert json.loads(done.out)["dtype"] == written


def test_a_family_keeps_its_name_where_several_could_hold_the_model(openbook, tmp_path):
    save_gguf(noisy(tiny("seed_oss")), tmp_path / "s.gguf", model_type="seed_oss")
    assert openbook("convert", str(tmp_path / "s.gguf"), str(tmp_path / "s")).code == 0
    assert openbook("convert", str(tmp_path / "s"), str(tmp_path / "t.gguf")).code == 0
    assert resolve(tmp_path / "s").family == resolve(tmp_path / "t.gguf").family == "seed_oss"


# --- what cannot be carried ---------------------------------------------------------------------


def test_a_model_without_a_tokenizer_is_converted_with_one_line_that_says_so(openbook, folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    done = openbook("convert", str(folder), str(tmp_path / "m.gguf"))
    assert done.code == 0
    assert done.err.startswith("warning: the file will be without a tokenizer: ")
    assert done.err.count("\n") == 1
    back = openbook("convert", str(tmp_path / "m.gguf"), str(tmp_path / "again"))
    assert back.code == 0
    assert back.err.startswith("warning: the folder will be without a tokenizer: ")


def test_a_model_that_llama_cpp_lacks_is_refused_by_name(openbook, tmp_path):
    save_hf(noisy(from_config(OPT)), tmp_path / "opt")
    done = openbook("convert", str(tmp_path / "opt"), str(tmp_path / "m.gguf"))
    assert done.code == 3
    assert "GGUF has no architecture for 'opt' models" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["opt"]


def test_a_type_of_gguf_alone_is_no_type_of_a_folder(openbook, file, tmp_path):
    done = openbook("convert", str(file), str(tmp_path / "m"), "--dtype", "Q4_0")
    assert done.code == 2
    assert "F32, F16, BF16" in done.err


def test_numbers_beyond_the_type_stop_it_and_leave_nothing(openbook, tmp_path):
    decoder = noisy(tiny("qwen3"))
    with torch.no_grad():
        decoder.get_parameter("layers.1.mlp.down.weight")[2, 3] = 1e6
    save_hf(decoder, tmp_path / "m")
    for target in ("n.gguf", "n"):
        done = openbook("convert", str(tmp_path / "m"), str(tmp_path / target), "--dtype", "F16")
        assert done.code == 2
        assert "down" in done.err
        assert "take bf16 or fp32" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_broken_model_stops_it_and_leaves_nothing(openbook, folder, tmp_path):
    tensors = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(tensors[:-4] + b"\xff\xff\xff\x7f")
    for target in ("m.gguf", "m"):
        done = openbook("convert", str(folder), str(tmp_path / target))
        assert (done.code, "NaN" in done.err) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["mixtral"]


# --- what is there already ----------------------------------------------------------------------


def test_what_is_there_is_replaced_only_if_told(openbook, file, folder, tmp_path):
    taken = {"file": (folder, tmp_path / "m.gguf"), "folder": (file, tmp_path / "m")}
    for source, target in taken.values():
        assert openbook("convert", str(source), str(target)).code == 0
    stamp = (tmp_path / "m" / "config.json").stat().st_ino
    for source, target in taken.values():
        refused = openbook("convert", str(source), str(target))
        assert (refused.code, "--force" in refused.err) == (2, True)
    assert (tmp_path / "m" / "config.json").stat().st_ino == stamp
    for source, target in taken.values():
        assert openbook("convert", str(source), str(target), "--dtype", "F16", "--force").code == 0
    assert types(tmp_path / "m.gguf") >= {"F16"}
    assert load_file(tmp_path / "m" / "model.safetensors")["model.norm.weight"].dtype == torch.float16
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("content", ["notes.txt", "config.json", "checkpoints/"])
def test_a_folder_that_holds_anything_else_is_never_replaced(openbook, file, tmp_path, content):
    assert openbook("convert", str(file), str(tmp_path / "m")).code == 0
    if content.endswith("/"):
        (tmp_path / "m" / content).mkdir()
    else:
        (tmp_path / "m" / "model.safetensors").unlink()
        (tmp_path / "m" / content).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    done = openbook("convert", str(file), str(tmp_path / "m"), "--force")
    assert (done.code, "not replaced" in done.err) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_model_that_is_read_is_never_the_one_that_is_replaced(openbook, file, folder, tmp_path):
    (folder / "inner.gguf").write_bytes(file.read_bytes())
    for source, target in ((file, file), (folder, folder), (folder / "inner.gguf", folder)):
        done = openbook("convert", str(source), str(target), "--force")
        assert (done.code, "another place" in done.err) == (2, True)
    assert file.exists()
    assert (folder / "inner.gguf").exists()


# --- explaining ---------------------------------------------------------------------------------


def test_explain_tells_of_every_pattern_and_converts_nothing(openbook, folder, tmp_path):
    done = openbook("convert", str(folder), str(tmp_path / "m.gguf"), "--explain")
    assert done.code == 0
    lines = [re.sub(r"\s+", " ", line).strip() for line in done.out.splitlines()]
    told = dict(zip(lines[::2], lines[1::2], strict=True))
    names = "model.layers.{n}.self_attn.k_proj.weight → layers.{n}.attn.k.weight → blk.{n}.attn_k.weight"
    assert told[f"{names} [24, 48] ×3"] == "rows permuted for adjacent rotary pairs, 2 heads"
    assert told["model.norm.weight → final_norm.weight → output_norm.weight [48]"] == "as it is"
    experts = next(words for line, words in told.items() if "ffn_down_exps" in line)
    assert experts == "stacked from 5 experts"
    assert [path.name for path in tmp_path.iterdir()] == ["mixtral"]


def test_explain_as_json_has_the_same_steps(openbook, file, tmp_path):
    done = openbook("convert", str(file), str(tmp_path / "m"), "--explain", "--json")
    steps = json.loads(done.out)["steps"]
    norm = next(step for step in steps if step["ours"] == "layers.{n}.mlp_norm.weight")
    assert norm == {
        "source": "blk.{n}.ffn_norm.weight",
        "ours": "layers.{n}.mlp_norm.weight",
        "target": "model.layers.{n}.pre_feedforward_layernorm.weight",
        "shape": [48],
        "words": "1 taken off",
        "times": len(resolve(file).spec.layers),
    }
