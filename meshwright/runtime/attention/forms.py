"""Attention whose queries are a piece of the sequence: lists of blocks on keys that are here, or that pass by in a ring.

A *block* is ``(q0, q1, k0, k1, m0, causal)``: rows q0:q1 of this rank's queries look at keys k0:k1 of the keys at hand, which
are columns m0, m0 + 1, ... of the mask; ``causal``: it is square, and row i sees keys 0..i of it. Outputs of blocks on
the same rows are merged by their log-sum-exp, in fp32:

    lse = log(exp(lse_1) + exp(lse_2))      out = (exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2) / (the sum of both factors)

    attend   the keys are here: whole, gathered (and those behind this rank's last row are not looked at)
    ring     at step i the keys of rank r - i are here; while their blocks are computed they are on their way to rank r + 1.
             In the backward the gradients of keys and values follow one step behind, and go home after the last one.
             Only this rank's pieces are kept for the backward.

A rank passes on by an all-to-all in which it sends to one rank and receives from one: no order of sends can deadlock.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.runtime import collectives as comm
from meshwright.runtime.attention import kernels
from meshwright.runtime.attention.kernels import Setting
from meshwright.runtime.collectives import Group
from meshwright.runtime.draws import Draw, generator_of

Block = tuple[int, int, int, int, int, bool]


class Merged:
    """Rows of the output so far, laid out as the queries are: heads that were transposed are joined again without a copy."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.shape, self.dtype = (*q.shape[:-1], v.shape[-1]), v.dtype
        wide = torch.promote_types(v.dtype, torch.float32)
        strides = q.stride()
        order = sorted(range(q.ndim - 1), key=strides.__getitem__, reverse=True)
        self.out = torch.empty_permuted(self.shape, (*order, q.ndim - 1), dtype=wide, device=q.device).zero_()
        self.lse = torch.full(q.shape[:-1], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """The output of one more block on some rows."""
        self.merge(self.out[..., rows, :], self.lse[..., rows], out, lse)

    def merge(self, into: Tensor, before: Tensor, out: Tensor, lse: Tensor) -> None:
        """The output of one more block into views of this one's."""
        top = torch.maximum(before, lse)
        top = top.masked_fill(top == float("-inf"), 0.0)
        old, new = (before - top).exp_(), (lse - top).exp_()
        total = old + new
        share = total.masked_fill(total == 0, 1.0)
        into.mul_((old / share).unsqueeze(-1)).add_(out.to(into.dtype) * (new / share).unsqueeze(-1))
        before.copy_(top + total.log())

    def result(self) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        return self.out.to(self.dtype), self.lse


def _part(mask: Tensor | None, block: Block) -> Tensor | None:
    """The mask of one block, as a view."""
    if mask is None:
        return None
    q0, q1, k0, k1, m0, _ = block
    rows = mask[..., q0:q1, :] if mask.shape[-2] > 1 else mask
    return rows[..., m0 : m0 + k1 - k0] if mask.shape[-1] > 1 else rows


def _of_rows(most: Tensor | None, block: Block) -> Tensor | None:
    """What is so of each row of the mask, of the rows of one block."""
    return most if most is None or most.shape[-1] == 1 else most[..., block[0] : block[1]]


def look(into: Merged, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, most: Tensor | None, blocks: Sequence[Block],
         number: int, how: Setting) -> None:
    """Add the blocks on some keys. ``number``: of the first of them."""
    for at, block in enumerate(blocks):
        q0, q1, k0, k1, _, causal = block
        if q1 > q0 and k1 > k0:
            part = _part(mask, block)
            out, lse = kernels.forward(q[..., q0:q1, :], k[..., k0:k1, :], v[..., k0:k1, :], part, causal, number + at, how)
            into.add(slice(q0, q1), out, kernels.counted(lse, part, _of_rows(most, block), k1 - k0))


class Gradients:
    """The gradients of a call so far, in fp32 at least; ``dk`` and ``dv`` of the keys at hand."""

    def __init__(self, q: Tensor, mask: Tensor | None, how: Setting) -> None:
        self.dq = _wide_zeros(q)
        self.dmask = _wide_zeros(mask) if mask is not None and how.mask_gradient else None
        self.most = kernels.sunk(mask)

    def look(
        self, dy: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor | None], k: Tensor, v: Tensor,
        blocks: Sequence[Block], number: int, how: Setting,
    ) -> tuple[Tensor, Tensor]:
        """Add those of the blocks on some keys; (dk, dv) of these. ``saved``: (q, out, lse, mask)."""
        q, out, lse, mask = saved
        dk, dv = _wide_zeros(k), _wide_zeros(v)
        for at, block in enumerate(blocks):
            q0, q1, k0, k1, _, causal = block
            if q1 == q0 or k1 == k0:
                continue
            rows, keys = slice(q0, q1), slice(k0, k1)
            mine_q, mine_k, mine_v, mine_mask = kernels.backward(
                dy[..., rows, :], q[..., rows, :], k[..., keys, :], v[..., keys, :], out[..., rows, :], lse[..., rows],
                _part(mask, block), causal, number + at, how, _of_rows(self.most, block),
            )
            self.dq[..., rows, :] += mine_q
            dk[..., keys, :] += mine_k
            dv[..., keys, :] += mine_v
            into = _part(self.dmask, block)
            if into is not None and mine_mask is not None:
                into += mine_mask
        return dk, dv


def _wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, blocks: Sequence[Block], how: Setting
    ) -> Tensor:
        merged = Merged(q, v)
        look(merged, q, k, v, mask, kernels.sunk(mask), blocks, 0, how)
        out, lse = merged.result()
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.where = blocks, how
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        blocks, how = ctx.where
        found = Gradients(q, mask, how)
        dk, dv = found.look(dy, (q, out, lse, mask), k, v, blocks, 0, how)
        dmask = None if found.dmask is None else found.dmask.to(mask.dtype)
        return found.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask, None, None


class _Pair:
    """Keys and values (or their gradients) as one message; every rank's is as long as the longest."""

    def __init__(self, k: Tensor, v: Tensor, length: int) -> None:
        self.shapes = (*k.shape[:-2], length, k.shape[-1]), (*v.shape[:-2], length, v.shape[-1])

    def packed(self, k: Tensor, v: Tensor) -> Tensor:
        """One buffer."""
        pairs = zip((k, v), self.shapes, strict=True)
        return torch.cat([comm.padded(x, x.ndim - 2, shape[-2]).reshape(-1) for x, shape in pairs])

    def opened(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a buffer."""
        k, v = self.shapes
        keys = functools.reduce(lambda a, b: a * b, k, 1)
        return buffer[:keys].view(k), buffer[keys:].view(v)


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, steps: Sequence[Sequence[Block]], how: Setting,
        length: int, group: Group,
    ) -> Tensor:
        merged, pair, most = Merged(q, v), _Pair(k, v, length), kernels.sunk(mask)
        here = pair.packed(k, v)
        number = 0
        for step, blocks in enumerate(steps):
            coming = comm.start_pass(here, 1, group) if step + 1 < len(steps) else None
            look(merged, q, *pair.opened(here), mask, most, blocks, number, how)
            number += len(blocks)
            here = here if coming is None else comm.end_pass(coming)
        out, lse = merged.result()
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.where = steps, how, pair, group
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        steps, how, pair, group = ctx.where
        found = Gradients(q, mask, how)
        here, behind, number = pair.packed(k, v), None, 0
        for step, blocks in enumerate(steps):
            coming = comm.start_pass(here, 1, group) if step + 1 < len(steps) else None
            keys, values = pair.opened(here)
            mine = pair.packed(*found.look(dy, (q, out, lse, mask), keys, values, blocks, number, how))
            number += len(blocks)
            if behind is not None:
                mine += comm.end_pass(behind)
            behind = comm.start_pass(mine, 1 if step + 1 < len(steps) else 1 - len(steps), group)
            here = here if coming is None else comm.end_pass(coming)
        assert behind is not None
        dk, dv = pair.opened(comm.end_pass(behind))
        dmask = None if found.dmask is None else found.dmask.to(mask.dtype)
        own = k.shape[-2]
        return (
            found.dq.to(q.dtype), dk[..., :own, :].to(k.dtype), dv[..., :own, :].to(v.dtype), dmask, None, None, None, None
        )


def _setting(q: Tensor, mask: Tensor | None, scale: float | None, dropout_p: float, draw: Draw | None) -> Setting:
    generator = None if draw is None or not dropout_p else functools.partial(generator_of, draw, q.device)
    gradient = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    return Setting(q.shape[-1] ** -0.5 if scale is None else scale, gradient, dropout_p, generator)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, scale: float | None, blocks: Sequence[Block], *,
    draw: Draw | None = None,
) -> Tensor:
    """Attention of a piece of the queries on keys that are whole."""
    how, four = _setting(q, mask, scale, dropout_p, draw), [_four(x, q) for x in (q, k, v)]
    out: Tensor = _Attend.apply(*four, _four(mask, q), tuple(blocks), how)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def ring(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, scale: float | None,
    steps: Sequence[Sequence[Block]], length: int, *, axis: Group, draw: Draw | None = None,
) -> Tensor:
    """Attention of a piece of the queries on all keys, of which every rank has a piece, the longest of ``length``.

    ``steps[i]``: the blocks on the piece of the rank i before this one.
    """
    how, four = _setting(q, mask, scale, dropout_p, draw), [_four(x, q) for x in (q, k, v)]
    out: Tensor = _Ring.apply(*four, _four(mask, q), tuple(steps), how, length, axis)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def _four(x: Tensor | None, q: Tensor) -> Any:
    """As [batch, heads, rows, width]: what is in front of the heads is one dim, to which masks broadcast."""
    if x is None:
        return x
    x = x[(None,) * (4 - x.ndim)]
    lead = q.shape[:-3] if math.prod(x.shape[:-3]) > 1 else x.shape[:-3]
    return x if q.ndim < 5 else x.expand(*lead, *x.shape[-3:]).flatten(0, -4)
