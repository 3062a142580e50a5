"""The KV cache: cached = uncached = chunked, windows as rings, and nothing read that nobody wrote."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openbook.infer.cache import Cache, CacheFullError
from openbook.spec.model import Chunk
from strategies import specs
from variants import VARIANTS, attention, block, latent, model, noisy_decoder, random_ids

LENGTH = 23
DECODERS = {name: noisy_decoder(spec) for name, spec in VARIANTS.items()}
every_variant = pytest.mark.parametrize("name", VARIANTS)


def poisoned(decoder, batch=1, capacity=LENGTH, **how) -> Cache:
    cache = Cache(decoder.spec, batch, capacity, **how)
    cache.fill_(float("nan"))
    return cache


def in_chunks(decoder, ids, cuts, cache, positions=None):
    edges = [0, *sorted(cuts), ids.shape[1]]
    pieces = [slice(a, b) for a, b in pairwise(edges) if b > a]
    return torch.cat(
        [decoder(ids[:, s], positions[:, s] if positions is not None else None, cache) for s in pieces], 1
    )


@every_variant
@settings(max_examples=15)
@given(cuts=st.sets(st.integers(1, LENGTH - 1)))
@torch.no_grad()
def test_any_way_of_cutting_a_sequence_gives_the_uncached_logits(name, cuts):
    decoder = DECODERS[name]
    ids = random_ids(decoder.spec, 2, LENGTH)
    chunked = in_chunks(decoder, ids, cuts, poisoned(decoder, 2))
    torch.testing.assert_close(chunked, decoder(ids), atol=1e-5, rtol=0)


@every_variant
@settings(max_examples=8)
@given(cuts=st.sets(st.integers(1, LENGTH - 1)))
@torch.no_grad()
def test_left_padded_rows_in_a_cache_equal_the_rows_alone(name, cuts):
    decoder = DECODERS[name]
    ids, positions = random_ids(decoder.spec, 3, LENGTH), torch.full((3, LENGTH), -1)
    lengths = (LENGTH, 4, 13)
    for i, n in enumerate(lengths):
        positions[i, LENGTH - n :] = torch.arange(n)
    together = in_chunks(decoder, ids, cuts, poisoned(decoder, 3), positions)
    assert together.isfinite().all()
    for i, n in enumerate(lengths):
        if name in ("dynamic", "longrope") and n != LENGTH:
            continue  # a cached sequence's frequencies are those of the cache's capacity
        alone = decoder(ids[i : i + 1, LENGTH - n :])
        torch.testing.assert_close(together[i : i + 1, LENGTH - n :], alone, atol=1e-5, rtol=0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(spec=specs(), cuts=st.sets(st.integers(1, LENGTH - 1)))
@torch.no_grad()
def test_any_spec_gives_the_same_logits_with_a_cache(spec, cuts):
    decoder = noisy_decoder(spec)
    ids = random_ids(spec, 2, LENGTH)
    plain = decoder(ids)
    chunked = in_chunks(decoder, ids, cuts, poisoned(decoder, 2))
    torch.testing.assert_close(chunked, plain, atol=1e-5 * plain.abs().max().item(), rtol=0)


@torch.no_grad()
def test_a_windowed_layer_keeps_a_window_of_cells():
    decoder = DECODERS["windows"]
    cache = poisoned(decoder, capacity=20)
    assert [layer.k.shape[2] for layer in cache.layers] == [5, 20, 9]
    heads = [(5, 2), (20, 2), (9, 4)]
    assert cache.nbytes == sum(2 * cells * kv_heads * 6 * 4 for cells, kv_heads in heads)


def test_a_chunked_layer_keeps_a_chunk_of_cells_and_a_latent_one_its_latents():
    layers = (
        block(attn=attention(window=Chunk(4))),
        block(attn=latent(window=Chunk(9))),
        block(attn=latent()),
    )
    cache = Cache(model(*layers), 2, 7)
    assert [layer.k.shape for layer in cache.layers] == [(2, 2, 4, 6), (2, 1, 7, 20), (2, 1, 7, 20)]
    assert [layer.v.shape[3] for layer in cache.layers] == [6, 0, 0]


@pytest.mark.parametrize("window", [1, LENGTH, LENGTH + 5, Chunk(1), Chunk(LENGTH - 1), Chunk(LENGTH + 5)])
@pytest.mark.parametrize("kind", [attention, latent])
@torch.no_grad()
def test_windows_of_one_and_of_everything(kind, window):
    decoder = noisy_decoder(model(block(attn=kind(window=window)), block(attn=kind(window=window))))
    ids = random_ids(decoder.spec, 1, LENGTH)
    for cuts in (range(1, LENGTH), (5, 6, 17)):
        torch.testing.assert_close(
            in_chunks(decoder, ids, cuts, poisoned(decoder)), decoder(ids), atol=1e-5, rtol=0
        )


@torch.no_grad()
def test_a_second_turn_on_a_truncated_cache_equals_a_fresh_run():
    decoder = DECODERS["llama"]
    first, second = random_ids(decoder.spec, 1, 12), random_ids(decoder.spec, 1, 9, seed=1)
    cache = poisoned(decoder)
    decoder(first, cache=cache)
    assert cache.truncate(8) == 8
    continued = decoder(second, cache=cache)
    fresh = decoder(torch.cat((first[:, :8], second), 1))[:, 8:]
    torch.testing.assert_close(continued, fresh, atol=1e-5, rtol=0)


@torch.no_grad()
def test_truncating_a_ring_that_has_turned_starts_over():
    decoder = DECODERS["windows"]
    ids = random_ids(decoder.spec, 1, 12)
    cache = poisoned(decoder)
    decoder(ids[:, :4], cache=cache)
    assert cache.truncate(3) == 3
    decoder(ids[:, 3:], cache=cache)
    assert cache.truncate(10) == 0
    torch.testing.assert_close(decoder(ids, cache=cache), decoder(ids), atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_full_cache_refuses_and_stays_usable():
    decoder = DECODERS["llama"]
    ids = random_ids(decoder.spec, 1, 9)
    cache = poisoned(decoder, capacity=8)
    decoder(ids[:, :6], cache=cache)
    with pytest.raises(CacheFullError, match=r"holds 8 tokens and has 6"):
        decoder(ids[:, 6:], cache=cache)
    torch.testing.assert_close(
        decoder(ids[:, 6:8], cache=cache), decoder(ids[:, :8])[:, 6:], atol=1e-5, rtol=0
    )


@torch.no_grad()
def test_a_bf16_cache_stays_near_the_fp32_one():
    decoder = noisy_decoder(VARIANTS["llama"], torch.bfloat16)
    ids = random_ids(decoder.spec, 1, LENGTH)
    cache = poisoned(decoder, dtype=torch.bfloat16)
    cached = in_chunks(decoder, ids, (7, 8, 9), cache).float()
    torch.testing.assert_close(cached, decoder(ids).float(), atol=0.05, rtol=0)


def test_a_cache_of_no_size_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Cache(VARIANTS["llama"], 1, 0)
