"""How long a solve may go on, counted in what it does and not by a clock: it ends at the same place on every machine."""

from __future__ import annotations

from dataclasses import dataclass

ENTRY, STEP, LINEAR, INTEGER, ITERATION = 8e-9, 1e-5, 1e-4, 5e-4, 4.5e-7
"""Seconds of a table entry and of a step of an elimination, of a column in a linear and in an integer program, and of a column
in a simplex iteration of the latter's search; measured, on one core."""

ROOT = 3.5
"""Simplex iterations of a root for every column: measured, 3.4 where columns are 800 to 900, fewer where they are few."""
VISITED = 60
"""Simplex iterations of a node: measured, 40 to 100 where columns are a thousand."""


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
