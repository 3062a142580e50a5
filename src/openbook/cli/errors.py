"""Every error of a verb becomes one line on stderr and one of these exit codes.

0 done · 1 a check failed · 2 wrong usage · 3 not found or unsupported · 4 would not fit in memory ·
130 interrupted with Ctrl-C
"""

from __future__ import annotations

import os
import sys
import traceback

from openbook.cli import terminal

FAILED, USAGE, NOT_FOUND, WONT_FIT, INTERRUPTED = 1, 2, 3, 4, 130

EXIT_CODES = {
    "NotFoundError": NOT_FOUND,
    "UnsupportedError": NOT_FOUND,
    "UnknownModelError": NOT_FOUND,
    "NotFetchedError": NOT_FOUND,
    "MissingExtraError": NOT_FOUND,
    "UnsupportedTokenizerError": NOT_FOUND,
    "WontFitError": WONT_FIT,
    "UsageError": USAGE,
    "RecipeError": USAGE,
    "LoraError": USAGE,
    "TermsError": USAGE,
    "FetchError": FAILED,
    "FileError": FAILED,
    "SpecError": FAILED,
    "TokenizerError": FAILED,
    "LedgerError": USAGE,
    "RequestError": USAGE,
    "MisfitError": FAILED,
    "NonFiniteError": FAILED,
    "NonFiniteLogitsError": FAILED,
    "CacheFullError": FAILED,
    "ChatError": FAILED,
    "CheckpointError": FAILED,
    "DivergedError": FAILED,
    "BusyError": FAILED,
    "DiskError": FAILED,
    "CheckFailedError": FAILED,
}
"""Openbook's own errors by class name, the more particular first: naming them costs no import."""

_LONGEST = 2000
"""Characters of a message: what it quotes of a file may be of any length."""


class UsageError(Exception):
    """The options contradict each other, or one has no such value."""


class CheckFailedError(Exception):
    """The verb ran, and what it checked does not hold."""


class MissingExtraError(Exception):
    """An optional package is needed; the message names the command that installs it."""


def report(error: BaseException) -> int:
    """Prints the error as one line (with `-v`, its traceback first) and gives the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, BrokenPipeError):
        # The reader (`| head`) has enough. Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        print(file=sys.stderr)
        return INTERRUPTED
    if terminal.verbose:
        traceback.print_exception(error)
    from openbook.files.errors import printable

    code, text = explain(error)
    label = terminal.paint("error:", "red", sys.stderr)
    print(f"{label} {printable(' '.join(text.split()), _LONGEST)}", file=sys.stderr)
    return code


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code of an error and what to tell about it."""
    if hasattr(error, "format_message"):  # typer's, about the command line
        return USAGE, _usage(error)
    if code := _own_code(error):
        return code, str(error)
    if isinstance(error, FileNotFoundError):
        return NOT_FOUND, f"no such file: {error.filename or error}"
    if isinstance(error, OSError):
        return FAILED, f"{error.filename or 'input or output'}: {error.strerror or error}"
    if isinstance(error, MemoryError) or (isinstance(error, ImportError) and "failed to map" in str(error)):
        return WONT_FIT, "out of memory; try a smaller --ctx-size or --dtype bf16"
    return (
        FAILED,
        f"internal error, {type(error).__name__}: {error}; run again with -v and report the traceback",
    )


def _own_code(error: BaseException) -> int | None:
    for kind in type(error).__mro__:
        if kind.__module__.partition(".")[0] == "openbook" and kind.__name__ in EXIT_CODES:
            return EXIT_CODES[kind.__name__]
    return None


def _usage(error: BaseException) -> str:
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "openbook"
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"
