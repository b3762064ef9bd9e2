"""Products of resource tables and weight vectors, all tables of a block at once.

The solver eliminates a block for hundreds of weight vectors, and most of the tables are small. One matrix product and one
gather for all tables take a fraction of the time of a product and two gathers for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.compiler.solver.chain import Array, BlockModel


class Weighted:
    """Rows of resources [N, K]; a row with ``inf`` is ``inf`` for every weight."""

    def __init__(self, rows: Array) -> None:
        self._bad = np.asarray(np.isinf(rows).any(axis=-1))
        self._forbidden = np.flatnonzero(self._bad)
        self._rows = np.where(self._bad[:, None], 0.0, rows) if len(self._forbidden) else rows

    def at(self, weights: Array, out: Array | None = None) -> Array:
        """[N]: what each row weighs."""
        out = np.matmul(self._rows, weights, out=out)
        out[self._forbidden] = np.inf
        return out

    def of(self, rows: NDArray[np.intp]) -> Array | None:
        """[len(rows), K]: some rows; None if one is forbidden."""
        return None if self._bad[rows].any() else self._rows[rows]


class Stacked:
    """The tables of a block's edges, end to end, and what every pair of variables reads of them.

    An edge whose second variable comes first is read transposed; several edges of a pair add up. Variables with one choice are
    in no factor's scope.
    """

    def __init__(self, block: BlockModel, pairs: Sequence[tuple[int, int]]) -> None:
        tables, starts, total = {}, {}, 0
        for e in block.edges:
            if id(e.table) not in tables:
                tables[id(e.table)], starts[id(e.table)] = e.table, total
                total += e.table.shape[0] * e.table.shape[1]
        width = next((table.shape[-1] for table in tables.values()), 0)
        self._rows = Weighted(np.concatenate([np.zeros((0, width)), *(t.reshape(-1, width) for t in tables.values())]))
        reads: dict[tuple[int, int], list[tuple[int, NDArray[np.intp]]]] = {pair: [] for pair in pairs}
        for number, e in enumerate(block.edges):
            rows = np.arange(e.table.shape[0]) if e.rows is None else np.asarray(e.rows)
            cols = np.arange(e.table.shape[1]) if e.cols is None else np.asarray(e.cols)
            where = starts[id(e.table)] + rows[:, None] * e.table.shape[1] + cols[None, :]
            reads[min(e.i, e.j), max(e.i, e.j)].append((number, (where if e.i < e.j else where.T).ravel()))
        first = [several[0] for several in reads.values()]  # of every pair, end to end; then what else some pairs read
        more = [(n, one) for n, several in enumerate(reads.values()) for one in several[1:]]
        every = [*first, *(one for _, one in more)]
        self._where = np.concatenate([np.zeros(0, dtype=np.intp), *(where for _, where in every)])
        ends = [0, *itertools.accumulate(len(where) for _, where in every)]
        cuts = [slice(*both) for both in itertools.pairwise(ends)]
        self._once = ends[len(first)]
        self._more = [(cuts[n], cuts[len(first) + number]) for number, (n, _) in enumerate(more)]
        begins = dict(zip((number for number, _ in every), ends, strict=False))
        low, high = [min(e.i, e.j) for e in block.edges], [max(e.i, e.j) for e in block.edges]
        self._low, self._high = np.array(low, dtype=np.intp), np.array(high, dtype=np.intp)
        self._begins = np.array([begins[number] for number in range(len(block.edges))], dtype=np.intp)
        self._widths = np.array([block.sizes[v] for v in high], dtype=np.intp)

    def at(self, weights: Array, out: Array) -> Array:
        """What every pair of variables weighs in each of its pairs of choices, end to end in the order of the pairs."""
        if self._once:
            read = self._rows.at(weights)
            np.take(read, self._where[: self._once], out=out, mode="clip")  # else numpy makes a copy first
            for cut, where in self._more:
                out[cut] += read[self._where[where]]
        return out

    def of(self, choices: NDArray[np.intp]) -> Array | None:
        """[edges, K]: the resources of each edge for an assignment; None if one is forbidden."""
        return self._rows.of(self._where[self._begins + choices[self._low] * self._widths + choices[self._high]])
