"""The plan: every decision about one model on one mesh, as a value.

A plan holds the captured graph and, for each operator, the factor that every mesh axis splits; for values with several
readers the sharding they share; for each block its ZeRO level, the axes its gradients are summed over, the axes its
parameters are split over at rest, and what is recomputed; the micro-batches; and what all that is predicted to cost.
Nothing else is needed to run it, and nothing in it refers to the solver. A ``Pipeline`` cuts the operators into stages along
the mesh axis ``PP``, which no sharding names.
"""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.errors import PlanError as PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import PP, Mesh
from meshwright.ir.prediction import Certificate, Prediction
from meshwright.ir.quantities import bytes_text, seconds_text
from meshwright.ir.schedules import Table, illegal, schedule_of, schedules, unknown
from meshwright.ir.sharding import Sharding

TIME = "mb"
"""The micro-batch axis: splitting the batch over it is gradient accumulation. Not an axis of the device mesh."""


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """How the parameters of one block (``path``; "" is everything outside the blocks) are kept.

    ``zero``: 0 replicas, 1 optimizer state split, 2 and gradients, 3 and parameters. ``data_axes``: axes whose ranks read
    the parameters on different data, so gradients are summed over them. ``shard_axes``: those of them over which the state
    is split (fewer than all: HSDP). ``keep``: of ZeRO-3, weights stay gathered over the micro-batches of a step instead of
    being freed after every forward. ``recompute``: "none", "selective" or "full".
    """

    path: str
    zero: int = 0
    data_axes: tuple[str, ...] = ()
    shard_axes: tuple[str, ...] = ()
    recompute: str = "none"
    stage: int = 0
    keep: bool = False


@dataclass(frozen=True)
class Schedule:
    """Micro-batches and what they mean for the graph.

    ``time``: for every operator that a micro-batch touches the factor the time axis splits, or "+k"; ``prologue``: operators
    that run once per step on the whole batch; ``reductions``: prologue values that replace a per-micro-batch value (the count
    of valid labels): {value: replacement}.
    """

    microbatches: int = 1
    time: Mapping[str, str] = field(default_factory=dict)
    prologue: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages and their schedule.

    Stage s is the ops ``[cuts[s], cuts[s + 1])`` of the graph; those of the prologue are no part of it, they run on every rank
    that needs them. ``stage_rank[s]``: its coordinate along ``PP``. ``schedule``: a name (see ``meshwright.ir.schedules``).

    >>> Pipeline("1f1b", (0, 10, 25), (0, 1)).stage_of(10)
    1
    """

    schedule: str
    cuts: tuple[int, ...]
    stage_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.cuts) != len(self.stage_rank) + 1 or self.cuts[0] != 0 or list(self.cuts) != sorted(set(self.cuts)):
            raise PlanError(f"cuts {self.cuts} must be {len(self.stage_rank) + 1} increasing positions from 0 on, one more "
                            f"than there are stages in stage_rank {self.stage_rank}")
        if set(self.stage_rank) != set(range(self.degree)):
            raise PlanError(f"stage_rank {self.stage_rank} leaves some of {self.degree} pipeline ranks without a stage")
        if self.schedule not in tuple(schedules()):
            raise PlanError(unknown(str(self.schedule)))

    @property
    def degree(self) -> int:
        """Ranks along ``PP``."""
        return max(self.stage_rank) + 1

    @property
    def stages(self) -> int:
        return len(self.stage_rank)

    def stage_of(self, op_index: int) -> int:
        """The stage of the op at this position in the graph."""
        return bisect_right(self.cuts, op_index) - 1

    def table(self, microbatches: int) -> Table:
        """The order in which the ranks work: what is simulated, replayed and run. Raises ScheduleError for what the schedule
        cannot run, PlanError for stages on other ranks than it has them."""
        schedule, virtual, rest = schedule_of(self.schedule), *divmod(self.stages, self.degree)
        if rest:
            raise PlanError(f"{self.stages} stages do not divide over {self.degree} ranks; name a multiple of them")
        if reason := illegal(self.schedule, self.degree, virtual, microbatches):
            raise PlanError(reason)
        if (lies := schedule.stage_rank(self.degree, virtual)) != self.stage_rank:
            raise PlanError(f"{self.schedule} with stages on ranks {self.stage_rank}: it runs them on {lies}")
        return schedule.table(self.degree, virtual, microbatches)


@dataclass(frozen=True)
class Plan:
    """Everything decided. ``assignments``: {op name: {axis: factor}}; ``copies``: {value: the sharding its readers share};
    ``groups``: one per block of the graph in order, then the root's; ``predicted``: what a step takes and holds;
    ``certificate``: how much better another plan could be; ``notes``: what a reader should know (unknown operators,
    dims that could not be split). The last three are None or empty for a plan that no search made."""

    graph: Graph
    mesh: Mesh
    assignments: Mapping[str, Mapping[str, str]]
    copies: Mapping[str, Sharding]
    groups: tuple[GroupChoice, ...]
    schedule: Schedule = field(default_factory=Schedule)
    pipeline: Pipeline | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    cluster: str = ""
    predicted: Prediction | None = None
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        pipeline = self.pipeline
        if pipeline is None:
            return
        if self.mesh.axes[:1] != (PP,) or self.mesh.size(PP) != pipeline.degree:
            raise PlanError(f"a pipeline over {pipeline.degree} ranks needs {PP}={pipeline.degree} as the outermost axis of "
                            f"the mesh, which is {self.mesh}")
        if pipeline.cuts[-1] != len(self.graph.ops):
            raise PlanError(f"the last stage ends at operator {pipeline.cuts[-1]}, the graph has {len(self.graph.ops)}")

    def group_of(self, op_index: int) -> GroupChoice:
        """The parameter group of the op at this position in the graph."""
        for block, group in zip(self.graph.blocks, self.groups, strict=False):
            if block.start <= op_index < block.stop:
                return group
        return self.groups[-1]

    def __str__(self) -> str:
        """The decisions in a few lines; ``meshwright.show`` has the tables.

        Header, predicted step and memory, then one line for each distinct way in which blocks keep their parameters.
        """
        lines = [
            f"plan       {self.mesh} on {self.cluster or 'an unnamed cluster'}, {self.mesh.world} devices, {self.precision}, "
            f"{self.optimizer}",
            f"step       {_step(self)}",
        ]
        if self.predicted is not None:
            held, room = bytes_text(self.predicted.bytes_per_rank), bytes_text(self.predicted.capacity_bytes)
            lines.append(f"memory     {held} of {room} on the fullest device")
        if self.certificate is not None:
            lines.append(f"gap        {self.certificate.gap:.2%} above the lower bound")
        kept = Counter((replace(group, path="") if group.path else group) for group in self.groups[:-1])
        lines += [f"{count} block{'s' if count > 1 else ''}".ljust(11) + _kept(group) for group, count in kept.items()]
        lines += ["the rest".ljust(11) + _kept(group) for group in self.groups[-1:]]
        return "\n".join(lines + [f"note       {note}" for note in self.notes])

    def __repr__(self) -> str:
        return f"<Plan {self.mesh}, {len(self.graph.ops)} operators, {len(self.graph.blocks)} blocks>"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file is complete or not there. The same plan gives the same bytes: how long the search
        took is left out."""
        from meshwright.ir.serialize import plan_to_dict

        path = Path(path)
        certificate = self.certificate and replace(self.certificate, planning_seconds={})
        text = json.dumps(plan_to_dict(replace(self, certificate=certificate)), separators=(",", ":"))
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(draft, 0o644)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan that ``save`` wrote. Executes nothing. Raises PlanError if the file is none, or cannot be read."""
        from meshwright.ir.reading.fields import load_json
        from meshwright.ir.reading.plans import plan_from_dict

        try:
            data = load_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise PlanError(f"{path} is not a plan file (no JSON: {error}); write one with plan.save(path)") from error
        except OSError as error:
            raise PlanError(f"the plan {path} cannot be read: {error.strerror or error}") from error
        return plan_from_dict(data)


def _step(plan: Plan) -> str:
    """Micro-batches, stages and the predicted seconds, as far as the plan has them."""
    words = [f"{plan.schedule.microbatches} micro-batch{'es' if plan.schedule.microbatches > 1 else ''}"]
    if plan.pipeline is not None:
        words.append(f"{plan.pipeline.stages} stages on {plan.pipeline.degree} ranks under {plan.pipeline.schedule}")
    if plan.predicted is not None:
        words.append(f"{seconds_text(plan.predicted.step_seconds)} predicted{_interval(plan.predicted)}")
    return ", ".join(words)


def _interval(predicted: Prediction) -> str:
    """Between what most such runs came out."""
    if predicted.low_seconds is None or predicted.high_seconds is None:
        return ""
    return f" ({seconds_text(predicted.low_seconds)} to {seconds_text(predicted.high_seconds)})"


def _kept(group: GroupChoice) -> str:
    """How a block keeps its parameters, in words."""
    words = [f"ZeRO {group.zero}", f"recompute {group.recompute}"]
    words += [f"gradients summed over {', '.join(group.data_axes)}"] if group.data_axes else []
    words += [f"state split over {', '.join(group.shard_axes)}"] if group.zero and group.shard_axes else []
    return ", ".join(words) + (f", stage {group.stage}" if group.stage else "")
