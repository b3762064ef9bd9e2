"""Operators that join tensors, or take a part of one along a dim.

The dim that is joined or cut stays whole: a piece of it would lie across the border of two parts. The others pass. Every
operator here is linear, in all joined operands together.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, dims_of
from meshwright.ir.declared.operator import Cost
from meshwright.ir.rule import Factor, OpRule


def _along(call: Call, whole: bool = True) -> OpRule:
    """Same dims in and out, whole along ``dim``; every result alike."""
    x = call.operands[0]
    dims = dims_of(x, call["dim"]) if whole else dims_of(x)
    return call.rule([dims], [dims] * len(call.results), linear=[[0]])


def _cat(call: Call) -> OpRule:
    """Joined along ``dim``. Empty one-dimensional tensors are skipped, as torch does."""
    ndim = len(call.shape)
    dims = dims_of(call.results[0], call["dim"])
    operands = [dims if x.ndim == ndim else [None] * x.ndim for x in call.operands]
    return call.rule(operands, [dims], linear=[range(len(operands))])


def _stack(call: Call) -> OpRule:
    dims = dims_of(call.results[0])
    at = call["dim"] % len(dims)
    dims[at] = None
    operand = dims[:at] + dims[at + 1 :]
    return call.rule([operand] * len(call.operands), [dims], linear=[range(len(call.operands))])


def _slice(call: Call) -> OpRule:
    """A slice that takes everything passes its dim."""
    x = call["self"]
    return _along(call, whole=x.shape != call.shape or call["step"] != 1)


def _select(call: Call) -> OpRule:
    """One index of a dim, or each (unbind): the dim is gone."""
    x = call.operands[0]
    at = call["dim"] % x.ndim
    dims = dims_of(x, at)
    return call.rule([dims], [dims[:at] + dims[at + 1 :]] * len(call.results), linear=[[0]])


def _slice_scatter(call: Call) -> OpRule:
    """Another tensor written over a slice."""
    dims = dims_of(call.results[0], call["dim"])
    return call.rule([dims, dims], [dims], linear=[[0, 1]])


def _select_scatter(call: Call) -> OpRule:
    at = call["dim"] % len(call.shape)
    dims = dims_of(call.results[0], at)
    return call.rule([dims, dims[:at] + dims[at + 1 :]], [dims], linear=[[0, 1]])


def _flip(call: Call) -> OpRule:
    dims = dims_of(call.operands[0], *call["dims"])
    return call.rule([dims], [dims], linear=[[0]])


def _roll(call: Call) -> OpRule:
    x = call.operands[0]
    dims = dims_of(x, *(call["dims"] or range(x.ndim)))
    return call.rule([dims], [dims], linear=[[0]])


def _pad(call: Call) -> OpRule:
    """Pairs of (before, after) from the last dim backwards; linear when what is padded is zeros or of the tensor."""
    x, pad = call["self"], call["pad"]
    padded = [-1 - i // 2 for i in range(len(pad)) if pad[i]]
    dims = dims_of(x, *padded)
    zeros = call.arguments.get("mode", "constant") != "constant" or not call["value"]
    return call.rule([dims], [dims], linear=[[0]] if zeros else [])


def _unfold(call: Call) -> OpRule:
    """Windows of a dim, as a new last dim."""
    dims = dims_of(call.operands[0], call["dimension"])
    return call.rule([dims], [[*dims, None]], linear=[[0]])


def _diff(call: Call) -> OpRule:
    """Differences of neighbours along ``dim``, with what is put before and after."""
    dims = dims_of(call.operands[0], call["dim"])
    return call.rule([dims] * len(call.operands), [dims], linear=[range(len(call.operands))])


def _meshgrid(call: Call) -> OpRule:
    """Every vector along a dim of its own ("xy" swaps the first two)."""
    factors: list[Factor | None] = [f"dim{i}" for i in range(len(call.operands))]
    result = factors[:]
    if call["indexing"] == "xy" and len(result) > 1:
        result[:2] = result[1::-1]
    operands = [[factor] * vector.ndim for factor, vector in zip(factors, call.operands, strict=True)]
    return call.rule(operands, [result] * len(call.results))


JOIN = Cost("linear", passes=lambda work: range(len(work.operands)))
shown = partial(declare, cost="view", saves="")
copied = partial(declare, cost="copy", saves="")

RULES: Mapping[str, Declaration] = {
    "aten.cat.default": declare(_cat, cost=JOIN, saves=""),
    "aten.stack.default": declare(_stack, cost=JOIN, saves=""),
    "aten.slice.Tensor": shown(_slice),
    "aten.narrow.default": shown(_along),
    "aten.split.Tensor": shown(_along),
    "aten.split_with_sizes.default": shown(_along),
    "aten.unsafe_split.Tensor": shown(None),
    "aten.chunk.default": shown(_along),
    "aten.select.int": shown(_select),
    "aten.unbind.int": shown(_select),
    "aten.slice_scatter.default": copied(_slice_scatter),
    "aten.select_scatter.default": copied(_select_scatter),
    "aten.flip.default": declare(_flip, cost="linear", saves=""),
    "aten.roll.default": declare(_roll, cost="linear", saves=""),
    "aten.pad.default": copied(_pad),
    "aten.constant_pad_nd.default": copied(_pad),
    "aten.unfold.default": shown(_unfold),
    "aten.meshgrid.indexing": declare(_meshgrid),
    "aten.diff.default": declare(_diff),
}
