"""What each checkpoint format calls our parameters, and how it arranges their elements.

A table row joins the name of a module of ours with the name of the container's tensor. Loading reads
the table from right to left, saving from left to right: there is one table, so the two cannot disagree.
The suffix (`.weight`, `.bias`) is the same on both sides and is left out; `{n}` is the layer.

A row may name several modules: their rows then lie one after another in one stored tensor (GPT-2's
`c_attn` holds q, k and v). A `Transform` says how the stored elements are arranged.

Nothing here computes: arrays are only sliced, reshaped and have their axes swapped, so numpy arrays and
torch tensors both pass through, and no framework is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from openbook.spec.model import Block, ModelSpec
from openbook.spec.reader import UnsupportedError

Shape = tuple[int, ...]


# --- arrangements -------------------------------------------------------------------------------


class Transform(Protocol):
    """A rearrangement of elements and its inverse. A vector (a bias) is a matrix without columns."""

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape in the container of a parameter of this shape."""
        ...

    def load(self, stored: Any, /) -> Any:
        """Container's arrangement → ours."""
        ...

    def store(self, ours: Any, /) -> Any:
        """Our arrangement → the container's."""
        ...


@dataclass(frozen=True)
class Identity:
    """Stored as we hold it, matrices (out, in)."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape

    def load(self, stored: Any) -> Any:
        return stored

    def store(self, ours: Any) -> Any:
        return ours


@dataclass(frozen=True)
class Transposed:
    """Matrices stored (in, out), as GPT-2's Conv1D does. A square matrix hides a forgotten transpose."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def load(self, stored: Any) -> Any:
        return stored.swapaxes(0, 1) if stored.ndim == 2 else stored

    store = load


@dataclass(frozen=True)
class RowsPermuted:
    """Rotary pairs made neighbours: llama.cpp's llama rotates rows 2i, 2i+1 where we rotate i, i+K/2.

    Within each head the rows [0..7] are stored as [0, 4, 1, 5, 2, 6, 3, 7]. `heads` is the number of
    heads of this very tensor: the key/value heads for a key.
    """

    heads: int

    def stored_shape(self, shape: Shape) -> Shape:
        return shape

    def load(self, stored: Any) -> Any:
        return self._swap(stored, (-1, 2))

    def store(self, ours: Any) -> Any:
        return self._swap(ours, (2, -1))

    def _swap(self, rows: Any, pairs: tuple[int, int]) -> Any:
        split = rows.reshape(self.heads, *pairs, *rows.shape[1:])
        return split.swapaxes(1, 2).reshape(rows.shape)


# --- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of a table: our modules, the container's tensor, the arrangement (fixed, or by block)."""

    ours: str | tuple[str, ...]
    theirs: str
    transform: Transform | Callable[[Block], Transform] = Identity()

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class Dialect:
    """A table and what surrounds it.

    `base` is the prefix that a file may lack throughout (a checkpoint of the model without its head).
    `ignored` matches tensors that hold no weights: masks and tables that a program can compute.
    """

    name: str
    rows: tuple[Row, ...]
    base: str = ""
    ignored: str = r"(?!)"

    def ignores(self, stored: str) -> bool:
        """Whether a file may hold this tensor although the model has no parameter for it."""
        return re.fullmatch(self.ignored, stored) is not None


_TRANSPOSED = Transposed()

_HF_GPT2 = Dialect(
    name="gpt2",
    base="transformer.",
    ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask, not c_attn.bias
    rows=(
        Row("embed", "transformer.wte"),
        Row("positions", "transformer.wpe"),
        Row("layers.{n}.attn_norm", "transformer.h.{n}.ln_1"),
        Row(
            ("layers.{n}.attn.q", "layers.{n}.attn.k", "layers.{n}.attn.v"),
            "transformer.h.{n}.attn.c_attn",
            _TRANSPOSED,
        ),
        Row("layers.{n}.attn.o", "transformer.h.{n}.attn.c_proj", _TRANSPOSED),
        Row("layers.{n}.mlp_norm", "transformer.h.{n}.ln_2"),
        Row("layers.{n}.mlp.up", "transformer.h.{n}.mlp.c_fc", _TRANSPOSED),
        Row("layers.{n}.mlp.down", "transformer.h.{n}.mlp.c_proj", _TRANSPOSED),
        Row("final_norm", "transformer.ln_f"),
        Row("head", "lm_head"),
    ),
)

_HF_LLAMA = Dialect(
    name="llama",
    base="model.",
    ignored=r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    rows=(
        Row("embed", "model.embed_tokens"),
        Row("layers.{n}.attn_norm", "model.layers.{n}.input_layernorm"),
        Row("layers.{n}.attn.q", "model.layers.{n}.self_attn.q_proj"),
        Row("layers.{n}.attn.k", "model.layers.{n}.self_attn.k_proj"),
        Row("layers.{n}.attn.v", "model.layers.{n}.self_attn.v_proj"),
        Row("layers.{n}.attn.o", "model.layers.{n}.self_attn.o_proj"),
        Row("layers.{n}.attn.q_norm", "model.layers.{n}.self_attn.q_norm"),
        Row("layers.{n}.attn.k_norm", "model.layers.{n}.self_attn.k_norm"),
        Row("layers.{n}.mlp_norm", "model.layers.{n}.post_attention_layernorm"),
        Row("layers.{n}.mlp.gate", "model.layers.{n}.mlp.gate_proj"),
        Row("layers.{n}.mlp.up", "model.layers.{n}.mlp.up_proj"),
        Row("layers.{n}.mlp.down", "model.layers.{n}.mlp.down_proj"),
        Row("final_norm", "model.norm"),
        Row("head", "lm_head"),
    ),
)

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


_GGUF_LLAMA = _with_permuted_rows(_GGUF_QWEN, "llama")

HF: dict[str, Dialect] = {
    "gpt2": _HF_GPT2,
    "llama": _HF_LLAMA,
    "mistral": _HF_LLAMA,
    "qwen2": _HF_LLAMA,
    "qwen3": _HF_LLAMA,
}
"""By `model_type` of config.json."""

GGUF: dict[str, Dialect] = {
    "gpt2": _GGUF_GPT2,
    "llama": _GGUF_LLAMA,
    "qwen2": _GGUF_QWEN,
    "qwen3": _GGUF_QWEN,
}
"""By `general.architecture`. Mistral's files call themselves llama."""


# --- a table applied to one model ---------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One stored tensor and the parameters it holds, whose rows follow each other."""

    stored: str
    shape: Shape
    parameters: tuple[str, ...]
    rows: tuple[int, ...]
    transform: Transform

    def load(self, stored: Any) -> Iterator[tuple[str, Any]]:
        """Each parameter's name and its elements in our arrangement, as views where strides allow it."""
        joined = self.transform.load(stored)
        start = 0
        for name, rows in zip(self.parameters, self.rows, strict=True):
            yield name, joined[start : start + rows]
            start += rows


def places(spec: ModelSpec, shapes: Mapping[str, Shape], dialect: Dialect) -> list[Place]:
    """Where every parameter of the model lies in a file of this dialect, in the order of `shapes`.

    `shapes` are the ledger's rows, name → shape. Raises `UnsupportedError` for a parameter that the dialect
    has no name for: such a model cannot be kept in such a file.
    """
    row_of = {module: row for row in dialect.rows for module in row.modules}
    found: list[Place] = []
    done: set[str] = set()
    for name in shapes:
        if name in done:
            continue
        module, _, suffix = name.rpartition(".")
        pattern, layer = _generic(module)
        row = row_of.get(pattern)
        if row is None:
            raise UnsupportedError(
                f"the {dialect.name} format has no tensor for {name}, so it cannot hold this model"
            )
        names = tuple(f"{m.replace('{n}', str(layer))}.{suffix}" for m in row.modules)
        absent = [n for n in names if n not in shapes]
        if absent:
            raise UnsupportedError(
                f"the {dialect.name} format keeps {', '.join(names)} in one tensor, but this model has no "
                f"{', '.join(absent)}"
            )
        transform = row.transform
        if callable(transform):
            transform = transform(spec.layers[layer])
        found.append(
            Place(
                stored=f"{row.theirs.replace('{n}', str(layer))}.{suffix}",
                shape=transform.stored_shape(_joined(*(shapes[n] for n in names))),
                parameters=names,
                rows=tuple(shapes[n][0] for n in names),
                transform=transform,
            )
        )
        done.update(names)
    return found


def _generic(module: str) -> tuple[str, int]:
    """'layers.3.attn.q' → ('layers.{n}.attn.q', 3); a module outside the layers keeps its name."""
    match = re.match(r"layers\.(\d+)\.", module)
    return (f"layers.{{n}}.{module[match.end() :]}", int(match[1])) if match else (module, -1)


def _joined(*shapes: Shape) -> Shape:
    """The shape of these parameters laid one after another along their rows."""
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
