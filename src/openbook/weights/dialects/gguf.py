"""The names of llama.cpp's files.

Nearly all architectures use the same names, so there is one table, and each architecture is that table
with a few rows replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from openbook.spec.model import Attention, Block, LatentAttention
from openbook.weights.dialects.table import Dialect, HeadRows, Row, Split
from openbook.weights.dialects.transforms import Identity, RowsPermuted, Shape, Transform, Transposed

# --- arrangements of GGUF alone -----------------------------------------------------------------


@dataclass(frozen=True)
class Raised:
    """A norm's weight stored with the 1 added that Gemma's and Nemotron's norms add to it anyway.

    Taking it off again is exact in fp32 for every stored value of at least 0.5, and for all that were
    made by adding 1 to a bf16 or fp16 weight that is no smaller than 2 ** -13. Adding has to be done in fp32.
    """

    by: float = 1.0

    def stored_shape(self, shape: Shape) -> Shape:
        return shape

    def load(self, stored: Any) -> Any:
        return stored - self.by

    def store(self, ours: Any) -> Any:
        return ours + self.by


@dataclass(frozen=True)
class AsVector:
    """A matrix of one row stored as that row."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape[1:]

    def load(self, stored: Any) -> Any:
        return stored.reshape(1, *stored.shape)

    def store(self, ours: Any) -> Any:
        return ours.reshape(ours.shape[1:])


_RAISED = Raised()


def _query_rows(block: Block) -> Transform:
    return RowsPermuted(block.attn.n_heads)


def _key_rows(block: Block) -> Transform:
    return RowsPermuted(_attention(block).n_kv_heads)


def _attention(block: Block) -> Attention:
    if not isinstance(block.attn, Attention):
        raise TypeError("latent attention has no key heads")
    return block.attn


# --- the one table ------------------------------------------------------------------------------

_B, _L = "blk.{n}.", "layers.{n}."

_ROWS = (
    Row("embed", "token_embd"),
    Row("positions", "position_embd"),
    Row("embed_norm", "token_embd_norm"),
    Row(f"{_L}attn_norm", f"{_B}attn_norm"),
    Row(f"{_L}attn.q", f"{_B}attn_q"),
    Row(f"{_L}attn.k", f"{_B}attn_k"),
    Row(f"{_L}attn.v", f"{_B}attn_v"),
    Row(f"{_L}attn.o", f"{_B}attn_output"),
    Row(f"{_L}attn.q_norm", f"{_B}attn_q_norm"),
    Row(f"{_L}attn.k_norm", f"{_B}attn_k_norm"),
    Row(f"{_L}attn.sinks", f"{_B}attn_sinks.weight"),
    Row(f"{_L}attn_out_norm", f"{_B}post_attention_norm"),
    Row(f"{_L}mlp_norm", f"{_B}ffn_norm"),
    Row(f"{_L}mlp.gate", f"{_B}ffn_gate"),
    Row(f"{_L}mlp.up", f"{_B}ffn_up"),
    Row(f"{_L}mlp.down", f"{_B}ffn_down"),
    Row(f"{_L}mlp.router", f"{_B}ffn_gate_inp"),
    Row(f"{_L}mlp.router.correction", f"{_B}exp_probs_b.bias"),
    Row(f"{_L}mlp.experts.gate", f"{_B}ffn_gate_exps"),
    Row(f"{_L}mlp.experts.up", f"{_B}ffn_up_exps"),
    Row(f"{_L}mlp.experts.down", f"{_B}ffn_down_exps"),
    Row(f"{_L}mlp.shared.gate", f"{_B}ffn_gate_shexp"),
    Row(f"{_L}mlp.shared.up", f"{_B}ffn_up_shexp"),
    Row(f"{_L}mlp.shared.down", f"{_B}ffn_down_shexp"),
    Row(f"{_L}mlp.shared_gate", f"{_B}ffn_gate_inp_shexp", AsVector()),
    Row(f"{_L}mlp_out_norm", f"{_B}post_ffw_norm"),
    Row("final_norm", "output_norm"),
    Row("head", "output"),
)

_IGNORED = r"(blk\.\d+\.)?rope_(freqs|factors_(long|short))\.weight|blk\.\d+\.attn_rot_embd\.weight"
"""Rotary tables. Where they do change the model, the spec already holds their numbers."""

_DRAFTS = r"(blk\.\d+\.)nextn\..+"
"""In a layer that guesses the token after the next."""


def _replaced(rows: Iterable[Row | Split], *changed: Row | Split) -> tuple[Row | Split, ...]:
    """The rows with some replaced by others of the same modules, or by one of several together."""
    gone = {module for row in changed for module in row.modules}
    return (*(row for row in rows if gone.isdisjoint(row.modules)), *changed)


_PERMUTED = (
    Row(f"{_L}attn.q", f"{_B}attn_q", _query_rows),
    Row(f"{_L}attn.k", f"{_B}attn_k", _key_rows),
)
"""Of architectures that rotate neighbours, made of models that rotate halves."""

_FUSED_QKV = (Row((f"{_L}attn.q", f"{_L}attn.k", f"{_L}attn.v"), f"{_B}attn_qkv"),)
_FUSED_GATE_UP = (Row((f"{_L}mlp.gate", f"{_L}mlp.up"), f"{_B}ffn_up"),)
_MLP_NORM_AFTER_ATTENTION = (Row(f"{_L}mlp_norm", f"{_B}post_attention_norm"),)
"""Of architectures without a norm of attention's result, whose name it has."""

_NORMS = {
    "attn_norm": "attn_norm",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn_out_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_out_norm": "post_ffw_norm",
}


def _raised_norms() -> Iterable[Row]:
    """The weights of all norms; their biases, if they have any, are stored as they are."""
    names = {f"{_L}{ours}": f"{_B}{theirs}" for ours, theirs in _NORMS.items()}
    for ours, theirs in {**names, "final_norm": "output_norm"}.items():
        yield Row(f"{ours}.weight", f"{theirs}.weight", _RAISED)
        yield Row(f"{ours}.bias", f"{theirs}.bias")


def _norms_of_falcon() -> Iterable[Row]:
    """Of two norms, the one before attention has the second name."""

    def named(first: str, second: str) -> Callable[[Block], str]:
        return lambda block: f"{_B}{second if block.residual == 'parallel' else first}"

    yield Row(f"{_L}attn_norm", named("attn_norm", "attn_norm_2"))
    yield Row(f"{_L}mlp_norm", named("ffn_norm", "attn_norm"))


# --- per-expert files, and latent attention -----------------------------------------------------

_ONE_BY_ONE = tuple(
    Row(f"{_L}mlp.experts.{part}.weight", f"{_B}ffn_{part}.{{i}}.weight") for part in ("gate", "up", "down")
)
"""Files of early 2024 have a tensor for each expert."""


def _keys_and_values(block: Block) -> tuple[tuple[str, HeadRows, Transform], ...]:
    """llama.cpp attends in the latent space: there keys and values are made apart, and keys the other way."""
    attn = block.attn
    if not isinstance(attn, LatentAttention):
        raise TypeError("attention that is not latent makes its keys and values at once")
    keys = HeadRows(attn.n_heads, 0, attn.nope_dim)
    values = HeadRows(attn.n_heads, attn.nope_dim, attn.nope_dim + attn.v_dim)
    return (f"{_B}attn_k_b", keys, Transposed()), (f"{_B}attn_v_b", values, Identity())


_LATENT = (
    Row(f"{_L}attn.q_down", f"{_B}attn_q_a"),
    Row(f"{_L}attn.q_norm", f"{_B}attn_q_a_norm"),
    Row(f"{_L}attn.q_up", f"{_B}attn_q_b"),
    Row(f"{_L}attn.kv_down", f"{_B}attn_kv_a_mqa"),
    Row(f"{_L}attn.kv_norm", f"{_B}attn_kv_a_norm"),
    Split(f"{_L}attn.kv_up", _keys_and_values),
)

_KEYS_AND_VALUES_TOGETHER = Row(f"{_L}attn.kv_up", f"{_B}attn_kv_b")
"""In files from before it did."""


def _dialect(name: str, *changed: Row | Split, also: tuple[Dialect, ...] = ()) -> Dialect:
    return Dialect(name, _replaced(_ROWS, *changed), ignored=_IGNORED, drafts=_DRAFTS, also=also)


def _with_experts(name: str, *changed: Row) -> Dialect:
    whole = _dialect(name, *changed)
    apart = replace(whole, rows=_replaced(whole.rows, *_ONE_BY_ONE))
    return replace(whole, also=(apart,))


def _fused(name: str, *changed: Row) -> Dialect:
    return _dialect(name, *_FUSED_QKV, *changed)


def _with_norm_after_attention(name: str) -> Dialect:
    whole = _dialect(name, *_MLP_NORM_AFTER_ATTENTION)
    return replace(whole, rows=tuple(row for row in whole.rows if row.ours != f"{_L}attn_out_norm"))


_PLAIN = _dialect("standard")

GGUF: Mapping[str, Dialect] = {
    "bloom": _fused("bloom"),
    "chatglm": _dialect("chatglm", *_FUSED_GATE_UP),
    "cohere2": _PLAIN,
    "command-r": _PLAIN,
    "deepseek2": _dialect(
        "deepseek2", *_LATENT, also=(_dialect("deepseek2", *_replaced(_LATENT, _KEYS_AND_VALUES_TOGETHER)),)
    ),
    "ernie4_5": _PLAIN,
    "exaone4": _PLAIN,
    "falcon": _fused("falcon", *_norms_of_falcon()),
    "gemma": _dialect("gemma", *_raised_norms()),
    "gemma2": _dialect("gemma2", *_raised_norms()),
    "gemma3": _dialect("gemma3", *_raised_norms()),
    "glm4": _dialect("glm4", *_FUSED_GATE_UP),
    "glm4moe": _with_norm_after_attention("glm4moe"),
    "gpt-oss": _with_norm_after_attention("gpt-oss"),
    "gpt2": _fused("gpt2"),
    "gptneox": _fused("gptneox"),
    "granite": _dialect("granite", *_PERMUTED),
    "granitemoe": _dialect("granitemoe", *_PERMUTED),
    "hunyuan-dense": _PLAIN,
    "llama": _with_experts("llama", *_PERMUTED),
    "llama4": _PLAIN,
    "minimax-m2": _PLAIN,
    "mpt": _fused("mpt"),
    "nemotron": _dialect("nemotron", *_raised_norms()),
    "olmo": _dialect("olmo", *_PERMUTED),
    "olmo2": _PLAIN,
    "olmoe": _PLAIN,
    "phi2": _dialect("phi2", also=(_fused("phi2"),)),
    "phi3": _fused("phi3", *_FUSED_GATE_UP),
    "qwen2": _PLAIN,
    "qwen2moe": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3moe": _PLAIN,
    "seed_oss": _with_norm_after_attention("seed_oss"),
    "smollm3": _dialect("smollm3", *_PERMUTED),
    "stablelm": _PLAIN,
    "starcoder": _fused("starcoder"),
    "starcoder2": _PLAIN,
}
"""By `general.architecture`. Mistral's and Mixtral's files call themselves llama."""
