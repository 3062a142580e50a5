"""transformers' steps under our names, recorded while it runs.

Which of its modules is which of ours follows from the dialect: the table that says where a checkpoint
keeps a parameter also says which module has it, and how its rows, and so its outputs, are arranged.
`watch` sees what lies between the modules of an attention. No model's code is known here by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openbook.spec.model import Block, Experts, HeadNorm, ModelSpec
from openbook.spec.reader import UnsupportedError
from openbook.trace.flow import first_stream
from openbook.trace.modules import Modules
from openbook.trace.names import Only
from openbook.trace.record import Recorder
from openbook.trace.rows import op_rows
from openbook.trace.schema import Trace
from openbook.trace.tensors import dtype_of
from openbook.trace.watch import Watch


def load_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' own model of a folder: its plainest code, safetensors only, no code of the folder's, no
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
            experts_implementation="eager",
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
    return Modules.of(model, spec).parameters


def record_transformers(model: Any, spec: ModelSpec, ids: Tensor, only: Only | None = None) -> Trace:
    """Runs a model of transformers on `ids` [B, T] and keeps its steps, or those for which `only` says so.

    `spec` is our reading of the same configuration. Steps that the model has no tensor for, or one that
    cannot be told, are left out. Raises `UnsupportedError` for a model without a dialect.

    A run of as many tokens as there are heads could not tell the two axes apart. It gets one more token, or
    two, which are cut off again: no token before them sees them.
    """
    heads = {n for block in spec.layers for n in (block.attn.n_heads, getattr(block.attn, "n_kv_heads", 0))}
    length = ids.shape[1]
    longer = next(n for n in range(length, length + len(heads) + 1) if n not in heads)
    more = ids[:, -1:].expand(-1, longer - length)
    return _first_tokens(_record(model, spec, torch.cat((ids, more), dim=1), only), length)


def _first_tokens(trace: Trace, length: int) -> Trace:
    """The trace of the first `length` tokens."""
    if trace.ids.shape[1] == length:
        return trace

    def cut(name: str, x: Tensor) -> Tensor:
        return x[tuple(slice(length) if axis in ("T", "S") else slice(None) for axis in trace.axes[name])]

    return replace(
        trace,
        ids=trace.ids[:, :length],
        positions=trace.positions[:, :length],
        tensors={name: cut(name, x) for name, x in trace.tensors.items()},
        keys={layer: positions[:, :length] for layer, positions in trace.keys.items()},
        choices={name: experts[:, :length] for name, experts in trace.choices.items()},
    )


@torch.no_grad()
def _record(model: Any, spec: ModelSpec, ids: Tensor, only: Only | None) -> Trace:
    dtype = dtype_of(model.get_input_embeddings().weight)
    seen = _Copies(op_rows(spec, dtype, ids.shape[0], ids.shape[1]), only)
    modules = Modules.of(model, spec)
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
        tensors=seen.in_order(),
        axes=seen.axes(),
        keys=dict.fromkeys(range(spec.n_layers), positions),
        choices=seen.choices,
        parameters=modules.parameters,
    )


class _Copies(Recorder):
    """Keeps copies, since others work in place, and nothing that has not the step's size: it is another."""

    def keep(self, name: str, x: Tensor) -> Tensor:
        if name in self.wanted and x.numel() == math.prod(self.rows[name].out_shape):
            super().keep(name, x.clone())
        return x


# --- modules' inputs and outputs ----------------------------------------------------------------


def _hooks(modules: Modules, spec: ModelSpec, seen: Recorder) -> Iterator[Any]:
    """Hooks that keep what goes in and out of modules that are ours by name."""
    for name, (module, rows) in modules.found.items():
        if name in seen.rows and name not in ("embed", "positions", "head") and not name.endswith(".router"):
            yield module.register_forward_hook(_output(seen, name, rows))
    # The stream before the layers is what the first one reads: scales and positions may be added by hand.
    if first_stream(spec) != "embed":
        yield modules.model.get_input_embeddings().register_forward_hook(_output(seen, "embed", None))
    if spec.positions is not None and spec.embed_norm is not None:
        yield from _input(modules, seen, ["embed_norm"], "positions")
    if (first := modules.layer(0)) is not None:
        yield _reading(first, seen, first_stream(spec))
    for i, block in enumerate(spec.layers):
        yield from _layer_hooks(modules, block, f"layers.{i}.", modules.layer(i), seen)
    yield from _weightless(modules, seen, "final_norm", ["head"])


def _layer_hooks(
    modules: Modules, block: Block, at: str, layer: nn.Module | None, seen: Recorder
) -> Iterator[Any]:
    """What a step gives is also what the next one reads, where the step itself is no module."""
    attn = [f"{at}attn.{name}" for name in ("q", "q_down")]
    mlp = [f"{at}mlp.{name}" for name in ("gate", "up", "router")]
    yield from _weightless(modules, seen, f"{at}attn_norm", attn)
    yield from _weightless(modules, seen, f"{at}mlp_norm", mlp)
    for part in ("q", "k"):
        norm = getattr(block.attn, f"{part}_norm", None)
        if isinstance(norm, HeadNorm) and norm.after_rope:
            yield from _input(modules, seen, [f"{at}attn.{part}_norm"], f"{at}attn.{part}_rope")
    yield from _input(modules, seen, [f"{at}attn.o"], f"{at}attn.mix")
    yield from _input(modules, seen, [f"{at}mlp.down"], f"{at}mlp.act")
    yield from _input(modules, seen, [f"{at}mlp.shared.down"], f"{at}mlp.shared.act")
    if block.residual == "serial":
        norms = [f"{at}{name}" for name in ("attn_add_norm", "mlp_norm") if getattr(block, name)]
        yield from _input(modules, seen, norms[:1] or mlp, f"{at}attn_add")
    norms = [f"{at}{name}" for name in ("mlp_add_norm", "end_norm") if getattr(block, name)]
    if norms:
        yield from _input(modules, seen, norms[:1], f"{at}mlp_add")
    elif layer is not None:
        yield layer.register_forward_hook(_output(seen, f"{at}mlp_add", None))
    if isinstance(block.mlp, Experts):
        yield from _experts_hooks(modules, block.mlp, f"{at}mlp.", seen)


def _experts_hooks(modules: Modules, experts: Experts, at: str, seen: Recorder) -> Iterator[Any]:
    """The choice is what the module with all experts' matrices is given; the sum, what it gives."""
    module = modules.owner(f"{at}experts.down")
    if module is not None:
        yield module.register_forward_pre_hook(_choice(seen, f"{at}chosen", experts), with_kwargs=True)
        yield module.register_forward_hook(_output(seen, f"{at}experts.sum", None))
    around = modules.parent(f"{at}router")
    if experts.shared is not None and around is not None:
        yield around.register_forward_hook(_output(seen, f"{at}shared_add", None))


def _weightless(modules: Modules, seen: Recorder, norm: str, readers: Sequence[str]) -> Iterator[Any]:
    """A norm without weights has no name in a checkpoint, but what it gives is what the next module reads."""
    if norm not in modules.found:
        yield from _input(modules, seen, readers, norm)


def _output(seen: Recorder, name: str, rows: Tensor | None) -> Callable[..., None]:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        y = output if isinstance(output, Tensor) else output[0]
        seen.keep(name, y if rows is None else y[..., rows.to(y.device)])

    return keep


def _input(modules: Modules, seen: Recorder, readers: Sequence[str], name: str) -> Iterator[Any]:
    """Keeps what the first of the modules `readers` that there is reads, as the step `name`."""
    found = [modules.found[reader][0] for reader in readers if reader in modules.found]
    if found and name in seen.rows:
        yield _reading(found[0], seen, name)


def _reading(module: nn.Module, seen: Recorder, name: str) -> Any:
    def keep(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.keep(name, inputs[0] if inputs else named["hidden_states"])

    return module.register_forward_pre_hook(keep, with_kwargs=True)


def _choice(seen: Recorder, name: str, experts: Experts) -> Callable[..., None]:
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


def _watched(modules: Modules, spec: ModelSpec, watch: Watch) -> Iterator[Any]:
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
