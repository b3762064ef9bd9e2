"""A bound on the step of any cut, from the schedule's own table run at divided units.

What a table takes is the largest of sums along paths, so it is convex in the seconds of the stages, and the path that is
longest at some seconds bounds it at all others (``cost.timeline.longest_paths``). Cutting planes (Kelley 1960): a linear
program over what every stage runs of every class of units, divided, gives stage seconds and a bound; the table is run near
these, its longest paths become rows, and so on, until the bound is as good as what was run, or as needed. It sees what
formulas of the schedule do not: transfers that wait for each other, and what a rank waits for in the middle of its order.
Memory and the order of the units are dropped, of crossings the cheapest is assumed, and every unit runs in the fastest way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.compiler.pipeline.intervals import Intervals, OutsideSeconds
from meshwright.compiler.pipeline.stage_bound import classes_of
from meshwright.compiler.solver.linear import LinearProgram, NoSolutionError
from meshwright.cost.timeline import Times, longest_paths
from meshwright.ir.schedules import Table

_ROUNDS, _CLOSE = 6, 0.002
"""Up to so many rounds; a bound that is so close to what was run is not raised."""
_SHARES = (1.0, 0.5, 0.2)
"""The table is run at what the program says, and so much of the way there from the best that was run: at the ends alone it
goes from one to another."""
_WORST = 0.97
"""Ranks that end after so much of the step have their paths added."""
_SAFE = 1 + 1e-6
"""More than what the solver's tolerance can make of a bound."""


@dataclass(frozen=True)
class _Point:
    """What every stage runs, [stages, classes], and what that takes: ``seconds`` of the step; of every rank when it ``ends``,
    the ``counts`` on its longest path [pp, stages, 3] and the seconds of what is ``sent`` on it [pp]."""

    amounts: np.ndarray
    seconds: float
    ends: np.ndarray
    counts: np.ndarray
    sent: np.ndarray


def timed_bound(
    units: Intervals, table: Table, outside: OutsideSeconds, known: float, cutoff: float
) -> tuple[float, int]:
    """Seconds of a step that no cut can beat, no less than ``known``, and how often the table was run. ``cutoff``: seconds
    above which nothing sharper is needed, if it is not 0."""
    program = _Program(units, table, outside)
    (best,), bound, runs = program.run([program.even()]), known, 1
    program.learn(best)
    for _ in range(_ROUNDS):
        if best.seconds <= bound * (1 + _CLOSE) or bound >= cutoff > 0:
            break
        try:
            found, amounts = program.solved()
        except NoSolutionError:
            break
        bound, runs = max(bound, found), runs + len(_SHARES)
        for point in program.run([share * amounts + (1 - share) * best.amounts for share in _SHARES]):
            program.learn(point)
            best = min(best, point, key=lambda one: one.seconds)
    return bound, runs


class _Program(LinearProgram):
    """What stages run and the step, in units of the longest class (``scale``); variable 0 is the step."""

    def __init__(self, units: Intervals, table: Table, outside: OutsideSeconds) -> None:
        super().__init__()
        self.units, self.table, self.outside = units, table, outside
        numbers, self.kinds, self.members = classes_of(units, outside)
        self.classes = numbers.min(axis=2)
        self.scale = float(self.classes[:3].max()) or 1.0
        self.crossing = [float(x[1:-1].min()) if units.count > 1 else 0.0 for x in (units.value, units.gradient)]
        self.ranks = np.array(table.stage_rank)
        stages, pp = table.stages, table.pp
        self.amounts = self.variables(stages, len(self.members))
        self.seconds, self.left, self.optimizer = self.variables(stages, 3), self.variables(pp, 1), self.variables(1)
        self._place()
        self._outside()

    def _place(self) -> None:
        """Every unit is somewhere, one or more in every stage, the first and the last at the ends."""
        for number, count in enumerate(self.members.tolist()):
            self.add([(self.amounts[:, number], 1.0)], count, count)
        for stage, row in enumerate(self.amounts):
            self.add([(row, 1.0)], 1.0)
            for column, seconds in zip(self.classes[:3] / self.scale, self.seconds[stage, :, None], strict=True):
                self.add([(row, column), (seconds, -1.0)], 0.0, 0.0)
        self.add([(self.amounts[0, self.kinds[:1]], 1.0)], 1.0)
        self.add([(self.amounts[-1, self.kinds[-1:]], 1.0)], 1.0)

    def _outside(self) -> None:
        """A rank's actions, what it has left after them, and the optimizer of all of them."""
        (gather, reduce, optimizer), step = self.classes[6:] / self.scale, (np.zeros(1, dtype=np.int64), 1.0)
        start = float(gather[self.kinds[0]])
        for rank in range(self.table.pp):
            own, after = self.ranks == rank, [(self.left[rank], -1.0), (self.optimizer, -1.0)]
            self.add([step, (self.seconds[own], -float(self.table.microbatches)), *after], start)
            self.add([(self.optimizer, 1.0), (self.amounts[own], -optimizer)], 0.0)
            self.add([(self.left[rank], 1.0), (self.amounts[own], -self.outside.slowed * reduce)], 0.0)
            self.add([(self.left[rank], 1.0), (self.amounts[own], -reduce), (self.seconds[own, 1:], 1.0)], 0.0)

    def even(self) -> np.ndarray:
        """Divided units in their order, the same seconds in every stage: amounts [stages, classes]."""
        work = np.diff(self.units.cheapest()[:3].sum(axis=0))
        ends = np.concatenate([[0.0], np.cumsum(work)])
        edges = np.linspace(0.0, ends[-1], self.table.stages + 1)
        parts = np.clip(np.minimum(edges[1:, None], ends[1:]) - np.maximum(edges[:-1, None], ends[:-1]), 0.0, None)
        amounts = np.zeros((self.table.stages, len(self.members)))
        np.add.at(amounts.T, self.kinds, (parts / np.maximum(work, 1e-300)).T)
        return amounts

    def run(self, cases: Sequence[np.ndarray]) -> list[_Point]:
        """The table at what the stages run, [stages, classes] each."""
        every = np.stack(cases, axis=2)
        forward, inputs, weights, _, _, _, _, reduce, optimizer = np.einsum("nc,sck->nsk", self.classes, every)
        down, up = (np.full((self.table.stages - 1, len(cases)), seconds) for seconds in self.crossing)
        own = np.arange(self.table.pp)[:, None] == self.ranks
        back, reduce, optimizer = own @ (inputs + weights), own @ reduce, own @ optimizer
        left = np.maximum(reduce - back, self.outside.slowed * reduce)
        found = []
        for case, paths in enumerate(longest_paths(self.table, Times(forward, inputs, weights, down, up))):
            ends = paths.ends + left[:, case]
            seconds = float(self.outside.gather[0] + ends.max() + optimizer[:, case].max())
            sent = (paths.sends.sum(axis=1) * self.crossing).sum(axis=1)
            found.append(_Point(every[:, :, case], seconds, ends, paths.runs, sent))
        return found

    def learn(self, point: _Point) -> None:
        """The longest paths to the ranks that end last, as rows."""
        for rank in np.flatnonzero(point.ends >= _WORST * point.ends.max()).tolist():
            used = np.nonzero(point.counts[rank])
            path = (self.seconds[used], -point.counts[rank][used])
            terms = [(np.zeros(1, dtype=np.int64), 1.0), path, (self.left[rank], -1.0), (self.optimizer, -1.0)]
            self.add(terms, float(point.sent[rank] + self.outside.gather[0]) / self.scale)

    def solved(self) -> tuple[float, np.ndarray]:
        """Seconds of the step at least, and amounts at which the rows say so. Raises NoSolutionError."""
        seconds, values = self.solution({0: 1.0})
        return max(0.0, seconds) * self.scale / _SAFE, values[self.amounts]
