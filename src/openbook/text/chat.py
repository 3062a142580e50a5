"""Chats to token ids, by the Jinja template that comes with a model.

What a template writes may be control tokens; what a message says never is. A user who types
`<|im_end|>` gets the ten characters typed, not the token: see `openbook.text.marked`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from openbook.text import sandbox
from openbook.text.marked import parts_of
from openbook.text.tokenizer import MAX_CHARS, Tokenizer

ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
"""Roles a template may build a control token from (`'<|' + role + '|>'`); any other is content."""

Message = Mapping[str, Any]
"""{"role": ..., "content": text, None or a list of {"type": "text", "text": ...}}, and what else the
template knows of (name, tool_calls, reasoning_content, ...)."""


class ChatError(ValueError):
    """A chat that cannot become a prompt."""


class MessageError(ChatError):
    """The messages are at fault: which one, and what is wrong with it."""


class TemplateError(ChatError):
    """The template refuses this chat, is broken, or does what a chat template may not."""


class ChatTemplate:
    """A compiled chat template. Never changes, safe in many threads.

    >>> chat = ChatTemplate(tokenizer.chat_template)  # doctest: +SKIP
    >>> ids = chat.render([{"role": "user", "content": "Hi"}], tokenizer)  # doctest: +SKIP
    """

    def __init__(self, source: str) -> None:
        self.source = source
        if len(source) > sandbox.MAX_TEMPLATE_CHARS:
            raise TemplateError(
                f"the chat template has {len(source):,} characters, limit {sandbox.MAX_TEMPLATE_CHARS:,}"
            )
        try:
            self._code = sandbox.Sandbox(sandbox.Budget()).compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from None
        except Exception as error:  # deep nesting ends in RecursionError, SyntaxError, MemoryError, ...
            raise TemplateError(f"the chat template cannot be compiled: {_reason(error)}") from None

    def render(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of the chat, ending where the assistant is to speak.

        `variables` are what the template asks for besides (`enable_thinking=False`). As in Hugging
        Face's apply_chat_template nothing is added: a template that wants a BOS writes it.
        """
        return tokenizer.encode_parts(
            self.parts(messages, tokenizer, add_generation_prompt, tools, **variables)
        )

    def text(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The same as text, to look at. Encoding it again would trust the content: use `render`."""
        parts = self.parts(messages, tokenizer, add_generation_prompt, tools, **variables)
        return "".join(text for text, _ in parts)

    def parts(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[tuple[str, bool]]:
        """The text in parts (text, special): the template's own is special, content is not."""
        given = {
            "messages": checked_messages(messages),
            "tools": _plain(tools, "tools") if tools else None,
            **{name: _plain(value, name) for name, value in variables.items()},
        }
        names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        fixed = {name: "" if i is None else tokenizer.token(i) for name, i in names.items()}
        chars = _count_chars(given)
        if chars > MAX_CHARS:
            raise MessageError(f"the chat has {chars:,} characters, at most {MAX_CHARS:,} are taken")
        return self._render({**given, **fixed, "add_generation_prompt": add_generation_prompt}, chars)

    def _render(self, variables: dict[str, Any], chars: int) -> list[tuple[str, bool]]:
        budget = sandbox.Budget(chars)
        parts: list[tuple[str, bool]] = []
        try:
            for piece in sandbox.Sandbox(budget).load(self._code).generate(variables):
                budget.pay(chars=len(piece))
                parts += parts_of(piece)
        except Exception as error:
            raise TemplateError(f"the chat template failed: {_reason(error)}") from None
        return parts


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates expect them: content one string, known roles plain, the rest content.

    A content of None is "", parts are joined with nothing between, other fields that are None are
    left out (as transformers does). MessageError for anything else.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise MessageError("messages must be a list of at least one message")
    return [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(f"{where} must be an object with role and content, found {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise MessageError(f"{where}.role must be a string such as 'user', found {role!r}")
    rest = {
        str(key): _plain(value, f"{where}.{key}")
        for key, value in message.items()
        if key not in ("role", "content") and value is not None
    }
    return {
        "role": str(role) if role in ROLES else _plain(role, where),
        "content": _plain(_joined_content(message.get("content"), f"{where}.content"), where),
        **rest,
    }


def _joined_content(value: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise MessageError(f"{where} must be text, null or a list of parts, found {type(value).__name__}")
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(value))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise MessageError(f"{where} has type {kind!r}: only parts of type 'text' are supported")
    if not isinstance(part.get("text"), str):
        raise MessageError(f"{where}.text must be a string, found {type(part.get('text')).__name__}")
    return part["text"]


def _plain(value: Any, where: str) -> Any:
    try:
        return sandbox.plain_data(value)
    except TypeError as error:
        raise MessageError(f"{where} cannot be given to a chat template: {error}") from None


def _count_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _count_chars(item) for key, item in value.items())
    return sum(map(_count_chars, value)) if isinstance(value, list) else 0


def _reason(error: BaseException) -> str:
    """One line, whatever the template put into its message."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__}: {text}"
