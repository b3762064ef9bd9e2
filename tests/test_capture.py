"""Capture: the graph computes what the module computes, in the normal form that the rules are written for."""

from __future__ import annotations

import copy
import json
from collections import Counter, OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from meshwright.compiler.capture.capture import capture
from meshwright.compiler.capture.normalize import SYNONYMS
from meshwright.compiler.rules import default_rules
from meshwright.errors import CaptureError, InputError
from meshwright.ir.declared.draws import draws
from meshwright.ir.graph import Graph, refs
from meshwright.ir.reading.graphs import graph_from_dict
from meshwright.ir.serialize import graph_digest, graph_to_dict
from meshwright.ir.signature import bind, rebuild_output
from meshwright.runtime.interpret import run


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
        output = options["loss_fn"](output, *options.get("targets", ()))

    named = dict(ours.named_parameters(remove_duplicate=False)) | dict(ours.named_buffers(remove_duplicate=False))
    env = {param.value: named[param.fqn] for param in graph.params if param.fqn in named}
    env |= zip(graph.inputs, bind(graph.signature, args, kwargs, options.get("targets", ())), strict=True)
    values = run(graph, env)
    result = rebuild_output(graph.output_tree, graph.signature["output"], values, graph.classes)
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
        assert len(linears) == 7
        assert all(len(graph.values[op.args[0].name].shape) == 3 for op in linears)
        fused = [op for op in graph.ops if op.target == "mw.fused_linear"]
        assert [op.args[3:] for op in fused] == [(3, True)] * 2
        assert {graph.values[name].shape for op in fused for name in op.outputs} == {(2, 8, 16)}
        assert "aten.addmm.default" not in targets(graph)

    def test_mlp_with_a_loss_function(self):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        graph = equal(model, (torch.randn(6, 8),), loss_fn=F.mse_loss, targets=(torch.randn(6, 4),))
        assert targets(graph) == {
            "aten.linear.default": 2, "aten.relu.default": 1, "aten.mse_loss.default": 1, "aten.mean.default": 1,
        }
        assert [op.module for op in graph.ops] == ["0", "1", "2", "", ""]

    def test_bert(self):
        config = hf.BertConfig(**SMALL, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        mask = torch.ones(2, 8, dtype=torch.int64)
        mask[1, 5:] = 0
        kwargs = {"input_ids": ids(2, 8), "attention_mask": mask, "labels": some_labels(2, 8)}
        graph = equal(hf.BertForMaskedLM(config), kwargs=kwargs)
        assert targets(graph)["mw.cross_entropy"] == 1
        assert all(op.args[3] is not None for op in graph.ops if "attention" in op.target)

    def test_bert_without_a_mask_attends_everywhere(self):
        config = hf.BertConfig(**SMALL, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        kwargs = {"input_ids": ids(4, 8), "labels": torch.tensor([0, 1, 1, 0])}
        graph = equal(hf.BertForSequenceClassification(config), kwargs=kwargs)
        attention = [op for op in graph.ops if "attention" in op.target]
        assert [op.args[3:6] for op in attention] == [(None, 0.0, False)] * 2

    def test_t5(self):
        config = hf.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.0,
                             decoder_start_token_id=0)
        graph = equal(hf.T5ForConditionalGeneration(config), kwargs={"input_ids": ids(2, 8), "labels": some_labels(2, 6)})
        shared = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
        assert any(shared <= set(param.fqns) for param in graph.params)

    def test_vit(self):
        config = hf.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, image_size=8,
                              patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        kwargs = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
        assert targets(equal(hf.ViTForImageClassification(config), kwargs=kwargs))["mw.cross_entropy"] == 1

    @pytest.mark.parametrize("batch_first", [True, False])
    def test_transformer_encoder(self, batch_first):
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=batch_first)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        graph = equal(model, (torch.randn(2, 8, 16),), loss_fn=lambda y: y.square().mean())
        linears = [op for op in graph.ops if op.target in ("aten.linear.default", "mw.fused_linear")]
        assert {len(graph.values[op.args[0].name].shape) for op in linears} == {3}
        assert [op.args[3:] for op in linears if op.target == "mw.fused_linear"] == [(3, False)] * 2
        queries = [graph.ops[graph.producers[op.args[0].name]] for op in graph.ops if "attention" in op.target]
        split = [graph.ops[graph.producers[op.args[0].name]] for op in queries]
        assert [op.target for op in queries + split] == ["aten.permute.default"] * 2 + ["aten.reshape.default"] * 2
        assert all(op.args[1][-2:] == (4, 4) for op in split)

    def test_dropout_stays_an_operator(self):
        graph = capture(llama(attention_dropout=0.1), (), {"input_ids": ids(2, 8), "labels": ids(2, 8)})
        assert {op.args[4] for op in graph.ops if "attention" in op.target} == {0.1}
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        assert targets(capture(model, (torch.randn(2, 4),), {}))["aten.dropout.default"] == 1
        assert targets(capture(model, (torch.randn(2, 4),), {}, training=False)) == {"aten.linear.default": 1}

    def test_a_cache_is_no_output(self):
        graph = equal(llama(), kwargs={"input_ids": ids(2, 8), "labels": ids(2, 8)})
        assert graph.output_tree["past_key_values"] is None
        assert "aten.cat.default" in targets(graph)
        assert len(graph.params) == len(list(llama().parameters())) + 2


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4, affine=False, track_running_stats=False)
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        x = self.act(self.norm2(self.conv2(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels, label_smoothing=0.1)


class MaskedMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: float = 2.0) -> dict[str, torch.Tensor]:
        error = self.linear(x).square().mean(-1) * scale
        return {"loss": (error * mask).sum() / mask.sum(), "error": error}


class Odd(nn.Module):
    """An unused parameter, a tensor used twice, a mutated buffer read after the change, no_grad, views written to, literals,
    a plain tensor attribute, multiple outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 4), nn.Parameter(torch.ones(3))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.plain = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], int]:
        h = self.linear(x) * self.scale
        with torch.no_grad():
            frozen = self.linear.weight * 2
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        y = h * h + self.average + frozen.sum() + h.detach()
        z = y + torch.tensor([1.0, 2.0, 3.0, 4.0]) * self.plain
        z[:, 0] = 0
        z[:, 1] = h[0, 1]
        z[1:, 2:] = y[:1, :2].double()
        left, right = z.chunk(2, -1)
        return left.reshape(-1), z.view(-1), [right, z.max(-1).values], 3


class TestConstructs:
    def test_batch_norm_statistics_are_mutations(self):
        graph = equal(ConvNet(), (torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 2, 4])))
        assert targets(graph)["mw.batch_norm"] == 2
        assert len(graph.mutations) == 3
        assert graph.loss is not None

    def test_batch_norm_in_evaluation(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        graph = equal(model, (torch.randn(3, 4),), training=False)
        assert targets(graph) == {"aten.linear.default": 1, "aten.batch_norm.default": 1}
        assert graph.mutations == ()

    def test_functional_batch_norm_mutates_too(self):
        class Norm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))
                self.register_buffer("mean", torch.zeros(4))
                self.register_buffer("var", torch.ones(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.batch_norm(x, self.mean, self.var, self.weight, training=True)

        assert len(equal(Norm(), (torch.randn(3, 4),)).mutations) == 2

    def test_masked_mean(self):
        mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
        assert equal(MaskedMean(), (torch.randn(2, 3, 4), mask)).loss is not None

    def test_odd(self):
        model = Odd()
        graph = equal(model, (torch.randn(3, 4),))
        fqns = {param.fqn: param for param in graph.params}
        assert fqns["unused"].trainable
        assert not fqns["scale"].persistent
        assert fqns["average"].persistent
        assert not fqns["plain"].persistent
        assert graph.constants[fqns["plain"].value] is model.plain
        assert len(graph.mutations) == 1
        frozen = next(op for op in graph.ops if op.target == "aten.mul.Tensor" and op.args[1] == 2)
        assert not graph.values[frozen.outputs[0]].differentiable

    def test_the_same_tensor_twice_is_two_inputs(self):
        tokens = ids(2, 8)
        graph = capture(gpt2(), (), {"input_ids": tokens, "labels": tokens})
        assert graph.inputs == ("input_ids", "labels")
        embedding = next(op for op in graph.ops if op.target == "aten.embedding.default")
        assert embedding.args[1].name == "input_ids"

    def test_a_frozen_parameter_takes_no_gradient(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        graph = equal(model, (torch.randn(2, 4),))
        first, second = graph.ops
        assert not graph.values[first.outputs[0]].differentiable
        assert graph.values[second.outputs[0]].differentiable
        assert {param.fqn for param in graph.params if param.trainable} == {"1.weight", "1.bias"}

    def test_the_mode_of_sub_modules_is_kept(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.25))
        model[1].eval()
        (dropout,) = [op for op in capture(model, (torch.randn(2, 4),), {}).ops if op.target == "aten.dropout.default"]
        assert dropout.args[1] == 0.25


class Projections(nn.Module):
    """One linear for several projections, and what reads its result."""

    def __init__(self, read, width: int = 24, weight: str = "linear") -> None:
        super().__init__()
        self.inside, self.read, self.kind = nn.Linear(6, width), read, weight
        self.turned = nn.Parameter(torch.randn(6, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "turned":
            return self.read(torch.addmm(self.inside.bias, x.flatten(0, 1), self.turned).unflatten(0, x.shape[:2]))
        if self.kind == "twice":
            return self.read(self.inside(x)) + self.inside.weight.sum()
        if self.kind == "computed":
            return self.read(F.linear(x, self.inside.weight * 2))
        return self.read(self.inside(x))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


PROJECTIONS = {
    "split": (3, lambda y: attend(*y.split(8, -1))),
    "chunk": (2, lambda y: torch.mul(*y.chunk(2, -1))),
    "slices": (2, lambda y: F.silu(y[..., :12]) * y[..., 12:]),
    "unused": (3, lambda y: y.split(8, -1)[1]),
    "gate": (2, lambda y: F.glu(y)),
    "unbind": (3, lambda y: attend(*y.view(2, 5, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0))),
    "select": (3, lambda y: (lambda z: attend(z[:, :, 0], z[:, :, 2], z[:, :, 1]))(y.view(2, 5, 3, 8))),
    "squeezed": (3, lambda y: attend(*y.unflatten(-1, (3, 8)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous())),
    "negative": (2, lambda y: y.view(2, 5, 2, 12)[:, :, -1]),
}


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("weight", ["linear", "turned"])
def test_fused_projections(name, weight):
    parts, read = PROJECTIONS[name]
    graph = equal(Projections(read, weight=weight).double(), (torch.randn(2, 5, 6, dtype=torch.float64),))
    (op,) = [op for op in graph.ops if op.target == "mw.fused_linear"]
    assert op.args[3:] == (parts, weight == "turned")
    assert len(op.outputs) == parts
    assert not {"aten.linear.default", "aten.split.Tensor", "aten.select.int", "aten.unbind.int"} & set(targets(graph))


@pytest.mark.parametrize(("read", "weight"), [
    (lambda y: torch.cat([part * 2 for part in y.split([12, 4, 8], -1)], -1), "linear"),
    (lambda y: y.split(8, -1)[0] + y.sum(), "linear"),
    (lambda y: y[..., 4:12] * y[..., 12:20], "linear"),
    (lambda y: y.view(2, 5, 4, 3, 2).select(3, 0), "linear"),
    (lambda y: y.view(2, 5, 3, 8).flip(2).select(2, 0), "linear"),
    (lambda y: torch.mul(*y.chunk(2, -1)), "twice"),
    (lambda y: torch.mul(*y.chunk(2, -1)), "computed"),
    (lambda y: torch.mul(*y.chunk(2, 0)), "linear"),
], ids=["unequal", "read whole too", "shifted", "interleaved", "flipped", "two readers", "computed weight", "of the batch"])
def test_other_projections_stay(read, weight):
    graph = equal(Projections(read, weight=weight).double(), (torch.randn(2, 5, 6, dtype=torch.float64),))
    assert targets(graph)["aten.linear.default"] == 1


class Losses(nn.Module):
    def __init__(self, loss) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(4, 5), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(x), labels)


@pytest.mark.parametrize("loss", [
    lambda y, t: F.cross_entropy(y.view(-1, 5), t.view(-1)),
    lambda y, t: F.cross_entropy(y.transpose(1, 2), t, reduction="sum"),
    lambda y, t: F.cross_entropy(y.permute(0, 2, 1), t.clamp(0), ignore_index=2),
    lambda y, t: F.cross_entropy(y[:, :-1].reshape(-1, 5), t[:, 1:].reshape(-1), label_smoothing=0.2),
    lambda y, t: F.nll_loss(F.log_softmax(y.flatten(0, 1), -1), t.flatten()),
    lambda y, t: F.cross_entropy(y[:, 0], t[:, 0]),
], ids=["flattened", "transposed", "permuted", "shifted", "nll", "plain"])
def test_cross_entropy(loss):
    labels = torch.tensor([[0, 1, 2], [-100, 4, 2]])
    graph = equal(Losses(loss), (torch.randn(2, 3, 4), labels))
    (op,) = [op for op in graph.ops if op.target == "mw.cross_entropy"]
    logits, classes = (graph.values[ref.name].shape for ref in op.args[:2])
    assert logits == (*classes, 5)
    assert not {"aten.reshape.default", "aten.transpose.int", "aten.permute.default"} & set(targets(graph))


@pytest.mark.parametrize("options", [
    {"reduction": "none"}, {"weight": torch.rand(5)}, {"weight": torch.rand(5), "reduction": "sum"},
    {"weight": torch.rand(5), "ignore_index": 3, "label_smoothing": 0.1},
], ids=["none", "weighted", "weighted sum", "smoothed"])
def test_other_cross_entropies_stay_losses_of_labels(options):
    model = Losses(lambda y, t: F.cross_entropy(y.transpose(1, 2), t, **options).mean())
    graph = equal(model, (torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [3, 4, 2]])))
    (op,) = [op for op in graph.ops if "cross_entropy" in op.target]
    assert graph.values[op.outputs[0]].shape == (2, 3)


def test_a_cross_entropy_of_probabilities():
    model = Losses(lambda y, t: F.cross_entropy(y.transpose(1, 2), t.transpose(1, 2).softmax(1), label_smoothing=0.1))
    graph = equal(model, (torch.randn(2, 3, 4), torch.randn(2, 3, 5)))
    (op,) = [op for op in graph.ops if "cross_entropy" in op.target]
    assert graph.values[op.outputs[0]].shape == (2, 3)


@pytest.mark.parametrize("pick", [
    lambda y: y[torch.arange(2), torch.tensor([2, -1])], lambda y: y[torch.arange(2)[:, None], torch.tensor([[0, 2], [1, 1]])],
    lambda y: y[..., 0][torch.arange(2), y.argmax(-1)[:, 0].int() % 3],
], ids=["one", "some", "computed"])
def test_places_of_every_sample_are_gathered(pick):
    graph = equal(Losses(lambda y, t: (pick(y) * 1.0).square().sum()), (torch.randn(2, 3, 4), torch.zeros(2)))
    assert "aten.gather.default" in targets(graph)
    assert "aten.index.Tensor" not in targets(graph)


@pytest.mark.parametrize("pick", [
    lambda y: y[torch.arange(2), torch.arange(3)[:, None]], lambda y: y[torch.arange(2).flip(0), torch.tensor([2, 1])],
    lambda y: y.transpose(0, 1)[torch.arange(2), torch.tensor([1, 1])],
], ids=["crossed", "turned", "not all"])
def test_other_look_ups_stay(pick):
    model = Losses(lambda y, t: pick(y).square().sum())
    assert "aten.index.Tensor" in targets(equal(model, (torch.randn(2, 3, 4), torch.zeros(2))))


def test_what_lends_its_shape_is_not_read():
    model = Losses(lambda y, t: (y * torch.ones_like(y) + y.new_full((5,), 2.0) + torch.full_like(t, 3)).sum())
    graph = equal(model, (torch.randn(2, 3, 4), torch.zeros(2, 3, 1)))
    assert targets(graph)["aten.full.default"] == 3


@pytest.mark.parametrize("loss", [
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.soft_margin_loss, lambda y, t: F.huber_loss(y, t, delta=0.5),
    lambda y, t: F.mse_loss(y, t, reduction="sum"),
    lambda y, t: F.binary_cross_entropy(y.sigmoid(), t.sigmoid(), weight=t.abs()),
    lambda y, t: F.binary_cross_entropy_with_logits(y, t.sigmoid(), pos_weight=t[0, 0].abs()),
    lambda y, t: F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    lambda y, t: F.kl_div(y.log_softmax(-1), t.log_softmax(-1), reduction="sum", log_target=True),
], ids=["mse", "l1", "smooth l1", "soft margin", "huber", "mse sum", "bce", "bce logits", "kl batch mean", "kl log sum"])
def test_elementwise_losses_are_reduced_apart(loss):
    graph = equal(Losses(loss), (torch.randn(2, 3, 4), torch.randn(2, 3, 5)))
    (reduction,) = [op for op in graph.ops if op.target in ("aten.mean.default", "aten.sum.default")]
    each = graph.ops[graph.producers[reduction.args[0].name]]
    assert graph.values[each.outputs[0]].shape == (2, 3, 5)


class Heads(nn.Module):
    """nn.MultiheadAttention that returns its weights: batch and heads are one dim of its bmm."""

    def __init__(self, dropout: float = 0.0, **options) -> None:
        super().__init__()
        self.attention, self.options = nn.MultiheadAttention(16, 4, dropout=dropout, batch_first=True), options

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attention(x, x, x, key_padding_mask=padding, **self.options)


@pytest.mark.parametrize(("options", "padded"), [
    ({}, False), ({"average_attn_weights": False}, False), ({}, True), ({"attn_mask": torch.ones(6, 6).tril() == 0}, False),
], ids=["weights", "weights by head", "padded", "masked"])
def test_batch_products_keep_batch_and_heads_apart(options, padded):
    padding = (torch.arange(6) > torch.tensor([[5], [3]]),) if padded else ()
    graph = equal(Heads(**options), (torch.randn(2, 6, 16), *padding))
    products = [op for op in graph.ops if op.target == "aten.matmul.default"]
    assert [graph.values[op.outputs[0]].shape for op in products] == [(2, 4, 6, 6), (2, 4, 6, 4)]
    assert not {"aten.bmm.default", "aten.baddbmm.default"} & set(targets(graph))
    assert not [op for op in graph.ops if any(graph.values[name].shape[:1] == (8,) for name in op.outputs)]


class Alibi(nn.Module):
    """Attention with a bias added by ``baddbmm``, as BLOOM's; ``again``: between the products batch and heads are taken apart
    and merged once more, as XGLM's are."""

    def __init__(self, again: bool = False, **scales: float) -> None:
        super().__init__()
        self.qkv, self.again, self.scales = nn.Linear(16, 48), again, scales
        self.bias = nn.Parameter(torch.arange(8.0)[:, None, None], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (part.reshape(b, s, 4, -1).transpose(1, 2).reshape(b * 4, s, -1) for part in self.qkv(x).chunk(3, -1))
        scores = torch.baddbmm(self.bias.expand(-1, 1, s), q, k.transpose(1, 2), **self.scales)
        if self.again:
            scores = torch.max(scores.view(b, 4, s, s), torch.tensor(-0.5)).view(b * 4, s, s)
        return torch.bmm(scores.softmax(-1), v).view(b, 4, s, -1).transpose(1, 2).reshape(b, s, h)


@pytest.mark.parametrize(("again", "scales"), [
    (False, {}), (False, {"alpha": 0.3, "beta": 0.5}), (False, {"alpha": 0.3, "beta": 0}), (True, {"alpha": 0.3}),
])
def test_a_bias_added_to_a_batch_product_keeps_them_apart(again, scales):
    graph = equal(Alibi(again, **scales), (torch.randn(2, 6, 16),))
    products = [op for op in graph.ops if op.target == "aten.matmul.default"]
    assert [graph.values[op.outputs[0]].shape for op in products] == [(2, 4, 6, 6), (2, 4, 6, 4)]
    computed = [op for op in graph.ops if any(graph.values[name].differentiable for name in op.outputs)]
    assert not [op for op in computed if any(graph.values[name].shape[:1] == (8,) for name in op.outputs)]


def test_what_a_product_is_added_to_no_times_has_a_gradient_of_zeros():
    model = Alibi(alpha=0.3, beta=0)
    model.bias.requires_grad_()
    equal(model, (torch.randn(2, 6, 16),))
    assert torch.equal(model.bias.grad, torch.zeros(8, 1, 1))


class Parallel(nn.Module):
    """A stream and two branches: in one order or another, ``seen``: the first sum is read by others too."""

    def __init__(self, order: str, seen: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.order, self.seen = nn.Linear(8, 8), nn.Linear(8, 8), order, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.tanh()
        a, b = self.a(x), self.b(x)
        first = {"xab": x + a, "axb": a + x, "abx": a + b, "1ab": a + 1}[self.order]
        return (first + (x if self.order == "abx" else b)) * (first.exp() if self.seen else 1)


@pytest.mark.parametrize(("order", "seen", "together"), [
    ("xab", False, True), ("axb", False, True), ("abx", False, True), ("xab", True, False), ("1ab", False, False),
])
def test_products_are_added_before_the_stream(order, seen, together):
    graph = equal(Parallel(order, seen), (torch.randn(2, 3, 8),))
    sums = [op for op in graph.ops if op.target == "aten.add.Tensor"]
    made = [[graph.ops[graph.producers[name]].target for name in op.inputs] for op in sums]
    assert len(made) == 2
    assert (["aten.linear.default"] * 2 in made) == together


def test_dropout_of_attention_weights_is_drawn_once():
    graph = capture(Heads(dropout=0.5), (torch.randn(2, 6, 16),), {})
    (dropout,) = [op for op in graph.ops if op.target == "aten.dropout.default"]
    assert graph.values[dropout.outputs[0]].shape == (2, 4, 6, 6)


def test_a_batch_that_was_one_dim_stays():
    class Batch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.bmm(self.inside(x), y) + torch.bmm(y, self.inside(x)).transpose(1, 2)

    graph = equal(Batch(), (torch.randn(3, 4, 4), torch.randn(3, 4, 4)))
    assert targets(graph)["aten.bmm.default"] == 2


class Attention(nn.Module):
    """Attention on the input's own projections under a mask made from literals by ``mask(s)``."""

    def __init__(self, mask, heads: int = 1) -> None:
        super().__init__()
        self.q, self.k, self.mask, self.heads = nn.Linear(4, 4 * heads), nn.Linear(4, 4), mask, heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, 4).transpose(1, 2)
        k = self.k(x)[:, None].expand(batch, self.heads, length, 4)
        return F.scaled_dot_product_attention(q, k, k, attn_mask=self.mask(length))


def attention_of(mask, heads: int = 1) -> tuple:
    graph = equal(Attention(mask, heads), (torch.randn(2, 6, 4),))
    (op,) = [op for op in graph.ops if "attention" in op.target]
    return op.args[3] is None, op.args[5], dict(op.kwargs)


@pytest.mark.parametrize(("mask", "expected"), [
    (lambda s: torch.ones(s, s, dtype=torch.bool).tril(), (True, True)),
    (lambda s: torch.full((s, s), float("-inf")).triu(1), (True, True)),
    (lambda s: torch.where(torch.arange(s)[:, None] >= torch.arange(s), 0.0, torch.finfo(torch.float32).min), (True, True)),
    (lambda s: torch.zeros(2, 1, s, s), (True, False)),
    (lambda s: torch.arange(s)[None] >= 0, (True, False)),
    (lambda s: torch.full((s, s), -1.0).triu(1), (False, False)),
], ids=["tril", "minus-inf", "finfo-min", "zeros", "all-true", "bias"])
def test_masks(mask, expected):
    assert attention_of(mask)[:2] == expected


@pytest.mark.parametrize(("below", "above"), [(6, 1), (2, 0)])
def test_a_band_of_a_mask_is_a_window(below, above):
    graph = equal(Attention(lambda s: torch.ones(s, s, dtype=torch.bool).tril(above).triu(-below)), (torch.randn(2, 6, 4),))
    (op,) = [op for op in graph.ops if op.target == "mw.window"]
    assert op.args[4:6] == (min(below, 5), above)
    assert "aten.scaled_dot_product_attention.default" not in targets(graph)


def test_a_mask_is_not_expanded_over_the_batch():
    window = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)
    graph = equal(Attention(lambda s: window.expand(2, 1, s, s)), (torch.randn(2, 6, 4),))
    (op,) = [op for op in graph.ops if "attention" in op.target]
    assert graph.values[op.args[3].name].shape == (6, 6)


class Biased(nn.Module):
    """Attention with a learned bias where ``allowed(s)``, over a batch of masks."""

    def __init__(self, allowed) -> None:
        super().__init__()
        self.bias, self.q, self.allowed = nn.Parameter(torch.randn(1, 2, 6, 6)), nn.Linear(4, 4), allowed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        mask = torch.where(self.allowed(x.shape[-2]).expand(x.shape[0], 1, 6, 6), self.bias, float("-inf"))
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@pytest.mark.parametrize(("allowed", "wheres"), [
    (lambda s: torch.ones(s, s, dtype=torch.bool), 0),
    (lambda s: torch.ones(s, s, dtype=torch.bool).tril(), 1),
], ids=["everywhere", "causal"])
def test_a_biased_mask_is_made_once_for_the_batch(allowed, wheres):
    graph = equal(Biased(allowed), (torch.randn(3, 2, 6, 4),))
    (op,) = [op for op in graph.ops if "attention" in op.target]
    assert graph.values[op.args[3].name].shape == (1, 2, 6, 6)
    assert targets(graph)["aten.where.ScalarOther"] + targets(graph)["aten.where.self"] == wheres


def test_one_kv_head_is_not_expanded():
    assert attention_of(lambda s: None, heads=3) == (True, False, {"enable_gqa": True})


def test_a_long_causal_mask_is_never_made():
    class Long(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            batch, _, length, _ = q.shape
            at = torch.arange(length)
            mask = (at[None, None, :, None] >= at[None, None, None, :]).expand(batch, 1, length, length)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask & torch.ones(1, dtype=torch.bool))

    for length in (8192, 4097):
        (op,) = capture(Long(), (torch.empty(16, 4, length, 8, device="meta"),), {}).ops
        assert op.args[3:] == (None, 0.0, True)


class TestForm:
    def test_meta_weights_give_the_same_graph(self):
        kwargs = {"input_ids": ids(2, 8), "labels": ids(2, 8)}
        with torch.device("meta"):
            model = llama()
        meta = capture(model, (), {name: tensor.to("meta") for name, tensor in kwargs.items()})
        assert str(meta) == str(capture(llama(), (), kwargs))
        assert {value.device.type for value in model.parameters()} == {"meta"}

    def test_bf16_parameters(self):
        graph = capture(llama(), (), {"input_ids": ids(2, 8), "labels": ids(2, 8)}, compute_dtype=torch.bfloat16)
        assert {graph.values[param.value].dtype for param in graph.params if not param.buffer} == {torch.bfloat16}
        assert {graph.values[op.outputs[0]].dtype for op in graph.ops if op.target == "aten.linear.default"} == {torch.bfloat16}
        assert graph.values[graph.loss].dtype == torch.float32

    def test_bf16_arguments_are_cast_in_the_graph(self):
        model = nn.Sequential(nn.Linear(4, 4))
        graph = capture(model, (torch.randn(2, 4),), {}, compute_dtype=torch.bfloat16)
        assert graph.values[graph.inputs[0]].dtype == torch.float32
        assert [op.target for op in graph.ops] == ["aten._to_copy.default", "aten.linear.default"]

    def test_a_bf16_loss_is_computed_wide_and_cast(self):
        labels = torch.tensor([[0, 1, 2], [-100, 4, 2]])
        model = Losses(lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
        graph = capture(model, (torch.randn(2, 3, 4), labels), {}, compute_dtype=torch.bfloat16)
        assert [op.target for op in graph.ops][-3:] == ["mw.cross_entropy", "aten.div.Tensor", "aten._to_copy.default"]
        assert graph.values[graph.loss].dtype == torch.bfloat16

    def test_renaming_changes_names_only(self):
        class Two(nn.Module):
            def __init__(self, first: str, second: str) -> None:
                super().__init__()
                self.add_module(first, nn.Linear(4, 8))
                self.add_module(second, nn.Linear(8, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                first, second = self.children()
                return second(first(x).relu()).sum()

        def shape(graph: Graph) -> list:
            order = {param.value: i for i, param in enumerate(graph.params)}
            return [(op.target, [order.get(name, name) for name in op.inputs]) for op in graph.ops]

        one, other = (capture(Two(*names), (torch.randn(2, 4),), {}) for names in (("up", "down"), ("zz", "a")))
        assert shape(one) == shape(other)
        assert [op.module for op in other.ops] == ["zz", "", "a", ""]

    def test_every_op_knows_its_module_and_line(self):
        graph = capture(llama(), (), {"input_ids": ids(2, 8), "labels": ids(2, 8)})
        (mlp,) = [op for op in graph.ops if op.target == "aten.silu.default" and ".0." in op.module]
        assert mlp.module == "model.layers.0.mlp.act_fn"
        assert mlp.source.startswith("modeling_llama.py:") or mlp.source.startswith("activations.py:")
        assert all(op.source for op in graph.ops)

    def test_literals_are_resolved(self):
        graph = capture(gpt2(), (), {"input_ids": ids(2, 8), "labels": ids(2, 8)})
        for op in graph.ops:
            assert "device" not in dict(op.kwargs)
            if op.target in ("aten.reshape.default", "aten.expand.default"):
                assert op.args[1] == graph.values[op.outputs[0]].shape


class TestErrors:
    def test_arguments_are_checked_before_the_export(self):
        model = llama()
        with pytest.raises(InputError, match="unexpected argument 'lables'"):
            capture(MaskedMean(), (torch.randn(2, 3, 4), torch.ones(2, 3)), {"lables": ids(2, 8)})
        with pytest.raises(InputError, match=r"argument 'mask' of forward.*is missing"):
            capture(MaskedMean(), (torch.randn(2, 3, 4),), {})
        with pytest.raises(InputError, match="3 positional arguments"):
            capture(nn.Linear(4, 4), (torch.randn(2, 4), 1, 2), {})
        with pytest.raises(InputError, match="'past_key_values' is a DynamicCache"):
            capture(model, (), {"input_ids": ids(2, 8), "past_key_values": hf.DynamicCache()})

    def test_the_module_and_line_are_named(self):
        class Branch(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if x.sum() > 0:
                    return x
                return -x

        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Branch()))
        with pytest.raises(CaptureError, match=r"'1.0'.*at test_capture.py:\d+.*depend") as caught:
            capture(model, (torch.randn(2, 4),), {})
        assert caught.value.module == "1.0"

    def test_a_layer_of_torch_that_takes_a_number_from_a_tensor_is_named(self):
        with pytest.raises(CaptureError, match=r"'1' \(BatchNorm1d\).*momentum=None wants a momentum"):
            capture(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), (torch.randn(2, 4),), {})

    def test_transforms_of_functions_are_named(self):
        class Rows(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.vmap(super().forward)(x)

        class Columns(nn.Linear):  # the transform sees a weight that has no contents of its own
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.vmap(torch.mv, in_dims=(None, 0))(self.weight, x)

        for layer in (Rows, Columns):
            with pytest.raises(CaptureError, match=r"torch\.vmap.*What to do"):
                capture(nn.Sequential(layer(4, 4)), (torch.randn(2, 4),), {})

    def test_operators_that_one_is_made_of_have_names_of_their_own(self):
        """Where another one, which makes several values, has the name that was to be theirs."""
        class Pieces(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = super().forward(x)
                return x.unsafe_chunk(2, 1)[0] * x.unsafe_split(2, 1)[1]

        ops = capture(Pieces(4, 4), (torch.randn(2, 4),), {}).ops
        assert len({op.name for op in ops}) == len(ops)

    def test_shapes_that_do_not_fit(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
        with pytest.raises(CaptureError, match=r"'0'.*shape"):
            capture(model, (torch.randn(2, 3),), {})

    def test_a_shape_that_depends_on_contents(self):
        with pytest.raises(CaptureError, match=r"linalg\.lstsq: .* depends on the contents of a tensor"):
            capture(nn.Linear(4, 4), (torch.randn(4, 4),), {}, loss_fn=lambda y: torch.linalg.lstsq(y, y).residuals.sum())

    @pytest.mark.parametrize(("remedy", "length"), [
        (r"aten\.bincount.*one_hot\(x, n\)", lambda x: torch.bincount(x, minlength=3)),
        (r"aten\.repeat_interleave.*output_size=", lambda x: x.repeat_interleave(x)),
        (r"aten\.nonzero.*nonzero_static", lambda x: x.nonzero()), (r"aten\._unique2.*torch\.where", lambda x: x.unique()),
    ])
    def test_a_length_that_depends_on_contents(self, remedy, length):
        class Some(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * length(x.sum(0).long()).sum()

        with pytest.raises(CaptureError, match=remedy) as caught:
            capture(nn.Sequential(Some(4, 4)), (torch.randn(2, 4),), {})
        assert caught.value.module == "0"

    @pytest.mark.parametrize("counted", [
        lambda ids: torch.zeros(4) + torch.bincount(ids, minlength=4).float(),
        lambda ids: torch.bincount(ids.int(), None, 4) * torch.arange(4),
    ])
    def test_a_bincount_that_is_added_to_as_many_numbers_is_as_long(self, counted):
        class Some(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = super().forward(x)
                return y * counted(y.topk(2).indices.reshape(-1))

        torch.manual_seed(0)
        model, x = Some(4, 4), torch.randn(6, 4)
        graph = capture(model, (x,), {})
        assert not any("bincount" in op.target for op in graph.ops)
        held = {param.value: model.get_parameter(param.fqn) for param in graph.params}
        assert torch.equal(run(graph, {**held, graph.inputs[0]: x})[graph.outputs[0]], model(x))

    @pytest.mark.parametrize("counted", [
        lambda ids: torch.zeros(5) + torch.bincount(ids, minlength=4), lambda ids: torch.bincount(ids, minlength=4)[:4],
        lambda ids: torch.zeros(4) + torch.bincount(ids, weights=ids.float(), minlength=4),
    ])
    def test_a_bincount_that_may_be_longer_is_refused(self, counted):
        class Some(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = super().forward(x)
                return y * counted(y.topk(2).indices.reshape(-1)).sum()

        with pytest.raises(CaptureError, match=r"What to do"):
            capture(Some(4, 4), (torch.randn(6, 4),), {})

    @pytest.mark.parametrize(("left_out", "certain"), [
        (lambda: torch.rand([]) < 0.0, False), (lambda: torch.rand([]) >= 0, True), (lambda: torch.rand(1) > 1, False),
        (lambda: torch.rand([]) < 0.5, None), (lambda: torch.rand([]) <= 0, None), (lambda: torch.rand([]).sub_(1) < 0, None),
        (lambda: torch.rand([]) - 1 < 0, None), (lambda: (torch.rand([]) < 0).logical_not_(), None),
    ])
    def test_a_branch_on_what_is_drawn_is_taken_if_it_is_certain(self, left_out, certain):
        """Layers that are left out with a probability of 0, as a layer drop does."""
        class Some(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x if left_out() else super().forward(x)

        if certain is None:
            with pytest.raises(CaptureError, match="layer drop"):
                capture(Some(4, 4), (torch.randn(6, 4),), {})
        else:
            graph = capture(Some(4, 4), (torch.randn(6, 4),), {})
            assert any(op.target == "aten.linear.default" for op in graph.ops) == (not certain)

    def test_a_branch_on_a_size_that_depends_on_contents_is_told_in_a_line(self, capfd):
        class Some(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                chosen = (x > 0).nonzero()
                return super().forward(x) if chosen.shape[0] > 0 else x

        with pytest.raises(CaptureError, match=r"\(Some\).*branches on.*use torch\.where"):
            capture(nn.Sequential(Some(4, 4)), (torch.randn(2, 4),), {})
        assert capfd.readouterr() == ("", "")  # torch printed the graph so far

    def test_errors_that_stand_behind_each_other_end(self):
        class Again(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                one, other = ValueError("one"), ValueError("the other")
                one.__cause__, other.__cause__ = other, one
                raise one

        with pytest.raises(CaptureError, match=r"\(Again\).*ValueError: one"):
            capture(nn.Sequential(Again(4, 4)), (torch.randn(2, 4),), {})

    def test_a_lazy_module_that_was_never_called(self):
        with pytest.raises(CaptureError, match=r"'1.weight' has no shape yet.*call the model once"):
            capture(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), (torch.randn(2, 4),), {})

    @pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "a\u202eb"])
    def test_names_that_cannot_be_printed(self, name):
        model = nn.Sequential(OrderedDict({name: nn.Linear(4, 4)}))
        with pytest.raises(CaptureError, match=r"cannot be printed.*rename it"):
            capture(model, (torch.randn(2, 4),), {})

    def test_the_loss_must_be_a_scalar(self):
        with pytest.raises(CaptureError, match="loss_fn must return a scalar"):
            capture(nn.Linear(4, 4), (torch.randn(2, 4),), {}, loss_fn=lambda y: y * 2)

    def test_a_closure_over_the_module(self):
        model = nn.Linear(4, 4)
        model.forward = lambda x: F.linear(x, model.weight)
        with pytest.raises(CaptureError, match="'weight' through a reference to the module that is not 'self'"):
            capture(model, (torch.randn(2, 4),), {})

    def test_control_flow_operators_have_no_place(self):
        class Cond(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

        with pytest.raises(CaptureError, match="cond"):
            capture(nn.Sequential(Cond()), (torch.randn(2, 4),), {})


class Moments(nn.Module):
    """Buffers that the forward updates: one kept for the backward, one kept as a view, one that is moved into another."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("keys", torch.randn(6, 4))
        self.register_buffer("old", torch.zeros(6, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.head(x)
        y = (h * self.scale.clone()) @ self.keys.clone().t()
        with torch.no_grad():
            self.old.copy_(self.keys)
            self.keys.copy_(torch.cat([h, self.keys[: -h.shape[0]].clone()]))
            self.scale.mul_(0.9).add_(h.mean(0))
            self.calls += 1
        return y.square().sum()


def test_buffers_that_are_updated_are_read_before():
    graph = equal(Moments(), (torch.randn(2, 4),))
    copies = {op.inputs[0] for op in graph.ops if op.target == "aten.clone.default"}
    assert copies == {"b_scale", "b_keys"}
    assert graph.ops[0].target == graph.ops[1].target == "aten.clone.default"


@pytest.mark.parametrize("same", [
    lambda h: h.float(), lambda h: h.to(h.device, h.dtype).type_as(h), lambda h: F.dropout(h, 0.5, False),
    lambda h: h.view(2, 4), lambda h: h,
], ids=["float", "twice", "dropout", "view", "itself"])
def test_what_a_region_without_gradients_reads_has_its_gradient_outside(same):
    """A conversion that changes nothing returns the tensor itself, also where it is made under ``no_grad``."""
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            with torch.no_grad():
                kept = same(h)
                chosen = self.gate(kept).sigmoid()
            return (self.last(h) * chosen + kept).square().sum()

    graph = equal(Gated(), (torch.randn(2, 4),))
    last = next(op for op in graph.ops if "p_last_weight" in op.inputs)
    assert graph.values[last.inputs[0]].differentiable


@pytest.mark.parametrize("write", [lambda h: h.mul_(2), lambda h: h[:, 0].zero_(), lambda h: h.detach()[0].copy_(h[1])])
def test_what_has_a_gradient_is_not_written_without(write):
    """What it is then has the gradient of what it was; a copy may be written, and so may what is made without gradients."""
    class Written(nn.Module):
        def __init__(self, copied: bool) -> None:
            super().__init__()
            self.first, self.last, self.copied = nn.Linear(4, 4), nn.Linear(4, 4), copied

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            with torch.no_grad():
                held = h.clone() if self.copied else h
                write(held)
            return (self.last(h) * held).square().sum()

    x = torch.randn(2, 4)
    equal(Written(True), (x,))
    with pytest.raises(CaptureError, match=r"test_capture.py.*under torch.no_grad\(\) into a tensor that has a gradient"):
        capture(Written(False), (x,), {})


class Scalars(nn.Module):
    """A loss beside other things, in a container of choice."""

    def __init__(self, pack) -> None:
        super().__init__()
        self.linear, self.pack = nn.Linear(4, 3), pack

    def forward(self, x, labels):
        logits = self.linear(x)
        return self.pack(logits, F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean())


@pytest.mark.parametrize(("pack", "found"), [
    (lambda logits, loss, accuracy: (logits, loss), True),
    (lambda logits, loss, accuracy: [accuracy, loss, logits], True),
    (lambda logits, loss, accuracy: {"total": loss, "accuracy": accuracy}, True),
    (lambda logits, loss, accuracy: {"loss": loss, "other": loss * 2}, True),
    (lambda logits, loss, accuracy: (loss, loss * 2), False),
    (lambda logits, loss, accuracy: (logits, accuracy), False),
    (lambda logits, loss, accuracy: (logits, (loss,)), False),
])
def test_the_loss_is_the_one_scalar_with_a_gradient(pack, found):
    graph = capture(Scalars(pack), (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])), {})
    assert (graph.loss is not None) == found
    if found:
        assert graph.loss == next(ref.name for ref in refs(graph.output_tree)
                                  if graph.values[ref.name].shape == () and graph.values[ref.name].differentiable)


class _Counting(nn.Module):
    """Changes plain values of its own in the forward: ``how`` is given the module and the activations."""

    def __init__(self, how) -> None:
        super().__init__()
        self.inside, self.how = nn.Linear(4, 4), how
        self.calls, self.ready, self.state, self.seen = 0, False, {"step": [0]}, SimpleNamespace(shape=None, loss=None)

    def forward(self, x):
        return self.how(self, self.inside(x)).sum()


def _counts(m, x):
    m.calls += 1
    return x * m.calls


def _counts_within(m, x):
    m.state["step"][0] += 1
    return x if m.state["step"][0] % 100 else x * 2


def _warms_up(m, x):
    m.calls += 1
    return x * 2 if m.calls < 1000 else x


def _starts(m, x):
    first, m.ready = not m.ready, True
    return x * 2 if first else x


def _remembers(m, x):
    m.seen.shape, m.seen.loss, m.ready, m.calls = tuple(x.shape), x, True, m.calls + 1
    return x


@pytest.mark.parametrize(("how", "name"), [(_counts, "calls"), (_counts_within, "state.step.0"), (_starts, "ready"),
                                           (_warms_up, "calls")])
def test_what_a_forward_counts_is_refused_by_name(how, name):
    model = _Counting(how)
    with pytest.raises(CaptureError, match=rf"the forward changes '{name}' of the model.*register_buffer"):
        capture(model, (torch.zeros(2, 4),), {})
    assert (model.calls, model.ready, model.state) == (0, False, {"step": [0]})


def test_what_a_forward_remembers_for_nobody_changes_nothing():
    assert set(targets(capture(_Counting(_remembers), (torch.zeros(2, 4),), {}))) == {"aten.linear.default", "aten.sum.default"}


class _Assigning(nn.Module):
    """Puts tensors in the place of its buffers and attributes: ``how`` is given the module and the activations."""

    def __init__(self, how) -> None:
        super().__init__()
        self.inside, self.how, self.plain = nn.Linear(4, 4), how, torch.zeros(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("other", torch.ones(4))

    def forward(self, x):
        return self.how(self, self.inside(x)).sum()


def _averages(m, x):
    m.mean = m.mean * 0.5 + x.detach().mean(0)
    return x * m.mean


def _swaps(m, x):
    m.mean, m.other = m.other, m.mean
    return x * m.mean


def _logs(m, x):
    m.mean = x.mean(0)
    return x


@pytest.mark.parametrize("how", [_averages, _swaps, _logs])
def test_a_tensor_put_in_a_buffers_place_is_its_new_value(how):
    model, x = _Assigning(how), torch.randn(2, 4)
    graph = capture(model, (x,), {})
    found = run(graph, {**{p.value: model.get_buffer(p.fqn) if p.buffer else model.get_parameter(p.fqn) for p in graph.params
                           if p.fqn != "plain"}, **graph.constants, graph.inputs[0]: x})
    model(x)
    new = dict(graph.mutations)
    for param in graph.params:
        if param.value in new:
            torch.testing.assert_close(found[new[param.value]], getattr(model, param.fqn), msg=param.fqn)
    assert new


def _keeps_its_graph(m, x):
    m.mean = m.mean * 0.5 + x.mean(0)
    return x * m.mean


def _keeps_in_an_attribute(m, x):
    m.plain = m.plain + x.detach().mean(0)
    return x * m.plain


def _grows(m, x):
    m.mean = x.detach()
    return x


@pytest.mark.parametrize(("how", "words"), [
    (_keeps_its_graph, r"reads 'mean'.*\.detach\(\)"), (_keeps_in_an_attribute, "reads 'plain'.*register it as a buffer"),
    (_grows, r"makes buffer 'mean' \(torch.float32\[4\]\) torch.float32\[2, 4\]"),
])
def test_what_is_put_in_a_tensors_place_for_the_next_call_and_cannot_be_kept_is_refused(how, words):
    with pytest.raises(CaptureError, match=words):
        capture(_Assigning(how), (torch.randn(2, 4),), {})


class _Merged(nn.Linear):
    """An adapter that eval() merges into the weight, and train() takes out again."""

    def __init__(self, write) -> None:
        super().__init__(4, 4)
        self.adapter, self.merged, self.write = nn.Parameter(torch.randn(4, 4)), False, write

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.write(self, -1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x):
        return (super().forward(x) + (0 if self.merged else x @ self.adapter.T)).sum()


def _merges_data(m, sign):
    m.weight.data += sign * m.adapter.data


def _merges_by_another(m, sign):
    m.weight = nn.Parameter(m.weight + sign * m.adapter)


@pytest.mark.parametrize(("write", "words"), [
    (_merges_data, r"writes into tensors \(aten.add_"), (_merges_by_another, "puts other tensors"),
])
def test_an_eval_that_changes_weights_is_refused(write, words):
    model, x = _Merged(write), torch.randn(2, 4)
    capture(model, (x,), {})
    with pytest.raises(CaptureError, match=rf"eval\(\) of the model {words}.*in the forward"):
        capture(model, (x,), {}, training=False)
    assert not model.merged


class _Applied(nn.Module):
    """``how`` of the module and its input."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how = how
        self.wide, self.row, self.one = (nn.Parameter(torch.randn(size)) for size in ((3, 3), (3,), (1,)))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, times=1):
        y = self.how(self, x) * times
        return (y * torch.linspace(1, 2, y.numel()).view(y.shape)).sum()


DIMS = {
    "cosine, broadcast": lambda m, x: F.cosine_similarity(m.row, x @ m.wide, dim=-1),
    "cosine, more dims": lambda m, x: F.cosine_similarity(m.row, (x @ m.wide)[None].expand(2, 3, 3), dim=-2),
    "lengths of none": lambda m, x: torch.norm_except_dim(m.wide, 2, -1) * m.row,
    "weight norm of none": lambda m, x: torch._weight_norm(m.wide, m.one[0].abs(), -1),
    "a dim more": lambda m, x: torch.diag_embed(x @ m.wide, 0, -3, -1),
    "an empty one first": lambda m, x: torch.cat([torch.zeros(0), x @ m.wide, x], dim=-1),
}


@pytest.mark.parametrize("name", DIMS)
def test_dims_are_those_of_all_operands(name):
    """A negative one counts in the shape that they have together, or is none at all."""
    equal(_Applied(DIMS[name]), (torch.randn(3, 3),))


@pytest.mark.parametrize("how", [lambda m, x: F.linear(x, m.wide, m.one), lambda m, x: torch.addmm(m.one, x, m.wide)])
def test_one_bias_for_all_features(how):
    graph = equal(_Applied(how), (torch.randn(4, 3),))
    assert all(default_rules().rule_for(op, graph) for op in graph.ops)


def test_a_forward_is_captured_as_it_is_called():
    """Hooks that look at how an argument is given see what they would see."""
    def twice(module, args, kwargs):
        return (args, {**kwargs, "x": kwargs["x"] * 2}) if "x" in kwargs else ((args[0] * 3, *args[1:]), kwargs)

    for args, kwargs in (((), {"x": torch.randn(4, 3), "times": 2}), ((torch.randn(4, 3),), {"times": 2}),
                         ((torch.randn(4, 3), 2), {})):
        model = _Applied(lambda m, x: x @ m.wide)
        model.register_forward_pre_hook(twice, with_kwargs=True)
        equal(model, args, kwargs)


GLOBAL = torch.zeros(())


def _reaching(model):
    return lambda module, args, output: (model.calls.add_(1), None)[1]


@pytest.mark.parametrize("how", ["global", "closure"])
def test_writes_into_what_is_not_the_modules_are_refused(how):
    model = _Applied(lambda m, x: x @ m.wide * (GLOBAL.add_(1) if how == "global" else 1))
    if how == "closure":
        model.register_forward_hook(_reaching(model))
    with pytest.raises(CaptureError, match=r"writes into a tensor that is no buffer of its modules.*register_buffer"):
        capture(model, (torch.randn(4, 3),), {})


@pytest.mark.parametrize(("name", "how", "instead"), [
    ("gaussian_nll_loss", lambda m, x: F.gaussian_nll_loss(x @ m.wide, x, x.exp()), "write it out: var = var"),
    ("torch.cov", lambda m, x: torch.cov(x @ m.wide), r"x @ x\.mT"),
    ("torch.corrcoef", lambda m, x: (x @ m.wide).corrcoef(), r"x\.norm"),
    ("ctc_loss", lambda m, x: F.ctc_loss((x @ m.wide)[:, None], torch.ones(1, 2).long(), (3,), (2,)), "returns .*full_tensor"),
])
def test_functions_that_look_at_contents_are_named(name, how, instead):
    with pytest.raises(CaptureError, match=rf"{name.removeprefix('torch.')}: .*What to do: .*{instead}"):
        capture(_Applied(how), (torch.randn(3, 3),), {})


@pytest.mark.parametrize("low", [-2.0, 0.6])
def test_a_truncated_normal_is_captured_or_named(low):
    """Torch 2.11 takes it from one uniform number; later it draws anew, by one of two ways, until all are within the bounds."""
    x = torch.ones(99, 3)
    model = _Applied(lambda m, x: x @ m.wide * nn.init.trunc_normal_(torch.empty(99, 1), a=low, b=4.0))
    if torch.__version__ < "2.12":  # compared as versions
        assert "aten.erfinv.default" in {op.target for op in capture(model, (x,), {}).ops}
        return
    with pytest.raises(CaptureError, match=r"torch\.nn\.init\.trunc_normal_: .*until every number.*uniform_\(low, high\)"):
        capture(model, (x,), {})


@pytest.mark.parametrize(("draw", "low", "high"), [
    (lambda x: torch.empty_like(x).random_(2, 5), 2, 5), (lambda x: torch.empty(9, 3).long().random_(-3, to=2), -3, 2),
    (lambda x: x.clone().random_(2), 0, 2), (lambda x: x.abs().cauchy_(), None, None),
    (lambda x: x.abs().log_normal_(), 0, None), (lambda x: x.abs().geometric_(0.5), 1, None),
    (lambda x: x.clone().exponential_(2.0), 0, None),
])
def test_fills_in_place_draw(draw, low, high):
    """Within their bounds, and other numbers every time; every operator that draws has a rule by which it is split."""
    class Drawing(nn.Linear):
        def forward(self, x):
            return draw(x), super().forward(x)

    model, x = Drawing(3, 3), torch.ones(99, 3)
    graph = capture(model, (x,), {})
    held = {param.value: model.get_parameter(param.fqn) for param in graph.params}
    first, second = (run(graph, {"x": x, **held})[graph.output_tree[0].name] for _ in range(2))
    assert not torch.equal(first, second)
    assert low is None or first.min() >= low
    assert high is None or (first.min() == low and first.max() == high - 1)
    found = [default_rules().rule_for(op, graph) for op in graph.ops if draws(op)]
    assert found
    assert all(rule.results[0] == ("dim0", "dim1") for rule in found)


def test_complex_numbers_are_written():
    how = _Applied(lambda m, x: (torch.exp(1j * (x @ m.wide)) * torch.full((3,), 2 - 3j) * (-0.5 - 0.0j)).abs() + m.row)
    graph = equal(how, (torch.randn(3, 3),))
    assert graph_digest(graph_from_dict(json.loads(json.dumps(graph_to_dict(graph))))) == graph_digest(graph)


def test_a_batch_norm_of_nothing():
    graph = equal(_Applied(lambda m, x: x @ m.wide + F.batch_norm(m.one[:0], m.one[:0], None, training=True).sum()),
                  (torch.randn(3, 3),))
    assert all(default_rules().rule_for(op, graph) for op in graph.ops)


OPENED = {
    "hstack": lambda x, w: torch.hstack([x, x @ w]), "linalg_norm": lambda x, w: torch.linalg.norm(x @ w, dim=-1),
    "inner": lambda x, w: torch.inner(x, w), "flipud": lambda x, w: torch.flipud(x * w[0]),
    "hsplit": lambda x, w: torch.hsplit(x @ w, 2)[1], "trapezoid": lambda x, w: torch.trapezoid(x @ w, dim=-1),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w, w]), "atleast_3d": lambda x, w: torch.atleast_3d(x @ w),
    "var_mean": lambda x, w: torch.var_mean(x @ w, -1)[0], "float_power": lambda x, w: torch.float_power(x @ w, 2),
    "triplet": lambda x, w: nn.functional.triplet_margin_loss(x @ w, x, x.flip(0)),
    "ndtr": lambda x, w: torch.special.ndtr(x @ w), "pad_sequence": lambda x, w: nn.utils.rnn.pad_sequence([x @ w, w]),
}


@pytest.mark.parametrize("name", OPENED)
def test_what_has_no_rule_is_what_it_is_made_of(name: str) -> None:
    """Operators of torch that are made of others: these have rules, and compute the same."""
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OPENED[name](x, self.w)

    graph = equal(Made(), (torch.randn(6, 4),))
    assert all(default_rules().known(target) for target in targets(graph) if target != "mw.fill")


@pytest.mark.parametrize(("mode", "weighed"), [("sum", False), ("sum", True), ("mean", False)])
def test_bags_of_one_length_are_lookups(mode: str, weighed: bool) -> None:
    """So they can be split; bags of other lengths, and their largest rows, are not."""
    class Bag(nn.EmbeddingBag):
        def forward(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(ids, per_sample_weights=weights).sin()

    ids, weights = torch.randint(0, 10, (6, 3)), torch.rand(6, 3) if weighed else None
    found = targets(equal(Bag(10, 4, mode=mode), (ids, weights)))
    assert "aten.embedding.default" in found
    assert not any("bag" in target for target in found)
    assert "aten._embedding_bag.default" in targets(capture(Bag(10, 4, mode="max"), (ids,), {}))


STRIDED_READS = {
    "of what was turned": lambda y: y.t().contiguous().as_strided((2, 3), (3, 1), 1),
    "of what is turned": lambda y: y.t().as_strided((2, 3), (3, 1), 1), "windows": lambda y: y.as_strided((5, 2, 4), (4, 4, 1)),
    "of a slice": lambda y: y[1:].as_strided((2, 3), (3, 1)), "copied": lambda y: torch.as_strided_copy(y.t() * 2, (3,), (5,)),
    "repeated": lambda y: y.as_strided((3, 2, 1), (0, 5, 7)), "a number": lambda y: y.as_strided((), (), 3),
    "a diagonal": lambda y: (y.t() @ y).fill_diagonal_(0.5), "a wide diagonal": lambda y: (y * 2).fill_diagonal_(0.5),
    "written": lambda y: (z := y * 2, z.as_strided((2, 3), (7, 1), 1).mul_(2))[0],
}


@pytest.mark.parametrize("what", STRIDED_READS)
def test_memory_is_read_as_it_lay(what: str) -> None:
    """as_strided reads what lies in memory where the model made it, whatever a graph leaves out; writing by it keeps the
    gradient of the rest, which torch's own as_strided_scatter loses."""
    class Read(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return STRIDED_READS[what](super().forward(x)).sin()

    equal(Read(4, 4), (torch.randn(6, 4),))


@pytest.mark.parametrize(("read", "word"), [
    (lambda y: y[1:].as_strided((2, 3), (3, 1), 0), "beside the elements"),
    (lambda y: y[:, 1:].as_strided((2, 3), (3, 1), 2), "beside the elements"),
    (lambda y: (y * 2).t().fill_diagonal_(0.5), "new tensor instead"),
])
def test_other_memory_is_refused(read, word: str) -> None:
    class Read(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return read(super().forward(x))

    with pytest.raises(CaptureError, match=word):
        capture(Read(4, 4), (torch.randn(6, 4),), {})


def _after(view, write):
    """A model that writes into a view of a value, and reads the value afterwards."""
    class Writes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x) * 1.5
            z = view(y)
            write(z)
            return y.sin() + z.cos().sum()

    return Writes(4, 4)


@pytest.mark.parametrize("write", [lambda z: z.mul_(2), lambda z: z[1:].fill_(0.3), lambda z: F.relu(z, inplace=True)])
@pytest.mark.parametrize("view", [lambda y: F.dropout(y, 0.0), lambda y: F.dropout(y, 0.5, False), lambda y: y.to(y.dtype)])
def test_what_is_the_same_tensor_is_written_with_it(view, write) -> None:
    """A dropout of nothing gives the tensor that it is given."""
    equal(_after(view, write), (torch.randn(6, 4),))


@pytest.mark.parametrize("view", [lambda y: torch.einsum("ij->ji", y), lambda y: y.detach(), lambda y: y.data,
                                  lambda y: y.view(torch.int32).view(torch.float32)])
def test_writes_that_a_graph_does_not_see_are_refused(view) -> None:
    """Through a view that no schema tells of; and past a gradient. What nobody reads afterwards may be written."""
    with pytest.raises(CaptureError, match=r"What to do: make a new tensor"):
        capture(_after(view, lambda z: z.mul_(2)), (torch.randn(6, 4),), {})
    with pytest.raises(CaptureError, match=r"What to do: make a new tensor"):
        capture(_after(view, lambda z: torch.exp(z, out=z) if not z.requires_grad else z.exp_()), (torch.randn(6, 4),), {})

    class Last(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x) * 1.5
            z = view(y + 0)
            z.mul_(2)
            return y.sin() + z.cos().sum()

    equal(Last(4, 4), (torch.randn(6, 4),))


def test_what_checks_contents_stays_whole() -> None:
    """A factorization raises on one process where a matrix has none; without its check it would go on with other numbers."""
    class Factor(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.cholesky(x @ self.weight @ x.mT)

    assert "aten.linalg_cholesky.default" in targets(capture(Factor(4, 4), (torch.randn(2, 4),), {}))


@pytest.mark.parametrize("alias", SYNONYMS)
def test_synonyms_are_torchs_own(alias: str) -> None:
    """The same arguments in every overload; torch's own source says that they are one function."""
    ours, known = (getattr(torch.ops.aten, name) for name in (alias, SYNONYMS[alias]))
    for overload in (name for name in ours.overloads() if "out" not in name):
        found = [[(arg.name, str(arg.type)) for arg in getattr(of, overload)._schema.arguments] for of in (ours, known)]
        assert found[0] == found[1], overload


def test_another_name_of_an_operator_is_that_operator() -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.concatenate([torch.special.expit(x), torch.clip(super().forward(x), -1, 1)], -1)
            x = torch.divide(x.swapdims(0, 1), 2.0, rounding_mode=None) + torch.greater(x.swapdims(0, 1), 0).to(x)
            return torch.special.softmax(torch.absolute(x), -1)

    graph = capture(Named(4, 4), (torch.randn(2, 4),), {})
    known = ("cat.default", "sigmoid.default", "clamp.default", "abs.default", "div.Tensor", "gt.Scalar")
    assert targets(graph).keys() >= {f"aten.{name}" for name in (*known, "softmax.int")}
    assert all(default_rules().known(target) for target in targets(graph) if target != "mw.fill")


def test_constants_and_factories_lie_where_the_operands_do() -> None:
    """On a GPU, say, what is asserted of inputs there reads the model's constants and an ``arange``."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.randn(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.plain + torch.arange(x.shape[1])

    graph = capture(Model(), (torch.randn(2, 4),), {})
    assert graph.constants
    found = run(graph, {graph.inputs[0]: torch.randn(2, 4, device="meta")})
    assert all(tensor.is_meta for tensor in found.values())


def test_what_writes_where_torch_cannot_follow_is_named() -> None:
    """Without gradients torch's own function is traced through."""
    with torch.no_grad(), pytest.raises(CaptureError, match=r"module '1' \(.*\.py:\d+\) writes into memory") as caught:
        capture(nn.Sequential(nn.Conv2d(2, 2, 1), nn.CrossMapLRN2d(3)), (torch.randn(2, 2, 4, 4),), {})
    assert caught.value.module == "1"
