"""The loss of the experts' load against transformers', and its gradient."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from openbook.model.experts import Chosen
from openbook.spec.model import Router
from openbook.train.balance import Routed, RoutersSeen, load_balance
from openbook.train.loop import accumulate, batch_loss
from train.test_layers import rows
from variants import VARIANTS, experts, noisy_decoder

B, T, E, A = 3, 7, 12, 3


def routed(n_layers: int) -> list[Routed]:
    router = Chosen(experts(Router("softmax", renormalise=True)))
    generator = torch.Generator().manual_seed(2)
    layers = [torch.randn(B, T, E, generator=generator).mul(2).requires_grad_() for _ in range(n_layers)]
    return [Routed(router, logits, router(logits, None).experts) for logits in layers]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n_layers", [1, 4])
def test_the_loss_and_its_gradient_are_transformers(n_layers: int, padded: bool):
    layers, counted = routed(n_layers), torch.ones(B, T, dtype=torch.bool)
    if padded:
        counted[1, 5:] = False
        counted[2, 2:] = False
    ours = load_balance(layers, counted)
    logits = tuple(layer.logits.flatten(0, 1) for layer in layers)
    theirs = load_balancing_loss_func(logits, E, A, counted.long() if padded else None)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    inputs = [layer.logits for layer in layers]
    for mine, other in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-8)


def test_equal_loads_cost_the_number_of_active_experts():
    """Token t chooses experts t, t + 1 and t + 2 of 12, all equally likely: A = 3, the least there is."""
    router = Chosen(experts(Router("softmax", renormalise=True)))
    chosen = (torch.arange(E)[:, None] + torch.arange(A)) % E
    even = Routed(router, torch.zeros(1, E, E), chosen[None])
    assert load_balance([even], torch.ones(1, E, dtype=torch.bool)).item() == pytest.approx(3.0)
    assert load_balance([], torch.ones(1, E, dtype=torch.bool)).item() == 0


def test_it_is_added_once_to_the_mean_over_labels_and_reaches_the_routers():
    decoder = noisy_decoder(VARIANTS["experts"]).train()
    batch = rows(decoder.spec.vocab_size, [[11, 20], [31]], 31)
    with RoutersSeen(decoder) as seen:
        plain = batch_loss(decoder, batch)
    uneven = load_balance(seen.routed, torch.from_numpy(batch.positions) >= 0)
    weighed = batch_loss(decoder, batch, balance=0.5)
    assert (weighed.total / weighed.n_labels).item() == pytest.approx(
        (plain.total / plain.n_labels + 0.5 * uneven).item(), rel=1e-6
    )
    assert weighed.nats.item() == plain.nats.item()
    gradients = []
    for balance in (0.0, 0.5):
        decoder.zero_grad()
        accumulate(decoder, batch, 2, balance=balance)
        name = next(n for n, _ in decoder.named_parameters() if n.endswith("router.weight"))
        gradients.append(dict(decoder.named_parameters())[name].grad.clone())  # type: ignore[union-attr]
    assert not torch.allclose(*gradients)
