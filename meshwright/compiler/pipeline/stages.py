"""Where to cut the sequence of units into pipeline stages, so that the simulated step is shortest and every rank fits.

Units are what is not cut (blocks, the embedding, the head and loss, or single operators). S = pp x virtual_stages stages are
the intervals between S - 1 boundaries. The objective is the makespan of the schedule's own table (``cost.timeline``), transfers
included; the constraint, for every rank::

    state of its stages + max over its backwards of (micro-batches in flight x saved bytes + gradients that are summed by then
      + largest transient of the stage that runs, less what the units behind it there have released
      + what the last reductions of the other stages left, and of its own, until one of its units is reduced) <= capacity

How: few enough cuts are all priced, in the order of their lower bound, until the bound passes the best (exact). Otherwise

1. a dynamic program over intervals minimizes the largest *stage bound* (``stage_bounds``: what any run of the schedule needs if
   stage s is units i..j) - with one stage a rank memory is an interval's own affair, so its value is a certified bound;
2. its cuts, with ties broken towards balance of what bounds them and of their work, at several thresholds, are simulated side
   by side;
3. they are refined best first: one unit from stage a to stage b (everything between shifts), one stage to another option;
   neighbours whose bound is no better are never simulated (``compiler.pipeline.refine``);
4. so are, where a rank has several stages, cuts near to what is best for divided units, if several classes of units have
   several (``timed_bound.divided_cuts``): of those an even share of work says little; and cuts whose ranks have uneven stages
   alike.

With several stages a rank the bound is the better of packing and a linear program (``compiler.pipeline.stage_bound``). The
search has another, the table itself run at divided units within memory (``compiler.pipeline.timed_bound``): it binds where
transfers wait, and where ranks recompute to fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.compiler.pipeline.in_flight import in_flight
from meshwright.compiler.pipeline.intervals import (
    Intervals,
    Matrix,
    OutsideSeconds,
    Shared,
    Unit,
    recomputed,
    stage_bounds,
    stage_memory,
    stage_work,
)
from meshwright.compiler.pipeline.refine import BATCH, Cutting, Found, make_fit, refine
from meshwright.compiler.pipeline.stage_bound import (
    Bound,
    cannot_run_in,
    classes_of,
    fractional_bound,
    link_bound,
    packing_bound,
)
from meshwright.compiler.pipeline.timed_bound import divided_cuts
from meshwright.ir.schedules import Table, maximal, schedule_of, schedule_table

__all__ = ["Cuts", "StageError", "Unit", "cut"]

_EXHAUSTIVE = 5_000
"""Up to so many cuts (times options) are enumerated."""
_SLACK = (0.0, 0.01, 0.03, 0.1)
"""Relative slack over the smallest bottleneck at which balanced cuts are tried."""


class StageError(ValueError):
    """No cut exists: more stages than units, or a rank that cannot fit, which needs ``excess`` bytes more than it has; unless
    ``proven``, none was found."""

    def __init__(self, message: str, proven: bool = True, excess: float = 0.0) -> None:
        super().__init__(message)
        self.proven, self.excess = proven, excess


@dataclass(frozen=True)
class Cuts:
    """``boundaries``: S + 1 unit indices, stage s = units boundaries[s]..boundaries[s + 1] - 1, on rank ``stage_rank[s]`` with
    option ``options[s]``. Seconds per stage and micro-batch; ``memory``: bytes per rank; ``makespan``: seconds of the simulated
    step, with what is outside of its micro-batches; ``bound``: seconds that no cut can beat, whichever units of a stage have
    which option; ``candidates``: cuts simulated; ``looked``: cuts that were bounded; ``work``: nominal seconds of
    programs solved for it."""

    boundaries: tuple[int, ...]
    options: tuple[int, ...]
    stage_rank: tuple[int, ...]
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    memory: tuple[float, ...]
    makespan: float
    bound: float
    candidates: int
    looked: int
    work: float = 0.0

    @property
    def gap(self) -> float:
        """(makespan - bound) / makespan: 0 is proven optimal."""
        return max(0.0, 1.0 - self.bound / self.makespan) if self.makespan else 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Units per stage."""
        return tuple(b - a for a, b in itertools.pairwise(self.boundaries))

    def stage_of(self, unit: int) -> int:
        return next(s for s, end in enumerate(self.boundaries[1:]) if unit < end)


def cut(
    units: Sequence[Unit],
    pp: int,
    virtual_stages: int,
    schedule: str,
    microbatches: int,
    capacity: float | Sequence[float] = math.inf,
    *,
    options: Sequence[Sequence[Unit]] = (),
    outside: OutsideSeconds | None = None,
    shared: Sequence[Shared] = (),
    overlap: bool = True,
    table: Table | None = None,
    bound: float | None = None,
    cutoff: float = math.inf,
) -> Cuts:
    """The best cut of ``units`` for a schedule.

    ``capacity``: bytes per rank, one number or one per rank. ``options``: further ways to run the same units (recomputation,
    ZeRO: other seconds and bytes, the same boundaries), of which every stage takes one; option 0 is ``units`` itself.
    ``outside``: what the units add outside the micro-batches, whatever their option; ``shared``: weights that several read.
    ``overlap``: see ``simulate``. ``table``: the schedule's table, if there already is one; ``bound``: seconds that no cut can
    beat, if they are known; ``cutoff``: seconds known from elsewhere: what takes longer is not refined. Raises ScheduleError
    for a setting that torch refuses, StageError if there are fewer units than stages or no cut found fits (which stage, by how
    much).

    >>> blocks = [Unit(f"block {i}", 1.0, 1.0, 1.0) for i in range(7)]
    >>> cut([Unit("embedding", 0.5, 0.5, 0.5), *blocks, Unit("head", 1.0, 1.0, 1.0)], 4, 1, "1f1b", 16).sizes
    (3, 2, 2, 2)
    """
    table = table or schedule_table(schedule, pp, virtual_stages, microbatches)
    problem = _problem((tuple(units), *map(tuple, options)), table, virtual_stages, capacity, overlap, outside, shared)
    return _result(problem, _best_cut(problem, bound, cutoff))


def glance(units: Intervals, table: Table, capacity: np.ndarray, overlap: bool, outside: OutsideSeconds) -> float:
    """Seconds of a step whose stages do nearly equal work, or take nearly as long with what is before and after it, all under
    one option, or as many of every rank's under the first as fit; inf where none fits so. What ``cut`` finds is mostly some
    hundredths faster.

    ``capacity``: bytes of every rank [pp]; ``outside``: what the units add outside the micro-batches.
    """
    if table.stages > units.count:
        return math.inf
    problem = Cutting(table, table.stages // table.pp, units, capacity, overlap, (), outside)
    starts, stops = np.ogrid[: units.count + 1, : units.count + 1]
    work = np.where(starts < stops, units.matrices[:3, 0].sum(axis=0), np.inf)
    shares = [[work] * table.stages, [table.microbatches * work + outside.sums.sum(axis=0)] * table.stages]
    if problem.virtual_stages == 1:
        more = [np.zeros(work.shape)] * table.pp
        shares[1] = [each[0] for each in stage_bounds(units, table.name, table.pp, table.microbatches, outside, more)]
    rows = np.unique([narrow_cuts(costs, smallest_bottleneck(costs) * (1 + slack))
                      for costs in shares for slack in _SLACK[:3:2]], axis=0)
    cuts, options = _each_way(problem, rows)
    fits = np.flatnonzero(problem.excess(cuts, options) <= 0)
    if not len(fits):
        return math.inf
    best = fits[np.argsort(problem.bounds(cuts[fits], options[fits]), kind="stable")[: len(rows)]]
    cuts, options = cuts[best], options[best]
    number = np.empty(table.stages, dtype=np.int64)  # of each stage, which of its rank's it is
    for rank in range(table.pp):
        number[list(table.stages_of(rank))] = np.arange(problem.virtual_stages)
    for at in np.flatnonzero(options.any(axis=1)).tolist():
        ways = np.where(number < np.arange(1, problem.virtual_stages)[:, None], 0, options[at])
        held = problem.excess(np.repeat(cuts[at][None], len(ways), axis=0), ways) <= 0
        if held.any():
            options[at] = ways[np.flatnonzero(held)[-1]]
    return float(problem.seconds(cuts, options).min())


def step_bound(
    units: Intervals, pp: int, virtual_stages: tuple[int, int], schedule: str, microbatches: int, capacity: np.ndarray,
    outside: OutsideSeconds, cutoff: float = 0.0,
) -> Bound:
    """Seconds of a step that no cut can beat, with any number of stages a rank from the first to the second of
    ``virtual_stages`` (1 and 1, or both at least 2) at once; inf where it is proven that none fits. Needs no table.

    ``capacity``: bytes [pp].
    ``outside``: what the units add outside the micro-batches.
    ``cutoff``: seconds above which nothing sharper is needed.
    """
    packed = packing_bound(units, schedule, pp, microbatches)
    packed = max(packed, link_bound(units, schedule, pp, virtual_stages, microbatches, cutoff or math.inf))
    packed += float(outside.gather[0] + outside.optimizer.sum() / pp)
    if packed >= cutoff > 0:
        return Bound(packed, "packing")
    for asked in dict.fromkeys((math.inf, cutoff)):
        if asked > 0 and cannot_run_in(units, schedule, pp, virtual_stages, microbatches, capacity, outside, asked):
            return Bound(asked, "packing")
    if virtual_stages == (1, 1):
        alone = _single_bound(units, pp, schedule, microbatches, capacity, outside)
        return Bound(max(packed, alone), "stages")
    bound = fractional_bound(units, schedule, pp, virtual_stages, microbatches, capacity, outside, cutoff)
    return bound._replace(seconds=max(packed, bound.seconds))


def _single_bound(
    units: Intervals, pp: int, schedule: str, microbatches: int, capacity: np.ndarray, outside: OutsideSeconds
) -> float:
    """With one stage a rank."""
    counts, lies = in_flight(schedule, pp, (1, 1), microbatches), schedule_of(schedule).stage_rank(pp, 1)
    moments = [np.array([[1, 0, 0]]) if counts is None else counts[lies[stage], :, :, 0] for stage in range(pp)]
    added = [recomputed(units, moments[stage], stage, pp, capacity[lies[stage]]) for stage in range(pp)]
    return smallest_bottleneck([bound[0] for bound in stage_bounds(units, schedule, pp, microbatches, outside, added)])


def _problem(
    options: tuple[tuple[Unit, ...], ...], table: Table, virtual_stages: int, capacity: float | Sequence[float], overlap: bool,
    outside: OutsideSeconds | None, shared: Sequence[Shared],
) -> Cutting:
    units = options[0]
    if len({len(one) for one in options}) != 1:
        raise StageError(f"every option must list the same {len(units)} units, got {[len(one) for one in options[1:]]}")
    positions = positions_of(np.array([unit.value + unit.gradient for unit in units]))
    if table.stages > len(positions) - 1:
        raise StageError(
            f"{table.name} with pp={table.pp} and virtual_stages={virtual_stages} needs {table.stages} stages, but the model "
            f"has {len(positions) - 1} units to cut between; use fewer stages, at most {len(positions) - 1}"
        )
    room = np.broadcast_to(np.asarray(capacity, dtype=np.float64), (table.pp,))
    if not (room > 0).all():
        raise StageError(f"capacity must be bytes greater than 0 on every rank, got {capacity}")
    between = (outside or OutsideSeconds.nothing(len(units))).at(positions)
    each = Intervals.of(options, positions, shared)
    return Cutting(table, virtual_stages, each, room, overlap, tuple(positions), between)


def positions_of(crossing: np.ndarray) -> list[int]:
    """Where cuts are allowed, with both ends. ``crossing``: seconds to send what crosses behind each unit; inf: no cut."""
    return [0, *(np.flatnonzero(np.isfinite(crossing[:-1])) + 1).tolist(), len(crossing)]


def _result(problem: Cutting, found: Found) -> Cuts:
    cuts, options = found.cuts[None], found.options[None]
    stage = problem.times(cuts, options)
    memory = problem.memory(cuts, options)[:, 0]
    return Cuts(
        tuple(problem.positions[i] for i in found.cuts),
        tuple(map(int, found.options)),
        problem.table.stage_rank,
        tuple(map(float, stage.forward[:, 0])),
        tuple(map(float, stage.backward_input[:, 0])),
        tuple(map(float, stage.backward_weight[:, 0])),
        tuple(map(float, memory)),
        found.makespan,
        min(found.bound, found.makespan),
        found.candidates,
        found.looked,
        found.work,
    )


# -------------------------------------------------------------------------------------------------- dynamic programs


def smallest_bottleneck(matrices: Sequence[Matrix]) -> float:
    """The smallest largest entry over all cuts, inf if there is no cut."""
    best = np.full(len(matrices[0]), np.inf)
    best[0] = -np.inf
    for matrix in matrices:
        best = np.maximum(best[:, None], matrix).min(axis=0)
    return float(best[-1])


def narrow_cuts(matrices: Sequence[Matrix], bottleneck: float, weights: Sequence[Matrix] | None = None) -> np.ndarray:
    """Boundaries int [S + 1] of the cut whose entries are all at most ``bottleneck`` with the smallest sum of squares, of its
    entries or of others in their place (``weights``)."""
    best = np.full(len(matrices[0]), np.inf)
    best[0] = 0.0
    came = []
    for matrix, weight in zip(matrices, weights or matrices, strict=True):
        total = best[:, None] + np.where(matrix <= bottleneck * (1 + 1e-12), weight, np.inf) ** 2
        came.append(total.argmin(axis=0))
        best = total.min(axis=0)
    cuts = [len(best) - 1]
    for origin in reversed(came):
        cuts.append(int(origin[cuts[-1]]))
    return np.array(cuts[::-1])


# --------------------------------------------------------------------------------------------------------- exhaustive


def _best_cut(problem: Cutting, known: float | None, cutoff: float) -> Found:
    """All cuts where they are few enough: those under the first option, the fastest without memory, then those under all."""
    stages, options = problem.table.stages, problem.units.options
    count = math.comb(problem.units.count - 1, stages - 1)
    if count > _EXHAUSTIVE:
        return _search(problem, known, cutoff)
    plain = _all_cuts(problem, np.zeros((1, stages), dtype=np.int64))
    if plain.makespan <= plain.bound:
        return plain
    if count * options**stages <= _EXHAUSTIVE:
        return _all_cuts(problem, np.array(list(itertools.product(range(options), repeat=stages)), dtype=np.int64))
    return _search(problem, max(plain.bound, known or 0.0), cutoff)


def _all_cuts(problem: Cutting, choices: np.ndarray) -> Found:
    """The best of all cuts under some options of the stages [K, S]. No cut beats the best under the first option, whether it
    fits or not, for its units may have other options one by one. If none fits, its seconds are inf, or StageError is raised
    where no other options are left."""
    n, stages = problem.units.count, problem.table.stages
    inner = list(itertools.combinations(range(1, n), stages - 1))
    rows = np.array([(0, *c, n) for c in inner], dtype=np.int64)
    cuts, options = np.repeat(rows, len(choices), axis=0), np.tile(choices, (len(rows), 1))
    excess = problem.excess(cuts, options)
    fits, plain = excess <= 0, np.asarray(options == 0).all(axis=1)
    plain &= fits | (problem.units.options > 1)  # with one option a cut that does not fit is none
    if not fits.any() and len(choices) == problem.units.options**stages:
        raise _does_not_fit(problem, cuts[excess.argmin()], options[excess.argmin()], proven=True)
    looked = fits | plain
    cuts, options, fits, plain = cuts[looked], options[looked], fits[looked], plain[looked]
    bounds = problem.bounds(cuts, options)
    order = np.argsort(bounds, kind="stable")
    best, least, where, priced = math.inf, math.inf, 0, 0
    for low in range(0, len(order), BATCH):
        batch = order[low : low + BATCH]
        batch = batch[bounds[batch] < best * (1 - 1e-12)]
        if not len(batch):
            break
        seconds = problem.seconds(cuts[batch], options[batch])
        priced += len(batch)
        least = min(least, float(seconds[plain[batch]].min(initial=math.inf)))
        seconds = np.where(fits[batch], seconds, math.inf)
        if seconds.min() < best:
            best, where = float(seconds.min()), int(batch[seconds.argmin()])
        if least <= bounds[batch[-1]] and best > least and len(choices) == 1:
            break  # the best of all is known, and does not fit
    return Found(cuts[where], options[where], best, min(best, least), priced, len(excess))


# ------------------------------------------------------------------------------------------------------------- search


def _bound(problem: Cutting) -> float:
    """Seconds that no cut can beat."""
    table, units = problem.table, problem.units
    packed = packing_bound(units, table.name, table.pp, table.microbatches)
    if problem.virtual_stages == 1:
        alone = _single_bound(units, table.pp, table.name, table.microbatches, problem.capacity, problem.outside)
        return max(packed, alone)
    several = problem.virtual_stages, problem.virtual_stages
    divided = fractional_bound(units, table.name, table.pp, several, table.microbatches, problem.capacity, problem.outside)
    return max(packed, divided.seconds)


def _search(problem: Cutting, known: float | None, cutoff: float) -> Found:
    table, units = problem.table, problem.units
    costs, best_option = _stage_matrices(problem)
    top = smallest_bottleneck(costs)
    bound = _bound(problem) if known is None else known
    if problem.virtual_stages == 1:
        if not math.isfinite(top):
            raise _tightest(problem)
        work = [stage_work(units, stage, table.stages).min(axis=0) for stage in range(table.stages)]
        cuts = np.unique([narrow_cuts(costs, top * (1 + slack), one) for slack in _SLACK for one in (None, work)], axis=0)
        options = np.array([[o[i, j] for o, i, j in zip(best_option, c[:-1], c[1:], strict=True)] for c in cuts])
    else:
        if not math.isfinite(bound):
            raise _too_much(problem)
        even = np.linspace(0, units.count, table.stages + 1).astype(np.int64)
        rows = (
            np.unique([narrow_cuts(costs, top * (1 + slack)) for slack in _SLACK], axis=0) if math.isfinite(top) else even[None]
        )
        cuts, options = _made_to_fit(problem, *_each_way(problem, rows))
    if not (problem.excess(cuts, options) <= 0).any():
        raise _does_not_fit(problem, cuts[0], options[0], proven=False)
    found = refine(problem, cuts, options, bound, cutoff)
    if problem.virtual_stages == 1:
        return found
    return _begun_elsewhere(problem, costs, found, bound, cutoff)


def _begun_elsewhere(problem: Cutting, costs: Sequence[Matrix], found: Found, bound: float, cutoff: float) -> Found:
    """The better of a cut that was found and of one that is found from elsewhere: near to what is best for divided units (of an
    encoder and a decoder of 12 blocks each on 4 ranks of 4 stages, by 5%), and where work is shared unevenly (``_uneven``)."""
    rows, work = divided_cuts(problem.units, problem.table, problem.outside, problem.capacity)
    found = replace(found, work=work)
    for some in (rows, _uneven(problem, costs)):
        if not len(some):
            continue
        cuts, options = _made_to_fit(problem, *_each_way(problem, some))
        if (problem.excess(cuts, options) <= 0).any():
            other = refine(problem, cuts, options, bound, min(cutoff, found.makespan))
            best, candidates = min(found, other, key=lambda one: one.makespan), found.candidates + other.candidates
            found = replace(best, candidates=candidates, looked=found.looked + other.looked, work=work)
    return found


def _uneven(problem: Cutting, costs: Sequence[Matrix]) -> np.ndarray:
    """Cuts [K, stages + 1] that share work out unevenly among the stages of a rank, and alike on all ranks, where whole units
    of the most frequent class make it so: seven on a rank of three stages as 2, 2, 3 and as 3, 2, 2. Where each rank has its
    longest stage elsewhere, it waits for those of others (Llama 2 70B on 12 ranks of 3 stages that recompute, by 9%)."""
    table, count = problem.table, problem.virtual_stages
    members = classes_of(problem.units, problem.outside, table.stages).members
    least, more = divmod(math.ceil(members.max() / table.pp), count)
    rows = [np.zeros((0, table.stages + 1), dtype=np.int64)]
    number = [table.stages_of(rank).index(stage) for stage, rank in enumerate(table.stage_rank)]
    for longer in (range(count - more, count), range(more)) if least and more else ():
        shares = [cost / (least + (at in longer)) for cost, at in zip(costs, number, strict=True)]
        if math.isfinite(top := smallest_bottleneck(shares)):
            rows += [narrow_cuts(shares, top * (1 + slack))[None] for slack in _SLACK]
    return np.unique(np.concatenate(rows), axis=0)


def _each_way(problem: Cutting, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts whose stages all have the same option, each of them, and these options."""
    cuts = np.tile(rows, (problem.units.options, 1))
    return cuts, np.repeat(np.arange(problem.units.options), len(rows))[:, None] + np.zeros_like(cuts[:, 1:])


def _made_to_fit(problem: Cutting, cuts: np.ndarray, options: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts that fit, one from each, where one is found. Those whose stages all run the leanest way come first: where units must
    move though all do (that takes longest) the others end there too, and are left if none of these fits."""
    leanest = options[int(problem.excess(cuts, options).argmin())]
    first = (options == leanest).all(axis=1)
    cuts, options = cuts.copy(), options.copy()
    for some in (first, ~first):
        for at in np.flatnonzero(some):
            cuts[at], options[at] = make_fit(problem, cuts[at], options[at])
        if not (problem.excess(cuts[first], options[first]) <= 0).any():
            return cuts[first], options[first]
    return cuts, options


# ------------------------------------------------------------------------------------------- per stage, infeasibility


def _stage_matrices(problem: Cutting) -> tuple[list[Matrix], list[Matrix]]:
    """(per stage what it costs at least, the option that does), [n + 1, n + 1] each; inf where no option fits.

    With one stage a rank: the stage bound, in seconds of the whole run. With several: the work of one micro-batch.
    """
    table, units, alone = problem.table, problem.units, problem.virtual_stages == 1
    bounds = list(stage_bounds(units, table.name, table.pp, table.microbatches, problem.outside)) if alone else None
    costs, options = [], []
    for stage in range(table.stages):
        cost = bounds[stage] if bounds else stage_work(units, stage, table.stages)
        room = problem.capacity[table.stage_rank[stage]]
        cost = np.where(stage_memory(units, *_moments(table, stage), stage, table.stages) <= room, cost, np.inf)
        options.append(cost.argmin(axis=0))
        costs.append(cost.min(axis=0))
    return costs, options


def _moments(table: Table, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest numbers of micro-batches that one stage holds as it runs backward, and whether it has summed gradients:
    int [k, 3]; of its ``Table.moments`` and of ``closing``."""
    rank = table.stage_rank[stage]
    own = table.stages_of(rank).index(stage)
    first, last = (maximal(of[rank][own][:, :, own]) for of in (table.moments, table.closing))
    return first, last


def _tightest(problem: Cutting) -> StageError:
    """Proof that no cut fits, one stage a rank: the cut whose fullest stage overflows least still does."""
    table, units = problem.table, problem.units
    memory = [
        stage_memory(units, *_moments(table, s), s, table.stages) - problem.capacity[table.stage_rank[s]]
        for s in range(table.stages)
    ]
    excess = [np.maximum(over, 0.0) for over in memory]
    cuts = narrow_cuts([e.min(axis=0) for e in excess], smallest_bottleneck([e.min(axis=0) for e in excess]))
    options = np.array([e[:, i, j].argmin() for e, (i, j) in zip(excess, itertools.pairwise(cuts), strict=True)])
    return _does_not_fit(problem, cuts, options, proven=True)


def _too_much(problem: Cutting) -> StageError:
    """Proof that no cut fits, several stages a rank: not even divided units do."""
    even = np.linspace(0, problem.units.count, problem.table.stages + 1).astype(np.int64)
    return _does_not_fit(problem, *make_fit(problem, even, np.zeros(problem.table.stages, dtype=np.int64)), proven=True)


def _does_not_fit(problem: Cutting, cuts: np.ndarray, options: np.ndarray, *, proven: bool) -> StageError:
    table = problem.table
    over = problem.memory(cuts[None], options[None])[:, 0] - problem.capacity
    rank = int(over.argmax())
    at = [problem.positions[i] for i in cuts]
    own = " and ".join(f"stage {s} (units {at[s]}..{at[s + 1] - 1})" for s in table.stages_of(rank))
    need, room = (round(x / 2**30, 6) for x in (over[rank] + problem.capacity[rank], problem.capacity[rank]))
    found = "no cut fits" if proven else "no cut was found that fits"
    return StageError(
        f"{table.name} on {table.pp} ranks, {table.microbatches} micro-batches: {found}. The closest one leaves rank {rank}, "
        f"{own}, at {need:.3g} GiB of {room:.3g} GiB: {need - room:.3g} GiB too much. Recompute activations, shard the state "
        "further, make micro-batches smaller or the pipeline longer.", proven, float(over[rank])
    )
