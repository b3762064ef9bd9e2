"""Schedules of the tests' own, and what worker processes do with them.

``eager``: 1F1B with one more forward ahead. ``backwards``: every rank holds two stages that follow each other, the first ones
on the last rank; forwards run from the last micro-batch to the first, backwards from the first on, every other one split.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from tests.models import make
from tests.pipelines import check, check_outputs


def eager(pp: int, virtual_stages: int, microbatches: int) -> list[list[str]]:
    """One more forward than 1F1B before the first backward."""
    ranks = []
    for rank in range(pp):
        ahead = min(microbatches, pp - rank + 1)
        order = [f"{rank}F{m}" for m in range(ahead)]
        for m in range(microbatches):
            order += [f"{rank}B{m}"] + [f"{rank}F{ahead + m}"] * (ahead + m < microbatches)
        ranks.append(order)
    return ranks


def backwards(pp: int, virtual_stages: int, microbatches: int) -> list[str]:
    """All forwards, from the last micro-batch on; then all backwards from the first one on, gradients of weights last."""
    ranks = []
    for rank in range(pp):
        first = 2 * (pp - 1 - rank)
        order = [f"{first + v}F{m}" for m in reversed(range(microbatches)) for v in (0, 1)]
        order += [f"{first + v}{'IB'[m % 2]}{m}" for m in range(microbatches) for v in (1, 0)]
        order += [f"{first + v}W{m}" for m in range(0, microbatches, 2) for v in (0, 1)]
        ranks.append(" ".join(order))
    return ranks


def pairs_from_the_end(pp: int, virtual_stages: int) -> list[int]:
    """Two stages that follow each other on every rank, the first ones on the last."""
    return [pp - 1 - stage // 2 for stage in range(2 * pp)]


def too_many(pp: int, virtual_stages: int, microbatches: int) -> str | None:
    """More than half a dozen micro-batches are refused."""
    return "it takes at most six micro-batches" if microbatches > 6 else None


def register() -> None:
    """Both of them, in the current context."""
    mw.register_schedule("eager", eager)
    mw.register_schedule("backwards", backwards, stages=2, placement=pairs_from_the_end, split=True, refuses=too_many)


def registered(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function returns where both are registered; elsewhere they are not known."""

    def scenario() -> Any:
        register()
        return function(*args, **options)

    return contextvars.copy_context().run(scenario)


def check_registered(rank: int, name: str, plans: Mapping[str, Mapping[str, Any]], double: bool, forward: str) -> list[str]:
    """Train under each plan as ``check`` does; under the one called ``forward`` outputs too."""
    found: list[str] = registered(check, rank, name, plans, None, double)
    if forward:
        registered(check_outputs, rank, name, [plans[forward]])
    return found


def check_strangers(rank: int, name: str, path: str) -> None:
    """A plan that one process does not know the schedule of, and one that it orders otherwise, are refused on all of them."""
    model, _ = make(name)
    mesh = init_device_mesh("cpu", (2,))

    def scenario(order: Callable[..., Any] | None, message: str) -> None:
        if order is not None:
            mw.register_schedule("eager", order)
        with pytest.raises(mw.PlanError, match=message):
            mw.autoparallel(model, mesh, plan=path)

    cases = (
        (None, r"pipeline.schedule: schedule 'eager' is unknown.*register_schedule"),
        (plain, r"ranks \[1\] order the plan's"),
    )
    for other, message in cases:
        contextvars.copy_context().run(scenario, eager if rank == 0 else other, message)


def plain(pp: int, virtual_stages: int, microbatches: int) -> list[list[str]]:
    """All forwards, then all backwards."""
    return [[f"{rank}{kind}{m}" for kind in "FB" for m in range(microbatches)] for rank in range(pp)]
