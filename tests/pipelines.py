"""Plans with a pipeline made by hand: one of the planner's for a stage's ranks, cut into stages; and training under them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.cost.cluster import Cluster
from meshwright.cost.schedules import stage_rank
from meshwright.graph import Graph
from meshwright.mesh import PP, Mesh
from meshwright.pins import Pins
from meshwright.plan import Pipeline, Plan
from meshwright.planner import capture_model, make_plan
from meshwright.serialize import plan_from_dict, plan_to_dict
from tests.equality import RELATIVE, compare, train
from tests.models import make


def batch_of(name: str, double: bool = False) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The named model and its batch; ``double``: of twice as many samples."""
    model, batch = make(name)
    return model, {k: torch.cat([v, v.flip(1)]) for k, v in batch.items()} if double else batch


@cache
def _captured(name: str, double: bool) -> Graph:
    model, batch = batch_of(name, double)
    model.train()
    return capture_model(model, (), batch, (), None, "fp32")


@cache
def _inner(name: str, double: bool, world: int, pins: tuple[tuple[str, Any], ...]) -> Plan:
    return make_plan(_captured(name, double), Cluster.parse(f"cpu:1x{world}"), Pins(**dict(pins)))


def at_blocks(graph: Graph, stages: int) -> tuple[int, ...]:
    """Cuts at block boundaries, for as many stages as there are such places; else inside, at even distances."""
    places = sorted({edge for block in graph.blocks for edge in (block.start, block.stop)} - {0, len(graph.ops)})
    if len(places) < stages - 1:
        return evenly(graph, stages)
    step = len(places) / stages
    return (0, *(places[int((s + 0.5) * step)] for s in range(stages - 1)), len(graph.ops))


def evenly(graph: Graph, stages: int) -> tuple[int, ...]:
    """Cuts at even distances, wherever that is."""
    return tuple(len(graph.ops) * s // stages for s in range(stages + 1))


def pipelined(
    name: str, schedule: str, pp: int, virtual: int = 1, *, world: int | None = None, double: bool = False, keep: bool = False,
    cuts: Sequence[int] | None = None, even: bool = False, **pins: Any,
) -> Plan:
    """The named model over ``pp`` x the pinned degrees."""
    inner = _inner(name, double, (world or pp) // pp, tuple(sorted(({"dp": 1, "tp": 1, "microbatches": 4} | pins).items())))
    at = stage_rank(schedule, pp, virtual)
    where = tuple(cuts) if cuts else (evenly if even else at_blocks)(inner.graph, len(at))
    return replace(
        inner, mesh=Mesh((PP, *inner.mesh.axes), (pp, *inner.mesh.sizes)), pipeline=Pipeline(schedule, where, at),
        groups=tuple(replace(group, keep=keep) for group in inner.groups),
    )


def check(
    rank: int, name: str, plans: Mapping[str, Mapping[str, Any]], clip: float | None = None, double: bool = False,
    calls: int = 1,
) -> list[str]:
    """Train under each plan (as a dict); what differs from the single process, on rank 0. ``calls``: forwards and backwards
    before each optimizer step."""
    torch.set_num_threads(1)
    model, batch = batch_of(name, double)
    model.train()
    single = copy.deepcopy(model)
    losses = train(single, batch, clip=clip, calls=calls)
    wanted = {key: value.detach().clone() for key, value in single.state_dict().items()}
    problems = []
    for what, data in plans.items():
        torch.manual_seed(7)
        plan = plan_from_dict(data)
        try:
            parallel = autoparallel(model, init_device_mesh("cpu", (plan.mesh.world,)), plan=plan)
            found = train(parallel, batch, clip=clip, calls=calls)
            state = parallel.full_state_dict()
        except Exception as error:
            raise RuntimeError(f"{name} under {what}: {type(error).__name__}: {error}") from error
        off = [f"{a} instead of {b}" for a, b in zip(found, losses, strict=True) if not abs(a - b) <= RELATIVE * abs(b)]
        if off:
            problems.append(f"{name} under {what}: losses {off}")
        if rank == 0:
            problems += [f"{name} under {what}: {line}" for line in compare(state, wanted)]
    return problems


def as_dicts(plans: Mapping[str, Plan]) -> dict[str, dict[str, Any]]:
    """Plans in the form that goes to worker processes."""
    return {what: plan_to_dict(plan) for what, plan in plans.items()}
