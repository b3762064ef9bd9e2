"""Resource tables of values and parameters: what every reshard costs, what every way to keep a parameter costs.

Tables are made once per distinct question (``_tables``): copies of a layer, the two edges of a residual and q, k, v ask the
same ones. Shapes are those of one micro-batch; seconds are those of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.compiler.placement.costs import (
    MOMENTS,
    RESOURCES,
    SAVED,
    SEND,
    SEND_BACK,
    TRANSIENT,
    Costs,
    Neighbours,
    Variant,
)
from meshwright.compiler.structure.activations import Saved, Shape
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import HEADS, SEQUENCE, Mesh
from meshwright.ir.plan import Schedule
from meshwright.ir.reshard import STEPS, ReshardStep, reshard
from meshwright.ir.sharding import Sharding, ShardingError, ceil_div

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Opened = tuple[tuple[int, ...], ...]
"""For every axis the dims that it may split."""


@dataclass(frozen=True, eq=False)
class Paths:
    """The reshards from every one of some shardings to every one of others, found once, priced for each mesh and size.

    steps: (kind, axis, axes that split the collective's full buffer), each once
    counts: [sources, targets, steps] how often a reshard has the step
    impossible: [sources, targets] no steps lead there
    same: [sources, targets] both lie in the same place
    gathered: [sources, targets] the last step gathers what is then read differently on each rank
    joined: (source, target, that step) of these
    """

    steps: tuple[tuple[str, str, tuple[str, ...]], ...]
    counts: NDArray[np.int8]
    impossible: Flags
    same: Flags
    gathered: Flags
    joined: tuple[tuple[int, int, ReshardStep], ...]


_RUNNING: Mapping[str, float] = {"all_gather": 2.0, "all_to_all": 4.0, "reduce_scatter": 2.0, "all_reduce": 2.0}
"""What a collective has while it runs, in sizes of the larger of what it reads and makes: these, and copies."""


@lru_cache(maxsize=1 << 12)
def paths(sources: tuple[Sharding, ...], targets: tuple[Sharding, ...]) -> Paths:
    """The reshards of all pairs: their steps depend neither on the mesh nor on sizes, and a search asks for the same ones
    thousands of times, of other layers, of other numbers of samples."""
    known: dict[tuple[str, str, tuple[str, ...]], int] = {}
    found: list[tuple[int, int, int]] = []
    joined: list[tuple[int, int, ReshardStep]] = []
    shape = len(sources), len(targets)
    impossible, same, gathered = (np.zeros(shape, dtype=bool) for _ in range(3))
    resting = [target.at_rest() for target in targets]
    for a, source in enumerate(sources):
        here = source.at_rest()
        for b, target in enumerate(targets):
            try:
                steps = reshard(source, target)
            except ShardingError:
                impossible[a, b] = True
                continue
            for step in steps:
                side = step.after if step.kind in ("all_gather", "gather_vary") else step.before
                found.append((a, b, known.setdefault((step.kind, step.axis, side.split_axes), len(known))))
            same[a, b] = here == resting[b]
            gathered[a, b] = not same[a, b] and not source.partial and bool(steps) and steps[-1].kind == "gather_vary"
            if gathered[a, b]:
                joined.append((a, b, steps[-1]))
    counts = np.zeros((*shape, len(known)), dtype=np.int8)
    for at in found:
        counts[at] += 1
    return Paths(tuple(known), counts, impossible, same, gathered, tuple(joined))


class ResourceTables:
    """The tables of one graph on one mesh. ``shapes``: of every value within a micro-batch; ``apart``: values whose gradients
    may be summed later (``Scope.of_parameters``); ``splits``: whether an axis may split a dim of a value (``Scope.splits``)."""

    def __init__(
        self, graph: Graph, mesh: Mesh, schedule: Schedule, costs: Costs, shapes: Mapping[str, Shape], saved: Saved,
        apart: frozenset[str] = frozenset(), splits: Callable[[str, int, str], bool] = lambda name, dim, axis: True,
    ) -> None:
        self.graph, self.mesh, self.schedule, self.costs, self.apart = graph, mesh, schedule, costs, apart
        self.shapes, self.saved, self.splits = shapes, saved, splits
        self.trainable = {param.value: None if param.buffer else param.trainable for param in graph.params}
        self._tables: dict[object, Array] = {}
        self._moves: dict[int, tuple[Paths, float, Array]] = {}  # by the id of a table: bytes, seconds of the steps' forward
        self._again: dict[int, Array] = {}  # by the id of a table: bytes that linears gather again, and of their gradients
        self._states: dict[tuple[Shape, bool, Opened], list[Sharding]] = {}
        self._once = {name for op in graph.ops if schedule.once(op.name) for name in op.outputs}

    def bytes(self, name: str, sharding: Sharding) -> float:
        """Local bytes of a value within one micro-batch."""
        return self.whole(name) / self.mesh.size(sharding.split_axes)

    def whole(self, name: str) -> float:
        """Bytes of a whole value within one micro-batch."""
        return float(math.prod(self.shapes[name])) * self.graph.values[name].dtype.itemsize

    def times(self, name: str) -> int:
        """How often a step a value is there."""
        return 1 if name in self._once else self.schedule.microbatches

    def states(self, name: str) -> list[Sharding]:
        """Every sharding in which an operator could leave a value, in a fixed order."""
        shape, apart = self.shapes[name], name in self.apart
        axes = [axis for axis in self.mesh.axes if self.mesh.size(axis) > 1]
        opened = tuple(tuple(dim for dim in range(len(shape)) if self.splits(name, dim, axis)) for axis in axes)
        key = shape, apart, opened
        if key not in self._states:
            states = [Sharding.whole(len(shape))]
            for axis, dims in zip(axes, opened, strict=True):
                if axis == HEADS:
                    states = [self._followed(state, shape) for state in states]
                    continue
                states = states + [more for state in states for more in self._one_more(state, axis, shape, apart, dims)]
            self._states[key] = states
        return self._states[key]

    def _followed(self, state: Sharding, shape: Shape) -> Sharding:
        """The state over the near ranks of a sequence too: outside of attention they do what the others of the sequence do."""
        others = {axis for axis in self.mesh.having(SEQUENCE) if axis != HEADS}
        partial, varying = (axes if others.isdisjoint(axes) else axes | {HEADS} for axes in (state.partial, state.varying))
        dims = tuple(
            axes if others.isdisjoint(axes) or length % self.mesh.size((*axes, HEADS)) else (*axes, HEADS)
            for axes, length in zip(state.dims, shape, strict=True)
        )
        return replace(state, dims=dims, partial=partial, varying=varying)

    def _one_more(self, state: Sharding, axis: str, shape: Shape, apart: bool, opened: Sequence[int]) -> list[Sharding]:
        size, found = self.mesh.size(axis), []
        for dim in opened:
            length = shape[dim]
            parts = self.mesh.size(state.dims[dim]) * size
            uneven = not state.dims[dim] and length > (size - 1) * ceil_div(length, size)
            if length > 1 and (length % parts == 0 or uneven):
                dims = (*state.dims[:dim], (*state.dims[dim], axis), *state.dims[dim + 1 :])
                found.append(replace(state, dims=dims))
                if axis in self.mesh.mirrored and length % (2 * parts) == 0:
                    found.append(replace(state, dims=dims, mirrored=state.mirrored | {axis}))
        found += [replace(state, varying=state.varying | {axis})] if apart else []
        return [*found, replace(state, partial=state.partial | {axis})]

    def equal(self, size: int) -> Array:
        """[size + 1, size]: nothing for equal states, forbidden otherwise; the last row matches none."""
        key = ("equal", size)
        if key not in self._tables:
            table = np.full((size + 1, size, RESOURCES), np.inf)
            table[np.arange(size), np.arange(size)] = 0.0
            self._tables[key] = table
        return self._tables[key]

    def reshard(
        self, name: str, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], saving: bool,
        linears: tuple[int, float] = (1, 0.0),
    ) -> Array:
        """Resources of every reshard of a value.

        ``saving``: charge what readers keep of it for the backward; otherwise only what a further copy would add; ``linears``:
        how many read what is gathered, if these read it, and bytes of what all but the first make of it, whole.
        """
        value = self.graph.values[name]
        kept, shard, by_maker = (name in names for names in (self.saved.values, self.saved.by_linears, self.saved.by_makers))
        times, view, besides = self.times(name), name in self.saved.by_views, name in self.saved.besides
        is_kept = kept, shard, by_maker, view, besides, saving
        key = (self.shapes[name], value.dtype, value.differentiable, is_kept, times, linears if shard else (), sources, targets)
        if key in self._tables:
            return self._tables[key]
        whole, moves = self.whole(name), paths(sources, targets)
        table = np.zeros((len(sources), len(targets), RESOURCES))
        if moves.steps:
            seconds = np.array([
                self.costs.step(kind, axis, whole / self.mesh.size(split), value.differentiable, by_linears=shard)
                for kind, axis, split in moves.steps
            ])
            table[:, :, [SEND, SEND_BACK]] = moves.counts @ (times * seconds)
            self._moves[id(table)] = moves, whole, times * seconds[:, 0]
        else:
            self._moves[id(table)] = moves, whole, np.zeros(0)
        if kept:
            parts = [[self.mesh.size(one.split_axes) for one in ends] for ends in (sources, targets)]
            again = moves.gathered & (shard and not self.costs.device.keeps_gathered)
            pieces = np.where(again, np.array(parts[0])[:, None], np.array(parts[1])[None, :])
            table[:, :, SAVED] = np.where(moves.same & (not saving or by_maker), 0.0, whole / pieces)
        if view and saving:  # one that is moved is kept, not the value that it shows, or besides
            split = [np.array([self.mesh.size(one.split_axes) for one in ends]) for ends in (sources, targets)]
            instead = np.where(moves.same, np.inf, 0.0) if besides else whole / split[0][:, None]
            gathered = np.maximum(0.0, whole / split[1][None, :] - instead)
            again = moves.gathered & (shard and not self.costs.device.keeps_gathered)
            table[:, :, SAVED] = np.where(again, 0.0, gathered)
        if shard and not self.costs.device.keeps_gathered and moves.gathered.any():
            self._again[id(table)] = self._gathered_again(moves, targets, whole, self.shapes[name], *linears)
        table[moves.impossible] = np.inf
        self._tables[key] = table
        return table

    def _gathered_again(
        self, moves: Paths, targets: Sequence[Sharding], whole: float, shape: Shape, linears: int, made: float
    ) -> Array:
        """Bytes [sources, targets] that so many linears have in their backward where they gather what they read again: that,
        as it is received and in order, the gradient that each makes of it and their sum, and gradients of what they ``made``,
        less what the backward of the first alone has anyway."""
        found, axes_ = np.zeros(moves.gathered.shape), {axis for axis in self.mesh.axes if self.mesh.size(axis) > 1}
        for a, b, step in moves.joined:
            if linears > 1 and not axes_ <= {*targets[b].split_axes, *targets[b].varying}:
                continue  # readers of such a copy read it differently over more axes: it is gathered for them, once
            inner = any(length > self.mesh.size(axes) for length, axes in zip(shape[: step.dim], step.after.dims, strict=False))
            piece = whole / self.mesh.size(step.before.split_axes) if linears == 1 else 0.0  # that of the sum is there anyway
            beside = made / self.mesh.size(targets[b].varying)
            found[a, b] = piece + (whole * (linears + (linears > 1) + inner) + beside) / self.mesh.size(targets[b].split_axes)
        return found

    def beyond_a_block(self, tied: AbstractSet[str]) -> float:
        """What part of what the root reduces is more than what a block does, if both are split alike. ``tied``: parameters of
        several blocks, which are the root's."""
        blocks = self.graph.blocks
        inside = {name for block in blocks for op in self.graph.ops[block.start : block.stop] for name in op.inputs} - tied
        trained = {name: self.graph.values[name].numel for name, yes in self.trainable.items() if yes}
        own, rest = (sum(numel for name, numel in trained.items() if (name in inside) == within) for within in (True, False))
        return max(0.0, 1.0 - own / len(blocks) / rest) if blocks and rest else 1.0

    def again(self, tables: Sequence[Array], least: bool = False) -> float:
        """Bytes that linears gather again at most (``least``: at least, where they do), and of their gradients, of all reshards
        of some tables."""
        found = [self._again[id(one)] for one in tables if id(one) in self._again]
        if least:
            return max((float(one.min(initial=math.inf, where=one > 0)) for one in found), default=0.0)
        return max((float(one.max()) for one in found), default=0.0)

    def held(self, table: Array, there: tuple[bool, ...], running: tuple[bool, ...]) -> Array:
        """A table of reshards with what of it is held at the moments of a backward: what it saves, where that is still
        ``there``; while the operator's backward runs that it leads to (``running``), what linears gather of it again, and the
        gradient that they reduce-scatter beside the one that they made."""
        saves, found = bool(table[:, :, SAVED].any()), self._moves.get(id(table))
        if not saves and not (found is not None and any(running)):
            return table
        key = "held", id(table), there, running
        if key not in self._tables:
            more = table.copy()
            for at, (kept, runs) in zip(MOMENTS, zip(there, running, strict=True), strict=False):
                more[:, :, at] = table[:, :, SAVED] * kept if kept else 0.0
                if runs and id(table) in self._again:
                    more[:, :, at] += self._again[id(table)]
            more[~np.isfinite(table[:, :, SAVED])] = np.inf
            self._tables[key] = more
            self._tables["of", id(more)] = table  # its id is a key as long as it is there
            if found is not None:
                self._moves[id(more)] = found
        return self._tables[key]

    def more(self, table: Array, more: Array) -> Array:
        """A table of reshards with more of some resources."""
        found = table + more
        if id(table) in self._moves:
            self._tables["more", id(found)] = found  # its id is a key as long as it is there
            self._moves[id(found)] = self._moves[id(table)]
        return found

    def running(self, table: Array, held: Array, least: float) -> Array:
        """What ``held`` says of a table of reshards, with what the largest step of a forward has while it runs, where that is
        beyond ``least`` bytes, which some moment of the backward has anyway."""
        moves, whole, seconds = self._moves.get(id(table), (None, 0.0, np.zeros(0)))
        each = [_RUNNING.get(STEPS[kind][0], 0.0) * whole / self.mesh.size(split)
                for kind, _, split in (moves.steps if moves is not None else ())]
        if moves is None or max(each, default=0.0) <= least:
            return held
        key = "running", id(held), least
        if key not in self._tables:
            more = held.copy()
            largest = ((moves.counts > 0) * np.array(each)).max(axis=-1)
            more[:, :, TRANSIENT] += np.where(largest > least, largest, 0.0)
            self._tables[key] = more
            self._tables["running of", id(more)] = held  # its id is a key as long as it is there
            self._moves[id(more)] = moves, whole, seconds
        return self._tables[key]

    def first_of_all(self, table: Array, stays: bool) -> Array:
        """A table of reshards of what goes first in the backward (``first_of_all``)."""
        if not table[:, :, [SAVED, TRANSIENT, *MOMENTS]].any():
            return table
        key = "first", id(table), stays
        if key not in self._tables:
            more = table.copy()
            first_of_all(more, stays)
            self._tables[key] = more
            self._tables["first of", id(more)] = table
        return self._tables[key]

    def gathers_back(self, name: str, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...]) -> Array:
        """Bytes [sources, targets] of a value's gradient that is gathered on its way back, and of what it is received in."""
        whole, moves = self.whole(name), paths(sources, targets)
        full = [2.0 * whole / self.mesh.size(split) * (STEPS[kind][1] == "all_gather") for kind, _, split in moves.steps]
        return np.asarray(((moves.counts > 0) * np.array(full)).max(axis=-1, initial=0.0))

    def kept_ways(self, table: Array, lasting: frozenset[str], again: bool, held: bool) -> Array | None:
        """Of a table of reshards what changes in each where its block is recomputed, for the results of ``lasting`` kinds of
        steps are kept: they do not run ``again``, if the way does else, and what they made need not come back. ``held``: nor
        does what the way begins with, which is kept too."""
        if id(table) not in self._moves:
            return None
        moves, whole, seconds = self._moves[id(table)]
        stays = np.array([kind in lasting for kind, _, _ in moves.steps], dtype=bool)
        held = held and bool(table[:, :, SAVED][moves.same].any())
        if not stays.any() and not held:
            return None
        key = "kept ways", id(table), lasting, again, held
        if key in self._tables:
            return self._tables[key]
        found = np.zeros_like(table)
        if stays.any():
            pieces = [self.mesh.size(split) * (self.mesh.size(axis) if kind == "reduce_scatter" else 1)
                      for kind, axis, split in moves.steps]
            found[:, :, SAVED] = moves.counts @ np.where(stays, whole / np.array(pieces), 0.0)
            if again:
                found[:, :, SEND_BACK] = -(moves.counts @ np.where(stays, seconds, 0.0))
            whole_way = (moves.counts @ ~stays) == 0
            comes_back = np.minimum(table[:, :, SAVED], found[:, :, SAVED])
            found[:, :, TRANSIENT] = -np.where(whole_way & ~moves.impossible, comes_back, 0.0)
        if held:
            found[:, :, TRANSIENT] -= np.where(moves.same, table[:, :, SAVED], 0.0)
        self._tables[key] = found
        return found

    def parameter(
        self, name: str, needs: Sequence[Sharding], variant: Variant, group: float, unit: Neighbours, late: float,
        made: tuple[float, ...] = (), fused: int | None = None,
    ) -> Array:
        """Resources [needs, K] of reading a parameter so, in a block of ``group`` trainable elements kept as ``variant``; the
        gradients of ``late`` of them may be summed together; ``made``: at which moments its own is there (``Costs``);
        ``fused``: the dim of which calls copy their pieces, if it is split."""
        value, trainable = self.graph.values[name], self.trainable[name]
        key = ("parameter", value.shape, value.dtype, tuple(needs), trainable, variant, group, unit, late, made, fused)
        if key not in self._tables:
            seen: dict[Sharding, Array] = {}
            for need in dict.fromkeys(needs):
                pieces = fused is not None and self.mesh.size(need.dims[fused]) > 1
                cost = self.costs.parameter(value, need, trainable, variant, group, unit, late, made, pieces)
                seen[need] = np.full(RESOURCES, np.inf) if cost is None else cost
            self._tables[key] = np.array([seen[need] for need in needs])
        return self._tables[key]


def first_of_all(table: Array, stays: bool) -> None:
    """Of what is gone in the backward before anything else runs, unless it ``stays``: what is saved is counted at its own
    moments alone, of which the last is when all of it is there."""
    table[..., MOMENTS[-1]] = table[..., TRANSIENT] + table[..., SAVED]
    table[..., TRANSIENT] = 0.0
    if not stays:
        table[..., SAVED] = 0.0
    forbidden = np.isinf(table[..., MOMENTS[-1]])
    table[forbidden] = np.inf


def only(table: Array, resources: Sequence[int]) -> Array:
    """Some resources of a table."""
    found = np.zeros_like(table)
    found[..., resources] = table[..., resources]
    return found
