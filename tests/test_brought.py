"""Some of the cases of ``tests.brought``; the rest: ``python -m tests.brought``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer

from meshwright.runtime.checks.empty import Made
from tests.brought import trials

SOME = {
    "pp": ["named", "not a number", "nested turned", "stars turned", "carried", "rivals in turns", "none becomes tensor"],
    "dp": ["thawed in between", "loss of a method", "loss of a buffer", "loss of itself"],
    "micro-batches": ["evaluated between", "orthogonal gradients", "odd strides"],
}


@pytest.mark.parametrize("way", SOME)
def test_what_users_bring_is_equal_or_refused(pool: Callable[[int], Any], way: str) -> None:
    """As ``CASES`` has it, on every rank."""
    names = SOME[way]
    for found in pool(2).run(trials, way, names):
        assert [what for what in found if not what[1]] == []
        assert [name for name, *_ in found] == names


def test_the_constructor_of_optimizers_is_torchs_own_again() -> None:
    """As soon as no parallel module with a pipeline is left: until then a stage may make one of nothing."""
    own: object = Optimizer.__init__
    first, second = (Made(torch.device("cpu")) for _ in range(2))
    AdamW([])
    assert [one.nothing for one in first.take()] == [True]
    assert Optimizer.__init__ is not own
    del first
    AdamW([])
    assert [one.nothing for one in second.take()] == [True, True]
    del second
    assert Optimizer.__init__ is own
    with pytest.raises(ValueError, match="empty"):
        AdamW([])
