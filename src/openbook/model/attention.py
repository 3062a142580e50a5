"""Causal self-attention with grouped key/value heads, and the two cores that compute it."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from openbook.model.norm import Norm
from openbook.model.positions import Rotate, Rotation
from openbook.spec.model import Attention as AttentionSpec


class Mask(NamedTuple):
    """Which keys a query sees: those of `visible`, or all; or, if `causal`, all up to its own, the
    queries being the last T of the S tokens (the triangle's lower right end, not its upper left)."""

    visible: Bool[Tensor, "B 1 T S"] | None = None  # B may be 1
    causal: bool = False


@runtime_checkable
class LayerCache(Protocol):
    """One layer's keys and values of the tokens before."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [B, G, T, K] new keys and values; returns all [B, G, S, K] that a query may need."""
        ...


def visible(
    queries: Int[Tensor, "B T"], keys: Int[Tensor, "B S"], window: int | None
) -> Bool[Tensor, "B 1 T S"]:
    """True where the query at position p may see the key at position s: s ≤ p, and p - s < window.

    Padding has negative positions: no query sees it, except padding itself, whose softmax would
    otherwise have nothing to sum over.
    """
    q, k = queries[:, :, None], keys[:, None, :]
    seen = (k <= q) & ((k >= 0) | (q < 0))
    if window is not None:
        seen &= q - k < window
    return seen[:, None]


class ExplicitCore(nn.Module):
    """softmax(scale · q kᵀ + mask) v, one step after the other: the obvious twin of `FusedCore`.

    Scores and probabilities are fp32. A query with nothing to see gives zeros.
    """

    def forward(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S K"],
        mask: Mask,
        scale: float,
        softcap: float | None = None,
    ) -> Float[Tensor, "B H T K"]:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = (q @ k.mT).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask.causal:
            T, S = scores.shape[-2:]
            triangle = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
            scores = scores.masked_fill(~triangle, -torch.inf)
        elif mask.visible is not None:
            scores = scores.masked_fill(~mask.visible, -torch.inf)
        probs = scores.softmax(dim=-1).nan_to_num(0.0)
        return probs.to(v.dtype) @ v


class FusedCore(nn.Module):
    """The same through PyTorch's fused kernel, without copying keys for the heads that share them.

    Query heads of one group are laid side by side: as rows of one query matrix when there is one token
    (they see the same keys), else as heads over a key that is expanded by a stride of 0.
    """

    def forward(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S K"],
        mask: Mask,
        scale: float,
        softcap: float | None = None,
    ) -> Float[Tensor, "B H T K"]:
        if softcap is not None:
            return ExplicitCore.forward(self, q, k, v, mask, scale, softcap)  # type: ignore[arg-type]
        B, H, T, K = q.shape
        G = k.shape[1]
        R = H // G
        if T == 1 and R > 1:
            rows = q.reshape(B, G, R, K)
            y = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask.visible, scale=scale)
            return y.reshape(B, H, 1, K)
        seen = mask.visible
        if R > 1:
            q = q.reshape(B * G, R, T, K)
            k = k.reshape(B * G, 1, -1, K).expand(-1, R, -1, -1)
            v = v.reshape(B * G, 1, -1, K).expand(-1, R, -1, -1)
            if seen is not None and seen.shape[0] > 1:
                seen = seen.repeat_interleave(G, dim=0)
        if mask.causal:
            return causal_attention(q, k, v, scale).reshape(B, H, T, K)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).reshape(B, H, T, K)


def causal_attention(
    q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], v: Float[Tensor, "B H S K"], scale: float
) -> Float[Tensor, "B H T K"]:
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


class Attention(nn.Module):
    """o(core(rotate(norm(q(x))), rotate(norm(k(x))), v(x)))."""

    def __init__(self, spec: AttentionSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.q = nn.Linear(d_model, spec.q_width, bias=spec.q_bias)
        self.k = nn.Linear(d_model, spec.kv_width, bias=spec.k_bias)
        self.v = nn.Linear(d_model, spec.kv_width, bias=spec.v_bias)
        self.q_norm = Norm(spec.q_norm, spec.head_dim) if spec.q_norm else None
        self.k_norm = Norm(spec.k_norm, spec.head_dim) if spec.k_norm else None
        self.q_rope = Rotate(spec.rope) if spec.rope else None
        self.k_rope = Rotate(spec.rope) if spec.rope else None
        self.core: nn.Module = FusedCore()
        self.o = nn.Linear(spec.q_width, d_model, bias=spec.o_bias)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        rotation: Rotation | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        x = x.to(self.q.weight.dtype)
        q, k, v = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if rotation is not None and self.q_rope is not None and self.k_rope is not None:
            q, k = self.q_rope(q, rotation), self.k_rope(k, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        heads = self.core(q, k, v, mask, self.spec.scale, self.spec.softcap)
        return self.o(heads.transpose(1, 2).flatten(2))

    def _heads(self, x: Float[Tensor, "B T HK"]) -> Float[Tensor, "B H T K"]:
        """[B, T, heads·K] → [B, heads, T, K]."""
        return x.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)
