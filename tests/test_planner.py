"""The search as a whole: what it finds as weights, batch and memory change; certificates; determinism; names do not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.compiler.search.fitting import prediction_of
from meshwright.compiler.search.prediction import step_flops
from meshwright.compiler.search.settled import settled
from meshwright.cost.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.pins import PinError, Pins
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.quantities import bytes_text
from meshwright.ir.serialize import plan_hash
from meshwright.passes import rank_program
from meshwright.planner import OutOfMemoryError, capture_model, make_plan, rules_of, task_of
from meshwright.programs import checked_program
from tests.models import MODELS, make

FOUR = Cluster.parse("h100:1x4")
MIB = 2**20


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Residual(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Stack(nn.Module):
    """Equal residual layers."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(width, 4 * width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def graph_of(model: nn.Module, *shape: int) -> Graph:
    return capture_model(model.to("meta"), (torch.empty(shape, device="meta"),), {}, (), lambda y: y.square().sum(), "fp32")


def of_models(name: str) -> Graph:
    model, kwargs = make(name)
    return capture_model(model.train(), (), kwargs, (), None, "fp32")


def forward_ops(plan: Plan, kind: str) -> list[tuple[int, ...]]:
    """Shapes of what a kind of operator reads in rank 0's program."""
    program = rank_program(plan, rules_of(plan.graph)[0], 0)
    graphs = [segment.graph for segment in program.segments]
    return [graph.values[op.inputs[0]].shape for graph in graphs for op in graph.ops if op.target == kind]


def weights(plan: Plan) -> list[dict[str, str]]:
    """What every axis splits in the linears."""
    return [dict(plan.assignments[op.name]) for op in plan.graph.ops if op.target == "aten.linear.default"]


def test_large_weight_small_batch_is_column_then_row() -> None:
    with torch.device("meta"):  # no numbers are drawn for half a billion weights
        model = Mlp(8192, 32768)
    plan = make_plan(graph_of(model, 8, 8192), FOUR, Pins())
    assert sorted(plan.mesh.sizes)[-1] == 4
    assert [list(assignment.values()) for assignment in weights(plan)] == [["n"], ["k"]]
    assert forward_ops(plan, "mw.all_reduce") == [(8, 8192)]
    for other in ("mw.all_gather", "mw.reduce_scatter", "mw.all_to_all", "mw.gather_vary"):
        assert not forward_ops(plan, other)
    assert plan.certificate.gap <= 0.005


def test_small_weight_large_batch_is_data_parallel() -> None:
    plan = make_plan(graph_of(Mlp(256, 1024), 65536, 256), FOUR, Pins())
    assert [set(assignment.values()) for assignment in weights(plan)] == [{"b0"}, {"b0"}]
    used = {axis for axis in plan.mesh.axes if plan.mesh.size(axis) > 1}
    assert all(set(group.data_axes) == used for group in plan.groups[:-1])
    assert forward_ops(plan, "mw.all_reduce") == [()]  # the loss


def test_replicas_that_do_not_fit_are_split_at_rest() -> None:
    graph = graph_of(Mlp(4096, 4096), 16384, 4096)
    replicas = make_plan(graph, FOUR, Pins(dp=4, zero=0, microbatches=1)).predicted.bytes_per_rank
    plan = make_plan(graph, FOUR.with_memory(int(replicas * 0.97)), Pins())
    assert [set(assignment.values()) for assignment in weights(plan)] == [{"b0"}, {"b0"}]
    assert all(group.zero >= 2 and plan.mesh.size(group.shard_axes) == 4 for group in plan.groups[:-1])


def test_too_little_memory_for_whole_weights_is_zero_3() -> None:
    # a narrow middle: activations are largest at the loss, where the second layer is gathered and the first is not
    graph = graph_of(Mlp(4096, 1024), 16384, 4096)
    zero, two, three = (
        make_plan(graph, FOUR, Pins(dp=4, zero=level, microbatches=1, recompute="none")).predicted.bytes_per_rank
        for level in (0, 2, 3)
    )
    assert three < two < zero
    plan = make_plan(graph, FOUR.with_memory(int(three + MIB)), Pins())
    assert [set(assignment.values()) for assignment in weights(plan)] == [{"b0"}, {"b0"}]
    assert [group.zero for group in plan.groups[:-1]] == [3, 3]
    assert plan.predicted.bytes_per_rank == three
    assert plan.predicted.capacity_bytes < two


def test_as_memory_shrinks_state_is_split_blocks_are_recomputed_and_the_batch_is_cut() -> None:
    graph = graph_of(Stack(6, 512), 16, 512, 512)
    seconds, seen = 0.0, set()
    capacity = make_plan(graph, FOUR, Pins(dp=4)).predicted.bytes_per_rank
    for _ in range(5):
        plan = make_plan(graph, FOUR.with_memory(int(capacity)), Pins(dp=4))
        assert plan.predicted.bytes_per_rank <= capacity
        assert plan.predicted.step_seconds >= seconds * (1 - 0.006)  # less memory is never faster (within the gap)
        seconds = plan.predicted.step_seconds
        seen |= {f"zero {group.zero}" for group in plan.groups} | {group.recompute for group in plan.groups}
        seen |= {"micro-batches"} if plan.schedule.microbatches > 1 else set()
        capacity = plan.predicted.bytes_per_rank * 0.8
    assert {"zero 3", "full", "micro-batches"} <= seen


@pytest.mark.parametrize(("graph", "pins"), [
    ("mlp", Pins(dp=4, zero=0, microbatches=1, recompute="none")),
    ("mlp", Pins(dp=4, zero=3, microbatches=1, recompute="none")),
    ("stack", Pins(dp=4, zero=2, microbatches=2, recompute="none")),
    ("stack", Pins(dp=4, zero=2, microbatches=2, recompute="full")),
    ("stack", Pins(dp=4, zero=3, microbatches=2, recompute="none")),
    ("stack", Pins(dp=4, zero=3, microbatches=2, recompute="full")),
], ids=str)
def test_what_models_without_a_root_are_counted_to_hold_is_what_their_program_holds(graph: str, pins: Pins) -> None:
    """A total's operand has its gradient from one number. What the first block reduces of a micro-batch is there when the last
    one's backward begins in the next, and is not counted twice for those between."""
    found = {"mlp": lambda: graph_of(Mlp(4096, 1024), 16384, 4096), "stack": lambda: graph_of(Stack(6, 512), 16, 512, 512)}
    plan = make_plan(found[graph](), FOUR, pins)
    counted = prediction_of(settled(task_of(plan, None), plan, prediction_of)).bytes_per_rank
    assert counted == pytest.approx(prediction_of(plan).bytes_per_rank, rel=1e-3)


def test_copies_of_a_block_differ_where_memory_is_tight() -> None:
    graph = graph_of(Stack(8, 512), 16, 512, 512)
    free = make_plan(graph, FOUR, Pins(dp=4, microbatches=1, zero=3, recompute="none"))
    plan = make_plan(graph, FOUR.with_memory(int(free.predicted.bytes_per_rank * 0.9)), Pins(dp=4, microbatches=1, zero=3))
    kinds = {group.recompute for group in plan.groups[:-1]}
    assert [block.kind for block in graph.blocks] == [0] + [1] * 7  # the first reads what takes no gradient
    assert "none" in kinds
    assert len(kinds) > 1
    assert plan.predicted.bytes_per_rank <= plan.predicted.capacity_bytes


@pytest.mark.parametrize("name", MODELS)
def test_the_gap_is_certified(name: str) -> None:
    plan = make_plan(of_models(name), Cluster.parse("cpu:1x4"), Pins())
    assert 0 <= plan.certificate.gap <= 0.005
    assert plan.certificate.bound_seconds <= plan.certificate.objective_seconds


@pytest.mark.parametrize(("pins", "memory"), [(Pins(), 10 * MIB), (Pins(dp=4), 350_000)])
def test_two_runs_make_the_same_plan(pins: Pins, memory: int) -> None:
    cluster = Cluster.parse("cpu:1x4").with_memory(memory)
    assert len({plan_hash(make_plan(of_models("llama"), cluster, pins)) for _ in range(2)}) == 1


class Renamed(nn.Module):
    """The same layers under other names, one module deeper."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.embed = nn.ModuleList(_Head(width) for _ in range(layers))  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for router in self.attention.embed:  # type: ignore[union-attr]
            x = router(x)
        return x


class _Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(nn.functional.gelu(self.norm(x)))


@pytest.mark.parametrize("pins", [{}, {"recompute": "full"}, {"zero": 0}])
@pytest.mark.parametrize("cluster", ["h100:1x1", "h100:1x2"])
def test_what_runs_in_one_micro_batch_alone_is_told_its_memory(cluster: str, pins: dict[str, Any]) -> None:
    """Batch norm needs the whole batch at once, and smaller micro-batches, which would be nearest, cannot be."""
    model = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 64))
    graph, where = graph_of(model, 96, 64), Cluster.parse(cluster)
    with pytest.raises(OutOfMemoryError) as alone:
        make_plan(graph, where.with_memory(MIB // 2), Pins.of({**pins, "microbatches": 1}))
    with pytest.raises(OutOfMemoryError, match=r"the least memory any plan needs on .* with microbatches=1") as caught:
        make_plan(graph, where.with_memory(MIB // 2), Pins.of(pins))
    assert caught.value.least == alone.value.least
    assert make_plan(graph, where.with_memory(int(caught.value.least * 1.01)), Pins.of(pins))


@pytest.mark.parametrize("pins", [Pins(), Pins(dp=2, tp=2, sequence_parallel=True)])
def test_names_do_not_matter(pins: Pins) -> None:
    cluster = FOUR.with_memory(150 * MIB)
    a, b = (make_plan(graph_of(kind(2, 256), 8, 64, 256), cluster, pins) for kind in (Stack, Renamed))
    assert {op.module for op in a.graph.ops}.isdisjoint({op.module for op in b.graph.ops} - {""})
    assert a.predicted.step_seconds == b.predicted.step_seconds
    for one, other in zip(a.graph.ops, b.graph.ops, strict=True):
        assert (one.target, a.assignments[one.name]) == (other.target, b.assignments[other.name])
    assert [replace(group, path="") for group in a.groups] == [replace(group, path="") for group in b.groups]


def test_an_impossible_demand_names_what_binds_and_what_would_fit() -> None:
    graph = graph_of(Stack(2, 512), 8, 64, 512)
    words = r"(gradients|optimizer) bind: .*gradients [\d.]+ MiB, .* Nearest change: "
    with pytest.raises(OutOfMemoryError, match=words) as caught:
        make_plan(graph, FOUR.with_memory(10 * MIB), Pins())
    error = caught.value
    assert error.capacity == 10 * MIB < error.least == pytest.approx(sum(error.bytes_.values()))


@pytest.mark.parametrize("pins", [{}, {"pp": 2}])
def test_the_nearest_change_is_to_return_the_loss_alone_where_logits_bind(pins: dict[str, int]) -> None:
    with torch.device("meta"):
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model, ids = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32768)), torch.zeros(64, 512, dtype=torch.long)
    where, batch = FOUR.with_memory(400 * MIB), {"input_ids": ids, "labels": ids}
    words = r"the model returns .* loss_fn=mw.loss_alone|loss_fn=mw.loss_alone: .* takes 512 MiB"
    with pytest.raises(OutOfMemoryError, match=words) as caught:
        mw.plan(model, where, ((), batch), precision="bf16", pins=pins)
    assert caught.value.least > 512 * MIB
    plan = mw.plan(model, where, ((), batch), precision="bf16", pins=pins, loss_fn=mw.loss_alone)
    assert plan.predicted.fits


def test_the_nearest_change_is_the_pin_that_stands_in_the_way() -> None:
    graph = graph_of(Stack(2, 512), 8, 64, 512)
    with pytest.raises(OutOfMemoryError, match=r"without the pin zero=0 it fits in [\d.]+ MiB"):
        make_plan(graph, FOUR.with_memory(64 * MIB), Pins(dp=4, zero=0))


def test_the_nearest_change_is_a_smaller_batch_where_that_binds() -> None:
    def of(batch: int) -> Graph:
        return graph_of(Mlp(64, 64), batch, 64)

    cluster = FOUR.with_memory(4 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"inputs bind: .* a batch of about (\d+) instead of 32768 would fit") as caught:
        make_plan(of(32768), cluster, Pins())
    words = str(caught.value).split("a batch of about ")[1]
    assert make_plan(of(int(words.split()[0])), cluster, Pins()).mesh.world == 4


def test_numbers_of_a_plan() -> None:
    graph = of_models("llama")
    plan = make_plan(graph, Cluster.parse("cpu:1x4"), Pins(dp=4, microbatches=1))
    predicted = plan.predicted
    assert predicted.tokens_per_second == pytest.approx(4 * 8 / predicted.step_seconds)
    # linears: q, o 32 x 32, k, v 16 x 32, three of 64 x 32, the head 64 x 32; attention: 4 heads of 8, half of 8 x 8 scores
    products = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) + 64 * 32
    flops = step_flops(graph, rules_of(graph)[0].operators)
    assert flops >= 3 * 2 * 32 * products
    assert predicted.tflops_per_device == pytest.approx(flops / predicted.step_seconds / 4 / 1e12)
    assert 0 < predicted.mfu < 1
    assert predicted.bytes_per_rank == pytest.approx(sum(predicted.bytes_by_kind.values()))
    step = predicted.compute_seconds + predicted.exposed_communication_seconds + predicted.optimizer_seconds
    assert step == pytest.approx(predicted.step_seconds)
    assert predicted.recomputation_seconds == 0


def test_no_tokens_without_integer_inputs() -> None:
    assert make_plan(graph_of(Mlp(8, 8), 4, 8), FOUR, Pins()).predicted.tokens_per_second is None


def test_sizes_are_in_the_unit_that_suits_them() -> None:
    assert [bytes_text(n) for n in (5, 2048, 3.5 * MIB, 80 * 2**30)] == ["5 B", "2 KiB", "3.5 MiB", "80 GiB"]


def test_unknown_operators_are_listed_or_refused() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(x)

    graph = capture_model(Odd(), (torch.randn(4, 8, 8),), {}, (), lambda y: y.sum(), "fp32")
    plan = make_plan(graph, FOUR, Pins())
    assert any("linalg" in note and "replicated" in note for note in plan.notes)
    with pytest.raises(PlanError, match=r"no sharding rule for .*register_rule"):
        make_plan(graph, FOUR, Pins(), strict=True)


@pytest.mark.parametrize("pins", [{}, {"dp": 4}, {"pp": 1, "tp": 4}, {"dp": 2, "tp": 2, "recompute": "full"}])
def test_a_model_that_has_no_parameters_is_planned(pins: dict[str, Any]) -> None:
    """All that it makes is made of inputs alone, so that a micro-batch takes no time of its own."""
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.mT).softmax(-1)

    graph = capture_model(Plain(), (torch.randn(8, 8, 8),), {}, (), lambda y: y.square().mean(), "fp32")
    plan = make_plan(graph, FOUR, Pins(**pins))
    assert plan.predicted is not None
    assert plan.certificate is not None
    assert plan.predicted.step_seconds > 0
    assert 0 <= plan.certificate.gap < 1


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"dp": 3}, "do not|does not divide"), ({"dp": 2, "tp": 4}, "make 8 devices"),
        ({"dp": 2, "tp": 1, "pp": 1}, "make 2 devices"),
        ({"dp": 4, "microbatches": 3}, "does not divide into dp=4 ranks x microbatches=3"), ({"cp": 2}, "pin cp=2"),
    ],
)
def test_pins_that_cannot_be(pins: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        make_plan(graph_of(Mlp(8, 8), 8, 8), FOUR, Pins(**pins))


def test_dp_beyond_the_batch() -> None:
    with pytest.raises(PinError, match="batch of 2 samples leaves some of dp=4 ranks without any"):
        make_plan(graph_of(Mlp(8, 8), 2, 8), FOUR, Pins(dp=4))


def test_plan_is_the_public_way_in() -> None:
    plan = mw.plan(Mlp(8, 8), "h100:1x4", ((torch.randn(8, 8),), {}, ()), loss_fn=lambda y: y.sum(), pins={"dp": 4})
    assert plan.mesh.axes == ("dp", "tp")
    assert plan.predicted.step_seconds > 0


class Pairs(nn.Module):
    """Each sample's counterpart among those of the batch, which is split as the classes are; a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.none = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.first(x).tanh() @ self.second(x).tanh().t()
        own = torch.arange(len(x))
        both = nn.functional.cross_entropy(logits, own) + nn.functional.cross_entropy(logits.t(), own)
        return both + self.none.sum()


def test_what_one_rank_alone_does_not_split() -> None:
    """A data axis of one rank, in a pipeline; and what has no elements costs nothing."""
    plan = mw.plan(Pairs(), "cpu:1x2", ((torch.randn(8, 8),), {}), pins={"pp": 2, "dp": 1, "microbatches": 2})
    for rank in range(2):
        targets = [op for segment in checked_program(plan, rank).segments for op in segment.graph.ops if "cross" in op.target]
        assert targets
        assert all("axes" not in dict(op.kwargs) for op in targets)
