"""openbook flow: worked example D, and what a stranger reads."""

import json
import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from openbook.cli.flow import EXAMPLE, shown
from openbook.ledger import ledger
from openbook.spec.presets import preset
from openbook.text import Tokenizer
from openbook.train.bpe import train_bpe
from openbook.weights.save import save_hf
from variants import VARIANTS, noisy_decoder


def columns(line: str) -> int:
    """Of a terminal: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a vocabulary of 300 tokens, in which most Chinese characters are bytes."""
    path = tmp_path_factory.mktemp("flow") / "tiny"
    words = tmp_path_factory.mktemp("words")
    train_bpe(["这 是 最好的 时代\n", "a text of some words\n"], 300, words)
    spec = VARIANTS["llama"].replace(vocab_size=300, max_positions=200)
    save_hf(noisy_decoder(spec), path, extra_files=sorted(words.iterdir()))
    return path


# --- worked example D -----------------------------------------------------------------------------


def test_the_example_by_words_is_the_worked_one(openbook: Callable):
    """Ten tokens with start and end: input row n → label n + 1; the prompt is the first half."""
    done = json.loads(openbook("flow", "llama-3-8b", "--json").out)
    assert done["schema"] == "openbook.flow/1"
    words = ["<start>", "这", "是", "最好的", "时代", "这", "是", "最坏的", "时代", "<end>"]
    rows = done["training"]["rows"]
    assert [(row["input"], row["label"]) for row in rows] == list(pairwise(words))
    assert done["generation"]["given"] == "这 是 最好的 时代"
    assert done["generation"]["prompt_tokens"] == 5
    book = ledger(preset("llama-3-8b"))
    steps = done["generation"]["steps"]
    assert [(step["new"], step["past"]) for step in steps] == [(5, 0), (1, 5), (1, 6), (1, 7), (1, 8)]
    assert sum(step["flops"] for step in steps) == book.generation_flops(5, 5)
    assert sum(step["flops_without"] for step in steps) == book.generation_flops(5, 5, cached=False)
    assert done["training"]["flops"] == 3 * done["training"]["forward_flops"]
    assert {row["probability"] for row in rows} == {None}
    assert "No weights here" in done["missing"]


def test_a_preset_says_what_is_missing_and_what_would_give_it(openbook: Callable):
    out = " ".join(openbook("flow", "gpt3-175b").out.split())
    assert "No weights here, so no probabilities, no losses and nothing measured" in out
    assert "Each word counts as one token." in out
    assert "a folder with .safetensors, a .gguf file or a run's folder" in out
    assert "probability" not in out.replace("probabilities", "")


def test_a_folder_without_weights_has_tokens_all_the_same(openbook: Callable, folder: Path, tmp_path: Path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (folder / name).exists():
            (tmp_path / name).write_bytes((folder / name).read_bytes())
    done = json.loads(openbook("flow", str(tmp_path), "--json").out)
    real = json.loads(openbook("flow", str(folder), "--no-measure", "--json").out)
    assert done["ids"] == real["ids"]
    assert done["tokens"] == real["tokens"]
    assert "No weights here" in done["missing"]
    assert "counts as one token" not in done["missing"]


def test_weights_without_a_tokenizer_are_said_to_be_so(openbook: Callable, folder: Path, tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    out = " ".join(openbook("flow", str(tmp_path)).out.split())
    assert "No tokenizer here" in out
    assert "a tokenizer.json beside the weights" in out


# --- a model with weights ---------------------------------------------------------------------------


def test_the_numbers_are_the_models_own(openbook: Callable, folder: Path):
    import openbook as ob

    done = json.loads(openbook("flow", str(folder), "--json").out)
    lm = ob.load(folder)
    ids = done["ids"]
    tokenizer = lm.tokenizer
    assert tokenizer is not None
    assert ids == [tokenizer.bos_id, *tokenizer.encode(EXAMPLE), tokenizer.eos_id]
    with torch.no_grad():
        logprobs = lm.decoder(torch.tensor([ids[:-1]]))[0].float().log_softmax(-1)
    losses = [-logprobs[n, label].item() for n, label in enumerate(ids[1:])]
    assert [row["loss"] for row in done["training"]["rows"]] == pytest.approx(losses, abs=1e-4)
    assert done["training"]["mean_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    prompt = [tokenizer.bos_id, *tokenizer.encode("这 是 最好的 时代")]
    greedy = [token.id for token in lm.tokens(prompt, max_tokens=len(ids) - len(prompt), temperature=0)]
    assert [step["id"] for step in done["generation"]["steps"]] == greedy
    assert [saving["length"] for saving in done["cache"]] == [16, 64]
    assert all(saving["measured"]["seconds"] > 0 for saving in done["cache"])
    assert done["missing"] is None


def test_the_prompt_and_the_number_of_tokens_can_be_given(openbook: Callable, folder: Path):
    arguments = ("--given", "a text", "-n", "3", "--no-measure", "-p", "a text of some words")
    done = json.loads(openbook("flow", str(folder), *arguments, "--json").out)
    assert done["generation"]["given"] == "a text"
    assert len(done["generation"]["steps"]) <= 3
    assert done["cache"][0]["measured"] is None


def test_the_tables_fit_in_80_columns_and_show_each_share_of_a_character(
    openbook: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    out = openbook("flow", str(folder), "-p", "最坏的 [b]words[/b]").out
    assert max(map(columns, out.splitlines())) <= 80
    assert "'坏' 1/3" in out
    assert "'坏' 3/3" in out
    assert "the first of the 3 tokens whose bytes together are '最'." in " ".join(out.split())
    assert "'['" in out  # what looks like markup is text
    for title in ("Training: ", "Generation: ", "The cache: "):
        assert title in out


def test_a_control_character_in_the_text_stays_in_its_cell(openbook: Callable, folder: Path):
    out = openbook("flow", str(folder), "--no-measure", "-p", "a\x1b[2J\nb").out
    assert "\x1b" not in out
    assert r"\x1b" in out


def test_a_text_beyond_the_context_is_one_line_and_wrong_usage(openbook: Callable, folder: Path):
    done = openbook("flow", str(folder), "-p", "words " * 300)
    assert done.code == 2
    assert re.fullmatch(r"error: text: must have from 2 to 201 tokens, found [\d,]+\n", done.err)
    assert done.out == ""


@pytest.mark.model
def test_smollm2_in_both_flows(openbook: Callable, smollm2: Path):
    done = json.loads(
        openbook("flow", str(smollm2), "-p", "The capital of France is Paris.", "--no-measure", "--json").out
    )
    rows = {(row["input"], row["label"]): row for row in done["training"]["rows"]}
    assert rows["' is'", "' Paris'"]["rank"] <= 3
    assert rows["' capital'", "' of'"]["rank"] == 1
    assert done["tokens"][0] == "<|im_start|>"


# --- texts ------------------------------------------------------------------------------------------


def test_the_shares_of_characters_joined_are_the_text(folder: Path):
    tokenizer = Tokenizer.from_file(folder)
    text = "坏 时代 a"
    ids = tokenizer.encode(text)
    seen = shown(tokenizer, ids)
    assert len(seen) == len(ids)
    whole = [cell for cell in seen if not re.search(r" \d+/\d+$", cell) or cell.endswith(" 1/3")]
    assert "".join(cell.split("'")[1] for cell in whole) == text
