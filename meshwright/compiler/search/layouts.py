"""Candidates whose mesh axes may split anything: factorizations of the devices into axes, and what the pins leave to each.

The mesh is factored by the pins, or else by the topology: nodes x devices of a node, then as one axis and with parts of a node
as the second; a single node as one axis and as its factor pairs. What an axis may do is its role (``ir.mesh``); without pins
every axis may do anything. Such a candidate has no pipeline. How its parameters are kept is open for every block
(``variants``).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence

from meshwright.compiler.placement.costs import Variant
from meshwright.compiler.search.candidates import Candidate, Layout, near_ranks
from meshwright.compiler.structure.dims import batch_size
from meshwright.cost.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import ANY, HEADS, SAMPLED, SHARED, TENSOR, Mesh, role_of
from meshwright.ir.pins import PinError, Pins
from meshwright.ir.sharding import ceil_div


def free_candidates(
    graph: Graph, cluster: Cluster, pins: Pins, mirrored: bool = False, exchanged: tuple[int, int] = (1, 1),
    foldable: bool = False,
) -> list[tuple[Candidate, tuple[int, ...]]]:
    """(the candidate with the fewest micro-batches, the other counts) of every layout. Raises PinError for a count or a shard
    that the pinned degrees do not allow."""
    batch, found = batch_size(graph), []
    for layout in layouts(cluster, pins, mirrored, exchanged, foldable):
        first, *later = microbatch_counts(graph, layout, pins)
        data = layout.data_size
        samples = ceil_div(batch, data * first)
        found.append((Candidate(1, 1, "none", data, cluster.world // data, first, samples, layout), tuple(later)))
    return found


def layouts(
    cluster: Cluster, pins: Pins, mirrored: bool = False, exchanged: tuple[int, int] = (1, 1), foldable: bool = False,
) -> list[Layout]:
    """Factorizations of the devices that the pins and the topology suggest, in a fixed order. ``mirrored``: whether sequence
    axes give every rank two chunks; ``exchanged``: the heads and tokens that near ones of their ranks may exchange;
    ``foldable``: whether these may split experts too."""
    world = cluster.world
    if pins.free_axes:
        given = dict(pins.axes or {})
        return [Layout(Mesh(tuple(given), tuple(given.values())), dict.fromkeys(given, ANY))]
    if (pins.cp or 1) > 1:
        return _with_sequence(cluster, pins, mirrored, exchanged, foldable)
    if pins.dp is None and pins.tp is None and pins.ep in (None, 1):
        axes = ("x", "y")
        shapes: list[tuple[int, ...]] = [(world,)]
        if 1 < cluster.nodes < world:
            within = [n for n in range(2, cluster.per_node) if cluster.per_node % n == 0]
            shapes = [(cluster.nodes, cluster.per_node), *shapes, *((world // n, n) for n in within)]
        else:
            shapes += [(world // n, n) for n in range(2, world) if world % n == 0]
        return [Layout(Mesh(axes[: len(s)], s), dict.fromkeys(axes[: len(s)], ANY)) for s in shapes]
    tp = pins.tp if pins.tp is not None else 1 if pins.dp is None else world // pins.dp
    return [_layout(pins.dp if pins.dp is not None else world // tp, 1, tp, pins)]


def is_topological(layout: Layout, cluster: Cluster) -> bool:
    """Whether its axes are the nodes and their devices, or were pinned."""
    shape = tuple(layout.mesh.size(axis) for axis in layout.mesh.axes)
    return cluster.nodes in (1, cluster.world) or shape == (cluster.nodes, cluster.per_node) or ANY not in layout.roles.values()


def _with_sequence(
    cluster: Cluster, pins: Pins, mirrored: bool, exchanged: tuple[int, int], foldable: bool
) -> list[Layout]:
    """The layouts of a pinned cp."""
    cp = pins.cp or 1
    rest = cluster.world // cp
    tensor = [tp for tp in range(1, rest + 1) if rest % tp == 0 and pins.allows("tp", tp) and pins.allows("dp", rest // tp)]
    return [
        _layout(rest // tp, cp, tp, pins, mirrored, heads, folded, foldable)
        for tp in tensor for heads in near_ranks(cp, tp, cluster, pins, exchanged)
        for folded in _folds(rest // tp, cp, pins, foldable)
    ]


def _folds(dp: int, cp: int, pins: Pins, foldable: bool) -> list[bool]:
    """Whether the pinned degree of experts may be that of data ranks alone, and that of all ranks of the sequence and some of
    these."""
    ep = pins.ep or 1
    folded = foldable and ep % cp == 0 and dp % (ep // cp) == 0
    return [False] * (dp % ep == 0 or not folded) + [True] * folded


def _layout(
    dp: int, cp: int, tp: int, pins: Pins, mirrored: bool = False, heads: int = 1, folded: bool = False, foldable: bool = False
) -> Layout:
    """dp x cp x tp, of cp the ``heads`` near ones apart, dp in replicas of a ZeRO group where that is pinned. ``folded``: the
    ranks of cp split the experts too; ``foldable``: whether they could."""
    shard = pins.shard if pins.shard is not None else dp
    if dp % shard:
        raise PinError(f"pin shard={shard} must divide dp={dp}: it is the ZeRO group within the data ranks")
    sizes = {"dp": dp} if shard in (dp, 1) else {"dp_replicate": dp // shard, "dp_shard": shard}
    if (ep := (pins.ep or 1) // (cp if folded else 1)) > 1:
        sizes = _with_experts(dp, shard, ep, cp, foldable)
    sizes |= {"cp": cp // heads} if cp > 1 else {}
    sizes |= {HEADS: heads} if heads > 1 else {}
    sizes["tp"] = tp
    both = frozenset({"cp"}.intersection(sizes) if mirrored else ())
    return Layout(Mesh(tuple(sizes), tuple(sizes.values()), both), {axis: role_of(axis) for axis in sizes}, folded)


def _with_experts(dp: int, shard: int, ep: int, cp: int, foldable: bool) -> dict[str, int]:
    """The data ranks with experts split over ``ep`` of them, neighbours; they share the ZeRO group."""
    if dp % ep:
        folds = f", or over all of cp={cp} and some of these" if foldable else (
            f", and this model's not over cp={cp} as well: they are matrices of one product, or their tokens have lost the "
            "sequence as a dim of their own" if cp > 1 else "")
        raise PinError(f"pin ep={ep} must divide dp={dp}: experts are split over data ranks{folds}")
    if shard in (dp, 1):
        return {"dp": dp // ep, "ep": ep}
    if shard % ep:
        raise PinError(f"pin ep={ep} must divide shard={shard}: the ranks that share the experts are in one ZeRO group")
    return {"dp_replicate": dp // shard, "dp_shard": shard // ep, "ep": ep}


def variants(layout: Layout, pins: Pins, microbatches: int, recompute: Sequence[str]) -> list[Variant]:
    """The ways to keep parameters that the pins leave open on this layout."""
    found = []
    axes = [axis for axis in layout.mesh.axes if layout.mesh.size(axis) > 1 and layout.roles[axis] != TENSOR]
    must = {axis for axis in axes if layout.roles[axis] in SHARED}
    open_ = (0, 2, 3) if microbatches == 1 and "zero" not in pins.among else (0, 1, 2, 3)
    levels = (pins.zero,) if pins.zero is not None else tuple(level for level in open_ if pins.allows("zero", level))
    for kind in recompute:
        for count in range(len(axes) + 1):
            for data in itertools.combinations(axes, count):
                if must <= set(data):
                    found += [
                        Variant(level if shard else 0, data, shard, kind)
                        for level in levels for shard in _shards(data, level, pins, layout)
                    ]
    return list(dict.fromkeys(found))


def _shards(data: tuple[str, ...], level: int, pins: Pins, layout: Layout) -> list[tuple[str, ...]]:
    if level == 0 or not data or pins.shard == 1:
        return [()]
    if pins.shard is not None:
        return [tuple(axis for axis in data if axis in ("dp_shard", "ep")) if "dp_shard" in data else data]
    subsets = [s for n in range(len(data), 0, -1) for s in itertools.combinations(data, n)]
    if pins.says("shard"):
        subsets = [s for s in subsets if pins.allows("shard", layout.mesh.size([a for a in s if layout.roles[a] in SAMPLED]))]
    return subsets if pins.zero is None else subsets[:1]


def microbatch_counts(graph: Graph, layout: Layout, pins: Pins) -> list[int]:
    """Micro-batch counts to try in order: the pin, or of the powers of two and three times them what the batch allows."""
    batch, data = batch_size(graph), layout.data_size
    if batch <= (data - 1) * ceil_div(batch, data):
        raise PinError(f"the batch of {batch} samples leaves some of dp={data} ranks without any; take more samples or less dp")
    if pins.microbatches is not None:
        if batch % (data * pins.microbatches) and pins.microbatches > 1:
            raise PinError(
                f"the batch of {batch} samples does not divide into dp={data} ranks x microbatches={pins.microbatches}; pin "
                "counts whose product divides it"
            )
        return [pins.microbatches]
    counts = sorted(each * 2**n for n in range(batch.bit_length()) for each in (1, 3))
    return [1, *(count for count in counts if count > 1 and batch % (data * count) == 0)]


def walk(counts: Sequence[int], near: int, crowded: Callable[[int], bool]) -> None:
    """Look at ascending micro-batch counts, at the largest that is no more than ``near`` first; then at smaller ones while none
    is ``crowded``, or at larger ones until one is not."""
    at = max(0, bisect_right(counts, near) - 1)
    first = crowded(counts[at])
    for count in counts[at + 1:] if first else counts[:at][::-1]:
        if crowded(count) != first:
            break
