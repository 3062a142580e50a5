"""The keys and values of the tokens seen so far.

One buffer [B, G, cells, K] a layer for keys and one for values (of latent attention one for the latents
alone, [B, 1, cells, C + R]), allocated once, sized as the ledger says: as many cells as the sequence may
get tokens, or as the layer's window or chunk is wide, where the cells are used in turn, as a ring.
Cells that nobody has written are never handed out.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openbook.spec.model import Attention, Chunk, LatentAttention, ModelSpec


class CacheFullError(RuntimeError):
    """More tokens than the cache was made for."""


class Cache:
    """KV cache of `batch` sequences of at most `capacity` tokens each, padding included.

    `length` tokens are in. `decoder(ids, cache=cache)` appends; `truncate` forgets the last ones.
    """

    def __init__(
        self,
        spec: ModelSpec,
        batch: int = 1,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = spec.max_positions if capacity is None else capacity
        if self.capacity <= 0 or batch <= 0:
            raise ValueError(
                f"a cache needs a batch and a capacity of at least 1, found {batch} and {capacity}"
            )
        self.batch = batch
        self.length = 0
        self.padded = False
        self.layers = [
            LayerCache(batch, cells(block.attn.window, self.capacity), *widths(block.attn), dtype, device)
            for block in spec.layers
        ]
        self._windows = {block.attn.window for block in spec.layers}
        self._positions = torch.full((batch, self.capacity), -1, dtype=torch.int64, device=device)

    def extend(
        self, positions: Int[Tensor, "B T"], padded: bool
    ) -> Mapping[int | Chunk | None, Int[Tensor, "B S"]]:
        """Makes room for T tokens at `positions`; says for each window which keys its layers will see."""
        before, after = self.length, self.length + positions.shape[1]
        if after > self.capacity:
            raise CacheFullError(
                f"the cache holds {self.capacity} tokens and has {before}: {positions.shape[1]} more do not "
                "fit; make it larger or give fewer tokens"
            )
        self._positions[:, before:after] = positions
        self.length, self.padded = after, self.padded or padded
        known = self._positions if self.padded else self._positions[:1]  # without padding all rows are alike
        return {w: known[:, seen(before, after, cells(w, self.capacity))] for w in self._windows}

    def truncate(self, length: int) -> int:
        """Forgets all but the first `length` tokens. Returns how many are really left: 0 if a window's ring
        has overwritten tokens that the next one would have to see, and everything must be computed again."""
        if length >= self.length:
            return self.length
        overwritten = any(self.length > cells(window, self.capacity) for window in self._windows)
        length = 0 if overwritten else max(length, 0)
        self.length = length
        self.padded = self.padded and length > 0
        for layer in self.layers:
            layer.length = length
        return length

    def reset(self) -> None:
        """Forgets everything."""
        self.truncate(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys' and values' buffers: what `ledger(spec).kv_bytes` predicts."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)

    def fill_(self, value: float) -> None:
        """Overwrites every cell. Tests poison a new cache with NaN: what nobody wrote, nobody may read."""
        for layer in self.layers:
            layer.k.fill_(value)
            layer.v.fill_(value)


class LayerCache:
    """One layer's cells. Token number n lives in cell n mod cells."""

    def __init__(
        self,
        batch: int,
        n_cells: int,
        heads: int,
        k: int,
        v: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        self.k = torch.empty((batch, heads, n_cells, k), dtype=dtype, device=device)
        self.v = torch.empty((batch, heads, n_cells, v), dtype=dtype, device=device)
        self.length = 0

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T U"]
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S U"]]:
        """Stores T new tokens; returns the keys and values of those `seen` names, in that order."""
        n_cells, before, after = self.k.shape[2], self.length, self.length + k.shape[2]
        self.length = after
        if after <= n_cells:
            self.k[:, :, before:after], self.v[:, :, before:after] = k, v
            return self.k[:, :, :after], self.v[:, :, :after]
        if k.shape[2] == 1:
            self.k[:, :, before % n_cells], self.v[:, :, before % n_cells] = k[:, :, 0], v[:, :, 0]
            return self.k, self.v
        old = _ring(max(0, before - n_cells + 1), before, n_cells, k.device)
        all_k, all_v = torch.cat((self.k[:, :, old], k), 2), torch.cat((self.v[:, :, old], v), 2)
        kept = _ring(max(before, after - n_cells), after, n_cells, k.device)
        self.k[:, :, kept], self.v[:, :, kept] = k[:, :, -len(kept) :], v[:, :, -len(kept) :]
        return all_k, all_v


def widths(attn: Attention | LatentAttention) -> tuple[int, int, int]:
    """Heads, width of a key and width of a value. A latent holds its value, so that it keeps no other."""
    if isinstance(attn, LatentAttention):
        return 1, attn.kv_rank + attn.rope_dim, 0
    return attn.n_kv_heads, attn.head_dim, attn.head_dim


def cells(window: int | Chunk | None, capacity: int) -> int:
    """How many tokens a layer keeps. A chunk's last query sees a whole chunk, as in a window of its size;
    what a ring still holds of the chunk before is masked."""
    size = window.size if isinstance(window, Chunk) else window
    return capacity if size is None else min(size, capacity)


def seen(before: int, after: int, n_cells: int) -> slice | Tensor:
    """The numbers of the tokens that `LayerCache.append` hands out, in its order, after adding
    tokens `before`..`after` - 1: all of them; or a ring's cells as they lie; or a ring's last and the new."""
    if after <= n_cells:
        return slice(0, after)
    if after - before == 1:
        cell = torch.arange(n_cells)
        return before - (before - cell) % n_cells
    return slice(max(0, before - n_cells + 1), after)


def _ring(first: int, last: int, n_cells: int, device: torch.device) -> Tensor:
    return torch.arange(first, last, device=device) % n_cells
