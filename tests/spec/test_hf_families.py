"""What is particular to each family, held against transformers' own modules or hand arithmetic."""

import json
import math
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from bounded import bounded_work
from openbook.spec import (
    Alibi,
    Attention,
    Block,
    Chunk,
    Experts,
    FrequencyDivisors,
    Groups,
    HeadNorm,
    LatentAttention,
    Learned,
    LinearScaling,
    LongRope,
    Mlp,
    ModelSpec,
    Norm,
    QueryTemperature,
    Rope,
    Router,
    Shared,
    SpecError,
    UnsupportedError,
    YarnScaling,
)
from openbook.spec.hf import FAMILIES, from_config, to_config
from openbook.spec.hf.irrelevant import NOT_YET, TEXT_OF
from openbook.spec.hf.writing import write_config
from openbook.spec.model import BLOCK_NORMS
from strategies import SHAPE_OF, family_configs, small_config


def spec_of(model_type: str, **changes: Any) -> ModelSpec:
    return from_config(small_config(model_type, **changes))


def first(model_type: str, **changes: Any) -> Block:
    return spec_of(model_type, **changes).layers[0]


def heads(model_type: str, **changes: Any) -> Attention:
    attn = first(model_type, **changes).attn
    assert isinstance(attn, Attention)
    return attn


def latent(model_type: str, **changes: Any) -> LatentAttention:
    attn = first(model_type, **changes).attn
    assert isinstance(attn, LatentAttention)
    return attn


def experts(model_type: str, layer: int = -1, **changes: Any) -> Experts:
    mlp = spec_of(model_type, **changes).layers[layer].mlp
    assert isinstance(mlp, Experts)
    return mlp


def per_layer(model_type: str, name: str, **changes: Any) -> list[Any]:
    return [getattr(block.attn, name) for block in spec_of(model_type, **changes).layers]


def places(block: Block) -> set[str]:
    return {place for place in BLOCK_NORMS if getattr(block, place)}


def transformers_model(config: dict[str, Any]):
    """transformers' own model of a config, built without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type = SHAPE_OF.get(config["model_type"], config["model_type"])
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{**config, "model_type": model_type, **ids})
        )


def attributes(model_type: str, name: str, **changes: Any) -> list[Any]:
    """An attribute of each layer's attention in transformers."""
    modules = transformers_model(small_config(model_type, **changes)).modules()
    return [getattr(m, name) for m in modules if hasattr(m, name) and type(m).__name__.endswith("Attention")]


# --- every family -------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_writes_its_own_specs(model_type):
    spec = spec_of(model_type)
    written = json.loads(json.dumps(write_config(FAMILIES[model_type], spec)))
    assert written["model_type"] == model_type
    assert from_config(written) == spec


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_family_can_say_another_may_say_as_well(model_type):
    spec = spec_of(model_type)
    assert from_config(to_config(spec)) == spec


@given(family_configs())
def test_any_config_of_any_family_survives_the_round_trip(config):
    spec = from_config(config)
    assert from_config(json.loads(json.dumps(write_config(FAMILIES[config["model_type"]], spec)))) == spec


@settings(max_examples=20, deadline=None)
@given(family_configs())
def test_transformers_builds_as_many_parameters_from_what_is_written(config):
    written = to_config(from_config(config))
    sizes = [sum(p.numel() for p in transformers_model(c).parameters()) for c in (config, written)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [(m, "scaling") for m in sorted(FAMILIES) if m not in ("gpt2", "opt", "falcon", "bloom", "mpt")]
    + [("bloom", "inv_norm_factor"), ("falcon", "inv_norm_factor"), ("mpt", "softmax_scale")],
)
def test_scores_are_scaled_as_in_transformers(model_type, name):
    assert per_layer(model_type, "scale") == pytest.approx(attributes(model_type, name), rel=1e-15)


LISTED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma2", {}),
        ("gemma2", {"layer_types": LISTED}),
        ("gemma3_text", {"num_hidden_layers": 7}),
        ("olmo3", {"num_hidden_layers": 5}),
        ("cohere2", {"num_hidden_layers": 5}),
        ("gpt_oss", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
        ("qwen3_moe", {"use_sliding_window": True}),
        ("qwen3_moe", {"use_sliding_window": False}),
        ("smollm3", {"use_sliding_window": True, "no_rope_layer_interval": 2}),
        ("smollm3", {}),
    ],
)
def test_windows_are_those_of_transformers(model_type, changes):
    theirs = attributes(model_type, "sliding_window", **changes)
    assert per_layer(model_type, "window", **changes) == [window or None for window in theirs]


@pytest.mark.parametrize("changes", [{"max_window_layers": 3}, {"layer_types": LISTED}])
def test_qwen2_moe_slides_in_every_second_layer_below_a_number(changes):
    from transformers import CONFIG_MAPPING

    config = small_config("qwen2_moe", use_sliding_window=True, **changes)
    theirs = CONFIG_MAPPING["qwen2_moe"](**config).layer_types
    ours = [block.attn.window for block in from_config(config).layers]
    assert ours == [7 if kind == "sliding_attention" else None for kind in theirs]


SWITCHES_THAT_CHANGE_NOTHING_ALONE = {
    ("falcon", "multi_query"): {"num_kv_heads": None},
    ("falcon", "new_decoder_architecture"): {},
    ("falcon", "parallel_attn"): {},
    ("gpt2", "scale_attn_by_inverse_layer_idx"): {},
    ("opt", "_remove_final_layer_norm"): {},
    ("qwen2", "use_sliding_window"): {"max_window_layers": 0},
    ("qwen3", "use_sliding_window"): {"max_window_layers": 0},
}


@pytest.mark.parametrize(
    ("model_type", "key"),
    [(m, key) for m, f in FAMILIES.items() for key, value in f.defaults.items() if isinstance(value, bool)],
)
def test_every_switch_changes_the_model(model_type, key):
    beside = SWITCHES_THAT_CHANGE_NOTHING_ALONE.get((model_type, key), {})
    on, off = (spec_of(model_type, **beside, **{key: value}) for value in (True, False))
    assert on != off


# --- norms and residuals ------------------------------------------------------------------------

PRE = {"attn_norm", "mlp_norm"}


@pytest.mark.parametrize(
    ("model_type", "changes", "residual", "norms"),
    [
        ("gemma", {}, "serial", PRE),
        ("gemma2", {}, "serial", {*PRE, "attn_out_norm", "mlp_out_norm"}),
        ("glm4", {}, "serial", {*PRE, "attn_out_norm", "mlp_out_norm"}),
        ("olmo2", {}, "serial", {"attn_out_norm", "mlp_out_norm"}),
        ("exaone4", {}, "serial", {"attn_out_norm", "mlp_out_norm"}),
        ("gpt_neox", {}, "parallel", PRE),
        ("gpt_neox", {"use_parallel_residual": False}, "serial", PRE),
        ("phi", {}, "parallel_shared", {"attn_norm"}),
        ("cohere", {}, "parallel_shared", {"attn_norm"}),
        ("gptj", {}, "parallel_shared", {"attn_norm"}),
        ("stablelm", {}, "serial", PRE),
        ("stablelm", {"use_parallel_residual": True}, "parallel_shared", {"attn_norm"}),
        ("falcon", {}, "parallel_shared", {"attn_norm"}),
        ("falcon", {"parallel_attn": False}, "serial", PRE),
        ("falcon", {"new_decoder_architecture": True}, "parallel", PRE),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            "parallel_shared",
            {"attn_norm"},
        ),
        ("opt", {"do_layer_norm_before": False}, "serial", {"attn_add_norm", "mlp_add_norm"}),
    ],
)
def test_norms_sit_where_each_family_has_them(model_type, changes, residual, norms):
    block = first(model_type, **changes)
    assert (block.residual, places(block)) == (residual, norms)


@pytest.mark.parametrize(
    ("model_type", "norm"),
    [
        ("gemma3_text", Norm("rms", 1e-6, offset=1.0)),
        ("nemotron", Norm("layer", 1e-5, bias=True, offset=1.0)),
        ("olmo", Norm("layer", 1e-5, weight=False)),
        ("cohere", Norm("layer", 1e-5)),
        ("mpt", Norm("layer", 1e-5)),
        ("gpt_neox", Norm("layer", 1e-5, bias=True)),
        ("glm", Norm("rms", 1.5625e-7)),
    ],
)
def test_kind_of_norm(model_type, norm):
    spec = spec_of(model_type)
    assert spec.layers[0].attn_norm == spec.final_norm == norm


@pytest.mark.parametrize(
    ("model_type", "changes", "norm"),
    [
        ("gemma3_text", {}, HeadNorm("rms", 1e-6, offset=1.0)),
        ("qwen3_moe", {}, HeadNorm("rms", 1e-6)),
        ("olmo2", {}, HeadNorm("rms", 1e-5, over="width")),
        ("olmoe", {}, HeadNorm("rms", 1e-5, over="width")),
        ("minimax_m2", {}, HeadNorm("rms", 1e-6, over="width")),
        ("exaone4", {}, HeadNorm("rms", 1e-5)),
        ("hunyuan_v1_dense", {}, HeadNorm("rms", 1e-5, after_rope=True)),
        ("glm4_moe", {"use_qk_norm": True}, HeadNorm("rms", 1e-5)),
        ("glm4_moe", {}, None),
        ("cohere", {"use_qk_norm": True}, HeadNorm("layer", 1e-5, over="own")),
        ("stablelm", {"qk_layernorm": True}, HeadNorm("layer", 1e-5, over="own")),
        ("phi", {"qk_layernorm": True}, HeadNorm("layer", 1e-5, bias=True)),
        ("llama4_text", {}, HeadNorm("rms", 1e-5, weight=False, after_rope=True)),
    ],
)
def test_norm_of_queries_and_keys(model_type, changes, norm):
    attn = heads(model_type, **changes)
    assert attn.q_norm == attn.k_norm == norm


def test_opt_after_norms_has_no_final_norm():
    assert spec_of("opt").final_norm == Norm("layer", 1e-5, bias=True)
    assert spec_of("opt", _remove_final_layer_norm=True).final_norm is None
    assert spec_of("opt", do_layer_norm_before=False).final_norm is None


def test_bloom_normalises_the_embedding():
    assert spec_of("bloom").embed_norm == Norm("layer", 1e-5, bias=True)
    assert spec_of("mpt").embed_norm is None


# --- biases, feed-forwards, multipliers ---------------------------------------------------------


def biases(block: Block) -> str:
    """Letters of the matrices that have one; u for the first of the feed-forward, d for its last."""
    assert isinstance(block.attn, Attention)
    assert isinstance(block.mlp, Mlp)
    have = {part: getattr(block.attn, f"{part}_bias") for part in "qkvo"}
    have |= {"u": block.mlp.up_bias, "d": block.mlp.down_bias}
    return "".join(part for part, has in have.items() if has)


@pytest.mark.parametrize(
    ("model_type", "changes", "letters"),
    [
        ("seed_oss", {}, "qkv"),
        ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}, "qkvoud"),
        ("glm", {}, "qkv"),
        ("stablelm", {"use_qkv_bias": True}, "qkv"),
        ("gpt_neox", {}, "qkvoud"),
        ("gpt_neox", {"attention_bias": False}, "ud"),
        ("phi", {}, "qkvoud"),
        ("gptj", {}, "ud"),
        ("starcoder2", {}, "qkvoud"),
        ("ernie4_5", {"use_bias": True}, "qkvoud"),
        ("falcon", {}, ""),
        ("falcon", {"bias": True}, "qkvoud"),
        ("bloom", {}, "qkvoud"),
        ("mpt", {}, ""),
        ("opt", {"enable_bias": False}, ""),
        ("gemma2", {"attention_bias": True}, "qkvo"),
    ],
)
def test_biases(model_type, changes, letters):
    assert biases(first(model_type, **changes)) == letters


@pytest.mark.parametrize(
    ("model_type", "activation", "gated"),
    [
        ("gemma", "gelu_tanh", True),
        ("gemma3_text", "gelu_tanh", True),
        ("phi", "gelu_tanh", False),
        ("gpt_neox", "gelu", False),
        ("falcon", "gelu", False),
        ("bloom", "gelu_tanh", False),
        ("mpt", "gelu", False),
        ("nemotron", "relu2", False),
        ("opt", "relu", False),
        ("stablelm", "silu", True),
        ("starcoder2", "gelu_tanh", False),
    ],
)
def test_activation(model_type, activation, gated):
    mlp = first(model_type).mlp
    assert isinstance(mlp, Mlp)
    assert (mlp.activation, mlp.gated) == (activation, gated)


def test_old_gemma_files_say_gelu_and_mean_its_tanh_form():
    assert first("gemma", hidden_act="gelu") == first("gemma")
    assert first("gemma", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh") == first("gemma")
    assert first("gemma2", hidden_activation="gelu") != first("gemma2")


def test_feed_forward_of_bloom_and_mpt_is_four_times_the_width():
    assert [mlp.d_ff for m in ("bloom", "mpt") if isinstance(mlp := first(m).mlp, Mlp)] == [192, 192]
    with pytest.raises(UnsupportedError, match="expansion_ratio is 8"):
        spec_of("mpt", expansion_ratio=8)


def test_granite_multiplies_in_four_places_and_divides_logits():
    spec = spec_of(
        "granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        logits_scaling=49.0,
    )
    block = spec.layers[0]
    assert (spec.embed_scale, block.residual_scale, block.attn.scale) == (12.0, 0.22, 0.015625)
    assert spec.head.scale == 1 / 49
    assert to_config(spec)["logits_scaling"] == 49.0


def test_gemma_multiplies_the_embedding_by_the_root_of_its_width():
    assert spec_of("gemma3_text").embed_scale == spec_of("gemma").embed_scale == 48**0.5
    assert (
        spec_of("gemma").embed_scale
        == transformers_model(small_config("gemma")).model.embed_tokens.scalar_embed_scale
    )


def test_gemma2_scales_by_its_scalar_and_caps_scores_and_logits():
    attn = heads("gemma2", query_pre_attn_scalar=144)
    assert (attn.scale, attn.softcap) == (1 / 12, 50.0)
    assert spec_of("gemma2").head.softcap == 30.0
    assert spec_of("gemma3_text").head.softcap is None
    assert heads("gemma3_text").softcap is None


def test_heads_of_logits():
    assert spec_of("cohere").head.scale == 0.0625
    assert {m for m in FAMILIES if spec_of(m).head.bias} == {"phi", "gptj"}


def test_clip_of_queries_keys_and_values():
    assert heads("olmo", clip_qkv=8.0).clip_qkv == 8.0
    assert heads("mpt", attn_config={"clip_qkv": 6.0}).clip_qkv == 6.0
    with pytest.raises(UnsupportedError, match=r"clip_qkv is 8\.0.*after their norms"):
        spec_of("olmoe", clip_qkv=8.0)


# --- heads and positions ------------------------------------------------------------------------


def test_key_heads_of_the_older_families():
    def n_kv_heads(model_type: str, **changes: Any) -> int:
        return heads(model_type, **changes).n_kv_heads

    assert n_kv_heads("gpt_bigcode") == 1
    assert n_kv_heads("gpt_bigcode", multi_query=False) == 6
    assert n_kv_heads("falcon") == 1  # num_kv_heads of the older architecture is not read
    assert n_kv_heads("falcon", multi_query=False, num_kv_heads=None) == 6
    assert n_kv_heads("falcon", new_decoder_architecture=True) == 3
    with pytest.raises(SpecError, match="num_kv_heads must be num_attention_heads = 6"):
        spec_of("falcon", multi_query=False)


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("gpt_neox", Rope(2)),  # a quarter of 8
        ("phi", Rope(4)),
        ("phi3", Rope(8)),
        ("stablelm", Rope(2)),
        ("nemotron", Rope(6)),
        ("glm", Rope(6, layout="interleaved")),
        ("glm4_moe", Rope(4)),
        ("gptj", Rope(4, layout="interleaved")),
        ("cohere", Rope(8, 500_000.0, "interleaved")),
        ("ernie4_5", Rope(12, 500_000.0, "interleaved")),
        ("llama4_text", Rope(12, 500_000.0, "interleaved")),
        ("deepseek_v2", Rope(4, layout="interleaved")),
        ("deepseek_v3", Rope(4, layout="interleaved")),
        ("mixtral", Rope(12, 1_000_000.0)),
        ("minimax_m2", Rope(12, 5_000_000.0)),
        ("hunyuan_v1_dense", Rope(12)),
        ("bloom", None),
    ],
)
def test_rotation_of_a_config_that_says_nothing_of_it(model_type, rope):
    assert first(model_type).attn.rope == rope


def test_part_of_a_head_that_is_turned():
    assert heads("gpt_neox", rotary_pct=0.5, rotary_emb_base=500.0).rope == Rope(4, 500.0)
    assert heads(
        "gpt_neox", rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 1.0}
    ).rope == Rope(8, 500.0)
    assert heads("phi3", partial_rotary_factor=0.75).rope == Rope(6)
    assert heads("minimax_m2", rotary_dim=8).rope == Rope(8, 5_000_000.0)
    assert latent("deepseek_v3", rope_interleave=False).rope == Rope(4)
    with pytest.raises(SpecError, match=r"3 of the 8 elements .* must be an even number"):
        heads("phi3", partial_rotary_factor=0.4)
    with pytest.raises(SpecError, match=r"rotary_dim must be an integer from 1 to 8"):
        heads("gptj", rotary_dim=10)


def test_smollm3_has_no_positions_in_every_fourth_layer():
    ropes = per_layer("smollm3", "rope", num_hidden_layers=8)
    assert [rope is not None for rope in ropes] == [True, True, True, False] * 2
    listed = per_layer("smollm3", "rope", no_rope_layers=[0, 1, 1, 0])
    assert [rope is not None for rope in listed] == [False, True, True, False]
    assert ropes[0] == Rope(8, 2_000_000.0)


def test_cohere2_and_exaone4_rotate_where_they_slide():
    for model_type in ("cohere2", "exaone4"):
        rotated = [rope is not None for rope in per_layer(model_type, "rope")]
        sliding = [window == 7 for window in per_layer(model_type, "window")]
        assert rotated == sliding == [True, True, True, False]


def test_exaone4_without_a_window_rotates_everywhere():
    small = {"sliding_window": None, "sliding_window_pattern": None}
    assert per_layer("exaone4", "window", **small) == [None] * 4
    assert None not in per_layer("exaone4", "rope", **small)
    assert from_config(to_config(spec_of("exaone4", **small))) == spec_of("exaone4", **small)
    assert spec_of("exaone4", sliding_window_pattern="LLLG", layer_types=[*LISTED]) == spec_of(
        "exaone4", layer_types=[*LISTED]
    )


def test_gemma3_turns_its_two_kinds_of_layers_differently():
    linear = {"rope_type": "linear", "factor": 8.0}
    full, local = Rope(12, 1_000_000.0, scaling=LinearScaling(8.0)), Rope(12, 10_000.0)
    older = per_layer("gemma3_text", "rope", num_hidden_layers=7, rope_scaling=linear)
    assert older == [local] * 5 + [full, local]
    newer = {
        "full_attention": {"rope_theta": 1_000_000.0, **linear},
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    }
    assert per_layer("gemma3_text", "rope", num_hidden_layers=7, rope_parameters=newer) == older
    assert per_layer("gemma3_text", "rope", rope_local_base_freq=500.0)[0] == Rope(12, 500.0)
    with pytest.raises(SpecError, match="remove one"):
        spec_of("gemma3_text", rope_parameters=newer, rope_scaling=linear)
    with pytest.raises(SpecError, match="rope_parameters has unknown keys: 'rope_type'"):
        spec_of("gemma3_text", rope_parameters={"rope_type": "default"})


def test_gemma3s_two_rotations_are_those_of_transformers():
    linear = {"rope_type": "linear", "factor": 8.0}
    changes = {"rope_scaling": linear, "rope_theta": 50_000.0, "rope_local_base_freq": 2000.0}
    from transformers import CONFIG_MAPPING

    for config in (
        small_config("gemma3_text", **changes),
        to_config(spec_of("gemma3_text", num_hidden_layers=7, **changes)),
    ):
        theirs = CONFIG_MAPPING["gemma3_text"](**config).rope_parameters
        assert theirs["full_attention"] == {"rope_theta": 50_000.0, **linear}
        assert theirs["sliding_attention"] == {"rope_theta": 2000.0, "rope_type": "default"}


def test_olmo3_stretches_its_full_layers_alone():
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    ropes = per_layer("olmo3", "rope", rope_scaling=yarn)
    assert ropes[:3] == [Rope(8, 500_000.0)] * 3
    assert isinstance(ropes[3].scaling, YarnScaling)


def test_gpt_oss_is_stretched_unless_its_config_says_otherwise():
    rope = heads("gpt_oss").rope
    assert rope == Rope(
        12, 150_000.0, scaling=YarnScaling(32.0, 4096, 0.1 * math.log(32) + 1, truncate=False)
    )
    plain = spec_of("gpt_oss", rope_scaling={"rope_type": "default"})
    assert plain.layers[0].attn.rope == Rope(12, 150_000.0)
    assert from_config(to_config(plain)) == plain


def test_opts_positions_begin_at_the_third_row():
    assert spec_of("opt").positions == Learned(64, offset=2)
    assert spec_of("gpt_bigcode").positions == Learned(64)


# --- LongRoPE, alpha, latent scales --------------------------------------------------------------

SHORT, LONG = [1.0, 1.5, 2.0, 4.0], [1.0, 2.0, 8.0, 16.0]


@pytest.mark.parametrize("kind", ["longrope", "yarn"])
@pytest.mark.parametrize("factor", [{}, {"attention_factor": 1.25}])
def test_phi3s_rotation_has_short_and_long_divisors(kind, factor):
    from transformers import CONFIG_MAPPING
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"type": kind, "short_factor": SHORT, "long_factor": LONG, **factor}
    config = small_config("phi3", original_max_position_embeddings=16, rope_scaling=scaling)
    rope = from_config(config).layers[0].attn.rope
    assert rope is not None
    attention_factor = factor.get("attention_factor", math.sqrt(1 + math.log(64 / 16) / math.log(16)))
    assert rope.scaling == LongRope(tuple(SHORT), tuple(LONG), 16, attention_factor)
    older = {**scaling, "type": "su"}
    assert heads("phi3", original_max_position_embeddings=16, rope_scaling=older).rope == rope
    for each in (config, write_config(FAMILIES["phi3"], from_config(config))):
        theirs = CONFIG_MAPPING["phi3"](**{**json.loads(json.dumps(each)), "pad_token_id": None})
        for length, divisors in ((16, SHORT), (17, LONG)):
            inv_freq, scale = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=length)
            want = [10_000 ** (-i / 4) / divisor for i, divisor in enumerate(divisors)]
            assert inv_freq.tolist() == pytest.approx(want, rel=1e-6)
            assert scale == attention_factor


def test_equal_divisors_without_a_factor_are_one_list():
    scaling = {"type": "longrope", "short_factor": SHORT, "long_factor": SHORT, "attention_factor": 1.0}
    rope = heads("phi3", rope_scaling=scaling).rope
    assert rope is not None
    assert rope.scaling == FrequencyDivisors(tuple(SHORT))


def test_hunyuans_alpha_raises_the_base():
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    changes = {"head_dim": 12, "rope_scaling": scaling}
    rope = heads("hunyuan_v1_dense", **changes).rope
    assert rope is not None
    assert rope == Rope(12, base=10_000.0 * 1000.0 ** (12 / 10))
    rotary = transformers_model(small_config("hunyuan_v1_dense", **changes)).model.rotary_emb
    inv_freq, _ = rotary.compute_ntk_alpha_rope_parameters(rotary.config)
    assert inv_freq.tolist() == pytest.approx([rope.base ** (-i / 6) for i in range(6)], rel=1e-6)


DEEPSEEK_YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
@pytest.mark.parametrize("mscale", [{"mscale": 0.707, "mscale_all_dim": 0.707}, {"mscale_all_dim": 1.0}, {}])
def test_latent_scores_are_scaled_by_the_square_of_mscale(model_type, mscale):
    changes = {"rope_scaling": {**DEEPSEEK_YARN, **mscale}}
    attn = latent(model_type, **changes)
    growth = 0.1 * mscale.get("mscale_all_dim", 0.0) * math.log(40) + 1
    assert attn.scale == pytest.approx(10**-0.5 * growth**2, rel=1e-15)
    assert [attn.scale] * 4 == attributes(model_type, "scaling", **changes)
    written = write_config(FAMILIES[model_type], spec_of(model_type, **changes))
    again = transformers_model(written).model.layers[0].self_attn.scaling
    assert again == attn.scale


def test_latent_norms_have_an_epsilon_of_their_own():
    attn = latent("deepseek_v3", rms_norm_eps=1e-2)
    assert attn.q_norm == attn.kv_norm == Norm("rms", eps=1e-6)
    modules = transformers_model(small_config("deepseek_v3", rms_norm_eps=1e-2)).model.layers[0].self_attn
    assert modules.kv_a_layernorm.variance_epsilon == 1e-6


def test_latent_queries_may_have_no_rank():
    attn = latent("deepseek_v2", q_lora_rank=None)
    assert (attn.q_rank, attn.q_norm) == (None, None)
    assert (attn.kv_rank, attn.nope_dim, attn.rope_dim, attn.v_dim) == (12, 6, 4, 11)
    with pytest.raises(SpecError, match="num_key_value_heads must be num_attention_heads = 6"):
        latent("deepseek_v3", num_key_value_heads=3)


# --- ALiBi --------------------------------------------------------------------------------------

HEADS = (1, 4, 6, 12, 71, 112)


def slopes(model_type: str, n_heads: int, **changes: Any) -> tuple[float, ...]:
    family = FAMILIES[model_type].spelling
    sizes = {"num_attention_heads": n_heads, "hidden_size": n_heads * 8}
    changes |= {family.get(word, word): size for word, size in sizes.items()}
    alibi = heads(model_type, **changes).alibi
    assert isinstance(alibi, Alibi)
    return alibi.slopes


@pytest.mark.parametrize("n_heads", HEADS)
def test_blooms_slopes_are_those_of_transformers(n_heads):
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)[:, 0, 1]
    assert slopes("bloom", n_heads) == pytest.approx(theirs.tolist(), rel=1e-6)


@pytest.mark.parametrize("n_heads", HEADS)
def test_mpts_slopes_are_those_of_transformers(n_heads):
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = -build_mpt_alibi_tensor(n_heads, 2)[:, 0, 0]
    assert slopes("mpt", n_heads) == pytest.approx(theirs.tolist(), rel=1e-6)


@pytest.mark.parametrize("n_heads", HEADS)
def test_falcons_slopes_are_rounded_to_16_bits_and_scaled(n_heads):
    import torch
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)[:, 0, 1] / math.sqrt(8)
    ours = slopes("falcon", n_heads, alibi=True)
    assert ours == pytest.approx(theirs.tolist(), rel=1e-7)
    assert heads("falcon", alibi=True).rope is None


def test_the_slopes_of_six_heads_are_in_another_order_in_mpt():
    assert slopes("bloom", 6) == (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    assert slopes("mpt", 6) == (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    assert slopes("bloom", 3) == (0.0625, 0.00390625, 0.25)
    assert slopes("mpt", 3) == (0.0625, 0.00390625, 0.25)


@pytest.mark.parametrize(("model_type", "word"), [("bloom", "n_head"), ("mpt", "n_heads")])
def test_heads_without_end_are_refused_before_they_get_slopes(model_type, word):
    width = FAMILIES[model_type].spelling.get("hidden_size", "hidden_size")
    with bounded_work(0.5), pytest.raises(SpecError, match=f"{word} must be at most 65,536"):
        spec_of(model_type, **{word: 10**12, width: 10**12})


# --- experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes", "router"),
    [
        ("mixtral", {}, Router("softmax", True)),
        ("qwen2_moe", {}, Router("softmax", False)),
        ("qwen3_moe", {"norm_topk_prob": True}, Router("softmax", True)),
        ("olmoe", {}, Router("softmax", False)),
        ("granitemoe", {}, Router("chosen_softmax", False)),
        ("gpt_oss", {}, Router("chosen_softmax", False, bias=True)),
        ("minimax_m2", {}, Router("sigmoid", True, correction=True)),
        ("llama4_text", {}, Router("sigmoid", False, on_input=True)),
        ("deepseek_v2", {"routed_scaling_factor": 16.0}, Router("softmax", False, scale=16.0)),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy"},
            Router("softmax", False, groups=Groups(2, 1, "max")),
        ),
        (
            "deepseek_v3",
            {},
            Router("sigmoid", True, correction=True, groups=Groups(2, 1, "top2"), scale=2.5, sum_eps=1e-20),
        ),
        (
            "glm4_moe",
            {"norm_topk_prob": False, "topk_group": 2},
            Router("sigmoid", False, correction=True, sum_eps=1e-20),
        ),
    ],
)
def test_router(model_type, changes, router):
    assert experts(model_type, **changes).router == router


def test_shared_experts():
    silu = Mlp(d_ff=28, activation="silu", gated=True)
    assert experts("qwen2_moe").shared == Shared(silu, gated=True)
    assert experts("qwen3_moe").shared is None
    assert experts("deepseek_v3").shared == Shared(Mlp(d_ff=40, activation="silu", gated=True))
    assert experts("llama4_text").shared == Shared(Mlp(d_ff=20, activation="silu", gated=True))


def test_gpt_oss_clamps_and_shifts_its_gates_and_has_biases_everywhere():
    mixture = experts("gpt_oss")
    assert mixture.expert == Mlp(88, "gelu_quick", True, True, True, clamp=7.0, up_offset=1.0)
    assert heads("gpt_oss").sinks
    assert heads("gpt_oss").o_bias
    with pytest.raises(UnsupportedError, match=r"swiglu_alpha is 1\.0"):
        spec_of("gpt_oss", swiglu_alpha=1.0)


def sparse(model_type: str, **changes: Any) -> list[bool]:
    return [isinstance(block.mlp, Experts) for block in spec_of(model_type, **changes).layers]


def test_which_layers_are_mixtures():
    assert sparse("mixtral") == [True] * 4
    assert sparse("qwen3_moe", decoder_sparse_step=2) == [False, True, False, True]
    assert sparse("qwen3_moe", mlp_only_layers=[0, 2]) == [False, True, False, True]
    assert sparse("deepseek_v3", first_k_dense_replace=3) == [False, False, False, True]
    assert sparse("glm4_moe") == [False, True, True, True]
    assert sparse("llama4_text", interleave_moe_layer_step=2) == [False, True, False, True]
    assert sparse("llama4_text", moe_layers=[0]) == [True, False, False, False]


def test_dense_layers_have_a_width_of_their_own():
    block = first("llama4_text", moe_layers=[1])
    assert isinstance(block.mlp, Mlp)
    assert block.mlp.d_ff == 88
    assert experts("llama4_text", layer=1, moe_layers=[1]).expert.d_ff == 20
    block = first("deepseek_v3")
    assert isinstance(block.mlp, Mlp)
    assert block.mlp.d_ff == 88


def test_llama4s_layers_are_chunked_and_rotated_or_neither():
    attn = spec_of("llama4_text").layers
    assert per_layer("llama4_text", "window") == [Chunk(9)] * 3 + [None]
    assert attn[3].attn.rope is None
    assert attn[3].attn == heads_of_last("llama4_text")
    assert per_layer("llama4_text", "temperature") == [None] * 3 + [QueryTemperature(0.1, 8192)]
    assert [norm is not None for norm in per_layer("llama4_text", "q_norm")] == [True, True, True, False]
    assert per_layer("llama4_text", "temperature", attn_temperature_tuning=False) == [None] * 4
    assert per_layer("llama4_text", "window", attention_chunk_size=None) == [None] * 4


def heads_of_last(model_type: str) -> Attention:
    """No rotation, no window, no norm: what is left of llama's attention, and a temperature."""
    return Attention(6, 3, 12, 12**-0.5, temperature=QueryTemperature(0.1, 8192))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers must hold numbers of layers, from 0 to 3"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers must hold numbers"),
        ("qwen3_moe", {"mlp_only_layers": [0] * 5}, "mlp_only_layers must be a list of at most 4"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer from 1 to 8"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts must be an integer from 1"),
        ("deepseek_v3", {"n_group": 8}, "n_group must leave two experts or more in each group"),
        ("deepseek_v3", {"n_group": 3}, "n_groups must divide n_experts = 8"),
        ("deepseek_v3", {"topk_group": 3}, "topk_group must be at most n_group = 2"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "hold fewer than n_active = 5"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok must not be null"),
        ("deepseek_v2", {"topk_method": "best"}, "topk_method is 'best', which is not supported"),
        (
            "llama4_text",
            {"no_rope_layers": [1, 1, 2, 1]},
            "must be a list of 4 zeros and ones",
        ),
        ("llama4_text", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be an integer from 1"),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size must be an integer from 1"),
        ("gemma2", {"sliding_window": None}, "sliding_window must be a width"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be an integer from 1"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling must be a finite number above 0"),
        ("mpt", {"attn_config": 7}, "unknown keys: 'attn_config'"),
        ("mpt", {"attn_config": {"clip_qkv": "8"}}, r"attn_config\.clip_qkv must be a number"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported"),
    ],
)
def test_a_value_that_cannot_be_is_named(model_type, changes, message):
    with pytest.raises(SpecError, match=message):
        spec_of(model_type, **changes)


def test_sizes_without_end_are_answered():
    huge = {"num_local_experts": 10**12, "num_experts_per_tok": 10**9, "intermediate_size": 10**12}
    with bounded_work(0.5):
        mixture = experts("mixtral", **huge)
    assert (mixture.n_experts, mixture.n_active, mixture.expert.d_ff) == (10**12, 10**9, 10**12)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "feature"), NOT_YET.items())
def test_a_family_that_no_spec_can_say_is_refused_with_what_it_has(model_type, feature):
    with pytest.raises(UnsupportedError) as caught:
        from_config({"model_type": model_type})
    assert str(caught.value) == f"config.model_type {model_type!r} is not supported: it has {feature}"
    assert model_type not in FAMILIES


@pytest.mark.parametrize(
    ("model_type", "changes", "feature"),
    [
        ("opt", {"word_embed_proj_dim": 32}, "projections after the embedding"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "residuals that are taken after the norm",
        ),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln is True"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi is False"),
        ("mpt", {"no_bias": False}, "no_bias is False"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention to what follows"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block is False"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla is True"),
        ("minimax_m2", {"shared_intermediate_size": 512}, "shared_intermediate_size is 512"),
    ],
)
def test_a_feature_that_no_spec_can_say_is_refused_by_name(model_type, changes, feature):
    with pytest.raises(UnsupportedError, match=feature):
        spec_of(model_type, **changes)


def test_opt_may_name_its_width_again():
    assert spec_of("opt", word_embed_proj_dim=48) == spec_of("opt")


# --- other names, and configs within configs ----------------------------------------------------


def test_a_key_may_have_another_name():
    plain = {"hidden_size": 48, "n_layer": 4, "n_head": 6}
    older = {"n_embed": 48, "n_layer": 4, "num_attention_heads": 6}
    assert from_config({"model_type": "bloom", **older}) == from_config({"model_type": "bloom", **plain})
    assert spec_of("gpt_oss", num_experts=8, experts_per_token=3) == spec_of("gpt_oss")
    with pytest.raises(SpecError, match=r"num_experts is 9, which is not config\.num_local_experts"):
        spec_of("gpt_oss", num_experts=9)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_aliases_are_those_of_transformers(model_type: str):
    from transformers import CONFIG_MAPPING

    theirs = set(CONFIG_MAPPING[SHAPE_OF.get(model_type, model_type)].attribute_map)
    published = {"n_embed", "experts_per_token", "num_local_experts"}
    assert set(FAMILIES[model_type].aliases) <= theirs | published


@pytest.mark.parametrize("model_type", TEXT_OF)
def test_the_language_model_within_one_that_sees_is_read(model_type):
    text_type, _ = TEXT_OF[model_type]
    text = small_config(text_type)
    whole = {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 7}}
    assert from_config(whole) == from_config(text)
    assert from_config({**whole, "text_config": {**text, "model_type": text_type}}) == from_config(text)
    tied = from_config(text).head.tied
    assert from_config({**whole, "tie_word_embeddings": not tied}).head.tied is not tied
    assert from_config({"model_type": model_type}) == from_config({"model_type": text_type})


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ({"text_config": 7}, "text_config must be an object"),
        ({"text_config": {"model_type": "llama"}}, "model_type must be 'gemma3_text'"),
        ({"text_config": {"clip_qkv": 1.0}}, "unknown keys: 'clip_qkv'"),
        ({"audio_config": {}}, "unknown keys: 'audio_config'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config\.quant_method is 'gptq'"),
    ],
)
def test_what_is_unclear_around_the_language_model_is_refused(whole, message):
    with pytest.raises(SpecError, match=message):
        from_config({"model_type": "gemma3", **whole})


# --- files as they are published ----------------------------------------------------------------

PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "bigscience/bloom": (
        {
            "apply_residual_connection_post_layernorm": False,
            "architectures": ["BloomForCausalLM"],
            "attention_dropout": 0.0,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_dropout": 0.0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "masked_softmax_fusion": True,
            "model_type": "bloom",
            "n_embed": 14336,
            "n_inner": None,
            "n_layer": 70,
            "num_attention_heads": 112,
            "offset_alibi": 100,
            "pad_token_id": 3,
            "pretraining_tp": 4,
            "seq_length": 2048,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "slow_but_exact": False,
            "unk_token_id": 0,
            "use_cache": True,
            "vocab_size": 250880,
        },
        "bloom-176b",
    ),
    "mosaicml/mpt-7b": (
        {
            "architectures": ["MPTForCausalLM"],
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": 8,
                "attn_impl": "torch",
                "attn_pdrop": 0,
                "attn_type": "multihead_attention",
                "attn_uses_sequence_id": False,
                "clip_qkv": None,
                "prefix_lm": False,
                "qk_ln": False,
                "softmax_scale": None,
            },
            "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"},
            "d_model": 4096,
            "emb_pdrop": 0,
            "embedding_fraction": 1.0,
            "expansion_ratio": 4,
            "init_config": {"name": "kaiming_normal_"},
            "init_device": "cpu",
            "learned_pos_emb": True,
            "logit_scale": None,
            "max_seq_len": 2048,
            "model_type": "mpt",
            "n_heads": 32,
            "n_layers": 32,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
            "resid_pdrop": 0,
            "tokenizer_name": "EleutherAI/gpt-neox-20b",
            "torch_dtype": "bfloat16",
            "use_cache": False,
            "verbose": 0,
            "vocab_size": 50432,
        },
        "mpt-7b",
    ),
    "tiiuae/falcon-7b": (
        {
            "alibi": False,
            "apply_residual_connection_post_layernorm": False,
            "architectures": ["FalconForCausalLM"],
            "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"},
            "bias": False,
            "bos_token_id": 11,
            "eos_token_id": 11,
            "hidden_dropout": 0.0,
            "hidden_size": 4544,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "falcon",
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "num_kv_heads": 71,
            "parallel_attn": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 65024,
        },
        "falcon-7b",
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "bos_token_id": 1,
            "embd_pdrop": 0.0,
            "eos_token_id": 32000,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "model_type": "phi3",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 32000,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "sliding_window": 2047,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 32064,
        },
        "phi-3-mini",
    ),
    "google/gemma-2-2b": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "initializer_range": 0.02,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "model_type": "gemma2",
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": 256000,
        },
        "gemma-2-2b",
    ),
    "google/gemma-3-4b-it": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        },
        "gemma-3-4b",
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
            "aux_loss_alpha": 0.001,
            "bos_token_id": 100000,
            "eos_token_id": 100001,
            "first_k_dense_replace": 1,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 10944,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "model_type": "deepseek_v2",
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "pretraining_tp": 1,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "seq_aux": True,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "topk_method": "greedy",
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "v_head_dim": 128,
            "vocab_size": 102400,
        },
        "deepseek-v2-lite",
    ),
    "deepseek-ai/DeepSeek-V3": (
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            "aux_loss_alpha": 0.001,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "ep_size": 1,
            "first_k_dense_replace": 3,
            "hidden_act": "silu",
            "hidden_size": 7168,
            "initializer_range": 0.02,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "model_type": "deepseek_v3",
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "pretraining_tp": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "seq_aux": True,
            "tie_word_embeddings": False,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "v_head_dim": 128,
            "vocab_size": 129280,
        },
        "deepseek-v3",
    ),
    "openai/gpt-oss-20b": (
        {
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": 200002,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "model_type": "gpt_oss",
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "output_router_logits": False,
            "pad_token_id": 199999,
            "quantization_config": {
                "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
                "quant_method": "mxfp4",
            },
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": 201088,
        },
        "gpt-oss-20b",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read_to_the_last_key(name):
    from openbook.spec.presets import preset

    config, as_preset = PUBLISHED[name]
    assert from_config(config) == preset(as_preset)


def test_the_page_about_specs_lists_every_family():
    page = (Path(__file__).parents[2] / "docs" / "spec.md").read_text()
    assert ", ".join(FAMILIES) in " ".join(page.replace(">", " ").split())


def test_hostile_aliases_and_objects_are_one_error():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for config in (
        small_config("gpt_oss", num_experts=deep),
        small_config("mpt", attn_config=deep),
        small_config("mpt", attn_config={7: 7}),
        small_config("qwen3_moe", mlp_only_layers=deep),
        small_config("llama4_text", no_rope_layers=deep),
    ):
        with bounded_work(0.5), pytest.raises(SpecError) as caught:
            from_config(config)
        assert len(str(caught.value)) < 500
    with suppress(SpecError):
        from_config(small_config("gemma3_text", rope_parameters={"full_attention": deep}))
