"""Two models side by side: every row and figure is that of the two ledgers apart."""

import csv
import io
import json
from dataclasses import replace

import pytest

from openbook.ledger import Workload, compare, ledger
from openbook.spec.model import (
    Attention,
    Block,
    Experts,
    Head,
    HeadNorm,
    LatentAttention,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    Router,
)
from openbook.spec.presets import preset

RMS = Norm("rms")
DECODE = Workload("decode", past=30)


def dense(d_ff=48, **attention):
    attn = replace(Attention(4, 2, 8, 1.0, Rope(8)), **attention)
    return Block(attn, Mlp(d_ff, "silu", gated=True), attn_norm=RMS, mlp_norm=RMS)


def mixture():
    attn = LatentAttention(4, 6, 2, 5, 9, RMS, 1.0, 14, RMS, Rope(2))
    experts = Experts(16, 3, Mlp(10, "silu", gated=True), Router("sigmoid", True, correction=True))
    return Block(attn, experts, attn_norm=RMS, mlp_norm=RMS)


def book(*layers, tied=False, name="", **changes):
    return ledger(ModelSpec(100, 24, 64, layers, Head(tied), RMS, name=name).replace(**changes))


def by_name(a, b):
    return {row.name: row for row in compare.rows(a, b)}


PAIRS = [
    (book(dense(), dense()), book(dense(), mixture(), mixture())),
    (book(dense(), dense(d_ff=52), dense(), tied=True), book(mixture())),
    (ledger(preset("gpt2")), ledger(preset("qwen3-0.6b"))),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_each_side_adds_up_to_its_models_parameters(a, b):
    rows = compare.rows(a, b)
    assert sum(row.a.count for row in rows) == a.params.total
    assert sum(row.b.count for row in rows) == b.params.total
    assert sum(row.difference for row in rows) == b.params.total - a.params.total


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_weight_of_both_models_is_in_one_row_with_its_shapes(a, b):
    rows = by_name(a, b)
    for model, side in ((a, "a"), (b, "b")):
        for tensor in model.tensors:
            name = tensor.name if tensor.layer is None else tensor.name.split(".", 2)[2]
            assert tensor.shape in dict(getattr(rows[name], side).shapes), tensor.name


def test_rows_keep_the_order_of_a_forward_pass():
    names = [row.name for row in compare.rows(book(dense()), book(dense(), mixture()))]
    assert names[0] == "embed.weight"
    assert names[-2:] == ["final_norm.weight", "head.weight"]
    for first, second in (
        ("attn_norm.weight", "attn.q_down.weight"), ("attn.q_down.weight", "attn.kv_up.weight"),
        ("attn.kv_up.weight", "attn.o.weight"), ("mlp_norm.weight", "mlp.router.weight"),
        ("mlp.gate.weight", "mlp.down.weight"), ("mlp.router.weight", "mlp.experts.down.weight"),
    ):  # fmt: skip
        assert names.index(first) < names.index(second)


def test_a_modules_bias_follows_its_weight_whatever_the_other_model_has():
    norm = HeadNorm("rms")
    biased = book(dense(q_bias=True, k_bias=True, v_bias=True))
    names = [row.name for row in compare.rows(biased, book(dense(q_norm=norm, k_norm=norm)))]
    start = names.index("attn.q.weight")
    assert names[start : start + 8] == [
        "attn.q.weight", "attn.q.bias", "attn.k.weight", "attn.k.bias", "attn.v.weight", "attn.v.bias",
        "attn.q_norm.weight", "attn.k_norm.weight",
    ]  # fmt: skip


def test_a_weight_of_several_shapes_says_in_how_many_layers_each_is():
    row = by_name(book(dense(), dense(d_ff=52), dense()), book(dense()))["mlp.up.weight"]
    assert row.a.shapes == (((48, 24), 2), ((52, 24), 1))
    assert compare.shapes(row.a) == "48×24 ×2, 52×24"
    assert row.difference == -48 * 24 - 52 * 24


def test_a_weight_that_one_model_lacks_counts_nothing_there():
    norm = HeadNorm("rms")
    row = by_name(book(dense()), book(dense(q_norm=norm, k_norm=norm)))["attn.q_norm.weight"]
    assert (row.a.shapes, row.a.count, row.b.count) == ((), 0, 8)


def test_a_tied_head_is_said_to_be_tied():
    row = by_name(book(dense(), tied=True), book(dense()))["head.weight"]
    assert (row.a.tied, row.a.count, row.b.tied, row.b.count) == (True, 0, False, 2400)


def test_sizes_are_those_of_either_model_with_their_layers():
    sizes = {size.letter or size.meaning: size for size in compare.sizes(*PAIRS[0])}
    assert sizes["D"].a == sizes["D"].b == ((24, 1),)
    assert (sizes["F"].a, sizes["F"].b) == (((48, 2),), ((48, 1), (10, 2)))
    assert (sizes["C"].a, sizes["C"].b) == ((), ((9, 2),))
    assert sizes["values cached of a token"].b == ((32, 1), (11, 2))
    assert "P" not in sizes


def test_figures_are_those_of_the_ledgers_each_with_its_convention():
    a, b = PAIRS[0]
    figures = {figure.name: figure for figure in compare.figures(a, b, DECODE)}
    for name, of in {
        "total": lambda m: m.params.total,
        "active": lambda m: m.params.active,
        "without_corrections": lambda m: m.params.without_corrections,
        "weights": lambda m: m.weight_bytes,
        "KV a token": lambda m: m.kv_bytes_per_token(),
        "KV a token, expanded": lambda m: m.kv_bytes_per_token_expanded(),
        "KV of 64": lambda m: m.kv_bytes(1, 64),
        "FLOPs a token": lambda m: m.flops_per_token(),
        "FLOPs of the run": lambda m: m.totals(DECODE).flops,
        "FLOPs of routers": lambda m: m.totals(DECODE).router_flops,
        "read for a token": lambda m: m.bytes_per_token(30),
        "memory of the run": lambda m: m.memory(DECODE).total,
    }.items():
        assert (figures[name].a, figures[name].b) == (of(a), of(b)), name
    assert all(figure.meaning for figure in figures.values())
    assert "attention causal" in figures["FLOPs of the run"].meaning


def test_figures_that_tell_nothing_are_left_out():
    names = [figure.name for figure in compare.figures(book(dense()), book(dense(d_ff=52)), DECODE)]
    assert "active" not in names
    assert "FLOPs of routers" not in names
    assert "KV a token, expanded" not in names


@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_items_of_memory_add_up_to_the_whole(mode):
    w = Workload(mode, batch=2, new=8)
    figures = {figure.name: figure.b for figure in compare.figures(*PAIRS[0], w)}
    items = [count for name, count in figures.items() if name.startswith("memory: ")]
    weights = figures["weights"] if mode == "prefill" else 0
    assert figures["memory of the run"] == sum(items) + weights


def test_models_of_one_name_are_told_apart():
    assert compare.titles(book(dense(), name="x"), book(dense(), name="x")) == ("x (1)", "x (2)")
    assert compare.titles(book(dense()), book(dense(), name="x")) == ("the first", "x")


def test_csv_and_json_hold_exact_numbers():
    a, b = PAIRS[0]
    weights, figures = compare.tables(a, b, DECODE)
    read = list(csv.DictReader(io.StringIO(weights.csv())))
    assert sum(int(row["difference"]) for row in read) == b.params.total - a.params.total
    assert {row["weight"] for row in read} >= {"embed.weight", "layers.*.attn.q_down.weight"}
    assert {row["unit"] for row in csv.DictReader(io.StringIO(figures.csv()))} == {
        "parameters",
        "bytes",
        "FLOPs",
    }
    data = json.loads(json.dumps(compare.to_json_of_both(a, b, DECODE)))
    assert data["schema"] == "openbook.ledger/1"
    assert [model["params"]["total"] for model in data["models"]] == [a.params.total, b.params.total]
    assert sum(row["difference"] for row in data["rows"]) == b.params.total - a.params.total
    (total,) = (figure for figure in data["figures"] if figure["name"] == "total")
    assert (total["a"], total["b"]) == (a.params.total, b.params.total)
