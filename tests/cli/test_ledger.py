"""`openbook ledger A --vs B` as a terminal shows it."""

import csv
import io
import json

import pytest


@pytest.mark.parametrize("columns", [80, 100, 120, 200])
def test_two_models_fit_any_terminal_beside_each_other(openbook, monkeypatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    done = openbook("ledger", "gpt2", "--vs", "llama-3-8b")
    assert (done.code, done.err) == (0, "")
    assert [line for line in done.out.splitlines() if len(line) > columns] == []
    words = done.out.split()
    for number in ("124,439,808", "8,030,261,248", "+7,905,821,440", "tied", "64.5×"):
        assert number in words


def test_what_both_have_alike_is_marked_equal(openbook):
    lines = openbook("ledger", "gpt2", "--vs", "gpt2").out.splitlines()
    assert lines[1].split() == ["gpt2", "(1)", "gpt2", "(2)"]
    (total,) = (line for line in lines if line.startswith("total  ") and "every parameter" in line)
    assert total.split()[1:4] == ["124,439,808", "124,439,808", "="]


def test_every_figure_has_its_convention_beside_it(openbook, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = " ".join(openbook("ledger", "gpt2", "--vs", "llama-3-8b", "--mode", "train").out.split())
    for words in ("a storage with two names counts once", "train = 3 × forward", "windows ignored"):
        assert words in text


def test_the_comparison_in_json_is_one_object_with_both_ledgers(openbook):
    data = json.loads(openbook("ledger", "gpt2", "--vs", "llama-3-8b", "--json").out)
    assert data["schema"] == "openbook.ledger/1"
    assert [model["name"] for model in data["models"]] == ["gpt2", "llama-3-8b"]
    assert data["models"][1]["workload"]["new"] == 512


def test_the_comparison_in_csv_has_a_row_for_each_weight(openbook):
    text = openbook("ledger", "gpt2", "--vs", "llama-3-8b", "--format", "csv").out
    rows = list(csv.DictReader(io.StringIO(text.split("\n\n")[0])))
    (row,) = (row for row in rows if row["weight"] == "layers.*.mlp.gate.weight")
    assert (row["gpt2"], row["llama-3-8b"]) == ("0", str(32 * 14_336 * 4096))


@pytest.mark.parametrize("option", ["--by=kind", "--ops", "--memory", "--params"])
def test_a_comparison_takes_no_single_table(openbook, option: str):
    done = openbook("ledger", "gpt2", "--vs", "llama-3-8b", option)
    assert (done.code, done.out) == (2, "")
    assert "--vs compares everything at once" in done.err


def test_an_unknown_second_model_is_not_found(openbook):
    assert openbook("ledger", "gpt2", "--vs", "gpt5").code == 3


def test_memory_lists_the_cache_by_what_layers_keep(openbook):
    out = openbook("ledger", "gpt2", "--memory", "--mode", "decode", "--past", "99").out
    assert "KV cache of gpt2: decode, batch 1, 1 new token after 99 cached" in out
    assert "keys and values  2·G·K" in out
