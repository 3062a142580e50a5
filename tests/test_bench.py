"""The arithmetic of the benchmark, and that it measures in turns."""

from pathlib import Path

import pytest
import torch

from openbook.bench import (
    HuggingFace,
    Machine,
    Openbook,
    Result,
    Setup,
    Test,
    bench,
    bytes_per_token,
    compared,
    count_flops,
    hf_dtypes,
    limit,
    matmul_rate,
    measure,
    measure_loading,
    read_bandwidth,
    spread,
    together,
)
from openbook.ledger import Ledger, Workload
from openbook.lm import LanguageModel, load
from openbook.model import Decoder, init_weights
from openbook.spec.model import Attention, Block, Head, Mlp, ModelSpec, Norm, Rope
from openbook.weights.save import save_hf
from openbook.weights.save_gguf import save_gguf

Test.__test__ = False  # type: ignore[attr-defined]  # a benchmark's test, not pytest's

MACHINE = Machine(bytes_per_s=20e9, flops_per_s={"fp32": 100e9}, threads=2)


def spec(tied: bool = True) -> ModelSpec:
    attn = Attention(8, 2, 6, scale=6**-0.5, rope=Rope(6))
    block = Block(attn, Mlp(56, "silu", gated=True), attn_norm=Norm("rms"), mlp_norm=Norm("rms"))
    return ModelSpec(97, 40, 64, (block,) * 3, Head(tied=tied), final_norm=Norm("rms"))


class Fake:
    vocab_size = 10

    def __init__(self, dtype: str, log: list[str]) -> None:
        self.setup, self.log = Setup("openbook", dtype), log

    def start(self, capacity: int) -> None:
        self.log.append(f"{self.setup.dtype} {capacity}")

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, self.vocab_size)


def test_engines_take_turns_and_the_first_round_does_not_count():
    log: list[str] = []
    seconds = measure([Fake("fp32", log), Fake("bf16", log)], [Test("pp", 4), Test("tg", 2)], repetitions=3)
    assert log == ["fp32 4", "bf16 4", "fp32 2", "bf16 2"] * 4
    assert [len(samples) for samples in seconds.values()] == [3, 3, 3, 3]


@pytest.mark.parametrize("position", [0, 7, 30])
def test_the_counted_flops_of_a_token_are_the_ledgers(position: int):
    decoder = init_weights(Decoder(spec()), seed=0)
    cores = [module for name, module in decoder.named_modules() if name.endswith(".core")]
    assert count_flops(decoder, position) == Ledger(spec(), "fp32").flops_per_token(position)
    assert [module for name, module in decoder.named_modules() if name.endswith(".core")] == cores


def test_the_limit_of_writing_is_bandwidth_over_bytes():
    book = Ledger(spec(), "fp32")
    # By hand: attention 40·48 + 2·40·12 + 48·40, feed-forward 3·40·56, two norms of 40; three layers.
    layer = 40 * 48 + 2 * 40 * 12 + 48 * 40 + 3 * 40 * 56 + 2 * 40
    weights = 3 * layer + 40 + 97 * 40
    cache = 3 * 2 * 12
    assert bytes_per_token(book, 0) == 4 * (weights + cache)
    assert limit(book, Test("tg", 20), MACHINE) == 20 * 4 * (weights + 11 * cache) / 20e9


def test_an_untied_embedding_is_looked_up_and_not_read():
    assert bytes_per_token(Ledger(spec(tied=False)), 5) == bytes_per_token(Ledger(spec(tied=True)), 5)


def test_a_quantised_matrix_counts_its_blocks():
    book = Ledger(spec(), "fp32")
    saved = bytes_per_token(book, 0) - bytes_per_token(book, 0, {"layers.0.mlp.up.weight": "Q4_1"})
    assert saved == 40 * 56 * 4 - 40 * 56 // 32 * 20


def test_the_limit_of_reading_is_flops_over_flops():
    book = Ledger(spec(), "fp32")
    flops = book.totals(Workload("prefill", new=32)).flops
    assert limit(book, Test("pp", 32), MACHINE) == pytest.approx(flops / 100e9)


# --- results ------------------------------------------------------------------------------------


def result(engine, dtype: str, *samples: float, default: bool = False, test: str = "tg10") -> Result:
    setup = Setup(engine, dtype, default=default)
    return Result(setup, 1, 1, MACHINE, test, samples, tokens=10, limit=0.5)


def test_medians_rates_and_share_are_what_they_say():
    one = result("openbook", "bf16", 1.0, 4.0, 2.0)
    assert (one.seconds, one.rates, one.share) == (2.0, [10.0, 2.5, 5.0], 0.25)
    assert (spread(one.samples), spread(one.rates)) == (1.5, 3.75)


def test_a_job_takes_the_seconds_of_its_parts_in_every_repetition():
    parts = result("openbook", "bf16", 1.0, 4.0, test="pp10"), result("openbook", "bf16", 3.0, 1.0)
    job = together(parts)
    assert (job.test, job.tokens, job.samples, job.limit) == ("pp10+tg10", 20, [4.0, 5.0], 1.0)


def test_a_dtype_is_compared_with_the_same_dtype_and_our_default_with_the_faster():
    ours = result("openbook", "bf16", 1.0, 2.0, 1.0), result("openbook", "q4_1", 1.0, 1.0, 1.0, default=True)
    theirs = result("transformers", "bf16", 4.0, 4.0, 4.0), result("transformers", "fp32", 2.0, 3.0, 3.0)
    other = result("transformers", "fp32", 0.1, 0.1, 0.1, test="pp10")
    rows = [compared(row, [*ours, *theirs, other]) for row in (*ours, *theirs)]
    assert [(row.ratio, row.hf_dtype) for row in rows] == [
        (4.0, "bf16"), (3.0, "fp32"), (None, None), (None, None),
    ]  # fmt: skip


def test_the_default_is_measured_against_both_dtypes_of_transformers():
    lm = LanguageModel(init_weights(Decoder(spec()), seed=0))
    assert hf_dtypes({"default": lm}) == ["fp32", "bf16"]
    assert hf_dtypes({"fp32": lm}) == ["fp32"]


# --- real engines, a tiny model -----------------------------------------------------------------


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    save_gguf(init_weights(Decoder(spec()), seed=0), tmp_path / "tiny.gguf", "F16")
    return tmp_path / "tiny.gguf"


def test_both_engines_compute_the_same_logits_prompt_and_next_token(tmp_path: Path):
    decoder = init_weights(Decoder(spec()), seed=0)
    save_hf(decoder, tmp_path / "model")
    ids = torch.arange(12).reshape(1, -1)
    with torch.inference_mode():
        steps = []
        for engine in (Openbook(LanguageModel(decoder)), HuggingFace(tmp_path / "model", "fp32")):
            engine.start(12)
            steps.append(torch.cat([engine.step(ids[:, :11]), engine.step(ids[:, 11:])]))
    assert steps[0].shape == (2, 97)
    torch.testing.assert_close(*steps, rtol=0, atol=1e-5)


def test_one_run_measures_every_dtype_on_both_engines_and_loads_in_turns(gguf: Path):
    models = {"default": load(gguf), "fp32": load(gguf, dtype="fp32")}
    warnings: list[str] = []
    rows = bench(models, [Test("pp", 4), Test("tg", 2)], 1, against_hf=True, warn=warnings.append)
    assert warnings == []
    every = [("openbook", True), ("openbook", False), ("transformers", False), ("transformers", False)]
    assert [(r.test, r.setup.engine, r.setup.default) for r in rows] == [
        *(("pp4", *of) for of in every), *(("tg2", *of) for of in every), *(("pp4+tg2", *of) for of in every),
        ("load", "openbook", False), ("load", "transformers", False),
    ]  # fmt: skip
    ours = [r for r in rows if r.setup.engine == "openbook"]
    assert all(r.ratio and r.ratio > 0 for r in ours)
    assert {r.dtype for r in rows if r.test == "load"} == {"fp32"}
    assert [len(r.samples) for r in rows if r.test == "load"] == [3, 3]


def test_without_accelerate_loading_is_ours_alone_and_a_warning_says_why(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("openbook.bench.find_spec", lambda name: None if name == "accelerate" else name)
    warnings: list[str] = []
    (row,) = measure_loading({"default": load(gguf)}, MACHINE, against_hf=True, warn=warnings.append)
    assert (row.test, row.setup.engine, row.dtype) == ("load", "openbook", "fp16")
    assert warnings == [
        "loading is not compared: transformers reads GGUF files only with accelerate installed"
    ]


def test_a_file_that_is_gone_costs_the_load_row_and_not_the_results(gguf: Path):
    lm, warnings = load(gguf), []
    gguf.unlink()
    assert measure_loading({"default": lm}, MACHINE, warn=warnings.append) == []
    assert len(warnings) == 1
    assert "tiny.gguf" in warnings[0]


# --- the machine --------------------------------------------------------------------------------


def test_this_machine_can_be_measured():
    threads = torch.get_num_threads()
    assert 1e8 < read_bandwidth(seconds=0.02) < 1e13
    assert 1e8 < matmul_rate(seconds=0.02) < 1e16
    assert torch.get_num_threads() == threads
