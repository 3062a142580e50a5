"""Our model against transformers' on the same random checkpoints, and against itself run in other ways.

No two sizes are equal, so that no transposition or mixed-up axis hides; every parameter, biases and
norms included, is noise; runs go beyond the original context wherever a scaling makes that matter.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from openbook.infer.cache import Cache
from openbook.model import Decoder
from openbook.sources import resolve
from openbook.weights.load import load_decoder
from openbook.weights.save import save_gguf, save_hf
from openbook.weights.tensors import open_tensors
from openbook.weights.verify import check

TOLERANCE = 1e-5
LENGTH = 45
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def scaled(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **values}}


@dataclass(frozen=True)
class Case:
    """A transformers configuration. `in_gguf`: whether that format can say it."""

    name: str
    config_class: str
    config: dict[str, Any] = field(default_factory=dict)
    in_gguf: bool = True

    def build(self) -> transformers.PreTrainedModel:
        """The model with noise in every parameter, fp32, explicit attention."""
        sizes = {} if self.config_class == "GPT2Config" else SIZES
        config = getattr(transformers, self.config_class)(**{**sizes, **self.config})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            is_norm = parameter.ndim == 1 and not name.endswith("bias")
            with torch.no_grad():
                parameter.copy_(1 + 0.3 * noise if is_norm else noise * parameter.shape[-1] ** -0.5)
        return model.float().eval()


CASES = [
    Case("gpt2", "GPT2Config", {
        "vocab_size": 131, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 80,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
    Case("llama", "LlamaConfig"),
    Case("llama-head-dim-8", "LlamaConfig", {"head_dim": 8}),
    Case("llama-tied-mha", "LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 8}),
    Case("llama-biases", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-large-eps", "LlamaConfig", {"rms_norm_eps": 1e-2}),
    Case("llama-linear", "LlamaConfig", scaled("linear", factor=4.0)),
    Case("llama-dynamic", "LlamaConfig", {"max_position_embeddings": 16, **scaled("dynamic", factor=2.0)},
         in_gguf=False),
    Case("llama-yarn", "LlamaConfig", scaled("yarn", factor=4.0, original_max_position_embeddings=16)),
    Case("llama-llama3", "LlamaConfig", scaled("llama3", factor=8.0, low_freq_factor=1.0,
         high_freq_factor=4.0, original_max_position_embeddings=16), in_gguf=False),
    Case("llama-3.1", "LlamaConfig", {"max_position_embeddings": 131072, **scaled("llama3", factor=8.0,
         low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)}),
    Case("mistral-window", "MistralConfig", {"sliding_window": 7}),
    Case("qwen2-mixed-windows", "Qwen2Config", {
        "head_dim": 6, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
    }),
    Case("qwen2-tied", "Qwen2Config", {"head_dim": 6, "tie_word_embeddings": True}),
    Case("qwen3", "Qwen3Config", {"head_dim": 10}),
    Case("qwen3-tied", "Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
]  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """One checkpoint in both programs."""

    case: Case
    theirs: transformers.PreTrainedModel
    ours: Decoder
    folder: Path

    @property
    def ids(self) -> Tensor:
        return torch.randint(0, 131, (1, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: Case = request.param
    theirs = case.build()
    folder = tmp_path_factory.mktemp(case.name)
    theirs.save_pretrained(folder)
    return Pair(case, theirs, load_decoder(folder), folder)


@torch.no_grad()
def their_logits(model: transformers.PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


@torch.no_grad()
def our_logits(decoder: Decoder, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return decoder(ids, *args, **kwargs)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


# --- against transformers -----------------------------------------------------------------------


def test_logits_equal_those_of_transformers(pair: Pair):
    assert_close(our_logits(pair.ours, pair.ids), their_logits(pair.theirs, pair.ids))


@pytest.mark.parametrize("start", [0, 1000, 100_000])
def test_logits_are_equal_at_positions_far_out(pair: Pair, start: int):
    if "gpt2" in pair.case.name or "dynamic" in pair.case.name:
        pytest.skip("learned positions end; dynamic frequencies are tested beyond their length above")
    positions = torch.arange(start, start + LENGTH)[None]
    with torch.no_grad():
        theirs = pair.theirs(pair.ids, position_ids=positions, use_cache=False).logits
    assert_close(our_logits(pair.ours, pair.ids, positions), theirs)


def test_the_case_can_tell_right_from_wrong(pair: Pair):
    """Positions matter: the same tokens in another order give other logits at the end."""
    ids = pair.ids
    swapped = torch.cat((ids[:, -3:-1].flip(1), ids[:, 2:]), dim=1)
    last = our_logits(pair.ours, ids)[:, -1]
    if "window" not in pair.case.name:
        assert (our_logits(pair.ours, swapped)[:, -1] - last).abs().max() > 100 * TOLERANCE
    assert last.std() > 0.1


def test_every_parameter_is_the_checkpoints(pair: Pair):
    assert sum(p.numel() for p in pair.ours.parameters()) == pair.theirs.num_parameters()


def test_transformers_loads_our_export_with_equal_logits(pair: Pair, tmp_path: Path):
    save_hf(pair.ours, tmp_path / "export")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", attn_implementation="eager", dtype=torch.float32
    )
    assert_close(their_logits(theirs, pair.ids), their_logits(pair.theirs, pair.ids))


def test_a_gguf_of_the_same_weights_gives_the_same_logits(pair: Pair, tmp_path: Path):
    if not pair.case.in_gguf:
        pytest.skip("not expressible in GGUF metadata")
    save_gguf(pair.ours, tmp_path / "model.gguf", dtype="F32")
    again = load_decoder(tmp_path / "model.gguf")
    for (name, ours), (_, theirs) in zip(again.named_parameters(), pair.ours.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert_close(our_logits(again, pair.ids), our_logits(pair.ours, pair.ids))


# --- against itself -----------------------------------------------------------------------------


def in_chunks(decoder: Decoder, ids: Tensor, sizes: list[int]) -> Tensor:
    """Logits of a run fed piece by piece into a poisoned cache of just the run's length."""
    cache = Cache(decoder.spec, len(ids), ids.shape[1])
    cache.fill_(torch.nan)
    return torch.cat([our_logits(decoder, part, cache=cache) for part in ids.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize(
    "sizes",
    [[1] * LENGTH, [LENGTH], [1, 7, 2, 20, 15], [30] + [1] * 15],
    ids=["one by one", "all at once", "uneven", "prompt"],
)
def test_cached_in_any_chunks_equals_uncached(pair: Pair, sizes: list[int]):
    assert_close(in_chunks(pair.ours, pair.ids, sizes), our_logits(pair.ours, pair.ids))


def left_padded(ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of the last columns: prefixes of `ids` in the given lengths, and their positions."""
    width = max(lengths)
    rows = torch.zeros(len(lengths), width, dtype=torch.int64)
    positions = torch.stack([torch.arange(width) - (width - n) for n in lengths])
    for row, n in zip(rows, lengths, strict=True):
        row[width - n :] = ids[0, :n]
    return rows, positions


def test_left_padded_rows_equal_their_own_runs(pair: Pair):
    lengths = [LENGTH, 1, 9, 30]
    rows, positions = left_padded(pair.ids, lengths)
    logits = our_logits(pair.ours, rows, positions)
    assert logits.isfinite().all()
    for row, n in zip(logits, lengths, strict=True):
        assert_close(row[None, -n:], our_logits(pair.ours, pair.ids[:, :n]))


def test_left_padded_rows_in_a_cache_equal_their_own_runs(pair: Pair):
    if "dynamic" in pair.case.name:
        pytest.skip("dynamic frequencies are those of the cache's capacity, which the rows share")
    lengths = [40, 3, 17]
    rows, positions = left_padded(pair.ids, lengths)
    cache = Cache(pair.ours.spec, len(rows), LENGTH)
    cache.fill_(torch.nan)
    logits = [our_logits(pair.ours, rows, positions, cache)]
    for step in range(5):
        token = torch.stack([pair.ids[0, n + step] for n in lengths])[:, None]
        logits.append(our_logits(pair.ours, token, positions[:, -1:] + 1 + step, cache))
    for row, n in zip(torch.cat(logits, dim=1), lengths, strict=True):
        assert_close(row[None, -(n + 5) :], our_logits(pair.ours, pair.ids[:, : n + 5]))


def test_the_last_logits_alone_are_the_last_logits(pair: Pair):
    assert_close(our_logits(pair.ours, pair.ids, last_only=True), our_logits(pair.ours, pair.ids)[:, -1:])


# --- a real model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Decoder:
    return load_decoder(smollm2, "fp32")


@pytest.mark.model
def test_every_tensor_of_smollm2_is_the_gguf_packages_bit_for_bit(smollm2: Path, real: Decoder):
    reader = gguf.GGUFReader(smollm2)
    ours = real.state_dict()
    source = resolve(smollm2)
    rows = {row.name: row for row in check(source, open_tensors(source))}
    assert len(reader.tensors) == 272
    for tensor in reader.tensors:
        place = rows[tensor.name].place
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(place.shape)
        for name, part in place.load(values):
            assert torch.equal(ours[name], torch.from_numpy(part.copy())), name


@pytest.fixture(scope="module")
def their_real(smollm2: Path) -> transformers.PreTrainedModel:
    """The same file through transformers' own reader of GGUF: its names, its order of q's and k's rows.

    (`from_pretrained` does no more with a GGUF file, but asks for another package first.)
    """
    config = transformers.LlamaConfig(**load_gguf_checkpoint(smollm2)["config"], attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(smollm2, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.float().eval()


@pytest.mark.model
def test_smollm2_says_the_same_64_tokens_as_transformers(real: Decoder, their_real):
    assert their_real.num_parameters() == sum(p.numel() for p in real.parameters()) == 134_515_008
    ids = torch.tensor([[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]])
    torch.testing.assert_close(our_logits(real, ids), their_logits(their_real, ids), rtol=0, atol=1e-3)
    greedy = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = their_real.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
    cache = Cache(real.spec, 1, ids.shape[1] + 64)
    found, step = ids, ids
    for _ in range(64):
        step = our_logits(real, step, cache=cache, last_only=True)[:, -1].argmax(-1, keepdim=True)
        found = torch.cat((found, step), dim=1)
    assert found.tolist() == expected.tolist()
