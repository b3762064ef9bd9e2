"""Clusters worth having for a model and a number of tokens: planned one by one, with days, device-hours and cost.

    days          tokens / predicted tokens per second
    device-hours  days x 24 x devices
    cost          device-hours x the price of one
    worth having  no other cluster is both faster and cheaper (the Pareto front)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.compiler.search.prediction import tokens_of
from meshwright.cost.cluster import Cluster
from meshwright.errors import InputError, MeshwrightError
from meshwright.ir.graph import Graph
from meshwright.ir.pins import Pins
from meshwright.planner import make_plan

COUNTS = (1, 2, 4, 8)
"""Nodes that are looked at unless devices are given."""


@dataclass(frozen=True)
class Size:
    """One cluster. ``free_bytes``: of a device, left to its context, communicators and the allocator; ``reason``: why the model
    is not trained on it; the numbers are then None."""

    devices: int
    cluster: str
    mesh: str = ""
    tokens_per_second: float | None = None
    mfu: float | None = None
    bytes_per_rank: float | None = None
    free_bytes: float | None = None
    days: float | None = None
    device_hours: float | None = None
    cost: float | None = None
    worth_having: bool = False
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def spec_of(device: str, count: int) -> str:
    """The cluster of so many devices: whole nodes, or a part of one.

    >>> spec_of("h100", 4), spec_of("h100", 16)
    ('h100:1x4', 'h100:2x8')
    """
    per_node = Cluster.parse(f"{device}:1x1").node.per_node
    if count <= per_node:
        return f"{device}:1x{count}"
    if count % per_node:
        raise InputError(f"{count} devices are no whole number of nodes of {per_node} {device}; give a multiple of {per_node}")
    return f"{device}:{count // per_node}x{per_node}"


def sizes(
    graph: Graph, device: str, counts: Sequence[int], tokens: float, price: float | None, *, pins: Pins, optimizer: str | float,
    precision: str, report: Callable[[str, float], None],
) -> list[Size]:
    """A row for every count of devices, those worth having marked. ``price``: of a device for an hour. Raises InputError for a
    model without tokens."""
    if not tokens_of(graph):
        raise InputError("the model's input has no tokens to count, so no number of them says how long training takes; "
                         "meshwright plan says how long a step of so many samples takes")
    rows = []
    clusters = [Cluster.parse(spec_of(device, count)).with_headroom() for count in sorted(set(counts))]
    for number, cluster in enumerate(clusters):
        report(str(cluster), number / len(clusters))
        rows.append(_size(graph, cluster, tokens, price, pins, optimizer, precision))
    return front(rows)


def default_counts(device: str) -> list[int]:
    """Up to eight nodes."""
    per_node = Cluster.parse(f"{device}:1x1").node.per_node
    return [nodes * per_node for nodes in COUNTS]


def _size(
    graph: Graph, cluster: Cluster, tokens: float, price: float | None, pins: Pins, optimizer: str | float, precision: str
) -> Size:
    blank = Size(cluster.world, str(cluster))
    try:
        plan = make_plan(graph, cluster, pins, optimizer=optimizer, precision=precision)
    except MeshwrightError as error:
        return replace(blank, reason=str(error))
    found = plan.predicted
    assert found is not None
    assert found.tokens_per_second is not None
    days = tokens / found.tokens_per_second / 86400
    hours = days * 24 * cluster.world
    return replace(
        blank, mesh=str(plan.mesh), tokens_per_second=found.tokens_per_second, mfu=found.mfu, days=days, device_hours=hours,
        bytes_per_rank=found.bytes_per_rank, free_bytes=found.free_bytes, cost=None if price is None else hours * price,
    )


def front(rows: Sequence[Size]) -> list[Size]:
    """The rows, marked where no other one has fewer days for no more device-hours, or fewer hours in no more days."""

    def beaten(one: Size) -> bool:
        mine = (one.days, one.device_hours)
        others = [(other.days, other.device_hours) for other in rows if other.days is not None]
        return any(other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in others)  # type: ignore[operator]

    return [replace(row, worth_having=row.days is not None and not beaten(row)) for row in rows]


def table(rows: Sequence[Size]) -> Any:
    """For rich."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for title in ("devices", "mesh", "tokens/s", "MFU", "GiB a device", "left free", "days", "device-hours", "cost"):
        shown.add_column(title, justify="left" if title == "mesh" else "right")
    for row in rows:
        if row.days is None:
            shown.add_row("", str(row.devices), row.reason.splitlines()[0])
            continue
        shown.add_row(
            "*" if row.worth_having else "", str(row.devices), row.mesh, f"{row.tokens_per_second:,.0f}",
            f"{row.mfu:.1%}" if row.mfu is not None else "", f"{(row.bytes_per_rank or 0) / 2**30:.1f}",
            f"{(row.free_bytes or 0) / 2**30:.1f}", f"{row.days:,.3g}",
            f"{row.device_hours:,.0f}", "" if row.cost is None else f"{row.cost:,.0f}",
        )
    return shown
