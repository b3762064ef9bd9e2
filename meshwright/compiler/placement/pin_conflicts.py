"""Whether pins that are given together with a plan agree with it; a pin that the plan contradicts is refused by name.

Degrees, micro-batches, cuts and named decisions are compared with the plan's own. Pins about how operators split (sequence
parallelism, attention, splits of parameters) are checked by the function that planning uses: under the pin ``choices`` lists
what an operator may do, and a plan contradicts the pin where it splits an operator in none of these ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshwright.compiler.placement.choices import Scope, choices, near_of
from meshwright.compiler.placement.fixed import variant_of
from meshwright.compiler.placement.pinned import check_tensor_pins, fixed_by
from meshwright.compiler.placement.rows import NONE
from meshwright.compiler.structure.dims import batch_size
from meshwright.compiler.structure.structure import Structure
from meshwright.compiler.structure.units import start_of
from meshwright.ir.mesh import ANY, HEADS, PP, SEQUENCE, TENSOR, Mesh, role_of
from meshwright.ir.pins import NO_STAGES, Pins
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.rule import Rules, folded

_SPLITS = ("sequence_parallel", "attention", "tensors")
_ROLES: Mapping[str, str] = {"sequence_parallel": TENSOR, "attention": SEQUENCE}
_REMEDY = "; leave it out, or plan again with it"


def asks(pins: Pins) -> bool:
    """Whether pins ask for more than ``programs.check_given`` looks at."""
    names = (*_SPLITS, "axes", "operators", "values", "blocks", "ulysses", "stages", "micro_batch", "stage_cuts", "among",
             "most")
    return any(getattr(pins, name) not in (None, {}) for name in names)


def check_agreement(plan: Plan, pins: Pins, rules: Rules, degrees: Mapping[str, int]) -> None:
    """Raise PlanError or PinError for pins that ask for another plan than this. ``rules``: of its operators; ``degrees``: its
    own."""
    for what, want, have in _counts(plan, pins):
        if want != have:
            raise PlanError(f"{what}={want!r} contradicts the plan, which has {what}={have!r}{_REMEDY}")
    for name in {*pins.among, *pins.most} - set(_SPLITS):
        have = [degrees[name]] if name in degrees else _values(plan, name)
        if not all(pins.allows(name, value) for value in have):
            raise PlanError(f"pin {pins.shown(name)} contradicts the plan, which has {name}="
                            f"{', '.join(sorted({str(value) for value in have}))}{_REMEDY}")
    asked = [name for name in _SPLITS if pins.says(name)]
    if asked:
        _check_splits(plan, {name: Pins(**{name: pins.among.get(name, getattr(pins, name))}) for name in asked}, rules)
    for what in _named(plan, pins):
        raise PlanError(f"{what} is pinned beside a plan, which has it otherwise{_REMEDY}")


def idle_pins(plan: Plan, pins: Pins) -> Iterator[str]:
    """In words, the pins that decide nothing of a plan, because it has nothing that they are about."""
    mesh = plan.mesh
    several = any(mesh.size(group.data_axes) > 1 for group in plan.groups)
    absent = {
        "zero": None if several else "no two ranks have the same parameters for other data",
        "shard": None if any(group.zero for group in plan.groups) else "no state is split (ZeRO 0; pin zero too)",
        "sequence_parallel": None if mesh.size(mesh.having(TENSOR, ANY)) > 1 else "tp is 1",
        "attention": None if mesh.size(mesh.having(SEQUENCE)) > 1 else "cp is 1",
        "recompute": None if plan.graph.blocks else "layers that are neither alike nor a chain are made again in a pipeline "
                     "alone (pin pp=2 or more)",
    }
    for name, why in absent.items():
        trivial = getattr(pins, name) in (0, 1, NONE) and name != "attention"  # what is pinned away is away
        if why is not None and pins.says(name) and not trivial:
            yield f"pin {pins.shown(name)} decides nothing here: {why}"


def _named(plan: Plan, pins: Pins) -> Iterator[str]:
    """What is pinned by its name and is otherwise in the plan."""
    mesh, graph = plan.mesh, plan.graph
    if pins.axes is not None:
        have = {axis + "*" * (axis in mesh.mirrored): mesh.size(axis) for axis in mesh.axes}
        if have != dict(pins.axes):
            yield f"the mesh {dict(pins.axes)}"
    named = Pins(axes=dict(zip(mesh.axes, mesh.sizes, strict=True)), operators=pins.operators, values=pins.values,
                 blocks=pins.blocks)
    fixed = fixed_by(named, graph, mesh.world)
    for op in fixed.assignments:
        planned = {axis: one for axis, one in plan.assignments.get(op, {}).items() if mesh.size(axis) > 1}
        if fixed.assignment(op, mesh) != planned:
            yield f"operator {op}"
    yield from (f"value %{name}" for name, one in fixed.copies.items() if plan.copies.get(name) != one)
    starts = {graph.ops[block.start].name if block else "": group
              for block, group in zip((*graph.blocks, None), plan.groups, strict=True)}
    yield from (f"how {starts[name].path or 'the root'} is kept" for name, one in fixed.kept.items()
                if variant_of(starts[name]) != one)


def _counts(plan: Plan, pins: Pins) -> Iterator[tuple[str, Any, Any]]:
    """(pin, what it asks, what the plan has) of what is pinned."""
    pipeline = plan.pipeline
    if pins.stages is not None:
        yield "stages", pins.stages, _values(plan, "stages")[0]
    if pins.micro_batch is not None:
        yield "micro_batch", pins.micro_batch, _values(plan, "micro_batch")[0]
    if pins.ulysses is not None:
        yield "ulysses", pins.ulysses, plan.mesh.size(HEADS) if HEADS in plan.mesh.axes else 1
    if pins.stage_cuts is not None:
        starts = [] if pipeline is None else list(pipeline.cuts[1:-1])
        asked = [start_of(plan.graph, name) for name in pins.stage_cuts]
        have = tuple(plan.graph.ops[at].module or plan.graph.ops[at].name for at in starts)
        yield "stage_cuts", pins.stage_cuts, pins.stage_cuts if asked == starts else have


def _values(plan: Plan, name: str) -> list[Any]:
    """What a plan has of what may be left open in part; of some every block its own."""
    mesh, pipeline = plan.mesh, plan.pipeline
    ranks = mesh.size([axis for axis in mesh.axes if any(axis in group.data_axes for group in plan.groups)])
    kept = [group for group in plan.groups if mesh.size(group.data_axes) > 1]
    known: dict[str, list[Any]] = {
        "pp": [1 if pipeline is None else pipeline.degree], "stages": [1 if pipeline is None else pipeline.stages],
        "virtual_stages": [1 if pipeline is None else pipeline.stages // pipeline.degree],
        "schedule": [NO_STAGES if pipeline is None else pipeline.schedule], "microbatches": [plan.schedule.microbatches],
        "micro_batch": [batch_size(plan.graph) // plan.schedule.microbatches // ranks],
        "shard": [mesh.size([axis for axis in group.shard_axes if role_of(axis) != SEQUENCE]) for group in kept if group.zero],
        "zero": [group.zero for group in kept], "recompute": [group.recompute for group in plan.groups if group.path],
    }
    return known[name]


def _check_splits(plan: Plan, asked: Mapping[str, Pins], rules: Rules) -> None:
    """``asked``: {pin: nothing but this pin}."""
    graph = plan.graph
    axes = tuple(axis for axis in plan.mesh.axes if axis != PP)
    mesh = Mesh(axes, tuple(plan.mesh.size(axis) for axis in axes), plan.mesh.mirrored)
    for name, pins in asked.items():
        role, free = _ROLES.get(name), mesh.size(mesh.having(ANY))
        if free > 1 or (role and mesh.size(mesh.having(role)) == 1 and getattr(pins, name) is not False):
            raise PlanError(f"pin {pins.shown(name)} is given beside a plan whose mesh is {plan.mesh}, "
                            f"{'of which any axis may split anything' if free > 1 else 'with nothing to split so'}{_REMEDY}")
    check_tensor_pins(asked.get("tensors", Pins()), graph)
    scope = Scope(
        Structure(graph, rules), mesh, {axis: role_of(axis) for axis in axes}, Pins(), plan.schedule.microbatches,
        near=near_of(plan.assignments), folded=folded(plan.assignments.values()),
    )
    for op in graph.ops:
        planned, time = dict(plan.assignments.get(op.name, {})), plan.schedule.time.get(op.name)
        for name, pins in asked.items():
            if planned not in choices(op, rules[op.name], replace(scope, pins=pins), time):
                split = ", ".join(f"{factor}@{axis}" for axis, factor in planned.items()) or "whole"
                raise PlanError(f"pin {pins.shown(name)} contradicts the plan, in which {op.target} of "
                                f"{op.module or 'the model'} is {split}{_REMEDY}")
