"""Optimizers by the ledger's kinds of weights, learning-rate schedules, and their state by name.

What a weight is (a matrix, a norm, a bias, an embedding) is read from its row of the ledger, never guessed
from its shape: a per-head norm and the biases of experts have two axes, and are no matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openbook.ledger.tensors import TensorRow
from openbook.train.checkpoint import CheckpointError

# --- which weight is what -----------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """The parameters of a model by how they are trained; names are those of the ledger.

    `block_matrices` are the layers' matrices, experts' stacks among them; `matrices` the others, so an untied
    head; `plain` embeddings, positions, norms, biases and sinks: what weight decay would only pull to zero.
    """

    block_matrices: dict[str, nn.Parameter]
    matrices: dict[str, nn.Parameter]
    plain: dict[str, nn.Parameter]


NOT_BY_GRADIENT = frozenset(("correction",))
"""Kinds that no gradient reaches: a router's corrections only decide which experts are chosen."""


def parameter_groups(model: nn.Module, rows: Iterable[TensorRow]) -> Groups:
    """Sorts the model's parameters by the ledger's `rows`; frozen ones are left out.

    A tied head is the embedding, once. Raises `ValueError` for a parameter without a row.
    """
    row_of = {row.name: row for row in rows}
    groups = Groups({}, {}, {})
    for name, parameter in model.named_parameters():  # a shared one comes once, under its first name
        if name not in row_of:
            raise ValueError(f"the ledger has no row {name}, so how to train it is not known")
        row = row_of[name]
        if not parameter.requires_grad or row.kind in NOT_BY_GRADIENT:
            continue
        if row.kind != "matrix":
            groups.plain[name] = parameter
        elif row.layer is not None:
            groups.block_matrices[name] = parameter
        else:
            groups.matrices[name] = parameter
    return groups


# --- the optimizer ------------------------------------------------------------------------------


_ADAMW, _MUON = ("step", "exp_avg", "exp_avg_sq"), ("momentum_buffer",)
"""What each keeps of a parameter, by the names of `torch.optim`."""


class Optimizer:
    """AdamW, or Muon for the layers' matrices and AdamW for the rest, with one peak learning rate."""

    def __init__(
        self,
        groups: Groups,
        lr: float,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        muon: bool = False,
        momentum: float = 0.95,
    ) -> None:
        """Weight decay, decoupled (Loshchilov and Hutter 2019), is for matrices alone."""
        self.parameters = {**groups.block_matrices, **groups.matrices, **groups.plain}
        self.lr = lr
        self._name_of: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        blocks = list(groups.block_matrices.values())
        decayed = list(groups.matrices.values()) if muon else blocks + list(groups.matrices.values())
        adamw = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": list(groups.plain.values()), "weight_decay": 0.0},
        ]
        adamw = [group for group in adamw if group["params"]]
        self._parts: list[torch.optim.Optimizer] = []
        if adamw:
            self._parts.append(torch.optim.AdamW(adamw, lr, betas, eps, fused=True))
        if muon and blocks:
            self._parts.append(Muon(blocks, lr, weight_decay, momentum))
        self._make_moments()

    def _make_moments(self) -> None:
        """As the first step would, but before it: among its activations they would leave holes in the heap, a
        twentieth of SmolLM2-135M's peak."""
        for part in self._parts:
            moments = _MUON if isinstance(part, Muon) else _ADAMW
            for parameter in (p for group in part.param_groups for p in group["params"]):
                part.state[parameter] = {
                    key: parameter.new_zeros(() if key == "step" else parameter.shape) for key in moments
                }

    def step(self, scale: float = 1.0) -> None:
        """One update at `scale` times the peak learning rate; a parameter without gradient stays as it is."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self.lr * scale
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def clip(self, max_norm: float) -> float:
        """Scales all gradients down to a common norm of `max_norm`; returns the norm they had."""
        return float(nn.utils.clip_grad_norm_(self.parameters.values(), max_norm))

    # --- its state as named tensors ---------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Moments and step counts as NAME.exp_avg, NAME.exp_avg_sq, NAME.step, NAME.momentum_buffer."""
        return {
            f"{self._name_of[parameter]}.{key}": value
            for part in self._parts
            for parameter, state in part.state.items()
            for key, value in state.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up a state that `tensors` gave. Copies. Raises `CheckpointError` if it is of another model
        or another optimizer."""
        left = set(tensors)
        for part in self._parts:
            about = part.state_dict()
            order = [parameter for group in part.param_groups for parameter in group["params"]]
            about["state"] = {}
            for i, parameter in enumerate(order):
                state = self._state_of(parameter, part, tensors)
                left -= {f"{self._name_of[parameter]}.{key}" for key in state}
                if state:
                    about["state"][i] = state
            part.load_state_dict(about)
        if left:
            raise CheckpointError(
                f"{min(left)} and {len(left) - 1} more are in the checkpoint, but not in this optimizer: "
                "resume with the one that it was saved with"
            )

    def _state_of(
        self, parameter: nn.Parameter, part: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The state of one parameter: all of it, or none, which is as none of its steps."""
        name = self._name_of[parameter]
        keys = _MUON if isinstance(part, Muon) else _ADAMW
        state = {key: tensors[f"{name}.{key}"].clone() for key in keys if f"{name}.{key}" in tensors}
        for key in keys if state else ():
            shape = state[key].shape if key in state else None
            if shape != (() if key == "step" else parameter.shape):
                found = "missing" if shape is None else list(shape)
                expected = [] if key == "step" else list(parameter.shape)
                raise CheckpointError(f"{name}.{key} is {found} in the checkpoint, expected {expected}")
        return state


class Muon(torch.optim.Optimizer):
    """Momentum whose every matrix is made orthogonal before it is subtracted (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/).

    The update is scaled by 0.2·√max(out, in), so that its entries are as large as AdamW's and both share a
    learning rate (Liu et al. 2025, arXiv 2502.16982, section 2.2). `torch.optim.Muon` does the same to
    matrices, and is what this is tested against; it refuses experts' stacks, [E, out, in].
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.1, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rates = group["lr"], group["weight_decay"], group["momentum"]
                    self._update(parameter, parameter.grad, *rates)

    def _update(
        self, parameter: Tensor, grad: Tensor, lr: float, weight_decay: float, momentum: float
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - momentum)
        update = orthogonal(grad.lerp(buffer, momentum))  # Nesterov's look ahead
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(update, alpha=-lr * 0.2 * max(parameter.shape[-2:]) ** 0.5)


def orthogonal(matrices: Tensor) -> Tensor:
    """Each matrix [..., out, in] with its singular values brought near 1 (to about 0.7 to 1.2), in bf16.

    Five Newton-Schulz steps of the quintic whose coefficients Jordan tuned for speed at small values.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16().reshape(-1, *matrices.shape[-2:])
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


# --- schedules ----------------------------------------------------------------------------------


def cosine(step: int, total: int, warmup: int = 0, minimum: float = 0.1) -> float:
    """The learning rate of update `step` (from 0) as a part of its peak: up in a line, down in half a cosine.

    The first update has 1 / (warmup + 1), not 0; from `total` on it stays at `minimum`.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return max(minimum, 1 - (1 - minimum) * (1 - math.cos(math.pi * done)) / 2)


def warmup_stable_decay(
    step: int, total: int, warmup: int = 0, decay: int = 0, minimum: float = 0.0
) -> float:
    """The same with a plateau: up in a line, level, and in the last `decay` updates down in a line.

    A run can be prolonged from its plateau (Hu et al. 2024, arXiv 2404.06395, section 4).
    """
    up = (step + 1) / (warmup + 1)
    down = (total - step) / (decay + 1)
    return min(1.0, up, max(minimum, down))
