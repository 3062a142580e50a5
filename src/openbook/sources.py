"""From what a user names to the model's spec, and to where its tensors lie.

A name, a folder, a config.json, a GGUF file, a dict or a spec: `resolve` tells them apart, and every
verb and `ob.load` go through it. Headers are read, tensors are not; no torch is imported.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from openbook.files.errors import FileError, printable
from openbook.files.regular import open_regular
from openbook.files.strict_json import parse_object
from openbook.spec.hf import from_config
from openbook.spec.model import ModelSpec, SpecError, from_dict
from openbook.spec.presets import LISTED, PRESETS, NotFoundError, near, preset
from openbook.spec.reader import show

if TYPE_CHECKING:
    from openbook.files.gguf import GgufFile

__all__ = ["NotFoundError", "Source", "is_name", "read_json", "resolve", "spec"]

MAX_JSON_BYTES = 16 * 2**20
"""Of a config; the largest seen (150,000 labels by name) have a few MB."""


@dataclass(frozen=True)
class Source:
    """A model as it was found.

    `kind` says where its tensors are: in the `.safetensors` of the folder `path`, in the GGUF file
    `path`, or nowhere ("spec"). `path` is also what was read for the spec; None if no file was.
    `config` is what the spec was read from, with all its other keys: the config.json, or a GGUF
    file's metadata, or empty.
    """

    spec: ModelSpec
    kind: Literal["spec", "safetensors", "gguf"] = "spec"
    path: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def weights(self) -> Path:
        """The folder or file with the tensors. Raises `NotFoundError` for a model without any."""
        if self.kind == "spec" or self.path is None:
            where = f"{self.path} holds" if self.path else f"{self.spec.name or 'a spec'} has"
            raise NotFoundError(
                f"{where} no weights, only a description of the model: name a folder with .safetensors "
                "or a .gguf file"
            )
        return self.path

    @property
    def family(self) -> str:
        """What the file calls its kind of model (`model_type`, `general.architecture`); '' if no file."""
        return self.config.get("general.architecture" if self.kind == "gguf" else "model_type", "")

    @property
    def is_own(self) -> bool:
        """Whether its description is a spec of our own (and so its tensors have our names)."""
        return self.kind != "gguf" and _is_own(self.config)


def spec(source: str | os.PathLike[str] | Mapping[str, Any] | ModelSpec) -> ModelSpec:
    """The spec of a preset, folder, config.json, .gguf file or dict: `resolve(source).spec`."""
    return resolve(source).spec


def resolve(source: str | os.PathLike[str] | Mapping[str, Any] | ModelSpec) -> Source:
    """Finds the model that `source` names.

    A bare name is a model fetched by `openbook models get`, or else a preset; write `./name` for a
    folder of that name. A dict is a config.json's content, or what `to_dict` made of a spec.

    Raises `NotFoundError` for a name or path that is not there, `FileError` for a file that is
    broken, `SpecError` (`UnsupportedError`) for a description that is no (supported) model.
    """
    match source:
        case ModelSpec():
            return Source(source)
        case Mapping():
            return Source(_spec_of(source), config=source)
        case str() if (found := _by_name(source)) is not None:
            return found
        case str() | os.PathLike():
            return _at(Path(os.path.expanduser(source)), source)
    raise SpecError(f"a model is a name, a path, a dict or a ModelSpec, found {type(source).__name__}")


# --- names --------------------------------------------------------------------------------------


def is_name(source: str) -> bool:
    """Whether it names a model wherever one is, whatever folder may be called the same."""
    from openbook import models

    return source.lower() in models.MODELS or source.lower() in PRESETS


def _by_name(name: str) -> Source | None:
    from openbook import models

    key = name.lower()
    if key in models.MODELS and models.is_fetched(key):
        return _at(models.path(key), name)
    if key in PRESETS:
        return Source(preset(key))
    if key in models.MODELS:
        models.fetched_path(key)  # raises, with the command that fetches it
    return None


# --- paths --------------------------------------------------------------------------------------


def _at(path: Path, source: str | os.PathLike[str]) -> Source:
    if os.path.isdir(path):
        return _folder(path)
    if not os.path.exists(path):  # unlike Path.exists, false for a name that no file can have
        if os.path.islink(path):
            raise NotFoundError(f"{printable(path)} is a link to a file that is not there: fetch it again")
        _not_found(path, source)
    if path.suffix == ".gguf":
        return _gguf(path)
    if path.suffix == ".json":
        return _config(path)
    raise NotFoundError(f"{path} is no model: expected a folder with config.json, a .gguf or a .json file")


def _folder(folder: Path) -> Source:
    ggufs = sorted(folder.glob("*.gguf"))
    if (folder / "config.json").exists() and (_has_safetensors(folder) or not ggufs):
        return _config(folder / "config.json")
    if (folder / "recipe.json").exists() and (folder / "model").is_dir():  # a training run: what came of it
        return _folder(folder / "model")
    if len(ggufs) == 1:
        return _gguf(ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise NotFoundError(f"{folder} holds several .gguf files: name one of {names}")
    raise NotFoundError(f"{folder} holds no model: neither a config.json nor a .gguf file is in it")


def _config(file: Path) -> Source:
    """A config.json belongs to the tensors beside it; any other .json stands alone."""
    config = read_json(file)
    with _errors_name(file):
        found = _spec_of(config)
    if file.name != "config.json":
        return Source(_with_name(found, file.stem), "spec", file, config)
    kind = "safetensors" if _has_safetensors(file.parent) else "spec"
    return Source(_with_name(found, file.resolve().parent.name), kind, file.parent, config)


def _gguf(path: Path) -> Source:
    from openbook.files.gguf import read_gguf
    from openbook.spec.gguf import ROPE_TENSORS, from_metadata

    file = read_gguf(path)
    shapes = {tensor.name: tensor.shape for tensor in file.tensors.values()}
    with _errors_name(path):
        numbers = {name: _small_floats(file, name) for name in ROPE_TENSORS if name in shapes}
        found = from_metadata(file.metadata, shapes, numbers)
    return Source(_with_name(found, path.stem), "gguf", path, file.metadata)


def _small_floats(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    if tensor.type != "F32" or tensor.nbytes > _SMALL:
        raise SpecError(f"{name} must be a short row of F32, found {tensor.type} {list(tensor.shape)}")
    return list(memoryview(file.data(name).tobytes()).cast("f"))


_SMALL = 2**20


def _has_safetensors(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists()


def _spec_of(description: Mapping[str, Any]) -> ModelSpec:
    """A dict is a spec of our own if it lists layers, and a config of Hugging Face's otherwise."""
    return from_dict(dict(description)) if _is_own(description) else from_config(description)


def _is_own(description: Mapping[str, Any]) -> bool:
    return "layers" in description and "model_type" not in description


def _with_name(found: ModelSpec, name: str) -> ModelSpec:
    return found if found.name else found.replace(name=name)


@contextmanager
def _errors_name(file: Path) -> Iterator[None]:
    """Puts the file's name before what is wrong with the model that it describes."""
    try:
        yield
    except SpecError as error:
        raise type(error)(f"{file}: {error}") from error


def _not_found(path: Path, source: str | os.PathLike[str]) -> NoReturn:
    """Says what was looked for, and what lies near it: files beside the path, or names like it."""
    if path.parent != Path() or path.suffix in (".gguf", ".json"):
        if not os.path.isdir(path.parent):
            raise NotFoundError(f"there is no folder {printable(path.parent)}, so no {printable(path.name)}")
        beside = difflib.get_close_matches(path.name[:200], os.listdir(path.parent), n=5)
        hint = f"; close to it: {', '.join(map(printable, beside))}" if beside else ""
        raise NotFoundError(f"there is no file or folder {printable(path, 400)}{hint}")
    from openbook import models

    names = dict.fromkeys((*models.MODELS, *PRESETS))
    name = os.fspath(source)
    raise NotFoundError(
        f"{show(name)} is neither a preset nor a model or folder here{near(name, names)}{LISTED}"
    )


# --- JSON ---------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most 16 MiB, as strict as `parse_object`."""
    file, size = open_regular(path)
    with file:
        if size > MAX_JSON_BYTES:
            raise FileError(path, "", "the file's size", f"{size:,} bytes", f"at most {MAX_JSON_BYTES:,}")
        return parse_object(path, file.read(MAX_JSON_BYTES), "the content")
