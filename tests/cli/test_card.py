"""The card says everything that a spec says."""

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.cli.card import card
from openbook.spec.model import Learned, ModelSpec
from openbook.spec.presets import preset
from strategies import specs

OTHER = {
    bool: lambda value: not value,
    int: lambda value: value * 2 + 2,
    float: lambda value: value * 2 + 0.5,
    tuple: lambda value: tuple(x * 2 for x in value),
}
"""A value's type → another value of that type."""

CHOICES = {
    "layout": ("half", "interleaved"),
    "kind": ("rms", "layer"),
    "over": ("head", "own", "width"),
    "residual": ("parallel", "serial"),
    "activation": ("silu", "relu"),
    "score": ("softmax", "sigmoid", "max", "top2"),
}

GPT2 = preset("gpt2")


def changes(value: object, path: str = "") -> list[tuple[str, object]]:
    """Every copy of a piece of a spec in which one number, flag or word is another one."""
    found: list[tuple[str, object]] = []
    for field in dataclasses.fields(value):
        inner, where = getattr(value, field.name), f"{path}.{field.name}"
        if field.name == "layers":
            variants = [(p, (v, *inner[1:])) for p, v in changes(inner[0], f"{path}.layers.0")]
        elif dataclasses.is_dataclass(inner):
            variants = changes(inner, where)
        elif isinstance(inner, str):
            variants = [(where, other) for other in CHOICES.get(field.name, ()) if other != inner]
        else:
            variants = [(where, make(inner)) for kind, make in OTHER.items() if type(inner) is kind]
        for place, other in variants:
            try:
                found.append((place, replace(value, **{field.name: other})))
            except ValueError:
                continue  # not a spec: sizes that no longer fit each other
    return found


UNSEEN = (".max_positions", ".name", ".n_positions", ".sum_eps")
"""What stands in the line above the card; and what is without effect where weights are not renormalised."""


@settings(max_examples=25, deadline=None)
@given(specs(max_layers=1), st.data())
def test_another_value_anywhere_makes_another_card(spec: ModelSpec, data: st.DataObject):
    usable = [c for c in changes(spec) if not c[0].endswith(UNSEEN)]
    place, other = data.draw(st.sampled_from(usable))
    assert list(card(other)) != list(card(spec)), place


def test_the_changes_are_many_and_valid():
    assert len(changes(GPT2)) > 20
    assert [place for place, other in changes(GPT2) if other == GPT2] == []


def test_a_table_with_spare_rows_says_how_it_is_read():
    spec = replace(GPT2, positions=Learned(1024, offset=2))
    assert ("positions", "learned, 1,026 × 768, position p in row p + 2") in list(card(spec))


@pytest.mark.parametrize("name", ["gpt2", "qwen3-0.6b"])
def test_a_layer_says_whether_it_knows_positions(name):
    spec = preset(name)
    without = replace(
        spec, positions=None, layers=(replace(spec.layers[0], attn=replace(spec.layers[0].attn, rope=None)),)
    )
    silent = "none: this layer knows no positions"
    assert silent not in dict(card(spec)).values()
    assert silent in dict(card(without)).values()
