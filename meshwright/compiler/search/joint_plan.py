"""From the joint search's outcome to a plan: assignments over the plan's axes, stages as operators, predictions, the record.

``predicted["stages"]`` holds seconds of every stage and transfer, so that ``simulation_of`` runs the schedule again: for the
printed clock and for ``plan.timeline``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from meshwright.compiler.search.evaluate import DoesNotFitError, Evaluation
from meshwright.compiler.search.joint import JointSearch, Outcome, Progress
from meshwright.compiler.search.prediction import OutOfMemoryError, capacity, step_flops, tokens_of
from meshwright.compiler.search.stage_costs import Degrees, renamed, renamed_assignment
from meshwright.compiler.structure.dims import batch_inputs
from meshwright.compiler.structure.microbatch import split_time
from meshwright.compiler.structure.units import find_layers
from meshwright.cost import compute
from meshwright.cost.cluster import Cluster
from meshwright.cost.schedules import illegal_combination, schedule_table, stage_rank
from meshwright.cost.timeline import Simulation, simulate
from meshwright.ir.graph import Graph
from meshwright.ir.pins import RECOMPUTE, PinError, Pins
from meshwright.ir.plan import GroupChoice, Pipeline, Plan, PlanError
from meshwright.ir.quantities import bytes_text
from meshwright.ir.rule import OpRule

SHOWN = 12


def search_jointly(
    graph: Graph, cluster: Cluster, rules: Mapping[str, OpRule], pins: Pins, *, precision: str, state_bytes: float,
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
    rules: Mapping[str, OpRule]
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
        schedule = split_time(graph, dict(self.rules), found.candidate.microbatches, batch_inputs(graph))
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
        return step_flops(self.graph)


def pipeline_of(best: Evaluation) -> Pipeline:
    """Stages as operators."""
    starts = best.starts
    candidate = best.candidate
    return Pipeline(candidate.schedule, starts, stage_rank(candidate.schedule, candidate.pp, candidate.virtual_stages))


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


def certificate(outcome: Outcome, seconds: float | None = None, counted: float = 0.0) -> dict[str, Any]:
    """What was considered, what came second and why, and what is proven; ``seconds``: of the plan, if it is not the best
    evaluation itself; ``counted``: those of its evaluation. If they are more, the program left room that the search had not
    counted, as those of other candidates may: then no more is proven than the gap of the evaluation."""
    second = outcome.runner_up
    seconds = outcome.best.seconds if seconds is None else seconds
    gap = max(0.0, 1.0 - outcome.bound / max(seconds, counted))
    bound = (1.0 - gap) * seconds
    status = "optimal" if gap <= outcome.wanted else "time_limit" if outcome.late else "gap"
    record: dict[str, Any] = {
        "objective": seconds, "bound": bound, "gap": gap, "status": status,
        "considered": outcome.considered, "pruned": outcome.pruned, "infeasible": outcome.infeasible, "solved": outcome.solved,
        "candidates": [
            {"mesh": str(e.candidate), "microbatches": e.candidate.microbatches, "step_seconds": e.seconds, "zero": e.zero}
            for e in outcome.ranking[:SHOWN]
        ],
    }
    if second is not None:
        record["runner_up"] = outcome.why(second)
    return record


def _predicted(best: Evaluation, graph: Graph, flops: float, cluster: Cluster, precision: str) -> dict[str, Any]:
    inputs = float(sum(graph.values[name].bytes_ for name in graph.inputs))
    tokens = tokens_of(graph)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    found: dict[str, Any] = {"step_seconds": best.seconds}
    found |= {f"{name.replace(' ', '_')}_seconds": value for name, value in best.parts.items()}
    if tokens:
        found["tokens_per_second"] = tokens / best.seconds
    if flops:
        found["tflops_per_device"] = flops / best.seconds / cluster.world / 1e12
        found["mfu"] = compute.mfu(flops, best.seconds, cluster.world, cluster.device, dtype)
    found["microbatches"] = best.candidate.microbatches
    found["bytes_per_rank"] = max(best.memory) + inputs
    found["bytes"] = {**best.kinds, "inputs": inputs}
    found["capacity_bytes"] = capacity(cluster)
    if best.run is not None:
        found["bubble"] = best.bubble
        found["bytes_per_pipeline_rank"] = [bytes_ + inputs for bytes_ in best.memory]
        found["stages"] = {name: list(values) for name, values in best.stages.items()}
    return found


def simulation_of(plan: Plan) -> Simulation:
    """The predicted step of a plan with a pipeline, action by action. Raises PlanError without one."""
    stages = plan.predicted.get("stages")
    if plan.pipeline is None or not stages:
        raise PlanError("the plan has no pipeline with predicted stages, so there is no schedule to show")
    pipeline = plan.pipeline
    table = schedule_table(pipeline.schedule, pipeline.degree, pipeline.stages // pipeline.degree, plan.schedule.microbatches)
    sent = stages["transfer"]
    return simulate(table, stages["forward"], stages["backward_input"], stages["backward_weight"], (sent, sent))
