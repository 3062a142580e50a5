"""The ledger for people and for programs: tables as aligned text, Markdown, CSV, and one JSON object.

Rows are grouped by

    kind    equal layers folded into one row: "layers.0-27.attn.q.weight ×28" (the default)
    tensor  every row of every layer by itself (`step` means the same for steps)
    layer   one row for each layer, its contents added up

Counts are exact. A table for the eye prints bytes in decimal units (GB = 10⁹ bytes) and leaves out the
columns marked as detail; Markdown, CSV and JSON hold every column, and every byte.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any, Literal

from openbook.ledger import Ledger
from openbook.ledger.ops import OpRow, Workload
from openbook.ledger.tensors import (
    LedgerError,
    Section,
    TensorRow,
    block_numbers,
    evaluate,
    is_routed,
    model_numbers,
    unfold,
)
from openbook.spec.model import ModelSpec, Sinusoidal, to_dict

SCHEMA = "openbook.ledger/1"
By = Literal["kind", "tensor", "step", "layer"]
Cell = str | int | tuple[int, ...]
WIDTH = 100
"""Columns of a terminal to which words are wrapped."""
_NARROWEST = 24
"""Columns that words have at least, however long the numbers beside them."""


# --- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """`unit` says how a cell is printed: text, count, shape or bytes. `detail` is not for the eye.

    `wraps` marks the column of words that is broken into lines where a table is too wide.
    """

    title: str
    unit: Literal["text", "count", "shape", "bytes"] = "text"
    detail: bool = False
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Columns, rows of plain values, a row of totals, and what has to be said beneath them.

    The row of totals is printed, but is no row: a program that adds up a CSV column must not meet it.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    total: tuple[Cell, ...] | None = None

    def text(self) -> str:
        """Aligned columns, thousands separated; details left out."""
        shown = [i for i, column in enumerate(self.columns) if not column.detail]
        columns = [self.columns[i] for i in shown]
        rows = [*self.rows, *([self.total] if self.total else [])]
        cells = [[_for_eye(row[i], self.columns[i]) for i in shown] for row in rows]
        heads = [column.title for column in columns]
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        widths = [
            min(width, max(_NARROWEST, width - excess)) if column.wraps else width
            for width, column in zip(widths, columns, strict=True)
        ]

        def line(values: Sequence[str]) -> str:
            lines = zip_longest(
                *(textwrap.wrap(value, width) for value, width in zip(values, widths, strict=True)),
                fillvalue="",
            )
            return "\n".join(map(padded, lines))

        def padded(values: Sequence[str]) -> str:
            return "  ".join(
                value.ljust(width) if column.unit in ("text", "shape") else value.rjust(width)
                for value, width, column in zip(values, widths, columns, strict=True)
            ).rstrip()

        rule = "  ".join("-" * width for width in widths)
        body = list(map(line, cells))
        if self.total:
            body.insert(-1, rule)
        return "\n".join([self.title, padded(heads), rule, *body, *self._wrapped_notes()]) + "\n"

    def _wrapped_notes(self) -> Iterator[str]:
        for note in self.notes:
            yield from textwrap.wrap(note, WIDTH, subsequent_indent="  ")

    def markdown(self) -> str:
        """A GitHub table with every column and exact numbers."""
        head = _pipes(column.title for column in self.columns)
        rule = _pipes("---:" if column.unit in ("count", "bytes") else "---" for column in self.columns)
        body = [_pipes(_exact(cell, ",", " × ") for cell in row) for row in self.rows]
        if self.total:
            body.append(
                _pipes(_exact(cell, ",", " × ") and f"**{_exact(cell, ',', ' × ')}**" for cell in self.total)
            )
        notes = [f"- {note}" for note in self.notes]
        return (
            "\n".join([f"**{self.title}**", "", head, rule, *body, *([""] if notes else []), *notes]) + "\n"
        )

    def csv(self) -> str:
        """Comma-separated values with every column; shapes as 768x3072, numbers plain, no totals."""
        import csv
        import io

        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(column.title for column in self.columns)
        writer.writerows([_exact(cell, "", "x") for cell in row] for row in self.rows)
        return out.getvalue()


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _exact(cell: Cell, thousands: str, times: str) -> str:
    if isinstance(cell, tuple):
        return times.join(map(str, cell))
    return f"{cell:{thousands}}" if isinstance(cell, int) else cell


def _for_eye(cell: Cell, column: Column) -> str:
    if column.unit == "bytes" and isinstance(cell, int):
        return human_bytes(cell)
    return _exact(cell, ",", "×")


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def human_bytes(count: int) -> str:
    """Decimal units: 16_060_522_496 is "16.06 GB"; below 1,000 the bytes themselves."""
    power, hundredths = 0, 100 * count
    while hundredths >= 100_000 and power < len(_UNITS) - 1:
        power += 1
        # Rounded in integers: a float does not hold 10³⁰ bytes exactly.
        hundredths = (100 * count + 1000**power // 2) // 1000**power
    return f"{count} B" if power == 0 else f"{hundredths // 100:,}.{hundredths % 100:02} {_UNITS[power]}"


# --- grouping -----------------------------------------------------------------------------------


def layer_label(layers: tuple[int, ...]) -> str:
    """ "0-27", "0,2,4", or with more than four runs "0,2,...,26"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(names) > 4:
        names = [*names[:2], "...", names[-1]]
    return ",".join(names)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a table before they are printed: the name, how often it occurs, and what it stands for."""

    name: str
    times: int
    row: Any


def grouped(sections: list[Section[Any]], n_layers: int, by: By) -> Iterator[Group]:
    """The rows of the sections by kind or one by one."""
    if by == "kind":
        for section in sections:
            place = "" if section.layers is None else f"layers.{layer_label(section.layers)}."
            yield from (Group(place + row.name, section.times, row) for row in section.rows)
    elif by in ("tensor", "step"):
        for layer, row in unfold(sections, n_layers):
            yield Group(row.name if layer is None else f"layers.{layer}.{row.name}", 1, row)
    else:
        raise LedgerError(f"unknown grouping {by!r}: use kind, tensor (or step), or layer")


def _name(group: Group) -> str:
    return group.name if group.times == 1 else f"{group.name} ×{group.times}"


TENSOR_MEASURES = ("count", "bytes")
OP_MEASURES = ("flops", "weight_bytes", "activation_bytes", "kept_bytes", "kv_read", "kv_written")


def by_layer(
    sections: list[Section[Any]], n_layers: int, measures: tuple[str, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each layer with the sums of its measures; what stands outside the layers by its own module."""
    first, *kinds, last = sections
    of_layer = {
        layer: sums for kind in kinds for sums in [_sums(kind.rows, measures)] for layer in kind.layers or ()
    }
    yield from _by_part(first.rows, measures)
    yield from ((f"layers.{layer}", of_layer[layer]) for layer in range(n_layers))
    yield from _by_part(last.rows, measures)


def _by_part(rows: Iterable[Any], measures: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    parts: dict[str, list[Any]] = {}
    for row in rows:
        parts.setdefault(row.part, []).append(row)
    return ((part, _sums(members, measures)) for part, members in parts.items())


def _sums(rows: Iterable[Any], measures: tuple[str, ...]) -> tuple[int, ...]:
    own = [row for row in rows if getattr(row, "tie", None) is None]
    return tuple(sum(getattr(row, measure) for row in own) for measure in measures)


# --- the ledger's tables ------------------------------------------------------------------------


def tensor_table(book: Ledger, by: By = "kind") -> Table:
    """Every weight: shape (out, in), formula, count, bytes."""
    title = f"Weights of {_title(book.spec)}, {book.dtype}"
    sections, n_layers = book.tensor_sections, book.spec.n_layers
    if by == "layer":
        columns = (Column("layer"), Column("count", "count"), Column("bytes", "bytes"))
        rows = tuple((name, *sums) for name, sums in by_layer(sections, n_layers, TENSOR_MEASURES))
        return Table(title, columns, rows, total=("total", book.params.total, book.weight_bytes))
    rows = tuple(_tensor_cells(group) for group in grouped(sections, n_layers, by))
    columns = (
        Column("tensor"), Column("letters", detail=True), Column("shape", "shape"), Column("formula"),
        Column("count", "count"), Column("times", "count", detail=True), Column("all layers", "count"),
        Column("active", "count", detail=True), Column("bytes", "bytes"), Column("dtype", detail=True),
        Column("kind", detail=True), Column("tied to", detail=True),
    )  # fmt: skip
    params = book.params
    total = ("total", "", "", "", "", "", params.total, params.active, book.weight_bytes, "", "", "")
    notes = ["Shapes are PyTorch's (out, in).", *_notes(book)]
    if book.spec.head.tied:
        notes.append("The head is tied: head.weight is embed.weight itself, and adds nothing.")
    return Table(title, columns, rows, tuple(notes), total)


def _notes(book: Ledger) -> Iterator[str]:
    """What has to be said beside a total of parameters."""
    params = book.params
    if corrections := params.total - params.without_corrections:
        yield (
            f"{corrections:,} are routers' corrections: fp32 in any model, and buffers in Hugging Face's, "
            f"whose parameters are {params.without_corrections:,}."
        )


def _tensor_cells(group: Group) -> tuple[Cell, ...]:
    row: TensorRow = group.row
    own = 0 if row.tie else group.times
    return (
        _name(group), f"({', '.join(row.letters)})", row.shape, row.formula,
        row.count, group.times, own * row.count,
        own * row.active, own * row.bytes, row.dtype, row.kind,
        row.tie or "",
    )  # fmt: skip


def params_table(book: Ledger) -> Table:
    """The number of parameters under every definition, each with its definition."""
    columns = (Column("parameters"), Column("count", "count"), Column("what is counted", wraps=True))
    rows = tuple((name, getattr(book.params, name), words) for name, words in book.params.definitions.items())
    return Table(f"Parameters of {_title(book.spec)}", columns, rows)


def op_table(book: Ledger, workload: Workload, by: By = "kind") -> Table:
    """Every step of a forward pass: shape of its output, FLOPs, and bytes moved. A folded row ("×28")
    gives the sums over its layers."""
    title = f"Steps of {_title(book.spec)}: {describe(workload)}"
    sections, n_layers = book.op_sections(workload), book.spec.n_layers
    totals = book.totals(workload)
    sums = tuple(getattr(totals, measure) for measure in OP_MEASURES)
    activations = workload.activation_dtype(book.dtype)
    # One column of bytes beside the weights': what matters most in this mode.
    column = {"train": "kept", "prefill": "output", "decode": "KV read"}[workload.mode]
    # A column of activations mixes dtypes; one of the cache does not.
    mixed = column != "KV read" and activations != "fp32"
    fp32 = ", the residual stream, its norms and scores in fp32" if mixed else ""
    notes = (
        f"FLOPs: {'; '.join(book.conventions(workload))}.",
        f"Bytes: weights in {book.dtype}, activations and cache in {activations}{fp32}.",
    )
    measures = (
        Column("FLOPs", "count"),
        Column("weights", "bytes"),
        *(
            Column(name, "bytes", detail=name != column)
            for name in ("output", "kept", "KV read", "KV written")
        ),
    )
    if by == "layer":
        rows = tuple((name, *values) for name, values in by_layer(sections, n_layers, OP_MEASURES))
        return Table(title, (Column("layer"), *measures), rows, notes, ("total", *sums))
    rows = tuple(_op_cells(group) for group in grouped(sections, n_layers, by))
    columns = (
        Column("step"), Column("letters", detail=True), Column("in", detail=True),
        Column("output shape", "shape"), Column("formula"), Column("numbers", detail=True),
        Column("times", "count", detail=True), *measures,
    )  # fmt: skip
    return Table(title, columns, rows, notes, ("total", "", "", "", "", "", "", *sums))


def _op_cells(group: Group) -> tuple[Cell, ...]:
    row: OpRow = group.row
    ins = ", ".join("x".join(map(str, shape)) for shape in row.in_shapes)  # a column of CSV alone
    return (
        _name(group), row.letters, ins, row.out_shape, row.formula, row.numbers, group.times,
        *(group.times * getattr(row, measure) for measure in OP_MEASURES),
    )  # fmt: skip


def memory_table(book: Ledger, workload: Workload, recipe: str | None = None) -> Table:
    """What the workload holds in memory at once."""
    memory = book.memory(workload, recipe)
    columns = (
        Column("item"),
        Column("bytes", "count"),
        Column("", "bytes"),
        Column("what is counted", wraps=True),
    )
    rows = tuple((row.name, row.bytes, row.bytes, row.meaning) for row in memory.rows)
    gib = (100 * memory.total + 2**29) // 2**30
    notes = [f"kB, MB, GB are powers of 1000; the total is {gib // 100:,}.{gib % 100:02} GiB (2³⁰ bytes)."]
    if memory.recipe is not None:
        used = memory.recipe
        notes.append(f"Optimizer: {used.name}, {used.bytes_per_param} bytes per parameter ({used.meaning}).")
    total = ("total", memory.total, memory.total, "")
    return Table(f"Memory of {_title(book.spec)}: {describe(workload)}", columns, rows, tuple(notes), total)


def cache_table(book: Ledger, workload: Workload) -> Table:
    """The KV cache by what the layers keep of a token."""
    dtype = workload.activation_dtype(book.dtype)
    rows = book.cache(workload.batch, workload.seen, dtype)
    latent = any(row.form == "latents" for row in rows)
    columns = (
        Column("layers"), Column("a token keeps"), Column("formula"), Column("bytes", "count"),
        Column("window", "count"), Column("cells", "count"), Column("all", "bytes"),
        Column("if expanded", "bytes", detail=not latent),
    )  # fmt: skip
    cells = tuple(
        (
            f"{layer_label(row.layers)} ×{len(row.layers)}", row.form, row.formula, row.token_bytes,
            "none" if row.window is None else row.window, row.cells, row.bytes, row.expanded_bytes,
        )
        for row in rows
    )  # fmt: skip
    total = (
        "total", "", "", book.kv_bytes_per_token(dtype), "", "",
        sum(row.bytes for row in rows), sum(row.expanded_bytes for row in rows),
    )  # fmt: skip
    notes = (
        f"Bytes: of one token in one layer in {dtype} (total: in all layers, windows ignored).",
        f"Cells: the tokens kept of each of {workload.batch:,} sequences of {workload.seen:,}.",
        *(("If expanded: were latents kept as the keys and values of every head, H·(N+R+U).",) * latent),
    )
    return Table(f"KV cache of {_title(book.spec)}: {describe(workload)}", columns, cells, notes, total)


def describe(workload: Workload) -> str:
    """In words: "decode, batch 1, 1 new token after 1,000 cached"."""
    tokens = "1 new token" if workload.new == 1 else f"{workload.new:,} new tokens"
    past = f" after {workload.past:,} cached" if workload.past else ""
    return f"{workload.mode}, batch {workload.batch:,}, {tokens}{past}"


def _title(spec: ModelSpec) -> str:
    return spec.name or "the model"


# --- the account by hand ------------------------------------------------------------------------

_QKV = ("attn.q.", "attn.k.", "attn.v.")
_POWERS = "⁰¹²³⁴⁵⁶⁷⁸⁹"


def polynomial(rows: Iterable[TensorRow], numbers: Mapping[str, int]) -> str:
    """The sum of the rows' counts in letters, as one writes it by hand: "4·D² + 4·D".

    H·K is written D where the two are equal, G·K likewise, and F as a multiple of D where it is one.
    """
    terms: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        if row.tie is None:
            factor, letters = _by_hand(row.letters, numbers)
            terms[letters] += factor
    written = [_monomial(factor, letters) for letters, factor in terms.items()]
    sizes = {text: evaluate("·".join(letters), numbers) for text, letters in zip(written, terms, strict=True)}
    return " + ".join(sorted(written, key=lambda text: -sizes[text])) or "0"


def _by_hand(axes: tuple[str, ...], numbers: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
    factor, letters = 1, []
    for axis in axes:
        if axis in ("H·K", "G·K") and numbers[axis[0]] * numbers["K"] == numbers["D"]:
            letters.append("D")
        elif axis == "F" and numbers["F"] % numbers["D"] == 0:
            factor *= numbers["F"] // numbers["D"]
            letters.append("D")
        elif axis in ("G·K", "G") and numbers["G"] == numbers["H"]:
            letters += ["H", *axis.split("·")[1:]]
        elif axis != "1":
            letters += axis.split("·")
    return factor, tuple(sorted(letters, key=lambda letter: _ORDER.index(letter.strip("(")[0])))


_ORDER = "VPEAHGKNQCUFJD"
"""How the letters of a product are written; a sum stands where its first letter would."""


def _monomial(factor: int, letters: tuple[str, ...]) -> str:
    powers = Counter(letters)
    parts = [f"{letter}{_POWERS[n] if n > 1 else ''}" for letter, n in powers.items()]
    return "·".join(([str(factor)] if factor > 1 else []) + parts)


def summary_table(book: Ledger) -> Table:
    """The count as one does it by hand: part, formula, count; each kind of layer once, then times L."""
    spec = book.spec
    first, *kinds, last = book.tensor_sections
    model = model_numbers(spec)
    rows: list[tuple[Cell, ...]] = []

    def add(label: str, members: Iterable[TensorRow], numbers: Mapping[str, int]) -> int:
        members = tuple(members)
        count = sum(row.count for row in members if row.tie is None)
        if members:
            rows.append((label, polynomial(members, numbers), count))
        return count

    def add_parts(members: Iterable[TensorRow], numbers: Mapping[str, int], where: str) -> None:
        parts: dict[str, list[TensorRow]] = {}
        for row in members:
            for part in _parts(row):
                parts.setdefault(part, []).append(row)
        for part in _PARTS:
            add(part + where, parts.get(part, ()), numbers)

    add_parts(first.rows, model, "")
    if isinstance(spec.positions, Sinusoidal):
        rows.append(("sinusoidal positions", "0", 0))
    in_layers = 0
    legend = [_legend(model)]
    for kind in kinds:
        layers = kind.layers or (0,)
        here = block_numbers(spec.layers[layers[0]])
        where = "one layer" if len(kinds) == 1 else f"layers {layer_label(layers)}, each"
        add_parts(kind.rows, model | here, f", {where}")
        in_layers += len(layers) * add(where, kind.rows, model | here)
        legend.append(_legend(here) if len(kinds) == 1 else f"layers {layer_label(layers)}: {_legend(here)}")
    rows.append((f"{spec.n_layers:,} layer{'s' * (spec.n_layers > 1)}", "", in_layers))
    add_parts((row for row in last.rows if row.part != "head"), model, "")
    add(f"output head{' (tied)' * spec.head.tied}", (row for row in last.rows if row.part == "head"), model)
    rows.append(("total", "", book.params.total))
    if book.params.active != book.params.total:
        rows.append(("active, of one token", "", book.params.active))
    columns = (Column("part"), Column("formula", wraps=True), Column("count", "count"))
    notes = [", ".join(legend)] if len(kinds) == 1 else legend
    return Table(f"Parameters of {_title(spec)} by hand", columns, tuple(rows), (*notes, *_notes(book)))


_PARTS = (
    "token embedding", "learned positions", "embedding norm", "q, k, v", "attention", "norms", "feed-forward",
    "router", "experts", "shared expert", "final norm",
)  # fmt: skip


def _parts(row: TensorRow) -> Iterator[str]:
    """The lines of the count by hand that a weight is part of."""
    outside = {
        "embed": "token embedding", "positions": "learned positions", "embed_norm": "embedding norm",
        "final_norm": "final norm",
    }  # fmt: skip
    if row.part == "attn":
        if row.kind in ("matrix", "bias") and not row.name.startswith("attn.o."):
            yield "q, k, v"
        yield "attention"
    elif row.part != "mlp":
        yield outside.get(row.part, "norms")
    elif is_routed(row.name):
        yield "experts"
    elif row.name.startswith("mlp.router"):
        yield "router"
    else:
        yield "shared expert" if row.name.startswith("mlp.shared") else "feed-forward"


def _legend(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{letter} = {n:,}" for letter, n in numbers.items())


# --- JSON ---------------------------------------------------------------------------------------


def to_json(book: Ledger, workload: Workload | None = None, by: By = "kind") -> dict[str, Any]:
    """The ledger as one JSON-ready object, `"schema": "openbook.ledger/1"`.

    With a workload it holds the steps, their totals and the memory as well. Every number is an exact
    integer: readers that parse numbers as doubles lose digits above 2⁵³.
    """
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "name": book.spec.name,
        "dtype": book.dtype,
        "spec": to_dict(book.spec),
        "params": _plain(book.params),
        "definitions": book.params.definitions,
        "weight_bytes": book.weight_bytes,
        "kv_bytes_per_token": book.kv_bytes_per_token(),
        "kv_bytes_per_token_expanded": book.kv_bytes_per_token_expanded(),
        "flops_per_token": book.flops_per_token(),
        "tensors": _json_rows(book.tensor_sections, book.spec.n_layers, by, TENSOR_MEASURES),
    }
    if workload is not None:
        memory = book.memory(workload)
        data["workload"] = _plain(workload) | {
            "dtype": workload.activation_dtype(book.dtype),
            "head_rows": workload.head_rows,
            "conventions": book.conventions(workload),
        }
        data["ops"] = _json_rows(book.op_sections(workload), book.spec.n_layers, by, OP_MEASURES)
        data["totals"] = _plain(book.totals(workload))
        data["cache"] = [
            _plain(row) | {"layers": layer_label(row.layers), "times": len(row.layers)}
            for row in book.cache(workload.batch, workload.seen, workload.activation_dtype(book.dtype))
        ]
        data["memory"] = {
            "rows": [_plain(row) for row in memory.rows],
            "total": memory.total,
            "recipe": memory.recipe and _plain(memory.recipe),
        }
    return data


def _json_rows(
    sections: list[Section[Any]], n_layers: int, by: By, measures: tuple[str, ...]
) -> list[dict[str, Any]]:
    if by == "layer":
        sums = by_layer(sections, n_layers, measures)
        return [{"name": name, **dict(zip(measures, values, strict=True))} for name, values in sums]
    groups = grouped(sections, n_layers, by)
    return [_plain(group.row) | {"name": group.name, "times": group.times} for group in groups]


def _plain(row: Any) -> dict[str, Any]:
    return {f.name: getattr(row, f.name) for f in fields(row)}
