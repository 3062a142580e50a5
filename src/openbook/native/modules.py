"""A prompt's norms, rotations, attention and gates in C, and the experts of a few tokens: modules that stand
in for the model's own.

Each has the class it replaces as its base, and does what that does wherever C does not: with a gradient,
for a few tokens, in another dtype or layout.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from openbook.model import Decoder
from openbook.model.attention import FusedCore, Mask
from openbook.model.experts import FeedForwards, in_order, looped
from openbook.model.mlp import Activation
from openbook.model.norm import HeadNorm, Norm
from openbook.model.positions import Rotate, Rotation
from openbook.native.build import library
from openbook.native.lower import (
    ACTIVATIONS,
    ATTEND_ROWS,
    DTYPES,
    GATE,
    LAYERNORM,
    LINEAR_ROWS,
    NORM,
    PACK,
    ROTATE_ROWS,
    Op,
)
from openbook.native.step import Step, run

TILE, QUERIES = 32, 8
"""As in prompt.h: keys in a tile, queries at a time."""

LEAST_ROWS, MOST_KEYS = 16, 16_384
"""Fewer tokens are not worth the call; more keys do not fit a worker's stack."""

MOST_ROWS = {torch.float32: 16, torch.bfloat16: 8}
"""Tokens of one expert, on average. Of more, PyTorch's own products are as fast."""


def use_native_modules(decoder: Decoder) -> None:
    """Gives every layer the native modules in place of its own."""
    for name, module in list(decoder.named_modules()):
        match module:
            case FusedCore():
                decoder.set_submodule(name, NativeCore())
            case HeadNorm():
                pass  # its heads do not lie side by side in a prompt
            case Rotate() if module.rope.layout == "half":
                decoder.set_submodule(name, NativeRotate(module.rope))
            case Activation() if module.clamp is None and not module.up_offset:
                decoder.set_submodule(name, NativeActivation(module.kind))
            case Norm():
                decoder.set_submodule(name, NativeNorm(module))
            case FeedForwards():
                module.way = native_experts


def _suits(*tensors: Tensor) -> bool:
    """Whether C can take these, all of one dtype, as they are."""
    first = tensors[0]
    return (
        not torch.is_grad_enabled()
        and first.dtype in DTYPES
        and all(x.device.type == "cpu" and x.dtype == first.dtype and x.stride(-1) == 1 for x in tensors)
    )


def _run(*ops: Op) -> None:
    """On the threads that PyTorch's matrix products before and after use as well."""
    run(library(), (Op * len(ops))(*ops), 0, Step(with_openmp=1))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeNorm(Norm):
    """A norm of the residual stream, with the parameters of the one it replaces."""

    def __init__(self, norm: Norm) -> None:
        nn.Module.__init__(self)
        self.spec, self.weight, self.bias = norm.spec, norm.weight, norm.bias

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        parameters = [p for p in (self.weight, self.bias) if p is not None]
        suits = x.dtype == torch.float32 and rows >= LEAST_ROWS and x.is_contiguous() and _suits(x)
        if not suits or (parameters and not _suits(*parameters)):
            return super().forward(x)
        y = torch.empty_like(x)
        op = Op(
            code=NORM, n=rows, width=width, barrier=1, dtype=DTYPES[parameters[0].dtype] if parameters else 0,
            flags=LAYERNORM if self.spec.kind == "layer" else 0, eps=self.spec.eps, offset=self.spec.offset,
            weight=_address(self.weight), bias=_address(self.bias), a=x.data_ptr(), dst=y.data_ptr(),
        )  # fmt: skip
        _run(op)
        return y


class NativeRotate(Rotate):
    """Rotates the heads of a projection's result, which lie beside each other, into new memory."""

    def forward(self, x: Float[Tensor, "B H T K"], by: Rotation) -> Float[Tensor, "B H T K"]:
        B, H, T, K = x.shape
        rows = x.transpose(1, 2)
        if B > 1 or T < LEAST_ROWS or not (_suits(x) and rows.is_contiguous()):
            return super().forward(x, by)
        y = torch.empty_like(rows)
        angles = torch.cat((by.cos[0, 0], by.sin[0, 0]))
        op = Op(
            code=ROTATE_ROWS, n=T, width=K, heads=H, group=self.rope.dim, dtype=DTYPES[x.dtype], barrier=1,
            a=rows.data_ptr(), b=angles.data_ptr(), dst=y.data_ptr(),
        )  # fmt: skip
        _run(op)
        return y.transpose(1, 2)


class NativeActivation(Activation):
    """act(gate) · x in one pass."""

    def forward(
        self, x: Float[Tensor, "*batch F"], gate: Float[Tensor, "*batch F"] | None = None
    ) -> Float[Tensor, "*batch F"]:
        wide = gate is not None and x.numel() >= LEAST_ROWS * x.shape[-1]
        if gate is None or not (wide and _suits(x, gate) and x.is_contiguous() and gate.is_contiguous()):
            return super().forward(x, gate)
        y = torch.empty_like(x)
        op = Op(
            code=GATE, kind=ACTIVATIONS.index(self.kind), n=x.numel(), matrix=DTYPES[x.dtype], barrier=1,
            a=gate.data_ptr(), b=x.data_ptr(), dst=y.data_ptr(),
        )  # fmt: skip
        _run(op)
        return y


class NativeCore(FusedCore):
    """Causal attention of many queries without gradient, fp32 or bf16; anything else is `FusedCore`'s.

    Scores and softmax are fp32. In bf16 the products multiply bf16 pairs and add in fp32, as PyTorch's
    own kernel does.
    """

    def forward(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S U"],
        mask: Mask,
        scale: float,
        softcap: float | None = None,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H T U"]:
        plain = mask.causal and mask.bias is None and softcap is None and sinks is None
        if not (plain and _suits(q, k, v) and _packs(q, k, v)):
            return super().forward(q, k, v, mask, scale, softcap, sinks)
        B, H, T, K = q.shape
        y = torch.empty(B, T, H, K, dtype=q.dtype)
        for row in range(B):
            _attend(q[row], k[row], v[row], y[row], scale)
        return y.transpose(1, 2)


def _packs(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        q.shape[2] >= LEAST_ROWS
        and k.shape[2] <= MOST_KEYS
        and q.shape[3] % 16 == 0
        and k.shape == v.shape
        and k.stride() == v.stride()
        and k.stride(2) == k.shape[3]
    )


def _attend(
    q: Float[Tensor, "H T K"],
    k: Float[Tensor, "G S K"],
    v: Float[Tensor, "G S K"],
    y: Float[Tensor, "T H K"],
    scale: float,
) -> None:
    (H, T, K), (G, S, _) = q.shape, k.shape
    tiles = -(-S // TILE)
    packed = torch.empty(G * tiles * 2 * TILE * K, dtype=q.dtype)
    shared = {"dtype": DTYPES[q.dtype], "width": K, "rows": T, "keys": S, "barrier": 1}
    ops = (
        Op(
            code=PACK, n=G * tiles, kv_head=k.stride(0),
            weight=k.data_ptr(), bias=v.data_ptr(), dst=packed.data_ptr(), **shared,
        ),
        Op(
            code=ATTEND_ROWS, n=H * -(-T // QUERIES), heads=H, group=H // G, scale=scale,
            a_row=q.stride(1), a_head=q.stride(0),
            weight=packed.data_ptr(), a=q.data_ptr(), dst=y.data_ptr(), **shared,
        ),
    )  # fmt: skip
    _run(*ops)


def native_experts(
    feed: FeedForwards, x: Float[Tensor, "N D"], weights: Float[Tensor, "N A"], experts: Int[Tensor, "N A"]
) -> Float[Tensor, "N D"]:
    """A way through the experts: few tokens without a gradient in C, in fp32 arithmetic; others `looped`."""
    parameters = list(feed.parameters())
    few = experts.numel() <= MOST_ROWS.get(x.dtype, 0) * feed.up.weight.shape[0]
    if not (few and _suits(x, *parameters) and all(p.is_contiguous() for p in parameters)):
        return looped(feed, x, weights, experts)
    return in_order(feed, x, weights, experts, NativeRuns)


class NativeRuns:
    """Rows in the order of their experts, each run multiplied in C. Results are fp32."""

    def __init__(self, experts: Int[Tensor, " rows"]) -> None:
        hit, counts = experts.unique_consecutive(return_counts=True)
        self._runs = list(zip(hit.tolist(), counts.tolist(), strict=True))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `openbook.model.experts.Rows`."""
        x = x.float().contiguous()
        n, width = weight.shape[1:]
        y = torch.empty(len(x), n)
        ops, first = [], 0
        for expert, count in self._runs:
            ops.append(
                Op(
                    code=LINEAR_ROWS, n=n, width=width, rows=count, matrix=DTYPES[weight.dtype],
                    row_bytes=width * weight.itemsize,
                    weight=weight.data_ptr() + expert * n * width * weight.itemsize,
                    bias=None if bias is None else bias.data_ptr() + expert * n * bias.itemsize,
                    a=x.data_ptr() + first * width * x.itemsize, dst=y.data_ptr() + first * n * y.itemsize,
                )
            )  # fmt: skip
            first += count
        ops[-1].barrier = 1
        _run(*ops)
        return y
