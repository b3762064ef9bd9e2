"""The rules on captured models: every operator is known, and data and tensor parallelism are among what the rules allow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from meshwright.compiler.capture.capture import capture
from meshwright.compiler.rules import builtin_rules
from meshwright.ir.graph import Graph
from meshwright.ir.rule import Rules

BATCH = 4
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


class ConvNet(nn.Module):
    """A residual block with batch norm, pooling and group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.norm, self.pool, self.head = nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.norm(F.relu(x + self.branch(x)))
        return F.cross_entropy(self.head(self.pool(x).flatten(1)), y)


def _ids() -> torch.Tensor:
    return torch.randint(4, 60, (BATCH, 8))


def _text(model: nn.Module, **more: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return model, (), {"input_ids": _ids(), "labels": _ids(), **more}


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "llama": lambda: _text(hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, num_key_value_heads=2, **SIZES))),
    "gpt2": lambda: _text(
        hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2)
        )
    ),
    "bert": lambda: _text(
        hf.BertForMaskedLM(hf.BertConfig(vocab_size=64, **SIZES)), attention_mask=torch.ones(BATCH, 8, dtype=torch.int64)
    ),
    "t5": lambda: _text(
        hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=64, d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4,
                decoder_start_token_id=0,
            )
        )
    ),
    "vit": lambda: (
        hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=4, num_labels=5, **SIZES)), (),
        {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.arange(BATCH)},
    ),
    "encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1), (torch.randn(BATCH, 8, 32),), {}
    ),
    "conv": lambda: (ConvNet(), (torch.randn(BATCH, 3, 8, 8), torch.arange(BATCH)), {}),
}


@cache
def captured(name: str) -> tuple[Graph, Rules]:
    model, args, kwargs = MODELS[name]()
    graph = capture(model, args, kwargs)
    return graph, builtin_rules().rules_of(graph)


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_is_known(name: str) -> None:
    graph, rules = captured(name)
    assert sorted({op.target for op in graph.ops if not rules[op.name].known}) == []


@pytest.mark.parametrize("name", MODELS)
def test_the_batch_passes_from_the_inputs_to_the_loss(name: str) -> None:
    """Follow the batch factor from the inputs: wherever it is read it can be split, up to reductions."""
    graph, rules = captured(name)
    split = dict.fromkeys(graph.inputs, 0)
    for op in graph.ops:
        rule = rules[op.name]
        carried = {rule.operands[i][split[value]] for i, value in enumerate(op.inputs) if value in split}
        if not carried:
            continue
        if op.target in ("aten.index.Tensor", "aten.slice.Tensor", "aten.pad.default") and None in carried:
            continue  # integer masks and labels looked up by position: gathered whole
        assert len(carried) == 1, f"{op} reads the batch as {carried}"
        (factor,) = carried
        assert factor is not None, f"{op}: {rule} keeps the batch whole"
        assert factor in rule.splittable, f"{op}: {rule} keeps the batch whole"
        for value, dims in zip(op.outputs, rule.results, strict=True):
            if factor in dims:
                split[value] = dims.index(factor)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vit"])
def test_attention_splits_by_heads_into_its_projections(name: str) -> None:
    """From the query's heads back to the projection's weight, every operator carries the split."""
    graph, rules = captured(name)
    op = next(op for op in graph.ops if op.target == "aten.scaled_dot_product_attention.default")
    factor, value = "h", op.inputs[0]
    for _ in range(20):
        rule = rules[op.name]
        assert factor in rule.splittable
        assert rule.sizes[factor] % 2 == 0
        if op.target == "aten.linear.default":
            break
        position = op.inputs.index(value)
        dim = rule.operands[position].index(factor)
        op = graph.ops[graph.producers[value]]
        found = rules[op.name].results[op.outputs.index(value)][dim]
        assert found is not None
        factor, value = found, op.inputs[0]
    assert op.target == "aten.linear.default"
    assert rules[op.name].operands[1].index(factor) == 0
