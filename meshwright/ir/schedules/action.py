"""One piece of a pipeline rank's work, written as ``torch.distributed.pipelining`` writes it. ::

    action = stage kind microbatch       1F0 0B3 2I1 2W1
    kind   = "F" forward | "B" whole backward | "I" gradient of the input | "W" gradient of the weights   (B = I then W)
             | "SEND_F" "RECV_F" a value goes to the next stage | "SEND_B" "RECV_B" a gradient goes to the stage before

    F of stage s waits for F of s - 1, B or I of stage s for B or I of s + 1, for the same micro-batch
"""

from __future__ import annotations

import re
from typing import NamedTuple

from meshwright.errors import MeshwrightError

COMPUTED = "FBIW"
"""The kinds that a schedule orders; transfers follow from them."""

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
        """The action that prints as ``text``. Raises ScheduleError if none does."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action: expected stage, one of F B I W, micro-batch, such as 1F0")
        return cls(int(match[1]), match[2], int(match[3]))

    def needs(self, last: int) -> Action | None:
        """The action of another stage whose result this one waits for, of ``last`` + 1 stages. B stands for B or I.

        >>> Action(1, "F", 2).needs(3), Action(1, "I", 2).needs(3), Action(0, "F", 2).needs(3)
        (0F2, 2B2, None)
        """
        stage, kind, microbatch = self
        if kind == "F":
            return Action(stage - 1, "F", microbatch) if stage > 0 else None
        return Action(stage + 1, "B", microbatch) if kind in "BI" and stage < last else None

    @property
    def gives(self) -> Action:
        """The action as those name it that wait for its result: B for I."""
        return Action(self.stage, "B", self.microbatch) if self.kind == "I" else self
