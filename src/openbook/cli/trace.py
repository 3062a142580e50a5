"""`openbook trace`: every step of a real pass, its shape and what its numbers are like; kept in a file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openbook.cli import terminal
from openbook.cli.errors import UsageError
from openbook.cli.options import Dtype, Force, Json, Prompt, Quiet, Threads, Verbose

if TYPE_CHECKING:
    from openbook.ledger.table import Table
    from openbook.trace import Statistics, Step, Trace

SUFFIX = ".obt"

ModelOrTrace = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"A fetched model's name, a folder or a .gguf file; or a saved trace ({SUFFIX}).",
        show_default=False,
    ),
]


def run(
    model: ModelOrTrace,
    prompt: Prompt = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help=f"Keep it in this file ({SUFFIX}).", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Steps to keep: a name or 'layers.3.attn.*'; may be repeated.", show_default=False),
    ] = None,
    ablate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER.HEAD", help="Zero what this head finds; may be repeated.", show_default=False
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a message, in the model's template.")
    ] = False,
    timed: Annotated[bool, typer.Option("--time", help="Measure the steps.")] = False,
    unfolded: Annotated[bool, typer.Option("--all", help="Every layer by itself, equal ones too.")] = False,
    dtype: Dtype = None,
    threads: Threads = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Runs a text through a model and shows every step: shape, statistics, FLOPs. Equal layers are folded.

    Names may be the ledger's or TransformerLens's (blocks.3.attn.hook_pattern).
    """
    if model.endswith(SUFFIX):
        if prompt is not None or output is not None or only or ablate or chat or timed:
            raise UsageError(
                f"{model} is a trace already: it is shown as it was made, with --all or --json alone"
            )
        from openbook.trace import load

        trace = load(model)
    else:
        trace = _made(model, prompt, output, only, _heads(ablate or ()), chat, timed, dtype, threads, force)
    if json:
        terminal.write_json("trace", _plain(trace))
    else:
        print(_table(trace, unfolded).text(), end="")


def _made(
    model: str,
    prompt: str | None,
    output: Path | None,
    only: list[str] | None,
    ablate: Sequence[tuple[int, int]],
    chat: bool,
    timed: bool,
    dtype: str | None,
    threads: int | None,
    force: bool,
) -> Trace:
    """The trace of a new pass, saved if it is asked for. How large it will be is told before it is made."""
    from openbook.cli.generate import read_prompt
    from openbook.cli.loading import load
    from openbook.ledger.table import human_bytes

    if output is not None and not output.parent.is_dir():
        raise UsageError(f"-o {output}: there is no folder {output.parent}")
    text = read_prompt(prompt)
    lm = load(model, dtype, threads, force=force)
    ids = lm.prompt_ids([{"role": "user", "content": text}] if chat else text)
    needed = lm.trace_bytes(len(ids), only)
    terminal.note(
        f"a trace of {len(ids):,} token{'s' * (len(ids) != 1)} takes {human_bytes(needed)} ({needed:,} bytes)"
    )
    trace = lm.trace(ids, only=only, ablate=ablate, time=timed, force=force)
    if output is not None:
        trace.save(output)
        terminal.note(f"saved in {output}, {human_bytes(output.stat().st_size)}")
    return trace


def _heads(ablate: Iterable[str]) -> list[tuple[int, int]]:
    """'3.2' → (3, 2)."""
    found = []
    for text in ablate:
        if not re.fullmatch(r"[0-9]{1,5}\.[0-9]{1,5}", text):
            raise UsageError(f"--ablate {text!r} is no LAYER.HEAD, such as 3.2")
        layer, _, head = text.partition(".")
        found.append((int(layer), int(head)))
    return found


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """One step, or the same step of equal layers: statistics of all together, FLOPs and seconds summed."""

    name: str
    step: Step
    statistics: Statistics
    flops: int
    seconds: float | None


def _lines(trace: Trace, unfolded: bool) -> Iterator[_Line]:
    from openbook.ledger.table import layer_label
    from openbook.trace import Statistics

    for steps in _groups(trace, unfolded):
        first, layers = steps[0], tuple(step.layer for step in steps if step.layer is not None)
        name = first.name if len(steps) == 1 else f"layers.{layer_label(layers)}.{first.local}"
        measured = [step.seconds for step in steps if step.seconds is not None]
        yield _Line(
            name=name,
            step=first,
            statistics=Statistics.together((step.statistics, math.prod(step.shape)) for step in steps),
            flops=sum(trace.rows[step.name].flops for step in steps),
            seconds=sum(measured) if measured else None,
        )


def _groups(trace: Trace, unfolded: bool) -> list[list[Step]]:
    """The steps, those of one name in layers of one block together, unless they are to be by themselves."""
    groups: dict[Any, list[Step]] = {}
    for step in trace.steps:
        alone = unfolded or step.layer is None
        key = step.name if alone else (trace.spec.layers[step.layer or 0], step.local, step.shape, step.dtype)
        groups.setdefault(key, []).append(step)
    return list(groups.values())


def _table(trace: Trace, unfolded: bool) -> Table:
    from openbook.files.errors import printable
    from openbook.ledger.table import Column, Table, human_bytes

    lines = list(_lines(trace, unfolded))
    timed = any(line.seconds is not None for line in lines)
    columns = (
        Column("step"), Column("axes"), Column("shape", "shape"), Column("dtype"),
        *(Column(title, "count") for title in ("min", "max", "mean", "std", "L2", "FLOPs")),
        *([Column("ms", "count")] if timed else []),
    )  # fmt: skip
    rows = []
    for line in lines:
        s, step = line.statistics, line.step
        numbers = (f"{x:.4g}" for x in (s.low, s.high, s.mean, s.std, s.l2))
        ms = "" if line.seconds is None else f"{1000 * line.seconds:.2f}"
        row = (line.name, " ".join(step.axes), step.shape, step.dtype, *numbers, line.flops)
        rows.append((*row, ms) if timed else row)
    size, name = human_bytes(trace.bytes), printable(trace.model, 80) or "a model"
    batch, tokens = trace.ids.shape
    of = f"{batch} × {tokens:,}" if batch > 1 else f"{tokens:,}"
    of += " token" if batch * tokens == 1 else " tokens"
    steps = f"{len(trace)} step{'s' * (len(trace) != 1)}"
    title = f"Trace of {name}: {of}, {steps}, {trace.dtype}, {size}"
    return Table(title, columns, tuple(rows), tuple(_notes(trace, unfolded)))


def _notes(trace: Trace, unfolded: bool) -> Iterator[str]:
    from openbook.files.errors import printable

    if trace.pieces:
        shown = [repr(printable(piece, 40)) for piece in trace.pieces[0][:20]]
        yield f"Tokens: {' '.join(shown)}{' ...' * (len(trace.pieces[0]) > 20)}"
    fold = "" if unfolded else " A folded row has those of its layers together, and their FLOPs added up."
    yield f"Statistics are of the finite numbers: masked scores have -inf.{fold}"
    yield "FLOPs: attention causal; elementwise work counts 0."
    if broken := [
        s.name for s in trace.steps if s.statistics.nan or (s.statistics.inf and s.local != "attn.masked")
    ]:
        yield f"Not finite: {', '.join(broken[:5])}{f' and {len(broken) - 5} more' * (len(broken) > 5)}."
    if trace.edited:
        yield f"Edited: {', '.join(sorted(trace.edited)[:10])}."


def _plain(trace: Trace) -> dict[str, Any]:
    return {
        "model": trace.model,
        "dtype": trace.dtype,
        "ids": trace.ids.tolist(),
        "pieces": [list(row) for row in trace.pieces],
        "bytes": trace.bytes,
        "edited": sorted(trace.edited),
        "steps": [
            {
                "name": step.name,
                "axes": list(step.axes),
                "shape": list(step.shape),
                "dtype": step.dtype,
                **asdict(step.statistics),
                "flops": trace.rows[step.name].flops,
                "seconds": step.seconds,
                "edited": step.edited,
            }
            for step in trace.steps
        ],
    }
