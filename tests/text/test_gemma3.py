"""A vocabulary of 262,144 tokens, with scores, bytes and user-defined tokens, against llama.cpp.

llama.cpp takes the vocabulary's `</s>`, the HTML tag, for a control token ("probably a bug in the model",
it says while loading); here it is what the file says, a user-defined one. So no text below has one.
"""

import pydoc_data.topics
import random
from pathlib import Path

import pytest

import llama_server
from openbook.files.gguf import read_gguf
from openbook.text import ChatTemplate, Tokenizer

pytestmark = pytest.mark.model
with_llama_cpp = pytest.mark.skipif(
    llama_server.MISSING, reason="llama.cpp is not here: pip install xllamacpp"
)
SOURCES = Path(llama_server.__file__).parents[1] / "src"

EDGES = [
    "", " ", "  ", "   a", "\n", " \n \n", "a" * 300 + " " * 300 + "!" * 300, "\t\t\tx\t\n", "Hello, world!",
    "你好，世界。这是一个测试：模型学习如何把文字变成数字，再把数字变成文字。",
    "こんにちは 안녕하세요 สวัสดี مرحبا",
    "👍😀👨‍👩‍👧🇩🇪 e\u0301 Ω ﬁ 𝔘𝔫𝔦 ⟨ψ|φ⟩ ꙮ ᚠᛇᚻ", "\x01\x7f\ufffd\U0010ffff\U000e0001",
    "<|im_end|> <think> [INST] <0x41> <0x4", "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<bos>a<eos><pad><unk><mask>[multimodal]<unused12>", "<table><tr><td>x</td></tr></table><b> </b>",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(gemma3: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(gemma3).metadata)


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> list[str]:
    """Prose, code, whitespace, tokens in any order, and characters of every plane."""
    chosen = random.Random(0)
    files = sorted(SOURCES.rglob("*.py"))[:40]
    found = [*EDGES, *pydoc_data.topics.topics.values(), *(file.read_text() for file in files)]
    tokens = [tokenizer.token(i).replace("▁", " ") for i in range(tokenizer.vocab_size)]
    fragments = [*"aZé你👍 \n\t\r'1²Ω.,_<|>", "  ", "\n\n", "'s", "<end_of_turn>", "</b>", "<b>", "\n\n\n\n"]
    planes = [(0x20, 0x7F), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]
    for _ in range(1000):
        found.append("".join(chosen.choices(tokens, k=chosen.randrange(1, 12))))
        found.append("".join(chosen.choices(fragments, k=chosen.randrange(1, 30))))
        found.append("".join(chr(chosen.randrange(*chosen.choice(planes))) for _ in range(20)))
    return [text for text in found if "</s>" not in text and "\0" not in text]


@with_llama_cpp
@pytest.mark.parametrize("special", [False, True])
def test_ids_equal_llama_cpps(gemma3: Path, tokenizer: Tokenizer, texts: list[str], special: bool):
    for text, theirs in zip(texts, llama_server.tokenize(gemma3, texts, special=special), strict=True):
        assert tokenizer.encode(text, special) == theirs, text[:100]


@with_llama_cpp
def test_decoded_text_equals_llama_cpps(gemma3: Path, tokenizer: Tokenizer):
    """Every token but the halves of characters, a hundred at a time, after a dot: there it starts no text."""
    dot, first_byte = tokenizer.encode(".")[0], tokenizer.id_of("<0x00>") or 0
    whole = [i for i in range(tokenizer.vocab_size) if not first_byte <= i < first_byte + 256]
    runs = [[dot, *whole[i : i + 100]] for i in range(0, len(whole), 100)]
    for run, theirs in zip(runs, llama_server.detokenize(gemma3, runs), strict=True):
        assert tokenizer.decode(run, skip_special=False) == theirs, run


def test_text_comes_back_whole(tokenizer: Tokenizer, texts: list[str]):
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.control_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == text


def test_html_tags_newlines_and_runs_of_spaces_are_single_tokens(tokenizer: Tokenizer):
    for token in ("<table>", "</s>", "\n" * 31, " " * 31, "\t" * 31, "[multimodal]"):
        assert tokenizer.pieces(tokenizer.encode(token)) == [token]
    assert tokenizer.pieces(tokenizer.encode("\n" * 33)) == ["\n" * 31, "\n\n"]


def test_an_answer_ends_with_the_text_or_the_turn(tokenizer: Tokenizer):
    assert tokenizer.eos_ids == {tokenizer.id_of("<eos>"), tokenizer.id_of("<end_of_turn>")} == {1, 106}
    assert (tokenizer.add_bos, tokenizer.bos_id, tokenizer.add_eos) == (True, 2, False)


def test_turns_are_written_with_the_vocabularys_control_tokens(tokenizer: Tokenizer):
    """The file is a base model's, without a template; this is what its chat-tuned kin have, in short."""
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content | trim "
        "+ '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
    )
    assert tokenizer.chat_template is None
    ids = template.render([{"role": "user", "content": " Why <end_of_turn>? "}], tokenizer)
    assert tokenizer.pieces(ids) == [
        "<bos>", "<start_of_turn>", "user", "\n", "Why", " <", "end", "_", "of", "_", "turn", ">?",
        "<end_of_turn>", "\n", "<start_of_turn>", "model", "\n",
    ]  # fmt: skip
