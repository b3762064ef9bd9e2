"""Attention by heads over more ranks than there are key heads: every rank's queries share one key head, which it is dealt.

    before   queries [b, h / c, s, d]   keys and values [b, g, s / c, d]     c ranks, a multiple of the g key heads
    dealt    rank r gets head r g / c of every rank's piece                  one all-to-all, its gradient back in another
    then     attention of its queries on the one head, whole along the sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from meshwright.runtime import collectives as comm
from meshwright.runtime.collectives import Group
from meshwright.runtime.draws import Draw, lent


class _Deal(Function):
    """[b, g, this rank's rows, d] -> [b, 1, all rows, d] of this rank's head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Sequence[int], group: Group) -> Tensor:
        ctx.where = lengths, group, x.shape
        heads = x.permute(1, 2, 0, 3).repeat_interleave(group.size // x.shape[1], 0)  # one for every rank
        found = comm.exchange_rows(heads.flatten(0, 1).flatten(1), [x.shape[2]] * group.size, list(lengths), group)
        return found.reshape(len(found), x.shape[0], x.shape[3]).transpose(0, 1).unsqueeze(1).contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        lengths, group, (batch, heads, rows, width) = ctx.where
        wide = dy.to(torch.promote_types(dy.dtype, torch.float32)).squeeze(1).transpose(0, 1).flatten(1)
        found = comm.exchange_rows(wide, list(lengths), [rows] * group.size, group)
        each = found.reshape(heads, group.size // heads, rows, batch, width).sum(1)
        return each.permute(2, 0, 1, 3).to(dy.dtype), None, None


def dealt(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    lengths: Sequence[int], *, axis: Group, draw: Draw | None = None,
) -> Tensor:
    """Attention of some of the query heads on the key head that they share; ``lengths``: rows of every rank's piece of it."""
    k, v = (_Deal.apply(x, lengths, axis) for x in (k, v))
    drawing = lent(q.device, draw) if draw is not None and dropout_p else nullcontext()
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    with drawing:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
