"""Recording our own model: which steps there are, what their tensors hold, and that nothing else changes."""

import pytest
import torch

from openbook.infer import Cache
from openbook.ledger import Workload, ledger
from openbook.model import ExplicitCore, FusedCore
from openbook.model.experts import can_group, gathered, grouped, looped
from openbook.spec.model import Experts
from openbook.trace import Statistics, Trace, record, trace_bytes
from openbook.trace.record import RecordingCore
from openbook.trace.tensors import CHUNK, Masked
from variants import VARIANTS, noisy_decoder, random_ids

BATCH, NEW = 3, 11


@pytest.fixture(params=VARIANTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def booked(spec, new: int = NEW, past: int = 0, batch: int = BATCH):
    return ledger(spec, "fp32").ops(Workload("prefill", batch, new, past, last_only=False))


# --- names, order, shapes -----------------------------------------------------------------------


def test_every_step_of_the_ledger_is_recorded_in_its_order_and_shape(name: str):
    spec = VARIANTS[name]
    trace = record(noisy_decoder(spec), random_ids(spec, BATCH, NEW))
    assert [(step.name, step.shape) for step in trace] == [(row.name, row.out_shape) for row in booked(spec)]


def test_steps_after_a_cache_have_the_ledgers_shapes(name: str):
    spec = VARIANTS[name]
    decoder, ids = noisy_decoder(spec), random_ids(spec, BATCH, NEW)
    cache = Cache(spec, BATCH, NEW)
    for past, new in ((0, 4), (4, 3), (7, 1)):
        trace = record(decoder, ids[:, past : past + new], cache=cache)
        rows = booked(spec, new, past)
        assert [step.name for step in trace] == [row.name for row in rows]
        for step, row in zip(trace, rows, strict=True):
            if "S" not in step.axes:  # a window's cache hands out fewer keys than there are tokens
                assert (step.name, step.shape) == (row.name, row.out_shape)
        for layer, keys in trace.keys.items():
            assert keys.shape == (BATCH, trace.tensor(f"layers.{layer}.attn.scores").shape[-1])


def test_the_axes_are_the_ledgers_letters():
    spec = VARIANTS["llama"]
    steps = {step.name: step for step in record(noisy_decoder(spec), random_ids(spec, 1, 4))}
    assert steps["layers.2.attn.q"].axes == ("B", "T", "H·K")
    assert steps["layers.2.attn.probs"].axes == ("B", "H", "T", "S")
    assert (steps["layers.2.attn.q"].layer, steps["layers.2.attn.q"].local) == (2, "attn.q")
    assert (steps["head"].layer, steps["head"].local) == (None, "head")


# --- the tensors --------------------------------------------------------------------------------


@torch.no_grad()
def test_the_head_step_is_the_logits_of_a_run_nobody_looks_at_bit_for_bit(name: str):
    for dtype in (torch.float32, torch.bfloat16):
        decoder = noisy_decoder(VARIANTS[name], dtype)
        ids = random_ids(decoder.spec, BATCH, NEW)
        assert torch.equal(record(decoder, ids).tensor("head"), decoder(ids))


@torch.no_grad()
def test_a_parts_output_follows_from_the_recorded_parts_before_it(name: str):
    """The additions to the stream, the masks and the softmax, none of which is a module of the model."""
    decoder = noisy_decoder(VARIANTS[name])
    trace = record(decoder, random_ids(decoder.spec, BATCH, NEW))
    causal = torch.ones(NEW, NEW, dtype=torch.bool).tril()
    x = last_before_the_layers(trace)
    for i, block in enumerate(decoder.spec.layers):

        def step(name: str, i: int = i) -> torch.Tensor:
            return trace.tensor(f"layers.{i}.{name}")

        attended = step("attn_out_norm" if block.attn_out_norm else "attn.o")
        torch.testing.assert_close(step("attn_add"), x + attended * block.residual_scale)
        masked, probs = step("attn.masked"), step("attn.probs")
        assert not masked.isfinite()[..., ~causal].any()
        assert masked.isfinite().diagonal(dim1=-2, dim2=-1).all()
        assert torch.equal(masked[masked.isfinite()], step("attn.scores")[masked.isfinite()])
        assert (probs.sum(-1) <= 1 + 1e-6).all()
        assert torch.equal(probs > 0, masked.isfinite())
        x = last_of_layer(trace, i)
    torch.testing.assert_close(decoder.head(decoder.final_norm(x)), trace.tensor("head"))


def last_before_the_layers(trace: Trace) -> torch.Tensor:
    return trace.tensor([s.name for s in trace if s.name in ("embed", "positions", "embed_norm")][-1])


def last_of_layer(trace: Trace, layer: int) -> torch.Tensor:
    return trace.tensor([step.name for step in trace if step.layer == layer][-1])


@torch.no_grad()
def test_the_mix_is_the_fast_cores_and_agrees_with_the_probabilities(name: str):
    decoder = noisy_decoder(VARIANTS[name])
    ids = random_ids(decoder.spec, BATCH, NEW)
    fast = record(decoder, ids)
    for layer in decoder.layers:
        layer.attn.core = ExplicitCore()
    slow = record(decoder, ids)
    for step in fast:
        torch.testing.assert_close(fast.tensor(step.name), slow.tensor(step.name), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("way", [looped, grouped, gathered])
@pytest.mark.parametrize("name", ["experts", "routers"])
def test_the_rows_of_experts_are_their_tokens_in_whatever_order_they_were_computed(name: str, way):
    decoder = noisy_decoder(VARIANTS[name])
    layers = [i for i, block in enumerate(decoder.spec.layers) if isinstance(block.mlp, Experts)]
    for i in layers:
        experts = decoder.layers[i].mlp.experts
        experts.way = gathered if way is grouped and not can_group(experts.up.weight) else way
    trace = record(decoder, random_ids(decoder.spec, BATCH, NEW))
    for i in layers:
        mlp, where = decoder.layers[i].mlp, f"layers.{i}.mlp"
        rows, weights = trace.tensor(f"{where}.experts.down"), trace.tensor(f"{where}.chosen")[..., None]
        total = (rows if mlp.experts.on_input else rows * weights).sum(dim=-2)
        torch.testing.assert_close(total, trace.tensor(f"{where}.experts.sum"))
        chosen = trace.choices[f"{where}.chosen"]
        expected = torch.einsum(
            "btaf,btadf->btad", trace.tensor(f"{where}.experts.act"), mlp.experts.down.weight[chosen]
        )
        if mlp.experts.down.bias is not None:
            expected += mlp.experts.down.bias[chosen]
        torch.testing.assert_close(rows, expected)


def test_padding_is_recorded_as_it_ran():
    spec = VARIANTS["llama"]
    positions = torch.tensor([[-2, -1, 0, 1], [0, 1, 2, 3]])
    trace = record(noisy_decoder(spec), random_ids(spec, 2, 4), positions)
    masked = trace.tensor("layers.1.attn.masked")
    assert torch.equal(trace.positions, positions)
    assert torch.equal(trace.keys[1], positions)
    assert masked[0, 0, 3].isfinite().tolist() == [False, False, True, True]
    assert masked[1, 0, 3].isfinite().tolist() == [True] * 4


def test_the_parameters_are_the_decoders_own():
    decoder = noisy_decoder(VARIANTS["gpt2"])
    trace = record(decoder, random_ids(decoder.spec, 1, 2))
    assert trace.parameters["head.weight"] is decoder.embed.weight
    assert set(trace.parameters) == {row.name for row in ledger(decoder.spec).tensors}


# --- what is left out, what is left as it was ---------------------------------------------------


def test_only_what_is_asked_for_is_kept():
    decoder = noisy_decoder(VARIANTS["sandwich"])
    trace = record(decoder, random_ids(decoder.spec, 1, 3), only=lambda name: name.endswith("attn.probs"))
    assert [step.name for step in trace] == ["layers.0.attn.probs", "layers.1.attn.probs"]
    assert "layers.0.attn.masked" not in trace


def hooks(decoder) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in decoder.modules())


def test_the_model_is_as_before_even_after_a_failure():
    decoder = noisy_decoder(VARIANTS["parallel"])
    record(decoder, random_ids(decoder.spec, 1, 3))
    with pytest.raises(IndexError):
        record(decoder, torch.tensor([[decoder.spec.vocab_size]]))
    assert hooks(decoder) == 0
    assert not any(isinstance(module, RecordingCore) for module in decoder.modules())
    assert all(type(layer.attn.core) is FusedCore for layer in decoder.layers)


# --- statistics ---------------------------------------------------------------------------------


def test_statistics_are_of_the_finite_numbers():
    x = torch.tensor([[3.0, -1.0, torch.inf], [torch.nan, -torch.inf, 4.0]])
    found = Statistics.of(x)
    assert (found.low, found.high, found.mean, found.nan, found.inf) == (-1.0, 4.0, 2.0, 1, 2)
    assert found.std == pytest.approx((14 / 3) ** 0.5)
    assert found.l2 == pytest.approx(26**0.5)


def test_statistics_are_taken_piece_by_piece_as_of_the_whole():
    x = torch.randn(3, CHUNK - 5, generator=torch.Generator().manual_seed(0)) * 7 + 1000
    found, whole = Statistics.of(x), x.double()
    assert (found.low, found.high) == (float(x.min()), float(x.max()))
    assert found.mean == pytest.approx(float(whole.mean()), rel=1e-12)
    assert found.std == pytest.approx(float(whole.std(correction=0)), rel=1e-9)
    assert found.l2 == pytest.approx(float(whole.norm()), rel=1e-12)
    x[1, 3], x[2] = torch.nan, -torch.inf
    found, finite = Statistics.of(x), x[x.isfinite()].double()
    assert (found.nan, found.inf) == (1, CHUNK - 5)
    assert found.mean == pytest.approx(float(finite.mean()), rel=1e-12)
    assert found.high == float(finite.max())


def test_statistics_of_several_tensors_are_those_of_all_their_numbers():
    parts = [torch.randn(n, generator=torch.Generator().manual_seed(n)) + n for n in (3, 50, 7)]
    parts += [torch.tensor([torch.nan, torch.inf, 2.0]), torch.full((4,), -torch.inf)]
    found = Statistics.together((Statistics.of(x), x.numel()) for x in parts)
    whole = Statistics.of(torch.cat(parts))
    assert (found.low, found.high, found.nan, found.inf) == (whole.low, whole.high, 1, 5)
    assert (found.mean, found.std, found.l2) == pytest.approx((whole.mean, whole.std, whole.l2))
    assert Statistics.together([]) == Statistics(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)


def test_statistics_of_nothing_finite_are_zero():
    assert Statistics.of(torch.full((2, 3), -torch.inf)) == Statistics(0.0, 0.0, 0.0, 0.0, 0.0, 0, 6)


# --- bytes, time --------------------------------------------------------------------------------


def test_the_bytes_of_a_trace_are_told_before_it_is_made(name: str):
    for dtype in (torch.float32, torch.bfloat16):
        decoder = noisy_decoder(VARIANTS[name], dtype)
        short = "fp32" if dtype == torch.float32 else "bf16"
        ids = random_ids(decoder.spec, BATCH, NEW)
        trace = record(decoder, ids)
        masks = {id(m.visible): m.visible for m in trace.tensors.held.values() if isinstance(m, Masked)}
        predicted = trace_bytes(decoder.spec, short, BATCH, NEW)
        sizes = {n: x.numel() * x.element_size() for n, x in trace.tensors.items() if ".masked" not in n}
        assert predicted == sum(sizes.values())
        # A sink's share lies beside the probabilities, which are a part of that piece.
        sinks = sum(
            BATCH * 8 * NEW * 4 for block in decoder.spec.layers if getattr(block.attn, "sinks", False)
        )
        assert trace.bytes <= predicted + sum(mask.numel() for mask in masks.values()) + sinks
        only = ["layers.1.attn.*", "head"]
        lean = record(decoder, ids, only=only)
        assert trace_bytes(decoder.spec, short, BATCH, NEW, only=only) == sum(
            sizes[n] for n in sizes if n in lean
        )


def test_masked_scores_take_no_memory_beside_the_scores():
    decoder = noisy_decoder(VARIANTS["llama"])
    trace = record(decoder, random_ids(decoder.spec, 1, 40), only=["*.scores", "*.masked"])
    scores = sum(trace.tensor(f"layers.{i}.attn.scores").numel() * 4 for i in range(3))
    assert trace.bytes == scores + 40 * 40  # one triangle for all layers
    assert trace.tensor("layers.1.attn.masked").isinf().sum() == 8 * 40 * 39 / 2


def test_time_is_that_of_the_modules_and_cores_and_only_where_it_is_asked_for():
    decoder = noisy_decoder(VARIANTS["experts"])
    ids = random_ids(decoder.spec, 1, 5)
    assert all(step.seconds is None for step in record(decoder, ids))
    trace = record(decoder, ids, time=True)
    unmeasured = {s.local for s in trace if s.seconds is None}
    assert unmeasured == {"attn_add", "mlp_add", "mlp.chosen", "mlp.experts.sum", "mlp.shared_add"}
    assert all(s.seconds > 0 for s in trace if s.seconds is not None)
    lean = record(decoder, ids, time=True, only=["*.q", "*.probs"])
    assert set(lean.seconds) == set(lean.tensors)
    assert torch.equal(trace.tensor("head"), record(decoder, ids).tensor("head"))
