"""What is kept of one forward pass: every named step with its tensor.

A step is named as the ledger's row and the model's module are, `layers.3.attn.q`, and its axes are spelled in
the same letters: ("B", "T", "H·K").
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from openbook.ledger import OpRow
from openbook.spec.model import ModelSpec
from openbook.trace import file
from openbook.trace.names import UnknownStepError, canonical
from openbook.trace.rows import op_rows
from openbook.trace.tensors import Statistics, dtype_of, held_bytes


@dataclass(frozen=True)
class Step:
    """One step as it ran. `axes` are the ledger's letters, one for each number of `shape`.

    `seconds` is the wall time that its module took, if it was measured and the step is a module; `edited`
    says that the run went on with another tensor than the model had computed.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    statistics: Statistics
    seconds: float | None = None
    edited: bool = False

    @property
    def layer(self) -> int | None:
        """The layer it belongs to; None before the first and after the last."""
        return int(self.name.split(".")[1]) if self.name.startswith("layers.") else None

    @property
    def local(self) -> str:
        """The name without its layer: 'attn.q'."""
        return local_name(self.name)


def local_name(name: str) -> str:
    """'layers.3.attn.q' → 'attn.q'; a name outside the layers is kept."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


@dataclass(frozen=True, eq=False)
class Trace:
    """The steps of one run, in the order of the ledger's rows.

    `dtype` is that of its matrices. `positions` [B, T] are where its tokens stand (negative: padding), and
    `keys` the positions [B, S] of the keys that each layer's queries met: the columns of its scores. `axes`
    has every step of such a run, those that were not kept as well. `choices` names the experts [B, T, A]
    behind each `mlp.chosen`, in the order of their weights there. `parameters` are the weights of the run,
    under our names and in our arrangement; what is not known is not in it.

    `past` tokens were in the cache before. `pieces` is the text of each token, row by row, and `model` the
    name of the model, if they are known. `seconds` is what modules took, if it was measured; `edited`, the
    steps whose tensor the run went on with is not the one the model computed. `statistics` are those that
    came with a file.
    """

    spec: ModelSpec
    dtype: str
    ids: Tensor
    positions: Tensor
    tensors: Mapping[str, Tensor]
    axes: Mapping[str, tuple[str, ...]]
    keys: Mapping[int, Tensor] = field(default_factory=dict)
    choices: Mapping[str, Tensor] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    past: int = 0
    model: str = ""
    pieces: Sequence[Sequence[str]] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    edited: frozenset[str] = frozenset()
    statistics: Mapping[str, Statistics | None] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        """The step's output, of the shape that the ledger's row has. `name` may be TransformerLens's.

        Masked scores are made when asked for, all others are there. Raises `UnknownStepError` (a `KeyError`)
        for no such step, or one that was not kept.
        """
        return self.tensors[self._kept(name)]

    def step(self, name: str) -> Step:
        """The step with its statistics. Raises `UnknownStepError` as `tensor` does."""
        return self._by_name[self._kept(name)]

    def _kept(self, name: str) -> str:
        found = canonical(self.spec, name, self.axes)
        if found not in self.tensors:
            raise UnknownStepError("name", f"{found} was not kept in this trace: ask for it with `only`")
        return found

    @cached_property
    def steps(self) -> list[Step]:
        """Every step with the statistics of its tensor, which are computed once."""
        return [self._step(name, x) for name, x in self.tensors.items()]

    def _step(self, name: str, x: Tensor) -> Step:
        statistics = self.statistics.get(name) or Statistics.of(x)
        seconds, edited = self.seconds.get(name), name in self.edited
        return Step(name, self.axes[name], tuple(x.shape), dtype_of(x), statistics, seconds, edited)

    @cached_property
    def _by_name(self) -> dict[str, Step]:
        return {step.name: step for step in self.steps}

    @cached_property
    def rows(self) -> dict[str, OpRow]:
        """The ledger's row of every step, kept or not: its formula, FLOPs and bytes."""
        batch, new = self.ids.shape
        rows = op_rows(self.spec, self.dtype, batch, new, self.past)
        return {row.name: row for row in rows}

    @cached_property
    def bytes(self) -> int:
        """Bytes of memory (of a loaded trace, of its file) behind the tensors; the model's own are not
        among them."""
        return held_bytes(self.tensors)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything but the parameters to one file (`openbook.trace.load` reads it), which appears
        under its name only when it is complete. Raises `OSError`."""
        file.write(self, Path(path))

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.tensors)


def load(path: str | os.PathLike[str]) -> Trace:
    """The trace in a file that `Trace.save` wrote; its tensors are paged in from there when they are read.

    `parameters` is empty. Raises `FileError` for a file that is no such trace, or contradicts the ledger.
    """
    return Trace(**file.read(Path(path)))
