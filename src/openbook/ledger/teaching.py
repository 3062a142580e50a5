"""What it costs to learn a text in one pass, to write one token by token, and what the cache saves.

FLOPs under the `causal` convention of `openbook.ledger.ops`; bytes of the cache in the dtype of the books.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from openbook.ledger import Ledger, Workload


@dataclass(frozen=True, slots=True)
class PassCost:
    """A training pass over a whole text: FLOPs forward, and backward too (3 × forward), for `rows` labels."""

    rows: int
    forward: int
    flops: int


def training_cost(book: Ledger, rows: int) -> PassCost:
    """Of one text of `rows` inputs, each of which has a label."""
    flops = book.totals(Workload("train", new=rows)).flops
    return PassCost(rows, book.totals(Workload("prefill", new=rows, last_only=False)).flops, flops)


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step of generation: `new` tokens go in after `past` others, and one is drawn.

    `flops` with a KV cache, which then has `kv_bytes`; `flops_without`, if all `past + new` tokens are
    computed again.
    """

    new: int
    past: int
    flops: int
    flops_without: int
    kv_bytes: int


def step_costs(book: Ledger, prompt: int, steps: int) -> list[StepCost]:
    """Of the prompt's pass, which gives the first token, and of `steps` - 1 further ones of a token each."""
    costs = [_step_cost(book, Workload("prefill", new=prompt))]
    costs += [_step_cost(book, Workload("decode", past=prompt + i)) for i in range(steps - 1)]
    return costs


def _step_cost(book: Ledger, workload: Workload) -> StepCost:
    return StepCost(
        workload.new,
        workload.past,
        book.totals(workload).flops,
        book.totals(Workload("prefill", new=workload.seen)).flops,
        book.kv_bytes(1, workload.seen),
    )


@dataclass(frozen=True, slots=True)
class Saving:
    """The token after a text of `length` tokens, by the ledger: with a cache only the last of them is
    computed, without one all are. `measured` is what a machine took, if it was asked."""

    length: int
    flops: int
    flops_without: int
    measured: Measured | None = None

    @property
    def ratio(self) -> float:
        """How many times the FLOPs it takes without a cache."""
        return self.flops_without / self.flops


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians in seconds."""

    seconds: float
    seconds_without: float

    @property
    def ratio(self) -> float:
        return self.seconds_without / self.seconds


def cache_savings(book: Ledger, lengths: Iterable[int]) -> list[Saving]:
    """What the cache saves at each length, predicted."""
    costs = ((n, _step_cost(book, Workload("decode", past=n - 1))) for n in lengths)
    return [Saving(n, cost.flops, cost.flops_without) for n, cost in costs]
