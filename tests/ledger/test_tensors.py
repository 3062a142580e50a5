"""Counts of parameters, against published totals and arithmetic by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bounded import bounded_work
from openbook.ledger import LedgerError, Workload, ledger
from openbook.ledger.tensors import dtype_name, nbytes
from openbook.spec.hf import from_config
from openbook.spec.model import (
    Attention,
    Block,
    Experts,
    Head,
    HeadNorm,
    LatentAttention,
    Learned,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    Router,
    Shared,
)
from openbook.spec.presets import preset

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "parameter_cases.json").read_text())["cases"]
}

T0 = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def rows(spec):
    return {row.name: row for row in ledger(spec).tensors}


def block(**changes):
    norm = Norm("rms")
    plain = Block(
        Attention(4, 2, 8, 8**-0.5, Rope(8)), Mlp(48, "silu", gated=True), attn_norm=norm, mlp_norm=norm
    )
    return replace(plain, **changes)


def spec_of(*layers, **changes):
    return ModelSpec(100, 24, 64, layers or (block(),), Head(tied=False), Norm("rms")).replace(**changes)


# --- published counts ---


def published(case):
    """The case's model. Its config is a real one's, but for what is put right here."""
    config = {key: value for key, value in case["config"].items() if key not in NOT_IN_A_CONFIG}
    return from_config(config | CORRECTED.get(case["name"], {}))


NOT_IN_A_CONFIG = ("embedding_layernorm", "position")  # what the cases add to BLOOM's, to explain it
CORRECTED = {
    # The paper prints 24 heads for a width of 2048, which they do not divide; no count depends on it.
    "GPT-3 XL": {"n_head": 16},
    # Left out of the case, since latents have no such heads; its absence would mean DeepSeek-V3's 128.
    "Kimi-K2": {"num_key_value_heads": 64},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_counts_equal_the_published_ones(case):
    book = ledger(published(case))
    params = book.params
    assert params.total == case["total_params"]
    assert params.active == case.get("active_params", case["total_params"])
    assert book.kv_bytes_per_token("bf16") == case["kv_bytes_per_token_bf16"]
    if "active_excl_input_embedding" in case:
        assert params.active_excl_input_embedding == case["active_excl_input_embedding"]
    if "non_embedding_params" in case:
        assert params.non_embedding == case["non_embedding_params"]


def test_deepseek_v3_has_14848_corrections_that_hugging_face_keeps_as_buffers():
    params = ledger(published(CASES["DeepSeek-V3 (main model, without MTP)"])).params
    assert (params.total, params.total - params.without_corrections) == (671_026_419_200, 14_848)


def test_a_file_that_stores_the_tied_head_again_holds_the_state_dict_count():
    case = CASES["Qwen3-0.6B"]
    assert ledger(from_config(case["config"])).params.state_dict == case["file_total"] == 751_632_384


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("gpt2", 124_439_808), ("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920), ("qwen3-4b", 4_022_468_096), ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824), ("llama-3-8b", 8_030_261_248), ("llama-2-7b", 6_738_415_616),
        ("tinyllama-1.1b", 1_100_048_384), ("smollm2-135m", 134_515_008), ("gpt3-175b", 174_604_259_328),
    ],
)  # fmt: skip
def test_presets_have_the_published_totals(name, total):
    assert ledger(preset(name)).params.total == total


def test_head_dim_is_not_width_over_heads():
    nemo = {
        "model_type": "mistral", "hidden_size": 5120, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 40, "intermediate_size": 14336, "vocab_size": 131072,
        "tie_word_embeddings": False,
    }  # fmt: skip
    assert ledger(from_config(nemo)).params.total == 12_247_782_400
    named = rows(from_config(nemo))
    assert named["layers.0.attn.q.weight"].shape == (4096, 5120)
    assert named["layers.0.attn.o.weight"].shape == (5120, 4096)


def test_heads_may_be_wider_together_than_the_model():
    config = T0 | {"hidden_size": 640, "head_dim": 256, "num_key_value_heads": 1}
    named = rows(from_config(config))
    assert [named[f"layers.0.attn.{x}.weight"].shape for x in "qkvo"] == [
        (1024, 640), (256, 640), (256, 640), (640, 1024),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({"head_dim": 32}, 111_424),
        ({"head_dim": None}, 86_848),
        ({}, 86_848),
        ({"head_dim": 32, "num_key_value_heads": None}, 127_808),
        ({"head_dim": 32, "tie_word_embeddings": True}, 105_024),
        ({"head_dim": 16, "attention_bias": True}, 87_232),
        ({"head_dim": 16, "attention_bias": True, "mlp_bias": True}, 87_872),
        ({"model_type": "qwen2"}, 87_104),
    ],
)
def test_tiny_configs_count_every_bias_and_norm(changes, total):
    config = {key: value for key, value in (T0 | changes).items() if value is not None}
    assert ledger(from_config(config)).params.total == total


TINY_MOE = T0 | {
    "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "dense", "sparse"),
    [
        ({}, 0, 2),
        ({"mlp_only_layers": [0]}, 1, 1),
        ({"decoder_sparse_step": 2}, 1, 1),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 2, 0),
    ],
)
def test_a_tiny_mixture_counts_its_dense_layers_and_its_sparse_ones(changes, dense, sparse):
    params = ledger(from_config(TINY_MOE | changes)).params
    experts, active, mlp = 8 * 64 + 8 * 3 * 64 * 32, 8 * 64 + 2 * 3 * 64 * 32, 3 * 64 * 128
    assert params.total == 137_088 + dense * (mlp - experts)
    assert params.active == 63_360 + dense * (mlp - active)
    assert dense + sparse == 2


def test_a_mixtures_weights_take_the_memory_of_all_experts():
    book = ledger(published(CASES["Mixtral-8x7B-v0.1"]))
    assert book.weight_bytes == 2 * book.params.total == 93_405_585_408
    assert book.memory(Workload("decode"))["weights"] == 93_405_585_408


def test_untying_the_head_adds_one_table():
    tied = preset("qwen2.5-0.5b")
    assert ledger(tied.replace(head=Head(tied=False))).params.total == 630_167_424


def test_padding_the_vocabulary_adds_rows():
    assert ledger(preset("gpt2").replace(vocab_size=50_304)).params.total == 124_475_904


def test_layer_norms_would_add_a_bias_each_to_llama():
    llama = preset("llama-2-7b")
    norm = Norm("layer", bias=True)
    wrong = replace(llama.layers[0], attn_norm=norm, mlp_norm=norm)
    book = ledger(llama.replace(layers=(wrong,) * 32, final_norm=norm))
    assert book.params.total == 6_738_681_856
    assert book.params.total - ledger(llama).params.total == 2 * 32 * 4096 + 4096


# --- the words ---


def test_gpt2_has_four_parameter_counts_each_with_its_definition():
    params = ledger(preset("gpt2")).params
    assert params.total == 124_439_808
    assert params.without_positions == 123_653_376
    assert params.non_embedding == 85_056_000
    assert params.block_matrices == 84_934_656
    assert params.state_dict == 163_037_184
    assert set(params.definitions) == {field for field in dir(params) if field in params.__slots__}


def test_a_tied_models_state_dict_is_not_its_size():
    # llama2.c's "15M" model, whose 24 million numbers in the state dict were taken for its parameters.
    stories = {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 288, "intermediate_size": 768,
        "num_hidden_layers": 6, "num_attention_heads": 6, "tie_word_embeddings": True,
    }  # fmt: skip
    params = ledger(from_config(stories)).params
    assert (params.total, params.state_dict) == (15_191_712, 24_407_712)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "qwen3-0.6b", "triple-norm-512"])
def test_embedding_and_non_embedding_make_the_total(name):
    params = ledger(preset(name)).params
    assert params.embedding + params.non_embedding == params.total


def test_an_untied_input_table_is_not_active_in_a_product():
    params = ledger(preset("llama-3-8b")).params
    assert params.active - params.active_excl_input_embedding == 128_256 * 4096
    tied = ledger(preset("llama-3.2-1b")).params
    assert tied.active == tied.active_excl_input_embedding


def test_a_tied_heads_bias_still_counts():
    with_bias = spec_of(head=Head(tied=True, bias=True))
    without = spec_of(head=Head(tied=True))
    assert ledger(with_bias).params.total - ledger(without).params.total == 100
    assert rows(with_bias)["head.weight"].tie == "embed.weight"
    assert rows(with_bias)["head.bias"].tie is None


# --- experts and latents ---


def experts(**changes):
    mlp = Mlp(10, "silu", gated=True, up_bias=True, down_bias=True)
    router = Router("sigmoid", True, bias=True, correction=True)
    return replace(Experts(16, 3, mlp, router, Shared(Mlp(13, "silu", gated=True), gated=True)), **changes)


def test_experts_are_stacked_and_the_router_has_a_row_for_each():
    named = {
        name.removeprefix("layers.0."): row.shape for name, row in rows(spec_of(block(mlp=experts()))).items()
    }
    assert {name: shape for name, shape in named.items() if name.startswith("mlp.")} == {
        "mlp.router.weight": (16, 24),
        "mlp.router.bias": (16,),
        "mlp.router.correction": (16,),
        "mlp.experts.gate.weight": (16, 10, 24),
        "mlp.experts.gate.bias": (16, 10),
        "mlp.experts.up.weight": (16, 10, 24),
        "mlp.experts.up.bias": (16, 10),
        "mlp.experts.down.weight": (16, 24, 10),
        "mlp.experts.down.bias": (16, 24),
        "mlp.shared.gate.weight": (13, 24),
        "mlp.shared.up.weight": (13, 24),
        "mlp.shared.down.weight": (24, 13),
        "mlp.shared_gate.weight": (1, 24),
    }


def test_a_token_uses_its_experts_and_everything_else():
    book = ledger(spec_of(block(mlp=experts())))
    one_expert = 3 * 24 * 10 + 10 + 10 + 24
    assert book.params.total - book.params.active == 13 * one_expert
    embedding = 2 * 100 * 24
    assert book.params.active_excl_input_embedding == book.params.active - embedding // 2
    assert book.params.active_non_embedding == book.params.active - embedding


def test_without_experts_every_parameter_is_active():
    params = ledger(preset("gpt2")).params
    assert params.active == params.total
    assert params.active_non_embedding == params.non_embedding


def test_router_corrections_are_told_apart():
    book = ledger(spec_of(block(mlp=experts()), block(mlp=experts()), block()), "bf16")
    assert book.params.total - book.params.without_corrections == 2 * 16
    assert book.weight_bytes == 2 * book.params.without_corrections + 4 * 2 * 16  # they stay fp32


def test_sinks_and_corrections_are_no_weights_of_a_product():
    plain = spec_of(block(mlp=experts(router=Router("sigmoid", True))))
    more = spec_of(
        block(
            attn=replace(block().attn, sinks=True),
            mlp=experts(router=Router("sigmoid", True, correction=True)),
        )
    )
    assert ledger(more).params.total - ledger(plain).params.total == 4 + 16
    assert ledger(more).params.weights_only == ledger(plain).params.weights_only
    assert ledger(more).params.block_matrices == ledger(plain).params.block_matrices


@pytest.mark.parametrize(
    ("over", "q", "k"), [("head", (8,), (8,)), ("own", (4, 8), (2, 8)), ("width", (32,), (16,))]
)
def test_a_norm_of_queries_has_a_weight_of_what_it_norms(over, q, k):
    norm = HeadNorm("layer", bias=True, over=over)
    named = rows(spec_of(block(attn=replace(block().attn, q_norm=norm, k_norm=norm))))
    assert [named[f"layers.0.attn.{x}_norm.{y}"].shape for x in "qk" for y in ("weight", "bias")] == [
        q,
        q,
        k,
        k,
    ]


def test_latent_attention_has_two_matrices_down_and_two_up():
    norm = Norm("rms")
    attn = LatentAttention(4, 6, 2, 5, 9, norm, 1.0, 14, norm, Rope(2), down_bias=True, o_bias=True)
    named = {
        n.removeprefix("layers.0.attn."): (r.shape, r.formula)
        for n, r in rows(spec_of(block(attn=attn))).items()
    }
    assert {
        name: row for name, row in named.items() if not name.startswith(("layers", "embed", "head", "final"))
    } == {
        "q_down.weight": ((14, 24), "Q·D"),
        "q_down.bias": ((14,), "Q"),
        "q_norm.weight": ((14,), "Q"),
        "q_up.weight": ((32, 14), "H·(N+R)·Q"),
        "kv_down.weight": ((11, 24), "(C+R)·D"),
        "kv_down.bias": ((11,), "(C+R)"),
        "kv_norm.weight": ((9,), "C"),
        "kv_up.weight": ((44, 9), "H·(N+U)·C"),
        "o.weight": ((24, 20), "D·H·U"),
        "o.bias": ((24,), "D"),
    }


def test_positions_with_an_offset_have_rows_for_it():
    named = rows(spec_of(positions=Learned(64, offset=2), embed_norm=Norm("layer", bias=True)))
    assert named["positions.weight"].shape == (66, 24)
    assert named["embed_norm.bias"].shape == (24,)


# --- worked examples ---


def part(spec, name):
    return sum(row.count for row in ledger(spec).tensors if row.name.startswith(name))


def test_worked_example_a_the_gpt3_shape_with_a_toy_vocabulary():
    spec = preset("postln-1300")
    named = rows(spec)
    assert named["embed.weight"].count == 15_974_400
    assert named["embed.weight"].formula == "V·D"
    assert part(spec, "layers.0.attn.") == 603_979_776
    assert sum(r.count for r in named.values() if r.layer == 0 and r.kind == "norm") == 49_152
    assert part(spec, "layers.0.mlp.") == 1_207_959_552
    assert part(spec, "layers.0.") == part(spec, "layers.95.") == 1_811_988_480
    assert part(spec, "layers.") == 173_950_894_080
    assert part(spec, "head.") == 15_975_700
    assert part(spec, "positions") == 0
    assert ledger(spec).params.total == 173_982_844_180


def test_worked_example_a_with_learned_positions():
    spec = preset("postln-1300-learned")
    assert rows(spec)["positions.weight"].shape == (2048, 12288)
    assert part(spec, "positions.") == 25_165_824
    assert ledger(spec).params.total == 174_008_010_004


def test_worked_example_b_one_gpt2_block():
    spec = preset("gpt2-block")
    assert sum(part(spec, f"layers.0.attn.{x}.") for x in "qkv") == 1_771_776
    assert part(spec, "layers.0.attn.o.") == 590_592
    assert part(spec, "layers.0.attn.") == 2_362_368
    assert part(spec, "layers.0.mlp.") == 4_722_432
    assert part(spec, "layers.0.attn_norm.") + part(spec, "layers.0.mlp_norm.") == 3_072
    assert part(spec, "layers.") == 7_087_872


def test_worked_example_c_a_third_norm_at_the_end_of_every_block():
    spec = preset("triple-norm-512")
    assert part(spec, "layers.0.") == 3_153_408
    assert part(spec, "layers.") == 18_920_448
    assert part(spec, "embed.") == 5_120_000
    assert part(spec, "head.") == 5_130_000
    assert ledger(spec).params.total == 29_170_448


@pytest.mark.parametrize(("vocabulary", "total"), [(1300, 174_002_675_712), (50_257, 174_604_259_328)])
def test_the_full_gpt3_shape_at_two_vocabularies(vocabulary, total):
    assert ledger(preset("gpt3-175b").replace(vocab_size=vocabulary)).params.total == total


# --- rows ---


def test_a_row_reads_like_a_papers_appendix():
    row = rows(spec_of())["layers.0.attn.k.weight"]
    assert row.letters == ("G·K", "D")
    assert row.shape == (2 * 8, 24)
    assert row.formula == "G·K·D"
    assert (row.count, row.bytes, row.dtype, row.kind, row.layer, row.part) == (
        384, 768, "bf16", "matrix", 0, "attn",
    )  # fmt: skip


def test_formulas_give_the_counts():
    norm = Norm("rms")
    attn = LatentAttention(4, 6, 2, 5, 9, norm, 1.0, 14, norm)
    everything = block(attn=attn, mlp=experts())
    for layer in (block(attn=replace(block().attn, sinks=True)), everything):
        assert_formulas_give_counts(spec_of(layer, positions=Learned(64, offset=2)))


def assert_formulas_give_counts(spec):
    from openbook.ledger.tensors import block_numbers, evaluate, model_numbers

    numbers = model_numbers(spec) | block_numbers(spec.layers[0])
    for row in ledger(spec).tensors:
        assert evaluate(row.formula, numbers) == row.count, row.name


def test_every_layer_has_its_own_sizes():
    small = block(attn=Attention(2, 1, 4, 0.5), mlp=Mlp(20, "relu", gated=False))
    named = rows(spec_of(block(), small, block()))
    assert [named[f"layers.{i}.attn.q.weight"].shape for i in range(3)] == [(32, 24), (8, 24), (32, 24)]
    assert "layers.1.mlp.gate.weight" not in named
    assert [row.layer for row in named.values() if row.name.endswith("attn.o.weight")] == [0, 1, 2]


def test_folded_totals_equal_the_sum_over_all_rows():
    spec = spec_of(block(), block(mlp=Mlp(20, "relu", gated=False)), block(), head=Head(tied=True, bias=True))
    book = ledger(spec)
    assert book.params.total == sum(row.count for row in book.tensors if row.tie is None)
    assert book.weight_bytes == sum(row.bytes for row in book.tensors if row.tie is None)
    assert book.params.state_dict == sum(row.count for row in book.tensors)


def test_every_other_difference_makes_a_kind():
    narrow = block(attn=replace(block().attn, n_kv_heads=1))
    windowed = block(attn=replace(block().attn, window=5))
    latent = block(attn=LatentAttention(4, 6, 2, 5, 9, Norm("rms"), 1.0))
    wide = block(mlp=Mlp(20, "relu", gated=False))
    kinds = ledger(spec_of(block(), narrow, windowed, latent, wide, block())).kinds
    assert [layers for _, layers in kinds] == [(0, 5), (1,), (2,), (3,), (4,)]


def test_layers_that_differ_only_in_eps_share_their_rows():
    other = block(attn_norm=Norm("rms", eps=1e-3))
    book = ledger(spec_of(block(), other))
    assert len(book.kinds) == 2
    assert [section.layers for section in book.tensor_sections] == [None, (0, 1), None]


# --- dtypes ---


def test_bytes_of_llama_2_at_two_precisions():
    spec = preset("llama-2-7b")
    assert ledger(spec, "bf16").weight_bytes == 13_476_831_232
    assert ledger(spec, "fp32").weight_bytes == 26_953_662_464


def test_quantised_bytes_include_the_scales():
    assert nbytes(64, "q8_0") * 64 == nbytes(64, "fp16") * 34
    assert nbytes(33, "q8_0") == 68
    assert nbytes(256, "q4_k") == 144


def test_dtypes_answer_to_their_usual_names():
    assert [dtype_name(name) for name in ("torch.float32", "F16", "BFloat16", "Q4_1")] == [
        "fp32", "fp16", "bf16", "q4_1",
    ]  # fmt: skip
    with pytest.raises(LedgerError, match="unknown dtype 'fp3': use one of fp64, fp32"):
        ledger(spec_of(), "fp3")


# --- size ---


def test_a_trillion_experts_are_counted_exactly():
    huge = 10**12
    spec = spec_of(block(mlp=Experts(huge, 2, Mlp(huge, "relu", gated=False), Router("softmax", True))))
    with bounded_work(1):
        book = ledger(spec)
        assert book.params.total - book.params.active == (huge - 2) * 2 * 24 * huge
        assert book.totals(Workload("train", new=7)).router_flops == 6 * 7 * huge * 24
        assert book.memory(Workload("decode", batch=huge, past=huge)).total > huge**2


def test_absurd_sizes_are_answered_exactly():
    huge = 10**12
    attn = Attention(huge, huge, huge, 1.0)
    layer = Block(attn, Mlp(huge, "relu", gated=False))
    spec = ModelSpec(huge, huge, huge, (layer,) * 10_000, Head(tied=False))
    assert ledger(spec).params.total == 2 * huge**2 + 10_000 * (4 * huge**3 + 2 * huge**2)


def test_equal_blocks_built_apart_are_one_kind():
    wide = Mlp(20, "relu", gated=False)
    book = ledger(spec_of(block(), block(mlp=wide), block(), block(mlp=wide)))
    assert [layers for _, layers in book.kinds] == [(0, 2), (1, 3)]


def test_scales_of_their_own_make_no_layer_a_kind_of_its_own():
    layers = tuple(block(attn=replace(block().attn, scale=1 / (i + 1))) for i in range(4000))
    book = ledger(spec_of(*layers))
    with bounded_work(2):
        assert [len(layers) for _, layers in book.kinds] == [4000]
        assert book.totals(Workload("train", new=1024)).flops > 0


def test_ten_thousand_layers_cost_no_more_than_their_kinds():
    narrow, wide = block(), block(mlp=Mlp(20, "relu", gated=False))
    spec = spec_of(*(wide if i % 3 else narrow for i in range(10_000)))
    book = ledger(spec)
    with bounded_work(1):
        assert book.params.total > 0
        assert book.totals(Workload("train", new=1024)).flops > 0
        assert book.memory(Workload("decode", past=1024)).total > 0
