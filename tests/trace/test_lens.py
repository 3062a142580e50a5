"""What is read off the residual stream and the heads, against plain computations and transformers."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checkpoints import Checkpoint
from openbook.infer import Cache
from openbook.infer.sample import RequestError
from openbook.spec.model import Experts
from openbook.trace import (
    Trace,
    UnknownStepError,
    attention_entropy,
    head_groups,
    logit_lens,
    record,
    sink_share,
    update_norms,
)
from variants import VARIANTS, noisy_decoder, random_ids

BATCH, NEW = 2, 9


def traced(name: str, **options) -> tuple[Trace, torch.nn.Module]:
    decoder = noisy_decoder(VARIANTS[name])
    return record(decoder, random_ids(decoder.spec, BATCH, NEW), **options), decoder


def stream_after(trace: Trace, layer: int) -> torch.Tensor:
    """The last step of the layer is its result."""
    return trace.tensor([s for s in trace.axes if s.startswith(f"layers.{layer}.")][-1])


# --- the lens -----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "sandwich", "post-norm", "multipliers", "latent"])
def test_the_lens_is_norm_and_head_on_the_stream_after_each_layer(name: str):
    trace, decoder = traced(name)
    lens = logit_lens(trace, decoder, top=4)
    final = trace.tensor("head").double().log_softmax(-1)
    assert lens.layers == tuple(range(trace.spec.n_layers))
    for layer in lens.layers:
        log_probs = decoder.head(decoder.final_norm(stream_after(trace, layer))).double().log_softmax(-1)
        probs = log_probs.exp()
        for b in range(BATCH):
            for t in range(NEW):
                best = sorted(range(trace.spec.vocab_size), key=lambda i: -probs[b, t, i])[:4]
                assert lens.ids[layer, b, t].tolist() == best
        at = layer, slice(None), slice(None)
        torch.testing.assert_close(lens.probs[at], probs.gather(-1, lens.ids[at]).float())
        torch.testing.assert_close(lens.entropy[at], torch.special.entr(probs).sum(-1).float())
        kl = (final.exp() * (final - log_probs)).sum(-1).float()
        torch.testing.assert_close(lens.kl[at], kl, atol=2e-6, rtol=1e-5)


def test_after_the_last_layer_the_lens_sees_what_the_model_says():
    trace, decoder = traced("qwen3")
    lens = logit_lens(trace, decoder, top=1)
    assert torch.equal(lens.ids[-1, ..., 0], trace.tensor("head").argmax(-1))
    assert not lens.kl[-1].any()
    assert lens.kl[:-1].min() > 0


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_the_stream_is_that_of_transformers_hidden_states(
    checkpoint: Callable[[str], Checkpoint], family: str
):
    pair = checkpoint(family)
    hidden = pair.theirs(pair.ids, output_hidden_states=True).hidden_states
    trace = pair.our_trace()
    lens = logit_lens(trace, pair.ours, top=3)
    last = len(hidden) - 2
    for layer in range(last):  # transformers' last hidden state is normed already
        torch.testing.assert_close(stream_after(trace, layer), hidden[layer + 1], atol=2e-5, rtol=1e-5)
        normed = pair.theirs.get_submodule("transformer.ln_f" if family == "gpt2" else "model.norm")
        probs = pair.theirs.get_output_embeddings()(normed(hidden[layer + 1])).softmax(-1)
        torch.testing.assert_close(lens.probs[layer], probs.topk(3).values, atol=1e-5, rtol=1e-4)
    probs = pair.theirs.get_output_embeddings()(hidden[-1]).softmax(-1)
    torch.testing.assert_close(lens.probs[-1], probs.topk(3).values, atol=1e-5, rtol=1e-4)


def test_some_layers_and_tokens_are_read_as_among_all():
    trace, decoder = traced("llama")
    all_of_it = logit_lens(trace, decoder, top=2)
    part = logit_lens(trace, decoder, top=2, layers=[2, 0], tokens=slice(3, 7))
    assert part.layers == (2, 0)
    for field in ("ids", "probs", "entropy", "kl"):
        expected = getattr(all_of_it, field)[[2, 0], :, 3:7]
        torch.testing.assert_close(getattr(part, field), expected, atol=1e-6, rtol=1e-5)


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that anything returned."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numbers = max([self.numbers, *found])
        return out


def test_the_lens_holds_the_logits_of_a_few_tokens_at_a_time():
    trace, decoder = traced("llama")
    vocabulary = trace.spec.vocab_size
    with Largest() as largest:
        small = logit_lens(trace, decoder, budget=3 * 16 * vocabulary)
    assert largest.numbers <= max(
        3 * vocabulary, BATCH * NEW * trace.spec.d_model, decoder.head.weight.numel()
    )
    whole = logit_lens(trace, decoder)
    torch.testing.assert_close(small.kl, whole.kl, atol=1e-6, rtol=1e-5)
    assert torch.equal(small.ids, whole.ids)


def test_a_lens_without_its_streams_or_layers_is_an_error():
    trace, decoder = traced("llama", only="layers.0.mlp_add")
    with pytest.raises(UnknownStepError, match=r"layers.2.mlp_add was not kept"):
        logit_lens(trace, decoder, layers=[0])
    with pytest.raises(RequestError, match="layer 3 is none of 0 to 2"):
        logit_lens(trace, decoder, layers=[3])


# --- updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_the_norms_are_of_what_each_part_adds(name: str):
    trace, _ = traced(name)
    norms = update_norms(trace)
    before = trace.tensor([s for s in ("embed", "positions", "embed_norm") if s in trace][-1])
    for layer, block in enumerate(trace.spec.layers):
        where, after = f"layers.{layer}.", stream_after(trace, layer)
        attn = trace.tensor(where + ("attn_out_norm" if block.attn_out_norm else "attn.o"))
        mixture = isinstance(block.mlp, Experts)
        last = ("mlp.shared_add" if block.mlp.shared else "mlp.experts.sum") if mixture else "mlp.down"
        mlp = trace.tensor(where + ("mlp_out_norm" if block.mlp_out_norm else last))
        for found, x in (
            (norms.stream, before),
            (norms.attn, attn * block.residual_scale),
            (norms.mlp, mlp * block.residual_scale),
            (norms.block, after - before),
        ):
            torch.testing.assert_close(found[layer], x.square().sum(-1).sqrt())
        torch.testing.assert_close(norms.relative[layer], norms.block[layer] / norms.stream[layer])
        before = after


# --- heads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "windows", "sinks", "latent"])
def test_entropy_and_sink_share_are_those_of_each_row_of_probabilities(name: str):
    trace, _ = traced(name)
    entropy, share = attention_entropy(trace), sink_share(trace)
    widest = max(block.attn.n_heads for block in trace.spec.layers)
    assert entropy.shape == share.shape == (trace.spec.n_layers, BATCH, widest, NEW)
    for layer, block in enumerate(trace.spec.layers):
        heads = block.attn.n_heads
        assert entropy[layer, :, heads:].isnan().all()
        assert share[layer, :, heads:].isnan().all()
        for b, h, t in ((0, 0, 0), (1, heads - 1, NEW - 1), (0, 3, 4)):
            row = trace.tensor(f"layers.{layer}.attn.probs")[b, h, t].tolist()
            rest = [1 - sum(row)] if name == "sinks" else []
            expected = -sum(p * math.log(p) for p in [*row, *rest] if p > 0)
            assert float(entropy[layer, b, h, t]) == pytest.approx(expected, abs=1e-5)
            assert float(share[layer, b, h, t]) == pytest.approx(row[0])


def test_the_first_token_is_known_by_its_position():
    """Beside padding it is not in the first column; behind a window's cache it is not there at all."""
    decoder = noisy_decoder(VARIANTS["windows"])
    ids = random_ids(decoder.spec, 2, 12)
    positions = torch.tensor([[-1, -1, *range(10)], list(range(12))])
    share = sink_share(record(decoder, ids, positions))
    assert float(share[1, 0, 0, 2]) == pytest.approx(1)  # the first token sees itself alone
    assert float(share[1, 0, 0, 3]) < 1
    cache = Cache(decoder.spec, 2, 12)
    record(decoder, ids[:, :9], cache=cache)
    late = sink_share(record(decoder, ids[:, 9:], cache=cache))
    assert not late[0].nan_to_num().any()  # a window of 5
    assert late[1].min() > 0


@pytest.mark.parametrize(
    ("name", "layer", "groups"),
    [
        ("llama", 0, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("windows", 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("gpt2", 1, ((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,))),
        ("latent", 0, ((0,), (1,), (2,), (3,), (4,), (5,), (6,))),
    ],
)
def test_heads_are_grouped_by_the_keys_they_share(name: str, layer: int, groups):
    assert head_groups(VARIANTS[name], layer) == groups
