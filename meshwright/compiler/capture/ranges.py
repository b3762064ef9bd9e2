"""What a whole number of the graph can be, and what is certain by that before it runs.

    index of a topk, sort or argmax along n places        0 .. n - 1
    a fill                                                its number
    reshape, sort, index: what only moves numbers         as what it moves
    a cast, clamp, choice, quotient or comparison         by interval arithmetic
    anything else                                         what its dtype can hold

    a comparison that holds of all numbers, or of none    =>  a fill
    a choice by a mask that is the same everywhere        =>  what is chosen
    a clamp whose bounds nothing exceeds                  =>  its operand

So a mixture may ask whether a router chose an expert beyond its last, as those of ``transformers`` do that would run on a part
of the experts as well: a topk over their scores chooses none. Nothing is assumed of inputs, parameters and floating-point
values. Masks that are made of literals alone are ``masks``' matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from meshwright.compiler.capture.movement import EXPAND
from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, mark_differentiable, rewrite
from meshwright.compiler.rules import argument
from meshwright.ir.graph import FILL, Graph, Op, Ref


class Span(NamedTuple):
    """All whole numbers from ``low`` to ``high``."""

    low: int
    high: int


DTYPES: Mapping[torch.dtype, Span] = {torch.bool: Span(0, 1)} | {
    dtype: Span(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}
INDICES: Mapping[str, int] = {
    "aten.topk.default": 1, "aten.sort.default": 1, "aten.sort.stable": 1, "aten.max.dim": 1, "aten.min.dim": 1,
    "aten.argsort.default": 0, "aten.argsort.stable": 0, "aten.argmax.default": 0, "aten.argmin.default": 0,
}
"""{operator: which of its results are places along its argument ``dim``}."""
MOVES = frozenset({
    "aten.topk.default", "aten.sort.default", "aten.sort.stable", "aten.max.dim", "aten.min.dim", "aten.reshape.default",
    "aten.transpose.int", "aten.t.default", "aten.permute.default", "aten.unsqueeze.default", "aten.squeeze.dim",
    "aten.squeeze.dims", "aten.expand.default", "aten.select.int", "aten.slice.Tensor", "aten.flip.default",
    "aten.index.Tensor", "aten.gather.default", "aten.index_select.default", "aten.repeat.default", "aten.detach.default",
    "aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int",
})
"""Operators all numbers of whose results, but for places, are some of their first operand's."""
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
CLAMPS = frozenset({"aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default"})


def holds(comparison: str, left: Span, right: Span) -> bool | None:
    """Whether a comparison is true of any two numbers of these intervals, or of none; None if that depends on the numbers.

    >>> holds("ge", Span(0, 3), Span(4, 4)), holds("ge", Span(0, 4), Span(4, 4))
    (False, None)
    """
    if comparison in ("gt", "ge"):
        return holds({"gt": "lt", "ge": "le"}[comparison], right, left)
    if comparison in ("eq", "ne"):
        apart = left.high < right.low or right.high < left.low
        alike = left == right and left.low == left.high
        return (alike == (comparison == "eq")) if apart or alike else None
    if comparison == "lt":
        return True if left.high < right.low else False if left.low >= right.high else None
    return True if left.high <= right.low else False if left.low > right.high else None


def decide(graph: Graph) -> Graph:
    """The graph without comparisons, choices and clamps whose outcome is certain."""
    known: dict[str, Span] = {}

    def step(op: Op, edit: Edit) -> Iterable[Op] | None:
        numbers = _Decided(op, edit, known)
        for place, name in enumerate(op.outputs):
            if edit.values[name].dtype in DTYPES:
                known[name] = numbers.result(place)
        return numbers.decided()

    return eliminate_dead_code(rewrite(mark_differentiable(graph), step))


class _Decided:
    """One operator, by what is ``known`` of the values before it."""

    def __init__(self, op: Op, edit: Edit, known: Mapping[str, Span]) -> None:
        self.op, self.edit, self.known = op, edit, known
        self.kind = op.target.split(".")[1] if op.target.startswith("aten.") else ""
        self.out = edit.values[op.outputs[0]]

    def of(self, arg: Any) -> Span | None:
        """What an argument can be; None for floating-point values, and for what is no number."""
        if isinstance(arg, Ref):
            return self.known.get(arg.name, DTYPES.get(self.edit.dtype(arg)))
        return Span(int(arg), int(arg)) if isinstance(arg, int) else None

    def result(self, place: int) -> Span:
        """What a result, of a dtype of whole numbers, can be."""
        op, anything = self.op, DTYPES[self.edit.values[self.op.outputs[place]].dtype]
        if INDICES.get(op.target) == place:
            shape, dim = self.edit.shape(op.args[0]), argument(op, "dim")
            size = math.prod(shape) if dim is None else shape[dim] if shape else 1
            return Span(0, max(0, size - 1))
        found = self.of(op.args[0]) if op.target in MOVES else self._computed(anything)
        return found if found is not None and anything.low <= found.low and found.high <= anything.high else anything

    def _computed(self, anything: Span) -> Span | None:
        op, args = self.op, self.op.args
        if op.target == FILL:
            return Span(int(args[1]), int(args[1])) if math.isfinite(args[1]) else None
        if op.target.startswith("aten.where.") and len(args) == 3:
            return self._either(args[1], args[2])
        if op.target == "aten.masked_fill.Scalar":
            kept, filled = self._kept(), self.of(args[2])
            return None if kept is None or filled is None else Span(min(kept.low, filled.low), max(kept.high, filled.high))
        if op.target in ("aten.cat.default", "aten.stack.default"):
            return self._either(*args[0])
        if self.kind in COMPARISONS:
            return self._compared()
        one = self.of(args[0]) if args else None
        if one is None:
            return None
        if op.target == "aten._to_copy.default":
            return Span(int(one.low > 0 or one.high < 0), int(one != (0, 0))) if self.out.dtype == torch.bool else one
        if op.target in CLAMPS:
            least, most = self._bounds()
            low, high = (min(max(number, least), most) for number in one)
            return Span(int(low), int(high))
        divisor = args[1] if len(args) > 1 else None
        if op.target in ("aten.floor_divide.default", "aten.remainder.Scalar"):
            if not isinstance(divisor, int) or not 0 < divisor <= anything.high:  # its dtype would make another of it
                return None
            quotient = Span(one.low // divisor, one.high // divisor)
            return quotient if op.target == "aten.floor_divide.default" else Span(0, divisor - 1)
        if self.out.dtype == torch.bool and self.kind in ("logical_not", "bitwise_not") and self._of_bools():
            return Span(1 - one.high, 1 - one.low)
        other = self.of(divisor)
        if self.out.dtype == torch.bool and self.kind in ("logical_and", "bitwise_and") and other and self._of_bools():
            return Span(min(one.low, other.low), min(one.high, other.high))
        if self.out.dtype == torch.bool and self.kind in ("logical_or", "bitwise_or") and other and self._of_bools():
            return Span(max(one.low, other.low), max(one.high, other.high))
        return None

    def _of_bools(self) -> bool:
        return all(isinstance(arg, Ref) and self.edit.dtype(arg) == torch.bool for arg in self.op.args)

    def _either(self, *args: Any) -> Span | None:
        spans = [span for span in map(self.of, args) if span is not None]
        return Span(min(span.low for span in spans), max(span.high for span in spans)) if len(spans) == len(args) else None

    def _kept(self) -> Span | None:
        """What a masked_fill leaves of its operand: without its largest number, where the mask is that it is this."""
        x, mask = self.op.args[:2]
        span, asked = self.of(x), self.edit.made_by(mask, "aten.eq.Scalar")
        largest = span is not None and asked is not None and asked.args[0] == x and asked.args[1] == span.high > span.low
        return Span(span.low, span.high - 1) if span is not None and largest else span

    def _compared(self) -> Span | None:
        """A tensor with a number that its dtype holds, or with one of its dtype: neither becomes another number before."""
        left, right = self.op.args[:2]
        one, other = self.of(left), self.of(right)
        if one is None or other is None or not isinstance(left, Ref):
            return None
        dtype = self.edit.dtype(left)
        fits = self.edit.dtype(right) == dtype if isinstance(right, Ref) else (
            DTYPES[dtype].low <= other.low and other.high <= DTYPES[dtype].high)
        found = holds(self.kind, one, other) if fits else None
        return None if found is None else Span(int(found), int(found))

    def _bounds(self) -> tuple[float, float]:
        """Of a clamp."""
        least, most = (None if self.op.target == f"aten.clamp_{other}.default" else argument(self.op, name)
                       for name, other in (("min", "max"), ("max", "min")))
        return (-math.inf if least is None else least), (math.inf if most is None else most)

    def decided(self) -> Iterable[Op] | None:
        """What stands for the operator, if its outcome is certain."""
        op, args = self.op, self.op.args
        if len(op.outputs) != 1:
            return None
        found = self.known.get(self.out.name)
        logical = self.kind in COMPARISONS or self.kind.startswith(("logical_", "bitwise_"))
        if logical and self.out.dtype == torch.bool and found is not None and found.low == found.high:
            fill = (self.out.shape, bool(found.low)), (("dtype", torch.bool),)
            return (Op(op.name, FILL, *fill, op.outputs, op.module, op.source),)
        if op.target in CLAMPS and self.out.dtype in DTYPES:
            one, (least, most) = self.of(args[0]), self._bounds()
            return self._taken(args[0]) if one is not None and least <= one.low and one.high <= most else None
        if self.kind == "masked_fill" and self.of(args[1]) == (0, 0):
            return self._taken(args[0], args[2])
        if op.target == "aten.where.self" and self.of(args[0]) in ((0, 0), (1, 1)):
            return self._taken(*(args[1:] if self.of(args[0]) == (1, 1) else args[:0:-1]))
        return None

    def _taken(self, taken: Any, dropped: Any = None) -> Iterable[Op] | None:
        """An operand in the place of the result. What takes a gradient is not dropped: it would have none, not zeros."""
        values = self.edit.values
        if not isinstance(taken, Ref) or values[taken.name].dtype != self.out.dtype:
            return None
        if isinstance(dropped, Ref) and values[dropped.name].differentiable:
            return None
        if values[taken.name].shape != self.out.shape:
            op = self.op
            return (Op(op.name, EXPAND, (taken, self.out.shape), (), op.outputs, op.module, op.source),)
        self.edit.replace(self.out.name, taken.name)
        return ()
