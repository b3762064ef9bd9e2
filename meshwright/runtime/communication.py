"""Collectives with their gradients: the operators that turn one kind of sharding over one axis into another.

The backward of each turns the gradient back (I invariant, R replicated but read differently, S split, P pending sum;
Korthikanti et al. 2022, ``spmd_types``):

    operator         kinds     forward          backward
    slice            I -> S    local slice      all-gather
    vary             I -> R    nothing          all-reduce
    unvary           R -> I    nothing          the gradient on the first rank, zeros elsewhere
    all_gather       S -> I    all-gather       local slice
    gather_vary      S -> R    all-gather       reduce-scatter
    reduce_scatter   P -> S    reduce-scatter   all-gather
    all_reduce       P -> I    all-reduce       nothing
    all_to_all       S -> S    all-to-all       all-to-all
    mirror           S -> S    all-to-all       all-to-all
    term             I -> P    zeros but on the first rank; nothing

``gather_linear`` is ``gather_vary`` and the linears that read its result in one: it saves the shard instead of the gathered
activation and gathers again in the backward. ``passes.communication`` has the same operators as functions on shardings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from meshwright.runtime import collectives as comm
from meshwright.runtime.collectives import Group


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, mirrored: bool) -> Tensor:
        ctx.where = dim, x.shape[dim], group, mirrored
        return _cut(x, *ctx.where)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _gathered(dy, *ctx.where), None, None, None


def _gathered(x: Tensor, dim: int, size: int, group: Group, mirrored: bool) -> Tensor:
    whole = comm.gather(x, dim, size, group)
    return comm.unmirrored(whole, dim, group) if mirrored else whole


def _scattered(x: Tensor, dim: int, group: Group, mirrored: bool) -> Tensor:
    return comm.scatter(comm.mirrored(x, dim, group) if mirrored else x, dim, group)


class _Vary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.where = group, reduce_dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        group, dtype = ctx.where
        wide = torch.promote_types(dy.dtype, dtype) if dtype else dy.dtype  # what is wider, or complex, stays so
        return comm.reduce(dy.to(wide), group).to(dy.dtype), None, None


class _Unvary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.first = group.rank == 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy if ctx.first else torch.zeros_like(dy), None


class _Term(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return x.view_as(x) if group.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None


def _cut(x: Tensor, dim: int, size: int, group: Group, mirrored: bool) -> Tensor:
    return comm.cut_mirrored(x, dim, group) if mirrored else comm.own_piece(x, dim, size, group).contiguous()


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, size: int, mirrored: bool) -> Tensor:
        ctx.where = dim, size, group, mirrored
        return _gathered(x, dim, size, group, mirrored)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _cut(dy, *ctx.where), None, None, None, None


class _GatherVary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, size: int, mirrored: bool) -> Tensor:
        ctx.where = dim, group, mirrored
        return _gathered(x, dim, size, group, mirrored)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _scattered(dy, *ctx.where), None, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, mirrored: bool) -> Tensor:
        ctx.where = dim, x.shape[dim], group, mirrored
        return _scattered(x, dim, group, mirrored)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _gathered(dy, *ctx.where), None, None, None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return comm.reduce(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, to_dim: int, group: Group, size: int, to_size: int, mirrored: bool, to_mirrored: bool
    ) -> Tensor:
        ctx.where = to_dim, dim, group, to_size, size, to_mirrored, mirrored
        return _exchanged(x, dim, to_dim, group, size, to_size, mirrored, to_mirrored)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _exchanged(dy, *ctx.where), None, None, None, None, None, None, None


def _exchanged(
    x: Tensor, dim: int, to_dim: int, group: Group, size: int, to_size: int, mirrored: bool, to_mirrored: bool
) -> Tensor:
    """``mirrored``, ``to_mirrored``: whether the split of ``dim``, and that of ``to_dim``, is mirrored."""
    whole = comm.exchange(comm.mirrored(x, to_dim, group) if to_mirrored else x, dim, to_dim, size, to_size, group)
    return comm.unmirrored(whole, dim, group) if mirrored else whole


class _Mirror(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, mirrored: bool) -> Tensor:
        ctx.where = dim, not mirrored, group
        return comm.mirror(x, dim, mirrored, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return comm.mirror(dy, *ctx.where), None, None, None


def slice(x: Tensor, dim: int, *, axis: Group, size: int, mirrored: bool = False) -> Tensor:
    """This rank's piece along ``dim`` of a value that is whole and equal on all ranks; ``size``: the whole length. Here and
    below ``mirrored``: the split is mirrored, in two chunks a rank (``ir.sharding``)."""
    return x if axis.size == 1 else _Slice.apply(x, dim, axis, mirrored)


def vary(x: Tensor, *, axis: Group, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """The same value, read differently on each rank: its gradient is summed (in ``reduce_dtype`` at least, if given)."""
    return x if axis.size == 1 else _Vary.apply(x, axis, reduce_dtype)


def unvary(x: Tensor, *, axis: Group) -> Tensor:
    """A value whose gradient is summed over the axis elsewhere, used alike on all ranks: the gradient must count once."""
    return x if axis.size == 1 else _Unvary.apply(x, axis)


def term(x: Tensor, *, axis: Group) -> Tensor:
    """A value that is whole and equal on all ranks as a pending sum: the first rank brings it, the others zeros. The gradient
    of a pending sum is whole on every rank, which is the gradient of the value."""
    return x if axis.size == 1 else _Term.apply(x, axis)


def identity(x: Tensor) -> Tensor:
    """The same value under another name."""
    return x.view_as(x)


def all_gather(x: Tensor, dim: int, *, axis: Group, size: int, mirrored: bool = False) -> Tensor:
    """The whole of a split value, used alike on all ranks; ``size``: the length after."""
    return x if axis.size == 1 else _AllGather.apply(x, dim, axis, size, mirrored)


def gather_vary(x: Tensor, dim: int, *, axis: Group, size: int, mirrored: bool = False) -> Tensor:
    """The whole of a split value, read differently on each rank; ``size``: the length after."""
    return x if axis.size == 1 else _GatherVary.apply(x, dim, axis, size, mirrored)


def reduce_scatter(x: Tensor, dim: int, *, axis: Group, size: int, mirrored: bool = False) -> Tensor:
    """This rank's piece along ``dim`` of a pending sum; ``size``: the length before."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, dim, axis, mirrored)


def all_reduce(x: Tensor, *, axis: Group) -> Tensor:
    """The sum of a pending sum."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


def all_to_all(
    x: Tensor, dim: int, to_dim: int, *, axis: Group, size: int, to_size: int, mirrored: bool = False, to_mirrored: bool = False
) -> Tensor:
    """Split along ``dim`` (of length ``size`` in all) -> split along ``to_dim`` (``to_size``)."""
    return x if axis.size == 1 else _AllToAll.apply(x, dim, to_dim, axis, size, to_size, mirrored, to_mirrored)


def mirror(x: Tensor, dim: int, *, axis: Group, mirrored: bool = False) -> Tensor:
    """A split in one piece a rank -> the mirrored one, or (not ``mirrored``) back."""
    return x if axis.size == 1 else _Mirror.apply(x, dim, axis, mirrored)


class _GatherLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, size: int, count: int, *tensors: Tensor | None) -> Any:
        weights, biases = tensors[:count], tensors[count:]
        ctx.where, ctx.has_bias = (dim, size, group), [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        whole = comm.gather(x, dim, size, group)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        dim, size, group = ctx.where
        count = len(weights)
        need_x, need_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5 : 5 + count]
        gathering = comm.start_gather(x, dim, size, group) if any(need_weights) else None
        dx = scattering = None
        if need_x:  # the collectives run while the matrices are multiplied
            each = [dy @ weight.conj() for dy, weight in zip(dys, weights, strict=True)]
            dx = sum(each[1:], each[0])
            scattering = comm.start_scatter(dx, dim, group)
        dweights: list[Tensor | None] = [None] * count
        if gathering is not None:
            whole = _rows(comm.end_gather(gathering, x.shape, dim, size, group))
            whole = whole.conj()  # of complex numbers; what is real stays as it is
            dweights = [_rows(dy).t() @ whole if need else None for dy, need in zip(dys, need_weights, strict=True)]
        dbiases = [_rows(dy).sum(0) if has else None for dy, has in zip(dys, ctx.has_bias, strict=True)]
        if dx is not None and scattering is not None:
            dx = comm.end_scatter(scattering, dx.shape, dim, group)
        return dx, None, None, None, None, *dweights, *dbiases


def _rows(x: Tensor) -> Tensor:
    """As a matrix; a vector is one row."""
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)


def gather_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], dim: int, *, axis: Group, size: int,
    parts: Sequence[tuple[int, bool]] = (),
) -> tuple[Tensor, ...]:
    """``F.linear(gather_vary(x), weight, bias)`` for each weight; only the shard of ``x`` is kept for the backward.

    ``dim`` is a dim of ``x``, ``size`` its length after the gather. ``parts``: if some of the linears are fused, (parts,
    transposed) of each, (1, False) being a plain one.
    """
    forms = parts or [(1, False)] * len(weights)
    weights = [weight.t() if turned else weight for weight, (_, turned) in zip(weights, forms, strict=True)]
    if axis.size == 1:
        outputs = tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    else:
        outputs = _GatherLinear.apply(x, dim, axis, size, len(weights), *weights, *biases)
    return tuple(part for y, (count, _) in zip(outputs, forms, strict=True) for part in in_parts(y, count))


def in_parts(y: Tensor, count: int) -> Sequence[Tensor]:
    """Equal parts of the last dim."""
    return (y,) if count == 1 else y.split(y.shape[-1] // count, -1)
