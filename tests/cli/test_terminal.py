"""What a person sees: bars on a terminal, plain lines elsewhere, words that stay whole."""

import io

import pytest

from openbook.cli import terminal


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "quiet", False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_progress_on_a_terminal_is_one_line_that_is_wiped(monkeypatch: pytest.MonkeyPatch):
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    with terminal.Progress() as progress:
        progress("downloading", 50_000_000, 100_000_000)
    assert "downloading 50 of 100 MB" in screen.getvalue()
    assert "\n" not in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")


def test_progress_elsewhere_is_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch):
    log, now = io.StringIO(), iter([0.0, 1.0, 4.9, 5.0, 6.0, 10.1])
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    with terminal.Progress() as progress:
        for done in range(1, 6):
            progress("loading", done * 1_000_000, 9_000_000)
    assert log.getvalue() == "loading 3 of 9 MB\nloading 5 of 9 MB\n"


def test_quiet_silences_notes_and_bars(monkeypatch: pytest.MonkeyPatch):
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(terminal, "quiet", True)
    terminal.note("hello")
    with terminal.Progress() as progress, terminal.Status() as status:
        progress("loading", 1, 2)
        status("thinking")
    assert screen.getvalue() == ""


def test_colour_needs_a_terminal_and_no_objection(monkeypatch: pytest.MonkeyPatch):
    assert terminal.paint("x", "bold", Screen()) == "\x1b[1mx\x1b[0m"
    assert terminal.paint("x", "bold", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.paint("x", "bold", Screen()) == "x"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_wrapped_text_does_not_depend_on_how_it_arrives(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal, "width", lambda: 20)
    text = "one two three four five six\nseven eight-nine-ten-eleven-twelve end "
    out = io.StringIO()
    wrapped = terminal.Wrapped(out, 4)
    for start in range(0, len(text), size):
        wrapped.write(text[start : start + size])
    wrapped.close()
    assert out.getvalue().split("\n") == [
        "one two three",
        "    four five six",
        "    seven",
        "    eight-nine-ten-eleven-twelve",
        "    end",
    ]
