"""The master: which column every position takes, as a linear and as an integer program (OR-Tools MathOpt, GLOP and HiGHS).

Equal copies are counted, not numbered. The sequence is cut into segments of a repeated unit (``segments``: embed, 126 x block,
head); inside one, ``z[j, column]`` counts how often place j of the unit takes a column. The copies of a segment walk through
boundary states, so the counts are a flow on the cyclic layered graph (layer j, state): a walk exists exactly if the flow is
balanced and its support connected to the start. Disconnected circulations are cut off when they appear; ``walk`` (Hierholzer)
turns counts back into a sequence.

The linear program (``relax``) is the Lagrangian dual of the chain restricted to known columns: the time of a group (kind,
variant) is ``t >= time_rows[r] @ sum z * cost`` (dual: alpha), memory ``sum z * bytes + y <= available`` (lambda), the mean
transient of a kind's copies ``<= y`` (nu). The integer program (``choose``) uses each column's exact time and every used
column's own transient, and can have all positions agree on the shared variables (``_agree``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from meshwright.compiler.solver.chain import Array, Chain
from meshwright.compiler.solver.effort import Effort
from meshwright.compiler.solver.linear import aside
from meshwright.compiler.solver.pricing import Column, Group, Multipliers, held_back

Arc = tuple[int, int, int]
"""(segment, place in its unit, column index)."""
NODES = 50
"""Nodes that one integer program's search may visit."""
_HAIR = 1e-6
"""The part of the capacity that is left: as much may be taken beyond what is asked for, by the integer program's tolerance, and
where columns are many it is taken."""
LEVELS = 32
"""Transient sizes that the integer program tells apart; beyond, sizes are rounded up."""


@dataclass(frozen=True, slots=True)
class RepeatedKinds:
    """``unit`` of kinds, ``repeats`` times."""

    unit: tuple[int, ...]
    repeats: int


def segments(sequence: Sequence[int]) -> tuple[RepeatedKinds, ...]:
    """Cut a sequence of kinds into repeated units, greedily by most positions saved, shorter units first.

    >>> segments((0, 1, 1, 1, 2))
    (RepeatedKinds(unit=(0,), repeats=1), RepeatedKinds(unit=(1,), repeats=3), RepeatedKinds(unit=(2,), repeats=1))
    >>> segments((1, 1, 2, 1, 1, 2, 3))
    (RepeatedKinds(unit=(1, 1, 2), repeats=2), RepeatedKinds(unit=(3,), repeats=1))
    """
    out, at = [], 0
    while at < len(sequence):
        best, saved = (1, 1), 0
        for unit in range(1, (len(sequence) - at) // 2 + 1):
            repeats = 1
            while tuple(sequence[at : at + unit]) == tuple(sequence[at + repeats * unit : at + (repeats + 1) * unit]):
                repeats += 1
            if (repeats - 1) * unit > saved:
                best, saved = (unit, repeats), (repeats - 1) * unit
        out.append(RepeatedKinds(tuple(sequence[at : at + best[0]]), best[1]))
        at += best[0] * best[1]
    return tuple(out)


Term = tuple[int, float]
"""A variable, by its number, and its weight."""


class Rows:
    """A program as it is written, row by row, until the ``model`` is made of it: a proto, since to build a program through the
    modelling classes takes as long as to solve it."""

    def __init__(self) -> None:
        self.proto = model_pb2.ModelProto()

    def variable(self, upper: float = math.inf, integer: bool = False) -> int:
        """A new variable of at least 0."""
        variables = self.proto.variables
        number = len(variables.ids)
        variables.ids.append(number)
        variables.lower_bounds.append(0.0)
        variables.upper_bounds.append(upper)
        variables.integers.append(integer)
        return number

    def add(self, terms: Iterable[Term], lower: float, upper: float) -> int:
        """A row: the sum of terms is within the limits."""
        rows, matrix = self.proto.linear_constraints, self.proto.linear_constraint_matrix
        number = len(rows.ids)
        rows.ids.append(number)
        rows.lower_bounds.append(lower)
        rows.upper_bounds.append(upper)
        columns, weights = _summed(terms)
        matrix.row_ids.extend([number] * len(columns))
        matrix.column_ids.extend(columns)
        matrix.coefficients.extend(weights)
        return number

    def model(self, terms: Iterable[Term], offset: float = 0.0) -> mathopt.Model:
        """The program that minimizes a sum."""
        columns, weights = _summed(terms)
        self.proto.objective.offset = offset
        self.proto.objective.linear_coefficients.ids.extend(columns)
        self.proto.objective.linear_coefficients.values.extend(weights)
        return mathopt.Model.from_model_proto(self.proto)


def _summed(terms: Iterable[Term]) -> tuple[list[int], list[float]]:
    """Variables in their order and their weights, those of one added up."""
    total: dict[int, float] = {}
    for variable, weight in terms:
        total[variable] = total.get(variable, 0.0) + weight
    columns = sorted(variable for variable, weight in total.items() if weight)
    return columns, [total[variable] for variable in columns]


@dataclass(frozen=True, slots=True)
class Flow:
    """The counts of a program: a variable per arc, the states at segment borders."""

    rows: Rows
    counts: dict[Arc, int]
    borders: list[dict[int, int]]
    parts: tuple[RepeatedKinds, ...]


def _flow(parts: tuple[RepeatedKinds, ...], columns: Sequence[Column], integer: bool) -> Flow:
    rows = Rows()
    counts: dict[Arc, int] = {}
    borders: list[dict[int, int]] = [{} for _ in range(len(parts) + 1)]
    nets: dict[tuple[int, int, int], list[Term]] = {}
    for i, part in enumerate(parts):
        length = len(part.unit)
        last = 0 if part.repeats > 1 else length
        for j, kind in enumerate(part.unit):
            for c, column in enumerate(columns):
                if column.kind == kind:
                    z = rows.variable(part.repeats, integer)
                    counts[i, j, c] = z
                    nets.setdefault((i, j, column.entry), []).append((z, -1.0))
                    nets.setdefault((i, last if j + 1 == length else j + 1, column.exit), []).append((z, 1.0))
        for border, layer, sign in ((i, 0, 1.0), (i + 1, last, -1.0)):
            for state in sorted(s for (a, b, s) in nets if a == i and b == layer):
                if state not in borders[border]:
                    borders[border][state] = rows.variable(1.0, integer)
                nets[i, layer, state].append((borders[border][state], sign))
        rows.add([(z, 1.0) for (a, j, _), z in counts.items() if a == i and j == 0], part.repeats, part.repeats)
    for b, states in enumerate(borders):
        # a state that only one of the two neighbouring segments knows cannot be crossed
        for state, q in states.items():
            if 0 < b < len(parts):
                left_last = 0 if parts[b - 1].repeats > 1 else len(parts[b - 1].unit)
                if (b - 1, left_last, state) not in nets or (b, 0, state) not in nets:
                    rows.add([(q, 1.0)], 0.0, 0.0)
        rows.add([(q, 1.0) for q in states.values()], 1.0, 1.0)
    for terms in nets.values():
        rows.add(terms, 0.0, 0.0)
    return Flow(rows, counts, borders, parts)


@dataclass(frozen=True, slots=True)
class Scale:
    """Units that bring time and memory to about one."""

    time: float
    memory: float


def relax(
    chain: Chain, columns: Sequence[Column], groups: Sequence[Group], scale: Scale, rho: float
) -> tuple[float, Multipliers]:
    """Value and multipliers of the linear program: least time within the capacity (rho 1), or least memory (rho 0)."""
    parts = segments(chain.sequence)
    flow = _flow(parts, columns, integer=False)
    written, used = flow.rows, list[Term]()
    peak = written.variable()
    by_group: dict[Group, list[tuple[int, Column]]] = {g: [] for g in groups}
    for (_, _, c), z in flow.counts.items():
        by_group[columns[c].kind, columns[c].variant].append((z, columns[c]))
        used.append((z, columns[c].bytes_ / scale.memory))
    used.append((peak, 1.0))
    times, rows = [], {}
    for g in groups if rho else ():
        t = written.variable()
        times.append((t, 1.0))
        numbers = [z for z, _ in by_group[g]]
        costs = np.array([chain.time_rows @ column.cost / scale.time for _, column in by_group[g]])
        rows[g] = {
            r: written.add([(t, 1.0), *zip(numbers, (-costs[:, r]).tolist(), strict=True)], 0.0, math.inf)
            for r in _longest(costs)
        }
    peaks = {}
    for k in dict.fromkeys(g[0] for g in groups):
        held = [one for g in groups if g[0] == k for one in by_group[g]]
        numbers = [z for z, _ in held]
        sizes = np.array([chain.transient_rows @ column.cost / scale.memory for _, column in held])
        for m in _longest(sizes):
            terms = [(peak, float(chain.sequence.count(k))), *zip(numbers, (-sizes[:, m]).tolist(), strict=True)]
            peaks[k, m] = written.add(terms, 0.0, math.inf)
    row = None
    if rho and np.isfinite(chain.capacity):
        row = written.add(used, -math.inf, (chain.capacity - chain.fixed_bytes) / scale.memory)
    model = written.model(times if rho else used)
    result = mathopt.solve(model, mathopt.SolverType.GLOP, params=mathopt.SolveParameters(threads=1))
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        return float("inf"), Multipliers({}, 0.0, ((0.0,) * len(chain.transient_rows),) * len(chain.kinds), rho)
    dual = {constraint.id: value for constraint, value in result.dual_values().items()}
    lam = 1.0 if not rho else (max(0.0, -dual[row]) * scale.time / scale.memory if row is not None else 0.0)
    unit = scale.time / scale.memory if rho else 1.0
    nu = np.zeros((len(chain.kinds), len(chain.transient_rows)))
    for (k, m), bound in peaks.items():
        nu[k, m] = max(0.0, dual[bound]) * unit
    copies = np.array([chain.sequence.count(k) for k in range(len(chain.kinds))])
    if (total := float(copies @ nu.sum(axis=1))) > lam:
        nu *= lam / total
    nu = held_back(chain, lam, nu)
    alpha = {g: np.zeros(len(chain.time_rows)) for g in rows}
    for g, bounds in rows.items():
        alpha[g][list(bounds)] = [dual[bound] for bound in bounds.values()]
        alpha[g] = simplex(alpha[g])
    return result.objective_value(), Multipliers(alpha, lam, tuple(tuple(map(float, one)) for one in nu), rho)


def _longest(times: Array) -> list[int]:
    """Of times [columns, rows] the rows that no other is at least as long as in all columns; of equal ones the first."""
    if not len(times):
        return []
    longer = (times[:, :, None] >= times[:, None, :]).all(axis=0)  # [row, other]
    beaten = longer & (~longer.T | np.triu(np.ones(longer.shape, dtype=bool), 1))
    return [int(r) for r in np.flatnonzero(~beaten.any(axis=0))]


def simplex(values: Array) -> Array:
    """Non-negative and summing to one: the multipliers of a maximum, freed from rounding."""
    values = np.maximum(values, 0.0)
    total = values.sum()
    out: Array = values / total if total > 0 else np.full(len(values), 1 / len(values))
    return out


def choose(
    chain: Chain, columns: Sequence[Column], scale: Scale, rho: float, precision: float, effort: Effort, together: bool = False,
    to_beat: float = math.inf,
) -> list[Column] | None:
    """A column for every position, ``together`` such that they agree on the shared variables: least time within the capacity
    (rho 1), of what takes no more than ``to_beat`` seconds, or least memory (rho 0); None if none is found. ``effort``: counts
    it; what is left of it limits the nodes that are visited, and once it is over no walk is asked for again whose parts did not
    connect."""
    flow = _flow(segments(chain.sequence), columns, integer=True)
    if together:
        _agree(chain, flow, columns)
    arcs = list(flow.counts.items())
    used = [(z, columns[c].bytes_ / scale.memory) for (_, _, c), z in arcs]
    limited, least = bool(rho) and np.isfinite(chain.capacity), 0.0
    if limited or not rho:
        levels, least = _peak(flow, columns, scale)
        used += levels
    free = (chain.capacity - chain.fixed_bytes) / scale.memory
    hair = _HAIR * max(1.0, abs(free))
    number = flow.rows.add(used, -math.inf, free - hair - least if limited else math.inf)
    times = [(z, columns[c].time / scale.time) for (_, _, c), z in arcs]
    if rho and to_beat < math.inf:
        flow.rows.add(times, -math.inf, (to_beat - chain.fixed_time) / scale.time)
    model = flow.rows.model(times) if rho else flow.rows.model(used, least)
    row = model.get_linear_constraint(number)
    for _ in range(20):
        nodes = effort.nodes(len(columns), NODES)
        params = mathopt.SolveParameters(random_seed=0, relative_gap_tolerance=precision, node_limit=nodes)
        with aside():
            result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=params)
        effort.chosen(len(columns), result.solve_stats.simplex_iterations)
        if not result.has_primal_feasible_solution():
            return None
        values = {variable.id: value for variable, value in result.variable_values().items()}
        taken = {arc: round(values[z]) for arc, z in arcs if values[z] > 0.5}
        borders = {b: s for b, at in enumerate(flow.borders) for s, q in at.items() if values[q] > 0.5}
        order = walk(flow, columns, taken, borders)
        if order is None:
            if effort.over or not _cut(model, flow, columns, taken, borders):
                return None
        elif limited and sum(c.bytes_ for c in order) + max(c.transient for c in order) > free * scale.memory:
            row.upper_bound -= hair
        else:
            return order
    return None


def _agree(chain: Chain, flow: Flow, columns: Sequence[Column]) -> None:
    """Rows that have all positions take columns of one and the same choice of every shared variable."""
    read: dict[int, dict[int, int]] = {}  # shared variable -> kind -> its variable there
    for k in dict.fromkeys(chain.sequence):
        for s, var in chain.kinds[k].shared:
            read.setdefault(s, {})[k] = var
    for kinds in read.values():
        places: dict[tuple[int, int], dict[int, list[int]]] = {}
        for (i, j, c), z in flow.counts.items():
            column = columns[c]
            if column.kind in kinds:
                places.setdefault((i, j), {}).setdefault(column.choices[kinds[column.kind]], []).append(z)
        choices = sorted({a for found in places.values() for a in found})
        if len(choices) < 2:
            continue
        taken = {a: flow.rows.variable(1.0, integer=True) for a in choices}
        for (i, _), found in places.items():
            for a in choices:
                flow.rows.add([*((z, 1.0) for z in found.get(a, [])), (taken[a], -float(flow.parts[i].repeats))], 0.0, 0.0)


def _peak(flow: Flow, columns: Sequence[Column], scale: Scale) -> tuple[list[Term], float]:
    """The largest transient among used columns, by choosing one of its levels: a sum, and what is added to it."""
    sizes = sorted({columns[c].transient for _, _, c in flow.counts})
    if len(sizes) > LEVELS:
        sizes = sorted({sizes[-(-q * (len(sizes) - 1) // (LEVELS - 1))] for q in range(LEVELS)})
    if len(sizes) == 1:
        return [], sizes[0] / scale.memory
    levels = [flow.rows.variable(1.0, integer=True) for _ in sizes]
    flow.rows.add([(u, 1.0) for u in levels], 1.0, 1.0)
    for (i, _, c), z in flow.counts.items():
        above = levels[bisect_left(sizes, columns[c].transient) :]
        if len(above) < len(levels):
            flow.rows.add([(z, 1.0), *((u, -float(flow.parts[i].repeats)) for u in above)], -math.inf, 0.0)
    return [(u, size / scale.memory) for size, u in zip(sizes, levels, strict=True)], 0.0


def _nodes(part: RepeatedKinds, j: int, column: Column) -> tuple[tuple[int, int], tuple[int, int]]:
    layer = j + 1 if j + 1 < len(part.unit) or part.repeats == 1 else 0
    return (j, column.entry), (layer, column.exit)


def walk(flow: Flow, columns: Sequence[Column], taken: dict[Arc, int], states: dict[int, int]) -> list[Column] | None:
    """The counted arcs as one sequence of columns; None if some are not connected to the start."""
    out: list[Column] = []
    for i, part in enumerate(flow.parts):
        leaving: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {}
        for (a, j, c), count in sorted(taken.items(), key=lambda item: (item[0][:2], columns[item[0][2]].key), reverse=True):
            if a == i:
                tail, head = _nodes(part, j, columns[c])
                leaving.setdefault(tail, []).extend([(c, head)] * count)
        stack: list[tuple[int, tuple[int, int]]] = [(-1, (0, states[i]))]
        trail: list[int] = []
        while stack:
            nexts = leaving.get(stack[-1][1])
            if nexts:
                stack.append(nexts.pop())
            else:
                trail.append(stack.pop()[0])
        trail = trail[-2::-1]
        if len(trail) != len(part.unit) * part.repeats:
            return None
        out += [columns[c] for c in trail]
    return out


def _cut(
    model: mathopt.Model, flow: Flow, columns: Sequence[Column], taken: dict[Arc, int], states: dict[int, int]
) -> bool:
    """Cut off circulations that the walk cannot reach; False if there is nothing to cut. ``states``: at segment borders."""
    found = False
    for i, part in enumerate(flow.parts):
        arcs = nx.Graph(_nodes(part, j, columns[c]) for a, j, c in taken if a == i)
        arcs.add_node((0, states[i]))
        islands = list(nx.connected_components(arcs))
        if len(islands) < 2:
            continue
        for island in islands:
            inside: list[int] = []
            entering = [q for s, q in flow.borders[i].items() if (0, s) in island]
            for (a, j, c), z in flow.counts.items():
                if a == i:
                    tail, head = _nodes(part, j, columns[c])
                    if head in island:
                        (inside if tail in island else entering).append(z)
            limit = len(part.unit) * part.repeats
            row = model.add_linear_constraint(ub=0.0)
            for sign, numbers in ((1.0, inside), (-float(limit), entering)):
                for number in numbers:
                    row.set_coefficient(model.get_variable(number), sign)
            found = True
    return found
