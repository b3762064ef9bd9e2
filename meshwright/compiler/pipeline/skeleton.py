"""A schedule's table in few sums: what of its actions a bound on any times has to know.

A rank runs the same thing again and again: all micro-batches of a stage one after the other, or a forward and a backward in
turn. In such a stretch that repeats itself the first actions and the last ones are *kept*; what lies between two that are kept
on a rank takes so much of each stage's seconds, whatever these are. A *place* is the end of an action that is kept, or the
arrival of what it sends, and a *step* says how much later than another place it is at least: after what the rank ran before it,
after what its operand was made of, after the transfer before it on its link. These are the recurrence of ``cost.timeline``
without some of its actions, so a place comes no later than there: places and steps are rows of a linear program over seconds
(``timed_program``). Of 8 ranks of 5 stages with 8 micro-batches 1,300 actions and transfers are 440 places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from meshwright.ir.schedules import Table
from meshwright.ir.schedules.table import Order

_SHORT = 4
"""What repeats itself is looked for in so many actions in turn, and in those between two micro-batches that meet a stage again
where micro-batches go through all stages of a rank in groups: all forwards, with all backwards, with all gradients of
weights."""
_COLUMNS = ((0,), (1, 2), (1,), (2,))
"""Which of a stage's seconds (forward, backward input, backward weight) an action of each kind takes (``COMPUTED``)."""


@dataclass(frozen=True)
class Step:
    """``place`` is later than ``after`` (0: the begin) by seconds of stages, ``counts[i]`` times those in ``columns[i]`` of
    ``stages[i]``, and by what crosses boundaries, ``sent[i]`` times ``boundaries[i]``, down or up (``ways[i]`` 0 or 1)."""

    place: int
    after: int
    stages: np.ndarray
    columns: np.ndarray
    counts: np.ndarray
    boundaries: np.ndarray
    ways: np.ndarray
    sent: np.ndarray


@dataclass(frozen=True)
class Skeleton:
    """The ``steps`` of a table between so many ``places``, of which number 0 is the begin; the ``last`` place of every rank."""

    places: int
    steps: tuple[Step, ...]
    last: tuple[int, ...]

    @classmethod
    def of(cls, table: Table) -> Skeleton:
        """Of a table, by what repeats itself on its ranks."""
        periods = {*range(1, _SHORT + 1), table.stages, 2 * table.stages, 3 * table.stages}
        return _Walk(table, _kept(table.order, periods)).skeleton()


def _kept(order: Order, periods: Collection[int]) -> np.ndarray:
    """Whether each row of the order is one that is kept: it is not where one that lies so many before it and the one as many
    behind it do the same."""
    kept = np.ones(len(order.duration), dtype=bool)
    for rows in order.row_of:
        done = order.duration[rows]
        for period in periods:
            if len(done) > 2 * period:
                again = done[period:] == done[:-period]
                kept[rows[period:-period][again[period:] & again[:-period]]] = False
    return kept


class _Walk:
    """Back from every action that is kept to those before it that are."""

    def __init__(self, table: Table, kept: np.ndarray) -> None:
        order, self.stages = table.order, table.stages
        self.kept, self.row_of = kept.tolist(), order.row_of
        self.previous, self.needs, self.link = order.previous.tolist(), order.needs.tolist(), order.link.tolist()
        self.duration, self.boundary, self.none = order.duration.tolist(), order.boundary.tolist(), 2 * (table.stages - 1)
        rows = [row for row in np.flatnonzero(kept).tolist() if row]
        sends = [row for row in rows if self.boundary[row] < self.none]
        self.end = {0: 0} | {row: place for place, row in enumerate(rows, 1)}
        self.arrival = {row: place for place, row in enumerate(sends, len(rows) + 1)}
        self.steps = list[Step]()

    def skeleton(self) -> Skeleton:
        """All steps."""
        for row in self.end:
            if row:
                self._end(row)
        for row, place in self.arrival.items():
            self._step(place, self.end[row], Counter(), Counter([self.boundary[row]]))
            sent, before = Counter([self.boundary[row]]), self.link[row]
            while before and not self.kept[before]:
                sent[self.boundary[before]] += 1
                before = self.link[before]
            if before:
                self._step(place, self.arrival[before], Counter(), sent)
        last = tuple(self.end[int(rows[-1])] for rows in self.row_of)
        return Skeleton(len(self.end) + len(self.arrival), tuple(self.steps), last)

    def _end(self, row: int) -> None:
        """After the action before it on its rank, and after its operand."""
        runs = Counter([self.duration[row]])
        self._step(self.end[row], self.end[self._back(self.previous[row], runs)], runs, Counter())
        needed = self.needs[row]
        if not needed:
            return
        runs, sent = Counter([self.duration[row]]), Counter[int]()
        if self.kept[needed]:
            place = self.arrival.get(needed, self.end[needed])
        else:
            sent.update([self.boundary[needed]] * (self.boundary[needed] < self.none))
            place = self.end[self._back(needed, runs)]
        self._step(self.end[row], place, runs, sent)

    def _back(self, row: int, runs: Counter[int]) -> int:
        """The first action from this one back that is kept, or 0; what comes after it is added to ``runs``."""
        while row and not self.kept[row]:
            runs[self.duration[row]] += 1
            row = self.previous[row]
        return row

    def _step(self, place: int, after: int, runs: Counter[int], sent: Counter[int]) -> None:
        ran = [(stage, column, count) for what, count in runs.items() for kind, stage in [divmod(what, self.stages)]
               for column in _COLUMNS[kind]]
        crossed = [(*divmod(boundary, 2), count) for boundary, count in sent.items()]
        self.steps.append(Step(place, after, *_columns(ran), *_columns(crossed)))


def _columns(rows: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3).T
