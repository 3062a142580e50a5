"""Text to token ids, ids to text, chats to ids; see docs/text.md."""

from openbook.text.chat import ChatError, ChatTemplate, MessageError, TemplateError
from openbook.text.stream import StopStrings, TextStream
from openbook.text.tokenizer import Tokenizer
from openbook.text.vocabulary import TokenizerError, UnsupportedTokenizerError

__all__ = [
    "ChatError",
    "ChatTemplate",
    "MessageError",
    "StopStrings",
    "TemplateError",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "UnsupportedTokenizerError",
]
