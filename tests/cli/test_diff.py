"""`openbook diff`: the sides it takes, what it says, and its exit codes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import random_model
from openbook.cli import diff
from openbook.weights.load import load_decoder
from openbook.weights.save_gguf import save_gguf

LLAMA = "layers.0.attn"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama/, a random checkpoint without a tokenizer; eps/, the same with another rms_norm_eps."""
    root = tmp_path_factory.mktemp("diff")
    random_model("llama").save_pretrained(root / "llama")
    shutil.copytree(root / "llama", root / "eps")
    config = json.loads((root / "eps" / "config.json").read_text())
    (root / "eps" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    return root


@pytest.fixture
def run(openbook: Callable[..., Any], folders: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run("llama", "--cached")`, in the folder of the checkpoints."""
    monkeypatch.chdir(folders)
    return lambda *arguments: openbook("diff", *arguments)


# --- sides --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "model", "way", "dtype"),
    [
        ("smollm2-135m", "smollm2-135m", "plain", "fp32"),
        ("hf:./tiny", "./tiny", "hf", "fp32"),
        ("cached:tiny@bf16", "tiny", "cached", "bf16"),
        ("padded:a/b.gguf", "a/b.gguf", "padded", "fp32"),
        ("odd:name@home", "odd:name@home", "plain", "fp32"),
        ("me@work@fp16", "me@work", "plain", "fp16"),
    ],
)
def test_a_side_is_a_way_a_model_and_a_dtype(text: str, model: str, way: str, dtype: str):
    assert diff.parse_side(text) == diff.Asked(model, way, dtype)


@pytest.mark.parametrize("text", ["tiny", "hf:tiny", "cached:tiny@bf16", "padded:tiny"])
def test_a_side_is_shown_as_one_would_write_it(text: str):
    assert diff.parse_side(text).label == text


def test_a_folder_is_compared_with_transformers(run):
    done = run("llama")
    assert (done.code, done.err) == (0, "")
    assert "B  hf:llama  transformers, fp32\n" in done.out
    assert "57 steps compared, none differs." in done.out


@pytest.mark.parametrize(
    ("arguments", "b"),
    [
        (("--cached",), "cached:llama"),
        (("--padded",), "padded:llama"),
        (("--dtype", "bf16"), "llama@bf16"),
        (("--cached", "--dtype", "fp16"), "cached:llama@fp16"),
        (("hf:llama@bf16",), "hf:llama@bf16"),
    ],
)
def test_a_model_is_compared_with_itself_run_otherwise(run, arguments: tuple[str, ...], b: str):
    done = run("llama", *arguments)
    assert done.code == 0
    assert f"\nB  {b}  " in done.out


def test_a_gguf_is_a_side_and_the_rounding_of_its_type_is_allowed(run, folders: Path):
    save_gguf(load_decoder(folders / "llama"), folders / "half.gguf", dtype="F16")
    assert run("half.gguf", "hf:llama").code == 0
    strict = run("half.gguf", "hf:llama", "--tolerance", "1e-5")
    assert strict.code == 1
    assert "\nembed: the weights differ: embed.weight by " in strict.out


# --- what is said -------------------------------------------------------------------------------


def test_a_difference_is_named_with_its_reason_and_is_exit_code_1(run):
    done = run("eps", "hf:llama")
    assert (done.code, done.err) == (1, "")
    lines = done.out.splitlines()
    assert lines[4] == "layers.0.attn_norm: eps: 0.001 in A, 1e-05 in B"
    assert next(line.split()[1] for line in lines if line.startswith("≠")) == "layers.0.attn_norm"
    assert any(line.startswith("  embed ") for line in lines)
    assert any(line.startswith("≠ head ") for line in lines)
    assert "  ⋮  51 more, of which 51 differ" in lines
    assert lines[-2].startswith("Furthest apart at token ")
    assert lines[-1] == "Next: compare eps in the two descriptions of the model."


def test_the_report_is_json_without_infinities(run):
    done = run("eps", "hf:llama", "--json", "--ids", "5,6,7")
    data = json.loads(done.out, parse_constant=pytest.fail)
    assert (done.code, data["schema"], data["equal"]) == (1, "openbook.diff/1", False)
    assert (data["ids"], data["first"]) == ([5, 6, 7], "layers.0.attn_norm")
    assert data["faults"][0]["reason"] == "eps: 0.001 in A, 1e-05 in B"
    assert data["b"] == {"model": "llama", "way": "hf", "dtype": "fp32"}
    steps = {step["name"]: step for step in data["steps"]}
    assert (steps["embed"]["equal"], steps["head"]["equal"]) == (True, False)
    assert steps["layers.2.attn.probs"]["axes"] == ["B", "H", "T", "S"]


def test_a_tolerance_looks_past_a_difference_and_none_at_all_can_be_asked_for(run):
    assert run("eps", "llama", "--tolerance", "0.5").code == 0
    assert run("llama", "llama", "--tolerance", "0").code == 0


def test_two_models_are_told_what_one_of_them_lacks(run, folders: Path):
    random_model("gpt2").save_pretrained(folders / "gpt2")
    done = run("./gpt2", "llama")
    assert done.code == 1
    assert (
        "\nlayers.0.attn_norm: norm: LayerNorm in A, RMSNorm in B; bias: added in A, none in B\n" in done.out
    )
    assert "In one model only: positions, attn.q_rope (3), " in done.out


def test_a_window_that_the_run_does_not_reach_is_said(run, folders: Path):
    random_model("mistral").save_pretrained(folders / "mistral")
    assert "Windows of 7 tokens are longer than the run" in run("mistral", "--cached", "--ids", "1,2,3").out
    assert "longer than the run" not in run("mistral", "--cached").out


# --- what cannot be run -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nowhere",), 3, "nowhere"),
        (("gpt2", "--cached"), 3, "no weights"),
        (("llama", "llama", "--cached"), 2, "cached:B"),
        (("llama", "--cached", "--padded"), 2, "one of them"),
        (("llama", "--dtype", "int3"), 2, "fp32"),
        (("llama", "--cached", "--ids", "1,x"), 2, "'1,x'"),
        (("llama", "--cached", "--ids", "1,131"), 2, "0 to 130"),
        (("llama", "--cached", "--ids", "1", "-p", "x"), 2, "one of them"),
        (("llama", "--cached", "--ids", ",".join("1" * 65)), 2, "65 tokens"),
        (("llama", "--cached", "-p", "text"), 3, "tokenizer"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_an_exit_code(run, arguments, code: int, says: str):
    done = run(*arguments)
    assert (done.code, done.out) == (code, "")
    assert says in done.err
    assert done.err.count("\n") == 1


def test_a_gguf_alone_has_no_second_side_and_is_told_its_choices(run, folders: Path):
    save_gguf(load_decoder(folders / "llama"), folders / "alone.gguf", dtype="F32")
    done = run("alone.gguf")
    assert (done.code, done.out) == (2, "")
    assert "--cached" in done.err


def test_without_transformers_one_line_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setattr(diff, "find_spec", lambda name: None)
    done = run("llama")
    assert (done.code, done.out) == (3, "")
    assert "pip install transformers" in done.err


def test_what_transformers_cannot_load_is_one_line(run, folders: Path, monkeypatch):
    import transformers

    def fail(*args: Any, **named: Any) -> None:
        raise ValueError("Unrecognized configuration\nclass")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    done = run("llama")
    assert (done.code, done.out) == (3, "")
    assert "transformers cannot load" in done.err
    assert "Unrecognized configuration class" in done.err


def test_too_little_memory_is_told_before_transformers_loads(run, monkeypatch):
    monkeypatch.setattr("openbook.weights.fit.available_bytes", lambda device="cpu": 1)
    done = run("hf:llama", "hf:llama")
    assert (done.code, done.out) == (4, "")
    assert run("hf:llama", "hf:llama", "--force").code == 0


# --- a real model -------------------------------------------------------------------------------


@pytest.mark.model
def test_a_real_model_is_the_same_through_a_cache_and_tokens_are_shown_as_text(openbook, smollm2: Path):
    done = openbook("diff", str(smollm2), "--cached", "-p", "The capital of France is")
    assert done.code == 0
    assert "5 tokens: The capital of France is\n" in done.out
