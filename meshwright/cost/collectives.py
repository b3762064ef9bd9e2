"""What a collective costs on the groups of a mesh axis: latency-bandwidth prices on the topology.

Every algorithm moves S bytes (the full buffer of the group on one rank) in

    T(S) = b S + l + 2 sqrt(k b l S)                  seconds

b: seconds per byte, l: the latencies of the hops that follow each other, and the last term what filling the pipeline of
chunks costs (k = 1 would be the optimally chunked pipeline, (sqrt(b S) + sqrt(l))^2, k = 0 none; NCCL's all-reduces between
1 MB and 16 GB in ``hardware.csv`` give k = 0.18). A collective takes the algorithm that is faster at S.

A group has P ranks on n nodes, d on each. With W the bandwidth of one device into its node's fabric (a ring's share of it
w), R the in-switch reduction's, X the bandwidth with which the group leaves a node, hops of a_l in the node, a_x out,
and of h_l and h_x where a ring hands on whole chunks:

    all-gather, reduce-scatter   ring     b = (P-1)/P max(1/w, 1/X)      l = (n-1) h_x + (P-n) h_l
    all-reduce                   ring     2 (P-1)/P max(1/w, 1/X)        l = 2 (n-1) a_x + 2 (P-n) a_l
                                 tree     b = max(in node, 2 (n-1)/n / (0.85 X))   l = 2 log2(n) a_x + 2 (d-1) a_l
                                          in node: 2 (d-1)/d / w, or (d+1)/d / R where the switch reduces
    all-to-all                            b = max((d-1)/P / w, (P-d)/P d / X)      l = log2(n) a_x + log2(d) a_l
    broadcast                             b = max(1/w, 1/X)              l = log2(n) a_x + log2(d) a_l
    point to point                        b = 1/w, or d/X across nodes   l = a_l or a_x

and a start of l0 for each. All groups of the axes communicate at the same time and share their nodes' NICs evenly, so
X = d x (NICs of the node) / (its ranks) x (2 / n)^congestion: what two nodes reach of each other's links, more reach less of,
for paths through the switches collide. In a node whose devices have a link to every other ("mesh") w is that of d - 1 links. In
the limit of large S the traffic is the textbook's: 2 S (P-1)/P for all-reduce,
S (P-1)/P for all-gather and reduce-scatter. On a torus the rings run along every dim the group extends over, both ways
where it closes: w is the sum, and groups that interleave on the same links share them.

Sources: NCCL's algorithms (ring, double binary tree, NVLS); Thakur et al. 2005 for the closed forms; the factor 0.85 of the
tree is measured / ideal on GB200 NVL4 and NVL8 over InfiniBand and on AWS p4de (``hardware.csv``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, overload

import numpy as np
import sympy

from meshwright.cost.cluster import Cluster, ClusterError, Island, balanced
from meshwright.cost.tables import MeasuredCollective, falls
from meshwright.ir.mesh import Mesh

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
ACROSS, WITHIN = "/", "%"
"""Before a number d, behind the name of a collective: it runs among every d-th rank of a group, or among d neighbours of it.
An all-to-all in two hops is ``all_to_all/8`` between nodes of 8, then ``all_to_all%8`` within each."""
FILL, TREE = 0.18, 0.85
"""Both measured, see above: of the pipeline of chunks, and of what a tree reaches between nodes."""
_NEVER = 1e-30  # bytes/s of a way that is not there

S, P, N, D = sympy.symbols("S P n d", positive=True)
W, R, X = sympy.symbols("w R X", positive=True)
A_L, A_X, L0, H_L, H_X = sympy.symbols("a_l a_x l0 h_l h_x", nonnegative=True)
SYMBOLS = (P, N, D, W, R, X, A_L, A_X, L0, H_L, H_X)
"""In the order of ``GroupLayout.numbers``."""


@dataclass(frozen=True)
class Algorithm:
    """One way to run a collective: seconds per byte of the full buffer, and latency in seconds."""

    name: str
    per_byte: sympy.Expr
    latency: sympy.Expr

    @property
    def seconds(self) -> sympy.Expr:
        """T(S)."""
        fill = 2 * sympy.sqrt(sympy.Float(FILL) * self.per_byte * self.latency * S)
        return self.per_byte * S + self.latency + fill


@dataclass(frozen=True)
class GroupLayout:
    """Where a group lies: ``ranks`` on ``nodes``, ``per_node`` on each; bandwidths in bytes/s, latencies in seconds."""

    ranks: int
    nodes: int
    per_node: int
    ring: float
    reduce: float
    out: float
    link_latency: float
    out_latency: float
    start: float
    ring_hop: float
    ring_out: float

    @property
    def numbers(self) -> tuple[float, ...]:
        """In the order of the formulas' symbols."""
        return (
            self.ranks, self.nodes, self.per_node, self.ring, self.reduce, self.out,
            self.link_latency, self.out_latency, self.start, self.ring_hop, self.ring_out,
        )


def traffic(kind: str) -> sympy.Expr:
    """Bytes that each rank sends, in S and P.

    >>> traffic("all_reduce"), traffic("all_gather")
    (2*S*(P - 1)/P, S*(P - 1)/P)
    """
    _check(kind)
    once = S * (P - 1) / P
    return {"all_reduce": 2 * once, "broadcast": S, "p2p": S}.get(kind, once)


@lru_cache(maxsize=len(COLLECTIVES))
def algorithms(kind: str) -> tuple[Algorithm, ...]:
    """The ways to run a collective, as sympy expressions."""
    _check(kind)
    ring = (P - 1) / P * sympy.Max(1 / W, 1 / X)
    hops = (N - 1) * A_X + (P - N) * A_L
    depth = sympy.log(N, 2) * A_X + sympy.log(D, 2) * A_L
    if kind in ("all_gather", "reduce_scatter"):
        return (Algorithm("ring", ring, L0 + (N - 1) * H_X + (P - N) * H_L),)
    if kind == "all_reduce":
        out = 2 * (N - 1) / N / (TREE * X)
        chain = Algorithm("tree", sympy.Max(2 * (D - 1) / D / W, out), L0 + 2 * sympy.log(N, 2) * A_X + 2 * (D - 1) * A_L)
        switch = Algorithm("switch", sympy.Max((D + 1) / D / R, out), L0 + 2 * depth)
        return Algorithm("ring", 2 * ring, L0 + 2 * hops), chain, switch
    if kind == "all_to_all":
        return (Algorithm("direct", sympy.Max((D - 1) / P / W, (P - D) / P * D / X), L0 + depth),)
    if kind == "broadcast":
        return (Algorithm("chain", sympy.Max(1 / W, 1 / X), L0 + depth),)
    across = sympy.Heaviside(N - sympy.Rational(3, 2), 0)
    return (Algorithm("direct", (1 - across) / W + across * D / X, L0 + (1 - across) * A_L + across * A_X),)


def expression(kind: str) -> sympy.Expr:
    """Seconds of the fastest algorithm, in S, the group's P, n, d and the topology's w, R, X, a_l, a_x, l0."""
    return sympy.Min(*(algorithm.seconds for algorithm in algorithms(kind)))


@lru_cache(maxsize=len(COLLECTIVES))
def _numeric(kind: str) -> Callable[..., Any]:
    """(P, n, d, w, R, X, a_l, a_x, l0, h_l, h_x) -> ((seconds per byte, latency) of each algorithm); arrays broadcast."""
    pairs = [(algorithm.per_byte, algorithm.latency) for algorithm in algorithms(kind)]
    return sympy.lambdify(SYMBOLS, pairs, modules="numpy", cse=True)  # type: ignore[no-any-return]


class Network:
    """Prices of collectives over the groups of a mesh's axes, the ranks of the mesh filling the cluster in order.

    >>> network = Network(Cluster.parse("h100:2x8"), Mesh.of(dp=2, tp=8))
    >>> network.seconds("all_reduce", "tp", 1e9) < network.seconds("all_reduce", "dp", 1e9)
    True
    """

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        if mesh.world > cluster.world:
            raise ClusterError(f"mesh {mesh} has {mesh.world} ranks, cluster {cluster} only {cluster.world} devices")
        self.cluster, self.mesh = cluster, mesh
        self._terms: dict[tuple[str, frozenset[str]], tuple[tuple[float, float], ...]] = {}
        self._ratios: dict[tuple[str, frozenset[str]], tuple[Sequence[float], Sequence[float]]] = {}
        self._layouts: dict[tuple[frozenset[str], str], tuple[GroupLayout, ...]] = {}

    @overload
    def seconds(self, kind: str, axes: str | tuple[str, ...], bytes_: float) -> float: ...
    @overload
    def seconds(self, kind: str, axes: str | tuple[str, ...], bytes_: np.ndarray) -> np.ndarray: ...
    def seconds(self, kind: str, axes: str | tuple[str, ...], bytes_: float | np.ndarray) -> float | np.ndarray:
        """Seconds of one collective of ``kind`` over ``axes`` together; ``bytes_`` is the group's full buffer on one rank
        (what an all-gather returns; what the others read). Groups of one rank cost nothing."""
        best: Any = None
        for per_byte, latency in self.terms(kind, axes):
            stream = per_byte * bytes_
            if isinstance(bytes_, np.ndarray):
                now = stream + latency + 2 * np.sqrt(FILL * latency * stream)
                best = now if best is None else np.minimum(best, now)
            else:
                now = stream + latency + 2 * math.sqrt(FILL * latency * stream)
                best = now if best is None or now < best else best
        x, y = self._measured(kind, axes)
        if not len(x):
            return best  # type: ignore[no-any-return]
        return best * np.exp(np.interp(np.log(np.maximum(bytes_, 1.0)), x, y))  # type: ignore[no-any-return]

    def _measured(self, kind: str, axes: str | tuple[str, ...]) -> tuple[Sequence[float], Sequence[float]]:
        """(logs of bytes, logs of measured over formula) by which a collective is scaled: those of the node's table of the
        group that is most like this one, in a node or across; nothing where it has none of the kind."""
        names = frozenset((axes,) if isinstance(axes, str) else axes)
        key = (kind, names)
        if key not in self._ratios:
            self._ratios[key] = self._ratio(kind, names)
        return self._ratios[key]

    def _ratio(self, kind: str, names: frozenset[str]) -> tuple[Sequence[float], Sequence[float]]:
        island = self.cluster.island
        whole, hop = parted(kind)
        tables = [table for table in island.node.measured if table.kind == whole]
        if not tables or self.mesh.size(names) == 1:
            return (), ()
        own = max(group_layouts(island, self.mesh, names, hop), key=lambda scope: scope.nodes)

        def unlike(table: MeasuredCollective) -> tuple[bool, float, float]:
            apart = 0.0 if island.torus else abs(math.log(table.nodes / own.nodes))
            across = not island.torus and (table.nodes > 1) != (own.nodes > 1)
            return across, abs(math.log(table.ranks / own.ranks)), apart

        like = min(tables, key=unlike)
        if unlike(like)[0]:
            return (), ()
        formula = Network(Cluster((replace(island, node=replace(island.node, measured=())),)), self.mesh)
        same = bool(island.torus) and like.ranks == own.ranks  # in a torus the price of a group is that of its place
        rows = sorted(row for table in tables if (table.ranks, unlike(table)) == (like.ranks, unlike(like))
                      for row in _measured(table, island, partial(formula.seconds, kind, tuple(names)) if same else None))
        return [log for log, _ in rows], [math.log(ratio) for _, ratio in rows]

    def terms(self, kind: str, axes: str | tuple[str, ...]) -> tuple[tuple[float, float], ...]:
        """(seconds per byte, latency seconds) of every algorithm: worst group of these axes."""
        names = frozenset((axes,) if isinstance(axes, str) else axes)
        key = (kind, names)
        if key not in self._terms:
            _check(parted(kind)[0])
            self._terms[key] = self._price(*parted(kind), names)
        return self._terms[key]

    def _price(self, kind: str, hop: str, names: frozenset[str]) -> tuple[tuple[float, float], ...]:
        if self.mesh.size(names) == 1:
            return ((0.0, 0.0),)
        if (names, hop) not in self._layouts:
            self._layouts[names, hop] = group_layouts(self.cluster.island, self.mesh, names, hop)
        found = self._layouts[names, hop]
        priced = [tuple((float(b), float(delay)) for b, delay in _numeric(kind)(*scope.numbers)) for scope in found]
        if self.cluster.island.torus and kind == "all_to_all":
            exchange = _torus_exchange(self.cluster.island, self.mesh, names, hop)
            priced = [tuple((exchange, delay) for _, delay in terms) for terms in priced]
        return max(priced, key=lambda terms: min(b * 1e8 + delay for b, delay in terms))


def _measured(
    table: MeasuredCollective, island: Island, formula: Callable[[float], float] | None = None
) -> list[tuple[float, float]]:
    """(logarithm of bytes, measured over formula) of a table; ``formula``: seconds of so many bytes, if not those of a group
    that is alone."""
    if formula is None:
        dims = balanced(table.ranks, len(island.torus)) if island.torus else ()
        plain = replace(island.node, measured=())
        alone = Cluster((replace(island, node=plain, nodes=table.nodes, per_node=table.ranks // table.nodes, torus=dims),))
        formula = partial(Network(alone, Mesh.of(a=table.ranks)).seconds, table.kind, "a")
    return [(math.log(b), s / formula(b)) for b, s in zip(table.bytes_, table.seconds, strict=True)]


def unevenly_measured(island: Island) -> float:
    """By how much more of its share than a smaller message a large one takes at most, by the node's tables; at least 1."""
    alike: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for table in island.node.measured:
        alike.setdefault((table.kind, table.ranks, table.nodes), []).extend(_measured(table, island))
    return max(map(falls, alike.values()), default=1.0)


def parted(kind: str) -> tuple[str, str]:
    """A collective and the hop of it that runs.

    >>> parted("all_to_all%8"), parted("all_reduce")
    (('all_to_all', '%8'), ('all_reduce', ''))
    """
    at = next((at for at, letter in enumerate(kind) if letter in (ACROSS, WITHIN)), len(kind))
    return kind[:at], kind[at:]


def neighbours(island: Island, mesh: Mesh, axes: Sequence[str]) -> int:
    """How many ranks of each group of these axes, one after the other, are on a node; 1 if that differs between nodes, or if
    all of a group are on one."""
    groups = _groups(mesh, frozenset(axes))
    boxes = np.zeros_like(groups) if island.torus else groups // island.per_node
    near = int((boxes[0] == boxes[0, 0]).sum())
    whole = groups.shape[1]
    if near == whole or whole % near:
        return 1
    runs = boxes.reshape(len(groups), -1, near)
    fits = (runs == runs[:, :, :1]).all() and (runs[:, 1:, 0] != runs[:, :-1, 0]).all()
    return near if fits else 1


def group_layouts(island: Island, mesh: Mesh, names: frozenset[str], hop: str = "") -> tuple[GroupLayout, ...]:
    """Every different way in which the groups of these axes lie on the nodes (usually one); ``hop``: those of them among which
    one runs."""
    groups = _groups(mesh, names, hop)
    if island.torus:
        return (_torus_layout(island, groups),)
    node, used = island.node, min(island.per_node, mesh.world)
    boxes = np.sort(groups // island.per_node, axis=1)
    shares = island.nics * node.nic_bandwidth * node.nic_efficiency / used
    result, rows = [], boxes - boxes[:, :1]
    for row in np.unique(rows, axis=0) if (rows != rows[0]).any() else rows[:1]:
        _, counts = np.unique(row, return_counts=True)
        spread, here = len(counts) > 1, int(counts.max())
        reduce = node.link_bandwidth * node.reduce_efficiency
        links = max(1, here - 1) if node.kind == "mesh" else 1
        reached = shares * float(counts.min()) * (2 / len(counts)) ** node.congestion if spread else math.inf
        result.append(
            GroupLayout(
                ranks=len(row), nodes=len(counts), per_node=here,
                ring=node.link_bandwidth * node.ring_efficiency * links, reduce=reduce or _NEVER,
                out=max(reached, _NEVER),
                link_latency=node.link_latency, out_latency=node.nic_latency, start=node.start_latency,
                ring_hop=max(node.ring_hop, node.link_latency), ring_out=max(node.ring_out, node.nic_latency),
            )
        )
    return tuple(dict.fromkeys(result))


def _groups(mesh: Mesh, names: frozenset[str], hop: str = "") -> np.ndarray:
    """[number of groups, ranks of a group]."""
    ranks = np.arange(mesh.world).reshape(mesh.sizes)
    last = [index for index, axis in enumerate(mesh.axes) if axis in names]
    first = [index for index in range(len(mesh.axes)) if index not in last]
    groups = np.transpose(ranks, first + last).reshape(-1, mesh.size(names))
    if not hop:
        return groups
    near = int(hop[1:])
    runs = groups.reshape(len(groups), -1, near)
    return runs.reshape(-1, near) if hop[0] == WITHIN else runs.transpose(0, 2, 1).reshape(-1, runs.shape[1])


def _extents(island: Island, group: np.ndarray) -> list[tuple[int, int, bool]]:
    """For every torus dim the group extends over: (ranks along it, distance between them, whether the ring closes)."""
    result = []
    for size, at in zip(island.torus, np.unravel_index(group, island.torus), strict=True):
        places = np.unique(at)
        if len(places) > 1:
            gap = int(np.diff(places).min())
            result.append((len(places), gap, len(places) * gap == size))
    return result


def _torus_layout(island: Island, groups: np.ndarray) -> GroupLayout:
    """A torus group as one node: its rings run along all of its dims at once."""
    node, extents = island.node, _extents(island, groups[0])
    lanes = sum((2.0 if closed else 1.0) / gap for _, gap, closed in extents)
    hops = sum(gap * (ranks / 2 if closed else ranks - 1) for ranks, gap, closed in extents)
    size = groups.shape[1]
    latency = node.link_latency * hops / max(size - 1, 1)
    return GroupLayout(
        ranks=size, nodes=1, per_node=size, ring=node.link_bandwidth * node.ring_efficiency * lanes, reduce=_NEVER,
        out=math.inf, link_latency=latency, out_latency=0.0, start=node.start_latency, ring_hop=latency, ring_out=0.0,
    )


def _torus_exchange(island: Island, mesh: Mesh, names: frozenset[str], hop: str = "") -> float:
    """Seconds per byte of an all-to-all: mean distance along the longest dim over the links that carry it."""
    node, group = island.node, _groups(mesh, names, hop)[0]
    worst = max(ranks * gap * (1 / 8 if closed else 1 / 4) for ranks, gap, closed in _extents(island, group))
    return worst / (node.link_bandwidth * node.ring_efficiency)


def _check(kind: str) -> None:
    if kind not in COLLECTIVES:
        raise ValueError(f"unknown collective {kind!r}; known: {', '.join(COLLECTIVES)}")
