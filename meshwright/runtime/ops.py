"""The ``mw.*`` operators: what a lowered program calls beside ATen, every one with its gradient.

Those that communicate alone are in ``runtime.communication``, attention is in ``runtime.attention``, what draws in
``runtime.draws``. Here are the operators whose local form differs from the ATen one because an operand is split: ``embedding``
of a piece of the vocabulary, ``cross_entropy`` of a piece of the classes (``linear_cross_entropy``: of a few rows at a time),
``batch_norm`` of a piece of the batch, ``mean`` and ``valid_count`` of a piece of what is counted, ``fused_linear``; and the
table ``OPS`` of all.

An ``axis`` is a ``Group``: the lowered graph has axis names, ``runtime.codegen`` puts the groups in. A group of one rank
communicates nothing. Uneven pieces are allowed everywhere (``runtime.collectives``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from meshwright.runtime import collectives as comm
from meshwright.runtime.attention.dealt import dealt
from meshwright.runtime.attention.forms import attend, ring
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
from meshwright.runtime.draws import dropout, sdpa


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


class _Losses(NamedTuple):
    """Of rows of logits. ``each``: the loss of a row, 0 of one that does not count; what the backward needs: ``lse``, the log
    of the sum of exponentials; ``at``: where its label is among the columns here; ``here``: whether it is; ``valid``: whether
    it counts."""

    each: Tensor
    lse: Tensor
    at: Tensor
    here: Tensor
    valid: Tensor


@dataclass(frozen=True)
class _Scoring:
    """How rows are scored: ``ignore``: the label that does not count; columns [offset, ..) of ``vocab``, the others on the
    other ranks of ``group``."""

    ignore: int
    smoothing: float
    offset: int
    vocab: int
    group: Group | None

    def losses(self, logits: Tensor, labels: Tensor) -> _Losses:
        """loss = lse - (1 - e) x[label] - e / V sum(x), in fp32 at least."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        floor = torch.full(labels.shape, float("-inf"), dtype=wide.dtype, device=wide.device)
        top = wide.amax(-1) if wide.shape[-1] else floor
        if self.group is not None:
            top = comm.reduce(top, self.group, "max")
        valid = labels != self.ignore
        at = labels - self.offset
        here = valid & (at >= 0) & (at < wide.shape[-1])
        at = at.masked_fill(~here, 0)
        target = wide.gather(-1, at.unsqueeze(-1)).squeeze(-1) if wide.shape[-1] else floor
        terms = [(wide - top.unsqueeze(-1)).exp_().sum(-1), target.masked_fill(~here, 0)]
        if self.smoothing:
            terms.append(wide.sum(-1))
        stacked = torch.stack(terms)
        exps, target, *total = comm.reduce(stacked, self.group) if self.group is not None else stacked
        lse = top + exps.log()
        loss = lse - (1 - self.smoothing) * target - (self.smoothing / self.vocab * total[0] if total else 0)
        return _Losses(loss.masked_fill(~valid, 0), lse, at, here, valid)

    def gradient_(self, wide: Tensor, found: _Losses, dsum: Tensor) -> Tensor:
        """That of the sum of the losses by the logits, which are ``wide`` and are overwritten."""
        grad = wide.sub_(found.lse.unsqueeze(-1)).exp_()
        if self.smoothing:
            grad.sub_(self.smoothing / self.vocab)
        if grad.shape[-1]:
            right = (self.smoothing - 1) * found.here.to(grad.dtype)
            grad.scatter_add_(-1, found.at.unsqueeze(-1), right.unsqueeze(-1))
        return grad.mul_(dsum).masked_fill_(~found.valid.unsqueeze(-1), 0)


class _CrossEntropy(Function):
    """The logits and one number per row are saved, not their softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, scoring: _Scoring) -> Any:
        found = scoring.losses(logits, labels)
        count = found.valid.sum().to(torch.float32)
        ctx.save_for_backward(logits, *found[1:])
        ctx.scoring = scoring
        ctx.mark_non_differentiable(count)
        return found.each.sum(), count

    @staticmethod
    def backward(ctx: Any, dsum: Tensor, _: Tensor) -> tuple[Any, ...]:
        logits, *kept = ctx.saved_tensors
        found = _Losses(kept[0], *kept)
        grad = ctx.scoring.gradient_(logits.to(found.lse.dtype, copy=True), found, dsum)
        return grad.to(logits.dtype), None, None


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
    scoring = _Scoring(ignore_index, label_smoothing, offset, width, group)
    result: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits, labels, scoring)
    return result


class _LinearCrossEntropy(Function):
    """Logits of some rows at a time, in the backward once more; what is saved are the rows, the weight, and numbers per row.

    Gradients of the weight and bias are summed over the pieces in fp32 at least.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, rows: int, scoring: _Scoring
    ) -> Any:
        flat, targets = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
        found = [
            scoring.losses(F.linear(some, weight, bias), marks)
            for some, marks in zip(flat.split(rows), targets.split(rows), strict=True)
        ]
        each, *kept = (torch.cat(column) for column in zip(*found, strict=True))
        count = kept[-1].sum().to(torch.float32)
        ctx.save_for_backward(x, weight, bias, *kept)
        ctx.rows, ctx.scoring = rows, scoring
        ctx.mark_non_differentiable(count)
        return each.sum(), count

    @staticmethod
    def backward(ctx: Any, dsum: Tensor, _: Tensor) -> tuple[Any, ...]:
        x, weight, bias, *kept = ctx.saved_tensors
        flat = x.reshape(-1, x.shape[-1])
        wide = torch.promote_types(weight.dtype, torch.float32)
        dx = torch.empty_like(flat) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        dbias = torch.zeros_like(bias, dtype=wide) if ctx.needs_input_grad[2] else None
        start = 0
        for some, *numbers in zip(flat.split(ctx.rows), *(column.split(ctx.rows) for column in kept), strict=True):
            found = _Losses(numbers[0], *numbers)
            logits = F.linear(some, weight, bias).to(found.lse.dtype)
            grad = ctx.scoring.gradient_(logits, found, dsum).to(x.dtype)
            del logits
            if dx is not None:
                dx[start : start + len(some)] = grad @ weight
            if dweight is not None:
                dweight.addmm_(grad.t(), some) if wide == some.dtype else dweight.add_(grad.t() @ some)
            if dbias is not None:
                dbias.add_(grad.sum(0, dtype=wide))
            start += len(some)
            del grad  # before the next piece is made
        return (
            None if dx is None else dx.view(x.shape), None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype), None, None, None,
        )


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0,
    rows: int = 1, offset: int = 0, vocab: int | None = None, axes: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """``cross_entropy`` of the logits ``linear(x, weight, bias)``, which are made of ``rows`` rows at a time and dropped again.

    With ``axes`` the vocabulary is split: ``weight`` and ``bias`` are rows [offset, offset + v) of ``vocab``.
    """
    group = axes if axes is not None and axes.size > 1 else None
    scoring = _Scoring(ignore_index, label_smoothing, offset, weight.shape[0] if vocab is None else vocab, group)
    result: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(x, weight, bias, labels, rows, scoring)
    return result


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
            sdpa, attend, ring, dealt, window,
        )
    }
)
"""{"mw.name": function}: the operators a lowered graph may call beside ``aten.*``."""
