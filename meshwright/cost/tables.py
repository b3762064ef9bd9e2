"""Numbers and measured tables of a catalogue or of a user's file: read, converted, and refused if they are none.

A number is ``{value, unit, source}``, a column of a measured table ``{values, unit, source}``. Quantities leave this module in
bytes, bytes per second, seconds and FLOP/s; decimal units are powers of ten, "MiB" and "GiB" powers of two. Every ``Quantity``
has units of its own and limits far beyond any machine, so that no price overflows or is 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.errors import MeshwrightError
from meshwright.ir.sharding import DTYPE_NAMES

MOST_DEVICES = 2**22
"""Devices of a cluster, at most: well above any that was built."""
_MOST_SIZE = 2**40
"""A dim of a measured shape, at most."""


class ClusterError(MeshwrightError, ValueError):
    """A cluster that cannot be read, or a device or node that is not known."""


@dataclass(frozen=True)
class Quantity:
    """What a number of a file stands for.

    name: what it is given in, for messages
    units: {unit: how many of ``name``}
    least, most: limits of a number that is not 0, in ``name``
    whole: whether it counts things
    """

    name: str
    units: Mapping[str, float]
    least: float
    most: float
    whole: bool = False


BYTES = Quantity("bytes", {"B": 1.0, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30}, 1.0, 1e18)
BANDWIDTH = Quantity("bytes per second", {"Gb/s": 1e9 / 8, "GB/s": 1e9, "TB/s": 1e12}, 1.0, 1e18)
SECONDS = Quantity("seconds", {"us": 1e-6, "ms": 1e-3, "s": 1.0}, 1e-12, 1e6)
FLOPS = Quantity("FLOP/s", {"TFLOP/s": 1e12}, 1e6, 1e21)
POWER = Quantity("W", {"W": 1.0}, 1e-3, 1e6)
FRACTION = Quantity("of the whole", {"1": 1.0}, 1e-6, 1.0)
FACTOR = Quantity("as a factor", {"1": 1.0}, 1.0, 1e3)
SIZE = Quantity("as a plain number", {"1": 1.0}, 1e-3, 1e6)
COUNT = Quantity("as a whole number", {"1": 1.0}, 1.0, 1e6, whole=True)
_UNITS = frozenset(unit for one in (BYTES, BANDWIDTH, SECONDS, FLOPS, POWER, FRACTION) for unit in one.units)
_SHOWN = 200
"""Characters of a file's value that a message quotes."""


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


COLUMNS: Mapping[str, tuple[str, ...]] = {
    "products": ("dtype", "shapes", "seconds"), "streams": ("kind", "dtype", "bytes", "seconds"),
    "attentions": ("dtype", "causal", "shapes", "forward", "backward"),
    "modules": ("module", "dtype", "points", "forward", "backward"),
    "collectives": ("kind", "ranks", "nodes", "bytes", "seconds"),
}
"""What each measured table holds."""
_STREAMS = ("pointwise", "linear", "reduce", "norm", "gather", "copy", "loss", "factory")
"""Kinds of work (``ir.declared.operator.KINDS_OF_WORK``) that are bound by memory."""
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")


def quoted(value: Any) -> str:
    """A value of a file as a message shows it: cut where it is long.

    >>> quoted([1, "us"]), quoted(16**9999), len(quoted("x" * 9999))
    ("[1, 'us']", 'more digits than Python writes', 203)
    """
    try:
        text = repr(value)
    except ValueError:
        return "more digits than Python writes"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def read_number(entry: Any, where: str, quantity: Quantity, above: bool = False) -> float:
    """A number of a table, not below 0; ``above``: nor 0. Raises ClusterError, also for a unit of another quantity and for what
    is beyond the limits."""
    if not isinstance(entry, Mapping) or not {"value", "unit", "source"} <= set(entry):
        raise ClusterError(f"{where} must be {{value = ..., unit = ..., source = ...}}, not {quoted(entry)}")
    value, unit, units = entry["value"], entry["unit"], quantity.units
    if not isinstance(unit, str) or unit not in units:
        known = isinstance(unit, str) and unit in _UNITS
        raise ClusterError(f"{where} has {f'unit {unit!r}, which does not fit' if known else f'unknown unit {quoted(unit)}'}; "
                           f"fitting: {', '.join(units)}")
    if not isinstance(entry["source"], str):
        raise ClusterError(f"{where} has source {quoted(entry['source'])}; say in a text where the number comes from")
    real = type(value) is int or (isinstance(value, float) and math.isfinite(value))
    if not real or value < 0 or (above and not value):
        raise ClusterError(f"{where} needs finite numbers {'above 0' if above else 'not below 0'}, not {quoted(value)}")
    factor = units[unit]
    inside = not value or quantity.least / factor <= value <= quantity.most / factor
    if not inside or (quantity.whole and value != int(value)):
        raise ClusterError(f"{where} is {quoted(value)}{'' if unit == '1' else ' ' + unit}; give {quantity.least:g} to "
                           f"{quantity.most:g} {quantity.name}")
    return float(value) * factor


Read = TypeVar("Read")


def read_tables(
    name: str, owner: Mapping[str, Any], key: str, read: Callable[[str, Mapping[str, Any]], Read]
) -> tuple[Read, ...]:
    """The measured tables that a device or node has under a name. Raises ClusterError, also for what two rows measure."""
    found = owner.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise ClusterError(f"{name!r}: {key} are tables of their own, each under [[...{name}.{key}]]")
    tables = tuple(read(name, one) for one in found)
    seen = set[tuple[Any, ...]]()
    for row in (row for table in tables for row in _rows(table)):
        if row in seen:
            what, at = ", ".join(map(str, row[:-1])), list(row[-1]) if isinstance(row[-1], tuple) else f"{row[-1]:g} bytes"
            raise ClusterError(f"{name!r}, {key}: {at} ({what}) stands there twice; leave one, or give their mean")
        seen.add(row)
    return tables


def _rows(table: Any) -> Iterator[tuple[Any, ...]]:
    """What each row of a measured table is of."""
    columns = list(vars(table).values())
    of = [one for one in columns if not isinstance(one, tuple)]
    yield from ((*of, at) for at in next(one for one in columns if isinstance(one, tuple)))


def _column(entry: Mapping[str, Any], key: str, where: str, quantity: Quantity = SECONDS) -> tuple[float, ...]:
    """A column {values, unit, source} of a measured table, ascending order not needed; all above 0."""
    column = entry.get(key)
    if not isinstance(column, Mapping) or not {"values", "unit", "source"} <= set(column):
        raise ClusterError(f"{where}: {key} must be {{values = [...], unit = ..., source = ...}}, not {quoted(column)}")
    if not isinstance(column["values"], list) or not column["values"]:
        raise ClusterError(f"{where}: {key} needs a list of numbers above 0, not {quoted(column['values'])}")
    return tuple(read_number({**column, "value": one}, f"{where}: {key}", quantity, above=True) for one in column["values"])


def read_products(name: str, entry: Mapping[str, Any]) -> MeasuredProducts:
    """Products of a device, from its table. Raises ClusterError."""
    where = f"device {name!r}, products"
    seconds = _column(entry, "seconds", where)
    shapes = _shapes(entry, ("M", "N", "K"), len(seconds), where)
    return MeasuredProducts(_dtype(entry, where), shapes, seconds)  # type: ignore[arg-type]


def read_stream(name: str, entry: Mapping[str, Any]) -> MeasuredStream:
    """Work of a device that is bound by memory, from its table. Raises ClusterError."""
    where = f"device {name!r}, streams"
    bytes_, seconds = _column(entry, "bytes", where, BYTES), _column(entry, "seconds", where)
    if len(bytes_) != len(seconds):
        raise ClusterError(f"{where}: {len(bytes_)} bytes and {len(seconds)} seconds; give as many of both")
    if entry.get("kind") not in _STREAMS:
        raise ClusterError(f"{where}: kind {quoted(entry.get('kind'))} is none of {', '.join(_STREAMS)}")
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
        raise ClusterError(f"{where}: causal must be true or false, not {quoted(entry['causal'])}")
    causal = entry.get("causal", False)
    return MeasuredAttention(_dtype(entry, where), causal, shapes, forward, backward)  # type: ignore[arg-type]


def read_module(name: str, entry: Mapping[str, Any]) -> MeasuredModule:
    """A module on a device, from its table. Raises ClusterError."""
    where = f"device {name!r}, modules"
    pattern = entry.get("module")
    if not isinstance(pattern, str) or not all(pattern.split(".")):
        raise ClusterError(f"{where}: module must be a path such as \"model.layers.*\", not {quoted(pattern)}")
    forward, backward = _column(entry, "forward", where), _column(entry, "backward", where)
    if len(forward) != len(backward):
        raise ClusterError(f"{where}: {len(forward)} seconds forward and {len(backward)} backward; give as many of both")
    points = _shapes(entry, ("samples", "tensor ranks", "tokens"), len(forward), where, "point")
    return MeasuredModule(pattern, _dtype(entry, where), points, forward, backward)  # type: ignore[arg-type]


def _shapes(
    entry: Mapping[str, Any], dims: tuple[str, ...], count: int, where: str, what: str = "shape"
) -> tuple[tuple[int, ...], ...]:
    """The shapes of a measured table, one for each of its ``count`` rows."""
    shapes = entry.get(f"{what}s", ())
    whole = isinstance(shapes, list) and all(
        isinstance(shape, list) and len(shape) == len(dims)
        and all(type(size) is int and 0 < size <= _MOST_SIZE for size in shape) for shape in shapes
    )
    if not whole or len(shapes) != count:
        raise ClusterError(f"{where}: every one of {count} seconds needs a {what} [{', '.join(dims)}] of whole numbers from 1 "
                           f"to {_MOST_SIZE}, got {quoted(shapes)}")
    return tuple(tuple(shape) for shape in shapes)


def _dtype(entry: Mapping[str, Any], where: str) -> str:
    if entry.get("dtype") not in DTYPE_NAMES.values():
        raise ClusterError(f"{where}: dtype {quoted(entry.get('dtype'))} is none of {', '.join(DTYPE_NAMES.values())}")
    return str(entry["dtype"])


def read_collective(name: str, entry: Mapping[str, Any]) -> MeasuredCollective:
    """A collective of a node, from its table. Raises ClusterError."""
    where = f"node {name!r}, collectives"
    bytes_, seconds = _column(entry, "bytes", where, BYTES), _column(entry, "seconds", where)
    ranks, nodes = entry.get("ranks"), entry.get("nodes", 1)
    if len(bytes_) != len(seconds):
        raise ClusterError(f"{where}: {len(bytes_)} bytes and {len(seconds)} seconds; give as many of both")
    if entry.get("kind") not in _COLLECTIVES:
        raise ClusterError(f"{where}: kind {quoted(entry.get('kind'))} is none of {', '.join(_COLLECTIVES)}")
    if type(ranks) is not int or type(nodes) is not int or nodes < 1 or not 2 <= ranks <= MOST_DEVICES or ranks % nodes:
        raise ClusterError(f"{where}: {quoted(ranks)} ranks on {quoted(nodes)} nodes is no group; 2 to {MOST_DEVICES}, as many "
                           "on every node")
    order = sorted(range(len(bytes_)), key=bytes_.__getitem__)
    return MeasuredCollective(entry["kind"], ranks, nodes, tuple(bytes_[i] for i in order), tuple(seconds[i] for i in order))


def falls(points: Iterable[tuple[float, float]]) -> float:
    """The most by which (size, ratio) of a larger size, or of as large a one, is above that of a smaller; at least 1.

    >>> falls([(1, 2.0), (2, 0.5), (3, 1.5)]), falls([(1, 2.0), (2, 1.0)]), falls([])
    (3.0, 1.0, 1.0)
    """
    least, most = math.inf, 1.0
    for _, equals in itertools.groupby(sorted(points), key=lambda point: point[0]):
        ratios = [ratio for _, ratio in equals]
        least = min(least, *ratios)
        most = max(most, max(ratios) / least)
    return most
