"""One elimination that bounds many variants of a block: those whose edges have the same tables.

They differ in what single variables cost, as the ways to keep a block's parameters do.

Of such a family a block is made whose variables cost, resource by resource, what the cheapest member's do. Its table is below
every member's at the same weights w >= 0, and stays so if the least of what a member pays beside is added:

    T_v(states)  >=  T_family(states) + sum_i min_x (u_v,i(x) - u_family,i(x)) w
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.compiler.solver.chain import Array, BlockModel, Kind
from meshwright.compiler.solver.elimination import Eliminator, Indices, Tables
from meshwright.compiler.solver.weighted import Weighted


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Some variants of a kind. ``least``: eliminates the block that bounds them; ``beside``: of each variant, what its
    variables cost beyond that block's, end to end, and where each variable's begins."""

    members: tuple[int, ...]
    least: Eliminator
    beside: Mapping[int, tuple[Weighted, Indices]]

    def more(self, variant: int, weights: Array) -> float:
        """What a variant pays beside the block that bounds it, at least."""
        rows, starts = self.beside[variant]
        return float(np.minimum.reduceat(rows.at(weights), starts).sum()) if len(starts) else 0.0


def families(kind: Kind, tables: Tables) -> list[Family]:
    """The families of a kind's variants that have several members."""
    alike: dict[object, list[int]] = {}
    for v, block in enumerate(kind.variants):
        key = block.sizes, tuple((e.i, e.j, id(e.table), id(e.rows), id(e.cols)) for e in block.edges)
        alike.setdefault(key, []).append(v)
    return [_family(kind, members, tables) for members in alike.values() if len(members) > 1]


def _family(kind: Kind, members: Sequence[int], tables: Tables) -> Family:
    first = kind.variants[members[0]]
    unary = [_least([kind.variants[v].unary[i] for v in members]) for i in range(len(first.sizes))]
    block = BlockModel(first.sizes, tuple(unary), first.edges)
    beside = {v: _beside(kind.variants[v].unary, unary) for v in members}
    return Family(tuple(members), Eliminator(block, (*kind.entry, *kind.exit), tables), beside)


def _least(tables: Sequence[Array]) -> Array:
    """Entry by entry; the table itself where all are one."""
    different = list({id(table): table for table in tables}.values())
    return different[0] if len(different) == 1 else np.minimum.reduce(different)


def _beside(own: Sequence[Array], least: Sequence[Array]) -> tuple[Weighted, Indices]:
    """What the variables that cost more than the family's do cost beyond; what is forbidden in both costs nothing more."""
    differ = [i for i, (mine, theirs) in enumerate(zip(own, least, strict=True)) if mine is not theirs]
    parts = [own[i] - np.where(np.isinf(least[i]), 0.0, least[i]) for i in differ]
    starts = np.cumsum([0, *(len(part) for part in parts)], dtype=np.intp)[:-1]
    width = own[0].shape[-1] if len(own) else 0
    return Weighted(np.concatenate([np.zeros((0, width)), *parts])), starts
