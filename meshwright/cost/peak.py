"""The peak of a training step on one rank, from the program that the rank runs: what is alive at the worst moment.

    standing        parameters and buffers at rest, optimizer state, the batch
    + activations   kept by autograd for the backwards to come, and what the program hands back
    + gradients     of the parameters so far
    + gathered      parameters that FSDP2 has gathered, in the compute dtype
    + transient     gradients of activations, work space, communication buffers, the optimizer's temporaries

The steps of one micro-batch are replayed in the order in which they run (``replay``): its segments forward, then backward,
around each unit of parameters what FSDP2 allocates (torch 2.13, the reshard and reduce rules of ``runtime.engine``). Of several
micro-batches the first and the last are replayed: the last finds all gradients that the others left. Outputs of a step that are
joined along a dim lie there whole from the first micro-batch on.

A rank of a pipeline runs the actions of its schedule instead (``stages``): every stage is a program of its own, with as many
micro-batches alive as the order has in flight. What entered and (by copy) what leaves stays until the backward, which receives
gradients of the latter and sends those of the former. Of a split backward all that the forward kept stays until W.

FSDP2, per unit of N elements over s ranks, c bytes in compute, 4 in reductions:

    gather     N c to communicate, then N c in place; in the forward the former stays until the next unit's gather,
               in the backward the unit ahead is gathered early. With s = 1 a copy is made all the same.
    reduce     4 N to communicate, which stays until the next unit reduces, and 4 N / s for the result

Not seen here: the allocator's fragmentation, the libraries' own work spaces, the CUDA context (``Device.reserve_bytes``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from meshwright.cost.replay import ACTIVATIONS, GRADIENTS, WORK, Heap, Storage, Tape, backward, forward, hold, script_of
from meshwright.cost.schedules import SPLIT_BACKWARD, illegal, schedule_table
from meshwright.cost.table import Action
from meshwright.graph import Graph, Value, refs
from meshwright.mesh import PP, Mesh
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
    return (_Alone(program, state_bytes) if program.stages is None else _Staged(program, state_bytes)).run()


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
    wide: dict[str, Storage] = field(default_factory=dict)  # gradients of micro-batches so far, in fp32 where they were not
    piece: Storage | None = None

    @property
    def frees(self) -> bool:
        """Whether it is gathered anew for every forward and backward."""
        return self.zero == 3 and not self.root


@dataclass
class _Batch:
    """A micro-batch between its forward and its backward: what each segment left, copies of parameters, outputs."""

    tapes: list[Tape]
    casts: list[Storage]
    outputs: dict[str, Storage]


class _Part:
    """Segments that one root unit holds together: a program, or a stage of it. ``leaving``: the values that it hands back."""

    def __init__(self, program: Program, main: Sequence[Segment], leaving: Sequence[str], heap: Heap) -> None:
        self.program, self.mesh, self.main, self.leaving, self.heap = program, program.mesh, main, leaving, heap
        held = [stored.value for stored in program.stored]
        self.scripts = [script_of(segment.graph, held) for segment in self.main]
        self.stored = {stored.value: stored for stored in program.stored}
        self.homes = _homes(program.stored, main, leaving)
        self.units = {home: self._unit(home) for home in (*range(len(self.main)), -1)}
        self.readers = _last_reads(main, leaving)
        self.loose: dict[str, Storage] = {}
        self.reducing: Storage | None = None
        self.gathering: Storage | None = None

    # parameters

    def _unit(self, home: int) -> _Unit | None:
        members = [s for s in self.program.stored if self.homes.get(s.value) == home and _gathers(s, self.mesh)]
        if not members:
            return None
        root = home < 0
        zero = min(2, max((s.zero for s in self.main if not s.path), default=1)) if root else self.main[home].zero
        dtype = self.program.compute_dtype or members[0].dtype
        elements = sum(_elements(s, self.mesh) for s in members)
        return _Unit(elements, self.mesh.size(members[0].shard_axes), dtype.itemsize, zero, root,
                     tuple(s.value for s in members))

    # a micro-batch

    def forward(self, env: dict[str, Storage]) -> _Batch:
        """``env``: storages by value, held once for this; what leaves is held by the result."""
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
            for name in self.readers[index]:
                if name in env:
                    self.heap.drop(env.pop(name))
            if unit is not None and unit.frees:
                self._free(unit)
        self._done(self.gathering)
        self.gathering = None
        return _Batch(tapes, casts, {name: env.pop(name) for name in self.leaving if name in env and name not in self.stored})

    def backward(self, batch: _Batch, grads: dict[str, Storage], last: bool, reduces: bool = True) -> None:
        """``grads``: of what leaves, taken; of what entered, added. ``last``: of the step; without ``reduces`` FSDP2 reduces
        and frees nothing (``reduce``)."""
        self._prefetch(len(self.main))
        for index in reversed(range(len(self.main))):
            unit = self.units[index]
            if unit is not None and unit.frees:
                self._gather(unit, forward=False)
                self._prefetch(index)
            self._backward(index, batch.tapes[index], grads)
            if unit is not None and reduces:
                self._reduce(unit, last)
            if self.main[index].recompute == "none":
                self.heap.drop(batch.casts.pop())
        self.heap.drop(batch.casts.pop())
        if reduces and self.units[-1] is not None:
            self._reduce(self.units[-1], last)
        if last and reduces:
            self._done(self.reducing)
            self.reducing = None

    def reduce(self) -> None:
        """All that no backward reduced."""
        for unit in reversed([unit for unit in self.units.values() if unit is not None]):
            self._reduce(unit, last=True)
        self._done(self.reducing)
        self.reducing = None

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
        own = [s for s in self.program.stored if self.homes.get(s.value) == home]
        loose = [s for s in own if not _gathers(s, self.mesh) and not s.buffer]
        sizes = [_elements(s, self.mesh) * dtype.itemsize for s in loose if dtype is not None and s.dtype.is_floating_point]
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
            if unit.itemsize < _REDUCED:
                self._widen(unit)
            return
        self._done(self.reducing)
        self.reducing = self.heap.new(unit.elements * _REDUCED, WORK)
        for storage in (*unit.weights.values(), *unit.wide.values()):
            self.heap.drop(storage)
        unit.weights.clear()
        unit.wide.clear()
        piece = self.heap.new(unit.elements / unit.shards * _REDUCED, GRADIENTS)
        self.heap.space(unit.elements * _REDUCED if unit.shards == 1 else 0.0)
        if unit.piece is None:
            unit.piece = piece
        else:
            self.heap.drop(piece)

    def _widen(self, unit: _Unit) -> None:
        """A micro-batch's gradients in the compute dtype become fp32, or are added to what is."""
        for name, storage in unit.weights.items():
            if name not in unit.wide and storage.bytes:
                unit.wide[name] = self.heap.new(storage.bytes / unit.itemsize * _REDUCED, GRADIENTS)
            self.heap.drop(storage)
        unit.weights.clear()


class _Alone:
    """A step of a program without a pipeline."""

    def __init__(self, program: Program, state_bytes: float) -> None:
        self.program, self.heap = program, _standing(program, state_bytes)
        self.part = _Part(program, [s for s in program.segments if not s.prologue], _leaving(program), self.heap)
        self.joined = _Joined(program, self.heap)

    def run(self) -> Peak:
        program, count = self.program, self.program.microbatches
        env = _prologue(program, self.heap)
        for index in sorted({0, count - 1}):
            batch = self.part.forward({name: hold(storage) if count > 1 else storage for name, storage in env.items()})
            grads = {program.loss: self.heap.new(4.0, WORK)} if program.loss is not None else {}
            self.part.backward(batch, grads, last=index == count - 1)
            for storage in grads.values():
                self.heap.drop(storage)
            self.joined.add(batch.outputs)
        return self.joined.end(_largest(program))


class _Staged:
    """A step of a rank of a pipeline: the actions of its schedule, of a step with as many micro-batches as fill it."""

    def __init__(self, program: Program, state_bytes: float) -> None:
        assert program.stages is not None
        self.program, self.stages = program, program.stages
        self.rank = program.mesh.coordinates(program.rank)[PP]
        self.heap = _standing(program, state_bytes)
        self.joined = _Joined(program, self.heap)
        mine = [stage for stage, at in enumerate(self.stages.stage_rank) if at == self.rank]
        self.parts = {stage: self._part(stage, first=stage == mine[0]) for stage in mine}
        for stored in program.stored:  # a weight of two stages that FSDP2 takes is there twice
            again = sum(stored.value in part.stored for part in self.parts.values()) - 1
            if again > 0 and _gathers(stored, program.mesh):
                self.heap.new(again * _rest(stored, program.mesh) * _rest_itemsize(stored, program), "parameters")
        self.env: dict[str, Storage] = {}
        self.batches: dict[tuple[int, int], _Batch] = {}
        self.held: dict[tuple[int, int], list[Storage]] = {}  # from F to the end of the backward
        self.handed: dict[tuple[int, int, bool], dict[str, Storage]] = {}  # to a stage of this rank; True: gradients

    def _part(self, stage: int, first: bool) -> _Part:
        """As ``runtime.pipeline`` shares a program out."""
        program, stages = self.program, self.stages
        main = [s for s in program.segments if not s.prologue and s.stage == stage]
        aside = [name for name, at in stages.made.items() if at == stage]
        crossing = [value.name for value in stages.crossing[stage]] if stage < stages.last else [program.loss or ""]
        leaving = list(dict.fromkeys([*aside, *crossing]))
        read = {name for s in main for name in _reads(s)} | set(leaving)
        if first:
            everywhere = {name for s in program.segments for name in _reads(s)}
            read |= {name for s in program.segments if s.prologue for name in _reads(s)}
            read |= {s.value for s in program.stored} - everywhere
        share = replace(program, stored=tuple(s for s in program.stored if s.value in read))
        return _Part(share, main, leaving, self.heap)

    def run(self) -> Peak:
        stages, ranks = self.stages, max(self.stages.stage_rank) + 1
        virtual, count = (stages.last + 1) // ranks, self.program.microbatches
        per_round = count // max(1, count // ranks)
        legal = (n for n in (2 * per_round, 2 * ranks) if illegal(stages.schedule, ranks, virtual, n) is None)
        few = count if stages.schedule == "gpipe" else min(count, *legal)
        self.env = _prologue(self.program, self.heap)
        for action in schedule_table(stages.schedule, ranks, virtual, few).ranks[self.rank]:
            self._run(action, last=action.microbatch == few - 1)
        if stages.schedule in SPLIT_BACKWARD:
            for part in self.parts.values():
                part.reduce()
        return self.joined.end(_largest(self.program))

    def _run(self, action: Action, last: bool) -> None:
        stage, kind, microbatch = action
        key = stage, microbatch
        if kind == "F":
            self._forward(stage, microbatch)
        elif kind == "I":
            self.held[key] += self._received(stage, microbatch).values()
            if stage:  # gradients of what reads weights wait for W; torch leaves all of the first stage to W
                self.held[key].append(self.heap.new(sum(_weighed(s.graph) for s in self.parts[stage].main), WORK))
            made = {v.name: self.heap.new(float(v.bytes_), WORK) for v in self._leaving(stage - 1)} if stage else {}
            if stage and self._near(stage, stage - 1):
                self.handed[stage - 1, microbatch, True] = made
            else:
                for storage in made.values():
                    self.heap.drop(storage)
        else:
            grads = self._received(stage, microbatch) if kind == "B" else {}
            if kind == "W":
                grads = {v.name: Storage(0.0, WORK) for v in self._leaving(stage)}
            self._backward(stage, microbatch, grads, last, kind)

    def _near(self, stage: int, other: int) -> bool:
        return self.stages.stage_rank[stage] == self.stages.stage_rank[other]

    def _leaving(self, stage: int) -> list[Value]:
        """What takes a gradient of what a stage hands on."""
        if stage < self.stages.last:
            return [value for value in self.stages.crossing[stage] if value.differentiable]
        return [Value(self.program.loss, (), torch.float32, True)] if self.program.loss else []

    def _received(self, stage: int, microbatch: int) -> dict[str, Storage]:
        """Gradients of what a stage handed on."""
        handed = self.handed.pop((stage, microbatch, True), None)
        return handed or {v.name: self.heap.new(float(v.bytes_), WORK) for v in self._leaving(stage)}

    def _forward(self, stage: int, microbatch: int) -> None:
        stages, entered = self.stages, dict[str, Storage]()
        if stage:
            handed = self.handed.pop((stage, microbatch, False), None)
            entered = handed or {v.name: self.heap.new(float(v.bytes_), ACTIVATIONS) for v in stages.crossing[stage - 1]}
        env = {name: hold(storage) for name, storage in {**self.env, **entered}.items()}
        batch = self.parts[stage].forward(env)
        for name in entered:
            if name in env and name not in batch.outputs:
                self.heap.drop(env.pop(name))
        copies: dict[str, Storage] = {}
        if stage < stages.last:
            copies = {v.name: self.heap.new(float(v.bytes_), ACTIVATIONS) for v in stages.crossing[stage]}
            if self._near(stage, stage + 1):
                self.handed[stage + 1, microbatch, False] = {name: hold(copy) for name, copy in copies.items()}
        aside = {name: storage for name, storage in batch.outputs.items() if stages.made.get(name) == stage}
        for name, storage in batch.outputs.items():
            if name not in aside:
                self.heap.drop(storage)
        self.joined.add(aside)
        batch.outputs = {}
        self.batches[stage, microbatch] = batch
        self.held[stage, microbatch] = [*entered.values(), *copies.values()]

    def _backward(self, stage: int, microbatch: int, grads: dict[str, Storage], last: bool, kind: str) -> None:
        split = self.stages.schedule in SPLIT_BACKWARD
        received = [hold(storage) for storage in grads.values()]
        self.parts[stage].backward(self.batches.pop((stage, microbatch)), grads, last, reduces=not split)
        for storage in (*received, *self.held.pop((stage, microbatch))):
            self.heap.drop(storage)
        entered = {value.name for value in self.stages.crossing[stage - 1]} if stage else set()
        hands = kind == "B" and stage > 0 and self._near(stage, stage - 1)
        kept = {name: grads.pop(name) for name in list(grads) if hands and name in entered}
        if hands:
            self.handed[stage - 1, microbatch, True] = kept
        for storage in grads.values():
            self.heap.drop(storage)


class _Joined:
    """What a step hands back, over its micro-batches."""

    def __init__(self, program: Program, heap: Heap) -> None:
        self.heap, self.count = heap, program.microbatches
        self.how = {port.name: port.time for port in program.outputs}
        self.values: dict[str, Storage] = {}

    def add(self, outputs: Mapping[str, Storage]) -> None:
        """Of a micro-batch, given away."""
        for name, storage in outputs.items():
            along = isinstance(self.how.get(name), int) and self.count > 1
            known = self.values.get(name)
            if known is not None and not along:
                self.heap.drop(known)
            if not along:
                self.values[name] = storage
                continue
            if known is None:
                self.values[name] = self.heap.new(storage.bytes * self.count, ACTIVATIONS)
            self.heap.drop(storage)

    def end(self, largest: float) -> Peak:
        """The caller lets go of them; the optimizer runs."""
        for storage in self.values.values():
            self.heap.drop(storage)
        self.heap.space(2 * 4 * largest)  # a square root and its quotient
        return Peak(self.heap.peak, self.heap.at_peak)


def _standing(program: Program, state_bytes: float) -> Heap:
    """What is there all the time."""
    rest = {s.value: _rest(s, program.mesh) for s in program.stored}
    return Heap({
        "parameters": sum(rest[s.value] * _rest_itemsize(s, program) for s in program.stored),
        "optimizer": sum(rest[s.value] for s in program.stored if s.trainable) * state_bytes,
        "inputs": float(sum(_bytes(port.shape, port.dtype) for port in program.inputs)),
    })


def _largest(program: Program) -> float:
    return max((_rest(s, program.mesh) for s in program.stored if s.trainable), default=0.0)


def _rest_itemsize(stored: Stored, program: Program) -> int:
    master = program.compute_dtype is not None and not stored.buffer and stored.dtype == program.compute_dtype
    return 4 if master else stored.dtype.itemsize


def _elements(stored: Stored, mesh: Mesh) -> float:
    """Local elements under the program's own split."""
    result = 1.0
    for size, axes in zip(stored.shape, stored.tensor.dims, strict=True):
        result *= ceil_div(size, mesh.size(axes))
    return result


def _gathers(stored: Stored, mesh: Mesh) -> bool:
    return stored.trainable and bool(stored.shape) and mesh.size(stored.data_axes) > 1


def _rest(stored: Stored, mesh: Mesh) -> float:
    """Elements at rest."""
    return _elements(stored, mesh) / (mesh.size(stored.shard_axes) if _gathers(stored, mesh) else 1)


def _prologue(program: Program, heap: Heap) -> dict[str, Storage]:
    """What every micro-batch finds: inputs and their pieces, and what the prologue makes."""
    env = {port.name: Storage(0.0, "inputs") for port in program.inputs}
    held = [stored.value for stored in program.stored]
    for segment in program.segments:
        if segment.prologue:
            _, made = forward(script_of(segment.graph, held), heap, env)
            env.update(made)
    for name, _ in program.cuts:
        env[name] = env.get(name, Storage(0.0, "inputs"))
    return env


def _weighed(graph: Graph) -> float:
    """Bytes of what operators make that read weights."""
    weights = {param.value for param in graph.params}
    ops = [op for op in graph.ops if weights.intersection(op.inputs)]
    return float(sum(graph.values[name].bytes_ for op in ops for name in op.outputs if graph.values[name].differentiable))


def _reads(segment: Segment) -> set[str]:
    return {*segment.graph.inputs, *(param.value for param in segment.graph.params)}


def _homes(stored: Sequence[Stored], main: Sequence[Segment], leaving: Sequence[str]) -> dict[str, int]:
    """{stored value: index of the one block that reads it, else -1}. What nobody reads is left out."""
    found: dict[str, int] = {}
    names = {s.value for s in stored}
    for index, segment in enumerate(main):
        for name in (*(param.value for param in segment.graph.params), *segment.graph.inputs):
            if name in names:
                own = name not in found and bool(segment.path) and name not in segment.graph.inputs
                found[name] = index if own else -1
    found.update((name, -1) for name in leaving if name in found)
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
