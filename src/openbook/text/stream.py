"""Token ids and text as they arrive, one at a time, to text that is safe to show.

Both classes give, joined, exactly what the whole would have given at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from openbook.text.tokenizer import Tokenizer


class TextStream:
    """Ids to text, each character as soon as its last byte has arrived.

    Joined, the pieces and the flush equal `tokenizer.decode(ids, skip_special, start)`. Memory is
    constant: at most three bytes of an unfinished character are kept.

    >>> stream = TextStream(tokenizer)  # doctest: +SKIP
    >>> "".join(stream.push(token_id) for token_id in ids) + stream.flush()  # doctest: +SKIP
    '👍 done'
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, start: bool = True) -> None:
        """`start`: as in `Tokenizer.decode`; False when the ids continue a text, as after a prompt."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = start and tokenizer.space_prefix

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is unfinished."""
        return self._text(self._tokenizer.token_bytes(token_id, self._skip_special), final=False)

    def flush(self) -> str:
        """What is left at the end: one U+FFFD for an unfinished character, otherwise ""."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if text and self._drop_space:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Lets text through until a stop string is complete, and never any part of that stop string.

    The stop that is complete first wins, and of those complete at the same character the longest. So
    the result does not depend on how the text is cut into pieces. Text that may still become a stop
    is held back, and released when it does not; the time per character is constant for each stop.

    >>> stops = StopStrings(["\\n\\n"])
    >>> [stops.push(piece) for piece in ("one\\n", "two", "\\n", "\\nthree")]
    ['one', '\\ntwo', '', '']
    >>> stops.stopped
    '\\n\\n'
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """ValueError for an empty stop string, which would stop before the first character."""
        stops = [stops] if isinstance(stops, str) else list(stops)
        if not all(stops):
            raise ValueError("a stop string is empty: it would end every answer before it begins")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text, or None so far."""

    def push(self, text: str) -> str:
        """The text that may be sent now. After a stop always ""."""
        if self.stopped is not None:
            return ""
        ready = self._held + text
        scanned = len(self._held)
        for i, char in enumerate(text, start=scanned + 1):
            found = [matcher.stop for matcher in self._matchers if matcher.step(char)]
            if found:
                self.stopped, self._held = max(found, key=len), ""
                return ready[: i - len(self.stopped)]
        kept = max((matcher.matched for matcher in self._matchers), default=0)
        self._held = ready[len(ready) - kept :]
        return ready[: len(ready) - kept]

    def flush(self) -> str:
        """The text still held back: the end has come, so it is no stop string after all."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth, Morris and Pratt's search: how much of `stop` the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0]
        """For each prefix of `stop`, the longest shorter one that it also ends with."""
        for char in stop[1:]:
            self._borders.append(self._advance(self._borders[-1], char))

    def step(self, char: str) -> bool:
        """Take one character; whether `stop` is now complete (then the matcher is done with)."""
        self.matched = self._advance(self.matched, char)
        return self.matched == len(self.stop)

    def _advance(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == char)
