"""Marks and order of all tests: ``distributed`` is whatever asks for the pool of worker processes (``make check`` leaves it
out); long tests come first, so that what is left at the end is short and the test processes can share it. What was imported is
not looked through again whenever garbage is collected, which took a tenth of the time."""

from __future__ import annotations

import gc
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the processes of the pool share few cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the ``pool`` fixture; put the long ones first: ``slow``, then ``distributed``."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.distributed)
    items.sort(key=lambda item: [item.get_closest_marker(mark) is None for mark in ("slow", "distributed")])


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the process."""
    gc.freeze()
