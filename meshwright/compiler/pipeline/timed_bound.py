"""A bound on the step of any cut, from the schedule's own table run at divided units.

What a table takes is the largest of sums along paths, so it is convex in the seconds of the stages and of the crossings, and
the path that is longest at some seconds bounds it at all others (``cost.timeline.longest_paths``). A linear program
(``timed_program``) over what every stage runs of every class of units, divided, and where its cuts lie gives seconds and a
bound. It begins with the table in few sums (``skeleton``), and goes on with cutting planes (Kelley 1960): the table is run near
what it found, its longest paths become rows, and so on, until the bound is as good as what was run, or as needed. Paths alone
come there slowly or not at all (of T5-3B on 8 ranks of 5 stages, 93.9% of the best step after ten programs, where the skeleton
says 95.3% at once and 95.9% with a few paths). The bound sees what formulas of the schedule do not: transfers that wait for
each other, and what a rank waits for in the middle of its order.

Where a bound is to be sharp, units are whole and a cut lies in one place, as a mixed-integer program over the rows that are
there by then: a rank has a whole number of units of a class, then so has a stage; so many of them run in the fastest way; a cut
lies between two corners that are neighbours: as a mean of corners of an encoder and of its decoder it would part both; and
what a stage has beside what it keeps goes by whether it has one unit or several, and whether some are made again (of Llama 3
405B on 1,024 A100 of 40 GB, where no cut of 2 ranks of 2 stages fits, 99.5% of the best step, and 97.5%). Whole ranks come
first where one class alone has several units: that is a small program, which says more than a large one that ends at its limit
(of ViT-Huge on 192 A100, 6 ranks of 3 stages, 98.3% of the best step in 0.4 s, and 96.4%).
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np

from meshwright.compiler.pipeline.intervals import Intervals, OutsideSeconds
from meshwright.compiler.pipeline.stage_bound import classes_of
from meshwright.compiler.pipeline.timed_program import STEP, KnownPaths, TimedProgram
from meshwright.compiler.solver.linear import NoSolutionError, UnsolvedError
from meshwright.ir.schedules import Table

_ROUNDS, _CLOSE = 40, 0.002
"""So many programs are solved at most; a bound that is so close to what was run is not raised."""
_NUMBERS, _MANY, _LONG = 300_000, 1_500_000, 3_000_000
"""Programs end when they have had so many numbers, a fifth of a second; where a bound is to be sharp and no skeleton says most
of it at once, some seconds; where there is time, all that are solved then end soon after so many, and after twice as many."""
_CASES = 20, 1000, 10_000
"""Where units are whole, so many cases are told apart: the fewest at first and where ranks alone are whole, then as many as
take a second, by what those before took; the most where there is time."""
_LARGEST, _SMALL = 2500, 300
"""Rows of a program of whole units beyond which it is not solved: it takes seconds; rows where no bound is to be sharp."""
_TURNS, _WAITS = 20, 3
"""So often is a program of whole units solved at most, with the paths that it taught; so often where it says no more by then,
or takes long."""
_LOOKS = 3
"""So many programs say where to begin with a search for a cut."""
_STILL, _MORE = 10, 0.0005
"""A bound that so many programs raised by less than this part is left as it is."""


class Sharp(IntEnum):
    """How sharp a timed bound is to be: left as it is where it cannot come to the cutoff, and where it takes long to; as sharp
    as divided units make it; with whole numbers of them on ranks; in stages too, whose cuts lie in one place; with more time
    for these."""

    QUICK = 0
    DIVIDED = 1
    RANKS = 2
    STAGES = 3
    LONG = 4


class TimedBound:
    """A bound on the step of any cut. What was asked for divided units can be asked for whole ones later.

    ``known``: seconds that are known already; ``room``: bytes of every rank [pp]; ``paths``: those remembered of this table;
    ``passed``: bytes of what a stage passes on, at least, there as long as it holds the micro-batch.

    cutoff: seconds above which nothing sharper is needed; of 0 seconds there is none
    seconds: of a step that no cut can beat, so far
    """

    def __init__(
        self, units: Intervals, table: Table, outside: OutsideSeconds, room: np.ndarray, known: float, cutoff: float,
        paths: KnownPaths, passed: float = 0.0,
    ) -> None:
        self._program = TimedProgram(units, table, outside, room, cutoff, paths, passed)
        self._best, self.cutoff, self.seconds = self._program.first(), cutoff or math.inf, known
        self._asked: Sharp | None = None
        self._each = math.inf

    @property
    def work(self) -> float:
        """Nominal seconds of the programs that were solved."""
        return self._program.work

    def sharpen(self, sharp: Sharp) -> float:
        """The seconds, as sharp as that. Of small programs more is said at once, where crossings differ by enough to come to
        the cutoff."""
        asked, program = self._asked, self._program
        if asked is not None and sharp <= asked:
            return self.seconds
        assert asked is not Sharp.QUICK
        self._asked = sharp
        if asked is None:
            self._divide(sharp)
            program.let_go()
        whole = program.alike and (asked is None or asked < Sharp.RANKS) and (sharp >= Sharp.RANKS or self._near)
        if whole and len(program.parts) <= (_LARGEST if sharp >= Sharp.RANKS else _SMALL) and self.seconds < self.cutoff:
            program.make_ranks_whole()
            self._turn(_CASES[0], _NUMBERS)
        if self.seconds >= self.cutoff or not (sharp >= Sharp.STAGES or self._near):
            return self.seconds
        largest = _LARGEST if sharp >= Sharp.STAGES else _SMALL
        if len(program.parts) <= largest and not program.staged:
            program.make_stages_whole()
        if program.staged and len(program.parts) <= largest:
            long, end = sharp is Sharp.LONG, program.size + _LONG
            self._turn(_CASES[2] if long else _CASES[1], _LONG if long else _MANY)
            if self.seconds < self.cutoff and program.weigh():
                self._turn(_CASES[2] if long else _CASES[1], max(0, end - program.size) if long else _MANY)
        return self.seconds

    @property
    def _near(self) -> bool:
        """Whether where cuts lie may make up for what is left to the cutoff."""
        return self._program.differs >= self.cutoff - self.seconds

    def _divide(self, sharp: Sharp) -> None:
        """Units are divided."""
        program, before = self._program, list[float]()
        for _ in range(_ROUNDS):
            most = _MANY if sharp and not program.followed else _NUMBERS
            still = len(before) >= _STILL and before[-1] <= before[-_STILL] * (1 + _MORE)
            below = (not sharp and self._best.seconds < self.cutoff) or program.size > most
            close = self._best.seconds <= (max(before, default=0.0) if sharp else self.seconds) * (1 + _CLOSE)  # rows say so
            if still or below or close or self.seconds >= self.cutoff:
                break
            if not program.begun:
                program.follow()
            try:
                found, point = program.solved()
            except NoSolutionError:
                self.seconds = max(self.seconds, self.cutoff)
                break
            except UnsolvedError:
                break
            self.seconds, before = max(self.seconds, min(found, self.cutoff)), [*before, found]
            if not (program.overflows(point) or program.remembers(point, found)):
                self._best, _ = program.toward(self._best, point)

    def _turn(self, most: int, numbers: int) -> None:
        """Units are whole as the program says, with the paths that it teaches; ``most`` cases are told apart, and after a few
        turns there are no more once programs had so many ``numbers``."""
        program, before, end = self._program, list[float](), self._program.size + numbers
        for _ in range(_TURNS):
            still = len(before) >= _WAITS and before[-1] <= before[-_WAITS] * (1 + _MORE)
            if still or (len(before) >= _WAITS and program.size > end) or program.size > end + _MANY:
                break
            cases, steps = int(np.clip(max(_MANY, numbers) / self._each, _CASES[0], most)), program.steps
            try:
                found, point = program.solved_whole(cases)
            except NoSolutionError:
                self.seconds = self.cutoff
                break
            except UnsolvedError:
                break
            self._each = max(1.0, STEP * program.numbers * (program.steps - steps) / cases)
            self.seconds, before = max(self.seconds, min(found, self.cutoff)), [*before, found]
            if point is None or self.seconds >= self.cutoff:
                break
            if not program.overflows(point) and not program.remembers(point, found):
                used = len(program.used)
                self._best, ran = program.toward(self._best, point)
                if len(program.used) == used or ran <= found * (1 + _CLOSE):
                    break


def divided_cuts(
    units: Intervals, table: Table, outside: OutsideSeconds, room: np.ndarray
) -> tuple[np.ndarray, float]:
    """Cuts [k, stages + 1] near to what is best for divided units, where several classes have several and the table has a
    skeleton, else none; and nominal seconds of the programs that say so."""
    found = list[np.ndarray]()
    if np.count_nonzero(classes_of(units, outside, table.stages).members > 1) < 2:
        return np.zeros((0, table.stages + 1), dtype=np.int64), 0.0
    program = TimedProgram(units, table, outside, room, 0.0, KnownPaths(table))
    best = program.first()
    while program.follow() and len(found) < _LOOKS:
        try:
            seconds, point = program.solved()
        except (NoSolutionError, UnsolvedError):
            break
        found.append(program.whole_cut(point))
        if not (program.overflows(point) or program.remembers(point, seconds)):
            best, _ = program.toward(best, point)
    return np.unique(np.array(found, dtype=np.int64).reshape(-1, table.stages + 1), axis=0), program.work
