"""Mixtures of experts for the tests: real architectures, tiny, with even or heavily skewed routing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partialmethod
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH, VOCAB, EXPERTS = 8, 4, 32, 4
_SIZES: Mapping[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "max_position_embeddings": 16, "use_cache": False,
}
Case = tuple[nn.Module, dict[str, torch.Tensor]]


def mixtral(**more: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**_SIZES, "num_hidden_layers": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, **more}
    return MixtralForCausalLM(MixtralConfig(**sizes))


def qwen2(**more: Any) -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {**_SIZES, "num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
             "shared_expert_intermediate_size": 8, **more}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes))


def qwen3(**more: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {**_SIZES, "num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
             "head_dim": 8, "norm_topk_prob": True, **more}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


def deepseek(**more: Any) -> nn.Module:
    """DeepSeek-V3: a dense layer, then grouped sigmoid routing with a corrected bias and a shared expert."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {**_SIZES, "num_hidden_layers": 2, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
             "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
             "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1, **more}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.uniform_(buffer, 0.0, 0.2)
    return model


def gpt_oss(**more: Any) -> nn.Module:
    """Experts with biases, a clamp, and gates interleaved with what they gate."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {**_SIZES, "num_hidden_layers": 1, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": 8, **more}
    sizes["layer_types"] = ["full_attention"] * sizes["num_hidden_layers"]
    model = GptOssForCausalLM(GptOssConfig(**sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def ernie(**more: Any) -> nn.Module:
    """Softmax routing chosen with a corrected bias, and shared experts."""
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    sizes = {**_SIZES, "num_hidden_layers": 1, "moe_num_experts": EXPERTS, "moe_k": 2, "moe_num_shared_experts": 1,
             "moe_intermediate_size": 8, "moe_layer_start_index": 0, "moe_layer_end_index": -1, **more}
    return Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**sizes))


def granite(**more: Any) -> nn.Module:
    """The best are chosen by their logits, and weighed by a softmax over these alone."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    sizes = {**_SIZES, "num_hidden_layers": 1, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, **more}
    return GraniteMoeForCausalLM(GraniteMoeConfig(**sizes))


def llama4(**more: Any) -> nn.Module:
    """Every expert computes every token, scaled by how much the router chose it."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {**_SIZES, "num_hidden_layers": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "head_dim": 8,
             "intermediate_size_mlp": 16, "interleave_moe_layer_step": 2, **more}
    return Llama4ForCausalLM(Llama4TextConfig(**sizes))


class Dispatched(nn.Module):
    """Experts by einsum over everything: tokens are dispatched to places, of which an expert has a few in every sequence, and
    combined from there; what comes too late is dropped (Lepikhin et al. 2020). ``whole``: the places are those of the batch."""

    def __init__(self, hidden: int, width: int, capacity: int, whole: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, hidden, width) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, hidden) / 4)
        self.capacity, self.whole = capacity, whole

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden], both ways."""
        x = tokens.flatten(0, 1) if self.whole else tokens
        return self.routed(x, self.gate(x)).view_as(tokens)

    def routed(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[*b, s, h] tokens, with [*b, s, e] logits of the router, to as many."""
        weight, expert = logits.softmax(-1).max(-1)
        chosen = F.one_hot(expert, EXPERTS)
        place = (chosen.cumsum(-2) - 1) * chosen
        kept = (chosen * (place < self.capacity)).unsqueeze(-1) * F.one_hot(place.clamp(max=self.capacity - 1), self.capacity)
        dispatch = kept.to(x.dtype)
        return x + self.answers(x, dispatch, weight[..., None, None] * dispatch)

    def answers(self, x: torch.Tensor, dispatch: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
        """[*b, s, h] tokens, [*b, s, e, c] where they go, and what counts of the answers there."""
        sent = torch.einsum("...sec,...sh->e...ch", dispatch, x)
        made = torch.einsum("e...cw,ewh->e...ch", torch.relu(torch.einsum("e...ch,ehw->e...cw", sent, self.up)), self.down)
        return torch.einsum("...sec,e...ch->...sh", combine, made)


class Penalized(Dispatched):
    """The same with what Switch and ST-MoE add to the loss: E times the sum of each expert's share times its mean probability,
    and the mean square of the logarithm of the router's sum (z-loss)."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """[batch, sequence, hidden], both ways, and what is added to the loss."""
        logits = self.gate(tokens)
        shares = F.one_hot(logits.argmax(-1), EXPERTS).to(logits.dtype).mean((0, 1))
        balance = EXPERTS * (shares * logits.softmax(-1).mean((0, 1))).sum()
        return self.routed(tokens, logits), 0.5 * balance + 0.1 * logits.logsumexp(-1).square().mean()


class Multiplied(Dispatched):
    """The same by matrix products of two and three dims, with weights that are turned."""

    def __init__(self, hidden: int, width: int, capacity: int) -> None:
        super().__init__(hidden, width, capacity)
        self.up = nn.Parameter(self.up.detach().transpose(1, 2).contiguous())

    def answers(self, x: torch.Tensor, dispatch: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
        """[b, s, h] tokens, [b, s, e, c] where they go, and what counts of the answers there."""
        batch, hidden = len(x), x.shape[-1]
        sent = (dispatch.flatten(2).transpose(1, 2) @ x).unflatten(1, (EXPERTS, -1)).transpose(0, 1)
        made = torch.bmm(torch.relu(torch.bmm(sent.reshape(EXPERTS, -1, hidden), self.up.transpose(1, 2))), self.down)
        return combine.flatten(2) @ made.unflatten(1, (batch, -1)).transpose(0, 1).reshape(batch, -1, hidden)


class Gshard(nn.Module):
    """A language model of some ``layer``."""

    def __init__(self, layer: Callable[[], nn.Module], hidden: int = 16, num_hidden_layers: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, hidden), nn.Linear(hidden, VOCAB)
        self.layers = nn.ModuleList(layer() for _ in range(num_hidden_layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """[batch, sequence] ids to the loss."""
        x, added = self.embed(input_ids), []
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, tuple):
                x, penalty = x
                added.append(penalty)
        return {"loss": sum(added, F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100))}


class Looped(nn.Module):
    """Experts in a list, each of which computes all tokens; those that a token did not choose count nothing."""

    def __init__(self, hidden: int = 16, width: int = 8) -> None:
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(VOCAB, hidden), nn.Linear(hidden, EXPERTS), nn.Linear(hidden, VOCAB)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, width), nn.SiLU(), nn.Linear(width, hidden)) for _ in range(EXPERTS)
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """[batch, sequence] ids to the loss."""
        x = self.embed(input_ids)
        best, chosen = self.gate(x).topk(2, dim=-1)
        weights = torch.zeros_like(x[..., :EXPERTS]).scatter(-1, chosen, best.softmax(-1))
        y = x
        for index, expert in enumerate(self.experts):
            y = y + weights[..., index : index + 1] * expert(x)
        return {"loss": F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten(), ignore_index=-100)}


def sentinels(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[t, h] tokens, their experts and weights [t, k], to [t, h]: as experts of ``transformers`` 5.10 to 5.17 do, which ask for
    rows of experts that they do not have whether or not there can be any."""
    from transformers.integrations.moe import _grouped_linear

    numbers, perm = torch.sort(ids.reshape(-1))
    rows, scale = x[perm // ids.shape[-1]], weights.reshape(-1)[perm]
    counts = torch.histc(numbers.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    beyond = (numbers >= self.num_experts).unsqueeze(-1)
    numbers.clamp_(max=self.num_experts - 1)
    rows.masked_fill_(beyond, 0.0)
    for name in ("gate_up_proj", "down_proj"):
        bias = getattr(self, f"{name}_bias")[numbers] if self.has_bias else None
        rows = _grouped_linear(rows, getattr(self, name), ends, bias=bias, is_transposed=self.is_transposed)
        rows = rows.masked_fill(beyond, 0.0)
        rows = self._apply_gate(rows) if name == "gate_up_proj" else rows
    rows = rows * scale.unsqueeze(-1)
    rows.masked_fill_(beyond, 0.0)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0))
    return rows[inverse].view(*ids.shape, -1).sum(dim=1).to(x.dtype)


def argsorted(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, early: bool = False) -> torch.Tensor:
    """The same as of ``transformers`` 5.5, which look the ids, and the tokens of all rows, up in the order of the experts;
    ``early``: as of 5.0, which look up a token for every row before they are sorted."""
    from transformers.integrations.moe import _grouped_linear

    tokens = torch.arange(len(x)).unsqueeze(1).expand(-1, ids.shape[-1]).reshape(-1)
    experts = ids.reshape(-1)
    perm = torch.argsort(experts)
    if early:
        inverse = torch.argsort(perm)
        scale, rows = weights.reshape(-1, 1)[perm], x[tokens][perm]
    else:
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0))
        scale, rows = weights.reshape(-1)[perm].unsqueeze(-1), x[tokens[perm]]
    numbers = experts[perm]
    counts = torch.histc(numbers.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    for name in ("gate_up_proj", "down_proj"):
        bias = getattr(self, f"{name}_bias")[numbers] if self.has_bias else None
        rows = _grouped_linear(rows, getattr(self, name), ends, bias=bias, is_transposed=self.is_transposed)
        rows = self._apply_gate(rows) if name == "gate_up_proj" else rows
    return (rows * scale)[inverse].view(*ids.shape, -1).sum(dim=1).to(x.dtype)


def earlier(model: nn.Module, forward: Callable[..., torch.Tensor]) -> nn.Module:
    """The model with this forward of its experts."""
    for experts in (part for name, part in model.named_modules() if name.endswith(".experts")):
        experts.__class__ = type(type(experts).__name__, (type(experts),), {"forward": forward})
    return model


def skewed(model: nn.Module) -> nn.Module:
    """Every token's first choice is expert 0, its second expert 1; expert 3 gets none."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("embed_tokens.weight", "embed.weight")):
                parameter.abs_().add_(0.1)
            elif name.endswith(("gate.weight", "router.weight")) and parameter.shape[0] == EXPERTS:
                parameter.mul_(0.1).add_(torch.tensor([1.0, 0.5, 0.0, -1.0])[:, None])
    return model


MAKERS: Mapping[str, Callable[..., nn.Module]] = {
    "mixtral": mixtral, "qwen2": qwen2, "qwen3": qwen3, "deepseek": deepseek, "gpt_oss": gpt_oss, "ernie": ernie,
    "granite": granite,
    "mixtral balanced": lambda **more: mixtral(
        **{"num_hidden_layers": 1, "output_router_logits": True, "router_aux_loss_coef": 0.5, **more}
    ),
    "qwen2 masked": lambda **more: qwen2(output_router_logits=True, router_aux_loss_coef=0.5, **more),
    "qwen2 of layers balanced": lambda **more: qwen2(
        num_hidden_layers=4, output_router_logits=True, router_aux_loss_coef=0.5, **more
    ),
    "qwen2 balanced": lambda **more: qwen2(output_router_logits=True, router_aux_loss_coef=0.5, **more),
    "qwen3 balanced": lambda **more: qwen3(output_router_logits=True, router_aux_loss_coef=0.5, **more),
    "mixtral skewed": lambda **more: skewed(mixtral(**more)), "deepseek skewed": lambda **more: skewed(deepseek(**more)),
    "mixtral of four layers": lambda **more: mixtral(num_hidden_layers=4, **more), "loop": Looped,
    "einsum": lambda **more: Gshard(lambda: Dispatched(16, 8, 2), **more),
    "matmul": lambda **more: Gshard(lambda: Multiplied(16, 8, 2), **more),
    "einsum balanced": lambda **more: Gshard(lambda: Penalized(16, 8, 2), **more),
    "einsum of the batch": lambda **more: Gshard(lambda: Dispatched(16, 8, 6, whole=True), **more),
    "mixtral with sentinels": lambda **more: earlier(mixtral(**more), sentinels),
    "gpt_oss with sentinels": lambda **more: earlier(gpt_oss(**more), sentinels),
    "mixtral argsorted": lambda **more: earlier(mixtral(**more), argsorted),
    "gpt_oss argsorted": lambda **more: earlier(gpt_oss(**more), argsorted),
    "deepseek looked up early": lambda **more: earlier(deepseek(**more), partialmethod(argsorted, early=True)),
    "gpt_oss looked up early": lambda **more: earlier(gpt_oss(**more), partialmethod(argsorted, early=True)),
    "einsum of layers": lambda: Gshard(lambda: Dispatched(16, 8, 2), num_hidden_layers=4), "llama4": llama4,
}


def make(name: str, seed: int = 0, **more: Any) -> Case:
    """The named mixture and a batch; some labels count for nothing. Of a masked one rows are of uneven lengths."""
    torch.manual_seed(seed)
    model = MAKERS[name](**more)
    ids = torch.randint(1, VOCAB, (BATCH, LENGTH))
    labels = torch.where(torch.rand(ids.shape) < 0.2, -100, ids)
    mask = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (BATCH, 1))).long()
    return model.train(), {"input_ids": ids, "labels": labels, **({"attention_mask": mask} if "masked" in name else {})}

