from typing import Any

import numpy as np
import pytest
import torch

from bounded import bounded_work
from openbook.spec.model import Attention, Block, Head, Mlp, ModelSpec, Norm
from openbook.spec.reader import UnsupportedError
from openbook.weights.dialects import (
    GGUF,
    HF,
    Chain,
    Dialect,
    Grouped,
    Identity,
    Interleaved,
    Place,
    Row,
    RowsPermuted,
    Transposed,
    places,
)

ALL = [
    (kind, family, table) for kind, tables in (("hf", HF), ("gguf", GGUF)) for family, table in tables.items()
]


def spec_of(heads: int = 8, kv_heads: int = 2, **attention: Any) -> ModelSpec:
    attn = Attention(heads, kv_heads, head_dim=8, scale=8**-0.5, **attention)
    block = Block(attn, Mlp(80, "silu", gated=True), attn_norm=Norm("rms"), mlp_norm=Norm("rms"))
    return ModelSpec(131, 48, 64, (block, block), Head(tied=False), final_norm=Norm("rms"))


LLAMA_SHAPES = {
    "embed.weight": (131, 48),
    "layers.1.attn.q.weight": (64, 48),
    "layers.1.attn.q.bias": (64,),
    "layers.1.attn.k.weight": (16, 48),
    "head.weight": (131, 48),
}

GPT2_SHAPES = {
    "positions.weight": (64, 48),
    "layers.0.attn.q.weight": (48, 48),
    "layers.0.attn.q.bias": (48,),
    "layers.0.attn.k.weight": (48, 48),
    "layers.0.attn.k.bias": (48,),
    "layers.0.attn.v.weight": (48, 48),
    "layers.0.attn.v.bias": (48,),
    "layers.0.mlp.up.weight": (80, 48),
}


def by_name(found: list[Place]) -> dict[str, Place]:
    return {place.stored: place for place in found}


def test_llama_keeps_the_eight_rows_of_a_head_as_0_4_1_5_2_6_3_7():
    rows = np.arange(8)
    assert RowsPermuted(1).store(rows).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert RowsPermuted(1).load(rows).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_each_head_is_permuted_within_itself():
    rows = np.arange(24).reshape(24, 1) * np.ones((1, 5), dtype=int)
    stored = RowsPermuted(3).store(rows)
    assert stored[8:16, 0].tolist() == [8, 12, 9, 13, 10, 14, 11, 15]
    assert stored.shape == (24, 5)


TRANSFORMS = [
    Identity(), Transposed(), RowsPermuted(8), RowsPermuted(2), Interleaved(), Grouped(4, 2), Grouped(6, 1),
    Chain((Interleaved(), Transposed())),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(64, 48), (64,)], ids=["matrix", "bias"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
@pytest.mark.parametrize("array", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_loading_undoes_storing(transform, shape, array):
    x = array(np.random.default_rng(0).normal(size=shape))
    stored = transform.store(x)
    assert tuple(stored.shape) == transform.stored_shape(shape)
    assert (transform.load(stored) == x).all()


@pytest.mark.parametrize("array", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("transform", [Transposed(), Interleaved(1), Chain((Interleaved(1), Transposed()))])
def test_loading_undoes_storing_of_all_experts_at_once(transform, array):
    x = array(np.random.default_rng(0).normal(size=(3, 10, 7)))
    stored = transform.store(x)
    assert tuple(stored.shape) == transform.stored_shape((3, 10, 7))
    assert (transform.load(stored) == x).all()


def test_interleaved_halves_lie_in_turns():
    assert Interleaved().store(np.array([10, 11, 12, 20, 21, 22])).tolist() == [10, 20, 11, 21, 12, 22]
    biases = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert Interleaved(1).store(biases).tolist() == [[1, 3, 2, 4], [5, 7, 6, 8]]


def test_gpt_oss_keeps_the_gate_in_the_even_columns_of_each_expert():
    joined = np.arange(2 * 4 * 3).reshape(2, 4, 3)  # experts, gate and up, width
    stored = Chain((Interleaved(1), Transposed())).store(joined)
    assert stored.shape == (2, 3, 4)
    np.testing.assert_array_equal(stored[1, :, ::2], joined[1, :2].T)
    np.testing.assert_array_equal(stored[1, :, 1::2], joined[1, 2:].T)


@pytest.mark.parametrize(
    ("grouped", "ours", "stored"),
    [
        (Grouped(2, 2), "q0 q1 k0 k1 v0 v1", "q0 k0 v0 q1 k1 v1"),
        (Grouped(4, 2), "q0 q1 q2 q3 k0 k1 v0 v1", "q0 q1 k0 v0 q2 q3 k1 v1"),
        (Grouped(3, 1), "q0 q1 q2 k0 v0", "q0 q1 q2 k0 v0"),
    ],
    ids=["one query head each", "two", "all"],
)
def test_grouped_heads_lie_with_their_key_and_value(grouped, ours, stored):
    rows = np.array([f"{head}.{row}" for head in ours.split() for row in range(5)])
    expected = [f"{head}.{row}" for head in stored.split() for row in range(5)]
    assert grouped.store(rows).tolist() == expected
    assert grouped.load(np.array(expected)).tolist() == rows.tolist()


def test_a_square_matrix_is_transposed_too():
    square = np.arange(9).reshape(3, 3)
    assert Transposed().load(square).tolist() == square.T.tolist()


def test_llama_gguf_permutes_q_by_query_heads_and_k_by_key_heads():
    found = by_name(places(spec_of(8, 2, q_bias=True), LLAMA_SHAPES, GGUF["llama"]))
    assert found["blk.1.attn_q.weight"].transform == RowsPermuted(8)
    assert found["blk.1.attn_q.bias"].transform == RowsPermuted(8)
    assert found["blk.1.attn_k.weight"].transform == RowsPermuted(2)


@pytest.mark.parametrize(("kind", "family"), [("gguf", "qwen2"), ("gguf", "qwen3"), ("hf", "llama")])
def test_other_dialects_do_not_permute(kind, family):
    table = {"gguf": GGUF, "hf": HF}[kind][family]
    assert all(place.transform == Identity() for place in places(spec_of(), LLAMA_SHAPES, table))


def test_hf_names_follow_the_table():
    found = places(spec_of(), LLAMA_SHAPES, HF["qwen3"])
    assert [place.stored for place in found] == [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.k_proj.weight",
        "lm_head.weight",
    ]


def test_gpt2_keeps_q_k_and_v_side_by_side_in_one_transposed_matrix():
    found = by_name(places(spec_of(6, 6), GPT2_SHAPES, HF["gpt2"]))
    c_attn = found["transformer.h.0.attn.c_attn.weight"]
    assert c_attn.shape == (48, 144)
    stored = np.arange(48 * 144).reshape(48, 144)
    parts = dict(c_attn.load(stored))
    assert list(parts) == [f"layers.0.attn.{x}.weight" for x in "qkv"]
    np.testing.assert_array_equal(parts["layers.0.attn.k.weight"], stored[:, 48:96].T)
    assert found["transformer.h.0.attn.c_attn.bias"].shape == (144,)
    assert found["transformer.h.0.mlp.c_fc.weight"].shape == (48, 80)
    assert found["transformer.wpe.weight"].shape == (64, 48)  # an embedding is not a Conv1D


def test_gpt2_gguf_is_fused_but_not_transposed():
    found = by_name(places(spec_of(6, 6), GPT2_SHAPES, GGUF["gpt2"]))
    assert found["blk.0.attn_qkv.weight"].shape == (144, 48)


# --- many tensors for one parameter, one tensor for many ----------------------------------------

EXPERTS = {
    "layers.1.mlp.router.weight": (3, 48),
    "layers.1.mlp.router.correction": (3,),
    "layers.1.mlp.experts.gate.weight": (3, 20, 48),
    "layers.1.mlp.experts.up.weight": (3, 20, 48),
    "layers.1.mlp.experts.gate.bias": (3, 20),
    "layers.1.mlp.experts.up.bias": (3, 20),
}
CORRECTION = Row("layers.{n}.mlp.router.correction", "{n}.correction_bias")
ROUTER = Row("layers.{n}.mlp.router", "{n}.gate")


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


def test_a_parameter_is_gathered_from_the_tensors_of_its_indices():
    rows = (
        ROUTER,
        CORRECTION,
        *(Row(f"layers.{{n}}.mlp.experts.{m}", f"{{n}}.{{i}}.{m}") for m in ("gate", "up")),
    )
    found = by_name(places(spec_of(), EXPERTS, Dialect("each", rows)))
    assert list(found)[:5] == [
        "1.gate.weight",
        "1.correction_bias",
        "1.0.gate.weight",
        "1.1.gate.weight",
        "1.2.gate.weight",
    ]
    place = found["1.2.gate.weight"]
    assert (place.index, place.shape) == (2, (20, 48))
    stored = numbers(place.shape)
    ((name, part),) = place.load(stored)
    assert name == "layers.1.mlp.experts.gate.weight"
    np.testing.assert_array_equal(part, stored)
    assert found["1.1.up.bias"].shape == (20,)


def test_an_experts_tensor_may_hold_two_of_our_parameters():
    pair = ("layers.{n}.mlp.experts.gate", "layers.{n}.mlp.experts.up")
    rows = (ROUTER, CORRECTION, Row(pair, "{n}.{i}.gate_up"))
    found = by_name(places(spec_of(), EXPERTS, Dialect("pairs", rows)))
    place = found["1.1.gate_up.weight"]
    assert place.shape == (40, 48)
    stored = numbers((40, 48))
    parts = dict(place.load(stored))
    np.testing.assert_array_equal(parts["layers.1.mlp.experts.up.weight"], stored[20:])


def test_all_experts_in_one_tensor_are_split_along_their_rows():
    weights = tuple(f"layers.{{n}}.mlp.experts.{m}.weight" for m in ("gate", "up"))
    biases = tuple(f"layers.{{n}}.mlp.experts.{m}.bias" for m in ("gate", "up"))
    transposed, interleaved = Chain((Interleaved(1), Transposed())), Interleaved(1)
    rows = (
        ROUTER, CORRECTION,
        Row(weights, "{n}.gate_up_proj", transposed, axis=1),
        Row(biases, "{n}.gate_up_proj_bias", interleaved, axis=1),
    )  # fmt: skip
    found = by_name(places(spec_of(), EXPERTS, Dialect("all", rows)))
    assert found["1.gate_up_proj"].shape == (3, 48, 40)
    assert found["1.gate_up_proj_bias"].shape == (3, 40)
    stored = numbers((3, 48, 40))
    parts = dict(found["1.gate_up_proj"].load(stored))
    np.testing.assert_array_equal(parts["layers.1.mlp.experts.up.weight"], stored[:, :, 1::2].swapaxes(1, 2))


def test_more_tensors_than_any_checkpoint_has_are_refused_before_they_are_listed():
    rows = (Row("layers.{n}.mlp.experts.up", "{n}.{i}.up"),)
    with bounded_work(2), pytest.raises(UnsupportedError, match="1,000,000,000,000 tensors"):
        places(spec_of(), {"layers.0.mlp.experts.up.weight": (10**12, 5, 7)}, Dialect("each", rows))


def test_layers_that_guess_further_tokens_are_ignored_as_a_whole():
    table = Dialect("drafts", (), drafts=r"(model\.layers\.\d+\.)eh_proj\.weight")
    names = ["model.layers.2.up.weight", "model.layers.20.up.weight", "model.layers.20.eh_proj.weight"]
    assert table.ignored_of(names) == set(names[1:])


def test_a_prefix_is_read_as_the_tables():
    table = Dialect("sees", (), prefixes=(("language_model.", ""), ("model.text.", "model.")))
    assert table.plain("language_model.lm_head.weight") == "lm_head.weight"
    assert table.plain("model.text.norm.weight") == "model.norm.weight"
    assert table.plain("vision.norm.weight") == "vision.norm.weight"


def test_a_mask_buffer_is_ignored_and_a_bias_is_not():
    for table, ignored, kept in (
        (HF["gpt2"], "transformer.h.11.attn.bias", "transformer.h.11.attn.c_attn.bias"),
        (HF["gpt2"], "h.0.attn.masked_bias", "h.0.attn.c_attn.weight"),
        (
            HF["llama"],
            "model.layers.3.self_attn.rotary_emb.inv_freq",
            "model.layers.3.self_attn.q_proj.weight",
        ),
        (GGUF["llama"], "rope_freqs.weight", "output.weight"),
    ):
        assert table.ignored_of([ignored, kept]) == {ignored}


def test_a_parameter_without_a_name_is_refused():
    with pytest.raises(UnsupportedError, match=r"llama .*layers\.0\.attn_out_norm\.weight"):
        places(spec_of(), {"layers.0.attn_out_norm.weight": (48,)}, HF["llama"])
    with pytest.raises(UnsupportedError, match="end_norm"):
        places(spec_of(), {"layers.0.end_norm.weight": (48,)}, GGUF["qwen3"])


def test_a_fused_tensor_with_a_part_missing_is_refused():
    shapes = {"layers.0.attn.q.bias": (48,), "layers.0.attn.v.bias": (48,)}
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attn\.k\.bias"):
        places(spec_of(6, 6), shapes, HF["gpt2"])


@pytest.mark.parametrize(("kind", "family", "table"), ALL, ids=[f"{k}-{f}" for k, f, _ in ALL])
def test_no_table_names_anything_twice(kind, family, table):
    for layout in (table, *table.also):
        modules = [module for row in layout.rows for module in row.modules]
        rows = [row for row in layout.rows if isinstance(row, Row)]
        stored = [row.theirs for row in rows if not any("_add_norm" in m for m in row.modules)]
        assert len(set(modules)) == len(modules)
        assert len(set(stored)) == len(stored)
