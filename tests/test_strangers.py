"""Some of the models of ``tests.strangers``; the rest: ``python -m tests.strangers``, ``python -m tests.noisy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.errors import MeshwrightError, VerifyError
from meshwright.ir.graph import GraphError
from meshwright.ir.mesh import MeshError
from meshwright.ir.notation import RuleError
from meshwright.ir.pins import PinError
from meshwright.ir.sharding import ShardingError
from tests import noisy
from tests.strangers import FOUR, judge, trials

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


def _refused(error: MeshwrightError) -> str:
    return f"refused: {type(error).__name__}: {error}"


@pytest.mark.parametrize("error", [VerifyError("%y", "head", "x", "y"), ShardingError("2 axes"), RuleError("2 dims"),
                                   GraphError("no %y"), MeshError("no axis")], ids=lambda error: type(error).__name__)
def test_refusals_that_tell_nobody_what_to_do_are_faults(error: MeshwrightError) -> None:
    """On whichever rank."""
    fine = _refused(PinError("pin tp=3: 8 heads; pin 2"))
    assert judge([fine, fine])[0]
    assert judge(["equal", "equal"])[0]
    assert not judge([_refused(error), _refused(error)])[0]
    assert not judge([fine, _refused(error)])[0]
    assert not judge([fine, "equal"])[0]
