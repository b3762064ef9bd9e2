"""The joint search: (pp, virtual stages, schedule, micro-batches) x (data, tensor) x ZeRO x recomputation x placement.

Best first by lower bound, each candidate sharpened as often as its bound stays the least::

    flops       FLOPs at the device's best efficiency                   one number for the model
    tensor      the placement of all samples at once on ``tensor`` ranks   what tensor parallelism costs a sample at least
    placement   the placement of (tensor, samples)                      solved once, serves every pp and schedule
    ways        every ZeRO level and shard that none dominates          the parameters' price on this mesh
    relaxed     units that may be divided, memory and schedule exact    ``Evaluator.relaxed``
    solved      cut, simulated                                          an incumbent

A sample alone takes no less than its share of a large batch: kernels fill the device worse and collectives have latency. What
rounding to whole tiles can turn around in that is within ``_ROUNDING``.

Candidates that differ in their stages a rank only are one node (``_Node``) until memory counts: a bound for a whole range of
them comes first, then for its halves. A candidate without a pipeline has nothing to cut: it is solved at once. Otherwise good
incumbents are brought early: first one candidate of every (pp, tensor) is solved (``_layouts``), then those without a pipeline,
then the best pipelines under other schedules and stages a rank (``_schedules``). The sweep through everything ends when the
least bound left is within ``gap`` of the incumbent, so what was never solved is proven not to be better by more than that, or
with its limit. The limit counts what was done, in seconds that it took on one machine (``_EFFORT``), not a clock: a search ends
at the same place wherever it runs. The certificate is the incumbent against the least bound of all candidates, open or closed;
it holds for the placements that are best with memory unlimited.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.compiler.placement.costs import HOST
from meshwright.compiler.placement.placement import NONE, Placement, Placements
from meshwright.compiler.search.candidates import Candidate, Floors, Work, candidates, degrees_of, floor, ways_of
from meshwright.compiler.search.evaluate import DoesNotFitError, Evaluation, Evaluator
from meshwright.compiler.search.stage_costs import StageCosts, Units
from meshwright.compiler.structure.dims import batch_size
from meshwright.compiler.structure.units import start_of
from meshwright.cost.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.pins import PinError, Pins
from meshwright.ir.plan import PlanError
from meshwright.ir.rule import Rules
from meshwright.ir.schedules import schedule_of

Progress = Callable[[str, float], None]
_FLOPS, _TENSOR, _PLACEMENT, _WAY, _RELAXED = range(5)
_ROUNDING = 0.03
_NEAR = 4
_DIVE = 0.35
_ALONE = 0.5
_ALIKE = 0.75
"""Parts of the limit by which the first candidates of all (pp, tensor), those without a pipeline, and the best under other
schedules are done."""
_EFFORT: Mapping[str, float] = {
    "placement": 0.1, "way": 0.0007, "alone": 0.001, "packing": 0.003, "rank alone": 0.0015, "rank of divided units": 0.003,
    "pair of ranks of whole units": 0.0025, "cut": 0.015, "stage cut": 6e-7, "action simulated": 6e-8,
    "stage that does not fit": 0.004,
}
"""Nominal seconds of what is done, as ``Evaluator.work`` counts it."""


@dataclass
class Outcome:
    """What the search found. ``ranking``: everything solved, best first. ``considered`` candidates (a way to keep parameters is
    part of one from the second stage on), of which ``pruned`` by a bound (or, if it is ``late``, left open), ``infeasible`` and
    ``solved``; ``wanted``: the gap that was asked for; ``again``: evaluates one within so many bytes more or
    less than the capacity, a factor. Raises DoesNotFitError."""

    ranking: list[Evaluation] = field(default_factory=list)
    considered: int = 0
    pruned: int = 0
    infeasible: int = 0
    placements: int = 0
    bound: float = 0.0
    wanted: float = 0.0
    late: bool = False
    nearest: DoesNotFitError | None = None
    again: Callable[[Evaluation, float], Evaluation] | None = None

    @property
    def best(self) -> Evaluation:
        return self.ranking[0]

    @property
    def solved(self) -> int:
        return len(self.ranking)

    @property
    def gap(self) -> float:
        """(incumbent - least bound) / incumbent."""
        return max(0.0, 1.0 - self.bound / self.best.seconds)

    @property
    def runner_up(self) -> Evaluation | None:
        """The best that lays the devices out otherwise or runs another schedule."""
        if not self.ranking:
            return None

        def shape(e: Evaluation) -> tuple[object, ...]:
            return e.candidate.pp, e.candidate.data, e.candidate.tensor, e.candidate.schedule

        return next((e for e in self.ranking if shape(e) != shape(self.best)), None)

    def why(self, other: Evaluation) -> str:
        """What costs another evaluation more than the best: the part that differs most."""
        more = {name: seconds - self.best.parts.get(name, 0.0) for name, seconds in other.parts.items()}
        name = max(more, key=lambda part: more[part])
        return f"{other}: {other.seconds:.4g} s, {max(0.0, more[name]):.3g} s more of {name}"


def _simple(candidate: Candidate) -> tuple[bool, int]:
    """Orders the schedules by how fast they are bounded and solved: those of one stage a rank that hold few micro-batches
    first."""
    schedule = schedule_of(candidate.schedule)
    first = schedule.stages == 1 and schedule.closed is not None and not schedule.closed.forwards_first
    return not first, candidate.virtual_stages


def _layout(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.pp, candidate.tensor, candidate.microbatches


@dataclass(order=True)
class _Node:
    """Candidates that differ in their stages a rank only (``virtual``, ascending), by the one that has the fewest."""

    bound: float
    level: int
    number: int
    candidate: Candidate = field(compare=False)
    virtual: tuple[int, ...] = field(compare=False)
    zero: int = field(compare=False, default=0)
    shard: int = field(compare=False, default=1)

    def of(self, virtual: Sequence[int], bound: float, number: int) -> _Node:
        """Some of the candidates, with a bound."""
        first = replace(self.candidate, virtual_stages=virtual[0])
        return replace(self, candidate=first, virtual=tuple(virtual), bound=max(self.bound, bound), number=number)


class JointSearch:
    """One search. ``capacity``: bytes of a rank for everything but the inputs; ``recompute``: kinds, none first, or the pinned
    one alone; ``limit``: nominal seconds after which the incumbent is taken as it is; ``cutoff``: seconds of a plan known from
    elsewhere, which need not be matched."""

    def __init__(
        self, graph: Graph, cluster: Cluster, rules: Rules, pins: Pins, *, itemsize: int, state_bytes: float,
        capacity: float, recompute: Sequence[str], gap: float = 0.005, limit: float = 20.0, progress: Progress | None = None,
        cutoff: float = float("inf"),
    ) -> None:
        self.graph, self.cluster, self.pins, self.gap, self.limit, self.progress = graph, cluster, pins, gap, limit, progress
        self.cutoff = cutoff
        self.placements = Placements(
            graph, cluster, rules, pins, itemsize=itemsize, state_bytes=state_bytes,
            recompute=tuple(dict.fromkeys((NONE, *recompute))),
        )
        positions = self.placements.folded.positions
        names = [graph.blocks[p.block].path if p.block >= 0 else graph.ops[p.start].module or "root" for p in positions]
        costs = StageCosts(cluster, itemsize=itemsize, state_bytes=state_bytes)
        forced = self._forced(names, [position.start for position in positions])
        self.evaluator = Evaluator(costs, positions, names, capacity, recompute, forced)
        self.floors = Floors(self.placements.folded.graph, rules, cluster.device)
        self.floors.sample *= self._stretch(rules)
        self.outcome = Outcome(wanted=gap, again=self.evaluator.again)
        self._numbers = itertools.count()
        self._known: dict[tuple[int, int], Placement | None] = {}
        self._wholes: dict[int, tuple[float, float] | None] = {}
        self._works: dict[int, Work] = {}
        self._closed = float("inf")
        self._refused: PlanError | None = None  # why the last placement that cannot be has none
        self._unfit: tuple[float, _Node] | None = None  # of what a bound proves not to fit, the nearest

    def run(self) -> Outcome:
        """Search. Raises PinError if the pins leave nothing, DoesNotFitError (of the nearest) if nothing fits. With a cutoff
        the ranking may be empty."""
        if self.evaluator.capacity <= 0:
            raise DoesNotFitError("the inputs alone fill the memory", 0.0)
        found = self.outcome
        nodes = self._layouts(self._start())
        piped = [node for node in nodes if node.candidate.pp > 1]
        nodes = self._sweep([node for node in nodes if node.candidate.pp == 1], _ALONE * self.limit)
        nodes = self._sweep(nodes + self._schedules(piped), self.limit)
        if not found.ranking and self.cutoff == float("inf"):
            if found.nearest is None and self._unfit is not None:
                self._solve(self._unfit[1])
            raise found.nearest or self._refused or PlanError(f"no layout of {self.cluster} runs this model at this batch")
        found.pruned, found.placements = sum(len(node.virtual) for node in nodes), self.placements.count
        known = [e.seconds for e in found.ranking[:1]] + [self.cutoff]
        found.bound = min([self._closed, *known, *(node.bound for node in nodes)])
        return found

    def _layouts(self, nodes: list[_Node]) -> list[_Node]:
        """Solve the candidate of least bound of every (pp, tensor) under the simplest schedule, best first."""
        piped = [node for node in nodes if node.candidate.pp > 1]
        simple = min((_simple(node.candidate) for node in piped), default=None)
        left = [node for node in nodes if node.candidate.pp == 1 or _simple(node.candidate) != simple]
        split = [self._split(node, 1) for node in piped if _simple(node.candidate) == simple]
        chosen = [parts[0] for parts in split]
        left += [part for parts in split for part in parts[1:]]
        layouts: dict[tuple[int, int], list[_Node]] = {}
        for node in chosen:
            layouts.setdefault((node.candidate.pp, node.candidate.tensor), []).extend(self._tensor(node))
        first = sorted(min(group) for group in layouts.values())
        rest = [node for group in layouts.values() for node in sorted(group)[1:]]
        return left + rest + self._dive(first, _DIVE * self.limit)

    def _schedules(self, nodes: list[_Node]) -> list[_Node]:
        """Solve the best layouts under the other schedules, each with 1, 2, 4, ... stages a rank."""
        best = dict.fromkeys(_layout(e.candidate) for e in self.outcome.ranking if e.candidate.pp > 1)
        order = {layout: number for number, layout in enumerate([*best][:_NEAR])}
        fresh = [node for node in nodes if node.level < _WAY and _layout(node.candidate) in order]
        taken = {node.number for node in fresh}
        single = [node.of([virtual], 0.0, next(self._numbers)) for node in fresh for virtual in node.virtual]
        chosen = [node for node in single if node.candidate.virtual_stages.bit_count() == 1]
        left = [node.of(others, 0.0, next(self._numbers)) for node in fresh
                if (others := [virtual for virtual in node.virtual if virtual.bit_count() > 1])]
        chosen.sort(key=lambda node: (order[_layout(node.candidate)], -node.candidate.virtual_stages, node.number))
        return [node for node in nodes if node.number not in taken] + left + self._dive(chosen, _ALIKE * self.limit)

    def _dive(self, nodes: Sequence[_Node], deadline: float) -> list[_Node]:
        """Solve each of some candidates at once, in one of its ways; what is left of them all."""
        left: list[_Node] = []
        for node in nodes:
            if self.effort > deadline or self._hopeless(node):
                left.append(node)
                continue
            self._report(node, self.effort / self.limit)
            ways = [way for placed in self._place(node) for way in self._ways(placed)]
            for number, way in enumerate(ways):
                relaxed = [] if self._hopeless(way) else self._relax(way)
                if relaxed and not self._hopeless(relaxed[0]):
                    self._closed = min(self._closed, self._solve(relaxed[0]))
                    left += ways[number + 1 :]
                    break
                left += relaxed or ([way] if self._hopeless(way) else [])
        return left

    def _hopeless(self, node: _Node) -> bool:
        """Whether nothing better than the incumbent, by more than the gap, can come of it."""
        return node.bound >= self._incumbent * (1 - self.gap)

    @property
    def effort(self) -> float:
        """Nominal seconds of everything done so far."""
        return sum(_EFFORT[what] * count for what, count in self.evaluator.work.items())

    @property
    def _incumbent(self) -> float:
        """Seconds to beat."""
        return min(self.outcome.best.seconds if self.outcome.ranking else float("inf"), self.cutoff)

    def _sweep(self, heap: list[_Node], deadline: float) -> list[_Node]:
        """Best first through some of the candidates; what is left of them, proven no better or out of time."""
        found, total = self.outcome, max(1, len(heap))
        ready = [node for node in heap if node.level == _RELAXED]
        heap = [node for node in heap if node.level != _RELAXED]
        heapq.heapify(heap)
        heapq.heapify(ready)
        while heap or ready:
            node = min(heap[:1] + ready[:1])
            spent = self.effort if self._incumbent < float("inf") else -float("inf")
            if self._hopeless(node):
                break
            if spent > deadline:
                found.late = True
                break
            if node.level == _RELAXED:
                self._closed = min(self._closed, self._solve(heapq.heappop(ready)))
                continue
            self._report(node, 1.0 - len(heap) / total)
            for child in self._sharper(heapq.heappop(heap)):
                if child.level == _WAY and child.candidate.pp == 1 and not self._hopeless(child):
                    self._closed = min(self._closed, self._solve(child))
                else:
                    heapq.heappush(ready if child.level == _RELAXED else heap, child)
        return heap + ready

    def _report(self, node: _Node, done: float) -> None:
        if self.progress is not None:
            self.progress(str(node.candidate), max(0.0, done))

    # the levels

    def _start(self) -> list[_Node]:
        listed = candidates(self.graph, self.cluster, self.pins, len(self.evaluator.names))
        self.outcome.considered = len(listed)
        alike: dict[Candidate, list[int]] = {}
        for candidate in listed:
            alike.setdefault(replace(candidate, virtual_stages=1), []).append(candidate.virtual_stages)
        nodes = []
        for one, virtual in alike.items():
            first = replace(one, virtual_stages=virtual[0])
            bound = floor(first, self.floors.work(first), virtual[-1])
            nodes.append(_Node(bound, _FLOPS, next(self._numbers), first, tuple(virtual)))
        return nodes

    def _split(self, node: _Node, at: int, bound: float = 0.0) -> list[_Node]:
        """The node as two: its first candidates and the others, if there are any."""
        parts = [part for part in (node.virtual[:at], node.virtual[at:]) if part]
        return [node.of(part, bound, next(self._numbers)) for part in parts]

    def _sharper(self, node: _Node) -> list[_Node]:
        """The candidate at the next level, as several where it has several ways; none if it cannot be."""
        if node.level == _FLOPS:
            return self._tensor(node)
        if node.level == _TENSOR:
            return self._place(node)
        return self._ways(node) if node.level == _PLACEMENT else self._relax(node)

    def _tensor(self, node: _Node) -> list[_Node]:
        candidate = node.candidate
        batch = batch_size(self.graph)
        if candidate.tensor not in self._wholes:
            whole = self._placement(candidate.tensor, batch)
            self._wholes[candidate.tensor] = None if whole is None else (whole.bound, whole.bound - self._weight(whole))
        known = self._wholes[candidate.tensor]
        if known is None:
            return [replace(node, level=_TENSOR)]
        part = candidate.samples / batch * (1 - _ROUNDING)
        work = Work(known[0] * part, known[1] * part)
        return [replace(node, level=_TENSOR, bound=max(node.bound, floor(candidate, work, node.virtual[-1])))]

    def _place(self, node: _Node) -> list[_Node]:
        candidate = node.candidate
        placement = self._placement(candidate.tensor, candidate.samples)
        if placement is None:
            self.outcome.infeasible += len(node.virtual)
            return []
        work = self._works.get(id(placement))
        if work is None:
            rows = [placement.rows[row].activations[self.evaluator.recompute[0]] for row in placement.sequence]
            ahead, back = ([float(max(r[at], r[HOST + at]) + r[at + 2]) for r in rows] for at in (0, 1))
            slack = placement.bound / placement.seconds
            work = self._works[id(placement)] = self._work(placement.seconds, self._weight(placement), ahead, back, slack)
        return [replace(node, level=_PLACEMENT, bound=max(node.bound, floor(candidate, work, node.virtual[-1])))]

    def _work(
        self, total: float, weight: float, forward: Sequence[float], backward: Sequence[float], slack: float
    ) -> Work:
        least = min(f + b for f, b in zip(forward, backward, strict=True))
        longest = max(max(forward), 0.5 * max(backward))
        return Work(
            total * slack, (total - weight) * slack, least * slack, min(forward) * slack, longest * slack, sum(forward) * slack
        )

    def _weight(self, placement: Placement) -> float:
        return sum(placement.rows[row].weight for row in placement.sequence)

    def _placement(self, tensor: int, samples: int) -> Placement | None:
        key = (tensor, samples)
        if key not in self._known:
            self.evaluator.work["placement"] += 1
            try:
                self._known[key] = self.placements.of(*key)
            except PinError:
                raise
            except PlanError as error:  # something in the model needs the whole batch at once
                self._known[key], self._refused = None, error
        return self._known[key]

    def _ways(self, node: _Node) -> list[_Node]:
        """The ways to keep parameters that no other beats in time and in memory at once."""
        candidate, placement = node.candidate, self._known[node.candidate.tensor, node.candidate.samples]
        assert placement is not None
        found: list[tuple[float, float, int, int, Units]] = []
        for zero, shard in ways_of(candidate, self.cluster, self.pins):
            if not self.evaluator.kinds(candidate, zero):
                continue
            degrees = degrees_of(candidate, shard)
            self.evaluator.work["way"] += 1
            units = self.evaluator.units(candidate, degrees, zero, placement, self.evaluator.recompute[0])
            if not np.isfinite(units.state).all():
                continue
            once = float(units.gather.sum() + units.reduce.sum() + units.optimizer.sum())
            found.append((candidate.microbatches * units.work + once, _held(units), zero, shard, units))
        found.sort(key=lambda way: way[:4])
        kept: list[_Node] = []
        least, slack = float("inf"), placement.bound / placement.seconds
        for _, held, zero, shard, units in found:
            if held >= least:
                continue
            least = held
            forward, backward = units.forward.tolist(), units.backward.tolist()
            work = self._work(units.work, float(units.weight.sum()), forward, backward, slack)
            run = floor(candidate, work, node.virtual[-1]) / slack
            bound = self.evaluator.step_of(candidate, units, run) * slack
            number = next(self._numbers)
            way = replace(node, level=_WAY, bound=max(node.bound, bound), number=number, zero=zero, shard=shard)
            if self.evaluator.too_much(candidate, degrees_of(candidate, shard), zero, placement, node.virtual[0] == 1):
                self._missed(way, units)
                continue
            kept.append(way)
        self.outcome.considered += max(0, len(kept) - 1) * len(node.virtual)
        self.outcome.infeasible += len(node.virtual) * (not kept)
        return kept

    def _relax(self, node: _Node) -> list[_Node]:
        """The bound with memory; of several candidates together, and then they part."""
        candidate, placement = node.candidate, self._known[node.candidate.tensor, node.candidate.samples]
        assert placement is not None
        if node.virtual[0] == 1 < len(node.virtual):
            return self._split(node, 1)
        degrees = degrees_of(candidate, node.shard)
        enough = self._incumbent * (1 - self.gap)
        bound = self.evaluator.relaxed(candidate, degrees, node.zero, placement, node.virtual[-1], enough)
        if bound == float("inf"):
            self.outcome.infeasible += len(node.virtual)
            self._missed(node, self.evaluator.units(candidate, degrees, node.zero, placement, self.evaluator.recompute[0]))
            return []
        if len(node.virtual) > 1:
            return self._split(node, len(node.virtual) // 2, bound)
        return [replace(node, level=_RELAXED, bound=max(node.bound, bound))]

    def _missed(self, node: _Node, units: Units) -> None:
        """Remember what is proven not to fit, if it is the nearest."""
        single = node.of(node.virtual[:1], 0.0, node.number)
        self._unfit = min(self._unfit or (np.inf, single), (_held(units) / node.candidate.pp, single))

    def _solve(self, node: _Node) -> float:
        """Cut and simulate; the bound of what was found, or of what was not, inf if nothing fits."""
        placement = self._known[node.candidate.tensor, node.candidate.samples]
        assert placement is not None
        try:
            result = self.evaluator.run(
                node.candidate, degrees_of(node.candidate, node.shard), node.zero, placement,
                cutoff=self._incumbent * (1 - self.gap),
            )
        except DoesNotFitError as error:
            self.outcome.infeasible += 1
            if self.outcome.nearest is None or error.least < self.outcome.nearest.least:
                self.outcome.nearest = error
            return float("inf") if error.proven else node.bound
        self.outcome.ranking.append(result)
        self.outcome.ranking.sort(key=lambda e: (e.seconds, e.candidate.pp, e.candidate.tensor, e.zero))
        return max(node.bound, min(result.bound, result.seconds))

    # the model

    def _stretch(self, rules: Rules) -> float:
        """FLOPs of the whole graph over those of the folded one."""
        if self.placements.folded.graph is self.graph or not self.floors.sample:
            return 1.0
        return Floors(self.graph, rules, self.cluster.device).sample / self.floors.sample

    def _forced(self, names: Sequence[str], starts: Sequence[int]) -> tuple[int, ...]:
        """Positions at which the pinned stages start."""
        if self.pins.stage_cuts is None:
            return ()
        found = [start_of(self.graph, name) for name in self.pins.stage_cuts]
        missing = [name for name, at in zip(self.pins.stage_cuts, found, strict=True) if at not in starts[1:]]
        if missing:
            raise PinError(f"pin stage_cuts: {missing[0]!r} is not where a stage can start; name modules such as "
                           f"{', '.join(repr(n) for n in names[1:4])}, modules inside of them, or operators")
        return tuple(starts.index(at) for at in found if at is not None)


def _held(units: Units) -> float:
    """Bytes of state and of what is alive while a unit runs: by which ways to keep parameters are compared."""
    return float(units.state.sum() + units.transient.max())
