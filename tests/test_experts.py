"""Mixtures of experts: recognized, planned with experts split over data ranks, and equal to the single process."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright import PinError
from meshwright.api import autoparallel
from meshwright.compiler.rules.custom.inner import inner
from meshwright.cost.cluster import Cluster
from meshwright.errors import CaptureError
from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.graph import Graph
from meshwright.ir.pins import Pins
from meshwright.ir.plan import PlanError
from meshwright.ir.reading.graphs import graph_from_dict
from meshwright.ir.serialize import graph_to_dict
from meshwright.planner import capture_model, make_plan
from meshwright.runtime.interpret import run
from tests.equality import differences
from tests.mixtures import make, mixtral

MIXTURES = ("mixtral", "qwen2", "qwen3", "deepseek", "gpt_oss")


def captured(model: nn.Module, batch: Mapping[str, torch.Tensor], precision: str = "fp32") -> Graph:
    return capture_model(model, (), dict(batch), (), None, precision)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_chain_is_one_operator_that_computes_the_same(name: str) -> None:
    model, batch = make(name)
    graph = captured(model, batch)
    calls = [op for op in graph.ops if op.target == EXPERTS]
    assert len(calls) == (2 if name == "mixtral" else 1)
    assert not any("sort" in op.target or "histc" in op.target or "grouped_mm" in op.target for op in graph.ops)
    assert inner(calls[0].args[0]) is not None
    want = copy.deepcopy(model)
    loss = want(**batch).loss
    loss.backward()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    env = {param.value: held.get(param.fqn, graph.constants.get(param.value)) for param in graph.params}
    assert graph.loss is not None
    found = run(graph, {**env, **dict(zip(graph.inputs, batch.values(), strict=True))})[graph.loss]
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    for (path, mine), (_, other) in zip(model.named_parameters(), want.named_parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), path
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_layers_share_one_body_and_a_file_keeps_it() -> None:
    model, batch = make("mixtral")
    graph = captured(model, batch, "bf16")
    first, second = (op.args[0] for op in graph.ops if op.target == EXPERTS)
    assert first == second
    assert len(graph.blocks) == 2
    read = graph_from_dict(graph_to_dict(graph))
    assert [op.args[0] for op in read.ops if op.target == EXPERTS] == [first, second]


def test_a_loop_over_experts_is_refused_with_what_to_set() -> None:
    model = mixtral(experts_implementation="eager")
    ids = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(CaptureError, match='experts_implementation="grouped_mm"'):
        captured(model, {"input_ids": ids, "labels": ids})


def test_the_example_trains_as_one_process_does() -> None:
    example = Path(__file__).parents[1] / "examples" / "train_moe.py"
    assert len(example.read_text().splitlines()) < 100
    ran = subprocess.run([sys.executable, example, "2"], capture_output=True, text=True, timeout=200)
    found = [line.split(":")[1].split() for line in ran.stdout.splitlines() if "process" in line.split(":")[0]]
    assert len(found) == 2, ran.stderr[-2000:]
    assert [float(loss) for loss in found[0]] == pytest.approx([float(loss) for loss in found[1]], rel=1e-4)


def test_pins_that_cannot_be_are_refused() -> None:
    from tests.models import make as dense

    cluster = Cluster.parse("h100:1x4")
    graph = captured(*make("qwen3"))
    for pins, says in (
        ({"dp": 4, "ep": 3}, "ep=3 does not divide the 4 experts"), ({"dp": 2, "tp": 2, "ep": 4}, "ep=4 must divide dp=2"),
    ):
        with pytest.raises(PinError, match=says):
            make_plan(graph, cluster, Pins(**pins))
    balanced = captured(*make("mixtral balanced"))
    with pytest.raises(PlanError, match=r"needs the whole batch at once|not a sum over samples"):
        make_plan(balanced, cluster, Pins(dp=4, ep=2, microbatches=2))
    with pytest.raises(PinError, match="has no experts"):
        make_plan(captured(*dense("llama")), cluster, Pins(dp=4, ep=2))


def _train(rank: int, name: str, world: int, all_pins: Sequence[Mapping[str, Any]], clip: float | None) -> list[str]:
    """What differs from the single process, and plans that do not split experts."""
    model, batch = make(name)
    wrong: list[str] = []

    def build(pins: Mapping[str, Any]) -> nn.Module:
        parallel = autoparallel(model, init_device_mesh("cpu", (world,)), ((), batch), pins=dict(pins), progress=False)
        plan = parallel.plan
        for op in plan.graph.ops:
            if op.target == EXPERTS and "ep" in pins and plan.assignments[op.name].get("ep") != "t0&e":
                wrong.append(f"{pins}: {op.name} is split as {plan.assignments[op.name]}")
        return parallel

    return differences(rank, model, batch, {str(pins): partial(build, pins) for pins in all_pins}, clip) + wrong


PAIRS = {
    "mixtral skewed": ({"dp": 2, "ep": 2, "zero": 2, "microbatches": 2},),
    "mixtral balanced": ({"dp": 2, "ep": 2},),
    "qwen2": ({"dp": 2, "ep": 2, "zero": 3}, {"dp": 1, "tp": 2}),
    "deepseek skewed": ({"dp": 2, "ep": 2, "recompute": "full", "microbatches": 2},),
    "gpt_oss": ({"dp": 2, "ep": 2}, {"dp": 1, "tp": 2}),
}
FOURS = {
    "mixtral": ({"dp": 4, "ep": 2, "zero": 3}, {"dp": 2, "ep": 2, "tp": 2, "zero": 1, "microbatches": 2}),
    "qwen3": ({"dp": 4, "ep": 4, "zero": 2}, {"dp": 4, "ep": 2, "shard": 2, "zero": 3}),
    "deepseek": ({"pp": 2, "dp": 2, "ep": 2, "tp": 1, "microbatches": 2, "schedule": "1f1b", "zero": 1},),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equality_on_two_processes(name: str, pool: Callable[[int], Any]) -> None:
    assert not pool(2).run(_train, name, 2, PAIRS[name], 1.0)[0]


@pytest.mark.parametrize("name", FOURS)
def test_equality_on_four_processes(name: str, pool: Callable[[int], Any]) -> None:
    assert not pool(4).run(_train, name, 4, FOURS[name], 1.0)[0]


