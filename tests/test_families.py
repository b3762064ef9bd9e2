"""Mixtures of ``transformers`` that nothing here names: recognized, and equal to the single process with experts split.

A few are quick; ``python benchmarks/mixtures.py --families`` runs them all, unpinned too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.mixtures import DEEP, LAYOUTS, MODELS, Cell, drawn_cells, result, work
from meshwright.ir.declared.experts import EXPERTS
from meshwright.planner import capture_model
from tests import mixtures
from tests.families import MORE, families, tiny

QUICK = ("lfm2_moe", "openai_privacy_filter", "phimoe")
"""Experts behind convolutions; with biases, and a loop by default; a router with a gradient of its own."""


def test_what_is_said_of_a_family_is_of_one_that_there_is() -> None:
    assert len(families()) > 40
    assert not set(MORE) - set(families())


@pytest.mark.parametrize("name", QUICK)
def test_families_are_equal_with_experts_split(name: str, pool: Callable[[int], Any]) -> None:
    model, batch = tiny(name)
    assert any(op.target == EXPERTS for op in capture_model(model, (), batch, (), None, "fp32").ops)
    pins = {"dp": 2, "ep": 2, "tp": 1, "pp": 1, "zero": 1, "recompute": "none", "microbatches": 1}
    answers = pool(2).run(work, Cell(f"family {name}", 2, pins), False, "cpu")
    assert {what for what, _, _ in answers} == {"equal"}, answers


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_of_routers_are_those_of_the_batch(precision: str, pool: Callable[[int], Any]) -> None:
    """Switch's and ST-MoE's, of experts by einsum, one of which gets nearly every token, in micro-batches."""
    pins = {"dp": 2, "ep": 2, "tp": 1, "pp": 1, "zero": 2, "recompute": "none", "microbatches": 2}
    answers = pool(2).run(work, Cell("einsum balanced", 2, pins, "skewed", precision), False, "cpu")
    assert {what for what, _, _ in answers} == {"equal"}, answers


def test_cells_are_drawn_from_a_seed_and_what_is_unequal_is_called_so() -> None:
    assert drawn_cells(3, 30, [2, 4, 8]) == drawn_cells(3, 30, [2, 4, 8])
    for cell in drawn_cells(3, 200, [2, 4, 8]):
        assert {axis: cell.pins[axis] for axis in LAYOUTS[cell.world][0]}.keys() >= {"dp"}
    for name in MODELS:
        mixtures.make(name, **DEEP)

    class Answers:
        """A pool whose ranks say what they are told to."""

        def __init__(self, *said: tuple[str, float, str]) -> None:
            self.said = said

        def run(self, *_: Any, **__: Any) -> list[tuple[str, float, str]]:
            return list(self.said)

    cell = Cell("mixtral", 2, precision="bf16")
    for said, what in (
        ((("equal", 0.0, ""), ("equal", 1e-9, "")), "equal"), ((("refused", 0.0, "why"),) * 2, "refused"),
        ((("refused", 0.0, "why"), ("equal", 0.0, "")), "unequal"), ((("equal", 0.0, ""), ("unequal", 1.0, "")), "unequal"),
    ):
        assert result(Answers(*said), cell, "cpu")["what"] == what  # type: ignore[arg-type]
