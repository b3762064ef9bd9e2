"""Exports under kinds of plans that ``test_exported`` does not have (``tests.exports`` has more of them)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exports import Cell, cells, compared, exporting

SOME = [cell for cell in cells() if cell[1] == 2 and (cell[2].get("attention") == "ring" or cell[2].get("schedule") == "zbv"
                                                      or (cell[0] == "einsum" and "ep" in cell[2]))]


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_a_process_without_the_model_goes_on_to_the_last_bit(pool: Callable, tmp_path: Path, cell: Cell) -> None:
    assert pool(2).run(exporting, cell, str(tmp_path / "export")) == ["equal", "equal"]


def test_what_differs_is_seen() -> None:
    assert len(SOME) == 3
    assert compared(["loss 1.0, norm 2.0", "w aa"], ["loss 1.0, norm 2.0", "w aa"]) == "equal"
    assert compared(["loss 1.0, norm 2.0", "w aa"], ["loss 1.0, norm 2.0", "w ab"]) == "w aa is then w ab"
