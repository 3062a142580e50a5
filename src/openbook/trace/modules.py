"""Whose module is whose: transformers' modules under our names, by the table of its checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from openbook.ledger import Ledger
from openbook.spec.model import ModelSpec
from openbook.spec.reader import UnsupportedError
from openbook.weights.dialects import HF, Dialect, Place, places


@dataclass
class Modules:
    """transformers' modules under our names.

    `found`: our module → theirs, and which of its outputs are ours (None: all, in their order). `paths`: our
    module → the path of theirs, also of those that hold several of ours, such as all experts. `parameters`:
    the weights that are kept as they were stored, under our names and in our arrangement.
    """

    model: Any
    found: dict[str, tuple[nn.Module, Tensor | None]] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(model: Any, spec: ModelSpec) -> Modules:
        kind = model.config.model_type
        if kind not in HF:
            raise UnsupportedError(f"no table names the modules of {kind!r}; there are {', '.join(HF)}")
        shapes = {row.name: row.shape for row in Ledger(spec).tensors}
        modules = Modules(model)
        names = _Names(model, HF[kind])
        for place in places(spec, shapes, HF[kind]):
            modules._add(place, *names.of(place.stored))
        return modules

    def _add(self, place: Place, name: str, whole: bool) -> None:
        """`name` is the parameter's in the model. It is `whole` if it is the stored tensor and no other."""
        values = _parameter(self.model, name)
        if values is None:
            return
        owner = name.rpartition(".")[0]
        for ours in place.parameters:
            self.paths.setdefault(ours.rpartition(".")[0], owner)
        if not whole or place.index is not None or values.shape != place.shape:
            return
        self.parameters |= dict(place.load(values.detach()))
        if values.ndim > 2 or place.axis:
            return
        module = self.model.get_submodule(owner)
        outputs = torch.arange(sum(place.sizes))  # a vector is arranged as a matrix's rows are
        for ours, rows in place.load(outputs):
            self.found.setdefault(ours.rpartition(".")[0], (module, rows if len(place.sizes) > 1 else None))

    def layer(self, index: int) -> nn.Module | None:
        """Their layer: the module down to the first number in the path of anything of our layer's."""
        for name, path in self.paths.items():
            if name.startswith(f"layers.{index}.") and (match := re.match(r".*?\.\d+(?=\.)", path)):
                return self.model.get_submodule(match[0])
        return None

    def owner(self, name: str) -> nn.Module | None:
        """The module that has the parameters of our `name`, perhaps together with others'."""
        path = self.paths.get(name)
        return self.model.get_submodule(path) if path else None

    def parent(self, name: str) -> nn.Module | None:
        """The module around the one that is our `name`."""
        path = self.paths.get(name, "").rpartition(".")[0]
        return self.model.get_submodule(path) if path else None


def _parameter(model: nn.Module, name: str) -> Tensor | None:
    owner, _, own = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return None
    return module._parameters.get(own, module._buffers.get(own))  # a router's correction is a buffer


class _Names:
    """What transformers calls a stored tensor once it is loaded."""

    def __init__(self, model: Any, dialect: Dialect) -> None:
        self._model = model
        self._prefixes = dialect.prefixes
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter
        except ImportError:  # an earlier transformers, whose modules have the stored names
            return
        for step in get_model_conversion_mapping(model):
            (self._converters if isinstance(step, WeightConverter) else self._renamings).append(step)

    def of(self, stored: str) -> tuple[str, bool]:
        """The parameter's name, and whether it is this stored tensor whole: experts' are put together."""
        spellings = [stored]
        spellings += [
            found + stored.removeprefix(meant) for found, meant in self._prefixes if stored.startswith(meant)
        ]
        for name in spellings:
            if _parameter(self._model, name) is not None:
                return name, True
        for name in spellings if self._renamings or self._converters else []:
            from transformers.core_model_loading import rename_source_key

            renamed, converter = rename_source_key(name, self._renamings, self._converters)
            if _parameter(self._model, renamed) is not None:
                return renamed, converter is None
        return stored, False
