"""From an evaluation to a plan: assignments over the plan's axes, stages as operators, how blocks keep their parameters.

The prediction holds seconds of every stage and transfer, so that ``simulation_of`` runs the schedule again: for the printed
clock and for ``timeline``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.compiler.pipeline.degrees import Degrees, renamed, renamed_assignment
from meshwright.compiler.placement.rows import decisions
from meshwright.compiler.search.evaluate import Evaluation
from meshwright.compiler.search.prediction import of_stages, step_flops
from meshwright.compiler.search.task import Task
from meshwright.compiler.structure.structure import Structure
from meshwright.compiler.structure.units import find_layers
from meshwright.cost.timeline import Simulation, simulate
from meshwright.ir.graph import Graph
from meshwright.ir.plan import GroupChoice, Pipeline, Plan, PlanError
from meshwright.ir.schedules import schedule_of


@dataclass
class Plans:
    """Makes plans of a task's evaluations; what evaluations share is made once: how a placement reads in the axes of the mesh,
    and the FLOPs of a step."""

    task: Task
    _decoded: dict[tuple[int, Degrees, int], Plan] = field(default_factory=dict)

    def of(self, found: Evaluation) -> Plan:
        """The plan of an evaluation, as the search counts it."""
        key = (id(found.placement), found.degrees, found.candidate.microbatches)
        if key not in self._decoded:
            self._decoded[key] = self._placed(found)
        plan = self._decoded[key]
        return replace(
            plan, groups=groups_of(found, plan.graph), predicted=of_stages(self.task, found, self._flops),
            pipeline=None if found.run is None else pipeline_of(found),
        )

    def _placed(self, found: Evaluation) -> Plan:
        """What does not depend on the cuts, how parameters are kept, and recomputation."""
        task, degrees, structure = self.task, found.degrees, self._layers if found.run is not None else self.task.structure
        graph, schedule = structure.graph, structure.schedule(found.candidate.microbatches)
        assignments, copies = decisions(found.placement, graph)
        return Plan(
            graph, degrees.mesh, {name: renamed_assignment(a, degrees) for name, a in assignments.items()},
            {name: renamed(sharding, degrees) for name, sharding in copies.items()}, groups_of(found, graph), schedule=schedule,
            precision=task.precision, cluster=str(task.cluster),
        )

    @cached_property
    def _layers(self) -> Structure:
        return Structure(find_layers(self.task.graph), self.task.rules, self.task.structure.classes)

    @cached_property
    def _flops(self) -> float:
        return step_flops(self.task.graph, self.task.rules.operators)


def pipeline_of(best: Evaluation) -> Pipeline:
    """Stages as operators."""
    starts = best.starts
    candidate = best.candidate
    lies = schedule_of(candidate.schedule).stage_rank(candidate.pp, candidate.virtual_stages)
    return Pipeline(candidate.schedule, starts, lies)


def groups_of(best: Evaluation, graph: Graph) -> tuple[GroupChoice, ...]:
    """How every block is kept, then the root."""
    variant = best.degrees.variant(best.zero)
    kept = GroupChoice("", variant.zero, variant.data_axes, variant.shard_axes)
    groups: dict[int, GroupChoice] = {}
    for position, (block, recompute) in enumerate(zip(best.blocks, best.recompute, strict=True)):
        if block >= 0:
            stage = next(s for s, stop in enumerate(best.boundaries[1:]) if position < stop)
            groups[block] = replace(kept, path=graph.blocks[block].path, recompute=recompute, stage=stage)
    return (*(groups[i] for i in range(len(graph.blocks))), kept)


def beside_schedule(plan: Plan) -> dict[str, float]:
    """Seconds of a step of a pipeline in which no action of its schedule runs: with the simulation's they are the step."""
    predicted = plan.predicted
    found = {} if predicted is None else {
        "outside the schedule": predicted.outside_schedule_seconds, "optimizer": predicted.optimizer_seconds,
    }
    least = 0.0 if predicted is None else 1e-9 * predicted.step_seconds  # below is rounding
    return {name: seconds for name, seconds in found.items() if seconds and seconds > least}


def simulation_of(plan: Plan) -> Simulation:
    """The predicted step of a plan with a pipeline, action by action. Raises PlanError without one."""
    stages = None if plan.predicted is None else plan.predicted.stages
    if plan.pipeline is None or stages is None:
        raise PlanError("the plan has no pipeline with predicted stages, so there is no schedule to show; plan with stages "
                        "(pp=2, --pp 2), or ask for other prices of this one (--what-if)")
    table = plan.pipeline.table(plan.schedule.microbatches)
    return simulate(
        table, stages.forward, stages.backward_input, stages.backward_weight, (stages.transfer, stages.transfer),
        overlap=not stages.waits,
    )
