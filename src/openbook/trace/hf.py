"""transformers' steps under our names, recorded while it runs.

Which of its modules is which of ours follows from the dialect: the table that says where a checkpoint
keeps a parameter also says which module has it, and how its rows, and so its outputs, are arranged. What
lies between the modules of an attention is found by what it is: the last matrix product before a softmax
has the rotated queries and keys, the softmax reads masked scores and gives probabilities. No model's
code is known here by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from openbook.ledger import Ledger, OpRow
from openbook.spec.model import Attention, Block, Experts, LatentAttention, ModelSpec
from openbook.spec.reader import UnsupportedError
from openbook.trace.record import Only, axes_of, op_rows, shaped
from openbook.trace.schema import Trace, dtype_of
from openbook.weights.dialects import HF, Place, places


def load_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' own model of a folder: eager attention, safetensors only, no code of the folder's, no
    network. Raises `ImportError` without transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    ).eval()


@torch.no_grad()
def record_transformers(model: Any, spec: ModelSpec, ids: Tensor, only: Only | None = None) -> Trace:
    """Runs a model of transformers on `ids` [B, T] and keeps its steps, or those for which `only` says so.

    `spec` is our reading of the same configuration. Steps that the model has no tensor for, or one that
    cannot be told, are left out. Raises `UnsupportedError` for a model without a dialect.
    """
    dtype = dtype_of(model.get_input_embeddings().weight)
    rows = {row.name: row for row in op_rows(spec, dtype, ids.shape[0], ids.shape[1])}
    modules = _Modules.of(model, spec)
    seen = _Seen(rows, {name for name in rows if only is None or only(name)})
    with ExitStack() as undo:
        for hook in _hooks(modules, spec, seen):
            undo.callback(hook.remove)
        watch = undo.enter_context(_Watch(seen))
        for hook in _watched(modules, spec, watch):
            undo.callback(hook.remove)
        logits = model(input_ids=ids, use_cache=False).logits
    seen.keep("head", logits)
    positions = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
    return Trace(
        spec=spec,
        dtype=dtype,
        ids=ids,
        positions=positions,
        tensors={name: seen.tensors[name] for name in rows if name in seen.tensors},
        axes={name: axes_of(row) for name, row in rows.items()},
        keys=dict.fromkeys(range(spec.n_layers), positions),
        choices=seen.choices,
        parameters=modules.parameters,
    )


class _Seen:
    """The tensors of one run by step, in the ledger's shapes. Each is a copy: transformers works in place."""

    def __init__(self, rows: Mapping[str, OpRow], wanted: set[str]) -> None:
        self.rows, self.wanted = rows, wanted
        self.tensors: dict[str, Tensor] = {}
        self.choices: dict[str, Tensor] = {}

    def keep(self, name: str, x: Tensor) -> None:
        if name in self.wanted:
            self.tensors[name] = shaped(x.detach(), self.rows[name]).clone()


# --- whose module is whose ----------------------------------------------------------------------


@dataclass
class _Modules:
    """Our module's name → their module, and which of its outputs are ours (None: all, in their order)."""

    model: Any
    found: dict[str, tuple[nn.Module, Tensor | None]] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(model: Any, spec: ModelSpec) -> _Modules:
        kind = model.config.model_type
        if kind not in HF:
            raise UnsupportedError(f"no table names the modules of {kind!r}; there are {', '.join(HF)}")
        shapes = {row.name: row.shape for row in Ledger(spec).tensors}
        modules = _Modules(model)
        renamed = _renamings(model)
        for place in places(spec, shapes, HF[kind]):
            modules._add(place, renamed)
        return modules

    def _add(self, place: Place, renamed: Callable[[str], str]) -> None:
        stored = place.stored if _parameter(self.model, place.stored) is not None else renamed(place.stored)
        values = _parameter(self.model, stored)
        if values is None:
            return
        owner = stored.rpartition(".")[0]
        alone = place.index is None and stored == place.stored
        for name in place.parameters:
            self.paths.setdefault(name.rpartition(".")[0], owner)
        if not alone:
            return  # many stored tensors have become one: it is not one of our modules
        self.parameters |= dict(place.load(values.detach()))
        module = self.model.get_submodule(owner)
        if values.ndim > 2:
            return
        whole = torch.arange(sum(place.sizes))
        for name, rows in place.load(whole):
            self.found.setdefault(name.rpartition(".")[0], (module, rows if len(place.sizes) > 1 else None))

    def layer(self, index: int) -> nn.Module | None:
        """Their layer: the module down to the first number in the path of anything of our layer's."""
        for name, path in self.paths.items():
            if name.startswith(f"layers.{index}.") and (match := re.match(r".*?\.\d+(?=\.)", path)):
                return self.model.get_submodule(match[0])
        return None

    def parent(self, name: str) -> nn.Module | None:
        """The module around the one that is our `name`."""
        path = self.paths.get(name, "").rpartition(".")[0]
        return self.model.get_submodule(path) if path else None


def _parameter(model: nn.Module, name: str) -> Tensor | None:
    owner, _, own = name.rpartition(".")
    try:
        return model.get_submodule(owner)._parameters.get(own)
    except AttributeError:
        return None


def _renamings(model: Any) -> Callable[[str], str]:
    """What transformers calls a stored tensor once it is loaded, where that is not the stored name."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key
    except ImportError:  # an earlier transformers, whose modules have the stored names
        return lambda stored: stored
    steps = get_model_conversion_mapping(model)
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    renamings = [step for step in steps if not isinstance(step, WeightConverter)]
    return lambda stored: rename_source_key(stored, renamings, converters)[0]  # type: ignore[arg-type]


# --- modules' inputs and outputs ----------------------------------------------------------------


def _hooks(modules: _Modules, spec: ModelSpec, seen: _Seen) -> Iterator[Any]:
    """Hooks that keep what goes in and out of modules that are ours by name."""
    for name, (module, rows) in modules.found.items():
        if name in seen.rows and name not in ("embed", "positions", "head") and not name.endswith(".router"):
            yield module.register_forward_hook(_output(seen, name, rows))
    if spec.positions is not None or spec.embed_norm is not None:
        yield modules.model.get_input_embeddings().register_forward_hook(_output(seen, "embed", None))
    if spec.positions is not None and spec.embed_norm is not None:
        yield from _input(modules, seen, "embed_norm", "positions")
    before = "embed_norm" if spec.embed_norm else "positions" if spec.positions else "embed"
    if (first := modules.layer(0)) is not None:
        yield _reading(first, seen, before)
    for i, block in enumerate(spec.layers):
        yield from _layer_hooks(modules, block, f"layers.{i}", modules.layer(i), seen)


def _layer_hooks(
    modules: _Modules, block: Block, where: str, layer: nn.Module | None, seen: _Seen
) -> Iterator[Any]:
    yield from _input(modules, seen, f"{where}.attn.o", f"{where}.attn.mix")
    yield from _input(modules, seen, f"{where}.mlp.down", f"{where}.mlp.act")
    yield from _input(modules, seen, f"{where}.mlp.shared.down", f"{where}.mlp.shared.act")
    if block.residual == "serial":
        after = ["attn_add_norm", "mlp_norm", "mlp.gate", "mlp.up", "mlp.router"]
        reader = next((n for n in after if f"{where}.{n}" in modules.found), None)
        if reader is not None:
            yield from _input(modules, seen, f"{where}.{reader}", f"{where}.attn_add")
    after = [n for n in ("mlp_add_norm", "end_norm") if getattr(block, n) is not None]
    if after:
        yield from _input(modules, seen, f"{where}.{after[0]}", f"{where}.mlp_add")
    elif layer is not None:
        yield layer.register_forward_hook(_output(seen, f"{where}.mlp_add", None))
    if isinstance(block.mlp, Experts) and (experts := _experts(modules, where)) is not None:
        yield experts.register_forward_pre_hook(
            _choice(seen, f"{where}.mlp.chosen", block.mlp), with_kwargs=True
        )
        yield experts.register_forward_hook(_output(seen, f"{where}.mlp.experts.sum", None))
        around = modules.parent(f"{where}.mlp.router")
        if block.mlp.shared is not None and around is not None:
            yield around.register_forward_hook(_output(seen, f"{where}.mlp.shared_add", None))


def _experts(modules: _Modules, where: str) -> nn.Module | None:
    """The module that has all experts' matrices."""
    path = modules.paths.get(f"{where}.mlp.experts.down")
    return modules.model.get_submodule(path) if path else None


def _output(seen: _Seen, name: str, rows: Tensor | None) -> Callable[..., None]:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        y = output if isinstance(output, Tensor) else output[0]
        seen.keep(name, y if rows is None else y[..., rows.to(y.device)])

    return keep


def _input(modules: _Modules, seen: _Seen, reader: str, name: str) -> Iterator[Any]:
    """Keeps what the module `reader` reads as the step `name`."""
    if reader in modules.found and name in seen.rows:
        yield _reading(modules.found[reader][0], seen, name)


def _reading(module: nn.Module, seen: _Seen, name: str) -> Any:
    def keep(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.keep(name, inputs[0] if inputs else named["hidden_states"])

    return module.register_forward_pre_hook(keep, with_kwargs=True)


def _choice(seen: _Seen, name: str, experts: Experts) -> Callable[..., None]:
    """Keeps the experts of each token and their weights: the arguments [B·T, A] of the experts' module."""

    def keep(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = [x for x in (*inputs, *named.values()) if isinstance(x, Tensor)]
        chosen = [x for x in given if x.shape[-1] == experts.n_active]
        ids = next((x for x in chosen if not x.is_floating_point()), None)
        weights = next((x for x in chosen if x.is_floating_point()), None)
        if ids is None or weights is None or name not in seen.wanted:
            return
        seen.keep(name, weights)
        seen.choices[name] = ids.reshape(seen.rows[name].out_shape)

    return keep


# --- inside the attention -----------------------------------------------------------------------

_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm"}


def _watched(modules: _Modules, spec: ModelSpec, watch: _Watch) -> Iterator[Any]:
    """Hooks that tell the watch in which layer's attention, or router, it is."""
    for i, block in enumerate(spec.layers):
        places: dict[str, nn.Module | None] = {"attn": modules.parent(f"layers.{i}.attn.o")}
        if f"layers.{i}.mlp.router" in modules.found:
            places["router"] = modules.found[f"layers.{i}.mlp.router"][0]
        for kind, module in places.items():
            if module is not None:
                yield module.register_forward_pre_hook(watch.entering(kind, f"layers.{i}", block))
                yield module.register_forward_hook(watch.leaving)


@dataclass
class _Product:
    """q kᵀ, and what has been made of it since."""

    q: Tensor
    k: Tensor
    chain: list[Tensor]

    def continues(self, x: Tensor) -> bool:
        """Whether x has a score for each query and key as well."""
        return x.numel() == self.chain[-1].numel() and x.shape[-2:] == self.chain[-1].shape[-2:]


class _Watch(TorchFunctionMode):
    """Sees every call of a torch function while an attention or a router runs."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self._seen = seen
        self._kind, self._where = "", ""
        self._block: Block | None = None
        self._product: _Product | None = None

    def entering(self, kind: str, where: str, block: Block) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            self._kind, self._where, self._block, self._product = kind, where, block, None

        return enter

    def leaving(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._kind, self._product = "", None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            if self._kind == "attn":
                self._attention(getattr(func, "__name__", ""), args, kwargs, out)
            elif self._kind == "router" and getattr(func, "__name__", "") == "linear":
                self._seen.keep(f"{self._where}.mlp.router", out)
                self._kind = ""
        return out

    def _attention(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        if name in _PRODUCTS:
            factors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][-2:]
            self._product = _Product(factors[0], factors[1].mT, [out.clone()])
        elif self._product is None or not out.is_floating_point():
            return
        elif name == "softmax":
            self._keep_scores(self._product, out)
            self._kind = ""
        elif self._product.continues(out):
            self._product.chain.append(out.clone())

    def _keep_scores(self, product: _Product, probs: Tensor) -> None:
        seen, attn = self._seen, f"{self._where}.attn"
        shape = seen.rows[f"{attn}.scores"].out_shape
        if product.chain[-1].numel() != torch.Size(shape).numel():
            return
        chain = [x.reshape(shape).float() for x in product.chain]
        # The first that has a mask's hugest negative number in it is masked; the one before it is not.
        hidden = [x <= torch.finfo(y.dtype).min / 2 for x, y in zip(chain, product.chain, strict=True)]
        at = next((i for i, cells in enumerate(hidden) if cells.any()), len(chain) - 1)
        scores = chain[max(at - 1, 0)] if hidden[at].any() else chain[at]
        if self._block is not None and isinstance(self._block.attn, Attention) and self._block.attn.alibi:
            scores = scores - _shift(scores, product, self._block.attn.scale)
        masked = scores.masked_fill(hidden[at], -torch.inf)
        seen.keep(f"{attn}.scores", scores)
        seen.keep(f"{attn}.masked", masked)
        seen.keep(f"{attn}.probs", probs[..., : shape[-1]].reshape(shape).float())  # a sink's is the last
        self._keep_rotated(product.q, product.k)

    def _keep_rotated(self, q: Tensor, k: Tensor) -> None:
        block, where = self._block, self._where
        if block is None or block.attn.rope is None:
            return
        attn = block.attn
        B, T = self._seen.rows[f"{where}.attn.q_rope"].out_shape[0], q.shape[-2]
        q, k = (x.reshape(B, -1, T, x.shape[-1]) for x in (q, k))
        if isinstance(attn, LatentAttention):
            self._seen.keep(f"{where}.attn.q_rope", q[..., -attn.rope_dim :])
            self._seen.keep(f"{where}.attn.k_rope", k[:, 0, :, -attn.rope_dim :])
            return
        k = k[:, :: max(k.shape[1] // attn.n_kv_heads, 1)]
        last_q = "temperature" if attn.temperature else "q_norm" if _after(attn.q_norm) else "q_rope"
        last_k = "k_norm" if _after(attn.k_norm) else "k_rope"
        self._seen.keep(f"{where}.attn.{last_q}", q)
        self._seen.keep(f"{where}.attn.{last_k}", k)


def _after(norm: Any) -> bool:
    return norm is not None and norm.after_rope


def _shift(scores: Tensor, product: _Product, scale: float) -> Tensor:
    """What ALiBi adds at a query's own key: 0 by our count from the query, else by one from the first token.
    The softmax does not see a number that is added to a whole row."""
    own = (product.q * product.k).sum(-1).float() * scale
    return (scores.diagonal(dim1=-2, dim2=-1) - own.reshape(scores.shape[:-1]))[..., None]
