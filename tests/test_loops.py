"""Some of the loops of ``tests.loops``; the rest: ``python -m tests.loops``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.loops import trials

SOME = {
    "pp": ["one layer alone", "several optimizers", "two calls", "swa"], "tp": ["edited gradients", "scaler", "restored"],
    "deferred": ["state around", "averaged copy", "wrapped"],
}


@pytest.mark.parametrize("way", SOME)
def test_loops_are_equal(pool: Callable[[int], Any], way: str) -> None:
    """Weights and what a loop says are those of one process."""
    for found in pool(2).run(trials, way, SOME[way]):
        assert found == [(name, True, "equal") for name in SOME[way]]
