"""Two ledgers on a terminal, side by side: sizes, weights, figures."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from openbook.ledger import compare
from openbook.ledger.table import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from openbook.ledger import Ledger, Workload

_WIDE = 114
"""Columns from which shape and count, or figure and meaning, fit beside each other for both models."""
_WIDEST = 140


def print_versus(a: Ledger, b: Ledger, workload: Workload) -> None:
    """Three tables as wide as the terminal; a file gets them in 120 columns."""
    from rich.console import Console

    width = min(shutil.get_terminal_size((120, 24)).columns, _WIDEST)
    console = Console(width=width, highlight=False)
    names, wide = compare.titles(a, b), width >= _WIDE
    tables = (
        _sizes(compare.sizes(a, b), names),
        _weights(compare.rows(a, b), names, wide),
        _figures(compare.figures(a, b, workload), names, wide),
    )
    for table in tables:
        with console.capture() as written:
            console.print(table)
        print("\n".join(line.rstrip() for line in written.get().split("\n")))


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False
    )


def _sizes(sizes: list[compare.Size], names: tuple[str, str]) -> Table:
    table = _table("Sizes")
    table.add_column()
    table.add_column()
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for size in sizes:
        values = _values(size.a), _values(size.b)
        table.add_row(size.letter, size.meaning, *values, style=_style(values[0] == values[1]))
    return table


def _values(values: tuple[tuple[int, int], ...]) -> str:
    if len(values) == 1:
        return f"{values[0][0]:,}" if values[0][0] else "none"
    return ", ".join(f"{value:,} ×{times}" if value else f"none ×{times}" for value, times in values) or "-"


def _weights(rows: list[compare.Row], names: tuple[str, str], wide: bool) -> Table:
    """Wide: shape and count in two columns. Else the shape stands above the count."""
    from rich.text import Text

    table = _table("Weights, shape × layers; the second's less the first's")
    table.add_column("weight", overflow="fold")
    for name in names:
        if wide:
            table.add_column("shape", overflow="fold")
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("difference", justify="right", overflow="fold")
    inside = False
    for row in rows:
        if row.in_layers and not inside:
            table.add_row(Text("in the layers", style="bold"))
        if inside and not row.in_layers:
            table.add_row(Text("after the layers", style="bold"))
        inside = row.in_layers
        cells = [cell for side in (row.a, row.b) for cell in _cells(side, wide)]
        same = row.a == row.b
        table.add_row(row.name, *cells, "=" if same else _signed(row.difference), style=_style(same))
    sums = [sum(side.count for side in sides) for sides in zip(*((r.a, r.b) for r in rows), strict=True)]
    totals = [cell for total in sums for cell in ([""] * wide + [f"{total:,}"])]
    table.add_section()
    table.add_row("total", *totals, _signed(sums[1] - sums[0]), style="bold")
    return table


def _signed(difference: int) -> str:
    return f"{difference:+,}" if difference else "0"


def _cells(side: compare.Side, wide: bool) -> list[str]:
    if not side.shapes:
        return ["", "-"] if wide else ["-"]
    count = "tied" if side.tied else f"{side.count:,}"
    return [compare.shapes(side), count] if wide else [f"{compare.shapes(side)}\n{count}"]


def _figures(figures: list[compare.Figure], names: tuple[str, str], wide: bool) -> Table:
    """Wide: what is counted in the last column. Else it stands below the figure's name."""
    from rich.text import Text

    table = _table("Figures, and the second's over the first's")
    table.add_column()
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("ratio", justify="right", no_wrap=True)
    if wide:
        table.add_column("what is counted")
    for figure in figures:
        meaning = Text(figure.meaning, style="dim")
        label = Text(figure.name) if wide else Text.assemble(figure.name, "\n", meaning)
        values = (_value(value, figure.unit) for value in (figure.a, figure.b))
        table.add_row(label, *values, _ratio(figure.a, figure.b), *([meaning] if wide else []))
    return table


def _value(value: int, unit: str) -> str:
    """Exact, but for bytes by the million, which nobody reads digit by digit."""
    if unit != "bytes":
        return f"{value:,}"
    return f"{value:,} B" if value < 10**7 else human_bytes(value)


def _ratio(a: int, b: int) -> str:
    if a == b:
        return "="
    return f"{b / a:.3g}×" if a and b else "-"


def _style(same: bool) -> str:
    """What both models share stands back."""
    return "dim" if same else ""
