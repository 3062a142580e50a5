"""What the server knows: open models, and the runs that are kept of them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from openbook import models
from openbook.infer.sample import RequestError
from openbook.ledger import Ledger
from openbook.ledger.table import human_bytes
from openbook.lm import MISSING_TOKENIZER, LanguageModel
from openbook.serve import books, formulas, training
from openbook.serve import pieces as pieces_of
from openbook.serve.errors import ApiError
from openbook.serve.pieces import Message, Prompt
from openbook.serve.store import Store
from openbook.serve.worker import Worker
from openbook.sources import Source, resolve
from openbook.spec.model import ModelSpec
from openbook.spec.presets import PRESETS
from openbook.text import ChatTemplate, Tokenizer
from openbook.trace import Trace, head_groups, record
from openbook.trace.tensors import dtype_of
from openbook.weights.fit import WontFitError, check_fit
from openbook.weights.load import choose_dtype, load_decoder
from openbook.weights.tensors import open_tensors
from openbook.weights.verify import MisfitError, check

MAX_OPEN = 8
"""Models that are open at once: of each its spec and its tokenizer are in memory."""

MAX_LOADED = 2
"""Models whose weights are in memory at once: two can be compared."""

MAX_DERIVED = 8
"""Answers that a run remembers: each is small beside its tensors."""

CHARS_PER_TOKEN = 32
"""Characters of a prompt that are read for each token that a trace may have."""

T = TypeVar("T")


@dataclass(eq=False)
class Model:
    """An open model: what its file says, and what a run of it may be. Its weights are loaded when needed."""

    id: str
    name: str
    source: Source
    spec: ModelSpec
    dtype: str
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    max_tokens: int

    @property
    def has_weights(self) -> bool:
        return self.source.kind != "spec"

    def require_weights(self) -> None:
        """Raises `ApiError` for a model that is only described."""
        if not self.has_weights:
            raise ApiError(
                422, "the model has no weights", "it is only described", "open a fetched model or a file"
            )

    @property
    def max_chars(self) -> int:
        """Characters of a prompt that are looked at."""
        return CHARS_PER_TOKEN * self.max_tokens

    def settle(self, spec: ModelSpec) -> None:
        """Takes the spec that the weights turned out to have: a head may be stored that is declared tied."""
        if spec != self.spec:
            self.spec = spec
            self.__dict__.pop("plain", None)

    def text(self, token: int) -> str:
        """What a token shows."""
        return pieces_of.token_text(self.tokenizer, token)

    @cached_property
    def plain(self) -> dict[str, Any]:
        """For the page."""
        source = self.source
        return {
            "id": self.id,
            "name": self.name,
            "family": source.family or "",
            "has_weights": self.has_weights,
            "has_tokenizer": self.tokenizer is not None,
            "has_chat": self.template is not None,
            "dtype": self.dtype,
            "params": Ledger(self.spec).params.total,
            "spec": books.spec_numbers(self.spec),
            "heads": heads_of(self.spec),
            "limits": {"tokens": self.max_tokens, "prompt_chars": self.max_chars},
            "source": {"kind": source.kind, "path": str(source.path) if source.path else None},
        }


def heads_of(spec: ModelSpec) -> list[dict[str, int]]:
    """The heads of every layer. In latent attention each has keys and values of its own."""
    return [
        {
            "layer": layer,
            "n_heads": block.attn.n_heads,
            "n_kv_heads": len(head_groups(spec, layer)),
        }
        for layer, block in enumerate(spec.layers)
    ]


Heads = tuple[tuple[int, int], ...]


@dataclass(eq=False)
class Run:
    """One pass over a prompt, with all its tensors."""

    id: str
    model: Model
    prompt: Prompt
    ablate: Heads
    trace: Trace
    seconds: float
    derived: dict[str, Any] = field(default_factory=dict)
    """What has been computed from the tensors and may be asked for again, the youngest last."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        choices = sum(chosen.nbytes for chosen in self.trace.choices.values())
        return self.trace.bytes + choices

    def remembered(self, name: str, compute: Callable[[], T]) -> T:
        """What was computed under this name, if that was not long ago, or is computed now."""
        found = self.derived.pop(name, None) or compute()
        self.derived[name] = found
        while len(self.derived) > MAX_DERIVED:
            self.derived.pop(next(iter(self.derived)), None)
        return found

    @property
    def short(self) -> dict[str, Any]:
        """For a list of runs."""
        return {
            "id": self.id,
            "model": self.model.id,
            "text": self.prompt.text[:200],
            "tokens": len(self.prompt.ids),
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "ablate": self.ablate,
        }

    @cached_property
    def plain(self) -> dict[str, Any]:
        """For the page: every step with its numbers, and the tensors' statistics."""
        spec = self.trace.spec
        return {
            **self.short,
            "text": self.prompt.text,
            "ids": self.prompt.ids,
            "pieces": pieces_of.pieces(self.model.tokenizer, self.prompt.ids, self.prompt.origins),
            "dtype": self.trace.dtype,
            "n_layers": spec.n_layers,
            "heads": heads_of(spec),
            "steps": [self._step(step) for step in self.trace.steps],
        }

    def _step(self, step: Any) -> dict[str, Any]:
        row, said = self.trace.rows[step.name], formulas.describe(self.trace.spec, step.name)
        stats = step.statistics
        return {
            "name": step.name,
            "layer": step.layer,
            "local": step.local,
            "kind": said.kind,
            "axes": step.axes,
            "shape": step.shape,
            "dtype": step.dtype,
            "stats": {name: getattr(stats, name) for name in _STATISTICS},
            "flops": row.flops,
            "flops_formula": row.formula,
            "bytes": row.activation_bytes,
            "weight_bytes": row.weight_bytes,
            "seconds": step.seconds,
            "formula": said.formula,
            "inputs": said.inputs,
            "edited": step.edited,
        }


_STATISTICS = ("low", "high", "mean", "std", "l2", "nan", "inf")


class Explorer:
    """The models and runs of one server. Its methods may be called from any thread; what needs a model's
    weights is a job for the worker, and comes as a `Future`."""

    def __init__(self, store_bytes: int, folders: Sequence[str] = (), version: str = "") -> None:
        self.store: Store[Run] = Store(store_bytes)
        self.worker = Worker()
        self.folders, self.version = folders, version
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Model] = OrderedDict()
        self._loaded: OrderedDict[str, LanguageModel] = OrderedDict()
        self._making: dict[str, Future[Run]] = {}

    # --- models ---

    def models(self) -> list[Model]:
        """Those that are open."""
        with self._lock:
            return list(self._open.values())

    def model(self, name: str) -> Model:
        """The open model of this id. Raises `ApiError`."""
        with self._lock:
            if name not in self._open:
                raise ApiError(404, "no such model", "it is not open", "open it again")
            self._open.move_to_end(name)
            return self._open[name]

    def open(self, name: str) -> Model:
        """Opens what `sources.resolve` finds under the name; a model that is open already is the same one.

        Headers are read and every tensor's shape is checked, but no weight. Raises what `resolve`, the
        readers of files, `Tokenizer` and `ChatTemplate` raise, and `MisfitError`.
        """
        source = resolve(name)
        identity = _identity(source)
        with self._lock:
            if identity in self._open:
                self._open.move_to_end(identity)
                return self._open[identity]
        opened = self._opened(identity, name, source)
        with self._lock:
            while len(self._open) >= MAX_OPEN:
                self._open.popitem(last=False)
            return self._open.setdefault(identity, opened)

    def _opened(self, identity: str, name: str, source: Source) -> Model:
        dtype = "fp32"
        if source.kind != "spec":
            tensors = open_tensors(source)
            rows = check(source, tensors)
            if misfits := [row for row in rows if not row.ok]:
                raise MisfitError(tensors.path, misfits)
            found = [(row.place, row.stored) for row in rows if row.place and row.stored]
            dtype = dtype_of(torch.empty(0, dtype=choose_dtype(None, source, found, torch.float32)))
        tokenizer = Tokenizer.from_source(source)
        template = ChatTemplate(tokenizer.chat_template) if tokenizer and tokenizer.chat_template else None
        fits = books.longest_trace(books.trace_growth(source.spec, dtype), self.store.limit)
        limit = min(fits, source.spec.max_positions)
        return Model(identity, name, source, source.spec, dtype, tokenizer, template, limit)

    def weights(self, model: Model) -> LanguageModel:
        """The running model, for the worker's thread alone. Raises what `load_decoder` raises.

        Quantised weights are widened to fp32; every step runs in PyTorch.
        """
        model.require_weights()
        if model.id in self._loaded:
            self._loaded.move_to_end(model.id)
            return self._loaded[model.id]
        while len(self._loaded) >= MAX_LOADED:
            self._loaded.popitem(last=False)
        try:
            decoder = load_decoder(model.source)
        except WontFitError:
            if not self._loaded:
                raise
            self._loaded.clear()
            decoder = load_decoder(model.source)
        loaded = LanguageModel(decoder, model.tokenizer, model.template, model.source, native=False)
        self._loaded[model.id] = loaded
        model.settle(decoder.spec)
        return loaded

    # --- prompts ---

    def prompt(
        self,
        model: Model,
        text: str | None = None,
        ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        chat: bool = False,
        system: str | None = None,
        longest: int | None = None,
    ) -> Prompt:
        """The tokens of exactly one of text, ids and messages. Raises `ApiError`, `RequestError`, and what
        the tokenizer and the template raise.

        `longest` is how many tokens there may be: as many as a trace holds. Long texts are refused before
        they are tokenised.
        """
        if sum(given is not None for given in (text, ids, messages)) != 1:
            raise RequestError("prompt", "give one of text, ids and messages")
        most = model.max_tokens if longest is None else longest
        if ids is not None:
            found = Prompt(list(ids), "", ["content"] * len(ids))
            for token in found.ids:
                if not 0 <= token < model.spec.vocab_size:
                    raise RequestError("ids", f"{token} is no token id: 0 to {model.spec.vocab_size - 1}")
            if model.tokenizer is not None:
                known = [token for token in found.ids[: most + 1] if token < model.tokenizer.vocab_size]
                found = Prompt(found.ids, model.tokenizer.decode(known, skip_special=False), found.origins)
        else:
            found = self._text_prompt(model, text, messages, chat, system, CHARS_PER_TOKEN * most)
        if not found.ids:
            raise RequestError("prompt", "is empty: give at least one token")
        if len(found.ids) > most:
            raise _too_long(model, f"{len(found.ids):,} tokens", f"{most:,} tokens", self.store.limit)
        return found

    def _text_prompt(
        self,
        model: Model,
        text: str | None,
        messages: Sequence[Message] | None,
        chat: bool,
        system: str | None,
        most: int,
    ) -> Prompt:
        if model.tokenizer is None:
            raise RequestError("prompt", MISSING_TOKENIZER)
        if messages is None and (chat or system is not None):
            chat = True
            spoken = [("system", system)] if system else []
            messages = [{"role": role, "content": said} for role, said in (*spoken, ("user", text))]
        n_chars = len(text or "") if messages is None else sum(map(_chars, messages))
        if n_chars > most:
            raise _too_long(model, f"{n_chars:,} characters", f"{most:,} characters", self.store.limit)
        if messages is None:
            return pieces_of.of_text(model.tokenizer, text or "")
        if model.template is None:
            raise ApiError(422, "no chat", "the model came without a chat template", "send it as plain text")
        return pieces_of.of_chat(model.tokenizer, model.template, messages)

    # --- runs ---

    def run(self, name: str) -> Run:
        """The run of this id. Raises `ApiError` if it is not kept (any more)."""
        found = self.store.get(name)
        if found is None:
            raise ApiError(404, "no such run", "it is not kept any more", "run the prompt again")
        return found

    def start_run(
        self, model: Model, prompt: Prompt, ablate: Collection[tuple[int, int]] = ()
    ) -> Future[Run]:
        """The run of a prompt. One that is kept, or being made for someone else, is not made again.

        Raises `ApiError` if it would not fit, or the worker has too much to do.
        """
        heads = tuple(sorted(set(ablate)))
        name = _digest(model.id, prompt.ids, heads)
        with self._lock:
            if (kept := self.store.get(name)) is not None:
                return _done(kept)
            if name in self._making:
                return self._making[name]
            future = self.worker.submit(lambda: self._make_run(name, model, prompt, heads))
            self._making[name] = future
        future.add_done_callback(lambda _: self._made(name))
        return future

    def _made(self, name: str) -> None:
        with self._lock:
            self._making.pop(name, None)

    def _make_run(self, name: str, model: Model, prompt: Prompt, ablate: Heads) -> Run:
        growth = books.trace_growth(model.spec, model.dtype)
        tokens = len(prompt.ids)
        needed = growth[0] * tokens + growth[1] * tokens**2
        what = f"a trace of {tokens:,} tokens"
        with self.store.room(needed, what):
            decoder = self.weights(model).decoder
            check_fit(what, needed)
            begun = time.perf_counter()
            trace = record(decoder, torch.tensor([prompt.ids]), ablate=ablate, time=True)
            trace = replace(trace, parameters={})  # a run that is kept must not keep a model's weights
            run = Run(name, model, prompt, ablate, trace, time.perf_counter() - begun)
            run.plain  # noqa: B018  (statistics take a second of a long run, and this thread has the time)
        self.store.put(run)
        return run

    # --- the state ---

    def state(self) -> dict[str, Any]:
        """What is open and kept, and what could be opened."""
        return {
            "version": self.version,
            "models": [{"id": each.id, "name": each.name, "open": True} for each in self.models()],
            "available": available(self.folders),
            "store": {
                "bytes": self.store.nbytes,
                "limit": self.store.limit,
                "runs": [run.short for run in self.store],
            },
            "limits": {"ledger_tokens": books.MAX_TOKENS},
        }


def available(folders: Sequence[str]) -> list[dict[str, Any]]:
    """Models by name: those that are fetched, those that training runs have made, and presets."""
    fetched = [name for name in models.MODELS if models.is_fetched(name)]
    made = [name for name, folder in training.folders(folders).items() if (folder / training.MODEL).is_dir()]
    described = [name for name in PRESETS if name not in fetched]
    return [
        *({"name": name, "kind": "fetched", "has_weights": True} for name in fetched),
        *({"name": name, "kind": "run", "has_weights": True} for name in made),
        *({"name": name, "kind": "preset", "has_weights": False} for name in described),
    ]


def _identity(source: Source) -> str:
    """A name for an address: readable, and another one for another file, or for the file once it changed."""
    spec = source.spec
    stamp: Any = None
    if source.path is not None:
        status = source.path.stat()
        stamp = (str(source.path.resolve()), status.st_mtime_ns)
    slug = re.sub(r"[^a-z0-9]+", "-", (spec.name or "model").lower()).strip("-")[:40]
    return f"{slug}-{_digest(spec.name, stamp, source.kind)[:6]}"


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _chars(message: Message) -> int:
    return len(json.dumps(message, ensure_ascii=False))


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _too_long(model: Model, found: str, most: str, limit: int) -> ApiError:
    return ApiError(
        413,
        "the prompt is too long",
        f"it has {found}, and at most {most} of {model.name} fit ({human_bytes(limit)} for runs, "
        f"{model.spec.max_positions:,} positions)",
        "take a shorter prompt, or start with a larger --store",
    )
