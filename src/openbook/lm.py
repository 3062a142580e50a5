"""A language model: decoder, tokenizer and generation joined. It is what `openbook.load` returns.

lm = openbook.load("smollm2-135m")
for piece in lm.generate("The capital of France is", max_tokens=20, temperature=0):
    print(piece, end="")
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, TypedDict, Unpack, cast

import torch

from openbook.infer.cache import Cache
from openbook.infer.generate import Stats, Token, cache_for, generate, reuse
from openbook.infer.sample import RequestError, SamplingParams
from openbook.ledger import Ledger
from openbook.model import Decoder
from openbook.native import NativeDecoder, accelerate
from openbook.sources import Source, resolve
from openbook.spec.model import ModelSpec
from openbook.text import ChatTemplate, StopStrings, TextStream, Tokenizer
from openbook.trace import Trace, record, trace_bytes
from openbook.trace.edits import Heads, Patch
from openbook.trace.names import Selection
from openbook.trace.tensors import dtype_of
from openbook.weights.blocks import Blocks, quantised_matrices
from openbook.weights.fit import check_fit
from openbook.weights.load import Progress, load_decoder

DEFAULT_CONTEXT = 8192
"""Tokens of prompt and answer together, for models that could take more: a cache costs memory."""

MISSING_TOKENIZER = "the model came without a tokenizer: give token ids, and read ids with .tokens()"


class Sampling(TypedDict, total=False):
    """The fields of `SamplingParams`, as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None


@dataclass
class _Kept:
    """A cache, and the tokens whose keys and values it holds (and perhaps some more)."""

    cache: Cache
    ids: list[int] = field(default_factory=list)


class LanguageModel:
    """Text in, text out. `tokenizer` and `chat_template` are None if the model came without.

    `decoder` is the PyTorch model; `engine` what generates: the same, or its native twin. What the last
    call did and how fast is in `stats`. The KV cache of the last call is kept, so that a prompt which
    begins like it (the next turn of a chat) computes only what is new. Use it from one thread at a time.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        source: Source | None = None,
        *,
        context: int | None = None,
        native: bool = True,
        blocks: Mapping[str, Blocks] | None = None,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.source = source
        self.context = _checked_context(decoder.spec, context)
        self.engine: Decoder | NativeDecoder = accelerate(decoder, blocks) if native else decoder
        self.stats = Stats()
        self._kept: _Kept | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        on_progress: Callable[[int, int], None] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Iterator[str]:
        """Continues the prompt; yields the text in pieces, never half a character or part of a stop string.

        It ends at `max_tokens`, at a `stop` string, at a token that ends a text for this model, or when
        the context is full; `stats.finish` says which. Text that looks like a control token is
        text. Without `temperature` tokens are drawn from the model's own distribution; 0 is greedy.

        Raises `RequestError` at once if the request makes no sense.
        """
        tokenizer = self._text_tokenizer()
        stops = _stop_strings(stop)
        tokens = self.tokens(prompt, max_tokens=max_tokens, on_progress=on_progress, **sampling)
        return _text(tokens, TextStream(tokenizer, start=False), stops, self.stats)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        **sampling: Unpack[Sampling],
    ) -> str:
        """The whole text that `generate` yields in pieces."""
        return "".join(self.generate(prompt, max_tokens=max_tokens, stop=stop, **sampling))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        variables: Mapping[str, Any] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Iterator[str]:
        """The assistant's answer to [{"role": "user", "content": "..."}, ...], as `generate` yields it.

        The model's own template makes the prompt, with `variables` (`{"enable_thinking": False}`) for it;
        nothing a message says becomes a control token.
        """
        ids = self.chat_ids(messages, **(variables or {}))
        return self.generate(ids, max_tokens=max_tokens, stop=stop, on_progress=on_progress, **sampling)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The prompt that `chat` makes of the messages."""
        if self.chat_template is None:
            raise RequestError("messages", "the model came without a chat template: use .generate()")
        return self.chat_template.render(messages, self._text_tokenizer(), **variables)

    def tokens(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop_ids: Collection[int] | None = None,
        logprobs: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generator[Token]:
        """The answer as `Token`s (id, log-probability, why it ended), the one that ended it included.

        Needs no tokenizer if the prompt is given as ids. `stop_ids` defaults to the tokenizer's `eos_ids`.
        """
        ids = self._text_tokenizer().prompt(prompt) if isinstance(prompt, str) else list(prompt)
        if stop_ids is None:
            stop_ids = self.tokenizer.eos_ids if self.tokenizer else ()
        params, stats = SamplingParams(**sampling), Stats()
        kept = self._take_cache(ids)
        tokens = generate(
            self.engine,
            ids,
            params,
            max_tokens=self.context if max_tokens is None else max_tokens,
            stop_ids=stop_ids,
            cache=kept.cache,
            vocab_limit=self.tokenizer.vocab_size if self.tokenizer else None,
            logprobs=logprobs,
            stats=stats,
            on_progress=on_progress,
        )
        self.stats = stats
        return self._keeping(tokens, kept)

    def trace(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        only: Selection = None,
        patch: Patch | None = None,
        ablate: Heads = (),
        time: bool = False,
        force: bool = False,
    ) -> Trace:
        """One pass over a text, ids, or the messages of a chat, with every step kept under its name.

        `only` says which steps: a name or pattern ("layers.3.attn.*"), several of them, or a function of a
        name. `patch` edits them while the pass goes on ({"layers.3.attn.o": lambda x: 0 * x}); `ablate`
        zeroes what heads, each (layer, head), find. Names may be TransformerLens's. `time` measures the
        steps. It is the PyTorch model that runs, and nothing of it is changed afterwards.

        Raises `RequestError` for a request that makes no sense, `WontFitError` for a trace that needs more
        memory than there is, before anything of it is made, unless it is to `force`.
        """
        ids, device = self.prompt_ids(prompt), self.decoder.embed.weight.device
        if not force:
            check_fit(f"a trace of {len(ids):,} tokens", self.trace_bytes(len(ids), only), str(device))
        batch = torch.tensor([ids], device=device)
        trace = record(self.decoder, batch, only=only, patch=patch, ablate=ablate, time=time)
        pieces = (tuple(self.tokenizer.pieces(ids)),) if self.tokenizer else ()
        # A trace that is kept must not keep the weights of a model that is no longer wanted.
        return replace(trace, pieces=pieces, model=self.spec.name, parameters={})

    def trace_bytes(self, tokens: int, only: Selection = None) -> int:
        """Bytes of the trace of so many tokens, told before it is made."""
        return trace_bytes(self.spec, dtype_of(self.decoder.embed.weight), 1, tokens, only=only)

    def prompt_ids(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a text, of the messages of a chat, or these ids themselves. Raises `RequestError` for
        none, for one that the model does not have, or for more than it has positions for."""
        if isinstance(prompt, str):
            ids = self._text_tokenizer().prompt(prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self.chat_ids(cast("Sequence[Mapping[str, Any]]", prompt))
        else:
            ids = list(cast("Sequence[int]", prompt))
        if not 0 < len(ids) <= self.spec.max_positions:
            raise RequestError(
                "prompt", f"must be 1 to {self.spec.max_positions:,} tokens, found {len(ids):,}"
            )
        for token in ids:
            if type(token) is not int or not 0 <= token < self.spec.vocab_size:
                raise RequestError("prompt", f"{token!r} is no token id: 0 to {self.spec.vocab_size - 1}")
        return ids

    def _take_cache(self, ids: list[int]) -> _Kept:
        """The kept cache, cut to what `ids` begin with, or a new one. Whoever takes it has it alone:
        two answers that are read by turns never share one."""
        kept, self._kept = self._kept, None
        if kept is None:
            kept = _Kept(cache_for(self.decoder, 1, self.context))
        reuse(kept.cache, kept.ids, ids)
        kept.ids = ids
        return kept

    def _keeping(self, tokens: Iterator[Token], kept: _Kept) -> Generator[Token]:
        """The tokens; however that ends, the cache is there for the next call."""
        try:
            for token in tokens:
                kept.ids.append(token.id)
                yield token
        finally:
            self._kept = kept

    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("prompt", MISSING_TOKENIZER)
        return self.tokenizer


def load(
    source: str | PathLike[str] | Source,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    context: int | None = None,
    native: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> LanguageModel:
    """The running model of a folder, a .gguf file or a fetched model's name.

    `dtype`: as given, else the configuration's, else the file's own. Quantised weights stay as they are
    for single tokens, whose steps decode them exactly; prompts are computed in bf16 where the processor
    multiplies that, else in fp32. With a `dtype` everything is computed from weights of that type.
    `threads` are PyTorch's, for the whole process.
    `context` is how many tokens prompt and answer may have together, up to the spec's `max_positions`;
    8192 if that is less. Without `native` every step runs in PyTorch. `force` loads what would not fit.

    Raises what `sources.resolve`, `Tokenizer` and `load_decoder` raise; `WontFitError` for the cache too.
    """
    if threads is not None:
        if threads < 1:
            raise RequestError("threads", f"must be at least 1, found {threads}")
        torch.set_num_threads(threads)
    found = source if isinstance(source, Source) else resolve(source)
    context = _checked_context(found.spec, context)
    tokenizer = Tokenizer.from_source(found)
    template = ChatTemplate(tokenizer.chat_template) if tokenizer and tokenizer.chat_template else None
    decoder = load_decoder(found, dtype, device, quantised=fast_dtype(), force=force, progress=progress)
    blocks = quantised_matrices(found) if native and dtype is None else None
    if not force:
        needed = Ledger(decoder.spec).kv_bytes(1, context, str(decoder.embed.weight.dtype))
        check_fit(f"a KV cache for {context:,} tokens", needed, str(device))
    return LanguageModel(decoder, tokenizer, template, found, context=context, native=native, blocks=blocks)


def fast_dtype() -> torch.dtype:
    """bf16 where the processor has instructions to multiply it, which makes prompts twice as fast."""
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_bf16") else torch.float32


def _text(tokens: Generator[Token], text: TextStream, stops: StopStrings, stats: Stats) -> Iterator[str]:
    """The text of the tokens, without the one that stopped them, up to a stop string."""
    with closing(tokens):
        for token in tokens:
            if token.finish == "stop":
                break
            if piece := stops.push(text.push(token.id)):
                yield piece
            if stops.stopped is not None:
                stats.finish = "stop"
                return
    if rest := stops.push(text.flush()) + stops.flush():
        yield rest


def _checked_context(spec: ModelSpec, context: int | None) -> int:
    if context is None:
        return min(spec.max_positions, DEFAULT_CONTEXT)
    if not 1 <= context <= spec.max_positions:
        raise RequestError("context", f"must be from 1 to the model's {spec.max_positions}, found {context}")
    return context


def _stop_strings(stop: str | Iterable[str]) -> StopStrings:
    try:
        return StopStrings([stop] if isinstance(stop, str) else stop)
    except ValueError as error:
        raise RequestError("stop", str(error)) from None
