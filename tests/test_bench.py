"""The arithmetic of the benchmark, and that it measures in turns."""

import pytest
import torch

from openbook.bench import (
    Machine,
    Result,
    Test,
    bytes_per_token,
    count_flops,
    limit,
    matmul_rate,
    measure,
    read_bandwidth,
)
from openbook.ledger import Ledger
from openbook.model import Decoder, init_weights
from openbook.spec.model import Attention, Block, Head, Mlp, ModelSpec, Norm, Rope

Test.__test__ = False  # type: ignore[attr-defined]  # a benchmark's test, not pytest's

MACHINE = Machine(bytes_per_s=20e9, flops_per_s=100e9, threads=2)


def spec(tied: bool = True) -> ModelSpec:
    attn = Attention(8, 2, 6, scale=6**-0.5, rope=Rope(6))
    block = Block(attn, Mlp(56, "silu", gated=True), attn_norm=Norm("rms"), mlp_norm=Norm("rms"))
    return ModelSpec(97, 40, 64, (block,) * 3, Head(tied=tied), final_norm=Norm("rms"))


class Fake:
    vocab_size = 10

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def start(self, capacity: int) -> None:
        self.log.append(f"{self.name} {capacity}")

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, self.vocab_size)


def test_engines_take_turns_and_the_first_round_does_not_count():
    log: list[str] = []
    speeds = measure([Fake("a", log), Fake("b", log)], [Test("pp", 4), Test("tg", 2)], repetitions=3)
    assert log == ["a 4", "b 4", "a 2", "b 2"] * 4
    assert [len(samples) for samples in speeds.values()] == [3, 3, 3, 3]


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
    assert limit(book, Test("tg", 20), MACHINE) == 20e9 / (4 * (weights + 11 * cache))


def test_an_untied_embedding_is_looked_up_and_not_read():
    assert bytes_per_token(Ledger(spec(tied=False)), 5) == bytes_per_token(Ledger(spec(tied=True)), 5)


def test_a_quantised_matrix_counts_its_blocks():
    book = Ledger(spec(), "fp32")
    saved = bytes_per_token(book, 0) - bytes_per_token(book, 0, {"layers.0.mlp.up.weight": "Q4_1"})
    assert saved == 40 * 56 * 4 - 40 * 56 // 32 * 20


def test_the_limit_of_reading_is_flops_over_flops():
    book = Ledger(spec(), "fp32")
    from openbook.ledger import Workload

    flops = book.totals(Workload("prefill", new=32)).flops
    assert limit(book, Test("pp", 32), MACHINE) == pytest.approx(32 * 100e9 / flops)


def test_median_spread_and_share_are_what_they_say():
    result = Result("bf16", 1, 1, "openbook", Test("tg", 2), [10.0, 14.0, 11.0], 22.0, MACHINE)
    assert (result.median, result.spread, result.share) == (11.0, 2.0, 0.5)


def test_this_machine_can_be_measured():
    threads = torch.get_num_threads()
    assert 1e8 < read_bandwidth(seconds=0.02) < 1e13
    assert 1e8 < matmul_rate(seconds=0.02) < 1e16
    assert torch.get_num_threads() == threads
