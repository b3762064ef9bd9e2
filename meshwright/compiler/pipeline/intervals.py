"""Stages as intervals of a sequence: their sums, and what each costs at least.

A stage is an interval [i, j) of n units, run under one of several options (recomputation, ZeRO level). With prefix sums the
seconds and bytes of every interval are a difference (``Intervals``). A *stage matrix* [n + 1, n + 1] holds a number for every
interval of one stage (inf: not allowed).

Recomputation may be taken by some units of a stage and not by others, so whole stages under one option bound nothing:
``recomputed`` is what all of them together have to recompute at least, in parts of units, the cheapest bytes first.

``stage_bounds`` are the terms of ``cost.timeline.lower_bounds`` that one stage a rank leaves to the stage alone: what lies
before and behind it depends on i and j only, and of other boundaries the cheapest are assumed (``Crossings``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.compiler.pipeline.transients import BESIDE, Transients, alive_at_most, at_first, at_last, beside_of
from meshwright.ir.schedules import schedule_of

Matrix = np.ndarray


@dataclass(frozen=True)
class Unit:
    """One indivisible piece of the model, per micro-batch on one rank of its stage.

    Seconds: ``forward``, ``backward_input``, ``backward_weight``. Bytes: ``state`` (parameters, optimizer, what else is there
    all the time), ``summed`` (gradients of weights that micro-batches are added to), ``saved`` (activations kept from F to B),
    ``pending`` (kept from I to W where the backward is split; None: all of ``saved``), ``transient`` (the most that is alive
    only while the unit runs), ``released`` (of ``saved``, what is not there while an earlier unit of the stage runs for the
    same micro-batch: not yet in its forward, no more in its backward), ``entered``, ``left`` (saved more where a stage begins
    or ends with the unit: what entered, if the unit does not save it, and the copy of what is sent on); for the rest see
    ``transients.BESIDE``. ``value``, ``gradient``: seconds to send what crosses a boundary right after this unit, down and up;
    ``math.inf`` forbids a cut there.
    """

    name: str
    forward: float
    backward_input: float
    backward_weight: float
    state: float = 0.0
    saved: float = 0.0
    transient: float = 0.0
    value: float = 0.0
    gradient: float = 0.0
    pending: float | None = None
    summed: float = 0.0
    released: float = 0.0
    entered: float = 0.0
    left: float = 0.0
    behind: float = 0.0
    gathered: float = 0.0
    ended: float = 0.0
    reduced: float = 0.0
    root: float = 0.0
    closed: float = 0.0
    last: float = 0.0
    freed: float = 0.0
    finished: float = 0.0
    first: float = 0.0
    early: float = 0.0
    began: float = 0.0
    came: float = 0.0
    stays: float = 0.0


def joined(units: Sequence[Unit]) -> Unit:
    """One unit, a stage of its own, of several that follow each other."""

    def total(name: str) -> float:
        return float(sum(getattr(unit, name) for unit in units))

    columns = np.array([[getattr(unit, name) for name in BESIDE] for unit in units]).T
    transient, later, left, final, early = (float(found[0]) for found in beside_of(columns, (0,)))
    return Unit(
        units[0].name, total("forward"), total("backward_input"), total("backward_weight"), total("state"), total("saved"),
        transient + later - left, units[-1].value, units[-1].gradient,
        sum(unit.saved if unit.pending is None else unit.pending for unit in units), total("summed"), total("released"),
        units[0].entered, units[-1].left, ended=transient, reduced=left, last=final, early=early,
    )


@dataclass(frozen=True)
class OutsideSeconds:
    """Seconds of every unit [n] outside the micro-batches: its rank waits for ``gather`` (parameters, what is made of inputs
    alone) before its first action, for ``reduce`` after its last one, less what a backward hides but no less than ``slowed`` of
    it, then for ``optimizer``::

        step = max over ranks (gathers - begin of the first action) + max over ranks (end of the last one + left)
            + max over ranks of optimizer
    """

    gather: np.ndarray
    reduce: np.ndarray
    optimizer: np.ndarray
    slowed: float

    def at(self, positions: Sequence[int]) -> OutsideSeconds:
        """The same of what lies between positions, as in ``Intervals.of``."""
        gather, reduce, optimizer = (np.add.reduceat(x, positions[:-1]) for x in (self.gather, self.reduce, self.optimizer))
        return OutsideSeconds(gather, reduce, optimizer, self.slowed)

    @classmethod
    def nothing(cls, count: int) -> OutsideSeconds:
        """Of so many units."""
        return cls(np.zeros(count), np.zeros(count), np.zeros(count), 1.0)

    @functools.cached_property
    def prefix(self) -> np.ndarray:
        """Sums of gathers, reductions and optimizer before each position, [3, n + 1]."""
        columns = np.array([self.gather, self.reduce, self.optimizer])
        return np.concatenate([np.zeros((3, 1)), np.cumsum(columns, axis=1)], axis=1)

    @property
    def sums(self) -> np.ndarray:
        """The same of every interval, [3, n + 1, n + 1]."""
        return np.asarray(self.prefix[:, None, :] - self.prefix[:, :, None])


class Shared(NamedTuple):
    """A weight that two units read, ``before`` and ``at``, and ``bytes_`` of state and of what is reduced with the ``root``'s
    that both count; its ``name``."""

    before: int
    at: int
    bytes_: float
    root: float = 0.0
    name: str = ""


def once(shared: Sequence[Shared], boundaries: Sequence[int], units: int) -> np.ndarray:
    """Bytes of every unit's state and root [2, units] that are there once where a stage has both that read them, of stages that
    start at these boundaries, and the end."""
    found: np.ndarray = np.zeros((2, units))
    for one in shared:
        if not any(one.before < start <= one.at for start in boundaries):
            found[:, one.at] += one.bytes_, one.root
    return found


@dataclass(frozen=True)
class Intervals:
    """Sums over the intervals of n units, each of which runs under one of several options.

    prefix: [7, options, n + 1], sums of forward, backward_input, backward_weight, state, saved, pending, summed before each
        position
    peak, inner, last: [2, options, n], bytes beside what is kept of a unit that ends a stage, of one that others follow there,
        and of the former but as it is reduced; where others come before it there, and where none do
    final: [options, n], the same of a step's last micro-batch
    first: [options, n], the same where a backward is split, of stages that have all of it in W (``whole``)
    early, began: [options, n], as ``final`` and ``first``, those of a stage's first W
    gone: [options, 7, n + 1], sums before each position of ``released``, ``root``, ``closed``, ``freed``, ``finished``,
        ``came``, and ``stays``
    ends: [options, 2, n], bytes that are saved more where a stage begins or ends with a unit
    reduced: [options, n], bytes that a stage's last reduction leaves where it begins with a unit and has no root
    value, gradient: [n + 1], seconds to cross a position forward and backward
    shared: weights that several units read, of two of which one is the next to: there once where one stage has both
    apart: whether a cut is allowed between any two of what was made into units, so that each has one option as a whole
    """

    prefix: np.ndarray
    peak: np.ndarray
    inner: np.ndarray
    last: np.ndarray
    final: np.ndarray
    first: np.ndarray
    early: np.ndarray
    began: np.ndarray
    gone: np.ndarray
    ends: np.ndarray
    reduced: np.ndarray
    value: np.ndarray
    gradient: np.ndarray
    shared: tuple[Shared, ...] = ()
    apart: bool = False

    @classmethod
    def of(
        cls, options: Sequence[Sequence[Unit]], positions: Sequence[int], shared: Sequence[Shared] = ()
    ) -> Intervals:
        """``positions``: where cuts are allowed, from 0 to the number of units; what lies between two becomes one unit."""
        columns = np.array(
            [[(u.forward, u.backward_input, u.backward_weight, u.state, u.saved, u.saved if u.pending is None else u.pending,
               u.summed, *(getattr(u, name) for name in BESIDE), u.entered, u.left) for u in units] for units in options],
            dtype=np.float64,
        ).transpose(2, 0, 1)
        value, gradient = (np.array([getattr(u, name) for u in options[0]]) for name in ("value", "gradient"))
        return cls.of_columns(columns[:7], columns[7:-2], columns[-2:], value, gradient, positions, shared)

    @classmethod
    def of_columns(
        cls, columns: np.ndarray, beside: np.ndarray, ends: np.ndarray, value: np.ndarray, gradient: np.ndarray,
        positions: Sequence[int], shared: Sequence[Shared] = (),
    ) -> Intervals:
        """The same of numbers: ``columns`` [7, options, units] in the order of ``prefix``, ``beside`` (``BESIDE``) [16,
        options, units], what is saved more at ``ends`` of stages [2, options, units], seconds to cross behind each unit forward
        and backward [units]."""
        at, crossing = np.array(positions, dtype=np.int64), np.zeros((2, len(positions)))
        behind, inside = at[1:] - 1, beside.copy()
        inside[3] = 0.0
        peak, inner, last = np.stack([alive_at_most(each, positions[:-1]) for each in (inside, beside)], axis=1)
        final = alive_at_most(at_last(beside), positions[:-1])[0]
        first, began, early = 0.0 * final, 0.0 * final, 0.0 * final
        if beside[12].any():
            early = alive_at_most(at_first(beside), positions[:-1])[0]
        if beside[11].any():
            first, began = (alive_at_most(np.stack([of, columns[4] - there, *0.0 * beside[:3]]), positions[:-1])[0]
                            for of, there in ((beside[11], beside[15]), (beside[13], beside[14])))
        columns = np.concatenate([columns, beside[[1, 6, 7, 9, 10, 14, 15]]])
        sums = np.concatenate([np.zeros((*columns.shape[:2], 1)), np.cumsum(columns, axis=2)], axis=2)[:, :, positions]
        crossing[:, 1:-1] = value[at[1:-1] - 1], gradient[at[1:-1] - 1]
        outer = np.stack([ends[0][:, at[:-1]], ends[1][:, behind]], axis=1)
        within = [(np.searchsorted(at, [one.before, one.at], side="right") - 1).tolist() for one in shared]
        there = [one._replace(before=before, at=after) for one, (before, after) in zip(shared, within, strict=True)]
        for one in there:
            if one.before == one.at:
                sums[3, :, one.at + 1 :] -= one.bytes_
                sums[8:10, :, one.at + 1 :] -= one.root
        several, alone = tuple(one for one in there if one.before < one.at), len(positions) == len(value) + 1
        sides = peak, inner, last, final, first, early, began, sums[7:].transpose(1, 0, 2), outer
        return cls(sums[:7], *sides, beside[5][:, at[:-1]], crossing[0], crossing[1], several, alone)

    @property
    def released(self) -> np.ndarray:
        """Sums of what units release before each position, [options, n + 1]."""
        return self.gone[:, 0]

    def _gone_in(self, at: int) -> np.ndarray:
        """One of the sums ``gone`` of every interval, [options, n + 1, n + 1]."""
        found = self.gone[:, at, None, :] - self.gone[:, at, :, None]
        for one in self.shared if at in (1, 2) else ():
            found[:, : one.before + 1, one.at + 1 :] -= one.root
        return np.asarray(found)

    @functools.cached_property
    def left(self) -> np.ndarray:
        """Bytes that the last reduction of every interval leaves, [options, n + 1, n + 1]."""
        root = self._gone_in(1)
        left = np.zeros(root.shape)
        left[:, :-1] = np.where(root[:, :-1] > 0.0, root[:, :-1], self.reduced[:, :, None])
        return left

    @functools.cached_property
    def beside(self) -> Transients:
        """Of every interval as a stage (``transients.beside_of``), [options, n + 1, n + 1] each."""
        released, closed, freed, finished = map(self._gone_in, (0, 2, 3, 4))
        left, last = self.left, np.zeros(released.shape)
        last[:, :, 1:] = self.last[0][:, None]
        own, alone = self.final, np.arange(self.count)
        last[:, alone, alone + 1] = self.last[1]
        most = _behind_each(self.inner[0], self.inner[1], self.peak[0], self.released)
        most[:, alone, alone + 1] = self.peak[1]
        final = _behind_each(own, own, own, self.gone[:, 3]) if own.any() else np.zeros(released.shape)
        most, final = np.maximum(most, closed - released), np.maximum(final, finished - freed)
        early, come, stay, own = final.copy(), self.gone[:, 5], self.gone[:, 6], self.early
        if own.any():
            early = _behind_each(own, own, own, self.gone[:, 3] - come)
        for i in range(self.whole):  # torch leaves all of such a stage to W
            most[:, i] = last[:, i] = 0.0
            ways = (final, self.first, self.prefix[4] - stay), (early, self.began, self.prefix[4] - come)
            for of, own, kept in ways:
                of[:, i, i + 1 :] = np.maximum(_behind(own[:, i:], own[:, i:], kept[:, i:]), 0.0)
        return Transients(most, np.maximum(last + left - most, 0.0), left, final, early)

    @functools.cached_property
    def whole(self) -> int:
        """With so many units a stage may begin whose backward is all in W where some are split, as no gradient leaves it: up to
        the first that is trained."""
        return int((self.gone[0, 5, 1:] > 0.0).argmax()) + 1 if self.first.any() else 0

    @property
    def transient(self) -> np.ndarray:
        """Of every interval as a stage, [options, n + 1, n + 1]."""
        return self.beside.transient

    @functools.cached_property
    def least_left(self) -> np.ndarray:
        """Bytes that the last reduction of every interval leaves at least, [n + 1, n + 1]."""
        return np.asarray(self.left.min(axis=0))

    @functools.cached_property
    def least_transient(self) -> np.ndarray:
        """The same of ``transient`` if every unit has the option of least, and those behind it that which releases most."""
        found = _of_intervals(np.maximum, self.peak[1].min(axis=0), self.most_released)
        found[: self.whole] = 0.0
        return found

    @functools.cached_property
    def most_released(self) -> np.ndarray:
        """Sums of what units release before each position, each under the option that releases most: [n + 1]."""
        return np.concatenate([np.zeros(1), np.cumsum(np.diff(self.released, axis=1).max(axis=0))])

    @property
    def count(self) -> int:
        return int(self.prefix.shape[2]) - 1

    @property
    def options(self) -> int:
        return int(self.prefix.shape[1])

    def sums(self, cuts: np.ndarray, options: np.ndarray) -> np.ndarray:
        """The sums of every stage of K cuts: boundaries int [K, S + 1], options int [K, S] -> float [7, S, K]."""
        stage = self.prefix[:, options, cuts[:, 1:]] - self.prefix[:, options, cuts[:, :-1]]
        stage[5] = np.where(cuts[:, :-1] < self.whole, stage[4], stage[5])
        stage[4:6] += self.ends[options, 0, cuts[:, :-1]] + self.ends[options, 1, cuts[:, 1:] - 1]
        for one in self.shared:
            stage[3] -= one.bytes_ * ((cuts[:, :-1] <= one.before) & (one.at < cuts[:, 1:]))
        return np.asarray(np.maximum(stage, 0.0).transpose(0, 2, 1))

    @functools.cached_property
    def matrices(self) -> np.ndarray:
        """The sums of every interval, [7, options, n + 1, n + 1]."""
        found = self.prefix[:, :, None, :] - self.prefix[:, :, :, None]
        found[5, :, : self.whole] = found[4, :, : self.whole]
        found[4:6, :, :-1, 1:] += self.ends[:, 0, :, None] + self.ends[:, 1, None, :]
        for one in self.shared:
            found[3, :, : one.before + 1, one.at + 1 :] -= one.bytes_
        return np.asarray(found)

    def each(self, stages: int) -> np.ndarray:
        """Numbers of every unit, [7, options, n], of which no stage has less where there are so many: what is shared is counted
        where it is read first, if a stage may have both units and leave one to every other."""
        found = np.diff(self.prefix, axis=2)
        for one in self.shared:
            if one.before + self.count - 1 - one.at >= stages - 1:
                found[3, :, one.at] -= one.bytes_
        return found

    @property
    def work(self) -> np.ndarray:
        """Seconds of every unit in the fastest way, [n]."""
        return np.asarray(np.diff(self.prefix[:3].sum(axis=0), axis=1).min(axis=0))

    def cheapest(self) -> np.ndarray:
        """Prefix sums when every unit runs under the option that is best for that sum: [7, n + 1]."""
        least = np.diff(self.prefix, axis=2).min(axis=1)
        return np.concatenate([np.zeros((7, 1)), np.cumsum(least, axis=1)], axis=1)


def _behind(inner: np.ndarray, peak: np.ndarray, released: np.ndarray) -> np.ndarray:
    """Of stages that begin with the first unit and end with each [options, n]: of the last unit its ``peak``, or of those
    before it, with others behind them (``inner``), less what these have ``released`` [options, n + 1]."""
    found = peak.copy()
    before = np.maximum.accumulate(inner[:, :-1] + released[:, 1:-1], axis=1) - released[:, 2:]
    found[:, 1:] = np.maximum(found[:, 1:], before)
    return found


def _behind_each(inner: np.ndarray, first: np.ndarray, peak: np.ndarray, released: np.ndarray) -> np.ndarray:
    """``_behind`` of stages that begin with each unit, of which ``first`` is inner then: [options, n + 1, n + 1], 0 of none."""
    count = inner.shape[1]
    found, alone = np.zeros((len(inner), count + 1, count + 1)), np.arange(count - 1)
    sums = np.where(np.tri(count - 1, k=-1, dtype=bool), -np.inf, (inner[:, :-1] + released[:, 1:-1])[:, None])
    sums[:, alone, alone] = first[:, :-1] + released[:, 1:-1]
    np.maximum.accumulate(sums, axis=2, out=sums)
    sums -= released[:, None, 2:]
    found[:, :-1, 1:] = np.where(np.tri(count, k=-1, dtype=bool), 0.0, peak[:, None])
    np.maximum(found[:, :-2, 2:], sums, out=found[:, :-2, 2:], where=~np.tri(count - 1, k=-1, dtype=bool))
    return found


def stage_bounds(
    units: Intervals, name: str, pp: int, microbatches: int, outside: OutsideSeconds | None = None,
    added: Sequence[Matrix] | None = None,
) -> Iterator[Matrix]:
    """Seconds that no run can beat if stage s is [i, j) run under option o, one stage a rank: for every stage a table
    [options, n + 1, n + 1]. With ``outside``: seconds that no step can beat. With ``added``, seconds of every stage: of the
    first option alone, whose backwards take so much longer (inf: no run)."""
    split, margins = schedule_of(name).split, schedule_of(name).margins(pp, 1, microbatches)
    least = units.cheapest()
    ahead, back = least[0], least[1] if split else least[1] + least[2]
    last_weight = np.diff(least[2]).min() * split
    value, gradient = Crossings(units.value), Crossings(units.gradient)
    warm, left, apart = margins.warm, margins.drained, bool((margins.warm == microbatches).all())
    trips, pair = _trips(name, pp, microbatches), np.add if apart else np.maximum
    cheap = _waits(pp, microbatches, value.cheapest, gradient.cheapest, apart)
    sums = np.zeros(0) if outside is None else outside.sums
    for s in range(pp):
        rows, columns = _band(units.count, s, pp)
        forward, inputs, weights = units.matrices[:3, : None if added is None else 1, rows, columns]
        more = np.zeros(1) if added is None else added[s][rows, columns]
        inputs = inputs + np.where(np.isfinite(more), more, 0.0)
        turn = inputs if split else inputs + weights
        work = forward + inputs + weights
        # Crossings: this stage's own two boundaries as they are, of those before and behind the cheapest that are there.
        down_before, up_before = (x.seconds[rows, None] + x.before(s - 1)[rows, None] for x in (value, gradient))
        down_after, up_after = (x.seconds[None, columns] + x.after(pp - 2 - s)[None, columns] for x in (value, gradient))
        down = down_before + down_after
        head, tail = ahead[rows, None] + down_before, back[rows, None] + up_before + last_weight
        ahead_all = ahead[rows, None] + forward + ahead[-1] - ahead[None, columns] + down
        returned = ahead_all + back[-1] - back[None, columns] + up_after
        path = returned + turn + tail
        enters, leaves = (pair(units.value[at], units.gradient[at]) for at in (rows, columns))
        own = np.maximum(enters[:, None], leaves[None])
        slow = np.maximum(forward + turn if apart else np.maximum(forward, turn), own)
        bound = np.maximum(path + (microbatches - 1) * slow, (trips + 1) * (path - last_weight) + last_weight)
        begin = np.maximum(head, returned - warm[s] * forward)
        end, late = tail, 0.0
        if left is not None and warm[s] < microbatches:  # a forward follows the warm-up
            after = ahead[-1] - ahead[None, columns] + down_after + back[-1] + last_weight + up_before + up_after
            end = np.maximum(end, after - left.backward[s] * turn)
            late = np.maximum(late, after - left.backward[s] * turn - left.weight[s] * weights)
        bound = np.maximum(bound, begin + microbatches * (forward + turn) + end)
        bound = np.maximum(bound, begin + microbatches * work + (late if split else end))
        if outside is not None:
            gather, reduce, optimizer = sums[:, rows, columns]
            home = back[-1] - back[rows, None] + up_after  # of the last micro-batch, to the end of this stage
            waits = np.maximum(cheap[s], (microbatches - 1) * np.maximum(units.value[rows, None], leaves[None]))
            sent = ahead[-1] + down + np.maximum(trips * (path - last_weight), waits) + home
            exposed = np.maximum(reduce - inputs - weights, outside.slowed * reduce)
            done = np.maximum(begin + microbatches * work, sent) + exposed
            begins = outside.gather[0] if s else gather
            bound = np.maximum(bound + outside.slowed * outside.reduce[0], done) + optimizer + begins
            bound = np.maximum(bound, gather + microbatches * work + exposed + optimizer)  # where gathers take longest
        yield _allowed(np.where(np.isfinite(more), bound, np.inf), units.count, s, pp)


class Crossings:
    """Seconds to cross a position, ``seconds`` [n + 1], their ``kinds``, ascending, and the least sums of those of several
    positions where cuts may lie."""

    def __init__(self, seconds: np.ndarray) -> None:
        self.seconds = seconds
        self.kinds, kind = np.unique(seconds[1:-1], return_inverse=True)
        members = np.zeros((len(self.kinds), len(seconds) + 1), dtype=np.int64)
        members[kind, np.arange(2, len(seconds))] = 1
        self._members = members.cumsum(axis=1)  # of every kind, before each position

    @property
    def cheapest(self) -> float:
        return float(self.kinds[0]) if len(self.kinds) else 0.0

    def before(self, count: int) -> np.ndarray:
        """Of so many positions before each: [n + 1], what there is where these are fewer."""
        return self._least(self._members[:, :-1], count)

    def after(self, count: int) -> np.ndarray:
        """The same of positions after each."""
        return self._least(self._members[:, -1:] - self._members[:, 1:], count)

    def _least(self, members: np.ndarray, count: int) -> np.ndarray:
        cheaper = members.cumsum(axis=0) - members
        taken = np.clip(count - cheaper, 0, members)
        return np.asarray(self.kinds @ taken) if len(self.kinds) else np.zeros(members.shape[1])


def _trips(name: str, pp: int, microbatches: int) -> int:
    """How often a micro-batch goes through everything before the last one starts: the first stage holds no more than some
    micro-batches at once (``holds``), ceil(M / k) - 1 where these are k."""
    closed = schedule_of(name).closed
    if pp == 1 or closed is None or closed.holds is None:
        return 0
    return -(-microbatches // closed.holds(pp, 1, microbatches)) - 1


def _waits(pp: int, microbatches: int, down: float, up: float, apart: bool) -> list[float]:
    """By how much later than the first micro-batch the last one comes to the end of every stage at least, for each link carries
    one transfer at a time: M - 1 wait for each other. ``down``, ``up``: seconds of the cheapest crossing; ``apart``: all
    forwards come first."""
    if pp == 1:
        return [0.0]
    return [(microbatches - 1) * (down + up if apart else max(down, up)) for _ in range(pp - 1)] + [(microbatches - 1) * down]


def _band(count: int, stage: int, stages: int) -> tuple[slice, slice]:
    """Where stage ``stage`` of ``stages`` can begin and end if every other stage needs a unit."""
    spare = count - stages + 1
    return slice(stage, stage + spare), slice(stage + 1, stage + 1 + spare)


def _allowed(band: np.ndarray, count: int, stage: int, stages: int) -> np.ndarray:
    """The whole matrix of numbers of the band (``_band``): inf where stage ``stage`` cannot be [i, j); the ends are fixed."""
    rows, columns = _band(count, stage, stages)
    i, j = np.ogrid[rows, columns]
    fine = (i < j) & ((i == 0) | (stage > 0)) & ((j == count) | (stage < stages - 1))
    matrix = np.full((*band.shape[:-2], count + 1, count + 1), np.inf)
    matrix[..., rows, columns] = np.where(fine, band, np.inf)
    return matrix


def stage_memory(units: Intervals, moments: np.ndarray, closing: np.ndarray, stage: int, stages: int) -> np.ndarray:
    """Bytes of every interval as a stage alone: [options, n + 1, n + 1]. ``moments``, ``closing``: int [k, 3], as of a
    ``Table``."""
    rows, columns = _band(units.count, stage, stages)
    state, saved, pending, summed = units.matrices[3:, :, rows, columns]
    transient, later, _, final, early = (of[:, rows, columns] for of in units.beside)
    held, last = ([state + full * saved + (half * pending if half else 0.0) + (summed + more if there else 0.0)
                   for full, half, there in counts.tolist()] for counts, more in ((moments, later), (closing, final - early)))
    bytes_ = np.maximum(functools.reduce(np.maximum, held) + transient, functools.reduce(np.maximum, last) + early)
    return _allowed(bytes_, units.count, stage, stages)


def recomputed(units: Intervals, moments: np.ndarray, stage: int, stages: int, capacity: float) -> Matrix:
    """Seconds a micro-batch that the backward of every interval takes longer at least than under the first option, so that it
    fits ``capacity`` bytes as a stage alone, if every unit may have an option of its own or parts of several: [n + 1, n + 1];
    inf where nothing fits. ``moments``: int [k, 3], see ``Table.moments``."""
    rows, columns = _band(units.count, stage, stages)
    state, saved, pending, summed = units.matrices[3:, 0, rows, columns]
    each = np.diff(units.prefix, axis=2)
    work = each[:3].sum(axis=0)
    added = np.zeros(state.shape)
    for full, half, there in moments.tolist():
        held = state + full * saved + half * pending + there * summed
        bytes_ = each[3] + full * each[4] + half * each[5] + there * each[6]
        steps, meanwhile = _steps(bytes_, work), units.least_transient[rows, columns]
        if steps:  # whatever recomputes holds what one unit does so meanwhile
            frees = np.any([one.frees > 0 for one in steps], axis=0)
            least = np.where(frees, units.peak[1, 1:].min(axis=0), np.inf)
            least = _of_intervals(np.minimum, least, units.most_released)[rows, columns]
            meanwhile = np.maximum(meanwhile, np.where(np.isfinite(least), least, 0.0))
        if there:
            left = units.last[1].min(axis=0) + units.least_left[:, 1:]
            meanwhile = np.maximum(meanwhile, left[rows, slice(columns.start - 1, columns.stop - 1)])
        fits = held + (units.transient + there * units.beside.later)[0, rows, columns] <= capacity
        need = np.where(fits, 0.0, np.maximum(held + meanwhile - capacity, 0.0))
        seconds = np.zeros(state.shape)
        for one in steps:
            before = np.concatenate([[0.0], np.cumsum(one.frees)])
            freed = np.minimum(need, before[None, columns] - before[rows, None])
            seconds, need = seconds + one.ratio * freed, need - freed
        added = np.maximum(added, np.where(need <= 1e-9 * capacity, seconds, np.inf))
    return _allowed(added, units.count, stage, stages)


class _Step(NamedTuple):
    """A change of options that frees bytes: ``ratio`` seconds for each, ``frees`` bytes of every unit [n]."""

    ratio: float
    frees: np.ndarray


def _steps(bytes_: np.ndarray, work: np.ndarray) -> list[_Step]:
    """The lower hulls from every unit's first option to its smallest, [options, n], cheapest steps first; ratios that are
    nearly the same are one, the least of them."""
    found: dict[float, np.ndarray] = {}
    known: dict[tuple[tuple[float, ...], ...], list[tuple[float, float, int]]] = {}
    units = np.flatnonzero((bytes_ < bytes_[0]).any(axis=0))
    numbers = zip(*(map(tuple, of[:, units].T.tolist()) for of in (bytes_, work)), strict=True)
    for unit, key in zip(units.tolist(), numbers, strict=True):
        if key not in known:
            known[key] = hull(*key)
        for ratio, frees, _ in known[key]:
            found.setdefault(ratio, np.zeros(len(bytes_.T)))[unit] += frees
    merged: list[_Step] = []
    for ratio, each in sorted(found.items()):
        if merged and ratio <= merged[-1].ratio * _ALIKE:
            merged[-1] = _Step(merged[-1].ratio, merged[-1].frees + each)
        else:
            merged.append(_Step(ratio, each))
    return merged


_ALIKE = 1.001
"""Prices of a byte that differ by less are taken as the lower one."""


def hull(bytes_: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float, int]]:
    """The steps of the lower hull from the first option on, cheapest first: seconds a byte, bytes freed, the option reached."""
    at, steps = 0, list[tuple[float, float, int]]()
    while True:
        here, now = bytes_[at], seconds[at]
        smaller = [(max(takes - now, 0.0) / (here - held), held - here, option)
                   for option, (held, takes) in enumerate(zip(bytes_, seconds, strict=True)) if here > held]
        if not smaller:
            return steps
        ratio, more, at = min(smaller)  # the options are few: numbers of Python's take a fraction of the time of arrays
        steps.append((ratio, -more, at))


def _of_intervals(chosen: np.ufunc, peak: np.ndarray, released: np.ndarray) -> Matrix:
    """The largest or smallest (``chosen``) of every interval's units, each less what those behind it release: of ``peak`` [n]
    and sums ``released`` [n + 1], [n + 1, n + 1]; 0 of none."""
    found: np.ndarray = np.zeros((len(released), len(released)))
    none, empty = np.tri(len(peak), k=-1, dtype=bool), -np.inf if chosen is np.maximum else np.inf
    sums = chosen.accumulate(np.where(none, empty, peak + released[1:]), axis=1) - released[1:]
    found[:-1, 1:] = np.where(none, 0.0, sums)
    return found


def stage_work(units: Intervals, stage: int, stages: int) -> np.ndarray:
    """Seconds per micro-batch of every interval: [options, n + 1, n + 1]."""
    rows, columns = _band(units.count, stage, stages)
    return _allowed(units.matrices[:3, :, rows, columns].sum(axis=0), units.count, stage, stages)
