"""The feed-forward half of a block."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from openbook.spec.model import Mlp as MlpSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class Mlp(nn.Module):
    """down(act(up(x))), or gated: down(act(gate(x)) · up(x)) (Shazeer 2020, "GLU Variants")."""

    def __init__(self, spec: MlpSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.act = ACTIVATIONS[spec.activation]
        self.gate = nn.Linear(d_model, spec.d_ff, bias=spec.up_bias) if spec.gated else None
        self.up = nn.Linear(d_model, spec.d_ff, bias=spec.up_bias)
        self.down = nn.Linear(spec.d_ff, d_model, bias=spec.down_bias)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        x = x.to(self.up.weight.dtype)
        hidden = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        return self.down(hidden)
