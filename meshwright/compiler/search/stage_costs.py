"""The units that pipeline stages are made of, priced: a placement under a mesh, a ZeRO level and a recomputation.

    forward   = compute + critical collectives + what gathering parameters every micro-batch leaves exposed
    backward  = the same of the backward, recomputation included; its part for weights is apart (zero-bubble schedules)
    ahead     = what of the forward runs once more, before all micro-batches
    state     = parameters, gradients, optimizer, buffers      saved, transient: of one micro-batch
    once      = seconds outside the micro-batches: gathers before the first, reductions after the last, the optimizer

What parameters cost is linear in the number of micro-batches, so two prices (``costs.Costs`` at 2 and 3) give the part of every
micro-batch and the part of the step, whatever the level does (``StageCosts.parameters``).

The mesh is pp x dp x cp x up x tp, or dp is dp_replicate x dp_shard; stages are contiguous ranks. Groups lie the same way in
every stage, so collectives are priced on as few stages as fill whole nodes (``_neighbourhood``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from meshwright.compiler.pipeline.intervals import BESIDE, Intervals, Shared
from meshwright.compiler.pipeline.stages import positions_of
from meshwright.compiler.placement.costs import (
    BACKWARD,
    FORWARD,
    GATHER,
    GATHER_ONCE,
    GRADIENTS,
    HOST,
    HOST_BACK,
    OPTIMIZER,
    PARAMETERS,
    REDUCE,
    REDUCE_ONCE,
    RESOURCES,
    SAVED,
    SEND,
    SEND_BACK,
    TRANSIENT,
    Costs,
    Neighbours,
    Variant,
    Vector,
    bytes_row,
)
from meshwright.compiler.placement.rows import CONTEXT, DATA, EP, NONE, TENSOR, PlacedPosition, Placement, Use
from meshwright.cost.cluster import Cluster
from meshwright.cost.collectives import Network
from meshwright.ir.graph import Value
from meshwright.ir.mesh import HEADS, PP, Mesh
from meshwright.ir.schedules import schedule_of
from meshwright.ir.sharding import Sharding

REPLICATE, SHARD = "dp_replicate", "dp_shard"
Array = np.ndarray
_FP32 = 4
"""Bytes of an element of what FSDP2 reduces."""


@dataclass(frozen=True)
class Degrees:
    """How many ranks do what. ``shard``: of the data ranks, those that share a parameter's state; ``context``: ranks that split
    the sequence, ``mirrored``: in two chunks each; ``expert``: of those that share state, the ones that split the experts;
    ``heads``: of those that split the sequence, the near ones that exchange it for heads."""

    pp: int
    data: int
    shard: int
    tensor: int
    context: int = 1
    mirrored: bool = False
    expert: int = 1
    heads: int = 1

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        axes = {PP: self.pp} if self.pp > 1 else {}
        hybrid = 1 < self.shard < self.data
        axes |= {REPLICATE: self.data // self.shard, SHARD: self.shard} if hybrid else {DATA: self.data}
        if self.expert > 1:
            last = SHARD if hybrid else DATA
            axes |= {last: axes[last] // self.expert, EP: self.expert}
        axes |= {CONTEXT: self.context // self.heads} if self.context > 1 else {}
        axes |= {HEADS: self.heads} if self.heads > 1 else {}
        return Mesh((*axes, TENSOR), (*axes.values(), self.tensor), frozenset({CONTEXT} if self.mirrored else ()))

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which gradients are summed."""
        known, mesh = (DATA, REPLICATE, SHARD, EP, CONTEXT, HEADS), self.mesh
        return tuple(axis for axis in known if axis in mesh.axes and mesh.size(axis) > 1)

    def variant(self, zero: int) -> Variant:
        """How parameters are kept at a ZeRO level."""
        shards = tuple(axis for axis in self.data_axes if axis != REPLICATE)
        return Variant(zero if shards else 0, self.data_axes, shards if zero else ())


@dataclass(frozen=True)
class Units:
    """Per position of the graph, [n] each: seconds of a micro-batch, bytes, seconds outside the micro-batches. ``added``: of a
    micro-batch's backward what adds up gradients; ``summed``: of the bytes of ``state``, the gradients that are added up;
    ``released``: of those ``saved``, what is not there while an earlier position runs; ``entered``, ``left``:
    ``saved`` too where a stage begins or ends with it; the last ones: what is beside that (``pipeline.intervals.Unit``)."""

    forward: Array
    backward: Array
    weight: Array
    state: Array
    saved: Array
    pending: Array
    summed: Array
    gather: Array
    reduce: Array
    optimizer: Array
    ahead: Array
    added: Array
    released: Array
    entered: Array
    left: Array
    transient: Array
    behind: Array
    gathered: Array
    ended: Array
    reduced: Array
    root: Array

    @property
    def work(self) -> float:
        """Seconds of all positions for one micro-batch."""
        return float(self.forward.sum() + self.backward.sum() + self.ahead.sum())

    @property
    def columns(self) -> tuple[Array, ...]:
        """Numbers of every unit in the order of ``pipeline.stages.Unit``."""
        state = self.state - self.summed
        return self.forward, self.backward - self.weight, self.weight, state, self.saved, self.transient

    @property
    def beside(self) -> Array:
        """``pipeline.intervals.BESIDE`` of every unit, [7, n]."""
        return np.array([getattr(self, name) for name in BESIDE])

    @property
    def least_held(self) -> Array:
        """Bytes of every unit of a micro-batch in flight, from F to I and from I to W."""
        return np.asarray(np.minimum(self.saved, self.pending))

    def mixed(self, other: Units, where: Array) -> Units:
        """These units, but the others' where ``where`` is true."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
        return Units(*(np.where(where, b, a) for a, b in pairs))

    def less(self, state: Array, root: Array) -> Units:
        """The same with so many bytes [n] less of ``state`` and of ``root``."""
        return replace(self, state=self.state - state, root=self.root - root)

    @classmethod
    def taken(cls, variants: Sequence[Units], chosen: Array) -> Units:
        """Of every position those of the variant that is ``chosen`` [n]."""
        units = variants[0]
        for number in range(1, len(variants)):
            units = units.mixed(variants[number], chosen == number)
        return units

    @staticmethod
    def between(
        variants: Sequence[Units], crossing: Array, pending: Sequence[Array], shared: Sequence[Shared]
    ) -> tuple[Intervals, list[int]]:
        """What lies between two places where a stage can begin, and these. ``pending``: bytes from I to W of each variant."""
        positions = positions_of(crossing)
        columns = np.array([(*one.columns[:5], held, one.summed, *one.beside, one.entered, one.left)
                            for one, held in zip(variants, pending, strict=True)]).transpose(1, 0, 2)
        order = columns[:7], columns[7:-2], columns[-2:]
        return Intervals.of_columns(*order, crossing, crossing, positions, shared), positions


@dataclass(frozen=True)
class LeastCosts:
    """What parameters cost at least that are split as far as they can be.

    bytes_: of all ranks of a pipeline, at the worst moment of a micro-batch
    each: seconds of a micro-batch that move them and their gradients
    optimizer: seconds of a step
    """

    bytes_: float
    each: float
    optimizer: float


@dataclass(frozen=True)
class StoredCosts:
    """Parameters of a placement's rows [rows, K]: of every micro-batch (seconds), of the step (seconds and bytes)."""

    each: Array
    once: Array


class StageCosts:
    """Prices of one model on one cluster; remembers what it has priced."""

    def __init__(self, cluster: Cluster, *, itemsize: int, state_bytes: float) -> None:
        self.cluster, self.itemsize, self.state_bytes = cluster, itemsize, state_bytes
        self._costs: dict[tuple[Degrees, int], Costs] = {}
        self._networks: dict[Degrees, Network] = {}
        self._activations: dict[tuple[int, str, bool], tuple[Array, Array, Array]] = {}
        self._priced: dict[tuple[int, Degrees, Variant, bool], StoredCosts] = {}
        self._read: dict[tuple[tuple[Use, ...], bool], int] = {}
        self._rows_read: dict[int, list[int]] = {}
        self._least: dict[tuple[Degrees, int, bool, int, int, bool], LeastCosts] = {}
        self._vectors: dict[tuple[Degrees, Variant, int], dict[int, Vector]] = {}
        self._shared: dict[tuple[int, Degrees, int, bool, bool], tuple[Shared, ...]] = {}
        self._again: dict[int, list[tuple[int, bool, Use, int, int]]] = {}

    def units(
        self, placement: Placement, degrees: Degrees, zero: int, microbatches: int, split: bool, recompute: str,
        kept: Variant | None = None,
    ) -> Units:
        """The units of a placement; ``recompute`` applies to blocks; ``split``: whether some backward is split;
        ``kept``: how parameters are kept, if not as a search keeps them at this ZeRO level."""
        own = self.parameters(placement, degrees, zero, microbatches, kept)
        plain, run, weight = self._rows(placement, recompute, microbatches)
        each, once, ahead = own.each, own.once, np.array([row.ahead for row in placement.rows])
        forward = run[:, SEND] + each[:, SEND] + self.overlapped(run[:, FORWARD], each[:, GATHER], run[:, HOST])
        recomputed = (run - plain)[:, [BACKWARD, SEND_BACK]].sum(axis=1)
        backward = run[:, SEND_BACK] + each[:, SEND_BACK] + recomputed * split
        backward = backward + self.overlapped(run[:, BACKWARD] + each[:, BACKWARD], each[:, REDUCE], run[:, HOST_BACK])
        waiting = np.array([row.waiting for row in placement.rows])
        pending = np.maximum(run[:, SAVED] + waiting, 0.0)
        several, variant, staged = microbatches > 1, kept or degrees.variant(zero), degrees.pp > 1 and not split
        reduced = np.array([self._reduced(row.uses, degrees, variant, several) for row in placement.rows])
        running, ended = self._transient(
            placement, run, once, reduced.sum(axis=1), variant, several, degrees, pending if split else None
        )
        gathered = np.array([self._gathered(row, degrees, variant) for row in placement.rows])
        roots = np.array([not row.block for row in placement.rows])
        summed = once[:, GRADIENTS] - reduced.sum(axis=1) * roots * staged if several else 0.0 * ahead
        left = [0.0 if split else self._left(row, degrees, variant, several) for row in placement.rows]
        released = np.maximum(run[:, SAVED] - pending * split, 0.0) - left
        columns = [
            forward, backward, weight + recomputed * split,
            once[:, bytes_row(microbatches) > 0].sum(axis=1) + run[:, PARAMETERS] - once[:, GRADIENTS] * several + summed,
            run[:, SAVED], pending, summed,
            once[:, [GATHER, GATHER_ONCE, SEND]].sum(axis=1), once[:, [REDUCE, REDUCE_ONCE, SEND_BACK]].sum(axis=1),
            once[:, BACKWARD],
            np.where(ahead > 0.0, forward, 0.0) * ahead, each[:, BACKWARD], released,
        ]
        at = list(placement.sequence)
        found = [column[at] for column in columns]
        found += self._ends(placement, recompute)
        found += _beside(running[at], ended[at], roots[at], gathered[at] * (degrees.pp > 1), reduced[at] * staged)
        return Units(*found)

    def _ends(self, placement: Placement, recompute: str) -> tuple[Array, Array]:
        """Bytes of what enters each position from another rank and is not among what it saves, or is made again there, which a
        block that recomputes holds as what it is handed, and of what it sends on."""
        rows, sent = [placement.rows[row] for row in placement.sequence], np.array([0.0, *placement.sent[:-1]])
        again = np.array([row.block and recompute != NONE for row in rows])
        entered = np.maximum(sent - [row.entering for row in rows], 0.0)
        return np.where(again, [0.0, *placement.crossing[:-1]] - sent, entered), np.array([*placement.sent[:-1], 0.0])

    def _transient(
        self, placement: Placement, run: Array, once: Array, reduced: Array, variant: Variant, several: bool, degrees: Degrees,
        pending: Array | None,
    ) -> tuple[Array, Array]:
        """Bytes beside what is kept while a row runs, or, where FSDP2 has no part in it, while gradients are copied to their
        sums when a backward is done and nothing that it kept is left (``cost.memory.fsdp``); where some backward is split, and
        ``pending`` waits for W, while each gradient goes its own way there. In a pipeline without what another row's reduction
        has left; and when its own are ``reduced``, in the place of those."""
        experts = np.array([self._of_experts(row, degrees, variant) for row in placement.rows])
        made = np.array([row.made for row in placement.rows]) + experts[:, 0]  # as they come, among what runs
        kept, staged = np.maximum(once[:, TRANSIENT] - made, 0.0), degrees.pp > 1
        working = run[:, TRANSIENT] + experts.sum(axis=1) + kept
        if staged:
            working -= np.minimum(reduced, kept)
        else:
            working += [row.beside_output for row in placement.rows]
        if pending is not None:
            apart = np.array([self._apart(row, degrees, variant) for row in placement.rows])
            apart -= np.maximum(run[:, SAVED] - pending, 0.0)  # which I let go of
            running = np.maximum(working, self._at_the_end(placement, run, apart, 0))
            return running, running
        if variant.data_axes:
            ended = [self._ended(row, degrees, variant, several) * (staged or row.block) for row in placement.rows]
            made = np.array(ended) - run[:, SAVED]
            return np.maximum(working, made), made + reduced * [staged and row.block for row in placement.rows]
        copied = once[:, GRADIENTS] * (1 + several)
        if staged:
            copied = self._at_the_end(placement, run, self._at_the_end(placement, run, copied, 0), -1)
        else:  # the root's reach theirs when all of a step is done
            copied = copied * [row.block for row in placement.rows]
        running = np.maximum(working, copied - run[:, SAVED])
        return running, running

    @staticmethod
    def _at_the_end(placement: Placement, run: Array, bytes_: Array, at: int) -> Array:
        """Bytes of every row of which those of the position ``at`` one end come when all of its stage is done: less what the
        one beside it saves."""
        first, beside = placement.sequence[at], placement.sequence[min(1, len(placement.sequence) - 1) if at == 0 else at - 1]
        found = bytes_.copy()
        found[first] = max(0.0, bytes_[first] - run[beside, SAVED] * (first != beside))
        return found

    @property
    def _wide(self) -> float:
        """By how much a gradient grows on its way to its sum."""
        return 1.0 if self.cluster.device.narrow_sums else max(1.0, _FP32 / self.itemsize)

    def _ended(self, row: PlacedPosition, degrees: Degrees, variant: Variant, several: bool) -> float:
        """Bytes of a row's gradients when its backward is done: in the compute dtype, but those of weights that every data rank
        has others of, which FSDP2 does not take, in fp32, beside copies of them all if they are added to sums."""
        return sum(bytes_ * (1.0 if variant.of(split).data_axes else self._wide * (1 + several))
                   for bytes_, split in self._made(row.uses, degrees))

    def _reduced(self, uses: Sequence[Use], degrees: Degrees, variant: Variant, several: bool) -> tuple[float, float]:
        """Bytes of the buffers in which FSDP2 reduces the gradients of weights after a micro-batch, one for each set of ranks
        that shares weights: of all but the last, and of that, which stays until another one is needed."""
        found = dict[tuple[str, ...], float]()
        for bytes_, split in self._made(uses, degrees):
            own = variant.of(split)
            if own.data_axes and (own.zero >= 2 or not several):
                found[own.data_axes] = found.get(own.data_axes, 0.0) + bytes_ / self.itemsize * _FP32
        *before, last = found.values() or (0.0,)
        return sum(before), last

    def _gathered(self, row: PlacedPosition, degrees: Degrees, variant: Variant) -> float:
        """Bytes of a block's weights that are gathered for its backward, early, while the one behind it runs."""
        made = self._made(row.uses, degrees) if row.block else ()
        return sum(bytes_ for bytes_, split in made if (own := variant.of(split)).data_axes and own.zero == 3)

    def _left(self, row: PlacedPosition, degrees: Degrees, variant: Variant, several: bool) -> float:
        """Bytes that are there for a row's gradients, beside those that are there over the step, from its backward to that of
        all of its stage: the root's as they were made; of one micro-batch, those of blocks, in place of what was gathered."""
        made = self._made(row.uses, degrees)
        if not row.block:
            return sum(bytes_ for bytes_, _ in made)
        if several:
            return 0.0
        found = 0.0
        for bytes_, split in made:
            own = variant.of(split)
            parts = degrees.mesh.size(own.shard_axes) if own.zero else 1
            found += bytes_ * (_FP32 / self.itemsize / parts - (own.zero < 3) if own.data_axes else self._wide)
        return found

    def _apart(self, row: PlacedPosition, degrees: Degrees, variant: Variant) -> float:
        """Bytes of the gradient of a weight, the largest of a row, and of its copies on its way to a sum where a backward is
        split: as it is summed over ranks that read it differently, in fp32, and of one that is split over other ranks."""
        wide, found = self._wide, 0.0
        for use in row.uses:
            need = renamed(use.need, degrees)
            own = variant.of(need.split_axes).data_axes
            now = use.value.numel / degrees.mesh.size(need.split_axes) * self.itemsize
            copies = [[wide] * (wide > 1.0), [1.0] * bool(need.split_axes)]
            summed = [1.0] * (not need.varying <= {*own})
            found = max(found, now * bool(use.trainable))
            for times in (*summed, *itertools.chain(*copies[:: -1 if own else 1])):
                found, now = max(found, now * (1.0 + times) * bool(use.trainable)), now * times
        return found

    def _of_experts(self, row: PlacedPosition, degrees: Degrees, variant: Variant) -> tuple[float, float]:
        """Bytes of the gradients of a mixture's weights in the compute dtype, which come before those of the rest of its block,
        and of a copy of the largest, of which FSDP2 takes a piece, beyond what its backward needed before."""
        names = {name for mixture in row.mixtures for name in mixture.op.inputs}
        made = self._made([use for use in row.uses if use.value.name in names], degrees)
        copied = max((bytes_ for bytes_, split in made if split and variant.of(split).data_axes), default=0.0)
        space = max((mixture.space for mixture in row.mixtures), default=0.0)
        return sum(bytes_ for bytes_, _ in made), max(0.0, copied - space)

    def _made(self, uses: Sequence[Use], degrees: Degrees) -> Sequence[tuple[float, tuple[str, ...]]]:
        """Bytes of every gradient of a weight in the compute dtype, and the axes that split it."""
        needs = [(use.value.numel, renamed(use.need, degrees).split_axes) for use in uses if use.trainable]
        return [(numel / degrees.mesh.size(split) * self.itemsize, tuple(split)) for numel, split in needs]

    def _rows(self, placement: Placement, recompute: str, microbatches: int) -> tuple[Array, Array, Array]:
        """Resources of a placement's rows without and with a recomputation, and seconds of gradients of weights."""
        key = (id(placement), recompute, microbatches > 1)
        if key not in self._activations:
            plain = np.array([row.of_microbatch(NONE, microbatches) for row in placement.rows])
            run = np.array([row.of_microbatch(recompute if row.block else NONE, microbatches) for row in placement.rows])
            self._activations[key] = plain, run, np.array([row.weight for row in placement.rows])
        return self._activations[key]

    def overlapped(self, compute: Array, moved: Array, host: Array) -> Array:
        """Seconds of compute with parameter communication beside it, started by a host that may take longer."""
        return np.asarray(np.maximum(moved, np.maximum(compute, host) + self._slowed(moved)))

    def waits(self, schedule: str) -> bool:
        """Whether a rank goes on only when what it sent has arrived: where software that waits so (``Device.waits``) runs a
        schedule of whole backwards whose ranks alternate, and whose transfers stand where they are read."""
        found = schedule_of(schedule)
        alternates = found.closed is not None and not found.closed.forwards_first
        return self.cluster.device.waits and alternates and not found.early

    def exposed(self, moved: Array, compute: Array) -> Array:
        """Seconds of parameter communication beside compute that are left: what the compute does not hide, or by how much the
        communication slows it down, if that is more (``cost.overlap.overlapped``)."""
        return np.asarray(np.maximum(moved - compute, self._slowed(moved)))

    def _slowed(self, moved: Array) -> Array:
        """By how much communication slows down the compute beside it; nothing where links have engines of their own, though
        what a level cannot hold takes for ever."""
        share = 1.0 - 1.0 / self.cluster.device.contention
        return moved * share if share else np.zeros_like(moved)

    def parameters(
        self, placement: Placement, degrees: Degrees, zero: int, microbatches: int, kept: Variant | None = None
    ) -> StoredCosts:
        """What the parameters of every row cost."""
        variant = kept or degrees.variant(zero)
        key = (id(placement), degrees, variant, microbatches > 1)
        if key not in self._priced:
            self._priced[key] = self._parameters(placement, degrees, variant, microbatches > 1)
        return self._priced[key]

    def least(
        self, degrees: Degrees, zero: int, microbatches: int, numel: int, expert: int, folded: bool
    ) -> LeastCosts:
        """What ``numel`` trainable elements cost at least, ``expert`` of which the ranks of experts may split (``folded``: and
        those of the sequence): all tensor ranks split them, and they are moved in one collective, or in two."""
        key = degrees, zero, microbatches > 1, numel, expert, folded
        if key not in self._least:
            mesh, counts = degrees.mesh, (2, 3) if microbatches > 1 else (1,)
            over = tuple(axis for axis in (EP, *((CONTEXT, HEADS) if folded else ()), TENSOR) if axis in mesh.axes)
            totals = []
            for count in counts:
                costs, vector = self._prices(degrees, count), np.zeros(RESOURCES)
                for axes, elements in (((TENSOR,), numel - expert), (over, expert)):
                    value = Value("", (elements // mesh.size(axes) * mesh.size(axes),), torch.float32)
                    found = costs.parameter(value, Sharding((axes,)), True, degrees.variant(zero), float(value.numel))
                    vector += np.inf if found is None else found
                    if degrees.pp == 1 and not degrees.variant(zero).of(axes).data_axes and self.itemsize < _FP32:
                        vector[PARAMETERS] -= value.numel / mesh.size(axes) * self.itemsize  # made again with its block
                totals.append(vector)
            each = totals[-1] - totals[0] if microbatches > 1 else np.zeros(RESOURCES)
            moved = float(each[[GATHER, REDUCE, SEND, SEND_BACK]].sum())
            self._least[key] = LeastCosts(
                float(totals[0] @ bytes_row(microbatches)), moved,
                float(totals[0][BACKWARD] - 2 * each[BACKWARD]) if microbatches > 1 else 0.0,
            )
        return self._least[key]

    def crossing(self, degrees: Degrees, bytes_: float) -> float:
        """Seconds to send ``bytes_`` of every rank of a stage to the next stage."""
        return float(self._network(degrees).seconds("p2p", PP, bytes_)) if bytes_ and degrees.pp > 1 else 0.0

    def _parameters(self, placement: Placement, degrees: Degrees, variant: Variant, several: bool) -> StoredCosts:
        if not several:
            once = self._vectors_of(placement, degrees, variant, 1)
            return StoredCosts(np.zeros_like(once), once)
        two, three = (self._vectors_of(placement, degrees, variant, m) for m in (2, 3))
        with np.errstate(invalid="ignore"):  # what a level cannot hold is inf at both
            each = np.where(np.isinf(two), np.inf, three - two)
            once = np.where(np.isinf(two), np.inf, two - 2 * each)
        once[:, PARAMETERS:], each[:, PARAMETERS:] = two[:, PARAMETERS:], 0.0
        return StoredCosts(each, np.maximum(once, 0.0))

    def _vectors_of(self, placement: Placement, degrees: Degrees, variant: Variant, microbatches: int) -> Array:
        """Resources of every row's parameters for a whole step; rows of any placement that read the same are priced once."""
        if id(placement) not in self._rows_read:
            keys = [(row.uses, row.block) for row in placement.rows]
            self._rows_read[id(placement)] = [self._read.setdefault(key, len(self._read)) for key in keys]
        known, read = self._vectors.setdefault((degrees, variant, microbatches), {}), self._rows_read[id(placement)]
        for number, row in zip(read, placement.rows, strict=True):
            if number not in known:
                known[number] = self._row(row, degrees, variant, microbatches)
        return np.array([known[number] for number in read])

    def _row(self, row: PlacedPosition, degrees: Degrees, variant: Variant, microbatches: int) -> Vector:
        """Resources of a row's parameters for a whole step."""
        costs, unit = self._prices(degrees, microbatches), Neighbours(root=not row.block)
        total = np.zeros(RESOURCES)
        for use in row.uses:
            if not use.first and degrees.pp == 1:
                continue
            need = renamed(use.need, degrees)
            found = costs.parameter(use.value, need, use.trainable, variant, use.group, unit, use.late)
            total += np.full(RESOURCES, np.inf) if found is None else found
            if not use.first:  # the gradients of a weight that two stages read are exchanged, by every data rank a piece
                bytes_ = use.value.numel / degrees.mesh.size(need.split_axes) * 4
                axes = variant.shard_axes if variant.zero else variant.data_axes
                total[SEND_BACK] += 2 * self.crossing(degrees, bytes_ / degrees.mesh.size(axes))
                total[SEND_BACK] += 0.0 if variant.zero else costs.collective("all_gather", axes, bytes_)
        return total

    def shared(self, placement: Placement, degrees: Degrees, zero: int, microbatches: int, apart: bool) -> tuple[Shared, ...]:
        """Parameters that several positions read, which are counted with each of them: where one stage has two that follow each
        other, or if ``apart`` the first one and the last one where two stages of a rank have them."""
        key = id(placement), degrees, zero, microbatches > 1, apart
        if key not in self._shared:
            costs, variant, found = self._prices(degrees, microbatches), degrees.variant(zero), list[Shared]()
            columns = [OPTIMIZER] if apart and variant.data_axes else np.flatnonzero(bytes_row(microbatches)).tolist()
            for at, root, use, before, first in self._read_again(placement):
                if not apart or at == len(placement.sequence) - 1:
                    need, unit = renamed(use.need, degrees), Neighbours(root=root)
                    price = costs.parameter(use.value, need, use.trainable, variant, use.group, unit, use.late)
                    bytes_ = 0.0 if price is None else float(price[columns].sum())
                    again = 0.0 if apart or not root else sum(self._reduced([use], degrees, variant, microbatches > 1))
                    found.append(Shared(first if apart else before, at, bytes_ - again * (GRADIENTS in columns), again))
            self._shared[key] = tuple(one for one in found if not apart or one.before == 0)
        return self._shared[key]

    def _read_again(self, placement: Placement) -> list[tuple[int, bool, Use, int, int]]:
        """Reads of parameters that earlier positions read: where, whether outside of a block, where they were read last before,
        and first."""
        if id(placement) not in self._again:
            before, first, found = dict[str, int](), dict[str, int](), list[tuple[int, bool, Use, int, int]]()
            for at, number in enumerate(placement.sequence):
                row = placement.rows[number]
                for use in row.uses:
                    name = use.value.name
                    if not use.first and before.get(name, at) < at:  # equal blocks are one row: their names say less
                        found.append((at, not row.block, use, before[name], first[name]))
                    before[name], first[name] = at, first.get(name, at)
            self._again[id(placement)] = found
        return self._again[id(placement)]

    def _prices(self, degrees: Degrees, microbatches: int) -> Costs:
        key = (degrees, microbatches)
        if key not in self._costs:
            near = _neighbourhood(self.cluster, degrees)
            costs = Costs(
                self.cluster, near.mesh, microbatches=microbatches, itemsize=self.itemsize, state_bytes=self.state_bytes
            )
            costs.network = self._network(degrees)
            self._costs[key] = costs
        return self._costs[key]

    def _network(self, degrees: Degrees) -> Network:
        near = _neighbourhood(self.cluster, degrees)
        if near not in self._networks:
            self._networks[near] = Network(self.cluster, near.mesh)
        return self._networks[near]


def _beside(running: Array, ended: Array, roots: Array, gathered: Array, reduced: Array) -> tuple[Array, ...]:
    """``pipeline.intervals.BESIDE`` of positions but for what they release. ``running``, ``ended``: of ``_transient``;
    ``gathered``: of ``_gathered``; ``reduced``: of ``_reduced``, [n, 2]. While a position runs what is behind it is being
    reduced, the root's where no block is, and the block before it is there, which is taken to be as large."""
    last, root = np.where(roots, 0.0, reduced[:, 1]), np.where(roots, reduced.sum(axis=1), 0.0)
    behind, first, there, ends = np.zeros(len(roots)), last.copy(), 0.0, True
    for at in reversed(range(len(roots))):
        behind[at] = there
        if last[at]:
            there, ends = last[at], False
        there += root[at] * ends
        first[at] = there * (not ends)
    before = np.cumsum(~roots) - ~roots > 0
    return running - gathered * ~before, behind, gathered * before, ended, first, root


def _neighbourhood(cluster: Cluster, degrees: Degrees) -> Degrees:
    """As many stages as there are at least two and as fill whole nodes; all of them on a torus, whose links are shared."""
    stage = degrees.data * degrees.context * degrees.tensor
    if cluster.island.torus or degrees.pp == 1:
        return degrees
    few = math.lcm(stage, cluster.per_node) // stage
    wanted = next((n for n in range(max(2, 2 * few), degrees.pp + 1) if degrees.pp % n == 0), degrees.pp)
    return replace(degrees, pp=wanted)


def renamed(sharding: Sharding, degrees: Degrees) -> Sharding:
    """A placement's sharding over the axes of the plan's mesh: hybrid data ranks are two axes."""
    if DATA in degrees.mesh.axes:
        return sharding

    def both(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(new for axis in axes for new in ((REPLICATE, SHARD) if axis == DATA else (axis,)))

    dims = tuple(both(axes) for axes in sharding.dims)
    return replace(sharding, dims=dims, partial=frozenset(both(sorted(sharding.partial))),
                   varying=frozenset(both(sorted(sharding.varying))))


def renamed_assignment(assignment: Mapping[str, str], degrees: Degrees) -> dict[str, str]:
    """An operator's assignment over the axes of the plan's mesh."""
    if DATA in degrees.mesh.axes:
        return dict(assignment)
    result: dict[str, str] = {}
    for axis, factor in assignment.items():
        result.update(dict.fromkeys((REPLICATE, SHARD) if axis == DATA else (axis,), factor))
    return result
