"""Metadata → spec: one reader for all architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from openbook.spec.gguf.architecture import PRE, Architecture, Residual, alibi
from openbook.spec.gguf.experts import ExpertsReader
from openbook.spec.gguf.rope import read_number, read_rope, shortest, sliding_rope, yarn_mscale
from openbook.spec.gguf.shown import Shown, has_bias, vocabulary_size
from openbook.spec.model import (
    MAX_LAYERS,
    Alibi,
    Attention,
    Block,
    Chunk,
    Experts,
    Head,
    HeadNorm,
    LatentAttention,
    Learned,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
)
from openbook.spec.reader import Reader, UnsupportedError


def read_spec(arch: Architecture, c: Reader, metadata: Mapping[str, Any], shown: Shown) -> ModelSpec:
    """The spec of any architecture; `c` has its own keys, without their prefix."""
    n_layers = c.integer("block_count", most=MAX_LAYERS)
    n_layers -= c.maybe_integer("nextn_predict_layers", least=0, most=n_layers - 1) or 0
    d_model = c.integer("embedding_length")
    max_positions = c.integer("context_length")
    norm = replace(arch.norm, eps=shortest(c.number(arch.norm_key)))

    layers = _Layers(arch, c, shown, d_model, max_positions, norm, n_layers)
    return ModelSpec(
        vocab_size=vocabulary_size(c, metadata, shown),
        d_model=d_model,
        max_positions=max_positions,
        layers=layers.read(),
        head=_read_head(arch, c, shown),
        final_norm=norm,
        positions=Learned(max_positions) if arch.positions == "learned" else None,
        embed_scale=d_model**0.5 if arch.embed_scaled else _read_factor(arch, c, "embedding_scale"),
        embed_norm=norm if arch.embed_normed else None,
        name=_read_name(metadata),
    )


def _read_head(arch: Architecture, c: Reader, shown: Shown) -> Head:
    tied = arch.tied or "output.weight" not in shown.outside
    scale = _read_factor(arch, c, "logit_scale")
    return Head(
        tied=tied,
        bias=arch.head_bias or "output.bias" in shown.outside,
        scale=1.0 / scale if arch.logit_scale_divides else scale,
        softcap=_read_cap(arch, c, "final_logit_softcapping", arch.final_softcap),
    )


def _read_factor(arch: Architecture, c: Reader, key: str) -> float:
    """A multiplier that some architectures have; llama.cpp takes 0 for none."""
    return _read_optional(arch, c, key) or 1.0


def _read_optional(arch: Architecture, c: Reader, key: str) -> float:
    """The number of a key that only some architectures have; 0 without it."""
    return read_number(c, key, 0.0, positive=False) if key in arch.keys else 0.0


def _read_cap(arch: Architecture, c: Reader, key: str, default: float | None) -> float | None:
    if key not in arch.keys:
        return None
    cap = c.maybe_number(key)
    return default if cap is None else shortest(cap) or None


def _read_name(metadata: Mapping[str, Any]) -> str:
    """`general.name`, fit to be printed: it is text from outside."""
    name = metadata.get("general.name")
    return "".join(filter(str.isprintable, name))[:120] if isinstance(name, str) else ""


# --- layers -------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """Everything by which one layer may differ from another: equal kinds are one and the same block."""

    n_heads: int
    n_kv_heads: int
    d_ff: int
    slides: bool
    turns: bool
    has_experts: bool
    shown: frozenset[str]


@dataclass(frozen=True)
class _Layers:
    arch: Architecture
    c: Reader
    shown: Shown
    d_model: int
    max_positions: int
    norm: Norm
    n_layers: int

    def read(self) -> tuple[Block, ...]:
        c, n_layers = self.c, self.n_layers
        heads = _per_layer(c, "attention.head_count", n_layers)
        kv_heads = _per_layer(c, "attention.head_count_kv", n_layers, heads)
        experts = ExpertsReader(self.arch, c)
        with_experts = experts.layers(n_layers)
        d_ffs = _per_layer(c, "feed_forward_length", n_layers, [1] * n_layers if all(with_experts) else None)
        head_dim = _read_head_dim(self.arch, c, self.d_model, heads)
        window, slides = _read_windows(self.arch, c, n_layers)
        rope = sliding = None
        if self.arch.positions == "rotary":
            turned = c.integer("rope.dimension_count") if self.arch.latent else head_dim
            rope = read_rope(self.arch, c, turned, self.max_positions, self.shown)
            sliding = sliding_rope(self.arch, c, rope)

        blocks: dict[_Kind, Block] = {}
        layers: list[Block] = []
        for i in range(n_layers):
            turns = self._turns(i, slides)
            kind = _Kind(
                heads[i], kv_heads[i], d_ffs[i], slides[i], turns, with_experts[i], self.shown.of_layer(i)
            )
            if kind not in blocks:
                own = (sliding if kind.slides else rope) if turns else None
                attn = self._attention(kind, head_dim, own, window if kind.slides else None)
                mlp = experts.read(kind.shown) if kind.has_experts else self._mlp(kind)
                blocks[kind] = self._block(kind, attn, mlp)
            layers.append(blocks[kind])
        return tuple(layers)

    def _turns(self, layer: int, slides: list[bool]) -> bool:
        """Whether a layer's queries and keys are rotated."""
        every = self.arch.still_every
        if every and (self.arch.windows.chunk is None or any(slides)) and (layer + 1) % every == 0:
            return False
        return self.arch.windows.full_rope or slides[layer] or not any(slides)

    def _block(self, kind: _Kind, attn: Attention | LatentAttention, mlp: Mlp | Experts) -> Block:
        residual, places = _read_residual(self.arch, self.c, kind.shown)
        return Block(
            attn=attn,
            mlp=mlp,
            residual=residual,
            residual_scale=_read_factor(self.arch, self.c, "residual_scale"),
            **dict.fromkeys(places, self.norm),
        )

    def _mlp(self, kind: _Kind) -> Mlp:
        return Mlp(
            kind.d_ff,
            self.arch.activation,
            self.arch.gated,
            up_bias=self._has_bias(kind, "up"),
            down_bias=self._has_bias(kind, "down"),
        )

    def _has_bias(self, kind: _Kind, part: str) -> bool:
        return part in self.arch.biases or (part in self.arch.may_bias and has_bias(kind.shown, part))

    def _attention(
        self, kind: _Kind, head_dim: int, rope: Rope | None, window: int | Chunk | None
    ) -> Attention | LatentAttention:
        arch, c = self.arch, self.c
        if arch.latent:
            return self._latent_attention(kind, rope)
        if kind.n_heads % kind.n_kv_heads:
            c.fail(
                "attention.head_count_kv",
                f"must divide attention.head_count = {kind.n_heads}, found {kind.n_kv_heads}",
            )
        head_norm = self._head_norm(kind)
        return Attention(
            n_heads=kind.n_heads,
            n_kv_heads=kind.n_kv_heads,
            head_dim=head_dim,
            scale=_read_optional(arch, c, "attention.scale") or arch.scale(c, kind.n_heads, head_dim),
            rope=rope,
            q_norm=head_norm,
            k_norm=head_norm,
            window=window,
            softcap=_read_cap(arch, c, "attn_logit_softcapping", arch.attn_softcap),
            alibi=_read_alibi(arch, c, kind.n_heads),
            sinks=arch.sinks,
            clip_qkv=_read_optional(arch, c, "attention.clamp_kqv") or None,
            temperature=arch.temperature if rope is None else None,
            **{f"{part}_bias": self._has_bias(kind, part) for part in "qkvo"},
        )

    def _head_norm(self, kind: _Kind) -> HeadNorm | None:
        qk_norm = self.arch.qk_norm
        if qk_norm is None or (self.arch.qk_norm_shown and "attn_q_norm.weight" not in kind.shown):
            return None
        if not qk_norm.weight and (
            not kind.turns or self.c.maybe_integer("expert_count") == _UNNORMED_EXPERTS
        ):
            return None
        return replace(qk_norm, eps=self.norm.eps)

    def _latent_attention(self, kind: _Kind, rope: Rope | None) -> LatentAttention:
        """The head sizes under "mla"; a file from before llama.cpp attended in the latent space has them
        under the usual keys."""
        c = self.c
        rope_dim = c.integer("rope.dimension_count")
        kv_rank, q_rank = c.integer("attention.kv_lora_rank"), c.maybe_integer("attention.q_lora_rank")
        key = c.maybe_integer("attention.key_length_mla") or c.integer("attention.key_length")
        value = c.maybe_integer("attention.value_length_mla") or c.integer("attention.value_length")
        c.ignore(("attention.key_length", "attention.value_length"))
        if key <= rope_dim:
            c.fail("attention.key_length_mla", f"must exceed rope.dimension_count = {rope_dim}, found {key}")
        tenth = read_number(c, "rope.scaling.yarn_log_multiplier", 0.0, positive=False)
        multiplier = float(f"{10 * tenth:.9g}")
        mscale = yarn_mscale(read_number(c, "rope.scaling.factor", 1.0, positive=False), multiplier)
        norm = replace(self.norm, eps=_LATENT_EPS)
        return LatentAttention(
            n_heads=kind.n_heads,
            nope_dim=key - rope_dim,
            rope_dim=rope_dim,
            v_dim=value,
            kv_rank=kv_rank,
            kv_norm=norm,
            scale=key**-0.5 * mscale * mscale,
            q_rank=q_rank,
            q_norm=norm if q_rank else None,
            rope=rope,
        )


_LATENT_EPS = 1e-6
"""Of the norms within latent attention, whatever the others' is; llama.cpp has the others' there too."""

_UNNORMED_EXPERTS = 128
"""llama.cpp leaves out the weightless norm of q and k in the model with this many experts."""


def _per_layer(c: Reader, key: str, n_layers: int, default: list[int] | None = None) -> list[int]:
    """A number for all layers, or a list with one for each."""
    value = c.raw(key)
    if value is None and default is not None:
        return default
    if isinstance(value, list):
        return c.items(key, n_layers, _is_size, "integers above 0")
    return [c.integer(key)] * n_layers


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _read_residual(arch: Architecture, c: Reader, shown: frozenset[str]) -> tuple[Residual, tuple[str, ...]]:
    """How a block adds, and where its norms are."""
    match arch.choose_residual:
        case "by_key":
            return ("parallel" if c.maybe_flag("use_parallel_residual") else "serial"), PRE
        case "by_second_norm":
            two = "attn_norm_2.weight" in shown
            return ("parallel", PRE) if two else ("parallel_shared", ("attn_norm",))
        case "by_mlp_norm":
            serial = "ffn_norm.weight" in shown
            return ("serial", PRE) if serial else ("parallel_shared", ("attn_norm",))
    return arch.residual, arch.places


def _read_head_dim(arch: Architecture, c: Reader, d_model: int, heads: list[int]) -> int:
    if arch.latent:
        return 0
    head_dim, value_dim = c.maybe_integer("attention.key_length"), c.maybe_integer("attention.value_length")
    if head_dim is None:
        if len(set(heads)) > 1 or d_model % heads[0]:
            c.fail(
                "attention.key_length",
                f"is needed where embedding_length = {d_model} is not heads × head size",
            )
        head_dim = d_model // heads[0]
    if value_dim not in (None, head_dim):
        c.fail(
            "attention.value_length",
            f"must equal key_length = {head_dim}, found {value_dim}",
            UnsupportedError,
        )
    return head_dim


def _read_windows(arch: Architecture, c: Reader, n_layers: int) -> tuple[int | Chunk | None, list[bool]]:
    """The window, and the layers that slide: those that the file lists, or the architecture's."""
    key = "attention.sliding_window"
    stated = c.maybe_integer(key, least=0)
    chunk = arch.windows.chunk
    window = stated if stated is not None else arch.windows.width
    if chunk is not None:
        window = None if stated == 0 else Chunk(chunk)
    slides = slides_by_pattern(arch, c, n_layers)
    return window or None, slides if window else [False] * n_layers


def slides_by_pattern(arch: Architecture, c: Reader, n_layers: int) -> list[bool]:
    """True for each layer that slides, from a list, or from n where every n-th layer does not."""
    key = "attention.sliding_window_pattern"
    if isinstance(c.raw(key), list):
        return c.items(key, n_layers, _is_flag, "true or false")
    every = c.maybe_integer(key, least=0) if key in c else arch.windows.full_every
    return usual_pattern(every, n_layers)


def usual_pattern(full_every: int | None, n_layers: int) -> list[bool]:
    return [not full_every or i % full_every < full_every - 1 for i in range(n_layers)]


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _read_alibi(arch: Architecture, c: Reader, n_heads: int) -> Alibi | None:
    key = "attention.max_alibi_bias"
    if arch.positions != "alibi":
        return None
    if n_heads > MAX_ALIBI_HEADS:
        c.fail("attention.head_count", f"must be at most {MAX_ALIBI_HEADS:,}, each having a slope of ALiBi")
    if key not in arch.keys:
        return alibi(n_heads, 8.0, base_first=True)
    return alibi(n_heads, shortest(c.number(key, positive=True)))


MAX_ALIBI_HEADS = 65_536
