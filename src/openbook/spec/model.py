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

MAX_LAYERS = 100_000
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
    """A trained vector for each position, added to the embedding."""

    n_positions: int

    def __post_init__(self) -> None:
        _check_positive(self, "n_positions")


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


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | FrequencyDivisors


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
        if isinstance(self.scaling, FrequencyDivisors):
            _check(
                len(self.scaling.divisors) == self.dim // 2,
                f"FrequencyDivisors must hold dim/2 = {self.dim // 2} numbers, "
                f"found {len(self.scaling.divisors)}",
            )


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
class Attention:
    """Causal self-attention. Query head h reads key/value head h // (n_heads / n_kv_heads).

    `scale` multiplies the scores (usually head_dim ** -0.5). `softcap` c maps a score s to
    c·tanh(s/c). `window` W lets a query see itself and the W - 1 tokens before it. `q_norm` and
    `k_norm` act on each head's `head_dim` elements, before the rotation.
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
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int | None = None
    softcap: float | None = None

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
            self.window is None or self.window > 0,
            f"Attention.window must be a positive integer or None, found {self.window!r}",
        )
        _check(math.isfinite(self.scale), f"Attention.scale must be finite, found {self.scale!r}")

    @property
    def q_width(self) -> int:
        """H·K: the width of all query heads side by side."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """G·K: the width of all key (or value) heads side by side."""
        return self.n_kv_heads * self.head_dim


Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh"]
"""`gelu` is the exact one (erf), `gelu_tanh` GPT-2's approximation, `relu2` the square of ReLU."""


@dataclass(frozen=True)
class Mlp:
    """Feed-forward: down(act(up(x))), or gated: down(act(gate(x)) · up(x)).

    `up_bias` is the bias of the first matrices (gate and up), `down_bias` of the last.
    """

    d_ff: int
    activation: Activation
    gated: bool
    up_bias: bool = False
    down_bias: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, "d_ff")


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
    """

    attn: Attention
    mlp: Mlp
    attn_norm: Norm | None = None
    attn_out_norm: Norm | None = None
    attn_add_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    mlp_add_norm: Norm | None = None
    end_norm: Norm | None = None
    residual: Literal["serial", "parallel", "parallel_shared"] = "serial"

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
    """The last matrix, hidden state → logits. A tied head uses the embedding's matrix as its own."""

    tied: bool
    bias: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only Transformer: embedding, `layers`, final norm, head.

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
    block = spec.layers[0]
    heads = f"{block.attn.n_heads}"
    if block.attn.n_kv_heads != block.attn.n_heads:
        heads += f"/{block.attn.n_kv_heads}"
    kinds = len(set(spec.layers))
    parts = [
        f"{spec.n_layers} layers" + (f" of {kinds} kinds" if kinds > 1 else ""),
        f"width {spec.d_model}",
        f"{heads} heads of {block.attn.head_dim}",
        f"feed-forward {block.mlp.d_ff}",
        f"vocabulary {spec.vocab_size:,}",
    ]
    return " · ".join(parts)


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
        Rope, Norm, Attention, Mlp, Block, Head,
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
