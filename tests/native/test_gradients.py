"""Gradients through native attention, norms, rotations and gates, against those through what they replace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from openbook.model.attention import ExplicitCore, FusedCore, Mask
from openbook.model.mlp import Activation
from openbook.model.norm import Norm
from openbook.model.positions import Rotate, rotation
from openbook.native import NativeActivation, NativeCore, NativeNorm, NativeRotate
from openbook.native.modules import LEARNED_THROUGH, LEAST_ROWS, MOST_WIDTH, ROWS_SUMMED
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
    exact = gradients(Activation(kind), x.double(), gate.double())
    atol, rtol = {torch.float32: (1e-6, 5e-6), torch.bfloat16: (2**-6, 2**-6)}[dtype]
    for found, expected in zip(gradients(NativeActivation(kind), x, gate), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=rtol)


def test_what_c_cannot_learn_through_is_pytorchs():
    x, gate = torch.randn(2, 19, 24, requires_grad=True), torch.randn(2, 19, 24)
    torch.testing.assert_close(NativeActivation("gelu")(x, gate), Activation("gelu")(x, gate), rtol=0, atol=0)
    norm = Norm(RMS, 24)
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    half = norm.to(torch.bfloat16)
    torch.testing.assert_close(NativeNorm(half)(x), half(x), rtol=0, atol=0)


# --- attention ----------------------------------------------------------------------------------

SHAPES = [
    (1, 6, 2, 45, 48),
    (2, 3, 3, 130, 64),
    (3, 4, 1, 64, 16),
    (1, 2, 2, 200, 80),
    (2, 2, 1, LEAST_ROWS, 128),
]
"""Rows, query heads, key heads, tokens, a head's width: some fill C's blocks of 64 and 16, some do not."""


def runs(kind: str, B: int, T: int) -> Mask:
    """A mask said in both ways: as where each query's keys begin, and as a table, by what it means."""
    if kind == "causal":
        return Mask(causal=True)
    at = torch.arange(T)
    lengths = torch.tensor([[3, T // 2, T], [T - 1, T, T], [1, 2, T]])[:B]  # the documents' ends
    document = (at[None, :, None] >= lengths[:, None, :]).sum(-1)
    near = at[:, None] - at < (T // 3 if kind == "documents and window" else T)
    seen = (at[:, None] >= at) & near & (document[:, :, None] == document[:, None, :])
    return Mask(seen[:, None], since=seen.int().argmax(-1).int())


@pytest.mark.parametrize("kind", ["causal", "documents", "documents and window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "H", "G", "T", "K"), SHAPES)
def test_gradients_of_native_attention(B: int, H: int, G: int, T: int, K: int, dtype: torch.dtype, kind: str):
    """Heads lie beside each other, keys and values in wider rows whose rest is NaN. In bf16 the explicit core
    rounds as often: what is compared is how far both are from fp32."""
    q = torch.randn(B, T, H, K).to(dtype).transpose(1, 2)
    wide = torch.full((2, B, T, G * K + 5), torch.nan, dtype=dtype)
    wide[..., : G * K] = torch.randn(2, B, T, G * K)
    k, v = (x[..., : G * K].unflatten(-1, (G, K)).transpose(1, 2) for x in wide)
    mask, scale = runs(kind, B, T), K**-0.5

    def run(core: nn.Module) -> Callable[..., Tensor]:
        return lambda q, k, v: core(q, k, v, mask, scale)

    assert "_Attended" in str(run(NativeCore())(q, k.detach().requires_grad_(), v).grad_fn.next_functions)
    exact = gradients(run(ExplicitCore()), *(x.float() for x in (q, k, v)))
    found, rounded = (gradients(run(core()), q, k, v) for core in (NativeCore, ExplicitCore))
    for ours, theirs, right in zip(found, rounded, exact, strict=True):
        assert ours.dtype == dtype
        error, usual = ((x.float() - right).norm() / right.norm() for x in (ours, theirs))
        assert error < (2e-6 if dtype == torch.float32 else 1.5 * usual < 2e-2)


def test_a_gradient_of_attention_does_not_depend_on_the_threads():
    q, k, v = torch.randn(2, 6, 100, 32), torch.randn(2, 3, 100, 32), torch.randn(2, 3, 100, 32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(gradients(lambda *x: NativeCore()(*x, Mask(causal=True), 0.2), q, k, v))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert torch.equal(ours, theirs)


def test_attention_that_c_cannot_learn_through_is_pytorchs():
    """Heads too wide, a chunk after others, a soft-cap: with the gradients of the explicit core."""
    causal = Mask(causal=True)
    for T, K, softcap in ((20, MOST_WIDTH + 16, None), (17, 16, None), (20, 16, 3.0)):
        q, k, v = torch.randn(1, 4, T, K), torch.randn(1, 2, 20, K), torch.randn(1, 2, 20, K)
        found, expected = (
            gradients(lambda *x, core=core, cap=softcap: core()(*x, causal, 0.3, cap), q, k, v)
            for core in (NativeCore, FusedCore)
        )
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
