"""Attention masks that are known before the model runs.

A model builds its causal mask from arange, compare and expand: a boolean [b, 1, s, s], the largest tensor of the graph. When
it depends on no input, parameter or buffer it is evaluated, exactly, and

    lower triangular       =>  is_causal=True, no mask
    true (or 0) everywhere =>  no mask; the same for the condition of a ``where`` that chooses between a bias and minus infinity
    a band                 =>  attention within a window, ``mw.window``

Evaluation stays small: a dim along which a value is constant is kept with stride 0, elementwise operators run on one
element of such a dim, and the large elementwise results are never made: they stay formulas (``_Lazy``), evaluated in blocks
of rows when they are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.compiler.capture.movement import ATTENTION, EXPAND, WINDOW, is_elementwise
from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, mark_differentiable, rewrite
from meshwright.compiler.rules import argument
from meshwright.ir.graph import Graph, Op, Ref, map_refs
from meshwright.ir.operators import overload

MAX_ELEMENTS = 1 << 32
"""A mask with more elements than this, constant dims not counted, is left as it is."""
_EAGER = 1 << 22
_BLOCK = 1 << 22

FILLS = frozenset({
    "full", "ones", "zeros", "scalar_tensor", "full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros",
})
OTHERS = frozenset({
    "arange", "cumsum", "index", "tril", "triu", "diff", "reshape", "cat", "flip",
    "expand", "unsqueeze", "select", "slice", "transpose", "permute", "t", "squeeze",
})
ALONG = frozenset({"cumsum", "diff", "cat"})
"""Of these, what works along its argument ``dim``: a batch that is the same in all samples stays one."""


@dataclass(frozen=True)
class _Lazy:
    """``function``, the operator ``name``, applied elementwise to operands, each a small tensor or another formula, broadcast
    to ``shape``."""

    name: str
    function: Callable[..., Tensor]
    operands: tuple[Any, ...]
    shape: tuple[int, ...]
    compressed: tuple[int, ...]

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start:stop of dim -2; constant dims have size 1."""
        return self.function(*(_rows(operand, start, stop) for operand in self.operands))


class Band(NamedTuple):
    """A mask that lets row i see keys i - before .. i + after."""

    before: int
    after: int


Verdict = str | Band


class _TooLargeError(Exception):
    """The value is not worth making."""


def simplify_masks(graph: Graph) -> Graph:
    """Attention without the masks that say nothing, or only that it is causal."""
    graph = mark_differentiable(graph)
    evaluator = _Evaluator(graph)
    verdicts: dict[str, Verdict] = {}

    def verdict(mask: str, queries: int, keys: int) -> Verdict:
        if mask not in verdicts:
            verdicts[mask] = evaluator.verdict(mask, queries, keys)
        return verdicts[mask]

    def step(op: Op, edit: Edit) -> Iterable[Op] | None:
        if op.target == ATTENTION and op.args[3] is not None:
            found = verdict(op.args[3].name, edit.shape(op.args[0])[-2], edit.shape(op.args[1])[-2])
            if isinstance(found, Band):
                return _windowed(op, found, edit)
            if found != "unknown":
                return (replace(op, args=(*op.args[:3], None, op.args[4], found == "causal" or op.args[5])),)
        elif op.target.startswith("aten.where.") and len(op.args) == 3 and isinstance(op.args[1], Ref):
            condition, chosen, out = op.args[0], op.args[1], edit.values[op.outputs[0]]
            shape = edit.shape(condition)
            other = op.args[2]  # what takes a gradient is not dropped: that would be none in the place of zeros
            kept = isinstance(other, Ref) and edit.values[other.name].differentiable
            known = len(shape) > 1 and edit.dtype(chosen) == out.dtype and not kept
            if known and verdict(condition.name, shape[-2], shape[-1]) == "none":
                return (replace(op, target=EXPAND, args=(chosen, out.shape), kwargs=()),)
        return None

    return eliminate_dead_code(rewrite(graph, step))


def _windowed(op: Op, band: Band, edit: Edit) -> Iterable[Op] | None:
    """Attention within a window; None where the mask has to stay: dropped probabilities, heads or samples that broadcast."""
    query, key, value = (edit.shape(ref) for ref in op.args[:3])
    alike = len(query) == len(key) == len(value) == 4 and query[0] == key[0] == value[0] and key[1] == value[1]
    grouped = query[1] == key[1] or (bool(dict(op.kwargs).get("enable_gqa")) and query[1] % key[1] == 0)
    if op.args[4] or op.args[5] or not alike or not grouped or set(dict(op.kwargs)) - {"scale", "enable_gqa"}:
        return None
    scale = dict(op.kwargs).get("scale")
    return (replace(op, target=WINDOW, args=(*op.args[:3], scale, *band, key[-2]), kwargs=()),)


class _Evaluator:
    """Values of the graph that depend on literals alone, each evaluated once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[str, Tensor | _Lazy | None] = {}

    def verdict(self, name: str, queries: int, keys: int) -> Verdict:
        """ "causal", "none" (nothing is masked), a band or "unknown"."""
        try:
            mask = self.value(name)
            return "unknown" if mask is None else _compare(mask, queries, keys)
        except _TooLargeError:
            return "unknown"

    def value(self, name: str) -> Tensor | _Lazy | None:
        """The value, or None if it depends on something that is given later."""
        for needed in self._closure(name):
            index = self.graph.producers.get(needed)
            self.known[needed] = None if index is None else self._apply(self.graph.ops[index])
        return self.known[name]

    def _closure(self, name: str) -> list[str]:
        """What must be evaluated first, producers before readers."""
        order: list[str] = []
        stack = [(name, False)]
        while stack:
            current, ready = stack.pop()
            if ready:
                order.append(current)
            elif current not in self.known:
                self.known[current] = None
                stack.append((current, True))
                index = self.graph.producers.get(current)
                stack += [(operand, False) for operand in (self.graph.ops[index].inputs if index is not None else ())]
        return order

    def _apply(self, op: Op) -> Tensor | _Lazy | None:
        name = op.target.split(".")[1]
        operands = [self.known[operand] for operand in op.inputs]
        shape = self.graph.values[op.outputs[0]].shape
        known = is_elementwise(op) or (op.target.startswith("aten.") and name in FILLS | OTHERS)
        supported = known and len(op.outputs) == 1
        shape_only = name in FILLS
        if not supported or (not shape_only and any(operand is None for operand in operands)):
            return None
        if shape_only:
            return _fill(op, self.graph.values[op.outputs[0]].dtype, shape)
        if is_elementwise(op) or (name == "expand" and isinstance(operands[0], _Lazy)):
            return _elementwise(op, operands, shape)
        if name == "index":
            return _index(op, [_materialize(operand) for operand in operands], shape)
        if math.prod(_compressed_shape([_materialize(operand) for operand in operands], shape)) > MAX_ELEMENTS >> 3:
            raise _TooLargeError
        return _collapse(_on_pieces(op, [_materialize(operand) for operand in operands], shape))


def _on_pieces(op: Op, operands: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The operator on these tensors; where it works along one dim, on one element of every other in which no operand varies."""
    if op.target.split(".")[1] not in ALONG or any(operand.ndim != len(shape) for operand in operands):
        return _call(op, operands)
    along = argument(op, "dim") % len(shape)
    alike = [dim for dim in range(len(shape)) if dim != along and all(operand.stride(dim) == 0 for operand in operands)]
    for dim in alike:
        operands = [operand.narrow(dim, 0, 1) for operand in operands]
    return _call(op, operands).expand(shape)


def _call(op: Op, operands: list[Any]) -> Tensor:
    """The ATen overload on these tensors in place of the op's operands."""
    stream = iter(operands)
    args, kwargs = map_refs(op.args, lambda _: next(stream)), map_refs(dict(op.kwargs), lambda _: next(stream))
    result: Tensor = overload(op.target)(*args, **kwargs)
    return result


def _fill(op: Op, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    name = op.target.split(".")[1]
    numbers = [arg for arg in op.args if isinstance(arg, bool | int | float)]
    number = 1 if "ones" in name else 0 if "zeros" in name else numbers[-1]
    return torch.full((1,) * len(shape), number, dtype=dtype).expand(shape)


def _elementwise(op: Op, operands: list[Any], shape: tuple[int, ...]) -> Tensor | _Lazy:
    first: _Lazy = operands[0]
    if op.target.startswith("aten.expand"):
        lead = (1,) * (len(shape) - len(first.shape))
        return replace(first, shape=shape, compressed=lead + first.compressed)
    small = [_squeeze_constant(operand) if isinstance(operand, Tensor) else operand for operand in operands]
    shapes = [operand.shape if isinstance(operand, Tensor) else operand.compressed for operand in small]
    compressed = torch.broadcast_shapes(*shapes)
    compressed = (1,) * (len(shape) - len(compressed)) + tuple(compressed)

    def function(*tensors: Tensor) -> Tensor:
        return _call(op, list(tensors))

    if math.prod(compressed) <= _EAGER and all(isinstance(operand, Tensor) for operand in small):
        return _collapse(function(*small).expand(compressed)).expand(shape)
    return _Lazy(op.target.split(".")[1], function, tuple(small), shape, compressed)


def _index(op: Op, operands: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    source, *indices = operands
    if len(indices) == source.ndim:  # along a constant dim every index picks the same: a batch of any size stays one element
        constant = [stride == 0 or size == 1 for size, stride in zip(source.shape, source.stride(), strict=True)]
        indices = [i.new_zeros((1,) * i.ndim) if same else i for i, same in zip(indices, constant, strict=True)]
    compressed = torch.broadcast_shapes(*(_squeeze_constant(index).shape for index in indices))
    if len(indices) != source.ndim or len(compressed) != len(shape) or math.prod(compressed) > _EAGER:
        raise _TooLargeError
    return _collapse(_call(op, [source, *map(_squeeze_constant, indices)])).expand(shape)


def _materialize(value: Any) -> Tensor:
    if isinstance(value, _Lazy):
        if math.prod(value.compressed) > MAX_ELEMENTS >> 5:
            raise _TooLargeError
        rows = value.compressed[-2] if len(value.compressed) > 1 else 1
        return _collapse(value.rows(0, rows).expand(value.compressed)).expand(value.shape)
    return value  # type: ignore[no-any-return]


def _rows(operand: Any, start: int, stop: int) -> Tensor:
    if isinstance(operand, _Lazy):
        return operand.rows(start, stop)
    has_rows = operand.ndim > 1 and operand.shape[-2] > 1
    return operand[..., start:stop, :] if has_rows else operand  # type: ignore[no-any-return]


def _squeeze_constant(tensor: Tensor) -> Tensor:
    """One element of every dim of stride 0."""
    return tensor[tuple(slice(0, 1) if stride == 0 and size > 1 else slice(None)
                        for size, stride in zip(tensor.shape, tensor.stride(), strict=True))]


def _compressed_shape(operands: list[Tensor], shape: tuple[int, ...]) -> tuple[int, ...]:
    return max((tuple(_squeeze_constant(operand).shape) for operand in operands), key=math.prod, default=shape)


def _collapse(tensor: Tensor) -> Tensor:
    """The same tensor with stride 0 along every dim in which it does not vary."""
    shape = tensor.shape
    small = _squeeze_constant(tensor)
    for dim in range(small.ndim):
        size = small.shape[dim]
        if size > 1:
            first = small.narrow(dim, 0, 1)
            if torch.equal(first, small.narrow(dim, size - 1, 1)) and bool((small == first).all()):
                small = first
    return small.expand(shape)


# ------------------------------------------------------------------------------------------------------------------ verdict
def _compare(mask: Tensor | _Lazy, queries: int, keys: int) -> Verdict:
    shape = mask.shape
    small = _squeeze_constant(mask) if isinstance(mask, Tensor) else mask
    compressed = tuple(small.shape) if isinstance(small, Tensor) else small.compressed
    if len(shape) < 2 or any(size > 1 for size in compressed[:-2]):
        return "unknown"
    if math.prod(compressed) > _EAGER and (ordered := _by_order(small, queries, keys)):
        return ordered
    if math.prod(compressed) > MAX_ELEMENTS:
        return "unknown"
    none, band = True, _candidate(small, compressed, queries, keys)
    causal = compressed[-2] > 1 or queries == 1  # a mask that is the same for every query is no triangle
    for start, rows, block in _blocks(small, compressed):
        allowed = _allowed(block)
        if allowed is None:
            return "unknown"
        allowed = allowed.reshape(allowed.shape[-2:])
        none = none and bool(allowed[0, -1]) and bool(allowed.all())
        away = torch.arange(keys, dtype=torch.int32) - torch.arange(start, start + rows, dtype=torch.int32)[:, None]
        causal = causal and torch.equal(allowed.expand(rows, keys), away <= 0)
        if band is not None and not torch.equal(allowed.expand(rows, keys), (away >= -band.before) & (away <= band.after)):
            band = None
        if not causal and not none and band is None:
            return "unknown"
    return "none" if none else "causal" if causal else band or "unknown"


def _candidate(small: Tensor | _Lazy, compressed: tuple[int, ...], queries: int, keys: int) -> Band | None:
    """The only band that a mask can be, by its first and its last row."""
    if queries != keys or compressed[-2] != queries or compressed[-1] != keys:
        return None
    first, last = (_allowed(_rows(small, at, at + 1)) for at in (0, queries - 1))
    if first is None or last is None:
        return None
    after = int(first.expand(*compressed[:-2], 1, keys).sum()) - 1
    before = int(last.expand(*compressed[:-2], 1, keys).sum()) - 1
    return Band(before, after) if before >= 0 and after >= 0 else None


def _by_order(mask: Tensor | _Lazy, queries: int, keys: int) -> Verdict:
    """The verdict of a mask that says nothing but which keys come before or after which place, without making it; "" if it may
    say more. Where x ascends, x_j <= y_i holds for a first part of the keys, whose length is looked up for every row."""
    bounds = _comparisons(mask)
    if bounds is None:
        return ""
    first, last = torch.zeros(queries, dtype=torch.int64), torch.full((queries,), keys, dtype=torch.int64)
    for below, inclusive, column, row in bounds:
        x, y = (side.reshape(-1).contiguous() for side in (column, row))
        if x.is_floating_point() or y.is_floating_point() or not bool((x[1:] >= x[:-1]).all()):
            return ""
        until = torch.searchsorted(x.long(), y.long(), right=inclusive == below).expand(queries)
        first, last = (first, torch.minimum(last, until)) if below else (torch.maximum(first, until), last)
    if bool((first == 0).all()) and bool((last == keys).all()):
        return "none"
    at = torch.arange(queries)
    if bool((first == 0).all()) and torch.equal(last, (at + 1).clamp(max=keys)):
        return "causal"
    before, after = queries - 1 - int(first[-1]), int(last[0]) - 1
    banded = queries == keys and before >= 0 and after >= 0 and torch.equal(first, (at - before).clamp(min=0))
    return Band(before, after) if banded and torch.equal(last, (at + after + 1).clamp(max=keys)) else ""


_ORDERS: Mapping[str, tuple[bool, bool]] = {"le": (True, True), "lt": (True, False), "ge": (False, True), "gt": (False, False)}
"""{comparison: (whether its left side is the smaller one, whether they may be equal)}."""


def _comparisons(mask: Tensor | _Lazy) -> list[tuple[bool, bool, Tensor, Tensor]] | None:
    """A mask as what must all hold: (whether keys are below, or may be equal, values of the keys, values of the rows); None if
    it is something else."""
    if isinstance(mask, Tensor):
        always = mask.dtype == torch.bool and mask.numel() == 1 and bool(mask)
        return [] if always else None
    if mask.name in ("bitwise_and", "logical_and", "__and__") and len(mask.operands) == 2:
        parts = [_comparisons(operand) for operand in mask.operands]
        return None if None in parts else [bound for part in parts for bound in part or ()]
    if mask.name not in _ORDERS or len(mask.operands) != 2 or not all(isinstance(x, Tensor) for x in mask.operands):
        return None
    left, right = mask.operands
    below, inclusive = _ORDERS[mask.name]
    along = [_along(side) for side in (left, right)]
    if along == ["keys", "rows"]:
        return [(below, inclusive, left, right)]
    return [(not below, inclusive, right, left)] if along == ["rows", "keys"] else None


def _along(x: Tensor) -> str:
    """The only dim along which a tensor varies: its last, "keys", or the one before, "rows"; "" if another."""
    sizes = list(_squeeze_constant(x).shape)
    if all(size == 1 for size in sizes[:-1]):
        return "keys"
    return "rows" if len(sizes) > 1 and all(size == 1 for size in (*sizes[:-2], sizes[-1])) else ""


def _blocks(small: Tensor | _Lazy, compressed: tuple[int, ...]) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, number of rows, these rows), constant dims in one element."""
    step = max(1, _BLOCK // max(1, compressed[-1]))
    for start in range(0, compressed[-2], step):
        rows = min(compressed[-2] - start, step)
        yield start, rows, _rows(small, start, start + rows).expand(*compressed[:-2], rows, compressed[-1])


def _allowed(block: Tensor) -> Tensor | None:
    """Where attention may look; None if the mask also adds something else than nothing or minus infinity."""
    if block.dtype == torch.bool:
        return block
    if not block.is_floating_point():
        return None
    allowed = block == 0
    lowest = torch.finfo(block.dtype).min  # what models use for minus infinity: its exponential is exactly 0
    return allowed if bool((allowed | (block <= lowest)).all()) else None
