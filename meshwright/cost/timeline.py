"""When every action of a pipeline schedule runs: makespan, bubble, and a bound on any order's times.

With the durations F, I, W of every stage (B = I + W), an action starts when its rank is free and its operand has arrived::

    start(a)   = max(end of the action before a on its rank, arrival(operand of a))
    end(a)     = start(a) + duration(a)
    arrival(a) = max(end(a), arrival of the transfer before it on the same link) + transfer seconds
    makespan   = max end(a)                         busy = sum of durations        bubble = makespan - busy

Transfers: values go from stage s to s + 1 after F, gradients from s + 1 to s after B or I; nothing is sent between stages on
the same rank. Each ordered pair of ranks is one link, which carries one transfer at a time in the order of the producers. With
``overlap`` a transfer runs beside both ranks' computation; without, the sender computes nothing until the transfer is over (a
blocking send: what torch's 1F1B does with its gradients). Receiving never occupies the receiver.

The recurrence is one numpy pass over the levels of ``Order``, over K cases side by side (``makespans``): the search over cuts
prices its neighbours together. ``lower_bound`` holds for any times, overlap or not; for uniform stages without transfers it is
exact for gpipe, 1f1b and interleaved1f1b, where the bubble over the ideal M V (F + B) is (P - 1) / (M V).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from meshwright.ir.schedules import Action, ScheduleError, Table, schedule_of


@dataclass(frozen=True)
class Times:
    """Seconds of K cases: float [stages, K] per stage, [stages - 1, K] per boundary (``value`` down, ``gradient`` up)."""

    forward: np.ndarray
    backward_input: np.ndarray
    backward_weight: np.ndarray
    value: np.ndarray
    gradient: np.ndarray


def times(
    stages: int,
    forward: ArrayLike,
    backward_input: ArrayLike,
    backward_weight: ArrayLike,
    p2p: ArrayLike | tuple[ArrayLike, ArrayLike] = 0.0,
) -> Times:
    """Brings numbers into one shape: each a scalar (the same everywhere), one per stage (boundary), or [stages, K]. ``p2p`` is
    one of these for both directions, or a pair (value, gradient)."""
    value, gradient = p2p if isinstance(p2p, tuple) else (p2p, p2p)
    given = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    given |= {"p2p value": value, "p2p gradient": gradient}
    arrays = []
    for name, number in given.items():
        rows = stages - name.startswith("p2p")
        array = np.asarray(number, dtype=np.float64)
        array = np.full((rows, 1), array) if array.ndim == 0 else array.reshape(len(array), -1 if array.size else 1)
        if len(array) != rows:
            raise ScheduleError(f"{name}: expected a number or {rows} of them for {stages} stages, got {len(array)}")
        wrong = array[~((array >= 0) & (array < np.inf))]
        if wrong.size:
            raise ScheduleError(f"{name}: seconds must be non-negative numbers, got {wrong[0]}")
        arrays.append(array)
    cases = max(array.shape[1] for array in arrays)
    return Times(*(np.broadcast_to(array, (len(array), cases)) for array in arrays))


@dataclass(frozen=True)
class Simulation:
    """The outcome for one set of times. ``start[r][i]``, ``end[r][i]``: seconds of the i-th action of rank r."""

    table: Table
    start: tuple[np.ndarray, ...]
    end: tuple[np.ndarray, ...]
    makespan: float
    busy: np.ndarray

    @property
    def bubble(self) -> np.ndarray:
        """Idle seconds of every rank."""
        return self.makespan - self.busy

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time."""
        return float(self.bubble.sum() / (self.makespan * len(self.busy))) if self.makespan else 0.0

    @property
    def peak_per_stage(self) -> np.ndarray:
        """The most micro-batches each stage holds at once (from F to B, or to W where the backward is split)."""
        peak = np.zeros(self.table.stages, dtype=np.int64)
        for rank, counts in enumerate(self.table.in_flight):
            peak[list(self.table.stages_of(rank))] = counts.sum(axis=1).max(axis=0)
        return peak

    @property
    def peak_per_rank(self) -> np.ndarray:
        """The most (stage, micro-batch) pairs each rank holds at once."""
        return np.array([counts.sum(axis=(1, 2)).max() for counts in self.table.in_flight])

    def spans(self) -> Iterator[tuple[int, Action, float, float]]:
        """(rank, action, start, end) in each rank's order."""
        for rank, actions in enumerate(self.table.ranks):
            for action, start, end in zip(actions, self.start[rank], self.end[rank], strict=True):
                yield rank, action, float(start), float(end)


def _run(table: Table, given: Times, overlap: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(end, duration, arrival of what it sends) of every row of ``table.order``, [rows, K]."""
    order = table.order
    inputs, weights = given.backward_input, given.backward_weight
    duration = np.concatenate([given.forward, inputs + weights, inputs, weights])[order.duration]
    duration[0] = 0.0
    send = np.zeros((2 * (table.stages - 1) + 1, duration.shape[1]))
    send[:-1:2], send[1::2] = given.value, given.gradient
    transfers = bool(send.any())
    transfer = send[order.boundary] if transfers else duration
    end = np.zeros_like(duration)
    arrival = np.zeros_like(duration) if transfers else end
    free = end if overlap else arrival
    levels, previous, needs, link = order.levels.tolist(), order.previous, order.needs, order.link
    for low, high in pairwise(levels):
        now = np.maximum(free[previous[low:high]], arrival[needs[low:high]])
        now += duration[low:high]
        end[low:high] = now
        if transfers:  # what sends nothing has link row 0 and takes no time
            arrival[low:high] = np.maximum(now, arrival[link[low:high]])
            arrival[low:high] += transfer[low:high]
    return end, duration, arrival


def makespans(table: Table, given: Times, *, overlap: bool = True) -> np.ndarray:
    """Seconds from the first start to the last end, of K cases at once: float [K]."""
    return np.asarray(_run(table, given, overlap)[0].max(axis=0))


def forward_only(table: Table, forward: ArrayLike, value: ArrayLike) -> np.ndarray:
    """Seconds at which every rank is done with all micro-batches of all its stages, one stage after the other, where none goes
    back: float [pp]. ``forward``: of every stage; ``value``: of every boundary."""
    def in_turn(ready: np.ndarray, seconds: float) -> np.ndarray:
        before = np.arange(len(ready)) * seconds
        return np.asarray(np.maximum.accumulate(ready - before) + before + seconds)

    done, arrival = np.zeros(table.pp), np.zeros(table.microbatches)
    for stage, (rank, seconds) in enumerate(zip(table.stage_rank, np.asarray(forward, dtype=float).tolist(), strict=True)):
        arrival = in_turn(np.maximum(arrival, done[rank]), seconds)
        done[rank] = arrival[-1]
        if stage + 1 < table.stages and table.stage_rank[stage + 1] != rank:
            arrival = in_turn(arrival, float(np.asarray(value)[stage]))
    return done


def spans(table: Table, given: Times, *, overlap: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Seconds at which every rank starts its first action and ends its last one, of K cases at once: float [pp, K] each."""
    end, duration, _ = _run(table, given, overlap)
    first, last = ([rows[at] for rows in table.order.row_of] for at in (0, -1))
    return end[first] - duration[first], end[last]


class LongestPaths(NamedTuple):
    """Of one case: when every rank ends [pp]; how often a stage's forward, backward input and backward weight lie on the
    longest path to that end [pp, stages, 3], and what crosses each boundary, down and up [pp, stages - 1, 2]."""

    ends: np.ndarray
    runs: np.ndarray
    sends: np.ndarray


def longest_paths(table: Table, given: Times) -> list[LongestPaths]:
    """The paths of which the ends of the ranks are the sums, of every case, with overlap. An end is the largest of the sums of
    all paths, so at any other times it comes no sooner than this path's sum: a subgradient."""
    order, stages = table.order, table.stages
    end, _, arrival = _run(table, given, True)
    previous, needs, link = order.previous.tolist(), order.needs.tolist(), order.link.tolist()
    last = [int(rows[-1]) for rows in order.row_of]
    found = []
    for ended, arrived in zip(end.T.tolist(), arrival.T.tolist(), strict=True):
        runs, sends = np.zeros((table.pp, 4 * stages)), np.zeros((table.pp, 2 * stages - 1))
        for rank, row in enumerate(last):
            ran, sent = list[int](), list[int]()
            while row:
                ran.append(row)
                before, needed = previous[row], needs[row]
                if ended[before] >= arrived[needed]:
                    row = before
                    continue
                row = needed
                sent.append(row)
                while link[row] and arrived[link[row]] > ended[row]:
                    row = link[row]
                    sent.append(row)
            np.add.at(runs[rank], order.duration[ran], 1.0)
            np.add.at(sends[rank], order.boundary[sent], 1.0)
        forward, whole, inputs, weights = runs.reshape(table.pp, 4, stages).transpose(1, 0, 2)
        counted = np.stack([forward, whole + inputs, whole + weights], axis=2)
        found.append(LongestPaths(np.array(ended)[last], counted, sends[:, :-1].reshape(table.pp, -1, 2)))
    return found


def simulate(
    table: Table,
    forward: ArrayLike,
    backward_input: ArrayLike,
    backward_weight: ArrayLike,
    p2p: ArrayLike | tuple[ArrayLike, ArrayLike] = 0.0,
    *,
    overlap: bool = True,
) -> Simulation:
    """Runs a table on stage times (seconds; numbers or one per stage). Raises ScheduleError on a deadlock.

    >>> from meshwright.ir.schedules import schedule_table
    >>> simulate(schedule_table("1f1b", 4, 1, 8), 1, 1, 1).makespan     # ideal 24, bubble (P - 1) / M of it
    33.0
    """
    end, duration, _ = _run(table, times(table.stages, forward, backward_input, backward_weight, p2p), overlap)
    rows = table.order.row_of
    ends = tuple(end[r, 0] for r in rows)
    starts = tuple(end[r, 0] - duration[r, 0] for r in rows)
    busy = np.array([duration[r, 0].sum() for r in rows])
    return Simulation(table, starts, ends, float(end.max()), busy)


def peak_bytes(
    table: Table, saved: ArrayLike, pending: ArrayLike | None = None, summed: ArrayLike = 0.0, transient: ArrayLike = 0.0,
    reducing: ArrayLike = 0.0, later: ArrayLike = 0.0, final: ArrayLike = 0.0,
    early: ArrayLike | None = None,
) -> np.ndarray:
    """The most bytes of saved activations and summed gradients a rank holds at once: float [pp] or [pp, K].

    ``saved``: bytes per micro-batch of every stage ([stages] or [stages, K]) from F to B or I; ``pending``: what is left of
    them from I to W (all, if not given); ``summed``: bytes that every stage has from its first gradients of weights on;
    ``transient``: bytes beside these while a B or I of the stage runs, and so many ``later`` more once it has gradients;
    ``reducing``: bytes that its last reduction leaves until it runs backward again; ``final``: bytes beside the former while
    a W runs, or the last B (``Table.closing``); ``early``: in their place as the first W runs, with the sums that come
    meanwhile (default: none), no more than are there behind it.
    """
    held = np.asarray(saved, dtype=np.float64)
    left = held if pending is None else np.asarray(pending, dtype=np.float64)
    there, more, reduced = (np.broadcast_to(one, held.shape) for one in (summed, later, reducing))
    last = np.broadcast_to(np.asarray(final, dtype=np.float64), held.shape)
    begun = last if early is None else np.broadcast_to(early, held.shape)
    ways = [(table.side_by_side, np.array([held, left, there + more, reduced]), np.broadcast_to(transient, held.shape)),
            (table.closing_side_by_side, np.array([held, left, there + last - begun, begun - last]), begun)]
    peaks = np.zeros((table.pp, *held.shape[1:]))
    for moments, columns, beside in ways:
        for rank, (counts, begin) in enumerate(moments):
            own = list(table.stages_of(rank))
            bytes_ = counts @ columns[:, own].reshape(counts.shape[1], *held.shape[1:])
            peaks[rank] = np.maximum(peaks[rank], (np.maximum.reduceat(bytes_, begin, axis=0) + beside[own]).max(axis=0))
    return peaks


# ------------------------------------------------------------------------------------------------------------- bounds


def lower_bound(
    name: str,
    pp: int,
    virtual_stages: int,
    microbatches: int,
    forward: ArrayLike,
    backward_input: ArrayLike,
    backward_weight: ArrayLike,
    p2p: ArrayLike | tuple[ArrayLike, ArrayLike] = 0.0,
) -> float:
    """Seconds that no run of the schedule can beat, without running it (see ``lower_bounds``).

    >>> lower_bound("interleaved1f1b", 4, 2, 8, 0.5, 0.5, 0.5)          # ideal 24, bubble (P - 1) / (M V) of it
    28.5
    """
    given = times(pp * virtual_stages, forward, backward_input, backward_weight, p2p)
    return float(lower_bounds(name, pp, virtual_stages, microbatches, given)[0])


def lower_bounds(name: str, pp: int, virtual_stages: int, microbatches: int, given: Times) -> np.ndarray:
    """``lower_bound`` of K cases: float [K].

    The largest of *path*: one micro-batch through everything and M - 1 more through its slowest stage or link, and of every
    rank's *begin + work + end*. From all work of the rank is taken what it can have done before it begins, or do at the end, as
    ``Margins`` count it::

        begin   head     the first micro-batch comes through the stages before the rank's first one
                turn     it comes to the rank's last stage: the others ran ``turn``
                return   it comes back to the rank's last stage: ``warm`` was run
        end     tail     the last micro-batch goes back through the stages before the rank's first one
                turn     it goes back from the rank's last stage: ``turned`` is left
                drain    from the rank's last forward it goes on and all the way back: ``drained`` is left

    For a split backward weight gradients may fill the end, so there the work is counted once without them and once with those
    that cannot be so late. Where every rank runs all forwards first, all of them pass the slowest stage, and then all
    backwards.
    """
    schedule = schedule_of(name)
    ranks, split = np.array(schedule.stage_rank(pp, virtual_stages)), schedule.split
    margins = schedule.margins(pp, virtual_stages, microbatches)
    local = (ranks[1:] == ranks[:-1])[:, None]
    value, gradient = np.where(local, 0.0, given.value), np.where(local, 0.0, given.gradient)
    ahead, weight = given.forward, given.backward_weight
    back = given.backward_input if split else given.backward_input + weight
    head, tail = _before(ahead, value), _before(back, gradient) + weight[0] * split
    all_ahead, all_back = head[-1] + ahead[-1], tail[-1] + back[-1]
    down = np.concatenate([ahead, value]).max(axis=0)
    up = np.concatenate([back, gradient]).max(axis=0)
    apart = bool((margins.warm == microbatches).all())
    bound = all_ahead + all_back + (microbatches - 1) * (down + up if apart else np.maximum(down, up))
    for rank in range(pp):
        own = np.flatnonzero(ranks == rank)
        first, last, warm = own[0], own[-1], margins.warm[own]
        begins = [head[first], all_ahead + all_back - tail[last] - back[last] - warm @ ahead[own]]
        ends: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]] = [(tail[first], np.zeros(len(own)), None)]
        if margins.turn is not None:
            begins.append(head[last] - margins.turn[own] @ ahead[own])
        if margins.turned is not None:
            ends.append((tail[last], margins.turned.backward[own], margins.turned.weight[own]))
        if margins.drained is not None and warm.sum() < microbatches * len(own):
            after = all_ahead - head[last] - ahead[last] + all_back
            ends.append((after, margins.drained.backward[own], margins.drained.weight[own]))
        begin = np.maximum.reduce(begins)
        work = begin + microbatches * (ahead[own] + back[own]).sum(axis=0)
        bound = np.maximum(bound, work + np.maximum.reduce([after - left @ back[own] for after, left, _ in ends]))
        if split:
            work = work + microbatches * weight[own].sum(axis=0)
            rest = [after - left @ back[own] - late @ weight[own] for after, left, late in ends if late is not None]
            bound = np.maximum(bound, work + np.maximum.reduce([np.zeros_like(work), *rest]))
    return np.asarray(bound)


def _before(stage: np.ndarray, boundary: np.ndarray) -> np.ndarray:
    """Sums over everything before each stage."""
    return np.concatenate([np.zeros((1, stage.shape[1])), np.cumsum(stage[:-1] + boundary, axis=0)])


# ------------------------------------------------------------------------------------------------------------ pictures


_MOST_TICKS = 4096
"""So fine is a clock at most, whatever its shortest action."""


def render(what: Table | Simulation, *, tick: float | None = None, width: int = 120) -> str:
    """A schedule as text: a row per stage, a column per tick of the clock, in each cell the action that runs in the middle of
    the tick (``==``: it goes on). A table is drawn with F = I = W = 1 tick, B = 2. ``tick``: seconds (default: the shortest
    action); actions shorter than a tick may fall between two cells. What is wider than ``width`` columns is shown in windows:
    the first, one of the middle, the last.

    >>> from meshwright.ir.schedules import schedule_table
    >>> print(render(schedule_table("1f1b", 2, 1, 3)))
    clock          0  1  2  3  4  5  6  7  8  9  10 11
    rank 0 stage 0 F0 F1       B0 == F2 B1 ==    B2 ==
    rank 1 stage 1    F0 B0 == F1 B1 == F2 B2 ==
    """
    run = what if isinstance(what, Simulation) else simulate(what, 1.0, 1.0, 1.0)
    spans = [span for span in run.spans() if span[3] > span[2]]
    shortest = min((end - start for *_, start, end in spans), default=1.0)
    step = tick or max(shortest, run.makespan / _MOST_TICKS)
    if run.makespan / step > _MOST_TICKS * (1 + 1e-9):
        raise ScheduleError(f"tick={tick:g} s makes more than {_MOST_TICKS} columns of {run.makespan:g} s; give at least "
                            f"{run.makespan / _MOST_TICKS:.2g}")
    ticks = max(1, round(run.makespan / step))
    cells = [[""] * ticks for _ in range(run.table.stages)]
    for _, action, start, end in spans:
        low, high = (int(np.ceil(edge / step - 0.5 - 1e-9)) for edge in (start, end))
        for clock in range(low, min(high, ticks)):
            cells[action.stage][clock] = "==" if clock > low else f"{action.kind}{action.microbatch}"
    cell = max(2, *(len(text) for row in cells for text in row), len(str(ticks - 1)))
    heads = [f"rank {rank} stage {stage}" for stage, rank in enumerate(run.table.stage_rank)]
    margin = max(map(len, heads))
    lines = [("clock", [str(clock) for clock in range(ticks)]), *zip(heads, cells, strict=True)]

    def window(low: int, high: int) -> str:
        rows = ((head, row[low:high]) for head, row in lines)
        return "\n".join((f"{head:<{margin}} " + " ".join(f"{text:<{cell}}" for text in row)).rstrip() for head, row in rows)

    wide = max(1, (width - margin) // (cell + 1))
    starts = sorted({0, max(0, (ticks - wide) // 2), max(0, ticks - wide)}) if ticks > 2 * wide else range(0, ticks, wide)
    parts: list[str] = []
    last = 0
    for low in starts:
        if low > last:
            parts.append(f"... {low - last} ticks ...")
        parts.append(window(low, last := min(low + wide, ticks)))
    return "\n".join(parts)


_NAMES: Mapping[str, str] = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}


def chrome_trace(run: Simulation, beside: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The simulation in Chrome's trace event format (Perfetto opens it): a thread per rank, times in microseconds. ``beside``:
    seconds of the step beside the schedule, by name, which follow it on every rank."""
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in range(run.table.pp)
    ]
    for rank, action, start, end in run.spans():
        where = {"stage": action.stage, "microbatch": action.microbatch}
        kind = {"name": str(action), "cat": _NAMES[action.kind], "ph": "X", "pid": 0, "tid": rank}
        events.append(kind | {"ts": start * 1e6, "dur": (end - start) * 1e6, "args": where})
    start = run.makespan
    for name, seconds in (beside or {}).items():
        kind = {"name": name, "cat": name, "ph": "X", "pid": 0, "ts": start * 1e6, "dur": seconds * 1e6}
        events += [kind | {"tid": rank} for rank in range(run.table.pp)]
        start += seconds
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": run.table.name}}
