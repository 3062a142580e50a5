import numpy as np
import pytest
import torch

from openbook.spec.model import Attention, Block, Head, Learned, Mlp, ModelSpec, Norm
from openbook.spec.reader import UnsupportedError
from openbook.weights.dialects import GGUF, HF, Identity, Place, RowsPermuted, Transposed, places

ALL = [
    (kind, family, table) for kind, tables in (("hf", HF), ("gguf", GGUF)) for family, table in tables.items()
]


def spec_of(heads: int = 8, kv_heads: int = 2, **attention: bool) -> ModelSpec:
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


@pytest.mark.parametrize("shape", [(64, 48), (64,)], ids=["matrix", "bias"])
@pytest.mark.parametrize("transform", [Identity(), Transposed(), RowsPermuted(8), RowsPermuted(2)], ids=repr)
@pytest.mark.parametrize("array", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_loading_undoes_storing(transform, shape, array):
    x = array(np.random.default_rng(0).normal(size=shape))
    stored = transform.store(x)
    assert tuple(stored.shape) == transform.stored_shape(shape)
    assert (transform.load(stored) == x).all()


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


def test_a_mask_buffer_is_ignored_and_a_bias_is_not():
    assert HF["gpt2"].ignores("transformer.h.11.attn.bias")
    assert HF["gpt2"].ignores("h.0.attn.masked_bias")
    assert not HF["gpt2"].ignores("transformer.h.11.attn.c_attn.bias")
    assert HF["llama"].ignores("model.layers.3.self_attn.rotary_emb.inv_freq")
    assert not HF["llama"].ignores("model.layers.3.self_attn.q_proj.weight")
    assert GGUF["llama"].ignores("rope_freqs.weight")
    assert not GGUF["llama"].ignores("output.weight")


def test_a_parameter_without_a_name_is_refused():
    with pytest.raises(UnsupportedError, match=r"llama .*layers\.0\.attn_out_norm\.weight"):
        places(spec_of(), {"layers.0.attn_out_norm.weight": (48,)}, HF["llama"])
    with pytest.raises(UnsupportedError, match="positions"):
        places(spec_of().replace(positions=Learned(64)), {"positions.weight": (64, 48)}, GGUF["qwen3"])


def test_a_fused_tensor_with_a_part_missing_is_refused():
    shapes = {"layers.0.attn.q.bias": (48,), "layers.0.attn.v.bias": (48,)}
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attn\.k\.bias"):
        places(spec_of(6, 6), shapes, HF["gpt2"])


@pytest.mark.parametrize(("kind", "family", "table"), ALL, ids=[f"{k}-{f}" for k, f, _ in ALL])
def test_no_table_names_anything_twice(kind, family, table):
    modules = [module for row in table.rows for module in row.modules]
    stored = [row.theirs for row in table.rows]
    assert len(set(modules)) == len(modules)
    assert len(set(stored)) == len(stored)
