"""A mixture of experts: a router chooses a few feed-forwards for each token, which are weighted and summed.

Three ways lead through the experts, and all give the same. `Looped` takes one expert after the other: the
obvious one. `Sorted` lays the tokens of one expert side by side, so that each expert is read once, by one
product. `Gathered` fetches a copy of the matrices for every token: nothing waits for what was chosen, which
is what a few tokens on an accelerator want.

    letters: B batch, T tokens, D width, E experts, A experts of one token, F their inner width
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from openbook.model.mlp import Activation, Mlp
from openbook.spec.model import Experts as ExpertsSpec
from openbook.spec.model import Groups
from openbook.spec.model import Router as RouterSpec


class Choice(NamedTuple):
    """The experts of each token, and the weight of each of them."""

    weights: Float[Tensor, "B T A"]
    experts: Int[Tensor, "B T A"]


class Router(nn.Module):
    """How well each expert suits each token, in fp32."""

    def __init__(self, spec: ExpertsSpec, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.n_experts, d_model))
        self.bias = nn.Parameter(torch.empty(spec.n_experts)) if spec.router.bias else None
        self.correction = nn.Parameter(torch.empty(spec.n_experts)) if spec.router.correction else None

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T E"]:
        bias = self.bias.float() if self.bias is not None else None
        return F.linear(x.float(), self.weight.float(), bias)


class Chosen(nn.Module):
    """Logits → the experts of each token and their weights, fp32. See `openbook.spec.model.Router`."""

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__()
        self.router: RouterSpec = spec.router
        self.n_active = spec.n_active

    def forward(self, logits: Float[Tensor, "B T E"], correction: Float[Tensor, " E"] | None) -> Choice:
        router = self.router
        match router.score:
            case "softmax":
                scores = logits.softmax(dim=-1)
            case "sigmoid":
                scores = logits.sigmoid()
            case "chosen_softmax":
                scores = logits
        ranks = scores if correction is None else scores + correction.float()
        if router.groups is not None:
            ranks = within_best_groups(ranks, router.groups)
        experts = ranks.topk(self.n_active, dim=-1).indices
        weights = scores.gather(-1, experts)
        if router.score == "chosen_softmax":
            weights = weights.softmax(dim=-1)
        if router.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + router.sum_eps)
        return Choice(weights * router.scale if router.scale != 1 else weights, experts)


def within_best_groups(ranks: Float[Tensor, "B T E"], groups: Groups) -> Float[Tensor, "B T E"]:
    """-∞ for the experts outside the best groups (DeepSeek-V2, section 2.2.2; V3, section 2.1.2)."""
    grouped = ranks.unflatten(-1, (groups.n_groups, -1))
    best = grouped.amax(-1) if groups.score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(groups.n_active).indices, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


# --- the ways through ---------------------------------------------------------------------------


@runtime_checkable
class Way(Protocol):
    """Row r of the result is weight[experts[r]] @ x[r]."""

    experts: Int[Tensor, "*rows"]

    def multiply(
        self, x: Float[Tensor, "*rows in"], weight: Float[Tensor, "E out in"]
    ) -> Float[Tensor, "*rows out"]: ...


class Looped:
    """One expert after the other, each on the rows that chose it."""

    def __init__(self, experts: Int[Tensor, "*rows"]) -> None:
        self.experts = experts
        self._rows = [(i, experts == i) for i in experts.unique().tolist()]

    def multiply(
        self, x: Float[Tensor, "*rows in"], weight: Float[Tensor, "E out in"]
    ) -> Float[Tensor, "*rows out"]:
        y = x.new_zeros(*x.shape[:-1], weight.shape[1])
        for i, rows in self._rows:
            y[rows] = F.linear(x[rows], weight[i])
        return y


class Gathered:
    """A batched product of every row with its own copy of the matrix."""

    def __init__(self, experts: Int[Tensor, "*rows"]) -> None:
        self.experts = experts

    def multiply(
        self, x: Float[Tensor, "*rows in"], weight: Float[Tensor, "E out in"]
    ) -> Float[Tensor, "*rows out"]:
        return (weight[self.experts] @ x[..., None])[..., 0]


class Sorted:
    """Rows in the order of their experts: one product for each run, or one grouped product for all."""

    def __init__(self, experts: Int[Tensor, " rows"]) -> None:
        self.experts = experts
        hit, counts = experts.unique_consecutive(return_counts=True)
        self._hit, self._counts = hit.tolist(), counts.tolist()

    def multiply(
        self, x: Float[Tensor, "rows in"], weight: Float[Tensor, "E out in"]
    ) -> Float[Tensor, "rows out"]:
        runs = zip(self._hit, x.split(self._counts), strict=True)
        return torch.cat([F.linear(run, weight[i]) for i, run in runs])


# --- the experts --------------------------------------------------------------------------------


class Matrices(nn.Module):
    """One matrix of every expert."""

    def __init__(self, n_experts: int, out: int, into: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, out, into))
        self.bias = nn.Parameter(torch.empty(n_experts, out)) if bias else None

    def forward(self, x: Float[Tensor, "*rows in"], way: Way) -> Float[Tensor, "*rows out"]:
        y = way.multiply(x, self.weight)
        return y if self.bias is None else y + self.bias[way.experts]


class FeedForwards(nn.Module):
    """The experts themselves: Σ weight · down(act(gate(x)) · up(x)) over those of each token."""

    def __init__(self, spec: ExpertsSpec, d_model: int) -> None:
        super().__init__()
        expert, n = spec.expert, spec.n_experts
        self.on_input = spec.router.on_input
        self.gate = Matrices(n, expert.d_ff, d_model, expert.up_bias) if expert.gated else None
        self.up = Matrices(n, expert.d_ff, d_model, expert.up_bias)
        self.act = Activation(expert.activation, expert.clamp, expert.up_offset)
        self.down = Matrices(n, d_model, expert.d_ff, expert.down_bias)

    def forward(self, x: Float[Tensor, "B T D"], choice: Choice) -> Float[Tensor, "B T D"]:
        weights, experts = choice.weights[..., None], choice.experts
        x = x[..., None, :].expand(*experts.shape, -1)  # a row for each expert of a token
        if self.on_input:
            x = (x * weights).to(x.dtype)
        y = self._outputs(x, experts)
        return (y if self.on_input else y * weights).sum(dim=-2).to(x.dtype)

    def _outputs(
        self, x: Float[Tensor, "B T A D"], experts: Int[Tensor, "B T A"]
    ) -> Float[Tensor, "B T A D"]:
        """What each expert says, not yet weighted."""
        way = way_through(experts, x)
        if way is not Sorted:
            return self._run(x, way(experts))
        order = experts.flatten().argsort()
        rows = self._run(x.flatten(0, 2)[order], Sorted(experts.flatten()[order]))
        return torch.empty_like(rows).index_copy(0, order, rows).view(x.shape)

    def _run(self, x: Float[Tensor, "*rows D"], way: Way) -> Float[Tensor, "*rows D"]:
        gate = self.gate(x, way) if self.gate is not None else None
        return self.down(self.act(self.up(x, way), gate), way)


def way_through(experts: Int[Tensor, "B T A"], x: Tensor) -> type[Looped | Sorted | Gathered]:
    """The fastest way for these tokens: without waiting for the choice, as long as copies are cheap."""
    if x.device.type == "cpu":
        return Sorted
    return Gathered


class Experts(nn.Module):
    """See `openbook.spec.model.Experts`: the chosen experts' weighted sum, and the shared one's, if any."""

    def __init__(self, spec: ExpertsSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(spec, d_model)
        self.chosen = Chosen(spec)
        self.experts = FeedForwards(spec, d_model)
        self.shared = Mlp(spec.shared.mlp, d_model) if spec.shared else None
        gated = spec.shared is not None and spec.shared.gated
        self.shared_gate = nn.Linear(d_model, 1, bias=False) if gated else None

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        choice = self.chosen(self.router(x), self.router.correction)
        x = x.to(self.experts.up.weight.dtype)
        y = self.experts(x, choice)
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        return y + shared
