"""What would help a plan most: changes of its cluster and its batch, each planned or priced, with what it gains.

    twice the devices      planned at every way to use them: each degree or axis of the plan doubled, the rest as it is; the
                           fastest
    twice the memory       planned on the same mesh: what recomputation, micro-batches and ZeRO cost
    faster links, devices  the plan as it is, priced on them
    another batch, length  planned on the same mesh with the graph of twice or half the batch, or of sequences twice or half as
                           long and as many of them, where that graph follows from the plan's (``resized``); where it does
                           not, another batch is the plan as it is with twice or half as many micro-batches

The gain is in tokens per second, or in samples where a model has no tokens; a change that gains nothing is left out, and so is
one that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from meshwright.cost.cluster import Cluster, ClusterError, known_devices
from meshwright.errors import MeshwrightError, PlanError
from meshwright.ir.mesh import ANY
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.ir.quantities import bytes_text, count_text, seconds_text
from meshwright.planner import cluster_of, make_plan, reprice, reprice_batches, state_bytes
from meshwright.programs import degrees_of
from meshwright.resized import of_batch, of_length

LEAST = 0.01
"""Gains below are not worth a line."""
_ROOM = 1 << 60
"""Bytes of a device on which every plan is priced, which ``reprice`` then holds against what there is."""


@dataclass(frozen=True)
class Change:
    """``what``: the change; ``step_seconds``, ``bytes_per_rank``: of the plan under it; ``gain``: in speed, as a share;
    ``devices``: as a factor; ``how``: what the plan is then."""

    what: str
    step_seconds: float
    bytes_per_rank: float
    gain: float
    devices: float = 1.0
    how: str = ""

    def __str__(self) -> str:
        each = f", {(1 + self.gain) / self.devices - 1:+.1%} a device" if self.devices != 1 else ""
        how = f", {self.how}" if self.how else ""
        return (f"{self.gain:+7.1%}  {self.what}: step {seconds_text(self.step_seconds)}, {bytes_text(self.bytes_per_rank)} a "
                f"device{each}{how}")


def changes(plan: Plan) -> list[Change]:
    """Those that help, best first. Raises ClusterError, PlanError where the plan itself cannot be priced."""
    return changes_and_refusals(plan)[0]


def changes_and_refusals(plan: Plan) -> tuple[list[Change], list[str]]:
    """The same, and which lengths the plan's graph does not tell, with why. Raises as ``changes`` does."""
    where, refused = cluster_of(plan), dict[str, list[str]]()
    now = reprice(plan)
    assert now.predicted is not None
    lengths = list[Change]()
    for what, factor in (("twice", Fraction(2)), ("half", Fraction(1, 2))):
        try:
            graph = of_length(plan.graph, factor)
        except MeshwrightError as error:
            refused.setdefault(str(error), []).append(what)
            continue
        then = _planned(replace(plan, graph=graph), where, _held(plan))
        if then is not None:
            lengths.append(_change(f"sequences {what} as long, as many of them", now, then, float(factor), _kept(then)))
    found = [change for change in (*_devices(plan, now, where), *_links(plan, now, where), *_memory(plan, now, where),
                                   *_batches(plan, now, where), *lengths) if change.gain >= LEAST]
    words = [f"sequences {' or '.join(which)} as long are not planned: {why}" for why, which in refused.items()]
    return sorted(found, key=lambda change: -((1 + change.gain) / change.devices)), words


def _change(what: str, now: Plan, then: Plan, work: float = 1.0, how: str = "") -> Change:
    assert now.predicted is not None
    assert then.predicted is not None
    gain = work * now.predicted.step_seconds / then.predicted.step_seconds - 1
    return Change(what, then.predicted.step_seconds, then.predicted.bytes_per_rank, gain, then.mesh.world / now.mesh.world, how)


def _devices(plan: Plan, now: Plan, where: Cluster) -> Iterator[Change]:
    """Twice as many nodes, the plan's degrees or axes doubled one by one."""
    if len(where.islands) > 1:
        return
    island = where.islands[0]
    twice = Cluster((replace(island, nodes=2 * island.nodes),))
    best: Plan | None = None
    for pins in _doubled(plan):
        then = _planned(plan, twice, pins)
        if then is not None and (best is None or _seconds(then) < _seconds(best)):
            best = then
    if best is not None:
        yield _change(f"twice the devices ({twice})", now, best, how=f"mesh {best.mesh}")


def _links(plan: Plan, now: Plan, where: Cluster) -> Iterator[Change]:
    """Faster links, and the catalogue's best devices in nodes of as many."""
    for what, inner, outer in (("links twice as fast", 2.0, 2.0), ("a network between nodes twice as fast", 1.0, 2.0)):
        if inner == 1.0 and all(island.nodes == 1 for island in where.islands):
            continue
        islands = tuple(replace(island, node=replace(
            island.node, link_bandwidth=inner * island.node.link_bandwidth, nic_bandwidth=outer * island.node.nic_bandwidth,
        )) for island in where.islands)
        then = _priced(plan, Cluster(islands))
        if then is not None:
            yield _change(what, now, then)
    if len(where.islands) > 1:
        return
    island = where.islands[0]
    others = []
    for other in _best_devices(island.nodes, where.per_node):
        then = _priced(plan, other) if other.islands[0].device != island.device else None
        if then is not None and then.predicted is not None and then.predicted.fits:
            others.append((_seconds(then), other.islands[0].device.name, then))
    if others:
        _, name, then = min(others, key=lambda one: one[0])
        yield _change(f"as many {name}", now, then)


def _best_devices(nodes: int, per_node: int) -> list[Cluster]:
    """The catalogue's devices that no other beats in compute, memory and its bandwidth at once, in nodes of so many."""
    found: dict[tuple[float, ...], Cluster] = {}
    for name in known_devices():
        with suppress(ClusterError):
            cluster = Cluster.parse(f"{name}:{nodes}x{per_node}")
            device = cluster.islands[0].device
            found.setdefault((device.flops(torch.bfloat16), device.memory_bandwidth, device.memory_bytes), cluster)
    return [cluster for one, cluster in found.items()
            if not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in found)]


def _memory(plan: Plan, now: Plan, where: Cluster) -> Iterator[Change]:
    """Twice the memory on the same mesh."""
    islands = tuple(replace(island, device=replace(island.device, memory_bytes=2 * island.device.memory_bytes))
                    for island in where.islands)
    then = _planned(plan, Cluster(islands), _held(plan))
    if then is not None:
        yield _change("twice the memory of a device", now, then, how=_kept(then))


def _degrees(plan: Plan) -> dict[str, Any] | None:
    """The degrees as pins; None where axes that may split anything are neither data nor tensor axes throughout."""
    found: dict[str, Any] = {"pp": 1 if plan.pipeline is None else plan.pipeline.degree, **degrees_of(plan)}
    if found["ep"] == 1:
        del found["ep"]
    return found if found["pp"] * found["dp"] * found["tp"] * found["cp"] == plan.mesh.world else None


def _held(plan: Plan) -> Pins:
    """The plan's degrees as pins, or its axes where these may split anything."""
    degrees = _degrees(plan)
    return Pins(axes=dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True))) if degrees is None else Pins(**degrees)


def _doubled(plan: Plan) -> Iterator[Pins]:
    """These pins with each of the degrees or axes doubled."""
    degrees, held = _degrees(plan), _held(plan)
    if degrees is None:
        yield from (replace(held, axes={**(held.axes or {}), axis: 2 * plan.mesh.size(axis)}) for axis in plan.mesh.axes)
    else:
        names = ("dp", "pp", "tp", *(["cp"] if degrees["cp"] > 1 else []))
        yield from (replace(held, **{name: 2 * degrees[name]}) for name in names)


def _batches(plan: Plan, now: Plan, where: Cluster) -> Iterator[Change]:
    """Twice and half the batch."""
    for what, factor in (("twice the batch", Fraction(2)), ("half the batch", Fraction(1, 2))):
        with suppress(MeshwrightError):
            try:
                graph = of_batch(plan.graph, factor)
            except MeshwrightError:  # what does not follow from the graph follows from more micro-batches like the plan's
                same, then = rebatched(plan, where, 1.0), rebatched(plan, where, float(factor))
                if then.predicted is not None and then.predicted.fits:
                    count = count_text(round(factor * same.schedule.microbatches), "micro-batch")
                    yield _change(f"{what}, in {count}", same, then, float(factor))
                continue
            found = _planned(replace(plan, graph=graph), where, _held(plan))
            if found is not None:
                yield _change(what, now, found, float(factor), _kept(found))


def rebatched(plan: Plan, where: Cluster, factor: float) -> Plan:
    """The plan with what a step takes of ``factor`` times the batch, in as many more micro-batches, with its own decisions for
    the graph of that batch: stage by stage on a mesh whose axes have roles, there also where no such graph follows from the
    plan's and the micro-batches divide its batch. Raises PlanError, ClusterError."""
    share = Fraction(factor).limit_denominator(1 << 16)
    count = share * plan.schedule.microbatches
    if count.denominator != 1 or not count:
        raise PlanError(f"{factor:g} times the batch is no whole number of micro-batches like those of this plan, which has "
                        f"{plan.schedule.microbatches}; give a factor that makes them whole, or plan again at that batch")
    if not plan.mesh.having(ANY):
        return _in_more_batches(plan, share)
    if share == 1:
        return reprice(plan, where)
    try:
        graph = of_batch(plan.graph, share)
    except PlanError as error:
        raise PlanError(f"another batch on {plan.mesh} cannot be priced ({error}); plan again at that batch") from error
    room, pins = where.with_memory(_ROOM), replace(plan.to_pins(), microbatches=count.numerator)
    return reprice(make_plan(graph, room, pins, optimizer=state_bytes(plan), precision=plan.precision), where)


def _in_more_batches(plan: Plan, share: Fraction) -> Plan:
    """The plan in ``share`` as many micro-batches, of the graph of that batch where it follows from the plan's."""
    try:
        graph = plan.graph if share == 1 else of_batch(plan.graph, share)
    except MeshwrightError as error:
        try:
            return reprice_batches(plan, float(share))
        except PlanError:
            raise PlanError(f"{float(share):g} times the batch on {plan.mesh} cannot be priced ({error}); plan again at that "
                            "batch") from error
    count = int(share * plan.schedule.microbatches)
    return reprice_batches(replace(plan, graph=graph, schedule=replace(plan.schedule, microbatches=count)), 1.0)


def _kept(plan: Plan) -> str:
    kinds = sorted({group.recompute for group in plan.groups})
    return f"recompute {'/'.join(kinds)}, {count_text(plan.schedule.microbatches, 'micro-batch')}"


def _planned(plan: Plan, where: Cluster, pins: Pins) -> Plan | None:
    try:
        return make_plan(plan.graph, where, pins, optimizer=state_bytes(plan), precision=plan.precision)
    except MeshwrightError:
        return None


def _priced(plan: Plan, where: Cluster) -> Plan | None:
    try:
        return reprice(plan, where)
    except MeshwrightError:
        return None


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds
