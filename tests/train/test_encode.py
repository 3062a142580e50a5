import numpy as np
import pytest

from openbook.files import read_gguf
from openbook.text import ChatError, ChatTemplate, Tokenizer
from openbook.train import encode as module
from openbook.train.corpus import Chat, Document
from openbook.train.encode import Encoded, encode


def learned_text(encoded: Encoded, tokenizer: Tokenizer) -> list[str]:
    """What is learned, run by run."""
    assert encoded.learned is not None
    runs: list[list[int]] = []
    for i, token_id in enumerate(encoded.ids):
        if encoded.learned[i]:
            if i and encoded.learned[i - 1]:
                runs[-1].append(token_id)
            else:
                runs.append([token_id])
    return [tokenizer.decode(run, skip_special=False) for run in runs]


def chat(*turns: str, first: str = "user") -> Chat:
    """Turns of user and assistant in alternation."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return Chat("c", [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)])


# --- texts --------------------------------------------------------------------------------------


def test_a_text_begins_as_a_prompt_does_and_ends_with_the_end(tokenizer: Tokenizer):
    (encoded,) = encode(Document("a", "def f"), tokenizer, None)
    assert encoded.ids == [*tokenizer.prompt("def f"), tokenizer.eos_id]
    assert encoded.learned is None


def test_a_tokenizer_without_a_begin_gives_none(chat_tokenizer: Tokenizer):
    (encoded,) = encode(Document("a", "def f"), chat_tokenizer, None)
    assert encoded.ids == [*chat_tokenizer.encode("def f"), chat_tokenizer.eos_id]


def test_a_long_text_is_cut_at_ends_of_lines_and_nothing_is_lost():
    text = "".join(f"line {i}\n" for i in range(50)) + "x" * 100
    pieces = list(module._pieces(text, longest=40))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 40
    assert all(piece.endswith("\n") for piece in pieces[:8])


# --- chats --------------------------------------------------------------------------------------


def test_only_what_the_assistant_says_is_learned_and_where_it_stops(chat_tokenizer: Tokenizer):
    template = ChatTemplate(chat_tokenizer.chat_template or "")
    (encoded,) = encode(chat("Hi", "Ho", "And?", "No more."), chat_tokenizer, template)
    assert encoded.ids == template.render(
        chat("Hi", "Ho", "And?", "No more.").messages, chat_tokenizer, add_generation_prompt=False
    )
    assert learned_text(encoded, chat_tokenizer) == ["Ho<|im_end|>", "No more.<|im_end|>"]


def test_a_question_without_an_answer_teaches_nothing(chat_tokenizer: Tokenizer):
    template = ChatTemplate(chat_tokenizer.chat_template or "")
    assert list(encode(chat("Hi"), chat_tokenizer, template)) == []
    (encoded,) = encode(chat("Hi", "Ho", "And?"), chat_tokenizer, template)
    assert learned_text(encoded, chat_tokenizer) == ["Ho<|im_end|>"]


def test_a_greeting_that_answers_nothing_is_context(chat_tokenizer: Tokenizer):
    template = ChatTemplate(chat_tokenizer.chat_template or "")
    (encoded,) = encode(chat("Welcome", "Hi", "Ho", first="assistant"), chat_tokenizer, template)
    assert learned_text(encoded, chat_tokenizer) == ["Ho<|im_end|>"]


def test_a_control_token_that_a_message_spells_out_is_text(chat_tokenizer: Tokenizer):
    template = ChatTemplate(chat_tokenizer.chat_template or "")
    (encoded,) = encode(chat("Hi", "a<|im_end|>b"), chat_tokenizer, template)
    assert learned_text(encoded, chat_tokenizer) == ["a<|im_end|>b<|im_end|>"]
    assert encoded.ids.count(chat_tokenizer.id_of("<|im_end|>")) == 2


FORGETFUL = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content if loop.last else message.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_turn_that_later_renderings_change_is_learned_in_its_own(chat_tokenizer: Tokenizer):
    """A template that drops old reasoning: each answer must be learned after what the model will see."""
    turns = ("Hi", "<think>a</think>Ho", "And?", "<think>b</think>No")
    both = list(encode(chat(*turns), chat_tokenizer, ChatTemplate(FORGETFUL)))
    assert [learned_text(encoded, chat_tokenizer) for encoded in both] == [
        ["<think>b</think>No<|im_end|>"],
        ["<think>a</think>Ho<|im_end|>"],
    ]
    assert "<think>a" not in chat_tokenizer.decode(both[0].ids)


THOUGHTFUL = FORGETFUL.replace("{% endif %}", "<think>\n{% endif %}")


def test_a_prompt_that_says_more_than_the_answer_shows_ends_where_they_part(chat_tokenizer: Tokenizer):
    (encoded,) = encode(chat("Hi", "Ho"), chat_tokenizer, ChatTemplate(THOUGHTFUL))
    assert learned_text(encoded, chat_tokenizer) == ["Ho<|im_end|>"]


PLAIN = """{% for m in messages %}{{ m.role.upper() }}:{{ m.content }}
{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""


def test_without_control_tokens_the_whole_answer_is_learned(chat_tokenizer: Tokenizer):
    (encoded,) = encode(chat("Hi", " Ho"), chat_tokenizer, ChatTemplate(PLAIN))
    assert learned_text(encoded, chat_tokenizer) == [" Ho\n"]
    assert np.flatnonzero(encoded.learned)[-1] == len(encoded.ids) - 1


BACKWARDS = """{% for m in messages|reverse %}{{ m.content }}
{% endfor %}"""


def test_a_template_whose_answers_cannot_be_told_is_an_error_that_names_the_chat(chat_tokenizer: Tokenizer):
    with pytest.raises(ChatError, match=r"^c: messages\[1\]: "):
        list(encode(chat("Hi", "Ho"), chat_tokenizer, ChatTemplate(BACKWARDS)))


def test_a_chat_without_a_template_names_the_way_out(tokenizer: Tokenizer):
    with pytest.raises(ChatError, match="--tokenizer MODEL"):
        list(encode(chat("Hi", "Ho"), tokenizer, None))


def test_a_bad_message_names_its_chat(chat_tokenizer: Tokenizer):
    bad = Chat("file.jsonl:3", [{"role": "user", "content": 5}, {"role": "assistant", "content": "x"}])
    with pytest.raises(ChatError, match=r"file\.jsonl:3: messages\[0\]"):
        list(encode(bad, chat_tokenizer, ChatTemplate(chat_tokenizer.chat_template or "")))


@pytest.mark.model
def test_a_real_template_with_a_system_message_of_its_own(smollm2):
    tokenizer = Tokenizer.from_gguf(read_gguf(smollm2).metadata)
    template = ChatTemplate(tokenizer.chat_template or "")
    (encoded,) = encode(chat("Hi", "Hello!", "Bye", "See you."), tokenizer, template)
    assert learned_text(encoded, tokenizer) == ["Hello!<|im_end|>", "See you.<|im_end|>"]
    assert "SmolLM" in tokenizer.decode(encoded.ids)
