"""The verb that makes datasets and looks into them."""

import json
from pathlib import Path

import pytest

CHAT = [
    {"role": "user", "content": "Hi\x1b[31m"},
    {"role": "assistant", "content": "Hello\nyou!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for i in range(30):
        (tmp_path / "texts" / f"{i}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the text of file number {i}\n" * 3)
    return tmp_path / "texts"


def test_a_dataset_is_built_and_its_counts_are_the_result(openbook, texts: Path, tmp_path: Path):
    folder = str(tmp_path / "data")
    done = openbook("data", "build", str(texts), "-o", folder, "--vocab", "300", "--held-out", "0.3")
    assert done.code == 0
    assert done.out.splitlines()[0].endswith("data: texts, a vocabulary of 300 tokens")
    assert [line.split()[0] for line in done.out.splitlines()[3:5]] == ["train", "heldout"]
    assert done.err == f"Look into it: openbook data show {folder}\n"


def test_show_prints_a_row_with_its_documents_and_what_is_learned(openbook, texts: Path, tmp_path: Path):
    openbook("data", "build", str(texts), "-o", str(tmp_path / "data"), "--vocab", "300", "-q")
    lines = openbook("data", "show", str(tmp_path / "data"), "--length", "60", "--whole").out.splitlines()
    (summary,) = [line for line in lines if line.startswith("sample 0 of train: row ")]
    assert summary.endswith("labels")
    first = lines.index(summary) + 1
    assert lines[first].startswith("document ")
    assert lines[first + 1] == "    given │ <|endoftext|>"
    assert lines[first + 2].startswith("  learned │ the text of file number ")
    assert any(line.endswith("<|endoftext|>") for line in lines[first + 2 :])


def test_json_has_the_counts_and_the_row(openbook, texts: Path, tmp_path: Path):
    folder = str(tmp_path / "data")
    built = json.loads(openbook("data", "build", str(texts), "-o", folder, "--vocab", "300", "--json").out)
    shown = json.loads(openbook("data", "show", folder, "--sample", "7", "--length", "20", "--json").out)
    assert built["schema"] == shown["schema"] == "openbook.data/1"
    assert built["splits"] == shown["splits"]
    row = shown["row"]
    assert sum(len(segment["ids"]) for segment in row["segments"]) == 20
    assert (row["sample"], row["length"]) == (7, 20)


@pytest.mark.model
def test_a_chat_shows_its_answers_as_learned_and_its_escapes_as_text(openbook, smollm2: Path, tmp_path: Path):
    file, folder = tmp_path / "chat.jsonl", str(tmp_path / "data")
    file.write_text(json.dumps({"messages": CHAT}))
    done = openbook("data", "build", str(file), "-o", folder, "--tokenizer", str(smollm2), "--held-out", "0")
    assert done.code == 0
    out = openbook("data", "show", folder, "--whole").out
    assert "\x1b" not in out
    assert "Hi\\x1b[31m" in out
    margin = [line.split("│") for line in out.splitlines() if "│" in line]
    learned = [text for word, text in margin if word.strip() == "learned"]
    assert learned == [" Hello", " See you.<|im_end|>"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("build", "nope.txt", "-o", "x"), 3, "no such file: nope.txt"),
        (("build", "TEXTS", "-o", "x", "--vocab", "9"), 2, "257"),
        (("build", "TEXTS", "-o", "x", "--vocab", "300", "--tokenizer", "gpt2"), 2, "one of them"),
        (("build", "TEXTS", "-o", "x", "--tokenizer", "gpt2"), 3, "gpt2 has no tokenizer"),
        (("build", "TEXTS", "-o", "TEXTS"), 1, "is there already"),
        (("build", "CHAT", "-o", "x"), 1, "--tokenizer MODEL"),
        (("build", "BROKEN", "-o", "x"), 1, "line 1"),
        (("show", "TEXTS"), 3, "openbook data build"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    openbook, texts: Path, tmp_path: Path, monkeypatch, arguments, code, words
):
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    Path("broken.jsonl").write_text("{")
    paths = {"TEXTS": "texts", "CHAT": "chat.jsonl", "BROKEN": "broken.jsonl"}
    done = openbook("data", *(paths.get(argument, argument) for argument in arguments))
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not Path("x").exists()
