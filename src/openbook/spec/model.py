"""The declarative description of one decoder-only Transformer.

Everything else in Openbook is derived from a `ModelSpec`: the ledger, the running model, the names of
a checkpoint's tensors, the plan of a cluster. A spec is plain immutable data; it imports nothing.

Three rules keep it small:

* one `Block` per layer, so that whatever varies by layer (windows, RoPE bases, head counts) is data;
* a choice is a type or `None` (`Rope | None`), never a flag that gives another field its meaning;
* every value is resolved: no "null means d_model / n_heads" survives into a spec.

Names in a spec are the names of the model's modules and of the ledger's rows: `spec.layers[3].attn`
is the module `layers.3.attn`, whose rows are `layers.3.attn.q.weight` and so on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

MAX_LAYERS = 10_000
"""Far beyond any model; a config that asks for more is refused instead of being unrolled."""


class SpecError(ValueError):
    """A description that is no model: what is wrong, where, and what to do about it."""


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise SpecError(message)


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        _check(
            isinstance(value, int) and not isinstance(value, bool) and value > 0,
            f"{type(owner).__name__}.{name} must be a positive integer, found {value!r}",
        )


# --- positions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learned:
    """A trained vector for each position, added to the embedding: position p reads row p + `offset`.

    The table has n_positions + offset rows; OPT's first two are read by padding alone.
    """

    n_positions: int
    offset: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "n_positions")
        _check(
            isinstance(self.offset, int) and self.offset >= 0,
            f"Learned.offset must be an integer of at least 0, found {self.offset!r}",
        )

    @property
    def n_rows(self) -> int:
        """P: the rows of the table."""
        return self.n_positions + self.offset


@dataclass(frozen=True)
class Sinusoidal:
    """Fixed sines and cosines added to the embedding ("Attention Is All You Need", section 3.5)."""

    base: float = 10_000.0


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every angle is divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: the base grows with the length of the run once it exceeds `original_positions`."""

    factor: float
    original_positions: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rule: long wavelengths divided by `factor`, short ones kept, a blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp between kept and interpolated frequencies.

    `attention_factor` multiplies cosine and sine; it is resolved, e.g. 0.1·ln(factor) + 1.
    `truncate` rounds the ramp's two ends to whole dimensions, as the paper's code does.
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class FrequencyDivisors:
    """Each frequency is divided by its own number, as a GGUF's `rope_freqs.weight` states it."""

    divisors: tuple[float, ...]


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): divisors for runs within `original_positions`, others beyond.

    A run of more than `original_positions` tokens has the `long` divisors from its first token on.
    `attention_factor` multiplies cosine and sine, in short runs as well.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_positions: int
    attention_factor: float = 1.0


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | FrequencyDivisors | LongRope


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021) on the first `dim` elements of every query and key head.

    `layout` says which two elements form a pair: `half` pairs i with i + dim/2 (GPT-NeoX, and every
    Hugging Face llama), `interleaved` pairs 2i with 2i + 1 (the paper, GPT-J).
    """

    dim: int
    base: float = 10_000.0
    layout: Literal["half", "interleaved"] = "half"
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "dim")
        _check(self.dim % 2 == 0, f"Rope.dim must be even, since it is rotated in pairs, found {self.dim}")
        _check(
            math.isfinite(self.base) and self.base > 0,
            f"Rope.base must be a positive number, found {self.base!r}",
        )
        lists: tuple[tuple[float, ...], ...] = ()
        if isinstance(self.scaling, FrequencyDivisors):
            lists = (self.scaling.divisors,)
        elif isinstance(self.scaling, LongRope):
            lists = (self.scaling.short, self.scaling.long)
        for divisors in lists:
            _check(
                len(divisors) == self.dim // 2,
                f"{type(self.scaling).__name__} must hold dim/2 = {self.dim // 2} numbers, "
                f"found {len(divisors)}",
            )


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases (Press et al. 2022): slope_h · (key position - query position) is added
    to the scaled scores of query head h. The slopes are resolved, one for each query head."""

    slopes: tuple[float, ...]


@dataclass(frozen=True)
class Chunk:
    """Chunked attention: a query sees the keys of its own run of `size` positions, up to itself.

    The runs start at the multiples of `size` (Llama 4): position p sees s if p // size == s // size.
    """

    size: int

    def __post_init__(self) -> None:
        _check_positive(self, "size")


@dataclass(frozen=True)
class QueryTemperature:
    """The query at position p is multiplied by 1 + scale · ln(1 + ⌊(p + 1) / interval⌋) (Llama 4)."""

    scale: float
    interval: int


# --- the parts of a block -----------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """LayerNorm (`layer`: mean removed) or RMSNorm (`rms`), over the last axis, computed in fp32.

    `offset` is added to the stored weight: Gemma stores w and means 1 + w.
    """

    kind: Literal["layer", "rms"]
    eps: float = 1e-5
    weight: bool = True
    bias: bool = False
    offset: float = 0.0

    def __post_init__(self) -> None:
        _check(self.kind in ("layer", "rms"), f"Norm.kind must be 'layer' or 'rms', found {self.kind!r}")
        _check(
            math.isfinite(self.eps) and self.eps >= 0,
            f"Norm.eps must be a number of at least 0, found {self.eps!r}",
        )


@dataclass(frozen=True)
class HeadNorm(Norm):
    """A norm of queries or keys.

    `over` says what is normalised together, and so the weight's shape: `head`, the K elements of each
    head with one weight (K) for all of them; `own`, the same with a weight of its own for each head,
    (heads, K); `width`, all heads together, (heads·K). `after_rope` norms what is rotated already.
    """

    over: Literal["head", "own", "width"] = "head"
    after_rope: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(
            self.over in ("head", "own", "width"),
            f"HeadNorm.over must be 'head', 'own' or 'width', found {self.over!r}",
        )


@dataclass(frozen=True)
class Attention:
    """Causal self-attention. Query head h reads key/value head h // (n_heads / n_kv_heads).

    The order of its steps: q, k, v with their biases; `clip_qkv` cuts all three at ±clip_qkv; `q_norm`,
    `k_norm`; `rope`, or `alibi` on the scores; norms that come after the rotation; `temperature`.

    `scale` multiplies the scores (usually head_dim ** -0.5). `softcap` c maps a score s to
    c·tanh(s/c). `window` W lets a query see itself and the W - 1 tokens before it; a `Chunk` those of its
    own chunk. `sinks` is one learned score a query head, which takes part in the softmax and has no value.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    window: int | Chunk | None = None
    softcap: float | None = None
    alibi: Alibi | None = None
    sinks: bool = False
    clip_qkv: float | None = None
    temperature: QueryTemperature | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "n_heads", "n_kv_heads", "head_dim")
        _check(
            self.n_heads % self.n_kv_heads == 0,
            f"Attention.n_kv_heads must divide n_heads = {self.n_heads}, found {self.n_kv_heads}",
        )
        _check(
            self.rope is None or self.rope.dim <= self.head_dim,
            f"Rope.dim must be at most head_dim = {self.head_dim}, found {self.rope and self.rope.dim}",
        )
        _check(
            self.window is None or isinstance(self.window, Chunk) or self.window > 0,
            f"Attention.window must be a positive integer, a Chunk or None, found {self.window!r}",
        )
        _check(math.isfinite(self.scale), f"Attention.scale must be finite, found {self.scale!r}")
        _check(
            self.alibi is None or len(self.alibi.slopes) == self.n_heads,
            f"Alibi.slopes must be n_heads = {self.n_heads} numbers, "
            f"found {self.alibi and len(self.alibi.slopes)}",
        )

    @property
    def q_width(self) -> int:
        """H·K: the width of all query heads side by side."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """G·K: the width of all key (or value) heads side by side."""
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): keys and values are made from one narrow vector a token.

    ::

        q          = q_up(q_norm(q_down(x)))       or, without q_rank, q(x);  per head [nope_dim + rope_dim]
        c, k_rope  = kv_down(x)                    [kv_rank], [rope_dim]: one for all heads
        k_nope, v  = kv_up(kv_norm(c))             per head [nope_dim + v_dim]
        k          = k_nope, rotate(k_rope)        the head's own part, then the shared one

    The last rope_dim elements of a query head are rotated. What a cache has to keep of a token is
    kv_norm(c) and the rotated k_rope: kv_rank + rope_dim numbers, whatever the number of heads.
    `down_bias` is the bias of q_down and kv_down. `q_norm` is there if and only if `q_rank` is.
    """

    n_heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    kv_norm: Norm
    scale: float
    q_rank: int | None = None
    q_norm: Norm | None = None
    rope: Rope | None = None
    down_bias: bool = False
    o_bias: bool = False
    window: int | Chunk | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "n_heads", "nope_dim", "rope_dim", "v_dim", "kv_rank")
        _check(
            (self.q_rank is None) == (self.q_norm is None),
            "LatentAttention.q_norm must be given if and only if q_rank is",
        )
        if self.q_rank is not None:
            _check_positive(self, "q_rank")
        _check(
            self.rope is None or self.rope.dim == self.rope_dim,
            f"Rope.dim must be rope_dim = {self.rope_dim}, found {self.rope and self.rope.dim}",
        )
        _check(math.isfinite(self.scale), f"LatentAttention.scale must be finite, found {self.scale!r}")

    @property
    def head_dim(self) -> int:
        """The width of one query (or expanded key) head."""
        return self.nope_dim + self.rope_dim

    @property
    def q_width(self) -> int:
        """All query heads side by side."""
        return self.n_heads * self.head_dim

    def absorbs(self, new: int, past: int) -> bool:
        """Whether `new` tokens after `past` cached ones are attended to in the latent space.

        Then kv_up works on queries and results, not on keys and values: a score costs kv_rank + rope_dim
        products and a value kv_rank, but nothing cached is expanded. The cheaper way in multiplications
        is taken: per cached token and head, new · (2·kv_rank) against kv_rank · (nope_dim + v_dim) for
        the expansion and new · (nope_dim + v_dim) with it.
        """
        expanded = self.nope_dim + self.v_dim
        return past > 0 and new * (2 * self.kv_rank - expanded) < self.kv_rank * expanded


Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh"]
"""`gelu` is the exact one (erf), `gelu_tanh` GPT-2's approximation, `relu2` the square of ReLU."""


@dataclass(frozen=True)
class Mlp:
    """Feed-forward: down(act(up(x))), or gated: down(act(gate(x)) · up(x)).

    `up_bias` is the bias of the first matrices (gate and up), `down_bias` of the last. Of a gated one,
    `clamp` cuts gate(x) from above and up(x) on both sides, and `up_offset` is added to up(x) after that
    (gpt-oss: down(act(min(gate, 7)) · (clamp(up, ±7) + 1))).
    """

    d_ff: int
    activation: Activation
    gated: bool
    up_bias: bool = False
    down_bias: bool = False
    clamp: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(self, "d_ff")
        _check(
            self.gated or (self.clamp is None and self.up_offset == 0),
            "Mlp.clamp and Mlp.up_offset act on the two factors of a gated feed-forward: set gated",
        )


@dataclass(frozen=True)
class Groups:
    """Experts in `n_groups` equal groups, of which a token may use `n_active` (DeepSeek).

    A group's own score is its `max`, or the sum of its two best (`top2`).
    """

    n_groups: int
    n_active: int
    score: Literal["max", "top2"]

    def __post_init__(self) -> None:
        _check_positive(self, "n_groups", "n_active")
        _check(
            self.n_active <= self.n_groups,
            f"Groups.n_active must be at most n_groups = {self.n_groups}, found {self.n_active}",
        )


@dataclass(frozen=True)
class Router:
    """Which experts a token gets, and with what weights, from logits = router(x), computed in fp32.

    `softmax` and `sigmoid` score all experts and take the best; `chosen_softmax` takes the largest logits
    and applies the softmax to those alone. `correction` is a learned number for each expert that is
    added to its score while choosing, and left out of its weight. `groups` narrows the choice first.
    `renormalise` divides the chosen weights by their sum plus `sum_eps`. All are multiplied by `scale`.
    `on_input` multiplies the expert's input by the weight, and not its output (Llama 4).
    """

    score: Literal["softmax", "sigmoid", "chosen_softmax"]
    renormalise: bool
    bias: bool = False
    correction: bool = False
    groups: Groups | None = None
    scale: float = 1.0
    sum_eps: float = 0.0
    on_input: bool = False

    def __post_init__(self) -> None:
        _check(
            self.score in ("softmax", "sigmoid", "chosen_softmax"),
            f"Router.score must be 'softmax', 'sigmoid' or 'chosen_softmax', found {self.score!r}",
        )


@dataclass(frozen=True)
class Shared:
    """A feed-forward that every token gets beside its experts; `gated` multiplies it by sigmoid(w·x)."""

    mlp: Mlp
    gated: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture: each token's feed-forward is the weighted sum of the `n_active` of `n_experts` that
    the `router` chooses for it, all of the shape of `expert`, and of `shared`, if there is one."""

    n_experts: int
    n_active: int
    expert: Mlp
    router: Router
    shared: Shared | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "n_experts", "n_active")
        _check(
            self.n_active <= self.n_experts,
            f"Experts.n_active must be at most n_experts = {self.n_experts}, found {self.n_active}",
        )
        groups = self.router.groups
        if groups is not None:
            _check(
                self.n_experts % groups.n_groups == 0,
                f"Groups.n_groups must divide n_experts = {self.n_experts}, found {groups.n_groups}",
            )
            _check(
                self.n_active <= groups.n_active * (self.n_experts // groups.n_groups),
                f"{groups.n_active} groups hold fewer than n_active = {self.n_active} experts",
            )


@dataclass(frozen=True)
class Block:
    """One layer. Each norm sits where its name says; an absent one is `None`.

    Serial residual::

        x = attn_add_norm(x + attn_out_norm(attn(attn_norm(x))))
        x = mlp_add_norm(x + mlp_out_norm(mlp(mlp_norm(x))))
        x = end_norm(x)

    `attn_norm`/`mlp_norm` alone is Pre-LN (GPT-2, llama); `*_add_norm` alone is the original Post-LN;
    `*_out_norm` alone is OLMo-2; both `*_norm` and `*_out_norm` is Gemma's sandwich.

    Parallel residual (`parallel`): x + attn(attn_norm(x)) + mlp(mlp_norm(x)) of the same x (GPT-NeoX).
    `parallel_shared`: the same, with the MLP reading attn_norm's output (GPT-J, phi).

    `residual_scale` multiplies what attention and MLP add to the stream (Granite).
    """

    attn: Attention | LatentAttention
    mlp: Mlp | Experts
    attn_norm: Norm | None = None
    attn_out_norm: Norm | None = None
    attn_add_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    mlp_add_norm: Norm | None = None
    end_norm: Norm | None = None
    residual: Literal["serial", "parallel", "parallel_shared"] = "serial"
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.residual != "serial":
            _check(
                self.attn_add_norm is None and self.mlp_add_norm is None,
                "a parallel residual has one addition: use end_norm for a norm after it, not *_add_norm",
            )
        if self.residual == "parallel_shared":
            _check(self.mlp_norm is None, "parallel_shared has one norm: attn_norm feeds the MLP as well")


BLOCK_NORMS = (
    "attn_norm",
    "attn_out_norm",
    "attn_add_norm",
    "mlp_norm",
    "mlp_out_norm",
    "mlp_add_norm",
    "end_norm",
)
"""The places of a block's norms, in the order in which a serial block runs them."""


# --- the model ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """The last matrix, hidden state → logits. A tied head uses the embedding's matrix as its own.

    Logits are multiplied by `scale`; `softcap` c then maps a logit s to c·tanh(s/c).
    """

    tied: bool
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only Transformer: embedding, `layers`, final norm, head.

    A token's vector is multiplied by `embed_scale` (Gemma: √D), gets its position's, if `positions` are
    learned or sinusoidal, and goes through `embed_norm` (BLOOM).

    `max_positions` is the context the model is made for. `name` is for people: it never takes part in
    any computation, nor in the comparison of two specs.
    """

    vocab_size: int
    d_model: int
    max_positions: int
    layers: tuple[Block, ...]
    head: Head
    final_norm: Norm | None = None
    positions: Learned | Sinusoidal | None = None
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check_positive(self, "vocab_size", "d_model", "max_positions")
        _check(
            0 < len(self.layers) <= MAX_LAYERS,
            f"ModelSpec.layers must hold 1 to {MAX_LAYERS:,} blocks, found {len(self.layers):,}",
        )
        if isinstance(self.positions, Sinusoidal):
            _check(self.d_model % 2 == 0, f"sinusoidal positions need an even d_model, found {self.d_model}")
        if isinstance(self.positions, Learned):
            _check(
                self.max_positions <= self.positions.n_positions,
                f"max_positions {self.max_positions} exceeds the {self.positions.n_positions} "
                "learned positions",
            )

    @property
    def n_layers(self) -> int:
        """L."""
        return len(self.layers)

    def folded(self) -> list[tuple[int, Block]]:
        """The layers as runs of equal blocks: [(28, Block(...))]."""
        return [(len(list(run)), block) for block, run in groupby(self.layers)]

    def replace(self, **changes: Any) -> ModelSpec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        return f"ModelSpec({self.name or 'unnamed'}: {describe(self)})"


def describe(spec: ModelSpec) -> str:
    """One line for people: '28 layers · width 1024 · 16/8 heads of 128 · ff 3072 · vocabulary 151,936'."""
    kinds = list(dict.fromkeys(spec.layers))
    parts = [
        f"{spec.n_layers} layers" + (f" of {len(kinds)} kinds" if len(kinds) > 1 else ""),
        f"width {spec.d_model}",
        _describe_heads(kinds[0].attn),
        # Layers that differ in kind are many; what most of the model is made of says more than all.
        _describe_mlp(spec.layers[-1].mlp),
        f"vocabulary {spec.vocab_size:,}",
    ]
    return " · ".join(parts)


def _describe_heads(attn: Attention | LatentAttention) -> str:
    if isinstance(attn, LatentAttention):
        return f"{attn.n_heads} heads of {attn.head_dim} from a latent {attn.kv_rank}"
    heads = f"{attn.n_heads}" if attn.n_kv_heads == attn.n_heads else f"{attn.n_heads}/{attn.n_kv_heads}"
    return f"{heads} heads of {attn.head_dim}"


def _describe_mlp(mlp: Mlp | Experts) -> str:
    if isinstance(mlp, Mlp):
        return f"feed-forward {mlp.d_ff}"
    shared = f" and {mlp.shared.mlp.d_ff} shared" if mlp.shared else ""
    return f"{mlp.n_active} of {mlp.n_experts} experts of {mlp.expert.d_ff}{shared}"


# --- plain data ---------------------------------------------------------------------------------


def to_dict(spec: ModelSpec) -> dict[str, Any]:
    """The spec as JSON-ready data, equal layers folded: {"layers": [{"times": 28, "block": {...}}]}.

    Values of a sum type carry their type's name as `"type"`. `from_dict` reads it back.
    """
    out = {f.name: _plain(getattr(spec, f.name)) for f in dataclasses.fields(spec) if f.name != "layers"}
    out["layers"] = [{"times": times, "block": _plain(block)} for times, block in spec.folded()]
    return out


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return list(value) if isinstance(value, tuple) else value


_TYPES = {
    cls.__name__: cls
    for cls in (
        Learned, Sinusoidal, LinearScaling, DynamicScaling, Llama3Scaling, YarnScaling, FrequencyDivisors,
        LongRope, Rope, Alibi, Chunk, QueryTemperature, Norm, HeadNorm, Attention, LatentAttention, Mlp,
        Groups, Router, Shared, Experts, Block, Head,
    )
}  # fmt: skip


def from_dict(data: dict[str, Any]) -> ModelSpec:
    """Reads what `to_dict` wrote. Raises `SpecError` on an unknown or missing key."""
    _check(isinstance(data, dict), f"a spec must be an object, found {type(data).__name__}")
    data = dict(data)
    runs = data.pop("layers", None)
    _check(isinstance(runs, list), 'a spec needs "layers": [{"times": n, "block": {...}}, ...]')
    return _build(ModelSpec, {**data, "layers": tuple(_unfold(runs or []))}, "spec")


def _unfold(runs: Iterable[Any]) -> Iterator[Block]:
    total = 0
    for i, run in enumerate(runs):
        where = f"spec.layers[{i}]"
        _check(isinstance(run, dict) and set(run) == {"times", "block"}, f"{where} needs 'times' and 'block'")
        times, block = run["times"], _value(run["block"], f"{where}.block")
        _check(
            isinstance(times, int) and times > 0, f"{where}.times must be a positive integer, found {times!r}"
        )
        _check(isinstance(block, Block), f"{where}.block must be of type Block")
        total += times
        _check(total <= MAX_LAYERS, f"a spec may have at most {MAX_LAYERS:,} layers, found {total:,}")
        yield from (block,) * times


def _value(data: Any, where: str) -> Any:
    if isinstance(data, list):
        return tuple(data)
    if not isinstance(data, dict):
        return data
    kind = data.get("type")
    _check(kind in _TYPES, f"{where}.type must be one of {', '.join(_TYPES)}, found {kind!r}")
    return _build(_TYPES[str(kind)], {k: v for k, v in data.items() if k != "type"}, where)


def _build(cls: type, data: dict[str, Any], where: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(known))
    _check(
        not unknown,
        f"{where}: unknown key {', '.join(map(repr, unknown))}; {cls.__name__} has {', '.join(known)}",
    )
    required = [n for n, f in known.items() if f.default is dataclasses.MISSING]
    missing = [n for n in required if n not in data]
    _check(not missing, f"{where}: missing {', '.join(missing)}")
    values = {k: v if k == "layers" else _value(v, f"{where}.{k}") for k, v in data.items()}
    return cls(**values)
