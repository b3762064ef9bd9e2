"""Predicted peak memory against torch's ``MemTracker``, on fake tensors: see ``benchmarks/memory.py``, which this runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "memory.py"
QUICK = ("gpt2-small zero 0", "vit zero 3 bf16", "mixtral zero 2")


def rows(*names: str) -> list[dict[str, Any]]:
    """What the benchmark prints for these programs (a fake process group has its own process)."""
    run = subprocess.run([sys.executable, BENCHMARK, "--json", *names], capture_output=True, text=True, timeout=900)
    assert run.stdout, run.stderr[-2000:]
    return list(json.loads(run.stdout.splitlines()[-1]))


def names() -> list[str]:
    listed = subprocess.run([sys.executable, BENCHMARK, "--list"], capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def check(found: list[dict[str, Any]]) -> None:
    for row in found:
        assert -0.02 <= row["error"] <= 0.05, row
        assert sum(row["kinds"].values()) == pytest.approx(row["predicted"])


def test_three_programs() -> None:
    found = rows(*QUICK)
    assert len(found) == 3
    check(found)
    for row in found:  # at rest both count alike
        assert row["kinds"]["optimizer"] == pytest.approx(row["tracked kinds"]["optstate"], rel=1e-3)


@pytest.mark.slow
def test_all_other_programs() -> None:
    others = [name for name in names() if name not in QUICK]
    assert len(others) + 3 >= 12
    check(rows(*others))
