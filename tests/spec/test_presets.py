"""Published parameter counts, by an independent count from the spec's sizes."""

import dataclasses
import json
from pathlib import Path

import pytest

from openbook.ledger import ledger
from openbook.spec import Block, Head, Learned, Llama3Scaling, ModelSpec, Norm, Rope, Sinusoidal, SpecError
from openbook.spec.hf import from_config
from openbook.spec.model import BLOCK_NORMS
from openbook.spec.presets import PRESETS, NotFoundError, preset

CASES = json.loads((Path(__file__).parents[1] / "ledger" / "parameter_cases.json").read_text())


def count(spec: ModelSpec) -> int:
    """All parameters, a tied head once; hand arithmetic, apart from the ledger's."""
    d, v = spec.d_model, spec.vocab_size
    total = v * d + norm_size(spec.final_norm, d) + sum(block_size(block, d) for block in spec.layers)
    if isinstance(spec.positions, Learned):
        total += spec.positions.n_positions * d
    return total + (0 if spec.head.tied else v * d) + (v if spec.head.bias else 0)


def block_size(block: Block, d: int) -> int:
    attn, mlp = block.attn, block.mlp
    q, kv, f = attn.n_heads * attn.head_dim, attn.n_kv_heads * attn.head_dim, mlp.d_ff
    total = 2 * d * q + 2 * d * kv + (3 if mlp.gated else 2) * d * f
    total += q * attn.q_bias + kv * attn.k_bias + kv * attn.v_bias + d * attn.o_bias
    total += (2 if mlp.gated else 1) * f * mlp.up_bias + d * mlp.down_bias
    total += norm_size(attn.q_norm, attn.head_dim) + norm_size(attn.k_norm, attn.head_dim)
    return total + sum(norm_size(getattr(block, place), d) for place in BLOCK_NORMS)


def norm_size(norm: Norm | None, width: int) -> int:
    return width * (norm.weight + norm.bias) if norm else 0


def is_supported(case: dict) -> bool:
    return case["config"]["model_type"] in ("gpt2", "llama", "mistral", "qwen2", "qwen3")


SUPPORTED = [case for case in CASES["cases"] if is_supported(case)]
GPT3_XL = "GPT-3 XL"


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case["name"])
def test_published_total_is_exact(case):
    config = case["config"]
    if case["name"] == GPT3_XL:
        config = {**config, "n_head": 16}  # see the next test; heads do not change the count
    spec = from_config(config)
    assert count(spec) == ledger(spec).params.total == case["total_params"]


def test_gpt3_xl_as_printed_is_no_model():
    """The paper prints 24 heads and a width of 2048, which 24 does not divide; transformers refuses it."""
    config = next(case["config"] for case in SUPPORTED if case["name"] == GPT3_XL)
    with pytest.raises(SpecError, match="n_embd must be a multiple of n_head = 24"):
        from_config(config)


TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("change", "total"),
    [
        ({"model_type": "llama", "head_dim": 32}, 111_424),
        ({"model_type": "llama", "head_dim": None}, 86_848),
        ({"model_type": "llama"}, 86_848),
        ({"model_type": "llama", "head_dim": 32, "num_key_value_heads": None}, 127_808),
        ({"model_type": "llama", "head_dim": 32, "tie_word_embeddings": True}, 105_024),
        ({"model_type": "llama", "head_dim": 16, "attention_bias": True}, 87_232),
        ({"model_type": "llama", "head_dim": 16, "attention_bias": True, "mlp_bias": True}, 87_872),
        ({"model_type": "qwen2", "head_dim": 16}, 87_104),
    ],
)
def test_small_terms_are_counted(change, total):
    spec = from_config({**TINY, **change})
    assert count(spec) == ledger(spec).params.total == total


TOTALS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "postln-1300": 173_982_844_180,
    "postln-1300-learned": 174_008_010_004,
    "triple-norm-512": 29_170_448,
}


@pytest.mark.parametrize("name", TOTALS)
def test_preset_has_its_published_total(name):
    spec = preset(name)
    assert count(spec) == ledger(spec).params.total == TOTALS[name]


def test_every_preset_has_a_known_total_except_the_cut_one():
    assert set(PRESETS) - set(TOTALS) == {"gpt2-block"}


def test_gpt2_block_is_gpt2_with_one_layer():
    block, whole = preset("gpt2-block"), preset("gpt2")
    assert block.replace(layers=whole.layers) == whole
    assert block.layers == whole.layers[:1]
    assert block_size(block.layers[0], 768) == 7_087_872


def test_postln_1300_is_the_first_transformers_arrangement():
    spec = preset("postln-1300")
    block = spec.layers[0]
    places = {place for place in BLOCK_NORMS if getattr(block, place)}
    assert places == {"attn_add_norm", "mlp_add_norm"}
    assert spec.final_norm is None
    assert spec.head == Head(tied=False, bias=True)
    assert spec.positions == Sinusoidal()
    assert preset("postln-1300-learned") == spec.replace(positions=Learned(2048))
    assert block_size(block, 12_288) == 1_811_988_480


def test_triple_norm_512_has_no_positions_at_all():
    spec = preset("triple-norm-512")
    assert spec.positions is None
    assert all(block.attn.rope is None for block in spec.layers)
    assert block_size(spec.layers[0], 512) == 3_153_408


def test_mistral_7b_has_its_window():
    assert preset("mistral-7b").layers[0].attn.window == 4096


def test_llama_31_is_llama_3_with_another_rotation():
    older, newer = (preset(name).layers[0].attn for name in ("llama-3-8b", "llama-3.1-8b"))
    assert newer.rope == Rope(128, base=500_000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert dataclasses.replace(newer, rope=older.rope) == older


def test_names_do_not_care_about_capitals():
    assert preset("Qwen3-0.6B") is preset("qwen3-0.6b")
    assert preset("GPT2").name == "gpt2"


def test_unknown_name_lists_what_is_close():
    with pytest.raises(NotFoundError, match=r"'lama-3-8b'; close to it: llama-3-8b"):
        preset("lama-3-8b")
