"""The whole model: ids in, logits out. State comes in by argument and nothing is kept."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int32
from torch import Tensor, nn

from openbook.model.attention import LayerCache, Mask, Place, linear_biases, visible
from openbook.model.block import Block
from openbook.model.norm import norm_or_identity
from openbook.model.positions import LearnedPositions, SinusoidalPositions, rotation, temperature
from openbook.spec.model import (
    Alibi,
    Attention,
    Chunk,
    LatentAttention,
    Learned,
    ModelSpec,
    QueryTemperature,
    Rope,
    Sinusoidal,
)
from openbook.spec.model import Head as HeadSpec


@runtime_checkable
class Cache(Protocol):
    """What the model needs of a KV cache (`openbook.infer.cache.Cache` is one)."""

    capacity: int
    length: int
    padded: bool

    @property
    def layers(self) -> Sequence[LayerCache]: ...

    def extend(
        self, positions: Int[Tensor, "B T"], padded: bool
    ) -> Mapping[int | Chunk | None, Int[Tensor, "B S"]]:
        """Makes room for T tokens. Returns, for each window, the positions of the keys a layer will see."""
        ...


class Embedding(nn.Embedding):
    """A vector for each token, times `scale`, as the fp32 stream begins."""

    def __init__(self, vocab_size: int, d_model: int, scale: float) -> None:
        super().__init__(vocab_size, d_model)
        self.scale = scale

    def forward(self, input: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:  # noqa: A002  (torch's name)
        x = super().forward(input).float()
        return x if self.scale == 1 else x * self.scale


class Head(nn.Linear):
    """Hidden states → logits, scaled and soft-capped, in the weights' dtype."""

    def __init__(self, spec: HeadSpec, d_model: int, vocab_size: int) -> None:
        super().__init__(d_model, vocab_size, bias=spec.bias)
        self.scale, self.softcap = spec.scale, spec.softcap

    def forward(self, input: Float[Tensor, "B rows D"]) -> Float[Tensor, "B rows V"]:  # noqa: A002  (torch's name)
        logits = super().forward(input.to(self.weight.dtype))
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class _Needs(NamedTuple):
    """What a layer asks of its tokens' positions. Layers that ask for the same share it."""

    rope: Rope | None
    window: int | Chunk | None
    alibi: Alibi | None = None
    temperature: QueryTemperature | None = None

    @staticmethod
    def of(attn: Attention | LatentAttention) -> "_Needs":
        if isinstance(attn, LatentAttention):
            return _Needs(attn.rope, attn.window)
        return _Needs(attn.rope, attn.window, attn.alibi, attn.temperature)


class Decoder(nn.Module):
    """A decoder-only Transformer of any shape that a `ModelSpec` can describe.

    Build it under `torch.device("meta")` to allocate nothing.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec.vocab_size, spec.d_model, spec.embed_scale)
        match spec.positions:
            case Learned() as learned:
                self.positions: nn.Module | None = LearnedPositions(learned, spec.d_model)
            case Sinusoidal() as sinusoidal:
                self.positions = SinusoidalPositions(sinusoidal, spec.d_model)
            case None:
                self.positions = None
        self.embed_norm = norm_or_identity(spec.embed_norm, spec.d_model)
        self.layers = nn.ModuleList(Block(block, spec.d_model) for block in spec.layers)
        self.final_norm = norm_or_identity(spec.final_norm, spec.d_model)
        self.head = Head(spec.head, spec.d_model, spec.vocab_size)
        self.tie()
        needs = [_Needs.of(block.attn) for block in spec.layers]
        self._needs = list(dict.fromkeys(needs))
        self._place_of = [self._needs.index(need) for need in needs]

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
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B rows V"]:
        """Logits of the token after each of `ids` (rows = T), in the model's dtype.

        `positions` defaults to the places after what the cache holds; a negative position marks
        padding: nothing attends to it and its own logits mean nothing, but are finite. With
        `last_only` the head sees the last token alone, and the result is [B, 1, V].

        Rows may hold several documents, as training packs them: tokens see only those of the same number
        in `documents`, which stand together. `positions` then count from each document's first token; there
        is no cache.
        """
        x = self.hidden(ids, positions, cache, documents)
        return self.head(x[:, -1:] if last_only else x)

    def hidden(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What the head reads: the residual stream after the last layer and the final norm, fp32.

        The stream is fp32 whatever the weights are: in bf16 every layer's addition would round it.
        """
        if documents is not None and (cache is not None or positions is None):
            raise ValueError("packed documents need positions that begin anew with each, and take no cache")
        padded = positions is not None or (cache is not None and cache.padded)
        past = cache.length if cache is not None else 0
        if positions is None:
            positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(positions)
        x = self.embed_norm(x)
        places = self._places(positions, padded, past, cache, documents)
        for i, layer in enumerate(self.layers):
            x = layer(x, places[self._place_of[i]], cache.layers[i] if cache is not None else None)
        return self.final_norm(x)

    def _places(
        self,
        positions: Int[Tensor, "B T"],
        padded: bool,
        past: int,
        cache: Cache | None,
        documents: Int[Tensor, "B T"] | None,
    ) -> list[Place]:
        """Mask, rotation and temperature for each of the needs. The cache makes room for the tokens."""
        needs, end = self._needs, past + positions.shape[1]
        if cache is None:
            capacity, keys = None, dict.fromkeys((n.window for n in needs), positions)
        else:
            capacity, keys = cache.capacity, cache.extend(positions, padded)
        rotations = {rope: rotation(rope, positions, capacity) for rope in {n.rope for n in needs} if rope}
        masks = {
            (window, alibi): _mask(positions, keys[window], window, alibi, padded, end, documents)
            for window, alibi in {(n.window, n.alibi) for n in needs}
        }
        temperatures = {t: temperature(t, positions) for t in {n.temperature for n in needs} if t}
        return [
            Place(
                masks[n.window, n.alibi],
                rotations[n.rope] if n.rope else None,
                temperatures[n.temperature] if n.temperature else None,
            )
            for n in needs
        ]


def _mask(
    queries: Int[Tensor, "B T"],
    keys: Int[Tensor, "B S"],
    window: int | Chunk | None,
    alibi: Alibi | None,
    padded: bool,
    end: int,
    documents: Int[Tensor, "B T"] | None,
) -> Mask:
    """The cheapest mask that says it: none where one token sees everything, the triangle, or a table.

    `end` is how many tokens there are with the new ones: a first chunk is seen whole.
    """
    if alibi is not None:
        return Mask(visible(queries, keys, window, documents), bias=linear_biases(alibi, queries, keys))
    whole = end <= window.size if isinstance(window, Chunk) else window is None or keys.shape[1] <= window
    if whole and not padded:
        return Mask(causal=queries.shape[1] > 1)
    seen = visible(queries, keys, window, documents)
    if keys is not queries or isinstance(window, Chunk) or (padded and documents is None):
        return Mask(seen)
    return Mask(seen, since=_first_seen(queries.shape[1], window, documents))


def _first_seen(
    length: int, window: int | None, documents: Int[Tensor, "B T"] | None
) -> Int32[Tensor, "B T"]:
    """For each token, where its document begins, or its window."""
    at = torch.arange(length, dtype=torch.int32, device=documents.device if documents is not None else None)
    first = torch.zeros_like(at)[None]
    if documents is not None:
        begins = documents[:, 1:] != documents[:, :-1]
        first = F.pad(torch.where(begins, at[1:], 0), (1, 0)).cummax(1).values
    return first if window is None else first.maximum(at - window + 1)
