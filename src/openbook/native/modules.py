"""A prompt's norms, rotations, attention and gates in C, and the experts of a few tokens: modules that stand
in for the model's own.

Each has the class it replaces as its base, and does what that does wherever C does not: for a few tokens, in
another dtype or layout. All but experts can also be learned through; what is kept for backward is what was
read: the rest is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from openbook.model import Decoder
from openbook.model.attention import FusedCore, Mask
from openbook.model.experts import FeedForwards, in_order, looped
from openbook.model.mlp import Activation
from openbook.model.norm import HeadNorm, Norm
from openbook.model.positions import Rotate, Rotation
from openbook.native.build import library
from openbook.native.lower import (
    ACTIVATIONS,
    ATTEND_BACK,
    ATTEND_ROWS,
    DTYPES,
    GATE,
    GATE_BACK,
    LAYERNORM,
    LINEAR_ROWS,
    NORM,
    NORM_BACK,
    PACK,
    ROTATE_ROWS,
    Op,
)
from openbook.native.step import Step, run
from openbook.spec.model import Norm as NormSpec

TILE, QUERIES = 32, 8
"""As in attend.h: keys in a tile, queries at a time."""

LEAST_ROWS, MOST_KEYS, MOST_WIDTH = 16, 16_384, 256
"""Fewer tokens are not worth the call; more keys, or in backward wider heads, do not fit a worker's stack."""

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
    return first.dtype in DTYPES and all(
        x.device.type == "cpu" and x.dtype == first.dtype and x.stride(-1) == 1 for x in tensors
    )


def _learns(*tensors: Tensor | None) -> bool:
    """Whether a gradient will be asked for by one of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _run(*ops: Op) -> None:
    """On the threads that PyTorch's matrix products before and after use as well."""
    run(library(), (Op * len(ops))(*ops), 0, Step(with_openmp=1))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeNorm(Norm):
    """A norm of the residual stream, with the parameters of the one it replaces.

    `before_matrices`: only matrix products read it, so that under autocast it is rounded here, once, and
    not by each of them.
    """

    def __init__(self, norm: Norm) -> None:
        nn.Module.__init__(self)
        self.spec, self.weight, self.bias = norm.spec, norm.weight, norm.bias
        self.before_matrices = False

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        rows = x.numel() // x.shape[-1]
        parameters = [p for p in (self.weight, self.bias) if p is not None]
        suits = x.dtype == torch.float32 and rows >= LEAST_ROWS and x.is_contiguous() and _suits(x)
        if not suits or (parameters and not _suits(*parameters)) or any(p.ndim > 1 for p in parameters):
            return super().forward(x)
        if _learns(x, *parameters) and any(p.dtype != torch.float32 for p in parameters):
            return super().forward(x)
        rounded = self.before_matrices and torch.is_autocast_enabled("cpu")
        result = torch.get_autocast_dtype("cpu") if rounded else torch.float32
        if result not in DTYPES:
            return super().forward(x)
        return _Normed.apply(x, self.weight, self.bias, self.spec, result)  # type: ignore[return-value]


def _norm_op(
    code: int, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, **more: Any
) -> Op:
    dtype = next((DTYPES[p.dtype] for p in (weight, bias) if p is not None), 0)
    return Op(
        code=code, width=x.shape[-1], barrier=1, dtype=dtype,
        flags=LAYERNORM if spec.kind == "layer" else 0, eps=spec.eps, offset=spec.offset,
        weight=_address(weight), bias=_address(bias), a=x.data_ptr(), **more,
    )  # fmt: skip


ROWS_SUMMED = 64
"""Rows whose shares of a norm's gradient are added up in one place, whatever the number of threads."""


class _Normed(torch.autograd.Function):
    """Keeps x alone: mean and deviation are cheaper to compute again than to keep."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, dtype: torch.dtype
    ) -> Tensor:
        y = torch.empty_like(x, dtype=dtype)
        rows = x.numel() // x.shape[-1]
        _run(_norm_op(NORM, x, weight, bias, spec, n=rows, matrix=DTYPES[dtype], dst=y.data_ptr()))
        ctx.save_for_backward(x, weight, bias)
        ctx.spec = spec
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        grad, x_grad = grads[0].contiguous(), torch.empty_like(x)
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        items = -(-rows // ROWS_SUMMED)
        sums = torch.empty(items, 1 if bias is None else 2, width)
        _run(
            _norm_op(
                NORM_BACK, x, weight, bias, ctx.spec, n=items, rows=ROWS_SUMMED, keys=rows,
                matrix=DTYPES[grad.dtype], grad=grad.data_ptr(), dst=x_grad.data_ptr(), dst2=sums.data_ptr(),
            )
        )  # fmt: skip
        by_parameter = sums.sum(0)
        weight_grad = by_parameter[0] if weight is not None else None
        return x_grad, weight_grad, by_parameter[1] if bias is not None else None, None, None


class NativeRotate(Rotate):
    """Rotates the heads of a projection's result, which lie beside each other, into new memory."""

    def forward(self, x: Float[Tensor, "B H T K"], by: Rotation) -> Float[Tensor, "B H T K"]:
        rows = x.transpose(1, 2)
        if x.shape[2] < LEAST_ROWS or not (_suits(x) and rows.is_contiguous() and by.cos.shape[1] == 1):
            return super().forward(x, by)
        return _Rotated.apply(rows, by.cos, by.sin, self.rope.dim).transpose(1, 2)  # type: ignore[union-attr]


class _Rotated(torch.autograd.Function):
    """The gradient is turned back, by the same angles."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dim = dim
        return _rotated(rows, cos, sin, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0].contiguous(), cos, -sin, ctx.dim), None, None, None


def _rotated(
    rows: Float[Tensor, "B T H K"],
    cos: Float[Tensor, "#B 1 T half"],
    sin: Float[Tensor, "#B 1 T half"],
    dim: int,
) -> Float[Tensor, "B T H K"]:
    B, T, H, K = rows.shape
    y = torch.empty_like(rows)
    angles = torch.cat((cos, sin), dim=2).contiguous()
    ops = [
        Op(
            code=ROTATE_ROWS, n=T, width=K, heads=H, group=dim, dtype=DTYPES[rows.dtype], barrier=b == B - 1,
            a=rows[b].data_ptr(), b=angles[b if len(angles) > 1 else 0].data_ptr(), dst=y[b].data_ptr(),
        )
        for b in range(B)
    ]  # fmt: skip
    _run(*ops)
    return y


class NativeActivation(Activation):
    """act(gate) · x in one pass."""

    def forward(
        self, x: Float[Tensor, "*batch F"], gate: Float[Tensor, "*batch F"] | None = None
    ) -> Float[Tensor, "*batch F"]:
        wide = gate is not None and x.numel() >= LEAST_ROWS * x.shape[-1]
        if gate is None or not (wide and _suits(x, gate) and x.is_contiguous() and gate.is_contiguous()):
            return super().forward(x, gate)
        if _learns(x, gate) and self.kind not in LEARNED_THROUGH:
            return super().forward(x, gate)
        return _Gated.apply(x, gate, self.kind)  # type: ignore[return-value]


LEARNED_THROUGH = ("silu", "gelu_tanh")
"""Activations whose gradient there is in C."""


class _Gated(torch.autograd.Function):
    """Keeps the two factors, where PyTorch keeps act(gate) as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.kind = kind
        y = torch.empty_like(x)
        _run(_gate_op(GATE, x, gate, kind, dst=y.data_ptr()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, gate = ctx.saved_tensors
        grad, x_grad, gate_grad = grads[0].contiguous(), torch.empty_like(x), torch.empty_like(gate)
        outputs = {"dst": gate_grad.data_ptr(), "dst2": x_grad.data_ptr()}
        _run(_gate_op(GATE_BACK, x, gate, ctx.kind, grad=grad.data_ptr(), **outputs))
        return x_grad, gate_grad, None


def _gate_op(code: int, x: Tensor, gate: Tensor, kind: str, **more: Any) -> Op:
    return Op(
        code=code, kind=ACTIVATIONS.index(kind), n=x.numel(), matrix=DTYPES[x.dtype], barrier=1,
        a=gate.data_ptr(), b=x.data_ptr(), **more,
    )  # fmt: skip


class NativeCore(FusedCore):
    """Causal attention of many queries, fp32 or bf16; anything else is `FusedCore`'s.

    With a gradient to come, of whole runs only (T = S), but packed documents and windows too. Scores and
    softmax are fp32. In bf16 the products multiply bf16 pairs and add in fp32, as PyTorch's own kernel does.
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
        """See `openbook.model.attention.ExplicitCore`."""
        a_run = mask.causal or mask.since is not None
        plain = a_run and mask.bias is None and softcap is None and sinks is None
        if not (plain and _suits(q, k, v) and _packs(q, k, v)):
            return super().forward(q, k, v, mask, scale, softcap, sinks)
        if not _learns(q, k, v):
            return _attend(q, k, v, mask.since, scale).transpose(1, 2)
        if q.shape[2] != k.shape[2] or q.shape[3] > MOST_WIDTH:
            return super().forward(q, k, v, mask, scale, softcap, sinks)
        return _Attended.apply(q, k, v, mask.since, scale).transpose(1, 2)  # type: ignore[union-attr]


def _packs(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        q.shape[2] >= LEAST_ROWS
        and k.shape[2] <= MOST_KEYS
        and q.shape[3] % 16 == 0
        and k.shape == v.shape
        and k.stride() == v.stride()
    )


class _Attended(torch.autograd.Function):
    """Keeps what it read, its result, and a number for each query and head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, since: Tensor | None, scale: float
    ) -> Float[Tensor, "B T H K"]:
        B, H, T, _ = q.shape
        sums = torch.empty(B, H, T)
        y = _attend(q, k, v, since, scale, sums)
        ctx.save_for_backward(q, k, v, y, sums, since)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, y, sums, since = ctx.saved_tensors
        (B, H, T, K), G = q.shape, k.shape[1]
        grad = grads[0].contiguous()
        q_grad, by_head = torch.empty(B, T, H, K), torch.empty(B, 2, T, H, K, dtype=q.dtype)
        read = {"a": q, "weight": k, "bias": v, "b": y, "grad": grad, "sums": sums, "since": since}
        written = {"dst": q_grad, "dst2": by_head}
        _run(*_attention_ops(ATTEND_BACK, q, k, H, ctx.scale, **read, **written))
        shared = by_head.unflatten(3, (G, H // G)).sum(4) if G < H else by_head
        k_grad, v_grad = shared.transpose(2, 3).unbind(1)
        return q_grad.to(q.dtype).transpose(1, 2), k_grad, v_grad, None, None


def _attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S K"],
    since: Int[Tensor, "#B T"] | None,
    scale: float,
    sums: Float[Tensor, "B H T"] | None = None,
) -> Float[Tensor, "B T H K"]:
    """`sums` is filled with the logarithms of the softmax's sums."""
    (B, H, T, K), (G, S) = q.shape, k.shape[1:3]
    tiles, y = -(-S // TILE), torch.empty(B, T, H, K, dtype=q.dtype)
    packed = torch.empty(B, G * tiles * 2 * TILE * K, dtype=q.dtype)
    ops = [
        *_attention_ops(PACK, q, k, G * tiles, weight=k, bias=v, dst=packed),
        *_attention_ops(
            ATTEND_ROWS, q, k, H * -(-T // QUERIES), scale, a=q, weight=packed, dst=y, sums=sums, since=since
        ),
    ]
    _run(*ops)
    return y


def _attention_ops(
    code: int,
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    items: int,
    scale: float = 1.0,
    **tensors: Tensor | None,
) -> list[Op]:
    """One for each row of the batch, with that row of each of `tensors` (or the only one there is). They may
    run at once; what comes after waits."""
    (B, H, T, K), (G, S) = q.shape, k.shape[1:3]
    given = {name: x for name, x in tensors.items() if x is not None}
    return [
        Op(
            code=code, dtype=DTYPES[q.dtype], barrier=b == B - 1, scale=scale,
            n=items, width=K, heads=H, group=H // G, rows=T, keys=S,
            a_row=q.stride(2), a_head=q.stride(1), kv_row=k.stride(2), kv_head=k.stride(1),
            **{name: x[b if len(x) > 1 else 0].data_ptr() for name, x in given.items()},
        )
        for b in range(B)
    ]  # fmt: skip


def native_experts(
    feed: FeedForwards, x: Float[Tensor, "N D"], weights: Float[Tensor, "N A"], experts: Int[Tensor, "N A"]
) -> Float[Tensor, "N D"]:
    """A way through the experts: few tokens without a gradient in C, in fp32 arithmetic; others `looped`."""
    parameters = list(feed.parameters())
    few = experts.numel() <= MOST_ROWS.get(x.dtype, 0) * feed.up.weight.shape[0]
    if torch.is_grad_enabled() or not (
        few and _suits(x, *parameters) and all(p.is_contiguous() for p in parameters)
    ):
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
