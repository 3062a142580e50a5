"""A tiny model in a Hugging Face folder, with a byte-level tokenizer and a chat template."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

import openbook
from openbook.infer.generate import Token
from openbook.infer.sample import RequestError, SamplingParams
from openbook.lm import LanguageModel, Sampling, load
from openbook.model import Decoder, init_weights
from openbook.sources import resolve
from openbook.spec.model import Attention, Block, Head, Mlp, ModelSpec, Norm, Rope
from openbook.text import Tokenizer
from openbook.weights.fit import WontFitError
from openbook.weights.save import save_hf

CONTROL = ["<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
START, END = 256, 257


def tiny_spec() -> ModelSpec:
    rms = Norm("rms")
    attn = Attention(8, 2, 6, scale=6**-0.5, rope=Rope(6))
    block = Block(attn, Mlp(56, "silu", gated=True), attn_norm=rms, mlp_norm=rms)
    # More rows than the tokenizer has tokens, as in Qwen.
    return ModelSpec(272, 40, 128, (block,) * 2, Head(tied=False), final_norm=rms)


def tokenizer_json() -> str:
    """256 byte tokens, id = byte, and two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = sorted(alphabet, key=lambda char: _byte_of()[char])
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(by_byte)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    return tokenizer.to_str()


def _byte_of() -> dict[str, int]:
    """GPT-2's table: printable bytes are themselves, the others follow from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = tmp_path_factory.mktemp("tokenizer")
    (files / "tokenizer.json").write_text(tokenizer_json())
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (files / "tokenizer_config.json").write_text(json.dumps(config))
    decoder = init_weights(Decoder(tiny_spec()), std=0.3)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_hf(decoder, folder, extra_files=sorted(files.iterdir()))
    return folder


@pytest.fixture
def lm(folder: Path) -> LanguageModel:
    return load(folder, native=False)


def say(lm: LanguageModel, text: str | list[int]) -> None:
    """Rigs the model to answer any prompt of one token with these bytes (or ids), and then to end."""
    script = list(text.encode() if isinstance(text, str) else text)

    def forward(ids, positions=None, cache=None, last_only=False):
        positions = torch.arange(cache.length, cache.length + ids.shape[1])[None]
        cache.extend(positions, padded=False)
        for layer in cache.layers:
            layer.append(*torch.zeros(2, 1, 2, ids.shape[1], 6))
        nth = cache.length - 1
        wanted = script[nth] if nth < len(script) else END
        logits = torch.zeros(1, 1, lm.spec.vocab_size)
        logits[..., wanted] = 100.0
        return logits

    forward.spec, forward.embed = lm.spec, lm.decoder.embed
    lm.engine = forward  # type: ignore[assignment]


# --- text ---


def test_the_pieces_are_the_text_of_the_ids(lm):
    prompt = "Ein Weißbier, 世界"
    ids = [t.id for t in lm.tokens(prompt, max_tokens=40, temperature=0, stop_ids=())]
    assert lm.complete(prompt, max_tokens=40, temperature=0) == lm.tokenizer.decode(ids, start=False)
    assert lm.complete(list(prompt.encode()), max_tokens=40, temperature=0) == lm.tokenizer.decode(
        ids, start=False
    )


def test_a_piece_is_never_half_a_character(lm):
    say(lm, "a👍é")
    assert list(lm.generate([1], max_tokens=20)) == ["a", "👍", "é"]
    assert lm.stats.finish == "stop"
    assert list(lm.generate([1], max_tokens=3)) == ["a", "\N{REPLACEMENT CHARACTER}"]
    assert lm.stats.finish == "length"


def test_a_stop_string_ends_the_answer_and_no_part_of_it_is_shown(lm):
    say(lm, "ABCDEFGHIJ")
    assert list(lm.generate([1], max_tokens=20, stop="DEFG")) == ["A", "B", "C"]
    assert lm.stats.finish == "stop"
    assert lm.stats.new_tokens == 7  # and not one more is computed
    assert lm.complete([1], max_tokens=20, stop=["HI", "CD", "ZZ"]) == "AB"


@pytest.mark.parametrize(("max_tokens", "finish"), [(20, "stop"), (6, "length")])
def test_what_was_held_back_is_delivered_at_the_end(lm, max_tokens, finish):
    say(lm, "ABCDEF")
    assert lm.complete([1], max_tokens=max_tokens, stop="DEFGHIJ") == "ABCDEF"
    assert lm.stats.finish == finish


def test_the_token_that_ends_the_answer_is_no_text(lm):
    say(lm, [65, END, 66])
    assert lm.complete([1], max_tokens=20) == "A"
    assert [t.id for t in lm.tokens([1], max_tokens=20)] == [65, END]
    assert [t.id for t in lm.tokens([1], max_tokens=3, stop_ids=())] == [65, END, 66]


def test_a_row_without_a_token_is_never_chosen(lm):
    say(lm, [65, 270, 271])
    assert all(token.id <= END for token in lm.tokens([1], max_tokens=10, temperature=0))


def test_a_control_token_in_a_prompt_is_text(lm):
    assert list(lm.tokenizer.prompt("<|end|>")) == list(b"<|end|>")


# --- chat ---


def test_a_chat_is_asked_through_the_models_template(lm):
    messages = [{"role": "user", "content": "Hi <|end|>"}]
    ids = [START, *b"user\nHi <|end|>", END, *b"\n", START, *b"assistant\n"]
    assert lm.chat_ids(messages) == ids
    assert "".join(lm.chat(messages, max_tokens=10, temperature=0)) == lm.complete(
        ids, max_tokens=10, temperature=0
    )


def test_the_next_turn_computes_only_what_is_new(lm):
    messages = [{"role": "user", "content": "Hi"}]
    first = lm.chat_ids(messages)
    answer = "".join(lm.chat(messages, max_tokens=4, temperature=0))
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "More"}]
    second = "".join(lm.chat(messages, max_tokens=8, temperature=0))
    assert lm.stats.cached_tokens >= len(first)
    lm._kept = None
    assert "".join(lm.chat(messages, max_tokens=8, temperature=0)) == second
    assert lm.stats.cached_tokens == 0


# --- one model, several answers ---


def test_two_answers_read_by_turns_do_not_disturb_each_other(lm):
    alone = [lm.complete(prompt, max_tokens=12, temperature=0) for prompt in ("abc", "xyz")]
    first = lm.generate("abc", max_tokens=12, temperature=0)
    second = lm.generate("xyz", max_tokens=12, temperature=0)
    pieces: tuple[list[str], list[str]] = ([], [])
    for a, b in zip(first, second, strict=False):
        pieces[0].append(a)
        pieces[1].append(b)
    assert alone[0].startswith("".join(pieces[0]))
    assert alone[1].startswith("".join(pieces[1]))
    assert len(pieces[0]) > 3
    del first, second
    assert lm.complete("abc", max_tokens=12, temperature=0) == alone[0]


def test_an_abandoned_answer_leaves_nothing_behind(lm):
    expected = lm.complete("a longer prompt", max_tokens=12, temperature=0)
    for _ in lm.generate("abc", max_tokens=12, temperature=0):
        break
    assert lm.complete("a longer prompt", max_tokens=12, temperature=0) == expected
    next(lm.tokens("abc"))
    assert lm.complete("a longer prompt", max_tokens=12, temperature=0) == expected


def test_a_seed_repeats_whatever_was_asked_between(lm):
    def answer() -> list[Token]:
        return list(lm.tokens("abc", max_tokens=12, seed=5, logprobs=1))

    first = answer()
    lm.complete("abd", max_tokens=5)
    assert [t.id for t in answer()] == [t.id for t in first]
    one, two = ([t.id for t in lm.tokens("abc", max_tokens=12, stop_ids=())] for _ in range(2))
    assert one != two


def test_the_native_engine_answers_the_same(folder, lm):
    native = load(folder)
    assert native.complete("abc", max_tokens=40, temperature=0) == lm.complete(
        "abc", max_tokens=40, temperature=0
    )


# --- bad requests ---


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("max_tokens", {"max_tokens": 0}), ("temperature", {"temperature": -1}), ("top_p", {"top_p": 2}),
        ("stop", {"stop": ""}), ("stop", {"stop": ["a", ""]}), ("logit_bias", {"logit_bias": {258: 1}}),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_at_once_and_the_model_goes_on(lm, param, options):
    expected = lm.complete("abc", max_tokens=5, temperature=0)
    with pytest.raises(RequestError) as error:
        lm.generate("abc", **options)
    assert error.value.param == param
    assert lm.complete("abc", max_tokens=5, temperature=0) == expected


def test_an_empty_prompt_and_one_beyond_the_context_are_refused(lm):
    for prompt in ("", "x" * 128, [300], [-1]):
        with pytest.raises(RequestError, match="prompt"):
            lm.generate(prompt)
    assert len(list(lm.tokens("x" * 127, stop_ids=()))) == 1


def test_a_misspelt_option_is_an_error(lm):
    with pytest.raises(TypeError, match="temprature"):
        lm.generate("abc", temprature=1)


def test_the_keyword_arguments_are_the_fields_of_the_sampling_parameters():
    assert list(Sampling.__annotations__) == [field.name for field in fields(SamplingParams)]


# --- loading ---


def test_openbook_load_gives_a_language_model(folder):
    lm = openbook.load(folder, dtype="bf16", context=64)
    assert lm.decoder.embed.weight.dtype == torch.bfloat16
    assert lm.spec == tiny_spec()
    assert lm.source == resolve(folder)
    assert lm.context == 64
    assert len(list(lm.tokens("abc", max_tokens=4, stop_ids=()))) == 4


@pytest.mark.parametrize("context", [0, -1, 129])
def test_a_context_beyond_the_models_is_refused(folder, context):
    with pytest.raises(RequestError, match="context: must be from 1 to the model's 128"):
        load(folder, context=context)


def test_a_model_without_a_tokenizer_generates_ids(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    lm = load(tmp_path)
    assert lm.tokenizer is None
    assert Tokenizer.from_source(resolve(tmp_path)) is None
    assert len(list(lm.tokens([1, 2, 3], max_tokens=7))) == 7
    with pytest.raises(RequestError, match="without a tokenizer"):
        lm.generate([1, 2, 3])
    with pytest.raises(RequestError, match="without a tokenizer"):
        lm.tokens("abc")
    with pytest.raises(RequestError, match="without a chat template"):
        lm.chat([{"role": "user", "content": "Hi"}])


def test_a_cache_that_would_not_fit_is_refused_before_it_is_made(folder, monkeypatch):
    monkeypatch.setattr("openbook.weights.fit.available_bytes", lambda device: 20_000)  # weights are mapped
    with pytest.raises(WontFitError, match="KV cache for 128 tokens"):
        load(folder, dtype="fp32")
    assert load(folder, force=True).context == 128


@pytest.mark.model
def test_smollm2_knows_the_capital_of_france(smollm2):
    lm = load(smollm2)
    assert lm.complete("The capital of France is", max_tokens=3, temperature=0).startswith(" Paris")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "".join(lm.chat(question, max_tokens=24, temperature=0)) == "The capital of France is Paris."
    assert lm.stats.finish == "stop"


# --- traces -------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_trace_has_the_tokens_of_the_text_and_the_decoders_logits(lm: LanguageModel):
    trace = lm.trace("Héy")
    assert trace.ids.tolist() == [[72, 195, 169, 121]]
    assert trace.pieces == (("H", "\\xc3", "\\xa9", "y"),)
    assert torch.equal(trace.tensor("head"), lm.decoder(trace.ids))
    assert lm.trace([72, 195, 169, 121]).ids.equal(trace.ids)


def test_messages_are_traced_as_chat_writes_them(lm: LanguageModel):
    messages = [{"role": "user", "content": "<|end|>"}]
    trace = lm.trace(messages, only="head")
    assert trace.ids.tolist() == [lm.chat_ids(messages)]
    assert list(trace.tensors) == ["head"]


def test_a_traced_run_can_be_edited(lm: LanguageModel):
    plain = lm.trace("abc")
    edited = lm.trace("abc", patch={"blocks.1.hook_mlp_out": torch.zeros_like}, ablate=[(0, 5)], time=True)
    assert edited.edited == {"layers.1.mlp.down", "layers.0.attn.mix"}
    assert torch.equal(edited.tensor("layers.1.mlp_add"), edited.tensor("layers.1.attn_add"))
    assert not torch.equal(edited.tensor("head"), plain.tensor("head"))
    assert edited.step("layers.1.mlp.up").seconds is not None


@torch.no_grad()
def test_nothing_of_a_model_is_changed_by_tracing_it(folder: Path):
    for native in (False, True):
        lm = load(folder, native=native)
        modules = [type(module) for module in lm.decoder.modules()]
        before = lm.complete("Once", max_tokens=12, temperature=0)
        long = "Once upon a time there was a model, and nobody knew what it did."  # C takes over at 16 tokens
        logits = lm.decoder(torch.tensor([lm.prompt_ids(long)]))
        assert torch.equal(lm.trace(long).tensor("head"), logits)
        lm.trace("Once upon", patch={"layers.0.attn.scores": lambda x: 2 * x})
        assert lm.complete("Once", max_tokens=12, temperature=0) == before
        assert [type(module) for module in lm.decoder.modules()] == modules
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in lm.decoder.modules())


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "must be 1 to 128 tokens, found 0"),
        ([], "must be 1 to 128 tokens, found 0"),
        ("a" * 129, "must be 1 to 128 tokens, found 129"),
        ([1, 272], "272 is no token id: 0 to 271"),
        ([-1], "-1 is no token id"),
        ([True], "True is no token id"),
        ([2**70], f"{2**70} is no token id"),
    ],
)
def test_what_cannot_be_traced_is_an_error_that_says_why(lm: LanguageModel, prompt, says: str):
    with pytest.raises(RequestError, match=says):
        lm.trace(prompt)


def test_a_trace_that_does_not_fit_is_refused_before_it_is_made(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
):
    needed = lm.trace_bytes(3)
    assert needed == lm.trace("abc").bytes - 9  # who sees whom, of nine pairs
    monkeypatch.setattr("openbook.weights.fit.available_bytes", lambda device: needed - 1)
    with pytest.raises(WontFitError, match="a trace of 3 tokens needs"):
        lm.trace("abc")
    assert len(lm.trace("abc", only="head")) == 1
    assert len(lm.trace("abc", force=True)) > 1
