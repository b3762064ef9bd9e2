"""The solver: columns priced by variable elimination, combined by an integer program, certified by the Lagrangian bound.

    price (pricing.py)     exact minimum of the chain at multipliers -> lower bound and new columns
    relax (master.py)      linear program over known columns         -> next multipliers (Kelley's cutting planes on the dual)
    choose (master.py)     integer program over known columns        -> incumbent, memory exact, copies free to differ

``solve`` alternates the first two until the bound meets the linear program or the demanded gap, asks the third for incumbents,
and adds all columns whose slack is within the remaining gap before it gives up. If the unconstrained optimum does not fit, least
memory is solved first by the same loop: it ends in a feasible set of columns or in the certificate of ``Infeasible``.

Source: Dantzig and Wolfe 1960; Kelley 1960; Geoffrion 1974 (Lagrangian relaxation for integer programming).
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from meshwright.compiler.chain import BlockModel, Chain, Edge, Infeasible, Kind, Solution, evaluate
from meshwright.compiler.elimination import prune
from meshwright.compiler.master import Scale, choose, relax
from meshwright.compiler.pricing import Column, Group, Multipliers, Priced, Pricer

__all__ = ["BlockModel", "Chain", "Edge", "Infeasible", "Kind", "Solution", "evaluate", "prune", "solve"]

ROUNDS = 40
"""Most cutting-plane rounds; the linear program meets the bound in 5 to 15."""
FEW, MANY = 8, 200
"""Columns taken per kind and round, and before giving up."""

Progress = Callable[[float, float, str], None]
"""Called with (incumbent time, bound, phase)."""


@dataclass
class _Search:
    """State of one solve: known columns, best bound and incumbent; lives for one call."""

    chain: Chain
    pricer: Pricer
    gap: float
    deadline: float
    progress: Progress | None
    fixed: Mapping[int, int]
    scale: Scale = Scale(1.0, 1.0)
    columns: dict[tuple, Column] = field(default_factory=dict)
    bound: float = -np.inf
    best: Multipliers | None = None
    incumbent: list[Column] | None = None
    time: float = np.inf
    iterations: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = clock.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + clock.perf_counter() - start

    @property
    def late(self) -> bool:
        return clock.monotonic() > self.deadline

    @property
    def done(self) -> bool:
        return self.time - self.bound <= self.gap * abs(self.time)

    def listed(self) -> list[Column]:
        return [self.columns[key] for key in sorted(self.columns)]

    def memory(self, columns: Sequence[Column]) -> float:
        return self.chain.fixed_bytes + sum(c.bytes_ for c in columns) + max(c.transient for c in columns)

    def offer(self, columns: Sequence[Column] | None) -> None:
        """Take a sequence of columns as incumbent if it fits and is faster."""
        if columns is None or self.memory(columns) > self.chain.capacity:
            return
        time = self.chain.fixed_time + sum(c.time for c in columns)
        if time < self.time:
            self.time, self.incumbent = time, list(columns)

    def price(self, at: Multipliers) -> tuple[float, Priced]:
        """Lower bound at multipliers: of the time for rho 1, of the memory for rho 0."""
        self.iterations += 1
        with self.phase("price"):
            priced = self.pricer.price(at, self.fixed)
        if not at.rho:
            return priced.value + self.chain.fixed_bytes, priced
        free = self.chain.capacity - self.chain.fixed_bytes
        return self.chain.fixed_time + priced.value - (at.memory * free if at.memory else 0.0), priced

    def add(self, priced: Priced, limit: float, many: int, everyone: bool = False) -> tuple[int, list[Column]]:
        """Take up the columns of the path and up to ``many`` others per kind within ``limit`` of slack.

        Returns how many are new, and the path's columns.
        """
        with self.phase("columns"):
            wanted: dict[Group, dict[tuple[int, int], None]] = {}
            path: list[tuple[Group, tuple[int, int]]] = []
            for k, pair in zip(self.chain.sequence, priced.path, strict=True):
                path.append(((k, int(priced.tables[k][(slice(None), *pair)].argmin())), pair))
                wanted.setdefault(path[-1][0], {})[pair] = None
            for group, pair in _near(priced, self.pricer.groups, limit, many, everyone):
                wanted.setdefault(group, {})[pair] = None
            got = self.pricer.columns(priced, {g: list(pairs) for g, pairs in wanted.items()})
            new = sum(c.key not in self.columns for c in got)
            at = {}
            for c in got:
                self.columns.setdefault(c.key, c)
                at[(c.kind, c.variant), (c.entry, c.exit)] = c
        return new, [at[step] for step in path]

    def report(self, phase: str) -> None:
        if self.progress is not None:
            self.progress(self.time, self.bound, phase)


def _near(
    priced: Priced, groups: Sequence[Group], limit: float, many: int, everyone: bool
) -> Iterator[tuple[Group, tuple[int, int]]]:
    """Groups and state pairs of least slack: per kind the first ``many`` within ``limit``; or each group's least."""
    if everyone:
        for k, v in groups:
            at = np.unravel_index(int(priced.slack[k][v].argmin()), priced.slack[k][v].shape)
            yield (k, v), (int(at[0]), int(at[1]))
    for k in dict.fromkeys(g[0] for g in groups):
        flat = priced.slack[k].ravel()
        near = np.flatnonzero(flat <= limit)
        for index in near[np.argsort(flat[near], kind="stable")[:many]]:
            v, entry, leave = (int(i) for i in np.unravel_index(index, priced.slack[k].shape))
            yield (k, v), (entry, leave)


def solve(chain: Chain, *, gap: float = 0.005, time_limit: float = 30.0, progress: Progress | None = None) -> Solution:
    """The least time of a chain within its capacity, within ``gap`` of the certified bound where ``time_limit`` seconds allow.

    Deterministic unless the time limit strikes. Raises ``Infeasible`` with the least memory if nothing fits.
    """
    start = clock.monotonic()
    search = _Search(chain, Pricer(chain), gap, start + time_limit, progress, {})
    search.seconds["plan"] = clock.monotonic() - start
    _unconstrained(search)
    if search.incumbent is None and np.isfinite(chain.capacity):
        _least_memory(search)
    _descend(search)
    _enrich(search)
    assert search.incumbent is not None
    status = "optimal" if search.done else "time_limit" if search.late else "gap"
    return _solution(search, search.incumbent, search.bound, status)


def _solution(search: _Search, columns: Sequence[Column], bound: float, status: str) -> Solution:
    variants = tuple(c.variant for c in columns)
    choices = tuple(c.choices for c in columns)
    time, bytes_, transient = evaluate(search.chain, variants, choices)
    bound = min(bound, time)
    gap = (time - bound) / time if time else 0.0
    return Solution(
        variants,
        choices,
        time,
        bytes_,
        transient,
        bound,
        gap,
        len(search.columns),
        search.iterations,
        status,
        dict(search.seconds),
    )


def _multipliers(search: _Search, alpha: Mapping[Group, np.ndarray], memory: float, rho: float) -> Multipliers:
    """Complete multipliers: uniform alpha for groups without, the transient's share spread evenly over all positions."""
    rows = len(search.chain.time_rows)
    full = {g: alpha.get(g, np.full(rows, 1 / rows)) for g in search.pricer.groups}
    return Multipliers(full, memory, (memory / len(search.chain.sequence),) * len(search.chain.kinds), rho)


def _unconstrained(search: _Search) -> None:
    """First columns, the scales, and the optimum without memory if it fits."""
    bound, priced = search.price(_multipliers(search, {}, 0.0, 1.0))
    if not np.isfinite(bound):
        raise Infeasible("forbidden choices leave no assignment of the chain", np.inf, np.inf, None)
    _, path = search.add(priced, 0.0, FEW, everyone=True)
    search.bound = bound
    memory = search.chain.capacity if np.isfinite(search.chain.capacity) else search.memory(path)
    search.scale = Scale(max(c.time for c in path) * len(path) or 1.0, memory or 1.0)
    search.offer(path)
    search.report("start")


def _least_memory(search: _Search) -> None:
    """Columns that fit, or the certificate that none do."""
    chain = search.chain
    bound, least, path_best = -np.inf, np.inf, None
    at = _multipliers(search, {}, 1.0, 0.0)
    for _ in range(ROUNDS):
        found, priced = search.price(at)
        bound = max(bound, found)
        new, path = search.add(priced, 0.0, FEW, everyone=True)
        if search.memory(path) < least:
            least, path_best = search.memory(path), path
        search.offer(path)
        if search.incumbent is not None:
            return
        with search.phase("relax"):
            value, at = relax(chain, search.listed(), search.pricer.groups, search.scale, 0.0)
        at = Multipliers(_multipliers(search, {}, 1.0, 0.0).alpha, at.memory, at.transient, 0.0)
        if not new or search.late or value * search.scale.memory + chain.fixed_bytes <= bound * (1 + 1e-9):
            break
    with search.phase("choose"):
        chosen = choose(chain, search.listed(), search.scale, 0.0, search.deadline - clock.monotonic(), 1e-6)
    if chosen is not None and search.memory(chosen) < least:
        least, path_best = search.memory(chosen), chosen
    search.offer(chosen)
    if search.incumbent is None:
        assert path_best is not None
        message = (
            f"no assignment fits the capacity of {chain.capacity:.6g} bytes: any needs at least {bound:.6g}, "
            f"the least found needs {least:.6g}"
        )
        raise Infeasible(message, bound, least, _solution(search, path_best, -np.inf, "infeasible"))


def _descend(search: _Search) -> None:
    """Cutting planes on the dual until the bound meets the linear program, the gap is reached, or nothing new comes."""
    for round_ in range(ROUNDS):
        if search.done or search.late:
            return
        with search.phase("relax"):
            value, at = relax(search.chain, search.listed(), search.pricer.groups, search.scale, 1.0)
        value = value * search.scale.time + search.chain.fixed_time
        bound, priced = search.price(at)
        if bound > search.bound:
            search.bound, search.best = bound, at
        elif search.best is None:
            search.best = at
        new, path = search.add(priced, max(search.time - bound, 0.0), FEW)
        search.offer(path)
        near = search.bound >= value - search.gap * abs(value)
        if new and (near or round_ % 4 == 3):
            _choose(search)
        search.report("descend")
        if not new or search.bound >= value * (1 - 1e-7):
            break
    if not search.done:
        _choose(search)


def _choose(search: _Search) -> None:
    left = search.deadline - clock.monotonic()
    with search.phase("choose"):
        search.offer(choose(search.chain, search.listed(), search.scale, 1.0, left, min(search.gap / 10, 1e-4)))


def _enrich(search: _Search) -> None:
    """All columns that could still improve the incumbent at the best multipliers."""
    if search.done or search.late or search.best is None:
        return
    bound, priced = search.price(search.best)
    new, _ = search.add(priced, search.time - bound, MANY, everyone=True)
    if new:
        _choose(search)
    search.report("enrich")
