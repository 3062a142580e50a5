"""Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): W x becomes W x + scale · B A x, and of all the
model only A and B are trained.

The matrix keeps its name, `layers.3.attn.q.weight`; beside it lie `layers.3.attn.q.lora_a` [rank, in] and
`layers.3.attn.q.lora_b` [out, rank]. B begins as zero, so that the model begins as it was.

Folders are those of Hugging Face's peft: adapter_config.json and adapter_model.safetensors, under the names
that transformers' modules have. Where transformers keeps several of our matrices in one (GPT-2's c_attn), our
adapters of them are one there of their ranks together, whose B is zero outside each part's own block.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from openbook.files.errors import FileError
from openbook.files.regular import open_regular
from openbook.files.safetensors import SafetensorsFiles, open_safetensors, refuse_pickles
from openbook.files.strict_json import kind_of, parse_object
from openbook.ledger import TensorRow, ledger
from openbook.ledger.tensors import nbytes
from openbook.model.attention import Clipped
from openbook.model.decoder import Decoder
from openbook.model.init import generator_of
from openbook.spec.hf import to_config
from openbook.spec.model import Experts, ModelSpec
from openbook.spec.reader import UnsupportedError
from openbook.train.layers import add_product, multiply
from openbook.weights.dialects import HF, Dialect, Grouped, Identity, Place, Transposed
from openbook.weights.save import stored_places
from openbook.weights.tensors import is_finite

DEFAULT_TARGETS = ("layers.*.attn.*", "layers.*.mlp.*")
"""All matrices of attention and feed-forward that can be adapted."""

NOT_ADAPTED = {
    "mlp.router": "it decides who computes, in fp32",
    "mlp.experts.*": "experts lie in stacks of matrices",
    "attn.kv_up": "latent attention also multiplies queries and results by this matrix itself",
}
"""Matrices of a layer that no pattern selects, and why."""


class LoraError(ValueError):
    """Targets, a rank or an alpha that make no adapters."""


# --- which matrices, by the ledger ----------------------------------------------------------------


def lora_targets(spec: ModelSpec, targets: Sequence[str] = DEFAULT_TARGETS) -> list[TensorRow]:
    """The ledger's rows of the matrices whose modules the patterns name, in the order of a forward pass.

    A pattern is a module's name in which * stands for anything: "layers.*.attn.q", "layers.0.mlp.*". It
    selects matrices of the layers, except those of `NOT_ADAPTED`. Raises `LoraError` for one that selects
    none.
    """
    if isinstance(targets, str) or not targets:
        raise LoraError(f"targets must be a list of patterns such as layers.*.attn.q, found {targets!r}")
    matrices = _matrices(spec)
    possible = {name: row for name, row in matrices.items() if not _why_not(row)}
    chosen: set[str] = set()
    for pattern in targets:
        names = {name for name in possible if fnmatchcase(name, pattern)}
        if not names:
            raise LoraError(_selects_nothing(pattern, matrices, possible))
        chosen |= names
    return [row for name, row in possible.items() if name in chosen]


def _matrices(spec: ModelSpec) -> dict[str, TensorRow]:
    """All matrices of the layers, by their modules' names."""
    rows = ledger(spec).tensors
    return {_module(row.name): row for row in rows if row.kind == "matrix" and row.layer is not None}


def _why_not(row: TensorRow) -> str | None:
    below = _module(row.name).removeprefix(f"layers.{row.layer}.")
    return next((why for pattern, why in NOT_ADAPTED.items() if fnmatchcase(below, pattern)), None)


def _selects_nothing(
    pattern: str, matrices: Mapping[str, TensorRow], possible: Mapping[str, TensorRow]
) -> str:
    known = ", ".join(dict.fromkeys(f"layers.*.{name.split('.', 2)[2]}" for name in possible))
    for name, row in matrices.items():
        if fnmatchcase(name, pattern) and (why := _why_not(row)):
            return (
                f"the target {pattern!r} names {name}, which is not adapted, since {why}; there are {known}"
            )
    return f"the target {pattern!r} names no matrix of this model: there are {known}"


def lora_rows(
    spec: ModelSpec, rank: int, targets: Sequence[str] = DEFAULT_TARGETS, dtype: str = "fp32"
) -> list[TensorRow]:
    """The adapters' own rows, A and B of each target, as the ledger writes them; `r` is the rank.

    With them `parameter_groups(decoder, [*ledger(spec).tensors, *lora_rows(...)])` knows what they are.
    """
    _check_rank(rank)
    return [part for row in lora_targets(spec, targets) for part in _pair(row, rank, dtype)]


def _pair(row: TensorRow, rank: int, dtype: str) -> Iterator[TensorRow]:
    (out, into), (n_out, n_in) = row.letters, row.shape
    for name, letters, shape in (
        ("lora_a", ("r", into), (rank, n_in)),
        ("lora_b", (out, "r"), (n_out, rank)),
    ):
        count = math.prod(shape)
        yield replace(
            row,
            name=f"{_module(row.name)}.{name}",
            letters=letters,
            shape=shape,
            count=count,
            active=count,
            formula="·".join(letter for letter in letters if letter != "1"),
            dtype=dtype,
            bytes=nbytes(count, dtype),
        )


def lora_parameters(spec: ModelSpec, rank: int, targets: Sequence[str] = DEFAULT_TARGETS) -> int:
    """How many parameters the adapters have: the sum of r·(in + out) over the targets."""
    return sum(row.count for row in lora_rows(spec, rank, targets))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _check_rank(rank: int) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise LoraError(f"a rank must be an integer of at least 1, found {rank!r}")


# --- adapters in a model ----------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """W x + b + scale · B A x. `weight` and `bias` are those of the linear map that it replaces.

    A and B are fp32, whatever the weights are. Whoever reads `weight` alone does not see them: generate
    natively, or save the model, after `merge_lora`.
    """

    def __init__(
        self, base: nn.Linear, a: Float[Tensor, "r in"], b: Float[Tensor, "out r"], scale: float
    ) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.limit = base.limit if isinstance(base, Clipped) else None
        self.lora_a, self.lora_b = nn.Parameter(a), nn.Parameter(b)
        self.scale = scale

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        if torch.is_grad_enabled():
            y: Any = _Adapted.apply(x, self.weight, self.bias, self.lora_a, self.lora_b, self.scale)
        else:
            low = F.linear(x.to(self.lora_a.dtype), self.lora_a)
            y = F.linear(x, self.weight, self.bias)
            y = y + (self.scale * F.linear(low, self.lora_b)).to(y.dtype)
        return y if self.limit is None else y.clamp(-self.limit, self.limit)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The same map as a plain module: W + scale · B A, added in fp32 and kept in W's dtype."""
        out, into = self.weight.shape
        with torch.device("meta"):
            plain = nn.Linear(into, out) if self.limit is None else Clipped(into, out, True, self.limit)
        added = self.scale * (self.lora_b @ self.lora_a)
        plain.weight = nn.Parameter((self.weight.float() + added).to(self.weight.dtype))
        plain.bias = self.bias
        return plain


class _Adapted(torch.autograd.Function):
    """The same to learn through: what is added is added in place, so that one result is made, not four. The
    freed ones would be broken up by the small A x that are kept, and the heap hold twice what is in it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, a, b = (tensor.to(dtype) for tensor in (x, weight, a, b))
            bias = None if bias is None else bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            y = multiply(x, weight, bias)
            low = multiply(x.to(a.dtype), a)
            add_product(y.flatten(0, -2), low.flatten(0, -2), scale * b.mT)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, a, b, low = ctx.saved_tensors
        by_x, by_weight, by_bias, *_ = ctx.needs_input_grad
        grad = grads[0]
        rows = grad.flatten(0, -2)
        low_grad = rows.to(b.dtype) @ (ctx.scale * b)
        x_grad = None
        if by_x:
            x_grad = multiply(grad, weight.mT)
            add_product(x_grad.flatten(0, -2), low_grad, a)
        return (
            x_grad,
            rows.mT @ x.flatten(0, -2) if by_weight else None,
            rows.sum(0) if by_bias else None,
            low_grad.mT @ x.flatten(0, -2).to(a.dtype),
            ctx.scale * (rows.to(b.dtype).mT @ low.flatten(0, -2)),
            None,
        )


def adapters(decoder: Decoder) -> dict[str, LoraLinear]:
    """The adapted modules of a model, by name."""
    return {name: module for name, module in decoder.named_modules() if isinstance(module, LoraLinear)}


def add_lora(
    decoder: Decoder, rank: int, alpha: float, targets: Sequence[str] = DEFAULT_TARGETS, seed: int = 0
) -> None:
    """Gives every target an adapter of this rank, scaled by alpha / rank, and freezes everything else.

    A is uniform within ±1/√in, a function of the seed and its own name, and B is zero, as in peft. Raises
    `LoraError` for patterns that select nothing, or a model that has adapters.
    """
    _check_rank(rank)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise LoraError(f"alpha must be a number above 0, found {alpha!r}")
    pairs: dict[str, _Pair] = {}
    for row in lora_targets(decoder.spec, targets):
        name, (out, into) = _module(row.name), row.shape
        bound = into**-0.5
        generator = generator_of(seed, f"{name}.lora_a")
        a = torch.empty(rank, into).uniform_(-bound, bound, generator=generator)
        pairs[name] = _Pair(a, torch.zeros(out, rank), alpha / rank)
    _put_in(decoder, pairs)


@dataclass(frozen=True)
class _Pair:
    """A [r, in] and B [out, r] of one matrix."""

    a: Tensor
    b: Tensor
    scale: float


def _put_in(decoder: Decoder, pairs: Mapping[str, _Pair]) -> None:
    if adapters(decoder):
        raise LoraError("the model has adapters: merge them before it gets others")
    decoder.requires_grad_(False)
    for name, pair in pairs.items():
        base = decoder.get_submodule(name)
        if not isinstance(base, nn.Linear):
            raise LoraError(f"{name} is a {type(base).__name__}, and only a linear map can have an adapter")
        device = base.weight.device
        decoder.set_submodule(name, LoraLinear(base, pair.a.to(device), pair.b.to(device), pair.scale))


def merge_lora(decoder: Decoder) -> None:
    """Adds every adapter to its matrix, in a plain module as before; all parameters can be trained again.

    The new matrices are tensors of their own, so a mapped file is never written to.
    """
    for name, adapter in adapters(decoder).items():
        decoder.set_submodule(name, adapter.merged())
    decoder.requires_grad_(True)


# --- peft's folders -----------------------------------------------------------------------------------

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save_peft(folder: str | Path, decoder: Decoder, base_model: str, model_type: str = "") -> None:
    """Writes the adapters so that `peft.PeftModel.from_pretrained(base, folder)` gives our logits.

    `base_model` is what peft will look for: a name on Hugging Face, or a folder. `model_type` is its family
    (its config.json's), where several can express the model; it decides under which names the adapters lie.

    Raises `LoraError` for a model without adapters, `UnsupportedError` where the family has no linear
    module for an adapted matrix, or where peft would give it to the experts; `FileExistsError` for a folder
    that already holds something.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose another folder, or remove it first")
    theirs, transposed = _for_peft(decoder, model_type)
    about = _config(theirs, base_model, transposed)
    tensors = {
        f"{_PREFIX}{module}.lora_{letter.upper()}.weight": getattr(pair, letter).contiguous()
        for module, pair in theirs.items()
        for letter in ("a", "b")
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        save_file(tensors, part / _WEIGHTS, metadata={"format": "pt"})
        (part / _CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_peft(decoder: Decoder, model_type: str = "") -> None:
    """Raises `UnsupportedError` if `save_peft` would: to be known before the adapters are trained."""
    _for_peft(decoder, model_type)


def _for_peft(decoder: Decoder, model_type: str) -> tuple[dict[str, _Pair], bool]:
    """The adapters by names of transformers' modules, and whether those keep their matrices transposed."""
    found = adapters(decoder)
    if not found:
        raise LoraError("the model has no adapters to save: add_lora gives it some")
    _check_peft_reads(decoder.spec, found)
    dialect = HF[to_config(decoder.spec, model_type)["model_type"]]
    left, theirs, transposed = set(found), {}, False
    for module, place in _linear_places(decoder.spec, dialect).items():
        parts = [found.get(_module(name)) for name in place.parameters]
        if any(parts):
            theirs[module] = _joined(parts, place, dialect)
            transposed |= isinstance(place.transform, Transposed)
            left -= set(map(_module, place.parameters))
    if left:
        raise UnsupportedError(f"the {dialect.name} format has no linear module for {min(left)}")
    return theirs, transposed


def _check_peft_reads(spec: ModelSpec, names: Iterable[str]) -> None:
    """In a model with experts, peft (0.21) takes any target that ends in gate_proj, up_proj or down_proj for
    the experts' stacks, be it of a dense layer or a shared expert."""
    if any(isinstance(block.mlp, Experts) for block in spec.layers):
        for name in names:
            if ".mlp." in name:
                raise UnsupportedError(
                    f"peft would give the adapter of {name} to the experts, since the model has some: adapt "
                    "layers.*.attn.* alone, or merge the adapters and save the model"
                )


def _linear_places(spec: ModelSpec, dialect: Dialect) -> dict[str, Place]:
    """transformers' linear modules of which each part is a matrix that can be adapted, by their names."""
    possible = {row.name for row in _matrices(spec).values() if not _why_not(row)}
    return {
        _module(place.stored): place
        for place in stored_places(spec, dialect)
        if place.index is None and possible.issuperset(place.parameters)
    }


def _joined(parts: Sequence[LoraLinear | None], place: Place, dialect: Dialect) -> _Pair:
    """One adapter of the matrix that transformers makes of several: their A below each other, and their B
    along the diagonal; its rows ordered as the matrix's. What is not adapted has rows of zeros."""
    adapted = [part for part in parts if part is not None]
    scale, rank = adapted[0].scale, sum(part.rank for part in adapted)
    a = torch.cat([part.lora_a.detach().cpu() for part in adapted])
    b = torch.zeros(sum(place.sizes), rank, dtype=a.dtype)
    column = 0
    for part, rows in zip(parts, b.split(place.sizes), strict=True):
        if part is not None:
            rows[:, column : column + part.rank] = part.lora_b.detach() * (part.scale / scale)
            column += part.rank
    return _Pair(a, _rows(place, dialect).store(b), scale)


def _rows(place: Place, dialect: Dialect) -> Identity | Grouped:
    """How the rows of B are ordered: as those of the matrix, which may be transposed besides."""
    match place.transform:
        case Identity() | Transposed():
            return Identity()
        case Grouped() as grouped:
            return grouped
    raise UnsupportedError(f"the {dialect.name} format arranges {place.stored} so that no adapter fits it")


def _config(theirs: Mapping[str, _Pair], base_model: str, transposed: bool) -> dict[str, Any]:
    """peft's description. The commonest rank and alpha are everybody's, others are named by module."""
    ranks = {module: pair.a.shape[0] for module, pair in theirs.items()}
    alphas = {module: _plain(pair.scale * pair.a.shape[0]) for module, pair in theirs.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": sorted(theirs),
        "rank_pattern": {module: r for module, r in ranks.items() if r != rank},
        "alpha_pattern": {module: x for module, x in alphas.items() if x != alpha},
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _plain(number: float) -> int | float:
    nearest = round(number)
    return nearest if math.isclose(number, nearest, rel_tol=1e-12) else number


# --- reading one ----------------------------------------------------------------------------------------

_MAX_CONFIG_BYTES = 2**20

_READ = {
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora",
}  # fmt: skip
_IRRELEVANT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    # Which modules have adapters is seen from the tensors.
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "lora_dropout",  # acts in training alone, where we have none
    "fan_in_fan_out",  # how the base is stored, which the family says
    "megatron_core", "qalora_group_size",  # read only with options that are refused
}  # fmt: skip
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Others change the base's own matrices, which the adapters are then relative to.
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "lora_ga"),
    "runtime_config": ({"ephemeral_gpu_offload": False},),
}
"""Values, beside null, false and empty ones, that change nothing. Of all other keys none do."""


def load_peft(decoder: Decoder, folder: str | Path, model_type: str = "") -> None:
    """Gives the model the adapters of a folder that peft wrote, and freezes everything else.

    `model_type` is the base's family, where several can express the model. An adapter of a matrix that is
    several of ours gives each of them the whole of its A.

    Raises `FileError` for a folder that is broken, does not fit the model, or uses what is not supported
    here (DoRA, trained biases, modules saved whole): the message names it.
    """
    folder = Path(folder)
    if not (folder / _WEIGHTS).exists() and folder.is_dir():
        refuse_pickles(folder)
    config = _Config.read(folder / _CONFIG)
    tensors = open_safetensors(folder / _WEIGHTS)
    dialect = HF.get(model_type) or HF[to_config(decoder.spec, model_type)["model_type"]]
    _put_in(decoder, dict(_pairs(decoder.spec, dialect, config, tensors)))


@dataclass(frozen=True)
class _Config:
    """What an adapter_config.json says of ranks and scales."""

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    by_root: bool

    @staticmethod
    def read(path: Path) -> _Config:
        file, size = open_regular(path)
        with file:
            if size > _MAX_CONFIG_BYTES:
                raise FileError(path, "", "the file", f"{size} bytes long", f"at most {_MAX_CONFIG_BYTES}")
            about = parse_object(path, file.read(_MAX_CONFIG_BYTES), "the file")
        if about.get("peft_type") != "LORA":
            raise FileError(path, "peft_type", "the value", _shown(about.get("peft_type")), "LORA")
        for key, value in about.items():
            harmless = key in _READ | _IRRELEVANT or not value or value in _HARMLESS.get(key, ())
            if not harmless:
                raise FileError(
                    path, key, "the value", _shown(value), "null or false: this option is not supported"
                )
        patterns = [about.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
        for key, pattern in zip(("rank_pattern", "alpha_pattern"), patterns, strict=True):
            _check_pattern(path, key, pattern)
        rank, alpha = _rank(path, "r", about.get("r")), _alpha(path, "lora_alpha", about.get("lora_alpha"))
        return _Config(path, rank, alpha, *patterns, by_root=bool(about.get("use_rslora")))

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """A module's rank, and alpha / rank, or alpha / √rank (rsLoRA, Kalajdzievski 2023)."""
        rank = _rank(self.path, "rank_pattern", _of(module, self.ranks, self.rank))
        alpha = _alpha(self.path, "alpha_pattern", _of(module, self.alphas, self.alpha))
        return rank, alpha / (rank**0.5 if self.by_root else rank)


def _check_pattern(path: Path, key: str, pattern: Any) -> None:
    """peft takes its keys for regular expressions. Only names are read here: a stranger's expression can take
    for ever."""
    if not isinstance(pattern, dict):
        raise FileError(path, key, "the value", kind_of(pattern), "an object of numbers")
    for name in pattern:
        if not re.fullmatch(r"[\w.]+", name):
            raise FileError(path, key, "a key", repr(name), "the name of a module, or how it ends")


def _of(module: str, patterns: Mapping[str, Any], default: Any) -> Any:
    """What the first pattern says that is the module's name or ends it."""
    whole = (key for key in patterns if module == key or module.endswith(f".{key}"))
    return next((patterns[key] for key in whole), default)


def _rank(path: Path, where: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise FileError(path, where, "the rank", _shown(value), "an integer of at least 1")
    return value


def _alpha(path: Path, where: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise FileError(path, where, "the alpha", _shown(value), "a number above 0")
    return value


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | bool) else kind_of(value)


def _pairs(
    spec: ModelSpec, dialect: Dialect, config: _Config, tensors: SafetensorsFiles
) -> Iterator[tuple[str, _Pair]]:
    """A and B for our own modules; every tensor of the file is used."""
    places = _linear_places(spec, dialect)
    matrices = _matrices(spec)
    left = set(tensors.tensors)
    if not left:
        raise FileError(tensors.path, "", "the file", "without tensors", "one with adapters")
    for theirs in sorted({name.rpartition(".lora_")[0] for name in left}):
        named = theirs.removeprefix(_PREFIX)
        module = dialect.plain(named)
        # Once: a second name of the same module finds none.
        place = places.pop(module, None) or places.pop(dialect.base + module, None)
        if place is None:
            where = f"tensor {min(n for n in left if n.rpartition('.lora_')[0] == theirs)!r}"
            found, expected = "of no linear module of this model that is free", "one of each adapted module"
            raise FileError(tensors.path, where, "the name", found, expected)
        rank, scale = config.rank_and_scale(named)
        into = matrices[_module(place.parameters[0])].shape[1]
        a = _values(tensors, f"{theirs}.lora_A.weight", (rank, into))
        b = _values(tensors, f"{theirs}.lora_B.weight", (sum(place.sizes), rank))
        left -= {f"{theirs}.lora_A.weight", f"{theirs}.lora_B.weight"}
        rows = _rows(place, dialect).load(b).split(place.sizes)
        for name, part in zip(place.parameters, rows, strict=True):
            yield _module(name), _Pair(a.clone(), part.clone(), scale)
    if left:
        found = "not supported"
        raise FileError(tensors.path, f"tensor {min(left)!r}", "the tensor", found, "lora_A and lora_B only")


def _values(tensors: SafetensorsFiles, name: str, shape: tuple[int, int]) -> Tensor:
    """One matrix in fp32, checked before it is read."""
    where = f"tensor {name!r}"
    if name not in tensors.tensors:
        raise FileError(tensors.path, where, "the tensor", "missing", "beside its other half")
    stored = tensors.tensors[name]
    if stored.shape != shape:
        raise FileError(tensors.path, where, "the shape", list(stored.shape), list(shape))
    if stored.dtype not in ("F32", "F16", "BF16"):
        raise FileError(tensors.path, where, "the dtype", stored.dtype, "F32, F16 or BF16")
    values = tensors.get(name).float()
    if not is_finite(values):
        raise FileError(tensors.path, where, "a value", "NaN or infinite", "finite numbers")
    return values
