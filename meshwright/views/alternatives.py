"""What an operator's other choices would cost, everything else at its best for them.

The placement problem of the plan's own layout is built again (``compiler.placement.problem``): same mesh, micro-batches and
ways to keep parameters, so only choices stand in it that this plan could have had. For one operator every choice is priced by
variable elimination: the best of all other operators, and of all other blocks, given that choice::

    price(a) = min { seconds of all positions : the operator, in every equal block, takes choice a }

What several positions share (a tied weight, a table of positions) takes part, unless that makes tables too large: then it lies
as planned. A block's seconds are the largest of several sums of its resources; the sum that binds is held fixed while choosing
(it bounds the price from below), and what was chosen is then counted exactly. Seconds are those of a step, in a pipeline of the
mean rank. How many micro-batches, stages and ranks there are stays as planned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.compiler.placement.blockmodel import ROOT, Model
from meshwright.compiler.placement.choices import Scope, near_of
from meshwright.compiler.placement.costs import Variant
from meshwright.compiler.placement.problem import Problem
from meshwright.compiler.solver.chain import Array, Chain
from meshwright.compiler.solver.elimination import Eliminated, EliminationPlan, Eliminator, Tables
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
_FAR = 2
"""Times as many entries without it: then no order is looked for that keeps the operator."""
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


@dataclass(frozen=True, slots=True)
class _Position:
    """A position of the chain: the states of what it shares with others (``free``: found, not as planned), those at both
    ``ends``, and the ``choice`` that is held in it, if one is."""

    kind: int
    variant: int
    free: bool
    shared: tuple[int, ...]
    ends: tuple[int, int]
    choice: int | None


@dataclass(frozen=True, slots=True)
class _Run:
    """The whole chain with one choice: its weighted sum, and its positions; none where it cannot run."""

    value: float
    positions: tuple[_Position, ...]


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
    def _fixed(self) -> tuple[int, ...]:
        """The states that the plan has of what positions share, where not all of them are tried."""
        names: dict[int, tuple[str, Model]] = {}
        for number in set(self.folded.serves):
            model, kind = self.problem.model(number), self.chain.kinds[self.chain.sequence[number]]
            for (name, _), (shared, _) in zip(model.shared, kind.shared, strict=True):
                names.setdefault(shared, (name, model))
        sizes = self.chain.shared_sizes
        return tuple(self._planned(*names[shared]) if shared in names else 0 for shared in range(len(sizes)))

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

    def _forbidden(self, kind: int) -> dict[int, Array]:
        """Extra costs that hold shared variables where they are fixed."""
        extra = {}
        for number, var in self.chain.kinds[kind].shared:
            costs = np.full(self.chain.shared_sizes[number], np.inf)
            costs[self._fixed[number]] = 0.0
            extra[var] = costs
        return extra

    def _keeps(self, kind: int, free: bool, more: tuple[int, ...] = ()) -> tuple[int, ...]:
        """What stays in a block's table: ``free``: what positions share too."""
        one = self.chain.kinds[kind]
        return (*(var for _, var in sorted(one.shared) if free), *more, *one.entry, *one.exit)

    def _plan(self, kind: int, variant: int, free: bool, more: tuple[int, ...] = ()) -> EliminationPlan:
        """How a block's other variables are eliminated: with ``more`` to keep in the same order, as far as that is quick."""
        block, plain = self.chain.kinds[kind].variants[variant], self._keeps(kind, free)
        known = self._tables.plan(block, plain)
        return self._tables.plan(block, self._keeps(kind, free, more), plain, WORK) if more else known

    @cached_property
    def _free(self) -> bool:
        """Whether all states of what positions share are tried."""
        kinds = self.chain.kinds
        apart = all(len({*keeps}) == len(keeps) for keeps in (self._keeps(kind, True) for kind in range(len(kinds))))
        states = math.prod(self.chain.shared_sizes) * max(one.states(one.exit) for one in kinds) * len(self._sequence)
        return apart and states <= WORK and all(self._plan(kind, 0, True).work <= WORK for kind in range(len(kinds)))

    def _table(self, kind: int, variant: int, free: bool, var: int | None = None) -> tuple[Array, Eliminated]:
        """[a dim for every shared variable, choice of ``var``, entry, exit]: the least of a block between its ends, and what
        finds its choices. Dims of what the block does not read, or what is fixed, are 1."""
        key = (kind, variant, free, var)
        if key not in self._made:
            one, block = self.chain.kinds[kind], self.chain.kinds[kind].variants[variant]
            keep = self._keeps(kind, free, () if var is None else (var,))
            eliminator = Eliminator(block, keep, self._tables, self._plan(kind, variant, free, () if var is None else (var,)))
            found = eliminator.table(self._row(kind, variant), {} if free else self._forbidden(kind))
            order = sorted(set(keep))
            table = found.table.transpose([order.index(number) for number in keep])
            read = {number for number, _ in one.shared} if free else set()
            shared = [size if number in read else 1 for number, size in enumerate(self.chain.shared_sizes)]
            choices = 1 if var is None else block.sizes[var]
            if var is not None:  # of one operator after the other
                for old in [old for old in self._made if old[-1] not in (None, var)]:
                    del self._made[old]
            self._made[key] = table.reshape(*shared, choices, one.states(one.entry), one.states(one.exit)), found
        return self._made[key]

    @cached_property
    def _made(self) -> dict[tuple[int, int, bool, int | None], tuple[Array, Eliminated]]:
        return {}

    def _alternatives(self, kind: int, var: int) -> list[_Alternative] | None:
        """The best chain for every choice of a variable of a kind, in all its positions."""
        for free in (True, False):
            near = self._plan(kind, 0, free).work <= _FAR * WORK and (self._free or not free)
            if near and self._plan(kind, 0, free, (var,)).work <= WORK:
                break
        else:
            return None
        tables = [self._table(at, variant, free, var if at == kind else None)[0] for at, variant in self._sequence]
        shortest = _shortest(tables, self.chain.kinds[kind].variants[0].sizes[var])
        runs = [self._run(kind, choice, free, *found) for choice, found in enumerate(shortest)]
        known = self._assigned({position for run in runs for position in run.positions}, var)
        return [_Alternative(run.value, tuple((at.kind, at.variant, known[at]) for at in run.positions)) for run in runs]

    def _run(
        self, kind: int, choice: int, free: bool, value: float, states: tuple[int, ...], ends: Sequence[tuple[int, int]]
    ) -> _Run:
        """The chain with a choice; ``states``: of what positions share, if that is free."""
        if not math.isfinite(value):
            return _Run(math.inf, ())
        fixed, positions = states if free else self._fixed, []
        for (at, variant), between in zip(self._sequence, ends, strict=True):
            shared = tuple(fixed[number] for number, _ in self.chain.kinds[at].shared)
            positions.append(_Position(at, variant, free, shared, between, choice if at == kind else None))
        return _Run(value, tuple(positions))

    def _assigned(self, wanted: Collection[_Position], var: int) -> Mapping[_Position, tuple[int, ...]]:
        """The choices of positions between their ends, those of one table at once; ``var``: what chooses where one is held."""
        together: dict[tuple[int, int, bool, int | None], list[_Position]] = {}
        for at in wanted:
            if at not in self._known:
                together.setdefault((at.kind, at.variant, at.free, None if at.choice is None else var), []).append(at)
        found: dict[_Position, tuple[int, ...]] = {}
        for key, alike in together.items():
            rows = self._table(*key)[1].assignments(np.array([self._kept(at, var) for at in alike], dtype=np.intp))
            for at, row in zip(alike, rows, strict=True):
                choices = row.tolist()
                for (_, number), state in zip(self.chain.kinds[at.kind].shared, at.shared, strict=True):
                    choices[number] = state
                (self._known if at.choice is None else found)[at] = tuple(choices)
        return {at: found[at] if at in found else self._known[at] for at in wanted}

    @cached_property
    def _known(self) -> dict[_Position, tuple[int, ...]]:
        """The choices of positions in which nothing is held."""
        return {}

    def _kept(self, at: _Position, var: int) -> list[int]:
        """The states of the variables that stay in a position's table, in their order."""
        one = self.chain.kinds[at.kind]
        sizes = one.variants[at.variant].sizes
        kept = {number: state for (_, number), state in zip(one.shared, at.shared, strict=True)} if at.free else {}
        for boundary, state in ((one.entry, at.ends[0]), (one.exit, at.ends[1])):
            for number in reversed(boundary):
                state, kept[number] = divmod(state, sizes[number])
        if at.choice is not None:
            kept[var] = at.choice
        return [kept[number] for number in sorted(kept)]

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


def _shortest(steps: Sequence[Array], choices: int) -> Iterator[tuple[float, tuple[int, ...], list[tuple[int, int]]]]:
    """Of every choice the least sum along a chain of tables [*shared, choice, entry, exit]: the states of what is shared, and
    those at the ends of each table."""
    totals: list[Array] = [np.zeros((*(1,) * (steps[0].ndim - 2), steps[0].shape[-2]))]
    for table in steps:
        totals.append((totals[-1][..., None] + table).min(axis=-2))
    least = totals[-1].min(axis=-1)
    for choice in range(choices):
        shared = np.unravel_index(int(least[..., choice].argmin()), least.shape[:-1])
        at = (*(int(state) for state in shared), choice)
        value = float(least[at])
        ends: list[tuple[int, int]] = []
        state = int(_part(totals[-1], at).argmin())
        for total, table in zip(reversed(totals[:-1]), reversed(steps), strict=True) if math.isfinite(value) else ():
            before = int((_part(total, at) + _part(table, at)[:, state]).argmin())
            ends.append((before, state))
            state = before
        yield value, at[:-1], ends[::-1]


def _part(table: Array, at: tuple[int, ...]) -> Array:
    """What stands at some places of the first dims; a dim of 1 stands for all places."""
    found: Array = table[tuple(0 if size == 1 else place for size, place in zip(table.shape, at, strict=False))]
    return found


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
