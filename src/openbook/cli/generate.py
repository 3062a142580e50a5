"""`openbook generate`: continues a text."""

from __future__ import annotations

import sys
from dataclasses import asdict

from openbook.cli import terminal
from openbook.cli.errors import UsageError
from openbook.cli.options import (
    ContextSize,
    Dtype,
    Force,
    Json,
    MaxTokens,
    MinP,
    Prompt,
    Quiet,
    RepeatPenalty,
    Seed,
    Stop,
    Temperature,
    Threads,
    TopK,
    TopP,
    Verbose,
    Weights,
)


def run(
    model: Weights,
    prompt: Prompt = None,
    max_tokens: MaxTokens = 256,
    stop: Stop = None,
    temp: Temperature = 0.8,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    min_p: MinP = 0.05,
    repeat_penalty: RepeatPenalty = 1.0,
    seed: Seed = None,
    ctx_size: ContextSize = None,
    threads: Threads = None,
    dtype: Dtype = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Continues a text, streaming it to stdout; the statistics go to stderr."""
    from openbook.cli.loading import load, speeds

    text = read_prompt(prompt)
    lm = load(model, dtype, threads, ctx_size, force)
    pieces = lm.generate(
        text,
        max_tokens=max_tokens,
        stop=stop or (),
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repeat_penalty,
        seed=seed,
    )
    if json:
        answer = "".join(pieces)
        terminal.write_json("generate", {"prompt": text, "text": answer, "stats": asdict(lm.stats)})
        return
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    terminal.note(terminal.paint(speeds(lm.stats), "dim", sys.stderr))


def read_prompt(prompt: str | None) -> str:
    """The text of -p; `-`, or no -p while something is piped in, reads stdin."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt: give one with -p, or pipe it in")
    return sys.stdin.buffer.read().decode("utf-8", "replace")
