"""A marked string is its plain text to everyone, and knows of each character whose it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.text.marked import Marked, content

# Small letters and "-" are the template's, capitals and "+" content's; so each character tells its origin.
parts = st.lists(
    st.one_of(
        st.tuples(st.text("ab- ", max_size=4), st.just(True)),
        st.tuples(st.text("AB+\n", max_size=4), st.just(False)),
    ),
    max_size=5,
)
small = st.integers(-6, 6)


def check(result, expected):
    assert result == expected
    if isinstance(expected, str):
        for text, special in result.parts if isinstance(result, Marked) else ((result, True),):
            assert all((char in "ab- ") == special for char in text)
    elif isinstance(expected, list | tuple):
        for one, other in zip(result, expected, strict=True):
            check(one, other)


@pytest.mark.parametrize(
    "operation",
    [
        lambda s: s.strip(),
        lambda s: s.lstrip("aA"),
        lambda s: s.rstrip(" \n"),
        lambda s: s.split(),
        lambda s: s.split(None, 1),
        lambda s: s.split("A"),
        lambda s: s.split("ab", 1),
        lambda s: s.split("+-"),
        lambda s: s.rsplit(),
        lambda s: s.rsplit(None, 1),
        lambda s: s.rsplit("-", 1),
        lambda s: s.splitlines(),
        lambda s: s.splitlines(True),
        lambda s: s.partition("A"),
        lambda s: s.rpartition("b"),
        lambda s: s.removeprefix("a"),
        lambda s: s.removesuffix("A"),
        lambda s: s.replace("a", "bb"),
        lambda s: s.replace("AB", ""),
        lambda s: s.replace("-", "ab", 1),
        lambda s: s + "ab",
        lambda s: "ab" + s,
        lambda s: s * 3,
        lambda s: 2 * s,
        list,
        lambda s: s[1:],
        lambda s: s[-3:-1],
        lambda s: s[:0],
        lambda s: s.upper().lower() == s.lower(),
        lambda s: (len(s), hash(s), s == "a", "A" in s, s.find("b"), s.startswith("-"), bool(s)),
    ],
)
@given(parts=parts)
def test_an_operation_gives_the_plain_result_and_keeps_the_marks(operation, parts):
    text = Marked(parts)
    check(operation(text), operation(str.__str__("".join(part for part, _ in parts))))


@given(parts=parts, start=small, stop=small)
def test_a_slice_keeps_the_marks(parts, start, stop):
    text = Marked(parts)
    check(text[start:stop], "".join(part for part, _ in parts)[start:stop])


@given(one=parts, other=parts, third=parts)
def test_joining_and_replacing_keep_the_marks_of_all(one, other, third):
    texts = [Marked(one), Marked(other), Marked(third)]
    plain = ["".join(text for text, _ in parts) for parts in (one, other, third)]
    check(texts[0].join(texts[1:]), plain[0].join(plain[1:]))
    check(texts[0] + texts[1], plain[0] + plain[1])
    if plain[1]:
        check(texts[0].replace(texts[1], texts[2]), plain[0].replace(plain[1], plain[2]))


@given(parts=parts)
def test_changing_case_keeps_whose_each_character_is(parts):
    text = Marked(parts)
    for changed in (text.upper(), text.lower(), text.title(), text.capitalize(), text.swapcase()):
        assert [(len(part), special) for part, special in changed.parts] == (
            [(len(part), special) for part, special in text.parts]
        )


def test_a_change_that_moves_characters_counts_as_content():
    assert (Marked([("ß", True)]) + content("x")).upper().parts == (("SSX", False),)
    assert Marked([("ab", True), ("C", False)])[::-1].parts == (("Cba", False),)
