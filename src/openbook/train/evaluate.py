"""How well a model predicts text that it has not seen: in nats per token, and in bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from openbook.model.decoder import Decoder
from openbook.train.loop import batch_loss
from openbook.train.pack import IGNORED, Packed
from openbook.train.shards import Ints


@dataclass(frozen=True)
class Evaluation:
    """Sums over a split: cross-entropy in nats, its labels, and the bytes of text that they stand for."""

    nats: float
    labels: int
    bytes: int

    @property
    def nats_per_token(self) -> float:
        """The mean over tokens, whatever rows they were in; NaN if there are none."""
        return self.nats / self.labels if self.labels else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Does not depend on the vocabulary, and is what a compressor would need: to compare with gzip's."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


@torch.no_grad()
def evaluate(
    decoder: Decoder, packed: Packed, byte_lengths: Ints, rows: int = 8, bf16: bool = False
) -> Evaluation:
    """The loss over every row of `packed`, `rows` at a time; `byte_lengths` are the dataset's."""
    nats, labels, nbytes = 0.0, 0, 0
    for first in range(0, packed.n_rows, rows):
        batch = packed.rows(first, rows)
        nats += batch_loss(decoder, batch, bf16=bf16).nats.item()
        labels += batch.n_labels
        nbytes += int(byte_lengths[batch.labels[batch.labels != IGNORED]].sum())
    return Evaluation(nats, labels, nbytes)
