"""What is promised of calls, modes and plans holds under tensor parallelism too; the rest: ``python -m tests.ways``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.ways import trials


def test_what_is_promised_holds_under_tensor_parallelism(pool: Callable[[int], Any]) -> None:
    for found in pool(2).run(trials, "tp", ["calls", "modes", "plans", "around"]):
        assert len(found) == 37
        assert [trial for trial in found if not trial[1]] == []
