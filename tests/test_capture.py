"""Capture: the graph computes what the module computes, in the normal form that the rules are written for."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from meshwright.compiler.capture import capture
from meshwright.errors import CaptureError, InputError
from meshwright.graph import Graph
from meshwright.interpret import run
from meshwright.signature import bind, rebuild_output


def equal(model: nn.Module, args=(), kwargs=None, **options) -> Graph:
    """Capture, run the graph on the model's own tensors; loss, outputs, gradients and buffers must equal the model's."""
    kwargs = kwargs or {}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    graph = capture(model, args, kwargs, **options)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    graph.verify()
    ours = copy.deepcopy(model)
    model.train(options.get("training", True))
    output = model(*args, **kwargs)
    if "loss_fn" in options:
        output = options["loss_fn"](output, *options["targets"])

    named = dict(ours.named_parameters(remove_duplicate=False)) | dict(ours.named_buffers(remove_duplicate=False))
    env = {param.value: named[param.fqn] for param in graph.params if param.fqn in named}
    env |= zip(graph.inputs, bind(graph.signature, args, kwargs, options.get("targets", ())), strict=True)
    values = run(graph, env)
    result = rebuild_output(graph.output_tree, graph.signature["output"], values)
    compare(result, output)

    loss = values[graph.loss] if graph.loss else sum_of(result)
    expected = sum_of(output) if graph.loss is None else output if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    expected.backward()
    for (name, mine), theirs in zip(ours.named_parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    mutated = {old: values[new] for old, new in graph.mutations}
    buffers = dict(model.named_buffers())
    for param in graph.params:
        if param.buffer and param.fqn in buffers:
            torch.testing.assert_close(mutated.get(param.value, env[param.value]), buffers[param.fqn])
    return graph


def tensors_of(tree) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def sum_of(tree) -> torch.Tensor:
    return sum(tensor.float().square().sum() for tensor in tensors_of(tree) if tensor.is_floating_point())


def compare(result, expected) -> None:
    mine, theirs = tensors_of(result), tensors_of(expected)
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def targets(graph: Graph) -> Counter[str]:
    return Counter(op.target for op in graph.ops)


def ids(batch: int, length: int, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def some_labels(batch: int, length: int) -> torch.Tensor:
    labels = ids(batch, length).clone()
    labels[0, : length // 2] = -100
    return labels


SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**changes) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, "num_key_value_heads": 2, **changes}))


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0.0,
                                            embd_pdrop=0.0, attn_pdrop=0.0))


class TestModels:
    def test_llama(self):
        graph = equal(llama(), kwargs={"input_ids": ids(2, 8), "labels": some_labels(2, 8), "use_cache": False})
        attention = [op for op in graph.ops if "attention" in op.target]
        assert len(attention) == 2
        for op in attention:
            assert op.args[3] is None
            assert op.args[5] is True
            assert dict(op.kwargs)["enable_gqa"] is True
            assert graph.values[op.args[1].name].shape == (2, 2, 8, 4)
        loss = next(op for op in graph.ops if op.target == "mw.cross_entropy")
        assert graph.values[loss.args[0].name].shape == (2, 8, 64)
        assert not {"aten.view.default", "aten.expand.default", "aten.clone.default"} & set(targets(graph))

    def test_gpt2_ties_weights_and_keeps_linears_nd(self):
        graph = equal(gpt2(), kwargs={"input_ids": ids(2, 8), "labels": ids(2, 8)})
        assert {param.fqns for param in graph.params} >= {("transformer.wte.weight", "lm_head.weight")}
        linears = [op for op in graph.ops if op.target == "aten.linear.default"]
        assert len(linears) == 9
        assert all(len(graph.values[op.args[0].name].shape) == 3 for op in linears)
        assert "aten.addmm.default" not in targets(graph)

    def test_mlp_with_a_loss_function(self):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        graph = equal(model, (torch.randn(6, 8),), loss_fn=F.mse_loss, targets=(torch.randn(6, 4),))
        assert targets(graph) == {"aten.linear.default": 2, "aten.relu.default": 1, "aten.mse_loss.default": 1}
        assert [op.module for op in graph.ops] == ["0", "1", "2", ""]
