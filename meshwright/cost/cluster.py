"""Clusters as data: devices, nodes, links, each number with a unit and a source.

    "h100:16x8"                 device : nodes x devices per node
    "h100@p5:16x8"              the same devices in another node of the catalogue (other NICs)
    "tpu-v4:16x16x24"           a torus by its dims
    "h100:2x8 + a100:4x8"       two kinds in one cluster (described; planning on them is refused)

Ranks fill a node before the next one starts. The catalogue (``catalogue.toml``) and a user's own file have one form: tables
``[device.NAME]`` and ``[node.NAME]`` whose numbers are ``{value, unit, source}``; ``like = "NAME"`` takes over what is not
given. A file of the user's own adds ``[cluster]`` with ``devices = "NAME:2x8"``.

All quantities leave this module in bytes, bytes per second, seconds and FLOP/s; decimal units are powers of ten, "MiB" and
"GiB" powers of two.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import networkx as nx
import torch

from meshwright.sharding import DTYPE_NAMES

_UNITS: Mapping[str, float] = {
    "1": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0,
    "B": 1.0, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30,
    "Gb/s": 1e9 / 8, "GB/s": 1e9, "TB/s": 1e12, "TFLOP/s": 1e12,
}
_SPEC = re.compile(r"([\w.-]+)(?:@([\w.-]+))?(?::(\d+(?:x\d+)*))?")
_KINDS = ("switch", "ring", "bus", "torus")


class ClusterError(ValueError):
    """A cluster that cannot be read, or a device or node that is not known."""


@dataclass(frozen=True)
class Device:
    """One accelerator. Bytes, bytes/s, FLOP/s, seconds; efficiencies are fractions of the peak that long runs reach.

    ``peak``: FLOP/s by dtype name ("bf16", "f32"). ``units`` and ``tile``: multiprocessors and the edge of the matmul tile
    each works on (wave quantization); ``depth``: inner dimension at which a matmul reaches half of its efficiency.
    ``kernel_seconds``: what each kernel costs however small. ``contention``: slowdown of compute while a collective runs
    beside it. ``sources``: where each number comes from.
    """

    name: str
    title: str
    memory_bytes: int
    reserve_bytes: int
    memory_bandwidth: float
    peak: Mapping[str, float]
    matmul_efficiency: float
    attention_forward: float
    attention_backward: float
    memory_efficiency: float
    kernel_seconds: float
    units: int
    tile: int
    depth: float
    contention: float
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def flops(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s of matrix products in ``dtype``; a 16-bit format that is not listed counts as the other one."""
        name = DTYPE_NAMES.get(dtype, "f32")
        for candidate in (name, {"bf16": "f16", "f16": "bf16"}.get(name, "f32"), "f32"):
            if candidate in self.peak:
                return self.peak[candidate]
        raise ClusterError(f"device {self.name} lists no peak for {name} and none for f32; add peak.{name} to its table")


@dataclass(frozen=True)
class Node:
    """How the devices of a node reach each other and the network. One direction, per device, unless said otherwise.

    ``link_bandwidth``: bytes/s of one device into the node's fabric (torus: of one link). ``ring_efficiency``: the part a
    ring collective reaches. ``reduce_efficiency``: the part an in-switch reduction reaches, 0 where there is none.
    ``nics`` x ``nic_bandwidth``: the node's way out, shared by its devices. ``start_latency``: what any collective costs
    however small its message and group.
    """

    name: str
    title: str
    kind: str
    per_node: int
    link_bandwidth: float
    link_latency: float
    ring_efficiency: float
    reduce_efficiency: float
    nics: int
    nic_bandwidth: float
    nic_latency: float
    nic_efficiency: float
    start_latency: float
    torus_dims: int = 0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Island:
    """Equal nodes of one kind of device. ``torus``: its dims, major first, where the node's kind is "torus"."""

    device: Device
    node: Node
    nodes: int
    per_node: int
    torus: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def nics(self) -> int:
        """NICs of each node; a node that is used in part brings its part of them."""
        return min(self.node.nics, max(1, self.node.nics * self.per_node // self.node.per_node))


@dataclass(frozen=True)
class Cluster:
    """Devices on a topology.

    >>> cluster = Cluster.parse("h100:16x8")
    >>> cluster.world, cluster.device.name, round(cluster.memory_bytes / 2**30, 1)
    (128, 'h100-80g', 79.2)
    """

    islands: tuple[Island, ...]

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read "device:nodes x per node"; the parts of a mixed cluster are joined by "+"."""
        catalogue = _catalogue()
        return cls(tuple(_island(part.strip(), catalogue) for part in text.split("+")))

    @classmethod
    def from_toml(cls, path: str | Path) -> Cluster:
        """A cluster from a user's file: ``[cluster] devices = "..."`` and tables that add to or replace the catalogue's."""
        text = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        devices = text.get("cluster", {}).get("devices")
        if not isinstance(devices, str):
            raise ClusterError(f'{path} has no line devices = "NAME:nodes x per node" in a table [cluster]')
        base = _catalogue()
        merged = {key: {**base.get(key, {}), **text.get(key, {})} for key in ("sources", "device", "node")}
        return cls(tuple(_island(part.strip(), merged) for part in devices.split("+")))

    def __post_init__(self) -> None:
        if not self.islands:
            raise ClusterError("a cluster has at least one device")

    @property
    def island(self) -> Island:
        """The only island; ClusterError where there are several kinds of device."""
        if len(self.islands) > 1:
            names = " and ".join(island.device.name for island in self.islands)
            raise ClusterError(f"planning on a cluster of {names} is not supported; plan on one kind of device")
        return self.islands[0]

    @property
    def device(self) -> Device:
        return self.island.device

    @property
    def node(self) -> Node:
        return self.island.node

    @property
    def world(self) -> int:
        return sum(island.world for island in self.islands)

    @property
    def nodes(self) -> int:
        return sum(island.nodes for island in self.islands)

    @property
    def per_node(self) -> int:
        return self.island.per_node

    @property
    def memory_bytes(self) -> int:
        """Bytes on each device (the smallest one's)."""
        return min(island.device.memory_bytes for island in self.islands)

    def with_memory(self, bytes_: int) -> Cluster:
        """The same cluster with ``bytes_`` of memory on each device, all of it usable (no reserve)."""
        islands = tuple(
            replace(island, device=replace(island.device, memory_bytes=int(bytes_), reserve_bytes=0)) for island in self.islands
        )
        return Cluster(islands)

    def graph(self) -> nx.Graph:
        """Devices, switches, NICs and links; edges carry ``bandwidth`` (bytes/s, one way) and ``latency`` (seconds)."""
        graph = nx.Graph()
        rank = 0
        for index, island in enumerate(self.islands):
            _draw(graph, island, index, rank)
            rank += island.world
        return graph

    def __str__(self) -> str:
        return " + ".join(
            f"{island.device.name}@{island.node.name}:"
            + ("x".join(map(str, island.torus)) if island.torus else f"{island.nodes}x{island.per_node}")
            for island in self.islands
        )


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, Any]:
    return tomllib.loads(resources.files("meshwright.cost").joinpath("catalogue.toml").read_text(encoding="utf-8"))


def known_devices() -> tuple[str, ...]:
    """Names of the catalogue's devices."""
    return tuple(_catalogue()["device"])


def known_nodes() -> tuple[str, ...]:
    """Names of the catalogue's nodes."""
    return tuple(_catalogue()["node"])


def _island(text: str, catalogue: Mapping[str, Any]) -> Island:
    match = _SPEC.fullmatch(text.replace(" ", ""))
    if not match:
        raise ClusterError(f"cannot read cluster {text!r}; it is like 'h100:16x8' (device:nodes x devices per node)")
    name, node_name, sizes = match.groups()
    device_name, table = _lookup(name, catalogue, "device")
    device = _device(device_name, table, catalogue)
    node = _node(*_lookup(node_name or table["node"], catalogue, "node"), catalogue)
    numbers = tuple(int(size) for size in sizes.split("x")) if sizes else (1, 1)
    if 0 in numbers:
        raise ClusterError(f"cluster {text!r} has a size of 0; sizes are at least 1")
    if node.kind == "torus":
        return _torus(text, device, node, numbers)
    if len(numbers) != 2:
        raise ClusterError(f"cluster {text!r} needs two sizes, nodes x devices per node, as in '{name}:2x{node.per_node}'")
    return Island(device, node, numbers[0], numbers[1])


def _torus(text: str, device: Device, node: Node, numbers: tuple[int, ...]) -> Island:
    """A torus by its dims, or, from hosts x chips, of the most nearly equal dims."""
    world = math.prod(numbers)
    dims = numbers if len(numbers) == node.torus_dims else _balanced(world, node.torus_dims)
    if len(numbers) not in (2, node.torus_dims):
        raise ClusterError(f"cluster {text!r}: {device.name} is a torus of {node.torus_dims} dims, as in '{device.name}:4x4x8'")
    per_node = math.gcd(world, node.per_node)
    return Island(device, node, world // per_node, per_node, dims)


def _balanced(world: int, dims: int) -> tuple[int, ...]:
    """``world`` as a product of ``dims`` factors with the smallest sum, ascending."""
    if dims == 1:
        return (world,)
    divisors = [d for d in range(1, math.isqrt(world) + 1) if world % d == 0]
    options = [tuple(sorted((d, *_balanced(world // d, dims - 1)))) for d in divisors]
    return min(options, key=sum)


def _lookup(name: str, catalogue: Mapping[str, Any], what: str) -> tuple[str, dict[str, Any]]:
    """(canonical name, table with ``like`` resolved); the error lists the known ones and the nearest."""
    tables = catalogue[what]
    aliases = {alias: key for key, table in tables.items() for alias in (key, *table.get("aliases", ()))}
    if name.lower() not in aliases:
        near = difflib.get_close_matches(name.lower(), aliases, n=1, cutoff=0.0)
        raise ClusterError(f"unknown {what} {name!r}; the nearest is {near[0]!r}; known: {', '.join(sorted(tables))}")
    key = aliases[name.lower()]
    table = dict(tables[key])
    if "like" in table:
        if table["like"] not in tables:
            raise ClusterError(f"{what} {key!r} is like {table['like']!r}, which is not in the catalogue")
        base = _lookup(table["like"], catalogue, what)[1]
        table = {**base, **table, "peak": {**base.get("peak", {}), **table.get("peak", {})}}
    return key, table


def _number(entry: Any, where: str) -> float:
    if not isinstance(entry, Mapping) or not {"value", "unit", "source"} <= set(entry):
        raise ClusterError(f"{where} must be {{value = ..., unit = ..., source = ...}}, not {entry!r}")
    if entry["unit"] not in _UNITS:
        raise ClusterError(f"{where} has unknown unit {entry['unit']!r}; known: {', '.join(_UNITS)}")
    return float(entry["value"]) * _UNITS[entry["unit"]]


def _read(what: str, name: str, table: Mapping[str, Any], keys: Mapping[str, str], texts: Mapping[str, str]) -> dict[str, Any]:
    """{field: number} and their sources from a table."""
    missing = [key for key in keys if key not in table]
    if missing:
        raise ClusterError(f"{what} {name!r} lacks {', '.join(missing)}")
    numbers: dict[str, Any] = {field_: _number(table[key], f"{what}.{name}.{key}") for key, field_ in keys.items()}
    numbers["sources"] = {field_: _source(table[key], texts) for key, field_ in keys.items()}
    return numbers


def _source(entry: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    return texts.get(entry["source"], str(entry["source"]))


_DEVICE_KEYS: Mapping[str, str] = {
    "memory": "memory_bytes", "reserve": "reserve_bytes", "memory_bandwidth": "memory_bandwidth",
    "matmul_efficiency": "matmul_efficiency", "attention_forward": "attention_forward",
    "attention_backward": "attention_backward", "memory_efficiency": "memory_efficiency",
    "kernel": "kernel_seconds", "units": "units", "tile": "tile", "depth": "depth", "contention": "contention",
}
_NODE_KEYS: Mapping[str, str] = {
    "link": "link_bandwidth", "link_latency": "link_latency", "ring": "ring_efficiency", "reduce": "reduce_efficiency",
    "nics": "nics", "nic": "nic_bandwidth", "nic_latency": "nic_latency", "nic_efficiency": "nic_efficiency",
    "start": "start_latency",
}


def _device(name: str, table: Mapping[str, Any], catalogue: Mapping[str, Any]) -> Device:
    texts = catalogue["sources"]
    numbers = _read("device", name, table, _DEVICE_KEYS, texts)
    peaks = table.get("peak", {})
    if not peaks:
        raise ClusterError(f"device {name!r} lists no peak FLOP/s, as in peak.bf16 = {{...}}")
    peak = {dtype: _number(entry, f"device.{name}.peak.{dtype}") for dtype, entry in peaks.items()}
    numbers["sources"].update({f"peak.{dtype}": _source(entry, texts) for dtype, entry in peaks.items()})
    for key in ("memory_bytes", "reserve_bytes", "units", "tile"):
        numbers[key] = int(numbers[key])
    return Device(name=name, title=table.get("title", name), peak=peak, **numbers)


def _node(name: str, table: Mapping[str, Any], catalogue: Mapping[str, Any]) -> Node:
    if table.get("kind") not in _KINDS:
        raise ClusterError(f"node {name!r} is of kind {table.get('kind')!r}; known: {', '.join(_KINDS)}")
    numbers = _read("node", name, table, _NODE_KEYS, catalogue["sources"])
    numbers["nics"] = int(numbers["nics"])
    return Node(
        name=name, title=table.get("title", name), kind=table["kind"], per_node=table["per_node"],
        torus_dims=table.get("torus_dims", 0), **numbers,
    )


def _draw(graph: nx.Graph, island: Island, index: int, first: int) -> None:
    """Add one island to the graph; all islands meet at the node "network"."""
    node = island.node
    for rank in range(first, first + island.world):
        graph.add_node(("device", rank), kind="device", device=island.device.name, memory_bytes=island.device.memory_bytes)
    if island.torus:
        for edge in nx.grid_graph(list(reversed(island.torus)), periodic=True).edges:
            ends = tuple(("device", first + _flat(at, island.torus)) for at in edge)
            graph.add_edge(*ends, bandwidth=node.link_bandwidth, latency=node.link_latency)
        return
    for box in range(island.nodes):
        ranks = [("device", first + box * island.per_node + local) for local in range(island.per_node)]
        hub = ("switch" if node.kind == "switch" else "bus", index, box)
        graph.add_node(hub, kind=hub[0])
        if node.kind == "ring" and len(ranks) > 1:
            ring = zip(ranks, ranks[1:] + ranks[:1], strict=True)
            graph.add_edges_from(ring, bandwidth=node.link_bandwidth, latency=node.link_latency)
        for rank in ranks:
            graph.add_edge(rank, hub, bandwidth=node.link_bandwidth, latency=node.link_latency)
        for number in range(island.nics):
            nic = ("nic", index, box, number)
            graph.add_node(nic, kind="nic")
            graph.add_edge(hub, nic, bandwidth=node.nic_bandwidth, latency=0.0)
            graph.add_edge(nic, ("network",), bandwidth=node.nic_bandwidth, latency=node.nic_latency)
    if ("network",) in graph:
        graph.nodes[("network",)]["kind"] = "switch"


def _flat(at: tuple[int, ...], dims: tuple[int, ...]) -> int:
    index = 0
    for coordinate, size in zip(at, dims, strict=True):
        index = index * size + coordinate
    return index
