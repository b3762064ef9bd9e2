"""The linear program behind a timed bound (``timed_bound``): what every stage runs, where cuts lie, and the step.

A cut lies between two *corners*: positions between which units are of one class and crossings cost the same, and the first and
last that leave a unit to every stage before and behind it. As a mean of corners it says how many units of each class lie before
it and what crosses it; of real cuts both are exact. Memory is that of every rank at every moment of its order, with units
recomputed one by one or by parts of them, and what any stage needs beside its units (``stage_bound.Ends``). The step is no
less than what the places of the table's ``skeleton`` say, where that is not too large, and than the longest paths of the table
wherever it was run. Paths are sums of stages and crossings, whatever these take, so those found for one candidate are
remembered for all that run the same table (``KnownPaths``). So it is a relaxation that leaves out only that units are whole,
what is alive beside some of them, and that a cut lies in one place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshwright.compiler.pipeline.intervals import Intervals, OutsideSeconds
from meshwright.compiler.pipeline.skeleton import Skeleton
from meshwright.compiler.pipeline.stage_bound import Ends, classes_of, whole_units
from meshwright.compiler.solver.linear import SAFE, LinearProgram
from meshwright.cost.timeline import Times, longest_paths
from meshwright.ir.schedules import Table, maximal

_STEPS = 1200
"""A skeleton of more steps is left out: its program takes longer than many of paths alone."""
_BEGUN, STEP = 7.0, 0.02
"""Numbers for each of a program that begins anew, and where units are whole for each and an iteration (seen: 5 us; 0.01 to
0.02 us with what is tried before it branches, whose iterations are not counted)."""
_SHARES = (1.0, 0.5, 0.2)
"""The table is run at what the program says, and so much of the way there from the best that was run: at the ends alone it
goes from one to another."""
_WORST = 0.97
"""Ranks that end after so much of the step have their paths added."""
_WEIGHED, _FELT = 12, 0.002
"""Of no more stages what units have beside what they keep is told apart (seen: of 32 a program says less for it), and where it
is more than this part of a rank's memory."""
_MISSED = 1e-5
"""By such a part a remembered path must be longer than the step to be added."""


@dataclass
class KnownPaths:
    """Longest paths of one ``table``, wherever they were found: how often a stage's forward, backward input and backward weight
    lie on each [stages, 3], what crosses each boundary, down and up [stages - 1, 2], and the ``rank`` at which it ends."""

    table: Table
    known: dict[tuple[int, bytes, bytes], int] = field(default_factory=dict)
    runs: list[np.ndarray] = field(default_factory=list)
    sends: list[np.ndarray] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)

    @cached_property
    def skeleton(self) -> Skeleton:
        """The table in few sums."""
        return Skeleton.of(self.table)

    def add(self, runs: np.ndarray, sends: np.ndarray, rank: int) -> int:
        """The number of a path."""
        runs, sends = runs.astype(np.float32), sends.astype(np.float32)
        key = rank, runs.tobytes(), sends.tobytes()
        if key not in self.known:
            self.known[key] = len(self.runs)
            self.runs.append(runs)
            self.sends.append(sends)
            self.rank.append(rank)
        return self.known[key]


@dataclass(frozen=True)
class Point:
    """``amounts`` [stages, ways] of what stages run and ``places`` [stages - 1, corners] of cuts, each at its own corners;
    ``seconds`` of the step, inf if it was not run; ``beside``: bytes [stages] that whole units have beside what they keep, more
    than any stage has."""

    amounts: np.ndarray
    places: np.ndarray
    seconds: float = math.inf
    beside: np.ndarray | None = None

    def toward(self, other: Point, share: float) -> Point:
        """A point between the two."""
        return Point(share * other.amounts + (1 - share) * self.amounts, share * other.places + (1 - share) * self.places)


class TimedProgram(LinearProgram):
    """What stages run, where cuts lie and the step, in units of the longest class (``scale``); variable 0 is the step. A *way*
    is a class of units under one of its options. ``size``: numbers of all programs solved;
    ``begun``: how many were solved; ``followed``: whether the skeleton is in it; ``staged``: whether
    units are whole in every stage."""

    def __init__(
        self, units: Intervals, table: Table, outside: OutsideSeconds, room: np.ndarray, cutoff: float, paths: KnownPaths,
        passed: float = 0.0,
    ) -> None:
        super().__init__()
        self.units, self.table, self.outside, self.paths, self.size = units, table, outside, paths, 0
        self.staged = self.followed = False
        self.begun = 0
        known = classes_of(units, outside, table.stages)
        self.classes, self.kinds, self.members = known
        self.room, self.passed, self.moments = room, passed, _moments(table, units, passed)
        self.running, self.bytes_ = list[tuple[np.ndarray, np.ndarray, np.ndarray]](), max(1.0, float(room.max()))
        self.beside = np.zeros(0, dtype=np.int64)
        self.ways, self.of = self._ways(known.numbers)
        self.most = np.full(table.pp, units.count)
        self.scale = float(self.ways[:3].max()) or 1.0
        self.corners = _corners(units, self.kinds, table.stages)
        before = np.concatenate([np.zeros((1, len(self.members))), np.cumsum(np.eye(len(self.members))[self.kinds], axis=0)])
        self.ends = units.cheapest()[:3].sum(axis=0)
        self.before, self.crossing = before[self.corners], np.stack([units.value, units.gradient], axis=1)[self.corners]
        self.ranks, self.used, self.begin = np.array(table.stage_rank), set[int](), table.begins
        self.amounts = self.variables(table.stages, len(self.of))
        self.places = self.variables(*self.corners.shape)
        self.seconds, self.left = self.variables(table.stages, 3), self.variables(table.pp, 1)
        self.gather, self.optimizer = self.variables(2, 1)
        self._place()
        self._outside()
        if cutoff:
            virtual = table.stages // table.pp
            self._no_more(whole_units(
                units, known, table.name, table.pp, (virtual, virtual), table.microbatches, room, outside.slowed, cutoff,
            ))
            self.add([(np.zeros(1, dtype=np.int64), 1.0)], 0.0, cutoff * SAFE / self.scale)

    def _ways(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers [10, ways] and the class of every way; where memory does not bind every unit runs in the fastest (one that
        recomputes in a stage that nothing waits for would hide more of its rank's reductions: assumed not to be done)."""
        state, saved, pending, summed = numbers[3:7]
        most = [np.max([np.max(counts[0]) * saved + np.max(counts[1]) * pending for counts in moments], axis=0) + state + summed
                for moments, *_ in self.moments]
        held = np.array([(bytes_.max(axis=1) * self.members).sum() + beside.max()
                         for bytes_, (_, beside, _) in zip(most, self.moments, strict=True)])
        if (held <= self.room).all():
            return numbers.min(axis=2), np.arange(len(self.members))
        found = [(number, way) for number in range(len(self.members))
                 for way in np.unique(numbers[:, number], axis=1).T]
        return np.array([way for _, way in found]).T, np.array([number for number, _ in found])

    def _place(self) -> None:
        """Every unit is somewhere, one or more in every stage, cuts in their order."""
        for stage, row in enumerate(self.amounts):
            self.add([(row, 1.0)], 1.0)
            for column, seconds in zip(self.ways[:3] / self.scale, self.seconds[stage, :, None], strict=True):
                self.add([(row, column), (seconds, -1.0)], 0.0, 0.0)
            for number, count in enumerate(self.members.tolist()):
                terms = [(row[self.of == number], 1.0)]
                if stage:
                    terms.append((self.places[stage - 1], self.before[stage - 1, :, number]))
                if stage < self.table.stages - 1:
                    terms.append((self.places[stage], -self.before[stage, :, number]))
                total = float(count) if stage == self.table.stages - 1 else 0.0
                self.add(terms, total, total)
        for row in self.places:
            self.add([(row, 1.0)], 1.0, 1.0)

    def _outside(self) -> None:
        """What ranks gather before a micro-batch comes to them, their actions, what is left after them, and the optimizer."""
        (gather, reduce, optimizer), step = self.ways[7:] / self.scale, (np.zeros(1, dtype=np.int64), 1.0)
        for rank in range(self.table.pp):
            own, after = self.ranks == rank, [(self.left[rank], -1.0), (self.optimizer, -1.0), (self.gather, -1.0)]
            if (at := self.begin.get(rank)) is not None:
                comes = (self.seconds[:at, 0], 1.0), (self.places[:at], self.crossing[:at, :, 0] / self.scale)
                self.add([(self.gather, 1.0), (self.amounts[own], -gather), *comes], 0.0)
            self.add([step, (self.seconds[own], -float(self.table.microbatches)), *after], 0.0)
            self.add([(self.optimizer, 1.0), (self.amounts[own], -optimizer)], 0.0)
            self.add([(self.left[rank], 1.0), (self.amounts[own], -self.outside.slowed * reduce)], 0.0)
            self.add([(self.left[rank], 1.0), (self.amounts[own], -reduce), (self.seconds[own, 1:], 1.0)], 0.0)

    def follow(self) -> bool:
        """The step is no less than what follows from the skeleton, if that has few steps; whether it has."""
        if self.followed:
            return True
        skeleton = self.paths.skeleton
        self.followed = len(skeleton.steps) <= _STEPS
        if not self.followed:
            return False
        at = self.variables(skeleton.places, 1)
        for step in skeleton.steps:
            before = [(at[step.after], -1.0)] if step.after else []
            sent = step.sent[:, None] * self.crossing[step.boundaries, :, step.ways] / self.scale
            ran = self.seconds[step.stages, step.columns], -step.counts.astype(float)
            self.add([(at[step.place], 1.0), *before, ran, (self.places[step.boundaries], -sent)], 0.0)
        for rank, last in enumerate(skeleton.last):
            outside = [(self.left[rank], -1.0), (self.optimizer, -1.0), (self.gather, -1.0)]
            self.add([(np.zeros(1, dtype=np.int64), 1.0), (at[last], -1.0), *outside], 0.0)
        return True

    def whole_cut(self, point: Point) -> np.ndarray:
        """Boundaries [stages + 1] of the whole units nearest to a point, one or more in every stage."""
        stages, count = self.table.stages, self.units.count
        ends, least = np.rint(np.cumsum(point.amounts.sum(axis=1))[:-1]).astype(np.int64), np.arange(1, stages)
        ends = np.maximum.accumulate(ends - least) + least
        return np.array([0, *np.clip(ends, least, count - stages + least), count], dtype=np.int64)

    def _no_more(self, most: np.ndarray | None) -> None:
        """Of the most frequent class a rank runs no more than ``most`` units [pp]."""
        common = int(self.members.argmax())
        for rank, count in enumerate(most.tolist() if most is not None else ()):
            self.most[rank] = min(self.most[rank], count + self.members.sum() - self.members[common])
            if count < self.members[common]:
                self.add([(self.amounts[self.ranks == rank][:, self.of == common], 1.0)], 0.0, count)

    # points

    def first(self) -> Point:
        """Divided units in their order, the same seconds in every stage, each in the first of its ways or in the one of least
        bytes: the better of those that fit, or one that was not run."""
        each = np.interp(np.linspace(0.0, self.ends[-1], self.table.stages + 1)[1:-1], self.ends, np.arange(len(self.ends)))
        each, places = np.clip(each, self.corners[:, 0], self.corners[:, -1]), np.zeros(self.places.shape)
        for row, corners, position in zip(places, self.corners, each, strict=True):
            low = int(np.clip(np.searchsorted(corners, position, side="right") - 1, 0, max(0, len(corners) - 2)))
            high = min(low + 1, len(corners) - 1)
            start, stop = corners[[low, high]]
            share = (position - start) / (stop - start) if stop > start else 0.0
            row[low] = 1.0 - share
            row[high] += share
        whole = np.concatenate([np.zeros((1, len(self.members))), self._at(places, self.before), self.members[None]])
        counts, points = np.diff(whole, axis=0), list[Point]()
        for order in (self.ways[:3].sum(axis=0), self.ways[3:7].sum(axis=0)):
            chosen = [int(np.where(self.of == number, order, math.inf).argmin()) for number in range(len(self.members))]
            amounts = np.zeros(self.amounts.shape)
            amounts[:, chosen] = counts
            points.append(Point(amounts, places))
        ran = self.run(points)
        fits = [one for one, point in zip(ran, points, strict=True) if not self._over(point)]
        return min(fits, key=lambda one: one.seconds, default=points[1])

    def run(self, points: Sequence[Point]) -> list[Point]:
        """The points with their seconds; the longest paths to the ranks that end last become rows."""
        every = np.stack([point.amounts for point in points], axis=2)
        forward, inputs, weights, *_, gather, reduce, optimizer = np.einsum("nw,swk->nsk", self.ways, every)
        down, up = np.einsum("bck,bcd->dbk", np.stack([point.places for point in points], axis=2), self.crossing)
        own = np.arange(self.table.pp)[:, None] == self.ranks
        back, reduce, optimizer = own @ (inputs + weights), own @ reduce, own @ optimizer
        left = np.maximum(reduce - back, self.outside.slowed * reduce)
        found, start = list[Point](), self._start(gather, forward, down)
        for case, paths in enumerate(longest_paths(self.table, Times(forward, inputs, weights, down, up))):
            ends = paths.ends + left[:, case]
            seconds = float(start[case] + ends.max() + optimizer[:, case].max())
            for rank in np.flatnonzero(ends >= _WORST * ends.max()).tolist():
                self._learn(self.paths.add(paths.runs[rank], paths.sends[rank], rank))
            found.append(Point(points[case].amounts, points[case].places, seconds))
        return found

    def _start(self, gather: np.ndarray, forward: np.ndarray, down: np.ndarray) -> np.ndarray:
        """Seconds before a step's first action [k], of those of stages [stages, k] and of what they hand on [stages - 1, k]."""
        comes = np.concatenate([np.zeros((1, forward.shape[1])), np.cumsum(forward[:-1] + down, axis=0)])
        waits = [gather[self.ranks == rank].sum(axis=0) - comes[stage] for rank, stage in self.begin.items()]
        return np.asarray(np.max([*waits, 0.0 * comes[0]], axis=0))

    def toward(self, best: Point, point: Point) -> tuple[Point, float]:
        """The better of the best point that was run and those run on the way to another; seconds at the other."""
        shares = _SHARES if math.isfinite(best.seconds) else _SHARES[:1]
        ran = self.run([best.toward(point, share) for share in shares])
        return min([best, *ran], key=lambda one: one.seconds), ran[0].seconds

    def _learn(self, path: int) -> None:
        """A path as a row, once."""
        if path in self.used:
            return
        self.used.add(path)
        runs, sends, rank = self.paths.runs[path], self.paths.sends[path], self.paths.rank[path]
        on, sent = np.nonzero(runs), np.einsum("bd,bcd->bc", sends, self.crossing) / self.scale
        crossed = np.flatnonzero(sent.any(axis=1))
        self.add([
            (np.zeros(1, dtype=np.int64), 1.0), (self.seconds[on], -runs[on]), (self.places[crossed], -sent[crossed]),
            (self.left[rank], -1.0), (self.optimizer, -1.0), (self.gather, -1.0),
        ], 0.0)

    def remembers(self, point: Point, step: float) -> bool:
        """Whether a path that is known and no row yet is longer than the ``step``: the longest to every rank becomes a row."""
        unused = np.array([path for path in range(len(self.paths.runs)) if path not in self.used], dtype=np.int64)
        if not len(unused):
            return False
        seconds = np.einsum("nw,sw->sn", self.ways, point.amounts)
        runs, sends = (np.array([column[path] for path in unused]) for column in (self.paths.runs, self.paths.sends))
        crossed = self._at(point.places, self.crossing)
        took = np.einsum("psn,sn->p", runs, seconds[:, :3]) + np.einsum("pbd,bd->p", sends, crossed)
        own = np.arange(self.table.pp)[:, None] == self.ranks
        back, reduce, optimizer = own @ seconds[:, 1:3].sum(axis=1), own @ seconds[:, 8], own @ seconds[:, 9]
        left, rank = np.maximum(reduce - back, self.outside.slowed * reduce), np.array(self.paths.rank)[unused]
        start = self._start(seconds[:, 7, None], seconds[:, 0, None], crossed[:, 0, None])
        took += left[rank] + optimizer.max() + start
        missed = took > step * (1 + _MISSED)
        for one in np.unique(rank[missed]):
            self._learn(int(unused[np.where(missed & (rank == one), took, -math.inf).argmax()]))
        return bool(missed.any())

    # memory

    def _over(self, point: Point) -> list[tuple[int, int, np.ndarray]]:
        """The ranks that hold too much, their worst moment, and bytes there of all that they run [stages, ways]."""
        found, known = [], self.moments if point.beside is None else self.running
        for rank, (moments, least, runs) in enumerate(known):
            own, held = np.flatnonzero(self.ranks == rank), self._held(moments)
            bytes_ = np.einsum("ksw,sw->k", held, point.amounts[own]) + least
            bytes_ += 0.0 if point.beside is None else point.beside[own][runs]
            if bytes_.max() > self.room[rank] * SAFE:
                at = int(bytes_.argmax())
                found.append((rank, at, held[at]))
        return found

    def _held(self, moments: np.ndarray) -> np.ndarray:
        """Bytes of a unit of every way in every stage of a rank at its moments, [k, stages of the rank, ways]."""
        state, *kept = self.ways[3:7]
        return np.asarray(sum(moments[:, at, :, None] * each for at, each in enumerate(kept)) + state)

    def overflows(self, point: Point) -> bool:
        """Whether a rank holds too much at a point; the worst moment of each becomes a row."""
        over = self._over(point)
        for moment in over:
            self._hold(*moment, weighed=point.beside is not None)
        return bool(over)

    def _hold(self, rank: int, at: int, held: np.ndarray, weighed: bool) -> None:
        """A moment of a rank as a row; ``weighed``: with what is beside its units (``weigh``)."""
        own, scale = np.flatnonzero(self.ranks == rank), max(self.room[rank], 1.0)
        _, least, runs = (self.running if weighed else self.moments)[rank]
        beside = [(self.beside[own[runs[at]], None], self.bytes_ / scale)] if weighed else []
        self.add([(self.amounts[own], held / scale), *beside], -math.inf, (self.room[rank] - least[at]) / scale)

    def solved(self) -> tuple[float, Point]:
        """Seconds of the step at least, and a point at which the rows say so. Raises NoSolutionError, UnsolvedError."""
        self.begun += 1
        self.size += round(_BEGUN * self.numbers) if self.begun <= 2 else self.numbers
        seconds, values = self.solution({0: 1.0}, again=self.begun > 1)  # the first one often says enough
        return max(0.0, seconds) * self.scale / SAFE, Point(values[self.amounts], values[self.places])

    # whole units

    @property
    def alike(self) -> bool:
        """Whether all units but single ones are of one class."""
        return bool(np.count_nonzero(self.members > 1) == 1)

    def _counted(self) -> list[np.ndarray]:
        """Ways of which there are whole numbers [ways] each: of a class, of all classes with several together, and, of those
        that are recomputed as a whole, the fastest."""
        several, seconds = np.flatnonzero(self.members > 1).tolist(), self.ways[:3].sum(axis=0)
        counted = [np.isin(self.of, several)] * (len(several) > 1) + [self.of == one for one in several]
        for number in several if self.units.apart else ():
            ways = np.flatnonzero(self.of == number)
            if len(ways) > 1:
                counted.append(np.arange(len(self.of)) == ways[seconds[ways].argmin()])
        return counted

    def weigh(self) -> bool:
        """What whole units have beside what they keep while their stage runs, T, is counted where it is more than the least of
        any stage (``Ends``): of one unit its own peak, of several, some of which release little (what is made again)::

            T >= least inner of those that release little - most that one of them releases - all that the others release

        Whether it is: of few stages, and of units that are single positions (of others ``inner`` may be more than there is)."""
        units, table, stages = self.units, self.table, self.table.stages
        if self.running or not units.apart or len(self.of) == len(self.members) or stages > _WEIGHED:
            return False
        peak, inner, released = self._sides()
        ends = Ends.of(units, stages).transient
        self.running = _moments(table, units, self.passed, apart=True)
        self.beside, several = self.variables(stages), self.variables(stages)
        self.integers += several.tolist()
        alone = [(at, number) for at, number in ((0, self.kinds[0]), (stages - 1, self.kinds[-1])) if self.members[number] == 1]
        for stage, row in enumerate(self.amounts):
            there = ~np.isin(self.of, [number for at, number in alone if at != stage])
            most = int(min(units.count - stages + 1, self.most[self.ranks[stage]]))
            extra, two = (self.beside[stage, None], 1.0), several[stage, None]
            self.add([(two, 1.0)], 0.0, 1.0)
            self.add([(row, 1.0), (two, -max(1.0, most - 1.0))], -math.inf, 1.0)
            self.add([extra, (row, -peak / self.bytes_), (two, most * peak.max() / self.bytes_)], -ends[stage] / self.bytes_)
            for least in np.unique(released[there])[:-1]:
                little, much = np.flatnonzero(there & (released <= least)), np.flatnonzero(there & (released > least))
                apart, last = inner[little].min() - released[little].max(), peak[little].min()
                if released[much].min() < apart - last:
                    apart = min(apart, last)
                above = (apart - ends[stage]) / self.bytes_
                if above > _FELT:
                    some = self.variables(1)
                    self.integers += some.tolist()
                    self.add([(some, 1.0)], 0.0, 1.0)
                    self.add([(row[little], 1.0), (some, -float(most))], -math.inf, 0.0)
                    self.add([extra, (row[much], released[much] / self.bytes_), (two, -above), (some, -above)], -above)
        for rank, (moments, _, runs) in enumerate(self.running):
            held = self._held(moments)
            for run in np.unique(runs):
                of_run = np.flatnonzero(runs == run)
                at = int(of_run[held[of_run].sum(axis=(1, 2)).argmax()])
                self._hold(rank, at, held[at], weighed=True)
        return True

    def _sides(self) -> np.ndarray:
        """Of every way the bytes of its transient, alone and with others behind it, at least, and of what it releases, at most,
        nothing where something comes in its place: [3, ways]."""
        units, found = self.units, np.zeros((3, len(self.of)))
        gone = np.diff(units.released, axis=1)
        for way, number in enumerate(self.of.tolist()):
            mine = self.kinds == number
            options = [o for o in range(units.options) if (self.classes[:, number, o] == self.ways[:, way]).all()]
            found[:, way] = (units.peak[1, options][:, mine].min(), units.inner[1, options][:, mine].min(),
                             max(0.0, gone[options][:, mine].max()))
        return found

    def make_ranks_whole(self) -> None:
        """Every rank has a whole number of what is counted."""
        for ways, rank in itertools.product(self._counted(), range(self.table.pp)):
            self.make_whole([(self.amounts[np.ix_(self.ranks == rank, ways)], 1.0)])

    def make_stages_whole(self) -> None:
        """So has every stage of a rank that has several, and a cut lies between two corners that are neighbours."""
        self.staged = True
        if not self.alike:
            self.make_ranks_whole()
        for ways, stage in itertools.product(self._counted(), range(self.table.stages)):
            if self.table.stages > self.table.pp:
                self.make_whole([(self.amounts[stage, ways], 1.0)])
        for places, corners in zip(self.places, self.corners, strict=True):
            last = int(np.searchsorted(corners, corners[-1]))
            between = self.variables(max(1, last))
            self.integers += between.tolist()
            self.add([(between, 1.0)], 1.0, 1.0)
            for at, place in enumerate(places[:, None]):
                self.add([(place, -1.0), (between[max(0, at - 1) : at + 1], 1.0)], 0.0)

    def solved_whole(self, cases: int) -> tuple[float, Point | None]:
        """What ``solved`` says of whole units, so many cases told apart, with a point if one was found."""
        before, numbers = self.steps, self.numbers
        try:
            seconds, values = self.whole({0: 1.0}, cases)
        finally:
            self.size += round(numbers * (_BEGUN + STEP * (self.steps - before)))
        beside = values[self.beside] * self.bytes_ if values is not None and self.running else None
        point = None if values is None else Point(values[self.amounts], values[self.places], beside=beside)
        return max(0.0, seconds) * self.scale / SAFE, point

    @property
    def differs(self) -> float:
        """Seconds that a step may take longer because one cut lies where crossing takes longest, and not shortest, or because
        it is no mean of the first and the last corner."""
        crossing, ends = float(np.ptp(self.crossing.sum(axis=2))), self.ends[self.corners]
        share = (self.corners - self.corners[:, :1]) / np.maximum(1, np.ptp(self.corners, axis=1))[:, None]
        chord = ends[:, :1] + share * (ends[:, -1:] - ends[:, :1])
        return self.table.microbatches * (crossing + float(np.abs(ends - chord).max()))

    def _at(self, places: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Numbers of corners [stages - 1, corners, any] at cuts."""
        return np.asarray(np.einsum("bc,bcn->bn", places, numbers))


def _moments(
    table: Table, units: Intervals, passed: float, apart: bool = False
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Per rank what it holds at the moments that count, int [k, 3, stages of the rank] (``Table.moments`` and, of split
    backwards, ``closing``), and the bytes there at least of what the stage that runs has beside, of what reductions of the
    others leave and of what was ``passed`` on for each micro-batch held [k]; which stage runs, by its place among the rank's
    [k], if they are to count ``apart`` for each: then those of ``moments`` alone."""
    ends, found = Ends.of(units, table.stages), []
    for rank, (wide, begin) in enumerate(table.side_by_side):
        own = list(table.stages_of(rank))
        counts = wide.reshape(len(wide), 4, -1)
        runs = np.searchsorted(begin, np.arange(len(wide)), side="right") - 1
        bytes_ = counts[:, 3] @ ends.reduction[own] + ends.transient[own][runs]
        if table.split and not apart:
            last, begin = table.closing_side_by_side[rank]
            late = last.reshape(len(last), 4, -1)
            run = np.searchsorted(begin, np.arange(len(last)), side="right") - 1
            there = late[np.arange(len(late)), 2, run] > 0
            bytes_ = np.concatenate([bytes_, np.where(there, ends.final[own][run], ends.early[own][run])])
            counts, runs = np.concatenate([counts, late]), np.concatenate([runs, run])
        on = counts[:, :2, np.array(own) < table.stages - 1].sum(axis=(1, 2))
        least, order = np.unique(bytes_ + passed * on, return_inverse=True)
        rows = np.concatenate([counts[:, :3].reshape(len(counts), -1), order[:, None]], axis=1).astype(np.int64)
        groups = [maximal(rows[runs == run]) for run in range(len(own))] if apart else [maximal(rows)]
        most = np.concatenate(groups)
        running = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        found.append((most[:, :-1].reshape(len(most), 3, -1), least[most[:, -1]], running))
    return found


def _corners(units: Intervals, kinds: np.ndarray, stages: int) -> np.ndarray:
    """Positions of every cut [stages - 1, corners]: the first and the last where it can lie, and between them those that are
    not like both of their neighbours: what lies between two is their mean, in units of each class before it and in crossings.
    The last is repeated where a cut has fewer."""
    inner = np.arange(2, units.count - 1)
    alike = kinds[inner - 1] == kinds[inner]
    for seconds in (units.value, units.gradient):
        alike &= (seconds[inner - 1] == seconds[inner]) & (seconds[inner] == seconds[inner + 1])
    unlike = inner[~alike]
    found = [
        np.unique([first, *unlike[(unlike > first) & (unlike < first + units.count - stages)], first + units.count - stages])
        for first in range(1, stages)
    ]
    most = max(len(corners) for corners in found)
    return np.array([np.pad(corners, (0, most - len(corners)), mode="edge") for corners in found])
