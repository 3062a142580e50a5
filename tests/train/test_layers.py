"""Checkpointed, compiled and fast layers compute what plain ones do, packed documents included."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openbook.model import Decoder
from openbook.spec.model import ModelSpec, Rope
from openbook.train.layers import (
    FastLinear,
    can_multiply,
    prepare_layers,
    use_fast_modules,
)
from openbook.train.loop import accumulate, batch_loss
from openbook.train.pack import IGNORED, Batch
from variants import VARIANTS, attention, block, model, noisy_decoder

Gradients = dict[str, Tensor]


def rows(vocab_size: int, lengths: list[list[int]], length: int) -> Batch:
    """Rows of random tokens in documents of these lengths, padded."""
    draw = np.random.default_rng(5)
    columns = []
    for row in lengths:
        pad = length - sum(row)
        positions = np.concatenate([np.arange(n) for n in row] + [np.full(pad, -1)])
        documents = np.concatenate([np.full(n, i) for i, n in enumerate(row)] + [np.full(pad, -1)])
        labels = np.where(np.append(positions[1:], 0) > 0, draw.integers(0, vocab_size, length), IGNORED)
        columns.append((draw.integers(0, vocab_size, length), positions, labels, documents))
    return Batch(*(np.array(column, np.int64) for column in zip(*columns, strict=True)))


def step(decoder: Decoder, batch: Batch, bf16: bool = False, balance: float = 0.0) -> tuple[float, Gradients]:
    decoder.zero_grad()
    loss = accumulate(decoder, batch, len(batch.ids), bf16=bf16, balance=balance)
    return loss, {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


def assert_same(found: tuple[float, Gradients], expected: tuple[float, Gradients], tolerance: float) -> None:
    """To a part of each gradient's norm. Of keys' biases they are 0 but for rounding."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= tolerance * (gradient.norm() + 1e-2), name


PACKED, SINGLE = [[11, 20], [31], [5, 9, 12]], [[31], [31]]


@pytest.mark.parametrize("lengths", [PACKED, SINGLE])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_fast_modules_have_the_loss_and_gradients_of_plain_ones(name: str, lengths: list[list[int]]):
    plain = noisy_decoder(VARIANTS[name]).train()
    fast = copy.deepcopy(plain)
    use_fast_modules(fast)
    batch = rows(plain.spec.vocab_size, lengths, 31)
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert_same(step(fast, batch), step(plain, batch), 2e-6)


def wide_heads() -> ModelSpec:
    """Of 16 numbers, as attention in C wants them; one layer has a window, and heads share keys."""
    sizes: dict[str, Any] = {"head_dim": 16, "scale": 0.25, "rope": Rope(16)}
    return model(block(attn=attention(**sizes)), block(attn=attention(**sizes, window=7)))


@pytest.mark.parametrize("lengths", [PACKED, SINGLE])
def test_attention_in_c_has_the_loss_and_gradients_of_the_model(lengths: list[list[int]]):
    plain = noisy_decoder(wide_heads()).train()
    fast = copy.deepcopy(plain)
    use_fast_modules(fast)
    ways: list[str] = []
    for layer in fast.layers:
        layer.attn.core.register_forward_hook(
            lambda core, inputs, y: ways.append(type(y.grad_fn.next_functions[0][0]).__name__)
        )
    batch = rows(plain.spec.vocab_size, lengths, 31)
    assert_same(step(fast, batch), step(plain, batch), 2e-6)
    assert ways == ["_AttendedBackward"] * 2


@pytest.mark.parametrize("name", ["llama", "windows", "experts"])
def test_checkpointed_layers_have_the_same_gradients_bit_for_bit(name: str):
    plain = noisy_decoder(VARIANTS[name]).train()
    use_fast_modules(plain)
    again = copy.deepcopy(plain)
    prepare_layers(again, checkpoint_layers=True)
    balance = 0.3 if name == "experts" else 0.0
    batch = rows(plain.spec.vocab_size, PACKED, 31)
    assert_same(step(again, batch, balance=balance), step(plain, batch, balance=balance), 0)


def test_checkpointed_layers_keep_only_their_inputs():
    """What autograd saves of a layer's own is x [B, T, D]; masks and angles are shared."""
    decoder = noisy_decoder(VARIANTS["llama"]).train()
    kept: list[Tensor] = []
    batch = rows(decoder.spec.vocab_size, SINGLE, 31)

    def saved() -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            batch_loss(decoder, batch)
        own = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        for parameter in decoder.parameters():
            own.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(own.values())

    whole = saved()
    prepare_layers(decoder, checkpoint_layers=True)
    stream = 2 * 31 * decoder.spec.d_model * 4
    assert saved() <= (decoder.spec.n_layers + 6) * stream < whole / 3


COMPILED = """
from functools import partial
from train.test_layers import *
torch.compile = partial(torch.compile, backend="{backend}")
plain = noisy_decoder(VARIANTS["llama"]).train()
compiled = copy.deepcopy(plain)
prepare_layers(compiled, compile=True, checkpoint_layers={checkpoint})
for lengths in (PACKED, [[31], [31], [31]]):
    batch = rows(plain.spec.vocab_size, lengths, 31)
    assert_same(step(compiled, batch), step(plain, batch), 1e-5)
"""


FULL = os.environ.get("OPENBOOK_FULL") == "1"


@pytest.mark.parametrize("checkpoint", [False, True] if FULL else [True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"] if FULL else ["aot_eager"])
def test_compiled_layers_have_the_same_losses_and_gradients(backend: str, checkpoint: bool):
    """Packed and single documents, in a process of its own: the tests' checks of shapes do not compile."""
    code = COMPILED.format(backend=backend, checkpoint=checkpoint)
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_bf16_is_as_near_to_fp32_with_fast_modules_as_without():
    plain = noisy_decoder(VARIANTS["llama"]).train()
    fast = copy.deepcopy(plain)
    use_fast_modules(fast)
    batch = rows(plain.spec.vocab_size, SINGLE, 31)
    exact = step(plain, batch)[1]
    errors = [
        sum(float((found[n] - exact[n]).norm() / exact[n].norm()) for n in exact) / len(exact)
        for found in (step(fast, batch, bf16=True)[1], step(plain, batch, bf16=True)[1])
    ]
    assert errors[0] < 1.1 * errors[1] < 0.1


def test_a_frozen_model_gets_no_gradient_but_lets_it_through():
    """As adapters need it: only the first norm of the last layer is learned."""
    plain = noisy_decoder(VARIANTS["llama"]).train().requires_grad_(False)
    name = "layers.0.attn_norm.weight"
    dict(plain.named_parameters())[name].requires_grad_(True)
    fast = copy.deepcopy(plain)
    use_fast_modules(fast)
    batch = rows(plain.spec.vocab_size, SINGLE, 31)
    found = step(fast, batch)
    assert list(found[1]) == [name]
    assert_same(found, step(plain, batch), 2e-6)


# --- the parts ----------------------------------------------------------------------------------


@pytest.mark.skipif(not can_multiply(), reason="PyTorch without oneDNN")
@pytest.mark.parametrize("bias", [False, True])
def test_products_through_onednn_are_linear(bias: bool):
    linear = nn.Linear(23, 37, bias=bias)
    fast = FastLinear(linear)
    x = torch.randn(3, 19, 23, requires_grad=True)
    weights = torch.randn(3, 19, 37)
    found, expected = (
        torch.autograd.grad((module(x) * weights).sum(), [x, *module.parameters()])
        for module in (fast, linear)
    )
    torch.testing.assert_close(fast(x), F.linear(x, linear.weight, linear.bias), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
