"""The program of a rank, made from a plan and checked; and whether a plan agrees with where it is run.

``checked_program`` lowers, verifies and type-checks. A plan that is given must agree with the device mesh, with the other
arguments of the call, and with the order in which this process would run its pipeline schedule; what does not agree is refused
by name.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import InputError
from meshwright.ir.mesh import ANY, EXPERT, ROUTED, SAMPLED, SEQUENCE, TENSOR
from meshwright.ir.pins import PinError, Pins, vars_of
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.program import Program
from meshwright.ir.rule import folded
from meshwright.ir.schedules import illegal_combination
from meshwright.rules import rules_of_plan

AXES = ("dp", "tp", "cp", "pp", "ep")


def checked_program(plan: Plan, rank: int) -> Program:
    """The program of the whole model at a rank's place, its shardings and gradient types verified. ``passes.cut_stages`` makes
    of it what the rank runs. Raises PlanError, VerifyError."""
    from meshwright.passes import rank_program
    from meshwright.passes.typecheck import typecheck
    from meshwright.passes.verify import verify

    check_pipeline(plan)
    rules = rules_of_plan(plan)
    whole = rank_program(plan, rules, rank)
    verify(whole, plan.graph, rules)
    typecheck(whole)
    return whole


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank computes."""
    return torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else \
        torch.device(mesh.device_type)


def check_pipeline(plan: Plan) -> None:
    """Raise PlanError for what the schedule cannot run, or torch runs wrong."""
    pipeline = plan.pipeline
    if pipeline is None:
        return
    pipeline.table(plan.schedule.microbatches)
    for group in plan.groups:
        zero = group.zero if plan.mesh.size(group.data_axes) > 1 else 0
        reason = illegal_combination(pipeline.schedule, zero=zero, keep=group.keep, recompute=group.recompute)
        if reason is not None:
            raise PlanError(reason)


def order_of(plan: Plan) -> str:
    """A digest of the order in which a pipeline's ranks work. Raises PlanError, ScheduleError."""
    table = None if plan.pipeline is None else plan.pipeline.table(plan.schedule.microbatches)
    return hashlib.sha256(str(table).encode()).hexdigest()


def mesh_pins(mesh: DeviceMesh, pins: Pins) -> Pins:
    """The pins with the degrees that a named mesh gives."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.size() != world:
        raise InputError(f"the mesh has {mesh.size()} devices but {world} processes run; make the mesh over all of them")
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(AXES):
        return pins
    degrees = dict(zip(names, mesh.shape, strict=True))
    if "ep" in degrees:  # an axis of its own is as data to all but the experts
        degrees["dp"] = degrees.get("dp", 1) * degrees["ep"]
    known = pins.by_degrees()
    for name, size in degrees.items():
        if not known.allows(name, size):
            raise PinError(f"pin {known.shown(name)} contradicts the mesh, whose axis {name!r} has size {size}; change one")
        pins = pins if pins.axes is not None else Pins.of({**vars_of(pins.without(name)), name: size})
    return pins


def check_given(plan: Plan, mesh: DeviceMesh, pins: Pins, optimizer: str | float | None, precision: str | None) -> None:
    """Raise PlanError for arguments that contradict the plan beside which they are given; pins of how operators are split, and
    what is left open in part, are looked at by ``compiler.placement.pin_conflicts``."""
    if plan.mesh.world != mesh.size():
        raise PlanError(f"the plan is for {plan.mesh.world} devices ({plan.mesh}), the mesh has {mesh.size()}; plan again, or "
                        f"start {plan.mesh.world} processes")
    named = optimizer if isinstance(optimizer, str) or optimizer is None else f"{optimizer:g} bytes"
    pipeline = plan.pipeline
    given: dict[str, tuple[Any, Any]] = {"optimizer": (named, plan.optimizer), "precision": (precision, plan.precision)}
    given["microbatches"] = pins.microbatches, plan.schedule.microbatches
    given["pp"] = pins.pp, 1 if pipeline is None else pipeline.degree
    given["schedule"] = pins.schedule, None if pipeline is None else pipeline.schedule
    given["virtual_stages"] = pins.virtual_stages, 1 if pipeline is None else pipeline.stages // pipeline.degree
    given.update({name: (getattr(pins, name), degree) for name, degree in degrees_of(plan).items()})
    for group in plan.groups:
        if plan.mesh.size(group.data_axes) > 1 and group.zero != pins.zero:
            given["zero"] = pins.zero, group.zero
        if group.path and group.recompute != pins.recompute:
            given["recompute"] = pins.recompute, group.recompute
        if group.zero and plan.mesh.size(group.shard_axes) != pins.shard:
            given["shard"] = pins.shard, plan.mesh.size(group.shard_axes)
    for name, (want, have) in given.items():
        if want is not None and want != have:
            raise PlanError(f"{name}={want!r} contradicts the plan, which has {name}={have!r}; leave it out, or plan again "
                            "with it")


def degrees_of(plan: Plan) -> dict[str, int]:
    """The data, sequence and tensor degrees. An axis that may do anything is a data axis if all gradients of parameters are
    summed over it, a tensor axis if none is."""
    mesh, groups = plan.mesh, plan.groups
    free = mesh.having(ANY)
    data = [axis for axis in free if all(axis in group.data_axes for group in groups)]
    rest = [axis for axis in free if not any(axis in group.data_axes for group in groups)]
    return {
        "dp": mesh.size((*mesh.having(*SAMPLED), *data)),
        "ep": mesh.size(mesh.having(*(ROUTED if folded(plan.assignments.values()) else {EXPERT}))),
        "cp": mesh.size(mesh.having(SEQUENCE)),
        "tp": mesh.size((*mesh.having(TENSOR), *rest)),
    }
