"""Rows of packed documents, and the order in which training sees them.

A row is T tokens that follow each other in a shard, and documents lie in it as they are: positions begin
anew with each, a label never belongs to another document than its input, and `documents` says who may
attend to whom. One integer, the number of samples seen, says where training is; sample i is the same
row whatever the batch, the accumulation and the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from openbook.spec.presets import NotFoundError
from openbook.train.shards import Ints, Shard

IGNORED = -100
"""The label of a token that is not to be predicted, as in PyTorch's cross-entropy."""


class Batch(NamedTuple):
    """Rows side by side, each array int64 [B, T].

    Input `ids[b, t]` has `labels[b, t]` to predict, or -100 for nothing: at the end of a document, and
    before a token that is not the model's own. `positions` count from a document's first token in the
    row. Tokens with the same number in `documents` (the document's in its split) may see each other.
    Padding, only at the end of a row, has position -1 and document -1.
    """

    ids: Ints
    positions: Ints
    labels: Ints
    documents: Ints

    @property
    def n_labels(self) -> int:
        """The tokens to be predicted: what a sum of losses is divided by, over all rows of a step."""
        return int((self.labels != IGNORED).sum())

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each document in each row, as they lie; padding is none."""
        after = np.pad(self.positions[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        last = (self.positions >= 0) & (after != self.positions + 1)
        return tuple((self.positions[last] + 1).tolist())


class Packed:
    """The rows of some shards, T tokens each, and their order."""

    def __init__(
        self,
        shards: Sequence[Shard],
        length: int,
        seed: int = 0,
        whole: bool = False,
        stride: int | None = None,
    ) -> None:
        """With `whole`, a row ends before a document that does not fit in it, as chats want it: an answer
        keeps its question. Without, every token but a document's first is a label exactly once per epoch.
        A document of more than T tokens is cut in either case.

        With a `stride` below T, a row begins so many tokens after the one before, and only what that one does
        not predict is labelled: every label is there once, as without it, but beyond a shard's first row each
        is predicted from more than T - stride tokens, or all that its document has before it.
        """
        if length < 1:
            raise ValueError(f"a row of {length} tokens holds nothing: take 1 or more")
        stride = length if stride is None else stride
        if not 1 <= stride <= length or (whole and stride < length):
            raise ValueError(f"a stride of {stride} must be 1 to {length}, and {length} with whole documents")
        self.length, self.stride, self.seed = length, stride, seed
        self._shards = shards
        self._starts = [
            _whole_rows(shard, length) if whole else _even_rows(shard, length, stride) for shard in shards
        ]
        self._ends = np.cumsum([len(starts) for starts in self._starts], dtype=np.int64)
        self._documents = np.cumsum([0, *(shard.n_documents for shard in shards)], dtype=np.int64)
        self.n_rows = int(self._ends[-1]) if len(shards) else 0
        if not self.n_rows:
            raise NotFoundError("there is no row with anything to learn: every document has a single token")

    def batch(self, first: int, count: int) -> Batch:
        """Samples `first` to `first + count - 1` of the endless sequence of shuffled epochs."""
        return _side_by_side([self.row(self.row_of(sample)) for sample in range(first, first + count)])

    def rows(self, first: int, count: int) -> Batch:
        """Rows in the order of the file, fewer at the end: for evaluation."""
        return _side_by_side([self.row(i) for i in range(first, min(first + count, self.n_rows))])

    def count_labels(self, first: int, count: int) -> int:
        """`batch(first, count).n_labels`, a row at a time: the divisor of a step that is taken in parts."""
        return sum(self.batch(sample, 1).n_labels for sample in range(first, first + count))

    def row_of(self, sample: int) -> int:
        """The row that is sample number `sample`, counted over all epochs."""
        epoch, place = divmod(sample, self.n_rows)
        return shuffled(place, self.n_rows, self.seed, epoch)

    def row(self, i: int) -> Batch:
        """Row `i` in the order of the file, as a batch of one."""
        if not 0 <= i < self.n_rows:
            raise IndexError(f"row {i}: there are rows 0 to {self.n_rows - 1}")
        s = int(np.searchsorted(self._ends, i, "right"))
        shard, starts = self._shards[s], self._starts[s]
        place = i - (int(self._ends[s - 1]) if s else 0)
        start = starts[place]
        overlap = self.length - self.stride
        after = starts[place + 1] + overlap if place + 1 < len(starts) else shard.n_tokens
        row = self._row(shard, start, min(start + self.length, after), int(self._documents[s]))
        if place:
            row.labels[:, :overlap] = IGNORED  # the row before has them
        return row

    def _row(self, shard: Shard, start: int, stop: int, first_document: int) -> Batch:
        """Tokens `start` to `stop` as inputs, those one further on as labels."""
        end = min(stop + 1, shard.n_tokens)
        ids, learned = shard.tokens(start, end), shard.learned(start, end)
        places = np.arange(start, end)
        documents = np.searchsorted(shard.starts, places, "right") - 1
        begins = np.maximum(shard.starts[documents], start)

        labels = np.full(self.length, IGNORED, np.int64)
        follows = (documents[1:] == documents[:-1]) & learned[1:]
        labels[: len(ids) - 1] = np.where(follows, ids[1:], IGNORED)
        size = stop - start
        return Batch(
            _padded(ids[:size], self.length, 0),
            _padded((places - begins)[:size], self.length, -1),
            labels[None],
            _padded(documents[:size] + first_document, self.length, -1),
        )


def _even_rows(shard: Shard, length: int, stride: int) -> Sequence[int]:
    """Where the rows of a shard begin: every `stride` tokens, as long as there is one to predict that the row
    before does not."""
    n_inputs = shard.n_tokens - 1
    new = n_inputs - (length - stride)
    return range(0, max(new, min(n_inputs, 1)), stride)


def _whole_rows(shard: Shard, length: int) -> Sequence[int]:
    """The same with rows that end where a document ends, if one ends in them."""
    starts, start = [], 0
    while start < shard.n_tokens:
        starts.append(start)
        last = int(shard.starts[np.searchsorted(shard.starts, start + length, "right") - 1])
        start = last if last > start else start + length
    return starts


def _padded(values: Ints, length: int, filler: int) -> Ints:
    return np.pad(values, (0, length - len(values)), constant_values=filler)[None]


def _side_by_side(rows: list[Batch]) -> Batch:
    return Batch(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))


# --- order --------------------------------------------------------------------------------------

_ROUNDS = 8


def shuffled(place: int, n: int, seed: int, epoch: int) -> int:
    """The element at `place` of a permutation of 0..n-1 that (seed, epoch) alone decides.

    Nothing is stored: a Feistel network permutes the numbers of 2k bits (Luby and Rackoff 1988), and a
    result beyond n is permuted again until it is within (Black and Rogaway 2002), under 4 times on average.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = _round_keys(seed, epoch)
    while True:
        left, right = place >> half, place & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        place = left << half | right
        if place < n:
            return place


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> list[int]:
    digests = (hashlib.sha256(f"{seed}:{epoch}:{i}".encode()).digest() for i in range(_ROUNDS))
    return [int.from_bytes(digest[:8], "little") for digest in digests]


def _mixed(x: int) -> int:
    """A bijection of 64-bit numbers in which every bit depends on every other (splitmix64's)."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31
