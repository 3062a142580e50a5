"""Documents to tokens, and which of them the model is to learn.

A text is learned whole. Of a chat the assistant's turns are learned, each in exactly the context that
the model will have when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from openbook.text import ChatError, ChatTemplate, Tokenizer
from openbook.text.tokenizer import MAX_CHARS
from openbook.train.corpus import Chat, Document

Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of one document. `learned` marks those that are the model's own to predict; None: all."""

    ids: list[int]
    learned: Marks | None = None


def encode(
    document: Document | Chat, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Iterator[Encoded]:
    """The document as tokens: one `Encoded` for a text (none if it is empty), any number for a chat.

    Raises `TokenizerError` or, for a chat that cannot be rendered, `ChatError`.
    """
    if isinstance(document, Document):
        if document.text:
            yield Encoded(_framed(document.text, tokenizer))
    elif template is None:
        raise ChatError(
            f"{document.name} is a chat, but the tokenizer has no chat template: take one from a chat model "
            "(--tokenizer MODEL)"
        )
    else:
        try:
            yield from _chat(document, tokenizer, template)
        except ChatError as error:
            raise type(error)(f"{document.name}: {error}") from error


def _framed(text: str, tokenizer: Tokenizer) -> list[int]:
    """The text as generation will meet it (begin of sequence if the model wants it), and its end."""
    ids = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    for piece in _pieces(text):
        ids += tokenizer.encode(piece)
    return [*ids, tokenizer.eos_id] if tokenizer.eos_id is not None else ids


def _pieces(text: str, longest: int = MAX_CHARS // 4) -> Iterator[str]:
    """The text cut at ends of lines into pieces that the tokenizer takes at once."""
    start = 0
    while len(text) - start > longest:
        stop = text.rfind("\n", start, start + longest) + 1 or start + longest
        yield text[start:stop]
        start = stop
    yield text[start:]


# --- chats --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    """The chat up to and with one turn of the assistant's, which is `ids[start:stop]`."""

    ids: list[int]
    start: int
    stop: int


def _chat(chat: Chat, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Encoded]:
    """As few renderings as possible in which every turn of the assistant's occurs once as learned.

    Most templates only ever append, and one rendering holds all turns. Some change what lies behind as
    a chat goes on (they drop old reasoning); a turn that a later rendering shows otherwise is learned
    in its own.
    """
    waiting = list(_turns(chat, tokenizer, template))
    while waiting:
        ids = waiting[-1].ids
        inside = [turn for turn in waiting if turn.ids[: turn.stop] == ids[: turn.stop]]
        learned = np.zeros(len(ids), bool)
        for turn in inside:
            learned[turn.start : turn.stop] = True
        yield Encoded(ids, learned)
        waiting = [turn for turn in waiting if turn not in inside]


def _turns(chat: Chat, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[_Turn]:
    """The assistant's turns after the first message (a first one answers nothing).

    A turn begins where the prompt for it ends, so after the header that generation is given, and ends
    with the token at which generation stops. Where a prompt's last characters and the answer's first
    ones make one token, that token is learned; where the prompt says more than the answer shows (an
    opened thought), the turn begins where they part.
    """
    for i, message in enumerate(chat.messages):
        if i == 0 or message.get("role") != "assistant":
            continue
        before, upto = chat.messages[:i], chat.messages[: i + 1]
        ids = template.render(upto, tokenizer, add_generation_prompt=False, tools=chat.tools)
        prompt = template.render(before, tokenizer, add_generation_prompt=True, tools=chat.tools)
        start = _common(prompt, ids)
        if start < len(prompt):
            history = template.text(before, tokenizer, add_generation_prompt=False, tools=chat.tools)
            whole = template.text(upto, tokenizer, add_generation_prompt=False, tools=chat.tools)
            if not whole.startswith(history.rstrip()):
                raise ChatError(
                    f"messages[{i}]: the chat template renders what comes before in another way once the "
                    "answer follows, so what the model is to learn cannot be told from it"
                )
        stop = next((j for j in range(start, len(ids)) if ids[j] in tokenizer.eos_ids), len(ids) - 1) + 1
        if start < stop:
            yield _Turn(ids, start, stop)


def _common(a: list[int], b: list[int]) -> int:
    """How many ids the two begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
