"""LayerNorm and RMSNorm over the last axis."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from openbook.spec.model import HeadNorm as HeadNormSpec
from openbook.spec.model import Norm as NormSpec


class Norm(nn.Module):
    """y = normalise(x) · (offset + weight) + bias, computed in fp32; the result has x's dtype.

    `layer` removes the mean and divides by the standard deviation (Ba et al. 2016); `rms` divides by
    the root of the mean square (Zhang & Sennrich 2019). eps is added inside the root.
    """

    def __init__(self, spec: NormSpec, *shape: int) -> None:
        """`shape` is the weight's: (width), or more axes before it, each place with a weight of its own."""
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(shape)) if spec.weight else None
        self.bias = nn.Parameter(torch.empty(shape)) if spec.bias else None

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        dtype, weight, bias = x.dtype, self.weight, self.bias
        x = x.float()
        weight = weight.float() if weight is not None else None
        if weight is not None and self.spec.offset:
            weight = weight + self.spec.offset
        bias = bias.float() if bias is not None else None
        if any(p is not None and p.ndim > 1 for p in (weight, bias)):
            y = self._normalise(x, None, None)
            y = y if weight is None else y * weight
            return (y if bias is None else y + bias).to(dtype)
        return self._normalise(x, weight, bias).to(dtype)

    def _normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.spec.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.spec.eps)
        y = F.rms_norm(x, x.shape[-1:], weight, self.spec.eps)
        return y if bias is None else y + bias


class HeadNorm(Norm):
    """A norm of all query heads, or all key heads: of each head, or of all of them as one vector."""

    def __init__(self, spec: HeadNormSpec, n_heads: int, head_dim: int) -> None:
        shapes = {"head": (head_dim,), "own": (n_heads, head_dim), "width": (n_heads * head_dim,)}
        super().__init__(spec, *shapes[spec.over])
        self.over, self.after_rope = spec.over, spec.after_rope

    def forward(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        if self.over == "head":
            return super().forward(x)
        rows = x.transpose(1, 2)
        y = super().forward(rows.flatten(2) if self.over == "width" else rows)
        return y.reshape(rows.shape).transpose(1, 2)


def as_read_by(weight: Tensor, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
    """x as a product with `weight` reads it: in its dtype, unless it has been rounded to a shorter one."""
    return x if x.dtype.itemsize < weight.dtype.itemsize else x.to(weight.dtype)


def norm_or_identity(spec: NormSpec | None, width: int) -> nn.Module:
    """The norm a spec asks for at some place, which may be none."""
    return nn.Identity() if spec is None else Norm(spec, width)
