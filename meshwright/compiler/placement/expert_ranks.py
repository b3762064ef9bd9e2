"""The placement in which data ranks share out the experts, from the one in which each has them all.

To everything but the mixtures the ranks of ``ep`` are data ranks, so of two placements with the same data, tensor and sequence
ranks only the calls of ``mw.experts`` differ: in their work, in the rows that travel, in the experts that a rank keeps. Solving
each degree anew would give the same choices for all the rest. So the mixtures are priced anew and their rows exchanged, as is
what data ranks exchange otherwise (a sum of the loss), which is two collectives over two axes::

    row.activations[r] += M_r (call with experts split - call with all experts)      M_r: what recomputation r makes of a call

Ranks of the sequence may share them out as well (``Scope.folded``): no other call notices.

A call may split the inner width or the experts over tensor ranks, whichever is faster, as long as it reads and leaves tokens as
before. What of these is fastest is taken to be what a solution of the whole would take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.compiler.placement.calls import called, work_of
from meshwright.compiler.placement.choices import Scope, choices
from meshwright.compiler.placement.costs import BACKWARD, FORWARD, RESOURCES, SAVED, SEND, SEND_BACK, Costs
from meshwright.compiler.placement.problem import AHEAD
from meshwright.compiler.placement.rows import (
    DATA,
    EP,
    NONE,
    DataMove,
    Mixture,
    PlacedPosition,
    Placement,
    SharedExperts,
    call_key,
    over_all,
)
from meshwright.cost.memory.working import copied
from meshwright.ir.declared.operator import Operator
from meshwright.ir.graph import Graph, Op
from meshwright.ir.mesh import SEQUENCE
from meshwright.ir.plan import Schedule
from meshwright.ir.rule import VARYING, OpRule, Placed, factors_of, place
from meshwright.ir.sharding import Sharding

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Ranks:
    """What prices a call on one mesh. ``schedule``: of micro-batches."""

    graph: Graph
    scope: Scope
    costs: Costs
    schedule: Schedule

    def call(self, mixture: Mixture, rule: OpRule, operator: Operator, assignment: Mapping[str, str]) -> tuple[Placed, Array]:
        """Where operands and results lie, and the resources of a micro-batch."""
        op, mesh = mixture.op, self.costs.mesh
        where = place(rule, assignment, mesh, [self.graph.values[name].differentiable for name in op.inputs])
        work = work_of(op, self.graph, where, mesh, *mixture.shapes)
        found = called(op, rule, assignment, operator, work, self.graph, self.costs, None, mixture.shapes[0], 1)
        if not any(self.graph.values[name].differentiable for name in op.outputs):
            found[SAVED] = 0.0
        else:
            found[SAVED] += copied(op, rule, where, self.graph, mesh, self.costs.itemsize)
        return where, found

    def move(self, move: DataMove, into: tuple[str, ...] = (DATA,)) -> Array:
        """Resources of a micro-batch of what data ranks exchange, with ``into`` in the place of their axis."""
        found = np.zeros(RESOURCES)
        have, want = over_all(move.have, into), over_all(move.want, into)
        seconds = self.costs.reshard(have, want, move.bytes_, move.differentiable, move.by_linears)
        assert seconds is not None, "it is a way over one axis, so there is one over two"
        found[[SEND, SEND_BACK]] = np.array(seconds) * move.often
        return found

    def weights(self, mixture: Mixture, operator: Operator, where: Placed, assignment: Mapping[str, str]) -> float:
        """Seconds of a micro-batch's backward that only weights wait for."""
        op, graph = mixture.op, self.graph
        weights = {param.value for param in graph.params if param.trainable}
        both = work_of(op, graph, where, self.costs.mesh, *mixture.shapes)
        return self.costs.waited_for(op, operator, assignment, both, weights)


def shared_out(base: Placement, ranks: Ranks, before: Ranks) -> Placement | None:
    """The placement on the mesh of ``ranks``, from one on the mesh of ``before``, whose data ranks are as many; None where a
    mixture cannot be split so, placed as it is."""
    into = _into(ranks)
    splits: dict[object, dict[str, str]] = {}
    rows = []
    for row in base.rows:
        changed = _row(row, ranks, before, into, splits)
        if changed is None:
            return None
        rows.append(changed)
    once = [row.activations[NONE] for row in rows]
    each = [(base.time_rows @ one).max() + (base.time_rows @ (one @ AHEAD)).max() * row.ahead
            for one, row in zip(once, rows, strict=True)]
    seconds = float(sum(each[number] for number in base.sequence))
    return replace(
        base, rows=tuple(rows), seconds=seconds, bound=seconds * base.slack, shared=SharedExperts(into, splits),
    )


def dearer(base: Placement, ranks: Ranks, before: Ranks) -> float:
    """Seconds by which any placement on the mesh of ``ranks`` is slower at least than the best on that of ``before``, whatever
    its mixtures read and leave: below 0 where splitting experts saves, -inf where its calls are like none of the other mesh.
    With all experts on every rank it would be a placement of that mesh, so

        seconds of it >= seconds of the best there + min over its calls of (
            max over calls there that read and leave tokens as it does of (least of what either may wait for))

    where what a row waits for is the longest of several sums (``Placement.time_rows``).
    """
    into, known, found = _into(ranks), dict[object, float](), 0.0
    rules = ranks.scope.structure.rules
    for number in base.sequence:
        row = base.rows[number]
        for mixture in row.mixtures:
            op, key = mixture.op, (call_key(mixture.op.args[0], mixture.assignment), row.ahead)
            if key not in known:
                rule, operator, makes = rules[op.name], rules.operators[op.target], mixture.recomputed[NONE]
                whole: dict[tuple[Sharding, ...], list[Array]] = {}
                for _, placed, vector in _calls(mixture, rule, operator, before):
                    whole.setdefault(tuple(over_all(one, into) for one in _ends(op, placed)), []).append(vector)
                known[key] = min(
                    (max((_least(base, (vector - one) @ makes, row.ahead) for one in whole.get(_ends(op, placed), ())),
                         default=-np.inf)
                     for _, placed, vector in _splits(mixture, rule, operator, ranks)), default=np.inf,
                )
            found += known[key]
        found += sum(_least(base, (ranks.move(move, into) - before.move(move)) @ move.recomputed[NONE], row.ahead)
                     for move in row.moves)
    return found


def _least(base: Placement, more: Array, ahead: float) -> float:
    """Seconds at least by which a row takes longer for so much more."""
    return float((base.time_rows @ more).min() + (base.time_rows @ (more @ AHEAD)).min() * ahead)


def _into(ranks: Ranks) -> tuple[str, ...]:
    """The axes in the place of the data axis."""
    mesh = ranks.costs.mesh
    return (DATA,) if EP not in mesh.axes else (DATA, EP) if mesh.size(DATA) > 1 else (EP,)


def _row(
    row: PlacedPosition, ranks: Ranks, before: Ranks, into: tuple[str, ...], splits: dict[object, dict[str, str]]
) -> PlacedPosition | None:
    """One row; ``splits`` gathers how mixtures are split, by what they are and how they were."""
    activations, weight, moved = dict(row.activations), row.weight, dict[str, Sharding]()
    rules = ranks.scope.structure.rules
    for mixture in row.mixtures:
        op, key = mixture.op, call_key(mixture.op.args[0], mixture.assignment)
        rule, operator = rules[op.name], rules.operators[op.target]
        found = splits.get(key) or _best(mixture, rule, operator, ranks, into)
        if found is None:
            return None
        splits[key] = found
        where, after = ranks.call(mixture, rule, operator, found)
        was, once = before.call(mixture, rule, operator, mixture.assignment)
        activations = {kind: vector + (after - once) @ mixture.recomputed[kind] for kind, vector in activations.items()}
        weight += ranks.weights(mixture, operator, where, found)
        weight -= before.weights(mixture, operator, was, mixture.assignment)
        moved.update(zip(op.inputs, where.operands, strict=True))
    for move in row.moves:
        more = ranks.move(move, into) - before.move(move)
        activations = {kind: vector + more @ move.recomputed[kind] for kind, vector in activations.items()}
    uses = tuple(replace(use, need=moved.get(use.value.name) or over_all(use.need, into)) for use in row.uses)
    return replace(row, activations=activations, weight=weight, uses=uses)


def _best(
    mixture: Mixture, rule: OpRule, operator: Operator, ranks: Ranks, into: tuple[str, ...]
) -> dict[str, str] | None:
    """The fastest way to split a mixture's experts that reads and leaves tokens as before."""
    wanted = tuple(over_all(one, into) for one in _ends(mixture.op, mixture.placed))
    alike = [(float(vector[[FORWARD, BACKWARD, SEND, SEND_BACK]].sum()), assignment)
             for assignment, placed, vector in _splits(mixture, rule, operator, ranks) if _ends(mixture.op, placed) == wanted]
    return min(alike, key=lambda one: one[0], default=(0.0, None))[1]


def _splits(
    mixture: Mixture, rule: OpRule, operator: Operator, ranks: Ranks
) -> Iterator[tuple[dict[str, str], Placed, Array]]:
    """All calls in which every rank that may share out the experts does."""
    mesh = ranks.costs.mesh
    over = [axis for axis in mesh.axes if axis == EP or (ranks.scope.folded and ranks.scope.roles[axis] == SEQUENCE)]
    for assignment, placed, vector in _calls(mixture, rule, operator, ranks):
        if all(len(factors_of(assignment.get(axis, VARYING))) > 1 for axis in over if mesh.size(axis) > 1):
            yield assignment, placed, vector


def _calls(
    mixture: Mixture, rule: OpRule, operator: Operator, ranks: Ranks
) -> Iterator[tuple[dict[str, str], Placed, Array]]:
    """All ways to split a call: the factors of the axes, where its tensors lie, its resources."""
    for assignment in choices(mixture.op, rule, ranks.scope, ranks.schedule.time.get(mixture.op.name)):
        yield assignment, *ranks.call(mixture, rule, operator, assignment)


def _ends(op: Op, placed: Placed) -> tuple[Sharding, ...]:
    """How a mixture reads tokens and leaves them."""
    return *placed.operands[: len(op.inputs) - len(op.args[4])], *placed.results
