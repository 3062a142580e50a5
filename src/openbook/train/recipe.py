"""Recipes: everything that a training run depends on, in one TOML file. Every key is used or an error."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from openbook import sources
from openbook.spec.presets import near

Part = TypeVar("Part")


class RecipeError(ValueError):
    """A recipe has a key that nothing reads, lacks one, or has a value that cannot be meant."""


@dataclass(frozen=True)
class DataPart:
    """What is learned: a dataset's `folder`; or `sources` (as `openbook data build` takes them), of which the
    run makes a dataset with a vocabulary of `vocab` tokens or the `tokenizer` of a model. Rows have `length`
    tokens; `whole` keeps documents that fit in one together."""

    length: int
    folder: str | None = None
    sources: tuple[str, ...] = ()
    vocab: int | None = None
    tokenizer: str | None = None
    held_out: float | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        _at_least("data", self, length=1, vocab=257)
        _demand((self.folder is None) != (not self.sources), "data: give either folder or sources")
        made = {"vocab": self.vocab, "tokenizer": self.tokenizer, "held_out": self.held_out}
        if self.folder is not None:
            used = [name for name, value in made.items() if value is not None]
            _demand(not used, f"data.{', data.'.join(used)}: the dataset in data.folder has its own")
        else:
            both = "data: give either vocab, to train a tokenizer, or tokenizer, to take one"
            _demand((self.vocab is None) != (self.tokenizer is None), both)
        _demand(0 <= (self.held_out or 0) <= 0.9, "data.held_out must be from 0 to 0.9")


@dataclass(frozen=True)
class TrainPart:
    """How it is learned. A step takes `rows` rows, `micro_rows` at once, and `steps` are taken. `lr` is the
    peak; `warmup` and `decay` (of "wsd" only) are in steps, `minimum` is a part of the peak. `z_weight` and
    `balance` weigh the losses that keep logits small and experts evenly busy. With `checkpoint_layers` a
    layer's activations are computed a second time instead of kept; `compile` is torch.compile's."""

    steps: int
    rows: int
    lr: float
    micro_rows: int | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: int = 0
    decay: int | None = None
    minimum: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    z_weight: float = 0.0
    balance: float = 0.0
    dtype: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    max_nonfinite: int = 10
    checkpoint_layers: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        _at_least("train", self, steps=1, rows=1, lr=0, micro_rows=1, warmup=0, decay=0, minimum=0)
        _at_least("train", self, weight_decay=0, clip=0, z_weight=0, balance=0, max_nonfinite=0)
        _demand(self.lr < 100 and self.minimum <= 1, "train.lr must be below 100, train.minimum at most 1")
        falls = self.schedule == "wsd"
        _demand(self.decay is None or falls, 'train.decay is of the schedule "wsd" alone: "cosine" has none')


@dataclass(frozen=True)
class LoraPart:
    """Only low-rank additions are learned (Hu et al. 2021, arXiv 2106.09685): to each matrix whose name in
    the ledger fits one of `targets`, two of `rank`, whose product counts `alpha` / `rank` times."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("layers.*.attn.*", "layers.*.mlp.*")

    def __post_init__(self) -> None:
        _at_least("lora", self, rank=1, alpha=0)
        _demand(bool(self.targets), 'lora.targets is empty: name matrices, as in ["layers.*.attn.q"]')


@dataclass(frozen=True)
class RunPart:
    """What the run leaves: an evaluation every so many steps (0: only at the end), a checkpoint every so
    many, of which the newest `keep` stay, and as often as is said (0: only at the end) what the model
    makes of the beginnings `samples`, `sample_tokens` each; with `sample_chat` they are what a user says."""

    evaluate_every: int = 0
    save_every: int = 100
    keep: int = 2
    samples: tuple[str, ...] = ()
    sample_every: int = 0
    sample_tokens: int = 64
    sample_chat: bool = False

    def __post_init__(self) -> None:
        _at_least("run", self, evaluate_every=0, save_every=1, keep=1, sample_every=0, sample_tokens=1)


@dataclass(frozen=True)
class Recipe:
    """`model` is what `openbook.sources.spec` takes, without a vocabulary's size, which is the dataset's: the
    keys of a config.json or a spec of our own; or {"preset": name}. Or it is {"from": name}, and the run
    begins with the weights of that model; with `lora`, it leaves them as they are and learns additions."""

    name: str
    model: Mapping[str, Any]
    data: DataPart
    train: TrainPart
    run: RunPart
    lora: LoraPart | None = None

    @property
    def base(self) -> str | None:
        """The model whose weights the run begins with; None: new ones."""
        return self.model.get("from")

    def plain(self) -> dict[str, Any]:
        """All of it as JSON gives it back."""
        return json.loads(json.dumps(asdict(self)))


def read_recipe(path: str | Path, changes: Iterable[str] = ()) -> Recipe:
    """The recipe in a TOML file, with `changes` such as "train.lr=1e-3" made to it.

    A path in the file is that of what lies beside it. If nothing is there, it is relative to the current
    folder, as it is in `changes`.

    Raises `RecipeError` for what is not TOML, unknown and missing keys and impossible values, and
    `FileNotFoundError`.
    """
    path = Path(path)
    with path.open("rb") as file:
        try:
            document = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path} is no recipe: {error}") from None
    _look_beside(document, os.path.dirname(path))
    for change in changes:
        _change(document, change)
    try:
        return recipe_of(path.stem, document)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def recipe_of(name: str, document: Mapping[str, Any]) -> Recipe:
    """The recipe that a parsed TOML document describes."""
    known = ("model", "data", "train", "run", "lora")
    _know("", document, known)
    for part in known:
        if not isinstance(document.get(part, {}), Mapping):
            raise RecipeError(f"{part} must be a table, found {document[part]!r}")
    model = document.get("model", {})
    _demand(bool(model), "model is missing: give the keys of a config.json, or preset, or from")
    _demand(
        "vocab_size" not in model, "model.vocab_size: the vocabulary's size is the dataset's, leave it out"
    )
    for key in ("preset", "from"):
        if key in model:
            _know("model", model, (key,))
            _demand(isinstance(model[key], str), f"model.{key} must be a string, found {model[key]!r}")
    lora = document.get("lora")
    _demand(lora is None or "from" in model, "lora needs weights to add to: name a model in model.from")
    return Recipe(
        name,
        model,
        _read("data", DataPart, _with_its_tokenizer(document.get("data", {}), model)),
        _read("train", TrainPart, document.get("train", {})),
        _read("run", RunPart, document.get("run", {})),
        None if lora is None else _read("lora", LoraPart, lora),
    )


def _with_its_tokenizer(about: Mapping[str, Any], model: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model that brings weights brings its tokenizer, unless another is named."""
    if "from" not in model or {"folder", "vocab", "tokenizer"} & about.keys():
        return about
    return {**about, "tokenizer": model["from"]}


PATHS = ("model.from", "model.preset", "data.folder", "data.sources", "data.tokenizer")
"""Keys whose values may be paths."""


def _look_beside(document: dict[str, Any], folder: str) -> None:
    """Puts `folder` before the paths of what lies in it."""
    for key in PATHS:
        part, name = key.split(".")
        table = document.get(part)
        if isinstance(table, dict) and name in table:
            value = table[name]
            many = isinstance(value, list)
            table[name] = [_beside(one, folder) for one in value] if many else _beside(value, folder)


def _beside(value: Any, folder: str) -> Any:
    """The path in `folder`, if there is one; else what was written, which may be a name."""
    if not isinstance(value, str) or value in ("", "stdlib") or sources.is_name(value):
        return value
    path = os.path.join(folder, value)
    return path if os.path.exists(path) else value


def _change(document: dict[str, Any], change: str) -> None:
    """Sets one key, as in "train.lr=1e-3"; what is no TOML value is taken as a string."""
    keys, equals, text = change.partition("=")
    *tables, last = keys.strip().split(".")
    _demand(bool(equals and tables and last), f"--set {change}: write it as train.lr=1e-3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table: Any = document
    for key in tables:
        table = table.setdefault(key, {})
        _demand(isinstance(table, dict), f"--set {change}: {key} is a value and holds no keys")
    table[last] = value


# --- reading a part -----------------------------------------------------------------------------


def _read(where: str, part: type[Part], table: Mapping[str, Any]) -> Part:
    """A part's dataclass, its fields being the keys and their types the values'."""
    kinds = get_type_hints(part)
    _know(where, table, kinds)
    for field in fields(part):  # type: ignore[arg-type]
        _demand(field.name in table or field.default is not MISSING, f"{where}.{field.name} is missing")
    return part(**{name: _value(f"{where}.{name}", kinds[name], value) for name, value in table.items()})


def _know(where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            raise RecipeError(f"{where}{'.' if where else ''}{key} is not known{near(key, known)}")


def _value(where: str, kind: Any, value: Any) -> Any:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        _demand(value in choices, f"{where} must be one of {', '.join(choices)}, found {value!r}")
        return value
    if get_origin(kind) is tuple:
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        _demand(texts, f"{where} must be a list of strings, found {value!r}")
        return tuple(value)
    (kind,) = {*get_args(kind)} - {NoneType} or {kind}
    if kind is float and type(value) is int:
        value = float(value)
    _demand(type(value) is kind, f"{where} must be {_WORDS[kind]}, found {value!r}")
    return value


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _at_least(where: str, part: object, **least: float) -> None:
    for name, bound in least.items():
        value = getattr(part, name)
        # Written so that NaN, which compares with nothing, is refused as well.
        _demand(value is None or value >= bound, f"{where}.{name} must be at least {bound}, found {value}")


def _demand(ok: bool, message: str) -> None:
    if not ok:
        raise RecipeError(message)
