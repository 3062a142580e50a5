"""A model's parameters straight from its files, one at a time, for whoever rewrites and does not run it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import torch
from torch import Tensor

from openbook.ledger import ledger
from openbook.sources import Source
from openbook.weights.load import Found, NonFiniteError, settle_head
from openbook.weights.tensors import PLAIN, is_finite, open_tensors
from openbook.weights.verify import MisfitError, check


class Streamed:
    """What `save_hf` and `save_gguf` ask of a decoder, without one.

    Each parameter comes in the type it is stored in, a quantised one decoded to fp32: nothing is rounded.
    Raises `MisfitError` for files whose tensors are not the model's, before any value is read.
    """

    def __init__(self, source: Source) -> None:
        self._tensors = open_tensors(source)
        rows = check(source, self._tensors)
        if misfits := [row for row in rows if not row.ok]:
            raise MisfitError(self._tensors.path, misfits)
        found = [(row.place, row.stored) for row in rows if row.place and row.stored]
        self.spec, found = settle_head(source.spec, found, self._tensors)
        self.ignored = [row.name for row in rows if row.status == "ignored"]
        self.found = found
        self._holding: defaultdict[str, list[Found]] = defaultdict(list)
        for place, stored in found:
            for name in place.parameters:
                self._holding[name].append((place, stored))
        self._shapes = {row.name: row.shape for row in ledger(self.spec).tensors}

    @property
    def plain_type(self) -> str | None:
        """The type of most numbers, in a file's words; None if that is a quantised one."""
        counts: Counter[str] = Counter()
        for _, stored in self.found:
            counts[stored.dtype] += math.prod(stored.shape)
        most = counts.most_common(1)[0][0]
        return most if most in PLAIN else None

    def get_parameter(self, name: str, /) -> Tensor:
        """Raises `NonFiniteError` for NaN and infinity."""
        whole: Tensor | None = None
        for place, stored in self._holding[name]:
            values = self._tensors.read(stored.name)
            part = next(part for held, part in place.load(values) if held == name)
            if not is_finite(part):
                raise NonFiniteError(
                    self._tensors.path, [stored.name], "NaN or infinity", "get the file again"
                )
            if place.index is None:
                return part
            if whole is None:
                whole = torch.empty(self._shapes[name], dtype=part.dtype)
            place.part_of(whole).copy_(part)
        if whole is None:
            raise KeyError(name)
        return whole
