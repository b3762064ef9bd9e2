"""The ``mw.*`` operators: what a lowered program calls beside ATen, every one with its autograd pair.

The communication operators turn one kind of sharding over one axis into another; their backward turns the gradient back
(I invariant, R replicated but read differently, S split, P pending sum; Korthikanti et al. 2022, ``spmd_types``):

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

``gather_linear`` is gather_vary and the linears that read it in one: it saves the shard instead of the gathered activation
and gathers again in the backward. The others (embedding, cross_entropy, valid_count, fused_linear, mean, batch_norm,
dropout, sdpa, attend, ring, dealt, window) are operators whose local form differs from the ATen one because an operand is
split.

An ``axis`` is a ``Group`` here: the lowered graph has axis names, ``runtime.codegen`` puts the groups in. A group of one rank
communicates nothing. Uneven pieces are allowed everywhere (``runtime.collectives``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from meshwright.runtime import collectives as comm
from meshwright.runtime.attention.dealt import dealt
from meshwright.runtime.attention.forms import attend, ring
from meshwright.runtime.attention.window import window
from meshwright.runtime.collectives import Group
from meshwright.runtime.draws import dropout, sdpa

# --- communication operators -------------------------------------------------------------------------------------------


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
        return comm.reduce(dy.to(dtype) if dtype else dy, group).to(dy.dtype), None, None


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
    return comm.cut_mirrored(x, dim, group) if mirrored else comm.cut(x, dim, size, group).contiguous()


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
    """The same value, read differently on each rank: its gradient is summed (in ``reduce_dtype``, if given)."""
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
            dx = sum((dy @ weight for dy, weight in zip(dys[1:], weights[1:], strict=True)), dys[0] @ weights[0])
            scattering = comm.start_scatter(dx, dim, group)
        dweights: list[Tensor | None] = [None] * count
        if gathering is not None:
            whole = comm.end_gather(gathering, x.shape, dim, size, group).flatten(0, -2)
            dweights = [dy.flatten(0, -2).t() @ whole if need else None for dy, need in zip(dys, need_weights, strict=True)]
        dbiases = [dy.flatten(0, -2).sum(0) if has else None for dy, has in zip(dys, ctx.has_bias, strict=True)]
        if dx is not None and scattering is not None:
            dx = comm.end_scatter(scattering, dx.shape, dim, group)
        return dx, None, None, None, None, *dweights, *dbiases


def gather_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], dim: int, *, axis: Group, size: int,
    parts: Sequence[tuple[int, bool]] = (),
) -> tuple[Tensor, ...]:
    """``F.linear(gather_vary(x), weight, bias)`` for each weight; only the shard of ``x`` is kept for the backward.

    ``dim`` is a batch dim of ``x``, ``size`` its length after the gather. ``parts``: if some of the linears are fused, (parts,
    transposed) of each, (1, False) being a plain one.
    """
    forms = parts or [(1, False)] * len(weights)
    weights = [weight.t() if turned else weight for weight, (_, turned) in zip(weights, forms, strict=True)]
    if axis.size == 1:
        outputs = tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    else:
        outputs = _GatherLinear.apply(x, dim, axis, size, len(weights), *weights, *biases)
    return tuple(part for y, (count, _) in zip(outputs, forms, strict=True) for part in _in_parts(y, count))


def _in_parts(y: Tensor, count: int) -> Sequence[Tensor]:
    return (y,) if count == 1 else y.split(y.shape[-1] // count, -1)


# --- operators with a local form of their own ------------------------------------------------------------------------------


def embedding(
    weight: Tensor, ids: Tensor, offset: int, rows: int, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows [offset, offset + rows) of a vocabulary; ids elsewhere give zeros, so the result is a pending sum.

    The gradient is always dense (``sparse`` is accepted and has no effect): FSDP2 and DTensor take no sparse ones.
    """
    local = ids - offset
    outside = (local < 0) | (local >= rows)
    # one more row, which nobody owns, takes the ids that are not here: no gradient and no count reach a real row
    extended = torch.cat([weight, weight.new_zeros(1, weight.shape[1])]) if scale_grad_by_freq or rows == 0 else weight
    local = local.masked_fill(outside, rows if extended is not weight else 0)
    padding = padding_idx - offset if offset <= padding_idx < offset + rows else -1
    found = torch.embedding(extended, local, padding, scale_grad_by_freq, False)
    return found.masked_fill(outside.unsqueeze(-1), 0)


class _CrossEntropy(Function):
    """loss = lse - (1 - e) x[label] - e / V sum(x): the logits and one number per row are saved, not their softmax."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignore: int, smoothing: float, offset: int, vocab: int, group: Group | None
    ) -> Any:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        floor = torch.full(labels.shape, float("-inf"), dtype=wide.dtype, device=wide.device)
        top = wide.amax(-1) if wide.shape[-1] else floor
        if group is not None:
            top = comm.reduce(top, group, "max")
        valid = labels != ignore
        at = labels - offset
        here = valid & (at >= 0) & (at < wide.shape[-1])
        at = at.masked_fill(~here, 0)
        target = wide.gather(-1, at.unsqueeze(-1)).squeeze(-1) if wide.shape[-1] else floor
        terms = [(wide - top.unsqueeze(-1)).exp_().sum(-1), target.masked_fill(~here, 0)]
        if smoothing:
            terms.append(wide.sum(-1))
        stacked = torch.stack(terms)
        exps, target, *total = comm.reduce(stacked, group) if group is not None else stacked
        lse = top + exps.log()
        loss = lse - (1 - smoothing) * target - (smoothing / vocab * total[0] if total else 0)
        count = valid.sum().to(torch.float32)
        ctx.save_for_backward(logits, lse, at, here, valid)
        ctx.smoothing, ctx.share = smoothing, smoothing / vocab
        ctx.mark_non_differentiable(count)
        return loss.masked_fill(~valid, 0).sum(), count

    @staticmethod
    def backward(ctx: Any, dsum: Tensor, _: Tensor) -> tuple[Any, ...]:
        logits, lse, at, here, valid = ctx.saved_tensors
        grad = logits.to(lse.dtype, copy=True).sub_(lse.unsqueeze(-1)).exp_()
        if ctx.share:
            grad.sub_(ctx.share)
        if grad.shape[-1]:
            grad.scatter_add_(-1, at.unsqueeze(-1), ((ctx.smoothing - 1) * here.to(grad.dtype)).unsqueeze(-1))
        grad.mul_(dsum).masked_fill_(~valid.unsqueeze(-1), 0)
        return grad.to(logits.dtype), None, None, None, None, None, None


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, *, offset: int = 0,
    vocab: int | None = None, axes: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum of the losses of the labels that are not ``ignore_index``, their number), computed and returned in fp32 at least.

    ``logits`` [..., v], ``labels`` [...]. With ``axes`` the vocabulary is split: ``logits`` are columns [offset, offset + v)
    of ``vocab``; both results are then the same on all ranks of ``axes``.
    """
    group = axes if axes is not None and axes.size > 1 else None
    width = logits.shape[-1] if vocab is None else vocab
    result: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits, labels, ignore_index, label_smoothing, offset, width, group)
    return result


def valid_count(labels: Tensor, ignore_index: int) -> Tensor:
    """How many labels count: an f32 scalar, a pending sum where the labels are split."""
    return (labels != ignore_index).sum().float()


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, transposed: bool) -> tuple[Tensor, ...]:
    """The parts of one linear whose weight (``transposed``: [k, parts * n]) holds them one after the other."""
    return tuple(_in_parts(F.linear(x, weight.t() if transposed else weight, bias), parts))


def mean(x: Tensor, dims: Sequence[int] | None, keepdim: bool, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over ``dims`` (None: all) by the GLOBAL number of elements: a pending sum where one of ``dims`` is split."""
    return x.sum(tuple(range(x.ndim)) if dims is None else tuple(dims), keepdim, dtype=dtype) / count


class _BatchNorm(Function):
    """Normalization by the statistics of the whole batch, which is split over ``group``; channels are dim 1."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, count: int, group: Group
    ) -> Any:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [dim for dim in range(x.ndim) if dim != 1]
        center = comm.reduce(wide.sum(dims), group) / count
        variance = comm.reduce((wide - _channels(center, x)).square().sum(dims), group) / count
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, center, scale)
        ctx.where, ctx.bias_dtype = (dims, count, group), None if bias is None else bias.dtype
        out = (wide - _channels(center, x)) * _channels(scale if weight is None else scale * weight, x)
        out = out if bias is None else out + _channels(bias, x)
        ctx.mark_non_differentiable(center, variance)
        return out.to(x.dtype), center, variance

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Any, ...]:
        x, weight, center, scale = ctx.saved_tensors
        dims, count, group = ctx.where
        dy_wide = dy.to(center.dtype)
        normal = (x.to(center.dtype) - _channels(center, x)) * _channels(scale, x)
        dbias, dweight = dy_wide.sum(dims), (dy_wide * normal).sum(dims)
        means = comm.reduce(torch.stack([dbias, dweight]), group) / count
        dx = (dy_wide - _channels(means[0], x) - normal * _channels(means[1], x))
        dx = dx * _channels(scale if weight is None else scale * weight, x)
        dweight = None if weight is None else dweight.to(weight.dtype)
        return dx.to(x.dtype), dweight, dbias.to(ctx.bias_dtype) if ctx.bias_dtype else None, None, None, None


def _channels(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view(1, -1, *[1] * (x.ndim - 2))


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float, count: int | None = None, axes: Group | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(output, new running mean, new running variance). ``x`` [n, channels, ...].

    With ``axes`` the batch is split over them and ``count`` is the number of elements per channel of the whole batch.
    """
    if not training or axes is None or axes.size == 1:
        new = [None if running is None else running.detach().clone() for running in (running_mean, running_var)]
        return F.batch_norm(x, new[0], new[1], weight, bias, training, momentum, eps), new[0], new[1]
    if count is None:
        raise ValueError("batch_norm over a split batch needs count, the elements per channel of the whole batch")
    out, center, variance = _BatchNorm.apply(x, weight, bias, eps, count, axes)
    unbiased = variance * (count / max(count - 1, 1))
    return out, _moved(running_mean, center, momentum), _moved(running_var, unbiased, momentum)


def _moved(running: Tensor | None, seen: Tensor, momentum: float) -> Tensor | None:
    return None if running is None else torch.lerp(running, seen.to(running.dtype), momentum)


OPS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        f"mw.{function.__name__}": function
        for function in (
            identity, slice, vary, unvary, term, all_gather, gather_vary, reduce_scatter, all_reduce, all_to_all, mirror,
            gather_linear, embedding, cross_entropy, valid_count, fused_linear, mean, batch_norm, dropout, sdpa, attend, ring,
            dealt, window,
        )
    }
)
"""{"mw.name": function}: the operators a lowered graph may call beside ``aten.*``."""
