"""A trace in a file: what comes back, and that no file is believed."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from bounded import bounded_work
from openbook.files.errors import FileError
from openbook.infer import Cache
from openbook.trace import Statistics, Trace, UnknownStepError, load, record
from openbook.trace import file as trace_file
from variants import VARIANTS, noisy_decoder, random_ids

NEW = 7


def trace_of(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Trace:
    decoder = noisy_decoder(VARIANTS[name], dtype)
    return record(decoder, random_ids(decoder.spec, 2, NEW), **options)


def assert_same(a: Trace, b: Trace) -> None:
    """Everything but the parameters, which a file does not have."""
    assert (a.spec, a.dtype, a.past, a.model, a.edited) == (b.spec, b.dtype, b.past, b.model, b.edited)
    assert tuple(map(tuple, a.pieces)) == tuple(map(tuple, b.pieces))
    assert a.axes == b.axes
    assert dict(a.seconds) == dict(b.seconds)
    assert a.steps == b.steps
    for one, other in ((a.tensors, b.tensors), (a.keys, b.keys), (a.choices, b.choices)):
        assert list(one) == list(other)
        assert all(one[name].dtype == other[name].dtype for name in one)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.positions, b.positions)


# --- there and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_trace_comes_back_from_its_file(name: str, dtype: torch.dtype, tmp_path: Path):
    trace = trace_of(name, dtype)
    trace.save(tmp_path / "run.obt")
    assert_same(load(tmp_path / "run.obt"), trace)
    assert load(tmp_path / "run.obt").parameters == {}


def test_all_that_belongs_to_a_run_comes_back(tmp_path: Path):
    decoder = noisy_decoder(VARIANTS["windows"])
    ids, cache = random_ids(decoder.spec, 2, 12), Cache(decoder.spec, 2, 12)
    record(decoder, ids[:, :9], cache=cache)
    trace = record(decoder, ids[:, 9:], cache=cache, time=True, ablate=[(1, 2)], only="layers.*")
    values = {f.name: getattr(trace, f.name) for f in fields(Trace)}
    trace = Trace(**values | {"model": "tiny\x1b[31m", "pieces": (("a", "\ud83d", "的"), ("", "\n", '"'))})
    assert trace.past == 9
    trace.save(tmp_path / "run.obt")
    assert_same(load(tmp_path / "run.obt"), trace)


@pytest.mark.parametrize(
    "only", ["*.masked", ["*.masked", "*.probs"], ["*.masked", "*.scores"], "*.mlp.chosen"]
)
def test_masked_scores_come_back_with_and_without_the_scores(only, tmp_path: Path):
    trace = trace_of("experts", only=only)
    trace.save(tmp_path / "run.obt")
    assert_same(load(tmp_path / "run.obt"), trace)


def test_an_edited_mask_comes_back_as_it_was_edited(tmp_path: Path):
    name = "layers.1.attn.masked"
    trace = trace_of("llama", patch={name: lambda x: x.masked_fill(x > 0, -torch.inf)})
    trace.save(tmp_path / "run.obt")
    assert torch.equal(load(tmp_path / "run.obt").tensor(name), trace.tensor(name))
    assert load(tmp_path / "run.obt").step(name).edited


def test_the_file_is_what_the_safetensors_library_reads(tmp_path: Path):
    trace = trace_of("llama")
    trace.save(tmp_path / "run.obt")
    with safe_open(tmp_path / "run.obt", framework="pt") as stored:
        assert stored.metadata()["format"] == "openbook.trace/1"
        assert set(stored.keys()) - {
            "trace/ids",
            "trace/positions",
            *(f"trace/keys/{i}" for i in range(3)),
        } == {*trace.tensors}
        assert torch.equal(stored.get_tensor("layers.1.attn.q"), trace.tensor("layers.1.attn.q"))


def test_a_file_that_could_not_be_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "run.obt").write_text("what was there before")
    monkeypatch.setattr(trace_file.os, "replace", _fails)
    with pytest.raises(OSError, match="full"):
        trace_of("llama").save(tmp_path / "run.obt")
    assert [path.name for path in tmp_path.iterdir()] == ["run.obt"]
    assert (tmp_path / "run.obt").read_text() == "what was there before"


def _fails(*paths: Path) -> None:
    raise OSError("the disk is full")


def test_a_step_that_was_not_saved_is_an_error_that_says_so(tmp_path: Path):
    trace_of("llama", only="head").save(tmp_path / "run.obt")
    with pytest.raises(UnknownStepError, match=r"layers.0.attn.q was not kept"):
        load(tmp_path / "run.obt").tensor("layers.0.attn.q")


def test_statistics_that_the_file_lacks_are_computed(tmp_path: Path):
    trace = trace_of("llama")
    rewritten(trace, tmp_path / "run.obt", about=lambda about: about["statistics"].clear())
    assert load(tmp_path / "run.obt").steps == trace.steps


# --- hostile files ------------------------------------------------------------------------------

Header = dict[str, Any]


def rewritten(
    trace: Trace,
    path: Path,
    about: Callable[[dict[str, Any]], Any] | None = None,
    header: Callable[[Header], Any] | None = None,
) -> None:
    """The trace's file with its JSON, or its header, changed."""
    trace.save(path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if about is not None:
        said = json.loads(head["__metadata__"]["trace"])
        about(said)
        head["__metadata__"]["trace"] = json.dumps(said)
    if header is not None:
        header(head)
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


ABOUT: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no spec": (lambda a: a.pop("spec"), "spec is missing"),
    "a spec of another kind": (lambda a: a.update(spec=[1]), "spec is a list"),
    "an unknown part": (lambda a: a["spec"].update(odd=1), "unknown key 'odd'"),
    "10^9 layers": (lambda a: a["spec"]["layers"][0].update(times=10**9), "at most 10,000 layers"),
    "more layers": (lambda a: a["spec"]["layers"][0].update(times=10_000), ""),
    "fewer layers": (lambda a: a["spec"]["layers"][0].update(times=2), "no step of this model"),
    "10^12 words": (lambda a: a["spec"].update(vocab_size=10**12), "shape is"),
    "a width that is text": (lambda a: a["spec"].update(d_model="52"), "d_model"),
    "another width": (lambda a: a["spec"].update(d_model=53), "as the ledger has it"),
    "an unknown dtype": (lambda a: a.update(dtype="int4"), "dtype is int4"),
    "past": (lambda a: a.update(past=10**30), "past is"),
    "a negative past": (lambda a: a.update(past=-1), "past is -1"),
    "a past of truth": (lambda a: a.update(past=True), "past is a boolean"),
    "a past there was not": (lambda a: a.update(past=3), "shape"),
    "too few pieces": (lambda a: a.update(pieces=[["a"]]), "pieces is 1 rows"),
    "pieces of another kind": (lambda a: a.update(pieces=[[1] * NEW] * 2), "pieces is a row of other things"),
    "pieces that are no rows": (lambda a: a.update(pieces=["abcdefg"] * 2), "pieces is 2 rows"),
    "seconds of text": (lambda a: a["seconds"].update(head="fast"), "seconds is a string"),
    "edited that is no step": (lambda a: a.update(edited=["\x1b[2J"]), "a step of this model"),
    "seconds of no step": (lambda a: a["seconds"].update(odd=1.0), "a step of this model"),
    "statistics of no step": (lambda a: a["statistics"].update(odd=[0] * 7), "a step of this model"),
    "fewer words than ids": (lambda a: a["spec"].update(vocab_size=1), "no token of the model's"),
    "edited of numbers": (lambda a: a.update(edited=[3]), "edited is a list of other things"),
    "statistics of another length": (lambda a: a["statistics"].update(head=[1, 2]), "lists of 7 numbers"),
    "statistics of text": (
        lambda a: a["statistics"].update(head=["x"] * 5 + [0, 0]),
        "statistics is a string",
    ),
    "statistics of truth": (
        lambda a: a["statistics"].update(head=[True] * 5 + [0, 0]),
        "statistics is a boolean",
    ),
    "fractions of a number": (lambda a: a["statistics"].update(head=[0.5] * 7), "other than counts"),
}


@pytest.mark.parametrize("fault", ABOUT)
def test_a_lie_in_the_files_json_is_one_error_that_says_what(fault: str, tmp_path: Path):
    change, says = ABOUT[fault]
    rewritten(trace_of("llama"), tmp_path / "run.obt", about=change)
    with bounded_work(5.0):
        assert_refused(tmp_path / "run.obt", says)


def assert_refused(path: Path, says: str) -> None:
    if says == "":
        trace = load(path)
        assert set(trace.tensors) < set(trace.axes)
        return
    with pytest.raises(FileError) as found:
        load(path)
    assert says in str(found.value)
    assert "\n" not in str(found.value)


def _rename(head: Header, old: str, new: str) -> None:
    head[new] = head.pop(old)


HEADER: dict[str, tuple[Callable[[Header], Any], str]] = {
    "no format": (lambda h: h["__metadata__"].pop("format"), "the format is missing"),
    "another format": (lambda h: h["__metadata__"].update(format="pt"), "the format is pt"),
    "no JSON": (lambda h: h["__metadata__"].pop("trace"), "not valid JSON"),
    "broken JSON": (lambda h: h["__metadata__"].update(trace='{"spec": NaN'), "not valid JSON"),
    "deep JSON": (lambda h: h["__metadata__"].update(trace="[" * 100_000), "nested too deeply"),
    "no metadata": (lambda h: h.pop("__metadata__"), "the format is missing"),
    "no ids": (lambda h: _rename(h, "trace/ids", "trace/odd"), "trace/ids"),
    "ids on one axis": (lambda h: h["trace/ids"].update(shape=[2 * NEW]), "I64 [B T]"),
    "ids that are no integers": (lambda h: h["trace/ids"].update(dtype="F64"), "I64 [B T]"),
    "ids for other tokens": (lambda h: h["trace/ids"].update(shape=[NEW, 2]), "that of the ids"),
    "an unknown step": (lambda h: _rename(h, "head", "layers.0.attn.odd"), "no step of this model"),
    "a name of the terminal's": (lambda h: _rename(h, "head", "\x1b[31m\n"), "no step of this model"),
    "an unknown companion": (lambda h: _rename(h, "trace/keys/0", "trace/keys/9"), "no step of this model"),
    "a turned step": (lambda h: h["layers.0.attn.o"].update(shape=[NEW, 2, 52]), "as the ledger has it"),
    "a step on more axes": (
        lambda h: h["layers.0.attn.o"].update(shape=[1, 2, NEW, 52]),
        "as the ledger has it",
    ),
    "a step of integers": (lambda h: h["layers.0.attn.o"].update(dtype="I32"), "one of F32, BF16, F16, F64"),
    "keys of another number": (lambda h: h["trace/keys/1"].update(shape=[1, 2 * NEW]), "trace/keys/1"),
    "a mask without scores": (
        lambda h: _rename(h, "layers.0.attn.scores", "trace/ids2"),
        "the scores it masks",
    ),
    "a mask on more heads": (lambda h: h["layers.0.attn.masked"].update(shape=[NEW, 1, 1, NEW]), "the shape"),
}


@pytest.mark.parametrize("fault", HEADER)
def test_a_lie_in_the_files_header_is_one_error_that_says_what(fault: str, tmp_path: Path):
    change, says = HEADER[fault]
    rewritten(trace_of("llama"), tmp_path / "run.obt", header=change)
    with bounded_work(5.0):
        assert_refused(tmp_path / "run.obt", says)


def test_experts_that_the_model_does_not_have_are_refused(tmp_path: Path):
    trace = trace_of("experts")
    name = "layers.1.mlp.chosen"
    trace.choices[name][0, 0, 0] = 12  # type: ignore[index]
    trace.save(tmp_path / "run.obt")
    assert_refused(tmp_path / "run.obt", "an expert is none of the model's")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_is_read_as_it_is_or_refused(tmp_path: Path, data: st.DataObject):
    path = tmp_path / "run.obt"
    if not path.exists():
        trace_of("llama", only=["layers.1.attn.*", "head"]).save(path)
    raw = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.obt"
    damaged.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    with bounded_work(5.0):
        try:
            trace = load(damaged)
        except FileError:
            return
        assert all(isinstance(step.statistics, Statistics) for step in trace)
