"""FLOPs and bytes of steps, against published figures and arithmetic by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.ledger import LedgerError, Workload, ledger
from openbook.ledger.ops import visible_pairs
from openbook.spec.model import Attention, Block, Head, Mlp, ModelSpec, Norm
from openbook.spec.presets import preset


def named(spec, workload, dtype="bf16"):
    return {row.name: row for row in ledger(spec, dtype).ops(workload)}


def one_layer(n_heads=4, n_kv_heads=4, head_dim=8, window=None, tied=False):
    attn = Attention(n_heads, n_kv_heads, head_dim, 1.0, window=window)
    return ModelSpec(100, 24, 64, (Block(attn, Mlp(48, "relu", gated=False)),), Head(tied))


def attention_flops(spec, workload):
    return sum(r.flops for r in ledger(spec).ops(workload) if r.name.endswith(("scores", "mix")))


def gpt2_without_biases():
    spec = preset("gpt2")
    norm = Norm("layer")
    layer = replace(
        spec.layers[0],
        attn=replace(spec.layers[0].attn, q_bias=False, k_bias=False, v_bias=False, o_bias=False),
        mlp=replace(spec.layers[0].mlp, up_bias=False, down_bias=False),
        attn_norm=norm,
        mlp_norm=norm,
    )
    return spec.replace(layers=(layer,) * 12, final_norm=norm)


# --- published figures ---


@pytest.mark.parametrize(
    ("name", "tokens", "half", "full"),
    [
        ("llama-3-8b", 8192, "51.470", "57.913"),
        ("llama-3-70b", 8192, "449.223", "481.435"),
        ("llama-2-7b", 4096, "42.864", "46.085"),
    ],
)
def test_training_flops_per_token_equal_the_published_digits(name, tokens, half, full):
    # The published "causal" figures charge exactly half of the square: our convention "half".
    book = ledger(preset(name))
    for attention, published in (("half", half), ("full", full)):
        flops = book.totals(Workload("train", new=tokens, attention=attention)).flops
        assert f"{flops / tokens / 1e9:.3f}" == published


def test_causal_exceeds_half_by_half_a_key_per_query():
    book = ledger(preset("llama-3-8b"))
    flops = {a: book.totals(Workload("train", new=8192, attention=a)).flops for a in ("causal", "half")}
    assert flops["causal"] - flops["half"] == 3 * 32 * 2 * (2 * 32 * 128) * 8192 // 2


def test_a_gpt2_sequence_of_1024_tokens_without_biases():
    book = ledger(gpt2_without_biases())
    forward = Workload("prefill", new=1024, attention="full", last_only=False)
    assert book.totals(forward).flops == 291_648_307_200
    assert book.totals(Workload("train", new=1024, attention="full")).flops == 874_944_921_600


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "size", "flops"), [(12, 12, 64, 64, 12_582_912), (8, 2, 16, 8, 65_536)]
)
def test_attention_has_two_products_and_kv_heads_play_no_part(heads, kv_heads, tokens, size, flops):
    spec = one_layer(heads, kv_heads, size)
    assert attention_flops(spec, Workload("prefill", new=tokens, attention="full")) == flops


def test_the_head_costs_the_same_whether_tied_or_not():
    tied = preset("qwen2.5-0.5b")
    untied = tied.replace(head=Head(tied=False))
    w = Workload("decode")
    assert named(tied, w)["head"].flops == named(untied, w)["head"].flops == 272_269_312
    assert ledger(tied).totals(w).flops == ledger(untied).totals(w).flops
    assert named(tied, w)["embed"].flops == 0


# --- conventions ---


def test_full_attention_grows_with_the_square_of_the_length():
    short, long = (Workload("prefill", new=n, attention="full") for n in (16, 32))
    assert attention_flops(one_layer(), long) == 4 * attention_flops(one_layer(), short)


def test_half_is_half_of_full_to_the_last_flop():
    for tokens in (16, 17):
        half, full = (Workload("prefill", new=tokens, attention=a) for a in ("half", "full"))
        assert 2 * attention_flops(one_layer(), half) == attention_flops(one_layer(), full)


def test_one_token_sees_the_same_keys_causally_and_in_full():
    for convention in ("causal", "full"):
        w = Workload("decode", past=99, attention=convention)
        assert attention_flops(one_layer(4, 4, 8), w) == 4 * 4 * 8 * 100


@given(new=st.integers(1, 30), past=st.integers(0, 30), window=st.none() | st.integers(1, 40))
def test_visible_pairs_are_the_trues_of_the_mask(new, past, window):
    mask = [
        k <= q and (window is None or k > q - window)
        for q in range(past, past + new)
        for k in range(past + new)
    ]
    assert visible_pairs(new, past, window) == sum(mask)


def test_a_window_caps_full_attention_too():
    w = Workload("prefill", new=32, attention="full")
    assert attention_flops(one_layer(window=8), w) == 4 * 4 * 8 * 32 * 8
    assert attention_flops(one_layer(window=99), w) == attention_flops(one_layer(), w)


@pytest.mark.parametrize("window", [None, 5])
def test_a_sequence_token_by_token_costs_what_it_costs_at_once(window):
    # With a cache nothing is computed twice, so generation costs as much as reading the same text.
    book = ledger(one_layer(window=window))
    at_once = book.totals(Workload("prefill", new=20, last_only=False)).flops
    assert sum(book.flops_per_token(position) for position in range(20)) == at_once


def test_training_is_three_forward_passes():
    book = ledger(preset("qwen3-0.6b"))
    forward = book.totals(Workload("prefill", batch=2, new=9, last_only=False)).flops
    assert book.totals(Workload("train", batch=2, new=9)).flops == 3 * forward


def test_elementwise_steps_and_look_ups_count_nothing():
    rows = named(preset("llama-3.2-1b"), Workload("prefill", new=8))
    free = {name.rpartition(".")[2] for name, row in rows.items() if row.flops == 0}
    assert free == {
        "embed", "attn_norm", "q_rope", "k_rope", "masked", "probs", "attn_add", "mlp_norm", "act", "mlp_add",
        "final_norm",
    }  # fmt: skip


@given(batch=st.integers(1, 4), new=st.integers(1, 9), past=st.integers(0, 9))
def test_every_formula_gives_its_number(batch, new, past):
    spec = preset("qwen3-0.6b")
    book = ledger(spec.replace(layers=spec.layers[:1]))
    for convention in ("causal", "half", "full"):
        for row in book.ops(Workload("prefill", batch, new, past, attention=convention)):
            if row.formula:
                product = 1
                for factor in row.numbers.split("·"):
                    product *= int(factor)
                assert product == row.flops
                assert len(row.numbers.split("·")) == len(row.formula.split("·"))


# --- shapes ---


def test_worked_example_a_shapes_of_1300_tokens():
    rows = named(preset("postln-1300"), Workload("prefill", new=1300))
    assert rows["embed"].out_shape == (1, 1300, 12288)
    assert rows["layers.0.attn.scores"].in_shapes == ((1, 96, 1300, 128), (1, 96, 1300, 128))
    assert rows["layers.0.attn.scores"].out_shape == (1, 96, 1300, 1300)
    assert rows["layers.0.attn.mix"].out_shape == (1, 96, 1300, 128)
    assert rows["layers.0.attn.o"].in_shapes == ((1, 1300, 12288),)
    assert rows["layers.0.mlp.up"].out_shape == (1, 1300, 49152)
    assert rows["head"].in_shapes == ((1, 1, 12288),)
    assert rows["head"].out_shape == (1, 1, 1300)


def test_worked_example_b_shapes_of_one_gpt2_block():
    rows = named(preset("gpt2-block"), Workload("prefill", batch=1, new=8))
    for name in ("attn_norm", "mlp_norm", "attn.o", "mlp.down", "mlp_add", "attn_add"):
        assert rows[f"layers.0.{name}"].out_shape == (1, 8, 768), name
    assert sum(rows[f"layers.0.attn.{x}"].out_shape[-1] for x in "qkv") == 2304
    assert rows["layers.0.attn.scores"].in_shapes == ((1, 12, 8, 64), (1, 12, 8, 64))
    for name in ("scores", "masked", "probs"):
        assert rows[f"layers.0.attn.{name}"].out_shape == (1, 12, 8, 8)
    assert rows["layers.0.attn.mix"].out_shape == (1, 12, 8, 64)
    for name in ("up", "act"):
        assert rows[f"layers.0.mlp.{name}"].out_shape == (1, 8, 3072)


def test_worked_example_c_logits_of_every_token():
    rows = named(preset("triple-norm-512"), Workload("train", batch=2, new=10))
    assert rows["embed"].in_shapes == ((2, 10),)
    assert rows["head"].out_shape == (2, 10, 10000)


def test_steps_come_in_the_order_in_which_they_run():
    names = [row.name for row in ledger(preset("qwen3-0.6b")).ops(Workload())]
    assert names[:19] == ["embed"] + [
        f"layers.0.{step}"
        for step in (
            "attn_norm", "attn.q", "attn.k", "attn.v", "attn.q_norm", "attn.k_norm", "attn.q_rope",
            "attn.k_rope", "attn.scores", "attn.masked", "attn.probs", "attn.mix", "attn.o", "attn_add",
            "mlp_norm", "mlp.gate", "mlp.up", "mlp.act",
        )
    ]  # fmt: skip
    assert names[-2:] == ["final_norm", "head"]


# --- bytes ---


def test_a_decoded_token_reads_every_weight_but_the_input_table():
    spec = preset("llama-3-8b")
    book = ledger(spec)
    table, row = 128_256 * 4096 * 2, 4096 * 2
    totals = book.totals(Workload("decode", past=8191))
    assert totals.weight_bytes == book.weight_bytes - table + row
    assert totals.kv_read == 1_073_741_824
    assert totals.kv_written == 131_072
    assert book.bytes_per_token(8191) == totals.weight_bytes + totals.kv_read


def test_a_tied_table_is_read_as_the_head():
    book = ledger(preset("llama-3.2-1b"))
    assert book.totals(Workload("decode")).weight_bytes == book.weight_bytes + 2048 * 2


def test_a_batch_reads_the_weights_once_and_every_cache():
    book = ledger(preset("llama-3-8b"))
    one, eight = (book.totals(Workload("decode", batch=n, past=99)) for n in (1, 8))
    assert eight.kv_read == 8 * one.kv_read
    assert eight.weight_bytes - one.weight_bytes == 7 * 4096 * 2


def test_a_window_bounds_what_a_step_reads_of_the_cache():
    w = Workload("decode", past=99)
    whole, last = (ledger(one_layer(window=window)).totals(w).kv_read for window in (None, 10))
    assert (whole, last) == (100 * 2 * 4 * 8 * 2, 10 * 2 * 4 * 8 * 2)


def test_training_reads_no_cache():
    totals = ledger(one_layer()).totals(Workload("train", new=8))
    assert totals.kv_read == totals.kv_written == 0
    assert totals.kept_bytes > 0


def test_activations_take_the_workloads_dtype_and_weights_the_ledgers():
    row = named(one_layer(), Workload("prefill", new=4, dtype="fp32"), "q8_0")["layers.0.attn.q"]
    assert row.activation_bytes == 4 * 32 * 4
    assert row.weight_bytes == 24 * 32 // 32 * 34


def test_the_residual_stream_and_the_scores_are_fp32_in_a_bf16_model():
    rows = named(preset("qwen3-0.6b"), Workload("prefill", new=4), "bf16")
    layer = {name: row for name, row in rows.items() if not name.startswith("layers.") or ".0." in name}
    wide = {
        name.removeprefix("layers.0.")
        for name, row in layer.items()
        if row.activation_bytes == 4 * math.prod(row.out_shape)
    }
    assert wide == {
        "embed", "attn_norm", "attn.scores", "attn.masked", "attn.probs", "attn_add", "mlp_norm", "mlp_add",
        "final_norm",
    }  # fmt: skip
    assert {row.activation_bytes // math.prod(row.out_shape) for row in layer.values()} == {2, 4}


def test_folded_totals_equal_the_sum_over_all_steps():
    wide = replace(one_layer().layers[0], mlp=Mlp(96, "silu", gated=True))
    spec = one_layer().replace(layers=(*one_layer().layers, wide, *one_layer().layers))
    book, w = ledger(spec), Workload("train", batch=3, new=5)
    ops, totals = book.ops(w), book.totals(w)
    for field in ("flops", "weight_bytes", "activation_bytes", "kept_bytes", "kv_read", "kv_written"):
        assert getattr(totals, field) == sum(getattr(row, field) for row in ops), field


# --- what cannot be ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "training"}, "mode must be one of train, prefill, decode, found 'training'"),
        ({"attention": "flash"}, "attention must be one of causal, half, full"),
        ({"new": 0}, "new must be an integer of at least 1, found 0"),
        ({"batch": True}, "batch must be an integer"),
        ({"past": -1}, "past must be an integer of at least 0"),
        ({"mode": "train", "past": 5}, "past must be 0 in training"),
        ({"dtype": "q4_1"}, "dtype must be a plain one"),
    ],
)
def test_an_impossible_workload_is_refused_in_one_line(changes, message):
    with pytest.raises(LedgerError, match=message) as caught:
        Workload(**changes)
    assert "\n" not in str(caught.value)


def test_a_trillion_tokens_are_answered():
    flops = ledger(preset("gpt2")).totals(Workload("prefill", batch=10**12, new=10**12)).flops
    assert flops > 10**36
