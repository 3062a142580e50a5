"""What every reader of a tokenizer file hands over: one checked vocabulary."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import tokenizers

MAX_TOKENS = 2_000_000
"""Far beyond any vocabulary (the largest known has about 262,000); more is a lying file."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be used, or a text or id it cannot take: what, why, what next."""


class UnsupportedTokenizerError(TokenizerError):
    """A tokenizer that is well described, but of a kind that Openbook does not have. Names what it has."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, what they stand for, and the backend that splits plain text into them.

    The backend does not know the control tokens at all, so no text can be encoded into one; whoever
    wants them (`Tokenizer.encode(special=True)`) finds them in the text first.
    """

    backend: tokenizers.Tokenizer
    tokens: list[str]
    """The token of each id as the file spells it; "" where the file leaves an id empty."""
    scheme: Literal["byte-level", "spm"]
    """How a token spells its bytes: GPT-2's alphabet of 256 characters, or text with ▁ for a space
    and <0xHH> for a byte."""
    control: frozenset[int]
    """Tokens that steer the model (<s>, <|im_end|>): written by templates, never by content."""
    literal: frozenset[int]
    """Tokens, control tokens among them, that are their own text in either scheme."""
    byte_tokens: Mapping[int, int] = field(default_factory=dict)
    """SPM: the byte each <0xHH> token stands for."""
    space_prefix: bool = False
    """Decoding a text from its start drops one leading space, because encoding put it there."""
    prefix_first: bool = False
    """Encoding puts ▁ before the very first text, unless there is one, and before no other."""
    strips: Mapping[int, tuple[bool, bool]] = field(default_factory=dict)
    """Control tokens that swallow the whitespace on their (left, right) when found in a text."""
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    eos_id: int | None = None
    """The one id that `add_eos` appends; generation stops at any of `eos_ids`."""
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | None = None


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes as visible characters: the character's byte.

    Bytes that are visible in Latin-1 stand for themselves, the others for U+0100 and on, in order
    (`bytes_to_unicode` in GPT-2's encoder.py).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def byte_token_value(token: str) -> int | None:
    """The byte that <0xHH> stands for; None for any other text, <0x-1> and <0xZZ> among them."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return int(match[1], 16) if match else None


def check(ok: bool, message: str) -> None:
    if not ok:
        raise TokenizerError(message)


def check_tokens(tokens: Collection[str], where: str) -> None:
    """Some tokens, not too many, each once (an empty text only marks an unused id)."""
    check(len(tokens) > 0, f"{where} holds no tokens: the file has no usable vocabulary")
    check(len(tokens) <= MAX_TOKENS, f"{where} holds {len(tokens):,} tokens, the limit is {MAX_TOKENS:,}")
    seen: set[str] = set()
    for token in tokens:
        if token in seen and token:
            raise TokenizerError(f"{where} holds the token {token!r} twice: ids would be ambiguous")
        seen.add(token)


def check_id(value: object, n_tokens: int, where: str) -> int:
    if type(value) is not int or not 0 <= value < n_tokens:
        raise TokenizerError(f"{where} must be a token id from 0 to {n_tokens - 1}, found {value!r}")
    return value
