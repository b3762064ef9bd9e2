"""Models of published sizes, built from local configs: nothing is downloaded, and on the meta device nothing is filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    """``config`` of a family of transformers (``FAMILIES``); ``sequence``: tokens of a sample; ``parameters``: how many there
    are; ``layers``: the config's name for their number."""

    family: str
    config: Mapping[str, Any]
    sequence: int
    parameters: float
    layers: str = "num_hidden_layers"


FAMILIES: Mapping[str, tuple[str, str]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "bert": ("BertConfig", "BertForMaskedLM"),
    "t5": ("T5Config", "T5ForConditionalGeneration"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "bloom": ("BloomConfig", "BloomForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "bart": ("BartConfig", "BartForConditionalGeneration"),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM"),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM"),
    "vit": ("ViTConfig", "ViTForImageClassification"),
}
ENCODERS = "bert", "roberta", "modernbert", "vit"


def _gpt2(layers: int, hidden: int, heads: int, vocab: int, sequence: int, parameters: float, **more: Any) -> Model:
    config = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocab, "n_positions": sequence,
              "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1, **more}
    return Model("gpt2", config, sequence, parameters, "n_layer")


def _llama(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, parameters: float, family: str = "llama",
    sequence: int = 8192, **more: Any,
) -> Model:
    config = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
              "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": sequence, **more}
    return Model(family, config, sequence, parameters)


MODELS: Mapping[str, Model] = {
    "gpt2": _gpt2(12, 768, 12, 50257, 1024, 0.124e9),
    "gpt2-xl": _gpt2(48, 1600, 25, 50257, 1024, 1.56e9),
    "bert-large": Model("bert", {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    }, 512, 0.335e9),
    "t5-3b": Model("t5", {
        "d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "vocab_size": 32128,
        "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
    }, 512, 2.85e9, "num_layers"),
    "llama-8b": _llama(32, 4096, 14336, 32, 8, 128256, 8.03e9, rope_theta=500000.0),
    "gemma-9b": _llama(42, 3584, 14336, 16, 8, 256000, 9.24e9, "gemma2", 4096, head_dim=256),
    "llama-70b": _llama(80, 8192, 28672, 64, 8, 128256, 70.6e9, rope_theta=500000.0),
    "qwen-72b": _llama(80, 8192, 29568, 64, 8, 152064, 72.7e9, "qwen2"),
    "llama-405b": _llama(126, 16384, 53248, 128, 8, 128256, 405.8e9, rope_theta=500000.0),
    "gpt-1t": _gpt2(128, 25600, 160, 51200, 2048, 1008e9, n_inner=102400),
}


def _deepseek(heads: int, vocab: int, experts: int, dense: int, groups: tuple[int, int], parameters: float) -> Model:
    config = {
        "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": heads,
        "num_key_value_heads": heads, "vocab_size": vocab, "max_position_embeddings": 4096, "n_routed_experts": experts,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": dense,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_group": groups[0], "topk_group": groups[1],
    }
    return Model("deepseek_v3", config, 4096, parameters)


MIXTURES: Mapping[str, Model] = {
    "mixtral-8x7b": _llama(32, 4096, 14336, 32, 8, 32000, 46.7e9, "mixtral", 4096, num_local_experts=8, num_experts_per_tok=2),
    "deepseek-v3": _deepseek(128, 129280, 256, 3, (8, 4), 671e9),
    "kimi-k2": _deepseek(64, 163840, 384, 1, (1, 1), 1026e9),
}
"""Mixtures of experts, which are no points of the grid."""
OTHERS: Mapping[str, Model] = {
    "llama-1b": _llama(16, 2048, 8192, 32, 8, 128256, 1.24e9, sequence=4096, tie_word_embeddings=True, head_dim=64),
    "mistral-7b": _llama(32, 4096, 14336, 32, 8, 32000, 7.25e9, "mistral", 8192, sliding_window=4096),
    "mistral-123b": _llama(88, 12288, 28672, 96, 8, 32768, 122.6e9, "mistral", 4096, sliding_window=None),
    "qwen3-32b": _llama(64, 5120, 25600, 64, 8, 151936, 32.8e9, "qwen3", 4096, head_dim=128),
    "qwen3-30b-a3b": _llama(
        48, 2048, 6144, 32, 4, 151936, 30.5e9, "qwen3_moe", 4096, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "gemma3-27b": _llama(62, 5376, 21504, 32, 16, 262144, 27.0e9, "gemma3", 4096, head_dim=128, sliding_window=1024),
    "phi3-medium": _llama(40, 5120, 17920, 40, 10, 32064, 14.0e9, "phi3", 4096, pad_token_id=0, sliding_window=None),
    "neox-20b": _llama(44, 6144, 24576, 64, 64, 50432, 20.6e9, "gpt_neox", 2048),
    "bloom-7b": Model("bloom", {
        "hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }, 2048, 7.07e9, "n_layer"),
    "opt-13b": Model("opt", {
        "hidden_size": 5120, "num_hidden_layers": 40, "ffn_dim": 20480, "num_attention_heads": 40, "vocab_size": 50272,
        "max_position_embeddings": 2048, "word_embed_proj_dim": 5120, "dropout": 0.0,
    }, 2048, 12.85e9),
    "bart-large": Model("bart", {
        "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
        "encoder_attention_heads": 16, "decoder_attention_heads": 16, "vocab_size": 50265, "dropout": 0.1,
    }, 1024, 0.406e9, "encoder_layers"),
    "roberta-large": Model("roberta", {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 50265, "max_position_embeddings": 514,
    }, 512, 0.355e9),
    "modernbert-large": Model("modernbert", {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624,
    }, 2048, 0.395e9),
    "vit-huge": Model("vit", {
        "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120, "patch_size": 14,
        "num_labels": 1000,
    }, 224, 0.632e9),
}
"""Models of other families, which are no points of the grid either; a vision model's sequence is its image's side."""


def build(model: Model, layers: int | None = None) -> Any:
    """The module on the meta device; ``layers``: instead of its own."""
    import torch
    import transformers

    config, kind = (getattr(transformers, name) for name in FAMILIES[model.family])
    given = {**model.config, **({model.layers: layers} if layers is not None else {})}
    if model.family not in ENCODERS:
        given["use_cache"] = False
    with torch.device("meta"):
        return kind(config(**given))


def inputs(model: Model, batch: int) -> dict[str, Any]:
    """Tokens, or images, of a global batch of samples, on the meta device."""
    import torch

    if model.family == "vit":
        images = torch.empty((batch, 3, model.sequence, model.sequence), device="meta")
        return {"pixel_values": images, "labels": torch.zeros((batch,), dtype=torch.int64, device="meta")}
    tokens = torch.zeros((batch, model.sequence), dtype=torch.int64, device="meta")
    mask = {"attention_mask": torch.empty_like(tokens)} if model.family in ENCODERS else {}
    return {"input_ids": tokens, "labels": torch.empty_like(tokens), **mask}
