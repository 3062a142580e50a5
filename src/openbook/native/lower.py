"""From a decoder to the list of operations that `runner.c` walks through for one token.

The list is derived from the spec block by block, in the order of `openbook.model.block`. Operations
between two barriers run in any order, or at once: they may neither read nor write what another writes.
What there is no operation for, `check_lowers` refuses by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from openbook.model import Decoder
from openbook.model.attention import Attention
from openbook.model.block import Block
from openbook.model.mlp import Mlp
from openbook.model.norm import Norm
from openbook.model.positions import LearnedPositions
from openbook.native.build import NativeUnavailableError
from openbook.spec.model import Block as BlockSpec
from openbook.spec.model import Chunk, Experts, LatentAttention, ModelSpec, Rope
from openbook.weights.blocks import Blocks

EMBED, NORM, LINEAR, ROTATE, STORE, ATTEND, ACTIVATE, GATE, ADD = range(9)
PACK, ATTEND_ROWS, ROTATE_ROWS, LINEAR_ROWS, NORM_BACK, GATE_BACK, ATTEND_BACK = range(9, 16)
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
BLOCKS = {"Q8_0": 2, "Q4_0": 3, "Q4_1": 4, "Q5_0": 5, "Q5_1": 6, "Q4_K": 7, "Q5_K": 8, "Q6_K": 9}
ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh")
ACCUMULATE, LAYERNORM, INTERLEAVED = 1, 2, 4

Pointer = ctypes.c_void_p


class Op(ctypes.Structure):
    """Mirrors `Op` in op.h."""

    _fields_ = (
        ("code", ctypes.c_int32), ("kind", ctypes.c_int32),
        ("barrier", ctypes.c_int32), ("dtype", ctypes.c_int32), ("matrix", ctypes.c_int32),
        ("n", ctypes.c_int64), ("width", ctypes.c_int64),
        ("layer", ctypes.c_int64), ("group", ctypes.c_int64), ("row_bytes", ctypes.c_int64),
        ("heads", ctypes.c_int64), ("rows", ctypes.c_int64), ("keys", ctypes.c_int64),
        ("a_row", ctypes.c_int64), ("a_head", ctypes.c_int64),
        ("kv_row", ctypes.c_int64), ("kv_head", ctypes.c_int64),
        ("flags", ctypes.c_int32), ("eps", ctypes.c_float), ("offset", ctypes.c_float),
        ("scale", ctypes.c_float), ("softcap", ctypes.c_float),
        ("weight", Pointer), ("bias", Pointer), ("a", Pointer), ("b", Pointer), ("dst", Pointer),
        ("grad", Pointer), ("dst2", Pointer), ("sums", Pointer), ("since", Pointer),
    )  # fmt: skip


def check_lowers(spec: ModelSpec) -> None:
    """Raises `NativeUnavailableError`, naming the feature, for a spec with one that the runner cannot do."""
    for block in spec.layers:
        for feature in _beyond(block):
            raise NativeUnavailableError(f"there is no native operation for {feature}")


def _beyond(block: BlockSpec) -> Iterator[str]:
    attn, mlp = block.attn, block.mlp
    if isinstance(mlp, Experts):
        yield "experts"
    elif mlp.clamp is not None or mlp.up_offset:
        yield "a clamped gate"
    if isinstance(attn, LatentAttention):
        yield "latent attention"
        return
    if isinstance(attn.window, Chunk):
        yield "attention in chunks"
    if attn.alibi is not None:
        yield "linear biases (ALiBi)"
    if attn.sinks:
        yield "attention sinks"
    if attn.clip_qkv is not None:
        yield "clipped queries, keys and values"
    if attn.temperature is not None:
        yield "a temperature of queries"
    if any(norm is not None and norm.over == "own" for norm in (attn.q_norm, attn.k_norm)):
        yield "a norm whose weights are each head's own"


class Lowering:
    """The op list of one decoder, with the buffers that it works in.

    `blocks` are quantised matrices that stand in for the parameters of the same names.
    `keep` holds every tensor whose address is in the list: as long as it lives, the addresses are good.
    """

    def __init__(self, decoder: Decoder, blocks: Mapping[str, Blocks]) -> None:
        check_lowers(decoder.spec)
        self.decoder = decoder
        self.dtype = decoder.embed.weight.dtype
        self._blocks = {id(p): blocks[name] for name, p in decoder.named_parameters() if name in blocks}
        self.keep: list[Tensor] = []
        self.ops: list[Op] = []
        spec = decoder.spec
        self.x = self._buffer(spec.d_model)
        self.position_vector = self._buffer(spec.d_model)
        self.turns = {rope: self._buffer(rope.dim) for rope in {b.attn.rope for b in spec.layers} if rope}
        self._embed()
        for n, layer in enumerate(decoder.layers):
            self._block(n, cast("Block", layer))
        self.head_input = self._norm(decoder.final_norm, self.x, spec.d_model)
        self._linear(decoder.head, self.head_input, None)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of matrices that one step reads."""
        return sum(op.n * op.row_bytes for op in self.ops if op.code == LINEAR)

    def _embed(self) -> None:
        positions = self.decoder.positions
        table = positions.weight[positions.offset :] if isinstance(positions, LearnedPositions) else None
        computed = positions is not None and table is None
        self._emit(
            EMBED, n=self.x.numel(), weight=self.decoder.embed.weight, scale=self.decoder.spec.embed_scale,
            bias=table, a=self.position_vector if computed else None, dst=self.x,
        )  # fmt: skip
        self._norm(self.decoder.embed_norm, self.x, self.x.numel(), into=self.x)

    def _block(self, n: int, block: Block) -> None:
        x, D = self.x, self.x.numel()
        normed = self._norm(block.attn_norm, x, D)
        if block.spec.residual == "serial":
            self._attend(n, block, normed)
            self._norm(block.attn_add_norm, x, D, into=x)
            self._feed_forward(block, self._norm(block.mlp_norm, x, D))
            self._norm(block.mlp_add_norm, x, D, into=x)
        else:  # both halves read x before either is added to it
            shared = block.spec.residual == "parallel_shared"
            mlp_input = normed if shared else self._norm(block.mlp_norm, x, D)
            attended, fed = self._buffer(D), self._buffer(D)
            self._attend(n, block, normed, attended)
            self._feed_forward(block, mlp_input, fed)
            self._emit(ADD, n=D, scale=block.spec.residual_scale, a=attended, dst=x)
            self._emit(ADD, n=D, scale=block.spec.residual_scale, a=fed, dst=x)
        self._norm(block.end_norm, x, D, into=x)

    def _attend(self, n: int, block: Block, x: Tensor, into: Tensor | None = None) -> None:
        self._sublayer(
            lambda y: self._attention(n, cast("Attention", block.attn), x, y),
            block,
            block.attn_out_norm,
            into,
        )

    def _feed_forward(self, block: Block, x: Tensor, into: Tensor | None = None) -> None:
        self._sublayer(lambda y: self._mlp(cast("Mlp", block.mlp), x, y), block, block.mlp_out_norm, into)

    def _sublayer(
        self, emit: Callable[[Tensor | None], None], block: Block, out_norm: nn.Module, into: Tensor | None
    ) -> None:
        """into = out_norm(sublayer). With nowhere to go, the result is added to the residual stream, by the
        sublayer's last matrix itself where neither a norm nor a multiplier stands between."""
        scale = block.spec.residual_scale
        if into is None and scale == 1 and not isinstance(out_norm, Norm):
            emit(None)
            return
        y = self._buffer(self.x.numel()) if into is None else into
        emit(y)
        self._norm(out_norm, y, y.numel(), into=y)
        if into is None:
            self._emit(ADD, n=y.numel(), scale=scale, a=y, dst=self.x)

    def _attention(self, n: int, attn: Attention, x: Tensor, into: Tensor | None) -> None:
        s = attn.spec
        K = s.head_dim
        q, k, v = (self._buffer(width) for width in (s.q_width, s.kv_width, s.kv_width))
        for project, y in ((attn.q, q), (attn.k, k), (attn.v, v)):
            self._linear(project, x, y, barrier=y is v)
        self._norm_heads(attn, q, k, after_rope=False)
        if s.rope is not None:
            self._rotate(s.rope, q, s.n_heads, K, barrier=False)
            self._rotate(s.rope, k, s.n_kv_heads, K)
        self._norm_heads(attn, q, k, after_rope=True)
        self._emit(STORE, n=s.n_kv_heads, width=K, layer=n, a=k, b=v)
        y = self._buffer(s.q_width)
        self._emit(
            ATTEND, n=s.n_heads, width=K, layer=n, group=s.n_heads // s.n_kv_heads,
            scale=s.scale, softcap=s.softcap or 0.0, a=q, dst=y,
        )  # fmt: skip
        self._linear(attn.o, y, into)

    def _norm_heads(self, attn: Attention, q: Tensor, k: Tensor, after_rope: bool) -> None:
        """Those of the norms of queries and keys that come before the rotation, or after it."""
        pairs = ((attn.q_norm, q), (attn.k_norm, k))
        due = [(norm, y) for norm, y in pairs if norm is not None and norm.after_rope == after_rope]
        for norm, y in due:
            width = attn.spec.head_dim if norm.over == "head" else y.numel()
            self._norm(norm, y, width, into=y, n=y.numel() // width, barrier=y is due[-1][1])

    def _mlp(self, mlp: Mlp, x: Tensor, into: Tensor | None) -> None:
        kind, F = ACTIVATIONS.index(mlp.spec.activation), mlp.spec.d_ff
        hidden, up = self._buffer(F), self._buffer(F)
        if mlp.gate is not None:
            self._linear(mlp.gate, x, hidden, barrier=False)
            self._linear(mlp.up, x, up)
            self._emit(GATE, kind=kind, n=F, a=hidden, b=up, dst=hidden)
        else:
            self._linear(mlp.up, x, up)
            self._emit(ACTIVATE, kind=kind, n=F, a=up, dst=hidden)
        self._linear(mlp.down, hidden, into)

    def _linear(self, linear: nn.Linear, x: Tensor, into: Tensor | None, barrier: bool = True) -> None:
        """into = W x + b; or, with nowhere to go, added to the residual stream.

        The head's result goes nowhere yet either: each run gives its own tensor for the logits.
        """
        if not isinstance(linear, nn.Linear):  # which may compute more than W x + b, as an adapted one does
            raise NativeUnavailableError(f"there is no native operation for a {type(linear).__name__}")
        head = self.decoder.spec.head if linear is self.decoder.head else None
        residual = into is None and head is None
        n, width = linear.weight.shape
        blocks = self._blocks.get(id(linear.weight))
        weight, matrix = (blocks.data, BLOCKS[blocks.type]) if blocks else (linear.weight, DTYPES[self.dtype])
        self._emit(
            LINEAR, n=n, width=width, flags=ACCUMULATE if residual else 0, barrier=barrier,
            weight=weight, matrix=matrix, row_bytes=weight.stride(0) * weight.itemsize,
            scale=head.scale if head else 1.0, softcap=head.softcap if head else None,
            bias=linear.bias, a=x, dst=self.x if residual else into,
        )  # fmt: skip

    def _norm(
        self,
        norm: nn.Module,
        x: Tensor,
        width: int,
        into: Tensor | None = None,
        n: int = 1,
        barrier: bool = True,
    ) -> Tensor:
        """The normalised x, in its own buffer unless told where; x itself where there is no norm."""
        if not isinstance(norm, Norm):
            return x
        y = self._buffer(x.numel()) if into is None else into
        self._emit(
            NORM, n=n, width=width, flags=LAYERNORM if norm.spec.kind == "layer" else 0, barrier=barrier,
            eps=norm.spec.eps, offset=norm.spec.offset, weight=norm.weight, bias=norm.bias, a=x, dst=y,
        )  # fmt: skip
        return y

    def _rotate(self, rope: Rope, x: Tensor, n: int, width: int, barrier: bool = True) -> None:
        flags = INTERLEAVED if rope.layout == "interleaved" else 0
        turn = self.turns[rope]
        self._emit(ROTATE, n=n, width=width, group=rope.dim, flags=flags, barrier=barrier, b=turn, dst=x)

    def _buffer(self, size: int) -> Tensor:
        return torch.full((size,), torch.nan)

    def _emit(self, code: int, *, barrier: bool = True, **fields: int | float | Tensor | None) -> None:
        op = Op(code=code, barrier=barrier, dtype=DTYPES[self.dtype], scale=1.0)
        for name, value in fields.items():
            if isinstance(value, Tensor):
                self.keep.append(value)
                setattr(op, name, value.data_ptr())
            elif value is not None:
                setattr(op, name, value)
        self.ops.append(op)
