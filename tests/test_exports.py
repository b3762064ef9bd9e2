"""Exports under kinds of plans that ``test_exported`` does not have (``tests.exports`` has more of them)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exports import Cell, cells, compared, exporting

NAMED = (("llama", "attention", "ring"), ("llama", "schedule", "zbv"), ("einsum", "ep", 2), ("masked_mean", "dp", 2))
SOME = [cell for cell in cells() if any(cell[0] == name and cell[2].get(pin) == value for name, pin, value in NAMED)]


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_a_process_without_the_model_goes_on_to_the_last_bit(pool: Callable, tmp_path: Path, cell: Cell) -> None:
    assert pool(2).run(exporting, cell, str(tmp_path / "export")) == ["equal", "equal"]


def test_what_differs_is_seen() -> None:
    assert [cell[1] for cell in SOME] == [2, 2, 2, 2]
    assert compared(["loss 1.0, norm 2.0", "w aa"], ["loss 1.0, norm 2.0", "w aa"]) == "equal"
    assert compared(["loss 1.0, norm 2.0", "w aa"], ["loss 1.0, norm 2.0", "w ab"]) == "w aa is then w ab"
