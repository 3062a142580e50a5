"""The verbs that need no torch: show, ledger, verify, tokenize, models."""

import csv
import io
import json
from pathlib import Path

import pytest

from openbook.spec.model import from_dict
from openbook.spec.presets import preset


def test_the_version_is_the_packages(openbook):
    import openbook as package

    assert openbook("--version").out == f"openbook {package.__version__}\n"


def test_no_verb_shows_the_help_and_is_wrong_usage(openbook):
    done = openbook()
    assert done.code == 2
    for verb in ("demo", "models", "show", "ledger", "verify", "tokenize", "generate", "chat", "bench"):
        assert f" {verb} " in done.out + done.err


@pytest.mark.parametrize("arguments", [("ledger",), ("ledger", "gpt2", "--mode", "dream"), ("dream",)])
def test_wrong_usage_is_exit_code_2_and_names_the_help(openbook, arguments):
    done = openbook(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "--help" in done.err


# --- show ---------------------------------------------------------------------------------------


def test_a_card_folds_equal_layers(openbook):
    out = openbook("show", "qwen3-0.6b").out
    assert "layers.0–27" in out
    assert "16 query heads on 8 key/value heads of 128" in out
    assert len(out.splitlines()) == 11


def test_a_card_in_json_is_the_whole_spec(openbook):
    data = json.loads(openbook("show", "gpt2", "--json").out)
    assert data["schema"] == "openbook.show/1"
    assert from_dict(data["spec"]) == preset("gpt2")
    assert data["parameters"] == 124_439_808


@pytest.mark.parametrize("name", ["gpt2", "postln-1300", "triple-norm-512", "llama-3.1-8b"])
def test_a_card_names_every_part_of_a_layer(openbook, name: str):
    out = openbook("show", name).out
    block = preset(name).layers[0]
    parts = [
        n for n in ("attn_norm", "attn_add_norm", "mlp_norm", "mlp_add_norm", "end_norm") if getattr(block, n)
    ]
    for part in [*parts, "attn", "mlp"]:
        assert f"    {part} " in out


# --- ledger -------------------------------------------------------------------------------------


def test_the_ledger_ends_in_the_exact_total(openbook):
    lines = openbook("ledger", "postln-1300").out.splitlines()
    assert lines[-3].split() == ["total", "173,982,844,180"]


def test_the_ledger_in_json_is_exact(openbook):
    data = json.loads(openbook("ledger", "postln-1300", "--json").out)
    assert data["schema"] == "openbook.ledger/1"
    assert data["params"]["total"] == 173_982_844_180
    assert data["workload"]["new"] == 512


def test_json_is_a_format_too(openbook):
    assert openbook("ledger", "gpt2", "--json").out == openbook("ledger", "gpt2", "--format", "json").out


def test_csv_has_one_row_a_tensor(openbook):
    rows = list(
        csv.DictReader(io.StringIO(openbook("ledger", "gpt2", "--by", "tensor", "--format", "csv").out))
    )
    named = {row["tensor"]: row for row in rows}
    assert named["layers.11.mlp.down.weight"]["count"] == str(768 * 3072)
    assert len([name for name in named if name.startswith("layers.")]) == 12 * 16


def test_a_workload_changes_the_steps(openbook):
    def flops(*options: str) -> int:
        return json.loads(openbook("ledger", "gpt2", "--json", *options).out)["totals"]["flops"]

    assert flops("--mode", "train", "--new", "8") == 3 * flops("--mode", "decode", "--new", "8")
    assert flops("--mode", "decode", "--batch", "2") == 2 * flops("--mode", "decode")
    assert flops("--attention", "full") > flops("--attention", "causal") > flops("--attention", "half")


def test_several_tables_come_one_after_the_other(openbook):
    out = openbook("ledger", "gpt2", "--params", "--memory").out
    assert "Parameters of gpt2" in out
    assert "Memory of gpt2" in out


def test_decode_is_one_token_unless_told_otherwise(openbook):
    data = json.loads(openbook("ledger", "gpt2", "--json", "--mode", "decode", "--past", "9").out)
    assert (data["workload"]["new"], data["workload"]["past"]) == (1, 9)


@pytest.mark.parametrize("options", [("--new", "0"), ("--batch", "-1"), ("--mode", "train", "--past", "3")])
def test_an_impossible_workload_is_wrong_usage(openbook, options):
    done = openbook("ledger", "gpt2", "--ops", *options)
    assert (done.code, done.out) == (2, "")


def test_an_unknown_name_lists_what_there_is(openbook):
    done = openbook("ledger", "gpt5")
    assert done.code == 3
    assert "gpt2" in done.err


def test_a_config_of_absurd_size_is_answered_not_allocated(openbook, tmp_path: Path):
    config = {
        "model_type": "llama", "vocab_size": 10**12, "hidden_size": 2**40, "intermediate_size": 2**42,
        "num_hidden_layers": 1000, "num_attention_heads": 2**33, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = json.loads(openbook("ledger", str(tmp_path), "--json").out)
    assert data["params"]["total"] > 10**27


# --- models -------------------------------------------------------------------------------------


def test_models_are_listed_with_licence_and_size(openbook):
    row = json.loads(openbook("models", "list", "--json").out)["models"][0]
    assert (row["name"], row["bytes"], row["licence"]) == ("smollm2-135m", 98_362_432, "Apache-2.0")
    assert "98.4 MB" in openbook("models", "list").out


@pytest.mark.model
def test_a_fetched_model_tells_its_path(openbook, smollm2: Path):
    assert openbook("models", "path", "smollm2-135m").out == f"{smollm2}\n"
    assert openbook("models", "get", "smollm2-135m").out == f"{smollm2}\n"


@pytest.mark.parametrize("verb", ["generate", "chat", "tokenize", "verify", "bench"])
def test_a_model_not_fetched_yet_names_the_command(openbook, tmp_path: Path, monkeypatch, verb: str):
    monkeypatch.setenv("OPENBOOK_HOME", str(tmp_path))
    done = openbook(verb, "smollm2-135m", stdin="x")
    assert done.code == 3
    assert "openbook models get smollm2-135m" in done.err


# --- verify -------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_good_file_is_verified(openbook, smollm2: Path):
    done = openbook("verify", str(smollm2))
    assert done.code == 0
    assert "272 tensors, 134,515,008 parameters" in done.out
    data = json.loads(openbook("verify", str(smollm2), "--json").out)
    assert data["ok"] is True
    assert sum(t["shape"] is not None for t in data["tensors"]) == 272


@pytest.mark.model
def test_a_file_cut_short_is_told_and_nothing_is_printed(openbook, smollm2: Path, tmp_path: Path):
    (tmp_path / "cut.gguf").write_bytes(smollm2.read_bytes()[:50_000_000])
    done = openbook("verify", str(tmp_path / "cut.gguf"))
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert "cut.gguf" in done.err


def test_a_misfit_is_listed_and_is_exit_code_1(openbook, tmp_path: Path):
    import numpy as np
    from safetensors.numpy import save_file

    config = {
        "model_type": "gpt2",
        "vocab_size": 11,
        "n_embd": 8,
        "n_head": 2,
        "n_layer": 1,
        "n_positions": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"wte.weight": np.zeros((11, 9), np.float32)}, tmp_path / "model.safetensors")
    done = openbook("verify", str(tmp_path))
    assert done.code == 1
    assert "wte.weight [11, 9] instead of [11, 8]" in done.out
    assert "missing" in done.out
    assert done.err.count("\n") == 1


# --- tokenize -----------------------------------------------------------------------------------


@pytest.mark.model
def test_tokens_come_with_their_pieces(openbook, smollm2: Path):
    done = openbook("tokenize", str(smollm2), "-p", "Hello world")
    assert done.out == "   19556  'Hello'\n     905  ' world'\n"
    assert done.err == "2 tokens, 11 characters\n"
    assert openbook("tokenize", str(smollm2), "--ids", "-q", stdin="Hello world") == (0, "19556 905\n", "")


@pytest.mark.model
def test_a_control_token_written_in_a_text_is_text(openbook, smollm2: Path):
    plain = json.loads(openbook("tokenize", str(smollm2), "-p", "<|im_end|>", "--json").out)["ids"]
    special = json.loads(openbook("tokenize", str(smollm2), "-p", "<|im_end|>", "--json", "--special").out)[
        "ids"
    ]
    assert len(plain) > 1
    assert special == [2]
