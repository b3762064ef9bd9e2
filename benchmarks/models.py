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
}


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


def build(model: Model, layers: int | None = None) -> Any:
    """The module on the meta device; ``layers``: instead of its own."""
    import torch
    import transformers

    config, kind = (getattr(transformers, name) for name in FAMILIES[model.family])
    given = {**model.config, **({model.layers: layers} if layers is not None else {})}
    if model.family != "bert":
        given["use_cache"] = False
    with torch.device("meta"):
        return kind(config(**given))


def inputs(model: Model, batch: int) -> dict[str, Any]:
    """Tokens of a global batch of samples, on the meta device."""
    import torch

    tokens = torch.zeros((batch, model.sequence), dtype=torch.int64, device="meta")
    mask = {"attention_mask": torch.empty_like(tokens)} if model.family == "bert" else {}
    return {"input_ids": tokens, "labels": torch.empty_like(tokens), **mask}
