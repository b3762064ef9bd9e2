"""Pricing one layout again, and the replay of memory on programs small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.compiler.placement.problem import price
from meshwright.compiler.rules import builtin_rules
from meshwright.compiler.solver.chain import BlockModel, Chain, Kind, Solution, evaluate
from meshwright.compiler.solver.solve import solve
from meshwright.cost.memory.replay import ACTIVATIONS, Heap, backward, forward, hold, script_of
from meshwright.ir.graph import Graph, Op, Ref, Value
from tests.chains import RESOURCES, random_block, random_chain

OPERATORS = builtin_rules().operators


def test_a_price_is_what_the_solver_says() -> None:
    for seed in range(5):
        chain = random_chain(seed, rows=3, transient=True)
        solution = solve(chain)
        assert price(chain, solution) == pytest.approx((solution.time, solution.bytes_ + solution.transient))


def test_a_layout_of_126_layers_counts_each_distinct_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    block = random_block(rng, (2,) * 70)
    chain = Chain((Kind((block,), (np.zeros(RESOURCES),)),), (0,) * 126, (), np.ones((1, RESOURCES)), np.ones(RESOURCES),
                  np.zeros(RESOURCES))
    choices = ((0,) * 70,) * 126
    seconds, bytes_, transient = evaluate(chain, (0,) * 126, choices)
    solution = Solution((0,) * 126, choices, seconds, bytes_, transient, seconds, 0.0, 0, 0, "optimal")
    assert price(chain, solution) == pytest.approx((seconds, bytes_ + transient))
    counted, cost = [], BlockModel.cost
    monkeypatch.setattr(BlockModel, "cost", lambda block, chosen: counted.append(chosen) or cost(block, chosen))
    price(chain, solution)
    assert len(counted) == 1


def two_products() -> Graph:
    """y = (x * x) * w, all of 1 KiB but w, which is stored elsewhere."""
    values = {name: Value(name, (256,), torch.float32, True) for name in ("x", "w", "h", "y")}
    ops = (
        Op("h", "aten.mul.Tensor", (Ref("x"), Ref("x")), (), ("h",)),
        Op("y", "aten.mul.Tensor", (Ref("h"), Ref("w")), (), ("y",)),
    )
    return Graph(values, ("x", "w"), (), ops, (Ref("y"),))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_storages_of_a_segment(recompute: str) -> None:
    heap = Heap({})
    x = heap.new(1024.0, ACTIVATIONS)
    script = script_of(two_products(), ["w"], OPERATORS)
    tape, made = forward(script, heap, {"x": x}, recompute)
    # x for the first product; h for the gradient of w, which recomputation makes again; y for the caller
    assert heap.total == {"none": 3, "full": 2}[recompute] * 1024
    gradients, weights = {"y": heap.new(1024.0, "transient")}, {}
    backward(tape, heap, gradients, weights)
    assert set(weights) == {"w"}
    assert set(gradients) == {"x"}
    heap.drop(made["y"])
    assert heap.total == 3 * 1024  # x and the two gradients
    # x, y, the gradients of y, h and w, and h, which goes when its reader's backward is done
    assert heap.peak == 6 * 1024


def test_what_recomputation_stops_short_of_is_let_go() -> None:
    """y = x w w: both products are kept; the second is not run again, and what was kept of it goes with the segment."""
    values = {name: Value(name, (16, 16), torch.float32, True) for name in ("x", "w", "h", "y")}
    ops = (
        Op("h", "aten.mm.default", (Ref("x"), Ref("w")), (), ("h",)),
        Op("y", "aten.mm.default", (Ref("h"), Ref("w")), (), ("y",)),
    )
    heap = Heap({})
    x = heap.new(1024.0, ACTIVATIONS)
    script = script_of(Graph(values, ("x", "w"), (), ops, (Ref("y"),)), ["w"], OPERATORS)
    tape, made = forward(script, heap, {"x": x}, "selective")
    assert heap.total == 3 * 1024
    gradients, weights = {"y": heap.new(1024.0, "transient")}, {}
    heap.drop(made["y"])
    backward(tape, heap, gradients, weights)
    assert heap.total == 3 * 1024  # x and the gradients of x and w
    # x, h, y as it was kept, its gradient, that of w for h, that of h
    assert heap.peak == 6 * 1024


def test_a_storage_lives_as_long_as_it_is_held() -> None:
    heap = Heap({"parameters": 10.0})
    storage = hold(heap.new(5.0, ACTIVATIONS))
    heap.drop(storage)
    assert heap.total == 15
    heap.drop(storage)
    assert heap.total == 10
    assert (heap.peak, heap.at_peak) == (15, {"parameters": 10.0, ACTIVATIONS: 5.0})
