"""A text as training sees it whole, and generation from its beginning."""

from __future__ import annotations

import re

from openbook.text.tokenizer import Tokenizer


def begun(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, begun by BOS if the vocabulary has it: its first token is predicted too."""
    return [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *tokenizer.encode(text)]


def framed(tokenizer: Tokenizer, text: str) -> list[int]:
    """A whole text: begun by BOS and ended by EOS, if the vocabulary has them."""
    return [*begun(tokenizer, text), *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]


def first_half(text: str) -> str:
    """The first half of the words, or of the characters where there is but one word."""
    words = list(re.finditer(r"\S+", text))
    if len(words) < 2:
        return text[: (len(text) + 1) // 2]
    return text[: words[(len(words) + 1) // 2 - 1].end()]
