"""A `Vocabulary` to the files of a Hugging Face folder: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from typing import Any

from openbook.text.vocabulary import Vocabulary


def to_files(vocabulary: Vocabulary) -> dict[str, dict[str, Any]]:
    """File name → its content as JSON-ready data; transformers and tokenizers read them."""
    return {"tokenizer.json": _tokenizer(vocabulary), "tokenizer_config.json": _config(vocabulary)}


def special_ids(vocabulary: Vocabulary) -> dict[str, Any]:
    """The ids that a config.json names: where a text begins, and what ends an answer."""
    ends = sorted(vocabulary.eos_ids, key=lambda i: (i != vocabulary.eos_id, i))
    eos: Any = ends if len(ends) > 1 else ends[0] if ends else None
    return {"bos_token_id": vocabulary.bos_id, "eos_token_id": eos}


def _tokenizer(vocabulary: Vocabulary) -> dict[str, Any]:
    """The backend's own description; the control tokens, which it does not know, are added to it."""
    document = json.loads(vocabulary.backend.to_str())
    vocab = document["model"]["vocab"]
    for i in vocabulary.literal:
        vocab.setdefault(vocabulary.tokens[i], i)
    document["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    return {
        **document,
        "added_tokens": [_added_token(vocabulary, i) for i in sorted(vocabulary.literal)],
        "post_processor": _post_processor(vocabulary),
        "decoder": _decoder(vocabulary),
    }


def _added_token(vocabulary: Vocabulary, token_id: int) -> dict[str, Any]:
    lstrip, rstrip = vocabulary.strips.get(token_id, (False, False))
    return {
        "id": token_id,
        "content": vocabulary.tokens[token_id],
        "single_word": False,
        "lstrip": lstrip,
        "rstrip": rstrip,
        "normalized": False,
        "special": token_id in vocabulary.control,
    }


def _decoder(vocabulary: Vocabulary) -> dict[str, Any]:
    if vocabulary.scheme == "byte-level":
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.space_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """What puts the first and the last token around a text."""
    first = vocabulary.bos_id if vocabulary.add_bos else None
    last = vocabulary.eos_id if vocabulary.add_eos else None
    if first is None and last is None:
        return None
    framing = {i: vocabulary.tokens[i] for i in (first, last) if i is not None}

    def framed(letter: str, type_id: int) -> list[dict[str, Any]]:
        before = [_special(framing[first], type_id)] if first is not None else []
        after = [_special(framing[last], type_id)] if last is not None else []
        return [*before, {"Sequence": {"id": letter, "type_id": type_id}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": framed("A", 0),
        "pair": framed("A", 0) + framed("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [i], "tokens": [token]} for i, token in framing.items()
        },
    }


def _special(token: str, type_id: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": type_id}}


def _config(vocabulary: Vocabulary) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
    }
    for name, token_id in (("bos_token", vocabulary.bos_id), ("eos_token", vocabulary.eos_id)):
        if token_id is not None:
            config[name] = vocabulary.tokens[token_id]
    if vocabulary.chat_template is not None:
        config["chat_template"] = vocabulary.chat_template
    return config
