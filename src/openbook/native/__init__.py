"""Inference in C, over the same weights in the same memory as the PyTorch model.

Where PyTorch starts some 25 kernels a layer for one token, each with its own threads, `NativeDecoder` is one
loop over a list of operations that was derived from the spec. `NativeNorm`, `NativeRotate`, `NativeCore`
and `NativeActivation` take a whole prompt's norms, rotations, attention and gates; its matrix products stay
PyTorch's. They are accelerators and nothing else: the same names and faces as what they stand in for, to
which they hand back whatever they do not do.
"""

from collections.abc import Mapping

from openbook.model import Decoder
from openbook.native.build import NativeUnavailableError
from openbook.native.modules import NativeActivation, NativeCore, NativeNorm, NativeRotate, use_native_modules
from openbook.native.step import NativeDecoder
from openbook.weights.blocks import Blocks

__all__ = [
    "NativeActivation",
    "NativeCore",
    "NativeDecoder",
    "NativeNorm",
    "NativeRotate",
    "NativeUnavailableError",
    "accelerate",
]


def accelerate(decoder: Decoder, blocks: Mapping[str, Blocks] | None = None) -> NativeDecoder | Decoder:
    """The decoder with native steps, its layers given native modules; or itself where that cannot be."""
    try:
        native = NativeDecoder(decoder, blocks)
    except NativeUnavailableError:
        return decoder
    use_native_modules(decoder)
    return native
