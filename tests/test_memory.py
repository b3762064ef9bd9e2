"""What autograd saves: the declarations against torch itself, the layer against the paper."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.compiler.capture.capture import capture
from meshwright.compiler.rules import builtin_rules
from meshwright.cost.memory.saved import saved_beside, saved_for_backward, storages
from meshwright.ir.declared.operator import Saves, Work
from meshwright.ir.graph import Graph, Op, Param, Ref, Value
from meshwright.ir.notation import RuleError

AT = torch.ops.aten
OPERATORS = builtin_rules().operators


def beside(target: str, shapes, results, dtype=torch.float32, args=()) -> float:
    """Bytes kept beside operands and results of a call."""
    return saved_beside(OPERATORS[target], Work(tuple(shapes), tuple(results), dtype, dtype, args=args))


def activation_bytes(graph: Graph, ops=None, narrow_masks: bool = False) -> float:
    """Bytes that autograd keeps for the backward of ``ops`` (default all), each storage once, parameters not counted.

    ``narrow_masks``: dropout's masks take a byte an element, as in the paper, instead of being as wide as the data.
    """
    base, held = storages(graph, OPERATORS), {param.value for param in graph.params}
    kept: dict[str, int] = {}
    extra = 0.0
    for op in graph.ops if ops is None else [graph.ops[i] for i in ops]:
        operands, results = saved_for_backward(op, graph, OPERATORS)
        for name in [op.inputs[at] for at in operands] + [op.outputs[at] for at in results]:
            if base[name] not in held:
                kept[base[name]] = graph.values[base[name]].bytes_
        if any(graph.values[name].differentiable for name in op.outputs):
            masked = narrow_masks and op.target == "aten.dropout.default"
            extra += saved_beside(OPERATORS[op.target], Work.of(op, graph)) / (2 if masked else 1)
    return sum(kept.values()) + extra


def needs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def whole(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) + 0.5


MASK = torch.ones(4, 6, dtype=torch.bool)
IDS = torch.tensor([0, 2, 1])
CALLS = [
    # target, call on the tensor operands, operands
    ("aten.linear.default", F.linear, (needs(2, 4, 6), needs(5, 6), needs(5))),
    ("aten.linear.default", F.linear, (whole(2, 4, 6), needs(5, 6))),
    ("aten.linear.default", F.linear, (needs(4, 6), whole(5, 6))),
    ("aten.mm.default", torch.mm, (needs(4, 6), needs(6, 3))),
    ("aten.bmm.default", torch.bmm, (needs(2, 4, 6), needs(2, 6, 3))),
    ("aten.matmul.default", torch.matmul, (needs(2, 4, 6), needs(2, 6, 3))),
    ("aten.addmm.default", torch.addmm, (needs(3), needs(4, 6), needs(6, 3))),
    ("aten.add.Tensor", torch.add, (needs(4, 6), needs(4, 6))),
    ("aten.sub.Tensor", torch.sub, (needs(4, 6), needs(4, 6))),
    ("aten.mul.Tensor", torch.mul, (needs(4, 6), needs(4, 6))),
    ("aten.mul.Tensor", torch.mul, (needs(4, 6), whole(4, 6))),
    ("aten.mul.Tensor", lambda x: x * 2, (needs(4, 6),)),
    ("aten.div.Tensor", torch.div, (needs(4, 6), whole(4, 6))),
    ("aten.div.Tensor", torch.div, (needs(4, 6), needs(4, 6))),
    ("aten.neg.default", torch.neg, (needs(4, 6),)),
    ("aten.pow.Tensor_Scalar", lambda x: x.pow(2), (needs(4, 6),)),
    ("aten.silu.default", F.silu, (needs(4, 6),)),
    ("aten.gelu.default", F.gelu, (needs(4, 6),)),
    ("aten.relu.default", F.relu, (needs(4, 6),)),
    ("aten.tanh.default", torch.tanh, (needs(4, 6),)),
    ("aten.sigmoid.default", torch.sigmoid, (needs(4, 6),)),
    ("aten.exp.default", torch.exp, (needs(4, 6),)),
    ("aten.rsqrt.default", lambda x: x.rsqrt(), (whole(4, 6).requires_grad_(),)),
    ("aten.abs.default", torch.abs, (needs(4, 6),)),
    ("aten.cos.default", torch.cos, (needs(4, 6),)),
    ("aten.clamp_min.default", lambda x: x.clamp(0), (needs(4, 6),)),
    ("aten.masked_fill.Scalar", lambda x, m: x.masked_fill(m, 0.0), (needs(4, 6), MASK)),
    ("aten.where.self", torch.where, (MASK, needs(4, 6), needs(4, 6))),
    ("aten.mean.dim", lambda x: x.mean(-1), (needs(4, 6),)),
    ("aten.sum.default", torch.sum, (needs(4, 6),)),
    ("aten.var.correction", lambda x: x.var(-1), (needs(4, 6),)),
    ("aten.std.correction", lambda x: x.std(-1), (needs(4, 6),)),
    ("aten._softmax.default", lambda x: x.softmax(-1), (needs(4, 6),)),
    ("aten._log_softmax.default", lambda x: x.log_softmax(-1), (needs(4, 6),)),
    ("aten.layer_norm.default", lambda x, w, b: F.layer_norm(x, (6,), w, b), (needs(4, 6), needs(6), needs(6))),
    ("aten.embedding.default", AT.embedding.default, (needs(8, 6), IDS)),
    ("aten.index_select.default", lambda x, i: x.index_select(0, i), (needs(8, 6), IDS)),
    ("aten.cat.default", lambda *x: torch.cat(x), (needs(4, 6), needs(4, 6))),
    ("aten.clone.default", torch.clone, (needs(4, 6),)),
    ("aten.conv2d.default", F.conv2d, (needs(1, 2, 6, 6), needs(3, 2, 2, 2))),
    ("aten.transpose.int", lambda x: x.transpose(0, 1), (needs(4, 6),)),
    ("aten.mse_loss.default", F.mse_loss, (needs(4, 6), whole(4, 6))),
    (
        "aten.scaled_dot_product_attention.default", lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
        (needs(2, 4, 8, 6), needs(2, 4, 8, 6), needs(2, 4, 8, 6)),
    ),
]


def graph_of(target: str, operands: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> Graph:
    names = [f"x{i}" for i in range(len(operands))]
    values = {n: Value(n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in zip(names, operands, strict=True)}
    outs = tuple(f"y{i}" for i in range(len(results)))
    values |= {n: Value(n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in zip(outs, results, strict=True)}
    return Graph(values, tuple(names), (), (Op("op", target, tuple(map(Ref, names)), (), outs),), Ref(outs[0]))


@pytest.mark.parametrize(("target", "call", "operands"), CALLS, ids=[f"{i}-{call[0]}" for i, call in enumerate(CALLS)])
def test_declared_is_what_torch_saves(target, call, operands):
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call(*operands)
    graph = graph_of(target, operands, (result,))
    inputs, outputs = saved_for_backward(graph.ops[0], graph, OPERATORS)
    storage = {tensor.untyped_storage().data_ptr(): tensor for tensor in saved if tensor.numel() > 1}
    known = {tensor.untyped_storage().data_ptr(): f"x{i}" for i, tensor in enumerate(operands)}
    if result.untyped_storage().data_ptr() not in known:
        known[result.untyped_storage().data_ptr()] = "y0"
    found = {known[pointer] for pointer in storage if pointer in known}
    if target == "aten.layer_norm.default":
        found.discard("x2")  # the bias is among the saved tensors of the CPU kernel, and is a parameter
    declared = {f"x{i}" for i in inputs if operands[i].numel() > 1} | {f"y{i}" for i in outputs}
    if target.startswith(("aten.embedding", "aten.index_select", "aten.where", "aten.masked_fill")):
        # masks and ids are saved as they are or as a copy of the same size
        assert len(declared) == len(storage)
    else:
        assert found == declared
        others = sum(tensor.numel() * tensor.itemsize for pointer, tensor in storage.items() if pointer not in known)
        shapes = [tuple(tensor.shape) for tensor in operands]
        assert beside(target, shapes, [tuple(result.shape)]) == others


def test_nothing_is_saved_without_a_gradient():
    graph = graph_of("aten.mul.Tensor", (whole(4), whole(4)), (whole(4),))
    assert saved_for_backward(graph.ops[0], graph, OPERATORS) == ((), ())


def test_dropout_mask_is_as_wide_as_the_data_that_our_operator_keeps():
    shape = ((4, 6),)
    assert beside("aten.dropout.default", shape, shape, torch.float16, (Ref("x"), 0.1, True)) == 48
    assert beside("aten.dropout.default", shape, shape, torch.float16, (Ref("x"), 0.1, False)) == 0
    assert beside("aten.dropout.default", shape, shape, torch.float16, (Ref("x"), 0.0, True)) == 0


@pytest.mark.parametrize("text", ["", "0", "0:1 1:0", "0:1 1:0,1", "0 1 2 r0", "r1"])
def test_what_is_kept_is_printed_as_it_is_read(text):
    assert str(Saves.parse(text)) == text


@pytest.mark.parametrize("text", ["x", "0:", "r", "0:r1", "-1", "0;1"])
def test_what_cannot_be_read_says_so(text):
    with pytest.raises(RuleError, match="cannot read"):
        Saves.parse(text)


class Layer:
    """Builds one transformer layer of Korthikanti et al. on LOCAL shapes: b micro-batch, s sequence, h hidden, a heads over t
    ranks, ``sp``: sequence split outside attention and MLP. Eager attention, dropout, GELU, fp16."""

    def __init__(self, b: int, s: int, h: int, a: int, t: int = 1, sp: bool = False) -> None:
        self.values: dict[str, Value] = {}
        self.params: list[Param] = []
        self.ops: list[Op] = []
        rows = s // t if sp else s
        x = self._value("x", (b, rows, h))
        y = self._attention(self._norm(x), b, s, h, a, t, sp)
        x = self._op("aten.add.Tensor", (x, self._dropout(self._output(y, h, rows, b))), (b, rows, h))
        y = self._linear(self._whole(self._norm(x), b, s, h, t, sp), 4 * h // t)
        y = self._op("aten.gelu.default", (y,), (b, s, 4 * h // t))
        x = self._op("aten.add.Tensor", (x, self._dropout(self._output(y, h, rows, b))), (b, rows, h))
        self.graph = Graph(self.values, ("x",), tuple(self.params), tuple(self.ops), x)

    def _value(self, name: str, shape: tuple[int, ...]) -> Ref:
        self.values[name] = Value(name, shape, torch.float16, True)
        return Ref(name)

    def _shape(self, ref: Ref) -> tuple[int, ...]:
        return self.values[ref.name].shape

    def _param(self, *shape: int) -> Ref:
        name = f"p{len(self.params)}"
        self.params.append(Param(name, (name,), True))
        return self._value(name, shape)

    def _op(self, target: str, args: tuple[object, ...], shape: tuple[int, ...]) -> Ref:
        name = f"v{len(self.ops)}"
        self.ops.append(Op(name, target, args, (), (name,)))
        return self._value(name, shape)

    def _norm(self, x: Ref) -> Ref:
        h = self._shape(x)[-1]
        return self._op("aten.layer_norm.default", (x, (h,), self._param(h), self._param(h)), self._shape(x))

    def _whole(self, x: Ref, b: int, s: int, h: int, t: int, sp: bool) -> Ref:
        """The gathered sequence: its shard is what is kept, and the linear saves that again as the same storage."""
        if not sp or t == 1:
            return x
        return self._op("mw.unvary", (x,), (b, s, h))  # stands for the gather whose shard alone is kept

    def _linear(self, x: Ref, out: int) -> Ref:
        weight, bias = self._param(out, self._shape(x)[-1]), self._param(out)
        return self._op("aten.linear.default", (x, weight, bias), (*self._shape(x)[:-1], out))

    def _output(self, x: Ref, h: int, rows: int, b: int) -> Ref:
        """A row-parallel linear: its reduction saves nothing."""
        y = self._linear(x, h)
        return self._op("mw.all_reduce", (y,), (b, rows, h)) if self._shape(y)[1] != rows else y

    def _dropout(self, x: Ref) -> Ref:
        return self._op("aten.dropout.default", (x, 0.1, True), self._shape(x))

    def _attention(self, x: Ref, b: int, s: int, h: int, a: int, t: int, sp: bool) -> Ref:
        heads, size = a // t, h // a
        x = self._whole(x, b, s, h, t, sp)
        q, k, v = (self._heads(self._linear(x, heads * size), b, s, heads, size) for _ in range(3))
        k = self._op("aten.transpose.int", (k, 2, 3), (b, heads, size, s))
        scores = self._op("aten.matmul.default", (q, k), (b, heads, s, s))
        scores = self._dropout(self._op("aten._softmax.default", (scores, -1, False), (b, heads, s, s)))
        y = self._op("aten.matmul.default", (scores, v), (b, heads, s, size))
        y = self._op("aten.transpose.int", (y, 1, 2), (b, s, heads, size))
        return self._op("aten.reshape.default", (y, (b, s, heads * size)), (b, s, heads * size))

    def _heads(self, x: Ref, b: int, s: int, heads: int, size: int) -> Ref:
        x = self._op("aten.view.default", (x, (b, s, heads, size)), (b, s, heads, size))
        return self._op("aten.transpose.int", (x, 1, 2), (b, heads, s, size))


def statistics(b: int, rows: int) -> int:
    """What the paper leaves out: mean and deviation in fp32 of two layer norms."""
    return 2 * 2 * 4 * b * rows


@pytest.mark.parametrize(("b", "s", "h", "a"), [(1, 64, 128, 8), (4, 32, 64, 4), (2, 128, 64, 2)])
def test_korthikanti_whole_layer(b, s, h, a):
    layer = Layer(b, s, h, a)
    assert activation_bytes(layer.graph, narrow_masks=True) - statistics(b, s) == s * b * h * (34 + 5 * a * s / h)


@pytest.mark.parametrize("t", [2, 4])
def test_korthikanti_tensor_parallel(t):
    b, s, h, a = 2, 64, 128, 8
    got = activation_bytes(Layer(b, s, h, a, t).graph, narrow_masks=True) - statistics(b, s)
    assert got == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))


@pytest.mark.parametrize("t", [2, 4])
def test_korthikanti_sequence_parallel(t):
    b, s, h, a = 2, 64, 128, 8
    got = activation_bytes(Layer(b, s, h, a, t, sp=True).graph, narrow_masks=True) - statistics(b, s // t)
    assert got == s * b * h * (34 / t + 5 * a * s / (h * t))


@pytest.mark.parametrize("t", [1, 2, 4])
def test_korthikanti_selective_recomputation(t):
    """Everything between q, k, v and the product with v is computed again: only q, k and v are kept there."""
    b, s, h, a = 2, 64, 128, 8
    graph = Layer(b, s, h, a, t, sp=t > 1).graph
    heads = a // t
    scores = {op.name for op in graph.ops if graph.values[op.outputs[0]].shape == (b, heads, s, s)}
    kept = [i for i, op in enumerate(graph.ops) if op.name not in scores]
    inner = activation_bytes(graph, kept, narrow_masks=True)
    inner -= b * heads * s * s * 2  # the probabilities that the second product reads are recomputed too
    query_and_key = 2 * (b * s * h // t * 2)
    assert inner + query_and_key - statistics(b, s // t) == s * b * h * 34 / t


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_selective_recomputation_runs_the_core_of_attention_again_and_more(t):
    """Megatron-LM's "selective" runs the core of attention again and nothing else: the paper's s b h 34 / t. Ours runs all that
    it runs, so of what is as large as the scores nothing is kept; of the rest the results of linears are, whole where they wait
    to be reduced: less than the paper's up to two tensor ranks, more from four on."""
    b, s, h, a = 2, 64, 128, 8
    graph = Layer(b, s, h, a, t, sp=t > 1).graph
    base = storages(graph, OPERATORS)
    kept = {base["x"], *(base[op.outputs[0]] for op in graph.ops if OPERATORS[op.target].keeps_results("selective"))}
    assert not [name for name in kept if graph.values[name].shape[1:] == (a // t, s, s)]
    held = sum(graph.values[name].bytes_ for name in kept)
    assert held == s * b * h * (20 / t + 4 * (t > 1))
    assert (held < s * b * h * 34 / t) == (t <= 2)


@pytest.mark.parametrize("alone", [False, True])
def test_a_kernel_without_scores_leaves_nothing_to_the_core_of_attention_alone(alone):
    """Where flash attention runs, running its core again keeps what running nothing again keeps but for the logarithms of the
    sums, 4 bytes a row and head: queries, keys and values are kept either way, and the next linear keeps the result."""
    x, inner, outer = torch.randn(2, 64, 32, requires_grad=True), needs(96, 32), needs(32, 32)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def core(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        q, k, v = (part.reshape(2, 64, 4, 8).transpose(1, 2) for part in F.linear(x, inner).split(32, -1))
        out = checkpoint(core, q, k, v, use_reentrant=False) if alone else core(q, k, v)
        if alone:  # what a checkpoint holds it does not show
            for tensor in (q, k, v):
                pack(tensor)
        F.linear(out.transpose(1, 2).reshape(2, 64, 32), outer)
    held = sum(storage.nbytes() for storage in kept.values()) - 2 * 64 * 32 * 4 - inner.nbytes - outer.nbytes  # x, the weights
    scores = 2 * 4 * 64 * 4  # the sums' logarithms
    assert held == 2 * 64 * 96 * 4 + 2 * 64 * 32 * 4 + (0 if alone else scores)


def test_storages_follow_views_and_copies():
    graph = Layer(1, 8, 16, 2).graph
    base = storages(graph, OPERATORS)
    view = next(op for op in graph.ops if op.target == "aten.view.default")
    heads = next(op for op in graph.ops if op.target == "aten.transpose.int")
    back = next(op for op in graph.ops if op.target == "aten.reshape.default")
    assert base[view.outputs[0]] == base[heads.outputs[0]] == view.inputs[0]
    assert base[back.outputs[0]] == back.outputs[0]  # transposed heads are moved to be joined


def attention_graph(transposed: bool) -> Graph:
    shapes = {"x": (1, 8, 2, 4) if transposed else (1, 2, 8, 4), "q": (1, 2, 8, 4), "p": (1, 2, 8, 4), "o": (1, 2, 8, 4),
              "t": (1, 8, 2, 4), "r": (1, 8, 8)}
    values = {name: Value(name, shape, torch.float32, True) for name, shape in shapes.items()}
    target, args = ("aten.transpose.int", (1, 2)) if transposed else ("aten.exp.default", ())
    ops = (
        Op("q", target, (Ref("x"), *args), (), ("q",)), Op("p", "aten.mul.Tensor", (Ref("q"), 2.0), (), ("p",)),
        Op("o", "aten.scaled_dot_product_attention.default", (Ref("p"), Ref("p"), Ref("p")), (), ("o",)),
        Op("t", "aten.transpose.int", (Ref("o"), 1, 2), (), ("t",)),
        Op("r", "aten.reshape.default", (Ref("t"), (1, 8, 8)), (), ("r",)),
    )
    return Graph(values, ("x",), (), ops, Ref("r"))


@pytest.mark.parametrize("transposed", [False, True])
def test_attention_lays_its_result_out_as_its_query(transposed):
    x = needs(1, 8, 2, 4) if transposed else needs(1, 2, 8, 4)
    query = (x.transpose(1, 2) if transposed else x.exp()) * 2.0
    out = F.scaled_dot_product_attention(query, query, query)
    joined = out.transpose(1, 2).reshape(1, 8, 8)
    is_view = joined.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    assert is_view == transposed
    assert (storages(attention_graph(transposed), OPERATORS)["r"] == "o") == is_view


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_whose_mask_takes_a_gradient_is_kept_in_fp32(dtype):
    """T5's position bias: in bf16 twice the probabilities, and twice what they are made of."""
    shapes = [(2, 4, 8, 6), (2, 4, 5, 6), (2, 4, 5, 6), (1, 4, 8, 5)]
    operands, kept = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes], dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = F.scaled_dot_product_attention(*operands)
    declared = beside("aten.scaled_dot_product_attention.default", shapes, [out.shape], dtype)
    assert sum(kept.values()) == declared + sum(x.nbytes for x in operands[:3])


def tiny(kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A small model of the field's kinds without dropout, and what it is called with."""
    hf = pytest.importorskip("transformers")
    ids = torch.randint(0, 500, (2, 64), generator=torch.Generator().manual_seed(0))
    text = {"input_ids": ids, "labels": ids.clone()}
    layers = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "gpt2":
        config = hf.GPT2Config(
            n_layer=2, n_embd=64, n_head=4, vocab_size=500, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
            use_cache=False,
        )
        return hf.GPT2LMHeadModel(config), text
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**layers, num_key_value_heads=2, vocab_size=500, use_cache=False)), text
    if kind == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**layers, **none, vocab_size=500)), text
    images = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 0, 1])}
    return hf.ViTForImageClassification(hf.ViTConfig(**layers, **none, image_size=32, patch_size=8)), images


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "vit"])
def test_saved_bytes_of_models_are_what_autograd_holds(kind):
    model, call = tiny(kind)
    model.train()
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**call)
    want = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    graph = capture(model, (), call)
    assert want <= activation_bytes(graph) <= 1.01 * want


@pytest.mark.parametrize(("shape", "dim", "linears", "wholes"), [
    ((2, 8, 16), 0, 1, 2.0), ((1, 8, 16), 1, 1, 2.0), ((2, 8, 16), 1, 1, 3.0), ((2, 8, 16), 2, 1, 3.0),
    ((2, 8, 16), 1, 2, 5.0), ((2, 8, 16), 1, 3, 6.0), ((2, 8, 16), 0, 2, 4.0),
])
def test_linears_that_gather_again_have_the_whole_as_often_as_torch(
    shape: tuple[int, ...], dim: int, linears: int, wholes: float
) -> None:
    """In their backward, beside the gradients that they make: received, in order if pieces do not lie one after the other, a
    gradient of it from each, and their sum. So torch's memory tracker has it (v2.11, two ranks)."""
    whole = (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
    operands = (shape, *[(4, whole[-1])] * linears)
    results = tuple((*whole[:-1], 4) for _ in range(linears))
    args = (Ref("x"), (Ref("w"),) * linears, (None,) * linears, dim)
    work = Work(operands, results, args=args, kwargs=(("size", whole[dim]),))
    space = builtin_rules().operators["mw.gather_linear"].cost.space
    assert space is not None
    assert space(work)[1] == wholes * 4 * torch.Size(whole).numel()
