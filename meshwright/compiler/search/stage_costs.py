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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from meshwright.compiler.pipeline.degrees import Degrees, renamed
from meshwright.compiler.pipeline.intervals import Intervals, Shared
from meshwright.compiler.pipeline.stage_memory import StageMemory
from meshwright.compiler.pipeline.stages import positions_of
from meshwright.compiler.pipeline.transients import BESIDE
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
    Costs,
    Neighbours,
    Variant,
    Vector,
    bytes_row,
)
from meshwright.compiler.placement.rows import CONTEXT, EP, NONE, TENSOR, PlacedPosition, Placement, Use
from meshwright.compiler.search.candidates import Candidate
from meshwright.cost.cluster import Cluster
from meshwright.cost.collectives import Network
from meshwright.ir.graph import Value
from meshwright.ir.mesh import HEADS, PP
from meshwright.ir.schedules import schedule_of
from meshwright.ir.sharding import Sharding

Array = np.ndarray
_FP32 = 4
"""Bytes of an element of what FSDP2 reduces."""


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
    entered: Array
    left: Array
    transient: Array
    released: Array
    behind: Array
    gathered: Array
    ended: Array
    reduced: Array
    root: Array
    closed: Array
    last: Array
    freed: Array
    finished: Array
    first: Array
    early: Array
    began: Array
    came: Array
    stays: Array

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
        """``pipeline.transients.BESIDE`` of every unit, [16, n]."""
        return np.array([getattr(self, name) for name in BESIDE])

    @property
    def least_held(self) -> Array:
        """Bytes of every unit of a micro-batch in flight, from F to I and from I to W."""
        return np.asarray(np.minimum(self.saved, self.pending))

    def cut_at(self, starts: Sequence[int], mixed: bool) -> Units:
        """The same if stages start there, and end: of a split backward those up to the first unit that is trained have all in
        W. ``mixed``: whether others run whole ones, too."""
        if not self.first.any():
            return self
        behind = next(start for start in starts if start > int((self.came > 0.0).argmax()))
        there, nothing = np.arange(len(self.first)) < behind, 0.0 * self.first
        own = {"transient": nothing, "released": nothing, "last": self.first, "early": self.began,
               "freed": self.saved - self.stays, "pending": self.saved}
        pairs = ("last", self.first), ("early", self.began)
        other = {name: np.maximum(getattr(self, name), of) for name, of in pairs} if mixed else {}
        return replace(self, first=nothing, **{name: np.where(there, of, other.get(name, getattr(self, name)))
                                               for name, of in own.items()})

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
        self.memory = StageMemory(itemsize, 1.0 if cluster.device.narrow_sums else max(1.0, _FP32 / itemsize))
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
        several, variant = microbatches > 1, kept or degrees.variant(zero)
        pending[placement.sequence[-1]] += placement.outputs_kept * (not several)  # handed back as they are, outputs stay
        beside = self.memory.beside(placement, degrees, variant, several, run, once, pending if split else None)
        left = np.zeros(len(run))  # what reductions of the root leave is not there all the time
        left[list(placement.sequence)] = beside["root"]
        summed = once[:, GRADIENTS] - left if several else left
        state = once[:, bytes_row(microbatches) > 0].sum(axis=1) + run[:, PARAMETERS] - left
        if split:  # nothing is reduced before the schedule is done
            whole = np.array([row.whole for row in self.memory.rows(placement, degrees, variant, several)])
            state, summed = state - summed + whole, whole
        columns = [
            forward, backward, weight + recomputed * split,
            state, run[:, SAVED], pending, summed,
            once[:, [GATHER, GATHER_ONCE, SEND]].sum(axis=1), once[:, [REDUCE, REDUCE_ONCE, SEND_BACK]].sum(axis=1),
            once[:, BACKWARD],
            np.where(ahead > 0.0, forward, 0.0) * ahead, each[:, BACKWARD],
        ]
        found = [column[list(placement.sequence)] for column in columns]
        found += self._ends(placement, recompute)
        return Units(*found, *(beside[name] for name in BESIDE))

    def _ends(self, placement: Placement, recompute: str) -> tuple[Array, Array]:
        """Bytes of what enters each position from another rank and is not among what it saves, or is made again there, which a
        block that recomputes holds as what it is handed, and of what it sends on."""
        rows, sent = [placement.rows[row] for row in placement.sequence], np.array([0.0, *placement.sent[:-1]])
        again = np.array([row.block and recompute != NONE for row in rows])
        entered = np.maximum(sent - [row.entering for row in rows], 0.0)
        return np.where(again, [0.0, *placement.crossing[:-1]] - sent, entered), np.array([*placement.sent[:-1], 0.0])

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
            if not use.first and use.trainable:  # gradients of what two stages read are exchanged, by every data rank a piece
                bytes_ = use.value.numel / degrees.mesh.size(need.split_axes) * 4
                axes = variant.shard_axes if variant.zero else variant.data_axes
                total[SEND_BACK] += 2 * self.crossing(degrees, bytes_ / degrees.mesh.size(axes))
                total[SEND_BACK] += 0.0 if variant.zero else costs.collective("all_gather", axes, bytes_)
        return total

    def shared(self, placement: Placement, degrees: Degrees, zero: int, microbatches: int, apart: bool) -> tuple[Shared, ...]:
        """Parameters that several positions read, which are counted with each of them: where one stage has two that follow each
        other, or if ``apart`` where two stages of a rank have them, any of them and the first."""
        key = id(placement), degrees, zero, microbatches > 1, apart
        if key not in self._shared:
            costs, variant, found = self._prices(degrees, microbatches), degrees.variant(zero), list[Shared]()
            columns = [OPTIMIZER] if apart and variant.data_axes else np.flatnonzero(bytes_row(microbatches)).tolist()
            for at, root, use, before, first in self._read_again(placement):
                need, unit = renamed(use.need, degrees), Neighbours(root=root)
                price = costs.parameter(use.value, need, use.trainable, variant, use.group, unit, use.late)
                bytes_ = 0.0 if price is None else float(price[columns].sum())
                alone = self.memory.gradients([use], degrees, variant, microbatches > 1).reduced
                again = sum(alone) * (root and not apart and microbatches > 1)
                found.append(Shared(first if apart else before, at, bytes_ - again, again, use.value.name))
            self._shared[key] = tuple(found)
        return self._shared[key]

    def twice(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, starts: Sequence[int] = (),
        most: int = 0,
    ) -> Array:
        """Bytes of every rank [pp] that its stages count twice: a weight that several of them read is one there; if FSDP2 takes
        it, parameter and gradient are as many as they. Of stages that begin at ``starts``, and the end; if these are not known,
        of any at least, or with up to so many stages a rank at ``most``."""
        schedule, last, found = schedule_of(candidate.schedule), len(placement.sequence) - 1, np.zeros(candidate.pp)
        rank_of, readers = np.array(schedule.stage_rank(candidate.pp, candidate.virtual_stages)), dict[str, list[Shared]]()
        several = () if schedule.stages == 1 else self.shared(placement, degrees, zero, candidate.microbatches, apart=True)
        for one in several:
            readers.setdefault(one.name, []).append(one)
        for others in readers.values():
            at, bytes_ = [others[0].before, *(one.at for one in others)], max(one.bytes_ for one in others)
            if most and at != [0, last]:
                found += bytes_ * (min(len(at), most) - 1)
                continue
            stages = [-(one == last) for one in at if one in {0, last}]
            if starts:
                stages = np.searchsorted(starts[1:-1], at, side="right").tolist()
            ranks = rank_of[np.unique(np.array(stages, dtype=np.int64))]
            found += bytes_ * np.maximum(np.bincount(ranks, minlength=candidate.pp) - 1, 0)
        return found

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


def _neighbourhood(cluster: Cluster, degrees: Degrees) -> Degrees:
    """As many stages as there are at least two and as fill whole nodes; all of them on a torus, whose links are shared."""
    stage = degrees.data * degrees.context * degrees.tensor
    if cluster.island.torus or degrees.pp == 1:
        return degrees
    few = math.lcm(stage, cluster.per_node) // stage
    wanted = next((n for n in range(max(2, 2 * few), degrees.pp + 1) if degrees.pp % n == 0), degrees.pp)
    return replace(degrees, pp=wanted)
