"""What a recipe stands for: the spec, the dataset, and the model with its optimizer before the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from openbook import sources
from openbook.ledger import TensorRow, Workload, ledger
from openbook.model import Decoder, init_weights
from openbook.spec.hf import to_config
from openbook.spec.model import ModelSpec
from openbook.spec.reader import UnsupportedError
from openbook.text import Tokenizer
from openbook.train import data
from openbook.train.corpus import corpus_of
from openbook.train.loop import Samples, Trainer
from openbook.train.lora import add_lora, check_peft, lora_parameters, lora_rows
from openbook.train.optim import Optimizer, cosine, parameter_groups, warmup_stable_decay
from openbook.train.pack import Packed
from openbook.train.predict import Prediction, of_adapters, predict
from openbook.train.recipe import DataPart, Recipe, RecipeError, TrainPart
from openbook.weights.load import load_decoder

DATA = "data"
DEFAULT_HELD_OUT = 0.07

# --- the model's description --------------------------------------------------------------------


def spec_of(recipe: Recipe, vocab_size: int) -> ModelSpec:
    """The model's spec for a dataset's vocabulary.

    Raises what reading a spec raises, and `RecipeError` for a row that is too long for it, or a vocabulary
    that the model to begin with does not have.
    """
    if recipe.base is not None:
        spec = sources.spec(recipe.base)
        if vocab_size > spec.vocab_size:
            raise RecipeError(
                f"the dataset has {vocab_size:,} tokens, and {recipe.base} {spec.vocab_size:,}: take the "
                "tokenizer that it comes with"
            )
    elif "preset" in recipe.model:
        spec = sources.spec(recipe.model["preset"]).replace(vocab_size=vocab_size)
    else:
        spec = sources.spec({**recipe.model, "vocab_size": vocab_size})
    if recipe.data.length > spec.max_positions:
        raise RecipeError(
            f"data.length {recipe.data.length} is beyond the model's {spec.max_positions} positions"
        )
    return spec


def is_for_transformers(spec: ModelSpec) -> bool:
    """Whether some Hugging Face family describes the model; else it is exported in our own form."""
    try:
        to_config(spec)
    except UnsupportedError:
        return False
    return True


# --- its dataset --------------------------------------------------------------------------------


def vocabulary_of(about: DataPart) -> int | sources.Source:
    """What `data.build` is told: the size of a vocabulary to train, or the model whose tokenizer is taken."""
    return about.vocab if about.vocab is not None else sources.resolve(about.tokenizer or "")


def expected_vocab_size(recipe: Recipe) -> int:
    """The vocabulary's size before there is a dataset: of one that is to be trained, the most it may get."""
    about = recipe.data
    if recipe.base is not None:
        return sources.spec(recipe.base).vocab_size
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


def dataset_of(recipe: Recipe, folder: Path, progress: data.Progress | None = None) -> data.Dataset:
    """The dataset that the recipe names, or that the run in `folder` makes of its sources, once.

    Raises `RecipeError` for one whose tokens are not those of the model to begin with.
    """
    about = recipe.data
    if about.folder is None and not (folder / DATA).exists():
        held_out = DEFAULT_HELD_OUT if about.held_out is None else about.held_out
        data.build(folder / DATA, corpus_of(about.sources), vocabulary_of(about), held_out, progress)
    dataset = data.open_dataset(folder / DATA if about.folder is None else about.folder)
    if recipe.base is not None:
        check_same_tokens(dataset, sources.resolve(recipe.base))
    return dataset


def check_same_tokens(dataset: data.Dataset, model: sources.Source) -> None:
    """An id has to mean what it meant when the model learned it; raises `RecipeError` where one does not.
    Of a model without a tokenizer nothing can be told."""
    theirs = Tokenizer.from_source(model)
    if theirs is None:
        return
    ours, name = dataset.tokenizer, model.spec.name
    if ours.vocab_size > model.spec.vocab_size:
        raise RecipeError(f"the dataset has {ours.vocab_size:,} tokens, and {name} {model.spec.vocab_size:,}")
    for i in range(min(ours.vocab_size, theirs.vocab_size)):
        if ours.token(i) != theirs.token(i):
            raise RecipeError(
                f"token {i} of the dataset is {ours.token(i)!r}, and {theirs.token(i)!r} for {name}: make "
                f"the dataset with --tokenizer {name}"
            )


# --- before it runs -----------------------------------------------------------------------------


def prediction(recipe: Recipe, vocab_size: int | None = None) -> Prediction:
    """What the recipe will take; without `vocab_size` at most. The FLOPs are the most they can be, of
    rows that are single documents (`flops_of` is exact). Raises what `spec_of` raises."""
    spec = spec_of(recipe, expected_vocab_size(recipe) if vocab_size is None else vocab_size)
    lora = recipe.lora
    adapters = lora_parameters(spec, lora.rank, lora.targets) if lora else 0
    predicted = predict(spec, recipe.train, recipe.data.length, adapters=adapters)
    most = "each row as one document: less where several are packed into it"
    return replace(predicted, conventions=(*predicted.conventions, most))


def flops_of(recipe: Recipe, spec: ModelSpec) -> Callable[[tuple[int, ...]], int]:
    """Lengths of the documents in a step's rows → its FLOPs: what each document takes by itself, since none
    sees another; padding takes none."""
    book = ledger(spec, "fp32")

    def flops(documents: tuple[int, ...]) -> int:
        step = book.totals(Workload("train", new=sum(documents), documents=documents))
        return step.flops if recipe.lora is None else of_adapters(step.flops)

    return flops


def schedule_of(train: TrainPart) -> Callable[[int], float]:
    """Step → part of the peak learning rate."""
    if train.schedule == "cosine":
        return lambda step: cosine(step, train.steps, train.warmup, train.minimum)
    return lambda step: warmup_stable_decay(step, train.steps, train.warmup, train.decay or 0, train.minimum)


# --- the model before its first step ------------------------------------------------------------


def trainer_of(recipe: Recipe, spec: ModelSpec, samples: Packed) -> Trainer:
    """A new model, or the one to begin with, and what trains it. Raises `UnsupportedError` for adapters that
    could not be saved for peft."""
    train, lora = recipe.train, recipe.lora
    decoder = init_weights(Decoder(spec), train.seed) if recipe.base is None else _loaded(recipe.base)
    rows = ledger(decoder.spec).tensors
    if lora is not None:
        add_lora(decoder, lora.rank, lora.alpha, lora.targets, train.seed)
        check_peft(decoder, sources.resolve(recipe.base or "").family)
        rows = [*rows, *lora_rows(decoder.spec, lora.rank, lora.targets)]
    return trainer_around(decoder, rows, train, samples, schedule_of(train))


def trainer_around(
    decoder: Decoder,
    rows: Sequence[TensorRow],
    train: TrainPart,
    samples: Samples,
    schedule: Callable[[int], float],
) -> Trainer:
    """What trains this model as `train` says; `rows` are the ledger's for its parameters."""
    return Trainer(
        decoder,
        Optimizer(
            parameter_groups(decoder, rows), train.lr, train.weight_decay, muon=train.optimizer == "muon"
        ),
        samples,
        schedule,
        train.rows,
        train.micro_rows,
        train.clip,
        train.z_weight,
        train.dtype == "bf16",
        train.max_nonfinite,
        balance=train.balance,
        checkpoint_layers=train.checkpoint_layers,
        compile=train.compile,
    )


def _loaded(base: str) -> Decoder:
    """The model in fp32, in memory of its own: what comes out of a mapped file is not to be written to."""
    decoder = load_decoder(base, torch.float32)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.clone()
    return decoder


def fingerprint(decoder: Decoder) -> str | None:
    """The SHA-256 of the weights that are not learned and in no checkpoint; None if all are."""
    frozen = sorted((name, p) for name, p in decoder.named_parameters() if not p.requires_grad)
    if not frozen:
        return None
    digest = hashlib.sha256()
    for name, parameter in frozen:
        digest.update(name.encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
