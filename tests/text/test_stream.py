"""A stream, joined, is the whole; and no piece of it has to be taken back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bounded import bounded_work
from openbook.text import StopStrings, TextStream, Tokenizer
from openbook.text.vocabulary import byte_alphabet


@pytest.fixture(scope="module")
def by_bytes(byte_level_metadata):
    return Tokenizer.from_gguf(byte_level_metadata)


@pytest.fixture(scope="module")
def by_words(spm_metadata):
    return Tokenizer.from_gguf(spm_metadata)


def byte_ids(tokenizer, data):
    char_of = {byte: char for char, byte in byte_alphabet().items()}
    return [tokenizer.id_of(char_of[byte]) for byte in data]


def streamed(tokenizer, ids, **options):
    stream = TextStream(tokenizer, **options)
    return [stream.push(token_id) for token_id in ids] + [stream.flush()]


class TestTextStream:
    @given(numbers=st.lists(st.integers(0, 9999), max_size=40), start=st.booleans(), skip=st.booleans())
    def test_joined_it_is_the_decoded_whole(self, by_bytes, by_words, numbers, start, skip):
        for tokenizer in (by_bytes, by_words):
            ids = [number % tokenizer.vocab_size for number in numbers]
            options = {"start": start, "skip_special": skip}
            assert "".join(streamed(tokenizer, ids, **options)) == tokenizer.decode(ids, **options)

    @given(data=st.binary(max_size=40))
    def test_bytes_that_are_no_text_are_the_same_in_both_ways(self, by_bytes, data):
        pieces = streamed(by_bytes, byte_ids(by_bytes, data))
        assert "".join(pieces) == data.decode("utf-8", "replace")

    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
    def test_text_is_never_held_beyond_the_last_byte_of_its_character(self, by_bytes, text):
        stream, sent, data = TextStream(by_bytes), "", b""
        for byte in text.encode():
            sent += stream.push(*byte_ids(by_bytes, [byte]))
            data += bytes([byte])
            assert sent == data.decode("utf-8", "ignore")
        assert stream.flush() == ""

    def test_each_of_two_emojis_is_sent_with_its_fourth_byte(self, by_bytes):
        pieces = streamed(by_bytes, byte_ids(by_bytes, "👍😀".encode()))
        assert pieces == ["", "", "", "👍", "", "", "", "😀", ""]

    def test_a_character_cut_off_at_the_end_is_one_replacement_character(self, by_bytes):
        ids = byte_ids(by_bytes, b"a\xf0\x9f\x98")
        assert streamed(by_bytes, ids) == ["a", "", "", "", "\ufffd"]
        assert by_bytes.decode(ids) == "a\ufffd"

    def test_spaces_of_sentencepiece_are_kept_word_by_word(self, by_words):
        text = " a    b ."
        pieces = streamed(by_words, by_words.encode(text))
        assert "".join(pieces) == text
        assert "".join(streamed(by_words, by_words.encode("x"), start=False)) == " x"

    def test_line_separators_pass_unchanged(self, by_bytes):
        text = "a\u2028b\u0085c"
        assert "".join(streamed(by_bytes, by_bytes.encode(text))) == text

    def test_control_tokens_are_silent_unless_asked_for(self, by_bytes):
        ids = by_bytes.encode("a<|im_end|>", special=True)
        assert "".join(streamed(by_bytes, ids)) == "a"
        assert "".join(streamed(by_bytes, ids, skip_special=False)) == "a<|im_end|>"

    def test_work_for_each_token_does_not_grow(self, by_bytes):
        stream = TextStream(by_bytes)
        endless = byte_ids(by_bytes, b"\x80")[0]
        with bounded_work(2):
            for _ in range(100_000):
                assert stream.push(endless) == "\ufffd"


def stopped_text(text, stops):
    """The obvious way: after each character, does the text end with a stop?"""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


alphabet = st.text("ab\n", max_size=30)


class TestStopStrings:
    @given(
        pieces=st.lists(alphabet, max_size=8),
        stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    )
    def test_any_cutting_gives_what_the_whole_gives(self, pieces, stops):
        matcher, sent = StopStrings(stops), ""
        whole = "".join(pieces)
        expected, stop = stopped_text(whole, stops)
        arrived = ""
        for piece in pieces:
            sent += matcher.push(piece)
            arrived += piece
            assert expected.startswith(sent), "text was sent that has to be taken back"
            held = stopped_text(arrived, stops)[0][len(sent) :]
            assert not held or any(stop.startswith(held) for stop in stops), "text was held without need"
        assert sent + matcher.flush() == expected
        assert matcher.stopped == stop

    def test_a_stop_across_pieces_never_shows(self):
        matcher = StopStrings(["DEFGHIJ"])
        assert [matcher.push(piece) for piece in ("ABC", "DEF", "G", "HI", "J", "more")] == [
            "ABC", "", "", "", "", "",
        ]  # fmt: skip
        assert (matcher.stopped, matcher.flush()) == ("DEFGHIJ", "")

    def test_what_was_held_is_delivered_at_the_end(self):
        matcher = StopStrings(["DEFGHIJ"])
        assert [matcher.push("ABC"), matcher.push("DEF"), matcher.flush()] == ["ABC", "", "DEF"]
        assert matcher.stopped is None

    def test_a_stop_inside_a_piece_cuts_it(self):
        matcher = StopStrings(["stop", "."])
        assert matcher.push("one. two stop") == "one"
        assert matcher.stopped == "."

    def test_of_two_that_end_together_the_longer_is_cut(self):
        assert StopStrings(["b", "ab"]).push("xab") == "x"

    @pytest.mark.parametrize("stops", [[""], ["a", ""], ""])
    def test_an_empty_stop_string_is_an_error(self, stops):
        with pytest.raises(ValueError, match="empty"):
            StopStrings(stops)

    def test_no_stops_hold_nothing(self):
        assert StopStrings([]).push("anything") == "anything"

    def test_time_is_linear_for_the_worst_stop(self):
        matcher = StopStrings(["a" * 5_000 + "b"])
        with bounded_work(5):
            sent = "".join(matcher.push("a") for _ in range(50_000)) + matcher.flush()
            assert sent == "a" * 50_000
