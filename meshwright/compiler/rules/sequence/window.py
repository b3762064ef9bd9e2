"""Attention within a window, ``mw.window``: query [b, h, s, d], key and value [b, g, s, d], row i sees i - before .. i + after.

Samples and heads pass as in any attention, and more ranks than there are key heads share these. The sequence is split one way:
a rank fetches what its rows reach beyond its piece (a halo) from the ranks that have it, whether that is less than a piece or
several, and pieces may be two chunks each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten
from meshwright.compiler.rules.sequence.attention import grouped, key_head
from meshwright.ir.declared.operator import Cost, Saves, Work
from meshwright.ir.graph import Op
from meshwright.ir.pins import WINDOW
from meshwright.ir.rule import SHARED, Factor, Local, OpRule, SequenceAlgorithm

WIDE = 4
"""Bytes of an element in fp32, in which outputs are merged and gradients summed."""
Piece = tuple[int, int]
"""(offset, length)."""


def _window(call: Call) -> OpRule:
    heads, shared = call["query"].shape[-3], call["key"].shape[-3]
    units: dict[Factor, int] = {"h": shared} if shared > 1 else {}
    narrow: list[Factor | None] = ["b", "h" if shared > 1 else None, None, None]
    full: list[Factor | None] = ["b", "h", None, None]
    rows = call["query"].shape[-2]
    reach = call["before"] + call["after"]
    algorithms = {WINDOW: SequenceAlgorithm((2, 2, 2), (2,), (rows, rows), fetching=(1, 2), reach=reach)}
    units = units if shared != heads else {}
    return call.rule([full, narrow, narrow], [full], units=units, algorithms=algorithms if rows > 1 else {}, inner=["h"],
                     grouped=grouped(call, masked=False) if units else {})


def _local_window(op: Op, local: Local) -> Rewritten:
    """A piece of the rows looks at its own keys and at those that it fetches."""
    axes = local.axes_of(WINDOW)
    if local.axes_of(SHARED):
        return op.target, op.args, (*op.kwargs, ("head", key_head(local)))
    if not axes:
        return op.target, op.args, op.kwargs
    before, after, length = op.args[4:7]
    mine = local.coordinates[axes[0]]
    chunks = [
        local.operand_chunks(1, 2, {**local.coordinates, axes[0]: rank}) for rank in range(local.mesh.size(axes[0]))
    ]
    needs = [[(max(0, at - before), min(length, at + n + after)) for at, n in pieces] for pieces in chunks]
    received = [_shared(needs[mine], chunks[rank]) if rank != mine else [] for rank in range(len(chunks))]
    sent = [_inside(_shared(needs[rank], chunks[mine]), chunks[mine]) if rank != mine else () for rank in range(len(chunks))]
    bands, first = [], 0
    for offset, rows in chunks[mine]:
        at = 0
        for key, count in (*chunks[mine], *(piece for pieces in received for piece in pieces)):
            if key < offset + rows + after and offset - before < key + count:
                bands.append((first, first + rows, at, at + count, offset - key))
            at += count
        first += rows
    counts = tuple(sum(count for _, count in pieces) for pieces in received)
    axis = (("axis", axes[0]),) if before + after else ()  # a row that sees itself alone reaches nothing
    return op.target, (*op.args, tuple(bands), tuple(sent), counts), (*op.kwargs, *axis)


def _shared(needs: Sequence[tuple[int, int]], chunks: Sequence[Piece]) -> list[Piece]:
    """What some chunks have of some needed ranges, in order, each place once."""
    found: list[Piece] = []
    for offset, count in sorted(chunks):
        at = offset
        for start, stop in sorted(needs):
            start, stop = max(start, at), min(stop, offset + count)
            if start < stop:
                found.append((start, stop - start))
                at = stop
    return found


def _inside(pieces: Sequence[Piece], chunks: Sequence[Piece]) -> tuple[tuple[int, int], ...]:
    """Places of the whole sequence as (first, last) rows of a rank's piece, which consists of ``chunks``."""
    found, first = [], 0
    for offset, count in chunks:
        found += [(at, (first + at - offset, first + at - offset + n)) for at, n in pieces if offset <= at < offset + count]
        first += count
    return tuple(rows for _, rows in sorted(found))


def looked(work: Work) -> float:
    """Keys that a row sees in the mean."""
    before, after, keys = work.args[4:7]
    return float(before + after + 1 - (before * (before + 1) + after * (after + 1)) / (2 * keys))


def _rows(work: Work) -> float:
    """The log-sum-exp of every row of the query."""
    return math.prod(work.operands[0][:-1]) * 4


def _space(work: Work) -> tuple[float, float]:
    """What is fetched (in the backward its gradient too), sums in fp32, and one kernel's operands and results, which runs of
    rows are copied into."""
    query, keys = math.prod(work.operands[0]), sum(math.prod(shape) for shape in work.operands[1:3])
    came = sum(work.literal(9, "received", ())) / work.operands[1][-2] * keys
    item, made = work.reads.itemsize, math.prod(work.results[0])
    cast = WIDE if item < WIDE else 0
    extended = (keys + came) * item if came else 0.0
    copied = (query + keys + made) * item
    forward = made * (WIDE + cast) + extended + max(came * item, copied + made * item)
    returned = (keys + came) * WIDE * bool(came)
    sums = (query + keys + came) * WIDE - (query + keys) * item  # of which the gradients are made at the end
    backward = extended + sums + max(returned, copied + (made + 2 * query + keys) * item)
    return float(forward), float(backward)


RULES: Mapping[str, Declaration] = {
    "mw.window": declare(
        _window, _local_window, cost=Cost("attention", space=_space, looked=looked), saves=Saves.parse("0 1 2 r0", extra=_rows)
    ),
}
