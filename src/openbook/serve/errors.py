"""Whatever goes wrong becomes {"error": {"what", "why", "next"}} and a status; never a traceback."""

from __future__ import annotations

import logging
from typing import Any

from openbook.files.errors import printable

log = logging.getLogger(__name__)

_LONGEST = 1000
"""Characters of a message, which may quote a file."""


class ApiError(Exception):
    """What is told to the page: what failed, why, and what to do next."""

    def __init__(self, status: int, what: str, why: str, next: str = "") -> None:  # noqa: A002
        super().__init__(f"{what}: {why}")
        self.status, self.what, self.why, self.next = status, what, why, next

    def plain(self) -> dict[str, Any]:
        """The body of the response."""
        return {"error": {"what": self.what, "why": printable(self.why, _LONGEST), "next": self.next}}


STATUS: dict[str, tuple[int, str]] = {
    "RequestError": (400, "the request makes no sense"),
    "LedgerError": (400, "the ledger has no answer"),
    "MessageError": (400, "the messages cannot become a prompt"),
    "UnsupportedTokenizerError": (422, "the tokenizer is not supported"),
    "TokenizerError": (400, "the text cannot be tokenised"),
    "NotFoundError": (404, "no such model"),
    "UnknownModelError": (404, "no such model"),
    "NotFetchedError": (404, "the model is not fetched yet"),
    "WontFitError": (507, "it would not fit in memory"),
    "FileError": (422, "the file cannot be read"),
    "SpecError": (422, "the model is not supported"),
    "MisfitError": (422, "the file does not hold this model"),
    "NonFiniteError": (422, "the weights are not finite"),
    "NonFiniteLogitsError": (422, "the logits are not finite"),
    "TemplateError": (422, "the chat template cannot be used"),
    "ChatError": (400, "the chat cannot become a prompt"),
}
"""Openbook's own errors, by class name: the status, and what the page is told has happened. An error of a
class that is not here is looked up by the classes it is made from."""


def api_error(error: Exception) -> ApiError:
    """The same as an `ApiError`. What nobody expected is logged with its traceback, and told by its class."""
    if isinstance(error, ApiError):
        return error
    for kind in type(error).__mro__:
        if kind.__module__.partition(".")[0] == "openbook" and kind.__name__ in STATUS:
            status, what = STATUS[kind.__name__]
            return ApiError(status, what, str(error))
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return ApiError(507, "it would not fit in memory", "out of memory", "try a shorter prompt")
    if isinstance(error, OSError):
        return ApiError(422, "the file cannot be read", error.strerror or type(error).__name__)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed", type(error).__name__, "see what the terminal says")
