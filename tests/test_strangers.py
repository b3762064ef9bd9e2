"""Some of the models of ``tests.strangers``; the rest: ``python -m tests.strangers``, ``python -m tests.noisy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import noisy
from tests.strangers import FOUR, trials

SOME = {"pp": ["pairs", "sigmoid pairs", "nested", "triplets"], "zb": ["penalized"], "cp": ["copies of positions", "biased"],
        "tp": ["pairs of rows", "in memory", "a part in memory", "in memory by itself", "turned pairs", "repeats",
               "short numbers"],
        "dp": ["variance and covariance", "copies of samples", "no elements", "queue", "one norm twice", "dead codes",
               "broken up", "masked scatter by data", "local response"],
        "hsdp": ["sigmoid pairs"]}


DRAWN = {"anything, in micro-batches": ["pairs", "skips"], "cp x tp": ["rotary"], "cp": ["in memory"],
         "dp x tp": ["complex", "complex weights"]}


@pytest.mark.parametrize("way", SOME)
def test_models_are_equal(pool: Callable[[int], Any], way: str) -> None:
    """Through training, evaluation and training again."""
    for found in pool(4 if way in FOUR else 2).run(trials, way, SOME[way]):
        assert found == [(name, "equal") for name in SOME[way]]


@pytest.mark.parametrize("way", DRAWN)
def test_models_are_equal_in_layouts_that_are_drawn(pool: Callable[[int], Any], way: str) -> None:
    """Some operators have samples of their own on each device beside others that have features of all."""
    for found in pool(4).run(noisy.trials, way, DRAWN[way]):
        assert found == [(name, "equal") for name in DRAWN[way]]
