"""Our model against transformers' on the same random checkpoints, and against itself run in other ways.

No two sizes are equal, so that no transposition or mixed-up axis hides; every parameter and every stored
buffer, biases, norms, sinks and corrections included, is noise; windows are shorter than the runs, and runs
go beyond the original context wherever a scaling makes that matter.

The worst errors of each family are docs/families.md. `OPENBOOK_UPDATE=1 pytest tests/model/test_parity.py`
writes it anew.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.falcon import modeling_falcon as falcon

import checkpoints
from checkpoints import SIZES, WHOLE
from features import features
from openbook.infer.cache import Cache
from openbook.model import Decoder
from openbook.sources import resolve
from openbook.spec.hf import FAMILIES
from openbook.spec.model import ModelSpec
from openbook.weights.dialects import HF
from openbook.weights.load import load_decoder
from openbook.weights.save import save_hf, stored_places, stored_tensor
from openbook.weights.save_gguf import save_gguf
from openbook.weights.tensors import open_tensors
from openbook.weights.verify import check

TOLERANCE = 1e-5
LENGTH = 40
OURS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
GPT = checkpoints.GPT | OURS
LATENT = WHOLE | checkpoints.LATENT

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
MIXED = {"sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING]}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.7,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.5,
}


def scaled(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **values}}


def partial(factor: float, **values: Any) -> dict[str, Any]:
    return scaled("default", partial_rotary_factor=factor, **values)


@pytest.fixture(scope="module", autouse=True)
def exact_alibi() -> Iterator[None]:
    """Falcon's biases of ALiBi are products in bf16, 8 bits of a slope times a key's position, so that they
    differ by position as well as by distance. BLOOM's function is the same but for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(falcon, "build_alibi_tensor", bloom.build_alibi_tensor)
        yield


@dataclass(frozen=True)
class Case:
    """A transformers configuration. `far`: the first positions of runs far out, none where the family's
    end, or do not reach the model; `in_gguf`: whether that format can say it; `attention`: which of
    transformers' implementations is asked."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    far: tuple[int, ...] = (1000, 100_000)
    in_gguf: bool = True
    attention: str = "eager"

    @property
    def model_type(self) -> str:
        return self.name.split()[0]

    def build(self) -> transformers.PreTrainedModel:
        """The model with noise in every parameter and stored buffer, fp32."""
        known = "deepseek_v3" if self.model_type == "kimi_k2" else self.model_type
        config = transformers.AutoConfig.for_model(known, **{**self.sizes, **self.config})
        kind = transformers.AutoModelForImageTextToText if "text_config" in self.config else CAUSAL
        torch.manual_seed(0)
        model = kind.from_config(config, attn_implementation=self.attention).float().eval()
        for name, values in {**dict(model.named_parameters()), **stored_buffers(model)}.items():
            values.data.copy_(noise(name, values.data))
        return model

    def save(self, model: transformers.PreTrainedModel, folder: Path) -> None:
        """As transformers does. It has no kimi_k2, which is deepseek_v3 by another name."""
        model.save_pretrained(folder)
        if self.model_type == "kimi_k2":
            edit_config(folder, {"model_type": "kimi_k2"})


CAUSAL = transformers.AutoModelForCausalLM


def stored_buffers(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Buffers that are part of a checkpoint: corrections of a router's choice."""
    stored = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def noise(name: str, start: Tensor) -> Tensor:
    """Around its first value where that is the same everywhere (norms, biases), otherwise around 0."""
    random = torch.randn(start.shape)
    if "correction" in name:
        return 0.1 * random  # little enough that a token's own scores still decide
    if start.ndim == 1 or (start == start.flatten()[0]).all():
        return start + 0.3 * random
    # With 1 in place of 0.8, attention is so sharp that a chain of layers doubles rounding errors.
    return 0.8 * random * start.shape[-1] ** -0.5


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


NEOX = {key: value for key, value in WHOLE.items() if key != "num_key_value_heads"}
OPT = NEOX | {"ffn_dim": 88, "word_embed_proj_dim": 48}
del OPT["intermediate_size"]
FALCON = {k: v for k, v in WHOLE.items() if k not in ("intermediate_size", "num_key_value_heads")}
BLOOM = {"vocab_size": 131, "hidden_size": 48, "n_layer": 3, "n_head": 6, **OURS}
MPT = {"vocab_size": 131, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 64, **OURS}

LLAMA4 = {
    "num_hidden_layers": 4, "num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size_mlp": 36,
    "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 0, 1], "attention_chunk_size": 7,
    "layer_types": [CHUNKED, CHUNKED, FULL, CHUNKED], "floor_scale": 8, "attn_scale": 0.3,
}  # fmt: skip

CHUNK_STARTS = (1001, 100_002)
"""Multiples of the chunk's 7 positions: transformers counts a chunk's cells, and does not ask for positions.
Nor does it for the temperature of queries (modeling_llama4.py, `past_seen_tokens`)."""

VISION = {
    "hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip

YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.1, 1.2, 1.3], "long_factor": [2.1, 3.2, 4.3]}

CASES = [
    Case("gpt2", sizes=GPT, far=()),
    Case("gpt2 scaled-by-layer", {"scale_attn_by_inverse_layer_idx": True}, GPT, far=(), in_gguf=False),
    Case("llama"),
    Case("llama head-dim-8", {"head_dim": 8}),
    Case("llama tied-mha", {"tie_word_embeddings": True, "num_key_value_heads": 8}),
    Case("llama biases", {"attention_bias": True, "mlp_bias": True}),
    Case("llama large-eps", {"rms_norm_eps": 1e-2}),
    Case("llama linear", scaled("linear", factor=4.0)),
    Case("llama dynamic", {"max_position_embeddings": 16, **scaled("dynamic", factor=2.0)}, far=(),
         in_gguf=False),
    Case("llama yarn", YARN),
    Case("llama llama3", scaled("llama3", **LLAMA3, original_max_position_embeddings=16)),
    Case("llama 3.1", {"max_position_embeddings": 131072, **scaled("llama3", **LLAMA3,
         original_max_position_embeddings=8192)}),
    Case("mistral window", {"sliding_window": 7}),
    Case("qwen2 mixed-windows", {
        "head_dim": 6, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
    }),
    Case("qwen2 tied", {"head_dim": 6, "tie_word_embeddings": True}),
    Case("qwen3", {"head_dim": 10}),
    Case("qwen3 tied", {"head_dim": 8, "tie_word_embeddings": True}),

    # One kind of norm, of windows, of rotation or of bias beside llama's.
    Case("smollm3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}, WHOLE, in_gguf=False),
    Case("olmo2", sizes=WHOLE),
    Case("olmo3", {**MIXED, "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 20_000.0}, FULL: YARN["rope_parameters"],
    }}, WHOLE),
    Case("exaone4", MIXED, in_gguf=False),
    Case("exaone4 no-windows", {"sliding_window": None, "layer_types": [FULL] * 3}, in_gguf=False),
    Case("seed_oss", {"attention_bias": True, "attention_out_bias": False}),
    Case("gemma", {"tie_word_embeddings": True}),
    Case("gemma2", {
        **MIXED, "query_pre_attn_scalar": 14, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    }, in_gguf=False),
    Case("gemma3_text", {
        **MIXED, "query_pre_attn_scalar": 14, "tie_word_embeddings": True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    }, in_gguf=False),

    # Mixtures of experts.
    Case("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 7}),
    Case("qwen2_moe", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28, "mlp_only_layers": [1],
    }, WHOLE, in_gguf=False),
    Case("qwen2_moe renormalised", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 28, "norm_topk_prob": True,
        "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
    }, WHOLE, in_gguf=False),
    Case("qwen3_moe", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "mlp_only_layers": [1],
        "norm_topk_prob": True,
    }, in_gguf=False),
    Case("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}, WHOLE, in_gguf=False),
    Case("granitemoe", {"num_local_experts": 6, "num_experts_per_tok": 3, **MULTIPLIERS}, WHOLE),
    Case("minimax_m2", {
        "num_local_experts": 6, "num_experts_per_tok": 3, **partial(0.6),
    }),
    Case("glm4_moe", {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4,
        "topk_group": 2, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
        "routed_scaling_factor": 1.7, **partial(0.6),
    }),
    Case("gpt_oss", {
        "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7, "swiglu_limit": 0.7,
        "layer_types": [SLIDING, FULL, SLIDING],
        **scaled("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False,
                 beta_fast=32.0, beta_slow=1.0),
    }, in_gguf=False),
    Case("llama4_text", LLAMA4, far=(), in_gguf=False),
    Case("llama4_text no-temperature", {**LLAMA4, "attn_temperature_tuning": False}, far=CHUNK_STARTS,
         in_gguf=False),

    # Multi-head latent attention.
    Case("deepseek_v2", {"routed_scaling_factor": 1.7}, LATENT),
    Case("deepseek_v2 groups", {
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None,
        **scaled("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.9),
    }, LATENT),
    Case("deepseek_v3", {"n_group": 4, "topk_group": 2}, LATENT),
    Case("deepseek_v3 yarn", {
        "n_group": 4, "topk_group": 2, "q_lora_rank": None, "norm_topk_prob": False,
        "rope_interleave": False,
        **scaled("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
    }, LATENT, in_gguf=False),
    Case("kimi_k2", {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}, LATENT),

    # Fused matrices, parallel residuals, LayerNorm, parts of the head rotated, multipliers.
    Case("gpt_neox", partial(0.5), NEOX),
    Case("gpt_neox serial", {"use_parallel_residual": False, "attention_bias": False, **partial(0.25)}, NEOX,
         in_gguf=False),
    Case("phi", partial(0.5), WHOLE),
    Case("phi qk-norm", {"qk_layernorm": True, **partial(0.5)}, WHOLE, in_gguf=False),
    Case("phi3", {"sliding_window": 7}, WHOLE),
    Case("phi3 longrope", {
        "original_max_position_embeddings": 16, **scaled("longrope", partial_rotary_factor=0.75, **LONG),
    }, WHOLE, far=()),
    Case("phi3 longrope-within", {
        "original_max_position_embeddings": 60, "max_position_embeddings": 240,
        **scaled("longrope", partial_rotary_factor=0.75, **LONG),
    }, WHOLE, far=()),
    Case("stablelm", partial(0.25), WHOLE),
    Case("stablelm parallel", {
        "use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True, **partial(0.5),
    }, WHOLE),
    Case("starcoder2", {"sliding_window": 7}, WHOLE),
    Case("starcoder2 no-bias", {"use_bias": False}, WHOLE, in_gguf=False),
    Case("olmo", {"clip_qkv": 0.8}, WHOLE),
    # The square of its activation makes errors grow from layer to layer: two are enough.
    Case("nemotron", {"num_hidden_layers": 2, **partial(0.6)}, in_gguf=False),
    Case("nemotron biases", {
        "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, **partial(0.6),
    }, in_gguf=False),
    Case("cohere", {"use_qk_norm": True, "logit_scale": 0.7, "tie_word_embeddings": True}, WHOLE),
    Case("cohere2", {**MIXED, "logit_scale": 0.7, "tie_word_embeddings": True}, WHOLE),
    Case("glm", partial(0.6), in_gguf=False),
    Case("glm4", partial(0.6)),
    Case("granite", MULTIPLIERS, WHOLE),
    Case("ernie4_5", {"tie_word_embeddings": True}),
    Case("ernie4_5 biases", {"use_bias": True}, in_gguf=False),
    Case("hunyuan_v1_dense"),
    Case("hunyuan_v1_dense alpha", {"head_dim": 8, **scaled("dynamic", alpha=50.0, factor=1.0)}),

    # GPT's later kin.
    Case("gptj", {"rotary_dim": 4}, GPT, far=(20,), in_gguf=False),
    Case("gpt_bigcode", sizes=GPT, far=()),
    Case("gpt_bigcode mha", {"multi_query": False}, GPT, far=()),
    Case("opt", sizes=OPT, far=(), in_gguf=False),
    Case("opt post-norm", {"do_layer_norm_before": False}, OPT, far=(), in_gguf=False),
    Case("falcon 7b", {"ffn_hidden_size": 88}, FALCON),
    Case("falcon 40b", {"new_decoder_architecture": True, "num_kv_heads": 2}, FALCON),
    Case("falcon 11b", {
        "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
    }, FALCON),
    # The eager path adds ALiBi twice: into the mask (FalconModel), and to the scores (FalconAttention).
    Case("falcon rw", {
        "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
    }, FALCON, far=(), in_gguf=False, attention="sdpa"),
    Case("bloom", sizes=BLOOM, far=()),
    Case("mpt", sizes=MPT, far=()),

    # The text model of one that also sees.
    Case("gemma3", {
        "text_config": {**SIZES, **MIXED, "query_pre_attn_scalar": 14, "tie_word_embeddings": True},
        "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 130,
    }, {}, in_gguf=False),
    Case("llama4", {
        "text_config": {**SIZES, **LLAMA4},
        "vision_config": VISION | {
            "vision_output_dim": 12, "projector_input_dim": 12, "projector_output_dim": 12,
        },
        "image_token_index": 130,
    }, {}, far=(), in_gguf=False),
]  # fmt: skip

SPECS: dict[str, dict[str, ModelSpec]] = defaultdict(dict)
"""What was run of each family: case → spec."""

WORST: dict[tuple[str, str], float] = defaultdict(float)
"""The worst error of each family in each column of the table."""


@dataclass(frozen=True)
class Pair:
    """One checkpoint in both programs."""

    case: Case
    theirs: transformers.PreTrainedModel
    ours: Decoder
    folder: Path

    @property
    def ids(self) -> Tensor:
        return torch.randint(0, 130, (1, LENGTH), generator=torch.Generator().manual_seed(1))

    def compare(self, column: str, found: Tensor, expected: Tensor) -> None:
        """Fails beyond the tolerance; notes the error for the table."""
        key, error = (self.case.model_type, column), (found - expected).abs().max().item()
        WORST[key] = max(WORST[key], error)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: Case = request.param
    theirs = case.build()
    folder = tmp_path_factory.mktemp("checkpoint")
    case.save(theirs, folder)
    ours = load_decoder(folder)
    SPECS[case.model_type][case.name] = ours.spec
    return Pair(case, text_model(theirs), ours, folder)


def text_model(model: Any) -> Any:
    """Llama 4 with images returns what its text model does not (modeling_llama4.py, `image_outputs`), and so
    fails without an image: the model within it is asked."""
    return model.language_model if model.config.model_type == "llama4" else model


@torch.no_grad()
def their_logits(model: transformers.PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, use_cache=False, **kwargs).logits


@torch.no_grad()
def our_logits(decoder: Decoder, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return decoder(ids, *args, **kwargs)


# --- the checkpoint -----------------------------------------------------------------------------


def in_the_file(pair: Pair) -> dict[str, Tensor]:
    """The tensors of the checkpoint that the table names, under its names."""
    stored = load_file(pair.folder / "model.safetensors")
    table = HF[pair.case.model_type]
    ignored = table.ignored_of(stored)
    return {table.plain(name): tensor for name, tensor in stored.items() if name not in ignored}


def test_a_checkpoint_is_written_as_it_was_read(pair: Pair):
    """Bit for bit, under the names of its own family, each once."""
    expected = in_the_file(pair)
    wanted = stored_places(pair.ours.spec, HF[pair.case.model_type])
    assert sorted(place.stored for place in wanted) == sorted(expected)
    for place in wanted:
        assert torch.equal(stored_tensor(place, pair.ours, torch.float32), expected[place.stored]), place


def test_experts_in_one_tensor_are_those_in_many(pair: Pair, tmp_path: Path):
    """transformers writes its own modules' names and layout when told to."""
    if not HF[pair.case.model_type].also:
        pytest.skip("one layout")
    pair.theirs.save_pretrained(tmp_path, save_original_format=False)
    assert not any(".experts.0." in name for name in load_file(tmp_path / "model.safetensors"))
    for (name, ours), theirs in zip(
        load_decoder(tmp_path).named_parameters(), pair.ours.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


# --- against transformers -----------------------------------------------------------------------


def test_logits_equal_those_of_transformers(pair: Pair):
    pair.compare("transformers", our_logits(pair.ours, pair.ids), their_logits(pair.theirs, pair.ids))


def test_logits_are_equal_at_positions_far_out(pair: Pair):
    if not pair.case.far:
        pytest.skip("positions end, are no part of the model, or change its frequencies")
    for start in pair.case.far:
        positions = torch.arange(start, start + LENGTH)[None]
        theirs = their_logits(pair.theirs, pair.ids, position_ids=positions)
        pair.compare("transformers", our_logits(pair.ours, pair.ids, positions), theirs)


def test_the_case_can_tell_right_from_wrong(pair: Pair):
    """Positions matter: two tokens in the other order give other logits at the end."""
    ids, swapped = pair.ids, pair.ids.clone()
    swapped[:, [-5, -3]] = ids[:, [-3, -5]]
    last = our_logits(pair.ours, ids)[:, -1]
    assert (our_logits(pair.ours, swapped)[:, -1] - last).abs().max() > 100 * TOLERANCE
    assert last.std() > 0.1


def test_transformers_loads_our_export_with_equal_logits(pair: Pair, tmp_path: Path):
    save_hf(pair.ours, tmp_path / "export", config=OURS)
    theirs = CAUSAL.from_pretrained(
        tmp_path / "export", attn_implementation=pair.case.attention, dtype=torch.float32
    )
    pair.compare("export", their_logits(theirs, pair.ids), their_logits(pair.theirs, pair.ids))


def test_a_gguf_of_the_same_weights_gives_the_same_logits(pair: Pair, tmp_path: Path):
    if not pair.case.in_gguf:
        pytest.skip("not expressible in GGUF metadata")
    save_gguf(pair.ours, tmp_path / "model.gguf", dtype="F32")
    again = load_decoder(tmp_path / "model.gguf")
    for (name, ours), (_, theirs) in zip(again.named_parameters(), pair.ours.named_parameters(), strict=True):
        # Where a norm's weight is stored with 1 added to it, the sum is rounded.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7, msg=name)
    pair.compare("gguf", our_logits(again, pair.ids), our_logits(pair.ours, pair.ids))


# --- against itself -----------------------------------------------------------------------------


def in_chunks(decoder: Decoder, ids: Tensor, sizes: list[int]) -> Tensor:
    """Logits of a run fed piece by piece into a poisoned cache of just the run's length."""
    cache = Cache(decoder.spec, len(ids), ids.shape[1])
    cache.fill_(torch.nan)
    return torch.cat([our_logits(decoder, part, cache=cache) for part in ids.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize(
    "sizes", [[1] * 10 + [22] + [1] * 8, [1, 7, 2, 20, 10]], ids=["one by one", "uneven"]
)
def test_cached_in_any_chunks_equals_uncached(pair: Pair, sizes: list[int]):
    pair.compare("itself", in_chunks(pair.ours, pair.ids, sizes), our_logits(pair.ours, pair.ids))


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
        pair.compare("itself", row[None, -n:], our_logits(pair.ours, pair.ids[:, :n]))


def test_left_padded_rows_in_a_cache_equal_their_own_runs(pair: Pair):
    if pair.case.name in ("llama dynamic", "phi3 longrope"):
        pytest.skip("the frequencies are those of the cache's capacity, which the rows share")
    lengths = [35, 3, 17]
    rows, positions = left_padded(pair.ids, lengths)
    cache = Cache(pair.ours.spec, len(rows), LENGTH)
    cache.fill_(torch.nan)
    logits = [our_logits(pair.ours, rows, positions, cache)]
    for step in range(5):
        token = torch.stack([pair.ids[0, n + step] for n in lengths])[:, None]
        logits.append(our_logits(pair.ours, token, positions[:, -1:] + 1 + step, cache))
    for row, n in zip(torch.cat(logits, dim=1), lengths, strict=True):
        pair.compare("itself", row[None, -(n + 5) :], our_logits(pair.ours, pair.ids[:, : n + 5]))


def test_the_last_logits_alone_are_the_last_logits(pair: Pair):
    last = our_logits(pair.ours, pair.ids, last_only=True)
    pair.compare("itself", last, our_logits(pair.ours, pair.ids)[:, -1:])


# --- the table ----------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
ROW = re.compile(r"^\| `(?P<family>\w+)` \|(?P<cells>.*)\|$", re.MULTILINE)
COLUMNS = ("transformers", "export", "itself")


def features_now() -> dict[str, str]:
    """What each family has of which all cases were run."""
    n_cases = Counter(case.model_type for case in CASES)
    return {
        family: features(specs.values())
        for family, specs in sorted(SPECS.items())
        if len(specs) == n_cases[family]
    }


def test_the_page_lists_every_family_and_no_error_beyond_the_bound():
    families = sorted({*FAMILIES, "gemma3", "llama4"})
    now = features_now()
    if os.environ.get("OPENBOOK_UPDATE") == "1":
        assert list(now) == families, "run the whole file to write the page"
        rows = {family: [now[family], *(f"{WORST[family, c]:.1e}" for c in COLUMNS)] for family in families}
        lines = [f"| `{family}` | {' | '.join(cells)} |\n" for family, cells in rows.items()]
        PAGE.write_text(PAGE.read_text().split("| `")[0] + "".join(lines))
    shown = {m["family"]: [c.strip() for c in m["cells"].split("|")] for m in ROW.finditer(PAGE.read_text())}
    assert list(shown) == families
    assert all(float(error) <= TOLERANCE for _, *errors in shown.values() for error in errors)
    assert {family: shown[family][0] for family in now} == now


def test_every_family_that_can_be_read_is_compared():
    assert {case.model_type for case in CASES} == {*FAMILIES, "gemma3", "llama4"}


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
