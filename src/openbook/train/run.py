"""A run: a folder in which a recipe becomes a model.

RUN/recipe.json       the recipe as it is carried out
    data/             the dataset, if the recipe makes one
    metrics.jsonl     a line for every step and every evaluation
    step-000300/      checkpoints
    model/            at the end, the model as a Hugging Face folder
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openbook import sources
from openbook.files.gguf import read_gguf
from openbook.ledger import ledger
from openbook.model import Decoder, init_weights
from openbook.spec.hf import to_config
from openbook.spec.model import ModelSpec
from openbook.text import Tokenizer
from openbook.text import gguf as gguf_vocabulary
from openbook.text.to_hf import to_files
from openbook.train import data
from openbook.train.checkpoint import CheckpointError, load_latest, save
from openbook.train.corpus import corpus_of
from openbook.train.evaluate import Evaluation, evaluate
from openbook.train.loop import StopRequest, Trainer
from openbook.train.optim import Optimizer, cosine, parameter_groups, warmup_stable_decay
from openbook.train.pack import Packed
from openbook.train.predict import Prediction, predict
from openbook.train.recipe import DataPart, Recipe, RecipeError, TrainPart
from openbook.weights.fit import check_fit
from openbook.weights.save import save_hf

RECIPE, METRICS, DATA, MODEL = "recipe.json", "metrics.jsonl", "data", "model"

DEFAULT_HELD_OUT = 0.07

Record = Mapping[str, Any]
"""A line of metrics.jsonl: {"step", "loss", "lr", "grad_norm", ...} or {"step", "heldout_nats", ...}."""


# --- what a recipe stands for -------------------------------------------------------------------


def spec_of(recipe: Recipe, vocab_size: int) -> ModelSpec:
    """The model's spec.

    Raises what reading a spec raises, `RecipeError` for a row that is too long for it, and `UnsupportedError`
    for a model that the run could not write as a Hugging Face folder at its end.
    """
    if "preset" in recipe.model:
        spec = sources.spec(recipe.model["preset"]).replace(vocab_size=vocab_size)
    else:
        spec = sources.spec({**recipe.model, "vocab_size": vocab_size})
    if recipe.data.length > spec.max_positions:
        raise RecipeError(
            f"data.length {recipe.data.length} is beyond the model's {spec.max_positions} positions"
        )
    to_config(spec)
    return spec


def vocabulary_of(about: DataPart) -> int | sources.Source:
    """What `data.build` is told: the size of a vocabulary to train, or the model whose tokenizer is taken."""
    return about.vocab if about.vocab is not None else sources.resolve(about.tokenizer or "")


def expected_vocab_size(about: DataPart) -> int:
    """The vocabulary's size before there is a dataset: of one that is to be trained, the most it may get."""
    if about.folder is not None:
        return data.open_dataset(about.folder).vocab_size
    vocabulary = vocabulary_of(about)
    if isinstance(vocabulary, int):
        return vocabulary
    tokenizer = Tokenizer.from_source(vocabulary)
    if tokenizer is None:
        raise RecipeError(
            f"data.tokenizer: {about.tokenizer} has none: name a fetched model, a .gguf file or a folder "
            "with tokenizer.json"
        )
    return tokenizer.vocab_size


def prediction(recipe: Recipe) -> Prediction:
    """What the recipe will take. Raises what `spec_of` raises."""
    return predict(spec_of(recipe, expected_vocab_size(recipe.data)), recipe.train, recipe.data.length)


def schedule_of(train: TrainPart) -> Callable[[int], float]:
    """Step → part of the peak learning rate."""
    if train.schedule == "cosine":
        return lambda step: cosine(step, train.steps, train.warmup, train.minimum)
    return lambda step: warmup_stable_decay(step, train.steps, train.warmup, train.decay or 0, train.minimum)


def dataset_of(recipe: Recipe, folder: Path, progress: data.Progress | None = None) -> data.Dataset:
    """The dataset that the recipe names, or that the run in `folder` makes of its sources, once."""
    about = recipe.data
    if about.folder is not None:
        return data.open_dataset(about.folder)
    if not (folder / DATA).exists():
        held_out = DEFAULT_HELD_OUT if about.held_out is None else about.held_out
        data.build(folder / DATA, corpus_of(about.sources), vocabulary_of(about), held_out, progress)
    return data.open_dataset(folder / DATA)


def trainer_of(recipe: Recipe, spec: ModelSpec, samples: Packed) -> Trainer:
    """A new model, before its first step."""
    train = recipe.train
    decoder = init_weights(Decoder(spec), train.seed)
    groups = parameter_groups(decoder, ledger(spec).tensors)
    return Trainer(
        decoder,
        Optimizer(groups, train.lr, train.weight_decay, muon=train.optimizer == "muon"),
        samples,
        schedule_of(train),
        train.rows,
        train.micro_rows,
        train.clip,
        train.z_weight,
        train.dtype == "bf16",
        train.max_nonfinite,
    )


# --- a run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run that is ready to go on from `trainer.step`; `damaged` names checkpoints that were passed over."""

    folder: Path
    recipe: Recipe
    dataset: data.Dataset
    trainer: Trainer
    heldout: Packed | None
    step_flops: int
    damaged: tuple[str, ...] = ()


def open_run(
    recipe: Recipe,
    folder: str | Path,
    resume: bool = False,
    force: bool = False,
    progress: data.Progress | None = None,
) -> Run:
    """Begins a run in a new folder; with `resume`, goes on with the one that is there, if there is one.

    Raises `WontFitError` before anything is made, unless `force`; `FileExistsError` for a folder that holds
    something, `CheckpointError` for one with another recipe, and whatever its dataset and model raise.
    """
    folder = Path(folder)
    predicted = prediction(recipe)
    if not force:
        check_fit(f"training {recipe.name}", predicted.bytes)
    _take_folder(recipe, folder, resume)
    _clear_parts(folder)
    dataset = dataset_of(recipe, folder, progress)
    spec = spec_of(recipe, dataset.vocab_size)
    train, about = recipe.train, recipe.data
    samples = dataset.pack("train", about.length, train.seed, about.whole)
    trainer = trainer_of(recipe, spec, samples)
    found = load_latest(folder)
    if found is not None:
        trainer.restore(found)
    _keep_metrics(folder / METRICS, trainer.step)
    return Run(
        folder,
        recipe,
        dataset,
        trainer,
        _heldout(dataset, about),
        predict(spec, train, about.length).step_flops,
        tuple(f"{skipped.path.name}: {skipped.why}" for skipped in found.skipped) if found else (),
    )


def _heldout(dataset: data.Dataset, about: DataPart) -> Packed | None:
    """The rows to evaluate on, if anything was held out that can be predicted."""
    split = dataset.splits.get("heldout")
    return (
        None
        if split is None or not split.labels
        else dataset.pack("heldout", about.length, whole=about.whole)
    )


def _take_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Makes the folder this recipe's, or sees that it is."""
    path = folder / RECIPE
    if path.exists():
        if not resume:
            raise FileExistsError(
                errno.EEXIST,
                "holds a run: go on with it by --resume auto, or choose another folder",
                str(folder),
            )
        a, b = (_deciding(one) for one in (sources.read_json(path), recipe.plain()))
        if different := sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key)):
            raise CheckpointError(
                f"{folder} holds a run of another recipe, {different[0]} differs: go on with its own, or "
                "choose another folder"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(errno.EEXIST, "is there and holds no run: choose another folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    _write_whole(path, json.dumps(recipe.plain(), indent=2) + "\n")


def _clear_parts(folder: Path) -> None:
    """Removes what a killed run left half made: everything gets its own name only when it is whole."""
    for part in folder.glob("*.part"):
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()


FREE = frozenset(("train.micro_rows", "train.max_nonfinite"))
"""Keys that do not decide over the weights that come out (but for rounding), and may differ on resuming."""


def _deciding(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that do, flat."""
    tables = {part: recipe.get(part) for part in ("model", "data", "train")}
    flat = {
        f"{part}.{key}": value
        for part, table in tables.items()
        if isinstance(table, dict)
        for key, value in table.items()
    }
    return {key: value for key, value in flat.items() if key not in FREE}


def carry_out(run: Run, report: Callable[[Record], None] = lambda record: None) -> int:
    """Takes the steps that are left and writes the model.

    Returns 0; or, if SIGINT or SIGTERM asked to stop before the last step, the signal's number: then the run
    was saved at the next step.
    """
    recipe, trainer = run.recipe, run.trainer
    saved = trainer.step

    with StopRequest() as stop, (run.folder / METRICS).open("a", encoding="utf-8") as metrics:

        def note(record: Record) -> None:
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
            report(record)

        while trainer.step < recipe.train.steps and not stop.asked:
            note(_timed_step(run))
            last = trainer.step == recipe.train.steps
            if run.heldout is not None and (last or _is_due(trainer.step, recipe.run.evaluate_every)):
                note(_evaluation(trainer.step, _evaluate(run, run.heldout)))
            if last or _is_due(trainer.step, recipe.run.save_every):
                _save(run)
                saved = trainer.step
        if trainer.step != saved:
            _save(run)
        if trainer.step < recipe.train.steps:
            return stop.asked
    if not (run.folder / MODEL).exists():
        export(run)
    return 0


def _save(run: Run) -> None:
    trainer = run.trainer
    save(run.folder, trainer.step, trainer.tensors(), trainer.counts(), run.recipe.run.keep)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _timed_step(run: Run) -> Record:
    start = time.perf_counter()
    step = run.trainer.update()
    seconds = time.perf_counter() - start
    record: dict[str, Any] = {
        "step": step.number,
        "loss": step.loss,
        "lr": step.lr,
        "grad_norm": step.grad_norm,
        "labels": step.labels,
        "tokens": step.tokens,
        "seconds": seconds,
        "tokens_per_s": step.tokens / seconds,
        "flops_per_s": run.step_flops / seconds,
    }
    if step.skipped:
        # JSON has no NaN.
        record |= {"loss": None, "grad_norm": None, "skipped": step.skipped}
    return record


def _evaluate(run: Run, heldout: Packed) -> Evaluation:
    rows = run.trainer.micro_rows
    return evaluate(run.trainer.decoder, heldout, run.dataset.byte_lengths, rows, run.trainer.bf16)


def _evaluation(step: int, found: Evaluation) -> Record:
    return {
        "step": step,
        "heldout_nats": found.nats_per_token,
        "heldout_bits_per_byte": found.bits_per_byte,
        "heldout_labels": found.labels,
        "heldout_bytes": found.bytes,
    }


def _keep_metrics(path: Path, step: int) -> None:
    """Drops the lines that are beyond `step`, and one that was cut: these steps will be taken again."""
    if not path.exists():
        return
    kept = [line for line in path.read_text("utf-8").splitlines() if 0 < _step_of(line) <= step]
    _write_whole(path, "".join(f"{line}\n" for line in kept))


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def _write_whole(path: Path, text: str) -> None:
    """A file that is there whole or as it was, even if the process is killed meanwhile."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    part.write_text(text, "utf-8")
    os.replace(part, path)


# --- the model that comes out -------------------------------------------------------------------


def export(run: Run) -> None:
    """Writes RUN/model: config, weights in fp32, tokenizer, and the ids that begin and end a text."""
    tokenizer = run.dataset.tokenizer
    ends = sorted(tokenizer.eos_ids)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    with tempfile.TemporaryDirectory() as name:
        files = _tokenizer_files(run.dataset.folder, Path(name))
        (Path(name) / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", "utf-8")
        files.append(Path(name) / "generation_config.json")
        save_hf(run.trainer.decoder, run.folder / MODEL, config=ids, extra_files=files)


def _tokenizer_files(folder: Path, scratch: Path) -> list[Path]:
    """Those of a dataset, as a Hugging Face folder has them; made in `scratch` from a GGUF vocabulary."""
    if not (folder / data.GGUF_TOKENIZER).exists():
        return [folder / name for name in data.TOKENIZER_FILES if (folder / name).is_file()]
    vocabulary = gguf_vocabulary.from_metadata(read_gguf(folder / data.GGUF_TOKENIZER).metadata)
    made = to_files(vocabulary)
    for name, content in made.items():
        (scratch / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    return [scratch / name for name in made]
