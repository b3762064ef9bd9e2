"""A pipeline schedule as a table: what every rank does, in order, and who waits for whom.

A pipeline is a sequence of stages 0..S-1, each on one rank. A micro-batch goes forward through all of them and back. ::

    action = stage kind microbatch       1F0 0B3 2I1 2W1        (as ``torch.distributed.pipelining`` prints it)
    kind   = "F" forward | "B" whole backward | "I" gradient of the input | "W" gradient of the weights   (B = I then W)

    F of stage s waits for F of s - 1, B or I of stage s for B or I of s + 1, for the same micro-batch;
    on one rank the actions run in the order of the table

``Table`` checks the first at birth, ``Table.order`` (``_sort``) that the ranks never wait for each other for ever, and
``Table.in_flight`` (``_counts``) says how many micro-batches the order holds at once. ``meshwright.cost.schedules`` makes
tables, ``meshwright.cost.timeline`` runs them on a clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError

KINDS = "FBIW"

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class ScheduleError(MeshwrightError, ValueError):
    """A schedule that cannot be built or never finishes: what was asked, why not, and the nearest that can."""


class Action(NamedTuple):
    """One piece of a rank's work.

    >>> Action(2, "I", 1)
    2I1
    >>> Action.parse("0B3") == Action(0, "B", 3)
    True
    """

    stage: int
    kind: str
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def __str__(self) -> str:
        return repr(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action: expected stage, one of F B I W, micro-batch, such as 1F0")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Table:
    """A schedule: for every rank its actions in order. ``stage_rank[s]`` is the rank that holds stage s.

    Validated at birth: every stage runs each micro-batch forward once and then backward once (B, or I then W) on its rank.
    Whether the ranks wait for each other for ever is found by ``order``.
    """

    name: str
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.stage_rank or set(self.stage_rank) != set(range(len(self.ranks))):
            raise ScheduleError(f"{self.name}: {len(self.ranks)} ranks of actions, but the stages lie on {self.stage_rank}")
        _ = self.in_flight  # walks every rank's actions, so it is also the check of their order

    @property
    def pp(self) -> int:
        return len(self.ranks)

    @property
    def stages(self) -> int:
        return len(self.stage_rank)

    @cached_property
    def split(self) -> bool:
        """Whether some backward is split into I and W."""
        return any(action.kind == "I" for rank in self.ranks for action in rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s, r in enumerate(self.stage_rank) if r == rank)

    @cached_property
    def in_flight(self) -> tuple[np.ndarray, ...]:
        """Per rank the largest numbers of micro-batches held at once: int [k, 2, stages of the rank].

        ``[:, 0]`` counts micro-batches between F and B or I, ``[:, 1]`` those between I and W. Only vectors that no other
        one dominates are kept, so the peak of any weighting by non-negative bytes is the largest over k. It depends on
        the order alone, not on times.
        """
        return tuple(maximal(_counts(self, rank)) for rank in range(self.pp))

    @cached_property
    def order(self) -> Order:
        """The dependencies, sorted. Raises ScheduleError naming the waiting actions if the ranks never finish."""
        return _sort(self)

    def warmup(self, rank: int) -> dict[int, int]:
        """How often the rank runs each of its stages forward before its first backward."""
        counts = dict.fromkeys(self.stages_of(rank), 0)
        for action in self.ranks[rank]:
            if action.kind != "F":
                break
            counts[action.stage] += 1
        return counts

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: " + " ".join(map(str, actions)) for r, actions in enumerate(self.ranks))


def _counts(table: Table, rank: int) -> np.ndarray:
    """Counts after every forward and every I, int [events, 2, stages]; raises if an action is missing, doubled or early."""
    column = {s: v for v, s in enumerate(table.stages_of(rank))}
    state = {(s, m): 0 for s in column for m in range(table.microbatches)}  # 0 -F-> 1 -B-> 3;  1 -I-> 2 -W-> 3
    steps = {("F", 0): (1, 0, 1, 0), ("B", 1): (3, 0, -1, 0), ("I", 1): (2, 1, -1, 1), ("W", 2): (3, 1, 0, -1)}
    now = np.zeros((2, len(column)), dtype=np.int64)
    seen = []
    for action in table.ranks[rank]:
        step = steps.get((action.kind, state.get((action.stage, action.microbatch), -1)))
        if step is None:
            raise ScheduleError(
                f"{table.name}: rank {rank} runs {action} where it cannot: not a stage of this rank "
                f"({sorted(column)}), not one of {table.microbatches} micro-batches, run twice, or before the action it "
                "follows (F, then B, or I then W)"
            )
        state[action.stage, action.microbatch] = step[0]
        now[0, column[action.stage]] += step[2]
        now[1, column[action.stage]] += step[3]
        if action.kind in "FI":
            seen.append(now.copy())
    left = [key for key, value in state.items() if value != 3]
    if left:
        s, m = left[0]
        raise ScheduleError(f"{table.name}: rank {rank} never finishes micro-batch {m} of stage {s}")
    return np.array(seen).reshape(-1, 2, len(column))


def maximal(vectors: np.ndarray) -> np.ndarray:
    """The rows that no other row dominates."""
    flat = np.unique(vectors.reshape(len(vectors), -1), axis=0)
    flat = flat[np.argsort(-flat.sum(axis=1), kind="stable")]  # what dominates a row has a larger sum
    kept = np.zeros((0, flat.shape[1]), dtype=flat.dtype)
    while len(flat):  # the first is maximal; what it dominates goes with it
        kept = np.concatenate([kept, flat[:1]])
        flat = flat[(flat > flat[0]).any(axis=1)]
    return np.unique(kept, axis=0).reshape(len(kept), *vectors.shape[1:])


@dataclass(frozen=True)
class Order:
    """Every action of a table, sorted by level (longest chain of dependencies), as indices for ``timeline.simulate``.

    Row 0 is an action that ended at time 0. For row i of level l (rows ``levels[l]:levels[l+1]``): ``previous`` = row of the
    action before it on its rank, ``needs`` = row whose result it waits for, ``duration`` = kind x stages + stage, ``boundary``
    = index of the transfer it starts (2 x boundary, + 1 for a gradient; the last index is none), ``link`` = row of the transfer
    before it from the same rank to the same rank. ``row_of[rank]``: rows of a rank's actions in order.
    """

    levels: np.ndarray
    previous: np.ndarray
    needs: np.ndarray
    duration: np.ndarray
    boundary: np.ndarray
    link: np.ndarray
    row_of: tuple[np.ndarray, ...]


def _producer(table: Table, action: Action) -> tuple[int, str, int] | None:
    """(stage, F or B, micro-batch) that an action waits for on another stage: B stands for B or I."""
    stage, kind, microbatch = action
    if kind == "F":
        return (stage - 1, "F", microbatch) if stage > 0 else None
    if kind in "BI":
        return (stage + 1, "B", microbatch) if stage < table.stages - 1 else None
    return None


def _levels(table: Table) -> list[tuple[int, int, int]]:
    """(level, rank, position) of every action, in an order in which they can run."""
    done: dict[tuple[int, str, int], int] = {}
    at, last, out = [0] * table.pp, [0] * table.pp, []
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(table.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                need = _producer(table, action)
                ready = 0 if need is None else done.get(need, -1)
                if ready < 0:
                    break
                last[rank] = max(last[rank], ready) + 1
                done[action.stage, "B" if action.kind == "I" else action.kind, action.microbatch] = last[rank]
                out.append((last[rank], rank, at[rank]))
                at[rank] += 1
                progress = True
    waiting = [(r, actions[at[r]]) for r, actions in enumerate(table.ranks) if at[r] < len(actions)]
    if waiting:
        said = ", ".join(f"rank {r} at {a} waits for {_named(_producer(table, a))}" for r, a in waiting)
        raise ScheduleError(f"{table.name}: the schedule never finishes (deadlock): {said}. Reorder these actions.")
    return sorted(out)


def _named(need: tuple[int, str, int] | None) -> str:
    return "nothing" if need is None else str(Action(*need))


def _sort(table: Table) -> Order:
    ordered = _levels(table)
    rows, stages = len(ordered) + 1, table.stages
    row_of = [np.zeros(len(actions), dtype=np.int64) for actions in table.ranks]
    for row, (_, rank, position) in enumerate(ordered, 1):
        row_of[rank][position] = row
    produced: dict[tuple[int, str, int], int] = {}
    previous, needs, link, duration = (np.zeros(rows, dtype=np.int64) for _ in range(4))
    boundary = np.full(rows, 2 * (stages - 1), dtype=np.int64)
    sent: dict[tuple[int, int], int] = {}
    for row, (_, rank, position) in enumerate(ordered, 1):
        action = table.ranks[rank][position]
        previous[row] = row_of[rank][position - 1] if position else 0
        need = _producer(table, action)
        needs[row] = 0 if need is None else produced[need]
        duration[row] = KINDS.index(action.kind) * stages + action.stage
        produced[action.stage, "B" if action.kind == "I" else action.kind, action.microbatch] = row
        to = {"F": action.stage + 1, "W": -1}.get(action.kind, action.stage - 1)
        if 0 <= to < stages and table.stage_rank[to] != rank:
            boundary[row] = 2 * min(action.stage, to) + (action.kind != "F")
            link[row] = sent.get((rank, table.stage_rank[to]), 0)
            sent[rank, table.stage_rank[to]] = row
    level = np.array([0] + [entry[0] for entry in ordered])
    starts = np.searchsorted(level, np.arange(1, level[-1] + 2))
    return Order(starts, previous, needs, duration, boundary, link, tuple(row_of))
