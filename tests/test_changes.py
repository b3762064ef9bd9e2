"""What would help a plan: changes of cluster and batch, planned and priced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from meshwright import Pins
from meshwright.cost.cluster import Cluster
from meshwright.planner import make_plan, reprice, reprice_batches
from meshwright.views.changes import changes
from meshwright.views.explain import explain
from tests.test_pinning import graph


@pytest.mark.parametrize(
    ("model", "pins"),
    [("llama", {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "1f1b"}), ("llama", {"axes": {"x": 4}}),
     ("mixtral", {"dp": 4, "ep": 2, "zero": 3}), ("llama", {"cp": 2, "tp": 2})],
    ids=str,
)
def test_changes_are_what_planning_them_gives(model: str, pins: Mapping[str, Any]) -> None:
    where = Cluster.parse("a100:1x4")
    plan = make_plan(graph(model), where, Pins(**pins))
    step = reprice(plan).predicted.step_seconds
    found = {change.what: change for change in changes(plan)}
    assert all(change.gain >= 0.01 for change in found.values())
    faster = next(change for what, change in found.items() if what.startswith("as many"))
    assert faster.step_seconds == pytest.approx(reprice(plan, f"{faster.what.split()[-1]}:1x4").predicted.step_seconds)
    assert faster.gain == pytest.approx(step / faster.step_seconds - 1)
    assert found["links twice as fast"].step_seconds < step
    if "pp" in pins:
        more = found["twice the batch, in 4 micro-batches"]
        assert 1 < more.step_seconds / step < 2  # the bubble is a smaller share of more micro-batches
        assert more.gain == pytest.approx(2 * reprice_batches(plan, 1.0).predicted.step_seconds / more.step_seconds - 1)
    for change in found.values():
        if change.devices == 2:
            assert "a100:2x4" in change.what


def test_they_stand_in_the_answer() -> None:
    plan = make_plan(graph("llama"), Cluster.parse("a100:1x2"), Pins(tp=2))
    text = explain(plan)
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("changes "))
    assert any(" as many " in line for line in lines[at + 1:])
    assert max(map(len, lines)) <= 120
    assert "changes " not in explain(plan, changes=False)
