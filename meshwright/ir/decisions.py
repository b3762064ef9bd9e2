"""Everything that is decided about a model on a mesh, as plain values; ``Plan`` can also print, save and load them.

They stand apart from the plan so that what writes and reads files knows them without knowing the plan, which uses both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import PP, Mesh
from meshwright.ir.prediction import Certificate, Prediction
from meshwright.ir.schedules import Table, illegal, schedule_of, schedules, unknown
from meshwright.ir.sharding import Sharding

TIME = "mb"
"""The micro-batch axis: splitting the batch over it is gradient accumulation. Not an axis of the device mesh."""


ONCE_AND_AGAIN = ("epilogue", "ahead")
"""Fields of a schedule that few plans have: sets of operators, left out of files where they are empty."""


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
    that run once a step on the whole batch, before the micro-batches; ``epilogue``: those that run once a step behind them, on
    sums over them or on what they made, joined; ``ahead``: operators of the micro-batches that run once more before them all,
    without gradients, for what the gradients of the epilogue depend on.
    """

    microbatches: int = 1
    time: Mapping[str, str] = field(default_factory=dict)
    prologue: frozenset[str] = frozenset()
    epilogue: frozenset[str] = frozenset()
    ahead: frozenset[str] = frozenset()

    def once(self, op: str) -> bool:
        """Whether an operator runs once a step, not in every micro-batch."""
        return op in self.prologue or op in self.epilogue

    def times(self, op: str) -> int:
        """How often a step an operator runs forward and backward."""
        return 1 if self.once(op) else self.microbatches


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

    def check(self, microbatches: int) -> None:
        """Raise PlanError for what the schedule cannot run, and for stages on other ranks than it has them."""
        schedule, virtual, rest = schedule_of(self.schedule), *divmod(self.stages, self.degree)
        if rest:
            raise PlanError(f"{self.stages} stages do not divide over {self.degree} ranks; name a multiple of them")
        if reason := illegal(self.schedule, self.degree, virtual, microbatches):
            raise PlanError(reason)
        if (lies := schedule.stage_rank(self.degree, virtual)) != self.stage_rank:
            raise PlanError(f"{self.schedule} with stages on ranks {self.stage_rank}: it runs them on {lies}")

    def table(self, microbatches: int) -> Table:
        """The order in which the ranks work: what is simulated, replayed and run. Raises PlanError as ``check`` does,
        ScheduleError for actions that are no schedule."""
        self.check(microbatches)
        return schedule_of(self.schedule).table(self.degree, self.stages // self.degree, microbatches)


@dataclass(frozen=True)
class Decisions:
    """The fields of a plan.

    ``assignments``: {op name: {axis: factor}}.
    ``copies``: {value: the sharding that its readers share}.
    ``groups``: one per block of the graph in order, then the root's.
    ``devices``: the numbers of the cluster, as plain values, where they are not those that its name has in the catalogue.
    ``registered``: {operator: the rule that ``register_rule`` had declared for it, in words and as a digest}.
    ``predicted``: what a step takes and holds; None where no search made the plan.
    ``certificate``: how much better another plan could be; None where no search made the plan.
    ``notes``: what a reader should know (unknown operators, dims that could not be split).
    """

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
    devices: tuple[Mapping[str, Any], ...] = ()
    registered: Mapping[str, str] = field(default_factory=dict)
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
