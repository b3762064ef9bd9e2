"""Lower bounds of candidates, level by level, each sharper and dearer than the last.

    FLOPS       FLOPs at the best efficiency, or kernels that are started  three numbers for the model
    TENSOR      the placement of all samples at once on these ranks        what splitting a sample or experts costs at least
    STATE       parameters split as far as they can be                     what keeping them takes, whatever the placement
    PLACEMENT   the placement of (tensor, samples, context)                solved once, serves every pp and schedule
    KEPT        every ZeRO level and shard that none dominates             the parameters' price on this mesh
    DIVIDED     units that may be divided, memory and schedule exact       ``Evaluator.relaxed``
    TIMED       the table run at divided units, memory counted             transfers that wait, where cuts lie, all gathers

Candidates that differ in their stages a rank only are one node until memory counts: a bound for a whole range of them comes
first, then for its halves. Candidates with a free layout are bounded by FLOPS alone, then solved.

A sample alone takes no less than its share of a large batch: kernels fill the device worse and collectives have latency.
Rounding to whole tiles can break this; the level TENSOR assumes by at most ``ROUNDING`` (not proven; tests/test_joint.py
looks for more). ``Branch.firm`` is what a bound is without this assumption. From PLACEMENT on, bounds hold for the placements
that are best with memory unlimited.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.compiler.pipeline.timed_bound import Sharp
from meshwright.compiler.placement.costs import HOST
from meshwright.compiler.placement.placement import Placements
from meshwright.compiler.placement.rows import NONE, Placement
from meshwright.compiler.search.candidates import (
    Candidate,
    Floors,
    MicrobatchSeconds,
    degrees_of,
    floor,
    layout_of,
    trained_numels,
    variants_of,
)
from meshwright.compiler.search.evaluate import Evaluator
from meshwright.compiler.search.stage_costs import StageCosts, Units
from meshwright.compiler.search.task import Task
from meshwright.compiler.structure.dims import batch_size
from meshwright.compiler.structure.units import find_layers, start_of
from meshwright.ir.graph import Graph
from meshwright.ir.pins import PinError, Pins
from meshwright.ir.plan import PlanError
from meshwright.ir.sharding import ceil_div

ROUNDING = 0.03
"""Assumed, not proven: the seconds of one sample are at least 1 - ROUNDING times its share of the seconds of a large batch, for
rounding to whole tiles can save no more. tests/test_joint.py looks for a sample that saves more and finds none. A certificate
whose bound rests on this says so (``Branch.firm`` is the bound without)."""

_ABOUT, _FAR = 0.05, 10_000
"""Bytes that differ by this part are about the same (chosen); more of these than there are."""

_BESIDE = 0.02
"""Ways to keep parameters are bounded together where one takes less than the other by this part at most (chosen)."""

_but_stages = operator.attrgetter(*(one.name for one in fields(Candidate) if one.name != "virtual_stages"))

Placing = tuple[int, int, int, int, int, bool, bool]
"""What a placement is solved for: tensor ranks, samples, ranks of the sequence, of the experts, near ones for heads,
whether experts are split over the sequence's, and whether anything runs ahead of several micro-batches."""


class Level(IntEnum):
    """What a branch's bound counts; see the head of this file."""

    FLOPS = 0
    TENSOR = 1
    STATE = 2
    PLACEMENT = 3
    KEPT = 4
    DIVIDED = 5
    TIMED = 6


@dataclass(order=True)
class Branch:
    """Candidates and the seconds of a step that none of them can beat.

    bound: these seconds
    level: what they count
    number: of the order in which nodes were made
    candidate: of all, the one with the fewest stages a rank
    virtual: stages a rank of all, ascending
    firm: what the bound is without the assumption of the level TENSOR
    zero, shard: how parameters are kept, from the level KEPT on
    sharp: how sharp the level TIMED made its bound
    closely: whether it was cut for whatever is better than the incumbent
    later: of a free layout, the counts of micro-batches to try after this one
    fewer: of a free layout, the least seconds of the counts before, or what they take at least
    beside: of a pipeline from the level KEPT on, other ways to keep its parameters, which the bound is of too
    """

    bound: float
    level: Level
    number: int
    candidate: Candidate = field(compare=False)
    virtual: tuple[int, ...] = field(compare=False, default=(1,))
    firm: float = field(compare=False, default=0.0)
    zero: int = field(compare=False, default=0)
    shard: int = field(compare=False, default=1)
    sharp: Sharp = field(compare=False, default=Sharp.QUICK)
    closely: bool = field(compare=False, default=False)
    later: tuple[int, ...] = field(compare=False, default=())
    fewer: float = field(compare=False, default=float("inf"))
    beside: tuple[Beside, ...] = field(compare=False, default=())

    @property
    def count(self) -> int:
        """How many candidates it stands for, each way to keep parameters one."""
        return len(self.virtual) * (1 + len(self.beside))

    def at(self, level: Level, bound: float) -> Branch:
        """The node at another level, whose bound rests on no assumption."""
        return replace(self, level=level, bound=max(self.bound, bound), firm=max(self.firm, bound))

    def part(self, virtual: Sequence[int], bound: float, number: int) -> Branch:
        """Some of the candidates; ``bound`` rests on no assumption."""
        first, beside = replace(self.candidate, virtual_stages=virtual[0]), self.beside
        parts = tuple(one._replace(node=one.node.part(virtual, 0.0, one.node.number)) for one in beside)
        raised = self.at(self.level, bound)
        return replace(raised, candidate=first, virtual=tuple(virtual), number=number, beside=parts)


class Beside(NamedTuple):
    """A way to keep parameters that takes little less than another one, if both are cut alike.
    once: seconds [3, n] of every unit by which gathers, less what its optimizer is faster, reductions, and its optimizer may
        take longer the other way; ``runs``: by which all micro-batches may; ``work``: [n], of all micro-batches
    """

    node: Branch
    once: np.ndarray
    runs: float
    work: np.ndarray

    @classmethod
    def of(cls, node: Branch, units: Units, other: Units) -> Beside | None:
        """Of a node and its units beside others; None if those hold more anywhere. Neither memory nor the schedule keeps them
        from what these do then. What runs sooner may leave less time to hide what is gathered or reduced, and the slowest
        optimizer is no slower than ``ratio`` times that of these units."""
        held = [(one.state, one.state - one.summed, one.saved, one.pending, one.transient, one.transient - one.gathered,
                 one.behind, one.ended, one.reduced, one.root, one.closed, one.last, one.finished, one.entered, one.left,
                 -one.released, -one.freed) for one in (other, units)]
        if any((a > b + 1e-9 * np.abs(b)).any() for a, b in zip(*held, strict=True)):
            return None
        both = [np.array([one.forward, one.backward - one.weight, one.weight]) for one in (other, units)]
        later, sooner = (float(np.maximum(a - b, 0.0).sum()) for a, b in (both, both[::-1]))
        ahead, gather, reduce, slower = (
            np.maximum(getattr(other, name) - getattr(units, name), 0.0) for name in ("ahead", "gather", "reduce", "optimizer")
        )
        some = units.optimizer > 0.0
        ratio = float((other.optimizer[some] / units.optimizer[some]).max(initial=0.0))
        faster = units.optimizer * (1.0 - ratio if ratio < 1.0 and not slower.any() else 0.0)
        count = node.candidate.microbatches
        runs, work = count * later + sooner + float(ahead.sum()), count * (units.forward + units.backward)
        return cls(node, np.array([gather - faster, reduce, slower]), runs, work)

    def less(self, seconds: float) -> float:
        """Seconds at most by which it takes less, if its step takes so many: a rank runs no more units than these leave time
        for, and parts of units at most."""
        found = self.runs
        for each in self.once:
            worth = np.flatnonzero(each > 0.0)
            order = worth[np.argsort(-each[worth] / np.maximum(self.work[worth], 1e-300))]
            before = np.cumsum(self.work[order]) - self.work[order]
            part = np.clip((seconds - before) / np.maximum(self.work[order], 1e-300), 0.0, 1.0)
            found += float((part * each[order]).sum())
        return found


@dataclass
class Counts:
    """How many candidates there were, and what became of them. A way to keep parameters is part of one from KEPT on."""

    considered: int = 0
    infeasible: int = 0


class CandidateBounds:
    """Bounds of the candidates of one task; remembers the placements that these rest on.

    graph: of the task, cut between its layers if only a pipeline can serve the pins and no two layers are alike
    refused: why a placement that cannot be has none, the last one; of pins where some are why
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.graph = find_layers(task.graph) if task.pins.needs_stages(task.cluster.world) else task.graph
        self.counts = Counts()
        self.refused: PinError | PlanError | None = None
        self._missed: tuple[int, int, Branch] | None = None
        self._numbers = itertools.count()
        self._known: dict[Placing, Placement | None] = {}
        self._adds: dict[tuple[int, int, int, int, int, bool, int], float] = {}
        self._rings: dict[tuple[int, int, int], float] = {}
        self._works: dict[int, tuple[MicrobatchSeconds, np.ndarray]] = {}

    @cached_property
    def floors(self) -> Floors:
        """Of the level FLOPS."""
        task, folded, several = self.task, self.placements.folded, self.placements.of_several
        least = task.modules.least if task.modules is not None else 1.0
        every = replace(several, prologue=several.prologue | frozenset(self.placements.once))
        each = self.placements.structure.started(task.cluster.device, every)
        started = sum(each[at][0] for at in folded.serves), sum(each[at][1] for at in folded.serves)
        return Floors(task.graph, task.rules, task.cluster.device, least, started)

    @cached_property
    def placements(self) -> Placements:
        """Of all (tensor, samples), solved when asked for."""
        task = self.task
        kinds = tuple(dict.fromkeys((NONE, *task.recompute)))
        return Placements(
            self.graph, task.cluster, task.rules, task.pins, itemsize=task.itemsize, state_bytes=task.state_bytes,
            recompute=kinds, fixed=task.fixed.collapsed(task.pins.dp),
        )

    @cached_property
    def evaluator(self) -> Evaluator:
        """Of candidates with their way to keep parameters. Raises PinError if a stage cannot start where it is pinned."""
        task, graph, positions = self.task, self.graph, self.placements.folded.positions
        names = [graph.blocks[p.block].path if p.block >= 0 else graph.ops[p.start].module or "root" for p in positions]
        costs = StageCosts(task.cluster, itemsize=task.itemsize, state_bytes=task.state_bytes)
        forced = _forced(graph, task.pins, names, [position.start for position in positions])
        return Evaluator(costs, positions, names, task.cluster.capacity_bytes - task.given_bytes, task.recompute, forced)

    def start(self, listed: Sequence[Candidate]) -> list[Branch]:
        """The nodes of all candidates, at the level FLOPS."""
        self.counts.considered += len(listed)
        alike: dict[tuple[object, ...], list[Candidate]] = {}
        for candidate in listed:
            alike.setdefault(_but_stages(candidate), []).append(candidate)
        nodes = []
        for group in alike.values():
            first, virtual = group[0], [candidate.virtual_stages for candidate in group]
            bound = floor(first, self.floors.work(first), virtual[-1])
            nodes.append(Branch(bound, Level.FLOPS, next(self._numbers), first, tuple(virtual), bound))
        return nodes

    def split(self, node: Branch, at: int, bound: float = 0.0) -> list[Branch]:
        """The node as two: its first candidates and the others, if there are any."""
        return [self.part(node, part, bound) for part in (node.virtual[:at], node.virtual[at:]) if part]

    def part(self, node: Branch, virtual: Sequence[int], bound: float = 0.0) -> Branch:
        """Some of the candidates of a node."""
        return node.part(virtual, bound, next(self._numbers))

    def later(self, node: Branch, fewer: float) -> list[Branch]:
        """The candidate of a free layout with the next count of micro-batches, if there is one; ``fewer``: see ``Branch``."""
        if not node.later:
            return []
        count, one = node.later[0], node.candidate
        more = replace(one, microbatches=count, samples=ceil_div(batch_size(self.graph), one.data * count))
        self.counts.considered += 1
        return [replace(node, number=next(self._numbers), candidate=more, later=node.later[1:], fewer=fewer)]

    def on_layout(self, node: Branch) -> Branch:
        """The layout of a node without a pipeline, on which its blocks may differ. They are bounded as the candidate was before
        its parameters were priced: by its placement, whose blocks may differ in all but those; if experts were shared out after
        it was solved, another may suit them better."""
        candidate = node.candidate
        layout = layout_of(candidate, degrees_of(candidate, node.shard))
        bound = floor(candidate, self.floors.work(candidate))
        if candidate.expert == 1:
            bound = max(bound, floor(candidate, self._works_of(self.placement_of(node))[0]))
        return replace(node, candidate=replace(candidate, layout=layout), number=next(self._numbers), bound=bound, firm=bound)

    def sharper(self, node: Branch, to_beat: float) -> list[Branch]:
        """The candidates at the next level, as several nodes where these differ; none if they cannot be. ``to_beat``: seconds
        above which no bound need be sharper."""
        if node.level is Level.FLOPS:
            return self.tensor(node)
        if node.level is Level.TENSOR:
            return self.state(node)
        if node.level is Level.STATE:
            return self.place(node, to_beat)
        if node.level is Level.PLACEMENT:
            return self.keep(node, to_beat)
        return self.divide(node, to_beat) if node.level is Level.KEPT else [self.time(node, to_beat)]

    def tensor(self, node: Branch) -> list[Branch]:
        """At the level TENSOR."""
        work = self._of_many(node.candidate)
        bound = 0.0 if work is None else floor(node.candidate, work, node.virtual[-1])
        return [replace(node, level=Level.TENSOR, bound=max(node.bound, bound))]

    def _of_many(self, candidate: Candidate) -> MicrobatchSeconds | None:
        """One micro-batch's share of what the whole batch takes at once and, where experts are split, of what that adds on as
        many data ranks as there can be. Near ranks that exchange a sequence for heads save at most what it waits for without
        them. Where few samples were measured to take less than their share, that much less is said, or nothing where experts
        are split as well or modules were measured."""
        falls, splits = self.task.falls, candidate.expert > 1 or candidate.folded
        if falls == math.inf or (falls > 1.0 and splits):
            return None
        batch, tensor, context = batch_size(self.task.graph), candidate.tensor, candidate.context
        plain = candidate.mirrored and candidate.heads > 1 and self.task.pins.ulysses is None
        heads = 1 if plain else candidate.heads
        whole = self._placement((tensor, batch, context, 1, heads, False, False))
        if whole is None:
            return None
        share, waits = candidate.samples / batch * (1 - ROUNDING) / falls, 0.0
        if plain:
            waits = self._waits(tensor, batch, context)
        adds = self._splitting_adds(candidate, heads) * candidate.samples * (1 - ROUNDING)
        total, path = (max(0.0, seconds - waits) * share for seconds in (whole.bound, whole.bound - _weight(whole)))
        return self.floors.at_least(MicrobatchSeconds(max(0.0, total + adds), max(0.0, path + min(0.0, adds))))

    def _splitting_adds(self, candidate: Candidate, heads: int) -> float:
        """Seconds of a sample that sharing out the experts adds to it."""
        if candidate.expert == 1 and not candidate.folded:
            return 0.0
        batch, data = batch_size(self.task.graph), self.task.cluster.world // (candidate.tensor * candidate.context)
        if batch % data or data % candidate.expert or batch // data < candidate.samples:
            data = candidate.data
        samples = max(1, batch // data)
        where = candidate.tensor, samples, candidate.context, candidate.expert, heads, candidate.folded, data
        if where not in self._adds:
            self.evaluator.work["experts shared out"] += 1
            self._adds[where] = self.placements.splitting_adds(*where) / samples
        return self._adds[where]

    def state(self, node: Branch) -> list[Branch]:
        """At the level STATE: of the ways to keep parameters whose bytes all ranks of a pipeline have room for, the one that
        takes least, which moves beside compute what no placement can spare; nothing if there is none."""
        candidate, evaluator = node.candidate, self.evaluator
        pp, count, room = candidate.pp, candidate.microbatches, candidate.pp * evaluator.capacity
        work = self._of_many(candidate) or self.floors.work(candidate)
        bound, firm, least = float("inf"), float("inf"), (float("inf"), 0, 1)
        for zero, shard in variants_of(candidate, self.task.cluster, self.task.pins):
            if not evaluator.kinds(candidate, zero):
                continue
            kept = evaluator.costs.least(degrees_of(candidate, shard), zero, count, *self._numels, candidate.folded)
            least = min(least, (kept.bytes_ / pp, zero, shard))
            if kept.bytes_ > room:
                continue
            alone = MicrobatchSeconds(kept.each, 0.0)
            beside = MicrobatchSeconds(max(work.total, kept.each), work.path)
            firm = min(firm, floor(candidate, alone, node.virtual[-1]) + kept.optimizer / pp)
            bound = min(bound, floor(candidate, beside, node.virtual[-1]) + kept.optimizer / pp)
        if bound == float("inf"):
            self.counts.infeasible += len(node.virtual)
            self.miss(replace(node, zero=least[1], shard=least[2]), least[0])
            return []
        return [replace(node, level=Level.STATE, bound=max(node.bound, bound), firm=max(node.firm, firm))]

    @cached_property
    def _numels(self) -> tuple[int, int]:
        return trained_numels(self.graph, self.task.rules, self.task.structure.stacked.products)

    def _waits(self, tensor: int, samples: int, context: int) -> float:
        """Seconds that attention of so many samples waits for in a ring over all ranks of the sequence."""
        key = tensor, samples, context
        if key not in self._rings:
            self._rings[key] = self.placements.ring_waits(*key)
        return self._rings[key]

    def place(self, node: Branch, to_beat: float) -> list[Branch]:
        """At the level PLACEMENT, with what is sent between stages; nothing if what is handed back alone is too much."""
        candidate = node.candidate
        least = self._handed_back(candidate)
        runs = least <= self.evaluator.capacity and self._accumulates(candidate.microbatches, candidate.data)
        placement = self._placement(self._placed(candidate)) if runs else None
        if placement is not None:
            least = placement.handed_back(candidate.microbatches) + placement.made_alone(candidate.microbatches)
        if placement is None or least > self.evaluator.capacity:
            self.counts.infeasible += len(node.virtual)
            if least > self.evaluator.capacity:
                self.miss(node, least)
            return []
        work, each = self._works_of(placement)
        bound = floor(candidate, work, node.virtual[-1])
        if candidate.pp > 1 and bound < to_beat:
            links = self.evaluator.links(candidate, degrees_of(candidate, 1), placement, work, each, node.virtual, to_beat)
            bound = max(bound, links)
        return [node.at(Level.PLACEMENT, bound)]

    def _works_of(self, placement: Placement) -> tuple[MicrobatchSeconds, np.ndarray]:
        """What one micro-batch takes without its parameters, and seconds of each unit."""
        known = self._works.get(id(placement))
        if known is None:
            rows = [placement.rows[row].activations[self.evaluator.recompute[0]] for row in placement.sequence]
            ahead, back = ([float(max(r[at], r[HOST + at]) + r[at + 2]) for r in rows] for at in (0, 1))
            total, weight = placement.seconds, _weight(placement)
            known = self._works[id(placement)] = _work(placement, total, weight, ahead, back), np.array(ahead) + np.array(back)
        return known

    def placement_of(self, node: Branch) -> Placement:
        """The placement of a node. Raises PlanError if it has none."""
        placement = self._placement(self._placed(node.candidate))
        if placement is None:
            assert self.refused is not None
            raise self.refused
        return placement

    def _handed_back(self, one: Candidate) -> float:
        """Bytes, at least, of what all micro-batches hand back, on a rank of the last stage."""
        return one.microbatches * one.samples / batch_size(self.graph) / (one.tensor * one.context) * self._outputs

    @cached_property
    def _outputs(self) -> float:
        """Bytes that the model returns."""
        values = (self.graph.values[name] for name in dict.fromkeys(self.graph.outputs))
        return sum(value.bytes_ for value in values if value.shape)

    def _placed(self, one: Candidate) -> Placing:
        several = one.microbatches > 1 and bool(self.placements.ahead)
        return one.tensor, one.samples, one.context, one.expert, one.heads, one.folded, several

    def _accumulates(self, microbatches: int, ranks: int) -> bool:
        """Whether the model runs in so many micro-batches of so many data ranks: a placement is of the samples of one, whatever
        their number."""
        try:
            self.placements.accumulate(microbatches, ranks)
        except PlanError as error:
            self._refuse(error)
            return False
        return True

    def _refuse(self, error: PinError | PlanError) -> None:
        """Keep why candidates have no placement: a pin that none of those that were left obeys goes before the rest."""
        if isinstance(error, PinError) or not isinstance(self.refused, PinError):
            self.refused = error

    def _placement(self, key: Placing) -> Placement | None:
        if key not in self._known:
            built, solved = self.placements.built, self.placements.solved
            try:
                self._known[key] = self.placements.of(*key)
            except (PinError, PlanError) as error:  # what needs the whole batch at once; ranks that cannot obey a pin
                open_ = key[4] > 1 and self.task.pins.ulysses is None
                self._known[key] = None
                self._refuse(PlanError(str(error)) if open_ else error)
            choices = self.placements.built - built
            self.evaluator.work["placement" if choices else "experts shared out"] += 1
            self.evaluator.work["choice of a placement"] += choices
            self.evaluator.work["microsecond of a solver"] += round(1e6 * (self.placements.solved - solved))
        return self._known[key]

    def keep(self, node: Branch, to_beat: float = math.inf) -> list[Branch]:
        """At the level KEPT: the ways to keep parameters that no other beats in time and in memory at once; of a pipeline in
        each part of the time, for some of it may lie in the bubble and some not. What may take little less than another way
        goes beside that."""
        candidate, placement = node.candidate, self.placement_of(node)
        found: list[tuple[float, float, int, int, Units]] = []
        for zero, shard in variants_of(candidate, self.task.cluster, self.task.pins):
            if not self.evaluator.kinds(candidate, zero):
                continue
            degrees = degrees_of(candidate, shard)
            self.evaluator.work["row of a variant"] += len(placement.rows)
            units = self.evaluator.units(candidate, degrees, zero, placement, self.evaluator.recompute[0])
            if not np.isfinite(units.state).all():
                continue
            found.append((candidate.microbatches * units.work + sum(_once(units)), _held(units), zero, shard, units))
        found.sort(key=lambda variant: variant[:4])
        kept: list[tuple[Branch, Units]] = []
        beaten, slack = list[tuple[float, ...]](), placement.slack
        for _, held, zero, shard, units in found:
            takes = held, *((units.work, *_once(units)) if candidate.pp > 1 else ())  # without stages their sum: found's order
            if any(all(map(operator.le, other, takes)) for other in beaten):
                continue
            beaten.append(takes)
            work = _work(placement, units.work, float(units.weight.sum()), units.forward.tolist(), units.backward.tolist())
            run = floor(candidate, work, node.virtual[-1]) / slack
            bound = self.evaluator.step_of(candidate, placement, units, run) * slack
            variant = replace(node.at(Level.KEPT, bound), number=next(self._numbers), zero=zero, shard=shard)
            if self.evaluator.too_much(candidate, degrees_of(candidate, shard), zero, placement, node.virtual[0] == 1):
                self.miss(variant, _held(units) / candidate.pp)
                continue
            kept.append((variant, units))
        self.counts.considered += max(0, len(kept) - 1) * len(node.virtual)
        self.counts.infeasible += len(node.virtual) * (not kept)
        return self._together(kept, to_beat) if candidate.pp > 1 else [variant for variant, _ in kept]

    def _together(self, kept: Sequence[tuple[Branch, Units]], to_beat: float) -> list[Branch]:
        """Ways to keep the parameters of a pipeline: what may take little less than one before goes beside it."""
        alone, beside = list[tuple[Branch, Units]](), list[list[Beside]]()
        for node, units in kept:
            kinds, found = self.evaluator.kinds(node.candidate, node.zero), list[tuple[float, int, Beside]]()
            for number, (first, own) in enumerate(alone if to_beat < math.inf else ()):
                alike = self.evaluator.kinds(first.candidate, first.zero) == kinds and max(first.zero, node.zero) < 3
                if (alike or first.zero == node.zero) and (one := Beside.of(node, units, own)) is not None:
                    found.append((one.less(to_beat), number, one))
            less, number, nearest = min(found, key=lambda each: each[:2], default=(math.inf, 0, None))
            if nearest is not None and less <= _BESIDE * to_beat:
                beside[number].append(nearest)
            else:
                alone.append((node, units))
                beside.append([])
        return [
            replace(first, beside=tuple(others), bound=min([first.bound, *(one.node.bound for one in others)]),
                    firm=min([first.firm, *(one.node.firm for one in others)]))
            for (first, _), others in zip(alone, beside, strict=True)
        ]

    def divide(self, node: Branch, to_beat: float) -> list[Branch]:
        """At the level DIVIDED; a bound of several candidates together comes first, and then they part."""
        candidate, placement = node.candidate, self.placement_of(node)
        if node.virtual[0] == 1 < len(node.virtual):
            return self.split(node, 1)
        degrees, less = degrees_of(candidate, node.shard), self._less(node, to_beat)
        bound = self.evaluator.relaxed(candidate, degrees, node.zero, placement, node.virtual[-1], to_beat + less)
        if bound == float("inf"):
            self.counts.infeasible += len(node.virtual)
            units = self.evaluator.units(candidate, degrees, node.zero, placement, self.evaluator.recompute[0])
            self.miss(node, _held(units) / candidate.pp)
            return self.parted(node)
        bound = min(bound - less, to_beat) if node.beside else bound
        if len(node.virtual) > 1:
            return self.split(node, len(node.virtual) // 2, bound)
        return [node.at(Level.DIVIDED, bound)]

    def _less(self, node: Branch, to_beat: float) -> float:
        """Seconds at most by which what is beside a node takes less, if that beats so many."""
        return max((one.less(to_beat / self.placement_of(node).slack) for one in node.beside), default=0.0)

    def parted(self, node: Branch) -> list[Branch]:
        """What is beside a node, by itself."""
        return [replace(one.node.at(one.node.level, node.bound), number=next(self._numbers)) for one in node.beside]

    def time(self, node: Branch, to_beat: float, sharp: Sharp = Sharp.QUICK) -> Branch:
        """At the level TIMED. While there is nothing to beat, and of what is no pipeline, nothing more is said."""
        candidate = node.candidate
        if candidate.pp == 1 or to_beat == float("inf"):
            return replace(node, level=Level.TIMED, sharp=sharp)
        degrees, placement = degrees_of(candidate, node.shard), self.placement_of(node)
        less = self._less(node, to_beat)
        timed = self.evaluator.timed(candidate, degrees, node.zero, placement, node.bound, to_beat + less, sharp=sharp)
        return replace(node.at(Level.TIMED, min(timed - less, to_beat) if node.beside else timed), sharp=sharp)

    def miss(self, node: Branch, least: float) -> None:
        """Keep a node that is proven not to fit, if it is the nearest: of those about as near the one with the fewest samples,
        which nothing of what a micro-batch keeps has been counted of. ``least``: bytes of its mean rank, or of one of them."""
        single = node.part(node.virtual[:1], 0.0, node.number)
        near = round(math.log(max(least, 1.0)) / _ABOUT) if least < np.inf else _FAR
        self._missed = min(self._missed or (_FAR, 0, single), (near, node.candidate.samples, single))

    def leanest(self, node: Branch) -> Branch:
        """Its parameters kept as takes least, of the ways in which all of its placement's can be. Raises PlanError."""
        one, placement, ways = node.candidate, self.placement_of(node), list[tuple[float, int, int]]()
        for zero, shard in variants_of(one, self.task.cluster, self.task.pins):
            if kinds := self.evaluator.kinds(one, zero):
                units = self.evaluator.units(one, degrees_of(one, shard), zero, placement, kinds[0])
                ways += [(_held(units), zero, shard)] if np.isfinite(units.state).all() else []
        least = min(ways, default=(0.0, node.zero, node.shard))
        return replace(node, zero=least[1], shard=least[2])

    def missed(self, bytes_: float) -> Branch | None:
        """The nearest node that a bound proves not to fit, if that bound leaves it nearer than so many bytes."""
        near = self._missed is not None and (bytes_ == np.inf or self._missed[0] * _ABOUT < math.log(bytes_))
        return self._missed[-1] if self._missed is not None and near else None


def _forced(graph: Graph, pins: Pins, names: Sequence[str], starts: Sequence[int]) -> tuple[int, ...]:
    """Positions at which the pinned stages start. Raises PinError."""
    if pins.stage_cuts is None:
        return ()
    found = [start_of(graph, name) for name in pins.stage_cuts]
    missing = [name for name, at in zip(pins.stage_cuts, found, strict=True) if at not in starts[1:]]
    if missing:
        raise PinError(f"pin stage_cuts: {missing[0]!r} is not where a stage can start; name modules such as "
                       f"{', '.join(repr(n) for n in names[1:4])}, modules inside of them, or operators")
    return tuple(starts.index(at) for at in found if at is not None)


def _work(
    placement: Placement, total: float, weight: float, forward: Sequence[float], backward: Sequence[float]
) -> MicrobatchSeconds:
    """What ``floor`` reads, of units whose placement is ``slack`` below its seconds at best."""
    slack = placement.slack
    least = min(f + b for f, b in zip(forward, backward, strict=True))
    longest = max(max(forward), 0.5 * max(backward))
    return MicrobatchSeconds(
        total * slack, (total - weight) * slack, least * slack, min(forward) * slack, longest * slack, sum(forward) * slack
    )


def _weight(placement: Placement) -> float:
    return sum(placement.rows[row].weight for row in placement.sequence)


def _once(units: Units) -> tuple[float, float, float]:
    """Seconds that what is gathered, reduced and updated once a step takes; what inputs alone make is the same for all."""
    return float(units.gather.sum()), float(units.reduce.sum()), float(units.optimizer.sum())


def _held(units: Units) -> float:
    """Bytes of state and of what is alive while a unit runs: by which ways to keep parameters are compared."""
    return float(units.state.sum() + units.transient.max())
