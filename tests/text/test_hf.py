"""A tokenizer.json that would mislead or break its reader is refused in one line."""

import json

import pytest

from openbook.text import Tokenizer, TokenizerError


@pytest.fixture
def folder(byte_level_folder, tmp_path):
    for file in byte_level_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder, edit, name="tokenizer.json"):
    document = json.loads((folder / name).read_text())
    edit(document)
    (folder / name).write_text(json.dumps(document))


def refused(folder, *words):
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_file(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_the_file_itself_may_be_named(folder):
    assert Tokenizer.from_file(folder / "tokenizer.json").vocab_size == Tokenizer.from_file(folder).vocab_size


def test_a_folder_without_tokenizer_json(tmp_path):
    refused(tmp_path, "tokenizer.json", "not there")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '"text"', "\ufffd{}", '{"a": 1, "a": 2}'])
def test_a_file_that_is_no_json_object(folder, text):
    (folder / "tokenizer.json").write_text(text)
    refused(folder)


def test_a_file_that_is_not_utf8(folder):
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    refused(folder, "UTF-8")


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda d: d.pop("model"), "model"),
        (lambda d: d["model"].update(type="WordPiece"), "'WordPiece'"),
        (lambda d: d["model"].update(vocab=[]), "vocab"),
        (lambda d: d["model"]["vocab"].update(new="1"), "vocab"),
        (lambda d: d["model"]["vocab"].update(new=True), "vocab"),
        (lambda d: d["model"]["vocab"].update(new=-1), "ids run from -1"),
        (lambda d: d["model"]["vocab"].update(new=10**12), "1000000000000"),
        (lambda d: d["model"]["vocab"].update(new=20), "share an id"),
        (lambda d: d["model"].update(merges=None), "merges"),
        (lambda d: d["model"].update(merges=[["a"]]), "merges[0]"),
        (lambda d: d["model"].update(merges=["a b c"]), "merges[0]"),
        (lambda d: d["model"].update(merges=[["zz", "qq"]]), "'zz'"),
        (lambda d: d["model"].update(continuing_subword_prefix="x" * 1000), "continuing_subword_prefix"),
        (lambda d: d["added_tokens"].append({"content": "x"}), "added token"),
        (lambda d: d["added_tokens"].append({"content": "<s>", "id": 9}), "'<s>' has two ids"),
        (lambda d: d["added_tokens"].append({"content": "<n>", "id": 999, "special": 1}), "'<n>'"),
        (lambda d: d.update(decoder=None), "null"),
        (lambda d: d.update(decoder={"type": "WordPiece"}), "WordPiece"),
        (lambda d: d.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}}), "refused"),
    ],
)
def test_a_vocabulary_that_is_none(folder, edit, word):
    change(folder, edit)
    refused(folder, word)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("tokenizer_config.json", '{"bos_token": "<none>"}', "'<none>'"),
        ("tokenizer_config.json", '{"eos_token": 2}', "eos_token"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template"),
        ("tokenizer_config.json", "[]", "object"),
        ("generation_config.json", '{"eos_token_id": [2, 100000]}', "100000"),
        ("generation_config.json", '{"eos_token_id": "2"}', "'2'"),
    ],
)
def test_a_small_file_that_is_wrong(folder, name, text, word):
    (folder / name).write_text(text)
    refused(folder, name, word)


def test_the_chat_template_is_a_file_or_the_default_of_several(folder):
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    change(folder, lambda d: d.update(chat_template=several), "tokenizer_config.json")
    assert Tokenizer.from_file(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("F")
    assert Tokenizer.from_file(folder).chat_template == "F"


def test_config_decides_on_bos_before_the_post_processor(llama_style_folder, tmp_path):
    for file in llama_style_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert Tokenizer.from_file(tmp_path).add_bos
    change(tmp_path, lambda d: d.update(add_bos_token=False), "tokenizer_config.json")
    assert not Tokenizer.from_file(tmp_path).add_bos


def test_no_code_of_the_folder_is_run(folder):
    (folder / "tokenization_custom.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoTokenizer": ["tokenization_custom.Custom", None]}
    change(folder, lambda d: d.update(auto_map=auto_map), "tokenizer_config.json")
    assert Tokenizer.from_file(folder).encode("the")
