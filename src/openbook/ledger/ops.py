"""Every step of a forward pass: shapes, FLOPs and bytes, derived from the spec and a workload.

A FLOP is one multiplication or one addition: a matrix product of (m, k) and (k, n) costs 2·m·n·k.
Elementwise work, norms and look-ups count 0. Training counts 3 × forward (the backward pass forms two
products for every one of the forward pass); nothing is recomputed.

Attention is the one place where honest authors differ, so its convention has a name:

    causal   the pairs (query, key) that the mask lets through, the query's own key included:
             T·P + T·(T + 1)/2 for T new tokens after P cached ones. What the mathematics needs.
    half     the same with a query's own key counted as half: T·P + T²/2. With P = 0 exactly half the
             square, as papers and benchmarks state "causal" FLOPs.
    full     the whole rectangle, T·S with S = P + T. What a kernel that skips nothing executes.

A window W is honoured in all three: no query is charged more than W keys (full: T·min(S, W)).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from openbook.ledger.tensors import (
    LayerKinds,
    LedgerError,
    Section,
    TensorRow,
    block_numbers,
    block_rows,
    dtype_name,
    evaluate,
    input_rows,
    layer_sections,
    model_numbers,
    nbytes,
    output_rows,
    spell,
    sum_sections,
    unfold,
)
from openbook.spec.model import Block, ModelSpec, Norm

Mode = Literal["train", "prefill", "decode"]
Convention = Literal["causal", "half", "full"]
Core = Literal["fused", "explicit"]

CONVENTIONS: dict[str, str] = {
    "causal": "attention causal: visible (query, key) pairs, own key included",
    "half": "attention half: visible pairs, own key as half (T² / 2 for a whole sequence)",
    "full": "attention full: the whole T × S rectangle",
}
"""The attention conventions in words, to be printed beside every total of FLOPs."""


@dataclass(frozen=True)
class Workload:
    """What the model is asked to do: `batch` sequences of `new` tokens, each after `past` cached ones.

    `train` is forward and backward over whole sequences, with logits for every token. `prefill` and
    `decode` are the two halves of generation: many tokens at once, of which only the last one's logits
    are wanted, and then one token at a time. `last_only` overrides which rows the head computes.

    `dtype` is that of activations and KV cache; None means the weights' own, or fp32 where those are
    quantised. `core` says which attention the activations are counted for: `fused` keeps no scores,
    `explicit` makes them.
    """

    mode: Mode = "prefill"
    batch: int = 1
    new: int = 1
    past: int = 0
    dtype: str | None = None
    attention: Convention = "causal"
    last_only: bool | None = None
    core: Core = "fused"

    def __post_init__(self) -> None:
        for name, choices in (("mode", Mode), ("attention", Convention), ("core", Core)):
            if getattr(self, name) not in get_args(choices):
                found, known = getattr(self, name), ", ".join(get_args(choices))
                raise LedgerError(f"workload {name} must be one of {known}, found {found!r}")
        for name, least in (("batch", 1), ("new", 1), ("past", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise LedgerError(f"workload {name} must be an integer of at least {least}, found {value!r}")
        if self.mode == "train" and self.past:
            raise LedgerError("workload past must be 0 in training: there is no cache to read")
        if self.dtype is not None and "_" in dtype_name(self.dtype):
            raise LedgerError(
                f"workload dtype must be a plain one, such as fp32 or bf16, found {self.dtype!r}"
            )

    @property
    def seen(self) -> int:
        """S: cached and new tokens together."""
        return self.past + self.new

    @property
    def tokens(self) -> int:
        """B·T: the tokens this workload computes."""
        return self.batch * self.new

    @property
    def head_rows(self) -> int:
        """Tokens per sequence for which the head computes logits."""
        last_only = self.mode == "prefill" if self.last_only is None else self.last_only
        return 1 if last_only else self.new

    def activation_dtype(self, weights: str) -> str:
        """The dtype of activations and cache beside weights of dtype `weights`."""
        if self.dtype is not None:
            return dtype_name(self.dtype)
        return "fp32" if "_" in weights else weights

    def conventions(self) -> list[str]:
        """What has to be said beside a total of this workload's FLOPs."""
        passes = "train = 3 × forward" if self.mode == "train" else "forward only"
        rows = "head on the last token" if self.head_rows < self.new else "head on every token"
        return ["a multiply-add is 2 FLOPs", passes, CONVENTIONS[self.attention], rows, "elementwise 0"]


def visible_pairs(new: int, past: int, window: int | None) -> int:
    """Sum over the new tokens of the keys each one sees: past ones and itself, at most `window`."""
    # The query at position p sees min(p + 1, W) keys; p runs from `past` to `past + new - 1`.
    if window is None or window >= past + new:
        return new * past + new * (new + 1) // 2
    growing = max(0, window - past)
    return growing * past + growing * (growing + 1) // 2 + (new - growing) * window


def read_keys(new: int, past: int, window: int | None) -> int:
    """The keys that at least one of the new tokens sees: all, or the last window - 1 + new."""
    seen = past + new
    return seen if window is None else min(seen, window - 1 + new)


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpRow:
    """One step. Shapes are those of activations; the weights it reads have rows of their own.

    `formula` and `numbers` give `flops` in letters and in numbers ("" where it is 0). `letters` reads
    "B T D → B T H·K". `kept_bytes` is what this step leaves behind for the backward pass (training
    only). `kv_read` and `kv_written` are bytes of the cache (generation only).
    """

    name: str
    layer: int | None
    part: str
    letters: str
    in_shapes: tuple[tuple[int, ...], ...]
    out_shape: tuple[int, ...]
    formula: str
    numbers: str
    flops: int
    weight_bytes: int
    activation_bytes: int
    kept_bytes: int = 0
    kv_read: int = 0
    kv_written: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums over all steps of a workload. `tokens` is B·T."""

    tokens: int
    flops: int
    weight_bytes: int
    activation_bytes: int
    kept_bytes: int
    kv_read: int
    kv_written: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in letters, before a workload gives them numbers.

    `keeps` lists tensors that the backward pass will ask for, in letters; `statistics` the same, always
    in fp32. `kv` says whether the step reads the cached keys (or values).
    """

    name: str
    ins: tuple[str, ...]
    out: str
    work: str = ""
    keeps: tuple[str, ...] = ()
    statistics: str = ""
    kv: bool = False


# --- the steps ----------------------------------------------------------------------------------


def _linear(name: str, out: str, into: str, *, rows: str = "T", kept: bool = False) -> _Step:
    result = f"B {rows} {out}"
    keeps = (result,) if kept else ()
    return _Step(name, (f"B {rows} {into}",), result, f"2·B·{rows}·{out}·{into}", keeps)


def _norm(name: str, norm: Norm | None, shape: str, *, kept: bool = True) -> Iterator[_Step]:
    if norm is not None:
        rows = "·".join(shape.split()[:-1])
        statistics = f"2·{rows}" if norm.kind == "layer" else rows  # mean and deviation, or the latter
        yield _Step(name, (shape,), shape, keeps=(shape,) if kept else (), statistics=statistics)


def _attention_work(attention: Convention, window: int | None) -> str:
    if attention == "half":
        return "B·H·half_pairs·K"
    return "2·B·H·T·S·K" if attention == "full" and window is None else "2·B·H·pairs·K"


def _attention_steps(block: Block, w: Workload) -> Iterator[_Step]:
    attn = block.attn
    work = _attention_work(w.attention, attn.window)
    heads, kv_heads, scores = "B H T K", "B G T K", "B H T S"
    explicit = w.core == "explicit"

    # A projection's output is wanted again by a norm or by the scores; a rotation needs only its angles.
    yield _linear("attn.q", "H·K", "D", kept=attn.q_norm is not None or attn.rope is None)
    yield _linear("attn.k", "G·K", "D", kept=attn.k_norm is not None or attn.rope is None)
    yield _linear("attn.v", "G·K", "D", kept=True)
    yield from _norm("attn.q_norm", attn.q_norm, heads, kept=attn.rope is None)
    yield from _norm("attn.k_norm", attn.k_norm, kv_heads, kept=attn.rope is None)
    if attn.rope is not None:
        yield _Step("attn.q_rope", (heads,), heads, keeps=(heads,))
        yield _Step("attn.k_rope", (kv_heads,), kv_heads, keeps=(kv_heads,))

    capped = explicit and attn.softcap is not None
    yield _Step("attn.scores", (heads, "B G S K"), scores, work, keeps=(scores,) if capped else (), kv=True)
    yield _Step("attn.masked", (scores,), scores)
    # The fused core keeps one number per row of scores, the logarithm of its sum, instead of the row.
    yield _Step(
        "attn.probs",
        (scores,),
        scores,
        keeps=(scores,) if explicit else (),
        statistics="" if explicit else "B·H·T",
    )
    yield _Step("attn.mix", (scores, "B G S K"), heads, work, keeps=(heads,), kv=True)
    yield _linear("attn.o", "D", "H·K", kept=block.attn_out_norm is not None)


_ACTIVATION_KEEPS = {
    "relu": 0, "sigmoid": 0, "tanh": 0,  # the derivative is read off the result
    "gelu": 1, "gelu_tanh": 1, "silu": 1,  # the input
    "relu2": 1,  # the rectified input
    "gelu_quick": 2,  # the input and its sigmoid
}  # fmt: skip
"""Tensors that an activation keeps for the backward pass beside its result."""


def _mlp_steps(block: Block) -> Iterator[_Step]:
    mlp = block.mlp
    inner = "B T F"
    if mlp.gated:
        yield _linear("mlp.gate", "F", "D")
    yield _linear("mlp.up", "F", "D")
    # The activated value is kept in any case; a gate's product keeps both of its factors, and itself.
    kept = _ACTIVATION_KEEPS[mlp.activation] + (3 if mlp.gated else 1)
    yield _Step("mlp.act", (inner, inner) if mlp.gated else (inner,), inner, keeps=(inner,) * kept)
    yield _linear("mlp.down", "D", "F", kept=block.mlp_out_norm is not None)


def _block_steps(block: Block, w: Workload) -> Iterator[_Step]:
    stream = "B T D"
    serial = block.residual == "serial"
    add = (stream, stream)
    yield from _norm("attn_norm", block.attn_norm, stream)
    yield from _attention_steps(block, w)
    yield from _norm("attn_out_norm", block.attn_out_norm, stream, kept=False)
    # The stream is kept where a norm or a matrix reads it next; a parallel block only adds to it again.
    yield _Step("attn_add", add, stream, keeps=(stream,) if serial else ())
    yield from _norm("attn_add_norm", block.attn_add_norm, stream)
    yield from _norm("mlp_norm", block.mlp_norm, stream)
    yield from _mlp_steps(block)
    yield from _norm("mlp_out_norm", block.mlp_out_norm, stream, kept=False)
    yield _Step("mlp_add", add, stream, keeps=(stream,))
    yield from _norm("mlp_add_norm", block.mlp_add_norm, stream)
    yield from _norm("end_norm", block.end_norm, stream)


def _input_steps(spec: ModelSpec) -> Iterator[_Step]:
    placed = spec.positions is not None
    yield _Step("embed", ("B T",), "B T D", keeps=() if placed else ("B T D",))
    if placed:
        yield _Step("positions", ("B T D",), "B T D", keeps=("B T D",))


def _output_steps(spec: ModelSpec, w: Workload) -> Iterator[_Step]:
    yield from _norm("final_norm", spec.final_norm, "B T D")
    yield _linear("head", "V", "D", rows="T" if w.head_rows == w.new else "1")


# --- numbers ------------------------------------------------------------------------------------


def _workload_numbers(w: Workload, window: int | None) -> dict[str, int]:
    pairs = visible_pairs(w.new, w.past, window)
    if w.attention == "full":
        pairs = w.new * min(w.seen, window or w.seen)
    # "half" takes half a key from every query; twice the pairs keeps it an integer.
    half_pairs = 2 * pairs - w.new
    return {
        "B": w.batch, "T": w.new, "S": w.seen,
        "pairs": pairs, "half_pairs": half_pairs, "read": read_keys(w.new, w.past, window),
    }  # fmt: skip


def _shape(letters: str, numbers: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(axis, numbers) for axis in letters.split())


def _times(factor: int, formula: str) -> str:
    first, _, rest = formula.partition("·")
    return f"{factor * int(first)}·{rest}" if first.isdigit() else f"{factor}·{formula}"


def _op_rows(
    steps: Iterable[_Step],
    weights: Iterable[TensorRow],
    numbers: Mapping[str, int],
    w: Workload,
    weights_dtype: str,
) -> tuple[OpRow, ...]:
    dtype = w.activation_dtype(weights_dtype)
    weight_bytes: dict[str, int] = {}
    for row in weights:
        owner = row.name.rpartition(".")[0]
        looked_up = row.kind in ("embedding", "positions")
        # A look-up reads the rows it is asked for, at most the whole table.
        read = nbytes(min(row.shape[0], w.tokens) * row.shape[1], weights_dtype) if looked_up else row.bytes
        weight_bytes[owner] = weight_bytes.get(owner, 0) + read

    def size(letters: str, of: str = dtype) -> int:
        return nbytes(evaluate("·".join(letters.split()), numbers), of)

    rows = []
    for step in steps:
        work = _times(3, step.work) if step.work and w.mode == "train" else step.work
        cached = step.kv and w.mode != "train"
        kept = sum(map(size, step.keeps)) + (size(step.statistics, "fp32") if step.statistics else 0)
        rows.append(
            OpRow(
                name=step.name,
                layer=None,
                part=step.name.split(".")[0],
                letters=f"{', '.join(step.ins)} → {step.out}",
                in_shapes=tuple(_shape(letters, numbers) for letters in step.ins),
                out_shape=_shape(step.out, numbers),
                formula=work,
                numbers=spell(work, numbers) if work else "",
                flops=evaluate(work, numbers) if work else 0,
                weight_bytes=weight_bytes.get(step.name, 0),
                activation_bytes=size(step.out),
                kept_bytes=kept if w.mode == "train" else 0,
                kv_read=size("B G read K") if cached else 0,
                kv_written=size("B G T K") if cached else 0,
            )
        )
    return tuple(rows)


def op_sections(spec: ModelSpec, kinds: LayerKinds, w: Workload, dtype: str) -> list[Section[OpRow]]:
    """All steps, each kind of layer once; `kinds` are the spec's layers, `dtype` is the weights'."""
    numbers = model_numbers(spec) | _workload_numbers(w, None)

    def of_block(block: Block) -> tuple[OpRow, ...]:
        here = numbers | block_numbers(block) | _workload_numbers(w, block.attn.window)
        return _op_rows(_block_steps(block, w), block_rows(spec, block, dtype), here, w, dtype)

    return [
        Section(None, _op_rows(_input_steps(spec), input_rows(spec, dtype), numbers, w, dtype)),
        *layer_sections(kinds, of_block),
        Section(None, _op_rows(_output_steps(spec, w), output_rows(spec, dtype), numbers, w, dtype)),
    ]


def op_rows(sections: Iterable[Section[OpRow]], n_layers: int) -> Iterator[OpRow]:
    """All steps one by one under their full names, in the order in which they run."""
    return (
        row if layer is None else replace(row, name=f"layers.{layer}.{row.name}", layer=layer)
        for layer, row in unfold(sections, n_layers)
    )


def sum_ops(sections: list[Section[OpRow]], w: Workload) -> Totals:
    """The sums over all steps. A step of a layer counts once for each layer of its kind."""

    def total(field: str) -> int:
        return sum_sections(sections, lambda row: getattr(row, field))

    names = ("flops", "weight_bytes", "activation_bytes", "kept_bytes", "kv_read", "kv_written")
    return Totals(tokens=w.tokens, **{name: total(name) for name in names})
