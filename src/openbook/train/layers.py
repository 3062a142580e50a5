"""How the layers of a model run while it is trained. What they compute, and their parameters' names, stay."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from openbook.model.block import Block
from openbook.model.decoder import Decoder
from openbook.model.experts import Experts


def prepare_layers(decoder: Decoder, checkpoint_layers: bool = False, compile: bool = False) -> None:  # noqa: A002
    """Changes the layers of `decoder` in place.

    With `checkpoint_layers` a layer keeps only its input for backward and is computed a second time there
    (Chen et al. 2016, arXiv 1604.06174): about a third more FLOPs. With `compile` PyTorch compiles a layer,
    which takes half a minute at the first step, once for all layers that are alike; needs a C++ compiler.
    """
    for layer in cast("Iterable[Block]", decoder.layers):
        if compile:
            _compile(layer)
        if checkpoint_layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _compile(layer: Block) -> None:
    """Experts are left out: which of them are run is only known as they run."""
    parts: list[nn.Module] = [layer.attn] if isinstance(layer.mlp, Experts) else [layer]
    for part in parts:
        part.forward = torch.compile(part.forward)
