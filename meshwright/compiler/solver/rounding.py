"""Whole columns from a path: between the states that pricing went through, the fastest known columns that fit.

Between fixed states positions are independent, so under a limit of the transient what is left is a knapsack with a choice for
every copy of a kind: all start with their fastest column, and go along the lower hull of (bytes, time) to leaner ones, those
first that lose least time for their bytes, until everything fits. Of many equal copies only the last one changed is not the
best there is, so that this is within a copy's share of the linear program where an integer program's search may be far off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from meshwright.compiler.solver.chain import Chain
from meshwright.compiler.solver.pricing import Column

LEVELS = 16
"""Sizes of the transient that are tried as its limit, at most."""
Place = tuple[int, int, int]
"""(kind, entry, exit)."""


def rounded(chain: Chain, path: Sequence[tuple[int, int]], known: Sequence[Column]) -> list[Column] | None:
    """A column for every position between the states of the path, within the capacity; None if the known ones do not fit.
    Positions that share a variable have it as the path's own fastest columns do."""
    places = [(kind, *pair) for kind, pair in zip(chain.sequence, path, strict=True)]
    between: dict[Place, list[Column]] = {place: [] for place in places}
    for column in known:
        place = column.kind, column.entry, column.exit
        if place in between:
            between[place].append(column)
    if not all(between.values()):
        return None
    between = _agreeing(chain, between)
    counts = {place: places.count(place) for place in between}
    sizes = sorted({column.transient for columns in between.values() for column in columns})
    if len(sizes) > LEVELS:
        sizes = sorted({sizes[-(-number * (len(sizes) - 1) // (LEVELS - 1))] for number in range(LEVELS)})
    best, chosen = math.inf, None
    for size in sizes:
        found = _within(between, counts, size, chain.capacity - chain.fixed_bytes - size)
        if found is not None:
            time = sum(column.time for columns in found.values() for column in columns)
            if time < best:
                best, chosen = time, found
    if chosen is None:
        return None
    queues = {place: iter(columns) for place, columns in chosen.items()}
    return [next(queues[place]) for place in places]


def _agreeing(chain: Chain, between: Mapping[Place, list[Column]]) -> dict[Place, list[Column]]:
    """The columns that have the shared variables as the fastest of the first position that reads each."""
    wanted: dict[int, int] = {}
    found: dict[Place, list[Column]] = {}
    for place, columns in between.items():
        shared = chain.kinds[place[0]].shared
        fitting = [one for one in columns if all(wanted.get(s, one.choices[var]) == one.choices[var] for s, var in shared)]
        fastest = min(fitting or columns, key=lambda one: (one.time, one.key))
        for s, var in shared:
            wanted.setdefault(s, fastest.choices[var])
        found[place] = [one for one in fitting or columns if all(wanted[s] == one.choices[var] for s, var in shared)] or columns
    return found


def _within(
    between: Mapping[Place, Sequence[Column]], counts: Mapping[Place, int], transient: float, room: float
) -> dict[Place, list[Column]] | None:
    """Columns of every place, one a copy, of no larger transient and within so many bytes."""
    hulls: dict[Place, list[Column]] = {}
    for place, columns in between.items():
        small = [column for column in columns if column.transient <= transient]
        if not small:
            return None
        hulls[place] = _hull(small)
    used = sum(counts[place] * hull[0].bytes_ for place, hull in hulls.items())
    found = {place: [hull[0]] * counts[place] for place, hull in hulls.items()}
    steps = sorted(
        ((slower.time - faster.time) / (faster.bytes_ - slower.bytes_), place, number)
        for place, hull in hulls.items() for number, (faster, slower) in enumerate(pairwise(hull))
    )
    for _, place, number in steps:
        if used <= room:
            break
        saved = hulls[place][number].bytes_ - hulls[place][number + 1].bytes_
        copies = min(counts[place], max(1, math.ceil((used - room) / saved)))
        found[place][:copies] = [hulls[place][number + 1]] * copies
        used -= copies * saved
    return found if used <= room else None


def _hull(columns: Sequence[Column]) -> list[Column]:
    """The columns on the lower hull of (bytes, time), the fastest first."""
    hull: list[Column] = []
    for column in sorted(columns, key=lambda one: (one.bytes_, one.time, one.key), reverse=True):
        # leaner and leaner; what is no slower than a larger one replaces it
        while hull and hull[-1].time >= column.time:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], column):
            hull.pop()
        if not hull or column.bytes_ < hull[-1].bytes_:
            hull.append(column)
    return hull


def _slope(faster: Column, slower: Column) -> float:
    return (slower.time - faster.time) / (faster.bytes_ - slower.bytes_)
