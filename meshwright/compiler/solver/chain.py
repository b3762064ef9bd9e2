"""A chain of blocks as numbers: what the solver reads and what it returns.

A *block* is a factor graph: variables with a finite number of choices, a resource vector of length K for every choice
(unary) and for every pair of choices along an edge. A *kind* is a block in several variants (say: ZeRO level x recomputation)
whose boundary variables couple it to its neighbours; a *chain* is a sequence of kinds, equal kinds repeating:

    minimize    fixed_time + sum_p max_r time_rows[r] @ c_p
    subject to  fixed_bytes + sum_p bytes_row @ c_p + max_p max_m transient_rows[m] @ c_p <= capacity
                c_p = variant_costs[v_p] + sum_i unary_i[x_i] + sum_e table_e[rows[x_i], cols[x_j]]
                exit state of p = entry state of p + 1;  shared variables equal at every position that reads them

The maximum over rows is convex: with rows such as compute + critical and overlappable communication, only what stays exposed
counts. The transients are those of several moments of a position, of which the worst counts; one of them may take away what
``bytes_row`` counts, up to twice. What the K resources mean is the caller's. Every entry is >= 0; ``inf`` forbids a choice or
a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """Resources [n, m, K] of every pair of choices of variables ``i`` and ``j``.

    With ``rows`` [n_i] and ``cols`` [n_j] choice a of i and choice b of j cost ``table[rows[a], cols[b]]``: edges between many
    variables share one table (the same array object) over the distinct states of a value.
    """

    i: int
    j: int
    table: Array
    rows: NDArray[np.intp] | None = None
    cols: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of choices of i and of j that the edge is written for."""
        n = self.table.shape[0] if self.rows is None else len(self.rows)
        m = self.table.shape[1] if self.cols is None else len(self.cols)
        return n, m

    def cost(self, a: int, b: int) -> Array:
        """Resource vector [K] of the pair of choices."""
        row = a if self.rows is None else int(self.rows[a])
        col = b if self.cols is None else int(self.cols[b])
        out: Array = self.table[row, col]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class BlockModel:
    """A factor graph with vector costs: ``sizes`` choices per variable, ``unary`` [n_i, K] each, and ``edges``.

    An edge may be given as ``(i, j, table)``; several edges between the same two variables add up.
    """

    sizes: tuple[int, ...]
    unary: tuple[Array, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        """Normalize triples to edges and check every shape."""
        edges = tuple(e if isinstance(e, Edge) else Edge(e[0], e[1], np.asarray(e[2], dtype=np.float64)) for e in self.edges)
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "unary", tuple(np.asarray(u, dtype=np.float64) for u in self.unary))
        if len(self.unary) != len(self.sizes):
            raise ValueError(f"block with {len(self.sizes)} variables got {len(self.unary)} unary tables: give one each")
        for v, (size, unary) in enumerate(zip(self.sizes, self.unary, strict=True)):
            if size < 1 or unary.ndim != 2 or unary.shape[0] != size:
                raise ValueError(f"variable {v} has {size} choices but a unary table of shape {unary.shape}: want [{size}, K]")
        for e in edges:
            if e.i == e.j or not (0 <= e.i < len(self.sizes) and 0 <= e.j < len(self.sizes)):
                raise ValueError(f"edge ({e.i}, {e.j}) does not join two different variables of {len(self.sizes)}")
            if e.table.ndim != 3 or e.shape != (self.sizes[e.i], self.sizes[e.j]):
                want = (self.sizes[e.i], self.sizes[e.j])
                raise ValueError(f"edge ({e.i}, {e.j}) is written for {e.shape} choices, the variables have {want}")

    def cost(self, choices: Sequence[int]) -> Array:
        """Resource vector [K] of one assignment."""
        parts = [u[a] for u, a in zip(self.unary, choices, strict=True)]
        parts += [e.cost(choices[e.i], choices[e.j]) for e in self.edges]
        return np.sum(parts, axis=0) if parts else np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A block in its variants, with the resources [K] of choosing each, and its coupling.

    ``entry`` and ``exit`` are the boundary variables: the same indices and sizes in every variant; several count as one
    product state, the last running fastest. ``shared`` pairs (global variable, variable here).
    """

    variants: tuple[BlockModel, ...]
    variant_costs: tuple[Array, ...]
    entry: tuple[int, ...] = ()
    exit: tuple[int, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Check that the variants agree on the coupling variables."""
        object.__setattr__(self, "variant_costs", tuple(np.asarray(c, dtype=np.float64) for c in self.variant_costs))
        if not self.variants or len(self.variants) != len(self.variant_costs):
            raise ValueError(f"a kind needs variants with one cost each, got {len(self.variants)}, {len(self.variant_costs)}")
        for var in {*self.entry, *self.exit, *(v for _, v in self.shared)}:
            if len({b.sizes[var] for b in self.variants}) != 1:
                raise ValueError(f"coupling variable {var} has another number of choices in another variant of the kind")

    def states(self, boundary: tuple[int, ...]) -> int:
        """Number of product states of boundary variables."""
        return int(np.prod([self.variants[0].sizes[v] for v in boundary], dtype=np.int64))

    def state(self, boundary: tuple[int, ...], choices: Sequence[int]) -> int:
        """Product state of an assignment at a boundary."""
        index = 0
        for v in boundary:
            index = index * self.variants[0].sizes[v] + choices[v]
        return index


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The whole problem; see the formula at the head of this file. Memory and time units are the caller's."""

    kinds: tuple[Kind, ...]
    sequence: tuple[int, ...]
    shared_sizes: tuple[int, ...]
    time_rows: Array
    bytes_row: Array
    transient_rows: Array
    capacity: float = float("inf")
    fixed_bytes: float = 0.0
    fixed_time: float = 0.0

    def __post_init__(self) -> None:
        """Check shapes, signs and that neighbours agree on their boundary."""
        for name in ("time_rows", "bytes_row", "transient_rows"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        object.__setattr__(self, "transient_rows", np.atleast_2d(self.transient_rows))  # one may be given as it is
        k = self.time_rows.shape[-1]
        rows = self.time_rows, self.transient_rows
        if any(one.ndim != 2 or not len(one) for one in rows) or {self.bytes_row.shape, rows[1].shape[1:]} != {(k,)}:
            raise ValueError(f"time_rows must be [R, K] with R >= 1, transient_rows [M, K] with M >= 1, bytes_row [K]; K = {k}")
        if not self.sequence or not all(0 <= p < len(self.kinds) for p in self.sequence):
            raise ValueError("the sequence must name at least one position, each by the index of its kind")
        seen: dict[int, None] = {}
        for array in (self.time_rows, self.bytes_row, 2 * self.bytes_row + self.transient_rows, *_arrays(self.kinds)):
            if id(array) not in seen:
                seen[id(array)] = None
                if array.shape[-1] != k:
                    raise ValueError(f"a resource table of shape {array.shape} does not end in K = {k} resources")
                if not (array >= 0).all():
                    raise ValueError("resources and weights must be >= 0 (inf forbids a choice)")
        for a, b in zip(self.sequence, self.sequence[1:], strict=False):
            left, right = self.kinds[a], self.kinds[b]
            if left.states(left.exit) != right.states(right.entry):
                raise ValueError(
                    f"kind {a} leaves with {left.states(left.exit)} states, kind {b} enters with {right.states(right.entry)}"
                )
        for kind in self.kinds:
            for s, var in kind.shared:
                if kind.variants[0].sizes[var] != self.shared_sizes[s]:
                    raise ValueError(f"shared variable {s} has {self.shared_sizes[s]} choices, variable {var} another number")

    def within(self, capacity: float) -> Chain:
        """The same chain with another capacity, whose arrays were checked."""
        found = copy(self)
        object.__setattr__(found, "capacity", capacity)
        return found

    def time(self, cost: Array) -> float:
        """Time of one position with resource vector [K]."""
        return float((self.time_rows @ cost).max())

    def transient(self, cost: Array) -> float:
        """Bytes of one position at its worst moment, beside what ``bytes_row`` counts."""
        return max(0.0, float((self.transient_rows @ cost).max()))


def _arrays(kinds: Sequence[Kind]) -> list[Array]:
    out: list[Array] = []
    for kind in kinds:
        out += kind.variant_costs
        for block in kind.variants:
            out += [*block.unary, *(e.table for e in block.edges)]
    return out


@dataclass(frozen=True, slots=True)
class Solution:
    """A feasible choice for every position, with its certificate.

    ``bytes_`` counts the fixed bytes, not the transient; both together are within the capacity. ``bound <= optimum <= time``
    and ``gap = (time - bound) / time``. ``status`` is "optimal" (within the demanded gap), "gap" (nothing left to try) or
    "time_limit". ``seconds`` are by phase.
    """

    variants: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    time: float
    bytes_: float
    transient: float
    bound: float
    gap: float
    columns: int
    iterations: int
    status: str
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)


class Infeasible(ValueError):  # noqa: N818 - the field's word for it
    """No assignment is within the capacity.

    ``bound`` is a certified lower bound of the memory that any assignment needs, ``least`` the least memory found (bytes_ +
    transient), reached by ``solution`` (None if forbidden choices alone leave nothing).
    """

    def __init__(self, message: str, bound: float, least: float, solution: Solution | None) -> None:
        super().__init__(message)
        self.bound = bound
        self.least = least
        self.solution = solution


class Beaten(Exception):  # noqa: N818 - not an error: an answer
    """No assignment is faster, by more than the gap, than a solution known elsewhere. ``bound``: of the time of any."""

    def __init__(self, bound: float) -> None:
        super().__init__(f"any assignment takes at least {bound:.6g}")
        self.bound = bound


def evaluate(chain: Chain, variants: Sequence[int], choices: Sequence[Sequence[int]]) -> tuple[float, float, float]:
    """(time, bytes, transient) of an assignment, counted from the tables alone.

    Raises ValueError if neighbours disagree on a boundary state or positions on a shared variable.
    """
    time, bytes_, transient = chain.fixed_time, chain.fixed_bytes, 0.0
    shared: dict[int, int] = {}
    known: dict[tuple[int, int, tuple[int, ...]], Array] = {}  # positions of a kind mostly choose alike
    last: int | None = None
    for p, (k, v, x) in enumerate(zip(chain.sequence, variants, choices, strict=True)):
        kind = chain.kinds[k]
        if last is not None and kind.state(kind.entry, x) != last:
            raise ValueError(f"position {p} enters in state {kind.state(kind.entry, x)}, its neighbour leaves in {last}")
        last = kind.state(kind.exit, x)
        for s, var in kind.shared:
            if shared.setdefault(s, x[var]) != x[var]:
                raise ValueError(f"position {p} has shared variable {s} at {x[var]}, others at {shared[s]}")
        key = (k, v, tuple(x))
        if key not in known:
            known[key] = kind.variants[v].cost(x) + kind.variant_costs[v]
        cost = known[key]
        time += chain.time(cost)
        bytes_ += float(chain.bytes_row @ cost)
        transient = max(transient, chain.transient(cost))
    return time, bytes_, transient
