"""The running model: the forward pass of everything a `ModelSpec` can say, in plain PyTorch."""

from openbook.model.attention import ExplicitCore, FusedCore
from openbook.model.decoder import Decoder
from openbook.model.init import init_weights

__all__ = ["Decoder", "ExplicitCore", "FusedCore", "init_weights"]
