"""The ``mw.*`` operators: what a lowered program calls beside ATen, every one with its gradient.

Those that communicate alone are in ``runtime.communication``, attention is in ``runtime.attention``, what draws in
``runtime.draws``, losses and what works on a few rows at a time in ``runtime.pieces``. Here are the operators whose local form
differs from the ATen one because an operand is split: ``embedding`` of a piece of the vocabulary, ``batch_norm`` of a piece of
the batch, ``mean`` and ``valid_count`` of a piece of what is counted, ``fused_linear``; and the table ``OPS`` of all.

An ``axis`` is a ``Group``: the lowered graph has axis names, ``runtime.codegen`` puts the groups in. A group of one rank
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
from meshwright.runtime.attention.kernels import attention
from meshwright.runtime.attention.window import window
from meshwright.runtime.collectives import Group
from meshwright.runtime.communication import (
    all_gather,
    all_reduce,
    all_to_all,
    gather_linear,
    gather_vary,
    identity,
    in_parts,
    mirror,
    reduce_scatter,
    slice,
    term,
    unvary,
    vary,
)
from meshwright.runtime.draws import dropout, grouped_sdpa, sdpa
from meshwright.runtime.pieces.loss import cross_entropy, linear_cross_entropy
from meshwright.runtime.pieces.mlp import mlp


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


def valid_count(labels: Tensor, ignore_index: int) -> Tensor:
    """How many labels count: an f32 scalar, a pending sum where the labels are split."""
    return (labels != ignore_index).sum().float()


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, transposed: bool) -> tuple[Tensor, ...]:
    """The parts of one linear whose weight (``transposed``: [k, parts * n]) holds them one after the other."""
    return tuple(in_parts(F.linear(x, weight.t() if transposed else weight, bias), parts))


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
            gather_linear, embedding, cross_entropy, linear_cross_entropy, valid_count, fused_linear, mean, batch_norm, dropout,
            sdpa, grouped_sdpa, attend, ring, dealt, window, mlp,
        )
    }
    | {"aten.scaled_dot_product_attention.default": attention}
)
"""{"mw.name": function}: the operators a lowered graph may call beside ``aten.*``, and the one of these that is not torch's."""
