"""What a row of the table of families can say: the `Family`, and how layers get their windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openbook.spec.model import Activation
from openbook.spec.reader import Reader

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

Switch = bool | str
"""What a family fixes, or the key of the config that decides it."""


@dataclass(frozen=True)
class Windows:
    """How a family says which layers slide: read(config, n_layers) → a window or None for each."""

    read: Callable[[Reader, int], list[int | None]]
    write: Callable[[Sequence[int | None]], dict[str, Any]]


def _read_window_everywhere(c: Reader, n_layers: int) -> list[int | None]:
    return [c.maybe_integer("sliding_window")] * n_layers


def _read_windows_by_layer(c: Reader, n_layers: int) -> list[int | None]:
    """Layers from `max_window_layers` on slide, unless `layer_types` says otherwise."""
    window = None
    if c.flag("use_sliding_window"):
        window = c.maybe_integer("sliding_window")
    c.ignore(["sliding_window"])
    first = c.integer("max_window_layers", least=0)
    types = c.maybe_items("layer_types", n_layers, LAYER_TYPES.__contains__, "of " + " | ".join(LAYER_TYPES))
    if types is None:
        return [window if i >= first else None for i in range(n_layers)]
    if window is None and SLIDING in types:
        c.fail(
            "layer_types", "has sliding layers: set use_sliding_window to true and sliding_window to a width"
        )
    return [window if kind == SLIDING else None for kind in types]


def _write_windows_by_layer(windows: Sequence[int | None]) -> dict[str, Any]:
    sliding = [i for i, window in enumerate(windows) if window is not None]
    if not sliding:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": len(windows)}
    return {
        "use_sliding_window": True,
        "sliding_window": windows[sliding[0]],
        "max_window_layers": sliding[0],
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")

NO_WINDOWS = Windows(lambda c, n_layers: [None] * n_layers, lambda windows: {})
WINDOW_EVERYWHERE = Windows(_read_window_everywhere, lambda windows: {"sliding_window": windows[0]})
WINDOWS_BY_LAYER = Windows(_read_windows_by_layer, _write_windows_by_layer)


@dataclass(frozen=True)
class Family:
    """One model type.

    `defaults` are its config's keys with transformers' defaults; a key not among them does not exist
    for this type. `spelling` translates the words that `_read` uses. `rotary` families turn q and k;
    the others add learned positions to the embedding. `needs_whole_heads`: transformers refuses a
    width that is not a multiple of the number of heads, even where `head_dim` is given.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    spelling: Mapping[str, str] = field(default_factory=dict)
    norm: Literal["layer", "rms"] = "rms"
    rotary: bool = True
    gated: bool = True
    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: bool = False
    windows: Windows = NO_WINDOWS
    needs_whole_heads: bool = False

    def has(self, word: str) -> bool:
        return self.spelling.get(word, word) in self.defaults
