"""A MODEL of the command line becomes a source or a running model; the same for every verb that needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openbook import models
from openbook.cli import terminal

if TYPE_CHECKING:
    from openbook.infer.generate import Stats
    from openbook.lm import LanguageModel
    from openbook.sources import Source


def source_of(model: str) -> Source:
    """What MODEL names, for a verb that needs more than the description.

    Raises `NotFetchedError`, with the command to run, for a known model that is not here yet.
    """
    from openbook.sources import resolve

    source = resolve(model)
    if source.kind == "spec" and model.lower() in models.MODELS:
        models.fetched_path(model.lower())
    return source


def source_with_weights(model: str) -> Source:
    """The same for a verb that needs the weights: that there are none is told before torch is loaded."""
    from openbook.weights.tensors import open_tensors

    source = source_of(model)
    if source.kind == "spec":
        open_tensors(source)  # raises, and says what lies there instead
    return source


def load(
    model: str,
    dtype: str | None = None,
    threads: int | None = None,
    context: int | None = None,
    force: bool = False,
) -> LanguageModel:
    """The running model of MODEL."""
    source = source_with_weights(model)
    from openbook.lm import load

    with terminal.Progress() as progress:
        return load(source, dtype=dtype, threads=threads, context=context, force=force, progress=progress)


def speeds(stats: Stats) -> str:
    """'prompt 37 tokens, 210.3 t/s · answer 64 tokens, 41.9 t/s · ended by stop'."""
    cached = f" ({stats.cached_tokens} from the cache)" if stats.cached_tokens else ""
    parts = [
        f"prompt {stats.prompt_tokens:,} tokens{cached}, {stats.prefill_rate:,.1f} t/s",
        f"answer {stats.new_tokens:,} token{'s' * (stats.new_tokens != 1)}"
        + (f", {stats.decode_rate:,.1f} t/s" if stats.new_tokens > 1 else ""),
    ]
    if stats.finish:
        parts.append({"stop": "finished", "length": "cut at -n", "context": "context full"}[stats.finish])
    return " · ".join(parts)
