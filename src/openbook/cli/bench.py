"""`openbook bench`: tokens a second, beside the machine's limit and beside transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from openbook.cli import terminal
from openbook.cli.errors import MissingExtraError, UsageError
from openbook.cli.options import Force, Json, Quiet, Threads, Verbose, Weights

if TYPE_CHECKING:
    from openbook.bench import Result
    from openbook.bench_experts import ExpertsResult
    from openbook.bench_train import TrainResult


def run(
    model: Weights,
    n_prompt: Annotated[
        int, typer.Option("--n-prompt", "-p", min=0, help="Prompt tokens to read; 0: no such test.")
    ] = 512,
    n_gen: Annotated[
        int, typer.Option("--n-gen", "-n", min=0, help="Tokens to write; 0: no such test.")
    ] = 128,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Of each test.")] = 5,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="default (as generate runs it), fp32, bf16; several with commas between.",
            show_default="default; default,fp32,bf16 with --vs hf",
        ),
    ] = None,
    threads: Threads = None,
    vs: Annotated[
        Literal["hf"] | None,
        typer.Option(help="Run Hugging Face on the same weights, in turns.", show_default=False),
    ] = None,
    experts: Annotated[
        bool,
        typer.Option(
            "--experts",
            help="Only the experts of one layer, with random weights: MODEL may be a preset, too.",
        ),
    ] = False,
    train: Annotated[
        bool,
        typer.Option(
            "--train", help="Steps of training, and their memory; MODEL may be a preset or a config.json."
        ),
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="With --train: under torch.compile as well.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="With --train: rows of a step.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="With --train: tokens of a row.")] = 512,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Tokens a second for reading (pp512) and writing (tg128), and their share of this machine's limit."""
    if not n_prompt and not n_gen:
        raise UsageError("-p 0 and -n 0 leave nothing to measure")
    if vs and find_spec("transformers") is None:
        raise MissingExtraError("--vs hf needs transformers: pip install transformers accelerate gguf")
    if experts:
        _bench_experts(model, dtype, threads, repetitions, vs == "hf", force, json)
        return
    if train:
        shapes = [(rows, length, name) for name in (dtype or "fp32,bf16").split(",")]
        _bench_train(model, shapes, threads, repetitions, vs == "hf", compiled, force, json)
        return
    from openbook import bench
    from openbook.cli.loading import load, source_with_weights

    source_with_weights(model)  # before anything else is said: there may be nothing to measure
    _warn_if_busy()
    tests = [bench.Test("pp", n_prompt)] * (n_prompt > 0) + [bench.Test("tg", n_gen)] * (n_gen > 0)
    wanted = (dtype or ("default,fp32,bf16" if vs else "default")).split(",")
    models = {name: load(model, None if name == "default" else name, threads, force=force) for name in wanted}
    with terminal.Status() as status:
        results = bench.bench(
            models, tests, repetitions, vs == "hf", force=force, progress=status, warn=_warn
        )
    name = Path(model).stem
    if json:
        terminal.write_json("bench", {"model": name, "results": [_plain(result) for result in results]})
    else:
        print(_table(name, results), end="")


def _bench_experts(
    model: str, dtype: str | None, threads: int | None, repetitions: int, vs_hf: bool, force: bool, json: bool
) -> None:
    import torch

    from openbook.bench_experts import bench_experts
    from openbook.sources import resolve

    spec = resolve(model).spec
    _warn_if_busy()
    if threads is not None:
        torch.set_num_threads(threads)
    dtypes = (dtype or "fp32,bf16").split(",")
    with terminal.Status() as status:
        results = bench_experts(
            spec, dtypes, repetitions=repetitions, against_hf=vs_hf, force=force, progress=status
        )
    name = Path(model).stem
    if json:
        terminal.write_json("bench", {"model": name, "experts": [_plain_experts(r) for r in results]})
    else:
        print(_experts_table(name, results), end="")


def _bench_train(
    model: str,
    shapes: list[tuple[int, int, str]],
    threads: int | None,
    repetitions: int,
    vs_hf: bool,
    compiled: bool,
    force: bool,
    json: bool,
) -> None:
    import torch

    from openbook.bench_train import Shape, bench_train
    from openbook.sources import resolve

    if unknown := {dtype for *_, dtype in shapes} - {"fp32", "bf16"}:
        raise UsageError(f"--dtype {min(unknown)}: training computes in fp32 or bf16")
    spec = resolve(model).spec
    _warn_if_busy()
    if threads is not None:
        torch.set_num_threads(threads)
    results = []
    with terminal.Status() as status:
        for shape in shapes:
            results += bench_train(
                spec, Shape(*shape), repetitions, vs_hf, compiled, force=force, progress=status
            )
    name = Path(model).stem
    if json:
        terminal.write_json("bench", {"model": name, "train": [_plain_train(r) for r in results]})
    else:
        print(_train_table(name, results), end="")


def _warn(text: str) -> None:
    terminal.note(f"warning: {text}")


def _warn_if_busy() -> None:
    """More than half a program a core is already running: whatever is measured now shares the machine."""
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0, os.cpu_count() or 1
    if load > cores / 2:
        _warn(f"other programs are running (load {load:.1f} on {cores} cores): the figures will be noisy")


# --- for people ---------------------------------------------------------------------------------


def _table(name: str, results: list[Result]) -> str:
    """llama-bench's columns, the share of the limit, and the ratio if there is one."""
    from openbook.ledger.table import Column, Table, human_bytes

    compared = any(result.ratio for result in results)
    titles = ["model", "size", "params", "backend", "threads", "test", "t/s", "of limit"]
    rows = [
        (
            f"{name} {'default' if result.setup.default else result.dtype}",
            human_bytes(result.size),
            f"{result.params / 1e6:,.2f} M",
            result.setup.engine,
            str(result.machine.threads),
            result.test,
            _speed(result),
            f"{result.share:.0%}" if result.share is not None else "",
            *([f"{result.ratio:.2f} × hf {result.hf_dtype}" if result.ratio else ""] if compared else []),
        )
        for result in results
    ]
    if compared:
        titles.append("vs hf")
    left = {"model", "backend", "test", "vs hf"}
    columns = tuple(Column(title, "text" if title in left else "count") for title in titles)
    return Table("", columns, tuple(rows), tuple(_notes(results))).text().lstrip("\n")


def _speed(result: Result) -> str:
    """Tokens a second; seconds where a user waits for the end of it."""
    from openbook.bench import spread

    if _in_seconds(result):
        return f"{result.seconds:,.2f} ± {spread(result.samples):,.2f} s"
    return f"{result.tokens / result.seconds:,.2f} ± {spread(result.rates):,.2f}"


def _in_seconds(result: Result) -> bool:
    return result.test == "load" or "+" in result.test


def _notes(results: list[Result]) -> Iterator[str]:
    machine, (first, *_) = results[0].machine, results
    yield (
        f"t/s: tokens a second, the median of {len(first.samples)} repetitions ± half their range; "
        "with an s: seconds, where less is better."
    )
    if default := next((r for r in results if r.setup.default), None):
        yield f"default: as generate runs it, here {_in_words(default)}."
    if any(result.ratio for result in results):
        yield (
            "vs hf: how many times as fast as transformers in the same dtype, or our default as transformers "
            "in fp32 or bf16, whichever is faster; the median of the repetitions' ratios."
        )
    if job := next((r for r in results if "+" in r.test), None):
        yield f"{job.test}: the whole job, the seconds of both."
    if load := next((r for r in results if r.test == "load"), None):
        yield (
            "load: from a file in the page cache to a model that can run, ours with its tokenizer; "
            f"{len(load.samples)} repetitions."
        )
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in machine.flops_per_s.items())
    yield (
        f"limit of pp: the ledger's FLOPs at a measured matrix product's {rates}; of tg: the ledger's "
        f"bytes at a measured read bandwidth of {machine.bytes_per_s / 1e9:.1f} GB/s."
    )


def _in_words(default: Result) -> str:
    types, _, dtype = default.dtype.rpartition("+")
    return f"{types} blocks for single tokens and {dtype} for prompts" if types else dtype


def _experts_table(name: str, results: list[ExpertsResult]) -> str:
    from openbook.bench import spread
    from openbook.ledger.table import Column, Table

    compared = any(result.ratio for result in results)
    rows = [
        (
            f"{name} {result.dtype}",
            result.side.engine,
            result.side.way,
            f"{result.tokens:,}",
            f"{result.seconds * 1e3:,.2f} ± {spread(result.samples) * 1e3:,.2f}",
            f"{result.limit / result.seconds:.0%}",
            *((f"{result.ratio:.2f}", f"{result.error:.0e}") if compared else ()),
        )
        for result in results
    ]
    titles = ["experts of", "backend", "way", "tokens", "ms", "of limit", *(["vs eager", "error"] * compared)]
    left = {"experts of", "backend", "way"}
    columns = tuple(Column(title, "text" if title in left else "count") for title in titles)
    return Table("", columns, tuple(rows), tuple(_experts_notes(results, compared))).text().lstrip("\n")


def _experts_notes(results: list[ExpertsResult], compared: bool) -> Iterator[str]:
    machine = results[0].machine
    yield (
        f"ms: the experts of one layer, random weights and choices, {machine.threads} threads, the median of "
        f"{len(results[0].samples)} repetitions ± half their range."
    )
    yield "way: default is what a loaded model takes."
    if compared:
        yield (
            "vs eager: how many times as fast as transformers' eager experts, the median of the repetitions' "
            "ratios; error: the largest difference from their output, over its largest number."
        )
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in machine.flops_per_s.items())
    yield (
        f"limit: experts that are hit, read at {machine.bytes_per_s / 1e9:.1f} GB/s, or the products at a "
        f"measured {rates}."
    )


def _train_table(name: str, results: list[TrainResult]) -> str:
    from openbook.bench import spread
    from openbook.ledger.table import Column, Table, human_bytes

    titles = ["training", "dtype", "rows", "t/s", "MFU", "ours is", "peak memory", "ours takes"]
    ours = {r.shape: r for r in results if r.way == "openbook"}
    rows = []
    for result in results:
        peak, our_peak = result.peak, ours[result.shape].peak
        off = spread([result.shape.tokens / seconds for seconds in result.samples])
        rows.append(
            (
                f"{name} {result.way}",
                result.shape.dtype,
                f"{result.shape.rows} × {result.shape.length}",
                f"{result.tokens_per_s:,.0f} ± {off:,.0f}",
                f"{result.mfu:.0%}",
                f"{result.ratio:.2f} ×" if result.way != "openbook" else "",
                human_bytes(peak) if peak is not None else "",
                f"{our_peak / peak:.2f} ×" if peak and our_peak and result.way != "openbook" else "",
            )
        )
    left = {"training", "dtype"}
    columns = tuple(Column(title, "text" if title in left else "count") for title in titles)
    return Table("", columns, tuple(rows), tuple(_train_notes(results))).text().lstrip("\n")


def _train_notes(results: list[TrainResult]) -> Iterator[str]:
    from openbook.ledger.table import human_bytes

    yield (
        f"t/s: tokens a second of whole steps, the median of {len(results[0].samples)} repetitions ± half "
        "their range; ours is: how many times as fast Openbook was, the median of the repetitions' ratios."
    )
    rates = {r.shape.dtype: f"{r.matmul_flops_per_s / 1e9:,.0f} GFLOP/s in {r.shape.dtype}" for r in results}
    yield f"MFU: the ledger's FLOPs, 3 × forward, over products measured at {', '.join(rates.values())}."
    if any(r.peak for r in results):
        yield "peak memory: of a new process during its first steps, beyond what it held without a model."
        predicted = {r.shape.dtype: r.predicted for r in results if r.predicted}
        words = ", ".join(f"{human_bytes(n)} in {dtype}" for dtype, n in predicted.items())
        yield f"predicted from the ledger for Openbook: {words}."


# --- for programs -------------------------------------------------------------------------------


def _plain(result: Result) -> dict[str, Any]:
    from openbook.bench import spread

    rates = result.rates
    return {
        "dtype": result.dtype,
        "default": result.setup.default,
        "bytes": result.size,
        "parameters": result.params,
        "backend": result.setup.engine,
        "threads": result.machine.threads,
        "test": result.test,
        "tokens": result.tokens,
        "tokens_per_s": result.tokens / result.seconds if rates else None,
        "tokens_per_s_spread": spread(rates) if rates else None,
        "seconds": result.seconds,
        "seconds_spread": spread(result.samples),
        "samples_s": list(result.samples),
        "limit_s": result.limit,
        "share_of_limit": result.share,
        "read_bytes_per_s": result.machine.bytes_per_s,
        "matmul_flops_per_s": result.machine.flops_per_s.get(result.setup.dtype),
        "ratio_to_hf": result.ratio,
        "ratio_to_hf_dtype": result.hf_dtype,
    }


def _plain_train(result: TrainResult) -> dict[str, Any]:
    return {
        "way": result.way,
        "dtype": result.shape.dtype,
        "rows": result.shape.rows,
        "length": result.shape.length,
        "tokens_per_s": result.tokens_per_s,
        "seconds": result.seconds,
        "samples_s": list(result.samples),
        "first_loss": result.first_loss,
        "flops": result.flops,
        "matmul_flops_per_s": result.matmul_flops_per_s,
        "mfu": result.mfu,
        "ratio_of_openbook": result.ratio,
        "peak_bytes": result.peak,
        "predicted_bytes": result.predicted,
    }


def _plain_experts(result: ExpertsResult) -> dict[str, Any]:
    from openbook.bench import spread

    return {
        "backend": result.side.engine,
        "way": result.side.way,
        "dtype": result.dtype,
        "tokens": result.tokens,
        "threads": result.machine.threads,
        "seconds": result.seconds,
        "seconds_spread": spread(result.samples),
        "samples_s": list(result.samples),
        "limit_s": result.limit,
        "share_of_limit": result.limit / result.seconds,
        "read_bytes_per_s": result.machine.bytes_per_s,
        "matmul_flops_per_s": result.machine.flops_per_s[result.dtype],
        "ratio_to_hf_eager": result.ratio,
        "error": result.error,
    }
