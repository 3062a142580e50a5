"""What a workload holds in memory: weights, gradients, optimizer, KV cache, activations, logits.

Bytes, exactly, in Python integers. GB means 10⁹ bytes and GiB 2³⁰.

Activations kept for the backward pass are what PyTorch's autograd saves for the eager model, by step:

    a matrix             its input, in its own dtype (the weight is not an activation)
    LayerNorm            in fp32: its input, and mean and deviation of each row
    RMSNorm              in fp32: its input, one number a row, and the quotient if a weight multiplies it
    a rotation           nothing of the size of an activation: the angles are given
    a clip or clamp      what it cuts
    attention, fused     q, k, v, its result, and one fp32 number for each row of scores
    attention, explicit  q, k, v; the probabilities twice, in fp32 and in the model's dtype (and the capped
                         scores, if soft-capped). Soft-caps, sinks and values of another width than the keys
                         are always taken this way
    latent attention     the same, of keys and values as they are expanded; the latents that are
    an activation        its input, or what stands for it (ReLU: nothing beside its result)
    a gate's product     both factors
    a router             in fp32: its input, the scores, the weights it gives and what they are divided by
    experts              a row for each of a token's A experts: what it is told (a copy; both before and
                         after, if weights multiply that), what lies between the matrices, what it says (if
                         weights multiply that), and in fp32 what is added up
    a capped head        the capped logits
    an addition          nothing

A tensor that two steps want is kept once, but each keeps the copy that a change of dtype makes: MLP and
attention of a parallel bf16 block both copy the fp32 stream. What does not grow with the batch (masks,
angles) is left out, and so are token ids and whatever an allocator rounds up.

All of this is exact, and compared byte for byte with what autograd saves, for the eager model on the CPU,
which takes one expert after the other. An accelerator may group their products, and keeps the same; of a few
tokens it may gather the matrices themselves, a copy for every token, which is not counted here. The
activations of generation are a lower bound: the largest output of one step.

On the CPU a causal run of 65 to 1,024 tokens is attended to in blocks of queries. Joining them makes one
copy of the result for `o`, which is not counted where `o` could have read the result as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from openbook.ledger.ops import OpRow, Workload, window_size
from openbook.ledger.tensors import (
    LayerKinds,
    LedgerError,
    Section,
    block_numbers,
    dtype_name,
    evaluate,
    nbytes,
    sum_sections,
)
from openbook.spec.model import Attention, LatentAttention, ModelSpec

# --- training recipes ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    """Bytes per parameter of one way to train with AdamW.

    `weights` and `gradients` are the copies that forward and backward use; `master` an fp32 copy of the
    weights; `extra_gradients` a second, fp32 copy of the gradients; `moments` AdamW's m and v in fp32.
    """

    name: str
    meaning: str
    weights: int
    gradients: int
    master: int
    extra_gradients: int
    moments: int = 8

    @property
    def bytes_per_param(self) -> int:
        """All of it together."""
        return self.weights + self.gradients + self.master + self.extra_gradients + self.moments


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("adamw-fp32", "fp32 weights, gradients, m, v", 4, 4, 0, 0),
        Recipe("adamw-mixed", "16-bit weights and gradients; fp32 master weights, m, v", 2, 2, 4, 0),
        Recipe("adamw-mixed-fp32-grads", "16-bit weights; fp32 gradients, master weights, m, v", 2, 4, 4, 0),
        Recipe(
            "adamw-mixed-both-grads", "16-bit weights and gradients; fp32 gradients, master, m, v", 2, 2, 4, 4
        ),
    )
}
"""16, 16, 18 and 20 bytes per parameter: the four accounts in use, each right for its own trainer."""


def default_recipe(dtype: str) -> Recipe:
    """fp32 weights train in fp32, 16-bit ones with fp32 master weights."""
    name = dtype_name(dtype)
    if name not in ("fp32", "fp16", "bf16"):
        raise LedgerError(f"no training recipe for {name} weights: use fp32, bf16 or fp16")
    return RECIPES["adamw-fp32" if name == "fp32" else "adamw-mixed"]


# --- the cache ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheRow:
    """What the layers that keep the same of a token hold together.

    A token takes `token_bytes` in one layer, `formula` values. Each sequence has `cells` tokens: all of
    them, or as many as the layer's `window` is wide. `bytes` is for all sequences and layers;
    `expanded_bytes` for the same tokens with latents kept as the keys and values of every head.
    """

    layers: tuple[int, ...]
    form: Literal["keys and values", "latents"]
    formula: str
    token_bytes: int
    window: int | None
    cells: int
    bytes: int
    expanded_bytes: int


def cache_rows(
    kinds: LayerKinds, batch: int, length: int, dtype: str, windows: bool = True
) -> list[CacheRow]:
    """The cache of `batch` sequences of `length` tokens, by what its layers keep.

    A layer with a window W, or chunks of W, needs min(length, W) tokens; with `windows` false it is given
    them all, as a cache with one capacity for all layers does.
    """
    merged: dict[tuple[str, int, int, int | None], list[int]] = {}
    for block, layers in kinds:
        formula, expanded = _kept_of_a_token(block.attn)
        numbers = block_numbers(block)
        window = window_size(block.attn.window)
        key = (formula, evaluate(formula, numbers), evaluate(expanded, numbers), window)
        merged.setdefault(key, []).extend(layers)
    rows = []
    for (formula, values, expanded, window), layers in merged.items():
        cells = length if window is None or not windows else min(length, window)
        rows.append(
            CacheRow(
                layers=tuple(sorted(layers)),
                form="keys and values" if formula == _KEYS_AND_VALUES else "latents",
                formula=formula,
                token_bytes=nbytes(values, dtype),
                window=window,
                cells=cells,
                bytes=len(layers) * nbytes(batch * cells * values, dtype),
                expanded_bytes=len(layers) * nbytes(batch * cells * expanded, dtype),
            )
        )
    return rows


_KEYS_AND_VALUES = "2·G·K"


def _kept_of_a_token(attn: Attention | LatentAttention) -> tuple[str, str]:
    """The values that a token adds to one layer's cache: as they are kept, and with latents expanded."""
    if isinstance(attn, Attention):
        return _KEYS_AND_VALUES, _KEYS_AND_VALUES
    return "(C+R)", "H·(N+R+U)"


# --- the account --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One item: its bytes, and in words what is counted."""

    name: str
    bytes: int
    meaning: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The items of a workload's memory. `recipe` is how the optimizer is counted (training only)."""

    rows: tuple[MemoryRow, ...]
    recipe: Recipe | None

    @property
    def total(self) -> int:
        """Bytes of all items together."""
        return sum(row.bytes for row in self.rows)

    def __getitem__(self, name: str) -> int:
        """Bytes of one item, 0 if this workload has no such item."""
        return sum(row.bytes for row in self.rows if row.name == name)


def memory_of(
    spec: ModelSpec,
    kinds: LayerKinds,
    n_params: int,
    weight_bytes: int,
    ops: Iterable[Section[OpRow]],
    w: Workload,
    dtype: str,
    recipe: Recipe | None,
) -> Memory:
    """The account of a workload: `ops` are its steps, `weight_bytes` the storages in `dtype`."""
    ops = list(ops)
    activations = w.activation_dtype(dtype)
    n_logits = w.batch * w.head_rows * spec.vocab_size
    logits = MemoryRow("logits", nbytes(n_logits, activations), f"B·{w.head_rows}·V in {activations}")
    if w.mode == "train":
        recipe = recipe or default_recipe(dtype)
        kept = sum_sections(ops, lambda row: row.kept_bytes)
        rows = (
            *_training_rows(n_params, recipe),
            MemoryRow("activations", kept, f"kept for backward, norms' in fp32, {w.core} attention"),
            logits,
            MemoryRow("logits_fp32", nbytes(n_logits, "fp32"), "the loss's fp32 copy of the logits"),
        )
        return Memory(rows, recipe)
    cache = sum(row.bytes for row in cache_rows(kinds, w.batch, w.seen, activations))
    # A fused core forms its scores tile by tile, and the logits have a row of their own.
    unseen = ("head", "attn.scores", "attn.masked", "attn.probs")[: 4 if w.core == "fused" else 1]
    largest = max(row.activation_bytes for section in ops for row in section.rows if row.name not in unseen)
    rows = (
        MemoryRow("weights", weight_bytes, f"{dtype}, each storage once"),
        MemoryRow("kv_cache", cache, f"B·S tokens in {activations}, windows capped"),
        MemoryRow("activations", largest, "the largest output of one step, freed after use"),
        logits,
    )
    return Memory(rows, None)


def _training_rows(n_params: int, recipe: Recipe) -> tuple[MemoryRow, ...]:
    def row(name: str, per_param: int, meaning: str) -> MemoryRow:
        return MemoryRow(name, n_params * per_param, f"{per_param} bytes per parameter: {meaning}")

    rows = (
        row("weights", recipe.weights, "the copy the passes use"),
        row("gradients", recipe.gradients + recipe.extra_gradients, "all copies"),
        row("master_weights", recipe.master, "fp32"),
        row("optimizer", recipe.moments, "AdamW's m and v, fp32"),
    )
    return tuple(row for row in rows if row.bytes)
