"""A part of a tensor: what it may be, and what a block of many numbers becomes."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from bounded import bounded_work
from openbook.infer.sample import RequestError
from openbook.serve.slices import limits, parse_at, reduced, take

AXES = ("B", "H", "T", "S")
X = torch.arange(2 * 3 * 5 * 7, dtype=torch.float32).view(2, 3, 5, 7)


@pytest.mark.parametrize(
    ("at", "axes", "expected"),
    [
        ("0,2", ("T", "S"), X[0, 2]),
        ("1,:,:,6", ("H", "T"), X[1, :, :, 6]),
        ("1,:,1:4,6", ("H", "T"), X[1, :, 1:4, 6]),
        ("0,0,4,2", (), X[0, 0, 4, 2]),
        ("1, 2, :3, 5:", ("T", "S"), X[1, 2, :3, 5:]),
    ],
)
def test_integers_drop_their_axis_and_slices_cut_it(at: str, axes: tuple[str, ...], expected: torch.Tensor):
    cut = take(X, AXES, at)
    assert cut.axes == axes
    assert torch.equal(cut.values, expected)


@pytest.mark.parametrize(
    "at",
    ["2", "0,3", "-1", "0,0,5:6", "0,0,3:3", "0,0,4:2", "0,0,:8", "0,0,0,0,0", "x", "0;1", "0,::2", "1e3",
     "0,٢", "9" * 4000, "0,0,:,:,:"],
)  # fmt: skip
def test_what_is_no_part_of_the_tensor_is_refused(at: str):
    with bounded_work(1), pytest.raises(RequestError):
        take(X, AXES, at)


@pytest.mark.parametrize("at", ["", "0", ":,0,:,:"])
def test_at_most_two_axes_may_be_left(at: str):
    with pytest.raises(RequestError, match="name an index on all but two"):
        take(X, AXES, at)


def test_an_index_for_every_axis_comes_of_what_is_written():
    assert parse_at("1,:2", (2, 3, 5), ("B", "T", "D")) == (1, slice(0, 2), slice(0, 5))


def slowly(values: torch.Tensor, longest: int, how: str) -> torch.Tensor:
    """The obvious twin: block after block, in Python."""
    height, width = (math.ceil(n / longest) for n in values.shape)
    rows = []
    for r in range(0, values.shape[0], height):
        row = []
        for c in range(0, values.shape[1], width):
            block = [x for line in values[r : r + height].tolist() for x in line[c : c + width]]
            there = [x for x in block if x != -math.inf]
            if not there:
                row.append(-math.inf)
            elif how == "mean":
                row.append(math.fsum(there) / len(there))
            else:
                row.append(max(there, key=lambda x: (abs(x), x)))
        rows.append(row)
    return torch.tensor(rows)


@given(
    rows=st.integers(1, 23),
    columns=st.integers(1, 23),
    longest=st.integers(1, 9),
    how=st.sampled_from(["mean", "absmax"]),
    masked=st.sampled_from([0.0, 0.4, 0.9]),
    seed=st.integers(0, 10**6),
)
def test_blocks_are_what_a_loop_makes_of_them(
    rows: int, columns: int, longest: int, how: str, masked: float, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values[torch.rand(rows, columns, generator=generator) < masked] = -torch.inf
    found = reduced(values, longest, how)
    assert max(found.values.shape) <= longest
    torch.testing.assert_close(found.values, slowly(values, longest, how), rtol=1e-5, atol=1e-6)


def test_what_fits_is_sent_as_it_is():
    values = torch.randn(5, 7)
    assert torch.equal(reduced(values, 7, "none").values, values)
    with pytest.raises(RequestError, match="use mean or absmax"):
        reduced(values, 6, "none")


def test_a_row_and_a_single_number_are_reduced_too():
    assert reduced(torch.arange(6.0), 3, "mean").values.tolist() == [0.5, 2.5, 4.5]
    assert reduced(torch.tensor(3.0), 4, "mean").values.tolist() == 3.0


def test_a_nan_is_not_hidden_by_its_block():
    values = torch.zeros(4)
    values[1] = torch.nan
    for how in ("mean", "absmax"):
        assert reduced(values, 2, how).values.isnan().tolist() == [True, False]


def test_sixteen_bits_are_widened():
    found = reduced(torch.ones(3, 4, dtype=torch.bfloat16), 8, "none")
    assert found.values.dtype == torch.float32


def test_limits_are_those_of_the_finite_numbers():
    assert limits(torch.tensor([1.0, -torch.inf, torch.nan, -3.0])) == (-3.0, 1.0)
    assert limits(torch.tensor([-torch.inf])) == (None, None)


def test_a_tensor_of_logits_is_reduced_without_a_copy_of_it():
    """25 M numbers in 256 × 256: rows are taken some at a time."""
    values = torch.zeros(1).expand(512, 49_152)
    with bounded_work(5):
        assert reduced(values, 256, "mean").values.shape == (256, 256)
