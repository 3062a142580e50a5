"""Feed-forwards and mixtures of experts in a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from openbook.spec.hf.term import NEVER, NONE, ONE, Keys, Known, Term
from openbook.spec.model import Activation, Experts, Groups, Mlp, ModelSpec, Router, Shared
from openbook.spec.reader import Reader, UnsupportedError

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
"""transformers' names; of several for one function, the first is written."""


def activation(names: Mapping[str, Activation] = ACTIVATIONS) -> Term[Activation]:
    def write(value: Activation, spec: ModelSpec) -> Keys:
        mlp = spec.layers[0].mlp
        gated = mlp.gated if isinstance(mlp, Mlp) else mlp.expert.gated
        if value == "gelu_tanh" and gated:
            return {"hidden_act": "gelu_pytorch_tanh"}  # the same function, computed by torch itself
        return {"hidden_act": next(name for name, meaning in names.items() if meaning == value)}

    return Term(lambda c, known: c.choice("hidden_act", names), write)


ACTIVATION = activation()
GEMMA_ACTIVATION = activation({**ACTIVATIONS, "gelu": "gelu_tanh"})
"""Old files say "gelu" where they mean the tanh form."""

WIDTH = Term[int](
    lambda c, known: c.integer("intermediate_size"), lambda value, spec: {"intermediate_size": value}
)
WIDTH_OR_FOUR_TIMES = Term[int](
    lambda c, known: c.maybe_integer("intermediate_size") or 4 * known.d_model, WIDTH.write
)
FOUR_TIMES = Term[int](lambda c, known: 4 * known.d_model, lambda value, spec: {})
"""Four times the model's width; there is no key for another."""


@dataclass(frozen=True)
class Dense:
    """One and the same feed-forward in every layer."""

    gated: bool = True
    d_ff: Term[int] = WIDTH
    activation: Term[Activation] = ACTIVATION
    bias: Term[bool] = NEVER

    def read(self, c: Reader, known: Known) -> list[Mlp | Experts]:
        return [self.read_one(c, known)] * known.n_layers

    def read_one(self, c: Reader, known: Known) -> Mlp:
        bias = self.bias.read(c, known)
        return Mlp(
            d_ff=self.d_ff.read(c, known),
            activation=self.activation.read(c, known),
            gated=self.gated,
            up_bias=bias,
            down_bias=bias,
        )

    def write(self, mlps: list[Mlp | Experts], spec: ModelSpec) -> Keys:
        first = mlps[0]
        if not isinstance(first, Mlp):
            raise UnsupportedError("it has no experts")
        return self.write_one(first, spec)

    def write_one(self, mlp: Mlp, spec: ModelSpec) -> Keys:
        return {
            **self.d_ff.write(mlp.d_ff, spec),
            **self.activation.write(mlp.activation, spec),
            **self.bias.write(mlp.up_bias, spec),
        }


PLAIN_FEED_FORWARD = Dense()

# --- which layers are mixtures ------------------------------------------------------------------

EVERY_LAYER = Term[list[bool]](lambda c, known: [True] * known.n_layers, lambda sparse, spec: {})


def _read_indices(c: Reader, word: str, known: Known) -> set[int] | None:
    """Numbers of layers, in a list of any length up to all of them."""
    listed = c.raw(word)
    if listed is None:
        return None
    if not isinstance(listed, list | tuple) or len(listed) > known.n_layers:
        c.fail(word, f"must be a list of at most {known.n_layers} layers")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < known.n_layers for i in listed):
        c.fail(word, f"must hold numbers of layers, from 0 to {known.n_layers - 1}")
    return set(listed)


def _read_sparse_step(c: Reader, known: Known) -> list[bool]:
    dense = _read_indices(c, "mlp_only_layers", known) or set()
    step = c.integer("decoder_sparse_step")
    return [i not in dense and (i + 1) % step == 0 for i in range(known.n_layers)]


def _write_sparse_step(sparse: list[bool], spec: ModelSpec) -> Keys:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, own in enumerate(sparse) if not own]}


def _read_first_dense(c: Reader, known: Known) -> list[bool]:
    first = c.integer("first_k_dense_replace", least=0)
    return [i >= first for i in range(known.n_layers)]


def _write_first_dense(sparse: list[bool], spec: ModelSpec) -> Keys:
    return {"first_k_dense_replace": sparse.index(True)}


def _read_moe_layers(c: Reader, known: Known) -> list[bool]:
    step, listed = c.integer("interleave_moe_layer_step"), _read_indices(c, "moe_layers", known)
    if listed is None:
        return [(i + 1) % step == 0 for i in range(known.n_layers)]
    return [i in listed for i in range(known.n_layers)]


def _write_moe_layers(sparse: list[bool], spec: ModelSpec) -> Keys:
    return {"moe_layers": [i for i, own in enumerate(sparse) if own]}


SPARSE_STEP = Term(_read_sparse_step, _write_sparse_step)
AFTER_FIRST_DENSE = Term(_read_first_dense, _write_first_dense)
MOE_LAYERS = Term(_read_moe_layers, _write_moe_layers)

# --- groups and shared experts ------------------------------------------------------------------


def _read_groups(c: Reader, score: str) -> Groups | None:
    """Narrowing to all groups is none."""
    n_groups, n_active = c.maybe_integer("n_group") or 1, c.maybe_integer("topk_group") or 1
    if n_active > n_groups:
        c.fail("topk_group", f"must be at most n_group = {n_groups}, found {n_active}")
    if n_active == n_groups:
        return None
    if score == "top2" and c.integer("n_routed_experts") < 2 * n_groups:
        c.fail("n_group", f"must leave two experts or more in each group, found {n_groups}")
    return Groups(n_groups, n_active, "top2" if score == "top2" else "max")


def _write_groups(groups: Groups | None) -> Keys:
    return {"n_group": groups.n_groups if groups else 1, "topk_group": groups.n_active if groups else 1}


_METHODS = {"greedy": False, "group_limited_greedy": True}


def _read_limited_groups(c: Reader, known: Known) -> Groups | None:
    if c.choice("topk_method", _METHODS):
        return _read_groups(c, "max")
    c.ignore(["n_group", "topk_group"])
    return None


LIMITED_GROUPS = Term[Groups | None](
    _read_limited_groups,
    lambda groups, spec: {
        "topk_method": "group_limited_greedy" if groups else "greedy",
        **_write_groups(groups),
    },
)
TOP2_GROUPS = Term[Groups | None](
    lambda c, known: _read_groups(c, "top2"), lambda groups, spec: _write_groups(groups)
)


def shared_width(word: str) -> Term[int | None]:
    return Term(lambda c, known: c.integer(word), lambda value, spec: {word: value})


def shared_count(word: str, width: str) -> Term[int | None]:
    """So many experts' widths side by side."""

    def write(value: int | None, spec: ModelSpec) -> Keys:
        experts = next(block.mlp for block in spec.layers if isinstance(block.mlp, Experts))
        return {word: (value or 0) // experts.expert.d_ff}

    return Term(lambda c, known: c.integer(word) * c.integer(width), write)


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: what the type fixes, the keys of the sizes, and which layers are mixtures.

    `router` and `expert_bias`, `clamp` and `up_offset` are of every model of the type; `experts`, `active`
    and `width` are keys. `dense` is the feed-forward of the other layers, and of the experts but for the
    width. `renormalise` is a flag that decides in the router's place. `shared` is the width of the
    feed-forward that every token gets beside the experts.
    """

    router: Router
    experts: str = "num_experts"
    active: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    layers: Term[list[bool]] = EVERY_LAYER
    dense: Dense = PLAIN_FEED_FORWARD
    renormalise: Term[bool] | None = None
    scale: Term[float] = ONE
    groups: Term[Groups | None] = NONE
    shared: Term[int | None] = NONE
    shared_is_gated: bool = False
    expert_bias: bool = False
    clamp: Term[float | None] = NONE
    up_offset: float = 0.0

    def read(self, c: Reader, known: Known) -> list[Mlp | Experts]:
        sparse = self.layers.read(c, known)
        dense = self.dense.read_one(c, known)
        experts = self._read_experts(c, known, dense)
        return [experts if own else dense for own in sparse]

    def _read_experts(self, c: Reader, known: Known, dense: Mlp) -> Experts:
        expert = replace(
            dense,
            d_ff=c.integer(self.width),
            up_bias=self.expert_bias,
            down_bias=self.expert_bias,
            clamp=self.clamp.read(c, known),
            up_offset=self.up_offset,
        )
        shared = self.shared.read(c, known)
        renormalise = self.renormalise.read(c, known) if self.renormalise else self.router.renormalise
        n_experts = c.integer(self.experts)
        return Experts(
            n_experts=n_experts,
            n_active=c.integer(self.active, most=n_experts),
            expert=expert,
            router=replace(
                self.router,
                renormalise=renormalise,
                scale=self.scale.read(c, known),
                groups=self.groups.read(c, known),
            ),
            shared=Shared(replace(dense, d_ff=shared), self.shared_is_gated) if shared else None,
        )

    def write(self, mlps: list[Mlp | Experts], spec: ModelSpec) -> Keys:
        experts = next((mlp for mlp in mlps if isinstance(mlp, Experts)), None)
        if experts is None:
            raise UnsupportedError("it has experts")
        dense = next((mlp for mlp in mlps if isinstance(mlp, Mlp)), None)
        keys = self.dense.write_one(dense or experts.expert, spec)
        if dense is None:
            keys.pop("intermediate_size", None)  # no layer has it
        return {
            **keys,
            self.experts: experts.n_experts,
            self.active: experts.n_active,
            self.width: experts.expert.d_ff,
            **self.layers.write([isinstance(mlp, Experts) for mlp in mlps], spec),
            **(self.renormalise.write(experts.router.renormalise, spec) if self.renormalise else {}),
            **self.scale.write(experts.router.scale, spec),
            **self.groups.write(experts.router.groups, spec),
            **self.shared.write(experts.shared and experts.shared.mlp.d_ff, spec),
            **self.clamp.write(experts.expert.clamp, spec),
        }
