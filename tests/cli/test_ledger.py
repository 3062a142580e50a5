"""`openbook ledger`: two models side by side as a terminal shows them, and absurd ones at once."""

import csv
import io
import json

import pytest

from bounded import bounded_work

LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
FIVE_TRILLION = {
    "model_type": "deepseek_v3", "hidden_size": 8192, "num_hidden_layers": 54, "n_routed_experts": 2048,
}  # fmt: skip
ABSURD = {
    "widths": LLAMA | {"hidden_size": 4 * 10**18, "intermediate_size": 10**18},
    "head size": LLAMA | {"head_dim": 10**18},
    "experts": {"model_type": "mixtral", "num_local_experts": 10**12, "num_experts_per_tok": 10**6},
    "positions": {"model_type": "opt", "max_position_embeddings": 10**18, "vocab_size": 10**18},
    "windows": {"model_type": "gemma3_text", "num_hidden_layers": 10**4, "sliding_window": 10**15},
}
REFUSED = {
    "layers": LLAMA | {"num_hidden_layers": 10**12},
    "layers of kinds": {"model_type": "gemma3_text", "num_hidden_layers": 10**12},
    "dense layers": {
        "model_type": "deepseek_v3", "num_hidden_layers": 10**12, "first_k_dense_replace": 10**11
    },
    "slopes": {"model_type": "bloom", "n_head": 10**12, "hidden_size": 10**12, "n_layer": 2},
}  # fmt: skip
WORK = ((), ("--ops", "--memory", "--mode", "decode", "--past", "1000000"), ("--vs", "gpt2"))


@pytest.fixture
def config(tmp_path):
    def write(values: dict) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return str(path)

    return write


@pytest.mark.parametrize("options", WORK)
def test_five_trillion_parameters_are_counted_at_once(openbook, config, options: tuple[str, ...]):
    with bounded_work(1):
        done = openbook("ledger", config(FIVE_TRILLION), *options)
    assert (done.code, done.err) == (0, "")
    if not options:
        (total,) = (line.split()[1] for line in done.out.splitlines() if line.startswith("total"))
        assert int(total.replace(",", "")) > 5 * 10**12


@pytest.mark.parametrize("options", WORK)
@pytest.mark.parametrize("absurd", ABSURD)
def test_absurd_sizes_are_answered_at_once(openbook, config, absurd: str, options: tuple[str, ...]):
    with bounded_work(2):
        done = openbook("ledger", config(ABSURD[absurd]), *options)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("refused", REFUSED)
def test_what_would_have_to_be_written_out_is_refused_in_one_line(openbook, config, refused: str):
    with bounded_work(1):
        done = openbook("ledger", config(REFUSED[refused]))
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("columns", [80, 100, 120, 200])
def test_two_models_fit_any_terminal_beside_each_other(openbook, monkeypatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    done = openbook("ledger", "gpt2", "--vs", "llama-3-8b")
    assert (done.code, done.err) == (0, "")
    assert [line for line in done.out.splitlines() if len(line) > columns] == []
    words = done.out.split()
    for number in ("124,439,808", "8,030,261,248", "+7,905,821,440", "tied", "64.5×"):
        assert number in words


def test_what_both_have_alike_is_marked_equal(openbook, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
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
