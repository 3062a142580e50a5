"""What happens inside a module that is not ours, seen through the torch functions that it calls.

An attention, however it is written, multiplies queries with keys, makes scores of the product, masks them,
and takes a softmax. So the last product of two matrices before the softmax has the rotated queries and keys;
what keeps its shape from there on are scores; the first of them with hugely negative numbers is masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from openbook.spec.model import Attention, HeadNorm, LatentAttention
from openbook.trace.record import Recorder

_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm"}
_CLAMPS = {"clamp", "clamp_", "clip", "clip_"}


@dataclass
class _Attention:
    """The attention that runs: which of ours it is, and what of it has been seen.

    `outputs` says which outputs of a fused projection are queries, keys and values. `q`, `k` are the factors
    of the last product, `scores` that product and whatever has been made of it since.
    """

    where: str
    spec: Attention | LatentAttention
    outputs: Mapping[str, Tensor | None]
    q: Tensor | None = None
    k: Tensor | None = None
    scores: list[Tensor] | None = None


class Watch(TorchFunctionMode):
    """Sees every call of a torch function while an attention or a router runs."""

    def __init__(self, seen: Recorder) -> None:
        super().__init__()
        self._seen = seen
        self._attention: _Attention | None = None
        self._router = ""

    def attention(
        self, where: str, spec: Attention | LatentAttention, outputs: Mapping[str, Tensor | None]
    ) -> Callable[..., None]:
        """A hook for the beginning of the attention of the layer `where`."""

        def begin(module: nn.Module, inputs: Any) -> None:
            self._attention = _Attention(where, spec, outputs)

        return begin

    def router(self, where: str) -> Callable[..., None]:
        """A hook for the beginning of the router of the layer `where`."""

        def begin(module: nn.Module, inputs: Any) -> None:
            self._router = f"{where}.mlp.router"

        return begin

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A hook for the end of either."""
        self._attention, self._router = None, ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if isinstance(out, Tensor) and out.is_floating_point():
            if self._attention is not None:
                given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
                self._see(self._attention, name, given, out)
            elif self._router and name == "linear":  # what comes after it are no logits
                self._seen.keep(self._router, out)
                self._router = ""
        return out

    def _see(self, now: _Attention, name: str, given: list[Tensor], out: Tensor) -> None:
        if name in _PRODUCTS:
            now.q, now.k, now.scores = given[-2], given[-1].mT, [out.clone()]
        elif now.scores is None:
            if name in _CLAMPS:
                self._keep_clipped(now, out)
        elif name == "softmax":
            self._keep_scores(now, now.scores, out)
            self._keep_rotated(now)
            self._attention = None
        elif out.numel() == now.scores[-1].numel() and out.shape[-2:] == now.scores[-1].shape[-2:]:
            now.scores.append(out.clone())

    def _keep_clipped(self, now: _Attention, out: Tensor) -> None:
        """Queries, keys or values after the clip, in place of those before it that they are made from."""
        for part, rows in now.outputs.items():
            name = f"{now.where}.attn.{part}"
            before = self._seen.tensors.get(name)
            after = out if rows is None or out.shape[-1] <= int(rows.max()) else out[..., rows]
            if before is not None and after.numel() == before.numel():
                limit = float(after.abs().max())
                if torch.equal(after.reshape(before.shape), before.clamp(-limit, limit)):
                    self._seen.keep(name, after)

    def _keep_scores(self, now: _Attention, made: list[Tensor], probs: Tensor) -> None:
        seen, attn = self._seen, f"{now.where}.attn"
        shape = seen.rows[f"{attn}.scores"].out_shape
        if made[-1].numel() != math.prod(shape):
            return
        steps = [x.reshape(shape).float() for x in made]
        hidden = [(x <= torch.finfo(x.dtype).min / 2).reshape(shape) for x in made]
        at = next((i for i, cells in enumerate(hidden) if cells.any()), len(steps) - 1)
        scores, masked = steps[max(at - 1, 0)] if hidden[at].any() else steps[at], steps[at]
        if isinstance(now.spec, Attention) and now.spec.alibi is not None:
            shift = _shift(scores, now, now.spec.scale)
            scores, masked = scores - shift, masked - shift
        seen.keep(f"{attn}.scores", scores)
        seen.keep(f"{attn}.masked", masked.masked_fill(hidden[at], -torch.inf))
        seen.keep(f"{attn}.probs", probs[..., : shape[-1]].reshape(shape).float())  # a sink's is the last

    # --- rotated queries and keys ---

    def _keep_rotated(self, now: _Attention) -> None:
        """The factors of the product are what the last step before it has given."""
        attn, q, k = now.spec, now.q, now.k
        if q is None or k is None:
            return
        B, _, T, _ = self._seen.rows[f"{now.where}.attn.scores"].out_shape
        q, k = (x.reshape(B, -1, T, x.shape[-1]) for x in (q, k))
        if isinstance(attn, LatentAttention):
            if attn.rope is not None:
                self._keep_turned(now, "q_rope", q, "q" if attn.q_rank is None else "q_up")
                self._keep_turned(now, "k_rope", k[:, :1], "kv_down")
            return
        k = k[:, :: max(k.shape[1] // attn.n_kv_heads, 1)]
        for part, x, norm in (("q", q, attn.q_norm), ("k", k, attn.k_norm)):
            if part == "q" and attn.temperature is not None:
                self._seen.keep(f"{now.where}.attn.temperature", x)
            elif isinstance(norm, HeadNorm) and norm.after_rope:
                self._seen.keep(f"{now.where}.attn.{part}_norm", x)
            elif attn.rope is not None:
                self._seen.keep(f"{now.where}.attn.{part}_rope", x)

    def _keep_turned(self, now: _Attention, name: str, heads: Tensor, source: str) -> None:
        """The rotated part of [B, heads, T, N + R], its elements in the order of the projection's.

        A program may lay the pairs' first elements before the second while it rotates, which the product
        of queries and keys does not see. The first token shows it: its angle is 0.
        """
        size = now.spec.rope_dim if isinstance(now.spec, LatentAttention) else 0
        turned = heads[..., -size:]
        before = self._seen.tensors.get(f"{now.where}.attn.{source}")
        if before is not None:
            first = before[:, 0].unflatten(-1, (turned.shape[1], -1))[..., -size:]
            halves = torch.cat((first[..., 0::2], first[..., 1::2]), -1)
            if _apart(halves, turned[:, :, 0]) < min(1e-3, 0.1 * _apart(first, turned[:, :, 0])):
                turned = torch.stack(turned.chunk(2, -1), -1).flatten(-2)
        self._seen.keep(f"{now.where}.attn.{name}", turned)


def _apart(x: Tensor, y: Tensor) -> float:
    """How far the directions of two vectors are apart: a rotation may change the length as well."""
    x, y = x.double().flatten(), y.double().flatten()
    return float((x / x.norm() - y / y.norm()).norm())


def _shift(scores: Tensor, now: _Attention, scale: float) -> Tensor | float:
    """What ALiBi adds at a query's own key: 0 by our count from the query, else by one from the first token.
    The softmax does not see a number that is added to a whole row."""
    if now.q is None or now.k is None:
        return 0.0
    own = (now.q * now.k).sum(-1).float() * scale
    return (scores.diagonal(dim1=-2, dim2=-1) - own.reshape(scores.shape[:-1]))[..., None]
