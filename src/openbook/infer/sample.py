"""From logits to the next token.

The order is fixed: logit bias, penalties, temperature, top-k, top-p, min-p, then one draw. Each step is
a pure function on logits [..., V] that puts -inf where a token is ruled out, and `distribution` runs
them one after the other: that is the definition. `candidates` reaches the same result for one row
without sorting the vocabulary, and `Sampler` draws from it.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

GREEDY_BELOW = 1e-5
"""A temperature below this is 0: the likeliest token, the lowest id on ties, and no division."""


class RequestError(ValueError):
    """A request that cannot be served as asked. `param` is the argument at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class NonFiniteLogitsError(ArithmeticError):
    """The model's logits hold NaN or infinity, so no token can be chosen."""


# --- what a request may ask for -----------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Every default is an exact no-op; a temperature of 0 is greedy.

    `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off; `top_p` 0 is greedy. `repetition_penalty` counts
    prompt and new tokens, `presence_penalty` and `frequency_penalty` new ones alone. `logit_bias` is
    added to the logits of its ids. Without a `seed` every run differs.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 1e30)
        _check_integer("top_k", self.top_k, -1, None)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias", f"must map token ids to numbers, found {self.logit_bias!r}")
        for token, value in self.logit_bias.items():
            _check_integer("logit_bias", token, 0, None)
            _check_number("logit_bias", value, -100.0, 100.0)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**63 - 1)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that no random number is needed."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0

    @property
    def penalizes(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `RequestError` if a biased id is no token of a vocabulary of this size."""
        for token in self.logit_bias:
            if token >= vocab_size:
                raise RequestError("logit_bias", f"token {token} is not below the vocabulary's {vocab_size}")

    def copies(self, n: int) -> list["SamplingParams"]:
        """The parameters of n answers to one prompt: the first as asked, each other with a seed of its own
        made from the first's, so that the answers differ and are still the same next time."""
        seeds = [self.seed if i == 0 or self.seed is None else _derived(self.seed, i) for i in range(n)]
        return [replace(self, seed=seed) for seed in seeds]


def _derived(seed: int, index: int) -> int:
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    """NaN is neither below nor above anything, so the range is asked for, and not its opposite."""
    if not (isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high):
        raise RequestError(name, f"must be a number from {low:g} to {high:g}, found {_short(value)}")


def _check_integer(name: str, value: Any, low: int, high: int | None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and low <= value
    if not (good and (high is None or value <= high)):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(name, f"must be an integer {limits}, found {_short(value)}")


def _short(value: Any) -> str:
    """A value from outside, for a message of one line: an integer may have too many digits to print."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# --- the filters, each a pure function ----------------------------------------------------------


def logit_bias(logits: Float[Tensor, "... V"], bias: Mapping[int, float]) -> Float[Tensor, "... V"]:
    """Adds its value to each named token's logit: -100 forbids in practice, 100 forces."""
    if not bias:
        return logits
    ids = torch.tensor(list(bias), device=logits.device)
    values = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    return logits.index_add(-1, ids, values.expand(*logits.shape[:-1], -1))


def repetition_penalty(
    logits: Float[Tensor, "... V"], seen: Bool[Tensor, "... V"], penalty: float
) -> Float[Tensor, "... V"]:
    """Makes every token already seen less likely, once: l / penalty if l > 0, else l · penalty
    (CTRL, Keskar et al. 2019, with the sign handled as everyone does since)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence_frequency_penalty(
    logits: Float[Tensor, "... V"], counts: Float[Tensor, "... V"], presence: float, frequency: float
) -> Float[Tensor, "... V"]:
    """l - presence · [count > 0] - frequency · count, where `counts` holds the new tokens alone
    (the OpenAI API's formula)."""
    return logits - presence * (counts > 0) - frequency * counts


def temperature(logits: Float[Tensor, "... V"], t: float) -> Float[Tensor, "... V"]:
    """(l - max l) / t; at a temperature of 0 the likeliest token alone is left.

    The largest is taken away first, which changes no probability and keeps a small t from overflowing.
    """
    if t < GREEDY_BELOW:
        return top_k(logits, 1)
    return (logits - logits.amax(-1, keepdim=True)) / t


def top_k(logits: Float[Tensor, "... V"], k: int) -> Float[Tensor, "... V"]:
    """Keeps the k likeliest tokens: exactly k, the lower id on ties. k ≤ 0 or k ≥ V keeps all."""
    if not 0 < k < logits.shape[-1]:
        return logits
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return _keep(logits, order[..., :k])


def top_p(logits: Float[Tensor, "... V"], p: float) -> Float[Tensor, "... V"]:
    """Keeps the smallest set of likeliest tokens whose probabilities reach p (Holtzman et al. 2019): a token
    stays while those before it hold less than p, and the first always stays."""
    if p >= 1:
        return logits
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    mass = ranked.double().softmax(-1)
    stays = mass.cumsum(-1) - mass < p
    stays[..., 0] = True
    return torch.where(torch.zeros_like(stays).scatter(-1, order, stays), logits, -torch.inf)


def min_p(logits: Float[Tensor, "... V"], p: float) -> Float[Tensor, "... V"]:
    """Keeps tokens of at least p times the likeliest one's probability (Nguyen et al. 2024)."""
    if p <= 0:
        return logits
    relative = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
    return torch.where(relative >= p, logits, -torch.inf)


def _keep(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.full_like(logits, -torch.inf).scatter(-1, ids, logits.gather(-1, ids))


def distribution(logits: Float[Tensor, "... V"], params: SamplingParams) -> Float[Tensor, "... V"]:
    """The probabilities with which a token is drawn, from logits after bias and penalties.

    The obvious twin of `candidates`: it sorts the whole vocabulary, up to three times.
    """
    logits = temperature(logits.float(), params.temperature)
    logits = top_k(logits, params.top_k)
    logits = top_p(logits, params.top_p)
    logits = min_p(logits, params.min_p)
    return logits.softmax(-1)


# --- the same for one row, fast -----------------------------------------------------------------


class Candidates(NamedTuple):
    """What may be drawn: ids, and weights in proportion to their probabilities, 0 if ruled out."""

    ids: Int[Tensor, "N"]
    weights: Float[Tensor, "N"]


def candidates(logits: Float[Tensor, "V"], params: SamplingParams) -> Candidates:
    """What `distribution` says of one row, without sorting the vocabulary.

    Raises `NonFiniteLogitsError` on NaN or infinite logits.
    """
    logits = logits.float()
    peak = _finite(logits.max())
    if 0 < params.top_k < logits.shape[-1]:
        ids = largest(logits, params.top_k)
        logits = logits[ids]
    else:
        ids = torch.arange(logits.shape[-1], device=logits.device)
    weights = ((logits - peak) / params.temperature).exp()
    if params.top_p < 1:
        weights = nucleus(weights, params.top_p)
    if params.min_p > 0:
        weights = weights * (weights >= params.min_p)  # the largest weight is 1
    return Candidates(ids, weights)


def largest(values: Float[Tensor, "N"], k: int) -> Int[Tensor, "K"]:
    """Where the k largest values are, largest first, the lower index on ties (torch.topk promises none)."""
    places = (values >= values.topk(k).values[-1]).nonzero().squeeze(1)
    return places[values[places].sort(descending=True, stable=True).indices[:k]]


def nucleus(weights: Float[Tensor, "N"], p: float) -> Float[Tensor, "N"]:
    """Keeps the fewest, largest weights that together reach p of the sum; the others become 0.

    Weights are put into classes of nearly equal ones, and only the class in which the sum passes p has to
    be sorted: 150,000 weights take 1 ms, and 10 if sorted all. A weight's class is the leading bits of its
    fp32 number, since non-negative floats are in the same order as their bits.
    """
    classes = weights.view(torch.int32) >> 16
    mass = torch.bincount(classes, weights.double())
    from_the_top = mass.flip(0).cumsum(0)
    needed = p * from_the_top[-1]
    edge = len(mass) - 1 - int(torch.searchsorted(from_the_top, needed))
    members = (classes == edge).nonzero().squeeze(1)
    ranked, order = weights[members].sort(descending=True, stable=True)
    before = mass[edge + 1 :].sum() + ranked.cumsum(0, dtype=torch.float64) - ranked
    kept = weights * (classes > edge)
    kept[members[order]] = ranked * (before < needed)
    return kept


def _finite(value: Tensor) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise NonFiniteLogitsError(
            "the model's logits are not finite: load it in a wider dtype, or verify the checkpoint"
        )
    return number


def draw(weights: Float[Tensor, "N"], uniform: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Indices drawn in proportion to `weights`, one for each number of `uniform` in [0, 1): the first whose
    cumulative weight exceeds it. A weight of 0 is never drawn."""
    edges = weights.cumsum(0, dtype=torch.float64)
    return torch.searchsorted(edges, uniform.to(edges) * edges[-1], right=True)


# --- log-probabilities --------------------------------------------------------------------------


class Logprobs(NamedTuple):
    """Logarithms of the model's own probabilities: before bias, penalties, temperature and filters."""

    chosen: Float[Tensor, "..."]
    top_ids: Int[Tensor, "... N"]
    top: Float[Tensor, "... N"]


def logprobs(logits: Float[Tensor, "... V"], ids: Int[Tensor, "..."], top: int = 0) -> Logprobs:
    """Log-softmax, in fp32, of the raw logits at `ids`, and the `top` likeliest tokens, likeliest first."""
    if not 0 <= top <= logits.shape[-1]:
        raise RequestError("logprobs", f"must be from 0 to the vocabulary's {logits.shape[-1]}, found {top}")
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    best = logits.topk(top, dim=-1)
    chosen = logits.gather(-1, ids.unsqueeze(-1)) - total
    return Logprobs(chosen.squeeze(-1), best.indices, best.values - total)


# --- one request --------------------------------------------------------------------------------


class Sampler:
    """Chooses the tokens of one sequence: its parameters, its random numbers, and what it has seen.

    One uniform number is used per token, from a generator of its own, so that a seeded request gives the
    same tokens whoever else is in the batch.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Iterable[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        params.check_vocabulary(vocab_size)
        self.params = params
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)
        if params.penalizes:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[torch.tensor(list(prompt), dtype=torch.int64)] = True
            self.seen = self.seen.to(device)
            self.counts = torch.zeros(vocab_size, device=device)

    def __call__(self, logits: Float[Tensor, "V"]) -> int:
        """The next token, from then on seen. Raises `NonFiniteLogitsError` on NaN or infinite logits."""
        logits = self.adjusted(logits.float())
        if self.params.greedy:
            token = int(
                logits.argmax()
            )  # the first of equals, as torch.argmax promises; NaN counts as largest
            _finite(logits[token])
        else:
            ids, weights = candidates(logits, self.params)
            uniform = torch.rand((), dtype=torch.float64, generator=self.generator)
            token = int(ids[draw(weights, uniform)])
        if self.params.penalizes:
            self.seen[token] = True
            self.counts[token] += 1
        return token

    def adjusted(self, logits: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
        """The logits after bias and penalties."""
        params = self.params
        logits = logit_bias(logits, params.logit_bias)
        if params.penalizes:
            logits = repetition_penalty(logits, self.seen, params.repetition_penalty)
            logits = presence_frequency_penalty(
                logits, self.counts, params.presence_penalty, params.frequency_penalty
            )
        return logits
