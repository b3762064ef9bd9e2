"""Operators that look values up by index, and embedding.

Indices are GLOBAL positions, so a dim that is looked up stays whole; the dims of the index tensors become the result's
and may be split (the table is then read differently on each rank). Embedding may split its vocabulary: every rank looks up
the ids it owns, zeros elsewhere, and the result is a pending sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Operand, Rewritten, argument, broadcast_dims, dims_of
from meshwright.ir.declared.operator import Cost, Work
from meshwright.ir.graph import Op
from meshwright.ir.rule import Factor, Local, OpRule


def _embedding(call: Call) -> OpRule:
    """``scale_grad_by_freq`` counts ids over the whole batch."""
    return call.line("v d, *b! -> *b d" if call["scale_grad_by_freq"] else "v d, *b -> *b d", localize=_embedding_local)


def _embedding_local(op: Op, local: Local) -> Rewritten:
    if not local.axes_of("v"):
        return op.target, op.args, op.kwargs
    names = ("padding_idx", "scale_grad_by_freq", "sparse")
    piece = local.operand_piece(0, 0)
    return "mw.embedding", (op.args[0], op.args[1], *piece, *(argument(op, name) for name in names)), ()


def _masked_rows(work: Work) -> tuple[float, float]:
    """Rows of ids that other ranks own are masked on the way out, and gradients on the way back."""
    return float(work.made_bytes()), 2.0 * work.made_bytes()


def _index(call: Call) -> OpRule:
    """Advanced indexing: the index tensors broadcast; their dims stand where they were if they were adjacent, else in front."""
    x, indices = call["self"], call["indices"]
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return call.whole()
    dims, common, at = _indexed(x, indices)
    factors: list[Factor | None] = [f"i{i}" for i in range(len(common))]
    own = [broadcast_dims(index.shape, common, factors) for index in indices if index is not None]
    result = [dim for dim in dims[:at] if dim] + factors + [dim for dim in dims[at:] if dim]
    return call.rule([dims, *own], [result], linear=[[0]])


def _indexed(x: Operand, indices: Sequence[Operand | None]) -> tuple[list[Factor | None], tuple[int, ...], int]:
    """The table's factors (None where looked up), the indices' common shape, and where in the table's dims it is put."""
    looked_up = [i for i, index in enumerate(indices) if index is not None]
    common = tuple(torch.broadcast_shapes(*(index.shape for index in indices if index is not None)))
    adjacent = looked_up == list(range(looked_up[0], looked_up[-1] + 1))
    return dims_of(x, *looked_up), common, looked_up[0] if adjacent else 0


def _index_put(call: Call) -> OpRule:
    """Values written at indices: the dims not indexed pass, the indices are whole."""
    x, values, indices = call["self"], call["values"], call["indices"]
    present = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in present):
        return call.whole()
    dims, common, at = _indexed(x, indices)
    target: list[Factor | None] = [d for d in dims[:at] if d] + [None] * len(common) + [d for d in dims[at:] if d]
    shape = [x.shape[dims.index(d)] for d in dims[:at] if d] + list(common) + [x.shape[dims.index(d)] for d in dims[at:] if d]
    written = broadcast_dims(values.shape, shape, target)
    whole: list[list[Factor | None]] = [[None] * index.ndim for index in present]
    operands = [dims, *whole, written]
    return call.rule(operands, [dims], linear=[[0, values.position]])


def _index_select(call: Call) -> OpRule:
    x = call["self"]
    at = call["dim"] % max(x.ndim, 1)
    dims = dims_of(x, at)
    result: list[Factor | None] = ["i" if i == at else f for i, f in enumerate(dims)]
    return call.rule([dims, ["i"] * call["index"].ndim], [result], linear=[[0]])


def _gather(call: Call) -> OpRule:
    return _gathered(call, call["self"], call["index"])


def _take_along_dim(call: Call) -> OpRule:
    return call.whole() if call["dim"] is None else _gathered(call, call["self"], call["indices"])


def _gathered(call: Call, x: Operand, index: Operand) -> OpRule:
    """``out[i, j] = x[index[i, j], j]``: the dims other than ``dim`` pass where index and table have the same size."""
    if x.ndim == 0 or index.ndim == 0:
        return call.whole()
    at = call["dim"] % x.ndim
    same = [i for i in range(x.ndim) if x.shape[i] == index.shape[i] and i != at]
    table: list[Factor | None] = [f"dim{i}" if i in same else None for i in range(x.ndim)]
    found: list[Factor | None] = [f"dim{i}" if i in same else "i" if i == at else None for i in range(x.ndim)]
    if index.shape != call.shape:  # take_along_dim broadcasts
        return call.whole()
    return call.rule([table, found], [found], linear=[[0]])


def _scatter(call: Call) -> OpRule:
    """``out[index[i, j], j] = src[i, j]``: the dims other than ``dim`` pass where all have the same size."""
    x, at = call["self"], call["dim"] % max(call["self"].ndim, 1)
    others = call.operands[1:]
    same = {i for i in range(x.ndim) if i != at and all(other.shape[i] == x.shape[i] for other in others)}
    dims: list[Factor | None] = [f"dim{i}" if i in same else None for i in range(x.ndim)]
    source = call.arguments.get("src")
    group = [0, source.position] if isinstance(source, Operand) else [0]
    sums = call.arguments.get("reduce") in (None, "sum") and (len(group) == 2 or call["value"] == 0)
    return call.rule([dims] * len(call.operands), [dims], linear=[group] if sums else [])


def _index_add(call: Call) -> OpRule:
    """Rows of another tensor added at positions of ``dim``."""
    dims = dims_of(call["self"], call["dim"])
    return call.rule([dims, [None] * call["index"].ndim, dims], [dims], linear=[[0, 2]])


def _index_fill(call: Call) -> OpRule:
    dims = dims_of(call["self"], call["dim"])
    return call.rule([dims, [None]], [dims], linear=[[0]] if call["value"] == 0 else [])


looked_up = partial(declare, cost="gather", saves="1")

RULES: Mapping[str, Declaration] = {
    "aten.embedding.default": looked_up(_embedding),
    "mw.embedding": looked_up(None, cost=Cost("gather", space=_masked_rows)),
    "aten.index.Tensor": looked_up(_index),
    "aten.index_put.default": looked_up(_index_put),
    "aten.index_select.default": looked_up(_index_select),
    "aten.gather.default": looked_up(_gather),
    "aten.take_along_dim.default": looked_up(_take_along_dim),
    "aten.scatter.src": looked_up(_scatter),
    "aten.scatter.value": looked_up(_scatter),
    "aten.scatter_add.default": looked_up(_scatter),
    "aten.scatter_reduce.two": declare(_scatter),
    "aten.index_add.default": looked_up(_index_add),
    "aten.index_copy.default": declare(_index_add),
    "aten.index_fill.int_Scalar": declare(_index_fill),
}
