"""Data movement in an order that hides nothing.

    merge_reshapes         reshape(reshape(x))                     =>   reshape(x)
    split_before_permute   reshape(permute(reshape(x))), the last one only splitting dims
                           =>   permute(reshape(x)) with the dims split first: batch and heads that were merged stay apart
    sink_expands           f(expand(x), y), f elementwise          =>   expand(f(x, y)); attention reads a mask unexpanded:
                           a mask that is the same for every row of the batch is made once

Each is an identity on values; the dead operators left behind are removed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, rewrite
from meshwright.compiler.rules import builtin_rules
from meshwright.ir.graph import Graph, Op, Ref, map_refs, refs

RESHAPE, EXPAND, PERMUTE = "aten.reshape.default", "aten.expand.default", "aten.permute.default"
TRANSPOSE, TURN = "aten.transpose.int", "aten.t.default"  # of any two dims; of a matrix, whose only spelling it is
ATTENTION = "aten.scaled_dot_product_attention.default"
WINDOW = "mw.window"


def is_elementwise(op: Op) -> bool:
    """Whether the result at an index depends only on the (broadcast) operands there."""
    return builtin_rules().operators[op.target].elementwise


def merge_reshapes(graph: Graph) -> Graph:
    """A reshape of a reshape reads the first one's operand."""
    return eliminate_dead_code(rewrite(graph, _merge))


def _merge(op: Op, edit: Edit) -> Iterable[Op] | None:
    if op.target != RESHAPE:
        return None
    before = edit.made_by(op.args[0], RESHAPE)
    origin = before.args[0] if before else op.args[0]
    if edit.shape(origin) == edit.values[op.outputs[0]].shape:
        edit.replace(op.outputs[0], origin.name)
        return ()
    return (replace(op, args=(origin, op.args[1])),) if before else None


def split_before_permute(graph: Graph) -> Graph:
    """Dims that a reshape merged and one after a permutation splits again are not merged."""
    return eliminate_dead_code(rewrite(graph, _split_first))


def _split_first(op: Op, edit: Edit) -> Iterable[Op] | None:
    moved = edit.made_by(op.args[0], PERMUTE, TRANSPOSE) if op.target == RESHAPE else None
    merged = edit.made_by(moved.args[0], RESHAPE) if moved else None
    if moved is None or merged is None:
        return None
    before, after = edit.values[moved.outputs[0]].shape, edit.values[op.outputs[0]].shape
    parts = _splits(before, after)
    if parts is None or before == after:
        return None
    order = _order(moved, len(before))
    by_source = dict(zip(order, parts, strict=True))
    shape = tuple(size for source in range(len(before)) for size in by_source[source])
    starts = dict(enumerate(accumulate((len(by_source[source]) for source in range(len(before))), initial=0)))
    new_order = tuple(starts[source] + i for source in order for i in range(len(by_source[source])))
    split = edit.op(op, RESHAPE, (merged.args[0], shape), shape, edit.dtype(merged.args[0]))
    return (split, replace(op, target=PERMUTE, args=(Ref(split.outputs[0]), new_order), kwargs=()))


def _order(moved: Op, ndim: int) -> tuple[int, ...]:
    if moved.target == PERMUTE:
        return tuple(moved.args[1])
    order = list(range(ndim))
    order[moved.args[1]], order[moved.args[2]] = order[moved.args[2]], order[moved.args[1]]
    return tuple(order)


def _splits(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """For every dim of ``before`` the dims of ``after`` that it becomes, if the reshape only splits dims."""
    parts, at = [], 0
    for index, size in enumerate(before):
        start = at
        while at < len(after) and (at == start or math.prod(after[start:at]) < size):
            at += 1
        if index == len(before) - 1:
            at = len(after)
        if math.prod(after[start:at]) != size:
            return None
        parts.append(after[start:at])
    return parts


def sink_expands(graph: Graph) -> Graph:
    """Elementwise operators come before the expansion of what they read."""
    return eliminate_dead_code(rewrite(graph, _sink))


def _sink(op: Op, edit: Edit) -> Iterable[Op] | None:
    if op.target == ATTENTION:
        mask = edit.made_by(op.args[3], EXPAND)
        return (replace(op, args=(*op.args[:3], mask.args[0], *op.args[4:])),) if mask else None
    if not is_elementwise(op) or not any(edit.made_by(name, EXPAND) for name in op.inputs):
        return None
    out = edit.values[op.outputs[0]]

    def narrow(ref: Ref) -> Any:
        expand = edit.made_by(ref, EXPAND)  # a 0-dim operand would count less in type promotion
        return expand.args[0] if expand and edit.shape(expand.args[0]) else ref

    args, kwargs = map_refs(op.args, narrow), map_refs(op.kwargs, narrow)
    shape = torch.broadcast_shapes(*(edit.shape(ref) for ref in refs((args, kwargs))))
    if tuple(shape) == out.shape:
        return None if args == op.args else (replace(op, args=args, kwargs=kwargs),)
    small = replace(op, name=edit.new(op.name, shape, out.dtype), args=args, kwargs=kwargs)
    small = replace(small, outputs=(small.name,))
    return (small, replace(op, target=EXPAND, args=(Ref(small.name), out.shape), kwargs=()))
