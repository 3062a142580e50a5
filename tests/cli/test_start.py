"""What the command costs before it does anything, and how it behaves among other programs."""

import subprocess
import sys

import pytest

OPENBOOK = [sys.executable, "-m", "openbook"]


@pytest.mark.parametrize("arguments", [("--help",), ("ledger", "gpt3-175b")], ids=" ".join)
def test_it_starts_without_what_takes_long_to_import(arguments: tuple[str, ...]):
    """Both take about 0.25 s of CPU time, most of it typer's and Python's own."""
    script = (
        "import sys; from openbook.cli import main; sys.argv = ['openbook', *sys.argv[1:]]\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.stdout
    heavy = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "jinja2", "rich.progress"}
    assert not heavy & set(done.stderr.split())


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m openbook ledger gpt3-175b --by tensor | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == "Weights of gpt3-175b, bf16\n"
    assert done.stderr == ""


def test_output_that_is_no_terminal_has_no_colours():
    done = subprocess.run([*OPENBOOK, "show", "gpt2"], capture_output=True, timeout=60, env={"TERM": "xterm"})
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("ledger", "nope"), 3),
        (("ledger", "gpt2", "--dtype", "fp17"), 2),
        (("ledger", "gpt2", "--nope"), 2),
        (("generate", "gpt2", "-p", "x"), 3),
        (("verify", "/dev/null"), 3),
        (("models", "get", "nope"), 3),
    ],
)
def test_errors_are_the_same_under_optimised_python(arguments: tuple[str, ...], code: int):
    plain, optimised = (
        subprocess.run(
            [sys.executable, *flags, "-m", "openbook", *arguments], capture_output=True, timeout=60
        )
        for flags in ((), ("-O",))
    )
    assert plain.returncode == optimised.returncode == code
    assert plain.stderr == optimised.stderr
    assert plain.stderr.count(b"\n") == 1
    assert plain.stdout == b""
