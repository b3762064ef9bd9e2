"""What the search chooses between, and what each costs at least before anything is solved.

    candidate = (pp, virtual stages, schedule) x (data, sequence, tensor ranks of a stage) x micro-batches
    variants  = ZeRO level x ranks that share the state (``variants_of``)

``candidates`` lists every one that the devices, the batch, the model and the pins allow; none is left out because it looks
bad. ``floor`` bounds the step from W, seconds of all units for one micro-batch (P = pp, M micro-batches, w the least unit,
w_f its forward, u the longest forward or backward of a unit, w_b all forwards or all backwards, V stages a rank)::

    M W / P                                         every rank's share of the work, on average
    W + (M - 1) max(u, w_b / (P V))                 one micro-batch through everything, the others through the slowest stage
      + (P - 1) w / 2     whole backward            rank r idles until r stages have passed it the first micro-batch, and
      + (P - 1) w_f / 2   split backward            again after its last
    W / (1 - (1 - 1/M)^P)     one stage a rank      whole backward: w_r <= (T - w_0 - .. - w_(r-1)) / M, summed
    W + (M - 1) W / P         forwards first        all forwards pass the slowest stage, then all backwards

``Floors`` gives W from the FLOPs of the model at the best efficiency of the device, before a placement is solved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from sympy import divisors

from meshwright.compiler.pipeline.degrees import Degrees
from meshwright.compiler.structure.dims import batch_size
from meshwright.cost import compute
from meshwright.cost.cluster import Cluster, Device
from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.declared.operator import Operator, Work
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import ANY, DATA, SAMPLED, TENSOR, Mesh, role_of
from meshwright.ir.pins import NO_STAGES, PinError, Pins, vars_of
from meshwright.ir.quantities import count_text
from meshwright.ir.rule import Rules
from meshwright.ir.schedules import illegal, schedule_of, schedules

PIECE, SHORT = 8192, 1024
"""Tokens of a piece of the sequence: shorter ones are candidates only where cp is pinned (assumed not to pay; every further
degree is a placement of its own to be solved), or down to ``SHORT`` where a node's ranks are more than the pieces (chosen)."""


@dataclass(frozen=True)
class Layout:
    """A factorization of the devices into axes, and what each axis may do."""

    mesh: Mesh
    roles: Mapping[str, str] = field(hash=False)
    folded: bool = False
    """Whether the ranks of the sequence share out the experts too."""

    @property
    def data_size(self) -> int:
        """Ranks that can only split the batch."""
        return self.mesh.size([axis for axis in self.mesh.axes if self.roles[axis] in SAMPLED])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the axes with several ranks, in order."""
        return tuple(size for size in self.mesh.sizes if size > 1)

    @property
    def is_free(self) -> bool:
        """Whether every axis may split anything, in one chunk a rank."""
        return set(self.roles.values()) == {ANY} and not self.mesh.mirrored

    @property
    def is_narrow(self) -> bool:
        """Whether what its axes may do is a part of what free ones may: some split samples, the others anything else."""
        return {self.roles[axis] for axis in self.mesh.axes if self.mesh.size(axis) > 1} <= {DATA, TENSOR}

    def narrower(self) -> list[Layout]:
        """Of free axes, where there are several: the first ones split samples alone, and the others anything but these."""
        axes = [axis for axis in self.mesh.axes if self.mesh.size(axis) > 1] if self.is_free else []
        roles = [{axis: DATA if axis in axes[:at] else TENSOR for axis in self.mesh.axes} for at in range(1, len(axes))]
        return [replace(self, roles=one) for one in roles]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to lay the devices out and to run micro-batches through them.

    pp: stages in a row, 1 without a pipeline
    virtual_stages: stages of a rank
    schedule: of the pipeline, "none" without one
    data: ranks that split the batch
    tensor: ranks that split anything else
    microbatches: of a step
    samples: of a data rank's micro-batch
    layout: other axes than these, which may split what their roles say; without a pipeline only
    context: ranks that split the sequence
    mirrored: whether each of these has two chunks of it
    expert: of the data ranks, those over which experts are split
    heads: of the ranks that split the sequence, the near ones that exchange it for heads while attention runs
    folded: whether all ranks that split the sequence split the experts too
    """

    pp: int
    virtual_stages: int
    schedule: str
    data: int
    tensor: int
    microbatches: int
    samples: int
    layout: Layout | None = field(default=None, hash=False)
    context: int = 1
    mirrored: bool = False
    expert: int = 1
    heads: int = 1
    folded: bool = False

    @property
    def experts(self) -> int:
        """Ranks over which experts are split."""
        return self.expert * (self.context if self.folded else 1)

    @property
    def stages(self) -> int:
        return self.pp * self.virtual_stages

    @property
    def split(self) -> bool:
        """Whether the backward is split into the gradients of inputs and of weights."""
        return self.pp > 1 and schedule_of(self.schedule).split

    @property
    def simplicity(self) -> tuple[bool, int, int]:
        """Orders candidates by how fast they are bounded and solved: schedules of one stage a rank that hold few micro-batches
        first, a sequence split over one axis."""
        schedule = schedule_of(self.schedule)
        first = schedule.stages == 1 and schedule.closed is not None and not schedule.closed.forwards_first
        return not first, self.virtual_stages, self.heads

    def __str__(self) -> str:
        batches = count_text(self.microbatches, "micro-batch")
        if self.layout is not None:
            return f"{self.layout.mesh}, {batches}"
        stages = count_text(self.virtual_stages, "stage")
        pipeline = f"pp={self.pp} ({self.schedule}, {stages} a rank) x " if self.pp > 1 else ""
        context = f"cp{'*' * self.mirrored}={self.context // self.heads} x " if self.context > 1 else ""
        context += f"up={self.heads} x " if self.heads > 1 else ""
        data = f"dp={self.data}" + (f" (ep={self.expert} of them)" if self.expert > 1 else "")
        context += "(experts over these) x " if self.folded else ""
        return f"{pipeline}{data} x {context}tp={self.tensor}, {batches} of {self.samples}"


def candidates(
    graph: Graph, cluster: Cluster, pins: Pins, units: int, tokens: int = 0, mirrored: bool = False, experts: int = 1,
    exchanged: tuple[int, int] = (1, 1), foldable: bool = False,
) -> list[Candidate]:
    """All candidates. ``units``: pieces that the model can be cut into; ``tokens``: of its sequence, as far as attention can
    run on pieces of it; ``mirrored``: these are two chunks a rank; ``experts``: the number that the degree of experts divides,
    1 where there are none; ``exchanged``: (heads, tokens) that are exchanged; ``foldable``: whether experts may be split over
    ranks of the sequence. Raises PinError if the pins leave none."""
    batch = batch_size(graph)

    def under(pins: Pins) -> list[Candidate]:
        return list(under_pins(pins, batch, cluster, units, tokens, mirrored, experts, exchanged, foldable))

    found = under(pins)
    if not found:
        raise _nothing(batch, cluster, pins, units, under)
    return found


def under_pins(
    pins: Pins, batch: int, cluster: Cluster, units: int, tokens: int, mirrored: bool, experts: int,
    exchanged: tuple[int, int], foldable: bool,
) -> Iterator[Candidate]:
    """Every candidate under some pins, as ``candidates`` lists them; none where they leave none."""
    for pp in _degrees("pp", pins, min(cluster.world, units), cluster.world):
        stages: dict[int, list[tuple[str, int]]] = {}
        for tensor in _degrees("tp", pins, cluster.world // pp, cluster.world // pp):
            if tensor == 1 and pins.sequence_parallel:
                continue  # there is nothing to split the sequence over
            for context in _contexts(pins, cluster.world // pp // tensor, tokens, batch, cluster.per_node):
                data = cluster.world // pp // tensor // context
                counts = _counts(data, batch, pins)
                splits = _expert_degrees(data, context if foldable else 1, experts, pins)
                for heads in near_ranks(context, tensor, cluster, pins, exchanged) if counts and splits else ():
                    for count in counts:
                        if count not in stages:
                            stages[count] = list(_schedules(pp, count, pins, units))
                        for (schedule, virtual), (expert, folded) in itertools.product(stages[count], splits):
                            yield Candidate(pp, virtual, schedule, data, tensor, count, batch // data // count, None, context,
                                            mirrored and context > 1, expert, heads, folded)


def _degrees(name: str, pins: Pins, most: int, of: int) -> list[int]:
    return [n for n in divisors(of) if n <= most and pins.allows(name, n)]


def _shards(data: int, pins: Pins) -> list[int]:
    """Ranks that may share the state of ``data`` ranks."""
    return [n for n in divisors(data) if pins.allows("shard", n)]


def _contexts(pins: Pins, of: int, tokens: int, batch: int, per_node: int) -> list[int]:
    """Of so many ranks, those that may split a sequence: 1, and powers of two that leave each a piece worth its collectives, or
    any of a node's where the batch has no sample for each of them; what pins say."""
    if pins.says("cp"):
        return [n for n in divisors(of) if pins.allows("cp", n)]
    few = batch < of <= per_node
    least = SHORT if few and batch * max(1, tokens // PIECE) < of else PIECE
    return [n for n in divisors(of) if (n & (n - 1) == 0 or few) and (n == 1 or n * least <= tokens)]


def near_ranks(context: int, tensor: int, cluster: Cluster, pins: Pins, exchanged: tuple[int, int]) -> list[int]:
    """Of the ranks that split a sequence, those that exchange it for heads while others do not: none, and where they are on
    several nodes the most that fill one with their tensor ranks, on one node as many as there are heads for, if not for all."""
    if pins.ulysses is not None or pins.says("attention"):
        return [pins.near(context)]
    (heads, tokens), ranks = exchanged, context * tensor
    if ranks <= cluster.per_node and heads % ranks == 0:
        return [1]
    common = math.gcd(ranks if ranks <= cluster.per_node else cluster.per_node, heads)
    near = [n for n in divisors(context) if 1 < n < context and common % (n * tensor) == 0]
    return [1, *near[-1:]] if tokens % context == 0 else [1]


def _counts(data: int, batch: int, pins: Pins) -> list[int]:
    """Micro-batches of a step that the batch of ``data`` ranks divides into."""
    if not pins.allows("dp", data) or batch % data:
        return []
    return [count for count in divisors(batch // data)
            if pins.allows("microbatches", count) and pins.allows("micro_batch", batch // data // count)]


def _expert_degrees(data: int, context: int, experts: int, pins: Pins) -> list[tuple[int, bool]]:
    """Of ``data`` ranks, those that may split the experts, so that some ranks that share the state can, and whether all of
    ``context`` ranks of the sequence split them as well."""
    shards = _shards(data, pins)
    over = [(n, n * context, True) for n in divisors(data) if context > 1 and experts % (n * context) == 0]
    over = [(n, n, False) for n in divisors(math.gcd(data, experts))] + over
    return [(n, folded) for n, degree, folded in over
            if pins.allows("ep", degree) and any(shard in (1, data) or shard % n == 0 for shard in shards)]


def _schedules(pp: int, count: int, pins: Pins, units: int) -> Iterator[tuple[str, int]]:
    """The schedules that are legal for these degrees, with their stages a rank."""
    if pp == 1:
        alone = pins.allows("virtual_stages", 1) and pins.allows("stages", 1) and pins.allows("schedule", NO_STAGES)
        if alone and pins.stage_cuts is None:
            yield NO_STAGES, 1
        return
    stages = None if pins.stage_cuts is None else len(pins.stage_cuts) + 1
    for schedule in (one for one in schedules().values() if pins.allows("schedule", one.name)):
        for virtual in (schedule.stages,) if schedule.stages is not None else range(schedule.usual, units // pp + 1):
            asked = pins.allows("virtual_stages", virtual) and stages in (None, pp * virtual) and pp * virtual <= units
            asked = asked and pins.allows("stages", pp * virtual)
            if asked and schedule.illegal(pp, virtual, count) is None:
                yield schedule.name, virtual


_VALUES: Mapping[str, Callable[[Candidate], int | str]] = {
    "dp": lambda one: one.data, "tp": lambda one: one.tensor, "cp": lambda one: one.context, "pp": lambda one: one.pp,
    "ep": lambda one: one.experts, "stages": lambda one: one.stages, "virtual_stages": lambda one: one.virtual_stages,
    "microbatches": lambda one: one.microbatches, "micro_batch": lambda one: one.samples, "schedule": lambda one: one.schedule,
}
"""What a candidate has of a pin, in the order in which an error tries to do without."""
_LISTED = 12


def _nothing(
    batch: int, cluster: Cluster, pins: Pins, units: int, under: Callable[[Pins], list[Candidate]]
) -> PinError:
    """Which pin leaves no candidate, and what does. ``under``: the candidates under other pins."""
    pp, usual = pins.pp or 1, 1 if pins.schedule is None else schedule_of(pins.schedule).usual
    virtual = pins.virtual_stages or usual
    if pins.sequence_parallel and under(pins.without("sequence_parallel")):
        return PinError(f"pin sequence_parallel=True needs tp > 1: of {count_text(cluster.world, 'device')} the other pins "
                        f"({pins.without('sequence_parallel')}) leave none for it; drop it, or pin fewer ranks elsewhere")
    if pins.stage_cuts is not None and pins.pp is not None and (len(pins.stage_cuts) + 1) % pins.pp:
        return PinError(f"pin stage_cuts names {len(pins.stage_cuts)} cuts, so {len(pins.stage_cuts) + 1} stages, which do not "
                        f"divide over pp={pins.pp}; name pp x virtual_stages - 1 cuts")
    if pp * virtual > units:
        why = f"schedule={pins.schedule!r}" if usual > 1 and pins.virtual_stages is None else f"virtual_stages={virtual}"
        return PinError(f"pins pp={pp} and {why} make {pp * virtual} stages, but the model can be cut into {units} pieces")
    if cluster.world == 1:
        return PinError("pins schedule, stage_cuts or virtual_stages ask for a pipeline, but there is one device; drop them")
    data = pins.dp or cluster.world // (pp * (pins.tp or 1) * (pins.cp or 1))
    if pins.dp is not None and batch % pins.dp:
        return PinError(f"pin dp={pins.dp} does not divide the batch of {batch} samples")
    if pins.microbatches is not None and pp == 1 and pins.tp is not None and batch % (data * pins.microbatches):
        return PinError(f"the batch of {batch} samples does not divide into dp={data} ranks x "
                        f"microbatches={pins.microbatches}; pin counts whose product divides it")
    if pins.microbatches is not None and pins.dp is not None and batch % (data * pins.microbatches):
        return PinError(f"pin microbatches={pins.microbatches}: the batch of {batch} samples does not divide into "
                        f"{data} data ranks x {pins.microbatches} micro-batches")
    if pins.schedule is not None and pins.pp is not None:
        counts = (pins.microbatches,) if pins.microbatches else divisors(max(1, batch // data))[::-1]
        reasons = [illegal(pins.schedule, pp, virtual, count) for count in counts]
        if all(reasons):
            return PinError(str(reasons[0]))
    where = f"{cluster.world} devices, a batch of {batch} samples and a model that is cut into up to {units} pieces"
    for name, value in _VALUES.items():
        others = pins.without(name)
        if name == "cp":  # what no search takes up by itself can be pinned
            others = Pins.of({**vars_of(others), name: divisors(cluster.world)})
        there = under(others) if pins.says(name) else []
        if there:
            known = sorted({value(one) for one in there}, key=lambda one: (isinstance(one, str), one))
            shown = ", ".join(map(str, known[:_LISTED])) + (", ..." if len(known) > _LISTED else "")
            left = str(pins.without(name))
            beside = "" if left == "none" else f" beside the pins ({left})"
            return PinError(f"pin {pins.shown(name)} leaves nothing of {where}{beside}; there is {name} = {shown}")
    return PinError(f"the pins ({pins}) leave nothing of {where}, whichever of them is dropped: degrees multiply to the "
                    "devices, data ranks x micro-batches divide the batch; drop two of them")


def variants_of(candidate: Candidate, cluster: Cluster, pins: Pins) -> list[tuple[int, int]]:
    """(ZeRO level, data ranks that share the state): all, those of a node, those of 4, 16, ... nodes. All ranks that split the
    sequence share it with them.

    A split backward keeps what it gathered and reduces once, whatever the level: there level 1 stands for 2 and 3.
    """
    data, stage = candidate.data, candidate.context * candidate.tensor
    if data * candidate.context == 1:
        return [(0, 1)]
    levels: tuple[int, ...] = (0, 1, 2, 3) if pins.zero is None else (pins.zero,)
    free = pins.zero is None and "zero" not in pins.among
    if candidate.microbatches == 1 and free:
        levels = (0, 2, 3)
    if candidate.split and free:
        levels = (0, 1)
    levels = tuple(level for level in levels if pins.allows("zero", level))
    shards = {data}
    group = cluster.per_node
    while group < data * stage:
        if group % stage == 0 and data % (group // stage) == 0:
            shards.add(group // stage)
        group *= 4
    wanted = _shards(data, pins)[::-1] if pins.says("shard") else sorted(shards - {1}, reverse=True) or [1]
    wanted = [n for n in wanted if n % candidate.expert == 0]  # those that share the experts share the state of the rest
    several = [n for n in wanted if n * candidate.context > 1]
    return [(0, data)] * (0 in levels) + [(level, n) for level in levels if level for n in several]


def trained_numels(graph: Graph, rules: Rules, stacked: Collection[str]) -> tuple[int, int]:
    """Elements of all trainable parameters, and of those that ranks of experts may split. ``stacked``: products over experts
    that are matrices of one parameter."""
    made = {name: op for op in graph.ops for name in op.outputs}
    open_ = [name for op in graph.ops if rules[op.name].together or op.name in stacked
             for name in (op.inputs[len(op.inputs) - len(op.args[4]) :] if op.target == EXPERTS else op.inputs)]
    seen = set[str]()
    while open_:
        name = open_.pop()
        if name not in seen:
            seen.add(name)
            open_ += made[name].inputs if name in made else ()
    trained = {param.value: graph.values[param.value].numel for param in graph.params if param.trainable}
    return sum(trained.values()), sum(numel for name, numel in trained.items() if name in seen)


def degrees_of(candidate: Candidate, shard: int) -> Degrees:
    """The degrees of a candidate whose state is split over ``shard`` ranks."""
    return Degrees(
        candidate.pp, candidate.data, shard, candidate.tensor, candidate.context, candidate.mirrored, candidate.expert,
        candidate.heads,
    )


def layout_of(candidate: Candidate, degrees: Degrees) -> Layout:
    """The layout of a candidate without a pipeline, on which its blocks may differ."""
    mesh = degrees.mesh
    return Layout(mesh, {axis: role_of(axis) for axis in mesh.axes}, candidate.folded)


@dataclass(frozen=True, slots=True)
class MicrobatchSeconds:
    """What one micro-batch takes.

    total: seconds of all units, forward and backward
    path: the same without gradients of weights
    least, least_forward: the unit that takes least, and its forward
    longest: the longest forward or backward of a unit
    forward: of all units (0: not known)
    """

    total: float
    path: float
    least: float = 0.0
    least_forward: float = 0.0
    longest: float = 0.0
    forward: float = 0.0


def floor(candidate: Candidate, work: MicrobatchSeconds, most: int = 0) -> float:
    """Seconds that no cut can beat, with up to ``most`` stages a rank if that is more; see the head of this file."""
    p, m, w = candidate.pp, candidate.microbatches, work.total
    if p == 1:
        return m * w
    closed, split = schedule_of(candidate.schedule).closed, candidate.split
    if closed is not None and closed.forwards_first:
        return w + (m - 1) * w / p
    path = work.path if split else w
    slowest = max(work.forward, path - work.forward) if work.forward else path / 2
    bound = max(m * w / p, path + (m - 1) * max(work.longest, slowest / p / max(candidate.virtual_stages, most)))
    if max(candidate.virtual_stages, most) == 1 and not split and m > 1:
        bound = max(bound, w / (1.0 - (1.0 - 1.0 / m) ** p))
    if closed is not None and closed.turns:
        return bound
    return max(bound, m * w / p + (p - 1) / 2 * (work.least_forward if split else work.least))


class Floors:
    """The least seconds of a sample on one device: FLOPs of matrix products and attention at their best efficiency, or that of
    what was measured where it is better; attention of which anything was measured counts as nothing. ``least``: the least
    ratio of measured to formula of any module; ``started``: seconds (forward, backward) that the host takes to start the
    kernels of a micro-batch, however few samples it has."""

    def __init__(
        self, graph: Graph, rules: Rules, device: Device, least: float = 1.0, started: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        seconds, faster = 0.0, compute.least_measured(device) * least
        for op in graph.ops:
            operator = rules.operators[op.target]
            flops = compute.flops(operator, Work.of(op, graph))
            if flops and not (device.attentions and operator.kind == "attention"):
                passes = 1.0 + sum(graph.values[name].differentiable for name in op.inputs[:2]) if op.inputs else 1.0
                seconds += _fastest(operator, flops, passes, graph.values[op.inputs[0]].dtype, device)
        self.sample, self.started = faster * seconds / batch_size(graph), started

    def work(self, candidate: Candidate) -> MicrobatchSeconds:
        """One micro-batch through all units."""
        seconds = self.sample * candidate.samples / (candidate.tensor * candidate.context)
        return self.at_least(MicrobatchSeconds(seconds, 2 / 3 * seconds))

    def at_least(self, work: MicrobatchSeconds) -> MicrobatchSeconds:
        """The work, or what the host takes to start it. The gradients of weights wait for the backward's other half alone, so
        what is left without them takes as long as the forward at least."""
        return replace(work, total=max(work.total, sum(self.started)), path=max(work.path, self.started[0]))


def _fastest(operator: Operator, flops: float, passes: float, dtype: torch.dtype, device: Device) -> float:
    peak = device.flops(dtype)
    if operator.kind == "attention":
        best = [min(1.0, 1.25 * part) for part in (device.attention_forward, device.attention_backward)]
        return flops / peak * (1 / best[0] + (2.5 / best[1] if passes > 1 else 0.0))
    return flops * passes / (peak * device.matmul_efficiency)


def pipeline_of(candidate: Candidate) -> tuple[int, ...]:
    """What is the same of pipelines that differ in their schedule and stages a rank."""
    return candidate.pp, candidate.tensor, candidate.context, candidate.heads, candidate.experts, candidate.microbatches


_ALL_THE_SAME = 3
"""Of so many that are taken to come no nearer one is glanced at (chosen)."""


@dataclass
class Glances:
    """How near to its bound a step came whose cut was not looked for, of as many stages on as many ranks under one schedule.
    ``NEARER``: one is taken to come no nearer than by this part of what others did; near the best pipeline a cut that is looked
    for is taken to be faster by so much (chosen)."""

    NEARER: ClassVar[float] = 0.95
    above: dict[tuple[int, str, int], float] = field(default_factory=dict)
    passed: dict[tuple[int, str, int], int] = field(default_factory=dict)

    def may_beat(self, one: Candidate, bound: float, seconds: float) -> bool:
        """Whether one may take less, or is to be looked at all the same: those before it may have been short of memory."""
        alike = one.pp, one.schedule, one.virtual_stages
        if bound * self.above.get(alike, 0.0) < seconds:
            return True
        self.passed[alike] = self.passed.get(alike, 0) + 1
        return self.passed[alike] % _ALL_THE_SAME == 0

    def saw(self, one: Candidate, bound: float, seconds: float) -> None:
        """One was glanced at."""
        alike = one.pp, one.schedule, one.virtual_stages
        self.above[alike] = min(self.above.get(alike, math.inf), self.NEARER * seconds / bound)


def are_near(one: Candidate, best: Candidate) -> bool:
    """Whether a pipeline is like another one but for its schedule, or has the schedule and, of stages, tensor, data and expert
    ranks and of micro-batches, at most twice as many as the other and half as many at least."""
    if pipeline_of(one) == pipeline_of(best):
        return True
    counts = ((one.pp, best.pp), (one.tensor, best.tensor), (one.data, best.data), (one.expert, best.expert),
              (one.microbatches, best.microbatches))
    same = (one.schedule, one.context, one.heads, one.folded) == (best.schedule, best.context, best.heads, best.folded)
    return same and one.pp > 1 and all(max(both) <= 2 * min(both) for both in counts)
