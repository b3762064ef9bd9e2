"""What is promised of a plan that somebody holds (``tests.held``): a few cases, and what does not hold is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.cluster import Cluster
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.planner import make_plan
from meshwright.views.alternatives import Alternative, Alternatives
from meshwright.views.changes import Change
from tests.held import Case, captured, drawn, faults

CASES = (
    Case("heads", "cpu:1x4", "bf16", {"pp": 1, "tp": 2, "cp": 1, "zero": 2}),
    Case("llama", "a100:2x2", "fp32", {"pp": 2, "tp": 1, "schedule": "1f1b", "microbatches": 2}),
)


def planned(case: Case) -> Plan:
    return make_plan(captured(case.model, case.precision), Cluster.parse(case.cluster), Pins.of(dict(case.pins)),
                     precision=case.precision)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_promised_holds(case: Case) -> None:
    assert list(faults(case, planned(case))) == []


@pytest.mark.parametrize("case", [
    Case("bert", "h100:1x4", "bf16", {"pp": 2, "tp": 2, "schedule": "zb", "microbatches": 4}),
    Case("llama", "cpu:1x4", "fp32", {"pp": 2, "tp": 1, "schedule": "gpipe", "microbatches": 4, "recompute": "full"}),
    Case("mixtral of four layers", "h100:1x4", "bf16", {"pp": 2, "tp": 1, "schedule": "interleaved1f1b", "microbatches": 4}),
], ids=str)
def test_the_operators_of_a_pipeline_take_its_compute(case: Case) -> None:
    """Models so small that starting what makes masks is a part of the step: these are made once, not for each micro-batch."""
    plan = planned(case)
    assert list(faults(case, plan, "parts")) == []
    assert plan.schedule.prologue


def test_pieces_of_a_pipeline_are_named_by_operators() -> None:
    """Of a model that has no layers: rows under such a title name modules of the model."""
    case = Case("einsum", "a100:2x2", "bf16", {"pp": 2, "tp": 1, "schedule": "interleaved1f1b", "microbatches": 4})
    plan = planned(case)
    assert {block.path for block in plan.graph.blocks} <= {op.name for op in plan.graph.ops}
    assert list(faults(case, plan, "pins|rows|file")) == []


def test_what_does_not_hold_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    plan, of = planned(case), Alternatives.of

    def dearer(self: Alternatives, op: object) -> list[Alternative] | None:
        found = of(self, op)  # type: ignore[arg-type]
        return found and [replace(one, seconds=one.seconds * by, least=one.least * by)
                          for one in found for by in (1 if one.chosen else 1.01,)]

    monkeypatch.setattr(Alternatives, "of", dearer)
    monkeypatch.setattr("tests.held.changes", lambda plan: [Change("twice the batch", 1.0, 1.0, 1.0)])
    monkeypatch.setattr("tests.held.render", lambda plan: "x" * 121)
    wrong = {"alternatives", "changes", "width"}
    assert {one.split(":")[0] for one in faults(case, plan, "|".join(wrong))} == wrong
    tampered = replace(plan, predicted=replace(plan.predicted, compute_seconds=1.0))
    assert {one.split(":")[0] for one in faults(case, tampered, "pins|parts")} == {"pins", "parts"}


def test_a_seed_draws_the_same_cases() -> None:
    assert list(map(str, drawn(5, 3))) == list(map(str, drawn(5, 3)))
    assert len({case.cluster for case in drawn(40, 0)}) > 3
