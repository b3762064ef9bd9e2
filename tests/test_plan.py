"""Plans as values: files, explanations, differences, graphs."""

from __future__ import annotations

import contextvars
import itertools
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.compiler.capture.capture import capture
from meshwright.compiler.solver.solve import solve
from meshwright.cost.cluster import Cluster
from meshwright.cost.collectives import COLLECTIVES, Network
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.reading.graphs import graph_from_dict
from meshwright.ir.serialize import graph_digest, graph_to_dict, plan_hash, plan_to_dict
from meshwright.ir.sharding import parse_sharding
from meshwright.ir.writing.canonical import canonical
from meshwright.planner import make_plan
from meshwright.views.alternatives import Alternatives
from meshwright.views.difference import diff
from meshwright.views.explain import explain
from meshwright.views.facts import facts_of
from meshwright.views.formulas import closed_form, formulas
from meshwright.views.network import to_networkx
from meshwright.views.prices import Move, Prices
from tests.handmade import handmade_graph, handmade_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return handmade_plan()


# files


def test_a_saved_plan_is_the_same_plan(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert plan_hash(read) == plan_hash(plan)
    plan = canonical(plan)
    assert graph_digest(read.graph) == graph_digest(plan.graph)
    assert read.graph.ops == plan.graph.ops
    assert (read.groups, read.copies, read.mesh, read.schedule) == (plan.groups, plan.copies, plan.mesh, plan.schedule)
    assert str(read) == str(plan)


def test_saving_is_all_or_nothing(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("the disk went away")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk went away"):
        replace(plan, optimizer="sgd").save(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "not a plan file"),
        ("[1, 2]", "no meshwright plan"),
        ('{"model_type": "llama"}', "no meshwright plan"),
        ('{"meshwright": 999}', "of format 999"),
        ('{"meshwright": 1}', "damaged"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        Plan.load(tmp_path / "plan.json")


def test_every_missing_part_of_a_file_is_noticed(plan: Plan, tmp_path: Path) -> None:
    data = plan_to_dict(plan)
    for key in data.keys() - {"registered"}:  # older files do not have it
        (tmp_path / "plan.json").write_text(json.dumps({k: v for k, v in data.items() if k != key}))
        with pytest.raises(PlanError):
            Plan.load(tmp_path / "plan.json")


def test_the_hash_covers_decisions_not_predictions(plan: Plan) -> None:
    assert plan_hash(replace(plan, predicted=None, notes=(), certificate=None)) == plan_hash(plan)
    assert plan_hash(replace(plan, assignments={**plan.assignments, "relu0": {}})) != plan_hash(plan)
    assert plan_hash(replace(plan, groups=(replace(plan.groups[0], zero=3), *plan.groups[1:]))) != plan_hash(plan)


# explanations


def test_what_ranks_compare_is_what_is_computed_not_its_order_or_names() -> None:
    """A process that captured independent operators in another order has the same graph; one with another operator has not."""

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) + torch.tanh(x) * torch.tensor([2.0, 3.0])

    graph = capture(Branches(), (torch.randn(3, 2),), {})
    at = [op.target for op in graph.ops].index("aten.tanh.default")
    ops = graph.ops
    assert ops[at - 1].target == "aten.relu.default"
    swapped = replace(graph, ops=(*ops[: at - 1], ops[at], ops[at - 1], *ops[at + 1 :]))
    renamed = graph_from_dict(json.loads(json.dumps(graph_to_dict(graph)).replace('"tanh"', '"elsewhere"')))
    other = replace(graph, ops=(*ops[:at], replace(ops[at], target="aten.sin.default"), *ops[at + 1 :]))
    constant = next(iter(graph.constants))
    numbers = replace(graph, constants={constant: torch.tensor([2.0, 4.0])})
    assert graph_digest(swapped) == graph_digest(renamed) == graph_digest(graph)
    assert graph_digest(graph) not in (graph_digest(other), graph_digest(numbers))


def test_explain_an_operator(plan: Plan) -> None:
    text = explain(plan, "down1")
    assert "aten.linear.default" in text
    assert "source   model.py:1" in text
    assert "dp splits b0, tp splits k" in text
    assert "%p_blocks_1_down_weight: f32[16, 32@tp], read as f32[16, 32@tp] ~dp" in text
    assert "result   %down1: f32[8@dp, 16] +tp" in text
    assert "moves    %down1: fwd all-reduce@tp" in text
    marked = [line for line in text.splitlines() if line.strip().startswith("->")]
    assert len(marked) == 1
    assert "dp splits b0, tp splits k" in marked[0]


def test_prices_are_those_of_the_cost_model(plan: Plan) -> None:
    prices = Prices(facts_of(plan))
    ops = {op.name: op for op in plan.graph.ops}
    network = Network(Cluster.parse(plan.cluster), plan.mesh)
    (edge,) = [edge for edge in prices.edges(ops["add1"]) if edge.value == "down1"]
    assert edge.seconds == pytest.approx(network.seconds("all_reduce", ("tp",), 8 * 16 * 4 / 2))
    assert edge.bytes_ == 8 * 16 * 4 / 2
    # the two readers of a block's input share the reduction of its gradient, which one of them needs
    shared = [edge for name in ("up1", "add1") for edge in prices.edges(ops[name]) if edge.value == "add0"]
    assert sum(edge.seconds for edge in shared) == pytest.approx(network.seconds("all_reduce", ("tp",), 8 * 16 * 4 / 2))


@pytest.mark.parametrize("name", ["up0", "relu1", "down1", "add0", "square"])
def test_every_alternative_is_the_best_plan_with_that_choice(plan: Plan, name: str) -> None:
    """Against the solver on the chain in which every equal block has that choice and no other."""
    known = Alternatives(facts_of(plan))
    op = next(op for op in plan.graph.ops if op.name == name)
    found = known.of(op)
    assert found is not None
    kind, model, var = known.places[name]
    chain = replace(known.chain, sequence=tuple(known.chain.sequence[at] for at in known.folded.serves))
    assert len(found) <= len(model.op_choices[var])
    for one in found:
        number = model.op_choices[var].index(one.assignment)
        kinds = list(chain.kinds)
        block = kinds[kind].variants[0]
        unary = [array.copy() for array in block.unary]
        unary[var][[other for other in range(len(unary[var])) if other != number]] = math.inf
        kinds[kind] = replace(kinds[kind], variants=(replace(block, unary=tuple(unary)),))
        best = solve(replace(chain, kinds=tuple(kinds)), gap=1e-6)
        assert one.seconds == pytest.approx(best.time, rel=2e-3)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert sum(one.chosen for one in found) <= 1


def test_explain_says_what_decides_and_what_is_closed(plan: Plan) -> None:
    text = explain(plan, "down1")
    assert "not open: dp splits k: a data axis splits the batch and nothing else" in text
    assert "formula  all-reduce@tp" not in text  # it stands before the operator that reads the sum
    summed = explain(plan, "add1")
    assert "all-reduce@tp by ring: sends 2*S*(P - 1)/P = 256 B for S = 256 B, P = 2" in " ".join(summed.split())
    assert max(map(len, [*text.splitlines(), *summed.splitlines()])) <= 120
    assert not re.search(r"e\+\d+ [KMG]iB", text + summed)


@pytest.mark.parametrize("cluster", ["h100:4x8", "tpu-v4:4x4", "cpu:1x8"])
def test_closed_forms_are_the_prices(plan: Plan, cluster: str) -> None:
    """Of every kind of collective over every axis, from latencies to bandwidths."""
    where = Cluster.parse(cluster)
    mesh = Mesh(("dp", "tp"), (where.world // 4, 4))
    prices = Prices(facts_of(replace(plan, cluster=cluster, mesh=mesh)))
    for kind, axis, bytes_ in itertools.product(COLLECTIVES, ("dp", "dp,tp"), (64.0, 1e9)):
        form = closed_form(prices, kind, axis, bytes_)
        assert form.seconds == pytest.approx(prices.costs.collective(kind, axis.split(","), bytes_), rel=1e-9)
        assert form.priced == prices.costs.collective(kind, axis.split(","), bytes_)
        ranks = mesh.size(axis.split(","))
        times = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1, "p2p": 1}.get(kind, (ranks - 1) / ranks)
        assert form.sent == pytest.approx(bytes_ * times)


def test_equal_collectives_of_an_operator_are_one_line(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an exchange of experts: there and back, forward and backward."""
    prices, op = Prices(facts_of(plan)), plan.graph.ops[0]
    there, back = Move("tp", "all_to_all", "", 1e6, 2, 1e-3, 0.0), Move("tp", "", "all_to_all", 1e6, 2, 0.0, 2e-3)
    known = prices.op(op)
    monkeypatch.setattr(prices, "op", lambda op: replace(known, inside=(there, there, back, back)))
    (line,) = [line for line in formulas(prices, op) if "all-to-all@tp" in line]
    assert ", 8 times in a step" in line
    assert line.endswith("not hidden in a step: 6 ms")


def test_explain_a_whole_plan(plan: Plan) -> None:
    known = replace(plan.predicted, compute_seconds=0.01, exposed_communication_seconds=0.0025)
    lines = explain(replace(plan, predicted=known)).splitlines()
    assert any(line.startswith("bound by   compute") for line in lines)
    assert any("exposed communication 2.5 ms, 20.0% of the step" in line for line in lines)
    assert any("all-reduce@tp" in line for line in lines)
    assert explain(replace(plan, predicted=None)) == "nothing is predicted of this plan: no search made it"


def test_a_cluster_of_ones_own_has_no_prices(plan: Plan) -> None:
    text = explain(replace(plan, cluster="abacus@desk:1x4"), "down1")
    assert "no prices" in text
    assert "dp splits b0, tp splits k" in text


def test_explain_a_parameter_and_a_module(plan: Plan) -> None:
    text = explain(plan, "blocks.0.up.weight")
    assert "placed   f32[32@tp, 16]" in text
    assert "gradient summed over dp" in text
    assert "state split over dp (ZeRO)" in text
    assert "1 KiB per rank in a block, 2 KiB whole" in text
    assert "operator up0" in text
    module = explain(plan, "blocks.1")
    assert module.startswith("module blocks.1: 4 operators")
    assert "weight  blocks.1.down.weight: f32[16, 32@tp]" in module
    assert "%down1: f32[8@dp, 16] +tp   [fwd all-reduce@tp]" in module
    assert "up0" not in module
    assert "alternatives" not in module
    ops = tuple(replace(op, module="blocks.1.down") if op.name == "down1" else op for op in plan.graph.ops)
    layers = replace(plan, graph=replace(plan.graph, ops=ops))
    alone = explain(layers, "blocks.1.down")
    assert "->" in alone
    assert alone.partition("\n\n")[2] == explain(layers, "down1")  # the layer's only operator


def test_explain_takes_every_name_that_it_prints(plan: Plan) -> None:
    given = explain(plan, "x")
    assert given.startswith("input x\n  placed   f32[8@dp, 16]\n  bytes    512 B whole\n  read by  up0 (aten.linear.default)")
    assert explain(plan, "input:x") == explain(plan, "%x") == given
    assert explain(plan, "%down1") == explain(plan, "blocks.1.down:linear") == explain(plan, "down1")
    assert explain(plan, "%p_blocks_0_up_weight") == explain(plan, "blocks.0.up.weight")
    ops = tuple(replace(op, module="blocks.1") if op.name == "down1" else op for op in plan.graph.ops)
    read = explain(replace(plan, graph=replace(plan.graph, ops=ops)), "blocks.1.down")  # the module around reads its weight
    assert read.splitlines()[0] == "module blocks.1.down: 0 operators"
    assert "weight  blocks.1.down.weight: f32[16, 32@tp]" in read
    assert "read by  down1 (aten.linear.default) of blocks.1" in read


@pytest.mark.parametrize("long", [".".join(["a_rather_long_module_name"] * 4), "x" * 140], ids=["many words", "one word"])
def test_answers_keep_their_width_whatever_names_are_long(plan: Plan, long: str) -> None:
    """What is longer than a line is broken, and nothing is left out."""
    graph = plan.graph
    named = replace(
        graph,
        params=tuple(replace(one, fqns=tuple(fqn.replace("blocks", long) for fqn in one.fqns)) for one in graph.params),
        ops=tuple(replace(op, module=op.module.replace("blocks", long)) for op in graph.ops),
        blocks=tuple(replace(block, path=block.path.replace("blocks", long)) for block in graph.blocks),
    )
    groups = tuple(replace(group, path=group.path.replace("blocks", long)) for group in plan.groups)
    renamed = replace(plan, graph=named, groups=groups)
    other = replace(renamed, groups=tuple(replace(group, zero=3) for group in groups))
    names = (None, "up0", f"{long}.0.up.weight", f"{long}.0", f"{long}.1.down")
    for text in (*(explain(renamed, name, changes=False) for name in names), diff(renamed, other), str(renamed)):
        assert max(map(len, text.splitlines())) <= 120
    assert f"{long}.0.up.weight" in "".join(explain(renamed, names[2]).split())
    assert f"{long}.0..1:zero2->3" in "".join(diff(renamed, other).split())


def test_an_unknown_name_gets_the_nearest(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"no operator, .* 'blocks.0.up.weigth'; did you mean blocks.0.up.weight"):
        explain(plan, "blocks.0.up.weigth")


# differences


def test_no_differences(plan: Plan) -> None:
    assert diff(plan, handmade_plan()) == "no differences"


def test_differences_are_named_and_folded(plan: Plan) -> None:
    groups = tuple(replace(group, zero=3) if group.path else group for group in plan.groups)
    other = replace(plan, groups=groups, precision="bf16", predicted=replace(plan.predicted, step_seconds=0.025))
    decided, seconds = diff(plan, other).splitlines()[:3], diff(plan, other).splitlines()[3:]
    assert decided == [
        "precision: fp32 -> bf16", "predicted step: 12.5 ms -> 25 ms", "block blocks.0..1: zero 2 -> 3",
    ]
    assert all(line.startswith(("time of block blocks.", "time outside the blocks: ", "    ")) for line in seconds)
    assert any("parameters beside compute" in line for line in seconds)


def test_changed_placements_show_in_the_notation(plan: Plan) -> None:
    columns = {name: {**a, "tp": "n"} if name in ("down0", "down1") else a for name, a in plan.assignments.items()}
    lines = diff(plan, replace(plan, assignments=columns)).splitlines()
    assert "parameter blocks.0..1.down.weight: f32[16, 32@tp] -> f32[16@tp, 32]" in lines
    assert "result of blocks.0..1.down: f32[8@dp, 16] +tp -> f32[8@dp, 16@tp]" in lines
    assert max(map(len, lines)) <= 120
    parts = replace(plan.predicted, optimizer_seconds=0.002, bytes_by_kind={"optimizer": 2.0**20})
    heads = diff(plan, replace(plan, predicted=parts)).splitlines()
    assert "  time of optimizer: none -> 2 ms" in heads  # seconds and bytes of one name stay apart
    assert "  memory of optimizer: none -> 1 MiB" in heads


def test_another_model_is_said_to_be_one(plan: Plan) -> None:
    graph = plan.graph
    ops = (*graph.ops[:1], replace(graph.ops[1], target="aten.gelu.default"), *graph.ops[2:])
    lines = diff(plan, replace(plan, graph=replace(graph, ops=ops))).splitlines()
    assert lines == ["the plans are for different models or inputs: 1 of 10 operators differ"]


# graphs


def test_to_networkx_has_every_use(plan: Plan) -> None:
    found = to_networkx(plan)
    assert found.number_of_nodes() == len(plan.graph.ops) + len(plan.graph.params) + len(plan.graph.inputs)
    assert found.number_of_edges() == sum(len(op.inputs) for op in plan.graph.ops)
    assert found.number_of_edges("add1", "square") == 2  # one tensor used twice is two edges
    assert found.nodes["down0"]["sharding"] == "f32[8@dp, 16] +tp"
    assert found.nodes["down0"]["source"] == "model.py:1"
    assert found.nodes["p_blocks_0_up_weight"]["kind"] == "parameter"
    (edge,) = found.get_edge_data("add0", "up1").values()
    assert (edge["have"], edge["need"]) == ("f32[8@dp, 16]", "f32[8@dp, 16] ~tp")
    assert edge["collectives"] == "bwd all-reduce@tp"
    (sum_,) = found.get_edge_data("down0", "add0").values()
    assert (sum_["collectives"], sum_["bytes"]) == ("fwd all-reduce@tp", 4 * 16 * 4.0)
    assert sum_["seconds"] == sum_["forward_seconds"] > 0 == sum_["backward_seconds"]
    assert found.nodes["down0"]["flops"] == 3 * 2 * 4 * 16 * 16  # batch over dp, contracted over tp; 3 products


@pytest.mark.parametrize("cluster", ["cpu:1x4", ""])
def test_the_graph_goes_through_files(plan: Plan, cluster: str, tmp_path: Path) -> None:
    import networkx as nx

    found = to_networkx(replace(plan, cluster=cluster))
    assert ("flops" in found.nodes["up0"]) == bool(cluster)
    nx.write_graphml(found, tmp_path / "plan.graphml")
    read = nx.read_graphml(tmp_path / "plan.graphml", force_multigraph=True, edge_key_type=int)
    again = nx.node_link_graph(json.loads(json.dumps(nx.node_link_data(found, edges="edges"))), edges="edges")
    for other in (read, again):
        assert {name: dict(data) for name, data in other.nodes(data=True)} == dict(found.nodes(data=True))
        edges = {(a, b, k): {name: text for name, text in data.items() if name != "id"}
                 for a, b, k, data in other.edges(keys=True, data=True)}
        assert edges == {(a, b, k): data for a, b, k, data in found.edges(keys=True, data=True)}
        assert other.graph["mesh"] == "dp=2 x tp=2"


# the value itself


def test_group_of(plan: Plan) -> None:
    assert [plan.group_of(i).path for i in range(len(plan.graph.ops))] == ["blocks.0"] * 4 + ["blocks.1"] * 4 + ["", ""]


def test_repr_is_one_line(plan: Plan) -> None:
    assert repr(plan) == "<Plan dp=2 x tp=2, 10 operators, 2 blocks>"


def test_a_planned_plan_prints_explains_and_returns(tmp_path: Path) -> None:
    """The planner's own plan of the same graph goes through every door."""
    from meshwright.ir.pins import Pins

    made = make_plan(handmade_graph(), Cluster.parse("cpu:1x4"), Pins(dp=2, tp=2))
    made.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert str(read) == str(made)
    assert diff(made, read) == "no differences"
    for op in made.graph.ops:
        assert "->" in explain(made, op.name)
    assert all(parse_sharding(node["sharding"].split("; ")[0]) for _, node in to_networkx(made).nodes(data=True))


def _doubling(call: Any) -> Any:
    return call.line("... -> ...")


def _halving(call: Any) -> Any:
    return call.line("... -> ... ; +0")


def test_a_plan_names_the_registered_rules_that_it_needs(tmp_path: Path) -> None:
    """What is missing or another rule where it is loaded is said by name; what the model does not use is not recorded."""
    path = tmp_path / "plan.json"
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

    def made(rule: Any) -> Plan:
        mw.register_rule("aten.relu.default", rule)
        mw.register_rule("aten.tanh.default", "... -> ...")
        plan = mw.plan(model, "cpu:1x2", ((torch.zeros(4, 8),), {}), loss_fn=lambda y: y.sum(), pins={"dp": 2})
        assert list(plan.registered) == ["aten.relu.default"]
        plan.save(path)
        assert Plan.load(path).registered == plan.registered
        return plan

    def read(rule: Any) -> Plan:
        mw.register_rule("aten.relu.default", rule)
        return Plan.load(path)

    def alone(function: Any, *args: Any) -> Any:
        return contextvars.copy_context().run(function, *args)

    for rule, other in (("... -> ...", "*b -> *b"), (_doubling, _halving), (_doubling, lambda call: call.line("*b -> *b"))):
        plan = alone(made, rule)
        assert alone(read, rule).registered == plan.registered
        with pytest.raises(PlanError, match=r"aten\.relu\.default, here nobody registered one.*register_rule"):
            Plan.load(path)
        with pytest.raises(PlanError, match=r"registered rule .* for aten\.relu\.default, here it is"):
            alone(read, other)
        with pytest.raises(PlanError, match=r"aten\.relu\.default, here nobody"):
            mw.show(plan)  # a value that never was in a file
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "decisions": {**data["decisions"], "registered": {}}}))
    with pytest.raises(PlanError, match=r"made with no registered rule for aten\.relu\.default, here it is"):
        alone(read, _doubling)
    del data["decisions"]["registered"]
    path.write_text(json.dumps(data))
    assert Plan.load(path).registered == {}  # written before rules were recorded
