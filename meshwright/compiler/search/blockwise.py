"""A layout without a pipeline, solved block by block: placement, ZeRO level and recomputation of every block at once.

This is how a candidate whose axes may split anything is solved, and how the winner among the others is refined: there all
blocks keep their parameters alike, here each may differ. Without a memory limit neither recomputation nor micro-batches
pay, so the unlimited optimum comes first, and only what does not fit is solved under a limit (``fitting``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshwright.compiler.placement.choices import Scope, check_named, check_sequence
from meshwright.compiler.placement.costs import SAVED, Costs, Variant, worst
from meshwright.compiler.placement.dead_end import nothing_runs
from meshwright.compiler.placement.problem import Problem
from meshwright.compiler.search.candidates import Layout
from meshwright.compiler.search.errors import NoBetterError, OutOfMemoryError
from meshwright.compiler.search.fitting import Counted, Fitted, fitted, prediction_of
from meshwright.compiler.search.layouts import variants
from meshwright.compiler.search.prediction import of_blocks
from meshwright.compiler.search.task import Fits, Task, Timing
from meshwright.compiler.solver.chain import Beaten, Chain, Infeasible, Solution
from meshwright.compiler.solver.effort import WORK
from meshwright.compiler.solver.pricing import Multipliers
from meshwright.compiler.solver.solve import Hint, solve
from meshwright.cost.cluster import Cluster
from meshwright.ir.mesh import ANY, SAMPLED, Mesh
from meshwright.ir.pins import PinError, vars_of
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.prediction import Prediction

SOLVE_SECONDS = 3.0
"""Most of one solve, in nominal seconds: what was done is counted, not a clock."""
_LEAST = 0.5
"""What one may take where all that there is for layouts is spent (chosen)."""
_BUILT, _CHOICE = 0.07, 1.05e-4
"""Nominal seconds that a problem and its chains take to build, and more for every choice of an operator: measured, on one
core."""
WIDEST = 0.0185
"""The gap with which a search ends that takes long (chosen: certificates are to be no wider than 2 %, and what is found may be
a little slower once its program was replayed)."""
TIE = 1e-3
"""A layout is left once it is known that nothing on it is faster than the best plan by more than this part."""
FAR = 1.15
"""What is counted so many times above the memory does not fit: no program is made to know (assumed: what is counted and what is
replayed differ by less)."""
_USUAL = 1.01
"""A program is taken to hold so many times what is counted, before one like it was replayed (chosen: most hold less)."""

_NEAR = 0.8
"""Of the memory: micro-batches that are told from larger ones to need at least this part are looked at (chosen)."""

_MASTER = 4
"""Bytes of a parameter as the optimizer has it, fp32."""
_ALONE = Layout(Mesh.of(x=1), {"x": ANY})

Kinds = tuple[tuple[Variant, ...], ...]
"""Per kind of a chain its variants."""


@dataclass
class LayoutMemory:
    """What earlier looks at layouts found, for later ones to start from.

    ended: by micro-batches, and of a layout, the multipliers with which the latest chain within a limit of memory ended, and
        the variants that they are of
    shares: by micro-batches, and of a layout, the bytes of the latest program beside what was counted of its plan
    crowded: layouts of which with some number of micro-batches not even the leanest program fits
    spent: nominal seconds of all problems that were built and solved
    limit: nominal seconds that they may take together; none of them takes less than ``_LEAST``
    """

    ended: dict[Layout | int, tuple[Multipliers, Kinds]] = field(default_factory=dict)
    shares: dict[Layout | int, float] = field(default_factory=dict)
    crowded: set[Layout] = field(default_factory=set)
    spent: float = 0.0
    limit: float = math.inf

    @property
    def left(self) -> float:
        """Nominal seconds that the next solve may take."""
        return min(SOLVE_SECONDS, max(_LEAST, self.limit - self.spent))

    def binds(self, microbatches: int) -> bool:
        """Whether memory had a price on another layout with so many micro-batches."""
        return microbatches in self.ended and self.ended[microbatches][0].memory > 0.0


def solve_layout(
    task: Task, layout: Layout, microbatches: int, fits: Fits, timing: Timing, to_beat: float = math.inf,
    known: LayoutMemory | None = None, floor: float | None = None,
) -> Fitted:
    """The fastest plan found on a layout that fits. ``to_beat``: seconds of a plan that is known; ``known``: what earlier looks
    found, which this one starts from; ``floor``: if the fastest of all is known not to fit, seconds that nothing which fits
    goes below.

    Raises OutOfMemoryError; NoBetterError if none is faster than what is known; PinError or PlanError if nothing runs on it."""
    cutoff = to_beat * (1.0 - TIE)  # the solver ends where nothing is faster by more than the gap
    known = LayoutMemory() if known is None else known
    problem = _problem(task, layout, microbatches)
    known.spent += _BUILT + _CHOICE * problem.choices
    first: Counted | None = None
    if floor is None and to_beat < math.inf and known.binds(microbatches):
        floor = 0.0  # within memory less is left to look for
    if floor is None:
        first = _unlimited(problem, task, timing, cutoff, known)
        floor = first.bound_seconds
    capacity = task.cluster.capacity_bytes

    def judge(plan: Plan) -> Prediction:
        known.spent += WORK["operator of a plan"] * len(task.graph.ops)
        found = fits(plan)
        share = found.bytes_per_rank / prediction_of(plan).bytes_per_rank
        if 1 / FAR < share < FAR:  # the leanest of what does not fit may be far off
            known.shares[microbatches] = known.shares[layout] = share
        return found

    if task.pins.recompute is None:
        limited = problem.with_variants(variants(layout, task.pins, microbatches, task.recompute))
    else:
        limited = problem

    before = known.ended.get(microbatches, known.ended.get(layout))
    share = known.shares.get(microbatches, known.shares.get(layout, _USUAL))
    wide, hint = capacity / min(share, 1.0), Hint(None if before is None else _for_kinds(*before, limited.kept))
    within = _Limited(limited, task, timing, layout, microbatches, known, hint, cutoff, floor, wide)
    if first is not None and first.limit_bytes <= wide:
        return within.fitted(first, judge)
    # the first is not replayed to learn that it does not fit; where smaller samples may not either, the leanest says so
    lean = to_beat == math.inf and layout in known.crowded
    asked = 0.0 if lean else capacity / share
    counted = within.solve(asked)
    if not lean and within.looked < wide and counted.bound_seconds < prediction_of(counted.plan).step_seconds * (1.0 - WIDEST):
        counted, asked = within.solve(wide), wide  # what a program holds more of here is dear
    return within.fitted(counted, judge, asked)


@dataclass
class _Limited:
    """Solves a problem within so many counted bytes. Where programs hold more than is counted less is asked for than the device
    has; what that proves of all that fits, the price of memory says.

    floor, known: as of ``solve_layout``
    cutoff: seconds that are to be beaten, inf where nothing is known elsewhere
    wide: no plan that fits is taken to count more bytes
    looked: the most within which it was solved
    """

    problem: Problem
    task: Task
    timing: Timing
    layout: Layout
    microbatches: int
    known: LayoutMemory
    hint: Hint
    cutoff: float
    floor: float
    wide: float
    looked: float = 0.0

    @cached_property
    def _unbounded(self) -> Chain:
        return _chain(self.problem, self.task, math.inf, self.timing)

    def solve(self, bytes_: float) -> Counted:
        """The fastest that counts no more; as long as nothing is known elsewhere, the leanest if nothing does, which says what
        binds. Raises NoBetterError, OutOfMemoryError, PinError, PlanError."""
        problem, task, rivals = self.problem, self.task, self.cutoff < math.inf
        chain, self.looked = self._unbounded.within(bytes_), max(self.looked, bytes_)
        try:
            hopeless = max(self.wide, bytes_) if rivals else math.inf
            found = _solved(chain, task, self.timing, self.cutoff, self.known, self.hint, hopeless)
        except Beaten as beaten:
            return self._no_better(beaten.bound, bytes_)
        except Infeasible as error:
            if not math.isfinite(error.least):
                raise _nothing_runs(problem, task) from None
            if rivals and self.looked < self.wide and error.bound <= self.wide:
                return self.solve(self.wide)  # what fits may count more
            if error.solution is None or rivals:
                raise OutOfMemoryError.of_layout(
                    error.least, {}, problem.mesh, self.microbatches, task.cluster, error.bound
                ) from None
            plan, least = _plan(problem, chain, error.solution, task), max(error.least, math.nextafter(bytes_, math.inf))
            return Counted(plan, least, True, self.floor, "gap", settled=False, needs_bytes=error.bound)
        finally:
            if self.hint.at is not None:
                self.known.ended[self.microbatches] = self.known.ended[self.layout] = self.hint.at, problem.kept
        if found.time > self.cutoff:  # so within less memory it finds nothing faster
            return self._no_better(found.bound, bytes_)
        plan = _plan(problem, chain, found, task)
        price = self.hint.at.memory if self.hint.at is not None else 0.0
        return Counted(plan, bytes_, True, self._proven(found.bound, bytes_), found.status, settled=True, price=price)

    def fitted(self, first: Counted, judge: Fits, asked: float | None = None) -> Fitted:
        """The fastest found that fits. Raises OutOfMemoryError, but where a rival is known and not proven that nothing fits
        NoBetterError, or what ``solve`` raises."""
        try:
            return fitted(first, self.solve, judge, self.task.cluster, asked)
        except OutOfMemoryError as error:
            if error.proven or self.cutoff == math.inf or not first.settled:
                raise
            raise NoBetterError(first.bound_seconds, limited=True) from None

    def _proven(self, bound: float, bytes_: float) -> float:
        """Seconds that nothing within ``wide`` goes below, of what was proven within so many bytes: the bound of the last
        multipliers, less what their price of memory makes of the bytes between."""
        if bytes_ < self.wide:
            at = self.hint.at
            bound = self.hint.bound - (self.wide - bytes_) * at.memory if at is not None else -math.inf
        return max(self.floor, bound)

    def _no_better(self, bound: float, bytes_: float) -> Counted:
        """Raises NoBetterError, unless what is proven within so many bytes says too little of all that fits, and more can."""
        bound = self._proven(bound, bytes_)
        if self.looked < self.wide and bound < self.cutoff * (1.0 - WIDEST):
            return self.solve(self.wide)
        raise NoBetterError(bound, limited=True) from None


@dataclass(frozen=True)
class OneDevice:
    """What some device holds at least without a pipeline, whichever the layout: what one device would, shared out evenly.

    least_bytes: under the recomputation that keeps least, as it is counted or, where that is too near to tell, replayed
    crowded: whether that is proven to be too much
    binds: whether memory keeps out what recomputes nothing
    standing, activations, widest: bytes as they are counted: what a device has all the time, what all devices hold besides at
        least, and the position that holds most of that while it runs
    kept: what all devices hold if nothing is recomputed
    """

    least_bytes: float
    crowded: bool
    binds: bool
    standing: float = 0.0
    activations: float = 0.0
    widest: float = 0.0
    kept: float = 0.0

    def of_fewer(self, samples: float, cluster: Cluster) -> OneDevice | None:
        """Of micro-batches of ``samples`` times as many, no more than one, if that is clear: what grows with samples does so no
        faster, so that what is too much is too much, and what is far less than there is is taken not to be."""
        activations, widest, kept = (bytes_ * samples for bytes_ in (self.activations, self.widest, self.kept))
        room, world = cluster.capacity_bytes, cluster.world
        counted = self.standing + activations / world
        if not kept or _NEAR * room < counted <= room * FAR:
            return None
        binds = self.standing + kept / world > room * FAR
        return OneDevice(counted, counted > room, binds, self.standing, activations, widest, kept)

    def crowds(self, stages: int, samples: float, room: float, world: int) -> bool:
        """Whether it is proven that ``room`` bytes a device are too few for so many stages with micro-batches of ``samples``
        times as many, no more than one: what grows with samples does so no faster. Of several stages no device holds less than
        its part of what runs there."""
        alone = self.standing + self.activations * samples / world
        return (alone if stages == 1 else self.widest * samples * stages / world) > room * FAR


@dataclass
class OneDevices:
    """``one_device`` of every count of micro-batches that is asked for; told from what fewer have, where that is clear."""

    task: Task
    fits: Fits
    known: dict[int, OneDevice] = field(default_factory=dict)

    def __call__(self, microbatches: int) -> OneDevice:
        """Of so many micro-batches."""
        if microbatches not in self.known:
            larger = max((count for count in self.known if count < microbatches), default=microbatches)
            told = larger < microbatches and self.known[larger].of_fewer(larger / microbatches, self.task.cluster)
            self.known[microbatches] = told or one_device(self.task, microbatches, self.fits)
        return self.known[microbatches]


def one_device(task: Task, microbatches: int, fits: Fits) -> OneDevice:
    """Of so many micro-batches: of parameters their masters, gradients that micro-batches sum, and the optimizer's state; while
    a block runs it holds what it saves or makes again, the others what they keep. At every moment of the program the pieces of
    all devices hold no less than the whole values."""
    room = task.cluster.capacity_bytes
    try:
        problem = None if task.fixed else _problem(task, _ALONE, microbatches)
    except (PinError, PlanError):  # nothing runs on one device as it is pinned
        problem = None
    if problem is None:
        return OneDevice(0.0, crowded=False, binds=False)
    chain = problem.with_variants(tuple(Variant(recompute=name) for name in task.recompute)).chain(math.inf, 0.0)
    rows = [np.array([block.cost((0,) * len(block.sizes)) for block in kind.variants]) for kind in chain.kinds]
    kinds = len(task.recompute)
    saved, transient = (np.array([np.broadcast_to(of, kinds) for of in found])
                        for found in ([one[:, SAVED] for one in rows], [worst(one) for one in rows]))
    copies = np.array([chain.sequence.count(number) for number in range(len(rows))])
    each = copies @ saved + transient.max(axis=0)  # [recomputations]
    beside = (saved + transient).min(axis=1)
    least, widest = float(copies @ saved.min(axis=1) + (beside - saved.min(axis=1)).max()), float(beside.max())
    trained = sum(task.graph.values[param.value].numel for param in task.graph.params if param.trainable)
    state = _MASTER + (task.itemsize if microbatches > 1 else 0) + task.state_bytes
    world, alone = task.cluster.world, problem.alone_bytes  # ranks with samples of their own make what belongs to these
    frozen = sum(task.graph.values[param.value].numel for param in task.graph.params) - trained
    standing = task.given_bytes + (trained * state + frozen * task.itemsize + alone) / world
    counted, binds = standing + least / world, standing + float(each[0]) / world > room * FAR
    if not room < counted <= room * FAR:
        return OneDevice(counted, counted > room, binds, standing, least, widest, float(each[0]))
    leanest = problem.with_variants((Variant(recompute=task.recompute[int(np.argmin(each))]),))
    whole = leanest.chain(math.inf, task.given_bytes + alone)
    replayed = fits(_plan(leanest, whole, solve(whole, gap=task.gap), task)).bytes_by_kind
    held = standing + (replayed.get("activations", 0.0) + replayed.get("transient", 0.0)) / world
    return OneDevice(held, held > room, binds, standing, least, widest, float(each[0]))


def _for_kinds(at: Multipliers, theirs: Kinds, ours: Kinds) -> Multipliers | None:
    """Multipliers of another layout's chain for this one's: each variant has those of the one that is most like it."""
    if len(theirs) != len(ours):
        return None
    alpha = {}
    for k, own in enumerate(ours):
        for v, one in enumerate(own):
            unlike = [
                (o != one, o.recompute != one.recompute, o.zero != one.zero, bool(o.data_axes) != bool(one.data_axes))
                for o in theirs[k]
            ]
            alpha[k, v] = at.alpha[k, unlike.index(min(unlike))]
    return replace(at, alpha=alpha)


def _unlimited(problem: Problem, task: Task, timing: Timing, cutoff: float, known: LayoutMemory) -> Counted:
    """The best without a limit of memory. Raises NoBetterError; PinError or PlanError if nothing runs on the layout."""
    chain = _chain(problem, task, math.inf, timing)
    try:
        found = _solved(chain, task, timing, cutoff, known, Hint())
    except Infeasible:
        raise _nothing_runs(problem, task) from None
    except Beaten as beaten:
        raise NoBetterError(beaten.bound, limited=False) from None
    if found.time > cutoff:
        raise NoBetterError(found.bound, limited=False)
    plan = _plan(problem, chain, found, task)
    return Counted(plan, found.bytes_ + found.transient, False, found.bound, found.status, settled=True)


def held_layout(task: Task, layout: Layout, microbatches: int) -> Prediction:
    """What a plan without a pipeline takes of which everything is held. Raises PlanError if nothing can run so."""
    problem = _problem(task, layout, microbatches)
    chain = problem.chain(math.inf, task.given_bytes + problem.alone_bytes)
    try:
        solution = solve(chain, gap=task.gap)
    except Infeasible:
        raise PlanError(f"the plan cannot run so on {layout.mesh}: no way leads from what its operators make to what others of "
                        "them read, or its parameters cannot be kept so") from None
    return of_blocks(task, problem, chain, solution, microbatches)


def _problem(task: Task, layout: Layout, microbatches: int) -> Problem:
    """The choices of every block, without recomputation unless it is pinned."""
    schedule = task.structure.schedule(microbatches)
    costs = Costs(
        task.cluster, layout.mesh, microbatches=microbatches, itemsize=task.itemsize, state_bytes=task.state_bytes,
        modules=task.modules,
    )
    root = variants(layout, task.pins, microbatches, ("none",))
    blocks = variants(layout, task.pins, microbatches, task.recompute[:1])
    return Problem(_scope(task, layout, microbatches), schedule, costs, blocks, root)


def _scope(task: Task, layout: Layout, microbatches: int) -> Scope:
    scope = Scope(
        task.structure, layout.mesh, layout.roles, task.pins, microbatches, task.fixed, task.cluster, folded=layout.folded
    )
    check_named(scope)
    check_sequence(scope)
    sampled = [axis for axis in layout.mesh.axes if layout.roles[axis] in (ANY, *SAMPLED)]
    task.structure.schedule(microbatches, layout.mesh.size(sampled))
    return scope


def _chain(problem: Problem, task: Task, limit: float, timing: Timing) -> Chain:
    """The problem within ``limit`` of the solver's bytes."""
    chain = problem.chain(limit, task.given_bytes + problem.alone_bytes)
    timing.mark("build")
    return chain


def _solved(
    chain: Chain, task: Task, timing: Timing, cutoff: float, known: LayoutMemory, hint: Hint, hopeless: float = math.inf
) -> Solution:
    """The best of a chain. Raises Infeasible; Beaten if nothing is faster than ``cutoff`` seconds by more than the gap."""
    try:
        return solve(chain, gap=task.gap, limit=known.left, cutoff=cutoff, hint=hint, hopeless=hopeless, widest=WIDEST)
    finally:
        known.spent += hint.pricer.effort.spent if hint.pricer is not None else 0.0
        timing.mark("solve")


def _plan(problem: Problem, chain: Chain, solution: Solution, task: Task) -> Plan:
    """The plan of a solution, as the solver counts it."""
    assignments, copies, groups = problem.decode(solution)
    return Plan(
        task.graph, problem.mesh, assignments, copies, groups, schedule=problem.schedule, precision=task.precision,
        cluster=str(task.cluster), predicted=of_blocks(task, problem, chain, solution, problem.schedule.microbatches),
    )


def _nothing_runs(problem: Problem, task: Task) -> PinError | PlanError:
    pinned = [name for name, value in vars_of(task.pins).items() if value is not None and value != {}]
    if pinned:
        return PinError(f"{nothing_runs(problem)}; change one of the pins {', '.join(pinned)}")
    return PlanError(f"{nothing_runs(problem)}; another rule for it may help: meshwright.register_rule")
