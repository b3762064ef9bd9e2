"""The chain of real captured models: exact against brute force and the flow program, and what its parts cost."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from meshwright.compiler.placement.choices import Scope
from meshwright.compiler.placement.costs import (
    BACKWARD,
    FORWARD,
    GATHER,
    GATHER_ONCE,
    GRADIENTS,
    HOST,
    HOST_BACK,
    PARAMETERS,
    REDUCE,
    REDUCE_ONCE,
    RESOURCES,
    SAVED,
    SEND,
    SEND_BACK,
    TRANSIENT,
    Costs,
    Neighbours,
    Variant,
    time_rows,
)
from meshwright.compiler.placement.problem import Problem
from meshwright.compiler.search.candidates import Layout
from meshwright.compiler.search.layouts import variants
from meshwright.compiler.solver.chain import Chain
from meshwright.compiler.solver.oracle import brute_force, flow_mip
from meshwright.compiler.solver.solve import solve
from meshwright.compiler.structure.positions import positions_of, several_readers
from meshwright.compiler.structure.structure import Structure
from meshwright.cost import overlap
from meshwright.cost.cluster import Cluster
from meshwright.cost.compute import memory_speed
from meshwright.ir.graph import Graph, Value
from meshwright.ir.mesh import Mesh
from meshwright.ir.pins import Pins
from meshwright.ir.plan import PlanError
from meshwright.ir.sharding import Sharding, parse_sharding
from meshwright.planner import rules_of
from tests.test_joint import llama
from tests.test_planner import Mlp, Stack, graph_of, of_models

NODE = Cluster.parse("h100:1x4")


def problem(graph: Graph, mesh: Mesh, cluster: Cluster = NODE, recompute: tuple[str, ...] = ("none",)) -> Problem:
    """Everything open on a mesh."""
    rules, _ = rules_of(graph)
    structure = Structure(graph, rules)
    layout = Layout(mesh, dict.fromkeys(mesh.axes, "any"))
    scope = Scope(structure, mesh, layout.roles, Pins(), 1)
    costs = Costs(cluster, mesh, microbatches=1, itemsize=4, state_bytes=8)
    ways = partial(variants, layout, Pins(), 1)
    return Problem(scope, structure.schedule(1), costs, ways(recompute), ways(("none",)))


def small(name: str) -> Chain:
    if name == "mlp":
        return problem(graph_of(Mlp(64, 128), 16, 64), Mesh.of(x=2), Cluster.parse("h100:1x2")).chain(np.inf, 0.0)
    return problem(of_models("llama"), Mesh.of(x=2), Cluster.parse("h100:1x2")).chain(np.inf, 0.0)


@pytest.mark.parametrize("share", [None, 0.9, 0.7])
def test_an_mlp_against_brute_force_and_the_flow_program(share: float | None) -> None:
    chain = small("mlp")
    free = solve(chain)
    if share is not None:
        least = brute_force(chain, "memory")
        low, high = least.bytes_ + least.transient, free.bytes_ + free.transient
        chain = problem(graph_of(Mlp(64, 128), 16, 64), Mesh.of(x=2), Cluster.parse("h100:1x2")).chain(
            low + share * (high - low), 0.0
        )
    exact, flow, found = brute_force(chain), flow_mip(chain), solve(chain)
    assert flow.time == pytest.approx(exact.time, rel=1e-5)
    assert exact.time * (1 - 1e-9) <= found.time <= exact.time * 1.005
    assert found.bound <= exact.time * (1 + 1e-9)
    assert found.bytes_ + found.transient <= chain.capacity


def test_a_llama_against_the_flow_program() -> None:
    chain = small("llama")
    flow, found = flow_mip(chain), solve(chain)
    assert found.time == pytest.approx(flow.time, rel=0.005)
    assert found.bound <= flow.time * (1 + 1e-6)


def test_the_order_of_the_axes_does_not_matter() -> None:
    graph = of_models("llama")
    # the link is the same between any two of a node, so x and y differ in nothing but their order
    found = [solve(problem(graph, mesh).chain(np.inf, 0.0), gap=1e-6) for mesh in (Mesh.of(x=2, y=2), Mesh.of(y=2, x=2))]
    assert found[0].time == pytest.approx(found[1].time, rel=2e-6)
    wide = [solve(problem(graph_of(Stack(2, 64), 8, 16, 64), mesh, Cluster.parse("h100:1x8")).chain(np.inf, 0.0), gap=1e-6)
            for mesh in (Mesh.of(x=2, y=4), Mesh.of(y=4, x=2))]
    assert wide[0].time == pytest.approx(wide[1].time, rel=2e-6)


def test_equal_blocks_are_one_kind() -> None:
    built = problem(graph_of(Stack(6, 64), 8, 16, 64), Mesh.of(x=4))
    chain = built.chain(np.inf, 0.0)
    blocks = [kind for kind, position in zip(chain.sequence, built.positions, strict=True) if position.block >= 0]
    assert len(blocks) == 6
    assert len(set(blocks)) <= 3  # the first reads what takes no gradient, the last hands on to the loss


def test_positions_hand_on_what_the_next_reads() -> None:
    graph = of_models("llama")
    positions, whole = positions_of(graph)
    assert [position.block for position in positions] == [-1, 0, 1, -1]
    for left, right in pairwise(positions):
        assert left.exit == right.entry
        assert len(left.exit) == 1
    assert not any(position.shared_in for position in positions)
    assert all(not graph.values[name].differentiable for name in whole)
    assert whole  # the position table
    assert not several_readers(graph)
    assert len(several_readers(of_models("gpt2"))) == 1  # the embedding is the head


def test_communication_that_overlaps_counts_as_what_stays_exposed() -> None:
    vector = np.zeros(RESOURCES)
    vector[[0, 1]] = 3.0, 5.0  # forward, backward
    hidden, exposed = vector.copy(), vector.copy()
    hidden[GATHER], hidden[REDUCE] = 2.0, 4.0
    exposed[GATHER], exposed[REDUCE] = 7.0, 11.0

    def time(v: np.ndarray, contention: float = 1.0) -> float:
        return float((time_rows(contention) @ v).max())

    assert time(vector) == time(hidden) == pytest.approx(8.0)
    assert time(exposed) == pytest.approx(7.0 + 11.0)
    for both in (hidden, exposed):  # the same rule as in the pipeline's prices
        seconds = overlap.overlapped(3.0, both[GATHER], 1.25) + overlap.overlapped(5.0, both[REDUCE], 1.25)
        assert time(both, 1.25) == pytest.approx(seconds)
    on_the_path = vector.copy()
    on_the_path[SEND], on_the_path[SEND_BACK] = 1.0, 2.0
    assert time(on_the_path) == pytest.approx(11.0)


def test_what_happens_once_a_step_hides_behind_one_micro_batch() -> None:
    vector = np.zeros(RESOURCES)
    vector[[FORWARD, BACKWARD]] = 12.0, 24.0  # of four micro-batches
    vector[GATHER_ONCE], vector[REDUCE_ONCE] = 2.0, 10.0
    assert float((time_rows(1.0, 4) @ vector).max()) == pytest.approx(12.0 + 24.0 + (10.0 - 24.0 / 4))
    slowed = float((time_rows(1.25, 4) @ vector).max())
    assert slowed == pytest.approx(12.0 + 0.2 * 2.0 + 24.0 + 4.0)
    assert slowed == pytest.approx(float((time_rows(1.25, 4, each=False) @ vector).max()))
    assert len(time_rows(1.0, 4, each=False)) == len(time_rows(1.0, 4, once=False)) < len(time_rows(1.0, 4))


def test_a_host_that_is_slower_than_the_device_sets_the_pace() -> None:
    vector = np.zeros(RESOURCES)
    vector[[FORWARD, BACKWARD, HOST, HOST_BACK, SEND]] = 3.0, 5.0, 4.0, 4.0, 1.0
    assert float((time_rows(1.0) @ vector).max()) == pytest.approx(1.0 + 4.0 + 5.0)


@pytest.mark.parametrize(("repeats", "skipped"), [(False, 2), (True, 0)])
def test_recomputation_stops_where_torchs_does(repeats: bool, skipped: int) -> None:
    cluster = Cluster.parse("h100:1x2").with_kernels(repeats=repeats)
    built = problem(of_models("llama"), Mesh.of(x=2), cluster)
    number = next(n for n, position in enumerate(built.positions) if position.block == 0)
    ops = built.positions[number].ops(built.graph)
    last, left = built._skipped(number)
    assert len(left) == skipped  # the last product, which keeps operands only, and the sum behind it
    if not repeats:
        assert ops[last].target == "aten.linear.default"
        assert left == {last, len(ops) - 1}


@pytest.mark.parametrize("besides", [True, False])
def test_what_is_moved_between_views_of_a_kept_value_is_kept_too(besides: bool) -> None:
    """Attention keeps its own result, and a linear what is exchanged of it on its way there; of a product whose heads alone
    attention keeps, what is exchanged takes the place of what was there."""
    graph = of_models("llama")
    built = problem(graph, Mesh.of(x=4))
    read = {name: op for op in graph.ops for name in op.inputs}
    attention = next(op for op in graph.ops if op.target == "aten.scaled_dot_product_attention.default")
    turned = read[attention.outputs[0]].outputs[0] if besides else attention.inputs[2]  # its result, or its values
    split = [Sharding(tuple(("x",) if at == dim else () for at in range(4))) for dim in (1, 2)]
    table = built.tables.reshard(turned, (split[0],), (split[1], split[0]), saving=True)
    assert list(table[0, :, SAVED]) == [built.tables.whole(turned) / 4 * besides, 0.0]


def test_what_several_views_keep_is_not_kept_besides() -> None:
    """Queries, keys and values are slices of one product, of which nothing but they is read: exchanged, they take its place."""
    graph = of_models("Bloom")
    tables = problem(graph, Mesh.of(x=4)).tables
    slices = [op.outputs[0] for op in graph.ops if op.target == "aten.select.int" and op.outputs[0] in tables.saved.by_views]
    assert len(slices) >= 3
    assert tables.saved.besides.isdisjoint(slices)


@pytest.mark.parametrize("count", [1, 2])
def test_costs_of_some_choices_are_those_of_the_chain(count: int) -> None:
    graph = of_models("llama")
    rules, _ = rules_of(graph)
    structure, mesh = Structure(graph, rules), Mesh(("dp", "tp"), (2, 2))
    scope = Scope(structure, mesh, {"dp": "data", "tp": "tensor"}, Pins(), count)
    ways = [Variant(zero, ("dp",), recompute=name) for zero in (0, 1) for name in ("none", "full", "selective")]
    costs = Costs(NODE, mesh, microbatches=count, itemsize=2, state_bytes=8.0)
    whole = Problem(scope, structure.schedule(count), costs, ways, ways[:1])
    chain, rng = whole.chain(np.inf, 0.0), np.random.default_rng(0)
    for number, kind in enumerate(chain.sequence):
        block, open_ = chain.kinds[kind].variants[0], whole.open(number)
        if whole.positions[number].block < 0:
            continue
        chosen = [int(rng.integers(size)) for size in block.sizes]
        want = [variant.cost(chosen) for variant in chain.kinds[kind].variants]
        found = whole.costs(number, open_, chosen)
        finite = np.isfinite(want)
        assert len(found) == len(want) == len(ways)
        assert np.allclose(np.where(finite, found, 0.0), np.where(finite, want, 0.0), rtol=1e-12)


def test_parameters_by_level_and_place() -> None:
    costs = Costs(NODE, Mesh.of(x=4), microbatches=1, itemsize=2, state_bytes=8)
    value, need = Value("w", (1024, 1024), torch.float32), Sharding.whole(2)
    numel = value.numel

    def of(zero: int, unit: Neighbours) -> np.ndarray:
        axes = ("x",) if zero else ()
        found = costs.parameter(value, need, True, Variant(zero, ("x",), axes), numel, unit)
        assert found is not None
        return found

    middle, root = of(3, Neighbours()), of(3, Neighbours(root=True))
    assert middle[PARAMETERS] == middle[GRADIENTS] == numel  # 4 bytes over 4 ranks
    assert middle[TRANSIENT] == 10 * numel  # its and the next one's bf16 copy, its gradient, the last one's fp32 buffer
    assert middle[GATHER] > 0
    assert of(3, Neighbours(ahead=False))[TRANSIENT] == of(3, Neighbours(behind=False))[TRANSIENT] == 8 * numel
    assert root[GATHER] == root[REDUCE] == 0  # nothing hides what the root gathers and reduces
    alone = middle[GATHER] * NODE.node.overlapped_bandwidth
    assert root[SEND] == pytest.approx(alone)  # the same gather, while nothing computes
    assert root[PARAMETERS] == 3 * numel
    assert of(2, Neighbours())[PARAMETERS] == 3 * numel
    assert of(2, Neighbours())[TRANSIENT] == 6 * numel
    assert of(0, Neighbours())[PARAMETERS] == 6 * numel
    assert of(0, Neighbours())[GATHER] == 0
    assert root[GRADIENTS] == 6 * numel  # its bf16 gradient and the fp32 buffer that is reduced, when no activations are left
    several = Costs(NODE, Mesh.of(x=4), microbatches=2, itemsize=2, state_bytes=8)
    later = several.parameter(value, need, True, Variant(2, ("x",), ("x",)), numel, Neighbours(root=True))
    assert later is not None
    assert later[GRADIENTS] == 5 * numel  # of the micro-batch before the buffer that is still being reduced, and a quarter


def test_gradients_of_micro_batches_are_added_up() -> None:
    value, numel = Value("w", (1024, 1024), torch.float32), 1024.0 * 1024

    def seconds(zero: int, microbatches: int, cluster: Cluster = NODE) -> float:
        costs = Costs(cluster, Mesh.of(x=4), microbatches=microbatches, itemsize=2, state_bytes=8)
        found = costs.parameter(value, Sharding.whole(2), True, Variant(zero, ("x",), ("x",) if zero else ()), numel)
        assert found is not None
        return float(found[BACKWARD])

    stream = numel / (NODE.device.memory_bandwidth * NODE.device.memory_efficiency)
    for zero, each in ((0, 10.0), (1, 10.0), (2, 9.0), (3, 9.0)):
        assert seconds(zero, 4) - seconds(zero, 3) == pytest.approx(each * stream)
    added = NODE.with_kernels(accumulates=True)
    assert seconds(0, 4, added) == pytest.approx(seconds(0, 3, added))
    narrow = NODE.with_kernels(narrow_sums=True)
    assert seconds(0, 4, narrow) - seconds(0, 3, narrow) == pytest.approx(6.0 * stream)
    both = NODE.with_kernels(accumulates=True, narrow_sums=True)
    assert seconds(0, 4, both) == pytest.approx(seconds(0, 3, both)) == pytest.approx(seconds(0, 3, added))


def test_parameters_that_are_moved_alone_hide_behind_nothing() -> None:
    value, numel = Value("w", (1024, 1024), torch.float32), 1024.0 * 1024

    def of(cluster: Cluster, zero: int) -> NDArray[np.float64]:
        costs = Costs(cluster, Mesh.of(x=4), microbatches=2, itemsize=2, state_bytes=8)
        found = costs.parameter(value, Sharding.whole(2), True, Variant(zero, ("x",), ("x",)), numel)
        assert found is not None
        return found

    beside = NODE.node.overlapped_bandwidth
    for zero in (1, 2, 3):
        together, alone = of(NODE, zero), of(NODE.with_kernels(alone=True), zero)
        assert not alone[[GATHER, REDUCE, GATHER_ONCE, REDUCE_ONCE]].any()
        assert alone[SEND] == pytest.approx((together[GATHER] + together[GATHER_ONCE]) * beside)
        assert alone[SEND_BACK] == pytest.approx((together[REDUCE] + together[REDUCE_ONCE]) * beside)


def test_tensor_parallel_collectives_beside_the_products_they_belong_to() -> None:
    mesh, bytes_ = Mesh.of(x=4), 1e8

    def of(cluster: Cluster, source: str, target: str, by_linears: bool = False) -> tuple[float, float]:
        costs = Costs(cluster, mesh, microbatches=1, itemsize=2, state_bytes=8)
        found = costs.reshard(parse_sharding(source), parse_sharding(target), bytes_, True, by_linears)
        assert found is not None
        return found

    costs = Costs(NODE, mesh, microbatches=1, itemsize=2, state_bytes=8)
    gather, scatter = (costs.collective(kind, ("x",), bytes_) for kind in ("all_gather", "reduce_scatter"))
    slowed = 1.0 - 1.0 / NODE.device.contention
    assert of(NODE, "[_@x, _]", "[_, _] ~x") == pytest.approx((gather, scatter))
    assert of(NODE, "[_@x, _]", "[_, _] ~x", True) == pytest.approx((gather, (gather + scatter) * slowed))
    pieces = NODE.with_kernels(overlapped=True)
    sums = 5 / 4 * bytes_ / memory_speed(NODE.device)  # four pieces are read, their sum is written
    assert of(pieces, "[_, _] +x", "[_@x, _]") == pytest.approx((scatter * slowed + sums, gather * slowed))
    assert of(pieces, "[_, _] +x", "[_, _]") == of(NODE, "[_, _] +x", "[_, _]")  # an all-reduce is not cut up


def test_a_parameter_split_over_its_data_axis_cannot_be() -> None:
    costs = Costs(NODE, Mesh.of(x=4), microbatches=1, itemsize=4, state_bytes=8)
    value = Value("w", (6, 8), torch.float32)
    assert costs.parameter(value, parse_sharding("[_, _@x]"), True, Variant(0, ("x",)), 48.0) is None
    assert costs.parameter(value, parse_sharding("[_@x, _]"), True, Variant(0, ()), 48.0) is not None


class _Streams(torch.nn.Module):
    """Equal blocks that hand on several tensors."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(_Mixed(streams) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        streams = tuple(x * (n + 1) for n in range(len(self.blocks[0].parts)))
        for block in self.blocks:
            streams = block(*streams)
        return sum(y.square().mean() for y in streams)


class _Mixed(torch.nn.Module):
    def __init__(self, streams: int) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(streams))

    def forward(self, *streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(y + part(streams[n - 1]) for n, (y, part) in enumerate(zip(streams, self.parts, strict=True)))


def test_what_crosses_between_blocks_is_counted_before_its_table_is_made() -> None:
    """24 shardings each on two axes: of three tensors 13,824 combinations at each end, 20 GiB in all variants."""
    graph = graph_of(_Streams(3), 4, 6, 8)
    with pytest.raises(PlanError, match=r"3 values cross .* combinations of their shardings"):
        problem(graph, Mesh.of(x=2, y=2)).chain(np.inf, 0.0)
    assert problem(graph, Mesh.of(x=4)).chain(np.inf, 0.0).kinds


def test_what_a_head_gathers_again_is_counted_whatever_its_logits_hold() -> None:
    """In most choices what is held is most while logits become fp32, but where ranks of samples split the vocabulary it is when
    the head gathers the samples of all."""
    graph = llama(2, 256, 16, 128, 8192)
    made = problem(graph, Mesh.of(x=2, y=2))
    ops, moments = made.positions[-1].ops(graph), made.model(len(made.positions) - 1).moments
    assert [ops[moment].target for moment in moments[:2]] == ["aten._to_copy.default", "aten.linear.default"]
