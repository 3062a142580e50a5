"""Which tokens share the bytes of one character."""

from __future__ import annotations

from collections.abc import Sequence


def character_groups(spelled: Sequence[bytes]) -> list[int]:
    """A number for each piece; neighbours that share the bytes of one character have the same."""
    data = b"".join(spelled)
    groups: list[int] = []
    at = 0
    for piece in spelled:
        begins = not groups or not _inside_character(data, at)
        groups.append(groups[-1] + 1 if groups and begins else groups[-1] if groups else 0)
        at += len(piece)
    return groups


def _inside_character(data: bytes, at: int) -> bool:
    """Whether the byte at `at` continues a character of UTF-8 that is whole."""
    for start in range(at - 1, max(at - 4, -1), -1):
        if data[start] & 0xC0 != 0x80:  # the first byte of a character: its leading ones say how many
            length = next((n for n in (2, 3, 4) if data[start] >> (7 - n) == 2 ** (n + 1) - 2), 1)
            return start + length > at and _is_character(data[start : start + length])
    return False


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False
