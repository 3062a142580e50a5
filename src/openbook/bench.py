"""How fast a model runs: beside the limit of this machine, and beside another engine.

Every speed here has a limit that the ledger predicts. Reading a prompt is bounded by the machine's
matrix products; writing an answer by its memory, since every token reads every weight once. Both limits
are measured in the same process, so that a share of them means something.

Engines are measured in turns, A B A B, because a laptop or a shared server drifts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from openbook.infer.cache import Cache
from openbook.ledger import Ledger, Workload
from openbook.model import Decoder

# --- the machine --------------------------------------------------------------------------------


def read_bandwidth(seconds: float = 0.5) -> float:
    """Bytes a second that this machine reads from memory: the fastest sum over 256 MiB.

    One thread alone sometimes reads faster than all together, so both are tried.
    """
    buffer = torch.ones(1 << 26)
    threads = torch.get_num_threads()
    best = float("inf")
    try:
        for n in sorted({1, threads}):
            torch.set_num_threads(n)
            best = min(best, _best_time(buffer.sum, seconds / 2))
    finally:
        torch.set_num_threads(threads)
    return buffer.nbytes / best


def matmul_rate(dtype: torch.dtype = torch.float32, seconds: float = 0.5) -> float:
    """FLOPs a second (a multiply-add is 2) of the fastest product of two 1024 × 1024 matrices."""
    n = 1024
    a = torch.randn(n, n).to(dtype)
    return 2 * n**3 / _best_time(lambda: a @ a, seconds)


def _best_time(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of the runs that fit in `seconds`, at least three after a first to warm up."""
    work()
    best, runs, end = float("inf"), 0, time.perf_counter() + seconds
    while runs < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


# --- engines ------------------------------------------------------------------------------------


class Engine(Protocol):
    """Something that runs a model of `vocab_size` tokens, one sequence at a time."""

    name: str
    vocab_size: int

    def start(self, capacity: int) -> None:
        """Forgets everything and makes room for `capacity` tokens."""

    def step(self, ids: Tensor) -> Tensor:
        """Appends ids [1, T]; returns the last one's logits [1, V]."""
        ...


class Openbook:
    """Our decoder with our cache."""

    def __init__(self, decoder: Decoder, name: str = "openbook") -> None:
        self.name = name
        self.vocab_size = decoder.spec.vocab_size
        self._decoder = decoder

    def start(self, capacity: int) -> None:
        weight = self._decoder.embed.weight
        self._cache = Cache(self._decoder.spec, 1, capacity, weight.dtype, weight.device)

    def step(self, ids: Tensor) -> Tensor:
        return self._decoder(ids, cache=self._cache, last_only=True)[:, -1]


class HuggingFace:
    """transformers on the same weights, with its own default cache and attention."""

    def __init__(self, folder: Path, dtype: torch.dtype, name: str = "transformers") -> None:
        from transformers import AutoModelForCausalLM

        self.name = name
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.vocab_size = self._model.config.vocab_size

    def start(self, capacity: int) -> None:
        self._cache = None

    def step(self, ids: Tensor) -> Tensor:
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        return out.logits[:, -1]


# --- tests --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Test:
    """`pp512` reads a prompt of 512 tokens, `tg128` writes 128 tokens one by one from an empty cache."""

    kind: Literal["pp", "tg"]
    n: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.n}"

    def run(self, engine: Engine) -> float:
        """Seconds that the engine takes."""
        ids = torch.randint(engine.vocab_size, (1, self.n), generator=torch.Generator().manual_seed(0))
        engine.start(self.n)
        start = time.perf_counter()
        if self.kind == "pp":
            engine.step(ids)
        else:
            token = ids[:, :1]
            for _ in range(self.n):
                token = engine.step(token).argmax(-1, keepdim=True)
        return time.perf_counter() - start


@dataclass
class Speed:
    """Tokens a second of one engine in one test, one sample a repetition."""

    engine: str
    test: Test
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the slowest and the fastest repetition."""
        return (max(self.samples) - min(self.samples)) / 2


def measure(
    engines: Sequence[Engine],
    tests: Sequence[Test],
    repetitions: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Speed]:
    """Runs every test on every engine in turns, once to warm up and then `repetitions` times."""
    speeds = [Speed(engine.name, test) for test in tests for engine in engines]
    with torch.inference_mode():
        for repetition in range(repetitions + 1):
            for speed, engine in zip(speeds, list(engines) * len(tests), strict=True):
                progress(f"{speed.test.name} {engine.name} {repetition}/{repetitions}")
                seconds = speed.test.run(engine)
                if repetition:
                    speed.samples.append(speed.test.n / seconds)
    return speeds


# --- the limit ----------------------------------------------------------------------------------


def limit(book: Ledger, test: Test, flops_per_s: float, bytes_per_s: float) -> float:
    """Tokens a second that the machine allows for this model: the ledger's cost over the measured rate."""
    if test.kind == "pp":
        flops = book.totals(Workload("prefill", new=test.n)).flops
        return test.n * flops_per_s / flops
    # A cache grows from 0 to n tokens, so half of n stands for all steps.
    return bytes_per_s / book.bytes_per_token(position=test.n // 2)
