"""A rank of a pipeline runs the actions of its schedule: what is alive between them, on the heap of ``peak``.

Every stage is a program of its own (``fsdp.Part``), with as many micro-batches alive as the order has in flight:

    F    what entered and (by copy) what leaves stays until the backward
    B    receives the gradients of the latter and sends those of the former
    I    as B; but what the forward kept, and the gradients that reach the operators that read weights, stay until
    W    which makes the weights' gradients (``replay.backward``), each of which is added to its sum when it is made, but in a
         stage that has all of its backward there: then as behind a B, when those of its block are all there. FSDP2 reduces
         the sums once, when the schedule is done

The rank of the last stage holds what the epilogue collects, as a rank without a pipeline does. What runs ahead of the schedule
keeps nothing for a backward; where a rank has several stages, what it sends of all micro-batches lies there to its end.

What comes from another rank lies there from where its receive stands on (``Table.steps``); what one stage of a rank hands to
another of the same rank is received without memory of its own (``PipelineRank.handed``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from meshwright.cost.memory.epilogue import Epilogue
from meshwright.cost.memory.fsdp import Batch, RootUnit, Software, at_rest, gathers, rest_itemsize
from meshwright.cost.memory.replay import ACTIVATIONS, WORK, Half, Heap, Storage, comes_late, hold
from meshwright.ir.graph import Value
from meshwright.ir.mesh import PP
from meshwright.ir.program import Program, Segment
from meshwright.ir.schedules import Action, Table, schedule_of


class PipelineRank:
    """A step of a rank of a pipeline: the actions of its schedule, of a step with as many micro-batches as fill it. ``collect``
    takes what a micro-batch hands back."""

    def __init__(
        self, program: Program, heap: Heap, collect: Callable[[Mapping[str, Storage]], None], software: Software
    ) -> None:
        assert program.stages is not None
        self.software = software
        self.program, self.stages, self.heap, self.collect = program, program.stages, heap, collect
        self.rank = program.mesh.coordinates(program.rank)[PP]
        mine = [stage for stage, at in enumerate(self.stages.stage_rank) if at == self.rank]
        self.late = {name for segment in program.segments if segment.epilogue for name in segment.graph.outputs}
        self.epilogue: Epilogue | None = None
        self.parts = {stage: self._part(stage, first=stage == mine[0]) for stage in mine}
        moving = {stage: {name for script in part.scripts for name in script.moving} for stage, part in self.parts.items()}
        # torch leaves all to W where no gradient goes back, as in the first stage
        self.apart = {stage for stage in mine if moving[stage].isdisjoint(value.name for value in self._leaving(stage))}
        for part in self.parts.values():  # a weight of two stages that FSDP2 does not take is one, and has one gradient
            part.loose, part.settled = self.parts[mine[0]].loose, self.parts[mine[0]].settled
        for stage in mine if software.kept_logits else ():  # buffers of such an engine that it receives into
            entering = self.stages.crossing[stage - 1] if stage else ()
            gradients = self._leaving(stage) if stage < self.stages.last else ()
            for values in (entering, gradients):
                heap.new(float(sum(value.bytes_ for value in values)), ACTIVATIONS)
        for stored in program.stored:  # a weight of two stages that FSDP2 takes is there twice
            more = sum(stored.value in part.stored for part in self.parts.values()) - 1
            if more > 0 and gathers(stored, program.mesh):
                self.heap.new(more * at_rest(stored, program.mesh) * rest_itemsize(stored, program), "parameters")
        self.env: Mapping[str, Storage] = {}
        self.batches: dict[tuple[int, int], Batch] = {}
        self.held: dict[tuple[int, int], list[Storage]] = {}  # from F to the end of the backward
        self.handed: dict[tuple[int, int, bool], dict[str, Storage]] = {}  # to a stage, until it reads it; True: gradients

    def _part(self, stage: int, first: bool) -> RootUnit:
        """As ``runtime.pipeline.pipeline`` shares a program out."""
        program, stages = self.program, self.stages
        main = [s for s in program.segments if s.repeated and s.stage == stage]
        aside = [name for name, at in stages.made.items() if at == stage and name not in self.late]
        collected = [one.value for one in program.collected]
        crossing = [value.name for value in stages.crossing[stage]] if stage < stages.last else [program.loss or "", *collected]
        leaving = list(dict.fromkeys([*aside, *crossing]))
        read = {name for s in main for name in _reads(s)} | set(leaving)
        if first:
            everywhere = {name for s in program.segments for name in _reads(s)}
            read |= {name for s in program.segments if s.prologue for name in _reads(s)}
            read |= {s.value for s in program.stored} - everywhere
        share = replace(program, stored=tuple(s for s in program.stored if s.value in read))
        return RootUnit(share, main, leaving, self.heap, self.software, shares=True, apart=self.stages.table.split)

    def run(self, env: Mapping[str, Storage]) -> None:
        """``env``: what every micro-batch finds, storages by value."""
        table = shortest(self.stages.table)
        self.env = env
        self._look_ahead()
        if self.program.collected and self.stages.last in self.parts:
            self.epilogue = Epilogue(self.program, self.heap)
            self.epilogue.back(env)
        for action in table.steps[self.rank]:
            self._run(action, last=action.microbatch == table.microbatches - 1)
        if self.stages.table.split:
            for part in self.parts.values():
                part.reduce()
        for part in self.parts.values():
            part.end()
        if self.epilogue is not None:
            self.collect(self.epilogue.end(env))

    def _look_ahead(self) -> None:
        """What is sent before the schedule; with one stage a rank it is no more than what comes after."""
        if len(self.parts) > 1 and any(one.ahead for one in self.program.collected):
            sent = (value.bytes_ for stage in self.parts if stage < self.stages.last for value in self.stages.crossing[stage])
            self.heap.space(float(sum(sent)) * self.program.microbatches)

    def _run(self, action: Action, last: bool) -> None:
        stage, kind, microbatch = action
        key = stage, microbatch
        if kind == "RECV_F":
            entering = self.stages.crossing[stage - 1]
            self.handed[*key, False] = {v.name: self.heap.new(float(v.bytes_), ACTIVATIONS) for v in entering}
        elif kind == "RECV_B":
            self.handed[*key, True] = {v.name: self.heap.new(float(v.bytes_), WORK) for v in self._leaving(stage)}
        elif kind.startswith("SEND"):
            return  # a copy that is there until the backward
        elif kind == "F":
            self._forward(stage, microbatch)
        elif kind == "I" and stage in self.apart:
            self.held[key] += self._received(stage, microbatch).values()
        elif kind == "W":
            whole = stage in self.apart
            grads = {v.name: Storage(0.0, WORK) for v in self._leaving(stage)} if whole else {}
            self._backward(stage, microbatch, grads, last, "both" if whole else "weights")
        else:
            self._backward(stage, microbatch, self._received(stage, microbatch), last, "both" if kind == "B" else "inputs")

    def _near(self, stage: int, other: int) -> bool:
        return self.stages.stage_rank[stage] == self.stages.stage_rank[other]

    def _leaving(self, stage: int) -> list[Value]:
        """What takes a gradient of what a stage hands on."""
        if stage < self.stages.last:
            return [value for value in self.stages.crossing[stage] if value.differentiable]
        return [Value(self.program.loss, (), torch.float32, True)] if self.program.loss else []

    def _received(self, stage: int, microbatch: int) -> dict[str, Storage]:
        """Gradients of what a stage handed on, or of what is collected of a micro-batch of the last."""
        if stage == self.stages.last and self.epilogue is not None and self.epilogue.makes_the_loss:
            return self.epilogue.gradients()
        handed = self.handed.pop((stage, microbatch, True), None)
        return handed or {v.name: self.heap.new(float(v.bytes_), WORK) for v in self._leaving(stage)}

    def _forward(self, stage: int, microbatch: int) -> None:
        stages, entered = self.stages, dict[str, Storage]()
        if stage:
            entered = self.handed.pop((stage, microbatch, False))
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
        if self.software.plain_collectives:
            comes_late(*entered.values(), *copies.values())
        aside = {name: storage for name, storage in batch.outputs.items() if stages.made.get(name) == stage}
        for name, storage in batch.outputs.items():
            if name not in aside:
                self.heap.drop(storage)
        self.collect(aside)
        batch.outputs = {}
        self.batches[stage, microbatch] = batch
        self.held[stage, microbatch] = [*entered.values(), *copies.values()]

    def _backward(self, stage: int, microbatch: int, grads: dict[str, Storage], last: bool, half: Half) -> None:
        key, split = (stage, microbatch), self.stages.table.split
        received = [hold(storage) for storage in grads.values()]
        self.parts[stage].backward(self.batches[key], grads, last, reduces=not split, half=half)
        if half != "inputs":
            del self.batches[key]
            received += self.held.pop(key)
        for storage in received:
            self.heap.drop(storage)
        entered = {value.name for value in self.stages.crossing[stage - 1]} if stage else set()
        hands = half != "weights" and stage > 0 and self._near(stage, stage - 1)
        kept = {name: grads.pop(name) for name in list(grads) if hands and name in entered}
        if hands:
            self.handed[stage - 1, microbatch, True] = kept
        for storage in grads.values():
            self.heap.drop(storage)


def shortest(table: Table) -> Table:
    """The table of the same schedule with the fewest micro-batches of those tried with which every rank holds as many at once:
    what comes after repeats what was. They are more than there are ranks by two at least, so that every rank runs a backward
    that finds gradients there while it holds as many as ever; where it has several stages, a round more, so that each meets
    each other's."""
    schedule, virtual = schedule_of(table.name), table.stages // table.pp
    in_turn = table.microbatches // max(1, table.microbatches // table.pp)
    few = {table.pp + 2, 2 * table.pp, 2 * in_turn} if virtual == 1 else {3 * table.pp, 3 * in_turn}
    for count in sorted({*few, 4 * table.pp, 4 * in_turn}):
        if count < table.microbatches and schedule.illegal(table.pp, virtual, count) is None:
            short = schedule.table(table.pp, virtual, count)
            if all(np.array_equal(one, other) for one, other in zip(short.in_flight, table.in_flight, strict=True)):
                return short
    return table


def _reads(segment: Segment) -> set[str]:
    return {*segment.graph.inputs, *(param.value for param in segment.graph.params)}
