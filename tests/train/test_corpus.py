import json
import sys
from pathlib import Path

import pytest

from openbook.files import FileError
from openbook.spec.presets import NotFoundError
from openbook.train.corpus import (
    Chat,
    Document,
    MissingExtraError,
    corpus_of,
    is_held_out,
    read_files,
    stdlib,
)


def test_a_text_file_is_one_document_and_what_windows_adds_is_gone(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "Größe\r\nend".encode())
    assert list(read_files([tmp_path / "a.txt"])) == [Document("a.txt", "Größe\nend")]


def test_a_folder_is_read_in_order_of_names_without_hidden_and_other_files(tmp_path: Path):
    for name in ("b.txt", "a/z.md", "a/.git/c.txt", "image.png", "c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [document.name for document in read_files([tmp_path])] == ["a/z.md", "b.txt", "c.py"]


def test_a_line_of_jsonl_is_a_text_or_a_chat(tmp_path: Path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    lines = [{"text": "one"}, {"messages": messages}, {"body": "two", "text": "three"}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = list(read_files([path]))
    assert found == [
        Document("data.jsonl:1", "one"),
        Chat("data.jsonl:3", messages),
        Document("data.jsonl:5", "three"),
    ]


def test_another_field_can_hold_the_text(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text('{"body": "two"}')
    assert [
        d.text for d in read_files([tmp_path / "data.jsonl"], field="body") if isinstance(d, Document)
    ] == ["two"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff\xfe", ["byte 0", "UTF-8"]),
        ("a.jsonl", b'{"text": "x"}\n{"text": 5}', ["line 2", "text", "a number", "--field"]),
        ("a.jsonl", b'{"txt": "x"}', ["line 1", "missing among txt", "--field"]),
        ("a.jsonl", b'{"text": "a", "text": "b"}', ["line 1", "twice"]),
        ("a.jsonl", b"[1]", ["line 1", "a list"]),
        ("a.jsonl", b"[" * 100_000, ["line 1", "nested"]),
        ("a.jsonl", b'{"messages": [1]}', ["line 1", "messages"]),
        ("a.jsonl", b'{"text": "\xff"}', ["line 1", "UTF-8"]),
        ("a.jsonl", b"{", ["line 1", "JSON"]),
    ],
)
def test_bad_content_is_one_error_that_names_the_place(tmp_path: Path, name: str, content: bytes, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError) as caught:
        list(read_files([tmp_path / name]))
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_a_text_too_large_for_one_document_is_refused_before_it_is_read(tmp_path: Path):
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
    with pytest.raises(FileError, match="split it"):
        list(read_files([tmp_path / "huge.txt"]))


def test_a_folder_without_text_says_what_is_read(tmp_path: Path):
    with pytest.raises(NotFoundError, match="jsonl"):
        list(read_files([tmp_path]))


def test_parquet_without_its_library_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match="pip install pyarrow"):
        list(read_files([tmp_path / "data.parquet"]))


def test_parquet_gives_what_jsonl_gives(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"id": [7, 8], "text": ["one", "two"]}), tmp_path / "data.parquet")
    found = list(read_files([tmp_path / "data.parquet"]))
    assert found == [Document("data.parquet:1", "one"), Document("data.parquet:2", "two")]
    with pytest.raises(FileError, match="--field"):
        list(read_files([tmp_path / "data.parquet"], field="body"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + bytes(50))
    with pytest.raises(FileError, match=r"bad\.parquet"):
        list(read_files([tmp_path / "bad.parquet"]))


# --- what is held out ---------------------------------------------------------------------------


def test_what_is_held_out_follows_from_the_name_alone():
    names = [str(i) for i in range(2000)]
    held_out = [name for name in names if is_held_out(Document(name, ""), 0.1)]
    assert 150 < len(held_out) < 250
    assert held_out == [name for name in reversed(names) if is_held_out(Document(name, "x"), 0.1)][::-1]
    assert not any(is_held_out(Document(name, ""), 0) for name in names)
    assert all(is_held_out(Document(name, ""), 1) for name in names)


def test_a_larger_part_contains_the_smaller_one():
    names = [Document(str(i), "") for i in range(500)]
    assert {d.name for d in names if is_held_out(d, 0.05)} < {d.name for d in names if is_held_out(d, 0.1)}


def test_a_group_is_held_out_together():
    answers = {is_held_out(Document(str(i), "", group="help"), 0.07) for i in range(50)}
    assert len(answers) == 1


# --- the embedded corpus ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> list[Document]:
    return list(stdlib())


def test_the_embedded_corpus_is_documentation_and_sources_in_a_fixed_order(embedded: list[Document]):
    documents = {document.name: document.text for document in embedded}
    topics = [name for name in documents if name.startswith("topics/")]
    assert list(documents) == [*sorted(topics), *sorted(documents.keys() - topics)]
    assert documents["topics/for"].startswith('The "for" statement')
    assert "class Fraction" in documents["fractions.py"]
    assert 5e6 < sum(map(len, documents.values())) < 15e6
    assert not any(
        "/test/" in f"/{name}" or name.startswith(("encodings/", "idlelib/")) for name in documents
    )


def test_the_topics_contain_each_other_so_none_is_held_out(embedded: list[Document]):
    held_out = [document.name for document in embedded if is_held_out(document, 0.07)]
    assert 10 < len(held_out) < 60
    assert not any(name.startswith("topics/") for name in held_out)


def test_a_corpus_can_be_read_twice_and_names_its_source(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    corpus = corpus_of([tmp_path / "a.txt"])
    assert list(corpus.read()) == list(corpus.read()) == [Document("a.txt", "text")]
    assert (corpus.name, corpus.nbytes) == ("a.txt", 4)
    assert corpus_of(["stdlib"]).name.startswith("stdlib of cpython 3.")
