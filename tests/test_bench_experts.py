"""The benchmark of experts: what it measures, against what, and the arithmetic of its limit."""

import pytest
import torch

from openbook.bench import Machine
from openbook.bench_experts import Side, bench_experts, limit, one_layer, our_ways, random_choice
from openbook.model import Decoder, init_weights
from openbook.model.experts import looped
from openbook.native import native_experts
from openbook.spec.hf import from_config
from openbook.spec.model import Experts, Mlp, Router, SpecError

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "moe_intermediate_size": 40, "num_experts": 10, "num_experts_per_tok": 3, "norm_topk_prob": True,
    "max_position_embeddings": 128, "mlp_only_layers": [0],
}  # fmt: skip


def test_every_way_is_timed_beside_transformers_with_the_same_result():
    results = bench_experts(from_config(CONFIG), ["fp32"], tokens=(1, 70), repetitions=2, against_hf=True)
    theirs = [Side("transformers", way) for way in ("eager", "grouped_mm", "batched_mm")]
    ours = [Side("openbook", way) for way in ("default", "looped", "gathered", "grouped")]
    found = {n: [r.side for r in results if r.tokens == n] for n in (1, 70)}
    assert found[1] == ours + theirs
    assert found[70] == [side for side in ours + theirs if side.way not in ("gathered", "batched_mm")]
    assert all(result.error < 1e-5 and result.ratio > 0 and len(result.samples) == 2 for result in results)
    assert all(result.ratio == 1 for result in results if result.side.way == "eager")


def test_without_transformers_nothing_is_compared():
    (result, *_) = bench_experts(from_config(CONFIG), ["bf16"], tokens=(2,), repetitions=1)
    assert (result.side, result.ratio, result.error) == (Side("openbook", "default"), None, None)


def test_the_layer_is_the_first_that_has_experts():
    layer = one_layer(from_config(CONFIG))
    assert layer.n_layers == 1
    assert layer.layers[0].mlp.n_experts == 10
    assert layer.vocab_size == 64
    with pytest.raises(SpecError, match="has no experts"):
        one_layer(from_config({**CONFIG, "mlp_only_layers": [0, 1, 2]}))


def test_tokens_choose_different_experts_with_weights_that_add_up_to_1():
    experts = Experts(10, 4, Mlp(8, "silu", gated=True), Router("softmax", True))
    weights, chosen = random_choice(experts, 50, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == 4 for row in chosen[0].tolist())
    assert chosen.unique().numel() == 10
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 50))


def test_few_tokens_are_bound_by_reading_and_many_by_products():
    """4 of 16 experts of 3 · 1000 · 500 numbers, at 2e9 bytes and 1e12 FLOPs a second."""
    experts = Experts(16, 4, Mlp(500, "silu", gated=True), Router("softmax", True))
    machine = Machine(2e9, {"fp32": 1e12, "bf16": 1e12}, 1)
    numbers = 1_500_000
    assert limit(experts, 1000, 1, "fp32", machine) == pytest.approx(4 * numbers * 4 / 2e9)
    assert limit(experts, 1000, 1, "bf16", machine) == pytest.approx(4 * numbers * 2 / 2e9)
    assert limit(experts, 1000, 2, "fp32", machine) == pytest.approx(7 * numbers * 4 / 2e9)
    assert limit(experts, 1000, 100_000, "fp32", machine) == pytest.approx(2 * 400_000 * numbers / 1e12)


def test_the_default_is_what_a_loaded_model_takes():
    decoder = init_weights(Decoder(one_layer(from_config(CONFIG))))
    feed = decoder.layers[0].mlp.experts
    sides = our_ways(decoder)
    x, choice = torch.randn(1, 2, 64), random_choice(decoder.spec.layers[0].mlp, 2, torch.Generator())
    sides[Side("openbook", "default")](x, choice)
    assert feed.way in (native_experts, None)  # None: no compiler here
    sides[Side("openbook", "looped")](x, choice)
    assert feed.way is looped
