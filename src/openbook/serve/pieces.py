"""A prompt as the page shows it: each token with its bytes, its spelling, and whose text it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openbook.text import ChatTemplate, Tokenizer
from openbook.text.characters import character_groups

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """Token ids, the text they were made of, and for each token whether the template wrote it or the user."""

    ids: list[int]
    text: str
    origins: list[str]


def of_text(tokenizer: Tokenizer, text: str) -> Prompt:
    """A plain text, with the tokens that the model wants around it."""
    content, ids = tokenizer.encode(text), tokenizer.prompt(text)
    before = int(ids[: len(content)] != content)
    origins = ["template"] * before + ["content"] * len(content)
    return Prompt(ids, text, origins + ["template"] * (len(ids) - len(origins)))


def of_chat(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message]) -> Prompt:
    """Messages as the model's own template writes them, up to where the assistant is to speak."""
    parts = template.parts(messages, tokenizer)
    ids = tokenizer.encode_parts(parts)
    return Prompt(ids, "".join(text for text, _ in parts), _origins(tokenizer, ids, parts))


def _origins(tokenizer: Tokenizer, ids: Sequence[int], parts: Sequence[tuple[str, bool]]) -> list[str]:
    """Whose the first byte of each token is. Where the tokens' bytes are not the text's, which happens if a
    vocabulary changes a text, control tokens alone are known to be the template's."""
    spelled = [tokenizer.token_bytes(i) for i in ids]
    text = b"".join(part.encode() for part, _ in parts)
    shift = next((n for n in (0, 1) if b"".join(spelled) == b" " * n + text), None)
    if shift is None:
        return ["template" if i in tokenizer.control_ids else "content" for i in ids]
    owner = [special for part, special in parts for _ in part.encode()]
    origins, at = [], -shift
    for data in spelled:
        inside = owner[min(max(at, 0), len(owner) - 1)] if owner else False
        origins.append("template" if inside else "content")
        at += len(data)
    return origins


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int], origins: Sequence[str]) -> list[dict[str, Any]]:
    """One object a token: see docs/explore.md. Without a tokenizer an id is all there is to show."""
    if tokenizer is None:
        return [
            _unknown(i, number, origin) for number, (i, origin) in enumerate(zip(ids, origins, strict=True))
        ]
    known = [i < tokenizer.vocab_size for i in ids]  # a matrix may have more rows than there are tokens
    spelled = [tokenizer.token_bytes(i) if ok else b"" for i, ok in zip(ids, known, strict=True)]
    groups = character_groups(spelled)
    whole = ["" for _ in range(groups[-1] + 1)] if groups else []
    joined = [b""] * len(whole)
    for group, data in zip(groups, spelled, strict=True):
        joined[group] += data
    return [
        {
            "id": i,
            "text": data.decode("utf-8", "replace"),
            "token": tokenizer.token(i) if ok else "",
            "bytes": data.hex(),
            "special": i in tokenizer.control_ids,
            "char_group": group,
            "whole": joined[group].decode("utf-8", "replace"),
            "from": origin,
        }
        for i, data, ok, group, origin in zip(ids, spelled, known, groups, origins, strict=True)
    ]


def _unknown(token: int, number: int, origin: str) -> dict[str, Any]:
    return {
        "id": token, "text": f"#{token}", "token": "", "bytes": "", "special": False,
        "char_group": number, "whole": f"#{token}", "from": origin,
    }  # fmt: skip


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """What a token shows by itself; the bytes, ⟨e5 a5⟩, of one that is part of a character."""
    if tokenizer is None or token >= tokenizer.vocab_size:
        return f"#{token}"
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"⟨{data.hex(' ')}⟩".replace(" ", "\xa0")
