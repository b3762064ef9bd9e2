"""The catalogue: devices and nodes from tables whose numbers carry a unit and a source.

Tables ``[device.NAME]`` and ``[node.NAME]`` hold numbers ``{value, unit, source}``; ``like = "NAME"`` takes over what is not
given; ``[sources]`` spells the sources out. ``catalogue.toml`` beside this file is the one that comes along. Quantities leave
this module in bytes, bytes per second, seconds and FLOP/s; decimal units are powers of ten, "MiB" and "GiB" powers of two.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

import torch

from meshwright.errors import MeshwrightError
from meshwright.ir.sharding import DTYPE_NAMES

_UNITS: Mapping[str, float] = {
    "1": 1.0, "W": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0,
    "B": 1.0, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30,
    "Gb/s": 1e9 / 8, "GB/s": 1e9, "TB/s": 1e12, "TFLOP/s": 1e12,
}
_FABRICS = ("switch", "ring", "bus", "mesh", "torus")


class ClusterError(MeshwrightError, ValueError):
    """A cluster that cannot be read, or a device or node that is not known."""


@dataclass(frozen=True)
class MeasuredProducts:
    """Seconds of matrix products, M x K by K x N, in one dtype, as ``shapes`` of (M, N, K)."""

    dtype: str
    shapes: tuple[tuple[int, int, int], ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class MeasuredStream:
    """Seconds that a kind of work that is bound by memory (``operator.KINDS_OF_WORK``) takes to move so many bytes."""

    kind: str
    dtype: str
    bytes_: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class MeasuredAttention:
    """Seconds (forward, backward) of attention, as ``shapes`` of (batch, heads, queries, keys, head dim), in one dtype."""

    dtype: str
    causal: bool
    shapes: tuple[tuple[int, int, int, int, int], ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True)
class MeasuredModule:
    """Seconds (forward, backward) of a call of the modules whose path matches ``module`` ("model.layers.*": "*" for what
    stands between two dots), in one dtype, as ``points`` of (samples on a rank, tensor ranks, tokens of a sample)."""

    module: str
    dtype: str
    points: tuple[tuple[int, int, int], ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True)
class MeasuredCollective:
    """Seconds of a collective over a group of ``ranks`` on ``nodes``, by bytes of the group's full buffer on one rank."""

    kind: str
    ranks: int
    nodes: int
    bytes_: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Device:
    """One accelerator. Bytes, bytes/s, FLOP/s, seconds; efficiencies are fractions of the peak that long runs reach.

    ``peak``: FLOP/s by dtype name ("bf16", "f32"). ``attention``: {kernel: (forward, backward) fraction of the peak}, of which
    ``attention_kernel`` runs. ``units`` and ``tile``: multiprocessors and the edge of the matmul tile each works on (wave
    quantization); ``depth``: inner dimension at which a matmul reaches half of its efficiency. ``kernel_seconds``: what each
    kernel costs however small. ``contention``: slowdown of compute while a collective runs beside it. ``fused``: whether chains
    of pointwise operators run as one kernel (compiled); ``overlapped``: whether products, as Transformer Engine's, gather and
    reduce activations in pieces beside their work; ``accumulates``: whether they add a weight's gradient to its fp32 sum
    themselves (Megatron-LM's gradient accumulation fusion); ``repeats``: whether recomputation runs a block's whole forward
    again (Megatron-LM's checkpoint) or stops at the last value kept (torch's); ``alone``: whether ZeRO moves every parameter
    in a collective of its own, when it is called for and beside nothing (DeepSpeed), or those of a block together (FSDP);
    ``merged_loss``: whether the cross entropy is one kernel each way although the rest is not compiled (FlashAttention's,
    Liger's); ``narrow_sums``: whether micro-batches' gradients are summed in the compute dtype (DeepSpeed's default), not fp32;
    ``buckets``: whether a micro-batch's gradients lie in buckets that are there all the time, beside their sums (torch's DDP);
    ``keeps_gathered``: whether what linears gather under sequence parallelism is kept for the backward (autograd by itself),
    not gathered again (Megatron-LM); ``plain_loss``: whether the cross entropy is torch's own, which keeps its softmax, whose
    gradient lies beside that of the loss; ``kept_logits``: micro-batches whose logits are kept until others take their place
    (two in pipeline engines like DeepSpeed's); ``products``: the format that products run in, "" for that of their operands;
    ``measured``, ``streams``, ``attentions``: tables of products, of what is bound by memory and of attention that stand before
    the formula; ``modules``: of whole modules, by which the operators inside are scaled (``compiler.structure.measured``).
    ``sources``: of every number.
    """

    name: str
    title: str
    memory_bytes: int
    reserve_bytes: int
    memory_bandwidth: float
    peak: Mapping[str, float]
    attention: Mapping[str, tuple[float, float]]
    attention_kernel: str
    matmul_efficiency: float
    memory_efficiency: float
    kernel_seconds: float
    units: int
    tile: int
    depth: float
    contention: float
    products: str = ""
    measured: tuple[MeasuredProducts, ...] = ()
    streams: tuple[MeasuredStream, ...] = ()
    attentions: tuple[MeasuredAttention, ...] = ()
    modules: tuple[MeasuredModule, ...] = ()
    alone: bool = False
    merged_loss: bool = False
    narrow_sums: bool = False
    buckets: bool = False
    keeps_gathered: bool = False
    plain_loss: bool = False
    kept_logits: int = 0
    fused: bool = True
    overlapped: bool = False
    accumulates: bool = False
    repeats: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def attention_forward(self) -> float:
        """Fraction of the peak that long attention reaches in the forward."""
        return self.attention[self.attention_kernel][0]

    @property
    def attention_backward(self) -> float:
        """The same in the backward."""
        return self.attention[self.attention_kernel][1]

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

    kind: "switch", "ring", "bus", "torus", or "mesh", in which every two devices have a link
    per_node: devices
    link_bandwidth: bytes/s of one device into the node's fabric (torus: of one link)
    link_latency: seconds of a hop within the node
    ring_efficiency: the part of the bandwidth that a ring collective reaches
    reduce_efficiency: the part that a reduction in the switch reaches, 0 where there is none
    nics, nic_bandwidth, nic_latency, nic_efficiency: the links out of the node, which its devices share
    start_latency: seconds that any collective takes, however small its message and group
    congestion: a group on n nodes reaches (2 / n)^congestion of the bandwidth out of a node
    overlapped_bandwidth: the part of its bandwidth that a collective keeps while compute runs at the same time
    ring_hop, ring_out: seconds of a step of a ring within the node and out of it: more than the wire's, because the ring
        hands on whole chunks
    measured: collectives timed on such nodes, which stand before the formulas
    torus_dims: dims of a torus
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
    congestion: float = 0.0
    overlapped_bandwidth: float = 1.0
    ring_hop: float = 0.0
    ring_out: float = 0.0
    measured: tuple[MeasuredCollective, ...] = ()
    torus_dims: int = 0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


@lru_cache(maxsize=1)
def catalogue() -> dict[str, Any]:
    """The tables that come along."""
    return tomllib.loads(resources.files("meshwright.cost").joinpath("catalogue.toml").read_text(encoding="utf-8"))


def known_devices() -> tuple[str, ...]:
    """Names of the catalogue's devices."""
    return tuple(catalogue()["device"])


def known_nodes() -> tuple[str, ...]:
    """Names of the catalogue's nodes."""
    return tuple(catalogue()["node"])


def device_for(name: str, memory_bytes: int) -> str:
    """The catalogue's device for what a driver reports: the longest family name in it, the nearest memory.

    >>> device_for("NVIDIA A100-SXM4-40GB", 42 * 10**9), device_for("NVIDIA H100 80GB HBM3", 85 * 10**9)
    ('a100-40g', 'h100-80g')
    """
    tables, words = catalogue()["device"], "".join(name.lower().split())
    families = {key: key.partition("-")[0] for key in tables}
    length = max((len(family) for family in families.values() if family in words), default=0)
    fitting = [key for key, family in families.items() if family in words and len(family) == length]
    if not fitting:
        raise ClusterError(f"no device of the catalogue matches {name!r}; pass a Cluster; known: {', '.join(sorted(tables))}")
    sizes = {key: _number(lookup(key, catalogue(), "device")[1]["memory"], key) for key in fitting}
    nearest: str = min(fitting, key=lambda key: abs(sizes[key] - memory_bytes))
    return nearest


def lookup(name: str, everything: Mapping[str, Any], what: str) -> tuple[str, dict[str, Any]]:
    """(canonical name, table with ``like`` resolved); the error lists the known ones and the nearest."""
    tables = everything[what]
    aliases = {alias: key for key, table in tables.items() for alias in (key, *table.get("aliases", ()))}
    if name.lower() not in aliases:
        near = difflib.get_close_matches(name.lower(), aliases, n=1, cutoff=0.0)
        raise ClusterError(f"unknown {what} {name!r}; the nearest is {near[0]!r}; known: {', '.join(sorted(tables))}")
    key = aliases[name.lower()]
    table = dict(tables[key])
    if "like" in table:
        if table["like"] not in tables:
            raise ClusterError(f"{what} {key!r} is like {table['like']!r}, which is not in the catalogue")
        base = lookup(table["like"], everything, what)[1]
        nested = {part: {**base.get(part, {}), **table.get(part, {})} for part in ("peak", "attention")}
        table = {**base, **table, **nested}
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


_IDLE = 0.1
"""Assumed: the part of a board's power that its clocks do not change."""
_DEVICE_KEYS: Mapping[str, str] = {
    "memory": "memory_bytes", "reserve": "reserve_bytes", "memory_bandwidth": "memory_bandwidth",
    "matmul_efficiency": "matmul_efficiency", "memory_efficiency": "memory_efficiency",
    "kernel": "kernel_seconds", "units": "units", "tile": "tile", "depth": "depth", "contention": "contention",
}
_NODE_KEYS: Mapping[str, str] = {
    "link": "link_bandwidth", "link_latency": "link_latency", "ring": "ring_efficiency", "reduce": "reduce_efficiency",
    "nics": "nics", "nic": "nic_bandwidth", "nic_latency": "nic_latency", "nic_efficiency": "nic_efficiency",
    "start": "start_latency",
}
_STREAMS = ("pointwise", "linear", "reduce", "norm", "gather", "copy", "loss", "factory")
"""Kinds of work (``ir.declared.operator.KINDS_OF_WORK``) that are bound by memory."""
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
_NODE_OPTIONAL: Mapping[str, str] = {
    "congestion": "congestion", "overlapped_bandwidth": "overlapped_bandwidth", "ring_hop": "ring_hop", "ring_out": "ring_out",
}


def read_device(name: str, table: Mapping[str, Any], texts: Mapping[str, str]) -> Device:
    """A device from its table; ``texts``: the sources spelled out."""
    numbers = _read("device", name, table, _DEVICE_KEYS, texts)
    peaks = table.get("peak", {})
    if not peaks:
        raise ClusterError(f"device {name!r} lists no peak FLOP/s, as in peak.bf16 = {{...}}")
    peak = {dtype: _number(entry, f"device.{name}.peak.{dtype}") for dtype, entry in peaks.items()}
    numbers["sources"].update({f"peak.{dtype}": _source(entry, texts) for dtype, entry in peaks.items()})
    for key in ("memory_bytes", "reserve_bytes", "units", "tile"):
        numbers[key] = int(numbers[key])
    kernels, default = table.get("attention", {}), str(table.get("attention_kernel"))
    if default not in kernels:
        raise ClusterError(f"device {name!r} runs attention kernel {default!r}, but lists {', '.join(kernels) or 'none'}")
    attention = {}
    for kernel, sides in kernels.items():
        where = f"device.{name}.attention.{kernel}"
        attention[kernel] = (_number(sides.get("forward"), where), _number(sides.get("backward"), where))
        numbers["sources"][f"attention.{kernel}"] = _source(sides["forward"], texts)
    slower = _clocks(name, table)
    numbers["matmul_efficiency"] *= slower
    attention = {kernel: (ahead * slower, back * slower) for kernel, (ahead, back) in attention.items()}
    return Device(
        measured=tuple(_products(name, entry) for entry in table.get("products", ())),
        streams=tuple(_stream(name, entry) for entry in table.get("streams", ())),
        attentions=tuple(_attention(name, entry) for entry in table.get("attentions", ())),
        modules=tuple(_module(name, entry) for entry in table.get("modules", ())),
        name=name, title=table.get("title", name), peak=peak, attention=attention, attention_kernel=default, **numbers
    )


def _clocks(name: str, table: Mapping[str, Any]) -> float:
    """The clocks that a board sustains at its ``power`` over those at the ``rated`` power, for which efficiencies are given:
    what it draws beyond idling grows with the third power of its clocks, for voltage follows them.

    >>> watts = lambda value: {"value": value, "unit": "W", "source": ""}
    >>> round(_clocks("", {"power": watts(500), "rated": watts(700)}), 2), _clocks("", {})
    (0.88, 1.0)
    """
    if not {"power", "rated"} <= set(table):
        return 1.0
    power, rated = (_number(table[key], f"device.{name}.{key}") for key in ("power", "rated"))
    if power <= _IDLE * rated:
        raise ClusterError(f"device {name!r} runs at {power:g} W, no more than the {_IDLE * rated:g} W that it idles at")
    return float(min(1.0, ((power / rated - _IDLE) / (1.0 - _IDLE)) ** (1 / 3)))


def _column(entry: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
    """A column {values, unit, source} of a measured table, ascending order not needed; all above 0."""
    column = entry.get(key)
    if not isinstance(column, Mapping) or not {"values", "unit", "source"} <= set(column):
        raise ClusterError(f"{where}: {key} must be {{values = [...], unit = ..., source = ...}}, not {column!r}")
    found = tuple(_number({**column, "value": value}, f"{where}.{key}") for value in column["values"])
    if not found or min(found) <= 0:
        raise ClusterError(f"{where}: {key} needs numbers above 0, not {column['values']!r}")
    return found


def _products(name: str, entry: Mapping[str, Any]) -> MeasuredProducts:
    where = f"device {name!r}, products"
    seconds = _column(entry, "seconds", where)
    shapes = _shapes(entry, ("M", "N", "K"), len(seconds), where)
    return MeasuredProducts(_dtype(entry, where), shapes, seconds)  # type: ignore[arg-type]


def _stream(name: str, entry: Mapping[str, Any]) -> MeasuredStream:
    where = f"device {name!r}, streams"
    bytes_, seconds = _column(entry, "bytes", where), _column(entry, "seconds", where)
    if len(bytes_) != len(seconds):
        raise ClusterError(f"{where}: {len(bytes_)} bytes and {len(seconds)} seconds; give as many of both")
    if entry.get("kind") not in _STREAMS:
        raise ClusterError(f"{where}: kind {entry.get('kind')!r} is none of {', '.join(_STREAMS)}")
    order = sorted(range(len(bytes_)), key=bytes_.__getitem__)
    ordered = (tuple(column[i] for i in order) for column in (bytes_, seconds))
    return MeasuredStream(entry["kind"], _dtype(entry, where), *ordered)


def _attention(name: str, entry: Mapping[str, Any]) -> MeasuredAttention:
    where = f"device {name!r}, attentions"
    forward, backward = _column(entry, "forward", where), _column(entry, "backward", where)
    shapes = _shapes(entry, ("batch", "heads", "queries", "keys", "head dim"), len(forward), where)
    if len(forward) != len(backward):
        raise ClusterError(f"{where}: {len(forward)} seconds forward and {len(backward)} backward; give as many of both")
    if not isinstance(entry.get("causal", False), bool):
        raise ClusterError(f"{where}: causal must be true or false, not {entry['causal']!r}")
    causal = entry.get("causal", False)
    return MeasuredAttention(_dtype(entry, where), causal, shapes, forward, backward)  # type: ignore[arg-type]


def _module(name: str, entry: Mapping[str, Any]) -> MeasuredModule:
    where = f"device {name!r}, modules"
    pattern = entry.get("module")
    if not isinstance(pattern, str) or not all(pattern.split(".")):
        raise ClusterError(f"{where}: module must be a path such as \"model.layers.*\", not {pattern!r}")
    forward, backward = _column(entry, "forward", where), _column(entry, "backward", where)
    if len(forward) != len(backward):
        raise ClusterError(f"{where}: {len(forward)} seconds forward and {len(backward)} backward; give as many of both")
    points = _shapes(entry, ("samples", "tensor ranks", "tokens"), len(forward), where, "point")
    if len(set(points)) < len(points):
        raise ClusterError(f"{where}: a point stands there twice")
    return MeasuredModule(pattern, _dtype(entry, where), points, forward, backward)  # type: ignore[arg-type]


def _shapes(
    entry: Mapping[str, Any], dims: tuple[str, ...], count: int, where: str, what: str = "shape"
) -> tuple[tuple[int, ...], ...]:
    """The shapes of a measured table, one for each of its ``count`` rows."""
    shapes = entry.get(f"{what}s", ())
    whole = isinstance(shapes, list) and all(
        isinstance(shape, list) and len(shape) == len(dims) and all(type(size) is int and size > 0 for size in shape)
        for shape in shapes
    )
    if not whole or len(shapes) != count:
        raise ClusterError(f"{where}: every one of {count} seconds needs a {what} [{', '.join(dims)}], got {shapes!r}")
    return tuple(tuple(shape) for shape in shapes)


def _dtype(entry: Mapping[str, Any], where: str) -> str:
    if entry.get("dtype") not in DTYPE_NAMES.values():
        raise ClusterError(f"{where}: dtype {entry.get('dtype')!r} is none of {', '.join(DTYPE_NAMES.values())}")
    return str(entry["dtype"])


def _collectives(name: str, entry: Mapping[str, Any]) -> MeasuredCollective:
    where = f"node {name!r}, collectives"
    bytes_, seconds = _column(entry, "bytes", where), _column(entry, "seconds", where)
    ranks, nodes = entry.get("ranks"), entry.get("nodes", 1)
    if len(bytes_) != len(seconds):
        raise ClusterError(f"{where}: {len(bytes_)} bytes and {len(seconds)} seconds; give as many of both")
    if entry.get("kind") not in _COLLECTIVES:
        raise ClusterError(f"{where}: kind {entry.get('kind')!r} is none of {', '.join(_COLLECTIVES)}")
    if not isinstance(ranks, int) or not isinstance(nodes, int) or nodes < 1 or ranks < 2 or ranks % nodes:
        raise ClusterError(f"{where}: {ranks!r} ranks on {nodes!r} nodes is no group; at least 2, as many on every node")
    order = sorted(range(len(bytes_)), key=bytes_.__getitem__)
    return MeasuredCollective(entry["kind"], ranks, nodes, tuple(bytes_[i] for i in order), tuple(seconds[i] for i in order))


def read_node(name: str, table: Mapping[str, Any], texts: Mapping[str, str]) -> Node:
    """A node from its table."""
    if table.get("kind") not in _FABRICS:
        raise ClusterError(f"node {name!r} is of kind {table.get('kind')!r}; known: {', '.join(_FABRICS)}")
    keys = {**_NODE_KEYS, **{key: field_ for key, field_ in _NODE_OPTIONAL.items() if key in table}}
    numbers = _read("node", name, table, keys, texts)
    numbers["nics"] = int(numbers["nics"])
    return Node(
        name=name, title=table.get("title", name), kind=table["kind"], per_node=table["per_node"],
        torus_dims=table.get("torus_dims", 0), **numbers,
        measured=tuple(_collectives(name, entry) for entry in table.get("collectives", ())),
    )
