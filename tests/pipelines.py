"""Plans with a pipeline made by hand: one of the planner's for a stage's ranks, cut into stages; and training under them."""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshwright.api import autoparallel
from meshwright.cost.cluster import Cluster
from meshwright.errors import RunError
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import PP, Mesh
from meshwright.ir.pins import PinError, Pins
from meshwright.ir.plan import Pipeline, Plan, PlanError
from meshwright.ir.schedules import schedule_of
from meshwright.ir.serialize import plan_to_dict
from meshwright.planner import capture_model, make_plan
from meshwright.runtime.checks.elsewhere import Elsewhere
from meshwright.runtime.pipeline import stage
from meshwright.runtime.pipeline.stage import Stage
from tests.equality import RELATIVE, captured_once, compare, differences, train
from tests.models import make


def batch_of(name: str, double: bool = False) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The named model and its batch; ``double``: of twice as many samples."""
    model, batch = make(name)
    return model, {k: torch.cat([v, v.flip(-1)]) for k, v in batch.items()} if double else batch


@cache
def _captured(name: str, double: bool) -> Graph:
    model, batch = batch_of(name, double)
    model.train()
    return capture_model(model, (), batch, (), None, "fp32")


@cache
def inner_plan(name: str, double: bool, world: int, pins: tuple[tuple[str, Any], ...]) -> Plan:
    return make_plan(_captured(name, double), Cluster.parse(f"cpu:1x{world}"), Pins(**dict(pins)))


def at_blocks(graph: Graph, stages: int) -> tuple[int, ...]:
    """Cuts at block boundaries, for as many stages as there are such places; else inside, at even distances."""
    places = sorted({edge for block in graph.blocks for edge in (block.start, block.stop)} - {0, len(graph.ops)})
    if len(places) < stages - 1:
        return evenly(graph, stages)
    step = len(places) / (stages - 1)
    return (0, *(places[int((s + 0.5) * step)] for s in range(stages - 1)), len(graph.ops))


def evenly(graph: Graph, stages: int) -> tuple[int, ...]:
    """Cuts at even distances, wherever that is."""
    return tuple(len(graph.ops) * s // stages for s in range(stages + 1))


def pipelined(
    name: str, schedule: str, pp: int, virtual: int = 1, *, world: int | None = None, double: bool = False, keep: bool = False,
    cuts: Sequence[int] | None = None, even: bool = False, **pins: Any,
) -> Plan:
    """The named model over ``pp`` x the pinned degrees."""
    inner = inner_plan(name, double, (world or pp) // pp, tuple(sorted(({"dp": 1, "tp": 1, "microbatches": 4} | pins).items())))
    plan = cut(inner, schedule, pp, virtual, cuts or (evenly if even else at_blocks)(inner.graph, pp * virtual))
    return replace(plan, groups=tuple(replace(group, keep=keep) for group in plan.groups))


def cut(plan: Plan, schedule: str, pp: int, virtual: int, cuts: Sequence[int] | None = None) -> Plan:
    """A plan for the ranks of one stage, on ``pp`` times as many."""
    lies = schedule_of(schedule).stage_rank(pp, virtual)
    pipeline = Pipeline(schedule, tuple(cuts or at_blocks(plan.graph, pp * virtual)), lies)
    return replace(plan, mesh=Mesh((PP, *plan.mesh.axes), (pp, *plan.mesh.sizes)), pipeline=pipeline)


def check(
    rank: int, name: str, plans: Mapping[str, Mapping[str, Any]], clip: float | None = None, double: bool = False,
    calls: int = 1,
) -> list[str]:
    """Train under each plan (as a dict); what differs from the single process, on rank 0. ``calls``: forwards and backwards
    before each optimizer step."""

    def build(model: torch.nn.Module, _: Mapping[str, Any], data: Any) -> torch.nn.Module:
        return _under(Plan.from_dict(data), model)

    with captured_once(name, double):
        return _differences(rank, name, plans, build, clip, double, calls)


def _under(plan: Plan, model: torch.nn.Module) -> torch.nn.Module:
    return autoparallel(model, init_device_mesh("cpu", (plan.mesh.world,)), plan=plan)


def check_searched(
    rank: int, name: str, cases: Mapping[str, Mapping[str, Any]], clip: float | None = None, double: bool = False,
    calls: int = 1,
) -> list[str]:
    """As ``check``, of what ``autoparallel(model, mesh, example, pins=...)`` finds; without a pin on pp no pipeline."""

    def build(model: torch.nn.Module, batch: Mapping[str, Any], pins: Any) -> torch.nn.Module:
        parallel = autoparallel(
            model, init_device_mesh("cpu", (dist.get_world_size(),)), ((), batch), pins=dict(pins), progress=False
        )
        pipeline = parallel.plan.pipeline
        assert (1 if pipeline is None else pipeline.degree) == pins.get("pp", 1), (pins, str(parallel.plan))
        return parallel

    with captured_once(name, double):
        return _differences(rank, name, cases, build, clip, double, calls)


def _differences(
    rank: int, name: str, cases: Mapping[str, Any], build: Callable[..., torch.nn.Module], clip: float | None, double: bool,
    calls: int,
) -> list[str]:
    """What differs between a loop on ``build(model, batch, case)`` and on the model."""
    model, batch = batch_of(name, double)
    model.train()
    named = {f"{name} under {what}": partial(build, model, batch, case) for what, case in cases.items()}
    return differences(rank, model, batch, named, clip, calls)


def largest_walk(rank: int, name: str, data: Mapping[str, Any]) -> int:
    """Of the groups of weights whose gradients a split backward computes in one walk: the most places one starts at."""
    model, batch = make(name)
    plan = Plan.from_dict(data)
    with captured_once(name):
        parallel = _under(plan, model.train())
    seen: list[int] = []

    def joined(groups: Sequence[Mapping[str, Any]], joins: Any = stage._joined) -> Any:
        seen.extend(len(group["intermediates"]) for group in groups)
        return joins(groups)

    with mock.patch.object(stage, "_joined", joined):
        parallel(**batch).loss.backward()
    return max(seen)


def most_received(rank: int, name: str, plans: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Under each plan, of buffers that are received into: the most that this rank holds before they are read; all that it is
    left with after a step."""
    torch.set_num_threads(1)
    model, batch = batch_of(name, double=True)
    counts: dict[str, tuple[int, int]] = {}
    for what, data in plans.items():
        with captured_once(name, double=True):
            parallel = _under(Plan.from_dict(data), model.train())
        stages = parallel._engine[0].schedule.stages
        seen = [0]

        def held(stages: Sequence[Any] = stages) -> int:
            """Micro-batches' values and gradients that wait: a boundary's several tensors count once."""
            torchs = [infos for s in stages for table in (s.args_recv_info, s.grad_recv_info) for infos in table.values()]
            buffers = [getattr(info, "buffer", None) for infos in torchs for info in infos]
            assert all(buffer is None or buffer.is_meta for buffer in buffers)
            waiting = [tensors for s in stages for table in (s.arrived, s.returned) for tensors in table.values()]
            return sum(any(x is not None for x in tensors) for tensors in waiting)

        def p2p(*how: Any, seen: list[int] = seen, held: Callable[[], int] = held, make: Any = Stage._p2p) -> Any:
            seen[0] = max(seen[0], held())
            return make(*how)

        with mock.patch.object(Stage, "_p2p", p2p):
            for _ in range(2):
                parallel(**batch).loss.backward()
        counts[what] = seen[0], held()
    return counts


def as_dicts(plans: Mapping[str, Plan]) -> dict[str, dict[str, Any]]:
    """Plans in the form that goes to worker processes."""
    return {what: plan_to_dict(plan) for what, plan in plans.items()}


def check_outputs(rank: int, name: str, plans: Sequence[Mapping[str, Any]]) -> None:
    """Without gradients every rank gives the single process's outputs; in training the loss, and what its own stage makes."""
    torch.set_num_threads(1)
    for data in plans:
        with captured_once(name):
            _check_outputs(rank, name, Plan.from_dict(data))


def _check_outputs(rank: int, name: str, plan: Plan) -> None:
    model, batch = make(name)
    parallel = _under(plan, model)
    for mode in (False, True):
        model.train(mode)
        parallel.train(mode)
        with torch.no_grad():
            wanted, found = model(**batch), parallel(**batch)
        for key, want in wanted.items():
            have = found[key].full_tensor() if hasattr(found[key], "full_tensor") else found[key]
            assert have.shape == want.shape, key
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    parallel.train()
    learned = parallel(**batch)
    torch.testing.assert_close(learned.loss.detach(), wanted.loss, rtol=1e-4, atol=1e-5)
    assert plan.pipeline is not None
    last = plan.mesh.coordinates(rank)[PP] == plan.pipeline.stage_rank[-1]
    assert isinstance(learned.logits, Elsewhere) != last
    if not last:
        check_elsewhere(learned.logits, wanted.logits)
    else:
        torch.testing.assert_close(learned.logits.full_tensor(), wanted.logits, rtol=1e-4, atol=1e-5)
    learned.loss.backward()
    parallel.eval()
    again = parallel(**batch)  # gradients enabled, but in eval: forward only, and a backward says so
    with pytest.raises(RunError, match=r"in eval\(\)"):
        again.loss.backward()
    torch.testing.assert_close(again.loss, wanted.loss, rtol=1e-4, atol=1e-5)


def check_elsewhere(output: Any, wanted: torch.Tensor) -> None:
    """What is known of an output of another stage, and that every use of it says where it is."""
    assert (output.shape, output.dtype, output.ndim, len(output)) == (wanted.shape, wanted.dtype, wanted.ndim, len(wanted))
    assert "output 'logits'" in repr(output)
    assert output.detach() is output
    uses: list[Callable[[Any], Any]] = [
        lambda x: x.pow(2), lambda x: x + 1, lambda x: 1 - x, lambda x: wanted * x, lambda x: x[0], lambda x: x == wanted,
        lambda x: torch.stack([x, x]), lambda x: torch.cat((wanted, x)), lambda x: x.float().mean(), lambda x: x.cpu(),
        lambda x: x.argmax(-1), lambda x: x.full_tensor(), lambda x: x.to_local(), lambda x: x.placements, bool, float, list,
        lambda x: x.numpy(), lambda x: x.item(), lambda x: x.tolist(), lambda x: x.sum().backward(), lambda x: x.backward(),
        lambda x: x.register_hook(print), lambda x: x.requires_grad_(), lambda x: x.add_(1), lambda x: f"{x:.3f}", pickle.dumps,
        copy.deepcopy, lambda x: torch.autograd.grad(x, [wanted]), lambda x: wanted.copy_(x), lambda x: torch.equal(wanted, x),
        lambda x: torch.nn.functional.cross_entropy(x.flatten(0, 1), wanted), lambda x: torch.nn.functional.mse_loss(x, wanted),
    ]
    for use in uses:
        with pytest.raises(RunError, match="is made by stage"):
            use(output)


def check_resumed(rank: int, name: str, folder: str, plans: Mapping[str, Mapping[str, Any]]) -> None:
    """A run saved under the first plan goes on under each of the others as it does under the first."""
    torch.set_num_threads(1)
    model, batch = make(name)
    model.train()
    found = {what: Plan.from_dict(data) for what, data in plans.items()}
    first = next(iter(found.values()))
    with captured_once(name):
        parallel = _under(first, model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, eps=1e-3)

    def go_on(module: torch.nn.Module, how: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        module(**batch).loss.backward()
        how.step()
        how.zero_grad()
        state: dict[str, torch.Tensor] = module.full_state_dict()
        return {key: value.clone() for key, value in state.items()}

    go_on(parallel, optimizer)
    parallel.save(folder, optimizer)
    wanted = go_on(parallel, optimizer)
    assert (rank == 0) == bool(wanted)
    for what, plan in found.items():
        with captured_once(name):
            other = _under(plan, model)
        second = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-3)
        other.load(folder, second)
        problems = compare(go_on(other, second), wanted)
        assert not problems, (what, problems)


def losses_with_dropout(rank: int, plans: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Losses of two calls under each plan, from the same seed."""
    torch.set_num_threads(1)
    model, batch = _with_dropout()
    losses = {}
    for what, data in plans.items():
        torch.manual_seed(5)
        plan = Plan.from_dict(data)
        with captured_once("gpt2 with dropout"):
            parallel = _under(plan, model)
        losses[what] = [parallel(**batch).loss.item() for _ in range(2)]
    return losses


def _with_dropout() -> tuple[torch.nn.Module, dict[str, Any]]:
    model, batch = make("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    return model.train(), batch


@cache
def _alone() -> Plan:
    model, batch = _with_dropout()
    graph = capture_model(model, (), batch, (), None, "fp32")
    return make_plan(graph, Cluster.parse("cpu:1x1"), Pins(dp=1, tp=1, microbatches=4))


def dropout_plan(schedule: str | None, pp: int = 1, virtual: int = 1) -> Plan:
    """GPT-2 with dropout on a pipeline of single ranks, or (None) on one rank."""
    plan = _alone()
    return plan if schedule is None else cut(plan, schedule, pp, virtual)


def check_refused(rank: int, name: str, cases: Sequence[tuple[Mapping[str, Any], str]]) -> None:
    """Each plan raises PlanError with its message on this rank."""
    model, _ = make(name)
    for data, message in cases:
        plan = Plan.from_dict(data)
        with captured_once(name), pytest.raises(PlanError, match=message):
            _under(plan, model)


def end_in_a_step(rank: int, dying: int, name: str, data: Mapping[str, Any], port: int, results: Any) -> None:
    """A process of its own; that of rank ``dying`` ends in its first step. The seconds until the other hears of it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    model, batch = make(name)
    plan = Plan.from_dict(data)
    parallel = _under(plan, model.train())
    if rank == dying:
        parallel._engine[0].parts[0].forward = _ended
    start = time.monotonic()
    try:
        parallel(**batch)
    except Exception as error:
        results.put((time.monotonic() - start, f"{type(error).__name__}: {error}"))
        results.close()
        results.join_thread()
        os._exit(1)  # as an uncaught error ends a process


def _ended(*_: object) -> None:
    os._exit(1)  # without a word, as out of memory


@cache
def _in_bf16() -> Graph:
    model, batch = make("llama")
    return capture_model(model.train(), (), batch, (), None, "bf16")


def bf16_plan(schedule: str, virtual: int, zero: int) -> Plan:
    """Llama in bf16 on two stages of two data ranks."""
    plan = make_plan(_in_bf16(), Cluster.parse("cpu:1x2"), Pins(dp=2, tp=1, zero=zero, microbatches=2), precision="bf16")
    return cut(plan, schedule, 2, virtual)


def bf16_losses(rank: int, plans: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """How far losses are from the fp32 run's, relative, over three steps; gradients are fp32."""
    torch.set_num_threads(1)
    model, batch = make("llama")
    model.train()
    wanted = train(copy.deepcopy(model), batch, 3)
    off = []
    for data in plans.values():
        with captured_once("llama"):
            parallel = _under(Plan.from_dict(data), model)
        parallel(**batch).loss.backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in parallel.parameters())
        parallel.zero_grad()
        off += [abs(a - b) / b for a, b in zip(train(parallel, batch, 3), wanted, strict=True)]
    return off


def bf16_gradients(rank: int, plans: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """How far gradients are from the first plan's at most, each over the largest there is of its parameter; of the parameters
    that this rank has of both."""
    torch.set_num_threads(1)
    model, batch = make("llama")
    model.train()
    found = []
    for data in plans.values():
        with captured_once("llama"):
            parallel = _under(Plan.from_dict(data), model)
        parallel(**batch).loss.backward()
        found.append({name: p.grad.to_local() for name, p in parallel.named_parameters()})
    wanted = found[0]
    both = [(name, other[name]) for other in found[1:] for name in other.keys() & wanted.keys() if wanted[name].numel()]
    return [float((grad - wanted[name]).abs().max() / wanted[name].abs().max()) for name, grad in both]


def check_as_used(rank: int, name: str, pins: Mapping[str, Any], folder: str) -> None:
    """What a user does beside training, on a pipeline that the search finds: a mesh with named axes, ``eval()``, a saved plan,
    a checkpoint that a run under that plan goes on from, pins that contradict the mesh."""
    torch.set_num_threads(1)
    with captured_once(name, double=True):
        _check_as_used(rank, name, pins, folder)


def _check_as_used(rank: int, name: str, pins: Mapping[str, Any], folder: str) -> None:
    model, batch = batch_of(name, double=True)
    axes = {"pp": 2, "dp": dist.get_world_size() // 2}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    parallel = autoparallel(model.train(), mesh, ((), batch), pins=dict(pins), progress=False)
    with pytest.raises(PinError, match="pp=4 contradicts the mesh, whose axis 'pp' has size 2"):
        autoparallel(model, mesh, ((), batch), pins={**pins, "pp": 4}, progress=False)
    assert {axis: parallel.plan.mesh.size(axis) for axis in axes} == axes
    single = copy.deepcopy(model)
    wanted = train(single, batch, clip=0.1)
    torch.testing.assert_close(train(parallel, batch, clip=0.1), wanted, rtol=RELATIVE, atol=0.0)
    parallel.eval()
    with torch.no_grad():
        for key, want in single.eval()(**batch).items():
            have = parallel(**batch)[key]
            have = have.full_tensor() if isinstance(have, DTensor) else have
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    parallel.save(f"{folder}/checkpoint")
    if rank == 0:
        parallel.plan.save(f"{folder}/plan.json")
    dist.barrier()
    again = autoparallel(model, mesh, plan=f"{folder}/plan.json")
    assert str(again.plan) == str(parallel.plan)
    again.load(f"{folder}/checkpoint")
    problems = compare(again.full_state_dict(), single.state_dict() if rank == 0 else {})
    assert not problems, problems
    torch.testing.assert_close(train(again, batch), train(single.train(), batch), rtol=RELATIVE, atol=0.0)
