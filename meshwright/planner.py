"""The door to planning: a model is captured, its operators get rules, and the search is handed what it may not import.

The search asks ``fits(plan)`` whether a plan's program has room on a device. The answer needs the passes, which lower the
plan, so it is a function that this door hands in (``footprint``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.compiler.capture.capture import capture
from meshwright.compiler.placement.pin_conflicts import idle_pins
from meshwright.compiler.placement.pinned import check_tensor_pins
from meshwright.compiler.rules import default_rules
from meshwright.compiler.search.errors import OutOfMemoryError
from meshwright.compiler.search.search import find_plan, with_nearest
from meshwright.compiler.search.settled import decided, settled, stretched
from meshwright.compiler.search.task import Fits, Progress, Task, Timing
from meshwright.compiler.structure.blocks import find_blocks
from meshwright.compiler.structure.dims import batch_size
from meshwright.compiler.structure.measured import unused_tables
from meshwright.compiler.structure.microbatch import read_apart, split_counts
from meshwright.compiler.structure.units import find_layers, find_units, split_at, start_of
from meshwright.cost.catalogue import catalogue
from meshwright.cost.cluster import Cluster, ClusterError, Island
from meshwright.cost.spread import spread
from meshwright.errors import InputError, MeshwrightError
from meshwright.footprint import Footprints
from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.declared.precision import PRECISIONS
from meshwright.ir.declared.registered import registered_of
from meshwright.ir.graph import Graph, collector_paused
from meshwright.ir.mesh import ORDER
from meshwright.ir.pins import ULYSSES, PinError, Pins, is_laid_out, nearest
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.prediction import Certificate
from meshwright.ir.reading.fields import Field
from meshwright.ir.reading.records import record_of, record_to
from meshwright.ir.rule import factors_of
from meshwright.ir.writing.versions import prices
from meshwright.piecewise import FIRST, Search, check_pieces, chosen
from meshwright.resized import check_positions
from meshwright.rules import rules_of

__all__ = ["OPTIMIZERS", "OutOfMemoryError", "Timing", "capture_model", "check_early", "make_plan", "rules_of"]

OPTIMIZERS: Mapping[str, float] = {"adamw": 8.0, "adam": 8.0, "sgd": 0.0, "momentum": 4.0, "adagrad": 4.0, "lion": 4.0}
"""Bytes of optimizer state per parameter, fp32 states."""
MOST_STATE = 1 << 20
"""Bytes of optimizer state per parameter that are still some."""

_OF_ANY_MODEL = frozenset({"dp", "tp", "zero", "recompute", "axes"})
"""Pins whose values devices and batch decide, not the model."""
GAP = 0.005
"""The relative distance from the lower bound at which a search may stop."""


@collector_paused()
def capture_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...], loss_fn: Any, precision: str,
    training: bool = True, functional: bool = False,
) -> Graph:
    """The model's graph at the global batch, blocks found. Raises InputError for a sequence beyond a table of positions."""
    graph = capture(model, args, dict(kwargs), loss_fn=loss_fn, targets=targets, compute_dtype=PRECISIONS[precision].compute,
                    training=training, functional=functional)
    check_positions(graph)
    return find_units(find_blocks(read_apart(split_counts(graph), default_rules().operators)))


@collector_paused()
def make_plan(
    graph: Graph, cluster: Cluster, pins: Pins, *, optimizer: str | float = "adamw", precision: str = "fp32",
    strict: bool = False, timing: Timing | None = None, progress: Progress | None = None, gap: float = GAP,
    remedies: bool = True,
) -> Plan:
    """The plan of least time that fits, the loss and MLPs in pieces where that pays (``piecewise``). ``remedies``: if nothing
    fits, look for what would if a pin were dropped. Raises PinError, OutOfMemoryError, PlanError."""
    timing = timing or Timing()
    if not batch_size(graph):
        raise InputError("the example's batch has no samples; give an example with at least one")
    cluster = cluster.with_products(PRECISIONS[precision].products)

    def made(graph: Graph, search: Search) -> Plan:
        return _made(graph, cluster, pins, optimizer, precision, strict, timing, progress, gap, search)

    try:
        check_pins(pins, cluster)
        return chosen(graph, cluster, pins, precision, gap, made, find_plan if remedies else FIRST)
    except OutOfMemoryError:
        raise
    except (PinError, PlanError) as error:
        raise _with_nearest(error, graph, cluster, pins, precision) from None


def _with_nearest(
    error: PinError | PlanError, graph: Graph, cluster: Cluster, pins: Pins, precision: str
) -> PinError | PlanError:
    """The error with the nearest pins that leave something to run, where these leave nothing."""
    rules, _ = rules_of(graph)
    task = Task.of(graph, cluster, rules, Pins(), precision=precision, state_bytes=OPTIMIZERS["adamw"], gap=GAP)

    def check(pins: Pins) -> None:
        check_pins(pins, cluster)
        check_pieces(graph, pins)

    return with_nearest(error, replace(task, pins=pins), check)


def _made(
    graph: Graph, cluster: Cluster, pins: Pins, optimizer: str | float, precision: str, strict: bool, timing: Timing,
    progress: Progress | None, gap: float, search: Search,
) -> Plan:
    """The plan for the loss and the MLPs as they stand in the graph. Raises what ``make_plan`` does."""
    if progress is not None:
        progress("what operators may choose", 0.0)
    if pins.stage_cuts:  # layers first, as a search for stages cuts them: stages cut what is there further
        _check_cuts(graph, pins.stage_cuts)
        graph = split_at(find_layers(graph), pins.stage_cuts)
    rules, notes = rules_of(graph, strict)
    check_tensor_pins(pins, graph)
    timing.mark("rules")
    state_bytes = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else float(optimizer)
    task = Task.of(graph, cluster, rules, Pins(), precision=precision, state_bytes=state_bytes, gap=gap)
    check_experts(pins.by_degrees(), task)
    given = decided(replace(task, pins=pins))
    if given is not None:
        plan = _settled(task, given, Footprints(rules, state_bytes, cluster.device).fits)
        timing.mark("plan")
    else:
        check_held(pins)
        check_order(pins)
        by_degrees = pins.by_degrees()
        task = Task.of(graph, cluster, rules, by_degrees, precision=precision, state_bytes=state_bytes, gap=gap)
        fits = Footprints(rules, state_bytes, cluster.device, all_ranks=False).fits
        plan = search(task, fits, timing=timing, progress=progress)
        check_mesh(pins, plan)
    assert plan.certificate is not None
    return replace(
        _with_interval(plan, cluster), optimizer=optimizer if isinstance(optimizer, str) else f"{optimizer:g} bytes",
        devices=described(cluster),
        notes=(*notes, *_imbalance(plan), *_of_whole_batch(plan), *idle_pins(plan, pins.by_degrees()), *plan.notes,
               *unused_tables(plan.graph, rules, cluster.device)),
        registered=registered_of(graph),
        certificate=replace(plan.certificate, planning_seconds=dict(timing.phases)),
    )


def _check_cuts(graph: Graph, names: Sequence[str]) -> None:
    """Raise PinError for two names of stages that start at one operator."""
    known: dict[int, str] = {}
    for name in names:
        at = start_of(graph, name)
        if at is not None and (other := known.setdefault(at, name)) != name:
            raise PinError(f"pin stage_cuts: {other!r} and {name!r} begin with the same operator, {graph.ops[at].target}, so "
                           "there is nothing between them to be a stage; name one of them")


def _settled(task: Task, given: Plan, fits: Fits) -> Plan:
    """The plan that pins decide, with its prediction. Raises PinError if it cannot run so, OutOfMemoryError."""
    try:
        plan = settled(task, given, fits)
    except PlanError as error:
        raise PinError(f"the pins decide everything, and {error}") from error
    assert plan.predicted is not None
    if not plan.predicted.fits:
        raise OutOfMemoryError.of_plan(plan, task.cluster).with_remedy(
            "drop the pin blocks or operators, so that it is searched"
        )
    seconds = plan.predicted.step_seconds
    nothing = Certificate(seconds, seconds, "optimal", considered=1, solved=1, assumes=("every decision is pinned",))
    return replace(plan, certificate=nothing)


def check_held(pins: Pins) -> None:
    """Raise PinError for pins of blocks that a search cannot hold: one with stages keeps all blocks' parameters alike."""
    degrees = pins.by_degrees()
    if pins.blocks and not (degrees.free_axes or degrees.pp == 1):
        raise PinError("pin blocks is held without a pipeline (pin pp=1), or where everything is pinned, as plan.to_pins() "
                       "does; pin zero, shard and recompute instead, or everything")


def check_order(pins: Pins) -> None:
    """Raise PinError for axes with roles in another order than a search lays them out: it decides whose ranks share a node."""
    axes = [axis for axis, size in (pins.axes or {}).items() if size > 1]
    order = [] if pins.free_axes else sorted(axes, key=lambda axis: ORDER.index(axis.removesuffix("*")))
    if order and axes != order:
        raise PinError(f"pin axes={dict(pins.axes or {})}: a search lays out axes as {', '.join(order)}, the outermost first; "
                       "pin them in this order, or everything")


def check_mesh(pins: Pins, plan: Plan) -> None:
    """Raise PinError for axes that the search has otherwise."""
    have = {axis + "*" * (axis in plan.mesh.mirrored): plan.mesh.size(axis) for axis in plan.mesh.axes}
    more = {axis for axis, size in have.items() if size > 1}
    if pins.axes is not None and not is_laid_out(pins.axes, plan.mesh):
        given = {axis for axis, size in pins.axes.items() if size > 1}
        chunks = given != more and {axis.removesuffix("*") for axis in given} == {axis.removesuffix("*") for axis in more}
        marks = "; cp* is a sequence in two chunks a rank, cp one in one, as attention='ulysses' has it" if chunks else ""
        raise PinError(f"pin axes={dict(pins.axes)}: a search lays these devices out as {plan.mesh}; pin that, or everything"
                       f"{marks}")


def reprice(plan: Plan, cluster: Cluster | str | None = None) -> Plan:
    """The plan with what it takes and holds by the prices of this version, on its own cluster or on another of as many devices:
    nothing is searched, and it may need more memory than there is (``predicted.fits``). As much of the memory is left free as
    the plan left (``headroom``); a ``Cluster`` is taken as it is. The certificate, which was of other prices, is gone. Raises
    PlanError for what no search of this version decides, ClusterError for a cluster of which neither the catalogue nor the plan
    has the numbers.

    >>> newer = reprice(plan, "b200:1x8")        # doctest: +SKIP
    """
    task = task_of(plan, cluster)
    found = settled(task, plan, Footprints(task.rules, task.state_bytes, task.cluster.device).fits)
    return replace(_with_interval(found, task.cluster), devices=described(task.cluster), certificate=None)


def reprice_batches(plan: Plan, times: float) -> Plan:
    """The plan with what a step takes of ``times`` as large a batch, in as many more micro-batches, on its own cluster; its
    memory is as the search counts it. Raises PlanError, ClusterError as ``reprice`` does."""
    found = stretched(task_of(plan, None), plan, times)
    rates = {name: times * rate for name in ("tokens_per_second", "tflops_per_device", "mfu")
             if (rate := getattr(found, name)) is not None}  # they are of the graph's batch, and the seconds of the other
    return replace(plan, predicted=replace(found, **rates), certificate=None)


def task_of(plan: Plan, cluster: Cluster | str | None) -> Task:
    """What the prices of a plan need, on its own cluster or on another."""
    where = cluster_of(plan, cluster) if cluster is None or isinstance(cluster, str) else cluster
    where = where.with_products(PRECISIONS[plan.precision].products)
    rules, _ = rules_of(plan.graph)
    return Task.of(plan.graph, where, rules, Pins(), precision=plan.precision, state_bytes=state_bytes(plan), gap=GAP)


def cluster_of(plan: Plan, name: str | None = None) -> Cluster:
    """The devices that a plan was made for, or others by their name, with as much of their memory left free as the plan left.
    Raises ClusterError."""
    if plan.devices:
        return cluster_in(plan) if name is None else Cluster.parse(name).with_headroom()
    own, predicted = Cluster.parse(plan.cluster), plan.predicted
    where = own if name is None else Cluster.parse(name)
    if predicted is None or predicted.free_bytes is None:
        return where.with_headroom()
    if predicted.capacity_bytes + predicted.free_bytes != own.memory_bytes:  # its memory was given, and is no part of its name
        return where.with_memory(int(predicted.capacity_bytes)) if name is None else where.with_headroom()
    free = own.capacity_bytes - predicted.capacity_bytes
    return where.with_headroom(min((free + 0.5) / own.capacity_bytes, 0.999) if free > 0 else 0.0)  # whole bytes of its own


def described(cluster: Cluster) -> tuple[Mapping[str, Any], ...]:
    """The numbers of a cluster as plain values, for a plan to keep: of a file, or measured. Nothing where its name says them,
    memory aside, which a prediction has."""

    def bare(one: Cluster) -> list[Island]:
        return [replace(island, device=replace(island.device, memory_bytes=0, reserve_bytes=0, products=""))
                for island in one.islands]

    with suppress(ClusterError):
        if bare(Cluster.parse(str(cluster))) == bare(cluster):
            return ()
    return tuple(json.loads(json.dumps(record_to(island))) for island in cluster.islands)


def cluster_in(plan: Plan) -> Cluster:
    """The cluster that a plan names, by the numbers that it was planned with. Raises ClusterError where neither the catalogue
    nor the plan has them."""
    if not plan.devices:
        return Cluster.parse(plan.cluster)
    try:
        found = Cluster(tuple(record_of(Island, Field(dict(one), f"devices[{at}]")) for at, one in enumerate(plan.devices)))
    except PlanError as error:
        raise ClusterError(str(error)) from error
    if not all(_is_whole(island) for island in found.islands):
        raise ClusterError("the plan is damaged: devices: a number is 0 that must be more, or columns differ in length")
    if str(found) != plan.cluster or found.world != plan.mesh.world:
        raise ClusterError(f"the plan is damaged: its devices are {found}, not {plan.cluster} of {plan.mesh.world}")
    return found


def _is_whole(island: Island) -> bool:
    """Whether prices can be made of the numbers."""
    device, node = island.device, island.node
    known = {table.get("kind") for table in catalogue()["node"].values()}
    tables = (*device.measured, *device.streams, *device.attentions, *device.modules, *node.measured)
    columns = [[one for one in vars(table).values() if isinstance(one, tuple)] for table in tables]
    dims = (island.world, node.torus_dims) if node.kind == "torus" else (1, 0)
    return all((
        island.nodes, island.per_node, node.per_node, node.link_bandwidth, node.ring_efficiency, not island.is_apart,
        node.nic_efficiency, device.memory_bytes, device.memory_bandwidth, device.matmul_efficiency, device.memory_efficiency,
        device.units, device.tile, device.peak, *device.peak.values(), *(all(ways) for ways in device.attention.values()),
        device.attention_kernel in device.attention, node.kind in known,
        (math.prod(island.torus), len(island.torus)) == dims,
        *(len({len(column) for column in table}) == 1 and all(table[0]) for table in columns),
        *(min(column) > 0 for table in columns for column in table if column and isinstance(column[0], float)),
    ))


def state_bytes(plan: Plan) -> float:
    """Bytes of optimizer state per parameter. Raises PlanError."""
    if plan.optimizer in OPTIMIZERS:
        return OPTIMIZERS[plan.optimizer]
    number, _, unit = plan.optimizer.partition(" ")
    with suppress(ValueError):
        if unit == "bytes" and 0 <= float(number) < math.inf:
            return float(number)
    raise PlanError(f"the plan's optimizer {plan.optimizer!r} is none of {', '.join(OPTIMIZERS)}, and no number of bytes of "
                    f'state per parameter, such as "8 bytes"')


def load_plan(path: str | Path) -> Plan:
    """The plan of a file (``Plan.load``), priced again if its predictions were made with other prices than this version's or of
    other decisions than the file holds now, or if they were altered; a note says so. Where it cannot be priced here, its
    predictions stay and are marked. Raises PlanError, also for a pipeline that its schedule cannot run.

    >>> plan = load_plan("plan.json")            # doctest: +SKIP
    """
    plan = Plan.load(path)
    if plan.pipeline is not None:
        try:
            plan.pipeline.check(plan.schedule.microbatches)
        except MeshwrightError as error:
            raise PlanError(f"the plan {path} cannot be run: {error}") from error
    if not plan.stale:
        return plan
    try:
        found = reprice(plan)
    except MeshwrightError as error:
        note = f"not priced again, so that its predictions may be of other prices or altered: {error}"
        return replace(plan, notes=(*plan.notes, note))
    note = "priced when it was read: the file's predictions were of other prices or of other decisions, or were altered"
    return replace(found, notes=(*(one for one in plan.notes if one != note), note))


def _with_interval(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the interval in which most such runs came out, and by which prices it was made."""
    assert plan.predicted is not None
    likely, step = spread(cluster, plan.mesh), plan.predicted.step_seconds
    return replace(
        plan, predicted=replace(plan.predicted, low_seconds=likely.low * step, high_seconds=likely.high * step, prices=prices())
    )


def _imbalance(plan: Plan) -> tuple[str, ...]:
    """What a plan that splits experts over devices takes for granted of the routing."""
    split = [op.args[0] for op in plan.graph.ops if op.target == EXPERTS for axis, factor in plan.assignments[op.name].items()
             if len(factors_of(factor)) > 1 and plan.mesh.size(axis) > 1]
    assumed = sorted({experts.imbalance for experts in split})
    return tuple(f"experts are split: the fullest device is taken to get {one:g} times the mean of the rows (expert_imbalance)"
                 for one in assumed)


def _of_whole_batch(plan: Plan) -> tuple[str, ...]:
    """What is made of all micro-batches, and what that takes."""
    schedule = plan.schedule
    late = [op for op in plan.graph.ops if op.name in schedule.epilogue]
    if not late:
        return ()
    first = f"{late[0].target} ({late[0].source})" if late[0].source else late[0].target
    found = f"{first} and what follows from it are of the whole batch: they run once a step, behind the micro-batches"
    if not schedule.ahead:
        return (found,)
    again = f"of {len(schedule.ahead)} of {len(plan.graph.ops)} operators" if plan.pipeline is None else "through the stages"
    return (f"{found}; what their gradients depend on is made before, by one more forward {again} over all micro-batches "
            "(microbatches=1 needs none)",)


def check_experts(pins: Pins, task: Task) -> None:
    """Raise PinError for experts that cannot be split as pinned."""
    if (ep := pins.ep or 1) == 1:
        return
    graph, rules = task.graph, task.rules
    stacked = task.structure.stacked.products
    counts = {
        op: {rules[op.name].sizes[one] for both in rules[op.name].together for one in factors_of(both)[1:]}
        | {rules[op.name].sizes[factor] for name, factor in stacked.items() if name == op.name}
        for op in graph.ops if rules[op.name].together or op.name in stacked
    }
    if not counts:
        raise PinError(f"pin ep={ep}: the model has no experts that could be split (a mixture must export as sorted tokens and "
                       "grouped products: in transformers experts_implementation=\"grouped_mm\"; or as products with weights "
                       "that are stacked over experts, whose answers are summed over these); drop the pin")
    for op, sizes in counts.items():
        if any(size % ep for size in sizes):
            raise PinError(f"pin ep={ep} does not divide the {max(sizes)} experts of {op.module or 'the model'}")


def check_early(pins: Pins, cluster: Cluster, batch: int) -> None:
    """What ``check_pins`` checks, before a capture that takes a while: of pins that any model can have. Others are refused
    when the model is known, so that what is named instead can be tried with it. Raises PinError with the nearest pins that
    these devices and a batch of so many samples (0: not known) can have."""
    said = {field.name for field in fields(pins) if getattr(pins, field.name) not in (None, {})} | {*pins.among, *pins.most}
    if not said <= _OF_ANY_MODEL or (not batch and "dp" in said):
        return

    def runs(pins: Pins) -> bool:
        with suppress(PinError):
            check_pins(pins, cluster)
            return batch % (pins.dp or 1) == 0
        return False

    try:
        check_pins(pins, cluster)
    except PinError as error:
        words = nearest(pins, cluster.world, batch, runs)
        raise PinError(f"{error}; nearest legal setting: {words}" if words else str(error)) from None


def check_pins(pins: Pins, cluster: Cluster) -> None:
    """Raise PinError for what no model can have on this cluster, or in this version."""
    pins = pins.by_degrees()
    pins.check_world(cluster.world)
    near = pins.ulysses or 1
    if near > 1 and ((pins.cp or 1) % near or pins.cp == near or pins.attention == ULYSSES):
        raise PinError(f"pin ulysses={near} needs a pin cp that is a larger multiple of it, and another attention over the "
                       f"rest, found cp={pins.cp}, attention={pins.attention!r} (under attention={ULYSSES!r} all cp ranks "
                       "exchange sequence for heads, without this pin); change one, or drop it")
    if pins.says("attention") and not pins.says("cp"):
        raise PinError(f"pin {pins.shown('attention')} needs pin cp beside it: it says how attention runs whose sequence is "
                       "split, and cp over how many ranks; drop it")
