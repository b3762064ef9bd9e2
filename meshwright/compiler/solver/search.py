"""The loop between bound, columns and incumbent, for one choice of the shared variables.

    price (pricing.py)     exact minimum of the chain at multipliers -> lower bound and new columns
    relax (master.py)      linear program over known columns         -> next multipliers (Kelley's cutting planes on the dual)
    choose (master.py)     integer program over known columns        -> incumbent, memory exact, copies free to differ,
                                                                        all positions agree on the shared variables
    round (rounding.py)    a knapsack between the path's states      -> incumbent, where copies are many

``Search.run`` alternates the first two until the bound meets the linear program or the demanded gap, asks the third for
incumbents, and takes up all columns whose slack is within the remaining gap before it gives up. If the unconstrained optimum
does not fit, least memory is solved first by the same loop: it ends in columns that fit, or in ``Infeasible`` with its bound.

Source: Dantzig and Wolfe 1960; Kelley 1960; Geoffrion 1974 (Lagrangian relaxation for integer programming).
"""

from __future__ import annotations

import time as clock
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.compiler.solver.chain import Array, Beaten, Chain, Infeasible, Solution, evaluate
from meshwright.compiler.solver.master import NODES, Scale, choose, relax
from meshwright.compiler.solver.pricing import Column, Group, Multipliers, Pricer, Pricing, held_back
from meshwright.compiler.solver.rounding import rounded

ROUNDS = 40
"""Most cutting-plane rounds; the linear program meets the bound in 5 to 15."""
FEW, MANY = 8, 200
"""Columns taken per kind and round, and before giving up."""
_DEARER, _BEYOND = 3, 1.2
"""So many prices of memory are tried at which nothing here may be faster, each so much further off than it seems (chosen)."""
_WORTH = 0.01
"""What may be faster than a solution known elsewhere by no more than this part is not worth a program over so many columns that
the effort left is not enough for all of its nodes (chosen)."""


Progress = Callable[[float, float, str], None]
"""Called with (incumbent time, bound, phase)."""


@dataclass
class Search:
    """State of the search: known columns, best bound with its multipliers, incumbent. Lives for one call of ``solve``.

    ``cutoff``: time of a solution known elsewhere. ``strict``: end, by ``Beaten``, once nothing here can be faster. ``start``:
    multipliers that are tried at once. ``hopeless``: bytes that to need more of is the end; ``memory_bound``: that any
    assignment needs. ``loose``: columns within the capacity that may disagree on the shared variables, and their time.
    ``widest``: the gap with which it may end when its effort is spent, if that is wider.
    """

    chain: Chain
    pricer: Pricer
    gap: float
    progress: Progress | None = None
    fixed: Mapping[int, int] = field(default_factory=dict)
    scale: Scale | None = None
    cutoff: float = np.inf
    strict: bool = False
    start: Multipliers | None = None
    columns: dict[tuple, Column] = field(default_factory=dict)
    bound: float = -np.inf
    best: Multipliers | None = None
    incumbent: list[Column] | None = None
    time: float = np.inf
    loose: list[Column] | None = None
    loose_time: float = np.inf
    lightest: list[Column] | None = None
    memory_bound: float = -np.inf
    hopeless: float = np.inf
    widest: float = 0.0
    iterations: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> Search:
        """Search until the gap is reached, nothing is left to try, or the time is over. Raises Infeasible, Beaten."""
        self._check_memory()
        self._price_out()
        self._unconstrained()
        self.check()
        if self.loose is None:
            self._least_memory()
        self._descend()
        self.check()
        self._enrich()
        if self.time > self.loose_time:
            self._choose(together=True)
        return self

    def check(self) -> None:
        """Raise Beaten if what is known elsewhere cannot be improved by more than the gap."""
        self.beaten(self.bound, self.time)

    def beaten(self, bound: float, time: float, worth: float = 0.0) -> None:
        """The same, where all choices take at least ``bound`` and the best found takes ``time``. ``worth``: what gains no more
        than this part is left too."""
        if self.strict and self.cutoff <= time and self.cutoff - bound <= max(self.tolerance, worth) * abs(self.cutoff):
            raise Beaten(bound)

    def _check_memory(self) -> None:
        """Raise Infeasible once any assignment is known to need more memory than there may be."""
        if self.memory_bound > self.hopeless:
            raise infeasible(self.chain, self.memory_bound, self.memory_bound, None)

    @property
    def late(self) -> bool:
        """The effort is spent."""
        return self.pricer.effort.over

    @property
    def tolerance(self) -> float:
        """The gap with which it may end: the one that was asked for, and one that widens to ``widest`` as the effort is
        spent."""
        return max(self.gap, self.widest * self.pricer.effort.part)

    @property
    def done(self) -> bool:
        """The demanded gap is reached, by a solution known elsewhere (``cutoff``) too. Columns that do not agree count unless
        ``strict``: it may end by what is known elsewhere, and to raise the bound takes less than to branch. They do where they
        are so fast that no bound will rise to that."""
        hidden = self.strict and self.loose_time >= self.cutoff * (1 - self.tolerance)
        return self.within(min(self.time if hidden else self.loose_time, self.cutoff))

    def within(self, time: float) -> bool:
        """Whether nothing is faster than so many seconds by more than the demanded gap."""
        return time - self.bound <= self.tolerance * abs(time)

    def price(self, at: Multipliers, everyone: bool = False) -> tuple[float, Pricing]:
        """Lower bound at multipliers (of the time for rho 1, of the memory for rho 0), and what pricing found."""
        self.iterations += 1
        with self._phase("price"):
            priced = self.pricer.price(at, self.fixed, everyone)
        value = priced.value * (1 - self.pricer.rounding)
        if not at.rho:
            return value + self.chain.fixed_bytes, priced
        free = self.chain.capacity - self.chain.fixed_bytes
        return self.chain.fixed_time + value - (at.memory * free if at.memory else 0.0), priced

    def solution(self, columns: Sequence[Column], bound: float, status: str) -> Solution:
        """Columns per position as a solution, its costs counted from the tables again."""
        variants, choices = tuple(c.variant for c in columns), tuple(c.choices for c in columns)
        time, bytes_, transient = evaluate(self.chain, variants, choices)
        bound = min(bound, time)
        gap = (time - bound) / time if time else 0.0
        known, seconds = len(self.columns), dict(self.seconds)
        return Solution(variants, choices, time, bytes_, transient, bound, gap, known, self.iterations, status, seconds)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = clock.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + clock.perf_counter() - start

    def _report(self, phase: str) -> None:
        if self.progress is not None:
            self.progress(self.time, self.bound, phase)

    def _listed(self) -> list[Column]:
        return [self.columns[key] for key in sorted(self.columns)]

    def _memory(self, columns: Sequence[Column]) -> float:
        return self.chain.fixed_bytes + sum(c.bytes_ for c in columns) + max(c.transient for c in columns)

    def _offer(self, columns: Sequence[Column] | None) -> None:
        """Take a sequence of columns as incumbent if it fits, agrees on the shared variables and is faster."""
        if columns is None or self._memory(columns) > self.chain.capacity:
            return
        time = self.chain.fixed_time + sum(c.time for c in columns)
        if time < self.loose_time:
            self.loose_time, self.loose = time, list(columns)
        if time < self.time and agree(self.chain, columns):
            self.time, self.incumbent = time, list(columns)

    def _round(self, priced: Pricing) -> None:
        """Offer what fits between the states of the priced path."""
        if np.isfinite(self.chain.capacity):
            self._offer(rounded(self.chain, priced.path, self._listed()))

    def _add(self, priced: Pricing, limit: float, many: int, everyone: bool = False) -> tuple[int, list[Column] | None]:
        """Take up the path's columns, up to ``many`` per kind within ``limit`` of slack, with ``everyone`` each group's best.

        Returns how many are new, and the path's columns (None if a heuristic minimizer of a wide block is forbidden).
        """
        with self._phase("columns"):
            wanted: dict[Group, dict[tuple[int, int], None]] = {}
            path: list[tuple[Group, tuple[int, int]]] = []
            for k, pair in zip(self.chain.sequence, priced.path, strict=True):
                path.append(((k, int(priced.tables[k][(slice(None), *pair)].argmin())), pair))
            for group, pair in [*path, *_near(priced, self.pricer.groups, limit, many, everyone)]:
                wanted.setdefault(group, {})[pair] = None
            got = self.pricer.columns(priced, {g: list(pairs) for g, pairs in wanted.items()})
            new = sum(c.key not in self.columns for c in got)
            at = {}
            for c in got:
                at[(c.kind, c.variant), (c.entry, c.exit)] = self.columns.setdefault(c.key, c)
        return new, [at[step] for step in path] if all(step in at for step in path) else None

    def _multipliers(self, memory: float, rho: float) -> Multipliers:
        """Uniform alpha, the transient's share spread evenly over all positions and their moments."""
        rows, moments = len(self.chain.time_rows), len(self.chain.transient_rows)
        alpha: dict[Group, Array] = {g: np.full(rows, 1 / rows) for g in self.pricer.groups}
        each = np.full((len(self.chain.kinds), moments), memory / len(self.chain.sequence) / moments)
        nu = held_back(self.chain, memory, each)
        return Multipliers(alpha, memory, tuple(tuple(map(float, one)) for one in nu), rho)

    def _relax(self, rho: float) -> tuple[float, Multipliers]:
        assert self.scale is not None
        with self._phase("relax"):
            value, at = relax(self.chain, self._listed(), self.pricer.groups, self.scale, rho)
            self.pricer.effort.relaxed(len(self.columns))
        return value, at

    def _choose(self, rho: float = 1.0, together: bool = False) -> list[Column] | None:
        assert self.scale is not None
        if rho and self.incumbent is not None and not self.pricer.effort.affords(len(self.columns)):
            return None
        with self._phase("choose"):
            precision = self.gap / 10 if rho else 1e-6
            to_beat = min(self.time if together else self.loose_time, self.cutoff if self.strict else np.inf) * (1 - precision)
            chosen = choose(self.chain, self._listed(), self.scale, rho, precision, self.pricer.effort, together, to_beat)
            self._offer(chosen)
        return chosen

    def _unconstrained(self) -> None:
        """First columns, the scales, and the optimum without memory if it fits."""
        at = self._first() if self.best is None else self.best
        bound, priced = self.price(at)
        if not np.isfinite(bound):
            raise Infeasible("forbidden choices leave no assignment of the chain", np.inf, np.inf, None)
        self._raise(bound, at)
        self.check()  # columns take as long as their prices
        _, path = self._add(priced, 0.0, FEW, everyone=True)
        if self.scale is None:
            known, positions = self._listed(), len(self.chain.sequence)
            seconds = max([c.time for c in known], default=0.0) * positions
            bytes_ = max([c.bytes_ for c in known], default=0.0) * positions
            memory = abs(self.chain.capacity) if np.isfinite(self.chain.capacity) else bytes_
            self.scale = Scale(seconds or 1.0, memory or 1.0)
        self._offer(path)
        if self.start is not None:
            self._round(priced)
        self._report("start")

    def _first(self) -> Multipliers:
        return self.start or self._multipliers(self._memory_price(), 1.0)

    def _memory_price(self) -> float:
        """Seconds a byte to begin with: such that to fill the memory costs as much as a solution known elsewhere takes. Where
        memory is what binds that often proves at once that nothing here is faster."""
        bound = self.strict and 0.0 < self.chain.capacity < np.inf
        return self.cutoff / self.chain.capacity if bound else 0.0

    def _price_out(self) -> None:
        """Raise Beaten if memory is so dear that nothing is faster than what is known elsewhere, though it has as much as is
        not hopeless yet: then it need not be known whether anything fits. The price is where the bound would come to that time
        if it rose as it does by what the priced path needs."""
        at = self._first()
        if not (self.strict and at.memory > 0.0):
            return
        bound, priced = self.price(at)
        if not np.isfinite(bound):
            return
        self._raise(bound, at)
        self.check()
        _, path = self._add(priced, 0.0, 0)
        needed, more = 0.0 if path is None else self._memory(path), self.hopeless - self.chain.capacity
        rises = needed - self.hopeless
        if path is None or needed <= self.chain.capacity:
            return
        if self.start is None and rises > 0.0:  # the price of what passes was spread evenly
            at = replace(at, transient=self._at_worst(max(path, key=lambda column: column.transient), at.memory))
            self._raise(self.price(at)[0], at)
        value = self.bound - at.memory * more
        self.beaten(value, self.time)
        for _ in range(_DEARER):
            if rises <= 0.0:
                return
            factor = 1.0 + _BEYOND * (self.cutoff - value) / (rises * at.memory)
            shares = tuple(tuple(nu * factor for nu in one) for one in at.transient)
            dearer = replace(at, memory=at.memory * factor, transient=shares)
            found = self.price(dearer)[0] - dearer.memory * more
            self._raise(found, dearer)
            self.beaten(found, self.time)
            at, value, rises = dearer, found, (found - value) / (dearer.memory - at.memory)

    def _raise(self, bound: float, at: Multipliers) -> None:
        """Take a bound for the best if it is."""
        if bound > self.bound:
            self.bound, self.best = bound, at

    def _at_worst(self, column: Column, memory: float) -> tuple[tuple[float, ...], ...]:
        """Multipliers of the transients that a price of memory may have, all of it where a column's is largest."""
        nu = np.zeros((len(self.chain.kinds), len(self.chain.transient_rows)))
        moment = int((self.chain.transient_rows @ column.cost).argmax())
        nu[column.kind, moment] = memory / self.chain.sequence.count(column.kind)
        return tuple(tuple(map(float, one)) for one in held_back(self.chain, memory, nu))

    def _least_memory(self) -> None:
        """Columns that fit, or the certificate that none do."""
        assert self.scale is not None
        bound, least, lightest = -np.inf, np.inf, None
        at = self._multipliers(1.0, 0.0)
        for _ in range(ROUNDS):
            found, priced = self.price(at)
            bound = max(bound, found)
            self.memory_bound = max(self.memory_bound, bound)
            self._check_memory()
            new, path = self._add(priced, 0.0, FEW)
            if path is not None and self._memory(path) < least:
                least, lightest = self._memory(path), path
            self._offer(path)
            self._report("least memory")
            if self.loose is not None:
                return
            value, at = self._relax(0.0)
            at = replace(at, alpha=self._multipliers(1.0, 0.0).alpha)
            if not new or self.late or value * self.scale.memory + self.chain.fixed_bytes <= bound * (1 + 1e-9):
                break
        chosen = self._choose(0.0)
        if chosen is not None and self._memory(chosen) < least:
            least, lightest = self._memory(chosen), chosen
        self.lightest = lightest
        if self.loose is None:
            agreed = lightest is not None and agree(self.chain, lightest)
            nearest = self.solution(lightest, -np.inf, "infeasible") if lightest is not None and agreed else None
            raise infeasible(self.chain, bound, least, nearest)

    def _descend(self) -> None:
        """Cutting planes on the dual until the bound meets the linear program, the gap is reached, or nothing new comes."""
        value = -np.inf
        for round_ in range(ROUNDS):
            if self.done or self.late:
                return
            value, at = self._relax(1.0)
            assert self.scale is not None
            value = value * self.scale.time + self.chain.fixed_time
            bound, priced = self.price(at)
            new, path = self._add(priced, max(self.time - bound, 0.0), FEW)
            self._raise(bound, at)
            self._offer(path)
            self._round(priced)
            near = self.bound >= value - self.gap * abs(value)
            if new and not self.done and (near or round_ % 4 == 3) and self._may_improve(value):
                self._choose()
            self._report("descend")
            if not new or self.bound >= value * (1 - 1e-7):
                break
        if not self.done and self._may_improve(value):
            self._choose()

    def _may_improve(self, value: float) -> bool:
        """Whether known columns, whose linear program has this value, may be better than what is known."""
        return self.loose is None or value < min(self.loose_time, self.cutoff)

    def _enrich(self) -> None:
        """All columns that could still improve the incumbent at the best multipliers."""
        if self.done or self.late or self.best is None:
            return
        bound, priced = self.price(self.best, everyone=True)
        new, _ = self._add(priced, self.loose_time - bound, MANY, everyone=True)
        self._round(priced)
        if self.pricer.effort.nodes(len(self.columns), NODES) < NODES:
            self.beaten(self.bound, self.time, _WORTH)
        if new and not self.done:
            self._choose()
        self._report("enrich")


def agree(chain: Chain, columns: Sequence[Column]) -> bool:
    """Whether all positions have the shared variables at the same choices."""
    return all(len(seen) == 1 for seen in shared_states(chain, columns).values())


def shared_states(chain: Chain, columns: Sequence[Column]) -> dict[int, Counter[int]]:
    """For every shared variable, how many positions have it at each choice."""
    out: dict[int, Counter[int]] = {}
    for column in columns:
        for s, var in chain.kinds[column.kind].shared:
            out.setdefault(s, Counter())[column.choices[var]] += 1
    return out


def infeasible(chain: Chain, bound: float, least: float, solution: Solution | None) -> Infeasible:
    """The error with the certified bound and the least memory found."""
    return Infeasible(
        f"no assignment found within the capacity of {chain.capacity:.6g} bytes: any needs at least {bound:.6g}, "
        f"the least found needs {least:.6g}",
        bound,
        least,
        solution,
    )


def _near(
    priced: Pricing, groups: Sequence[Group], limit: float, many: int, everyone: bool
) -> Iterator[tuple[Group, tuple[int, int]]]:
    """Groups and state pairs of least slack of what was evaluated: per kind the first ``many`` in ``limit``, with ``everyone``
    each group's."""
    groups = [group for group in groups if group in priced.results]
    for k, v in groups if everyone else ():
        least = np.unravel_index(int(priced.slack[k][v].argmin()), priced.slack[k][v].shape)
        yield (k, v), (int(least[0]), int(least[1]))
    for k in dict.fromkeys(g[0] for g in groups):
        known = np.array([(k, v) in priced.results for v in range(len(priced.slack[k]))])
        flat = np.where(known[:, None, None], priced.slack[k], np.inf).ravel()
        near = np.flatnonzero(flat <= limit)
        for index in near[np.argsort(flat[near], kind="stable")[:many]]:
            v, entry, leave = (int(i) for i in np.unravel_index(index, priced.slack[k].shape))
            yield (k, v), (entry, leave)
