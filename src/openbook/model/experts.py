"""A mixture of experts: a router chooses a few feed-forwards for each token, which are weighted and summed.

Three ways lead through the experts, and all give the same: `looped`, the obvious one, `grouped` and
`gathered`.

    letters: B batch, T tokens, N = B·T, D width, E experts, A experts of one token, F their inner width
"""

from collections.abc import Callable
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


# --- the experts' matrices ----------------------------------------------------------------------


@runtime_checkable
class Rows(Protocol):
    """Says which expert's matrix each row is multiplied by, and how."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[*rows, in] by [E, out, in] and [E, out] → [*rows, out]."""
        ...


class One(NamedTuple):
    """All rows go to one expert."""

    expert: int

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight[self.expert], bias[self.expert] if bias is not None else None)


class Each(NamedTuple):
    """Every row goes to an expert of its own, and is multiplied by a copy of its matrix."""

    experts: Int[Tensor, "*rows"]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = (weight[self.experts] @ x[..., None])[..., 0]
        return y if bias is None else y + bias[self.experts]


class Runs(NamedTuple):
    """Rows in the order of their experts, all multiplied by one grouped product."""

    experts: Int[Tensor, " rows"]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        everyone = torch.arange(len(weight), device=weight.device)
        ends = torch.searchsorted(self.experts, everyone, right=True).int()  # of each expert's rows
        y = F.grouped_mm(x, weight.mT, offs=ends)
        return y if bias is None else y + bias[self.experts]


class Matrices(nn.Module):
    """One matrix of every expert."""

    def __init__(self, n_experts: int, out: int, into: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, out, into))
        self.bias = nn.Parameter(torch.empty(n_experts, out)) if bias else None

    def forward(self, x: Float[Tensor, "*rows in"], of: Rows) -> Float[Tensor, "*rows out"]:
        return of.linear(x, self.weight, self.bias)


class FeedForwards(nn.Module):
    """The experts: Σ weight · down(act(gate(x)) · up(x)) over those of each token."""

    way: "Way | None" = None
    """How to go through them; None: as `way_through` says."""

    def __init__(self, spec: ExpertsSpec, d_model: int) -> None:
        super().__init__()
        expert, n = spec.expert, spec.n_experts
        self.on_input = spec.router.on_input
        self.gate = Matrices(n, expert.d_ff, d_model, expert.up_bias) if expert.gated else None
        self.up = Matrices(n, expert.d_ff, d_model, expert.up_bias)
        self.act = Activation(expert.activation, expert.clamp, expert.up_offset)
        self.down = Matrices(n, d_model, expert.d_ff, expert.down_bias)

    def forward(self, x: Float[Tensor, "B T D"], choice: Choice) -> Float[Tensor, "B T D"]:
        weights, experts = (part.flatten(0, 1) for part in choice)
        way = self.way or way_through(experts, self.up.weight)
        return way(self, x.flatten(0, 1), weights, experts).view(x.shape)

    def weighted(
        self, x: Float[Tensor, "*rows D"], weights: Float[Tensor, "*rows 1"], of: Rows
    ) -> Float[Tensor, "*rows D"]:
        """What each row's expert makes of it, times its weight: fp32, unless the input is weighted."""
        if self.on_input:
            x = (x * weights).to(x.dtype)
        gate = self.gate(x, of) if self.gate is not None else None
        y = self.down(self.act(self.up(x, of), gate), of)
        return y if self.on_input else y * weights


# --- the ways through ---------------------------------------------------------------------------


def looped(
    feed: FeedForwards, x: Float[Tensor, "N D"], weights: Float[Tensor, "N A"], experts: Int[Tensor, "N A"]
) -> Float[Tensor, "N D"]:
    """One expert after the other, with the tokens that chose it."""
    order = experts.flatten().argsort()
    hit, counts = experts.flatten()[order].unique_consecutive(return_counts=True)
    runs = [part.split(counts.tolist()) for part in (order // experts.shape[1], weights.flatten()[order])]
    y = torch.zeros_like(x, dtype=torch.float32)
    for expert, tokens, weight in zip(hit.tolist(), *runs, strict=True):
        y.index_add_(0, tokens, feed.weighted(x[tokens], weight[:, None], One(expert)).float())
    return y.to(x.dtype)


def grouped(
    feed: FeedForwards, x: Float[Tensor, "N D"], weights: Float[Tensor, "N A"], experts: Int[Tensor, "N A"]
) -> Float[Tensor, "N D"]:
    """Rows sorted by expert, and one grouped product for all. Nobody waits to hear what was chosen."""
    return in_order(feed, x, weights, experts, Runs)


def in_order(
    feed: FeedForwards,
    x: Float[Tensor, "N D"],
    weights: Float[Tensor, "N A"],
    experts: Int[Tensor, "N A"],
    rows_of: Callable[[Tensor], Rows],
) -> Float[Tensor, "N D"]:
    """All rows at once, sorted by expert, multiplied as `rows_of` the sorted experts says."""
    order = experts.flatten().argsort()
    of = rows_of(experts.flatten()[order])
    rows = feed.weighted(x[order // experts.shape[1]], weights.flatten()[order, None], of)
    back = torch.empty_like(rows).index_copy(0, order, rows)
    return back.view(*experts.shape, -1).sum(dim=1).to(x.dtype)


def gathered(
    feed: FeedForwards, x: Float[Tensor, "N D"], weights: Float[Tensor, "N A"], experts: Int[Tensor, "N A"]
) -> Float[Tensor, "N D"]:
    """A copy of its expert's matrices for every row. All steps are [N, A, ...], in the tokens' order."""
    rows = x[:, None].expand(*experts.shape, -1)
    return feed.weighted(rows, weights[..., None], Each(experts)).sum(dim=1).to(x.dtype)


Way = Callable[[FeedForwards, Tensor, Tensor, Tensor], Tensor]


def way_through(experts: Int[Tensor, "N A"], weight: Float[Tensor, "E F D"]) -> Way:
    """The fastest way.

    On a CPU a loop costs nothing beside the products, and reads no weight twice. An accelerator should not
    wait for the loop: few tokens copy less than the loop would read, many are sorted.
    """
    if weight.device.type == "cpu":
        return looped
    if experts.numel() <= weight.shape[0] or weight.device.type == "meta":
        return gathered
    return grouped if can_group(weight) else looped


def can_group(weight: Float[Tensor, "E F D"]) -> bool:
    """Whether torch's grouped product takes such matrices: rows and columns in whole 16 bytes, and off
    the CPU bf16 alone."""
    whole = all(size * weight.itemsize % 16 == 0 for size in weight.shape[1:])
    return whole and (weight.dtype == torch.bfloat16 or weight.device.type == "cpu")


# --- the whole ----------------------------------------------------------------------------------


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
