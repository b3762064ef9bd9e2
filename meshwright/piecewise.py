"""Which operators run in pieces: the loss, and the MLPs. Each is a graph of its own, for which a plan is searched.

    all at once                          the rule
    the loss in pieces                   where nothing fits; where logits are many in a plan that recomputes or takes several
                                         micro-batches; and alone where those of a sample are many and making them again is
                                         less of a step than a search may miss anyway, as in long sequences. In smaller pieces
                                         where memory is short then and a piece takes much of it
    the loss and the MLPs in pieces      where nothing fits then, and a sample has more tokens than a piece

Pins settle either (``loss_rows``, ``mlp_rows``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from meshwright.compiler.search.blockwise import WIDEST
from meshwright.compiler.search.errors import NoBetterError, OutOfMemoryError
from meshwright.compiler.search.search import SECONDS, best_plan, bounded, proof_of
from meshwright.compiler.search.task import Progress, Task, Timing
from meshwright.compiler.structure.dims import batch_size
from meshwright.compiler.structure.mlps import ROWS as MLP_ROWS
from meshwright.compiler.structure.mlps import many_rows, mlps_in_pieces, rows_of_mlps
from meshwright.compiler.structure.pieces import ROWS, in_pieces, losses, rows_of
from meshwright.cost import compute
from meshwright.cost.catalogue import Device
from meshwright.cost.cluster import Cluster
from meshwright.ir.declared.operator import Work
from meshwright.ir.declared.precision import PRECISIONS
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import ANY, SEQUENCE, SHARED, TENSOR, role_of
from meshwright.ir.pins import RECOMPUTE, PinError, Pins
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.prediction import Prediction
from meshwright.ir.rule import factors_of
from meshwright.rules import rules_of

_FEW = 0.02
"""Logits that take less than this part of a device's memory decide nothing."""
_MUCH, _LEAST = 0.05, 512
"""A piece of the loss that takes more than this part of a device's memory is made smaller, to so many rows at least, where
memory is short (chosen): every piece adds the weight's gradient to that of those before."""
_DEAR = 0.1
"""Where making the logits again is so much of a step, all of them at once are looked at whatever else is open (chosen)."""
_LOGIT = 4 + 4 + 2
"""Bytes of a logit: in fp32 with its gradient, and as it is made."""
AGAIN, LEFT = 0.4 * SECONDS, 0.1 * SECONDS
"""Nominal limits of a search that has a plan of the graph as it is to beat: at most, and where those before took all that one
may take (chosen)."""
Search = Callable[..., Plan]
"""``find_plan``, or without a look at what else would fit."""
FIRST: Search = partial(best_plan, limit=SECONDS)


Made = Callable[[Graph, Search], Plan]
"""Searches a graph."""


def chosen(graph: Graph, cluster: Cluster, pins: Pins, precision: str, gap: float, made: Made, last: Search) -> Plan:
    """The plan of the graph, or of it in pieces; ``last``: the search after which nothing is left to try. Raises what ``made``
    does."""
    check_pieces(graph, pins)
    rows = ("loss", pins.loss_rows, rows_of(graph)), ("MLPs", pins.mlp_rows, rows_of_mlps(graph))
    left_open = [what for what, pinned, found in rows if pinned is None and found is not None]
    return _open(_chosen(graph, cluster, pins, precision, gap, made, last), left_open)


def _chosen(graph: Graph, cluster: Cluster, pins: Pins, precision: str, gap: float, made: Made, last: Search) -> Plan:
    """``chosen``, certified for what was looked at."""
    if pins.mlp_rows is not None or not many_rows(graph):
        return _of_losses(graph, _inner(made, pins.mlp_rows or 0), cluster, pins, precision, gap, last)
    try:
        return _of_losses(graph, made, cluster, pins, precision, gap, FIRST)
    except OutOfMemoryError as error:
        rows = pins.loss_rows if pins.loss_rows is not None else _fewer(graph, cluster) if rows_of(graph) == 0 else 0
        try:
            return _inner(made, MLP_ROWS)(in_pieces(graph, rows) if rows else graph, last)
        except PinError:  # of an operator that is in no piece
            raise error from None


def _open(plan: Plan, what: Sequence[str]) -> Plan:
    """A plan whose certificate says that ``what`` pins leave open was not looked at in all the pieces that pins can say."""
    proof = plan.certificate
    if not what or proof is None:
        return plan
    run = "runs" if what == ["loss"] else "run"
    said = f"the {' and the '.join(what)} {run} at once, or in pieces as the plan has them"
    return replace(plan, certificate=replace(proof, assumes=(*proof.assumes, said)))


def check_pieces(graph: Graph, pins: Pins) -> None:
    """Raise PinError for a loss or MLPs that are pinned in pieces and cannot be."""
    if pins.mlp_rows and rows_of_mlps(graph) is None:
        raise PinError(f"pin mlp_rows={pins.mlp_rows}: no linears of one value are followed by operators that work element by "
                       "element on nothing else, then by one linear, with nobody else who reads what lies between")
    if pins.loss_rows and rows_of(graph) is None:
        raise PinError(f"pin loss_rows={pins.loss_rows}: no linear makes logits that a mean or sum of cross entropies over "
                       "class indices alone reads; if the model returns the logits beside the loss, give "
                       "loss_fn=mw.loss_alone, or drop the pin")


def _inner(made: Made, rows: int) -> Made:
    """The same with the MLPs in pieces of so many rows, 0: all at once."""
    return (lambda graph, search: made(mlps_in_pieces(graph, rows), search)) if rows else made


def _of_losses(graph: Graph, made: Made, cluster: Cluster, pins: Pins, precision: str, gap: float, last: Search) -> Plan:
    """The plan of the graph, or of it with its loss in pieces; ``last``: the search after which nothing is left to try."""
    if pins.loss_rows is not None:
        return made(_with_loss(graph, pins.loss_rows), last)
    if rows_of(graph) != 0:
        return made(graph, last)
    again = _logits_again(graph, cluster.device, ROWS)
    if again <= gap and _of_a_sample(graph) >= _FEW * cluster.capacity_bytes:
        pieces: Plan | None = None
        with suppress(PinError):  # of an operator that is in no piece
            pieces = _in_pieces(graph, made, cluster, pins, last)
        if pieces is not None:
            return _spared(pieces, _again_of(pieces, graph, cluster.device), gap, partial(made, graph))
    try:
        whole = made(graph, FIRST)
    except OutOfMemoryError as error:
        try:
            return _in_pieces(graph, made, cluster, pins, last)
        except PinError:  # of an operator that is in no piece
            raise error from None
    if not _short(whole, pins) or _logits_bytes(whole) < _FEW * cluster.capacity_bytes:
        return whole
    fewer = _fewer(graph, cluster)  # memory is short here
    pieces = _or_faster(whole, graph, made, fewer)
    return pieces if pieces is whole or fewer == ROWS else _or_faster(pieces, graph, made, ROWS)


def _in_pieces(graph: Graph, made: Made, cluster: Cluster, pins: Pins, last: Search) -> Plan:
    """The best plan with the loss in pieces: of ROWS rows, or of fewer where memory is short and a piece takes much of it.
    ``last``: the search after which nothing is left to try."""
    fewer = _fewer(graph, cluster)
    if fewer == ROWS:
        return made(in_pieces(graph, ROWS), last)
    try:
        plan = made(in_pieces(graph, ROWS), FIRST)
    except OutOfMemoryError:
        return made(in_pieces(graph, fewer), last)
    return _or_faster(plan, graph, made, fewer) if _short(plan, pins) else plan


def _or_faster(plan: Plan, graph: Graph, made: Made, rows: int) -> Plan:
    """A plan, or a faster one with the loss in pieces of so many rows."""
    with suppress(NoBetterError, PlanError, PinError):
        return made(in_pieces(graph, rows), partial(_again, to_beat=_seconds(plan)))
    return plan


def _fewer(graph: Graph, cluster: Cluster) -> int:
    """Rows of the largest piece that does not take much of a device's memory."""
    rows, widest = ROWS, max(shape[-1] for shape in _logits(graph))
    while rows > _LEAST and rows * widest * _LOGIT > _MUCH * cluster.capacity_bytes:
        rows //= 2
    return rows


def _spared(pieces: Plan, part: float, gap: float, made: Callable[[Search], Plan]) -> Plan:
    """The best plan where all logits at once spare the plan in pieces no more than ``part`` of its step; ``made``: searches
    with them. Where that is more than the gap those of the same degrees, schedule and micro-batches are looked at; all that may
    be faster instead, if only that part leaves too much open."""
    proof = proof_of(pieces)
    found = _sparing(pieces, pieces, part, gap)
    if part <= gap:
        return found
    if proof_of(found).gap <= WIDEST or (proof.gap > WIDEST and part < _DEAR):
        with suppress(NoBetterError, PlanError, PinError):
            found = _sparing(made(partial(_alike, pieces)), pieces, part, gap)
        return found
    try:
        return bounded(made(partial(_again, to_beat=_seconds(found))), proof.bound_seconds, gap)
    except (PlanError, PinError):
        return found
    except NoBetterError as error:
        proven = max(proof_of(found).bound_seconds, min(error.bound_seconds, proof.bound_seconds))
        return replace(found, certificate=replace(proof_of(found), bound_seconds=proven))


def _alike(
    plan: Plan, task: Task, fits: Callable[[Plan], Prediction], *, timing: Timing, progress: Progress | None = None
) -> Plan:
    """The best faster plan with the degrees, the schedule and the micro-batches of a plan. Raises as ``best_plan`` does."""
    sizes: dict[str, int] = {}
    for axis in plan.mesh.axes:
        role = role_of(axis)
        sizes[role] = sizes.get(role, 1) * plan.mesh.size(axis)
    held: dict[str, Any] = {"tp": sizes.get(TENSOR, 1), "cp": sizes.get(SEQUENCE, 1)}
    if ANY in sizes:
        held = {"axes": dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True))}
    held["microbatches"] = plan.schedule.microbatches
    if plan.pipeline is not None:
        held |= {"pp": plan.pipeline.degree, "schedule": plan.pipeline.schedule}
        held["virtual_stages"] = plan.pipeline.stages // plan.pipeline.degree
    alike = replace(task, pins=replace(task.pins, **held))
    return _again(alike, fits, timing=timing, progress=progress, to_beat=_seconds(plan))


def _again(
    task: Task, fits: Callable[[Plan], Prediction], *, to_beat: float, timing: Timing, progress: Progress | None = None
) -> Plan:
    """``best_plan`` within what the searches before left."""
    limit = min(AGAIN, max(LEFT, SECONDS - timing.searched))
    return best_plan(task, fits, limit, timing=timing, progress=progress, to_beat=to_beat)


def _logits_again(graph: Graph, device: Device, rows: int, ranks: int = 1) -> float:
    """The part of a step that a loss in pieces of so many rows adds, on one device alone, or on one of several ``ranks`` that
    share the work on the same rows, each of which starts all kernels: the logits are made once more."""
    operators = rules_of(graph)[0].operators
    taken, alone = list[float](), list[float]()
    for one in (graph, in_pieces(graph, rows)):
        priced = [(operators[op.target], Work.of(op, one), device, fused)
                  for op, fused in zip(one.ops, compute.fusion(one, operators), strict=True)]
        seconds = [sum(compute.seconds(*each)) for each in priced]
        alone.append(sum(seconds))
        taken.append(sum(max(took, ranks * sum(compute.started(*each))) for took, each in zip(seconds, priced, strict=True)))
    return max(0.0, taken[1] - taken[0]) / alone[0]


def _again_of(plan: Plan, graph: Graph, device: Device) -> float:
    """The part of its step that a plan takes longer than with the logits of ``graph`` at once, at most as far as prices say: of
    a pipeline one rank makes them, and a rank's rows in a micro-batch may be few for a piece, which costs as much."""
    rows, stages = rows_of(plan.graph) or ROWS, plan.pipeline.degree if plan.pipeline else 1
    apart = plan.mesh.size([axis for axis in plan.mesh.axes if role_of(axis) in SHARED])
    alike = max(1, plan.mesh.world // (stages * apart))
    each = _rows_of_all(graph) / (apart * plan.schedule.microbatches)
    return stages * _logits_again(graph, device, rows, alike) * math.ceil(each / rows) * rows / each


def _rows_of_all(graph: Graph) -> float:
    """Rows of the logits of the largest loss, in the whole batch."""
    return float(max(math.prod(shape[:-1]) for shape in _logits(graph)))


def _sparing(plan: Plan, pieces: Plan, part: float, gap: float) -> Plan:
    """A plan certified by the search for one in pieces, which did not look at all logits at once: these spare so much at
    most."""
    proof = proof_of(pieces)
    seconds = _seconds(plan)
    bound = min(max(0.0, 1.0 - part) * proof.bound_seconds, seconds)
    status = "gap" if proof.status == "optimal" and 1.0 - bound / seconds > gap else proof.status
    said = f"all logits at once spare no more than the product that makes them again, {part:.1%} of a step"
    proof = replace(proof, objective_seconds=seconds, bound_seconds=bound, status=status, assumes=(*proof.assumes, said))
    return replace(plan, certificate=proof)


def _short(plan: Plan, pins: Pins) -> bool:
    """Whether it may be for want of memory that a plan recomputes, or takes several micro-batches."""
    kinds = [kind for kind in RECOMPUTE if pins.allows("recompute", kind)]
    recomputes = len(kinds) > 1 and any(group.recompute != RECOMPUTE[0] for group in plan.groups)
    return recomputes or (plan.schedule.microbatches > 1 and pins.microbatches is None and pins.micro_batch is None)


def _of_a_sample(graph: Graph) -> float:
    """Bytes of the logits of one sample, of all losses together."""
    return sum(map(math.prod, _logits(graph))) * _LOGIT / batch_size(graph)


def _logits(graph: Graph) -> list[tuple[int, ...]]:
    """The shapes of what the losses read that could be in pieces."""
    names = losses(graph)
    return [graph.values[op.inputs[0]].shape for op in graph.ops if op.name in names]


def _logits_bytes(plan: Plan) -> float:
    """Of the logits on a device that a loss in pieces would not hold, in fp32 with their gradient and as they are made."""
    found, names = 0.0, losses(plan.graph)
    for op in (op for op in plan.graph.ops if op.name in names):
        split = [axis for axis, factor in plan.assignments.get(op.name, {}).items() if factors_of(factor)]
        parts = plan.mesh.size(split) * (plan.schedule.microbatches if op.name in plan.schedule.time else 1)
        found += plan.graph.values[op.inputs[0]].numel / parts * (4 + 4 + PRECISIONS[plan.precision].itemsize)
    return found


def _seconds(plan: Plan) -> float:
    return math.inf if plan.predicted is None else plan.predicted.step_seconds


def _with_loss(graph: Graph, rows: int) -> Graph:
    """The graph with its loss as pinned."""
    return in_pieces(graph, rows) if rows else graph
