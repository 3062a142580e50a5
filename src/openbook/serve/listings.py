"""The lines of this package that compute a step."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from openbook.model import Decoder, ExplicitCore
from openbook.model.block import Block
from openbook.model.experts import Experts, looped
from openbook.serve.errors import ApiError
from openbook.spec.model import ModelSpec
from openbook.trace.flow import inputs
from openbook.trace.schema import local_name

_PACKAGE = Path(__file__).parents[1]

_WITHOUT_MODULE: Mapping[str, Callable[..., Any]] = {
    "attn.scores": ExplicitCore.scores,
    "attn.masked": ExplicitCore.masked,
    "attn.probs": ExplicitCore.probs,
    "attn.mix": ExplicitCore.mix,
    "attn_add": Block._add,
    "mlp_add": Block._add,
    "mlp.experts.sum": looped,
    "mlp.shared_add": Experts.forward,
}
"""Steps that are no module of their own, by their name within the layer."""


def listing(spec: ModelSpec, name: str) -> dict[str, Any]:
    """The code of the step `name`: its `file`, from the package on, the first and the last line, `symbol` and
    `text`. Raises `ApiError` for what is no step of such a model."""
    code = inspect.unwrap(_code(*_alone(spec, name)))
    try:
        lines, first = inspect.getsourcelines(code)
        file = Path(inspect.getsourcefile(code) or "").relative_to(_PACKAGE.parent)
    except (OSError, TypeError, ValueError):
        raise ApiError(404, "no code to show", "the package was installed without its source") from None
    return {
        "file": file.as_posix(),
        "line": first,
        "end_line": first + len(lines) - 1,
        "symbol": code.__qualname__,
        "text": textwrap.dedent("".join(lines)),
    }


def _alone(spec: ModelSpec, name: str) -> tuple[ModelSpec, str]:
    """A model with no layer but the step's own, so that a deep one is not built for it."""
    found = re.fullmatch(r"layers\.([0-9]{1,9})\.(.+)", name)
    layer = int(found[1]) if found else 0
    if layer < spec.n_layers:
        spec = spec.replace(layers=(spec.layers[layer],))
        name = f"layers.0.{found[2]}" if found else name
        try:
            inputs(spec, name)
        except (KeyError, ValueError, IndexError):
            pass
        else:
            return spec, name
    raise ApiError(404, "no such step", "the model has no step of this name")


def _code(spec: ModelSpec, name: str) -> type | Callable[..., Any]:
    """The class of the step's module; if that is PyTorch's, the method of ours that calls it."""
    if (local := local_name(name)) in _WITHOUT_MODULE:
        return _WITHOUT_MODULE[local]
    with torch.device("meta"):
        decoder = Decoder(spec)
    kind = type(decoder.get_submodule(name))
    if _is_ours(kind):
        return kind
    around, _, own = name.rpartition(".")
    return _caller(decoder.get_submodule(around), own)


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == _PACKAGE.name


def _caller(module: nn.Module, own: str) -> Callable[..., Any]:
    """The method of a module's class that speaks of its child `own`."""
    methods = (inspect.unwrap(each) for each in vars(type(module)).values() if isinstance(each, FunctionType))
    return next(m for m in methods if m.__name__ != "__init__" and own in m.__code__.co_names)
