"""What plans and programs can say, apart from what any parallelism makes of it: groups of single parameters, axes that mean
different things to different weights, one factor by several algorithms, pieces that are not contiguous.

Each is followed through the data structures: the plan's file, the lowered program, its verification, the shares that ranks hold
and fill, checkpoints. Whether what runs equals one process stands in ``test_experts``, ``test_context`` and ``test_mirrored``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError, VerifyError
from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.graph import Graph, Op, Param, Ref, Value
from meshwright.ir.mesh import DATA, EXPERT, SEQUENCE, Mesh, role_of
from meshwright.ir.pins import Pins
from meshwright.ir.plan import GroupChoice, Plan
from meshwright.ir.program import Program, Stored
from meshwright.ir.rule import neighbourhood
from meshwright.ir.serialize import plan_hash, plan_to_dict
from meshwright.ir.sharding import parse_sharding
from meshwright.passes import rank_program
from meshwright.passes.verify import verify
from meshwright.planner import capture_model, make_plan, rules_of
from meshwright.runtime.groups import Groups
from meshwright.runtime.state.layout import box, take
from meshwright.runtime.state.materialize import fill
from meshwright.views.facts import facts_of
from meshwright.views.prices import Prices
from meshwright.views.report import render
from tests.mixtures import mixtral


def programs_of(plan: Plan) -> list[Program]:
    """The verified program of every rank."""
    rules = rules_of(plan.graph)[0]
    found = [rank_program(plan, rules, rank) for rank in range(plan.mesh.world)]
    for program in found:
        verify(program, plan.graph, rules)
    return found


def from_file(plan: Plan) -> Plan:
    """The plan as a file brings it back."""
    found = Plan.from_dict(json.loads(json.dumps(plan_to_dict(plan))))
    assert plan_hash(found) == plan_hash(plan)
    return found


def targets(program: Program) -> list[str]:
    return [op.target for segment in program.segments for op in segment.graph.ops]


def filled(plan: Plan, model: nn.Module) -> dict[str, torch.Tensor]:
    """What all ranks hold at rest, put together; every rank fills its own shares from the model, replicas must agree."""
    whole: dict[str, torch.Tensor] = {}
    for rank, program in enumerate(programs_of(plan)):
        groups = Groups(plan.mesh, rank, torch.device("cpu"), None, {})
        boxes = {one.value: box(one, plan.mesh, groups.coordinates) for one in program.stored}
        shares = {one.value: torch.empty([n for _, n in boxes[one.value]], dtype=one.dtype) for one in program.stored}
        fill(program, shares, groups, model, 0)
        for one in program.stored:
            at = take(whole.setdefault(one.fqns[0], torch.full(one.shape, torch.nan, dtype=one.dtype)), boxes[one.value])
            assert at.isnan().logical_or(at == shares[one.value]).all(), f"replicas of {one.fqns[0]} differ"
            at.copy_(shares[one.value])
    return whole


# groups of single parameters, axes with roles


@pytest.fixture(scope="module")
def mixture() -> nn.Module:
    torch.manual_seed(0)
    return mixtral(num_hidden_layers=1)


@pytest.fixture(scope="module")
def graph(mixture: nn.Module) -> Graph:
    ids = torch.ones(8, 4, dtype=torch.int64)
    return capture_model(mixture, (), {"input_ids": ids, "labels": ids}, (), None, "fp32")


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    return make_plan(graph, Cluster.parse("cpu:1x4"), Pins(dp=4, ep=2, tp=1, zero=2))


def stored_of(program: Program) -> dict[str, Stored]:
    """{last part of the name: how it is stored}."""
    return {one.fqns[0].removeprefix("model.layers.0.").removesuffix(".weight"): one for one in program.stored}


def test_an_axis_is_data_for_the_router_and_expert_for_the_experts(plan: Plan) -> None:
    """One group of the plan, one block; what each parameter is gathered, reduced and sharded over is its own."""
    assert [role_of(axis) for axis in ("dp", "ep", "cp")] == [DATA, EXPERT, SEQUENCE]
    (assignment,) = [plan.assignments[op.name] for op in plan.graph.ops if op.target == EXPERTS]
    assert {axis: neighbourhood(factor)[0] for axis, factor in assignment.items()} == {"dp": "t0", "ep": "t0&e"}
    for rank, program in enumerate(programs_of(from_file(plan))):
        stored, at = stored_of(program), plan.mesh.coordinates(rank)
        router, experts = stored["mlp.gate"], stored["mlp.experts.down_proj"]
        assert (router.data_axes, router.shard_axes, str(router.tensor)) == (("dp", "ep"), ("dp", "ep"), "[_, _]")
        assert (experts.data_axes, experts.shard_axes, str(experts.tensor)) == (("dp",), ("dp",), "[_@ep, _, _]")
        assert box(router, plan.mesh, at)[0] == (rank, 1)  # 4 rows over 4 ranks
        assert box(experts, plan.mesh, at)[0] == (2 * at["ep"] + at["dp"], 1)  # 2 of 4 experts, one of them at rest


def test_a_wrong_group_of_one_parameter_is_refused(plan: Plan) -> None:
    """The verifier knows what each parameter's gradient must be summed over, whatever the rest of its block says."""
    rules, program = rules_of(plan.graph)[0], programs_of(plan)[0]
    stored = stored_of(program)
    router, experts = stored["mlp.gate"], stored["mlp.experts.down_proj"]
    for old, wrong in (
        (router, replace(router, data_axes=("dp",), shard_axes=("dp",))),
        (experts, replace(experts, data_axes=(), shard_axes=())),
        (experts, replace(experts, tensor=parse_sharding("[_, _, _]"), data_axes=("dp", "ep"))),
    ):
        altered = replace(program, stored=tuple(wrong if one is old else one for one in program.stored))
        with pytest.raises((VerifyError, PlanError)):
            verify(altered, plan.graph, rules)


def test_shares_of_both_are_filled_and_make_the_whole(plan: Plan, mixture: nn.Module) -> None:
    found = filled(plan, mixture)
    for name, parameter in mixture.named_parameters():
        assert torch.equal(found[name], parameter), name


# one factor by several algorithms


def attention() -> Graph:
    """Causal attention of projected inputs, [batch, length, width], 2 heads of 4."""
    values = {"x": Value("x", (2, 8, 8), torch.float32)}
    params, ops = [], []

    def op(name: str, target: str, args: tuple[Any, ...], shape: tuple[int, ...], **options: Any) -> Ref:
        ops.append(Op(name, target, args, tuple(options.items()), (name,), "attend"))
        values[name] = Value(name, shape, torch.float32, True)
        return Ref(name)

    heads = []
    for name in "qkv":
        values[f"w{name}"] = Value(f"w{name}", (8, 8), torch.float32, True)
        params.append(Param(f"w{name}", (name,), True))
        flat = op(f"{name}0", "aten.linear.default", (Ref("x"), Ref(f"w{name}")), (2, 8, 8))
        split = op(f"{name}1", "aten.reshape.default", (flat, (2, 8, 2, 4)), (2, 8, 2, 4))
        heads.append(op(name, "aten.transpose.int", (split, 1, 2), (2, 2, 8, 4)))
    y = op("y", "aten.scaled_dot_product_attention.default", tuple(heads), (2, 2, 8, 4), is_causal=True)
    loss = op("loss", "aten.sum.default", (y,), ())
    return Graph(values, ("x",), tuple(params), tuple(ops), loss, loss="loss")


FORMS = {"all-gather": "mw.attend", "ring": "mw.ring", "h": "aten.scaled_dot_product_attention.default"}
"""{what an axis does with the sequence of attention: the operator that a rank runs}; "h" splits heads there (Ulysses)."""


def by_form(form: str, mesh: Mesh) -> Plan:
    """Everything split along the sequence, attention by one of its forms."""
    graph = attention()
    sequence = {"linear": "b1", "reshape": "dim1", "transpose": "dim1", "sum": "dim2" if form != "h" else "dim1"}
    assignments = {op.name: {"cp": sequence.get(op.target.split(".")[1], form)} for op in graph.ops}
    return Plan(graph, mesh, assignments, {}, (GroupChoice("", 1, ("cp",), ("cp",)),), cluster="h100:1x2")


def test_one_split_by_several_algorithms() -> None:
    """The choice is in the assignment and in the file, is lowered to its own operator, is priced, and is printed."""
    prices = {}
    for form, target in FORMS.items():
        plan = from_file(by_form(form, Mesh.of(cp=2)))
        assert plan.assignments["y"] == {"cp": form}
        for program in programs_of(plan):
            assert targets(program).count(target) == 1
            assert ("mw.all_to_all" in targets(program)) == (form == "h")
        facts = facts_of(plan)
        step = Prices(facts)
        (op,) = [op for op in plan.graph.ops if op.name == "y"]
        price = step.op(op)
        moves = [*price.inside, *(move for edge in step.edges(op) for move in edge.moves)]
        prices[form] = price.compute_seconds, sum(move.seconds for move in moves), {move.forward for move in moves}
        assert form in str(mw.explain(plan, "y"))
        assert f"attention by {'ulysses' if form == 'h' else form}" in render(plan)
    seconds = {form: sum(price[:2]) for form, price in prices.items()}
    assert len(set(seconds.values())) == 3
    assert [prices[form][2] - {""} for form in ("all-gather", "h")] == [{"all_gather"}, {"all_to_all"}]
    assert prices["ring"][1] > 0


def test_an_algorithm_that_the_rule_does_not_name_is_refused() -> None:
    rules = rules_of(attention())[0]
    assert set(rules["y"].algorithms) == {"ring", "all-gather"}
    with pytest.raises((VerifyError, PlanError)):
        programs_of(by_form("rings", Mesh.of(cp=2)))


# pieces that are not contiguous


class Positions(nn.Module):
    """A table added along the sequence, which as a buffer is split where its reader is; and causal attention, which is why a
    sequence is split in two chunks a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(48.0).reshape(8, 6))
        self.out = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.table
        return (h + F.scaled_dot_product_attention(*[self.out(h)[:, None]] * 3, is_causal=True)[:, 0]).square().mean()


def positions() -> Graph:
    shapes = {"x": (4, 8, 6), "table": (8, 6), "w": (6, 6), "h": (4, 8, 6), "y": (4, 8, 6), "loss": ()}
    values = {name: Value(name, shape, torch.float32, name in ("w", "y", "loss")) for name, shape in shapes.items()}
    ops = (
        Op("h", "aten.add.Tensor", (Ref("x"), Ref("table")), (), ("h",)),
        Op("y", "aten.linear.default", (Ref("h"), Ref("w")), (), ("y",)),
        Op("loss", "aten.sum.default", (Ref("y"),), (), ("loss",)),
    )
    params = (Param("table", ("table",), False, True), Param("w", ("out.weight",), True))
    return Graph(values, ("x",), params, ops, Ref("loss"), loss="loss")


def test_a_mirrored_axis_goes_through_file_program_and_shares() -> None:
    """A rank reads chunks r and 2 c - 1 - r of what is split over ``cp*``; at rest pieces are boxes all the same."""
    mesh = Mesh(("dp", "cp"), (2, 2), frozenset({"cp"}))
    assignments = {"h": {"dp": "dim0", "cp": "dim1"}, "y": {"dp": "b0", "cp": "b1"}, "loss": {"dp": "dim0", "cp": "dim1"}}
    plan = from_file(Plan(positions(), mesh, assignments, {}, (GroupChoice("", 1, ("dp", "cp"), ("dp", "cp")),)))
    assert plan.mesh == mesh
    assert str(plan.mesh) == "dp=2 x cp*=2"
    for rank, program in enumerate(programs_of(plan)):
        assert [str(port.sharding) for port in program.inputs] == ["[_, _, _]"]  # what a caller hands over is in one piece
        ops = [op for segment in program.segments for op in segment.graph.ops]
        assert [op.target for op in ops if dict(op.kwargs).get("mirrored")] == ["mw.slice", "mw.mirror"]
        assert [op.target for op in ops if "table" in op.inputs] == ["mw.mirror"]
        table, weight = program.stored
        at = mesh.coordinates(rank)
        assert (str(table.tensor), box(table, mesh, at)) == ("[_@cp, _]", ((4 * at["cp"], 4), (0, 6)))
        assert (weight.data_axes, weight.shard_axes) == (("dp", "cp"), ("dp", "cp"))  # the sequence is one more data axis to it
    torch.manual_seed(1)
    model = Positions()
    found = filled(plan, model)
    assert torch.equal(found["table"], model.table)
    assert torch.equal(found["out.weight"], model.out.weight)
    wrong = from_file(replace(plan, mesh=Mesh.of(dp=2, cp=2)))
    assert plan_hash(wrong) != plan_hash(plan)


def checkpoints(rank: int, folder: str) -> list[str]:
    """Save under one plan, load under each of the others: contents, and what a second step makes of them."""
    mesh, wrong = init_device_mesh("cpu", (2,)), list[str]()
    x = torch.linspace(-1, 1, 4 * 8 * 6).reshape(4, 8, 6)
    pins: Mapping[str, Any] = {"cp*": {"cp": 2, "zero": 1}, "dp": {"dp": 2, "zero": 3}}

    def build(name: str) -> Any:
        torch.manual_seed(len(name))  # every plan begins with other weights
        parallel = mw.autoparallel(Positions(), mesh, (x,), pins=pins[name], progress=False)
        return parallel, torch.optim.AdamW(parallel.parameters(), lr=0.1)

    def step(parallel: Any, optimizer: Any) -> float:
        loss = parallel(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for source, target in (("cp*", "dp"), ("dp", "cp*")):
        (one, its), (other, others) = build(source), build(target)
        step(one, its)
        one.save(f"{folder}/{source}{target}", its)
        other.load(f"{folder}/{source}{target}", others)
        losses = [step(one, its), step(other, others), step(one, its), step(other, others)]
        if losses[0] != pytest.approx(losses[1], rel=1e-5) or losses[2] != pytest.approx(losses[3], rel=1e-5):
            wrong.append(f"{source} -> {target}: {losses}")
        if source == "cp*" and one.plan.mesh.mirrored != {"cp"}:
            wrong.append(f"cp is not mirrored: {one.plan.mesh}")
    return wrong


def test_checkpoints_go_between_mirrored_and_other_plans(pool: Callable[[int], Any], tmp_path: Path) -> None:
    assert pool(2).run(checkpoints, str(tmp_path)) == [[], []]
