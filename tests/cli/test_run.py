"""The verbs that run a model: generate, chat."""

import json
from pathlib import Path

import pytest

from openbook.lm import LanguageModel
from openbook.model import Decoder, init_weights
from openbook.spec.model import Attention, Block, Head, Mlp, ModelSpec, Norm, Rope
from openbook.weights.save_gguf import save_gguf

pytestmark = pytest.mark.model


@pytest.fixture
def model(smollm2: Path) -> str:
    return str(smollm2)


# --- generate -----------------------------------------------------------------------------------


def test_an_answer_goes_to_stdout_and_its_statistics_to_stderr(openbook, model: str):
    done = openbook("generate", model, "-p", "The capital of France is", "-n", "1", "--temp", "0")
    assert (done.code, done.out) == (0, " Paris\n")
    assert done.err.startswith("prompt 5 tokens, ")
    assert done.err.endswith("cut at -n\n")


def test_quiet_leaves_only_the_answer(openbook, model: str):
    done = openbook(
        "generate", model, "-p", "-", "-n", "1", "--temp", "0", "-q", stdin="The capital of France is"
    )
    assert done == (0, " Paris\n", "")


def test_a_seed_repeats_an_answer(openbook, model: str):
    def answer(seed: str) -> str:
        options = ("-n", "12", "--temp", "1.5", "--seed", seed, "--json")
        return json.loads(openbook("generate", model, "-p", "Once", *options).out)["text"]

    assert answer("1") == answer("1") != answer("2")


def test_a_stop_string_is_not_printed(openbook, model: str):
    done = openbook("generate", model, "-p", "The capital of France is", "--temp", "0", "--stop", "ris")
    assert done.out == " Pa\n"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("-p", ""), "prompt"),
        (("-p", "x", "--temp", "-1"), "temperature"),
        (("-p", "x", "-c", "99999"), "context"),
        (("-p", "x " * 50, "-c", "20"), "prompt"),
        (("-p", "x", "--stop", ""), "stop"),
    ],
)
def test_a_request_that_makes_no_sense_is_wrong_usage(openbook, model: str, options, names: str):
    done = openbook("generate", model, *options)
    assert (done.code, done.out) == (2, "")
    assert names in done.err
    assert done.err.count("\n") == 1


def test_too_little_memory_is_told_before_anything_is_allocated(openbook, model: str, monkeypatch):
    monkeypatch.setattr("openbook.weights.fit.available_bytes", lambda device="cpu": 1_000_000)
    done = openbook("generate", model, "-p", "x", "--dtype", "fp32")
    assert (done.code, done.out) == (4, "")
    assert "--force" in done.err
    assert openbook("generate", model, "-p", "x", "--dtype", "fp32", "-n", "1", "--force").code == 0


# --- chat ---------------------------------------------------------------------------------------

FRANCE = "What is the capital of France?"


def test_a_piped_conversation_remembers_and_reuses_the_cache(openbook, model: str, tmp_path: Path):
    saved = tmp_path / "talk.json"
    lines = [FRANCE, "And of Italy?", f"/save {saved}", "/exit", "never read"]
    done = openbook("chat", model, "--temp", "0", "-n", "20", stdin="\n".join(lines))
    assert done.code == 0
    assert done.out == "The capital of France is Paris.\nThe capital of Italy is Rome.\n"
    assert "from the cache" in done.err
    roles = [message["role"] for message in json.loads(saved.read_text())["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"]


def test_one_question_is_answered_and_done(openbook, model: str):
    done = openbook("chat", model, "-p", FRANCE, "--temp", "0", "-q")
    assert done == (0, "The capital of France is Paris.\n", "")


def test_a_mistake_does_not_end_the_conversation(openbook, model: str):
    lines = [
        "/dance",
        "/set temp hot",
        "/set colour red",
        "/save",
        "/set temp -3",
        FRANCE,
        "/set temp 0",
        FRANCE,
    ]
    done = openbook("chat", model, stdin="\n".join(lines))
    assert done.code == 0
    assert done.out == "The capital of France is Paris.\n"
    assert done.err.count("error: ") == 5


def test_clear_forgets_and_the_system_message_can_be_set(openbook, model: str, monkeypatch):
    asked = []

    def chat(self, messages, **sampling):
        asked.append([(m["role"], m["content"]) for m in messages])
        return iter(["yes"])

    monkeypatch.setattr(LanguageModel, "chat", chat)
    openbook("chat", model, "--system", "Be kind.", stdin="one\n/clear\n/set system\ntwo\\\nthree\n")
    assert asked == [[("system", "Be kind."), ("user", "one")], [("user", "two\nthree")]]


def test_ctrl_c_stops_the_answer_but_not_the_program(openbook, model: str, monkeypatch):
    asked = []

    def chat(self, messages, **sampling):
        asked.append([m["content"] for m in messages])
        yield "half an "
        if len(asked) == 1:
            raise KeyboardInterrupt
        yield "answer"

    monkeypatch.setattr(LanguageModel, "chat", chat)
    done = openbook("chat", model, stdin="one\ntwo\n")
    assert done.code == 0
    assert done.out == "half an \nhalf an answer\n"
    assert asked[1] == ["one", "half an ", "two"]


def test_ctrl_c_ends_generate_with_130(openbook, model: str, monkeypatch):
    def generate(self, prompt, **sampling):
        yield "half"
        raise KeyboardInterrupt

    monkeypatch.setattr(LanguageModel, "generate", generate)
    done = openbook("generate", model, "-p", "x")
    assert (done.code, done.out) == (130, "half")


def test_a_model_without_a_chat_template_is_refused_at_once(openbook, tmp_path: Path):
    attn, mlp = Attention(2, 1, 4, scale=0.5, rope=Rope(4)), Mlp(24, "silu", gated=True)
    layer = Block(attn, mlp, attn_norm=Norm("rms"), mlp_norm=Norm("rms"))
    spec = ModelSpec(40, 16, 32, (layer,), Head(tied=True), final_norm=Norm("rms"))
    file = tmp_path / "base.gguf"
    save_gguf(init_weights(Decoder(spec)), file, "F32")
    done = openbook("chat", str(file), stdin="Hi\nHo\n")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "came without a chat template, as base models do" in done.err
    assert f"openbook generate {file}" in done.err
