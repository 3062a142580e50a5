"""`openbook convert`: a Hugging Face folder to a GGUF file, and back."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from openbook.cli import terminal
from openbook.cli.errors import UsageError
from openbook.cli.options import Json, Quiet, Verbose, Weights

if TYPE_CHECKING:
    from openbook.sources import Source
    from openbook.text.vocabulary import Vocabulary
    from openbook.weights.explain import Format, Step
    from openbook.weights.stream import Streamed

PLAIN = ("F32", "F16", "BF16")
"""What a Hugging Face folder can have its matrices in."""

Dtype = Annotated[
    Literal["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"] | None,
    typer.Option(help="Of the new matrices.", show_default="the source's; F32 or F16 if that is quantised"),
]


def run(
    source: Weights,
    target: Annotated[
        str, typer.Argument(metavar="DST", help="A .gguf file, or a folder.", show_default=False)
    ],
    dtype: Dtype = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell what would happen to each tensor, and do nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Converts a model: to a GGUF file if DST ends in .gguf, else to a Hugging Face folder."""
    from openbook.cli.loading import source_with_weights

    found, path = source_with_weights(source), Path(target).expanduser()
    form: Format = "gguf" if path.suffix == ".gguf" else "hf"
    if form == "hf" and dtype not in (None, *PLAIN):
        raise UsageError(f"--dtype {dtype} is a type of GGUF files; a folder can have {', '.join(PLAIN)}")
    if explain:
        _explain(found, form, json)
        return
    _check_free(found, path, force)
    try:
        report = _convert(found, path, form, dtype, force)
    except OverflowError as error:
        raise UsageError(str(error)) from None
    if json:
        terminal.write_json("convert", report)
    else:
        print(f"{path}: {report['tensors']:,} tensors, {report['bytes']:,} bytes, {report['dtype']}")


# --- what would happen --------------------------------------------------------------------------


def _explain(source: Source, form: Format, json: bool) -> None:
    from openbook.weights.explain import explain

    steps = explain(source, form)
    if json:
        terminal.write_json("convert", {"steps": [dataclasses.asdict(step) for step in steps]})
        return
    for step in steps:
        print(_line(step))
        print(f"    {step.words or 'as it is'}")


def _line(step: Step) -> str:
    """'model.embed_tokens.weight → embed.weight → token_embd.weight  [300, 48]'"""
    names = " → ".join(filter(None, (step.source, step.ours, step.target)))
    times = f"  ×{step.times}" if step.times > 1 else ""
    return f"{names}  {list(step.shape)}{times}"


# --- conversion ---------------------------------------------------------------------------------


def _check_free(source: Source, path: Path, force: bool) -> None:
    """Nothing of anyone's is overwritten, and never the model that is being read."""
    if source.path is not None and source.path.resolve().is_relative_to(path.resolve()):
        raise UsageError(f"{path} is where the model is that is to be converted: name another place")
    if path.is_dir() and path.suffix == ".gguf":
        raise UsageError(f"{path} is a folder, not a .gguf file")
    taken = any(path.iterdir()) if path.is_dir() else path.exists()
    if not taken:
        return
    if not force:
        raise UsageError(f"{path} is there already: name another, or replace it with --force")
    if path.is_dir() and not _holds_only_a_model(path):
        raise UsageError(f"{path} is not a model's folder alone: it is not replaced, remove it yourself")
    if path.is_file() and path.suffix != ".gguf":
        raise UsageError(f"{path} is a file: name a folder, or a file that ends in .gguf")


def _holds_only_a_model(folder: Path) -> bool:
    has_weights = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return has_weights and all(file.is_file() for file in folder.iterdir())


def _convert(source: Source, path: Path, form: Format, dtype: str | None, force: bool) -> dict[str, Any]:
    from openbook.weights.stream import Streamed

    parameters = Streamed(source)
    if left := parameters.ignored:
        terminal.note(f"note: left out, as no parameters of this model: {_named(left)}")
    if dtype is None:
        own = parameters.plain_type
        dtype = own if own in PLAIN else "F16" if form == "gguf" else "F32"
    with terminal.Progress() as progress:
        if form == "gguf":
            from openbook.weights.save_gguf import save_gguf

            path.parent.mkdir(parents=True, exist_ok=True)
            text = _text_keys(source, parameters.spec.vocab_size)
            save_gguf(parameters, path, dtype, text, source.family, progress)
        else:
            _to_folder(source, parameters, path, dtype, force, progress)
    return _written(path, dtype)


def _named(tensors: list[str]) -> str:
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} and {len(tensors) - 1:,} more"


def _to_folder(
    source: Source,
    parameters: Streamed,
    path: Path,
    dtype: str,
    force: bool,
    progress: terminal.Progress,
) -> None:
    """Written beside the folder that it replaces, if it replaces one."""
    import secrets

    from openbook.weights.save import save_hf

    files, ids = _text_files(source)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        save_hf(parameters, beside, dtype.lower(), config=ids, model_type=source.family, progress=progress)
        for name, content in files.items():
            (beside / name).write_bytes(content)
        if force and path.is_dir():
            shutil.rmtree(path)
        beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _written(path: Path, dtype: str) -> dict[str, Any]:
    """What lies there now, read back from its header."""
    from openbook.sources import resolve
    from openbook.weights.tensors import open_tensors

    stored = open_tensors(resolve(path)).stored.values()
    size = sum(tensor.nbytes for tensor in stored)
    return {"path": str(path), "tensors": len(stored), "bytes": size, "dtype": dtype}


# --- the tokenizer ------------------------------------------------------------------------------

TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "vocab.json",
    "merges.txt", "added_tokens.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""What belongs to a folder's tokenizer; copied from folder to folder."""


def _text_keys(source: Source, n_rows: int) -> dict[str, Any]:
    """A GGUF file's keys for the source's tokenizer; none, and a warning, if it cannot be had."""
    from openbook.text.to_gguf import to_metadata
    from openbook.text.vocabulary import TokenizerError

    if source.kind == "gguf":
        return _same_keys(source)
    try:
        return to_metadata(_vocabulary(source), n_rows)
    except TokenizerError as error:
        terminal.note(f"warning: the file will be without a tokenizer: {error}")
        return {}


def _same_keys(source: Source) -> dict[str, Any]:
    """Each as it is, with the type that it has in the source."""
    from openbook.files.gguf import Typed, read_gguf

    file = read_gguf(source.weights)
    return {
        key: Typed(value, file.metadata_types[key])
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.")
    }


def _text_files(source: Source) -> tuple[dict[str, bytes], Mapping[str, Any]]:
    """The files of a folder for the source's tokenizer, and the ids that its config.json names."""
    import json

    from openbook.text.to_hf import special_ids, to_files
    from openbook.text.vocabulary import TokenizerError

    if source.kind == "safetensors":
        found = {name: source.weights / name for name in TEXT_FILES}
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        kept = {key: source.config[key] for key in ids if key in source.config}
        return {name: file.read_bytes() for name, file in found.items() if file.is_file()}, kept
    try:
        vocabulary = _vocabulary(source)
    except TokenizerError as error:
        terminal.note(f"warning: the folder will be without a tokenizer: {error}")
        return {}, {}
    files = to_files(vocabulary)
    return {
        name: json.dumps(content, ensure_ascii=False, indent=2).encode() for name, content in files.items()
    }, special_ids(vocabulary)


def _vocabulary(source: Source) -> Vocabulary:
    from openbook.text import gguf, hf

    if source.kind == "gguf":
        return gguf.from_metadata(source.config)
    return hf.from_folder(source.weights)
