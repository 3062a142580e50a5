"""A comparison of two runs, written for a person: the first step that differs, and what lies around it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from openbook.cli import terminal

if TYPE_CHECKING:
    from openbook.spec.model import ModelSpec
    from openbook.trace import Difference, Report

_AROUND = 3
"""Steps shown before and after the first that differs."""


def print_report(report: Report, spec: ModelSpec, tokens: list[int], pieces: list[str]) -> None:
    """What was found, for a person. `pieces` is the text of each of the tokens, or empty."""
    print(f"{len(tokens)} tokens: {_excerpt(tokens, pieces)}\n")
    if (first := report.first) is None:
        worst = max(report.rows, key=lambda row: row.relative / (row.allowed or 1))
        apart = f"{_number(worst.relative)} of {_number(worst.allowed)} allowed"
        same = "none differs" if report.ok else "none of them differs, but the two models do"
        print(f"{len(report.rows)} steps compared, {same}. Furthest apart: {worst.name}, {apart}.")
    else:
        reason = report.reasons.get(first.name)
        why = reason.text if reason else "no known reason: what it reads is equal, what it gives is not"
        print(f"{terminal.paint(first.name, 'red')}: {why}\n")
        _print_table(report, first)
        print()
        if first.at:
            print(f"Furthest apart at {_where(first, spec, pieces)}: {first.a:.6g} in A, {first.b:.6g} in B.")
        _print_other_faults(report, first)
        if reason and reason.advice:
            print(f"Next: {reason.advice}.")
    for note in _notes(report, spec, len(tokens)):
        print(terminal.paint(note, "dim"))


def _print_table(report: Report, first: Difference) -> None:
    at = report.rows.index(first)
    shown = list(range(max(0, at - _AROUND), min(len(report.rows), at + _AROUND + 1)))
    last = len(report.rows) - 1
    rows = [report.rows[i] for i in shown]
    names = [row.name for row in rows] + [report.rows[last].name, "step"]
    shapes = ["×".join(map(str, row.shapes[0])) for row in report.rows]
    wide, deep = max(map(len, names)), max(len(shapes[i]) for i in [*shown, last])
    print(f"  {'step':<{wide}}  {'shape':<{deep}}  {'max |A - B|':>11}  {'relative':>8}  {'allowed':>8}")

    def line(i: int) -> None:
        row = report.rows[i]
        mark, style = (" ", "dim") if row.ok else ("≠", "bold")
        text = (
            f"{mark} {row.name:<{wide}}  {shapes[i]:<{deep}}  {_number(row.max_abs):>11}  "
            f"{_number(row.relative):>8}  {_number(row.allowed):>8}"
        )
        print(terminal.paint(text, "red" if row is first else style))

    if shown[0] > 0:
        print(f"  ⋮  {shown[0]} step{'s' * (shown[0] > 1)} before, none of which differs")
    for i in shown:
        line(i)
    if last > shown[-1]:
        if last > shown[-1] + 1:
            between = report.rows[shown[-1] + 1 : last]
            print(f"  ⋮  {len(between)} more, of which {sum(not row.ok for row in between)} differ")
        line(last)


def _print_other_faults(report: Report, first: Difference) -> None:
    """Steps that differ on their own account, and not for what they read."""
    others = [(name, reason) for name, reason in report.reasons.items() if name != first.name]
    told = report.reasons.get(first.name)
    for name, reason in others[:_AROUND]:
        same = reason is not None and told is not None and reason.text == told.text
        print(f"Also {name}: {'the same' if same else reason.text if reason else 'no known reason'}.")
    if len(others) > _AROUND:
        print(f"And {len(others) - _AROUND} more steps whose inputs are equal.")


def _notes(report: Report, spec: ModelSpec, n_tokens: int) -> list[str]:
    """What the comparison could not see."""
    notes = []
    if report.missing:
        notes.append(f"In one model only: {_folded(report.missing)}.")
    if report.unseen:
        notes.append(f"Not compared, since one side has no such tensor: {_folded(report.unseen)}.")
    longer = sorted({w for block in spec.layers if (w := _width(block.attn.window)) and w >= n_tokens})
    if longer:
        words = " and ".join(f"{width:,}" for width in longer)
        notes.append(f"Windows of {words} tokens are longer than the run: a longer -p would show them.")
    return notes


def _width(window: Any) -> int | None:
    return getattr(window, "size", window)


def _folded(names: list[str]) -> str:
    """'attn_add (30), mlp.act (2)': steps without their layers, each once."""
    from openbook.trace.schema import local_name

    counts: dict[str, int] = {}
    for name in names:
        counts[local_name(name)] = counts.get(local_name(name), 0) + 1
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())


def _excerpt(tokens: list[int], pieces: list[str]) -> str:
    """The text as tokens, or the ids; what fits on a line."""
    from openbook.files.errors import printable

    text = printable("".join(pieces), 10_000) if pieces else " ".join(map(str, tokens))
    room = terminal.width() - 16
    return text if len(text) <= room else text[: room - 1] + "…"


def _where(row: Difference, spec: ModelSpec, pieces: list[str]) -> str:
    """'token 3 (' is'), head 2, element 5': the place of the largest difference, in words."""
    words = {"T": "token", "S": "key", "H": "head", "G": "head", "A": "choice", "E": "expert", "V": "id"}
    parts = []
    for axis, i in zip(row.axes, row.at, strict=True):
        if axis == "B":
            continue
        if axis in ("H·K", "G·K"):
            layer = int(row.name.split(".")[1])
            parts.append("head {}, element {}".format(*divmod(i, spec.layers[layer].attn.head_dim)))
            continue
        piece = f" ({pieces[i]!r})" if axis == "T" and i < len(pieces) else ""
        parts.append(f"{words.get(axis, 'element')} {i}{piece}")
    return ", ".join(parts)


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else "0" if value == 0 else f"{value:.1e}"
