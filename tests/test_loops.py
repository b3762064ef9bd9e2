"""Some of the loops of ``tests.loops``; the rest: ``python -m tests.loops``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.loops import trials

SOME = {
    "pp": ["one layer alone", "two calls", "swa", "filtered", "filtered to nothing", "one hook", "copied together",
           "teacher", "reduced by hand", "muon"],
    "tp": ["edited gradients", "scaler", "restored", "whole hooks", "in backward", "moved between", "exported"],
    "deferred": ["state around", "averaged copy", "looked at"],
}


@pytest.mark.parametrize("way", SOME)
def test_loops_are_equal_or_refused(pool: Callable[[int], Any], way: str) -> None:
    """Weights and what a loop says are those of one process; what is to be refused is, with its words, by every rank."""
    for found in pool(2).run(trials, way, SOME[way]):
        assert [what for what in found if not what[1]] == []
        assert [name for name, *_ in found] == SOME[way]
