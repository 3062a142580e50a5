"""`openbook chat`: a conversation, line by line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openbook.cli import errors, terminal
from openbook.cli.options import (
    ContextSize,
    Dtype,
    Force,
    MinP,
    Prompt,
    Quiet,
    RepeatPenalty,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    Verbose,
    Weights,
)

if TYPE_CHECKING:
    from openbook.lm import LanguageModel

HELP = """\
/help              this list
/clear             forget the conversation, keep the settings
/set               show the settings
/set NAME VALUE    change one: system, temp, top-k, top-p, min-p, repeat-penalty, seed, max-tokens
/save FILE         write the conversation as JSON
/exit              leave (or Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next."""


def run(
    model: Weights,
    prompt: Prompt = None,
    system: Annotated[str | None, typer.Option(help="The system message.", show_default=False)] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Of one answer.", show_default="no limit")
    ] = None,
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
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Talks with a model. /help lists the commands; with -p it answers once; stdin may be a pipe."""
    from openbook.cli.generate import read_prompt
    from openbook.cli.loading import load

    settings = {
        "system": system,
        "temp": temp,
        "top-k": top_k,
        "top-p": top_p,
        "min-p": min_p,
        "repeat-penalty": repeat_penalty,
        "seed": seed,
        "max-tokens": max_tokens,
    }
    question = read_prompt(prompt) if prompt is not None else None
    lm = load(model, dtype, threads, ctx_size, force)
    if lm.chat_template is None:
        raise errors.UsageError(
            f"{model} came without a chat template, as base models do: it continues texts, and answers none; "
            f"use: openbook generate {model}"
        )
    conversation = Conversation(lm, settings)
    if question is not None:
        conversation.ask(question)
        return
    if sys.stdin.isatty():
        terminal.note(f"{conversation.lm.spec.name}: /help for the commands, Ctrl-D to leave")
    for line in lines():
        if not conversation.take(line):
            break


# --- the conversation ---------------------------------------------------------------------------


def _number_or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() in ("none", "off") else kind(text)


SETTINGS: dict[str, Callable[[str], Any]] = {
    "system": lambda text: text or None,
    "temp": float,
    "top-k": int,
    "top-p": float,
    "min-p": float,
    "repeat-penalty": float,
    "seed": _number_or_none(int),
    "max-tokens": _number_or_none(int),
}
"""What /set knows, and how it reads a value."""


class Conversation:
    """The messages so far, the settings, and the model that answers."""

    def __init__(self, lm: LanguageModel, settings: dict[str, Any]) -> None:
        self.lm = lm
        self.settings = settings
        self.messages: list[dict[str, str]] = []

    def take(self, line: str) -> bool:
        """Answers a message or carries out a /command; False when it is time to leave.

        What cannot be done is told in one line, and the conversation goes on.
        """
        try:
            if line.startswith("/"):
                return self.command(*line[1:].split(maxsplit=1))
            if line.strip():
                self.ask(line)
        except (ValueError, ArithmeticError, OSError, errors.UsageError) as error:
            errors.report(error)
        return True

    def ask(self, question: str) -> None:
        """Streams the answer to stdout. Ctrl-C ends it; what was said until then is kept."""
        from openbook.cli.loading import speeds

        system = self.settings["system"]
        asked = [*self.messages, {"role": "user", "content": question}]
        preamble = [{"role": "system", "content": system}] if system else []
        pieces = self.lm.chat([*preamble, *asked], **self.sampling())
        said = ""
        with contextlib.suppress(KeyboardInterrupt):
            for piece in pieces:
                said += piece
                print(piece, end="", flush=True)
        print()
        self.messages = [*asked, {"role": "assistant", "content": said}]
        terminal.note(terminal.paint(speeds(self.lm.stats), "dim", sys.stderr))

    def sampling(self) -> dict[str, Any]:
        """The settings in the words of `LanguageModel.chat`."""
        names = {"temp": "temperature", "repeat-penalty": "repetition_penalty"}
        return {names.get(k, k.replace("-", "_")): v for k, v in self.settings.items() if k != "system"}

    def command(self, name: str = "", rest: str = "") -> bool:
        match name:
            case "exit" | "quit" | "bye":
                return False
            case "clear":
                self.messages = []
                terminal.note("forgotten")
            case "set":
                self.set(*rest.split(maxsplit=1))
            case "save":
                self.save(rest)
            case "help" | "?":
                terminal.note(HELP)
            case _:
                raise errors.UsageError(f"there is no /{name}; /help lists the commands")
        return True

    def set(self, name: str = "", value: str = "") -> None:
        """Changes one setting; without a name, shows all of them."""
        if not name:
            for key, current in self.settings.items():
                terminal.note(f"{key:<16}{'none' if current is None else current}")
            return
        if name not in SETTINGS:
            raise errors.UsageError(f"there is no setting {name}; there is {', '.join(SETTINGS)}")
        try:
            changed = SETTINGS[name](value)
        except ValueError:
            raise errors.UsageError(f"/set {name} needs a number, found {value!r}") from None
        self.settings = {**self.settings, name: changed}
        terminal.note(f"{name} is {'none' if changed is None else changed}")

    def save(self, file: str) -> None:
        if not file:
            raise errors.UsageError("/save needs the name of a file")
        system = self.settings["system"]
        preamble = [{"role": "system", "content": system}] if system else []
        text = json.dumps({"messages": [*preamble, *self.messages]}, indent=2, ensure_ascii=False)
        Path(file).expanduser().write_text(text + "\n", encoding="utf-8")
        terminal.note(f"{len(self.messages)} messages in {file}")


# --- reading ------------------------------------------------------------------------------------


def lines() -> Iterator[str]:
    """What is typed or piped in, a message at a time; a \\ at the end of a line joins the next one."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` its editing and history)
    parts: list[str] = []
    while True:
        try:
            line = _read("… " if parts else "> ")
        except KeyboardInterrupt:
            parts = []
            terminal.note("\n(/exit or Ctrl-D leaves)")
            continue
        except EOFError:
            break
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(parts)
            parts = []
    if parts:
        yield "\n".join(parts)
    if sys.stdin.isatty():
        terminal.note()


def _read(prompt: str) -> str:
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
