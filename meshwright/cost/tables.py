"""Numbers and measured tables of a catalogue or of a user's file: read, converted, and refused if they are none.

A number is ``{value, unit, source}``, a column of a measured table ``{values, unit, source}``. Quantities leave this module in
bytes, bytes per second, seconds and FLOP/s; decimal units are powers of ten, "MiB" and "GiB" powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.errors import MeshwrightError
from meshwright.ir.sharding import DTYPE_NAMES

_UNITS: Mapping[str, float] = {
    "1": 1.0, "W": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0,
    "B": 1.0, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30,
    "Gb/s": 1e9 / 8, "GB/s": 1e9, "TB/s": 1e12, "TFLOP/s": 1e12,
}

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


_STREAMS = ("pointwise", "linear", "reduce", "norm", "gather", "copy", "loss", "factory")
"""Kinds of work (``ir.declared.operator.KINDS_OF_WORK``) that are bound by memory."""
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")


def read_number(entry: Any, where: str, above: bool = False) -> float:
    """A number of a table, not below 0; ``above``: nor 0. Raises ClusterError."""
    if not isinstance(entry, Mapping) or not {"value", "unit", "source"} <= set(entry):
        raise ClusterError(f"{where} must be {{value = ..., unit = ..., source = ...}}, not {entry!r}")
    if not isinstance(entry["unit"], str) or entry["unit"] not in _UNITS:
        raise ClusterError(f"{where} has unknown unit {entry['unit']!r}; known: {', '.join(_UNITS)}")
    value = entry["value"]
    real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not real or value < 0 or (above and not value):
        raise ClusterError(f"{where} needs finite numbers {'above 0' if above else 'not below 0'}, not {value!r}")
    return float(value) * _UNITS[entry["unit"]]


Read = TypeVar("Read")


def read_tables(
    name: str, owner: Mapping[str, Any], key: str, read: Callable[[str, Mapping[str, Any]], Read]
) -> tuple[Read, ...]:
    """The measured tables that a device or node has under a name. Raises ClusterError."""
    found = owner.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise ClusterError(f"{name!r}: {key} are tables of their own, each under [[...{name}.{key}]]")
    return tuple(read(name, one) for one in found)


def _column(entry: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
    """A column {values, unit, source} of a measured table, ascending order not needed; all above 0."""
    column = entry.get(key)
    if not isinstance(column, Mapping) or not {"values", "unit", "source"} <= set(column):
        raise ClusterError(f"{where}: {key} must be {{values = [...], unit = ..., source = ...}}, not {column!r}")
    if not isinstance(column["values"], list) or not column["values"]:
        raise ClusterError(f"{where}: {key} needs a list of numbers above 0, not {column['values']!r}")
    return tuple(read_number({**column, "value": value}, f"{where}: {key}", above=True) for value in column["values"])


def read_products(name: str, entry: Mapping[str, Any]) -> MeasuredProducts:
    """Products of a device, from its table. Raises ClusterError."""
    where = f"device {name!r}, products"
    seconds = _column(entry, "seconds", where)
    shapes = _shapes(entry, ("M", "N", "K"), len(seconds), where)
    return MeasuredProducts(_dtype(entry, where), shapes, seconds)  # type: ignore[arg-type]


def read_stream(name: str, entry: Mapping[str, Any]) -> MeasuredStream:
    """Work of a device that is bound by memory, from its table. Raises ClusterError."""
    where = f"device {name!r}, streams"
    bytes_, seconds = _column(entry, "bytes", where), _column(entry, "seconds", where)
    if len(bytes_) != len(seconds):
        raise ClusterError(f"{where}: {len(bytes_)} bytes and {len(seconds)} seconds; give as many of both")
    if entry.get("kind") not in _STREAMS:
        raise ClusterError(f"{where}: kind {entry.get('kind')!r} is none of {', '.join(_STREAMS)}")
    order = sorted(range(len(bytes_)), key=bytes_.__getitem__)
    ordered = (tuple(column[i] for i in order) for column in (bytes_, seconds))
    return MeasuredStream(entry["kind"], _dtype(entry, where), *ordered)


def read_attention(name: str, entry: Mapping[str, Any]) -> MeasuredAttention:
    """Attention of a device, from its table. Raises ClusterError."""
    where = f"device {name!r}, attentions"
    forward, backward = _column(entry, "forward", where), _column(entry, "backward", where)
    shapes = _shapes(entry, ("batch", "heads", "queries", "keys", "head dim"), len(forward), where)
    if len(forward) != len(backward):
        raise ClusterError(f"{where}: {len(forward)} seconds forward and {len(backward)} backward; give as many of both")
    if not isinstance(entry.get("causal", False), bool):
        raise ClusterError(f"{where}: causal must be true or false, not {entry['causal']!r}")
    causal = entry.get("causal", False)
    return MeasuredAttention(_dtype(entry, where), causal, shapes, forward, backward)  # type: ignore[arg-type]


def read_module(name: str, entry: Mapping[str, Any]) -> MeasuredModule:
    """A module on a device, from its table. Raises ClusterError."""
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


def read_collective(name: str, entry: Mapping[str, Any]) -> MeasuredCollective:
    """A collective of a node, from its table. Raises ClusterError."""
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
