"""Gradients through the native norms, rotations and gates, against those through what they replace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from openbook.model.mlp import Activation
from openbook.model.norm import Norm
from openbook.model.positions import Rotate, rotation
from openbook.native import NativeActivation, NativeNorm, NativeRotate
from openbook.native.modules import LEARNED_THROUGH, ROWS_SUMMED
from openbook.spec.model import Norm as NormSpec
from openbook.spec.model import Rope
from variants import GEMMA, LAYER, RMS


def gradients(run: Callable[..., Tensor], *inputs: Tensor, of: nn.Module | None = None) -> list[Tensor]:
    """Of a weighted sum of what comes out, by the inputs and the module's parameters."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    y = run(*inputs)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    parameters = list(of.parameters()) if of is not None else []
    return list(torch.autograd.grad((y.float() * weights).sum(), [*inputs, *parameters]))


@pytest.mark.parametrize(
    "spec",
    [
        RMS,
        LAYER,
        GEMMA,
        NormSpec("rms", weight=False),
        NormSpec("layer", weight=False),
        NormSpec("rms", bias=True),
    ],
)
@pytest.mark.parametrize("rows", [19, ROWS_SUMMED, 3 * ROWS_SUMMED + 1])
@pytest.mark.parametrize("width", [64, 83])
def test_gradients_of_native_norms(spec: NormSpec, rows: int, width: int):
    norm = Norm(spec, width)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, rows, width) * 3 + 1
    native = NativeNorm(norm)
    assert "_Normed" in str(native(x.requires_grad_()).grad_fn)
    for found, expected in zip(gradients(native, x, of=norm), gradients(norm, x, of=norm), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-6 * rows, rtol=2e-6)


def test_the_gradient_of_a_frozen_norm_reaches_its_input_alone():
    norm = Norm(LAYER, 33)
    for parameter in norm.parameters():
        nn.init.normal_(parameter).requires_grad_(False)
    x = torch.randn(2, 16, 33, requires_grad=True)
    NativeNorm(norm)(x).square().sum().backward()
    assert x.grad is not None
    assert norm.weight is not None
    assert norm.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [Rope(64), Rope(32), Rope(36)])
@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_of_native_rotations(rope: Rope, dtype: torch.dtype, batch: int):
    """All rows with the same positions, and each with its own. A gradient in bf16 is rounded once here and
    several times in PyTorch: it is compared with fp32."""
    x = torch.randn(3, 21, 5, 64).to(dtype).transpose(1, 2)
    by = rotation(rope, torch.arange(21) + 100 * torch.arange(batch)[:, None])
    native, plain = NativeRotate(rope), Rotate(rope)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(native(x, by), plain(x, by), atol=1e-6, rtol=tolerance)
    (found,), (exact,) = gradients(lambda x: native(x, by), x), gradients(lambda x: plain(x, by), x.float())
    # The gradient that comes in is rounded to bf16 as well, and the two of a pair may nearly cancel.
    torch.testing.assert_close(found.float(), exact, atol=tolerance * 2, rtol=tolerance)


@pytest.mark.parametrize("kind", LEARNED_THROUGH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_native_gates(kind: str, dtype: torch.dtype):
    x, gate = torch.randn(1, 19, 83).to(dtype), (torch.randn(1, 19, 83) * 5).to(dtype)
    gate[0, 0, :4] = torch.tensor([0.0, -200.0, 200.0, -0.0])
    exact = gradients(Activation(kind), x.float(), gate.float())
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-6}[dtype]
    for found, expected in zip(gradients(NativeActivation(kind), x, gate), exact, strict=True):
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def test_what_c_cannot_learn_through_is_pytorchs():
    x, gate = torch.randn(2, 19, 24, requires_grad=True), torch.randn(2, 19, 24)
    torch.testing.assert_close(NativeActivation("gelu")(x, gate), Activation("gelu")(x, gate), rtol=0, atol=0)
    norm = Norm(RMS, 24)
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    half = norm.to(torch.bfloat16)
    torch.testing.assert_close(NativeNorm(half)(x), half(x), rtol=0, atol=0)
