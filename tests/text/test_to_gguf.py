"""A vocabulary written as `tokenizer.ggml.*` gives the same ids again: to us, and to llama.cpp."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers

import llama_server
from gguf_models import noisy, tiny
from openbook.text import Tokenizer, UnsupportedTokenizerError, gguf, hf
from openbook.text.pretokenizers import PRE_TOKENIZERS
from openbook.text.to_gguf import SAMPLE, pre_name, to_metadata
from openbook.text.vocabulary import Vocabulary
from openbook.weights.save_gguf import save_gguf

TEXTS = [
    "Hello, world!", "  two leading spaces, a\ttab and trailing   ", "it's they'll WE'RE 'tis rock'n'roll",
    "1234567 12,345.678 ½ ² Ⅷ ٣٤٥", "def f(x):\n    return {'a': [1, 2]}\n\n\n# done\r\n", "你好，世界。",
    "👍😀👨‍👩‍👧🇩🇪 e\u0301 Ω ﬁ", "the <think> dog</think>", "a" * 90 + " " * 90 + "!" * 90,
]  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from([*TEXTS, *"aZé你 \n\t'1²,<|>", "  ", "'s", "</think>"]), max_size=9).map(
        "".join
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)


def again(vocabulary: Vocabulary) -> Vocabulary:
    return gguf.from_metadata(to_metadata(vocabulary, len(vocabulary.tokens)))


@pytest.fixture(scope="module")
def byte_level_vocabulary(byte_level_folder: Path) -> Vocabulary:
    return hf.from_folder(byte_level_folder)


@pytest.fixture(scope="module")
def llama_style_vocabulary(llama_style_folder: Path) -> Vocabulary:
    return hf.from_folder(llama_style_folder)


# --- ids ----------------------------------------------------------------------------------------


@given(text=texts)
def test_byte_level_ids_are_those_of_the_folder(byte_level_vocabulary, text):
    before, after = Tokenizer(byte_level_vocabulary), Tokenizer(again(byte_level_vocabulary))
    assert after.encode(text) == before.encode(text)
    assert after.decode(before.encode(text)) == before.decode(before.encode(text))


@given(text=texts.filter(lambda text: not text.startswith((" ", "▁"))))
def test_sentencepiece_ids_come_back_from_scores_that_only_say_the_order_of_the_merges(
    llama_style_vocabulary, text
):
    before, after = Tokenizer(llama_style_vocabulary), Tokenizer(again(llama_style_vocabulary))
    assert after.encode(text) == before.encode(text)


@given(text=texts)
def test_a_file_written_from_a_file_gives_the_same_ids(spm_metadata, spm_without_prefix_metadata, text):
    for metadata in (spm_metadata, spm_without_prefix_metadata):
        vocabulary = gguf.from_metadata(metadata)
        assert Tokenizer(again(vocabulary)).encode(text) == Tokenizer(vocabulary).encode(text)


@pytest.mark.skipif(llama_server.MISSING, reason="llama.cpp is not here: pip install xllamacpp")
@pytest.mark.parametrize("kind", ["byte_level", "llama_style", "spm_without_prefix"])
def test_llama_cpp_gives_the_same_ids(kind, request, tmp_path):
    if kind == "spm_without_prefix":
        vocabulary = gguf.from_metadata(request.getfixturevalue("spm_without_prefix_metadata"))
    else:
        vocabulary = request.getfixturevalue(f"{kind}_vocabulary")
    n_tokens = len(vocabulary.tokens)
    save_gguf(
        noisy(tiny("llama").replace(vocab_size=n_tokens)), tmp_path / "tiny.gguf", "F32",
        to_metadata(vocabulary, n_tokens),
    )  # fmt: skip
    ours = Tokenizer(again(vocabulary))
    assert llama_server.tokenize(tmp_path / "tiny.gguf", TEXTS) == [ours.encode(text) for text in TEXTS]
    framed = llama_server.tokenize(tmp_path / "tiny.gguf", TEXTS[:2], framed=True)
    assert framed == [ours.prompt(text) for text in TEXTS[:2]]


# --- what cuts the text -------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(PRE_TOKENIZERS) - {"default"}))
def test_a_way_to_cut_text_is_found_by_what_it_does(byte_level_metadata, name):
    vocabulary = gguf.from_metadata({**byte_level_metadata, "tokenizer.ggml.pre": name})
    rules, found = (
        PRE_TOKENIZERS[name],
        PRE_TOKENIZERS[pre_name(vocabulary, PRE_TOKENIZERS[name].ignore_merges)],
    )
    assert found.ignore_merges == rules.ignore_merges
    assert found.patterns == rules.patterns or name == "bailingmoe"  # whose pattern says Qwen2's otherwise


def test_the_sample_tells_every_way_to_cut_text_from_every_other():
    cuts = {
        rules.patterns: rules.build().pre_tokenize_str(SAMPLE)
        for name, rules in PRE_TOKENIZERS.items()
        if name != "bailingmoe"
    }
    assert len(cuts) > 15
    for one, other in combinations(cuts.values(), 2):
        assert one != other


def test_a_way_that_llama_cpp_has_not_is_refused(byte_level_vocabulary):
    backend = tokenizers.Tokenizer.from_str(byte_level_vocabulary.backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[aeiou]"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    with pytest.raises(UnsupportedTokenizerError, match=r"none of llama\.cpp's"):
        to_metadata(replaced(byte_level_vocabulary, backend), 2000)


def test_a_normalizer_that_llama_cpp_has_not_is_refused(byte_level_vocabulary):
    backend = tokenizers.Tokenizer.from_str(byte_level_vocabulary.backend.to_str())
    backend.normalizer = normalizers.Lowercase()
    with pytest.raises(UnsupportedTokenizerError, match="Lowercase"):
        to_metadata(replaced(byte_level_vocabulary, backend), 2000)


def replaced(vocabulary: Vocabulary, backend: tokenizers.Tokenizer) -> Vocabulary:
    return Vocabulary(**{**vars(vocabulary), "backend": backend})


# --- tokens of their own ------------------------------------------------------------------------


def test_special_tokens_their_kinds_and_the_chat_template_are_carried(byte_level_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    config = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "chat_template": "{{ x }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    before = hf.from_folder(tmp_path)
    ends = {before.tokens.index(token) for token in ("<|im_end|>", "</s>")}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))
    before = hf.from_folder(tmp_path)
    after = again(before)
    for field in ("tokens", "control", "literal", "bos_id", "eos_id", "add_bos", "add_eos", "chat_template"):
        assert getattr(after, field) == getattr(before, field), field
    assert after.eos_ids >= before.eos_ids == ends


def test_byte_tokens_and_the_unknown_one_are_marked_as_in_sentencepieces_own_files(
    spm_metadata, llama_style_vocabulary
):
    written = to_metadata(llama_style_vocabulary, len(llama_style_vocabulary.tokens))
    tokens = spm_metadata["tokenizer.ggml.tokens"]
    assert written["tokenizer.ggml.tokens"][: len(tokens)] == tokens
    assert written["tokenizer.ggml.token_type"][: len(tokens)] == spm_metadata["tokenizer.ggml.token_type"]
    assert written["tokenizer.ggml.unknown_token_id"] == spm_metadata["tokenizer.ggml.unknown_token_id"]


def test_rows_without_a_token_get_a_name_and_are_never_used(byte_level_vocabulary):
    n_tokens = len(byte_level_vocabulary.tokens)
    metadata = to_metadata(byte_level_vocabulary, n_tokens + 3)
    assert metadata["tokenizer.ggml.tokens"][n_tokens:] == [f"[PAD{n_tokens + i}]" for i in range(3)]
    assert metadata["tokenizer.ggml.token_type"][n_tokens:] == [gguf.TokenType.UNUSED] * 3
    assert Tokenizer(gguf.from_metadata(metadata)).encode(f"[PAD{n_tokens}]") == Tokenizer(
        byte_level_vocabulary
    ).encode(f"[PAD{n_tokens}]")


def test_more_tokens_than_the_model_has_rows_are_refused(byte_level_vocabulary):
    n_tokens = len(byte_level_vocabulary.tokens)
    with pytest.raises(UnsupportedTokenizerError, match=f"only {n_tokens - 1:,} rows"):
        to_metadata(byte_level_vocabulary, n_tokens - 1)


def test_merges_given_as_pairs_are_joined():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    backend.pre_tokenizer = PRE_TOKENIZERS["gpt-2"].build()
    vocabulary = Vocabulary(backend, ["a", "b", "ab"], "byte-level", frozenset(), frozenset())
    assert to_metadata(vocabulary, 3)["tokenizer.ggml.merges"] == ["a b"]
