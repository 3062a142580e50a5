"""The speed that a time is predicted with, and of how much of the model it is."""

import pytest

from openbook.ledger import Workload, ledger
from openbook.train import measure as module
from openbook.train.measure import matmul_flops_per_s, measure
from openbook.train.recipe import Recipe, recipe_of
from variants import VARIANTS

SPEC = VARIANTS["llama"]


def recipe(**train: object) -> Recipe:
    settings = {"steps": 7, "rows": 8, "lr": 1e-3, **train}
    data = {"sources": ["stdlib"], "vocab": 300, "length": 16}
    return recipe_of("test", {"model": {"preset": "gpt2"}, "data": data, "train": settings})


def flops(rows: int) -> int:
    return ledger(SPEC, "fp32").totals(Workload("train", batch=rows, new=16)).flops


def test_a_small_model_is_measured_whole_and_time_grows_with_the_rows():
    found = measure(recipe(micro_rows=2), SPEC)
    assert found is not None
    assert (found.layers, found.of_layers, found.rows, found.length) == (3, 3, 2, 16)
    assert found.seconds_per_step > flops(8) / found.flops_per_s > 0


def test_a_large_one_is_measured_in_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_FLOPS", flops(1) // 2)
    found = measure(recipe(), SPEC)
    assert found is not None
    assert (found.layers, found.of_layers, found.rows, found.length) == (1, 3, 1, 16)


def test_what_has_no_room_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "available_bytes", lambda: 1000)
    assert measure(recipe(), SPEC) is None


@pytest.mark.parametrize("train", [{"optimizer": "muon"}, {"dtype": "bf16"}, {"checkpoint_layers": True}])
def test_every_way_to_train_can_be_measured(train: dict[str, object]):
    assert measure(recipe(**train), SPEC) is not None


def test_a_matrix_product_has_a_speed():
    assert 10**8 < matmul_flops_per_s("fp32") < 10**15
