"""Decoding one token in C, over the same weights in the same memory as the PyTorch model.

Where PyTorch starts some 25 kernels a layer, each with its own threads, this is one loop over a list of
operations that was derived from the spec. It is an accelerator and nothing else: the same names, the
same face as `Decoder`, and whatever it does not do it hands to the decoder.
"""

from openbook.native.build import NativeUnavailableError
from openbook.native.step import NativeDecoder, accelerate

__all__ = ["NativeDecoder", "NativeUnavailableError", "accelerate"]
