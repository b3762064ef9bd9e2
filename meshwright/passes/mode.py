"""The plan of a model's other mode: the graph that ``eval()`` captures, placed as the plan places what both graphs have.

An operator corresponds to the plan's if it stands at the same place: the same module, the same operator, the same shapes, the
same turn among those. What has no counterpart is replicated, which is always right; where neighbours then disagree, lowering
puts the reshards. Nothing is searched. Gradients are not computed in this mode: no data axes, no ZeRO, one micro-batch; the
ranks of a pipeline compute the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.graph import Graph, Op
from meshwright.ir.plan import GroupChoice, Plan, Schedule
from meshwright.ir.rule import Rules
from meshwright.ir.sharding import Sharding


def in_mode(plan: Plan, graph: Graph, rules: Rules) -> Plan:
    """``plan`` for ``graph``, which is the same model captured in another mode. ``rules``: of every operator of ``graph``.

    Parameters keep their names; where both graphs read one alike it is placed alike.
    """
    planned = dict(_places(plan.graph))
    live = {axis for axis in plan.mesh.axes if plan.mesh.size(axis) > 1}
    assignments: dict[str, dict[str, str]] = {}
    copies: dict[str, Sharding] = {
        name: sharding for name, sharding in plan.copies.items()
        if name in graph.inputs and _shape(graph, name) == _shape(plan.graph, name)
    }
    for place, op in _places(graph):
        twin = planned.get(place)
        if twin is None:
            continue
        assignment = {axis: factor for axis, factor in plan.assignments.get(twin.name, {}).items() if axis in live}
        if assignment and rules[op.name].legal(assignment, plan.mesh, even=False):
            assignments[op.name] = assignment
        shared = zip((*op.outputs, *op.inputs), (*twin.outputs, *twin.inputs), strict=True)
        copies.update((mine, plan.copies[theirs]) for mine, theirs in shared if theirs in plan.copies)
    copies = {name: _over(sharding, live) for name, sharding in copies.items()}
    groups = (*(GroupChoice(block.path) for block in graph.blocks), GroupChoice(""))
    return replace(plan, graph=graph, assignments=assignments, copies=copies, groups=groups, schedule=Schedule(), pipeline=None,
                   predicted=None, certificate=None)


def _over(sharding: Sharding, axes: set[str]) -> Sharding:
    """The sharding over these axes alone."""
    dims = tuple(tuple(axis for axis in split if axis in axes) for split in sharding.dims)
    return Sharding(dims, sharding.partial & axes, sharding.varying & axes, sharding.mirrored & axes)


def _places(graph: Graph) -> Iterator[tuple[object, Op]]:
    """Every operator with its place."""
    turns: Counter[object] = Counter()
    for op in graph.ops:
        kind = op.module, op.target, tuple(_shape(graph, name) for name in (*op.inputs, *op.outputs))
        turns[kind] += 1
        yield (kind, turns[kind]), op


def _shape(graph: Graph, name: str) -> tuple[int, ...] | None:
    return graph.values[name].shape if name in graph.values else None
