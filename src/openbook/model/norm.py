"""LayerNorm and RMSNorm over the last axis."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from openbook.spec.model import Norm as NormSpec


class Norm(nn.Module):
    """y = normalise(x) · (offset + weight) + bias, computed in fp32; the result has x's dtype.

    `layer` removes the mean and divides by the standard deviation (Ba et al. 2016); `rms` divides by
    the root of the mean square (Zhang & Sennrich 2019). eps is added inside the root.
    """

    def __init__(self, spec: NormSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(width)) if spec.weight else None
        self.bias = nn.Parameter(torch.empty(width)) if spec.bias else None

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        dtype, weight, bias = x.dtype, self.weight, self.bias
        x = x.float()
        weight = weight.float() if weight is not None else None
        if weight is not None and self.spec.offset:
            weight = weight + self.spec.offset
        bias = bias.float() if bias is not None else None
        if self.spec.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.spec.eps).to(dtype)
        y = F.rms_norm(x, x.shape[-1:], weight, self.spec.eps)
        return (y if bias is None else y + bias).to(dtype)


def norm_or_identity(spec: NormSpec | None, width: int) -> nn.Module:
    """The norm a spec asks for at some place, which may be none."""
    return nn.Identity() if spec is None else Norm(spec, width)
