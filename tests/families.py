"""Every family of ``transformers`` that exports stacked experts, as a tiny model with a loss.

``families()`` finds them in the installed package: the modeling files with experts that take an ``experts_implementation``.
``tiny(name)`` shrinks the family's own configuration: each size by its name (``SIZES``), and one layer of each kind.
Sizes that depend on each other in a way that no name tells, and what a family leaves unset, stand in ``MORE``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH, VOCAB, EXPERTS, LAYERS = 8, 8, 64, 4, 2
USED = 32
"""Ids of tokens in a batch; those from here on mark images and the like."""
HEADS = "ForCausalLM", "ForConditionalGeneration", "ForTokenClassification", "ForBlockDiffusion"
"""Classes that have a loss, the plainest first."""
SIZES: tuple[tuple[str, int], ...] = (
    (r"num_hidden_layers|depth|encoder_layers", LAYERS),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|top_k_experts|moe_k|moe_topk|n_groups?|num_expert_group|\w+_layer_period|index_kpool", 2),
    (r"topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts|\w+_layer_offset", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"(swa_)?num_attention_heads|num_heads|linear_num_(value_)?heads|encoder_attention_heads|mamba_(num|n)_heads", 4),
    (r"(swa_)?num_key_value_heads|linear_num_key_heads", 2),
    (r"(swa_|linear_|linear_key_|linear_value_|v_|index_|qk_nope_|qk_rope_)?head_dim", 8),
    (r"qk_head_dim|mamba_d_head|mamba_head_dim|mamba_d_state|ssm_state_size|mamba_dt_rank", 16),
    (r"(q|kv|o)_lora_rank|gated_norm_rank|hc_lowrank|router_hidden_size|d_rel|rotary_dim|hidden_size_per_layer_input", 8),
    (r"hidden_size|d_model|decoder_dim|output_dim|out_hidden_size|thinker_hidden_size|mlp_dim|moe_hidden_size", 32),
    (r".*intermediate_size.*|.*ffn_dim|.*projector_hidden_size|downsample_hidden_size|output_channels", 16),
    (r"(unpadded_)?vocab_size(_per_layer_input)?|codebook_size|ngram_vocab_size_base", VOCAB),
    (r"max_position_embeddings|model_max_length|max_source_positions|image_size", 32),
    (r"sliding_window(_size)?|index_topk|index_n_heads|chunk_size|mamba_chunk_size|split_ngram_parts", 4),
)
_TOKEN = r".*_token_(id|index)|codec_.*_id"


def _sections(*sizes: int, **more: Any) -> dict[str, Any]:
    return {"text_config": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes), **more,
    }}}


_QSA = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2}
MORE: Mapping[str, Mapping[str, Any]] = {
    "deepseek_ocr2": {"text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 2,
                    "topk_group": 1},
    "diffusion_gemma": {"text_config": {"num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "dots3_note": {f"swa_{name}": size for name, size in {
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "head_dim": 16,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    }.items()},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2},
    "ernie4_5_vl_moe": _sections(1, 1, 2), "glm4v_moe": _sections(1, 1, 2, partial_rotary_factor=1.0),
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2, "num_experts": EXPERTS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "muse_spark": {"audio_config": {"num_hidden_layers": 1, "patch_sizes": [4], "hidden_sizes": [32], "depths": [1]}},
    "qwen4_exp": _QSA,
    "zaya": {"num_experts_per_tok": 1},
}


@cache
def families() -> tuple[str, ...]:
    """Names of the folders in ``transformers.models``, in order."""
    return tuple(file.parent.name for file in _files() if "@use_experts_implementation" in file.read_text(encoding="utf-8"))


@cache
def _files() -> tuple[Path, ...]:
    import transformers

    return tuple(sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")))


def kind(name: str) -> type[nn.Module]:
    """The family's class that computes a loss."""
    file = next(file for file in _files() if file.parent.name == name)
    module = import_module(f"transformers.models.{name}.{file.stem}")
    own = [one for one, made in vars(module).items() if isinstance(made, type) and made.__module__ == module.__name__]
    found: type[nn.Module] = getattr(
        module, next(one for head in HEADS for one in own if one.endswith(head) and "PreTrained" not in one)
    )
    return found


def tiny(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The family's model and a batch of text, the same on every rank."""
    of: Any = kind(name)
    config = of.config_class(**_merged(_shrunk(of.config_class(), count(USED)), MORE.get(name, {})))
    config.use_cache = False
    torch.manual_seed(seed)
    model = of(config)
    if model.config._experts_implementation == "eager":  # a loop by default, which cannot be captured
        model.config._experts_implementation = "grouped_mm"
    with torch.no_grad():
        for buffer in (buffer for path, buffer in model.named_buffers() if path.endswith("e_score_correction_bias")):
            nn.init.uniform_(buffer, 0.0, 0.2)
    ids = torch.randint(1, USED, (BATCH, LENGTH))
    labels = ids % 2 if of.__name__.endswith("TokenClassification") else torch.where(torch.rand(ids.shape) < 0.2, -100, ids)
    if of.__name__.endswith("BlockDiffusion"):
        return Refined(model).train(), {"input_ids": ids, "decoder_input_ids": ids.flip(0), "labels": labels}
    return model.train(), {"input_ids": ids, "labels": labels}


class Refined(nn.Module):
    """Block diffusion as it is trained: the cross entropy of what the tokens of the canvas should have been."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """[batch, sequence] ids to the loss."""
        logits = self.model(input_ids=input_ids, decoder_input_ids=decoder_input_ids).logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)}


def _shrunk(config: Any, tokens: Iterator[int]) -> dict[str, Any]:
    """Arguments of a configuration like this one, but tiny, and of those inside."""
    from transformers import PretrainedConfig

    found: dict[str, Any] = {}
    given = {field.name for field in fields(config)} | set(config.attribute_map.values())
    for name, value in vars(config).items():
        if name not in given:
            continue  # made of the others
        if isinstance(value, PretrainedConfig):
            found[name] = _shrunk(value, tokens)
        elif name == "pad_token_id":
            found[name] = 0
        elif isinstance(value, int) and not isinstance(value, bool) and value:
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
            found |= {name: size} if size else {name: next(tokens)} if re.fullmatch(_TOKEN, name) else {}
        elif isinstance(value, float) and ("dropout" in name or "jitter" in name):
            found[name] = 0.0
    if found.get("num_key_value_heads") and found.get("kv_lora_rank"):
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found | _kinds(config, "num_hidden_layers" in found)


def _kinds(config: Any, layers: bool) -> dict[str, Any]:
    """One layer of each kind of attention, and of each kind of what follows it."""
    found: dict[str, Any] = {}
    length = LAYERS
    for name in ("layer_types", "layers_block_type"):
        value = vars(config).get(name)
        if isinstance(value, list | tuple) and layers:
            each = list(dict.fromkeys(value))
            length = max(LAYERS, len(each))
            found |= {name: (each * length)[:length], "num_hidden_layers": length}
    if isinstance(feeds := vars(config).get("mlp_layer_types"), list | tuple):
        each = list(dict.fromkeys(feeds))
        found["mlp_layer_types"] = [each[0], *each[-1:] * (length - 1)]
    return found


def _merged(sizes: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: _merged(sizes.get(key, {}), value) for key, value in more.items() if key.endswith("_config")}
    return {**sizes, **more, **inner}
