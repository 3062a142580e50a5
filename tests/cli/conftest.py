"""Runs the command in this process, so that torch is imported once and not for every test."""

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from openbook.cli import main, terminal


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def openbook(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """`openbook("ledger", "gpt2", stdin="...")` -> exit code, stdout, stderr."""

    def run(*arguments: str, stdin: str | bytes = "") -> Done:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        monkeypatch.setattr(sys, "argv", ["openbook", *arguments])
        monkeypatch.setattr(terminal, "quiet", False)
        monkeypatch.setattr(terminal, "verbose", False)
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        return Done(int(stopped.value.code or 0), *capfd.readouterr())

    return run
