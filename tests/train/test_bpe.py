import json
from pathlib import Path

import pytest
import transformers

from openbook.text import Tokenizer
from openbook.train.bpe import train_bpe

SAMPLES = [
    "def f(x):\n\treturn x\n",
    "Größe 世界 👍",
    "  spaces   and\r\nlines\n\n\n",
    "\x00\x7f",
    "<|endoftext|>",
    "",
]


def test_every_text_comes_back(tokenizer: Tokenizer):
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_reads_the_same_ids_from_the_folder(tokenizer: Tokenizer, vocabulary: Path):
    theirs = transformers.AutoTokenizer.from_pretrained(vocabulary)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id) == (0, 0)
    for text in SAMPLES:
        if "<|" not in text:
            assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
            assert theirs(text).input_ids == tokenizer.prompt(text)


def test_no_text_spells_the_control_token(tokenizer: Tokenizer):
    assert 0 not in tokenizer.encode("a <|endoftext|> b")


def test_the_same_texts_give_the_same_file(tmp_path: Path):
    texts = ["one two three two one", "two two"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        train_bpe(texts, 270, tmp_path / name)
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_there_is_a_token_for_each_byte_and_no_smaller_vocabulary(tmp_path: Path):
    train_bpe([""], 257, tmp_path)
    vocab = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    assert len(vocab) == 257
    assert not Tokenizer.from_file(tmp_path).missing_bytes
    with pytest.raises(ValueError, match="257"):
        train_bpe([""], 256, tmp_path)
