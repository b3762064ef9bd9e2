"""Blocks: the layers that repeat, whatever they are called."""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn

from meshwright.compiler.capture.capture import capture
from meshwright.compiler.structure.blocks import find_blocks
from meshwright.ir.graph import Graph

IDS = torch.zeros(2, 8, dtype=torch.int64)


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers under names of choice, each called ``calls`` times."""

    def __init__(self, names: list[str], inners: list[int], calls: int = 1) -> None:
        super().__init__()
        for name, inner in zip(names, inners, strict=True):
            self.add_module(name, Layer(8, inner))
        self.calls = calls
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.children():
            for _ in range(self.calls):
                x = layer(x)
        return x.sum()


def blocks_of(model: nn.Module, *args, **kwargs) -> Graph:
    graph = find_blocks(capture(model, args, kwargs))
    for block in graph.blocks:
        assert all(f"{op.module}.".startswith(f"{block.path}.") for op in graph.ops[block.start:block.stop])
    return graph


def shape_of(graph: Graph) -> list[tuple[int, int, int]]:
    return [(block.kind, block.start, block.stop) for block in graph.blocks]


def llama(layers: int = 3, **changes) -> nn.Module:
    config = hf.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
                            num_attention_heads=4, num_key_value_heads=2, **changes)
    return hf.LlamaForCausalLM(config)


def test_llama_layers_are_one_kind():
    graph = blocks_of(llama(), input_ids=IDS, labels=IDS)
    assert [block.path for block in graph.blocks] == [f"model.layers.{i}" for i in range(3)]
    assert {block.kind for block in graph.blocks} == {0}
    lengths = {block.stop - block.start for block in graph.blocks}
    assert len(lengths) == 1
    assert graph.blocks[1].start == graph.blocks[0].stop


def test_t5_first_layers_make_the_position_bias():
    config = hf.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4, dropout_rate=0.0,
                         decoder_start_token_id=0)
    graph = blocks_of(hf.T5ForConditionalGeneration(config), input_ids=IDS, labels=IDS)
    assert [block.path for block in graph.blocks] == [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(3)]
    assert [block.kind for block in graph.blocks] == [0, 1, 1, 2, 3, 3]


def test_names_do_not_matter():
    inners = [16, 16, 16, 16]
    plain = blocks_of(Stack(["0", "1", "2", "3"], inners), torch.randn(2, 8))
    renamed = blocks_of(Stack(["zeta", "b2", "model", "_x"], inners), torch.randn(2, 8))
    assert shape_of(plain) == shape_of(renamed)
    assert len(plain.blocks) == 4


def test_widths_make_kinds():
    graph = blocks_of(Stack(["a", "b", "c", "d"], [16, 32, 16, 32]), torch.randn(2, 8))
    assert [block.kind for block in graph.blocks] == [0, 1, 0, 1]


def test_no_two_are_alike():
    assert blocks_of(Stack(["a", "b"], [16, 32]), torch.randn(2, 8)).blocks == ()


def test_a_frozen_layer_is_another_kind():
    model = Stack(["a", "b", "c"], [16, 16, 16])
    model.c.up.weight.requires_grad_(False)
    graph = blocks_of(model, torch.randn(2, 8))
    assert [block.kind for block in graph.blocks] == [0, 0, 1]


def test_a_layer_whose_input_has_no_gradient_is_another_kind():
    model = nn.Sequential(*(Layer(8, 16) for _ in range(3)))
    assert [block.kind for block in blocks_of(model, torch.randn(2, 8)).blocks] == [0, 1, 1]


def test_two_layers_on_an_input_without_gradient_are_blocks():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    graph = blocks_of(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 4, 8))
    assert [(block.path, block.kind) for block in graph.blocks] == [("layers.0", 0), ("layers.1", 1)]


def test_a_module_called_twice_is_no_block():
    assert blocks_of(Stack(["a", "b"], [16, 16], calls=2), torch.randn(2, 8)).blocks == ()


def test_single_linears_are_no_blocks():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    assert blocks_of(model, torch.randn(2, 8)).blocks == ()


def test_the_layers_and_not_their_parts():
    pair = [nn.Sequential(Layer(8, 16), Layer(8, 16)) for _ in range(2)]
    graph = blocks_of(nn.Sequential(nn.Linear(8, 8), *pair, nn.Linear(8, 8)), torch.randn(2, 8))
    assert [block.path for block in graph.blocks] == ["1", "2"]
    assert [block.kind for block in graph.blocks] == [0, 0]


def test_a_weight_turned_in_any_spelling_is_one() -> None:
    """``x @ w.T`` reads a weight as ``nn.Linear`` does."""

    class Turned(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(self.norm(x) @ self.up.weight.T)
            return x + hidden @ self.down.weight.permute(1, 0)

    model = Stack(["a", "b"], [16, 16])
    model.a, model.b = Turned(8, 16), Turned(8, 16)
    graph = find_blocks(capture(model, (torch.randn(2, 8),), {}))
    assert [block.path for block in graph.blocks] == ["a", "b"]
    assert len({block.kind for block in graph.blocks}) == 1
