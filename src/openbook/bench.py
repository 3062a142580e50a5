"""How fast a model runs: beside the limit of this machine, and beside another engine.

Every speed here has a limit that the ledger predicts. Reading a prompt is bounded by the machine's
matrix products; writing an answer by its memory, since every token reads every weight once. Both limits
are measured in the same process, so that a share of them means something.

Engines are measured in turns, A B A B, because a laptop or a shared server drifts.
"""

from __future__ import annotations

import inspect
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from openbook.infer.generate import cache_for
from openbook.ledger import Ledger, Workload
from openbook.ledger.tensors import nbytes
from openbook.lm import LanguageModel
from openbook.model import Decoder, ExplicitCore
from openbook.native import NativeDecoder

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
    """A loaded model with our own cache, through whatever generates for it."""

    name = "openbook"

    def __init__(self, lm: LanguageModel) -> None:
        self.vocab_size = lm.spec.vocab_size
        self._decoder = lm.decoder
        self._run: Callable[..., Tensor] = lm.engine

    def start(self, capacity: int) -> None:
        self._cache = cache_for(self._decoder, 1, capacity)

    def step(self, ids: Tensor) -> Tensor:
        return self._run(ids, cache=self._cache, last_only=True)[:, -1]


class HuggingFace:
    """transformers on the same weights, with its own default cache and attention."""

    name = "transformers"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.vocab_size = self._model.config.vocab_size
        # Renamed in 5.2x; the old name still works there, with a warning for each call.
        known = inspect.signature(self._model.forward).parameters
        self._keyword = "cache" if "cache" in known else "past_key_values"

    def start(self, capacity: int) -> None:
        self._cache = None

    def step(self, ids: Tensor) -> Tensor:
        out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._keyword: self._cache})
        self._cache = getattr(out, self._keyword)
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


def measure(
    engines: Sequence[Engine],
    tests: Sequence[Test],
    repetitions: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[tuple[str, Test], list[float]]:
    """Tokens a second by engine and test, one number a repetition, after one run to warm up.

    The engines take turns within every repetition.
    """
    speeds: dict[tuple[str, Test], list[float]] = {(e.name, test): [] for test in tests for e in engines}
    with torch.inference_mode():
        for repetition in range(repetitions + 1):
            for test in tests:
                for engine in engines:
                    progress(f"{test.name} with {engine.name}, {repetition} of {repetitions} done")
                    seconds = test.run(engine)
                    if repetition:
                        speeds[engine.name, test].append(test.n / seconds)
    return speeds


# --- beside the limit, and beside transformers --------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What this machine can do: bytes read a second, and FLOPs a second of a matrix product in `dtype`."""

    bytes_per_s: float
    flops_per_s: float
    threads: int

    def best(self, other: Machine) -> Machine:
        """The higher of two measurements: a limit is what the machine does when nothing disturbs it."""
        faster = max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s)
        return Machine(*faster, self.threads)


def measure_machine(dtype: torch.dtype) -> Machine:
    """Measures both limits, in about a second."""
    return Machine(read_bandwidth(), matmul_rate(dtype), torch.get_num_threads())


def stored_types(lm: LanguageModel) -> dict[str, str]:
    """Parameter name -> GGML type, of the matrices that single tokens read in their quantised form."""
    return lm.engine.block_types if isinstance(lm.engine, NativeDecoder) else {}


def types_in_short(types: Mapping[str, str], dtype: str) -> str:
    """'bf16'; or 'q4_1+bf16' where prompts are read in bf16 and most matrices of a single token are Q4_1."""
    usual = Counter(types.values()).most_common(1)
    return f"{usual[0][0].lower()}+{dtype}" if usual else dtype


def bytes_per_token(book: Ledger, position: int, types: Mapping[str, str] | None = None) -> int:
    """Bytes that one step after `position` cached tokens reads: every weight once, and the cache.

    Weights are of the ledger's dtype, those named in `types` of another. A table that is only looked
    up counts nothing; a tied head reads the embedding's matrix.
    """
    weights = sum(
        nbytes(row.count, (types or {}).get(row.tie or row.name, book.dtype))
        for row in book.tensors
        if row.part not in ("embed", "positions")
    )
    return weights + book.totals(Workload("decode", past=position)).kv_read


def limit(book: Ledger, test: Test, machine: Machine, types: Mapping[str, str] | None = None) -> float:
    """Tokens a second that the machine allows for this model: the ledger's cost over the measured rate."""
    if test.kind == "pp":
        return test.n * machine.flops_per_s / book.totals(Workload("prefill", new=test.n)).flops
    # The cache grows from 0 to n tokens, so half of n stands for all steps.
    return machine.bytes_per_s / bytes_per_token(book, test.n // 2, types)


@dataclass(frozen=True)
class Result:
    """One line of the table: `samples` and `limit` in tokens a second, `size` in bytes.

    `dtype` is in `types_in_short`'s words.

    `ratio` is the median of our speed over theirs, repetition by repetition; None if there was no other.
    """

    dtype: str
    size: int
    params: int
    engine: str
    test: Test
    samples: list[float]
    limit: float
    machine: Machine
    ratio: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the slowest and the fastest repetition."""
        return (max(self.samples) - min(self.samples)) / 2

    @property
    def share(self) -> float:
        """Of the limit."""
        return self.median / self.limit


def bench(
    lm: LanguageModel,
    tests: Sequence[Test],
    repetitions: int = 5,
    against_hf: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Runs the tests on a loaded model, and on transformers with the same weights if wanted."""
    dtype = lm.decoder.embed.weight.dtype
    ours = Openbook(lm)
    with ExitStack() as stack:
        engines: list[Engine] = [ours]
        if against_hf:
            progress("handing the weights to transformers")
            engines.append(stack.enter_context(hugging_face(lm.decoder)))
        progress("measuring this machine")
        machine = measure_machine(dtype)
        speeds = measure(engines, tests, repetitions, progress)
        progress("measuring this machine once more")
        machine = machine.best(measure_machine(dtype))
    results = []
    for (name, test), samples in speeds.items():
        types = stored_types(lm) if name == ours.name else {}
        ratio = _ratio(samples, speeds[engines[-1].name, test]) if against_hf and name == ours.name else None
        results.append(_result(Ledger(lm.spec, str(dtype)), types, name, test, samples, machine, ratio))
    return results


def _result(
    book: Ledger,
    types: Mapping[str, str],
    engine: str,
    test: Test,
    samples: list[float],
    machine: Machine,
    ratio: float | None,
) -> Result:
    return Result(
        dtype=types_in_short(types, book.dtype),
        size=sum(nbytes(r.count, types.get(r.name, book.dtype)) for r in book.tensors if r.tie is None),
        params=book.params.total,
        engine=engine,
        test=test,
        samples=samples,
        limit=limit(book, test, machine, types),
        machine=machine,
        ratio=ratio,
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@contextmanager
def hugging_face(decoder: Decoder) -> Iterator[HuggingFace]:
    """transformers with the decoder's own weights, through a folder that is removed afterwards."""
    from openbook.weights.save import save_hf

    with tempfile.TemporaryDirectory(prefix="openbook-bench-") as scratch:
        folder = Path(scratch) / "model"
        save_hf(decoder, folder)
        yield HuggingFace(folder, decoder.embed.weight.dtype)


# --- what the ledger predicts, counted ----------------------------------------------------------


def count_flops(decoder: Decoder, position: int) -> int:
    """FLOPs of all matrix products that one token after `position` cached ones really makes.

    Counted by PyTorch as it runs them, with attention made explicit, since its fused kernel counts as 0
    on a CPU. It is what `Ledger.flops_per_token(position)` predicts.
    """
    cache = cache_for(decoder, 1, position + 1)
    cores = {name: module for name, module in decoder.named_modules() if name.endswith(".core")}
    with torch.inference_mode():
        if position:
            decoder(torch.zeros(1, position, dtype=torch.int64), cache=cache, last_only=True)
        try:
            for name in cores:
                decoder.set_submodule(name, ExplicitCore())
            with FlopCounterMode(display=False) as counter:
                decoder(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
        finally:
            for name, core in cores.items():
                decoder.set_submodule(name, core)
    return counter.get_total_flops()
