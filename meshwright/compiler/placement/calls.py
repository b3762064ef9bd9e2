"""What the call of an operator costs under an assignment, and of attention the most that exchanging a sequence can save.

Where keys pass by all ranks of a sequence attention waits for them, and does not where the sequence is exchanged for heads. A
placement in which the near ranks exchange a sequence for heads becomes one in which they do not, if attention runs as a ring
over all of them and everything else as before. So the first takes no less than the best of the second, less the ring's waits
(``ring_waits``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from meshwright.compiler.placement.costs import BACKWARD, FORWARD, HOST, HOST_BACK, RESOURCES, SAVED, SEND, SEND_BACK, Costs
from meshwright.compiler.placement.tables import Array
from meshwright.compiler.structure.activations import body_shapes, local_shapes, operand_shapes, shares_of
from meshwright.cost.compute import Fused
from meshwright.cost.memory.saved import saved_beside
from meshwright.ir.declared.operator import Operator, Work
from meshwright.ir.graph import Graph, Op
from meshwright.ir.mesh import Mesh
from meshwright.ir.pins import RING, WINDOW
from meshwright.ir.plan import Schedule
from meshwright.ir.rule import OpRule, Placed, Rules, place

PRICED = (FORWARD, BACKWARD, HOST, HOST_BACK, SEND, SEND_BACK)
"""The resources of a call that are seconds, as ``priced`` gives them."""


def work_of(
    op: Op, graph: Graph, where: Placed, mesh: Mesh, read: Sequence[tuple[int, ...]], made: Sequence[tuple[int, ...]]
) -> Work:
    """A call's work on local shapes. ``where``: the shardings; ``read``, ``made``: shapes before they are split."""
    return Work.of(op, graph, local_shapes(where, read, mesh, False), local_shapes(where, made, mesh, True))


def called(
    op: Op, rule: OpRule, assignment: Mapping[str, str], operator: Operator, work: Work, graph: Graph, costs: Costs,
    fused: Fused | None, read: Sequence[tuple[int, ...]], times: int,
) -> Array:
    """Resources of a call under an assignment, which runs so often a step; what it saves is what is neither an operand nor a
    result. ``work``: on local shapes; ``read``: shapes of the operands before they are split."""
    row = np.zeros(RESOURCES)
    seconds = priced(op, rule, assignment, operator, work, graph, costs, fused, read)
    row[list(PRICED)] = np.array(seconds) * times
    row[SAVED] = saved_beside(operator, work)
    return row


def priced(
    op: Op, rule: OpRule, assignment: Mapping[str, str], operator: Operator, work: Work, graph: Graph, costs: Costs,
    fused: Fused | None, read: Sequence[tuple[int, ...]],
) -> tuple[float, float, float, float, float, float]:
    """Seconds of a call under an assignment: forward, backward, of the host, and of what it sends inside. ``work``: on local
    shapes; ``read``: shapes of the operands before they are split."""
    algorithm = next((one for name in assignment.values() if (one := rule.algorithm(name)) is not None), None)
    counted = work if algorithm is None else Work.of(op, graph, algorithm.work(work.operands, read), list(work.results))
    forward, backward, *host = costs.op(op.target, operator, counted, fused)
    ahead, back = costs.measured(op.name, assignment)
    forward, backward = forward * ahead, backward * back
    inside = costs.internal(rule, assignment, shares_of(op, graph, read)) if rule.internal else (0.0, 0.0)
    if algorithm is not None:
        forward, backward, *waits = costs.algorithm(rule, assignment, work.operands, work.reads.itemsize, (forward, backward))
        inside = inside[0] + waits[0], inside[1] + waits[1]
    return forward, backward, host[0], host[1], *inside


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
