"""The peak of a training step on one rank, from the program that the rank runs: what is alive at the worst moment.

    standing        parameters and buffers at rest, optimizer state, the batch
    + activations   kept by autograd for the backwards to come, and what the program hands back
    + gradients     of the parameters so far
    + gathered      parameters that FSDP2 has gathered, in the compute dtype
    + transient     gradients of activations, work space, communication buffers, the optimizer's temporaries

The steps of one micro-batch are replayed in the order in which they run (``replay``): its segments forward, then backward,
around each unit of parameters what FSDP2 allocates (torch 2.13, the reshard and reduce rules of ``runtime.engine``). Of several
micro-batches the first and the last are replayed: the last finds all gradients and outputs that the others left.

FSDP2, per unit of N elements over s ranks, c bytes in compute, 4 in reductions:

    gather     N c to communicate, then N c in place; in the forward the former stays until the next unit's gather,
               in the backward the unit ahead is gathered early. With s = 1 a copy is made all the same.
    reduce     4 N to communicate, which stays until the next unit reduces, and 4 N / s for the result

Not seen here: the allocator's fragmentation, the libraries' own work spaces, the CUDA context (``Device.reserve_bytes``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshwright.cost.replay import ACTIVATIONS, GRADIENTS, WORK, Heap, Storage, Tape, backward, forward, hold, script_of
from meshwright.graph import refs
from meshwright.program import Program, Segment, Stored
from meshwright.sharding import ceil_div

GATHERED = "gathered"
_REDUCED = 4  # bytes per element in which gradients are reduced and kept


@dataclass(frozen=True)
class Peak:
    """Bytes per rank at the worst moment of a step, and by kind."""

    bytes: float
    kinds: Mapping[str, float]


def peak(program: Program, state_bytes: float) -> Peak:
    """Of a steady training step of this rank's program. ``state_bytes``: optimizer state per parameter; torch's optimizers
    treat DTensors one after the other, so their temporaries are those of the largest."""
    return _Step(program, state_bytes).run()


@dataclass
class _Unit:
    """Parameters gathered together, and what FSDP2 holds of them now."""

    elements: float
    shards: int
    itemsize: int
    zero: int
    root: bool
    names: tuple[str, ...]
    incoming: Storage | None = None
    whole: Storage | None = None
    weights: dict[str, Storage] = field(default_factory=dict)
    piece: Storage | None = None

    @property
    def frees(self) -> bool:
        """Whether it is gathered anew for every forward and backward."""
        return self.zero == 3 and not self.root


class _Step:
    def __init__(self, program: Program, state_bytes: float) -> None:
        self.program, self.mesh = program, program.mesh
        self.main = [segment for segment in program.segments if not segment.prologue]
        held = [stored.value for stored in program.stored]
        self.scripts = [script_of(segment.graph, held) for segment in self.main]
        self.stored = {stored.value: stored for stored in program.stored}
        self.homes = homes(program)
        self.units = {home: self._unit(home) for home in (*range(len(self.main)), -1)}
        self.loose: dict[str, Storage] = {}
        self.reducing: Storage | None = None
        self.gathering: Storage | None = None
        trainable = [self._rest(s) for s in program.stored if s.trainable]
        self.largest = max(trainable, default=0.0)
        self.heap = Heap({
            "parameters": sum(self._rest(s) * self._rest_itemsize(s) for s in program.stored),
            "optimizer": sum(trainable) * state_bytes,
            "inputs": float(sum(_bytes(port.shape, port.dtype) for port in program.inputs)),
        })

    # parameters

    def _rest_itemsize(self, stored: Stored) -> int:
        master = self.program.compute_dtype is not None and not stored.buffer and stored.dtype == self.program.compute_dtype
        return 4 if master else stored.dtype.itemsize

    def _elements(self, stored: Stored) -> float:
        """Local elements under the program's own split."""
        result = 1.0
        for size, axes in zip(stored.shape, stored.tensor.dims, strict=True):
            result *= ceil_div(size, self.mesh.size(axes))
        return result

    def _gathers(self, stored: Stored) -> bool:
        return stored.trainable and bool(stored.shape) and self.mesh.size(stored.data_axes) > 1

    def _rest(self, stored: Stored) -> float:
        """Elements at rest."""
        return self._elements(stored) / (self.mesh.size(stored.shard_axes) if self._gathers(stored) else 1)

    def _unit(self, home: int) -> _Unit | None:
        members = [s for s in self.program.stored if self.homes.get(s.value) == home and self._gathers(s)]
        if not members:
            return None
        root = home < 0
        zero = min(2, max((s.zero for s in self.main if not s.path), default=1)) if root else self.main[home].zero
        dtype = self.program.compute_dtype or members[0].dtype
        elements = sum(self._elements(s) for s in members)
        return _Unit(elements, self.mesh.size(members[0].shard_axes), dtype.itemsize, zero, root,
                     tuple(s.value for s in members))

    # the step

    def run(self) -> Peak:
        count = self.program.microbatches
        env: dict[str, Storage] = {}
        self._prologue(env)
        outputs: list[Storage] = []
        for index in sorted({0, count - 1}):
            last = index == count - 1
            if last and count > 2:  # what those in between left
                outputs += [self.heap.new(s.bytes * (count - 2), ACTIVATIONS) for s in outputs]
            made = self._microbatch(dict(env), last)
            outputs += made
            if count > 1 and last:
                for storage in outputs:
                    self.heap.space(storage.bytes)  # joined
        for storage in outputs:
            self.heap.drop(storage)
        self.heap.space(2 * 4 * self.largest)  # a square root and its quotient
        return Peak(self.heap.peak, self.heap.at_peak)

    def _prologue(self, env: dict[str, Storage]) -> None:
        for port in self.program.inputs:
            env[port.name] = Storage(0.0, "inputs")
        held = [stored.value for stored in self.program.stored]
        for segment in self.program.segments:
            if segment.prologue:
                _, made = forward(script_of(segment.graph, held), self.heap, env)
                env.update(made)
        for name, _ in self.program.cuts:
            env[name] = env.get(name, Storage(0.0, "inputs"))

    def _microbatch(self, env: dict[str, Storage], last: bool) -> list[Storage]:
        """One micro-batch: the storages of the outputs, which stay."""
        leaving = _leaving(self.program)
        readers = _last_reads(self.main, leaving)
        self._gather(self.units[-1])
        casts = [self._cast(-1)]
        tapes: list[Tape] = []
        for index, (segment, script) in enumerate(zip(self.main, self.scripts, strict=True)):
            unit = self.units[index]
            self._gather(unit)
            cast = self._cast(index)
            tape, made = forward(script, self.heap, env, segment.recompute)
            if segment.recompute == "none":
                casts.append(hold(cast))
            self.heap.drop(cast)
            tapes.append(tape)
            env.update(made)
            for name in readers[index]:
                if name in env:
                    self.heap.drop(env.pop(name))
            if unit is not None and unit.frees:
                self._free(unit)
        self._done(self.gathering)
        self.gathering = None
        grads: dict[str, Storage] = {}
        if self.program.loss is not None:
            grads[self.program.loss] = self.heap.new(4.0, WORK)
        self._prefetch(len(self.main))
        for index in reversed(range(len(self.main))):
            unit = self.units[index]
            if unit is not None and unit.frees:
                self._gather(unit, forward=False)
                self._prefetch(index)
            self._backward(index, tapes[index], grads)
            if unit is not None:
                self._reduce(unit, last)
            if self.main[index].recompute == "none":
                self.heap.drop(casts.pop())
        self.heap.drop(casts.pop())
        for storage in grads.values():
            self.heap.drop(storage)
        if self.units[-1] is not None:
            self._reduce(self.units[-1], last)
        if last:
            self._done(self.reducing)
            self.reducing = None
        return [env.pop(name) for name in leaving if name in env and name not in self.stored]

    def _backward(self, index: int, tape: Tape, grads: dict[str, Storage]) -> None:
        weights: dict[str, Storage] = {}
        names = {param.value for param in self.main[index].graph.params}
        for name in names | set(self.main[index].graph.inputs):
            if name in self.stored:
                known = self._sums(name)
                if name in known:
                    weights[name] = known[name]
        split = frozenset(n for n in names if n in self.stored and self.stored[n].tensor.split_axes)
        backward(tape, self.heap, grads, weights, split)
        for name, storage in weights.items():
            self._sums(name)[name] = storage

    def _sums(self, name: str) -> dict[str, Storage]:
        """Where a parameter's gradient is summed."""
        unit = self.units.get(self.homes.get(name, -1))
        return unit.weights if unit is not None and name in unit.names else self.loose

    def _cast(self, home: int) -> Storage:
        """Copies in the compute dtype of the parameters that FSDP2 does not gather."""
        dtype = self.program.compute_dtype
        loose = [s for s in self.program.stored if self.homes.get(s.value) == home and not self._gathers(s) and not s.buffer]
        sizes = [self._elements(s) * dtype.itemsize for s in loose if dtype is not None and s.dtype.is_floating_point]
        return self.heap.new(sum(sizes), GATHERED)

    # what FSDP2 does

    def _gather(self, unit: _Unit | None, forward: bool = True) -> None:
        if unit is None or unit.whole is not None:
            return
        size = unit.elements * unit.itemsize
        if unit.shards > 1:
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

    def _start(self, unit: _Unit) -> Storage:
        """An all-gather begun; its input in the compute dtype is a copy."""
        copy = self.heap.new(unit.elements / unit.shards * unit.itemsize if unit.itemsize < _REDUCED else 0.0, WORK)
        incoming = self.heap.new(unit.elements * unit.itemsize, GATHERED)
        self.heap.drop(copy)
        return incoming

    def _prefetch(self, index: int) -> None:
        """The unit ahead of this one in the backward begins its gather."""
        ahead = next((u for u in (self.units[i] for i in reversed(range(index))) if u is not None), None)
        if ahead is not None and ahead.frees and ahead.whole is None and ahead.shards > 1:
            ahead.incoming = self._start(ahead)

    def _free(self, unit: _Unit) -> None:
        if unit.whole is not None:
            self.heap.drop(unit.whole)
            unit.whole = None

    def _done(self, buffer: Storage | None) -> None:
        """A collective's buffer is let go."""
        if buffer is not None:
            self.heap.drop(buffer)

    def _reduce(self, unit: _Unit, last: bool) -> None:
        """After a unit's backward: its gradients reduced, or kept whole for a later micro-batch."""
        if last or unit.zero == 3:
            self._free(unit)
        if not (last or unit.zero >= 2):
            for storage in unit.weights.values():
                if storage.bytes and unit.itemsize < _REDUCED and storage.kind == GRADIENTS:
                    self._widen(unit, storage)
            return
        self._done(self.reducing)
        self.reducing = self.heap.new(unit.elements * _REDUCED, WORK)
        for storage in unit.weights.values():
            self.heap.drop(storage)
        unit.weights.clear()
        piece = self.heap.new(unit.elements / unit.shards * _REDUCED, GRADIENTS)
        self.heap.space(unit.elements * _REDUCED if unit.shards == 1 else 0.0)
        if unit.piece is None:
            unit.piece = piece
        else:
            self.heap.drop(piece)

    def _widen(self, unit: _Unit, storage: Storage) -> None:
        """A gradient in the compute dtype becomes one in fp32, or is added to it."""
        name = next(name for name, other in unit.weights.items() if other is storage)
        wide = self.heap.new(storage.bytes / unit.itemsize * _REDUCED, GRADIENTS)
        self.heap.drop(storage)
        unit.weights[name] = wide


def homes(program: Program) -> dict[str, int]:
    """{stored value: index among the segments after the prologue of the one block that reads it, else -1}. What nobody reads is
    left out."""
    found: dict[str, int] = {}
    stored = {s.value for s in program.stored}
    main = [segment for segment in program.segments if not segment.prologue]
    for index, segment in enumerate(main):
        for name in (*(param.value for param in segment.graph.params), *segment.graph.inputs):
            if name in stored:
                own = name not in found and bool(segment.path) and name not in segment.graph.inputs
                found[name] = index if own else -1
    found.update((name, -1) for name in _leaving(program) if name in found)
    return found


def _leaving(program: Program) -> list[str]:
    """Values that the program hands back."""
    names = [*(port.name for port in program.outputs), *(ref.name for ref in refs(program.output_tree))]
    return list(dict.fromkeys([*names, *(new for _, new in program.mutations), *([program.loss] if program.loss else [])]))


def _last_reads(main: Sequence[Segment], leaving: Sequence[str]) -> list[list[str]]:
    """For every segment the values of the environment that no later one reads."""
    needed, result = set(leaving), []
    for segment in reversed(main):
        names = {*segment.graph.inputs, *segment.graph.outputs}
        result.append(sorted(names - needed))
        needed |= set(segment.graph.inputs)
    return result[::-1]


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
