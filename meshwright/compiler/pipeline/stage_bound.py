"""Bounds on the step of any cut when ranks hold several stages: packing, and a linear program.

All drop the order of the units, so equal units are one number ("how many of this kind in stage s"):

- ``link_bound`` counts what is sent between ranks and how far a micro-batch travels, which binds on slow networks
  (``link_floor`` of no more than the seconds of units).
- ``packing_bound`` keeps units whole: of the k P + 1 longest, some rank has k + 1.
- ``cannot_run_in`` asks whether T seconds are too few: of the most frequent class, a rank runs no more units than its
  seconds and its memory at every moment (``in_flight``) leave room for, programs of two rows and so closed forms, one for each
  way to count its seconds (``_costs``). If all ranks together cannot run all units of the class, no cut can; nor if they cannot
  run parts of all units, each counted as so many of that class.
- ``fractional_bound`` keeps what the schedule and memory say. With x[s, c, o] units of class c run in way o in stage s, what
  ``cost.timeline.lower_bounds`` takes the largest of (the path; every rank's begin, work and end) and the memory of every rank
  at some moments of its order (``in_flight``) are linear in x; the step T is minimized over divided units.

The program knows a rank's first stage, its last one, and all between together: these enter the rows alike, and the slowest of
them takes no less than their mean. So its size does not grow with the stages of a rank, and one program bounds a whole range of
their numbers: what grows with it (transfers, a unit in every stage) is counted for the fewest, the mean for the most.

Divided units fit where whole ones do not, so of the most frequent class a rank takes no more than the whole units that fit
its memory and the seconds to beat (``whole_units``). Where that leaves steps shorter than those, and no other class has
several units, each rank runs a whole number of them: a mixed-integer program of as many whole numbers as there are ranks (of
Llama-70B on 16,384 H100, 8 ranks and 32 micro-batches, it proves 4% more). Numbers of several classes add up to almost
anything: of them it says little, and takes long. Of crossings the cheapest are assumed, of transients the least that a rank
cannot avoid: relaxations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.compiler.pipeline.in_flight import in_flight, parts
from meshwright.compiler.pipeline.intervals import Crossings, Intervals, OutsideSeconds
from meshwright.compiler.solver.linear import SAFE, LinearProgram, NoSolutionError, Term, UnsolvedError
from meshwright.ir.schedules import Left, schedule_of


def packing_bound(units: Intervals, name: str, pp: int, microbatches: int) -> float:
    """Seconds that no run can beat whatever the cut, several stages a rank: units packed onto ranks.

    Of the k pp + 1 longest units some rank has k + 1, at least the shortest of them; and a micro-batch goes through
    everything while the longest unit does all the others.
    """
    work = np.sort(units.work)[::-1]
    shares = [work[k * pp - k : k * pp + 1].sum() for k in range((len(work) - 1) // pp + 1)]
    least = units.cheapest()
    ahead, back = least[0], least[1] if schedule_of(name).split else least[1] + least[2]
    longest = max(np.diff(ahead).max(), np.diff(back).max())
    path = ahead[-1] + back[-1] + (microbatches - 1) * longest
    return float(max(microbatches * max(shares), path))


def link_bound(
    units: Intervals, name: str, pp: int, virtual_stages: tuple[int, int], microbatches: int, cutoff: float = math.inf
) -> float:
    """``link_floor`` of units that may each run in the fastest way."""
    least = units.cheapest()
    back = least[1] if schedule_of(name).split else least[1] + least[2]
    return link_floor(
        units.value, units.gradient, units.work, float(least[0][-1]), float(back[-1]), name, pp, virtual_stages, microbatches,
        cutoff,
    )


def link_floor(
    value: np.ndarray, gradient: np.ndarray, work: np.ndarray, ahead: float, back: float, name: str, pp: int,
    virtual_stages: tuple[int, int], microbatches: int, cutoff: float = math.inf,
) -> float:
    """Seconds that no run can beat, whatever the cut, because of what is sent: on slow links most of a step.

    A link carries one transfer at a time: the first one comes after what its micro-batch did before it, the last one before
    what is left of its own. And of the micro-batches that the first stage holds at most (``holds``) one must have come back all
    the way before the next can start. Of crossings the cheapest positions are assumed, one for each; but if cuts at those alone
    leave a rank more work than ``cutoff`` seconds, one cut lies where crossing takes longer.

    value, gradient: seconds to cross each position, down and up [n + 1]
    work: seconds of every unit [n]; ``ahead`` and ``back`` of all on the way of a micro-batch
    """
    closed = schedule_of(name).closed
    if pp == 1 or closed is None or not (value.any() or gradient.any()):
        return 0.0
    virtual = virtual_stages[0]
    sends = 2 * pp - 2 if closed.turns else virtual * pp - 1
    downs, ups = Crossings(value), Crossings(gradient)
    most = None if closed.holds is None else max(closed.holds(pp, each, microbatches) for each in virtual_stages)

    def least(down: tuple[float, float], up: tuple[float, float]) -> float:
        """With seconds of all crossings together and of the longest."""
        path = ahead + back + down[0] + up[0]
        found = [path + (microbatches - 1) * (down[1] + up[1] if closed.forwards_first else max(down[1], up[1]))]
        if closed.turns:
            found += [microbatches * (down[1] + ups.cheapest), microbatches * (downs.cheapest + up[1])]
        else:  # the link from the last rank to the first carries one boundary less
            busy_down, busy_up = (
                microbatches * max(virtual * all_.cheapest, longest + max(0, virtual - 2) * all_.cheapest)
                for all_, (_, longest) in ((downs, down), (ups, up))
            )
            found += [busy_down + back + up[0], ahead + down[0] + busy_up]
            found += [busy_down + busy_up] * closed.forwards_first
        return max(found) if most is None else max(*found, -(-microbatches // most) * path)

    plain = least(*(_longest(one, sends) for one in (downs, ups)))
    if plain >= cutoff:
        return plain
    wide = (_longest(one, sends, work * microbatches, cutoff) for one in (downs, ups))
    return max(plain, min(cutoff, least(*wide)))


def _longest(
    crossings: Crossings, sends: int, work: np.ndarray | None = None, cutoff: float = math.inf
) -> tuple[float, float]:
    """The least seconds of so many crossings together, and of the longest of them; of a step shorter than ``cutoff``, if the
    ``work`` of every unit in it is given."""
    total, others = (float(crossings.before(count)[-1]) for count in (sends, sends - 1))
    longest = total - others
    if work is None:
        return total, longest
    ends = np.concatenate([[0.0], np.cumsum(work)])
    for kind, beyond in itertools.pairwise(crossings.kinds.tolist()):
        cuts = np.flatnonzero(crossings.seconds[1:-1] <= kind) + 1
        if beyond > longest and np.diff(ends[[0, *cuts, len(work)]]).max() >= cutoff:
            longest, total = beyond, max(total, others + beyond)
    return total, longest


def cannot_run_in(
    units: Intervals, name: str, pp: int, virtual_stages: tuple[int, int], microbatches: int, capacity: np.ndarray,
    outside: OutsideSeconds, seconds: float,
) -> bool:
    """Whether no cut runs in ``seconds`` (inf: at all), with any number of stages a rank from the first to the second of
    ``virtual_stages``: units are left over when every rank has taken what it can, whole ones of the most frequent class alone,
    or parts of all, each counted as so many of that class as it is on the rank where it is fewest."""
    known = classes_of(units, outside, pp * virtual_stages[0])
    alone = _RanksAlone.of(units, known, name, pp, virtual_stages, microbatches, capacity, outside.slowed, seconds)
    if alone is None:
        return False
    if alone.most.sum() < known.members.max() or (alone.left < 0.0).any():
        return True
    if not math.isfinite(seconds) or len(known.members) == 1:
        return False
    costs, common = alone.costs.min(axis=-1), int(known.members.argmax())
    each = np.full(alone.left.shape, math.inf)  # units of that class, by row and rank
    np.divide(alone.left, costs[:, :, common], out=each, where=costs[:, :, common] > 0.0)
    row, ranks, room = each.argmin(axis=0), np.arange(pp), float(each.min(axis=0).sum())
    if not math.isfinite(room):
        return False
    as_many = (costs[row, ranks] / costs[row, ranks, common][:, None]).min(axis=0)
    return bool(alone.free @ as_many > room * (1 + 1e-9))


def whole_units(
    units: Intervals, known: Classes, name: str, pp: int, virtual_stages: tuple[int, int], microbatches: int,
    capacity: np.ndarray, slowed: float, seconds: float,
) -> np.ndarray | None:
    """Of the most frequent class, how many units each rank runs at most in a step of ``seconds`` (inf: of any length), [pp];
    None if the schedule does not say."""
    alone = _RanksAlone.of(units, known, name, pp, virtual_stages, microbatches, capacity, slowed, seconds)
    return None if alone is None else alone.most


class _RanksAlone(NamedTuple):
    """What each rank can run by itself: ``costs`` of a unit in every row [rows, pp, classes, options], and what is ``left`` for
    them [rows, pp] when the first and the last unit are where they must be, unless these are of the most frequent class; how
    many units are ``free`` then [classes]; how many of that class a rank runs at ``most`` within its memory [pp]."""

    costs: np.ndarray
    left: np.ndarray
    free: np.ndarray
    most: np.ndarray

    @classmethod
    def of(
        cls, units: Intervals, known: Classes, name: str, pp: int, virtual_stages: tuple[int, int], microbatches: int,
        capacity: np.ndarray, slowed: float, seconds: float,
    ) -> _RanksAlone | None:
        """In a step of ``seconds``; None if the schedule does not say."""
        schedule, counts = schedule_of(name), in_flight(name, pp, virtual_stages, microbatches)
        if schedule.closed is None or counts is None:
            return None
        common, turns = int(known.members.argmax()), schedule.closed.turns
        state, saved, pending, summed = known.numbers[3:7]
        costs, left = _costs(units, known, name, pp, virtual_stages, microbatches, slowed, seconds)
        bytes_ = state + sum(counts[:, :, at, :, None, None] * each for at, each in enumerate((saved, pending, summed)))
        room = _room(units, name, counts, virtual_stages, capacity)
        free = known.members.copy()
        for rank, part, kind in ((0, 0, known.kinds[0]), (0 if turns else pp - 1, -1, known.kinds[-1])):
            if kind != common:
                room[rank] -= bytes_[rank, :, part, kind].min(axis=-1)
                left[:, rank] -= costs[:, rank, kind].min(axis=-1)
                free[kind] -= 1
        least = bytes_[:, :, :, common].min(axis=2)
        fit = _most(costs[:, :, None, common], left[:, :, None], least, room).min(axis=(0, 2))
        return cls(costs, left, free, np.asarray(np.floor(np.minimum(fit, known.members[common]) + 1e-6)))


def _costs(
    units: Intervals, known: Classes, name: str, pp: int, virtual_stages: tuple[int, int], microbatches: int, slowed: float,
    seconds: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of ``cost.timeline.lower_bounds`` as one rank alone sees them: what a unit of every class costs it in each,
    [rows, pp, classes, options], and of what [rows, pp], in a step of ``seconds``. What comes before its work and after it is
    counted of all units where a micro-batch goes through everything, else of one unit a stage, of those that take least."""
    schedule, fewest = schedule_of(name), virtual_stages[0]
    assert schedule.closed is not None
    split, turns = schedule.split, schedule.closed.turns
    forward, inputs, weights, *_, gather, reduce, optimizer = known.numbers
    back, cheapest = inputs if split else inputs + weights, units.cheapest()[:3, -1]
    ahead, behind = float(cheapest[0]), float(cheapest[1] if split else cheapest[1:].sum())
    down, up = (float(x[1:-1].min()) if units.count > 1 else 0.0 for x in (units.value, units.gradient))
    ahead_of, behind_of = (_of_fewest(known, each, sent) for each, sent in ((forward, down), (back, up)))
    ranks = np.arange(pp)
    sends, others = 2 * pp - 2 if turns else fewest * pp - 1, ranks if turns else ranks[::-1]
    stages = ranks[:, None] + pp * np.arange(len(parts(virtual_stages)) if fewest > 1 else 1)
    if turns:
        stages[:, -1] = 2 * pp - 1 - ranks
    margins, none, last = schedule.margins(pp, stages.shape[1], microbatches), np.zeros((pp, 1, 1)), (fewest - 1) * pp + ranks

    def most(counts: np.ndarray) -> np.ndarray:
        return np.asarray(counts[stages].max(axis=1)[:, None, None])

    warm = most(margins.warm) * forward
    begins = [(none, ahead_of[ranks]), (warm, ahead + sends * down + behind_of[others])]
    if margins.turn is not None:
        begins.append((most(margins.turn) * forward, ahead_of[last]))
    ends = [(none, behind_of[ranks], False), (none - slowed * reduce, 0.0 * ranks, True)]
    drains = np.where(margins.warm[stages].sum(axis=1) < microbatches * stages.shape[1], 0.0, -np.inf)
    drained = drains + behind + sends * up + ahead_of[others]
    for left, then in ((margins.turned, behind_of[last]), (margins.drained, drained)):
        if left is not None:
            spared = most(left.backward) * back
            ends += [(spared, then, False), *([(spared + most(left.weight) * weights, then, True)] if split else [])]
    work = {late: microbatches * (forward + (inputs + weights if late else back)) + optimizer for late in (False, True)}
    first = float(gather[known.kinds[0]].min())
    begins.append((none - gather, 0.0 * ranks - first))  # until all is there that the rank itself gathers
    rows = [(work[late] - done - spared, before + after)
            for (done, before), (spared, after, late) in itertools.product(begins, ends)]
    slowest, path = (forward + back) if (margins.warm == microbatches).all() else back, ahead + behind + sends * (down + up)
    rows.append((none + (microbatches - 1) / virtual_stages[1] * slowest + optimizer, path + 0.0 * ranks))
    if virtual_stages == (1, 1):  # what comes before a rank and after it is all but its own
        rows.append((work[False] - warm - back, path + 0.0 * ranks))
    room = seconds - first - np.array([beside for _, beside in rows])
    return np.maximum([cost for cost, _ in rows], 0.0), room  # of all that is spared rounding may leave less than nothing


def _of_fewest(known: Classes, seconds: np.ndarray, sent: float) -> np.ndarray:
    """What 0, 1, 2, ... stages take at least, [units + 1]: one unit each, of ``seconds`` [classes, options], and what is
    ``sent`` behind it."""
    return np.concatenate([[0.0], np.cumsum(np.sort(seconds.min(axis=1)[known.kinds]) + sent)])


def _most(seconds: np.ndarray, budget: np.ndarray, bytes_: np.ndarray, room: np.ndarray) -> np.ndarray:
    """How many units, some in one way and some in another, fit ``budget`` seconds [...] and ``room`` bytes [...]: one way takes
    ``seconds`` and ``bytes_`` [..., options] of them. At a vertex one option or two are used."""
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.minimum(budget[..., None] / seconds, room[..., None] / bytes_).max(axis=-1)
        for a, b in itertools.combinations(range(seconds.shape[-1]), 2):
            across = seconds[..., a] * bytes_[..., b] - seconds[..., b] * bytes_[..., a]
            first = (budget * bytes_[..., b] - seconds[..., b] * room) / across
            second = (seconds[..., a] * room - budget * bytes_[..., a]) / across
            most = np.where((first >= 0) & (second >= 0), np.fmax(most, first + second), most)
    return np.asarray(np.maximum(np.nan_to_num(most, nan=np.inf), 0.0))


class Ends(NamedTuple):
    """Bytes of every stage at least, whatever units it begins and ends with, [stages] each: of its ``transient`` (behind the
    unit that it ends with nothing of it is released), and those that its last ``reduction`` leaves; ``final``, ``early``: as of
    ``Transients``. What is saved more for what enters a stage and leaves it is not among them: ``in_flight.passed_on``."""

    transient: np.ndarray
    reduction: np.ndarray
    final: np.ndarray
    early: np.ndarray

    @classmethod
    def of(cls, units: Intervals, stages: int) -> Ends:
        """Of so many stages, 2 or more."""
        early = units.early if units.early.any() else units.final
        last = np.array([each.min(axis=0) for each in (units.peak[1], units.final, early)])
        left, count = units.least_left, units.count
        inner = last[:, 1:-1].min(axis=1, initial=math.inf)
        least = left[1:-1, 1:-1][np.triu_indices(count - 1, 1)].min(initial=math.inf)
        found, reduction = np.zeros((3, stages)), np.full(stages, least if stages > 2 else 0.0)
        found[:, 1:-1] = inner[:, None]
        found[:, 0], found[:, -1] = last[:, :-1].min(axis=1), last[:, -1]
        found[:, : units.whole] = np.minimum(found[:, : units.whole], 0.0)
        reduction[0], reduction[-1] = left[0, 1:-1].min(), left[1:-1, -1].min()
        return cls(found[0], reduction, *found[1:])


def _room(
    units: Intervals, name: str, counts: np.ndarray, virtual_stages: tuple[int, int], capacity: np.ndarray
) -> np.ndarray:
    """Bytes that a rank has for what its units keep at the moments ``counts`` [pp, k, 3, parts] (``in_flight``): those of
    ``capacity`` [pp] less what it cannot avoid beside, whichever of its stages runs, and what reductions of the others leave at
    least, of ranks of the fewest stages [pp, k]."""
    schedule, pp, fewest = schedule_of(name), len(counts), virtual_stages[0]
    assert schedule.closed is not None
    lies, room = schedule.stage_rank(pp, fewest), np.zeros(counts.shape[:2])
    ends = Ends.of(units, len(lies))
    for rank in range(pp):
        own = [stage for stage, on in enumerate(lies) if on == rank]
        room[rank] = capacity[rank] - ends.transient[own].min()
        if virtual_stages[1] > 1:
            left = ends.reduction[own]
            bytes_ = np.array([left[0], left[1:-1].sum(), left[-1]])[parts(virtual_stages)]
            room[rank] -= np.maximum(counts[rank, :, 2] @ bytes_ - left.max(), 0.0)
        if schedule.closed.mixed:
            room[rank, :-1] = capacity[rank] - np.where(
                counts[rank, :-1, 2].all(axis=1), ends.final[own].min(), ends.early[own].min())
    return room


class Bound(NamedTuple):
    """Seconds that no run can beat, inf if it is proven that nothing fits, and the sharpest that was asked: the ``packing`` (or
    crowding), the ``stages`` of ranks that have one each, ``divided`` units, or ``whole`` numbers of them on every rank.
    ``work``: nominal seconds of programs solved for it."""

    seconds: float
    by: str
    work: float = 0.0


def fractional_bound(
    units: Intervals, name: str, pp: int, virtual_stages: tuple[int, int], microbatches: int, capacity: np.ndarray,
    outside: OutsideSeconds | None = None, cutoff: float = 0.0,
) -> Bound:
    """The bound whatever the cut, with any number of stages a rank from the first of ``virtual_stages``, at least 2, to the
    second. ``capacity``: bytes [pp]. With ``outside``: no step. What takes ``cutoff`` seconds or more, if that is not 0, is not
    told apart."""
    closed = schedule_of(name).closed
    if closed is None:
        return Bound(0.0, "packing")
    outside = outside or OutsideSeconds.nothing(units.count)
    program, to_beat = _Program(units, name, pp, virtual_stages, microbatches, outside), cutoff or math.inf
    counts = in_flight(name, pp, virtual_stages, microbatches)
    assert counts is not None  # as the schedule has closed forms
    room = _room(units, name, counts, virtual_stages, capacity)
    if room.min() <= 0:
        return Bound(math.inf, "packing")
    program.place()
    program.memory(counts, room)
    most = whole_units(
        units, program.known, name, pp, virtual_stages, microbatches, capacity, outside.slowed, to_beat,
    )
    if most is not None:
        program.no_more(most)
    program.all()
    program.time()
    program.outside()
    program.limit(to_beat)
    divided = program.bound(to_beat)
    if not _WHOLE * to_beat <= divided < to_beat or np.count_nonzero(program.members > 1) != 1:
        return Bound(divided, "divided", program.work)
    return Bound(max(divided, program.whole_bound(to_beat)), "whole", program.work)


_CASES = 20
"""Where units are whole, so many cases are told apart at most."""
_WHOLE = 0.85
"""Where divided units say less than this part of what is to be beaten, whole ones are not asked: they would not come to it
(seen: they add an eighth at most), and the table's own bound comes next."""


@dataclass(frozen=True)
class _Links:
    """Seconds of the cheapest crossing, ``down`` and ``up``; stages a rank at ``least``; crossings of one way, ``sends``."""

    down: float
    up: float
    least: int
    sends: int

    def before(self, rank: int, pp: int) -> int:
        """Crossings before the last stage of a rank, not in a V."""
        return (self.least - 1) * pp + rank


class _Program(LinearProgram):
    """The program of one schedule. A *part* [kind, rank] is a rank's first stage, all between, or its last one. Seconds are in
    units of the longest class (``scale``)."""

    def __init__(
        self, units: Intervals, name: str, pp: int, virtual_stages: tuple[int, int], microbatches: int, outside: OutsideSeconds
    ) -> None:
        super().__init__()
        self.units, self.name, self.pp, self.microbatches = units, name, pp, microbatches
        self.least, self.most = virtual_stages
        self.chosen = parts(virtual_stages)
        schedule = schedule_of(name)
        self.split, self.turns = schedule.split, schedule.closed is not None and schedule.closed.turns
        self.margins = schedule.margins(pp, len(self.chosen), microbatches)  # if a rank had one stage of each kind
        self.slowed = outside.slowed
        self.known = classes_of(units, outside, pp * self.least)
        self.classes, self.first, self.members = self.known
        self.scale = float(self.classes[:3].max()) or 1.0
        self.amounts = self.variables(len(self.chosen), pp, len(self.members), units.options)
        self.seconds = self.variables(len(self.chosen), pp, 3)
        self.gather, self.optimizer = self.variables(2, 1)
        self.left = self.variables(pp, 1)

    def end(self, terms: Sequence[Term], seconds: float = 0.0) -> None:
        """The step ends no sooner than after this sum and these seconds, what comes before and after its actions apart."""
        step = [(np.zeros(1, dtype=np.int64), 1.0), (self.gather, -1.0), (self.optimizer, -1.0)]
        self.add([*step, *((columns, -weights) for columns, weights in terms)], seconds)

    def outside(self) -> None:
        """What comes before and after the micro-batches."""
        gather, reduce, optimizer = self.classes[7:] / self.scale
        down = float(self.units.value[1:-1].max()) / self.scale if self.units.count > 1 else 0.0
        for rank in range(self.pp):
            amounts, left = self.amounts[:, rank], (self.left[rank], 1.0)
            self.add([(self.gather, 1.0), (amounts, -gather), (self.seconds[0, :rank, 0], 1.0)], -rank * down)
            self.add([(self.optimizer, 1.0), (amounts, -optimizer)], 0.0)
            self.add([left, (amounts, -self.slowed * reduce)], 0.0)
            self.add([left, (amounts, -reduce), (self.seconds[:, rank, 1:], 1.0)], 0.0)

    def place(self) -> None:
        """One or more units in every stage, the first and the last at the ends; seconds of every part."""
        work, fewest = self.classes[:3] / self.scale, np.array([1, self.least - 2, 1])[self.chosen]
        for kind, rank in np.ndindex(len(self.chosen), self.pp):
            amounts = self.amounts[kind, rank]
            self.add([(amounts, 1.0)], float(fewest[kind]))
            for column, seconds in zip(work, self.seconds[kind, rank, :, None], strict=True):
                self.add([(amounts, column), (seconds, -1.0)], 0.0, 0.0)
        self.add([(self.amounts[0, 0, self.first[0]], 1.0)], 1.0)
        self.add([(self.amounts[-1, 0 if self.turns else -1, self.first[-1]], 1.0)], 1.0)

    def time(self) -> None:
        """The rows of ``cost.timeline.lower_bounds``; what many of them share is a variable."""
        pp, m, split = self.pp, self.microbatches, self.split
        crossings = self.units.value, self.units.gradient
        down, up = (float(x[1:-1].min()) / self.scale if self.units.count > 1 else 0.0 for x in crossings)
        sends = 2 * pp - 2 if self.turns else self.least * pp - 1
        ahead, back = self.seconds[:, :, :1], self.seconds[:, :, 1:2] if split else self.seconds[:, :, 1:]
        forwards, backwards, slowest = self.variables(3, 1)
        self.add([(forwards, 1.0), (ahead, -1.0)], 0.0)
        self.add([(backwards, 1.0), (back, -1.0)], 0.0)
        for kind, rank in np.ndindex(len(self.chosen), pp):
            share = self.most - 2 if self.chosen[kind] == 1 else 1
            for part in (ahead, back):
                self.add([(slowest, float(share)), (part[kind, rank], -1.0)], 0.0)
        self.end([(forwards, 1.0), (backwards, 1.0), (slowest, m - 1), (self.left[0], 1.0)], sends * (down + up))
        links = _Links(down, up, self.least, sends)
        begin, end, late = self.variables(3, pp, 1)
        self._begins(begin, ahead, back[-1], forwards, links)
        self._ends(end, late, ahead, back, backwards, links)
        for rank in range(pp):
            own = self.seconds[:, rank]
            self.end([(begin[rank], 1.0), (own, m * np.ones(own.shape) * [1.0, 1.0, not split]), (end[rank], 1.0)])
            if split:
                self.end([(begin[rank], 1.0), (own, m), (late[rank], 1.0)])

    def _begins(self, begin: np.ndarray, ahead: np.ndarray, back: np.ndarray, forwards: np.ndarray, links: _Links) -> None:
        """When a rank begins, less what it has done by then; ``back``: backwards of the last stages."""
        pp, warm, turn = self.pp, self.margins.warm, self.margins.turn
        head, behind = self._sums(ahead[0], range(pp)), self._sums(back, range(pp) if self.turns else range(pp)[::-1])
        last = None if turn is None else self._sums(ahead[-1], range(pp), ahead[:-1])
        for rank in range(pp):
            own, after = self.seconds[:, rank, 0], rank if self.turns else pp - 1 - rank
            done = warm[self._stages(rank)].astype(float)
            returned = links.sends * links.down + after * links.up
            self.add([(begin[rank], 1.0), (head[rank], -1.0)], rank * links.down)
            self.add([(begin[rank], 1.0), (forwards, -1.0), (behind[rank], -1.0), (own, done)], returned)
            if turn is not None and last is not None:
                done = turn[self._stages(rank)].astype(float)
                self.add([(begin[rank], 1.0), (last[rank], -1.0), (own, done)], links.before(rank, pp) * links.down)

    def _ends(
        self, end: np.ndarray, late: np.ndarray, ahead: np.ndarray, back: np.ndarray, backwards: np.ndarray, links: _Links
    ) -> None:
        """What comes after a rank's work, less what it has left then; ``late``: where gradients of weights are work too."""
        pp, split, all_forwards = self.pp, self.split, self.microbatches * len(self.chosen)
        warm, turned, drained = self.margins.warm, self.margins.turned, self.margins.drained
        tail, beyond = self._sums(back[0], range(pp)), self._sums(ahead[-1], range(pp)[::-1])
        last, first = self._sums(back[-1], range(pp), back[:-1]), (self.left[0], -1.0)
        for rank in range(pp):
            own, mine = self.seconds[:, rank, 1:], self._stages(rank)
            self.add([(end[rank], 1.0), (tail[rank], -1.0), first], rank * links.up)
            for after in (end, late):
                self.add([(after[rank], 1.0), (self.left[rank], -1.0)], 0.0)
            paths: list[tuple[Left, list[Term], float]] = []
            if turned is not None:
                paths.append((turned, [(last[rank], -1.0)], links.before(rank, pp) * links.up))
            if drained is not None and warm[mine].sum() < all_forwards:
                on = (pp - 1 - rank) * links.down + links.sends * links.up
                paths.append((drained, [(beyond[rank], -1.0), (backwards, -1.0)], on))
            for left, then, seconds in paths:
                backward = left.backward[mine]
                self.add([(end[rank], 1.0), *then, (own, np.stack([backward, backward * (not split)], axis=1)), first], seconds)
                if split:
                    rest = np.stack([backward, left.weight[mine]], axis=1)
                    self.add([(late[rank], 1.0), *then, (own, rest), first], seconds)

    def _stages(self, rank: int) -> list[int]:
        """The rank's stages if it had one of each kind."""
        stages = [kind * self.pp + rank for kind in range(len(self.chosen))]
        return [*stages[:-1], 2 * self.pp - 1 - rank] if self.turns else stages

    def _sums(self, seconds: np.ndarray, order: Iterable[int], base: np.ndarray | None = None) -> np.ndarray:
        """Variables [pp, 1]: at each rank the seconds [pp, k] of those before it in an order, and all of ``base``."""
        sums, before = self.variables(self.pp, 1), None
        for rank in order:
            if before is not None:
                self.add([(sums[rank], 1.0), (sums[before], -1.0), (seconds[before], -1.0)], 0.0)
            elif base is not None:
                self.add([(sums[rank], 1.0), (base, -1.0)], 0.0)
            before = rank
        return sums

    def memory(self, counts: np.ndarray, room: np.ndarray) -> None:
        """Every rank holds at its moments, ``counts`` [pp, k, 3, parts], no more than ``room`` bytes [pp, k]."""
        state, saved, pending, summed = self.classes[3:7]
        for rank in range(self.pp):
            moments, first = np.unique(counts[rank], axis=0, return_index=True)
            for moment, bytes_ in zip(moments[..., None, None], room[rank, first], strict=True):
                held = (state + moment[0] * saved + moment[1] * pending + moment[2] * summed) / bytes_
                if (held.max(axis=(0, 2)) * self.members).sum() > 1.0:
                    self.add([(self.amounts[:, rank], held)], -math.inf, 1.0)

    def no_more(self, most: np.ndarray) -> None:
        """Of the most frequent class a rank runs no more than ``most`` units [pp]."""
        common = int(self.members.argmax())
        for rank in np.flatnonzero(most < self.members[common]).tolist():
            self.add([(self.amounts[:, rank, common], 1.0)], 0.0, float(most[rank]))

    def limit(self, seconds: float) -> None:
        """The step takes no longer."""
        if math.isfinite(seconds):
            self.add([(np.zeros(1, dtype=np.int64), 1.0)], 0.0, seconds * SAFE / self.scale)

    def bound(self, most: float = math.inf) -> float:
        """Seconds of the step at least; ``most`` if no step takes less, inf if none is possible."""
        try:
            return min(most, max(0.0, self.minimum({0: 1.0})) * self.scale / SAFE)
        except NoSolutionError:
            return most

    def whole_bound(self, most: float) -> float:
        """The same where every rank has a whole number of the most frequent class."""
        for rank in range(self.pp):
            self.make_whole([(self.amounts[:, rank, int(self.members.argmax())], 1.0)])
        try:
            return min(most, max(0.0, self.whole({0: 1.0}, _CASES)[0]) * self.scale / SAFE)
        except NoSolutionError:
            return most
        except UnsolvedError:
            return 0.0

    def all(self) -> None:
        """Every unit is somewhere."""
        for number, count in enumerate(self.members.tolist()):
            self.add([(self.amounts[:, :, number], 1.0)], count, count)


class Classes(NamedTuple):
    """Equal units: numbers of each class [7 as in ``Intervals`` + 3 as in ``OutsideSeconds``, classes, options], the class of
    every unit, units per class."""

    numbers: np.ndarray
    kinds: np.ndarray
    members: np.ndarray


def classes_of(units: Intervals, outside: OutsideSeconds, stages: int) -> Classes:
    """Units whose numbers (``Intervals.each``) are the same up to rounding are one class."""
    once = np.array([outside.gather, outside.reduce, outside.optimizer])[:, None].repeat(units.options, axis=1)
    numbers = np.concatenate([units.each(stages), once])
    scale = np.abs(numbers).sum(axis=2).max(axis=1)[:, None, None] + 1e-300
    keys = np.round(numbers / scale, 12).transpose(2, 0, 1).reshape(units.count, -1)
    rows = list(map(tuple, keys.tolist()))
    number = {row: n for n, row in enumerate(sorted(set(rows)))}  # few of many: ``np.unique`` sorts all of them
    kinds, where = np.array([number[row] for row in rows]), [rows.index(row) for row in number]
    return Classes(numbers[:, :, where].transpose(0, 2, 1), kinds, np.bincount(kinds))
