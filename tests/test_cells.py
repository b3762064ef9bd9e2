"""The program that trains cells of context parallelism: what it draws, and that it tells what is not equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from benchmarks import cells
from benchmarks.cells import Cell, drawn, opened, ran
from tests.staged import BACKEND


def test_every_value_is_drawn_equally_often() -> None:
    found = list(drawn(120, 3, 4))
    assert found == list(drawn(120, 3, 4))
    assert found != list(drawn(120, 4, 4))
    models = Counter(cell.model for cell in found)
    assert max(models.values()) - min(models.values()) <= 1
    assert Counter(cell.pins["schedule"] for cell in found if "schedule" in cell.pins).keys() == set(cells.SCHEDULES)
    assert {cell.world for cell in found} == {4}
    assert {cell.world for cell in drawn(30, 3, 8)} == {8}


def test_pins_are_left_to_the_search() -> None:
    asked = list(drawn(40, 3, 4))
    found = opened(asked, 3)
    assert found == opened(asked, 3)
    assert all(cell.world == 4 and cell.pins.items() <= was.pins.items() for cell, was in zip(found, asked, strict=True))
    assert 0.4 < sum(len(cell.pins) for cell in found) / sum(len(cell.pins) for cell in asked) < 0.6


CP = {"cp": 2, "dp": 1, "tp": 1}
ONE: dict[str, Cell] = {
    "fp32": Cell("Llama", 8, "fp32", 0.0, CP), "bf16": Cell("GPT2", 8, "bf16", 0.0, CP),
    "dropout": Cell("GPT2", 8, "fp32", 0.1, CP),
}


def _told(rank: int, name: str) -> list[tuple[str, str]]:
    """The outcome of a cell, and that where the numbers that are compared are a tenth off."""

    def off(work: Callable[..., Any]) -> Callable[..., Any]:
        def shifted(*args: Any) -> Any:
            losses, state = work(*args)
            return losses, {key: x * 1.1 for key, x in state.items()}

        return shifted

    right, compared = ran(rank, ONE[name], "cpu"), {"fp32": "_alone", "bf16": "_alone_descending", "dropout": "_moved"}[name]
    with mock.patch.object(cells, compared, off(getattr(cells, compared))):
        return [right, ran(rank, ONE[name], "cpu")]


@pytest.mark.parametrize("name", ["fp32", "bf16", "dropout"])
def test_what_is_a_tenth_off_is_told(pool: Callable[[int], Any], name: str) -> None:
    """Parameters after two steps, gradients in bf16, and the slope along the gradient under dropout."""
    told = pool(2).run(_told, name)
    assert [verdict for (verdict, _), _ in told] == ["equal"] * 2
    assert told[0][1][0] == "UNEQUAL"
    assert told[0][1][1]


def test_a_refusal_comes_with_its_words() -> None:
    cell = ONE["fp32"]
    with mock.patch.object(cells, "init_device_mesh", side_effect=cells.MeshwrightError("no such mesh")):
        assert ran(0, cell, "cpu") == ("refused", "MeshwrightError: no such mesh")
    with mock.patch.object(cells, "init_device_mesh", side_effect=RuntimeError("a raw one")):
        assert ran(0, cell, "cpu") == ("RAW", "RuntimeError: a raw one")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_view_of_a_weight_is_handed_on_after_the_weight_is_freed(pool: Callable[[int], Any], recompute: str) -> None:
    """A learned bias under ZeRO-3 in a pipeline: its unit hands a view of it to a layer, which runs when it is freed."""
    pins = {"cp": 2, "dp": 1, "tp": 1, "pp": 2, "schedule": "1f1b", "microbatches": 2, "zero": 3, "recompute": recompute}
    assert pool(4).run(ran, Cell("biased causal", 12, "fp32", 0.0, pins), "cpu") == [("equal", "")] * 4


def test_by_way_of_the_host(pool: Callable[[int], Any]) -> None:
    """The same over groups whose ranks may share a GPU: gathers, reductions, exchanges and what stages send each other."""
    pins = {"cp": 2, "dp": 1, "tp": 1, "pp": 2, "schedule": "1f1b", "microbatches": 2, "zero": 3, "attention": "ring"}
    assert pool(4).run(ran, Cell("Llama", 12, "fp32", 0.0, pins), "cpu", backend=BACKEND) == [("equal", "")] * 4
