"""transformers' steps under our names, on random tiny checkpoints of families that differ in how they are
written."""

import pytest
import torch

from checkpoints import FAMILIES
from openbook.spec.reader import UnsupportedError
from openbook.trace import diff, record
from openbook.trace.hf import load_transformers, record_transformers
from openbook.trace.schema import local_name

ROWS_OF_EXPERTS = {f"mlp.experts.{part}" for part in ("gate", "up", "act", "down")}

UNSEEN = {
    "gpt_neox": {"attn_add"},  # a parallel block has no such tensor
    "olmo": {"attn_add"},  # what reads it is a norm without weights, and so without a name
    "mixtral": ROWS_OF_EXPERTS,
    "qwen3_moe": ROWS_OF_EXPERTS,
    "deepseek_v3": ROWS_OF_EXPERTS,
}
"""Steps for which transformers has no tensor that can be told."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_is_recorded_in_our_order_and_shape(checkpoint, family: str):
    ours, theirs = checkpoint(family).our_trace(), checkpoint(family).their_trace()
    seen = [(step.name, step.axes, step.shape) for step in ours if step.name in theirs]
    assert [(step.name, step.axes, step.shape) for step in theirs] == seen
    assert {local_name(step.name) for step in ours if step.name not in theirs} == UNSEEN.get(family, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_of_the_same_checkpoint_differs(checkpoint, family: str):
    report = diff(checkpoint(family).our_trace(), checkpoint(family).their_trace())
    assert (report.first, report.missing) == (None, [])
    assert max(row.relative for row in report.rows) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text"])
def test_as_many_tokens_as_heads_are_told_apart(checkpoint, family: str):
    made = checkpoint(family)
    for n in {made.ours.spec.layers[0].attn.n_heads, made.ours.spec.layers[0].attn.n_kv_heads}:
        ids = made.ids[:, :n]
        theirs = record_transformers(made.theirs, made.ours.spec, ids)
        report = diff(record(made.ours, ids), theirs)
        assert (report.first, report.missing) == (None, [])
        assert theirs.tensor("head").shape[1] == theirs.ids.shape[1] == n


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "deepseek_v3"])
def test_the_head_step_is_the_logits_and_nothing_is_left_behind(checkpoint, family: str):
    made = checkpoint(family)
    model, ids = made.theirs, made.ids
    before = hooks(model)
    logits = record_transformers(model, made.ours.spec, ids).tensor("head")
    assert torch.equal(logits, model(ids, use_cache=False).logits)
    assert hooks(model) == before


def hooks(model: torch.nn.Module) -> list[tuple[int, int]]:
    """How many there are on each module: transformers leaves its own where hidden states were asked for."""
    return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gpt_neox", "deepseek_v3"])
def test_weights_are_handed_out_under_our_names_and_in_our_arrangement(checkpoint, family: str):
    ours = dict(checkpoint(family).ours.named_parameters(remove_duplicate=False))
    theirs = checkpoint(family).their_trace().parameters
    assert theirs.keys() <= ours.keys()
    assert all(torch.equal(values, ours[name]) for name, values in theirs.items())
    assert all(".experts." in name for name in ours.keys() - theirs.keys())


def test_only_what_is_asked_for_is_kept(checkpoint):
    made = checkpoint("llama")
    trace = record_transformers(
        made.theirs, made.ours.spec, made.ids, only=lambda name: "layers.1.mlp" in name
    )
    assert {step.layer for step in trace} == {1}
    assert "layers.1.mlp.act" in trace


def test_a_model_without_a_table_is_refused_by_name(checkpoint, monkeypatch):
    made = checkpoint("llama")
    monkeypatch.setattr(made.theirs.config, "model_type", "wonder", raising=False)
    with pytest.raises(UnsupportedError, match="'wonder'"):
        record_transformers(made.theirs, made.ours.spec, made.ids)


def test_no_code_of_a_folder_is_run_and_no_pickle_opened(tmp_path, monkeypatch):
    """What `load_transformers` asks of transformers, whatever a config says."""
    import transformers

    asked = {}
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda folder, **options: asked.update(options) or torch.nn.Identity(),
    )
    load_transformers(tmp_path)
    assert (asked["trust_remote_code"], asked["use_safetensors"], asked["local_files_only"]) == (
        False,
        True,
        True,
    )
    assert asked["attn_implementation"] == "eager"
