"""Cross entropy of a piece of the classes, and of logits that are made a few rows at a time (``compiler.structure.pieces``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from meshwright.runtime import collectives as comm
from meshwright.runtime.collectives import Group


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
