"""The order in which candidates are bounded and solved: best first by lower bound (``bounds``), with good incumbents early.

    no pipeline       best first; there is nothing to cut, so what is left at the level KEPT is solved at once; a short look,
                      which keeps many pipelines out where memory is ample
    first dive        one pipeline of every (pp, tensor, context), under the simplest schedule, best first
    no pipeline       the rest of them
    free layouts      solved at once, to beat the incumbent; where memory binds they are dear
    block by block    meshes without a pipeline whose blocks may keep parameters unlike each other, where that may be faster
    second dive       the best pipelines under other schedules and stages a rank, if they may gain much (``_WORTH``)
    climb             pipelines of about as many stages, tensor and data ranks as the best one, from better to better
    everything        best first, until the least bound left is within the gap of the incumbent, or the limit is reached

Bounds say little of which pipeline is fast where micro-batches are few or stages have a block or two. So wherever the
parameters of one are priced, the simplest cut of it is run (``Evaluator.glance``), and it is solved at once if that beats the
incumbent.

So what was never solved is proven not to be better by more than the gap, or counted as left open. The limit counts what was
done, in seconds that it took on one machine (``effort.WORK``), not a clock: a search ends at the same place wherever it runs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

from meshwright.compiler.pipeline.timed_bound import Sharp
from meshwright.compiler.placement.choices import attended, exchanged, pays_mirrored
from meshwright.compiler.search.blockwise import TIE, WIDEST, OneDevice
from meshwright.compiler.search.bounds import Branch, CandidateBounds, Level
from meshwright.compiler.search.candidates import Candidate, Glances, Layout, are_near, candidates, degrees_of, pipeline_of
from meshwright.compiler.search.errors import DoesNotFitError, NoBetterError, OutOfMemoryError
from meshwright.compiler.search.evaluate import Evaluation
from meshwright.compiler.search.fitting import Fitted, Result
from meshwright.compiler.search.layouts import free_candidates, is_topological, walk
from meshwright.compiler.search.task import Progress, Task
from meshwright.compiler.solver.effort import WORK
from meshwright.ir.mesh import Mesh
from meshwright.ir.pins import PinError
from meshwright.ir.plan import PlanError
from meshwright.ir.prediction import SeenCandidate
from meshwright.ir.schedules import ScheduleError

_NEAR = 4
"""So many of the best pipelines are tried under other schedules (chosen; no bound rests on it)."""
_WORTH, _MORE = 0.03, 0.1
"""The second dive solves what may be better than the incumbent by such a part, with as many micro-batches, with others
(chosen)."""
UNLIKE = 0.08
"""Blocks that may keep parameters unlike each other are looked at where alike they take up to so much longer than the best, or
than is gained so by what was looked at, where that is more (chosen)."""
_EARLY, _DIVE, _ALONE = 0.1, 0.35, 0.5
_ALIKE, _PROVEN, _REST = 0.75, 0.9, 0.2
"""Parts of the limit: that a first look at what has no pipeline, or the climb, may take, and the first dive; by which the
candidates without a pipeline, the second dive (as the look for blocks unlike each other), and everything are done, with what
it has at least: what is left is for sharper bounds of what was solved."""
_LONG = 5.7
"""Nominal seconds that the longest proofs may take each: they begin where so many are left."""
_SHAPES, _NEARLY = 1.0, 1.04
"""Nominal seconds of layouts within memory up to which further ones are solved whose axes cross nodes and devices; of more
micro-batches that take up to so many times as long, as far as is proven, still more are looked at (chosen)."""
_INF = math.inf


class Sweep:
    """Solves those candidates of one task that could be best.

    ``free``: solves a layout with so many micro-batches, to beat some seconds, with seconds that nothing goes below where
    memory is known to bind. Raises OutOfMemoryError, NoBetterError, PinError, PlanError. ``one``: what so many micro-batches
    take at least on one device. ``spent``: nominal seconds of what ``free`` built and solved. ``limit``:
    nominal seconds after which the incumbent is taken as it is. ``to_beat``: seconds of a plan found elsewhere.

    solved: candidates of data and tensor ranks that were solved, as the search counts them, best first
    open: those of them whose plans were not made yet
    results: plans that fit, in the order in which they were made
    seen: what became of the candidates with free layouts
    late: whether the limit left candidates open
    limited: whether memory kept a free layout from being faster
    freed: whether free layouts were looked at
    aside: those of other shapes than the nodes and their devices where memory is short, which the bound is not of
    unlike: whether blocks that keep parameters unlike each other were looked at wherever there is no pipeline
    near: where blocks alike take so much longer than the best, they were not
    """

    def __init__(
        self, task: Task, free: Callable[[Layout, int, float, float | None], Fitted], one: Callable[[int], OneDevice], *,
        spent: Callable[[], float], limit: float = _INF, progress: Progress | None = None, to_beat: float = _INF,
    ) -> None:
        self.task, self.limit, self.progress, self.to_beat = task, limit, progress, to_beat
        self.bounds = CandidateBounds(task)
        self.solved: list[Evaluation] = []
        self.open: list[Evaluation] = []
        self.results: list[Result] = []
        self.seen: list[SeenCandidate] = []
        self.late = self.limited = self.freed = self.unlike = False
        self.near = UNLIKE
        self._told = self._swept = False
        self._glances = Glances()
        self._free, self._one, self._spent = free, one, spent
        self._closed = _INF
        self._cut: list[Branch] = []
        self._alone: dict[tuple[Mesh, int], float] = {}
        self._refined: dict[tuple[Mesh, int], float] = {}
        self._left, self.aside, self._single_stage = list[Branch](), list[Branch](), list[Branch]()
        self._later: tuple[list[Branch], list[Branch]] = [], []
        self._nearest: DoesNotFitError | None = None
        self._refused_free: list[PinError | PlanError] = []
        self._refused: PinError | PlanError | None = None
        self._crowded: list[tuple[float, Candidate]] = []

    # what a certificate tells

    @property
    def bound(self) -> float:
        """Seconds that no candidate goes below, as far as it was looked at."""
        return min([self._proven, *(node.bound for node in self._left + self._cut)])

    @property
    def firm(self) -> float:
        """The same without the assumption of the level TENSOR."""
        return min([self._proven, *(node.firm for node in self._left + self._cut)])

    @property
    def _proven(self) -> float:
        """Seconds that nothing that was solved without stages goes below; where a mesh was refined, what that proved."""
        alone = (self._refined.get(key, bound) for key, bound in self._alone.items())
        return min([self._closed, *self._refined.values(), *alone, *(one.seconds for one in self.results)])

    @property
    def pruned(self) -> int:
        """Candidates that were never solved: proven no better, or left open."""
        return sum(node.count for node in self._left) + sum(one.outcome.startswith("no better") for one in self.seen)

    @property
    def effort(self) -> float:
        """Nominal seconds of everything done so far."""
        return self._spent() + sum(WORK[what] * count for what, count in self.bounds.evaluator.work.items())

    @property
    def _incumbent(self) -> float:
        """Seconds to beat: of what fits, or is not known not to."""
        return min([self.to_beat, *(one.seconds for one in self.open[:1]), *(one.seconds for one in self.results)])

    @property
    def _cutoff(self) -> float:
        """Who takes so many seconds is no better than the incumbent by more than the gap: the one that was asked for, and one
        that widens to ``WIDEST`` while the second half of what the sweep may take is spent."""
        late = min(1.0, max(0.0, 2.0 * self.effort / (_PROVEN * self.limit) - 1.0))
        return self._incumbent * (1 - max(self.task.gap, late * WIDEST))

    # the way

    def free(self) -> None:
        """Solve the candidates whose axes may split anything. The mesh of nodes and their devices comes first. Where memory
        binds then (one device's program says so, or it kept a layout from being faster), others come as long as all took less
        than ``_SHAPES``: each may take seconds; the rest at the end, as far as there is time (``shapes``)."""
        self.freed = True
        task, cluster = self.task, self.task.cluster
        try:
            mirrored = pays_mirrored(task.graph, task.rules, task.pins)
            listed = free_candidates(
                task.graph, cluster, task.pins, mirrored, exchanged(task.graph, task.rules), task.foldable
            )
        except PinError as error:
            self._refused_free.append(error)
            return
        started = self.bounds.start([candidate for candidate, _ in listed])
        nodes = [replace(node, later=later) for node, (_, later) in zip(started, listed, strict=True)]
        first = [node for node in nodes if node.candidate.layout and is_topological(node.candidate.layout, cluster)]
        self._left += self._sweep(first, _INF)
        for node in (one for one in nodes if one not in first):
            if not (self.limited or self._one(node.candidate.microbatches).binds) or self._spent() < _SHAPES:
                self._left += self._sweep([node], _INF)
            else:
                self.bounds.counts.considered -= 1
                self.aside.append(node)

    def shapes(self) -> None:
        """Solve those that ``free`` left, as long as much of the limit is left, or some and a gap: where memory is short
        one may hold what others do not (a StableLM of 8 x 2,048 tokens on 2 x 8 V100: 134 ms a step without, 83 with them)."""
        told, closed, self._told, made = self._told, self._closed, False, len(self.results)
        for node in self.aside:
            gap = self.bound < self._incumbent * (1 - WIDEST)
            if self.effort > (_PROVEN if gap else _ALONE) * self.limit:
                break
            self._shape(node)
            self._closed = closed  # the certificate says that it is not of these, but of what is proven of the plan's own
        self._closed = min([closed, *(one.fitted.bound_seconds for one in self.results[made:][-1:])])
        self._told = told

    def _shape(self, node: Branch) -> None:
        """Solve it with as many micro-batches as the best without a pipeline, and with others from there (``walk``)."""
        alone = [(one.seconds, one.candidate.microbatches) for one in self.results if one.candidate.pp == 1]

        def crowded(count: int) -> bool:
            found = len(self._crowded) + len(self._refused_free)
            self._sweep(self.bounds.later(replace(node, later=(count,)), node.fewer), _INF)
            return len(self._crowded) + len(self._refused_free) > found

        walk((node.candidate.microbatches, *node.later), min(alone, default=(0.0, 0))[1], crowded)

    def begin(self) -> None:
        """Of the candidates of data and tensor ranks solve those without stages and the first dive, for good plans early."""
        try:
            evaluator = self.bounds.evaluator
            if evaluator.capacity <= 0:
                self._nearest = DoesNotFitError("the inputs fill the memory", 0.0)
                return
            task, graph = self.task, self.bounds.graph
            rules, mirrored = task.rules, pays_mirrored(graph, task.rules, task.pins)
            listed = candidates(
                graph, task.cluster, task.pins, len(evaluator.names), attended(graph, rules), mirrored, task.experts,
                exchanged(graph, rules), task.foldable,
            )
            start = self._roomy(self.bounds.start(listed))
            self._single_stage = [node for node in start if node.candidate.pp == 1]
            nodes = self._sweep(self._single_stage, _EARLY * self.limit, early=True)
            piped = self._first_dive([node for node in start if node.candidate.pp > 1])
            self._later = self._sweep(nodes, _ALONE * self.limit), piped
        except (PinError, PlanError) as error:
            self._refused = error

    def _roomy(self, nodes: list[Branch]) -> list[Branch]:
        """The candidates less those whose micro-batches are too large for the devices, whatever their layout."""
        fewest = min((node.candidate.microbatches for node in nodes), default=1)
        one, room, world = self._one(fewest), self.task.cluster.capacity_bytes, self.task.cluster.world
        found = list[Branch]()
        for node in nodes:
            pp, count = node.candidate.pp, node.candidate.microbatches
            if one.crowds(pp, fewest / count, room, world):
                self.bounds.counts.infeasible += len(node.virtual)
                self.bounds.miss(node, one.least_bytes if pp == 1 else one.widest * fewest / count * pp / world)
            else:
                found.append(node)
        return found

    def rest(self) -> None:
        """Solve all of them that ``begin`` left."""
        (nodes, piped), self._later = self._later, ([], [])
        self._swept = True
        try:
            deadline = max(_PROVEN * self.limit, self.effort + _REST * self.limit)
            self._left += self._sweep(self._climb(nodes + self._second_dive(piped)), deadline)
            if self._left and (not self._cut or min(self._left) < self._cut[0]):  # sharper bounds of these would prove nothing
                self._left = self._sweep(self._left, max(self.limit, deadline))
            self._sharpen()
        except (PinError, PlanError) as error:
            self._refused = error

    def blocks(self) -> None:
        """Solve block by block what has no pipeline and whose blocks, if they all keep their parameters alike, take little
        longer than the best; of what is found within the limit."""
        if not self._single_stage:
            return
        counts, left = replace(self.bounds.counts), len(self._left)  # these candidates were counted before
        try:
            nodes, self.unlike = self._nearly_best(self._incumbent * (1 + self.near))
            self._told = True
            for alike, node in nodes:
                if alike > self._incumbent * (1 + self.near):  # less than before, once one of them is better
                    break
                made = len(self.results)
                self._left += self._sweep([node], _INF)
                self.near = max([self.near, *(alike / one.seconds - 1 for one in self.results[made:])])
        except (PinError, PlanError) as error:
            self._refused = self._refused or error
        counts.considered += sum(len(node.virtual) for node in self._left[left:])  # but for those that stay open as layouts
        self.bounds.counts = counts

    def _nearly_best(self, near: float) -> tuple[list[tuple[float, Branch]], bool]:
        """The layouts without a pipeline on which blocks that are alike take less than ``near`` seconds, with these seconds,
        best first; whether these are all."""
        found, evaluator = dict[tuple[Layout, int], tuple[float, Branch]](), self.bounds.evaluator
        heap = list(self._single_stage)
        heapq.heapify(heap)
        while heap and heap[0].bound < near and self.effort <= _ALIKE * self.limit:
            node = heapq.heappop(heap)
            if node.level < Level.KEPT:
                for child in self.bounds.sharper(node, near):
                    heapq.heappush(heap, child)
                continue
            degrees, placement = degrees_of(node.candidate, node.shard), self.bounds.placement_of(node)
            try:
                alike = evaluator.run(node.candidate, degrees, node.zero, placement, cutoff=near).seconds
            except DoesNotFitError:
                continue
            one = self.bounds.on_layout(node)
            assert one.candidate.layout is not None
            key = one.candidate.layout, one.candidate.microbatches
            if alike < near:
                found[key] = min(found.get(key, (alike, one)), (alike, one))
        return sorted(found.values()), not heap or heap[0].bound >= near

    def take(
        self, found: Evaluation, made: Fitted | DoesNotFitError | NoBetterError | OutOfMemoryError, refined: bool
    ) -> None:
        """Put the plan of an evaluation in its place, or nothing if it does not fit or is not better; then solve what it had
        kept out. ``refined``: it is the best of all that its mesh and micro-batches can have, block by block."""
        self.open = [one for one in self.open if one is not found]
        key = found.degrees.mesh, found.candidate.microbatches
        if isinstance(made, Fitted | NoBetterError) and refined:  # blocks that may differ can be faster than they all alike
            self._refined[key] = min(self._refined.get(key, _INF), made.bound_seconds)
            self.limited |= made.limited
        elif isinstance(made, Fitted | NoBetterError):
            self._closed = min(self._closed, made.bound_seconds)
        if isinstance(made, Fitted):
            if refined:
                self.near = max(self.near, found.seconds / made.seconds - 1)
            counted = made.seconds if refined else found.seconds  # what is made block by block was counted so
            self.results.append(Result(found.candidate, str(found), made, counted))
        elif isinstance(made, DoesNotFitError):
            self._nearest = self._nearest or made
        elif isinstance(made, OutOfMemoryError):
            self._refused = self._refused or made
            if made.proven:  # only what is refined raises it
                self._refined.setdefault(key, _INF)
        if self._swept:
            self._left = self._sweep(self._left, _PROVEN * self.limit)
            self._sharpen()
        else:
            self._later = self._sweep(self._later[0], _ALONE * self.limit), self._later[1]

    def refusal(self) -> PinError | PlanError:
        """Why nothing was found: what does not fit goes before what cannot be."""
        nothing_fits = [error for error in self._refused_free if isinstance(error, OutOfMemoryError)]
        crowded, enough = self._nearest_crowded(min((error.least for error in nothing_fits), default=_INF))
        for _, candidate in takewhile(lambda one: one[0] < enough or not nothing_fits, enumerate(crowded)):
            try:
                assert candidate.layout is not None
                self._free(candidate.layout, candidate.microbatches, _INF, None)
            except OutOfMemoryError as error:
                nothing_fits.append(error)
                self._refused_free.append(error)
            except (PinError, PlanError, NoBetterError):
                continue
        if nothing_fits:
            return min(nothing_fits, key=lambda error: error.least)
        if (missed := self.bounds.missed(self._nearest.least if self._nearest else _INF)) is not None:
            with suppress(PlanError):  # of what was seen to be too much before it was placed
                self._solve(self.bounds.leanest(missed))
        if self._nearest is not None:
            return OutOfMemoryError.of_candidate(self._nearest, self.task.cluster, self.task.given_bytes)
        unclear: list[PinError | PlanError | None] = [*self._refused_free, self._refused, self.bounds.refused]
        clear = [error for error in unclear[-2:] if isinstance(error, PinError | OutOfMemoryError)]
        text = f"no layout of {self.task.cluster} runs this model under the pins ({self.task.pins}); change these, or the batch"
        return next((error for error in (*clear, *unclear) if error is not None), PlanError(text))

    def _nearest_crowded(self, least: float) -> tuple[list[Candidate], int]:
        """Free layouts never solved for their memory, once: some nearer than ``least`` bytes, how many, others if none runs."""
        crowded, self._crowded = sorted(self._crowded, key=lambda one: one[0]), []
        if not crowded or crowded[0][0] >= least:
            return [], 0
        first = dict.fromkeys((crowded[0][1], max(crowded, key=lambda one: one[1].microbatches)[1]))
        return [*dict.fromkeys((*first, *(candidate for _, candidate in crowded)))], len(first)

    def _first_dive(self, nodes: list[Branch]) -> list[Branch]:
        """Solve the candidate of least bound of every (pp, tensor, context, expert) under the simplest schedule, best first."""
        piped = [node for node in nodes if node.candidate.pp > 1]
        simple = min((node.candidate.simplicity for node in piped), default=None)
        left = [node for node in nodes if node.candidate.pp == 1 or node.candidate.simplicity != simple]
        split = [self.bounds.split(node, 1) for node in piped if node.candidate.simplicity == simple]
        chosen = [parts[0] for parts in split]
        left += [part for parts in split for part in parts[1:]]
        layouts: dict[tuple[int, ...], list[Branch]] = {}
        for node in chosen:
            one = node.candidate
            layouts.setdefault((one.pp, one.tensor, one.context, one.expert, one.folded), []).extend(self.bounds.tensor(node))
        first = sorted(min(group) for group in layouts.values())
        rest = [node for group in layouts.values() for node in sorted(group)[1:]]
        return left + rest + self._dive(first, self.effort + _DIVE * self.limit)

    def _second_dive(self, nodes: list[Branch]) -> list[Branch]:
        """Solve the best pipelines under other schedules, with half and twice the micro-batches, 1, 2, 4, ... stages a rank."""
        best = [*dict.fromkeys(pipeline_of(e.candidate) for e in self.solved if e.candidate.pp > 1)][:_NEAR]
        near = {(*one, count) for *one, given in best for count in (given // 2, given, given * 2)}
        fresh = [node for node in nodes if node.level < Level.KEPT and pipeline_of(node.candidate) in near]
        taken, left = {node.number for node in fresh}, list[Branch]()
        for like, deadline, worth in ((True, 0.0, _WORTH), (False, self.effort + _EARLY * self.limit, _MORE)):
            own = [node for node in fresh if (pipeline_of(node.candidate) in best) is like]
            single = [self.bounds.part(node, [v]) for node in own for v in node.virtual if v.bit_count() == 1]
            left += [self.bounds.part(n, v) for n in own if (v := [each for each in n.virtual if each.bit_count() > 1])]
            left += self._dive(single, max(_ALIKE * self.limit, deadline), worth)
        return [node for node in nodes if node.number not in taken] + left

    def _climb(self, nodes: list[Branch]) -> list[Branch]:
        """Price the parameters of pipelines near the best one, and of those near a better one that is found so."""
        best, before, deadline = self._best_pipeline, None, self.effort + _EARLY * self.limit
        while best is not None and best != before and self.effort <= deadline:
            near = [node for node in nodes if node.level < Level.KEPT and are_near(node.candidate, best)]
            taken = {node.number for node in near}
            nodes = [node for node in nodes if node.number not in taken]
            for node in sorted(near):
                parts = [node]
                while parts and parts[0].level < Level.KEPT and not self._hopeless(min(parts)) and self.effort <= deadline:
                    sharper = [child for part in parts for child in self.bounds.sharper(part, self._cutoff)]
                    parts = self._glanced(sharper, best)
                nodes += parts
            best, before = self._best_pipeline, best
        return nodes

    @property
    def _best_pipeline(self) -> Candidate | None:
        """Of those solved."""
        return next((one.candidate for one in self.solved if one.candidate.pp > 1), None)

    def _dive(self, nodes: Sequence[Branch], deadline: float, worth: float = 0.0) -> list[Branch]:
        """Solve some candidates best first, each in one of its ways to keep parameters, as long as one may be better than the
        incumbent by the part ``worth`` (and by more than the gap); what is left of them all."""
        heap, left, solved = list(nodes), list[Branch](), set[Candidate]()
        heapq.heapify(heap)
        while heap and self.effort <= deadline and heap[0].bound < min(self._cutoff, self._incumbent * (1 - worth)):
            node = heapq.heappop(heap)
            if node.candidate in solved:
                left.append(node)
                continue
            if node.level is Level.TIMED:
                children = self._solve(node)
                solved.add(node.candidate)
            else:
                self._report(node, self.effort / self.limit)
                children = self._glanced(self.bounds.sharper(node, self._cutoff))
            for child in children:
                heapq.heappush(heap, child)
        return left + heap

    def _hopeless(self, node: Branch) -> bool:
        """Whether nothing better than the incumbent, by more than the gap, can come of it."""
        return node.bound >= self._cutoff

    def _sweep(self, nodes: list[Branch], deadline: float, early: bool = False) -> list[Branch]:
        """Best first through some of the candidates; what is left of them, proven no better or out of time. ``early``: what is
        left is looked at again, so that it ends at the deadline even if nothing was found."""
        total = max(1, len(nodes))
        ready = [node for node in nodes if node.level >= Level.DIVIDED]
        heap = [node for node in nodes if node.level < Level.DIVIDED]
        heapq.heapify(heap)
        heapq.heapify(ready)
        while heap or ready:
            if self._hopeless(node := min(heap[:1] + ready[:1])):
                break
            if deadline < _INF and (early or self._incumbent < _INF) and self.effort > deadline:
                self.late |= not early
                break
            if node.level >= Level.DIVIDED:
                heapq.heappop(ready)
                for child in self._solve(node) if node.level is Level.TIMED else [self.bounds.time(node, self._cutoff)]:
                    heapq.heappush(ready if child.level >= Level.DIVIDED else heap, child)
                continue
            self._report(node, 1.0 - len(heap) / total)
            heapq.heappop(heap)
            if node.candidate.layout is not None:
                for child in self._solve_free(node):
                    heapq.heappush(heap, child)
                continue
            if node.level is Level.KEPT and node.candidate.pp == 1:  # there is nothing to cut, so nothing sharper
                self._solve(node)
                continue
            for child in self._glanced(self.bounds.sharper(node, self._cutoff)):
                heapq.heappush(ready if child.level >= Level.DIVIDED else heap, child)
        return heap + ready

    def _glanced(self, nodes: list[Branch], near: Candidate | None = None) -> list[Branch]:
        """The nodes less what of them was solved. Of a pipeline whose parameters were just priced that of least bound is cut at
        a glance, with each power of two of stages a rank; those that look better than the incumbent are solved, the best one
        first. ``near``: one that these are near to; at most twice as many stages a rank as it has are glanced at then, whatever
        cuts of others were like, and solved if they may be better once their cut is looked for."""
        if not nodes or nodes[0].level is not Level.KEPT or nodes[0].candidate.pp == 1:
            return nodes
        first = min(nodes)
        others, left = [node for node in nodes if node is not first], set(first.virtual)
        most = 2 * near.virtual_stages if near else math.inf
        single = [self.bounds.part(first, [v]) for v in first.virtual if v.bit_count() == 1 and v <= most]
        for seconds, virtual, one in sorted((self._at_a_glance(one, near is not None), one.virtual[0], one) for one in single):
            if seconds * (Glances.NEARER if near else 1.0) < self._incumbent:
                others += self._solve(replace(one, level=Level.TIMED))
                left.remove(virtual)
        return [*others, *([self.bounds.part(first, sorted(left))] if left else [])]

    def _at_a_glance(self, node: Branch, always: bool) -> float:
        """Seconds of a step, its cut not looked for; if not ``always``, inf where it is left for what ``Glances`` say."""
        if not always and not self._glances.may_beat(node.candidate, node.bound, self._incumbent):
            return _INF
        degrees, placement = degrees_of(node.candidate, node.shard), self.bounds.placement_of(node)
        try:
            seconds = self.bounds.evaluator.glance(node.candidate, degrees, node.zero, placement)
        except ScheduleError:
            return _INF
        self._glances.saw(node.candidate, node.bound, seconds)
        return seconds

    def _report(self, node: Branch, done: float) -> None:
        if self.progress is not None:
            self.progress(str(node.candidate), max(0.0, done))

    def _solve(self, node: Branch) -> list[Branch]:
        """Cut and simulate; of what was found, or of what was not, the bound is closed. What is beside it comes by itself."""
        evaluator, others, node = self.bounds.evaluator, self.bounds.parted(node), replace(node, beside=())
        degrees, placement = degrees_of(node.candidate, node.shard), self.bounds.placement_of(node)
        try:
            result = evaluator.run(node.candidate, degrees, node.zero, placement, cutoff=self._cutoff)
        except DoesNotFitError as error:
            self.bounds.counts.infeasible += 1
            if self._nearest is None or error.least < self._nearest.least:
                self._nearest = error
            if not error.proven:
                heapq.heappush(self._cut, node)
            return others
        self._rank(result)
        node = node.at(node.level, min(result.bound, result.seconds))
        if node.candidate.pp == 1:
            key = degrees.mesh, node.candidate.microbatches
            self._alone[key] = min(self._alone.get(key, _INF), node.bound)
        else:
            heapq.heappush(self._cut, node)
        return others

    def _sharpen(self) -> None:
        """Prove more of the pipelines that were solved, the least proven first, while they are what the bound is of."""
        while self._cut and self.effort <= self.limit:
            node, others = self._cut[0], min([self._closed, self._cutoff, *(other.bound for other in self._left)])
            last = Sharp.LONG if self.effort + _LONG <= self.limit else Sharp.STAGES
            if node.bound >= others or node.level is not Level.TIMED or node.sharp >= last:
                break
            if node.sharp is Sharp.RANKS and not node.closely:  # before the dearest proof
                heapq.heapreplace(self._cut, replace(node, closely=True))
                self._solve_closely(node)
                continue
            heapq.heapreplace(self._cut, self.bounds.time(node, self._cutoff, Sharp(node.sharp + 1)))

    def _solve_closely(self, node: Branch) -> None:
        """Cut one again that was solved, through whatever is slower than the incumbent to what is better."""
        degrees, placement = degrees_of(node.candidate, node.shard), self.bounds.placement_of(node)
        with suppress(DoesNotFitError):
            found = self.bounds.evaluator.run(node.candidate, degrees, node.zero, placement)
            if found.seconds < self._incumbent * (1 - TIE):
                self.bounds.counts.infeasible -= all(str(one) != str(found) for one in self.solved)
                self._rank(found)

    def _rank(self, found: Evaluation) -> None:
        for ranking in (self.solved, self.open):
            ranking[:] = (one for one in (*ranking, found) if one is found or str(one) != str(found))
            ranking.sort(key=lambda e: (e.seconds, e.candidate.pp, e.candidate.tensor, e.zero))

    def _solve_free(self, node: Branch) -> list[Branch]:
        """Solve a candidate with a free layout; the one with more micro-batches, where memory binds and they may help."""
        candidate, counts, one = node.candidate, self.bounds.counts, self._one(node.candidate.microbatches)
        assert candidate.layout is not None
        seen = SeenCandidate(str(candidate.layout.mesh), candidate.microbatches)
        told = list[SeenCandidate]() if self._told else self.seen  # their meshes were told before, with blocks alike,
        counts.considered -= self._told  # and counted
        if one.crowded:
            told.append(replace(seen, outcome="does not fit"))
            self._crowded.append((one.least_bytes, candidate))
            counts.infeasible += not self._told
            return self.bounds.later(node, node.fewer)
        try:
            floor = node.bound if one.binds else None
            made = self._free(candidate.layout, candidate.microbatches, self._incumbent, floor)
        except (PinError, PlanError) as error:
            full = isinstance(error, OutOfMemoryError)
            told.append(replace(seen, outcome="does not fit" if full else str(error)))
            counts.infeasible += not self._told
            if isinstance(error, OutOfMemoryError) and not error.proven:
                self._narrower(node, node.bound)
            more = full or (candidate.microbatches > 1 and self.task.pins.microbatches is None)
            self._refused_free += [error] * (full or not more)
            return self.bounds.later(node, node.fewer) if more else []
        except NoBetterError as error:
            told.append(replace(seen, outcome=f"no better: {error}"))
            bound, seconds, limited = max(error.bound_seconds, node.bound), error.bound_seconds, error.limited
        else:
            told.append(replace(seen, step_seconds=made.seconds))
            self.results.append(Result(candidate, str(candidate), made, made.seconds))
            bound, seconds, limited = made.bound_seconds, made.seconds, made.limited
        self._closed, self.limited = min(self._closed, bound), self.limited or limited
        if limited:
            self._narrower(node, bound)
        return self._more(node, seconds, limited)

    def _narrower(self, node: Branch, bound: float) -> None:
        """Of free axes on which the solver within memory leaves open what is faster than the incumbent (``bound``), those that
        split samples or anything else: far fewer choices. What is proven of all is of these, too."""
        one, narrower = node.candidate, node.candidate.layout.narrower() if node.candidate.layout is not None else []
        while narrower and bound < self._incumbent * (1 - WIDEST) and self.effort <= _ALIKE * self.limit:
            layout = narrower.pop(0)
            with suppress(PinError, PlanError, NoBetterError):
                made = self._free(layout, one.microbatches, self._incumbent, node.bound)
                self.results.append(Result(replace(one, layout=layout), str(one), made, made.seconds))
                self._closed = min(self._closed, bound)  # where the free axes raised, nothing was kept of what is proven

    def _more(self, node: Branch, seconds: float, limited: bool) -> list[Branch]:
        """A free layout with more micro-batches, of which this count takes so many seconds at least: where memory keeps it from
        being faster, or what was measured is slow in large pieces. Of one that did not nearly help no multiple is tried."""
        if self.task.falls > 1.0 or (limited and seconds < node.fewer * _NEARLY):
            return self.bounds.later(node, min(seconds, node.fewer))
        others = tuple(count for count in node.later if limited and count % node.candidate.microbatches)
        return self.bounds.later(replace(node, later=others), node.fewer)
