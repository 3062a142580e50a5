"""Mixtures of experts in a GGUF file's metadata."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from openbook.spec.gguf.architecture import Architecture, Mixture
from openbook.spec.gguf.rope import read_number
from openbook.spec.model import Experts, Groups, Mlp, ModelSpec, Router, Shared
from openbook.spec.reader import Reader, UnsupportedError

_SCORES = {1: "softmax", 2: "sigmoid", 3: "chosen_softmax"}
"""`expert_gating_func`, the codes of llama.cpp."""


@dataclass(frozen=True)
class ExpertsReader:
    """What the metadata says of all layers that have experts."""

    arch: Architecture
    c: Reader

    @property
    def count(self) -> int:
        """E, or 0 for a model without experts."""
        count = self.c.maybe_integer("expert_count", least=0) or 0
        if count and self.arch.mixture is None:
            self.c.fail("expert_count", f"is {count}, but this architecture has no experts", UnsupportedError)
        if not count:
            self.c.only("expert_used_count", (0,), "there are no experts")
        return count

    def layers(self, n_layers: int) -> list[bool]:
        """True for each layer that has experts."""
        mixture = self.arch.mixture
        if not self.count or mixture is None:
            self.c.ignore(_SIZES)
            return [False] * n_layers
        match mixture.dense:
            case "leading":
                first = self.c.maybe_integer("leading_dense_block_count", least=0) or 0
                return [i >= first for i in range(n_layers)]
            case "interleaved":
                step = self.c.integer("interleave_moe_layer_step")
                self.c.only("leading_dense_block_count", (0,), "the dense layers are one in so many")
                return [(i + 1) % step == 0 for i in range(n_layers)]
            case "none":
                self.c.only("leading_dense_block_count", (0,), "all layers have experts")
                return [True] * n_layers

    def read(self, shown: frozenset[str]) -> Experts:
        """The experts of a layer with these tensors."""
        c, mixture = self.c, _mixture(self.arch)
        width = c.maybe_integer(mixture.width)
        if width is None:
            width = c.integer("feed_forward_length")
        c.ignore(_SIZES)
        expert = Mlp(
            width,
            mixture.activation or self.arch.activation,
            self.arch.gated,
            up_bias=mixture.biases,
            down_bias=mixture.biases,
            clamp=mixture.clamp,
            up_offset=mixture.up_offset,
        )
        return Experts(
            n_experts=self.count,
            n_active=c.integer("expert_used_count", most=self.count),
            expert=expert,
            router=self._router(mixture, shown),
            shared=self._shared(mixture, expert),
        )

    def _router(self, mixture: Mixture, shown: frozenset[str]) -> Router:
        c, router, stated = self.c, mixture.router, mixture.stated
        code = c.maybe_integer("expert_gating_func", least=0, most=max(_SCORES)) or 0
        if code and "score" in stated:
            router = replace(router, score=_SCORES[code])
        elif code and not _means_the_same(_SCORES[code], router):
            c.fail("expert_gating_func", f"must be that of {router.score}, found {code}", UnsupportedError)
        renormalise = c.maybe_flag("expert_weights_norm")
        if "renormalise" in stated:
            router = replace(router, renormalise=bool(renormalise))
        elif renormalise and not router.renormalise and router.score != "chosen_softmax":
            c.fail("expert_weights_norm", "is true, but this architecture does not do it", UnsupportedError)
        scale = read_number(c, "expert_weights_scale", 0.0, positive=False) or 1.0
        if "scale" in stated:
            router = replace(router, scale=scale)
        elif scale != 1:
            c.fail("expert_weights_scale", f"is {scale}, but this architecture has none", UnsupportedError)
        return replace(
            router,
            correction="exp_probs_b.bias" in shown if "correction" in stated else router.correction,
            groups=self._groups(router) if "groups" in stated else None,
            sum_eps=router.sum_eps if router.score == "sigmoid" else 0.0,
        )

    def _groups(self, router: Router) -> Groups | None:
        """A softmax narrows by each group's best expert (DeepSeek-V2), a sigmoid by its two best (V3)."""
        count = self.c.maybe_integer("expert_group_count", least=0) or 0
        used = self.c.maybe_integer("expert_group_used_count", least=0) or 0
        if count <= 1 or used == 0:
            return None
        return Groups(count, used, "top2" if router.score == "sigmoid" else "max")

    def _shared(self, mixture: Mixture, expert: Mlp) -> Shared | None:
        c = self.c
        length = c.maybe_integer("expert_shared_feed_forward_length", least=0) or 0
        count = c.maybe_integer("expert_shared_count", least=0) or 0
        match mixture.shared:
            case "count":
                width = expert.d_ff * count
            case "length":
                width = length
            case "one":
                width = expert.d_ff
            case None:
                width = 0
        if length and mixture.shared is not None and length != width:
            c.fail("expert_shared_feed_forward_length", f"must be {width}, found {length}", UnsupportedError)
        return Shared(replace(expert, d_ff=width), mixture.shared_gated) if width else None


_SIZES = ("expert_feed_forward_length", "expert_shared_count", "expert_shared_feed_forward_length")
"""Keys that say nothing further once the experts are read, or of a model that has none."""


def _mixture(arch: Architecture) -> Mixture:
    if arch.mixture is None:
        raise UnsupportedError(f"{arch.name} has no experts")
    return arch.mixture


def _means_the_same(score: str, router: Router) -> bool:
    """A softmax of the chosen is a softmax of all that is renormalised over the chosen."""
    return score == router.score or {score, router.score} == {"softmax", "chosen_softmax"}


# --- writing ------------------------------------------------------------------------------------


def write_experts(arch: Architecture, spec: ModelSpec) -> dict[str, Any]:
    """The keys for a model with experts; whether they fit is seen by reading them."""
    mlps = [block.mlp for block in spec.layers]
    found = next((mlp for mlp in mlps if isinstance(mlp, Experts)), None)
    mixture = arch.mixture
    if found is None or mixture is None:
        return {}
    router, stated = found.router, mixture.stated
    keys: dict[str, Any] = {
        "expert_count": found.n_experts,
        "expert_used_count": found.n_active,
        "expert_feed_forward_length": found.expert.d_ff,
    }
    if "score" in stated:
        keys["expert_gating_func"] = next(code for code, name in _SCORES.items() if name == router.score)
    if "renormalise" in stated:
        keys["expert_weights_norm"] = router.renormalise
    if "scale" in stated:
        keys["expert_weights_scale"] = float(router.scale)
    if "groups" in stated and router.groups:
        keys["expert_group_count"] = router.groups.n_groups
        keys["expert_group_used_count"] = router.groups.n_active
    match mixture.shared:
        case "count":
            keys["expert_shared_count"] = found.shared.mlp.d_ff // found.expert.d_ff if found.shared else 0
        case "length" if found.shared:
            keys["expert_shared_feed_forward_length"] = found.shared.mlp.d_ff
    dense = [not isinstance(mlp, Experts) for mlp in mlps]
    match mixture.dense:
        case "leading":
            keys["leading_dense_block_count"] = dense.index(False)
        case "interleaved":
            keys["interleave_moe_layer_step"] = dense.index(False) + 1
    return keys
