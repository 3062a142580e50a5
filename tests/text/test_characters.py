"""Tokens that are parts of one character."""

import pytest

from openbook.text.characters import character_groups


@pytest.mark.parametrize(
    ("spelled", "groups"),
    [
        ([], []),
        ([b"a", b"b"], [0, 1]),
        ([b"\xe4\xb8", b"\x96"], [0, 0]),
        ([b"x\xe4", b"\xb8", b"\x96y", b"z"], [0, 0, 0, 1]),
        ([b"\xe4\xb8", b"a"], [0, 1]),  # no character: the bytes end in the middle
        ([b"\xf0\x9f", b"\x98\x80\xe4", b"\xb8\x96", b"."], [0, 0, 0, 1]),
        ([b"\x80", b"\x80"], [0, 1]),
        ([b"\xed\xa0", b"\x80"], [0, 1]),  # a surrogate is no character
    ],
)
def test_pieces_of_one_character_belong_together(spelled: list[bytes], groups: list[int]):
    assert character_groups(spelled) == groups
