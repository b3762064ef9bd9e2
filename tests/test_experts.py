"""Mixtures of experts: recognized, planned with experts split over data ranks, and equal to the single process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright import PinError, load
from meshwright.api import autoparallel
from meshwright.commands.verifying import verify_rank
from meshwright.compiler.placement.costs import SEND
from meshwright.compiler.placement.placement import Placements
from meshwright.compiler.placement.rows import decisions
from meshwright.compiler.rules.custom.inner import inner
from meshwright.compiler.search.bounds import ROUNDING
from meshwright.compiler.structure.same import aligned
from meshwright.cost import compute
from meshwright.cost.cluster import Cluster
from meshwright.errors import CaptureError, InputError
from meshwright.ir.declared.experts import EXPERTS, with_imbalance
from meshwright.ir.declared.operator import Work
from meshwright.ir.graph import FILL, Graph
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.ir.reading.graphs import graph_from_dict
from meshwright.ir.rule import place
from meshwright.ir.serialize import graph_to_dict
from meshwright.planner import capture_model, make_plan, rules_of
from meshwright.published.zoo import Trained
from meshwright.runtime.experts.grouped import grouped_linear
from meshwright.runtime.interpret import run
from tests.equality import EPS, RELATIVE, captured_once, compare, differences, train
from tests.mixtures import BATCH, LENGTH, deepseek, make, mixtral, qwen3

MIXTURES = ("mixtral", "qwen2", "qwen3", "deepseek", "gpt_oss", "ernie", "granite")
EARLIER = (
    "mixtral with sentinels", "gpt_oss with sentinels", "mixtral argsorted", "gpt_oss argsorted", "deepseek looked up early",
    "gpt_oss looked up early",
)
"""As earlier versions of ``transformers`` write their experts."""


def captured(model: nn.Module, batch: Mapping[str, torch.Tensor], precision: str = "fp32") -> Graph:
    return capture_model(model, (), dict(batch), (), None, precision)


@pytest.mark.parametrize("name", MIXTURES + EARLIER)
def test_tokens_and_what_a_router_makes_of_them_keep_their_dims(name: str) -> None:
    """So that ranks of the sequence have tokens of their own, of the router too."""
    model, batch = make(name)
    graph = captured(model, batch)
    for call in (op for op in graph.ops if op.target == EXPERTS):
        left = list(call.inputs[:3])
        assert {graph.values[value].shape[:2] for value in left} == {(BATCH, LENGTH)}
        while left:  # back to the last weight
            op = graph.ops[graph.producers[left.pop()]]
            assert all(graph.values[value].shape[:2] == (BATCH, LENGTH) for value in op.outputs), op
            left += [] if op.target == "aten.linear.default" else [one for one in op.inputs if one in graph.producers][:1]


@pytest.mark.parametrize("name", MIXTURES + EARLIER)
def test_the_chain_is_one_operator_that_computes_the_same(name: str) -> None:
    model, batch = make(name)
    graph = captured(model, batch)
    calls = [op for op in graph.ops if op.target == EXPERTS]
    assert len(calls) == (2 if "mixtral" in name else 1)
    assert not any("sort" in op.target or "histc" in op.target or "grouped_mm" in op.target for op in graph.ops)
    assert inner(calls[0].args[0]) is not None
    want = copy.deepcopy(model)
    loss = want(**batch).loss
    loss.backward()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    env = {param.value: held.get(param.fqn, graph.constants.get(param.value)) for param in graph.params}
    assert graph.loss is not None
    found = run(graph, {**env, **dict(zip(graph.inputs, batch.values(), strict=True))})[graph.loss]
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    for (path, mine), (_, other) in zip(model.named_parameters(), want.named_parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), path
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_layers_share_one_body_and_a_file_keeps_it() -> None:
    model, batch = make("mixtral")
    graph = captured(model, batch, "bf16")
    first, second = (op.args[0] for op in graph.ops if op.target == EXPERTS)
    assert first == second
    assert len(graph.blocks) == 2
    read = graph_from_dict(graph_to_dict(graph))
    assert [op.args[0] for op in read.ops if op.target == EXPERTS] == [first, second]


def test_a_loop_over_experts_is_refused_with_what_to_set() -> None:
    model = mixtral(experts_implementation="eager")
    ids = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(CaptureError, match='experts_implementation="grouped_mm"'):
        captured(model, {"input_ids": ids, "labels": ids})


def test_grouped_products_that_torch_does_not_trace_are_refused_with_what_to_give() -> None:
    """Those of experts of ``transformers`` 5.0, in any dtype but bfloat16."""
    class Grouped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, self.weight[None], offs=torch.full((1,), 8, dtype=torch.int32))

    with pytest.raises(CaptureError, match='precision="bf16"'):
        captured(Grouped(8, 8), {"x": torch.randn(8, 8)})
    assert captured(Grouped(8, 8), {"x": torch.randn(8, 8)}, "bf16").ops


def test_rows_of_experts_that_are_counted_as_numbers_are_refused_with_what_to_use() -> None:
    """JetMoe cuts the rows into pieces of as many as its experts were chosen for."""
    from transformers import JetMoeConfig, JetMoeForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8, "intermediate_size": 16}
    model = JetMoeForCausalLM(JetMoeConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, vocab_size=32, use_cache=False))
    ids = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(CaptureError, match=r"sort the rows by expert and use torch\._grouped_mm"):
        captured(model, {"input_ids": ids, "labels": ids})


def test_pins_that_cannot_be_are_refused() -> None:
    from tests.models import make as dense

    cluster = Cluster.parse("h100:1x4")
    graph = captured(*make("qwen3"))
    for pins, says in (
        ({"dp": 4, "ep": 3}, "ep=3 does not divide the 4 experts"), ({"dp": 2, "tp": 2, "ep": 4}, "ep=4 must divide dp=2"),
        ({"dp": 1, "cp": 4, "ep": 2}, "ep=2 must divide dp=1.*or over all of cp"),
    ):
        with pytest.raises(PinError, match=says):
            make_plan(graph, cluster, Pins(**pins))
    with pytest.raises(PinError, match="has no experts"):
        make_plan(captured(*dense("llama")), cluster, Pins(dp=4, ep=2))


def test_programs_of_experts_over_ranks_of_the_sequence_and_of_tensors_are_verified() -> None:
    graph = captured(*make("qwen3"))
    for pins in (
        {"dp": 1, "cp": 2, "ep": 2}, {"dp": 2, "cp": 2, "ep": 4, "zero": 3}, {"dp": 2, "ep": 2, "tp": 2, "operators": {
            "*experts:experts": ALONG,
        }},
    ):
        plan = make_plan(graph, Cluster.parse(f"cpu:1x{pins['dp'] * 2}"), Pins(**{"pp": 1, "tp": 1, **pins}))
        assert all(plan.assignments[op.name] for op in plan.graph.ops if op.target == EXPERTS)
        for rank in range(plan.mesh.world):
            verify_rank(plan, rank)


def test_experts_shared_out_are_placed_as_a_solution_of_the_whole_would() -> None:
    graph = captured(*make("mixtral"), "bf16")
    rules, _ = rules_of(graph)
    placements = Placements(
        graph, Cluster.parse("h100:1x8"), rules, Pins(), itemsize=2, state_bytes=8.0, recompute=("none", "selective", "full")
    )
    sent = []
    for key in ((1, 1, 1, 2), (2, 2, 1, 4), (1, 2, 1, 2), (1, 2, 2, 1, 1, True), (1, 1, 2, 2, 1, True)):
        derived, solved = placements.of(*key), placements._solve(*(*key, 1, False)[:max(5, len(key))])
        assert decisions(derived, graph) == decisions(solved, graph)
        for mine, other in zip(derived.sequence, solved.sequence, strict=True):
            row, want = derived.rows[mine], solved.rows[other]
            assert row.uses == want.uses
            for kind, vector in row.activations.items() if row.mixtures else ():
                np.testing.assert_allclose(vector, want.activations[kind], rtol=1e-2, atol=1e-9)
        sent.append(sum(derived.rows[row].activations["none"][SEND] for row in derived.sequence if derived.rows[row].mixtures))
    assert sent[0] < sent[2]  # rows of one sample travel, not those of the whole batch


@pytest.mark.parametrize("make", [qwen3, deepseek])
def test_splitting_experts_adds_no_more_than_a_solution_of_the_whole(make: Callable[..., nn.Module]) -> None:
    """From the calls of the whole batch at once, however many experts a rank has; nearly all where they are too few for tensor
    ranks to have some of their own: each sends every row then."""
    width = {"num_experts": 16} if make is qwen3 else {"n_routed_experts": 16}
    with torch.device("meta"):
        model = Trained(make(hidden_size=2048, moe_intermediate_size=512, num_experts_per_tok=4, **width))
    ids = torch.zeros(64, 1024, dtype=torch.int64, device="meta")
    graph = captured(model, {"input_ids": ids, "labels": ids}, "bf16")
    placements = Placements(
        graph, Cluster.parse("h100:4x8"), rules_of(graph)[0], Pins(), itemsize=2, state_bytes=8.0, recompute=("none",)
    )
    shares, few = list[float](), list[float]()
    for tensor, expert, data in itertools.product((1, 2, 8), (2, 4, 16), (4, 16)):
        if data % expert == 0 and data * tensor <= 32:
            whole, samples = placements.of(tensor, 64).bound, 64 // data
            adds = placements.splitting_adds(tensor, samples, 1, expert, 1, False, data)
            solved = placements._solve(tensor, samples, 1, expert, 1).seconds
            shares.append((whole / data * (1 - ROUNDING) + adds) / solved)
            few += [adds / (solved - placements.of(tensor, samples).seconds)] * (tensor * expert > 16)
    assert max(shares) <= 1
    assert min(few) > 0.8


def test_tensor_ranks_may_share_out_tokens_and_experts_too() -> None:
    """Without a pin, where it pays: of narrow experts the pieces of a split width are slow, and every row travels tp times."""
    with torch.device("meta"):
        model = Trained(qwen3(hidden_size=2048, moe_intermediate_size=512, num_experts=64, num_experts_per_tok=8))
    ids = torch.zeros(64, 1024, dtype=torch.int64, device="meta")
    graph = captured(model, {"input_ids": ids, "labels": ids}, "bf16")
    name = next(op.name for op in graph.ops if op.target == EXPERTS)
    pins = Pins(dp=2, ep=2, tp=4, pp=1, zero=1, microbatches=4)
    plan = make_plan(graph, Cluster.parse("h100:1x8"), pins, precision="bf16")
    found = dict(plan.assignments[name])
    assert found["ep"] == "t0&e:1"
    assert found["tp"] in ("t0&e:1", "t1&e:1")  # samples or places of their sequence: tokens either way
    assert plan.predicted is not None
    held = replace(pins, operators={"*experts:experts": "dp=t0, ep=t0&e, tp=f"})
    other = make_plan(graph, Cluster.parse("h100:1x8"), held, precision="bf16").predicted
    assert other is not None
    assert plan.predicted.step_seconds < 0.8 * other.step_seconds


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
def test_gradients_of_rows_by_expert(dtype: torch.dtype, transposed: bool) -> None:
    """Those of numbers and of complex numbers, beside one product an expert; one expert has no rows."""
    drawn, counts = torch.Generator().manual_seed(0), (3, 0, 4)
    rows, weight = (torch.randn(shape, dtype=dtype, generator=drawn, requires_grad=True)
                    for shape in ((7, 5), (3, 5, 2) if transposed else (3, 2, 5)))
    pieces = zip(rows.split(counts), weight, strict=True)
    expected = torch.cat([one @ (matrix if transposed else matrix.T) for one, matrix in pieces])
    out = grouped_linear(rows, weight, counts, transposed)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape, dtype=dtype, generator=drawn)
    found, wanted = (torch.autograd.grad(value, (rows, weight), grad) for value in (out, expected))
    torch.testing.assert_close(found, wanted)


def test_products_are_priced_in_the_dtype_of_the_rows_and_at_the_assumed_imbalance(tmp_path: Path) -> None:
    graph = captured(*make("mixtral"), "bf16")
    op = next(op for op in graph.ops if op.target == EXPERTS)
    operator, device = rules_of(graph)[0].operators[EXPERTS], Cluster.parse("h100:1x8").device
    work = Work.of(op, graph)
    assert (work.reads, work.makes) == (torch.bfloat16, torch.float32)
    large = replace(work, operands=tuple(tuple(512 * n if n > 4 else n for n in shape) for shape in work.operands))
    assert compute.seconds(operator, large, device)[0] < compute.flops(operator, large) / device.flops(torch.float32)
    cluster, pins = Cluster.parse("h100:1x4"), Pins(dp=4, tp=1, pp=1, ep=4, zero=1, microbatches=1, recompute="none")
    even, uneven = (make_plan(with_imbalance(graph, times), cluster, pins, precision="bf16") for times in (1.0, 4.0))
    assert even.predicted is not None
    assert uneven.predicted is not None
    assert even.predicted.bytes_per_rank < uneven.predicted.bytes_per_rank
    assert "4 times the mean of the rows" in str(uneven.notes)
    uneven.save(tmp_path / "plan.json")
    again = aligned(Plan.load(tmp_path / "plan.json").graph, graph)
    assert [op.args[0].imbalance for op in again.ops if op.target == EXPERTS] == [4.0, 4.0]
    for wrong in (0.5, True, float("inf"), "2"):
        with pytest.raises(InputError, match="expert_imbalance="):
            with_imbalance(graph, wrong)  # type: ignore[arg-type]


def test_zeros_that_micro_batches_write_into_are_not_counted_as_inputs() -> None:
    """DeepSeek's attention and router write into zeros, which are made in every micro-batch: whole they would not fit."""
    with torch.device("meta"):
        model = Trained(deepseek(num_hidden_layers=4))
    ids = torch.zeros(4096, LENGTH, dtype=torch.int64, device="meta")
    graph = captured(model, {"input_ids": ids, "labels": ids})
    whole = sum(graph.values[name].bytes_ for op in graph.ops if op.target == FILL for name in op.outputs)
    cluster = Cluster.parse("h100:1x2").with_memory(int(0.9 * whole))
    plan = make_plan(graph, cluster, Pins(dp=2, ep=2, pp=1, microbatches=64))
    assert plan.predicted is not None
    assert plan.predicted.bytes_per_rank < 0.5 * whole


def _train(rank: int, name: str, world: int, all_pins: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs from the single process, and plans that do not split experts."""
    model, batch = make(name)
    wrong: list[str] = []

    def build(pins: Mapping[str, Any]) -> nn.Module:
        mesh = init_device_mesh("cpu", (world,))
        plain = {name: pin for name, pin in PLAIN.items() if name not in ("tp", "pp") or "axes" not in pins}
        parallel = autoparallel(model, mesh, ((), batch), pins={**plain, **pins}, progress=False)
        wrong.extend(f"{pins}: {one}" for one in (_unsplit(parallel.plan, pins["ep"]) if "ep" in pins else ()))
        return parallel

    with captured_once(f"mixture {name}"):
        return differences(rank, model, batch, {str(pins): partial(build, pins) for pins in all_pins}, 1.0) + wrong


def _unsplit(plan: Plan, ranks: int) -> list[str]:
    """Readers of weights of three dims, which are those of experts here, that do not read other experts on so many ranks of
    data and of the sequence."""
    graph, rules = plan.graph, rules_of(plan.graph)[0]
    stacked = {param.value for param in graph.params if param.trainable and len(graph.values[param.value].shape) == 3}
    found = []
    for op in graph.ops:
        assignment = plan.assignments.get(op.name, {})
        where = place(rules[op.name], assignment, plan.mesh, [True] * len(op.inputs)).operands
        over = [plan.mesh.size([axis for axis in one.dims[0] if axis in ("ep", "cp")])
                for name, one in zip(op.inputs, where, strict=True) if name in stacked]
        found += [f"{op.name} is split as {assignment}"] * (set(over) - {ranks} != set())
    return found


PLAIN: Mapping[str, Any] = {"tp": 1, "pp": 1, "recompute": "none", "microbatches": 1}
"""Little is left to the search."""
FOLDED, ALONG = "dp=t0, ep=t0&e, tp=t0&e", "dp=t0, ep=t0&e, tp=t1&e"
"""Ranks of ep and tp have tokens and experts of their own, one expert a rank here (Megatron-Core's parallel folding, etp 1): of
the tensor ranks samples, or pieces of the sequence."""
ONCE_A_RANK = {"model.layers.*.mlp.experts:experts": "ep=t0&e:1"}
ONCE_A_NODE = {"model.layers.*.mlp.experts:experts": "ep=t0&e:2"}
"""Tokens go once to each of two nodes of two ranks, not once for each of their experts."""
PAIRS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "mixtral skewed": (
        {"dp": 2, "ep": 2, "zero": 2, "microbatches": 2}, {"dp": 2, "ep": 2, "zero": 3, "recompute": "full", **ONCE_A_RANK},
    ),
    "mixtral balanced": (
        {"dp": 2, "ep": 2, "zero": 0}, {"dp": 2, "ep": 2, "zero": 3, "microbatches": 4, "recompute": "full"},
    ),
    "qwen2": ({"dp": 2, "ep": 2, "zero": 3}, {"dp": 1, "tp": 2}, {"dp": 1, "cp": 2, "ep": 2, "zero": 3, "recompute": "full"}),
    "deepseek skewed": ({"dp": 2, "ep": 2, "zero": 1, "recompute": "full", "microbatches": 2},),
    "gpt_oss": ({"dp": 2, "ep": 2, "zero": 2}, {"dp": 1, "tp": 2}),
    "ernie": ({"dp": 2, "ep": 2, "zero": 2, "microbatches": 2},),
    "einsum": ({"dp": 2, "ep": 2, "zero": 2, "microbatches": 2}, {"dp": 2, "ep": 2, "recompute": "full"}, {"dp": 1, "tp": 2}),
    "einsum of the batch": ({"dp": 2, "ep": 2, "zero": 2},),
    "matmul": ({"dp": 2, "ep": 2, "zero": 3},),
    "llama4": ({"dp": 2, "ep": 2, "zero": 1},),
    "loop": ({"dp": 2, "zero": 3}, {"dp": 1, "tp": 2}),
}
FOURS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "mixtral": (
        {"dp": 4, "ep": 2, "zero": 3}, {"dp": 2, "ep": 2, "tp": 2, "zero": 1, "microbatches": 2},
        {"dp": 2, "ep": 4, "cp": 2, "zero": 3, "microbatches": 2},
        {"dp": 2, "ep": 2, "tp": 2, "zero": 3, "microbatches": 2, "model.layers.*.mlp.experts:experts": FOLDED},
        {"dp": 2, "ep": 2, "tp": 2, "zero": 1, "model.layers.*.mlp.experts:experts": ALONG},
        {"axes": {"x": 2, "y": 2}, "microbatches": 2, "model.layers.*.mlp.experts:experts": "x=t0, y=t1&e"},
        {"axes": {"x": 2, "y": 2}, "recompute": "full", "model.layers.*.mlp.experts:experts": "x=t1&e, y=t0&e"},
    ),
    "qwen3": (
        {"dp": 4, "ep": 4, "zero": 2}, {"dp": 4, "ep": 2, "shard": 2, "zero": 3}, {"dp": 4, "ep": 4, "zero": 2, **ONCE_A_NODE},
    ),
    "qwen2 masked": ({"dp": 2, "ep": 2, "tp": 2, "zero": 1, "microbatches": 2}, {"dp": 4, "zero": 2, "microbatches": 2}),
    "qwen3 balanced": (
        {"dp": 4, "ep": 4, "zero": 3, "microbatches": 2}, {"dp": 2, "ep": 2, "cp": 2, "zero": 1, "microbatches": 4},
    ),
    "qwen2 of layers balanced": (
        {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "interleaved1f1b", "virtual_stages": 2, "zero": 1},
    ),
    "deepseek": (
        {"pp": 2, "dp": 2, "ep": 2, "microbatches": 2, "schedule": "1f1b", "zero": 1}, {"dp": 2, "ep": 2, "cp": 2, "zero": 1},
    ),
    "einsum": ({"dp": 4, "ep": 2, "zero": 3, "microbatches": 2}, {"dp": 2, "ep": 2, "tp": 2, "zero": 1}),
    "einsum of layers": ({"pp": 2, "dp": 2, "ep": 2, "microbatches": 2, "schedule": "zb", "zero": 1},),
    "mixtral of four layers": (
        {"pp": 2, "dp": 2, "ep": 2, "microbatches": 2, "schedule": "interleaved1f1b", "virtual_stages": 2, "zero": 1},
        {"pp": 2, "dp": 2, "ep": 2, "microbatches": 2, "schedule": "zb", "zero": 1},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equality_on_two_processes(name: str, pool: Callable[[int], Any]) -> None:
    assert not pool(2).run(_train, name, 2, PAIRS[name])[0]


@pytest.mark.parametrize("name", FOURS)
def test_equality_on_four_processes(name: str, pool: Callable[[int], Any]) -> None:
    assert not pool(4).run(_train, name, 4, FOURS[name])[0]


def _saved(rank: int, folder: str) -> list[str]:
    """What differs from one process that was never interrupted: experts split, saved, whole, saved, split again, exported."""
    model, batch = make("qwen3")
    single = copy.deepcopy(model)
    wanted = train(single, batch, 3)
    before, after = ({**PLAIN, "dp": 2, "ep": 2, "zero": 2}, {**PLAIN, "dp": 2, "zero": 3})
    found: list[float] = []
    parallel: Any = None
    with captured_once("mixture qwen3"):
        for pins, steps in ((before, 2), (after, 1), (before, 0)):
            kept = parallel
            parallel = autoparallel(model, init_device_mesh("cpu", (2,)), ((), batch), pins=pins, progress=False)
            optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, eps=EPS)
            if kept is not None:
                parallel.load(folder, optimizer)
            for _ in range(steps):
                loss = parallel(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            parallel.save(folder, optimizer)
    parallel.export(f"{folder}.exported")
    again = load(f"{folder}.exported", init_device_mesh("cpu", (2,)))
    state, bits = parallel.full_state_dict(), [one(**batch).loss.item() for one in (parallel, again)]
    wrong = [f"{a} instead of {b}" for a, b in zip(found, wanted, strict=True) if not abs(a - b) <= RELATIVE * abs(b)]
    wrong += [] if bits[0] == bits[1] else [f"exported: {bits}"]
    return wrong + (compare(state, single.state_dict()) if rank == 0 else [])


def test_checkpoints_and_exports_of_split_experts(pool: Callable[[int], Any], tmp_path: Path) -> None:
    assert not pool(2).run(_saved, str(tmp_path / "saved"))[0]
