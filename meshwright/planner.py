"""Planning: capture -> rules -> prices -> solve -> Plan. No processes, no GPU, any size.

The mesh is factored into axes by the pins, or else by the topology (nodes x devices of a node; a single node also as one
axis and as its factor pairs); each factorization is solved jointly over all its axes and the best kept.
"""

from __future__ import annotations

import itertools
import time as clock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.compiler.blocks import find_blocks
from meshwright.compiler.capture import capture
from meshwright.compiler.chain import Infeasible, Solution
from meshwright.compiler.choices import Scope
from meshwright.compiler.costs import Costs, Variant
from meshwright.compiler.dims import DimClasses, batch_inputs, batch_size, handed_on
from meshwright.compiler.microbatch import split_counts, split_time
from meshwright.compiler.problem import Problem
from meshwright.compiler.rules import default_rules
from meshwright.compiler.solve import solve
from meshwright.cost.cluster import Cluster
from meshwright.graph import Graph
from meshwright.mesh import Mesh
from meshwright.pins import PinError, Pins
from meshwright.plan import Plan, PlanError
from meshwright.rule import OpRule
from meshwright.sharding import ceil_div

OPTIMIZERS: Mapping[str, float] = {"adamw": 8.0, "adam": 8.0, "sgd": 0.0, "momentum": 4.0, "adagrad": 4.0, "lion": 4.0}
"""Bytes of optimizer state per parameter, fp32 states."""

GAP = 0.005


class OutOfMemoryError(PlanError):
    """No plan fits the device memory; says what binds and what would fit."""


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


@dataclass(frozen=True)
class Layout:
    """A factorization of the devices into axes, and what each axis may do (see ``compiler.choices``)."""

    mesh: Mesh
    roles: Mapping[str, str]


Progress = Callable[[str, float], None]


def capture_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...], loss_fn: Any, precision: str
) -> Graph:
    """The model's graph at the global batch, blocks found."""
    dtype = torch.bfloat16 if precision == "bf16" else None
    graph = capture(model, args, dict(kwargs), loss_fn=loss_fn, targets=targets, compute_dtype=dtype)
    return find_blocks(split_counts(graph))


def rules_of(graph: Graph, strict: bool = False) -> tuple[dict[str, OpRule], list[str]]:
    """(rule of every op by name, notes on operators without one). ``strict``: raise instead of replicating them."""
    book = default_rules()
    rules = {op.name: book.rule_for(op, graph) for op in graph.ops}
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


def make_plan(
    graph: Graph, cluster: Cluster, pins: Pins, *, optimizer: str | float = "adamw", precision: str = "fp32",
    strict: bool = False, timing: Timing | None = None, progress: Progress | None = None, gap: float = GAP,
) -> Plan:
    """Search the layouts of a cluster for the plan of least time that fits. Raises PinError, OutOfMemoryError, PlanError."""
    timing = timing or Timing()
    _unsupported(pins)
    pins.check_world(cluster.world)
    rules, notes = rules_of(graph, strict)
    timing.mark("rules")
    state_bytes = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else float(optimizer)
    best: Plan | None = None
    failure: OutOfMemoryError | None = None
    candidates = []
    for layout in layouts(cluster, pins):
        for count in _microbatches(graph, layout, pins):
            try:
                plan = _solve_layout(graph, cluster, pins, layout, count, rules, state_bytes, precision, timing, progress, gap)
            except OutOfMemoryError as error:
                failure = failure or error
                candidates.append({"mesh": str(layout.mesh), "microbatches": count, "result": "does not fit"})
                continue
            candidates.append(
                {"mesh": str(layout.mesh), "microbatches": count, "step_seconds": plan.predicted["step_seconds"]}
            )
            if best is None or plan.predicted["step_seconds"] < best.predicted["step_seconds"] * (1 - 1e-9):
                best = plan
        if best is None and pins.microbatches is None:
            continue
    if best is None:
        assert failure is not None
        raise failure
    name = optimizer if isinstance(optimizer, str) else f"{optimizer:g} bytes"
    return replace(
        best, optimizer=name, notes=(*notes, *best.notes),
        certificate={**best.certificate, "candidates": candidates, "seconds": dict(timing.phases)},
    )


def layouts(cluster: Cluster, pins: Pins) -> list[Layout]:
    """Factorizations of the devices that the pins and the topology suggest, in a fixed order."""
    world = cluster.world
    if pins.dp is None and pins.tp is None:
        axes = ("x", "y")
        if cluster.nodes > 1:
            shapes: list[tuple[int, ...]] = [(cluster.nodes, cluster.per_node)]
        else:
            shapes = [(world,)] + [(world // n, n) for n in range(2, world) if world % n == 0]
        return [Layout(Mesh(axes[: len(s)], s), dict.fromkeys(axes[: len(s)], "any")) for s in shapes]
    tp = pins.tp if pins.tp is not None else world // (pins.dp or 1)
    dp = pins.dp if pins.dp is not None else world // tp
    shard = pins.shard if pins.shard is not None else dp
    if dp % shard:
        raise PinError(f"pin shard={shard} must divide dp={dp}: it is the ZeRO group within the data ranks")
    sizes = {"dp": dp} if shard in (dp, 1) else {"dp_replicate": dp // shard, "dp_shard": shard}
    roles = dict.fromkeys(sizes, "dp")
    sizes["tp"], roles["tp"] = tp, "tp"
    return [Layout(Mesh(tuple(sizes), tuple(sizes.values())), roles)]


def variants(layout: Layout, pins: Pins, microbatches: int, recompute: Sequence[str]) -> list[Variant]:
    """The ways to keep parameters that the pins leave open on this layout."""
    found = []
    axes = [axis for axis in layout.mesh.axes if layout.mesh.size(axis) > 1 and layout.roles[axis] != "tp"]
    must = {axis for axis in axes if layout.roles[axis] == "dp"}
    levels = (pins.zero,) if pins.zero is not None else (0, 2, 3) if microbatches == 1 else (0, 1, 2, 3)
    for kind in recompute:
        for count in range(len(axes) + 1):
            for data in itertools.combinations(axes, count):
                if not must <= set(data):
                    continue
                for level in levels:
                    for shard in _shards(data, level, pins):
                        found.append(Variant(level if shard else 0, data, shard, kind))
    return list(dict.fromkeys(found))


def _shards(data: tuple[str, ...], level: int, pins: Pins) -> list[tuple[str, ...]]:
    if level == 0 or not data or pins.shard == 1:
        return [()]
    if pins.shard is not None:
        inner = tuple(axis for axis in data if axis == "dp_shard") or data
        return [inner]
    subsets = [s for n in range(len(data), 0, -1) for s in itertools.combinations(data, n)]
    return subsets if pins.zero is None else subsets[:1]


def _microbatches(graph: Graph, layout: Layout, pins: Pins) -> list[int]:
    """Micro-batch counts to try: the pin, or powers of two that the batch allows."""
    batch = batch_size(graph)
    data = layout.mesh.size([axis for axis in layout.mesh.axes if layout.roles[axis] == "dp"])
    if batch <= (data - 1) * ceil_div(batch, data):
        raise PinError(f"the batch of {batch} samples leaves some of dp={data} ranks without any; use a larger batch or less dp")
    if pins.microbatches is not None:
        if batch % (data * pins.microbatches) and pins.microbatches > 1:
            raise PinError(
                f"the batch of {batch} samples does not divide into dp={data} ranks x microbatches={pins.microbatches}; pin counts "
                "whose product divides it"
            )
        return [pins.microbatches]
    return [1]


def _unsupported(pins: Pins) -> None:
    for name in ("cp", "pp", "ep"):
        if (getattr(pins, name) or 1) > 1:
            raise PinError(
                f"pin {name}={getattr(pins, name)}: this version plans dp, tp, sequence parallelism and ZeRO; drop the pin"
            )


def _solve_layout(
    graph: Graph, cluster: Cluster, pins: Pins, layout: Layout, microbatches: int, rules: Mapping[str, OpRule],
    state_bytes: float, precision: str, timing: Timing, progress: Progress | None, gap: float,
) -> Plan:
    schedule = split_time(graph, dict(rules), microbatches, batch_inputs(graph))
    classes = DimClasses(graph, rules)
    inputs = batch_inputs(graph)
    passed = handed_on(graph)
    sequence = classes.of((name, 1) for name in passed if len(graph.values[name].shape) >= 3)
    batch = classes.of(inputs.items())
    scope = Scope(
        graph, layout.mesh, layout.roles, pins, classes, batch, sequence - batch, frozenset(passed), microbatches
    )
    itemsize = 2 if precision == "bf16" else 4
    costs = Costs(cluster, layout.mesh, microbatches=microbatches, itemsize=itemsize, state_bytes=state_bytes)
    capacity = float(cluster.memory_bytes - cluster.device.reserve_bytes)
    fixed = float(sum(graph.values[name].bytes_ for name in graph.inputs))
    kinds = (pins.recompute,) if pins.recompute is not None else ("none",)

    def attempt(kinds: Sequence[str], limit: float) -> tuple[Problem, Solution]:
        problem = Problem(
            scope, rules, schedule, costs, variants(layout, pins, microbatches, kinds),
            variants(layout, pins, microbatches, ("none",)),
        )
        chain = problem.chain(limit, fixed)
        timing.mark("build")
        try:
            return problem, solve(chain, gap=gap)
        finally:
            timing.mark("solve")

    try:
        problem, solution = attempt(kinds, float("inf"))
        if solution.bytes_ + solution.transient > capacity:
            wider = kinds if pins.recompute is not None else ("none", "full")
            problem, solution = attempt(wider, capacity)
    except Infeasible as error:
        raise _does_not_fit(error, cluster, capacity, layout, microbatches) from None
    assignments, copies, groups = problem.decode(solution)
    if progress is not None:
        progress(f"{layout.mesh}", solution.time)
    predicted = {
        "step_seconds": solution.time,
        "bytes_per_rank": solution.bytes_ + solution.transient,
        "bytes": {"held": solution.bytes_, "transient": solution.transient},
        "capacity_bytes": capacity,
    }
    certificate = {"objective": solution.time, "bound": solution.bound, "gap": solution.gap, "status": solution.status}
    plan = Plan(
        graph, layout.mesh, assignments, copies, groups, schedule, precision, "", str(cluster), predicted, certificate
    )
    return plan


def _does_not_fit(error: Infeasible, cluster: Cluster, capacity: float, layout: Layout, microbatches: int) -> OutOfMemoryError:
    gib = 2.0**30
    return OutOfMemoryError(
        f"nothing fits {cluster}: the least memory any plan needs on mesh {layout.mesh} with microbatches={microbatches} is "
        f"{error.least / gib:.2f} GiB per device, {capacity / gib:.2f} GiB are there"
    )
