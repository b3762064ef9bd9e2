"""Properties of a graph that no placement changes: shapes within a micro-batch, and what autograd keeps.

A value is *saved* if the backward of some operator needs it (``Saves``); views hand their saved result on to what
they view. What only linears save may be kept as the shard that a gather started from, and gathered again in the backward
(Korthikanti et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.compiler.structure.microbatch import made_alone
from meshwright.cost.memory.saved import saved_for_backward
from meshwright.ir.declared.operator import Operators
from meshwright.ir.graph import Graph, Op
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import Schedule
from meshwright.ir.rule import OpRule, Placed

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """Values kept for the backward; those of them that only linears keep, and views by which only linears keep something; those
    of them that their own maker keeps; views through which such values are kept, and those of them whose value is kept itself
    as well."""

    values: frozenset[str]
    by_linears: frozenset[str]
    by_makers: frozenset[str]
    by_views: frozenset[str]
    besides: frozenset[str]


def body_shapes(graph: Graph, rules: Mapping[str, OpRule], schedule: Schedule) -> dict[str, Shape]:
    """The shape of every value within one micro-batch."""
    shapes = {name: value.shape for name, value in graph.values.items()}
    for op in graph.ops:
        factor = schedule.time.get(op.name)
        if factor is None or factor.startswith("+"):
            continue
        for name, dims in zip(op.outputs, rules[op.name].results, strict=True):
            shapes[name] = _cut(shapes[name], dims, factor, schedule.microbatches)
    return shapes


def operand_shapes(op: Op, graph: Graph, rule: OpRule, schedule: Schedule) -> list[Shape]:
    """The shapes of an operator's operands within one micro-batch (a value of the prologue is cut where it enters)."""
    factor = schedule.time.get(op.name)
    shapes = [graph.values[name].shape for name in op.inputs]
    if factor is None:
        return shapes
    return [_cut(shape, dims, factor, schedule.microbatches) for shape, dims in zip(shapes, rule.operands, strict=True)]


def shares_of(op: Op, graph: Graph, read: Sequence[Shape]) -> list[float]:
    """The part of every operand that is there at a time; ``read``: their shapes within a micro-batch."""
    return [math.prod(shape) / max(1, graph.values[name].numel) for name, shape in zip(op.inputs, read, strict=True)]


def local_shapes(placed: Placed, shapes: Sequence[tuple[int, ...]], mesh: Mesh, results: bool) -> list[tuple[int, ...]]:
    """Local shapes of an operator's operands or results; ``shapes`` are those of the whole micro-batch."""
    return [s.local_shape(shape, mesh) for s, shape in zip(placed.results if results else placed.operands, shapes, strict=True)]


def _cut(shape: Shape, dims: tuple[str | None, ...], factor: str, count: int) -> Shape:
    if factor not in dims:
        return shape
    dim = dims.index(factor)
    return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])


def saved_values(graph: Graph, operators: Operators) -> Saved:
    """What autograd keeps of a graph, through views; what is made of inputs alone is there anyway."""
    shows: dict[str, tuple[str, ...]] = {}  # of a view, what it is made of: a value, and the views between
    for op in graph.ops:
        if operators[op.target].kind == "view" and op.inputs:
            source = op.inputs[0]
            shows.update(dict.fromkeys(op.outputs, (*shows[source], source) if source in shows else (source,)))
    outside = {param.value for param in graph.params}.union(graph.inputs, made_alone(graph, operators))
    ways: dict[str, set[tuple[str, ...]]] = {}  # of a value that is kept, the views on the way to each operand that keeps it
    other, makers, kept, shown = set[str](), set[str](), set[str](), set[str]()
    for op in graph.ops:
        operands, results = saved_for_backward(op, graph, operators)
        makers.update(op.outputs[i] for i in results)
        if not any(graph.values[name].differentiable for name in op.outputs):
            continue
        for name in [op.inputs[i] for i in operands] + [op.outputs[i] for i in results]:
            of = shows.get(name, (name,))[0]
            if name in outside or of in outside:
                continue
            way = (*shows[name][1:], name) if name in shows else ()
            ways.setdefault(of, set()).add(way)
            kept.update({name} & shows.keys())
            shown.update(way if operators[op.target].linear is None else ())
            if operators[op.target].linear is None or name in shows:
                other.add(of)
    saved = frozenset(ways)
    views, besides = (
        frozenset(view for found in among for way in found for view in way)
        for among in (ways.values(), [found for found in ways.values() if () in found])
    )
    return Saved(saved, (saved - other) | (kept - shown), frozenset(makers & saved), views, besides)
