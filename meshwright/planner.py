"""Planning: capture -> rules -> prices -> solve -> Plan. No processes, no GPU, any size.

Each factorization of the devices (``layouts``) is solved jointly over all its axes and the best kept. Without a memory limit
no recomputation and no micro-batches pay; so the unlimited optimum comes first, and only what does not fit is solved under
the limit, with more micro-batches as long as they help.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.compiler.capture.capture import capture
from meshwright.compiler.placement.choices import Scope
from meshwright.compiler.placement.costs import Costs
from meshwright.compiler.placement.dead_end import nothing_runs
from meshwright.compiler.placement.problem import Problem
from meshwright.compiler.rules import RuleBook, default_rules
from meshwright.compiler.search.evaluate import DoesNotFitError, Evaluation
from meshwright.compiler.search.joint import Outcome
from meshwright.compiler.search.joint_plan import Plans, certificate, does_not_fit, inputs_of, search_jointly
from meshwright.compiler.search.layouts import Layout, layouts, microbatch_counts, variants
from meshwright.compiler.search.prediction import OutOfMemoryError, capacity, predicted
from meshwright.compiler.solver.chain import Chain, Infeasible, Solution
from meshwright.compiler.solver.solve import solve
from meshwright.compiler.structure.blocks import find_blocks
from meshwright.compiler.structure.dims import DimClasses, batch_inputs, batch_size, handed_on, sequence_dims
from meshwright.compiler.structure.microbatch import split_counts, split_time
from meshwright.compiler.structure.units import find_units, split_at
from meshwright.cost.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.footprint import Footprints, with_footprint
from meshwright.ir.graph import Graph, Op
from meshwright.ir.mesh import role_of
from meshwright.ir.operators import namespace
from meshwright.ir.pins import RECOMPUTE, PinError, Pins, vars_of
from meshwright.ir.plan import Plan, PlanError, Schedule
from meshwright.ir.prediction import Certificate, Prediction, SeenCandidate
from meshwright.ir.quantities import bytes_text
from meshwright.ir.rule import OpRule, Rules

__all__ = ["OPTIMIZERS", "OutOfMemoryError", "Timing", "capture_model", "check_pins", "make_plan", "rules_of"]

OPTIMIZERS: Mapping[str, float] = {"adamw": 8.0, "adam": 8.0, "sgd": 0.0, "momentum": 4.0, "adagrad": 4.0, "lion": 4.0}
"""Bytes of optimizer state per parameter, fp32 states."""

GAP = 0.005
JOINT_SECONDS = 18.0
REMEDY_SECONDS = 5.0
"""Limits of a joint search: for the plan, and for what would fit if a pin were dropped."""
FREE_DEVICES = 8
"""Up to so many devices, layouts whose axes may split anything are solved as well."""
REFINED_DEVICES = 64
"""Up to so many devices, a layout without a pipeline is solved again, every block on its own."""
_TIE = 1e-4
DROPPED = (
    "recompute", "zero", "microbatches", "shard", "sequence_parallel", "stage_cuts", "virtual_stages", "schedule", "tp", "dp",
    "pp",
)
"""Pins that an error tries to do without, in this order."""
HELD = 3
"""So often a plan is held to the memory that its program needs."""
SOLVE_SECONDS = 30.0
"""Limit of one solve; only a solve that it strikes may come out otherwise on another run."""


@dataclass
class Timing:
    """Seconds of each phase of planning."""

    phases: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=clock.perf_counter)

    def mark(self, phase: str) -> None:
        """Book the time since the last mark under ``phase``."""
        now = clock.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now


Progress = Callable[[str, float], None]


def capture_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...], loss_fn: Any, precision: str,
    training: bool = True, functional: bool = False,
) -> Graph:
    """The model's graph at the global batch, blocks found."""
    dtype = torch.bfloat16 if precision == "bf16" else None
    graph = capture(model, args, dict(kwargs), loss_fn=loss_fn, targets=targets, compute_dtype=dtype, training=training,
                    functional=functional)
    return find_units(find_blocks(split_counts(graph)))


def rules_of(graph: Graph, strict: bool = False) -> tuple[Rules, list[str]]:
    """(rule of every op by name, notes on operators without one). ``strict``: raise instead of replicating them."""
    book = default_rules()
    if graph.foreign:
        known = {"aten", "mw", *map(namespace, book.declarations)}
        strangers = [op for op in graph.ops if namespace(op.target) not in known]
        if strangers:
            raise PlanError(f"the plan's operator {strangers[0].target} (in {strangers[0].module or 'the model'}) is of a "
                            "library that is not known here; register a rule for it with meshwright.register_rule")
    rules = Rules({op.name: _rule(book, op, graph) for op in graph.ops}, book.operators)
    unknown: dict[str, list[str]] = {}
    for op in graph.ops:
        if not rules[op.name].known:
            unknown.setdefault(op.target, []).append(op.module or "the model")
    if unknown and strict:
        raise PlanError(
            f"no sharding rule for {', '.join(unknown)}; register one with meshwright.register_rule, or plan with strict=False "
            "to replicate them"
        )
    notes = [f"no rule for {target} (in {', '.join(dict.fromkeys(at))}): replicated" for target, at in unknown.items()]
    return rules, notes


def _rule(book: RuleBook, op: Op, graph: Graph) -> OpRule:
    """The rule of an operator. One of a file may have arguments that no call of it has, which rules do not expect."""
    try:
        return book.rule_for(op, graph)
    except MeshwrightError:
        raise
    except Exception as error:
        if not graph.foreign:
            raise
        raise PlanError(f"the plan is damaged: {op} is no call of {op.target} ({type(error).__name__}: {error})") from error


def make_plan(
    graph: Graph, cluster: Cluster, pins: Pins, *, optimizer: str | float = "adamw", precision: str = "fp32",
    strict: bool = False, timing: Timing | None = None, progress: Progress | None = None, gap: float = GAP,
) -> Plan:
    """Search the layouts of a cluster for the plan of least time that fits. Raises PinError, OutOfMemoryError, PlanError."""
    timing = timing or Timing()
    check_pins(pins, cluster)
    graph = split_at(graph, pins.stage_cuts or ())
    rules, notes = rules_of(graph, strict)
    classes = DimClasses(graph, rules)
    timing.mark("rules")
    state_bytes = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else float(optimizer)
    search = _Search(graph, cluster, rules, classes, state_bytes, precision, gap, timing, progress)
    try:
        best = search.of(pins, JOINT_SECONDS)
    except OutOfMemoryError as error:
        raise search.explain(error, pins) from None
    assert best.certificate is not None
    listed = (*search.candidates, *best.certificate.candidates)
    return replace(
        best, optimizer=optimizer if isinstance(optimizer, str) else f"{optimizer:g} bytes", notes=(*notes, *best.notes),
        certificate=replace(best.certificate, candidates=listed, planning_seconds=dict(timing.phases)),
    )


@dataclass(frozen=True)
class _Found:
    """A plan, and whether the memory limit had a say in it."""

    plan: Plan
    tight: bool

    @property
    def seconds(self) -> float:
        return _predicted(self.plan).step_seconds


@dataclass
class _Search:
    """One search: what stays the same over its layouts, and what was tried."""

    graph: Graph
    cluster: Cluster
    rules: Rules
    classes: DimClasses
    state_bytes: float
    precision: str
    gap: float
    timing: Timing
    progress: Progress | None
    candidates: list[SeenCandidate] = field(default_factory=list)

    def of(self, pins: Pins, limit: float) -> Plan:
        """The plan of least time under the pins. ``limit``: seconds for the joint search."""
        return self.jointly(pins, limit) if _open_to_pipelines(pins, self.cluster) else self.best(pins)

    def jointly(self, pins: Pins, limit: float) -> Plan:
        """The plan of least time, pipelines included.

        On few devices layouts whose axes may split anything come first, and pipelines must beat them. If no pipeline wins, the
        best layout is solved again, every block on its own.
        """
        pinned, few = pins.needs_stages(self.cluster.world), self.cluster.world <= FREE_DEVICES
        known, failure = self._known(pins) if few and not pinned else (None, None)
        seconds = float("inf") if known is None else _predicted(known).step_seconds
        try:
            outcome = search_jointly(
                self.graph, self.cluster, self.rules, pins, precision=self.precision, state_bytes=self.state_bytes,
                gap=self.gap, limit=limit, progress=self.progress, cutoff=seconds,
            )
        except (PinError, PlanError) as error:
            if known is not None:
                return known
            if pinned or few or isinstance(error, OutOfMemoryError):
                unclear = not isinstance(error, OutOfMemoryError | PinError)
                raise (failure if failure and (unclear or isinstance(failure, OutOfMemoryError)) else error) from None
            return self.best(pins)
        finally:
            self.timing.mark("joint search")
        return self._first_that_fits(outcome, known, pins)

    def _first_that_fits(self, outcome: Outcome, known: Plan | None, pins: Pins) -> Plan:
        """The fastest plan that fits, ``known`` if none is faster: the search counts memory unit by unit, a program decides."""
        best, failure, counted = known, None, 0.0
        seconds = float("inf") if known is None else _predicted(known).step_seconds
        for found in outcome.ranking:
            if found.seconds >= seconds:
                break
            try:
                plan = self._made(found, outcome, pins)
            except (OutOfMemoryError, DoesNotFitError) as error:
                failure = failure or error
                continue
            finally:
                self.timing.mark("plan")
            if _predicted(plan).step_seconds < seconds * (1 - _TIE):
                best, seconds, counted = plan, _predicted(plan).step_seconds, found.seconds
        if best is None:
            if isinstance(failure, DoesNotFitError):
                raise does_not_fit(failure, self.cluster, inputs_of(self.graph)) from None
            raise failure or PlanError(f"no layout of {self.cluster} runs this model")
        return replace(best, certificate=certificate(outcome, seconds, counted))

    def _made(self, found: Evaluation, outcome: Outcome, pins: Pins) -> Plan:
        """The plan of an evaluation; on few devices without a pipeline each block is solved on its own. Raises
        OutOfMemoryError, DoesNotFitError."""
        if found.candidate.pp > 1 or self.cluster.world > REFINED_DEVICES:
            return self._held(found, outcome)
        mesh = found.degrees.mesh
        roles = {axis: role_of(axis) for axis in mesh.axes}
        return self.solve(Layout(mesh, roles), found.candidate.microbatches, pins).plan

    def _held(self, found: Evaluation, outcome: Outcome) -> Plan:
        """The plan of an evaluation, cut and recomputed so that its program fits. Raises OutOfMemoryError, DoesNotFitError."""
        room, scale, best = capacity(self.cluster), 1.0, None
        plans = Plans(outcome, self.graph, self.rules, self.cluster, self.precision)
        judged = Footprints(self.rules, self.state_bytes)
        for _ in range(HELD):
            plan = judged.of(plans.of(found))
            need = _predicted(plan).bytes_per_rank
            if need <= room and (best is None or _predicted(plan).step_seconds < _predicted(best).step_seconds):
                best = plan
            if 0.95 * room < need <= room or (need <= room and set(found.recompute) == {"none"}):
                break
            scale *= 0.995 * room / need
            assert outcome.again is not None
            try:
                found = outcome.again(found, scale)
            except DoesNotFitError:
                if best is None:
                    raise
                break
        if best is None:
            raise OutOfMemoryError.of(need, {}, plan.mesh, plan.schedule.microbatches, self.cluster)
        return best

    def _known(self, pins: Pins) -> tuple[Plan | None, PinError | PlanError | None]:
        """The best plan without a pipeline, or why there is none."""
        try:
            return self.best(pins), None
        except (PinError, PlanError) as error:
            return None, error

    def best(self, pins: Pins) -> Plan:
        """The plan of least time over all layouts without a pipeline; those on which nothing runs are left out. Raises
        OutOfMemoryError, PinError, PlanError if none runs."""
        tried = layouts(self.cluster, pins)
        found: list[_Found] = []
        failures: list[OutOfMemoryError] = []
        impossible: list[PinError | PlanError] = []
        for number, layout in enumerate(tried):
            try:
                best = self._best_of(layout, pins, number / len(tried), failures)
            except (PinError, PlanError) as error:
                impossible.append(error)
                continue
            found += [best] if best is not None else []
        if not found:
            raise min(failures, key=lambda error: error.least) if failures else impossible[0]
        first = found[0]
        for other in found[1:]:
            first = other if other.seconds < first.seconds * (1 - 1e-9) else first
        return first.plan

    def _best_of(self, layout: Layout, pins: Pins, done: float, failures: list[OutOfMemoryError]) -> _Found | None:
        """The best count of micro-batches on one layout: more of them only while memory binds and they make it faster."""
        best: _Found | None = None
        for count in microbatch_counts(self.graph, layout, pins):
            if self.progress is not None:
                self.progress(f"{layout.mesh}, {count} micro-batches", done)
            seen = SeenCandidate(str(layout.mesh), count)
            try:
                found = self.solve(layout, count, pins)
            except OutOfMemoryError as error:
                self.candidates.append(replace(seen, outcome="does not fit"))
                failures.append(error)
                continue
            except (PinError, PlanError) as error:
                self.candidates.append(replace(seen, outcome=str(error)))
                if pins.microbatches is not None or count == 1:
                    raise
                continue
            self.candidates.append(replace(seen, step_seconds=found.seconds))
            if best is not None and found.seconds >= best.seconds:
                break
            best = found
            if not found.tight:
                break
        return best

    def solve(self, layout: Layout, microbatches: int, pins: Pins) -> _Found:
        """The plan on one layout."""
        schedule = split_time(self.graph, self.rules, microbatches, batch_inputs(self.graph))
        scope = self._scope(layout, pins, microbatches)
        costs = Costs(
            self.cluster, layout.mesh, microbatches=microbatches, itemsize=2 if self.precision == "bf16" else 4,
            state_bytes=self.state_bytes,
        )
        root = variants(layout, pins, microbatches, ("none",))
        kinds = (pins.recompute,) if pins.recompute is not None else ("none",)
        problem = Problem(scope, self.rules, schedule, costs, variants(layout, pins, microbatches, kinds), root)
        return self._fitted(layout, schedule, problem, pins)

    def _fitted(self, layout: Layout, schedule: Schedule, problem: Problem, pins: Pins) -> _Found:
        """The plan without a limit if it fits; else under the limit. Raises OutOfMemoryError, PinError or PlanError if nothing
        runs."""
        room = capacity(self.cluster)
        chain = self._chain(problem, float("inf"))
        try:
            solution = self._solution(chain)
        except Infeasible:
            pinned = [name for name, value in vars_of(pins).items() if value is not None and value != {}]
            if pinned:
                raise PinError(f"{nothing_runs(problem)}; change one of the pins {', '.join(pinned)}") from None
            raise PlanError(f"{nothing_runs(problem)}; another rule for it may help: meshwright.register_rule") from None
        plan = self._plan(layout, schedule, problem, chain, solution)
        if _predicted(plan).fits:
            return _Found(plan, False)
        if pins.recompute is None:
            problem = problem.with_variants(variants(layout, pins, schedule.microbatches, RECOMPUTE))
        # what the program needs decides; the solver's sum over blocks is held to the same scale
        scale, least = _predicted(plan).bytes_per_rank / (solution.bytes_ + solution.transient), None
        while True:  # the scale grows until a plan fits or none is left
            chain = self._chain(problem, room / scale)
            try:
                plan = self._plan(layout, schedule, problem, chain, self._solution(chain))
            except Infeasible as error:
                if least is not None:  # the scale of the leanest plan: nothing else fits
                    return _Found(least, True)
                lean, bytes_ = self._leanest(layout, schedule, problem, chain, error)
                need = error.least * scale if lean is None else _predicted(lean).bytes_per_rank
                if lean is None or need > room:
                    raise OutOfMemoryError.of(need, bytes_, problem.mesh, schedule.microbatches, self.cluster) from None
                least, scale = lean, need / error.least
                continue
            if _predicted(plan).fits:
                return _Found(plan, True)
            scale *= 1.01 * _predicted(plan).bytes_per_rank / room

    def _leanest(
        self, layout: Layout, schedule: Schedule, problem: Problem, chain: Chain, error: Infeasible
    ) -> tuple[Plan | None, Mapping[str, float]]:
        """The plan of least memory by the solver's sum, if it found one, and its bytes by kind."""
        if error.solution is None:
            return None, {}
        plan = self._plan(layout, schedule, problem, chain, error.solution)
        return plan, _predicted(plan).bytes_by_kind

    def _chain(self, problem: Problem, limit: float) -> Chain:
        """The problem within ``limit`` of the solver's bytes."""
        chain = problem.chain(limit, float(sum(self.graph.values[name].bytes_ for name in self.graph.inputs)))
        self.timing.mark("build")
        return chain

    def _solution(self, chain: Chain) -> Solution:
        """The best of a chain. Raises Infeasible."""
        try:
            return solve(chain, gap=self.gap, time_limit=SOLVE_SECONDS)
        finally:
            self.timing.mark("solve")

    def _plan(self, layout: Layout, schedule: Schedule, problem: Problem, chain: Chain, solution: Solution) -> Plan:
        assignments, copies, groups = problem.decode(solution)
        plan = Plan(
            self.graph, layout.mesh, assignments, copies, groups, schedule=schedule, precision=self.precision,
            cluster=str(self.cluster),
            predicted=predicted(
                self.graph, self.rules.operators, self.cluster, chain, solution, self.precision, schedule.microbatches
            ),
            certificate=Certificate(solution.time, solution.bound, solution.status),
        )
        return with_footprint(plan, self.rules, self.state_bytes)

    def _scope(self, layout: Layout, pins: Pins, microbatches: int) -> Scope:
        graph, classes = self.graph, self.classes
        passed = handed_on(graph)
        batch = classes.of(batch_inputs(graph).items())
        sequence = classes.of(sequence_dims(graph, passed, classes, batch).items())
        return Scope(graph, layout.mesh, layout.roles, pins, classes, batch, sequence, frozenset(passed), microbatches)

    def explain(self, error: OutOfMemoryError, pins: Pins) -> OutOfMemoryError:
        """The error with the nearest change that would fit: a pin dropped, a smaller batch, more devices."""
        for name in DROPPED:
            if getattr(pins, name) is None:
                continue
            try:
                plan = self.of(Pins.of({**vars_of(pins), name: None}), REMEDY_SECONDS)
            except (PlanError, PinError):
                continue
            need = bytes_text(_predicted(plan).bytes_per_rank)
            return error.with_remedy(f"without the pin {name}={getattr(pins, name)} it fits in {need}")
        return error.with_remedy(error.smaller(batch_size(self.graph), self.cluster.world))


def _predicted(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted


def _open_to_pipelines(pins: Pins, cluster: Cluster) -> bool:
    """Whether the pins leave the number of stages open, or ask for several."""
    if pins.needs_stages(cluster.world):
        return True
    return pins.pp is None and cluster.world > 1 and cluster.world > (pins.dp or 1) * (pins.tp or 1)


def check_pins(pins: Pins, cluster: Cluster) -> None:
    """Raise PinError for what no model can have on this cluster, or in this version."""
    pins.check_world(cluster.world)
    for name in ("cp", "ep"):
        if (getattr(pins, name) or 1) > 1:
            raise PinError(
                f"pin {name}={getattr(pins, name)}: this version plans dp, tp, pp, sequence parallelism and ZeRO; drop the pin"
            )
