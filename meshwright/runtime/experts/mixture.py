"""``mw.experts``: tokens go to their experts, are answered, come back and are summed (``ir.declared.experts``).

    x, ids -> rows sorted by (rank, expert)           a row is a token for one of its experts
           -> all-to-all with the real counts         to the ranks that hold the experts; nothing is padded, nothing dropped
           -> sorted by expert -> Experts.graph       grouped products and what is between them
           -> back, the same ways                     -> times the weights, summed over the experts of a token

``pieces`` says which rank has which experts: for every mesh axis that splits them (major first) its size, and this rank's index
if the ranks along it have the same tokens (each answers for its own experts, and the sum over the ranks is the answer), or -1
if they have other tokens: then rows travel, along ``axis``, all such axes together. A rank may get no rows at all.

With ``near`` = d a token goes once to every d neighbouring ranks of the group that have one of its experts, not once for each
of its experts: to the one among them that is in the sender's place, which passes it on, once to each that needs it. Answers are
weighed where they are made and summed on the way back, first on their rank, then among the neighbours::

    rows, ids [., k] -> once a part of the experts     ids: what of a part a token chose, -1: nothing of it
           -> all-to-all between the parts -> (the same among the neighbours) -> Experts.graph -> sums -> back

Everything is differentiable by torch: the backward of a travel is the travel back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.errors import RunError
from meshwright.ir.declared.experts import ENDS, GROUPED, IDS, ROWS, WEIGHTS, Experts
from meshwright.ir.graph import Graph, arguments
from meshwright.ir.operators import overload
from meshwright.runtime.collectives import Group, exchange_rows
from meshwright.runtime.experts.grouped import grouped_linear
from meshwright.runtime.experts.once import Travel, Turns, copies, once, summed


class _Pick(Function):
    """Rows of ``x`` [t, ...] for the slots ``order`` of [t * k]; the gradient of a token is the sum over its slots."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens, ctx.chosen = x.shape[0], chosen
        return x[order if chosen == 1 else order // chosen]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        slots = grad.new_zeros(ctx.tokens * ctx.chosen, *grad.shape[1:])
        slots[order] = grad
        return slots.unflatten(0, (ctx.tokens, ctx.chosen)).sum(1), None, None


class _Put(Function):
    """Rows at their slots ``order`` of [slots]; zeros where none belongs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(order)
        made = rows.new_zeros(slots, *rows.shape[1:])
        made[order] = rows
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


def experts(
    how: Experts, x: Tensor, ids: Tensor, weights: Tensor | None, operands: Sequence[Tensor], *,
    pieces: Sequence[tuple[int, int]] = (), axis: Group | None = None, near: int | None = None,
) -> Tensor:
    """The answers [*t, h'] of the experts ``ids`` [*t, k] to tokens ``x`` [*t, h]; see the head of this file.

    Raises RunError for an id that no expert has.
    """
    tokens = x.reshape(-1, x.shape[-1])
    chosen = ids.reshape(-1)
    if near is not None and axis is not None and axis.size > 1:
        keys, own = _keys(chosen, how.count, pieces, axis.size)
        if read_counts((keys == axis.size * own + 1).sum(0, keepdim=True), 0, 1)[0]:
            raise RunError(f"a router chose an expert that is not among the {how.count} there are")
        owned = keys.masked_fill(keys == axis.size * own, -1).unflatten(0, (tokens.shape[0], how.chosen))
        each = None if weights is None else weights.reshape(-1, how.chosen)
        answers = _sent_once(how, tokens, owned, each, operands, own, axis, near)
        return answers.reshape(*x.shape[:-1], answers.shape[-1])
    flat = None if weights is None else weights.reshape(-1)
    order, counts = _sorted(chosen, how.count, pieces, 1 if axis is None else axis.size)
    rows = _Pick.apply(tokens, order, how.chosen)
    inside = None if how.scaled or flat is None else _Pick.apply(flat, order, 1)
    made = _answered(how, rows, inside, operands, counts, axis)
    if how.scaled and flat is not None:
        made = made * _Pick.apply(flat, order, 1).unsqueeze(-1)
    answers = _Put.apply(made, order, chosen.shape[0]).unflatten(0, (tokens.shape[0], how.chosen)).sum(1)
    return answers.reshape(*x.shape[:-1], answers.shape[-1])  # type: ignore[no-any-return]


def read_counts(counts: Tensor, rows: int, beside: int = 0) -> list[Any]:
    """The numbers in a tensor, which count ``rows`` rows, the last ``beside`` of them those that are not answered here; the
    host waits for them."""
    return counts.tolist()  # type: ignore[no-any-return]


def _sorted(ids: Tensor, count: int, pieces: Sequence[tuple[int, int]], ranks: int) -> tuple[Tensor, list[list[int]]]:
    """(slots in the order (rank, expert) of the experts that they go to, rows of every rank's experts).

    Slots whose experts ranks with the same tokens answer for are left out.
    """
    keys, own = _keys(ids, count, pieces, ranks)
    keys, order = torch.sort(keys, stable=True)
    starts = torch.searchsorted(keys, torch.arange(ranks * own + 3, device=keys.device))
    *kept, left, wrong = read_counts(starts.diff(), len(ids), 2)
    if wrong:
        raise RunError(f"a router chose an expert that is not among the {count} there are")
    return order[: order.shape[0] - left], [kept[start : start + own] for start in range(0, ranks * own, own)]


def _keys(ids: Tensor, count: int, pieces: Sequence[tuple[int, int]], ranks: int) -> tuple[Tensor, int]:
    """(for every slot its rank times the experts of a rank plus its expert there, or one more than all of these where another
    rank with the same tokens answers, two more where no expert has the id; experts of a rank)."""
    own = count // math.prod([size for size, _ in pieces])
    owner, local = ids.div(own, rounding_mode="floor"), ids.remainder(own)
    mine = torch.ones_like(ids, dtype=torch.bool)
    to, stride = torch.zeros_like(ids), 1
    for size, index in reversed(pieces):
        at = owner.remainder(size)
        owner = owner.div(size, rounding_mode="floor")
        if index >= 0:
            mine &= at == index
        else:
            to, stride = to + at * stride, stride * size
    keys = to * own + local
    return keys.masked_fill(~mine, ranks * own).masked_fill((ids < 0) | (ids >= count), ranks * own + 1), own


def _answered(
    how: Experts, rows: Tensor, weights: Tensor | None, operands: Sequence[Tensor], counts: Sequence[Sequence[int]],
    axis: Group | None,
) -> Tensor:
    """What the experts make of rows [n, h] sorted by (rank, expert), in the same order."""
    if axis is None or axis.size == 1:
        return _body(how, rows, weights, operands, counts[0])
    going = torch.tensor(counts, device=rows.device)
    arriving = exchange_rows(going, [1] * axis.size, [1] * axis.size, axis)  # [from rank, expert here]
    came = read_counts(arriving, len(rows))
    sent, received = [sum(row) for row in counts], [sum(row) for row in came]
    here = Travel.apply(rows, sent, received, axis)
    expert = torch.arange(len(came[0]), device=rows.device).repeat(axis.size)
    order = torch.sort(expert.repeat_interleave(arriving.flatten(), output_size=sum(received)), stable=True).indices
    given = None if weights is None else _Pick.apply(Travel.apply(weights, sent, received, axis), order, 1)
    made = _body(how, _Pick.apply(here, order, 1), given, operands, [sum(column) for column in zip(*came, strict=True)])
    back = _Put.apply(made, order, made.shape[0])
    return Travel.apply(back, received, sent, axis)  # type: ignore[no-any-return]


def _sent_once(
    how: Experts, tokens: Tensor, ids: Tensor, weights: Tensor | None, operands: Sequence[Tensor], own: int, axis: Group,
    near: int,
) -> Tensor:
    """What the experts of all ranks of ``axis``, ``own`` on each, make of tokens [t, h] that chose ``ids`` [t, k] of them."""

    def here(rows: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
        slots = ids.flatten()
        keys, order = torch.sort(slots.masked_fill(slots < 0, own), stable=True)
        counts = read_counts(torch.searchsorted(keys, torch.arange(own + 1, device=keys.device)).diff(), len(slots))
        order = order[: sum(counts)]
        turns = Turns(order // how.chosen, len(rows), how.chosen, read_counts)
        given = None if weights is None else _Pick.apply(weights.flatten(), order, 1)
        made = _body(how, copies(rows, turns), None if how.scaled else given, operands, counts)
        if how.scaled and given is not None:
            made = made * given.unsqueeze(-1)
        return summed(made, turns)

    first = axis.rank - axis.rank % near
    neighbours, alike = range(first, first + near), range(axis.rank % near, axis.size, near)
    if near == 1:
        return once(tokens, ids, weights, own, alike, axis, read_counts, here)

    def among(rows: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
        return once(rows, ids, weights, own, neighbours, axis, read_counts, here)

    if near == axis.size:
        return among(tokens, ids, weights)
    return once(tokens, ids, weights, own * near, alike, axis, read_counts, among)


def _body(
    how: Experts, rows: Tensor, weights: Tensor | None, operands: Sequence[Tensor], counts: Sequence[int]
) -> Tensor:
    """``Experts.graph`` on rows sorted by expert. ``counts``: rows of every expert here."""
    graph: Graph = how.graph
    numbers = torch.tensor(counts, device=rows.device)
    ids = torch.arange(len(counts), device=rows.device).repeat_interleave(numbers, output_size=sum(counts))
    given: dict[int, Any] = {ROWS: rows, IDS: ids, ENDS: tuple(counts), WEIGHTS: weights}
    values: dict[str, Any] = {graph.inputs[at]: value for at, value in given.items()}
    values.update(zip(how.operands, operands, strict=True))
    for op in graph.ops:
        args, kwargs = arguments(op, lambda ref: values[ref.name])
        function = grouped_linear if op.target == GROUPED else overload(op.target)
        made = function(*args, **kwargs)
        values.update(zip(op.outputs, made if isinstance(made, tuple | list) else (made,), strict=True))
    answer: Tensor = values[how.output]
    return answer
