"""Our own model's steps, recorded while it runs.

The model knows nothing of it. Most steps are modules and seen by a hook on their output; the sums of the
residual stream are what the module after them reads; the attention core is another module for as long as
the recording lasts, which hands the fast core's own result on and computes beside it the scores and
probabilities that a fused kernel never holds. So the logits are those of a run that is not recorded, bit
for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from openbook.ledger import Ledger, OpRow, Workload
from openbook.model import Decoder, ExplicitCore
from openbook.model.attention import Mask
from openbook.model.block import Block
from openbook.model.decoder import Cache
from openbook.model.experts import Choice, Chosen, Experts
from openbook.spec.model import Chunk, ModelSpec
from openbook.trace.schema import Trace, dtype_of

Only = Callable[[str], bool]
"""Says by a step's full name whether to keep it."""


@torch.no_grad()
def record(
    decoder: Decoder,
    ids: Tensor,
    positions: Tensor | None = None,
    cache: Cache | None = None,
    only: Only | None = None,
) -> Trace:
    """Runs `decoder(ids, positions, cache)` and keeps every step, or those for which `only` says so.

    `ids` [B, T] int64. The decoder is left as it was, whatever happens. Scores, masked scores and
    probabilities are the explicit core's, fp32; everything else, and so the logits, is what the model
    computes when nobody looks.
    """
    past = cache.length if cache is not None else 0
    dtype = dtype_of(decoder.embed.weight)
    seen = Recorder(op_rows(decoder.spec, dtype, ids.shape[0], ids.shape[1], past), only)
    watched = _WatchedCache(cache) if cache is not None else None
    with _recording(decoder, seen):
        decoder(ids, positions, watched)
    if positions is None:
        positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None].expand_as(ids)
    keys = watched.keys if watched is not None else {}
    return Trace(
        spec=decoder.spec,
        dtype=dtype,
        ids=ids,
        positions=positions,
        tensors=seen.in_order(),
        axes=seen.axes(),
        keys={
            i: keys.get(block.attn.window, positions).expand(len(ids), -1)
            for i, block in enumerate(decoder.spec.layers)
        },
        choices=seen.choices,
        parameters=dict(decoder.named_parameters(remove_duplicate=False)),
    )


def op_rows(spec: ModelSpec, dtype: str, batch: int, new: int, past: int = 0) -> list[OpRow]:
    """The ledger's steps of such a run: their names, order, axes and shapes are the trace's."""
    return Ledger(spec, dtype).ops(Workload("prefill", batch, new, past, last_only=False))


def axes_of(row: OpRow) -> tuple[str, ...]:
    """The letters of a step's output: 'B T D → B T H·K' gives ("B", "T", "H·K"). Keys that are `read` are
    keys: S."""
    letters = row.letters.rpartition(" → ")[2].split()
    return tuple("S" if letter == "read" else letter for letter in letters)


def shaped(x: Tensor, row: OpRow) -> Tensor:
    """A step's output with the row's axes, where a module holds heads apart and the ledger side by side, or
    the other way round.

    [B, H, T, K] becomes [B, T, H·K] and back; tokens in one row, [B·T, E], become [B, T, E]. What a window's
    cache hands out is shorter than the row says, and has its axes already.
    """
    wanted = row.out_shape
    if x.shape == wanted or x.numel() != math.prod(wanted):
        return x
    if len(wanted) == 4 and axes_of(row)[2] == "T":  # heads apart, found with the tokens first
        B, heads, T, size = wanted
        return x.reshape(B, T, heads, size).transpose(1, 2)
    return (x.transpose(1, 2) if x.ndim == 4 else x).reshape(wanted)


class Recorder:
    """The tensors of one run by step, in the shapes of the ledger's rows. Only those in `wanted` are kept."""

    def __init__(self, rows: Iterable[OpRow], only: Only | None) -> None:
        self.rows = {row.name: row for row in rows}
        self.wanted = {name for name in self.rows if only is None or only(name)}
        self.tensors: dict[str, Tensor] = {}
        self.choices: dict[str, Tensor] = {}

    def keep(self, name: str, x: Tensor) -> None:
        if name in self.wanted:
            self.tensors[name] = shaped(x.detach(), self.rows[name])

    def in_order(self) -> dict[str, Tensor]:
        """What was kept, in the order of the rows."""
        return {name: self.tensors[name] for name in self.rows if name in self.tensors}

    def axes(self) -> dict[str, tuple[str, ...]]:
        """The axes of every row, kept or not."""
        return {name: axes_of(row) for name, row in self.rows.items()}


@contextmanager
def _recording(decoder: Decoder, seen: Recorder) -> Iterator[None]:
    """Hooks and cores that keep what passes, until the end of the block."""
    with ExitStack() as undo:
        hooks = [
            module.register_forward_hook(_keep_output(seen, name))
            for name, module in decoder.named_modules()
            if name in seen.wanted and not isinstance(module, Chosen) and ".experts." not in name
        ]
        hooks.append(decoder.embed_norm.register_forward_pre_hook(_keep_input(seen, "positions")))
        for i, block in enumerate(cast("list[Block]", list(decoder.layers))):
            hooks += _sums(block, f"layers.{i}", seen)
            if isinstance(block.mlp, Experts):
                hooks += _experts(block.mlp, f"layers.{i}.mlp", seen)
            undo.callback(setattr, block.attn, "core", block.attn.core)
            block.attn.core = RecordingCore(block.attn.core, seen, f"layers.{i}")
        for hook in hooks:
            undo.callback(hook.remove)
        yield


def _keep_output(seen: Recorder, name: str) -> Callable[..., None]:
    return lambda module, inputs, output: seen.keep(name, output)


def _keep_input(seen: Recorder, name: str) -> Callable[..., None]:
    return lambda module, inputs: seen.keep(name, inputs[0])


def _sums(block: Block, where: str, seen: Recorder) -> list[Any]:
    """Hooks for the two additions to the residual stream, each of which is the input of the norm after it,
    or of the identity in its place."""
    if block.spec.residual == "serial":
        return [
            block.attn_add_norm.register_forward_pre_hook(_keep_input(seen, f"{where}.attn_add")),
            block.mlp_add_norm.register_forward_pre_hook(_keep_input(seen, f"{where}.mlp_add")),
        ]
    stream: list[Tensor] = []

    def keep_attn_add(module: nn.Module, inputs: Any, attended: Tensor) -> None:
        # A parallel block names no tensor between its two additions: the first one is done once more.
        scale = block.spec.residual_scale
        seen.keep(f"{where}.attn_add", stream.pop() + (attended if scale == 1 else attended * scale))

    return [
        block.register_forward_pre_hook(lambda module, inputs: stream.append(inputs[0])),
        block.attn_out_norm.register_forward_hook(keep_attn_add),
        block.end_norm.register_forward_pre_hook(_keep_input(seen, f"{where}.mlp_add")),
    ]


def _experts(mlp: Experts, where: str, seen: Recorder) -> list[Any]:
    """Hooks for the steps of a mixture. Their rows may come expert by expert, or sorted by expert."""
    order: list[Tensor] = []
    pieces: dict[str, list[Tensor]] = {}

    def keep_choice(module: nn.Module, inputs: Any, choice: Choice) -> None:
        seen.keep(f"{where}.chosen", choice.weights)
        if f"{where}.chosen" in seen.wanted:
            seen.choices[f"{where}.chosen"] = choice.experts
        order[:] = [choice.experts.flatten().argsort()]

    def collect(name: str) -> Callable[..., None]:
        return lambda module, inputs, rows: pieces.setdefault(name, []).append(rows)

    def keep_pieces(module: nn.Module, inputs: Any, output: Tensor) -> None:
        for name, parts in pieces.items():
            rows = torch.cat(parts)
            if rows.ndim == 2:  # [B·T·A, width], sorted by expert
                rows = torch.empty_like(rows).index_copy(0, order[0], rows)
            seen.keep(name, rows)
        pieces.clear()
        seen.keep(f"{where}.experts.sum", output)

    parts = {
        name: part for name, part in mlp.experts.named_children() if f"{where}.experts.{name}" in seen.wanted
    }
    return [
        mlp.chosen.register_forward_hook(keep_choice),
        *(part.register_forward_hook(collect(f"{where}.experts.{name}")) for name, part in parts.items()),
        mlp.experts.register_forward_hook(keep_pieces),
        mlp.register_forward_hook(_keep_output(seen, f"{where}.shared_add")),
    ]


class RecordingCore(ExplicitCore):
    """Keeps scores, masked scores and probabilities, and the result of the core that it stands before."""

    def __init__(self, fast: nn.Module, seen: Recorder, where: str) -> None:
        super().__init__()
        self.fast, self._seen, self._where = fast, seen, where

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self._keep_steps(q, k, mask, scale, softcap, sinks)
        named = {} if sinks is None else {"sinks": sinks}
        mixed = self.fast(q, k, v, mask, scale, softcap, **named)
        self._seen.keep(f"{self._where}.attn.mix", mixed)
        return mixed

    def _keep_steps(
        self, q: Tensor, k: Tensor, mask: Mask, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> None:
        names = {step: f"{self._where}.attn.{step}" for step in ("scores", "masked", "probs")}
        if self._seen.wanted.isdisjoint(names.values()):
            return
        scores = self.scores(q, k, scale, softcap, mask.bias)
        masked = self.masked(scores, mask)
        self._seen.keep(names["scores"], scores)
        self._seen.keep(names["masked"], masked)
        self._seen.keep(names["probs"], self.probs(masked, sinks))


class _WatchedCache:
    """A cache that remembers at which positions the keys of the last pass stood."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.keys: Mapping[int | Chunk | None, Tensor] = {}

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    @property
    def length(self) -> int:
        return self._cache.length

    @property
    def padded(self) -> bool:
        return self._cache.padded

    @property
    def layers(self) -> Any:
        return self._cache.layers

    def extend(self, positions: Tensor, padded: bool) -> Mapping[int | Chunk | None, Tensor]:
        self.keys = self._cache.extend(positions, padded)
        return self.keys
