"""`openbook diff`: two ways to run the same tokens, and the first step in which they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from openbook.cli import terminal
from openbook.cli.errors import FAILED, MissingExtraError, UsageError
from openbook.cli.options import Force, Json, Prompt, Quiet, Verbose

if TYPE_CHECKING:
    from openbook.model import Decoder
    from openbook.sources import Source
    from openbook.text import Tokenizer
    from openbook.trace import Report
    from openbook.trace.sides import Side

PROMPT = "The capital of France is Paris. Once upon a time, 3 + 4 was 7."
"""What is run if nothing else is asked for: short, since every step of every layer is kept."""

TOKENS = 16
"""The number of made-up ids for a model without a tokenizer."""

_WAYS = ("hf", "cached", "padded")
_DTYPES = ("fp32", "bf16", "fp16", "fp64")

SideA = Annotated[
    str,
    typer.Argument(
        metavar="A", help="MODEL, MODEL@bf16, cached:MODEL, padded:MODEL or hf:FOLDER.", show_default=False
    ),
]
SideB = Annotated[
    str | None,
    typer.Argument(metavar="B", help="The same; the reference.", show_default="hf:A for a folder"),
]


def run(
    a: SideA,
    b: SideB = None,
    prompt: Prompt = None,
    ids: Annotated[
        str | None,
        typer.Option(help="Token ids with commas between, in place of a text.", show_default=False),
    ] = None,
    cached: Annotated[bool, typer.Option("--cached", help="B is A in pieces through a KV cache.")] = False,
    padded: Annotated[bool, typer.Option("--padded", help="B is A in a batch, beside padding.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="B is A in fp32, bf16 or fp16.", show_default=False)
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Relative error allowed in the first layer.", show_default="by the dtypes"),
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Runs both sides on the same tokens; names the first step that differs, by how much, and why.

    A side is MODEL (ours, in fp32), MODEL@bf16 (in another dtype),
    cached:MODEL (through a KV cache, token by token),
    padded:MODEL (in a batch, beside padding) or hf:FOLDER (transformers).
    Exit code 1 if a step differs.
    """
    sides = _asked(a, b, cached, padded, dtype)
    sources = [_source(side) for side in sides]
    tokens, pieces = _tokens(prompt, ids, sources)
    import torch

    from openbook.cli.differences import print_report
    from openbook.trace.sides import compare, tolerance_of

    one, other = _load(sides, sources, force)
    if tolerance is None:
        tolerance = tolerance_of(one, other)
    report = compare(one, other, torch.tensor([tokens]), tolerance)
    if json:
        terminal.write_json("diff", _plain(report, sides, tokens, tolerance))
    else:
        for name, side in zip("AB", sides, strict=True):
            print(f"{terminal.paint(name, 'bold')}  {side.label}  {terminal.paint(side.words, 'dim')}")
        print_report(report, one.spec, tokens, pieces)
    if not report.ok:
        raise typer.Exit(FAILED)


# --- what is asked for --------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A side as it was named."""

    model: str
    way: Literal["plain", "cached", "padded", "hf"] = "plain"
    dtype: str = "fp32"

    @property
    def label(self) -> str:
        """'hf:tiny@bf16', as one would write it."""
        return f"{self.way}:{self.model}".removeprefix("plain:") + f"@{self.dtype}".removesuffix("@fp32")

    @property
    def words(self) -> str:
        how = {"hf": "transformers", "cached": "ours, through a cache", "padded": "ours, beside padding"}
        return f"{how.get(self.way, 'ours')}, {self.dtype}"


def parse_side(text: str) -> Asked:
    """'cached:smollm2-135m@bf16' → its parts. A name may hold colons and @ of its own."""
    way, colon, rest = text.partition(":")
    asked = Asked(rest, way) if colon and way in _WAYS else Asked(text)
    model, at, dtype = asked.model.rpartition("@")
    return replace(asked, model=model, dtype=dtype) if at and dtype in _DTYPES else asked


def _asked(a: str, b: str | None, cached: bool, padded: bool, dtype: str | None) -> tuple[Asked, Asked]:
    """Both sides. Without a B it is A run otherwise, or by transformers."""
    one = parse_side(a)
    if cached and padded:
        raise UsageError("--cached and --padded are two ways to run: ask for one of them")
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype} is none of {', '.join(_DTYPES)}")
    otherwise = cached or padded or dtype is not None
    if b is not None:
        if otherwise:
            raise UsageError(
                "--cached, --padded and --dtype make B out of A: leave out B, or name it cached:B"
            )
        return one, parse_side(b)
    if otherwise:
        way = "cached" if cached else "padded" if padded else one.way
        return one, replace(one, way=way, dtype=dtype or one.dtype)
    return one, replace(one, way="plain" if one.way == "hf" else "hf")


def _source(side: Asked) -> Source:
    from openbook.cli.loading import source_with_weights

    source = source_with_weights(side.model)
    if side.way != "hf":
        return source
    if source.kind != "safetensors" or source.path is None or not source.path.is_dir():
        raise UsageError(
            f"transformers runs a folder with config.json and .safetensors, which {side.model} is not: name "
            "another B, or compare A with itself by --cached, --padded or --dtype bf16"
        )
    if find_spec("transformers") is None:
        raise MissingExtraError(
            "hf: needs transformers: pip install transformers; or compare A with itself by --cached, "
            "--padded or --dtype bf16"
        )
    return source


def _tokens(prompt: str | None, ids: str | None, sources: list[Source]) -> tuple[list[int], list[str]]:
    """The ids to run, and the piece of text that each stands for, where a tokenizer knows."""
    from openbook.cli.generate import read_prompt
    from openbook.sources import NotFoundError

    vocabulary = min(source.spec.vocab_size for source in sources)
    longest = min(source.spec.max_positions for source in sources)
    if prompt is not None and ids is not None:
        raise UsageError("-p and --ids both say what to run: give one of them")
    tokenizer = _tokenizer(sources, must=prompt is not None)
    if ids is not None:
        tokens = _parsed(ids, vocabulary)
    elif prompt is not None:
        if tokenizer is None:
            raise NotFoundError(f"{sources[0].path} has no tokenizer: give token ids with --ids 1,2,3")
        tokens = tokenizer.prompt(read_prompt(prompt))
    elif tokenizer is not None:
        tokens = tokenizer.prompt(PROMPT)[:longest]
    else:
        tokens = [(7919 * i + 13) % vocabulary for i in range(min(TOKENS, longest))]
    if not tokens:
        raise UsageError("there are no tokens to run: give a text with -p or ids with --ids")
    if len(tokens) > longest:
        raise UsageError(
            f"{len(tokens)} tokens are more than the {longest} that the model is made for: give fewer"
        )
    return tokens, tokenizer.pieces(tokens) if tokenizer is not None else []


def _parsed(ids: str, vocabulary: int) -> list[int]:
    try:
        tokens = [int(part) for part in ids.split(",")]
    except ValueError:
        raise UsageError(f"--ids takes numbers with commas between, such as 1,2,3, found {ids!r}") from None
    wrong = [token for token in tokens if not 0 <= token < vocabulary]
    if wrong:
        raise UsageError(f"id {wrong[0]} is not in the vocabulary: ids are 0 to {vocabulary - 1:,}")
    return tokens


def _tokenizer(sources: list[Source], must: bool) -> Tokenizer | None:
    """The first side's tokenizer that there is. One that cannot be read is an error only if it must be."""
    from openbook.text import Tokenizer, TokenizerError

    for source in sources:
        try:
            if (found := Tokenizer.from_source(source)) is not None:
                return found
        except TokenizerError:
            if must:
                raise
    return None


# --- running ------------------------------------------------------------------------------------


def _load(sides: tuple[Asked, Asked], sources: list[Source], force: bool) -> tuple[Side, Side]:
    """Both sides, ready to run. Two of ours that differ in nothing but the way share their weights."""
    from openbook.trace.sides import ours, theirs
    from openbook.weights.load import load_decoder
    from openbook.weights.tensors import torch_dtype

    decoders: dict[tuple[str, str], Decoder] = {}

    def load(side: Asked, source: Source) -> Side:
        if side.way == "hf":
            return theirs(_transformers(source, side.dtype, force), source.spec, _stored_dtype(source))
        key = (str(source.weights), side.dtype)
        if key not in decoders:
            with terminal.Progress() as progress:
                decoders[key] = load_decoder(source, torch_dtype(side.dtype), force=force, progress=progress)
        return ours(decoders[key], side.way, _stored_dtype(source))

    one, other = (load(side, source) for side, source in zip(sides, sources, strict=True))
    return one, other


def _transformers(source: Source, dtype: str, force: bool) -> Any:
    from openbook.ledger import ledger
    from openbook.trace.hf import load_transformers
    from openbook.weights.fit import check_fit
    from openbook.weights.tensors import torch_dtype

    if not force:
        check_fit(f"the model in transformers, in {dtype},", ledger(source.spec, dtype).weight_bytes)
    with terminal.Status() as status:
        status("loading with transformers")
        return load_transformers(source.weights, torch_dtype(dtype))


def _stored_dtype(source: Source) -> str:
    """The type that most of a file's numbers have, 'q8_0'."""
    from openbook.weights.tensors import open_tensors

    counts: dict[str, int] = {}
    for tensor in open_tensors(source).stored.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + math.prod(tensor.shape)
    most = max(counts, key=counts.__getitem__, default="F32")
    return {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64"}.get(most, most.lower())


# --- telling ------------------------------------------------------------------------------------


def _plain(report: Report, sides: tuple[Asked, Asked], tokens: list[int], tolerance: float) -> dict[str, Any]:
    """The report as JSON-ready data; an infinite number is null."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def reason(name: str) -> dict[str, Any]:
        found = report.reasons[name]
        return {
            "step": name,
            "reason": found.text if found else None,
            "next": found.advice if found else None,
        }

    return {
        "equal": report.ok,
        "a": {"model": sides[0].model, "way": sides[0].way, "dtype": sides[0].dtype},
        "b": {"model": sides[1].model, "way": sides[1].way, "dtype": sides[1].dtype},
        "ids": tokens,
        "tolerance": tolerance,
        "first": report.first.name if report.first else None,
        "faults": [reason(name) for name in report.reasons],
        "steps": [
            {
                "name": row.name,
                "axes": list(row.axes),
                "shape": list(row.shapes[0]),
                "equal": row.ok,
                "max_abs": finite(row.max_abs),
                "relative": finite(row.relative),
                "allowed": row.allowed,
                "at": list(row.at),
                "a": finite(row.a),
                "b": finite(row.b),
            }
            for row in report.rows
        ],
        "in_one_model_only": report.missing,
        "not_compared": report.unseen,
    }
