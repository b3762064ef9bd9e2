"""``as_strided``: memory read by distances, as look-ups by place.

What it reads depends on how its operand lies in memory, and a graph of functions does not say that: in normal form a
``contiguous`` is nothing, and a rank may hold its piece otherwise. The export has seen how the operand lay. So

    as_strided(x, size, stride, offset)              =>   x's elements in the order of memory [n], those at the places
    as_strided_scatter(x, src, size, stride, offset) =>   the same, with src copied to the places (the diagonal that
                                                          ``fill_diagonal_`` writes)

    places = offset + stride[0] * arange(size[0]) + stride[1] * arange(size[1]) ..

(The gradient that torch 2.11 to 2.13 have for ``as_strided_scatter`` is wrong in what is not overwritten.) Memory beside the
operand's own elements, of which it may be a slice, is no value of the graph: refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import CaptureError
from meshwright.ir.graph import Op, Ref

STRIDED = frozenset({"aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default"})

New = Callable[[str, Sequence[int], torch.dtype], str]
"""(what it is called, shape, dtype) of a value -> its name in the graph."""


def looked_up(op: Op, x: Tensor, new: New) -> list[Op]:
    """The operators in an ``as_strided``'s place. ``x``: its operand, as it lay. Raises CaptureError where it reads more."""
    scatters = op.target == "aten.as_strided_scatter.default"
    size, stride, *rest = op.args[2 if scatters else 1:]
    given = rest[0] if rest else dict(op.kwargs).get("storage_offset")
    first = 0 if given is None else given - x.storage_offset()
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda dim: (-strides[dim], dim))
    turned, last = x.permute(order), first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if not turned.is_contiguous() or first < 0 or (0 not in size and last >= x.numel()):
        raise CaptureError(f"module {op.module or '(root)'!r} ({op.source}) reads or writes memory by {op.target} beside the "
                           f"elements of the tensor that it is called on, a part of another one. What to do: call it on a copy "
                           f"(.contiguous(), .clone()) that has all it reads, or use slices, unfold or torch.diagonal",
                           module=op.module, source=op.source)
    ops: list[Op] = []

    def then(
        target: str, args: tuple[Any, ...], shape: Sequence[int], dtype: torch.dtype, outputs: tuple[str, ...] = ()
    ) -> Ref:
        outputs = outputs or (new(target.split(".")[1], shape, dtype),)
        ops.append(Op(outputs[0], target, args, (), outputs, op.module, op.source))
        return Ref(outputs[0])

    def reshaped(ref: Ref, shape: Sequence[int], dtype: torch.dtype, outputs: tuple[str, ...] = ()) -> Ref:
        return then("aten.reshape.default", (ref, tuple(shape)), shape, dtype, outputs)

    def counted(start: int, step: int, count: int, shape: Sequence[int]) -> Ref:
        found = then("aten.arange.start_step", (start, start + step * count, step), (count,), torch.int64)
        return reshaped(found, shape, torch.int64)

    places, wide = counted(first, 1, 1, [1] * len(size)), [1] * len(size)
    for dim, (n, s) in enumerate(zip(size, stride, strict=True)):
        if n > 1 and s > 0:
            wide[dim] = n
            step = counted(0, s, n, [n if i == dim else 1 for i in range(len(size))])
            places = then("aten.add.Tensor", (places, step), tuple(wide), torch.int64)
    count = torch.Size(size).numel()
    if tuple(wide) != tuple(size):
        places = then("aten.expand.default", (places, tuple(size)), size, torch.int64)
    places = reshaped(places, (count,), torch.int64)
    flat = op.args[0] if order == list(range(x.ndim)) else then(
        "aten.permute.default", (op.args[0], tuple(order)), turned.shape, x.dtype)
    flat = reshaped(flat, (x.numel(),), x.dtype)
    if not scatters:
        reshaped(then("aten.index_select.default", (flat, 0, places), (count,), x.dtype), size, x.dtype, op.outputs)
        return ops
    flat = then("aten.index_copy.default", (flat, 0, places, reshaped(op.args[1], (count,), x.dtype)), (x.numel(),), x.dtype)
    back = reshaped(flat, turned.shape, x.dtype)
    inverse = tuple(order.index(dim) for dim in range(x.ndim))
    then("aten.permute.default", (back, inverse), x.shape, x.dtype, op.outputs)
    return ops
