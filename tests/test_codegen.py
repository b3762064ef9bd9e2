"""Graphs to code: modes, devices, and errors that name the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.compiler.rules import builtin_rules
from meshwright.ir.graph import Graph, GraphError, Op, Param, Ref, Value
from meshwright.ir.mesh import Mesh
from meshwright.runtime.codegen import generate
from meshwright.runtime.groups import make_groups

OPERATORS, GROUPS = builtin_rules().operators, make_groups(Mesh.of(tp=1), torch.device("cpu"))


def graph_of(
    target: str, *args: Any, inputs: tuple[str, ...] = ("x",), outputs: tuple[str, ...] = ("y",), **kwargs: Any
) -> Graph:
    names = {*inputs, *outputs}
    op = Op("y", target, args, tuple(kwargs.items()), outputs, "layer.0", "model.py:3")
    return Graph({n: Value(n, (), torch.float32) for n in names}, inputs, (), (op,), tuple(Ref(n) for n in outputs))


def run(graph: Graph, training: bool, *args: Any) -> tuple[Any, ...]:
    return generate(graph, graph.inputs, GROUPS, training, OPERATORS)(*args)


def test_eval_turns_randomness_and_batch_statistics_off() -> None:
    x, seed = torch.randn(8, 4), torch.tensor([3, 4])
    mw_dropout = graph_of("mw.dropout", Ref("x"), 0.5, inputs=("x", "seed"), draw=(Ref("seed"), 1, False))
    assert torch.equal(run(mw_dropout, False, x, seed)[0], x)
    assert not torch.equal(run(mw_dropout, True, x, seed)[0], x)
    aten_dropout = graph_of("aten.dropout.default", Ref("x"), 0.5, True)
    assert torch.equal(run(aten_dropout, False, x)[0], x)
    assert not torch.equal(run(aten_dropout, True, x)[0], x)
    q = torch.randn(1, 2, 5, 4)
    plain = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    call = (Ref("x"), Ref("x"), Ref("x"), None, 0.5, False, None, False)
    mw_sdpa = graph_of("mw.sdpa", *call, inputs=("x", "seed"), draw=(Ref("seed"), 1, False))
    torch.testing.assert_close(run(mw_sdpa, False, q, seed)[0], plain)
    assert not torch.allclose(run(mw_sdpa, True, q, seed)[0], plain)
    second = torch.nn.functional.scaled_dot_product_attention(q, q[:, 1:], q[:, 1:], enable_gqa=True)
    grouped = graph_of("mw.grouped_sdpa", *call[:-1], True, 1, inputs=("x", "seed"), draw=(Ref("seed"), 1, False))
    torch.testing.assert_close(run(grouped, False, q, seed)[0], second)
    assert not torch.allclose(run(grouped, True, q, seed)[0], second)
    for aten_sdpa in (
        graph_of("aten.scaled_dot_product_attention.default", Ref("x"), Ref("x"), Ref("x"), None, 0.5),
        graph_of("aten.scaled_dot_product_attention.default", Ref("x"), Ref("x"), Ref("x"), dropout_p=0.5),
    ):
        torch.testing.assert_close(run(aten_sdpa, False, q)[0], plain)
        assert not torch.allclose(run(aten_sdpa, True, q)[0], plain)
    mean, var = torch.full((4,), 2.0), torch.full((4,), 4.0)
    norm = graph_of(
        "mw.batch_norm", Ref("x"), None, None, Ref("mean"), Ref("var"), True, 0.1, 1e-12, inputs=("x", "mean", "var"),
        outputs=("y", "new_mean", "new_var"),
    )
    torch.testing.assert_close(run(norm, False, x, mean, var)[0], (x - 2) / 2)
    torch.testing.assert_close(run(norm, True, x, mean, var)[0].mean(0), torch.zeros(4), atol=1e-6, rtol=0)


def test_factories_make_their_tensors_here() -> None:
    arange = graph_of("aten.arange.start", 2, 5, inputs=(), device=torch.device("meta"), pin_memory=False)
    assert run(arange, True)[0].tolist() == [2, 3, 4]
    assert run(graph_of("aten.full.default", [2], 1.5, inputs=()), True)[0].tolist() == [1.5, 1.5]


def test_several_outputs_and_lists() -> None:
    split = graph_of("aten.split_with_sizes.default", Ref("x"), [1, 2], outputs=("y", "z"))
    assert [part.tolist() for part in run(split, True, torch.arange(3))] == [[0], [1, 2]]
    cat = graph_of("aten.cat.default", (Ref("x"), Ref("x")))
    assert run(cat, True, torch.arange(2))[0].tolist() == [0, 1, 0, 1]


def test_a_parameters_gradient_is_reduced_in_fp32() -> None:
    graph = graph_of("mw.vary", Ref("x"), inputs=(), axis="tp")
    graph = Graph(
        {n: Value(n, (), torch.bfloat16) for n in ("x", "y")}, (), (Param("x", ("w",), True),), graph.ops, graph.output_tree
    )
    code = generate(graph, ("x",), GROUPS, True, OPERATORS)
    (call,) = [node for node in code.__self__.graph.nodes if node.op == "call_function"]
    assert call.kwargs["reduce_dtype"] == torch.float32


def test_errors_name_the_operator() -> None:
    with pytest.raises(GraphError, match=r"torch has no operator 'aten.no_such.default'"):
        run(graph_of("aten.no_such.default", Ref("x")), True, torch.ones(1))
    with pytest.raises(GraphError, match="reads %z, which the segment does not define"):
        run(graph_of("aten.relu.default", Ref("z")), True, torch.ones(1))
