import pickle

import pytest

from openbook.files.errors import FileError, TruncatedError, printable


def test_an_error_is_one_line_with_every_part_in_it():
    error = FileError("m.gguf", "tensor 'x' near byte 96", "the type", 4, "a GGML tensor type")
    assert str(error) == "m.gguf, tensor 'x' near byte 96: the type is 4, expected a GGML tensor type"
    assert isinstance(error, ValueError)


def test_an_error_about_the_whole_file_names_no_place():
    assert str(FileError("m.gguf", "", "the path", "a pipe", "a regular file")) == (
        "m.gguf: the path is a pipe, expected a regular file"
    )


@pytest.mark.parametrize("hostile", ["\x1b[2J", "a\nb", "\r", "\0", "\u202e", "\ud800", "\x9b31m"])
def test_nothing_from_a_file_can_move_the_cursor_or_break_the_line(hostile):
    error = FileError(f"f{hostile}", f"tensor {hostile}", hostile, hostile, hostile)
    assert str(error).isprintable()
    str(error).encode()


def test_text_in_any_script_stays_readable():
    assert printable("模型 é ▁the") == "模型 é ▁the"


def test_long_values_are_cut_and_huge_integers_described():
    assert len(printable("x" * 10**6)) == 200
    assert printable("x" * 10**6).endswith("x...")
    assert printable(10**5000) == "an integer of 16610 bits"  # str() of it would raise
    assert printable("x" * 200) == "x" * 200


def test_errors_survive_a_process_boundary_with_their_fields():
    error = pickle.loads(pickle.dumps(TruncatedError("f", "w", "field", 1, "2")))
    assert type(error) is TruncatedError
    assert (error.file, error.where, error.field, error.found, error.expected) == ("f", "w", "field", 1, "2")
