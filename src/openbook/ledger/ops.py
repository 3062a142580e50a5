"""Every step of a forward pass: shapes, FLOPs and bytes, derived from the spec and a workload.

A FLOP is one multiplication or one addition: a matrix product of (m, k) and (k, n) costs 2·m·n·k.
Elementwise work, norms and look-ups count 0. Training counts 3 × forward (the backward pass forms two
products for every one of the forward pass); nothing is recomputed.

Attention is the one place where honest authors differ, so its convention has a name:

    causal   the pairs (query, key) that the mask lets through, the query's own key included:
             T·(S - T) + T·(T + 1)/2 for T new tokens of S in all. What the mathematics needs.
    half     the same with a query's own key counted as half: T·(S - T) + T²/2. For a whole sequence it
             is exactly half of the square, as papers and benchmarks state "causal" FLOPs.
    full     the whole rectangle, T·S. What a kernel that skips nothing executes.

A window W is honoured in all three: no query is charged more than W keys (full: T·min(S, W)). In chunks of
W a query sees its own chunk up to itself; `full` charges min(S, W) keys there as well.

Of E experts a token is charged the A that it uses. The router is a matrix like another and counted;
`Totals.router_flops` says how much of the total it is, since some authors leave it out. Latent attention
(`LatentAttention.absorbs` says which) either expands every visible latent into keys and values, or
multiplies queries and results into the latent space: each is charged what it costs.

Embedding multipliers, soft-caps, clips, temperatures, ALiBi, sinks, residual and logit scales and the choice
of experts are elementwise: they belong to the step they change and add no FLOPs.

Of a mixed-precision model the matrices, the KV cache and whatever lies between two matrices have the
workload's dtype. The residual stream, the norms on it, the scores and the probabilities are fp32 in any
model. A matrix that reads the stream reads a copy in its own dtype, and a norm off the stream an fp32 copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

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
    is_routed,
    layer_sections,
    model_numbers,
    nbytes,
    output_rows,
    spell,
    sum_sections,
    unfold,
)
from openbook.spec.model import (
    Attention,
    Block,
    Chunk,
    Experts,
    HeadNorm,
    LatentAttention,
    Mlp,
    ModelSpec,
    Norm,
    Router,
)

Mode = Literal["train", "prefill", "decode"]
Convention = Literal["causal", "half", "full"]
Core = Literal["fused", "explicit"]
Latents = Literal["cheaper", "absorbed", "expanded"]

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

    `dtype` is that of the matrices' outputs and the KV cache; None means the weights' own, or fp32 where
    those are quantised. The residual stream is fp32 whatever it says. `core` says which attention the
    activations are counted for: `fused` keeps no scores, `explicit` makes them. `latents` says in which form
    latent attention meets what it has cached: the `cheaper` one, as the model does, or one of the two.

    `documents` are the lengths of the documents that lie side by side in the new tokens; None means a single
    one. No token sees another document than its own.
    """

    mode: Mode = "prefill"
    batch: int = 1
    new: int = 1
    past: int = 0
    dtype: str | None = None
    attention: Convention = "causal"
    last_only: bool | None = None
    core: Core = "fused"
    latents: Latents = "cheaper"
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        of = {"mode": Mode, "attention": Convention, "core": Core, "latents": Latents}
        for name, choices in of.items():
            if getattr(self, name) not in get_args(choices):
                found, known = getattr(self, name), ", ".join(get_args(choices))
                raise LedgerError(f"workload {name} must be one of {known}, found {found!r}")
        for name, least in (("batch", 1), ("new", 1), ("past", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise LedgerError(f"workload {name} must be an integer of at least {least}, found {value!r}")
        if self.mode == "train" and self.past:
            raise LedgerError("workload past must be 0 in training: there is no cache to read")
        if self.documents is not None:
            lengths = all(type(length) is int and length > 0 for length in self.documents)
            if self.past or not lengths or sum(self.documents) != self.new:
                raise LedgerError(
                    "workload documents must be positive integers whose sum is new, and past 0, found "
                    f"{self.documents!r:.80} for {self.new} new tokens after {self.past}"
                )
        if self.mode == "train" and self.latents == "absorbed":
            raise LedgerError("workload latents must be expanded in training: there are no cached ones")
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

    def absorbs(self, attn: LatentAttention) -> bool:
        """Whether queries are brought to the latents, and not the latents expanded to keys and values."""
        if self.latents == "cheaper":
            return attn.absorbs(self.new, self.past)
        return self.latents == "absorbed"

    def activation_dtype(self, weights: str) -> str:
        """The dtype of the matrices' outputs and the cache beside weights of dtype `weights`."""
        if self.dtype is not None:
            return dtype_name(self.dtype)
        return "fp32" if "_" in weights else weights

    def conventions(self) -> list[str]:
        """What has to be said beside a total of this workload's FLOPs."""
        passes = "train = 3 × forward" if self.mode == "train" else "forward only"
        rows = "head on the last token" if self.head_rows < self.new else "head on every token"
        said = ["a multiply-add is 2 FLOPs", passes, CONVENTIONS[self.attention], rows, "elementwise 0"]
        return said if self.documents is None else [*said, "documents do not see each other"]


Window = int | Chunk | None


def visible_pairs(new: int, past: int, window: Window) -> int:
    """Sum over the new tokens of the keys each one sees: past ones and itself, within its window."""
    if isinstance(window, Chunk):
        return _pairs_in_chunks(past + new, window.size) - _pairs_in_chunks(past, window.size)
    # The query at position p sees min(p + 1, W) keys; p runs from `past` to `past + new - 1`.
    if window is None or window >= past + new:
        return new * past + new * (new + 1) // 2
    growing = max(0, window - past)
    return growing * past + growing * (growing + 1) // 2 + (new - growing) * window


def packed_pairs(lengths: Iterable[int], window: Window) -> int:
    """The same for a row of packed documents of these lengths: no token sees another document."""
    return sum(visible_pairs(length, 0, window) for length in lengths)


def _pairs_in_chunks(tokens: int, size: int) -> int:
    """Pairs of a whole sequence: a triangle for every full chunk, and one for the rest."""
    chunks, rest = divmod(tokens, size)
    return chunks * (size * (size + 1) // 2) + rest * (rest + 1) // 2


def read_keys(new: int, past: int, window: Window) -> int:
    """The keys that at least one of the new tokens sees.

    All of them; or the last window - 1 and the new ones; or those from the start of the first new token's
    chunk on.
    """
    if isinstance(window, Chunk):
        return past % window.size + new
    seen = past + new
    return seen if window is None else min(seen, window - 1 + new)


def window_size(window: Window) -> int | None:
    """The most keys that one query sees, and so the tokens that a cache has to hold; None: all."""
    return window.size if isinstance(window, Chunk) else window


def experts_read(n_experts: int, n_active: int, tokens: int) -> int:
    """The experts whose weights a pass over `tokens` tokens reads, at most: min(E, tokens · A).

    An upper bound, reached if tokens choose differently. Where every choice is equally likely,
    E · (1 - (1 - A/E)^tokens) experts are read on average: 52 of 128 where 8 tokens choose 8 each, not 64.
    """
    return min(n_experts, n_active * tokens)


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpRow:
    """One step. Shapes are those of activations; the weights it reads have rows of their own.

    `formula` and `numbers` give `flops` in letters and in numbers ("" where it is 0). `letters` reads
    "B T D → B T H·K". `activation_bytes` is the size of the output: in the workload's dtype, or fp32 on the
    residual stream (a fused attention core never holds its scores as a whole: see `memory`). `kept_bytes`
    is what the step keeps for its backward pass (training only); `kv_read` and `kv_written` are bytes of
    the cache (generation only).
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
    """The sums over all steps of a workload. `tokens` is B·T; `router_flops` are among the `flops`."""

    tokens: int
    flops: int
    router_flops: int
    weight_bytes: int
    activation_bytes: int
    kept_bytes: int
    kv_read: int
    kv_written: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in letters, before a workload gives them numbers.

    `keeps` lists the tensors that its backward pass will ask for, `keeps_fp32` those of them that are
    fp32 whatever the model's dtype; `fp32` says the same of the output. `reads` and `writes` are what it
    takes from the cache and adds to it.
    """

    name: str
    ins: tuple[str, ...]
    out: str
    work: str = ""
    keeps: tuple[str, ...] = ()
    keeps_fp32: tuple[str, ...] = ()
    fp32: bool = False
    reads: str = ""
    writes: str = ""


# --- the steps ----------------------------------------------------------------------------------


def _linear(name: str, out: str, into: str, *, rows: str = "T", keeps_input: bool = True) -> _Step:
    read = f"B {rows} {into}"
    return _Step(
        name, (read,), f"B {rows} {out}", f"2·B·{rows}·{out}·{into}", keeps=(read,) if keeps_input else ()
    )


def _norm(
    name: str, norm: Norm | None, shape: str, *, fp32: bool = False, keeps_input: bool = True
) -> Iterator[_Step]:
    if norm is None:
        return
    rows = shape.rpartition(" ")[0]
    read = (shape,) if keeps_input else ()
    # LayerNorm: mean and deviation of each row. RMSNorm, written out: the root mean square of each row, and
    # the quotient if a weight multiplies it.
    rest = (rows, rows) if norm.kind == "layer" else (rows, shape) if norm.weight else (rows,)
    yield _Step(name, (shape,), shape, keeps_fp32=(*read, *rest), fp32=fp32)


def _head_norm(name: str, norm: HeadNorm | None, heads: str, *, after_rope: bool) -> Iterator[_Step]:
    """The norm of queries or keys, if it comes at this side of the rotation."""
    if norm is None or norm.after_rope != after_rope:
        return
    shape = f"B T {heads}·K" if norm.over == "width" else f"B {heads} T K"
    (step,) = _norm(name, norm, shape)
    # A weight for every head multiplies what LayerNorm returns: that product keeps it as well.
    own = (shape,) if norm.over == "own" and norm.kind == "layer" and norm.weight else ()
    yield replace(step, keeps_fp32=step.keeps_fp32 + own)


def _product(w: Workload, window: Window, size: str) -> str:
    """The FLOPs of a product of queries with keys of `size`, or of probabilities with values of it."""
    if w.attention == "half":
        return f"B·H·half_pairs·{size}"
    return f"2·B·H·T·S·{size}" if w.attention == "full" and window is None else f"2·B·H·pairs·{size}"


class _Cached(NamedTuple):
    """Keys or values: their shape, and what is read of the cache and written to it for them."""

    shape: str
    reads: str = ""
    writes: str = ""


class _Kept(NamedTuple):
    """What the core keeps beside queries and keys: scores and probabilities (fp32), and for the mix."""

    scores: tuple[str, ...]
    probs: tuple[str, ...]
    mix: tuple[str, ...]


_SCORES = "B H T S"


def _kept_by_fused(values: str, result: str, biases: bool = False) -> _Kept:
    """One logarithm of a sum for each row of scores; values and result."""
    return _Kept((_SCORES,) if biases else (), ("B H T",), (values, result))


def _kept_by_explicit(values: str, capped: bool, sinks: bool, dtype: str) -> _Kept:
    """Probabilities in fp32, and as the mix reads them: without a sink they are cleaned of NaN, and so copied
    even where that is fp32 too. Capped scores."""
    copied = (_SCORES,) if dtype != "fp32" or not sinks else ()
    probs = "B H T (S+1)" if sinks else _SCORES
    return _Kept((_SCORES,) if capped else (), (probs,), (values, *copied))


def _core_steps(
    w: Workload, window: Window, queries: str, keys: _Cached, values: _Cached, result: str, kept: _Kept
) -> Iterator[_Step]:
    """Scores, their mask, probabilities, and the values mixed by them."""
    of_scores, of_mix = (_product(w, window, x.shape.rpartition(" ")[2]) for x in (keys, values))
    read = (queries, keys.shape)
    yield _Step("attn.scores", read, _SCORES, of_scores, read, kept.scores, True, keys.reads, keys.writes)
    yield _Step("attn.masked", (_SCORES,), _SCORES, fp32=True)
    yield _Step("attn.probs", (_SCORES,), _SCORES, keeps_fp32=kept.probs, fp32=True)
    read = (_SCORES, values.shape)
    yield _Step("attn.mix", read, result, of_mix, kept.mix, (), False, values.reads, values.writes)


def _attention_steps(attn: Attention, w: Workload, dtype: str) -> Iterator[_Step]:
    heads, kv_heads = "B H T K", "B G T K"

    # q keeps what all three read. A clip keeps what it cuts.
    for name, out in (("q", "H·K"), ("k", "G·K"), ("v", "G·K")):
        step = _linear(f"attn.{name}", out, "D", keeps_input=name == "q")
        yield replace(step, keeps=step.keeps + (() if attn.clip_qkv is None else (step.out,)))
    yield from _head_norm("attn.q_norm", attn.q_norm, "H", after_rope=False)
    yield from _head_norm("attn.k_norm", attn.k_norm, "G", after_rope=False)
    if attn.rope is not None:
        yield _Step("attn.q_rope", (heads,), heads)
        yield _Step("attn.k_rope", (kv_heads,), kv_heads)
    yield from _head_norm("attn.q_norm", attn.q_norm, "H", after_rope=True)
    yield from _head_norm("attn.k_norm", attn.k_norm, "G", after_rope=True)
    if attn.temperature is not None:
        yield _Step("attn.temperature", (heads,), heads)

    fused = w.core == "fused" and attn.softcap is None and not attn.sinks
    grouped = 1 < attn.n_kv_heads < attn.n_heads
    if fused:
        # For heads in groups the table of ALiBi's biases is copied out for every sequence.
        kept = _kept_by_fused("B G S K", heads, biases=attn.alibi is not None and grouped)
    else:
        kept = _kept_by_explicit("B G S K", attn.softcap is not None, attn.sinks, dtype)
    cached = _Cached("B G S K", "B G read K", "B G T K")
    yield from _core_steps(w, attn.window, heads, cached, cached, heads, kept)
    # The fused result lies as q does. If that is token by token and not folded into groups, `o` reads it as
    # it is, else a copy (one head has no order).
    merged_is_result = fused and ((_lies_by_token(attn) and not grouped) or attn.n_heads == 1)
    yield _linear("attn.o", "D", "H·K", keeps_input=not merged_is_result)


def _lies_by_token(attn: Attention) -> bool:
    """Whether the finished queries lie in memory as their matrix wrote them, all heads of a token together.

    A rotation, or a norm of each head, writes them head by head; a norm of all heads token by token again.
    """
    norm = attn.q_norm
    if norm is not None and (norm.after_rope or attn.rope is None):
        return norm.over != "head"
    return norm is None and attn.rope is None


def _latent_steps(attn: LatentAttention, w: Workload, dtype: str) -> Iterator[_Step]:
    if attn.q_rank is None:
        yield _linear("attn.q", "H·(N+R)", "D")
    else:
        yield _linear("attn.q_down", "Q", "D")
        yield from _norm("attn.q_norm", attn.q_norm, "B T Q")
        yield _linear("attn.q_up", "H·(N+R)", "Q")
    yield _linear("attn.kv_down", "(C+R)", "D", keeps_input=False)
    # The latent lies beside the rotated part: to keep one is to keep both, but for a norm's copy in fp32.
    (step,) = _norm("attn.kv_norm", attn.kv_norm, "B T C")
    yield replace(step, keeps_fp32=step.keeps_fp32 + (("B T R",) if dtype == "fp32" else ()))

    absorbed = w.absorbs(attn)
    if not absorbed:
        keys = "S" if attn.window is None else "read"  # a window's keys are all that is expanded
        yield _Step(
            "attn.kv_up", (f"B {keys} C",), f"B {keys} H·(N+U)", f"2·B·{keys}·H·(N+U)·C", ("B T (C+R)",),
            reads="B read C", writes="B T C",
        )  # fmt: skip
    if attn.rope is not None:
        yield _Step("attn.q_rope", ("B H T R",), "B H T R")
        yield _Step("attn.k_rope", ("B T R",), "B T R")
    if absorbed:
        yield _Step("attn.q_absorb", ("B H T N",), "B H T C", "2·B·T·H·N·C")
        # Values are part of the latents that the scores have read.
        latents = _Cached("B S (C+R)", "B read (C+R)", "B T (C+R)")
        kept = _Kept((), (), ())  # in generation alone
        yield from _core_steps(w, attn.window, "B H T (C+R)", latents, _Cached("B S C"), "B H T C", kept)
        yield _Step("attn.v_absorb", ("B H T C",), "B H T U", "2·B·T·H·U·C")
        yield _linear("attn.o", "D", "H·U")
        return
    # A fused kernel wants values as wide as keys. They lie beside the keys that kv_up has made.
    fused = w.core == "fused" and attn.softcap is None and attn.v_dim == attn.head_dim
    if fused:
        kept = _kept_by_fused("B T H·(N+U)", "B H T U")
    else:
        kept = _kept_by_explicit("B H S U", attn.softcap is not None, sinks=False, dtype=dtype)
    keys_made, values_made = _Cached("B H S (N+R)", "B read R", "B T R"), _Cached("B H S U")
    yield from _core_steps(w, attn.window, "B H T (N+R)", keys_made, values_made, "B H T U", kept)
    yield _linear("attn.o", "D", "H·U", keeps_input=not (fused and attn.n_heads == 1))


_ACTIVATION_KEEPS = {
    "relu": 0, "sigmoid": 0, "tanh": 0,  # the derivative is read off the result
    "gelu": 1, "gelu_tanh": 1, "silu": 1,  # the input
    "relu2": 1,  # the rectified input
    "gelu_quick": 2,  # the input and its sigmoid
}  # fmt: skip
"""Tensors that an activation keeps for the backward pass beside its result."""


def _mlp_steps(
    name: str, mlp: Mlp, width: str, kept_input: tuple[str, ...], *, tokens: str = "T"
) -> Iterator[_Step]:
    """`tokens` are the rows: T, or T A where every token has A experts."""
    stream, inner = "B T D", f"B {tokens} {width}"
    rows = "·".join(tokens.split())
    work = f"2·B·{rows}·{width}·D"
    first, second = ("gate", "up") if mlp.gated else ("up", None)
    yield _Step(f"{name}.{first}", (stream,), inner, work, keeps=kept_input)
    if second:
        yield _Step(f"{name}.{second}", (stream,), inner, work)
    # The activation's result is kept by itself or, in a gate, by the product together with `up`. What is
    # clamped is kept besides.
    n_kept = _ACTIVATION_KEEPS[mlp.activation] + (0 if mlp.clamp is None else 2)
    if mlp.gated:
        yield _Step(f"{name}.act", (inner, inner), inner, keeps=(inner,) * (n_kept + 2))
    else:
        yield _Step(f"{name}.act", (inner,), inner, keeps=(inner,) * n_kept)
    yield _Step(f"{name}.down", (inner,), f"B {tokens} D", f"2·B·{rows}·D·{width}", keeps=(inner,))


def _experts_steps(experts: Experts, keeps_input: bool, dtype: str) -> Iterator[_Step]:
    stream, rows = "B T D", "B T A D"
    router, shared = experts.router, experts.shared
    # The router keeps what it reads, which is fp32; the shared expert a copy in its own dtype.
    kept = (stream,) if keeps_input else ()
    copy = (stream,) if dtype != "fp32" else ()
    yield _Step("mlp.router", (stream,), "B T E", "2·B·T·E·D", keeps_fp32=kept, fp32=True)
    yield _Step("mlp.chosen", ("B T E",), "B T A", keeps_fp32=tuple(_kept_of_choice(router)), fp32=True)

    # Every token is copied out for each of its experts. Weights multiply what the experts say, which keeps
    # that, or else what they are told, which keeps the copies before and after. What is added up is kept.
    told, said = ((rows, rows), ()) if router.on_input else ((rows,), (rows,))
    yield from _mlp_steps("mlp.experts", experts.expert, "F", told, tokens="T A")
    yield _Step("mlp.experts.sum", (rows, "B T A"), stream, keeps=said, keeps_fp32=(rows,))
    if shared is None:
        return
    yield from _mlp_steps("mlp.shared", shared.mlp, "J", copy)
    if shared.gated:
        yield _Step("mlp.shared_gate", (stream,), "B T 1", "2·B·T·D", keeps=("B T 1", stream))
    yield _Step("mlp.shared_add", (stream, stream), stream)


def _kept_of_choice(router: Router) -> Iterator[str]:
    """What the way from logits to weights keeps. The choice itself is integers."""
    yield "B T E"  # the scores, of which the chosen are taken
    if router.groups is not None and router.groups.score == "max":
        # The greatest of each group, and what they are taken from, unless that is the scores.
        yield f"B T {router.groups.n_groups}"
        if router.correction:
            yield "B T E"
    # The chosen ones, as a softmax or to be divided by their sum; that sum; and the weights in the end, in
    # the order of the experts.
    if router.renormalise or router.score == "chosen_softmax":
        yield "B T A"
    if router.renormalise:
        yield "B T 1"
    yield "B T A"


def _block_steps(block: Block, w: Workload, dtype: str) -> Iterator[_Step]:
    stream = "B T D"
    # In a parallel block attention and MLP read the same tensor. It is kept once, unless one of them is a
    # matrix (there is no norm before it) that has to keep a copy in its own dtype. (A router is fp32.)
    parallel = block.residual != "serial"
    both_normed = block.attn_norm is not None and block.mlp_norm is not None
    once = parallel and (both_normed or dtype == "fp32")
    routed_once = once or (block.residual == "parallel" and block.attn_norm is not None)
    yield from _norm("attn_norm", block.attn_norm, stream, fp32=True)
    if isinstance(block.attn, Attention):
        yield from _attention_steps(block.attn, w, dtype)
    else:
        yield from _latent_steps(block.attn, w, dtype)
    yield from _norm("attn_out_norm", block.attn_out_norm, stream)
    yield _Step("attn_add", (stream, stream), stream, fp32=True)
    yield from _norm("attn_add_norm", block.attn_add_norm, stream, fp32=True)
    yield from _norm("mlp_norm", block.mlp_norm, stream, fp32=True, keeps_input=not once)
    normed = block.mlp_norm is not None
    if isinstance(block.mlp, Mlp):
        yield from _mlp_steps("mlp", block.mlp, "F", (stream,) if normed or not once else ())
    else:
        yield from _experts_steps(block.mlp, normed or not routed_once, dtype)
    yield from _norm("mlp_out_norm", block.mlp_out_norm, stream)
    yield _Step("mlp_add", (stream, stream), stream, fp32=True)
    yield from _norm("mlp_add_norm", block.mlp_add_norm, stream, fp32=True)
    yield from _norm("end_norm", block.end_norm, stream, fp32=True)


def _input_steps(spec: ModelSpec) -> Iterator[_Step]:
    yield _Step("embed", ("B T",), "B T D", fp32=True)
    if spec.positions is not None:
        yield _Step("positions", ("B T D",), "B T D", fp32=True)
    yield from _norm("embed_norm", spec.embed_norm, "B T D", fp32=True)


def _output_steps(spec: ModelSpec, w: Workload) -> Iterator[_Step]:
    yield from _norm("final_norm", spec.final_norm, "B T D", fp32=True)
    head = _linear("head", "V", "D", rows="T" if w.head_rows == w.new else "1")
    yield replace(head, keeps=head.keeps + (() if spec.head.softcap is None else (head.out,)))


# --- numbers ------------------------------------------------------------------------------------


def _workload_numbers(w: Workload, window: Window) -> dict[str, int]:
    pairs = visible_pairs(w.new, w.past, window)
    if w.documents is not None:
        pairs = packed_pairs(w.documents, window)
    if w.attention == "full":
        pairs = w.new * min(w.seen, window_size(window) or w.seen)
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
    weight_bytes = _weight_bytes(weights, numbers, w)

    def size(letters: str, of: str = dtype) -> int:
        return nbytes(evaluate("·".join(letters.split()), numbers), of)

    rows = []
    for step in steps:
        work = _times(3, step.work) if step.work and w.mode == "train" else step.work
        reads, writes = (step.reads, step.writes) if w.mode != "train" else ("", "")
        kept = sum(map(size, step.keeps)) + sum(size(letters, "fp32") for letters in step.keeps_fp32)
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
                activation_bytes=size(step.out, "fp32" if step.fp32 else dtype),
                kept_bytes=kept if w.mode == "train" else 0,
                kv_read=size(reads) if reads else 0,
                kv_written=size(writes) if writes else 0,
            )
        )
    return tuple(rows)


def _weight_bytes(weights: Iterable[TensorRow], numbers: Mapping[str, int], w: Workload) -> dict[str, int]:
    """Step → bytes of the weights that it reads."""
    read: dict[str, int] = {}

    def add(step: str, count: int, dtype: str) -> None:
        read[step] = read.get(step, 0) + nbytes(count, dtype)

    for row in weights:
        owner = row.name.rpartition(".")[0]
        if row.kind in ("embedding", "positions"):
            # A look-up reads the rows it is asked for, at most the whole table.
            add(owner, min(row.shape[0], w.tokens) * row.shape[1], row.dtype)
        elif is_routed(row.name):
            experts = experts_read(numbers["E"], numbers["A"], w.tokens)
            add(owner, row.count // numbers["E"] * experts, row.dtype)
        elif row.name == "attn.kv_up.weight":
            # Whole where latents are expanded; where they are not, queries meet the keys' rows and results
            # the values'. Only one of these steps is there.
            per_head = numbers["H"] * numbers["C"]
            add("attn.kv_up", row.count, row.dtype)
            add("attn.q_absorb", per_head * numbers["N"], row.dtype)
            add("attn.v_absorb", per_head * numbers["U"], row.dtype)
        else:
            add("attn.probs" if row.kind == "sinks" else owner, row.count, row.dtype)
    return read


def op_sections(spec: ModelSpec, kinds: LayerKinds, w: Workload, dtype: str) -> list[Section[OpRow]]:
    """All steps, each kind of layer once; `kinds` are the spec's layers, `dtype` is the weights'."""
    numbers = model_numbers(spec) | _workload_numbers(w, None)
    activations = w.activation_dtype(dtype)

    def of_block(block: Block) -> tuple[OpRow, ...]:
        here = numbers | block_numbers(block) | _workload_numbers(w, block.attn.window)
        return _op_rows(_block_steps(block, w, activations), block_rows(spec, block, dtype), here, w, dtype)

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
    router = sum_sections(sections, lambda row: row.flops if row.name == "mlp.router" else 0)
    return Totals(tokens=w.tokens, router_flops=router, **{name: total(name) for name in names})
