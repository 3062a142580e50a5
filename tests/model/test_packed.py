"""Packed rows: documents side by side must be to the model what they are alone."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from openbook.ledger.ops import packed_pairs
from openbook.model.attention import visible
from openbook.model.decoder import _mask
from openbook.spec.model import Chunk
from variants import VARIANTS, noisy_decoder, random_ids

LENGTHS = [(11, 3, 7), (1, 12, 8), (2, 9, 6)]
"""Of the documents in each row. No longer than 12: where frequencies depend on the length of a sequence
(dynamic scaling, LongRoPE), those of a row are the longest document's."""
PADDING = [0, 0, 4]


def packed(rows: list[tuple[int, ...]], padding: list[int]) -> tuple[Tensor, Tensor]:
    """Positions and documents of the rows."""
    positions = [
        [t for n in row for t in range(n)] + [-1] * pad for row, pad in zip(rows, padding, strict=True)
    ]
    documents = [
        [d + 10 for d, n in enumerate(row) for _ in range(n)] + [-1] * pad
        for row, pad in zip(rows, padding, strict=True)
    ]
    return torch.tensor(positions), torch.tensor(documents)


@torch.no_grad()
@pytest.mark.parametrize("name", list(VARIANTS))
def test_packed_documents_give_the_logits_that_they_give_alone(name: str):
    decoder = noisy_decoder(VARIANTS[name])
    positions, documents = packed(LENGTHS, PADDING)
    ids = random_ids(decoder.spec, *positions.shape)
    together = decoder(ids, positions, documents=documents)
    assert together.isfinite().all()
    for b, lengths in enumerate(LENGTHS):
        for start, length in zip(accumulate((0, *lengths)), lengths, strict=False):
            own = slice(start, start + length)
            torch.testing.assert_close(together[b, own], decoder(ids[b : b + 1, own])[0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_without_documents_the_same_row_would_leak():
    decoder = noisy_decoder(VARIANTS["llama"])
    positions, documents = packed(LENGTHS, PADDING)
    ids = random_ids(decoder.spec, *positions.shape)
    leaking = (decoder(ids, positions) - decoder(ids, positions, documents=documents)).abs().amax(-1)
    assert leaking[positions >= 0].min() > 1e-2


@pytest.mark.parametrize("window", [None, 1, 5, Chunk(4)])
def test_the_pairs_that_the_ledger_counts_are_the_trues_of_the_mask(window: int | Chunk | None):
    positions, documents = packed(LENGTHS, PADDING)
    seen = visible(positions, positions, window, documents)[:, 0]
    for b, lengths in enumerate(LENGTHS):
        assert packed_pairs(lengths, window) == seen[b][positions[b] >= 0].sum()
    assert packed_pairs((3, 2), None) == 9  # 1 + 2 + 3 and 1 + 2


def test_documents_need_their_own_positions():
    decoder = noisy_decoder(VARIANTS["llama"])
    ids = random_ids(decoder.spec, 1, 4)
    with pytest.raises(ValueError, match="positions that begin anew"):
        decoder(ids, documents=torch.tensor([[0, 0, 1, 1]]))


@pytest.mark.parametrize("window", [None, 1, 5])
def test_where_a_tokens_keys_begin_says_the_same_as_the_table(window: int | None):
    """For packed documents, and for the windows of one run."""
    packed_positions, documents = packed(LENGTHS, PADDING)
    for positions, docs in ((packed_positions, documents), (torch.arange(21)[None], None)):
        mask = _mask(positions, positions, window, None, docs is not None, positions.shape[1], docs)
        if mask.causal:
            continue
        at = torch.arange(positions.shape[1])
        assert mask.since is not None
        assert mask.visible is not None
        said = (at <= at[:, None]) & (at >= mask.since[..., None])
        assert torch.equal(said[positions >= 0], mask.visible[:, 0][positions >= 0])
