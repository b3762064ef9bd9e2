"""The search: from a task to the plan of least predicted time whose program fits.

    candidates  ->  bound  ->  placement, cut  ->  plan  ->  fits(plan)  ->  the best plan

A candidate is a number of stages with a schedule, micro-batches, data and tensor ranks, and a way to keep parameters
(``candidates``); having no pipeline is one of them, and so is a mesh whose axes may split anything (``layouts``). The sweep
bounds them and solves those that could be best, counting memory (``sweep``). The best of them becomes a plan, without a
pipeline after it was refined block by block (``blockwise``), and is held to the memory that its program needs
(``fitting``). If it does not fit, or takes longer than was counted, what it had kept out is looked at again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from meshwright.compiler.placement.choices import attended, exchanged, pays_mirrored
from meshwright.compiler.search.blockwise import TIE, LayoutMemory, OneDevices, solve_layout
from meshwright.compiler.search.bounds import CandidateBounds
from meshwright.compiler.search.candidates import Layout, degrees_of, layout_of, trained_numels, under_pins
from meshwright.compiler.search.certificate import certificate
from meshwright.compiler.search.errors import DoesNotFitError, NoBetterError, OutOfMemoryError
from meshwright.compiler.search.evaluate import Evaluation
from meshwright.compiler.search.fitting import Counted, Fitted, Result, fitted, prediction_of
from meshwright.compiler.search.layouts import free_candidates
from meshwright.compiler.search.plans import Plans
from meshwright.compiler.search.sweep import Sweep
from meshwright.compiler.search.task import Fits, Progress, Task, Timing
from meshwright.compiler.structure.dims import batch_size
from meshwright.compiler.structure.units import find_layers
from meshwright.cost.cluster import Cluster
from meshwright.cost.spread import spread
from meshwright.errors import MeshwrightError
from meshwright.ir.declared.operator import PIECES
from meshwright.ir.mesh import PP
from meshwright.ir.pins import PinError, Pins, is_laid_out, nearest
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.prediction import Certificate
from meshwright.ir.quantities import bytes_text
from meshwright.ir.schedules import illegal_combination

SECONDS = 20.0
REMEDY_SECONDS = 5.0
"""Nominal limits of a search: for the plan, and for what would fit if a pin were dropped."""
_LARGE, _LONGER = 1.6e11, 1.6
"""With more parameters outside of mixtures than these the limits grow as their root does, so many times at most (chosen: of
Llama 3 405B on 2,048 V100 a plan 12 % faster is found behind the usual limit, and a run of such a model is dear)."""
_LAYOUTS, _STAGED = 0.5, 0.4
"""The parts of the limit that layouts solved block by block may take together, and pipelines of what is cut for them alone
(chosen)."""
TIED = 0.02
"""Certificates that are no wider tell no two plans apart: of these the one is taken that loses least in the worst case."""
_FREED, _SPARE = 0.02, 1
"""What recomputes may take less by this part once its memory is replayed; so many are made into plans for it (chosen)."""
_TIE = 1e-4
"""A plan made later must be faster by this part."""
_TRIED, _MESHES = 24, 6
"""Of so many settings near pins that leave nothing every operator is looked at, on so many of the meshes that each leaves."""
_DROPPED = (
    "recompute", "zero", "microbatches", "micro_batch", "shard", "sequence_parallel", "stage_cuts", "virtual_stages", "stages",
    "schedule", "tp", "dp", "ulysses", "attention", "cp", "pp",
)
"""Pins that an error tries to do without, in this order."""


def find_plan(task: Task, fits: Fits, *, timing: Timing, progress: Progress | None = None) -> Plan:
    """The plan of least time that fits. Raises OutOfMemoryError with the nearest change that would fit, PinError, PlanError."""
    try:
        return best_plan(task, fits, SECONDS, timing=timing, progress=progress)
    except OutOfMemoryError as error:
        raise _with_remedy(error, task, fits, timing) from None


def best_plan(
    task: Task, fits: Fits, limit: float, *, timing: Timing, progress: Progress | None = None, to_beat: float = math.inf
) -> Plan:
    """The plan of least time that fits, within ``limit`` nominal seconds. ``to_beat``: seconds of a plan found elsewhere. Where
    no two layers are alike they are told apart for a pipeline alone (``structure.units``): what has stages is a search of its
    own then. Raises NoBetterError if none is found that is faster (what is so by less than the gap may be left),
    OutOfMemoryError, PinError, PlanError."""
    staged = _with_stages(task)
    if staged is None:
        return _best_plan(task, fits, limit, timing, progress, to_beat)
    plan: Plan | None = None
    refused: NoBetterError | OutOfMemoryError | PinError | PlanError | None = None
    try:
        plan = _best_plan(task, fits, limit, timing, progress, to_beat)
    except (NoBetterError, OutOfMemoryError, PinError, PlanError) as error:
        refused = error
    seconds = to_beat if plan is None else prediction_of(plan).step_seconds
    bound = math.inf
    try:
        other = _best_plan(staged, fits, _STAGED * limit, timing, progress, seconds)
    except NoBetterError as error:
        bound = error.bound_seconds
    except OutOfMemoryError as error:
        refused = refused if isinstance(refused, NoBetterError | OutOfMemoryError) else error  # says more than what cannot be
    except (PinError, PlanError):  # nothing with stages can be
        pass
    else:
        alone = refused.bound_seconds if isinstance(refused, NoBetterError) else math.inf
        return bounded(other, alone if plan is None else proof_of(plan).bound_seconds, task.gap)
    if plan is not None:
        return bounded(plan, bound, task.gap)
    assert refused is not None
    if isinstance(refused, NoBetterError):
        raise NoBetterError(min(refused.bound_seconds, bound), refused.limited)
    raise refused if bound == math.inf else NoBetterError(bound, limited=True)


def _with_stages(task: Task) -> Task | None:
    """The same with two stages or more, where only a pipeline cuts its graph and the pins leave that open; else None."""
    pins, world = task.pins, task.cluster.world
    if task.graph.blocks or pins.axes is not None or pins.needs_stages(world):
        return None
    ranks = world // math.prod(size or 1 for size in (pins.dp, pins.tp, pins.cp))
    degrees = tuple(pp for pp in range(2, ranks + 1) if ranks % pp == 0 and pins.allows("pp", pp))
    if not degrees or not find_layers(task.graph).blocks:
        return None
    return task.under(replace(pins, among={**pins.among, "pp": degrees}))


def bounded(plan: Plan, bound: float, gap: float) -> Plan:
    """A plan of which another search says that nothing else takes less than ``bound`` seconds."""
    proof = replace(proof_of(plan), bound_seconds=min(bound, proof_of(plan).bound_seconds))
    return replace(plan, certificate=replace(proof, status="gap") if proof.status == "optimal" and proof.gap > gap else proof)


def proof_of(plan: Plan) -> Certificate:
    """The certificate of a plan that a search made, which has one."""
    assert plan.certificate is not None
    return plan.certificate


def _best_plan(
    task: Task, fits: Fits, limit: float, timing: Timing, progress: Progress | None, to_beat: float
) -> Plan:
    """``best_plan`` of what the task's graph can be cut into."""
    _check_combination(task.pins, task.cluster.world)
    total, experts = trained_numels(task.graph, task.rules, task.structure.stacked.products)
    longer = min(_LONGER, max(1.0, math.sqrt((total - experts) / _LARGE)))
    limit *= longer
    refined = Refined(task, fits, timing, LayoutMemory(limit=_LAYOUTS * limit))
    sweep = Sweep(
        task, refined.solve, OneDevices(task, fits), spent=lambda: refined.known.spent, limit=limit,
        progress=progress, to_beat=to_beat,
    )
    try:
        return _swept(sweep, refined, fits, timing)
    finally:
        timing.searched += sweep.effort / longer


def _swept(sweep: Sweep, refined: Refined, fits: Fits, timing: Timing) -> Plan:
    """The best that a sweep finds."""
    task, to_beat = sweep.task, sweep.to_beat
    alone = not (task.pins.needs_stages(task.cluster.world) or task.pins.partly)
    swept = not _one_layout(task, task.pins)
    if swept:
        sweep.begin()
        timing.mark("search")
        _made(sweep, fits, timing, refined)  # an incumbent whose memory was replayed, for what comes next to beat
    if alone:
        sweep.free()
    sweep.blocks()
    if swept:
        sweep.rest()
        timing.mark("search")
    if alone:
        sweep.shapes()
    best = _made(sweep, fits, timing, refined, spare=_SPARE)
    if best is None and to_beat == math.inf:
        raise sweep.refusal()
    if best is None or best.seconds >= to_beat:
        raise NoBetterError(min(sweep.bound, to_beat), sweep.limited)
    return _chosen(best, sweep, fits, timing, refined)


def _one_layout(task: Task, pins: Pins) -> bool:
    """Whether pins leave one mesh at most and no stages, or axes that may split anything: then there is nothing to sweep."""
    world = task.cluster.world
    if pins.needs_stages(world) or pins.partly:
        return False
    degrees = (pins.dp or 1) * (pins.tp or 1) * (pins.cp or 1)
    return pins.free_axes or (degrees == world and (task.experts == 1 or pins.says("ep")))


@dataclass
class Refined:
    """Solves layouts without a pipeline block by block, each with so many micro-batches once.

    known: what is known of layouts by it
    made: what became of those that were solved within memory, and what they had to beat
    """

    task: Task
    fits: Fits
    timing: Timing
    known: LayoutMemory = field(default_factory=LayoutMemory)
    made: dict[tuple[Layout, int], tuple[float, Fitted | NoBetterError | OutOfMemoryError]] = field(default_factory=dict)

    def solve(self, layout: Layout, microbatches: int, to_beat: float, floor: float | None = None) -> Fitted:
        """The best of a layout: evaluations that differ in how they keep parameters have the same. Raises what
        ``solve_layout`` does; NoBetterError for one that was made before, and where axes that may split anything, of the same
        sizes in the same order, are proven to take too long."""
        beaten, before = self.made.get((layout, microbatches), (0.0, None))
        if before is None:
            self._check_wider(layout, microbatches, to_beat)
        if isinstance(before, Fitted):
            raise NoBetterError(before.bound_seconds, before.limited)
        if before is not None and (isinstance(before, OutOfMemoryError) or to_beat <= beaten):
            raise before
        try:
            made = solve_layout(self.task, layout, microbatches, self.fits, self.timing, to_beat, self.known, floor)
        except (NoBetterError, OutOfMemoryError) as error:
            self.made[layout, microbatches] = to_beat, error
            if isinstance(error, OutOfMemoryError):
                self.known.crowded.add(layout)
            raise _bare(error) from None
        self.made[layout, microbatches] = to_beat, made
        return made

    def _check_wider(self, layout: Layout, microbatches: int, to_beat: float) -> None:
        """Raise NoBetterError if what was solved with wider roles on axes of these sizes proves that nothing here is faster."""
        enough = to_beat * (1 - TIE) * (1 - self.task.gap)
        for (wider, count), (_, made) in self.made.items() if layout.is_narrow else ():
            same = count == microbatches and wider.is_free and wider.sizes == layout.sizes
            if same and not isinstance(made, OutOfMemoryError) and made.bound_seconds >= enough:
                raise NoBetterError(made.bound_seconds, made.limited)


def _bare(error: NoBetterError | OutOfMemoryError) -> NoBetterError | OutOfMemoryError:
    """The error without the frames it came through: they hold the problem that was solved, and would as long as it is known."""
    error.__context__ = None
    return error.with_traceback(None)


def _made(sweep: Sweep, fits: Fits, timing: Timing, refined: Refined, spare: int = 0) -> Result | None:
    """Of what the sweep found that of least time, made into a plan; None if there is none. ``spare``: so many that are counted
    slower by ``_FREED`` at most are made too, if they recompute: their programs may leave room for less."""
    plans = Plans(sweep.task)
    best: Result | None = None
    for one in sweep.results:
        best = one if best is None or one.seconds < best.seconds * (1 - 1e-9) else best
    while sweep.open:
        to_beat = sweep.to_beat if best is None else min(best.seconds, sweep.to_beat)
        found = sweep.open[0]
        if found.seconds >= to_beat:
            close = (one for one in sweep.open if one.seconds < to_beat * (1 + _FREED) and _recomputes(one, sweep))
            closest = next(close, None) if spare else None
            if closest is None:
                break
            found, spare = closest, spare - 1
        try:
            made = _plan_of(found, sweep, plans, fits, timing, to_beat, refined)
            sweep.take(found, made, found.candidate.pp == 1)
            if best is None or made.seconds < best.seconds * (1 - _TIE):
                best = sweep.results[-1]
        except (DoesNotFitError, NoBetterError, OutOfMemoryError) as error:
            sweep.take(found, error, found.candidate.pp == 1)
        timing.mark("plan")
    return best


def _recomputes(one: Evaluation, sweep: Sweep) -> bool:
    """Whether a pipeline recomputes more than it must."""
    return one.candidate.pp > 1 and set(one.recompute) != {sweep.task.recompute[0]}


def _chosen(best: Result, sweep: Sweep, fits: Fits, timing: Timing, refined: Refined) -> Plan:
    """The plan that is handed out, with its certificate."""
    safest = _safest(best, sweep, fits, timing, refined)
    plan = replace(safest.fitted.plan, certificate=certificate(safest, sweep))
    return plan if safest is best else replace(plan, notes=(*plan.notes, _preferred(safest, best, sweep.task.cluster)))


def _safest(best: Result, sweep: Sweep, fits: Fits, timing: Timing, refined: Refined) -> Result:
    """Of the plans that the certificate would not tell from the best (``TIED``), the one that loses least in the worst case: if
    it takes as long as such plans took at most, and another as short as its kind did (``cost.spread``). One that was solved is
    made into a plan for it, if it would be the one; plans of one kind have one interval, so that the fastest stays."""
    cluster, pins = sweep.task.cluster, sweep.task.pins
    pieces = pins.loss_rows is None and any(op.target == PIECES for op in sweep.task.graph.ops)
    tied = TIED - (sweep.task.gap if pieces else 0.0)  # the rest is for what all logits at once may spare (``piecewise``)
    within = max(best.seconds, sweep.bound / (1 - tied))
    made = [one for one in sweep.results if one.seconds <= within]
    known: list[tuple[Result | Evaluation, Interval]] = [(one, _interval(one, cluster)) for one in made]
    known += [(one, _interval(one, cluster)) for one in sweep.open if one.seconds <= within]
    if len({interval.factors for _, interval in known}) < 2 or not made:
        return best
    losses = [(_loss(number, known), one.seconds, number) for number, (one, _) in enumerate(known)]
    found = known[min(losses)[2]][0]
    if isinstance(found, Result):
        return found
    try:
        made_now = _plan_of(found, sweep, Plans(sweep.task), fits, timing, within, refined)
    except (DoesNotFitError, NoBetterError, OutOfMemoryError):
        return best
    result = Result(found.candidate, str(found), made_now, found.seconds)
    again = [(best, _interval(best, cluster)), (result, _interval(result, cluster))]
    return result if result.seconds <= within and _loss(1, again) < _loss(0, again) else best


@dataclass(frozen=True)
class Interval:
    """Seconds of a step: where most runs of its kind came out; ``factors``: of the prediction, which tell kinds apart."""

    low: float
    high: float
    factors: tuple[float, float]


def _interval(one: Result | Evaluation, cluster: Cluster) -> Interval:
    mesh = one.fitted.plan.mesh if isinstance(one, Result) else one.degrees.mesh
    likely = spread(cluster, mesh)
    return Interval(likely.low * one.seconds, likely.high * one.seconds, (likely.low, likely.high))


def _loss(number: int, known: Sequence[tuple[Result | Evaluation, Interval]]) -> float:
    """Seconds that one of some plans may take more than the best of the others."""
    others = [interval.low for at, (_, interval) in enumerate(known) if at != number]
    return known[number][1].high - min(others)


def _preferred(chosen: Result, best: Result, cluster: Cluster) -> str:
    """Why a plan is taken that is not the fastest predicted."""
    own, other = _interval(chosen, cluster), _interval(best, cluster)
    return (f"taken before {best.name}, predicted {chosen.seconds / best.seconds - 1:.1%} faster: the search tells no such two "
            f"apart, and runs like that one took {other.factors[0]:.2f} to {other.factors[1]:.2f} times what is predicted, "
            f"runs like this {own.factors[0]:.2f} to {own.factors[1]:.2f} times")


def _plan_of(
    found: Evaluation, sweep: Sweep, plans: Plans, fits: Fits, timing: Timing, to_beat: float, refined: Refined
) -> Fitted:
    """The plan of an evaluation, refined if it can be. Raises OutOfMemoryError, DoesNotFitError, NoBetterError."""
    task, evaluator = sweep.task, sweep.bounds.evaluator
    if found.candidate.pp == 1:
        layout = layout_of(found.candidate, found.degrees)
        return refined.solve(layout, found.candidate.microbatches, to_beat)

    proven = list[tuple[float, float]]()

    def counted(one: Evaluation, limit: float) -> Counted:
        recomputes_nothing, bound = set(one.recompute) == {task.recompute[0]}, one.bound
        wider = [known for capacity, known in proven if capacity >= limit]  # what holds within more memory holds within less
        if limit <= evaluator.capacity:  # what is proven of it stands in the sweep, which may sharpen it
            bound = one.seconds
        elif not wider:
            what = one.candidate, one.degrees, one.zero, one.placement
            bound = max(bound, evaluator.relaxed(*what, capacity=limit))
            bound = evaluator.timed(*what, bound, one.seconds, limit)
            proven.append((limit, bound))
        evaluator.work["operator of a plan"] += len(task.graph.ops)
        return Counted(plans.of(one), limit, True, min(max(bound, *wider, 0.0), one.seconds), "gap", settled=recomputes_nothing)

    def within(limit: float) -> Counted:
        return counted(evaluator.run(found.candidate, found.degrees, found.zero, found.placement, capacity=limit), limit)

    return fitted(counted(found, evaluator.capacity), within, fits, task.cluster)


def _check_combination(pins: Pins, world: int) -> None:
    """Raise PinError for pins that torch's schedules run wrong together; what is not pinned the search leaves out itself."""
    if pins.schedule is None:
        return
    several = (pins.cp or 1) * (pins.dp or world // ((pins.pp or world) * (pins.tp or 1))) > 1
    zero = pins.zero if several and pins.zero is not None else 0
    reason = illegal_combination(pins.schedule, zero=zero, recompute=pins.recompute or "none")
    if reason is not None:
        raise PinError(reason)


def _with_remedy(error: OutOfMemoryError, task: Task, fits: Fits, timing: Timing) -> OutOfMemoryError:
    """The error with the nearest change that would fit: the loss alone, a pin dropped, a smaller batch, more devices."""
    pins, graph = task.pins, task.graph
    returned = sum(graph.values[name].bytes_ for name in set(graph.outputs)) / task.cluster.world
    if error.least - returned <= error.capacity:
        return error.with_remedy("if only the loss is needed (no logits), give loss_fn=mw.loss_alone: what the model returns "
                                 f"for the whole batch takes {bytes_text(returned)} of it at least")
    for name in _DROPPED:
        if getattr(pins, name) is None and name not in pins.among and name not in pins.most:
            continue
        try:
            plan = best_plan(task.under(pins.without(name)), fits, REMEDY_SECONDS, timing=timing)
        except (PlanError, PinError):
            continue
        need = bytes_text(prediction_of(plan).bytes_per_rank)
        return error.with_remedy(f"without the pin {pins.shown(name)} it fits in {need}")
    return error.with_remedy(error.smaller(batch_size(task.graph), task.cluster.world))


def with_nearest(error: PinError | PlanError, task: Task, check: Callable[[Pins], None]) -> PinError | PlanError:
    """The error with the nearest pins that leave something to run, of a task whose own leave nothing; the error itself where
    they do. What the error itself calls legal, which is so whatever else is pinned, gives way to it. ``check``: raises PinError
    for pins that no model can have on these devices."""
    near = _Near(task, check)
    if near.runs(task.pins):
        return error
    words = nearest(task.pins, task.cluster.world, batch_size(task.graph), near.runs)
    return type(error)(f"{str(error).partition('; nearest legal: ')[0]}; nearest legal setting: {words}") if words else error


@dataclass
class _Near:
    """Pins near those of a task: do they leave a candidate on whose mesh every operator has a choice?

    check: raises PinError for pins that no model can have on these devices
    tried: settings that left a candidate, whose operators were looked at
    bounds: by whether the pins need stages
    accumulated: whether the model runs in so many micro-batches of so many data ranks
    """

    task: Task
    check: Callable[[Pins], None]
    tried: int = 0
    bounds: dict[bool, CandidateBounds] = field(default_factory=dict)
    accumulated: dict[tuple[int, int], bool] = field(default_factory=dict)

    def runs(self, pins: Pins) -> bool:
        """Whether the pins leave something that runs."""
        if self.tried > _TRIED:
            return False
        try:
            self.check(pins)
            axes, pins = pins.axes, pins.by_degrees()
            _check_combination(pins, self.task.cluster.world)
            found = (one for one in self._layouts(pins) if axes is None or pins.free_axes or _as_pinned(axes, one[0]))
            some = [*itertools.islice(found, _MESHES)]
            self.tried += bool(some)
            return any(self._has_choices(pins, layout, count) for layout, count in some)
        except MeshwrightError:
            return False

    def _layouts(self, pins: Pins) -> Iterator[tuple[Layout, int]]:
        """The meshes of a stage that the pins leave, each with a number of micro-batches, the first ones."""
        task = self.task
        graph, rules, cluster = task.graph, task.rules, task.cluster
        if task.experts % (pins.ep or 1):
            return
        mirrored, near = pays_mirrored(graph, rules, pins), exchanged(graph, rules)
        if not (pins.needs_stages(cluster.world) or pins.partly):
            with suppress(PinError):
                for candidate, _ in free_candidates(graph, cluster, pins, mirrored, near, task.foldable):
                    assert candidate.layout is not None
                    yield candidate.layout, candidate.microbatches
        if _one_layout(task, pins):
            return
        units, seen = len(self._bounds(pins).placements.folded.positions), set[tuple[Layout, int]]()
        for one in under_pins(pins, batch_size(graph), cluster, units, attended(graph, rules), mirrored, task.experts, near,
                              task.foldable):
            found = layout_of(one, degrees_of(replace(one, pp=1), pins.shard or one.data)), one.microbatches
            if found not in seen and self._accumulates(pins, one.microbatches, one.data):
                seen.add(found)
                yield found

    def _bounds(self, pins: Pins) -> CandidateBounds:
        staged = pins.needs_stages(self.task.cluster.world)
        if staged not in self.bounds:
            self.bounds[staged] = CandidateBounds(self.task.under(pins))
        return self.bounds[staged]

    def _accumulates(self, pins: Pins, microbatches: int, ranks: int) -> bool:
        if (microbatches, ranks) not in self.accumulated:
            try:
                self._bounds(pins).placements.accumulate(microbatches, ranks)
                self.accumulated[microbatches, ranks] = True
            except PlanError:
                self.accumulated[microbatches, ranks] = False
        return self.accumulated[microbatches, ranks]

    def _has_choices(self, pins: Pins, layout: Layout, microbatches: int) -> bool:
        try:
            self._bounds(pins).placements.check(layout.mesh, layout.roles, microbatches, pins, layout.folded)
        except MeshwrightError:
            return False
        return True


def _as_pinned(axes: Mapping[str, int], layout: Layout) -> bool:
    """Whether the mesh of a stage has the pinned axes in their order; stages are the outermost."""
    outside = [axis for axis, size in axes.items() if size > 1 and axis == PP]
    several = [axis for axis, size in axes.items() if size > 1]
    inner = {axis: size for axis, size in axes.items() if axis != PP}
    return several[: len(outside)] == outside and is_laid_out(inner, layout.mesh)
