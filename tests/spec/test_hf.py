"""config.json ⇄ spec, held against the installed transformers wherever it has an answer."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings

from bounded import bounded_work
from openbook.spec import (
    Attention,
    DynamicScaling,
    FrequencyDivisors,
    HeadNorm,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    Rope,
    SpecError,
    UnsupportedError,
    YarnScaling,
    from_dict,
    to_dict,
)
from openbook.spec.hf import FAMILIES, from_config, to_config
from openbook.spec.presets import PRESETS, preset
from strategies import SHAPE_OF, configs, specs

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
LLAMA = {"model_type": "llama", **TINY}
QWEN = {"model_type": "qwen2", **TINY, "num_hidden_layers": 3}


def attention(config: dict) -> Attention:
    return from_config(config).layers[0].attn


def rope(**keys) -> Rope:
    found = attention({**LLAMA, "head_dim": 128, **keys}).rope
    assert found is not None
    return found


def windows(**keys) -> list[int | None]:
    return [block.attn.window for block in from_config({**QWEN, **keys}).layers]


# --- defaults and keys --------------------------------------------------------------------------


def hf_config(model_type: str, **keys):
    """transformers' own configuration object."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[SHAPE_OF.get(model_type, model_type)](**keys)


NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}
"""Keys without which a type's default config is no model."""


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - set(SHAPE_OF)))
def test_defaults_are_those_of_transformers(model_type):
    config = type(hf_config(model_type))
    fields = {f.name: f.default for f in dataclasses.fields(config)}
    for name, part in (config.sub_configs or {}).items():
        fields |= {f"{name}.{f.name}": f.default for f in dataclasses.fields(part)}
    ours = FAMILIES[model_type].defaults
    assert ours == {key: fields[key] for key in ours}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_saved_by_transformers_is_read_to_the_last_key(model_type):
    needed = NEEDED.get(model_type, {})
    saved = json.loads(hf_config(model_type, **needed).to_json_string(use_diff=False))
    assert from_config({**saved, "model_type": model_type}) == from_config(
        {"model_type": model_type, **needed}
    )


def test_unknown_key_is_named_with_advice():
    with pytest.raises(SpecError, match=r"unknown keys: 'clip_qkv'; .*'llama'.*remove it"):
        from_config({**LLAMA, "clip_qkv": 8.0})


def test_null_key_says_nothing():
    assert from_config({**LLAMA, "sliding_window": None, "clip_qkv": None}) == from_config(LLAMA)


def test_key_of_another_family_is_refused_with_its_own_spelling():
    with pytest.raises(SpecError, match=r"'intermediate_size' \(spelled 'n_inner' here\)"):
        from_config({"model_type": "gpt2", "intermediate_size": 64})


def test_keys_that_matter_are_not_irrelevant():
    read = {key for family in FAMILIES.values() for key in family.defaults}
    from openbook.spec.hf.irrelevant import IRRELEVANT, ONLY

    assert not read & (IRRELEVANT | set(ONLY))


def test_auto_map_is_ignored_for_a_known_family_and_never_run(tmp_path):
    canary = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"open({str(canary)!r}, 'w')")
    config = {**LLAMA, "auto_map": {"AutoConfig": "modeling.Config"}}
    assert from_config(config) == from_config(LLAMA)
    with pytest.raises(UnsupportedError):
        from_config({**config, "model_type": "modeling"})
    assert not canary.exists()


def test_unknown_model_type_names_the_supported_ones():
    with pytest.raises(UnsupportedError, match="'bert' is not supported; supported are gpt2, llama, mistral"):
        from_config({"model_type": "bert"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "gptq"}),
        ("is_encoder_decoder", True),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("hidden_act", "mish"),
        ("rope_scaling", {"rope_type": "su", "factor": 4.0}),
    ],
)
def test_feature_beyond_the_families_is_unsupported(key, value):
    with pytest.raises(UnsupportedError, match=key):
        from_config({**LLAMA, key: value})


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
        {},
    ],
    ids=["mxfp4", "fp8", "none"],
)
def test_quantised_weights_are_the_same_model(quantised):
    assert from_config({**LLAMA, "quantization_config": quantised}) == from_config(LLAMA)


@pytest.mark.parametrize(
    ("key", "quantised"),
    [
        ("quant_method", {"quant_method": "fp8_of_tomorrow"}),
        ("fmt", {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}),
        ("weight_block_size", {"quant_method": "fp8", "weight_block_size": [1, 128]}),
        ("weight_block_size", {"quant_method": "fp8"}),
    ],
)
def test_other_quantisations_are_refused_by_the_key_that_says_so(key, quantised):
    with pytest.raises(UnsupportedError, match=rf"config\.quantization_config\.{key} "):
        from_config({**LLAMA, "quantization_config": quantised})


# --- sizes --------------------------------------------------------------------------------------


def test_head_dim_is_not_width_over_heads():
    assert attention({**LLAMA, "head_dim": 32}).head_dim == 32


@pytest.mark.parametrize("absent", [{}, {"head_dim": None}])
def test_absent_head_dim_is_width_over_heads(absent):
    assert attention({**LLAMA, **absent}).head_dim == 16


def test_qwen3_has_heads_of_128_unless_it_says_otherwise():
    assert attention({**LLAMA, "model_type": "qwen3"}).head_dim == 128
    with pytest.raises(SpecError, match="head_dim must not be null"):
        from_config({**LLAMA, "model_type": "qwen3", "head_dim": None})


def test_absent_kv_heads_mean_what_each_family_means():
    bare = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    kv_heads = {
        name: attention({"model_type": name, **bare, "num_attention_heads": 64, "head_dim": 2}).n_kv_heads
        for name in ("llama", "mistral", "qwen2")
    }
    assert kv_heads == {"llama": 64, "mistral": 8, "qwen2": 32}


def test_width_that_heads_do_not_divide_needs_a_head_dim():
    with pytest.raises(SpecError, match="hidden_size must be a multiple of num_attention_heads = 3"):
        from_config({**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3})
    odd = {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    assert to_config(from_config(odd))["model_type"] == "mistral"  # transformers' llama refuses it


def test_gpt2_feed_forward_is_four_times_the_width_unless_given():
    assert from_config({"model_type": "gpt2"}).layers[0].mlp.d_ff == 3072
    assert from_config({"model_type": "gpt2", "n_inner": 100}).layers[0].mlp.d_ff == 100


# --- biases, norms, activations, scales ---------------------------------------------------------


def biases(config: dict) -> tuple[str, bool, bool]:
    block = from_config(config).layers[0]
    letters = "".join(part for part in "qkvo" if getattr(block.attn, f"{part}_bias"))
    return letters, block.mlp.up_bias, block.mlp.down_bias


def test_each_family_puts_its_biases_where_it_should():
    assert biases({"model_type": "gpt2"}) == ("qkvo", True, True)
    assert biases(LLAMA) == ("", False, False)
    assert biases({**LLAMA, "attention_bias": True}) == ("qkvo", False, False)
    assert biases({**LLAMA, "mlp_bias": True}) == ("", True, True)
    assert biases(QWEN) == ("qkv", False, False)
    assert biases({**LLAMA, "model_type": "qwen3", "attention_bias": True}) == ("qkvo", False, False)


def test_qwen3_normalises_queries_and_keys_with_the_models_epsilon():
    attn = attention({**LLAMA, "model_type": "qwen3", "rms_norm_eps": 1e-2})
    assert attn.q_norm == attn.k_norm == HeadNorm("rms", eps=1e-2)
    assert attention(QWEN).q_norm is None


def test_gelu_new_is_the_tanh_form_and_gelu_the_exact_one():
    act = {
        name: from_config({**LLAMA, "hidden_act": name}).layers[0].mlp.activation
        for name in ("gelu", "gelu_new")
    }
    assert act == {"gelu": "gelu", "gelu_new": "gelu_tanh"}


def test_activations_are_the_same_functions_in_transformers():
    import torch
    from transformers.activations import ACT2FN

    from openbook.spec.hf.feedforward import ACTIVATIONS

    x = torch.linspace(-6, 6, 101)
    meaning = {
        "silu": torch.nn.functional.silu(x),
        "gelu": torch.nn.functional.gelu(x),
        "gelu_tanh": torch.nn.functional.gelu(x, approximate="tanh"),
        "gelu_quick": x * torch.sigmoid(1.702 * x),
        "relu": x.relu(),
        "relu2": x.relu() ** 2,
        "sigmoid": x.sigmoid(),
        "tanh": x.tanh(),
    }
    for name, activation in ACTIVATIONS.items():
        torch.testing.assert_close(ACT2FN[name](x), meaning[activation], msg=name)


def test_gpt2_scale_may_be_left_out_or_divided_by_the_layers_number():
    def scales(**keys):
        return [
            block.attn.scale for block in from_config({"model_type": "gpt2", "n_layer": 3, **keys}).layers
        ]

    assert scales() == [0.125] * 3
    assert scales(scale_attn_weights=False) == [1.0] * 3
    assert scales(scale_attn_by_inverse_layer_idx=True) == [0.125, 0.0625, 0.125 / 3]


def test_gpt2_scales_are_those_of_transformers():
    from transformers import GPT2LMHeadModel

    config = {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_embd": 28,
        "n_head": 2,
        "scale_attn_by_inverse_layer_idx": True,
    }
    model = GPT2LMHeadModel(hf_config(**config))
    theirs = [layer.attn.scaling for layer in model.transformer.h]
    assert [block.attn.scale for block in from_config(config).layers] == theirs


# --- windows ------------------------------------------------------------------------------------


def test_mistral_slides_on_every_layer_unless_the_window_is_null():
    mistral = {**TINY, "model_type": "mistral"}
    assert [b.attn.window for b in from_config({**mistral, "sliding_window": 7}).layers] == [7, 7]
    assert [b.attn.window for b in from_config({**mistral, "sliding_window": None}).layers] == [None, None]
    assert attention(mistral).window == 4096


def test_qwen_slides_from_max_window_layers_on_and_only_if_in_use():
    assert windows(use_sliding_window=True, sliding_window=4, max_window_layers=1) == [None, 4, 4]
    assert windows(use_sliding_window=True, sliding_window=4, max_window_layers=3) == [None, None, None]
    assert windows(use_sliding_window=False, sliding_window=4, max_window_layers=0) == [None, None, None]


def test_explicit_layer_types_win():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    keys = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3, "layer_types": types}
    assert windows(**keys) == [4, None, 4]
    with pytest.raises(SpecError, match="use_sliding_window"):
        windows(layer_types=types)


@pytest.mark.parametrize(
    "bad", [["full_attention"], ["full_attention"] * 2 + ["chunked_attention"], "full_attention"]
)
def test_layer_types_must_name_every_layer(bad):
    with pytest.raises(SpecError, match="layer_types must be a list of 3"):
        windows(layer_types=bad)


def test_window_of_zero_is_no_width():
    with pytest.raises(SpecError, match="sliding_window must be an integer from 1"):
        from_config({**TINY, "model_type": "mistral", "sliding_window": 0})


# --- rotary positions ---------------------------------------------------------------------------

YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("kind", "keys", "scaling"),
    [
        ("default", {}, None),
        ("linear", {"factor": 4.0}, LinearScaling(4.0)),
        ("dynamic", {"factor": 2.0}, DynamicScaling(2.0, original_positions=2048)),
        ("llama3", LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ("yarn", YARN, YarnScaling(4.0, 32, attention_factor=0.1 * math.log(4) + 1)),
    ],
)
def test_three_spellings_of_rope_are_one(kind, keys, scaling):
    want = Rope(128, base=500_000.0, scaling=scaling)
    assert rope(rope_theta=500_000.0, rope_scaling={"rope_type": kind, **keys}) == want
    assert rope(rope_theta=500_000, rope_scaling={"type": kind, **keys}) == want
    assert rope(rope_parameters={"rope_theta": 500_000.0, "rope_type": kind, **keys}) == want


def test_theta_in_the_object_wins_as_in_transformers():
    both = {"rope_theta": 10_000.0, "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"}}
    assert rope(**both).base == hf_config("llama", **both).rope_parameters["rope_theta"] == 1_000_000.0


def test_absent_rope_is_the_papers():
    for absent in ({}, {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_theta": None}):
        assert rope(**absent) == Rope(128, base=10_000.0)


def test_rope_per_layer_type():
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    spec = from_config(
        {
            **QWEN,
            "rope_parameters": nested,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        }
    )
    full, sliding = Rope(16, 1_000_000.0, scaling=LinearScaling(8.0)), Rope(16, 10_000.0)
    assert [block.attn.rope for block in spec.layers] == [full, full, sliding]


def test_contradicting_spellings_are_refused():
    with pytest.raises(SpecError, match="contradict"):
        rope(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"})
    with pytest.raises(SpecError, match="type"):
        rope(rope_scaling={"type": "linear", "rope_type": "dynamic", "factor": 2.0})


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0, "alpha": 1.0},
        {"factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "linear"},
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512},
        {"rope_type": "longrope", "short_factor": [1.0] * 64},
        {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 63},
        "linear",
        [4.0],
    ],
)
def test_rope_that_is_unclear_is_refused(scaling):
    with pytest.raises(SpecError, match="rope_scaling"):
        rope(rope_scaling=scaling)


YARNS = [
    {"factor": 4.0},
    {"factor": 0.5},
    {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5},
    {"factor": 40.0, "mscale": 1.0},
    {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": 4.0, "attention_factor": 0.8},
    {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    {"factor": None, "original_max_position_embeddings": 512},
]


@pytest.mark.parametrize("keys", YARNS)
def test_yarn_is_resolved_as_in_transformers(keys):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = {**LLAMA, "head_dim": 128, "rope_scaling": {"rope_type": "yarn", **keys}}
    theirs = hf_config(**config)
    ours = attention(config).rope
    assert ours is not None
    assert isinstance(ours.scaling, YarnScaling)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert ours.scaling.attention_factor == attention_factor
    assert ours.scaling.original_positions == theirs.rope_parameters["original_max_position_embeddings"]
    again = hf_config(**to_config(from_config(config)))
    assert ROPE_INIT_FUNCTIONS["yarn"](again)[0].equal(inv_freq)


def test_original_length_beside_the_object_wins_as_in_transformers():
    config = {"original_max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", **YARN}}
    found = rope(**config).scaling
    assert isinstance(found, YarnScaling)
    theirs = hf_config("llama", **config)
    theirs.standardize_rope_params()
    assert found.original_positions == theirs.rope_parameters["original_max_position_embeddings"] == 64


def test_divisors_are_written_as_longrope_and_mean_the_same_frequencies():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    divisors = (1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0)
    spec = from_config(LLAMA)
    block = dataclasses.replace(
        spec.layers[0],
        attn=dataclasses.replace(spec.layers[0].attn, rope=Rope(16, scaling=FrequencyDivisors(divisors))),
    )
    config = to_config(spec.replace(layers=(block, block)))
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](hf_config(**config))
    assert attention_factor == 1.0
    want = [10_000 ** (-i / 8) / divisor for i, divisor in enumerate(divisors)]
    assert inv_freq.tolist() == pytest.approx(want, rel=1e-6)


# --- writing ------------------------------------------------------------------------------------


@given(configs())
def test_what_a_family_can_express_survives_the_round_trip(config):
    spec = from_config(config)
    written = to_config(spec)
    assert from_config(json.loads(json.dumps(written))) == spec


@given(specs())
def test_any_spec_is_written_faithfully_or_not_at_all(spec):
    with suppress(UnsupportedError):
        assert from_config(to_config(spec)) == spec


@given(specs())
def test_any_spec_survives_plain_data(spec):
    assert from_dict(json.loads(json.dumps(to_dict(spec)))) == spec


WORKED_EXAMPLES = {"postln-1300", "postln-1300-learned", "triple-norm-512"}


@pytest.mark.parametrize("name", sorted(set(PRESETS) - WORKED_EXAMPLES))
def test_every_published_preset_is_written_under_some_family(name):
    assert from_config(to_config(preset(name))) == preset(name)


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"softcap": 30.0}, r"layers\.0\.attn\.softcap = 30\.0, where llama has None"),
        ({"clip_qkv": 4.0}, r"layers\.0\.attn\.clip_qkv = 4\.0"),
        ({"sinks": True}, r"layers\.0\.attn\.sinks = True"),
        ({"k_bias": True}, r"layers\.0\.attn\.k_bias = True"),
    ],
)
def test_what_no_family_can_express_is_named(change, feature):
    spec = from_config(LLAMA)
    block = dataclasses.replace(spec.layers[0], attn=dataclasses.replace(spec.layers[0].attn, **change))
    with pytest.raises(UnsupportedError, match=feature):
        to_config(spec.replace(layers=(block, block)))


@pytest.mark.parametrize("name", sorted(WORKED_EXAMPLES))
def test_worked_examples_are_of_no_published_family(name):
    with pytest.raises(UnsupportedError, match="no Hugging Face model type"):
        to_config(preset(name))


def parameter_shapes(config: dict) -> int:
    """Parameters of transformers' own model, tied ones once, built without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    if model.config.tie_word_embeddings:
        model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=20, deadline=None)
@given(configs())
def test_transformers_builds_the_same_size_from_what_is_written(config):
    assert parameter_shapes(to_config(from_config(config))) == parameter_shapes(config)


def frequencies(config: dict) -> tuple[list[float], float]:
    """transformers' own rotation of a config: its frequencies, and what multiplies cosine and sine."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(hf_config(**json.loads(json.dumps(config))))
    return rotary.inv_freq.tolist(), rotary.attention_scaling


@given(configs().filter(lambda config: config["model_type"] != "gpt2"))
def test_transformers_rotates_by_the_same_angles_from_what_is_written(config):
    assert frequencies(to_config(from_config(config))) == frequencies(config)


def test_the_feature_is_named_however_many_layers_have_it():
    spec = from_config({**LLAMA, "num_hidden_layers": 500})
    block = dataclasses.replace(spec.layers[0], attn=dataclasses.replace(spec.layers[0].attn, softcap=30.0))
    with pytest.raises(UnsupportedError, match=r"attn\.softcap = 30\.0, where llama has None"):
        to_config(spec.replace(layers=(block,) * 500))


# --- hostile values -----------------------------------------------------------------------------

BOMBS = [
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": "2"},
    {"num_hidden_layers": 2.0},
    {"num_hidden_layers": True},
    {"num_attention_heads": 0},
    {"num_attention_heads": -4},
    {"num_key_value_heads": 8},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": 0},
    {"head_dim": 5},
    {"head_dim": 0},
    {"hidden_size": "64"},
    {"hidden_size": None},
    {"hidden_size": 10**400},
    {"hidden_size": [64]},
    {"vocab_size": -1},
    {"vocab_size": float("nan")},
    {"rms_norm_eps": -1e-5},
    {"rms_norm_eps": float("nan")},
    {"rms_norm_eps": float("inf")},
    {"rms_norm_eps": 10**400},
    {"rms_norm_eps": "1e-5"},
    {"rope_theta": 0},
    {"rope_theta": -1.0},
    {"rope_theta": True},
    {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    {"rope_scaling": {"rope_type": "linear", "factor": -2.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}},
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1.0},
    {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2},
    {"tie_word_embeddings": 1},
    {"attention_bias": "false"},
    {"hidden_act": 7},
    {"hidden_act": "__class__"},
    {"model_type": None},
    {"model_type": ["llama"]},
    {"model_type": "../llama"},
    {7: 7},
    {"x" * 10**6: 1},
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: repr(bomb)[:50])
def test_config_bomb_is_one_short_error_at_once(bomb):
    with bounded_work(0.5), pytest.raises(SpecError) as caught:
        from_config({**LLAMA, **bomb})
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("config", [None, [], "llama", 7])
def test_config_must_be_an_object(config):
    with pytest.raises(SpecError, match="must be an object"):
        from_config(config)


def test_nesting_without_end_is_harmless():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert from_config({**LLAMA, "auto_map": deep}) == from_config(LLAMA)
    with pytest.raises(SpecError, match="found list of 1"):
        from_config({**LLAMA, "hidden_size": deep})


def test_huge_widths_are_answered_exactly():
    spec = from_config({**LLAMA, "hidden_size": 2**40, "vocab_size": 10**12, "intermediate_size": 10**12})
    assert isinstance(spec, ModelSpec)
    assert (spec.d_model, spec.vocab_size, spec.layers[0].attn.head_dim) == (2**40, 10**12, 2**38)


def test_errors_do_not_depend_on_assert():
    code = (
        "from openbook.spec.hf import from_config\n"
        "try: from_config({'model_type': 'llama', 'num_attention_heads': 0})\n"
        "except ValueError as e: print(e)\n"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    run = subprocess.run(
        [sys.executable, "-O", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert "num_attention_heads must be an integer from 1" in run.stdout
