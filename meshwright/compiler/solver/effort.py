"""How long a solve may go on, counted in what it does and not by a clock: it ends at the same place on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

ENTRY, STEP, LINEAR, INTEGER, ITERATION = 8e-9, 1e-5, 1e-4, 5e-4, 4.5e-7
"""Seconds of a table entry and of a step of an elimination, of a column in a linear and in an integer program, and of a column
in a simplex iteration of the latter's search; measured, on one core."""

ROOT = 3.5
"""Simplex iterations of a root for every column: measured, 3.4 where columns are 800 to 900, fewer where they are few."""
VISITED = 60
"""Simplex iterations of a node: measured, 40 to 100 where columns are a thousand."""

WORK: Mapping[str, float] = {
    "placement": 0.028, "choice of a placement": 9.5e-5, "microsecond of a solver": 7.5e-7, "experts shared out": 0.0043,
    "row of a variant": 1.35e-4, "alone": 0.003, "packing": 0.0024, "unit of ranks alone": 8.5e-6,
    "rank of divided units": 6e-4, "stage to cut": 0.0011, "stage cut": 6e-7,
    "action simulated": 4e-8, "stage that does not fit": 0.0043, "pipeline timed": 0.0075,
    "nanosecond of programs": 1.15e-9, "stage glanced at": 5.5e-4, "operator of a plan": 1.7e-4,
}
"""Seconds of each kind of work of a search beside its solves, as ``Evaluator.work`` counts it: measured, on one core. They only
decide where a search ends, and enter neither a price nor a bound."""


class Takes(NamedTuple):
    """Seconds of a linear program that is solved, beside what Python takes to write it: to ``begin``, of each ``number`` in it,
    of each that is ``new`` to the solver, and of an iteration for each of its rows (``step``); measured, on one core."""

    begin: float
    number: float
    new: float
    step: float

    def seconds(self, numbers: int, new: int, rows: int, iterations: int) -> float:
        """Of a program of so many ``rows``."""
        return self.begin + self.number * numbers + self.new * new + self.step * rows * iterations


HIGHS, GLOP, SCIP = Takes(1.9e-3, 1.8e-6, 0.0, 2.1e-8), Takes(0.0, 3.2e-7, 1.6e-6, 4.7e-8), Takes(0.0, 5e-6, 0.0, 1.3e-7)
"""As ``linear`` uses these solvers: seen, 264 to 518 programs of six searches each, within 8, 29 and 21 %."""


@dataclass
class Effort:
    """Nominal seconds spent on a solve and all searches that it starts, and the ``limit`` of them."""

    limit: float
    spent: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the limit is reached."""
        return self.spent >= self.limit

    @property
    def part(self) -> float:
        """The part of the limit that is spent, 0 to 1."""
        return min(1.0, self.spent / self.limit) if self.limit > 0.0 else 1.0

    def affords(self, columns: int) -> bool:
        """Whether what is left is enough for the root of an integer program over so many columns."""
        return self.spent + (INTEGER + ITERATION * ROOT * columns) * columns <= self.limit

    def nodes(self, columns: int, most: int) -> int:
        """How many nodes an integer program over so many columns may visit with what is left, 1 to ``most``."""
        left = max(0.0, self.limit - self.spent - INTEGER * columns)
        return max(1, int(min(most, left / (ITERATION * VISITED * columns))))

    def priced(self, entries: int, steps: int) -> None:
        """Count an elimination."""
        self.spent += ENTRY * entries + STEP * steps

    def relaxed(self, columns: int) -> None:
        """Count a linear program over so many columns."""
        self.spent += LINEAR * columns

    def chosen(self, columns: int, iterations: int) -> None:
        """Count an integer program, whose search took so many simplex iterations."""
        self.spent += (INTEGER + ITERATION * iterations) * columns
