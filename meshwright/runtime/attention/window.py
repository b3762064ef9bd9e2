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
from meshwright.runtime.attention.bands import Band, blocks_of
from meshwright.runtime.attention.forms import Gradients, Merged, look
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


class _Window(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: Setting, bands: tuple[Band, ...], reach: tuple[int, int], halo: _Halo
    ) -> Tensor:
        merged = Merged(q, v)
        keys, values = halo.fetched(k, v)
        look(merged, q, keys, values, None, blocks_of(bands, *reach), 0, how)
        out, lse = merged.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.where = how, bands, reach, halo
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        how, bands, reach, halo = ctx.where
        found = Gradients(q, None, how)
        keys, values = halo.fetched(k, v)
        dk, dv = found.look(dy, (q, out, lse, None), keys, values, blocks_of(bands, *reach), 0, how)
        dk, dv = halo.returned(dk, dv, k.shape[-2])
        return found.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def window(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, before: int, after: int, keys: int,
    bands: Sequence[Band] | None = None, sent: Sent = (), received: Sequence[int] = (), *, axis: Group | None = None,
) -> Tensor:
    """Attention in which row i sees keys i - before .. i + after of ``keys`` in all. With ``axis`` the sequence is split
    over it: ``sent`` and ``received`` rows go to and come from every rank of it."""
    how = Setting(q.shape[-1] ** -0.5 if scale is None else scale)
    rows: tuple[Band, ...] = ((0, q.shape[-2], 0, keys, 0),) if bands is None else tuple(tuple(band) for band in bands)  # type: ignore[misc]
    out: Tensor = _Window.apply(q, k, v, how, rows, (before, after), _Halo(sent, received, axis))
    return out
