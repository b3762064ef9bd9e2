"""The parts of a predicted step: they add up to it in every view, with a pipeline and without."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from meshwright.compiler.search.plans import beside_schedule, simulation_of
from meshwright.cost.cluster import Cluster
from meshwright.cost.timeline import chrome_trace
from meshwright.ir.graph import Graph
from meshwright.ir.pins import Pins
from meshwright.ir.prediction import Prediction
from meshwright.planner import capture_model, make_plan
from meshwright.views.words import time_parts, time_words
from tests import mixtures
from tests.test_planner import Stack, graph_of, of_models

PARTS: list[tuple[str, dict[str, Any]]] = [
    ("stack", {"pp": 2, "dp": 2, "tp": 1, "zero": zero, "schedule": schedule, "microbatches": count, "recompute": recompute})
    for zero, schedule, count, recompute in (
        (1, "1f1b", 4, "none"), (0, "gpipe", 4, "full"), (3, "1f1b", 4, "full"), (2, "interleaved1f1b", 4, "selective"),
        (1, "zb", 4, "none"), (0, "zbv", 4, "none"), (1, "dualpipev", 8, "none"),
    )
]
PARTS += [
    ("stack", {"pp": 1, "dp": 2, "tp": 2, "zero": 2, "sequence_parallel": True, "recompute": "full"}),
    ("stack", {"pp": 1, "dp": 4, "tp": 1, "zero": 3, "microbatches": 4, "recompute": "selective"}),
    ("llama", {"pp": 1, "dp": 2, "cp": 2, "tp": 1, "zero": 3}),
    ("llama", {"pp": 2, "dp": 1, "cp": 2, "tp": 1, "schedule": "gpipe", "microbatches": 2}),
    ("mixtral", {"pp": 1, "dp": 4, "ep": 2, "tp": 1, "zero": 0}),
    ("mixtral", {"pp": 2, "dp": 2, "tp": 1, "ep": 2, "zero": 0, "schedule": "1f1b", "microbatches": 2}),
]


def of_mixture() -> Graph:
    model, ids = mixtures.mixtral(), torch.zeros(4, 16, dtype=torch.int64)
    return capture_model(model.train(), (), {"input_ids": ids, "labels": ids}, (), None, "fp32")


def test_the_parts_of_a_step_add_up() -> None:
    """Everywhere: with reductions and gathers of the step apart from the bubble, which is what the simulated ranks idle."""
    graphs = {"stack": graph_of(Stack(4, 256), 16, 64, 256)}
    for model, pins in PARTS:
        if model not in graphs:
            graphs[model] = of_models(model) if model == "llama" else of_mixture()
        precision = "bf16" if model == "stack" else "fp32"
        plan = make_plan(graphs[model], Cluster.parse("h100:1x4"), Pins(**pins), precision=precision)
        found = plan.predicted
        assert found is not None
        told, parts = str((model, pins)), dict(time_parts(found))
        assert "the rest" not in parts, told
        assert min(parts.values()) > 0, told
        assert sum(parts.values()) == pytest.approx(found.step_seconds, rel=1e-9), told
        assert bool(found.recomputation_seconds) == (pins.get("recompute", "none") != "none"), told
        shares = re.findall(r"\(([\d.]+)%\)", time_words(found))
        assert sum(map(float, shares)) == pytest.approx(100, abs=0.05 * len(shares) + 0.01), told
        if plan.pipeline is None:
            assert found.pipeline_bubble_seconds is None
            continue
        run, beside = simulation_of(plan), beside_schedule(plan)
        assert found.pipeline_bubble_seconds == pytest.approx(run.bubble_fraction * run.makespan, rel=1e-6), told
        assert run.makespan + sum(beside.values()) == pytest.approx(found.step_seconds, rel=1e-9), told
        events = [event for event in chrome_trace(run, beside)["traceEvents"] if event["ph"] == "X"]
        assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(found.step_seconds * 1e6, rel=1e-9), told
        assert ("outside the schedule" in parts) == ("outside the schedule" in beside), told


def test_a_1f1b_that_waits_for_what_it_sends_takes_longer_and_is_shown_so() -> None:
    """In the step, in the simulation that pages and traces show, in what a plan file keeps; other schedules take the same."""
    graph, cluster = graph_of(Stack(4, 256), 16, 64, 256), Cluster.parse("h100:4x1")
    found = {}
    for schedule in ("1f1b", "gpipe"):
        for waits in (False, True):
            pins = Pins(pp=4, dp=1, tp=1, microbatches=8, schedule=schedule, stage_cuts=("layers.1", "layers.2", "layers.3"))
            plan = make_plan(graph, cluster.with_kernels(waits=waits), pins, precision="bf16")
            found[schedule, waits] = plan.predicted
            assert sum(beside_schedule(plan).values()) + simulation_of(plan).makespan == pytest.approx(
                plan.predicted.step_seconds, rel=1e-9)
            assert Prediction.of_json(plan.predicted.as_json()) == plan.predicted
            assert ("waits" in plan.predicted.as_json()["stages"]) == (waits and schedule == "1f1b")
    assert found["gpipe", True].step_seconds == found["gpipe", False].step_seconds
    more = found["1f1b", True].step_seconds - found["1f1b", False].step_seconds
    sent = max(found["1f1b", True].stages.transfer)
    assert sent / 2 < more < 8 * sent
