"""The chunked loss against the plain one, which makes all logits at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from openbook.model.decoder import Head
from openbook.spec.model import Head as HeadSpec
from openbook.train.loss import head_loss, rows_at_once

B, T, D, V = 3, 7, 11, 29
HEADS = {
    "plain": HeadSpec(tied=False),
    "bias": HeadSpec(tied=False, bias=True),
    "scaled": HeadSpec(tied=False, scale=0.3, softcap=2.0),
}


def plain(head: nn.Module, hidden: Tensor, labels: Tensor, z_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    logits = head(hidden).flatten(0, 1).float()
    nats = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    z = (logits.logsumexp(-1)[labels.flatten() != -100] ** 2).sum()
    return nats + z_weight * z, nats, z


def inputs(spec: HeadSpec = HEADS["plain"], ignored: float = 0.3) -> tuple[Head, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = Head(spec, D, V)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[torch.rand(B, T, generator=generator) < ignored] = -100
    return head, torch.randn(B, T, D, generator=generator, requires_grad=True), labels


def gradients(total: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(total, [hidden, *head.parameters()]))


@pytest.mark.parametrize("name", list(HEADS))
@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("z_weight", [0.0, 0.01])
def test_the_chunked_loss_is_the_plain_one_and_so_are_its_gradients(name: str, rows: int, z_weight: float):
    head, hidden, labels = inputs(HEADS[name])
    ours = head_loss(head, hidden, labels, z_weight, max_logits=rows * V)
    total, nats, z = plain(head, hidden, labels, z_weight)
    assert ours.n_labels == (labels != -100).sum()
    torch.testing.assert_close(ours.total, total, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.nats, nats.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.z, z.detach() if z_weight else torch.tensor(0.0), rtol=1e-6, atol=0)
    for mine, theirs in zip(
        gradients(ours.total / 13, hidden, head), gradients(total / 13, hidden, head), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_the_gradient_goes_on_through_a_shared_matrix():
    """A tied head: the embedding gets the gradient of both its uses."""
    head, _, labels = inputs()
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(5))

    def gradient(loss: str) -> Tensor:
        hidden = F.embedding(ids, head.weight) * 0.1
        total = head_loss(head, hidden, labels, max_logits=4 * V).total if loss == "ours" else None
        total = plain(head, hidden, labels, 0)[0] if total is None else total
        return torch.autograd.grad(total, head.weight)[0]

    torch.testing.assert_close(gradient("ours"), gradient("plain"), rtol=1e-6, atol=1e-6)


PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")


class Products(TorchDispatchMode):
    """Notes the rows of every matrix product whose result has V columns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **keywords or {})
        if function.name() in PRODUCTS and made.shape[-1] == V:
            self.rows.append(len(made))
        return made


@pytest.mark.parametrize("name", list(HEADS))
def test_no_more_logits_than_a_chunk_are_ever_there_and_none_are_made_twice(name: str):
    head, hidden, labels = inputs(HEADS[name], ignored=0)
    with Products() as made:
        head_loss(head, hidden, labels, max_logits=4 * V + 3).total.backward()
    assert made.rows == [4, 4, 4, 4, 4, 1]


def test_a_chunk_fits_a_cache_unless_it_would_have_few_tokens():
    assert [rows_at_once(v) for v in (2_048, 4_096, 49_152, 262_144, 1 << 25)] == [1024, 512, 256, 64, 1]


def test_what_is_not_learned_does_not_reach_the_head():
    """Even a hidden state that is not a number cannot spoil a loss that does not ask for it."""
    head, hidden, labels = inputs()
    spoiled = hidden.detach().clone()
    spoiled[labels == -100] = torch.nan
    spoiled.requires_grad_()
    loss = head_loss(head, spoiled, labels)
    torch.testing.assert_close(loss.total, plain(head, hidden, labels, 0)[0], rtol=1e-6, atol=0)
    gradient, *_ = gradients(loss.total, spoiled, head)
    assert gradient.isfinite().all()
    assert (gradient[labels == -100] == 0).all()


@pytest.mark.parametrize("z_weight", [0.0, 0.01])
def test_without_a_label_loss_and_gradients_are_zero(z_weight: float):
    head, hidden, labels = inputs(HEADS["bias"])
    loss = head_loss(head, hidden, torch.full_like(labels, -100), z_weight)
    assert (loss.total.item(), loss.nats.item(), loss.z.item(), loss.n_labels) == (0, 0, 0, 0)
    assert all((gradient == 0).all() for gradient in gradients(loss.total, hidden, head))


def test_equal_logits_cost_the_logarithm_of_the_vocabulary():
    head, hidden, labels = inputs(ignored=0)
    with torch.no_grad():
        head.weight.zero_()
    loss = head_loss(head, hidden, labels)
    assert loss.nats.item() / loss.n_labels == pytest.approx(3.367296, rel=1e-6)  # ln 29


@pytest.mark.parametrize(
    ("parts", "mean"),
    [
        ([[4.0], [1.0, 1.0, 1.0]], 1.75),  # the mean of means would be 2.5
        ([[2.0] * 100, [4.0] * 10], 240 / 110),  # and 3.0
    ],
)
def test_a_mean_is_over_tokens_and_not_over_parts(parts: list[list[float]], mean: float):
    """Two tokens to choose from, logits 0 and x: the first one costs ln(1 + eˣ), so x = ln(e^cost - 1)."""
    head = Head(HEADS["plain"], 1, 2)
    head.weight.data = torch.tensor([[0.0], [1.0]])
    losses = [
        head_loss(head, torch.tensor(costs).expm1().log()[None, :, None], torch.zeros(1, len(costs)).long())
        for costs in parts
    ]
    n_labels = sum(loss.n_labels for loss in losses)
    assert sum(loss.nats.item() for loss in losses) / n_labels == pytest.approx(mean, rel=1e-5)


def test_parts_of_ragged_size_add_up_to_the_whole():
    """Sums, counts and gradients of the rows are those of the batch."""
    head, hidden, labels = inputs(ignored=0.6)
    whole = head_loss(head, hidden, labels)
    parts = [head_loss(head, hidden[i : i + 1], labels[i : i + 1]) for i in range(B)]
    assert len({part.n_labels for part in parts}) > 1
    assert sum(part.n_labels for part in parts) == whole.n_labels
    torch.testing.assert_close(
        torch.stack([part.total for part in parts]).sum(), whole.total, rtol=1e-6, atol=0
    )
    together = gradients(whole.total / whole.n_labels, hidden, head)
    summed = gradients(torch.stack([part.total / whole.n_labels for part in parts]).sum(), hidden, head)
    for one, other in zip(together, summed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_without_grad_mode_it_only_counts():
    head, hidden, labels = inputs()
    with torch.no_grad():
        loss = head_loss(head, hidden, labels, 0.01, max_logits=4 * V)
    total, _, _ = plain(head, hidden, labels, 0.01)
    torch.testing.assert_close(loss.total, total.detach(), rtol=1e-6, atol=0)
    assert not loss.total.requires_grad


def test_a_frozen_head_lets_the_gradient_through():
    head, hidden, labels = inputs()
    head.requires_grad_(False)
    (ours,) = torch.autograd.grad(head_loss(head, hidden, labels, max_logits=4 * V).total, hidden)
    (theirs,) = torch.autograd.grad(plain(head, hidden, labels, 0)[0], hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_second_backward_is_an_error_and_no_wrong_number():
    head, hidden, labels = inputs()
    loss = head_loss(head, hidden, labels)
    loss.total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.total.backward()


@pytest.mark.parametrize("rows", [4, 1000])
def test_under_autocast_it_is_the_plain_loss_under_autocast(rows: int):
    """Logits in bf16, the loss in fp32; gradients of the fp32 matrix in fp32, added up in fp32."""
    head, hidden, labels = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        ours = head_loss(head, hidden, labels, max_logits=rows * V)
        total, _, _ = plain(head, hidden, labels, 0)
    torch.testing.assert_close(ours.total, total, rtol=1e-6, atol=0)
    for mine, theirs in zip(gradients(ours.total, hidden, head), gradients(total, hidden, head), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0.01, atol=0.02)
