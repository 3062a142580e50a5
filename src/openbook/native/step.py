"""A decoder whose single-token steps run in C."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openbook.model import Decoder, FusedCore
from openbook.model.decoder import Cache
from openbook.model.positions import rotation
from openbook.native.build import NativeUnavailableError, library
from openbook.native.lower import DTYPES, Lowering, Op, check_lowers
from openbook.spec.model import Attention, Learned, ModelSpec
from openbook.weights.blocks import Blocks


class BufferedLayer(Protocol):
    """A layer's cells in memory, as `openbook.infer.cache.LayerCache` has them: [1, G, cells, K]."""

    k: Tensor
    v: Tensor
    length: int


class Step(ctypes.Structure):
    """Mirrors `Step` in op.h."""

    _fields_ = (
        ("token", ctypes.c_int64), ("position", ctypes.c_int64), ("length", ctypes.c_int64),
        ("k", ctypes.POINTER(ctypes.c_void_p)), ("v", ctypes.POINTER(ctypes.c_void_p)),
        ("cells", ctypes.POINTER(ctypes.c_int64)),
        ("scratch", ctypes.c_void_p), ("scratch_row", ctypes.c_int64),
        ("cache_dtype", ctypes.c_int32), ("threads", ctypes.c_int32), ("with_openmp", ctypes.c_int32),
    )  # fmt: skip


def run(library: ctypes.CDLL, ops: ctypes.Array[Op], first: int, step: Step) -> None:
    """Has the runner walk through the operations from number `first` on, on torch's number of threads."""
    step.threads = torch.get_num_threads()
    start = ctypes.byref(ops, first * ctypes.sizeof(Op))
    if library.openbook_run(start, ctypes.c_int64(len(ops) - first), ctypes.byref(step)):
        raise MemoryError("no memory for a native step")


class Binding:
    """The addresses of one cache's buffers, and room for a row of scores a head.

    Raises `ValueError` for a cache that was made for another model: C would write wild memory.
    """

    def __init__(self, layers: Sequence[BufferedLayer], spec: ModelSpec) -> None:
        count = len(layers)
        attns = [cast("Attention", block.attn) for block in spec.layers]
        wanted = [(1, attn.n_kv_heads, attn.head_dim) for attn in attns]
        found = [(*layer.k.shape[:2], layer.k.shape[3]) for layer in layers]
        if found != wanted:
            raise ValueError("the cache was made for another model or batch: make one for this spec")
        self.k = (ctypes.c_void_p * count)(*(layer.k.data_ptr() for layer in layers))
        self.v = (ctypes.c_void_p * count)(*(layer.v.data_ptr() for layer in layers))
        self.cells = (ctypes.c_int64 * count)(*(layer.k.shape[2] for layer in layers))
        self.scratch = torch.empty(max(attn.n_heads for attn in attns), max(self.cells))


class NativeDecoder:
    """Has the face of `Decoder`: `native(ids, positions, cache, last_only)`.

    A call with one token, a cache and no gradient runs in C, in fp32 arithmetic, and returns fp32
    logits; so does the head for the last of many tokens. All else is the decoder's own. Weights are
    read where the decoder's parameters lie, so values may change in place, but a parameter must not be
    moved to another storage.

    `blocks` (`openbook.weights.quantised_matrices`) are read instead of the parameters of their names: a
    4-bit file then costs a step an eighth of fp32's bytes, for the same numbers.
    """

    def __init__(self, decoder: Decoder, blocks: Mapping[str, Blocks] | None = None) -> None:
        _check_supported(decoder)
        self.decoder = decoder
        self.spec = decoder.spec
        self._library = library()
        _check_layout()
        self._lowered = Lowering(decoder, blocks or {})
        self._ops = (Op * len(self._lowered.ops))(*self._lowered.ops)
        self.bytes_per_step = self._lowered.matrix_bytes
        self.block_types = {name: matrix.type for name, matrix in (blocks or {}).items()}
        self._bindings: WeakKeyDictionary[Any, Binding] = WeakKeyDictionary()

    def __call__(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> Float[Tensor, "B rows V"]:
        """See `Decoder.forward`."""
        alone = ids.shape[0] == 1 and not torch.is_grad_enabled()
        if alone and ids.shape[1] == 1 and positions is None and cache is not None and self._serves(cache):
            return self._step(int(ids), cache)
        if alone and last_only:
            return self._head(self.decoder.hidden(ids, positions, cache)[0, -1])
        return self.decoder(ids, positions, cache, last_only)

    def _serves(self, cache: Cache) -> bool:
        layers: Any = cache.layers
        table = self.spec.positions
        known = not isinstance(table, Learned) or cache.length < table.n_positions
        return known and not cache.padded and layers[0].k.dtype in DTYPES

    def _step(self, token: int, cache: Cache) -> Float[Tensor, "1 1 V"]:
        if not 0 <= token < self.spec.vocab_size:
            raise IndexError(f"token {token} is outside the vocabulary of {self.spec.vocab_size}")
        bound = self._bind(cache)
        position = torch.tensor([[cache.length]])
        cache.extend(position, padded=False)
        self._prepare_positions(position, cache.capacity)
        layers: Any = cache.layers
        logits = self._interpret(
            0, token=token, position=cache.length - 1, length=cache.length,
            k=bound.k, v=bound.v, cells=bound.cells, cache_dtype=DTYPES[layers[0].k.dtype],
            scratch=bound.scratch.data_ptr(), scratch_row=bound.scratch.shape[1],
        )  # fmt: skip
        for layer in layers:
            layer.length = cache.length
        return logits

    def _head(self, hidden: Float[Tensor, " D"]) -> Float[Tensor, "1 1 V"]:
        self._lowered.head_input.copy_(hidden)
        return self._interpret(len(self._ops) - 1)

    def _interpret(self, first: int, **step: Any) -> Float[Tensor, "1 1 V"]:
        """Runs the operations from number `first` on; the last one's result is new memory."""
        logits = torch.empty(1, 1, self.spec.vocab_size)
        self._ops[-1].dst = logits.data_ptr()
        run(self._library, self._ops, first, Step(**step))
        return logits

    def _prepare_positions(self, position: Tensor, capacity: int) -> None:
        for rope, turn in self._lowered.turns.items():
            torch.cat(rotation(rope, position, capacity), dim=-1, out=turn.view(1, 1, 1, -1))
        if self.decoder.positions is not None and not hasattr(self.decoder.positions, "weight"):
            self._lowered.position_vector.copy_(self.decoder.positions(position)[0, 0])

    def _bind(self, cache: Cache) -> Binding:
        bound = self._bindings.get(cache)
        if bound is None:
            layers: Any = cache.layers
            bound = self._bindings[cache] = Binding(layers, self.spec)
        return bound


def _check_supported(decoder: Decoder) -> None:
    check_lowers(decoder.spec)
    parameters = list(decoder.parameters())
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise NativeUnavailableError(f"weights must all be float32 or all bfloat16, found {dtypes}")
    if any(p.device.type != "cpu" or not p.is_contiguous() for p in parameters):
        raise NativeUnavailableError("weights must lie contiguous in the processor's memory")
    if any(
        not isinstance(module, FusedCore)
        for name, module in decoder.named_modules()
        if name.endswith(".core")
    ):
        raise NativeUnavailableError("attention runs through a core of its own")


def _check_layout() -> None:
    """A struct that Python and C see differently would read wild memory: compare their sizes once."""
    lib = library()
    lib.openbook_op_size.restype = lib.openbook_step_size.restype = ctypes.c_int64
    if (lib.openbook_op_size(), lib.openbook_step_size()) != (ctypes.sizeof(Op), ctypes.sizeof(Step)):
        raise NativeUnavailableError("the compiled runner does not match lower.py")
