"""`openbook ledger`: every weight, step and byte of a model, from its spec alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from openbook.cli import terminal
from openbook.cli.errors import UsageError
from openbook.cli.options import Json, Model, Quiet, Verbose

if TYPE_CHECKING:
    from openbook.ledger import Ledger, Workload
    from openbook.ledger.table import Table

_WORKLOAD = "Workload (for --ops, --memory and --json)"

By = Annotated[
    Literal["tensor", "layer", "kind"] | None,
    typer.Option(
        help="The weights (or, with --ops, the steps): one by one, by layer, or equal layers folded."
    ),
]
Mode = Annotated[
    Literal["train", "prefill", "decode"],
    typer.Option(help="Training, reading a prompt, or writing an answer.", rich_help_panel=_WORKLOAD),
]
Attention = Annotated[
    Literal["causal", "half", "full"],
    typer.Option(help="How attention's FLOPs are counted.", rich_help_panel=_WORKLOAD),
]
Format = Annotated[
    Literal["text", "markdown", "csv", "json"], typer.Option("--format", help="How to write the tables.")
]


def run(
    model: Model,
    versus: Annotated[
        str | None,
        typer.Option("--vs", help="A second model, to stand beside the first.", show_default=False),
    ] = None,
    by: By = None,
    params: Annotated[
        bool, typer.Option("--params", help="The parameter count under every definition.")
    ] = False,
    ops: Annotated[
        bool, typer.Option("--ops", help="Every step of a forward pass: shapes, FLOPs, bytes.")
    ] = False,
    memory: Annotated[bool, typer.Option("--memory", help="What the workload holds in memory.")] = False,
    mode: Mode = "prefill",
    batch: Annotated[int, typer.Option(help="Sequences side by side.", rich_help_panel=_WORKLOAD)] = 1,
    new: Annotated[
        int | None,
        typer.Option(
            help="Tokens computed.", rich_help_panel=_WORKLOAD, show_default="1 in decode, else 512"
        ),
    ] = None,
    past: Annotated[int, typer.Option(help="Tokens already cached.", rich_help_panel=_WORKLOAD)] = 0,
    attention: Attention = "causal",
    dtype: Annotated[str, typer.Option(help="Of the weights: fp32, bf16, q4_1, ...")] = "bf16",
    form: Format = "text",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """The ledger of a model: by default the count of its parameters as one does it by hand."""
    from openbook.ledger import Workload, ledger
    from openbook.ledger.table import (
        cache_table,
        memory_table,
        op_table,
        params_table,
        summary_table,
        tensor_table,
        to_json,
    )
    from openbook.sources import resolve

    book = ledger(resolve(model).spec, dtype)
    other = ledger(resolve(versus).spec, dtype) if versus is not None else None
    if new is None:
        longest = min(one.spec.max_positions for one in (book, other or book))
        new = 1 if mode == "decode" else min(512, longest)
    workload = Workload(mode, batch, new, past, attention=attention)
    if other is not None:
        if by is not None or params or ops or memory:
            raise UsageError("--vs compares everything at once: leave out --by, --params, --ops and --memory")
        _compare(book, other, workload, "json" if json else form)
        return
    if json or form == "json":
        data = to_json(book, workload, by or "kind")
        terminal.write_json("ledger", {k: v for k, v in data.items() if k != "schema"})
        return

    tables: list[Table] = []
    if params:
        tables.append(params_table(book))
    if by is not None and not ops:
        tables.append(tensor_table(book, by))
    if ops:
        tables.append(op_table(book, workload, by or "kind"))
    if memory:
        tables.append(memory_table(book, workload))
        if mode != "train":
            tables.append(cache_table(book, workload))
    print(_written(tables or [summary_table(book)], form), end="")
    if form == "text" and not tables:
        print(_costs(book, workload))


def _compare(a: Ledger, b: Ledger, workload: Workload, form: str) -> None:
    from openbook.cli.versus import print_versus
    from openbook.ledger import compare

    if form == "json":
        data = compare.to_json_of_both(a, b, workload)
        terminal.write_json("ledger", {k: v for k, v in data.items() if k != "schema"})
    elif form == "text":
        print_versus(a, b, workload)
    else:
        print(_written(compare.tables(a, b, workload), form), end="")


def _written(tables: list[Table], form: str) -> str:
    return "\n".join(getattr(table, form)() for table in tables)


def _costs(book: Ledger, workload: Workload) -> str:
    """What one token costs, in a few lines."""
    from openbook.ledger.table import human_bytes

    weights, flops = human_bytes(book.weight_bytes), book.flops_per_token()
    kv, expanded = book.kv_bytes_per_token(), book.kv_bytes_per_token_expanded()
    lines = [
        f"In {book.dtype}: weights {weights}; a token takes {flops:,} FLOPs and {kv:,} bytes of KV cache."
    ]
    if expanded != kv:
        lines.append(f"The cache holds latents; expanded to keys and values they take {expanded:,} bytes.")
    lines += [
        f"{len(row.layers)} of {book.spec.n_layers} layers keep at most {row.window:,} tokens (window)."
        for row in book.cache()
        if row.window is not None
    ]
    return "\n".join(lines)
