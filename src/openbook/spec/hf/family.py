"""The row of a family: all that it says, as values, and nothing that it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from openbook.spec.hf.attention import Heads, LatentHeads
from openbook.spec.hf.feedforward import PLAIN_FEED_FORWARD, Dense, Mixture
from openbook.spec.hf.term import ALWAYS, NONE, ONE, Keys, Known, Term, constant, either
from openbook.spec.model import BLOCK_NORMS, Block, Learned, ModelSpec, Norm
from openbook.spec.reader import Reader

# --- norms and residuals ------------------------------------------------------------------------


def norm(prototype: Norm) -> Term[Norm]:
    """A norm of this kind, with the config's epsilon."""
    return Term(
        lambda c, known: replace(prototype, eps=c.number("norm_eps")),
        lambda value, spec: {"norm_eps": float(value.eps)},
    )


def _read_opt_norm(c: Reader, known: Known) -> Norm:
    affine = c.flag("layer_norm_elementwise_affine")
    return Norm("layer", eps=1e-5, weight=affine, bias=affine)


RMS = norm(Norm("rms"))
LAYER = norm(Norm("layer", bias=True))
LAYER_WITHOUT_BIAS = norm(Norm("layer"))
LAYER_WITHOUT_WEIGHTS = constant(Norm("layer", eps=1e-5, weight=False))
OPT_NORM = Term(_read_opt_norm, lambda value, spec: {"layer_norm_elementwise_affine": value.weight})


@dataclass(frozen=True)
class Arrangement:
    """How a block adds to the stream, and where it has norms."""

    residual: Literal["serial", "parallel", "parallel_shared"]
    norms: frozenset[str]


def _arranged(residual: Literal["serial", "parallel", "parallel_shared"], *norms: str) -> Arrangement:
    return Arrangement(residual, frozenset(norms))


PRE = _arranged("serial", "attn_norm", "mlp_norm")
POST = _arranged("serial", "attn_add_norm", "mlp_add_norm")
OUT = _arranged("serial", "attn_out_norm", "mlp_out_norm")
SANDWICH = _arranged("serial", "attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
PARALLEL = _arranged("parallel", "attn_norm", "mlp_norm")
PARALLEL_SHARED = _arranged("parallel_shared", "attn_norm")


def _read_falcon(c: Reader, known: Known) -> Arrangement:
    """The newer architecture is parallel with two norms or one; the older is parallel with one, or serial."""
    parallel, n_norms = c.flag("parallel_attn"), c.maybe_integer("num_ln_in_parallel_attn", most=2)
    if c.flag("new_decoder_architecture"):
        if not parallel:
            c.fail("parallel_attn", "must be true with new_decoder_architecture")
        return PARALLEL_SHARED if n_norms == 1 else PARALLEL
    if parallel and n_norms == 2:
        c.fail("num_ln_in_parallel_attn", "must be 1 without new_decoder_architecture")
    return PARALLEL_SHARED if parallel else PRE


def _write_falcon(value: Arrangement, spec: ModelSpec) -> Keys:
    keys: Keys = {"parallel_attn": value.residual != "serial"}
    n_norms = {"parallel": 2, "parallel_shared": 1}.get(value.residual)
    return keys | ({"num_ln_in_parallel_attn": n_norms} if n_norms else {})


FALCON_ARRANGEMENT = Term(_read_falcon, _write_falcon)
OPT_ARRANGEMENT = either("do_layer_norm_before", PRE, POST)


def _read_opt_final_norm(c: Reader, known: Known) -> bool:
    removed = c.flag("_remove_final_layer_norm")
    return c.flag("do_layer_norm_before") and not removed


OPT_FINAL_NORM = Term[bool](
    _read_opt_final_norm,
    lambda value, spec: {"_remove_final_layer_norm": not value},
)


def arrangement_of(block: Block) -> Arrangement:
    return _arranged(block.residual, *(place for place in BLOCK_NORMS if getattr(block, place) is not None))


# --- positions ----------------------------------------------------------------------------------

MAX_POSITIONS = Term[int](
    lambda c, known: c.integer("max_position_embeddings"),
    lambda value, spec: {"max_position_embeddings": value},
)


def learned(offset: int = 0) -> Term[Learned | None]:
    return Term(lambda c, known: Learned(known.max_positions, offset), lambda value, spec: {})


ROOT_OF_WIDTH = Term[float](lambda c, known: known.d_model**0.5, lambda value, spec: {})

ALWAYS_PRE, PLAIN_HEADS = constant(PRE), Heads()

# --- the row ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One model type. What a row leaves out is as in llama.

    `defaults` are its config's keys with transformers' defaults. `spelling` translates the words of
    llama's config that the terms use into this one's, `aliases` are further keys for the same. `objects`
    are keys that hold an object of keys, which are written "object.key" here. `unread` are keys that
    published files have and transformers does not read: the values that agree with what it does, or
    None where any does. `only` are those that it reads and no spec says: the values without effect, and
    what the others would mean. `same` are keys that must be null or the model's width.
    `needs_whole_heads`: transformers refuses a width that is not a multiple of the number of heads, even
    where `head_dim` is given.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    spelling: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    unread: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    only: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    same: tuple[str, ...] = ()
    needs_whole_heads: bool = False

    norm: Term[Norm] = RMS
    arrangement: Term[Arrangement] = ALWAYS_PRE
    attention: Heads | LatentHeads = PLAIN_HEADS
    mlp: Dense | Mixture = PLAIN_FEED_FORWARD
    residual_scale: Term[float] = ONE

    max_positions: Term[int] = MAX_POSITIONS
    positions: Term[Learned | None] = NONE
    embed_scale: Term[float] = ONE
    embed_norm: bool = False
    final_norm: Term[bool] = ALWAYS
    head_bias: bool = False
    head_scale: Term[float] = ONE
    head_softcap: Term[float | None] = NONE
