"""A vocabulary of our own: byte-level BPE, learned from the texts that the model will learn from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

END = "<|endoftext|>"
"""The only control token: before a document and after it, so that its first token is predicted as well
and generation knows where to stop."""

MIN_VOCAB = 257
"""The 256 bytes and `END`."""


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which Openbook and transformers read alike.

    Words are cut as GPT-2 cuts them (Radford et al. 2019, section 2.2), so every other runtime can use
    the result. There are fewer than `vocab_size` tokens if the texts have no more pairs to join.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if vocab_size < MIN_VOCAB:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for all bytes: take {MIN_VOCAB} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A prompt begins as a document does.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
