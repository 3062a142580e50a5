"""Containers of tensors: GGUF and safetensors, read with every number in them doubted.

Nothing here knows about models. A container gives names, shapes, types, offsets and metadata; what
they mean is the business of `spec` and `weights`. No torch is imported before a tensor is asked for.
"""

from openbook.files.errors import FileError, TruncatedError
from openbook.files.gguf import GgufFile, GgufTensor, Typed, read_gguf, write_gguf
from openbook.files.safetensors import SafetensorsFiles, StoredTensor, open_safetensors

__all__ = [
    "FileError",
    "GgufFile",
    "GgufTensor",
    "SafetensorsFiles",
    "StoredTensor",
    "TruncatedError",
    "Typed",
    "open_safetensors",
    "read_gguf",
    "write_gguf",
]
