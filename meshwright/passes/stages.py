"""From the program of a whole model to that of one pipeline rank: its stages, and what crosses between stages.

The whole program is lowered, verified and type-checked first: along ``PP`` every rank would compute the same. Cutting then only
leaves things out, and says what must be sent instead:

    crossing[s]   what stages 0..s make and later stages read, in the form in which it was made. A value goes through every
                  stage between, since torch sends to the next stage only. The loss goes on to the last stage. What is made of
                  small parameters by light operators (``declared.again``) is not sent: each stage that reads it makes it again
    prologue      the operators that this rank's stages (or an output) need of it
    epilogue      runs on the rank of the last stage: what it collects of the micro-batches goes on to there
    stored        what this rank's stages and prologue read; a weight read on several ranks is stored on each, and what nobody
                  reads on the rank of the first stage. A rank that would train nothing stores the smallest weight of another:
                  torch's optimizers refuse an empty list
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import torch

from meshwright.ir.graph import Value, refs
from meshwright.ir.mesh import PP
from meshwright.ir.plan import Pipeline, PlanError
from meshwright.ir.program import DEPENDENCY, SEED, Program, Segment, Stages, towards


def cut_stages(program: Program, pipeline: Pipeline | None) -> Program:
    """The part of this rank; the program itself without a pipeline. Raises PlanError for what the schedule cannot run, and for
    a buffer that one stage updates and another rank reads."""
    return program if pipeline is None else _Cut(program, pipeline).part(program.rank)


def cut_for_ranks(program: Program, pipeline: Pipeline, ranks: Iterable[int]) -> Iterator[Program]:
    """``cut_stages`` at several ranks of the mesh, one after the other; what does not depend on the rank is found once."""
    cut = _Cut(program, pipeline)
    return (cut.part(rank) for rank in ranks)


class _Cut:
    """The tables of one cut."""

    def __init__(self, program: Program, pipeline: Pipeline) -> None:
        self.program, self.pipeline = program, pipeline
        self.stored = {item.value for item in program.stored}
        self.main = [segment for segment in program.segments if segment.repeated]
        self.prologue = [segment for segment in program.segments if segment.prologue]
        self.epilogue = [segment for segment in program.segments if segment.epilogue]
        self.made = {name: segment.stage for segment in (*self.main, *self.epilogue) for name in segment.graph.outputs}
        self.reads: list[set[str]] = [set() for _ in pipeline.stage_rank]
        for segment in (*self.main, *self.epilogue):
            self.reads[segment.stage] |= _reads(segment)
        self.reads[-1] |= {one.value for one in program.collected}
        self.leaving = {port.name for port in program.outputs} | {ref.name for ref in refs(program.output_tree)}
        for name in sorted(self.leaving & self.stored):
            self.made[name] = next((s for s, reads in enumerate(self.reads) if name in reads), 0)
            self.reads[self.made[name]].add(name)
        if program.loss in self.made:
            self.reads[-1].add(program.loss)
        self.again = [segment for stage in range(1, pipeline.stages) for segment in self._made_again(stage)]

    def part(self, place: int) -> Program:
        """The program of the rank at this place of the mesh."""
        program, rank = replace(self.program, rank=place), self.program.mesh.coordinates(place)[PP]
        holders = self._holders
        stored = tuple(replace(item, holders=holders[item.value]) for item in program.stored)
        mine = [item for item in stored if rank in item.holders]
        needed = self._needed(rank, {item.value for item in mine})
        own = (s for s in (*self.again, *self.main, *self.epilogue) if self.pipeline.stage_rank[s.stage] == rank)
        segments = (*towards(self.prologue, needed), *own)
        kept, renewed = {item.value for item in mine}, {new for _, new in program.mutations}
        result = replace(
            program, segments=segments, stored=tuple(mine),
            mutations=tuple((old, new) for old, new in program.mutations if old in kept),
            cuts=tuple((name, dim) for name, dim in program.cuts if name in needed),
            constants={name: tensor for name, tensor in program.constants.items() if name in kept},
            stages=Stages(
                self.pipeline.table(program.microbatches), self._crossing,
                {name: s for name, s in self.made.items() if name in self.leaving | renewed}, stored, self._unreached,
            ),
        )
        _check(result)
        return result

    def _made_again(self, stage: int) -> list[Segment]:
        """What a stage runs of earlier ones' segments, to make what it would be sent."""
        wanted = {name for name in self.reads[stage] & self.program.again if self.made.get(name, stage) < stage}
        found = [replace(segment, stage=stage) for segment in towards((s for s in self.main if s.stage < stage), wanted)]
        made = {name for segment in found for name in segment.graph.outputs}
        self.reads[stage] |= {name for segment in found for name in _reads(segment)}
        self.reads[stage] -= made
        return found

    @cached_property
    def _crossing(self) -> tuple[tuple[Value, ...], ...]:
        values = {name: s.graph.values[name] for s in self.main for name in s.graph.outputs}
        result = []
        for s in range(self.pipeline.stages - 1):
            later = set().union(*self.reads[s + 1 :])
            found = [value for name, value in values.items() if self.made[name] <= s and name in later]
            if not any(value.differentiable for value in found):
                found.append(Value(DEPENDENCY, (1,), torch.float32, True))
            result.append(tuple(found))
        return tuple(result)

    def _needed(self, rank: int, held: set[str]) -> set[str]:
        """Names that a rank reads of its prologue, inputs and stored tensors."""
        mine = [reads for reads, at in zip(self.reads, self.pipeline.stage_rank, strict=True) if at == rank]
        prologue = {name for segment in self.prologue for name in segment.graph.outputs}
        renewed = {new for old, new in self.program.mutations if old in held}
        return set().union(*mine) | (self.leaving & prologue) | (renewed & prologue)

    @cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        """{stored value: the ranks along ``PP`` that store it}."""
        at = self.pipeline.stage_rank
        held = [self._read_by(rank, set()) for rank in range(self.pipeline.degree)]
        for old, new in self.program.mutations:
            if not any(old in names for names in held):
                held[at[self.made.get(new, 0)]].add(old)
        held = [names | self._read_by(rank, names) for rank, names in enumerate(held)]
        for old, new in self.program.mutations:
            ranks = {rank for rank, names in enumerate(held) if old in names}
            if new in self.made and ranks != {at[self.made[new]]}:
                name = next(item.fqns[0] for item in self.program.stored if item.value == old)
                raise PlanError(f"buffer {name!r} is updated in stage {self.made[new]} and read on the pipeline ranks "
                                f"{sorted(ranks)}; cut the stages so that one rank does both (pins={{'stage_cuts': [the "
                                f"modules at which stages start]}}), or plan without a pipeline (pins={{'pp': 1}})")
        held[at[0]] |= self.stored - set().union(*held)
        trained = [item for item in self.program.stored if item.trainable]
        for names in held:
            if trained and names.isdisjoint(item.value for item in trained):
                names.add(min(trained, key=lambda item: math.prod(item.shape)).value)
        return {name: tuple(r for r, names in enumerate(held) if name in names) for name in self.stored}

    @cached_property
    def _unreached(self) -> frozenset[str]:
        """Trained parameters to which no gradient of the loss leads."""
        reached, of_micro_batches = {self.program.loss}, {one.whole: one.value for one in self.program.collected}
        for segment in reversed((*self.main, *self.epilogue)):
            for op in reversed(segment.graph.ops):
                if not reached.isdisjoint(op.outputs):
                    flows = (name for name in op.inputs if segment.graph.values[name].differentiable)
                    reached |= {of_micro_batches.get(name, name) for name in flows}
        return frozenset(item.value for item in self.program.stored if item.trainable) - reached

    def _read_by(self, rank: int, held: set[str]) -> set[str]:
        needed = self._needed(rank, held)
        found = needed | {name for segment in towards(self.prologue, needed) for name in _reads(segment)}
        return found & self.stored


def _reads(segment: Segment) -> set[str]:
    return {*segment.graph.inputs, *(param.value for param in segment.graph.params)} - {SEED}


def _check(program: Program) -> None:
    """Every stage finds what it reads and what it hands on: from its own segments, the prologue, or across."""
    assert program.stages is not None
    stages, rank = program.stages, program.mesh.coordinates(program.rank)[PP]
    start = {SEED, DEPENDENCY} | {port.name for port in program.inputs} | {item.value for item in program.stored}
    for segment in program.segments:
        start |= set(segment.graph.outputs) if segment.prologue else set()
    for s in (s for s, at in enumerate(stages.stage_rank) if at == rank):
        known = start | ({value.name for value in stages.crossing[s - 1]} if s else set())
        for segment in program.segments:
            if segment.prologue or segment.stage != s:
                continue
            if segment.epilogue:
                _known({one.value for one in program.collected}, known, "the epilogue")
                known |= {one.whole for one in program.collected}
            _known(_reads(segment), known, f"segment {segment.path!r} of stage {s}")
            known |= set(segment.graph.outputs)
        leaving = {value.name for value in stages.crossing[s]} if s < stages.last else {program.loss} - {None}
        _known({name for name in leaving if name}, known, f"what leaves stage {s}")
        _known({name for name, at in stages.made.items() if at == s}, known, f"the outputs of stage {s}")


def _known(names: set[str], known: set[str], what: str) -> None:
    if missing := sorted(names - known):
        raise PlanError(f"{what} lacks {missing[:3]}: the stages do not fit the graph")

