"""The options that several verbs share, each named and explained once."""

from __future__ import annotations

from typing import Annotated

import typer

from openbook.cli import terminal

_SAMPLING = "Sampling"

Model = Annotated[
    str,
    typer.Argument(
        help="A preset, a fetched model's name, a folder, a config.json or a .gguf file.",
        show_default=False,
    ),
]
Weights = Annotated[
    str,
    typer.Argument(help="A fetched model's name, a folder or a .gguf file.", show_default=False),
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only results and errors.", callback=terminal.set_quiet)
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show the traceback of an error.", callback=terminal.set_verbose),
]

Prompt = Annotated[
    str | None,
    typer.Option("--prompt", "-p", help="The text; - reads it from stdin.", show_default=False),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", min=0, help="Tokens to write at most.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be repeated.", show_default=False)
]
ContextSize = Annotated[
    int | None,
    typer.Option("--ctx-size", "-c", min=1, help="Tokens to make room for.", show_default="the model's"),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", "-t", min=1, max=1024, help="CPU threads.", show_default="all cores"),
]
Dtype = Annotated[
    str | None, typer.Option(help="Compute in fp32, bf16 or fp16.", show_default="best for this machine")
]
Force = Annotated[bool, typer.Option("--force", help="Try even if it would not fit in memory.")]

Temperature = Annotated[
    float, typer.Option("--temp", help="0 takes the likeliest token.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option(help="Only the K likeliest; 0: all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Only the likeliest that reach this probability.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float, typer.Option(help="Only those at least this likely beside the best.", rich_help_panel=_SAMPLING)
]
RepeatPenalty = Annotated[
    float, typer.Option("--repeat-penalty", help="Above 1 avoids repetition.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option(help="For the same answer again.", rich_help_panel=_SAMPLING, show_default="none"),
]
