"""Changing a run: a step's tensor is edited, and the model goes on with the edited one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor

from openbook.infer.sample import RequestError
from openbook.spec.model import ModelSpec
from openbook.trace.names import canonical
from openbook.trace.tensors import dtype_of

Edit = Callable[[Tensor], Tensor]
"""Makes of a step's tensor, in the shape of the ledger's row, another one of that shape and dtype. What it
is given is its own copy."""

Patch = Mapping[str, Edit]
"""Edits by the name of their step."""

Heads = Iterable[tuple[int, int]]
"""Query heads, each as (layer, head)."""


def edits_of(spec: ModelSpec, steps: Collection[str], patch: Patch | None, ablate: Heads) -> dict[str, Edit]:
    """Every edit under its step's own name; heads that are ablated are edits of `attn.mix`.

    Raises `UnknownStepError` or `RequestError` for a step or a head that the model does not have.
    """
    edits = {canonical(spec, name, steps, "patch"): edit for name, edit in (patch or {}).items()}
    if len(edits) < len(patch or {}):
        raise RequestError("patch", "two of its names mean the same step: join the two edits into one")
    for name, edit in edits.items():
        if not callable(edit):
            raise RequestError("patch", f"{name} needs a function of a tensor, found {type(edit).__name__}")
    for layer, heads in _by_layer(spec, ablate).items():
        mix = f"layers.{layer}.attn.mix"
        edits[mix] = _zeroing(heads, edits.get(mix))
    return edits


def _by_layer(spec: ModelSpec, ablate: Heads) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for layer, head in ablate:
        if not 0 <= layer < spec.n_layers:
            raise RequestError("ablate", f"layer {layer} is none of 0 to {spec.n_layers - 1}")
        n_heads = spec.layers[layer].attn.n_heads
        if not 0 <= head < n_heads:
            raise RequestError("ablate", f"head {head} of layer {layer} is none of 0 to {n_heads - 1}")
        found.setdefault(layer, []).append(head)
    return found


def _zeroing(heads: list[int], after: Edit | None) -> Edit:
    """Zeroes these heads' part of [B, H, T, K], after the other edit."""

    def zero(mix: Tensor) -> Tensor:
        mix = mix if after is None else after(mix)
        mix[:, heads] = 0
        return mix

    return zero


def edited(name: str, edit: Edit, x: Tensor) -> Tensor:
    """What the edit makes of x. Raises `RequestError`, naming the step, for a result that cannot take the
    place of x."""
    y = edit(x.clone())
    if not isinstance(y, Tensor):
        raise RequestError("patch", f"{name} must give a tensor back, found {type(y).__name__}")
    if (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
        found, wanted = (f"{dtype_of(z)} {list(z.shape)} on {z.device}" for z in (y, x))
        raise RequestError("patch", f"{name} must give back {wanted}, found {found}")
    return y
