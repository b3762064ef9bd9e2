"""Some of the cases of ``tests.brought`` and ``tests.scripts``; the rest: ``python -m tests.brought``, ``tests.scripts``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer

from meshwright.errors import CheckpointError
from meshwright.runtime.checks.edits import Role
from meshwright.runtime.checks.empty import Made
from tests import scripts
from tests.brought import trials

SOME = {
    "pp": ["named", "not a number", "nested turned", "stars turned", "carried", "rivals in turns", "none becomes tensor"],
    "dp": ["thawed in between", "loss of a method", "loss of a buffer", "loss of itself"],
    "micro-batches": ["evaluated between", "orthogonal gradients", "odd strides"],
}


SCRIPTS = {
    "pp": ["rates by number", "rates by number later", "rates reset by number", "the last alone, long",
           "all frozen but the last", "rates by names later", "rates by kind", "rates by layer", "longer by copies", "ppo",
           "noise scale", "gradients by number", "replaced by number", "foreach by number", "made by foreach", "third alone",
           "none for the last", "gradients by layer", "gradients by kind", "decayed by shape", "gradients by number, one each",
           "every third frozen", "thirds", "biases frozen"],
    "tp": ["asam", "lora", "moco", "dpo"],
    "micro-batches": ["distilled", "thawed with groups"],
}


@pytest.mark.parametrize("way", SOME)
def test_what_users_bring_is_equal_or_refused(pool: Callable[[int], Any], way: str) -> None:
    """As ``CASES`` has it, on every rank."""
    names = SOME[way]
    for found in pool(2).run(trials, way, names):
        assert [what for what in found if not what[1]] == []
        assert [name for name, *_ in found] == names


@pytest.mark.parametrize("way", SCRIPTS)
def test_scripts_are_equal_or_refused(pool: Callable[[int], Any], way: str) -> None:
    """As ``scripts.SCRIPTS`` has it, on every rank."""
    names = SCRIPTS[way]
    for found in pool(2).run(scripts.trials, way, names):
        assert [what for what in found if not what[1]] == []
        assert [name for name, *_ in found] == names


def test_moments_of_other_parameters_are_refused() -> None:
    """An optimizer's state dict knows parameters by numbers, which count what the rank's own stages hold."""
    made = Made(torch.device("cpu"))

    def optimizer(*names: str) -> AdamW:
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in names]
        for name, p in zip(names, parameters, strict=True):
            p.__dict__["_role"] = Role(name, True)
        return AdamW(parameters)

    one, two, three = optimizer("0.w", "1.w"), optimizer("0.w", "2.w"), optimizer("0.w", "1.w")
    three.load_state_dict(one.state_dict())
    with pytest.raises(CheckpointError, match="by their numbers"):
        two.load_state_dict(one.state_dict())
    assert [one.nothing for one in made.take({})] == [False] * 5


def test_the_constructor_of_optimizers_is_torchs_own_again() -> None:
    """As soon as no parallel module with a pipeline is left: until then a stage may make one of nothing."""
    own, add = Optimizer.__init__, Optimizer.add_param_group
    first, second = (Made(torch.device("cpu")) for _ in range(2))
    AdamW([])
    assert [one.nothing for one in first.take({})[2:]] == [True]
    assert Optimizer.__init__ is not own
    del first
    AdamW([])
    assert [one.nothing for one in second.take({})[2:]] == [True, True]
    del second
    assert (Optimizer.__init__, Optimizer.add_param_group) == (own, add)
    with pytest.raises(ValueError, match="empty"):
        AdamW([])
