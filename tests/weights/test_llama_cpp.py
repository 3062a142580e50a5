"""What we write, llama.cpp loads, and computes the same from it: every architecture, every type.

llama.cpp takes GELU from a table of halves (and, for the exact one, the approximation by tanh), and computes
with quantised activations where weights are quantised: there the bounds are wider, and say so.
The worst differences are docs/gguf.md. `OPENBOOK_UPDATE=1 pytest tests/weights/test_llama_cpp.py` writes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gguf_models import PLAIN_TOKEN, VOCABULARY, model_type_of, noisy, scaled, tiny, vocabulary
from llama_server import MISSING, next_logprobs
from openbook.ledger import ledger
from openbook.model import Decoder
from openbook.spec.gguf import ARCHITECTURES, OF_MODEL_TYPE
from openbook.spec.hf import FAMILIES
from openbook.spec.model import Llama3Scaling, LongRope
from openbook.weights.dialects import GGUF, places
from openbook.weights.dialects.words import storing
from openbook.weights.load import load_decoder
from openbook.weights.save_gguf import WRITABLE, save_gguf

pytestmark = pytest.mark.skipif(MISSING, reason="needs llama.cpp: pip install xllamacpp")

A_LAYER_IN_FP32 = 2e-5
WITH_A_TABLE_OF_GELU = 1e-2

LLAMA3 = Llama3Scaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=32)
LONGROPE = LongRope((1.0, 1.1, 1.3), (1.0, 3.0, 9.0), 256, attention_factor=1.19)

RUNS = tuple(torch.arange(seed, 250, 250 // length)[:length] for seed, length in ((3, 1), (17, 5), (1, 24)))
"""One token; a few; more than any window here."""


def logprobs(decoder: Decoder, path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Ours and llama.cpp's after each of the runs."""
    theirs = next_logprobs(path, [run.tolist() for run in RUNS], PLAIN_TOKEN)
    for run, found in zip(RUNS, theirs, strict=True):
        assert sorted(found) == list(range(VOCABULARY))
        with torch.no_grad():
            ours = decoder(run[None])[0, -1].log_softmax(-1)
        yield ours, torch.tensor([found[i] for i in range(VOCABULARY)])


def check(decoder: Decoder, name: str, path: Path) -> None:
    save_gguf(decoder, path, "F32", vocabulary(), model_type_of(name))
    for ours, theirs in logprobs(decoder, path):
        difference = float((ours - theirs).abs().max())
        assert difference < bound(name, decoder.spec.n_layers)
        WORST[name] = max(difference, WORST.get(name, 0.0))


def bound(name: str, n_layers: int) -> float:
    exact = "gelu" not in ARCHITECTURES[name].activation
    return A_LAYER_IN_FP32 * n_layers if exact else WITH_A_TABLE_OF_GELU


WORST: dict[str, float] = {}
"""The largest difference found with each architecture."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_llama_cpp_computes_the_same_from_the_file_of_every_architecture(name: str, tmp_path: Path):
    # llama.cpp rounds the ends of YaRN's ramp, which this model does not: here it has no YaRN.
    changes = {"rope.scaling.type": "none"} if name == "gpt-oss" else {}
    check(noisy(tiny(name, **changes)), name, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("llama", {"expert_count": 0, "expert_used_count": 0}, id="llama without experts"),
        pytest.param(
            "llama",
            {
                "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
            id="yarn",
        ),
        pytest.param("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}, id="linear"),
        pytest.param("qwen3", {"without": ("output.weight",)}, id="tied head"),
        pytest.param("granitemoe", {"expert_shared_feed_forward_length": 56}, id="granitemoe, one shared"),
        pytest.param("falcon", {"without": ("attn_norm_2.weight",)}, id="falcon with one norm"),
        pytest.param("gptneox", {"use_parallel_residual": False}, id="gptneox in series"),
        pytest.param("glm4moe", {"without": ("attn_q_norm.weight",)}, id="glm4moe without norms of q and k"),
        pytest.param(
            "deepseek2",
            {
                "block_count": 27, "attention.q_lora_rank": None, "expert_gating_func": 1,
                "expert_weights_norm": False, "expert_group_count": 0, "without": ("exp_probs_b.bias",),
            },
            id="deepseek2 as the lite V2",
        ),
    ],
)  # fmt: skip
def test_llama_cpp_computes_the_same_from_variants(name: str, changes: dict, tmp_path: Path):
    check(noisy(tiny(name, **changes)), name, tmp_path / "m.gguf")


def test_llama_cpp_reads_the_frequencies_of_llama_3_and_of_longrope(tmp_path: Path):
    check(noisy(scaled("llama", LLAMA3)), "llama", tmp_path / "llama.gguf")
    check(noisy(scaled("phi3", LONGROPE)), "phi3", tmp_path / "phi3.gguf")


MOST_NATS = {"F32": 1e-5, "F16": 1e-4, "BF16": 5e-3, "Q8_0": 0.05, "Q4_0": 0.05, "Q4_1": 0.1}
"""Of KL divergence: llama.cpp rounds activations to halves beside halves, to 8 bits beside quantised ones."""


@pytest.mark.parametrize("dtype", WRITABLE)
def test_llama_cpp_decodes_every_type_that_we_write(dtype: str, tmp_path: Path):
    sizes = {"embedding_length": 64, "feed_forward_length": 96, "attention.key_length": 32}
    spec = tiny("llama", **sizes, **{"attention.value_length": 32, "expert_count": 0, "expert_used_count": 0})
    save_gguf(noisy(spec), tmp_path / "m.gguf", dtype, vocabulary())
    for ours, theirs in logprobs(load_decoder(tmp_path / "m.gguf", "fp32"), tmp_path / "m.gguf"):
        assert float((theirs.exp() * (theirs - ours)).sum()) < MOST_NATS[dtype]
        assert int(ours.argmax()) == int(theirs.argmax())


# --- the table ----------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "gguf.md"
ROW = re.compile(
    r"^\| `(?P<name>[\w-]+)` \| (?P<types>.*?) \| (?P<words>.*?) \| (?P<worst>\S+) \|$", re.MULTILINE
)
HEAD = "|---|---|---|---|\n"


def model_types(name: str) -> str:
    return ", ".join(f"`{own}`" for own in sorted(FAMILIES) if OF_MODEL_TYPE.get(own, own) == name)


def words(name: str) -> str:
    """What is done to any parameter, without the numbers of this small model."""
    shapes = {row.name: row.shape for row in ledger(tiny(name)).tensors if row.tie is None}
    said = dict.fromkeys(storing([place]) for place in places(tiny(name), shapes, GGUF[name]))
    of_each = (re.sub(r"rows \d+ to \d+ of each of \d+ heads", "some rows of each head", t) for t in said)
    plain = (re.sub(r", \d+ heads", "", text) for text in of_each)
    return "; ".join(dict.fromkeys(filter(None, plain))) or "nothing"


def test_the_page_has_every_architecture_and_no_difference_beyond_the_bound():
    if os.environ.get("OPENBOOK_UPDATE") == "1":
        assert set(WORST) == set(ARCHITECTURES), "run the whole file to write the page"
        lines = [
            f"| `{name}` | {model_types(name)} | {words(name)} | {WORST[name]:.1e} |\n"
            for name in sorted(ARCHITECTURES)
        ]
        PAGE.write_text(PAGE.read_text().split(HEAD)[0] + HEAD + "".join(lines))
    shown = {row["name"]: row for row in ROW.finditer(PAGE.read_text())}
    assert list(shown) == sorted(ARCHITECTURES)
    for name, row in shown.items():
        assert (row["types"], row["words"]) == (model_types(name), words(name))
        assert float(row["worst"]) < bound(name, 27)
