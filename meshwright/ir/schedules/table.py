"""A pipeline schedule as a table: what every rank does, in order, and who waits for whom.

A pipeline is a sequence of stages 0..S-1, each on one rank. A micro-batch goes forward through all of them and back
(``ir.schedules.action``); on one rank the actions run in the order of the table.

``Table`` checks at birth that every action is there once, after those that it follows; ``Table.order``, that the ranks never
wait for each other for ever. From the order alone follow how many micro-batches a rank holds at once (``in_flight``), what it
has done or left at the moments that a bound asks for (``margins``), and when values travel (``steps``). ``PipelineSchedule``
makes tables, ``meshwright.cost.timeline`` runs them on a clock, ``meshwright.runtime.pipeline`` on devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.ir.schedules.action import COMPUTED, Action, ScheduleError
from meshwright.ir.schedules.transfers import most_waiting, with_transfers


@dataclass(frozen=True)
class Left:
    """What is left of every stage's work after some moment of its rank: backwards, and gradients of weights, int [stages]."""

    backward: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True)
class Margins:
    """How much of its work a rank has done, or has left, at moments from which a bound counts. What is None is not asked for.

    * ``warm``: forwards of every stage before its rank's first backward, int [stages];
    * ``turn``: those before the first forward of its rank's last stage;
    * ``turned``: what is left after the last backward of the rank's last stage;
    * ``drained``: what is left after the rank's last forward.
    """

    warm: np.ndarray
    turn: np.ndarray | None = None
    turned: Left | None = None
    drained: Left | None = None


@dataclass(frozen=True)
class Table:
    """A schedule: for every rank its actions in order.

    * ``stage_rank[s]``: the rank that holds stage s;
    * ``early``: transfers start where their value is made, else where it is read (``ir.schedules.transfers``).

    Validated at birth: every stage runs each micro-batch forward once and then backward once (B, or I then W) on its rank.
    Whether the ranks wait for each other for ever is found by ``order``.
    """

    name: str
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]
    early: bool = True

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
        return bool((self.numbers[1] == _KINDS["I"]).any())

    @cached_property
    def starts(self) -> np.ndarray:
        """The place of every rank's first action among those of all ranks, and their number."""
        return np.cumsum([0, *map(len, self.ranks)])

    @cached_property
    def numbers(self) -> np.ndarray:
        """Stage, kind (its place in ``COMPUTED``, or -1) and micro-batch of every action, rank after rank, int [3, actions]."""
        flat = list(itertools.chain.from_iterable(self.ranks))
        if not flat:
            return np.zeros((3, 0), dtype=np.int64)
        stage, kind, microbatch = zip(*flat, strict=True)
        found = np.array([stage, [_KINDS.get(one, -1) for one in kind], microbatch])
        if found.dtype.kind not in "iu":
            raise ScheduleError(f"{self.name}: stages and micro-batches of actions are whole numbers, got {found.dtype}")
        return found

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
    def moments(self) -> tuple[tuple[np.ndarray, ...], ...]:
        """Per rank, for each of its stages, what the rank holds as an I of that stage runs, or a B where it has no W: int
        [k, 3, stages of the rank], ``in_flight`` with a third row, whether a stage has summed gradients of weights. They are
        there from its first B or W on; while that runs they come as what was saved goes."""
        return tuple(_moments(self, rank) for rank in range(self.pp))

    @cached_property
    def closing(self) -> tuple[tuple[np.ndarray, ...], ...]:
        """The same as a W of the stage runs, or a B beside it; of a stage that has no W, as the last B of the step does."""
        return tuple(_closing(self, rank) for rank in range(self.pp))

    @cached_property
    def mixed(self) -> bool:
        """Whether a stage runs whole backwards and split ones."""
        stage, kind, _ = self.numbers
        return bool(np.isin(stage[kind == _KINDS["B"]], stage[kind == _KINDS["W"]]).any())

    @cached_property
    def side_by_side(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Per rank, the ``moments`` of all its stages in one matrix, for sums over the stages in one product: float
        [moments, 4 x stages of the rank], a row of counts after the other and the third again of all but the stage that
        runs; and where each stage's begin."""
        return tuple(map(_side_by_side, self.moments))

    @cached_property
    def closing_side_by_side(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """The same of ``closing``."""
        return tuple(map(_side_by_side, self.closing))

    @cached_property
    def order(self) -> Order:
        """The dependencies, sorted. Raises ScheduleError naming the waiting actions if the ranks never finish."""
        return _sort(self)

    @cached_property
    def margins(self) -> Margins:
        """What every rank has done, or has left, at the moments from which bounds count."""
        _ = self.order  # of a table that comes to an end the moments are where they are thought to be
        return _margins(self)

    @cached_property
    def begins(self) -> dict[int, int]:
        """The stage with which each rank begins to which a micro-batch comes straight: all ranks on the way begin with it."""
        found, first = {0: self.stages_of(0)[0]}, [actions[0] for actions in self.ranks]
        for rank, (stage, kind, microbatch) in enumerate(first):
            way = enumerate(self.stage_rank[: stage + 1])
            if kind == "F" and all(first[on] == (before, kind, microbatch) for before, on in way):
                found[rank] = stage
        return found

    @cached_property
    def steps(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of every rank with its sends and receives, as they run."""
        _ = self.order  # which names the actions that wait for each other for ever
        return with_transfers(self.ranks, self.stage_rank, self.early)

    @cached_property
    def waiting(self) -> int:
        """Of the values and gradients that a rank was sent, the most that wait to be read at once."""
        return most_waiting(self.steps, self.stage_rank)

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: " + " ".join(map(str, actions)) for r, actions in enumerate(self.ranks))


def _counts(table: Table, rank: int) -> np.ndarray:
    """Counts after every forward and every I, int [events, 2, stages]; raises if an action is missing, doubled or early."""
    own, count = table.stages_of(rank), table.microbatches
    stage, kind, microbatch = (column[table.starts[rank] : table.starts[rank + 1]] for column in table.numbers)
    column = np.full(table.stages + 1, -1)
    column[list(own)] = np.arange(len(own))
    of_column = column[np.where((stage >= 0) & (stage < table.stages), stage, table.stages)]
    known = (of_column >= 0) & (microbatch >= 0) & (microbatch < count) & (kind >= 0)

    # every micro-batch of every stage runs F, then B, or I and then W
    key = np.where(known, of_column * count + microbatch, len(own) * count)
    place, last, passed = np.empty_like(key), np.empty_like(key), np.arange(len(key))
    sort = np.argsort(key, kind="stable")
    begins = np.searchsorted(key[sort], key[sort])
    place[sort] = passed - begins
    last[sort] = np.where(passed > begins, kind[sort[passed - 1]], -1)
    legal = known & (_NEXT[np.minimum(place, 3), last] >> np.maximum(kind, 0) & 1 > 0)
    if not legal.all():
        action = table.ranks[rank][int(np.argmin(legal))]
        raise ScheduleError(
            f"{table.name}: rank {rank} runs {action} where it cannot: not a stage of this rank "
            f"({sorted(own)}), not one of {table.microbatches} micro-batches, run twice, or before the action it "
            "follows (F, then B, or I then W)"
        )
    done = np.bincount(key[np.isin(kind, _LAST)], minlength=len(own) * count) > 0
    if not done.all():
        s, m = divmod(int(np.argmin(done)), count)
        raise ScheduleError(f"{table.name}: rank {rank} never finishes micro-batch {m} of stage {own[s]}")
    changes = np.zeros((len(key), 2, len(own)), dtype=np.int64)
    changes[passed, :, of_column] = _CHANGES[kind]
    return np.asarray(changes.cumsum(axis=0)[np.isin(kind, _SEEN)])


def _moments(table: Table, rank: int) -> tuple[np.ndarray, ...]:
    """Counts before every I of each stage; where it has none, before every B and after the first."""
    column, kind, before, after = _walked(table, rank)
    found = list[np.ndarray]()
    for at in range(len(table.stages_of(rank))):
        halves, whole = ((column == at) & (kind == _KINDS[name]) for name in "IB")
        of = before[halves] if halves.any() else np.concatenate([before[whole], after[np.flatnonzero(whole)[:1]]])
        found.append(maximal(of))
    return tuple(found)


def _closing(table: Table, rank: int) -> tuple[np.ndarray, ...]:
    """Counts before every W of each stage, and every B beside these; where it has no W, of one micro-batch beside all sums, if
    there are others."""
    column, kind, before, _ = _walked(table, rank)
    found = list[np.ndarray]()
    for at in range(before.shape[2]):
        counts = before[np.isin(kind, _LAST) & (column == at)].copy()
        if not ((kind == _KINDS["W"]) & (column == at)).any():
            counts = np.zeros((1, 3, before.shape[2]), dtype=np.int64)
            counts[:, 0, at], counts[:, 2] = 1, table.microbatches > 1
        found.append(maximal(counts))
    return tuple(found)


def _walked(table: Table, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of a rank's actions the stage, among its own, the kind, and counts before and after: int [actions, 3, stages]."""
    own = table.stages_of(rank)
    stage, kind, _ = (column[table.starts[rank] : table.starts[rank + 1]] for column in table.numbers)
    column = np.searchsorted(own, stage)
    ends = np.flatnonzero(np.isin(kind, _LAST))
    first = ends[np.unique(column[ends], return_index=True)[1]]
    changes = np.zeros((len(kind), 3, len(own)), dtype=np.int64)
    changes[np.arange(len(kind)), :2, column] = _CHANGES[kind]
    changes[first, 2, column[first]] = 1
    after = changes.cumsum(axis=0)
    return column, kind, after - changes, after


def _side_by_side(running: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    counts, lengths = np.concatenate(running), [len(one) for one in running]
    runs = np.repeat(np.arange(len(running)), lengths)
    others = counts[:, 2] * (np.arange(len(running)) != runs[:, None])
    wide = np.concatenate([counts.reshape(len(counts), -1), others], axis=1).astype(np.float64)
    return wide, np.cumsum([0, *lengths[:-1]])


_KINDS: Mapping[str, int] = {kind: number for number, kind in enumerate(COMPUTED)}
_CHANGES = np.array([(1, 0), (-1, 0), (-1, 1), (0, -1)])
"""What each kind adds to the micro-batches held between F and B or I, and to those between I and W."""
_LAST, _SEEN = [_KINDS["B"], _KINDS["W"]], [_KINDS["F"], _KINDS["I"]]
_NEXT = np.zeros((4, len(COMPUTED) + 1), dtype=np.int64)
_NEXT[0, -1] = 1 << _KINDS["F"]
_NEXT[1, _KINDS["F"]] = 1 << _KINDS["B"] | 1 << _KINDS["I"]
_NEXT[2, _KINDS["I"]] = 1 << _KINDS["W"]
"""The kinds, as bits, that may come as the n-th after a kind for one micro-batch of one stage."""


def maximal(vectors: np.ndarray) -> np.ndarray:
    """The rows that no other row dominates."""
    flat = _distinct(vectors.reshape(len(vectors), -1))
    flat = flat[np.argsort(-flat.sum(axis=1), kind="stable")]  # what dominates a row has a larger sum
    kept = []
    while len(flat):  # the first is maximal; what it dominates goes with it
        kept.append(flat[0])
        flat = flat[(flat > flat[0]).any(axis=1)]
    return _distinct(np.array(kept).reshape(len(kept), -1)).reshape(len(kept), *vectors.shape[1:])


def _distinct(rows: np.ndarray) -> np.ndarray:
    """Each row once, in the order of their numbers."""
    if len(rows) < 2 or not rows.shape[1]:
        return rows[:1]
    rows = rows[np.lexsort(rows.T[::-1])]
    return np.asarray(rows[np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])])


def _margins(table: Table) -> Margins:
    warm, turn, *after = np.zeros((6, table.stages), dtype=np.int64)
    for rank, actions in enumerate(table.ranks):
        last = table.stages_of(rank)[-1]
        forwards = [i for i, action in enumerate(actions) if action.kind == "F"]
        backwards = [i for i, action in enumerate(actions) if action.kind in "BI"]
        first = next(i for i in forwards if actions[i].stage == last)
        turned = max(i for i in backwards if actions[i].stage == last) + 1
        parts = [(actions[: backwards[0]], "F"), (actions[:first], "F")]
        parts += [(actions[at:], kinds) for at in (turned, forwards[-1] + 1) for kinds in ("BI", "BW")]
        for into, (part, kinds) in zip((warm, turn, *after), parts, strict=True):
            np.add.at(into, [action.stage for action in part if action.kind in kinds], 1)
    return Margins(warm, turn, Left(*after[:2]), Left(*after[2:]))


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


def _sort(table: Table) -> Order:
    stages, count = table.stages, table.microbatches
    starts, (stage, kind, microbatch) = table.starts, table.numbers
    rank = np.repeat(np.arange(table.pp), np.diff(starts))
    last, forward, weights = stages - 1, kind == COMPUTED.index("F"), kind == COMPUTED.index("W")
    back = 1 - forward

    # places of actions from 1; 0 is what ended at time 0
    maker = np.zeros((2, stages, count), dtype=np.int64)
    made = np.flatnonzero(~weights)
    maker[back[made], stage[made], microbatch[made]] = made + 1
    waits = np.where(forward, stage > 0, ~weights & (stage < last))
    source = np.clip(stage + np.where(forward, -1, 1), 0, last)
    needs = np.where(waits, maker[back, source, microbatch], 0)

    level = _levels(table, needs.tolist(), starts.tolist())
    by_level = np.argsort(level, kind="stable")
    row = np.zeros(len(level) + 1, dtype=np.int64)
    row[by_level + 1] = np.arange(1, len(level) + 1)
    first = np.zeros(len(level), dtype=bool)
    first[starts[:-1]] = True
    before = np.where(first, 0, row[:-1])

    to = np.where(forward, stage + 1, np.where(weights, -1, stage - 1))
    holder = np.array(table.stage_rank)[np.clip(to, 0, last)]
    sends = (to >= 0) & (to < stages) & (holder != rank)
    boundary = np.where(sends, 2 * np.minimum(stage, to) + ~forward, 2 * last)
    link = np.zeros(len(level), dtype=np.int64)
    sent = np.flatnonzero(sends)
    pair = (rank * table.pp + holder)[sent]
    sent, pair = sent[grouped := np.argsort(pair, kind="stable")], pair[grouped]
    again = np.flatnonzero(pair[1:] == pair[:-1])
    link[sent[again + 1]] = row[sent[again] + 1]

    def of_rows(values: np.ndarray, zero: int) -> np.ndarray:
        return np.concatenate([[zero], values[by_level]])

    levels = np.searchsorted(np.concatenate([[0], level[by_level]]), np.arange(1, level.max() + 2))
    return Order(
        levels, of_rows(before, 0), of_rows(row[needs], 0), of_rows(kind * stages + stage, 0), of_rows(boundary, 2 * last),
        of_rows(link, 0), tuple(np.split(row[1:], starts[1:-1])),
    )


def _levels(table: Table, needs: list[int], starts: list[int]) -> np.ndarray:
    """The level of every action, rank after rank. ``needs``: for each the place, from 1, of the one whose result it waits for;
    ``starts``: the place of each rank's first, and the end. Raises ScheduleError if the ranks wait for each other for ever."""
    level, at, progress = [0] + [-1] * len(needs), starts[:-1], True
    while progress:
        progress = False
        for rank, end in enumerate(starts[1:]):
            place = at[rank]
            now = level[place] if place > starts[rank] else 0
            while place < end and (ready := level[needs[place]]) >= 0:
                now = max(now, ready) + 1
                place += 1
                level[place] = now
            progress, at[rank] = progress or place > at[rank], place
    waiting = [(r, table.ranks[r][place - starts[r]]) for r, place in enumerate(at) if place < starts[r + 1]]
    if waiting:
        said = ", ".join(f"rank {r} at {a} waits for {a.needs(table.stages - 1) or 'nothing'}" for r, a in waiting)
        raise ScheduleError(f"{table.name}: the schedule never finishes (deadlock): {said}. Reorder these actions.")
    return np.array(level[1:])
