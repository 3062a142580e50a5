"""A small corpus, its vocabulary and a chat template, made once."""

import json
from pathlib import Path

import pytest

from openbook.text import Tokenizer
from openbook.train.bpe import train_bpe

TEXTS = [
    "def area(width, height):\n    return width * height\n",
    "The width of a model is the size of its residual stream.\n",
    "Größe, 世界, 👍 and naïve café\n",
    "for i in range(10):\n    print(i, i * i)\n",
    "A document is never joined with another: attention and labels stay inside it.\n" * 3,
]

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a vocabulary of 300 tokens."""
    folder = tmp_path_factory.mktemp("vocabulary")
    train_bpe(TEXTS, 300, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(vocabulary: Path) -> Tokenizer:
    return Tokenizer.from_file(vocabulary)


@pytest.fixture(scope="session")
def chat_folder(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same vocabulary with ChatML's two control tokens and its template, as a chat model's folder."""
    folder = tmp_path_factory.mktemp("chat")
    about = json.loads((vocabulary / "tokenizer.json").read_text("utf-8"))
    for token_id, content in enumerate(("<|im_start|>", "<|im_end|>"), start=300):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        about["added_tokens"].append({"id": token_id, "content": content, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(about), "utf-8")
    config = {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(chat_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(chat_folder)
