"""Causal self-attention with grouped key/value heads, and the two cores that compute it."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor, nn

from openbook.model.norm import HeadNorm, as_read_by
from openbook.model.positions import Rotate, Rotation, Temperature
from openbook.spec.model import Alibi, Chunk
from openbook.spec.model import Attention as AttentionSpec


class Mask(NamedTuple):
    """Which keys a query sees: those of `visible`, or all; or, if `causal`, all up to its own, the
    queries being the last T of the S tokens (the triangle's lower right end, not its upper left).

    `bias` is added to the scores of what is visible. `since` says it in fewer numbers, where they are known:
    query t sees the keys since[t] to t (but padding, whose result means nothing, itself alone).
    """

    visible: Bool[Tensor, "B 1 T S"] | None = None  # B may be 1
    causal: bool = False
    bias: Float[Tensor, "B H T S"] | None = None  # B may be 1
    since: Int32[Tensor, "B T"] | None = None  # B may be 1


class Place(NamedTuple):
    """What a layer has to know of where its tokens stand."""

    mask: Mask
    rotation: Rotation | None = None
    temperature: Float[Tensor, "B 1 T 1"] | None = None


@runtime_checkable
class LayerCache(Protocol):
    """One layer's keys and values of the `length` tokens before."""

    length: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [B, G, T, K] new keys and values; returns all [B, G, S, K] that a query may need."""
        ...


def visible(
    queries: Int[Tensor, "B T"],
    keys: Int[Tensor, "B S"],
    window: int | Chunk | None,
    documents: Int[Tensor, "B T"] | None = None,
) -> Bool[Tensor, "B 1 T S"]:
    """True where the query at position p may see the key at position s: s ≤ p, and p - s < window, or
    both in one chunk; and both in one document, if there are several (keys and queries are then the same).

    Padding has negative positions: no query sees it, except padding itself, whose softmax would
    otherwise have nothing to sum over.
    """
    q, k = queries[:, :, None], keys[:, None, :]
    seen = (k <= q) & ((k >= 0) | (q < 0))
    if isinstance(window, Chunk):
        seen &= q // window.size == k // window.size
    elif window is not None:
        seen &= q - k < window
    if documents is not None:
        seen &= documents[:, :, None] == documents[:, None, :]
    return seen[:, None]


def linear_biases(
    alibi: Alibi, queries: Int[Tensor, "B T"], keys: Int[Tensor, "B S"]
) -> Float[Tensor, "B H T S"]:
    """slope_h · (s - p), fp32, for the query at position p and the key at s (Press et al. 2022)."""
    slopes = torch.tensor(alibi.slopes, device=queries.device)[:, None, None]
    return slopes * (keys[:, None, None, :] - queries[:, None, :, None]).float()


class ExplicitCore(nn.Module):
    """softmax(scale · q kᵀ + bias, masked) v, one step after the other: the obvious twin of `FusedCore`.

    Scores and probabilities are fp32. A query with nothing to see gives zeros. `sinks` is one more score
    for each query head, which takes its share of the softmax and has no value. Values may be of another
    width U than queries and keys.
    """

    def forward(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S U"],
        mask: Mask,
        scale: float,
        softcap: float | None = None,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H T U"]:
        scores = self.scores(q, k, scale, softcap, mask.bias)
        return self.mix(self.probs(self.masked(scores, mask), sinks), v)

    def scores(
        self, q: Tensor, k: Tensor, scale: float, softcap: float | None, bias: Tensor | None
    ) -> Float[Tensor, "B H T S"]:
        """How well each key answers each query: scaled, soft-capped, biased by their distance."""
        scores = _each_group(q, k.mT).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return scores if bias is None else scores + bias

    def masked(self, scores: Float[Tensor, "#B H T S"], mask: Mask) -> Float[Tensor, "B H T S"]:
        """-∞ in place of what a query may not see."""
        if mask.causal:
            T, S = scores.shape[-2:]
            triangle = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(S - T)
            return scores.masked_fill(~triangle, -torch.inf)
        return scores if mask.visible is None else scores.masked_fill(~mask.visible, -torch.inf)

    def probs(
        self, scores: Float[Tensor, "B H T S"], sinks: Float[Tensor, " H"] | None
    ) -> Float[Tensor, "B H T S"]:
        """The softmax. With sinks a row sums to less than 1."""
        if sinks is None:
            return scores.softmax(dim=-1).nan_to_num(0.0)
        sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]

    def mix(self, probs: Float[Tensor, "B H T S"], v: Float[Tensor, "B G S U"]) -> Float[Tensor, "B H T U"]:
        """The values, weighted."""
        return _each_group(probs.to(v.dtype), v)


def _each_group(x: Float[Tensor, "B H T a"], y: Float[Tensor, "B G a b"]) -> Float[Tensor, "B H T b"]:
    """x y for every query head, those of a group as rows of one matrix: so y need not be repeated."""
    (B, H, T, _), G = x.shape, y.shape[1]
    return (x.reshape(B, G, H // G * T, -1) @ y).view(B, H, T, -1)


class FusedCore(ExplicitCore):
    """The same through PyTorch's fused kernel, without copying keys for the heads that share them.

    Query heads of one group are laid side by side: as rows of one query matrix when there is one token
    (they see the same keys), else as heads over a key that is expanded by a stride of 0. The kernel knows
    no soft-cap, no sinks and no values of another width, so with them the steps are taken one by one.
    """

    def forward(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S U"],
        mask: Mask,
        scale: float,
        softcap: float | None = None,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H T U"]:
        if softcap is not None or sinks is not None or v.shape[3] != q.shape[3]:
            return super().forward(q, k, v, mask, scale, softcap, sinks)
        B, H, T, K = q.shape
        G = k.shape[1]
        R = H // G
        seen = mask.visible
        if mask.bias is not None:  # one table says both
            seen = self.masked(mask.bias, mask).expand(B, -1, -1, -1)
        if T == 1 and R > 1:
            rows = q.reshape(B, G, R, K)
            if seen is not None and seen.shape[1] == H:
                seen = seen.reshape(B, G, R, -1)
            y = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen, scale=scale)
            return y.reshape(B, H, 1, K)
        if R > 1:
            q = q.reshape(B * G, R, T, K)
            k = k.reshape(B * G, 1, -1, K).expand(-1, R, -1, -1)
            v = v.reshape(B * G, 1, -1, K).expand(-1, R, -1, -1)
            if seen is not None and seen.shape[1] == H:
                seen = seen.reshape(B * G, R, T, -1)
            elif seen is not None and seen.shape[0] > 1:
                seen = seen.repeat_interleave(G, dim=0)
        if mask.causal and seen is None:
            return causal_attention(q, k, v, scale).reshape(B, H, T, K)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).reshape(B, H, T, K)


def causal_attention(
    q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], v: Float[Tensor, "B H S U"], scale: float
) -> Float[Tensor, "B H T U"]:
    """Queries in blocks, each against the keys up to its own end.

    The CPU kernel takes keys 512 at a time and computes all of a block that the mask cuts: on a short
    run that is twice the work. It skips whole blocks, so a long run from the start is left to it; a
    chunk after cached tokens is not, since its triangle is aligned to the upper left.
    """
    T, S = q.shape[2], k.shape[2]
    long = T > 1024
    if T == S and (long or T <= 64 or q.device.type != "cpu"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    block = 256 if long else 64
    # Row i of a block that ends at key `end` sees all but the last block - 1 - i keys before `end`: one
    # table for the last block, whose right part serves the others. Additive, as the kernel wants it.
    table = torch.full((block, S), -torch.inf, dtype=q.dtype, device=q.device).triu(S - block + 1)
    blocks = []
    for start in range(0, T, block):
        rows = q[:, :, start : start + block]
        end = S - T + start + rows.shape[2]
        seen = table[block - rows.shape[2] :, S - end :]
        blocks.append(
            F.scaled_dot_product_attention(rows, k[:, :, :end], v[:, :, :end], attn_mask=seen, scale=scale)
        )
    return torch.cat(blocks, dim=2)


class Clipped(nn.Linear):
    """A projection whose result is cut at ±limit."""

    def __init__(self, into: int, out: int, bias: bool, limit: float) -> None:
        super().__init__(into, out, bias=bias)
        self.limit = limit

    def forward(self, input: Float[Tensor, "B T D"]) -> Float[Tensor, "B T out"]:  # noqa: A002  (torch's name)
        return super().forward(input).clamp(-self.limit, self.limit)


class Attention(nn.Module):
    """o(core(rotate(norm(q(x))), rotate(norm(k(x))), v(x))), or the norms after the rotations."""

    def __init__(self, spec: AttentionSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.q = self._projection(d_model, spec.q_width, spec.q_bias)
        self.k = self._projection(d_model, spec.kv_width, spec.k_bias)
        self.v = self._projection(d_model, spec.kv_width, spec.v_bias)
        self.q_norm = HeadNorm(spec.q_norm, spec.n_heads, spec.head_dim) if spec.q_norm else None
        self.k_norm = HeadNorm(spec.k_norm, spec.n_kv_heads, spec.head_dim) if spec.k_norm else None
        self.q_rope = Rotate(spec.rope) if spec.rope else None
        self.k_rope = Rotate(spec.rope) if spec.rope else None
        self.temperature = Temperature() if spec.temperature else None
        self.sinks = nn.Parameter(torch.empty(spec.n_heads)) if spec.sinks else None
        self.core: nn.Module = FusedCore()
        self.o = nn.Linear(spec.q_width, d_model, bias=spec.o_bias)

    def _projection(self, into: int, out: int, bias: bool) -> nn.Linear:
        limit = self.spec.clip_qkv
        return nn.Linear(into, out, bias=bias) if limit is None else Clipped(into, out, bias, limit)

    def forward(
        self, x: Float[Tensor, "B T D"], place: Place, cache: LayerCache | None = None
    ) -> Float[Tensor, "B T D"]:
        x = as_read_by(self.q.weight, x)
        q, k, v = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        q = self._turned(q, self.q_norm, self.q_rope, place)
        k = self._turned(k, self.k_norm, self.k_rope, place)
        if self.temperature is not None:
            q = self.temperature(q, place.temperature)
        if cache is not None:
            k, v = cache.append(k, v)
        # Sinks are named only where there are some: not every core knows them.
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        heads = self.core(q, k, v, place.mask, self.spec.scale, self.spec.softcap, **sinks)
        return self.o(heads.transpose(1, 2).flatten(2))

    def _heads(self, x: Float[Tensor, "B T HK"]) -> Float[Tensor, "B H T K"]:
        """[B, T, heads·K] → [B, heads, T, K]."""
        return x.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)

    def _turned(
        self, x: Float[Tensor, "B H T K"], norm: HeadNorm | None, rope: nn.Module | None, place: Place
    ) -> Float[Tensor, "B H T K"]:
        """Normed and rotated, in the order that the norm's spec says."""
        if norm is not None and not norm.after_rope:
            x = norm(x)
        if rope is not None:
            x = rope(x, place.rotation)
        return norm(x) if norm is not None and norm.after_rope else x
