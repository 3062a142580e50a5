"""What a person may write for a step: our name, TransformerLens's, a pattern; and what is said of others."""

import pytest

from openbook.infer.sample import RequestError
from openbook.trace import Trace, UnknownStepError, record
from openbook.trace.names import BLOCK, OUTER, aliases, canonical, selected
from variants import VARIANTS, noisy_decoder, random_ids


def trace_of(name: str, only=None) -> Trace:
    decoder = noisy_decoder(VARIANTS[name])
    return record(decoder, random_ids(decoder.spec, 1, 4), only=only)


@pytest.mark.parametrize(
    ("model", "theirs", "ours"),
    [
        ("llama", "hook_embed", "embed"),
        ("llama", "blocks.0.hook_resid_pre", "embed"),
        ("gpt2", "hook_pos_embed", "positions"),
        ("gpt2", "blocks.0.hook_resid_pre", "positions"),
        ("alibi", "blocks.0.hook_resid_pre", "embed_norm"),
        ("llama", "blocks.2.hook_resid_pre", "layers.1.mlp_add"),
        ("llama", "blocks.2.hook_resid_mid", "layers.2.attn_add"),
        ("llama", "blocks.2.hook_resid_post", "layers.2.mlp_add"),
        ("post-norm", "blocks.1.hook_resid_pre", "layers.0.mlp_add_norm"),
        ("sandwich", "blocks.1.hook_resid_post", "layers.1.end_norm"),
        ("llama", "blocks.1.hook_attn_out", "layers.1.attn.o"),
        ("sandwich", "blocks.1.hook_attn_out", "layers.1.attn_out_norm"),
        ("llama", "blocks.1.hook_mlp_out", "layers.1.mlp.down"),
        ("sandwich", "blocks.1.hook_mlp_out", "layers.1.mlp_out_norm"),
        ("experts", "blocks.1.hook_mlp_out", "layers.1.mlp.experts.sum"),
        ("routers", "blocks.0.hook_mlp_out", "layers.0.mlp.shared_add"),
        ("llama", "blocks.1.ln1.hook_normalized", "layers.1.attn_norm"),
        ("llama", "blocks.1.ln2.hook_normalized", "layers.1.mlp_norm"),
        ("llama", "ln_final.hook_normalized", "final_norm"),
        ("qwen3", "blocks.1.attn.hook_q", "layers.1.attn.q"),
        ("llama", "blocks.1.attn.hook_k", "layers.1.attn.k"),
        ("llama", "blocks.1.attn.hook_v", "layers.1.attn.v"),
        ("llama", "blocks.1.attn.hook_rot_q", "layers.1.attn.q_rope"),
        ("llama", "blocks.1.attn.hook_rot_k", "layers.1.attn.k_rope"),
        ("llama", "blocks.1.attn.hook_attn_scores", "layers.1.attn.masked"),
        ("llama", "blocks.1.attn.hook_pattern", "layers.1.attn.probs"),
        ("llama", "blocks.1.attn.hook_z", "layers.1.attn.mix"),
        ("llama", "blocks.1.mlp.hook_pre", "layers.1.mlp.gate"),
        ("llama", "blocks.1.mlp.hook_pre_linear", "layers.1.mlp.up"),
        ("gpt2", "blocks.1.mlp.hook_pre", "layers.1.mlp.up"),
        ("llama", "blocks.1.mlp.hook_post", "layers.1.mlp.act"),
        ("experts", "blocks.1.mlp.hook_expert_weights", "layers.1.mlp.chosen"),
        ("llama", "unembed", "head"),
    ],
)
def test_transformerlens_names_mean_our_steps(model: str, theirs: str, ours: str):
    trace = trace_of(model)
    assert canonical(trace.spec, theirs, trace.axes) == ours
    assert trace.tensor(theirs) is trace.tensor(ours) or theirs.endswith("hook_attn_scores")


@pytest.mark.parametrize("name", VARIANTS)
def test_every_alias_of_a_model_names_a_step_that_it_has(name: str):
    trace = trace_of(name)
    found = aliases(trace.spec, frozenset(trace.axes))
    assert set(found.values()) <= set(trace.axes)
    assert {theirs.split(".", 2)[2] for theirs in found if theirs.startswith("blocks.")} <= set(BLOCK)
    assert {theirs for theirs in found if not theirs.startswith("blocks.")} <= set(OUTER)


# --- patterns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only", "kept"),
    [
        ("head", ["head"]),
        ("layers.1.attn.q*", ["layers.1.attn.q", "layers.1.attn.q_rope"]),
        (["*.attn_add", "unembed"], ["layers.0.attn_add", "layers.1.attn_add", "layers.2.attn_add", "head"]),
        ("blocks.*.hook_resid_pre", ["embed", "layers.0.mlp_add", "layers.1.mlp_add"]),
        ("layers.[02].mlp_norm", ["layers.0.mlp_norm", "layers.2.mlp_norm"]),
        (lambda name: name.endswith("mlp.up"), [f"layers.{i}.mlp.up" for i in range(3)]),
    ],
)
def test_a_selection_keeps_what_it_names(only, kept: list[str]):
    assert list(trace_of("llama", only).tensors) == kept


def test_no_selection_keeps_everything():
    trace = trace_of("llama")
    assert set(trace.tensors) == set(trace.axes)
    assert selected(trace.spec, None, trace.axes) is None


# --- what there is not --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("layers.1.attn.qq", "near it: layers.1.attn.q"),
        ("layers.7.attn.q", "near it: layers"),
        ("blocks.1.attn.hook_patern", "near it: blocks.1.attn.hook_pattern"),
        ("zzzzzzzz", "there are embed, layers.0.attn_norm"),
        ("\x1b[31m\n" * 50, r"no step '\\x1b\[31m\\n"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_names_near_it(name: str, says: str):
    trace = trace_of("llama")
    with pytest.raises(UnknownStepError, match=says) as found:
        trace.tensor(name)
    assert isinstance(found.value, KeyError | RequestError)
    assert len(str(found.value)) < 300


def test_a_step_that_was_not_kept_is_told_from_one_that_is_not_there():
    trace = trace_of("llama", "head")
    with pytest.raises(UnknownStepError, match=r"layers.1.attn.q was not kept"):
        trace.step("blocks.1.attn.hook_q")


@pytest.mark.parametrize("pattern", ["layers.1.attn.x*", "*" * 201, "a" * 1000])
def test_a_pattern_that_no_step_matches_is_an_error(pattern: str):
    with pytest.raises(UnknownStepError, match="only: "):
        trace_of("llama", pattern)
