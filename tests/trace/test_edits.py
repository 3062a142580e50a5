"""Edited steps and ablated heads: the run goes on with what an edit has made, and with nothing else."""

import pytest
import torch
from torch import Tensor

from openbook.infer.sample import RequestError
from openbook.model import Decoder, ExplicitCore
from openbook.trace import UnknownStepError, record
from twin import Twin
from variants import VARIANTS, noisy_decoder, random_ids

BATCH, NEW = 2, 11


def uneven(x: Tensor) -> Tensor:
    """Every number changed by another factor, so that no two places can be exchanged unseen."""
    return x * torch.linspace(0.8, 1.2, x.numel(), dtype=x.dtype).reshape(x.shape)


@pytest.mark.parametrize("name", VARIANTS)
def test_with_every_step_edited_each_follows_from_the_edited_ones_before_it(name: str):
    decoder = noisy_decoder(VARIANTS[name])
    ids = random_ids(decoder.spec, BATCH, NEW)
    trace = record(decoder, ids, patch=dict.fromkeys(record(decoder, ids).tensors, uneven))
    assert all(step.edited for step in trace)
    for step, computed in Twin(trace).steps():
        found, expected = trace.tensor(step).double(), uneven(computed)
        hidden = expected.isinf()
        assert torch.equal(found.isinf(), hidden), step
        error = (found - expected).masked_fill(hidden, 0).abs().max()
        assert error <= 3e-6 * expected.masked_fill(hidden, 0).abs().max().clamp(min=1e-3), step


@pytest.mark.parametrize("name", ["llama", "experts", "latent", "sinks", "parallel"])
def test_an_edit_changes_what_reads_it_and_nothing_before_it(name: str):
    decoder = noisy_decoder(VARIANTS[name])
    ids = random_ids(decoder.spec, BATCH, NEW)
    plain = record(decoder, ids)
    for step in ("layers.1.attn.scores", "layers.1.attn.o", "layers.1.mlp_add"):
        trace = record(decoder, ids, only=lambda name: True, patch={step: lambda x: x * 1.5})
        names = list(trace.tensors)
        at = names.index(step)
        assert all(torch.equal(trace.tensor(n), plain.tensor(n)) for n in names[:at])
        assert torch.equal(trace.tensor(step), plain.tensor(step) * 1.5)
        assert not torch.equal(trace.tensor("head"), plain.tensor("head"))
        assert [s.name for s in trace if s.edited] == [step]


def test_an_edit_that_changes_nothing_leaves_the_logits_bit_for_bit_but_in_the_core():
    decoder = noisy_decoder(VARIANTS["experts"])
    ids = random_ids(decoder.spec, BATCH, NEW)
    plain = record(decoder, ids)
    inside = (".scores", ".masked", ".probs")
    outside = [n for n in plain.tensors if not n.endswith(inside) and ".experts." not in n]
    trace = record(decoder, ids, patch=dict.fromkeys(outside, lambda x: x))
    assert torch.equal(trace.tensor("head"), plain.tensor("head"))
    rest = [n for n in plain.tensors if n not in outside]
    trace = record(decoder, ids, patch=dict.fromkeys(rest, lambda x: x))
    torch.testing.assert_close(trace.tensor("head"), plain.tensor("head"), rtol=0, atol=1e-5)


def test_a_step_that_is_not_kept_can_be_edited():
    decoder = noisy_decoder(VARIANTS["experts"])
    ids = random_ids(decoder.spec, BATCH, NEW)
    for step in ("layers.1.attn.probs", "layers.1.mlp.experts.act", "layers.0.mlp.up"):
        full = record(decoder, ids, patch={step: uneven})
        lean = record(decoder, ids, only="head", patch={step: uneven})
        assert list(lean.tensors) == ["head"]
        assert torch.equal(lean.tensor("head"), full.tensor("head"))


def test_an_edit_works_on_its_own_copy():
    """One token masks nothing, and its masked scores are the scores themselves."""
    decoder = noisy_decoder(VARIANTS["llama"])
    ids, scores, masked = random_ids(decoder.spec, 1, 1), "layers.2.attn.scores", "layers.2.attn.masked"
    plain = record(decoder, ids)
    trace = record(decoder, ids, patch={masked: lambda x: x.mul_(0.5)})
    assert torch.equal(trace.tensor(scores), plain.tensor(scores))
    assert torch.equal(trace.tensor(masked), plain.tensor(scores) * 0.5)


# --- heads --------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "sinks"])
def test_an_ablated_head_is_one_whose_columns_of_the_last_matrix_are_zero(name: str):
    decoder = noisy_decoder(VARIANTS[name])
    ids = random_ids(decoder.spec, BATCH, NEW)
    trace = record(decoder, ids, ablate=[(1, 2), (1, 7), (0, 3)])
    assert not trace.tensor("layers.1.attn.mix")[:, [2, 7]].any()
    assert trace.tensor("layers.1.attn.mix")[:, [0, 1, 3, 4, 5, 6]].abs().amin() > 0
    assert trace.edited == {"layers.0.attn.mix", "layers.1.attn.mix"}
    size = decoder.spec.layers[0].attn.head_dim
    for layer, head in ((1, 2), (1, 7), (0, 3)):
        decoder.layers[layer].attn.o.weight[:, head * size : (head + 1) * size] = 0
    torch.testing.assert_close(trace.tensor("head"), decoder(ids), rtol=0, atol=1e-5)


def test_a_head_is_ablated_after_its_layers_mix_is_edited():
    decoder = noisy_decoder(VARIANTS["llama"])
    mix = "layers.1.attn.mix"
    trace = record(decoder, random_ids(decoder.spec, 1, 4), patch={mix: torch.ones_like}, ablate=[(1, 5)])
    assert trace.tensor(mix).amax((0, 2, 3)).tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("head", [(3, 0), (-1, 0), (0, 8), (0, -1)])
def test_a_head_that_the_model_does_not_have_is_an_error(head: tuple[int, int]):
    decoder = noisy_decoder(VARIANTS["llama"])
    with pytest.raises(RequestError, match="ablate: "):
        record(decoder, random_ids(decoder.spec, 1, 4), ablate=[head])


# --- what cannot be done ------------------------------------------------------------------------

O = "layers.2.attn.o"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda x: None, f"patch: {O} must give a tensor back, found NoneType"),
        (
            lambda x: x[..., :-1],
            rf"patch: {O} must give back fp32 \[1, 4, 52\] on cpu, found fp32 \[1, 4, 51\]",
        ),
        (lambda x: x.double(), f"patch: {O} must give back fp32 .*found fp64"),
        (lambda x: x[None], f"patch: {O} must give back"),
    ],
)
def test_a_result_that_cannot_take_the_steps_place_is_an_error_that_names_it(edit, says: str):
    decoder = noisy_decoder(VARIANTS["llama"])
    with pytest.raises(RequestError, match=says):
        record(decoder, random_ids(decoder.spec, 1, 4), patch={O: edit})
    assert is_untouched(decoder)


def test_what_is_no_function_or_no_step_is_an_error_before_anything_runs():
    decoder = noisy_decoder(VARIANTS["llama"])
    ids = random_ids(decoder.spec, 1, 4)
    with pytest.raises(RequestError, match=f"patch: {O} needs a function of a tensor, found int"):
        record(decoder, ids, patch={O: 3})  # type: ignore[dict-item]
    with pytest.raises(UnknownStepError, match=r"no step 'layers.9.attn.o' in this run; near it: layers"):
        record(decoder, ids, patch={"layers.9.attn.o": uneven})
    with pytest.raises(RequestError, match="two of its names mean the same step"):
        record(decoder, ids, patch={O: uneven, "blocks.2.hook_attn_out": uneven})


def test_the_model_is_as_before_after_an_edit_that_fails():
    decoder = noisy_decoder(VARIANTS["routers"])

    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record(decoder, random_ids(decoder.spec, 1, 4), patch={"layers.1.mlp.experts.up": fails})
    assert is_untouched(decoder)


def is_untouched(decoder: Decoder) -> bool:
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in decoder.modules())
    ways = [getattr(layer.mlp, "experts", None) for layer in decoder.layers]
    return (
        hooks == 0
        and all(isinstance(layer.attn.core, ExplicitCore) for layer in decoder.layers)
        and all(type(layer.attn.core).__name__ == "FusedCore" for layer in decoder.layers)
        and all(experts is None or experts.way is None for experts in ways)
    )
