"""Some of the vision models of ``tests.vision``; the rest is ``python -m tests.vision``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vision import PLANS, outcomes


@pytest.mark.parametrize("name", ["donut", "hiera"])
def test_equal_under_every_plan(pool: Callable[[int], Any], name: str) -> None:
    assert pool(2).run(outcomes, name, 2) == [["equal"] * len(PLANS[2])] * 2


def test_statistics_of_a_batch_are_not_accumulated(pool: Callable[[int], Any]) -> None:
    """A batch norm in micro-batches is refused, on every rank, by its name; else it is equal."""
    for found in pool(2).run(outcomes, "resnet", 2):
        assert found[:3] == ["equal"] * 3
        assert found[3].startswith("refused: mw.batch_norm of resnet.embedder"), found[3]
        assert "microbatches=1" in found[3]
