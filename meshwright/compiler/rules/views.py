"""Operators that give the same elements another shape or order.

A reshape is cut into the smallest groups of dims with equal products, [6, 4, 5] -> [24, 5] into (6, 4 -> 24) and (5 -> 5).
In a group only the major dims may be split, and only so that every piece is whole in both shapes: the factor has
gcd(first operand dim, first result dim) units. So a hidden dim of 4096 that becomes 32 heads x 128 has 32 units.
Every operator here is linear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, broadcast_dims, dims_of, rewrite
from meshwright.ir.declared.operator import Cost, Work
from meshwright.ir.graph import Op
from meshwright.ir.rule import Factor, Local, Localize, OpRule


def dim_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims of two shapes with equal products, dims of size 1 left out.

    >>> dim_groups((6, 4, 1, 5), (24, 5))
    [([0, 1], [0]), ([3], [1])]
    """
    left = [i for i, size in enumerate(before) if size != 1]
    right = [i for i, size in enumerate(after) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (p := math.prod(before[i] for i in a)) != (q := math.prod(after[i] for i in b)):
            if p < q:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        groups.append((a, b))
    return groups


def _reshape(call: Call) -> OpRule:
    x = call.operands[0]
    operand: list[Factor | None] = [None] * x.ndim
    result: list[Factor | None] = [None] * len(call.shape)
    units: dict[Factor, int] = {}
    if 0 not in x.shape:
        for left, right in dim_groups(x.shape, call.shape):
            factor = f"dim{left[0]}"
            operand[left[0]] = result[right[0]] = factor
            units[factor] = math.gcd(x.shape[left[0]], call.shape[right[0]])
    return call.rule([operand], [result], units=units, linear=[[0]])


def _sized(name: str) -> Localize:
    """A localizer that sets an argument to this rank's result shape."""

    def localize(op: Op, local: Local) -> Rewritten:
        changes: dict[str, Any] = {name: local.result_shape()}
        return rewrite(op, **changes)

    return localize


def _as_reshape(op: Op, local: Local) -> Rewritten:
    """As a reshape to this rank's result shape (a piece of length 1 must not be squeezed with the dims of size 1)."""
    return "aten.reshape.default", (op.args[0], local.result_shape()), ()


def _permuted(call: Call, order: Sequence[int]) -> OpRule:
    dims = dims_of(call.operands[0])
    return call.rule([dims], [[dims[i] for i in order]], linear=[[0]])


def _permute(call: Call) -> OpRule:
    ndim = call.operands[0].ndim
    return _permuted(call, [dim % ndim for dim in call["dims"]])


def _transpose(call: Call) -> OpRule:
    ndim = call.operands[0].ndim
    order = list(range(ndim))
    if ndim:
        a, b = call["dim0"] % ndim, call["dim1"] % ndim
        order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


def _reversed(call: Call) -> OpRule:
    return _permuted(call, list(reversed(range(call.operands[0].ndim))))


def _matrix_transpose(call: Call) -> OpRule:
    return call.line("*b m n -> *b n m ; +0")


def _movedim(call: Call) -> OpRule:
    ndim = call.operands[0].ndim
    source, target = call["source"], call["destination"]
    pairs = zip(source, target, strict=True) if isinstance(source, tuple | list) else [(source, target)]
    placed = {to % ndim: at % ndim for at, to in pairs}
    rest = iter(i for i in range(ndim) if i not in placed.values())
    return _permuted(call, [placed[i] if i in placed else next(rest) for i in range(ndim)])


def _diagonal(call: Call) -> OpRule:
    """The diagonal of two dims, as a new last dim."""
    x = call.operands[0]
    a, b = call["dim1"] % x.ndim, call["dim2"] % x.ndim
    dims = dims_of(x, a, b)
    return call.rule([dims], [[*(f for i, f in enumerate(dims) if i not in (a, b)), None]], linear=[[0]])


def _diag_embed(call: Call) -> OpRule:
    """The last dim becomes the diagonal of two."""
    x, ndim = call.operands[0], len(call.shape)
    rest = iter(dims_of(x, x.ndim - 1))
    both = {call["dim1"] % ndim, call["dim2"] % ndim}
    return call.rule([dims_of(x, x.ndim - 1)], [[None if i in both else next(rest) for i in range(ndim)]], linear=[[0]])


def _unsqueeze(call: Call) -> OpRule:
    dims = dims_of(call.operands[0])
    at = call["dim"] % (len(dims) + 1)
    return call.rule([dims], [[*dims[:at], None, *dims[at:]]], linear=[[0]])


def _squeeze(call: Call) -> OpRule:
    x = call.operands[0]
    asked = call.arguments.get("dim", tuple(range(x.ndim)))
    drop = {dim % max(x.ndim, 1) for dim in (asked if isinstance(asked, tuple | list) else (asked,))}
    dims = [None if size == 1 else f for f, size in zip(dims_of(x), x.shape, strict=True)]
    kept = [f for i, f in enumerate(dims) if not (i in drop and x.shape[i] == 1)]
    return call.rule([dims], [kept], linear=[[0]])


def _expand(call: Call) -> OpRule:
    """Dims that are created or grown from size 1 are new factors."""
    factors = [f"dim{i}" for i in range(len(call.shape))]
    return call.rule([broadcast_dims(call.operands[0].shape, call.shape, factors)], [factors], linear=[[0]])


def _repeat(call: Call) -> OpRule:
    """A dim repeated once passes; one that is repeated splits between its copies, which a rank makes of the whole."""
    x = call.operands[0]
    shift = len(call.shape) - x.ndim
    operand: list[Factor | None] = [None] * x.ndim
    result: list[Factor | None] = [f"dim{i}" for i in range(len(call.shape))]
    units: dict[Factor, int] = {}
    for i, length in enumerate(x.shape):
        size = call.shape[i + shift]
        if length == size:
            operand[i] = f"dim{i + shift}"
        elif length > 1:
            units[f"dim{i + shift}"] = size // length
    return call.rule([operand], [result], units=units, linear=[[0]], localize=_repeat_local)


def _repeat_local(op: Op, local: Local) -> Rewritten:
    shape, result = local.operand_shape(0), local.result_shape()
    lengths = (1,) * (len(result) - len(shape)) + shape
    repeats = tuple(size // length if length else 1 for size, length in zip(result, lengths, strict=True))
    return "aten.repeat.default", (op.args[0], repeats), ()


def _repeat_interleave(call: Call) -> OpRule:
    """Every element of a dim n times in a row: a piece of the dim gives a piece of the result."""
    x = call.operands[0]
    if call["dim"] is None and x.ndim != 1:
        return call.rule([[None] * x.ndim], [[None]], linear=[[0]])
    dim = (call["dim"] or 0) % x.ndim
    dims = dims_of(x)
    return call.rule([dims], [dims], units={f"dim{dim}": x.shape[dim]}, linear=[[0]], localize=_without_size)


def _without_size(op: Op, local: Local) -> Rewritten:
    """``output_size`` only spares torch a count."""
    return rewrite(op, output_size=None)


def _triangle(call: Call) -> OpRule:
    """Rows and columns are counted from where a piece lies."""
    dims = dims_of(call.operands[0])
    return call.rule([dims], [dims], linear=[[0]], localize=_diagonal_mask, located=[dim for dim in dims[-2:] if dim])


def _diagonal_mask(op: Op, local: Local) -> Rewritten:
    """``tril``/``triu`` of a piece: row and column offsets shift the diagonal."""
    ndim = len(local.result_shapes[0])
    shift = local.result_piece(ndim - 2)[0] - local.result_piece(ndim - 1)[0]
    diagonal = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("diagonal", 0)
    return rewrite(op, diagonal=diagonal + shift)


def _order(work: Work) -> Sequence[int]:
    """Which dim of the operand every dim of a permutation's result is."""
    ndim = len(work.operands[0])
    return [int(dim) % ndim for dim in work.args[1]]


def _swapped(work: Work) -> Sequence[int]:
    """The same, where two dims change places: those named, or the last two."""
    ndim = len(work.operands[0])
    order = list(range(ndim))
    if ndim > 1:
        a, b = (int(dim) % ndim for dim in (work.args[1:3] or (ndim - 2, ndim - 1)))
        order[a], order[b] = order[b], order[a]
    return order


shown = partial(declare, cost="view", saves="")
reshaped = partial(declare, cost=Cost("view", layout="reshape"), saves="")
permuted = partial(declare, cost=Cost("view", order=_order), saves="")
swapped = partial(declare, cost=Cost("view", order=_swapped), saves="")
copied = partial(declare, cost="copy", saves="")

RULES: Mapping[str, Declaration] = {
    "aten.reshape.default": reshaped(_reshape, _sized("shape")),
    "aten.view.default": reshaped(_reshape, _sized("size")),
    "aten._unsafe_view.default": reshaped(_reshape, _sized("size")),
    "aten.flatten.using_ints": reshaped(_reshape, _as_reshape),
    "aten.unflatten.int": shown(_reshape, _as_reshape),
    "aten.permute.default": permuted(_permute),
    "aten.transpose.int": swapped(_transpose),
    "aten.t.default": swapped(_reversed),
    "aten.numpy_T.default": swapped(_reversed),
    "aten.mT.default": swapped(_matrix_transpose),
    "aten.adjoint.default": declare(_matrix_transpose),
    "aten.movedim.intlist": shown(_movedim),
    "aten.movedim.int": shown(_movedim),
    "aten.as_strided.default": shown(None),
    "aten.diagonal.default": shown(_diagonal),
    "aten.diag_embed.default": declare(_diag_embed),
    "aten.unsqueeze.default": shown(_unsqueeze),
    "aten.squeeze.default": shown(_squeeze, _as_reshape),
    "aten.squeeze.dim": shown(_squeeze, _as_reshape),
    "aten.squeeze.dims": shown(_squeeze, _as_reshape),
    "aten.expand.default": shown(_expand, _sized("size")),
    "aten.broadcast_to.default": shown(_expand, _sized("size")),
    "aten.repeat.default": copied(_repeat),
    "aten.tile.default": declare(_repeat),
    "aten.repeat_interleave.self_int": copied(_repeat_interleave),
    "aten.tril.default": copied(_triangle),
    "aten.triu.default": copied(_triangle),
}
