"""The printed ledger: grouping, exact numbers in every format, and the count by hand."""

import csv
import io
import json

import pytest

from openbook.ledger import LedgerError, Workload, ledger
from openbook.ledger.table import (
    WIDTH,
    cache_table,
    human_bytes,
    layer_label,
    memory_table,
    op_table,
    params_table,
    summary_table,
    tensor_table,
    to_json,
)
from openbook.spec.model import (
    Attention,
    Block,
    Experts,
    Head,
    LatentAttention,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    Router,
    Shared,
    from_dict,
)
from openbook.spec.presets import PRESETS, preset


def read_csv(table):
    return list(csv.DictReader(io.StringIO(table.csv())))


def mixed_model():
    """A dense layer with grouped queries, then two with latents and experts."""
    norm = Norm("rms")
    dense = Block(Attention(4, 2, 8, 1.0), Mlp(50, "silu", gated=True), attn_norm=norm, mlp_norm=norm)
    attn = LatentAttention(4, 6, 2, 5, 9, norm, 1.0, 14, norm, Rope(2))
    shared = Shared(Mlp(13, "silu", gated=True), gated=True)
    router = Router("sigmoid", True, correction=True)
    experts = Experts(16, 3, Mlp(10, "silu", gated=True), router, shared)
    sparse = Block(attn, experts, attn_norm=norm, mlp_norm=norm)
    return ModelSpec(100, 24, 64, (dense, sparse, sparse), Head(tied=False), norm, name="mixed")


def every_table(book, workload):
    return [
        summary_table(book),
        params_table(book),
        tensor_table(book),
        op_table(book, workload),
        memory_table(book, workload),
        cache_table(book, workload),
    ]


# --- grouping ---


def test_equal_layers_fold_into_one_row():
    text = tensor_table(ledger(preset("qwen3-0.6b"))).text()
    assert "layers.0-27.attn.q.weight ×28" in text
    assert "layers.0.attn.q.weight" not in text


@pytest.mark.parametrize(
    ("layers", "label"),
    [((0, 1, 2), "0-2"), ((5,), "5"), ((0, 2, 3), "0,2-3"), (tuple(range(0, 26, 2)), "0,2,...,24")],
)
def test_layers_have_short_labels(layers, label):
    assert layer_label(layers) == label


@pytest.mark.parametrize("by", ["kind", "tensor", "layer"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3-0.6b", "triple-norm-512"])
def test_every_grouping_of_the_weights_adds_up_to_the_total(name, by):
    book = ledger(preset(name))
    column = "count" if by == "layer" else "all layers"
    rows = read_csv(tensor_table(book, by))
    assert sum(int(row[column]) for row in rows) == book.params.total
    assert sum(int(row["bytes"]) for row in rows) == book.weight_bytes


@pytest.mark.parametrize("by", ["kind", "step", "layer"])
def test_every_grouping_of_the_steps_adds_up_to_the_total(by):
    book, w = ledger(preset("gpt2")), Workload("prefill", batch=2, new=16)
    rows = read_csv(op_table(book, w, by))
    assert sum(int(row["FLOPs"]) for row in rows) == book.totals(w).flops
    assert sum(int(row["KV written"]) for row in rows) == book.totals(w).kv_written


@pytest.mark.parametrize("by", ["kind", "tensor", "layer"])
def test_every_grouping_of_mixed_layers_adds_up(by):
    book, w = ledger(mixed_model()), Workload("decode", batch=2, past=30)
    rows = read_csv(tensor_table(book, by))
    assert sum(int(row["count" if by == "layer" else "all layers"]) for row in rows) == book.params.total
    steps = read_csv(op_table(book, w, by))
    assert sum(int(row["FLOPs"]) for row in steps) == book.totals(w).flops
    assert sum(int(row["KV read"]) for row in steps) == book.totals(w).kv_read


def test_the_active_column_adds_up_and_corrections_are_named():
    book = ledger(mixed_model())
    table = tensor_table(book)
    assert sum(int(row["active"]) for row in read_csv(table)) == book.params.active
    note = "32 are routers' corrections: fp32 in any model, and buffers in Hugging Face's"
    for said in (table, summary_table(book)):
        assert note in " ".join(said.text().split())
        assert f"parameters are {book.params.without_corrections:,}" in " ".join(said.text().split())
    assert "corrections" not in tensor_table(ledger(preset("gpt2"))).text()


def test_the_cache_is_listed_with_what_latents_would_take_expanded():
    book, w = ledger(mixed_model()), Workload("decode", batch=2, past=30)
    table = cache_table(book, w)
    rows = read_csv(table)
    assert [row["a token keeps"] for row in rows] == ["keys and values", "latents"]
    assert sum(int(row["all"]) for row in rows) == book.kv_bytes(2, 31)
    assert "if expanded" in table.text()
    assert "if expanded" not in cache_table(ledger(preset("gpt2")), w).text()


def test_an_unknown_grouping_is_refused():
    with pytest.raises(LedgerError, match="unknown grouping 'size': use kind"):
        tensor_table(ledger(preset("gpt2")), "size")  # pyright: ignore[reportArgumentType]


# --- formats ---


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("mode", ["train", "decode"])
def test_text_fits_a_terminal(name, mode):
    workload = Workload(mode, new=2048) if mode == "train" else Workload(mode, past=2047)
    for table in every_table(ledger(preset(name)), workload):
        # The numbers of a 100-billion-parameter model are written out all the same, behind the names of its
        # experts' weights in every other layer.
        room = WIDTH + {"Steps": 20, "Weights": 12}.get(table.title.split()[0], 0)
        assert [line for line in table.text().splitlines() if len(line) > room] == []


def test_text_aligns_numbers_and_separates_thousands():
    lines = tensor_table(ledger(preset("gpt2"))).text().splitlines()
    embed = next(line for line in lines if line.startswith("embed.weight"))
    total = next(line for line in lines if line.startswith("total"))
    assert embed.split() == ["embed.weight", "50257×768", "V·D", "38,597,376", "38,597,376", "77.19", "MB"]
    assert embed.index(" MB") == total.index(" MB")


def test_markdown_is_a_table_with_exact_bytes():
    lines = tensor_table(ledger(preset("gpt2"))).markdown().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert "77,194,752" in rows[2]
    assert "| 50257 × 768 |" in rows[2]
    assert "**124,439,808**" in rows[-1]


def test_csv_writes_all_shapes_alike():
    row = read_csv(op_table(ledger(preset("gpt2")), Workload("prefill", new=8)))[6]
    assert (row["in"], row["output shape"]) == ("1x12x8x64, 1x12x8x64", "1x12x8x8")


def test_one_layer_is_in_the_singular():
    assert "\n1 layer " in summary_table(ledger(preset("gpt2-block"))).text()


def test_csv_holds_plain_numbers():
    first = read_csv(op_table(ledger(preset("gpt2")), Workload("prefill", new=8)))[3]
    assert first["step"] == "layers.0-11.attn.q ×12"
    assert first["letters"] == "B T D → B T H·K"
    assert first["output shape"] == "1x8x768"
    assert (first["formula"], first["numbers"]) == ("2·B·T·H·K·D", "2·1·8·12·64·768")
    assert int(first["FLOPs"]) == 12 * 2 * 8 * 768 * 768


def test_totals_stand_beside_their_conventions():
    text = op_table(ledger(preset("gpt2")), Workload("train", new=8, attention="half")).text()
    for words in ("a multiply-add is 2 FLOPs", "train = 3 × forward", "attention half"):
        assert words in " ".join(text.split())
    memory = memory_table(ledger(preset("gpt2")), Workload("train", new=8)).text()
    assert "16 bytes per parameter" in memory
    assert "GiB (2³⁰ bytes)" in memory


def test_bytes_of_mixed_precision_are_said_to_be_mixed():
    spec, mixed = preset("gpt2"), "the residual stream, its norms and scores in fp32"
    assert mixed in " ".join(op_table(ledger(spec, "bf16"), Workload("prefill", new=8)).text().split())
    assert mixed not in " ".join(op_table(ledger(spec, "fp32"), Workload("prefill", new=8)).text().split())


def test_parameter_counts_stand_beside_their_definitions():
    book = ledger(preset("gpt2"))
    for row in read_csv(params_table(book)):
        assert int(row["count"]) == getattr(book.params, row["parameters"])
        assert row["what is counted"] == book.params.definitions[row["parameters"]]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (16_060_522_496, "16.06 GB"), (999_999, "1.00 MB"),
        (10**30, "1,000,000,000,000.00 EB"),
    ],
)  # fmt: skip
def test_bytes_are_in_decimal_units(count, words):
    assert human_bytes(count) == words


# --- the count by hand ---


def by_hand(name):
    return {row[0]: row[1:] for row in summary_table(ledger(preset(name))).rows}


def test_worked_example_a_by_hand():
    assert by_hand("postln-1300") == {
        "token embedding": ("V·D", 15_974_400),
        "sinusoidal positions": ("0", 0),
        "q, k, v, one layer": ("3·D²", 452_984_832),
        "attention, one layer": ("4·D²", 603_979_776),
        "norms, one layer": ("4·D", 49_152),
        "feed-forward, one layer": ("8·D²", 1_207_959_552),
        "one layer": ("12·D² + 4·D", 1_811_988_480),
        "96 layers": ("", 173_950_894_080),
        "output head": ("V·D + V", 15_975_700),
        "total": ("", 173_982_844_180),
    }
    learned = by_hand("postln-1300-learned")
    assert learned["learned positions"] == ("P·D", 25_165_824)
    assert learned["total"] == ("", 174_008_010_004)


def test_worked_example_b_by_hand():
    rows = by_hand("gpt2-block")
    assert rows["q, k, v, one layer"] == ("3·D² + 3·D", 1_771_776)
    assert rows["attention, one layer"] == ("4·D² + 4·D", 2_362_368)
    assert rows["feed-forward, one layer"] == ("8·D² + 5·D", 4_722_432)
    assert rows["norms, one layer"] == ("4·D", 3_072)
    assert rows["one layer"] == ("12·D² + 13·D", 7_087_872)


def test_worked_example_c_by_hand():
    rows = by_hand("triple-norm-512")
    assert rows["norms, one layer"] == ("6·D", 3_072)
    assert rows["one layer"] == ("12·D² + 15·D", 3_153_408)
    assert rows["6 layers"] == ("", 18_920_448)
    assert rows["output head"] == ("V·D + V", 5_130_000)
    assert rows["total"] == ("", 29_170_448)


def test_a_gated_mlp_is_three_matrices():
    assert by_hand("llama-3-8b")["feed-forward, one layer"] == ("3·F·D", 3 * 14_336 * 4096)


@pytest.mark.parametrize("name", PRESETS)
def test_the_parts_by_hand_add_up(name):
    book = ledger(preset(name))
    rows = {label: count for label, _, count in summary_table(book).rows}
    in_layers = 0
    for section in book.tensor_sections[1:-1]:
        one_kind = len(book.tensor_sections) == 3
        layer = "one layer" if one_kind else f"layers {layer_label(section.layers)}, each"
        parts = ("attention", "norms", "feed-forward", "router", "experts", "shared expert")
        assert sum(rows.get(f"{part}, {layer}", 0) for part in parts) == rows[layer]
        in_layers += section.times * rows[layer]
    outside = ("token embedding", "learned positions", "embedding norm", "final norm", "output head")
    total = in_layers + sum(rows.get(part, 0) for part in outside)
    assert total == rows["total"] == book.params.total


def test_the_parts_of_every_kind_of_layer_add_up():
    book = ledger(mixed_model())
    rows = [(label, count) for label, _, count in summary_table(book).rows]
    parts = ("attention", "norms", "feed-forward", "router", "experts", "shared expert")
    for layers, times in (("layers 0, each", 1), ("layers 1-2, each", 2)):
        counted = sum(n for label, n in rows if label.endswith(layers) and label.startswith(parts))
        assert counted == dict(rows)[layers], times
    counts = dict(rows)
    assert counts["3 layers"] == counts["layers 0, each"] + 2 * counts["layers 1-2, each"]
    assert counts["total"] == book.params.total
    assert counts["active, of one token"] == book.params.active


def test_experts_and_latents_are_written_in_letters():
    formulas = {label: formula for label, formula, _ in summary_table(ledger(mixed_model())).rows}
    assert formulas["experts, layers 1-2, each"] == "3·E·F·D"
    assert formulas["shared expert, layers 1-2, each"] == "3·J·D + D"
    assert formulas["router, layers 1-2, each"] == "E·D + E"
    assert formulas["q, k, v, layers 1-2, each"] == "H·(N+R)·Q + H·(N+U)·C + Q·D + (C+R)·D"


def test_a_long_formula_is_broken_between_its_terms():
    lines = summary_table(ledger(mixed_model())).text().splitlines()
    assert max(map(len, lines)) <= WIDTH
    start = next(i for i, line in enumerate(lines) if line.startswith("layers 1-2, each"))
    formula = lines[start].split("each")[1].rstrip("0123456789, ").split() + lines[start + 1].split()
    (whole,) = (row[1] for row in summary_table(ledger(mixed_model())).rows if row[0] == "layers 1-2, each")
    assert " ".join(formula) == whole


# --- JSON ---


def test_json_is_one_object_with_its_schema():
    book, w = ledger(preset("qwen3-0.6b")), Workload("decode", past=100)
    data = json.loads(json.dumps(to_json(book, w)))
    assert data["schema"] == "openbook.ledger/1"
    assert data["params"]["total"] == 596_049_920
    assert set(data["definitions"]) == set(data["params"])
    assert sum(row["times"] * row["count"] for row in data["tensors"] if not row["tie"]) == 596_049_920
    assert sum(row["times"] * row["flops"] for row in data["ops"]) == data["totals"]["flops"]
    assert data["memory"]["total"] == sum(row["bytes"] for row in data["memory"]["rows"])
    assert data["workload"]["dtype"] == "bf16"
    assert from_dict(data["spec"]) == book.spec


def test_json_by_tensor_names_every_weight():
    book = ledger(preset("gpt2"))
    names = [row["name"] for row in to_json(book, by="tensor")["tensors"]]
    assert names == [row.name for row in book.tensors]


def test_json_by_layer_adds_up():
    data = to_json(ledger(preset("gpt2")), Workload("prefill", new=4), by="layer")
    assert sum(row["count"] for row in data["tensors"]) == 124_439_808
    assert sum(row["flops"] for row in data["ops"]) == data["totals"]["flops"]
    assert [row["name"] for row in data["tensors"]][:3] == ["embed", "positions", "layers.0"]
