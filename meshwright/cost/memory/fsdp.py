"""What FSDP2 holds of the parameters while segments run forward and backward over them: a program's, or one stage's.

    unit       the parameters that one block reads alone; the root's are the rest. Those that are split over other ranks, or
               held or read in another type, are units of their own, one inside the other (``runtime.assemble``)
    forward    gather the unit, run the segment (``replay``), free the unit (ZeRO-3)
    backward   gather it again, ask for the one ahead, run the segment backward, reduce its gradients

Per unit of N elements over s ranks, c bytes in compute, 4 in reductions (torch 2.13, the reshard and reduce rules of
``runtime.engine``):

    gather     N c to communicate, then N c in place; in the forward the former stays until the next unit's gather,
               in the backward the unit ahead is gathered early. With s = 1 a copy is made all the same.
    reduce     4 N to communicate, which stays until the next unit reduces, and 4 N / s for the result

FSDP1 (``Software.flat_units``) gathers a unit straight into its place, joins its gradients into one flat tensor of N c and lets
go of that when it is reduced, in the compute dtype (torch 2.1, ``_flat_param.py`` and ``_runtime_utils.py`` of
``torch/distributed/fsdp``).

Parameters that FSDP2 does not take (no data axis, numbers without dims, buffers) lie there as they are, but for a copy in the
compute dtype. Of DTensors (what FSDP2 takes is one where other ranks than those of its data axes have pieces or copies of
it) the gradients of a unit are copied together when all are there, or each for itself where a backward is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from meshwright.cost.memory.replay import (
    ACTIVATIONS,
    GRADIENTS,
    WORK,
    Half,
    Heap,
    Storage,
    Tape,
    add_gradient,
    backward,
    forward,
    hold,
    logits_of,
    of_one_stage,
    script_of,
    with_fused_activations,
    with_narrow_loss,
    with_packed_attention,
    with_plain_collectives,
    with_plain_loss,
    with_sequence_first,
    with_whole_heads,
)
from meshwright.ir.mesh import Mesh
from meshwright.ir.program import Program, Segment, Stored
from meshwright.ir.sharding import ceil_div

GATHERED = "gathered"
_REDUCED = 4
"""Bytes of an element in which gradients are reduced and kept."""


@dataclass
class GatheredUnit:
    """Parameters that FSDP2 gathers together (one of its units), and what it holds of them now."""

    elements: float
    shards: int
    itemsize: int
    zero: int
    root: bool
    names: tuple[str, ...]
    incoming: Storage | None = None
    whole: Storage | None = None
    weights: dict[str, Storage] = field(default_factory=dict)
    wide: dict[str, Storage] = field(default_factory=dict)  # gradients of micro-batches so far, in fp32 where they were not
    piece: Storage | None = None

    @property
    def frees(self) -> bool:
        """Whether it is gathered anew for every forward and backward."""
        return self.zero == 3 and not self.root


class Software(NamedTuple):
    """What other software than this package's holds of a step (``Device``). ``narrow``: gradients are summed in the compute
    dtype; ``buckets``: out of buckets; ``plain_loss``: the gradient of a cross entropy's softmax lies beside that of its loss;
    ``kept_logits``: micro-batches whose logits are kept; ``keeps_heads``: values of attention keep the one product that they
    are a slice of; ``flat_state``: optimizer state is one tensor of each kind; ``plain_collectives``: torch.distributed's own;
    ``packed``: attention is over packed sequences, for which the host waits; ``narrow_loss``: the cross entropy works in place
    on logits as the model makes them; ``fused_activations``: what lies between pointwise operators is made again;
    ``flat_units``: a unit is gathered and reduced as one flat tensor (FSDP1); ``own_units``: what is outside of the blocks is a
    unit for each of its modules, not all of it the root's; ``gather_buffer``: what linears gather lies in one buffer."""

    narrow: bool = False
    buckets: bool = False
    plain_loss: bool = False
    kept_logits: int = 0
    keeps_heads: bool = False
    flat_state: bool = False
    plain_collectives: bool = False
    packed: bool = False
    narrow_loss: bool = False
    fused_activations: bool = False
    flat_units: bool = False
    own_units: bool = False
    gather_buffer: bool = False


OWN = Software()


@dataclass
class Batch:
    """A micro-batch between its forward and its backward: what each segment left, copies of parameters, outputs; and between
    the halves of a split one the gradients of what leaves (``left``), if any comes of weights alone."""

    tapes: list[Tape]
    casts: list[Storage]
    outputs: dict[str, Storage]
    left: dict[str, Storage] = field(default_factory=dict)


class RootUnit:
    """Segments that one root unit holds together: a program, or a stage of it. ``leaving``: the values that it hands back;
    ``shares``: whether micro-batches read the same copies of loose parameters (``engine.Casts``); ``apart``: whether gradients
    go to the weights each on its own way (a split backward)."""

    def __init__(
        self, program: Program, main: Sequence[Segment], leaving: Sequence[str], heap: Heap, software: Software = OWN,
        shares: bool = False, apart: bool = False,
    ) -> None:
        self.program, self.mesh, self.main, self.leaving, self.heap = program, program.mesh, main, leaving, heap
        held = [stored.value for stored in program.stored]
        alone = [axis for axis in self.mesh.axes if self.mesh.size(axis) == 1]
        self.scripts = [script_of(segment.graph, held, program.operators, alone) for segment in self.main]
        if software.plain_loss:
            self.scripts = [with_plain_loss(script, program.operators) for script in self.scripts]
        if software.keeps_heads:
            self.scripts = [with_whole_heads(script, program.operators) for script in self.scripts]
        if software.plain_collectives:
            self.scripts = [with_plain_collectives(script, program.operators) for script in self.scripts]
        if software.gather_buffer:
            both = [with_sequence_first(script, program.operators) for script in self.scripts]
            self.scripts = [script for script, _ in both]
            heap.keep(max((buffer for _, buffer in both), default=0.0))
        if software.narrow_loss:
            self.scripts = [with_narrow_loss(script, program.operators) for script in self.scripts]
        if software.fused_activations:
            self.scripts = [with_fused_activations(script, program.operators) for script in self.scripts]
        if software.packed:
            self.scripts = [with_packed_attention(script, program.operators) for script in self.scripts]
        if apart:
            self.scripts = of_one_stage(self.scripts, leaving)
        for script in self.scripts * software.kept_logits:
            itemsize = (program.compute_dtype or torch.float32).itemsize
            heap.new(float(logits_of(script, program.operators) * itemsize), ACTIVATIONS)
        self.software, self.shares, self.apart = software, shares, apart
        self.stored = {stored.value: stored for stored in program.stored}
        self.homes = _homes(program.stored, main, leaving, software.own_units)
        self.units = {home: self._units(home) for home in (*range(len(self.main)), -1)}
        self.readers = _last_reads(main, leaving)
        self.first = _first_reads(main)
        self.loose: dict[str, Storage] = {}  # gradients of what FSDP2 does not take: of this micro-batch, on their way
        self.settled: dict[str, Storage] = {}  # and where they are summed
        self.locals: dict[str, Storage] = {}  # gradients that are copied to DTensors together (``layout.Locals``)
        self.meeting: dict[str, Storage] = {}  # gradients of a weight that wait for those of its other readers
        self.moving = frozenset[str]().union(*(script.moving for script in self.scripts)) if apart else frozenset()
        self.reducing: Storage | None = None
        self.gathering: Storage | None = None
        for unit in (unit for units in self.units.values() for unit in units) if software.buckets else ():
            if unit.zero < 2:
                heap.new(unit.elements * unit.itemsize, GRADIENTS)
        self.shared: Storage | None = None

    # parameters

    def _units(self, home: int) -> tuple[GatheredUnit, ...]:
        """Those of a block, or of the root; the innermost first."""
        families: dict[object, list[Stored]] = {}
        for one in self.program.stored:
            if self.homes.get(one.value) == home and gathers(one, self.mesh):
                axes = (tuple(a for a in over if self.mesh.size(a) > 1) for over in (one.data_axes, one.shard_axes))
                module = one.fqns[0].rpartition(".")[0] if self._outside(home) else ""
                key = *axes, one.dtype, rest_itemsize(one, self.program), module
                families.setdefault(key, []).append(one)
        root = home < 0
        zero = min(2, max((s.zero for s in self.main if not s.path), default=1)) if root else self.main[home].zero
        found = []
        for members in families.values():
            dtype = self.program.compute_dtype or members[0].dtype
            elements = sum(local_elements(s, self.mesh) for s in members)
            shards = self.mesh.size(members[0].shard_axes)
            found.append(GatheredUnit(elements, shards, dtype.itemsize, zero, root, tuple(s.value for s in members)))
        return tuple(found)

    def _outside(self, index: int) -> bool:
        """Whether a segment is outside of the blocks and its modules are units of their own."""
        return self.software.own_units and index >= 0 and not self.main[index].path

    # a micro-batch

    def forward(self, env: dict[str, Storage]) -> Batch:
        """``env``: storages by value, held once for this; what leaves is held by the result."""
        if self.shares and self.shared is None:
            self.shared = self._copies([s for s in self.program.stored if self._loose(s)])
        self._gather_all(self.units[-1])
        casts = [self._cast(-1)]
        tapes: list[Tape] = []
        for index, (segment, script) in enumerate(zip(self.main, self.scripts, strict=True)):
            units = self.units[index]
            self._gather_all(units)
            cast = self._cast(index)
            tape, made = forward(script, self.heap, env, segment.recompute)
            if segment.recompute == "none":
                casts.append(hold(cast))
            self.heap.drop(cast)
            tapes.append(tape)
            env.update(made)
            for name in self.readers[index]:
                if name in env:
                    self.heap.drop(env.pop(name))
            for unit in units:
                if unit.frees:
                    self._free(unit)
        self._done(self.gathering)
        self.gathering = None
        return Batch(tapes, casts, {name: env.pop(name) for name in self.leaving if name in env and name not in self.stored})

    def backward(
        self, batch: Batch, grads: dict[str, Storage], last: bool, reduces: bool = True, half: Half = "both"
    ) -> None:
        """``grads``: of what leaves, taken; of what entered, added. ``last``: of the step; without ``reduces`` FSDP2 reduces
        and frees nothing (``reduce``); ``half``: of a split backward."""
        self._prefetch(len(self.main))
        if half == "inputs" and not self.moving.issuperset(grads):  # made of weights alone: all that left waits for W
            batch.left = {name: hold(storage) for name, storage in grads.items()}
        if half == "weights":
            again = any(script.leads is not None for script in self.scripts)
            grads.update((name, hold(storage)) for name, storage in batch.left.items() if again or name not in self.moving)
        for index in reversed(range(len(self.main))):
            units = self.units[index]
            if any(unit.frees for unit in units):
                self._gather_all(units, forward=False)
            late = len(units) > 1 and self._outside(index)  # the first of its units asks, when the backward has come to it
            if any(unit.frees for unit in units) and not late:
                self._prefetch(index)
            self._backward(index, batch, grads, half)
            if late:
                self._prefetch(index)
            for unit in units if reduces else ():
                self._reduce(unit, last)
        for tape in batch.tapes:
            for storage in tape.ends:
                self.heap.drop(storage)
            tape.ends.clear()
        if half == "inputs":
            return
        self.heap.drop(batch.casts.pop())
        for storage in batch.left.values():
            self.heap.drop(storage)
        self._complete(-1, half)
        for unit in self.units[-1] if reduces else ():
            self._reduce(unit, last)
        if last and reduces:
            self._done(self.reducing)
            self.reducing = None

    def reduce(self) -> None:
        """All that no backward reduced."""
        for home in reversed(self.units):
            for unit in self.units[home]:
                self._reduce(unit, last=True)
        self._done(self.reducing)
        self.reducing = None

    def _backward(self, index: int, batch: Batch, grads: dict[str, Storage], half: Half) -> None:
        again = self.main[index].recompute != "none"
        names = [*(param.value for param in self.main[index].graph.params), *self.main[index].graph.inputs]
        weights = {name: self.meeting.pop(name) for name in names if name in self.meeting}
        if again:
            batch.casts.append(self._cast(index))

        def done(name: str) -> None:
            if self.first[name] == index:
                self._add(name, weights.pop(name), half)

        backward(batch.tapes[index], self.heap, grads, weights, half, done)
        if again or half != "inputs":
            self.heap.drop(batch.casts.pop())
        self.meeting.update(weights)
        self._complete(index, half)
        for root in self.units[-1] if self.software.buckets else ():
            if root.zero < 2:  # what is ready is summed at once
                self._widen(root)

    def _complete(self, home: int, half: Half) -> None:
        """Behind the backward of a segment, or of the stage (-1): its weights' gradients reach their sums."""
        for name in [name for name in self.meeting if home < 0 or self.first[name] == home]:
            self._add(name, self.meeting.pop(name), half)
        copied = [(name, storage) for name, storage in self.locals.items() if self.homes[name] == home]
        copies = [self.heap.new(storage.bytes, WORK) for _, storage in copied]
        for (name, _), copy in zip(copied, copies, strict=True):
            self.heap.drop(self.locals.pop(name))
            unit = next(unit for unit in self.units[home] if name in unit.names)
            add_gradient(self.heap, unit.weights, name, copy)
        if half == "both":
            self._settle(home)
            for unit in self.units[home] if self.apart else ():
                self._widen(unit)

    def _add(self, name: str, storage: Storage, half: Half) -> None:
        """The gradient of a weight, when all that read it have made theirs: to what its unit's backward made, or to where it
        waits for the end of that; in the second half of a split backward to its sum at once, by FSDP2 as it is."""
        stored = self.stored[name]
        taken, copied = gathers(stored, self.mesh), (1.0,) if self._distributed(stored) else ()
        unit = next((unit for unit in self.units[self.homes[name]] if name in unit.names), None)
        ways: tuple[float, ...]
        if half != "weights":
            waits = bool(taken and copied and not self.apart)
            sums = self.locals if waits else self.loose if unit is None else unit.weights
            ways = copied if taken and self.apart else ()
        else:
            wide = tuple(times for times in (self._widened(stored),) if times > 1.0)
            sums = self.settled if unit is None else unit.wide if wide else unit.weights
            ways = wide + copied if not taken else copied if name in sums else copied + wide
        add_gradient(self.heap, sums, name, storage, ways)

    def _distributed(self, stored: Stored) -> bool:
        """Whether it is read as a DTensor, whose gradient is a copy of its local one (``layout.Locals``)."""
        return self.mesh.distributes(stored.data_axes if gathers(stored, self.mesh) else ())

    def _widened(self, stored: Stored) -> float:
        """By how much a gradient grows on its way to a sum in fp32: of a loose parameter through its copy in the compute dtype,
        of one that FSDP2 gathers behind its half of a split backward."""
        dtype = self.program.compute_dtype
        read = self._loose(stored) or gathers(stored, self.mesh)
        return _REDUCED / dtype.itemsize if dtype is not None and read and not self.software.narrow else 1.0

    def _settle(self, home: int) -> None:
        """Gradients of loose parameters reach their sums when their readers' backward is done, for autograd runs first what was
        made last, and parameters are read before anything else. Where ranks hold DTensors they are copied, all together
        (``layout.Locals``), or each on its own way."""
        made: dict[str, Storage] = {}
        for name in [name for name in self.loose if self.homes[name] == home]:
            storage, times = self.loose.pop(name), self._widened(self.stored[name])
            made[name] = self.heap.new(times * storage.bytes, GRADIENTS) if times > 1.0 else hold(storage)
            self.heap.drop(storage)
        for together in [{name: storage} for name, storage in made.items()] if self.apart else [made]:
            copies = together
            if self.mesh.world > 1:
                copies = {name: self.heap.new(storage.bytes, GRADIENTS) for name, storage in together.items()}
                for storage in together.values():
                    self.heap.drop(storage)
            for name, storage in copies.items():
                if name in self.settled:
                    self.heap.drop(storage)
                else:
                    self.settled[name] = storage

    def _cast(self, home: int) -> Storage:
        """Copies in the compute dtype of the parameters that FSDP2 does not gather (unless they are shared), and of those that
        hold several weights of which a rank exchanges rows to have its piece of each."""
        own = [s for s in self.program.stored if self.homes.get(s.value) == home]
        copied = [s for s in own if s.fused > 1 and self.mesh.size(s.tensor.dims[s.fused_dim]) > 1]
        return self._copies(copied + [s for s in own if not self.shares and self._loose(s) and s not in copied])

    def _loose(self, stored: Stored) -> bool:
        """Whether FSDP2 does not take it and a copy of it is read."""
        wide = self.program.compute_dtype is not None and not stored.buffer and stored.dtype.is_floating_point
        return wide and not gathers(stored, self.mesh) and stored.value in self.homes

    def _copies(self, copied: Sequence[Stored]) -> Storage:
        dtype = self.program.compute_dtype
        return self.heap.new(sum(local_elements(s, self.mesh) * (dtype or s.dtype).itemsize for s in copied), GATHERED)

    def end(self) -> None:
        """After a schedule: what its micro-batches shared is let go."""
        self._done(self.shared)
        self.shared = None

    # what FSDP2 does

    def _gather_all(self, units: Sequence[GatheredUnit], forward: bool = True) -> None:
        for unit in reversed(units):
            self._gather(unit, forward)

    def _gather(self, unit: GatheredUnit, forward: bool = True) -> None:
        if unit.whole is not None:
            return
        size = unit.elements * unit.itemsize
        if self.software.flat_units:
            unit.whole = unit.incoming or self._start(unit)
            unit.incoming = None
        elif unit.shards > 1:
            incoming = unit.incoming or self._start(unit)
            unit.incoming = None
            if forward:
                self._done(self.gathering)
            unit.whole = self.heap.new(size, GATHERED)
            if forward:
                self.gathering = incoming
            else:
                self._done(incoming)
        else:
            unit.whole = self.heap.new(size, GATHERED)

    def _start(self, unit: GatheredUnit) -> Storage:
        """An all-gather begun; its input in the compute dtype is a copy."""
        copy = self.heap.new(unit.elements / unit.shards * unit.itemsize if unit.itemsize < _REDUCED else 0.0, WORK)
        incoming = self.heap.new(unit.elements * unit.itemsize, GATHERED)
        self.heap.drop(copy)
        return incoming

    def _prefetch(self, index: int) -> None:
        """The unit ahead of this one in the backward begins its gather."""
        ahead = next((units[-1] for units in (self.units[i] for i in reversed(range(index))) if units), None)
        if ahead is not None and ahead.frees and ahead.whole is None and ahead.shards > 1:
            ahead.incoming = self._start(ahead)

    def _free(self, unit: GatheredUnit) -> None:
        if unit.whole is not None:
            self.heap.drop(unit.whole)
            unit.whole = None

    def _done(self, buffer: Storage | None) -> None:
        """A collective's buffer is let go."""
        if buffer is not None:
            self.heap.drop(buffer)

    def _reduce(self, unit: GatheredUnit, last: bool) -> None:
        """After a unit's backward: its gradients reduced, or kept whole for a later micro-batch."""
        if last or unit.zero == 3:
            self._free(unit)
        if not (last or unit.zero >= 2):
            self._widen(unit)
            return
        if unit.wide:  # what the last micro-batch made is added first
            for storage in unit.weights.values():
                self.heap.drop(storage)
            unit.weights.clear()
        self._done(self.reducing)
        self.reducing = self.heap.new(unit.elements * (unit.itemsize if self.software.flat_units else _REDUCED), WORK)
        for storage in (*unit.weights.values(), *unit.wide.values()):
            self.heap.drop(storage)
        unit.weights.clear()
        unit.wide.clear()
        piece = self.heap.new(unit.elements / unit.shards * _REDUCED, GRADIENTS)
        if self.software.flat_units:
            self._done(self.reducing)
            self.reducing = None
        self.heap.space(unit.elements * _REDUCED if unit.shards == 1 else 0.0)
        if unit.piece is None:
            unit.piece = piece
        else:
            self.heap.drop(piece)

    def _widen(self, unit: GatheredUnit) -> None:
        """A micro-batch's gradients in the compute dtype become fp32, or are added to what is."""
        if unit.itemsize >= _REDUCED or self.software.narrow:
            return
        for name, storage in unit.weights.items():
            if name not in unit.wide and storage.bytes:
                unit.wide[name] = self.heap.new(storage.bytes / unit.itemsize * _REDUCED, GRADIENTS)
            self.heap.drop(storage)
        unit.weights.clear()


def local_elements(stored: Stored, mesh: Mesh) -> float:
    """Local elements under the program's own split."""
    result = 1.0
    for size, axes in zip(stored.shape, stored.tensor.dims, strict=True):
        result *= ceil_div(size, mesh.size(axes))
    return result


def gathers(stored: Stored, mesh: Mesh) -> bool:
    """Whether FSDP2 takes it."""
    return stored.trainable and bool(stored.shape) and mesh.size(stored.data_axes) > 1


def at_rest(stored: Stored, mesh: Mesh) -> float:
    """Elements at rest."""
    return local_elements(stored, mesh) / (mesh.size(stored.shard_axes) if gathers(stored, mesh) else 1)


def rest_itemsize(stored: Stored, program: Program) -> int:
    """Bytes per element at rest: parameters in the compute dtype have their master in fp32."""
    master = program.compute_dtype is not None and not stored.buffer and stored.dtype == program.compute_dtype
    return 4 if master else stored.dtype.itemsize


def _homes(stored: Sequence[Stored], main: Sequence[Segment], leaving: Sequence[str], apart: bool = False) -> dict[str, int]:
    """{stored value: index of the one block (``apart``: or other segment) that reads it, else -1}. What nobody reads is left
    out."""
    found: dict[str, int] = {}
    names = {s.value for s in stored}
    for index, segment in enumerate(main):
        for name in (*(param.value for param in segment.graph.params), *segment.graph.inputs):
            if name in names:
                own = name not in found and (apart or bool(segment.path)) and name not in segment.graph.inputs
                found[name] = index if own else -1
    found.update((name, -1) for name in leaving if name in found)
    return found


def _last_reads(main: Sequence[Segment], leaving: Sequence[str]) -> list[list[str]]:
    """For every segment the values of the environment that no later one reads."""
    needed, result = set(leaving), []
    for segment in reversed(main):
        names = {*segment.graph.inputs, *segment.graph.outputs}
        result.append(sorted(names - needed))
        needed |= set(segment.graph.inputs)
    return result[::-1]


def _first_reads(main: Sequence[Segment]) -> dict[str, int]:
    """The first segment that reads each value."""
    found = dict[str, int]()
    for index, segment in enumerate(main):
        for name in (*(param.value for param in segment.graph.params), *segment.graph.inputs):
            found.setdefault(name, index)
    return found
