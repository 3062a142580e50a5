"""One line and the right exit code for every error."""

import ast
from pathlib import Path

import pytest
import typer

from openbook import models
from openbook.cli import errors, terminal

SOURCE = Path(errors.__file__).parents[1]


def defined_errors() -> set[str]:
    """The names of all exception classes in the package, read from its source."""
    trees = (ast.parse(file.read_text()) for file in SOURCE.rglob("*.py"))
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
    }


def test_every_error_in_the_table_exists():
    assert set(errors.EXIT_CODES) <= defined_errors()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (models.UnknownModelError("no model is called 'x'"), 3),
        (models.NotFetchedError("x is not here"), 3),
        (models.FetchError("no network"), 1),
        (errors.UsageError("--json and --format csv contradict each other"), 2),
        (errors.CheckFailedError("3 of 272 tensors differ"), 1),
        (FileNotFoundError(2, "No such file or directory", "gone.gguf"), 3),
        (PermissionError(13, "Permission denied", "mine.gguf"), 1),
        (MemoryError(), 4),
        (ZeroDivisionError("division by zero"), 1),
        (typer.BadParameter("no such thing"), 2),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(error: BaseException, code: int, capsys):
    assert errors.report(error) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_subclass_has_the_code_of_its_base():
    class TruncatedError(models.FetchError):
        __module__ = "openbook.files"

    assert errors.explain(TruncatedError("cut off"))[0] == 1


def test_another_librarys_error_of_the_same_name_is_not_ours():
    class NotFoundError(Exception):
        __module__ = "elsewhere"

    assert errors.explain(NotFoundError("x")) == (
        1,
        "internal error, NotFoundError: x; run again with -v and report the traceback",
    )


def test_ctrl_c_is_130_without_a_traceback(capsys):
    assert errors.report(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "\n"


def test_a_message_of_several_lines_becomes_one(capsys):
    errors.report(models.FetchError("one\n  two\nthree"))
    assert capsys.readouterr().err == "error: one two three\n"


def test_what_a_message_quotes_of_a_file_is_escaped_and_cut(capsys):
    errors.report(models.FetchError("\x1b[31m" + "x" * 10**6))
    shown = capsys.readouterr().err
    assert shown.startswith(r"error: \x1b[31mxxx")
    assert len(shown) < 2100


def test_the_traceback_is_shown_on_request_only(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal, "verbose", True)
    try:
        raise models.FetchError("no network")
    except models.FetchError as error:
        errors.report(error)
    assert "Traceback (most recent call last)" in capsys.readouterr().err
