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
    ("model", "cluster", "pins"),
    [("llama", "a100:1x2", {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2, "schedule": "1f1b", "recompute": "none"}),
     ("mixtral", "a100:1x4", {"dp": 4, "ep": 2, "zero": 3})],
    ids=str,
)
def test_changes_are_what_planning_them_gives(model: str, cluster: str, pins: Mapping[str, Any]) -> None:
    plan = make_plan(graph(model), Cluster.parse(cluster), Pins(**pins))
    step = reprice(plan).predicted.step_seconds
    found = {change.what: change for change in changes(plan)}
    assert all(change.gain >= 0.01 for change in found.values())
    faster = next(change for what, change in found.items() if what.startswith("as many"))
    where = cluster.replace("a100", faster.what.split()[-1])
    assert faster.step_seconds == pytest.approx(reprice(plan, where).predicted.step_seconds)
    assert faster.gain == pytest.approx(step / faster.step_seconds - 1)
    if "pp" in pins:
        more = found["twice the batch, in 4 micro-batches"]
        assert 1 < more.step_seconds / step < 2  # the bubble is a smaller share of more micro-batches
        assert more.gain == pytest.approx(2 * reprice_batches(plan, 1.0).predicted.step_seconds / more.step_seconds - 1)
    assert all(":2x" in change.what for change in found.values() if change.devices == 2)


def test_they_stand_in_the_answer() -> None:
    plan = make_plan(graph("llama"), Cluster.parse("a100:1x2"), Pins(axes={"x": 2}))
    lines = explain(plan).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("changes "))
    assert any(" as many " in line for line in lines[at + 1:])
    assert max(map(len, lines)) <= 120
    assert "changes " not in explain(plan, changes=False)
