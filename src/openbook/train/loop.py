"""Teacher forcing, one update after the other.

The state of a run is the number of its step, the weights and the optimizer's tensors (and two counts for
the record). Everything else is a function of it: the samples are those from step · rows on, the learning
rate is the schedule's at this step. So a run that was stopped goes on bit for bit as if it had not been.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from openbook.model.decoder import Decoder
from openbook.train.balance import RoutersSeen, load_balance
from openbook.train.checkpoint import Checkpoint, CheckpointError
from openbook.train.layers import prepare_layers
from openbook.train.loss import Loss, head_loss
from openbook.train.optim import Optimizer
from openbook.train.pack import Batch

Skipped = Literal["no label", "not finite"]


class DivergedError(RuntimeError):
    """Too many updates had a loss or a gradient that is not a finite number."""


class Samples(Protocol):
    """An endless sequence of rows, where a number alone says which (`openbook.train.pack.Packed` is one)."""

    def batch(self, first: int, count: int) -> Batch: ...


# --- the gradient of one step -------------------------------------------------------------------


def batch_loss(
    decoder: Decoder, batch: Batch, z_weight: float = 0.0, bf16: bool = False, balance: float = 0.0
) -> Loss:
    """The summed loss of all labels of some rows. With `bf16` matrices are multiplied in bf16, while weights,
    norms, the residual stream and the loss stay fp32.

    `balance` weighs what `load_balance` says of the experts' load; it is added once for each label, so that a
    mean over labels holds it once.
    """
    device = decoder.embed.weight.device
    ids, positions, labels, documents = (torch.from_numpy(array).to(device) for array in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16), RoutersSeen(decoder, balance > 0) as seen:
        if one_document_a_row(batch):
            hidden = decoder.hidden(ids)  # no table of who sees whom: the triangle
        else:
            hidden = decoder.hidden(ids, positions, documents=documents)
        loss = head_loss(decoder.head, hidden, labels, z_weight)
    if not balance:
        return loss
    uneven = load_balance(seen.routed, positions >= 0)
    return loss._replace(total=loss.total + balance * loss.n_labels * uneven)


def one_document_a_row(batch: Batch) -> bool:
    """Whether every row is a single document from its first token on, without padding."""
    return bool((batch.positions == np.arange(batch.positions.shape[1])).all())


def accumulate(
    decoder: Decoder,
    batch: Batch,
    micro_rows: int,
    z_weight: float = 0.0,
    bf16: bool = False,
    balance: float = 0.0,
) -> float:
    """Adds to the gradients those of the mean loss of the whole batch, `micro_rows` rows at a time.

    Returns the mean cross-entropy, in nats per label.

    Each part's sum is divided by the labels of the whole, so the parts' sizes and numbers of labels do not
    matter. A part without labels adds nothing. Only `balance` is not the whole's: it is of what is computed
    at once, and the parts' mean is taken.
    """
    n_labels, nats = batch.n_labels, 0.0
    for first in range(0, len(batch.ids), micro_rows):
        part = Batch(*(array[first : first + micro_rows] for array in batch))
        if part.n_labels:
            loss = batch_loss(decoder, part, z_weight, bf16, balance)
            (loss.total / n_labels).backward()
            nats += loss.nats.item()
    return nats / n_labels if n_labels else 0.0


# --- a run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one step did. `loss` is the mean cross-entropy in nats per label, `grad_norm` that of all
    gradients before clipping, `lr` the learning rate. `tokens` are all of its rows, padding included,
    `documents` the lengths of what lies in them. A skipped step changed no weight and no moment."""

    number: int
    loss: float
    grad_norm: float
    lr: float
    labels: int
    tokens: int
    documents: tuple[int, ...]
    skipped: Skipped | None = None


class Trainer:
    """A model, its optimizer and its samples, at some step. `step` counts what is done, from 0."""

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        samples: Samples,
        schedule: Callable[[int], float],
        rows: int,
        micro_rows: int | None = None,
        clip: float = 1.0,
        z_weight: float = 0.0,
        bf16: bool = False,
        max_nonfinite: int = 10,
        *,
        balance: float = 0.0,
        checkpoint_layers: bool = False,
        compile: bool = False,  # noqa: A002  (torch's name)
    ) -> None:
        """`rows` samples make a step, `micro_rows` (default: all) are computed at once. `schedule` gives the
        part of the peak learning rate by the number of a step. `clip` 0 clips nothing. More than
        `max_nonfinite` steps of a run that are not finite end it. `balance` weighs the load of experts;
        `checkpoint_layers` and `compile` change how layers run, see `openbook.train.layers`."""
        prepare_layers(decoder, checkpoint_layers, compile)
        self.decoder, self.optimizer, self.samples, self.schedule = decoder, optimizer, samples, schedule
        self.rows, self.micro_rows = rows, micro_rows or rows
        self.clip, self.z_weight, self.bf16, self.max_nonfinite = clip, z_weight, bf16, max_nonfinite
        self.balance = balance
        self.step = self.without_labels = self.nonfinite = 0

    def update(self) -> Step:
        """Takes the next step. Raises `DivergedError` at one non-finite step too many."""
        batch = self.samples.batch(self.step * self.rows, self.rows)
        scale = self.schedule(self.step)
        self.optimizer.zero_grad()
        loss = accumulate(self.decoder, batch, self.micro_rows, self.z_weight, self.bf16, self.balance)
        norm, skipped = 0.0, None
        if batch.n_labels:
            norm = self.optimizer.clip(self.clip or math.inf)
        if not batch.n_labels:
            skipped = "no label"
            self.without_labels += 1
        elif not (math.isfinite(loss) and math.isfinite(norm)):
            skipped = "not finite"
            self.nonfinite += 1
        else:
            self.optimizer.step(scale)
        self.step += 1
        if self.nonfinite > self.max_nonfinite:
            raise DivergedError(
                f"{self.nonfinite} of {self.step} steps had a loss or gradient that is not finite, the last "
                f"one step {self.step}; earlier checkpoints stand: take a lower learning rate or more warmup"
            )
        lr = self.optimizer.lr * scale
        return Step(self.step, loss, norm, lr, batch.n_labels, batch.ids.size, batch.lengths, skipped)

    # --- its state ---

    def tensors(self) -> dict[str, Tensor]:
        """Weights under their names, and the optimizer's tensors under theirs: what a checkpoint holds.
        Frozen weights are not among them: they stay what they were when the run began."""
        return {**self._weights(), **self.optimizer.tensors()}

    def _weights(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self.decoder.named_parameters() if weight.requires_grad}

    def counts(self) -> dict[str, int]:
        """The rest of the state; `step` is the checkpoint's own."""
        return {"without_labels": self.without_labels, "nonfinite": self.nonfinite}

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes up a saved state. Raises `CheckpointError` if it is that of another model or optimizer."""
        weights = self._weights()
        saved = checkpoint.tensors
        for name, weight in weights.items():
            shape = list(saved[name].shape) if name in saved else "missing"
            if shape != list(weight.shape):
                raise CheckpointError(
                    f"{name} is {shape} in {checkpoint.path}, expected {list(weight.shape)}"
                )
        counts = _counts(checkpoint.path.name, checkpoint.state)
        self.optimizer.load({name: tensor for name, tensor in saved.items() if name not in weights})
        for name, weight in weights.items():
            weight.copy_(saved[name])
        self.step, (self.without_labels, self.nonfinite) = checkpoint.step, counts


def _counts(name: str, state: Mapping[str, Any]) -> tuple[int, int]:
    counts = state.get("without_labels"), state.get("nonfinite")
    if not all(type(count) is int and count >= 0 for count in counts):
        raise CheckpointError(f"{name} is no checkpoint of a training run: it does not count skipped steps")
    return counts  # type: ignore[return-value]


# --- being asked to stop ------------------------------------------------------------------------


class StopRequest:
    """While it is entered, SIGINT and SIGTERM only ask to stop: `asked` is then the signal's number, for the
    loop to see between two steps. A second one has its usual effect."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        self._restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
