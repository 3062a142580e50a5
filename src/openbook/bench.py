"""How fast a model runs: beside the limit of this machine, and beside another engine.

Every speed here has a limit that the ledger predicts. Reading a prompt is bounded by the machine's
matrix products; writing an answer by its memory, since every token reads every weight once. Both limits
are measured in the same process, so that a share of them means something.

Engines are measured in turns, A B A B, because a laptop or a shared server drifts.
"""

from __future__ import annotations

import inspect
import io
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from openbook.infer.generate import cache_for
from openbook.ledger import Ledger, Workload
from openbook.ledger.tensors import dtype_name, nbytes
from openbook.lm import LanguageModel, load
from openbook.model import Decoder, ExplicitCore
from openbook.native import NativeDecoder
from openbook.spec.model import ModelSpec
from openbook.weights.fit import check_fit
from openbook.weights.tensors import torch_dtype

Notify = Callable[[str], None]
"""Told in a few words what is going on."""

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


@dataclass(frozen=True)
class Setup:
    """Who computes with the model, and how it holds the weights.

    They are of `dtype`, save that single tokens read the matrices in `types` (parameter name -> GGML type)
    in their quantised form. `default` marks the setup that users get unasked.
    """

    engine: Literal["openbook", "transformers"]
    dtype: str
    types: Mapping[str, str] = field(default_factory=dict)
    default: bool = False

    def __str__(self) -> str:
        return f"{self.engine} in {types_in_short(self.types, self.dtype)}"


class Engine(Protocol):
    """Something that runs a model of `vocab_size` tokens, one sequence at a time."""

    setup: Setup
    vocab_size: int

    def start(self, capacity: int) -> None:
        """Forgets everything and makes room for `capacity` tokens."""

    def step(self, ids: Tensor) -> Tensor:
        """Appends ids [1, T]; returns the last one's logits [1, V]."""
        ...


class Openbook:
    """A loaded model with our own cache, through whatever generates for it."""

    def __init__(self, lm: LanguageModel, default: bool = False) -> None:
        self.setup = Setup("openbook", computes_in(lm), stored_types(lm), default)
        self.vocab_size = lm.spec.vocab_size
        self._decoder = lm.decoder
        self._run: Callable[..., Tensor] = lm.engine

    def start(self, capacity: int) -> None:
        self._cache = cache_for(self._decoder, 1, capacity)

    def step(self, ids: Tensor) -> Tensor:
        return self._run(ids, cache=self._cache, last_only=True)[:, -1]


class HuggingFace:
    """transformers on a folder or a GGUF file, with its own default cache and attention."""

    def __init__(self, path: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        where = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
        with redirect_stderr(io.StringIO()):  # a progress bar that nothing else turns off
            model = AutoModelForCausalLM.from_pretrained(where[0], dtype=torch_dtype(dtype), **where[1])
        self.setup = Setup("transformers", dtype)
        self._model: Any = model.eval()
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
    engines: Sequence[Engine], tests: Sequence[Test], repetitions: int, progress: Notify = lambda _: None
) -> dict[tuple[Engine, Test], list[float]]:
    """Seconds by engine and test, one number a repetition, after one run to warm up.

    The engines take turns within every repetition.
    """
    seconds: dict[tuple[Engine, Test], list[float]] = {(e, test): [] for test in tests for e in engines}
    with torch.inference_mode():
        for repetition in range(repetitions + 1):
            for test in tests:
                for engine in engines:
                    progress(f"{test.name}, {engine.setup}, {repetition} of {repetitions} repetitions done")
                    taken = test.run(engine)
                    if repetition:
                        seconds[engine, test].append(taken)
    return seconds


# --- the machine's limit ------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What this machine can do: bytes read a second, and FLOPs a second of a matrix product by dtype."""

    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    threads: int

    def best(self, other: Machine) -> Machine:
        """The higher of two measurements: a limit is what the machine does when nothing disturbs it."""
        flops_per_s = {dtype: max(rate, other.flops_per_s[dtype]) for dtype, rate in self.flops_per_s.items()}
        return Machine(max(self.bytes_per_s, other.bytes_per_s), flops_per_s, self.threads)


def measure_machine(dtypes: Sequence[str]) -> Machine:
    """Measures both limits, in half a second and another for each dtype."""
    rates = {dtype: matmul_rate(torch_dtype(dtype)) for dtype in dtypes}
    return Machine(read_bandwidth(), rates, torch.get_num_threads())


def computes_in(lm: LanguageModel) -> str:
    """The ledger's name of the dtype that a model's parameters have."""
    return dtype_name(str(lm.decoder.embed.weight.dtype))


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
    """The fewest seconds this machine allows for the test: the ledger's cost over the measured rate."""
    if test.kind == "pp":
        return book.totals(Workload("prefill", new=test.n)).flops / machine.flops_per_s[book.dtype]
    # The cache grows from 0 to n tokens, so half of n stands for all steps.
    return test.n * bytes_per_token(book, test.n // 2, types) / machine.bytes_per_s


# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One line of the table: `samples` in seconds, one a repetition; `size` in bytes.

    `test` is a `Test.name`, two joined by a plus for the seconds of both, or "load", which has neither
    `tokens` nor `limit` (in seconds). `ratio` says how many times as fast as transformers in `hf_dtype` we
    were, the median over the repetitions; None if they were not compared.
    """

    setup: Setup
    params: int
    size: int
    machine: Machine
    test: str
    samples: Sequence[float]
    tokens: int = 0
    limit: float | None = None
    ratio: float | None = None
    hf_dtype: str | None = None

    @property
    def dtype(self) -> str:
        """In the words of `types_in_short`."""
        return types_in_short(self.setup.types, self.setup.dtype)

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)

    @property
    def rates(self) -> list[float]:
        """Tokens a second, one a repetition; empty for a test without tokens."""
        return [self.tokens / seconds for seconds in self.samples] if self.tokens else []

    @property
    def share(self) -> float | None:
        """Of the machine's limit."""
        return None if self.limit is None else self.limit / self.seconds


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the least and the greatest."""
    return (max(samples) - min(samples)) / 2


def bench(
    models: Mapping[str, LanguageModel],
    tests: Sequence[Test],
    repetitions: int = 5,
    against_hf: bool = False,
    *,
    force: bool = False,
    progress: Notify = lambda _: None,
    warn: Notify = lambda _: None,
) -> list[Result]:
    """Runs the tests on one model, loaded in several dtypes, and on transformers with the same weights.

    `models` are by the dtype that was asked for; "default" is the one loaded without. That one is compared
    with transformers in fp32 or bf16, whichever is faster; the others with transformers in their own dtype.

    Raises `WontFitError`, unless `force`, if there is no room for transformers' copies.
    """
    spec = next(iter(models.values())).spec
    engines: list[Engine] = [Openbook(lm, name == "default") for name, lm in models.items()]
    with ExitStack() as stack:
        for dtype in hf_dtypes(models) if against_hf else ():
            progress(f"handing the weights to transformers in {dtype}")
            engines.append(stack.enter_context(hugging_face(models, dtype, force)))
        progress("measuring this machine")
        dtypes = list(dict.fromkeys(engine.setup.dtype for engine in engines))
        machine = measure_machine(dtypes)
        seconds = measure(engines, tests, repetitions, progress)
        progress("measuring this machine once more")
        machine = machine.best(measure_machine(dtypes))
    results = {key: _result(spec, machine, *key, samples) for key, samples in seconds.items()}
    jobs = [together([results[e, test] for test in tests]) for e in engines] if len(tests) > 1 else []
    loads = measure_loading(models, machine, against_hf, force, progress, warn)
    every = [*results.values(), *jobs, *loads]
    return [compared(result, every) for result in every]


def _result(spec: ModelSpec, machine: Machine, engine: Engine, test: Test, samples: list[float]) -> Result:
    setup, book = engine.setup, Ledger(spec, engine.setup.dtype)
    least = limit(book, test, machine, setup.types)
    return Result(setup, book.params.total, _size(book, setup), machine, test.name, samples, test.n, least)


def _size(book: Ledger, setup: Setup) -> int:
    """Bytes of the weights as the setup's single tokens read them."""
    rows = (row for row in book.tensors if row.tie is None)
    return sum(nbytes(row.count, setup.types.get(row.name, book.dtype)) for row in rows)


def together(results: Sequence[Result]) -> Result:
    """Several tests of one setup as one job, whose seconds are the sum of theirs."""
    return replace(
        results[0],
        test="+".join(result.test for result in results),
        samples=[sum(samples) for samples in zip(*(result.samples for result in results), strict=True)],
        tokens=sum(result.tokens for result in results),
        limit=sum(result.limit or 0 for result in results),
    )


def compared(result: Result, results: Sequence[Result]) -> Result:
    """One of our results with its ratio to transformers', if they are among `results`.

    Our default is compared with the fastest of them, what was asked for in a dtype with the same dtype.
    """
    rivals = [r for r in results if (r.setup.engine, r.test) == ("transformers", result.test)]
    if not result.setup.default:
        rivals = [r for r in rivals if r.dtype == result.dtype]
    if result.setup.engine == "transformers" or not rivals:
        return result
    rival = min(rivals, key=lambda r: r.seconds)
    ratio = statistics.median(b / a for a, b in zip(result.samples, rival.samples, strict=True))
    return replace(result, ratio=ratio, hf_dtype=rival.dtype)


# --- transformers with the same weights ---------------------------------------------------------


def hf_dtypes(models: Mapping[str, LanguageModel]) -> list[str]:
    """The dtypes of transformers that the models are compared with: both common ones for our default."""
    wanted = [("fp32", "bf16") if name == "default" else (computes_in(lm),) for name, lm in models.items()]
    return list(dict.fromkeys(dtype for dtypes in wanted for dtype in dtypes))


@contextmanager
def hugging_face(models: Mapping[str, LanguageModel], dtype: str, force: bool) -> Iterator[HuggingFace]:
    """transformers with the weights of a model that has them in `dtype`, or else of the first.

    They are handed over in a folder, which is removed afterwards.
    """
    from openbook.weights.save import save_hf

    lm = next((lm for lm in models.values() if computes_in(lm) == dtype), next(iter(models.values())))
    if not force:
        check_fit(f"the same model in transformers, in {dtype},", Ledger(lm.spec, dtype).weight_bytes)
    with tempfile.TemporaryDirectory(prefix="openbook-bench-") as scratch:
        folder = Path(scratch) / "model"
        save_hf(lm.decoder, folder, dtype)
        yield HuggingFace(folder, dtype)


# --- loading ------------------------------------------------------------------------------------

LOADS = 3
"""How often a model is loaded: transformers takes some 20 seconds for a small GGUF file."""


def measure_loading(
    models: Mapping[str, LanguageModel],
    machine: Machine,
    against_hf: bool = False,
    force: bool = False,
    progress: Notify = lambda _: None,
    warn: Notify = lambda _: None,
) -> list[Result]:
    """From a file that lies in the page cache by now to a model that can run; ours with its tokenizer.

    A GGUF file is loaded in fp32 by both engines in turns. Otherwise (both only map a .safetensors) it is
    ours alone, as the first of `models` was loaded. `warn` is told why something is left out.
    """
    (wanted, lm), *_ = models.items()
    if lm.source is None:
        return []
    path = lm.source.weights
    if against_hf and lm.source.kind == "gguf" and _hf_reads_gguf(warn):
        loaders: list[tuple[Setup, Callable[[], object]]] = [
            (Setup("openbook", "fp32"), lambda: load(path, dtype="fp32", force=force)),
            (Setup("transformers", "fp32"), lambda: HuggingFace(path, "fp32")),
        ]
    else:
        default = wanted == "default"
        dtype = None if default else wanted
        loaders = [(Openbook(lm, default).setup, lambda: load(path, dtype=dtype, force=force))]
    try:
        samples = _time_in_turns(loaders, progress)
    except Exception as error:  # a reader of other people's files: minutes of results must survive it
        warn(f"load is left out: {' '.join(str(error).split())}")
        return []
    books = [Ledger(lm.spec, setup.dtype) for setup, _ in loaders]
    return [
        Result(setup, book.params.total, _size(book, setup), machine, "load", seconds)
        for (setup, _), book, seconds in zip(loaders, books, samples, strict=True)
    ]


def _hf_reads_gguf(warn: Notify) -> bool:
    missing = [name for name in ("accelerate", "gguf") if find_spec(name) is None]
    if missing:
        packages = " and ".join(missing)
        warn(f"loading is not compared: transformers reads GGUF files only with {packages} installed")
    return not missing


def _time_in_turns(
    loaders: Sequence[tuple[Setup, Callable[[], object]]], progress: Notify
) -> list[list[float]]:
    """Seconds of each, `LOADS` times."""
    samples: list[list[float]] = [[] for _ in loaders]
    for repetition in range(LOADS):
        for (setup, make), taken in zip(loaders, samples, strict=True):
            progress(f"load, {setup}, {repetition} of {LOADS} repetitions done")
            start = time.perf_counter()
            model = make()
            taken.append(time.perf_counter() - start)
            del model
    return samples


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
