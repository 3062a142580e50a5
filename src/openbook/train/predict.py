"""What a recipe will take, from the ledger and before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from openbook.ledger import Workload, ledger
from openbook.ledger.memory import MemoryRow
from openbook.spec.model import Attention, ModelSpec
from openbook.train.loss import MAX_LOGITS
from openbook.train.recipe import TrainPart


@dataclass(frozen=True)
class Prediction:
    """`tokens` and `flops` are of the whole run, `step_flops` of one step: 3 × forward, each row a single
    document, under `conventions`. `memory` is what the process holds at its fullest beside the program."""

    params: int
    tokens: int
    flops: int
    step_flops: int
    memory: tuple[MemoryRow, ...]
    conventions: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """All of the memory together."""
        return sum(row.bytes for row in self.memory)


def predict(spec: ModelSpec, train: TrainPart, length: int) -> Prediction:
    """The books of a run with rows of `length` tokens."""
    book = ledger(spec, "fp32")
    step = Workload("train", batch=train.rows, new=length)
    flops = book.totals(step).flops
    return Prediction(
        params=book.params.total,
        tokens=train.steps * train.rows * length,
        flops=train.steps * flops,
        step_flops=flops,
        memory=tuple(_memory(spec, train, length)),
        conventions=tuple(book.conventions(step)),
    )


def _memory(spec: ModelSpec, train: TrainPart, length: int) -> list[MemoryRow]:
    """The ledger's account of training, with the loss's chunk of logits in place of all of them."""
    at_once = min(train.rows, train.micro_rows or train.rows)
    part = Workload("train", batch=at_once, new=length)
    book = ledger(spec, "fp32")
    account = book.memory(part, "adamw-fp32")
    rows = [row for row in account.rows if row.name in ("weights", "gradients")]
    one_moment = sum(row.count for row in book.tensors if row.kind == "matrix" and row.layer is not None)
    saved = 4 * one_moment if train.optimizer == "muon" else 0
    rows.append(MemoryRow("optimizer", account["optimizer"] - saved, f"{train.optimizer}'s moments, fp32"))
    # Products in bf16 keep what a bf16 model keeps, and a bf16 copy of every matrix.
    activations = ledger(spec, train.dtype).memory(part)["activations"]
    rows.append(MemoryRow("activations", activations, f"kept for backward by {at_once} rows"))
    if train.dtype == "bf16":
        rows.append(MemoryRow("casts", 2 * book.params.total, "the matrices in bf16"))
    rows.append(MemoryRow("masks", _mask_bytes(spec, at_once, length), "who sees whom in packed rows"))
    chunk = max(spec.vocab_size, min(MAX_LOGITS, at_once * length * spec.vocab_size))
    # Logits, log-softmax and the gradients of both; for z the exponentials, their gradient and a sum too.
    copies = 6 if train.z_weight else 4
    head = spec.vocab_size * spec.d_model
    meaning = f"a chunk of the logits, {copies} times with its gradients; two gradients of the head"
    rows.append(MemoryRow("loss", 4 * (copies * chunk + 2 * head), meaning))
    return rows


def _mask_bytes(spec: ModelSpec, rows: int, length: int) -> int:
    """A table [B, T, T] of bytes for each window; and what each layer's kernel keeps for backward: the same
    in fp32, and where query heads share keys, once for each group."""
    windows = {block.attn.window for block in spec.layers}
    tables = sum(
        block.attn.n_kv_heads if block.attn.n_kv_heads < block.attn.n_heads else 1
        for block in spec.layers
        if isinstance(block.attn, Attention)
    )
    return rows * length**2 * (len(windows) + 4 * tables)
