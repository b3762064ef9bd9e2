"""Micro-batches as an axis in time: what is split, what is made once, and what cannot be accumulated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.compiler.structure.microbatch import split_counts, split_time
from meshwright.ir.graph import Graph
from meshwright.ir.plan import PlanError, Schedule
from meshwright.planner import capture_model, rules_of


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


def test_one_micro_batch_splits_nothing() -> None:
    assert split(nn.BatchNorm1d(8), 1)[1] == Schedule()


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(PlanError, match=r"microbatches=3 does not divide the batch 8 of input 'x'"):
        split(nn.LayerNorm(8), 3)
