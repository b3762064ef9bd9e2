"""Exact min-sum variable elimination of a block for one weight vector, and dominance pruning.

For weights w [K] a block costs ``sum_i u_i(x_i) + sum_e m_e(x_i, x_j)`` with ``u = unary @ w`` and ``m = table @ w``.
Eliminating variable v replaces the factors that mention v by ``g(S) = min_v sum of them`` over their other variables S; what
stays are the kept (coupling) variables, whose table is exact: ``T(keep) = min over all others`` (``Eliminator.table``). The
order decides the size of the largest S (induced width); it is chosen once per block (``plan``). Minimizers are re-evaluated on
demand, for many kept states at once, walking the order backwards (``Eliminated.assignments``): cheaper than writing the
argmins of every table.

A variable with one choice is in no table's scope: its factors are constants.

Blocks with the same variables and pairs have the same plan. They are eliminated together (``eliminated``), each for weights of
its own, in tables with an axis more, the last: most tables are so small that a step takes as long for a hundred blocks as for
one.

Where a block's treewidth makes S too large, a variable's factors are minimized in several buckets: the table is then a lower
bound, which is all that the certificate needs, and the minimizers are heuristic. Buckets are as wide as ``WIDTHS`` and the
total work (``WORK``) allow, so that memory and time are bounded whatever the graph. What the buckets pay at least for a choice
of the variable is first shared evenly among them (``_shared_evenly``), which lifts the bound; the minimizers are then improved
variable by variable (``Eliminated._improved``).

Source: Bertele and Brioschi 1972; Dechter 1999 (bucket elimination); Dechter and Rish 2003 (mini-buckets); Ihler, Flerova,
Dechter and Otten 2012 (cost shifting between mini-buckets); Besag 1986 (iterated conditional modes).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiler.solver.chain import Array, BlockModel, Edge
from meshwright.compiler.solver.weighted import Stacked, Weighted

Indices = NDArray[np.intp]
CHUNK = 1 << 15
"""Elements of a temporary: small enough to stay in a core's cache."""
SINGLE = 1 << 18
"""Entries of an elimination from which on it runs in single precision, twice as fast; ``Plan.rounding`` accounts for it."""
WIDTHS = (1 << 22, 1 << 20, 1 << 18, 1 << 16, 1 << 14)
"""Entries that one elimination may have: the first with which a block takes no more than ``WORK``, else the last."""
WORK = 1 << 25
"""Entries that all eliminations of a block may have together: about a third of a second."""
REMEMBERED = 256
"""Plans that are remembered."""
ROUNDS = 20
"""Most rounds over all variables in which the minimizers of a wide block are improved."""

Spread = tuple[slice | None, ...]
Part = tuple[int, tuple[int, ...], Spread, tuple[int, ...]]
"""A factor, the axes that put the eliminated variable first and blocks last, the index that spreads the others over a scope,
and the others."""
Brief = tuple[int, tuple[int, ...] | None, Spread | None]
"""The same, without what changes nothing."""
Request = tuple["Eliminator", Array, Mapping[int, Array]]
"""A block, the weights to eliminate it for, and unary costs [n_v] that are added to variables (``inf`` forbids choices)."""


@dataclass(frozen=True, slots=True)
class Elimination:
    """Eliminate ``var``: each bucket of parts becomes a factor over its scope, ``min_var sum of the parts``.

    One bucket is exact. Several bound the exact table from below, as each may choose another minimizer (mini-buckets).
    ``small``: the parts of a single bucket by size, if their sum fits a temporary; most are so small that looking at their
    shapes would take longer than adding them up. ``shape``: of their sum.
    """

    var: int
    buckets: tuple[tuple[tuple[int, ...], tuple[Part, ...]], ...]
    small: tuple[Brief, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EliminationPlan:
    """An elimination order made concrete. ``pairs`` are the edge factors (after the unary ones), ``given`` where each of both
    is among all their entries, with its shape, and ``rest`` the factors left, spread over what is kept, whose ``shape`` it is.

    ``largest`` is the number of entries of the largest table with the variable still in it, ``work`` their sum, ``entries`` the
    sum of all factors'. Weighted costs are >= 0, so a table's entry is off by at most ``rounding`` times itself.
    """

    keep: tuple[int, ...]
    shape: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    given: tuple[tuple[slice, tuple[int, ...]], ...]
    steps: tuple[Elimination, ...]
    rest: tuple[tuple[int, Spread], ...]
    entries: int
    largest: int
    work: int
    rounding: float

    @property
    def inexact(self) -> bool:
        """Whether a variable's factors are minimized in several buckets."""
        return any(len(step.buckets) > 1 for step in self.steps)


def _order(sizes: Sequence[int], pairs: Sequence[tuple[int, int]], keep: Sequence[int], fill: bool) -> list[int]:
    """Greedy order by least fill (weighted by table entries) or by least resulting table; ties to the lower index."""
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for i, j in pairs:
        if sizes[i] > 1 and sizes[j] > 1:
            near[i].add(j)
            near[j].add(i)

    def score(v: int) -> tuple[float, float]:
        table = math.prod(float(sizes[u]) for u in near[v])
        missing = sum(sizes[a] * sizes[b] for a, b in combinations(sorted(near[v]), 2) if b not in near[a])
        return (float(missing), table) if fill else (table, float(missing))

    left = {v: score(v) for v in range(len(sizes)) if v not in keep and sizes[v] > 1}
    order = []
    while left:
        v = min(left, key=lambda u: (left[u], u))
        del left[v]
        order.append(v)
        around = near.pop(v)
        for a in around:
            near[a].discard(v)
            near[a] |= around - {a}
        for u in sorted(around.union(*(near[a] for a in around))):
            if u in left:
                left[u] = score(u)
    return order


def _spread(scope: tuple[int, ...], onto: tuple[int, ...]) -> Spread:
    """The index that spreads axes over others, and leaves the last alone."""
    return (*(slice(None) if v in scope else None for v in onto), slice(None))


def _symbolic(
    sizes: Sequence[int], pairs: tuple[tuple[int, int], ...], keep: tuple[int, ...], order: list[int], wide: int
) -> EliminationPlan:
    scopes = [tuple(v for v in scope if sizes[v] > 1) for scope in (*((v,) for v in range(len(sizes))), *pairs)]
    live = dict.fromkeys(range(len(scopes)))
    readers: list[dict[int, None]] = [{} for _ in sizes]
    for f, scope in enumerate(scopes):
        for v in scope:
            readers[v][f] = None
    steps, largest, work, rounding = [], 0, 0, 1e-12
    for v in order:
        buckets: list[tuple[tuple[int, ...], tuple[Part, ...]]] = []
        found = _buckets([f for f in readers[v] if f in live], scopes, sizes, wide)
        # with several buckets, what is shared among them may be as large as all of them together
        inexact = 2.0**-22 * (1.0 if len(found) == 1 else 1.0 + 2.0 * len(found))
        for ids in found:
            scope = tuple(sorted({u for f in ids for u in scopes[f]} - {v}))
            parts = []
            for f in ids:
                axis = scopes[f].index(v)
                axes = (axis, *(a for a in range(len(scopes[f]) + 1) if a != axis))
                others = tuple(u for u in scopes[f] if u != v)
                parts.append((f, axes, (slice(None), *_spread(others, scope)), others))
                del live[f]
            buckets.append((scope, tuple(parts)))
            live[len(scopes)] = None
            for u in scope:
                readers[u][len(scopes)] = None
            scopes.append(scope)
            entries = _entries((v, *scope), sizes)
            largest, work = max(largest, entries), work + entries
            rounding += inexact if entries >= SINGLE else 0.0
        small: tuple[Brief, ...] = ()
        around = (v, *buckets[0][0])
        if len(found) == 1 and _entries(around, sizes) <= CHUNK:
            order_ = sorted(buckets[0][1], key=lambda part: _entries(scopes[part[0]], sizes))
            small = tuple(_brief(part) for part in order_)
        steps.append(Elimination(v, tuple(buckets), small, tuple(sizes[u] for u in around)))
    rest = tuple((f, _spread(scopes[f], keep)) for f in live)
    held = [_entries(scope, sizes) for scope in scopes]
    ends = itertools.pairwise(itertools.accumulate(held[: len(sizes) + len(pairs)], initial=0))
    given = tuple(
        (slice(start, stop), tuple(sizes[v] for v in scope)) for (start, stop), scope in zip(ends, scopes, strict=False)
    )
    shape = tuple(sizes[v] for v in keep)
    return EliminationPlan(keep, shape, pairs, given, tuple(steps), rest, sum(held), largest, work, rounding)


def _brief(part: Part) -> Brief:
    factor, axes, index, _ = part
    return factor, None if axes == tuple(range(len(axes))) else axes, index if None in index else None


def _entries(scope: Iterable[int], sizes: Sequence[int]) -> int:
    return math.prod(sizes[v] for v in scope)


def _buckets(ids: list[int], scopes: Sequence[tuple[int, ...]], sizes: Sequence[int], wide: int) -> list[list[int]]:
    """All factors in one bucket if it is not too wide; else first fit, the widest factors first."""
    if _entries({u for f in ids for u in scopes[f]}, sizes) <= wide:
        return [ids]
    buckets: list[tuple[set[int], list[int]]] = []
    for f in sorted(ids, key=lambda f: (-_entries(scopes[f], sizes), f)):
        for scope, members in buckets:
            if _entries(scope | set(scopes[f]), sizes) <= wide:
                scope |= set(scopes[f])
                members.append(f)
                break
        else:
            buckets.append((set(scopes[f]), [f]))
    return [members for _, members in buckets]


def plan(block: BlockModel, keep: Sequence[int] = ()) -> EliminationPlan:
    """The cheaper of the min-fill and the min-size order, keeping the variables ``keep``; of inexact ones, which no widths
    avoid within ``WORK``, the one with fewer buckets."""
    return _plan(*_question(block, keep), (WIDTHS, WORK, CHUNK, SINGLE))


def _question(block: BlockModel, keep: Sequence[int]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, ...]]:
    """What a plan depends on: sizes, pairs of variables, those to keep."""
    return block.sizes, tuple(sorted({(min(e.i, e.j), max(e.i, e.j)) for e in block.edges})), tuple(sorted(set(keep)))


@functools.lru_cache(maxsize=REMEMBERED)
def _plan(
    sizes: tuple[int, ...], pairs: tuple[tuple[int, int], ...], kept: tuple[int, ...], limits: tuple[object, ...]
) -> EliminationPlan:
    """Remembered, for problems of one graph on other meshes mostly have as many choices; ``limits``: all that it goes by."""
    orders = [_order(sizes, pairs, kept, fill) for fill in (True, False)]
    for wide in WIDTHS:
        found = min((_symbolic(sizes, pairs, kept, order, wide) for order in orders), key=_preferred)
        if found.work <= WORK:
            break
    return found


def _preferred(plan: EliminationPlan) -> tuple[bool, int, int]:
    return plan.work > WORK, sum(len(step.buckets) - 1 for step in plan.steps), plan.work


class Tables:
    """What blocks share: plans, and the tables of edges end to end (``Stacked``), each made once."""

    def __init__(self) -> None:
        self._stacked: dict[object, tuple[tuple[Edge, ...], Stacked]] = {}
        self._plans: dict[object, EliminationPlan] = {}

    def plan(self, block: BlockModel, keep: Sequence[int], like: Sequence[int] = (), most: int = 0) -> EliminationPlan:
        """``plan``, made once for all variants of a block. ``like``: of the variables of which the plan is known that keeps
        these, in its order, without looking for another where that takes no more than ``most`` entries and is as exact."""
        question = _question(block, keep)
        if question not in self._plans:
            found = None if not most else self._as_before(question, like, most)
            self._plans[question] = plan(block, keep) if found is None else found
        return self._plans[question]

    def _as_before(
        self, question: tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, ...]], like: Sequence[int], most: int
    ) -> EliminationPlan | None:
        sizes, pairs, kept = question
        known = self._plans.get((sizes, pairs, tuple(sorted(set(like)))))
        if known is None:
            return None
        order = [step.var for step in known.steps if step.var not in kept]
        for wide in WIDTHS:
            found = _symbolic(sizes, pairs, kept, list(order), wide)
            if found.work <= most:
                return found if known.inexact or not found.inexact else None
        return None

    def stacked(self, block: BlockModel, pairs: Sequence[tuple[int, int]]) -> Stacked:
        """The tables of a block's edges by pair, made once for all variants that have the same."""
        key = tuple((e.i, e.j, id(e.table), id(e.rows), id(e.cols)) for e in block.edges)
        if key not in self._stacked:
            self._stacked[key] = block.edges, Stacked(block, pairs)  # what the ids are of stays alive
        return self._stacked[key][1]


def min_sum(parts: Sequence[Array]) -> Array:
    """``min over axis 0`` of the broadcast sum, in pieces that stay small."""
    parts = sorted(parts, key=lambda a: a.size)
    shape = np.broadcast_shapes(*(part.shape[1:] for part in parts))
    width, count = math.prod(shape), len(parts[0])
    dtype = np.float32 if count * width >= SINGLE else np.float64
    return _pieces(parts, shape, dtype)


def _pieces(parts: Sequence[Array], shape: tuple[int, ...], dtype: type) -> Array:
    """``min over axis 0`` of the sum, which has as many rows of this shape, in pieces; the last part is the largest."""
    count = len(parts[0])
    step = max(1, CHUNK // max(1, math.prod(shape)))
    if step >= count or len(parts) == 1:
        return np.asarray(np.minimum.reduce(_total(parts, 0, count), axis=0))
    pieces: list[NDArray] = [part.astype(dtype, copy=False) for part in parts]
    out: NDArray = np.full(shape, np.inf, dtype=dtype)
    room: NDArray = np.empty((step, *shape), dtype=dtype)
    for start in range(0, count, step):
        stop = min(start + step, count)
        piece = room[: stop - start]
        np.add(_total(pieces[:-1], start, stop), pieces[-1][start:stop], out=piece)
        np.minimum(out, piece[0] if step == 1 else np.minimum.reduce(piece, axis=0), out=out)
    return out.astype(np.float64, copy=False)


def _shared_evenly(buckets: Sequence[list[Array]]) -> list[list[Array]]:
    """Buckets that all pay the same for each choice of the variable at least; what they pay together stays as it is.

    Entries stay >= 0, as no bucket gives away more than every entry of it has.
    """
    least = [np.array([_total(parts, a, a + 1).min() for a in range(len(parts[0]))]) for parts in buckets]
    mean = np.mean(least, axis=0)
    shifts = [np.full_like(mean, np.inf) for _ in least]
    for shift, own in zip(shifts, least, strict=True):
        np.subtract(mean, own, out=shift, where=np.isfinite(mean))
    return [[*parts, shift.reshape(-1, *[1] * (parts[0].ndim - 1))] for parts, shift in zip(buckets, shifts, strict=True)]


def _total(parts: Sequence[NDArray], start: int, stop: int) -> NDArray:
    out = parts[0][start:stop]
    for part in parts[1:]:
        out = out + part[start:stop]
    return out


class Eliminator:
    """A block with its elimination plan (its own, or one of ``tables``); ``keep`` variables remain in the table, in ascending
    order."""

    def __init__(
        self, block: BlockModel, keep: Sequence[int], tables: Tables, plan: EliminationPlan | None = None
    ) -> None:
        self.block = block
        self.plan = plan if plan is not None else tables.plan(block, keep)
        self._unary = Weighted(np.concatenate(block.unary) if block.unary else np.zeros((0, 0)))
        self._starts = np.array([0, *itertools.accumulate(block.sizes)][:-1], dtype=np.intp)
        self._edges = tables.stacked(block, self.plan.pairs)

    def table(self, weights: Array, extra: Mapping[int, Array] | None = None) -> Eliminated:
        """Eliminate for weights [K]; ``extra`` adds unary costs [n_v] to variables (``inf`` forbids choices)."""
        return eliminated([(self, weights, extra or {})])[0]

    def cost(self, choices: Sequence[int]) -> Array | None:
        """Resource vector [K] of an assignment, as the block's own ``cost``; None if it is forbidden."""
        own, pairs = self._unary.of(self._starts + choices), self._edges.of(np.asarray(choices))
        if own is None or pairs is None:
            return None
        rows = np.concatenate([own, pairs]) if len(pairs) else own
        return np.asarray(np.add.reduce(rows, axis=0))

    @staticmethod
    def given(requests: Sequence[Request]) -> Array:
        """What blocks of one plan weigh, [entries of the factors that are given, blocks]. The same tables of edges for the same
        weights are read once."""
        plan, own = requests[0][0].plan, sum(requests[0][0].block.sizes)
        rows = np.empty((len(requests), plan.given[-1][0].stop if plan.given else 0))
        read: dict[tuple[int, bytes], Array] = {}
        for row, (eliminator, weights, extra) in zip(rows, requests, strict=True):
            if own:
                eliminator._unary.at(weights, row[:own])
            for v, add in extra.items():
                row[plan.given[v][0]] += add
            question = id(eliminator._edges), weights.tobytes()
            if question in read:
                row[own:] = read[question]
            else:
                read[question] = eliminator._edges.at(weights, row[own:])
        return np.ascontiguousarray(rows.T)


def eliminated(requests: Sequence[Request]) -> list[Eliminated]:
    """Eliminate blocks that have one plan, each for its weights."""
    plan, count = requests[0][0].plan, len(requests)
    given = Eliminator.given(requests)
    factors = [given[cut].reshape(*shape, count) for cut, shape in plan.given]
    for step in plan.steps:
        if step.small:
            factors.append(_least(factors, step, count))
        else:
            factors += _wide(factors, step, count)
    total: Array = np.zeros((*plan.shape, count))
    for f, index in plan.rest:
        total = total + factors[f][index]
    together = Together(plan, tuple(factors), len(requests[0][0].block.sizes))
    return [Eliminated(together, n, table) for n, table in enumerate(np.ascontiguousarray(np.moveaxis(total, -1, 0)))]


def _least(factors: Sequence[Array], step: Elimination, count: int) -> Array:
    """``min over the first axis`` of the broadcast sum of a small bucket."""
    parts = []
    for f, axes, index in step.small:
        part = factors[f] if axes is None else factors[f].transpose(axes)
        parts.append(part if index is None else part[index])
    return _pieces(parts, (*step.shape[1:], count), np.float64)


def _wide(factors: Sequence[Array], step: Elimination, count: int) -> list[Array]:
    """The factors that a step makes of its buckets, block by block."""
    out: list[list[Array]] = []
    for n in range(count):
        buckets = [
            [np.ascontiguousarray(factors[f].transpose(axes)[..., n])[index[:-1]] for f, axes, index, _ in parts]
            for _, parts in step.buckets
        ]
        out.append([min_sum(parts) for parts in (_shared_evenly(buckets) if len(buckets) > 1 else buckets)])
    return [np.stack(several, axis=-1) for several in zip(*out, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """Blocks of one plan that were eliminated together: all ``factors``, blocks along their last axis."""

    plan: EliminationPlan
    factors: tuple[Array, ...]
    variables: int

    def assignments(self, states: Indices, blocks: Indices) -> Indices:
        """[M, variables] minimizers for M states [M, kept] of as many blocks (with mini-buckets: good ones); ties to the lowest
        choice."""
        out = np.zeros((self.variables, len(states)), dtype=np.intp)
        for column, v in enumerate(self.plan.keep):
            out[v] = states[:, column]
        for step in reversed(self.plan.steps):
            total: Array | None = None
            for _, parts in step.buckets:
                for f, axes, _, others in parts:
                    at = self.factors[f].transpose(axes)[(slice(None), *(out[v] for v in others), blocks)]
                    total = at if total is None else total + at
            assert total is not None
            out[step.var] = total.argmin(axis=0)
        if self.plan.inexact:
            for n in np.unique(blocks):
                out[:, blocks == n] = self._improved(np.ascontiguousarray(out[:, blocks == n].T), n).T
        return np.ascontiguousarray(out.T)

    def _improved(self, out: Indices, block: int) -> Indices:
        """Rows in which no variable alone has a better choice: first fewer forbidden pairs, then less cost."""
        neighbours: list[list[tuple[int, Array]]] = [[] for _ in range(self.variables)]
        given = [factor[..., block] for factor in self.factors[: len(self.plan.given)]]
        finite = [factor[np.isfinite(factor)] for factor in given]
        most = 1.0 + sum(float(part.max()) for part in finite if part.size)
        plain = [np.where(np.isfinite(f), f, most) for f in given]
        for (i, j), factor in zip(self.plan.pairs, plain[self.variables :], strict=True):
            if factor.ndim == 2:
                neighbours[i].append((j, factor))
                neighbours[j].append((i, factor.T))
        for _ in range(ROUNDS):
            before = out.copy()
            for v in (step.var for step in self.plan.steps):
                total = plain[v][:, None] + sum((factor[:, out[:, u]] for u, factor in neighbours[v]), np.zeros((1, len(out))))
                now = np.take_along_axis(total, out[None, :, v], axis=0)[0]
                best = total.argmin(axis=0)
                out[:, v] = np.where(total.min(axis=0) < now, best, out[:, v])
            if (out == before).all():
                break
        return out


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Eliminated:
    """The result for one weight vector: ``table`` over the kept variables, and what is needed to find minimizers: which of the
    blocks that were eliminated ``together`` this is."""

    together: Together
    number: int
    table: Array

    @property
    def plan(self) -> EliminationPlan:
        """How it was eliminated."""
        return self.together.plan

    def assignments(self, states: Indices) -> Indices:
        """[M, variables] minimizers for M states [M, kept] (with mini-buckets: good ones); ties to the lowest choice."""
        return self.together.assignments(states, np.full(len(states), self.number))


def prune(
    block: BlockModel, protect: Sequence[int] = (), fewer: Collection[int] | None = None
) -> tuple[BlockModel, tuple[Indices, ...]]:
    """Drop choices that another choice of the same variable equals or beats in every resource, whatever the neighbours do.

    Returns the smaller block and, per variable, the kept choices' old indices. ``protect`` variables (boundary, shared) keep
    all choices, as their neighbours are not seen here. ``fewer``: of a block that was pruned before, the variables that have
    fewer choices since.
    """
    kept = [np.arange(n) for n in block.sizes]
    around: list[list[Edge]] = [[] for _ in block.sizes]
    for e in block.edges:
        around[e.i].append(e)
        around[e.j].append(e)
    changed = set(range(len(block.sizes)))  # what is left of a variable depends on its neighbours alone
    if fewer is not None:
        changed = {v for one in fewer for e in around[one] for v in (one, e.i, e.j)}
    changed.difference_update(protect)
    while changed:
        for v in range(len(block.sizes)):
            if v not in changed:
                continue
            changed.remove(v)
            if len(kept[v]) < 2:
                continue
            alive = _undominated([block.unary[v][kept[v]], *(_profile(e, v, kept) for e in around[v])])
            if len(alive) < len(kept[v]):
                kept[v] = kept[v][alive]
                changed.update({u for e in around[v] for u in (e.i, e.j) if u != v}.difference(protect))
    edges = []
    for e in block.edges:
        rows = kept[e.i] if e.rows is None else e.rows[kept[e.i]]
        cols = kept[e.j] if e.cols is None else e.cols[kept[e.j]]
        edges.append(Edge(e.i, e.j, e.table, rows, cols))
    unary = tuple(u[k] for u, k in zip(block.unary, kept, strict=True))
    return BlockModel(tuple(len(k) for k in kept), unary, tuple(edges)), tuple(kept)


def _profile(e: Edge, var: int, kept: Sequence[Indices]) -> Array:
    """[choices, neighbour's choices * K]: what the choices of a variable cost with each of an edge's other."""
    rows = kept[e.i] if e.rows is None else np.asarray(e.rows)[kept[e.i]]
    cols = kept[e.j] if e.cols is None else np.asarray(e.cols)[kept[e.j]]
    if var == e.i:
        own = e.table[rows[:, None], cols if e.cols is None else _distinct(cols, e.table.shape[1])]
    else:
        own = e.table[(rows if e.rows is None else _distinct(rows, e.table.shape[0]))[:, None], cols].transpose(1, 0, 2)
    return own.reshape(len(own), -1)


def _distinct(states: Indices, count: int) -> Indices:
    """The states of so many that are among some: ``np.unique``, in a fraction of its time."""
    seen = np.zeros(count, dtype=bool)
    seen[states] = True
    return seen.nonzero()[0]


def _undominated(parts: Sequence[Array]) -> Indices:
    """The choices that no other equals or beats in all of some tables [choices, costs]; of equal ones the first."""
    count = len(parts[0])
    if count * count * sum(part.shape[1] for part in parts) <= CHUNK:  # most are so few that steps cost more than entries
        costs = np.concatenate(parts, axis=1)
        beats = np.logical_and.reduce(costs[:, None] <= costs, axis=2)
    else:
        beats = np.ones((count, count), dtype=bool)  # [other, choice]: as far as was seen, the one is nowhere the dearer
        for part in parts:
            others, choices = np.nonzero(beats & ~np.eye(count, dtype=bool))
            if not len(others):
                break
            part = part[:, (part != part[0]).any(axis=0)]  # mostly few of them: what a choice changes
            step = max(1, CHUNK // max(1, part.shape[1]))
            for start in range(0, len(others), step):
                here, there = others[start : start + step], choices[start : start + step]
                beats[here, there] = (part[here] <= part[there]).all(axis=1)
    ranks = np.arange(count)
    beaten = beats & (~beats.T | (ranks[:, None] < ranks))
    return np.flatnonzero(~np.logical_or.reduce(beaten, axis=0))
