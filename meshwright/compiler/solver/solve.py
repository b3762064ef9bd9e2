"""The solver: a chain of blocks (chain.py) to a choice for every copy with a certified gap.

    shared variables relaxed  ->  Search (search.py): columns by elimination, integer program, Lagrangian bound
    positions disagree        ->  branch and bound over the shared variables, a Search at every leaf (``_shared``)
    gap left on a small chain ->  one mixed-integer program of everything (oracle.flow_mip, ``_polish``)

A shared variable that each position chooses for itself gives a relaxation, so its bound holds; fixing some of them and pricing
at the relaxation's multipliers bounds every completion. Best first; the bound returned is the least of open and closed nodes.
"""

from __future__ import annotations

import heapq
import time as clock
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from meshwright.compiler.solver.chain import Beaten, BlockModel, Chain, Edge, Infeasible, Kind, Solution, evaluate
from meshwright.compiler.solver.elimination import prune
from meshwright.compiler.solver.oracle import flow_mip, flow_size
from meshwright.compiler.solver.pricing import Pricer
from meshwright.compiler.solver.search import Progress, Search, infeasible, shared_states

__all__ = ["Beaten", "BlockModel", "Chain", "Edge", "Infeasible", "Kind", "Solution", "evaluate", "prune", "solve"]

SMALL = 20_000
"""Variables of the flow program up to which it closes a remaining gap within seconds."""


def solve(
    chain: Chain, *, gap: float = 0.005, time_limit: float = 30.0, progress: Progress | None = None, cutoff: float = np.inf
) -> Solution:
    """The least time of a chain within its capacity, within ``gap`` of the certified bound where ``time_limit`` allows.

    ``progress`` is called with (incumbent time, bound, phase). Deterministic unless the time limit (seconds) strikes. Raises
    ``Infeasible`` with the least memory if nothing fits, and ``Beaten`` with the bound once it is known that nothing is faster
    than ``cutoff`` by more than the gap.
    """
    start = clock.monotonic()
    deadline = start + time_limit
    pricer = Pricer(chain)
    seconds = {"plan": clock.monotonic() - start}
    root = Search(chain, pricer, gap, deadline, progress, cutoff=cutoff, strict=cutoff < np.inf, seconds=seconds)
    try:
        best, bound = _shared(root.run())
    except Infeasible as error:
        return _last_resort(root, error, gap)
    assert best.incumbent is not None
    status = "optimal" if best.time - bound <= gap * best.time else "time_limit" if best.late else "gap"
    solution = best.solution(best.incumbent, bound, status)
    return solution if status == "optimal" or solution.time > cutoff else _polish(chain, solution, gap, deadline)


def _last_resort(root: Search, error: Infeasible, gap: float) -> Solution:
    """Where the certificate leaves room under the capacity, ask the flow program of a small chain; else raise.

    The error gets a solution whose positions agree on the shared variables, where the relaxed one's do not.
    """
    left = root.deadline - clock.monotonic()
    if error.bound <= root.chain.capacity and left > 0.1 and flow_size(root.chain) <= SMALL:
        with suppress(Infeasible):  # nothing found is no proof: the certificate below stays as it is
            found = flow_mip(root.chain, time_limit=left, precision=gap / 2)
            if found.bytes_ + found.transient <= root.chain.capacity:
                return replace(found, status="optimal" if found.gap <= gap else "gap")
    if error.solution is None and root.lightest is not None:
        states = shared_states(root.chain, root.lightest)
        leaf = _leaf(root, {s: _majority(seen) for s, seen in states.items()}, np.inf)
        if isinstance(leaf, Search):
            assert leaf.incumbent is not None
            return leaf.solution(leaf.incumbent, leaf.bound, "gap")
        raise infeasible(root.chain, error.bound, leaf.least, leaf.solution)
    raise error


def _majority(seen: Counter[int]) -> int:
    return min(seen, key=lambda a: (-seen[a], a))


def _leaf(root: Search, fixed: Mapping[int, int], cutoff: float) -> Search | Infeasible:
    """The chain with all shared variables fixed; columns of the root that agree are taken over."""
    leaf = Search(root.chain, root.pricer, root.gap, root.deadline, root.progress, dict(fixed), root.scale, cutoff)
    leaf.seconds = root.seconds
    for key, column in root.columns.items():
        if all(fixed[s] == column.choices[var] for s, var in root.chain.kinds[column.kind].shared):
            leaf.columns[key] = column
    try:
        return leaf.run()
    except Infeasible as error:
        return error


def _shared(root: Search) -> tuple[Search, float]:
    """The search whose incumbent agrees on all shared variables, and a lower bound of all their choices.

    The positions' majority first, then best first over prefixes, the most disputed variable first.
    """
    assert root.incumbent is not None
    states = shared_states(root.chain, root.incumbent)
    order = sorted(states, key=lambda s: (-len(states[s]), s))
    if all(len(seen) == 1 for seen in states.values()):
        return root, root.bound
    best: Search | None = None
    closed, failures = np.inf, list[Infeasible]()
    probe = tuple(_majority(states[s]) for s in order)
    heap: list[tuple[float, tuple[int, ...]]] = [(root.bound, ())]
    while heap:
        bound, prefix = (root.bound, probe) if best is None and not failures else heapq.heappop(heap)
        floor = max(root.bound, min(closed, bound))
        root.beaten(floor, np.inf if best is None else best.time)
        if best is not None and (best.time - floor <= root.gap * best.time or root.late):
            return best, floor
        if failures and root.late:
            raise _least(root, failures, root.memory_bound)
        if len(prefix) < len(order):
            for node in _children(root, order, prefix, bound):
                heapq.heappush(heap, node)
            continue
        leaf = _leaf(root, dict(zip(order, prefix, strict=True)), root.cutoff if best is None else min(best.time, root.cutoff))
        if isinstance(leaf, Infeasible):
            failures.append(leaf)
            closed = min(closed, bound if leaf.bound <= root.chain.capacity else np.inf)
        else:
            closed = min(closed, max(bound, leaf.bound))
            best = leaf if best is None or leaf.time < best.time else best
    if best is None:
        raise _least(root, failures, min(error.bound for error in failures))
    return best, max(root.bound, closed)


def _least(root: Search, failures: Sequence[Infeasible], bound: float) -> Infeasible:
    """The failure that came closest, with the memory that all choices of the shared variables need."""
    closest = min(failures, key=lambda error: error.least)
    return infeasible(root.chain, max(bound, root.memory_bound), closest.least, closest.solution)


def _children(
    root: Search, order: Sequence[int], prefix: tuple[int, ...], bound: float
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The next variable at each choice, bounded at the root's multipliers."""
    assert root.best is not None
    for a in range(root.chain.shared_sizes[order[len(prefix)]]):
        more = (*prefix, a)
        node = replace(root, progress=None, fixed=dict(zip(order, more, strict=False)))
        value, _ = node.price(root.best)
        if np.isfinite(value):
            yield max(bound, value), more


def _polish(chain: Chain, solution: Solution, gap: float, deadline: float) -> Solution:
    """Close the gap of a small chain by the flow program; the better incumbent and the better bound."""
    left = deadline - clock.monotonic()
    if left < 0.1 or flow_size(chain) > SMALL:
        return solution
    try:
        other = flow_mip(chain, time_limit=left, precision=gap / 2)
    except Infeasible:
        return solution
    fits = other.bytes_ + other.transient <= chain.capacity
    better = other if fits and other.time < solution.time else solution
    bound = min(max(solution.bound, other.bound), better.time)
    missing = (better.time - bound) / better.time if better.time else 0.0
    status = "optimal" if missing <= gap else solution.status
    counts = {"columns": solution.columns, "iterations": solution.iterations, "seconds": solution.seconds}
    return replace(better, bound=bound, gap=missing, status=status, **counts)  # type: ignore[arg-type]
