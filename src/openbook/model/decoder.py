"""The whole model: ids in, logits out. State comes in by argument and nothing is kept."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from openbook.model.attention import LayerCache, Mask, visible
from openbook.model.block import Block
from openbook.model.norm import norm_or_identity
from openbook.model.positions import LearnedPositions, SinusoidalPositions, rotation
from openbook.spec.model import Learned, ModelSpec, Sinusoidal


@runtime_checkable
class Cache(Protocol):
    """What the model needs of a KV cache (`openbook.infer.cache.Cache` is one)."""

    capacity: int
    length: int
    padded: bool

    @property
    def layers(self) -> Sequence[LayerCache]: ...

    def extend(self, positions: Int[Tensor, "B T"], padded: bool) -> Mapping[int | None, Int[Tensor, "B S"]]:
        """Makes room for T tokens. Returns, for each window, the positions of the keys a layer will see."""
        ...


class Decoder(nn.Module):
    """A decoder-only Transformer of any shape that a `ModelSpec` can describe.

    Build it under `torch.device("meta")` to allocate nothing.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab_size, spec.d_model)
        match spec.positions:
            case Learned(n_positions):
                self.positions: nn.Module | None = LearnedPositions(n_positions, spec.d_model)
            case Sinusoidal() as sinusoidal:
                self.positions = SinusoidalPositions(sinusoidal, spec.d_model)
            case None:
                self.positions = None
        self.layers = nn.ModuleList(Block(block, spec.d_model) for block in spec.layers)
        self.final_norm = norm_or_identity(spec.final_norm, spec.d_model)
        self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=spec.head.bias)
        self.tie()
        self._ropes = {block.attn.rope for block in spec.layers if block.attn.rope is not None}
        self._windows = {block.attn.window for block in spec.layers}

    def tie(self) -> None:
        """Makes a tied head share the embedding's matrix (again, after a change of storage)."""
        if self.spec.head.tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> Float[Tensor, "B rows V"]:
        """Logits of the token after each of `ids` (rows = T), in the model's dtype.

        `positions` defaults to the places after what the cache holds; a negative position marks
        padding: nothing attends to it and its own logits mean nothing, but are finite. With
        `last_only` the head sees the last token alone, and the result is [B, 1, V].
        """
        x = self.hidden(ids, positions, cache)
        return self.head((x[:, -1:] if last_only else x).to(self.head.weight.dtype))

    def hidden(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What the head reads: the residual stream after the last layer and the final norm, fp32.

        The stream is fp32 whatever the weights are: in bf16 every layer's addition would round it.
        """
        padded = positions is not None or (cache is not None and cache.padded)
        if positions is None:
            past = cache.length if cache is not None else 0
            positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        x = self.embed(ids).float()
        if self.positions is not None:
            x = x + self.positions(positions)
        capacity = cache.capacity if cache is not None else None
        keys = (
            cache.extend(positions, padded) if cache is not None else dict.fromkeys(self._windows, positions)
        )
        rotations = {rope: rotation(rope, positions, capacity) for rope in self._ropes}
        masks = {window: _mask(positions, keys[window], window, padded) for window in self._windows}
        for i, layer in enumerate(self.layers):
            attn = self.spec.layers[i].attn
            turn = rotations[attn.rope] if attn.rope is not None else None
            x = layer(x, turn, masks[attn.window], cache.layers[i] if cache is not None else None)
        return self.final_norm(x)


def _mask(queries: Int[Tensor, "B T"], keys: Int[Tensor, "B S"], window: int | None, padded: bool) -> Mask:
    """The cheapest mask that says it: none where one token sees everything, the triangle, or a table."""
    if not padded and (window is None or window >= keys.shape[1]):
        return Mask(causal=queries.shape[1] > 1)
    return Mask(visible(queries, keys, window))
