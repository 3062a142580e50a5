"""Every family at its published size: the ledger against transformers' own modules on the meta device.

transformers builds its class from a config, the ledger counts the spec read from the same config, and the
two are compared layer by layer and outside the layers. (Names and shapes differ where transformers fuses
matrices; `test_agrees_with_model.py` compares those with our model.) Router corrections are buffers there.

Where a published total is known for certain, both must equal it.
"""

import re
import warnings
from collections import Counter

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from openbook.ledger import ledger
from openbook.spec.hf import FAMILIES, from_config

PUBLISHED = {
    # What the class's defaults are not; the last number is the published total, if there is one.
    "gpt2": [("gpt2", {}, 124_439_808)],
    "llama": [
        ("Llama-3-8B", {"vocab_size": 128_256, "intermediate_size": 14_336, "num_key_value_heads": 8},
         8_030_261_248),
        ("biases everywhere", {"attention_bias": True, "mlp_bias": True}, None),
    ],
    "mistral": [
        ("Mistral-Nemo", {"vocab_size": 131_072, "hidden_size": 5120, "num_hidden_layers": 40,
                          "head_dim": 128}, 12_247_782_400),
    ],
    "mixtral": [("Mixtral-8x7B", {}, 46_702_792_704)],
    "qwen2": [
        ("Qwen2.5-7B", {"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
                        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
         7_615_616_512),
    ],
    "qwen2_moe": [
        ("Qwen1.5-MoE-A2.7B", {}, 14_315_784_192),
        ("Qwen2-57B-A14B", {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
                            "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8,
                            "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20_480},
         57_408_658_944),
        ("dense layers between", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, None),
    ],
    "qwen3": [
        ("Qwen3-4B", {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                      "num_key_value_heads": 8, "tie_word_embeddings": True}, 4_022_468_096),
    ],
    "qwen3_moe": [("Qwen3-30B-A3B", {"num_hidden_layers": 48, "head_dim": 128}, 30_532_122_624)],
    "olmoe": [("OLMoE-1B-7B", {"intermediate_size": 1024}, 6_919_161_856)],
    "gemma": [("Gemma-7B", {}, 8_537_680_896)],
    "gemma2": [
        ("Gemma-2-2B", {}, 2_614_341_888),
        ("Gemma-2-9B", {"hidden_size": 3584, "intermediate_size": 14_336, "num_hidden_layers": 42,
                        "num_attention_heads": 16, "num_key_value_heads": 8}, 9_241_705_984),
    ],
    "gemma3_text": [
        ("Gemma-3-1B", {"vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912,
                        "num_attention_heads": 4, "num_key_value_heads": 1}, 999_885_952),
    ],
    "phi": [
        ("Phi-2", {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 32},
         2_779_683_840),
    ],
    "phi3": [
        ("Phi-3-mini", {}, 3_821_079_552),
        ("Phi-4", {"vocab_size": 100_352, "hidden_size": 5120, "intermediate_size": 17_920,
                   "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10},
         14_659_507_200),
    ],
    "olmo": [("OLMo-7B", {}, 6_888_095_744)],
    "olmo2": [
        ("OLMo-2-7B", {"vocab_size": 100_352}, 7_298_617_344),
        ("OLMo-2-32B", {"vocab_size": 100_352, "hidden_size": 5120, "intermediate_size": 27_648,
                        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8},
         32_234_279_936),
    ],
    "olmo3": [("Olmo-3-7B", {"vocab_size": 100_278}, 7_298_011_136)],
    "exaone4": [
        ("EXAONE-4.0-32B", {"hidden_size": 5120, "intermediate_size": 27_392, "num_hidden_layers": 64,
                            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}, None),
    ],
    "smollm3": [("SmolLM3-3B", {}, 3_075_098_624)],
    "seed_oss": [
        ("Seed-OSS-36B", {"vocab_size": 155_136, "hidden_size": 5120, "num_attention_heads": 80}, None),
    ],
    "gpt_neox": [
        ("GPT-NeoX-20B", {}, 20_554_567_680),
        ("Pythia-160M", {"vocab_size": 50_304, "hidden_size": 768, "intermediate_size": 3072,
                         "num_hidden_layers": 12, "num_attention_heads": 12}, 162_322_944),
    ],
    "gptj": [("GPT-J-6B", {}, 6_050_882_784)],
    "gpt_bigcode": [
        ("StarCoder", {"vocab_size": 49_152, "n_positions": 8192, "n_embd": 6144, "n_layer": 40,
                       "n_head": 48, "n_inner": 24_576}, 15_517_456_384),
    ],
    "opt": [
        ("OPT-125M", {}, 125_239_296),
        ("OPT-1.3B", {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24,
                      "num_attention_heads": 32, "word_embed_proj_dim": 2048}, 1_315_758_080),
    ],
    "falcon": [
        ("Falcon-7B", {}, 6_921_720_704),
        ("Falcon-40B", {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
                        "num_kv_heads": 8, "new_decoder_architecture": True}, 41_303_293_952),
        ("Falcon-RW-1B", {"vocab_size": 50_304, "hidden_size": 2048, "num_hidden_layers": 24,
                          "num_attention_heads": 32, "alibi": True, "bias": True, "multi_query": False,
                          "parallel_attn": False}, 1_311_625_216),
    ],
    "starcoder2": [("StarCoder2-3B", {}, 3_030_371_328)],
    "stablelm": [("StableLM-3B-4E1T", {}, 2_795_443_200)],
    "nemotron": [
        ("Minitron-4B", {"hidden_size": 3072, "intermediate_size": 9216, "num_attention_heads": 24,
                         "num_key_value_heads": 8, "head_dim": 128}, None),
    ],
    "bloom": [
        ("BLOOM-176B", {"vocab_size": 250_880, "hidden_size": 14_336, "n_layer": 70, "n_head": 112},
         176_247_271_424),
    ],
    "mpt": [
        ("MPT-7B", {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50_432}, 6_649_286_656),
    ],
    "cohere": [("Command-R", {}, 34_980_831_232), ("norms of each head", {"use_qk_norm": True}, None)],
    "cohere2": [
        ("Command-R7B", {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
                         "num_attention_heads": 32, "num_key_value_heads": 8}, None),
    ],
    "glm": [("GLM-4-9B", {}, 9_399_951_360)],
    "glm4": [("GLM-4-9B-0414", {}, 9_400_279_040)],
    "glm4_moe": [("GLM-4.5-Air", {"head_dim": 128, "attention_bias": True}, None)],
    "granite": [
        ("Granite-3.1-8B", {"vocab_size": 49_155, "intermediate_size": 12_800, "num_hidden_layers": 40,
                            "num_key_value_heads": 8, "tie_word_embeddings": True}, None),
    ],
    "granitemoe": [
        ("Granite-3.1-3B-A800M", {"vocab_size": 49_155, "hidden_size": 1536, "intermediate_size": 512,
                                  "num_attention_heads": 24, "num_key_value_heads": 8,
                                  "num_local_experts": 40, "num_experts_per_tok": 8,
                                  "tie_word_embeddings": True}, None),
    ],
    "ernie4_5": [("ERNIE-4.5-0.3B", {}, 360_748_032)],
    "hunyuan_v1_dense": [
        ("Hunyuan-7B", {"vocab_size": 128_167, "intermediate_size": 14_336, "num_key_value_heads": 8,
                        "head_dim": 128, "tie_word_embeddings": True}, None),
    ],
    "deepseek_v2": [
        ("DeepSeek-V2-Lite", {"vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944,
                              "moe_intermediate_size": 1408, "num_hidden_layers": 27,
                              "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
                              "n_routed_experts": 64, "num_experts_per_tok": 6, "q_lora_rank": None,
                              "first_k_dense_replace": 1}, 15_706_484_224),
        ("DeepSeek-V2", {"vocab_size": 102_400, "hidden_size": 5120, "intermediate_size": 12_288,
                         "moe_intermediate_size": 1536, "num_hidden_layers": 60,
                         "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 2,
                         "n_routed_experts": 160, "num_experts_per_tok": 6, "q_lora_rank": 1536,
                         "first_k_dense_replace": 1}, 235_741_434_880),
    ],
    "deepseek_v3": [("DeepSeek-V3", {}, 671_026_419_200)],
    "kimi_k2": [
        ("Kimi-K2", {"vocab_size": 163_840, "num_attention_heads": 64, "num_key_value_heads": 64,
                     "n_routed_experts": 384, "first_k_dense_replace": 1}, 1_026_408_232_448),
    ],
    "minimax_m2": [("MiniMax-M2", {}, None)],
    "gpt_oss": [
        ("gpt-oss-120b", {}, 116_829_156_672),
        ("gpt-oss-20b", {"num_hidden_layers": 24, "num_local_experts": 32}, 20_914_757_184),
    ],
    "llama4_text": [
        ("Llama-4-Scout", {}, 107_769_861_120),
        ("Llama-4-Maverick", {"num_local_experts": 128, "interleave_moe_layer_step": 2}, None),
    ],
}  # fmt: skip

SHAPED_LIKE = {"kimi_k2": "deepseek_v3"}
"""Model types without a class of their own in transformers."""

CASES = [
    pytest.param(model_type, changes, total, id=f"{model_type}, {name}")
    for model_type in FAMILIES
    for name, changes, total in PUBLISHED.get(model_type, [("defaults", {}, None)])
]


def counted_by_transformers(config):
    """Parameters and router corrections of transformers' model, by layer (None: outside the layers)."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
    corrections = ((name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    counts = Counter()
    for name, tensor in (*model.named_parameters(), *corrections):
        layer = re.search(r"\.(\d+)\.", name)
        counts[int(layer[1]) if layer else None] += tensor.numel()
    return counts


def counted_by_the_ledger(spec):
    counts = Counter()
    for row in ledger(spec).tensors:
        counts[row.layer] += 0 if row.tie else row.count
    return counts


@pytest.mark.parametrize(("model_type", "changes", "total"), CASES)
def test_every_layer_has_the_parameters_of_transformers_module(model_type, changes, total):
    config = CONFIG_MAPPING[SHAPED_LIKE.get(model_type, model_type)](**changes)
    spec = from_config(config.to_dict() | {"model_type": model_type})
    assert counted_by_the_ledger(spec) == counted_by_transformers(config)
    assert total in (None, ledger(spec).params.total)


def test_every_family_has_a_published_size():
    assert set(PUBLISHED) == set(FAMILIES)
