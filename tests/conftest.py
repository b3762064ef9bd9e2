"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pool import Pool


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
