"""Multi-head latent attention (DeepSeek-V2, section 2.1): a narrow vector stands for all keys and values.

letters: C width of the latent, R of the rotated part, N of a head's own part of queries and keys,
         U of a head's value
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from openbook.model.attention import FusedCore, LayerCache, Place
from openbook.model.norm import Norm
from openbook.model.positions import Rotate
from openbook.spec.model import LatentAttention as LatentSpec


class KeyRows(nn.Module):
    """q W with each head's rows of kv_up that make its keys: what a query asks of the latents themselves."""

    def __init__(self, spec: LatentSpec) -> None:
        super().__init__()
        self.heads, self.rows = spec.n_heads, slice(spec.nope_dim)

    def forward(
        self, q: Float[Tensor, "B H T N"], kv_up: Float[Tensor, "rows C"]
    ) -> Float[Tensor, "B H T C"]:
        return q @ kv_up.unflatten(0, (self.heads, -1))[:, self.rows]


class ValueRows(nn.Module):
    """Wᵀ c with each head's rows of kv_up that make its values: the value of a mixture of latents."""

    def __init__(self, spec: LatentSpec) -> None:
        super().__init__()
        self.heads, self.rows = spec.n_heads, slice(spec.nope_dim, None)

    def forward(
        self, mixed: Float[Tensor, "B H T C"], kv_up: Float[Tensor, "rows C"]
    ) -> Float[Tensor, "B H T U"]:
        return mixed @ kv_up.unflatten(0, (self.heads, -1))[:, self.rows].mT


class LatentAttention(nn.Module):
    """See `openbook.spec.model.LatentAttention` for the formula.

    The same product is taken in one of two orders. Expanded: kv_up makes keys and values of every latent.
    Absorbed: since q · (W c) = (Wᵀ q) · c, queries are brought into the latents' space, where all heads
    share one key and one value, and what they find there is brought back. The spec says which is cheaper.
    """

    def __init__(self, spec: LatentSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        if spec.q_rank is None or spec.q_norm is None:
            self.q = nn.Linear(d_model, spec.q_width, bias=False)
        else:
            self.q_down = nn.Linear(d_model, spec.q_rank, bias=spec.down_bias)
            self.q_norm = Norm(spec.q_norm, spec.q_rank)
            self.q_up = nn.Linear(spec.q_rank, spec.q_width, bias=False)
        self.kv_down = nn.Linear(d_model, spec.kv_rank + spec.rope_dim, bias=spec.down_bias)
        self.kv_norm = Norm(spec.kv_norm, spec.kv_rank)
        self.kv_up = nn.Linear(spec.kv_rank, spec.n_heads * (spec.nope_dim + spec.v_dim), bias=False)
        self.q_rope = Rotate(spec.rope) if spec.rope else None
        self.k_rope = Rotate(spec.rope) if spec.rope else None
        self.q_absorb, self.v_absorb = KeyRows(spec), ValueRows(spec)
        self.core: nn.Module = FusedCore()
        self.o = nn.Linear(spec.n_heads * spec.v_dim, d_model, bias=spec.o_bias)

    def forward(
        self, x: Float[Tensor, "B T D"], place: Place, cache: LayerCache | None = None
    ) -> Float[Tensor, "B T D"]:
        x = x.to(self.o.weight.dtype)
        q, q_rotated = self._queries(x, place)
        latents = self._latents(x, place)
        past = 0
        if cache is not None:
            past = cache.length
            latents, _ = cache.append(latents, latents[..., :0])  # the values are part of the latents
        attend = self._absorbed if self.spec.absorbs(x.shape[1], past) else self._expanded
        return self.o(attend(q, q_rotated, latents, place).transpose(1, 2).flatten(2))

    def _queries(
        self, x: Float[Tensor, "B T D"], place: Place
    ) -> tuple[Float[Tensor, "B H T N"], Float[Tensor, "B H T R"]]:
        q = self.q(x) if self.spec.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        heads = q.unflatten(-1, (self.spec.n_heads, -1)).transpose(1, 2)
        own, rotated = heads.split((self.spec.nope_dim, self.spec.rope_dim), dim=-1)
        return own, self.q_rope(rotated, place.rotation) if self.q_rope is not None else rotated

    def _latents(self, x: Float[Tensor, "B T D"], place: Place) -> Float[Tensor, "B 1 T CR"]:
        """What a cache has to keep: the normed latent, and the rotated part of all heads' keys."""
        latent, rotated = self.kv_down(x)[:, None].split((self.spec.kv_rank, self.spec.rope_dim), dim=-1)
        if self.k_rope is not None:
            rotated = self.k_rope(rotated, place.rotation)
        return torch.cat((self.kv_norm(latent), rotated), dim=-1)

    def _expanded(
        self,
        q: Float[Tensor, "B H T N"],
        q_rotated: Float[Tensor, "B H T R"],
        latents: Float[Tensor, "B 1 S CR"],
        place: Place,
    ) -> Float[Tensor, "B H T U"]:
        latent, k_rotated = latents.split((self.spec.kv_rank, self.spec.rope_dim), dim=-1)
        heads = self.kv_up(latent[:, 0]).unflatten(-1, (self.spec.n_heads, -1)).transpose(1, 2)
        k, v = heads.split((self.spec.nope_dim, self.spec.v_dim), dim=-1)
        k = torch.cat((k, k_rotated.expand(-1, k.shape[1], -1, -1)), dim=-1)
        return self._attend(torch.cat((q, q_rotated), dim=-1), k, v, place)

    def _absorbed(
        self,
        q: Float[Tensor, "B H T N"],
        q_rotated: Float[Tensor, "B H T R"],
        latents: Float[Tensor, "B 1 S CR"],
        place: Place,
    ) -> Float[Tensor, "B H T U"]:
        q = torch.cat((self.q_absorb(q, self.kv_up.weight), q_rotated), dim=-1)
        mixed = self._attend(q, latents, latents[..., : self.spec.kv_rank], place)
        return self.v_absorb(mixed, self.kv_up.weight)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        return self.core(q, k, v, place.mask, self.spec.scale, self.spec.softcap)
