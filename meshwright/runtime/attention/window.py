"""Attention within a window: a row looks at so many places before and behind its own.

Where the sequence is split a rank needs the keys and values that its rows reach beyond its own piece, and no others: these are
fetched from the ranks that have them (a *halo*), in one all-to-all, and their gradients go back in another. Only this rank's
own piece is kept for the backward, which fetches again. ``bands`` say which rows meet which keys (see there); the keys at hand
are this rank's own, then what came from ranks 0, 1, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.runtime import collectives as comm
from meshwright.runtime.attention import kernels
from meshwright.runtime.attention.bands import AHEAD, CAUSAL, Band, Run, runs_of
from meshwright.runtime.attention.forms import Merged
from meshwright.runtime.attention.kernels import Setting
from meshwright.runtime.collectives import Group

Sent = Sequence[Sequence[tuple[int, int]]]
"""For every rank the (first, last) rows of this rank's piece that it gets."""


class _Halo:
    """What is fetched along dim -2 of keys and values, and how its gradient goes back."""

    def __init__(self, sent: Sent, received: Sequence[int], group: Group | None) -> None:
        self.sent, self.received, self.group = sent, list(received), group
        self.counts = [sum(stop - start for start, stop in parts) for parts in sent]
        self.ranges = [part for parts in sent for part in parts]

    def fetched(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with what others have behind them."""
        if self.group is None:
            return k, v
        out = [_rows(x, self.ranges) for x in (k, v)]
        found = comm.exchange_rows(torch.cat(out, 1), self.counts, self.received, self.group)
        parts = found.split([x.shape[1] for x in out], 1)
        return tuple(torch.cat([x, _back(part, x)], -2) for x, part in zip((k, v), parts, strict=True))  # type: ignore[return-value]

    def returned(self, dk: Tensor, dv: Tensor, own: int) -> tuple[Tensor, Tensor]:
        """Gradients of this rank's piece: those found here and those of the ranks that had fetched."""
        if self.group is None:
            return dk, dv
        away = [_rows(x, [(own, x.shape[-2])]) for x in (dk, dv)]
        found = comm.exchange_rows(torch.cat(away, 1), self.received, self.counts, self.group)
        sums = [x[..., :own, :].contiguous() for x in (dk, dv)]
        for into, part in zip(sums, found.split([x.shape[1] for x in away], 1), strict=True):
            back, at = _back(part, into), 0
            for start, stop in self.ranges:
                into[..., start:stop, :] += back[..., at : at + stop - start, :]
                at += stop - start
        return sums[0], sums[1]


def _rows(x: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """[b, h, s, d] -> [some rows of s, b h d]."""
    parts = [x[..., start:stop, :] for start, stop in ranges]
    chosen = torch.cat(parts, -2) if parts else x[..., :0, :]
    return chosen.permute(2, 0, 1, 3).flatten(1)


def _back(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``_rows``, with the heads of ``like``."""
    batch, heads, _, width = like.shape
    return rows.reshape(len(rows), batch, heads, width).permute(1, 2, 0, 3)


def _pieces(x: Tensor, first: int, last: int, count: int, step: int, dim: int = -2) -> Tensor:
    """Rows first:last along ``dim``, and those 1, 2, .. count - 1 steps behind: a view with the pieces' number in front of
    their rows. They do not overlap: none is longer than a step."""
    whole = x.narrow(dim, first, last - first + (count - 1) * step)
    return whole.unfold(dim, last - first, step).movedim(-1, dim) if dim == -2 else whole.unfold(dim, last - first, step)


def _together(x: Tensor, first: int, last: int, run: Run) -> Tensor:
    """[b, h, s, d] -> the pieces of a run as samples, [b n, h, rows, d]; those of which a row sees what is ahead in reverse."""
    block, count, step = run
    pieces = _pieces(x, first, last, count, step).transpose(1, 2).flatten(0, 1)
    return pieces.flip(-2) if block[5] == AHEAD else pieces


def _apart(x: Tensor, run: Run, dim: int = -2) -> Tensor:
    """The inverse: [b n, h, ...] -> [b, h, n, ...], in order; ``dim``: of the rows."""
    block, count, _ = run
    parts: Tensor = (x.flip(dim) if block[5] == AHEAD else x).unflatten(0, (-1, count))
    return parts.transpose(1, 2)


def _forward(q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Run], how: Setting) -> tuple[Tensor, Tensor]:
    merged = Merged(q, v)
    for run in runs:
        (q0, q1, k0, k1, _, kind), count, step = run
        out, lse = kernels.forward(
            _together(q, q0, q1, run), _together(k, k0, k1, run), _together(v, k0, k1, run), None, kind in (CAUSAL, AHEAD), 0,
            how,
        )
        into, before = _pieces(merged.out, q0, q1, count, step), _pieces(merged.lse, q0, q1, count, step, -1)
        merged.merge(into, before, _apart(out, run), _apart(lse, run, -1))
    return merged.result()


def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, runs: Sequence[Run], how: Setting
) -> list[Tensor]:
    """The gradients of q, k and v in fp32 at least."""
    sums = [torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device) for x in (q, k, v)]
    for run in runs:
        (q0, q1, k0, k1, _, kind), count, step = run
        over, mine_q, made = (_together(x, q0, q1, run) for x in (dy, q, out))
        keys, values = (_together(x, k0, k1, run) for x in (k, v))
        some = _pieces(lse, q0, q1, count, step, -1).transpose(1, 2).flatten(0, 1)
        some = some.flip(-1) if kind == AHEAD else some
        found = kernels.backward(over, mine_q, keys, values, made, some, None, kind in (CAUSAL, AHEAD), 0, how)[:3]
        for total, part, (first, last) in zip(sums, found, ((q0, q1), (k0, k1), (k0, k1)), strict=True):
            into = _pieces(total, first, last, count, step)
            into += _apart(part, run)
    return sums


class _Window(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: Setting, bands: tuple[Band, ...], reach: tuple[int, int], halo: _Halo
    ) -> Tensor:
        keys, values = halo.fetched(k, v)
        out, lse = _forward(q, keys, values, runs_of(bands, *reach), how)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.where = how, bands, reach, halo
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        how, bands, reach, halo = ctx.where
        keys, values = halo.fetched(k, v)
        dq, dk, dv = _backward(dy, q, keys, values, out, lse, runs_of(bands, *reach), how)
        dk, dv = halo.returned(dk, dv, k.shape[-2])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def window(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, before: int, after: int, keys: int,
    bands: Sequence[Band] | None = None, sent: Sent = (), received: Sequence[int] = (), *, axis: Group | None = None,
    head: int | None = None,
) -> Tensor:
    """Attention in which row i sees keys i - before .. i + after of ``keys`` in all. With ``axis`` the sequence is split
    over it: ``sent`` and ``received`` rows go to and come from every rank of it. ``head``: of the keys and values, which all
    of these queries share; None if there are as many as they ask for."""
    if head is not None:
        k, v = k.narrow(-3, head, 1), v.narrow(-3, head, 1)
    how = Setting(q.shape[-1] ** -0.5 if scale is None else scale)
    rows: tuple[Band, ...] = ((0, q.shape[-2], 0, keys, 0),) if bands is None else tuple(tuple(band) for band in bands)  # type: ignore[misc]
    out: Tensor = _Window.apply(q, k, v, how, rows, (before, after), _Halo(sent, received, axis))
    return out
