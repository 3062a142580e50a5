"""`openbook bench`: what it prints for people and for programs, and what it warns of."""

import json
import os
import re
from pathlib import Path

import pytest

from openbook.model import Decoder, init_weights
from openbook.spec.model import Attention, Block, Head, Mlp, ModelSpec, Norm, Rope
from openbook.weights.save_gguf import save_gguf

SHORT = ("-p", "8", "-n", "3", "-r", "2")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Matrices of Q8_0, 32 values a block."""
    attn = Attention(8, 2, 8, scale=8**-0.5, rope=Rope(8))
    block = Block(attn, Mlp(96, "silu", gated=True), attn_norm=Norm("rms"), mlp_norm=Norm("rms"))
    spec = ModelSpec(97, 64, 64, (block,) * 2, Head(tied=True), final_norm=Norm("rms"))
    save_gguf(init_weights(Decoder(spec), seed=0), tmp_path / "tiny.gguf", "Q8_0")
    return str(tmp_path / "tiny.gguf")


def test_against_transformers_one_command_measures_everything(openbook, model: str):
    done = openbook("bench", model, *SHORT, "--vs", "hf", "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["schema"] == "openbook.bench/1"
    rows = data["results"]
    engines = ["default", "fp32", "bf16", "hf fp32", "hf bf16"]
    assert [(r["test"], label(r)) for r in rows] == [
        *((test, engine) for test in ("pp8", "tg3", "pp8+tg3") for engine in engines),
        ("load", "fp32"), ("load", "hf fp32"),
    ]  # fmt: skip
    ours, theirs = ([r for r in rows if r["backend"] == name] for name in ("openbook", "transformers"))
    assert all(r["ratio_to_hf"] > 0 for r in ours)
    assert all(r["ratio_to_hf"] is None for r in theirs)
    assert all(r["ratio_to_hf_dtype"] == r["dtype"] for r in ours if not r["default"])
    assert all(r["tokens_per_s"] == (r["tokens"] / r["seconds"] if r["tokens"] else None) for r in rows)


def label(row: dict) -> str:
    if row["default"]:
        return "default"
    return row["dtype"] if row["backend"] == "openbook" else f"hf {row['dtype']}"


def test_the_table_has_llama_benchs_columns_and_names_what_a_ratio_is_against(openbook, model: str):
    lines = openbook("bench", model, *SHORT, "--dtype", "fp32", "--vs", "hf").out.splitlines()
    assert re.split(r"  +", lines[0]) == [
        "model", "size", "params", "backend", "threads", "test", "t/s", "of limit", "vs hf",
    ]  # fmt: skip
    assert re.search(
        r"^tiny fp32 +[\d.]+ kB +0\.06 M  openbook +\d+  pp8 +[\d.,]+ ± [\d.,]+ +\d+%  ", lines[2]
    )
    assert re.search(r"\d\.\d\d × hf fp32$", lines[2])
    assert not re.search(r"× hf", lines[3])
    load = next(line for line in lines if "  load  " in line)
    assert re.search(r"[\d.]+ ± [\d.]+ s +[\d.]+ × hf fp32$", load)


def test_the_default_is_explained_and_loads_as_generate_does(openbook, model: str):
    out = openbook("bench", model, *SHORT).out
    assert out.count("tiny default  ") == 4  # pp8, tg3, both, load
    assert re.search(r"^default: as generate runs it, here q8_0 blocks for single tokens and \w+", out, re.M)
    assert "hf" not in out


def test_other_programs_are_warned_of_on_stderr(openbook, model: str, monkeypatch: pytest.MonkeyPatch):
    arguments = ("bench", model, "-p", "0", "-n", "1", "-r", "1")
    monkeypatch.setattr(os, "getloadavg", lambda: (7.04, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    done = openbook(*arguments)
    assert done.err == (
        "warning: other programs are running (load 7.0 on 8 cores): the figures will be noisy\n"
    )
    assert "warning" not in done.out
    assert openbook(*arguments, "-q").err == ""
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0, 9.0, 9.0))
    assert openbook(*arguments).err == ""


def test_without_transformers_there_is_one_line_and_exit_code_3(
    openbook, model: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("openbook.cli.bench.find_spec", lambda name: None)
    done = openbook("bench", model, "--vs", "hf")
    assert (done.code, done.out) == (3, "")
    assert done.err == "error: --vs hf needs transformers: pip install transformers accelerate gguf\n"


def test_a_bench_of_nothing_is_wrong_usage(openbook, model: str):
    assert openbook("bench", model, "-p", "0", "-n", "0").code == 2


# --- experts ------------------------------------------------------------------------------------

MIXTURE = {
    "model_type": "olmoe", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 10,
    "num_experts_per_tok": 3, "max_position_embeddings": 128,
}  # fmt: skip


def test_experts_need_no_weights_and_are_compared_with_transformers(openbook, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    asked = ("bench", str(tmp_path), "--experts", "-r", "1", "--dtype", "fp32", "--vs", "hf")
    lines = openbook(*asked).out.splitlines()
    assert re.split(r"  +", lines[0]) == [
        "experts of", "backend", "way", "tokens", "ms", "of limit", "vs eager", "error",
    ]  # fmt: skip
    assert re.search(r" fp32  openbook +default +1 +[\d.]+ ± [\d.]+ +\d+% +[\d.]+ +\de-0\d$", lines[2])
    rows = json.loads(openbook(*asked, "--json").out)["experts"]
    assert {row["tokens"] for row in rows} == {1, 64, 2048}
    assert all(row["error"] < 1e-5 and row["ratio_to_hf_eager"] > 0 for row in rows)


def test_a_model_without_experts_is_told_so(openbook, model: str):
    done = openbook("bench", model, "--experts")
    assert done.code != 0
    assert "has no experts" in done.err


def test_training_is_measured_beside_transformers(openbook, tmp_path: Path):
    config = {
        "model_type": "llama", "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "small.json").write_text(json.dumps(config))
    arguments = ("--train", "--vs", "hf", "--rows", "2", "--length", "33", "-r", "1", "--dtype", "fp32")
    done = openbook("bench", str(tmp_path / "small.json"), *arguments, "--json")
    assert done.code == 0, done.err
    ours, theirs = json.loads(done.out)["train"]
    assert (ours["way"], theirs["way"]) == ("openbook", "hf")
    assert ours["first_loss"] == pytest.approx(theirs["first_loss"], rel=1e-6)
    assert theirs["ratio_of_openbook"] > 0
    # Four copies of every weight are there in any case: itself, its gradient, two moments.
    if ours["peak_bytes"] is not None:
        assert min(ours["peak_bytes"], theirs["peak_bytes"]) > 16 * (2 * 90 * 32 + 4 * 32**2 + 3 * 32 * 48)
    assert openbook("bench", str(tmp_path / "small.json"), "--train", "--dtype", "q8_0").code == 2
