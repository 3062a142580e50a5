"""Inference in C, over the same weights in the same memory as the PyTorch model.

Where PyTorch starts some 25 kernels a layer for one token, each with its own threads, `NativeDecoder` is one
loop over a list of operations that was derived from the spec. `NativeCore` is attention for a whole prompt.
They are accelerators and nothing else: the same names, the same faces as `Decoder` and `FusedCore`, and
whatever they do not do they hand back.
"""

from collections.abc import Mapping

from openbook.model import Decoder
from openbook.native.build import NativeUnavailableError
from openbook.native.core import NativeCore
from openbook.native.step import NativeDecoder
from openbook.weights.blocks import Blocks

__all__ = ["NativeCore", "NativeDecoder", "NativeUnavailableError", "accelerate"]


def accelerate(decoder: Decoder, blocks: Mapping[str, Blocks] | None = None) -> NativeDecoder | Decoder:
    """The decoder with native steps, its layers given native cores; or itself where that cannot be."""
    try:
        native = NativeDecoder(decoder, blocks)
    except NativeUnavailableError:
        return decoder
    for name, _ in list(decoder.named_modules()):
        if name.endswith(".core"):
            decoder.set_submodule(name, NativeCore())
    return native
