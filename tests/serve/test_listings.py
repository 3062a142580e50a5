"""The lines of the package that compute a step."""

import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import openbook
import variants
from openbook.model.attention import Attention, ExplicitCore
from openbook.serve.listings import listing
from openbook.spec.presets import preset
from openbook.trace.rows import op_rows
from served import good, refused


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_every_step_of_every_variant_has_code_which_is_what_the_file_has_there(name: str):
    spec = variants.VARIANTS[name]
    for row in op_rows(spec, "fp32", 1, 7):
        found = listing(spec, row.name)
        lines = (Path(openbook.__file__).parents[1] / found["file"]).read_text().splitlines()
        there = "\n".join(lines[found["line"] - 1 : found["end_line"]])
        assert textwrap.dedent(there + "\n") == found["text"]
        assert found["file"].startswith("openbook/model/")
        assert found["line"] < found["end_line"]


@pytest.mark.parametrize(
    ("model", "step", "symbol", "says"),
    [
        ("llama", "layers.1.attn.scores", "ExplicitCore.scores", "* scale"),
        ("llama", "layers.1.attn.probs", "ExplicitCore.probs", "softmax"),
        ("llama", "layers.0.attn.k", "Attention.forward", "self.k"),
        ("llama", "layers.0.attn.o", "Attention.forward", "self.o("),
        ("llama", "layers.0.attn.q_rope", "Rotate", "sin"),
        ("llama", "layers.0.attn_norm", "Norm", "F.rms_norm"),
        ("llama", "layers.0.attn_add", "Block._add", "x + more"),
        ("llama", "layers.0.mlp.act", "Activation", "gate"),
        ("llama", "layers.0.mlp.down", "Mlp.forward", "self.down("),
        ("llama", "embed", "Embedding", "scale"),
        ("llama", "head", "Head", "softcap"),
    ],
)  # fmt: skip
def test_a_step_is_shown_by_what_computes_it(model: str, step: str, symbol: str, says: str):
    found = listing(variants.VARIANTS[model], step)
    assert found["symbol"] == symbol
    assert says in found["text"]


@pytest.mark.parametrize(
    ("step", "symbol"),
    [
        ("attn.q_down", "LatentAttention._queries"),
        ("attn.kv_down", "LatentAttention._latents"),
        ("attn.kv_up", "LatentAttention._expanded"),
        ("attn.q_absorb", "KeyRows"),
        ("mlp.router", "Router"),
        ("mlp.chosen", "Chosen"),
        ("mlp.experts.up", "Matrices"),
        ("mlp.experts.sum", "looped"),
        ("mlp.shared.up", "Mlp.forward"),
    ],
)
def test_a_published_latent_model_of_many_layers_is_shown_without_building_it(step: str, symbol: str):
    spec = preset("deepseek-v3")
    assert listing(spec, f"layers.{spec.n_layers - 1}.{step}")["symbol"] == symbol


def test_the_code_is_asked_for_by_step_and_model(client: TestClient, model: dict[str, Any]):
    asked = {"step": "layers.2.attn.scores", "model": model["id"]}
    found = good(client.get("/api/source", params=asked))
    lines, first = inspect.getsourcelines(ExplicitCore.scores)
    assert found["line"] == first
    assert found["end_line"] == first + len(lines) - 1
    assert found["file"] == "openbook/model/attention.py"
    assert found["text"].startswith("def scores(")
    other = good(client.get("/api/source", params={**asked, "step": "layers.0.attn.v"}))
    assert other["line"] == inspect.getsourcelines(inspect.unwrap(Attention.forward))[1]


@pytest.mark.parametrize(
    "step",
    [
        "", "layers.3.attn.q", "layers.-1.attn.q", "layers.x.attn.q", "layers.00.attn.nothing", "layers.0",
        "layers.0.attn", "layers.0.attn.core", "layers.0.attn.__init__", "layers.0.attn.q_norm",
        "../../etc/passwd", "/etc/passwd", "openbook.lm", "__class__", "layers.99999999999999.attn.q",
        "layers.٠.attn.q", "layers..attn.q", "head.weight",
    ],
)  # fmt: skip
def test_what_is_no_step_of_the_model_has_no_code(client: TestClient, model: dict[str, Any], step: str):
    refused(client.get("/api/source", params={"step": step, "model": model["id"]}), 404)


def test_code_is_of_a_step_and_a_model(client: TestClient, model: dict[str, Any]):
    refused(client.get("/api/source", params={"step": "head", "model": "nothing"}), 404)
    for params in ({"step": "head"}, {"model": model["id"]}, {"step": "h" * 500, "model": model["id"]}):
        refused(client.get("/api/source", params=params), 400)
