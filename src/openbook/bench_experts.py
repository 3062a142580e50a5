"""How fast the experts of one layer run, beside transformers' with the same weights and the same choices.

The layer is the first of a spec that has experts, its weights random, so that no file is needed. What is
timed is the experts alone: hidden states go in, and the experts of each token with their weights.

The limit has two sides. An expert that is hit is read once, and T tokens that choose A of E at random hit
E · (1 - (1 - A/E)^T): a few tokens are bound by memory. Many are bound by matrix products, 2 FLOPs for each
number of each token's A experts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from openbook.bench import Machine, Notify, measure_machine
from openbook.ledger import Ledger
from openbook.ledger.tensors import nbytes
from openbook.model import Decoder, init_weights
from openbook.model.experts import Choice, FeedForwards, Way, can_group, gathered, grouped, looped
from openbook.native import accelerate
from openbook.spec.model import Experts, ModelSpec, SpecError
from openbook.weights.fit import check_fit
from openbook.weights.tensors import torch_dtype

Run = Callable[[Tensor, Choice], Tensor]
"""Hidden states [1, T, D] and who gets them → [1, T, D]."""

THEIR_WAYS = ("eager", "grouped_mm", "batched_mm")
"""transformers' names for its ways through the experts."""

MOST_GATHERED = 64
"""`gathered` and `batched_mm` copy three matrices for every row: of more tokens they are not asked."""


class Side(NamedTuple):
    """Who runs the experts, and how. The way "default" is what a loaded model takes."""

    engine: Literal["openbook", "transformers"]
    way: str


EAGER = Side("transformers", "eager")


@dataclass(frozen=True)
class ExpertsResult:
    """One side's `samples`, seconds, one a repetition; `limit` in seconds as well.

    Where transformers ran too: `ratio` says how many times as fast as its eager way this was, the median of
    the repetitions' ratios, and `error` how far the output was from its at most, over its largest number.
    """

    side: Side
    dtype: str
    tokens: int
    samples: Sequence[float]
    limit: float
    machine: Machine
    ratio: float | None = None
    error: float | None = None

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)


def bench_experts(
    spec: ModelSpec,
    dtypes: Sequence[str] = ("fp32", "bf16"),
    tokens: Sequence[int] = (1, 64, 2048),
    repetitions: int = 5,
    against_hf: bool = False,
    *,
    force: bool = False,
    progress: Notify = lambda _: None,
) -> list[ExpertsResult]:
    """Times every way through the experts of the spec's first layer that has some, all in turns.

    Raises `SpecError` if there is none, `WontFitError`, unless `force`, if there is no room for the layer.
    """
    layer = one_layer(spec)
    if not force:
        largest = max(Ledger(layer, dtype).weight_bytes for dtype in ("fp32", *dtypes))
        check_fit("one layer of experts", (1 + against_hf) * largest)
    progress("measuring this machine")
    machine = measure_machine(dtypes)
    results = []
    for dtype in dtypes:
        progress(f"making one layer in {dtype}")
        decoder = init_weights(Decoder(layer)).to(torch_dtype(dtype)).eval()
        sides = our_ways(decoder)
        with ExitStack() as stack:
            if against_hf:
                sides |= stack.enter_context(their_ways(decoder, dtype))
            for n in tokens:
                progress(f"{n} tokens in {dtype}")
                results += _measure(sides, layer, n, dtype, repetitions, machine)
    return results


def one_layer(spec: ModelSpec) -> ModelSpec:
    """The model cut down to its first layer with experts, and to a few tokens."""
    found = next((block for block in spec.layers if isinstance(block.mlp, Experts)), None)
    if found is None:
        raise SpecError(f"{spec.name or 'the model'} has no experts: bench it without --experts")
    return spec.replace(layers=(found,), vocab_size=min(spec.vocab_size, 64))


def _measure(
    sides: Mapping[Side, Run], layer: ModelSpec, n: int, dtype: str, repetitions: int, machine: Machine
) -> list[ExpertsResult]:
    """Fresh tokens and choices in every repetition, the same for all sides; the first one warms up."""
    experts, generator = _experts(layer), torch.Generator().manual_seed(n)
    copying = ("gathered", "batched_mm") if n > MOST_GATHERED else ()
    sides = {side: run for side, run in sides.items() if side.way not in copying}
    samples: dict[Side, list[float]] = {side: [] for side in sides}
    errors = dict.fromkeys(sides, 0.0)
    for repetition in range(repetitions + 1):
        x = torch.randn(1, n, layer.d_model, generator=generator).to(torch_dtype(dtype))
        choice = random_choice(experts, n, generator)
        outputs = {}
        for side, run in sides.items():
            start = time.perf_counter()
            with torch.inference_mode():
                outputs[side] = run(x, choice)
            if repetition:
                samples[side].append(time.perf_counter() - start)
        if EAGER in outputs:
            errors = {side: max(errors[side], _error(y, outputs[EAGER])) for side, y in outputs.items()}
    least = limit(experts, layer.d_model, n, dtype, machine)
    return [
        ExpertsResult(side, dtype, n, taken, least, machine, _ratio(taken, samples[EAGER]), errors[side])
        if EAGER in sides
        else ExpertsResult(side, dtype, n, taken, least, machine)
        for side, taken in samples.items()
    ]


def _error(y: Tensor, eager: Tensor) -> float:
    y, eager = y.float(), eager.float()
    return ((y - eager).abs().max() / eager.abs().max()).item()


def _ratio(taken: Sequence[float], eager: Sequence[float]) -> float:
    return statistics.median(b / a for a, b in zip(taken, eager, strict=True))


def random_choice(experts: Experts, n: int, generator: torch.Generator) -> Choice:
    """A different experts for each of n tokens, all equally likely, with weights that add up to 1."""
    ranks = torch.rand(1, n, experts.n_experts, generator=generator)
    weights = torch.rand(1, n, experts.n_active, generator=generator)
    return Choice(weights / weights.sum(-1, keepdim=True), ranks.topk(experts.n_active).indices)


def limit(experts: Experts, d_model: int, n: int, dtype: str, machine: Machine) -> float:
    """The fewest seconds that this machine allows for the experts of n tokens."""
    numbers = (3 if experts.expert.gated else 2) * d_model * experts.expert.d_ff
    hit = experts.n_experts * (1 - (1 - experts.n_active / experts.n_experts) ** n)
    reading = hit * nbytes(numbers, dtype) / machine.bytes_per_s
    return max(reading, 2 * n * experts.n_active * numbers / machine.flops_per_s[dtype])


def _experts(layer: ModelSpec) -> Experts:
    return cast("Experts", layer.layers[0].mlp)


# --- the two engines ----------------------------------------------------------------------------


def our_ways(decoder: Decoder) -> dict[Side, Run]:
    """What a loaded model takes, and each way by itself. The decoder gets native modules, as in loading."""
    accelerate(decoder)
    feed = cast("FeedForwards", decoder.get_submodule("layers.0.mlp.experts"))
    ways: dict[str, Way | None] = {"default": feed.way, "looped": looped, "gathered": gathered}
    if can_group(feed.up.weight):
        ways["grouped"] = grouped

    def run_by(way: Way | None) -> Run:
        def run(x: Tensor, choice: Choice) -> Tensor:
            feed.way = way
            return feed(x, choice)

        return run

    return {Side("openbook", name): run_by(way) for name, way in ways.items()}


@contextmanager
def their_ways(decoder: Decoder, dtype: str) -> Iterator[dict[Side, Run]]:
    """transformers' ways, with the decoder's weights, handed over in a folder that is removed afterwards.

    Raises `SpecError` for a family whose experts are modules of their own there.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from openbook.weights.save import save_hf

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="openbook-bench-") as scratch:
        folder = Path(scratch) / "model"
        save_hf(decoder, folder, dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype(dtype)).eval()
        found = [m for m in model.modules() if getattr(getattr(m, "down_proj", None), "ndim", 0) == 3]
        if not found:
            raise SpecError(
                "transformers keeps these experts apart, so it has only one way: bench without --vs"
            )
        experts: Any = found[0]

        def run_by(way: str) -> Run:
            def run(x: Tensor, choice: Choice) -> Tensor:
                experts.config._experts_implementation = way
                return experts(x[0], choice.experts[0], choice.weights[0].to(x.dtype))[None]

            return run

        yield {Side("transformers", way): run_by(way) for way in THEIR_WAYS}
