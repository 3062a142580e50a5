"""How the layers of a model run while it is trained. What they compute, and their parameters' names, stay."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from openbook.model.block import Block
from openbook.model.decoder import Decoder
from openbook.model.experts import Experts
from openbook.native import NativeNorm, NativeUnavailableError, library
from openbook.native.modules import use_native_modules


def prepare_layers(decoder: Decoder, checkpoint_layers: bool = False, compile: bool = False) -> None:  # noqa: A002
    """Changes the layers of `decoder` in place.

    With `checkpoint_layers` a layer keeps only its input for backward and is computed a second time there
    (Chen et al. 2016, arXiv 1604.06174): about a third more FLOPs. With `compile` PyTorch compiles a layer,
    which takes half a minute at the first step, once for all layers that are alike; needs a C++ compiler.
    Without it the layers' parts are replaced by faster ones of our own, where there are some.
    """
    if compile:
        _compile_layers(decoder)
    else:
        use_fast_modules(decoder)
    if checkpoint_layers:
        for layer in _layers(decoder):
            again = {"use_reentrant": False, "preserve_rng_state": False}  # nothing here is random
            layer.forward = partial(checkpoint, layer.forward, **again)


def _layers(decoder: Decoder) -> Iterable[Block]:
    return cast("Iterable[Block]", decoder.layers)


def _compile_layers(decoder: Decoder) -> None:
    """Experts are left out: which of them are run is only known as they run."""
    for layer in _layers(decoder):
        parts: list[nn.Module] = [layer.attn] if isinstance(layer.mlp, Experts) else [layer]
        for part in parts:
            part.forward = torch.compile(part.forward)


# --- faster parts -------------------------------------------------------------------------------


def use_fast_modules(decoder: Decoder) -> None:
    """Gives a decoder on the CPU products through oneDNN; where there is a compiler, also attention, norms,
    rotations and gates in C."""
    if decoder.embed.weight.device.type != "cpu":
        return
    if has_native_modules():
        use_native_modules(decoder)
        for layer in _layers(decoder):
            _round_once(layer.attn_norm)
            if not isinstance(layer.mlp, Experts):  # routers read in fp32
                _round_once(layer.mlp_norm)
        _round_once(decoder.final_norm)
    for name, module in list(decoder.named_modules()):
        if type(module) is nn.Linear and can_multiply():
            decoder.set_submodule(name, FastLinear(module))


def has_native_modules() -> bool:
    """Whether there is a compiler, or what it made before."""
    try:
        library()
    except NativeUnavailableError:
        return False
    return True


def _round_once(norm: nn.Module) -> None:
    if isinstance(norm, NativeNorm):
        norm.before_matrices = True


# --- products -----------------------------------------------------------------------------------


def can_multiply() -> bool:
    """Whether PyTorch was built with oneDNN, whose fp32 products are faster than MKL's on some processors
    (by a sixth on Zen 4) and as fast on others."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] by weight [out, in], with any strides and no gradient; fp32 on the CPU through oneDNN."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and can_multiply():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


ROWS_AT_ONCE = 4096
"""Of a product that is added to what has another dtype."""


def add_product(y: Tensor, a: Tensor, b: Tensor) -> None:
    """y [n, k] += a [n, m] b [m, k]. In another dtype than y's the product is made, and once more in y's, so
    that is done in parts."""
    if y.dtype == a.dtype:
        y.addmm_(a, b)
    else:
        for part, rows in zip(y.split(ROWS_AT_ONCE), a.split(ROWS_AT_ONCE), strict=True):
            part += rows @ b


class FastLinear(nn.Linear):
    """W x + b with the parameters of the module it replaces; through oneDNN in fp32, else PyTorch's."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        if input.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
            return _Product.apply(input, self.weight, self.bias)  # type: ignore[return-value]
        return super().forward(input)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, weight), (grad,) = ctx.saved_tensors, grads
        by_x, by_weight, by_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            multiply(grad, weight.mT) if by_x else None,
            rows.mT @ x.flatten(0, -2) if by_weight else None,
            rows.sum(0) if by_bias else None,
        )
