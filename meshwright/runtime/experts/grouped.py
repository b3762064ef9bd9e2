"""The product of rows with the matrix of their expert; rows lie sorted by expert, ``counts`` says how many each has.

On a GPU in bf16 torch's grouped kernel does it, where its strides (multiples of 16 bytes) allow; elsewhere one product an
expert, which takes every dtype and layout, gradients expanded from one number too, and is as fast on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_KERNEL: Any = getattr(torch, "_grouped_mm", None)
_ALIGNED = 16  # bytes


class _Grouped(Function):
    """rows [n, k], weight [e, k, m] -> [n, m]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return _by_expert(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        to_rows = _by_expert(grad, weight.transpose(1, 2).conj(), ctx.counts) if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight, conjugate = torch.zeros_like(weight), rows.conj()  # what is real stays as it is
            for expert, (mine, start) in enumerate(_pieces(ctx.counts)):
                if mine:
                    torch.mm(conjugate[start : start + mine].T, grad[start : start + mine], out=to_weight[expert])
        return to_rows, to_weight, None


def _pieces(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(rows, first row) of every expert."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return list(zip(counts, starts, strict=False))


def _by_expert(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    made = rows.new_zeros(rows.shape[0], weight.shape[2])
    for expert, (mine, start) in enumerate(_pieces(counts)):
        if mine:
            torch.mm(rows[start : start + mine], weight[expert], out=made[start : start + mine])
    return made


def _fits_kernel(rows: Tensor, weight: Tensor) -> bool:
    widths = (weight.shape[1], weight.shape[2])
    aligned = all(width * rows.element_size() % _ALIGNED == 0 for width in widths)
    return _KERNEL is not None and rows.is_cuda and rows.dtype == weight.dtype == torch.bfloat16 and aligned and len(rows) > 0


def grouped_linear(
    rows: Tensor, weight: Tensor, counts: tuple[int, ...], transposed: bool, parts: int = 1
) -> Tensor | tuple[Tensor, ...]:
    """``rows`` [n, k] times the matrix of their expert.

    ``weight``: [e, k, m] if ``transposed``, else [e, m, k]; ``counts``: rows of every expert, in order. ``parts`` > 1: as so
    many equal parts of the last dim.
    """
    matrices = weight if transposed else weight.transpose(1, 2)
    if _fits_kernel(rows, matrices):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
        made: Tensor = _KERNEL(rows.contiguous(), matrices, offs=ends)
    else:
        made = _Grouped.apply(rows, matrices, counts)
    return made if parts == 1 else tuple(made.chunk(parts, 1))
