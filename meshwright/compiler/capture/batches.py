"""Products of batches that keep the dims which the batch was made of.

    bmm(x, y), its batch a reshape of several dims (batch and heads)   =>   reshape(matmul(x', y')), x' and y' not reshaped
    baddbmm(z, x, y, beta=b, alpha=a)                                  =>   reshape(b z' + matmul(a x', y'))
    f(reshape(x)), f a permutation, softmax, dropout or elementwise    =>   reshape(f(x)), for what comes of such a product,
                                                                            apart or merged again on its way

Attention written with ``bmm`` merges batch and heads into one dim, which can be split over one thing only: over tp a rank
would get some sequences instead of some heads. The reshapes sink until one that takes the dims apart again meets them
(``merge_reshapes``). Only what a bmm reads or makes is touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.compiler.capture.movement import PERMUTE, RESHAPE, TRANSPOSE, is_elementwise
from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, rewrite
from meshwright.ir.graph import Graph, Op, Ref, map_refs, refs

BMM, BADDBMM, MATMUL = "aten.bmm.default", "aten.baddbmm.default", "aten.matmul.default"
SOFTMAX = frozenset({"aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default"})
DROPOUT = "aten.dropout.default"
EACH = frozenset({DROPOUT, "aten.max.other", "aten.min.other"})
"""Operators that work on each element, beside those that are declared so."""
FOLLOWED = frozenset({RESHAPE, PERMUTE, TRANSPOSE, *SOFTMAX, *EACH})
Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Merged:
    """A value as its dims apart: ``apart`` has ``lead`` where the value has ``dim``."""

    apart: Ref
    dim: int
    lead: Shape


def unmerge_batches(graph: Graph) -> Graph:
    """Batch products, and what is computed elementwise of them, on the dims that their batch merged."""
    return eliminate_dead_code(rewrite(graph, _Pass().step))


class _Pass:
    """The walk, with what was made apart so far."""

    def __init__(self) -> None:
        self.merged: dict[str, _Merged] = {}
        self.derived: set[str] = set()  # what was made of products and is no other one's

    def step(self, op: Op, edit: Edit) -> Iterable[Op] | None:
        self.op = op  # what is made for an op is made in its place, and so of its module
        if not self.derived.isdisjoint(op.inputs) and (op.target in FOLLOWED or is_elementwise(op)):
            self.derived.update(op.outputs)
        if op.target == RESHAPE and op.args[0].name in self.derived and op.args[0].name not in self.merged:
            lead = _merged_from(edit.shape(op.args[0]), edit.values[op.outputs[0]].shape, 0)
            self.merged.update({} if lead is None else {op.outputs[0]: _Merged(op.args[0], 0, lead)})
            return None
        if op.target == BMM or (op.target == BADDBMM and len(op.args) == 3):
            return self._product(op, edit)
        shape = edit.values[op.outputs[0]].shape
        names = (name for name in op.inputs if name in self.merged and len(edit.shape(Ref(name))) == len(shape))
        known = next((self.merged[name] for name in names if edit.shape(Ref(name))[self.merged[name].dim] > 1), None)
        if known is None or len(op.outputs) != 1:
            return None
        if op.target in (PERMUTE, TRANSPOSE):
            ops: list[Op] = []
            found = self._permuted(op, known, edit, ops)
            return self._merge(op, found, ops, edit)
        if op.target in SOFTMAX and op.args[1] != known.dim:
            at = op.args[1] + (len(known.lead) - 1) * (op.args[1] > known.dim)
            return self._elementwise(replace(op, args=(op.args[0], at, *op.args[2:])), known, edit)
        if op.target in EACH or is_elementwise(op):
            return self._elementwise(op, known, edit)
        return None

    def _product(self, op: Op, edit: Edit) -> Iterable[Op] | None:
        left, right = op.args[-2:]
        lead = self._lead(left, 0, edit) or self._lead(right, 0, edit)
        out, scales = edit.values[op.outputs[0]], {"alpha": 1, "beta": 1, **dict(op.kwargs)}
        if lead is None or (not scales["beta"] and edit.values[op.args[0].name].differentiable):  # whose gradient is zeros
            return None
        ops: list[Op] = []
        x, y = (self._apart(ref, 0, lead, edit, ops) for ref in (left, right))
        shape = (*lead, *out.shape[1:])
        x = self._scaled(x, scales["alpha"], edit, ops)
        product = edit.op(op, MATMUL, (x, y), shape, out.dtype)
        ops.append(product)
        if op.target == BADDBMM and scales["beta"]:
            term = self._aligned(op.args[0], len(out.shape), _Merged(Ref(""), 0, lead), edit, ops)
            term = self._scaled(term, scales["beta"], edit, ops)
            product = edit.op(op, "aten.add.Tensor", (term, Ref(product.outputs[0])), shape, out.dtype)
            ops.append(product)
        return self._merge(op, _Merged(Ref(product.outputs[0]), 0, lead), ops, edit)

    def _scaled(self, ref: Ref, scale: float, edit: Edit, ops: list[Op]) -> Ref:
        """A value times a number."""
        if scale == 1:
            return ref
        ops.append(edit.op(self.op, "aten.mul.Tensor", (ref, scale), edit.shape(ref), edit.dtype(ref)))
        return Ref(ops[-1].outputs[0])

    def _elementwise(self, op: Op, known: _Merged, edit: Edit) -> Iterable[Op]:
        """The operator on operands apart; what is read in other dims is broadcast as before."""
        out = edit.values[op.outputs[0]]
        ops: list[Op] = []
        names = {ref.name: self._aligned(ref, len(out.shape), known, edit, ops) for ref in refs((op.args, dict(op.kwargs)))}
        args, kwargs = map_refs((op.args, op.kwargs), lambda ref: names[ref.name])
        ops.append(edit.op(op, op.target, args, _split(out.shape, known), out.dtype, kwargs))
        return self._merge(op, replace(known, apart=Ref(ops[-1].outputs[0])), ops, edit)

    def _merge(self, op: Op, made: _Merged, ops: list[Op], edit: Edit) -> list[Op]:
        """The ops, and the op's own result as a reshape of what they made."""
        self.derived.update(op.outputs)
        self.merged[op.outputs[0]] = made
        shape = edit.values[op.outputs[0]].shape
        return [*ops, replace(op, target=RESHAPE, args=(made.apart, shape), kwargs=())]

    def _lead(self, ref: Ref, dim: int, edit: Edit) -> Shape | None:
        """The dims that a value's ``dim`` was merged from, if it was."""
        if ref.name in self.merged and self.merged[ref.name].dim == dim:
            return self.merged[ref.name].lead
        maker = edit.producer(ref)
        if maker is not None and maker.target in (PERMUTE, TRANSPOSE):
            return self._lead(maker.args[0], _order(maker, len(edit.shape(ref)))[dim], edit)
        if maker is not None and is_elementwise(maker) and len(maker.inputs) == 1:
            return self._lead(Ref(maker.inputs[0]), dim, edit)
        if maker is None or maker.target != RESHAPE:
            return None
        return _merged_from(edit.shape(maker.args[0]), edit.shape(ref), dim)

    def _apart(self, ref: Ref, dim: int, lead: Shape, edit: Edit, ops: list[Op]) -> Ref:
        """A value with ``lead`` in the place of ``dim``, made without merging them where that can be."""
        known = self.merged.get(ref.name)
        if known is not None and (known.dim, known.lead) == (dim, lead):
            return known.apart
        maker = edit.producer(ref)
        if maker is not None and maker.target in (PERMUTE, TRANSPOSE):
            source = _order(maker, len(edit.shape(ref)))[dim]
            inner = _Merged(self._apart(maker.args[0], source, lead, edit, ops), source, lead)
            return self._permuted(maker, inner, edit, ops).apart
        if maker is not None and is_elementwise(maker) and len(maker.inputs) == 1:
            operand = self._apart(Ref(maker.inputs[0]), dim, lead, edit, ops)
            args, kwargs = map_refs((maker.args, maker.kwargs), lambda _: operand)
            ops.append(edit.op(self.op, maker.target, args, edit.shape(operand), edit.dtype(ref), kwargs))
            return Ref(ops[-1].outputs[0])
        origin = maker.args[0] if maker is not None and maker.target == RESHAPE else ref
        shape = _split(edit.shape(ref), _Merged(ref, dim, lead))
        if edit.shape(origin) != shape:
            ops.append(edit.op(self.op, RESHAPE, (origin, shape), shape, edit.dtype(ref)))
            origin = Ref(ops[-1].outputs[0])
        return origin

    def _aligned(self, ref: Ref, ndim: int, like: _Merged, edit: Edit, ops: list[Op]) -> Ref:
        """An operand of an elementwise operator whose result has ``ndim`` dims, broadcasting to the result apart."""
        at = like.dim - (ndim - len(edit.shape(ref)))
        if at < 0:
            return ref
        lead = like.lead if edit.shape(ref)[at] != 1 else (1,) * len(like.lead)
        return self._apart(ref, at, lead, edit, ops)

    def _permuted(self, op: Op, known: _Merged, edit: Edit, ops: list[Op]) -> _Merged:
        """A permutation of a value apart: what was one dim moves together."""
        order, extra = _order(op, len(edit.values[op.outputs[0]].shape)), len(known.lead) - 1
        moved: list[int] = []
        for dim in order:
            first = dim + extra * (dim > known.dim)
            moved += range(first, first + extra + 1) if dim == known.dim else [first]
        shape = tuple(edit.shape(known.apart)[dim] for dim in moved)
        ops.append(edit.op(self.op, PERMUTE, (known.apart, tuple(moved)), shape, edit.dtype(known.apart)))
        return _Merged(Ref(ops[-1].outputs[0]), order.index(known.dim), known.lead)


def _split(shape: Shape, merged: _Merged) -> Shape:
    return (*shape[: merged.dim], *merged.lead, *shape[merged.dim + 1 :])


def _merged_from(before: Shape, after: Shape, dim: int) -> Shape | None:
    """The sizes whose borders in ``before`` lie within ``after[dim]``, if there are several and they cut it exactly.

    >>> _merged_from((8, 4, 32), (8, 16, 8), 1)
    (4, 4)
    """
    inner = math.prod(after[dim + 1 :])
    outer = inner * after[dim]
    borders = [inner]
    for index in range(len(before) - 1, 0, -1):
        border = math.prod(before[index:])
        if inner < border < outer:
            borders.append(border)
    borders.append(outer)
    if len(borders) == 2 or any(high % low for low, high in pairwise(borders)):
        return None
    return tuple(high // low for low, high in pairwise(borders))[::-1]


def _order(op: Op, ndim: int) -> list[int]:
    if op.target == PERMUTE:
        return list(op.args[1])
    order = list(range(ndim))
    order[op.args[1]], order[op.args[2]] = order[op.args[2]], order[op.args[1]]
    return order
