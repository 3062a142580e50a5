"""Steps in C, over the same weights in the same memory as the PyTorch model.

Where PyTorch starts some 25 kernels a layer for one token, each with its own threads, `NativeDecoder` is one
loop over a list of operations that was derived from the spec. `NativeNorm`, `NativeRotate`, `NativeCore`
and `NativeActivation` take the norms, rotations, attention and gates of a whole prompt, or of what is learned
from, and `native_experts` the experts of a few tokens; matrix products of many stay PyTorch's. They are
accelerators and nothing else: the same names and faces as what they stand in for, to which they hand back
whatever they do not do.
"""

from collections.abc import Mapping

from openbook.model import Decoder
from openbook.native.build import NativeUnavailableError, library
from openbook.native.modules import (
    NativeActivation,
    NativeCore,
    NativeNorm,
    NativeRotate,
    native_experts,
    use_native_modules,
)
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
    "native_experts",
]


def accelerate(decoder: Decoder, blocks: Mapping[str, Blocks] | None = None) -> NativeDecoder | Decoder:
    """The decoder with native modules in its layers, and with native steps if there are operations for all of
    its own; or itself as it is where nothing native can be had."""
    try:
        library()
    except NativeUnavailableError:
        return decoder
    try:
        engine = NativeDecoder(decoder, blocks)
    except NativeUnavailableError:
        engine = decoder
    use_native_modules(decoder)
    return engine
