"""Rows that go once to every part of the experts, however many of its experts they chose.

    rows [m, h], ids [m, k] -> pairs (part, row), each once -> all-to-all -> what the part answers -> back -> summed by row

``ids`` count through the experts of all parts, so many each; -1: chosen among none of them. Part p is answered for at
``ranks[p]`` of the group. All other ranks are sent nothing, so one group serves for the way between nodes and for that within
one. A sum adds the rows of a token one after the other, in an order that depends on the routing alone: the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.runtime.collectives import Group, exchange_rows

Answer = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(rows [n, h], ids [n, k] within a part, weights [n, k]) -> [n, h']."""
Counts = Callable[[Tensor, int], list[Any]]
"""Reads the numbers in a tensor that counts so many rows."""


class Turns:
    """How rows are summed up into ``into`` [n], of which there are ``size``: those that come first, then those that come
    second, and so on, so that no two of a turn meet. ``counts``: rows of every turn, at most ``most``."""

    def __init__(self, into: Tensor, size: int, most: int, read: Counts) -> None:
        self.into, self.size = into, size
        into, order = torch.sort(into, stable=True)
        turns, by = torch.sort(torch.arange(len(into), device=into.device) - torch.searchsorted(into, into), stable=True)
        starts = torch.searchsorted(turns, torch.arange(most + 1, device=into.device))
        self.chunks = order[by].split(read(starts.diff(), len(into)))

    def sum(self, rows: Tensor) -> Tensor:
        """[n, ...] -> [size, ...], summed in fp32 at least."""
        exact = torch.promote_types(rows.dtype, torch.float32)
        made = rows.new_zeros(self.size, *rows.shape[1:], dtype=exact)
        for chunk in self.chunks:
            made.index_add_(0, self.into[chunk], rows[chunk].to(exact))
        return made.to(rows.dtype)


class _Copies(Function):
    """Rows [size, ...] as often as they are wanted, [n, ...]; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, turns: Turns) -> Tensor:
        ctx.turns = turns
        return rows[turns.into]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.turns.sum(grad), None


class _Sum(Function):
    """The inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, turns: Turns) -> Tensor:
        ctx.turns = turns
        return turns.sum(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[ctx.turns.into], None


class Travel(Function):
    """Rows to other ranks: ``sent[j]`` to rank j, ``received[j]`` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.back = received, sent, group
        return exchange_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return exchange_rows(grad, *ctx.back), None, None, None


def copies(rows: Tensor, turns: Turns) -> Tensor:
    """Rows [size, ...] -> [n, ...]."""
    return _Copies.apply(rows, turns)  # type: ignore[no-any-return]


def summed(rows: Tensor, turns: Turns) -> Tensor:
    """Rows [n, ...] -> [size, ...]."""
    return _Sum.apply(rows, turns)  # type: ignore[no-any-return]


def once(
    rows: Tensor, ids: Tensor, weights: Tensor | None, own: int, ranks: Sequence[int], group: Group, read: Counts,
    answer: Answer,
) -> Tensor:
    """What the parts, of ``own`` experts each, make of rows [m, h]: [m, h'], summed over a row's experts."""
    size, parts, chosen = len(rows), len(ranks), ids.shape[1]
    part = torch.where(ids < 0, parts, ids.div(own, rounding_mode="floor"))
    goes = part.new_zeros(size, parts + 1, dtype=torch.bool).scatter_(1, part, True)[:, :parts]
    number = goes.sum(0)
    counts = read(number, min(chosen, parts) * size)
    pairs = torch.sort((~goes).T.flatten().byte(), stable=True).indices[: sum(counts)]
    place, row = pairs.div(max(size, 1), rounding_mode="floor"), pairs.remainder(max(size, 1))
    partners = [int(rank in ranks) for rank in range(group.size)]
    came = read(exchange_rows(number, partners, partners, group), sum(counts))
    sent, received = [0] * group.size, [0] * group.size
    for rank, going, coming in zip(ranks, counts, came, strict=True):
        sent[rank], received[rank] = going, coming
    turns = Turns(row, size, min(chosen, parts), read)
    there = ids[row] - (place * own).unsqueeze(1)
    there = torch.where((there >= 0) & (there < own), there, -1)
    here = exchange_rows(there, sent, received, group)
    given = None if weights is None else Travel.apply(copies(weights, turns), sent, received, group)
    made = answer(Travel.apply(copies(rows, turns), sent, received, group), here, given)
    return summed(Travel.apply(made, received, sent, group), turns)
