"""What an operator's other choices would cost, everything else at its best for them.

The placement problem of the plan's own layout is built again (``compiler.placement.problem``): same mesh, micro-batches and
ways to keep parameters, so only choices stand in it that this plan could have had. For one operator every choice is priced by
variable elimination: the best of all other operators, and of all other blocks, given that choice::

    price(a) = min { seconds of all positions : the operator, in every equal block that has its planned choice, takes a }

Blocks that are equal but planned otherwise (a pin may be of one of them) are as free as any other part, so that the plan itself
is among the ways that are compared.
What several positions share (a tied weight, a table of positions) takes part, unless that makes tables too large: then it lies
as planned. A block's seconds are the largest of several sums of its resources, so no weighted mean of these sums exceeds them:
one mean is held fixed while choosing, which bounds the price from below, and what was chosen is then counted exactly. The means
are looked for by cutting planes (``_mean``), first for a block by itself, then for each choice whose bound is below what was
counted. Blocks whose tables are too large for memory are eliminated in mini-buckets, which bounds from below again. So a price
has two ends, what was found and what no plan is below; mostly they meet. Seconds are those of a step, in a pipeline of the mean
rank. How many micro-batches, stages and ranks there are stays as planned.

Source: Kelley 1960 (cutting planes).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ortools.math_opt.python import mathopt

from meshwright.compiler.placement.blockmodel import ROOT, Model
from meshwright.compiler.placement.choices import Scope, near_of
from meshwright.compiler.placement.costs import Variant
from meshwright.compiler.placement.problem import Problem
from meshwright.compiler.solver.chain import Array, Chain
from meshwright.compiler.solver.elimination import WORK, Eliminated, EliminationPlan, Eliminator, Tables
from meshwright.compiler.solver.master import simplex
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

SHOWN = 8
_ROUNDS = 16
"""Most means of sums that are tried for a block by itself, and for the choices of one operator."""
_MIXED = 1 << 24
"""Table entries that these may take together."""
_MIXED_OF_ALL = 1 << 30
"""The same of all operators of a plan, the first that are asked for before the others: about ten seconds. Operators for which
nothing is left have prices that lie further apart, not other ones."""
_STEP = 1 << 11
"""Table entries in the time that one elimination of a variable takes beside its table."""
_REMEMBERED = 1 << 12
"""Costs of blocks that are remembered."""
_SAME = 1e-6
"""Of a price, by which its two ends may differ by rounding in single precision."""

Between = Mapping[tuple[int, int, bool], tuple[Array, Eliminated]]
"""{(kind, variant, whether the choice is held in it): the least of a block between its ends, and what finds its choices}."""


@dataclass(frozen=True)
class Alternative:
    """One choice of an operator. ``seconds``: of a step, the best with it that was found; ``least``: seconds that no plan with
    it is below, the same where the best was found, and 0 where nothing is proven; ``unproven``: why it is less, if it is;
    ``bytes_``: held over a step for one micro-batch; ``why``: what takes longer than under the planned choice; ``chosen``: it
    is the planned one."""

    assignment: Mapping[str, str]
    seconds: float
    least: float
    unproven: str
    bytes_: float
    why: str
    chosen: bool


@dataclass(frozen=True)
class _Alternative:
    """The whole chain with one choice: its weighted sum, from below; whether all states of what positions share were tried; and
    the assignment of every (kind, variant, entry, exit) used."""

    value: float
    free: bool
    path: tuple[tuple[int, int, tuple[int, ...]], ...]

    def better(self, other: _Alternative, seconds: Callable[[_Alternative], float]) -> _Alternative:
        """The larger of two bounds with the quicker of two paths."""
        quicker = min(self, other, key=seconds)
        return _Alternative(max(self.value, other.value), self.free, quicker.path)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The variable whose choices are compared: number ``var`` of a ``kind`` of position. ``sequence``: (kind, variant, whether
    the choice is held in it) of every position of the chain."""

    kind: int
    var: int
    sequence: tuple[tuple[int, int, bool], ...]


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
        self._costs: dict[tuple[int, int, tuple[int, ...]], Array] = {}
        self._eliminations: dict[tuple[int, int, bool, tuple[int, ...]], EliminationPlan] = {}
        self._left = _MIXED_OF_ALL
        self._found: dict[tuple[int, int, int | None], list[Alternative] | None] = {}
        self.places = self._find()

    def of(self, op: Op) -> list[Alternative] | None:
        """Every choice of an operator that can run, best first; None where there are too many to price."""
        place = self.places.get(op.name)
        if place is None:
            return None
        kind, model, var = place
        if len(model.op_choices[var]) < 2:
            return []
        chosen = self._chosen(op, model, var)
        if (kind, var, chosen) not in self._found:  # equal blocks that do not follow each other are of one kind
            self._found[kind, var, chosen] = self._choices(self._asked(kind, var, model, chosen), model, chosen)
        return self._found[kind, var, chosen]

    def _chosen(self, op: Op, model: Model, var: int) -> int | None:
        """The number of an operator's planned choice; None where the problem leaves it out."""
        planned = dict(self.facts.plan.assignments.get(op.name, {}))
        return next((n for n, choice in enumerate(model.op_choices[var]) if choice == planned), None)

    def _asked(self, kind: int, var: int, model: Model, chosen: int | None) -> _Asked:
        """A variable of a kind, its choice held wherever it is planned as ``chosen``."""
        graph, positions = self.facts.plan.graph, self.folded.positions
        return _Asked(kind, var, tuple(
            (at, variant, at == kind and self._chosen(position.ops(graph)[var], model, var) == chosen)
            for (at, variant), position in zip(self._sequence, positions, strict=True)
        ))

    def _choices(self, asked: _Asked, model: Model, chosen: int | None) -> list[Alternative] | None:
        """``of`` a variable whose planned choice is ``chosen``."""
        free = self._tried(asked)
        if free is None:
            return None
        priced = self._alternatives(asked, free)
        base = priced[chosen] if chosen is not None else min(priced, key=lambda one: one.value)
        found = []
        for number, (choice, one) in enumerate(zip(model.op_choices[asked.var], priced, strict=True)):
            if math.isfinite(one.value):
                seconds, bytes_ = self._counted(one)
                least = self._least(one, seconds)
                unproven = self._unproven(asked, free, least) if least < seconds else ""
                why = "" if one is base else self._why(base, one, seconds)
                found.append(Alternative(choice, seconds, least, unproven, bytes_, why, number == chosen))
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
        """The weights of the mean of sums that binds a block: the one whose least is largest, of those that were tried."""
        if (kind, variant) not in self._rows:
            block, rows = self.chain.kinds[kind].variants[variant], self.chain.time_rows
            eliminator = Eliminator(block, (), self._tables)
            none = np.zeros((1, 0), dtype=np.intp)
            best, most, points = -math.inf, math.inf, list[Array]()
            rounds = min(_ROUNDS, _MIXED // max(1, eliminator.plan.work))
            for count in range(len(rows) + rounds):
                row = rows[count] if count < len(rows) else _means([point[None] for point in points])[0][0] @ rows
                found = eliminator.table(row)
                if not math.isfinite(float(found.table)):
                    self._rows[kind, variant] = row
                    break
                if float(found.table) > best:
                    best, self._rows[kind, variant] = float(found.table), row
                points.append(rows @ block.cost(found.assignments(none)[0].tolist()))
                most = min(most, float(points[-1].max()))
                if best >= most * (1 - _SAME):
                    break
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
        key = (kind, variant, free, more)
        if key not in self._eliminations:
            block, plain = self.chain.kinds[kind].variants[variant], self._keeps(kind, free)
            known = self._tables.plan(block, plain)
            found = self._tables.plan(block, self._keeps(kind, free, more), plain, WORK) if more else known
            self._eliminations[key] = found
        return self._eliminations[key]

    @cached_property
    def _free(self) -> bool:
        """Whether all states of what positions share are tried."""
        kinds = self.chain.kinds
        apart = all(len({*keeps}) == len(keeps) for keeps in (self._keeps(kind, True) for kind in range(len(kinds))))
        states = math.prod(self.chain.shared_sizes) * max(one.states(one.exit) for one in kinds) * len(self._sequence)
        return apart and states <= WORK and all(self._plan(kind, 0, True).work <= WORK for kind in range(len(kinds)))

    def _table(self, kind: int, variant: int, free: bool) -> tuple[Array, Eliminated]:
        """``_between`` of a block in which nothing is held, under the mean of sums that binds it."""
        key = (kind, variant, free)
        if key not in self._made:
            self._made[key] = self._between(kind, variant, free, (), self._row(kind, variant))
        return self._made[key]

    @cached_property
    def _made(self) -> dict[tuple[int, int, bool], tuple[Array, Eliminated]]:
        return {}

    def _between(self, kind: int, variant: int, free: bool, more: tuple[int, ...], row: Array) -> tuple[Array, Eliminated]:
        """[a dim for every shared variable, choice of ``more``, entry, exit]: the least of a block between its ends under the
        weights of a mean of sums, and what finds its choices; ``more``: a variable that stays. Dims of what the block does not
        read, or what is fixed, are 1."""
        one, block = self.chain.kinds[kind], self.chain.kinds[kind].variants[variant]
        keep = self._keeps(kind, free, more)
        eliminator = Eliminator(block, keep, self._tables, self._plan(kind, variant, free, more))
        found = eliminator.table(row, {} if free else self._forbidden(kind))
        order = sorted(set(keep))
        table = found.table.transpose([order.index(number) for number in keep])
        read = {number for number, _ in one.shared} if free else set()
        shared = [size if number in read else 1 for number, size in enumerate(self.chain.shared_sizes)]
        choices = math.prod(block.sizes[var] for var in more)
        return table.reshape(*shared, choices, one.states(one.entry), one.states(one.exit)), found

    def _tried(self, asked: _Asked) -> bool | None:
        """Whether all states of what positions share are tried for a variable; None where its table is too large anyway."""
        ways = (True, False) if self._free else (False,)
        return next((free for free in ways if self._plan(asked.kind, 0, free, (asked.var,)).work <= WORK), None)

    def _plans(self, asked: _Asked, free: bool) -> list[EliminationPlan]:
        """How all blocks are eliminated, the variable staying in those in which its choice is held."""
        return [self._plan(at, variant, free, (asked.var,) if held else ())
                for at, variant, held in dict.fromkeys(asked.sequence)]

    def _alternatives(self, asked: _Asked, free: bool) -> list[_Alternative]:
        """The best chain for every choice of a variable, in all positions in which it is held."""
        latest = found = self._priced(asked, free)
        points: list[list[Array]] = [[] for _ in found]
        left = {choice for choice, one in enumerate(found) if math.isfinite(one.value + self._total(one))}
        round_ = sum(plan.work + _STEP * len(plan.steps) for plan in self._plans(asked, free))
        for _ in range(min(_ROUNDS, _MIXED // max(1, round_))):
            apart = {choice: 1 - found[choice].value / self._total(found[choice]) for choice in left}
            left = {choice for choice, part in apart.items() if part > _SAME}
            if not left:
                break
            for choice in left:
                points[choice].append(self._sums(latest[choice]))
            worst = max(left, key=lambda choice: (apart[choice], -choice))
            means, most = _means(points[worst])
            if most <= found[worst].value * (1 + _SAME):  # no means prove more
                left.remove(worst)
                continue
            if self._left < round_:
                break
            self._left -= round_
            latest = self._priced(asked, free, means @ self.chain.time_rows)
            found = [one.better(other, self._total) if choice in left else one
                     for choice, (one, other) in enumerate(zip(found, latest, strict=True))]
        return found

    def _sums(self, one: _Alternative) -> Array:
        """[kinds, rows]: a chain's seconds if each of the sums bound the blocks of a kind."""
        total = np.zeros((len(self.chain.kinds), len(self.chain.time_rows)))
        for (kind, variant, choices), times in Counter(one.path).items():
            total[kind] += times * (self.chain.time_rows @ self._cost(kind, variant, choices))
        return total

    def _priced(self, asked: _Asked, free: bool, rows: Array | None = None) -> list[_Alternative]:
        """The least chain for every choice of a variable; ``rows`` [kinds, resources]: under these weights of the kinds'
        resources instead of those that bind each block by itself."""
        tables = {}
        for at, variant, held in dict.fromkeys(asked.sequence):
            more, row = (asked.var,) if held else (), self._row(at, variant) if rows is None else rows[at]
            plain = rows is None and not more
            tables[at, variant, held] = self._table(at, variant, free) if plain else self._between(at, variant, free, more, row)
        choices = self.chain.kinds[asked.kind].variants[0].sizes[asked.var]
        shortest = _shortest([tables[at][0] for at in asked.sequence], choices)
        runs = [self._run(asked, choice, free, *found) for choice, found in enumerate(shortest)]
        known = dict(self._known) if rows is None else {}
        self._assign({position for run in runs for position in run.positions}, asked.var, tables, known)
        if rows is None:
            self._known.update((at, choices) for at, choices in known.items() if at.choice is None)
        paths = [tuple((at.kind, at.variant, known[at]) for at in run.positions) for run in runs]
        return [_Alternative(run.value, free, path) for run, path in zip(runs, paths, strict=True)]

    def _run(
        self, asked: _Asked, choice: int, free: bool, value: float, states: tuple[int, ...], ends: Sequence[tuple[int, int]]
    ) -> _Run:
        """The chain with a choice; ``states``: of what positions share, if that is free."""
        if not math.isfinite(value):
            return _Run(math.inf, ())
        fixed, positions = states if free else self._fixed, []
        for (at, variant, held), between in zip(asked.sequence, ends, strict=True):
            shared = tuple(fixed[number] for number, _ in self.chain.kinds[at].shared)
            positions.append(_Position(at, variant, free, shared, between, choice if held else None))
        return _Run(value, tuple(positions))

    def _assign(
        self, wanted: Collection[_Position], var: int, tables: Between, known: dict[_Position, tuple[int, ...]]
    ) -> None:
        """The choices of positions between their ends, those of one table at once, beside those that are ``known``; ``var``:
        what chooses where one is held."""
        together: dict[tuple[int, int, bool], list[_Position]] = {}
        for at in wanted:
            if at not in known:
                together.setdefault((at.kind, at.variant, at.choice is not None), []).append(at)
        for key, alike in together.items():
            rows = tables[key][1].assignments(np.array([self._kept(at, var) for at in alike], dtype=np.intp))
            for at, row in zip(alike, rows, strict=True):
                choices = row.tolist()
                for (_, number), state in zip(self.chain.kinds[at.kind].shared, at.shared, strict=True):
                    choices[number] = state
                known[at] = tuple(choices)

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
        bytes_ = 0.0
        for (kind, variant, choices), times in Counter(one.path).items():
            bytes_ += times * float(self.chain.bytes_row @ self._cost(kind, variant, choices))
        return self._total(one) / self._stages, bytes_ / self._stages

    def _total(self, one: _Alternative) -> float:
        """Seconds, exactly, of all positions."""
        seconds = 0.0
        for (kind, variant, choices), times in Counter(one.path).items():
            seconds += times * self.chain.time(self._cost(kind, variant, choices))
        return seconds

    def _cost(self, kind: int, variant: int, choices: tuple[int, ...]) -> Array:
        """[resources] of a block under its choices, of which several alternatives mostly have the same."""
        key = (kind, variant, choices)
        if key not in self._costs:
            if len(self._costs) >= _REMEMBERED:
                self._costs.clear()
            self._costs[key] = self.chain.kinds[kind].variants[variant].cost(choices)
        return self._costs[key]

    @property
    def _stages(self) -> int:
        return 1 if self.facts.plan.pipeline is None else self.facts.plan.pipeline.degree

    def _least(self, one: _Alternative, seconds: float) -> float:
        """Seconds, of the mean rank, that no plan with a choice is below, where the best that was found takes ``seconds``."""
        least = one.value / self._stages if one.free or all(size == 1 for size in self.chain.shared_sizes) else 0.0
        return seconds if least >= seconds * (1 - _SAME) else least

    def _unproven(self, asked: _Asked, free: bool, least: float) -> str:
        """Why what was found for a choice of a variable may not be the best."""
        if least <= 0:
            return "what several blocks share was tried as it is planned, and no other way"
        if any(plan.inexact for plan in self._plans(asked, free)):
            return "more shardings meet in a block than can be tried"
        return "a block takes as long as the longest of several sums of its parts, and which is longest differs between choices"

    # why

    def _why(self, base: _Alternative, other: _Alternative, seconds: float) -> str:
        """The part that costs the other way most more than the planned one."""
        if not math.isfinite(seconds):
            return "none was found that can run"
        more: dict[str, float] = {}
        steps = Counter((one, new) for one, (_, _, new) in zip(base.path, other.path, strict=True))
        for ((kind, variant, old), new), times in steps.items():
            if old != new:
                for label, seconds in self._differences(kind, variant, old, new):
                    more[label] = more.get(label, 0.0) + times * seconds
        if not more:
            return "the same"
        label = max(more, key=lambda name: more[name])
        return f"{label}: +{seconds_text(more[label] / self._stages)}" if more[label] > 0 else "ties"

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


def _means(points: Sequence[Array]) -> tuple[Array, float]:
    """The weights [kinds, rows], >= 0 and 1 together for each kind, whose least sum over points [kinds, rows] is largest; and
    that sum."""
    unit = max(float(point.max()) for point in points) or 1.0
    model = mathopt.Model()
    weights = [[model.add_variable(lb=0, ub=1) for _ in row] for row in points[0]]
    least = model.add_variable()
    for row in weights:
        model.add_linear_constraint(mathopt.fast_sum(row) == 1)
    flat = [weight for row in weights for weight in row]
    for point in points:
        sums = [float(seconds) / unit * weight for seconds, weight in zip(point.ravel(), flat, strict=True)]
        model.add_linear_constraint(least <= mathopt.fast_sum(sums))
    model.maximize(least)
    result = mathopt.solve(model, mathopt.SolverType.GLOP, params=mathopt.SolveParameters(threads=1))
    found = np.array(result.variable_values(flat)).reshape(points[0].shape)
    return np.array([simplex(row) for row in found]), result.objective_value() * unit


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
