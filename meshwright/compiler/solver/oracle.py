"""Independent answers for a chain: enumeration, and one mixed-integer program of everything.

``brute_force`` walks all assignments of each position, then all chains of the undominated ones. ``flow_mip`` is the flow form
of the unfolded factor graph (local polytope): node variables ``x[p, v, i, a]`` and edge variables ``y[p, v, e, a, b]`` with
``sum_b y[a, b] = x[a]``, ``sum_a y[a, b] = x[b]``; the maximum over time rows and the peak by epigraph variables. Small chains
only; they check ``solve`` in tests, and ``flow_mip`` stands in where elimination's tables would be too large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from ortools.math_opt.python import mathopt

from meshwright.compiler.solver.chain import Array, BlockModel, Chain, Infeasible, Solution, evaluate
from meshwright.compiler.solver.linear import aside

TOLERANCE = 1e-6
"""Relative tolerance of the integer program's bound; an assignment may exceed the capacity by as much."""

NODES = 2000
"""Nodes that the flow program's search may visit."""


@dataclass(frozen=True, slots=True)
class _Partial:
    """The first positions of a chain: what they cost and how they were chosen."""

    time: float
    bytes_: float
    transient: float
    shared: tuple[tuple[int, int], ...]
    variants: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]


def brute_force(chain: Chain, objective: str = "time") -> Solution:
    """The exact optimum by enumeration (``objective`` "time" within the capacity, or "memory" without it).

    Raises Infeasible if nothing fits, with the exact least memory.
    """
    options = [list(_options(chain, k)) for k in range(len(chain.kinds))]
    front: dict[tuple, list[_Partial]] = {((), -1): [_Partial(chain.fixed_time, chain.fixed_bytes, 0.0, (), (), ())]}
    for p, k in enumerate(chain.sequence):
        kind = chain.kinds[k]
        grown: dict[tuple, list[_Partial]] = {}
        for (_, state), partials in front.items():
            for v, x, cost in options[k]:
                if p and kind.state(kind.entry, x) != state:
                    continue
                for partial in partials:
                    shared = dict(partial.shared)
                    if all(shared.setdefault(s, x[var]) == x[var] for s, var in kind.shared):
                        more = _Partial(
                            partial.time + chain.time(cost),
                            partial.bytes_ + float(chain.bytes_row @ cost),
                            max(partial.transient, chain.transient(cost)),
                            tuple(sorted(shared.items())),
                            (*partial.variants, v),
                            (*partial.choices, x),
                        )
                        grown.setdefault((more.shared, kind.state(kind.exit, x)), []).append(more)
        front = {key: _undominated(partials) for key, partials in grown.items()}
    ends = [p for partials in front.values() for p in partials]
    if not ends:
        raise Infeasible("forbidden choices leave no assignment of the chain", np.inf, np.inf, None)
    least = min(ends, key=lambda p: (p.bytes_ + p.transient, p.time))
    fits = [p for p in ends if p.bytes_ + p.transient <= chain.capacity]
    if objective == "time" and not fits:
        need = least.bytes_ + least.transient
        raise Infeasible(f"least memory is {need}", need, need, _solution(chain, least.variants, least.choices, least.time))
    best = least if objective == "memory" else min(fits, key=lambda p: p.time)
    return _solution(chain, best.variants, best.choices, best.time)


def _options(chain: Chain, k: int):  # type: ignore[no-untyped-def]
    kind = chain.kinds[k]
    for v, block in enumerate(kind.variants):
        for x in product(*(range(n) for n in block.sizes)):
            cost = block.cost(x) + kind.variant_costs[v]
            if np.isfinite(cost).all():
                yield v, x, cost


def _undominated(partials: list[_Partial]) -> list[_Partial]:
    kept: list[_Partial] = []
    for p in sorted(partials, key=lambda p: (p.time, p.bytes_, p.transient)):
        if not any(q.bytes_ <= p.bytes_ and q.transient <= p.transient for q in kept):
            kept.append(p)
    return kept


def _solution(chain: Chain, variants: tuple[int, ...], choices: tuple[tuple[int, ...], ...], bound: float) -> Solution:
    time, bytes_, transient = evaluate(chain, variants, choices)
    gap = max(0.0, time - bound) / time if time else 0.0
    status = "optimal" if gap <= 1e-3 else "gap"
    return Solution(variants, choices, time, bytes_, transient, min(bound, time), gap, 0, 0, status)


class _Mip:
    """The model while it is built: objective terms per position, indicator variables to read the answer from."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.model = mathopt.Model()
        self.pick: list[list[mathopt.Variable]] = []
        self.nodes: list[list[list[list[mathopt.Variable]]]] = []

    def add(self, terms: Mapping[mathopt.Variable, Array]) -> list[list[mathopt.LinearTerm]]:
        """Terms per resource of the non-zero costs."""
        out: list[list[mathopt.LinearTerm]] = [[] for _ in range(self.chain.time_rows.shape[1])]
        for z, cost in terms.items():
            for r in np.flatnonzero(cost):
                out[r].append(float(cost[r]) * z)
        return out

    def position(self, k: int) -> dict[mathopt.Variable, Array]:
        """Variables of one position with their resources."""
        kind, terms = self.chain.kinds[k], {}
        picks, nodes = [], []
        for block, cost in zip(kind.variants, kind.variant_costs, strict=True):
            pick = self.model.add_binary_variable()
            picks.append(pick)
            terms[pick] = cost
            nodes.append(self._block(block, pick, terms))
        self.model.add_linear_constraint(mathopt.fast_sum(picks) == 1)
        self.pick.append(picks)
        self.nodes.append(nodes)
        return terms

    def _block(
        self, block: BlockModel, pick: mathopt.Variable, terms: dict[mathopt.Variable, Array]
    ) -> list[list[mathopt.Variable]]:
        xs = []
        for size, unary in zip(block.sizes, block.unary, strict=True):
            x = [self.model.add_binary_variable() for _ in range(size)]
            self.model.add_linear_constraint(mathopt.fast_sum(x) == pick)
            for a, z in enumerate(x):
                self._cost(z, unary[a], terms)
            xs.append(x)
        for e in block.edges:
            n, m = e.shape
            y = [[self.model.add_variable(lb=0, ub=1) for _ in range(m)] for _ in range(n)]
            for a in range(n):
                self.model.add_linear_constraint(mathopt.fast_sum(y[a]) == xs[e.i][a])
            for b in range(m):
                self.model.add_linear_constraint(mathopt.fast_sum([row[b] for row in y]) == xs[e.j][b])
            for a, b in product(range(n), range(m)):
                self._cost(y[a][b], e.cost(a, b), terms)
        return xs

    def _cost(self, z: mathopt.Variable, cost: Array, terms: dict[mathopt.Variable, Array]) -> None:
        if np.isfinite(cost).all():
            terms[z] = cost
        else:
            z.upper_bound = 0.0

    def read(self, result: mathopt.SolveResult) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Variant and choices of every position."""
        values = result.variable_values()
        variants, choices = [], []
        for picks, nodes in zip(self.pick, self.nodes, strict=True):
            v = max(range(len(picks)), key=lambda i: values[picks[i]])
            variants.append(v)
            choices.append(tuple(max(range(len(x)), key=lambda a: values[x[a]]) for x in nodes[v]))
        return tuple(variants), tuple(choices)

    def state(self, p: int, boundary: tuple[int, ...]) -> list[mathopt.LinearSum]:
        """Indicators of the boundary's single-variable choices, variable after variable."""
        variants = self.nodes[p]
        sizes = self.chain.kinds[self.chain.sequence[p]].variants[0].sizes
        return [mathopt.fast_sum([nodes[v][a] for nodes in variants]) for v in boundary for a in range(sizes[v])]


def flow_mip(chain: Chain, *, objective: str = "time", nodes: int = NODES, precision: float = 1e-6) -> Solution:
    """The optimum by one mixed-integer program over the unfolded chain (HiGHS); ``bound`` is the program's own.

    Boundary variables of neighbours are matched one by one, so they must correspond in number and size. The memory row holds up
    to ``TOLERANCE``. Raises Infeasible if nothing fits or nothing was found within so many ``nodes`` of its search.
    """
    mip = _Mip(chain)
    peak = mip.model.add_variable(lb=0)
    second, byte = _units(chain)
    times, memory = [], []
    shared: dict[int, list[mathopt.LinearSum]] = {}
    for p, k in enumerate(chain.sequence):
        cost = mip.add(mip.position(k))
        t = mip.model.add_variable(lb=0)
        times.append(t)
        parts = []
        for rows in _factors(chain.time_rows):
            parts.append(mip.model.add_variable(lb=0))
            for row in rows:
                mip.model.add_linear_constraint(parts[-1] >= _dot(row / second, cost))
        mip.model.add_linear_constraint(t == mathopt.fast_sum(parts))
        memory.append(_dot(chain.bytes_row / byte, cost))
        for row in chain.transient_rows:
            mip.model.add_linear_constraint(peak >= _dot(row / byte, cost))
        kind = chain.kinds[k]
        if p:
            before = mip.state(p - 1, chain.kinds[chain.sequence[p - 1]].exit)
            for a, b in zip(before, mip.state(p, kind.entry), strict=True):
                mip.model.add_linear_constraint(a == b)
        for s, var in kind.shared:
            here = mip.state(p, (var,))
            for a, b in zip(shared.setdefault(s, here), here, strict=True):
                if a is not b:
                    mip.model.add_linear_constraint(a == b)
    used = mathopt.fast_sum(memory) + peak
    if objective == "time" and np.isfinite(chain.capacity):
        mip.model.add_linear_constraint(used <= (chain.capacity - chain.fixed_bytes) / byte)
    mip.model.minimize(mathopt.fast_sum(times) if objective == "time" else used)
    result = _run(mip.model, nodes, precision)
    if not result.has_primal_feasible_solution():
        raise Infeasible("the flow program found no assignment within the capacity", -np.inf, np.inf, None)
    variants, choices = mip.read(result)
    bound = -np.inf
    if objective == "time":
        bound = chain.fixed_time + result.best_objective_bound() * second * (1 - TOLERANCE)
    return _solution(chain, variants, choices, bound)


def _factors(rows: Array) -> list[Array]:
    """Two lots of rows whose largest sums add up to the largest of ``rows``, where those are all pairs of them (what the
    forward may take with what the backward may take); else the rows as they are. Far fewer, and half as dense."""
    columns = range(rows.shape[1])

    def together(a: int, b: int) -> bool:
        pairs, left, right = (len(np.unique(rows[:, at], axis=0)) for at in ([a, b], [a], [b]))
        return pairs < left * right

    start = next((c for c in columns if len(np.unique(rows[:, c])) > 1), 0)
    one = {start}
    while more := {b for b in columns if b not in one and any(together(a, b) for a in one)}:
        one |= more
    mask = np.isin(columns, sorted(one))
    pair = [np.unique(np.where(keep, rows, 0.0), axis=0) for keep in (mask, ~mask)]
    return pair if len(pair[0]) * len(pair[1]) == len(np.unique(rows, axis=0)) else [rows]


def _run(model: mathopt.Model, nodes: int, precision: float) -> mathopt.SolveResult:
    """HiGHS; where it claims infeasibility, SCIP (HiGHS has been seen to claim it of a chain that one assignment fits)."""
    params = mathopt.SolveParameters(random_seed=0, relative_gap_tolerance=precision, node_limit=nodes)
    with aside():
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=params)
    if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
        result = mathopt.solve(model, mathopt.SolverType.GSCIP, params=params)
    return result


def _units(chain: Chain) -> tuple[float, float]:
    """Units of time and memory in which the program's coefficients are at most about one."""
    time, byte = 0.0, chain.capacity if 0 < chain.capacity < np.inf else 0.0
    for kind in chain.kinds:
        for block in kind.variants:
            for table in (*block.unary, *(e.table for e in block.edges)):
                finite = table[np.isfinite(table).all(axis=-1)]
                if len(finite):
                    time = max(time, float((finite @ chain.time_rows.T).max()))
                    byte = max(byte, float((finite @ (chain.bytes_row + chain.transient_rows).T).max()))
    return time or 1.0, byte or 1.0


def flow_size(chain: Chain) -> float:
    """Number of variables of ``flow_mip``; inf where neighbours' boundary variables do not correspond one by one."""
    for a, b in zip(chain.sequence, chain.sequence[1:], strict=False):
        left, right = chain.kinds[a], chain.kinds[b]
        sizes = [[kind.variants[0].sizes[v] for v in at] for kind, at in ((left, left.exit), (right, right.entry))]
        if sizes[0] != sizes[1]:
            return float("inf")
    per_kind = [sum(sum(b.sizes) + sum(int(np.prod(e.shape)) for e in b.edges) for b in kind.variants) for kind in chain.kinds]
    return float(sum(per_kind[k] for k in chain.sequence))


def _dot(row: Array, cost: list[list[mathopt.LinearTerm]]) -> mathopt.LinearSum:
    return mathopt.fast_sum([float(w) * term for w, terms in zip(row, cost, strict=True) if w for term in terms])
