"""Experts that are matrices of one product: what is one, by data flow alone, and what the search makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from meshwright.compiler.structure.dims import DimClasses
from meshwright.compiler.structure.stacked import StackedExperts
from meshwright.cost.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.pins import PinError, Pins
from meshwright.planner import capture_model, make_plan, rules_of
from tests.mixtures import EXPERTS, Dispatched, Gshard, make

HIDDEN, HEADS = 8, 4


class Joined(nn.Module):
    """A weight for every one of a few heads; what becomes of their answers is the ``join``."""

    def __init__(self, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], turned: bool = False) -> None:
        super().__init__()
        self.join, self.turned = join, turned
        self.weight = nn.Parameter(torch.randn(HEADS, HIDDEN, HIDDEN))
        self.out = nn.Parameter(torch.randn(HEADS, HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, sequence, hidden] -> a number."""
        weight = self.weight.transpose(1, 2) if self.turned else self.weight
        return self.join(torch.einsum("bnsh,nhw->bnsw", x, weight), self.out).square().mean()


def graph_of(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Graph:
    return capture_model(model, (), dict(batch), (), None, "fp32")


def stacked(graph: Graph) -> tuple[dict[str, str], list[int]]:
    """{target: the factor of experts}, and the numbers of experts."""
    classes = DimClasses(graph, rules_of(graph)[0])
    found = StackedExperts.of(graph, classes)
    return {op.target: found.products[op.name] for op in graph.ops if op.name in found.products}, sorted(found.counts(classes))


@pytest.mark.parametrize("name", ["einsum", "einsum of the batch", "matmul", "llama4"])
def test_mixtures_by_products_have_experts(name: str) -> None:
    _, counts = stacked(graph_of(*make(name)))
    assert counts == [EXPERTS]


@pytest.mark.parametrize(("join", "turned", "targets"), [
    (lambda made, out: made.mean(1), False, {"aten.einsum.default": "n"}),
    (lambda made, out: made.sum(1), True, {"aten.einsum.default": "n", "aten.transpose.int": "dim0"}),
    (lambda made, out: torch.einsum("bnsw,nwh->bsh", made, out), False, {}),  # heads, whose answers a weight joins
    (lambda made, out: made, False, {}),  # summed in the loss alone, where no sample is left
])
def test_experts_are_summed_away_among_values_with_samples(
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], turned: bool, targets: Mapping[str, str]
) -> None:
    assert stacked(graph_of(Joined(join, turned), {"x": torch.randn(4, HEADS, 3, HIDDEN)}))[0] == targets


def test_a_frozen_stack_is_no_mixture() -> None:
    model = Joined(lambda made, out: made.mean(1))
    model.weight.requires_grad_(False)
    assert stacked(graph_of(model, {"x": torch.randn(4, HEADS, 3, HIDDEN, requires_grad=True)}))[0] == {}


def test_a_degree_that_does_not_divide_the_experts_is_refused() -> None:
    with pytest.raises(PinError, match="ep=3 does not divide the 4 experts"):
        make_plan(graph_of(*make("einsum")), Cluster.parse("h100:1x6"), Pins(dp=6, ep=3))


def test_the_search_splits_experts_that_have_no_room_and_gathers_none() -> None:
    """Wide experts on ranks that have room for a part of them: split by ep, where tokens travel and weights do not."""
    with torch.device("meta"):
        model = Gshard(lambda: Dispatched(512, 16384, 64), hidden=512)
    ids = torch.zeros(16, 128, dtype=torch.int64, device="meta")
    graph = graph_of(model, {"input_ids": ids, "labels": ids})
    pins = Pins(tp=1, zero=1, microbatches=1)
    small = Cluster.parse("h100:1x4").with_memory(int(0.55e9))
    plan = make_plan(graph, small, pins)
    assert plan.mesh.size("ep") == 4
    found = StackedExperts.of(graph, DimClasses(graph, rules_of(graph)[0]))
    assert {plan.assignments[name]["ep"] for name in found.products} == {"e"}
