"""What each step computes, in one line."""

import pytest

import variants
from openbook.serve.formulas import describe
from openbook.spec.presets import PRESETS, preset
from openbook.trace.flow import inputs
from openbook.trace.rows import op_rows

KINDS = {"embedding", "norm", "linear", "rope", "scale", "scores", "mask", "softmax", "mix", "add", "act"}
KINDS |= {"choice"}


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_every_step_of_every_variant_has_a_kind_a_formula_and_its_inputs(name: str):
    spec = variants.VARIANTS[name]
    names = {row.name for row in op_rows(spec, "fp32", 1, 7)}
    for row in op_rows(spec, "fp32", 1, 7):
        said = describe(spec, row.name)
        assert said.kind in KINDS
        assert said.formula
        assert set(said.inputs) <= names
        assert said.inputs == inputs(spec, row.name) or "absorb" in str(inputs(spec, row.name))


@pytest.mark.parametrize("name", PRESETS)
def test_every_step_of_a_published_model_has_a_formula(name: str):
    spec = preset(name)
    kinds = {describe(spec, row.name).kind for row in op_rows(spec, "bf16", 1, 3) if row.layer in (None, 0)}
    assert {"embedding", "linear", "scores", "mask", "softmax", "mix", "add", "act"} <= kinds


@pytest.mark.parametrize(
    ("model", "step", "formula"),
    [
        ("llama", "layers.1.attn_norm", "x / √(mean(x²) + 1e-05) · w"),
        ("gpt2", "layers.1.attn_norm", "(x − mean(x)) / √(var(x) + 1e-05) · w + b"),
        ("llama", "layers.0.attn.q", "attn_norm · Wᵀ"),
        ("gpt2", "layers.0.attn.q", "attn_norm · Wᵀ + b"),
        ("llama", "layers.0.attn.q_rope", "rotate(q, position · θ), θᵢ = 10000^(−2i/6), pairs i and i + 3"),
        ("llama", "layers.0.attn.probs", "softmax(masked)"),
        ("windows", "layers.0.attn.masked", "scores where key ≤ query and query − key < 5, else −∞"),
        ("windows", "layers.1.attn.masked", "scores where key ≤ query, else −∞"),
        ("llama", "layers.0.attn.mix", "probs · v, query head h with key/value head ⌊h / 4⌋"),
        ("llama", "layers.0.attn_add", "x + o"),
        ("llama", "layers.0.mlp.act", "silu(gate) · up"),
        ("gpt2", "layers.0.mlp.act", "gelu_tanh(up)"),
        ("llama", "layers.0.mlp.down", "act · Wᵀ"),
        ("llama", "head", "final_norm · Wᵀ"),
        ("qwen3", "head", "final_norm · Wᵀ, W the embedding's"),
        ("qwen3", "layers.0.attn.q_norm", "q / √(mean(q²) + 1e-05) · w, in each head"),
        ("qwen3", "layers.0.attn.k_norm", "k / √(mean(k²) + 1e-05) · w, in each head"),
        ("latent", "layers.0.attn.o", "mix · Wᵀ + b"),
        ("latent", "layers.0.attn.mix", "probs · v, v the values of kv_up"),
        (
            "latent", "layers.1.attn.scores",
            "(q, q_rope) · (k, k_rope)ᵀ · 0.6, q the own part of q, k the keys of kv_up",
        ),
        ("sinks", "layers.0.attn.probs", "softmax(masked, sink), without the sink's share"),
    ],
)  # fmt: skip
def test_a_formula_says_what_the_spec_says(model: str, step: str, formula: str):
    assert describe(variants.VARIANTS[model], step).formula == formula


def test_a_step_that_the_model_has_not_is_an_error():
    with pytest.raises(KeyError):
        describe(variants.VARIANTS["llama"], "layers.0.attn.sinks")


def test_a_latent_models_scores_read_the_steps_of_a_pass_without_a_cache():
    spec = variants.VARIANTS["latent"]
    parts = [f"layers.0.attn.{part}" for part in ("q_up", "kv_up", "q_rope", "k_rope")]
    assert describe(spec, "layers.0.attn.scores").inputs == tuple(parts)
    assert describe(spec, "layers.2.attn.scores").inputs == ("layers.2.attn.q", "layers.2.attn.kv_up")
    assert describe(spec, "layers.0.attn.o").inputs == ("layers.0.attn.mix",)
