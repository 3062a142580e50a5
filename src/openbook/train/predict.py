"""What a recipe will take, from the ledger and before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openbook.ledger import Workload, ledger
from openbook.ledger.memory import MemoryRow
from openbook.ledger.ops import OpRow
from openbook.native.modules import LEARNED_THROUGH, LEAST_ROWS, MOST_KEYS, MOST_WIDTH
from openbook.spec.model import Attention, Block, Chunk, Experts, ModelSpec
from openbook.train.layers import has_native_modules
from openbook.train.loss import rows_at_once
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


def predict(
    spec: ModelSpec, train: TrainPart, length: int, packed: bool = True, adapters: int = 0
) -> Prediction:
    """The books of a run with rows of `length` tokens, each of several documents if `packed`. Of a model with
    `adapters`, so many parameters, only these are learned."""
    book = ledger(spec, "fp32")
    step = Workload("train", batch=train.rows, new=length)
    flops, conventions = book.totals(step).flops, tuple(book.conventions(step))
    if adapters:
        flops, frozen = of_adapters(flops), "2 × forward, since the frozen weights have no gradients"
        conventions = tuple(said.replace("3 × forward", frozen) for said in conventions)
    moments = _moments(spec, train, length, packed, adapters)
    return Prediction(
        params=book.params.total,
        tokens=train.steps * train.rows * length,
        flops=train.steps * flops,
        step_flops=flops,
        memory=max(moments, key=lambda rows: sum(row.bytes for row in rows)),
        conventions=conventions,
    )


def of_adapters(flops: int) -> int:
    """Frozen weights have no gradients, and so no products that make them: 2 × forward, not 3 ×."""
    return flops * 2 // 3


# --- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """Bytes of one layer: what it has `kept` for its backward pass, of which `inputs` are the stream that it
    reads, and the `work` that this pass makes for a while."""

    kept: int
    inputs: int
    work: int


Rows = tuple[MemoryRow, ...]


def _moments(spec: ModelSpec, train: TrainPart, length: int, packed: bool, adapters: int) -> Iterator[Rows]:
    """What is held at each moment of a step that may be its fullest: at the loss, which makes the head's
    gradient; as each layer is gone back through, the last one first; and when all gradients are there."""
    at_once = min(train.rows, train.micro_rows or train.rows)
    book = ledger(spec, "fp32")
    layers = _layers(spec, train, at_once, length)
    sizes = [(row.layer, row.kind, 4 * row.count) for row in book.tensors if row.tie is None]
    of_layer = [sum(size for layer, _, size in sizes if layer == i) for i in range(spec.n_layers)]
    matrices = sum(size for layer, kind, size in sizes if kind == "matrix" and layer is not None)
    casts = sum(size for _, kind, size in sizes if kind == "matrix") // 2 * (train.dtype == "bf16")
    shared = casts + (_mask_bytes(spec, at_once, length) if packed else 0)
    total, head = 4 * book.params.total, 4 * spec.vocab_size * spec.d_model
    parts = -(-train.rows // at_once)
    learned = 4 * adapters or total
    moments = 2 * learned - (matrices if train.optimizer == "muon" and not adapters else 0)
    again = [layer.kept if train.checkpoint_layers else 0 for layer in layers]

    def moment(gradients: int, activations: int, work: int, what: str) -> Rows:
        of_what = f"those that are there {what}"
        if adapters:
            gradients, of_what = learned, "of the adapters alone"
        elif parts > 1:  # those of earlier parts are there, and this one's are added to them
            gradients = min(total + head, total + gradients)
        passing = gradients + activations + work
        holes = round((HOLES if parts == 1 else HOLES_OF_PARTS) * passing) + HOLES_AGAIN * max(again)
        rows = (
            MemoryRow("weights", total, "fp32, each storage once"),
            MemoryRow("adapters", 4 * adapters, "fp32, beside the weights"),
            MemoryRow("optimizer", moments, f"{train.optimizer}'s moments, fp32"),
            MemoryRow("gradients", gradients, f"fp32, {of_what}"),
            MemoryRow("activations", activations, f"kept for backward by {at_once} rows"),
            MemoryRow("work", work, f"made for a while, {what}"),
            MemoryRow("holes", holes, "in the heap, between what comes and goes"),
        )
        return tuple(row for row in rows if row.bytes)

    kept = [layer.inputs if train.checkpoint_layers else layer.kept for layer in layers]
    ends = 4 * at_once * length * spec.d_model  # the stream after the last layer, for the final norm
    loss = _loss_bytes(spec, train, at_once * length)
    yield moment(head, sum(kept) + ends + shared, loss, "at the loss")
    for i, layer in reversed(list(enumerate(layers))):
        what = f"going back through layer {i}"
        yield moment(head + sum(of_layer[i:]), sum(kept[: i + 1]) + again[i] + shared, layer.work, what)
    # The embedding's gradient is made whole, then added to that of a head it is tied to.
    yield moment(total, 0, head if spec.head.tied else 0, "as the last gradient is there")


HOLES, HOLES_OF_PARTS, HOLES_AGAIN = 0.19, 0.3, 2
"""What glibc's heap holds beyond what is in it: a part of what comes and goes within a step, more where
gradients stay there while the next part of the step is computed; and if layers are computed twice, the
activations of two layers. These are measured; 0.1 to 0.4 was found for the first, least where most comes and
goes. docs/train.md names allocators that leave fewer."""


def _layers(spec: ModelSpec, train: TrainPart, rows: int, length: int) -> list[_Layer]:
    book = ledger(spec, train.dtype)  # products in bf16 keep what a bf16 model keeps
    stream = 4 * rows * length * spec.d_model
    kept, mlp_kept, mlp_work, attn_work = ([0] * spec.n_layers for _ in range(4))
    for op in book.ops(Workload("train", batch=rows, new=length)):
        if op.layer is None:
            continue
        mine = _kept_bytes(op, spec.layers[op.layer], stream, length)
        kept[op.layer] += mine
        if op.part.startswith("mlp"):
            mlp_kept[op.layer] += mine
        if op.name.endswith(".act"):
            mlp_work[op.layer] = 2 * stream + 2 * op.activation_bytes  # gradients of the stream, gate and up
        elif op.name.endswith(".mix"):
            # The gradient of its result; those of q, k and v for every query head, q's fp32; one turned.
            width = op.activation_bytes // (2 if train.dtype == "bf16" else 4)
            attn_work[op.layer] = 2 * stream + width * (4 + 5 * 2 if train.dtype == "bf16" else 5 * 4)
    # As attention is gone back through, nothing of the MLP is left.
    work = [max(mlp_work[i], attn_work[i] - mlp_kept[i]) for i in range(spec.n_layers)]
    return [_Layer(kept[i], stream, work[i]) for i in range(spec.n_layers)]


STREAM_NORMS = frozenset(
    ("attn_norm", "attn_out_norm", "attn_add_norm", "mlp_norm", "mlp_out_norm", "mlp_add_norm", "end_norm")
)


def _kept_bytes(op: OpRow, block: Block, stream: int, length: int) -> int:
    """The ledger's account is of the plain modules. `openbook.train.layers` has others, which keep less: a
    norm of the stream its input alone, a gate its factors, attention in C a result as `o` reads it."""
    name = op.name.split(".", 2)[2]
    if name in STREAM_NORMS and has_native_modules():
        return min(op.kept_bytes, stream)
    mlp = block.mlp.expert if isinstance(block.mlp, Experts) else block.mlp
    gated = mlp.gated and mlp.activation in LEARNED_THROUGH
    if name.endswith("act") and gated and has_native_modules():
        return op.kept_bytes - op.activation_bytes
    if name == "attn.o" and _attends_in_c(block, length):
        return 0
    return op.kept_bytes


def _attends_in_c(block: Block, length: int) -> bool:
    """Whether a run's attention is `NativeCore`'s, which keeps its result as `o` reads it, and no table of
    who sees whom."""
    attn = block.attn
    if not (isinstance(attn, Attention) and has_native_modules() and LEAST_ROWS <= length <= MOST_KEYS):
        return False
    plain = (
        attn.softcap is None and attn.alibi is None and not attn.sinks and not isinstance(attn.window, Chunk)
    )
    return plain and attn.head_dim % 16 == 0 and attn.head_dim <= MOST_WIDTH


def _loss_bytes(spec: ModelSpec, train: TrainPart, tokens: int) -> int:
    """The hidden states as the final norm leaves them, those with a label, and their gradients; and a chunk
    of the logits: once, in place, in fp32; with bf16 products in bf16 too, and the head's matrix."""
    chunk, head = spec.vocab_size * min(tokens, rows_at_once(spec.vocab_size)), spec.vocab_size * spec.d_model
    bf16 = train.dtype == "bf16"
    hidden = 3 * tokens * spec.d_model * (2 if bf16 else 4)
    if spec.head.softcap is None and spec.head.scale == 1:
        return hidden + (6 * chunk + 2 * head if bf16 else 4 * chunk)
    # By autograd: logits, log-softmax and the gradients of both; for z the exponentials, their gradient and a
    # sum too; and a gradient of the head for each chunk.
    return hidden + 4 * ((6 if train.z_weight else 4) * chunk + head)


def _mask_bytes(spec: ModelSpec, rows: int, length: int) -> int:
    """Where attention is not in C: a table [B, T, T] of bytes for each window; and what each layer's kernel
    keeps for backward: the same in fp32, and where query heads share keys, once for each group."""
    others = [block.attn for block in spec.layers if not _attends_in_c(block, length)]
    tables = sum(
        attn.n_kv_heads if attn.n_kv_heads < attn.n_heads else 1
        for attn in others
        if isinstance(attn, Attention)
    )
    return rows * length**2 * (len({attn.window for attn in others}) + 4 * tables)
