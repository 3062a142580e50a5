"""Texts as they are learned and continued."""

import pytest

from openbook.text.framing import first_half


@pytest.mark.parametrize(
    ("text", "half"),
    [
        ("这 是 最好的 时代 这 是 最坏的 时代", "这 是 最好的 时代"),
        ("one  two three", "one  two"),
        ("  word", "  w"),
        ("这是最好的", "这是最"),
        ("a", "a"),
        ("", ""),
    ],
)
def test_the_first_half_is_of_words_or_else_of_characters(text: str, half: str):
    assert first_half(text) == half
