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

import numpy as np
import torch
from torch import nn

from meshwright.compiler.blocks import find_blocks
from meshwright.compiler.capture import capture
from meshwright.compiler.chain import Chain, Infeasible, Solution
from meshwright.compiler.choices import Scope
from meshwright.compiler.costs import HIDING, MEMORY, TRANSIENT, Costs, Variant
from meshwright.compiler.dims import DimClasses, batch_inputs, batch_size, handed_on
from meshwright.compiler.microbatch import split_counts, split_time
from meshwright.compiler.problem import Problem, totals
from meshwright.compiler.rules import default_rules
from meshwright.compiler.solve import solve
from meshwright.cost.cluster import Cluster
from meshwright.graph import Graph
from meshwright.mesh import Mesh
from meshwright.pins import PinError, Pins, vars_of
from meshwright.plan import Plan, PlanError
from meshwright.rule import OpRule
from meshwright.sharding import ceil_div

OPTIMIZERS: Mapping[str, float] = {"adamw": 8.0, "adam": 8.0, "sgd": 0.0, "momentum": 4.0, "adagrad": 4.0, "lion": 4.0}
"""Bytes of optimizer state per parameter, fp32 states."""

GAP = 0.005


class OutOfMemoryError(PlanError):
    """No plan fits the device memory; says what binds and what would fit. Bytes per device: ``least`` that any plan needs,
    ``capacity`` there is, ``bytes_`` of the plan that needs least by kind."""

    def __init__(self, message: str, least: float, capacity: float, bytes_: Mapping[str, float]) -> None:
        super().__init__(message)
        self.least, self.capacity, self.bytes_ = least, capacity, dict(bytes_)

    @classmethod
    def of(
        cls, least: float, capacity: float, bytes_: Mapping[str, float] | None, mesh: Mesh, microbatches: int, cluster: Cluster
    ) -> OutOfMemoryError:
        """Of one layout that does not fit."""
        kinds = sorted((bytes_ or {}).items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {value / 2**30:.3f}" for name, value in kinds if value)
        binding = f"; {kinds[0][0]} bind: {parts} GiB" if kinds else ""
        return cls(
            f"nothing fits {cluster}: the least memory any plan needs on mesh {mesh} with microbatches={microbatches} is "
            f"{least / 2**30:.3f} GiB per device, {capacity / 2**30:.3f} GiB are there{binding}", least, capacity, bytes_ or {},
        )

    def with_remedy(self, remedy: str) -> OutOfMemoryError:
        """The same error, saying what would fit."""
        return OutOfMemoryError(f"{self}. Nearest change: {remedy}", self.least, self.capacity, self.bytes_)


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
    search = _Search(graph, cluster, rules, state_bytes, precision, gap, timing, progress)
    try:
        best = search.best(pins)
    except OutOfMemoryError as error:
        raise search.explain(error, pins) from None
    return replace(
        best, optimizer=optimizer if isinstance(optimizer, str) else f"{optimizer:g} bytes", notes=(*notes, *best.notes),
        certificate={**best.certificate, "candidates": search.candidates, "seconds": dict(timing.phases)},
    )


@dataclass
class _Search:
    """One search: what stays the same over its layouts, and what was tried."""

    graph: Graph
    cluster: Cluster
    rules: Mapping[str, OpRule]
    state_bytes: float
    precision: str
    gap: float
    timing: Timing
    progress: Progress | None
    candidates: list[dict[str, Any]] = field(default_factory=list)

    def best(self, pins: Pins) -> Plan:
        """The plan of least time over all layouts; more micro-batches only where fewer do not fit."""
        found: Plan | None = None
        failure: OutOfMemoryError | None = None
        tried = layouts(self.cluster, pins)
        for number, layout in enumerate(tried):
            for count in _microbatches(self.graph, layout, pins):
                if self.progress is not None:
                    self.progress(f"{layout.mesh}, {count} micro-batches", number / len(tried))
                entry: dict[str, Any] = {"mesh": str(layout.mesh), "microbatches": count}
                self.candidates.append(entry)
                try:
                    plan = self.solve(layout, count, pins)
                except OutOfMemoryError as error:
                    entry["result"] = "does not fit"
                    failure = error if failure is None or error.least < failure.least else failure
                    continue
                except PlanError as error:
                    if pins.microbatches is not None or count == 1:
                        raise
                    entry["result"] = str(error)
                    continue
                entry["step_seconds"] = plan.predicted["step_seconds"]
                if found is None or entry["step_seconds"] < found.predicted["step_seconds"] * (1 - 1e-9):
                    found = plan
                break
        if found is None:
            assert failure is not None
            raise failure
        return found

    def solve(self, layout: Layout, microbatches: int, pins: Pins) -> Plan:
        """The plan on one layout."""
        graph = self.graph
        schedule = split_time(graph, dict(self.rules), microbatches, batch_inputs(graph))
        scope = _scope(graph, self.rules, layout, pins, microbatches)
        costs = Costs(
            self.cluster, layout.mesh, microbatches=microbatches, itemsize=2 if self.precision == "bf16" else 4,
            state_bytes=self.state_bytes,
        )
        capacity = float(self.cluster.memory_bytes - self.cluster.device.reserve_bytes)
        fixed = float(sum(graph.values[name].bytes_ for name in graph.inputs))

        def attempt(recompute: Sequence[str], limit: float) -> tuple[Problem, Chain, Solution]:
            problem = Problem(
                scope, self.rules, schedule, costs, variants(layout, pins, microbatches, recompute),
                variants(layout, pins, microbatches, ("none",)),
            )
            chain = problem.chain(limit, fixed)
            self.timing.mark("build")
            try:
                return problem, chain, solve(chain, gap=self.gap)
            except Infeasible as error:
                bytes_ = None if error.solution is None else _bytes(chain, error.solution, fixed)
                raise OutOfMemoryError.of(error.least, capacity, bytes_, layout.mesh, microbatches, self.cluster) from None
            finally:
                self.timing.mark("solve")

        # without a limit no recomputation pays: if that optimum fits it is the optimum
        kinds = (pins.recompute,) if pins.recompute is not None else ("none",)
        problem, chain, solution = attempt(kinds, float("inf"))
        if solution.bytes_ + solution.transient > capacity:
            problem, chain, solution = attempt(kinds if pins.recompute is not None else ("none", "full"), capacity)
        assignments, copies, groups = problem.decode(solution)
        return Plan(
            graph, layout.mesh, assignments, copies, groups, schedule, self.precision, "", str(self.cluster),
            _predicted(chain, solution, fixed, capacity),
            {"objective": solution.time, "bound": solution.bound, "gap": solution.gap, "status": solution.status},
        )

    def explain(self, error: OutOfMemoryError, pins: Pins) -> OutOfMemoryError:
        """The error with the nearest change that would fit: a pin dropped, a smaller batch, more devices."""
        for name in ("recompute", "zero", "microbatches", "shard", "sequence_parallel", "tp", "dp"):
            if getattr(pins, name) is None:
                continue
            try:
                plan = self.best(Pins.of({**vars_of(pins), name: None}))
            except PlanError:
                continue
            need = plan.predicted["bytes_per_rank"] / 2**30
            return error.with_remedy(f"without the pin {name}={getattr(pins, name)} it fits in {need:.2f} GiB")
        return error.with_remedy(_smaller(error, batch_size(self.graph), self.cluster.world))


def _smaller(error: OutOfMemoryError, batch: int, world: int) -> str:
    """What would fit when no pin stands in the way."""
    activations = error.bytes_.get("activations", 0.0) + error.bytes_.get("transient", 0.0)
    rest = error.least - activations
    if batch > 1 and activations > 0 and rest < error.capacity:
        return f"a batch of about {max(1, int(batch * (error.capacity - rest) / activations))} instead of {batch} would fit"
    many = ceil_div(int(world * error.least), int(error.capacity))
    return f"about {many} devices of this kind instead of {world}, or devices of {error.least / 2**30:.2f} GiB, would fit"


def _scope(graph: Graph, rules: Mapping[str, OpRule], layout: Layout, pins: Pins, microbatches: int) -> Scope:
    classes = DimClasses(graph, rules)
    passed = handed_on(graph)
    batch = classes.of(batch_inputs(graph).items())
    sequence = classes.of((name, 1) for name in passed if len(graph.values[name].shape) >= 3)
    return Scope(
        graph, layout.mesh, layout.roles, pins, classes, batch, sequence - batch, frozenset(passed), microbatches
    )


def _bytes(chain: Chain, solution: Solution, fixed: float) -> dict[str, float]:
    """Bytes per rank by kind."""
    resources = totals(chain, solution)
    kinds = {name: float(resources[:, index].sum()) for name, index in MEMORY.items()}
    return {**kinds, "inputs": fixed, "transient": float(resources[:, TRANSIENT].max())}


def _predicted(chain: Chain, solution: Solution, fixed: float, capacity: float) -> dict[str, Any]:
    """What the plan is predicted to cost: seconds of the step and their parts, bytes per rank by kind."""
    forward, backward, send, back, gather, reduce_ = totals(chain, solution)[:, :6].T
    hidden = np.minimum(gather, HIDING * forward) + np.minimum(reduce_, HIDING * backward)
    return {
        "step_seconds": solution.time,
        "compute_seconds": float((forward + backward).sum()),
        "communication_seconds": float((send + back + gather + reduce_).sum()),
        "exposed_communication_seconds": float((send + back + gather + reduce_ - hidden).sum()),
        "bytes_per_rank": solution.bytes_ + solution.transient,
        "bytes": _bytes(chain, solution, fixed),
        "capacity_bytes": capacity,
    }


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
    """Micro-batch counts to try in order: the pin, or the powers of two that the batch allows."""
    batch = batch_size(graph)
    data = layout.mesh.size([axis for axis in layout.mesh.axes if layout.roles[axis] == "dp"])
    if batch <= (data - 1) * ceil_div(batch, data):
        raise PinError(f"the batch of {batch} samples leaves some of dp={data} ranks without any; take more samples or less dp")
    if pins.microbatches is not None:
        if batch % (data * pins.microbatches) and pins.microbatches > 1:
            raise PinError(
                f"the batch of {batch} samples does not divide into dp={data} ranks x microbatches={pins.microbatches}; pin "
                "counts whose product divides it"
            )
        return [pins.microbatches]
    return [1] + [2**n for n in range(1, batch.bit_length()) if batch % (data * 2**n) == 0]


def _unsupported(pins: Pins) -> None:
    for name in ("cp", "pp", "ep"):
        if (getattr(pins, name) or 1) > 1:
            raise PinError(
                f"pin {name}={getattr(pins, name)}: this version plans dp, tp, sequence parallelism and ZeRO; drop the pin"
            )
