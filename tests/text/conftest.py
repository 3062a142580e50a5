"""Small vocabularies of each kind, trained here, beside the libraries that define what is right."""

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

CONTROL = [
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "[/INST]",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]
USER_DEFINED = ["<think>", "</think>", "<tool_response>"]

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it's the dog's turn to jump; they'll both jump.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "SELECT name, price FROM items WHERE price > 12.50 AND name LIKE 'a%'; -- 2024-06-30\r\n\r\n",
    "Die Größe der Straße überraschte die Gäste; später fuhren sie nach Österreich zurück.",
    "你好，世界。这是一个测试：模型学习如何把文字变成数字，再把数字变成文字。",
    "Emoji 👍😀 and families 👨‍👩‍👧 and flags 🇩🇪, then    many    spaces\tand\ttabs\n\n\n  indented",
    "{{ message.role }} says <|x|> and <y>: system user assistant, im start im end, header id, turn.",
] * 4


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE as GPT-2's, with control tokens, one that swallows spaces, and plain added ones."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=[AddedToken(token) for token in CONTROL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_special_tokens([AddedToken("<|strip|>", lstrip=True, rstrip=True)])
    backend.add_tokens([AddedToken(token, normalized=False) for token in USER_DEFINED])
    return backend


@pytest.fixture(scope="session")
def byte_level_folder(byte_level: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte-level")
    byte_level.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="session")
def byte_level_metadata(byte_level: tokenizers.Tokenizer) -> dict:
    """The same vocabulary as a GGUF file would hold it."""
    vocab = byte_level.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    model = json.loads(byte_level.to_str())["model"]
    types = {**dict.fromkeys([*CONTROL, "<|strip|>"], 3), **dict.fromkeys(USER_DEFINED, 4)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["</s>"],
    }


def _train_sentencepiece(folder: Path, **options: object) -> sentencepiece.SentencePieceProcessor:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.split("\n") if line.strip()]),
        model_prefix=str(folder / "spm"),
        vocab_size=560,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))


def metadata_of(model: sentencepiece.SentencePieceProcessor, space_prefix: bool) -> dict:
    """A SentencePiece model as llama.cpp's converter writes it."""
    ids = range(model.get_piece_size())

    def kind(i: int) -> int:
        if model.is_unknown(i) or model.is_control(i) or model.is_byte(i):
            return 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6
        return 4 if model.id_to_piece(i) in USER_DEFINED else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


@pytest.fixture(scope="session")
def spm(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model like Llama 2's: a space before the text, bytes for rare characters."""
    return _train_sentencepiece(tmp_path_factory.mktemp("spm"), add_dummy_prefix=True)


@pytest.fixture(scope="session")
def spm_without_prefix(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """One like Gemma's: no space before the text, user-defined symbols, tokens across words."""
    return _train_sentencepiece(
        tmp_path_factory.mktemp("spm-plain"),
        add_dummy_prefix=False,
        split_by_whitespace=False,
        user_defined_symbols=USER_DEFINED,
        control_symbols=["[INST]", "[/INST]"],
    )


@pytest.fixture(scope="session")
def spm_metadata(spm: sentencepiece.SentencePieceProcessor) -> dict:
    return metadata_of(spm, space_prefix=True)


@pytest.fixture(scope="session")
def spm_without_prefix_metadata(spm_without_prefix: sentencepiece.SentencePieceProcessor) -> dict:
    return metadata_of(spm_without_prefix, space_prefix=False)


@pytest.fixture(scope="session")
def llama_style(spm: sentencepiece.SentencePieceProcessor) -> tokenizers.Tokenizer:
    """The SentencePiece model as transformers' LlamaTokenizer holds it: Metaspace at the very start only."""
    from openbook.text.gguf import merges_by_score

    pieces = [spm.id_to_piece(i) for i in range(spm.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    normal = [i for i in range(len(pieces)) if not (spm.is_control(i) or spm.is_unknown(i) or spm.is_byte(i))]
    merges = merges_by_score([pieces[i] for i in normal], [spm.get_score(i) for i in normal], vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token) for token in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return backend


@pytest.fixture(scope="session")
def llama_style_folder(llama_style: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-style")
    llama_style.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return folder
