"""Where the two derivations meet: the ledger against the running model.

`openbook.ledger` and `openbook.model` read the same spec and never each other. Here every weight is
compared by name and shape, every step's FLOPs with what a dispatch-level counter sees, its output with
the tensor a module returns, the cache with the buffers allocated, and the activations with what autograd
really saves.

Runs are short, because on the CPU the model attends to a causal run of more than 64 tokens in blocks of
queries, each against the keys up to its own end: part of the rectangle is then never executed, and the
blocks' results are joined by one more copy. Neither is the mathematics; longer runs are compared with the
explicit core or on the meta device, where there are no blocks.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from openbook.infer.cache import Cache
from openbook.ledger import Workload, ledger
from openbook.model import Decoder, ExplicitCore, FusedCore
from openbook.spec.presets import PRESETS, preset
from openbook.weights.tensors import kept_dtype
from strategies import specs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

some = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def without_windows(spec):
    layers = (replace(block, attn=replace(block.attn, window=None)) for block in spec.layers)
    return spec.replace(layers=tuple(layers))


def one_layer_of_each_kind(spec):
    return spec.replace(layers=tuple(dict.fromkeys(spec.layers)))


def with_core(decoder, core):
    for layer in decoder.layers:
        layer.attn.core = core()
    return decoder


# --- weights ---


def assert_same_weights(spec):
    with torch.device("meta"):
        decoder = Decoder(spec)
    book = ledger(spec)
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters(remove_duplicate=False)}
    assert {row.name: row.shape for row in book.tensors} == shapes
    assert book.params.total == sum(p.numel() for p in decoder.parameters())
    assert book.params.state_dict == sum(p.numel() for p in decoder.state_dict().values())
    shared = {name for name in shapes if decoder.get_parameter(name) is decoder.get_parameter("embed.weight")}
    assert {row.name for row in book.tensors if row.tie} == shared - {"embed.weight"}


@pytest.mark.parametrize("name", PRESETS)
def test_every_weight_of_every_preset_has_the_models_name_and_shape(name):
    assert_same_weights(preset(name))


@some
@given(spec=specs())
def test_every_weight_of_any_spec_has_the_models_name_and_shape(spec):
    assert_same_weights(spec)


@some
@given(spec=specs(), dtype=st.sampled_from(sorted(DTYPES)))
def test_the_weights_take_the_bytes_in_which_they_are_loaded(spec, dtype):
    with torch.device("meta"):
        decoder = Decoder(spec)
    sizes = (p.numel() * kept_dtype(name, DTYPES[dtype]).itemsize for name, p in decoder.named_parameters())
    assert ledger(spec, dtype).weight_bytes == sum(sizes)


# --- FLOPs ---


def sdpa_flops(q, k, v, *args, out_shape=None, **kwargs):
    """Two products over the whole rectangle; PyTorch's own counter sees 0 on the CPU."""
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3]


FUSED_OPS = dict.fromkeys(
    (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
        torch.ops.aten._scaled_dot_product_efficient_attention,
    ),
    sdpa_flops,
)


def counted(run):
    """FLOPs by module, as the dispatcher saw them: {"layers.0.attn.q": ..., "": the whole model}."""
    with FlopCounterMode(display=False, custom_mapping=FUSED_OPS) as counter:
        run()
    counts = {name.partition(".")[2]: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    counts[""] = counter.get_total_flops()
    return counts


def booked(spec, workload):
    """The ledger's FLOPs under the names of the modules: scores and mix are the work of `attn.core`."""
    flops = {"": 0}
    for row in ledger(spec).ops(workload):
        name = row.name.replace("attn.scores", "attn.core").replace("attn.mix", "attn.core")
        flops[""] += row.flops
        flops[name] = flops.get(name, 0) + row.flops
    return {name: count for name, count in flops.items() if count}


def assert_same_flops(spec, workload, run):
    # A masked product is executed in full, so the rectangle without windows is what a counter sees.
    expected = booked(without_windows(spec), replace(workload, attention="full"))
    seen = counted(run)
    assert {name: seen.get(name, 0) for name in expected} == expected


@some
@given(
    spec=specs(),
    core=st.sampled_from((ExplicitCore, FusedCore)),
    batch=st.integers(1, 3),
    new=st.integers(2, 6),
)
def test_every_step_costs_the_flops_that_a_counter_sees(spec, core, batch, new):
    decoder = with_core(Decoder(spec), core)
    ids = torch.zeros(batch, new, dtype=torch.int64)
    with torch.no_grad():
        assert_same_flops(spec, Workload("prefill", batch, new, last_only=False), lambda: decoder(ids))
        assert_same_flops(spec, Workload("prefill", batch, new), lambda: decoder(ids, last_only=True))


@some
@given(
    spec=specs().map(without_windows), batch=st.integers(1, 2), past=st.integers(1, 6), new=st.integers(1, 4)
)
def test_steps_after_a_cache_cost_the_flops_that_a_counter_sees(spec, batch, past, new):
    decoder = with_core(Decoder(spec), ExplicitCore)
    cache = Cache(spec, batch, past + new)
    with torch.no_grad():
        decoder(torch.zeros(batch, past, dtype=torch.int64), cache=cache)
        ids = torch.zeros(batch, new, dtype=torch.int64)
        workload = Workload("decode", batch, new, past)
        assert_same_flops(spec, workload, lambda: decoder(ids, cache=cache))


@some
@given(spec=specs(), batch=st.integers(1, 3), new=st.integers(2, 6))
def test_a_training_step_costs_the_flops_that_a_counter_sees(spec, batch, new):
    decoder = with_core(Decoder(spec), ExplicitCore)
    ids = torch.zeros(batch, new, dtype=torch.int64)
    expected = booked(without_windows(spec), Workload("train", batch, new, attention="full"))[""]
    assert counted(lambda: decoder(ids).sum().backward())[""] == expected


@some
@given(spec=specs(max_layers=1).map(without_windows), prompt=st.integers(1, 4), new=st.integers(1, 4))
def test_generation_costs_what_a_counter_sees_with_and_without_a_cache(spec, prompt, new):
    decoder, book = with_core(Decoder(spec), ExplicitCore), ledger(spec)
    text = torch.zeros(1, prompt + new, dtype=torch.int64)

    def cached():
        cache = Cache(spec, 1, prompt + new)
        decoder(text[:, :prompt], cache=cache, last_only=True)
        for i in range(prompt, prompt + new - 1):
            decoder(text[:, i : i + 1], cache=cache)

    def uncached():
        for i in range(prompt, prompt + new):
            decoder(text[:, :i], last_only=True)

    with torch.no_grad():
        assert counted(cached)[""] == book.generation_flops(prompt, new, attention="full")
        assert counted(uncached)[""] == book.generation_flops(prompt, new, cached=False, attention="full")


@pytest.mark.parametrize("name", PRESETS)
def test_every_step_of_every_preset_costs_what_a_counter_sees(name):
    spec = one_layer_of_each_kind(preset(name))
    with torch.device("meta"):
        decoder = with_core(Decoder(spec), ExplicitCore)
        ids = torch.zeros(2, 7, dtype=torch.int64)
    with torch.no_grad():
        assert_same_flops(spec, Workload("prefill", 2, 7, last_only=False), lambda: decoder(ids))


@pytest.mark.parametrize("core", [ExplicitCore, FusedCore])
def test_a_long_run_costs_the_rectangle_where_it_is_not_cut_into_blocks(core):
    spec = one_layer_of_each_kind(preset("smollm2-135m"))
    with torch.device("meta"):
        decoder = with_core(Decoder(spec), core)
        ids = torch.zeros(2, 200, dtype=torch.int64)
    with torch.no_grad():
        assert_same_flops(spec, Workload("prefill", 2, 200), lambda: decoder(ids, last_only=True))


def test_a_long_run_in_blocks_costs_more_than_the_triangle_and_less_than_the_rectangle():
    spec = one_layer_of_each_kind(preset("smollm2-135m"))
    decoder, ids = Decoder(spec), torch.zeros(1, 200, dtype=torch.int64)
    name = "layers.0.attn.core"
    causal, full = (booked(spec, Workload("prefill", new=200, attention=a))[name] for a in ("causal", "full"))
    with torch.no_grad():
        assert causal < counted(lambda: decoder(ids))[name] < full


# --- memory ---


@some
@given(
    spec=specs(), batch=st.integers(1, 3), capacity=st.integers(1, 100), dtype=st.sampled_from(sorted(DTYPES))
)
def test_the_cache_takes_the_bytes_that_are_allocated(spec, batch, capacity, dtype):
    cache = Cache(spec, batch, capacity, DTYPES[dtype])
    assert cache.nbytes == ledger(spec).kv_bytes(batch, capacity, dtype)


UNNAMED = {"scores", "masked", "probs", "attn_add", "mlp_add", "shared_add"}
"""Steps that are not modules, so that no hook sees their output. (An addition's may be its layer's.)"""

MODULES = {"attn.mix": "attn.core", "mlp.experts.sum": "mlp.experts"}
"""Steps whose result is that of a module of another name."""


def module_of(step):
    for name, module in MODULES.items():
        if step.endswith(name):
            return step.replace(name, module)
    return step


def output_bytes(decoder, ids):
    """Bytes of what each module returns, by name. `embed` and `positions` are what the first layer reads."""
    seen = {}

    def note(name):
        # A choice of experts is weights and numbers; the weights are what is booked. Each expert's matrices
        # are called for themselves.
        return lambda module, inputs, output: seen.update(
            {
                name: seen.get(name, 0)
                + (output if isinstance(output, torch.Tensor) else output.weights).nbytes
            }
        )

    for name, module in decoder.named_modules():
        module.register_forward_hook(note(name))
    decoder.layers[0].register_forward_pre_hook(
        lambda module, inputs: seen.update(embed=inputs[0].nbytes, positions=inputs[0].nbytes)
    )
    decoder(ids)
    return seen


@some
@given(
    spec=specs(),
    core=st.sampled_from((FusedCore, ExplicitCore)),
    dtype=st.sampled_from(sorted(DTYPES)),
    batch=st.integers(1, 3),
    new=st.integers(2, 6),
)
def test_every_steps_output_has_the_bytes_of_the_tensor_that_a_module_returns(spec, core, dtype, batch, new):
    decoder = with_core(Decoder(spec).to(DTYPES[dtype]), core)
    rows = ledger(spec, dtype).ops(Workload("train", batch, new))
    expected = {module_of(row.name): row.activation_bytes for row in rows}
    expected |= {f"layers.{row.layer}": row.activation_bytes for row in rows if row.layer is not None}
    with torch.no_grad():
        seen = output_bytes(decoder, torch.zeros(batch, new, dtype=torch.int64))
    assert {name.rpartition(".")[2] for name in expected.keys() - seen.keys()} <= UNNAMED
    assert {name: seen[name] for name in expected if name in seen} == {
        name: count for name, count in expected.items() if name in seen
    }


def saved_bytes(decoder, ids):
    """Bytes of the distinct activations that autograd saves in one forward pass."""
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        decoder(ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@some
@given(
    spec=specs(),
    core=st.sampled_from((FusedCore, ExplicitCore)),
    dtype=st.sampled_from(sorted(DTYPES)),
    batch=st.integers(2, 3),
    new=st.integers(3, 6),
)
def test_the_activations_kept_are_those_that_autograd_saves(spec, core, dtype, batch, new):
    decoder = with_core(Decoder(spec).to(DTYPES[dtype]), core)
    more, less = (saved_bytes(decoder, torch.zeros(n, new, dtype=torch.int64)) for n in (batch + 1, batch))
    # What one more sequence adds: masks and angles, which all sequences share, are not activations.
    workload = Workload("train", batch, new, core="fused" if core is FusedCore else "explicit")
    assert ledger(spec, dtype).totals(workload).kept_bytes == batch * (more - less)
