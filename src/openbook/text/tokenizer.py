"""Text to token ids and back, for every kind of vocabulary Openbook reads.

>>> tokenizer = Tokenizer.from_gguf(metadata)  # doctest: +SKIP
>>> tokenizer.decode(tokenizer.encode("Grüße, 世界"))  # doctest: +SKIP
'Grüße, 世界'
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openbook.text import gguf, hf
from openbook.text.vocabulary import TokenizerError, Vocabulary, byte_alphabet

if TYPE_CHECKING:
    from openbook.sources import Source

MAX_CHARS = 4_000_000
"""Longest text taken at once: about 1 M tokens, so far beyond a context, and seconds of work."""


class Tokenizer:
    """A vocabulary in use. Made by `from_file` or `from_gguf`; never changes, safe in many threads.

    Control tokens (`<|im_end|>`, `<s>`) come only from `special=True` and from chat templates: a text
    that spells one out is encoded as the plain characters it is.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids = {token: i for i, token in enumerate(vocabulary.tokens) if token}
        # Longest first, so that of two tokens that start alike the longer one is found.
        names = sorted((vocabulary.tokens[i] for i in vocabulary.control), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a Hugging Face folder (or the tokenizer.json in one); no code in it is ever run."""
        return cls(hf.from_folder(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], pre: str | None = None) -> Tokenizer:
        """Read the `tokenizer.*` entries of a GGUF file's metadata.

        `pre` names the pre-tokenizer of a file so old that it does not.
        """
        return cls(gguf.from_metadata(metadata, pre))

    @classmethod
    def from_source(cls, source: Source) -> Tokenizer | None:
        """The tokenizer in a model's GGUF file, or beside its config.json; None if none is there."""
        if source.kind == "gguf":
            return cls.from_gguf(source.config) if "tokenizer.ggml.model" in source.config else None
        if source.path and (source.path / "tokenizer.json").exists():
            return cls.from_file(source.path)
        return None

    # --- what it knows ---------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """One more than the highest id. A model may have more rows; those stand for nothing."""
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._vocabulary.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id at which an answer ends: end of sequence, of turn, of message."""
        return self._vocabulary.eos_ids

    @property
    def add_bos(self) -> bool:
        """Whether the model wants its begin-of-sequence token before a prompt."""
        return self._vocabulary.add_bos

    @property
    def add_eos(self) -> bool:
        return self._vocabulary.add_eos

    @property
    def control_ids(self) -> frozenset[int]:
        return self._vocabulary.control

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that came with the vocabulary; see `openbook.text.ChatTemplate`."""
        return self._vocabulary.chat_template

    @property
    def missing_bytes(self) -> frozenset[int]:
        """Bytes of UTF-8 that no token spells. Like Hugging Face, `encode` leaves them out."""
        if self._vocabulary.scheme == "spm":
            return frozenset()
        never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
        spelled = {byte for char, byte in byte_alphabet().items() if char in self._ids}
        return frozenset(set(range(256)) - never_in_utf8 - spelled)

    def token(self, token_id: int) -> str:
        """The token as its file spells it (`Ġworld`, `▁world`, `<0x0A>`)."""
        self._check_id(token_id)
        return self._vocabulary.tokens[token_id]

    def id_of(self, token: str) -> int | None:
        """The id of a token spelled as in its file, or None."""
        return self._ids.get(token)

    # --- text to ids -----------------------------------------------------------------------------

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`, with nothing added.

        With `special` a control token written out in the text becomes that token: for text you wrote
        yourself, never for text from others.
        """
        return self.encode_parts([(text, special)])

    def prompt(self, text: str, special: bool = False) -> list[int]:
        """`encode`, with the begin- and end-of-sequence tokens the model asks for."""
        ids = self.encode(text, special)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of the joined parts (text, special), encoded as one text.

        Words may span parts, as if the text had been written in one go; but a control token counts
        only when all its characters lie in parts that are special.
        """
        parts = [(text, special) for text, special in parts if text]
        text = "".join(part for part, _ in parts)
        _check_text(text)
        ids: list[int] = []
        done = 0
        for start, stop, token_id in self._find_control(text, _special_regions(parts)):
            ids += self._encode_plain(text[done : max(start, done)], first=done == 0)
            ids.append(token_id)
            done = stop
        return ids + self._encode_plain(text[done:], first=done == 0)

    def _find_control(self, text: str, regions: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """The control tokens in the regions of `text` as (start, stop, id), left to right."""
        if self._control_pattern is None:
            return
        for region in regions:
            for match in self._control_pattern.finditer(text, *region):
                token_id = self._ids[match[0]]
                start, stop = match.span()
                left, right = self._vocabulary.strips.get(token_id, (False, False))
                while left and start > 0 and text[start - 1].isspace():
                    start -= 1
                while right and stop < len(text) and text[stop].isspace():
                    stop += 1
                yield start, stop, token_id

    def _encode_plain(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        if first and self._vocabulary.prefix_first and not text.startswith((" ", "▁")):
            text = "▁" + text
        with _backend_errors():
            return self._vocabulary.backend.encode(text, add_special_tokens=False).ids

    # --- ids to text -----------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = True, start: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        `start`: the ids begin a text, so the space a SentencePiece vocabulary puts before the first
        word is dropped. Give False for ids that continue a text, or the space is lost.
        """
        data = b"".join([self.token_bytes(token_id, skip_special) for token_id in ids])
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if start and self.space_prefix else text

    @property
    def space_prefix(self) -> bool:
        """Whether decoding from the start of a text drops one leading space."""
        return self._vocabulary.space_prefix

    def pieces(self, ids: Iterable[int]) -> list[str]:
        r"""Each token by itself, for display: part of a character shows as `\xe4`."""
        return [self.token_bytes(token_id).decode("utf-8", "backslashreplace") for token_id in ids]

    def token_bytes(self, token_id: int, skip_special: bool = False) -> bytes:
        """The bytes a token adds to a text; none for a control token if `skip_special`."""
        if skip_special and token_id in self._vocabulary.control:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        self._check_id(token_id)
        vocabulary, token = self._vocabulary, self._vocabulary.tokens[token_id]
        if token_id in vocabulary.literal:
            return token.encode()
        if vocabulary.scheme == "spm":
            byte = vocabulary.byte_tokens.get(token_id)
            return token.replace("▁", " ").encode() if byte is None else bytes([byte])
        try:
            return bytes(map(byte_alphabet().__getitem__, token))
        except KeyError:
            return token.encode()  # not in GPT-2's alphabet, so it can only mean itself

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(
                f"{token_id} is no token id of this vocabulary, which has 0 to {self.vocab_size - 1}"
            )


def _special_regions(parts: list[tuple[str, bool]]) -> list[tuple[int, int]]:
    """(start, stop) of every unbroken run of special parts in the joined text."""
    regions: list[tuple[int, int]] = []
    position = 0
    for text, special in parts:
        end = position + len(text)
        if special and regions and regions[-1][1] == position:
            regions[-1] = (regions[-1][0], end)
        elif special:
            regions.append((position, end))
        position = end
    return regions


def _check_text(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise TokenizerError(
            f"the text has {len(text):,} characters, at most {MAX_CHARS:,} are encoded at once: split it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
            "which is no character: decode its bytes with errors='replace'"
        ) from None


@contextlib.contextmanager
def _backend_errors() -> Iterator[None]:
    """A panic in the Rust code is a BaseException that would pass every `except Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException" or type(error) is Exception:
            raise TokenizerError(f"the tokenizer failed: {error}") from error
        raise
