"""Comparing two sides, as a whole or some layers at a time."""

from dataclasses import replace

import pytest
import torch

from checkpoints import changed
from openbook.trace import diff, record
from openbook.trace.diff import tolerance_for
from openbook.trace.schema import Trace
from openbook.trace.sides import Side, compare, layer_groups, ours, theirs, tolerance_of, weights_apart
from variants import VARIANTS, noisy_decoder, random_ids

TINY_BUDGET = 1
"""Too small for any layer, so that each is a group of its own."""


def counted(side: Side, held: list[Trace]) -> Side:
    """The same side, whose traces can be counted."""

    def run(ids, only):
        held.append(side.record(ids, only))
        return held[-1]

    return replace(side, record=run)


@pytest.mark.parametrize("name", ["llama", "parallel", "experts", "latent", "post-norm", "multipliers"])
def test_layer_by_layer_finds_what_the_whole_finds(name: str):
    decoder = noisy_decoder(VARIANTS[name])
    ids = random_ids(decoder.spec, 1, 9)
    last = decoder.spec.n_layers - 1
    name = f"layers.{last}.attn.o.weight"
    other = changed(decoder, weights=lambda values: values.update({name: values[name] * 1.5}))
    whole = diff(record(other, ids), record(decoder, ids))
    held: list[Trace] = []
    found = compare(counted(ours(other), held), ours(decoder), ids, budget=TINY_BUDGET)
    assert (found.rows, list(found.reasons), found.unseen) == (whole.rows, list(whole.reasons), whole.unseen)
    assert len(held) == last + 1
    assert all({step.layer for step in trace} <= {i - 1, i, None} for i, trace in enumerate(held))


def test_the_first_group_with_a_difference_is_the_last_but_for_the_logits():
    decoder = noisy_decoder(VARIANTS["odds"])
    ids = random_ids(decoder.spec, 1, 5)
    name = "layers.1.mlp.down.weight"
    other = changed(decoder, weights=lambda values: values.update({name: values[name] * 1.5}))
    held: list[Trace] = []
    report = compare(counted(ours(other), held), ours(decoder), ids, budget=TINY_BUDGET)
    assert report.first is not None
    assert report.first.name == "layers.1.mlp.down"
    assert (report.rows[-1].name, report.rows[-1].ok) == ("head", False)
    assert [len(trace) > 1 for trace in held] == [True, True, False]
    assert list(report.reasons) == ["layers.1.mlp.down"]


def test_groups_hold_as_many_layers_as_fit_and_every_layer_once():
    spec = VARIANTS["odds"]
    groups = list(layer_groups(spec, 7, 300_000))
    assert [layer for group in groups for layer in group] == list(range(spec.n_layers))
    assert 1 < len(groups) < spec.n_layers
    assert list(layer_groups(spec, 7, 2**40)) == [range(spec.n_layers)]


def test_a_group_takes_no_more_than_the_budget():
    decoder = noisy_decoder(VARIANTS["odds"])
    ids, budget = random_ids(decoder.spec, 1, 7), 300_000
    held: list[Trace] = []
    compare(counted(ours(decoder), held), ours(decoder), ids, budget=budget)
    sizes = [
        sum(x.nbytes for name, x in trace.tensors.items() if name.startswith("layers.")) for trace in held
    ]
    assert max(sizes) <= 1.1 * budget / 2  # a group also has what its first layer reads


def test_the_dtype_of_a_side_is_that_of_its_matrices(checkpoint):
    made = checkpoint("llama")
    assert ours(noisy_decoder(VARIANTS["llama"], torch.bfloat16)).dtype == "bf16"
    assert theirs(made.theirs, made.ours.spec).dtype == "fp32"


def test_weights_of_two_types_may_differ_as_far_as_they_do_and_no_further(checkpoint):
    made = checkpoint("llama")
    rounded = changed(
        made.ours, weights=lambda values: values.update({n: w.bfloat16() for n, w in values.items()})
    )
    fp32, bf16 = ours(made.ours, stored="fp32"), ours(rounded, stored="bf16")
    assert weights_apart(bf16, fp32) == pytest.approx(1.6e-3, rel=0.2)
    assert tolerance_of(bf16, fp32) == 8 * weights_apart(bf16, fp32)
    assert compare(bf16, fp32, made.ids).ok
    assert not compare(bf16, replace(fp32, stored="bf16"), made.ids).ok  # as if both files were bf16
    assert tolerance_of(ours(made.ours, stored="bf16"), fp32) == tolerance_for("fp32")  # the same numbers


def test_wrong_weights_do_not_raise_what_is_allowed(checkpoint):
    made = checkpoint("llama")
    wrong = changed(
        made.ours,
        weights=lambda values: values.update(
            {n: -w for n, w in values.items() if n.endswith("attn.q.weight")}
        ),
    )
    a = ours(wrong, stored="bf16")
    b = theirs(made.theirs, made.ours.spec, stored="fp32")
    assert tolerance_of(a, b) == tolerance_for("fp32")
    everything = changed(made.ours, weights=lambda values: values.update({n: -w for n, w in values.items()}))
    assert tolerance_of(ours(everything, stored="bf16"), b) == tolerance_for("bf16")


@pytest.mark.parametrize("way", ["plain", "cached", "padded"])
def test_every_way_to_run_equals_transformers(checkpoint, way: str):
    made = checkpoint("gemma3_text")
    report = compare(ours(made.ours, way), theirs(made.theirs, made.ours.spec), made.ids)
    assert report.ok
    assert not report.unseen
