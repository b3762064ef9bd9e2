"""The interval around a prediction, from how far predictions missed published rows that no constant was fitted to.

A *regime* is what a plan's step depends on most: whether tensor parallelism leaves a node, whether there is a pipeline, how
many devices exchange gradients, whether they share a node. For each, ``spread.toml`` has two quantiles of measured over
predicted of published rows, each predicted by constants that were calibrated without its source
(``benchmarks/calibrate.py`` writes it). A prediction is that interval around its point. A regime without rows has the interval
of all rows, one of few rows at least that; a device that was not calibrated has a wider one.

Errors of two plans of one model on the same devices have much in common. ``apart`` is what is left, in the median: two plans
whose predictions differ by less are not told apart.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from meshwright.cost.catalogue import catalogue, lookup
from meshwright.cost.cluster import Cluster
from meshwright.ir.mesh import PP, Mesh

ALL = "all"
MANY = 64
"""Data ranks from which on a group counts as large."""
FEW = 20
"""Rows below which the 5 and 95 in 100 are no more than the least and the largest that happened to be seen."""
ELSEWHERE = 1.5
"""By how much the interval of a device that was not calibrated is wider, as a power: nothing measured says."""


class Spread(NamedTuple):
    """Measured over predicted: most rows lie between. ``rows``: how many there were."""

    low: float
    high: float
    rows: int = 0


@lru_cache(maxsize=1)
def _file() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("meshwright.cost").joinpath("spread.toml").read_text(encoding="utf-8"))


def spreads() -> Mapping[str, Spread]:
    """By regime."""
    return {name: Spread(**entry) for name, entry in _file()["regime"].items()}


def apart() -> float:
    """The part by which predictions of two plans of one model on the same devices must differ to be told apart: half of the
    pairs of measured configurations differ from what is predicted of the two by more."""
    return float(_file()["order"]["apart"])


def regime(mesh: Mesh, per_node: int) -> str:
    """What a step on this mesh depends on most, ranks filling nodes of ``per_node``."""
    tensor = mesh.size([axis for axis in mesh.axes if axis == "tp"])
    stages = mesh.size([axis for axis in mesh.axes if axis == PP])
    if tensor > per_node:
        return "tensor across nodes"
    if stages > 1:
        return "pipeline" if mesh.world > per_node else "pipeline in a node"
    if mesh.world <= per_node:
        return "node"
    return "many nodes" if mesh.world // tensor > MANY else "nodes"


def calibrated(device: str) -> bool:
    """Whether a device's efficiencies come from rows of its own kind: it, or what it is like, has fitted numbers."""
    if device not in catalogue()["device"]:
        return False
    own: Mapping[str, Any] = catalogue()["device"][device]
    same = {"peak", "matmul_efficiency"}.isdisjoint(own) or "like" not in own
    return same and lookup(device, catalogue(), "device")[1]["matmul_efficiency"]["source"] == "fit"


def spread(cluster: Cluster, mesh: Mesh) -> Spread:
    """The interval of a prediction on this mesh, as factors."""
    known = spreads()
    found, every = known.get(regime(mesh, cluster.per_node), known[ALL]), known[ALL]
    if found.rows < FEW:
        found = Spread(min(found.low, every.low), max(found.high, every.high), found.rows)
    if calibrated(cluster.device.name):
        return found
    return Spread(min(found.low, every.low) ** ELSEWHERE, max(found.high, every.high) ** ELSEWHERE, 0)
