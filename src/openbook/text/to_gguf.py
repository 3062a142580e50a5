"""A `Vocabulary` to a GGUF file's metadata (`tokenizer.ggml.*`), as llama.cpp reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import pre_tokenizers

from openbook.text.gguf import TokenType
from openbook.text.pretokenizers import PRE_TOKENIZERS
from openbook.text.vocabulary import UnsupportedTokenizerError, Vocabulary

SAMPLE = (
    "I'm sure THEY'LL don't, we've; x's X'S  it’s\t\ttabs   three spaces \n\n  \r\n newlines\n \n"
    "3 33 333 4444 55555 1,234.56 v2.0 0x1F ½ ² ① ٣٤٥ १२३ 一二三 12三45 abc123def camelCase HTTPServer iPhone"
    " naïve Ünïcödé ßtraße ŁÓDŹ éé e\u0301 अन्तर्राष्ट्रीय ภาษาไทย "
    "日本語のテキスト、カタカナ。한국어 문장 русский Текст ελληνικά עברית العربية، ۔ 中文字符！？"
    " 🙂🙃👩‍👩‍👧 €100 $5 £ <html> </a> [x] {y} (z) \"q\" 'r' `s` ~!@#$%^&*_+-=|\\:;,./?<> ... --- === ***word"
    " !word .word /path/to #tag @user a_b_c __init__ \u00a0nbsp\u3000wide   don'tcha we'lldo I'dgo"
    " yes!\n\nno?\r\n  x ...\n\n\t\ty)\r\r(z /usr\n\n'sabc it's//x\n  end  "
)
"""A text that any two of llama.cpp's ways to cut text into words cut differently."""


def to_metadata(vocabulary: Vocabulary, n_rows: int) -> dict[str, Any]:
    """The keys for a model whose embedding has `n_rows` rows; rows without a token get a name of no use.

    Two things are different from a folder's, as they are in llama.cpp. Control tokens swallow no spaces. A
    vocabulary whose first text alone begins with ▁ (`prefix_first`) puts it before every text, also after
    a control token or where the text has one. Raises `UnsupportedTokenizerError` for a vocabulary that
    llama.cpp has no words for.
    """
    backend = json.loads(vocabulary.backend.to_str())
    if len(vocabulary.tokens) > n_rows:
        raise UnsupportedTokenizerError(
            f"the tokenizer has {len(vocabulary.tokens):,} tokens, the model only {n_rows:,} rows for them"
        )
    tokens = [token or f"[PAD{i}]" for i, token in enumerate(vocabulary.tokens)]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), n_rows)]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in backend["model"]["merges"]]
    types = [int(_type(vocabulary, backend, i)) for i in range(n_rows)]
    own = _byte_level if vocabulary.scheme == "byte-level" else _sentencepiece
    keys = {
        **own(vocabulary, backend, tokens, merges),
        "tokens": tokens,
        "token_type": types,
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        **dict(_special_ids(vocabulary, types)),
    }
    metadata: dict[str, Any] = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if vocabulary.chat_template is not None:
        metadata["tokenizer.chat_template"] = vocabulary.chat_template
    return metadata


def _byte_level(
    vocabulary: Vocabulary, backend: Mapping[str, Any], tokens: list[str], merges: list[list[str]]
) -> dict[str, Any]:
    for part in parts(backend["normalizer"]):
        if part["type"] not in ("Sequence", "NFC"):  # Qwen's; llama.cpp takes text as it comes
            raise UnsupportedTokenizerError(f"GGUF has no word for the normalizer {part['type']}")
    joined = [" ".join(merge) for merge in merges]
    return {
        "model": "gpt2",
        "pre": pre_name(vocabulary, bool(backend["model"]["ignore_merges"])),
        "merges": joined,
    }


def pre_name(vocabulary: Vocabulary, ignore_merges: bool) -> str:
    """llama.cpp's name for the way in which a tokenizer cuts text into words: the first of the table that
    cuts the sample in the same places."""
    own = vocabulary.backend.pre_tokenizer
    cut = own.pre_tokenize_str(SAMPLE) if own is not None else []
    for name, rules in PRE_TOKENIZERS.items():
        if name == "default" or rules.ignore_merges != ignore_merges:
            continue
        if _built(name).pre_tokenize_str(SAMPLE) == cut:
            return name
    raise UnsupportedTokenizerError(
        "the tokenizer cuts text into words as none of llama.cpp's tokenizer.ggml.pre does"
    )


def _built(name: str) -> pre_tokenizers.PreTokenizer:
    return PRE_TOKENIZERS[name].build()


def _sentencepiece(
    vocabulary: Vocabulary, backend: Mapping[str, Any], tokens: list[str], merges: list[list[str]]
) -> dict[str, Any]:
    """Scores that give the merges' order back: a token that is joined earlier scores higher."""
    for part in parts(backend["normalizer"]):
        if part["type"] not in ("Sequence", "Prepend", "Replace"):
            raise UnsupportedTokenizerError(f"GGUF has no word for the normalizer {part['type']}")
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(merges):
        rank.setdefault(left + right, i)
    scores = [-float(rank.get(token, len(merges))) for token in tokens]
    return {
        "model": "llama",
        "pre": "default",
        "scores": scores,
        "add_space_prefix": _prefixes(vocabulary, backend),
    }


def _prefixes(vocabulary: Vocabulary, backend: Mapping[str, Any]) -> bool:
    """Whether ▁ is put before a text."""
    prepends = any(part["type"] == "Prepend" for part in parts(backend["normalizer"]))
    metaspace = any(
        part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never"
        for part in parts(backend["pre_tokenizer"])
    )
    return prepends or metaspace or vocabulary.prefix_first


def parts(node: Any) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer and, in a Sequence, those it is made of."""
    if isinstance(node, dict):
        yield node
        for name in ("normalizers", "pretokenizers"):
            for child in node.get(name) or []:
                yield from parts(child)


def _type(vocabulary: Vocabulary, backend: Mapping[str, Any], token_id: int) -> TokenType:
    if token_id >= len(vocabulary.tokens) or not vocabulary.tokens[token_id]:
        return TokenType.UNUSED
    if token_id in vocabulary.byte_tokens:
        return TokenType.BYTE
    if vocabulary.tokens[token_id] in (backend["model"]["unk_token"], "<unk>"):
        return TokenType.UNKNOWN
    if token_id in vocabulary.control:
        return TokenType.CONTROL
    return TokenType.USER_DEFINED if token_id in vocabulary.literal else TokenType.NORMAL


def _special_ids(vocabulary: Vocabulary, types: list[int]) -> Iterator[tuple[str, int]]:
    """A file has three names for tokens that end an answer: of the text, of the turn, of a message."""
    if TokenType.UNKNOWN in types:
        yield "unknown_token_id", types.index(TokenType.UNKNOWN)
    if vocabulary.bos_id is not None:
        yield "bos_token_id", vocabulary.bos_id
    ends = sorted(vocabulary.eos_ids, key=lambda i: (i != vocabulary.eos_id, i))
    yield from zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends, strict=False)
