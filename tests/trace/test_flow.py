"""Which step reads which."""

import pytest

from openbook.infer import Cache
from openbook.trace import record
from openbook.trace.flow import inputs, nearest
from variants import VARIANTS, noisy_decoder, random_ids


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_step_reads_has_run_before_it(name: str):
    spec = VARIANTS[name]
    decoder, ids = noisy_decoder(spec), random_ids(spec, 1, 8)
    cache = Cache(spec, 1, 8)
    for new in (ids[:, :7], ids[:, 7:]):  # a latent attention's two ways
        steps = [step.name for step in record(decoder, new, cache=cache)]
        for at, step in enumerate(steps):
            read = inputs(spec, step)
            assert read or step == "embed"
            assert all(before in steps[:at] for before in read if before in steps), step


@pytest.mark.parametrize("name", VARIANTS)
def test_every_step_but_the_last_is_read(name: str):
    spec = VARIANTS[name]
    steps = [step.name for step in record(noisy_decoder(spec), random_ids(spec, 1, 5))]
    read = {before for step in steps for before in nearest(spec, step, steps)}
    assert set(steps) - read == {"head"}


def test_the_nearest_recorded_steps_are_found_across_many_layers():
    spec = VARIANTS["llama"]
    deep = spec.replace(layers=spec.layers * 40)
    assert list(nearest(deep, "head", ["embed"])) == ["embed"]
    assert set(nearest(deep, "layers.9.attn_add", ["layers.8.attn.o", "layers.8.mlp.down"])) == {
        "layers.8.attn.o",
        "layers.8.mlp.down",
    }


def test_a_step_that_the_model_does_not_have_is_no_step():
    with pytest.raises(KeyError):
        inputs(VARIANTS["llama"], "layers.0.attn.q_norm")
