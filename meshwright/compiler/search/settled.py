"""What a plan takes and holds whose every decision is given: one that is read from a file, made of pins, or asked "what if".

Nothing is searched. The same problem is built as for a search, with one choice left of everything (``placement.fixed``), and
priced by the same sums: without a pipeline block by block (``blockwise``), with one, or on more devices than are refined, unit
by unit (``evaluate``). So a plan of a search comes out with the seconds that the search predicted. ``decided`` makes the plan
of pins that leave nothing open.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from meshwright.compiler.pipeline.degrees import REPLICATE, SHARD, Degrees
from meshwright.compiler.pipeline.stages import StageError
from meshwright.compiler.placement.fixed import FixedDecisions, variant_of
from meshwright.compiler.placement.pinned import fixed_by, kept_by
from meshwright.compiler.placement.placement import Placements
from meshwright.compiler.placement.rows import NONE
from meshwright.compiler.search.blockwise import held_layout
from meshwright.compiler.search.candidates import Candidate, Layout
from meshwright.compiler.search.evaluate import Evaluation, Evaluator
from meshwright.compiler.search.plans import Plans
from meshwright.compiler.search.stage_costs import StageCosts
from meshwright.compiler.search.task import Fits, Task
from meshwright.compiler.structure.dims import batch_inputs, batch_size
from meshwright.compiler.structure.microbatch import split_time
from meshwright.compiler.structure.units import find_layers, start_of
from meshwright.ir.mesh import HEADS, PP, SAMPLED, SEQUENCE, TENSOR, Mesh, role_of
from meshwright.ir.pins import RECOMPUTE, PinError, Pins
from meshwright.ir.plan import GroupChoice, Pipeline, Plan, PlanError
from meshwright.ir.prediction import Prediction
from meshwright.ir.schedules import schedule_of
from meshwright.ir.sharding import ceil_div
from meshwright.ir.writing.names import names_of


def settled(task: Task, plan: Plan, fits: Fits) -> Plan:
    """The plan with its prediction on the task's cluster, its memory replayed; it may be more than a device has. Raises
    PlanError for what no search of this version decides, and which has no price therefore."""
    if plan.mesh.world != task.cluster.world:
        raise PlanError(f"the plan is for {plan.mesh.world} devices ({plan.mesh}), {task.cluster} has {task.cluster.world}; "
                        "plan again for these")
    task = replace(task, graph=plan.graph, pins=Pins(), recompute=RECOMPUTE, fixed=FixedDecisions.of(plan, task.rules))
    try:
        if plan.pipeline is None:
            layout = Layout(plan.mesh, {axis: role_of(axis) for axis in plan.mesh.axes})
            predicted = held_layout(task, layout, plan.schedule.microbatches)
        else:
            predicted = _of_stages(task, plan)
    except (PinError, StageError) as error:
        raise PlanError(f"the plan cannot be priced: {error}") from error
    found = replace(plan, cluster=str(task.cluster), predicted=predicted)
    return replace(found, predicted=fits(found))


def stretched(task: Task, plan: Plan, times: float) -> Prediction:
    """What a step takes of ``times`` as large a batch, in as many micro-batches more or less, so that each is what it is now;
    as the search counts it, unit by unit. Raises PlanError as ``settled`` does, and where micro-batches would be none or
    parts."""
    if (count := times * plan.schedule.microbatches) < 1 or count % 1:
        raise PlanError(f"{times:g} times the batch is {plan.schedule.microbatches} x {times:g} = {count:g} micro-batches of "
                        "the same size; give a factor that makes them whole, or plan that batch")
    task = replace(task, graph=plan.graph, pins=Pins(), recompute=RECOMPUTE, fixed=FixedDecisions.of(plan, task.rules))
    try:
        made = Plans(task).of(_evaluation(task, plan, times)).predicted
    except (PinError, StageError) as error:
        raise PlanError(f"the plan cannot be priced: {error}") from error
    assert made is not None
    return made


def _of_stages(task: Task, plan: Plan) -> Prediction:
    found = _evaluation(task, plan)
    made = Plans(task).of(found).predicted
    assert made is not None
    return made


def _evaluation(task: Task, plan: Plan, times: float = 1.0) -> Evaluation:
    """The candidate that the plan is, with ``times`` as many micro-batches, evaluated as it is cut and recomputed."""
    degrees, zero = _degrees(plan), _level(plan)
    fixed = task.fixed.collapsed(degrees.data)
    kinds = tuple(dict.fromkeys((NONE, *task.recompute)))
    placements = Placements(plan.graph, task.cluster, task.rules, task.pins, itemsize=task.itemsize,
                            state_bytes=task.state_bytes, recompute=kinds, fixed=fixed)
    pipeline, count = plan.pipeline, plan.schedule.microbatches
    virtual = 1 if pipeline is None else pipeline.stages // pipeline.degree
    candidate = Candidate(
        degrees.pp, virtual, "none" if pipeline is None else pipeline.schedule, degrees.data, degrees.tensor,
        round(count * times),
        ceil_div(batch_size(plan.graph), degrees.data * count), None, degrees.context, degrees.mirrored, degrees.expert,
        degrees.heads, fixed.folded,
    )
    placement = placements.of(candidate.tensor, candidate.samples, candidate.context, candidate.expert, candidate.heads,
                              candidate.folded, candidate.microbatches > 1)
    positions = placements.folded.positions
    names = [plan.graph.ops[position.start].module or "root" for position in positions]
    costs = StageCosts(task.cluster, itemsize=task.itemsize, state_bytes=task.state_bytes)
    evaluator = Evaluator(costs, positions, names, task.cluster.capacity_bytes - task.given_bytes, kinds)
    root = variant_of(plan.groups[-1])
    kept = [variant_of(plan.groups[p.block]) if p.block >= 0 else root for p in positions]
    begin = [position.start for position in positions]
    cuts = (0, len(plan.graph.ops)) if pipeline is None else pipeline.cuts
    if missing := [at for at in cuts[:-1] if at not in begin]:
        op = plan.graph.ops[missing[0]]
        raise PlanError(f"a stage starts at {op.target} of {op.module or 'the model'}, within a block; no search cuts there, "
                        "so it has no price")
    return evaluator.settled(
        candidate, degrees, zero, placement, (*(begin.index(at) for at in cuts[:-1]), len(begin)), kept
    )


def _degrees(plan: Plan) -> Degrees:
    """The degrees of the plan's mesh. Raises PlanError for a mesh that a search does not make."""
    mesh = plan.mesh
    data = mesh.size(mesh.having(*SAMPLED))
    shard = data // mesh.size(REPLICATE) if SHARD in mesh.axes else data
    sequence = mesh.having(SEQUENCE)
    found = Degrees(
        mesh.size(PP) if PP in mesh.axes else 1, data, shard, mesh.size(mesh.having(TENSOR)), mesh.size(sequence),
        bool(mesh.mirrored), mesh.size("ep") if "ep" in mesh.axes else 1, mesh.size(HEADS) if HEADS in mesh.axes else 1,
    )
    if found.mesh != mesh:
        raise PlanError(f"a mesh {mesh} is none that a search makes (it would be {found.mesh}), so the plan has no price")
    return found


def _level(plan: Plan) -> int:
    """The ZeRO level of what lies outside the blocks. Raises PlanError for parameters that are kept as no unit of a stage is:
    gradients are summed over all data ranks, and nothing outside of the blocks is recomputed."""
    data = _degrees(plan).data_axes
    for group in plan.groups:
        one = variant_of(group)
        whole = tuple(axis for axis in one.data_axes if plan.mesh.size(axis) > 1) == data
        if not whole or (not group.path and one.recompute != NONE and group is plan.groups[-1]):
            where = group.path or "what lies outside the blocks"
            raise PlanError(f"{where} sums gradients over {one.data_axes or 'no axis'} and recomputes {one.recompute}: a "
                            f"pipeline, or a plan on so many devices, is priced where all gradients are summed over {data}, "
                            "and nothing outside the blocks is recomputed")
    return plan.groups[-1].zero


def decided(task: Task) -> Plan | None:
    """The plan, without a prediction; None where the pins leave something open. Raises PinError for pins that say nothing or
    contradict each other, PlanError for micro-batches that the model does not allow."""
    pins = task.pins
    if pins.axes is None or pins.microbatches is None or not (pins.operators and pins.blocks):
        return None
    staged = PP in pins.axes
    graph = find_layers(task.graph) if staged else task.graph
    fixed, names = fixed_by(pins, graph, task.cluster.world), names_of(graph)
    kept = kept_by(pins, graph, names)
    starts = [*(graph.ops[block.start].name for block in graph.blocks), ""]
    if set(fixed.assignments) != set(names.ops) or set(kept) != set(starts):
        return None
    pipeline = None
    if staged:
        if pins.schedule is None or pins.stage_cuts is None:
            return None
        cuts = [start_of(graph, name) for name in pins.stage_cuts]
        edges = (0, *(at for at in cuts if at is not None), len(graph.ops))
        degree, stages = pins.axes[PP], len(edges) - 1
        if None in cuts or any(a >= b for a, b in pairwise(edges)) or stages % degree:
            raise PinError(f"pin stage_cuts={pins.stage_cuts!r}: name pp x virtual_stages - 1 modules or operators in the "
                           f"order of the model, for pp={degree}")
        pipeline = Pipeline(pins.schedule, edges, schedule_of(pins.schedule).stage_rank(degree, stages // degree))
    groups = []
    for start, block in zip(starts, (*graph.blocks, None), strict=True):
        one, path = kept[start], "" if block is None else block.path
        stage = 0 if pipeline is None or block is None else pipeline.stage_of(block.start)
        groups.append(GroupChoice(path, one.zero, one.data_axes, one.shard_axes, one.recompute, stage))
    axes = {axis.removesuffix("*"): size for axis, size in pins.axes.items()}
    mesh = Mesh(tuple(axes), tuple(axes.values()), frozenset(axis[:-1] for axis in pins.axes if axis.endswith("*")))
    return Plan(
        graph, mesh, fixed.assignments, fixed.copies, tuple(groups),
        schedule=split_time(graph, task.rules, pins.microbatches, batch_inputs(graph)), pipeline=pipeline,
        precision=task.precision, cluster=str(task.cluster),
    )
