"""`openbook bench`: tokens a second, beside the machine's limit and beside transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from openbook.cli import terminal
from openbook.cli.errors import UsageError
from openbook.cli.options import Force, Json, Quiet, Threads, Verbose, Weights

if TYPE_CHECKING:
    from openbook.bench import Result, Test


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
        str,
        typer.Option(help="default (as generate runs it), fp32, bf16; several with commas between."),
    ] = "default",
    threads: Threads = None,
    vs: Annotated[
        Literal["hf"] | None,
        typer.Option(help="Run Hugging Face on the same weights, in turns.", show_default=False),
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Tokens a second for reading (pp512) and writing (tg128), and their share of this machine's limit."""
    from openbook import bench

    tests = [bench.Test("pp", n_prompt)] * (n_prompt > 0) + [bench.Test("tg", n_gen)] * (n_gen > 0)
    if not tests:
        raise UsageError("-p 0 and -n 0 leave nothing to measure")
    name = Path(model).stem
    results: list[Result] = []
    for wanted in dtype.split(","):
        results += _measure(
            model, None if wanted == "default" else wanted, tests, repetitions, threads, vs == "hf", force
        )
    if json:
        terminal.write_json("bench", {"model": name, "results": [_plain(result) for result in results]})
    else:
        print(_table(name, results), end="")


def _measure(
    model: str,
    dtype: str | None,
    tests: list[Test],
    repetitions: int,
    threads: int | None,
    hf: bool,
    force: bool,
) -> list[Result]:
    from openbook import bench
    from openbook.cli.loading import load

    lm = load(model, dtype, threads, force=force)
    with terminal.Status() as status:
        return bench.bench(lm, tests, repetitions, hf, status)


def _table(name: str, results: list[Result]) -> str:
    from openbook.ledger.table import Column, Table, human_bytes

    compared = any(result.ratio for result in results)
    titles = ["model", "size", "params", "backend", "threads", "test", "t/s", "of limit"]
    rows = [
        (
            f"{name} {result.dtype}",
            human_bytes(result.size),
            f"{result.params / 1e6:,.2f} M",
            result.engine,
            str(result.machine.threads),
            result.test.name,
            f"{result.median:,.2f} ± {result.spread:,.2f}",
            f"{result.share:.0%}",
            *([f"{result.ratio:.2f} ×" if result.ratio else ""] if compared else []),
        )
        for result in results
    ]
    if compared:
        titles.append("vs hf")
    left = {"model", "backend", "test"}
    columns = tuple(Column(title, "text" if title in left else "count") for title in titles)
    return Table("", columns, tuple(rows), _notes(results)).text().lstrip("\n")


def _notes(results: list[Result]) -> tuple[str, ...]:
    rates = {result.dtype.rpartition("+")[2]: result.machine for result in results}
    gemm = ", ".join(f"{machine.flops_per_s / 1e9:,.0f} GFLOP/s in {name}" for name, machine in rates.items())
    read = max(machine.bytes_per_s for machine in rates.values())
    notes = [
        "t/s: median of the repetitions ± half their range.",
        f"limit of pp: the ledger's FLOPs at a measured matrix product's {gemm}.",
        f"limit of tg: the ledger's bytes at a measured read bandwidth of {read / 1e9:.1f} GB/s.",
    ]
    return (*notes, *_best_against_best(results))


def _best_against_best(results: list[Result]) -> Iterator[str]:
    """Our first row of each test against the fastest of the others, where there were several."""
    for test in dict.fromkeys(result.test for result in results):
        ours = [r for r in results if r.test == test and r.ratio]
        theirs = [r for r in results if r.test == test and not r.ratio]
        if len(ours) > 1:
            best = max(theirs, key=lambda r: r.median)
            ratio = ours[0].median / best.median
            yield f"{test.name}: {ours[0].dtype} is {ratio:.2f} × the better of {best.engine}, {best.dtype}."


def _plain(result: Result) -> dict[str, Any]:
    return {
        "dtype": result.dtype,
        "bytes": result.size,
        "parameters": result.params,
        "backend": result.engine,
        "threads": result.machine.threads,
        "test": result.test.name,
        "tokens_per_s": result.median,
        "spread": result.spread,
        "samples": result.samples,
        "limit_tokens_per_s": result.limit,
        "share_of_limit": result.share,
        "read_bytes_per_s": result.machine.bytes_per_s,
        "matmul_flops_per_s": result.machine.flops_per_s,
        "ratio_to_hf": result.ratio,
    }
