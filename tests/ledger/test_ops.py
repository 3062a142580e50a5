"""FLOPs and bytes of steps, against published figures and arithmetic by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.ledger import LedgerError, Workload, ledger
from openbook.ledger.ops import experts_read, read_keys, visible_pairs
from openbook.spec.hf import from_config
from openbook.spec.model import (
    Alibi,
    Attention,
    Block,
    Chunk,
    Experts,
    Head,
    HeadNorm,
    LatentAttention,
    Mlp,
    ModelSpec,
    Norm,
    QueryTemperature,
    Rope,
    Router,
    Shared,
)
from openbook.spec.presets import preset

HERE = Path(__file__).parent
FLOPS = json.loads((HERE / "flops_cases.json").read_text())
CONFIGS = {
    case["name"]: case["config"] for case in json.loads((HERE / "parameter_cases.json").read_text())["cases"]
}


def named(spec, workload, dtype="bf16"):
    return {row.name: row for row in ledger(spec, dtype).ops(workload)}


def one_layer(n_heads=4, n_kv_heads=4, head_dim=8, window=None, tied=False):
    attn = Attention(n_heads, n_kv_heads, head_dim, 1.0, window=window)
    return ModelSpec(100, 24, 64, (Block(attn, Mlp(48, "relu", gated=False)),), Head(tied))


def mixture(n_experts=16, n_active=3, shared=None, tied=False):
    """One layer of width 24 with experts of width 10."""
    expert = Mlp(10, "silu", gated=True)
    experts = Experts(n_experts, n_active, expert, Router("softmax", True), shared)
    return ModelSpec(100, 24, 64, (Block(Attention(4, 2, 8, 1.0), experts),), Head(tied))


def latent(q_rank=14, window=None):
    """One layer of width 24 with 4 heads of 6 + 2, values of 5, from latents of 9."""
    norm = Norm("rms")
    attn = LatentAttention(4, 6, 2, 5, 9, norm, 1.0, q_rank, norm if q_rank else None, Rope(2), window=window)
    return ModelSpec(100, 24, 64, (Block(attn, Mlp(48, "relu", gated=False)),), Head(tied=False))


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


@pytest.mark.parametrize("case", FLOPS["cases"], ids=lambda case: case["model"])
def test_training_flops_per_token_equal_the_published_digits(case):
    # The published "causal" figures charge exactly half of the square, our "half", and leave routers out.
    book, tokens = ledger(from_config(CONFIGS[case["model"]])), case["seq"]
    for attention, column in (("half", "causal"), ("full", "full_square")):
        totals = book.totals(Workload("train", new=tokens, attention=attention))
        per_token = (totals.flops - totals.router_flops) / tokens
        assert f"{per_token / 1e9:.3f}" == f"{case[f'GFLOP_per_token_train_{column}']:.3f}"


def test_qwen3_30b_costs_six_flops_for_each_active_weight_that_multiplies():
    # The thread's figure takes 6 × all active weights, the norms too, which multiply no matrix.
    (case,) = (case for case in FLOPS["more"] if case["model"] == "Qwen3-30B-A3B")
    book, tokens = ledger(from_config(CONFIGS[case["model"]])), case["seq"]
    norms = sum(row.count for row in book.tensors if row.kind == "norm")
    totals = book.totals(Workload("train", new=tokens, attention="full"))
    assert totals.flops + 6 * norms * tokens == case["train_FLOPs_per_token"] * tokens


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


def sees(query, key, window):
    if key > query:
        return False
    if isinstance(window, Chunk):
        return key // window.size == query // window.size
    return window is None or key > query - window


windows = st.none() | st.integers(1, 40) | st.builds(Chunk, st.integers(1, 40))


@given(new=st.integers(1, 30), past=st.integers(0, 90), window=windows)
def test_visible_pairs_are_the_trues_of_the_mask(new, past, window):
    mask = [sees(q, k, window) for q in range(past, past + new) for k in range(past + new)]
    assert visible_pairs(new, past, window) == sum(mask)


@given(new=st.integers(1, 30), past=st.integers(0, 90), window=windows)
def test_read_keys_are_those_that_some_new_token_sees(new, past, window):
    keys = [k for k in range(past + new) if any(sees(q, k, window) for q in range(past, past + new))]
    assert read_keys(new, past, window) == len(keys)


def test_a_window_caps_full_attention_too():
    w = Workload("prefill", new=32, attention="full")
    assert attention_flops(one_layer(window=8), w) == 4 * 4 * 8 * 32 * 8
    assert attention_flops(one_layer(window=99), w) == attention_flops(one_layer(), w)


@pytest.mark.parametrize("window", [None, 5, Chunk(6)])
def test_a_sequence_token_by_token_costs_what_it_costs_at_once(window):
    # With a cache nothing is computed twice, so generation costs as much as reading the same text.
    book = ledger(one_layer(window=window))
    at_once = book.totals(Workload("prefill", new=20, last_only=False)).flops
    assert sum(book.flops_per_token(position) for position in range(20)) == at_once


def test_a_chunk_is_charged_its_triangle_and_in_full_its_square():
    causal, full = (Workload("prefill", new=24, attention=a) for a in ("causal", "full"))
    spec = one_layer(window=Chunk(8))
    assert attention_flops(spec, causal) == 4 * 4 * 8 * 3 * (8 * 9 // 2)
    assert attention_flops(spec, full) == 4 * 4 * 8 * 3 * 8 * 8


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


# --- experts ---


def test_a_token_is_charged_its_active_experts():
    flops = {name: row.flops for name, row in named(mixture(), Workload("prefill", 2, 5)).items()}
    assert flops["layers.0.mlp.router"] == 2 * 2 * 5 * 16 * 24
    for name in ("gate", "up", "down"):
        assert flops[f"layers.0.mlp.experts.{name}"] == 2 * 2 * 5 * 3 * 10 * 24


def test_more_experts_cost_a_token_only_their_logits():
    few, many = (ledger(mixture(n_experts=n)).totals(Workload("train", new=7)) for n in (16, 21))
    assert many.flops - few.flops == 3 * 7 * 2 * 24 * 5 == many.router_flops - few.router_flops
    one = ledger(mixture(n_active=1)).totals(Workload("train", new=7))
    assert few.flops - one.flops == 3 * 7 * 2 * (3 * 24 * 10) * 2


def test_a_shared_expert_is_charged_for_every_token_with_its_gate():
    shared = Shared(Mlp(13, "silu", gated=True), gated=True)
    plain, more = (ledger(spec).flops_per_token() for spec in (mixture(), mixture(shared=shared)))
    assert more - plain == 2 * (3 * 24 * 13) + 2 * 24


def test_a_step_reads_at_most_all_experts():
    size = 3 * 24 * 10
    routed = [
        sum(r.weight_bytes for n, r in named(mixture(), w).items() if "mlp.experts." in n)
        for w in (Workload("decode"), Workload("decode", batch=4), Workload("prefill", new=40))
    ]
    assert routed == [3 * size * 2, 12 * size * 2, 16 * size * 2]


def test_experts_read_bound_what_uniform_routing_expects():
    for tokens in (1, 2, 8, 100):
        expected = 128 * (1 - (1 - 8 / 128) ** tokens)
        assert expected <= experts_read(128, 8, tokens) + 1e-9 <= 128 + 1e-9
    assert experts_read(128, 8, 1) == 8


def test_the_router_and_the_reading_of_experts_are_named_beside_the_total():
    said = ledger(mixture()).conventions(Workload("prefill", new=5))
    assert f"routers in ({5 * 2 * 16 * 24:,})" in said
    assert "at most min(E, B·T·A) experts' weights are read" in said
    assert not any("router" in words for words in ledger(one_layer()).conventions(Workload()))


# --- packed documents ---


@pytest.mark.parametrize(
    "spec", [one_layer(window=5), one_layer(window=Chunk(4)), mixture(), latent(window=6)]
)
def test_packed_documents_cost_what_they_cost_alone(spec):
    book = ledger(spec)
    alone = [book.totals(Workload("train", new=n)).flops for n in (11, 1, 7)]
    packed = Workload("train", batch=2, new=19, documents=(11, 1, 7))
    assert book.totals(packed).flops == 2 * sum(alone) < book.totals(Workload("train", batch=2, new=19)).flops
    assert "documents do not see each other" in book.conventions(packed)


def test_the_pairs_of_packed_documents_by_hand():
    w = Workload("prefill", new=5, documents=(3, 2))
    assert named(one_layer(4, 4, 8), w)["layers.0.attn.scores"].flops == 2 * 4 * 8 * (6 + 3)


@pytest.mark.parametrize(
    "wrong", [{"documents": (3, 1)}, {"documents": (5, 0)}, {"documents": (6, -1)}, {"documents": ()},
              {"documents": (2.0, 3)}, {"documents": (3, 2), "past": 4}]
)  # fmt: skip
def test_documents_that_are_not_the_new_tokens_are_refused(wrong):
    with pytest.raises(LedgerError, match="workload documents must be positive integers whose sum is new"):
        Workload("prefill", new=5, **wrong)


# --- latent attention ---


def test_expanded_latents_cost_the_expansion_of_every_key():
    w = Workload("prefill", batch=2, new=7)
    flops = {name.removeprefix("layers.0."): row.flops for name, row in named(latent(), w).items()}
    pairs = 7 * 8 // 2
    assert {name: count for name, count in flops.items() if name.startswith("attn.") and count} == {
        "attn.q_down": 2 * 2 * 7 * 24 * 14,
        "attn.q_up": 2 * 2 * 7 * 14 * 4 * 8,
        "attn.kv_down": 2 * 2 * 7 * 24 * 11,
        "attn.kv_up": 2 * 2 * 7 * 9 * 4 * 11,
        "attn.scores": 2 * 2 * 4 * pairs * 8,
        "attn.mix": 2 * 2 * 4 * pairs * 5,
        "attn.o": 2 * 2 * 7 * 4 * 5 * 24,
    }


def test_absorbed_latents_cost_two_products_a_head_and_wider_scores():
    w = Workload("decode", batch=2, past=30)
    flops = {name.removeprefix("layers.0."): row.flops for name, row in named(latent(), w).items()}
    assert "attn.kv_up" not in flops
    assert flops["attn.q_absorb"] == 2 * 2 * 4 * 6 * 9
    assert flops["attn.v_absorb"] == 2 * 2 * 4 * 5 * 9
    assert flops["attn.scores"] == 2 * 2 * 4 * 31 * 11
    assert flops["attn.mix"] == 2 * 2 * 4 * 31 * 9


def test_a_chunk_after_cached_latents_expands_them_all():
    (layer,) = latent().layers
    assert isinstance(layer.attn, LatentAttention)
    assert layer.attn.absorbs(13, 30)
    assert not layer.attn.absorbs(15, 30)
    rows = named(latent(), Workload("prefill", new=15, past=30))
    assert rows["layers.0.attn.kv_up"].flops == 2 * 45 * 9 * 4 * 11
    assert rows["layers.0.attn.kv_up"].out_shape == (1, 45, 44)


def test_latents_without_a_query_rank_have_one_query_matrix():
    rows = named(latent(q_rank=None), Workload("prefill", new=7))
    assert rows["layers.0.attn.q"].flops == 2 * 7 * 24 * 4 * 8
    assert not {"layers.0.attn.q_down", "layers.0.attn.q_norm", "layers.0.attn.q_up"} & set(rows)


@pytest.mark.parametrize("new", [1, 15])
def test_each_latent_is_read_and_written_once_however_it_is_used(new):
    totals = ledger(latent()).totals(Workload("prefill", batch=2, new=new, past=30))
    assert totals.kv_read == 2 * (30 + new) * (9 + 2) * 2
    assert totals.kv_written == 2 * new * (9 + 2) * 2


def test_the_expansion_reads_kv_up_whole_however_it_is_used():
    expanded, absorbed = Workload("prefill", new=15, past=30), Workload("decode", past=30)
    for w in (expanded, absorbed):
        read = {n: r.weight_bytes for n, r in named(latent(), w).items() if "kv_up" in n or "absorb" in n}
        assert sum(read.values()) == 4 * (6 + 5) * 9 * 2
        assert len(read) == (1 if w is expanded else 2)


@pytest.mark.parametrize(("w", "said"), [(Workload("decode", past=30), "absorbed"), (Workload(), "expanded")])
def test_the_form_of_latent_attention_is_named_beside_the_total(w, said):
    assert any(said in words for words in ledger(latent()).conventions(w))


def test_generation_absorbs_however_much_is_written():
    # Side by side so many tokens would expand the latents; one after the other none does.
    book = ledger(latent())
    one_by_one = sum(book.flops_per_token(position) for position in range(10, 10 + 99))
    assert book.generation_flops(10, 100) == book.totals(Workload("prefill", new=10)).flops + one_by_one


def test_either_form_of_latents_may_be_priced():
    book = ledger(latent())
    cheaper, absorbed, expanded = (
        book.totals(Workload("prefill", new=20, past=30, latents=form)).flops
        for form in ("cheaper", "absorbed", "expanded")
    )
    assert cheaper == expanded != absorbed
    # kv_up for all 50, and heads of 8 and 5; or queries and results through it, and heads of 11 and 9.
    pairs = 20 * 30 + 20 * 21 // 2
    assert expanded - absorbed == 2 * 4 * (50 * 11 * 9 - 20 * 11 * 9 + pairs * (8 + 5 - 11 - 9))


def test_half_and_full_hold_for_latents_too():
    half, full = (
        attention_flops(latent(), Workload("prefill", new=8, attention=a)) for a in ("half", "full")
    )
    assert 2 * half == full == 2 * 4 * 8 * 8 * (8 + 5)


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


def test_every_step_of_a_layer_that_has_everything_comes_in_order():
    norm, early, late = Norm("rms"), HeadNorm("rms"), HeadNorm("rms", after_rope=True)
    attn = Attention(
        4, 2, 8, 1.0, Rope(8), q_norm=early, k_norm=late, temperature=QueryTemperature(0.1, 16), sinks=True
    )
    shared = Shared(Mlp(13, "silu", gated=True), gated=True)
    experts = Experts(16, 3, Mlp(10, "silu", gated=True), Router("softmax", True), shared)
    places = ("attn_norm", "attn_out_norm", "attn_add_norm", "mlp_norm", "mlp_out_norm", "mlp_add_norm")
    layer = Block(attn, experts, end_norm=norm, **dict.fromkeys(places, norm))
    spec = ModelSpec(100, 24, 64, (layer,), Head(tied=True), norm, embed_norm=norm, embed_scale=2.0)
    names = [row.name.removeprefix("layers.0.") for row in ledger(spec).ops(Workload())]
    assert names == [
        "embed", "embed_norm", "attn_norm", "attn.q", "attn.k", "attn.v", "attn.q_norm", "attn.q_rope",
        "attn.k_rope", "attn.k_norm", "attn.temperature", "attn.scores", "attn.masked", "attn.probs",
        "attn.mix", "attn.o", "attn_out_norm", "attn_add", "attn_add_norm", "mlp_norm", "mlp.router",
        "mlp.chosen", "mlp.experts.gate", "mlp.experts.up", "mlp.experts.act", "mlp.experts.down",
        "mlp.experts.sum", "mlp.shared.gate", "mlp.shared.up", "mlp.shared.act", "mlp.shared.down",
        "mlp.shared_gate", "mlp.shared_add", "mlp_out_norm", "mlp_add", "mlp_add_norm", "end_norm",
        "final_norm", "head",
    ]  # fmt: skip


@pytest.mark.parametrize("past", [0, 30])
def test_every_step_of_latent_attention_comes_in_order(past):
    names = [row.name for row in ledger(latent()).ops(Workload("decode", past=past))]
    attended = ["scores", "masked", "probs", "mix"]
    latents = ["q_down", "q_norm", "q_up", "kv_down", "kv_norm"]
    expanded = [*latents, "kv_up", "q_rope", "k_rope", *attended, "o"]
    absorbed = [*latents, "q_rope", "k_rope", "q_absorb", *attended, "v_absorb", "o"]
    steps = absorbed if past else expanded
    assert [n for n in names if ".attn." in n] == [f"layers.0.attn.{step}" for step in steps]


def test_multipliers_caps_and_biases_by_distance_cost_nothing():
    plain = one_layer()
    attn = Attention(
        4, 4, 8, 1.0, softcap=5.0, alibi=Alibi((0.5, 0.25, 0.125, 0.1)), sinks=True, clip_qkv=3.0
    )
    layer = Block(attn, Mlp(48, "relu", gated=False), residual_scale=0.5)
    loaded = plain.replace(
        layers=(layer,),
        head=Head(tied=False, scale=0.5, softcap=9.0),
        embed_scale=2.0,
        embed_norm=Norm("rms"),
    )
    w = Workload("train", batch=2, new=9)
    assert ledger(loaded).totals(w).flops == ledger(plain).totals(w).flops


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
        ({"mode": "train", "latents": "absorbed"}, "latents must be expanded in training"),
        ({"latents": "wide"}, "latents must be one of cheaper, absorbed, expanded, found 'wide'"),
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
