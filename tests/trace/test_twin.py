"""Every traced tensor is what an independent computation gives of the recorded tensors before it."""

from pathlib import Path

import pytest
import torch
import transformers

from checkpoints import FAMILIES, SIZES
from openbook.infer import Cache
from openbook.ledger import Workload, ledger
from openbook.spec.hf import from_config
from openbook.spec.model import ModelSpec
from openbook.trace import record
from openbook.weights.load import load_decoder
from twin import Twin
from variants import VARIANTS, noisy_decoder, random_ids

BATCH, NEW = 2, 13

CONFIGS = {name: FAMILIES[name] for name in ("gpt2", "llama", "gemma3_text", "mixtral", "deepseek_v3")}
CONFIGS["qwen3"] = SIZES


def specs() -> dict[str, ModelSpec]:
    """The tiny models of six families, and every variant."""
    found = {}
    for family, sizes in CONFIGS.items():
        config = transformers.AutoConfig.for_model(family, **sizes).to_dict()
        found[family] = from_config(config)
    return found | {f"variant {name}": spec for name, spec in VARIANTS.items()}


SPECS = specs()


def assert_all_as_computed(twin: Twin, allowed: float = 3e-6) -> None:
    """Within `allowed`, a part of the step's largest number: fp32 rounds to 6e-8, and many of that add up."""
    names = []
    for name, computed in twin.steps():
        names.append(name)
        found = twin.trace.tensor(name).double()
        assert found.shape == computed.shape, name
        hidden = computed.isinf()
        assert torch.equal(found.isinf(), hidden), name
        found, computed = found.masked_fill(hidden, 0), computed.masked_fill(hidden, 0)
        error = (found - computed).abs().max() / computed.abs().max().clamp(min=1e-3)
        assert error < allowed, (name, float(error))
    assert names == list(twin.trace.tensors)


@pytest.mark.parametrize("name", SPECS)
def test_every_step_is_what_its_formula_makes_of_the_steps_before_it(name: str):
    decoder = noisy_decoder(SPECS[name])
    trace = record(decoder, random_ids(decoder.spec, BATCH, NEW))
    assert_all_as_computed(Twin(trace))


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", "variant latent"])
def test_steps_after_a_cache_follow_from_the_cached_tokens_steps_too(name: str):
    decoder = noisy_decoder(SPECS[name])
    if name == "variant latent":  # without the layer whose window forgets
        decoder = noisy_decoder(ModelSpec(131, 52, 64, decoder.spec.layers[::3], decoder.spec.head))
    ids, cache = random_ids(decoder.spec, BATCH, NEW), Cache(decoder.spec, BATCH, NEW)
    before = record(decoder, ids[:, :9], cache=cache)
    after = record(decoder, ids[:, 9:], cache=cache)
    latent = {"deepseek_v3", "variant latent"}
    assert ("layers.0.attn.q_absorb" in after) == (name in latent)
    assert_all_as_computed(Twin(after, before))


@pytest.mark.model
def test_every_step_of_smollm2_is_what_its_formula_makes_of_the_steps_before_it(smollm2: Path):
    trace = record(load_decoder(smollm2, "fp32"), torch.tensor([[504, 3575, 282, 4649, 314]]))
    assert_all_as_computed(Twin(trace), allowed=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_a_familys_steps_are_the_ledgers_and_its_logits_those_of_a_run_nobody_looks_at(family: str):
    decoder = noisy_decoder(SPECS[family])
    ids = random_ids(decoder.spec, BATCH, NEW)
    before = decoder(ids)
    trace = record(decoder, ids)
    rows = ledger(decoder.spec, "fp32").ops(Workload("prefill", BATCH, NEW, last_only=False))
    assert [(step.name, step.shape) for step in trace] == [(row.name, row.out_shape) for row in rows]
    assert torch.equal(trace.tensor("head"), before)
    assert torch.equal(decoder(ids), before)
