"""What the command costs before it does anything, and how it behaves among other programs."""

import resource
import subprocess
import sys

import pytest

OPENBOOK = [sys.executable, "-m", "openbook"]


def cpu_seconds(*arguments: str) -> float:
    """CPU time of a run in a process of its own: the least of five, since the machine may be busy."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*OPENBOOK, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


@pytest.mark.parametrize("arguments", [("--help",), ("ledger", "gpt3-175b")], ids=" ".join)
def test_it_starts_in_under_400_ms_of_cpu_time(arguments: tuple[str, ...]):
    assert cpu_seconds(*arguments) < 0.4


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
