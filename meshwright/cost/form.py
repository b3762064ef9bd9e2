"""The form of a cluster file: which names it may hold, and what stands under each.

    [cluster]                devices
    [sources]                NAME = text
    [device.NAME]            texts, numbers, peak.DTYPE, attention.KERNEL, [[measured tables]]
    [node.NAME]              texts, whole numbers, numbers, [[measured tables]]

A name that nothing reads is refused: passed over, a misspelt number would leave another one in its place without a word. The
values of numbers and of columns are read later, by ``tables``, where a device or node is asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.cost.catalogue import MOST_DIMS, NUMBERS
from meshwright.cost.tables import COLUMNS, MOST_DEVICES, ClusterError, quoted
from meshwright.ir.sharding import DTYPE_NAMES

_TABLES = ("cluster", "sources", "device", "node")
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "device": ("title", "like", "node", "attention_kernel"), "node": ("title", "like", "kind"),
}
_MEASURED: Mapping[str, tuple[str, ...]] = {
    "device": tuple(key for key in COLUMNS if key != "collectives"), "node": ("collectives",),
}
_OTHER: Mapping[str, tuple[str, ...]] = {
    "device": ("aliases", "peak", "attention"), "node": ("aliases", "per_node", "torus_dims"),
}
_WHOLE: Mapping[str, int] = {"per_node": MOST_DEVICES, "torus_dims": MOST_DIMS}
"""{whole number of a node: the most that it may be}"""
_FORMATS = (*DTYPE_NAMES.values(), "tf32")
"""What products run in."""
_NUMBER, _COLUMN, _SIDES = ("value", "unit", "source"), ("values", "unit", "source"), ("forward", "backward")
_COLUMNS = ("bytes", "seconds", *_SIDES)


def check_form(file: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Raise ClusterError for what a file holds and nothing reads, and for texts, lists and tables that are something else.
    ``base``: the catalogue, whose attention kernels are known."""
    _names(file, _TABLES, "the file")
    for name in _TABLES:
        _is_table(file.get(name, {}), name)
    _names(file.get("cluster", {}), ("devices",), "[cluster]")
    _texts(file.get("cluster", {}), ("devices",), "cluster")
    _texts(file.get("sources", {}), file.get("sources", {}), "sources")
    kernels = {kernel for device in base["device"].values() for kernel in device.get("attention", {})}
    for what in ("device", "node"):
        for name, table in file.get(what, {}).items():
            _check(what, f"{what}.{name}", table)
        for name, table in file.get(what, {}).items():
            known = sorted({*kernels, table.get("attention_kernel", "")} - {""})
            _names(table.get("attention", {}), known, f"{what}.{name}.attention", " (or name it in attention_kernel)")


def _check(what: str, where: str, table: Any) -> None:
    """A device or a node."""
    _is_table(table, where)
    _names(table, (*_TEXTS[what], *_OTHER[what], *NUMBERS[what], *_MEASURED[what]), f"[{where}]")
    _texts(table, _TEXTS[what], where)
    aliases = table.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise ClusterError(f"{where}.aliases is {quoted(aliases)}, not a list of texts")
    for key, most in _WHOLE.items():
        if key in table and not (type(table[key]) is int and 1 <= table[key] <= most):
            raise ClusterError(f"{where}.{key} is {quoted(table[key])}, not a whole number from 1 to {most}")
    for key in NUMBERS[what]:
        _number(table.get(key), f"{where}.{key}")
    for key in ("peak", "attention"):
        _is_table(table.get(key, {}), f"{where}.{key}")
    _names(table.get("peak", {}), _FORMATS, f"{where}.peak")
    for dtype, entry in table.get("peak", {}).items():
        _number(entry, f"{where}.peak.{dtype}")
    for kernel, sides in table.get("attention", {}).items():
        if not isinstance(sides, dict) or not set(_SIDES) <= set(sides):
            raise ClusterError(f"{where}.attention.{kernel} is {quoted(sides)}; it has a forward and a backward")
        _names(sides, _SIDES, f"{where}.attention.{kernel}")
        for side in _SIDES:
            _number(sides[side], f"{where}.attention.{kernel}.{side}")
    for key in _MEASURED[what]:
        _measured(table.get(key, []), key, f"[[{where}.{key}]]")


def _measured(tables: Any, key: str, where: str) -> None:
    """The measured tables of a device or a node."""
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise ClusterError(f"{key} are tables of their own, each under {where}, not {quoted(tables)}")
    for number, one in enumerate(tables, start=1):
        here = f"{where}, table {number}"
        _names(one, COLUMNS[key], here)
        for column in _COLUMNS:
            if isinstance(one.get(column), dict):
                _names(one[column], _COLUMN, f"{column} of {here}")


def _number(entry: Any, where: str) -> None:
    """An entry {value, unit, source}, where it is one."""
    if isinstance(entry, dict):
        _names(entry, _NUMBER, where)


def _texts(table: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    for key in keys:
        if key in table and not isinstance(table[key], str):
            raise ClusterError(f"{where}.{key} is {quoted(table[key])}, not a text")


def _is_table(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise ClusterError(f"{where} is {quoted(value)}; it is a table, as in [{where}]")


def _names(table: Iterable[str], known: Iterable[str], where: str, remedy: str = "") -> None:
    """Raise ClusterError for a name that is not known there, with the nearest.

    >>> _names(["memroy"], ["memory", "reserve"], "[device.mine]")
    Traceback (most recent call last):
    meshwright.cost.tables.ClusterError: unknown 'memroy' in [device.mine]; did you mean 'memory'? Known: memory, reserve
    """
    known = tuple(known)
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? Known" if near else "known"
            raise ClusterError(f"unknown {quoted(name)} in {where}; {hint}: {', '.join(known)}{remedy}")
