"""A pipeline schedule as one object: whoever knows it knows all that planning, replaying and running ask of it.

    orders       in which order every rank works: (pp, stages a rank, micro-batches) -> a line of actions for every rank
    stages       how many stages a rank holds, and where they lie (``placement``)
    refuses      which settings it cannot run, with the reason
    split        whether some backward is split into I and W; what a plan may then not ask follows (``ir.schedules.book``)
    closed       closed forms of what its tables say; without them bounds are taken from the table, or left out

S = pp x virtual_stages stages lie on pp ranks::

    loop    stage s on rank s mod pp                vee    (two stages a rank) 0 1 .. pp-1 pp-1 .. 1 0
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.ir.schedules.action import Action, ScheduleError
from meshwright.ir.schedules.table import Left, Margins, Table

Line = Iterable[Action | str] | str
"""Actions of a rank in order: ``Action``s, or as they print, one by one or in one text."""
Orders = Callable[[int, int, int], Iterable[Line]]
Placement = Callable[[int, int], Sequence[int]]
Refusal = Callable[[int, int, int], str | None]


def loop(pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Stage s on rank s mod pp.

    >>> loop(2, 2)
    (0, 1, 0, 1)
    """
    return tuple(s % pp for s in range(pp * virtual_stages))


def vee(pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Down the ranks and up again: the first and the last stage lie on rank 0.

    >>> vee(2, 2)
    (0, 1, 1, 0)
    """
    return (*range(pp), *reversed(range(pp)))


def anything(pp: int, virtual_stages: int, microbatches: int) -> str | None:
    """No setting is refused."""
    return None


@dataclass(frozen=True)
class ClosedForms:
    """Closed forms of what the tables of a schedule say, so that a search can bound settings without making their tables.

    * ``warm(pp, virtual_stages, microbatches)``, ``turn(...)``: as in ``Margins``; what is left is then ``turn`` and ``warm``
      again; without ``turn`` none of it is asked for;
    * ``waiting(pp, virtual_stages, microbatches)``: at least ``Table.waiting``;
    * ``in_flight(pp, microbatches)``: int [pp, k, 3, 3], how many micro-batches a rank of several stages holds at some moments,
      whatever the number of its stages: of its first stage, of each one between, of its last one;
      [.., 0, :] between F and B (or I), [.., 1, :] between I and W; [.., 2, :]: whether it has summed gradients then, 0 where
      that is not known;
    * ``alone(pp, microbatches)``: int [pp, k, 3], the same of ranks that hold one stage;
    * ``holds(pp, virtual_stages, microbatches)``: micro-batches between F and B (or I) of the first stage at once, at most;
    * ``forwards_first``: every rank runs all forwards before its first backward;
    * ``turns``: the stages lie as a V, so that the last one is on rank 0;
    * ``mixed``: what ``in_flight`` lists is held as a whole backward runs of a stage that splits others.

    A rank may hold more at other moments; what is listed its table does hold at once.
    """

    warm: Callable[[int, int, int], np.ndarray]
    waiting: Callable[[int, int, int], int]
    turn: Callable[[int, int, int], np.ndarray] | None = None
    in_flight: Callable[[int, int], np.ndarray] | None = None
    alone: Callable[[int, int], np.ndarray] | None = None
    holds: Callable[[int, int, int], int] | None = None
    forwards_first: bool = False
    turns: bool = False
    mixed: bool = False


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule by name.

    * ``orders(pp, virtual_stages, microbatches)``: for every rank its actions in order;
    * ``stages``: how many stages a rank holds, None for any number;
    * ``placement(pp, virtual_stages)``: the rank of every stage;
    * ``refuses(pp, virtual_stages, microbatches)``: why a setting cannot be run, or None;
    * ``split``: some backward is split into the gradients of the input and of the weights;
    * ``usual``: the stages a rank that it is tried with first where any number can be run;
    * ``early``: see ``Table``;
    * ``closed``: closed forms, if there are some.
    """

    name: str
    orders: Orders
    stages: int | None = 1
    placement: Placement = loop
    refuses: Refusal = anything
    split: bool = False
    usual: int = 1
    early: bool = True
    closed: ClosedForms | None = None

    def illegal(self, pp: int, virtual_stages: int, microbatches: int) -> str | None:
        """Why a setting cannot be run, with the nearest that can; None if it can."""
        if min(pp, virtual_stages, microbatches) < 1:
            return f"pp, virtual_stages and microbatches must be at least 1, got {pp}, {virtual_stages}, {microbatches}"
        asked = f"{self.name} with pp={pp}, virtual_stages={virtual_stages}, microbatches={microbatches}: "
        if self.stages not in (None, virtual_stages):
            return asked + f"it takes {self.stages} stage(s) a rank; nearest legal: virtual_stages={self.stages}"
        reason = self._refuses(pp, virtual_stages, microbatches)
        if reason is None:
            return None
        near = [
            next((m for m in counts if self._refuses(pp, virtual_stages, m) is None), None)
            for counts in (range(microbatches - 1, 0, -1), range(microbatches + 1, microbatches + 2 * pp + 1))
        ]
        legal = " or ".join(str(m) for m in near if m is not None)
        return asked + reason + (f"; nearest legal: microbatches={legal}" if legal else "")

    def stage_rank(self, pp: int, virtual_stages: int) -> tuple[int, ...]:
        """The rank of every stage. Raises ScheduleError if not every rank holds as many."""
        lies = tuple(self._asked("placement", self.placement, pp, virtual_stages))
        if Counter(lies) != dict.fromkeys(range(pp), virtual_stages):
            raise ScheduleError(
                f"schedule {self.name!r}: placement({pp}, {virtual_stages}) is {lies}; expected the rank of each of "
                f"{pp * virtual_stages} stages, {virtual_stages} of them on each of {pp} ranks"
            )
        return lies

    def table(self, pp: int, virtual_stages: int, microbatches: int) -> Table:
        """The order in which every rank works. Raises ScheduleError for a setting that is refused, and for actions that are
        no schedule."""
        return _table(self, pp, virtual_stages, microbatches)

    def margins(self, pp: int, virtual_stages: int, microbatches: int) -> Margins:
        """What ranks have done and left at the moments from which bounds count."""
        return _margins(self, pp, virtual_stages, microbatches)

    def waiting(self, pp: int, virtual_stages: int, microbatches: int) -> int:
        """Of values and gradients that a rank was sent, the most that wait to be read at once."""
        if self.closed is not None:
            return self.closed.waiting(pp, virtual_stages, microbatches)
        return self.table(pp, virtual_stages, microbatches).waiting

    def _refuses(self, pp: int, virtual_stages: int, microbatches: int) -> str | None:
        reason: str | None = self._asked("refuses", self.refuses, pp, virtual_stages, microbatches)
        return reason

    def _asked(self, what: str, function: Callable[..., Any], *numbers: int) -> Any:
        """What one of the schedule's functions says. What it raises is an error of the schedule."""
        try:
            return function(*numbers)
        except MeshwrightError:
            raise
        except Exception as error:
            asked = f"{what}({', '.join(map(str, numbers))})"
            raise ScheduleError(f"schedule {self.name!r}: {asked} raised {type(error).__name__}: {error}") from error


@functools.lru_cache(maxsize=32)
def _table(schedule: PipelineSchedule, pp: int, virtual_stages: int, microbatches: int) -> Table:
    reason = schedule.illegal(pp, virtual_stages, microbatches)
    if reason is not None:
        raise ScheduleError(reason)
    ranks = schedule._asked("order", lambda *setting: _read(schedule.orders(*setting)), pp, virtual_stages, microbatches)
    table = Table(schedule.name, microbatches, ranks, schedule.stage_rank(pp, virtual_stages), schedule.early)
    if table.split and not schedule.split:
        raise ScheduleError(f"schedule {schedule.name!r} runs I and W apart, but is not said to split the backward: register "
                            "it with split=True")
    _ = table.order  # a table that never finishes is none
    return table


def _read(lines: Iterable[Line]) -> tuple[tuple[Action, ...], ...]:
    """Actions of every rank, however they were written."""
    def action(one: str | tuple[int, str, int]) -> Action:
        return Action.parse(one) if isinstance(one, str) else Action(*one)

    parts = (line.split() if isinstance(line, str) else line for line in lines)
    return tuple(tuple(one if type(one) is Action else action(one) for one in part) for part in parts)


@functools.lru_cache(maxsize=4096)
def _margins(schedule: PipelineSchedule, pp: int, virtual_stages: int, microbatches: int) -> Margins:
    closed = schedule.closed
    if closed is None:
        return schedule.table(pp, virtual_stages, microbatches).margins
    warm = closed.warm(pp, virtual_stages, microbatches)
    if closed.turn is None:
        return Margins(warm)
    turn = closed.turn(pp, virtual_stages, microbatches)

    def left(backwards: np.ndarray) -> Left:
        """With gradients of weights, which lag behind the backwards by as many as the rank: at most so many."""
        weights = backwards.copy()
        weights[-pp:] = np.minimum(backwards[-pp:] + np.arange(pp) + 1, microbatches)
        return Left(backwards, weights)

    return Margins(warm, turn, left(turn), left(warm))
