"""Hugging Face's config.json ⇄ spec.

A model type is a row of `FAMILIES`: the keys its config has with the defaults that transformers gives
them, and, as values, what the type fixes and how it says the rest (`term`, `attention`, `rope`,
`feedforward`). One reader and one writer serve all rows. Meanings and defaults are those of
transformers 5.24, against which the tests hold them.

Nothing of a config is ever executed: `auto_map` names code, and is ignored like any other note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from openbook.spec.hf.families import FAMILIES
from openbook.spec.hf.family import Family
from openbook.spec.hf.irrelevant import IRRELEVANT, NOT_YET, ONLY, TEXT_OF, check_quantization
from openbook.spec.hf.reading import read_spec
from openbook.spec.hf.term import Keys, flat
from openbook.spec.hf.writing import write_config
from openbook.spec.model import ModelSpec, SpecError
from openbook.spec.reader import Reader, UnsupportedError, show
from openbook.spec.writer import Written, express

__all__ = ["FAMILIES", "UnsupportedError", "from_config", "to_config"]


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json, read as a dict, describes.

    Absent keys take transformers' own defaults. Raises `UnsupportedError` for a model type or feature
    that is not supported, and `SpecError` for a value that cannot be or a key that nobody knows.
    """
    model_type = Reader(config, "config").text("model_type")
    if model_type in TEXT_OF:
        return from_config(_text_config(model_type, config))
    family = _family_of(model_type)
    reader = Reader({**family.defaults, **_own_keys(family, config)}, "config", family.spelling)
    _check_keys(family, reader)
    spec = read_spec(family, reader)
    reader.finish(
        f"model type {family.model_type!r} has no such key: remove it if the model does not depend on it"
    )
    return spec


def to_config(spec: ModelSpec, model_type: str = "") -> Keys:
    """A config.json from which transformers builds the same model.

    Its family is `model_type`, if that is one and can express the model, or else the first that can.
    The config holds what shapes the model; dtype and token ids are the caller's to add. Raises
    `UnsupportedError`, naming the feature, for a model that no supported family can express.
    """

    def way(family: Family) -> Callable[[], Written[Keys]]:
        def write() -> Written[Keys]:
            config = write_config(family, spec)
            return config, from_config(config)

        return write

    names = sorted(FAMILIES, key=lambda name: name != model_type)
    return express(spec, {name: way(FAMILIES[name]) for name in names}, "Hugging Face model type")


def _family_of(model_type: str) -> Family:
    if model_type in NOT_YET:
        raise UnsupportedError(
            f"config.model_type {model_type!r} is not supported: it has {NOT_YET[model_type]}"
        )
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"config.model_type {show(model_type)} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def _text_config(model_type: str, config: Mapping[str, Any]) -> Keys:
    """The language model's own config within that of one that sees as well."""
    text_type, rest = TEXT_OF[model_type]
    outer = Reader(config, "config")
    outer.ignore(IRRELEVANT | rest)
    for key, (allowed, why) in ONLY.items():
        outer.only(key, allowed, why)
    check_quantization(outer)
    tied, text = outer.maybe_flag("tie_word_embeddings"), outer.raw("text_config")
    outer.finish(f"model type {model_type!r} has no such key: remove it if the model does not depend on it")
    inner = Reader({} if text is None else text, "config.text_config")
    if (inner.maybe_text("model_type") or text_type) != text_type:
        inner.fail("model_type", f"must be {text_type!r} in a config of model type {model_type!r}")
    given = {} if tied is None else {"tie_word_embeddings": tied}
    return {**(text or {}), **given, "model_type": text_type}


def _own_keys(family: Family, config: Mapping[str, Any]) -> Keys:
    """The config with the keys of its objects lifted up, and aliases under their own name."""
    keys = flat(config, family.objects)
    for alias, key in family.aliases.items():
        if alias not in keys:
            continue
        value = keys.pop(alias)
        if value is None:
            continue
        if type(value) not in (bool, int, str) or keys.setdefault(key, value) != value:
            raise SpecError(f"config.{alias} is {show(value)}, which is not config.{key}: remove one")
    return keys


def _check_keys(family: Family, c: Reader) -> None:
    """Marks the keys that shape nothing, and refuses the values that no spec can say."""
    for prefix in ("", *(f"{name}." for name in family.objects)):
        c.ignore(prefix + key for key in IRRELEVANT)
        for key, (allowed, why) in ONLY.items():
            c.only(prefix + key, allowed, why)
        check_quantization(c, f"{prefix}quantization_config")
    for key, (allowed, why) in family.only.items():
        c.only(key, allowed, why)
    for key, allowed in family.unread.items():
        if allowed is None:
            c.ignore([key])
        else:
            c.only(key, allowed, f"model type {family.model_type!r} is otherwise in transformers")
    for key in family.same:
        if c.maybe_integer(key) not in (None, c.integer("hidden_size")):
            c.fail(
                key,
                f"must be {c.key('hidden_size')}: projections after the embedding are not supported",
                UnsupportedError,
            )
