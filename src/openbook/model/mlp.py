"""The feed-forward half of a block."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from openbook.model.norm import as_read_by
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


class Activation(nn.Module):
    """act(x), or where there is a gate, act(gate) · x, both cut and x moved first if the spec says so."""

    def __init__(self, kind: str, clamp: float | None = None, up_offset: float = 0.0) -> None:
        super().__init__()
        self.kind, self.clamp, self.up_offset = kind, clamp, up_offset

    def forward(
        self, x: Float[Tensor, "*batch F"], gate: Float[Tensor, "*batch F"] | None = None
    ) -> Float[Tensor, "*batch F"]:
        function = ACTIVATIONS[self.kind]
        if gate is None:
            return function(x)
        if self.clamp is not None:
            gate, x = gate.clamp(max=self.clamp), x.clamp(-self.clamp, self.clamp)
        return function(gate) * (x + self.up_offset if self.up_offset else x)


class Mlp(nn.Module):
    """down(act(up(x))), or gated: down(act(gate(x)) · up(x)) (Shazeer 2020, "GLU Variants")."""

    def __init__(self, spec: MlpSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = nn.Linear(d_model, spec.d_ff, bias=spec.up_bias) if spec.gated else None
        self.up = nn.Linear(d_model, spec.d_ff, bias=spec.up_bias)
        self.act = Activation(spec.activation, spec.clamp, spec.up_offset)
        self.down = nn.Linear(spec.d_ff, d_model, bias=spec.down_bias)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        x = as_read_by(self.up.weight, x)
        gate = self.gate(x) if self.gate is not None else None
        return self.down(self.act(self.up(x), gate))
