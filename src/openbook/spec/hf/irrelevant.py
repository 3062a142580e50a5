"""What no family reads: keys that do not shape a model, features and model types that no spec can say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openbook.spec.reader import Reader, UnsupportedError, show

IRRELEVANT = frozenset({
    # The file and the program that wrote it.
    "model_type", "architectures", "auto_map", "transformers_version", "transformers.js_config",
    "_name_or_path", "name_or_path", "_commit_hash", "_from_model_config", "is_llama_config",
    "finetuning_task", "unsloth_version", "unsloth_fixed", "model_name", "language", "license",
    # How to run it, not what it is. Weights carry their own dtype; the loader decides what to use.
    "torch_dtype", "dtype", "use_cache", "return_dict", "output_attentions", "output_hidden_states",
    "use_return_dict", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "_flash_attn_2_enabled", "experts_implementation", "torchscript", "use_bfloat16", "pretraining_tp",
    "tp_degree", "gradient_checkpointing", "use_flash_attn", "use_cache_quantization",
    "cache_implementation", "chunk_size_feed_forward", "reorder_and_upcast_attn", "is_decoder",
    "tie_encoder_decoder", "tf_legacy_loss", "return_dict_in_generate", "output_scores",
    # Training: dropout is off when a model is read or run, and initialisation is over.
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "initializer_range",
    "dropout", "activation_dropout", "residual_dropout", "embedding_dropout", "layerdrop", "init_std",
    # Training of routers, and layers that predict further tokens while training and are not run.
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux",
    "ep_size", "num_nextn_predict_layers", "num_mtp_layers",
    # The tokenizer's ids and texts.
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "mask_token_id",
    "cls_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "prefix",
    "tokenizer_class", "tokenizer_name",
    # Other heads than the language model's.
    "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    # How to sample, once kept in this file.
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "temperature", "top_k", "top_p", "min_p", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty",
    "length_penalty", "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "exponential_decay_length_penalty",
    "remove_invalid_values", "suppress_tokens", "begin_suppress_tokens",
    # GPT-2's second word for n_positions, which transformers does not read.
    "n_ctx",
})  # fmt: skip

ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "is_encoder_decoder": ((False,), "Openbook holds decoder-only models"),
    "add_cross_attention": ((False,), "Openbook holds decoder-only models"),
    "rope_interleaved": ((False,), "rope_interleave is the key of the families that have it"),
    "use_mrope": ((False,), "these families have one position per token"),
    "per_layer_config": (({},), "write the layers out as a spec"),
    "pruned_heads": (({},), "every layer keeps all its heads"),
}
"""Keys that do shape the model: the values under which they change nothing, and why no others."""


def check_quantization(c: Reader, word: str = "quantization_config") -> None:
    """Accepts the two formats that are decoded while loading, since they change the file and not the model;
    raises `UnsupportedError` for others."""
    about = c.object(word)
    if about is None:
        return
    if about.raw("quant_method") not in ("mxfp4", "fp8"):
        method = show(about.raw("quant_method"))
        about.fail(
            "quant_method",
            f"is {method}, which is not supported: use the unquantised checkpoint, or a GGUF file",
            UnsupportedError,
        )
    if about.raw("quant_method") == "fp8":
        about.only("fmt", ("e4m3",), "FP8 is read as e4m3")
        if about.raw("weight_block_size") != [128, 128]:
            about.fail(
                "weight_block_size", "must be [128, 128], the squares that share a scale", UnsupportedError
            )


_IMAGES = frozenset({
    "vision_config", "image_token_index", "image_token_id", "boi_token_index", "boi_token_id",
    "eoi_token_index", "eoi_token_id", "mm_tokens_per_image",
})  # fmt: skip

TEXT_OF: Mapping[str, tuple[str, frozenset[str]]] = {
    "gemma3": ("gemma3_text", _IMAGES),
    "llama4": ("llama4_text", _IMAGES),
}
"""Model types that hold a language model in their `text_config`: its own type, and the keys of the rest."""

NOT_YET: Mapping[str, str] = {
    "apertus": "a feed-forward with xIELU, whose shape is learned",
    "bamba": "Mamba-2 layers",
    "deepseek_v32": "sparse attention with an indexer",
    "deepseek_v4": "compressed attention and hyper-connections",
    "falcon_h1": "Mamba-2 heads beside those of attention",
    "falcon_mamba": "Mamba layers",
    "gemma3n": "per-layer inputs and shared keys and values",
    "gemma3n_text": "per-layer inputs and shared keys and values",
    "gemma4": "per-layer inputs and shared keys and values",
    "gemma4_text": "per-layer inputs and shared keys and values",
    "glm_moe_dsa": "sparse attention with an indexer",
    "granitemoehybrid": "Mamba-2 layers",
    "jamba": "Mamba layers",
    "kimi_linear": "linear attention (Kimi delta attention) layers",
    "lfm2": "short convolution layers",
    "lfm2_moe": "short convolution layers",
    "longcat_flash": "two attentions in a layer and experts that do nothing",
    "mamba": "Mamba layers",
    "mamba2": "Mamba-2 layers",
    "mimo_v2_flash": "values of another size than keys",
    "minimax": "linear attention (lightning attention) layers",
    "nemotron_h": "Mamba-2 layers",
    "olmo_hybrid": "linear attention (gated delta rule) layers",
    "phimoe": "a router of two thresholded softmaxes (sparsemixer)",
    "qwen3_5": "linear attention (gated delta rule) layers",
    "qwen3_5_moe": "linear attention (gated delta rule) layers",
    "qwen3_5_text": "linear attention (gated delta rule) layers",
    "qwen3_next": "linear attention (gated delta rule) layers",
    "recurrent_gemma": "recurrent (RG-LRU) layers",
    "rwkv": "recurrent (WKV) layers",
    "xlstm": "recurrent (mLSTM) layers",
    "zamba": "Mamba layers",
    "zamba2": "Mamba-2 layers",
}
"""Model types that are known not to fit, and what they have that no spec says."""
