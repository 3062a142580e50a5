"""Published parameter counts, by an independent count from the spec's sizes."""

import dataclasses
import json
from pathlib import Path

import pytest

from openbook.ledger import ledger
from openbook.spec import (
    Attention,
    Block,
    Experts,
    Head,
    LatentAttention,
    Learned,
    Llama3Scaling,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    Sinusoidal,
    SpecError,
)
from openbook.spec.hf import from_config
from openbook.spec.model import BLOCK_NORMS
from openbook.spec.presets import PRESETS, NotFoundError, preset

CASES = json.loads((Path(__file__).parents[1] / "ledger" / "parameter_cases.json").read_text())


def count(spec: ModelSpec) -> int:
    """All parameters, a tied head once; hand arithmetic, apart from the ledger's."""
    d, v = spec.d_model, spec.vocab_size
    total = v * d + sum(block_size(block, d) for block in spec.layers)
    total += norm_size(spec.embed_norm, d) + norm_size(spec.final_norm, d)
    if isinstance(spec.positions, Learned):
        total += (spec.positions.n_positions + spec.positions.offset) * d
    return total + (0 if spec.head.tied else v * d) + (v if spec.head.bias else 0)


def block_size(block: Block, d: int) -> int:
    attn, mlp = block.attn, block.mlp
    total = heads_size(attn, d) if isinstance(attn, Attention) else latent_size(attn, d)
    total += mlp_size(mlp, d) if isinstance(mlp, Mlp) else experts_size(mlp, d)
    return total + sum(norm_size(getattr(block, place), d) for place in BLOCK_NORMS)


def heads_size(attn: Attention, d: int) -> int:
    q, kv = attn.n_heads * attn.head_dim, attn.n_kv_heads * attn.head_dim
    total = 2 * d * q + 2 * d * kv
    total += q * attn.q_bias + kv * attn.k_bias + kv * attn.v_bias + d * attn.o_bias
    for norm, width in ((attn.q_norm, q), (attn.k_norm, kv)):
        total += norm_size(norm, attn.head_dim if norm and norm.over == "head" else width)
    return total + attn.n_heads * attn.sinks


def latent_size(attn: LatentAttention, d: int) -> int:
    h, c, q = attn.n_heads, attn.kv_rank, attn.q_rank
    down = c + attn.rope_dim
    total = d * down + c + c * h * (attn.nope_dim + attn.v_dim) + h * attn.v_dim * d
    wide = h * (attn.nope_dim + attn.rope_dim)
    total += d * q + q + q * wide if q else d * wide
    return total + attn.down_bias * (down + (q or 0)) + attn.o_bias * d


def mlp_size(mlp: Mlp, d: int) -> int:
    first = 2 if mlp.gated else 1
    return (first + 1) * d * mlp.d_ff + first * mlp.d_ff * mlp.up_bias + d * mlp.down_bias


def experts_size(experts: Experts, d: int, n: int | None = None) -> int:
    """The router, with its biases, `n` of the experts or all, and what all tokens share."""
    router, shared = experts.router, experts.shared
    total = experts.n_experts * (d + router.bias + router.correction)
    total += (experts.n_experts if n is None else n) * mlp_size(experts.expert, d)
    return total + (mlp_size(shared.mlp, d) + d * shared.gated if shared else 0)


def norm_size(norm: Norm | None, width: int) -> int:
    return width * (norm.weight + norm.bias) if norm else 0


GPT3_XL = "GPT-3 XL"


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_published_total_is_exact(case):
    config = case["config"]
    if case["name"] == GPT3_XL:
        config = {**config, "n_head": 16}  # see the next test; heads do not change the count
    spec = from_config(config)
    assert count(spec) == ledger(spec).params.total == case["total_params"]


def test_gpt3_xl_as_printed_is_no_model():
    """The paper prints 24 heads and a width of 2048, which 24 does not divide; transformers refuses it."""
    config = next(case["config"] for case in CASES["cases"] if case["name"] == GPT3_XL)
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
        (
            {
                "model_type": "qwen3_moe",
                "head_dim": 16,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
            137_088,
        ),
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
    "tinyllama-1.1b": 1_100_048_384,
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
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "glm-4.5": 352_797_829_024,
    "glm-4.5-air": 106_852_251_264,
    "minimax-m2": 228_689_764_864,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama-4-scout": 107_769_861_120,
    "llama-4-maverick": 400_711_848_960,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-j-6b": 6_050_882_784,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "stablelm-3b-4e1t": 2_795_443_200,
    "stablelm-2-1.6b": 1_644_515_328,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder-15b": 15_517_456_384,
    "minitron-4b": 4_190_509_056,
    "command-r": 34_980_831_232,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-rw-1b": 1_311_625_216,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "mpt-7b": 6_649_286_656,
    "mpt-30b": 29_957_200_896,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "smollm3-3b": 3_075_098_624,
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-0414": 9_400_279_040,
    "granite-3.0-2b": 2_533_531_648,
    "granite-3.0-8b": 8_170_848_256,
    "ernie-4.5-0.3b": 360_748_032,
    "seed-oss-36b": 36_151_104_512,
    "exaone-4.0-32b": 32_003_216_384,
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
