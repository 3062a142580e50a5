"""A Hugging Face folder (tokenizer.json and the small files beside it) to a `Vocabulary`.

Only JSON is read, and one Jinja template as text; `auto_map` and the like are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, models

from openbook.text.vocabulary import (
    TokenizerError,
    UnsupportedTokenizerError,
    Vocabulary,
    byte_token_value,
    check,
    check_id,
    check_tokens,
)

MAX_FILE_BYTES = 128 * 2**20
"""Largest file read; the largest real tokenizer.json has 33 MB."""


def from_folder(path: Path) -> Vocabulary:
    """The vocabulary of a folder, or of the tokenizer.json that `path` names."""
    folder = path.parent if path.suffix == ".json" else path
    source = path if path.suffix == ".json" else folder / "tokenizer.json"
    if not source.is_file():
        raise TokenizerError(
            f"{source} is not there: Openbook reads tokenizer.json; a folder with only tokenizer.model or "
            "vocab.json has to be saved again with transformers"
        )
    document = _read_json(source)
    config = _read_json(folder / "tokenizer_config.json", optional=True)
    model = _part(document, "model")
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise UnsupportedTokenizerError(f"{source.name}: model type {kind!r} is not supported, BPE is")

    added = _added_tokens(document)
    vocab = _vocab(model, added)
    tokens = [""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        tokens[i] = token
    control = frozenset(token["id"] for token in added if token["special"])
    scheme = _scheme(document)
    backend, prefix_first = _backend(document, model, vocab, added, scheme)
    return Vocabulary(
        backend=backend,
        tokens=tokens,
        scheme=scheme,
        control=control,
        literal=frozenset(token["id"] for token in added),
        byte_tokens=_byte_tokens(vocab) if scheme == "spm" else {},
        space_prefix=_decoding_drops_a_space(document),
        prefix_first=prefix_first,
        strips={
            token["id"]: (token["lstrip"], token["rstrip"])
            for token in added
            if token["special"] and (token["lstrip"] or token["rstrip"])
        },
        chat_template=_chat_template(folder, config),
        **_special(folder, config, document, vocab),
    )


# --- files --------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    size = path.stat().st_size
    check(size <= MAX_FILE_BYTES, f"{path.name} has {size:,} bytes, the limit is {MAX_FILE_BYTES:,}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path.name} is not UTF-8: {error}") from None


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        document = json.loads(_read(path), object_pairs_hook=_object)
    except TokenizerError:
        raise
    except (ValueError, RecursionError) as error:  # bad JSON; a number of thousands of digits; deep nesting
        raise TokenizerError(f"{path.name} is not JSON: {error}") from None
    check(isinstance(document, dict), f"{path.name} must hold a JSON object")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A key given twice would silently lose the first, and with it perhaps a token."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise TokenizerError(f"the JSON key {twice!r} is given twice")
    return result


def _part(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = document.get(name)
    if not isinstance(part, dict):
        raise TokenizerError(f"tokenizer.json: {name} must be an object, found {type(part).__name__}")
    return part


# --- the vocabulary -----------------------------------------------------------------------------


def _added_tokens(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
    listed = document.get("added_tokens") or []
    check(isinstance(listed, list), "tokenizer.json: added_tokens must be a list")
    added = []
    for token in listed:
        ok = isinstance(token, dict) and type(token.get("content")) is str and type(token.get("id")) is int
        check(
            ok and token["content"] != "",
            f"tokenizer.json: an added token is {token!r}, without content and id",
        )
        values = {flag: token.get(flag, False) for flag in flags}
        check(
            all(type(value) is bool for value in values.values()),
            f"tokenizer.json: the flags of {token['content']!r} must be true or false",
        )
        added.append({"content": token["content"], "id": token["id"], **values})
    return added


def _vocab(model: Mapping[str, Any], added: list[dict[str, Any]]) -> dict[str, int]:
    """Every token's id: the model's and the added ones, each id and each token once."""
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not set(map(type, vocab.values())) <= {int}:
        raise TokenizerError("tokenizer.json: model.vocab must map tokens to whole numbers")
    vocab = dict(vocab)
    for token in added:
        token_id = vocab.setdefault(token["content"], token["id"])
        check(
            token_id == token["id"],
            f"tokenizer.json: {token['content']!r} has two ids, {token_id} and {token['id']}",
        )
    check_tokens(vocab, "tokenizer.json")
    check(len(set(vocab.values())) == len(vocab), "tokenizer.json: two tokens share an id")
    low, high = min(vocab.values()), max(vocab.values())
    check(
        low >= 0 and high < 2 * len(vocab) + 1000,
        f"tokenizer.json: ids run from {low} to {high} for {len(vocab)} tokens: the file is damaged",
    )
    return vocab


def _backend(
    document: dict[str, Any],
    model: Mapping[str, Any],
    vocab: Mapping[str, int],
    added: list[dict[str, Any]],
    scheme: str,
) -> tuple[tokenizers.Tokenizer, bool]:
    """The splitter of plain text, and whether `encode` must put ▁ before the first text itself.

    The file's normalizer and pre-tokenizer are taken as they are. Control tokens are left out; and
    as the backend then sees a text in fragments, it could not tell which one is first.
    """
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        check(not model.get(affix), f"tokenizer.json: model.{affix} {model.get(affix)!r} is not supported")
    control = {token["content"] for token in added if token["special"]}
    unk = _unknown_token(model, vocab, scheme)
    prefix_first = False
    for part in _parts(document.get("pre_tokenizer")):
        if part.get("type") == "Metaspace" and _prepend_scheme(part) == "first":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
            prefix_first = True
    try:
        backend = tokenizers.Tokenizer.from_str(
            json.dumps(
                {
                    **document,
                    "model": {"type": "BPE", "vocab": {}, "merges": []},
                    **dict.fromkeys(("truncation", "padding", "post_processor")),
                    "added_tokens": [],
                }
            )
        )
        backend.model = models.BPE(
            vocab={token: i for token, i in vocab.items() if token not in control or token == unk},
            merges=_merges(model, vocab, control),
            unk_token=unk,
            fuse_unk=bool(model.get("fuse_unk")),
            byte_fallback=bool(model.get("byte_fallback")),
            ignore_merges=bool(model.get("ignore_merges")),
        )
    except TokenizerError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"tokenizer.json is refused by the tokenizers library: {error}") from error
        raise
    backend.add_tokens(
        [
            AddedToken(
                token["content"],
                single_word=token["single_word"],
                lstrip=token["lstrip"],
                rstrip=token["rstrip"],
                normalized=token["normalized"],
            )
            for token in added
            if not token["special"]
        ]
    )
    return backend, prefix_first


def _unknown_token(model: Mapping[str, Any], vocab: Mapping[str, int], scheme: str) -> str | None:
    """The token for what no other spells: needed only where there is no token for every byte.

    A byte-level vocabulary has no use for one (see `Tokenizer.missing_bytes`), and some name their
    end-of-text token here, which a text must not be able to produce.
    """
    unk = model.get("unk_token")
    every_byte = bool(model.get("byte_fallback")) and len(set(_byte_tokens(vocab).values())) == 256
    if unk is None or every_byte or scheme == "byte-level":
        return None
    check(unk in vocab, f"tokenizer.json: model.unk_token {unk!r} is not in the vocabulary")
    return unk


def _merges(model: Mapping[str, Any], vocab: Mapping[str, int], control: set[str]) -> list[tuple[str, str]]:
    """Pairs in order of rank. A pair that touches a control token is left out: text cannot spell one."""
    listed = model.get("merges")
    check(isinstance(listed, list), "tokenizer.json: model.merges must be a list")
    merges = []
    for i, merge in enumerate(listed or []):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or set(map(type, pair)) != {str}:
            raise TokenizerError(f"tokenizer.json: model.merges[{i}] is {merge!r}, not two tokens")
        left, right = pair
        check(
            left in vocab and right in vocab and left + right in vocab,
            f"tokenizer.json: model.merges[{i}] joins {left!r} and {right!r}, but not all are tokens",
        )
        if control.isdisjoint((left, right, left + right)):
            merges.append((left, right))
    return merges


def _byte_tokens(vocab: Mapping[str, int]) -> dict[int, int]:
    values = ((i, byte_token_value(token)) for token, i in vocab.items() if token.startswith("<0x"))
    return {i: value for i, value in values if value is not None}


# --- normalizer, pre-tokenizer, decoder ---------------------------------------------------------


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder and, in a Sequence, those it is made of."""
    if isinstance(node, dict):
        yield node
        for name in ("normalizers", "pretokenizers", "decoders"):
            for child in node.get(name) or []:
                yield from _parts(child)


def _prepend_scheme(metaspace: Mapping[str, Any]) -> str:
    return metaspace.get("prepend_scheme") or (
        "always" if metaspace.get("add_prefix_space", True) else "never"
    )


def _scheme(document: Mapping[str, Any]) -> Literal["byte-level", "spm"]:
    types = {part.get("type") for part in _parts(document.get("decoder"))}
    if "ByteLevel" in types:
        return "byte-level"
    if types & {"ByteFallback", "Metaspace"}:
        return "spm"
    raise UnsupportedTokenizerError(
        f"tokenizer.json: the decoder {', '.join(sorted(map(str, types))) or 'null'} is not supported; "
        "ByteLevel and SentencePiece's (ByteFallback, Metaspace) are"
    )


def _decoding_drops_a_space(document: Mapping[str, Any]) -> bool:
    return any(
        (part.get("type") == "Strip" and part.get("content") == " " and part.get("start") == 1)
        or (part.get("type") == "Metaspace" and _prepend_scheme(part) != "never")
        for part in _parts(document.get("decoder"))
    )


# --- special tokens and the template ------------------------------------------------------------


def _special(
    folder: Path, config: Mapping[str, Any], document: Mapping[str, Any], vocab: Mapping[str, int]
) -> dict[str, Any]:
    """bos, eos and whether they are added: tokenizer_config.json first, else the post-processor's way."""
    n_tokens = max(vocab.values()) + 1
    first, last = _framing(document)
    bos_id = _named_id(config, "bos_token", vocab, n_tokens)
    eos_id = _named_id(config, "eos_token", vocab, n_tokens)
    ends = _end_ids(folder, n_tokens) | ({eos_id} if eos_id is not None else set())
    bos_id = vocab.get(first or "") if bos_id is None else bos_id
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    return {
        "bos_id": bos_id,
        "eos_id": eos_id,
        "eos_ids": frozenset(ends),
        "add_bos": bos_id is not None and (first is not None if add_bos is None else bool(add_bos)),
        "add_eos": eos_id is not None and (last is not None if add_eos is None else bool(add_eos)),
    }


def _named_id(config: Mapping[str, Any], name: str, vocab: Mapping[str, int], n_tokens: int) -> int | None:
    token = config.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    check(token is None or isinstance(token, str), f"tokenizer_config.json: {name} must be a string")
    if token is None:
        return None
    check(
        token in vocab,
        f"tokenizer_config.json: {name} {token!r} is not in the vocabulary of {n_tokens} tokens",
    )
    return vocab[token]


def _end_ids(folder: Path, n_tokens: int) -> set[int]:
    """eos_token_id of generation_config.json (one id or several), else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name, optional=True).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            return {check_id(token_id, n_tokens, f"{name}: eos_token_id") for token_id in ids}
    return set()


def _framing(document: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The special tokens a post-processor puts before and after a single text."""
    for node in (document.get("post_processor"), *_processors(document)):
        if isinstance(node, dict) and node.get("type") == "TemplateProcessing":
            names = [_special_name(item) for item in node.get("single") or []]  # None is the text itself
            if names:
                return names[0], names[-1] if len(names) > 1 else None
    return None, None


def _processors(document: Mapping[str, Any]) -> list[Any]:
    node = document.get("post_processor")
    return node.get("processors") or [] if isinstance(node, dict) else []


def _special_name(item: Any) -> str | None:
    special = item.get("SpecialToken") if isinstance(item, dict) else None
    return special.get("id") if isinstance(special, dict) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's (of several the one named "default")."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    check(
        template is None or isinstance(template, str), "tokenizer_config.json: chat_template must be a string"
    )
    return template
