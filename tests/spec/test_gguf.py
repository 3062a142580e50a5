"""GGUF metadata ⇄ spec: keys held against the gguf package, the meaning against the same model's config."""

import dataclasses
import math
import re
import struct
from contextlib import suppress

import pytest
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES, Keys
from hypothesis import given

from bounded import bounded_work
from gguf_models import metadata, model_type_of, tiny
from openbook.ledger import ledger
from openbook.spec import (
    Attention,
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Mlp,
    ModelSpec,
    Rope,
    SpecError,
    UnsupportedError,
    YarnScaling,
)
from openbook.spec.gguf import (
    ARCHITECTURES,
    BIASES,
    OF_MODEL_TYPE,
    ROPE_TENSORS,
    from_metadata,
    rope_tensors,
    to_metadata,
)
from openbook.spec.gguf.rope import ROPE_FREQS
from openbook.spec.hf import FAMILIES, from_config
from openbook.spec.presets import PRESETS, preset
from openbook.weights.dialects import GGUF, places
from strategies import configs, family_configs, small_config, specs

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 100,
}
QWEN2 = {key.replace("llama", "qwen2"): value for key, value in LLAMA.items()} | {
    "general.architecture": "qwen2"
}
UNTIED = {"token_embd.weight": (100, 64), "output.weight": (100, 64)}


def rope(tensors=None, numbers=None, **keys) -> Rope:
    own = {f"llama.{key.replace('__', '.')}": value for key, value in keys.items()}
    values = None if numbers is None else {ROPE_FREQS: numbers}
    found = from_metadata({**LLAMA, **own}, tensors, values).layers[0].attn.rope
    assert found is not None
    return found


def attentions_of(spec: ModelSpec) -> list[Attention]:
    return [block.attn for block in spec.layers if isinstance(block.attn, Attention)]


def in_32_bits(metadata: dict) -> dict:
    """What a file gives back: every float went through 32 bits."""

    def rounded(value):
        return struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value

    return {key: rounded(value) for key, value in metadata.items()}


def tensors_of(spec: ModelSpec, architecture: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a file of the model."""
    shapes = {row.name: row.shape for row in ledger(spec).tensors if row.tie is None}
    found = {place.stored: place.shape for place in places(spec, shapes, GGUF[architecture])}
    return found | {name: (len(numbers),) for name, numbers in rope_tensors(spec).items()}


def read_back(spec: ModelSpec, model_type: str = "") -> ModelSpec:
    metadata = to_metadata(spec, model_type)
    numbers = {name: in_32_bits(dict(enumerate(values))) for name, values in rope_tensors(spec).items()}
    return from_metadata(
        in_32_bits(metadata),
        tensors_of(spec, metadata["general.architecture"]),
        {name: list(values.values()) for name, values in numbers.items()},
    )


# --- the real file ------------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_from_its_file_is_the_preset(smollm2):
    from openbook.sources import resolve

    source = resolve(smollm2)
    assert source.spec == preset("smollm2-135m")
    assert source.spec.name.lower().startswith("smollm2 135m")


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_key_written_is_one_of_the_gguf_packages(name):
    groups = (Keys.General, Keys.LLM, Keys.Attention, Keys.Rope)
    patterns = {value for group in groups for value in vars(group).values() if isinstance(value, str)}
    known = {pattern.replace("{arch}", name) for pattern in patterns}
    written = to_metadata(tiny(name), name)
    assert name in MODEL_ARCH_NAMES.values()
    assert set(written) <= known


def test_tensor_names_are_the_gguf_packages():
    known = {pattern.replace("blk.{bid}.", "") for pattern in TENSOR_NAMES.values()}
    assert set(BIASES.values()) <= known
    assert {name.removesuffix(".weight") for name in ROPE_TENSORS} <= known
    assert MODEL_ARCH.LLAMA in MODEL_ARCH_NAMES


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_written_is_one_that_the_gguf_package_has_for_the_architecture(name):
    arch = next(arch for arch, text in MODEL_ARCH_NAMES.items() if text == name)
    known = {TENSOR_NAMES[tensor].replace("blk.{bid}.", "") for tensor in MODEL_TENSORS[arch]}
    written = {re.sub(r"^blk\.\d+\.", "", tensor) for tensor in tensors_of(tiny(name), name)}
    assert {tensor.removesuffix(".weight").removesuffix(".bias") for tensor in written} <= known


def test_unknown_key_is_named():
    with pytest.raises(SpecError, match=r"'attention\.clamp_kqv'"):
        from_metadata({**LLAMA, "llama.attention.clamp_kqv": 1.0})
    with pytest.raises(SpecError, match=r"'mamba\.ssm"):
        from_metadata({**LLAMA, "mamba.ssm.state_size": 1})


def test_keys_of_text_file_and_quantisation_are_irrelevant():
    notes = {
        "general.file_type": 3,
        "general.alignment": 32,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.chat_template": "{{ x }}",
        "split.count": 2,
        "quantize.imatrix.file": "x",
        "llama.rope.scaling.finetuned": True,
    }
    assert from_metadata({**LLAMA, **notes}) == from_metadata(LLAMA)


@pytest.mark.parametrize("name", ["../x", "__class__", "clip", "", None, 7, ["llama"]])
def test_unknown_architecture_names_the_supported_ones(name):
    with pytest.raises(SpecError) as caught:
        from_metadata({**LLAMA, "general.architecture": name})
    if isinstance(name, str):
        assert f"supported are {', '.join(ARCHITECTURES)}" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.causal", False),
        ("llama.attention.value_length", 16),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1),
    ],
)
def test_feature_beyond_the_architectures_is_unsupported(key, value):
    with pytest.raises(UnsupportedError, match=key):
        from_metadata({**LLAMA, key: value})


# --- what it means ------------------------------------------------------------------------------


WORKED_EXAMPLES = {"postln-1300", "postln-1300-learned", "triple-norm-512"}
IN_NO_ARCHITECTURE = {"gpt-j-6b", "falcon-rw-1b"} | {name for name in PRESETS if name.startswith("opt-")}
"""llama.cpp has no OPT and no GPT-J, and no ALiBi in Falcon."""

ROUNDED = {"starcoder2-3b"}
"""A base of rotation that has more digits than 32 bits."""


@pytest.mark.parametrize("name", sorted(set(PRESETS) - WORKED_EXAMPLES - IN_NO_ARCHITECTURE - ROUNDED))
def test_preset_survives_a_file_with_its_32_bit_numbers(name):
    assert read_back(preset(name)) == preset(name)


@pytest.mark.parametrize("name", sorted(ROUNDED))
def test_number_of_more_digits_is_rounded_once(name):
    assert read_back(read_back(preset(name))) == read_back(preset(name)) != preset(name)


@pytest.mark.parametrize("name", sorted(IN_NO_ARCHITECTURE))
def test_preset_that_no_architecture_computes_is_refused(name):
    with pytest.raises(UnsupportedError, match="no GGUF architecture"):
        to_metadata(preset(name))


def without_scaling(spec: ModelSpec) -> ModelSpec:
    layers = []
    for block in spec.layers:
        rotation = block.attn.rope and dataclasses.replace(block.attn.rope, scaling=None)
        layers.append(dataclasses.replace(block, attn=dataclasses.replace(block.attn, rope=rotation)))
    return spec.replace(layers=tuple(layers))


@given(configs())
def test_a_model_has_the_same_spec_in_both_formats_or_is_refused(config):
    spec = from_config(config)
    try:
        again = read_back(spec)
    except UnsupportedError:
        return
    assert without_scaling(again) == without_scaling(spec)
    if not rope_tensors(spec):
        for a, b in zip(again.layers, spec.layers, strict=True):
            assert_rope_close(a.attn.rope, b.attn.rope)


FIXED_BY_LLAMA_CPP: dict[str, dict[str, object]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {"num_key_value_heads": 6},
    "gemma2": {"query_pre_attn_scalar": 12},
    "gemma3_text": {"query_pre_attn_scalar": 12},
    "nemotron": {"head_dim": 8},
    "glm": {"head_dim": 8},
    "llama4_text": {"attention_chunk_size": 8192, "max_position_embeddings": 9000},
}
"""What a file has no key for, where a small model has it unlike the published ones: 6 heads, 48 wide."""


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"opt", "gptj"}))
def test_model_of_any_family_has_the_same_spec_in_its_own_architecture(model_type):
    spec = from_config(small_config(model_type, **FIXED_BY_LLAMA_CPP.get(model_type, {})))
    own = OF_MODEL_TYPE.get(model_type, model_type)
    assert to_metadata(spec, model_type)["general.architecture"] == own
    assert read_back(spec, model_type) == spec


@pytest.mark.parametrize("model_type", sorted(FIXED_BY_LLAMA_CPP))
def test_what_llama_cpp_fixes_is_refused_in_the_words_of_the_models_own_architecture(model_type):
    own = OF_MODEL_TYPE.get(model_type, model_type)
    with pytest.raises(UnsupportedError, match=rf"^no GGUF architecture \({own}\) can express"):
        to_metadata(from_config(small_config(model_type)), model_type)


@given(family_configs())
def test_model_of_any_family_means_the_same_in_a_file_or_is_refused(config):
    spec = from_config(config)
    with suppress(UnsupportedError):
        assert read_back(spec, config["model_type"]) == spec


def assert_rope_close(a: Rope | None, b: Rope | None) -> None:
    scaling_a, scaling_b = a and a.scaling, b and b.scaling
    assert type(scaling_a) is type(scaling_b)
    if scaling_a and scaling_b:
        assert dataclasses.astuple(scaling_a) == pytest.approx(dataclasses.astuple(scaling_b), rel=1e-6)


@given(specs())
def test_any_spec_is_held_faithfully_or_refused(spec):
    try:
        to_metadata(spec)
    except UnsupportedError as error:
        message = str(error)
    else:
        message = ""
        assert without_scaling(read_back(spec)) == without_scaling(spec)
    assert not message or message.startswith(f"no GGUF architecture ({', '.join(ARCHITECTURES)}) can express")


def test_head_is_tied_where_the_file_has_no_output_matrix():
    assert not from_metadata(LLAMA, UNTIED).head.tied
    assert from_metadata(LLAMA, {"token_embd.weight": (100, 64)}).head.tied


def test_biases_are_those_of_the_file():
    attentions = attentions_of(from_metadata(LLAMA, {**UNTIED, "blk.1.attn_q.bias": (64,)}))
    assert [attn.q_bias for attn in attentions] == [False, True]
    assert not any(attn.k_bias for attn in attentions)


def test_qwen2_has_its_three_biases_without_being_told():
    block = from_metadata(QWEN2).layers[0]
    assert [getattr(block.attn, f"{part}_bias") for part in "qkvo"] == [True, True, True, False]


def test_head_size_is_not_width_over_heads():
    keys = {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    assert from_metadata({**LLAMA, **keys}).layers[0].attn.head_dim == 32
    assert from_metadata(LLAMA).layers[0].attn.head_dim == 8


def test_sizes_may_vary_by_layer():
    spec = from_metadata(
        {**LLAMA, "llama.feed_forward_length": [128, 96], "llama.attention.head_count_kv": [2, 4]}
    )
    assert [block.mlp.d_ff for block in spec.layers if isinstance(block.mlp, Mlp)] == [128, 96]
    assert [attn.n_kv_heads for attn in attentions_of(spec)] == [2, 4]
    assert read_back(spec) == spec


def test_vocabulary_is_the_embeddings_rows():
    assert from_metadata(LLAMA, UNTIED).vocab_size == 100
    bare = {key: value for key, value in LLAMA.items() if key != "llama.vocab_size"}
    assert from_metadata({**bare, "tokenizer.ggml.tokens": ["a"] * 7}).vocab_size == 7
    with pytest.raises(SpecError, match=r"vocab_size is 100, but token_embd.weight has 90 rows"):
        from_metadata(LLAMA, {"token_embd.weight": (90, 64)})
    with pytest.raises(SpecError, match="no tokens to count"):
        from_metadata(bare)


def test_numbers_kept_in_32_bits_become_the_decimals_they_were():
    assert from_metadata(in_32_bits(LLAMA)).final_norm == from_metadata(LLAMA).final_norm
    odd = from_metadata({**LLAMA, "llama.attention.layer_norm_rms_epsilon": 1e-5 + 1e-12}).final_norm
    assert odd is not None
    assert odd.eps == 1e-5 + 1e-12  # no 32-bit number, so it is left alone


def test_windows_on_all_layers_or_by_pattern():
    def windows(**keys):
        own = {f"llama.attention.{key}": value for key, value in keys.items()}
        return [block.attn.window for block in from_metadata({**LLAMA, **own}).layers]

    assert windows(sliding_window=4) == [4, 4]
    assert windows(sliding_window=4, sliding_window_pattern=[False, True]) == [None, 4]
    assert windows(sliding_window=0) == [None, None]


def test_name_is_fit_to_be_printed():
    hostile = "a\x1b]0;b\x07\r\nc" + "d" * 1000
    assert from_metadata({**LLAMA, "general.name": hostile}).name == "a]0;bc" + "d" * 114


def test_gemma3_slides_five_layers_of_six_with_a_base_of_their_own():
    layers = tiny("gemma3").layers
    assert [block.attn.window for block in layers] == [7] * 5 + [None, 7]
    assert [block.attn.rope and block.attn.rope.base for block in layers] == [1e4] * 5 + [1e6, 1e4]


def test_experts_are_refused_where_the_architecture_has_none():
    with pytest.raises(UnsupportedError, match=r"gemma\.expert_count is 8"):
        tiny("gemma", expert_count=8)
    with pytest.raises(SpecError, match=r"llama\.expert_used_count is missing"):
        from_metadata({**LLAMA, "llama.expert_count": 8})
    with pytest.raises(SpecError, match=r"expert_used_count must be an integer from 1 to 5"):
        tiny("llama", expert_used_count=6)


@pytest.mark.parametrize(
    ("key", "value"),
    [("expert_gating_func", 2), ("expert_weights_norm", True), ("expert_weights_scale", 2.5)],
)
def test_what_an_architecture_does_not_do_to_its_experts_is_refused(key, value):
    with pytest.raises(UnsupportedError, match=key):
        tiny("olmoe", **{key: value})


# --- rotary positions ---------------------------------------------------------------------------


def test_llama_files_are_half_split_once_their_rows_are_put_back():
    assert rope() == Rope(8, base=10_000.0, layout="half")


def test_linear_scaling_needs_no_type_and_has_an_older_key():
    assert rope(rope__scaling__factor=4.0).scaling == LinearScaling(4.0)
    assert rope(rope__scale_linear=4.0).scaling == LinearScaling(4.0)
    assert rope(rope__scaling__type="none", rope__scaling__factor=4.0).scaling is None
    assert rope(rope__scaling__factor=0.0).scaling is None


def test_yarn_multiplies_its_own_factor_into_the_files():
    own = 0.1 * math.log(4) + 1
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    assert rope(**keys).scaling == YarnScaling(4.0, original_positions=256, attention_factor=own)
    halved = rope(**keys, rope__scaling__attn_factor=0.5, rope__scaling__original_context_length=64).scaling
    assert halved == YarnScaling(4.0, original_positions=64, attention_factor=0.5 * own)
    with pytest.raises(SpecError, match="factor is missing"):
        rope(rope__scaling__type="yarn")


def test_longrope_needs_its_numbers():
    with pytest.raises(SpecError, match="longrope, which needs rope_factors_short"):
        rope(rope__scaling__type="longrope")
    numbers = {
        "rope_factors_short.weight": [1.0, 1.05, 1.25],
        "rope_factors_long.weight": [1.0, 2, 8],
    }
    keys = metadata("phi3", **{"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.19})
    found = from_metadata(keys, dict.fromkeys(numbers, (3,)), numbers).layers[0].attn.rope
    assert found is not None
    assert found.scaling == LongRope((1.0, 1.05, 1.25), (1.0, 2.0, 8.0), 64, 1.19)


def test_rope_freqs_of_llama_31_are_recognised():
    spec = preset("llama-3.1-8b")
    numbers = rope_tensors(spec)[ROPE_FREQS]
    assert len(numbers) == 64
    assert numbers[:29] == pytest.approx([1.0] * 29)
    assert (numbers[29], numbers[34]) == pytest.approx((1.20748387, 5.25732659))
    assert numbers[35:] == pytest.approx([8.0] * 29)
    in_file = [struct.unpack("<f", struct.pack("<f", number))[0] for number in numbers]
    again = from_metadata(to_metadata(spec), tensors_of(spec, "llama"), {ROPE_FREQS: in_file})
    assert again.layers[0].attn.rope == spec.layers[0].attn.rope


def test_rope_freqs_of_llama_32_keep_15_divide_14_and_blend_3():
    numbers = rope_tensors(preset("llama-3.2-1b"))[ROPE_FREQS]
    kinds = ["kept" if n < 1.000001 else "divided" if n > 31.9999 else "blended" for n in numbers]
    assert [kinds.count(kind) for kind in ("kept", "blended", "divided")] == [15, 3, 14]


def test_rope_freqs_are_the_frequencies_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = Llama3Scaling(8.0, 1.0, 4.0, original_positions=64)
    spec = from_config({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2})
    rotation = Rope(32, base=500_000.0, scaling=scaling)
    block = dataclasses.replace(spec.layers[0], attn=dataclasses.replace(spec.layers[0].attn, rope=rotation))
    numbers = rope_tensors(spec.replace(layers=(block,)))[ROPE_FREQS]
    hf_scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        rope_parameters={**hf_scaling, "rope_theta": 500_000.0, "original_max_position_embeddings": 64},
    )
    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    ours = [500_000.0 ** (-2 * i / 32) / numbers[i] for i in range(16)]
    assert inv_freq.tolist() == pytest.approx(ours, rel=1e-5)


def test_other_rope_freqs_are_kept_as_numbers():
    tensors = {**UNTIED, ROPE_FREQS: (4,)}
    assert rope(tensors, [1.0, 2.0, 3.0, 4.0]).scaling == FrequencyDivisors((1.0, 2.0, 3.0, 4.0))
    assert rope(tensors, [1.0, 1.0, 1.0, 1.0]).scaling is None


@pytest.mark.parametrize(
    "numbers", [None, [], [1.0] * 3, [1.0, 0.0, 1.0, 1.0], [1.0, math.nan, 1.0, 1.0], [-1.0] * 4]
)
def test_rope_freqs_must_be_there_and_make_sense(numbers):
    with pytest.raises(SpecError, match=r"rope_freqs\.weight"):
        rope({**UNTIED, ROPE_FREQS: (4,)}, numbers)


# --- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "feature"),
    [
        ("triple-norm-512", {}, "layers.0.end_norm = Norm("),
        ("gpt2", {"final_norm": None}, "final_norm = None"),
    ],
)
def test_what_no_architecture_can_hold_is_named(name, change, feature):
    with pytest.raises(UnsupportedError) as caught:
        to_metadata(preset(name).replace(**change))
    assert feature in str(caught.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_writes_what_it_reads(name):
    written = to_metadata(tiny(name), model_type_of(name))
    assert written["general.architecture"] == name
    assert read_back(tiny(name), model_type_of(name)) == tiny(name)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("gpt2", "gpt2"), ("qwen3-0.6b", "qwen3"), ("qwen2.5-0.5b", "qwen2"), ("mistral-7b", "llama")],
)
def test_architecture_follows_what_the_model_is(name, architecture):
    assert to_metadata(preset(name))["general.architecture"] == architecture


def test_architecture_of_the_model_type_comes_first_if_it_can_hold_the_model():
    spec = tiny("seed_oss")
    assert to_metadata(spec)["general.architecture"] == "llama"
    assert to_metadata(spec, "seed_oss")["general.architecture"] == "seed_oss"
    assert to_metadata(spec, "gpt_neox")["general.architecture"] == "llama"
    assert to_metadata(spec, "arcee")["general.architecture"] == "llama"


def test_a_model_that_no_architecture_is_for_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="no architecture for 'opt' models"):
        to_metadata(preset("opt-125m"), "opt")


def test_which_gelu_a_model_has_is_noted_where_its_architecture_has_the_other():
    """llama.cpp computes the approximation of both; Pythia has the exact one, GPT-NeoX-20B has not."""
    assert to_metadata(preset("gpt-neox-20b"))["openbook.activation"] == "gelu_tanh"
    assert "openbook.activation" not in to_metadata(preset("pythia-70m"))
    with pytest.raises(SpecError, match=r"openbook\.activation must be"):
        from_metadata({**LLAMA, "openbook.activation": "gelu"})


# --- hostile values -----------------------------------------------------------------------------

BOMBS = [
    {"llama.block_count": 0},
    {"llama.block_count": 2**31},
    {"llama.block_count": -1},
    {"llama.block_count": "2"},
    {"llama.block_count": [2]},
    {"llama.block_count": True},
    {"llama.block_count": None},
    {"llama.context_length": 0},
    {"llama.embedding_length": 0},
    {"llama.embedding_length": 63},
    {"llama.attention.head_count": 0},
    {"llama.attention.head_count": [8]},
    {"llama.attention.head_count": [8, 0]},
    {"llama.attention.head_count": [8, True]},
    {"llama.attention.head_count": [8, 4]},
    {"llama.attention.head_count": "8"},
    {"llama.attention.head_count_kv": 0},
    {"llama.attention.head_count_kv": 3},
    {"llama.attention.head_count_kv": 16},
    {"llama.attention.layer_norm_rms_epsilon": math.nan},
    {"llama.attention.layer_norm_rms_epsilon": -1.0},
    {"llama.rope.dimension_count": 7},
    {"llama.rope.dimension_count": 16},
    {"llama.rope.dimension_count": 4},
    {"llama.rope.freq_base": 0.0},
    {"llama.rope.freq_base": math.inf},
    {"llama.rope.scaling.factor": -1.0},
    {"llama.rope.scaling.type": 3},
    {"llama.attention.key_length": 7},
    {"llama.attention.sliding_window": -1},
    {"llama.attention.sliding_window_pattern": -2},
    {"llama.attention.sliding_window_pattern": [1, 0]},
    {"llama.vocab_size": 0},
    {7: 7},
    {"llama." + "x" * 10**6: 1},
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: repr(bomb)[:60])
def test_hostile_metadata_is_one_short_error_at_once(bomb):
    with bounded_work(0.5), pytest.raises(SpecError) as caught:
        from_metadata({**LLAMA, **bomb})
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "key", [key for key in LLAMA if key not in ("llama.vocab_size", "llama.attention.head_count_kv")]
)
def test_every_size_must_be_given(key):
    with pytest.raises(SpecError, match=key.removeprefix("general.")):
        from_metadata({k: v for k, v in LLAMA.items() if k != key})


def test_absent_kv_heads_are_as_many_as_heads():
    bare = {key: value for key, value in LLAMA.items() if key != "llama.attention.head_count_kv"}
    assert [(attn.n_heads, attn.n_kv_heads) for attn in attentions_of(from_metadata(bare))] == [(8, 8)] * 2
