"""Random tiny checkpoints, once in transformers and once in ours; and decoders with a fault planted."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from openbook.model import Decoder
from openbook.spec.model import ModelSpec
from openbook.trace import Trace, record
from openbook.trace.hf import record_transformers

NEW = 17
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
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
"""For families with a head size of their own."""

WHOLE = {key: value for key, value in SIZES.items() if key != "head_dim"} | {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
"""For families whose heads, of 8, make up the width."""

GPT = {"vocab_size": 131, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 88}
LATENT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 11,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}
"""Beside `WHOLE`: latent attention, and experts after a dense layer."""

SPARSE = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 36}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
    "mistral": SIZES | {"sliding_window": 7},
    "gpt2": GPT,
    "gemma3_text": SIZES
    | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": WHOLE,
    "gpt_neox": {key: value for key, value in WHOLE.items() if key != "num_key_value_heads"},
    "bloom": {"vocab_size": 131, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "olmo": WHOLE | {"clip_qkv": 0.8},
    "hunyuan_v1_dense": SIZES,
    "mixtral": SIZES | {"num_local_experts": 12, "num_experts_per_tok": 3},
    "qwen3_moe": SIZES | SPARSE | {"norm_topk_prob": True},
    "deepseek_v3": WHOLE | LATENT | {"n_group": 4, "topk_group": 2},
}
"""By model_type, with what its configuration says."""


@dataclass(frozen=True)
class Checkpoint:
    """One model in both programs."""

    ours: Decoder
    theirs: Any
    folder: Path

    @property
    def ids(self) -> torch.Tensor:
        return torch.randint(0, 131, (1, NEW), generator=torch.Generator().manual_seed(1))

    def our_trace(self) -> Trace:
        return record(self.ours, self.ids)

    def their_trace(self) -> Trace:
        return record_transformers(self.theirs, self.ours.spec, self.ids)


def random_model(family: str) -> Any:
    """transformers' model with noise in every parameter, fp32."""
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.empty_like(parameter).normal_(generator=generator)
        is_norm = parameter.ndim == 1 and not name.endswith("bias")
        parameter.data.copy_(parameter + 0.3 * noise if is_norm else noise * parameter.shape[-1] ** -0.5)
    return model


def changed(
    decoder: Decoder, spec: ModelSpec | None = None, weights: Callable[[dict[str, Any]], None] | None = None
) -> Decoder:
    """A decoder of another spec, or whose weights `weights` has changed, with all others the same."""
    other = Decoder(spec or decoder.spec).eval()
    values = {name: p.detach().clone() for name, p in decoder.named_parameters(remove_duplicate=False)}
    if weights is not None:
        weights(values)
    for name, parameter in other.named_parameters():
        parameter.data.copy_(values[name])
    return other
