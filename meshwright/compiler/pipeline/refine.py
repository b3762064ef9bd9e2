"""Local search over the cuts of a sequence into pipeline stages: what a cut takes (``Cutting``), and its neighbours.

A neighbour has one unit moved from stage a to stage b (everything between shifts), or one stage run another way. ``refine``
goes best first from several cuts that fit, and simulates only neighbours whose bound is better than the best; ``make_fit``
makes of a cut that overflows one that fits, where it finds one. Neither proves anything: bounds do
(``compiler.pipeline.stage_bound``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.compiler.pipeline.intervals import Intervals, OutsideSeconds
from meshwright.cost.timeline import Times, lower_bounds, peak_bytes, spans
from meshwright.ir.schedules import Table

BATCH = 96
"""Cuts simulated side by side."""
_PRICED, _PATIENCE = 2_500, 4
"""Up to so many cuts are simulated; so many looks in a row may find nothing."""


@dataclass(frozen=True)
class Cutting:
    """Units to cut under a table: what K cuts take, boundaries int [K, S + 1], options int [K, S]. ``capacity``: bytes of every
    rank [pp]; ``positions``: the unit that each interval begins with, and the end; ``outside``: what the units add outside the
    micro-batches."""

    table: Table
    virtual_stages: int
    units: Intervals
    capacity: np.ndarray
    overlap: bool
    positions: tuple[int, ...]
    outside: OutsideSeconds

    def times(self, cuts: np.ndarray, options: np.ndarray) -> Times:
        """Times of all stages."""
        forward, inputs, weights = self.units.sums(cuts, options)[:3]
        at = cuts[:, 1:-1].T
        return Times(forward, inputs, weights, self.units.value[at], self.units.gradient[at])

    def memory(self, cuts: np.ndarray, options: np.ndarray, sums: np.ndarray | None = None) -> np.ndarray:
        """Bytes of every rank at its peak: float [pp, K]. ``sums``: of all stages (``Intervals.sums``), if they are known."""
        state, saved, pending, summed = (self.units.sums(cuts, options) if sums is None else sums)[3:]
        transient, later, left, final, early = (of[options, cuts[:, :-1], cuts[:, 1:]].T for of in self.units.beside)
        held = peak_bytes(self.table, saved, pending, summed, transient, left - later, later, final, early)
        return np.asarray(self._of_ranks(state) + held)

    def excess(self, cuts: np.ndarray, options: np.ndarray) -> np.ndarray:
        """Bytes by which the ranks exceed their capacities, summed, [K]; 0 if all fit."""
        return np.asarray(np.maximum(self.memory(cuts, options) - self.capacity[:, None], 0.0).sum(axis=0))

    def bounds(self, cuts: np.ndarray, options: np.ndarray) -> np.ndarray:
        """Seconds of the step that each takes at least [K]."""
        name, m, times = self.table.name, self.table.microbatches, self.times(cuts, options)
        gather, left, optimizer = self._outside(cuts, times)
        work = times.forward + times.backward_input + times.backward_weight
        run = lower_bounds(name, self.table.pp, self.virtual_stages, m, times) + left.min(axis=0)
        return np.asarray(gather[0] + np.maximum(run, (m * self._of_ranks(work) + left).max(axis=0)) + optimizer.max(axis=0))

    def seconds(self, cuts: np.ndarray, options: np.ndarray) -> np.ndarray:
        """Seconds of the step that each takes, simulated [K]."""
        times = self.times(cuts, options)
        gather, left, optimizer = self._outside(cuts, times)
        begin, end = spans(self.table, times, overlap=self.overlap)
        start = np.maximum(gather - begin, 0.0).max(axis=0)
        return np.asarray(start + (end + left).max(axis=0) + optimizer.max(axis=0))

    def _outside(self, cuts: np.ndarray, times: Times) -> np.ndarray:
        """Gathers, what is left of the reductions, and the optimizer of every rank: [3, pp, K]."""
        prefix = self.outside.prefix
        gather, reduce, optimizer = (prefix[:, cuts[:, 1:]] - prefix[:, cuts[:, :-1]]).transpose(0, 2, 1)
        back = self._of_ranks(times.backward_input + times.backward_weight)
        reduce = self._of_ranks(reduce)
        left = np.maximum(reduce - back, self.outside.slowed * reduce)
        return np.array([self._of_ranks(gather), left, self._of_ranks(optimizer)])

    def _of_ranks(self, stages: np.ndarray) -> np.ndarray:
        """Sums of stages [S, K] over every rank: [pp, K]."""
        if self.table.stages == self.table.pp:
            return stages[np.argsort(self.table.stage_rank)]
        return np.array([stages[list(self.table.stages_of(rank))].sum(axis=0) for rank in range(self.table.pp)])


@dataclass(frozen=True)
class Found:
    """The best cut: ``cuts`` [S + 1], ``options`` [S], and what ``stages.Cuts`` says of it."""

    cuts: np.ndarray
    options: np.ndarray
    makespan: float
    bound: float
    candidates: int
    looked: int
    work: float = 0.0


def refine(problem: Cutting, cuts: np.ndarray, options: np.ndarray, bound: float, cutoff: float) -> Found:
    """Best-first local search from several starts: the cheapest cut not yet looked around is; of its neighbours those with
    the smallest bounds are simulated, none whose bound is no better than the best or the cutoff. A look that found nothing
    better is followed by a wide one around the best; ends when ``_PATIENCE`` in a row found nothing."""
    stages = problem.table.stages
    seen: set[bytes] = set()
    pool: list[tuple[float, bytes]] = []
    best, priced, looked, idle = (math.inf, b""), 0, 0, 0
    while True:
        looked += len(cuts)
        rows = np.concatenate([cuts, options], axis=1)
        bounds = problem.bounds(cuts, options)
        better = np.flatnonzero(bounds < (min(best[0], cutoff) if seen else math.inf) * (1 - 1e-12))
        better = better[[row.tobytes() not in seen for row in rows[better]]] if len(better) else better
        if len(better):
            better = better[problem.excess(cuts[better], options[better]) <= 0]
        if len(better):
            rows = rows[better[np.argsort(bounds[better], kind="stable")[:BATCH]]]
            seconds = problem.seconds(rows[:, : stages + 1], rows[:, stages + 1 :]).tolist()
            priced += len(rows)
            keys = [row.tobytes() for row in rows]
            seen.update(keys)
            for entry in zip(seconds, keys, strict=True):
                heapq.heappush(pool, entry)
        idle = 0 if pool and pool[0][0] < best[0] * (1 - 1e-12) else idle + 1
        best = min(best, pool[0]) if pool else best
        if not pool or best[0] <= bound or idle >= _PATIENCE or priced >= _PRICED:
            row = np.frombuffer(best[1], dtype=np.int64)
            return Found(row[: stages + 1], row[stages + 1 :], best[0], bound, priced, looked)
        start = best if idle == 1 else heapq.heappop(pool)
        row = np.frombuffer(start[1], dtype=np.int64)
        cuts, options = _neighbours(problem, row[: stages + 1], row[stages + 1 :], wide=idle == 1)


def _neighbours(problem: Cutting, cuts: np.ndarray, options: np.ndarray, wide: bool) -> tuple[np.ndarray, np.ndarray]:
    """One unit from stage a to stage b, everything between shifted (``wide``: between any two, see ``_moves``); or one stage to
    another option."""
    moved, flips = _moves(problem, cuts, range(problem.table.pp), wide), _flips(problem, options, np.arange(len(options)))
    both = np.concatenate([moved, np.tile(cuts, (len(flips), 1))])
    return both, np.concatenate([np.tile(options, (len(moved), 1)), flips])


def _moves(problem: Cutting, cuts: np.ndarray, ranks: Sequence[int], wide: bool) -> np.ndarray:
    """Boundaries [K, S + 1] with one unit of a stage of these ranks, which keeps another one, moved to another stage. Of the
    stages between a rank's first and last, which are much alike, the longest gives and the shortest takes; ``wide``: all."""
    sizes = np.diff(cuts)

    def chosen(rank: int, sign: int) -> set[int]:
        own = list(problem.table.stages_of(rank))
        return set(own) if wide else {own[0], own[-1], *sorted(own[1:-1], key=lambda stage: sign * sizes[stage])[:1]}

    give = np.array([stage for rank in ranks for stage in sorted(chosen(rank, -1)) if sizes[stage] > 1], dtype=np.int64)
    take = np.array([stage for rank in range(problem.table.pp) for stage in sorted(chosen(rank, 1))])
    # Boundary k (between stages k - 1 and k) moves down where a < k <= b, up where b < k <= a.
    a, b, k = give[:, None, None], take[None, :, None], np.arange(len(cuts))[None, None, :]
    shift = ((b < k) & (k <= a)).astype(np.int8) - ((a < k) & (k <= b)).astype(np.int8)
    return np.asarray(cuts + shift[give[:, None] != take])


def _flips(problem: Cutting, options: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """Options [K, S] with one source stage changed."""
    stage, option = np.repeat(sources, problem.units.options), np.tile(np.arange(problem.units.options), len(sources))
    other = options[stage] != option
    rows = np.tile(options, (int(other.sum()), 1))
    rows[np.arange(len(rows)), stage[other]] = option[other]
    return rows


def make_fit(problem: Cutting, cuts: np.ndarray, options: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Follows the neighbours that overflow less until all fits or none does; options change before units leave a rank that
    overflows, and of those changes first the one that frees the most bytes per second it adds."""
    excess = float(problem.excess(cuts[None], options[None])[0])
    while excess > 0:
        over = np.flatnonzero(problem.memory(cuts[None], options[None])[:, 0] > problem.capacity)  # no other rank can help
        found = _flipped(problem, cuts, options, over)
        if found is None:
            moved = _moves(problem, cuts, over.tolist(), wide=True)
            gain = _gains(problem, (cuts, options), moved, np.tile(options, (len(moved), 1)), excess)
            if not (gain > 0).any():
                break
            cuts = moved[int(gain.argmax())]
        else:
            options = found
        excess = float(problem.excess(cuts[None], options[None])[0])
    return cuts, options


def _flipped(problem: Cutting, cuts: np.ndarray, options: np.ndarray, ranks: np.ndarray) -> np.ndarray | None:
    """Options with the best change of each of these ranks: of one stage, which frees the most bytes per second it adds. Their
    memories are their own affair, so a change of each is tried at a time. None if no change helps."""
    tried = {rank: [(stage, option) for stage in problem.table.stages_of(rank) for option in range(problem.units.options)
                    if option != options[stage]] for rank in ranks.tolist()}
    rows = np.tile(options, (1 + max(map(len, tried.values()), default=0), 1))  # the first row stays as it is
    for changes in tried.values():
        for row, (stage, option) in enumerate(changes, 1):
            rows[row, stage] = option
    at = np.tile(cuts, (len(rows), 1))
    sums = problem.units.sums(at, rows)
    over, seconds = np.maximum(problem.memory(at, rows, sums) - problem.capacity[:, None], 0.0), sums[:3].sum(axis=0)
    least, found = 1e-12 * seconds[:, 0].sum() + 1e-300, options.copy()
    for rank, changes in tried.items():
        stages, own = [stage for stage, _ in changes], np.arange(1, 1 + len(changes))
        gain = np.maximum(over[rank, 0] - over[rank, own], 0.0) / np.maximum(seconds[stages, own] - seconds[stages, 0], least)
        if len(gain) and gain.max() > 0:
            stage, option = changes[int(gain.argmax())]
            found[stage] = option
    return None if (found == options).all() else found


def _gains(
    problem: Cutting, now: tuple[np.ndarray, np.ndarray], cuts: np.ndarray, options: np.ndarray, excess: float
) -> np.ndarray:
    """Bytes of the ``excess`` now that each of K neighbours frees, per second that it adds to all stages: [K]."""
    if not len(cuts):
        return np.zeros(0)
    sums = problem.units.sums(cuts, options)
    over = np.maximum(problem.memory(cuts, options, sums) - problem.capacity[:, None], 0.0).sum(axis=0)
    freed, stage = np.maximum(excess - over, 0.0), sums[:3].sum(axis=(0, 1))
    before = problem.units.sums(now[0][None], now[1][None])[:3].sum()
    return np.asarray(freed / np.maximum(stage - before, 1e-12 * stage + 1e-300))
