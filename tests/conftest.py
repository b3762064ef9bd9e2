"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.pool import Pool


@pytest.fixture(autouse=True)
def _drawn_numbers() -> None:
    """Every test draws the same numbers in every run, whichever tests ran before it in the same process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _workers() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture
def pool(_workers: Pool) -> Callable[[int], Any]:
    """``pool(world=4).run(fn, *args)``: the results of ``fn(rank, *args)`` on ``world`` processes, by rank."""

    def of(world: int) -> Any:
        return SimpleNamespace(run=lambda fn, *args, **options: _workers.run(world, fn, *args, **options))

    return of
