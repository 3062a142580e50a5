"""A vocabulary written as tokenizer.json: tokenizers and transformers read the same ids from it."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from openbook.text import Tokenizer, gguf, hf
from openbook.text.to_hf import special_ids, to_files
from openbook.text.vocabulary import Vocabulary

texts = st.one_of(
    st.lists(
        st.sampled_from(
            ["the dog's turn", " jumps", "  ", "1234", "你好", "👍", "\n\n", "é", "<think>", "</think>", "!?"]
        ),
        max_size=9,
    ).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)

KINDS = ("byte_level_metadata", "spm_metadata", "spm_without_prefix_metadata")


@pytest.fixture(scope="module", params=KINDS)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    template = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    return gguf.from_metadata({**request.getfixturevalue(request.param), **template})


@pytest.fixture(scope="module")
def folder(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    for name, content in to_files(vocabulary).items():
        (folder / name).write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps(special_ids(vocabulary)))
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(text=texts)
def test_ids_and_text_are_the_tokenizers_librarys(vocabulary, theirs, text):
    ours = Tokenizer(vocabulary)
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, special=True) == ids
    assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids, skip_special=False)


@given(text=texts)
def test_ids_are_ours_again_from_the_folder(vocabulary, folder, text):
    again = Tokenizer.from_file(folder)
    assert again.encode(text) == Tokenizer(vocabulary).encode(text)
    assert again.prompt(text) == Tokenizer(vocabulary).prompt(text)


def test_control_tokens_their_ids_and_the_template_are_carried(vocabulary, folder):
    again = hf.from_folder(folder)
    for field in (
        "tokens", "scheme", "control", "literal", "byte_tokens", "space_prefix",
        "bos_id", "eos_id", "eos_ids", "add_bos", "add_eos", "chat_template",
    ):  # fmt: skip
        assert getattr(again, field) == getattr(vocabulary, field), field


def test_transformers_loads_it_and_begins_a_text_and_a_chat_as_we_do(vocabulary, folder):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded("the dog").input_ids == Tokenizer(vocabulary).prompt("the dog")
    messages = [{"role": "user", "content": "the fox"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "the fox"


def test_first_and_last_token_frame_a_text_and_each_of_a_pair(spm_metadata):
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    vocabulary = gguf.from_metadata({**spm_metadata, **both})
    document = to_files(vocabulary)["tokenizer.json"]
    theirs = tokenizers.Tokenizer.from_str(json.dumps(document))
    assert theirs.encode("the dog").tokens[0] == "<s>"
    assert theirs.encode("the dog").tokens[-1] == "</s>"
    assert theirs.encode("the dog", "a fox").tokens.count("<s>") == 2


@pytest.mark.parametrize(("ends", "named"), [((), None), ((0,), 0), ((7, 2), [7, 2])])
def test_a_config_names_what_ends_an_answer_the_texts_own_end_first(spm_metadata, ends, named):
    first = {"eos_ids": frozenset(ends), "eos_id": next(iter(ends), None)}
    vocabulary = Vocabulary(**{**vars(gguf.from_metadata(spm_metadata)), **first})
    assert special_ids(vocabulary)["eos_token_id"] == named
