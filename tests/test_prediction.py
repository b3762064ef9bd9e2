"""What is predicted and proven, as values and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.prediction import Certificate, Prediction, SeenCandidate, StageSeconds
from meshwright.ir.serialize import plan_to_dict
from tests.handmade import handmade_plan

STAGED = Prediction(
    2.0, 5.0, 4.0, compute_seconds=1.5, pipeline_bubble_seconds=0.5, bubble_fraction=0.25, bytes_by_kind={"inputs": 5.0},
    bytes_per_pipeline_rank=(5.0, 3.0), stages=StageSeconds((1.0, 2.0), (1.0, 1.0), (0.5, 0.5), (0.1,)),
)
PROOF = Certificate(2.0, 1.5, "gap", considered=3, solved=1, runner_up="dp=4", planning_seconds={"solve": 0.5}, candidates=(
    SeenCandidate("dp=4 x tp=1", 2, 2.0, 3), SeenCandidate("pp=2 x dp=2 x tp=1", 4, outcome="does not fit"),
))


def test_what_follows_from_the_numbers() -> None:
    assert not STAGED.fits
    assert replace(STAGED, capacity_bytes=5.0).fits
    assert PROOF.gap == 0.25
    assert replace(PROOF, bound_seconds=3.0).gap == 0.0
    with pytest.raises(ValueError, match="2 stages"):
        StageSeconds((1.0, 2.0), (1.0, 1.0), (1.0, 1.0), ())


def test_json_and_back() -> None:
    for value in (STAGED, PROOF, Prediction(1.0, 2.0, 3.0), Certificate(1.0, 1.0, "optimal")):
        data = json.loads(json.dumps(value.as_json()))
        assert None not in data.values()
        assert type(value).of_json(data) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_seconds": "soon"}, "step_seconds: 'soon' is no number"), ({"step_seconds": None}, "step_seconds: None"),
        ({"mfu": True}, "mfu: True is no number"), ({"surprise": 1.0}, "has no surprise"),
        ({"bytes_by_kind": [1]}, "bytes_by_kind: .* no object"), ({"bytes_by_kind": {"state": "much"}}, "'much' is no number"),
        ({"bytes_per_pipeline_rank": 5}, "no list"),
        ({"stages": {"forward": [1.0]}}, "stages: StageSeconds lacks backward_input"),
    ],
)
def test_a_damaged_prediction_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    data = plan_to_dict(handmade_plan())
    with pytest.raises(PlanError, match=message):
        Plan.from_dict({**data, "predicted": {**data["predicted"], **change}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"considered": -1}, "considered: -1 is no count"), ({"status": 1}, "status: 1 is no text"),
        ({"candidates": 3}, "no list"),
        ({"candidates": [{"layout": "dp=2"}]}, "candidates: SeenCandidate lacks microbatches"),
        ({"planning_seconds": {"solve": "long"}}, "planning_seconds: 'long' is no number"),
    ],
)
def test_a_damaged_certificate_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    data = plan_to_dict(handmade_plan())
    with pytest.raises(PlanError, match=message):
        Plan.from_dict({**data, "certificate": {**data["certificate"], **change}})


def test_files_of_the_first_days_are_read() -> None:
    """They held the same under other names, as pairs, and did not say with which prices it was made."""
    plan = handmade_plan()
    predicted = {"map": [
        ["step_seconds", 0.0125], ["tokens_per_second", 5120.0], ["microbatches", 1], ["bytes_per_rank", 3 * 2**20],
        ["capacity_bytes", 12 * 2**20], ["bytes", {"map": [["parameters", 2**20], ["activations", 2 * 2**20]]}],
    ]}
    certificate = {"map": [
        ["objective", 0.0125], ["bound", 0.0124], ["gap", 0.008], ["status", "optimal"],
        ["candidates", [{"map": [["mesh", "dp=4 x tp=1"], ["microbatches", 1], ["result", "does not fit"]]},
                        {"map": [["mesh", "dp=2 x tp=2"], ["microbatches", 1], ["step_seconds", 0.0125]]}]],
    ]}
    read = Plan.from_dict({**plan_to_dict(plan), "predicted": predicted, "certificate": certificate})
    assert plan.predicted is not None
    assert (read.predicted, read.certificate) == (replace(plan.predicted, prices=""), plan.certificate)
    none = Plan.from_dict({**plan_to_dict(plan), "predicted": {"map": []}, "certificate": {"map": []}})
    assert (none.predicted, none.certificate) == (None, None)
