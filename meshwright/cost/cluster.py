"""Clusters as data: devices, nodes, and the links between them.

    "h100:16x8"                 device : nodes x devices per node
    "h100@p5:16x8"              the same devices in another node of the catalogue (other NICs)
    "tpu-v4:16x16x24"           a torus by its dims
    "h100:2x8 + a100:4x8"       two kinds in one cluster (described; planning on them is refused)

Ranks fill a node before the next one starts. A file of the user's own has the form of the catalogue (``catalogue.py``) and a
table ``[cluster]`` with ``devices = "NAME:2x8"``; what it may hold: ``form.py``. Bytes, bytes per second, seconds.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import networkx as nx
import sympy

from meshwright.cost.catalogue import (
    Device,
    Node,
    catalogue,
    device_for,
    known_devices,
    known_nodes,
    lookup,
    read_device,
    read_node,
)
from meshwright.cost.form import check_form
from meshwright.cost.tables import MOST_DEVICES, ClusterError, quoted

__all__ = ["Cluster", "ClusterError", "Device", "Island", "Node", "device_for", "known_devices", "known_nodes"]

HEADROOM = 0.03
"""The part of a device's memory, without the context, that plans leave free unless told otherwise: communicators hold buffers
of hundreds of megabytes, and the allocator rounds up and cannot use every gap."""
_SPEC = re.compile(r"([\w.-]+)(?:@([\w.-]+))?(?::([0-9]+(?:x[0-9]+)*))?")


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

    @property
    def is_apart(self) -> bool:
        """Whether there are several nodes with nothing between them."""
        return self.nodes > 1 and not self.torus and not (self.node.nics and self.node.nic_bandwidth)


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
        return cls(tuple(_island(part.strip(), catalogue()) for part in text.split("+")))

    @classmethod
    def from_toml(cls, path: str | Path) -> Cluster:
        """A cluster from a user's file: ``[cluster] devices = "..."`` and tables that add to or replace the catalogue's. Raises
        ClusterError, also for a file that cannot be opened and for names that are not known."""
        try:
            text = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(f"{path} cannot be read: {error.strerror}; name a cluster file, like what meshwright profile "
                               "writes") from error
        except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, or tables in tables without end
            raise ClusterError(f"{path} is no TOML file: {error}; it is like what meshwright profile writes") from error
        base = catalogue()
        try:
            check_form(text, base)
            devices = text.get("cluster", {}).get("devices")
            if devices is None:
                raise ClusterError('there is no line devices = "NAME:nodes x per node" in a table [cluster]')
            merged = {key: {**base.get(key, {}), **text.get(key, {})} for key in ("sources", "device", "node")}
            return cls(tuple(_island(part.strip(), merged) for part in devices.split("+")))
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from error

    def __post_init__(self) -> None:
        if not self.islands:
            raise ClusterError("a cluster has at least one device")
        if self.world > MOST_DEVICES:
            raise ClusterError(f"a cluster of {self.world} devices is too large; give at most {MOST_DEVICES}")

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

    @property
    def capacity_bytes(self) -> float:
        """Bytes of a device that a plan may use: without the reserve."""
        return float(self.memory_bytes - self.device.reserve_bytes)

    def with_memory(self, bytes_: int) -> Cluster:
        """The same cluster with ``bytes_`` of memory on each device, all of it usable (no reserve)."""
        islands = tuple(
            replace(island, device=replace(island.device, memory_bytes=int(bytes_), reserve_bytes=0)) for island in self.islands
        )
        return Cluster(islands)

    def with_products(self, format_: str) -> Cluster:
        """The same cluster whose matrix products run in another format ("tf32", "f8e4m3") than their operands come in; "" for
        their own. Raises ClusterError where a device lists no peak for it."""
        for island in self.islands if format_ else ():
            if format_ not in island.device.peak:
                known = ", ".join(island.device.peak)
                raise ClusterError(f"device {island.device.name} lists no peak for {format_}; known: {known}")
        return Cluster(tuple(replace(island, device=replace(island.device, products=format_)) for island in self.islands))

    def with_headroom(self, part: float | None = None) -> Cluster:
        """The same cluster whose plans leave a part of every device's memory free, beside the reserve (the context): for
        communicators and what the allocator rounds up and cannot use. None leaves ``HEADROOM`` of devices that the catalogue or
        a file describes, and nothing where the memory was given as all usable (``with_memory``). Raises ClusterError.

        >>> eight = Cluster.parse("h100:1x8")
        >>> [round(eight.with_headroom(part).capacity_bytes / eight.capacity_bytes, 2) for part in (None, 0.05, 0)]
        [0.97, 0.95, 1.0]
        >>> eight.with_memory(2**30).with_headroom().capacity_bytes == 2**30
        True
        """
        if part is not None and (isinstance(part, bool) or not isinstance(part, int | float) or not 0.0 <= part < 1.0):
            raise ClusterError(f"headroom={part!r} is not a part of the memory: give 0 to below 1, such as 0.03")
        islands = []
        for island in self.islands:
            there, reserve = island.device.memory_bytes, island.device.reserve_bytes
            free = int((HEADROOM * (reserve > 0) if part is None else part) * (there - reserve))
            islands.append(replace(island, device=replace(island.device, reserve_bytes=reserve + free)))
        return Cluster(tuple(islands))

    def with_kernels(
        self, attention: str | None = None, fused: bool | None = None, overlapped: bool | None = None,
        accumulates: bool | None = None, repeats: bool | None = None, alone: bool | None = None,
        merged_loss: bool | None = None, sharded_loss: bool | None = None, narrow_sums: bool | None = None,
        buckets: bool | None = None,
        keeps_gathered: bool | None = None, plain_loss: bool | None = None, kept_logits: int | None = None,
        keeps_heads: bool | None = None, flat_state: bool | None = None, plain_collectives: bool | None = None,
        packed: bool | None = None, waits: bool | None = None, narrow_loss: bool | None = None,
        fused_activations: bool | None = None, flat_units: bool | None = None, own_units: bool | None = None,
        gather_buffer: bool | None = None,
    ) -> Cluster:
        """The same cluster with other software: the devices' ``attention`` kernel ("flash1", "flash2", "flash3", "triton"),
        whether chains of pointwise operators run ``fused`` (compiled) or one by one (eager), whether products run their
        collectives ``overlapped``, in pieces (Transformer Engine), whether a product ``accumulates`` gradients itself, whether
        recomputation ``repeats`` whole blocks (Megatron-LM), whether ZeRO moves every parameter ``alone`` (DeepSpeed),
        whether the loss is one kernel (``merged_loss``: FlashAttention's, Liger's), or many that work in place
        (``sharded_loss``: Megatron-LM's), in place of 16-bit logits even (``narrow_loss``), whether micro-batches' gradients
        are summed in 16 bits (``narrow_sums``: DeepSpeed's default), lie in ``buckets`` (torch's DDP), whether what linears
        gather is kept (``keeps_gathered``: DTensor's linears), or lies in one buffer that stays (``gather_buffer``:
        Megatron-LM's), whether a cross entropy's softmax is kept and its gradient lies
        beside that of the loss (``plain_loss``: torch's own), of how many micro-batches the logits are kept
        (``kept_logits``: 2 in pipeline engines like DeepSpeed's), whether what attention keeps of its values is the one product
        that they are a slice of (``keeps_heads``), whether what lies between pointwise operators is not kept
        (``fused_activations``), whether a rank's optimizer state is one tensor of each kind
        (``flat_state``), not one for every parameter, whether FSDP's units are flat tensors (``flat_units``: FSDP1), and
        embedding and head units of their own (``own_units``), whether collectives are torch.distributed's own functions
        (``plain_collectives``: Megatron-LM), whether attention is over ``packed`` sequences, and whether a 1F1B ``waits`` for
        what it sends (torch's own, Megatron-LM's). None leaves it as it is."""
        said = {
            "attention_kernel": attention, "fused": fused, "overlapped": overlapped, "accumulates": accumulates,
            "repeats": repeats, "alone": alone, "merged_loss": merged_loss, "sharded_loss": sharded_loss,
            "narrow_sums": narrow_sums, "buckets": buckets, "keeps_gathered": keeps_gathered, "plain_loss": plain_loss,
            "kept_logits": kept_logits, "keeps_heads": keeps_heads, "flat_state": flat_state,
            "plain_collectives": plain_collectives, "packed": packed, "waits": waits, "narrow_loss": narrow_loss,
            "fused_activations": fused_activations, "flat_units": flat_units, "own_units": own_units,
            "gather_buffer": gather_buffer,
        }
        changes: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        islands = []
        for island in self.islands:
            device = island.device
            if attention is not None and attention not in device.attention:
                raise ClusterError(
                    f"no attention kernel {attention!r} for {device.name}; known: {', '.join(device.attention)}"
                )
            device = replace(device, **changes)
            islands.append(replace(island, device=device))
        return Cluster(tuple(islands))

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


def _island(text: str, tables: Mapping[str, Any]) -> Island:
    match = _SPEC.fullmatch(text.replace(" ", ""))
    if not match:
        raise ClusterError(f"cannot read cluster {quoted(text)}; it is like 'h100:16x8' (device:nodes x devices per node)")
    name, node_name, sizes = match.groups()
    device_name, table = lookup(name, tables, "device")
    device = read_device(device_name, table, tables["sources"])
    if not node_name and "node" not in table:
        raise ClusterError(f"device {device_name!r} names no node; add a line node = \"...\", or write "
                           f"'{name}@NODE:2x8'; known: {', '.join(sorted(tables['node']))}")
    node = read_node(*lookup(node_name or table["node"], tables, "node"), tables["sources"])
    numbers = _sizes(text, sizes or "1x1")
    if node.kind == "torus":
        return _torus(text, device, node, numbers)
    if len(numbers) != 2:
        raise ClusterError(f"cluster {quoted(text)} needs two sizes, nodes x devices per node, as in "
                           f"'{name}:2x{node.per_node}'")
    island = Island(device, node, numbers[0], numbers[1])
    if island.is_apart:
        what = "nics" if not node.nics else "nic"
        raise ClusterError(f"cluster {quoted(text)} has {numbers[0]} nodes, but node {node.name!r} has {what} = 0, so that "
                           "nothing connects them; give the number of its NICs (nics) and the bandwidth of each (nic), or one "
                           f"node, '{name}@{node.name}:1x{numbers[1]}'")
    return island


def _sizes(text: str, sizes: str) -> tuple[int, ...]:
    """The sizes of a cluster, each at least 1 and no more than ``MOST_DEVICES`` in all. Raises ClusterError."""
    digits = [size.lstrip("0") for size in sizes.split("x")]
    if "" in digits:
        raise ClusterError(f"cluster {quoted(text)} has a size of 0; sizes are at least 1")
    if max(map(len, digits)) > len(str(MOST_DEVICES)) or math.prod(map(int, digits)) > MOST_DEVICES:
        raise ClusterError(f"cluster {quoted(text)} has too many devices; give at most {MOST_DEVICES}")
    return tuple(map(int, digits))


def _torus(text: str, device: Device, node: Node, numbers: tuple[int, ...]) -> Island:
    """A torus by its dims, or, from hosts x chips, of the most nearly equal dims."""
    world = math.prod(numbers)
    dims = numbers if len(numbers) == node.torus_dims else balanced(world, node.torus_dims)
    if len(numbers) not in (2, node.torus_dims):
        like = "x".join(["4"] * node.torus_dims)
        raise ClusterError(f"cluster {quoted(text)}: {device.name} is a torus of {node.torus_dims} dims, as in "
                           f"'{device.name}:{like}'")
    per_node = math.gcd(world, node.per_node)
    return Island(device, node, world // per_node, per_node, dims)


def balanced(world: int, dims: int) -> tuple[int, ...]:
    """``world`` as a product of ``dims`` factors with the smallest sum, ascending: tried is each that may be the smallest."""
    if dims == 1:
        return (world,)
    options = [tuple(sorted((d, *balanced(world // d, dims - 1)))) for d in sympy.divisors(world) if d**dims <= world]
    return min(options, key=sum)


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
        for device in ranks:
            graph.add_edge(device, hub, bandwidth=node.link_bandwidth, latency=node.link_latency)
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
