"""Tokens that go once to every node and rank that has one of their experts: how many do, and that the answers are the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from meshwright.compiler.capture.experts.router import limited
from meshwright.compiler.placement.costs import Costs
from meshwright.cost.cluster import Cluster
from meshwright.cost.collectives import Network, neighbours
from meshwright.errors import RunError
from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.declared.routing import Routing
from meshwright.ir.mesh import Mesh
from meshwright.ir.pins import PinError, Pins
from meshwright.ir.plan import Plan
from meshwright.planner import capture_model, make_plan, rules_of
from meshwright.published.zoo import Trained
from meshwright.runtime.collectives import Group, exchange_rows
from meshwright.runtime.experts import mixture, once
from tests.mixtures import deepseek, make


@pytest.mark.parametrize(
    ("count", "chosen", "groups", "kept"), [(8, 3, 1, 1), (8, 2, 4, 2), (12, 3, 4, 3), (12, 4, 6, 2), (16, 3, 4, 1)]
)
def test_parts_that_a_token_reaches_are_those_of_all_routings(count: int, chosen: int, groups: int, kept: int) -> None:
    size = count // groups
    routings = [
        experts
        for open_ in itertools.combinations(range(groups), kept)
        for experts in itertools.combinations([e for e in range(count) if e // size in open_], chosen)
    ]
    for parts in (n for n in range(1, count + 1) if count % n == 0):
        mean = sum(len({e // (count // parts) for e in experts}) for experts in routings) / len(routings)
        found = Routing(count, chosen, groups, kept).reached(parts)
        if parts % groups and groups % parts:
            assert mean <= found + 1e-9  # parts cut across groups
        else:
            assert found == pytest.approx(mean)


def test_groups_of_a_router_are_found_by_their_data_flow(tmp_path: Any) -> None:
    for name, want in (("deepseek", (2, 1)), ("qwen3", (1, 1)), ("ernie", (1, 1))):
        model, batch = make(name)
        graph = capture_model(model, (), dict(batch), (), None, "fp32")
        (call,) = (op for op in graph.ops if op.target == EXPERTS)
        assert call.args[0].limited == want
        assert limited(graph, call.inputs[2], 4, 2) == (1, 1)  # weights are no ids
        plan = make_plan(graph, Cluster.parse("h100:1x2"), Pins(dp=2, ep=2, pp=1, microbatches=1))
        plan.save(tmp_path / "plan.json")
        again = [op for op in Plan.load(tmp_path / "plan.json").graph.ops if op.target == EXPERTS]
        assert [op.args[0].limited for op in again] == [want]


def test_the_two_hops_are_priced_as_exchanges_of_their_own_ranks() -> None:
    cluster, mesh = Cluster.parse("h100:4x8"), Mesh.of(dp=2, ep=16)
    network = Network(cluster, mesh)
    assert neighbours(cluster.island, mesh, ("ep",)) == 8
    assert neighbours(cluster.island, mesh, ("dp",)) == 1
    assert neighbours(cluster.island, Mesh.of(ep=4, tp=8), ("ep", "tp")) == 8
    assert neighbours(cluster.island, Mesh.of(dp=4, ep=8), ("ep",)) == 1  # a node has the whole group
    inside = Network(cluster, Mesh.of(a=4, b=8)).seconds("all_to_all", "b", 1e8)
    assert network.seconds("all_to_all%8", "ep", 1e8) == pytest.approx(inside)
    across = Network(cluster, Mesh.of(a=2, b=2, c=8)).seconds("all_to_all", "b", 1e8)
    assert network.seconds("all_to_all/8", "ep", 1e8) == pytest.approx(across)


def test_axes_of_samples_and_of_the_sequence_are_one_group_to_the_rows_that_travel() -> None:
    """The same exchange as over one axis of as many ranks, whose tokens are as many."""
    model, batch = make("deepseek")
    graph = capture_model(model, (), dict(batch), (), None, "fp32")
    (call,) = (op for op in graph.ops if op.target == EXPERTS)
    rule, cluster = rules_of(graph)[0][call.name], Cluster.parse("h100:2x2")

    def exchanged(assignment: dict[str, str], mesh: Mesh) -> list[tuple[str, float, bool]]:
        assert rule.legal(assignment, mesh)
        found = Costs(cluster, mesh, microbatches=1, itemsize=4, state_bytes=8.0).inside(rule, assignment)
        return [(kind, bytes_, backward) for kind, axes, bytes_, backward in found if axes == mesh.axes]

    both, one = Mesh.of(ep=2, cp=2), Mesh.of(ep=4)
    for near in ("", ":2"):
        found = exchanged({"ep": f"t0&e{near}", "cp": f"t1&e{near}"}, both)
        assert len(found) == (8 if near else 4)
        assert found == exchanged({"ep": f"t0&e{near}"}, one)
    assert not rule.legal({"ep": "t0&e", "cp": "t1&e:2"}, both)  # they move in one way


def test_the_search_sends_tokens_once_to_a_node_where_the_network_between_nodes_is_slow() -> None:
    """All 8 experts of a token are on one of two nodes: one row crosses for half of the tokens, not 8."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 256}
    with torch.device("meta"):
        model = Trained(deepseek(**sizes, n_routed_experts=64, num_experts_per_tok=8, n_group=2, topk_group=1))
    ids = torch.zeros(64, 512, dtype=torch.int64, device="meta")
    graph = capture_model(model, (), {"input_ids": ids, "labels": ids}, (), None, "bf16")
    name = next(op.name for op in graph.ops if op.target == EXPERTS)
    pins, cluster = Pins(dp=16, ep=16, tp=1, pp=1, zero=1, microbatches=1, recompute="none"), Cluster.parse("h100:2x8")
    plan = make_plan(graph, cluster, pins, precision="bf16")
    assert dict(plan.assignments[name]) == {"ep": "t0&e:8"}
    direct = make_plan(graph, cluster, replace(pins, operators={"*experts:experts": "ep=t0&e"}), precision="bf16")
    assert plan.predicted is not None
    assert direct.predicted is not None
    assert plan.predicted.step_seconds < direct.predicted.step_seconds
    again = make_plan(graph, cluster, plan.to_pins(), precision="bf16")
    assert dict(again.assignments[name]) == {"ep": "t0&e:8"}
    with pytest.raises(PinError, match="t0&e:3"):
        make_plan(graph, cluster, replace(pins, operators={"*experts:experts": "ep=t0&e:3"}), precision="bf16")


def _call(ids: torch.Tensor, x: torch.Tensor, how: Any, given: Any, **where: Any) -> tuple[torch.Tensor, ...]:
    """The answers, and the gradients of tokens, weights and experts."""
    x, weights, *operands = (one.clone().requires_grad_() for one in (x, *given))
    made = mixture.experts(how, x, ids, weights, operands, **where)
    found = torch.autograd.grad((made * torch.arange(1.0, made.shape[-1] + 1)).sum(), [x, weights, *operands])
    return made, *found


def _both(rank: int, world: int) -> list[str]:
    """What differs from the direct exchange and from one process, and counts that are not those of the routing."""
    dist_group, wrong, sent = dist.group.WORLD, list[str](), dict[str, int]()
    assert dist_group is not None
    group = Group(dist_group.group_name, rank, world)
    model, batch = make("mixtral", num_hidden_layers=1, num_local_experts=16, num_experts_per_tok=4)
    graph = capture_model(model, (), dict(batch), (), None, "fp32")
    (call,) = (op for op in graph.ops if op.target == EXPERTS)
    how, own = call.args[0], 16 // world
    torch.manual_seed(7)
    operands = [torch.randn(graph.values[ref.name].shape) for ref in call.args[4]]
    tokens = 5 * world
    x, weights = torch.randn(tokens, 16), torch.rand(tokens, 4)
    even = torch.stack([torch.randperm(16)[:4] for _ in range(tokens)])
    for kind, ids in {"even": even, "skewed": torch.tensor([0, 1, 2, 5]).expand(tokens, 4)}.items():
        whole = _call(ids, x, how, (weights, *operands))
        mine, held = slice(5 * rank, 5 * rank + 5), slice(own * rank, own * rank + own)
        local = (weights[mine], *(one[held] for one in operands))
        want = [one[mine] for one in whole[:3]] + [one[held] for one in whole[3:]]
        for near in (None, *(n for n in (1, 2, 4, 8) if world % n == 0)):
            sent.clear()

            def counted(rows: torch.Tensor, to: list[int], came: list[int], by: Group) -> torch.Tensor:
                if rows.dtype == torch.float32 and rows.shape[1:] == (16,) and "rows" not in sent:  # the first hop's tokens
                    sent["rows"] = sum(to)
                return exchange_rows(rows, to, came, by)

            once.exchange_rows = counted
            try:
                found = _call(ids[mine], x[mine], how, local, pieces=((world, -1),), axis=group, near=near)
            finally:
                once.exchange_rows = exchange_rows
            parts = {None: 16, world: world}.get(near, world // (near or 1))
            expected = sum(len({int(e) // (16 // parts) for e in chosen}) for chosen in ids[mine])
            if sent["rows"] != expected:
                wrong.append(f"{kind}, near={near}: {sent['rows']} rows sent, not {expected}")
            for one, other in zip(found, want, strict=True):
                if not torch.allclose(one, other, rtol=1e-4, atol=1e-4):
                    wrong.append(f"{kind}, near={near}: off by {(one - other).abs().max()}")
    try:
        mixture.experts(how, x, torch.full((tokens, 4), 16), weights, operands, pieces=((world, -1),), axis=group, near=1)
        wrong.append("an expert that is not there")
    except RunError:
        pass
    return wrong


@pytest.mark.parametrize("world", [4, 8])
def test_answers_and_gradients_are_those_of_one_process(world: int, pool: Callable[[int], Any]) -> None:
    for wrong in pool(world).run(_both, world):
        assert not wrong
