"""Tiny random models of every kind of attention, at any sequence length, for cells of context parallelism.

``MODELS[name](length)`` is (model, kwargs at a batch of BATCH). A name may say how the batch is filled: "left" and "right" are
padding on that side, "packed" is documents whose ``position_ids`` restart, "prefix" is an additive mask of every sample, whose
first words all words see, "short" is answers shorter than questions. ``DROPS`` have dropout where it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH, VOCAB, LAYERS = 8, 64, 4
Case = tuple[nn.Module, dict[str, torch.Tensor]]
_SMALL: Mapping[str, Any] = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCAB,
                             "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_GATED: Mapping[str, Any] = {**_SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
_ALTERNATE = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Llama": _GATED,
    "Mistral": {**_GATED, "sliding_window": 4},
    "GPT2": {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, "use_cache": False,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1},
    "Gemma2": {**_GATED, "head_dim": 8, "sliding_window": 4, "layer_types": _ALTERNATE},  # soft caps
    "Gemma3": {**_GATED, "head_dim": 8, "sliding_window": 4, "layer_types": _ALTERNATE},
    "Phi3": {**_GATED, "sliding_window": 4},
    "Qwen3": {**_GATED, "head_dim": 8},
    "Falcon": {**_SMALL, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
    "Falcon alibi": {**_SMALL, "multi_query": False, "parallel_attn": False, "new_decoder_architecture": False, "alibi": True,
                     "bias": True},
    "Qwen2": _GATED,
    "Olmo2": _GATED,  # norms after attention, and of whole queries and keys
    "GPTNeoX": {**_SMALL, "intermediate_size": 64, "max_position_embeddings": 64, "rotary_pct": 0.5},
    "GPTJ": {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "rotary_dim": 4, "vocab_size": VOCAB, "n_positions": 64,
             "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
             "eos_token_id": 1},
    "OPT": {**_SMALL, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Cohere2": {**_GATED, "sliding_window": 4, "layer_types": _ALTERNATE},  # no positions where there is no window
    "SmolLM3": {**_GATED, "no_rope_layer_interval": 2},
    "Starcoder2": {**_GATED, "sliding_window": 4, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "Bloom": {**_SMALL, "hidden_dropout": 0.0, "attention_dropout": 0.0},  # ALiBi
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": LAYERS, "expansion_ratio": 2, "max_seq_len": 64, "vocab_size": VOCAB,
            "use_cache": False},  # ALiBi
    "GptOss": {**_GATED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
               "layer_types": _ALTERNATE},  # sinks
    "Jamba": {**_GATED, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
              "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4,
              "mamba_d_conv": 4, "mamba_dt_rank": 4},
    "Mamba": {**_SMALL, "state_size": 4, "conv_kernel": 4, "time_step_rank": 4},
}
_ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "Bert": {},
    "Roberta": {"pad_token_id": 0},  # positions count the words that are no padding
    "Albert": {"embedding_size": 16},  # every layer has the same weights
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8,
                  "norm_rel_ebd": "layer_norm", "position_buckets": 8},
    "ModernBert": {"local_attention": 8, "global_attn_every_n_layers": 2,  # windows to both sides
                   "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1},
}
DROPS = ("GPT2", "bert", "t5", "GPTNeoX", "OPT", "Bloom", "bart", "ModernBert", "dinov2")


def _tokens(length: int) -> torch.Tensor:
    return torch.randint(2, VOCAB, (BATCH, length))


def _decoder(name: str, filled: str, length: int) -> Case:
    """A causal language model of transformers; labels of padding count for nothing."""
    import transformers

    config, name = _CONFIGS[name], name.partition(" ")[0]
    config = getattr(transformers, f"{name}{'Text' * (name == 'Gemma3')}Config")(**config)
    ids = _tokens(length)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if filled == "packed":
        ends = torch.tensor([(length * (2 + row % 3)) // 7 for row in range(BATCH)])[:, None]
        places = torch.arange(length).expand(BATCH, -1)
        batch["position_ids"] = torch.where(places < ends, places, places - ends)
    elif filled == "prefix":
        places = torch.arange(length)
        seen = (places <= places[:, None]) | (places < torch.arange(BATCH)[:, None, None] % 4 + 1)
        batch["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[:, None]
    elif filled:
        mask = torch.ones_like(ids)
        for row in range(BATCH):
            short = (row * length) // (2 * BATCH)
            mask[row, (slice(0, short) if filled == "left" else slice(length - short, length))] = 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{name}{head}")(config), batch


def _encoder(name: str, length: int) -> Case:
    """Words of which some are to be guessed, one sample padded."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=64, vocab_size=VOCAB,
        max_position_embeddings=72, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_ENCODERS[name],
    )
    ids = _tokens(length)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    labels = torch.where((torch.rand(ids.shape) < 0.4) & (mask == 1), ids, -100)
    model = getattr(transformers, f"{name}ForMaskedLM")(config)
    return model, {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def _t5(short: int, length: int) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=LAYERS // 2, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0, relative_attention_num_buckets=8,
    )
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(length), "labels": _tokens(length - short)}


def _bart(short: int, length: int) -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=VOCAB, max_position_embeddings=64, dropout=0.0, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1, forced_eos_token_id=None,
    )
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[2, length // 2 :] = 0
    return BartForConditionalGeneration(config), {
        "input_ids": _tokens(length), "attention_mask": mask, "labels": _tokens(length - short),
    }


def _whisper(length: int) -> Case:
    """An encoder of convolutions, one of which halves the length, and a decoder of as many tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=VOCAB, num_mel_bins=8, max_source_positions=length,
        max_target_positions=64, dropout=0.0, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(BATCH, 8, 2 * length), "labels": _tokens(length),
    }


def _vit(name: str, square: bool, length: int) -> Case:
    """Of the class token and patches, ``length`` in all; in a square, as many as go."""
    import transformers

    wide = math.isqrt(length - 1) if square else 1
    size = (4 * (wide if square else length - 1), 4 * wide)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=64, mlp_ratio=2, patch_size=4,
        image_size=size[0] if square else size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5,
    )
    model = getattr(transformers, f"{name}ForImageClassification")(config)
    return model, {"pixel_values": torch.randn(BATCH, 3, *size), "labels": torch.randint(0, 5, (BATCH,))}


class _Scans(nn.Module):
    """A causal convolution, a GRU, and attention after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(VOCAB, 32), nn.Conv1d(32, 32, 4, groups=32, padding=3)
        self.scan, self.qkv, self.head = nn.GRU(32, 32, batch_first=True), nn.Linear(32, 96), nn.Linear(32, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        x = x + F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        x = x + self.scan(x)[0]
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def _scans(length: int) -> Case:
    ids = _tokens(length)
    return _Scans(), {"input_ids": ids, "labels": ids.roll(-1, 1)}


class _Biased(nn.Module):
    """Grouped heads with a learned additive bias as the mask (grouped by the kernel, or repeated before it)."""

    def __init__(self, length: int, causal: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(32, 64), nn.Linear(32, 32)]) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(4, length, length) / 2)
        self.causal = causal

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        bias = self.bias[None]
        if self.causal:
            hidden = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
            bias = bias.masked_fill(hidden, float("-inf"))
        for qkv, out in self.layers:
            q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in qkv(x).split([32, 16, 16], -1))
            y = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
            x = x + out(y.transpose(1, 2).flatten(2))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def _biased(causal: bool, length: int) -> Case:
    ids = _tokens(length)
    return _Biased(length, causal), {"input_ids": ids, "labels": ids.roll(-1, 1)}


MODELS: dict[str, Callable[[int], Case]] = {
    **{name: partial(_decoder, name, "") for name in _CONFIGS},
    **{f"{name} {filled}": partial(_decoder, name, filled) for name, filled in (
        ("Llama", "packed"), ("Llama", "left"), ("Llama", "right"), ("Mistral", "packed"), ("Mistral", "left"),
        ("Gemma3", "packed"), ("Gemma2", "right"), ("Bloom", "left"), ("GptOss", "right"), ("Qwen3", "packed"),
        ("Qwen2", "packed"), ("SmolLM3", "packed"), ("Cohere2", "right"), ("GPTNeoX", "left"), ("Falcon alibi", "left"),
        ("OPT", "right"), ("Llama", "prefix"), ("Olmo2", "prefix"),
    )},
    "bert": partial(_encoder, "Bert"), **{name: partial(_encoder, name) for name in _ENCODERS if name != "Bert"},
    "t5": partial(_t5, 0), "t5 short": partial(_t5, 3), "bart": partial(_bart, 0), "bart short": partial(_bart, 5),
    "vit": partial(_vit, "ViT", False), "dinov2": partial(_vit, "Dinov2", True),
    "whisper": _whisper, "scans": _scans,
    "biased": partial(_biased, False), "biased causal": partial(_biased, True),
}
NAMED = ("Llama", "Mistral", "GPT2", "bert", "t5", "vit")
"""Those that the goals name."""


def make(name: str, length: int, drop: float = 0.0) -> Case:
    """The named model at a length, the same on every call and rank; ``drop``: of its dropout."""
    torch.manual_seed(1)
    model, batch = MODELS[name](length)
    for module in model.modules():
        for key in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, drop)
        if isinstance(module, nn.Dropout):
            module.p = drop
    return model.train(), batch
