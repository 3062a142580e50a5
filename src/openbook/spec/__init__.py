"""What a model is: the spec, and its spellings in Hugging Face's and llama.cpp's files.

`model.py` holds the dataclasses, `hf.py` reads and writes config.json, `gguf.py` a GGUF file's
metadata, `presets.py` the published sizes. Standard library only.
"""

from openbook.spec.model import (
    Attention,
    Block,
    DynamicScaling,
    FrequencyDivisors,
    Head,
    Learned,
    LinearScaling,
    Llama3Scaling,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    RopeScaling,
    Sinusoidal,
    SpecError,
    YarnScaling,
    describe,
    from_dict,
    to_dict,
)
from openbook.spec.reader import UnsupportedError

__all__ = [
    "Attention",
    "Block",
    "DynamicScaling",
    "FrequencyDivisors",
    "Head",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "Mlp",
    "ModelSpec",
    "Norm",
    "Rope",
    "RopeScaling",
    "Sinusoidal",
    "SpecError",
    "UnsupportedError",
    "YarnScaling",
    "describe",
    "from_dict",
    "to_dict",
]
