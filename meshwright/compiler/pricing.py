"""Pricing of a chain at given multipliers: the exact minimum over all copies, and the columns that reach it.

With the maximum over time rows and the memory row moved into the objective by multipliers

    alpha[k, v] in the simplex over rows,   lambda >= 0,   nu[k] >= 0 with sum_k copies_k * nu_k <= lambda

the chain separates into blocks coupled by boundary states only. A block of kind k in variant v is eliminated for the weights
``alpha[k, v] @ time_rows + lambda * bytes_row + nu[k] * transient_row`` (once per kind, however many copies), its kind's table
[entry states, exit states] is the minimum over variants, and dynamic programming over the boundary states of the sequence gives
the minimum of the whole (``Pricer.price``). Minus ``lambda * available memory`` it bounds the chain's time from below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.compiler.chain import Array, Chain, Kind
from meshwright.compiler.elimination import Eliminated, Eliminator, Tables

Group = tuple[int, int]
"""(kind, variant)."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One way to run one position of a kind: an assignment with its boundary states, resources [K] and exact time."""

    kind: int
    variant: int
    choices: tuple[int, ...]
    entry: int
    exit: int
    cost: Array
    time: float
    bytes_: float
    transient: float

    @property
    def key(self) -> tuple[int, int, tuple[int, ...]]:
        """Identity and order of columns."""
        return self.kind, self.variant, self.choices


@dataclass(frozen=True, slots=True, eq=False)
class Multipliers:
    """A point of the dual: ``alpha`` [R] per group, ``memory`` (lambda), ``transient`` (nu) per kind."""

    alpha: Mapping[Group, Array]
    memory: float
    transient: tuple[float, ...]
    rho: float = 1.0

    def weights(self, chain: Chain, group: Group) -> Array:
        """Weight vector [K] of a group."""
        out: Array = self.rho * (self.alpha[group] @ chain.time_rows)
        return out + self.memory * chain.bytes_row + self.transient[group[0]] * chain.transient_row


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """What pricing found: the chain's least weighted cost ``value``, per kind the tables of its variants, and slacks.

    ``tables[k]`` is [variants, entry, exit]; ``slack[k]`` of the same shape is how much a copy of the kind in that variant and
    between those states adds to ``value`` at least, at the best position for it. ``path`` has (entry, exit) per position.
    """

    value: float
    tables: tuple[Array, ...]
    slack: tuple[Array, ...]
    path: tuple[tuple[int, int], ...]
    results: Mapping[Group, Eliminated]


class Pricer:
    """Eliminators of all groups of a chain, planned once."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        tables = Tables()
        self._blocks = {
            (k, v): Eliminator(block, (*kind.entry, *kind.exit), tables)
            for k, kind in enumerate(chain.kinds)
            for v, block in enumerate(kind.variants)
        }
        self.copies = tuple(chain.sequence.count(k) for k in range(len(chain.kinds)))
        self._expand = tuple(_expansion(kind) for kind in chain.kinds)
        self.groups = tuple(g for g in self._blocks if self.copies[g[0]])

    @property
    def largest(self) -> int:
        """Entries of the largest table that any elimination makes."""
        return max(b.plan.largest for b in self._blocks.values())

    @property
    def work(self) -> int:
        """Table entries that one pricing goes through."""
        return sum(self._blocks[g].plan.work for g in self.groups)

    def price(self, at: Multipliers, fixed: Mapping[int, int] | None = None) -> Priced:
        """Minimum of the weighted chain; ``fixed`` holds shared variables at a choice, the others are each position's own."""
        results: dict[Group, Eliminated] = {}
        tables: list[Array] = []
        for k, kind in enumerate(self.chain.kinds):
            if not self.copies[k]:
                tables.append(np.full((len(kind.variants), kind.states(kind.entry), kind.states(kind.exit)), np.inf))
                continue
            held = {var: fixed[s] for s, var in kind.shared if s in (fixed or {})} if fixed else {}
            stack = []
            for v in range(len(kind.variants)):
                weights = at.weights(self.chain, (k, v))
                done = self._blocks[k, v].table(weights, held)
                results[k, v] = done
                stack.append(self._boundary(k, done, held) + float(kind.variant_costs[v] @ weights))
            tables.append(np.stack(stack))
        return self._chain(tables, results)

    def _boundary(self, k: int, done: Eliminated, held: Mapping[int, int]) -> Array:
        """Table over kept variables -> [entry, exit]; a held boundary variable forbids its other states."""
        table = done.table
        for axis, v in enumerate(done.plan.keep):
            if v in held:
                wide = np.full(
                    (*table.shape[:axis], self.chain.kinds[k].variants[0].sizes[v], *table.shape[axis + 1 :]), np.inf
                )
                wide[(slice(None),) * axis + (slice(held[v], held[v] + 1),)] = table
                table = wide
        index, clash = self._expand[k]
        out = np.asarray(table[index]) if index else np.broadcast_to(table, clash.shape).copy()
        out[clash] = np.inf
        return out

    def _chain(self, tables: list[Array], results: dict[Group, Eliminated]) -> Priced:
        sequence = self.chain.sequence
        best = [t.min(axis=0) for t in tables]
        n = len(sequence)
        forward = [np.zeros(best[sequence[0]].shape[0])]
        for k in sequence:
            forward.append((forward[-1][:, None] + best[k]).min(axis=0))
        backward = [np.zeros(best[sequence[-1]].shape[1])]
        for k in reversed(sequence):
            backward.append((best[k] + backward[-1]).min(axis=1))
        backward.reverse()
        value = float(backward[0].min())
        through: list[Array | None] = [None] * len(tables)
        for p, k in enumerate(sequence):
            here = forward[p][:, None] + backward[p + 1]
            known = through[k]
            through[k] = here if known is None else np.minimum(known, here)
        slack = tuple(
            np.full_like(t, np.inf) if h is None or not np.isfinite(value) else t + h - value
            for t, h in zip(tables, through, strict=True)
        )
        path = []
        state = int(backward[0].argmin())
        for p in range(n):
            leave = int((best[sequence[p]][state] + backward[p + 1]).argmin())
            path.append((state, leave))
            state = leave
        return Priced(value, tuple(tables), slack, tuple(path), results)

    def columns(self, priced: Priced, wanted: Mapping[Group, list[tuple[int, int]]]) -> list[Column]:
        """The minimizers of groups between (entry, exit) states, with their true resources."""
        out = []
        for (k, v), pairs in sorted(wanted.items()):
            pairs = [pair for pair in pairs if np.isfinite(priced.tables[k][(v, *pair)])]
            if not pairs:
                continue
            kind = self.chain.kinds[k]
            at = self._blocks[k, v].plan.keep
            states = np.zeros((len(pairs), len(at)), dtype=np.intp)
            entries, exits = np.array(pairs, dtype=np.intp).T
            for boundary, index in ((kind.entry, entries), (kind.exit, exits)):
                if boundary:
                    sizes = [kind.variants[0].sizes[u] for u in boundary]
                    for u, column in zip(boundary, np.unravel_index(index, sizes), strict=True):
                        states[:, at.index(u)] = column
            for (entry, leave), row in zip(pairs, priced.results[k, v].assignments(states), strict=True):
                out.append(self._column(k, v, entry, leave, tuple(int(a) for a in row)))
        return out

    def _column(self, k: int, v: int, entry: int, leave: int, choices: tuple[int, ...]) -> Column:
        chain, kind = self.chain, self.chain.kinds[k]
        cost = kind.variants[v].cost(choices) + kind.variant_costs[v]
        bytes_, transient = float(chain.bytes_row @ cost), float(chain.transient_row @ cost)
        return Column(k, v, choices, entry, leave, cost, chain.time(cost), bytes_, transient)


def _expansion(kind: Kind) -> tuple[tuple[NDArray[np.intp], ...], NDArray[np.bool_]]:
    """Index of the kept table for every (entry, exit) state, and where the two contradict each other (a common variable)."""
    sizes = kind.variants[0].sizes
    shape = (kind.states(kind.entry), kind.states(kind.exit))
    clash = np.zeros(shape, dtype=bool)
    at: dict[int, NDArray[np.intp]] = {}
    for axis, boundary in enumerate((kind.entry, kind.exit)):
        if not boundary:
            continue
        choices = np.unravel_index(np.arange(shape[axis]), [sizes[v] for v in boundary])
        for v, column in zip(boundary, choices, strict=True):
            spread = np.broadcast_to(column[:, None] if axis == 0 else column[None, :], shape)
            if v in at:
                clash |= at[v] != spread
            else:
                at[v] = spread
    return tuple(at[v] for v in sorted(at)), clash
