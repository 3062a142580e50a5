"""`openbook trace`: the table of a run, its file, and what is refused."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from openbook.lm import load as load_model
from openbook.model import Decoder, init_weights
from openbook.spec.model import Attention, Block, Head, Mlp, ModelSpec, Norm, Rope
from openbook.trace import load
from openbook.weights.save import save_hf

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def spec() -> ModelSpec:
    """Three equal layers of 18 steps each, and three steps around them."""
    rms, attn = Norm("rms"), Attention(8, 2, 6, scale=6**-0.5, rope=Rope(6))
    block = Block(attn, Mlp(56, "silu", gated=True), attn_norm=rms, mlp_norm=rms)
    return ModelSpec(256, 40, 64, (block,) * 3, Head(tied=False), final_norm=rms)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny/, a model of random weights with a token for every byte."""
    files = tmp_path_factory.mktemp("tokenizer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (files / "tokenizer.json").write_text(tokenizer.to_str())
    (files / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    root = tmp_path_factory.mktemp("trace")
    save_hf(init_weights(Decoder(spec()), std=0.3), root / "tiny", extra_files=sorted(files.iterdir()))
    return root


@pytest.fixture
def run(openbook: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run("tiny", "-p", "text")`, in the folder of the model."""
    monkeypatch.chdir(folder)
    return lambda *arguments, **options: openbook("trace", *arguments, **options)


# --- what is shown ------------------------------------------------------------------------------


def test_equal_layers_are_folded_into_one_row(run):
    done = run("tiny", "-p", "abcde")
    assert done.code == 0
    lines = done.out.splitlines()
    assert re.match(r"Trace of tiny: 5 tokens, 57 steps, fp32, \d+\.\d\d kB$", lines[0])
    assert sum(line.startswith("layers.0-2.attn.q ") for line in lines) == 1
    assert not any(line.startswith("layers.1.") for line in lines)
    assert "Tokens: 'a' 'b' 'c' 'd' 'e'" in lines
    row = next(line for line in lines if line.startswith("layers.0-2.attn.scores")).split()
    assert row[1:7] == ["B", "H", "T", "S", "1×8×5×5", "fp32"]


def test_a_folded_row_has_the_numbers_of_its_layers_together(run, folder: Path):
    """FLOPs are added up, the least is of all, and L2 is that of one long vector."""
    cells = next(x for x in run("tiny", "-p", "abcde").out.splitlines() if "0-2.attn.q " in x).split()
    trace = load_model(folder / "tiny").trace("abcde")
    q = torch.stack([trace.tensor(f"layers.{i}.attn.q") for i in range(3)])
    low, high, mean, std, l2 = (float(cell) for cell in cells[6:11])
    assert (low, high) == (pytest.approx(float(q.min()), rel=1e-3), pytest.approx(float(q.max()), rel=1e-3))
    assert mean == pytest.approx(float(q.mean()), rel=1e-3)
    assert std == pytest.approx(float(q.std(correction=0)), rel=1e-3)
    assert l2 == pytest.approx(float(q.norm()), rel=1e-3)
    assert int(cells[11].replace(",", "")) == 3 * 2 * 5 * 40 * 48


def test_all_shows_every_layer_by_itself(run):
    lines = run("tiny", "-p", "abcde", "--all").out.splitlines()
    assert [line.split()[0] for line in lines if ".attn.q " in line] == [
        f"layers.{i}.attn.q" for i in range(3)
    ]


def test_json_has_every_step_with_its_exact_statistics(run, folder: Path):
    data = json.loads(run("tiny", "-p", "abc", "--json").out)
    trace = load_model(folder / "tiny").trace("abc")
    assert data["schema"] == "openbook.trace/1"
    assert (data["ids"], data["pieces"]) == (trace.ids.tolist(), [["a", "b", "c"]])
    assert data["bytes"] == trace.bytes
    assert len(data["steps"]) == len(trace)
    for shown, step in zip(data["steps"], trace.steps, strict=True):
        assert (shown["name"], tuple(shown["axes"]), tuple(shown["shape"])) == (
            step.name,
            step.axes,
            step.shape,
        )
        assert shown["low"] == step.statistics.low
        assert shown["l2"] == step.statistics.l2
        assert shown["flops"] == trace.rows[step.name].flops
        assert shown["seconds"] is None


def test_the_time_of_a_step_is_shown_where_it_is_measured(run):
    out = run("tiny", "-p", "abc", "--time", "--only", "*.mlp.up", "--only", "*.attn_add").out
    up, add = (next(x for x in out.splitlines() if name in x).split() for name in ("mlp.up", "attn_add"))
    assert re.fullmatch(r"\d+\.\d\d", up[-1])
    assert add[-1] == "0"  # FLOPs: an addition to the stream is no module


def test_only_and_ablate_take_names_and_heads(run):
    out = run("tiny", "-p", "abc", "--only", "blocks.1.attn.hook_z", "--ablate", "1.7", "--ablate", "1.2").out
    assert "3 tokens, 1 step, fp32, 576 B" in out
    assert [x.split()[0] for x in out.splitlines() if x.startswith("layers.")] == ["layers.1.attn.mix"]
    assert "Edited: layers.1.attn.mix." in out


def test_a_message_is_written_as_the_models_template_writes_it(run):
    ids = json.loads(run("tiny", "-p", "hi", "--chat", "--only", "head", "--json").out)["pieces"][0]
    assert "".join(ids) == "[user]hi"


def test_the_prompt_may_come_from_stdin(run):
    assert "2 tokens" in run("tiny", "--only", "head", stdin="hi").out


# --- the file -----------------------------------------------------------------------------------


def test_a_saved_trace_is_shown_as_it_was_made(run, folder: Path):
    made = run("tiny", "-p", "abcd", "-o", "run.obt")
    assert re.search(r"a trace of 4 tokens takes \d+\.\d\d kB \([\d,]+ bytes\)\nsaved in run.obt", made.err)
    shown = run("run.obt")
    assert shown.code == 0
    assert shown.out.splitlines()[1:] == made.out.splitlines()[1:]
    assert (
        json.loads(run("run.obt", "--json").out)["steps"]
        == json.loads(run("tiny", "-p", "abcd", "--json").out)["steps"]
    )
    trace = load_model(folder / "tiny").trace("abcd")
    assert torch.equal(load(folder / "run.obt").tensor("head"), trace.tensor("head"))


def test_names_in_a_strangers_file_do_not_reach_the_terminal_as_they_are(run, folder: Path):
    trace = load_model(folder / "tiny").trace("abc", only="head")
    replace(trace, model="\x1b[2Jtiny\n", pieces=(("\x1b[31m", "\r", "c"),)).save(folder / "odd.obt")
    done = run("odd.obt")
    assert done.code == 0
    assert done.out.replace("\n", "").isprintable()
    assert "Trace of \\x1b[2Jtiny\\n: 3 tokens" in done.out


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ["tiny", "-p", "abc", "--only", "layers.1.attn.x"],
            2,
            "no step 'layers.1.attn.x' in this run; near it",
        ),
        (["tiny", "-p", "abc", "--ablate", "3.0"], 2, "layer 3 is none of 0 to 2"),
        (["tiny", "-p", "abc", "--ablate", "1.8"], 2, "head 8 of layer 1 is none of 0 to 7"),
        (["tiny", "-p", "abc", "--ablate", "1-2"], 2, "'1-2' is no LAYER.HEAD"),
        (["tiny", "-p", "abc", "--ablate", "99999999999999999999.1"], 2, "is no LAYER.HEAD"),
        (["tiny", "-p", ""], 2, "must be 1 to 64 tokens, found 0"),
        (["tiny", "-p", "a" * 65], 2, "must be 1 to 64 tokens, found 65"),
        (["tiny", "-p", "a", "-o", "nowhere/run.obt"], 2, "there is no folder nowhere"),
        (["nothing.obt"], 3, "no such file: nothing.obt"),
        (["broken.obt"], 1, "broken.obt"),
        (["broken.obt", "-p", "a"], 2, "is a trace already"),
        (["gpt3-175b", "-p", "a"], 3, "no weights"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(run, folder: Path, arguments, code: int, says: str):
    (folder / "broken.obt").write_bytes(b"\xff" * 100)
    done = run(*arguments)
    assert (done.code, done.out) == (code, "")
    error = done.err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert says in error


def test_a_trace_that_does_not_fit_is_refused_with_its_bytes(
    run, monkeypatch: pytest.MonkeyPatch, folder: Path
):
    before = sorted(folder.iterdir())
    monkeypatch.setattr("openbook.lm.check_fit", _refuse)
    done = run("tiny", "-p", "abc", "-o", "large.obt")
    assert done.code == 4
    assert "a trace of 3 tokens needs" in done.err
    assert sorted(folder.iterdir()) == before


def _refuse(what: str, needed: int, device: str = "cpu") -> None:
    from openbook.weights.fit import WontFitError

    if what.startswith("a trace"):
        raise WontFitError(what, needed, needed - 1)
