"""Every operator with a rule can be placed, whatever stands around it: what cannot be split is run whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch

from meshwright.compiler.placement.choices import Scope, choices
from meshwright.compiler.placement.costs import Costs
from meshwright.compiler.placement.dead_end import nothing_runs
from meshwright.compiler.placement.problem import Problem
from meshwright.compiler.search.candidates import Layout
from meshwright.compiler.search.layouts import variants
from meshwright.compiler.solver.chain import Infeasible
from meshwright.compiler.solver.solve import solve
from meshwright.compiler.structure.structure import Structure
from meshwright.cost.cluster import Cluster
from meshwright.ir.graph import Graph, Op, Param, Ref, Value
from meshwright.ir.mesh import Mesh, role_of
from meshwright.ir.pins import Pins
from meshwright.ir.rule import Rules
from meshwright.planner import rules_of
from meshwright.testing import OperatorRun, whole_run
from tests.rule_samples import SAMPLES

LAYOUTS: Mapping[str, tuple[Mesh, Pins, bool]] = {
    "dp 2 x tp 2": (Mesh.of(dp=2, tp=2), Pins(dp=2, tp=2, zero=3), True),
    "dp 3 x tp 3": (Mesh.of(dp=3, tp=3), Pins(dp=3, tp=3, zero=2), False),
    "free": (Mesh.of(x=2), Pins(), True),
}
"""{name: (mesh, pins, whether operands are weights)}.
Sizes of samples are 2, 4, 6 and 8: three ranks split them unevenly, or not at all."""
CLUSTER = Cluster.parse("cpu:1x16")


def surrounded(run: OperatorRun, weights: bool) -> Graph:
    """The operator between others: operands are made from inputs by a trained number, or, ``weights``, are parameters but for
    the first; results go into a loss."""
    values, inputs, params = dict[str, Value](), list[str](), [Param("gain", ("gain",), True)]
    values["gain"] = Value("gain", (), torch.float32, True)
    ops = list[Op]()
    for index, (name, learns) in enumerate(zip(run.graph.inputs, run.differentiable, strict=True)):
        value = run.graph.values[name]
        if learns and weights and index:
            params.append(Param(name, (name,), True))
            values[name] = Value(name, value.shape, value.dtype, True)
        elif learns:
            inputs.append(f"{name}_in")
            values[f"{name}_in"] = Value(f"{name}_in", value.shape, value.dtype)
            values[name] = Value(name, value.shape, value.dtype, True)
            ops.append(Op(f"{name}_made", "aten.mul.Tensor", (Ref(f"{name}_in"), Ref("gain")), (), (name,)))
        else:
            inputs.append(name)
            values[name] = value
    learned = [value for name in run.op.outputs if (value := run.graph.values[name]).dtype.is_floating_point]
    learns = any(run.differentiable)
    values |= {name: Value(name, run.graph.values[name].shape, run.graph.values[name].dtype,
                           learns and run.graph.values[name].dtype.is_floating_point) for name in run.op.outputs}
    ops.append(run.op)
    sums = []
    for value in learned:
        turned, total = f"{value.name}_turned", f"{value.name}_total"
        values[turned] = Value(turned, value.shape, value.dtype, learns)
        values[total] = Value(total, (), value.dtype, learns)
        ops += [Op(turned, "aten.neg.default", (Ref(value.name),), (), (turned,)),
                Op(total, "aten.sum.default", (Ref(turned),), (), (total,))]
        sums.append(total)
    loss = sums[0] if sums and learns else None
    tree = tuple(Ref(name) for name in dict.fromkeys((*run.op.outputs, *sums)))
    return Graph(values, tuple(inputs), tuple(params), tuple(ops), tree, loss=loss)


def problem(graph: Graph, rules: Rules, mesh: Mesh, pins: Pins) -> tuple[Scope, Problem]:
    structure, roles = Structure(graph, rules), {axis: role_of(axis) for axis in mesh.axes}
    scope = Scope(structure, mesh, roles, pins, 1)
    kept = variants(Layout(mesh, roles), pins, 1, ("none",))
    costs = Costs(CLUSTER, mesh, microbatches=1, itemsize=4, state_bytes=8)
    return scope, Problem(scope, structure.schedule(1), costs, kept, kept)


def faults(target: str) -> Iterator[str]:
    torch.manual_seed(0)
    for sample in SAMPLES[target]():
        run = whole_run(target, sample.args, sample.kwargs, sample.fixed)
        for name, (mesh, pins, weights) in LAYOUTS.items():
            graph = surrounded(run, weights)
            rules, _ = rules_of(graph)
            scope, one = problem(graph, rules, mesh, pins)
            if name == "free" and {} not in choices(run.op, rules[run.op.name], scope, None):
                yield f"{run.op}, {name}: whole is no choice"
            try:
                solve(one.chain(np.inf, 0.0), gap=0.1)
            except Infeasible:
                yield f"{run.op}, {name}: {nothing_runs(one)}"


@pytest.mark.parametrize("target", sorted(SAMPLES))
def test_every_operator_can_be_placed(target: str) -> None:
    assert list(faults(target)) == []
