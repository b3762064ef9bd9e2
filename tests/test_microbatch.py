"""Micro-batches as an axis in time: what is split, what is made once, and what cannot be accumulated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.compiler.structure.microbatch import split_counts, split_time
from meshwright.ir.graph import FILL, Graph
from meshwright.ir.plan import PlanError, Schedule
from meshwright.planner import capture_model, rules_of
from tests.equality import differences


class Normed(nn.Module):
    """A batch norm between two linears, and a loss that is a mean."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inside, self.norm, self.out = nn.Linear(8, 8), norm, nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.out(self.norm(self.inside(x))), x[:, :1] * 2)


def split(norm: nn.Module, count: int = 2) -> tuple[Graph, Schedule]:
    graph = split_counts(capture_model(Normed(norm), (torch.randn(8, 8),), {}, (), None, "fp32"))
    return graph, split_time(graph, dict(rules_of(graph)[0]), count, {"x": 0})


@pytest.mark.parametrize("tracked", [True, False])
def test_batch_statistics_need_the_whole_batch(tracked: bool) -> None:
    """With running statistics or without, and the error says where and what to do."""
    with pytest.raises(PlanError, match=r"batch_norm of norm .*microbatches=1"):
        split(nn.BatchNorm1d(8, track_running_stats=tracked))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8).eval(), nn.LayerNorm(8)], ids=["given statistics", "layer norm"])
def test_what_needs_no_batch_is_accumulated(norm: nn.Module) -> None:
    """The targets are made once per step, everything that reads a parameter once per micro-batch, the loss as a sum."""
    graph, schedule = split(norm)
    assert {op.name for op in graph.ops if op.target in ("aten.slice.Tensor", "aten.mul.Tensor")} == schedule.prologue
    assert set(schedule.time) == {op.name for op in graph.ops} - schedule.prologue


def test_what_changes_once_a_call_is_named() -> None:
    """Vectors of a spectral norm need no batch, and micro-batches would change them several times."""
    with pytest.raises(PlanError, match=r"changes buffer 'norm\.parametrizations\.weight\.0\._u' once a call.*microbatches=1"):
        split(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))


def test_one_micro_batch_splits_nothing() -> None:
    assert split(nn.BatchNorm1d(8), 1)[1] == Schedule()


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(PlanError, match=r"microbatches=3 does not divide the batch 8 of input 'x'"):
        split(nn.LayerNorm(8), 3)


class Carried(nn.Module):
    """Every layer writes into zeros that the layer before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList((nn.Linear(8, 8), nn.Linear(8, 8))) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y, made, target = x, torch.zeros_like(x), x * 2
        for first, second in self.layers:
            made = made.clone()
            made[:, :4] = first(y)[:, :4]
            y, made = y + second(torch.relu(made)), torch.zeros_like(y)
        return {"loss": nn.functional.mse_loss(y, target), "zeros": made}


def test_a_fill_is_made_where_it_is_read_a_piece_at_a_time() -> None:
    """Zeros that one operator of the micro-batches reads are as large as a micro-batch; what leaves the model is whole."""
    graph = split_counts(capture_model(Carried(), (torch.randn(8, 8),), {}, (), None, "fp32"))
    schedule = split_time(graph, dict(rules_of(graph)[0]), 2, {"x": 0})
    *read, last = (op.name for op in graph.ops if op.target == FILL)
    assert len(read) == 3
    assert all(schedule.time[name] == "dim0" for name in read)
    assert last in schedule.prologue
    assert schedule.prologue.isdisjoint(read)


def _carried(rank: int) -> list[str]:
    torch.manual_seed(0)
    model, batch = Carried(), {"x": torch.randn(8, 8)}

    def build(pins: dict[str, Any]) -> nn.Module:
        pins = {"tp": 1, "microbatches": 2, "recompute": "none", **pins}
        return autoparallel(model, init_device_mesh("cpu", (2,)), ((), batch), pins=pins, progress=False)

    cases: list[dict[str, Any]] = [{"pp": 2, "schedule": "1f1b"}, {"dp": 2, "zero": 1}]
    return differences(rank, model, batch, {str(pins): partial(build, pins) for pins in cases})


def test_a_fill_that_a_later_stage_reads(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(_carried) == [[], []]
