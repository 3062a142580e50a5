"""Attention of a whole prompt in C: a core to stand in for `FusedCore`."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from openbook.model.attention import FusedCore, Mask
from openbook.native.build import library
from openbook.native.lower import ATTEND_ROWS, DTYPES, PACK, Op
from openbook.native.step import Step, run

TILE, QUERIES = 32, 8
"""As in runner.c: keys in a tile, queries at a time."""

LEAST_QUERIES, MOST_KEYS = 16, 16_384
"""Fewer queries are not worth packing the keys for; more keys do not fit a worker's stack."""


class NativeCore(FusedCore):
    """Causal attention of many queries without gradient, fp32 or bf16; anything else is `FusedCore`'s.

    Scores and softmax are fp32. In bf16 the products multiply bf16 pairs and add in fp32, as PyTorch's
    own kernel does.
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
        if not (mask.causal and softcap is None and _suits(q, k, v)):
            return super().forward(q, k, v, mask, scale, softcap)
        B, H, T, K = q.shape
        y = torch.empty(B, T, H, K, dtype=q.dtype)
        for row in range(B):
            _attend(q[row], k[row], v[row], y[row], scale)
        return y.transpose(1, 2)


def _suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        q.shape[2] >= LEAST_QUERIES
        and k.shape[2] <= MOST_KEYS
        and q.shape[3] % 16 == 0
        and q.device.type == "cpu"
        and q.dtype in DTYPES
        and q.dtype == k.dtype == v.dtype
        and not torch.is_grad_enabled()
        and all(x.stride(3) == 1 for x in (q, k, v))
        and k.stride() == v.stride()
        and k.stride(2) == k.shape[3]
    )


def _attend(
    q: Float[Tensor, "H T K"],
    k: Float[Tensor, "G S K"],
    v: Float[Tensor, "G S K"],
    y: Float[Tensor, "T H K"],
    scale: float,
) -> None:
    (H, T, K), (G, S, _) = q.shape, k.shape
    tiles = -(-S // TILE)
    packed = torch.empty(G * tiles * 2 * TILE * K, dtype=q.dtype)
    shared = {"dtype": DTYPES[q.dtype], "width": K, "rows": T, "keys": S, "barrier": 1}
    ops = (Op * 2)(
        Op(
            code=PACK, n=G * tiles, kv_head=k.stride(0),
            weight=k.data_ptr(), bias=v.data_ptr(), dst=packed.data_ptr(), **shared,
        ),
        Op(
            code=ATTEND_ROWS, n=H * -(-T // QUERIES), layer=H, group=H // G, scale=scale,
            a_row=q.stride(1), a_head=q.stride(0),
            weight=packed.data_ptr(), a=q.data_ptr(), dst=y.data_ptr(), **shared,
        ),
    )  # fmt: skip
    run(library(), ops, 0, Step())
