"""`openbook flow`: one text as training sees it, and as generation writes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openbook import models
from openbook.cli import terminal
from openbook.cli.generate import read_prompt
from openbook.cli.loading import load
from openbook.cli.options import Dtype, Force, Json, Model, Prompt, Quiet, Threads, Verbose
from openbook.ledger.table import human_bytes

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from openbook.infer.teaching import Drawn, Lesson
    from openbook.ledger.teaching import PassCost, Saving, StepCost
    from openbook.lm import LanguageModel
    from openbook.sources import Source
    from openbook.text import Tokenizer

EXAMPLE = "这 是 最好的 时代 这 是 最坏的 时代"
"""The text that is taken where none is given."""

LENGTHS = (16, 64, 256, 512, 1024, 4096, 16_384, 65_536)
"""Of the texts after which the cache's saving is told."""


def run(
    model: Model,
    prompt: Prompt = None,
    given: Annotated[
        str | None,
        typer.Option(help="What generation begins with.", show_default="the first half of the text"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", min=1, help="Tokens to write at most.", show_default="as the text has"
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Time steps with and without the cache.")
    ] = True,
    dtype: Dtype = None,
    threads: Threads = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """A text in training, all labels in one pass, beside generation, token by token with the cache."""
    from openbook.sources import resolve
    from openbook.text.framing import first_half

    text = EXAMPLE if prompt is None else read_prompt(prompt)
    given = first_half(text) if given is None else given
    source = resolve(model)
    tokenizer = _tokenizer_of(source)
    if source.kind == "spec" or tokenizer is None:
        flows = _predicted(model, source, tokenizer, text, given, max_tokens)
    else:
        lm = load(model, dtype, threads, force=force)
        flows = _computed(lm, tokenizer, text, given, max_tokens, measure)
    if json:
        terminal.write_json("flow", {"model": Path(model).name, **_plain(flows)})
    else:
        _print(Path(model).name, flows)


# --- both flows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flows:
    """One text, both ways. `words` are its tokens for the eye, the first `n_prompt` of `written` what
    generation is given, `dtype` that of the cache. Without weights `lesson` and `drawn` are None: nobody
    knows what would be written, so `written` goes on with the text's own tokens. `missing` says what is not
    there, and what would give it.
    """

    text: str
    given: str
    ids: list[int] | None
    words: list[str]
    n_prompt: int
    written: list[str]
    dtype: str
    cost: PassCost
    steps: list[StepCost]
    savings: list[Saving]
    lesson: Lesson | None = None
    drawn: list[Drawn] | None = None
    missing: str = ""


def _computed(
    lm: LanguageModel, tokenizer: Tokenizer, text: str, given: str, max_tokens: int | None, measure: bool
) -> Flows:
    """With the model's own probabilities, and its own answer."""
    from openbook.infer.teaching import book_of, cache_savings, generated, teacher_forced
    from openbook.text.framing import begun, framed

    ids, start = framed(tokenizer, text), begun(tokenizer, given)
    lesson = teacher_forced(lm.engine, ids)
    n = max(1, len(ids) - len(start)) if max_tokens is None else max_tokens
    drawn = generated(lm.engine, start, n, tokenizer.eos_ids, tokenizer.vocab_size)
    with terminal.Status() as status:
        savings = cache_savings(
            lm.engine, _lengths(lm.spec.max_positions), longest=512 if measure else 0, progress=status
        )
    return Flows(
        text,
        given,
        ids,
        shown(tokenizer, ids),
        len(start),
        shown(tokenizer, [*start, *(step.id for step in drawn)]),
        book_of(lm.engine).dtype,
        lesson.cost,
        [step.cost for step in drawn],
        savings,
        lesson,
        drawn,
    )


def _predicted(
    model: str, source: Source, tokenizer: Tokenizer | None, text: str, given: str, max_tokens: int | None
) -> Flows:
    """Without weights: what the ledger knows."""
    from openbook.ledger import ledger
    from openbook.ledger.teaching import cache_savings, step_costs, training_cost
    from openbook.text.framing import begun, framed

    book = ledger(source.spec)
    if tokenizer is None:
        ids, words, start = None, ["<start>", *text.split(), "<end>"], ["<start>", *given.split()]
    else:
        ids = framed(tokenizer, text)
        words, start = shown(tokenizer, ids), shown(tokenizer, begun(tokenizer, given))
    rest = words[len(start) :] or ["?"]
    n = len(rest) if max_tokens is None else max_tokens
    written = [*start, *rest, *["?"] * n][: len(start) + n]
    return Flows(
        text,
        given,
        ids,
        words,
        len(start),
        written,
        book.dtype,
        training_cost(book, len(words) - 1),
        step_costs(book, len(start), n),
        cache_savings(book, _lengths(source.spec.max_positions)),
        missing=_missing(model, source, tokenizer),
    )


def _tokenizer_of(source: Source) -> Tokenizer | None:
    if source.path is None:
        return None
    from openbook.text import Tokenizer

    return Tokenizer.from_source(source)


def _lengths(context: int) -> list[int]:
    return [length for length in LENGTHS if length <= context] or [context]


def _missing(model: str, source: Source, tokenizer: Tokenizer | None) -> str:
    if source.kind == "spec":
        what = "No weights here, so no probabilities, no losses and nothing measured"
        gives = f"openbook models get {model}" if model.lower() in models.MODELS else ""
        remedy = gives or "a folder with .safetensors, a .gguf file or a run's folder in place of the name"
    else:
        what, remedy = (
            "No tokenizer here, so the weights cannot be asked",
            "a tokenizer.json beside the weights",
        )
    words = "" if tokenizer else " Each word counts as one token."
    return f"{what}: all figures are the ledger's.{words} For real ones: {remedy}."


def shown(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token for the eye: 'text' in quotes, control tokens without. Of a character whose bytes lie in
    several tokens each shows the whole, and its share: '最' 1/2."""
    from openbook.text.characters import character_groups

    spelled = [tokenizer.token_bytes(i) if i < tokenizer.vocab_size else b"" for i in ids]
    groups = character_groups(spelled)
    members = [[n for n, other in enumerate(groups) if other == group] for group in range(len(set(groups)))]
    result = []
    for n, token in enumerate(ids):
        parts = members[groups[n]]
        whole = b"".join(spelled[part] for part in parts).decode("utf-8", "backslashreplace")
        visible = whole if whole.isprintable() else repr(whole)[1:-1]
        if token in tokenizer.control_ids:
            result.append(visible)
        elif token >= tokenizer.vocab_size:
            result.append(f"#{token}")
        else:
            share = f" {parts.index(n) + 1}/{len(parts)}" if len(parts) > 1 else ""
            result.append(f"'{visible}'{share}")
    return result


# --- for programs ---------------------------------------------------------------------------------


def _plain(flows: Flows) -> dict[str, Any]:
    """All of it, exact; what is not known is null."""
    rows = [
        {"position": n, "input": flows.words[n], "label": flows.words[n + 1]}
        | (_numbers(flows.lesson.rows[n]) if flows.lesson else {"probability": None, "loss": None})
        for n in range(len(flows.words) - 1)
    ]
    steps = [
        {"number": n, "drawn": flows.written[flows.n_prompt + n] if flows.drawn else None, **asdict(cost)}
        | ({"id": d.id, "probability": d.probability, "seconds": d.seconds} if (d := _of(flows, n)) else {})
        for n, cost in enumerate(flows.steps)
    ]
    savings = [
        asdict(saving) | {"ratio": saving.ratio, "measured_ratio": saving.measured and saving.measured.ratio}
        for saving in flows.savings
    ]
    return {
        "text": flows.text,
        "ids": flows.ids,
        "tokens": flows.words,
        "missing": flows.missing or None,
        "dtype": flows.dtype,
        "training": {
            "rows": rows,
            "mean_loss": flows.lesson and flows.lesson.loss,
            "forward_flops": flows.cost.forward,
            "flops": flows.cost.flops,
        },
        "generation": {"given": flows.given, "prompt_tokens": flows.n_prompt, "steps": steps},
        "cache": savings,
    }


def _of(flows: Flows, step: int) -> Drawn | None:
    return flows.drawn[step] if flows.drawn else None


def _numbers(row: Any) -> dict[str, Any]:
    """What a row adds to its texts; both ids under names of their own."""
    about = asdict(row)
    return {"input_id": about.pop("input"), "label_id": about.pop("label"), **about}


# --- for people -----------------------------------------------------------------------------------


def _print(name: str, flows: Flows) -> None:
    print(f"{name}: one text in training, and in generation")
    if flows.missing:
        _say(flows.missing)
    print()
    _show("Training: one pass over the text, all labels at once", _training(flows))
    _say(_about_training(flows))
    print()
    _show("Generation: the prompt at once (prefill), then token by token with the cache", _generation(flows))
    _say(_about_generation(flows))
    print()
    _show("The cache: one more token after a text of so many tokens", _cache(flows))
    _say(_about_cache(flows))


def _training(flows: Flows) -> Table:
    table = _table()
    _columns(table, ">row", "<input", "<label", *([">probability", ">loss", ">rank"] if flows.lesson else []))
    for n, word in enumerate(flows.words[:-1]):
        cells = [str(n), word, flows.words[n + 1]]
        if flows.lesson:
            row = flows.lesson.rows[n]
            cells += [_probability(row.probability), f"{row.loss:.3f}", f"{row.rank:,}"]
        _row(table, cells)
    if flows.lesson:
        table.add_section()
        _row(table, ["", "mean", "", "", f"{flows.lesson.loss:.3f}"])
    return table


def _about_training(flows: Flows) -> str:
    cost = flows.cost
    words = (
        "Row n sees the inputs 0 to n and none after (the causal mask), so one pass serves all "
        f"{cost.rows:,} labels: {_si(cost.forward)}FLOPs forward, {_si(cost.flops)}FLOPs with the way back "
        "(3 × forward)."
    )
    if flows.lesson:
        words += " Loss is -ln(probability), in nats. Rank 1 is the likeliest of all tokens."
    return words + _about_shares(flows.words)


def _about_shares(words: Sequence[str]) -> str:
    part = next((word for word in words if re.search(r"' 1/\d+$", word)), None)
    if part is None:
        return ""
    whole, count = part.rsplit(" 1/", 1)
    return f" {part}: the first of the {count} tokens whose bytes together are {whole}."


def _generation(flows: Flows) -> Table:
    table = _table()
    _columns(table, ">step", "<goes in", "<comes out", *([">probability"] if flows.drawn else []))
    _columns(table, ">FLOPs", ">without cache", ">cache holds")
    for n, cost in enumerate(flows.steps):
        last = flows.n_prompt + n
        cells = [str(n), f"{cost.new} tokens" if n == 0 else flows.written[last - 1], flows.written[last]]
        if flows.drawn:
            cells.append(_probability(flows.drawn[n].probability))
        _row(table, [*cells, _si(cost.flops), _si(cost.flops_without), human_bytes(cost.kv_bytes)])
    table.add_section()
    sums = sum(cost.flops for cost in flows.steps), sum(cost.flops_without for cost in flows.steps)
    _row(table, ["", "together", "", *([""] if flows.drawn else []), *map(_si, sums)])
    return table


def _about_generation(flows: Flows) -> str:
    drawn = (
        "Each step takes the likeliest token, which goes in next."
        if flows.drawn
        else "Without weights nothing is drawn: the text's own tokens stand in its place."
    )
    return (
        f"The prompt: {flows.given!r}. {drawn} With the cache ({flows.dtype}) a step computes only what goes "
        "in and reads the keys and values of all before; without it everything is computed again."
    )


def _cache(flows: Flows) -> Table:
    table = _table()
    _columns(table, ">tokens", ">FLOPs", ">without cache", ">predicted")
    measured = any(saving.measured for saving in flows.savings)
    _columns(table, *([">ms", ">without cache", ">measured"] if measured else []))
    for saving in flows.savings:
        cells = [f"{saving.length:,}", _si(saving.flops), _si(saving.flops_without), f"{saving.ratio:,.1f} ×"]
        if found := saving.measured:
            times = (f"{1000 * seconds:,.1f}" for seconds in (found.seconds, found.seconds_without))
            cells += [*times, f"{found.ratio:,.1f} ×"]
        _row(table, cells)
    return table


def _about_cache(flows: Flows) -> str:
    words = "Predicted: FLOPs without the cache over those with it. Conventions: openbook ledger MODEL --ops."
    found = [saving for saving in flows.savings if saving.measured]
    if found:
        words += f" Measured up to {found[-1].length:,} tokens: medians of 3, in turns, on this machine."
    if any(saving.measured and saving.measured.ratio < saving.ratio for saving in found):
        words += (
            " A single token's step reads every weight for little work, so memory is its limit and not "
            "FLOPs: the cache then saves less than predicted."
        )
    return words


def _probability(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 else f"{value:.1e}"


def _si(count: int) -> str:
    """Four digits and a unit: 24302799360 is '24.30 G'."""
    value, units = float(count), iter(("", "k", "M", "G", "T", "P", "E", "Z", "Y"))
    unit = next(units)
    while value >= 999.95:
        value, unit = value / 1000, next(units)
    return f"{value:.{max(0, 4 - len(str(int(value))))}f} {unit}" if unit else f"{count} "


def _table() -> Table:
    from rich.table import Table

    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)


def _columns(table: Table, *titles: str) -> None:
    """Right-aligned behind a '>', else left-aligned."""
    for title in titles:
        table.add_column(title[1:], justify="right" if title[0] == ">" else "left", overflow="fold")


def _row(table: Table, cells: Sequence[str]) -> None:
    from rich.text import Text

    table.add_row(*map(Text, cells))


def _show(title: str, table: Table) -> None:
    print(terminal.paint(title, "bold"))
    _write(table)


def _say(text: str) -> None:
    """Words, broken at the terminal's width, in which a Chinese character takes two columns."""
    from rich.text import Text

    _write(Text(text))


def _write(what: Table | Text) -> None:
    from rich.console import Console

    console = Console(width=terminal.width(), highlight=False)
    with console.capture() as written:
        console.print(what)
    print("\n".join(line.rstrip() for line in written.get().rstrip("\n").split("\n")))
