"""What training and generation cost: by hand, and as the sum of its parts."""

import pytest

from openbook.ledger import Workload, ledger
from openbook.ledger.teaching import cache_savings, step_costs, training_cost
from openbook.spec.presets import preset

PRESETS = ("gpt2", "qwen3-0.6b", "gemma-3-270m", "gpt-oss-20b", "deepseek-v3", "llama-4-scout")


def test_one_layer_by_hand():
    """gpt2-block's layer: D = 768, F = 3072, and a head of V. Five tokens, one after the other.

    A token passes 4·D² + 2·D·F weights and V·D of the head, 2 FLOPs each; with S visible ones it takes 4·S·D
    for scores and mix.
    """
    spec = preset("gpt2-block")
    d, f, v = spec.d_model, 3072, spec.vocab_size
    layer, head = 2 * (4 * d * d + 2 * d * f), 2 * v * d

    def token(seen: int) -> int:
        return spec.n_layers * (layer + 4 * seen * d) + head

    book = ledger(spec)
    first, second = step_costs(book, 4, 2)
    assert first.flops == first.flops_without == sum(token(seen) for seen in (1, 2, 3, 4)) - 3 * head
    assert second.flops == token(5)
    assert second.flops_without == sum(token(seen) for seen in (1, 2, 3, 4, 5)) - 4 * head
    assert (first.new, first.past, second.new, second.past) == (4, 0, 1, 4)
    learned = training_cost(book, 5)
    assert learned.forward == sum(token(seen) for seen in (1, 2, 3, 4, 5))
    assert learned.flops == 3 * learned.forward
    (saving,) = cache_savings(book, [5])
    assert (saving.flops, saving.flops_without) == (second.flops, second.flops_without)
    assert saving.ratio == pytest.approx(second.flops_without / second.flops)


@pytest.mark.parametrize("name", PRESETS)
def test_the_steps_add_up_to_the_whole_generation(name: str):
    book = ledger(preset(name))
    steps = step_costs(book, 37, 6)
    assert len(steps) == 6
    assert sum(step.flops for step in steps) == book.generation_flops(37, 6)
    assert sum(step.flops_without for step in steps) == book.generation_flops(37, 6, cached=False)
    assert [step.kv_bytes for step in steps] == [book.kv_bytes(1, 37 + i) for i in range(6)]


@pytest.mark.parametrize("name", PRESETS)
def test_training_is_three_times_forward_with_a_head_on_every_row(name: str):
    book = ledger(preset(name))
    cost = training_cost(book, 37)
    assert cost.flops == 3 * cost.forward == book.totals(Workload("train", new=37)).flops
