"""The search: from a task to the plan of least predicted time whose program fits.

    candidates  ->  bound  ->  placement, cut  ->  plan  ->  fits(plan)  ->  the best plan

A candidate is a number of stages with a schedule, micro-batches, data and tensor ranks, and a way to keep parameters
(``candidates``); having no pipeline is one of them, and so is a mesh whose axes may split anything (``layouts``). The sweep
bounds them and solves those that could be best, counting memory (``sweep``). The best of them becomes a plan, without a
pipeline after it was refined block by block (``blockwise``), and is held to the memory that its program needs
(``fitting``). If it does not fit, or takes longer than was counted, what it had kept out is looked at again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.compiler.search.blockwise import LayoutMemory, one_device, solve_layout
from meshwright.compiler.search.candidates import Candidate, Layout
from meshwright.compiler.search.certificate import certificate
from meshwright.compiler.search.errors import DoesNotFitError, NoBetterError, OutOfMemoryError
from meshwright.compiler.search.evaluate import Evaluation
from meshwright.compiler.search.fitting import Counted, Fitted, fitted, prediction_of
from meshwright.compiler.search.plans import Plans
from meshwright.compiler.search.sweep import Result, Sweep
from meshwright.compiler.search.task import Fits, Progress, Task, Timing
from meshwright.compiler.structure.dims import batch_size
from meshwright.cost.cluster import Cluster
from meshwright.cost.spread import spread
from meshwright.ir.mesh import role_of
from meshwright.ir.pins import PinError, Pins
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.quantities import bytes_text
from meshwright.ir.schedules import illegal_combination

SECONDS = 18.0
REMEDY_SECONDS = 5.0
"""Nominal limits of a search: for the plan, and for what would fit if a pin were dropped."""
FREE_DEVICES = 8
"""Up to so many devices, meshes whose axes may split anything are candidates; on more they take too long to solve."""
REFINED_DEVICES = 64
"""Up to so many devices, a winner without a pipeline is refined; on more its blocks take too long to solve."""
TIED = 0.02
"""Certificates that are no wider tell no two plans apart: of these the one is taken that loses least in the worst case."""
_TIE = 1e-4
"""A plan made later must be faster by this part."""
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


def best_plan(task: Task, fits: Fits, limit: float, *, timing: Timing, progress: Progress | None = None) -> Plan:
    """The plan of least time that fits, within ``limit`` nominal seconds. Raises OutOfMemoryError, PinError, PlanError."""
    _check_combination(task)

    known = LayoutMemory()

    def free(candidate: Candidate, to_beat: float, limited_too: bool, floor: float | None) -> Fitted:
        assert candidate.layout is not None
        return solve_layout(task, candidate.layout, candidate.microbatches, fits, timing, to_beat, limited_too, known, floor)

    sweep = Sweep(task, free, lambda count: one_device(task, count, fits), limit=limit, progress=progress)
    world, pins = task.cluster.world, task.pins
    staged, alone = _may_have_stages(pins, world) or pins.partly, not (pins.needs_stages(world) or pins.partly)
    looked = alone and (world <= FREE_DEVICES or not staged)
    if looked:
        sweep.free(limited_too=not staged)
    if staged:
        sweep.staged()
        timing.mark("search")
    refined = Refined(known)
    best = _made(sweep, fits, timing, refined)
    if staged and alone and (looked or (best is None and not isinstance(sweep.refusal(), OutOfMemoryError))):
        sweep.free()
        best = _made(sweep, fits, timing, refined)
    shared = task.experts > 1 and not pins.says("ep")
    if not staged and not pins.free_axes and (shared if best is None else _is_open(best)):
        sweep.staged()  # meshes of data and tensor ranks are solved sooner than those of any axes, and alone share out experts
        best = _made(sweep, fits, timing, refined)
    if best is None:
        raise sweep.refusal()
    return best


def _is_open(plan: Plan) -> bool:
    """Whether a faster plan may exist that its certificate would tell apart."""
    return plan.certificate is not None and plan.certificate.gap > TIED


@dataclass
class Refined:
    """What became of meshes and micro-batches without a pipeline that were refined block by block, and what is known of
    layouts by it."""

    known: LayoutMemory
    made: dict[tuple[Layout, int], Fitted | NoBetterError | OutOfMemoryError] = field(default_factory=dict)


def _made(sweep: Sweep, fits: Fits, timing: Timing, refined: Refined) -> Plan | None:
    """The plan of least time of what the sweep found, with its certificate; None if there is none."""
    plans = Plans(sweep.task)
    best: Result | None = None
    for one in sweep.results:
        best = one if best is None or one.seconds < best.seconds * (1 - 1e-9) else best
    while sweep.open and (best is None or sweep.open[0].seconds < best.seconds):
        found = sweep.open[0]
        try:
            to_beat = math.inf if best is None else best.seconds
            made = _plan_of(found, sweep, plans, fits, timing, to_beat, refined)
            sweep.take(found, made, _refines(found, sweep.task))
            if best is None or made.seconds < best.seconds * (1 - _TIE):
                best = sweep.results[-1]
        except (DoesNotFitError, NoBetterError, OutOfMemoryError) as error:
            sweep.take(found, error, _refines(found, sweep.task))
        timing.mark("plan")
    if best is None:
        return None
    safest = _safest(best, sweep, plans, fits, timing, refined)
    plan = replace(safest.fitted.plan, certificate=certificate(safest, sweep))
    return plan if safest is best else replace(plan, notes=(*plan.notes, _preferred(safest, best, sweep.task.cluster)))


def _safest(
    best: Result, sweep: Sweep, plans: Plans, fits: Fits, timing: Timing, refined: Refined
) -> Result:
    """Of the plans that the certificate would not tell from the best (``TIED``), the one that loses least in the worst case: if
    it takes as long as such plans took at most, and another as short as its kind did (``cost.spread``). One that was solved is
    made into a plan for it, if it would be the one; plans of one kind have one interval, so that the fastest stays."""
    cluster = sweep.task.cluster
    within = max(best.seconds, sweep.bound / (1 - TIED))
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
        made_now = _plan_of(found, sweep, plans, fits, timing, within, refined)
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
    if _refines(found, task):
        mesh = found.degrees.mesh
        layout = Layout(mesh, {axis: role_of(axis) for axis in mesh.axes}, found.candidate.folded)
        return _refined(sweep, layout, found.candidate.microbatches, fits, timing, to_beat, refined)

    def counted(one: Evaluation, limit: float) -> Counted:
        recomputes_nothing, bound = set(one.recompute) == {task.recompute[0]}, one.bound
        if one.run is not None:
            what = one.candidate, one.degrees, one.zero, one.placement
            bound = max(bound, evaluator.relaxed(*what, capacity=limit))
            bound = evaluator.timed(*what, bound, one.seconds, limit)
        return Counted(plans.of(one), limit, True, min(bound, one.seconds), "gap", settled=recomputes_nothing)

    def within(limit: float) -> Counted:
        return counted(evaluator.run(found.candidate, found.degrees, found.zero, found.placement, capacity=limit), limit)

    return fitted(counted(found, evaluator.capacity), within, fits, task.cluster)


def _refines(found: Evaluation, task: Task) -> bool:
    """Whether the plan of an evaluation is refined block by block."""
    return found.candidate.pp == 1 and task.cluster.world <= REFINED_DEVICES


def _refined(
    sweep: Sweep, layout: Layout, microbatches: int, fits: Fits, timing: Timing, to_beat: float, refined: Refined
) -> Fitted:
    """The best of a layout block by block, once: evaluations that differ in how they keep parameters have the same."""
    before = refined.made.get((layout, microbatches))
    if isinstance(before, Fitted):
        raise NoBetterError(before.bound_seconds, before.limited)
    if before is not None:
        raise before
    try:
        made = solve_layout(sweep.task, layout, microbatches, fits, timing, to_beat, known=refined.known)
    except (NoBetterError, OutOfMemoryError) as error:
        refined.made[layout, microbatches] = error
        raise
    refined.made[layout, microbatches] = made
    return made


def _may_have_stages(pins: Pins, world: int) -> bool:
    """Whether the pins leave the number of stages open, or ask for several."""
    if pins.free_axes:
        return False
    pinned = (pins.dp or 1) * (pins.tp or 1) * (pins.cp or 1)
    return pins.needs_stages(world) or (pins.pp is None and world > max(pinned, 1))


def _check_combination(task: Task) -> None:
    """Raise PinError for pins that torch's schedules run wrong together; what is not pinned the search leaves out itself."""
    pins, world = task.pins, task.cluster.world
    if pins.schedule is None:
        return
    several = (pins.cp or 1) * (pins.dp or world // ((pins.pp or world) * (pins.tp or 1))) > 1
    zero = pins.zero if several and pins.zero is not None else 0
    reason = illegal_combination(pins.schedule, zero=zero, recompute=pins.recompute or "none")
    if reason is not None:
        raise PinError(reason)


def _with_remedy(error: OutOfMemoryError, task: Task, fits: Fits, timing: Timing) -> OutOfMemoryError:
    """The error with the nearest change that would fit: a pin dropped, a smaller batch, more devices."""
    pins = task.pins
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
