"""Our own model's steps, recorded while it runs.

The model knows nothing of it. Most steps are modules and seen by a hook on their output; the sums of the
residual stream are what the module after them reads; the attention core is another module for as long as
the recording lasts, which hands the fast core's own result on and computes beside it the scores and
probabilities that a fused kernel never holds. So the logits are those of a run that is not recorded, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from openbook.ledger import OpRow
from openbook.model import Decoder, ExplicitCore
from openbook.model.attention import Mask
from openbook.model.block import Block
from openbook.model.decoder import Cache
from openbook.model.experts import Choice, Chosen, Experts, FeedForwards, One, in_order
from openbook.spec.model import Chunk
from openbook.trace.edits import Edit, Heads, Patch, edited, edits_of
from openbook.trace.names import Only, Selection, selected
from openbook.trace.rows import axes_of, op_rows, shaped, unshaped
from openbook.trace.schema import Trace
from openbook.trace.tensors import Masked, Tensors, dtype_of


@torch.no_grad()
def record(
    decoder: Decoder,
    ids: Tensor,
    positions: Tensor | None = None,
    cache: Cache | None = None,
    only: Selection = None,
    *,
    patch: Patch | None = None,
    ablate: Heads = (),
    time: bool = False,
) -> Trace:
    """Runs `decoder(ids, positions, cache)` and keeps every step, or those that `only` selects.

    `ids` [B, T] int64. The decoder is left as it was, whatever happens. Scores, masked scores and
    probabilities are the explicit core's, fp32; everything else, and so the logits, is what the model
    computes when nobody looks.

    `patch` gives steps a function that makes another tensor of theirs, with which the run goes on; `ablate`
    are query heads, (layer, head), whose part of `attn.mix` is set to zero. With `time` the wall time of
    every step that is a module is measured, and that of the cores of attention.

    Raises `UnknownStepError` for a name that no step has, `RequestError` for an edit that cannot be made.
    """
    past = cache.length if cache is not None else 0
    dtype = dtype_of(decoder.embed.weight)
    batch, new = ids.shape
    rows = {row.name: row for row in op_rows(decoder.spec, dtype, batch, new, past)}
    seen = Recorder(
        rows.values(),
        selected(decoder.spec, only, rows),
        edits_of(decoder.spec, rows, patch, ablate),
        Clock(ids.device) if time else None,
    )
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
        past=past,
        seconds=seen.clock.seconds if seen.clock else {},
        edited=frozenset(seen.edits),
    )


class Clock:
    """Adds up the wall time between the beginning and the end of each step, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._since: dict[str, float] = {}

    def begin(self, name: str) -> None:
        self._since[name] = self._now()

    def end(self, name: str) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - self._since.pop(name)

    def _now(self) -> float:
        if self._device.type == "cuda":  # which is asked to compute, and then goes on by itself
            torch.cuda.synchronize(self._device)
        return perf_counter()


class Recorder:
    """The tensors of one run by step, in the shapes of the ledger's rows. Only those in `wanted` are kept;
    something has to be done for those in `watched`."""

    def __init__(
        self,
        rows: Iterable[OpRow],
        only: Only | None,
        edits: Mapping[str, Edit] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.rows = {row.name: row for row in rows}
        self.wanted = {name for name in self.rows if only is None or only(name)}
        self.edits = edits or {}
        self.watched = self.wanted | self.edits.keys()
        self.clock = clock
        self.tensors: dict[str, Tensor] = {}
        self.masked: dict[str, Masked] = {}
        self.choices: dict[str, Tensor] = {}
        self._triangles: dict[tuple[int, int], Tensor] = {}

    def keep(self, name: str, x: Tensor) -> Tensor:
        """Keeps the step's output; returns it, or what it has been edited to, arranged as it came."""
        if name in self.edits:
            row = self.rows[name]
            x = unshaped(edited(name, self.edits[name], shaped(x, row)), x, row)
        if name in self.wanted:
            self.tensors[name] = shaped(x.detach(), self.rows[name])
        return x

    def visible(self, mask: Mask, scores: Tensor) -> Tensor:
        """Which keys the queries of [B, H, T, S] scores see: [B or 1, 1, T, S] bool. A triangle that many
        layers share is made once."""
        if mask.visible is not None:
            return mask.visible
        T, S = scores.shape[-2:]
        if (T, S) not in self._triangles:
            everything = torch.ones(1, 1, T, S, dtype=torch.bool, device=scores.device)
            self._triangles[T, S] = everything.tril(S - T)
        return self._triangles[T, S]

    def in_order(self) -> Tensors:
        """What was kept, in the order of the rows."""
        kept = self.tensors | self.masked
        return Tensors({name: kept[name] for name in self.rows if name in kept})

    def axes(self) -> dict[str, tuple[str, ...]]:
        """The axes of every row, kept or not."""
        return {name: axes_of(row) for name, row in self.rows.items()}


@contextmanager
def _recording(decoder: Decoder, seen: Recorder) -> Iterator[None]:
    """Hooks and cores that keep what passes, until the end of the block."""
    with ExitStack() as undo:
        hooks = []
        for name, module in decoder.named_modules():
            if name in seen.watched and not _is_seen_otherwise(name, module):
                hooks += [*_timed(seen, name, module), module.register_forward_hook(_keep_output(seen, name))]
        hooks.append(decoder.embed_norm.register_forward_pre_hook(_keep_input(seen, "positions")))
        for i, block in enumerate(cast("list[Block]", list(decoder.layers))):
            hooks += _sums(block, f"layers.{i}", seen)
            if isinstance(block.mlp, Experts):
                hooks += _experts(block.mlp, f"layers.{i}.mlp", seen, undo)
            undo.callback(setattr, block.attn, "core", block.attn.core)
            block.attn.core = RecordingCore(block.attn.core, seen, f"layers.{i}.attn")
        for hook in hooks:
            undo.callback(hook.remove)
        yield


def _is_seen_otherwise(name: str, module: nn.Module) -> bool:
    """A step that is not simply what its module returns."""
    return name == "positions" or isinstance(module, Chosen) or ".experts." in name


def _timed(seen: Recorder, name: str, module: nn.Module) -> list[Any]:
    """Hooks that measure the module. That of the end comes before any that keeps its output."""
    clock = seen.clock
    if clock is None or next(module.children(), None) is not None:
        return []
    return [
        module.register_forward_pre_hook(lambda module, inputs: clock.begin(name)),
        module.register_forward_hook(lambda module, inputs, output: clock.end(name)),
    ]


def _keep_output(seen: Recorder, name: str) -> Callable[..., Any]:
    return lambda module, inputs, output: seen.keep(name, output)


def _keep_input(seen: Recorder, name: str) -> Callable[..., Any]:
    return lambda module, inputs: (seen.keep(name, inputs[0]), *inputs[1:])


def _sums(block: Block, where: str, seen: Recorder) -> list[Any]:
    """Hooks for the two additions to the residual stream, each of which is the input of the norm after it,
    or of the identity in its place."""
    if block.spec.residual == "serial":
        return [
            block.attn_add_norm.register_forward_pre_hook(_keep_input(seen, f"{where}.attn_add")),
            block.mlp_add_norm.register_forward_pre_hook(_keep_input(seen, f"{where}.mlp_add")),
        ]
    return _parallel_sums(block, where, seen)


def _parallel_sums(block: Block, where: str, seen: Recorder) -> list[Any]:
    """A parallel block names no tensor between its two additions: the first one is done once more, and if
    it is edited, the second too."""
    scale, name = block.spec.residual_scale, f"{where}.attn_add"
    passing: dict[str, Tensor] = {}

    def add(x: Tensor, more: Tensor) -> Tensor:
        return x + (more if scale == 1 else more * scale)

    def keep_stream(module: nn.Module, inputs: Any) -> None:
        passing["stream"] = inputs[0]

    def keep_attn_add(module: nn.Module, inputs: Any, attended: Tensor) -> None:
        passing["attn_add"] = seen.keep(name, add(passing["stream"], attended))

    def keep_mlp(module: nn.Module, inputs: Any, output: Tensor) -> None:
        passing["mlp"] = output

    def keep_mlp_add(module: nn.Module, inputs: Any) -> tuple[Any, ...]:
        total = add(passing["attn_add"], passing["mlp"]) if name in seen.edits else inputs[0]
        passing.clear()
        return (seen.keep(f"{where}.mlp_add", total),)

    return [
        block.register_forward_pre_hook(keep_stream),
        block.attn_out_norm.register_forward_hook(keep_attn_add),
        block.mlp_out_norm.register_forward_hook(keep_mlp),
        block.end_norm.register_forward_pre_hook(keep_mlp_add),
    ]


def _experts(mlp: Experts, where: str, seen: Recorder, undo: ExitStack) -> list[Any]:
    """Hooks for the steps of a mixture. Their rows may come expert by expert, or sorted by expert; they come
    sorted, all at once, where one of them is edited."""
    order: list[Tensor] = []
    pieces: dict[str, list[Tensor]] = {}
    parts = {f"{where}.experts.{name}": part for name, part in mlp.experts.named_children()}
    parts = {name: part for name, part in parts.items() if name in seen.watched}
    if not seen.edits.keys().isdisjoint(parts):
        undo.callback(setattr, mlp.experts, "way", mlp.experts.way)
        mlp.experts.way = _sorted_way

    def keep_choice(module: nn.Module, inputs: Any, choice: Choice) -> Choice:
        weights = seen.keep(f"{where}.chosen", choice.weights)
        if f"{where}.chosen" in seen.wanted:
            seen.choices[f"{where}.chosen"] = choice.experts
        order[:] = [choice.experts.flatten().argsort()]
        return Choice(weights, choice.experts)

    def unsorted(rows: Tensor) -> Tensor:
        return torch.empty_like(rows).index_copy(0, order[0], rows)

    def collect(name: str) -> Callable[..., Any]:
        def keep(module: nn.Module, inputs: Any, rows: Tensor) -> Tensor | None:
            if name in seen.edits:
                return seen.keep(name, unsorted(rows))[order[0]]
            pieces.setdefault(name, []).append(rows)
            return None

        return keep

    def keep_pieces(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        for name, found in pieces.items():
            rows = torch.cat(found)
            seen.keep(name, unsorted(rows) if rows.ndim == 2 else rows)  # 2: [B·T·A, width], by expert
        pieces.clear()
        return seen.keep(f"{where}.experts.sum", output)

    return [
        mlp.chosen.register_forward_hook(keep_choice),
        *(hook for name, part in parts.items() for hook in _timed(seen, name, part)),
        *(part.register_forward_hook(collect(name)) for name, part in parts.items()),
        mlp.experts.register_forward_hook(keep_pieces),
        mlp.register_forward_hook(_keep_output(seen, f"{where}.shared_add")),
    ]


class _Split(NamedTuple):
    """Rows in the order of their experts, multiplied expert by expert; but handed on together."""

    experts: Tensor

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        hit, counts = self.experts.unique_consecutive(return_counts=True)
        runs = zip(hit.tolist(), x.split(counts.tolist()), strict=True)
        return torch.cat([One(expert).linear(rows, weight, bias) for expert, rows in runs])


def _sorted_way(feed: FeedForwards, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    return in_order(feed, x, weights, experts, _Split)


class RecordingCore(ExplicitCore):
    """Keeps scores, masked scores and probabilities, and the result of the core that it stands before.

    Where one of the three is edited the result follows from what is edited, and so from the explicit steps.
    """

    def __init__(self, fast: nn.Module, seen: Recorder, where: str) -> None:
        super().__init__()
        self.fast, self._seen = fast, seen
        self._names = {step: f"{where}.{step}" for step in ("scores", "masked", "probs", "mix")}

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
        seen, (*steps, mix) = self._seen, self._names.values()
        probs = None
        if not seen.watched.isdisjoint(steps):
            probs = self._probs(q, k, mask, scale, softcap, sinks)
        with self._clocked("mix"):
            if probs is not None and not seen.edits.keys().isdisjoint(steps):
                mixed = self.mix(probs, v)
            else:
                named = {} if sinks is None else {"sinks": sinks}
                mixed = self.fast(q, k, v, mask, scale, softcap, **named)
        return seen.keep(mix, mixed)

    def _probs(
        self, q: Tensor, k: Tensor, mask: Mask, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """The steps up to the probabilities, each kept."""
        with self._clocked("scores"):
            scores = self.scores(q, k, scale, softcap, mask.bias)
        scores = self._seen.keep(self._names["scores"], scores)
        with self._clocked("masked"):
            masked = self.masked(scores, mask)
        masked = self._keep_masked(scores, masked, mask)
        with self._clocked("probs"):
            probs = self.probs(masked, sinks)
        return self._seen.keep(self._names["probs"], probs)

    def _keep_masked(self, scores: Tensor, masked: Tensor, mask: Mask) -> Tensor:
        """Where the scores are kept, no more than who sees whom is kept of the masked ones."""
        seen, name = self._seen, self._names["masked"]
        if name in seen.edits or self._names["scores"] not in seen.wanted:
            return seen.keep(name, masked)
        if name in seen.wanted:
            seen.masked[name] = Masked(scores, seen.visible(mask, scores))
        return masked

    @contextmanager
    def _clocked(self, step: str) -> Iterator[None]:
        clock, name = self._seen.clock, self._names[step]
        if clock is None or name not in self._seen.watched:
            yield
            return
        clock.begin(name)
        yield
        clock.end(name)


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
