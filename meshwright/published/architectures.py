"""Models of published shape on the meta device, from their dims: what ``zoo`` prices, and whatever else plans a paper's row.

    family         the model
    gpt            Megatron-LM's GPT: GPT-2's layer, query, key and value side by side in every head, tied embedding, no dropout
    nemotron       a GPT layer whose queries share keys, with rotary positions
    llama          Llama's layer
    moe            Mixtral's layer: ``experts`` of width ``ffn``, ``top_k`` per token
    deepseek_v2/3  latent attention, routed and shared experts; the dims of both are in ``extra``
    solar_open     Solar Open's layer, likewise
    palm           attention and feed-forward side by side, one key and value head, tied embedding (Chowdhery et al. 2022)

``gpt`` and ``palm`` are modules of this file; the others are built by ``transformers``, which is imported when a model is built
and not before. (GPT-2 of ``transformers`` lays all queries before all keys, so tensor parallelism must move them to their heads
after the first product, which Megatron-LM does not.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.errors import InputError

FAMILIES = ("gpt", "nemotron", "llama", "moe", "deepseek_v2", "deepseek_v3", "solar_open", "palm")


@dataclass(frozen=True)
class Architecture:
    """Dims of a language model. ``extra``: what the configuration of ``transformers`` calls the rest.

    >>> Architecture("llama", layers=2, hidden=64, heads=4, ffn=128, vocab=100).kv_heads
    4
    """

    family: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    experts: int = 0
    top_k: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise InputError(f"no architecture for family {self.family!r}; known: {', '.join(FAMILIES)}")
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)


def build(architecture: Architecture, sequence: int, attention: str = "sdpa") -> nn.Module:
    """The model on the meta device, its output with a ``loss``. Raises InputError where ``transformers`` is missing.

    ``attention``: "sdpa"; "eager", which forms the matrix of scores and masks it; "scores", whose softmax masks by position.
    """
    if architecture.family in ("gpt", "palm"):
        with torch.device("meta"):
            return Gpt(architecture, sequence, attention) if architecture.family == "gpt" else Palm(architecture)
    try:
        import transformers
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise InputError(
            f"building a model of family {architecture.family!r} needs transformers: pip install 'meshwright[demo]'"
        ) from error
    ALL_ATTENTION_FUNCTIONS.register("scores", _attend)
    config = configuration(architecture, sequence)
    config._attn_implementation = attention
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def configuration(architecture: Architecture, sequence: int) -> Any:
    """The configuration of ``transformers``; ``sequence`` tokens at most."""
    import transformers as hf

    a = architecture
    common: dict[str, Any] = {"vocab_size": a.vocab, "use_cache": False, **a.extra}
    plain: dict[str, Any] = {
        **common, "num_hidden_layers": a.layers, "hidden_size": a.hidden, "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads, "intermediate_size": a.ffn, "max_position_embeddings": sequence,
    }
    if a.head_dim:
        plain["head_dim"] = a.head_dim
    if a.family == "nemotron":
        return hf.NemotronConfig(**plain)
    if a.family == "llama":
        return hf.LlamaConfig(**plain)
    if a.family == "moe":
        return hf.MixtralConfig(**plain, num_local_experts=a.experts, num_experts_per_tok=a.top_k)
    named = {"deepseek_v2": "DeepseekV2Config", "deepseek_v3": "DeepseekV3Config", "solar_open": "SolarOpenConfig"}
    experts = {"n_routed_experts": a.experts, "num_experts_per_tok": a.top_k}
    return getattr(hf, named[a.family])(**plain, **experts)


def scores(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Attention before flash kernels, [b, heads, s, d]: a product, one kernel that scales, masks and normalizes, a product.

    The kernel masks by position, so there is no mask to make or to read; the scale stands with the queries, which are few.
    """
    return torch.softmax((query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2), dim=-1) @ value


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:
    """``scores`` as ``transformers`` calls it; several queries may share a key."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scores(query, key, value, scaling).transpose(1, 2).contiguous(), None


class Gpt(nn.Module):
    """Megatron-LM's GPT (Narayanan et al. 2021): 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h) parameters."""

    def __init__(self, architecture: Architecture, sequence: int, attention: str = "sdpa") -> None:
        super().__init__()
        self.tokens = nn.Embedding(architecture.vocab, architecture.hidden)
        self.positions = nn.Embedding(sequence, architecture.hidden)
        self.layers = nn.ModuleList(GptLayer(architecture, attention) for _ in range(architecture.layers))
        self.norm = nn.LayerNorm(architecture.hidden)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of the next token; [batch, sequence] ids."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        return {"loss": _loss(F.linear(self.norm(x), self.tokens.weight), labels)}


class GptLayer(nn.Module):
    """One layer: query, key and value of a head are neighbours in one product's result."""

    def __init__(self, architecture: Architecture, attention: str) -> None:
        super().__init__()
        hidden = architecture.hidden
        self.width, self.attention = hidden // architecture.heads, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, architecture.ffn), nn.Linear(architecture.ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] -> the same."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (-1, 3 * self.width)).transpose(1, 2)
        query, key, value = heads.chunk(3, -1)
        if self.attention == "eager":
            products = (query / math.sqrt(self.width)) @ key.transpose(-1, -2)
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            mixed = products.masked_fill(later, -torch.inf).softmax(-1) @ value
        elif self.attention == "scores":
            mixed = scores(query, key, value)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return x


class Palm(nn.Module):
    """PaLM: y = x + attention(norm x) + ffn(norm x), SwiGLU, no biases. Without the rotary embedding, which holds no
    parameters and little work."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.embedding = nn.Embedding(architecture.vocab, architecture.hidden)
        self.layers = nn.ModuleList(PalmLayer(architecture) for _ in range(architecture.layers))
        self.norm = nn.LayerNorm(architecture.hidden, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of the next token; [batch, sequence] ids."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": _loss(F.linear(self.norm(x), self.embedding.weight), labels)}


class PalmLayer(nn.Module):
    """One layer of PaLM."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, self.width = architecture.hidden, architecture.head_dim or architecture.hidden // architecture.heads
        self.norm = nn.LayerNorm(hidden, bias=False)
        self.query = nn.Linear(hidden, architecture.heads * self.width, bias=False)
        self.key = nn.Linear(hidden, architecture.kv_heads * self.width, bias=False)
        self.value = nn.Linear(hidden, architecture.kv_heads * self.width, bias=False)
        self.out = nn.Linear(architecture.heads * self.width, hidden, bias=False)
        self.gate = nn.Linear(hidden, architecture.ffn, bias=False)
        self.up = nn.Linear(hidden, architecture.ffn, bias=False)
        self.down = nn.Linear(architecture.ffn, hidden, bias=False)
        self.heads = architecture.heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] -> the same."""
        y = self.norm(x)
        query, key, value = (f(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.query, self.key, self.value))
        key, value = (t.expand(-1, self.heads, -1, -1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(mixed) + self.down(F.silu(self.gate(y)) * self.up(y))
        return x


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
