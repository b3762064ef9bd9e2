"""The cut of a program into stages: what crosses, who stores what, and what is no pipeline."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from meshwright import api
from meshwright.compiler.rules import default_rules
from meshwright.ir.graph import Graph, Op, Param, Ref, Value
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import GroupChoice, Pipeline, Plan
from meshwright.ir.program import DEPENDENCY, Program
from meshwright.ir.sharding import parse_sharding
from meshwright.passes import cut_for_ranks, cut_stages, rank_program
from meshwright.passes.verify import verify
from meshwright.programs import checked_program

AT = (0, 1, 1, 0)


@cache
def chain() -> Graph:
    """x -> embedding-like product with a (tied) weight -> three layers -> the same weight again -> loss. ``skip`` is read by
    the last operators only, ``mask`` is made of an input."""
    values: dict[str, Value] = {"x": Value("x", (8, 4), torch.float32)}
    params: list[Param] = []
    ops: list[Op] = []

    def op(name: str, target: str, *args: object, shape: tuple[int, ...] = (8, 4), gradient: bool = True) -> Ref:
        ops.append(Op(name, target, args, (), (name,), "", "model.py:1"))
        values[name] = Value(name, shape, torch.float32, gradient)
        return Ref(name)

    for name in ("tied", "w1", "w2", "spare"):
        values[name] = Value(name, (4, 4), torch.float32, True)
        params.append(Param(name, (f"{name}.weight", "again.weight") if name == "tied" else (f"{name}.weight",), True))
    mask = op("mask", "aten.relu.default", Ref("x"), gradient=False)
    h = op("h0", "aten.linear.default", Ref("x"), Ref("tied"))
    skip = op("skip", "aten.relu.default", h)
    h = op("h1", "aten.linear.default", h, Ref("w1"))
    h = op("h2", "aten.linear.default", h, Ref("w2"))
    h = op("h3", "aten.add.Tensor", h, skip)
    h = op("h4", "aten.mul.Tensor", h, mask)
    h = op("h5", "aten.linear.default", h, Ref("tied"))
    loss = op("loss", "aten.sum.default", h, shape=())
    return Graph(values, ("x",), tuple(params), tuple(ops), {"loss": loss, "hidden": Ref("h1")}, loss=loss.name)


def plan(cuts: tuple[int, ...] = (0, 3, 4, 6, 9), at: tuple[int, ...] = AT, schedule: str = "zbv") -> Plan:
    graph = chain()
    split = {op.name: {"dp": "b0" if "linear" in op.target else "dim0"} for op in graph.ops}
    rows = {name: parse_sharding("[_@dp, _]") for name in ("x",)}
    mesh = Mesh(("pp", "dp"), (max(at) + 1, 2))
    return Plan(graph, mesh, split, rows, (GroupChoice("", 1, ("dp",), ("dp",)),), pipeline=Pipeline(schedule, cuts, at))


def whole(made: Plan, rank: int) -> Program:
    rules = default_rules()
    by_name = rules.rules_of(made.graph)
    program = rank_program(made, by_name, rank)
    verify(program, made.graph, by_name)
    return program


def part(made: Plan, rank: int) -> Program:
    return cut_stages(whole(made, rank), made.pipeline)


def test_what_crosses() -> None:
    """Whatever later stages read goes through every stage between, at local shapes, with its gradient or without."""
    stages = part(plan(), 0).stages
    assert stages is not None
    names = [[value.name for value in values] for values in stages.crossing]
    assert names == [["mask", "h0", "skip"], ["mask", "skip", "h1"], ["mask", "h3"]]
    assert [value.shape for value in stages.crossing[0]] == [(4, 4)] * 3
    assert [value.differentiable for value in stages.crossing[0]] == [False, True, True]
    assert stages.made == {"h1": 1, part(plan(), 0).loss: 3}
    assert stages == part(plan(), 3).stages


def test_a_prologue_is_made_where_it_is_read() -> None:
    """Nothing of it crosses; a rank keeps what its stages need."""
    made = plan()
    made = replace(made, schedule=replace(made.schedule, prologue=frozenset({"mask"})))
    first, second = part(made, 0), part(made, 2)
    assert first.stages is not None
    assert not any(value.name == "mask" for values in first.stages.crossing for value in values)
    assert [segment.prologue for segment in first.segments] == [True, False, False]
    assert not any(segment.prologue for segment in second.segments)


def test_who_stores_what() -> None:
    """What a rank's stages read, and with the first stage what nobody does; a tied weight is stored by all its readers."""
    found = {rank: {item.value: item.holders for item in part(plan(), rank).stored} for rank in (0, 2)}
    assert found == {0: {"tied": (0,), "spare": (0,)}, 2: {"w1": (1,), "w2": (1,)}}
    loop = plan((0, 3, 9), (0, 1), "gpipe")
    assert {item.value: item.holders for item in part(loop, 2).stored} == {"tied": (0, 1), "w1": (1,), "w2": (1,)}


def test_a_thread_where_no_gradient_crosses() -> None:
    """The backward of a stage starts from what comes back, so something with a gradient always crosses."""
    stages = part(plan((0, 1, 4, 6, 9)), 0).stages
    assert stages is not None
    assert [value.name for value in stages.crossing[0]] == ["mask", DEPENDENCY]


def test_a_rank_without_weights_shares_another_rank_s() -> None:
    """torch's optimizers refuse an empty list; with the gradients summed over both the copies stay equal."""
    found = [{item.value: item.holders for item in part(plan((0, 8, 9), (0, 1), "gpipe"), rank).stored} for rank in (0, 2)]
    shared = {"tied": (0, 1)}
    assert found == [{"w1": (0,), "w2": (0,), "spare": (0,)} | shared, shared]


def test_several_ranks_are_cut_as_each_alone() -> None:
    """With a prologue that one of them needs."""
    made = plan()
    made = replace(made, schedule=replace(made.schedule, prologue=frozenset({"mask"})))
    program = whole(made, 0)
    assert made.pipeline is not None
    found = list(cut_for_ranks(program, made.pipeline, (0, 2)))
    assert found == [cut_stages(replace(program, rank=rank), made.pipeline) for rank in (0, 2)]
    assert found[0].segments != found[1].segments


def test_without_a_pipeline_nothing_is_cut() -> None:
    """The program itself."""
    made = replace(plan(), pipeline=None)
    program = whole(made, 1)
    assert cut_stages(program, None) is program


class Biased(nn.Module):
    """Attention scores to which every layer adds one bias, looked up in a small table, plain, dropped or projected."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.mix = kind, nn.Embedding(8, 2), nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        places = torch.arange(x.shape[1])
        bias = self.table((places[:, None] - places).abs().clamp(max=7))
        bias = self.mix(bias) if self.kind == "projected" else nn.functional.dropout(bias, 0.5 * (self.kind == "dropped"))
        for layer in self.layers:
            x = x + layer((x @ x.mT + bias[..., 0]).softmax(-1) @ x)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("kind", ["plain", "dropped", "projected"])
def test_a_small_table_s_bias_is_made_again_by_every_stage(kind: str) -> None:
    """What is light and the same each time; what draws or multiplies is sent."""
    made = api.plan(Biased(kind), "h100:1x2", ((), {"x": torch.randn(4, 32, 16)}), progress=False,
                    pins={"pp": 2, "microbatches": 2})
    program = cut_stages(checked_program(made, 0), made.pipeline)
    assert program.stages is not None
    sent = [value for values in program.stages.crossing for value in values if value.shape[0] == 32]
    shared = {fqn for item in program.stages.stored if len(item.holders) > 1 for fqn in item.fqns}
    assert (not sent) == (kind == "plain")
    assert shared == {"table.weight"}
