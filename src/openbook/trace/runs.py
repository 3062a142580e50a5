"""Other ways to run the same tokens, each as a trace of the shape that the plain run has.

What a model says must not depend on them: in pieces through a cache, or in a batch beside padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openbook.infer.batch import PAD
from openbook.infer.cache import Cache
from openbook.ledger import OpRow
from openbook.model import Decoder
from openbook.trace.names import Only
from openbook.trace.record import record
from openbook.trace.rows import axes_of, op_rows
from openbook.trace.schema import Trace, local_name

PADDING = 3
"""Tokens of padding before the row that is compared."""


def record_cached(decoder: Decoder, ids: Tensor, only: Only | None = None) -> Trace:
    """The steps of ids [1, T] fed into a cache: the first half at once, then token by token."""
    half = (ids.shape[1] + 1) // 2
    cache = Cache(decoder.spec, 1, ids.shape[1], decoder.embed.weight.dtype, ids.device)
    pieces = ids.split([half] + [1] * (ids.shape[1] - half), dim=1)
    return joined(ids, [record(decoder, piece, cache=cache, only=only) for piece in pieces])


def record_padded(decoder: Decoder, ids: Tensor, only: Only | None = None) -> Trace:
    """The steps of ids [1, T] in a batch with a longer row, and so with padding on their left."""
    neighbour = torch.cat((ids.flip(1), ids), dim=1)[:, : ids.shape[1] + PADDING]
    padding = neighbour.shape[1] - ids.shape[1]
    rows = torch.cat((torch.nn.functional.pad(ids, (padding, 0)), neighbour))
    positions = torch.arange(rows.shape[1], device=ids.device)
    padded = torch.where(positions < padding, PAD, positions - padding)
    return joined(ids, [record(decoder, rows, torch.stack((padded, positions)), only=only)])


def joined(ids: Tensor, pieces: Sequence[Trace]) -> Trace:
    """One trace of ids [1, T] from those of its pieces, in whose first rows it lies: tokens and keys in the
    order of their positions, without padding. A step that not all tokens took is left out."""
    first = pieces[0]
    rows = op_rows(first.spec, first.dtype, 1, ids.shape[1])
    axes = {row.name: axes_of(row) for row in rows}
    tensors: dict[str, Tensor] = {}
    choices: dict[str, Tensor] = {}
    for row in rows:
        took = [piece for piece in pieces if row.name in piece and piece.axes[row.name] == axes[row.name]]
        if _covers(took, row, ids.shape[1]):
            tensors[row.name] = _laid_out([(p, p.tensor(row.name)) for p in took], row)
        if all(row.name in piece.choices for piece in pieces):
            choices[row.name] = _laid_out([(p, p.choices[row.name]) for p in pieces], row)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    keys = dict.fromkeys(range(first.spec.n_layers), positions)
    return Trace(first.spec, first.dtype, ids, positions, tensors, axes, keys, choices, first.parameters)


def _covers(pieces: Sequence[Trace], row: OpRow, tokens: int) -> bool:
    """Whether these pieces have all tokens of the step: those it computes or, without any, those it reads."""
    computed = "T" in axes_of(row)
    found = {p for piece in pieces for p in (piece.positions[0] if computed else _keys(piece, row)).tolist()}
    return found >= set(range(tokens))


def _keys(piece: Trace, row: OpRow) -> Tensor:
    """The positions of the keys along the step's axis S."""
    return piece.keys[row.layer or 0][0]


_NOT_SEEN = {"attn.scores": -torch.inf, "attn.masked": -torch.inf, "attn.probs": 0.0}
"""What stands for a key that a piece did not have: it comes later or is too old, and no token looks at it."""


def _laid_out(parts: Sequence[tuple[Trace, Tensor]], row: OpRow) -> Tensor:
    """The first rows of the parts, each token and key at its position."""
    axes = axes_of(row)
    whole = parts[0][1].new_full(row.out_shape, _NOT_SEEN.get(local_name(row.name), 0))
    for piece, part in parts:
        part, into, at = part[:1], whole, []
        for axis, positions in (("T", piece.positions[0]), ("S", _keys(piece, row))):
            if axis in axes:
                place = axes.index(axis)
                real = positions >= 0
                part = part.index_select(place, real.nonzero().flatten()).movedim(place, len(at))
                into = into.movedim(place, len(at))
                at.append(positions[real])
        into[tuple(torch.meshgrid(*at, indexing="ij"))] = part
    return whole
