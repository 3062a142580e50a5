"""What a conversion does to each tensor, told from headers alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from openbook.ledger import ledger
from openbook.sources import Source
from openbook.spec.gguf import rope_tensors, to_metadata
from openbook.spec.hf import to_config
from openbook.weights.dialects import GGUF, HF, Dialect, Place, places
from openbook.weights.dialects.words import loading, storing
from openbook.weights.tensors import open_tensors
from openbook.weights.verify import MisfitError, check

Format = Literal["gguf", "hf"]


@dataclass(frozen=True)
class Step:
    """One parameter's way: from the tensors `source` through `ours` to those of `target`.

    Names are patterns: {n} is the layer, {i} the expert; `times` is how many parameters go this way, of
    which `shape` is the target tensor's. `words` is empty where the elements stay in their order.
    """

    source: str
    ours: str
    target: str
    shape: tuple[int, ...]
    words: str
    times: int


def explain(source: Source, target: Format) -> list[Step]:
    """The steps of a conversion, equal ones folded, in the ledger's order.

    Raises what `check` raises, `MisfitError` for files that are not the model's, and `UnsupportedError`
    for a model that the target has no words for.
    """
    rows = check(source, open_tensors(source))
    if misfits := [row for row in rows if not row.ok]:
        raise MisfitError(source.weights, misfits)
    shapes = {row.name: row.shape for row in ledger(source.spec).tensors if row.tie is None}
    before = _by_parameter(replace(row.place, stored=row.name) for row in rows if row.place and row.stored)
    after = _by_parameter(places(source.spec, shapes, target_dialect(source, target)))
    folded: dict[Step, int] = {}
    for name in shapes:
        for step in _steps(name, before[name], after[name]):
            folded[step] = folded.get(step, 0) + 1
    return [*(replace(step, times=times) for step, times in folded.items()), *_made(source, target)]


def target_dialect(source: Source, target: Format) -> Dialect:
    """How the target will name the tensors."""
    if target == "hf":
        return HF[to_config(source.spec, source.family)["model_type"]]
    return GGUF[to_metadata(source.spec, source.family)["general.architecture"]]


def _by_parameter(found: Iterable[Place]) -> dict[str, list[Place]]:
    holding: defaultdict[str, list[Place]] = defaultdict(list)
    for place in found:
        for name in place.parameters:
            holding[name].append(place)
    return holding


def _steps(name: str, before: list[Place], after: list[Place]) -> Iterator[Step]:
    """One for each pattern of the target's tensors that hold the parameter."""
    by_pattern: defaultdict[str, list[Place]] = defaultdict(list)
    for place in after:
        by_pattern[pattern(place.stored)].append(place)
    for stored, parts in by_pattern.items():
        words = ", then ".join(filter(None, (loading(before), storing(parts))))
        sources = ", ".join(dict.fromkeys(pattern(place.stored) for place in before))
        yield Step(sources, pattern(name), stored, parts[0].shape, words, times=1)


def pattern(name: str) -> str:
    """'model.layers.3.mlp.experts.5.w1.weight' → 'model.layers.{n}.mlp.experts.{i}.w1.weight'."""
    letters = iter("ni")
    return re.sub(r"(?<=\.)\d+(?=\.)", lambda match: f"{{{next(letters, 'i')}}}", name)


def _made(source: Source, target: Format) -> Iterator[Step]:
    """Tensors of the target that are no parameters but numbers of the spec."""
    if target == "gguf":
        for name, numbers in rope_tensors(source.spec).items():
            words = "made of the configuration's rotary scaling"
            yield Step("", "", name, (len(numbers),), words, times=1)
