"""The names of llama.cpp's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openbook.weights.dialects.table import Dialect, Row
from openbook.weights.dialects.transforms import RowsPermuted, Shape

_GGUF_IGNORED = r"(blk\.\d+\.)?rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight"
"""Rotary tables. `rope_freqs` does change the model: the spec already holds it as FrequencyDivisors."""

_GGUF_GPT2 = Dialect(
    name="gpt2",
    ignored=_GGUF_IGNORED,
    rows=(
        Row("embed", "token_embd"),
        Row("positions", "position_embd"),
        Row("layers.{n}.attn_norm", "blk.{n}.attn_norm"),
        Row(("layers.{n}.attn.q", "layers.{n}.attn.k", "layers.{n}.attn.v"), "blk.{n}.attn_qkv"),
        Row("layers.{n}.attn.o", "blk.{n}.attn_output"),
        Row("layers.{n}.mlp_norm", "blk.{n}.ffn_norm"),
        Row("layers.{n}.mlp.up", "blk.{n}.ffn_up"),
        Row("layers.{n}.mlp.down", "blk.{n}.ffn_down"),
        Row("final_norm", "output_norm"),
        Row("head", "output"),
    ),
)

_GGUF_QWEN = Dialect(
    name="qwen",
    ignored=_GGUF_IGNORED,
    rows=(
        Row("embed", "token_embd"),
        Row("layers.{n}.attn_norm", "blk.{n}.attn_norm"),
        Row("layers.{n}.attn.q", "blk.{n}.attn_q"),
        Row("layers.{n}.attn.k", "blk.{n}.attn_k"),
        Row("layers.{n}.attn.v", "blk.{n}.attn_v"),
        Row("layers.{n}.attn.o", "blk.{n}.attn_output"),
        Row("layers.{n}.attn.q_norm", "blk.{n}.attn_q_norm"),
        Row("layers.{n}.attn.k_norm", "blk.{n}.attn_k_norm"),
        Row("layers.{n}.mlp_norm", "blk.{n}.ffn_norm"),
        Row("layers.{n}.mlp.gate", "blk.{n}.ffn_gate"),
        Row("layers.{n}.mlp.up", "blk.{n}.ffn_up"),
        Row("layers.{n}.mlp.down", "blk.{n}.ffn_down"),
        Row("final_norm", "output_norm"),
        Row("head", "output"),
    ),
)


def _with_permuted_rows(dialect: Dialect, name: str) -> Dialect:
    """The same names, with q and k stored as llama.cpp's llama wants them, each by its own head count."""
    permuted = {
        "layers.{n}.attn.q": lambda block: RowsPermuted(block.attn.n_heads),
        "layers.{n}.attn.k": lambda block: RowsPermuted(block.attn.n_kv_heads),
    }
    rows = (Row(row.ours, row.theirs, permuted.get(row.modules[0], row.transform)) for row in dialect.rows)
    return Dialect(name, tuple(rows), dialect.base, dialect.ignored)


@dataclass(frozen=True)
class Raised:
    """A norm's weight stored with the 1 added that Gemma's norms add to it anyway.

    The difference is exact in fp32 for every stored value of at least 0.5, and for all that were made by
    adding 1 to a bf16 or fp16 weight that is no smaller than 2 ** -13. Adding has to be done in fp32.
    """

    by: float = 1.0

    def stored_shape(self, shape: Shape) -> Shape:
        return shape

    def load(self, stored: Any) -> Any:
        return stored - self.by

    def store(self, ours: Any) -> Any:
        return ours + self.by


_RAISED = Raised()

_GGUF_GEMMA3 = Dialect(
    name="gemma3",
    ignored=_GGUF_IGNORED,
    rows=(
        Row("embed", "token_embd"),
        Row("layers.{n}.attn_norm", "blk.{n}.attn_norm", _RAISED),
        Row("layers.{n}.attn.q", "blk.{n}.attn_q"),
        Row("layers.{n}.attn.k", "blk.{n}.attn_k"),
        Row("layers.{n}.attn.v", "blk.{n}.attn_v"),
        Row("layers.{n}.attn.o", "blk.{n}.attn_output"),
        Row("layers.{n}.attn.q_norm", "blk.{n}.attn_q_norm", _RAISED),
        Row("layers.{n}.attn.k_norm", "blk.{n}.attn_k_norm", _RAISED),
        Row("layers.{n}.attn_out_norm", "blk.{n}.post_attention_norm", _RAISED),
        Row("layers.{n}.mlp_norm", "blk.{n}.ffn_norm", _RAISED),
        Row("layers.{n}.mlp.gate", "blk.{n}.ffn_gate"),
        Row("layers.{n}.mlp.up", "blk.{n}.ffn_up"),
        Row("layers.{n}.mlp.down", "blk.{n}.ffn_down"),
        Row("layers.{n}.mlp_out_norm", "blk.{n}.post_ffw_norm", _RAISED),
        Row("final_norm", "output_norm", _RAISED),
        Row("head", "output"),
    ),
)

_GGUF_LLAMA = _with_permuted_rows(_GGUF_QWEN, "llama")

GGUF: dict[str, Dialect] = {
    "gemma3": _GGUF_GEMMA3,
    "gpt2": _GGUF_GPT2,
    "llama": _GGUF_LLAMA,
    "qwen2": _GGUF_QWEN,
    "qwen3": _GGUF_QWEN,
}
"""By `general.architecture`. Mistral's files call themselves llama."""
