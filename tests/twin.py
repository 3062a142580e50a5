"""A slow twin of every step: from what a trace recorded as its inputs, and the weights, it computes the step
anew in fp64, by the formulas of the papers. It shares no code with the model.

letters: B batch, T tokens, S keys, D width, H query heads, G key heads, K head size, F inner width,
         E experts, A experts of a token, C latent, R rotated part, N own part of a head, U value of a head
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, einsum

from openbook.model.positions import frequencies
from openbook.spec.model import (
    Alibi,
    Attention,
    Block,
    Chunk,
    Experts,
    HeadNorm,
    LatentAttention,
    Learned,
    LongRope,
    Mlp,
    Norm,
    Rope,
    Router,
)
from openbook.trace import Trace

Steps = Iterator[tuple[str, Tensor]]

ACTIVATIONS = {
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_quick": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "tanh": torch.tanh,
}


class Twin:
    """`before` is the trace of the tokens in the cache, if there are any."""

    def __init__(self, trace: Trace, before: Trace | None = None) -> None:
        self.trace, self.before, self.spec = trace, before, trace.spec
        self.where = ""

    def steps(self) -> Steps:
        """Every step's name, and its tensor computed anew, in the order of the ledger."""
        yield from self._input()
        x = self.recorded(self._last_of_input())
        for layer, block in enumerate(self.spec.layers):
            self.where = f"layers.{layer}."
            for name, value in self._block(block, layer, x):
                yield self.where + name, value
            names = [step for step in self.trace.tensors if step.startswith(self.where)]
            x = self.trace.tensor(names[-1]).double()  # the last step of a layer is its result
        self.where = ""
        if self.spec.final_norm is not None:
            yield "final_norm", self.norm("final_norm", self.spec.final_norm, x)
            x = self.recorded("final_norm")
        logits = self.linear("head", x) * self.spec.head.scale
        cap = self.spec.head.softcap
        yield "head", logits if cap is None else cap * torch.tanh(logits / cap)

    # --- what was recorded, and the weights ---

    def recorded(self, name: str) -> Tensor:
        return self.trace.tensor(self.where + name).double()

    def with_cached(self, name: str, axis: int) -> Tensor:
        """Of the cached tokens and the new ones."""
        new = self.recorded(name)
        if self.before is None:
            return new
        return torch.cat((self.before.tensor(self.where + name).double(), new), dim=axis)

    def weight(self, name: str) -> Tensor | None:
        found = self.trace.parameters.get(self.where + name)
        return None if found is None else found.detach().double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        assert weight is not None
        y = einsum("bti,oi->bto", x, weight)
        return y if bias is None else y + bias

    def norm(self, name: str, norm: Norm, x: Tensor) -> Tensor:
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        y = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        y = y if weight is None else y * (weight + norm.offset)
        return y if bias is None else y + bias

    # --- outside the layers ---

    def _input(self) -> Steps:
        table = self.weight("embed.weight")
        assert table is not None
        yield "embed", table[self.trace.ids] * self.spec.embed_scale
        if self.spec.positions is not None:
            yield "positions", self.recorded("embed") + self._position_vectors()
        if self.spec.embed_norm is not None:
            read = "positions" if self.spec.positions is not None else "embed"
            yield "embed_norm", self.norm("embed_norm", self.spec.embed_norm, self.recorded(read))

    def _position_vectors(self) -> Tensor:
        positions = self.trace.positions
        if isinstance(self.spec.positions, Learned):
            table = self.weight("positions.weight")
            assert table is not None
            return table[positions + self.spec.positions.offset]
        assert self.spec.positions is not None
        vectors = torch.zeros(*positions.shape, self.spec.d_model, dtype=torch.float64)
        for i in range(0, self.spec.d_model, 2):
            angle = positions.double() / self.spec.positions.base ** (i / self.spec.d_model)
            vectors[..., i], vectors[..., i + 1] = angle.sin(), angle.cos()
        return vectors

    def _last_of_input(self) -> str:
        return [name for name in ("embed", "positions", "embed_norm") if name in self.trace][-1]

    # --- a block ---

    def _block(self, block: Block, layer: int, x: Tensor) -> Steps:
        normed = x
        if block.attn_norm is not None:
            yield "attn_norm", self.norm("attn_norm", block.attn_norm, x)
            normed = self.recorded("attn_norm")
        if isinstance(block.attn, Attention):
            yield from self._attention(block.attn, layer, normed)
        else:
            yield from self._latent(block.attn, normed)
        attended = self.recorded("attn.o")
        if block.attn_out_norm is not None:
            yield "attn_out_norm", self.norm("attn_out_norm", block.attn_out_norm, attended)
            attended = self.recorded("attn_out_norm")
        yield "attn_add", x + block.residual_scale * attended
        middle = self.recorded("attn_add")
        if block.attn_add_norm is not None:
            yield "attn_add_norm", self.norm("attn_add_norm", block.attn_add_norm, middle)
            middle = self.recorded("attn_add_norm")
        read = {"serial": middle, "parallel": x, "parallel_shared": normed}[block.residual]
        if block.mlp_norm is not None:
            yield "mlp_norm", self.norm("mlp_norm", block.mlp_norm, read)
            read = self.recorded("mlp_norm")
        if isinstance(block.mlp, Mlp):
            yield from self._mlp("mlp", block.mlp, read)
            made = self.recorded("mlp.down")
        else:
            yield from self._experts(block.mlp, read)
            made = self.recorded("mlp.shared_add" if block.mlp.shared else "mlp.experts.sum")
        if block.mlp_out_norm is not None:
            yield "mlp_out_norm", self.norm("mlp_out_norm", block.mlp_out_norm, made)
            made = self.recorded("mlp_out_norm")
        yield "mlp_add", middle + block.residual_scale * made
        total = self.recorded("mlp_add")
        if block.mlp_add_norm is not None:
            yield "mlp_add_norm", self.norm("mlp_add_norm", block.mlp_add_norm, total)
            total = self.recorded("mlp_add_norm")
        if block.end_norm is not None:
            yield "end_norm", self.norm("end_norm", block.end_norm, total)

    # --- attention ---

    def _attention(self, attn: Attention, layer: int, x: Tensor) -> Steps:
        for part in ("q", "k", "v"):
            y = self.linear(f"attn.{part}", x)
            limit = attn.clip_qkv
            yield f"attn.{part}", y if limit is None else y.clamp(-limit, limit)
        last = {"q": "attn.q", "k": "attn.k"}
        stages = [("norm", False), ("rope", None), ("norm", True)]
        for stage, after_rope in stages:
            for part, norm in (("q", attn.q_norm), ("k", attn.k_norm)):
                name = f"attn.{part}_{stage}"
                if stage == "rope" and attn.rope is not None:
                    yield name, self.rotated(attn.rope, self._heads(last[part], attn.head_dim))
                elif stage == "norm" and norm is not None and norm.after_rope == after_rope:
                    yield name, self._head_norm(name, norm, self._heads(last[part], attn.head_dim))
                else:
                    continue
                last[part] = name
        if attn.temperature is not None:
            at, interval = self.trace.positions.double(), attn.temperature.interval
            factor = 1 + attn.temperature.scale * torch.log(1 + torch.floor((at + 1) / interval))
            q = self._heads(last["q"], attn.head_dim)
            yield "attn.temperature", q * factor[:, None, :, None]
            last["q"] = "attn.temperature"
        q, k = self._heads(last["q"], attn.head_dim), self._heads(last["k"], attn.head_dim, cached=True)
        v = self._heads("attn.v", attn.head_dim, cached=True)
        share = attn.n_heads // attn.n_kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        scores = einsum("bhtk,bhsk->bhts", q, k)
        yield from self._core(attn, layer, scores, v)
        yield "attn.o", self.linear("attn.o", self._side_by_side("attn.mix"))

    def _core(self, attn: Attention | LatentAttention, layer: int, scores: Tensor, v: Tensor) -> Steps:
        keys, queries = self.trace.keys[layer][:, None, None], self.trace.positions[:, None, :, None]
        scores = scores * attn.scale
        if attn.softcap is not None:
            scores = attn.softcap * torch.tanh(scores / attn.softcap)
        alibi = attn.alibi if isinstance(attn, Attention) else None
        if isinstance(alibi, Alibi):
            slopes = torch.tensor(alibi.slopes, dtype=torch.float64)[:, None, None]
            scores = scores + slopes * (keys - queries)
        yield "attn.scores", scores
        seen = (keys <= queries) & (keys >= 0)
        if isinstance(attn.window, Chunk):
            seen &= torch.div(queries, attn.window.size, rounding_mode="floor") * attn.window.size <= keys
        elif attn.window is not None:
            seen &= keys > queries - attn.window
        yield "attn.masked", torch.where(seen, self.recorded("attn.scores"), -torch.inf)
        exponentials = self.recorded("attn.masked").exp()
        total = exponentials.sum(-1, keepdim=True)
        if isinstance(attn, Attention) and attn.sinks:
            sinks = self.weight("attn.sinks")
            assert sinks is not None
            total = total + sinks.exp()[:, None, None]
        yield "attn.probs", exponentials / total
        yield "attn.mix", einsum("bhts,bhsu->bhtu", self.recorded("attn.probs"), v)

    def _heads(self, name: str, size: int, cached: bool = False) -> Tensor:
        """A step as [B, heads, T, K], whether it lies so or side by side."""
        axis = 2 if self.recorded(name).ndim == 4 else 1
        x = self.with_cached(name, axis) if cached else self.recorded(name)
        return x if x.ndim == 4 else x.unflatten(-1, (-1, size)).permute(0, 2, 1, 3)

    def _side_by_side(self, name: str) -> Tensor:
        return self.recorded(name).permute(0, 2, 1, 3).flatten(2)

    def _head_norm(self, name: str, norm: HeadNorm, heads: Tensor) -> Tensor:
        if norm.over == "width":
            return self.norm(name, norm, heads.permute(0, 2, 1, 3).flatten(2))
        rows = self.norm(name, norm, heads.permute(0, 2, 1, 3))
        return rows.permute(0, 2, 1, 3)

    def rotated(self, rope: Rope, heads: Tensor) -> Tensor:
        """[B, heads, T, K], each pair turned as a complex number is by exp(i·angle)."""
        half = rope.dim // 2
        first = range(half) if rope.layout == "half" else range(0, rope.dim, 2)
        apart = half if rope.layout == "half" else 1
        speeds = self._speeds(rope)
        stretch = getattr(rope.scaling, "attention_factor", 1.0)
        y = heads.clone()
        for i, a in enumerate(first):
            angle = (self.trace.positions.double() * speeds[..., i])[:, None]
            z = torch.complex(heads[..., a], heads[..., a + apart]) * torch.polar(
                torch.full_like(angle, stretch), angle
            )
            y[..., a], y[..., a + apart] = z.real, z.imag
        return y

    def _speeds(self, rope: Rope) -> Tensor:
        """Radians per position of each pair. Where a scaling has a rule for them they are the model's own,
        which other tests compare with transformers'; LongRoPE's are divided by a table."""
        if rope.scaling is None or isinstance(rope.scaling, LongRope):
            plain = [rope.base ** (-2 * i / rope.dim) for i in range(rope.dim // 2)]
            speeds = torch.tensor(plain, dtype=torch.float64)
            if isinstance(rope.scaling, LongRope):
                long = self.trace.positions.shape[1] > rope.scaling.original_positions
                speeds /= torch.tensor(rope.scaling.long if long else rope.scaling.short).double()
            return speeds
        return frequencies(rope).double()  # dynamic scaling: within the original length

    # --- latent attention ---

    def _latent(self, attn: LatentAttention, x: Tensor) -> Steps:
        query = "attn.q"
        if attn.q_rank is None:
            yield query, self.linear("attn.q", x)
        else:
            assert attn.q_norm is not None
            yield "attn.q_down", self.linear("attn.q_down", x)
            yield "attn.q_norm", self.norm("attn.q_norm", attn.q_norm, self.recorded("attn.q_down"))
            yield "attn.q_up", self.linear("attn.q_up", self.recorded("attn.q_norm"))
            query = "attn.q_up"
        yield "attn.kv_down", self.linear("attn.kv_down", x)
        down = self.recorded("attn.kv_down")
        yield "attn.kv_norm", self.norm("attn.kv_norm", attn.kv_norm, down[..., : attn.kv_rank])
        q = self._heads(query, attn.nope_dim + attn.rope_dim)
        own, turned = q[..., : attn.nope_dim], q[..., attn.nope_dim :]
        absorbed = "attn.q_absorb" in {step.local for step in self.trace if step.name.startswith(self.where)}
        if not absorbed:
            yield "attn.kv_up", self.linear("attn.kv_up", self.recorded("attn.kv_norm"))
        key_part = self.with_cached("attn.kv_down", 1)[..., attn.kv_rank :]
        if attn.rope is not None:
            yield "attn.q_rope", self.rotated(attn.rope, turned)
            yield "attn.k_rope", self.rotated(attn.rope, down[:, None, :, attn.kv_rank :])[:, 0]
            turned, key_part = self.recorded("attn.q_rope"), self.with_cached("attn.k_rope", 1)
        layer = int(self.where.split(".")[1])
        scores = einsum("bhtr,bsr->bhts", turned, key_part)
        up = self.weight("attn.kv_up.weight")
        assert up is not None
        key_rows, value_rows = up.unflatten(0, (attn.n_heads, -1)).split((attn.nope_dim, attn.v_dim), dim=1)
        if absorbed:
            latents = self.with_cached("attn.kv_norm", 1)
            yield "attn.q_absorb", einsum("bhtn,hnc->bhtc", own, key_rows)
            scores = scores + einsum("bhtc,bsc->bhts", self.recorded("attn.q_absorb"), latents)
            yield from self._core(attn, layer, scores, latents[:, None].expand(-1, attn.n_heads, -1, -1))
            yield "attn.v_absorb", einsum("bhtc,huc->bhtu", self.recorded("attn.mix"), value_rows)
            yield "attn.o", self.linear("attn.o", self._side_by_side("attn.v_absorb"))
            return
        heads = self.recorded("attn.kv_up").unflatten(-1, (attn.n_heads, -1)).permute(0, 2, 1, 3)
        scores = scores + einsum("bhtn,bhsn->bhts", own, heads[..., : attn.nope_dim])
        yield from self._core(attn, layer, scores, heads[..., attn.nope_dim :])
        yield "attn.o", self.linear("attn.o", self._side_by_side("attn.mix"))

    # --- feed-forward ---

    def _mlp(self, name: str, mlp: Mlp, x: Tensor) -> Steps:
        for part in ("gate", "up") if mlp.gated else ("up",):
            yield f"{name}.{part}", self.linear(f"{name}.{part}", x)
        yield f"{name}.act", self._activated(name, mlp)
        yield f"{name}.down", self.linear(f"{name}.down", self.recorded(f"{name}.act"))

    def _activated(self, name: str, mlp: Mlp) -> Tensor:
        function, up = ACTIVATIONS[mlp.activation], self.recorded(f"{name}.up")
        if not mlp.gated:
            return function(up)
        gate = self.recorded(f"{name}.gate")
        if mlp.clamp is not None:
            gate, up = gate.clamp(max=mlp.clamp), up.clamp(-mlp.clamp, mlp.clamp)
        return function(gate) * (up + mlp.up_offset)

    def _experts(self, experts: Experts, x: Tensor) -> Steps:
        yield "mlp.router", self.linear("mlp.router", x)
        chosen = self.trace.choices[f"{self.where}mlp.chosen"]
        yield "mlp.chosen", self._weights(experts.router, chosen)
        weights = self.recorded("mlp.chosen")
        read = x[:, :, None].expand(-1, -1, experts.n_active, -1)
        if experts.router.on_input:
            read = read * weights[..., None]
        expert = experts.expert
        for part in ("gate", "up") if expert.gated else ("up",):
            yield f"mlp.experts.{part}", self._by_expert(f"mlp.experts.{part}", read, chosen)
        yield "mlp.experts.act", self._activated("mlp.experts", expert)
        yield (
            "mlp.experts.down",
            self._by_expert("mlp.experts.down", self.recorded("mlp.experts.act"), chosen),
        )
        down = self.recorded("mlp.experts.down")
        yield "mlp.experts.sum", (down if experts.router.on_input else down * weights[..., None]).sum(2)
        if experts.shared is None:
            return
        yield from self._mlp("mlp.shared", experts.shared.mlp, x)
        shared = self.recorded("mlp.shared.down")
        if experts.shared.gated:
            yield "mlp.shared_gate", self.linear("mlp.shared_gate", x)
            shared = shared / (1 + torch.exp(-self.recorded("mlp.shared_gate")))
        yield "mlp.shared_add", self.recorded("mlp.experts.sum") + shared

    def _by_expert(self, name: str, x: Tensor, chosen: Tensor) -> Tensor:
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        assert weight is not None
        y = einsum("btai,btaoi->btao", x, weight[chosen])
        return y if bias is None else y + bias[chosen]

    def _weights(self, router: Router, chosen: Tensor) -> Tensor:
        """The weights of each token's experts, which have to be those that the rule chooses."""
        logits = self.recorded("mlp.router")
        scores = {
            "softmax": logits.exp() / logits.exp().sum(-1, keepdim=True),
            "sigmoid": 1 / (1 + torch.exp(-logits)),
            "chosen_softmax": logits,
        }[router.score]
        correction = self.weight("mlp.router.correction")
        ranks = scores if correction is None else scores + correction
        weights = torch.empty(*chosen.shape, dtype=torch.float64)
        for b, t in torch.cartesian_prod(*map(torch.arange, chosen.shape[:2])).tolist():
            mine = chosen[b, t].tolist()
            assert set(mine) == set(best(ranks[b, t].tolist(), router, len(mine)))
            weights[b, t] = scores[b, t, mine]
        if router.score == "chosen_softmax":
            weights = weights.exp() / weights.exp().sum(-1, keepdim=True)
        if router.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + router.sum_eps)
        return weights * router.scale


def best(ranks: list[float], router: Router, n: int) -> list[int]:
    """The n experts of the highest rank, of the best groups alone if there are groups."""
    allowed = range(len(ranks))
    if router.groups is not None:
        size = len(ranks) // router.groups.n_groups
        groups = [range(start, start + size) for start in range(0, len(ranks), size)]
        counted = 1 if router.groups.score == "max" else 2

        def worth(group: range) -> float:
            return sum(sorted((ranks[e] for e in group), reverse=True)[:counted])

        kept = sorted(groups, key=worth, reverse=True)[: router.groups.n_active]
        allowed = [e for group in kept for e in group]
    return sorted(allowed, key=lambda e: ranks[e], reverse=True)[:n]
