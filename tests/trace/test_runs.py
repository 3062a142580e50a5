"""Runs in pieces and beside padding, laid out as the plain run is."""

import pytest
import torch

from openbook.model import FusedCore
from openbook.trace import diff, record
from openbook.trace.runs import record_cached, record_padded
from openbook.trace.schema import local_name
from variants import VARIANTS, noisy_decoder, random_ids

WAYS = {"cached": record_cached, "padded": record_padded}
NEW = 13

ABSORBED = {"attn.kv_up", "attn.mix"}
"""Steps that a latent attention does not take, or takes in another space, for single tokens."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VARIANTS)
def test_no_step_depends_on_the_way_to_run(name: str, way: str):
    decoder = noisy_decoder(VARIANTS[name])
    ids = random_ids(decoder.spec, 1, NEW)
    plain, other = record(decoder, ids), WAYS[way](decoder, ids)
    report = diff(plain, other)
    assert (report.first, report.missing) == (None, [])
    left_out = ABSORBED if (name, way) == ("latent", "cached") else set()
    assert {local_name(step) for step in report.unseen} == left_out
    assert [(step.name, step.shape) for step in plain if step.name in other] == [
        (s.name, s.shape) for s in other
    ]


def test_a_core_that_forgets_the_cache_is_found():
    """A triangle aligned to the upper left lets a token after the cache see the first key alone."""

    class Forgetful(FusedCore):
        def forward(self, q, k, v, mask, *rest, **named):
            return super().forward(q, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], mask, *rest, **named)

    decoder = noisy_decoder(VARIANTS["llama"])
    decoder.layers[1].attn.core = Forgetful()
    report = diff(*(run(decoder, random_ids(decoder.spec, 1, NEW)) for run in (record_cached, record)))
    assert report.first is not None
    assert report.first.name == "layers.1.attn.mix"
    assert report.first.at[2] >= (NEW + 1) // 2


def test_positions_that_count_the_padding_are_found(monkeypatch):
    """As if a batch were run with the columns for positions: learned vectors are then another token's."""
    decoder = noisy_decoder(VARIANTS["gpt2"])
    module = decoder.positions
    forward = module.forward
    monkeypatch.setattr(module, "forward", lambda positions: forward(torch.arange(positions.shape[1])[None]))
    report = diff(*(run(decoder, random_ids(decoder.spec, 1, NEW)) for run in (record_padded, record)))
    assert report.first is not None
    assert report.first.name == "positions"


def test_one_token_alone_can_be_cached_and_padded():
    decoder = noisy_decoder(VARIANTS["windows"])
    ids = random_ids(decoder.spec, 1, 1)
    assert all(diff(record(decoder, ids), run(decoder, ids)).ok for run in WAYS.values())
