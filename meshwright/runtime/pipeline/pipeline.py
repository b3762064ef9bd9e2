"""The stages of a rank under torch's pipeline schedules, and what stages do together around them.

    step     prologue, once per rank -> the schedule: every micro-batch through every stage and back -> what stages share ->
             epilogue, on the rank of the last stage
    share    gradients of a weight that several stages read are summed, by every data rank a piece; a weight that the loss does
             not depend on has none; outputs go from the rank that makes them to the others
    stage    what a schedule moves micro-batches through (``runtime.pipeline.stage``)

Where the epilogue makes the loss, micro-batches go back from its gradients in what is collected of them, on the last stage's
rank. What these depend on is made before the schedule, by every micro-batch through the stages without gradients; the last
stage then runs no more than that takes.

The gradients that the schedule computed are handed out by ``step.Release`` when the caller's backward comes.

Outputs: the loss and other numbers are the same on every rank. Other outputs of a training step stay on the ranks of the stage
that makes them, and are an ``Elsewhere`` on others: sending logits around every step costs more than they are asked for.
Without gradients (``eval()``, ``no_grad``) every rank has every output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import InputError
from meshwright.ir.graph import Graph, Value
from meshwright.ir.mesh import PP
from meshwright.ir.program import DEPENDENCY, SEED, Port, Program
from meshwright.ir.sharding import Sharding
from meshwright.runtime import collectives as comm
from meshwright.runtime.assemble import Meshes, assemble
from meshwright.runtime.checks.gradients import BEYOND_THE_LOSS, IN_EVAL, refused
from meshwright.runtime.collectives import Group
from meshwright.runtime.groups import Groups, live
from meshwright.runtime.pipeline.ordered import Ordered
from meshwright.runtime.pipeline.stage import BACK, Stage, StageModule
from meshwright.runtime.state.late import sum_late
from meshwright.runtime.state.layout import local_of
from meshwright.runtime.step import Join, Release, closed, loss_gradients, microbatches_of, seed_of


@dataclass(frozen=True)
class Copy:
    """A weight that two stages of one rank read: FSDP2 gathers it for each of them from a tensor of its own."""

    original: Tensor
    copy: Tensor


def _move_gradient(pair: Copy) -> None:
    """Add the copy's gradient to the original's."""
    grad, pair.copy.grad = pair.copy.grad, None
    if grad is not None and pair.original.grad is not None:
        local_of(pair.original.grad).add_(local_of(grad))
    elif grad is not None:
        pair.original.grad = grad


def _sum(local: Tensor, group: dist.ProcessGroup, replicas: Group) -> None:
    """All-reduce in place what the ranks of ``replicas`` have alike: each a piece, which they then gather."""
    if replicas.size == 1:
        whole = local.contiguous()
        dist.all_reduce(whole, group=group)
    else:
        start, length = comm.own(local.numel(), replicas)
        mine = local.flatten().narrow(0, start, length).contiguous()
        if length:
            dist.all_reduce(mine, group=group)
        whole = comm.gather(mine, 0, local.numel(), replicas).view(local.shape)
    if whole is not local:
        local.copy_(whole)


class PipelineStages:
    """All stages of this rank. ``meshes``: of ``data_meshes``, for the tensors of all stages. ``tensors``: every stored tensor
    of the rank at rest, by value name."""

    def __init__(self, program: Program, groups: Groups, meshes: Meshes) -> None:
        assert program.stages is not None
        assert groups.pipeline is not None
        self.program, self.groups, self.stages, self.group = program, groups, program.stages, groups.pipeline
        self.rank = groups.coordinates[PP]
        self.loss = next((port for port in program.outputs if port.name == program.loss), None)
        self.late = {name for segment in program.segments if segment.epilogue for name in segment.graph.outputs}
        self.values: dict[str, Any] = {}  # of the coming step: its inputs and what the prologue makes
        self.tensors: dict[str, Tensor] = {}
        self.copies: list[Copy] = []
        mine = [stage for stage, at in enumerate(self.stages.stage_rank) if at == self.rank]
        self.parts = [self._part(stage, meshes, first=stage == mine[0]) for stage in mine]
        self.schedule = Ordered([Stage(part, self.stages, self.group) for part in self.parts], self.stages.table)

    def _part(self, stage: int, meshes: Meshes, first: bool) -> StageModule:
        """A stage's share of the program, assembled. The rank's first also runs the prologue, and keeps what nobody reads."""
        program, stages = self.program, self.stages
        segments = tuple(s for s in program.segments if (first if s.prologue else s.stage == stage))
        everywhere = {name for s in program.segments for name in _reads(s.graph)}
        read = {name for s in segments for name in _reads(s.graph)}
        aside = tuple(name for name, at in stages.made.items() if at == stage and name not in self.late)
        read |= set(aside) | (set() if not first else {s.value for s in program.stored} - everywhere)
        enters = stages.crossing[stage - 1] if stage else ()
        if stage < stages.last:
            leaves = stages.crossing[stage]
        else:
            here = [program.loss] if program.loss and program.loss not in self.late else []
            aside = tuple(dict.fromkeys((*aside, *here, *(one.value for one in program.collected))))
            back = BACK if program.loss in self.late else program.loss
            leaves = (Value(str(back), (), self.loss.dtype, True),) if self.loss else ()
        ports = tuple(
            Port(name, (), torch.float32, Sharding.whole(0))
            for name in dict.fromkeys((*aside, *(value.name for value in leaves))) if name not in (DEPENDENCY, BACK)
        )
        share = replace(
            program, segments=segments, stored=tuple(s for s in program.stored if s.value in read), outputs=ports,
            output_tree=(), loss=None, mutations=(), collected=program.collected if stage == stages.last else (),
        )
        engine = assemble(share, self.groups, meshes, self.tensors)
        engine.sum_later(True)
        if stages.table.split:
            engine.split_backward()
        for stored in share.stored:
            known = self.tensors.setdefault(stored.value, engine.tensors[stored.value])
            if known is not engine.tensors[stored.value]:
                self.copies.append(Copy(known, engine.tensors[stored.value]))
        return StageModule(stage, engine, enters, leaves, aside, self.groups.device)

    @property
    def _closes(self) -> StageModule | None:
        """The last stage, on its rank, if there is an epilogue."""
        part = self.parts[-1]
        return part if part.stage == self.stages.last and part.engine.epilogue else None

    def train(self, mode: bool) -> None:
        """Dropout and batch statistics on or off."""
        for part in self.parts:
            part.engine.train(mode)

    def reshard(self) -> None:
        """Free what was gathered."""
        for part in self.parts:
            part.engine.reshard()

    # --- a step --------------------------------------------------------------------------------------------------------

    def begin(self, values: dict[str, Any], seed: tuple[int, int]) -> None:
        """Run the prologue and cut what it made; let copies follow their originals."""
        with torch.no_grad():
            for step in self.parts[0].engine.prologue:
                step(values)
            for pair in self.copies:
                local_of(pair.copy).copy_(local_of(pair.original))
                pair.copy.requires_grad_(pair.original.requires_grad)
        environments, self.values = microbatches_of(self.program, values, seed), values
        for part in self.parts:
            part.begin(environments, Join(self.program))

    def _look_ahead(self) -> None:
        """Make what the micro-batches go back from, where it is not the loss of each."""
        known = self.through(ahead=True) if any(one.ahead for one in self.program.collected) else {}
        part = self._closes
        if part is not None and self.program.loss in self.late:
            part.back_from = loss_gradients(self.program, part.engine.epilogue, self.values, known)

    def _close(self) -> None:
        """Behind the last micro-batch: the epilogue."""
        part, values, self.values = self._closes, self.values, {}
        if part is not None and part.results is not None:
            part.results.values = closed(part.engine, values, part.results)

    def forward_backward(self) -> Tensor:
        """The schedule, and what stages do together after it: every gradient is in place when it returns the loss."""
        self._look_ahead()
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.engine.casts.shared())
            stack.enter_context(torch.enable_grad())
            self.schedule.run()
        self._close()
        for pair in self.copies:
            _move_gradient(pair)
        sum_late({value: group for part in self.parts for value, group in part.engine.late.items()}, self.tensors)
        for stored in self.program.stored:
            parameter = self.tensors[stored.value]
            if stored.value in self.stages.unreached:
                parameter.grad = None  # zeros that came back across for what nobody differentiates
            elif parameter.requires_grad and len(stored.holders) > 1:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                group = self.groups.sharing[stored.holders]
                assert group is not None
                replicas = () if stored.shard_axes else live(self.program.mesh, stored.data_axes)
                _sum(local_of(parameter.grad), group, self.groups.group(replicas))
        port, last = self.loss, self.parts[-1]
        assert port is not None
        mine = last.results.values[port.name] if last.results is not None and last.stage == self.stages.last else None
        return self._from(self.stages.stage_rank[-1], mine, (), port.dtype)

    def forward(self) -> None:
        """A step without gradients."""
        self.through()
        self._close()

    @torch.no_grad()
    def through(self, ahead: bool = False) -> Mapping[str, Tensor]:
        """Every micro-batch through this rank's stages, without gradients. ``ahead``: before a schedule; gives what must be
        known then, on the rank of the last stage.

        Stage by stage, so that a rank is free for its next stage when that has something to do. A stage that sends to the rank
        that it receives from sends when it has seen all micro-batches: sends and receives of two ranks never wait for each
        other, for between them boundary comes after boundary. What was sent is held to the end, for a rank may be at another
        stage; with one stage a rank, none is, so it waits for the transfer before.
        """
        local: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        at, sent, known = self.stages.stage_rank, list[tuple[Any, Tensor]](), Join(self.program)
        for part in self.parts:
            waiting: list[tuple[Tensor, ...]] = []
            at_once = part.stage in (0, self.stages.last) or at[part.stage - 1] != at[part.stage + 1]
            for microbatch in range(self.program.microbatches):
                if part.stage and at[part.stage - 1] == self.rank:
                    entering = local.pop((part.stage, microbatch))
                else:
                    entering = self._receive(part)
                part.microbatch = microbatch
                if ahead and part.stage == self.stages.last:
                    known.add(part.known_ahead(entering), microbatch)
                    continue
                leaving = part(*entering)
                if part.stage == self.stages.last:
                    continue
                if at[part.stage + 1] == self.rank:
                    local[part.stage + 1, microbatch] = leaving
                else:
                    waiting.append(leaving)
                if at_once:
                    if len(at) == len(set(at)):
                        _wait(sent)
                    sent += self._send(part, waiting)
            sent += self._send(part, waiting)
        _wait(sent)
        return known.values

    def _receive(self, part: StageModule) -> tuple[Tensor, ...]:
        buffers = tuple(torch.empty(value.shape, dtype=value.dtype, device=part.device) for value in part.enters)
        source = self.stages.stage_rank[part.stage - 1]
        for work in [dist.irecv(buffer, group=self.group, group_src=source) for buffer in buffers]:
            assert work is not None
            work.wait()
        return buffers

    def _send(self, part: StageModule, waiting: list[tuple[Tensor, ...]]) -> list[tuple[Any, Tensor]]:
        """Send what waits; the tensors live until the returned work is done."""
        to = self.stages.stage_rank[part.stage + 1] if waiting else 0
        works = [(dist.isend(x, group=self.group, group_dst=to), x) for leaving in waiting for x in leaving]
        waiting.clear()
        return works

    # --- outputs -------------------------------------------------------------------------------------------------------

    def outputs(self, values: Mapping[str, Any], everywhere: bool) -> dict[str, Tensor]:
        """Local values of outputs and of buffers' new contents. ``everywhere``: of outputs of other stages too; else only
        numbers, without the loss."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            found |= part.end()
        mesh, made = self.program.mesh, self.stages.made
        for port in self.program.outputs:
            if port.name not in made:
                found[port.name] = values[port.name]
            elif everywhere or not (port.shape or port == self.loss):
                shape = port.sharding.local_shape(port.shape, mesh, self.groups.coordinates)
                source = self.stages.stage_rank[made[port.name]]
                found[port.name] = self._from(source, found.get(port.name), shape, port.dtype)
        return found | {new: values[new] for _, new in self.program.mutations if new not in made}

    def _from(self, source: int, mine: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A value that the source rank of the pipeline has, on all of them."""
        here = torch.empty(shape, dtype=dtype, device=self.groups.device) if mine is None else mine.contiguous()
        dist.broadcast(here, group=self.group, group_src=source)
        return here


def _wait(sent: list[tuple[Any, Tensor]]) -> None:
    """Until it was received; then it is let go."""
    for work, _ in sent:
        work.wait()
    sent.clear()


def _reads(graph: Graph) -> set[str]:
    return {*graph.inputs, *(param.value for param in graph.params)}


def run_pipeline(
    pipeline: PipelineStages, inputs: Mapping[str, Tensor], parameters: Callable[[], Sequence[Tensor]], seed: tuple[int, int],
    training: bool,
) -> dict[str, Tensor]:
    """As ``step.run_step``; outputs that this rank does not have are left out."""
    program = pipeline.program
    learns = torch.is_grad_enabled() and training
    if learns and program.loss is None:
        raise InputError("a pipeline runs the backward together with the forward, so the loss must be part of the program: the "
                         "model's output has none; plan with loss_fn=, or call under torch.no_grad()")
    values: dict[str, Any] = {**inputs, SEED: seed_of(seed, 0)}
    pipeline.begin(values, seed)
    if not learns:
        pipeline.forward()
        pipeline.reshard()
        found = pipeline.outputs(values, everywhere=True)
        return _refusing(found, pipeline, IN_EVAL)
    anchor = torch.zeros((), device=pipeline.groups.device, requires_grad=True)  # a rank may hold nothing that is trained
    loss: Tensor = Release.apply(pipeline.forward_backward, anchor, *parameters())
    assert program.loss is not None
    found = _refusing(pipeline.outputs(values, everywhere=False), pipeline, BEYOND_THE_LOSS)
    return {**found, program.loss: loss}


def _refusing(values: Mapping[str, Tensor], pipeline: PipelineStages, why: str) -> dict[str, Tensor]:
    """Outputs that stages make raise when somebody goes back through them."""
    outputs = {port.name for port in pipeline.program.outputs} & pipeline.stages.made.keys()
    return {name: refused(value, why) if name in outputs else value for name, value in values.items()}
