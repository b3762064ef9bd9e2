"""Pricing of a chain at given multipliers: the exact minimum over all copies, and the columns that reach it.

With the maximum over time rows and the memory row moved into the objective by multipliers

    alpha[k, v] in the simplex over rows,   lambda >= 0,   nu[k, m] >= 0 with sum_km copies_k * nu_km <= lambda

the chain separates into blocks coupled by boundary states only. A block of kind k in variant v is eliminated for the weights
``alpha[k, v] @ time_rows + lambda * bytes_row + nu[k] @ transient_rows`` (once per kind, however many copies), its kind's table
[entry states, exit states] is the minimum over variants, and dynamic programming over the boundary states of the sequence gives
the minimum of the whole (``Pricer.price``). Minus ``lambda * available memory`` it bounds the chain's time from below.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt.python import mathopt

from meshwright.compiler.solver.chain import Array, Chain, Kind
from meshwright.compiler.solver.effort import Effort
from meshwright.compiler.solver.elimination import Eliminated, Eliminator, Tables, Together, eliminated
from meshwright.compiler.solver.families import Family, families

Group = tuple[int, int]
"""(kind, variant)."""
LAZY = 3_000_000
"""Table entries of an elimination from which on a lower bound is tried before it is run (some milliseconds each)."""
KNOWN = 1 << 23
"""Table entries of eliminations that are remembered: what is priced again at the same weights, as all blocks are while the
variables of the root are fixed one by one, is looked up."""
TOGETHER, LARGE = 64, 1 << 24
"""So many groups are eliminated together at most, and those that take so many table entries together."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One way to run one position of a kind: an assignment with its boundary states, resources [K] and exact time."""

    kind: int
    variant: int
    choices: tuple[int, ...]
    entry: int
    exit: int
    cost: Array
    time: float
    bytes_: float
    transient: float

    @property
    def key(self) -> tuple[int, int, tuple[int, ...]]:
        """Identity and order of columns."""
        return self.kind, self.variant, self.choices


@dataclass(frozen=True, slots=True, eq=False)
class Multipliers:
    """A point of the dual: ``alpha`` [R] per group, ``memory`` (lambda), ``transient`` (nu) [M] per kind."""

    alpha: Mapping[Group, Array]
    memory: float
    transient: tuple[tuple[float, ...], ...]
    rho: float = 1.0

    def weights(self, chain: Chain, groups: Sequence[Group]) -> dict[Group, Array]:
        """Weight vectors [K] of groups."""
        bytes_: dict[int, Array] = {}
        for k in dict.fromkeys(k for k, _ in groups):
            both = self.memory * chain.bytes_row + np.array(self.transient[k]) @ chain.transient_rows
            bytes_[k] = np.maximum(both, 0.0)  # less than nothing by rounding alone (``held_back``)
        return {group: self.rho * (self.alpha[group] @ chain.time_rows) + bytes_[group[0]] for group in groups}


def held_back(chain: Chain, memory: float, transient: Array) -> Array:
    """``nu`` [kinds, M], shrunk where a kind's weights of bytes would be less than nothing, which no pricing may do."""
    taken = np.maximum(-transient @ chain.transient_rows, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.where(taken > memory * chain.bytes_row, memory * chain.bytes_row / taken, 1.0).min(axis=1)
    return np.asarray(transient * fits[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Pricing:
    """What pricing found: the chain's least weighted cost ``value``, per kind the tables of its variants, and slacks.

    ``tables[k]`` is [variants, entry, exit]; ``slack[k]`` of the same shape is how much a copy of the kind in that variant and
    between those states adds to ``value`` at least, at the best position for it. ``path`` has (entry, exit) per position.
    """

    value: float
    tables: tuple[Array, ...]
    slack: tuple[Array, ...]
    path: tuple[tuple[int, int], ...]
    results: Mapping[Group, Eliminated]


class Pricer:
    """Eliminators of all groups of a chain, planned once. ``effort`` counts what they do."""

    def __init__(self, chain: Chain, effort: Effort | None = None) -> None:
        self.chain = chain
        self.effort = effort or Effort(np.inf)
        self._known: OrderedDict[tuple[Group, object, bytes], tuple[Eliminated, Array]] = OrderedDict()
        self._columns: WeakKeyDictionary[Eliminated, dict[tuple[int, int], Column | None]] = WeakKeyDictionary()
        self._held = 0
        self._tables = Tables()
        self._made: dict[int, list[Family]] = {}
        self._blocks = {
            (k, v): Eliminator(block, (*kind.entry, *kind.exit), self._tables)
            for k, kind in enumerate(chain.kinds)
            for v, block in enumerate(kind.variants)
        }
        self.copies = tuple(chain.sequence.count(k) for k in range(len(chain.kinds)))
        self._expand = tuple(_expansion(kind) for kind in chain.kinds)
        self._history: dict[tuple, list[tuple[Array, Array]]] = {}
        self.groups = tuple(g for g in self._blocks if self.copies[g[0]])

    @property
    def largest(self) -> int:
        """Entries of the largest table that any elimination makes."""
        return max(b.plan.largest for b in self._blocks.values())

    @property
    def rounding(self) -> float:
        """What floating point may have added to a priced value, relative to it."""
        return max(b.plan.rounding for b in self._blocks.values())

    @property
    def work(self) -> int:
        """Table entries that one pricing goes through."""
        return sum(self._blocks[g].plan.work for g in self.groups)

    def prices(self, chain: Chain) -> bool:
        """Whether a chain differs at most in its capacity from the one that this is of."""
        own = self.chain
        same = own.kinds is chain.kinds and own.time_rows is chain.time_rows and own.sequence == chain.sequence
        return same and own.bytes_row is chain.bytes_row and own.transient_rows is chain.transient_rows

    def price(self, at: Multipliers, fixed: Mapping[int, int], everyone: bool = False) -> Pricing:
        """Minimum of the weighted chain; ``fixed`` holds shared variables at a choice, the others are each position's own.

        Groups of a family (families.py), and expensive ones, are evaluated only if a shortest path would use them at a lower
        bound, from the family or from earlier weights; with ``everyone`` all are. Where multipliers say nothing of a group
        (alpha is even), those of its family serve: any are a point of the dual.
        """
        at = self._told(at)
        results: dict[Group, Eliminated] = {}
        tables = [
            np.full((len(kind.variants), kind.states(kind.entry), kind.states(kind.exit)), np.inf) for kind in self.chain.kinds
        ]
        bounded = {} if everyone else self._families_below(at, fixed)
        cheap = [group for group in self.groups if everyone or self._blocks[group].plan.work < LAZY]
        self._evaluate([group for group in cheap if group not in bounded], at, fixed, tables, results)
        for k, v in self.groups:
            if (k, v) in bounded:
                tables[k][v] = bounded[k, v]
            elif (k, v) not in results:
                tables[k][v] = self._below((k, v), at, fixed)
        while True:
            priced = self._chain(tables, results)
            self.effort.priced(0, len(self.chain.sequence))
            used = {
                (k, int(tables[k][(slice(None), *pair)].argmin()))
                for k, pair in zip(self.chain.sequence, priced.path, strict=True)
            }
            missing = sorted(used - results.keys())
            if not missing:
                return priced
            self._evaluate(missing, at, fixed, tables, results)

    def _evaluate(
        self, groups: Sequence[Group], at: Multipliers, fixed: Mapping[int, int], tables: list[Array],
        results: dict[Group, Eliminated],
    ) -> None:
        """Tables and results of groups: those known at these weights are looked up, the others eliminated together."""
        weights = at.weights(self.chain, groups)
        questions = {(k, v): ((k, v), self._relevant(k, fixed), weights[k, v].tobytes()) for k, v in groups}
        unknown = [group for group in groups if questions[group] not in self._known]
        batches, made = self._batches(unknown), dict[Group, Eliminated]()
        for k, v in groups:
            question = questions[k, v]
            known = self._known.get(question)
            if known is not None:
                results[k, v], tables[k][v] = known
                continue
            if (k, v) not in made:
                batch = batches.get((k, v), [(k, v)])
                several = [(self._blocks[one], weights[one], self._fixed(one[0], fixed)) for one in batch]
                made.update(zip(batch, eliminated(several), strict=True))
            results[k, v] = done = made.pop((k, v))
            tables[k][v] = self._expanded(k, done) + float(self.chain.kinds[k].variant_costs[v] @ weights[k, v])
            plan, found = done.plan, tables[k][v].copy()
            self.effort.priced(plan.work, len(plan.steps))
            if plan.work >= LAZY:
                self._history.setdefault(((k, v), questions[k, v][1]), []).append((weights[k, v], found))
            self._known[question] = done, found
            self._held += plan.entries
            while self._held > KNOWN and len(self._known) > 1:
                _, (old, _) = self._known.popitem(last=False)
                self._held -= old.plan.entries

    def _batches(self, groups: Sequence[Group]) -> dict[Group, list[Group]]:
        """For each group those that it is eliminated together with, all of one plan."""
        same: dict[int, list[Group]] = {}
        for group in groups:
            same.setdefault(id(self._blocks[group].plan), []).append(group)
        out = {}
        for alike in same.values():
            most = max(1, min(TOGETHER, LARGE // max(1, self._blocks[alike[0]].plan.work)))
            for start in range(0, len(alike), most):
                batch = alike[start : start + most]
                out.update(dict.fromkeys(batch, batch))
        return out

    def _fixed(self, k: int, fixed: Mapping[int, int]) -> dict[int, Array]:
        """Costs of a kind's variables that hold the shared ones at their choices."""
        extra = {}
        for s, var in self.chain.kinds[k].shared:
            if s in fixed:
                extra[var] = np.full(self.chain.shared_sizes[s], np.inf)
                extra[var][fixed[s]] = 0.0
        return extra

    def _expanded(self, k: int, found: Eliminated) -> Array:
        """[entry, exit] of a kind from a table over its kept variables."""
        index, clash = self._expand[k]
        table = np.asarray(found.table[index]) if index else np.broadcast_to(found.table, clash.shape).copy()
        table[clash] = np.inf
        return table

    def _families_below(self, at: Multipliers, fixed: Mapping[int, int]) -> dict[Group, Array]:
        """Lower bounds of the tables of groups that are of a family, each at weights of its own: those that its members have in
        the mean, which are as good a point of the dual."""
        asked: dict[int, list[tuple[int, Family, Array]]] = {}
        for k in range(len(self.chain.kinds)):
            for family in self._families(k):
                first = k, family.members[0]
                alpha = np.mean([at.alpha[k, v] for v in family.members], axis=0)
                weights = replace(at, alpha={first: alpha}).weights(self.chain, [first])[first]
                asked.setdefault(id(family.least.plan), []).append((k, family, weights))
        found: dict[Group, Array] = {}
        for several in asked.values():
            requests = [(family.least, weights, self._fixed(k, fixed)) for k, family, weights in several]
            for (k, family, weights), done in zip(several, eliminated(requests), strict=True):
                self.effort.priced(done.plan.work, len(done.plan.steps))
                table = self._expanded(k, done)
                for v in family.members:
                    own = float(self.chain.kinds[k].variant_costs[v] @ weights) + family.more(v, weights)
                    found[k, v] = table + own
        return found

    def _told(self, at: Multipliers) -> Multipliers:
        """The same with multipliers for groups of which they say nothing."""
        alpha = dict(at.alpha)
        for k in range(len(self.chain.kinds)):
            for family in self._families(k):
                own = {v: at.alpha[k, v] for v in family.members}
                told = [one for one in own.values() if (one != one[0]).any()]
                if told:
                    mean = np.mean(told, axis=0)
                    alpha.update({(k, v): mean for v, one in own.items() if (one == one[0]).all()})
        return replace(at, alpha=alpha)

    def _families(self, k: int) -> list[Family]:
        """The families of a kind that some position is of."""
        if k not in self._made:
            self._made[k] = families(self.chain.kinds[k], self._tables) if self.copies[k] else []
        return self._made[k]

    def _relevant(self, k: int, fixed: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
        return tuple((s, fixed[s]) for s, _ in self.chain.kinds[k].shared if s in fixed)

    def _below(self, group: Group, at: Multipliers, fixed: Mapping[int, int]) -> Array:
        """A lower bound of the group's table, from tables T_h at earlier weights w_h.

        The table is a minimum of linear functions of the weights with coefficients >= 0, so ``a >= 0`` and
        ``sum_h a_h w_h <= w`` give ``sum_h a_h T_h <= T``; the best such ``a`` for the tables' minima is a linear program.
        """
        kind = self.chain.kinds[group[0]]
        known = self._history.get((group, self._relevant(group[0], fixed)), [])
        finite = [(w, t) for w, t in known if np.isfinite(t).any()]
        out = np.zeros((kind.states(kind.entry), kind.states(kind.exit)))
        if not finite:
            return out
        weights = at.weights(self.chain, [group])[group]
        unit = max(float(weights.max()), 1e-300)
        least = [float(t.min()) for _, t in finite]
        top = max(*least, 1e-300)
        model = mathopt.Model()
        factors = [model.add_variable(lb=0) for _ in finite]
        for r in range(len(weights)):
            terms = [float(w[r] / unit) * a for (w, _), a in zip(finite, factors, strict=True) if w[r] > 0]
            if terms:
                model.add_linear_constraint(mathopt.fast_sum(terms) <= float(weights[r] / unit))
        model.maximize(mathopt.fast_sum([m / top * a for m, a in zip(least, factors, strict=True)]))
        result = mathopt.solve(model, mathopt.SolverType.GLOP, params=mathopt.SolveParameters(threads=1))
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            return out
        values = result.variable_values()
        shares = np.array([values[a] if values[a] > 1e-12 else 0.0 for a in factors])
        # rounding may break sum_h a_h w_h <= w by a hair: shrink until it holds
        mixed = np.sum([share * w for share, (w, _) in zip(shares, finite, strict=True)], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            shrink = min(1.0, float(np.nanmin(np.where(mixed > 0, weights / mixed, 1.0))))
        for share, (_, t) in zip(shares * shrink, finite, strict=True):
            if share > 0:
                out = out + share * t
        return out

    def _chain(self, tables: list[Array], results: dict[Group, Eliminated]) -> Pricing:
        sequence = self.chain.sequence
        best = [t.min(axis=0) for t in tables]
        n = len(sequence)
        forward = [np.zeros(best[sequence[0]].shape[0])]
        for k in sequence:
            forward.append((forward[-1][:, None] + best[k]).min(axis=0))
        backward = [np.zeros(best[sequence[-1]].shape[1])]
        for k in reversed(sequence):
            backward.append((best[k] + backward[-1]).min(axis=1))
        backward.reverse()
        value = float(backward[0].min())
        through: list[Array | None] = [None] * len(tables)
        for p, k in enumerate(sequence):
            here = forward[p][:, None] + backward[p + 1]
            known = through[k]
            through[k] = here if known is None else np.minimum(known, here)
        slack = tuple(
            np.full_like(t, np.inf) if h is None or not np.isfinite(value) else t + h - value
            for t, h in zip(tables, through, strict=True)
        )
        path = []
        state = int(backward[0].argmin())
        for p in range(n):
            leave = int((best[sequence[p]][state] + backward[p + 1]).argmin())
            path.append((state, leave))
            state = leave
        return Pricing(value, tuple(tables), slack, tuple(path), results)

    def columns(self, priced: Pricing, wanted: Mapping[Group, list[tuple[int, int]]]) -> list[Column]:
        """The minimizers of groups between (entry, exit) states, with their true resources."""
        asked: list[tuple[Eliminated, tuple[int, int]]] = []
        missing: dict[Together, list[tuple[Group, Eliminated, tuple[int, int]]]] = {}
        for (k, v), pairs in sorted(wanted.items()):
            found = priced.results.get((k, v))
            if found is None:
                continue
            known = self._columns.setdefault(found, {})
            for pair in pairs:
                if np.isfinite(priced.tables[k][(v, *pair)]):
                    asked.append((found, pair))
                    if pair not in known:
                        missing.setdefault(found.together, []).append(((k, v), found, pair))
        for together, several in missing.items():
            states = np.array([self._states(group, pair) for group, _, pair in several], dtype=np.intp)
            blocks = np.array([found.number for _, found, _ in several], dtype=np.intp)
            for (group, found, pair), row in zip(several, together.assignments(states, blocks).tolist(), strict=True):
                self._columns[found][pair] = self._column(group, pair, row)
        return [column for found, pair in asked if (column := self._columns[found][pair]) is not None]

    def _states(self, group: Group, pair: tuple[int, int]) -> list[int]:
        """The states of the kept variables between (entry, exit) states."""
        kind, states = self.chain.kinds[group[0]], dict[int, int]()
        for boundary, state in zip((kind.entry, kind.exit), pair, strict=True):
            for u in reversed(boundary):
                state, states[u] = divmod(state, kind.variants[0].sizes[u])
        return [states[u] for u in self._blocks[group].plan.keep]

    def _column(self, group: Group, pair: tuple[int, int], choices: list[int]) -> Column | None:
        """A minimizer with its resources; None if it is forbidden."""
        (k, v), chain = group, self.chain
        cost = self._blocks[group].cost(choices)
        if cost is None:
            return None
        cost = cost + chain.kinds[k].variant_costs[v]
        if not np.isfinite(cost).all():
            return None
        bytes_, transient = float(chain.bytes_row @ cost), chain.transient(cost)
        return Column(k, v, tuple(choices), *pair, cost, chain.time(cost), bytes_, transient)


def _expansion(kind: Kind) -> tuple[tuple[NDArray[np.intp], ...], NDArray[np.bool_]]:
    """Index of the kept table for every (entry, exit) state, and where the two contradict each other (a common variable)."""
    sizes = kind.variants[0].sizes
    shape = (kind.states(kind.entry), kind.states(kind.exit))
    clash = np.zeros(shape, dtype=bool)
    at: dict[int, NDArray[np.intp]] = {}
    for axis, boundary in enumerate((kind.entry, kind.exit)):
        if not boundary:
            continue
        choices = np.unravel_index(np.arange(shape[axis]), [sizes[v] for v in boundary])
        for v, column in zip(boundary, choices, strict=True):
            spread = np.broadcast_to(column[:, None] if axis == 0 else column[None, :], shape)
            if v in at:
                clash |= at[v] != spread
            else:
                at[v] = spread
    return tuple(at[v] for v in sorted(at)), clash
