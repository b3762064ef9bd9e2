"""What attention waits for where keys pass by all ranks of a sequence: the most that exchanging it for heads can save.

A placement in which the near ranks exchange a sequence for heads becomes one in which they do not, if attention runs as a ring
over all of them and everything else as before. So the first takes no less than the best of the second, less the ring's waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwright.compiler.placement.blockmodel import called, work_of
from meshwright.compiler.placement.costs import SEND, SEND_BACK, Costs
from meshwright.compiler.structure.activations import body_shapes, operand_shapes
from meshwright.ir.graph import Graph, Op
from meshwright.ir.pins import RING, WINDOW
from meshwright.ir.plan import Schedule
from meshwright.ir.rule import Rules, place


def ring_waits(
    ops: Iterable[Op], graph: Graph, rules: Rules, costs: Costs, schedule: Schedule, context: str, tensor: str
) -> float:
    """Seconds of a micro-batch in which the attention among ``ops`` waits for what passes by over the axis ``context``, heads
    split over ``tensor``; infinite where one can run neither in a ring nor in a window."""
    shapes, total, known = body_shapes(graph, rules, schedule), 0.0, dict[str, float]()
    for op in ops:
        if rules[op.name].algorithms:
            if op.name not in known:
                known[op.name] = _waits(op, graph, rules, costs, schedule, shapes, context, tensor)
            total += known[op.name]
    return total


def _waits(
    op: Op, graph: Graph, rules: Rules, costs: Costs, schedule: Schedule, shapes: Mapping[str, tuple[int, ...]],
    context: str, tensor: str,
) -> float:
    rule = rules[op.name]
    algorithm = next((name for name in (RING, WINDOW) if name in rule.algorithms), None)
    if algorithm is None:
        return float("inf")
    heads = next(iter(rule.inner), None)
    assignment = {context: algorithm, **({tensor: heads} if heads is not None and costs.mesh.size(tensor) > 1 else {})}
    where = place(rule, assignment, costs.mesh, [graph.values[name].differentiable for name in op.inputs])
    read, made = operand_shapes(op, graph, rule, schedule), [shapes[name] for name in op.outputs]
    work = work_of(op, graph, where, costs.mesh, read, made)
    row = called(op, rule, assignment, rules.operators[op.target], work, graph, costs, None, read, 1)
    return float(row[SEND] + row[SEND_BACK])
