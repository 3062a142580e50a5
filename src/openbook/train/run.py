"""A run: a folder in which a recipe becomes a model.

RUN/recipe.json       the recipe as it is carried out
    data/             the dataset, if the recipe makes one
    metrics.jsonl     a line for every step and every evaluation; see `records` for it and its like
    loss.png          how the loss fell (`plot`)
    step-000300/      checkpoints
    model/            at the end, the model as a Hugging Face folder (`export`)
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from openbook import sources
from openbook.infer.generate import generate
from openbook.infer.sample import SamplingParams
from openbook.text import ChatTemplate
from openbook.train import data, records
from openbook.train.checkpoint import Checkpoint, CheckpointError, load_latest, save
from openbook.train.evaluate import Evaluation, evaluate
from openbook.train.export import MODEL, export
from openbook.train.lock import LOCK, Lock
from openbook.train.loop import StopRequest, Trainer
from openbook.train.measure import matmul_flops_per_s
from openbook.train.pack import Packed
from openbook.train.plot import draw
from openbook.train.recipe import PATHS, DataPart, Recipe, RecipeError
from openbook.train.records import Record, Records
from openbook.train.start import (
    dataset_of,
    fingerprint,
    flops_of,
    is_for_transformers,
    prediction,
    spec_of,
    trainer_of,
)
from openbook.weights.fit import check_fit

RECIPE = "recipe.json"


class DiskError(RuntimeError):
    """The run's folder can no longer be written to; the checkpoints in it stand."""


# --- a run that is ready ------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run that is ready to go on from `trainer.step`, and the only one in its folder. `flops` is what
    `flops_of` gives; `notes` are for whoever started it: what will be missing, and checkpoints that were
    passed over."""

    folder: Path
    recipe: Recipe
    dataset: data.Dataset
    trainer: Trainer
    heldout: Packed | None
    flops: Callable[[tuple[int, ...]], int]
    lock: Lock
    frozen: str | None = None
    notes: tuple[str, ...] = ()


def open_run(
    recipe: Recipe,
    folder: str | Path,
    resume: bool = False,
    force: bool = False,
    progress: data.Progress | None = None,
) -> Run:
    """Begins a run in a new folder; with `resume`, goes on with the one that is there, if there is one.

    Raises `WontFitError` before anything is made, unless `force`; `FileExistsError` for a folder that holds
    something, `BusyError` for one in which another process is, `CheckpointError` for one with another
    recipe, and whatever its dataset and model raise.
    """
    folder = Path(folder)
    predicted = prediction(recipe)
    if not force:
        check_fit(f"training {recipe.name}", predicted.bytes)
    lock = _take_folder(recipe, folder, resume)
    _clear_parts(folder)
    dataset = dataset_of(recipe, folder, progress)
    spec = spec_of(recipe, dataset.vocab_size)
    train, about = recipe.train, recipe.data
    samples = dataset.pack("train", about.length, train.seed, about.whole)
    trainer = trainer_of(recipe, spec, samples)
    frozen = fingerprint(trainer.decoder)
    found = load_latest(folder)
    if found is not None:
        if found.state.get("frozen") != frozen:
            raise CheckpointError(
                f"the weights of {recipe.base} are not those that the run in {folder} began with: it can "
                "only go on with the same file"
            )
        trainer.restore(found)
    records.keep(folder, trainer.step)
    run = Run(
        folder,
        recipe,
        dataset,
        trainer,
        _heldout(dataset, about),
        flops_of(recipe, spec),
        lock,
        frozen,
        tuple(_notes(trainer, found)),
    )
    for prompt in recipe.run.samples:
        _check_room(run, prompt)
    return run


def _notes(trainer: Trainer, found: Checkpoint | None) -> Iterator[str]:
    for one in found.skipped if found else ():
        yield f"passed over {one.path.name}: {one.why}"
    if not is_for_transformers(trainer.decoder.spec):
        yield (
            "no Hugging Face family describes this model: it will be exported in Openbook's own form, which "
            "transformers cannot read"
        )
    if missing := records.missing_extras():
        yield f"without {' and '.join(missing)} there will be fewer pictures: pip install 'openbook[train]'"


def _heldout(dataset: data.Dataset, about: DataPart) -> Packed | None:
    """The rows to evaluate on, if anything was held out that can be predicted."""
    split = dataset.splits.get("heldout")
    return (
        None
        if split is None or not split.labels
        else dataset.pack("heldout", about.length, whole=about.whole)
    )


# --- its folder ---------------------------------------------------------------------------------


def _take_folder(recipe: Recipe, folder: Path, resume: bool) -> Lock:
    """Makes the folder this recipe's, or sees that it is."""
    path = folder / RECIPE
    if not path.exists() and folder.exists() and not _is_empty(folder):
        raise FileExistsError(errno.EEXIST, "is there and holds no run: choose another folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder)
    if not path.exists():
        records.write_whole(path, json.dumps(recipe.plain(), indent=2) + "\n")
        return lock
    if not resume:
        raise FileExistsError(
            errno.EEXIST, "holds a run: go on with it by --resume auto, or choose another folder", str(folder)
        )
    a, b = (_deciding(one) for one in (sources.read_json(path), recipe.plain()))
    if different := sorted(key for key in a.keys() | b.keys() if not _agree(key, a.get(key), b.get(key))):
        raise CheckpointError(
            f"{folder} holds a run of another recipe, {different[0]} differs: go on with its own, or "
            "choose another folder"
        )
    return lock


def _is_empty(folder: Path) -> bool:
    """Whether nothing is in it but what a run that was killed at once may have left."""
    return folder.is_dir() and all(
        path.name == LOCK or path.name.startswith(f"{RECIPE}.") for path in folder.iterdir()
    )


def _clear_parts(folder: Path) -> None:
    """Removes what a killed run left half made: everything gets its own name only when it is whole."""
    for part in folder.glob("*.part"):
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()


FREE = frozenset(("train.micro_rows", "train.max_nonfinite", "train.checkpoint_layers", "train.compile"))
"""Keys that do not decide over the weights that come out (but for rounding), and may differ on resuming."""


def _deciding(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that do, flat."""
    tables = {part: recipe.get(part) for part in ("model", "data", "train", "lora")}
    flat = {
        f"{part}.{key}": value
        for part, table in tables.items()
        if isinstance(table, dict)
        for key, value in table.items()
    }
    return {key: value for key, value in flat.items() if key not in FREE}


def _agree(key: str, a: Any, b: Any) -> bool:
    """Whether two values are the same; of paths, whether one ends as the other: they may be written from
    different folders."""
    if key in PATHS and isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_agree(key, *pair) for pair in zip(a, b, strict=True))
    if key in PATHS and isinstance(a, str) and isinstance(b, str):
        one, other = ([part for part in Path(path).parts if part != ".."] for path in (a, b))
        shared = min(len(one), len(other))
        return a == b or (shared > 0 and one[-shared:] == other[-shared:])
    return a == b


# --- carrying it out ----------------------------------------------------------------------------


def carry_out(run: Run, report: Callable[[Record], None] = lambda record: None) -> int:
    """Takes the steps that are left and writes the model.

    Returns 0; or, if SIGINT or SIGTERM asked to stop before the last step, the signal's number: then the run
    was saved at the next step. The folder is free again afterwards, however it ends.

    Raises `DiskError` or `CheckpointError` when the disk is full or fails: earlier checkpoints stand, and the
    run can go on from them.
    """
    try:
        with _disk_errors(run):
            stopped_by = _take_steps(run, report)
            if not stopped_by and not (run.folder / MODEL).exists():
                draw(run.folder, run.recipe.name)
                export(run.folder, run.trainer.decoder, run.dataset, run.recipe.base)
            return stopped_by
    finally:
        run.lock.release()


_DRAW_EVERY_S = 30.0


def _take_steps(run: Run, report: Callable[[Record], None]) -> int:
    """Those that are left; the number of the signal that ended it, or 0."""
    recipe, trainer = run.recipe, run.trainer
    saved, last_drawn = trainer.step, time.monotonic()

    with StopRequest() as stop, Records(run.folder) as kept:

        def note(record: Record) -> None:
            kept.write(record)
            report(record)

        if trainer.step == 0 and recipe.base is not None and run.heldout is not None:
            note(_evaluation(0, _evaluate(run, run.heldout)))
        speed = matmul_flops_per_s(recipe.train.dtype) if trainer.step < recipe.train.steps else 0.0
        while trainer.step < recipe.train.steps and not stop.asked:
            note(_timed_step(run, speed))
            last = trainer.step == recipe.train.steps
            if run.heldout is not None and (last or _is_due(trainer.step, recipe.run.evaluate_every)):
                note(_evaluation(trainer.step, _evaluate(run, run.heldout)))
            if last or _is_due(trainer.step, recipe.run.sample_every):
                for sample in _samples(run):
                    note(sample)
            if last or _is_due(trainer.step, recipe.run.save_every):
                _save(run)
                saved = trainer.step
                if not last and time.monotonic() > last_drawn + _DRAW_EVERY_S:
                    draw(run.folder, recipe.name)
                    last_drawn = time.monotonic()
        if trainer.step != saved:
            _save(run)
        return stop.asked if trainer.step < recipe.train.steps else 0


def _save(run: Run) -> None:
    trainer = run.trainer
    state = {**trainer.counts(), **({"frozen": run.frozen} if run.frozen else {})}
    save(run.folder, trainer.step, trainer.tensors(), state, run.recipe.run.keep)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


_OF_THE_DISK = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS))


@contextmanager
def _disk_errors(run: Run) -> Iterator[None]:
    """Says of a disk that is full or fails what stands and what is needed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in _OF_THE_DISK:
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        there = sorted(path.name for path in run.folder.glob("step-*") if "tmp" not in path.name)
        needed = sum(tensor.nbytes for tensor in run.trainer.tensors().values())
        free = shutil.disk_usage(run.folder).free
        raise DiskError(
            f"{run.folder} could not be written to: {reason}; a checkpoint takes {needed:,} bytes and "
            f"{free:,} are free; {f'{there[-1]} stands' if there else 'there is no checkpoint yet'}: make "
            "room, then go on with --resume auto"
        ) from error


# --- what it tells ------------------------------------------------------------------------------


def _timed_step(run: Run, speed: float) -> Record:
    """`speed` is that of a matrix product on this machine, in FLOPs a second, which no step can reach."""
    start = time.perf_counter()
    step = run.trainer.update()
    seconds = time.perf_counter() - start
    flops_per_s = run.flops(step.documents) / seconds
    record: dict[str, Any] = {
        "step": step.number,
        "loss": step.loss,
        "lr": step.lr,
        "grad_norm": step.grad_norm,
        "labels": step.labels,
        "tokens": step.tokens,
        "seconds": seconds,
        "tokens_per_s": step.tokens / seconds,
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / speed,
        "resident_bytes": resident_bytes(),
    }
    if step.skipped:
        # JSON has no NaN.
        record |= {"loss": None, "grad_norm": None, "skipped": step.skipped}
    return record


def resident_bytes() -> int | None:
    """The memory that this process has in use; None where the system does not tell."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (ImportError, OSError):
        return None


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


# --- samples ------------------------------------------------------------------------------------


def _samples(run: Run) -> Iterator[Record]:
    """What the model makes of each beginning. The draws are a function of the seed, the step and the place in
    the recipe, so a run that goes on writes the same."""
    recipe, tokenizer, step = run.recipe, run.dataset.tokenizer, run.trainer.step
    for i, prompt in enumerate(recipe.run.samples):
        digest = hashlib.sha256(f"{recipe.train.seed}:{step}:sample:{i}".encode()).digest()
        params = SamplingParams(
            temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=int.from_bytes(digest[:7], "little")
        )
        tokens = generate(
            run.trainer.decoder,
            _prompt_ids(run, prompt),
            params,
            max_tokens=recipe.run.sample_tokens,
            stop_ids=tokenizer.eos_ids,
            vocab_limit=run.dataset.vocab_size,
        )
        ids = [token.id for token in tokens if token.finish != "stop"]
        yield {"step": step, "prompt": prompt, "text": tokenizer.decode(ids, start=False)}


def _prompt_ids(run: Run, prompt: str) -> list[int]:
    tokenizer = run.dataset.tokenizer
    if not run.recipe.run.sample_chat:
        return tokenizer.prompt(prompt)
    if tokenizer.chat_template is None:
        raise RecipeError("run.sample_chat: the tokenizer has no chat template")
    return ChatTemplate(tokenizer.chat_template).render([{"role": "user", "content": prompt}], tokenizer)


def _check_room(run: Run, prompt: str) -> None:
    """Now, and not after an hour."""
    length, most = len(_prompt_ids(run, prompt)), run.trainer.decoder.spec.max_positions
    if not 0 < length < most:
        raise RecipeError(f"run.samples: {prompt!r} has {length} tokens, and must have 1 to {most - 1}")
