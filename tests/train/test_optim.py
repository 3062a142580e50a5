"""Optimizers against PyTorch's own and against arithmetic by hand."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from openbook.ledger import ledger
from openbook.model import Decoder
from openbook.spec.model import ModelSpec
from openbook.train.checkpoint import CheckpointError, load_latest, save
from openbook.train.optim import (
    Groups,
    Optimizer,
    cosine,
    orthogonal,
    parameter_groups,
    warmup_stable_decay,
)
from variants import VARIANTS


def model_and_groups(spec: ModelSpec) -> tuple[Decoder, Groups]:
    with torch.device("meta"):
        decoder = Decoder(spec)
    decoder = decoder.to_empty(device="cpu")
    decoder.tie()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(generator=generator)
    return decoder, parameter_groups(decoder, ledger(spec).tensors)


def two_matrices() -> Groups:
    generator = torch.Generator().manual_seed(1)
    a, b = (nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((6, 11), (9, 4)))
    return Groups({"layers.0.a": a, "layers.0.b": b}, {}, {"norm": nn.Parameter(torch.ones(5))})


def set_gradients(groups: Groups, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in (*groups.block_matrices.values(), *groups.matrices.values(), *groups.plain.values()):
        parameter.grad = torch.randn(parameter.shape, generator=generator)


# --- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_parameter_is_in_one_group_and_a_tied_head_once(name: str):
    decoder, groups = model_and_groups(VARIANTS[name])
    names = [*groups.block_matrices, *groups.matrices, *groups.plain]
    assert len(names) == len(set(names))
    expected = {name for name, _ in decoder.named_parameters() if not name.endswith(".correction")}
    assert set(names) == expected
    tied = VARIANTS[name].head.tied
    assert set(groups.matrices) == (set() if tied else {"head.weight"})
    assert "embed.weight" in groups.plain


def test_two_axes_make_no_matrix():
    """Norms of each head's own and biases of experts have two; the ledger knows what they are."""
    _, groups = model_and_groups(VARIANTS["head-norms"])
    assert groups.plain["layers.0.attn.q_norm.weight"].dim() == 2
    _, groups = model_and_groups(VARIANTS["experts"])
    assert groups.plain["layers.3.mlp.experts.gate.bias"].dim() == 2
    assert groups.block_matrices["layers.3.mlp.experts.gate.weight"].dim() == 3
    assert "layers.1.mlp.router.weight" in groups.block_matrices


def test_what_is_frozen_is_left_out():
    spec = VARIANTS["llama"]
    decoder, _ = model_and_groups(spec)
    decoder.layers[1].requires_grad_(False)
    groups = parameter_groups(decoder, ledger(spec).tensors)
    assert not any(name.startswith("layers.1.") for name in (*groups.block_matrices, *groups.plain))
    assert "layers.2.attn.q.weight" in groups.block_matrices


def test_a_parameter_that_the_ledger_does_not_know_is_an_error():
    spec = VARIANTS["llama"]
    decoder, _ = model_and_groups(spec)
    decoder.extra = nn.Linear(3, 4)
    with pytest.raises(ValueError, match=r"no row extra\.weight"):
        parameter_groups(decoder, ledger(spec).tensors)


# --- AdamW --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "experts"])
def test_only_matrices_decay(name: str):
    """With gradients of zero AdamW moves nothing but by weight decay: w · (1 - lr · decay)."""
    decoder, groups = model_and_groups(VARIANTS[name])
    before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    optimizer = Optimizer(groups, lr=0.5, weight_decay=0.1)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in decoder.named_parameters():
        shrinks = name in groups.block_matrices or name in groups.matrices
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if shrinks else 1.0))


def test_an_update_is_the_textbooks():
    """Kingma and Ba's first two steps, by hand: gradients 3 and -1, betas 0.9 and 0.95."""
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = Optimizer(
        Groups({}, {"w": weight}, {}), lr=0.1, weight_decay=0.2, betas=(0.9, 0.95), eps=1e-8
    )
    w, m, v = 2.0, 0.0, 0.0
    for t, gradient in enumerate((3.0, -1.0), start=1):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        w -= 0.1 * 0.2 * w
        w -= 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)) ** 0.5 + 1e-8)
        assert weight.item() == pytest.approx(w, rel=1e-6)


def test_a_scale_of_half_moves_half_as_far():
    moves = []
    for scale in (1.0, 0.5):
        groups = two_matrices()
        before = groups.block_matrices["layers.0.a"].detach().clone()
        set_gradients(groups, 1)
        Optimizer(groups, lr=0.01, weight_decay=0).step(scale)
        moves.append(groups.block_matrices["layers.0.a"].detach() - before)
    torch.testing.assert_close(moves[1], moves[0] / 2)


def test_gradients_are_clipped_by_their_common_norm():
    """3 and 4 have the norm 5."""
    groups = Groups({"a": nn.Parameter(torch.zeros(1, 1))}, {}, {"b": nn.Parameter(torch.zeros(2))})
    optimizer = Optimizer(groups, lr=1)
    groups.block_matrices["a"].grad = torch.tensor([[3.0]])
    groups.plain["b"].grad = torch.tensor([0.0, -4.0])
    assert optimizer.clip(10.0) == pytest.approx(5)
    assert groups.plain["b"].grad.tolist() == [0, -4]
    assert optimizer.clip(1.0) == pytest.approx(5)
    torch.testing.assert_close(groups.block_matrices["a"].grad, torch.tensor([[0.6]]))
    torch.testing.assert_close(groups.plain["b"].grad, torch.tensor([0.0, -0.8]))


def test_without_gradients_nothing_moves_not_even_by_decay():
    groups = two_matrices()
    before = [parameter.detach().clone() for parameter in groups.block_matrices.values()]
    for muon in (False, True):
        optimizer = Optimizer(groups, lr=1.0, muon=muon)
        optimizer.zero_grad()
        optimizer.step()
        assert not any(tensor.any() for tensor in optimizer.tensors().values())
    assert all(map(torch.equal, before, groups.block_matrices.values()))


# --- Muon ---------------------------------------------------------------------------------------


def test_muon_is_pytorchs_on_matrices():
    ours, theirs = two_matrices(), two_matrices()
    mine = Optimizer(ours, lr=0.02, weight_decay=0.1, muon=True)
    reference = torch.optim.Muon(
        theirs.block_matrices.values(),
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    for seed in range(4):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        mine.step(0.5)
        reference.param_groups[0]["lr"] = 0.01
        reference.step()
    for name, parameter in ours.block_matrices.items():
        torch.testing.assert_close(parameter, theirs.block_matrices[name], rtol=0, atol=0)


def test_muon_treats_a_stack_as_its_matrices_one_by_one():
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 7, 5, generator=generator)
    one_by_one = torch.stack([orthogonal(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonal(stack), one_by_one, rtol=0, atol=0.01)
    torch.testing.assert_close(orthogonal(stack.mT), one_by_one.mT, rtol=0, atol=0.01)


@pytest.mark.parametrize("shape", [(8, 8), (5, 30), (30, 5)])
def test_an_orthogonal_update_keeps_directions_and_evens_out_sizes(shape: tuple[int, int]):
    """Of U S Vᵀ it gives about U Vᵀ: the singular values come near 1, the singular vectors stay."""
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    u, s, vt = torch.linalg.svd(noise, full_matrices=False)
    matrix = u @ torch.linspace(0.1, 5, len(s)).diag() @ vt
    inside = u.T @ orthogonal(matrix).float() @ vt.T
    sizes = inside.diagonal()
    assert 0.6 < sizes.min() < sizes.max() < 1.3
    assert (inside - sizes.diag()).abs().max() < 0.05


def test_muon_is_for_the_layers_matrices_alone():
    _, groups = model_and_groups(VARIANTS["llama"])
    optimizer = Optimizer(groups, lr=0.01, muon=True)
    set_gradients(groups, 0)
    optimizer.step()
    names = {name.rpartition(".")[2]: set() for name in optimizer.tensors()}
    for name in optimizer.tensors():
        names[name.rpartition(".")[2]].add(name.rpartition(".")[0])
    assert names["momentum_buffer"] == set(groups.block_matrices)
    assert names["exp_avg"] == names["exp_avg_sq"] == names["step"] == {*groups.matrices, *groups.plain}
    assert "head.weight" in names["exp_avg"]


# --- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("muon", [False, True])
def test_a_state_through_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path, muon: bool):
    unbroken = two_matrices()
    optimizer = Optimizer(unbroken, lr=0.01, muon=muon)
    for seed in range(6):
        if seed == 3:
            weights = {name: p.detach().clone() for name, p in optimizer.parameters.items()}
            save(tmp_path, 3, {**weights, **optimizer.tensors()}, {})
        set_gradients(unbroken, seed)
        optimizer.step(1 / (seed + 1))

    found = load_latest(tmp_path)
    assert found is not None
    resumed = two_matrices()
    again = Optimizer(resumed, lr=0.01, muon=muon)
    with torch.no_grad():
        for name, parameter in again.parameters.items():
            parameter.copy_(found.tensors.pop(name))
    again.load(found.tensors)
    for seed in range(3, 6):
        set_gradients(resumed, seed)
        again.step(1 / (seed + 1))
    for name, parameter in optimizer.parameters.items():
        assert torch.equal(parameter, again.parameters[name])
    for name, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, again.tensors()[name])


def test_a_loaded_state_is_a_copy():
    groups = two_matrices()
    optimizer = Optimizer(groups, lr=0.01)
    set_gradients(groups, 0)
    optimizer.step()
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    optimizer.load(saved)
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    optimizer.step()
    assert all(torch.equal(saved[name], kept[name]) for name in saved)


def test_the_state_of_another_optimizer_or_model_is_refused():
    groups = two_matrices()
    adamw, muon = Optimizer(groups, lr=0.01), Optimizer(two_matrices(), lr=0.01, muon=True)
    set_gradients(groups, 0)
    adamw.step()
    with pytest.raises(CheckpointError, match="resume with the one"):
        muon.load(adamw.tensors())
    short = adamw.tensors()
    del short["layers.0.a.exp_avg"]
    with pytest.raises(CheckpointError, match=r"layers\.0\.a\.exp_avg is missing"):
        Optimizer(two_matrices(), lr=0.01).load(short)
    wrong = {**adamw.tensors(), "layers.0.a.exp_avg": torch.zeros(11, 6)}
    with pytest.raises(CheckpointError, match=r"\[11, 6\] in the checkpoint, expected \[6, 11\]"):
        Optimizer(two_matrices(), lr=0.01).load(wrong)


# --- schedules ----------------------------------------------------------------------------------


def test_the_cosine_by_known_numbers():
    """Peak 6e-4, warmup 2,000, minimum a tenth."""

    def rate(step: int) -> float:
        return 6e-4 * cosine(step, 10_000, 2000, 0.1)

    assert rate(0) == pytest.approx(2.99850e-7, rel=1e-5)
    assert rate(1) == pytest.approx(5.99700e-7, rel=1e-5)
    assert rate(2000) == 6e-4
    assert rate(6000) == pytest.approx(3.3e-4)  # half way down
    assert rate(10_000) == rate(10**9) == pytest.approx(6e-5)


def test_the_plateau_by_known_numbers():
    rates = [warmup_stable_decay(step, 10, warmup=2, decay=3) for step in range(12)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0, 0])


COUNTS = st.integers(0, 50)


@given(st.integers(1, 50), COUNTS, COUNTS, st.floats(0, 1))
def test_no_schedule_begins_at_zero_or_leaves_its_bounds(total: int, warmup: int, decay: int, minimum: float):
    steps = range(total + 60)
    for rates in (
        [cosine(step, total, warmup, minimum) for step in steps],
        [warmup_stable_decay(step, total, warmup, decay, minimum) for step in steps],
    ):
        assert rates[0] > 0
        assert max(rates) <= 1
        falling = rates[warmup:]
        assert falling == sorted(falling, reverse=True)
        assert min(falling) >= minimum
        assert rates[-1] == pytest.approx(minimum)
