"""From the joint search's outcome to a plan: assignments over the plan's axes, stages as operators, predictions, the record.

The prediction holds seconds of every stage and transfer, so that ``simulation_of`` runs the schedule again: for the printed
clock and for ``timeline``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.compiler.search.evaluate import DoesNotFitError, Evaluation
from meshwright.compiler.search.joint import JointSearch, Outcome, Progress
from meshwright.compiler.search.prediction import OutOfMemoryError, capacity, step_flops, with_throughput
from meshwright.compiler.search.stage_costs import Degrees, renamed, renamed_assignment
from meshwright.compiler.structure.dims import batch_inputs
from meshwright.compiler.structure.microbatch import split_time
from meshwright.compiler.structure.units import find_layers
from meshwright.cost.cluster import Cluster
from meshwright.cost.timeline import Simulation, simulate
from meshwright.ir.graph import Graph
from meshwright.ir.pins import RECOMPUTE, PinError, Pins
from meshwright.ir.plan import GroupChoice, Pipeline, Plan, PlanError
from meshwright.ir.prediction import Certificate, Prediction, SeenCandidate
from meshwright.ir.quantities import bytes_text
from meshwright.ir.rule import Rules
from meshwright.ir.schedules import illegal_combination, schedule_of

SHOWN = 12


def search_jointly(
    graph: Graph, cluster: Cluster, rules: Rules, pins: Pins, *, precision: str, state_bytes: float,
    gap: float, limit: float, progress: Progress | None = None, cutoff: float = float("inf"),
) -> Outcome:
    """Run the search. A model without blocks is cut between its layers if a pipeline is pinned. Raises PinError,
    OutOfMemoryError."""
    _check_combination(pins, cluster)
    inputs = inputs_of(graph)
    graph = find_layers(graph) if pins.needs_stages(cluster.world) else graph
    search = JointSearch(
        graph, cluster, rules, pins, itemsize=2 if precision == "bf16" else 4, state_bytes=state_bytes,
        capacity=capacity(cluster) - inputs, recompute=RECOMPUTE if pins.recompute is None else (pins.recompute,),
        gap=gap, limit=limit, progress=progress, cutoff=cutoff,
    )
    try:
        return search.run()
    except DoesNotFitError as error:
        raise does_not_fit(error, cluster, inputs) from None


def inputs_of(graph: Graph) -> float:
    """Bytes of the inputs, which every device holds whole."""
    return float(sum(graph.values[name].bytes_ for name in graph.inputs))


def does_not_fit(error: DoesNotFitError, cluster: Cluster, inputs: float) -> OutOfMemoryError:
    """What the search says of its candidates, in the user's terms."""
    least, there = error.least + inputs, capacity(cluster)
    words = (f"nothing was found that fits {cluster}: the nearest needs {bytes_text(least)} of {bytes_text(there)} per device. "
             f"{error}")
    return OutOfMemoryError(words, least, there, {})


def _check_combination(pins: Pins, cluster: Cluster) -> None:
    """Raise PinError for pins that torch's schedules run wrong together; what is not pinned the search leaves out itself."""
    if pins.schedule is None:
        return
    several = (pins.dp or cluster.world // ((pins.pp or cluster.world) * (pins.tp or 1))) > 1
    zero = pins.zero if several and pins.zero is not None else 0
    reason = illegal_combination(pins.schedule, zero=zero, recompute=pins.recompute or "none")
    if reason is not None:
        raise PinError(reason)


@dataclass
class Plans:
    """Makes plans of the evaluations of one outcome; what evaluations share is made once: how a placement reads in the axes of
    the mesh, and the FLOPs of a step."""

    outcome: Outcome
    graph: Graph
    rules: Rules
    cluster: Cluster
    precision: str
    _decoded: dict[tuple[int, Degrees, int], Plan] = field(default_factory=dict)

    def of(self, found: Evaluation) -> Plan:
        """The plan of an evaluation."""
        key = (id(found.placement), found.degrees, found.candidate.microbatches)
        if key not in self._decoded:
            self._decoded[key] = self._placed(found)
        plan = self._decoded[key]
        return replace(
            plan, groups=groups_of(found, plan.graph), certificate=certificate(self.outcome, found.seconds),
            predicted=_predicted(found, plan.graph, self._flops, self.cluster, self.precision),
            pipeline=None if found.run is None else pipeline_of(found),
        )

    def _placed(self, found: Evaluation) -> Plan:
        """What does not depend on the cuts, how parameters are kept, and recomputation."""
        degrees, graph = found.degrees, self._layers if found.run is not None else self.graph
        schedule = split_time(graph, self.rules, found.candidate.microbatches, batch_inputs(graph))
        assignments, copies = found.placement.decode(schedule)
        return Plan(
            graph, degrees.mesh, {name: renamed_assignment(a, degrees) for name, a in assignments.items()},
            {name: renamed(sharding, degrees) for name, sharding in copies.items()}, groups_of(found, graph), schedule=schedule,
            precision=self.precision, cluster=str(self.cluster),
        )

    @cached_property
    def _layers(self) -> Graph:
        return find_layers(self.graph)

    @cached_property
    def _flops(self) -> float:
        return step_flops(self.graph, self.rules.operators)


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


def certificate(outcome: Outcome, seconds: float | None = None, counted: float = 0.0) -> Certificate:
    """What was considered, what came second and why, and what is proven; ``seconds``: of the plan, if it is not the best
    evaluation itself; ``counted``: those of its evaluation. If they are more, the program left room that the search had not
    counted, as those of other candidates may: then no more is proven than the gap of the evaluation."""
    second = outcome.runner_up
    seconds = outcome.best.seconds if seconds is None else seconds
    gap = max(0.0, 1.0 - outcome.bound / max(seconds, counted))
    bound = (1.0 - gap) * seconds
    return Certificate(
        objective_seconds=seconds, bound_seconds=bound,
        status="optimal" if gap <= outcome.wanted else "time_limit" if outcome.late else "gap",
        considered=outcome.considered, pruned=outcome.pruned, infeasible=outcome.infeasible, solved=outcome.solved,
        runner_up="" if second is None else outcome.why(second),
        candidates=tuple(
            SeenCandidate(str(e.candidate), e.candidate.microbatches, e.seconds, e.zero) for e in outcome.ranking[:SHOWN]
        ),
    )


def _predicted(best: Evaluation, graph: Graph, flops: float, cluster: Cluster, precision: str) -> Prediction:
    inputs, staged, parts = inputs_of(graph), best.run is not None, best.parts
    found = Prediction(
        step_seconds=best.seconds,
        bytes_per_rank=max(best.memory) + inputs,
        capacity_bytes=capacity(cluster),
        compute_seconds=parts["compute"],
        exposed_communication_seconds=parts["exposed communication"],
        recomputation_seconds=parts["recomputation"],
        optimizer_seconds=parts["optimizer"],
        pipeline_bubble_seconds=parts.get("pipeline bubble"),
        bubble_fraction=best.bubble if staged else None,
        bytes_by_kind={**best.kinds, "inputs": inputs},
        bytes_per_pipeline_rank=tuple(bytes_ + inputs for bytes_ in best.memory) if staged else (),
        stages=best.stages,
    )
    return with_throughput(found, graph, flops, cluster, precision)


def simulation_of(plan: Plan) -> Simulation:
    """The predicted step of a plan with a pipeline, action by action. Raises PlanError without one."""
    stages = None if plan.predicted is None else plan.predicted.stages
    if plan.pipeline is None or stages is None:
        raise PlanError("the plan has no pipeline with predicted stages, so there is no schedule to show")
    table = plan.pipeline.table(plan.schedule.microbatches)
    return simulate(
        table, stages.forward, stages.backward_input, stages.backward_weight, (stages.transfer, stages.transfer)
    )
