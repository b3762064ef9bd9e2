"""The peak of a training step on one rank, from the program that the rank runs: what is alive at the worst moment.

    standing        parameters and buffers at rest, optimizer state, the batch
    + activations   kept by autograd for the backwards to come, and what the program hands back
    + gradients     of the parameters so far
    + gathered      parameters that FSDP2 has gathered, in the compute dtype
    + transient     gradients of activations, work space, communication buffers, the optimizer's temporaries

The steps of one micro-batch are replayed in the order in which they run (``replay``): its segments forward, then backward,
around each unit of parameters what FSDP2 allocates (``fsdp``). Of several micro-batches the first and the last are replayed:
the last finds all gradients that the others left; where each reduces its own, one between, too, which finds them and, other
than the last, keeps what is gathered. Outputs of a step that are joined along a dim lie there whole from the first micro-batch
on. A rank of a pipeline runs the actions of its schedule instead (``pipeline_rank``). What the epilogue collects of
the micro-batches lies there while they run, as its gradients do, which are made before them; what runs ahead of them all keeps
nothing for a backward, and is no more than what comes after it.

With the allocator the step is replayed twice: optimizer state is made behind the first one, in what that left.

Not seen here: what the allocator cannot use (unless its ``room`` is given), the libraries' own work spaces, the CUDA context
(``Device.reserve_bytes``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.cost.memory.epilogue import Epilogue, leaving_of
from meshwright.cost.memory.fsdp import OWN, RootUnit, Software, at_rest, rest_itemsize
from meshwright.cost.memory.pipeline_rank import PipelineRank
from meshwright.cost.memory.replay import ACTIVATIONS, WORK, Heap, Storage, forward, hold, script_of
from meshwright.ir.program import Program

_STATE = 4
"""Bytes of an element of optimizer state."""


@dataclass(frozen=True)
class Peak:
    """Bytes per rank at the worst moment of a step, and by kind; ``reserved``: the most that torch's allocator has for them on
    a device of so much room, None if that was not asked for."""

    bytes: float
    kinds: Mapping[str, float]
    reserved: float | None = None


def peak(program: Program, state_bytes: float, software: Software = OWN, room: float | None = None) -> Peak:
    """Of a steady training step of this rank's program. ``state_bytes``: optimizer state per parameter; torch's optimizers
    treat DTensors one after the other, so their temporaries are those of the largest. ``software``: whose step it is;
    ``room``: bytes of a device for which the allocator is replayed, too."""
    heap = _standing(program, state_bytes, room)
    _step(program, heap, software)
    if heap.arena is not None:  # torch's optimizers make their state in their first step, behind the first backward
        states = _states(program, state_bytes, software.flat_state)
        heap.restart(states, states[0] if software.flat_state and states else None)  # whole gradients are gone by then
        _step(program, heap, software)
    return Peak(heap.peak, heap.at_peak, None if heap.arena is None else heap.arena.reserved)


def _step(program: Program, heap: Heap, software: Software) -> None:
    joined = _Joined(program, heap)
    if program.stages is None:
        _alone(program, heap, joined, software)
    else:
        rank = PipelineRank(program, heap, joined.add, software)
        rank.run(_prologue(program, heap))
    joined.end()
    heap.space(2 * max(_states(program, _STATE, software.flat_state), default=0.0))  # a square root and its quotient


def _alone(program: Program, heap: Heap, joined: _Joined, software: Software) -> None:
    """A step of a program without a pipeline."""
    leaving = leaving_of(program)
    handed_on = dict.fromkeys((*leaving, *(one.value for one in program.collected)))
    part = RootUnit(program, [s for s in program.segments if s.repeated], list(handed_on), heap, software)
    env, count = _prologue(program, heap), program.microbatches
    epilogue = Epilogue(program, heap)
    epilogue.back(env)
    each = any(segment.zero >= 2 for segment in part.main)
    for index in sorted({0, min(1, count - 1) * each, count - 1}):
        batch = part.forward({name: hold(storage) if count > 1 else storage for name, storage in env.items()})
        grads = epilogue.gradients() or {name: heap.new(4.0, WORK) for name in [program.loss] if name is not None}
        part.backward(batch, grads, last=index == count - 1)
        for storage in grads.values():
            heap.drop(storage)
        for name in batch.outputs.keys() - set(leaving):
            heap.drop(batch.outputs.pop(name))
        joined.add(batch.outputs)
    joined.add(epilogue.end(env))


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

    def end(self) -> None:
        """The caller lets go of them."""
        for storage in self.values.values():
            self.heap.drop(storage)


def _standing(program: Program, state_bytes: float, room: float | None) -> Heap:
    """What is there all the time."""
    rest = {s.value: at_rest(s, program.mesh) for s in program.stored}
    state = sum(rest[s.value] for s in program.stored if s.trainable) * state_bytes
    return Heap({
        "parameters": sum(rest[s.value] * rest_itemsize(s, program) for s in program.stored),
        "optimizer": state,
        "inputs": float(sum(_bytes(port.shape, port.dtype) for port in program.inputs)),
    }, room, late=state)


def _states(program: Program, state_bytes: float, flat: bool) -> list[float]:
    """Bytes of the tensors of optimizer state, in their order: fp32 ones of every parameter, or of each kind one (``flat``)."""
    kinds = round(state_bytes / _STATE)
    elements = [at_rest(s, program.mesh) for s in program.stored if s.trainable]
    return [bytes_ * _STATE for bytes_ in ([sum(elements)] if flat else elements) for _ in range(kinds)]


def _prologue(program: Program, heap: Heap) -> dict[str, Storage]:
    """What every micro-batch finds: inputs and their pieces, and what the prologue makes."""
    env = {port.name: Storage(0.0, "inputs") for port in program.inputs}
    held = [stored.value for stored in program.stored]
    for segment in program.segments:
        if segment.prologue:
            _, made = forward(script_of(segment.graph, held, program.operators), heap, env)
            env.update(made)
    for name, _ in program.cuts:
        env[name] = env.get(name, Storage(0.0, "inputs"))
    return env


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
