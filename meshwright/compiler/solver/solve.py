"""The solver: a chain of blocks (chain.py) to a choice for every copy with a certified gap.

    shared variables relaxed  ->  Search (search.py): columns by elimination, integer program, Lagrangian bound
    a gap is left             ->  branch and bound over the shared variables, a Search at every leaf (``_shared``)
    gap left on a small chain ->  one mixed-integer program of everything (oracle.flow_mip, ``_polish``)

A shared variable that each position chooses for itself gives a relaxation, so its bound holds; the incumbent's positions agree,
as the integer program has them. Fixing some of the variables and pricing at the relaxation's multipliers bounds every
completion; blocks that do not read them are not priced again. Best first; the bound returned is the least of open and closed
nodes. How long that goes on is counted in work (effort.py), not by a clock.
"""

from __future__ import annotations

import heapq
import time as clock
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.compiler.solver.chain import Beaten, BlockModel, Chain, Edge, Infeasible, Kind, Solution, evaluate
from meshwright.compiler.solver.effort import Effort
from meshwright.compiler.solver.elimination import prune
from meshwright.compiler.solver.oracle import flow_mip, flow_size
from meshwright.compiler.solver.pricing import Multipliers, Pricer
from meshwright.compiler.solver.search import Progress, Search, infeasible, shared_states

__all__ = ["Beaten", "BlockModel", "Chain", "Edge", "Hint", "Infeasible", "Kind", "Solution", "evaluate", "prune", "solve"]

SMALL, NODES = 5_000, 20
"""Variables of the flow program up to which it may close a remaining gap, and the nodes that it may visit of so many, more of
fewer (``_nodes``): most that it closes close at the first few."""
BRANCHED = 2.0
"""With a solution at hand, branching may take so many times what the relaxation took: it only proves, or improves a little."""
FRUITLESS = 3
"""So many choices in turn may be solved for nothing once what is open is bounded no lower than what was solved: then more of
them prove nothing, and only another solution could come of them (chosen)."""


@dataclass(order=True)
class _Node:
    """Choices of the first of the shared variables, whose completions, or those in which the next one is not ``but``, take no
    less than ``bound``. The deeper goes first."""

    bound: float
    height: int = 0
    prefix: tuple[int, ...] = ()
    but: int | None = field(default=None, compare=False)


@dataclass
class Hint:
    """The best multipliers of a solve, which the next chain like it tries at once: where they are as good there, they prove
    that nothing is faster than its cutoff, and nothing else need be solved. And what a chain was priced with, for one that
    differs in its capacity alone, with the bytes that any assignment needs as far as they were looked for. ``bound``: the time
    that these multipliers prove."""

    at: Multipliers | None = None
    bound: float = -np.inf
    pricer: Pricer | None = None
    least: float = -np.inf

    def for_(self, pricer: Pricer) -> Multipliers | None:
        """The multipliers, if they are a point of this chain's dual."""
        at, chain = self.at, pricer.chain
        if at is None or at.alpha.keys() != set(pricer.groups) or len(at.transient) != len(chain.kinds):
            return None
        same = all(len(alpha) == len(chain.time_rows) for alpha in at.alpha.values())
        same = same and all(len(nu) == len(chain.transient_rows) for nu in at.transient)
        held = sum(copies * sum(nu) for copies, nu in zip(pricer.copies, at.transient, strict=True))
        return at if same and held <= at.memory else None


def solve(
    chain: Chain, *, gap: float = 0.005, limit: float = 30.0, progress: Progress | None = None, cutoff: float = np.inf,
    hint: Hint | None = None, hopeless: float = np.inf, widest: float = 0.0,
) -> Solution:
    """The least time of a chain within its capacity, within ``gap`` of the certified bound where ``limit`` (nominal seconds,
    see effort.py) allows; the gap widens to ``widest``, if that is more, as the limit is spent.

    ``progress`` is called with (incumbent time, bound, phase). Deterministic. Raises ``Infeasible`` with the least memory if
    nothing fits, and ``Beaten`` with the bound once it is known that nothing is faster than ``cutoff`` by more than the gap.
    ``hint``: what an earlier solve of a chain like this one found, and the place for what this one finds. ``hopeless``: once
    any assignment is known to need more bytes, ``Infeasible`` is raised as it is, without a look for the least.
    """
    began = clock.monotonic()
    hint = Hint() if hint is None else hint
    if hint.pricer is None or not hint.pricer.prices(chain):
        hint.pricer, hint.least = Pricer(chain), -np.inf
    pricer = hint.pricer
    pricer.effort = Effort(limit)
    seconds = {"plan": clock.monotonic() - began}
    root = Search(
        chain, pricer, gap, progress, cutoff=cutoff, strict=cutoff < np.inf, start=hint.for_(pricer), seconds=seconds,
        hopeless=hopeless, memory_bound=hint.least, widest=widest,
    )
    try:
        best, bound = _shared(root.run())
    except Infeasible as error:
        found = _last_resort(root, error, gap) if root.memory_bound <= hopeless else None
        if found is None:
            raise
        return found
    finally:
        hint.at, hint.bound, hint.least = root.best or hint.at, root.bound, root.memory_bound
    assert best.incumbent is not None
    status = "optimal" if best.time - bound <= gap * best.time else "time_limit" if best.late else "gap"
    solution = best.solution(best.incumbent, bound, status)
    return solution if status == "optimal" or solution.time > cutoff else _polish(root, solution)


def _last_resort(root: Search, error: Infeasible, gap: float) -> Solution | None:
    """Where the certificate leaves room under the capacity, ask the flow program of a small chain; None if it finds nothing.
    Raises Infeasible with a solution whose positions agree on the shared variables, where the relaxed one's do not."""
    if error.bound < np.inf and error.bound <= root.chain.capacity and not root.late and flow_size(root.chain) <= SMALL:
        with suppress(Infeasible):  # nothing found is no proof: the certificate below stays as it is
            found = flow_mip(root.chain, nodes=_nodes(root.chain), precision=gap / 2)
            if found.bytes_ + found.transient <= root.chain.capacity:
                return replace(found, status="optimal" if found.gap <= gap else "gap")
    if error.solution is None and root.lightest is not None:
        states = shared_states(root.chain, root.lightest)
        leaf = _leaf(root, {s: _majority(seen) for s, seen in states.items()}, np.inf)
        if isinstance(leaf, Search):
            assert leaf.incumbent is not None
            return leaf.solution(leaf.incumbent, leaf.bound, "gap")
        if np.isfinite(leaf.least):  # else what most positions have is forbidden together
            raise infeasible(root.chain, error.bound, leaf.least, leaf.solution)
    return None


def _majority(seen: Counter[int]) -> int:
    return min(seen, key=lambda a: (-seen[a], a))


def _leaf(root: Search, fixed: Mapping[int, int], cutoff: float) -> Search | Infeasible:
    """The chain with all shared variables fixed; columns of the root that agree are taken over. An error is given back without
    the frames it came through: one of them would hold it and all that was solved."""
    start = root.best if root.loose is not None else None
    leaf = Search(
        root.chain, root.pricer, root.gap, root.progress, dict(fixed), root.scale, cutoff, start=start, widest=root.widest
    )
    leaf.seconds = root.seconds
    for key, column in root.columns.items():
        if all(fixed[s] == column.choices[var] for s, var in root.chain.kinds[column.kind].shared):
            leaf.columns[key] = column
    try:
        return leaf.run()
    except Infeasible as error:
        return error.with_traceback(None)


def _shared(root: Search) -> tuple[Search, float]:
    """The search with the best incumbent, and a lower bound of all choices of the shared variables.

    Best first over prefixes, the most disputed variable first; without an incumbent what most positions have at first. Of a
    variable on which the relaxation agrees that choice comes first, which as a rule takes no longer than what is known already:
    the others stay together, as what is left of their prefix, until nothing else is as good.
    """
    seen = shared_states(root.chain, root.loose or [])
    order = sorted((s for s, size in enumerate(root.chain.shared_sizes) if size > 1), key=lambda s: (-len(seen.get(s, ())), s))
    best: Search | None = root if root.incumbent is not None else None
    if best is not None and (root.within(best.time) or not order):
        return best, root.bound
    effort = root.pricer.effort
    enough = effort.spent * (1.0 + BRANCHED)
    closed, failures, solved = np.inf, list[Infeasible](), set[tuple[int, ...]]()
    points, tried = list[Multipliers](), dict[tuple[int, ...], int]()
    probe = tuple(_majority(seen[s]) if s in seen else 0 for s in order)
    heap, fruitless = [_Node(root.bound)], 0
    while heap:
        node = _Node(root.bound, -len(probe), probe) if best is None and not failures else heapq.heappop(heap)
        bound, prefix = node.bound, node.prefix
        floor = max(root.bound, min(closed, bound))
        root.beaten(floor, np.inf if best is None else best.time)
        over = root.late or (root.incumbent is not None and effort.spent > enough) or (fruitless == FRUITLESS)
        if best is not None and (best.time - floor <= root.tolerance * best.time or over):
            return best, floor
        if failures and root.late:
            raise _least(root, failures, root.memory_bound)
        if len(prefix) < len(order):
            agreed = seen.get(order[len(prefix)], ())
            alone = next(iter(agreed)) if len(agreed) == 1 and node.but is None else None
            for child in _children(root, order, node, alone):
                heapq.heappush(heap, child)
            if alone is not None:
                heapq.heappush(heap, replace(node, but=alone))
            continue
        if prefix in solved:
            continue
        fixed = dict.fromkeys(range(len(root.chain.shared_sizes)), 0) | dict(zip(order, prefix, strict=True))
        if tried.get(prefix, 0) < len(points):  # multipliers of a leaf are good ones for the others too
            tried[prefix] = len(points)
            value, _ = replace(root, progress=None, fixed=fixed).price(points[-1])
            if value > bound:
                heapq.heappush(heap, replace(node, bound=value))
                continue
        solved.add(prefix)
        leaf = _leaf(root, fixed, root.cutoff if best is None else min(best.time, root.cutoff))
        proves = bound < closed
        if isinstance(leaf, Infeasible):
            failures.append(leaf)
            fits = leaf.bound < np.inf and leaf.bound <= root.chain.capacity  # as far as its bound tells
            closed = min(closed, bound if fits else np.inf)
        else:
            closed = min(closed, max(bound, leaf.bound))
            points += [leaf.best] if leaf.best is not None else []
            fruitless = 0 if proves or best is None or leaf.time < best.time else fruitless + 1
            best = leaf if best is None or leaf.time < best.time else best
    if best is None:
        raise _least(root, failures, min(error.bound for error in failures))
    return best, max(root.bound, min(closed, best.time))


def _least(root: Search, failures: Sequence[Infeasible], bound: float) -> Infeasible:
    """The failure that came closest, with the memory that all choices of the shared variables need."""
    closest = min(failures, key=lambda error: error.least)
    return infeasible(root.chain, max(bound, root.memory_bound), closest.least, closest.solution)


def _children(root: Search, order: Sequence[int], node: _Node, alone: int | None) -> Iterator[_Node]:
    """The next variable at each choice, or at one ``alone``, bounded at the root's multipliers."""
    assert root.best is not None
    prefix = node.prefix
    for a in range(root.chain.shared_sizes[order[len(prefix)]]) if alone is None else (alone,):
        if a == node.but:
            continue
        more = (*prefix, a)
        value, _ = replace(root, progress=None, fixed=dict(zip(order, more, strict=False))).price(root.best)
        if np.isfinite(value):
            yield _Node(max(node.bound, value), -len(more), more)


def _nodes(chain: Chain) -> int:
    """Nodes that the flow program of a small chain may visit, whose work goes with its size."""
    return round(NODES * SMALL / max(flow_size(chain), 1.0))


def _polish(root: Search, solution: Solution) -> Solution:
    """Close the gap of a small chain by the flow program; the better incumbent and the better bound."""
    chain, gap = root.chain, root.gap
    if root.late or flow_size(chain) > SMALL:
        return solution
    try:
        other = flow_mip(chain, nodes=_nodes(chain), precision=gap / 2)
    except Infeasible:
        return solution
    fits = other.bytes_ + other.transient <= chain.capacity
    better = other if fits and other.time < solution.time else solution
    bound = min(max(solution.bound, other.bound), better.time)
    missing = (better.time - bound) / better.time if better.time else 0.0
    status = "optimal" if missing <= gap else solution.status
    counts = {"columns": solution.columns, "iterations": solution.iterations, "seconds": solution.seconds}
    return replace(better, bound=bound, gap=missing, status=status, **counts)  # type: ignore[arg-type]
