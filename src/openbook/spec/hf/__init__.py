"""Hugging Face's config.json ⇄ spec.

A model type is a row of `FAMILIES`: the keys its config has with the defaults that transformers gives
them, and what the type itself fixes (norms, biases, windows). One reader and one writer serve all
rows. Meanings and defaults are those of transformers 5.24, against which the tests hold them.

Nothing of a config is ever executed: `auto_map` names code, and is ignored like any other note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from openbook.spec.hf.families import FAMILIES
from openbook.spec.hf.family import Family
from openbook.spec.hf.irrelevant import IRRELEVANT, ONLY
from openbook.spec.hf.reading import read_spec
from openbook.spec.hf.writing import write_config
from openbook.spec.model import ModelSpec
from openbook.spec.reader import Reader, UnsupportedError, show
from openbook.spec.writer import Written, express

__all__ = ["FAMILIES", "UnsupportedError", "from_config", "to_config"]


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json, read as a dict, describes.

    Absent keys take transformers' own defaults. Raises `UnsupportedError` for a model type or feature
    that is not supported, and `SpecError` for a value that cannot be or a key that nobody knows.
    """
    family = _family_of(config)
    reader = Reader({**family.defaults, **config}, "config", family.spelling)
    reader.ignore(IRRELEVANT)
    for key, (allowed, why) in ONLY.items():
        reader.only(key, allowed, why)
    spec = read_spec(family, reader)
    reader.finish(
        f"model type {family.model_type!r} has no such key: remove it if the model does not depend on it"
    )
    return spec


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """A config.json from which transformers builds the same model, under the first family that can.

    It holds what shapes the model; dtype and token ids are the caller's to add. Raises
    `UnsupportedError`, naming the feature, for a model that no supported family can express.
    """

    def way(family: Family) -> Callable[[], Written[dict[str, Any]]]:
        def write() -> Written[dict[str, Any]]:
            config = write_config(family, spec)
            return config, from_config(config)

        return write

    return express(spec, {name: way(family) for name, family in FAMILIES.items()}, "Hugging Face model type")


def _family_of(config: Mapping[str, Any]) -> Family:
    name = Reader(config, "config").text("model_type")
    if name not in FAMILIES:
        raise UnsupportedError(
            f"config.model_type {show(name)} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]
