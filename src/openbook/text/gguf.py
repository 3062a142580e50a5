"""A GGUF file's metadata (`tokenizer.ggml.*`) to a `Vocabulary`.

Two kinds are understood: "gpt2" is byte-level BPE with merges, "llama" is SentencePiece BPE, whose
merges are implied by the scores of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from openbook.text.pretokenizers import PreTokenizer, pre_tokenizer
from openbook.text.vocabulary import (
    TokenizerError,
    UnsupportedTokenizerError,
    Vocabulary,
    byte_token_value,
    check,
    check_id,
    check_tokens,
)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, the codes of llama.cpp (`llama_token_type`)."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "<end_of_utterance>",
)
"""Tokens that end an answer whatever the file says: GGUF names one `eos` where models have several.

They count as control tokens even in files that list them as ordinary ones (llama.cpp does the same).
"""


def from_metadata(metadata: Mapping[str, Any], pre: str | None = None) -> Vocabulary:
    """The vocabulary in `metadata`; `pre` names the pre-tokenizer of a file that does not."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    check_tokens(tokens, "tokenizer.ggml.tokens")
    types = _token_types(metadata, tokens)
    if model == "gpt2":
        name = pre or metadata.get("tokenizer.ggml.pre")
        if not isinstance(name, str):
            raise TokenizerError(
                f"tokenizer.ggml.pre is {name!r}: the file does not say how its text is split into words; "
                "convert the model again, or give the name as pre='gpt-2', 'llama-bpe', ..."
            )
        rules = pre_tokenizer(name)
        return _byte_level(metadata, tokens, types, rules)
    if model == "llama":
        return _sentencepiece(metadata, tokens, types)
    raise UnsupportedTokenizerError(
        f"tokenizer.ggml.model is {model!r}, not 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)"
    )


# --- the two kinds ------------------------------------------------------------------------------


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[TokenType], rules: PreTokenizer
) -> Vocabulary:
    control, user_defined = _special_ids(tokens, types)
    vocab = {token: i for i, token in enumerate(tokens) if token and i not in control}
    merges = _merges(metadata, vocab, {tokens[i] for i in control})
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.ignore_merges))
    backend.pre_tokenizer = rules.build()
    _add_user_defined(backend, tokens, user_defined)
    return Vocabulary(
        backend=backend,
        tokens=tokens,
        scheme="byte-level",
        control=control,
        literal=control | user_defined,
        **_special(metadata, tokens, add_bos=rules.add_bos),
    )


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[TokenType]) -> Vocabulary:
    for key in ("tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.remove_extra_whitespaces"):
        check(not metadata.get(key), f"{key} asks for a normalisation of the text that is not supported")
    control, user_defined = _special_ids(tokens, types)
    byte_tokens = _byte_tokens(tokens, types)
    unknown = [i for i, kind in enumerate(types) if kind is TokenType.UNKNOWN]
    check(
        len(set(byte_tokens.values())) == 256 or bool(unknown),
        f"the vocabulary has {len(byte_tokens)} of 256 byte tokens and none for what is unknown: "
        "some texts could not be encoded",
    )
    vocab = {token: i for i, token in enumerate(tokens) if token and i not in control}
    # Where every byte is a token nothing is unknown, and text cannot produce the unknown token.
    unk = {tokens[i]: i for i in unknown[:1] if len(set(byte_tokens.values())) < 256}
    normal = [i for i, kind in enumerate(types) if kind in (TokenType.NORMAL, TokenType.UNUSED)]
    merges = merges_by_score(
        [tokens[i] for i in normal if i not in control], _scores(metadata, tokens, normal), vocab
    )
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab | unk,
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=next(iter(unk), None),
        )
    )
    space_prefix = _flag(metadata, "add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    _add_user_defined(backend, tokens, user_defined)
    return Vocabulary(
        backend=backend,
        tokens=tokens,
        scheme="spm",
        control=control,
        literal=control | user_defined,
        byte_tokens=byte_tokens,
        space_prefix=space_prefix,
        **_special(metadata, tokens, add_bos=True),
    )


def merges_by_score(
    tokens: Iterable[str], scores: Iterable[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """The merges that make BPE of SentencePiece's scores: whichever pair gives the better token first.

    SentencePiece joins the neighbours whose joint token scores highest; so each way to split a token
    into two others is a merge, in order of the whole token's score. Pairs that give the same token
    follow in the order Hugging Face uses (`generate_merges`).
    """
    pairs = [
        (score, cut, len(token) - cut, left, right)
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab
    ]
    pairs.sort(key=lambda pair: pair[:3], reverse=True)
    return [(left, right) for *_, left, right in pairs]


def _add_user_defined(backend: tokenizers.Tokenizer, tokens: list[str], ids: Iterable[int]) -> None:
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(ids)])


# --- reading the metadata -----------------------------------------------------------------------


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not set(map(type, values)) <= {str}:
        raise TokenizerError(f"{key} must be a list of strings, found {_kind(values)}")
    return values


def _kind(value: object) -> str:
    if isinstance(value, list):
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return "nothing" if value is None else type(value).__name__


def _token_types(metadata: Mapping[str, Any], tokens: list[str]) -> list[TokenType]:
    key = "tokenizer.ggml.token_type"
    values = metadata.get(key)
    if values is None:
        return [TokenType.NORMAL] * len(tokens)
    _check_parallel(values, tokens, key, {int})
    kinds = {kind.value: kind for kind in TokenType}
    unknown = set(values) - kinds.keys()
    check(not unknown, f"{key} holds {sorted(unknown)[:5]}, which are no token types (0 to 6)")
    return [kinds[value] for value in values]


def _scores(metadata: Mapping[str, Any], tokens: list[str], ids: Iterable[int]) -> list[float]:
    """The scores of the tokens `ids`; every score of the file is checked."""
    key = "tokenizer.ggml.scores"
    values = metadata.get(key)
    if values is None:
        raise TokenizerError(f"{key} is missing: a SentencePiece vocabulary cannot be used without it")
    _check_parallel(values, tokens, key, {float, int})
    check(all(map(math.isfinite, values)), f"{key} holds a value that is not a finite number")
    return [values[i] for i in ids]


def _check_parallel(values: object, tokens: list[str], key: str, types: set[type]) -> None:
    if not isinstance(values, list) or not set(map(type, values)) <= types:
        names = " or ".join(sorted(kind.__name__ for kind in types))
        raise TokenizerError(f"{key} must be a list of {names}, found {_kind(values)}")
    check(
        len(values) == len(tokens),
        f"{key} has {len(values):,} entries for {len(tokens):,} tokens: the file is damaged",
    )


def _special_ids(tokens: list[str], types: Sequence[TokenType]) -> tuple[frozenset[int], frozenset[int]]:
    """The ids of (control, user-defined) tokens."""
    named = set(END_OF_TURN)
    control = frozenset(
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token and (kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token in named)
    )
    user_defined = frozenset(
        i for i, kind in enumerate(types) if kind is TokenType.USER_DEFINED and tokens[i] and i not in control
    )
    return control, user_defined


def _byte_tokens(tokens: list[str], types: Sequence[TokenType]) -> dict[int, int]:
    byte_tokens = {}
    for i, kind in enumerate(types):
        if kind is TokenType.BYTE:
            value = byte_token_value(tokens[i])
            if value is None:
                raise TokenizerError(
                    f"token {i} is typed as a byte but reads {tokens[i]!r}, not <0x00>...<0xFF>"
                )
            byte_tokens[i] = value
    return byte_tokens


def _merges(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], control: set[str]
) -> list[tuple[str, str]]:
    """Pairs in order of rank. A pair that would spell a control token is left out."""
    merges = []
    for i, merge in enumerate(_strings(metadata, "tokenizer.ggml.merges")):
        left, space, right = merge.partition(" ")
        if left + right in control:
            continue
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise TokenizerError(
                f"tokenizer.ggml.merges[{i}] is {merge!r}: not two tokens that join to a third"
            )
        merges.append((left, right))
    return list(dict.fromkeys(merges))


def _special(metadata: Mapping[str, Any], tokens: list[str], add_bos: bool) -> dict[str, Any]:
    """The fields of `Vocabulary` that every kind reads alike; `add_bos` is what silence means."""
    bos_id, eos_id = _id(metadata, "bos", tokens), _id(metadata, "eos", tokens)
    ends = {eos_id, _id(metadata, "eot", tokens), _id(metadata, "eom", tokens)} - {None}
    ids = {token: i for i, token in enumerate(tokens)}
    named = {ids[token] for token in END_OF_TURN if token in ids}
    if "<|return|>" in ids and "<|end|>" in ids:
        named.discard(ids["<|end|>"])  # here <|end|> ends one message of several in an answer
    adds = {"add_bos": _flag(metadata, "add_bos_token", add_bos and bos_id is not None)}
    adds["add_eos"] = _flag(metadata, "add_eos_token", False)
    for name, token_id in (("bos", bos_id), ("eos", eos_id)):
        check(
            not adds[f"add_{name}"] or token_id is not None,
            f"tokenizer.ggml.add_{name}_token is set but tokenizer.ggml.{name}_token_id is missing",
        )
    template = metadata.get("tokenizer.chat_template")
    check(template is None or isinstance(template, str), "tokenizer.chat_template must be a string")
    return {
        "bos_id": bos_id,
        "eos_id": eos_id,
        "eos_ids": frozenset(ends | named),
        "chat_template": template,
        **adds,
    }


def _id(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    return None if value is None else check_id(value, len(tokens), key)


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{key} must be true or false, found {value!r}")
    return value
