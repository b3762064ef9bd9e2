"""What a plan would take on other devices: the plan as it is, priced again, nothing searched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.cost.cluster import Cluster
from meshwright.errors import InputError
from meshwright.ir.plan import Plan
from meshwright.ir.prediction import Prediction
from meshwright.ir.quantities import bytes_text, seconds_text
from meshwright.planner import cluster_of, reprice
from meshwright.progress import Report
from meshwright.views.changes import rebatched

FACTORS = ("bandwidth", "network", "memory", "batch")
"""What may be given as a factor: links within and between nodes, those between nodes alone, memory of a device, the batch in as
many more micro-batches."""

LEAST, MOST = 1e-12, 1e6
"""Factors beyond are of no cluster, and of a batch whose tensors have more elements than can be counted."""


@dataclass(frozen=True)
class Answer:
    """What a change does. ``what``: as it was given, "as it is" for none."""

    what: str
    predicted: Prediction

    def as_json(self) -> dict[str, Any]:
        """What was asked, whether it fits, and what is predicted."""
        return {"what": self.what, "fits": self.predicted.fits, **self.predicted.as_json()}

    def __str__(self) -> str:
        found = self.predicted
        room = "fits" if found.fits else "does NOT fit"
        free = f" ({bytes_text(found.free_bytes)} left free)" if found.free_bytes else ""
        return (f"{self.what}: step {seconds_text(found.step_seconds)}, {bytes_text(found.bytes_per_rank)} of "
                f"{bytes_text(found.capacity_bytes)} per device{free}, {room}")


def answers(plan: Plan, changes: Sequence[str], report: Report) -> Iterator[Answer]:
    """The plan as it is, then under every change alone ("bandwidth=0.5", "batch=2", "cluster=b200:1x8"). Raises InputError,
    PlanError, ClusterError."""
    where = cluster_of(plan)
    known = [(change, _changed(plan, where, change)) for change in changes]
    for number, (what, changed) in enumerate([("as it is", where), *known]):
        report(what, number / (1 + len(known)))
        then = rebatched(plan, where, changed) if isinstance(changed, float) else reprice(plan, changed)
        assert then.predicted is not None
        yield Answer(what, then.predicted)


def _changed(plan: Plan, cluster: Cluster, change: str) -> Cluster | float:
    """The cluster that a change makes, or the factor of the batch."""
    name, _, value = (word.strip() for word in change.partition("="))
    if name == "cluster" and value:
        return cluster_of(plan, value)
    try:
        factor = float(value)
    except ValueError:
        factor = math.nan
    if name not in FACTORS or not LEAST <= factor <= MOST:
        raise InputError(f"--what-if {change!r}: give a factor of {', '.join(FACTORS)} from {LEAST:g} to {MOST:,.0f}, as in "
                         "bandwidth=0.5, or cluster=NAME of as many devices")
    if name == "batch":
        return factor
    islands = []
    for island in cluster.islands:
        device, node = island.device, island.node
        if name == "memory":
            device = replace(device, memory_bytes=int(device.memory_bytes * factor))
        else:
            inner = factor if name == "bandwidth" else 1.0
            node = replace(node, link_bandwidth=node.link_bandwidth * inner, nic_bandwidth=node.nic_bandwidth * factor)
        islands.append(replace(island, device=device, node=node))
    found = Cluster(tuple(islands))
    if name == "memory" and found.capacity_bytes <= 0:
        raise InputError(f"--what-if {change!r} leaves no memory beside what is left free ({bytes_text(found.memory_bytes)} in "
                         "all); give a larger factor")
    return found
