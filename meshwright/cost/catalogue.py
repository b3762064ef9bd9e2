"""The catalogue: devices and nodes from tables whose numbers carry a unit and a source.

Tables ``[device.NAME]`` and ``[node.NAME]`` hold numbers ``{value, unit, source}``; ``like = "NAME"`` takes over what is not
given; ``[sources]`` spells the sources out. ``catalogue.toml`` beside this file is the one that comes along. Units, limits and
tables of what was measured: ``tables``. Which names a file may hold: ``form``.
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

from meshwright.cost.tables import (
    BANDWIDTH,
    BYTES,
    COUNT,
    FACTOR,
    FLOPS,
    FRACTION,
    POWER,
    SECONDS,
    SIZE,
    ClusterError,
    MeasuredAttention,
    MeasuredCollective,
    MeasuredModule,
    MeasuredProducts,
    MeasuredStream,
    Quantity,
    quoted,
    read_attention,
    read_collective,
    read_module,
    read_number,
    read_products,
    read_stream,
    read_tables,
)
from meshwright.ir.sharding import DTYPE_NAMES

_FABRICS = ("switch", "ring", "bus", "mesh", "torus")
MOST_DIMS = 6
"""Dims of a torus, at most."""


@dataclass(frozen=True)
class Device:
    """One accelerator. Bytes, bytes/s, FLOP/s, seconds; efficiencies are fractions of the peak that long runs reach.

    ``peak``: FLOP/s by dtype name ("bf16", "f32"). ``attention``: {kernel: (forward, backward) fraction of the peak}, of which
    ``attention_kernel`` runs. ``units`` and ``tile``: multiprocessors and the edge of the matmul tile each works on (wave
    quantization); ``depth``: inner dimension at which a matmul reaches half of its efficiency; ``unaligned``: what it reaches
    at most where rows of 16-bit numbers are no multiple of 16 bytes. ``kernel_seconds``: what each kernel costs however small.
    ``contention``: slowdown of compute while a collective runs beside it. ``fused``: whether chains of pointwise operators run
    as one kernel (compiled), which the programs of this project do not; ``overlapped``: whether products, as Transformer
    Engine's, gather and reduce activations in pieces beside their work; ``accumulates``: whether they add a weight's gradient
    to its fp32 sum themselves (Megatron-LM's gradient accumulation fusion); ``repeats``: whether recomputation runs a block's
    whole forward
    again (Megatron-LM's checkpoint) or stops at the last value kept (torch's); ``alone``: whether ZeRO moves every parameter
    in a collective of its own, when it is called for and beside nothing (DeepSpeed), or those of a block together (FSDP);
    ``merged_loss``: whether the cross entropy is one kernel each way although the rest is not compiled (FlashAttention's,
    Liger's), ``sharded_loss``: or many that work in place (Megatron-LM's); ``narrow_sums``: whether micro-batches' gradients
    are summed in the compute dtype (DeepSpeed's default), not fp32;
    ``buckets``: whether a micro-batch's gradients lie in buckets that are there all the time, beside their sums (torch's DDP);
    ``keeps_gathered``: whether what linears gather under sequence parallelism is kept for the backward (autograd by itself),
    not gathered again (Megatron-LM); ``plain_loss``: whether the cross entropy is torch's own, which keeps its softmax, whose
    gradient lies beside that of the loss; ``kept_logits``: micro-batches whose logits are kept until others take their place
    (two in pipeline engines like DeepSpeed's); ``keeps_heads``: whether the values of attention are a slice of one product with
    queries and keys, which is kept whole for them, and its result is laid out anew where there are several samples;
    ``flat_state``: whether a rank's optimizer state is one tensor of each kind, not one for every parameter;
    ``plain_collectives``: whether collectives are torch.distributed's own functions (Megatron-LM), of which an all-gather along
    the last dim receives a list of pieces, and whose memory comes back late (``cost.memory.allocator``); ``packed``: whether
    attention is FlashAttention's for packed sequences, the longest of which the host asks the device for; ``waits``: whether
    a rank of a 1F1B goes on only when what it sent has arrived (torch's own and Megatron-LM's, which send and receive at once);
    ``narrow_loss``: whether the cross entropy works in place on 16-bit logits, without widening them; ``fused_activations``:
    whether what lies between pointwise operators is made again in the backward, in one kernel with them (Megatron-LM's SwiGLU),
    not kept; ``flat_units``: whether FSDP gathers and reduces a unit as one flat tensor, in the compute dtype (FSDP1);
    ``own_units``: whether embedding, last norm and head are units of their own; ``gather_buffer``: whether the sequence is the
    first dim and what linears gather along it lies in one buffer that stays (Megatron-LM's layers);
    ``products``: the format that products run in, "" for that of their operands;
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
    unaligned: float
    contention: float
    products: str = ""
    measured: tuple[MeasuredProducts, ...] = ()
    streams: tuple[MeasuredStream, ...] = ()
    attentions: tuple[MeasuredAttention, ...] = ()
    modules: tuple[MeasuredModule, ...] = ()
    alone: bool = False
    merged_loss: bool = False
    sharded_loss: bool = False
    narrow_sums: bool = False
    buckets: bool = False
    keeps_gathered: bool = False
    plain_loss: bool = False
    kept_logits: int = 0
    keeps_heads: bool = False
    flat_state: bool = False
    plain_collectives: bool = False
    packed: bool = False
    waits: bool = False
    narrow_loss: bool = False
    fused_activations: bool = False
    flat_units: bool = False
    own_units: bool = False
    gather_buffer: bool = False
    fused: bool = False
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
    sizes = {key: read_number(lookup(key, catalogue(), "device")[1]["memory"], key, BYTES) for key in fitting}
    nearest: str = min(fitting, key=lambda key: abs(sizes[key] - memory_bytes))
    return nearest


def lookup(
    name: str, everything: Mapping[str, Any], what: str, seen: tuple[str, ...] = ()
) -> tuple[str, dict[str, Any]]:
    """(canonical name, table with ``like`` resolved); the error lists the known ones and the nearest. ``seen``: those that are
    like this one."""
    tables = everything[what]
    aliases = {alias.lower(): key for key, table in tables.items() for alias in (key, *table.get("aliases", ()))}
    if name.lower() not in aliases:
        near = difflib.get_close_matches(name.lower(), aliases, n=1, cutoff=0.0)[0]
        alone, like = f"unknown {what} {quoted(name)}", f"is like {quoted(name)}, which is not in the catalogue"
        asked = f"{what} {seen[-1]!r} {like}" if seen else alone
        raise ClusterError(f"{asked}; the nearest is {near!r}; known: {', '.join(sorted(tables))}")
    key = aliases[name.lower()]
    if key in seen:
        way = " and ".join(map(repr, seen))
        raise ClusterError(f"{what} {key!r} is like itself, by way of {way}; name one of the catalogue")
    table = dict(tables[key])
    if "like" in table:
        base = lookup(table["like"], everything, what, (*seen, key))[1]
        nested = {part: {**base.get(part, {}), **table.get(part, {})} for part in ("peak", "attention")}
        table = {**base, **table, **nested}
    return key, table


def _read(
    what: str, name: str, table: Mapping[str, Any], keys: Mapping[str, tuple[str, Quantity]], texts: Mapping[str, str]
) -> dict[str, Any]:
    """{field: number} and their sources from a table."""
    missing = [key for key in keys if key not in table]
    if missing:
        known = next(iter(catalogue()[what]))
        these = "these" if len(missing) > 1 else "it"
        raise ClusterError(f"{what} {name!r} lacks {', '.join(missing)}; give {these}, or take what is not given over from a "
                           f"{what} that is known, by a line such as like = \"{known}\"")
    numbers: dict[str, Any] = {
        field_: read_number(table[key], f"{what}.{name}.{key}", quantity, above=key in _ABOVE)
        for key, (field_, quantity) in keys.items()
    }
    numbers["sources"] = {field_: _source(table[key], texts) for key, (field_, _) in keys.items()}
    return numbers


def _source(entry: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    return texts.get(entry["source"], entry["source"])


_IDLE = 0.1
"""Assumed: the part of a board's power that its clocks do not change."""
_DEVICE_KEYS: Mapping[str, tuple[str, Quantity]] = {
    "memory": ("memory_bytes", BYTES), "reserve": ("reserve_bytes", BYTES), "memory_bandwidth": ("memory_bandwidth", BANDWIDTH),
    "matmul_efficiency": ("matmul_efficiency", FRACTION), "memory_efficiency": ("memory_efficiency", FRACTION),
    "kernel": ("kernel_seconds", SECONDS), "units": ("units", COUNT), "tile": ("tile", COUNT), "depth": ("depth", SIZE),
    "unaligned": ("unaligned", FRACTION), "contention": ("contention", FACTOR),
}
_POWER_KEYS = ("power", "rated")
_NODE_KEYS: Mapping[str, tuple[str, Quantity]] = {
    "link": ("link_bandwidth", BANDWIDTH), "link_latency": ("link_latency", SECONDS), "ring": ("ring_efficiency", FRACTION),
    "reduce": ("reduce_efficiency", FRACTION), "nics": ("nics", COUNT), "nic": ("nic_bandwidth", BANDWIDTH),
    "nic_latency": ("nic_latency", SECONDS), "nic_efficiency": ("nic_efficiency", FRACTION),
    "start": ("start_latency", SECONDS),
}
_ABOVE = {*_DEVICE_KEYS, "link", "ring", "nic_efficiency", "overlapped_bandwidth"} - {"reserve", "kernel"}
"""What divides."""
_NODE_OPTIONAL: Mapping[str, tuple[str, Quantity]] = {
    "congestion": ("congestion", FRACTION), "overlapped_bandwidth": ("overlapped_bandwidth", FRACTION),
    "ring_hop": ("ring_hop", SECONDS), "ring_out": ("ring_out", SECONDS),
}
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "device": (*_DEVICE_KEYS, *_POWER_KEYS), "node": (*_NODE_KEYS, *_NODE_OPTIONAL),
}
"""Keys of a device's and a node's numbers."""


def read_device(name: str, table: Mapping[str, Any], texts: Mapping[str, str]) -> Device:
    """A device from its table; ``texts``: the sources spelled out."""
    numbers = _read("device", name, table, _DEVICE_KEYS, texts)
    peaks = table.get("peak", {})
    if not peaks:
        raise ClusterError(f"device {name!r} lists no peak FLOP/s, as in peak.bf16 = {{...}}")
    peak = {dtype: read_number(entry, f"device.{name}.peak.{dtype}", FLOPS, above=True) for dtype, entry in peaks.items()}
    numbers["sources"].update({f"peak.{dtype}": _source(entry, texts) for dtype, entry in peaks.items()})
    for key in ("memory_bytes", "reserve_bytes", "units", "tile"):
        numbers[key] = int(numbers[key])
    if numbers["memory_bytes"] <= numbers["reserve_bytes"]:
        raise ClusterError(f"device {name!r} has {numbers['memory_bytes']} B of memory, of which {numbers['reserve_bytes']} B "
                           "are its context's; give more memory than that (reserve)")
    kernels, default = table.get("attention", {}), table.get("attention_kernel", "")
    if default not in kernels:
        raise ClusterError(f"device {name!r} runs attention kernel {default!r}, but lists {', '.join(kernels) or 'none'}")
    attention = {}
    for kernel, sides in kernels.items():
        where = f"device.{name}.attention.{kernel}"
        attention[kernel] = (read_number(sides["forward"], f"{where}.forward", FRACTION, above=True),
                             read_number(sides["backward"], f"{where}.backward", FRACTION, above=True))
        numbers["sources"][f"attention.{kernel}"] = _source(sides["forward"], texts)
    slower = _clocks(name, table)
    numbers["matmul_efficiency"] *= slower
    attention = {kernel: (ahead * slower, back * slower) for kernel, (ahead, back) in attention.items()}
    return Device(
        measured=read_tables(name, table, "products", read_products),
        streams=read_tables(name, table, "streams", read_stream),
        attentions=read_tables(name, table, "attentions", read_attention),
        modules=read_tables(name, table, "modules", read_module),
        name=name, title=table.get("title", name), peak=peak, attention=attention, attention_kernel=default, **numbers
    )


def _clocks(name: str, table: Mapping[str, Any]) -> float:
    """The clocks that a board sustains at its ``power`` over those at the ``rated`` power, for which efficiencies are given:
    what it draws beyond idling grows with the third power of its clocks, for voltage follows them.

    >>> watts = lambda value: {"value": value, "unit": "W", "source": ""}
    >>> round(_clocks("", {"power": watts(500), "rated": watts(700)}), 2), _clocks("", {})
    (0.88, 1.0)
    """
    watts = {key: read_number(table[key], f"device.{name}.{key}", POWER, above=True) for key in _POWER_KEYS if key in table}
    if len(watts) < len(_POWER_KEYS):
        return 1.0
    power, rated = (watts[key] for key in _POWER_KEYS)
    if power <= _IDLE * rated:
        raise ClusterError(f"device {name!r} runs at {power:g} W, no more than the {_IDLE * rated:g} W that it idles at")
    return float(min(1.0, ((power / rated - _IDLE) / (1.0 - _IDLE)) ** (1 / 3)))


def read_node(name: str, table: Mapping[str, Any], texts: Mapping[str, str]) -> Node:
    """A node from its table."""
    if table.get("kind") not in _FABRICS:
        raise ClusterError(f"node {name!r} is of kind {quoted(table.get('kind'))}; known: {', '.join(_FABRICS)}")
    keys = {**_NODE_KEYS, **{key: field_ for key, field_ in _NODE_OPTIONAL.items() if key in table}}
    numbers = _read("node", name, table, keys, texts)
    if table["kind"] == "torus" and not table.get("torus_dims"):
        raise ClusterError(f"node {name!r} is a torus of no dims; give torus_dims, a whole number from 1 to {MOST_DIMS}")
    if "per_node" not in table:
        raise ClusterError(f"node {name!r} lacks per_node; give the devices of a node")
    numbers["nics"] = int(numbers["nics"])
    return Node(
        name=name, title=table.get("title", name), kind=table["kind"], per_node=table["per_node"],
        torus_dims=table.get("torus_dims", 0), **numbers,
        measured=read_tables(name, table, "collectives", read_collective),
    )
