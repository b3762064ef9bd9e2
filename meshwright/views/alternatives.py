"""What an operator's other choices would cost, everything else at its best for them.

The placement problem of the plan's own layout is built again (``compiler.placement.problem``): same mesh, micro-batches and
ways to keep parameters, so only choices stand in it that this plan could have had. For one operator every choice is priced by
variable elimination: the best of all other operators, and of all other blocks, given that choice::

    price(a) = min { seconds of all positions : the operator, in every equal block, takes choice a }

A block's seconds are the largest of several sums of its resources; the sum that binds is held fixed while choosing (it bounds
the price from below), and what was chosen is then counted exactly. Seconds are those of a step, in a pipeline of the mean
rank. How many micro-batches, stages and ranks there are stays as planned.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.compiler.placement.blockmodel import ROOT, Model
from meshwright.compiler.placement.choices import Scope, near_of
from meshwright.compiler.placement.costs import Variant
from meshwright.compiler.placement.problem import Problem
from meshwright.compiler.solver.chain import Array, Chain
from meshwright.compiler.solver.elimination import Eliminated, Eliminator, Tables
from meshwright.compiler.structure.folding import fold
from meshwright.compiler.structure.structure import Structure
from meshwright.ir.graph import Op
from meshwright.ir.mesh import PP, Mesh, role_of
from meshwright.ir.pins import Pins
from meshwright.ir.plan import GroupChoice
from meshwright.ir.quantities import seconds_text
from meshwright.ir.rule import Rules, folded
from meshwright.views.facts import Facts
from meshwright.views.prices import costs_of

WORK = 1 << 23
"""Table entries of one operator's elimination above which it is not tried."""
COMBINATIONS = 24
"""States of what several positions share that are all tried; of more, the planned one."""
SHOWN = 8


@dataclass(frozen=True)
class Alternative:
    """One choice of an operator. ``seconds``: of a step, the best with it; ``bytes_``: held over a step for one micro-batch;
    ``why``: what takes longer than under the planned choice; ``chosen``: it is the planned one."""

    assignment: Mapping[str, str]
    seconds: float
    bytes_: float
    why: str
    chosen: bool


@dataclass(frozen=True)
class _Alternative:
    """The whole chain with one choice: its weighted sum, and the assignment of every (kind, variant, entry, exit) used."""

    value: float
    path: tuple[tuple[int, int, tuple[int, ...]], ...]


class Alternatives:
    """The choices of one plan's operators. Raises ClusterError if its cluster is not in the catalogue, PlanError where the
    problem cannot be built."""

    def __init__(self, facts: Facts) -> None:
        self.facts, plan = facts, facts.plan
        self.folded = fold(plan.graph, facts.rules.operators)
        graph = self.folded.graph
        axes = [axis for axis in plan.mesh.axes if axis != PP]
        mesh = Mesh(tuple(axes), tuple(plan.mesh.size(axis) for axis in axes), plan.mesh.mirrored)
        rules = Rules({op.name: facts.rules[op.name] for op in graph.ops}, facts.rules.operators)
        count = plan.schedule.microbatches
        structure = Structure(graph, rules)
        roles = {axis: role_of(axis) for axis in axes}
        kept = list(dict.fromkeys(map(_variant, plan.groups[:-1]))) or [_variant(plan.groups[-1])]
        costs = costs_of(plan, mesh)
        scope = Scope(
            structure, mesh, roles, Pins(), count, cluster=costs.network.cluster,
            near=near_of(plan.assignments), folded=folded(plan.assignments.values()),
        )
        self.problem = Problem(scope, structure.schedule(count), costs, kept, [_variant(plan.groups[-1])])
        self.chain: Chain = self.problem.chain(math.inf, 0.0)
        self._tables = Tables()
        self._rows: dict[tuple[int, int], Array] = {}
        self._plain: dict[tuple[int, int, tuple[int, ...]], tuple[Array, Eliminated]] = {}
        self.places = self._find()

    def of(self, op: Op) -> list[Alternative] | None:
        """Every choice of an operator that can run, best first; None where there are too many to price."""
        place = self.places.get(op.name)
        if place is None:
            return None
        kind, model, var = place
        if len(model.op_choices[var]) < 2:
            return []
        priced = self._alternatives(kind, var)
        if priced is None:
            return None
        planned = dict(self.facts.plan.assignments.get(op.name, {}))
        chosen = next((n for n, choice in enumerate(model.op_choices[var]) if choice == planned), None)
        base = priced[chosen] if chosen is not None else min(priced, key=lambda one: one.value)
        found = []
        for number, (choice, one) in enumerate(zip(model.op_choices[var], priced, strict=True)):
            if math.isfinite(one.value):
                seconds, bytes_ = self._counted(one)
                why = "" if one is base else self._why(base, one)
                found.append(Alternative(choice, seconds, bytes_, why, number == chosen))
        return sorted(found, key=lambda one: (one.seconds, not one.chosen, sorted(one.assignment.items())))

    # where operators stand

    def _find(self) -> dict[str, tuple[int, Model, int]]:
        """{operator: its kind of position, the model, the variable}, of every copy."""
        found = {}
        for number, at in enumerate(self.folded.serves):
            model, kind = self.problem.model(at), self.chain.sequence[at]
            for var, op in enumerate(self.folded.positions[number].ops(self.facts.plan.graph)):
                found[op.name] = kind, model, var
        return found

    @cached_property
    def _sequence(self) -> tuple[tuple[int, int], ...]:
        """(kind, variant) of every position of the whole graph, kept as planned."""
        groups, found = self.facts.plan.groups, []
        for number, at in enumerate(self.folded.serves):
            block = self.folded.positions[number].block
            kind = self.chain.sequence[at]
            variants = len(self.chain.kinds[kind].variants)
            wanted = self.problem.block_variants.index(_variant(groups[block])) if block >= 0 else 0
            found.append((kind, wanted if wanted < variants else 0))
        return tuple(found)

    @cached_property
    def _fixed(self) -> list[tuple[int, ...]]:
        """Combinations of the states of what positions share; a position has its own choice of what is not in it."""
        sizes = self.chain.shared_sizes
        if math.prod(sizes) <= COMBINATIONS:
            return list(itertools.product(*(range(size) for size in sizes)))
        names: dict[int, tuple[str, Model]] = {}
        for number in set(self.folded.serves):
            model, kind = self.problem.model(number), self.chain.kinds[self.chain.sequence[number]]
            for (name, _), (shared, _) in zip(model.shared, kind.shared, strict=True):
                names.setdefault(shared, (name, model))
        return [tuple(self._planned(*names[shared]) if shared in names else 0 for shared in range(len(sizes)))]

    def _planned(self, name: str, model: Model) -> int:
        """The state in which the plan has what positions share; the first where it is none of them."""
        if name == ROOT or name not in model.states:
            return 0
        states, plan = model.states[name][1], self.facts.plan
        maker = plan.graph.producers.get(name)
        if maker is None:
            have = self.facts.stored[name].tensor if name in self.facts.stored else None
        else:
            op = plan.graph.ops[maker]
            have = self.facts.placed[op.name].results[op.outputs.index(name)]
        return next((n for n, state in enumerate(states) if have is not None and state.at_rest() == have.at_rest()), 0)

    # prices

    def _row(self, kind: int, variant: int) -> Array:
        """The weights of the sum that binds a block: the one whose least is largest."""
        if (kind, variant) not in self._rows:
            block = self.chain.kinds[kind].variants[variant]
            eliminator = Eliminator(block, (), self._tables)
            least = [float(eliminator.table(row).table) for row in self.chain.time_rows]
            self._rows[kind, variant] = self.chain.time_rows[int(np.argmax(least))]
        return self._rows[kind, variant]

    def _forbidden(self, kind: int, fixed: tuple[int, ...]) -> dict[int, Array]:
        """Extra costs that hold shared variables where they are fixed."""
        extra = {}
        for number, var in self.chain.kinds[kind].shared:
            costs = np.full(self.chain.shared_sizes[number], np.inf)
            costs[fixed[number]] = 0.0
            extra[var] = costs
        return extra

    def _table(self, kind: int, variant: int, fixed: tuple[int, ...], more: tuple[int, ...] = ()) -> tuple[Array, Eliminated]:
        """[entry, exit, *more]: the least of a block between its ends, and what finds its choices."""
        key = (kind, variant, fixed)
        if not more and key in self._plain:
            return self._plain[key]
        one = self.chain.kinds[kind]
        keep = (*one.entry, *one.exit, *more)
        eliminator = Eliminator(one.variants[variant], keep, self._tables)
        found = eliminator.table(self._row(kind, variant), self._forbidden(kind, fixed))
        order = sorted(set(keep))
        table = found.table.transpose([order.index(var) for var in keep])
        sizes = [one.variants[variant].sizes[var] for var in more]
        shaped = table.reshape(one.states(one.entry), one.states(one.exit), *sizes)
        if not more:
            self._plain[key] = shaped, found
        return shaped, found

    def _alternatives(self, kind: int, var: int) -> list[_Alternative] | None:
        """The best chain for every choice of a variable of a kind, in all its positions."""
        one = self.chain.kinds[kind]
        work = Eliminator(one.variants[0], (*one.entry, *one.exit, var), self._tables).plan.work
        if work * len(self._fixed) > WORK:
            return None
        best: list[_Alternative] = []
        for number in range(one.variants[0].sizes[var]):
            found = (self._alternative(kind, var, number, fixed) for fixed in self._fixed)
            best.append(min(found, key=lambda one: one.value))
        return best

    def _alternative(self, kind: int, var: int, choice: int, fixed: tuple[int, ...]) -> _Alternative:
        steps = []
        for at, variant in self._sequence:
            table = self._with(at, variant, fixed, var)[0][:, :, choice] if at == kind else self._table(at, variant, fixed)[0]
            steps.append(table)
        value, states = _shortest(steps)
        if not math.isfinite(value):
            return _Alternative(math.inf, ())
        known: dict[object, tuple[int, ...]] = {}
        path = []
        for (at, variant), ends in zip(self._sequence, states, strict=True):
            if (at, variant, ends) not in known:
                held = (var, choice) if at == kind else None
                known[at, variant, ends] = self._assigned(at, variant, fixed, ends, held)
            path.append((at, variant, known[at, variant, ends]))
        return _Alternative(value, tuple(path))

    def _with(self, kind: int, variant: int, fixed: tuple[int, ...], var: int) -> tuple[Array, Eliminated]:
        key = (kind, variant, fixed, var)
        if key not in self._more:
            if len(self._more) > 4 * len(self.chain.kinds):
                self._more.clear()
            self._more[key] = self._table(kind, variant, fixed, (var,))
        return self._more[key]

    @cached_property
    def _more(self) -> dict[tuple[int, int, tuple[int, ...], int], tuple[Array, Eliminated]]:
        return {}

    def _assigned(
        self, kind: int, variant: int, fixed: tuple[int, ...], ends: tuple[int, int], at: tuple[int, int] | None
    ) -> tuple[int, ...]:
        """The choices of a position between two ends."""
        one = self.chain.kinds[kind]
        sizes = one.variants[variant].sizes
        kept: dict[int, int] = {}
        for boundary, state in ((one.entry, ends[0]), (one.exit, ends[1])):
            for var in reversed(boundary):
                state, kept[var] = divmod(state, sizes[var])
        if at is not None:
            kept[at[0]] = at[1]
        found = self._with(kind, variant, fixed, at[0])[1] if at is not None else self._table(kind, variant, fixed)[1]
        row = found.assignments(np.array([[kept[var] for var in sorted(kept)]], dtype=np.intp))[0]
        choices = [int(number) for number in row]
        for shared, var in one.shared:
            choices[var] = fixed[shared]
        return tuple(choices)

    def _counted(self, one: _Alternative) -> tuple[float, float]:
        """(seconds, bytes), exactly, of the mean rank."""
        known: dict[object, tuple[float, float]] = {}
        seconds = bytes_ = 0.0
        for key in one.path:
            if key not in known:
                kind, variant, choices = key
                cost = self.chain.kinds[kind].variants[variant].cost(choices)
                known[key] = self.chain.time(cost), float(self.chain.bytes_row @ cost)
            seconds, bytes_ = seconds + known[key][0], bytes_ + known[key][1]
        stages = 1 if self.facts.plan.pipeline is None else self.facts.plan.pipeline.degree
        return seconds / stages, bytes_ / stages

    # why

    def _why(self, base: _Alternative, other: _Alternative) -> str:
        """The part that costs the other way most more than the planned one."""
        more: dict[str, float] = {}
        steps = Counter((one, new) for one, (_, _, new) in zip(base.path, other.path, strict=True))
        for ((kind, variant, old), new), times in steps.items():
            if old != new:
                for label, seconds in self._differences(kind, variant, old, new):
                    more[label] = more.get(label, 0.0) + times * seconds
        if not more:
            return "the same"
        label = max(more, key=lambda name: more[name])
        stages = 1 if self.facts.plan.pipeline is None else self.facts.plan.pipeline.degree
        return f"{label}: +{seconds_text(more[label] / stages)}" if more[label] > 0 else "ties"

    def _differences(
        self, kind: int, variant: int, old: Sequence[int], new: Sequence[int]
    ) -> Iterator[tuple[str, float]]:
        block, row = self.chain.kinds[kind].variants[variant], self._row(kind, variant)
        at = self.chain.sequence.index(kind)
        model, ops = self.problem.model(at), self.problem.positions[self.problem.serves(at)].ops(self.folded.graph)
        for var, (a, b) in enumerate(zip(old, new, strict=True)):
            if a != b:
                change = float(row @ (block.unary[var][b] - block.unary[var][a]))
                yield f"{_label(var, model, ops)} itself", change
        for edge in block.edges:
            if old[edge.i] != new[edge.i] or old[edge.j] != new[edge.j]:
                more = edge.cost(new[edge.i], new[edge.j]) - edge.cost(old[edge.i], old[edge.j])
                yield f"moving from {_label(edge.i, model, ops)} to {_label(edge.j, model, ops)}", float(row @ more)


def _shortest(steps: Sequence[Array]) -> tuple[float, list[tuple[int, int]]]:
    """The least sum along a chain of tables [entry, exit], and the states at the ends of each."""
    totals = [np.zeros(steps[0].shape[0])]
    for table in steps:
        totals.append((totals[-1][:, None] + table).min(axis=0))
    value = float(totals[-1].min())
    if not math.isfinite(value):
        return value, []
    state = int(totals[-1].argmin())
    states: list[tuple[int, int]] = []
    for total, table in zip(reversed(totals[:-1]), reversed(steps), strict=True):
        before = int((total + table[:, state]).argmin())
        states.append((before, state))
        state = before
    return value, states[::-1]


def _label(var: int, model: Model, ops: Sequence[Op]) -> str:
    if var < len(ops):
        op = ops[var]
        where = op.module.rsplit(".", 1)[-1]
        return f"{where}'s {op.target.split('.')[1]}" if where else op.target.split(".")[1]
    for name, (number, _) in model.copies.items():
        if number == var:
            return f"the copy of %{name} that its readers share"
    return next((f"%{name}" for name, (number, _) in model.states.items() if number == var), "its parameters")


def _variant(group: GroupChoice) -> Variant:
    return Variant(group.zero, group.data_axes, group.shard_axes, group.recompute)
