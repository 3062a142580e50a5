"""How fast a model trains and how much memory that takes, beside a plain loop around transformers.

Both sides take whole steps of the same batch in the same dtype, from the same weights: forward, backward,
clipping, AdamW. Theirs is the loop that one would write: the model's own loss, `backward`,
`clip_grad_norm_` and `torch.optim.AdamW`, as it is or under `torch.compile`. Ours is `Trainer.update`.

Speeds are measured in one process, in turns. Memory is measured in a process of its own for each side: the
highest resident size during some steps, less what the process held before there was a model (with its
libraries loaded and its threads started).
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from openbook.bench import Notify
from openbook.ledger import Workload, ledger
from openbook.model import Decoder, init_weights
from openbook.spec.model import ModelSpec
from openbook.train.loop import Trainer
from openbook.train.measure import matmul_flops_per_s
from openbook.train.optim import Optimizer, parameter_groups
from openbook.train.pack import IGNORED, Batch
from openbook.train.predict import predict
from openbook.train.recipe import TrainPart
from openbook.weights.fit import check_fit
from openbook.weights.save import save_hf

Way = Literal["openbook", "openbook compiled", "hf", "hf compiled"]

Step = Callable[[], float]
"""Takes one update; returns the loss before it, in nats per label."""

LR, WEIGHT_DECAY, BETAS, CLIP = 1e-4, 0.1, (0.9, 0.95), 1.0

STEPS_OF_MEMORY = 3
"""Of which the peak is taken: a plain loop makes its moments in the first, and has all in the second."""


@dataclass(frozen=True)
class Shape:
    """A step: `rows` rows of `length` tokens, each one document, with products in `dtype` (fp32 or bf16)."""

    rows: int
    length: int
    dtype: str = "fp32"

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def batch(self, vocab_size: int) -> Batch:
        """The same tokens for everyone; the last one of a row has nothing to predict."""
        ids = np.random.default_rng(0).integers(0, vocab_size, (self.rows, self.length))
        labels = np.concatenate((ids[:, 1:], np.full((self.rows, 1), IGNORED)), axis=1)
        positions = np.broadcast_to(np.arange(self.length), ids.shape)
        return Batch(ids, positions.copy(), labels, np.zeros_like(ids))


@dataclass(frozen=True)
class TrainResult:
    """One side's `samples`, seconds of a step, one a repetition; `peak` in bytes; `first_loss` in nats.

    `ratio` says how many times as fast as this side Openbook was, the median over the repetitions.
    `predicted` is what the ledger says of Openbook's peak. None: not measured.
    """

    way: Way
    shape: Shape
    samples: Sequence[float]
    first_loss: float
    flops: int
    matmul_flops_per_s: float
    ratio: float | None = None
    peak: int | None = None
    predicted: int | None = None

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)

    @property
    def tokens_per_s(self) -> float:
        return self.shape.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """The ledger's FLOPs over what the machine's fastest product would do in that time."""
        return self.flops / self.seconds / self.matmul_flops_per_s


def bench_train(
    spec: ModelSpec,
    shape: Shape,
    repetitions: int = 5,
    against_hf: bool = False,
    compiled: bool = False,
    memory: bool = True,
    *,
    force: bool = False,
    progress: Notify = lambda _: None,
) -> list[TrainResult]:
    """Times one step of every side, in turns; `compiled` adds both sides under `torch.compile`.

    Raises `WontFitError`, unless `force`, if there is no room for all sides' models at once.
    """
    wanted: dict[Way, bool] = {
        "openbook": True,
        "openbook compiled": compiled,
        "hf": against_hf,
        "hf compiled": against_hf and compiled,
    }
    ways: list[Way] = [way for way, is_wanted in wanted.items() if is_wanted]
    predicted = predict(spec, _recipe(shape), shape.length, packed=False).bytes
    if not force:
        check_fit(f"training {spec.name or 'the model'} on {len(ways)} sides", len(ways) * predicted)
    with tempfile.TemporaryDirectory(prefix="openbook-bench-") as scratch:
        folder = Path(scratch) / "model"
        if against_hf:
            save_hf(init_weights(Decoder(spec)), folder)
        peaks = {}
        for way in ways if memory else ():
            progress(f"memory of {way}")
            peaks[way] = _in_a_new_process(peak_of, way, spec, shape, folder, torch.get_num_threads())
        progress("measuring this machine")
        rate = matmul_flops_per_s(shape.dtype)
        steps: dict[Way, Step] = {way: step_of(way, spec, shape, folder) for way in ways}
        losses, samples = _in_turns(steps, repetitions, progress)
        rate = max(rate, matmul_flops_per_s(shape.dtype))  # what the machine does when nothing disturbs it
    flops = ledger(spec, "fp32").totals(Workload("train", batch=shape.rows, new=shape.length)).flops
    return [
        TrainResult(
            way,
            shape,
            samples[way],
            losses[way],
            flops,
            rate,
            statistics.median(t / ours for t, ours in zip(samples[way], samples["openbook"], strict=True)),
            peaks.get(way),
            predicted if way == "openbook" else None,
        )
        for way in ways
    ]


def _in_turns(
    steps: dict[Way, Step], repetitions: int, progress: Notify
) -> tuple[dict[Way, float], dict[Way, list[float]]]:
    """Each side's loss at its first step, and the seconds of its later ones; two steps warm up."""
    losses: dict[Way, float] = {}
    for way, step in steps.items():
        progress(f"first steps of {way}")
        losses[way] = step()
        step()
    samples: dict[Way, list[float]] = {way: [] for way in steps}
    for repetition in range(repetitions):
        for way, step in steps.items():
            progress(f"{way}, {repetition} of {repetitions} repetitions done")
            start = time.perf_counter()
            step()
            samples[way].append(time.perf_counter() - start)
    return losses, samples


# --- the sides ----------------------------------------------------------------------------------


def step_of(way: Way, spec: ModelSpec, shape: Shape, folder: Path) -> Step:
    """The steps of a model with weights of its own; transformers' are read from `folder`."""
    compiled = way.endswith("compiled")
    ours = way.startswith("openbook")
    return _our_step(spec, shape, compiled) if ours else _their_step(shape, folder, compiled)


@dataclass(frozen=True)
class _Same:
    """The same rows at every step."""

    rows: Batch

    def batch(self, first: int, count: int) -> Batch:
        return self.rows


def _our_step(spec: ModelSpec, shape: Shape, compiled: bool) -> Step:
    decoder = init_weights(Decoder(spec))
    groups = parameter_groups(decoder, ledger(spec).tensors)
    trainer = Trainer(
        decoder,
        Optimizer(groups, LR, WEIGHT_DECAY, BETAS),
        _Same(shape.batch(spec.vocab_size)),
        lambda step: 1.0,
        shape.rows,
        clip=CLIP,
        bf16=shape.dtype == "bf16",
        compile=compiled,
    )
    return lambda: trainer.update().loss


def _their_step(shape: Shape, folder: Path, compiled: bool) -> Step:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, weight_decay=WEIGHT_DECAY)
    ids = torch.from_numpy(shape.batch(model.config.vocab_size).ids)
    run = torch.compile(model) if compiled else model

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=shape.dtype == "bf16"):
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return step


def _recipe(shape: Shape) -> TrainPart:
    return TrainPart(steps=1, rows=shape.rows, lr=LR, dtype="bf16" if shape.dtype == "bf16" else "fp32")


# --- memory -------------------------------------------------------------------------------------


def peak_of(way: Way, spec: ModelSpec, shape: Shape, folder: Path, threads: int) -> int | None:
    """Bytes that this process, which should be new, holds at most during some steps, beyond what it held
    before it had a model. None where the system does not tell (it is Linux that does)."""
    torch.set_num_threads(threads)
    _warm_up(way, shape.dtype)
    base = _resident("VmRSS")
    step = step_of(way, spec, shape, folder)
    if base is None or not _forget_peak():
        return None
    for _ in range(STEPS_OF_MEMORY):
        step()
    peak = _resident("VmHWM")
    return None if peak is None else peak - base


def _warm_up(way: Way, dtype: str) -> None:
    """Libraries loaded, threads started: a tiny model learns for a step."""
    from openbook.spec.model import Attention, Block, Head, Mlp, Norm, Rope

    attn = Attention(2, 2, 16, scale=0.25, rope=Rope(16))
    block = Block(attn, Mlp(64, "silu", gated=True), attn_norm=Norm("rms"), mlp_norm=Norm("rms"))
    tiny = ModelSpec(67, 32, 64, (block,), Head(tied=True), final_norm=Norm("rms"))
    with tempfile.TemporaryDirectory(prefix="openbook-bench-") as scratch:
        folder = Path(scratch) / "model"
        if way.startswith("hf"):
            save_hf(init_weights(Decoder(tiny)), folder)
        step_of("hf" if way.startswith("hf") else "openbook", tiny, Shape(2, 32, dtype), folder)()


def _resident(field: Literal["VmRSS", "VmHWM"]) -> int | None:
    """The process's resident size, or its peak."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _forget_peak() -> bool:
    """Makes the present size the peak so far (see proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _in_a_new_process(work: Callable[..., Any], *arguments: object) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()
