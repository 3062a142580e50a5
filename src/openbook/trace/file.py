"""A trace in one file: safetensors, with what is no tensor as JSON in its metadata.

metadata    "format": "openbook.trace/1"
            "trace": JSON: spec, dtype, past, model, pieces, seconds, edited, statistics
tensors     the steps, under their names and in the ledger's shapes
            of `attn.masked`, where the scores are there too, only who sees whom: BOOL [B or 1, 1, T, S]
            "trace/ids", "trace/positions" I64 [B, T]; "trace/keys/LAYER" I64 [B, S];
            "trace/experts/LAYER" I64 [B, T, A]

The weights of the model are not in it. Nothing a file says is believed: every step must be one of the
spec's ledger, in its shape.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from openbook.files.errors import FileError
from openbook.files.safetensors import SafetensorsFiles, StoredTensor, read_header
from openbook.files.strict_json import kind_of, parse_object
from openbook.ledger import LedgerError, OpRow
from openbook.spec.model import Experts, ModelSpec, SpecError, from_dict, to_dict
from openbook.trace.rows import axes_of, op_rows
from openbook.trace.tensors import DTYPES, Masked, Statistics, Tensors

if TYPE_CHECKING:
    from openbook.trace.schema import Trace

FORMAT = "openbook.trace/1"

_IDS, _POSITIONS, _KEYS, _EXPERTS = "trace/ids", "trace/positions", "trace/keys/", "trace/experts/"
_MASKED, _CHOSEN = ".attn.masked", ".mlp.chosen"
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_STORED |= {torch.bool: "BOOL", torch.int64: "I64"}
_FLOATS = ("F32", "BF16", "F16", "F64")
_MAX_PAST = 1 << 40
"""Tokens in a cache before the run: more than any memory, few enough for every number that follows."""


# --- writing ------------------------------------------------------------------------------------


def write(trace: Trace, path: Path) -> None:
    """Writes tensor after tensor beside `path`, and then gives the file its name."""
    tensors = dict(_stored(trace))
    header = _header(trace, tensors)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("wb") as out:
            out.write(len(header).to_bytes(8, "little"))
            out.write(header)
            for x in tensors.values():
                if x.numel():
                    x = x.detach().cpu().contiguous().reshape(-1)
                    out.write(x.view(torch.uint8).numpy().data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _stored(trace: Trace) -> Iterator[tuple[str, Tensor]]:
    yield _IDS, trace.ids
    yield _POSITIONS, trace.positions
    for layer, keys in trace.keys.items():
        yield f"{_KEYS}{layer}", keys
    for name, experts in trace.choices.items():
        yield f"{_EXPERTS}{_layer(name)}", experts
    held = trace.tensors.held if isinstance(trace.tensors, Tensors) else trace.tensors
    for name, x in held.items():
        yield name, x.visible if isinstance(x, Masked) else x


def _header(trace: Trace, tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "trace": _json(_about(trace))}}
    begin = 0
    for name, x in tensors.items():
        end = begin + x.numel() * x.element_size()
        entries[name] = {"dtype": _STORED[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
        begin = end
    text = _json(entries).encode()
    return text + b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8, as readers like it


def _about(trace: Trace) -> dict[str, Any]:
    return {
        "spec": to_dict(trace.spec),
        "dtype": trace.dtype,
        "past": trace.past,
        "model": trace.model,
        "pieces": [list(row) for row in trace.pieces],
        "seconds": dict(trace.seconds),
        "edited": sorted(trace.edited),
        "statistics": {step.name: astuple(step.statistics) for step in trace.steps},
    }


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def _layer(name: str) -> int:
    return int(name.split(".")[1])


# --- reading ------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """The fields of the trace in the file. Raises `FileError` for whatever is not as the ledger says."""
    stored = SafetensorsFiles(path, *read_header(path))
    about = _metadata(path, stored.metadata)
    spec = _spec(path, about["spec"])
    ids, positions = (_integers(stored, name, "B T") for name in (_IDS, _POSITIONS))
    if not ids.numel() or positions.shape != ids.shape:
        _fail(path, _POSITIONS, "the shape", list(positions.shape), "that of the ids, and not empty")
    if not bool(((ids >= 0) & (ids < spec.vocab_size)).all()):
        _fail(path, _IDS, "an id", "no token of the model's", f"0 to {spec.vocab_size - 1}")
    rows = _rows(path, spec, about, ids)
    beside = {_IDS, _POSITIONS, *(f"{of}{i}" for of in (_KEYS, _EXPERTS) for i in range(spec.n_layers))}
    for name, tensor in stored.tensors.items():
        if name not in beside:
            _check_step(path, spec, tensor, stored.tensors, rows.get(name))
    for key in ("edited", "seconds", "statistics"):
        if unknown := [name for name in about[key] if name not in rows]:
            _fail(path, f"trace, {key}", "a name", repr(unknown[0]), "a step of this model")
    kept = [name for name in rows if name in stored.tensors]
    _check_pieces(path, about["pieces"], ids)
    return {
        "spec": spec,
        "dtype": about["dtype"],
        "ids": ids,
        "positions": positions,
        "tensors": Tensors({name: _held(stored, name) for name in kept}),
        "axes": {name: axes_of(row) for name, row in rows.items()},
        "keys": dict(_keys(stored, rows, kept, len(ids))),
        "choices": dict(_choices(stored, spec, rows)),
        "past": about["past"],
        "model": about["model"],
        "pieces": tuple(map(tuple, about["pieces"])),
        "seconds": {name: _number(path, "seconds", n) for name, n in about["seconds"].items()},
        "edited": frozenset(about["edited"]),
        "statistics": {name: _statistics(path, about["statistics"].get(name)) for name in kept},
    }


def _fail(path: Path, where: str, field: str, found: object, expected: object) -> NoReturn:
    raise FileError(path, where, field, found, expected)


_ABOUT: dict[str, type] = {
    "spec": dict,
    "dtype": str,
    "past": int,
    "model": str,
    "pieces": list,
    "seconds": dict,
    "edited": list,
    "statistics": dict,
}


def _metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """What the file says in JSON; every value of the type that it has to have."""
    if metadata.get("format") != FORMAT:
        found = metadata.get("format", "missing")
        _fail(path, "__metadata__", "the format", found, f"{FORMAT}, as `openbook trace -o` writes it")
    about = parse_object(path, metadata.get("trace", "").encode("utf-8", "surrogatepass"), "the trace's JSON")
    for key, kind in _ABOUT.items():
        if type(about.get(key)) is not kind:
            _fail(path, "trace", key, kind_of(about.get(key)), f"of type {kind.__name__}")
    if about["dtype"] not in DTYPES:
        _fail(path, "trace", "dtype", about["dtype"], f"one of {', '.join(DTYPES)}")
    if not 0 <= about["past"] < _MAX_PAST:
        _fail(path, "trace", "past", about["past"], f"a number of tokens below {_MAX_PAST}")
    if not all(isinstance(name, str) for name in about["edited"]):
        _fail(path, "trace", "edited", "a list of other things", "names of steps")
    return about


def _spec(path: Path, data: dict[str, Any]) -> ModelSpec:
    try:
        return from_dict(data)
    except (SpecError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FileError(path, "trace", "spec", error, "the description of a model") from error


def _rows(path: Path, spec: ModelSpec, about: Mapping[str, Any], ids: Tensor) -> dict[str, OpRow]:
    try:
        rows = op_rows(spec, about["dtype"], ids.shape[0], ids.shape[1], about["past"])
    except (LedgerError, TypeError, ValueError, AttributeError, ArithmeticError, KeyError) as error:
        raise FileError(path, "trace", "spec", error, "a model that has a ledger") from error
    return {row.name: row for row in rows}


def _check_step(
    path: Path, spec: ModelSpec, x: StoredTensor, stored: Mapping[str, StoredTensor], row: OpRow | None
) -> None:
    """The step is the ledger's, in its shape: but a window's cache hands out fewer keys than there are
    tokens."""
    where = f"tensor {x.name!r}"
    if row is None:
        _fail(path, where, "the name", "no step of this model", "one of its ledger's")
    shape = row.out_shape
    if x.dtype == "BOOL" and x.name.endswith(_MASKED):
        scores = stored.get(x.name.removesuffix("masked") + "scores")
        if scores is None:
            _fail(path, where, "the tensor", "without the scores it masks", "them in the file too")
        seen = [(B, 1, *scores.shape[-2:]) for B in (1, shape[0])]
        if x.shape not in seen:
            _fail(path, where, "the shape", list(x.shape), list(seen[-1]))
        return
    if x.dtype not in _FLOATS:
        _fail(path, where, "the dtype", x.dtype, f"one of {', '.join(_FLOATS)}")
    fewer_keys = row.layer is not None and spec.layers[row.layer].attn.window is not None
    fits = len(x.shape) == len(shape) and all(
        found == size or (fewer_keys and axis == "S" and 0 < found < size)
        for found, size, axis in zip(x.shape, shape, axes_of(row), strict=True)
    )
    if not fits:
        _fail(path, where, "the shape", list(x.shape), f"{list(shape)}, as the ledger has it")


def _held(stored: SafetensorsFiles, name: str) -> Tensor | Masked:
    if stored.tensors[name].dtype != "BOOL":
        return stored.get(name)
    return Masked(stored.get(name.removesuffix("masked") + "scores"), stored.get(name))


def _integers(stored: SafetensorsFiles, name: str, letters: str) -> Tensor:
    """A tensor of integers with as many axes as there are letters."""
    found = stored.tensors.get(name)
    if found is None or found.dtype != "I64" or len(found.shape) != len(letters.split()):
        shown = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
        _fail(stored.path, name, "the tensor", shown, f"I64 [{letters}]")
    return stored.get(name)


def _keys(
    stored: SafetensorsFiles, rows: Mapping[str, OpRow], kept: list[str], batch: int
) -> Iterator[tuple[int, Tensor]]:
    """By layer. There are as many as its scores, masked or not, have columns."""
    for row in rows.values():
        name = f"{_KEYS}{row.layer}"
        if not row.name.endswith(".attn.scores") or name not in stored.tensors:
            continue
        keys = _integers(stored, name, "B S")
        of = (f"layers.{row.layer}.attn.{part}" for part in ("scores", "masked", "probs"))
        columns = {stored.tensors[step].shape[-1] for step in of if step in kept} or {keys.shape[1]}
        if len(keys) != batch or columns != {keys.shape[1]}:
            _fail(stored.path, name, "the shape", list(keys.shape), [batch, *sorted(columns)])
        yield _layer(row.name), keys


def _choices(
    stored: SafetensorsFiles, spec: ModelSpec, rows: Mapping[str, OpRow]
) -> Iterator[tuple[str, Tensor]]:
    for row in rows.values():
        name = f"{_EXPERTS}{row.layer}"
        if not row.name.endswith(_CHOSEN) or name not in stored.tensors:
            continue
        experts = _integers(stored, name, "B T A")
        mlp = spec.layers[_layer(row.name)].mlp
        known = mlp.n_experts if isinstance(mlp, Experts) else 0
        if experts.shape != row.out_shape:
            _fail(stored.path, name, "the shape", list(experts.shape), list(row.out_shape))
        if not bool(((experts >= 0) & (experts < known)).all()):
            _fail(stored.path, name, "an expert", "none of the model's", f"0 to {known - 1}")
        yield row.name, experts


def _check_pieces(path: Path, pieces: list[Any], ids: Tensor) -> None:
    """The text of every token, or none at all."""
    fits = all(isinstance(row, list) and len(row) == ids.shape[1] for row in pieces)
    if pieces and not (fits and len(pieces) == len(ids)):
        _fail(path, "trace", "pieces", f"{len(pieces)} rows", f"{len(ids)} rows of {ids.shape[1]} texts")
    if not all(isinstance(piece, str) for row in pieces for piece in row):
        _fail(path, "trace", "pieces", "a row of other things", "texts")


def _number(path: Path, field: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        _fail(path, "trace", field, kind_of(value), "numbers")
    return float(value)


def _statistics(path: Path, numbers: Any) -> Statistics | None:
    """None where the file has none: they are then computed of the tensor."""
    if numbers is None:
        return None
    if not isinstance(numbers, list) or len(numbers) != len(fields(Statistics)):
        _fail(path, "trace", "statistics", kind_of(numbers), f"lists of {len(fields(Statistics))} numbers")
    *values, nan, inf = numbers
    if not all(type(count) is int and count >= 0 for count in (nan, inf)):
        _fail(path, "trace", "statistics", "other than counts at the end", "how many are NaN and infinite")
    low, high, mean, std, l2 = (_number(path, "statistics", n) for n in values)
    return Statistics(low, high, mean, std, l2, nan, inf)
