"""A plan written by hand: two equal residual MLP blocks, column then row over tp, data parallel over dp with ZeRO-2.

    x[8, 16] -> 2 x (relu(x W1) W2 + x) -> sum of squares

Nothing here asks the planner, so what the report, the explanation and the files say can be compared with what is known.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.ir.graph import Block, Graph, Op, Param, Ref, Value
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import GroupChoice, Plan
from meshwright.ir.prediction import Certificate, Prediction, SeenCandidate
from meshwright.ir.sharding import parse_sharding
from meshwright.ir.writing.versions import prices

BATCH, HIDDEN, WIDE = 8, 16, 32


def handmade_graph() -> Graph:
    """The graph of the two blocks and the loss."""
    values = {"x": Value("x", (BATCH, HIDDEN), torch.float32)}
    params: list[Param] = []
    ops: list[Op] = []

    def op(name: str, target: str, args: tuple[object, ...], shape: tuple[int, ...], module: str) -> str:
        ops.append(Op(name, target, args, (), (name,), module, "model.py:1"))
        values[name] = Value(name, shape, torch.float32, True)
        return name

    def weight(fqn: str, shape: tuple[int, ...]) -> Ref:
        name = "p_" + fqn.replace(".", "_")
        values[name] = Value(name, shape, torch.float32, True)
        params.append(Param(name, (fqn,), True))
        return Ref(name)

    x, blocks = "x", []
    for i in range(2):
        at, start = f"blocks.{i}", len(ops)
        up, down = weight(f"{at}.up.weight", (WIDE, HIDDEN)), weight(f"{at}.down.weight", (HIDDEN, WIDE))
        u = op(f"up{i}", "aten.linear.default", (Ref(x), up), (BATCH, WIDE), f"{at}.up")
        r = op(f"relu{i}", "aten.relu.default", (Ref(u),), (BATCH, WIDE), at)
        d = op(f"down{i}", "aten.linear.default", (Ref(r), down), (BATCH, HIDDEN), f"{at}.down")
        x = op(f"add{i}", "aten.add.Tensor", (Ref(x), Ref(d)), (BATCH, HIDDEN), at)
        blocks.append(Block(at, 0, start, len(ops)))
    square = op("square", "aten.mul.Tensor", (Ref(x), Ref(x)), (BATCH, HIDDEN), "")
    loss = op("loss", "aten.sum.default", (Ref(square),), (), "")
    return Graph(values, ("x",), tuple(params), tuple(ops), Ref(loss), loss=loss, blocks=tuple(blocks))


def handmade_plan() -> Plan:
    """The plan, with round numbers as predictions."""
    graph = handmade_graph()
    choices = {"up": {"dp": "b0", "tp": "n"}, "relu": {"dp": "dim0", "tp": "dim1"}, "down": {"dp": "b0", "tp": "k"}}
    whole = {"dp": "dim0"}
    assignments = {op.name: _named(choices.get(op.name.rstrip("01"), whole), op, graph) for op in graph.ops}
    group = GroupChoice("", 2, ("dp",), ("dp",))
    return Plan(
        graph=graph, mesh=Mesh.of(dp=2, tp=2), assignments=assignments,
        copies={"x": parse_sharding("[_@dp, _]"), "add0": parse_sharding("[_@dp, _]"), "add1": parse_sharding("[_@dp, _]")},
        groups=(*(replace(group, path=block.path) for block in graph.blocks), group), cluster="cpu@host:1x4",
        predicted=Prediction(0.0125, 3 * 2**20, 12 * 2**20, tokens_per_second=5120.0, prices=prices(),
                             bytes_by_kind={"parameters": 2**20, "activations": 2 * 2**20}),
        certificate=Certificate(0.0125, 0.0124, "optimal", candidates=(
            SeenCandidate("dp=4 x tp=1", 1, outcome="does not fit"), SeenCandidate("dp=2 x tp=2", 1, 0.0125))),
        notes=("no rule for aten.mystery.default (in blocks.0): replicated",),
    )


def _named(choice: dict[str, str], op: Op, graph: Graph) -> dict[str, str]:
    """The choice in the factor names of the operator's rule: the first dim is the batch, the last the features."""
    from meshwright.compiler.rules import default_rules

    rule = default_rules().rule_for(op, graph)
    batch, last = rule.operands[0][0], rule.operands[0][-1]
    names = {"b0": batch, "dim0": batch, "n": rule.results[0][-1] if rule.results[0] else None, "k": last, "dim1": last}
    return {axis: str(names[factor]) for axis, factor in choice.items()}
