"""How fast this machine trains: measured on a part of the model that is small enough not to be waited for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from openbook.ledger import Workload, ledger
from openbook.model import Decoder, init_weights
from openbook.spec.model import ModelSpec
from openbook.train.loop import Trainer
from openbook.train.pack import Batch
from openbook.train.predict import predict
from openbook.train.recipe import Recipe, TrainPart
from openbook.train.start import trainer_around
from openbook.weights.fit import available_bytes

_FLOPS = 5 * 10**10
"""Of a step that is measured: about a second on two slow cores."""
_STEPS = 2


@dataclass(frozen=True)
class Speed:
    """Seconds that one step of the recipe takes, from the fastest of some steps of `layers` of the model's
    `of_layers` with `rows` rows of `length` tokens: as many as can be computed in a moment. `flops_per_s` are
    FLOPs as `predict` counts them, each row a single document."""

    seconds_per_step: float
    flops_per_s: float
    layers: int
    of_layers: int
    rows: int
    length: int


def measure(recipe: Recipe, spec: ModelSpec) -> Speed | None:
    """Takes some steps on random tokens, never compiled; None if there is no memory even for a part of it.

    What is computed grows with the FLOPs, and the update of the weights with their number: the first is taken
    from the steps measured, less the second, which is measured by itself.
    """
    train = recipe.train
    layers, rows, length = _part(spec, train.micro_rows or train.rows, recipe.data.length)
    part = spec.replace(layers=spec.layers[:layers])
    at_once = replace(train, rows=rows, micro_rows=rows)
    available = available_bytes()
    if available is not None and predict(part, at_once, length).bytes > available:
        return None
    trainer = _trainer(part, at_once, length)
    trainer.update()  # the first one allocates
    step = min(_seconds(trainer.update) for _ in range(_STEPS))
    update = min(_seconds(trainer.optimizer.step) for _ in range(_STEPS))
    flops_per_s = _flops(part, rows, length) / max(step - update, 1e-9)
    n_params = [ledger(one, "fp32").params.total for one in (spec, part)]
    whole = _flops(spec, train.rows, recipe.data.length) / flops_per_s + update * n_params[0] / n_params[1]
    return Speed(whole, flops_per_s, layers, spec.n_layers, rows, length)


def _part(spec: ModelSpec, rows: int, length: int) -> tuple[int, int, int]:
    """Layers, rows and tokens of a step of at most `_FLOPS`: fewer rows first, then layers, then tokens."""
    layers = spec.n_layers
    while rows > 1 and _flops(spec, rows, length) > _FLOPS:
        rows //= 2
    while layers > 1 and _flops(spec.replace(layers=spec.layers[:layers]), rows, length) > _FLOPS:
        layers = max(1, layers // 2)
    while length > 128 and _flops(spec.replace(layers=spec.layers[:layers]), rows, length) > _FLOPS:
        length //= 2
    return layers, rows, length


def _flops(spec: ModelSpec, rows: int, length: int) -> int:
    return ledger(spec, "fp32").totals(Workload("train", batch=rows, new=length)).flops


def _trainer(spec: ModelSpec, train: TrainPart, length: int) -> Trainer:
    """Of random tokens, at one rate; nothing that is not finite ends it."""
    decoder = init_weights(Decoder(spec), train.seed)
    train = replace(train, compile=False, max_nonfinite=10**9)
    samples = _Noise(spec.vocab_size, length)
    return trainer_around(decoder, ledger(spec).tensors, train, samples, lambda step: 1.0)


@dataclass(frozen=True)
class _Noise:
    """Rows of random tokens, of a few documents each, as real rows are."""

    vocab_size: int
    length: int

    def batch(self, first: int, count: int) -> Batch:
        draw = np.random.default_rng(first)
        shape = count, self.length
        ids, labels = (draw.integers(0, self.vocab_size, shape) for _ in range(2))
        size = math.ceil(self.length / 3)
        places = np.broadcast_to(np.arange(self.length), shape).copy()
        return Batch(ids, places % size, labels, places // size)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def matmul_flops_per_s(dtype: str) -> float:
    """FLOPs a second (a multiply-add is 2) of the fastest product of two 1024 × 1024 matrices: what a step's
    own are measured against."""
    a = torch.randn(1024, 1024).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    _ = a @ a  # the first one is slow
    return 2 * 1024**3 / min(_seconds(lambda: a @ a) for _ in range(5))
