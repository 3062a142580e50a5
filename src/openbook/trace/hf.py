"""transformers' steps under our names, recorded while it runs.

Which of its modules is which of ours follows from the dialect: the table that says where a checkpoint
keeps a parameter also says which module has it, and how its rows, and so its outputs, are arranged.
`watch` sees what lies between the modules of an attention. No model's code is known here by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openbook.ledger import Ledger
from openbook.spec.model import Block, Experts, HeadNorm, ModelSpec
from openbook.spec.reader import UnsupportedError
from openbook.trace.record import Only, axes_of, op_rows
from openbook.trace.schema import Trace, dtype_of
from openbook.trace.watch import Seen, Watch
from openbook.weights.dialects import HF, Dialect, Place, places


def load_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' own model of a folder: eager attention, safetensors only, no code of the folder's, no
    network. Raises `UnsupportedError` if transformers cannot load it, `ImportError` if it is not there."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (ValueError, KeyError, OSError, RuntimeError, AttributeError, TypeError) as error:
        raise UnsupportedError(f"transformers cannot load {folder}: {error}") from error
    return model.eval()


def parameters_of(model: Any, spec: ModelSpec) -> dict[str, Tensor]:
    """The weights that transformers keeps as they were stored, under our names and in our arrangement: all
    but those of experts, which it puts together."""
    return _Modules.of(model, spec).parameters


@torch.no_grad()
def record_transformers(model: Any, spec: ModelSpec, ids: Tensor, only: Only | None = None) -> Trace:
    """Runs a model of transformers on `ids` [B, T] and keeps its steps, or those for which `only` says so.

    `spec` is our reading of the same configuration. Steps that the model has no tensor for, or one that
    cannot be told, are left out. Raises `UnsupportedError` for a model without a dialect.
    """
    dtype = dtype_of(model.get_input_embeddings().weight)
    rows = {row.name: row for row in op_rows(spec, dtype, ids.shape[0], ids.shape[1])}
    modules = _Modules.of(model, spec)
    seen = Seen(rows, {name for name in rows if only is None or only(name)})
    with ExitStack() as undo:
        for hook in _hooks(modules, spec, seen):
            undo.callback(hook.remove)
        watch = undo.enter_context(Watch(seen))
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
        names = _Names(model, HF[kind])
        for place in places(spec, shapes, HF[kind]):
            modules._add(place, *names.of(place.stored))
        return modules

    def _add(self, place: Place, name: str, whole: bool) -> None:
        """`name` is the parameter's in the model. It is `whole` if it is the stored tensor and no other."""
        values = _parameter(self.model, name)
        if values is None:
            return
        owner = name.rpartition(".")[0]
        for ours in place.parameters:
            self.paths.setdefault(ours.rpartition(".")[0], owner)
        if not whole or place.index is not None or values.shape != place.shape:
            return
        self.parameters |= dict(place.load(values.detach()))
        if values.ndim > 2 or place.axis:
            return
        module = self.model.get_submodule(owner)
        outputs = torch.arange(sum(place.sizes))  # a vector is arranged as a matrix's rows are
        for ours, rows in place.load(outputs):
            self.found.setdefault(ours.rpartition(".")[0], (module, rows if len(place.sizes) > 1 else None))

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
        module = model.get_submodule(owner)
    except AttributeError:
        return None
    return module._parameters.get(own, module._buffers.get(own))  # a router's correction is a buffer


class _Names:
    """What transformers calls a stored tensor once it is loaded."""

    def __init__(self, model: Any, dialect: Dialect) -> None:
        self._model = model
        self._prefixes = dialect.prefixes
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter
        except ImportError:  # an earlier transformers, whose modules have the stored names
            return
        for step in get_model_conversion_mapping(model):
            (self._converters if isinstance(step, WeightConverter) else self._renamings).append(step)

    def of(self, stored: str) -> tuple[str, bool]:
        """The parameter's name, and whether it is this stored tensor whole: experts' are put together."""
        spellings = [stored]
        spellings += [
            found + stored.removeprefix(meant) for found, meant in self._prefixes if stored.startswith(meant)
        ]
        for name in spellings:
            if _parameter(self._model, name) is not None:
                return name, True
        for name in spellings if self._renamings or self._converters else []:
            from transformers.core_model_loading import rename_source_key

            renamed, converter = rename_source_key(name, self._renamings, self._converters)
            if _parameter(self._model, renamed) is not None:
                return renamed, converter is None
        return stored, False


# --- modules' inputs and outputs ----------------------------------------------------------------


def _hooks(modules: _Modules, spec: ModelSpec, seen: Seen) -> Iterator[Any]:
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
    yield from _weightless(modules, seen, "final_norm", ("head",))


def _layer_hooks(
    modules: _Modules, block: Block, where: str, layer: nn.Module | None, seen: Seen
) -> Iterator[Any]:
    """What a step gives is also what the next one reads, where the step itself is no module."""

    def read_by(reader: str, step: str) -> Iterator[Any]:
        return _input(modules, seen, f"{where}.{reader}", f"{where}.{step}")

    mlp = [f"{where}.mlp.{name}" for name in ("gate", "up", "router")]
    yield from _weightless(
        modules, seen, f"{where}.attn_norm", [f"{where}.attn.{q}" for q in ("q", "q_down")]
    )
    yield from _weightless(modules, seen, f"{where}.mlp_norm", mlp)
    for part in ("q", "k"):
        norm = getattr(block.attn, f"{part}_norm", None)
        if isinstance(norm, HeadNorm) and norm.after_rope:
            yield from read_by(f"attn.{part}_norm", f"attn.{part}_rope")
    yield from read_by("attn.o", "attn.mix")
    if block.residual == "serial":
        norms = [name for name in ("attn_add_norm", "mlp_norm") if getattr(block, name) is not None]
        readers = [f"{where}.{norms[0]}"] if norms else mlp
        for reader in [name for name in readers if name in modules.found][:1]:
            yield from _input(modules, seen, reader, f"{where}.attn_add")
    yield from read_by("mlp.down", "mlp.act")
    yield from read_by("mlp.shared.down", "mlp.shared.act")
    norms = [name for name in ("mlp_add_norm", "end_norm") if getattr(block, name) is not None]
    if norms:
        yield from read_by(norms[0], "mlp_add")
    elif layer is not None:
        yield layer.register_forward_hook(_output(seen, f"{where}.mlp_add", None))
    if isinstance(block.mlp, Experts) and (experts := _experts(modules, where)) is not None:
        choice = _choice(seen, f"{where}.mlp.chosen", block.mlp)
        yield experts.register_forward_pre_hook(choice, with_kwargs=True)
        yield experts.register_forward_hook(_output(seen, f"{where}.mlp.experts.sum", None))
        around = modules.parent(f"{where}.mlp.router")
        if block.mlp.shared is not None and around is not None:
            yield around.register_forward_hook(_output(seen, f"{where}.mlp.shared_add", None))


def _weightless(modules: _Modules, seen: Seen, norm: str, readers: Sequence[str]) -> Iterator[Any]:
    """A norm without weights has no name in a checkpoint, but what it gives is what the next module reads."""
    if norm not in modules.found:
        for reader in [name for name in readers if name in modules.found][:1]:
            yield from _input(modules, seen, reader, norm)


def _experts(modules: _Modules, where: str) -> nn.Module | None:
    """The module that has all experts' matrices."""
    path = modules.paths.get(f"{where}.mlp.experts.down")
    return modules.model.get_submodule(path) if path else None


def _output(seen: Seen, name: str, rows: Tensor | None) -> Callable[..., None]:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        y = output if isinstance(output, Tensor) else output[0]
        seen.keep(name, y if rows is None else y[..., rows.to(y.device)])

    return keep


def _input(modules: _Modules, seen: Seen, reader: str, name: str) -> Iterator[Any]:
    """Keeps what the module `reader` reads as the step `name`."""
    if reader in modules.found and name in seen.rows:
        yield _reading(modules.found[reader][0], seen, name)


def _reading(module: nn.Module, seen: Seen, name: str) -> Any:
    def keep(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.keep(name, inputs[0] if inputs else named["hidden_states"])

    return module.register_forward_pre_hook(keep, with_kwargs=True)


def _choice(seen: Seen, name: str, experts: Experts) -> Callable[..., None]:
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


def _watched(modules: _Modules, spec: ModelSpec, watch: Watch) -> Iterator[Any]:
    """Hooks that tell the watch when a layer's attention, or its router, begins and ends."""
    for i, block in enumerate(spec.layers):
        attention, router = modules.parent(f"layers.{i}.attn.o"), modules.found.get(f"layers.{i}.mlp.router")
        outputs = {
            part: modules.found.get(f"layers.{i}.attn.{part}", (None, None))[1] for part in ("q", "k", "v")
        }
        if attention is not None:
            yield attention.register_forward_pre_hook(watch.attention(f"layers.{i}", block.attn, outputs))
            yield attention.register_forward_hook(watch.end)
        if router is not None:
            yield router[0].register_forward_pre_hook(watch.router(f"layers.{i}"))
            yield router[0].register_forward_hook(watch.end)
