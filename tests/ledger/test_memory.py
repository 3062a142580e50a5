"""Bytes of a workload, against published figures and arithmetic by hand."""

import pytest

from openbook.ledger import RECIPES, LedgerError, Workload, ledger
from openbook.spec.model import (
    Attention,
    Block,
    Chunk,
    Experts,
    Head,
    LatentAttention,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    Router,
)
from openbook.spec.presets import preset

MIB = 2**20


def sliding_model():
    """The cache of a gemma3-4b: 34 layers, 4 kv heads of 256, every sixth layer without a window."""

    def layer(window):
        return Block(Attention(8, 4, 256, 1.0, window=window), Mlp(64, "gelu_tanh", gated=True))

    layers = tuple(layer(None if (i + 1) % 6 == 0 else 1024) for i in range(34))
    return ModelSpec(1000, 2560, 131_072, layers, Head(tied=True), Norm("rms"))


# --- the cache ---


@pytest.mark.parametrize(
    ("name", "per_token"),
    [("llama-3-8b", 131_072), ("qwen2.5-7b", 57_344), ("qwen3-4b", 147_456), ("gpt2", 36_864)],
)
def test_a_token_takes_keys_and_values_of_the_kv_heads(name, per_token):
    assert ledger(preset(name)).kv_bytes_per_token("bf16") == per_token


def test_llama_3_caches_a_gibibyte_at_8192_tokens():
    assert ledger(preset("llama-3-8b")).kv_bytes(1, 8192) == 1_073_741_824


def test_windows_cap_the_cache_of_their_layers():
    book = ledger(sliding_model(), "fp16")
    assert book.kv_bytes(1, 131_072) == 2560 * MIB + 116 * MIB
    assert book.kv_bytes(1, 131_072, windows=False) == 17_408 * MIB
    assert book.kv_bytes(1, 1000) == book.kv_bytes(1, 1000, windows=False)


def test_a_q8_cache_takes_34_of_64_bytes():
    book = ledger(preset("llama-3-8b"))
    assert 64 * book.kv_bytes(2, 4096, "q8_0") == 34 * book.kv_bytes(2, 4096, "fp16")


def test_the_cache_of_quantised_weights_is_not_quantised():
    book = ledger(preset("smollm2-135m"), "q4_1")
    assert book.kv_bytes_per_token() == book.kv_bytes_per_token("fp32") == 46_080


@pytest.mark.parametrize("field", ["batch", "past", "dtype"])
def test_memory_grows_with_batch_length_and_precision(field):
    less, more = {"batch": (1, 2), "past": (100, 101), "dtype": ("bf16", "fp32")}[field]
    book = ledger(sliding_model())
    one, two = (book.memory(Workload("decode", **{field: value})).total for value in (less, more))
    assert one < two


def deepseek_v3_attention():
    norm = Norm("rms")
    attn = LatentAttention(128, 128, 64, 128, 512, norm, 1.0, 1536, norm, Rope(64))
    layers = (Block(attn, Mlp(18_432, "silu", gated=True)),) * 61
    return ModelSpec(129_280, 7168, 4096, layers, Head(tied=False), norm)


def test_latents_are_cached_once_and_priced_in_both_forms():
    book = ledger(deepseek_v3_attention())
    assert book.kv_bytes_per_token() == 61 * (512 + 64) * 2 == 70_272
    assert book.kv_bytes_per_token_expanded() == 61 * 128 * (192 + 128) * 2 == 4_997_120
    assert book.kv_bytes(3, 1000) == 3 * 1000 * 70_272
    (row,) = book.cache(3, 1000)
    assert (row.form, row.formula, row.token_bytes, row.cells) == ("latents", "(C+R)", 1152, 1000)
    assert row.expanded_bytes == 3 * 1000 * 4_997_120


def test_keys_and_values_are_expanded_already():
    book = ledger(preset("llama-3-8b"))
    assert book.kv_bytes_per_token_expanded() == book.kv_bytes_per_token()


def test_a_chunk_caps_the_cache_at_its_size():
    def layer(window):
        return Block(Attention(4, 2, 8, 1.0, window=window), Mlp(48, "silu", gated=True))

    spec = ModelSpec(100, 24, 64, (*[layer(Chunk(10))] * 3, layer(None)), Head(tied=True))
    assert ledger(spec).kv_bytes(2, 25) == 2 * (3 * 10 + 25) * 2 * 2 * 8 * 2


def test_the_cache_is_listed_by_what_layers_keep():
    rows = ledger(sliding_model(), "fp16").cache(1, 131_072)
    assert [(len(row.layers), row.window, row.cells, row.bytes) for row in rows] == [
        (29, 1024, 1024, 116 * MIB),
        (5, None, 131_072, 2560 * MIB),
    ]
    assert rows[1].layers == (5, 11, 17, 23, 29)


def test_layers_that_differ_in_rotation_alone_keep_the_same():
    def layer(base):
        return Block(Attention(4, 2, 8, 1.0, Rope(8, base)), Mlp(48, "silu", gated=True))

    book = ledger(ModelSpec(100, 24, 64, (layer(1e4), layer(1e6)), Head(tied=True)))
    assert [row.layers for row in book.cache()] == [(0, 1)]


# --- training ---


@pytest.mark.parametrize(
    ("recipe", "per_param", "gigabytes"),
    [
        ("adamw-fp32", 16, "128.48"),
        ("adamw-mixed", 16, "128.48"),
        ("adamw-mixed-fp32-grads", 18, "144.54"),
        ("adamw-mixed-both-grads", 20, "160.61"),
    ],
)
def test_adamw_keeps_16_to_20_bytes_for_each_parameter(recipe, per_param, gigabytes):
    book = ledger(preset("llama-3-8b"))
    memory = book.memory(Workload("train", new=1), recipe)
    assert memory.recipe is RECIPES[recipe]
    held = sum(memory[item] for item in ("weights", "gradients", "master_weights", "optimizer"))
    assert held == per_param * book.params.total == RECIPES[recipe].bytes_per_param * 8_030_261_248
    assert f"{held / 1e9:.2f}" == gigabytes


def test_a_tied_head_is_trained_once():
    book = ledger(preset("llama-3.2-1b"))
    assert book.memory(Workload("train", new=1))["optimizer"] == 8 * 1_235_814_400


def test_logits_can_outweigh_the_model():
    one = ledger(preset("llama-3-8b")).memory(Workload("train", new=4096))
    assert (one["logits"], one["logits_fp32"]) == (1_050_673_152, 2_101_346_304)
    book = ledger(preset("llama-3.2-1b"))
    memory = book.memory(Workload("train", batch=8, new=2048))
    assert (memory["logits"], memory["logits_fp32"]) == (4_202_692_608, 8_405_385_216)
    assert memory["logits"] + memory["logits_fp32"] > 5 * book.weight_bytes


def test_prefill_keeps_only_the_last_tokens_logits():
    memory = ledger(preset("llama-3-8b")).memory(Workload("prefill", batch=3, new=4096))
    assert memory["logits"] == 3 * 128_256 * 2


def test_explicit_attention_keeps_two_copies_of_every_probability():
    book = ledger(preset("gpt2"), "fp32")
    fused, explicit = (
        book.memory(Workload("train", batch=2, new=64, core=core))["activations"]
        for core in ("fused", "explicit")
    )
    probs = 12 * (2 * 12 * 64 * 64) * 4
    rows, result = 12 * (2 * 12 * 64) * 4, 0  # the fused sums of rows go; the merged copy replaces the result
    assert explicit - fused == 2 * probs - rows + result


def test_one_pre_norm_layer_keeps_what_one_counts_by_hand():
    # LayerNorm, MHA without positions, GELU, fp32, fused: x, 2 statistics, norm, q, k, v, sums of rows,
    # result; x, 2 statistics, norm, up, activated; then the final norm's x, statistics and output.
    norm = Norm("layer", bias=True)
    block = Block(Attention(4, 4, 8, 1.0), Mlp(96, "gelu", gated=False), attn_norm=norm, mlp_norm=norm)
    spec = ModelSpec(100, 24, 64, (block,), Head(tied=False), norm)
    tokens, d, hk, f = 2 * 5, 24, 32, 96
    attention = 2 * d + 2 + 4 * hk + 4
    mlp = 2 * d + 2 + 2 * f
    kept = ledger(spec, "fp32").totals(Workload("train", batch=2, new=5)).kept_bytes
    assert kept == tokens * (attention + mlp + 2 * d + 2) * 4


def test_a_bf16_layer_keeps_norms_in_fp32_and_a_copy_of_them_for_the_matrices():
    # RMSNorm, MHA without positions, GELU, fused. In fp32: x, root, quotient (twice), and the final norm's;
    # the sums of rows. In bf16: the copies that q and up read, q, k, v, result, up, activated; the head's.
    norm = Norm("rms")
    block = Block(Attention(4, 4, 8, 1.0), Mlp(96, "gelu", gated=False), attn_norm=norm, mlp_norm=norm)
    spec = ModelSpec(100, 24, 64, (block,), Head(tied=False), norm)
    d, hk, f = 24, 32, 96
    fp32 = 3 * (2 * d + 1) + 4
    bf16 = 3 * d + 4 * hk + 2 * f
    kept = ledger(spec, "bf16").totals(Workload("train", batch=2, new=5)).kept_bytes
    assert kept == 2 * 5 * (4 * fp32 + 2 * bf16)


def test_a_parallel_bf16_layer_copies_the_shared_norm_twice():
    def kept(dtype, residual):
        attn, mlp = Attention(4, 4, 8, 1.0), Mlp(96, "gelu", gated=False)
        layer = Block(attn, mlp, attn_norm=Norm("rms"), residual=residual)
        spec = ModelSpec(100, 24, 64, (layer,), Head(tied=False))
        return ledger(spec, dtype).totals(Workload("train", new=5)).kept_bytes

    # One tensor for both halves in fp32; in bf16 each half casts it for itself.
    assert kept("fp32", "serial") - kept("fp32", "parallel_shared") == 5 * 24 * 4
    assert kept("bf16", "serial") == kept("bf16", "parallel_shared")


def test_more_active_experts_keep_more():
    def kept(n_active):
        experts = Experts(8, n_active, Mlp(40, "silu", gated=True), Router("softmax", True))
        spec = ModelSpec(100, 24, 64, (Block(Attention(4, 4, 8, 1.0), experts),), Head(tied=False))
        return ledger(spec).memory(Workload("train", batch=2, new=16))["activations"]

    assert kept(2) < kept(4) < kept(8)


def test_generation_keeps_nothing_for_a_backward_pass():
    assert ledger(preset("gpt2")).totals(Workload("prefill", new=64)).kept_bytes == 0
    assert ledger(preset("gpt2")).memory(Workload("prefill", new=64)).recipe is None


def test_an_unknown_recipe_is_refused():
    book = ledger(preset("gpt2"))
    with pytest.raises(LedgerError, match="unknown training recipe 'sgd': use one of adamw-fp32"):
        book.memory(Workload("train", new=8), "sgd")
    with pytest.raises(LedgerError, match="no training recipe for q4_1 weights"):
        ledger(preset("gpt2"), "q4_1").memory(Workload("train", new=8))


def test_absurd_sizes_have_exact_bytes():
    n = 10**12
    assert ledger(preset("gpt2")).kv_bytes(n, n) == n * n * 36_864
