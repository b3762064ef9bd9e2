"""Some of the loops of ``tests.loops``; the rest: ``python -m tests.loops``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.runtime.checks.empty import may_be_numbered, of_numbers, runs
from tests.loops import trials

SOME = {
    "pp": ["one layer alone", "two calls", "swa", "filtered", "filtered to nothing", "one hook", "copied together",
           "teacher", "reduced by hand", "muon", "counted", "spectral later", "compiled step"],
    "tp": ["edited gradients", "scaler", "restored", "whole hooks", "in backward", "moved between", "exported"],
    "deferred": ["state around", "averaged copy", "looked at"],
}


@pytest.mark.parametrize("way", SOME)
def test_loops_are_equal_or_refused(pool: Callable[[int], Any], way: str) -> None:
    """Weights and what a loop says are those of one process; what is to be refused is, with its words, by every rank."""
    for found in pool(2).run(trials, way, SOME[way]):
        assert [what for what in found if not what[1]] == []
        assert [name for name, *_ in found] == SOME[way]


ROUND = ("q.weight", "k.weight", "norm.weight")


def groups(rate: Callable[[int, int], float], layers: list[int], kinds: tuple[str, ...] = ROUND) -> Any:
    """One group for each parameter of the layers, whose option is ``rate(layer, number on the stage)``."""
    names = [f"layers.{layer}.{kind}" for layer in layers for kind in kinds]
    return tuple((str(rate(int(name.split(".")[1]), i)), (name,)) for i, name in enumerate(names))


def test_parameters_counted_by_each_stage_are_told_from_others() -> None:
    """By number of the parameter or of its layer on the stage; not by layer, by kind or by shape, and not where no stage shows
    it."""
    by_number, by_layer = lambda layer, i: i + 1, lambda layer, i: 0.5**layer
    assert of_numbers(groups(by_number, [0, 1]), groups(by_number, [2, 3]))
    assert of_numbers(groups(by_number, [0, 1]), groups(by_number, [2])), "stages of unequal lengths"
    assert of_numbers(groups(by_number, [0, 1])[1:], groups(by_number, [1])), "one weight, two rates"
    assert not of_numbers(groups(by_layer, [0, 1]), groups(by_layer, [2, 3]))
    assert not of_numbers(groups(by_layer, [0, 1]), groups(by_layer, [1, 2])), "a layer on two stages"
    by_kind = tuple((str(i), tuple(f"layers.{n}.{kind}" for n in (0, 1))) for i, kind in enumerate(ROUND))
    assert not of_numbers(by_kind, tuple((rate, tuple(name.replace("s.", "s.1") for name in names)) for rate, names in by_kind))
    assert not of_numbers(groups(by_number, [0]), groups(by_number, [1])), "a layer on each: as if by kind"
    decay = [(("0.1", tuple(f"layers.{n}.{kind}" for kind in ROUND[:2])), ("0", (f"layers.{n}.norm.weight",))) for n in (0, 1)]
    assert not of_numbers(*decay)


def test_choices_that_numbers_make() -> None:
    """From the front, from the back, of stages of unequal lengths; not where a stage has others, or an option twice."""
    front, back = runs("aabb"), runs("ccba")
    assert (front, back) == (("a", "b"), ("c", "b", "a"))
    assert may_be_numbered([front, runs("ab")])
    assert may_be_numbered([front, runs("abbc"), runs("a")])
    assert may_be_numbered([runs("ba"), back])
    assert not may_be_numbered([front, runs("cd")])
    assert not may_be_numbered([front, front, runs("cd")]), "a stage that does not count so"
    assert not may_be_numbered([front, runs("b")[:0]]), "a stage without any"
    assert not may_be_numbered([runs("aab"), runs("aa")]), "only one stage chooses"
    assert runs("aba") == ()
