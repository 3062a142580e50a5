"""What each checkpoint format calls our parameters, and how it arranges their elements.

A table row joins the name of a module of ours with the name of the container's tensor. Loading reads
the table from right to left, saving from left to right: there is one table, so the two cannot disagree.
The suffix (`.weight`, `.bias`) is the same on both sides and is left out; `{n}` is the layer.

A row may name several modules: their rows then lie one after another in one stored tensor (GPT-2's
`c_attn` holds q, k and v). It may name one stored tensor for each index `{i}` of our first axis (each
expert's own matrix). A `Transform` says how the stored elements are arranged.
"""

from openbook.weights.dialects.gguf import GGUF
from openbook.weights.dialects.hf import HF
from openbook.weights.dialects.table import OWN, Dialect, Place, Row, places
from openbook.weights.dialects.transforms import (
    Chain,
    Grouped,
    Identity,
    Interleaved,
    RowsPermuted,
    Transform,
    Transposed,
)

__all__ = [
    "GGUF", "HF", "OWN", "Chain", "Dialect", "Grouped", "Identity", "Interleaved", "Place", "Row",
    "RowsPermuted", "Transform", "Transposed", "places",
]  # fmt: skip
