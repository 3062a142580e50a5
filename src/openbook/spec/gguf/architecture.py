"""What a row of the table of architectures can say: what llama.cpp hard-wires for a kind of model."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from openbook.spec.model import Activation, Alibi, HeadNorm, Norm, QueryTemperature, Router
from openbook.spec.reader import Reader

BIASES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "up": "ffn_up",
    "down": "ffn_down",
}
"""The biases a block may have → the tensor that each belongs to ("blk.0.attn_q.bias")."""

ALL_BIASES = tuple(BIASES)

PRE = ("attn_norm", "mlp_norm")
SANDWICH = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
POST = ("attn_out_norm", "mlp_out_norm")
"""Where a block's norms are."""

_RMS = Norm("rms")

Residual = Literal["serial", "parallel", "parallel_shared"]


@dataclass(frozen=True)
class Windows:
    """Which layers slide, and what else is different in them.

    Where the file does not list the layers, all slide but every `full_every`-th; `None` is all. `width`
    is the window of a file that states none. A `chunk` is this size whatever the file states, unless it
    states 0. `rope` of the layers that slide: as everywhere; or with `sliding_base`, unless the file
    states it (`own`); or with the same base, both unscaled. `full_rope`: whether the others turn at all,
    in a model in which some layers slide.
    """

    full_every: int | None = None
    width: int | None = None
    chunk: int | None = None
    rope: Literal["same", "own", "unscaled"] = "same"
    sliding_base: float = 10_000.0
    full_rope: bool = True


@dataclass(frozen=True)
class Mixture:
    """How an architecture that has experts chooses among them.

    `router` is what is hard-wired; of it, the file decides what `stated` names: the `score`, whether to
    `renormalise`, the `scale`, the `groups`, and whether there is a `correction`. `width` is the key with
    the experts' feed-forward width. `shared` says how the file gives the width of the feed-forward for
    all tokens: it is there (`count`: as many experts wide; `length`: by its key, and absent without it;
    `one`: as wide as one expert) or not (`None`). `sum_eps` goes with a sigmoid.
    `dense`: the layers that have no experts are the first few, or all but every n-th.
    """

    router: Router
    stated: frozenset[str] = frozenset()
    width: Literal["expert_feed_forward_length", "feed_forward_length"] = "expert_feed_forward_length"
    shared: Literal["count", "length", "one"] | None = None
    shared_gated: bool = False
    dense: Literal["none", "leading", "interleaved"] = "none"
    biases: bool = False
    clamp: float | None = None
    up_offset: float = 0.0
    activation: Activation | None = None


def _root_of_head_size(_: Reader, n_heads: int, head_dim: int) -> float:
    return head_dim**-0.5


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`.

    `norm` and `qk_norm` lack only their eps; `qk_norm_shown` leaves it to the file whether there is one.
    `places` are the block's norms; `choose_residual` replaces them and `residual` by what the file has.
    `biases` are the parts of `BIASES` that always have one, `may_bias` those that have one if the file
    does. `layout` is that of the spec; where a file's q and k rows are reordered to be adjacent pairs,
    it is the `half` that they are reordered from. `still_every`: one layer in so many does not turn.
    `scale` gives the factor of the scores. `keys` are those of the multipliers and caps that it has.
    `tied`: the head always is the embedding; `untied`: it never is.

    What llama.cpp cannot do is refused in writing: to turn a part of a head (`turns_whole_heads`), heads
    that are not as wide as the model (`fills_width`), fewer heads for keys than for queries (`equal_heads`).
    """

    name: str
    activation: Activation = "silu"
    gated: bool = True
    norm: Norm = _RMS
    places: tuple[str, ...] = PRE
    residual: Residual = "serial"
    choose_residual: Literal["by_key", "by_second_norm", "by_mlp_norm"] | None = None
    biases: tuple[str, ...] = ()
    may_bias: tuple[str, ...] = ()
    positions: Literal["rotary", "learned", "alibi"] = "rotary"
    layout: Literal["half", "interleaved"] = "half"
    turns_whole_heads: bool = False
    fills_width: bool = False
    equal_heads: bool = False
    latent: bool = False
    qk_norm: HeadNorm | None = None
    qk_norm_shown: bool = False
    scale: Callable[[Reader, int, int], float] = _root_of_head_size
    windows: Windows = Windows()
    still_every: int | None = None
    temperature: QueryTemperature | None = None
    sinks: bool = False
    truncated_yarn: bool = True
    mixture: Mixture | None = None
    embed_scaled: bool = False
    embed_normed: bool = False
    head_bias: bool = False
    attn_softcap: float | None = None
    final_softcap: float | None = None
    keys: frozenset[str] = frozenset()
    logit_scale_divides: bool = False
    tied: bool = False
    untied: bool = False

    @property
    def norm_key(self) -> str:
        kind = "layer_norm_epsilon" if self.norm.kind == "layer" else "layer_norm_rms_epsilon"
        return f"attention.{kind}"


def alibi(n_heads: int, max_bias: float, base_first: bool = False) -> Alibi:
    """The slopes of llama.cpp: 2 ** (-max_bias · (h + 1) / n) for n heads, the largest power of two that
    there are heads for; the others take every other one of twice as many.

    Slopes have 32 bits: BLOOM's are powers of a base that has them too (`base_first`).
    """
    whole = 1 << (n_heads.bit_length() - 1)
    powers = [(whole, h + 1) for h in range(whole)] + [(2 * whole, 2 * h + 1) for h in range(n_heads - whole)]
    if base_first:
        return Alibi(tuple(_single(_single(2 ** (-max_bias / n)) ** power) for n, power in powers))
    return Alibi(tuple(_single(2 ** (-max_bias * power / n)) for n, power in powers))


def _single(value: float) -> float:
    """Rounded to 32 bits."""
    return struct.unpack("<f", struct.pack("<f", value))[0]
