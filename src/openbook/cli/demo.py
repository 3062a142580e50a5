"""`openbook demo`: a real model from its file to its first sentence, prediction beside measurement."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from openbook import models
from openbook.cli import terminal
from openbook.cli.errors import CheckFailedError
from openbook.cli.options import Quiet, Threads, Verbose

if TYPE_CHECKING:
    from openbook.ledger import Ledger
    from openbook.lm import LanguageModel
    from openbook.spec.model import ModelSpec

NAME = "smollm2-135m"
QUESTION = "In one or two sentences: what is a Transformer in machine learning?"
LABEL = 9
"""Columns of the labels on the left."""


def run(threads: Threads = None, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Fetches a small real model (98 MB, once), opens its books, and asks it a question."""
    with terminal.Progress() as progress:
        file = models.fetch(NAME, progress)
    describe_file(models.model(NAME))
    spec = describe_model(file)
    check_file(file)
    lm = answer(file, threads)
    compare(spec, lm)


def _say(label: str, text: str) -> None:
    print(f"{terminal.paint(label.ljust(LABEL), 'bold')}{text}")


# --- the file and its ledger: no torch yet ------------------------------------------------------


def describe_file(model: models.Model) -> None:
    name, _, rest = model.description.partition(": ")
    print(f"{terminal.paint(name, 'bold')}: {rest}")
    print(
        f"{model.nbytes:,} bytes, {model.licence}, by {model.author}, SHA-256 {model.sha256[:8]}… as pinned\n"
    )


def describe_model(file: Path) -> ModelSpec:
    from openbook.cli.card import card
    from openbook.ledger import ledger
    from openbook.sources import resolve

    spec = resolve(file).spec
    of_layer = {name.strip(): text for name, text in card(spec)}
    _say("card", f"{spec.n_layers} layers of width {spec.d_model:,}, context {spec.max_positions:,}")
    _say("", f"attention: {of_layer['attn']}")
    _say("", f"feed-forward: {of_layer['mlp']}")
    book = ledger(spec)
    total = book.params.total
    for i, (part, formula, count) in enumerate(parts(book)):
        _say("" if i else "ledger", f"{part:<26}{formula:<20}{count:>12,}  {count / total:>5.1%}")
    _say("", f"{'parameters':<46}{total:>12,}")
    return spec


def parts(book: Ledger) -> Iterator[tuple[str, str, int]]:
    """(part, its formula in one layer, count in all layers)."""
    from openbook.ledger.table import polynomial
    from openbook.ledger.tensors import block_numbers, model_numbers

    numbers = model_numbers(book.spec) | block_numbers(book.spec.layers[0])
    first, layers, last = book.tensor_sections
    yield "embedding, also the head", polynomial(first.rows, numbers), sum(row.count for row in first.rows)
    for name, wanted in (("attention", "attn"), ("feed-forward", "mlp")):
        rows = [row for row in layers.rows if row.part == wanted]
        yield (
            f"{name}, × {layers.times}",
            polynomial(rows, numbers),
            layers.times * sum(r.count for r in rows),
        )
    norms = [row.count for row in layers.rows if row.kind == "norm"] * layers.times
    norms += [row.count for row in last.rows if row.kind == "norm"]
    yield f"norms, × {len(norms)}", "D", sum(norms)


def check_file(file: Path) -> None:
    from openbook.weights.verify import verify

    report = verify(file)
    if not report.ok:
        raise CheckFailedError(f"{file}: {len(report.misfits)} tensors are not as the ledger says")
    stored = sum(row.stored is not None for row in report.rows)
    _say("file", f"{stored} tensors: every name and every shape agrees with the ledger\n")


# --- the running model --------------------------------------------------------------------------


def answer(file: Path, threads: int | None) -> LanguageModel:
    from openbook.lm import load

    with terminal.Status() as status:
        status("loading")
        lm = load(file, threads=threads)
    _say("you", QUESTION)
    print(terminal.paint("model".ljust(LABEL), "bold"), end="", flush=True)
    out = terminal.Wrapped(sys.stdout, LABEL)
    for piece in lm.chat([{"role": "user", "content": QUESTION}], temperature=0, max_tokens=64):
        out.write(piece)
    out.close()
    print("\n")
    return lm


def compare(spec: ModelSpec, lm: LanguageModel) -> None:
    """What the ledger says of one token in the middle of the answer, beside what happened."""
    from openbook.bench import bytes_per_token, count_flops, read_bandwidth, stored_types, types_in_short
    from openbook.infer.generate import cache_for
    from openbook.ledger import ledger

    stats = lm.stats
    position = stats.prompt_tokens + stats.new_tokens // 2
    book = ledger(spec, str(lm.decoder.embed.weight.dtype))
    with terminal.Status() as status:
        status("measuring this machine")
        flops, bandwidth = count_flops(lm.decoder, position), read_bandwidth()
    types = stored_types(lm)
    read, speed = bytes_per_token(book, position, types), stats.decode_rate
    rows = (
        (f"per token, {types_in_short(types, book.dtype)}", "the ledger says", "this run"),
        ("FLOPs", f"{book.flops_per_token(position):,}", f"{flops:,} counted"),
        (
            "bytes of KV cache",
            f"{book.kv_bytes_per_token():,}",
            f"{cache_for(lm.decoder, 1, 1).nbytes:,} allocated",
        ),
        (
            "bytes read from memory",
            f"{read:,}",
            f"{read * speed / 1e9:.1f} GB/s of the {bandwidth / 1e9:.1f} this machine can",
        ),
        (
            "tokens/s",
            f"at most {bandwidth / read:.1f}",
            f"{speed:.1f}: {speed * read / bandwidth:.0%} of that, with {_threads()}",
        ),
    )
    for label, says, did in rows:
        print(f"{label:<24}{says:>15}   {did}")


def _threads() -> str:
    import torch

    n = torch.get_num_threads()
    return f"{n} threads" if n > 1 else "1 thread"
