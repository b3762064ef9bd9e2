"""Windows of attention as blocks.

A *band* is ``(q0, q1, k0, k1, shift)``: rows q0:q1 on keys k0:k1, row q0 standing ``shift`` places behind key k0. Within a
window row i of it looks at keys i + shift - before .. i + shift + after. Of rows in runs no longer than the window the keys are

    [ those that only the first rows still see | those that all rows see | those that only the last rows see already ]
              AHEAD: row r sees r, r + 1, ..             FULL                 CAUSAL: row r sees 0, 1, .., r

three blocks, each of which a flash kernel takes (AHEAD with rows and keys in reverse, where it is causal): no mask is formed.
Where a band ends before a triangle does, what is left of that is a smaller one and a full block. Runs of rows that meet keys
alike follow each other at a fixed distance: they are one call of a kernel with as many more samples (``runs_of``), however long
the sequence is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

FULL, CAUSAL, AHEAD = 0, 1, 2
"""What of a block's keys a row sees: all; those up to its own place; those from its own place on. The last two are square."""
Block = tuple[int, int, int, int, int, int]
"""(q0, q1, k0, k1, 0, FULL, CAUSAL or AHEAD): rows q0:q1 on keys k0:k1."""
Band = tuple[int, int, int, int, int]


Run = tuple[Block, int, int]
"""(the first block, how many, by how many rows and keys each lies behind the one before)."""


@functools.lru_cache(maxsize=256)
def runs_of(bands: tuple[Band, ...], before: int, after: int) -> tuple[Run, ...]:
    """The blocks of some bands, in which every row looks ``before`` places back and ``after`` ahead, those alike together.

    >>> for run in runs_of(((0, 6, 0, 6, 0),), 1, 0):
    ...     print(run)
    ((0, 2, 0, 2, 0, 1), 1, 2)
    ((2, 3, 1, 2, 0, 2), 2, 2)
    ((2, 4, 2, 4, 0, 1), 2, 2)
    """
    step = before + after + 1
    found: list[Run] = []
    for band in bands:
        alike: list[tuple[int, list[Block]]] = []
        for start in range(0, band[1] - band[0], step):
            blocks = list(_of_rows(band, start, before, after))
            many, first = alike[-1] if alike else (0, [])
            if many and blocks == [_moved(block, many * step) for block in first]:
                alike[-1] = many + 1, first
            else:
                alike.append((1, blocks))
        found += [(block, many, step) for many, blocks in alike for block in blocks]
    return tuple(found)


def _moved(block: Block, by: int) -> Block:
    q0, q1, k0, k1, m0, kind = block
    return q0 + by, q1 + by, k0 + by, k1 + by, m0, kind


def _of_rows(band: Band, start: int, before: int, after: int) -> Iterator[Block]:
    """The blocks of the rows from ``start`` on, as many as the window is long."""
    q0, q1, k0, k1, shift = band
    rows, keys = q1 - q0, k1 - k0
    count = min(before + after + 1, rows - start)
    first, last = start + shift - before, start + shift + after  # of the first row
    common = first + count - 1  # the last row's first key
    for r0, r1, c0, c1, kind in (
        *_clipped(start, count - 1, first, keys, AHEAD),
        *_cut(start, start + count, common, last, keys),
        *_clipped(start, count, last, keys, CAUSAL),
    ):
        yield q0 + r0, q0 + r1, k0 + c0, k0 + c1, 0, kind


Part = tuple[int, int, int, int, int]


def _cut(r0: int, r1: int, c0: int, c1: int, keys: int) -> list[Part]:
    """Rows on the keys c0:c1 that there are."""
    c0, c1 = max(c0, 0), min(c1, keys)
    return [(r0, r1, c0, c1, FULL)] if r0 < r1 and c0 < c1 else []


def _clipped(row: int, size: int, column: int, keys: int, kind: int) -> list[Part]:
    """What is left of a triangle from (row, column) on where only keys 0:keys are."""
    c0, c1 = max(column, 0), min(column + size, keys)
    if c0 >= c1:
        return []
    r0, r1 = row + c0 - column, row + c1 - column
    square = [(r0, r1, c0, c1, kind)]
    if kind == AHEAD:  # the rows before see all of these keys, those behind none
        return _cut(row, r0, c0, c1, keys) + square
    return square + _cut(r1, row + size, c0, c1, keys)
