"""`openbook verify`: does a file hold exactly the tensors that the ledger names?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openbook.cli import terminal
from openbook.cli.errors import CheckFailedError
from openbook.cli.options import Json, Quiet, Verbose, Weights

if TYPE_CHECKING:
    from openbook.weights.verify import Report


def run(
    model: Weights,
    values: Annotated[
        bool, typer.Option("--values", help="Read every value as well; find NaN and Inf.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compares every tensor of a file with the ledger: names, shapes, types. Exit code 1 if one differs."""
    from openbook.cli.loading import source_with_weights
    from openbook.weights.verify import verify

    report = verify(source_with_weights(model), values=values)
    if json:
        terminal.write_json("verify", _plain(report))
    else:
        _print(report)
    if not report.ok:
        wrong = len(report.misfits) + len(report.nonfinite)
        raise CheckFailedError(
            f"{report.path}: {wrong} of {len(report.rows)} tensors are not as the ledger says"
        )


LISTED = 200
"""Misfits shown to a person: a file of the wrong model may have as many as it has tensors."""


def _print(report: Report) -> None:
    from openbook.files.errors import printable

    stored = sum(row.stored is not None for row in report.rows)
    print(f"{report.path.name}: {stored} tensors, {report.parameters:,} parameters, {report.bytes:,} bytes")
    for row in report.misfits[:LISTED]:
        print(f"  {row.status:<10}  {row}")
    if len(report.misfits) > LISTED:
        print(f"  and {len(report.misfits) - LISTED:,} more; --json lists them all")
    for row in report.nonfinite:
        if row.values is not None:
            print(
                f"  {'nonfinite':<10}  {printable(row.name)}: {row.values.nan:,} NaN, {row.values.inf:,} Inf"
            )
    if report.ok:
        print("Every name, shape and type is as the ledger says.")


def _plain(report: Report) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "path": str(report.path),
        "parameters": report.parameters,
        "bytes": report.bytes,
        "tensors": [
            {
                "name": row.name,
                "status": row.status,
                "parameters": list(row.place.parameters) if row.place else [],
                "shape": list(row.stored.shape) if row.stored else None,
                "dtype": row.stored.dtype if row.stored else None,
                "values": dataclasses.asdict(row.values) if row.values else None,
            }
            for row in report.rows
        ],
    }
